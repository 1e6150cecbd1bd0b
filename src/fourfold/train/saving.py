"""When checkpoints of a run are saved, and what is told of them: that there is one is said when it is complete."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from torch import nn

from fourfold.checkpoint.folder import CHECKPOINTS
from fourfold.checkpoint.record import RECORD
from fourfold.checkpoint.save import Saver
from fourfold.data.loader import Loader
from fourfold.errors import FailedElsewhereError, NotSavedError
from fourfold.grid import Grid
from fourfold.optim import AdamW
from fourfold.train.config import Config
from fourfold.train.numbers import Numbers
from fourfold.train.record import Event, strict
from fourfold.train.schema import to_table

SETTLE_SECONDS, SHORTLY = 30.0, 5.0
"""How long a run that ends by an error waits for a checkpoint on its way; and where somebody waits for its end, or
another rank, whose part may be missing, is gone."""


class Saving:
    """Saves a run while it trains, and tells of a checkpoint once it is complete."""

    def __init__(self, config: Config, grid: Grid, out: Path) -> None:
        section = config.checkpoint
        self.config, self.grid, self.every = config, grid, section.every
        self._on_its_way: Event | None = None
        self._complete: list[Event] = []
        self.saver = Saver(
            grid,
            out / CHECKPOINTS,
            keep_last=section.keep_last,
            keep_every=section.keep_every,
            asynchronous=section.asynchronous,
        )

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def save(
        self, step: int, model: nn.Module, optimizer: AdamW, loader: Loader, numbers: Numbers, *, last: bool
    ) -> None:
        """Save this step, the last one until it is complete."""
        state = {
            "config": strict(to_table(self.config)),
            "data": loader.state(),
            **numbers.state(),
            "schedule": asdict(self.config.schedule),
        }
        began = time.perf_counter()
        try:
            self._wait()
            self.saver.save(step, model, optimizer, state)
            event: Event = {"event": "saved", "step": step, "seconds": time.perf_counter() - began}
            self._on_its_way = event
            if last or not self.config.checkpoint.asynchronous:
                self._wait()
                event["seconds"] = time.perf_counter() - began
        except (OSError, FailedElsewhereError) as error:
            raise NotSavedError("; ".join([str(error), *getattr(error, "__notes__", ())[-1:]])) from error

    def _wait(self) -> None:
        self.saver.wait()
        if self._on_its_way is not None:
            self._complete.append(self._on_its_way)
            self._on_its_way = None

    def completed(self) -> list[Event]:
        """What was saved since this was asked, with the seconds for which training stood; rank 0 looks at the disk."""
        event = self._on_its_way
        if event is not None and self.grid.rank == 0 and self._is_there(event["step"]):
            self._complete.append(event)
            self._on_its_way = None
        found, self._complete = self._complete, []
        return found

    def _is_there(self, step: int) -> bool:
        return (self.saver.checkpoints.path(step) / RECORD).is_file()

    def settle(self, *, hurried: bool) -> None:
        """Let what this rank is writing come to its end, if it does in a while; asks no other rank."""
        self.saver.settle(SHORTLY if hurried else SETTLE_SECONDS)

"""Checkpoints of a run as it trains: written behind training, a bounded number of them kept."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fourfold.checkpoint.folder import Checkpoints
from fourfold.checkpoint.training import training_tensors
from fourfold.checkpoint.write import Staging, Writing
from fourfold.grid import Grid
from fourfold.optim import AdamW


class Saver:
    """Saves a run into `ROOT/step-00000100`; all ranks call its methods together.

    One checkpoint is on its way at a time. Where it fails, the ones before it are intact, and the next call raises.
    """

    def __init__(
        self, grid: Grid, root: Path, *, keep_last: int = 2, keep_every: int = 0, asynchronous: bool = True
    ) -> None:
        """Keeps the last few, and of those before the ones whose step is a multiple of `keep_every` (0: none)."""
        if keep_last < 1 or keep_every < 0:
            raise ValueError(f"keep_last={keep_last} must be at least 1 and keep_every={keep_every} at least 0")
        self.grid, self.checkpoints = grid, Checkpoints(root)
        self.keep_last, self.keep_every = keep_last, keep_every
        self._staging = Staging() if asynchronous else None
        self._writing: Writing | None = None
        self._last: Writing | None = None
        self._followed: AdamW | None = None
        grid.first_alone("clearing unfinished checkpoints", self.checkpoints.clear)

    def save(self, step: int, model: nn.Module, optimizer: AdamW, state: dict[str, Any]) -> None:
        """Write everything that continues the run after this step.

        When asynchronous it returns at once, the copy is taken beside forward and backward, and the optimizer's next
        step comes after it. Whoever else changes parameters before that step calls `keep_order`; a change without it
        fails this save.
        """
        self.wait()
        self._writing = self._last = Writing(
            training_tensors(model, optimizer),
            self.grid,
            self.checkpoints.path(step),
            {**state, "step": step, "torch": torch.__version__, "saved": datetime.now(UTC).isoformat("T", "seconds")},
            staging=self._staging,
            before=self._last,
            first=lambda: self._require_newest(step),
            then=lambda: self.checkpoints.prune(self.keep_last, self.keep_every),
        )
        if self._staging is None:
            self.wait()
        else:
            self._follow(optimizer)

    def _follow(self, optimizer: AdamW) -> None:
        """From now on the optimizer's steps come after the copy."""
        if optimizer is not self._followed:
            optimizer.register_step_pre_hook(lambda *_: self.keep_order())
            self._followed = optimizer

    def _require_newest(self, step: int) -> None:
        """Of several runs in one folder it would not be known which is kept."""
        complete = self.checkpoints.complete()
        if complete and complete[-1][0] >= step:
            raise FileExistsError(
                f"{complete[-1][1]} is there already, and step {step} is to be saved beside it; go on from it, or give "
                "another folder"
            )

    def keep_order(self) -> None:
        """What is done from now on may change the parameters that are being saved."""
        if self._writing is not None:
            self._writing.keep_order()

    def settle(self, seconds: float) -> None:
        """Give a checkpoint on its way so long to be written, where a run ends early; asks no other rank."""
        if self._writing is not None:
            self._writing.settle(seconds)

    def wait(self) -> None:
        """Until the last checkpoint is complete; what failed on any rank raises on all."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except Exception as error:
                newest = self.checkpoints.newest()
                kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint before it"
                error.add_note(f"{writing.place.target} was not saved; {kept}")
                raise

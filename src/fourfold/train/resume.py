"""Checkpoints of a run: when they are saved, and how a run goes on from the newest one.

What a run is taken up from is looked at before anything is built or changed: `look` finds the checkpoint and refuses
what cannot continue it. Tensors and data are checked by who loads them, before they change anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from fourfold.checkpoint.folder import CHECKPOINTS, Checkpoints
from fourfold.checkpoint.load import load_training
from fourfold.checkpoint.record import read_record
from fourfold.checkpoint.save import Saver
from fourfold.checkpoint.training import OPTIMIZER
from fourfold.data.loader import Loader
from fourfold.grid import FailedElsewhereError, Grid
from fourfold.optim import AdamW
from fourfold.train.config import Config
from fourfold.train.launch import RESTARTED
from fourfold.train.record import Event, holds_run, strict
from fourfold.train.schema import to_table

FIXED = (("train", "seed"), ("batch", "rows"))
"""What a run cannot change on its way: the samples of a step are counted by them."""


class NotSavedError(OSError):
    """A checkpoint was not written; says what is there instead."""


class Saving:
    """Saves a run while it trains."""

    def __init__(self, config: Config, grid: Grid, out: Path) -> None:
        section = config.checkpoint
        self.config, self.every = config, section.every
        self.saver = Saver(
            grid,
            out / CHECKPOINTS,
            keep_last=section.keep_last,
            keep_every=section.keep_every,
            asynchronous=section.asynchronous,
        )

    def due(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, model: nn.Module, optimizer: AdamW, loader: Loader, skipped: int, *, last: bool) -> Event:
        """Save this step, the last one until it is complete; the event that tells for how long training stood."""
        state = {
            "config": strict(to_table(self.config)),
            "data": loader.state(),
            "skipped": skipped,
            "schedule": asdict(self.config.schedule),
        }
        began = time.perf_counter()
        try:
            self.saver.save(step, model, optimizer, state)
            if last:
                self.saver.wait()
        except (OSError, FailedElsewhereError) as error:
            raise NotSavedError("; ".join([str(error), *getattr(error, "__notes__", ())[-1:]])) from error
        return {"event": "saved", "step": step, "seconds": time.perf_counter() - began}


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: anew, with weights that somebody else trained, or after a step of its own."""

    step: int = 0
    checkpoint: Path | None = None
    taken_up: bool = False
    """The folder holds a run, which goes on or begins again."""
    said: tuple[str, ...] = ()
    """What people should know of it, a line each."""


def look(out: Path, config: Config, checkpoint: Path | None = None) -> Start:
    """What there is in a folder to go on from; raises ValueError where this config cannot.

    By default from the newest complete checkpoint.
    """
    checkpoint = checkpoint or newest(out)
    begun = (out / "metrics.jsonl").exists()
    if checkpoint is None:
        said = (f"{out} has no complete checkpoint: the run begins again, from step 0",) if begun else ()
        return Start(taken_up=begun, said=said)
    record = read_record(checkpoint)
    step = step_of(checkpoint)
    if not any(name.startswith(OPTIMIZER) for name in record.tensors):
        if step:
            raise ValueError(
                f"{checkpoint} holds weights alone, without the state of an optimizer, and step {step} cannot be "
                "continued from them; put it in step-00000000 of a folder of its own to begin with them"
            )
        return Start(0, checkpoint, begun, (f"begins with the weights in {checkpoint}",))
    _require_same(config, record.state, checkpoint)
    said = _changes(asdict(config.schedule), record.state.get("schedule"))
    return Start(step, checkpoint, True, (f"the schedule is another one: {'; '.join(said)}",) if said else ())


def newest(out: Path) -> Path | None:
    return Checkpoints(out / CHECKPOINTS).newest()


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def _require_same(config: Config, state: dict[str, Any], checkpoint: Path) -> None:
    now, before = to_table(config), state.get("config")
    if not isinstance(before, dict):
        raise ValueError(f"{checkpoint} does not say what it was trained with; give one that fourfold train has saved")
    for section, key in FIXED:
        saved = before.get(section, {}).get(key)
        if saved != now[section][key]:
            raise ValueError(
                f"{section}.{key} was {saved} in {checkpoint} and is {now[section][key]}; a run goes on with the same, "
                "take another --out to train with another"
            )


def _changes(now: dict[str, Any], before: Any) -> list[str]:
    if not isinstance(before, dict):
        return []
    return [f"{key} was {before.get(key)}, is {value}" for key, value in now.items() if before.get(key) != value]


def find_start(grid: Grid, out: Path, config: Config) -> Start:
    """The same on every rank: rank 0 says which checkpoint is the newest."""
    found = grid.hear(str(newest(out) or "") if grid.rank == 0 else "")
    return grid.together(f"looking at {out}", lambda: look(out, config, Path(found) if found else None))


def take_up(start: Start, model: nn.Module, optimizer: AdamW, loader: Loader) -> int:
    """Give all of them the state of the checkpoint; returns how many steps in a row were skipped before it."""
    if start.checkpoint is None:
        return 0
    state = load_training(start.checkpoint, model, optimizer)
    if start.step == 0:
        return 0
    loader.restore(state.get("data", {}))
    skipped = state.get("skipped", 0)
    return skipped if isinstance(skipped, int) else 0


def earlier(stored: Any, step: int) -> list[Event]:
    """When and on which grids a run has run before, from what its run.json held, the last time up to this step."""
    if not isinstance(stored, dict):
        return []
    before = stored.get("resumed", [])
    last = {"started": stored.get("started"), "grid": stored.get("grid"), "step": step}
    return [*(before if isinstance(before, list) else []), last]


def left_of(profile: range, step: int, *, asked: bool) -> range:
    """The steps to profile of a run that goes on after this one; a job that started itself again has none twice."""
    if not profile or profile[0] > step:
        return profile
    if asked:
        raise ValueError(f"--profile {profile[0]}: the run goes on after step {step}; name steps from {step + 1} on")
    return range(0)


def restarted() -> bool:
    """Whether these ranks were started again because one of them has died."""
    return any(int(os.environ.get(name) or 0) > 0 for name in (RESTARTED, "TORCHELASTIC_RESTART_COUNT"))


def require_found_again(out: str | None) -> None:
    """A job that may be started again must find its run, whose folder would be named by the time of its start."""
    times = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or 0)
    if out is None and times > 0:
        raise ValueError(
            f"torchrun may start these ranks again (--max-restarts {times}), and they would not find their run; give "
            "--out or --resume"
        )


def goes_on(out: Path) -> str:
    """Where a run that died goes on."""
    found = newest(out)
    return f"after step {step_of(found)}" if found else "from step 0"


def stored_config(options_config: Path | None, out: Path | None, given: Sequence[object]) -> Path | None:
    """The config to read: the one that is given, else that of the run which goes on."""
    if options_config is not None or out is None:
        return options_config
    if (out / "config.toml").is_file() and holds_run(out):
        return out / "config.toml"
    if not any(given):
        raise FileNotFoundError(
            f"{out} holds no run to go on with; to begin one there give its CONFIG.toml, or --model too"
        )
    return None

"""How a run goes on from a checkpoint of its own, by default from the newest one.

What a run is taken up from is looked at before anything is built or changed: `look` finds the checkpoint and refuses
what cannot continue it. Tensors and data are checked by who loads them, before they change anything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from torch import nn

from fourfold.agree import decide
from fourfold.checkpoint.folder import CHECKPOINTS, Checkpoints, find_checkpoint, remove
from fourfold.checkpoint.load import load_training
from fourfold.checkpoint.record import Record, read_record
from fourfold.checkpoint.training import OPTIMIZER
from fourfold.data.loader import Loader
from fourfold.errors import BadStepsError, DamagedCheckpointError, FailedElsewhereError, RollBackError, is_damaged
from fourfold.grid import Grid
from fourfold.optim import AdamW
from fourfold.train.config import Config
from fourfold.train.launch import RESTARTED
from fourfold.train.process import READABLE
from fourfold.train.record import Event, finish, holds_run, strict, write_json
from fourfold.train.schema import to_table

FIXED = (("train", "seed"), ("batch", "rows"))
"""What a run cannot change on its way: the samples of a step are counted by them."""
PASSED_OVER = "passed-over.json"
MOST_ROLL_BACKS = 3
"""To one checkpoint."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """The data of steps after a checkpoint, which a run that was rolled back leaves out."""

    after: int
    """The checkpoint's step ..."""
    until: int
    """... and the last one whose data is left out."""
    why: str
    times: int
    """How often the run was rolled back to that checkpoint."""
    data: dict[str, Any]
    """Where the loader goes on."""

    def __str__(self) -> str:
        return f"without the data of steps {self.after + 1} to {self.until}: {self.why}"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run begins: anew, with weights that somebody else trained, or after a step of its own."""

    step: int = 0
    checkpoint: Path | None = None
    taken_up: bool = False
    """The folder holds a run, which goes on or begins again."""
    newer: tuple[Path, ...] = ()
    """Checkpoints of later steps, which are removed when the run begins."""
    said: tuple[str, ...] = ()
    """What people should know of it, a line each."""
    passed_over: PassedOver | None = None
    """The data after that step which is not to be seen again."""


def look(out: Path, config: Config, checkpoint: Path | None = None) -> Start:
    """What there is in a folder to go on from; raises ValueError where this config cannot.

    By default from the newest complete checkpoint.
    """
    checkpoint = checkpoint or newest(out)
    begun = (out / "metrics.jsonl").exists()
    if checkpoint is None:
        said = (f"{out} has no complete checkpoint: the run begins again, from step 0",) if begun else ()
        return Start(taken_up=begun, said=said)
    with _way_out(checkpoint):
        record = read_record(checkpoint)
    step = step_of(checkpoint)
    if not any(name.startswith(OPTIMIZER) for name in record.tensors):
        if step:
            raise ValueError(
                f"{checkpoint} holds weights alone, without the state of an optimizer, and step {step} cannot be "
                "continued from them; put it in step-00000000 of a folder of its own to begin with them"
            )
        return Start(0, checkpoint, begun, said=(f"begins with the weights in {checkpoint}",))
    _require_step(step, record, checkpoint)
    _require_same(config, record.state, checkpoint)
    changes = _changes(asdict(config.schedule), record.state.get("schedule"))
    said = (f"the schedule is another one: {'; '.join(changes)}",) if changes else ()
    return Start(step, checkpoint, True, said=said, passed_over=read_passed_over(out, step))


def look_at(out: Path, config: Config, step: int | None) -> Start:
    """The same for the checkpoint of this step, whatever is newer than it."""
    if step is None:
        return look(out, config)
    newer = tuple(folder for other, folder in Checkpoints(out / CHECKPOINTS).complete() if other > step)
    return replace(look(out, config, find_checkpoint(out, step)), newer=newer)


def newest(out: Path) -> Path | None:
    return Checkpoints(out / CHECKPOINTS).newest()


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


@contextmanager
def _way_out(checkpoint: Path) -> Iterator[None]:
    """What is wrong with the files of a checkpoint is said with the one to go on from instead, if there is."""
    try:
        yield
    except (DamagedCheckpointError, FailedElsewhereError) as error:
        before = [step for step, _ in Checkpoints(checkpoint.parent).complete() if step < step_of(checkpoint)]
        if not before or not is_damaged(error):
            raise
        raise DamagedCheckpointError(f"{error}; or go on from an earlier checkpoint: --step {before[-1]}") from error


def remove_newer(start: Start) -> None:
    """So that the checkpoint which the run goes on from is the newest; by rank 0."""
    for folder in reversed(start.newer):
        remove(folder)


def _require_step(step: int, record: Record, checkpoint: Path) -> None:
    saved = record.state.get("step")
    if type(saved) is not int or saved != step:
        raise ValueError(
            f"{checkpoint} is named after step {step} and was saved at step {saved}; give it the name of its step"
        )


def _require_same(config: Config, state: dict[str, Any], checkpoint: Path) -> None:
    now, before = to_table(config), state.get("config")
    if not isinstance(before, dict):
        raise ValueError(f"{checkpoint} does not say what it was trained with; give one that fourfold train has saved")
    for section, key in FIXED:
        written = before.get(section)
        if not isinstance(written, dict):
            raise DamagedCheckpointError(
                f"{checkpoint}: its config has {written!r} for the section {section}; copy it again"
            )
        saved = written.get(key)
        if saved != now[section][key]:
            raise ValueError(
                f"{section}.{key} was {saved} in {checkpoint} and is {now[section][key]}; a run goes on with the same, "
                "take another --out to train with another"
            )


def _changes(now: dict[str, Any], before: Any) -> list[str]:
    if not isinstance(before, dict):
        return []
    return [f"{key} was {before.get(key)}, is {value}" for key, value in now.items() if before.get(key) != value]


def find_start(grid: Grid, out: Path, config: Config, step: int | None = None) -> Start:
    """The same on every rank: rank 0 says which checkpoint is the newest, unless one is named by its step."""
    if step is not None:
        return grid.together(f"looking at {out}", lambda: look_at(out, config, step))
    found = grid.hear(str(newest(out) or "") if grid.rank == 0 else "")
    return grid.together(f"looking at {out}", lambda: look(out, config, Path(found) if found else None))


def take_up(start: Start, model: nn.Module, optimizer: AdamW, loader: Loader) -> dict[str, Any]:
    """Give all of them the state of the checkpoint; returns the rest of it."""
    if start.checkpoint is None:
        return {}
    with _way_out(start.checkpoint):
        state = load_training(start.checkpoint, model, optimizer)
    if start.step == 0:
        return {}
    passed = start.passed_over
    try:
        loader.restore(state.get("data", {}) if passed is None else passed.data)
    except ValueError as error:
        raise ValueError(f"{start.checkpoint if passed is None else PASSED_OVER}: {error}") from error
    return state


def roll_back(grid: Grid, out: Path, config: Config, error: RollBackError) -> Start:
    """Where a run goes on whose numbers went bad: after its newest checkpoint, with the data that comes next."""
    start = find_start(grid, out, config)
    if not start.step:
        raise BadStepsError(f"stopped: {error}; there is no checkpoint to roll back to, set checkpoint.every")
    times = start.passed_over.times + 1 if start.passed_over is not None else 1
    if times > MOST_ROLL_BACKS:
        raise BadStepsError(
            f"stopped: {error}; the run was rolled back to step {start.step} {times - 1} times, and no data goes well"
        )
    passed = PassedOver(start.step, error.step, str(error), times, error.data)
    grid.first_alone("noting which data is left out", lambda: write_json(out / PASSED_OVER, strict(asdict(passed))))
    return replace(start, passed_over=passed)


def read_passed_over(out: Path, step: int) -> PassedOver | None:
    """What a run that goes on after this step leaves out; what was noted of another checkpoint does not count."""
    path = out / PASSED_OVER
    if not path.exists():
        return None
    try:
        found = PassedOver(**json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it to go on with all data") from error
    return found if found.after == step else None


def is_done(start: Start, config: Config, out: Path, stream: IO[str] | None) -> bool:
    """Whether a run that should go on has nothing left to do, which is said; by whom there is a stream for."""
    if start.step < config.train.steps:
        return False
    if stream is not None:
        if start.step == config.train.steps and not start.newer and (out / "metrics.jsonl").exists():
            finish(out / "metrics.jsonl", start.step)
        print(f"{out} has reached step {start.step} of {config.train.steps}; give more --steps to go on", file=stream)
    return True


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
    """Whether the ranks were started again because one of them has died: the same on all, who ask it together.

    The count is that of a node: one that came in the place of another has seen no start before.
    """
    again = any(int(os.environ.get(name) or 0) > 0 for name in (RESTARTED, "TORCHELASTIC_RESTART_COUNT"))
    return decide(str(int(again)), max) == "1"


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


def left_behind(out: Path) -> str:
    """What a run that SIGTERM has ended can go on from, where that is not its last step."""
    found, last = newest(out), _last_step(out / "metrics.jsonl")
    if last <= (step_of(found) if found else 0):
        return READABLE
    kept = f"the newest checkpoint is {found}" if found else "there is no checkpoint"
    return f"step {last} was not saved; {kept}"


def _last_step(metrics: Path) -> int:
    last = 0
    if metrics.exists():
        with metrics.open(errors="replace") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                    last = event["step"] if event["event"] == "step" else last
                except (KeyError, TypeError, ValueError):
                    continue  # a line that was cut off
    return last


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

"""The checkpoints of a run: when they are saved, and which one a run resumes from.

`RunSaver` saves while the run trains. `start_from` looks at the checkpoint that a run is to resume from before anything
is built or changed, and refuses a checkpoint that cannot continue the run. `restore` loads it; tensors and data are
checked by the code that loads them, before it changes anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from torch import nn

from fourfold.atomic import write_json
from fourfold.checkpoint.format import RECORD, read_record
from fourfold.checkpoint.load import CHECKPOINTS, Checkpoints, find_checkpoint, load_training
from fourfold.checkpoint.save import Saver
from fourfold.checkpoint.training_state import OPTIMIZER
from fourfold.data.loader import Loader
from fourfold.environment import max_restarts, was_restarted
from fourfold.errors import (
    BadStepsError,
    DamagedCheckpointError,
    FailedElsewhereError,
    NotSavedError,
    RollBackError,
    is_damaged,
)
from fourfold.grid import Grid
from fourfold.optim import AdamW
from fourfold.parse import parse_json
from fourfold.train.config import TrainConfig
from fourfold.train.guard import StepJudge
from fourfold.train.run_folder import RunEvent, finish, holds_run, read_events, strict
from fourfold.train.schema import to_table
from fourfold.train.signals import READABLE

LAST_SAVE_SECONDS = 30.0
"""How long a rank of a run that ends with an error waits until its part of a checkpoint is written: longer than most
parts take, short compared with the restart that follows."""
LAST_SAVE_SECONDS_IN_A_HURRY = 5.0
"""The same if somebody waits for the end, or if another rank is gone, so that the checkpoint will never be complete."""
FIXED = (("train", "seed"), ("batch", "rows"))
"""Keys of the config that a resumed run cannot change: they determine which samples a step has."""
PASSED_OVER = "passed-over.json"
"""The file in a run's folder that says which data a run that was rolled back skips."""
MOST_ROLL_BACKS = 3
"""How often a run rolls back to one checkpoint. If three stretches of data have failed, the data is not the cause."""


# Saving


class RunSaver:
    """Saves a run while it trains, and reports a checkpoint once it is complete."""

    def __init__(self, config: TrainConfig, grid: Grid, out: Path) -> None:
        self.config, self.grid, section = config, grid, config.checkpoint
        self._pending: RunEvent | None = None
        self._complete: list[RunEvent] = []
        self.saver = Saver(
            grid,
            out / CHECKPOINTS,
            keep_last=section.keep_last,
            keep_every=section.keep_every,
            asynchronous=section.asynchronous,
        )

    def due(self, step: int) -> bool:
        """Return whether the config says to save after this step."""
        every = self.config.checkpoint.every
        return every > 0 and step % every == 0

    def save(
        self, step: int, model: nn.Module, optimizer: AdamW, loader: Loader, judge: StepJudge, *, last: bool
    ) -> None:
        """Save this step; after the last one wait until the checkpoint is complete."""
        state = {
            "config": strict(to_table(self.config)),
            "data": loader.state(),
            **judge.state(),
            "schedule": asdict(self.config.schedule),
        }
        began = time.perf_counter()
        try:
            self._wait()  # one checkpoint is written at a time
            self.saver.save(step, model, optimizer, state)
            event: RunEvent = {"event": "saved", "step": step, "seconds": time.perf_counter() - began}
            self._pending = event
            if last or not self.config.checkpoint.asynchronous:
                self._wait()
                event["seconds"] = time.perf_counter() - began
        except (OSError, FailedElsewhereError) as error:
            # The last note of the error names the newest checkpoint, which is what a user needs to know.
            raise NotSavedError("; ".join([str(error), *getattr(error, "__notes__", ())[-1:]])) from error

    def _wait(self) -> None:
        self.saver.wait()
        if self._pending is not None:
            self._complete.append(self._pending)
            self._pending = None

    def completed(self) -> list[RunEvent]:
        """Return the checkpoints that were completed since the last call, with the seconds that training waited.

        Rank 0 looks at the disk, so that it can report a checkpoint without waiting for the other ranks.
        """
        pending, path = self._pending, self.saver.checkpoints.path
        if pending is not None and self.grid.rank == 0 and (path(pending["step"]) / RECORD).is_file():
            self._complete.append(pending)
            self._pending = None
        found, self._complete = self._complete, []
        return found

    def wait_for_own_part(self, *, hurried: bool) -> None:
        """Wait a little for this rank's part of a checkpoint when the run ends early, without asking other ranks."""
        self.saver.wait_for_own_part(LAST_SAVE_SECONDS_IN_A_HURRY if hurried else LAST_SAVE_SECONDS)


# Where a run starts


@dataclass(frozen=True, slots=True)
class SkippedData:
    """The data of steps after a checkpoint, which a run that was rolled back to it skips."""

    after: int
    """The checkpoint's step."""
    until: int
    """The last step that had the data."""
    why: str
    times: int
    """How often the run was rolled back to that checkpoint."""
    data: dict[str, Any]
    """The loader's state after the skipped data."""

    def __str__(self) -> str:
        return f"without the data of steps {self.after + 1} to {self.until}: {self.why}"


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run starts: from nothing, with weights that somebody else trained, or after a step of its own."""

    step: int = 0
    checkpoint: Path | None = None
    resumes: bool = False
    """Whether the folder holds a run already, which continues or starts again from step 0."""
    newer: tuple[Path, ...] = ()
    """Checkpoints of later steps, which are removed when the run starts."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    skipped: SkippedData | None = None
    """The data after the step that the run skips."""


def find_start(grid: Grid, out: Path, config: TrainConfig, step: int | None = None) -> Start:
    """Return where a run starts, the same on every rank: after this step, or from the newest checkpoint."""
    if step is not None:
        return grid.run_together(f"looking at {out}", lambda: start_at(out, config, step))
    # Rank 0 says which checkpoint is the newest, because nodes may see a shared folder at different times.
    found = grid.broadcast_text(str(newest_checkpoint(out) or "") if grid.rank == 0 else "")
    return grid.run_together(f"looking at {out}", lambda: start_from(out, config, Path(found) if found else None))


def start_at(out: Path, config: TrainConfig, step: int | None) -> Start:
    """Return the start after this step, with the later checkpoints to remove; None means the newest checkpoint."""
    if step is None:
        return start_from(out, config, newest_checkpoint(out))
    newer = tuple(folder for other, folder in Checkpoints(out / CHECKPOINTS).complete() if other > step)
    return replace(start_from(out, config, find_checkpoint(out, step)), newer=newer)


def start_from(out: Path, config: TrainConfig, checkpoint: Path | None) -> Start:
    """Return the start of a run from a checkpoint; without one the run begins at step 0.

    Raise ValueError if a run with this config cannot continue from the checkpoint.
    """
    begun = (out / "metrics.jsonl").exists()
    if checkpoint is None:
        notes = (f"{out} has no complete checkpoint: the run begins again, from step 0",) if begun else ()
        return Start(resumes=begun, notes=notes)
    with _suggest_an_earlier_one(checkpoint):
        record = read_record(checkpoint)
    step = step_of(checkpoint)
    # An imported model has no optimizer state: a run may begin with its weights, and cannot resume at a step.
    if not record.names(OPTIMIZER):
        if step:
            raise ValueError(
                f"{checkpoint} holds only weights, without optimizer state, so step {step} cannot be resumed from "
                "them; put it in step-00000000 of a new folder to start with them"
            )
        return Start(0, checkpoint, begun, notes=(f"begins with the weights in {checkpoint}",))
    saved = record.state.get("step")  # a folder that somebody renamed would repeat or skip data
    if type(saved) is not int or saved != step:
        raise ValueError(
            f"{checkpoint} is named after step {step} and was saved at step {saved}; give it the name of its step"
        )
    _require_same(config, record.state, checkpoint)
    before, schedule = record.state.get("schedule"), asdict(config.schedule)
    changes = []
    if isinstance(before, dict):
        changes = [f"{key} was {before.get(key)}, is {now}" for key, now in schedule.items() if before.get(key) != now]
    notes = (f"the schedule is another one: {'; '.join(changes)}",) if changes else ()
    return Start(step, checkpoint, True, notes=notes, skipped=read_skipped(out, step))


def newest_checkpoint(out: Path) -> Path | None:
    """Return the newest complete checkpoint of a run."""
    return Checkpoints(out / CHECKPOINTS).newest()


def newest_step(out: Path) -> int:
    """Return the step of the newest complete checkpoint of a run, 0 if it has none."""
    found = newest_checkpoint(out)
    return step_of(found) if found else 0


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint's folder is named after."""
    return int(checkpoint.name.rpartition("-")[2])


@contextmanager
def _suggest_an_earlier_one(checkpoint: Path) -> Iterator[None]:
    """Inside, an error about a damaged checkpoint also names the checkpoint before it, if the run has one."""
    try:
        yield
    except (DamagedCheckpointError, FailedElsewhereError) as error:
        before = [step for step, _ in Checkpoints(checkpoint.parent).complete() if step < step_of(checkpoint)]
        if not before or not is_damaged(error):
            raise
        raise DamagedCheckpointError(f"{error}; or resume from an earlier checkpoint: --step {before[-1]}") from error


def _require_same(config: TrainConfig, state: dict[str, Any], checkpoint: Path) -> None:
    """Raise if the config of a checkpoint differs in a key that a resumed run cannot change."""
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
                f"{section}.{key} was {saved} in {checkpoint} and is {now[section][key]}; a resumed run keeps it, take "
                "another --out to train with another"
            )


# Resuming


def restore(start: Start, model: nn.Module, optimizer: AdamW, loader: Loader) -> dict[str, Any]:
    """Load the checkpoint into model, optimizer and loader, and return its whole state; {} if the run starts at 0."""
    if start.checkpoint is None:
        return {}
    with _suggest_an_earlier_one(start.checkpoint):
        state = load_training(start.checkpoint, model, optimizer)
    if start.step == 0:
        return {}  # weights that somebody else trained bring no position in the data
    skipped = start.skipped
    try:
        loader.restore(state.get("data", {}) if skipped is None else skipped.data)
    except ValueError as error:
        raise ValueError(f"{start.checkpoint if skipped is None else PASSED_OVER}: {error}") from error
    return state


def roll_back(grid: Grid, out: Path, config: TrainConfig, error: RollBackError) -> Start:
    """Return where a run with bad losses or gradients resumes: after its newest checkpoint, without the data since."""
    start = find_start(grid, out, config)
    if not start.step:
        raise BadStepsError(f"stopped: {error}; there is no checkpoint to roll back to, set checkpoint.every")
    times = start.skipped.times + 1 if start.skipped is not None else 1
    if times > MOST_ROLL_BACKS:
        raise BadStepsError(
            f"stopped: {error}; the run was rolled back to step {start.step} {times - 1} times, and no data goes well"
        )
    skipped = SkippedData(start.step, error.step, str(error), times, error.data)
    # on disk, so that a run that is restarted after this skips the same data
    grid.run_on_rank0("noting which data is skipped", lambda: write_json(out / PASSED_OVER, strict(asdict(skipped))))
    return replace(start, skipped=skipped)


def read_skipped(out: Path, step: int) -> SkippedData | None:
    """Return the data that a run skips when it resumes after this step; a note about another step is ignored."""
    path = out / PASSED_OVER
    if not path.exists():
        return None
    try:
        found = SkippedData(**parse_json(path.read_bytes()))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it to continue with all data") from error
    return found if found.after == step else None


def is_done(start: Start, config: TrainConfig, out: Path, stream: IO[str] | None) -> bool:
    """Return whether a run that should continue has nothing left to do, and say so on the stream of rank 0."""
    if start.step < config.train.steps:
        return False
    if stream is not None:
        if start.step == config.train.steps and not start.newer and (out / "metrics.jsonl").exists():
            finish(out / "metrics.jsonl", start.step)
        print(
            f"{out} has reached step {start.step} of {config.train.steps}; give more --steps to continue", file=stream
        )
    return True


def earlier_parts(out: Path, step: int) -> list[RunEvent]:
    """Return when and on which grids the run was trained before, from its run.json; the last part ends at this step."""
    try:
        stored = parse_json((out / "run.json").read_bytes())
    except (OSError, ValueError):
        return []  # the file is missing, or was damaged: the run can continue without its history
    if not isinstance(stored, dict):
        return []
    before = stored.get("resumed", [])
    last = {"started": stored.get("started"), "grid": stored.get("grid"), "step": step}
    return [*(before if isinstance(before, list) else []), last]


def steps_to_profile(profile: range, step: int, *, asked: bool) -> range:
    """Return the steps to profile of a run that resumes after this step.

    A job that was restarted has profiled earlier steps already; a user who asks for such steps gets an error.
    """
    if not profile or profile[0] > step:
        return profile
    if asked:
        raise ValueError(f"--profile {profile[0]}: the run resumes after step {step}; name steps from {step + 1} on")
    return range(0)


def any_restarted(grid: Grid) -> bool:
    """Return whether the ranks were restarted because one of them died. All ranks call it and get the same answer.

    Every rank is asked, because a launcher counts the starts of its own node, and a node that replaces another one has
    seen no start before.
    """
    return grid.channel.decide(str(int(was_restarted())), max) == "1"


def require_named_folder(out: str | None) -> None:
    """Raise if a job that may be restarted would not find its run, because a folder without a name gets the time."""
    times = max_restarts()
    if out is None and times > 0:
        raise ValueError(
            f"torchrun may start these ranks again (--max-restarts {times}), and they would not find their run; give "
            "--out or --resume"
        )


def what_was_lost(out: Path) -> str:
    """Return words for what a run that SIGTERM has ended can resume from, if that is not its last step."""
    steps = (event["step"] for _, event in read_events(out / "metrics.jsonl") if event["event"] == "step")
    last = max(steps, default=0)
    if last <= newest_step(out):
        return READABLE
    found = newest_checkpoint(out)
    kept = f"the newest checkpoint is {found}" if found else "there is no checkpoint"
    return f"step {last} was not saved; {kept}"


def config_to_read(given: Path | None, out: Path | None, others: Sequence[object]) -> Path | None:
    """Return the config to read: the one that is given, else the one of the run that resumes.

    `others` are options that can stand for a config; with none of them a folder without a run is an error.
    """
    if given is not None or out is None:
        return given
    if (out / "config.toml").is_file() and holds_run(out):
        return out / "config.toml"
    if not any(others):
        raise FileNotFoundError(
            f"{out} holds no run to resume; to begin one there give its CONFIG.toml, or --model too"
        )
    return None

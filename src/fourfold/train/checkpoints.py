"""The checkpoints of a run: when they are saved, and which one a run resumes from.

`RunSaver` saves while the run trains, and only steps that were not skipped. `find_start` finds the newest checkpoint
that is sound, verified by all ranks before anything is built or changed, and passes over damaged ones. `start_from`
refuses a checkpoint that cannot continue the run. `restore` loads it; tensors and data are checked by the code that
loads them, before it changes anything.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO, Any

from torch import nn

from fourfold.atomic import write_json
from fourfold.checkpoint.format import RECORD, read_record
from fourfold.checkpoint.load import (
    CHECKPOINTS,
    Checkpoints,
    PassedOver,
    find_checkpoint,
    find_damage,
    find_missing,
    load_training,
    require_reachable,
)
from fourfold.checkpoint.save import Saver
from fourfold.checkpoint.training_state import SavedOptimizer
from fourfold.data.loader import Loader
from fourfold.environment import launcher_name, max_restarts, was_restarted
from fourfold.errors import (
    BadStepsError,
    ChangedDataError,
    DamagedCheckpointError,
    FailedElsewhereError,
    MissingCheckpointError,
    NotFiniteError,
    NotSavedError,
    RollBackError,
    is_damaged,
)
from fourfold.grid import Grid
from fourfold.nn.lora import is_lora
from fourfold.optim import LearningRateSchedule, ShardedOptimizer
from fourfold.parse import parse_json
from fourfold.train.config import ModelSection, TrainConfig
from fourfold.train.run_folder import RunEvent, finish, holds_run, last_good_step, read_events, strict
from fourfold.train.schema import parse, to_table

LAST_SAVE_SECONDS = 30.0
"""How long a rank of a run that ends with an error waits until its part of a checkpoint is written: longer than most
parts take, short compared with the restart that follows."""
LAST_SAVE_SECONDS_IN_A_HURRY = 5.0
"""The same if somebody waits for the end, or if another rank is gone, so that the checkpoint will never be complete."""
FIXED = (("train", "seed"), ("batch", "rows"), ("optimizer", "name"), ("lora", "rank"), ("lora", "targets"))
"""Keys of the config that a resumed run cannot change: they determine which samples a step has, what the state of the
optimizer means, and which weights are trained."""
BEFORE: dict[tuple[str, str], Any] = {("optimizer", "name"): "adamw", ("lora", "rank"): 0, ("lora", "targets"): []}
"""Values of those keys for checkpoints that were saved before the key existed."""
MAY_CHANGE = ("name", "seq", "dropout", "attention_dropout")
"""Fields of the model that do not change what its weights compute."""
OF_THE_SCHEDULE = {("optimizer", field.name) for field in fields(LearningRateSchedule)}
"""Keys that a note on the schedule names."""
SAYS_SAVED = ("saved", "resumed")
"""The kinds of events in the records of a run that tell of a checkpoint."""
PASSED_OVER = "passed-over.json"
"""The file in a run's folder that says which data a run that was rolled back skips."""
RETURNED = "returned.json"
"""The file in a run's folder that says to which step a job has returned it, and which launchers the job has."""
MOST_ROLL_BACKS = 3
"""How often a run rolls back to one checkpoint. If three stretches of data have failed, the data is not the cause."""


# Saving


@dataclass(frozen=True, slots=True)
class GoodStep:
    """A step that was not skipped, with what its checkpoint stores beside the tensors.

    The steps that are skipped after it change neither parameters nor optimizer state, so until the next good step the
    tensors are still its own. Only the position in the data moves on, and is remembered here.
    """

    step: int
    data: dict[str, Any]
    """The loader's state after the step."""
    judge: dict[str, Any]
    """The state of the `StepJudge` after the step."""


class RunSaver:
    """Saves a run while it trains, and reports a checkpoint once it is complete. `saved` is the last step saved."""

    def __init__(self, config: TrainConfig, grid: Grid, out: Path, saved: int = 0) -> None:
        self.config, self.grid, self.saved, section = config, grid, saved, config.checkpoint
        self._put_off = False
        self._pending: RunEvent | None = None
        self._complete: list[RunEvent] = []
        self._last_saved = time.monotonic()
        self._said: set[str] = set()
        self.saver = Saver(
            grid,
            out / CHECKPOINTS,
            keep_last=section.keep_last,
            keep_every=section.keep_every,
            asynchronous=section.asynchronous,
        )

    def due(self, step: int) -> bool:
        """Return whether to save after this step, the same on all ranks: the config says so, or a save was put off."""
        every = self.config.checkpoint.every
        return self._put_off or (every > 0 and step % every == 0)

    @property
    def overdue(self) -> bool:
        """Whether the last checkpoint, or the start, is too long ago by the clock of this rank."""
        return time.monotonic() - self._last_saved >= 60 * (self.config.checkpoint.minutes or 0) > 0

    def put_off(self) -> bool:
        """Save after the next good step, because the present one was skipped; return whether this is new."""
        before, self._put_off = self._put_off, True
        return not before

    def save(self, good: GoodStep, model: nn.Module, optimizer: ShardedOptimizer, *, last: bool) -> None:
        """Save a step, unless it is saved already; at the end of the run wait until the checkpoint is complete.

        Model and optimizer must be those of the step: it is the last one that was not skipped.
        """
        self._put_off = False
        if good.step != self.saved:
            self._save(good, model, optimizer, wait=last or not self.config.checkpoint.asynchronous)
        elif last:
            with self._naming_the_newest():
                self._wait()

    def _save(self, good: GoodStep, model: nn.Module, optimizer: ShardedOptimizer, *, wait: bool) -> None:
        state = {
            "config": strict(to_table(self.config)),
            "data": good.data,
            **good.judge,
            "schedule": asdict(self.config.schedule),
        }
        self._last_saved = time.monotonic()
        began = time.perf_counter()
        with self._naming_the_newest():
            self._wait()  # one checkpoint is written at a time
            self.saver.save(good.step, model, optimizer, state)
            event: RunEvent = {"event": "saved", "step": good.step, "seconds": time.perf_counter() - began}
            self._pending, self.saved = event, good.step
            if wait:
                self._wait()
                event["seconds"] = time.perf_counter() - began

    @contextmanager
    def _naming_the_newest(self) -> Iterator[None]:
        """Inside, an error about a save ends in the name of the newest checkpoint, which is what a user needs."""
        try:
            yield
        except (OSError, FailedElsewhereError, NotFiniteError) as error:
            kind = NotFiniteError if isinstance(error, NotFiniteError) else NotSavedError
            raise kind("; ".join([str(error), *getattr(error, "__notes__", ())[-1:]])) from error

    def _wait(self) -> None:
        self.saver.wait()
        if self._pending is not None:
            self._complete.append(self._pending)
            self._pending = None

    def completed(self) -> list[RunEvent]:
        """Return the checkpoints that were completed since the last call, with the seconds that training waited.

        Rank 0 looks at the disk, so that it can report a checkpoint without waiting for the other ranks. It also
        reports, once, each old checkpoint that could not be removed: the run goes on, but the disk fills up.
        """
        pending, path = self._pending, self.saver.checkpoints.path
        if pending is not None and self.grid.rank == 0 and (path(pending["step"]) / RECORD).is_file():
            self._complete.append(pending)
            self._pending = None
        found, self._complete = self._complete, []
        for text in self.saver.not_removed:
            if text not in self._said:
                self._said.add(text)
                found.append({"event": "note", "step": self.saved, "said": f"{text}; it is tried again at each save"})
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
    """The start of a run: from nothing, with weights that somebody else trained, or after a step of its own."""

    step: int = 0
    checkpoint: Path | None = None
    resumes: bool = False
    """Whether the folder holds a run already, which continues or starts again from step 0."""
    newer: tuple[Path, ...] = ()
    """Checkpoints of later steps, which are removed when the run starts."""
    passed_over: tuple[PassedOver, ...] = ()
    """Damaged checkpoints of later steps, the newest first, which are set aside when the run starts."""
    verified: bool = False
    """Whether all ranks together have found the checkpoint sound."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    skipped: SkippedData | None = None
    """The data after the step that the run skips."""
    returned_by: frozenset[str] = frozenset()
    """The launchers of the job that returns to the step because a user named it; empty if nobody did."""


def find_start(grid: Grid, out: Path, config: TrainConfig, step: int | None = None) -> Start:
    """Return where a run starts, the same on every rank: after this step, or from the newest sound checkpoint.

    All ranks verify the checkpoint together. Without a step, damaged checkpoints are passed over, on all ranks alike.
    An error that does not show damage, such as a disk that does not answer, raises and passes over nothing.
    """
    looking = f"looking at {out}"
    if step is not None:
        start = grid.run_together(looking, lambda: start_at(out, config, step))
        found = start.checkpoint
        if found is not None and (damage := find_missing(grid, found) or find_damage(grid, found)):
            raise DamagedCheckpointError(f"{damage}{_earlier(found)}")
        return replace(start, verified=True, returned_by=_launchers(grid))
    # Rank 0 says which checkpoints there are, because nodes may see a shared folder at different times.
    seen = grid.run_together(looking, lambda: Checkpoints(out / CHECKPOINTS).all() if grid.rank == 0 else [])
    paths = json.loads(grid.broadcast_text(json.dumps([str(folder) for _, folder in seen])))
    passed_over: list[PassedOver] = []
    for folder in map(Path, reversed(paths)):
        if not (damage := find_missing(grid, folder)):
            # before the whole checkpoint is read: a config that cannot continue from it is refused at once
            start = grid.run_together(looking, lambda folder=folder: start_from(out, config, folder))
            if not (damage := find_damage(grid, folder)):
                return replace(start, passed_over=tuple(passed_over), verified=True)
        passed_over.append(PassedOver(step_of(folder), folder, damage))
    return _start_without(out, config, passed_over)


def start_at(out: Path, config: TrainConfig, step: int | None) -> Start:
    """Return the start after this step, with the later checkpoints to remove; None means the newest checkpoint.

    For one process, which looks only at records and at the lengths of files.
    """
    if step is None:
        found, passed_over = Checkpoints(out / CHECKPOINTS).newest_whole()
        if found is None:
            return _start_without(out, config, passed_over)
        return replace(start_from(out, config, found), passed_over=tuple(passed_over))
    newer = tuple(folder for other, folder in Checkpoints(out / CHECKPOINTS).complete() if other > step)
    return replace(start_from(out, config, find_checkpoint(out, step)), newer=newer)


def _start_without(out: Path, config: TrainConfig, passed_over: Sequence[PassedOver]) -> Start:
    """Return the start of a run that has no checkpoint; raise if all that it has are damaged, or if it had some.

    A run that was killed before its first save begins again. One that has saved would lose its records with that.
    """
    if passed_over:
        faults = "; ".join(f"{found.folder.name}: {found.why}" for found in passed_over)
        raise DamagedCheckpointError(
            f"{out} has no sound checkpoint ({faults}); copy the files again, or move these folders away to begin at "
            "step 0"
        )
    require_reachable(out / CHECKPOINTS)
    records = (event for _, event in read_events(out / "metrics.jsonl"))
    if saved := max((event["step"] for event in records if event["event"] in SAYS_SAVED), default=0):
        raise MissingCheckpointError(
            f"{out} has no checkpoint, and its records say that step {saved} was saved; see whether the storage of "
            f"{out / CHECKPOINTS} is mounted and bring it back, or train into another --out"
        )
    return start_from(out, config, None)


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
    if SavedOptimizer.of(record) is None:
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
    notes = changed_keys(config, record.state["config"])
    before, schedule = record.state.get("schedule"), asdict(config.schedule)
    changes = []
    if isinstance(before, dict):
        changes = [f"{key} was {before.get(key)}, is {now}" for key, now in schedule.items() if before.get(key) != now]
    if changes:
        notes = (*notes, f"the schedule is another one: {'; '.join(changes)}")
    return Start(step, checkpoint, True, notes=notes, skipped=read_skipped(out, step))


def still_to_rewind(grid: Grid, out: Path, step: int | None) -> bool:
    """Return whether ranks that were restarted must still return to the step that the user named.

    They must if the first start died before it had removed the later checkpoints. A start that has removed them leaves
    a note with the launchers of its ranks. Times would not tell: a file has that of the file server, whose clock is not
    that of a node. A node may have taken the place of another since, so one launcher that both starts have is enough.
    """
    if step is None:
        return False
    launchers = _launchers(grid)

    def look() -> bool:
        newest = newest_checkpoint(out)
        if newest is None or step_of(newest) <= step:
            return False
        if _returned_by(out, step) & launchers:
            note_return(out, step, launchers)  # so that the next start knows the launchers of this one
            return False
        return True

    found = grid.run_together(f"looking at {out}", lambda: grid.rank == 0 and look())
    return grid.broadcast_text(str(int(found))) == "1"


def _launchers(grid: Grid) -> frozenset[str]:
    """Return the names of the launchers of all ranks; all ranks call it."""
    return frozenset(json.loads(grid.channel.decide(launcher_name(), lambda names: json.dumps(sorted({*names})))))


def note_return(out: Path, step: int, launchers: Collection[str]) -> None:
    """Note in the folder that the job of these launchers has returned the run to a step."""
    write_json(out / RETURNED, {"step": step, "launchers": sorted(launchers)})


def _returned_by(out: Path, step: int) -> frozenset[str]:
    """Return the launchers of the job that has returned the run to this step last; empty if the note says no such."""
    try:
        note = parse_json((out / RETURNED).read_bytes())
        return frozenset(note["launchers"]) if note["step"] == step else frozenset()
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return frozenset()


def newest_checkpoint(out: Path) -> Path | None:
    """Return the newest checkpoint of a run that has all its files; if they cannot be looked at, the newest of all."""
    checkpoints = Checkpoints(out / CHECKPOINTS)
    try:
        return checkpoints.newest_whole()[0]
    except (OSError, ValueError):  # what is wrong is said by the ranks, when they look
        return checkpoints.newest()


def newest_step(out: Path) -> int:
    """Return the step of the newest checkpoint of a run that has all its files, 0 if it has none."""
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
        if not is_damaged(error):
            raise
        raise DamagedCheckpointError(f"{error}{_earlier(checkpoint)}") from error


def _earlier(checkpoint: Path) -> str:
    """Return the end of a sentence that names the checkpoint before this one; empty if there is none."""
    before = [step for step, _ in Checkpoints(checkpoint.parent).complete() if step < step_of(checkpoint)]
    return f"; or resume from an earlier checkpoint: --step {before[-1]}" if before else ""


def _require_same(config: TrainConfig, state: dict[str, Any], checkpoint: Path) -> None:
    """Raise if the config of a checkpoint differs in a key that a resumed run cannot change."""
    now, before = to_table(config), state.get("config")
    if not isinstance(before, dict):
        raise ValueError(f"{checkpoint} does not say what it was trained with; give one that fourfold train has saved")
    for section, key in FIXED:
        written = before.get(section, {} if section == "lora" else None)  # a section of its own since LoRA exists
        if not isinstance(written, dict):
            raise DamagedCheckpointError(
                f"{checkpoint}: its config has {written!r} for the section {section}; copy it again"
            )
        saved = written.get(key, BEFORE.get((section, key)))
        if saved != now[section][key]:
            raise ValueError(
                f"{section}.{key} was {saved} in {checkpoint} and is {now[section][key]}; a resumed run keeps it, take "
                "another --out to train with another"
            )
    if config.model.is_own:
        return  # the tensors are compared when they are loaded
    try:
        model = asdict(parse(ModelSection, before["model"]).build())
    except (KeyError, TypeError, ValueError):
        return  # of another version: the tensors are compared when they are loaded
    for key, is_now in asdict(config.model.build()).items():
        if key in model and key not in MAY_CHANGE and model[key] != is_now:
            raise ValueError(
                f"model.{key} was {model[key]} in {checkpoint} and is {is_now}; with it the weights would be those of "
                "another model, so a resumed run keeps it; take another --out to train with another"
            )


def changed_keys(config: TrainConfig, before: dict[str, Any]) -> tuple[str, ...]:
    """Return a note on the keys that a run resumes with other values than it was saved with, if they change losses."""
    now = to_table(config)
    changes = [
        f"{section}.{key} was {before[section][key]}, is {value}"
        for section in ("model", "lora", "batch", "optimizer", "policy")
        for key, value in now[section].items()
        if isinstance(before.get(section), dict) and key in before[section] and before[section][key] != value
        if (section, key) not in OF_THE_SCHEDULE
    ]
    return (f"the run continues with other settings: {'; '.join(changes)}",) if changes else ()


# Resuming


def restore(
    start: Start, model: nn.Module, optimizer: ShardedOptimizer, loader: Loader, *, accept_changes: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Load the checkpoint into model, optimizer and loader; return its whole state, {} if the run starts at 0.

    Also return what a user should know about the data. With `accept_changes` its content may have changed.
    """
    if start.checkpoint is None:
        return {}, []
    with _suggest_an_earlier_one(start.checkpoint):
        # The config decides on learning rates and the like, and it may have changed. Weights that somebody else trained
        # have no LoRA pairs yet.
        given = dict(verified=start.verified, keep_options=True, may_lack=is_lora)
        state = load_training(start.checkpoint, model, optimizer, **given)
    if start.step == 0:
        return {}, []  # weights that somebody else trained bring no position in the data
    skipped = start.skipped
    origin = start.checkpoint if skipped is None else PASSED_OVER
    try:
        notes = loader.restore(
            state.get("data", {}) if skipped is None else skipped.data, accept_changes=accept_changes
        )
    except ChangedDataError as error:
        raise ChangedDataError(f"{origin}: {error}, or accept the change: --set data.changed=accept") from error
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error
    return state, notes


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
        more = "--steps" if config.train.epochs is None else "--epochs"
        print(f"{out} has reached step {start.step} of {config.train.steps}; give more {more} to continue", file=stream)
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


def what_is_saved(out: Path) -> str:
    """Return words for how far a run that ends early is saved, and the command that continues it."""
    last, newest = last_good_step(out / "metrics.jsonl"), newest_step(out)
    resume = shlex.join(["fourfold", "train", "--resume", str(out)])
    if not last and not newest:
        return "it had not finished a step"
    if last <= newest:
        return f"saved at step {newest}; to continue: {resume}"
    if not newest:
        return f"step {last} is not saved, and there is no checkpoint"
    return f"step {last} is not saved, the newest checkpoint is that of step {newest}; to continue: {resume}"


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

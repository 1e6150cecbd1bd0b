"""A run's folder: its files, their sinks, and its lock. Every file stays readable whenever the run ends.

    config.toml     the resolved config; `fourfold train RUN/config.toml` runs it again
    run.json        the description of the run: grid, model, device, versions; the prediction, how the steps compare
                    with it, and what it corrects; for a resumed run also when and on which grids it ran before
    metrics.jsonl   one JSON object per line: steps, evaluations, skipped steps, spikes, a comparison, a correction, a
                    profile, saved checkpoints, resumptions, stragglers, notes about checkpoints and data, the end; each
                    step once, even if the run was resumed
    experts.bin     of a mixture of experts: the tokens of each expert in each block, step by step; `expert_counts.py`
                    describes the format, and that of
    companions.bin  the tokens that chose both of two experts
    machine.toml    the machine file of the prediction, corrected by what the run measured
    tensorboard/    the same for TensorBoard, if it is installed
    profile/        traces of the steps that --profile names, their summary, and the predicted timeline of a step
    schedule.csv    with pipe ranks: the schedule that they walk, in the format of torch.distributed.pipelining
    pipeline/       with pipe ranks: when each action of one step ran, a file for each pipe rank
    data/           prepared text
    log.txt         what happened, for people; events.jsonl the same for programs; logs/ the log of each rank; the
                    file `progress.py` writes all three
    passed-over.json  the data that a run skips after it was rolled back
    returned.json   to which step a job has returned the run, because `--step` named it
    .lock           held by the job that trains there
    watch/          the tape of what each rank did last; the diagnosis if the run got stuck, the earlier one too
    checkpoints/    complete training states by step, from which any grid can resume

Only rank 0 writes the records; every rank writes its own trace and its part of a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shlex
import socket
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from importlib.util import find_spec
from math import inf, isfinite
from pathlib import Path
from threading import Event, Thread
from typing import IO, TYPE_CHECKING, Any, Protocol
from uuid import uuid4

from fourfold.atomic import replacing, write_json
from fourfold.checkpoint.load import CHECKPOINTS, Checkpoints, require_reachable
from fourfold.environment import machine_name, process_stat
from fourfold.errors import End, name_some
from fourfold.parse import parse_json
from fourfold.train.config import LogSection, TrainConfig
from fourfold.train.console import warn
from fourfold.train.schema import to_table

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RunEvent = dict[str, Any]
"""An event of a run: `event` names its kind, `step` its step, and the other keys depend on the kind."""
KINDS = (
    "step", "evaluation", "skipped", "spike", "compared", "corrected", "profile", "saved", "resumed", "straggler",
    "collapse", "note", "end",
)  # fmt: skip
"""The kinds of events in metrics.jsonl."""
MACHINE = "machine.toml"
"""The corrected machine file of a run."""
PIPE_TIMES = "pipeline"
"""The folder with the times of a pipeline's actions."""
DOCUMENTS = "documents"
"""The folder with the lengths of the documents of a step."""
MOST_GROUPS = 64
"""The most context groups, or places, whose documents are recorded: a page draws no more."""
LOCK = ".lock"
LOCK_BYTES = 512
"""Bytes of a lock file that has a count: the names of hosts are up to 64 bytes long."""
BEAT_SECONDS, WATCH_SECONDS = 3.0, 15.0
"""Seconds between two counts of an owner, and for which another job watches them: a slow file server may delay some."""
OWN = re.compile(
    r"config\.toml|run\.json|metrics\.jsonl|experts\.bin|companions\.bin|machine\.toml|tensorboard|wandb|profile|"
    r"schedule\.csv|pipeline|documents|data|log\.txt|events\.jsonl|logs|passed-over\.json|returned\.json|watch|"
    r"checkpoints|report\.html|\.lock|\..*\.partial|\.nfs.*|.*\.(out|err|log)"
)
"""The names in a run's folder: what a run and its reports write, and the output of the job that a scheduler puts there
before the run begins."""
TAIL = 1 << 20
"""Bytes at the end of metrics.jsonl in which the last step is found: thousands of events."""
MOST_KEPT_BYTES = 16 << 20
"""How much of a file a run keeps in memory while the disk is full: the records of about 40,000 steps, so that somebody
has hours to make room."""
TENSORBOARD_AGAIN_SECONDS = 600
"""Seconds after which TensorBoard's file is tried again on a full disk. Its thread prints a traceback each time."""


class FolderLock:
    """The lock with which one job owns a run's folder, until it releases the lock or its process ends.

    Where the file system has no locks (Lustre without `flock`, NFS without a lock service) the owner instead writes a
    count into the lock file every BEAT_SECONDS. A job that wants the folder looks whether the count changes while it
    waits by its own monotonic clock, because clocks of two machines are never compared.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock. Raise if another job has it."""
        self._folder, self._path = folder, folder / LOCK
        self._mine = f"process {os.getpid()} on {socket.gethostname()}\n{_process_name()}\n{uuid4().hex}\n"
        self._file = self._path.open("a+")
        self._taken_by = ""
        self._over = Event()
        self._thread: Thread | None = None
        try:
            if self._locks(self._file, folder):
                self._file.truncate(0)  # removes the name of an owner that has ended
                self._file.write(self._mine)
                self._file.flush()
            else:
                require_silent(folder)
                self._beat(0)
                time.sleep(BEAT_SECONDS)  # of two jobs that found the folder free now, the later one has written last
                self._require_mine()
                self._thread = Thread(target=self._beat_on, daemon=True)
                self._thread.start()
        except BaseException:
            self._file.close()
            raise

    @staticmethod
    def _locks(file: IO[str], folder: Path) -> bool:
        """Take the kernel's lock of an open file; return whether its file system has locks."""
        try:
            # flock, because the kernel releases it however the process ends: no stale lock is ever left behind
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
                raise _owned(folder, _read_lock(folder)) from error
            return False
        return True

    def _beat(self, count: int) -> None:
        """Write the owner and the count, in one piece and always of one length, so that nobody reads half of it."""
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, f"{self._mine}{count}".encode().ljust(LOCK_BYTES), 0)
        finally:
            os.close(file)

    def _beat_on(self) -> None:
        count = 0
        while not self._over.wait(BEAT_SECONDS):
            with suppress(OSError):  # a full disk, a server that is gone: the next beat may succeed
                count += 1
                found = _read_lock(self._folder)
                if found.strip() and not found.startswith(self._mine):
                    self._taken_by = found
                    return
                self._beat(count)

    def _require_mine(self) -> None:
        if not (found := _read_lock(self._folder)).startswith(self._mine):
            raise _owned(self._folder, found)

    def require_held(self) -> None:
        """Raise if another job has taken the folder, because this one was silent for long and seemed to be gone."""
        if self._taken_by:
            raise _owned(self._folder, self._taken_by)

    def release(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(BEAT_SECONDS)
        with suppress(OSError):
            if not self._taken_by and _read_lock(self._folder).startswith(self._mine):
                os.truncate(self._path, 0)  # while the file, and with it the lock, is still held
        self._file.close()


def require_unowned(folder: Path) -> None:
    """Raise if another job owns the folder."""
    if (folder / LOCK).exists():
        with (folder / LOCK).open("a+") as file:
            if not FolderLock._locks(file, folder):
                require_silent(folder)


def require_silent(folder: Path) -> None:
    """Raise if the owner that a lock file names is alive: for one that may be, watch whether the file changes."""
    before = _read_lock(folder)
    names = before.splitlines()
    if not before.strip() or (len(names) > 1 and _has_ended(names[1])):
        return
    warn(f"{folder} has no file locks; looks for {WATCH_SECONDS:g} s whether its last owner ({names[0]}) is alive")
    until = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        time.sleep(BEAT_SECONDS / 4)
        now = _read_lock(folder)
        if now != before:
            if now.strip():
                raise _owned(folder, now)
            return


def _process_name() -> str:
    """Return a name for this process which no other process ever has."""
    return f"{machine_name()} {os.getpid()} {process_stat(os.getpid())[1]}"


def _has_ended(name: str) -> bool:
    """Return whether the process of this name was one of this machine and has ended."""
    machine, _, process = name.partition(" ")
    number, _, began = process.partition(" ")
    return machine == machine_name() and number.isdecimal() and str(process_stat(int(number))[1]) != began


def _read_lock(folder: Path) -> str:
    """Return the contents of a lock file; opened anew, because NFS may show an open file as it was."""
    return (folder / LOCK).read_text(errors="replace")


def _owned(folder: Path, lock: str) -> BlockingIOError:
    owner = next(iter(lock.split("\n")), "").strip() or "just started"
    return BlockingIOError(
        f"another job ({owner}) is training in {folder}; wait until it has ended, stop it, or give another folder"
    )


def deny_others_write() -> None:
    """Let only this user and group change the files that this process writes."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)  # the only way to read the mask is to set it


def require_own(folder: Path) -> None:
    """Raise if a folder holds what no run has written there.

    A run takes from others the right to write into its folder, which must not happen to a folder such as /tmp.
    """
    if folder.is_symlink() and not folder.exists():
        raise FileNotFoundError(f"{folder} is a link to {os.readlink(folder)}, which is not there; mount that storage")
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; give another --out")
    others = sorted(name for name in os.listdir(folder) if not OWN.fullmatch(name)) if folder.exists() else []
    if others:
        raise FileExistsError(
            f"{folder} holds {name_some(others)} and no run; give a new or an empty folder, such as --out "
            f"{shlex.quote(str(folder / 'run'))}"
        )


def make_folder(folder: Path) -> None:
    """Make a run's folder that other users cannot write to, so that what is loaded from it is what was saved."""
    folder.mkdir(parents=True, exist_ok=True)
    mode = folder.stat().st_mode
    if not mode & stat.S_IWOTH:
        return
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} is another user's and writable by everybody; give a folder of your own")
    require_own(folder)
    folder.chmod(stat.S_IMODE(mode) & ~stat.S_IWOTH)


def write_pipe_times(folder: Path, times: RunEvent) -> None:
    """Write when the actions of a step ran on one pipe rank."""
    (folder / PIPE_TIMES).mkdir(exist_ok=True)
    write_json(folder / PIPE_TIMES / f"rank-{times['pipe']}.json", times)


def write_documents(folder: Path, documents: RunEvent) -> None:
    """Write the lengths of the documents that one context group, or one place without a group, has in a step."""
    (folder / DOCUMENTS).mkdir(exist_ok=True)
    write_json(folder / DOCUMENTS / f"group-{documents['group']}.json", documents)


def remove_drawn_step(folder: Path) -> None:
    """Remove times and documents of an earlier part of the run, which may have had another grid."""
    for path in (*(folder / PIPE_TIMES).glob("rank-*.json"), *(folder / DOCUMENTS).glob("group-*.json")):
        path.unlink(missing_ok=True)


class Sink(Protocol):
    """Something that takes events: a file, TensorBoard, Weights & Biases, the terminal."""

    def write(self, event: RunEvent) -> None: ...
    def close(self) -> None: ...


class LogFile:
    """A file that a run appends lines to, and that a full disk does not end.

    What the disk refuses is kept in memory, up to MOST_KEPT_BYTES, and written once there is room. `error` is what
    prevents that now. A warning says so when a write fails for the first time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # without a buffer: whoever follows the file sees a line at once, a killed run keeps it, and after an error it
        # is known how much was written
        self._file = path.open("ab", buffering=0)
        self._kept = bytearray()
        self.error: OSError | None = None

    @property
    def kept_lines(self) -> int:
        """The number of lines that are not on the disk yet."""
        return self._kept.count(b"\n")

    @property
    def is_full(self) -> bool:
        """Whether no more can be kept."""
        return len(self._kept) >= MOST_KEPT_BYTES

    def write(self, text: str) -> None:
        self._reopen_if_removed()
        if self.is_full:
            self._write_kept()  # makes place for this text, if the disk has room again
        if not self.is_full:
            self._kept += text.encode()
        before, self.error = self.error, self._write_kept()
        if self.error is not None and before is None:
            warn(
                f"cannot write to {self._path} ({self.error.strerror}); make room there. The run continues, and writes "
                f"up to {MOST_KEPT_BYTES >> 20} MiB of it later, if there is room before the run ends"
            )

    def _reopen_if_removed(self) -> None:
        """Begin a new file if somebody has removed this one; otherwise lines would go to a file that nobody sees."""
        with suppress(OSError):
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                removed, self._file = self._file, self._path.open("ab", buffering=0)
                removed.close()
                warn(f"{self._path} was removed while the run trains; the run continues, without its earlier lines")

    def _write_kept(self) -> OSError | None:
        """Write what is kept as far as possible, and return what prevents the rest."""
        try:
            while self._kept:
                del self._kept[: self._file.write(self._kept)]
        except OSError as error:
            return error
        return None

    def flush(self) -> None:
        """Do nothing: `write` has no buffer."""

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self.error = self._write_kept()
        try:
            self._file.close()
        except OSError as error:  # a file on another machine may refuse only now
            self.error = error


class JsonLines:
    """Writes events as JSON lines; each line is complete in the file before the next.

    The records of a run must not get lost silently: if a full disk refuses more than can be kept, or still refuses some
    at the end, that is an error. A file that `may_lose` lines leaves it at the warning.
    """

    def __init__(self, path: Path, *, may_lose: bool = False) -> None:
        self.path, self._may_lose = path, may_lose
        self._file = LogFile(path)

    def write(self, event: RunEvent) -> None:
        self._file.write(json_line(event))
        if self._file.is_full:
            self._require_written()

    def close(self) -> None:
        self._file.close()
        self._require_written()

    def _require_written(self) -> None:
        if (error := self._file.error) is not None and not self._may_lose:
            lost = f"its last {self._file.kept_lines} lines are lost, and what was written before stays readable"
            raise OSError(error.errno, f"cannot log to {self.path} ({error.strerror}); {lost}") from error


def json_line(event: RunEvent) -> str:
    """Return an event as a line of JSON."""
    return json.dumps(strict(event)) + "\n"


def strict(content: Any) -> Any:
    """Return the content as JSON allows it: numbers that are not finite become null, which every reader accepts."""
    if isinstance(content, dict):
        return {key: strict(value) for key, value in content.items()}
    if isinstance(content, list):
        return [strict(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content


class MemorySink:
    """Keeps events in memory, for `--json`."""

    def __init__(self, before: Path | None = None, step: int = 0) -> None:
        """Begin with the events up to this step of another file, if there is one."""
        self.events = [event for _, event in read_events(before) if stays(event, step)] if before is not None else []

    def write(self, event: RunEvent) -> None:
        self.events.append(event)

    def rewind(self, step: int) -> None:
        """Drop the events after this step."""
        self.events = [event for event in self.events if stays(event, step)]

    def close(self) -> None:
        """Keep the events; they are read after the run."""


class TensorBoard:
    """Writes events for TensorBoard. A run that resumes after a step hides the later steps that it showed before.

    A full disk does not end the run: its curves have a gap then, and continue in a new file once there is room.
    """

    def __init__(self, folder: Path, resumed_after: int | None = None) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = self._open(None if resumed_after is None else resumed_after + 1)
        self._again_at = inf
        """When to try again after the disk has refused a write, by the monotonic clock."""

    def _open(self, purge_step: int | None = None) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter  # an optional package, which takes a second to import

        return SummaryWriter(str(self._folder), purge_step=purge_step)

    def write(self, event: RunEvent) -> None:
        if self._writer is None and time.monotonic() < self._again_at:
            return
        try:
            self._writer = self._writer or self._open()
            for name, value in scalars(event):
                self._writer.add_scalar(name, value, event["step"])
        except OSError as error:
            self._pause(error)

    def _pause(self, error: OSError) -> None:
        """Give up the file that could not be written, and say so the first time."""
        if self._again_at == inf:
            warn(f"cannot write to {self._folder} ({error.strerror}); the run continues, and TensorBoard has a gap")
        self._writer, self._again_at = None, time.monotonic() + TENSORBOARD_AGAIN_SECONDS

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._pause(error)


class WeightsAndBiases:
    """Writes events to Weights & Biases."""

    def __init__(self, project: str, folder: Path, config: TrainConfig) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError("log.wandb needs the package wandb: pip install wandb, or leave log.wandb out") from error
        self._run = wandb.init(project=project, dir=str(folder), name=folder.name, config=to_table(config))

    def write(self, event: RunEvent) -> None:
        self._run.log(dict(scalars(event)), step=event["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(event: RunEvent) -> list[tuple[str, float]]:
    """Return the numbers of an event by name; numbers by axis are named like `wire_bytes/x`."""
    return _numbers(event["event"], {key: value for key, value in event.items() if key != "step"})


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [found for key, below in value.items() for found in _numbers(f"{name}/{key}", below)]
    return [(name, float(value))] if isinstance(value, int | float) else []


def open_sinks(log: LogSection, folder: Path, config: TrainConfig, resumed_after: int | None = None) -> list[Sink]:
    """Open all sinks that the config asks for, or none if one fails.

    `resumed_after` is the step after which a run resumes, None for a new run.
    """
    installed = find_spec("tensorboard") is not None
    if log.tensorboard is True and not installed:
        raise ImportError("log.tensorboard is true but tensorboard is not installed: pip install 'fourfold[train]'")
    sinks: list[Sink] = []
    with ExitStack() as opened:
        sinks.append(opened.enter_context(closing(JsonLines(folder / "metrics.jsonl"))))
        if log.tensorboard and installed:
            sinks.append(opened.enter_context(closing(TensorBoard(folder / "tensorboard", resumed_after))))
        if log.wandb is not None:
            sinks.append(opened.enter_context(closing(WeightsAndBiases(log.wandb, folder, config))))
        opened.pop_all()  # all are open: from here on the run closes them
    return sinks


def read_events(metrics: Path) -> Iterator[tuple[str, RunEvent]]:
    """Yield the lines of metrics.jsonl with their events; leave out a line that was cut off when the run died."""
    if not metrics.exists():
        return
    with metrics.open(errors="replace") as lines:
        yield from _events(lines)


def _events(lines: Iterable[str]) -> Iterator[tuple[str, RunEvent]]:
    for line in lines:
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "event" in event and isinstance(event.get("step"), int):
            yield line, event


def stays(event: RunEvent, step: int) -> bool:
    """Return whether an event still belongs to a run that resumes after this step."""
    return event["event"] != "end" and event["step"] <= step


def rewind(metrics: Path, step: int) -> None:
    """Keep the events up to this step; drop later ones, the end, and a line that was cut off."""
    if metrics.exists():
        with replacing(metrics) as partial, partial.open("w") as file:
            file.writelines(line for line, event in read_events(metrics) if stays(event, step))


def last_end(metrics: Path) -> RunEvent | None:
    """Return the event that ended the run, or None if the run still trains or died without one."""
    last = deque(read_events(metrics), maxlen=1)
    return last[0][1] if last and last[0][1]["event"] == "end" else None


def last_good_step(metrics: Path) -> int:
    """Return the last step that was recorded and not skipped, 0 if there is none."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as file:  # the end alone: a long run has written gigabytes
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
        lines = file.read().decode(errors="replace").splitlines()
    good = (event["step"] for _, event in _events(lines) if event["event"] == "step" and not event.get("skipped"))
    return max(good, default=0)


def finish(metrics: Path, step: int) -> None:
    """Record the end of a run that saved its last step and was killed before it could record it."""
    if last_end(metrics) is None:
        rewind(metrics, step)
        record = JsonLines(metrics)
        record.write({"event": "end", "step": step, "reason": End.FINISHED})
        record.close()


def holds_run(out: Path) -> bool:
    """Return whether a run was started in the folder, or a model was imported into it."""
    require_reachable(out / CHECKPOINTS)
    return (out / "metrics.jsonl").exists() or bool(Checkpoints(out / CHECKPOINTS).complete())


def check_folder(out: Path, *, save: bool) -> None:
    """Raise if the folder holds a run or anything else already, or if checkpoints cannot be written."""
    require_own(out)
    if holds_run(out):
        raise FileExistsError(
            f"{out} already holds a run; give another --out, or resume it: "
            f"fourfold train --resume {shlex.quote(str(out))}"
        )
    require_writing(save=save)


def require_writing(*, save: bool) -> None:
    """Raise if checkpoints are to be saved and safetensors is not installed."""
    if save and find_spec("safetensors") is None:
        raise ImportError("checkpoints need safetensors: pip install 'fourfold[train]', or checkpoint.save=false")

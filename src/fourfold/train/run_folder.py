"""A run's folder: what is written there while it trains, so that it stays readable whenever the run ends.

    config.toml     the resolved config; `fourfold train RUN/config.toml` runs it again
    run.json        what the run is: grid, model, device, versions; what was predicted, and how its steps compare;
                    of a resumed run also when and on which grids it ran before
    metrics.jsonl   one JSON object a line: steps, evaluations, skipped steps, spikes, a comparison, a profile, saved
                    checkpoints, resumptions, stragglers, the end; each step once, whatever happened between
    tensorboard/    the same for TensorBoard, where it is installed
    profile/        traces of the steps that --profile names, their summary, and the predicted timeline of a step
    data/           prepared text
    log.txt         what happened, for people; events.jsonl the same for programs; logs/ what each rank said (`story`)
    passed-over.json  which data a run that was rolled back leaves out
    .lock           held by the job that trains there
    watch/          what each rank did last, on its tape; why the run stood still, where it did
    checkpoints/    complete states of training, by step, which any grid can go on from

Rank 0 alone writes the records; every rank writes its own trace and its part of a checkpoint.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import IO, Any, Protocol

from fourfold.atomic import replacing
from fourfold.checkpoint.folder import CHECKPOINTS, Checkpoints
from fourfold.errors import End
from fourfold.train.config import LogSection, TrainConfig
from fourfold.train.schema import to_table

RunEvent = dict[str, Any]
KINDS = ("step", "evaluation", "skipped", "spike", "compared", "profile", "saved", "resumed", "straggler", "end")
"""What events tell of."""


LOCK = ".lock"


class FolderLock:
    """A run's folder in the hands of one job, until it is released or the process has ended, however it did."""

    def __init__(self, folder: Path) -> None:
        """Raises where another job has it; where the file system knows no locks nobody is refused."""
        self._file = (folder / LOCK).open("a+")
        try:
            _lock(self._file, folder)
        except BaseException:
            self._file.close()
            raise
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        self._file.close()


def write_for_us_alone() -> None:
    """From now on nobody but us and our group may change what this process writes."""
    os.umask(os.umask(0o077) | stat.S_IWOTH)


def make_folder(folder: Path) -> None:
    """A run's folder, which not everybody may change: what is loaded from there must be what was saved."""
    folder.mkdir(parents=True, exist_ok=True)
    mode = folder.stat().st_mode
    if not mode & stat.S_IWOTH:
        return
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"everybody may write to {folder}, which is another user's; give a folder of your own")
    folder.chmod(stat.S_IMODE(mode) & ~stat.S_IWOTH)


def require_unowned(folder: Path) -> None:
    """Refuse a folder that another job has, and leave it as it is."""
    if (folder / LOCK).exists():
        with (folder / LOCK).open("r+") as file:
            _lock(file, folder)


def _lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES):
            return  # this file system knows no locks
        file.seek(0)
        raise BlockingIOError(
            f"another job ({file.read().strip() or 'just begun'}) is training in {folder}; wait until it has ended, "
            "stop it, or give another folder"
        ) from error


class Sink(Protocol):
    """Something that takes events: a file, TensorBoard, Weights & Biases, the terminal."""

    def write(self, event: RunEvent) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """JSON lines, each complete on disk before the next."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("a")

    def write(self, event: RunEvent) -> None:
        try:
            self._file.write(json.dumps(strict(event)) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(
                error.errno, f"cannot log to {self.path} ({error.strerror}); what was written so far stays readable"
            ) from error

    def close(self) -> None:
        with suppress(OSError):  # the line that did not fit was reported already; the file is closed all the same
            self._file.close()


def strict(content: Any) -> Any:
    """As JSON knows it: numbers that are not finite become null."""
    if isinstance(content, dict):
        return {key: strict(value) for key, value in content.items()}
    if isinstance(content, list):
        return [strict(value) for value in content]
    return None if isinstance(content, float) and not isfinite(content) else content


class MemorySink:
    """Events in memory, for `--json`."""

    def __init__(self) -> None:
        self.events: list[RunEvent] = []

    def write(self, event: RunEvent) -> None:
        self.events.append(event)

    def rewind(self, step: int) -> None:
        self.events = [event for event in self.events if stays(event, step)]

    def close(self) -> None:
        """Nothing to close: it is read afterwards."""


class TensorBoard:
    """Steps after `taken_up`, which an earlier part of the run has shown, are not shown any more."""

    def __init__(self, folder: Path, taken_up: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=None if taken_up is None else taken_up + 1)

    def write(self, event: RunEvent) -> None:
        for name, value in scalars(event):
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str, folder: Path, config: TrainConfig) -> None:
        try:
            import wandb  # type: ignore[import-not-found]
        except ImportError as error:
            raise ImportError(
                "log.wandb needs the package wandb: pip install wandb, or leave log.wandb away"
            ) from error
        self._run = wandb.init(project=project, dir=str(folder), name=folder.name, config=to_table(config))

    def write(self, event: RunEvent) -> None:
        self._run.log(dict(scalars(event)), step=event["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(event: RunEvent) -> list[tuple[str, float]]:
    """An event's numbers by name, those by axis as `wire_bytes/x`."""
    return [
        found for key, value in event.items() if key != "step" for found in _numbers(f"{event['event']}/{key}", value)
    ]


def _numbers(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [found for key, below in value.items() for found in _numbers(f"{name}/{key}", below)]
    return [(name, float(value))] if isinstance(value, int | float) else []


def open_sinks(log: LogSection, folder: Path, config: TrainConfig, taken_up: int | None = None) -> list[Sink]:
    """All that the config asks for, or none. Where a run is taken up again, after which step."""
    if log.tensorboard is True and find_spec("tensorboard") is None:
        raise ImportError("log.tensorboard is true but tensorboard is not installed: pip install 'fourfold[train]'")
    sinks: list[Sink] = []
    with ExitStack() as opened:

        def add(sink: Sink) -> None:
            opened.callback(sink.close)
            sinks.append(sink)

        add(JsonLines(folder / "metrics.jsonl"))
        if log.tensorboard is True or (log.tensorboard == "auto" and find_spec("tensorboard") is not None):
            add(TensorBoard(folder / "tensorboard", taken_up))
        if log.wandb is not None:
            add(WeightsAndBiases(log.wandb, folder, config))
        opened.pop_all()
    return sinks


def read_facts(out: Path) -> RunEvent | None:
    """What run.json holds, None where it is not there or was not written to its end."""
    try:
        return json.loads((out / "run.json").read_text())
    except (OSError, ValueError):
        return None


def stays(event: RunEvent, step: int) -> bool:
    """Whether it is still true of a run that goes on after this step."""
    return event["event"] != "end" and event["step"] <= step


def rewind(metrics: Path, step: int) -> None:
    """Leave of the events those up to this step; the end, and a line that was cut off, go."""

    def kept(line: str) -> bool:
        try:
            return stays(json.loads(line), step)
        except (KeyError, TypeError, ValueError):
            return False

    if metrics.exists():
        with replacing(metrics) as partial, metrics.open(errors="replace") as lines, partial.open("w") as file:
            file.writelines(line for line in lines if kept(line))


def last_end(metrics: Path) -> RunEvent | None:
    """How the run ended, unless it has gone on since or does still."""
    last = ""
    if metrics.exists():
        with metrics.open(errors="replace") as lines:
            for last in lines:  # noqa: B007
                pass
    with suppress(ValueError, TypeError, KeyError):  # a line that was cut off
        event = json.loads(last)
        return event if event["event"] == "end" else None
    return None


def finish(metrics: Path, step: int) -> None:
    """Record the end of a run that saved its last step, where it was killed before it could."""
    if last_end(metrics) is not None:
        return
    rewind(metrics, step)
    record = JsonLines(metrics)
    record.write({"event": "end", "step": step, "reason": End.FINISHED})
    record.close()


def holds_run(out: Path) -> bool:
    """Whether a run was begun there, or a model imported."""
    return (out / "metrics.jsonl").exists() or bool(Checkpoints(out / CHECKPOINTS).complete())


def check_folder(out: Path, *, save: bool) -> None:
    """Refuse a folder that holds a run already, and checkpoints that nothing here can write."""
    if holds_run(out):
        raise FileExistsError(
            f"{out} holds a run already; give another --out, or go on with it: fourfold train --resume {out}"
        )
    require_writing(save=save)


def require_writing(*, save: bool) -> None:
    """Refuse to promise checkpoints that nothing here can write."""
    if save and find_spec("safetensors") is None:
        raise ImportError("checkpoints need safetensors: pip install 'fourfold[train]', or checkpoint.save=false")

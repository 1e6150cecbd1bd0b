"""What a run tells, beside its metrics: a log for people, the same as events for programs, and a file for each rank.

log.txt              what the terminal showed, with the time; and why ranks died and were started again
events.jsonl         one JSON object a line, with the time: all that happened but steps. Nothing is ever taken back:
                     what a run that went back has done twice is there twice
logs/rank-00003.txt  warnings and errors of a rank, with where in the code; what python's logging says; how it crashed
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import warnings
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self, TextIO

from fourfold.grid import Grid
from fourfold.train.progress import PlainProgress
from fourfold.train.run_folder import JsonLines, RunEvent

LOG, EVENTS, OF_RANKS = "log.txt", "events.jsonl", "logs"
logger = logging.getLogger("fourfold")
logger.addHandler(logging.NullHandler())
logger.setLevel(logging.INFO)


def now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


class TimestampedFile(TextIO):
    """A file whose lines begin with the time."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._begins = file, True

    def write(self, text: str) -> int:
        stamp = f"{now()} "
        for line in text.splitlines(keepends=True):
            self._file.write(stamp + line if self._begins and line.strip() else line)
            self._begins = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RunLog(PlainProgress):
    """A sink: log and events of a run; by rank 0."""

    def __init__(self, folder: Path, steps: int, done: int = 0) -> None:
        self._stamped = TimestampedFile((folder / LOG).open("a"))
        super().__init__(self._stamped, steps, done)
        self._events = JsonLines(folder / EVENTS)

    def write(self, event: RunEvent) -> None:
        super().write(event)
        if event["event"] == "end":
            self.say(f"ended at step {event['step']}: {event['reason']}")
        if event["event"] != "step":
            self._events.write({"at": now(), **event})

    def close(self) -> None:
        with suppress(OSError):  # a full disk was reported by whoever wrote what did not fit
            self._stamped.close()
        self._events.close()


def note(folder: Path, kind: str, text: str) -> None:
    """What the launcher did with the ranks of a run, where it has begun; that a disk is full is not its to say."""
    if not (folder / EVENTS).exists():
        return
    with suppress(OSError):
        with (folder / LOG).open("a") as file:
            TimestampedFile(file).write(f"{text}\n")
        events = JsonLines(folder / EVENTS)
        events.write({"at": now(), "event": kind, "said": text})
        events.close()


class RankLog:
    """This rank's own file, from now on until it is closed."""

    def __init__(self, folder: Path, grid: Grid) -> None:
        (folder / OF_RANKS).mkdir(parents=True, exist_ok=True)
        self._file = (folder / OF_RANKS / f"rank-{grid.rank:05}.txt").open("a")
        self._handler = logging.StreamHandler(self._file)
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._handler)
        self._show_warning, warnings.showwarning = warnings.showwarning, self._warn
        faulthandler.enable(self._file)
        where = ", ".join(f"{axis}={place}" for axis, place in grid.coords.items())
        logger.info("rank %d (%s) begins: %s, process %d", grid.rank, where, socket.gethostname(), os.getpid())

    def _warn(self, message: Warning | str, category: type[Warning], *more: Any, **named: Any) -> None:
        self._show_warning(message, category, *more, **named)
        logger.warning("%s: %s", category.__name__, message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            logger.error("ends", exc_info=error)
        else:
            logger.info("ends")
        warnings.showwarning = self._show_warning
        logging.getLogger().removeHandler(self._handler)
        faulthandler.enable(sys.__stderr__ or 2)
        self._file.close()

"""The logs of a run beside its metrics: one for people, the same as events for programs, and a file for each rank.

log.txt              what the terminal showed, with the time; and why ranks died and were restarted
events.jsonl         one JSON object per line, with the time: everything that happened except steps. Nothing is ever
                     removed: what a run has done twice because it was rolled back is there twice
logs/rank-00003.txt  warnings and errors of a rank with their tracebacks, Python's logging, and how the rank crashed
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

LOG, EVENTS, RANK_LOGS = "log.txt", "events.jsonl", "logs"
logger = logging.getLogger("fourfold")
logger.addHandler(logging.NullHandler())
logger.setLevel(logging.INFO)


def now() -> str:
    """Return the local time with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


class TimestampedFile(TextIO):
    """A text file that begins every line with the time."""

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
    """The sink of rank 0 that writes log.txt and events.jsonl."""

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
        with suppress(OSError):  # `write` has reported a full disk
            self._stamped.close()
        self._events.close()


def note(folder: Path, kind: str, text: str) -> None:
    """Add what the launcher did with the ranks to the logs of a run that has started; ignore a full disk."""
    if not (folder / EVENTS).exists():
        return
    with suppress(OSError):
        with (folder / LOG).open("a") as file:
            TimestampedFile(file).write(f"{text}\n")
        events = JsonLines(folder / EVENTS)
        events.write({"at": now(), "event": kind, "said": text})
        events.close()


class RankLog:
    """The log file of this rank; inside the context it receives warnings, Python's logging and crashes."""

    def __init__(self, folder: Path, grid: Grid) -> None:
        (folder / RANK_LOGS).mkdir(parents=True, exist_ok=True)
        self._file = (folder / RANK_LOGS / f"rank-{grid.rank:05}.txt").open("a")
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

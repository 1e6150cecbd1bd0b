"""Watches over the ranks of a run: a tape of what each rank does, an alarm when one is stuck, and who is slow.

The rank that raises the alarm leaves the diagnosis in the run's folder (`watch/diagnosis.txt`). Every rank reports it
to whoever started it, and ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from fourfold.grid import Grid
from fourfold.train.launch import report_failure
from fourfold.train.run_log import logger
from fourfold.watch.liveness import Alarm, JobDiagnosis
from fourfold.watch.peers import StepWindows, Straggler
from fourfold.watch.tape import Tape, Waits, tape_path


class NoGuard:
    """Does nothing; stands in for a guard if the job has only one rank."""

    def begin_step(self, step: int) -> None: ...
    def doing(self, what: str, waits: Waits = Waits.NOTHING) -> None: ...
    def failed(self, reason: str) -> None: ...
    def took(self, seconds: float, waited: Mapping[str, float]) -> None: ...
    def stragglers(self) -> list[Straggler]:
        return []

    def close(self, *, done: bool) -> None: ...


class Guard(NoGuard):
    """The guard of one rank; all ranks make it together. `deadline` is how long a rank may wait, in seconds."""

    def __init__(self, grid: Grid, folder: Path, deadline: float) -> None:
        self._ledger = grid.ledger
        self._tape = Tape(tape_path(folder, grid.rank), grid.rank, grid.shape)
        self._ledger.listener = self._tape
        self._alarm = Alarm(self._tape, grid, folder, deadline, end)
        self._windows = StepWindows(grid)

    def begin_step(self, step: int) -> None:
        self._tape.step = step
        self._tape.doing("reading a batch")

    def doing(self, what: str, waits: Waits = Waits.NOTHING) -> None:
        """Write onto the tape what this rank does from now on."""
        self._tape.doing(what, waits)

    def failed(self, reason: str) -> None:
        """Find out with all ranks why a collective failed here, and end this process; return if that is impossible."""
        self._alarm.call(reason)

    def took(self, seconds: float, waited: Mapping[str, float]) -> None:
        """Count a step: its seconds, and how many of them this rank waited along each axis."""
        self._windows.took(seconds, waited)

    def stragglers(self) -> list[Straggler]:
        """Exchange the times of the last steps, right after all ranks have met; on rank 0 return who became slow."""
        return self._windows.exchange()

    def close(self, *, done: bool) -> None:
        """Stop watching; `done` says that this rank did all that others may wait for, and did not fail."""
        self._alarm.close(done=done)
        self._ledger.listener = None
        self._tape.close()


def end(found: JobDiagnosis, judge: bool) -> None:
    """Report the diagnosis to whoever started this rank, and end the process.

    It ends by `os._exit`, because its main thread may never come back from where it waits. The judge alone prints the
    whole text.
    """
    logger.error("%s", found.text)
    report_failure(found.text, found.failure, whole=judge)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

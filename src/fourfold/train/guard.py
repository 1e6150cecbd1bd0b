"""Watches over the ranks of a run: what each did last is on its tape, nobody waits for ever, who is slow is named.

The rank that raises the alarm leaves the diagnosis in the run's folder (`watch/diagnosis.txt`); every rank gives it to
whoever started it, and ends.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from fourfold.grid import Grid
from fourfold.job import Channel
from fourfold.train.launch import report_failure
from fourfold.train.story import logger
from fourfold.watch.alarm import Alarm, Verdict
from fourfold.watch.straggle import Sample, Straggler, Stragglers
from fourfold.watch.tape import Tape, Waits, tape_path


class Unguarded:
    """In the place of a guard where a rank is alone."""

    def begin_step(self, step: int) -> None: ...
    def doing(self, what: str, waits: Waits = Waits.NOTHING) -> None: ...
    def failed(self, reason: str) -> None: ...
    def took(self, seconds: float, waited: Mapping[str, float]) -> None: ...
    def stragglers(self) -> list[Straggler]:
        return []

    def close(self, *, done: bool) -> None: ...


class Guard(Unguarded):
    """Of one rank; all ranks make it together. A rank may wait so many seconds for the others; inf: for ever."""

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
        self._tape.doing(what, waits)

    def failed(self, reason: str) -> None:
        """A collective failed here: find out why, with all ranks, and end; returns where that is impossible."""
        self._alarm.call(reason)

    def took(self, seconds: float, waited: Mapping[str, float]) -> None:
        """A step, of which this rank waited so long along each axis."""
        self._windows.took(seconds, waited)

    def stragglers(self) -> list[Straggler]:
        """Exchange the times of the last steps, right after all ranks have met; on rank 0 return who became slow."""
        return self._windows.exchange()

    def close(self, *, done: bool) -> None:
        """This rank has done all that others may wait for, or has failed."""
        self._alarm.close(done=done)
        self._ledger.listener = None
        self._tape.close()


class StepWindows:
    """Windows of steps between two meetings of all ranks; the ranks exchange what each window cost them.

    A rank puts its figures of a window after the meeting that ends it. So at the next meeting all ranks have put
    theirs, and the first rank reads them without waiting for anyone.
    """

    MIN_STEPS = 8
    """Steps of a window, at least: in fewer steps a single pause of a busy machine would count for much."""

    def __init__(self, grid: Grid) -> None:
        self._channel = Channel("steps", grid.channel.ranks, fresh=True)
        self._stragglers = Stragglers(grid.shape)
        self._window = 0
        self._clear()

    def _clear(self) -> None:
        self._steps, self._own, self._waited = 0, 0.0, Counter[str]()

    def took(self, seconds: float, waited: Mapping[str, float]) -> None:
        self._steps += 1
        self._own += seconds - sum(waited.values())
        self._waited.update(waited)

    def exchange(self) -> list[Straggler]:
        """Put the figures of the window that ends here; on the first rank return who has become a straggler."""
        if self._steps < self.MIN_STEPS:
            return []
        found: list[Straggler] = []
        if self._window and self._channel.leads:
            texts = self._channel.collect(str(self._window))
            found = self._stragglers.hear([Sample(*json.loads(text)) for text in texts.values()])
        if self._window > 1:
            self._channel.drop(str(self._window - 1))  # the first rank has read it: all have met since
        self._window += 1
        waited = {axis: seconds / self._steps for axis, seconds in self._waited.items()}
        self._channel.put(str(self._window), json.dumps([self._own / self._steps, waited]))
        self._clear()
        return found


def end(verdict: Verdict, judge: bool) -> None:
    """Tell whoever started this rank, and end it: its main thread may never come back from where it stands."""
    logger.error("%s", verdict.text)
    report_failure(verdict.text, verdict.failure, whole=judge)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)

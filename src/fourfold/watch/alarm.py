"""Deadlines: where a rank waits too long for a collective, all ranks end with the same diagnosis.

Each rank has two threads. The *clock* looks how long its rank has been waiting. The *ear* asks the job's store whether
any rank has raised the alarm, and raises it itself where a rank of the same machine has died: whoever waits for that
one need not wait for the deadline. Once the alarm is raised, every rank that lives answers with where in the code it
stands; the rank that raised it reads all tapes, those of the silent included, and what it finds is the last word of
all.

A rank that the store does not answer any more (its node is gone, or the network) cannot be heard and speaks for
itself. Nothing here is a collective, and the main thread, which may never return from its wait, is not needed.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread

import torch.distributed as dist

from fourfold.errors import Failure
from fourfold.grid import Grid
from fourfold.watch.diagnose import diagnose
from fourfold.watch.siblings import Siblings
from fourfold.watch.tape import DIAGNOSIS, Tape, read, tape_path

PAUSE = 1.0
"""Seconds between two looks; less with a short deadline."""
ANSWERS = 5.0
"""Seconds that ranks have to answer ..."""
VERDICT = 30.0
"""... and for which they wait for what is found."""
CUT_OFF = 10.0
"""Seconds beyond the deadline after which a rank that the store does not answer speaks for itself."""
MOURNING = 3.0
"""Seconds that a rank has to notice by itself that another one has died, and to end in order."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks found out together."""

    text: str
    failure: Failure
    silent: tuple[int, ...] = ()
    """Ranks that did not answer."""


class Alarm:
    """Watches the waits of this rank; all ranks make it together. `end` gets the last word, and ends this process."""

    _made = itertools.count()

    def __init__(
        self, tape: Tape, grid: Grid, folder: Path, deadline: float, end: Callable[[Verdict, bool], None]
    ) -> None:
        self._tape, self._rank, self._world = tape, grid.rank, grid.shape.world
        self._folder, self._deadline, self._end_with = folder, deadline, end
        self._name = f"fourfold/watch/{next(self._made)}"
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._pause = min(PAUSE, deadline / 5)
        self._siblings = Siblings(self._store, f"{self._name}/siblings", self._rank)
        self._dead: dict[int, int] = {}
        self._dead_since: float | None = None
        self._over, self._raised, self._spoken = Event(), Event(), Event()
        self._done = False
        self._reason, self._failure = "", Failure.DIAGNOSIS
        self._answering = False
        self._threads = [Thread(target=run, daemon=True) for run in (self._watch, self._listen)]
        for thread in self._threads:
            thread.start()

    def close(self, *, done: bool) -> None:
        """The run has come to its end here: this rank has done all that others may wait for, or has failed."""
        self._done = done
        self._over.set()
        for thread in self._threads:
            thread.join(self._pause + 1)

    def call(self, reason: str) -> None:
        """Raise the alarm, because a collective failed on this rank; returns only where that comes to no end."""
        self._raise(reason)
        self._spoken.wait(ANSWERS + VERDICT)

    # --- the clock

    def _watch(self) -> None:
        while not self._over.wait(self._pause):
            since = self._tape.since
            late = 0.0 if since is None else time.monotonic() - since - self._deadline
            if late > 0 and not self._raised.is_set():
                self._raise(f"waited for {self._deadline:g} s")
            if late > CUT_OFF and not self._answering:
                self._speak_alone()

    def _raise(self, reason: str, failure: Failure = Failure.DIAGNOSIS) -> None:
        self._tape.freeze()
        self._reason, self._failure = reason, failure
        self._raised.set()

    def _speak_alone(self) -> None:
        """What this rank knows by itself."""
        mine = read(tape_path(self._folder, self._rank))
        found = diagnose({self._rank: mine}, {self._rank: stack_of_main()})
        text = f"rank {self._rank} {self._reason}; the job's store does not answer: its node or the network is gone"
        text = "\n".join((text, *(f"  {line}" for line in found.lines())))
        self._end(Verdict(text, Failure.DIAGNOSIS), judge=True)

    # --- the ear

    def _listen(self) -> None:
        judge = False
        while not self._over.wait(self._pause):
            with suppress(dist.DistError, RuntimeError):  # cut off: the clock notices
                self._look_around()
                if self._raised.is_set():
                    judge = self._store.add(f"{self._name}/raised", 1) == 1
                    if judge:
                        alarm = f"rank {self._rank} {self._reason}", self._failure
                        self._store.set(f"{self._name}/alarm", json.dumps(alarm))
                if self._store.check([f"{self._name}/alarm"]):
                    self._answer(judge=judge)
                    return
        if self._done:
            with suppress(dist.DistError, RuntimeError):  # those who are left had no need of the store
                self._siblings.leave()

    def _look_around(self) -> None:
        self._dead = self._siblings.dead()
        if not self._dead:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > MOURNING and not self._raised.is_set():
            who = " and ".join(f"rank {rank} (process {process})" for rank, process in sorted(self._dead.items()))
            self._raise(f"saw that {who} had died", Failure.DEATH)

    def _answer(self, *, judge: bool) -> None:
        self._tape.freeze()  # what holds them up may pass while they look
        self._store.set(f"{self._name}/answer/{self._rank}", stack_of_main())
        self._store.add(f"{self._name}/answers", 1)
        self._answering = True
        if judge:
            verdict = self._judge()
            self._store.set(f"{self._name}/verdict", json.dumps(asdict(verdict)))
        else:
            verdict = self._await_verdict()
        self._end(verdict, judge=judge)

    def _judge(self) -> Verdict:
        until = time.monotonic() + ANSWERS
        living = self._world - len(self._dead)
        while self._store.add(f"{self._name}/answers", 0) < living and time.monotonic() < until:
            time.sleep(0.05)
        keys = {rank: f"{self._name}/answer/{rank}" for rank in range(self._world)}
        stacks = {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        reason, failure = json.loads(self._store.get(f"{self._name}/alarm"))
        readings = {}
        for rank in range(self._world):
            with suppress(OSError, ValueError):  # a node that is gone may have taken its tape along
                readings[rank] = read(tape_path(self._folder, rank))
        headline, *more = diagnose(readings, stacks).lines()
        text = "\n".join((f"{headline} ({reason})", *more))
        with suppress(OSError):
            (self._folder / DIAGNOSIS).write_text(text + "\n")
        return Verdict(text, Failure(failure), tuple(rank for rank in range(self._world) if rank not in stacks))

    def _await_verdict(self) -> Verdict:
        until = time.monotonic() + ANSWERS + VERDICT
        while not self._store.check([f"{self._name}/verdict"]):
            if time.monotonic() > until:
                return Verdict("the rank that raised the alarm did not say why", Failure.DIAGNOSIS)
            time.sleep(0.05)
        found = json.loads(self._store.get(f"{self._name}/verdict"))
        return Verdict(found["text"], Failure(found["failure"]), tuple(found["silent"]))

    def _end(self, verdict: Verdict, *, judge: bool) -> None:
        self._siblings.kill(verdict.silent)
        self._end_with(verdict, judge)
        self._spoken.set()


def stack_of_main() -> str:
    """Where the main thread stands, without what called it outside of the package's own code and the user's."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)[-DEPTH:])


DEPTH = 12
"""Frames of a stack that are shown, the innermost ones."""

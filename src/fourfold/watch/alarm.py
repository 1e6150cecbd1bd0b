"""Deadlines: when a rank waits too long for a collective, all ranks end with the same diagnosis.

Each rank has two threads. The *clock* measures how long the rank has been waiting. The *listener* asks the job's store
whether any rank has raised the alarm, and raises it itself when a process on the same machine has died, so that nobody
who waits for that rank waits for the deadline. Once the alarm is raised, every living rank answers with its stack. The
rank that raised it (the *judge*) reads the tapes of all ranks, also of those that did not answer, and its verdict is
the last thing that every rank reports.

A rank that the store does not answer any more (its node is gone, or the network) reports what it knows by itself.
Nothing here is a collective, and the main thread, which may never return from its wait, is not needed.
"""

from __future__ import annotations

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

from fourfold.errors import Failure, LateRanksError
from fourfold.grid import Grid
from fourfold.job import Channel
from fourfold.watch.diagnose import diagnose
from fourfold.watch.siblings import Siblings
from fourfold.watch.tape import DIAGNOSIS, Tape, read, tape_path

PAUSE = 1.0
"""Seconds between two looks of each thread, a fifth of the deadline where that is shorter: a look costs two messages to
the store, and a second more or less does not matter beside deadlines of minutes."""
ANSWER_SECONDS = 5.0
"""Seconds that living ranks have to answer an alarm: several pauses of the listener."""
VERDICT_SECONDS = 30.0
"""Seconds beyond that for the judge to read all tapes, perhaps from a slow network file system."""
CUT_OFF_SECONDS = 10.0
"""Seconds beyond the deadline after which a rank that the store does not answer reports by itself."""
DEATH_SECONDS = 3.0
"""Seconds between the death of a sibling and the alarm: whoever has a connection to it fails earlier, in order."""
STACK_DEPTH = 12
"""Frames of a stack that are shown, the innermost ones."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the ranks found out together."""

    text: str
    failure: Failure
    silent: tuple[int, ...] = ()
    """Ranks that did not answer."""


class Alarm:
    """Watches the waits of this rank; all ranks make it together.

    `end` gets the verdict and whether this rank is the judge, and ends this process.
    """

    def __init__(
        self, tape: Tape, grid: Grid, folder: Path, deadline: float, end: Callable[[Verdict, bool], None]
    ) -> None:
        self._tape, self._rank = tape, grid.rank
        self._folder, self._deadline, self._end_with = folder, deadline, end
        # the listener is a thread, and the main thread may be inside the job's store at the same time
        self._channel = Channel("watch", grid.channel.ranks, fresh=True, own_connection=True)
        self._pause = min(PAUSE, deadline / 5)
        self._siblings = Siblings(self._channel)
        self._dead: dict[int, int] = {}
        self._dead_since: float | None = None
        self._over, self._raised, self._spoken = Event(), Event(), Event()
        self._done = False
        self._reason, self._failure = "", Failure.DIAGNOSIS
        self._answering = False
        self._threads = [Thread(target=run, daemon=True) for run in (self._watch_clock, self._listen)]
        for thread in self._threads:
            thread.start()

    def close(self, *, done: bool) -> None:
        """Stop watching; `done` says that this rank did all that others may wait for, and did not fail."""
        self._done = done
        self._over.set()
        for thread in self._threads:
            thread.join(self._pause + 1)

    def call(self, reason: str) -> None:
        """Raise the alarm because a collective failed on this rank; return only if no verdict comes."""
        self._raise(reason)
        self._spoken.wait(ANSWER_SECONDS + VERDICT_SECONDS)

    # --- the clock

    def _watch_clock(self) -> None:
        while not self._over.wait(self._pause):
            since = self._tape.since
            late = 0.0 if since is None else time.monotonic() - since - self._deadline
            if late > 0 and not self._raised.is_set():
                self._raise(f"waited for {self._deadline:g} s")
            if late > CUT_OFF_SECONDS and not self._answering:
                self._report_alone()

    def _raise(self, reason: str, failure: Failure = Failure.DIAGNOSIS) -> None:
        self._tape.freeze()
        self._reason, self._failure = reason, failure
        self._raised.set()

    def _report_alone(self) -> None:
        mine = read(tape_path(self._folder, self._rank))
        found = diagnose({self._rank: mine}, {self._rank: stack_of_main()})
        text = f"rank {self._rank} {self._reason}; the job's store does not answer: its node or the network is gone"
        text = "\n".join((text, *(f"  {line}" for line in found.lines())))
        self._end(Verdict(text, Failure.DIAGNOSIS), judge=True)

    # --- the listener

    def _listen(self) -> None:
        judge = False
        while not self._over.wait(self._pause):
            with suppress(RuntimeError):  # the store does not answer: the clock reports after its own deadline
                self._look_for_dead()
                if self._raised.is_set():
                    alarm = self._rank, f"rank {self._rank} {self._reason}", self._failure
                    judge = self._channel.announce("alarm", json.dumps(alarm))
                if (raised := self._channel.announced("alarm")) is not None:
                    self._answer(*json.loads(raised), judges=judge)
                    return
        if self._done:
            with suppress(RuntimeError):  # the store is gone with the last rank that needed it
                self._siblings.leave()

    def _look_for_dead(self) -> None:
        self._dead = self._siblings.dead()
        if not self._dead:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > DEATH_SECONDS and not self._raised.is_set():
            who = " and ".join(f"rank {rank} (process {process})" for rank, process in sorted(self._dead.items()))
            self._raise(f"saw that {who} had died", Failure.DEATH)

    def _answer(self, judge: int, reason: str, failure: str, *, judges: bool) -> None:
        self._tape.freeze()  # whatever holds the ranks up may pass while they look at each other
        self._channel.put("answer", stack_of_main())
        self._answering = True
        if judges:
            verdict = self._judge(reason, Failure(failure))
            self._channel.put("verdict", json.dumps(asdict(verdict)))
        else:
            verdict = self._await_verdict(judge)
        self._end(verdict, judge=judges)

    def _judge(self, reason: str, failure: Failure) -> Verdict:
        ranks = self._channel.ranks
        living = [rank for rank in ranks if rank not in self._dead]
        stacks = self._channel.collect("answer", living, ANSWER_SECONDS, partial=True)
        readings = {}
        for rank in ranks:
            with suppress(OSError, ValueError):  # a node that is gone may have taken its tape along
                readings[rank] = read(tape_path(self._folder, rank))
        headline, *more = diagnose(readings, stacks).lines()
        text = "\n".join((f"{headline} ({reason})", *more))
        with suppress(OSError):
            (self._folder / DIAGNOSIS).write_text(text + "\n")
        return Verdict(text, failure, tuple(rank for rank in ranks if rank not in stacks))

    def _await_verdict(self, judge: int) -> Verdict:
        try:
            found = json.loads(self._channel.get("verdict", judge, ANSWER_SECONDS + VERDICT_SECONDS))
        except LateRanksError:
            return Verdict(f"rank {judge} raised the alarm and did not say why", Failure.DIAGNOSIS)
        return Verdict(found["text"], Failure(found["failure"]), tuple(found["silent"]))

    def _end(self, verdict: Verdict, *, judge: bool) -> None:
        self._siblings.kill(verdict.silent)
        self._end_with(verdict, judge)
        self._spoken.set()


def stack_of_main() -> str:
    """Return the stack of the main thread, its innermost frames."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)[-STACK_DEPTH:])

"""Detects dead and stuck ranks, and decides which detector's finding is shown.

A rank is *dead* when its process is gone and *stuck* when it does not come to the collective that others wait for. Five
detectors look for both; each sees something that the others do not:

    detector            where                       sees                                              after
    agent               `train.launch`, torchrun    a process of its own node that has ended          at once
    collective error    `job.typed_errors`          a broken connection: `LostPeerError`              at once
    siblings            `Siblings`, below           a process of the same machine that is gone        DEATH_SECONDS
    clock and tapes     `Alarm`, below, `diagnose`  a rank on any node that is stuck                  watch.deadline
    store               `Alarm`, below              a store that does not answer: its node, or the    watch.deadline
                                                    network, is gone                                  + CUT_OFF_SECONDS

Each finding reaches the launcher as an exit code and a failure file of some `Failure` kind. `first_cause` chooses the
finding that the user reads.

**The alarm.** Each rank has two threads. The *clock* measures how long the rank has been waiting. The *listener* asks
the job's store whether any rank has raised the alarm, and raises it itself when a sibling has died, so that ranks that
wait for the dead rank do not wait until the deadline. Once the alarm is raised, every living rank answers with its
stack. The rank that raised it (the *judge*) reads the tapes of all ranks, also of those that did not answer, and its
diagnosis is the last thing that every rank reports. If the store no longer answers, a rank reports what it knows alone.

**Siblings.** A rank that dies leaves others waiting. Ranks that wait for bytes over a connection notice it; ranks that
wait for a text in the job's store do not. But every rank can check whether the processes that the same parent has
started on this machine still run. Each rank appends `RANK:PROCESS` to the list of its host and parent: when it starts,
and again when it is done. A process that is listed once and no longer runs has died.

Nothing here is a collective or needs the main thread, which may never return from its wait.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread

from fourfold.errors import Failure, LateRanksError
from fourfold.grid import Grid
from fourfold.job import Channel
from fourfold.watch.diagnose import diagnose
from fourfold.watch.tape import DIAGNOSIS, Tape, read, tape_path

PAUSE = 1.0
"""Seconds between two checks of each thread, or a fifth of the deadline if that is shorter. A check costs two messages
to the store, and a second more or less does not matter beside deadlines of minutes."""
ANSWER_SECONDS = 5.0
"""Seconds that living ranks have to answer an alarm: several times `PAUSE`, because a listener may be busy."""
JUDGE_SECONDS = 30.0
"""Seconds after the answers for the judge to read all tapes, perhaps from a slow network file system."""
CUT_OFF_SECONDS = 10.0
"""Seconds beyond the deadline after which a rank that the store does not answer reports by itself."""
DEATH_SECONDS = 3.0
"""Seconds between the death of a sibling and the alarm: ranks with a connection to it fail earlier, by themselves."""
STACK_DEPTH = 12
"""The number of frames of a stack that are shown, the innermost ones: more would hide the other ranks."""


# --- whose finding is shown


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How the process of a rank ended, as its launcher saw it."""

    rank: int
    process: int
    exit_code: int
    """Below 0 the process was killed by that signal."""
    failure: Failure | None
    """The kind that the rank wrote into its failure file; None if it could not write one."""
    message: str
    time: float
    """When it failed, by the wall clock."""

    @property
    def killed(self) -> bool:
        return self.exit_code < 0


def first_cause(ends: Iterable[RankEnd]) -> RankEnd:
    """Choose which rank's error to show, and among equals the one that failed first:

    1. a diagnosis that names who is stuck, or what the ranks disagree on;
    2. a rank whose process was killed: its exit code says how it died, other ranks only see that it did;
    3. a rank with an error of its own;
    4. a rank that only lost a connection, or only saw that another process is gone.
    """

    places: dict[Failure | None, int] = {Failure.DIAGNOSIS: 1, Failure.DEATH: 4, Failure.LOST_PEER: 4}

    def order(end: RankEnd) -> tuple[int, float]:
        # A rank that reported a diagnosis or a death had found it before it was killed; of any other the signal counts.
        reported = end.failure in (Failure.DIAGNOSIS, Failure.DEATH)
        return 2 if end.killed and not reported else places.get(end.failure, 3), end.time

    return min(ends, key=order)


# --- siblings


class Siblings:
    """The ranks that the parent of this process has started on this machine; all ranks of the channel make it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._key = f"siblings/{socket.gethostname()}/{os.getppid()}"
        self._mine = f"{channel.rank}:{os.getpid()}"
        self._processes: dict[int, int] = {}
        self._channel.append(self._key, self._mine)

    def leave(self) -> None:
        """Announce that this rank is done, so that no sibling takes its end for a death."""
        self._channel.append(self._key, self._mine)

    def dead(self) -> dict[int, int]:
        """Return the processes, by rank, that no longer run and had not announced that they were done."""
        dead = {}
        for word, times in Counter(self._channel.words(self._key)).items():
            rank, process = map(int, word.split(":"))
            self._processes[rank] = process
            if times == 1 and not is_sibling(process):
                dead[rank] = process
        return dead

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill those of the ranks that are siblings, with SIGKILL: a stopped process does not react to SIGTERM."""
        for rank in ranks:
            process = self._processes.get(rank)
            if process is not None and is_sibling(process):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def is_sibling(process: int) -> bool:
    """Return whether a process runs and has the same parent as this one; True on systems without /proc."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The state and the parent follow the name, which is in parentheses and may contain any character.
    how, parent, *_ = state.rpartition(")")[2].split()
    return how not in "ZX" and int(parent) == os.getppid()


# --- the alarm


@dataclass(frozen=True, slots=True)
class JobDiagnosis:
    """The diagnosis that the ranks of a job reached together."""

    text: str
    failure: Failure
    silent: tuple[int, ...] = ()
    """Ranks that did not answer."""


class Alarm:
    """Watches the waits of this rank; all ranks create theirs together.

    `end` gets the diagnosis and whether this rank is the judge, and ends this process.
    """

    def __init__(
        self, tape: Tape, grid: Grid, folder: Path, deadline: float, end: Callable[[JobDiagnosis, bool], None]
    ) -> None:
        self._tape, self._rank = tape, grid.rank
        self._folder, self._deadline, self._end_with = folder, deadline, end
        # Its own connection: the main thread may be blocked inside the job's store while the listener needs it.
        self._channel = grid.channel.open("watch", fresh=True, own_connection=True)
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
        """Stop watching; `done` means that this rank did everything that others may wait for, and did not fail."""
        self._done = done
        self._over.set()
        for thread in self._threads:
            thread.join(self._pause + 1)

    def call(self, reason: str) -> None:
        """Raise the alarm because a collective failed on this rank; return only if no diagnosis comes."""
        self._raise(reason)
        self._spoken.wait(ANSWER_SECONDS + JUDGE_SECONDS)

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
        self._end(JobDiagnosis(text, Failure.DIAGNOSIS), judge=True)

    # --- the listener

    def _listen(self) -> None:
        judge = False
        while not self._over.wait(self._pause):
            with suppress(
                RuntimeError
            ):  # the store does not answer: the clock's thread reports that, after its deadline
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
        self._tape.freeze()  # the cause may pass while the ranks are asked, and the tape must still show it
        self._channel.put("answer", stack_of_main())
        self._answering = True
        if judges:
            found = self._judge(reason, Failure(failure))
            self._channel.put("diagnosis", json.dumps(asdict(found)))
        else:
            try:
                told = json.loads(self._channel.get("diagnosis", judge, ANSWER_SECONDS + JUDGE_SECONDS))
                found = JobDiagnosis(told["text"], Failure(told["failure"]), tuple(told["silent"]))
            except LateRanksError:
                found = JobDiagnosis(f"rank {judge} raised the alarm and gave no reason", Failure.DIAGNOSIS)
        self._end(found, judge=judges)

    def _judge(self, reason: str, failure: Failure) -> JobDiagnosis:
        """Read the answers and the tapes of all ranks; write the diagnosis into the run's folder and return it."""
        ranks = self._channel.ranks
        living = [rank for rank in ranks if rank not in self._dead]
        stacks = self._channel.collect("answer", living, ANSWER_SECONDS, partial=True)
        readings = {}
        for rank in ranks:
            with suppress(OSError, ValueError):  # the tape may be lost with its node
                readings[rank] = read(tape_path(self._folder, rank))
        headline, *more = diagnose(readings, stacks).lines()
        text = "\n".join((f"{headline} ({reason})", *more))
        with suppress(OSError):  # a full disk must not hide the diagnosis from the ranks
            (self._folder / DIAGNOSIS).write_text(text + "\n")
        return JobDiagnosis(text, failure, tuple(rank for rank in ranks if rank not in stacks))

    def _end(self, found: JobDiagnosis, *, judge: bool) -> None:
        self._siblings.kill(found.silent)
        self._end_with(found, judge)
        self._spoken.set()


def stack_of_main() -> str:
    """Return the stack of the main thread, its innermost frames."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return "".join(traceback.format_stack(frame)[-STACK_DEPTH:])

"""Detects dead and stuck ranks from the moment they have joined, and decides which detector's finding is shown.

A rank is *dead* when its process is gone, *silent* when nothing is heard of it, because it is stopped or its node is
lost, and *stuck* when it does not come to the collective that others wait for. Seven detectors look for them; each sees
something that the others do not:

    detector            where                       sees                                              after
    agent               `train.launch`, torchrun    a process of its own node that has ended          at once
    arrivals            `train.arrivals`            a process of its own node that never joins        watch.start
    joining             `job.join`                  a rank that never joins, a store that is missing  watch.start
    collective error    `job.typed_errors`          a broken connection: `LostPeerError`              at once
    siblings            `processes.Siblings`        a process of the same machine that is gone        DEATH_SECONDS
    heartbeats, tapes   `Alarm`, below, `diagnose`  a rank on any node that is silent, or stuck       the deadline
    store               `Alarm`, below              a store that does not answer: its node, or the    the deadline
                                                    network, is gone                                  + CUT_OFF_SECONDS

The deadline is watch.start until the first step is done, and watch.deadline from then on. Each finding reaches the
launcher as an exit code and a failure file of some `Failure` kind. `first_cause` chooses the finding that the user
reads.

**The alarm.** Each rank has two threads. The *clock* measures how long the rank has been waiting. The *listener* writes
the rank's heartbeat into the job's store and reads that of the next rank; it asks the store whether any rank has raised
the alarm, and raises it itself when the next rank is silent, or when a sibling has died. Once the alarm is raised,
every living rank answers with its stack, and with what it sees of its siblings. The rank that raised it (the *judge*)
reads the tapes of all ranks, also of those that did not answer, and its diagnosis is the last thing that every rank
reports. If the store no longer answers, a rank reports what it knows alone.

**Busy ranks.** Before the first step a rank may work for long while the others wait for it: rank 0 alone turns text
into tokens. A heartbeat shows that it lives. Such a rank says now and then that the others wait for it, and has
`BUSY_DEADLINES` times the deadline.

**Stopped and continued.** A process that was stopped finds, once it is continued, that much time has passed in which
it heard nothing. It does not count that time, and a rank that is continued within the deadline causes no alarm.

Nothing here is a collective or needs the main thread, which may never return from its wait.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from threading import Event, Thread
from types import FrameType

from fourfold.errors import Failure, LateRanksError
from fourfold.job import Channel, ranks_text
from fourfold.watch.diagnose import diagnose, stack_lines, whereabouts
from fourfold.watch.memory import LESS_ON_HOST, MemoryWatch
from fourfold.watch.processes import ProcessState, Siblings, describe_launcher
from fourfold.watch.tape import DIAGNOSIS, Tape, TapeReading, read, tape_path

PAUSE = 1.0
"""Seconds between two checks of each thread, or a fifth of the deadline if that is shorter. A check costs a few
messages to the store, and a second more or less does not matter beside deadlines of minutes."""
ANSWER_SECONDS = 5.0
"""Seconds that living ranks have to answer an alarm: several times `PAUSE`, because a listener may be busy."""
JUDGE_SECONDS = 30.0
"""Seconds after the answers for the judge to read all tapes, perhaps from a slow network file system."""
CUT_OFF_SECONDS = 10.0
"""Seconds beyond the deadline after which a rank that the store does not answer reports by itself, and after which a
process that is silent although it runs counts as silent: a heartbeat may be late on a busy machine."""
DEATH_SECONDS = 3.0
"""Seconds between the death of a sibling and the alarm: ranks with a connection to it fail earlier, by themselves."""
GAP_SECONDS = 2.0
"""A thread whose pause took this much longer than it should was stopped with its process, or waited for the store."""
BUSY_DEADLINES = 72
"""How many deadlines a living rank may work in one phase of the start: 12 hours with the default of 600 s, more than
preparing any data takes that somebody waits for."""
STACK_DEPTH = 12
"""The number of frames of a stack that are shown, the innermost ones: more would hide the other ranks."""


class Phase(StrEnum):
    """What a rank does, in words that follow `is`; all but the last two come before its first step."""

    IMPORTING = "importing torch and Fourfold"
    JOINING = "joining the job"
    GROUPS = "making process groups"
    FOLDER = "looking at the run's folder"
    DATA = "opening the data"
    MODEL = "building the model"
    CHECKPOINT = "loading the checkpoint"
    BEGINNING = "preparing the run's folder"
    TRAINING = "training"
    """From the first step on, whose compilation is part of it; the tape says more."""
    ENDING = "ending the run"


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
    """When it failed, by the wall clock, in whole seconds."""
    elsewhere: bool = False
    """Whether the rank only knew that another one had failed."""

    @property
    def killed(self) -> bool:
        return self.exit_code < 0


def first_cause(ends: Iterable[RankEnd]) -> RankEnd:
    """Choose which rank's error to show, and among equals the one whose own error it was, or else the first in time:

    1. a diagnosis that names who is stuck, or what the ranks disagree on;
    2. a rank whose process was killed: its exit code says how it died, other ranks only see that it did;
    3. a rank with an error of its own;
    4. a rank that only lost a connection, or only saw that another process is gone.
    """

    places: dict[Failure | None, int] = {Failure.DIAGNOSIS: 1, Failure.DEATH: 4, Failure.LOST_PEER: 4}

    def order(end: RankEnd) -> tuple[int, bool, float]:
        # A rank that reported a diagnosis or a death had found it before it was killed; of any other the signal counts.
        reported = end.failure in (Failure.DIAGNOSIS, Failure.DEATH)
        return 2 if end.killed and not reported else places.get(end.failure, 3), end.elsewhere, end.time

    return min(ends, key=order)


# --- the alarm


@dataclass(frozen=True, slots=True)
class JobDiagnosis:
    """The diagnosis that the ranks of a job reached together."""

    text: str
    failure: Failure
    silent: tuple[int, ...] = ()
    """Ranks that did not answer."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The sign of life of a rank; its text differs from one beat to the next."""

    number: int
    phase: Phase
    waits: bool
    """Whether its main thread waits for other ranks."""
    host: str
    process: int
    left: bool = False
    """Whether it is done and will not beat again."""

    def text(self) -> str:
        return json.dumps([self.number, self.phase, self.waits, self.host, self.process, self.left])

    @classmethod
    def of(cls, text: str) -> Heartbeat:
        number, phase, waits, host, process, left = json.loads(text)
        return cls(number, Phase(phase), waits, host, process, left)


NOT_SEEN = Heartbeat(0, Phase.JOINING, waits=False, host="an unknown host", process=0)
"""Stands for a rank that has joined the job, and of which nothing was heard since."""


class AwakeClock:
    """Measures waits of this process without the time in which it was stopped."""

    def __init__(self) -> None:
        self._last = self.woke = time.monotonic()

    def tick(self, pause: float) -> None:
        """Note that the thread runs, once per pause; a much longer pause means that the process was stopped."""
        now = time.monotonic()
        if now - self._last > pause + max(GAP_SECONDS, 2 * pause):
            self.woke = now
        self._last = now

    def since(self, moment: float) -> float:
        """Return the seconds since a moment of the monotonic clock, or since the process was continued if later."""
        return time.monotonic() - max(moment, self.woke)


class NoAlarm:
    """Does nothing; stands in for an alarm if the job has only one rank."""

    deadline = 0.0

    def enter(self, phase: Phase) -> None: ...
    def watch_steps(self, tape: Tape, folder: Path) -> None: ...
    def mute(self) -> None: ...
    def call(self, reason: str) -> None: ...
    def close(self, *, done: bool) -> None: ...

    def __enter__(self) -> NoAlarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(done=kind is None)


class Alarm(NoAlarm):
    """Watches over the ranks of a channel; all ranks create theirs together.

    `deadline` is how long a rank may be silent, and how long this one may wait, in seconds. `end` gets the diagnosis
    and whether this rank is the judge, and ends this process. `tell` gets a line about a rank that others wait for.
    """

    def __init__(
        self,
        channel: Channel,
        deadline: float,
        end: Callable[[JobDiagnosis, bool], None],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        # Its own connection: the main thread may be blocked inside the job's store while the listener needs it.
        self._channel = channel.open("watch", fresh=True, own_connection=True)
        self._rank = channel.rank
        self.deadline = self._start_deadline = deadline
        self._muted = False
        self._end_with, self._tell = end, tell
        self._tape: Tape | None = None
        self._folder: Path | None = None
        self._phase, self._entered, self._told = Phase.GROUPS, time.monotonic(), 0
        self._siblings = Siblings(self._channel)
        self._memory, self._looked_at = MemoryWatch(), set[int]()
        self._dead: dict[int, int] = {}
        self._dead_since: float | None = None
        place = self._channel.ranks.index(self._rank)
        self._next = self._channel.ranks[(place + 1) % len(self._channel.ranks)]
        self._next_beat, self._next_since = (
            "",
            time.monotonic(),
        )  # the last heartbeat of the next rank, and when it came
        self._next_waits = False
        self._beats = 0
        self._heard = self._answers_since = time.monotonic()
        """When the store answered the listener last, and since when it has done so without a long pause."""
        self._over, self._raised, self._spoken = Event(), Event(), Event()
        self._done = False
        self._reason, self._failure = "", Failure.DIAGNOSIS
        self._answering = False
        self._beat()  # before anything can happen to this rank, so that the others know its process
        self._threads = [Thread(target=run, daemon=True) for run in (self._watch_clock, self._listen)]
        for thread in self._threads:
            thread.start()

    def enter(self, phase: Phase) -> None:
        """Note that this rank begins a phase; the tape of steps is not read any more."""
        self._phase, self._entered, self._told = phase, time.monotonic(), 0
        self._tape, self._folder, self._muted = None, None, False
        if phase is not Phase.ENDING:
            self.deadline = self._start_deadline

    def watch_steps(self, tape: Tape, folder: Path) -> None:
        """Watch over steps from now on: this rank's tape says what it waits for."""
        self.enter(Phase.TRAINING)
        self._tape, self._folder = tape, folder

    def mute(self) -> None:
        """Raise and answer no alarm until the next phase: this rank has failed, and so may the others."""
        self._muted = True

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

    @property
    def _pause(self) -> float:
        return min(PAUSE, self.deadline / 5)

    # --- the clock

    def _watch_clock(self) -> None:
        clock = AwakeClock()
        while not self._over.wait(self._pause):
            clock.tick(self._pause)
            if self._muted:
                continue
            tape, deadline = self._tape, self.deadline
            since = tape.since if tape is not None else None
            if tape is not None:
                tape.look()
            # a wait through a store that does not answer, as while its process is stopped, is no rank's fault
            waited = 0.0 if since is None else clock.since(max(since, self._answers_since))
            if waited > deadline and not self._raised.is_set() and clock.since(self._heard) < self._long_pause:
                self._raise(f"waited for {deadline:g} s")
            if tape is None:
                self._look_at_own_phase(clock.since(self._entered))
            if tape is None or (since is None and waits_for_ranks(main_frame())):
                waited = clock.since(self._heard)  # the tape does not name every wait through the store
            if waited > deadline + CUT_OFF_SECONDS and not self._answering:
                self._report_alone(deadline)

    def _look_at_own_phase(self, seconds: float) -> None:
        """Say that others wait for this rank; raise the alarm if it has worked in one phase for too long."""
        if seconds < (self._told + 1) * self.deadline or waits_for_ranks(main_frame()):
            return
        self._told = int(seconds // self.deadline)
        if seconds > BUSY_DEADLINES * self.deadline and not self._raised.is_set():
            self._raise(f"has been {self._phase} for {seconds:.0f} s")
        elif self._next_waits:
            self._tell(f"rank {self._rank} has been {self._phase} for {seconds:.0f} s, and other ranks wait for it")

    def _raise(self, reason: str, failure: Failure = Failure.DIAGNOSIS) -> None:
        self._freeze()
        self._reason, self._failure = reason, failure
        self._raised.set()

    def _freeze(self) -> None:
        """Keep the tape as it is: the cause may pass while the ranks are asked, and the tape must still show it."""
        if self._tape is not None:
            self._tape.freeze()

    def _report_alone(self, deadline: float) -> None:
        folder, reason = self._folder, self._reason or f"was {self._phase} and heard nothing for {deadline:g} s"
        # first the launcher: without it siblings may have ended already, for the same reason
        why = describe_launcher() or self._siblings.describe_not_running()
        why = why or "its process is stopped, or its node or the network is gone"
        lines = [f"rank {self._rank} {reason}; the job's store does not answer: {why}"]
        if folder is not None:
            lines += [f"  {line}" for line in whereabouts(read(tape_path(folder, self._rank)))]
        lines += stack_lines({self._rank: stack_of_main()}, ())
        silent = tuple(self._siblings.not_running())
        self._end(JobDiagnosis("\n".join(lines), Failure.DIAGNOSIS, silent), judge=True)

    # --- the listener

    def _listen(self) -> None:
        judge, clock = False, AwakeClock()
        while not self._over.wait(self._pause):
            # the store does not answer: the clock's thread reports that, after its deadline
            with suppress(RuntimeError):
                clock.tick(self._pause)
                self._beat()
                self._store_answered()
                if self._muted:
                    continue
                self._look_for_dead()
                self._look_at_next(clock)
                if self._raised.is_set():
                    alarm = self._rank, f"rank {self._rank} {self._reason}", self._failure
                    judge = self._channel.announce("alarm", json.dumps(alarm))
                if (raised := self._channel.announced("alarm")) is not None:
                    self._answer(*json.loads(raised), judges=judge)
                    return
        if self._done:
            with suppress(RuntimeError):  # the store is gone with the last rank that needed it
                self._beat(left=True)
                self._siblings.leave()

    def _beat(self, *, left: bool = False) -> None:
        self._beats += 1
        waits = waits_for_ranks(main_frame())
        beat = Heartbeat(self._beats, self._phase, waits, socket.gethostname(), os.getpid(), left)
        self._channel.put("beat", beat.text())

    def _look_at_next(self, clock: AwakeClock) -> None:
        """Raise the alarm if the next rank has been silent for too long."""
        found = self._channel.collect("beat", (self._next,), 0.0, partial=True).get(self._next, "")
        self._store_answered()
        beat = Heartbeat.of(found) if found else None
        if found != self._next_beat or (beat is not None and beat.left):
            self._next_beat, self._next_since = found, time.monotonic()
        self._next_waits = beat is not None and beat.waits
        held = self._siblings.state(self._next) in (ProcessState.STOPPED, ProcessState.TRACED, ProcessState.GONE)
        limit = self.deadline + (0.0 if held else CUT_OFF_SECONDS)
        if clock.since(max(self._next_since, self._answers_since)) > limit and not self._raised.is_set():
            self._raise(f"has not heard of rank {self._next} for {self.deadline:g} s")

    def _store_answered(self) -> None:
        """Note that the store answers; a long pause before means that no rank could be heard meanwhile."""
        now = time.monotonic()
        if now - self._heard > self._long_pause:
            self._answers_since = now
        self._heard = now

    @property
    def _long_pause(self) -> float:
        """Seconds after which a store that does not answer counts as silent: a busy one answers within few."""
        return max(self._pause + GAP_SECONDS, self.deadline / 2)

    def _look_for_dead(self) -> None:
        self._dead = self._siblings.dead()
        for process in self._siblings.processes - self._looked_at:
            self._memory.look(process)
            self._looked_at.add(process)
        if not self._dead:
            self._dead_since = None
        elif self._dead_since is None:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > DEATH_SECONDS and not self._raised.is_set():
            who = " and ".join(f"rank {rank} (process {process})" for rank, process in sorted(self._dead.items()))
            if why := next(filter(None, map(self._memory.verdict, self._dead.values())), ""):
                self._raise(f"saw that {who} had died: {why}; {LESS_ON_HOST}", Failure.OUT_OF_MEMORY)
            else:
                self._raise(f"saw that {who} had died", Failure.DEATH)

    def _answer(self, judge: int, reason: str, failure: str, *, judges: bool) -> None:
        self._freeze()
        self._channel.put("answer", json.dumps([stack_of_main(), self._siblings.not_running()]))
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
        """Read the answers of all ranks, and their tapes; write the diagnosis into the run's folder and return it."""
        ranks = self._channel.ranks
        living = [rank for rank in ranks if rank not in self._dead]
        answers = self._channel.collect("answer", living, ANSWER_SECONDS, partial=True)
        stacks, states = {}, dict.fromkeys(self._dead, ProcessState.GONE)
        for rank, answer in answers.items():
            stacks[rank], seen = json.loads(answer)
            states |= {int(other): ProcessState(state) for other, state in seen.items()}
        headline, *more = self._explain(stacks, states)
        text = "\n".join((f"{headline} ({reason})", *more))
        if self._folder is not None:
            with suppress(OSError):  # a full disk must not hide the diagnosis from the ranks
                (self._folder / DIAGNOSIS).write_text(text + "\n")
        return JobDiagnosis(text, failure, tuple(rank for rank in ranks if rank not in stacks))

    def _explain(self, stacks: Mapping[int, str], states: Mapping[int, ProcessState]) -> Iterator[str]:
        readings: dict[int, TapeReading] = {}
        for rank in self._channel.ranks:
            with suppress(OSError, ValueError):  # the tape may be lost with its node
                if self._folder is not None:
                    readings[rank] = read(tape_path(self._folder, rank))
        if readings:
            return diagnose(readings, stacks, states).lines()
        beats = self._channel.collect("beat", seconds=0.0, partial=True)
        seen = {rank: Heartbeat.of(beats[rank]) if rank in beats else NOT_SEEN for rank in self._channel.ranks}
        return explain_start(seen, stacks, states)

    def _end(self, found: JobDiagnosis, *, judge: bool) -> None:
        self._siblings.kill(found.silent)
        self._end_with(found, judge)
        self._spoken.set()


def explain_start(
    beats: Mapping[int, Heartbeat], stacks: Mapping[int, str], states: Mapping[int, ProcessState]
) -> Iterator[str]:
    """Yield who holds up the start, where every rank is, and the stacks of those that answered."""
    silent = sorted(beats.keys() - stacks.keys())
    working = [rank for rank, beat in sorted(beats.items()) if rank in stacks and not beat.waits]
    culprits = silent or working or sorted(beats)
    first = beats[culprits[0]]
    what = f"{ranks_text(culprits)} still works" if not silent else f"{ranks_text(culprits)} does not answer"
    if len(silent) == 1:
        state = states.get(silent[0], ProcessState.UNKNOWN)
        what = f"rank {silent[0]} (process {first.process} on {first.host}) {state.text(first.process)}"
    elif silent and all(rank in states for rank in silent):
        what = f"{ranks_text(silent)} are {' or '.join(sorted({states[rank] for rank in silent}))}"
    yield f"before the first step, {first.phase}: {what}"
    places: defaultdict[str, list[int]] = defaultdict(list)
    for rank, beat in sorted(beats.items()):
        place = f"was {beat.phase}" + (" and waited for other ranks" if beat.waits else "")
        if rank in silent:
            state = states.get(rank, ProcessState.UNKNOWN)
            place += f"; process {beat.process} on {beat.host} {state.text(beat.process)}"
        places[place].append(rank)
    for place, ranks in places.items():
        yield f"  {ranks_text(ranks)} {place}"
    yield from stack_lines(stacks, culprits)


def main_frame() -> FrameType | None:
    """Return the frame in which the main thread is."""
    return sys._current_frames().get(threading.main_thread().ident or 0)


def waits_for_ranks(frame: FrameType | None) -> bool:
    """Return whether a thread in this frame waits for other ranks, through the job's store or in a process group."""
    while frame is not None:
        if frame.f_code in WAITING_CODE or frame.f_globals.get("__name__") in WAITING_MODULES:
            return True
        frame = frame.f_back
    return False


WAITING_CODE = (Channel.wait_for_keys.__code__, Channel._ask.__code__)
"""Where a channel waits: for texts of other ranks, and for the store itself, whose process may be stopped."""
WAITING_MODULES = ("torch.distributed.distributed_c10d", "fourfold.wire")
"""Modules whose functions do little else than wait for other ranks."""


def stack_of_main() -> str:
    """Return the stack of the main thread, its innermost frames."""
    frame = main_frame()
    return "".join(traceback.format_stack(frame)[-STACK_DEPTH:])

"""The diagnosis of a run that is stuck, from the tapes of all its ranks. Pure functions.

Along an axis the ranks of a group launch the same collectives in the same order. So the n-th launch of one rank along x
is a *meeting* with the n-th launches of the others. A message between two pipe ranks is a meeting of these two: the
n-th send of a lane meets the n-th receive. When a run is stuck, one of these is true:

    disagreement   two ranks of a group have launched different collectives as their n-th
    absence        ranks wait at a meeting to which others have not come; a rank that has not come, and does not wait at
                   such a meeting itself, holds up all others
    no transport   all ranks have come to every meeting that somebody waits at, and the bytes do not arrive

A link is blamed only if nothing else explains the last case: every rank of the meeting answers, none is stopped, and
they are on more than one host.

Without a disagreement, ranks cannot wait for each other in a circle: at the meeting that comes first in the program,
ranks wait only for ranks that are late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from fourfold.job import ranks_text
from fourfold.ledger import Collective
from fourfold.watch.processes import ProcessState
from fourfold.watch.tape import TapeEntry, TapeReading, other_end


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective that at least one rank waits for."""

    entry: TapeEntry
    came: tuple[int, ...]
    """Ranks that have launched it."""
    absent: tuple[int, ...]
    """Ranks of the group that have not launched it."""
    message: tuple[int, int] | None = None
    """The ranks that send and receive it, if it is a message between two pipe ranks."""

    @property
    def what(self) -> str:
        """What the ranks wait for, in words."""
        return str(self.entry.record) if self.message is None else f"{self.entry.record.label}, {_way(self.message)}"


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks of one group launched different collectives where they should have met."""

    launched: Mapping[int, TapeEntry]
    """The launch of each rank."""

    @property
    def where(self) -> str:
        """The axis, or the two ranks of a message."""
        (rank, entry), *_ = self.launched.items()
        if not entry.record.lane:
            return f"which collective comes next along {entry.record.axis}"
        other = next(each for each in self.launched if each != rank)
        return f"which message comes next {_way((rank, other) if entry.record.op == 'send' else (other, rank))}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause that the tapes and stacks of a job show together; `lines` yields it as text."""

    readings: Mapping[int, TapeReading]
    stacks: Mapping[int, str]
    """The stacks of the ranks that answered; empty if no rank was asked."""
    disagreement: Disagreement | None
    meetings: tuple[Meeting, ...]
    """Meetings at which ranks wait, each once: those with absent ranks first, in the order of the program."""
    culprits: tuple[int, ...]
    """Ranks that hold up all others."""
    states: Mapping[int, ProcessState]
    """The processes that do not run, as ranks of the same machine see them."""

    @property
    def headline(self) -> str:
        """The cause in one line."""
        if self.disagreement is not None:
            sides: defaultdict[str, list[int]] = defaultdict(list)
            for rank, entry in self.disagreement.launched.items():
                sides[f"{entry.record} of {entry.record.nbytes} bytes in step {entry.step}"].append(rank)
            # The collective that most ranks launched comes first; with more than two, the others are not shown.
            (one, by), (other, by_others), *_ = sorted(sides.items(), key=lambda side: (-len(side[1]), side[1]))
            step = min(entry.step for entry in self.disagreement.launched.values())
            return (
                f"step {step}: ranks disagree on {self.disagreement.where}: "
                f"{ranks_text(by)} launched {one}, {ranks_text(by_others)} {other}"
            )
        silent = silent_of(self.readings, self.stacks)
        living = {rank: one for rank, one in self.readings.items() if one.doing is not None and rank not in silent}
        waiting = {rank: one.doing for rank, one in living.items() if one.doing is not None and one.waits}
        if silent and not waiting:  # they wait for it through the store in the middle of some work, such as saving
            waiting = {rank: one.doing for rank, one in living.items() if one.doing is not None}
        if not self.meetings and not waiting:
            return "nobody waits for a collective"
        if not self.meetings:
            doing = next(iter(waiting.values()))
            what, came = f"step {doing.step}: {doing.what}", sorted(waiting)
        else:
            missed = (one for one in self.meetings if set(one.absent) & set(self.culprits))
            meeting = next(missed, self.meetings[0])
            what, came = f"step {meeting.entry.step}: {meeting.what}", list(meeting.came)
        if self.culprits:
            return f"{what}: {ranks_text(self.culprits)} never arrived{self._whereabouts(self.culprits)}"
        return f"{what}: all of {ranks_text(came)} arrived{self._no_transport(came)}"

    def _no_transport(self, came: Sequence[int]) -> str:
        """Return what is known about ranks that have all come to where they wait."""
        hosts = sorted({self.readings[rank].who.host for rank in came})
        if silent := sorted(silent_of(came, self.stacks)):
            return f", and {ranks_text(silent)} no longer takes part{self._whereabouts(silent)}"
        if not self.meetings:
            return ", and wait for each other through the job's store"
        if not self.stacks:
            return ", but their bytes did not; no rank was asked whether it still runs"
        if len(hosts) == 1:
            return f", but their bytes did not; all of them answer and are on {hosts[0]}, so look at its load"
        return f", but their bytes did not, though all of them answer; look at the links of {' and '.join(hosts)}"

    def _whereabouts(self, ranks: Sequence[int]) -> str:
        """Return what these ranks do instead, as far as it is the same for all of them."""
        (found, *others) = dict.fromkeys(self._whereabouts_of(rank, alone=len(ranks) == 1) for rank in ranks)
        return f": {found}" if found and not others else ""

    def _whereabouts_of(self, rank: int, *, alone: bool) -> str:
        state, reading = self._state(rank), self.readings.get(rank)
        if state is not ProcessState.RUNS and (alone or state is ProcessState.UNKNOWN):
            who = f"process {reading.who.process} on {reading.who.host} " if reading is not None else "it "
            return who + state.text(reading.who.process if reading is not None else 0)
        if state is not ProcessState.RUNS:
            return f"they are {state}"
        doing = reading.doing if reading is not None else None
        return f"{'it was' if alone else 'they were'} {doing.what}" if doing is not None and doing.what else ""

    def _state(self, rank: int) -> ProcessState:
        """Return the state of a rank's process; unknown if it does not answer and nobody sees it."""
        answers = rank not in silent_of([rank], self.stacks)
        return ProcessState.RUNS if answers else self.states.get(rank, ProcessState.UNKNOWN)

    def lines(self) -> Iterator[str]:
        """Yield the headline, the meetings, the last launches of culprits and silent ranks, and the stacks."""
        yield self.headline
        for meeting in self.meetings:
            absent = f"; {ranks_text(meeting.absent)} did not come" if meeting.absent else "; all have come"
            way = "" if meeting.message is None else f" {_way(meeting.message)}"
            yield f"  {_place(meeting.entry)}{way}: {ranks_text(meeting.came)} came{absent}"
        silent = silent_of(self.readings, self.stacks)
        for rank in (*self.culprits, *sorted(silent - set(self.culprits))):
            found = self.readings.get(rank)
            if found is None:
                yield f"  rank {rank} has left no tape: it had not begun its first step"
                continue
            answers = f" {self._state(rank).text(found.who.process)};" if rank in silent else ""
            last = f"last launched {_place(found.entries[-1])}" if found.entries else "launched nothing"
            doing = f"; was {found.doing.what} (step {found.doing.step})" if found.doing is not None else ""
            yield f"  rank {rank} ({found.who.host}, process {found.who.process}){answers} {last}{doing}"
        yield from stack_lines(self.stacks, self.culprits)


def stack_lines(stacks: Mapping[int, str], culprits: Sequence[int]) -> Iterator[str]:
    """Yield the stacks of ranks, equal ones once, those of the culprits first: they show what everybody waits for."""
    by_stack: defaultdict[str, list[int]] = defaultdict(list)
    for rank, stack in sorted(stacks.items()):
        by_stack[stack].append(rank)
    for stack, ranks in sorted(by_stack.items(), key=lambda item: not set(item[1]) & set(culprits)):
        yield f"  {ranks_text(ranks)} stood at"
        yield from (f"    {line}" for line in stack.rstrip().splitlines())


def whereabouts(reading: TapeReading) -> Iterator[str]:
    """Yield what a rank waits for and does, by its own tape alone."""
    yield from (f"waits for {_place(entry)}" for entry in reading.waits_for)
    if reading.doing is not None:
        yield f"is {reading.doing.what} (step {reading.doing.step})"


def diagnose(
    readings: Mapping[int, TapeReading],
    stacks: Mapping[int, str],
    states: Mapping[int, ProcessState] | None = None,
) -> Diagnosis:
    """Find the cause from the tapes of all ranks, and from the stacks of the ranks that answered.

    `states` are those of processes that do not run, as ranks on their machine see them.
    """
    meetings = _meetings(readings)
    world = max((reading.who.shape.world for reading in readings.values()), default=0)
    no_tape = silent_of((rank for rank in range(world) if rank not in readings), stacks)
    silent = silent_of(readings, stacks)
    held_up = {rank for meeting in meetings if meeting.absent for rank in meeting.came}
    held_up |= {rank for meeting in meetings if silent & set(meeting.came) for rank in meeting.came} - silent
    late = {rank for meeting in meetings for rank in meeting.absent}
    if not meetings:  # no rank waits for a collective, so ranks wait through the store: who does not wait there is late
        free = {rank for rank, reading in readings.items() if not reading.waits}
        late = silent if silent and free >= readings.keys() - silent else silent | free
    culprits = tuple(sorted((late - held_up) | no_tape))
    return Diagnosis(readings, stacks, _disagreement(readings), tuple(meetings), culprits, states or {})


def missed_by(readings: Mapping[int, TapeReading], dead: int) -> str:
    """Return the message between a dead pipe rank and another one at which it is missed; empty if there is none.

    The other rank waits for it, or has just launched its end: a connection that is closed fails at once.
    """
    groups = Groups(readings)
    for rank, reading in sorted(readings.items()):
        for entry in (*reading.waits_for, *reading.entries[-1:]):
            ends = groups.met(rank, entry).ranks if entry.record.lane and rank != dead else ()
            line = other_end(entry.line, reading.who.shape.coords(rank)[entry.record.axis]) if dead in ends else ""
            if line and (dead not in readings or readings[dead].launched.get(line, 0) < entry.number):
                return f"step {entry.step}: {entry.record.label}, {_way((ends[0], ends[1]))}, never arrived"
    return ""


def silent_of(ranks: Iterable[int], stacks: Mapping[int, str]) -> set[int]:
    """Return the ranks that did not answer; none if no rank was asked."""
    return set(ranks) - stacks.keys() if stacks else set()


class Met(NamedTuple):
    """A meeting, equal for all ranks that come to it: the lane of a message or an axis, its ranks, and its number."""

    line: str
    ranks: tuple[int, ...]
    """For a message its sender and its receiver; for a collective the group, as far as its tapes can be read."""
    number: int


class Groups:
    """The ranks along an axis of each rank, computed once: a tape has thousands of entries."""

    def __init__(self, readings: Mapping[int, TapeReading]) -> None:
        self._readings = readings
        self._found: dict[tuple[int, str], list[int]] = {}

    def along(self, axis: str, rank: int) -> list[int]:
        if (rank, axis) not in self._found:
            self._found[rank, axis] = self._readings[rank].who.shape.ranks_along(axis, rank)
        return self._found[rank, axis]

    def met(self, rank: int, entry: TapeEntry) -> Met:
        """Return the meeting to which a launch of a rank belongs."""
        record = entry.record
        group = self.along(record.axis, rank)
        if record.lane:
            ends = rank, group[record.peer]
            return Met(record.lane, ends if record.op == "send" else ends[::-1], entry.number)
        return Met(record.axis, tuple(one for one in group if one in self._readings), entry.number)


def _meetings(readings: Mapping[int, TapeReading]) -> list[Meeting]:
    found: dict[Met, Meeting] = {}
    groups = Groups(readings)
    for rank, reading in sorted(readings.items()):
        for entry in reading.waits_for:
            met = groups.met(rank, entry)
            lines = dict.fromkeys(met.ranks, entry.line)
            if entry.record.lane:
                (other,) = set(met.ranks) - {rank}
                lines[other] = other_end(entry.line, reading.who.shape.coords(rank)[entry.record.axis])
            came = tuple(
                one
                for one in sorted(met.ranks)
                if one in readings and readings[one].launched.get(lines[one], 0) >= entry.number
            )
            absent = tuple(one for one in sorted(met.ranks) if one not in came)
            message = (met.ranks[0], met.ranks[1]) if entry.record.lane else None
            found.setdefault(met, Meeting(entry, came, absent, message))
    # The rank with the most launches knows the order of the program best.
    ahead = max(readings.values(), key=lambda reading: sum(reading.launched.values()), default=None)
    entries = enumerate(ahead.entries if ahead is not None else ())
    order = {(entry.line, entry.number): place for place, entry in entries}

    def first(meeting: Meeting) -> tuple[bool, int, int, int]:
        entry = meeting.entry
        return not meeting.absent, order.get((entry.line, entry.number), 0), entry.step, entry.number

    return sorted(found.values(), key=first)


def _disagreement(readings: Mapping[int, TapeReading]) -> Disagreement | None:
    """Return the disagreement of the earliest step, and in it the one with the fewest launches of a rank before it.

    Times would not tell, because the ranks of several nodes have several clocks.
    """
    meetings: defaultdict[Met, dict[int, TapeEntry]] = defaultdict(dict)
    earliest: dict[Met, tuple[int, int]] = {}
    groups = Groups(readings)
    for rank, reading in sorted(readings.items()):
        before = sum(reading.launched.values()) - len(reading.entries)
        for place, entry in enumerate(reading.entries, before):
            met = groups.met(rank, entry)
            meetings[met][rank] = entry
            earliest[met] = min((entry.step, place), earliest.get(met, (entry.step, place)))
    found = [
        met
        for met, launched in meetings.items()
        if len({(_seen(entry.record), entry.step) for entry in launched.values()}) > 1
    ]
    first = min(found, key=lambda met: earliest[met], default=None)
    return None if first is None else Disagreement(meetings[first])


def _seen(record: Collective) -> Collective:
    """Return what all ranks of a meeting have in common.

    The ends of a message differ in which end each is. An all-to-all has parts of different sizes by design: an expert
    that more tokens chose takes more of them.
    """
    if record.lane:
        return replace(record, op="send")
    return replace(record, nbytes=0, sent=-1) if record.op == "all_to_all" else record


def _way(message: tuple[int, int]) -> str:
    return f"from rank {message[0]} to rank {message[1]}"


def _place(entry: TapeEntry) -> str:
    when = datetime.fromtimestamp(entry.time).strftime("%H:%M:%S")
    counted = f"of {entry.record.lane}" if entry.record.lane else f"along {entry.record.axis}"
    return f"{entry.record} of step {entry.step} at {when} (number {entry.number} {counted})"

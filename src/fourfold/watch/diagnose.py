"""The diagnosis of a run that is stuck, from the tapes of all its ranks. Pure functions.

Along an axis the ranks of a group launch the same collectives in the same order. So the n-th launch of one rank along x
is a *meeting* with the n-th launches of the others. When a run is stuck, one of these is true:

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
from dataclasses import dataclass
from datetime import datetime

from fourfold.job import ranks_text
from fourfold.watch.processes import ProcessState
from fourfold.watch.tape import TapeEntry, TapeReading


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective that at least one rank waits for."""

    entry: TapeEntry
    came: tuple[int, ...]
    """Ranks that have launched it."""
    absent: tuple[int, ...]
    """Ranks of the group that have not launched it."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """Ranks of one group launched different collectives where they should have met."""

    axis: str
    number: int
    launched: Mapping[int, TapeEntry]
    """The launch of each rank."""


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
                f"step {step}: ranks disagree on which collective comes next along {self.disagreement.axis}: "
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
            meeting = self.meetings[0]
            what, came = f"step {meeting.entry.step}: {meeting.entry.record}", list(meeting.came)
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
            yield f"  {_place(meeting.entry)}: {ranks_text(meeting.came)} came{absent}"
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


def silent_of(ranks: Iterable[int], stacks: Mapping[int, str]) -> set[int]:
    """Return the ranks that did not answer; none if no rank was asked."""
    return set(ranks) - stacks.keys() if stacks else set()


def _group(readings: Mapping[int, TapeReading], axis: str, rank: int) -> list[int]:
    """Return the ranks that a rank meets along an axis, itself included, as far as their tapes can be read."""
    return [one for one in readings[rank].who.shape.ranks_along(axis, rank) if one in readings]


def _meetings(readings: Mapping[int, TapeReading]) -> list[Meeting]:
    found: dict[tuple[str, int, int], Meeting] = {}
    for rank, reading in sorted(readings.items()):
        for entry in reading.waits_for:
            axis = entry.record.axis
            group = _group(readings, axis, rank)
            came = tuple(one for one in group if readings[one].launched.get(axis, 0) >= entry.number)
            absent = tuple(one for one in group if one not in came)
            found.setdefault((axis, entry.number, group[0]), Meeting(entry, came, absent))
    # The rank with the most launches knows the order of the program best.
    ahead = max(readings.values(), key=lambda reading: sum(reading.launched.values()), default=None)
    entries = enumerate(ahead.entries if ahead is not None else ())
    order = {(entry.record.axis, entry.number): place for place, entry in entries}

    def first(meeting: Meeting) -> tuple[bool, int, float]:
        entry = meeting.entry
        return not meeting.absent, order.get((entry.record.axis, entry.number), 0), entry.time

    return sorted(found.values(), key=first)


def _disagreement(readings: Mapping[int, TapeReading]) -> Disagreement | None:
    """Return the earliest disagreement."""
    meetings: defaultdict[tuple[str, int, int], dict[int, TapeEntry]] = defaultdict(dict)
    for rank, reading in sorted(readings.items()):
        axes = {entry.record.axis for entry in reading.entries}
        firsts = {axis: _group(readings, axis, rank)[0] for axis in axes}
        for entry in reading.entries:
            axis = entry.record.axis
            meetings[axis, firsts[axis], entry.number][rank] = entry
    found = [
        Disagreement(axis, number, launched)
        for (axis, _, number), launched in meetings.items()
        if len({(entry.record, entry.step) for entry in launched.values()}) > 1
    ]
    return min(found, key=lambda one: min(entry.time for entry in one.launched.values()), default=None)


def _place(entry: TapeEntry) -> str:
    when = datetime.fromtimestamp(entry.time).strftime("%H:%M:%S")
    return f"{entry.record} of step {entry.step} at {when} (number {entry.number} along {entry.record.axis})"

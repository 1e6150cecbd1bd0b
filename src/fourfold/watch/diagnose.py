"""The diagnosis of a run that is stuck, from the tapes of all its ranks. Pure functions.

Along an axis the ranks of a group launch the same collectives in the same order. So the n-th launch of one rank along x
is a *meeting* with the n-th launches of the others. When a run is stuck, one of these is true:

    disagreement   two ranks of a group have launched different collectives as their n-th
    absence        ranks wait at a meeting to which others have not come; a rank that has not come, and does not wait at
                   such a meeting itself, holds up all others
    no transport   all ranks have come to every meeting that somebody waits at, and the bytes do not arrive

Without a disagreement, ranks cannot wait for each other in a circle: at the meeting that comes first in the program,
ranks wait only for ranks that are late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from fourfold.job import ranks_text
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
        waiting = {rank: one.doing for rank, one in self.readings.items() if one.doing is not None and one.waits}
        if not self.meetings and not waiting:
            return "nobody waits for a collective"
        if not self.meetings:
            doing = next(iter(waiting.values()))
            what, came = f"step {doing.step}: {doing.what}", sorted(waiting)
        else:
            meeting = self.meetings[0]
            what, came = f"step {meeting.entry.step}: {meeting.entry.record}", list(meeting.came)
        if self.culprits:
            return f"{what}: {ranks_text(self.culprits)} never arrived"
        silent = sorted(silent_of(came, self.stacks))
        gone = f", and {ranks_text(silent)} does not answer" if silent else ""
        hosts = " and ".join(sorted({self.readings[rank].who.host for rank in came}))
        return f"{what}: all of {ranks_text(came)} arrived, but their bytes did not{gone}; look at the links of {hosts}"

    def lines(self) -> Iterator[str]:
        """Yield the headline, the meetings, the last launches of culprits and silent ranks, and the stacks."""
        yield self.headline
        for meeting in self.meetings:
            absent = f"; {ranks_text(meeting.absent)} did not come" if meeting.absent else "; all have come"
            yield f"  {_place(meeting.entry)}: {ranks_text(meeting.came)} came{absent}"
        silent = silent_of(self.readings, self.stacks)
        for rank in (*self.culprits, *sorted(silent - set(self.culprits))):
            found = self.readings[rank]
            answers = " does not answer;" if rank in silent else ""
            last = f"last launched {_place(found.entries[-1])}" if found.entries else "launched nothing"
            doing = f"; was {found.doing.what} (step {found.doing.step})" if found.doing is not None else ""
            yield f"  rank {rank} ({found.who.host}, process {found.who.process}){answers} {last}{doing}"
        by_stack: defaultdict[str, list[int]] = defaultdict(list)
        for rank, stack in sorted(self.stacks.items()):
            by_stack[stack].append(rank)
        # The stacks of culprits first: they show what everybody waits for.
        for stack, ranks in sorted(by_stack.items(), key=lambda item: not set(item[1]) & set(self.culprits)):
            yield f"  {ranks_text(ranks)} stood at"
            yield from (f"    {line}" for line in stack.rstrip().splitlines())


def diagnose(readings: Mapping[int, TapeReading], stacks: Mapping[int, str]) -> Diagnosis:
    """Find the cause from the tapes of all ranks, and from the stacks of the ranks that answered."""
    meetings = _meetings(readings)
    silent = silent_of(readings, stacks)
    held_up = {rank for meeting in meetings if meeting.absent for rank in meeting.came}
    held_up |= {rank for meeting in meetings if silent & set(meeting.came) for rank in meeting.came} - silent
    late = {rank for meeting in meetings for rank in meeting.absent}
    if not meetings:  # no rank waits for a collective, so ranks wait through the store: who does not wait there is late
        late = silent | {rank for rank, reading in readings.items() if not reading.waits}
    return Diagnosis(readings, stacks, _disagreement(readings), tuple(meetings), tuple(sorted(late - held_up)))


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

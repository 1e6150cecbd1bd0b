"""The diagnosis of a run that is stuck, from the tapes of all its ranks. Pure functions.

Along an axis the ranks of a group launch the same collectives in the same order. So the n-th launch of one rank along x
is a *meeting* with the n-th of the others, and when a run is stuck one of these is true:

    disagreement   two ranks of a group have launched different collectives as their n-th
    absence        ranks wait at a meeting to which others have not come; a rank that has not come, and does not wait at
                   such a meeting itself, holds up all others
    no transport   all ranks have come to every meeting that somebody waits at, and the bytes do not arrive

Without a disagreement ranks cannot wait for each other in a circle: at the meeting that comes first in the program,
ranks wait only for those that are late.
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

    @property
    def sides(self) -> list[tuple[str, list[int]]]:
        """Each collective that was launched, with its ranks; the one of most ranks first."""
        by_what: defaultdict[str, list[int]] = defaultdict(list)
        for rank, entry in self.launched.items():
            by_what[f"{entry.record} of {entry.record.nbytes} bytes in step {entry.step}"].append(rank)
        return sorted(by_what.items(), key=lambda side: (-len(side[1]), side[1]))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The cause that the tapes and stacks of a job show together; `lines` puts it into words."""

    readings: Mapping[int, TapeReading]
    stacks: Mapping[int, str]
    """The stacks of the ranks that answered; empty where nobody was asked."""
    disagreement: Disagreement | None
    meetings: tuple[Meeting, ...]
    """Meetings that somebody waits at, each once: those with absent ranks first, in the order of the program."""
    culprits: tuple[int, ...]
    """Ranks that hold up all others."""

    @property
    def headline(self) -> str:
        """The cause in one line."""
        if self.disagreement is not None:
            (one, by), (other, by_others), *_ = self.disagreement.sides
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
        yield self.headline
        for meeting in self.meetings:
            absent = f"; {ranks_text(meeting.absent)} did not come" if meeting.absent else "; all have come"
            yield f"  {_place(meeting.entry)}: {ranks_text(meeting.came)} came{absent}"
        for rank in self.culprits:
            yield f"  {self._last_of(rank)}"
        for rank in sorted(silent_of(self.readings, self.stacks) - set(self.culprits)):
            yield f"  {self._last_of(rank)}"
        for stack, ranks in self._stacks():
            yield f"  {ranks_text(ranks)} stood at"
            yield from (f"    {line}" for line in stack.rstrip().splitlines())

    def _last_of(self, rank: int) -> str:
        """Say what the tape of a rank knows about it."""
        found = self.readings[rank]
        answers = " does not answer;" if silent_of([rank], self.stacks) else ""
        last = f"last launched {_place(found.entries[-1])}" if found.entries else "launched nothing"
        doing = f"; was {found.doing.what} (step {found.doing.step})" if found.doing is not None else ""
        return f"rank {rank} ({found.who.host}, process {found.who.process}){answers} {last}{doing}"

    def _stacks(self) -> Iterator[tuple[str, list[int]]]:
        """Yield each stack with its ranks; the stack of a culprit first."""
        by_stack: defaultdict[str, list[int]] = defaultdict(list)
        for rank, stack in sorted(self.stacks.items()):
            by_stack[stack].append(rank)
        yield from sorted(by_stack.items(), key=lambda item: not set(item[1]) & set(self.culprits))


def diagnose(readings: Mapping[int, TapeReading], stacks: Mapping[int, str]) -> Diagnosis:
    """Diagnose from the tapes of all ranks, and from the stacks of the ranks that answered."""
    meetings = _meetings(readings)
    silent = silent_of(readings, stacks)
    held_up = {rank for meeting in meetings if meeting.absent for rank in meeting.came}
    held_up |= {rank for meeting in meetings if silent & set(meeting.came) for rank in meeting.came} - silent
    late = {rank for meeting in meetings for rank in meeting.absent}
    if not meetings:  # ranks wait for each other through the store: a rank that does not wait there is late
        late = silent | {rank for rank, reading in readings.items() if not reading.waits}
    return Diagnosis(readings, stacks, _disagreement(readings), tuple(meetings), tuple(sorted(late - held_up)))


def silent_of(ranks: Iterable[int], stacks: Mapping[int, str]) -> set[int]:
    """Return those of the ranks that did not answer; where nobody was asked nobody is silent."""
    return set(ranks) - stacks.keys() if stacks else set()


def groups(readings: Mapping[int, TapeReading], axis: str) -> Iterator[list[int]]:
    """Yield the groups of ranks that meet along an axis, as far as there are tapes of them."""
    seen: set[int] = set()
    for rank, reading in sorted(readings.items()):
        if rank not in seen:
            group = [one for one in reading.who.shape.ranks_along(axis, rank) if one in readings]
            seen.update(group)
            yield group


def _meetings(readings: Mapping[int, TapeReading]) -> list[Meeting]:
    found: dict[tuple[str, int, int], Meeting] = {}
    for rank, reading in sorted(readings.items()):
        for entry in reading.waits_for:
            axis = entry.record.axis
            group = next(group for group in groups(readings, axis) if rank in group)
            came = [one for one in group if readings[one].launched.get(axis, 0) >= entry.number]
            absent = tuple(one for one in group if one not in came)
            found.setdefault((axis, entry.number, group[0]), Meeting(entry, tuple(came), absent))
    ahead = max(readings.values(), key=lambda reading: sum(reading.launched.values()), default=None)
    order = {} if ahead is None else {_key(entry): place for place, entry in enumerate(ahead.entries)}
    return sorted(found.values(), key=lambda one: (not one.absent, order.get(_key(one.entry), 0), one.entry.time))


def _key(entry: TapeEntry) -> tuple[str, int]:
    return entry.record.axis, entry.number


def _disagreement(readings: Mapping[int, TapeReading]) -> Disagreement | None:
    """Return the earliest disagreement."""
    found = []
    for axis in sorted({axis for reading in readings.values() for axis in reading.launched}):
        for group in groups(readings, axis):
            by_number: defaultdict[int, dict[int, TapeEntry]] = defaultdict(dict)
            for rank in group:
                for entry in readings[rank].entries:
                    if entry.record.axis == axis:
                        by_number[entry.number][rank] = entry
            differ = (number for number in sorted(by_number) if _differ(by_number[number].values()))
            number = next(differ, None)
            if number is not None:
                found.append(Disagreement(axis, number, by_number[number]))
    return min(found, key=lambda one: min(entry.time for entry in one.launched.values()), default=None)


def _differ(entries: Iterable[TapeEntry]) -> bool:
    return len({(entry.record, entry.step) for entry in entries}) > 1


def _place(entry: TapeEntry) -> str:
    when = datetime.fromtimestamp(entry.time).strftime("%H:%M:%S")
    return f"{entry.record} of step {entry.step} at {when} (number {entry.number} along {entry.record.axis})"

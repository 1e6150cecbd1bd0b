"""Which rank or link is slower than its peers, from the times that each rank measures of its steps.

All ranks end a step together, so the seconds of a step say nothing. What tells ranks apart is who waits: a rank that
computes slowly waits little while the others wait for it, and a slow link makes all ranks of its group wait, the first
to arrive as well as the last.

    own       seconds per step in which a rank did not wait: computation and the host
    waited    seconds per step that it waited along each axis; the last rank to arrive at a group waited for the link
              itself, so the smallest wait of a group is the link's

A single slow window is noise. A rank or link that is slower than its peers in several windows in a row is named, once.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fourfold.grid import Grid, Shape
from fourfold.job import ranks_text

SLOWER = 0.15
"""A rank or link is slow when it is this share of a step beyond the median of its peers: below that, steps of a healthy
but busy machine vary as much."""
IN_A_ROW = 3
"""Slow windows in a row after which a straggler is named."""
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds per step of a rank, averaged over a window of steps."""

    own: float
    waited: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that hold up the others: one that computes slowly, or the group of a slow link."""

    kind: str
    """`COMPUTE`, or the axis of the link."""
    ranks: tuple[int, ...]
    seconds: float
    """Seconds per step: its own work, or the wait along that axis."""
    peers: float
    """The median of the same over its peers."""

    def __str__(self) -> str:
        times = f"{self.seconds * 1e3:.0f} ms per step where its peers take {self.peers * 1e3:.0f}"
        if self.kind == COMPUTE:
            return f"{ranks_text(self.ranks)} is slow: its own work takes {times}"
        return f"the link of {ranks_text(self.ranks)} along {self.kind} is slow: waiting for it takes {times}"


class Stragglers:
    """Takes the windows one after the other and names who has been slow for long."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._streaks: dict[tuple[str, tuple[int, ...]], int] = {}

    def add(self, times: Sequence[StepTimes]) -> list[Straggler]:
        """Take a window of all ranks, in their order; return those that have just become stragglers."""
        found = list(slow(times, self._shape))
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in ((one.kind, one.ranks) for one in found)}
        return [one for one in found if self._streaks[one.kind, one.ranks] == IN_A_ROW]


def slow(times: Sequence[StepTimes], shape: Shape) -> Iterator[Straggler]:
    """Yield who is slower than its peers in this window."""
    step = max(one.own + sum(one.waited.values()) for one in times)
    own = median(one.own for one in times)
    for rank, one in enumerate(times):
        if one.own - own > SLOWER * step:
            yield Straggler(COMPUTE, (rank,), one.own, own)
    for axis in shape.used_axes:
        groups = sorted({tuple(shape.ranks_along(axis, rank)) for rank in range(shape.world)})
        waited = {group: min(times[rank].waited.get(axis, 0.0) for rank in group) for group in groups}
        usual = median(waited.values())
        for group, seconds in waited.items():
            if len(groups) > 1 and seconds - usual > SLOWER * step:
                yield Straggler(axis, group, seconds, usual)


class StepWindows:
    """Windows of steps between two meetings of all ranks; the ranks exchange what each window cost them.

    A rank puts its figures of a window after the meeting that ends it. So at the next meeting all ranks have put
    theirs, and the first rank reads them without waiting for anyone.
    """

    MIN_STEPS = 8
    """Steps of a window, at least: in fewer steps a single pause of a busy machine would count for much."""

    def __init__(self, grid: Grid) -> None:
        self._channel = grid.channel.open("steps", fresh=True)
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
            found = self._stragglers.add([StepTimes(*json.loads(text)) for text in texts.values()])
        if self._window > 1:
            self._channel.drop(str(self._window - 1))  # the first rank has read it: all have met since
        self._window += 1
        waited = {axis: seconds / self._steps for axis, seconds in self._waited.items()}
        self._channel.put(str(self._window), json.dumps([self._own / self._steps, waited]))
        self._clear()
        return found

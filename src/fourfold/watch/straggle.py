"""Which rank or link is slower than its peers, from what each rank says of its steps. Pure.

All ranks of a step end together, so its seconds tell nothing. What tells is who waits: a rank that computes slowly
waits little while the others wait for it, and a link that is slow makes all ranks of its group wait, the first to come
as well as the last.

    own       seconds of a step that a rank did not wait: computation and the host
    waited    seconds that it waited along each axis; what the last to come to a group waited is the link's own

A single slow window is noise. Who is slower than its peers in several windows in a row is named, once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from fourfold.grid import Shape
from fourfold.job import ranks_text

SLOWER = 0.15
"""Of a step's seconds, by which a rank or a link is beyond the median of its peers."""
IN_A_ROW = 3
"""Windows."""
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Sample:
    """What a rank says of a window of steps: seconds of one, on average."""

    own: float
    waited: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Straggler:
    """Ranks that hold up the others: one that computes slowly, or the group of a link."""

    kind: str
    """`COMPUTE`, or the axis of the link."""
    ranks: tuple[int, ...]
    seconds: float
    """Of a step: its own, or waiting along that axis ..."""
    peers: float
    """... and the median of its peers."""

    def __str__(self) -> str:
        milliseconds = f"{self.seconds * 1e3:.0f} ms a step where its peers take {self.peers * 1e3:.0f}"
        if self.kind == COMPUTE:
            return f"{ranks_text(self.ranks)} is slow: its own work takes {milliseconds}"
        return f"the link of {ranks_text(self.ranks)} along {self.kind} is slow: waiting for it takes {milliseconds}"


class Stragglers:
    """Hears the windows one after the other and names who is slow for long."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._streaks: dict[tuple[str, tuple[int, ...]], int] = {}

    def hear(self, samples: Sequence[Sample]) -> list[Straggler]:
        """Of all ranks, in their order; those that have just become stragglers."""
        found = list(slow(samples, self._shape))
        self._streaks = {key: self._streaks.get(key, 0) + 1 for key in ((one.kind, one.ranks) for one in found)}
        return [one for one in found if self._streaks[one.kind, one.ranks] == IN_A_ROW]


def slow(samples: Sequence[Sample], shape: Shape) -> Iterator[Straggler]:
    """Who is slower than its peers in this window."""
    step = max(sample.own + sum(sample.waited.values()) for sample in samples)
    own = median(sample.own for sample in samples)
    for rank, sample in enumerate(samples):
        if sample.own - own > SLOWER * step:
            yield Straggler(COMPUTE, (rank,), sample.own, own)
    for axis in shape.several:
        groups = sorted({tuple(shape.ranks_along(axis, rank)) for rank in range(shape.world)})
        waited = {group: min(samples[rank].waited.get(axis, 0.0) for rank in group) for group in groups}
        usual = median(waited.values())
        for group, seconds in waited.items():
            if len(groups) > 1 and seconds - usual > SLOWER * step:
                yield Straggler(axis, group, seconds, usual)

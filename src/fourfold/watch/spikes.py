"""Losses that jump: how high the next one may be, from those before it. Pure, and the same on all ranks.

A loss is a *spike* above

    median + above * spread        of the last WINDOW good losses, where
    spread = 1.4826 * median of |loss - median|

is the standard deviation of normal ones, which a few outliers do not move; it is at least FLOOR of the median, for
losses that hardly vary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import inf
from statistics import median

WINDOW, LEAST = 64, 32
"""Losses that are looked at, and without which nothing is a spike."""
NORMAL, FLOOR = 1.4826, 0.01


class Spikes:
    """Of one run, after these losses. With `above` 0 nothing is a spike."""

    def __init__(self, above: float, losses: Iterable[float] = ()) -> None:
        self._above = above
        self._losses = deque(losses, WINDOW)

    @property
    def losses(self) -> list[float]:
        return list(self._losses)

    def add(self, loss: float) -> None:
        """A good one."""
        self._losses.append(loss)

    @property
    def limit(self) -> float:
        """Above it the next loss is a spike."""
        if not self._above or len(self._losses) < LEAST:
            return inf
        middle = median(self._losses)
        spread = NORMAL * median(abs(loss - middle) for loss in self._losses)
        return middle + self._above * max(spread, FLOOR * abs(middle))

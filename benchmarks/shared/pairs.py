"""Ratios of two sides that were measured in the same rounds: their median, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

CONFIDENCE = 0.95
ENOUGH = 20
"""Rounds from which on the interval may decide; that of fewer rounds is so wide that it would excuse too much."""


class Pairs:
    """One ratio per round. What slows a whole round down, such as another process, slows both sides down, so that
    ratios vary less than seconds."""

    def __init__(self, ratios: Sequence[float]) -> None:
        self.ratios = sorted(ratios)

    def __bool__(self) -> bool:
        return bool(self.ratios)

    @property
    def median(self) -> float:
        return median(self.ratios)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the median by the sign test, with at least `CONFIDENCE`; it assumes nothing about how the
        ratios are distributed. Fewer than 6 rounds have none: even from the least to the largest ratio would not do."""
        number = len(self.ratios)
        tail, outside = 0.0, 0  # the chance that the median lies below the smallest `outside` ratios
        while (more := tail + comb(number, outside) / 2**number) <= (1 - CONFIDENCE) / 2:
            tail, outside = more, outside + 1
        return (self.ratios[outside - 1], self.ratios[number - outside]) if outside else None

    @property
    def not_above_one(self) -> bool:
        """Whether the median is at most 1, or enough rounds do not show that it is above 1."""
        decides = self.interval if len(self.ratios) >= ENOUGH else None
        return self.median <= 1 or (decides is not None and decides[0] <= 1)

    def __str__(self) -> str:
        sure = "" if self.interval is None else f" ({CONFIDENCE:.0%}: {self.interval[0]:.3f} .. {self.interval[1]:.3f})"
        return f"{self.median:.3f} of its time{sure} over {len(self.ratios)} rounds"

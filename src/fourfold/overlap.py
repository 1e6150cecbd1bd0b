"""Overlap: communication behind computation. It decides when something runs, never what.

Invariant: for the same number of halves, any policy gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much communication runs behind computation. Only `halves` may change a result, by rounding."""

    prefetch: bool = True
    """Gather weights over z ahead of their use, in the order recorded in the first pass."""
    defer: bool = True
    """Reduce dw over z behind the rest of backward."""
    behind_products: bool = True
    """In backward run dw's product while the collective that da needs is in flight."""
    halves: int | None = None
    """Parts of the local batch that take turns, so that one's collectives over x and y run behind the other's
    products; None: 2 where that is worth it, else 1."""
    data: bool = True
    """Sum gradients over data as soon as they are final; gather what the sharded optimizer stepped behind the next
    forward."""
    bytes_in_flight: int | None = None
    """Bound on weights gathered ahead, and on gradients being reduced; None: twice the largest message."""

    def __post_init__(self) -> None:
        if self.halves is not None and self.halves not in (1, 2):
            raise ValueError(f"halves={self.halves} must be 1 or 2, or None for the policy to choose")
        if self.bytes_in_flight is not None and self.bytes_in_flight < 1:
            raise ValueError(f"bytes_in_flight={self.bytes_in_flight} must be at least 1, or None")

    @classmethod
    def off(cls, *, halves: int = 1) -> Overlap:
        """Every collective is waited for where it is launched."""
        return cls(prefetch=False, defer=False, behind_products=False, halves=halves, data=False)

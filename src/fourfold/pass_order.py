"""Finds a rank that runs other passes than the ranks with which it exchanges messages.

All ranks that share weights must run equally many forward and backward passes before each step. Otherwise the gathers
of one rank's second forward pass meet those of another's backward pass, and if they have the same size, weights are
mixed in silence. So each rank predicts its next pass from those before it, which costs a lookup. A pass that nobody
could predict meets the other ranks in the job's store first.

Invariant: all these ranks have come to the same passes, so they predict the same one. A rank that departs from it comes
to the store alone and raises, while the others wait for it in a collective whose deadline is later.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from fourfold.errors import LateRanksError, UnlikeRanksError
from fourfold.job import Channel, difference, ranks_text

MOST_IN_A_ROW = 1024
"""Passes of one kind in a row that are counted; a longer row ends with a meeting."""
WAY_OUT = "let every rank run the same forward and backward passes, and as many of them before each step"


class Past(NamedTuple):
    """What a rank predicts its next pass from: its last kind of pass, how often in a row, and the kind before it."""

    before: str = ""
    last: str = ""
    times: int = 0


class PassOrder:
    """The order of passes that the ranks along some axes keep."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._past = Past()
        self._next: dict[Past, str] = {}
        """What followed the last time."""

    def come(self, kind: str, seconds: float) -> None:
        """Begin a pass of this kind; raise if other ranks do not in time."""
        past = self._past
        before, last, times = past
        expected = self._next.get(past)
        if kind != expected:
            self._meet(kind, expected, seconds)
            self._next[past] = kind
        self._past = Past(before, last, min(times + 1, MOST_IN_A_ROW)) if kind == last else Past(last, kind, 1)

    def _meet(self, kind: str, expected: str | None, seconds: float) -> None:
        channel = self._channel
        judge = partial(difference, "the order of passes", channel.ranks)
        try:
            differs = channel.decide(kind, judge, seconds)
        except LateRanksError as late:
            who = ranks_text(late.ranks) if late.ranks else "another rank"
            instead = f"went on with {expected}" if expected else "did not come to it"
            raise UnlikeRanksError(
                f"ranks disagree on the order of passes: this rank, {channel.rank}, is about to begin {kind}, and "
                f"{who} {instead}; {WAY_OUT}"
            ) from late
        if differs:
            raise UnlikeRanksError(f"{differs}: {WAY_OUT}")

"""Packed documents of a sample of lengths: how much attention the busiest place of a grid has.

Documents lie one after another and are cut at the ends of rows, as windows of a token file are. All ranks wait for the
place whose rows have the most attention (E14), so that is the one that the planner prices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import cycle
from pathlib import Path

from fourfold.context.assign import area

MOST_BAGS = 32
"""Places that are compared: the busiest of more is hardly busier."""


@dataclass(frozen=True, eq=False)
class LengthSample:
    """Lengths of documents in the order in which they are packed, again from the first after the last."""

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = next((length for length in self.lengths if type(length) is not int or length < 1), None)
        if wrong is not None or not self.lengths:
            found = "none" if wrong is None else f"a length of {wrong!r:.20}"
            raise ValueError(
                "a sample of documents has at least one length, and each is a whole number of at least 1 token; got "
                f"{found}"
            )

    @classmethod
    def read(cls, path: Path) -> LengthSample:
        """Read the sample of `fourfold data lengths --json`, or numbers that are separated by blanks or lines."""
        text = path.read_text()
        try:
            found = json.loads(text) if text.lstrip().startswith(("{", "[")) else map(int, text.split())
            if isinstance(found, dict) and "sample" not in found:
                raise ValueError("it has no key 'sample'")
            return cls(tuple(found["sample"] if isinstance(found, dict) else found))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} has no lengths of documents ({error}); write it with fourfold data lengths --json {path}, or "
                "as numbers of tokens, one on a line"
            ) from error

    @cached_property
    def mean(self) -> float:
        return sum(self.lengths) / len(self.lengths)

    def busiest(self, rows: int, seq: int, places: int) -> tuple[int, ...]:
        """Return the documents of the place that has the most attention, of so many with these rows."""
        return _busiest(self, rows, seq, min(places, MOST_BAGS))

    def reach(self, seq: int) -> int:
        """Return the length of rows that would have the attention of these documents, if each were one document."""
        rows = -(-sum(self.lengths) // seq)
        return max(1, round(2 * attention(_busiest(self, rows, seq, 1)) / (rows * seq)))


@lru_cache(maxsize=1024)
def _busiest(sample: LengthSample, rows: int, seq: int, places: int) -> tuple[int, ...]:
    stream, left, found = cycle(sample.lengths), 0, ()
    for _ in range(places):
        bag: list[int] = []
        for _ in range(rows):
            room = seq
            while room:
                left = left or next(stream)
                bag.append(min(left, room))
                left, room = left - bag[-1], room - bag[-1]
        found = max(found, tuple(bag), key=attention)
    return found


def attention(lengths: tuple[int, ...]) -> int:
    """Return the pairs of query and key of documents of these lengths."""
    return sum(area(0, length) for length in lengths)

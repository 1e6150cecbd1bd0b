"""The ways in which K and V travel inside a context group, by name.

This file imports no torch: the page of a run reads ways too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

WAYS = ("gather", "exchange", "ring")


@dataclass(frozen=True, slots=True)
class ContextWay:
    """How K and V travel: `u` neighbours swap tokens for heads, then this way over the others."""

    over: str
    neighbours: int = 1

    @classmethod
    def parse(cls, text: str) -> ContextWay:
        """Read `gather`, `exchange`, `ring`, `ulysses:4`, or one over the other: `ulysses:2+ring`."""
        ways = "|".join(WAYS)
        found = re.fullmatch(rf"ulysses:([1-9][0-9]*)(?:\+({ways}))?|({ways})", text)
        if found is None:
            raise ValueError(
                f"context_way={text!r}: it is one of auto, {', '.join(WAYS)}, ulysses:U for U neighbours, at least 1, "
                "or ulysses:U+ one of them, such as ulysses:2+ring"
            )
        return cls(found[2] or found[3] or "exchange", int(found[1] or 1))

    def __str__(self) -> str:
        if self.neighbours == 1:
            return self.over
        return f"ulysses:{self.neighbours}+{self.over}"

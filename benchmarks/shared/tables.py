"""Tables in Markdown, verdicts about bars, and the folder of results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table whose columns are aligned, so that it reads well in a terminal too."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, ["-" * width for width in widths], *rows):
        yield "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"


def verdict(reached: bool) -> str:
    return "reached" if reached else "**MISSED**"

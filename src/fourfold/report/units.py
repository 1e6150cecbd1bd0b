"""Numbers as short texts with a unit, with a dash for a number that is not known; and the lines of a text table."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TypeGuard

DASH = "\N{EN DASH}"
"""Stands for a number that is not known."""


def plain(value: float | None, digits: int = 4) -> str:
    """Return a number without a unit, to this many significant digits."""
    return f"{value:.{digits}g}" if known(value) else DASH


def count(value: float | None) -> str:
    """Return a count: 1234567 -> `1.23 M`."""
    return _scaled(value, 1000, ("", "k", "M", "G", "T", "P", "E"))


def plural(number: int, what: str) -> str:
    """Return a number of things: `1 grid`, `1,024 grids`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def nbytes(value: float | None) -> str:
    """Return a size in bytes: 1234567 -> `1.18 MiB`."""
    return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def percent(value: float | None) -> str:
    """Return a fraction in percent: 0.3141 -> `31.4%`."""
    return f"{100 * value:.3g}%" if known(value) else DASH


def duration(seconds: float | None) -> str:
    """Return a duration: 0.0213 -> `21.3 ms`."""
    if not known(seconds):
        return DASH
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def money(value: float | None) -> str:
    """Return an amount of money without its currency: 1234567.8 -> `1,234,568`."""
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}") if known(value) else DASH


def known(value: float | None) -> TypeGuard[float]:
    """Return whether a number exists and is finite."""
    return value is not None and math.isfinite(value)


def _scaled(value: float | None, base: int, names: tuple[str, ...]) -> str:
    if not known(value):
        return DASH
    power = 0
    # 999.9 would be rounded to four digits, so it belongs to the next unit.
    while abs(value) >= base - 0.5 and power < len(names) - 1:
        value, power = value / base, power + 1
    shown = f"{value:.0f}" if abs(value) >= 100 or (power == 0 and value == int(value)) else f"{value:.3g}"
    return f"{shown} {names[power]}".strip()


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table. The columns `right` are aligned to the right, the others to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

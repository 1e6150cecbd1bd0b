"""The style of all plots: matplotlib writes SVG that is identical, byte for byte, for the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#222222"
STYLE = {
    "svg.hashsalt": "fourfold",
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 10,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
}


@contextmanager
def drawing() -> Iterator[Any]:
    """Yield matplotlib's Figure class with our style in effect. It needs no display and keeps no state."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed: pip install -e '.[dev]', or matplotlib alone. The results "
            "are stored already; run the same command again to draw them"
        ) from error
    with matplotlib.rc_context(STYLE):
        yield Figure


def save(figure: Any, path: Path) -> Path:
    """Write a figure without date and version, so that equal numbers give equal files, and on white, so that it can be
    read on light and dark pages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return path

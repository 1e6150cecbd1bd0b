"""How the benchmarks draw: matplotlib to SVG that is the same, byte for byte, for the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK = "#222222"
SETTINGS = {
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
    """matplotlib's Figure, in our style; it needs no screen and keeps nothing."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed: pip install -e '.[dev]', or matplotlib alone; what was "
            "found is stored already, the same command draws it"
        ) from error
    with matplotlib.rc_context(SETTINGS):
        yield Figure


def save(figure: Any, path: Path) -> Path:
    """Without date and version, so that the same numbers give the same file; on white, for light and dark pages."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    return path

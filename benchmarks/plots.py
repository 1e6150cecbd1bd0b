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
    """matplotlib's pyplot, in our style and without a screen."""
    try:
        import matplotlib
    except ImportError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib, which is not installed: pip install -e '.[dev]', or matplotlib alone; what was "
            "measured is stored already, the same command draws it"
        ) from error
    matplotlib.use("svg")
    from matplotlib import pyplot

    with matplotlib.rc_context(SETTINGS):
        yield pyplot


def save(figure: Any, path: Path) -> Path:
    """Without the date of drawing, on white: it is read on light and on dark pages."""
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)
    return path

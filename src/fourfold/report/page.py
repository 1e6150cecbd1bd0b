"""The parts that all pages share: the frame of a self-contained HTML file, its elements, and the look of figures.

A figure is plain data for plotly.js: a list of traces and a layout. Nothing here draws, and only `plotly_js` imports
plotly. Colours are names of the style sheet (`var(--axis-x)`). The page's script replaces them by values, so
figures follow the reader's light or dark scheme. An axis has the same colour wherever it appears.

Invariant: every value of a figure is JSON (no NaN), and text from files is escaped in it, because plotly reads tags.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from fourfold.atomic import replacing
from fourfold.axes import MESSAGE_AXES, WAITED_FOR

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy: a page loads only what is in it. `img-src` is for pictures of figures that readers save."""

CUTS = dict.fromkeys(MESSAGE_AXES, "") | {
    "x": "heads, hidden units, vocabulary; tokens in rest",
    "y": "features of the residual stream",
    "z": "rows of the batch; storage of the weights",
    "data": "rows of the batch; whole replicas",
    "pipe": "layers, into stages",
    "context": "sequences, between neighbours along z and data",
    "expert": "experts, to which tokens are sent",
    "ex": "hidden units of each expert",
    "ez": "storage of the weights of experts",
    "edata": "replicas of experts",
}
"""The dims that each axis cuts, in a few words; empty for an axis that has no description yet."""

HUES = 7
"""The number of colours in page.css for axes and copies, `--hue-0` to `--hue-6`; an eighth would get the first one."""

Figure = dict[str, Any]
"""A figure, a trace or a layout of plotly.js, as JSON."""


def frame(
    title: str, body: str, data: Any, plotly_js: str, *, script: str, styles: str = "", policy: str = POLICY
) -> str:
    """Return a page. `script` and `styles` name files of this folder; the script reads `data` from its element."""
    hues = "".join(f"--axis-{name}:var(--hue-{number % HUES});" for number, name in enumerate(WAITED_FOR))
    # A "</script>" in the data would end the element that holds it, so no "<" is written as such.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    # plotly.js makes up nearly all of a page: compressed it takes 2 MB and not 5. The same text gives the same bytes.
    packed = b64encode(gzip.compress(plotly_js.encode(), mtime=0)).decode()
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} - Fourfold</title>
<style>{_part("page.css")}:root {{{hues}}}{_part(styles) if styles else ""}</style>
<script>{_part("errors.js")}</script>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{embedded}</script>
<script type="application/gzip" id="plotly">{packed}</script>
<script>{_part("draw.js")}</script>
<script>{_part(script)}</script>
</body>
</html>
"""


def _part(name: str) -> str:
    return files("fourfold.report").joinpath(name).read_text(encoding="utf-8")


def header(kind: str, title: str, where: str, facts: Iterable[str]) -> str:
    """Return the head of a page: what kind of page it is, its title, and a line of facts. Empty facts are left out."""
    return (
        f'<header><p class="run">{escape(kind)}</p><h1>{escape(title)} <span>on {escape(where)}</span></h1>'
        f"{bullets(filter(None, facts), 'facts')}</header>"
    )


def bullets(lines: Iterable[str], kind: str = "why") -> str:
    """Return lines of text as a list; `kind` is its class in the style sheet."""
    return f'<ul class="{kind}">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'


def section(title: str, body: str, button: str = "") -> str:
    """Return a section with a heading."""
    return f"<section><h2>{escape(title)}{button}</h2>{body}</section>"


def hint(text: str) -> str:
    """Return a line of small print."""
    return f'<p class="hint">{escape(text)}</p>'


def plot(name: str, figure: Figure) -> str:
    """Return the element that the script draws a figure into."""
    return f'<div class="plot" id="{name}" style="height:{figure["layout"]["height"]}px"></div>'


def table(head: Sequence[str], rows: Iterable[Sequence[str]], kind: str = "scroll") -> str:
    """Return a table. Cells are HTML: the caller escapes text that comes from files."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="{kind}"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def card(label: str, value: str, detail: str, tip: str = "") -> str:
    """Return a key figure: a label, a large value and a detail; `tip` explains the label under the pointer."""
    name = f'<abbr title="{escape(tip)}">{escape(label)}</abbr>' if tip else escape(label)
    return f'<div><dt>{name}</dt><dd>{escape(value)}</dd><dd class="detail">{escape(detail)}</dd></div>'


def colour(name: str) -> str:
    """Return the colour of computation or of an axis of the grid; any other name gets a neutral one."""
    return "var(--compute)" if name == "compute" else f"var(--axis-{name if name in WAITED_FOR else 'other'})"


def bars(name: str, x: Sequence[float], y: Sequence[Any], shade: str | list[str], hover: str, **more: Any) -> Figure:
    """Return a trace of horizontal bars. `hover` is the text under the pointer; an empty `extra` hides plotly's own."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": x,
        "y": y,
        "marker": {"color": shade},
        "hovertemplate": f"{hover}<extra></extra>",
        **more,
    }


def plot_axis(**more: Any) -> Figure:
    """Return an axis of a figure in the quiet style of the pages."""
    quiet = {"gridcolor": "var(--line)", "zerolinecolor": "var(--line)", "linecolor": "var(--line)"}
    return {**quiet, "automargin": True, **more}


def plot_layout(height: int, **more: Any) -> Figure:
    """Return the layout that all figures share; the horizontal axis counts steps unless `more` says otherwise."""
    return {
        "height": height,
        "margin": {"l": 44, "r": 12, "t": 30, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--text)"},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--text)"}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        # The bar of buttons covers the upper edge of a figure, so it has no background of its own.
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--muted)", "activecolor": "var(--text)"},
        "showlegend": True,
        "uirevision": "keep",  # a redraw, as for another colour scheme, keeps the reader's zoom
        "xaxis": plot_axis(title={"text": "step", "standoff": 6}, separatethousands=True, exponentformat="none"),
        **more,
    }


def plotly_js() -> str:
    """Return the source of plotly.js, which every page contains."""
    try:
        from plotly.offline import get_plotlyjs  # here, because only pages need the extra `report`
    except ImportError as error:
        raise ModuleNotFoundError(
            "a page needs plotly, which is not installed; pip install 'fourfold[report]'"
        ) from error
    return get_plotlyjs()


def write_page(out: Path, text: str, *, example: str) -> Path:
    """Write a page completely or not at all. `example` is the file name to suggest if `out` is a folder."""
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; name the file to write, such as {out / example}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"cannot write {out}: there is no folder {out.parent}; make it or choose another")
    with replacing(out) as partial:
        partial.write_text(text, encoding="utf-8")
    return out

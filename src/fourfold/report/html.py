"""What every page shares: the frame of a self-contained HTML file, its policy, its parts, and how it is written."""

from __future__ import annotations

import json
import os
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""What a page may load: what stands in it. Pictures are those that the reader saves of a figure."""


def frame(
    title: str, body: str, data: Any, plotly_js: str, *, script: str, styles: str = "", policy: str = POLICY
) -> str:
    """A page. `script` and `styles` name files beside this one; the script reads `data` from the element `data`."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)} - Fourfold</title>
<style>{_part("page.css")}{_part(styles) if styles else ""}</style>
<script>{_part("errors.js")}</script>
</head>
<body>
<main>
{body}
</main>
<script type="application/json" id="data">{_json(data)}</script>
<script>{plotly_js}</script>
<script>{_part("draw.js")}</script>
<script>{_part(script)}</script>
</body>
</html>
"""


def section(title: str, body: str, button: str = "") -> str:
    return f"<section><h2>{escape(title)}{button}</h2>{body}</section>"


def plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ModuleNotFoundError(
            "a page needs plotly, which is not installed; pip install 'fourfold[report]'"
        ) from error
    return get_plotlyjs()


def write_page(out: Path, text: str, *, example: str) -> Path:
    """Write it whole or not at all; `example` is a name for who gave a folder."""
    if out.is_dir():
        raise IsADirectoryError(f"{out} is a folder; name the file to write, such as {out / example}")
    if not out.parent.is_dir():
        raise FileNotFoundError(f"cannot write {out}: there is no folder {out.parent}; make it or choose another")
    # beside the target, since a rename is only atomic inside one file system
    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return out


def _json(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _part(name: str) -> str:
    return files("fourfold.report").joinpath(name).read_text(encoding="utf-8")

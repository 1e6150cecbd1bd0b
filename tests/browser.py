"""Opens a page in headless Chromium: the document as its script left it, or a picture of it.

`find()` is None where no Chromium is installed; a test then skips and says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """Path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


NARROWEST = 500
"""Pixels below which headless Chromium does not make its window; a narrower page stands in a frame."""

FRAME = """<!doctype html>
<style>body {{ margin: 0 }} iframe {{ border: 0; width: {width}px; height: {height}px }}</style>
<iframe src="{address}"></iframe><script>
setTimeout(() => {{
  const inside = document.querySelector("iframe").contentDocument.documentElement;
  if ({dump}) document.replaceChild(document.adoptNode(inside), document.documentElement);
}}, {milliseconds});
</script>"""
"""A phone. Where the page is to be dumped, its document takes the place of this one at the end."""


def document(page: Path | str, *, width: int = 1280, dark: bool = False, seconds: int = 5, timeout: float = 60) -> str:
    """The HTML of the page, a file or an address, after its script ran for so many seconds of its own clock."""
    budget = f"--virtual-time-budget={1000 * seconds}"
    with _of_width(page, width, 1200, milliseconds=1000 * seconds - 200) as shown:
        return _open(shown, "--dump-dom", f"--window-size={width},1200", budget, dark=dark, timeout=timeout)


def screenshot(page: Path, out: Path, *, width: int = 1280, height: int = 2400, dark: bool = False) -> Path:
    """A PNG of the page."""
    with _of_width(page, width, height) as shown:
        _open(shown, f"--screenshot={out}", f"--window-size={width},{height}", "--hide-scrollbars", dark=dark)
    return out


@contextmanager
def _of_width(page: Path | str, width: int, height: int, milliseconds: int = 0) -> Iterator[Path | str]:
    """The page, or a page that shows it as narrow as no window is."""
    if width >= NARROWEST:
        yield page
        return
    address = page if isinstance(page, str) else page.resolve().as_uri()
    with tempfile.TemporaryDirectory(prefix="fourfold-narrow-") as folder:
        shown = Path(folder) / "frame.html"
        dump = "true" if milliseconds else "false"
        how = dict(width=width, height=height, address=address, dump=dump, milliseconds=milliseconds)
        shown.write_text(FRAME.format(**how))
        yield shown


def _open(page: Path | str, *more: str, dark: bool, timeout: float = 60) -> str:
    program = find()
    if program is None:
        raise FileNotFoundError(f"no Chromium: none of {', '.join(NAMES)} is on the PATH")
    flags = [
        "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--allow-file-access-from-files",  # a frame's page lies in another folder
        "--disable-component-update", "--disable-sync", "--virtual-time-budget=5000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
    ]  # fmt: skip
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium refuses to start as root with it
    with tempfile.TemporaryDirectory(prefix="fourfold-browser-", ignore_cleanup_errors=True) as profile:
        address = page if isinstance(page, str) else page.resolve().as_uri()
        command = [program, *flags, f"--user-data-dir={profile}", *more, address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"Chromium ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def opened(path: Path | str, **how: Any) -> str:
    """`document`, or a skipped test where there is no browser."""
    if find() is None:
        pytest.skip(f"no Chromium (none of {', '.join(NAMES)}): the page was not opened in a browser")
    return document(path, **how)


def attribute(document: str, name: str) -> str | None:
    """What the page's script left on its root."""
    found = re.search(rf'<html[^>]* data-{name}="([^"]*)"', document)
    return found and unescape(found.group(1))

"""The drawings of the docs are what their script writes now, and can be read without anything from elsewhere."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).parents[2] / "docs" / "drawings"
DRAWN: dict[str, str] = dict(runpy.run_path(str(FOLDER / "draw.py"))["drawings"]())


def test_the_folder_holds_what_the_script_draws() -> None:
    measured = set(FOLDER.glob("trace-*.svg"))  # by benchmarks/speed/timeline.py
    assert {path.name for path in set(FOLDER.glob("*.svg")) - measured} == set(DRAWN)
    for name, text in DRAWN.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name} is old: python docs/drawings/draw.py"


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_stands_by_itself(name: str) -> None:
    """On white ground of its own, in letters that can be read, inside its frame, with nothing fetched or run."""
    root = ElementTree.fromstring(DRAWN[name])
    inside = [element for element in root if not element.tag.endswith("title")]
    frame = {side: float(root.attrib[side]) for side in ("width", "height")}
    ground = inside[0].attrib
    assert ground["fill"] == "#ffffff"
    assert {side: float(ground[side]) for side in frame} == frame
    kinds = {element.tag.rpartition("}")[2] for element in inside}
    assert kinds <= {"rect", "line", "polygon", "circle", "path", "text"}
    assert re.findall(r"https?://[^\"]+", DRAWN[name]) == ["http://www.w3.org/2000/svg"]
    for element in inside:
        if element.tag.endswith("text"):
            assert float(element.attrib["font-size"]) >= 12
            assert 0 < float(element.attrib["x"]) < frame["width"]
            assert 0 < float(element.attrib["y"]) < frame["height"]


@pytest.mark.parametrize("name", DRAWN)
def test_a_page_shows_it(name: str) -> None:
    pages = [FOLDER.parent.parent / "README.md", *FOLDER.parent.glob("*.md")]
    assert any(f"drawings/{name}" in page.read_text() for page in pages)

"""The drawings of docs/pipeline.md are what `fourfold schedule` prints now."""

from __future__ import annotations

import runpy
from pathlib import Path

from fourfold.schedule.named import BUILDERS

DOCS = Path(__file__).parents[2] / "docs"


def test_the_drawings_are_what_the_commands_print() -> None:
    script = runpy.run_path(str(DOCS / "write_schedules.py"))
    text = (DOCS / "pipeline.md").read_text(encoding="utf-8")
    drawn = script["DRAWN"].findall(text)
    commands = [line.split()[3] for _, lines in drawn for line in lines.splitlines()]
    assert set(commands) >= {*BUILDERS, "blocks:2"}
    assert script["page"](text) == text, "drawings are old: python docs/write_schedules.py"

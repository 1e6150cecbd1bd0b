"""The table of docs/operations.md: every row names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_row_of_the_table_is_held_by_tests_that_exist() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    section = page.partition("## What happens when")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    known = {
        node.name
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    for row in rows:
        *cells, held_by = (cell.strip() for cell in re.split(r"(?<!\\)\|", row.strip("|")))
        assert len(cells) == 4, row
        names = re.findall(r"`(test_\w+)`", held_by)
        assert names, row
        assert set(names) <= known, (row, set(names) - known)

"""Formulas of the pages: drawn when the site is built, and by GitHub."""

from __future__ import annotations

import logging
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CODE = re.compile(r"^( *`{3,}).*?^\1$|(`+).+?\2", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"\$(\S(?:[^$\n]*\S)?)\$")


@pytest.fixture(scope="module")
def formulas() -> ModuleType:
    spec = spec_from_file_location("formulas", ROOT / "docs/formulas.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page_of(formulas: ModuleType, html: str) -> str:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="test.md"))
    return formulas.on_page_content(html, page)


def test_latex_becomes_mathml(formulas: ModuleType) -> None:
    shown = page_of(formulas, r'<p>At <span class="arithmatex">\(a &lt; b\)</span>.</p>')
    assert shown.startswith('<p>At <span class="formula"><math')
    assert 'display="inline"' in shown
    assert "<mi>a</mi><mo>&#x0003C;</mo><mi>b</mi>" in shown
    assert 'display="block"' in page_of(formulas, '<div class="arithmatex">\\[\n\\frac{1}{g}\n\\]</div>')


@pytest.mark.parametrize("latex", [r"\hatt{x}", r"\begin{aligned} a &amp;= b \end{aligned}"])
def test_latex_that_cannot_be_drawn_is_a_warning(
    formulas: ModuleType, latex: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mkdocs.hooks.formulas"):
        page_of(formulas, rf'<span class="arithmatex">\({latex}\)</span>')
    assert "test.md: cannot draw" in caplog.text


def test_github_draws_formulas_inside_of_lines_too() -> None:
    """There, Markdown takes a backslash before punctuation for itself, and `|` ends a cell of a table."""
    found = [(page.name, latex) for page in PAGES for latex in INLINE.findall(CODE.sub("", page.read_text()))]
    assert len(found) >= 30
    assert [(name, latex) for name, latex in found if re.search(r"\\[^\sa-zA-Z]|\|", latex)] == []

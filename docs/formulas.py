r"""Formulas of the pages become MathML when the site is built, so that browsers draw them without a script.

A page has LaTeX between dollar signs, or in a block of the language `math`, as GitHub draws it too. LaTeX that the
converter does not know is a warning, which fails a strict build.
"""

from __future__ import annotations

import logging
import re
from html import unescape

from latex2mathml.converter import convert
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.formulas")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)
"""A formula as pymdownx.arithmatex leaves it: inline in round, as a block in square brackets."""
UNKNOWN = re.compile(r"<mi>(\\\w+|&)</mi>")
"""LaTeX that the converter passed on: a command that it does not know, or a cell outside of a table that it knows."""
SLASH, TIGHT_SLASH = "<mo>&#x0002F;</mo>", '<mo lspace="0" rspace="0">&#x0002F;</mo>'
"""In LaTeX there is no space around a slash; in MathML there is, unless it is told."""


def on_page_content(html: str, page: Page, **_: object) -> str:
    def drawn(found: re.Match[str]) -> str:
        tag, bracket, latex = found.groups()
        latex = unescape(latex).strip()
        formula = convert(latex, display="block" if bracket == "[" else "inline")
        for unknown in UNKNOWN.findall(formula):
            log.warning("%s: cannot draw %r of the formula %r", page.file.src_uri, unknown, latex)
        return f'<{tag} class="formula">{formula.replace(SLASH, TIGHT_SLASH)}</{tag}>'

    return FORMULA.sub(drawn, html)

"""Files outside of docs/ that a page links to become pages of the site: there is no other address to send readers to.

Markdown is taken as it is, with what it links to in turn; pictures and JSON as files; anything else as a page with the
file as a block of code. A link to a file that is not there stays as it is written, and mkdocs warns of it. Pages that
are not in the navigation (these files, results of benchmarks, the log) are not in the search either.
"""

from __future__ import annotations

import re
from os.path import normpath, relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
IN_NAV = ROOT / "examples/README.md"
AS_IT_IS = (".md", ".svg", ".png", ".json", ".jsonl")
LINK = re.compile(r"^(`{3,}).*?^\1$|(`+).+?\2|(?<=\]\()(?P<path>[^)#:\s]+)", re.MULTILINE | re.DOTALL)
"""The path of a link or picture; blocks and spans of code are passed over."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    waiting = [DOCS / file.src_uri for file in files.documentation_pages()]
    _take_in(IN_NAV, files, config, waiting)
    while waiting:
        page = waiting.pop()
        for link in LINK.finditer(page.read_text()):
            if (path := _target(page, link)) is not None:
                _take_in(path, files, config, waiting)
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turn links as they are in the repository into links to where their files stand in the site."""
    if page.file.inclusion.is_not_in_nav():
        page.meta["search"] = {"exclude": True}
    uri = page.file.src_uri
    source = (ROOT if page.file.generated_by else DOCS) / uri

    def moved(link: re.Match[str]) -> str:
        path = _target(source, link)
        return link[0] if path is None else relpath(_uri(path), Path(uri).parent)

    return LINK.sub(moved, markdown)


def _target(page: Path, link: re.Match[str]) -> Path | None:
    """The file of the repository that a link of a page names; None if there is none, or if it is code."""
    if link["path"] is None:
        return None
    path = Path(normpath(page.parent / link["path"]))
    path = path / "README.md" if path.is_dir() else path
    return path if path.is_file() and path.is_relative_to(ROOT) else None


def _uri(path: Path) -> str:
    """Where a file of the repository stands in the site; the README tells what the first page tells."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    uri = path.relative_to(ROOT).as_posix()
    return "index.md" if uri == "README.md" else uri if path.suffix in AS_IT_IS else f"{uri}.md"


def _take_in(path: Path, files: Files, config: MkDocsConfig, waiting: list[Path]) -> None:
    uri = _uri(path)
    if files.get_file_from_path(uri) or not path.is_file():
        return
    if path.suffix in AS_IT_IS:
        where = InclusionLevel.INCLUDED if path == IN_NAV else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, uri, abs_src_path=str(path), inclusion=where))
        waiting += [path] * (path.suffix == ".md")
        return
    name, kind = path.relative_to(ROOT).as_posix(), {".py": "python", ".toml": "toml"}.get(path.suffix, "text")
    head = f"---\ntitle: {path.name}\n---\n# `{name}`\n\n"
    block = f"{'`' * 12}{kind}\n{path.read_text()}\n{'`' * 12}\n"
    files.append(File.generated(config, uri, content=head + block, inclusion=InclusionLevel.NOT_IN_NAV))

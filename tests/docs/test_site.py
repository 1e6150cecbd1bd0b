"""The documentation as a site: it builds without a warning, loads nothing from elsewhere, opens without a fault in a
browser as wide as a screen and in one as narrow as a telephone, and can be searched, also from a folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Semaphore, Thread
from urllib.parse import urlsplit

import pytest

import browser
from pages import blocks_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md"))
BESIDE_THE_NAVIGATION = {"log"}
"""Pages that are read by those whom a link leads there: neither the navigation nor the search shows them."""
WIDTHS = (1280, 390)

LISTEN = b"""<script>
var faults = [], log = console.error;
console.error = (...said) => { faults.push(said.join(" ")); log(...said); };
addEventListener("error", e => faults.push(e.message || "cannot load " + (e.target.src || e.target.href)), true);
addEventListener("unhandledrejection", e => faults.push(String(e.reason)));
</script>"""
"""In front of all that a page runs."""

TYPE = """<script>
addEventListener("load", async () => {
    const box = document.querySelector("[data-md-component=search-query]"), results = ".md-search-result__link";
    box.focus();
    box.value = WORDS;
    box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    for (let i = 0; i < 100 && !document.querySelector(results); i++) await new Promise(done => setTimeout(done, 100));
    document.documentElement.dataset.found = JSON.stringify({
        faults,
        results: [...document.querySelectorAll(results)].map(link => link.href),
        loaded: [...document.querySelectorAll("[src], link[href]")].map(element => element.src ?? element.href),
    });
});
</script>"""

LOOK = """<!doctype html><script>
async function look(path) {
    const frame = document.createElement("iframe"), found = [];
    Object.assign(frame, {src: path, width: WIDTHS[0], height: 900});
    frame.style.visibility = "hidden";  // laid out, not drawn
    await new Promise(loaded => { frame.onload = loaded; document.body.append(frame); });
    const {document: page, performance, faults} = frame.contentWindow, root = page.documentElement;
    for (const width of WIDTHS) {
        frame.width = width;
        await new Promise(done => setTimeout(done, 100));
        if (root.scrollWidth > width) {
            const wide = [...page.querySelectorAll("article *")].find(e => e.getBoundingClientRect().right > width);
            found.push(`${root.scrollWidth} px wide at ${width}: ${wide?.outerHTML.slice(0, 200)}`);
        }
    }
    for (const image of page.images) if (!image.naturalWidth) found.push("no picture: " + image.src);
    for (const {name} of performance.getEntriesByType("resource")) {
        if (!name.startsWith(location.origin) && !name.startsWith("data:")) found.push("from elsewhere: " + name);
    }
    frame.remove();
    return [...faults, ...found].map(fault => `${path}: ${fault}`);
}
addEventListener("load", async () => {
    const found = [];
    for (const path of PATHS) found.push(...await look(path));
    document.documentElement.dataset.found = JSON.stringify(found);
});
</script><body></body>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)
    warnings = [line for line in built.stderr.splitlines() if not line.startswith("INFO")]
    if built.returncode:
        pytest.fail("\n".join(warnings))
    return folder


class Loaded(HTMLParser):
    """What a page loads, and what its navigation links to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.navigation: list[str] = []
        self.navs = 0
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.loads += filter(None, [given.get("src"), given.get("href") if tag == "link" else None])
        self.navs += tag == "nav"
        self.navigation += filter(None, [given.get("href") if tag == "a" and self.navs else None])

    def handle_endtag(self, tag: str) -> None:
        self.navs -= tag == "nav"


def pages(site: Path) -> list[Path]:
    """All pages; of those that are a file of code, which are all alike, the first."""
    found = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    code = [page for page in found if len(page.suffixes) > 1]
    return [page for page in found if page not in code[1:]]


def to_open(site: Path) -> list[Path]:
    """Of the results of benchmarks, which are all alike, the first."""
    results = [page for page in pages(site) if page.parent.name == "results"]
    return [page for page in pages(site) if page not in results[1:]]


def test_every_page_is_in_the_navigation_and_in_the_search_or_in_neither(site: Path) -> None:
    navigation = set(Loaded(site / "index.html").navigation)
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries}
    shown = {f"{page}.html" for page in PAGES if page not in BESIDE_THE_NAVIGATION} | {"examples/index.html"}
    assert shown - {"index.html"} <= navigation
    assert found == shown
    for page in BESIDE_THE_NAVIGATION:
        assert (site / f"{page}.html").is_file()
        assert f"{page}.html" not in navigation


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("agarwal", "math.html?h=agarwal#the-product"),
        ("policy.recompute", "api/grid.html?h=recompute#fourfold.policy.Policy.recompute"),
    ],
)
def test_the_search_works_from_a_folder(site: Path, words: str, expected: str) -> None:
    """Somebody types on the first page; what the page has loaded by then lies in the folder."""
    page, script = site / "typed.html", LISTEN.decode() + TYPE.replace("WORDS", json.dumps(words))
    page.write_text((site / "index.html").read_text().replace("<head>", f"<head>{script}", 1))
    try:
        typed = browser.opened(page, seconds=20)
    finally:
        page.unlink()
    found = browser.attribute(typed, "found")
    assert found is not None, typed[-2000:]
    shown = json.loads(found)
    assert shown["faults"] == []
    assert f"{site.as_uri()}/{expected}" in shown["results"]
    assert not [address for address in shown["loaded"] if not address.startswith((site.as_uri(), "data:"))]


def test_nothing_is_loaded_from_elsewhere_and_all_of_it_is_there(site: Path) -> None:
    for page in pages(site):
        for address in Loaded(page).loads:
            where = urlsplit(address)
            assert not where.scheme, f"{page.name} loads {address}"
            assert (page.parent / where.path).is_file(), f"{page.name} loads {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)[\s'\"]*(https?:)?//", style.read_text()), style


def test_blocks_of_code_are_blocks_of_code(site: Path) -> None:
    for page in PAGES:
        written = [block.language for block in blocks_of(ROOT / f"docs/{page}.md")]
        html = (site / f"{page}.html").read_text()
        assert html.count("<pre>") >= len(written) - written.count("math"), page
        assert html.count('<div class="formula">') == written.count("math"), page


class Handler(SimpleHTTPRequestHandler):
    """Serves the site; pages tell of what goes wrong in them. The first page alone reads all the words to search
    for, which takes a second."""

    first = Semaphore()

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if path.suffix == ".html" and path.is_file():
            self._answer(path.read_bytes().replace(b"<head>", b"<head>" + LISTEN, 1))
        elif self.path == "/look":
            paths = [f"/{page.relative_to(self.directory).as_posix()}" for page in to_open(Path(self.directory))]
            self._answer(LOOK.replace("PATHS", json.dumps(paths)).replace("WIDTHS", json.dumps(WIDTHS)).encode())
        elif path.name == "search_index.json" and not self.first.acquire(blocking=False):
            self._answer(b'{"config": {"lang": ["en"], "separator": " "}, "docs": []}')
        else:
            super().do_GET()

    def _answer(self, page: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None: ...


def test_pages_open_in_a_browser_without_a_fault(site: Path) -> None:
    """All in one browser, each in a frame as wide as the screen."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(site))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        looked = browser.opened(f"http://127.0.0.1:{server.server_port}/look", seconds=30, timeout=150)
        server.shutdown()
    found = browser.attribute(looked, "found")
    assert found is not None, looked[-2000:]
    assert json.loads(found) == []

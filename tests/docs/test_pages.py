"""README and every page of the documentation, followed literally; see `pages.py`."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from markdown import markdown

from fourfold.commands.options import setting
from fourfold.train.config import read_config
from pages import ROOT, Block, PageError, blocks_of, commands_of, follow, understood

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "README.md"]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_what_it_says(page: Path, tmp_path: Path) -> None:
    follow(page, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_understood(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, str(page), "exec")
        elif block.language == "bash":
            for _, command in commands_of(block):
                words = shlex.split(command, comments=True)
                if words[0] == "fourfold" and not command.endswith("# fails") and ">" not in words:
                    assert understood(*words[1:]) == 0


def test_every_setting_of_a_page_is_understood() -> None:
    """Values stand without quotes of their own; a list needs those of the shell."""
    shown = [
        (page.name, option.strip("'"))
        for page in PAGES
        for line in re.sub(r"(?<=--set)\n|\\\n", " ", page.read_text()).splitlines()
        if "# fails" not in line and page.name != "log.md"
        for option in re.findall(r"--set +('[^']*'|[^\s`,;]+)", line)
    ]
    assert len(shown) >= 30
    for page, option in shown:
        key, value = setting(option)
        assert not re.fullmatch(r"[^=]+=['\"].*", option), (page, option)
        given = [("model.name", "tower:Tower")] if key == "model.options" else []
        read_config(None, [*given, (key, value)])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```\nls\n```", "test.md:2: a block is python, bash, text, math, or a file"),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```", r"test.md:6: (.|\n)*line 6.*(.|\n)*AssertionError"),
        ("<!-- not run -->\n\n```python\nimport (\n```", r"test.md:4: (.|\n)*SyntaxError"),
        ("<!-- run if: 1 < 2 -->\n\n```python\nassert 3 < 2\n```", r"test.md:4: (.|\n)*AssertionError"),
        ("```bash\nfourfold plan --modle gpt-tiny\n```", r"test.md:2: fourfold plan --modle gpt-tiny ended with 2"),
        ("```bash\nls  # fails\n```", "test.md:2: ls ended with 0"),
        ("```bash\ntorchrun --nnodes 2 -m fourfold.cli trian\n```", "ended with 2"),
        ("```bash\nmake coffee\n```", r"the Makefile does not make \['coffee'\]"),
        ("```bash\npip install 'fourfold[tests]'\n```", r"there are no extras \['tests'\]"),
        ("```bash\nsbatch job.sh\n```", r"no command before it has written \['job.sh'\]"),
    ],
)
def test_what_is_wrong_is_found(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pages.ROOT", tmp_path)
    for name in ("Makefile", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    page, folder = tmp_path / "test.md", tmp_path / "there"
    page.write_text(f"{text}\n<!-- ranks: 1 -->\n")
    folder.mkdir()
    with pytest.raises(PageError, match=said):
        follow(page, folder)


def followed(text: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Follow a page of this text, and return the folder in which its commands ran."""
    monkeypatch.setattr("pages.ROOT", home)
    page, folder = home / "test.md", home / "there"
    page.write_text(text)
    folder.mkdir()
    follow(page, folder)
    return folder


def test_a_block_with_the_name_of_a_file_is_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "```toml\n# run.toml\n[model]\n```\n\n```bash\ngrep model run.toml\n```\n"
    folder = followed(text, tmp_path, monkeypatch)
    assert (folder / "run.toml").read_text() == "# run.toml\n[model]\n"


def test_a_block_for_another_framework_is_compiled_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<!-- not run -->\n\n```python\nimport nowhere\n```\n\n<!-- ranks: 1 -->\n"
    followed(text, tmp_path, monkeypatch)


def test_commands_go_on_over_lines() -> None:
    block = Block("bash", "# first\nls \\\n  -l\n\npwd  # where\n", 10)
    assert list(commands_of(block)) == [(12, "ls   -l"), (14, "pwd  # where")]


@pytest.mark.parametrize("page", [*PAGES, *RESULTS], ids=lambda page: str(page.relative_to(ROOT)))
def test_lists_and_tables_are_lists_and_tables(page: Path) -> None:
    """Each needs a blank line before it, or it is the end of a paragraph on the site."""
    html = markdown(page.read_text(), extensions=["pymdownx.superfences", "tables"])
    text = re.sub(r"<(pre|code)\b.*?</\1>", "", html, flags=re.DOTALL)
    for paragraph in re.findall(r"<p>.*?</p>", text, flags=re.DOTALL):
        assert not re.search(r"\n(- |\d+\. |\|)", paragraph), paragraph


def test_every_block_of_every_page_has_a_kind() -> None:
    for page in PAGES:
        for block in blocks_of(page):
            assert block.file or block.language in ("python", "bash", "text", "math"), f"{page}:{block.line}"

"""Follows a page of the documentation literally, from top to bottom, in a fresh folder.

    python tests/pages.py docs/data.md
    python tests/pages.py --shell README.md docs/*.md    # commands in a shell, as readers run them

- `python` blocks run in one namespace on 4 ranks, or on those that `<!-- ranks: 1 -->` asks for.
- A block whose first line is a comment with a file's name is that file.
- `bash` blocks are commands, one a line. Those of Fourfold run in processes that have imported torch already
  (`warm.py`), others in a shell; what needs more than one machine has is checked as far as one machine can (`CHECKS`).
  A command with `# fails` behind it must.
- `text` blocks are what commands print, `math` blocks are formulas; neither is looked at.
- `<!-- not run -->` before a `python` block: it is code for another framework, or for a process that has
  joined no group, and is compiled only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import warm
from harness import PRELOAD, Ranks, _context, as_torchrun

ROOT = Path(__file__).parent.parent
CLONE = ("benchmarks", "docs", "examples", "src", "tests", "Makefile", "README.md", "pyproject.toml")
FENCE = re.compile(r"^( *)```(\S*).*?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run -->\s*\Z")
"""What stands before a block that is not run."""
FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
SECONDS = 400.0
"""A command that takes longer has stopped for good: none takes half of it, even on cores that others use as well."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    runs: bool = True

    @property
    def file(self) -> str | None:
        """That it is the content of."""
        found = FILE.match(self.text)
        return found[1] if found else None


class PageError(Exception):
    """What does not do what the page says, and where."""


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        indent, language, code = found.groups()
        lines = [line.removeprefix(indent) for line in code.splitlines()]
        before = text[: found.start()]
        yield Block(language, "\n".join(lines) + "\n", before.count("\n") + 2, NOT_RUN.search(before) is None)


def commands_of(block: Block) -> Iterator[tuple[int, str]]:
    """Each command with its line."""
    line, held = block.line, ""
    for part in block.text.splitlines():
        held += part
        if held.endswith("\\"):
            held = held[:-1]
        else:
            if held.strip() and not held.lstrip().startswith("#"):
                yield line, held.strip()
            held = ""
        line += 1


def follow(page: Path, folder: Path, say: Callable[[str], None] = lambda _: None, *, in_shell: bool = False) -> None:
    """Raises `PageError` where the page is wrong."""
    for name in CLONE:
        (folder / name).symlink_to(ROOT / name)
    asked = re.search(r"<!-- ranks: (\d+) -->", page.read_text())
    with at(folder):
        ranks = Ranks(int(asked[1]) if asked else 4)
        try:
            for block in blocks_of(page):
                began = time.perf_counter()
                _follow(page, block, folder, ranks, in_shell)
                say(f"{page.name}:{block.line} {block.language or 'no language'} {time.perf_counter() - began:.1f} s")
        finally:
            ranks.close()


def _follow(page: Path, block: Block, folder: Path, ranks: Ranks, in_shell: bool) -> None:
    where = f"{page.relative_to(ROOT)}:{block.line}"
    if block.file:
        path = folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)
    elif block.language == "python":
        try:
            ranks.run(run_python, str(page), block, str(folder), timeout=SECONDS)
        except Exception as error:
            raise PageError(f"{where}: {error}") from error
    elif block.language == "bash":
        for line, command in commands_of(block):
            run_command(f"{page.relative_to(ROOT)}:{line}", command, folder, in_shell)
    elif block.language not in ("text", "math"):
        raise PageError(f"{where}: a block is python, bash, text, math, or a file that its first line names")


_namespace: dict[str, object] = {"__name__": "__main__"}


def run_python(page: str, block: Block, folder: str) -> None:
    """A job: the block, after those before it."""
    os.chdir(folder)
    if len(_namespace) == 1:  # the first block: a rank of torchrun's has a seed of its own, one of ours was forked
        torch.manual_seed(1000 + int(os.environ["LOCAL_RANK"]))
    code = compile("\n" * (block.line - 1) + block.text, page, "exec")
    with warnings.catch_warnings(), as_torchrun():
        warnings.simplefilter("error")
        if block.runs:
            exec(code, _namespace)


def run_command(where: str, text: str, folder: Path, in_shell: bool) -> None:
    command, _, comment = text.partition("  #")
    words = shlex.split(command, comments=True)
    errors, said = folder / ".stderr", folder / ".stdout"
    errors.write_text("")
    said.write_text("")
    if words[0] in CHECKS:
        if problem := CHECKS[words[0]](words, folder):
            raise PageError(f"{where}: {command.strip()}: {problem}")
        return
    if re.search(r"[|<>;&$]", command) or (in_shell and "--nnodes" not in words):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with said.open("a") as out, errors.open("a") as err:
            env = os.environ | {"PATH": path, "HOME": str(folder)}
            code = subprocess.run(["bash", "-c", command], env=env, stdout=out, stderr=err, timeout=SECONDS).returncode
    else:
        program, arguments = (understood, words[1:]) if words[:2] in LONG else program_of(words)
        process = warm.Process(program, *arguments, stdout=said, stderr=errors)
        try:
            code = process.wait(SECONDS)
        finally:
            process.kill()
    if (code != 0) != (comment.strip() == "fails"):
        shown = f"{said.read_text()[-1500:]}\n{errors.read_text()[-3000:]}"
        raise PageError(f"{where}: {command.strip()} ended with {code}:\n{shown}")


def program_of(words: Sequence[str]) -> tuple[Callable[..., int], Sequence[str]]:
    name, *arguments = words
    if name == "torchrun":
        return (parsed, arguments) if "--nnodes" in arguments else (warm.torchrun, arguments)
    if name in ("fourfold", "python"):
        return (warm.command if name == "fourfold" else warm.python), arguments
    return shell, words


def shell(*words: str) -> int:
    return subprocess.run(words, timeout=SECONDS).returncode


def understood(*arguments: str) -> int:
    """Whether `fourfold` knows these."""
    from fourfold.cli import parser

    parser().parse_args(arguments)
    return 0


def parsed(*arguments: str) -> int:
    """torchrun on several nodes, and what each rank would be told: whether all of it is understood."""
    from torch.distributed.run import get_args_parser

    found = get_args_parser().parse_args(arguments)
    if found.module:
        if found.training_script != "fourfold.cli":
            return 1
        return understood(*found.training_script_args)
    return 0 if Path(found.training_script).exists() else 1


def makes(words: Sequence[str], _: Path) -> str:
    rules = (ROOT / "Makefile").read_text()
    targets = [word for word in words[1:] if "=" not in word]
    missing = [target for target in targets if not re.search(rf"^{target}:", rules, re.MULTILINE)]
    return f"the Makefile does not make {missing}" if missing else ""


def submits(words: Sequence[str], folder: Path) -> str:
    files = [word for word in words[1:] if Path(word).suffix in (".sh", ".yaml", ".sbatch")]
    missing = [file for file in files if not (folder / file).exists()]
    return f"no command before it has written {missing}" if missing or not files else ""


def installs(words: Sequence[str], _: Path) -> str:
    extras = {extra for word in words for extra in ",".join(re.findall(r"\[(.*?)\]", word)).split(",") if extra}
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return f"there are no extras {sorted(extras - set(known))}" if extras - set(known) else ""


LONG = (["fourfold", "demo"],)
"""Commands that take minutes: in a shell they run, else their options alone are looked at."""
CHECKS: dict[str, Callable[[Sequence[str], Path], str]] = {
    "make": makes,
    "pip": installs,
    "git": lambda words, _: "" if words[1] == "clone" else "pages clone, no more",
    "cd": lambda *_: "",
    "sbatch": submits,
    "kubectl": submits,
}
"""Commands that are not run: what is wrong with them, as far as can be told here."""


@contextmanager
def at(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


if __name__ == "__main__":
    _context.set_forkserver_preload(PRELOAD)
    for given in sys.argv[1:]:
        if given != "--shell":
            with tempfile.TemporaryDirectory() as place:
                follow(Path(given).resolve(), Path(place), print, in_shell="--shell" in sys.argv)

"""How options are read: the parser and its help, what it says of a wrong word, and the forms of values.

Options are parsed before torch is imported, so that help and a misspelt option take no seconds. A command is therefore
declared with the place of its function, `train.command:train`, which `fourfold.cli` imports once the options are read.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Sequence
from typing import Any, NoReturn

from fourfold.axes import AXES
from fourfold.spelling import nearest

EXAMPLES = "\n\nExamples:\n"
"""What parts the text of a command: description above the options, examples below."""
WIDEST = 108


class Help(argparse.RawDescriptionHelpFormatter):
    """Options and commands in a column that is wide enough for their names; names are not broken."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(shutil.get_terminal_size().columns - 2, WIDEST))
        self._action_max_length = 14  # at least, since the longest command does not count

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """Refuses what it does not know with the nearest spelling; asked for nothing it shows its help."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"there is no place for {' '.join(map(repr, rest))}")
        return found, rest

    def error(self, message: str) -> NoReturn:
        wrong = re.fullmatch(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if unknown := self._unknown():
            message = f"there is no option {unknown}{nearest(unknown, list(self._option_string_actions))}"
        elif wrong is not None:
            known = re.findall(r"[\w.-]+", wrong[3])
            what = "there is no command" if wrong[1] == "COMMAND" else f"argument {wrong[1]}: there is no"
            message = f"{what} {wrong[2]!r}{nearest(wrong[2], known)}; choose from {', '.join(known)}"
        elif message.endswith("required: COMMAND"):
            self.exit(2, self.format_help())
        self.exit(2, f"{self.prog}: error: {message}\n`{self.prog} --help` shows options and examples\n")

    def _unknown(self) -> str:
        """The first option that was given and is none, nor the beginning of one."""
        for word in self._given:
            name = word.partition("=")[0]
            if name == "--" or (not name.startswith("-") and self._subparsers is not None):
                return ""  # what follows is not for this parser
            if re.match(r"--?[a-z]", name) and not any(each.startswith(name) for each in self._option_string_actions):
                return name
        return ""


def add(
    commands: Any, shape: type[argparse.HelpFormatter], name: str, run: Any, help: str, text: str
) -> argparse.ArgumentParser:
    """A command; `run` is the place of what it does, or that itself where it needs no torch."""
    description, examples, lines = text.partition(EXAMPLES)
    found = commands.add_parser(
        name, help=help, description=description, epilog=(examples + lines).strip(), formatter_class=shape
    )
    if run is not None:
        found.set_defaults(run=run)
    return found


def below(found: argparse.ArgumentParser) -> Any:
    """Where the commands of a command are added."""
    return found.add_subparsers(title="commands", required=True, metavar="COMMAND")


def setting(text: str) -> tuple[str, Any]:
    """`batch.rows=32`; the value as TOML has it, or a plain text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} lacks a value; write section.key=value, such as batch.rows=32")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def grid(text: str) -> dict[str, int]:
    """`x=2,z=2`, or `auto`."""
    if text == "auto":
        return {}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1 or axis in sizes:
            raise argparse.ArgumentTypeError(
                f"{part!r} is no axis with a size; write auto, or such as x=2,z=2 with axes {', '.join(AXES)}, "
                "each once"
            )
        sizes[axis] = int(size)
    return sizes


def whole(text: str) -> int:
    """`8`, with an error that says what is wanted."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; write such as 8") from None


def number(text: str) -> float:
    """`0.8`, `1e-4`"""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; write such as 0.8 or 60") from None


def quantity(text: str) -> float:
    """`16.8M`, `4096`, `1.5e6`"""
    scale = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens; write such as 16.8M, 512k or 4096")
    return value


def steps(text: str) -> range:
    """`7`, or `7-9` with both ends."""
    first, _, last = text.partition("-")
    last = last if "-" in text else first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(
            f"{text!r} names no steps; write one, such as 7, or the first and the last, such as 7-9, counted from 1"
        )
    return range(int(first), int(last) + 1)


def shard_bytes(text: str) -> int:
    """`5GB`, `500MB`"""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B", text)
    nbytes = int(float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2]]) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size of a file; write such as 5GB or 500MB")
    return nbytes

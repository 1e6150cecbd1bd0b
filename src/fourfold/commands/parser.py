"""How options are parsed: the parser, its help, its errors for unknown words, and the types of option values.

Nothing here imports torch, so that help and errors appear at once.
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
"""Separates the text of a command: the description stands above the options, the examples below."""
WIDEST = 108
"""Columns of a help text at most; longer lines are hard to read."""


class Help(argparse.RawDescriptionHelpFormatter):
    """A formatter with a column wide enough for the names of options and commands, which never breaks a name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(shutil.get_terminal_size().columns - 2, WIDEST))
        self._action_max_length = 14  # a minimum: argparse ignores the names of commands here

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    """A parser that answers an unknown word with the nearest known one, and no arguments at all with its help."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unexpected argument {' '.join(map(repr, rest))}")
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
        """Return the first given option that neither exists nor abbreviates one that does; empty if there is none."""
        for word in self._given:
            name = word.partition("=")[0]
            if name == "--" or (not name.startswith("-") and self._subparsers is not None):
                return ""  # the rest belongs to a subcommand or is positional
            if re.match(r"--?[a-z]", name) and not any(each.startswith(name) for each in self._option_string_actions):
                return name
        return ""


def add(commands: Any, name: str, run: str | None, help: str, text: str) -> argparse.ArgumentParser:
    """Add a command. `run` names its body as `module:function`; it is None for a command that has subcommands."""
    description, examples, lines = text.partition(EXAMPLES)
    command = commands.add_parser(
        name, help=help, description=description, epilog=(examples + lines).strip(), formatter_class=Help
    )
    command.set_defaults(run=run)
    return command


def subcommands(command: argparse.ArgumentParser) -> Any:
    """Return the object to which the subcommands of a command are added."""
    return command.add_subparsers(title="commands", required=True, metavar="COMMAND")


def setting(text: str) -> tuple[str, Any]:
    """Parse `batch.rows=32`. The value is read as TOML, or else taken as plain text."""
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} has no value; write section.key=value, such as batch.rows=32")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def grid(text: str) -> dict[str, int]:
    """Parse `x=2,z=2` or `auto`, which is the empty dict."""
    if text == "auto":
        return {}
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdigit() or int(size) < 1 or axis in sizes:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not an axis with a size; write auto, or for example x=2,z=2, with each of the axes "
                f"{', '.join(AXES)} at most once"
            )
        sizes[axis] = int(size)
    return sizes


def whole(text: str) -> int:
    """Parse a whole number such as `8`."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number; write for example 8") from None


def number(text: str) -> float:
    """Parse a number such as `0.8` or `1e-4`."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number; write for example 0.8 or 60") from None


def quantity(text: str) -> float:
    """Parse a number of tokens such as `16.8M`, `4096` or `1.5e6`."""
    scale = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}.get(text[-1:].lower(), 1.0)
    try:
        value = float(text if scale == 1.0 else text[:-1]) * scale
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens; write for example 16.8M, 512k or 4096")
    return value


def steps(text: str) -> range:
    """Parse the steps `7`, or `7-9` with both ends included."""
    first, _, last = text.partition("-")
    last = last if "-" in text else first
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of steps; write one step, such as 7, or the first and last, such as 7-9"
        )
    return range(int(first), int(last) + 1)


def shard_bytes(text: str) -> int:
    """Parse the size of a file such as `5GB` or `500MB`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]?)B", text)
    nbytes = int(float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2]]) if found else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a file size; write for example 5GB or 500MB")
    return nbytes

"""`fourfold completion`: prints a script that lets a shell complete commands, options, names and files.

The script is generated from the parser and static, so that completing a word does not start Python.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fourfold.commands.options import parser

PACKAGE = Path(__file__).parent.parent
FOLDERS = ("RUN", "DIR", "FOLDER")
FILES = ("PATH", "INPUT", "SOURCE", "CONFIG.toml", "FILE", "FILE.toml", "FILE.html", "FILE.tokens", "FILE.csv")
"""The metavars of options that take a folder, and of options that take a file."""


def completion(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Print the script for a shell."""
    print(script(parser(), options.shell))
    return 0


def script(top: argparse.ArgumentParser, shell: str) -> str:
    """Return the script that completes the commands of this parser in a shell."""
    try:
        import shtab
    except ImportError as error:
        raise ImportError("fourfold completion needs the package shtab; install fourfold[train], or shtab") from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ImportError(f"shtab {shtab.__version__} cannot write a script for {shell}; install shtab 1.10 or newer")
    names = {"--model": known_models(), "--machine": known_machines(), "--grid": ["auto"]}
    for action in (action for command in parsers(top) for action in command._actions):
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:  # a shell shows one line about a command, not its whole description
                action.choices[listed.dest].description = listed.help
        elif found := [names[option] for option in action.option_strings if option in names]:
            action.complete = names_or_files(action.dest, found[0])  # type: ignore[attr-defined]
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(top, shell)


def parsers(command: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of a command and the parsers of all its subcommands."""
    yield command
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


def names_or_files(what: str, names: Sequence[str]) -> dict[str, Any]:
    """Return how each shell completes a known name or a file; a grid is never a file."""
    words, function = " ".join(names), f"_fourfold_{what}_or_file"
    if what == "grid":
        function, files = "_fourfold_grid", {"bash": "", "zsh": "", "fish": ""}
    else:
        files = {"bash": "; compgen -f -- $1", "zsh": "; _files", "fish": " (__fish_complete_path (commandline -ct))"}
    return {
        "bash": function,
        "zsh": function,
        "fish": words + files["fish"],
        "preamble": {
            "bash": f"{function}() {{ compgen -W '{words}' -- $1{files['bash']}; }}",
            "zsh": f"{function}() {{ compadd -- {words}{files['zsh']} }}",
        },
    }


def known_models() -> list[str]:
    """Return the names of the published sizes. Their file is run on its own, because its package imports torch."""
    return list(runpy.run_path(str(PACKAGE / "models" / "sizes.py"))["SIZES"])


def known_machines() -> list[str]:
    """Return the names of the packaged machines."""
    return sorted(path.stem for path in (PACKAGE / "machines").glob("*.toml"))

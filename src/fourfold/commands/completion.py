"""`fourfold completion`: a script that lets a shell complete commands, options, names and files.

The script is static, made from the parser: completing a word starts no Python.
"""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fourfold.commands.parser import add

PACKAGE = Path(__file__).parent.parent
SHELLS = ("bash", "zsh", "fish")
FOLDERS = ("RUN", "DIR", "FOLDER")
FILES = ("PATH", "INPUT", "SOURCE", "CONFIG.toml", "FILE", "FILE.toml", "FILE.html", "FILE.tokens")
"""By what an option is called in the help."""


def add_completion(
    commands: Any, shape: type[argparse.HelpFormatter], parser: Callable[[], argparse.ArgumentParser]
) -> None:
    one = add(commands, shape, "completion", None, "let the shell complete commands and options", COMPLETION)
    one.add_argument("shell", choices=SHELLS, help="for which shell to write the script, on standard output")

    def completion(options: argparse.Namespace, _: Sequence[str]) -> int:
        print(script(parser(), options.shell))
        return 0

    one.set_defaults(run=completion)


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    try:
        import shtab
    except ImportError as error:
        raise ImportError("fourfold completion needs the package shtab; install fourfold[train], or shtab") from error
    if shell not in shtab.SUPPORTED_SHELLS:
        raise ImportError(f"shtab {shtab.__version__} writes no {shell}; install shtab 1.10 or newer")
    shorten(parser)
    names = {"--model": known_models(), "--machine": known_machines(), "--grid": ["auto"]}
    for action in actions(parser):
        if found := [names[option] for option in action.option_strings if option in names]:
            action.complete = names_or_files(action.dest, found[0])  # type: ignore[attr-defined]
        elif action.metavar in FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar in FOLDERS:
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def shorten(parser: argparse.ArgumentParser) -> None:
    """A line of each command is what shells have room for."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for listed in action._choices_actions:
                action.choices[listed.dest].description = listed.help
            for inner in action.choices.values():
                shorten(inner)


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of a command and of all below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from actions(inner)
        else:
            yield action


def names_or_files(what: str, names: Sequence[str]) -> dict[str, Any]:
    """How each shell completes a known name, or a file of one's own; a grid is no file."""
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
    """From the file of sizes by itself: its package imports torch."""
    return list(runpy.run_path(str(PACKAGE / "models" / "sizes.py"))["SIZES"])


def known_machines() -> list[str]:
    return sorted(path.stem for path in (PACKAGE / "machines").glob("*.toml"))


COMPLETION = """\
Print a script that lets the shell complete commands, options, models, machines
and files. Write it once, and again after an update:

  bash   fourfold completion bash > ~/.local/share/bash-completion/completions/fourfold
         (the package bash-completion reads it; without that: source it in ~/.bashrc)
  zsh    fourfold completion zsh > ~/.zfunc/_fourfold
         (with fpath+=~/.zfunc before compinit in ~/.zshrc)
  fish   fourfold completion fish > ~/.config/fish/completions/fourfold.fish

Examples:
  fourfold completion bash > fourfold.bash
  fourfold completion zsh > _fourfold
  fourfold completion fish > fourfold.fish"""

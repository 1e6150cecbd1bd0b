"""The names that other frameworks have for our keys, options and axes: what an error answers to somebody who uses one.

`synonyms.toml` is the table. It is read when an error needs it, so this file costs a command nothing; it imports no
torch, because command-line options are parsed without it.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from fourfold.axes import AXIS_MEANINGS

TABLE = Path(__file__).with_suffix(".toml")
CAMEL_CASE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
"""The places in maxSteps where max_steps has an underscore."""
AXIS_KEYS = {f"grid.{axis}": meaning.partition(": ")[2] for axis, meaning in AXIS_MEANINGS.items()}
"""What the sizes of the axes count, by their keys: whoever turned on "fsdp" has to choose a number."""


class Writing(Enum):
    """The place where the user wrote a name, so that the answer fits there too."""

    COMMAND = "command line"
    CONFIG = "config file"
    AXIS = "axis of a grid"


@dataclass(frozen=True, slots=True)
class Synonym:
    """One entry of the table: names elsewhere, and what is meant here. The table explains the fields."""

    words: tuple[str, ...]
    key: str | None = None
    option: str | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    text: bool = False
    how: str = ""

    def answer(self, word: str, value: Any, writing: Writing) -> str:
        """Return the sentence for a user who gave this word a value; None means that it had none."""
        if self.key is None and self.option is None:
            return f"{word}: {self.how}"
        name = self.key or self.option or ""
        if writing is Writing.AXIS:
            axis = name.rpartition(".")[2]
            name = f"{axis}, {AXIS_MEANINGS[axis].partition(':')[0]}"
        known, here = self._value(value)
        if not known and self.how:
            return f"{word} is {name}: {self.how}"
        if not known and name in AXIS_KEYS:
            name = f"{name}, {AXIS_KEYS[name]}"
        return f"{word} is {name}: write {self._written(here if known else None, writing)}"

    def _value(self, value: Any) -> tuple[bool, Any]:
        """Return whether the value can be translated, and what it is here."""
        text = str(value).lower()
        if text in self.values:
            return True, self.values[text]
        number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        stays = (number and not self.how) or (isinstance(value, str) and self.text)
        return stays, value

    def _written(self, value: Any, writing: Writing) -> str:
        """Return how to write the key or option with this value; None stands for one that the user has to choose."""
        choices = list(dict.fromkeys(self.values.values()))
        if value is None:
            shown = " or ".join(map(_plain, choices)) or ("TEXT" if self.text else "N")
        elif self.key is not None and writing is Writing.CONFIG:
            shown = json.dumps(value, ensure_ascii=False).replace("Infinity", "inf")
        else:
            shown = shlex.quote(_plain(value))
        if self.key is None:
            return f"{self.option} {shown}"
        section, _, name = self.key.partition(".")
        if writing is Writing.CONFIG:
            return f"{name} = {shown} in [{section}]"
        return f"{name}={shown}" if writing is Writing.AXIS else f"--set {self.key}={shown}"


def _plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def synonyms() -> dict[str, Synonym]:
    """Return the table, by word."""
    found: dict[str, Synonym] = {}
    for entry in tomllib.loads(TABLE.read_text(encoding="utf-8"))["synonym"]:
        synonym = Synonym(tuple(entry.pop("words")), **entry)
        for word in synonym.words:
            if word in found:
                raise ValueError(f"{TABLE.name} has {word} twice")
            found[word] = synonym
    return found


def find_synonym(word: str) -> Synonym | None:
    """Return what another framework's name means here: `tp`, `--max-steps` or `trainer.maxSteps`; None if unknown."""
    plain = CAMEL_CASE.sub("_", word.lstrip("-").replace("-", "_")).lower()
    return synonyms().get(plain) or synonyms().get(plain.rpartition(".")[2])


def explain_synonym(word: str, value: Any = None, writing: Writing = Writing.COMMAND) -> str:
    """Return `tp is grid.x: write --set grid.x=2`, or an empty text if the word is not in the table."""
    found = find_synonym(word)
    return "" if found is None else found.answer(word.lstrip("-"), value, writing)


def explain_axis(word: str, size: Any = None) -> str:
    """Return `tp is x, tensor parallelism: write x=2`, or why there is no such axis, or an empty text."""
    found = find_synonym(word)
    if found is None or (found.key or found.option or "grid").partition(".")[0] != "grid":
        return ""  # unknown, or the name of something else
    return found.answer(word, size, Writing.AXIS)

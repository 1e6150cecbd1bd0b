"""Parses JSON, TOML and the names of Python objects that somebody else may have written. Imports no torch.

Whatever is wrong with a text, one kind of error says so: `ValueError`. Python's own parsers also raise RecursionError
for brackets in brackets, which is no bug of the program, and which a reader of files would not expect.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from typing import Any

from fourfold.errors import nearest

MOST_TOML = 1 << 20
"""The most characters of a TOML text. The longest that we write are configs with the schedule of a pipeline."""
MAX_DEPTH = 100
"""The deepest nesting that is accepted. Real files have fewer than ten levels, and whoever walks or prints a table of
thousands of levels fails in turn."""


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON text; ValueError says what is wrong with it."""
    try:
        found = json.loads(_decoded(text), parse_int=_whole)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return _shallow(text, found)


def parse_toml(text: str | bytes) -> dict[str, Any]:
    """Return the table of a TOML text; ValueError says what is wrong with it."""
    if len(text) > MOST_TOML:  # Python's parser takes seconds for a key of a megabyte
        raise ValueError(f"it has {len(text):,} characters, more than the {MOST_TOML:,} of any config or machine file")
    try:
        found = tomllib.loads(_decoded(text))
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    return _shallow(text, found)


def import_object(text: str, form: str) -> Any:
    """Return the object of a name such as `package.module:function`; `form` is how errors write the name."""
    where, _, name = text.rpartition(":")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        raise ValueError(f"{text}: there is no module {error.name!r}; install it, or set PYTHONPATH=.") from error
    if not hasattr(module, name):
        raise ValueError(f"{text}: {where} has no {name!r}{nearest(name, dir(module))}; give {form}")
    return getattr(module, name)


def _whole(text: str) -> int:
    """Return a whole number of a JSON text, unless no 64 bits hold it: then no size or count can be meant."""
    value = int(text)
    if abs(value) >= 1 << 64:
        raise ValueError(f"it has a whole number of {len(text)} digits")
    return value


_TOO_DEEP = f"its values are nested more than {MAX_DEPTH} deep"


def _decoded(text: str | bytes) -> str:
    """Return the text without the mark that some editors put before it."""
    return (text.decode() if isinstance(text, bytes) else text).removeprefix("\ufeff")


def _shallow(text: str | bytes, found: Any) -> Any:
    """Return the content unless it is nested too deeply."""
    # Every level of JSON has a bracket and every level of TOML a bracket or a dot, so most texts need no walk.
    opened = ("[", "{", ".") if isinstance(text, str) else (b"[", b"{", b".")
    if sum(map(text.count, opened)) <= MAX_DEPTH:  # type: ignore[arg-type]
        return found
    level = [found]
    for _ in range(MAX_DEPTH + 1):
        level = [one for value in level for one in _inner(value)]
        if not level:
            return found
    raise ValueError(_TOO_DEEP)


def _inner(value: Any) -> list[Any]:
    """Return the tables and lists directly inside a value."""
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in held if isinstance(one, (dict, list))]

"""Conversion of nested tables to dataclasses and back. Every key and type is checked, and nothing is ignored.

An error names the key by its full path, the value, what is allowed, and the nearest spelling; or our key, if the name
is the one that another framework has for it.

The meaning of a key is the docstring under its field, and stands nowhere else: `keys_of` reads it from the source, for
the comments of `fourfold train --print-config` and for docs/config.md.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from math import isnan
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fourfold.errors import nearest
from fourfold.synonyms import Writing, explain_synonym

T = TypeVar("T")

MEANING, OWNER = "meaning", "owner"
"""Keys of a dataclass field's metadata: its meaning as a text, or the class in which the field has its docstring."""
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
"""The plain types of values, as errors and comments name them."""
LARGEST = (1 << 63) - 1
"""The largest whole number of a config, which is that of torch."""
COMMENT_WIDTH = 100
"""Columns of a comment in a TOML text; longer lines are hard to read."""


def parse(kind: type[T], table: Any, path: str = "") -> T:
    """Return an instance of the dataclass from a table; missing keys get their defaults."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{path or 'the config'} is {_shown(table)}; it must be a table")
    hints = get_type_hints(kind)  # the fields themselves have their types as text
    keys = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [key.name for key in keys]
    unknown = {_join(path, key): value for key, value in table.items() if key not in names}
    if answers := [answer for key, value in unknown.items() for answer in _from_elsewhere(key, value)]:
        raise ValueError("; ".join(answers))
    for key in unknown:
        known = f"{path or 'it'} has {', '.join(names)}"
        raise ValueError(f"unknown key {key}{nearest(key.rpartition('.')[2], names)}; {known}")
    needed = [key.name for key in keys if key.default is key.default_factory is dataclasses.MISSING]
    for name in needed:
        if name not in table:
            raise ValueError(f"{_join(path, name)} is missing; {path or 'it'} needs {', '.join(needed)}")
    values = {key: _value(hints[key], value, _join(path, key)) for key, value in table.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(_join(path, str(error))) from error  # the error begins with the name of the key


def _from_elsewhere(path: str, value: Any) -> list[str]:
    """Return what an unknown key, or each key of an unknown section, is called here, if another framework has it."""
    if isinstance(value, Mapping):
        return [answer for key, below in value.items() for answer in _from_elsewhere(_join(path, key), below)]
    answer = explain_synonym(path, value, Writing.CONFIG)
    return [answer] if answer else []


def _value(kind: Any, value: Any, path: str) -> Any:
    """Return the value as this type, or raise an error that says what is allowed."""
    if dataclasses.is_dataclass(kind):
        return parse(kind, value, path)  # type: ignore[arg-type]
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in get_args(kind):
            return None
        return _one_of([option for option in get_args(kind) if option is not NoneType], value, path)
    if origin is Literal:
        allowed = get_args(kind)
        # the second test, because to Python True equals 1
        if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
            choices = ", ".join(_shown(choice) for choice in allowed)
            near = nearest(str(value), [str(choice) for choice in allowed])
            raise ValueError(f"{path} = {_shown(value)}{near}; it is one of {choices}")
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ValueError(f"{path} = {_shown(value)}; it must be a table")
        return dict(value)  # of anything: whoever takes the table knows its keys
    if origin is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{path} = {_shown(value)}; it must be a list")
        return tuple(_value(get_args(kind)[0], item, f"{path}[{index}]") for index, item in enumerate(value))
    return _plain(kind, value, path)


def _one_of(kinds: list[Any], value: Any, path: str) -> Any:
    errors = []
    for kind in kinds:
        try:
            return _value(kind, value, path)
        except ValueError as error:
            errors.append(str(error))
    raise ValueError(" or ".join(errors))


def _plain(kind: type, value: Any, path: str) -> Any:
    if kind is float and type(value) is int:
        value = _plain(int, value, path) * 1.0  # 1 in TOML is a fine value for a number
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # True is an int too
        raise ValueError(f"{path} = {_shown(value)}; it must be {WORDS[kind]}")
    if isinstance(value, str) and not value.strip():  # as a path it would be the working directory
        raise ValueError(f"{path} is an empty text, perhaps a variable that is not set; give a value, or leave it out")
    if isinstance(value, float) and isnan(value):
        raise ValueError(f"{path} = nan; it must be a number")
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{path} = {_shown(value)}; whole numbers go up to {LARGEST}")
    return value


def to_table(config: Any) -> dict[str, Any]:
    """Return the dataclass as nested tables, with lists in place of tuples."""

    def table(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in items}

    return dataclasses.asdict(config, dict_factory=table)


def without_unset(value: Any) -> Any:
    """Return nested tables without the keys that have no value and without empty tables."""
    if isinstance(value, Mapping):
        inner = {key: without_unset(below) for key, below in value.items()}
        return {key: below for key, below in inner.items() if below is not None and below != {}}
    return [without_unset(item) for item in value] if isinstance(value, list) else value


def to_toml(table: Mapping[str, Any], comments: Mapping[str, str], path: str = "") -> str:
    """Return nested tables as TOML text. A key without a value becomes a comment, because TOML has no null.

    `comments` are texts to write above keys and tables, by their full path.
    """
    lines, below = [], []
    for key, value in table.items():
        full = _join(path, key)
        comment = "".join(f"{line}\n" for line in _comment_lines(comments.get(full, "")))
        if isinstance(value, Mapping):
            below.append(f"\n{comment}[{full}]\n{to_toml(value, comments, full)}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            first, *others = value
            below.append(f"\n{comment}[[{full}]]\n{to_toml(first, comments, full)}")
            below += [f"\n[[{full}]]\n{to_toml(item, {}, full)}" for item in others]  # explained above
        else:
            line = f"# {key} is not set\n" if value is None else f"{key} = {_shown(value)}\n"
            lines.append(f"\n{comment}{line}" if comment else line)
    return "".join(lines + below).lstrip("\n")


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(text, COMMENT_WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)


def _shown(value: Any) -> str:
    """Return the value in TOML's notation, which for plain values is JSON's, except for infinities."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    # TOML wants DEL escaped, which JSON leaves as it is
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


# --- what keys mean


@dataclasses.dataclass(frozen=True, slots=True)
class ConfigKey:
    """A key of a config, as a reader wants to know it."""

    path: str
    """Its full path, such as `batch.rows`."""
    meaning: str
    """The docstring of its field, in one line."""
    allowed: str
    """The values that it takes, in words: `a whole number`, `"auto", true or false`."""
    default: str
    """Its default in TOML's notation, or `not set`."""


def keys_of(kind: type, path: str = "") -> Iterator[ConfigKey]:
    """Yield every key of a config whose sections are the fields of this dataclass, in their order."""
    hints = get_type_hints(kind)
    for key in dataclasses.fields(kind):
        hint, full = hints[key.name], _join(path, key.name)
        if dataclasses.is_dataclass(hint):
            yield from keys_of(hint, full)  # type: ignore[arg-type]
            continue
        yield ConfigKey(full, _meaning(kind, key), _allowed(hint), _default(key))
        if get_origin(hint) is tuple and dataclasses.is_dataclass(inner := get_args(hint)[0]):
            yield from keys_of(inner, full)


def sections_of(kind: type) -> dict[str, str]:
    """Return the name of every section of a config, with the first paragraph of its docstring in one line."""
    return {
        name: " ".join((inspect.getdoc(hint) or "").partition("\n\n")[0].split())
        for name, hint in get_type_hints(kind).items()
    }


def comments_of(kind: type) -> dict[str, str]:
    """Return the comment that explains each section and key of a config, by its path."""
    keys = {key.path: f"{key.meaning} ({key.allowed}; default: {key.default})" for key in keys_of(kind)}
    return sections_of(kind) | keys


def _meaning(kind: type, key: dataclasses.Field[Any]) -> str:
    """Return the docstring of a field of this dataclass, or of the class that the field comes from."""
    if MEANING in key.metadata:
        return key.metadata[MEANING]
    owners = key.metadata[OWNER].__mro__ if OWNER in key.metadata else kind.__mro__
    return next((text for owner in owners if (text := _field_docstrings(owner).get(key.name))), "")


@cache
def _field_docstrings(owner: type) -> dict[str, str]:
    """Return the docstring under each field of a class, in one line; Python itself does not keep them."""
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):  # a class that is built in, or made by a function such as make_dataclass
        return {}
    (definition,) = ast.parse(textwrap.dedent(source)).body
    found = {}
    for statement, after in pairwise(getattr(definition, "body", ())):
        text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
        if isinstance(statement, ast.AnnAssign) and isinstance(text, str):
            found[ast.unparse(statement.target)] = " ".join(text.split())
    return found


def _allowed(hint: Any) -> str:
    """Return the values of a type in words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return ", ".join(_allowed(kind) for kind in inner if kind is not NoneType)
    if origin is Literal:
        return ", ".join(_shown(choice) for choice in inner)
    if origin is tuple:
        return "a list of tables" if dataclasses.is_dataclass(inner[0]) else f"a list of {_allowed(inner[0])}"
    return "a table" if origin is dict else WORDS[hint]


def _default(key: dataclasses.Field[Any]) -> str:
    if key.default_factory is not dataclasses.MISSING:
        return _shown(key.default_factory())
    if key.default is dataclasses.MISSING:
        return "none, it must be given"
    if isinstance(key.default, tuple):
        items = [to_table(item) if dataclasses.is_dataclass(item) else item for item in key.default]
        return _shown([_without_none(item) for item in items])
    return "not set" if key.default is None else _shown(key.default)


def _without_none(item: Any) -> Any:
    return {name: value for name, value in item.items() if value is not None} if isinstance(item, dict) else item


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key

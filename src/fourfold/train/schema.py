"""Conversion of nested tables to dataclasses and back. Every key and type is checked, and nothing is ignored.

An error names the key by its full path, the value, what is allowed, and the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fourfold.errors import nearest

T = TypeVar("T")


def parse(kind: type[T], table: Any, path: str = "") -> T:
    """Return an instance of the dataclass from a table; missing keys get their defaults."""
    if not isinstance(table, Mapping):
        raise ValueError(f"{path or 'the config'} is {_shown(table)}; it must be a table")
    hints = get_type_hints(kind)  # the fields themselves have their types as text
    keys = dataclasses.fields(kind)  # type: ignore[arg-type]
    names = [key.name for key in keys]
    for key in table:
        if key not in names:
            known = f"{path or 'it'} has {', '.join(names)}"
            raise ValueError(f"unknown key {_join(path, key)}{nearest(key, names)}; {known}")
    needed = [key.name for key in keys if key.default is key.default_factory is dataclasses.MISSING]
    for name in needed:
        if name not in table:
            raise ValueError(f"{_join(path, name)} is missing; {path or 'it'} needs {', '.join(needed)}")
    values = {key: _value(hints[key], value, _join(path, key)) for key, value in table.items()}
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(_join(path, str(error))) from error  # the error begins with the name of the key


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
        return float(value)  # 1 in TOML is a fine value for a number
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):  # True is an int too
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise ValueError(f"{path} = {_shown(value)}; it must be {words[kind]}")
    return value


def to_table(config: Any) -> dict[str, Any]:
    """Return the dataclass as nested tables, with lists in place of tuples."""

    def table(items: list[tuple[str, Any]]) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in items}

    return dataclasses.asdict(config, dict_factory=table)


def to_toml(table: Mapping[str, Any], path: str = "") -> str:
    """Return nested tables as TOML text. A key without a value becomes a comment, because TOML has no null."""
    lines, below = [], []
    for key, value in table.items():
        if isinstance(value, Mapping):
            below.append(f"\n[{_join(path, key)}]\n{to_toml(value, _join(path, key))}")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            below += [f"\n[[{_join(path, key)}]]\n{to_toml(item, _join(path, key))}" for item in value]
        else:
            lines.append(f"# {key} is not set\n" if value is None else f"{key} = {_shown(value)}\n")
    return "".join(lines + below).lstrip("\n")


def _shown(value: Any) -> str:
    """Return the value in TOML's notation, which for plain values is JSON's, except for infinities."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf" if value > 0 else "-inf"
    # TOML wants DEL escaped, which JSON leaves as it is
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key

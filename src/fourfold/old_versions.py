"""The one reader of old checkpoints and configs: it gives the keys of earlier versions the names they have today.

Nothing else in the package knows an old key. When you rename a key of a config, add a line to `CONFIG_KEYS`; when you
rename a key of the state of training, add one to `STATE_KEYS`. Both upgrades leave today's keys as they are, so they
can be applied to tables of any version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fourfold.axes import AXES

Renames = dict[str, dict[str, str]]
"""Names of keys by the table that holds them: `{"optimizer": {"old_name": "new_name"}}`."""

FIRST_AXES = ("x", "y", "z", "data")
"""The axes of version 1. Every order of ranks that any version has written names these."""
CONFIG_KEYS: Renames = {
    "optimizer": {"rate": "learning_rate"},
    "policy": {"reduce": "reduce_dtype"},
    "overlap": {"data": "reduce_early", "behind_products": "wgrad_behind_messages"},
}
"""Renamed keys of a config, by section."""
STATE_KEYS: Renames = {"schedule": {"rate": "learning_rate"}}
"""Renamed keys of the tables in a checkpoint's state, apart from its config: `schedule` and `data`."""


def upgrade_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of any version, as nested tables, with today's keys.

    Keys that are neither old nor known today stay, so that the parser of the config can refuse them.
    """
    upgraded = _renamed(config, CONFIG_KEYS)
    grid = upgraded.get("grid")
    if isinstance(grid, Mapping) and isinstance(grid.get("order"), Sequence) and not isinstance(grid["order"], str):
        upgraded["grid"] = {**grid, "order": complete_order(grid["order"])}
    return upgraded


def upgrade_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of training in a checkpoint of any version, its config included, with today's keys."""
    upgraded = _renamed(state, STATE_KEYS)
    if isinstance(upgraded.get("config"), Mapping):
        upgraded["config"] = upgrade_config(upgraded["config"])
    return upgraded


def complete_order(order: Sequence[Any]) -> list[Any]:
    """Return an order of ranks with the axes added that a version with fewer axes did not know.

    Such an axis has one rank, so its position changes no rank's coordinates. It is put where `AXES` has it, so that
    the usual order of an old version becomes today's usual order. An order that no version has written stays as it is,
    for `Shape` to refuse.
    """
    completed = list(order)
    if all(axis in completed for axis in FIRST_AXES):
        for index, axis in enumerate(AXES):
            if axis not in completed:
                completed.insert(completed.index(AXES[index - 1]) + 1 if index else 0, axis)
    return completed


def _renamed(tables: Mapping[str, Any], renames: Renames) -> dict[str, Any]:
    """Return the tables with old keys renamed, in the same order; whatever is not a table stays."""
    upgraded = dict(tables)
    for name, keys in renames.items():
        table = tables.get(name)
        if not isinstance(table, Mapping):
            continue
        for old, new in keys.items():
            if old in table and new in table:
                raise ValueError(f"{name}.{old} is the old name of {name}.{new}; give one of the two")
        upgraded[name] = {keys.get(key, key): value for key, value in table.items()}
    return upgraded

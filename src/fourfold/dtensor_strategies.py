"""How torch finds out what an operation on DTensors does to their layout, made fast on a grid's mesh.

For every operation, shape and layout torch builds all combinations of what each dim of the mesh could do: on a mesh of
four dims hundreds to thousands, of which it then takes one that moves nothing, if there is one. After
`speed_up_strategies` torch builds only those in which each dim of the mesh does what the operands' own layouts say, and
builds all of them only if none of these is possible. What torch chooses is the same; an optimizer's first step takes a
second instead of a minute.

Only meshes of a `Grid` are affected. Where torch has no such function, as in other releases, nothing changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor import Placement
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops import utils

NAME = "expand_to_full_mesh_op_strategy"
"""torch's function that builds the combinations: `(mesh, op_schema, strategies of one mesh dim, *, ...)`."""
GRID = "_fourfold_grid"
"""Attribute of a mesh that belongs to a grid."""


def speed_up_strategies() -> None:
    """From now on, in this process."""
    expand = getattr(utils, NAME, None)
    known = expand is not None and hasattr(OpSchema, "args_strategy") and hasattr(OpSchema, "kwargs_strategy")
    if known and not hasattr(expand, "__wrapped__"):
        setattr(utils, NAME, _first_what_moves_nothing(expand))


def _first_what_moves_nothing(expand: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(expand)
    def quick(mesh: Any, op_schema: OpSchema, strategies: Sequence[Sequence[Placement | None]], **options: Any) -> Any:
        operands = [*op_schema.args_strategy, *op_schema.kwargs_strategy]
        specs = [operand.strategies[0].output_spec for operand in operands]
        if not hasattr(mesh, GRID) or any(spec.mesh != mesh for spec in specs):
            return expand(mesh, op_schema, strategies, **options)
        first = options.get("input_index", 1)  # results come before operands
        by_dim = set(zip(*(spec.placements for spec in specs), strict=True))
        kept = [each for each in strategies if tuple(entry for entry in each[first:] if entry is not None) in by_dim]
        held = [spec.placements for spec in specs]
        if kept:
            found = expand(mesh, op_schema, kept, **options)
            if any([spec.placements for spec in each.input_specs] == held for each in found.strategies):
                return found
        return expand(mesh, op_schema, strategies, **options)

    return quick

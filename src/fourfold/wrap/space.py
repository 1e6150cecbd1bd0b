"""Rules for operations over space, on images whose channels are cut: they take every channel by itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from fourfold.nn.moment import drawing
from fourfold.wrap.placed import Blocks, Placed, placed_in
from fourfold.wrap.rules import every, key_of_parts, rule

POOLS = "max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool max_unpool"


def over_space(dims: int, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Right on parts where the cut dim stands before the last `dims`."""
    found = placed_in((args, kwargs))
    a = found[0]
    layout = a.placement
    if type(layout) is not Blocks or layout.dim >= len(a.shape) - dims:
        return NotImplemented
    if any(other.placement != layout or other.shape != a.shape for other in found):
        return NotImplemented
    leading, empty = a.local.shape[:-dims], a.local.numel() == 0

    def own(placed: Placed) -> Tensor:
        # torch lets a batch be empty, and nothing else
        return placed.local.reshape(0, 1, *placed.shape[-dims:]) if empty else placed.local

    def placed(local: Tensor) -> Placed:
        local = local.reshape(*leading, *local.shape[-dims:]) if empty else local
        shape = [*local.shape]
        shape[layout.dim] = a.shape[layout.dim]
        return Placed(local, layout, Size(shape))

    args, kwargs = tree_map_only(Placed, own, (args, kwargs))
    return tree_map_only(Tensor, placed, func(*args, **kwargs))


for _dims in (1, 2, 3):
    _names = [f"{name}{_dims}d{indices}" for name in POOLS.split() for indices in ("", "_with_indices")]
    rule(*every(*_names))(partial(over_space, _dims))


@rule(functional.interpolate)
def interpolate(func: Callable, args: tuple, kwargs: dict) -> Any:
    return over_space(placed_in((args, kwargs))[0].dim() - 2, func, args, kwargs)


@rule(functional.pad)
def pad(func: Callable, args: tuple, kwargs: dict) -> Any:
    widths = kwargs.get("pad", args[1] if len(args) > 1 else ())
    return over_space(len(widths) // 2, func, args, kwargs) if widths else NotImplemented


@rule(functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.feature_dropout)
def dropout_of_channels(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Whole channels of a row; masks are independent wherever the tensor is cut."""
    named = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    a, probability = named["input"], named.get("p", 0.5)
    if not named.get("training", named.get("train", True)) or probability == 0:
        return a
    if type(a.placement) is not Blocks or a.placement.dim > 1:
        return NotImplemented
    with drawing(key_of_parts(a), a.device):
        return a.like(func(a.local, probability, True, *([True] if named.get("inplace") else [])))

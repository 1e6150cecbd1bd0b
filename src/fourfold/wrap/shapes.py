"""Rules for operations that change the shape of a tensor and none of its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Size, Tensor
from torch.utils._pytree import tree_map_only

from fourfold.wrap.layouts import Fused
from fourfold.wrap.placed import Blocks, Placed, Rest
from fourfold.wrap.rules import every, operand, rule


def sizes_of(args: Sequence[Any]) -> list[int]:
    """view(2, 3), view((2, 3)) and view(size=...) alike."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, Size)) else list(args)


@rule(*every("view", "reshape", "view_as", "reshape_as", "_unsafe_view"))
def reshape(func: Callable, args: tuple, kwargs: dict) -> Any:
    a = operand(args, kwargs, 0, "input")
    if func.__name__ in ("view_as", "reshape_as"):
        wanted = list(operand(args, kwargs, 1, "other").shape)
        if not isinstance(a, Placed):  # its shape is all that is asked of the other
            return a.reshape(wanted)
    elif isinstance(operand(args, kwargs, 1, "dtype"), torch.dtype):
        return NotImplemented
    else:
        wanted = sizes_of(args[1:] or (kwargs.get("shape", kwargs.get("size")),))
    return reshaped(a, inferred(wanted, a.shape.numel()))


def inferred(sizes: list[int], numel: int) -> Size:
    """With -1 resolved."""
    if -1 in sizes:
        known = 1
        for size in sizes:
            known *= size if size != -1 else 1
        sizes = [numel // max(known, 1) if size == -1 else size for size in sizes]
    return Size(sizes)


def reshaped(a: Placed, shape: Size) -> Any:
    if shape == a.shape:
        return a
    if shape.numel() != a.shape.numel():
        return NotImplemented  # torch says so on the whole tensor
    if isinstance(a.placement, Rest):
        return Placed(a.local, a.placement, shape) if shape[-1:] == a.shape[-1:] else NotImplemented
    return a.placement.reshaped(a, shape) if isinstance(a.placement, Blocks) and a.shape.numel() else NotImplemented


@rule(*every("flatten", "unflatten", "squeeze", "unsqueeze"))
def by_shape(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What is a reshape; torch says of which shape."""
    a = operand(args, kwargs, 0, "input")
    args, kwargs = tree_map_only(Placed, lambda placed: torch.empty(placed.shape, device="meta"), (args, kwargs))
    return reshaped(a, func(*args, **kwargs).shape)


@rule(*every("transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "t"))
def permute(func: Callable, args: tuple, kwargs: dict) -> Any:
    a = operand(args, kwargs, 0, "input")

    def act(tensor: Tensor) -> Tensor:
        own, named = tree_map_only(Placed, lambda _: tensor, (args, kwargs))
        return func(*own, **named)

    return permuted(a, act)


@rule(Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
def transpose(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    return permuted(args[0], lambda tensor: func(tensor, *args[1:]))


def permuted(a: Placed, act: Callable[[Tensor], Tensor]) -> Any:
    if not isinstance(a.placement, Blocks):
        return NotImplemented
    # where each dim goes: on a tensor whose strides are the dims
    dims = act(torch.empty_strided([1] * len(a.shape), list(range(len(a.shape))), device="meta")).stride()
    shape = Size(a.shape[dim] for dim in dims)
    return Placed(act(a.local), a.placement.moved(dims.index(a.placement.dim)), shape)


@rule(*every("expand", "expand_as", "broadcast_to"))
def expand(func: Callable, args: tuple, kwargs: dict) -> Any:
    a = args[0]
    if func.__name__ == "expand_as":
        sizes = list(operand(args, kwargs, 1, "other").shape)
        if not isinstance(a, Placed):  # its shape is all that is asked of the other
            return a.expand(sizes)
    else:
        sizes = sizes_of(args[1:] or (kwargs.get("size"),))
    added = len(sizes) - len(a.shape)
    if not isinstance(a.placement, Blocks) or added < 0 or -1 in sizes[:added]:
        return NotImplemented
    sizes = [a.shape[at - added] if size == -1 else size for at, size in enumerate(sizes)]
    dim = a.placement.dim + added
    if sizes[dim] != a.shape[a.placement.dim]:
        return NotImplemented
    local = [a.local.shape[a.placement.dim] if at == dim else size for at, size in enumerate(sizes)]
    return Placed(a.local.expand(local), a.placement.moved(dim), Size(sizes))


@rule(Tensor.__getitem__)
def getitem(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    a, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if isinstance(a, Placed) and (sliced := _as_slice(index)) is not None:
        part = getitem(func, (a, sliced), {})
        if part is NotImplemented or not part.shape.numel():  # an entry that is not there: torch says so
            return NotImplemented
        return part.clone()  # a list takes a copy
    if not isinstance(a, Placed) or not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return NotImplemented
    named = sum(i is not None and i is not Ellipsis for i in index)
    if named > len(a.shape) or index.count(Ellipsis) > 1:
        return NotImplemented  # torch says so on the whole tensor
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *[slice(None)] * (len(a.shape) - named), *index[at + 1 :])
    else:
        index = (*index, *[slice(None)] * (len(a.shape) - named))
    sliced = [i for i in index if i is not None]
    if all(_is_full(i, size) for i, size in zip(sliced, a.shape, strict=True)) and None not in index:
        return a
    if isinstance(a.placement, Fused):
        return a.placement.sliced(a, index)
    if not isinstance(a.placement, Blocks) or not _is_full(sliced[a.placement.dim], a.shape[a.placement.dim]):
        return NotImplemented
    at = [place for place, i in enumerate(index) if i is not None][a.placement.dim]
    own = (*index[:at], slice(None), *index[at + 1 :])
    dim = sum(not isinstance(i, int) for i in index[:at])
    shape = torch.empty(a.shape, device="meta")[index].shape
    return Placed(a.local[own], a.placement.moved(dim), shape)


def _as_slice(index: tuple) -> tuple | None:
    """An index with one list of one number, and slices besides, by slices alone; None of any other."""
    lists = [i for i in index if isinstance(i, list)]
    if len(lists) != 1 or len(lists[0]) != 1 or type(at := lists[0][0]) is not int:
        return None
    if not all(i is None or i is Ellipsis or isinstance(i, (slice, list)) for i in index):
        return None
    return tuple(slice(at, at + 1 or None) if isinstance(i, list) else i for i in index)


def _is_full(index: Any, size: int) -> bool:
    return isinstance(index, slice) and index.indices(size) == (0, size, 1)

"""Rules for operations along dims: right on parts where the cut dim is none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Size, Tensor
from torch.utils._pytree import tree_map_only

from fourfold.wrap.layouts import Fused
from fourfold.wrap.placed import Blocks, Placed, placed_in
from fourfold.wrap.rules import every, on_parts, operand, rule


def dim_of(a: Placed, dim: int) -> int:
    return dim % len(a.shape)


def leaves_alone(a: Any, *dims: Any) -> bool:
    """Whether the cut dim is none of these."""
    if not isinstance(a, Placed) or not isinstance(a.placement, Blocks) or not all(type(dim) is int for dim in dims):
        return False
    return all(-len(a.shape) <= dim < len(a.shape) and dim_of(a, dim) != a.placement.dim for dim in dims)


SECTIONS = (
    *("split_size_or_sections", "split_size", "split_sizes"),
    *("chunks", "indices_or_sections", "indices", "sections"),
)
"""What functions that split call their second argument."""


@rule(*every("split", "chunk", "split_with_sizes", "tensor_split"))
def split(func: Callable, args: tuple, kwargs: dict) -> Any:
    a, dim = operand(args, kwargs, 0, "input", "tensor", "self"), operand(args, kwargs, 2, "dim", default=0)
    if isinstance(getattr(a, "placement", None), Fused):
        return a.placement.split(a, func, operand(args, kwargs, 1, *SECTIONS), dim)
    if not leaves_alone(a, dim):
        return NotImplemented
    return tuple(_resized(a, local, dim) for local in on_parts(func, args, kwargs))


def _resized(a: Placed, local: Tensor, *dims: int) -> Placed:
    """Like `a`, but for the lengths of dims that are not cut."""
    shape = list(a.shape)
    for dim in dims:
        shape[dim] = local.shape[dim]
    return Placed(local, a.placement, Size(shape))


@rule(*every("unbind"))
def unbind(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    a, dim = operand(args, kwargs, 0, "input"), operand(args, kwargs, 1, "dim", default=0)
    if not leaves_alone(a, dim):
        return NotImplemented
    return tuple(a[(*[slice(None)] * dim_of(a, dim), index)] for index in range(a.shape[dim]))


@rule(*every("softmax", "log_softmax"))
def softmax(func: Callable, args: tuple, kwargs: dict) -> Any:
    a = operand(args, kwargs, 0, "input")
    if not leaves_alone(a, operand(args, kwargs, 1, "dim")):
        return NotImplemented
    return a.like(on_parts(func, args, kwargs))


@rule(*every("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "argmax", "argmin", "cumsum"))
def reduce(func: Callable, args: tuple, kwargs: dict) -> Any:
    a, dims = operand(args, kwargs, 0, "input"), operand(args, kwargs, 1, "dim", "axis")
    dims = [dims] if type(dims) is int else dims
    # no dims are all of them
    if not isinstance(dims, (list, tuple)) or not dims or not leaves_alone(a, *dims) or "out" in kwargs:
        return NotImplemented
    local = on_parts(func, args, kwargs)
    args, kwargs = tree_map_only(Placed, lambda placed: torch.empty(placed.shape, device="meta"), (args, kwargs))
    shape = func(*args, **kwargs).shape
    gone = sum(dim_of(a, dim) < a.placement.dim for dim in dims) if len(shape) < len(a.shape) else 0
    return Placed(local, a.placement.moved(a.placement.dim - gone), shape)


@rule(*every("cat", "concat", "concatenate"))
def cat(func: Callable, args: tuple, kwargs: dict) -> Any:
    tensors, dim = operand(args, kwargs, 0, "tensors"), operand(args, kwargs, 1, "dim", "axis", default=0)
    tensors = [tensor for tensor in tensors if tensor.shape != (0,)]  # torch leaves these out as well
    leader = placed_in(tensors)[0]
    layout = leader.placement
    if not isinstance(layout, Blocks) or not leaves_alone(leader, dim) or "out" in kwargs:
        return NotImplemented
    dim, length = dim_of(leader, dim), leader.shape[layout.dim]
    if any(tensor.dim() != leader.dim() or tensor.shape[layout.dim] != length for tensor in tensors):
        return NotImplemented
    own = [
        tensor.local
        if isinstance(tensor, Placed) and tensor.placement == layout
        else layout.part(tensor.whole() if isinstance(tensor, Placed) else tensor, tensor.shape)
        for tensor in tensors
    ]
    return _resized(leader, func(own, dim), dim)


@rule(*every("index_select"))
def index_select(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Entries chosen by a plain index."""
    a, dim = operand(args, kwargs, 0, "input"), operand(args, kwargs, 1, "dim")
    if not leaves_alone(a, dim) or isinstance(operand(args, kwargs, 2, "index"), Placed) or "out" in kwargs:
        return NotImplemented
    return _resized(a, on_parts(func, args, kwargs), dim_of(a, dim))


@rule(*every("flip", "roll"))
def turn(func: Callable, args: tuple, kwargs: dict) -> Any:
    a, dims = operand(args, kwargs, 0, "input"), operand(args, kwargs, 1 if func.__name__ == "flip" else 2, "dims")
    dims = [dims] if type(dims) is int else dims
    if not isinstance(dims, (list, tuple)) or not dims or not leaves_alone(a, *dims):
        return NotImplemented
    return a.like(on_parts(func, args, kwargs))


@rule(*every("repeat_interleave"))
def repeat_interleave(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Every entry a number of times, along the cut dim too."""
    a, repeats = operand(args, kwargs, 0, "input"), operand(args, kwargs, 1, "repeats")
    dim = operand(args, kwargs, 2, "dim")
    if not isinstance(a, Placed) or type(repeats) is not int or type(dim) is not int:
        return NotImplemented
    if not isinstance(a.placement, Blocks):
        return NotImplemented
    dim = dim_of(a, dim)
    shape = Size(size * repeats if at == dim else size for at, size in enumerate(a.shape))
    if dim != a.placement.dim:
        return Placed(a.local.repeat_interleave(repeats, dim), a.placement, shape)
    widened = a[(*[slice(None)] * (dim + 1), None)]
    return widened.expand(*a.shape[: dim + 1], repeats, *a.shape[dim + 1 :]).reshape(shape)


@rule(*every("matmul", "bmm", "__matmul__"))
def matmul(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Products of which a dim before the last two is cut."""
    a, b = operand(args, kwargs, 0, "input"), operand(args, kwargs, 1, "other", "mat2")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or kwargs.keys() - {"input", "other", "mat2"}:
        return NotImplemented
    leader = max(placed_in((a, b)), key=lambda placed: len(placed.shape))
    ndim = max(a.dim(), b.dim())
    layout = leader.placement
    if not isinstance(layout, Blocks) or min(a.dim(), b.dim()) < 2 or len(leader.shape) != ndim:
        return NotImplemented
    if layout.dim >= ndim - 2 or a.shape[-1] != b.shape[-2]:
        return NotImplemented
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if batch[layout.dim] != leader.shape[layout.dim]:
        return NotImplemented

    def own(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placed):
            alike = tensor.placement == layout and tensor.dim() == ndim
            if alike and tensor.shape[layout.dim] == leader.shape[layout.dim]:
                return tensor.local
            tensor = tensor.whole()
        return layout.part(tensor, Size((*batch, *tensor.shape[-2:])))

    return Placed(func(own(a), own(b)), layout, Size((*batch, a.shape[-2], b.shape[-1])))

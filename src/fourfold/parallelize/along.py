"""Rules for operations along dims: right on parts where the cut dim is none of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Size, Tensor

from fourfold.parallelize.layouts import Fused
from fourfold.parallelize.placed import Blocks, Placed, placed_in
from fourfold.parallelize.rules import every, rule


def dim_of(a: Placed, dim: int) -> int:
    return dim % len(a.shape)


def leaves_alone(a: Any, *dims: Any) -> bool:
    """Whether the cut dim is none of these."""
    if not isinstance(a, Placed) or not isinstance(a.placement, Blocks) or not all(type(dim) is int for dim in dims):
        return False
    return all(dim_of(a, dim) != a.placement.dim for dim in dims)


@rule(*every("split", "chunk", "split_with_sizes", "tensor_split"))
def split(func: Callable, args: tuple, kwargs: dict) -> Any:
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    a, sections = (*args, *(value for name, value in kwargs.items() if name != "dim"))[:2]
    if isinstance(getattr(a, "placement", None), Fused):
        return a.placement.split(a, func, sections, dim)
    if not leaves_alone(a, dim):
        return NotImplemented
    locals_ = func(a.local, sections, dim_of(a, dim))
    return type(locals_)(_resized(a, local, dim) for local in locals_)


def _resized(a: Placed, local: Tensor, *dims: int) -> Placed:
    """Like `a`, but for the lengths of dims that are not cut."""
    shape = list(a.shape)
    for dim in dims:
        shape[dim] = local.shape[dim]
    return Placed(local, a.placement, Size(shape))


@rule(*every("unbind"))
def unbind(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    a, dim = (*args, *kwargs.values(), 0)[:2]
    if not leaves_alone(a, dim):
        return NotImplemented
    return tuple(a[(*[slice(None)] * dim_of(a, dim), index)] for index in range(a.shape[dim]))


@rule(*every("softmax", "log_softmax"))
def softmax(func: Callable, args: tuple, kwargs: dict) -> Any:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    if not leaves_alone(args[0], dim):
        return NotImplemented
    return args[0].like(func(args[0].local, *args[1:], **kwargs))


@rule(*every("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "argmax", "argmin", "cumsum", "norm"))
def reduce(func: Callable, args: tuple, kwargs: dict) -> Any:
    a = args[0]
    dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dims = [dims] if type(dims) is int else dims
    if func.__name__ == "norm" or not isinstance(dims, (list, tuple)) or not leaves_alone(a, *dims):
        return NotImplemented
    local = func(a.local, *args[1:], **kwargs)
    shape = func(torch.empty(a.shape, device="meta"), *args[1:], **kwargs).shape
    gone = sum(dim_of(a, dim) < a.placement.dim for dim in dims) if len(shape) < len(a.shape) else 0
    return Placed(local, a.placement.moved(a.placement.dim - gone), shape)


@rule(*every("cat", "concat", "concatenate"))
def cat(func: Callable, args: tuple, kwargs: dict) -> Any:
    tensors, dim = (*args, *kwargs.values(), 0)[:2]
    tensors = [tensor for tensor in tensors if tensor.shape != (0,)]  # torch leaves these out as well
    leader = placed_in(tensors)[0]
    layout = leader.placement
    if not isinstance(layout, Blocks) or not leaves_alone(leader, dim):
        return NotImplemented
    dim, length = dim_of(leader, dim), leader.shape[layout.dim]
    if any(tensor.dim() != leader.dim() for tensor in tensors):
        return NotImplemented
    if any(tensor.shape[layout.dim] != length for tensor in tensors):
        return NotImplemented
    own = [
        tensor.local
        if isinstance(tensor, Placed) and tensor.placement == layout
        else layout.part(tensor.whole() if isinstance(tensor, Placed) else tensor, tensor.shape)
        for tensor in tensors
    ]
    return _resized(leader, func(own, dim), dim)


@rule(*every("index_select", "gather", "roll", "flip", "repeat_interleave"))
def along(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Rows chosen along a dim that is not cut, by a plain index."""
    named = {**dict(zip(("a", "dim", "index"), args, strict=False)), **kwargs}
    a, dim = args[0], named.get("dim")
    if func.__name__ == "repeat_interleave":
        return _repeated(a, named.get("repeats", args[1] if len(args) > 1 else None), named.get("dim"), args)
    if func.__name__ != "index_select" or not leaves_alone(a, dim) or isinstance(named.get("index"), Placed):
        return NotImplemented
    return _resized(a, func(a.local, *args[1:], **kwargs), dim_of(a, dim))  # type: ignore[arg-type]


def _repeated(a: Placed, repeats: Any, dim: Any, args: tuple) -> Any:
    dim = args[2] if len(args) > 2 else dim
    if type(repeats) is not int or type(dim) is not int or not isinstance(a.placement, Blocks):
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
    a, b = (*args, *kwargs.values())[:2]
    leader = max(placed_in((a, b)), key=lambda placed: len(placed.shape))
    ndim = max(a.dim(), b.dim())
    layout = leader.placement
    if not isinstance(layout, Blocks) or min(a.dim(), b.dim()) < 2 or len(leader.shape) != ndim:
        return NotImplemented
    if layout.dim >= ndim - 2:
        return NotImplemented
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if batch[layout.dim] != leader.shape[layout.dim]:
        return NotImplemented

    def own(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placed):
            if tensor.placement == layout and tensor.shape[layout.dim] == leader.shape[layout.dim]:
                return tensor.local
            tensor = tensor.whole()
        return layout.part(tensor, Size((*batch, *tensor.shape[-2:])))

    return Placed(func(own(a), own(b)), layout, Size((*batch, a.shape[-2], b.shape[-1])))

"""Rules for operations on dims: reshapes, slices, reductions and concatenations, and operations over space.

These operations run on local parts where the cut dim is not one that the operation works on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from fourfold.layout import FEATURES
from fourfold.nn.rng import seeded
from fourfold.operators import Conjugate
from fourfold.wrap.grid_tensor import CutTensor, GridTensor, grid_tensors_in
from fourfold.wrap.ops import argument, functions_named, part_of, rule, run_on_local, seed_of_part
from fourfold.wrap.placements import ChunkPlacement, FusedPlacement, RestPlacement


def with_cut(a: GridTensor, local: Tensor, dim: int | None = None) -> GridTensor:
    """Return a local tensor as a grid tensor that has the cut of `a` at this dim, or at the same dim.

    All other sizes are those of the local tensor.
    """
    placement: ChunkPlacement = a.placement  # type: ignore[assignment]
    dim = placement.dim if dim is None else dim
    shape = [*local.shape]
    shape[dim] = a.shape[placement.dim]
    return GridTensor(local, placement.moved(dim), Size(shape))


# reshapes


def sizes_of(args: Sequence[Any]) -> list[int]:
    """Return the sizes, for view(2, 3), view((2, 3)) and view(size=...)."""
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list, Size)) else list(args)


@rule(*functions_named("view", "reshape", "view_as", "reshape_as", "_unsafe_view"))
def reshape(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Reshape the local part; a view to another dtype runs on the whole tensor."""
    a = argument(args, kwargs, 0, "input")
    if func.__name__ in ("view_as", "reshape_as"):
        sizes = list(argument(args, kwargs, 1, "other").shape)
        if not isinstance(a, GridTensor):  # a plain tensor in the shape of a grid tensor
            return a.reshape(sizes)
    elif isinstance(argument(args, kwargs, 1, "dtype"), torch.dtype):
        return NotImplemented
    else:
        sizes = sizes_of(args[1:] or (kwargs.get("shape", kwargs.get("size")),))
    if -1 in sizes:
        known = prod(size for size in sizes if size != -1)
        sizes = [a.shape.numel() // max(known, 1) if size == -1 else size for size in sizes]
    return _reshaped(a, Size(sizes))


def _reshaped(a: GridTensor, shape: Size) -> Any:
    if shape == a.shape:
        return a
    if shape.numel() != a.shape.numel():
        return NotImplemented  # torch raises its own error on the whole tensor
    if isinstance(a.placement, RestPlacement):
        return GridTensor(a.local, a.placement, shape) if shape[-1:] == a.shape[-1:] else NotImplemented
    chunks = isinstance(a.placement, ChunkPlacement) and a.shape.numel()
    return a.placement.reshaped(a, shape) if chunks else NotImplemented  # type: ignore[attr-defined]


@rule(*functions_named("flatten", "unflatten", "squeeze", "unsqueeze"))
def reshape_by_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Reshape to the shape that torch finds for a meta tensor."""
    return _reshaped(argument(args, kwargs, 0, "input"), shape_from_meta(func, args, kwargs))


def shape_from_meta(func: Callable, args: tuple, kwargs: dict) -> Size:
    """Return the shape that torch finds for meta tensors in place of cut ones."""
    args, kwargs = tree_map_only(CutTensor, lambda tensor: torch.empty(tensor.shape, device="meta"), (args, kwargs))
    return func(*args, **kwargs).shape


@rule(*functions_named("transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "t"))
def permute(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Permute dims; the cut moves with its dim."""

    def act(tensor: Tensor) -> Tensor:
        own, named = tree_map_only(GridTensor, lambda _: tensor, (args, kwargs))
        return func(*own, **named)

    return _permuted(argument(args, kwargs, 0, "input"), act)


@rule(Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
def transpose(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Transpose by `.T` or `.mT`."""
    return _permuted(args[0], lambda tensor: func(tensor, *args[1:]))


def _permuted(a: GridTensor, act: Callable[[Tensor], Tensor]) -> Any:
    if not isinstance(a.placement, ChunkPlacement):
        return NotImplemented
    # the strides of this meta tensor are its dim numbers, so they show where each dim goes
    dims = act(torch.empty_strided([1] * len(a.shape), list(range(len(a.shape))), device="meta")).stride()
    return with_cut(a, act(a.local), dims.index(a.placement.dim))


@rule(*functions_named("expand", "expand_as", "broadcast_to"))
def expand(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Expand dims that are not cut."""
    a = args[0]
    if func.__name__ == "expand_as":
        sizes = list(argument(args, kwargs, 1, "other").shape)
        if not isinstance(a, GridTensor):  # a plain tensor expanded to the shape of a grid tensor
            return a.expand(sizes)
    else:
        sizes = sizes_of(args[1:] or (kwargs.get("size"),))
    added = len(sizes) - len(a.shape)
    if not isinstance(a.placement, ChunkPlacement) or added < 0 or -1 in sizes[:added]:
        return NotImplemented
    sizes = [a.shape[at - added] if size == -1 else size for at, size in enumerate(sizes)]
    dim = a.placement.dim + added
    if sizes[dim] != a.shape[a.placement.dim]:
        return NotImplemented
    local = [a.local.shape[a.placement.dim] if at == dim else size for at, size in enumerate(sizes)]
    return with_cut(a, a.local.expand(local), dim)


@rule(Tensor.__getitem__)
def getitem(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Index dims that are not cut with numbers, slices, None and Ellipsis."""
    a, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if isinstance(a, GridTensor) and (sliced := as_slice(index)) is not None:
        part = getitem(func, (a, sliced), {})
        if part is NotImplemented or not part.shape.numel():  # out of range: torch raises its own error
            return NotImplemented
        return part.clone()  # indexing with a list copies
    if not isinstance(a, GridTensor) or not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in index):
        return NotImplemented
    named = sum(i is not None and i is not Ellipsis for i in index)
    if named > len(a.shape) or index.count(Ellipsis) > 1:
        return NotImplemented  # torch raises its own error on the whole tensor
    full = [slice(None)] * (len(a.shape) - named)
    if Ellipsis in index:
        at = index.index(Ellipsis)
        index = (*index[:at], *full, *index[at + 1 :])
    else:
        index = (*index, *full)
    sliced = [i for i in index if i is not None]
    if all(_is_full(i, size) for i, size in zip(sliced, a.shape, strict=True)) and None not in index:
        return a
    if isinstance(a.placement, FusedPlacement):
        return a.placement.sliced(a, index)
    if not isinstance(a.placement, ChunkPlacement) or not _is_full(sliced[a.placement.dim], a.shape[a.placement.dim]):
        return NotImplemented
    at = [position for position, i in enumerate(index) if i is not None][a.placement.dim]
    own = (*index[:at], slice(None), *index[at + 1 :])
    return with_cut(a, a.local[own], sum(not isinstance(i, int) for i in index[:at]))  # a number removes its dim


def as_slice(index: tuple) -> tuple | None:
    """Return an index with one list of one number, and otherwise slices, as slices alone; None for any other index."""
    lists = [i for i in index if isinstance(i, list)]
    if len(lists) != 1 or len(lists[0]) != 1 or type(at := lists[0][0]) is not int:
        return None
    if not all(i is None or i is Ellipsis or isinstance(i, (slice, list)) for i in index):
        return None
    return tuple(slice(at, at + 1 or None) if isinstance(i, list) else i for i in index)


def _is_full(index: Any, size: int) -> bool:
    return isinstance(index, slice) and index.indices(size) == (0, size, 1)


# operations along dims


def _keeps_cut(a: Any, *dims: Any) -> bool:
    """Return whether the cut dim is none of these, and each of them is a dim of the tensor."""
    if not isinstance(a, GridTensor) or not isinstance(a.placement, ChunkPlacement):
        return False
    ndim = len(a.shape)
    return all(type(dim) is int and -ndim <= dim < ndim and dim % ndim != a.placement.dim for dim in dims)


SECTIONS = (
    *("split_size_or_sections", "split_size", "split_sizes"),
    *("chunks", "indices_or_sections", "indices", "sections"),
)
"""The names that torch's splitting functions have for their second argument."""


@rule(*functions_named("split", "chunk", "split_with_sizes", "tensor_split"))
def split(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Split a dim that is not cut, or fused outputs into the layers' own."""
    a, dim = argument(args, kwargs, 0, "input", "tensor", "self"), argument(args, kwargs, 2, "dim", default=0)
    if isinstance(getattr(a, "placement", None), FusedPlacement):
        return a.placement.split(a, func, argument(args, kwargs, 1, *SECTIONS), dim)
    if not _keeps_cut(a, dim):
        return NotImplemented
    return tuple(with_cut(a, local) for local in run_on_local(func, args, kwargs))


@rule(*functions_named("unbind"))
def unbind(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Return the entries of a dim that is not cut."""
    a, dim = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "dim", default=0)
    if not _keeps_cut(a, dim):
        return NotImplemented
    return tuple(a[(*[slice(None)] * (dim % len(a.shape)), index)] for index in range(a.shape[dim]))


REDUCTIONS = ("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "argmax", "argmin")
SAME_SHAPE = ("softmax", "log_softmax", "cumsum", "flip", "roll")
"""Operations along dims with a result of the same shape."""


@rule(*functions_named(*REDUCTIONS, *SAME_SHAPE))
def along_dims(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Reduce, normalise or turn dims that are not cut."""
    a = argument(args, kwargs, 0, "input")
    dims = argument(args, kwargs, 2 if func.__name__ == "roll" else 1, "dim", "axis", "dims")
    if func.__name__ == "flip" and len(args) > 2:
        dims = args[1:]  # `flip` takes its dims one by one too
    dims = [dims] if type(dims) is int else dims
    # an empty list of dims means all dims
    if not isinstance(dims, (list, tuple)) or not dims or not _keeps_cut(a, *dims) or "out" in kwargs:
        return NotImplemented
    local = run_on_local(func, args, kwargs)
    gone = [dim % len(a.shape) for dim in dims] if local.dim() < len(a.shape) else []  # empty with keepdim=True
    return with_cut(a, local, a.placement.dim - sum(dim < a.placement.dim for dim in gone))


@rule(*functions_named("cat", "concat", "concatenate"))
def cat(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Concatenate along a dim that is not cut."""
    tensors, dim = argument(args, kwargs, 0, "tensors"), argument(args, kwargs, 1, "dim", "axis", default=0)
    tensors = [tensor for tensor in tensors if tensor.shape != (0,)]  # torch leaves these out as well
    leader = grid_tensors_in(tensors)[0]
    placement = leader.placement
    if not isinstance(placement, ChunkPlacement) or not _keeps_cut(leader, dim) or "out" in kwargs:
        return NotImplemented
    length = leader.shape[placement.dim]
    if any(tensor.dim() != leader.dim() or tensor.shape[placement.dim] != length for tensor in tensors):
        return NotImplemented
    return with_cut(leader, func([part_of(tensor, placement, tensor.shape) for tensor in tensors], dim))


@rule(*functions_named("index_select"))
def index_select(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Select entries of a dim that is not cut, by a plain index."""
    a, dim = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "dim")
    if not _keeps_cut(a, dim) or isinstance(argument(args, kwargs, 2, "index"), GridTensor) or "out" in kwargs:
        return NotImplemented
    return with_cut(a, run_on_local(func, args, kwargs))


@rule(*functions_named("repeat_interleave"))
def repeat_interleave(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Repeat every entry of a dim, which may be the cut one."""
    a, repeats = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "repeats")
    dim = argument(args, kwargs, 2, "dim")
    if not _keeps_cut(a) or type(repeats) is not int or dim not in range(-a.dim(), a.dim()):
        return NotImplemented
    if _keeps_cut(a, dim):
        return with_cut(a, a.local.repeat_interleave(repeats, dim))
    dim %= len(a.shape)
    widened = a[(*[slice(None)] * (dim + 1), None)].expand(*a.shape[: dim + 1], repeats, *a.shape[dim + 1 :])
    return widened.flatten(dim, dim + 1)


@rule(functional.layer_norm, getattr(functional, "rms_norm", None))
def norm(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Normalise over the last dim, which may be cut: its sums travel, one number per token."""
    a, sizes = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "normalized_shape")
    weight, is_layer = argument(args, kwargs, 2, "weight"), func is functional.layer_norm
    bias = argument(args, kwargs, 3, "bias") if is_layer else None
    eps = argument(args, kwargs, 4, "eps", default=1e-5) if is_layer else argument(args, kwargs, 3, "eps")
    if not isinstance(a, GridTensor) or type(a.placement) not in (RestPlacement, ChunkPlacement):
        return NotImplemented
    if tuple(sizes) != tuple(a.shape[-1:]) or eps == 0:  # then a token of padding is no number
        return NotImplemented
    wide = a.local.to(torch.promote_types(a.dtype, torch.float32))
    if is_layer:
        wide = wide - _sum_features(wide, a) / a.shape[-1]
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    unit = wide * torch.rsqrt(_sum_features(wide.square(), a) / a.shape[-1] + eps)
    found = a.like(unit if weight is None else unit.to(torch.promote_types(unit.dtype, weight.dtype)))
    found = found if weight is None else found * weight
    return (found if bias is None else found + bias).to(a.dtype)


def _sum_features(local: Tensor, a: GridTensor) -> Tensor:
    """Return the sums over the last dim of a tensor that lies as `a`, where every rank goes on with them."""
    placement: Any = a.placement
    last = FEATURES if isinstance(placement, RestPlacement) else a.dim() - 1

    def over_ranks(sums: Tensor) -> Tensor:
        return placement.sum(sums, placement.layout.over(last))

    return Conjugate.apply(local.sum(-1, keepdim=True), over_ranks, over_ranks)


# operations over space, on images with channels that are cut: they treat every channel by itself


def over_space(dims: int, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run an operation on the last `dims` dims where the cut dim stands before them."""
    found = grid_tensors_in((args, kwargs))
    a = found[0]
    placement = a.placement
    if type(placement) is not ChunkPlacement or placement.dim >= len(a.shape) - dims:
        return NotImplemented
    if any(other.placement != placement or other.shape != a.shape for other in found):
        return NotImplemented
    leading, empty = a.local.shape[:-dims], a.local.numel() == 0

    def own(tensor: GridTensor) -> Tensor:
        # a rank may hold no channels; torch's kernels accept an empty batch but no empty channels
        return tensor.local.reshape(0, 1, *tensor.shape[-dims:]) if empty else tensor.local

    def on_grid(local: Tensor) -> GridTensor:
        return with_cut(a, local.reshape(*leading, *local.shape[-dims:]) if empty else local)

    args, kwargs = tree_map_only(GridTensor, own, (args, kwargs))
    return tree_map_only(Tensor, on_grid, func(*args, **kwargs))


POOLS = "max_pool avg_pool adaptive_avg_pool adaptive_max_pool lp_pool max_unpool"

for _dims in (1, 2, 3):
    _names = [f"{name}{_dims}d{indices}" for name in POOLS.split() for indices in ("", "_with_indices")]
    rule(*functions_named(*_names))(partial(over_space, _dims))


@rule(functional.interpolate)
def interpolate(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Resize images."""
    return over_space(grid_tensors_in((args, kwargs))[0].dim() - 2, func, args, kwargs)


@rule(functional.pad)
def pad(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Pad the last dims."""
    widths = kwargs.get("pad", args[1] if len(args) > 1 else ())
    return over_space(len(widths) // 2, func, args, kwargs) if widths else NotImplemented


@rule(functional.dropout1d, functional.dropout2d, functional.dropout3d, torch.feature_dropout)
def dropout_of_channels(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Drop whole channels of a row, with masks that are independent on ranks that hold different parts."""
    named = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    a, probability = named["input"], named.get("p", 0.5)
    if not named.get("training", named.get("train", True)) or probability == 0:
        return a
    if type(a.placement) is not ChunkPlacement or a.placement.dim > 1:
        return NotImplemented
    with seeded(seed_of_part(a), a.device):
        return a.like(func(a.local, probability, True, *([True] if named.get("inplace") else [])))

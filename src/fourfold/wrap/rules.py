"""Operations that run on parts: pointwise ones, casts, and what is drawn.

A rule gets the torch function with its arguments and returns a result, or NotImplemented: then the operation runs on
whole tensors. Rules decide by layouts and shapes, never by values, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold.nn.initial import key_of
from fourfold.nn.moment import drawing
from fourfold.wrap.layouts import Fused, Shared, fused
from fourfold.wrap.placed import RULES, Parted, Placed, changes_in_place, placed_in


def rule(*functions: Callable | None) -> Callable[[Callable], Callable]:
    """Register for these torch functions; None stands for one that this version of torch does not have."""

    def register(body: Callable) -> Callable:
        RULES.update({function: body for function in functions if function is not None})
        return body

    return register


def every(*names: str) -> list[Callable]:
    """These functions wherever torch has them: as methods, in torch, in torch.nn.functional."""
    return [
        found
        for name in names
        for place in ((Tensor,) if name.startswith("__") else (Tensor, torch, functional, torch.special))
        if callable(found := getattr(place, name, None))
    ]


def operand(args: tuple, kwargs: dict, at: int, *names: str, default: Any = None) -> Any:
    """An argument by its place or by any of its names."""
    if at < len(args):
        return args[at]
    return next((kwargs[name] for name in names if name in kwargs), default)


def on_parts(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The operation on what this rank holds."""
    args, kwargs = tree_map_only(Placed, lambda placed: placed.local, (args, kwargs))
    return func(*args, **kwargs)


POINTWISE = """
add sub subtract rsub mul multiply div divide true_divide floor_divide remainder pow square neg negative abs
exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal sign sin cos tanh sigmoid erf relu relu6 gelu silu elu
celu selu leaky_relu softplus softsign mish hardtanh hardswish hardsigmoid logsigmoid threshold clamp clip
clamp_min clamp_max maximum minimum where lerp addcmul addcdiv masked_fill nan_to_num round floor ceil
isnan isinf isfinite eq ne lt le gt ge logical_and logical_or logical_not logical_xor
zeros_like ones_like full_like empty_like
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__ __mod__ __floordiv__ __abs__
__iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_ div_ relu_ clamp_ masked_fill_ tanh_ sigmoid_ silu_
fill_ zero_
"""
SINGULAR = {
    *("floor_divide", "remainder", "pow", "log", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "addcdiv"),
    *("__rtruediv__", "__rdiv__", "__pow__", "__rpow__", "__mod__", "__floordiv__"),
}
"""What may be infinite, or have an infinite derivative, where it is finite elsewhere. Padding has no numbers that
matter, and its gradient is 0; but 0 times infinity would reach what is broadcast over it."""
DIVIDES = {"div", "divide", "true_divide", "__truediv__", "__itruediv__", "__idiv__", "div_"}


@rule(*every(*POINTWISE.split()))
def pointwise(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Every element by itself, operands broadcast."""
    leader = max(placed_in((args, kwargs)), key=lambda placed: placed.shape.numel())
    layout, name = leader.placement, getattr(func, "__name__", "").removeprefix("special_")
    if isinstance(layout, Fused):
        return _by_pieces(func, args, kwargs, leader)
    if not isinstance(layout, Parted) or "out" in kwargs or not _fills(leader, args, kwargs):
        return NotImplemented
    by = operand(args, kwargs, 1, "other")
    divides = name in DIVIDES and isinstance(by, Tensor) and by.numel() > 1
    if layout.padded(leader.shape) and (name in SINGULAR or divides):
        return NotImplemented
    in_place = changes_in_place(name)
    if in_place and args[0] is not leader:
        return NotImplemented

    def own(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placed):
            if tensor.placement == layout and tensor.shape == leader.shape:
                return tensor.local
            tensor = tensor.whole()
        if tensor.dim() == 0 and not tensor.requires_grad:
            return tensor
        return layout.part(tensor, leader.shape)

    args, kwargs = tree_map_only(Tensor, own, (args, _without_memory_format(kwargs)))
    local = func(*args, **kwargs)
    if not isinstance(local, Tensor):
        return NotImplemented  # the indices that where(condition) gives
    return leader if in_place else leader.like(local)


def _by_pieces(func: Callable, args: tuple, kwargs: dict, leader: Placed) -> Any:
    """What lies side by side, each by itself: with single numbers, or with what lies side by side in the same way."""
    shapes = [piece.shape for piece in leader.placement.pieces]  # type: ignore[attr-defined]

    def alike(tensor: Tensor) -> bool:
        if isinstance(tensor, Placed) and isinstance(tensor.placement, Fused):
            return [piece.shape for piece in tensor.placement.pieces] == shapes
        return tensor.dim() == 0 and not isinstance(tensor, Placed)

    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    in_place = changes_in_place(getattr(func, "__name__", ""))
    if (in_place and args[0] is not leader) or "out" in kwargs or not all(map(alike, tensors)):
        return NotImplemented
    outs = []
    for index in range(len(shapes)):
        pieces = tree_map_only(Placed, lambda a, at=index: a.placement.pieces[at], (args, kwargs))  # type: ignore[union-attr]
        outs.append(func(*pieces[0], **pieces[1]))
    if in_place:
        return leader
    return fused(outs) if all(isinstance(out, Placed) for out in outs) else NotImplemented


def _fills(leader: Placed, args: tuple, kwargs: dict) -> bool:
    """Whether all operands broadcast to its shape."""
    try:
        shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return torch.broadcast_shapes(*shapes) == leader.shape
    except RuntimeError:
        return False  # torch says so on the whole tensors


def _without_memory_format(kwargs: dict) -> dict:
    """How a tensor lies in memory is its own affair: a part may have other dims than the whole."""
    return {name: value for name, value in kwargs.items() if name != "memory_format"}


CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "contiguous", "detach", "cpu", "cuda")


@rule(*every(*CASTS))
def cast(func: Callable, args: tuple, kwargs: dict) -> Any:
    """A tensor by itself; another one says no more than dtype and device."""
    a = operand(args, kwargs, 0, "input", "self")
    if isinstance(a, Placed) and isinstance(a.placement, Fused):
        return _by_pieces(func, args, kwargs, a)
    if isinstance(a, Placed) and not isinstance(a.placement, Parted):
        return NotImplemented
    args = tuple(value for value in args if not isinstance(value, torch.memory_format))
    local = on_parts(func, args, _without_memory_format(kwargs))
    return a.like(local) if isinstance(a, Placed) and isinstance(local, Tensor) else local


@rule(functional.dropout, torch.dropout, functional.alpha_dropout)
def dropout(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Masks that are independent wherever the tensor is cut."""
    a, probability = operand(args, kwargs, 0, "input"), operand(args, kwargs, 1, "p", default=0.5)
    if not operand(args, kwargs, 2, "training", "train", default=func is not functional.alpha_dropout):
        return a
    if probability == 0:
        return a
    if not isinstance(a.placement, Parted) or isinstance(a.placement, Shared):
        return NotImplemented
    with drawing(key_of_parts(a), a.device):
        return a.like(on_parts(func, args, kwargs))


@rule(*every("uniform_", "normal_", "bernoulli_", "exponential_"))
def drawn(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Numbers in the place of a tensor's own."""
    a = args[0]
    if not isinstance(a, Placed) or placed_in((args[1:], kwargs)):
        return NotImplemented
    if not isinstance(a.placement, Parted) or isinstance(a.placement, Shared):
        return NotImplemented
    with drawing(key_of_parts(a), a.device):
        func(a.local, *args[1:], **kwargs)
    return a


def key_of_parts(a: Placed) -> int:
    """A seed for this rank's part. It is drawn from torch's own generator, which is in step on all ranks of a place, so
    that a pass that is run again draws it again."""
    drawn = int(torch.randint(1 << 62, (), device="cpu"))
    grid = a.placement.run.grid
    return key_of(drawn, *(f"{axis}={grid.coords[axis]}" for axis in a.placement.axes))


@rule(*every("size", "dim", "numel", "nelement", "ndimension", "__len__"))
def of_shape(func: Callable, args: tuple, kwargs: dict) -> Any:
    name, shape = func.__name__, operand(args, kwargs, 0, "input").shape
    if name == "size":
        dim = operand(args, kwargs, 1, "dim")
        return shape if dim is None else shape[dim]
    if name in ("dim", "ndimension"):
        return len(shape)
    return shape[0] if name == "__len__" else shape.numel()


META = "is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mps is_xpu layout itemsize"


@rule(
    *every("is_floating_point", "is_complex", "element_size", "is_inference", "get_device"),
    *(getattr(Tensor, name).__get__ for name in META.split() if hasattr(Tensor, name)),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
)
def of_kind(func: Callable, args: tuple, kwargs: dict) -> Any:
    """What the part has in common with the whole."""
    return on_parts(func, args, kwargs)


@rule(Tensor.is_contiguous)
def is_contiguous(func: Callable, args: tuple, kwargs: dict) -> bool:  # noqa: ARG001
    """Whoever asks wants to view it or to hand it to a kernel, which works either way."""
    return True


@rule(Tensor.data.__get__)  # type: ignore[missing-attribute]
def data(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    return args[0].detach()


@rule(Tensor.requires_grad_)
def requires_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    """For gradients below frozen layers; what has one already keeps it."""
    a = args[0]
    if not operand(args, kwargs, 1, "requires_grad", default=True) and a.requires_grad:
        return refused(func, args, kwargs)
    if not a.requires_grad and operand(args, kwargs, 1, "requires_grad", default=True):
        a.local.requires_grad_()
    return a


@rule(Tensor.detach_)
def detach_in_place(func: Callable, args: tuple, kwargs: dict) -> Any:
    a = args[0]
    if isinstance(a.placement, Fused):
        return _by_pieces(func, args, kwargs, a)
    a._local = a.local.detach()
    return a


@rule(Tensor.backward, Tensor.retain_grad, torch.autograd.grad, torch.autograd.backward)
def refused(func: Callable, args: tuple, kwargs: dict) -> Any:
    raise RuntimeError(
        f"{func.__name__} on a tensor made {placed_in((args, kwargs))[0].made} that is cut over the grid; use it on "
        "the model's result or parameters, outside of forward, or keep the module that needs it out of ff.parallelize"
    )

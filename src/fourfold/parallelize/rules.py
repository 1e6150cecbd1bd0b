"""Operations that run on parts: pointwise ones, and those that leave the cut dim alone.

A rule gets the torch function with its arguments and returns a result, or NotImplemented: then the operation runs on
whole tensors. Rules decide by layouts and shapes, never by values, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from fourfold.nn.initial import key_of
from fourfold.nn.moment import drawing
from fourfold.parallelize.layouts import Fused, Shared
from fourfold.parallelize.placed import RULES, Placed, changes_in_place, placed_in


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
        for place in (Tensor, torch, functional, torch.special)
        if callable(found := getattr(place, name, None))
    ]


POINTWISE = """
add sub subtract rsub mul multiply div divide true_divide floor_divide remainder pow square neg negative abs
exp exp2 expm1 log log1p log2 sqrt rsqrt reciprocal sign sin cos tanh sigmoid erf relu relu6 gelu silu elu
celu selu leaky_relu softplus softsign mish hardtanh hardswish hardsigmoid logsigmoid threshold clamp clip
clamp_min clamp_max maximum minimum where lerp addcmul addcdiv masked_fill nan_to_num round floor ceil
isnan isinf isfinite eq ne lt le gt ge logical_and logical_or logical_not logical_xor
to type type_as float double half bfloat16 clone contiguous detach cpu cuda
zeros_like ones_like full_like empty_like
__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__
__eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ __or__ __invert__ __mod__ __floordiv__ __abs__
__iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_ div_ relu_ clamp_ masked_fill_ tanh_ sigmoid_ silu_
"""


@rule(*every(*POINTWISE.split()))
def pointwise(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Every element by itself, operands broadcast."""
    found = placed_in((args, kwargs))
    leader = max(found, key=lambda placed: placed.shape.numel())
    if isinstance(leader.placement, Fused):
        return NotImplemented
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    if torch.broadcast_shapes(*(tensor.shape for tensor in tensors)) != leader.shape:
        return NotImplemented
    in_place = changes_in_place(getattr(func, "__name__", ""))
    if in_place and args[0] is not leader:
        return NotImplemented

    def own(tensor: Tensor) -> Tensor:
        if isinstance(tensor, Placed):
            if tensor.placement == leader.placement and tensor.shape == leader.shape:
                return tensor.local
            tensor = tensor.whole()
        if tensor.dim() == 0 and not tensor.requires_grad:
            return tensor
        return leader.placement.part(tensor, leader.shape)

    args, kwargs = tree_map_only(Tensor, own, (args, kwargs))
    local = func(*args, **kwargs)
    if not isinstance(local, Tensor):
        return local  # type() without arguments
    return leader if in_place else leader.like(local)


@rule(functional.dropout, torch.dropout, functional.alpha_dropout)
def dropout(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Masks that are independent wherever the tensor is cut."""
    a = args[0] if args else kwargs["input"]
    named = {**dict(zip(("input", "p", "training", "inplace"), args, strict=False)), **kwargs}
    probability = named.get("p", named.get("dropout", 0.5))
    if not named.get("training", named.get("train", True)) or probability == 0:
        return a
    if isinstance(a.placement, (Fused, Shared)):
        return NotImplemented
    with drawing(key_of_parts(a), a.device):
        return a.like(functional.dropout(a.local, probability, True))


def key_of_parts(a: Placed) -> int:
    """A seed for this rank's part. It is drawn from torch's own generator, which is in step on all ranks of a place, so
    that a pass that is run again draws it again."""
    drawn = int(torch.randint(1 << 62, (), device="cpu"))
    grid = a.placement.run.grid
    return key_of(drawn, *(f"{axis}={grid.coords[axis]}" for axis in a.placement.axes))


@rule(*every("size", "dim", "numel", "nelement", "ndimension", "__len__"))
def of_shape(func: Callable, args: tuple, kwargs: dict) -> Any:
    name, shape = func.__name__, args[0].shape
    if name == "size":
        dims = (*args[1:], *kwargs.values())
        return shape[dims[0]] if dims and dims[0] is not None else shape
    if name in ("dim", "ndimension"):
        return len(shape)
    return shape[0] if name == "__len__" else shape.numel()


META = "is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mps is_xpu layout itemsize"


@rule(
    *every("is_floating_point", "is_complex", "element_size", "is_inference", "get_device", "is_contiguous"),
    *(getattr(Tensor, name).__get__ for name in META.split() if hasattr(Tensor, name)),
)
def of_kind(func: Callable, args: tuple, kwargs: dict) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


@rule(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor)
def new(func: Callable, args: tuple, kwargs: dict) -> Any:
    return func(args[0].local, *args[1:], **kwargs)


@rule(Tensor.data.__get__)  # type: ignore[missing-attribute]
def data(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    return args[0].like(args[0].local.detach())


@rule(Tensor.backward, Tensor.register_hook, Tensor.retain_grad, Tensor.requires_grad_)
def refused(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    raise TypeError(
        f"{func.__name__} on a tensor of {args[0].placement.run.label} that is cut over the grid; "
        "use it on the model's result or its parameters"
    )

"""Rules for operations that run on local parts: pointwise ones, casts, random numbers, and products.

A rule gets the torch function with its arguments and returns a result, or NotImplemented, in which case the operation
runs on whole tensors. Rules decide by placements and shapes, never by values, so all ranks decide the same. Otherwise
some ranks would wait for a gather that others never start. `ops_dims.py` has the rules for operations on dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold.nn.rng import key_of, seeded
from fourfold.operators import Conjugate
from fourfold.wrap.grid_tensor import RULES, GridTensor, ShardedPlacement, grid_tensors_in, is_in_place
from fourfold.wrap.placements import ChunkPlacement, FusedPlacement, SharedHeadsPlacement, conjugate, fuse, same


def rule(*functions: Callable | None) -> Callable[[Callable], Callable]:
    """Register a rule for these torch functions; None stands for a function that this version of torch lacks."""

    def register(body: Callable) -> Callable:
        RULES.update({function: body for function in functions if function is not None})
        return body

    return register


def functions_named(*names: str) -> list[Callable]:
    """Return all torch functions of these names: methods, and functions of torch and torch.nn.functional."""
    return [
        found
        for name in names
        for home in ((Tensor,) if name.startswith("__") else (Tensor, torch, functional, torch.special))
        if callable(found := getattr(home, name, None))
    ]


def argument(args: tuple, kwargs: dict, at: int, *names: str, default: Any = None) -> Any:
    """Return an argument by its position or by any of its names."""
    if at < len(args):
        return args[at]
    return next((kwargs[name] for name in names if name in kwargs), default)


def run_on_local(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run the operation on this rank's parts."""
    args, kwargs = tree_map_only(GridTensor, lambda tensor: tensor.local, (args, kwargs))
    return func(*args, **kwargs)


def part_of(operand: Tensor, placement: ShardedPlacement, shape: Size) -> Tensor:
    """Return what this rank reads of an operand that broadcasts to a tensor of this placement and shape."""
    if isinstance(operand, GridTensor):
        if operand.placement == placement and operand.shape == shape:
            return operand.local
        operand = operand.whole()
    return placement.part(operand, shape)


# pointwise operations

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
"""Operations with a value or derivative that may be infinite at padding. The gradient of padding is 0, but 0 times
infinity is NaN, which would reach an operand that is broadcast over the padding."""
DIVIDES = {"div", "divide", "true_divide", "__truediv__", "__itruediv__", "__idiv__", "div_"}
"""Divisions, which are singular only if the divisor is a tensor that has padding."""


@rule(*functions_named(*POINTWISE.split()))
def pointwise(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run an elementwise operation on operands that broadcast to the largest one."""
    leader = max(grid_tensors_in((args, kwargs)), key=lambda tensor: tensor.shape.numel())
    placement, name = leader.placement, getattr(func, "__name__", "").removeprefix("special_")
    if isinstance(placement, FusedPlacement):
        return _by_pieces(func, args, kwargs, leader)
    if not isinstance(placement, ShardedPlacement) or "out" in kwargs or not _fills(leader, args, kwargs):
        return NotImplemented
    divisor = argument(args, kwargs, 1, "other")
    divides = name in DIVIDES and isinstance(divisor, Tensor) and divisor.numel() > 1
    if placement.is_padded(leader.shape) and (name in SINGULAR or divides):
        return NotImplemented
    in_place = is_in_place(name)
    if in_place and args[0] is not leader:
        return NotImplemented

    def own(tensor: Tensor) -> Tensor:
        scalar = tensor.dim() == 0 and not isinstance(tensor, GridTensor)
        # a scalar without a gradient has nothing to sum in backward
        return tensor if scalar and not tensor.requires_grad else part_of(tensor, placement, leader.shape)

    args, kwargs = tree_map_only(Tensor, own, (args, without_memory_format(kwargs)))
    local = func(*args, **kwargs)
    if not isinstance(local, Tensor):
        return NotImplemented  # torch.where(condition) returns indices
    return leader if in_place else leader.like(local)


def _by_pieces(func: Callable, args: tuple, kwargs: dict, leader: GridTensor) -> Any:
    """Run an operation on each piece of fused tensors; other operands are scalars or are fused in the same way."""
    shapes = [piece.shape for piece in leader.placement.pieces]  # type: ignore[attr-defined]

    def alike(tensor: Tensor) -> bool:
        if isinstance(tensor, GridTensor) and isinstance(tensor.placement, FusedPlacement):
            return [piece.shape for piece in tensor.placement.pieces] == shapes
        return tensor.dim() == 0 and not isinstance(tensor, GridTensor)

    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    in_place = is_in_place(getattr(func, "__name__", ""))
    if (in_place and args[0] is not leader) or "out" in kwargs or not all(map(alike, tensors)):
        return NotImplemented
    outs = []
    for index in range(len(shapes)):
        pieces = tree_map_only(GridTensor, lambda a, at=index: a.placement.pieces[at], (args, kwargs))  # type: ignore[union-attr]
        outs.append(func(*pieces[0], **pieces[1]))
    if in_place:
        return leader
    return fuse(outs) if all(isinstance(out, GridTensor) for out in outs) else NotImplemented


def _fills(leader: GridTensor, args: tuple, kwargs: dict) -> bool:
    """Return whether all operands broadcast to the leader's shape."""
    try:
        shapes = [value.shape for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        return torch.broadcast_shapes(*shapes) == leader.shape
    except RuntimeError:
        return False  # shapes that do not broadcast: torch raises its own error on the whole tensors


def without_memory_format(kwargs: dict) -> dict:
    """Drop the memory format: a local part may have another number of dims than the whole tensor."""
    return {name: value for name, value in kwargs.items() if name != "memory_format"}


CASTS = ("to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "contiguous", "detach", "cpu", "cuda")


@rule(*functions_named(*CASTS))
def cast(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Cast, copy or detach the local part. A second tensor argument gives only a dtype and a device."""
    a = argument(args, kwargs, 0, "input", "self")
    if isinstance(a, GridTensor) and isinstance(a.placement, FusedPlacement):
        return _by_pieces(func, args, kwargs, a)
    if isinstance(a, GridTensor) and not isinstance(a.placement, ShardedPlacement):
        return NotImplemented
    args = tuple(value for value in args if not isinstance(value, torch.memory_format))
    local = run_on_local(func, args, without_memory_format(kwargs))
    return a.like(local) if isinstance(a, GridTensor) and isinstance(local, Tensor) else local


# random numbers


@rule(functional.dropout, torch.dropout, functional.alpha_dropout)
def dropout(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Drop elements with masks that are independent on ranks that hold different parts."""
    a, probability = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "p", default=0.5)
    if not argument(args, kwargs, 2, "training", "train", default=func is not functional.alpha_dropout):
        return a
    if probability == 0:
        return a
    # several ranks hold a shared head and must drop the same elements of it
    if not isinstance(a.placement, ShardedPlacement) or isinstance(a.placement, SharedHeadsPlacement):
        return NotImplemented
    with seeded(seed_of_part(a), a.device):
        return a.like(run_on_local(func, args, kwargs))


@rule(*functions_named("uniform_", "normal_", "bernoulli_", "exponential_"))
def draw_in_place(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Fill a tensor with random numbers that are independent on ranks that hold different parts."""
    a = args[0]
    if not isinstance(a, GridTensor) or grid_tensors_in((args[1:], kwargs)):
        return NotImplemented
    if not isinstance(a.placement, ShardedPlacement) or isinstance(a.placement, SharedHeadsPlacement):
        return NotImplemented
    if a.placement.context.sample is not None:  # the check gives numbers to whole rows
        return NotImplemented
    with seeded(seed_of_part(a), a.device):
        func(a.local, *args[1:], **kwargs)
    return a


def seed_of_part(a: GridTensor) -> int:
    """Return a seed for this rank's part.

    The seed is drawn from torch's own generator, which is in step on all ranks of a place. So a recomputed forward
    pass, which restores that generator, draws the same numbers again.
    """
    drawn = int(torch.randint(1 << 62, (), device="cpu"))  # on the CPU, so that the host does not wait for the device
    grid = a.placement.context.grid
    return key_of(drawn, *(f"{axis}={grid.coords[axis]}" for axis in a.placement.axes))


# questions about a tensor


@rule(*functions_named("size", "dim", "numel", "nelement", "ndimension", "__len__"))
def ask_shape(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Answer from the shape of the whole tensor."""
    name, shape = func.__name__, argument(args, kwargs, 0, "input").shape
    if name == "size":
        dim = argument(args, kwargs, 1, "dim")
        return shape if dim is None else shape[dim]
    if name in ("dim", "ndimension"):
        return len(shape)
    return shape[0] if name == "__len__" else shape.numel()


META = "is_cuda is_cpu is_meta is_sparse is_quantized is_nested is_mps is_xpu layout itemsize"
"""Attributes that a part has in common with the whole tensor."""


@rule(
    *functions_named("is_floating_point", "is_complex", "element_size", "is_inference", "get_device"),
    *(getattr(Tensor, name).__get__ for name in META.split() if hasattr(Tensor, name)),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
)
def ask_kind(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Answer from the local part, which has the dtype and the device of the whole tensor."""
    return run_on_local(func, args, kwargs)


@rule(Tensor.is_contiguous)
def is_contiguous(func: Callable, args: tuple, kwargs: dict) -> bool:  # noqa: ARG001
    """Answer True: callers ask before a view or a kernel call, and both work on a grid tensor."""
    return True


# autograd


@rule(Tensor.data.__get__)  # type: ignore[missing-attribute]
def data(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Return the tensor detached."""
    return args[0].detach()


@rule(Tensor.requires_grad_)
def requires_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Turn gradients on, as people do below frozen layers; a tensor that has gradients keeps them."""
    a = args[0]
    wanted = argument(args, kwargs, 1, "requires_grad", default=True)
    if not wanted and a.requires_grad:
        return refuse_gradients(func, args, kwargs)
    if wanted and not a.requires_grad:
        a.local.requires_grad_()
    return a


@rule(Tensor.detach_)
def detach_in_place(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Detach the local part."""
    a = args[0]
    if isinstance(a.placement, FusedPlacement):
        return _by_pieces(func, args, kwargs, a)
    a._local = a.local.detach()
    return a


@rule(Tensor.backward, Tensor.retain_grad, torch.autograd.backward, torch.autograd.grad)
def refuse_gradients(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Refuse what needs the gradient of a cut tensor inside the model.

    A cut tensor is gathered anew for every reader, so one whole tensor is not in the autograd graph of another.
    """
    name = "torch.autograd.grad" if func is torch.autograd.grad else func.__name__
    raise RuntimeError(
        f"{name} on a tensor made {grid_tensors_in((args, kwargs))[0].made} that is cut over the grid: its gradient "
        "cannot be taken inside the model; use it on the model's result or parameters, outside of forward, or keep "
        "the module that needs it out of ff.parallelize and call it beside the model"
    )


# products


@rule(*functions_named("matmul", "bmm", "__matmul__"))
def matmul(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Multiply batches of matrices where a batch dim is cut."""
    a, b = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other", "mat2")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or kwargs.keys() - {"input", "other", "mat2"}:
        return NotImplemented
    leader = max(grid_tensors_in((a, b)), key=lambda tensor: len(tensor.shape))  # its cut is the result's cut
    ndim = max(a.dim(), b.dim())
    placement = leader.placement
    if not isinstance(placement, ChunkPlacement) or min(a.dim(), b.dim()) < 2 or len(leader.shape) != ndim:
        return NotImplemented
    # a cut row, column or inner dim would need a partial product; only batch dims are cut here
    if placement.dim >= ndim - 2 or a.shape[-1] != b.shape[-2]:
        return NotImplemented
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if batch[placement.dim] != leader.shape[placement.dim]:
        return NotImplemented

    def own(tensor: Tensor) -> Tensor:
        if isinstance(tensor, GridTensor):
            alike = tensor.placement == placement and tensor.dim() == ndim
            if alike and tensor.shape[placement.dim] == leader.shape[placement.dim]:
                return tensor.local
            tensor = tensor.whole()
        return placement.part(tensor, Size((*batch, *tensor.shape[-2:])))

    return GridTensor(func(own(a), own(b)), placement, Size((*batch, a.shape[-2], b.shape[-1])))


@dataclass(frozen=True, slots=True)
class EinsumEquation:
    """The letters of every operand's dims, and of the result's."""

    operands: tuple[str, ...]
    result: str

    @classmethod
    def parse(cls, text: Any, count: int) -> EinsumEquation | None:
        """Return None where dims have no letters of their own: an ellipsis, a diagonal, or no arrow."""
        if not isinstance(text, str) or "." in text or text.count("->") != 1:
            return None
        left, _, result = text.replace(" ", "").partition("->")
        operands = tuple(left.split(","))
        if len(operands) != count or any(len(set(letters)) != len(letters) for letters in operands):
            return None
        return cls(operands, result)

    def sizes(self, operands: Sequence[Tensor]) -> dict[str, int] | None:
        """Return the size of each letter; None where operands disagree, so that torch broadcasts or raises."""
        found: dict[str, int] = {}
        for letters, operand in zip(self.operands, operands, strict=True):
            if len(letters) != operand.dim():
                return None
            for letter, size in zip(letters, operand.shape, strict=True):
                if found.setdefault(letter, size) != size:
                    return None
        return found if set(self.result) <= found.keys() else None


@rule(torch.einsum)
def einsum(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute an einsum with each rank's chunk of one letter.

        letter in the output    each rank's result is its chunk of the output
        letter summed over      each rank's result is a partial sum, all-reduced over the axes that cut the letter

    An operand with the letter is read by chunk, and its gradient is gathered. An operand without it is read whole, and
    its gradient is summed over the ranks.
    """
    text, operands = args[0], args[1:]
    if kwargs or not all(isinstance(operand, Tensor) for operand in operands):
        return NotImplemented
    equation = EinsumEquation.parse(text, len(operands))
    sizes = None if equation is None else equation.sizes(operands)
    if equation is None or sizes is None:
        return NotImplemented
    context = grid_tensors_in(operands)[0].placement.context
    placement = ChunkPlacement(context, 0, context.inner_axes)
    letter = _letter_to_cut(equation, operands, sizes, placement)
    if letter is None:
        return NotImplemented

    def own(letters: str, operand: Tensor) -> Tensor:
        wanted = placement.moved(letters.index(letter)) if letter in letters else None
        if isinstance(operand, GridTensor):
            if operand.placement == wanted:
                return operand.local
            context.made_whole[context.label, "einsum"] += 1
            operand = operand.whole()
        if wanted is not None:
            return wanted.part(operand, operand.shape)
        return conjugate(operand, same, lambda gradient: placement.sum(gradient, placement.over))

    local = func(text, *(own(letters, operand) for letters, operand in zip(equation.operands, operands, strict=True)))
    if letter in equation.result:
        shape = Size(sizes[one] for one in equation.result)
        return GridTensor(local, placement.moved(equation.result.index(letter)), shape)
    return Conjugate.apply(local, lambda owed: placement.sum(owed, placement.over), same)


def _letter_to_cut(
    equation: EinsumEquation, operands: Sequence[Tensor], sizes: dict[str, int], placement: ChunkPlacement
) -> str | None:
    """Choose the letter by which the product is cut, among those that divide into equal chunks.

    First a letter that is cut already, such as heads, preferably one of the output. Otherwise a letter of the output
    that only plain operands have, such as heads in `bsk,khd->bshd` with a weight [k, h, d].
    """
    cut, on_grid, has_activation = [], set(), False
    for letters, operand in zip(equation.operands, operands, strict=True):
        if isinstance(operand, GridTensor):
            on_grid |= set(letters)
            has_activation |= isinstance(operand.placement, ShardedPlacement)  # not a parameter of another module
            if type(operand.placement) is ChunkPlacement and operand.placement.over == placement.over:
                cut.append(letters[operand.placement.dim])
    free = [letter for letter in equation.result if letter not in on_grid and has_activation]
    candidates = [*(letter for letter in cut if letter in equation.result), *cut, *free]
    return next((letter for letter in candidates if sizes[letter] % placement.parts == 0), None)


ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The positional arguments of `scaled_dot_product_attention`, for which torch gives no signature."""
HEADS = 1
"""The dim of heads in [rows, heads, seq, head_dim]."""


@rule(functional.scaled_dot_product_attention)
def attend(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run torch's fused attention on this rank's heads."""
    named = {**dict(zip(ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}
    query, key, value = named.pop("query"), named.pop("key"), named.pop("value")
    if not isinstance(query, GridTensor) or type(query.placement) is not ChunkPlacement or query.dim() != 4:
        return NotImplemented
    placement = query.placement
    if placement.dim != HEADS or query.shape[HEADS] % placement.parts:
        return NotImplemented
    if any(tensor.dim() != 4 or tensor.shape[0] != query.shape[0] for tensor in (key, value)):
        return NotImplemented
    grouped = named.get("enable_gqa", False)
    own = [own_heads(tensor, placement, query.shape[HEADS], grouped=grouped) for tensor in (key, value)]
    if any(tensor is None for tensor in own) or own[0].shape[HEADS] != own[1].shape[HEADS]:  # type: ignore[union-attr]
        return NotImplemented
    mask = named.get("attn_mask")
    if mask is not None:
        named["attn_mask"] = part_of(mask, placement, Size((*query.shape[:3], key.shape[2])))
    # K and V may have been widened to one head per query
    named["enable_gqa"] = own[0].shape[HEADS] != query.local.shape[HEADS]  # type: ignore[union-attr]
    shape = (*query.shape[:-1], value.shape[-1])
    # ranks with other heads must drop other elements
    drops = named.get("dropout_p", 0.0)
    with seeded(seed_of_part(query), query.device) if drops else nullcontext():
        return GridTensor(func(query.local, *own, **named), placement, shape)


def own_heads(tensor: Tensor, placement: ChunkPlacement, heads: int, *, grouped: bool) -> Tensor | None:
    """Return the heads of K or V that this rank's queries read; None where the parts do not hold them."""
    if isinstance(tensor, GridTensor):
        if isinstance(tensor.placement, SharedHeadsPlacement):
            shared = tensor.placement
            follows = shared.over == placement.over and shared.heads * shared.group == heads
            return shared.for_queries(tensor.local) if follows and shared.dim == HEADS and shared.size == 1 else None
        even = tensor.shape[HEADS] % placement.parts == 0
        if tensor.placement == placement and even and (grouped or tensor.shape[HEADS] == heads):
            return tensor.local
        tensor = tensor.whole()
    if tensor.shape[HEADS] != heads:  # grouped queries: give each query its own copy, then cut
        tensor = tensor.repeat_interleave(heads // tensor.shape[HEADS], HEADS)
    return placement.part(tensor, Size((*tensor.shape[:HEADS], heads, *tensor.shape[HEADS + 1 :])))

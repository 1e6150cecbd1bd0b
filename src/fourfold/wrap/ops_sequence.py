"""Rules for operations on sequence tensors: what may run on the tokens of one member of a context group.

Each rule finds out where the dim of tokens goes, and runs the operation on the local tensors, which may be grid tensors
with rules of their own. What mixes tokens is refused, except causal attention, and sums over all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold.axes import CONTEXT
from fourfold.nn.rng import key_of, seeded
from fourfold.wrap.grid_tensor import GridTensor, ModelContext, is_in_place, to_whole, version_of
from fourfold.wrap.ops import (
    ATTENTION_ARGUMENTS,
    CASTS,
    HEADS,
    META,
    POINTWISE,
    EinsumEquation,
    argument,
    ask_shape,
    functions_named,
    own_heads,
    without_memory_format,
)
from fourfold.wrap.ops_dims import SECTIONS, as_slice, shape_from_meta, sizes_of
from fourfold.wrap.own_tokens import SequenceCut
from fourfold.wrap.placements import ChunkPlacement
from fourfold.wrap.sequence_tensor import (
    SEQUENCE_RULES,
    SequenceTensor,
    group_sum,
    refusal,
    sequence_tensors_in,
    to_own,
)

READ_OUTSIDE = "return the whole tensor and index it outside of the model"
MIXES = "it mixes tokens, of which each place holds others"


def rule(*functions: Callable | None) -> Callable[[Callable], Callable]:
    """Register a rule for these torch functions; None stands for a function that this version of torch lacks."""

    def register(body: Callable) -> Callable:
        SEQUENCE_RULES.update({function: body for function in functions if function is not None})
        return body

    return register


# where the stream begins


def embed(context: ModelContext, args: tuple, kwargs: dict) -> Any:
    """Look up this member's ids alone, if ids [..., seq] are whole; `args` are those of F.embedding."""
    own = own_ids(context, argument(args, kwargs, 0, "input"))
    if own is None:
        return functional.embedding(*args, **kwargs)
    ids, cut = own
    kwargs = {name: value for name, value in kwargs.items() if name != "input"}
    return SequenceTensor(functional.embedding(ids, *args[1:], **kwargs), cut, context)


def own_ids(context: ModelContext, ids: Any) -> tuple[Tensor, SequenceCut] | None:
    """Return this member's part of ids [..., seq], which all members have; None if they are no sequences."""
    tokens = context.own_tokens
    if tokens is None or type(ids) is not Tensor or ids.shape[-1:] != (tokens.seq,):
        return None
    return cut_plain(context, ids, ids.dim() - 1)


def cut_plain(context: ModelContext, plain: Tensor, dim: int) -> tuple[Tensor, SequenceCut]:
    """Return this member's tokens of a tensor that all members have whole, with tokens in dim `dim`."""
    tokens = context.own_tokens
    if tokens is None:
        raise RuntimeError("there is no sequence to cut outside of a pass")
    tokens.cuts += 1
    cut = SequenceCut(tokens, dim, 0, tokens.seq)
    return plain.index_select(dim, cut.index), cut


# operands that broadcast


def own_operand(func: Any, operand: Tensor, leader: SequenceTensor, behind: int) -> Tensor:
    """Return what this member reads of an operand. `behind` counts the tokens' dim from the end, as -1, -2, ..."""
    if isinstance(operand, SequenceTensor):
        if operand.cut.dim - len(operand.shape) != behind or not operand.cut.same_tokens(leader.cut):
            raise refusal(func, leader, "its operands have different tokens side by side, so it mixes neighbours")
        return operand.local
    if operand.dim() < -behind or operand.shape[behind] == 1:
        return operand
    if operand.shape[behind] != leader.cut.length:
        raise refusal(func, leader, f"an operand {tuple(operand.shape)} does not fit its tokens")
    return operand.index_select(operand.dim() + behind, leader.cut.index)


def leader_of(*values: Any) -> SequenceTensor:
    """Return the sequence tensor with the most dims."""
    return max(sequence_tensors_in(values), key=lambda tensor: len(tensor.shape))


@rule(*functions_named(*POINTWISE.split(), "__xor__", "__ror__", "__rand__", "xlogy", "atan2", "float_power"))
def pointwise(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run an elementwise operation on operands that broadcast."""
    leader, name, written = leader_of(args, kwargs), getattr(func, "__name__", ""), argument(args, kwargs, 0, "input")
    in_place = is_in_place(name) or bool(kwargs.get("inplace"))
    if "out" in kwargs or (name == "where" and len(args) + len(kwargs) == 1):
        return NotImplemented
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    behind = leader.cut.dim - len(leader.shape)
    # a plain tensor has the same values on all members
    if in_place and (not isinstance(written, SequenceTensor) or written.shape != shape):
        raise refusal(func, leader, "it writes tokens into a whole tensor", "write it without a change in place")
    args, kwargs = tree_map_only(
        Tensor, lambda tensor: own_operand(func, tensor, leader, behind), (args, without_memory_format(kwargs))
    )
    local = func(*args, **kwargs)
    return written if in_place else leader.like(local, len(shape) + behind)


@rule(*functions_named(*CASTS))
def cast(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Cast, copy or detach the local tensor. A second tensor argument gives only a dtype and a device."""
    a = argument(args, kwargs, 0, "input", "self")
    args = tuple(value for value in args if not isinstance(value, torch.memory_format))
    local = func(*to_own(args), **to_own(without_memory_format(kwargs)))
    return a.like(local) if isinstance(a, SequenceTensor) else local


@rule(functional.dropout, torch.dropout, functional.alpha_dropout)
def dropout(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Drop elements with masks that are independent on members, which hold different tokens."""
    a = argument(args, kwargs, 0, "input")
    # drawn from torch's own generator, which is in step on all members
    drawn = int(torch.randint(1 << 62, (), device="cpu"))
    key = key_of(drawn, f"{CONTEXT}={a.context.grid.coords[CONTEXT]}")
    on_device = seeded(key, a.device) if a.device.type != "cpu" else nullcontext()
    with seeded(key, torch.device("cpu")), on_device:
        local = func(*to_own(args), **to_own(kwargs))
    return a if local is a.local else a.like(local)


# questions, and autograd

rule(*functions_named("size", "dim", "numel", "nelement", "ndimension", "__len__"))(ask_shape)


@rule(
    *functions_named("is_floating_point", "is_complex", "element_size", "is_inference", "get_device"),
    *(getattr(Tensor, name).__get__ for name in META.split() if hasattr(Tensor, name)),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, Tensor.new_tensor),
)
def ask_kind(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Answer from the local tensor, which has the dtype and the device of the whole one."""
    return func(*to_own(args), **to_own(kwargs))


@rule(functional.embedding)
def look_up(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Look up ids that were computed from the stream."""
    ids = argument(args, kwargs, 0, "input")
    return ids.like(func(*to_own(args), **to_own(kwargs))) if isinstance(ids, SequenceTensor) else NotImplemented


@rule(Tensor.is_contiguous)
def is_contiguous(func: Callable, args: tuple, kwargs: dict) -> bool:  # noqa: ARG001
    """Answer True: callers ask before a view or a kernel call, and both work."""
    return True


@rule(Tensor.data.__get__)  # type: ignore[missing-attribute]
def data(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Return the tensor detached."""
    return args[0].detach()


@rule(Tensor.requires_grad_)
def requires_grad(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Turn gradients on, as people do below frozen layers."""
    func(*to_own(args), **kwargs)
    return args[0]


# reshapes


def reshaped(func: Any, a: SequenceTensor, shape: Size) -> SequenceTensor:
    """Return the tensor in another shape, in which tokens lie in a dim by themselves or together with rows."""
    cut, behind = a.cut, prod(a.shape[a.cut.dim + 1 :])
    for dim in reversed(range(len(shape))):
        if prod(shape[dim + 1 :]) == behind and shape[dim] % cut.tokens_each == 0 and shape.numel() == a.shape.numel():
            blocks = shape[dim] // cut.tokens_each
            own = [*shape[:dim], blocks * (cut.own // cut.blocks), *shape[dim + 1 :]]
            moved = SequenceCut(cut.tokens, dim, cut.start, cut.stop, blocks)
            return SequenceTensor(a.local.reshape(own), moved, a.context)
    raise refusal(
        func, a, f"the shape {tuple(shape)} takes sequences apart, or merges tokens with what lies behind them"
    )


@rule(*functions_named("view", "reshape", "view_as", "reshape_as", "_unsafe_view"))
def reshape(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Reshape the local tensor."""
    a = argument(args, kwargs, 0, "input")
    if func.__name__ in ("view_as", "reshape_as"):
        sizes = list(argument(args, kwargs, 1, "other").shape)
        if not isinstance(a, SequenceTensor):
            return a.reshape(sizes)
    elif isinstance(argument(args, kwargs, 1, "dtype"), torch.dtype):
        return NotImplemented
    else:
        sizes = sizes_of(args[1:] or (kwargs.get("shape", kwargs.get("size")),))
    known = prod(size for size in sizes if size != -1)
    sizes = [a.shape.numel() // max(known, 1) if size == -1 else size for size in sizes]
    return reshaped(func, a, Size(sizes))


@rule(*functions_named("flatten", "unflatten", "squeeze", "unsqueeze"))
def reshape_by_meta(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Reshape to the shape that torch finds for a meta tensor."""
    return reshaped(func, argument(args, kwargs, 0, "input"), shape_from_meta(func, args, kwargs))


def dims_after(a: SequenceTensor, act: Callable[[Tensor], Tensor]) -> Sequence[int]:
    """Return which dim of a tensor each dim of the result of a permutation is."""
    # the strides of this meta tensor are its dim numbers, so they show where each dim goes
    return act(torch.empty_strided([1] * len(a.shape), list(range(len(a.shape))), device="meta")).stride()


@rule(*functions_named("transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "t"))
def permute(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Permute dims."""

    def act(tensor: Tensor) -> Tensor:
        own, named = tree_map_only(SequenceTensor, lambda _: tensor, (args, kwargs))
        return func(*own, **named)

    a = argument(args, kwargs, 0, "input")
    return a.like(act(a.local), dims_after(a, act).index(a.cut.dim))


@rule(Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
def transpose(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Transpose by `.T` or `.mT`."""
    a = args[0]
    return a.like(func(a.local, *args[1:]), dims_after(a, lambda tensor: func(tensor, *args[1:])).index(a.cut.dim))


@rule(*functions_named("expand", "expand_as", "broadcast_to", "repeat"))
def expand(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Expand or repeat dims other than that of tokens."""
    a = args[0]
    sizes = list(argument(args, kwargs, 1, "other").shape) if func.__name__ == "expand_as" else []
    if not isinstance(a, SequenceTensor):  # a plain tensor expanded to the shape of a sequence tensor
        return a.expand(sizes)
    sizes = sizes or sizes_of(args[1:] or (kwargs.get("size", kwargs.get("repeats")),))
    dim = a.cut.dim + len(sizes) - len(a.shape)
    repeats = func.__name__ == "repeat"
    if sizes[dim] not in ((1,) if repeats else (-1, a.cut.length)):
        raise refusal(func, a, "it repeats tokens")
    sizes[dim] = 1 if repeats else a.cut.own
    return a.like(a.local.repeat(sizes) if repeats else a.local.expand(sizes), dim)


@rule(Tensor.__getitem__)
def getitem(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Index with numbers, slices, lists of one number, None and Ellipsis; of tokens, a slice without steps."""
    a, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    if isinstance(a, SequenceTensor) and (sliced := as_slice(index)) is not None:
        return getitem(func, (a, sliced), {}).clone()  # indexing with a list copies
    if not isinstance(a, SequenceTensor) or not all(
        i is None or i is Ellipsis or type(i) in (int, slice) for i in index
    ):
        return NotImplemented
    full = [slice(None)] * (len(a.shape) - sum(i is not None and i is not Ellipsis for i in index))
    place = index.index(Ellipsis) if Ellipsis in index else len(index)
    index = (*index[:place], *full, *index[place + 1 :])
    at = [position for position, i in enumerate(index) if i is not None][a.cut.dim]
    chosen, before = index[at], index[:at]
    if not isinstance(chosen, slice):
        raise refusal("indexing", a, f"it reads token {chosen} alone, which one place holds", READ_OUTSIDE)
    start, stop, step = chosen.indices(a.cut.length)
    dim = sum(not isinstance(i, int) for i in before)  # a number removes its dim
    local = a.local[(*before, slice(None), *index[at + 1 :])]
    if (start, stop, step) == (0, a.cut.length, 1):
        return a.like(local, dim)
    if step != 1 or a.cut.blocks != 1 or start >= stop:
        raise refusal("indexing", a, f"tokens {start}:{stop}:{step} of {a.cut.length} lie across sequences or places")
    return _slice_tokens(a.like(local, dim), start, stop)


def _slice_tokens(a: SequenceTensor, start: int, stop: int) -> SequenceTensor:
    """Return the tokens [start, stop) of those that the tensor has; members then have different numbers of them."""
    cut = a.cut
    part = SequenceCut(cut.tokens, cut.dim, cut.start + start, cut.start + stop)
    if not part.on_all_members:  # layers and losses need some tokens on every place
        raise refusal("indexing", a, f"some places hold none of the tokens {part.start}:{part.stop}", READ_OUTSIDE)
    first = cut.own_before(start)
    return SequenceTensor(a.local.narrow(cut.dim, first, part.own), part, a.context)


# operations along dims


def dims_of(a: SequenceTensor, dims: Any) -> list[int]:
    """Return dims as numbers from 0; all of them for None or an empty list."""
    dims = [dims] if type(dims) is int else dims
    return [dim % len(a.shape) for dim in dims] if dims else list(range(len(a.shape)))


def along_others(func: Callable, a: SequenceTensor, dims: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operation along dims that are not that of tokens; its results keep all other dims."""
    if dims is None or isinstance(dims, bool) or a.cut.dim in (found := dims_of(a, dims)) or "out" in kwargs:
        raise refusal(func, a, MIXES)
    results = func(*to_own(args), **to_own(kwargs))

    def on_sequence(local: Tensor) -> SequenceTensor:
        gone = sum(dim < a.cut.dim for dim in found) if len(local.shape) < len(a.shape) else 0  # 0 with keepdim=True
        return a.like(local, a.cut.dim - gone)

    return tree_map_only(Tensor, on_sequence, results)


TOTALS = ("sum", "mean")
"""Reductions that may run over tokens too: members' sums are summed over the group."""
ALONG = (
    *("amax", "amin", "var", "std", "logsumexp", "argmax", "argmin", "softmax", "log_softmax", "cumsum", "flip"),
    *("max", "min", "topk", "sort", "argsort", "any", "all", "prod", "glu", "unbind", "nansum", "softmin"),
)
"""Operations whose second argument is the dim, or dims, that they work along."""
AFTER_ONE = ("topk", "roll", "split", "chunk", "split_with_sizes", "tensor_split", "normalize", "repeat_interleave")
"""Operations with another argument before the dim."""


@rule(*functions_named(*ALONG, *AFTER_ONE))
def along_dims(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Reduce, normalise, split or turn dims that are not that of tokens."""
    name = func.__name__
    a = argument(args, kwargs, 0, "input", "tensor", "self")
    if name in ("max", "min") and (isinstance(argument(args, kwargs, 1, "other"), Tensor)):
        return pointwise(func, args, kwargs)
    usual = {"topk": -1, "sort": -1, "argsort": -1, "glu": -1, "normalize": 1, "unbind": 0, "split": 0, "chunk": 0}
    usual |= {"split_with_sizes": 0, "tensor_split": 0}
    if name == "flip" and len(args) > 2:
        dims: Any = args[1:]
    else:
        dims = argument(args, kwargs, 2 if name in AFTER_ONE else 1, "dim", "axis", "dims", default=usual.get(name))
    if not isinstance(a, SequenceTensor) or sequence_tensors_in((args[1:], [kwargs.get(one) for one in SECTIONS])):
        return NotImplemented
    if name == "roll" and not dims:
        raise refusal(func, a, MIXES)
    return along_others(func, a, dims, args, kwargs)


@rule(*functions_named(*TOTALS))
def total(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Sum or average over dims; over tokens, the sums of all members are added."""
    a, given = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "dim", "axis")
    dims = dims_of(a, given)
    if "out" in kwargs:
        return NotImplemented
    if a.cut.dim not in dims:
        return along_others(func, a, given, args, kwargs)
    keep, dtype = argument(args, kwargs, 2, "keepdim", default=False), argument(args, kwargs, 3, "dtype")
    own = a.local.sum(dims, keepdim=keep, **({"dtype": dtype} if dtype else {}))
    summed = group_sum(own, a.context)
    return summed / prod(a.shape[dim] for dim in dims) if func.__name__ == "mean" else summed


@rule(*functions_named("narrow", "select", "index_select"))
def select(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Select entries of a dim that is not that of tokens, by numbers or a plain index."""
    a, dim = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "dim")
    if not isinstance(a, SequenceTensor) or sequence_tensors_in((args[1:], kwargs.get("index"))):
        return NotImplemented
    return along_others(func, a, dim, args, kwargs)


@rule(*functions_named("gather", "take_along_dim"))
def gather(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Pick entries along a dim that is not that of tokens, by an index with the same tokens."""
    named = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
    if func.__name__ == "take_along_dim":
        named = {**dict(zip(("input", "indices", "dim"), args, strict=False)), **kwargs}
    key = "indices" if "indices" in named else "index"
    leader = leader_of(named["input"], named[key])
    if any(
        named[one].dim() != leader.dim() or named[one].shape[leader.cut.dim] != leader.cut.length
        for one in ("input", key)
    ):
        return NotImplemented
    for one in ("input", key):
        named[one] = own_operand(func, named[one], leader, leader.cut.dim - leader.dim())
    return along_others(func, leader, named["dim"], (named.pop("input"),), named)  # a method has no name for it


@rule(*functions_named("cat", "concat", "concatenate", "stack"))
def cat(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Join along a dim that is not that of tokens; an empty tensor before the tokens is left out."""
    tensors, dim = argument(args, kwargs, 0, "tensors"), argument(args, kwargs, 1, "dim", "axis", default=0)
    tensors = [tensor for tensor in tensors if tensor.shape != (0,)]  # torch leaves these out as well
    leader, new = leader_of(tensors), func.__name__ == "stack"
    if len(tensors) == 1 and not new:
        return leader
    dim %= len(leader.shape) + new
    if "out" in kwargs or (dim == leader.cut.dim and not new):
        raise refusal(
            func,
            leader,
            "it puts further tokens beside these",
            "leave a cache of keys and values out (use_cache=False)",
        )
    if any(tensor.dim() != leader.dim() or tensor.shape[leader.cut.dim] != leader.cut.length for tensor in tensors):
        return NotImplemented
    behind = leader.cut.dim - len(leader.shape)
    own = [own_operand(func, tensor, leader, behind) for tensor in tensors]
    return leader.like(func(own, dim), leader.cut.dim + (new and dim <= leader.cut.dim))


@rule(torch.view_as_complex, torch.view_as_real)
def complex_view(func: Callable, args: tuple, kwargs: dict) -> Any:  # noqa: ARG001
    """Read pairs of the last dim as complex numbers, or the other way round."""
    a = args[0]
    return (
        along_others(lambda tensor: func(tensor), a, -1, args, {}) if a.cut.dim < len(a.shape) - 1 else NotImplemented
    )


@rule(functional.layer_norm, getattr(functional, "rms_norm", None))
def norm(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Normalise over the last dims."""
    a, shape = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "normalized_shape")
    if sequence_tensors_in((args[1:], {name: value for name, value in kwargs.items() if name != "input"})):
        return NotImplemented
    return along_others(func, a, [-1 - dim for dim in range(len(shape))], args, kwargs)


# products

EAGER = 'use torch\'s F.scaled_dot_product_attention with is_causal=True (attn_implementation="sdpa" in transformers)'


@rule(functional.linear)
def linear(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Multiply the features of every token by a plain weight."""
    a = argument(args, kwargs, 0, "input")
    if not isinstance(a, SequenceTensor) or len(sequence_tensors_in((args, kwargs))) > 1:
        return NotImplemented
    return along_others(func, a, -1, args, kwargs)


@rule(*functions_named("matmul", "bmm", "__matmul__", "__rmatmul__"))
def matmul(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Multiply matrices in which tokens are rows, columns or a batch dim, and not what is summed over."""
    a, b = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "other", "mat2")
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    leader, ndim = leader_of(a, b), max(a.dim(), b.dim())
    if min(a.dim(), b.dim()) < 2 or "out" in kwargs:
        return NotImplemented
    for tensor, summed in ((a, -1), (b, -2)):
        if isinstance(tensor, SequenceTensor) and tensor.cut.dim - tensor.dim() == summed:
            raise refusal(func, leader, "it sums over tokens, of which each place holds others", EAGER)
    behind = leader.cut.dim - leader.dim()
    other = b if leader is a else a
    if behind >= -2:  # rows of a, or columns of b
        if isinstance(other, SequenceTensor):
            raise refusal(func, leader, "it multiplies tokens with tokens, of which each place holds others", EAGER)
        own = to_own((a, b))
    else:
        own = tuple(own_operand(func, tensor, leader, behind) for tensor in (a, b))
    return leader.like(torch.matmul(*own), ndim + behind)


@rule(torch.einsum)
def einsum(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Compute an einsum in which tokens have one letter, which is not summed over."""
    text, operands = args[0], args[1:]
    leader = leader_of(operands)
    equation = EinsumEquation.parse(text, len(operands)) if all(isinstance(one, Tensor) for one in operands) else None
    if kwargs or equation is None or equation.sizes(operands) is None:
        return NotImplemented
    letters = {
        one[operand.cut.dim]
        for one, operand in zip(equation.operands, operands, strict=True)
        if isinstance(operand, SequenceTensor)
    }
    letter = next(iter(letters))
    if len(letters) > 1 or letter not in equation.result:
        raise refusal(func, leader, "it multiplies tokens with tokens, or sums over them", EAGER)
    own = [
        own_operand(func, operand, leader, one.index(letter) - len(one)) if letter in one else operand
        for one, operand in zip(equation.operands, operands, strict=True)
    ]
    return leader.like(func(text, *own), equation.result.index(letter))


# attention


@rule(functional.scaled_dot_product_attention)
def attend(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Attend causally over all tokens of the group; [rows, heads, seq, head_dim] each."""
    named = {**dict(zip(ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}
    query, key, value = (named[name] for name in ATTENTION_ARGUMENTS[:3])
    leader = leader_of(query, key, value)
    for tensor in (query, key, value):
        if not isinstance(tensor, SequenceTensor) or not tensor.cut.is_full or tensor.cut.blocks != 1:
            raise refusal(func, leader, "its queries, keys and values are not the same whole sequences")
        if tensor.dim() != 4 or tensor.cut.dim != 2 or tensor.shape[:1] != query.shape[:1]:
            raise refusal(func, tensor, "attention over places takes [rows, heads, seq, head_dim]")
    if len({tensor.shape[-1] for tensor in (query, key, value)}) > 1:
        raise refusal(func, value, "attention over places takes values with the head_dim of the keys")
    if named.get("dropout_p"):
        raise refusal(
            func,
            leader,
            f"attention over places cannot drop weights (dropout_p={named['dropout_p']})",
            "set attention dropout to 0",
        )
    require_causal(func, leader, named.get("attn_mask"), causal=bool(named.get("is_causal")))
    q, k, v = _own_heads_of(func, query, key, value, grouped=bool(named.get("enable_gqa")))
    rows, _, own, size = q.shape
    scale, usual = named.get("scale"), size**-0.5
    q = q if scale in (None, usual) else q * (scale / usual)  # attention over tiles divides by the root of head_dim
    context, tokens = leader.context, leader.cut.tokens
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
    read = context.engine.alone(tokens.attention(rows).attend(q, k, v, context.engine, f"attention {context.label}"))
    local: Tensor = read.unflatten(0, (rows, own)).transpose(1, 2)
    if isinstance(query.local, GridTensor):
        local = GridTensor(local, query.local.placement, query.local.shape)
    return query.like(local)


def _own_heads_of(
    func: Callable, query: SequenceTensor, key: SequenceTensor, value: SequenceTensor, *, grouped: bool
) -> list[Tensor]:
    """Return the heads of this rank, as plain tensors [rows, heads, own tokens, head_dim]."""
    q, heads = query.local, query.shape[HEADS]
    if not isinstance(q, GridTensor):
        found: list[Any] = [q, *(to_whole(part.local) for part in (key, value))]
        if not grouped and any(part.shape[HEADS] not in (1, heads) for part in found):
            raise refusal(func, query, "queries and keys have different heads", "pass enable_gqa=True")
    else:
        placement = q.placement
        if type(placement) is not ChunkPlacement or placement.dim != HEADS or heads % placement.parts:
            placement = ChunkPlacement(query.context, HEADS, query.context.inner_axes)
            raise refusal(func, query, f"{heads} heads are not cut evenly over {' and '.join(placement.over)}")
        found = [q.local, *(own_heads(part.local, placement, heads, grouped=grouped) for part in (key, value))]
    counts = [0 if part is None else part.shape[HEADS] for part in found]
    if not all(counts) or counts[1] != counts[2] or counts[0] % counts[1]:
        raise refusal(func, query, "its ranks do not hold the KV heads of their queries")
    return found


def require_causal(func: Callable, query: SequenceTensor, mask: Any, *, causal: bool) -> None:
    """Refuse attention that is not causal. A mask is recognised by comparing it with the causal one."""
    if mask is None:
        if not causal:
            raise refusal(
                func, query, "every token reads all tokens (is_causal=False)", "use is_causal=True for a causal model"
            )
        return
    known, version = query.context.causal_masks, version_of(mask)
    if not any(one is mask and then == version for one, then in known):
        if isinstance(mask, SequenceTensor) or not is_causal_mask(to_whole(mask), query.cut.tokens.seq) or causal:
            raise refusal(
                func,
                query,
                f"its mask {tuple(mask.shape)} is not the causal one (padding, a window, a bias or documents)",
                "leave the mask out: causal tokens do not read padding behind them, and targets of -100 do not count",
            )
        known.append((mask, version))  # all layers of a pass read the same mask


def is_causal_mask(mask: Tensor, seq: int) -> bool:
    """Return whether a mask [..., seq, seq] lets every token read itself and all tokens before it, and no other.

    It is boolean, or added to scores: then it is 0 where a token is read and elsewhere so low that exp gives 0.
    """
    if mask.shape[-2:] != (seq, seq):
        return False
    lower = torch.ones(seq, seq, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype is torch.bool:
        return bool((mask == lower).all())
    if not mask.is_floating_point() or mask.requires_grad:
        return False
    lowest = max(torch.finfo(mask.dtype).min, -1e9)
    return bool(torch.where(lower, mask == 0, mask <= lowest).all())


# losses

SAME_SHAPES = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss
soft_margin_loss
"""
ELEMENTWISE_LOSSES = {getattr(functional, name) for name in SAME_SHAPES.split()}
"""Losses of each element by itself, whose operands broadcast."""
CLASS_LOSSES = {functional.cross_entropy, functional.nll_loss}
"""Losses of input [n, classes, ...] and targets [n, ...], or [n, classes, ...] with probabilities."""


def own_targets(func: Callable, named: dict[str, Any]) -> tuple[SequenceTensor, dict[str, Any], int]:
    """Return the leading operand of a loss, the arguments with this member's tokens, and the dim of tokens in a loss
    with reduction="none"."""
    leader, dim = leader_of(named), leader_of(named).cut.dim
    behind = dim - len(leader.shape)
    if func in ELEMENTWISE_LOSSES:
        return (
            leader,
            {
                name: own_operand(func, value, leader, behind) if isinstance(value, Tensor) else value
                for name, value in named.items()
            },
            dim,
        )
    input, target = named["input"], named["target"]
    if func not in CLASS_LOSSES or input is not leader or len(leader.shape) < 2 or dim == 1:
        raise refusal(func, leader, "this loss is not known to treat tokens by themselves", "use F.cross_entropy")
    if target.is_floating_point():
        own = own_operand(func, target, leader, behind)
    else:
        dim = dim if dim == 0 else dim - 1  # targets have no dim of classes
        if target.shape != (*leader.shape[:1], *leader.shape[2:]):
            raise refusal(func, leader, f"targets {tuple(target.shape)} do not fit it")
        own = own_operand(func, target, leader, dim - len(target.shape))
    return leader, {**named, "input": leader.local, "target": to_whole(own)}, dim

"""`SequenceTensor`: a tensor that looks whole to model code while this place holds its own tokens of it.

On a grid with a context size the places of a group read the same rows. Ids, positions, masks, labels and tables that
model code makes from them are plain tensors: whole, and equal on all members. The stream is cut where ids are looked up
(`ops_sequence.embed`): from there on a member computes with its own tokens. Model code sees the logical shape
[rows, seq, ...]. A plain tensor that meets the stream is cut by the index of the member's tokens.

The local tensor is plain, or a `GridTensor` that is cut over x and y as well: neither knows of the other's cut.

An operation that treats every token by itself runs on the member's tokens. Causal attention goes to
`ContextAttention`. Sums over tokens are summed over the group. Any other operation is refused: a rule decides by names
and shapes, so that all members refuse alike, and nothing is ever silently wrong.

Gradients are averaged over places, of which each has a loss L that it computes in full. So an operation that brings
members' values together has the sum of all members' gradients as its gradient:

    group_sum   s = sum_i a_i          da_i = sum_j ds_j
    whole       w = join(a_0, a_1, ..) da_i = take_i(sum_j dw_j)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Size, Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold import comm
from fourfold.axes import CONTEXT
from fourfold.operators import Conjugate
from fourfold.wrap.grid_tensor import (
    CutTensor,
    GridTensor,
    ModelContext,
    OperationRule,
    ShardedPlacement,
    gather_parameters_in,
    is_in_place,
    refuse_in_autograd_function,
    to_whole,
)
from fourfold.wrap.own_tokens import SequenceCut

SEQUENCE_RULES: dict[Callable, OperationRule] = {}
"""The rules by torch function; `ops_sequence.py` registers them."""


class SequenceTensor(CutTensor):
    """A tensor with a dim of tokens, of which this member of a context group holds its own in `local`."""

    cut: SequenceCut
    context: ModelContext

    @staticmethod
    def __new__(cls, local: Tensor, cut: SequenceCut, context: ModelContext) -> SequenceTensor:
        if isinstance(local, SequenceTensor) or local.shape[cut.dim] != cut.own:
            raise TypeError(f"a tensor {tuple(local.shape)} does not hold {cut.own} tokens in dim {cut.dim}")
        shape = Size((*local.shape[: cut.dim], cut.length, *local.shape[cut.dim + 1 :]))
        new = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        new._shape, new._local, new.cut, new.context, new.made = shape, local, cut, context, context.label
        return new

    def like(self, local: Tensor, dim: int | None = None) -> SequenceTensor:
        """Return another local tensor with the same tokens, in the same dim or in another."""
        return SequenceTensor(local, self.cut if dim is None else self.cut.at(dim), self.context)

    def whole(self) -> Tensor:
        """Gather all tokens from the members of the group, and the parts over x and y."""
        cut, tokens = self.cut, self.cut.tokens
        local = to_whole(self.local).unflatten(cut.dim, (cut.blocks, -1)).movedim(cut.dim + 1, 0)
        if not cut.is_full:  # members send equally many tokens, whatever part of them is asked for
            first = SequenceCut(tokens, 0, 0, tokens.seq).own_before(cut.start)
            full = local.new_zeros(sum(map(len, tokens.held)), *local.shape[1:])
            local = torch.cat([full[:first], local, full[first + len(local) :]])
        order = tokens.all_positions()

        def gather(own: Tensor) -> Tensor:
            flag = own.dtype is torch.bool
            sent = own.to(torch.uint8) if flag else own
            joined = comm.all_gather(sent.contiguous(), tokens.grid, CONTEXT, label=self.context.label).wait()
            return torch.empty_like(joined).index_copy_(0, order, joined).to(own.dtype)

        def give_back(gradient: Tensor) -> Tensor:
            joined = gradient.index_select(0, order)
            return comm.reduce_scatter(joined, tokens.grid, CONTEXT, label=self.context.label).wait()

        every = Conjugate.apply(local, gather, give_back)[cut.start : cut.stop]
        return every.movedim(0, cut.dim + 1).flatten(cut.dim, cut.dim + 1).contiguous()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"SequenceTensor({tuple(self._shape)}, tokens in dim {self.cut.dim}, local {tuple(self.local.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, args = kwargs or {}, gather_parameters_in(args)
        found = sequence_tensors_in((args, kwargs))
        if not torch.is_grad_enabled():
            for tensor in found:
                refuse_in_autograd_function(tensor.context, trained=tensor.requires_grad)
        rule = SEQUENCE_RULES.get(func)
        try:
            result = NotImplemented if rule is None else rule(func, args, kwargs)
            if result is NotImplemented:
                raise refusal(func, found[0], "it may mix tokens, of which each place holds others")
        except MixedTokensError:
            if found[0].context.in_pass or is_in_place(getattr(func, "__name__", "")):
                raise
            # outside of the model: whoever reads its result needs all tokens
            args, kwargs = tree_map_only(SequenceTensor, SequenceTensor.whole, (args, kwargs))
            return func(*args, **kwargs)
        if isinstance(result, SequenceTensor) and args and isinstance(args[0], SequenceTensor):
            result.made = args[0].made  # an error then names the layer that made the values, not the last reshape
        return result


class MixedTokensError(RuntimeError):
    """An operation that cannot run on the tokens of one member of a context group.

    It is a RuntimeError because `a + b` takes a TypeError for an operand that it does not know.
    """


def sequence_tensors_in(values: Any) -> list[SequenceTensor]:
    """Return the sequence tensors among nested arguments."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, SequenceTensor)]


def to_own(values: Any) -> Any:
    """Replace the sequence tensors among nested arguments by their local tensors."""
    return tree_map_only(SequenceTensor, lambda tensor: tensor.local, values)


def refusal(func: Any, tensor: SequenceTensor, why: str, remedy: str = "") -> MixedTokensError:
    """Return the error for an operation that cannot run on the tokens of one member."""
    name = func if isinstance(func, str) else getattr(func, "__name__", str(func))
    grid = tensor.context.grid
    remedy = f"{remedy}, or use" if remedy else "use"
    return MixedTokensError(
        f"{name} on a tensor {tuple(tensor.shape)} made {tensor.made}, whose dim {tensor.cut.dim} (tokens) is cut over "
        f"context={grid.shape.context}: {why}; {remedy} a grid with context=1"
    )


def group_sum(own: Tensor, context: ModelContext) -> Tensor:
    """Return the sum of the members' values, on all members."""

    def add(part: Tensor) -> Tensor:
        return comm.all_reduce(part, context.grid, CONTEXT, label=context.label).wait()

    if isinstance(own, GridTensor) and not isinstance(own.placement, ShardedPlacement):
        own = own.whole()
    if isinstance(own, GridTensor):
        return own.like(group_sum(own.local, context))
    return Conjugate.apply(own, add, add)


def by_token(function: Callable[..., Any], tensor: SequenceTensor) -> Any:
    """Apply a function of [..., features] that treats every token by itself."""
    if tensor.cut.dim == len(tensor.shape) - 1:
        raise refusal("a layer", tensor, "its features are tokens, which it mixes")
    return tree_map_only(Tensor, tensor.like, function(tensor.local))

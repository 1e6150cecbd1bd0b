"""The 3D product: the algorithm on one screen. Shapes and equations are numbered as in docs/math.md.

    Expand     rest  -> enter   -> product [m/z, n/x] {sum y} -> spread -> inner
    Contract   inner -> collect -> product [m/z, k/y] {sum x} -> leave  -> rest

`Product` multiplies by weights that are gathered over z. It depends neither on the layout of its input, nor on the mode
of activations, nor on the size of an axis. Its backward computes da at once, because the layers before wait for it, and
puts dw into the `WgradQueue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import comm, kernels
from fourfold.comm import Pending
from fourfold.engine import Turns
from fourfold.layout import GATHERED
from fourfold.operators import Body, OpContext, collect, enter, identity, once_differentiable
from fourfold.param_group import GroupMember, ParamGroup
from fourfold.params import local_of

MEMORY = "_fourfold_memory"
"""Attribute of the first of several weights that lie side by side: their common memory. Copies do not have it."""
ZEROS_BEHIND = "_fourfold_zeros_behind"
"""Attribute of the last weight in such a memory: the rows of zeros that lie behind it, as padding for a product."""


class Gathered(NamedTuple):
    """The weights of a product side by side, its bias, and the memory that can be reused afterwards."""

    w: Tensor
    bias: Tensor | None
    buffers: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Factor:
    """The weights of one product side by side, w[sum p_i, k], and its biases."""

    group: ParamGroup
    weights: tuple[GroupMember, ...]
    biases: tuple[GroupMember, ...]
    widths: tuple[int, ...]
    """The p_i: rows of each weight on this rank, and the padding of a vocabulary (`layout.logits_columns`)."""
    columns: tuple[range, ...]
    """The columns of the output to which each bias is added; a rank may hold a part of a bias."""
    adds: bool
    """Whether this rank adds the biases: of ranks whose outputs are partial sums, one does."""
    keep_weights: bool

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [member.parameter for member in self.group.members]

    def using(self, *, biases: bool, turns: int) -> AbstractContextManager[Gathered]:
        """Yield the weights w[sum p_i, k], and with `biases` b[sum p_i], for one of `turns` halves."""
        group = self.group if biases else self.group.only(self.weights)
        launch = partial(self.gather, biases=biases)
        keep = biases and self.keep_weights
        return group.gathered(("factor", biases), launch, lambda gathered: gathered.buffers, turns=turns, keep=keep)

    def multiplying(self, equation: str) -> AbstractContextManager[None]:
        return self.group.grid.ledger.multiplying(f"{equation} {self.group.label}")

    def gather(self, *, biases: bool) -> Pending[Gathered]:
        """Launch the gather of weights and biases, in one message."""
        w = self._joined()
        if w is not None:
            if not (biases and self.adds):
                return Pending(lambda: Gathered(w, None, ()))
            return self.group.only(self.biases).gather().then(lambda wholes: Gathered(w, self._bias(w, wholes), ()))
        joint, into = self._buffer(biases=biases)
        group = self.group if biases else self.group.only(self.weights)

        def arrange(wholes: list[Tensor]) -> Gathered:
            w, vectors = wholes[0] if joint is None else joint, wholes[len(self.weights) :]
            bias = self._bias(w, vectors) if biases and self.adds else None
            return Gathered(w, bias, [w, *vectors] if joint is not None or group.even else ())

        shards = group.shards(copied=into is not None)
        into = into or group.buffers(shards)
        gathering = comm.all_gather_together(
            shards, group.grid, GATHERED, rows=group.rows, into=into, label=group.label
        )
        return gathering.then(arrange)

    def _bias(self, w: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
        if not parts:
            return None
        if sum(len(columns) for columns in self.columns) == len(w):
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))
        bias = w.new_zeros(len(w))
        for columns, part in zip(self.columns, parts, strict=True):
            bias[columns.start : columns.stop] = part
        return bias

    def add_gradients(self, dout: Tensor, a: Pending[Tensor], turns: int) -> None:
        """Compute E3 and E4 of one of `turns` halves; the last half launches the reduction of the sum over z."""
        trained = self.group.only([member for member in self.group.members if member.parameter.requires_grad])
        sums = trained.engine.sums
        # not the members alone: a tied table has padded rows here and none in the embedding
        key = ("product", trained.members)
        begun = sums.begun(key) or []
        found: list[Tensor] = []
        with_weights = any(member in trained.members for member in self.weights)
        if with_weights:
            whole = a.wait()
            with self.multiplying("E3"):
                found.append(matmul_into(dout.t(), whole, self.group.reduce_dtype, onto=begun[0] if begun else None))
        if any(member in trained.members for member in self.biases):
            parts = self.sums_over_tokens(dout)  # E4
            for total, part in zip(begun[with_weights:], parts, strict=False):
                total.add_(part)
            found += begun[with_weights:] or parts
        complete = sums.add(key, found, turns)
        if complete is not None:
            by_member = dict(zip(self.biases, complete[with_weights:], strict=False))
            if with_weights:
                parts = zip(self.weights, complete[0].split(list(self.widths)), strict=True)
                by_member |= {member: part[: member.rows] for member, part in parts}
            trained.scatter([by_member[member] for member in trained.members], turns=turns)

    def sums_over_tokens(self, dout: Tensor) -> list[Tensor]:
        """Return the gradient of each bias, computed in one pass if the biases cover all columns."""
        run = kernels.region(kernels.sum_tokens, dout, compiled=self.group.policy.compile)
        if self.group.policy.compile:
            torch._dynamo.mark_static(dout, 1)  # a kernel for any width would take twice the time
        widths = [len(columns) for columns in self.columns]
        if sum(widths) == dout.shape[1]:
            return list(run(dout, self.group.reduce_dtype).split(widths))
        return [run(dout[:, columns.start : columns.stop], self.group.reduce_dtype) for columns in self.columns]

    def _joined(self) -> Tensor | None:
        """Return the weights as one tensor if they need no gather and lie side by side already, with their padding."""
        rows = tuple(member.rows for member in self.weights)
        if self.group.grid.size(GATHERED) > 1 or rows[:-1] != self.widths[:-1]:
            return None
        joined = side_by_side([member.parameter for member in self.weights], padding=self.widths[-1] - rows[-1])
        return None if joined is None else joined.to(self.group.compute_dtype)

    def _buffer(self, *, biases: bool = True) -> tuple[Tensor | None, list[Tensor] | None]:
        """Return one buffer for weights that must lie side by side, and each member's part of it."""
        rows = [member.rows for member in self.weights]
        if len(rows) == 1 and rows[0] == self.widths[0]:
            return None, None
        like = local_of(self.weights[0].parameter)
        take = partial(self.group.engine.buffers.take, dtype=self.group.compute_dtype, device=like.device)
        w = take((sum(self.widths), like.shape[1]))
        into = []
        for place, length in zip(w.split(list(self.widths)), rows, strict=True):
            place[length:].zero_()
            into.append(place[:length])
        if biases:
            into += [take((len(columns),)) for columns in self.columns]
        return w, into


def side_by_side(parameters: Sequence[nn.Parameter], padding: int = 0) -> Tensor | None:
    """Return shards joined along dim 0 without a copy, if they still lie where they were made, one after the other.

    With `padding` that many rows of zeros follow, if they were reserved.
    """
    parts = [local_of(parameter).detach() for parameter in parameters]
    if len(parts) == 1 and not padding:
        return parts[0]
    if padding > getattr(parameters[-1], ZEROS_BEHIND, 0):
        return None
    memory = getattr(parameters[0], MEMORY, None)
    expected = -1 if memory is None else memory.data_ptr()
    for part in parts:
        if part.data_ptr() != expected or not part.is_contiguous():
            return None
        expected += part.nbytes
    rows, row = sum(part.shape[0] for part in parts) + padding, parts[0].shape[1:]
    return memory[: rows * row.numel()].view(rows, *row)  # type: ignore[index]  # others may lie behind these


class Product(torch.autograd.Function):
    """out = a w^T + b, with w stored cut over z.

        a     [m/z, k]           E1   out = a w^T + b        w gathered over z
        out   [m/z, p] {sum s}   E2   da  = dout w           w gathered over z again
        dout  [m/z, p]           E3   dw  = dout^T a         reduce-scattered over z
                                 E4   db  = sum over tokens of dout, in its columns

    For backward it keeps `kept`: either `a`, or the cut tensor that `a` was gathered from; then `reread` gathers `a`
    again, behind E2.
    """

    @staticmethod
    def forward(ctx: Any, factor: Factor, reread: Body, a: Tensor, kept: Tensor, *_: nn.Parameter) -> Tensor:
        ctx.factor, ctx.reread, ctx.turns = factor, reread, factor.group.engine.turn.of
        with factor.using(biases=True, turns=ctx.turns) as gathered, factor.multiplying("E1"):
            ctx.save_for_backward(kept, gathered.w if factor.keep_weights else None)
            return functional.linear(a, gathered.w, gathered.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        factor: Factor = ctx.factor
        engine = factor.group.engine
        kept, w = ctx.saved_tensors
        reread = identity  # frozen weights need no `a`
        if any(member.parameter.requires_grad for member in factor.weights):
            reread = ctx.reread
        # launched before E2, so that the message travels behind it
        reading = reread(kept) if engine.policy.wgrad_behind_messages else None
        da = None
        if ctx.needs_input_grad[2]:
            kept_whole = None if w is None else nullcontext(Gathered(w, None, ()))
            with kept_whole or factor.using(biases=False, turns=ctx.turns) as gathered, factor.multiplying("E2"):
                da = dout @ gathered.w
        if any(member.parameter.requires_grad for member in factor.group.members):
            factor.group.gradients.expect_end()
            engine.wgrad_queue.add(lambda: factor.add_gradients(dout, reading or reread(kept), ctx.turns))
        return (None, None, da, *[None] * (len(ctx.needs_input_grad) - 3))


def matmul_into(a: Tensor, b: Tensor, dtype: torch.dtype, onto: Tensor | None = None) -> Tensor:
    """Return a b, or `onto` + a b in place, in `dtype`.

    A GPU accumulates and writes the product of narrower factors in fp32: nothing is rounded on the way, nothing is cast
    afterwards.
    """
    if a.is_cuda and a.dtype != dtype == torch.float32:
        if onto is None:
            return torch.mm(a, b, out_dtype=dtype)
        return torch.ops.aten.addmm.dtype_out(onto, a, b, dtype, out=onto)
    if onto is None:
        return (a @ b).to(dtype)
    return onto.addmm_(a, b) if a.dtype == dtype else onto.add_(a @ b)


def expand(factor: Factor, a: Tensor, site: OpContext) -> Turns[Tensor]:
    """rest -> enter -> product [m/z, p] {sum y}; `spread` makes it inner."""
    if a.shape[0] != site.rows_at_rest:
        raise ValueError(
            f"{site.label}: {site.tokens} tokens of a place are {site.rows_at_rest} rows on a rank with "
            f"{site.policy.activations} activations on the grid {site.grid}, but the input has {a.shape[0]}"
        )
    entering = enter(a, site)
    if entering.travels:
        yield
    whole = entering.wait()
    if not site.sharded or site.policy.keep_gathered:
        return Product.apply(factor, identity, whole, whole.detach(), *factor.parameters)
    return Product.apply(factor, site.gather_tokens, whole, a.detach(), *factor.parameters)


def contract(factor: Factor, a: Tensor, site: OpContext, width: int) -> Turns[Tensor]:
    """inner -> collect -> product [m/z, p] {sum x}; `leave` brings it to rest."""
    collecting = collect(a, site, width)
    if collecting.travels:
        yield
    whole = collecting.wait()
    if not site.sharded or site.policy.keep_gathered:
        return Product.apply(factor, identity, whole, whole.detach(), *factor.parameters)
    reread = partial(site.gather_features, widths=[width])
    return Product.apply(factor, reread, whole, a.detach(), *factor.parameters)

"""The 3D product: the algorithm on one screen. Shapes and equations are numbered as in docs/math.md.

    Expand     rest  -> enter   -> product [m/z, n/x] {sum y} -> spread -> inner
    Contract   inner -> collect -> product [m/z, k/y] {sum x} -> leave  -> rest

`Product` multiplies by weights that are gathered over z. It depends neither on the layout of its input, nor on the mode
of activations, nor on the size of an axis. Its backward computes da at once, because the layers before wait for it, and
puts dw into the `WgradQueue`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import kernels
from fourfold.comm import Pending
from fourfold.engine import Turns
from fourfold.gradients import ForwardPass
from fourfold.operators import Body, OpContext, collect, enter, once_differentiable
from fourfold.param_group import ZEROS_BEHIND, ParamGroup, Parcel, launch_together
from fourfold.params import local_of, shards_of

MEMORY = "_fourfold_memory"
"""Attribute of the first of several weights that lie side by side: their common memory. Copies do not have it."""


class Gathered(NamedTuple):
    """The weights of a product side by side, its bias, and the memory that can be reused afterwards."""

    w: Tensor
    bias: Tensor | None
    buffers: Sequence[Tensor]


class SideBySide:
    """The weights of a product as the engine gathers them, w[sum p_i, k], with the biases or without."""

    def __init__(
        self, group: ParamGroup, weights: ParamGroup, widths: Sequence[int], columns: Sequence[range], *, adds: bool
    ) -> None:
        """`group` holds `weights`, then a bias for each of `columns`. `widths`, `columns`, `adds`: as in `Factor`."""
        self.group, self.weights, self.widths, self.columns, self.adds = group, weights, widths, columns, adds
        self.grid, self.label = group.grid, group.label
        self.biases = group.only(group.members[len(weights.members) :])
        self.padded = weights.rows != list(widths)
        self._padding = widths[-1] - weights.rows[-1]  # rows of zeros behind the last weight
        self._may_lie_joined = not group.travels and weights.rows[:-1] == list(widths[:-1])
        self.axis = group.axis
        self.key = "side by side", group is weights, *group.key
        self.kind = f"side by side, {group.kind}"
        self.message = self.kind, *group.message[1:]
        self.parameters, self.is_current = group.parameters, group.is_current
        self.nbytes = group.nbytes
        self._places: list[int] = []  # where the weights of `_joint` lie
        self._joint: Tensor | None = None

    def version(self) -> list[tuple[int, int]]:
        return self.group.version()

    def adopt(self, gathered: Gathered | list[Tensor]) -> Gathered:
        if isinstance(gathered, Gathered):
            return gathered
        parcel = self.parcel()
        pairs = zip(gathered, parcel.into or [None] * len(gathered), strict=True)
        return parcel.arrange([whole if buffer is None else buffer.copy_(whole) for whole, buffer in pairs])

    def buffers(self, gathered: Gathered) -> Sequence[Tensor]:
        return gathered.buffers

    launch = launch_together

    def parcel(self) -> Parcel[Gathered]:
        group, (joint, into) = self.group, self._buffer()

        def arrange(wholes: list[Tensor]) -> Gathered:
            w, vectors = wholes[0] if joint is None else joint, wholes[len(self.widths) :]
            reused = group.travels and (joint is not None or group.even)
            return Gathered(w, self._bias(w, vectors), [w, *vectors] if reused else ())

        shards = group.shards(copied=into is not None)
        return Parcel(shards, group.rows, into or group.reserve(shards), arrange)

    def _bias(self, w: Tensor, parts: Sequence[Tensor]) -> Tensor | None:
        if not parts or not self.adds:
            return None
        if sum(map(len, self.columns)) == len(w):
            return parts[0] if len(parts) == 1 else torch.cat(list(parts))
        bias = w.new_zeros(len(w))
        for columns, part in zip(self.columns, parts, strict=True):
            bias[columns.start : columns.stop] = part
        return bias

    def at_hand(self) -> Gathered | None:
        """Return the weights as one tensor if they lie side by side already, with their padding, and the biases."""
        if not self._may_lie_joined:
            return None
        shards, dtype = self.group.shards(copied=True), self.group.compute_dtype
        weights, biases = shards[: len(self.widths)], shards[len(self.widths) :]
        alone = len(weights) == 1 and not self._padding
        w = weights[0] if alone else self._joint
        if not alone and (places := [shard.data_ptr() for shard in weights]) != self._places:
            w = self._joint = self._joined(weights)
            self._places = places
        if w is None:
            return None
        if w.dtype is not dtype:
            w, biases = w.to(dtype), [bias.to(dtype) for bias in biases]
        return Gathered(w, self._bias(w, biases), ())

    def _joined(self, weights: Sequence[Tensor]) -> Tensor | None:
        """Return the weights with their padding as one tensor without a copy, or None if they lie apart."""
        parameters = self.weights.parameters
        if self._padding > getattr(parameters[-1], ZEROS_BEHIND, 0):
            return None
        if weights[0].dtype is not parameters[0].dtype:  # casts that are kept
            return adjacent(weights, self._padding)
        return side_by_side(parameters, self._padding)

    def _buffer(self) -> tuple[Tensor | None, list[Tensor] | None]:
        """Return one buffer for weights that must lie side by side, and each member's part of it."""
        rows = self.weights.rows
        if len(rows) == 1 and not self.padded:
            return None, None
        like = local_of(self.weights.parameters[0])
        take = partial(self.group.engine.buffers.take, dtype=self.group.compute_dtype, device=like.device)
        w = take((sum(self.widths), like.shape[1]))
        into = []
        for place, length in zip(w.split(list(self.widths)), rows, strict=True):
            place[length:].zero_()
            into.append(place[:length])
        return w, [*into, *(take((len(columns),)) for columns in self.columns)]


class Factor:
    """The weights of one product side by side, w[sum p_i, k], and its biases. Made once and kept by the layer."""

    def __init__(
        self,
        group: ParamGroup,
        widths: tuple[int, ...],
        columns: tuple[range, ...],
        *,
        adds: bool,
        keep_weights: bool,
    ) -> None:
        """`group` holds a weight for each of `widths`, then a bias for each of `columns`.

        `widths` are the p_i: rows of each weight on this rank, and the padding of a vocabulary
        (`layout.logits_columns`). `columns` are those of the output to which each bias is added; a rank may hold a part
        of a bias. `adds` says whether this rank adds the biases: of ranks whose outputs are partial sums, one does.
        """
        self.group, self.widths, self.columns, self.keep_weights = group, widths, columns, keep_weights
        self.weights, self.biases = group.members[: len(widths)], group.members[len(widths) :]
        self.matrices = group.only(self.weights, "weights")
        self.with_biases = SideBySide(group, self.matrices, widths, columns, adds=adds)
        self.without = SideBySide(self.matrices, self.matrices, widths, (), adds=False)
        """What backward reads: it needs no biases."""
        self.ledger = group.grid.ledger
        self.e1, self.e2, self.e3 = (f"{equation} {group.label}" for equation in ("E1", "E2", "E3"))
        self._trained = group, True, bool(columns)

    @cached_property
    def again(self) -> SideBySide:
        """What a backward reads that computes E1 a second time."""
        group, side = self.group.only(self.group.members, "again"), self.with_biases
        return SideBySide(group, self.matrices, side.widths, side.columns, adds=side.adds)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.group.parameters

    @property
    def trained(self) -> tuple[ParamGroup, bool, bool]:
        """The members that have gradients, and whether weights and biases are among them."""
        group = self.group.trained
        if self._trained[0] is not group:
            with_weights, with_biases = (any(m in group.members for m in each) for each in (self.weights, self.biases))
            self._trained = group, with_weights, with_biases
        return self._trained

    def add_gradients(self, dout: Tensor, a: Tensor | Pending[Tensor], turns: int, during: ForwardPass) -> None:
        """Compute E3 and E4 of one of `turns` halves; the last half launches the reduction of the sum over z."""
        begun = [] if turns == 1 else self.begun()
        self.hand_in(self.add_tokens(begun, dout, a), turns, during)

    def begun(self) -> list[Tensor]:
        """Return the gradients that earlier halves have left; empty if there are none."""
        return self.group.engine.sums.begun(self._sums_key) or []

    def add_tokens(self, begun: list[Tensor], dout: Tensor, a: Tensor | Pending[Tensor]) -> list[Tensor]:
        """Return the gradients of weights side by side, then of biases: E3 and E4 of these tokens onto `begun`."""
        group, with_weights, with_biases = self._trained if self._trained[0] is self.group.trained else self.trained
        found: list[Tensor] = []
        if with_weights:
            whole = a.wait() if isinstance(a, Pending) else a
            with self.ledger.multiplying(self.e3):
                found.append(matmul_into(dout.t(), whole, group.reduce_dtype, onto=begun[0] if begun else None))
        if with_biases:
            parts = self.sums_over_tokens(dout)  # E4
            for total, part in zip(begun[with_weights:], parts, strict=False):
                total.add_(part)
            found += begun[with_weights:] or parts
        return found

    @property
    def _sums_key(self) -> Hashable:
        # not the members alone: a tied table has padded rows here and none in the embedding
        return "product", self.trained[0].members

    def hand_in(self, found: list[Tensor], turns: int, during: ForwardPass) -> None:
        """Take the gradients of one of `turns` halves, as `add_tokens` made them of those of earlier halves."""
        group, with_weights, with_biases = self._trained
        complete = group.engine.sums.add(self._sums_key, found, turns) if turns > 1 else found
        if complete is None:
            return
        gradients = [*self._parts(complete[0]), *complete[1:]] if with_weights else complete
        if group is not self.group:
            members = (*(self.weights if with_weights else ()), *(self.biases if with_biases else ()))
            pairs = zip(members, gradients, strict=True)
            gradients = [gradient for member, gradient in pairs if member in group.members]
        group.scatter(gradients, turns=turns, during=during)

    def split(self, dw: Tensor, db: Tensor | None = None) -> list[Tensor]:
        """Return the gradient of each member from those of the weights and biases side by side."""
        return [*self._parts(dw), *([] if db is None else db.split([len(columns) for columns in self.columns]))]

    def _parts(self, dw: Tensor) -> list[Tensor]:
        """Return the gradient of each weight."""
        parts = [dw] if len(self.widths) == 1 else list(dw.split(self.widths))
        if not self.without.padded:
            return parts
        return [part[:rows] for part, rows in zip(parts, self.matrices.rows, strict=True)]

    def sums_over_tokens(self, dout: Tensor) -> list[Tensor]:
        """Return the gradient of each bias, computed in one pass if the biases cover all columns."""
        run = kernels.region(kernels.sum_tokens, dout, compiled=self.group.policy.compile)
        if self.group.policy.compile:
            torch._dynamo.mark_static(dout, 1)  # a kernel for any width would take twice the time
        widths = [len(columns) for columns in self.columns]
        if sum(widths) != dout.shape[1]:
            return [run(dout[:, columns.start : columns.stop], self.group.reduce_dtype) for columns in self.columns]
        whole = run(dout, self.group.reduce_dtype)
        return [whole] if len(widths) == 1 else list(whole.split(widths))


def side_by_side(parameters: Sequence[nn.Parameter], padding: int = 0) -> Tensor | None:
    """Return shards joined along dim 0 without a copy, if they still lie where they were made, one after the other.

    With `padding` that many rows of zeros follow.
    """
    shards = shards_of(parameters)
    memory = getattr(parameters[0], MEMORY, None)
    expected = -1 if memory is None else memory.data_ptr()
    for shard in shards:
        if shard.data_ptr() != expected or not shard.is_contiguous():
            return None
        expected += shard.nbytes
    rows, row = sum(shard.shape[0] for shard in shards) + padding, shards[0].shape[1:]
    return memory[: rows * row.numel()].view(rows, *row)  # type: ignore[index]  # others may lie behind these


def adjacent(shards: Sequence[Tensor], padding: int) -> Tensor | None:
    """Return shards joined along dim 0, with what lies behind them, if they are parts of one storage in this order."""
    memory, offset = shards[0].untyped_storage()._cdata, shards[0].storage_offset()
    for shard in shards:
        if (shard.untyped_storage()._cdata, shard.storage_offset()) != (memory, offset):
            return None
        offset += shard.numel()
    rows = sum(shard.shape[0] for shard in shards) + padding
    return shards[0].as_strided((rows, *shards[0].shape[1:]), shards[0].stride())


class Product(torch.autograd.Function):
    """out = a w^T + b, with w stored cut over z.

        a     [m/z, k]           E1   out = a w^T + b        w gathered over z
        out   [m/z, p] {sum s}   E2   da  = dout w           w gathered over z again
        dout  [m/z, p]           E3   dw  = dout^T a         reduce-scattered over z
                                 E4   db  = sum over tokens of dout, in its columns

    For backward it keeps `a`, or `cut`, the cut tensor that `a` was gathered from; then `reread` gathers `a` again,
    behind E2.
    """

    @staticmethod
    def forward(
        ctx: Any, factor: Factor, reread: Body | None, a: Tensor, cut: Tensor | None, *_: nn.Parameter
    ) -> Tensor:
        engine, wanted = factor.group.engine, factor.with_biases
        ctx.factor, ctx.reread, ctx.turns, ctx.during = factor, reread, engine.turn.of, factor.group.use()
        held = engine.prefetcher.take(wanted, ctx.turns)
        w, bias = held.value.w, held.value.bias
        ctx.save_for_backward(a if cut is None else cut, w if factor.keep_weights else None)
        with factor.ledger.multiplying(factor.e1):
            out = functional.linear(a, w, bias)
        engine.prefetcher.release(wanted, held, keep=factor.keep_weights)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        factor: Factor = ctx.factor
        engine, turns = factor.group.engine, ctx.turns
        kept, w = ctx.saved_tensors
        group, with_weights, _ = factor.trained
        reread = ctx.reread if with_weights else None  # frozen weights need no `a`
        early = engine.policy.wgrad_behind_messages
        # launched before E2, so that the message travels behind it
        reading = reread(kept) if early and reread is not None else kept
        da = None
        if ctx.needs_input_grad[2]:
            held = engine.prefetcher.take(factor.without, turns) if w is None else None
            with factor.ledger.multiplying(factor.e2):
                da = dout @ (w if held is None else held.value.w)
            if held is not None:
                engine.prefetcher.release(factor.without, held)
        if group.members:
            factor.group.gradients.expect_end()

            def add_gradients() -> None:
                a = reading if early or reread is None else reread(kept)
                factor.add_gradients(dout, a, turns, ctx.during)

            engine.wgrad_queue.add(add_gradients)
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


def wrong_rows(a: Tensor, site: OpContext) -> ValueError:
    """Return the error of a tensor at rest that has other rows than the tokens of the place make on this rank."""
    return ValueError(
        f"{site.label}: {site.tokens} tokens of a place are {site.rows_at_rest} rows on a rank with "
        f"{site.policy.activations} activations on the grid {site.grid}, but the input has {a.shape[0]}"
    )


def expand(factor: Factor, a: Tensor, site: OpContext) -> Turns[Tensor]:
    """rest -> enter -> product [m/z, p] {sum y}; `spread` makes it inner."""
    if a.shape[0] != site.rows_at_rest:
        raise wrong_rows(a, site)
    entering = enter(a, site)
    if entering.travels:
        yield
    whole = entering.wait()
    if not entering.travels or not site.sharded or site.policy.keep_gathered:
        return Product.apply(factor, None, whole, None, *factor.parameters)
    return Product.apply(factor, site.gather_tokens, whole, a.detach(), *factor.parameters)


def contract(factor: Factor, a: Tensor, site: OpContext, width: int) -> Turns[Tensor]:
    """inner -> collect -> product [m/z, p] {sum x}; `leave` brings it to rest."""
    collecting = collect(a, site, width)
    if collecting.travels:
        yield
    whole = collecting.wait()
    if not collecting.travels or not site.sharded or site.policy.keep_gathered:
        return Product.apply(factor, None, whole, None, *factor.parameters)
    reread = partial(site.gather_features, widths=[width])
    return Product.apply(factor, reread, whole, a.detach(), *factor.parameters)

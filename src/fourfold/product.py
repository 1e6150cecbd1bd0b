"""The 3D product: the algorithm on one screen. Shapes and equations are numbered as in docs/math.md.

Four conjugate operators move activations between the two layouts; each one's backward is its partner's
forward (`leave` undoes `enter`, `collect` undoes `spread`):

    operator   sharded: forward / backward                   replicated: forward / backward
    enter      all-gather tokens x / reduce-scatter          identity / all-reduce x
    leave      reduce-scatter tokens x / all-gather          all-reduce x / identity
    spread     reduce-scatter features y / all-gather        all-reduce y / identity
    collect    all-gather features y / reduce-scatter        identity / all-reduce y

Between them `Product` multiplies by weights that are gathered over z. It does not know in which layout it
stands, which mode is on, or how large an axis is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fourfold import comm, local
from fourfold.gradients import Gradients, local_of
from fourfold.grid import Grid
from fourfold.layout import GATHERED, Policy, Spec, pad_rows

Body = Callable[[Tensor], Tensor]
MEMORY = "_fourfold_memory"
"""Attribute of the first of several weights that lie side by side: the memory of all of them."""


class Conjugate(torch.autograd.Function):
    """An operator given by its two bodies: forward `there`, backward `back`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, there: Body, back: Body) -> Tensor:
        ctx.back = back
        return there(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.back(gradient), None, None


def identity(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)  # autograd wants an output that is not its input


@dataclass(frozen=True, slots=True)
class Site:
    """Where an operator runs: the grid, the mode, the tokens of a (data, z) place, the label."""

    grid: Grid
    policy: Policy
    tokens: int
    label: str

    def named(self, label: str) -> Site:
        return Site(self.grid, self.policy, self.tokens, label)

    @property
    def sharded(self) -> bool:
        return self.policy.activations == "sharded"

    def gather_tokens(self, cut: Tensor) -> Tensor:
        """[ceil(m/x), f] -> [m, f]; the padding that `scatter_tokens` added is dropped."""
        return comm.all_gather(cut, self.grid, "x", label=self.label).wait()[: self.tokens]

    def scatter_tokens(self, whole: Tensor) -> Tensor:
        """[m, f] {sum x} -> [ceil(m/x), f]; where x does not divide m zeros are added at the end."""
        missing = -self.tokens % self.grid.size("x")
        whole = functional.pad(whole, (0, 0, 0, missing)) if missing else whole
        return comm.reduce_scatter(whole, self.grid, "x", label=self.label).wait()

    def sum_x(self, owed: Tensor) -> Tensor:
        return comm.all_reduce(owed, self.grid, "x", label=self.label).wait()

    def gather_features(self, cut: Tensor, widths: Sequence[int], axis: str = "y") -> Tensor:
        """[m, sum w_i/y] -> [m, sum w_i]: one message, each of the w_i joined on its own."""
        ranks = self.grid.size(axis)
        joined = comm.all_gather(cut, self.grid, axis, label=self.label).wait()
        if ranks == 1:
            return joined
        parts = joined.unflatten(0, (ranks, -1)).split([width // ranks for width in widths], dim=2)
        return torch.cat([part.movedim(0, 1).flatten(1) for part in parts], dim=1)

    def scatter_features(self, whole: Tensor, widths: Sequence[int], axis: str = "y") -> Tensor:
        """[m, sum w_i] {sum y} -> [m, sum w_i/y]: one message, each of the w_i cut on its own."""
        ranks = self.grid.size(axis)
        if ranks > 1:
            parts = [part.unflatten(1, (ranks, -1)).movedim(1, 0) for part in whole.split(list(widths), dim=1)]
            whole = torch.cat(parts, dim=2).flatten(0, 1)
        return comm.reduce_scatter(whole, self.grid, axis, label=self.label).wait()

    def sum_y(self, owed: Tensor) -> Tensor:
        return comm.all_reduce(owed, self.grid, "y", label=self.label).wait()


def enter(a: Tensor, site: Site) -> Tensor:
    """rest -> [m/z, k/y]"""
    bodies = (site.gather_tokens, site.scatter_tokens) if site.sharded else (identity, site.sum_x)
    return Conjugate.apply(a, *bodies)


def leave(a: Tensor, site: Site) -> Tensor:
    """[m/z, k/y] {sum x} -> rest"""
    bodies = (site.scatter_tokens, site.gather_tokens) if site.sharded else (site.sum_x, identity)
    return Conjugate.apply(a, *bodies)


def spread_bodies(site: Site, widths: Sequence[int]) -> tuple[Body, Body]:
    """The two directions of `spread`."""
    if site.sharded:
        return partial(site.scatter_features, widths=widths), partial(site.gather_features, widths=widths)
    return site.sum_y, identity


def spread(a: Tensor, site: Site, widths: Sequence[int]) -> Tensor:
    """[m/z, n/x] {sum y} -> inner, for the outputs of these widths side by side"""
    return Conjugate.apply(a, *spread_bodies(site, widths))


def collect(a: Tensor, site: Site, width: int) -> Tensor:
    """inner -> [m/z, n/x]"""
    if site.sharded:
        bodies = partial(site.gather_features, widths=[width]), partial(site.scatter_features, widths=[width])
    else:
        bodies = identity, site.sum_y
    return Conjugate.apply(a, *bodies)


def share(a: Tensor, site: Site, widths: Sequence[int], *, over_x: bool) -> Tensor:
    """[m/z, sum w_i] {sum y} -> whole over y, and with `over_x` over x too, for ranks that each read a part.

    Those ranks are the ones that the inner layout cuts features over. What they send back are sums that are
    owed over exactly those axes.
    """
    a = Conjugate.apply(a, site.sum_y, site.sum_y if site.sharded else identity)
    if over_x:
        whole = [width * site.grid.size("x") for width in widths]
        gather = partial(site.gather_features, widths=whole, axis="x")
        a = Conjugate.apply(a, gather, partial(site.scatter_features, widths=whole, axis="x"))
    return a


@dataclass(frozen=True, slots=True, eq=False)  # by identity: tensors do not compare
class Member:
    """A parameter, its spec, and the length of its dim 0 in compute layout on this rank."""

    parameter: nn.Parameter
    spec: Spec
    rows: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that are gathered over z in one message and given back in one."""

    grid: Grid
    policy: Policy
    gradients: Gradients
    label: str
    members: tuple[Member, ...]

    @property
    def compute(self) -> torch.dtype:
        return self.policy.compute or self.members[0].parameter.dtype

    @property
    def reduce(self) -> torch.dtype:
        return self.policy.reduce or self.members[0].parameter.dtype

    def gather(self, into: Sequence[Tensor] | None = None) -> list[Tensor]:
        """The members in compute layout and dtype, in these buffers where given. Cast before the wire."""
        z = self.grid.size(GATHERED)
        rows = [member.rows for member in self.members]
        locals_ = [local_of(member.parameter) for member in self.members]
        if z == 1 and into is not None:  # copying casts as well
            return [place.copy_(held) for place, held in zip(into, locals_, strict=True)]
        shards = [pad_rows(held.to(self.compute), -(-length // z)) for held, length in zip(locals_, rows, strict=True)]
        even = all(length % z == 0 for length in rows)
        wholes = comm.all_gather_together(
            shards, self.grid, GATHERED, into=into if even else None, label=self.label
        ).wait()
        if even:
            return wholes
        wholes = [whole[:length] for whole, length in zip(wholes, rows, strict=True)]
        return wholes if into is None else [b.copy_(whole) for b, whole in zip(into, wholes, strict=True)]

    def scatter(self, gradients: Sequence[Tensor]) -> None:
        """Reduce gradients in compute layout over z and hand this rank's shards in."""
        z = self.grid.size(GATHERED)
        padded = [pad_rows(gradient.to(self.reduce), -(-gradient.shape[0] // z) * z) for gradient in gradients]
        shards = comm.reduce_scatter_together(padded, self.grid, GATHERED, label=self.label).wait()
        for member, shard in zip(self.members, shards, strict=True):
            own = shard[: local_of(member.parameter).shape[0]]
            self.gradients.deposit(member.parameter, own.to(member.parameter.dtype))

    def only(self, members: Sequence[Member]) -> Unit:
        """A part of the unit, under the same label."""
        return Unit(self.grid, self.policy, self.gradients, self.label, tuple(members))


@dataclass(frozen=True, slots=True)
class Factor:
    """The weights of one product side by side, w[sum p_i, k], and what is added to its output.

    `widths` are the p_i: rows of each weight on this rank, padded where a vocabulary does not divide.
    `columns` are those that each bias covers, which may be a part of the output's; `adds` is off on ranks
    whose partial sum must go without, because another rank's has it.
    """

    unit: Unit
    weights: tuple[Member, ...]
    biases: tuple[Member, ...]
    widths: tuple[int, ...]
    columns: tuple[range, ...]
    adds: bool
    keep_weights: bool

    def gather(self) -> tuple[Tensor, Tensor | None]:
        """Weights and bias in one message: w[sum p_i, k], b[sum p_i]."""
        w = self._joined()
        if w is not None:
            biases = self.unit.only(self.biases).gather() if self.adds else []
        else:
            w, into = self._buffer()
            wholes = self.unit.gather(into)
            w, biases = (wholes[0] if w is None else w), wholes[len(self.weights) :]
        if not self.biases or not self.adds:
            return w, None
        if sum(len(columns) for columns in self.columns) == len(w):
            return w, biases[0] if len(biases) == 1 else torch.cat(biases)
        bias = w.new_zeros(len(w))
        for columns, part in zip(self.columns, biases, strict=True):
            bias[columns.start : columns.stop] = part
        return w, bias

    def sums_over_tokens(self, dout: Tensor) -> list[Tensor]:
        """The gradient of each bias; in one pass where they cover all columns."""
        run = local.region(local.sum_tokens, dout, compiled=self.unit.policy.compile)
        if self.unit.policy.compile:
            torch._dynamo.mark_static(dout, 1)  # a kernel for any width would take twice the time
        widths = [len(columns) for columns in self.columns]
        if sum(widths) == dout.shape[1]:
            return list(run(dout, self.unit.reduce).split(widths))
        return [run(dout[:, columns.start : columns.stop], self.unit.reduce) for columns in self.columns]

    def gather_weights(self) -> Tensor:
        w = self._joined()
        if w is not None:
            return w
        w, into = self._buffer(biases=False)
        wholes = self.unit.only(self.weights).gather(into)
        return wholes[0] if w is None else w

    def _joined(self) -> Tensor | None:
        """The weights as one tensor, where nothing need be gathered and they lie side by side already."""
        if self.unit.grid.size(GATHERED) > 1 or [member.rows for member in self.weights] != list(self.widths):
            return None
        joined = side_by_side([member.parameter for member in self.weights])
        return None if joined is None else joined.to(self.unit.compute)

    def _buffer(self, *, biases: bool = True) -> tuple[Tensor | None, list[Tensor] | None]:
        """One buffer for weights that must lie side by side, and the place in it for each member."""
        rows = [member.rows for member in self.weights]
        if len(rows) == 1 and rows[0] == self.widths[0]:
            return None, None
        like = local_of(self.weights[0].parameter)
        w = like.new_empty(sum(self.widths), like.shape[1], dtype=self.unit.compute)
        into = []
        for place, length in zip(w.split(list(self.widths)), rows, strict=True):
            place[length:].zero_()
            into.append(place[:length])
        if biases:
            into += [w.new_empty(len(columns)) for columns in self.columns]
        return w, into


def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Their shards joined along dim 0 without a copy, if they still lie where they were made, one after the other."""
    parts = [local_of(parameter).detach() for parameter in parameters]
    if len(parts) == 1:
        return parts[0]
    memory = getattr(parameters[0], MEMORY, None)
    expected = -1 if memory is None else memory.data_ptr()
    for part in parts:
        if part.data_ptr() != expected or not part.is_contiguous():
            return None
        expected += part.nbytes
    return memory.view(sum(part.shape[0] for part in parts), *parts[0].shape[1:])  # type: ignore[union-attr]


class Product(torch.autograd.Function):
    """out = a w^T + b, with w stored cut over z.

        a     [m/z, k]           E1   out = a w^T + b        w gathered over z
        out   [m/z, p] {sum s}   E2   da  = dout w           w gathered over z again
        dout  [m/z, p]           E3   dw  = dout^T a         reduce-scattered over z
                                 E4   db  = sum over tokens of dout, in its columns

    Instead of `a` it may keep the cut tensor that `a` was gathered from, and `reread` gathers it again.
    """

    @staticmethod
    def forward(ctx: Any, factor: Factor, reread: Body, a: Tensor, kept: Tensor, *_: nn.Parameter) -> Tensor:
        w, bias = factor.gather()
        ctx.factor, ctx.reread = factor, reread
        ctx.save_for_backward(kept, w if factor.keep_weights else None)
        return functional.linear(a, w, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        factor: Factor = ctx.factor
        kept, w = ctx.saved_tensors
        da = None
        if ctx.needs_input_grad[2]:
            da = dout @ (factor.gather_weights() if w is None else w)  # E2
        trained = [member for member in factor.unit.members if member.parameter.requires_grad]
        if trained:
            gradients: list[Tensor] = []
            if any(member in trained for member in factor.weights):
                dw = matmul_into(dout.t(), ctx.reread(kept), factor.unit.reduce)  # E3
                for member, part in zip(factor.weights, dw.split(list(factor.widths)), strict=True):
                    if member in trained:
                        gradients.append(part[: member.rows])
            if any(member in trained for member in factor.biases):
                parts = zip(factor.biases, factor.sums_over_tokens(dout), strict=True)  # E4
                gradients += [part for member, part in parts if member in trained]
            factor.unit.only(trained).scatter(gradients)
        return (None, None, da, *[None] * (len(ctx.needs_input_grad) - 3))


def matmul_into(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b, summed and written in the wider dtype where the device can: no rounding between, no cast after."""
    if a.is_cuda and a.dtype != dtype == torch.float32:
        return torch.mm(a, b, out_dtype=dtype)
    return a @ b


def multiply(factor: Factor, a: Tensor, cut: Tensor, reread: Body, *, keep_gathered: bool) -> Tensor:
    """`Product` of a and the factor; `cut` is what an operator gathered `a` from, `reread` does so again."""
    parameters = [member.parameter for member in factor.unit.members]
    if keep_gathered:
        return Product.apply(factor, identity, a, a.detach(), *parameters)
    return Product.apply(factor, reread, a, cut.detach(), *parameters)


def expand(factor: Factor, a: Tensor, site: Site) -> Tensor:
    """rest -> enter -> product [m/z, p] {sum y}; `spread` makes it inner."""
    rows = -(-site.tokens // site.grid.size("x")) if site.sharded else site.tokens
    if a.shape[0] != rows:
        raise ValueError(
            f"{site.label}: {site.tokens} tokens of a place are {rows} rows on a rank with {site.policy.activations} "
            f"activations on the grid {site.grid}, but the input has {a.shape[0]}"
        )
    reread = site.gather_tokens if site.sharded else identity
    return multiply(factor, enter(a, site), a, reread, keep_gathered=site.policy.keep_gathered)


def contract(factor: Factor, a: Tensor, site: Site, width: int) -> Tensor:
    """inner -> collect -> product [m/z, p] {sum x} -> leave -> rest"""
    reread = partial(site.gather_features, widths=[width]) if site.sharded else identity
    whole = collect(a, site, width)
    return leave(multiply(factor, whole, a, reread, keep_gathered=site.policy.keep_gathered), site)

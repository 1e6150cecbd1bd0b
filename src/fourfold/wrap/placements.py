"""The placements of grid tensors: the stream at rest, chunks of a dim, logits, shared key heads, fused outputs.

Each placement describes its cuts by a `Layout` over the axes inside a place. What cannot be computed on the parts of a
placement is computed on whole tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Size, Tensor
from torch.nn import functional

from fourfold import comm
from fourfold.layout import FEATURES, TOKENS, Layout, rest
from fourfold.nn.embedding import Head
from fourfold.operators import Conjugate
from fourfold.wrap.grid_tensor import (
    WITHIN_PLACE,
    GridTensor,
    ModelContext,
    ShardedPlacement,
    TensorPlacement,
    distribute,
)


def conjugate(plain: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `there`; the gradient, if there will be one, is passed through `back`."""
    if plain.requires_grad and torch.is_grad_enabled():
        return Conjugate.apply(plain, there, back)
    return there(plain)


def same(tensor: Tensor) -> Tensor:
    """Return the tensor itself: one direction of a conjugate pair that does nothing."""
    return tensor


@dataclass(frozen=True)
class RestPlacement(ShardedPlacement):
    """The residual stream [..., k], flattened to [m, k]: tokens cut over x in sharded mode, features over y.

    The local tensor is [ceil(m/x), k/y]; tokens are padded at the end.
    """

    @property
    def layout(self) -> Layout:
        """The cuts of [tokens, features] inside this place. The axes that cut rows are left out."""
        cuts = rest(self.context.policy.activations).cuts
        return Layout(tuple((axis, dim) for axis, dim in cuts if axis in WITHIN_PLACE))

    @property
    def token_parts(self) -> int:
        """Into how many parts the tokens of a place are cut."""
        return self.layout.parts(self.context.grid.shape.sizes, TOKENS)

    def is_padded(self, shape: Size) -> bool:
        return prod(shape[:-1]) % self.token_parts != 0

    def flat(self, plain: Tensor) -> Tensor:
        return plain.reshape(-1, plain.shape[-1])

    def join(self, local: Tensor, shape: Size) -> Tensor:
        flat = (prod(shape[:-1]), shape[-1])
        return comm.join(local, self.layout, flat, self.context.grid, label=self.context.label).view(shape)

    def take(self, whole: Tensor, shape: Size) -> Tensor:
        return self.take_flat(whole.reshape(-1, shape[-1]), tokens=True, features=True)

    def part(self, plain: Tensor, shape: Size) -> Tensor:
        if plain.dim() == 0:  # a scalar keeps its dims: with dims it would take part in torch's choice of a dtype
            return conjugate(plain, same, lambda gradient: self.sum(gradient, self.axes))
        tokens = any(size != 1 for size in plain.shape[:-1])
        features = plain.shape[-1] == shape[-1]
        width = shape[-1] if features else 1
        flat = plain.expand(*shape[:-1], width).reshape(-1, width) if tokens else plain.reshape(1, width)
        return conjugate(
            flat,
            lambda whole: self.take_flat(whole, tokens=tokens, features=features),
            lambda gradient: self._join_gradient(gradient, prod(shape[:-1]), tokens=tokens, features=features),
        )

    def take_flat(self, flat: Tensor, *, tokens: bool, features: bool) -> Tensor:
        """Return this rank's part of [tokens, features]; a dim that is broadcast is not cut."""
        cut = {TOKENS: tokens, FEATURES: features}
        layout = Layout(tuple((axis, dim) for axis, dim in self.layout.cuts if cut[dim]))
        part = layout.take(flat, self.context.grid)
        # padded, because `enter` and `leave` need equally many tokens on every rank
        rows = -(-flat.shape[0] // self.token_parts) if tokens else flat.shape[0]
        return functional.pad(part, (0, 0, 0, rows - part.shape[0])).contiguous()

    def join_tokens(self, local: Tensor, count: int) -> Tensor:
        """Gather all tokens of [ceil(m/x), ...] and drop the padding; outside autograd."""
        if self.token_parts == 1:
            return local
        for axis in reversed(self.layout.over(TOKENS)):  # innermost cut first
            gathering = comm.all_gather(local.contiguous(), self.context.grid, axis, label=self.context.label)
            local = gathering.wait()  # at once: the next gather, or the caller, reads it
        return local[:count]

    def _join_gradient(self, gradient: Tensor, count: int, *, tokens: bool, features: bool) -> Tensor:
        """Gather the gradient over dims that were cut, and sum it over dims that were broadcast."""
        token_axes, feature_axes = self.layout.over(TOKENS), self.layout.over(FEATURES)
        gradient = self.join_tokens(gradient, count) if tokens else self.sum(gradient, token_axes)
        if not features:
            return self.sum(gradient, feature_axes)
        for axis in reversed(feature_axes):  # innermost cut first
            gradient = comm.all_gather(gradient, self.context.grid, axis, dim=1, label=self.context.label).wait()
        return gradient


def to_rest(tensor: Tensor, context: ModelContext) -> GridTensor:
    """Return a tensor [..., k] in the placement of the residual stream."""
    return distribute(tensor, RestPlacement(context))


@dataclass(frozen=True)
class ChunkPlacement(ShardedPlacement):
    """One dim is cut in contiguous chunks over some axes, outermost first, as torch.chunk cuts it.

    Heads, hidden units and channels lie like this. The local tensor has the same number of dims as the whole.
    """

    dim: int
    over: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        return Layout.along(self.dim, self.over)

    @property
    def axes(self) -> tuple[str, ...]:
        return self.over

    @property
    def parts(self) -> int:
        """Into how many chunks the dim is cut."""
        return prod(self.context.grid.size(axis) for axis in self.over)

    def moved(self, dim: int) -> ChunkPlacement:
        """Return the same chunks on another dim."""
        return type(self)(self.context, dim, self.over)

    def join(self, local: Tensor, shape: Size) -> Tensor:
        return self._join(local, self.dim, shape[self.dim])

    def take(self, whole: Tensor, shape: Size) -> Tensor:
        return self._take(whole, self.dim, shape[self.dim])

    def part(self, plain: Tensor, shape: Size) -> Tensor:
        dim = plain.dim() - (len(shape) - self.dim)
        length = shape[self.dim]
        if dim < 0 or plain.shape[dim] != length:  # broadcast over the cut dim
            return conjugate(plain, same, lambda gradient: self.sum(gradient, self.over))
        return conjugate(
            plain,
            lambda whole: self._take(whole, dim, length),
            lambda gradient: self._join(gradient, dim, length),
        )

    def reshaped(self, a: GridTensor, shape: Size) -> Any:
        """Return the same chunks in another shape, where each chunk is a whole number of entries of the new dim."""
        before = prod(a.shape[: self.dim])
        length, held = a.shape[self.dim], a.local.shape[self.dim]
        even = length % self.parts == 0
        for dim, size in enumerate(shape):
            if prod(shape[:dim]) != before:
                continue
            # either the dim itself stays, or each chunk is a whole number of entries of the new dim
            if (size == length and prod(shape[dim:]) == prod(a.shape[self.dim :])) or (even and size % self.parts == 0):
                local = [*shape[:dim], size * held // length, *shape[dim + 1 :]]
                return GridTensor(a.local.reshape(local), self.moved(dim), shape)
        return NotImplemented

    def _take(self, whole: Tensor, dim: int, length: int) -> Tensor:  # noqa: ARG002
        return Layout.along(dim, self.over).take(whole, self.context.grid).contiguous()

    def _join(self, local: Tensor, dim: int, length: int) -> Tensor:
        shape = (*local.shape[:dim], length, *local.shape[dim + 1 :])
        return comm.join(local, Layout.along(dim, self.over), shape, self.context.grid, label=self.context.label)


@dataclass(frozen=True)
class LogitsPlacement(ChunkPlacement):
    """Features [..., n] as a `Head` leaves them: each rank's ids first, then padding, so that all ranks hold equally
    many columns."""

    head: Head

    def moved(self, dim: int) -> ChunkPlacement:
        return LogitsPlacement(self.context, dim, self.over, self.head)

    def reshaped(self, a: GridTensor, shape: Size) -> Any:
        if self.dim != len(a.shape) - 1 or shape[-1] != a.shape[-1]:
            return NotImplemented
        return GridTensor(a.local.reshape(*shape[:-1], a.local.shape[-1]), self.moved(len(shape) - 1), shape)

    def is_padded(self, shape: Size) -> bool:
        return self.head.columns_held * self.parts != shape[self.dim]

    def uncut(self, local: Tensor, shape: Size) -> Tensor:
        # without padding a view; without its padding a copy, contiguous as in the plain model, which may `view` it
        return local.narrow(self.dim, 0, shape[self.dim]).contiguous()

    def _join(self, local: Tensor, dim: int, length: int) -> Tensor:  # noqa: ARG002
        flat = local.movedim(dim, -1)
        whole = self.head.join(flat.reshape(-1, flat.shape[-1]))
        return whole.view(*flat.shape[:-1], whole.shape[-1]).movedim(-1, dim)

    def _take(self, whole: Tensor, dim: int, length: int) -> Tensor:
        flat = whole.movedim(dim, -1)
        part = self.head.cut(flat.reshape(-1, length))
        return part.view(*flat.shape[:-1], part.shape[-1]).movedim(-1, dim)


@dataclass(frozen=True)
class SharedHeadsPlacement(ChunkPlacement):
    """Key or value heads: each rank holds the heads that its queries read, so neighbours may hold the same head.

    A head has `size` entries of the dim. Each rank finds one part of a head's gradient. The parts are summed over the
    ranks that hold the head, where the head was made.
    """

    heads: int
    size: int
    held: range
    """The heads that this rank holds."""
    queries: range
    """The query heads of this rank."""
    group: int
    """How many query heads read one head."""

    def moved(self, dim: int) -> ChunkPlacement:
        return self.resized(dim, self.size)

    def resized(self, dim: int, size: int) -> SharedHeadsPlacement:
        """Return the same heads on another dim, with `size` entries each."""
        return SharedHeadsPlacement(self.context, dim, self.over, self.heads, size, self.held, self.queries, self.group)

    def reshaped(self, a: GridTensor, shape: Size) -> Any:
        """Split [heads * size] into heads, or flatten [heads, group] to the heads of the queries."""
        before = prod(a.shape[: self.dim])
        for dim, length in enumerate(shape):
            if prod(shape[:dim]) != before:
                continue
            if length == self.heads and self.size * prod(a.shape[self.dim + 1 :]) == prod(shape[dim + 1 :]):
                local = a.local.reshape(*shape[:dim], len(self.held), *shape[dim + 1 :])
                return GridTensor(local, self.resized(dim, 1), shape)
            by_group = self.size == 1 and a.shape[self.dim + 1 : self.dim + 2] == (self.group,)
            if by_group and length == self.heads * self.group:
                local = self._select(a.local, self.dim).reshape(*shape[:dim], len(self.queries), *shape[dim + 1 :])
                return GridTensor(local, ChunkPlacement(self.context, dim, self.over), shape)
        return NotImplemented

    def _select(self, local: Tensor, dim: int) -> Tensor:
        """[.., held, group, ..] -> [.., queries, ..]: keep the copy that belongs to each query of this rank."""
        first = self.queries.start - self.held.start * self.group
        return local.flatten(dim, dim + 1).narrow(dim, first, len(self.queries))

    def for_queries(self, local: Tensor) -> Tensor:
        """Repeat each head once for every query that reads it."""
        wide = local.unsqueeze(self.dim + 1)
        wide = wide.expand(*local.shape[: self.dim + 1], self.group, *local.shape[self.dim + 1 :])
        return self._select(wide, self.dim)

    def whole(self, local: Tensor, shape: Size) -> Tensor:
        """Sum equal shares of all holders of a head, so that forward and backward are both right.

        Each of n holders adds 1/n of the head. In backward each of them gets 1/n of the gradient, and the parts are
        summed where the head was made.
        """
        if not local.is_floating_point():
            return self.whole(local.double(), shape).round().to(local.dtype)  # fp64 holds these integers exactly
        length = shape[self.dim]
        before, after = self.held.start * self.size, length - self.held.stop * self.size
        filled = functional.pad(local / self._holders(local), [0, 0] * (local.dim() - 1 - self.dim) + [before, after])
        return Conjugate.apply(filled, lambda share: self.sum(share, self.over), torch.clone)

    def _holders(self, local: Tensor) -> Tensor:
        """Count how many ranks hold each head that this rank holds, in a shape that broadcasts over the dim."""
        counts = local.new_zeros(self.heads)
        counts[self.held.start : self.held.stop] = 1
        counts = self.sum(counts, self.over)[self.held.start : self.held.stop].repeat_interleave(self.size)
        return counts.view(-1, *[1] * (local.dim() - 1 - self.dim))

    def _join(self, local: Tensor, dim: int, length: int) -> Tensor:
        """Sum the parts of a gradient that the ranks found."""
        size = length // self.heads
        # the heads of other ranks are 0 here
        filled = local.new_zeros(*local.shape[:dim], length, *local.shape[dim + 1 :])
        filled.narrow(dim, self.held.start * size, len(self.held) * size).copy_(local)
        return self.sum(filled, self.over)

    def _take(self, whole: Tensor, dim: int, length: int) -> Tensor:
        size = length // self.heads
        return whole.narrow(dim, self.held.start * size, len(self.held) * size).contiguous()


@dataclass(frozen=True)
class FusedPlacement(TensorPlacement):
    """The outputs of several layers side by side, [..., n_0 + n_1 + ...], each cut by itself.

    The values are in the local tensors of the pieces; there is no other local tensor.
    """

    pieces: tuple[GridTensor, ...]

    @property
    def layout(self) -> Layout:
        return self.pieces[0].placement.layout

    def locals_of(self, tensor: GridTensor) -> tuple[Tensor, ...]:  # noqa: ARG002
        return tuple(part for piece in self.pieces for part in piece.placement.locals_of(piece))

    def write(self, tensor: GridTensor, whole: Tensor) -> None:  # noqa: ARG002
        for piece, values in zip(self.pieces, whole.split([p.shape[-1] for p in self.pieces], dim=-1), strict=True):
            piece.placement.write(piece, values)

    @property
    def edges(self) -> list[int]:
        """The features at which pieces begin and end."""
        return list(accumulate((piece.shape[-1] for piece in self.pieces), initial=0))

    def whole(self, local: Tensor, shape: Size) -> Tensor:  # noqa: ARG002
        return torch.cat([piece.whole() for piece in self.pieces], dim=-1)

    def between(self, start: int, stop: int) -> Any:
        """Return the pieces from one feature to another, if pieces begin and end there."""
        if start not in self.edges or stop not in self.edges or start >= stop:
            return NotImplemented
        found = self.pieces[self.edges.index(start) : self.edges.index(stop)]
        return found[0] if len(found) == 1 else fuse(found)

    def split(self, a: GridTensor, func: Callable, sections: Any, dim: int) -> Any:
        """Split the last dim as `func` (torch.split and its like) does, if it splits between pieces."""
        if dim % len(a.shape) != len(a.shape) - 1:
            return NotImplemented
        lengths = [part.shape[0] for part in func(torch.empty(a.shape[-1], device="meta"), sections)]
        found = [self.between(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True)]
        return NotImplemented if any(part is NotImplemented for part in found) else tuple(found)

    def sliced(self, a: GridTensor, index: Sequence[Any]) -> Any:
        """Index the last dim with a slice that begins and ends between pieces."""
        *others, last = index
        if not isinstance(last, slice) or not all(i == slice(None) for i in others):
            return NotImplemented
        start, stop, step = last.indices(a.shape[-1])
        return self.between(start, stop) if step == 1 else NotImplemented


def fuse(pieces: Sequence[GridTensor]) -> GridTensor:
    """Put tensors [..., n_i] side by side along the last dim without moving data."""
    first = pieces[0]
    width = sum(piece.shape[-1] for piece in pieces)
    # the first piece's tensor stands for dtype and device; `FusedPlacement` reads the values from the pieces
    return GridTensor(first.local, FusedPlacement(first.placement.context, tuple(pieces)), (*first.shape[:-1], width))

"""Further layouts: logits over a vocabulary of any size, key heads that several ranks read, weights in one.

Each is a layout like those of placed.py; what cannot be done on its parts is done on whole tensors.
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

from fourfold.nn.embedding import Head
from fourfold.operators import Conjugate
from fourfold.wrap.placed import Blocks, Placed, PlacedLayout


@dataclass(frozen=True)
class Columns(Blocks):
    """Features [..., n] as a `Head` leaves them: the ids of each rank first, then columns of padding, so that all ranks
    have equally many."""

    head: Head

    def moved(self, dim: int) -> Blocks:
        return Columns(self.run, dim, self.over, self.head)

    def reshaped(self, a: Placed, shape: Size) -> Any:
        if self.dim != len(a.shape) - 1 or shape[-1] != a.shape[-1]:
            return NotImplemented
        return Placed(a.local.reshape(*shape[:-1], a.local.shape[-1]), self.moved(len(shape) - 1), shape)

    def padded(self, shape: Size) -> bool:
        return self.head.columns_held * self.parts != shape[self.dim]

    def uncut(self, local: Tensor, shape: Size) -> Tensor:
        return local.narrow(self.dim, 0, shape[self.dim])

    def _join(self, local: Tensor, dim: int, length: int) -> Tensor:  # noqa: ARG002
        flat = local.movedim(dim, -1)
        whole = self.head.join(flat.reshape(-1, flat.shape[-1]))
        return whole.view(*flat.shape[:-1], whole.shape[-1]).movedim(-1, dim)

    def _take(self, whole: Tensor, dim: int, length: int) -> Tensor:
        flat = whole.movedim(dim, -1)
        part = self.head.cut(flat.reshape(-1, length))
        return part.view(*flat.shape[:-1], part.shape[-1]).movedim(-1, dim)


@dataclass(frozen=True)
class Shared(Blocks):
    """Key or value heads of which each rank holds those that its queries read; neighbours may hold the same one.

    `size` entries of the dim make a head. What backward finds for a head is a part of its gradient, summed over the
    ranks that hold it where it was made.
    """

    heads: int
    size: int
    held: range
    queries: range
    group: int
    """Queries that read one head."""

    def moved(self, dim: int) -> Blocks:
        return Shared(self.run, dim, self.over, self.heads, self.size, self.held, self.queries, self.group)

    def sized(self, dim: int, size: int) -> Shared:
        return Shared(self.run, dim, self.over, self.heads, size, self.held, self.queries, self.group)

    def reshaped(self, a: Placed, shape: Size) -> Any:
        """[heads * size] apart into heads, and [heads, group] joined to the heads of the queries."""
        before = prod(a.shape[: self.dim])
        for dim, length in enumerate(shape):
            if prod(shape[:dim]) != before:
                continue
            if length == self.heads and self.size * prod(a.shape[self.dim + 1 :]) == prod(shape[dim + 1 :]):
                local = a.local.reshape(*shape[:dim], len(self.held), *shape[dim + 1 :])
                return Placed(local, self.sized(dim, 1), shape)
            by_group = self.size == 1 and a.shape[self.dim + 1 : self.dim + 2] == (self.group,)
            if by_group and length == self.heads * self.group:
                local = self.repeated(a.local, self.dim).reshape(*shape[:dim], len(self.queries), *shape[dim + 1 :])
                return Placed(local, Blocks(self.run, dim, self.over), shape)
        return NotImplemented

    def repeated(self, local: Tensor, dim: int) -> Tensor:
        """[.., held, group, ..] -> [.., queries, ..], each query's own."""
        first = self.queries.start - self.held.start * self.group
        return local.flatten(dim, dim + 1).narrow(dim, first, len(self.queries))

    def for_queries(self, local: Tensor) -> Tensor:
        """The heads of `dim`, once for each query that reads it."""
        wide = local.unsqueeze(self.dim + 1)
        wide = wide.expand(*local.shape[: self.dim + 1], self.group, *local.shape[self.dim + 1 :])
        return self.repeated(wide, self.dim)

    def whole(self, local: Tensor, shape: Size) -> Tensor:
        """Each holder gives an equal share, so that the sum is right in forward and in backward."""
        if not local.is_floating_point():
            return self.whole(local.double(), shape).round().to(local.dtype)
        length = shape[self.dim]
        before, after = self.held.start * self.size, length - self.held.stop * self.size
        filled = functional.pad(local / self._holders(local), [0, 0] * (local.dim() - 1 - self.dim) + [before, after])
        return Conjugate.apply(filled, lambda share: self.sum(share, self.over), torch.clone)

    def _holders(self, local: Tensor) -> Tensor:
        """How many ranks hold each head that this one holds, in the shape of the dim."""
        counts = local.new_zeros(self.heads)
        counts[self.held.start : self.held.stop] = 1
        counts = self.sum(counts, self.over)[self.held.start : self.held.stop].repeat_interleave(self.size)
        return counts.view(-1, *[1] * (local.dim() - 1 - self.dim))

    def _join(self, local: Tensor, dim: int, length: int) -> Tensor:
        """A gradient: the sum of what the ranks found."""
        size = length // self.heads
        filled = local.new_zeros(*local.shape[:dim], length, *local.shape[dim + 1 :])
        filled.narrow(dim, self.held.start * size, len(self.held) * size).copy_(local)
        return self.sum(filled, self.over)

    def _take(self, whole: Tensor, dim: int, length: int) -> Tensor:
        size = length // self.heads
        return whole.narrow(dim, self.held.start * size, len(self.held) * size).contiguous()


@dataclass(frozen=True)
class Fused(PlacedLayout):
    """The outputs of several layers side by side [..., n_0 + n_1 + ...], each cut by itself. There is no local tensor
    but those of the parts."""

    pieces: tuple[Placed, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.pieces[0].placement.axes

    def locals_of(self, placed: Placed) -> tuple[Tensor, ...]:  # noqa: ARG002
        return tuple(part for piece in self.pieces for part in piece.placement.locals_of(piece))

    def write(self, placed: Placed, whole: Tensor) -> None:  # noqa: ARG002
        for piece, values in zip(self.pieces, whole.split([p.shape[-1] for p in self.pieces], dim=-1), strict=True):
            piece.placement.write(piece, values)

    @property
    def edges(self) -> list[int]:
        return list(accumulate((piece.shape[-1] for piece in self.pieces), initial=0))

    def whole(self, local: Tensor, shape: Size) -> Tensor:  # noqa: ARG002
        return torch.cat([piece.whole() for piece in self.pieces], dim=-1)

    def between(self, start: int, stop: int) -> Any:
        """The parts from one feature to another, if layers begin and end there."""
        if start not in self.edges or stop not in self.edges or start >= stop:
            return NotImplemented
        found = self.pieces[self.edges.index(start) : self.edges.index(stop)]
        return found[0] if len(found) == 1 else fused(found)

    def split(self, a: Placed, func: Callable, sections: Any, dim: int) -> Any:
        if dim % len(a.shape) != len(a.shape) - 1:
            return NotImplemented
        lengths = [part.shape[0] for part in func(torch.empty(a.shape[-1], device="meta"), sections)]
        found = [self.between(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True)]
        return NotImplemented if any(part is NotImplemented for part in found) else tuple(found)

    def sliced(self, a: Placed, index: Sequence[Any]) -> Any:
        *others, last = index
        if not isinstance(last, slice) or not all(i == slice(None) for i in others):
            return NotImplemented
        start, stop, step = last.indices(a.shape[-1])
        return self.between(start, stop) if step == 1 else NotImplemented


def fused(pieces: Sequence[Placed]) -> Placed:
    first = pieces[0]
    width = sum(piece.shape[-1] for piece in pieces)
    return Placed(first.local, Fused(first.placement.run, tuple(pieces)), (*first.shape[:-1], width))

"""Channels of images on the grid: how they are cut over x and y, and how they travel.

A tensor is [rows, channels, *space]: the rows are those of this (data, z) place, space is whole, and channels are cut
over axes, outermost first, in the blocks of `layout.chunk`: where an axis does not divide them the last blocks are
short or empty. Messages are padded to the longest block, tensors never are.

    activations   after an expanding convolution   after a contracting one
    sharded       over ("x", "y")                  over ("y", "x")
    replicated    over ("x",), whole over y        over ("y",), whole over x
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fourfold import comm
from fourfold.axes import AXES, BATCH
from fourfold.comm import Pending
from fourfold.grid import Grid
from fourfold.layout import GATHERED, Layout
from fourfold.operators import AsyncResult, Conjugate, OpContext, Ready, identity


@dataclass(frozen=True, slots=True)
class Channels:
    """So many channels, cut over these axes, outermost first."""

    count: int
    axes: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The layout of a vector with an entry for each channel."""
        return Layout.along(0, self.axes)

    def block(self, grid: Grid) -> range:
        """The channels of this rank."""
        return self.layout.box((self.count,), grid.shape.sizes, grid.coords)[0]

    def blocks(self, grid: Grid) -> Iterator[range]:
        """The channels of every rank, in their order."""
        for _, (held,) in self.layout.boxes((self.count,), grid.shape.sizes):
            yield held

    def outer(self, cuts: int) -> Channels:
        """The same before the cuts that follow the first ones."""
        return Channels(self.count, self.axes[:cuts])

    @property
    def use(self) -> Layout:
        """How a computation is cut that is done for each of these channels by itself."""
        return Layout.activation(BATCH, self.axes)

    @property
    def stored(self) -> Channels:
        """The cut of a parameter with a row for each channel: that of the channels, or as much of it from the outermost
        axis on as a storage can have, whose axes stand in the order of the grid's. A rank reads a part of its rows."""
        cuts = 1
        while cuts < len(self.axes) and AXES.index(self.axes[cuts - 1]) < AXES.index(self.axes[cuts]):
            cuts += 1
        return self.outer(cuts)

    @property
    def storage(self) -> Layout:
        """Of that parameter."""
        return Layout.along(0, (*self.stored.axes, GATHERED))

    def part(self, grid: Grid) -> range:
        """Which rows of that parameter in its compute layout are those of this rank's channels."""
        return within(self.block(grid), self.stored.block(grid))


def whole_groups(channels: Channels, groups: int, grid: Grid) -> list[range] | None:
    """The groups of every rank, where none of them is cut: the channels are so many groups of equal size."""
    size = channels.count // groups
    blocks = [held or range(0) for held in channels.blocks(grid)]
    if any(held.start % size or held.stop % size for held in blocks):
        return None
    return [range(held.start // size, held.stop // size) for held in blocks]


def within(inner: range, outer: range) -> range:
    """The same channels, counted from the first of `outer`."""
    return range(inner.start - outer.start, inner.stop - outer.start) if inner else range(0)


def take(a: Tensor, held: range, dim: int = 1) -> Tensor:
    """A view of these channels."""
    return a if len(held) == a.shape[dim] else a.narrow(dim, held.start, len(held))


def embed(part: Tensor, held: range, rows: int) -> Tensor:
    """A gradient for `rows` rows of which only these were used."""
    if len(held) == rows:
        return part
    whole = part.new_zeros(rows, *part.shape[1:])
    whole[held.start : held.stop] = part
    return whole


def gather(part: Tensor, site: OpContext, axis: str, count: int) -> Pending[Tensor]:
    """[r, count/axis, ...] -> [r, count, ...]"""
    return comm.all_gather(part, site.grid, axis, dim=1, length=count, label=site.label)


def scatter(whole: Tensor, site: OpContext, axis: str) -> Pending[Tensor]:
    """[r, count, ...] {sum axis} -> [r, count/axis, ...]"""
    return comm.reduce_scatter(whole, site.grid, axis, dim=1, label=site.label)


def sum_over(owed: Tensor, site: OpContext, axis: str) -> Pending[Tensor]:
    """[r, count, ...] {sum axis} -> the sum, on all ranks of the axis"""
    return comm.all_reduce(owed, site.grid, axis, label=site.label)


def enter(a: Tensor, site: OpContext, axis: str, count: int, *, cut: bool) -> AsyncResult | Ready:
    """[r, count/axis, ...], or where it is not cut [r, count, ...], -> whole over the axis, for ranks that each find
    a part of the gradient."""
    if not cut:
        return site.launch(a, axis, identity, partial(sum_over, site=site, axis=axis))
    there = partial(gather, site=site, axis=axis, count=count)
    return site.launch(a, axis, there, partial(scatter, site=site, axis=axis))


def leave(a: Tensor, site: OpContext, axis: str, *, cut: bool) -> AsyncResult | Ready:
    """[r, count, ...] {sum axis} -> cut over the axis, or the whole sum"""
    if not cut:
        return site.launch(a, axis, partial(sum_over, site=site, axis=axis), identity)
    back = partial(gather, site=site, axis=axis, count=a.shape[1])
    return site.launch(a, axis, partial(scatter, site=site, axis=axis), back)


def convert(a: Tensor, channels: Channels, axes: tuple[str, ...], site: OpContext) -> Tensor:
    """The same tensor with its channels cut over other axes; backward converts its gradient back.

    Gathered are the axes that follow those which both cuts begin with; no axis is summed over, since a tensor that is
    whole over an axis has the same gradient on all its ranks.
    """
    aim = Channels(channels.count, axes)
    if aim == channels:
        return a
    return Conjugate.apply(
        a,
        partial(_recut, here=channels, aim=aim, site=site),
        partial(_recut, here=aim, aim=channels, site=site),
    )


def _recut(a: Tensor, here: Channels, aim: Channels, site: OpContext) -> Tensor:
    common = 0
    while here.axes[common : common + 1] == aim.axes[common : common + 1] != ():
        common += 1
    joined = join(a, here, common, site)
    found = take(joined, within(aim.block(site.grid), here.outer(common).block(site.grid)))
    return found.clone() if found is a or found._is_view() else found  # model code may write into it


def join(a: Tensor, channels: Channels, cuts: int, site: OpContext) -> Tensor:
    """Gather the channels over all axes but the first `cuts`; outside of autograd."""
    shape = (a.shape[0], channels.count, *a.shape[2:])
    return comm.join(a, Layout.along(1, channels.axes), shape, site.grid, keep=cuts, label=site.label)


def require_block(a: Tensor, channels: Channels, grid: Grid, label: str) -> None:
    """Raise unless the tensor has this rank's channels."""
    held = len(channels.block(grid))
    if a.dim() < 2 or a.shape[1] != held:
        over = ", ".join(f"{axis}={grid.size(axis)}" for axis in channels.axes) or "no axis"
        raise ValueError(
            f"{label}: {channels.count} channels cut over {over} are {held} on this rank of the grid {grid}, but the "
            f"input is {tuple(a.shape)}; give [rows, {held}, *space], as fourfold.nn.channels.convert cuts it"
        )

"""Channels of images on the grid: how they are cut over x and y, and how they are communicated.

A tensor is [rows, channels, *space]. The rows are those of this (data, z) place, space is whole, and channels are cut
over axes, outermost first, in the blocks of `layout.chunk`: if an axis does not divide them, the last blocks are short
or empty. Messages are padded to the longest block, tensors never are.

    activations   after an expanding convolution   after a contracting one
    sharded       over ("x", "y")                  over ("y", "x")
    replicated    over ("x",), whole over y        over ("y",), whole over x
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fourfold import comm
from fourfold.axes import BATCH, CUTS
from fourfold.comm import Pending
from fourfold.grid import Grid
from fourfold.layout import GATHERED, Layout
from fourfold.operators import AsyncResult, Body, OpContext, Ready, identity


@dataclass(frozen=True, slots=True)
class Channels:
    """A number of channels, and the axes that cut them, outermost first."""

    count: int
    axes: tuple[str, ...]

    @property
    def layout(self) -> Layout:
        """The layout of a vector with an entry for each channel."""
        return Layout.along(0, self.axes)

    def block(self, grid: Grid) -> range:
        """Return the channels of this rank."""
        return self.layout.box((self.count,), grid.shape.sizes, grid.coords)[0]

    def outer(self, cuts: int) -> Channels:
        """Return the same channels with only the first `cuts` cuts."""
        return Channels(self.count, self.axes[:cuts])

    @property
    def use(self) -> Layout:
        """The layout of a computation that treats each of these channels by itself."""
        return Layout.activation(BATCH, self.axes)

    @property
    def stored(self) -> Channels:
        """The cut of a parameter with a row for each channel.

        A DTensor is cut over axes in the order of the grid's. So the parameter has the cuts of the channels from the
        outermost on, as long as they are in that order, and a rank reads a part of the rows that it stores.
        """
        cuts = 1
        while cuts < len(self.axes) and CUTS.index(self.axes[cuts - 1]) < CUTS.index(self.axes[cuts]):
            cuts += 1
        return self.outer(cuts)

    @property
    def storage(self) -> Layout:
        """The storage layout of a parameter with a row for each channel."""
        return Layout.along(0, (*self.stored.axes, GATHERED))

    def part(self, grid: Grid) -> range:
        """Return which rows of such a parameter, in its compute layout, belong to this rank's channels."""
        return within(self.block(grid), self.stored.block(grid))


def whole_groups(channels: Channels, groups: int, grid: Grid) -> list[range] | None:
    """Return the groups of every rank, or None if a rank holds a part of a group; all groups have the same size."""
    size = channels.count // groups
    boxes = channels.layout.boxes((channels.count,), grid.shape.sizes)
    blocks = [held or range(0) for _, (held,) in boxes]  # an empty block may start inside a group
    if any(held.start % size or held.stop % size for held in blocks):
        return None
    return [range(held.start // size, held.stop // size) for held in blocks]


def within(inner: range, outer: range) -> range:
    """Return the channels `inner`, counted from the first channel of `outer`."""
    return range(inner.start - outer.start, inner.stop - outer.start) if inner else range(0)


def take(a: Tensor, held: range, dim: int = 1) -> Tensor:
    """Return a view of these channels."""
    return a if len(held) == a.shape[dim] else a.narrow(dim, held.start, len(held))


def embed(part: Tensor, held: range, rows: int) -> Tensor:
    """Return a gradient for `rows` rows of which only the rows `held` were used."""
    if len(held) == rows:
        return part
    whole = part.new_zeros(rows, *part.shape[1:])
    whole[held.start : held.stop] = part
    return whole


def gather(part: Tensor, site: OpContext, axis: str, count: int) -> Pending[Tensor]:
    """[r, count/axis, ...] -> [r, count, ...]"""
    return comm.all_gather(part, site.grid, axis, dim=1, length=count, label=site.label)


def _bodies(site: OpContext, axis: str, count: int, cut: bool) -> tuple[Body, Body]:
    """Return the two directions between [r, count/axis, ...], or [r, count, ...] if not cut, and {sum axis}."""
    if not cut:
        return identity, partial(comm.all_reduce, grid=site.grid, axis=axis, label=site.label)
    scatter = partial(comm.reduce_scatter, grid=site.grid, axis=axis, dim=1, label=site.label)
    return partial(gather, site=site, axis=axis, count=count), scatter


def enter(a: Tensor, site: OpContext, axis: str, count: int, *, cut: bool) -> AsyncResult | Ready:
    """Make channels whole over the axis, for ranks that each compute a part of the gradient."""
    return Ready(a) if site.grid.size(axis) == 1 else site.launch(a, *_bodies(site, axis, count, cut))


def leave(a: Tensor, site: OpContext, axis: str, *, cut: bool) -> AsyncResult | Ready:
    """[r, count, ...] {sum axis} -> cut over the axis, or the whole sum if not cut; the conjugate of `enter`."""
    if site.grid.size(axis) == 1:
        return Ready(a)
    return site.launch(a, *reversed(_bodies(site, axis, a.shape[1], cut)))


def join(a: Tensor, channels: Channels, cuts: int, site: OpContext) -> Tensor:
    """Gather the channels over all axes but the first `cuts`, outside of autograd."""
    shape = (a.shape[0], channels.count, *a.shape[2:])
    return comm.join(a, Layout.along(1, channels.axes), shape, site.grid, keep=cuts, label=site.label)


def require_block(a: Tensor, channels: Channels, grid: Grid, label: str) -> None:
    """Raise an error unless the tensor has this rank's channels."""
    held = len(channels.block(grid))
    if a.dim() < 2 or a.shape[1] != held:
        over = ", ".join(f"{axis}={grid.size(axis)}" for axis in channels.axes) or "no axis"
        raise ValueError(
            f"{label}: {channels.count} channels cut over {over} are {held} on this rank of the grid {grid}, but the "
            f"input is {tuple(a.shape)}; give [rows, {held}, *space]"
        )

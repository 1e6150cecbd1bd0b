"""The shape of a grid: the sizes of its axes, and the order in which ranks walk them.

This file imports no torch, so that a command that only reads files, such as `fourfold report`, starts at once.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isqrt, prod
from typing import TYPE_CHECKING, Any

from fourfold.axes import AXES, BATCH, CONTEXT, CUTS, FOLD, FOLD_SIZES, FOLDED, FOLDED_ALONG, MOST_DEVICES, PIPE
from fourfold.synonyms import explain_axis

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, init=False)
class Shape:
    """The sizes of the axes, and the order in which ranks walk them (fastest-varying axis first).

    `Shape(x=2, data=4)`; axes that are not named have one rank. With the default order,
    rank = x + X * (y + Y * (z + Z * (data + D * pipe))). The size of an axis is an attribute: `shape.x`.

    `context` is no axis: it divides z * data, and says how many neighbouring places share their rows.

    `expert`, `ex` and `ez` are none either. They fold the grid: tokens, of which the ranks of one pipe coordinate and
    one y coordinate all hold different ones at rest, are sent to experts. Such a rank has a number t among these ranks,
    t = expert + EXPERT * (ex + EX * (ez + EZ * edata)), so neighbours share the experts.
    """

    _sizes: tuple[int, ...]
    order: tuple[str, ...]
    context: int
    fold: tuple[int, ...]
    """The sizes of `FOLD_SIZES`."""

    def __init__(
        self,
        *sizes: int,
        order: Sequence[str] = AXES,
        context: int = 1,
        expert: int = 1,
        ex: int = 1,
        ez: int = 1,
        **named: int,
    ) -> None:
        """Take the sizes in the order of AXES, or by name."""
        by_axis = sizes_by_axis(sizes, named)
        fold = expert, ex, ez
        for axis, size in {**by_axis, CONTEXT: context, **dict(zip(FOLD_SIZES, fold, strict=True))}.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"grid axis {axis}={size!r}: the size of an axis is a whole number from 1 up")
        if (world := prod(by_axis.values())) > MOST_DEVICES:
            raise ValueError(f"the sizes of the grid multiply to {world} ranks; a grid has at most {MOST_DEVICES}")
        whole = tuple(order) if PIPE in order else (*order, PIPE)  # stages lie far apart unless somebody says otherwise
        if sorted(whole) != sorted(AXES):
            raise ValueError(
                f"order={tuple(order)!r} must name each axis once, fastest-varying first, such as {AXES!r}"
            )
        object.__setattr__(self, "_sizes", tuple(by_axis.values()))
        object.__setattr__(self, "order", whole)
        object.__setattr__(self, CONTEXT, context)
        object.__setattr__(self, "fold", fold)
        folded = prod(by_axis[axis] for axis in FOLDED_ALONG)
        if folded % prod(fold):
            raise ValueError(
                f"{'*'.join(FOLD_SIZES)} = {'*'.join(map(str, fold))} = {prod(fold)} does not divide "
                f"{'*'.join(FOLDED_ALONG)} = {folded}: experts are cut over the ranks that hold different tokens; use "
                "divisors, or more ranks along z or data"
            )
        if self.places % context:
            raise ValueError(
                f"context={context} does not divide {'*'.join(BATCH)} = {self.places}: a context group consists of "
                "whole (data, z) places; use a divisor, or more ranks along z or data"
            )
        # plain attributes, because a search reads them a million times
        for axis, size in (*by_axis.items(), *zip(FOLDED, (*fold, folded // prod(fold)), strict=True)):
            object.__setattr__(self, axis, size)

    def __getattr__(self, name: str) -> int:
        if name in AXES:
            return self._sizes[AXES.index(name)]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its axes are {', '.join(AXES)}")

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.named.items() if size > 1)
        return f"Shape({sizes})" if self.order == AXES else f"Shape({sizes}, order={self._written_order})"

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.named.items() if size > 1) or "one rank"
        return sizes if self.order == AXES else f"{sizes} order={','.join(self._written_order)}"

    @property
    def _written_order(self) -> tuple[str, ...]:
        """The order as people write it: without pipe where it is last, which is understood."""
        return self.order[:-1] if self.order[-1] == PIPE else self.order

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, in the order of AXES."""
        return dict(zip(AXES, self._sizes, strict=True))

    @cached_property
    def named(self) -> dict[str, int]:
        """Every size that somebody gives: `Shape(**shape.named, order=shape.order) == shape`."""
        return {**self.sizes, CONTEXT: self.context, **dict(zip(FOLD_SIZES, self.fold, strict=True))}

    @cached_property
    def cuts(self) -> dict[str, int]:
        """The size of everything that may cut a tensor, in both ways to number the ranks."""
        return {**self.sizes, **{axis: getattr(self, axis) for axis in FOLDED}}

    @cached_property
    def group_sizes(self) -> dict[str, int]:
        """The number of ranks of a group along everything that messages go along."""
        return {**self.named, **self.cuts}

    @property
    def fold_sizes(self) -> dict[str, int]:
        """The sizes of the fold, if the grid is folded."""
        return dict(zip(FOLD_SIZES, self.fold, strict=True)) if self.folded else {}

    @property
    def folded(self) -> bool:
        """Whether experts are cut over a fold; otherwise they are cut like other weights."""
        return max(self.fold) > 1

    @property
    def world(self) -> int:
        return prod(self.sizes.values())

    @property
    def places(self) -> int:
        """The number of places: sets of ranks that hold the same tokens."""
        return prod(self.sizes[axis] for axis in BATCH)

    @property
    def row_places(self) -> int:
        """The number of context groups: sets of places that have the same rows of a batch."""
        return self.places // self.context

    @property
    def used_axes(self) -> tuple[str, ...]:
        """The axes that have more than one rank."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    @property
    def message_axes(self) -> tuple[str, ...]:
        """The axes in use, context where places share rows, and those of a fold: what messages go along."""
        found = (*self.used_axes, CONTEXT) if self.context > 1 else self.used_axes
        return (*found, *(axis for axis in FOLDED if self.cuts[axis] > 1)) if self.folded else found

    def with_context(self, context: int) -> Shape:
        """Return the same grid with so many places that share their rows."""
        return Shape(**{**self.named, CONTEXT: context}, order=self.order)

    def with_fold(self, expert: int = 1, ex: int = 1, ez: int = 1) -> Shape:
        """Return the same grid with another fold."""
        return Shape(**{**self.named, **dict(zip(FOLD_SIZES, (expert, ex, ez), strict=True))}, order=self.order)

    def strides(self, axis: str) -> list[tuple[int, int]]:
        """Return the distance of neighbours in a group along an axis, and how many there are.

        A context group lies along z, and if it is larger than that also along data.
        """
        if axis == CONTEXT:
            data, z = BATCH
            inner = min(self.context, self.sizes[z])
            (near, _), (far, _) = *self.strides(z), *self.strides(data)
            if far == near * inner or inner == self.context:
                return [(near, self.context)]
            # a group that does not fill z to its end counts as if it did
            return [part for part in ((near, inner), (far, -(-self.context // inner))) if part[1] > 1]
        if axis in FOLDED:
            return self._strides_of_fold(axis)
        stride = prod(self.sizes[faster] for faster in self.order[: self.order.index(axis)])
        return [(stride, self.sizes[axis])]

    def _strides_of_fold(self, axis: str) -> list[tuple[int, int]]:
        """Return `strides` of an axis of the fold, whose groups may go along several axes."""
        apart = prod(self.cuts[faster] for faster in FOLDED[: FOLDED.index(axis)])  # in numbers t
        left, found = self.cuts[axis], []
        for along in self._folded_order:
            size = self.sizes[along]
            if apart >= size:
                apart = -(-apart // size)
                continue
            here, near = min(left, -(-size // apart)), self.strides(along)[0][0] * apart
            if found and found[-1][0] * found[-1][1] == near:  # goes on where the axis before ends
                found[-1] = found[-1][0], found[-1][1] * here
            elif here > 1:
                found.append((near, here))
            left, apart = -(-left // here), 1
        return found or [(1, 1)]

    @property
    def _folded_order(self) -> list[str]:
        """The axes that a fold numbers in another way, fastest-varying first."""
        return [axis for axis in self.order if axis in FOLDED_ALONG]

    @property
    def two_lanes(self) -> tuple[str, ...]:
        """The axes along which gathers and reductions have a communicator each.

        Along z weights are gathered ahead while gradients are reduced behind, and neither may queue behind the other;
        an axis that is alone sends both ways at once. Elsewhere collectives are used in the order of their launch, and
        further communicators only share the links and cost memory.
        """
        several = self.used_axes
        return tuple(axis for axis in several if axis == "z" or len(several) == 1)

    def reordered(self, order: Sequence[str]) -> Shape:
        """Return the same sizes with ranks that walk the axes in another order."""
        return Shape(**self.named, order=order)

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not on the grid {self}, which has ranks 0 to {self.world - 1}")
        found = {}
        for axis in self.order:
            rank, found[axis] = divmod(rank, self.sizes[axis])
        return found

    def rank(self, coords: Mapping[str, int]) -> int:
        """Return the rank at these coordinates; the inverse of `coords`."""
        rank = 0
        for axis in reversed(self.order):
            rank = rank * self.sizes[axis] + coords[axis]
        return rank

    def fold_coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank in the fold."""
        coords, number = self.coords(rank), 0
        for axis in reversed(self._folded_order):
            number = number * self.sizes[axis] + coords[axis]
        found = {}
        for axis in FOLDED:
            number, found[axis] = divmod(number, self.cuts[axis])
        return found

    def rank_in_fold(self, coords: Mapping[str, int]) -> int:
        """Return the rank at these coordinates of FOLD and pipe; the inverse of `fold_coords`."""
        number = 0
        for axis in reversed(FOLDED):
            number = number * self.cuts[axis] + coords[axis]
        here = {axis: coords[axis] for axis in AXES if axis not in FOLDED_ALONG}
        for axis in self._folded_order:
            number, here[axis] = divmod(number, self.sizes[axis])
        return self.rank(here)

    def place(self, rank: int) -> int:
        """Return the number of the place that a rank is in, with the outer cut of a batch (data) slowest."""
        coords, place = self.coords(rank), 0
        for axis in BATCH:
            place = place * self.sizes[axis] + coords[axis]
        return place

    def row_place(self, rank: int) -> int:
        """Return the number of the context group that a rank is in."""
        return self.place(rank) // self.context

    def member(self, rank: int) -> int:
        """Return the number of a rank's place in its context group."""
        return self.place(rank) % self.context

    def context_ranks(self, rank: int) -> list[int]:
        """Return the ranks of a rank's context group that have its coordinates on the other axes, by member."""
        here, first, inner = self.coords(rank), self.row_place(rank) * self.context, self.sizes[BATCH[1]]
        places = (divmod(place, inner) for place in range(first, first + self.context))
        return [self.rank({**here, **dict(zip(BATCH, place, strict=True))}) for place in places]

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """Return the ranks that share every coordinate with `rank` except the one on `axis`, or its context group."""
        if axis == CONTEXT:
            return self.context_ranks(rank)
        here = self.coords(rank)
        if axis in FOLDED:
            here |= self.fold_coords(rank)
            return [self.rank_in_fold({**here, axis: place}) for place in range(self.cuts[axis])]
        return [self.rank({**here, axis: place}) for place in range(self.sizes[axis])]

    def mesh_ranks(self) -> torch.Tensor:
        """Return the ranks by coordinates, one dim per axis in the order of AXES."""
        import torch  # here, because the other methods need no torch, and reports are written without it

        slowest_first = tuple(reversed(self.order))
        ranks = torch.arange(self.world).reshape([self.sizes[axis] for axis in slowest_first])
        return ranks.permute([slowest_first.index(axis) for axis in AXES]).contiguous()

    def fold_mesh_ranks(self) -> torch.Tensor:
        """Return the ranks by coordinates of the fold, one dim per axis: pipe, then those of FOLD."""
        import torch

        axes = (PIPE, *FOLD)
        sizes = [self.cuts[axis] for axis in axes]
        places = itertools.product(*map(range, sizes))
        ranks = [self.rank_in_fold(dict(zip(axes, place, strict=True))) for place in places]
        return torch.tensor(ranks).reshape(sizes)


def axes_signature(**options: Any) -> inspect.Signature:
    """Return the signature that help and editors show: the size of every axis, then these options."""
    kinds = inspect.Parameter
    sizes = [kinds(axis, kinds.POSITIONAL_OR_KEYWORD, default=1, annotation=int) for axis in AXES]
    sizes += [kinds(name, kinds.KEYWORD_ONLY, default=1, annotation=int) for name in (CONTEXT, *FOLD_SIZES)]
    return inspect.Signature(
        [*sizes, *(kinds(name, kinds.KEYWORD_ONLY, default=default) for name, default in options.items())]
    )


Shape.__signature__ = axes_signature(order=AXES)  # type: ignore[attr-defined]


def sizes_by_axis(sizes: Sequence[int], named: Mapping[str, int]) -> dict[str, int]:
    """Return the size of every axis, from sizes in the order of AXES and sizes by name; 1 for the others."""
    given = dict(zip(AXES, sizes, strict=False))
    unknown = [name for name in named if name not in AXES]
    if unknown or len(sizes) > len(AXES) or given.keys() & named.keys():
        answers = "".join(f"{answer}; " for name in unknown if (answer := explain_axis(name, named[name])))
        raise TypeError(
            f"{answers}a grid has the axes {', '.join(AXES)}, each given once; got {sizes} and {dict(named)}"
        )
    return dict.fromkeys(AXES, 1) | given | dict(named)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending; it takes only the square root of so many steps."""
    low = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return [*low, *(number // size for size in reversed(low) if size * size < number)]


def shapes_of(world: int, order: Sequence[str] = AXES, *, axes: Sequence[str] = CUTS) -> Iterator[Shape]:
    """Yield every way to factor `world` ranks into a grid of these axes, powers of two or not."""
    if world < 1:
        raise ValueError(f"a grid of {world} ranks: there must be at least one")

    def factor(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for size in divisors(left):
            yield from ((size, *rest) for rest in factor(left // size, axes - 1))

    for sizes in factor(world, len(axes)):
        yield Shape(**dict(zip(axes, sizes, strict=True)), order=tuple(order))

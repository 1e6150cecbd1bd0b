"""The shape of a grid: the sizes of its axes, and the order in which ranks walk them.

This file imports no torch, so that a command that only reads files, such as `fourfold report`, starts at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from fourfold.axes import AXES, BATCH, CUTS, PIPE
from fourfold.synonyms import explain_axis

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, init=False)
class Shape:
    """The sizes of the axes, and the order in which ranks walk them (fastest-varying axis first).

    `Shape(x=2, data=4)`; axes that are not named have one rank. With the default order,
    rank = x + X * (y + Y * (z + Z * (data + D * pipe))). The size of an axis is an attribute: `shape.x`.
    """

    _sizes: tuple[int, ...]
    order: tuple[str, ...]

    def __init__(self, *sizes: int, order: Sequence[str] = AXES, **named: int) -> None:
        """Take the sizes in the order of AXES, or by name."""
        by_axis = sizes_by_axis(sizes, named)
        for axis, size in by_axis.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"grid axis {axis}={size!r}: the size of an axis is a whole number from 1 up")
        whole = tuple(order) if PIPE in order else (*order, PIPE)  # stages lie far apart unless somebody says otherwise
        if sorted(whole) != sorted(AXES):
            raise ValueError(
                f"order={tuple(order)!r} must name each axis once, fastest-varying first, such as {AXES!r}"
            )
        object.__setattr__(self, "_sizes", tuple(by_axis.values()))
        object.__setattr__(self, "order", whole)

    def __getattr__(self, name: str) -> int:
        if name in AXES:
            return self._sizes[AXES.index(name)]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; its axes are {', '.join(AXES)}")

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1)
        return f"Shape({sizes})" if self.order == AXES else f"Shape({sizes}, order={self._written_order})"

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={size}" for axis, size in self.sizes.items() if size > 1) or "one rank"
        return sizes if self.order == AXES else f"{sizes} order={','.join(self._written_order)}"

    @property
    def _written_order(self) -> tuple[str, ...]:
        """The order as people write it: without pipe where it is last, which is understood."""
        return self.order[:-1] if self.order[-1] == PIPE else self.order

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The size of every axis, in the order of AXES."""
        return dict(zip(AXES, self._sizes, strict=True))

    @property
    def world(self) -> int:
        return prod(self.sizes.values())

    @property
    def places(self) -> int:
        """The number of places: sets of ranks that hold the same rows of a batch."""
        return prod(self.sizes[axis] for axis in BATCH)

    @property
    def used_axes(self) -> tuple[str, ...]:
        """The axes that have more than one rank."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

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
        return Shape(*self._sizes, order=order)

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

    def place(self, rank: int) -> int:
        """Return the number of the place that a rank is in, with the outer cut of a batch (data) slowest."""
        coords, place = self.coords(rank), 0
        for axis in BATCH:
            place = place * self.sizes[axis] + coords[axis]
        return place

    def ranks_along(self, axis: str, rank: int) -> list[int]:
        """Return the ranks that share every coordinate with `rank` except the one on `axis`."""
        here = self.coords(rank)
        return [self.rank({**here, axis: place}) for place in range(self.sizes[axis])]

    def mesh_ranks(self) -> torch.Tensor:
        """Return the ranks by coordinates, one dim per axis in the order of AXES."""
        import torch  # here, because the other methods need no torch, and reports are written without it

        slowest_first = tuple(reversed(self.order))
        ranks = torch.arange(self.world).reshape([self.sizes[axis] for axis in slowest_first])
        return ranks.permute([slowest_first.index(axis) for axis in AXES]).contiguous()


def axes_signature(**options: Any) -> inspect.Signature:
    """Return the signature that help and editors show: the size of every axis, then these options."""
    kinds = inspect.Parameter
    sizes = [kinds(axis, kinds.POSITIONAL_OR_KEYWORD, default=1, annotation=int) for axis in AXES]
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


def shapes_of(world: int, order: Sequence[str] = AXES, *, axes: Sequence[str] = CUTS) -> Iterator[Shape]:
    """Yield every way to factor `world` ranks into a grid of these axes, powers of two or not."""
    if world < 1:
        raise ValueError(f"a grid of {world} ranks: there must be at least one")

    def factor(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for size in range(1, left + 1):
            if left % size == 0:
                yield from ((size, *rest) for rest in factor(left // size, axes - 1))

    for sizes in factor(world, len(axes)):
        yield Shape(**dict(zip(axes, sizes, strict=True)), order=tuple(order))

"""How tensors are cut over the axes of the grid. Pure arithmetic: no process, no communication.

A `Layout` is an ordered list of cuts (axis, dim), outermost cut first. One type serves parameters, activations, the
channels of images, tensors of a wrapped model, checkpoints and the planner:

- a parameter's *storage* layout says how it rests; its *compute* layout is the same without `GATHERED`, the axis over
  which a weight is gathered before it is used;
- an activation has two dims, tokens and features; `rest` and `inner` are the two layouts between which layers move it.

What a gradient still owes follows from the storage and the use of its parameter (`Spec.owes`) and from nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from fourfold.axes import AXES, BATCH, CUTS, FOLD, FOLDED, REPLICAS
from fourfold.grid import Grid
from fourfold.policy import Activations

GATHERED = "z"
"""The axis over which weights are gathered before use and their gradients reduce-scattered, but for those of a fold."""
GATHERED_AXES = (GATHERED, "ez")
"""The axes over which weights are gathered: most of them, and those of experts on a fold."""
TOKENS, FEATURES = 0, 1
"""The two dims of an activation, flattened to [tokens, features]."""

Box = tuple[range, ...]
"""The index range that a rank holds of each dim."""


def chunk(length: int, parts: int, index: int) -> range:
    """Return part `index` of `range(length)` as torch.chunk cuts it: equal parts, the last ones short or empty."""
    size = -(-length // parts)
    return range(min(index * size, length), min((index + 1) * size, length))


ALIGNED_COLUMNS = 64
"""The columns of logits are padded to a multiple of this. 64 elements of 16 bits are 128 bytes: one block of the inner
dim in the products of tensor cores, and a multiple of the 16 bytes to which their kernels need every row aligned. A
multiple of 128 would only fill the last tile of the output, and a half-filled tile takes as long as a full one."""
ALIGNED_ITEMSIZES = (2,)
"""Bytes per element of the dtypes whose products need aligned rows: those of 16 bits, which run on tensor cores."""
LEAST_TO_PADDING = 16
"""Logits are padded for alignment only if a rank has at least this many times `ALIGNED_COLUMNS`, so that padding never
adds more than a sixteenth to the product and to its messages."""


def logits_columns(vocab: int, ranks: int, cuts: int, itemsize: int) -> int:
    """Return the columns of logits on every rank along x, padding included.

    `ranks` ranks cut the rows of the table; `cuts` is the number of parts into which `spread` cuts the columns. The
    numbers depend on sizes and dtype alone, so that the runtime and the planner agree on every device.
    """
    most = -(-vocab // ranks)  # rows of the table on the first rank
    unit = lcm(ALIGNED_COLUMNS, cuts)
    if itemsize not in ALIGNED_ITEMSIZES or most < LEAST_TO_PADDING * unit:
        unit = cuts
    return -(-most // unit) * unit


def boxed(whole: Tensor, box: Sequence[range]) -> Tensor:
    """Return a view of the part of `whole` that lies in the box."""
    return whole[tuple(slice(part.start, part.stop) for part in box)]


def overlap(one: range, other: range) -> range:
    """Return the indices that two ranges share."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which dim of a tensor each axis cuts, outermost cut first: `(("x", 0), ("y", 1), ("z", 0))`."""

    cuts: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.axes)) != len(self.cuts) or not set(self.axes) <= {*AXES, *FOLDED}:
            raise ValueError(f"a layout names each of the axes {(*AXES, *FOLDED)} at most once; got {self.axes}")

    @classmethod
    def along(cls, dim: int, axes: Sequence[str]) -> Layout:
        """Return the layout that cuts one dim over these axes, outermost first."""
        return cls(tuple((axis, dim) for axis in axes))

    @classmethod
    def activation(cls, tokens: Sequence[str], features: Sequence[str]) -> Layout:
        """Return the layout of [tokens, features] that cuts each of them over these axes."""
        return cls((*((axis, TOKENS) for axis in tokens), *((axis, FEATURES) for axis in features)))

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that cut the tensor."""
        return tuple(axis for axis, _ in self.cuts)

    def over(self, dim: int) -> tuple[str, ...]:
        """Return the axes that cut this dim, outermost first."""
        return tuple(axis for axis, cut_dim in self.cuts if cut_dim == dim)

    def parts(self, sizes: Mapping[str, int], dim: int) -> int:
        """Return into how many parts a dim is cut on a grid of these sizes."""
        return prod(sizes[axis] for axis in self.over(dim))

    def outer(self, count: int) -> Layout:
        """Return the layout of the first `count` cuts alone."""
        return Layout(self.cuts[:count])

    @property
    def compute(self) -> Layout:
        """The layout in which a product uses a stored parameter: whole over the gathered axis."""
        return Layout(tuple(cut for cut in self.cuts if cut[0] not in GATHERED_AXES))

    @property
    def view(self) -> tuple[str, ...]:
        """The axes that may cut such a tensor, outermost first: those of a fold if it names any of these."""
        return FOLD if any(axis in FOLDED for axis in self.axes) else CUTS

    def box(self, shape: Sequence[int], sizes: Mapping[str, int], coords: Mapping[str, int]) -> Box:
        """Return the box of the rank at `coords`: each cut takes that rank's chunk of what the outer cuts left."""
        held = [range(length) for length in shape]
        for axis, dim in self.cuts:
            part = chunk(len(held[dim]), sizes[axis], coords[axis])
            held[dim] = held[dim][part.start : part.stop]
        return tuple(held)

    def boxes(
        self, shape: Sequence[int], sizes: Mapping[str, int], within: Box | None = None
    ) -> Iterator[tuple[dict[str, int], Box]]:
        """Yield the coordinates and the box of every part, in the order of the coordinates.

        With `within` only those parts are visited that overlap it, however many others there are.
        """

        def visit(coords: dict[str, int], held: Box, cut: int) -> Iterator[tuple[dict[str, int], Box]]:
            if cut == len(self.cuts):
                yield coords, held
                return
            axis, dim = self.cuts[cut]
            for index in range(sizes[axis]):
                part = chunk(len(held[dim]), sizes[axis], index)
                left = held[dim][part.start : part.stop]
                if within is None or overlap(left, within[dim]):
                    yield from visit({**coords, axis: index}, (*held[:dim], left, *held[dim + 1 :]), cut + 1)

        return visit({}, tuple(range(length) for length in shape), 0)

    def take(self, whole: Tensor, grid: Grid) -> Tensor:
        """Return a view of this rank's part; `comm.join` is the inverse."""
        return boxed(whole, self.box(whole.shape, grid.shape.cuts, grid.coords))

    def placements(self) -> list[Placement]:
        """Return the same layout for a DTensor on a grid's mesh, which cuts in the order of the mesh's dims."""
        dims, view = dict(self.cuts), self.view
        if list(self.axes) != [axis for axis in view if axis in dims]:
            raise ValueError(f"a DTensor is cut over the axes in the order {view}, outermost first; got {self.axes}")
        return [Shard(dims[axis]) if axis in dims else Replicate() for axis in view]

    @classmethod
    def of(cls, tensor: DTensor | DTensorSpec) -> Layout:
        """Return the layout of a DTensor on a mesh of a grid, or of its spec."""
        by_axis = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
        return cls(tuple((axis, placement.dim) for axis, placement in by_axis if isinstance(placement, Shard)))


def rest(mode: Activations) -> Layout:
    """Return the layout of the residual stream between sublayers."""
    return Layout.activation((*BATCH, "x") if mode == "sharded" else BATCH, ("y",))


def inner(mode: Activations) -> Layout:
    """Return the layout of heads inside attention, of hidden units inside the MLP, and of logits."""
    return Layout.activation(BATCH, ("x", "y") if mode == "sharded" else ("x",))


PRODUCT = Layout.activation(BATCH, ("x", "y"))
"""A product in either mode: its out-features are cut over one of x and y, the summands of each over the other."""
OUTPUT_OF_CONTRACT = Layout.activation(BATCH, ("y",))
"""The output of a Contract product before `leave`: its sum is owed over x, so a bias is added once, not cut."""
OUTPUT_OF_HEAD = Layout.activation(BATCH, ("x",))
"""The output of a head's product before `spread`: its sum is owed over y, and a bias is added once."""
REPEATED = Layout.activation(BATCH, ())
"""A computation that every rank of a place repeats on the same rows."""

EXPAND_WEIGHT = Layout((("x", 0), ("y", 1), ("z", 0)))
CONTRACT_WEIGHT = Layout((("x", 1), ("y", 0), ("z", 0)))
EXPAND_BIAS = Layout((("x", 0), ("y", 0), ("z", 0)))
HEAD_BIAS = Layout((("x", 0), ("z", 0)))
RESIDUAL_VECTOR = Layout((("y", 0), ("z", 0)))
POSITIONS = Layout((("y", 1), ("z", 0)))
WHOLE = Layout((("z", 0),))


@dataclass(frozen=True, slots=True)
class Init:
    """The initial values of a parameter: normal with this mean and deviation, or the mean alone if `std` is 0."""

    mean: float = 0.0
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter on the grid: its global shape, how it is stored, in which layout it is used, how it starts."""

    shape: tuple[int, ...]
    storage: Layout
    use: Layout
    init: Init = Init()
    is_copy: bool = False
    """Whether a rank at another pipe coordinate holds the same parameter and counts it for the norm of gradients."""

    @property
    def owes(self) -> tuple[str, ...]:
        """The axes over which the parameter's gradient is owed an all-reduce.

        These are all axes that cut the computation and do not cut the parameter. An axis over which the computation
        was merely repeated owes nothing; an axis that cuts the storage as well is paid by the reduce-scatter.
        """
        return tuple(axis for axis in self.view if axis in self.use.axes and axis not in self.storage.axes)

    @property
    def view(self) -> tuple[str, ...]:
        """The axes that may cut it: `FOLD` for experts on a folded grid, else `CUTS`."""
        return self.storage.view

    @property
    def replicas(self) -> str:
        """The axis over which its gradient is the same once it is complete."""
        return REPLICAS[self.view is FOLD]

    @property
    def gathered(self) -> str:
        """The axis over which it is gathered before its use."""
        return GATHERED_AXES[self.view is FOLD]

    def box(self, grid: Grid) -> Box:
        """Return the index ranges that this rank stores."""
        return self.storage.box(self.shape, grid.shape.cuts, grid.coords)

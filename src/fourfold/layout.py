"""How tensors are cut over the axes of the grid. Pure arithmetic: no process, no communication.

Two kinds of layout. `Cut` says how an activation lies: which axes cut its tokens, which its features.
`Storage` says how a parameter rests: which tensor dim each axis cuts, outermost cut first; its *compute*
layout is the same without `GATHERED`, the axis that a weight is gathered over before it is used.

What a gradient still owes follows from the two (`Spec.owes`) and from nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from fourfold.grid import AXES
from fourfold.overlap import Overlap

Activations = Literal["sharded", "replicated"]
Recompute = Literal["none", "attention", "block"]
GATHERED = "z"


@dataclass(frozen=True, slots=True)
class Policy:
    """What is kept, what is cut, and in which precision. Only the two dtypes and halves change a result."""

    activations: Activations = "sharded"
    """`sharded` cuts activations fully; `replicated` is the published algorithm, whole where ours are cut."""
    keep_gathered: bool = False
    """Keep a product's gathered input for backward; otherwise keep the cut one and gather it again."""
    keep_weights: bool = False
    """Keep weights gathered over z from forward to backward; otherwise gather them again."""
    recompute: Recompute = "none"
    """What is forgotten in forward and computed again in backward: nothing, attention's inside, whole blocks."""
    compute: torch.dtype | None = None
    """Dtype of gathered weights, activations and their messages; None: that of the parameters."""
    reduce: torch.dtype | None = None
    """Dtype in which gradients of weights are reduced over z; None: that of the parameters."""
    loss_chunk: int = 0
    """Tokens of a place whose logits exist at once, so that a large vocabulary does not set the peak; 0: all."""
    shard_optimizer: bool = False
    """Cut gradients and optimizer state over data as well (ZeRO-1); `optim.AdamW` then gathers parameters."""
    bucket_bytes: int = 25 << 20
    """Gradients that owe the same sums travel together in messages of about this size."""
    compile: bool = False
    """Compile the computation between collectives, region by region."""
    overlap: Overlap = Overlap()
    """How much communication runs behind computation."""
    check_inputs: bool = False
    """Check token ids on a device too, which reads them back; on the CPU they are always checked."""

    def __post_init__(self) -> None:
        if self.activations not in get_args(Activations):
            raise ValueError(f"activations={self.activations!r} is none of {get_args(Activations)}")
        if self.recompute not in get_args(Recompute):
            raise ValueError(f"recompute={self.recompute!r} is none of {get_args(Recompute)}")
        for name in ("compute", "reduce"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name}={dtype!r} must be a floating-point dtype such as torch.bfloat16, or None")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk={self.loss_chunk} must be a number of tokens, or 0 for all at once")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={self.bucket_bytes} must be at least 1")


@dataclass(frozen=True, slots=True)
class Cut:
    """An activation's layout: the axes that cut its tokens and those that cut its features."""

    tokens: tuple[str, ...]
    features: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return (*self.tokens, *self.features)

    def feature_parts(self, sizes: Mapping[str, int]) -> int:
        """Into how many parts the features are cut."""
        return prod(sizes[axis] for axis in self.features)


def rest(mode: Activations) -> Cut:
    """The residual stream between sublayers."""
    return Cut(("data", "z", "x") if mode == "sharded" else ("data", "z"), ("y",))


def inner(mode: Activations) -> Cut:
    """Heads inside attention, hidden units inside the MLP, logits."""
    return Cut(("data", "z"), ("x", "y") if mode == "sharded" else ("x",))


PRODUCT = Cut(("data", "z"), ("x", "y"))
"""A product in either mode: out-features over one of x and y, the summands of each over the other."""
OUTPUT_OF_CONTRACT = Cut(("data", "z"), ("y",))
"""What a Contract product gives before `leave`: its sum is owed over x, so a bias is added once, not cut."""
OUTPUT_OF_HEAD = Cut(("data", "z"), ("x",))
"""What a head's product gives before `spread`: its sum is owed over y, and a bias is added once."""


def chunk(length: int, parts: int, index: int) -> range:
    """The `index`-th part of `range(length)` as torch.chunk cuts it: equal, the last ones short or empty."""
    size = -(-length // parts)
    return range(min(index * size, length), min((index + 1) * size, length))


def boxed(whole: Tensor, box: Sequence[range]) -> Tensor:
    """A view of the part with these index ranges."""
    return whole[tuple(slice(part.start, part.stop) for part in box)]


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """Zeros below, where uneven parts leave a rank with fewer rows than the message has."""
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


@dataclass(frozen=True, slots=True)
class Storage:
    """Which dim of a parameter each axis cuts, outermost cut first: `(("x", 0), ("y", 1), ("z", 0))`."""

    cuts: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        axes = [axis for axis, _ in self.cuts]
        if axes != [axis for axis in AXES if axis in axes]:
            raise ValueError(f"a storage cuts each axis at most once, in the order {AXES}; got {axes}")

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.cuts)

    @property
    def compute(self) -> Storage:
        """How a product uses the parameter: as stored, but whole over the gathered axis."""
        return Storage(tuple(cut for cut in self.cuts if cut[0] != GATHERED))

    def placements(self) -> list[Placement]:
        """The same for a DTensor on a grid's mesh."""
        dims = dict(self.cuts)
        return [Shard(dims[axis]) if axis in dims else Replicate() for axis in AXES]

    @classmethod
    def of(cls, placements: Sequence[Placement]) -> Storage:
        """That of a DTensor on a grid's mesh."""
        places = zip(AXES, placements, strict=True)
        return cls(tuple((axis, place.dim) for axis, place in places if isinstance(place, Shard)))

    def box(self, shape: tuple[int, ...], sizes: Mapping[str, int], coords: Mapping[str, int]) -> tuple[range, ...]:
        """The index range of each dim that the rank at `coords` holds."""
        held = [range(length) for length in shape]
        for axis, dim in self.cuts:
            part = chunk(len(held[dim]), sizes[axis], coords[axis])
            held[dim] = held[dim][part.start : part.stop]
        return tuple(held)


EXPAND_WEIGHT = Storage((("x", 0), ("y", 1), ("z", 0)))
CONTRACT_WEIGHT = Storage((("x", 1), ("y", 0), ("z", 0)))
EXPAND_BIAS = Storage((("x", 0), ("y", 0), ("z", 0)))
HEAD_BIAS = Storage((("x", 0), ("z", 0)))
FEATURES = Storage((("y", 0), ("z", 0)))
POSITIONS = Storage((("y", 1), ("z", 0)))
WHOLE = Storage((("z", 0),))


@dataclass(frozen=True, slots=True)
class Init:
    """Initial values: normal with this mean and deviation, or the mean alone where the deviation is 0."""

    mean: float = 0.0
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Spec:
    """A parameter on the grid: its global shape, how it rests, where it is used, how it starts."""

    shape: tuple[int, ...]
    storage: Storage
    use: Cut
    init: Init = Init()

    @property
    def owes(self) -> tuple[str, ...]:
        """Axes over which its gradient is owed an all-reduce.

        Every axis that cut the computation and does not cut the parameter. Axes over which the computation
        was merely repeated owe nothing; axes that cut the storage as well are paid by reduce-scatter.
        """
        return owed(self.use.axes, self.storage.axes)


def owed(used: Collection[str], stored: Collection[str]) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if axis in used and axis not in stored)

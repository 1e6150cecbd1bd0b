"""What is compared on the emulated cluster, fixed before anything is measured: settings, sizes, and their lines.

A setting is a cluster (nodes, ranks on each, bandwidth of a link) and a size (model and batch). Fourfold stands on
every grid with every rank order that places it differently on the nodes, its peers on their own meshes, each with
gloo's reduce-scatter and with the minimal one underneath.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch

import cluster
import fourfold as ff
from fourfold.axes import AXES
from fourfold.cost.machine import Machine
from fourfold.cost.price import Task
from fourfold.cost.published import published_ranking
from fourfold.cost.seconds import spread_of
from fourfold.grid import shapes_of
from sides import Line, Size

POLICY = ff.Policy(keep_gathered=True)
"""Gathered inputs are kept for backward, as torch's TP and Megatron keep them."""
PUBLISHED = ff.Policy(
    activations="replicated",
    keep_gathered=True,
    overlap=ff.Overlap(prefetch=True, defer=True, behind_products=True, halves=1, data=False),
)
"""The published algorithm with its overlaps."""
FOURFOLD, PUBLISHED_KIND = OURS = "fourfold", "published"
"""Kinds of lines that Fourfold's own code runs."""
PUBLISHED_GRIDS = 6
"""Of its list are measured: the published system tries the first ones too."""
PLANNED, MINIMAL = "planned", "minimal reduce-scatter"
"""Variants: the grid and policy that the planner chose; a peer on another reduce-scatter than gloo's."""


def _llama(seq: int) -> ff.models.ModelConfig:
    """4.3 M parameters, 17 MB, in two layers: many bytes for the work of a core, so that links decide and not cores."""
    sizes = dict(layers=2, hidden=384, heads=8, kv_heads=8, head_dim=48, mlp_hidden=1024)
    return ff.models.config("llama-3-8b", **sizes, vocab=1024, seq=seq)


SIZES = {
    "few": Size("few", _llama(32), 16, torch.float32),
    "many": Size("many", _llama(64), 16, torch.float32),
    "tiny": Size("tiny", ff.models.config("llama-tiny", kv_heads=24, vocab=256, seq=16), 8, torch.float32),
}
"""The same model on a batch of 512 tokens and on one of 1024: weights travel, or activations do; a smoke test."""


@dataclass(frozen=True)
class Setting:
    """A cluster, and what is trained on it."""

    cluster: cluster.Shape
    size: Size

    @property
    def name(self) -> str:
        shape = self.cluster
        rate = "unlimited" if shape.mbit is None else f"{shape.mbit:g}"
        return f"{shape.nodes}x{shape.ranks}-{rate}-{self.size.name}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """`NODESxRANKS-MBIT-SIZE`, as `name` writes it."""
        try:
            grid, mbit, size = text.split("-")
            nodes, ranks = (int(number) for number in grid.split("x"))
            shape = cluster.Shape(nodes, ranks, None if mbit == "unlimited" else float(mbit))
            return cls(shape, SIZES[size])
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{text!r} is no setting ({error}); one is NODESxRANKS-MBIT-SIZE with a size of {', '.join(SIZES)}, "
                "such as 4x2-400-few"
            ) from error

    def task(self, machine: Machine) -> Task:
        """For the planner."""
        size = self.size
        return Task(size.config, machine, size.rows, size.config.seq, size.dtype, size.dtype)

    def __str__(self) -> str:
        return f"{self.cluster}, {self.size.tokens} tokens"


@dataclass(frozen=True)
class Job:
    """What the ranks of a cluster are to measure, and where to write it."""

    size: Size
    lines: tuple[Line, ...]
    rounds: int
    warmup: int
    seconds: float
    """After which no further round begins."""
    memory: bool
    """Peak memory instead of seconds: every line alone, one step after those that warm it up."""
    out: str


def placements(world: int, per_node: int) -> Iterator[ff.Shape]:
    """Every grid, in every order of ranks that lays it out differently on nodes."""
    for shape in shapes_of(world):
        seen = set()
        for order in permutations(AXES):
            placed = ff.Shape(**shape.sizes, order=order)
            where = _where(placed, per_node)
            if where not in seen:
                seen.add(where)
                yield placed


def _where(shape: ff.Shape, per_node: int) -> tuple[object, ...]:
    """How the groups of each axis lie on nodes."""
    found, stride = {}, 1
    for axis in shape.order:
        found[axis] = spread_of(stride, shape.sizes[axis], shape.world, per_node)
        stride *= shape.sizes[axis]
    return tuple(found[axis] for axis in shape.several)


def grids_of(setting: Setting) -> list[Line]:
    """Fourfold on every grid that cuts this model and batch, placed in every way."""
    size = setting.size
    return [
        Line(FOURFOLD, shape, policy=POLICY)
        for shape in placements(setting.cluster.world, setting.cluster.ranks)
        if size.config.misfit(shape, POLICY) is None and size.rows % (shape.z * shape.data) == 0
    ]


def published_of(setting: Setting, machine: Machine) -> list[Line]:
    """The published algorithm on the first grids of its own model's list."""
    size = setting.size
    ranked = published_ranking(size.config, setting.cluster.world, size.rows, size.config.seq, machine)
    return [Line(PUBLISHED_KIND, found.shape, policy=PUBLISHED) for found in ranked[:PUBLISHED_GRIDS]]


def peers_of(setting: Setting) -> Iterator[Line]:
    """Each peer on its meshes, with both reduce-scatters where it has any."""
    world, per_node = setting.cluster.world, setting.cluster.ranks
    yield Line("DDP", ff.Shape(data=world))
    for kind in ("FSDP2", "FSDP2 explicit prefetch", "DeepSpeed ZeRO-3"):
        yield from _both(kind, ff.Shape(z=world))
    for inside in {per_node, world // per_node} - {1, world}:
        yield from _both("HSDP", ff.Shape(z=inside, data=world // inside, order=("z", "data", "x", "y")))
        yield from _both("FSDP2 x TP", ff.Shape(x=inside, z=world // inside))
        yield from _both("Megatron TP", ff.Shape(x=inside, data=world // inside))
    for kind in ("TP", "Megatron TP"):
        yield from _both(kind, ff.Shape(x=world))


def _both(kind: str, shape: ff.Shape) -> Iterator[Line]:
    yield Line(kind, shape)
    yield Line(kind, shape, MINIMAL)

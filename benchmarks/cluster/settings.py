"""What is compared on the emulated cluster, fixed before anything is measured: settings, workloads and lines.

A setting is a cluster (nodes, ranks per node, bandwidth of a link) and a workload (model and batch). Fourfold runs on
every grid, with every rank order that places the grid differently on the nodes. Each peer runs on its own meshes, once
with gloo's reduce-scatter and once with the minimal one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import torch

import fourfold as ff
from benchmarks.cluster.emulate import ClusterShape
from benchmarks.shared.decoder import piece_costs
from benchmarks.shared.pipelines import PIPELINES, stages_of
from benchmarks.shared.published import published_ranking
from benchmarks.shared.workloads import Line, Workload
from fourfold.axes import AXES
from fourfold.planner.machine import Machine, spread_of
from fourfold.planner.price import Task
from fourfold.schedule.stages import Stages
from fourfold.shape import shapes_of

POLICY = ff.Policy(keep_gathered=True)
"""Keeps gathered inputs for backward, as torch's TP and Megatron do."""
PUBLISHED = ff.Policy(
    activations="replicated",
    keep_gathered=True,
    overlap=ff.Overlap(prefetch=True, defer=True, wgrad_behind_messages=True, halves=1, reduce_early=False),
)
"""The published algorithm with its overlaps."""
FOURFOLD, PUBLISHED_KIND = OURS = "fourfold", "published"
"""The kinds of lines that run Fourfold's own code."""
PUBLISHED_GRIDS = 6
"""How many grids from the published model's list are measured; the published system tries the first ones too."""
PLANNED, MINIMAL = "planned", "minimal reduce-scatter"
"""Variants: the grid and policy that the planner chose, and a peer with another reduce-scatter than gloo's."""


def _llama(seq: int, layers: int = 2, hidden: int = 384) -> ff.models.ModelConfig:
    """Return a model of about 4 M parameters (17 MB): many bytes for little work, so that the links are the bottleneck
    and not the cores."""
    heads = hidden // 48
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=48, mlp_hidden=8 * hidden // 3)
    return ff.models.config("llama-3-8b", **sizes, vocab=1024, seq=seq)


WORKLOADS = {
    "few": Workload("few", _llama(32), 16, torch.float32),
    "many": Workload("many", _llama(64), 16, torch.float32),
    "deep": Workload("deep", _llama(32, layers=8, hidden=192), 16, torch.float32),
    "tiny": Workload("tiny", ff.models.config("llama-tiny", kv_heads=24, vocab=256, seq=16), 8, torch.float32),
}
"""`few` and `many` are one model of two layers with 512 and 1024 tokens: mostly weights travel, or mostly activations.
`deep` has 512 tokens and eight layers, enough for stages of whole layers. `tiny` is a smoke test."""


@dataclass(frozen=True)
class Setting:
    """A cluster, and the workload that is trained on it."""

    cluster: ClusterShape
    workload: Workload

    @property
    def name(self) -> str:
        shape = self.cluster
        mbit = "unlimited" if shape.mbit is None else f"{shape.mbit:g}"
        return f"{shape.nodes}x{shape.ranks}-{mbit}-{self.workload.name}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Parse `NODESxRANKS-MBIT-SIZE`, the form that `name` returns."""
        try:
            grid, mbit, size = text.split("-")
            nodes, ranks = (int(number) for number in grid.split("x"))
            shape = ClusterShape(nodes, ranks, None if mbit == "unlimited" else float(mbit))
            return cls(shape, WORKLOADS[size])
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{text!r} is not a setting ({error}); write NODESxRANKS-MBIT-SIZE, where SIZE is one of "
                f"{', '.join(WORKLOADS)}, such as 4x2-400-few"
            ) from error

    def task(self, machine: Machine) -> Task:
        """Return the planner's task for this workload."""
        work = self.workload
        return Task(work.config, machine, work.rows, work.config.seq, work.dtype, work.dtype)

    def __str__(self) -> str:
        model = self.workload.config
        sizes = f"{model.layers} layers, hidden {model.hidden}, {model.parameters / 1e6:.1f} M parameters"
        return f"{self.cluster}, {self.workload.tokens} tokens, {sizes}"


@dataclass(frozen=True)
class Job:
    """What the ranks of a cluster must measure, and where they write it."""

    workload: Workload
    lines: tuple[Line, ...]
    rounds: int
    warmup: int
    seconds: float
    """No new round begins after this many seconds."""
    memory: bool
    """Measure peak memory instead of seconds: one line at a time, one step after the warm-up."""
    out: str
    """The file for events, one JSON object per line."""


def placements(world: int, per_node: int) -> Iterator[ff.Shape]:
    """Yield every grid in every rank order that places it differently on the nodes."""
    for shape in shapes_of(world):
        seen = set()
        for order in permutations(AXES):
            placed = shape.reordered(order)
            spread = _spread(placed, per_node)
            if spread not in seen:
                seen.add(spread)
                yield placed


def _spread(shape: ff.Shape, per_node: int) -> tuple[object, ...]:
    """Return how the groups of each axis are spread over nodes."""
    found, stride = {}, 1
    for axis in shape.order:
        found[axis] = spread_of(stride, shape.sizes[axis], shape.world, per_node)
        stride *= shape.sizes[axis]
    return tuple(found[axis] for axis in shape.used_axes)


def grids_of(setting: Setting) -> list[Line]:
    """Return Fourfold's lines: every grid that divides this model and batch, in every placement."""
    work = setting.workload
    return [
        Line(FOURFOLD, shape, policy=POLICY)
        for shape in placements(setting.cluster.world, setting.cluster.ranks)
        if work.config.misfit(shape, POLICY) is None and work.rows % (shape.z * shape.data) == 0
    ]


def own_pipelines(setting: Setting) -> Iterator[Line]:
    """Yield Fourfold's pipelines over the nodes, with one other axis inside a node."""
    work, world, per_node = setting.workload, setting.cluster.world, setting.cluster.ranks
    units, pipe = work.config.layers + 2, world // per_node
    if pipe < 2 or pipe > units:
        return
    # one unit or more for each rank, the layers in the middle
    stages = Stages(tuple(units * stage // pipe for stage in range(pipe + 1)), tuple(range(pipe)))
    for axis in ("data", "x"):
        shape = ff.Shape(**{axis: per_node}, pipe=pipe)
        for schedule in ("1f1b", "zb-h1"):
            for micro_batches in (pipe, 2 * pipe):
                if work.rows % (shape.places * micro_batches) == 0 and work.config.misfit(shape, POLICY) is None:
                    policy = replace(POLICY, stages=stages, schedule=schedule)
                    yield Line(FOURFOLD, shape, schedule, policy, micro_batches=micro_batches)


def published_of(setting: Setting, machine: Machine) -> list[Line]:
    """Return the published algorithm's lines: the first grids of its own model's list."""
    work = setting.workload
    ranked = published_ranking(work.config, setting.cluster.world, work.rows, work.config.seq, machine)
    return [Line(PUBLISHED_KIND, found.shape, policy=PUBLISHED) for found in ranked[:PUBLISHED_GRIDS]]


def peers_of(setting: Setting) -> Iterator[Line]:
    """Yield each peer on its meshes, with both reduce-scatters where it uses one."""
    world, per_node = setting.cluster.world, setting.cluster.ranks
    yield Line("DDP", ff.Shape(data=world))
    for kind in ("FSDP2", "FSDP2 explicit prefetch", "DeepSpeed ZeRO-3"):
        yield from _both(kind, ff.Shape(z=world))
    yield from _both("FSDP2", ff.Shape(z=world), reshard=False)
    for inside in sorted({per_node, world // per_node} - {1, world}):
        outside = world // inside
        for reshard in (True, False):
            shape = ff.Shape(z=inside, data=outside, order=("z", "data", "x", "y"))
            yield from _both("HSDP", shape, reshard=reshard)
            yield from _both("FSDP2 x TP", ff.Shape(x=inside, z=outside), reshard=reshard)
        for order in (AXES, ("data", "z", "y", "x")):  # TP inside the nodes as far as it goes, or replicas
            shape = ff.Shape(x=inside, data=outside, order=order)
            for kind in ("DDP x TP", "Megatron TP"):
                yield from _both(kind, shape)
            yield from _both("HSDP x TP", shape, reshard=False)  # of one shard
    if world == 8 and per_node in (2, 4):
        for reshard in (True, False):
            yield from _both("HSDP x TP", ff.Shape(x=2, z=2, data=2), reshard=reshard)
    for kind in ("TP", "Megatron TP"):
        yield from _both(kind, ff.Shape(x=world))
    yield from _pipelines(setting)


def _pipelines(setting: Setting) -> Iterator[Line]:
    """Yield the pipelines over all ranks, over half of them with two replicas of each stage, and over two, with as many
    or twice as many micro-batches as ranks, where the model has enough pieces and the batch enough rows."""
    world, work = setting.cluster.world, setting.workload
    for replicas in (1, 2, world // 2):
        for kind in PIPELINES:
            for factor in (1, 2):
                ranks, shape = world // replicas, ff.Shape(data=replicas)
                line = Line(kind, shape, pipe=ranks, micro_batches=factor * ranks)
                enough = work.rows % (replicas * line.micro_batches) == 0
                if ranks > 1 and enough and stages_of(line) <= len(piece_costs(work.config)):
                    yield line


def _both(kind: str, shape: ff.Shape, *, reshard: bool = True) -> Iterator[Line]:
    yield Line(kind, shape, reshard=reshard)
    yield Line(kind, shape, MINIMAL, reshard=reshard)

"""The models of one rank of the pool, and the jobs that `gpu_ranks.py` runs on them."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fourfold as ff
from benchmarks.shared.models import Arena, BenchmarkModel, FourfoldModel, StatePool, SwitchedModel
from benchmarks.shared.pipelines import make_peer
from benchmarks.shared.rank_pool import RankContext
from benchmarks.shared.workloads import Line, Measure, Workload
from benchmarks.speed.threads import since, thread_seconds

SCARCE = 0.15
"""When less than this share of the device's memory is free, ranks release what their allocators have cached."""
RECORDED = 1
"""The step of the warm-up that records Fourfold's collectives: its engine learned its order in the first one, and a
captured line still runs eagerly."""


class RankModels(RankContext):
    """A rank with its device meshes and its models."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        super().__init__(rank, world, device)
        # lines compile the same functions for different meshes; beyond torch's limit they would run eagerly
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
        self.meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self.models: dict[str, BenchmarkModel] = {}
        """By the name of the line; an eager and a compiled line of a peer share one."""
        self.compiled: dict[str, bool] = {}
        self.arena: Arena | None = None
        self.states = StatePool()

    def mesh(self, line: Line) -> DeviceMesh:
        """Return the mesh of a peer, with TP on neighbouring ranks, as axis x is on a grid."""
        names = ("pipe", "replicate") if line.pipe > 1 else ("replicate", "dp", "tp")
        sizes = (line.pipe, line.shape.data) if line.pipe > 1 else (line.shape.data, line.shape.z, line.shape.x)
        if sizes not in self.meshes:
            mesh = self.meshes[sizes] = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
            if line.shape.x > 1 and line.shape.world > line.shape.x:
                mesh["dp", "tp"]._flatten()  # lets the gradient norm travel in one message, as torch advises
        return self.meshes[sizes]

    def switched(self, name: str) -> BenchmarkModel:
        """Return the model of a line, in the mode of the line."""
        model = self.models[name]
        if isinstance(model, SwitchedModel):
            model.switch(compiled=self.compiled[name])
        return model


@dataclass(frozen=True)
class WarmUp:
    """What one rank saw in the first steps of a line."""

    losses: tuple[float | None, ...]
    """None on the ranks of a pipeline that have no loss."""
    peak_bytes: int | None
    """The most memory that tensors of the line need on the device, including its weights and whatever it keeps between
    steps."""
    collectives: int
    not_captured: str
    """Why a captured line was not captured."""


def describe(state: RankModels) -> dict[str, Any]:
    """Return the names and versions of the device and the software."""
    cuda = state.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()) if cuda else None,
    }


def open_group(state: RankModels, workload: Workload, shapes: list[ff.Shape]) -> None:
    """Drop all earlier lines, and allocate an arena for the weights of any Fourfold line on these grids."""
    state.models.clear()
    state.arena, state.states = None, StatePool()
    _collect(state)
    least_sharded = min((shape.x * shape.y * shape.z for shape in shapes), default=0)
    if least_sharded:
        vectors = (2 * workload.config.layers + 1) * workload.config.hidden  # norm weights, which x does not shard
        slack = vectors + (1 << 20 if state.device.type == "cuda" else 1 << 16)  # for uneven shards and alignment
        elements = workload.config.parameters // least_sharded + slack
        state.arena = Arena(elements, workload.dtype, state.grid(shapes[0]).device)


def build(state: RankModels, line: Line, workload: Workload) -> None:
    gc.collect()
    if is_scarce(state):
        torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() if state.device.type == "cuda" else 0
    if line.kind == "fourfold":
        if state.arena is None:
            raise RuntimeError(f"{line.name}: open_group did not get this line's grid")
        model: BenchmarkModel = FourfoldModel(line, workload, state.grid(line.shape), state.arena)
    else:
        other = state.models.get(replace(line, mode="compiled" if line.mode == "eager" else "eager").name)
        if other is not None:
            base -= other.kept_bytes
        model = make_peer(line, workload, state.mesh(line)) if other is None else other
    model.base_bytes = base - model.held_bytes
    state.models[line.name], state.compiled[line.name] = model, line.compiled


def warm_up(state: RankModels, line: Line, steps: int) -> WarmUp:
    """Take the first steps of every measure on one batch, those of `step` from initial weights. The first step makes
    the optimizer state, which then moves to memory that all lines share."""
    model = state.switched(line.name)
    model.reset()
    cuda = state.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses, first_peak = [], 0
    for step in range(steps):
        recorded = isinstance(model, FourfoldModel) and step == min(RECORDED, steps - 1)
        loss = model.recorded_step() if recorded else model.step()
        losses.append(None if loss is None else float(loss))
        if step == 0:
            if cuda:  # before the state moves: while both exist, it would count twice
                first_peak = torch.cuda.max_memory_allocated() - model.base_bytes
            model.base_bytes -= state.states.share(model)
            if cuda:
                torch.cuda.reset_peak_memory_stats()
    peak = max(first_peak, torch.cuda.max_memory_allocated() - model.base_bytes) if cuda else None
    model.kept_bytes = torch.cuda.memory_allocated() - model.base_bytes if cuda else 0
    for measure in line.measures[1:]:
        act = model.measure(measure)
        act()
        state.states.share(model)
        for _ in range(steps - 1):
            act()
    state.synchronize()
    gc.disable()  # recording a step enables it again
    if isinstance(model, FourfoldModel):
        return WarmUp(tuple(losses), peak, len(model.records), model.not_captured)
    return WarmUp(tuple(losses), peak, 0, "")


@dataclass(frozen=True)
class Turn:
    """One measurement of one line on one rank."""

    seconds: float
    """Per step, from the common start until this rank's device was idle."""
    loss: float | None
    """The loss of the first step, where this rank has one."""
    scarce: bool
    """Whether so little memory is left that the next turn should settle first."""
    cpu_seconds: dict[str, float]
    """CPU seconds per step of each kind of thread of this process; see `thread_seconds`."""


def turn(state: RankModels, name: str, measure: Measure, steps: int, settle: bool, threads: bool) -> Turn:
    """Time the steps of one measure. With `settle`, because memory is scarce, first release the memory that the
    allocator cached for other lines and take one step that is not timed. With `threads`, also return CPU seconds."""
    model = state.switched(name)
    model.reset()
    act = model.measure(measure)
    gc.collect()
    if settle:
        torch.cuda.empty_cache()
        act()
        gc.collect()
        model.reset()
    state.barrier()
    before = thread_seconds() if threads else {}  # not of the barrier, where ranks that are early spin
    began = time.perf_counter()
    loss = act()
    if loss is not None and steps > 1:
        loss = loss.clone()  # a replayed step writes its loss to the same place
    for _ in range(steps - 1):
        act()
    state.synchronize()
    seconds = (time.perf_counter() - began) / steps
    spent = {kind: spent / steps for kind, spent in since(before).items()} if threads else {}
    first = float(loss) if loss is not None and measure == "step" else None
    return Turn(seconds, first, is_scarce(state), spent)


def drop(state: RankModels, name: str) -> None:
    state.models.pop(name, None)
    _collect(state)


def _collect(state: RankModels) -> None:
    gc.collect()
    if state.device.type == "cuda":
        torch.cuda.empty_cache()


def is_scarce(state: RankModels) -> bool:
    """Return whether the device is nearly full. Ranks share it, and none can use memory that another has cached."""
    if state.device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info()
    return free < SCARCE * total

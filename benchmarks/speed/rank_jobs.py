"""The models of one rank of the pool, and the jobs that `gpu_ranks.py` runs on them."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fourfold as ff
from benchmarks.shared.models import Arena, BenchmarkModel, FourfoldModel
from benchmarks.shared.peers import PeerModel
from benchmarks.shared.rank_pool import RankContext
from benchmarks.shared.workloads import Line, Measure, Workload

SCARCE = 0.15
"""When less than this share of the device's memory is free, ranks release what their allocators have cached."""


class RankModels(RankContext):
    """A rank with its device meshes and its models."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        super().__init__(rank, world, device)
        self.meshes: dict[tuple[int, int], DeviceMesh] = {}
        self.models: dict[str, BenchmarkModel] = {}
        self.arena: Arena | None = None

    def mesh(self, data_parallel: int, tensor_parallel: int) -> DeviceMesh:
        """Return the mesh with TP on neighbouring ranks, as axis x is on a grid."""
        sizes = data_parallel, tensor_parallel
        if sizes not in self.meshes:
            self.meshes[sizes] = init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp", "tp"))
        return self.meshes[sizes]


@dataclass(frozen=True)
class WarmUp:
    """What one rank saw in the first steps of a line."""

    losses: tuple[float, ...]
    peak_bytes: int | None
    """The most memory that the line uses on the device, including its weights and whatever it keeps between steps."""
    collectives: int


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
    state.arena = None
    _collect(state)
    least_sharded = min((shape.x * shape.y * shape.z for shape in shapes), default=0)
    if least_sharded:
        vectors = (2 * workload.config.layers + 1) * workload.config.hidden  # norm weights, which x does not shard
        slack = vectors + (1 << 20 if state.device.type == "cuda" else 1 << 16)  # for uneven shards and alignment
        elements = workload.config.parameters // least_sharded + slack
        state.arena = Arena(elements, workload.dtype, state.grid(shapes[0]).device)


def build(state: RankModels, line: Line, workload: Workload, compiled: bool) -> None:
    gc.collect()
    if is_scarce(state):
        torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() if state.device.type == "cuda" else 0
    if line.kind == "fourfold":
        if state.arena is None:
            raise RuntimeError(f"{line.name}: open_group did not get this line's grid")
        model: BenchmarkModel = FourfoldModel(line, workload, state.grid(line.shape), state.arena)
    else:
        explicit = line.kind == "FSDP2 explicit prefetch"
        mesh = state.mesh(line.shape.z, line.shape.x)
        model = PeerModel(workload, mesh, explicit=explicit, compiled=compiled)
    model.base_bytes = base - model.held_bytes
    state.models[line.name] = model


def warm_up(state: RankModels, name: str, steps: int) -> WarmUp:
    """Take the first steps from initial weights on one batch. The last step records memory and collectives."""
    model = state.models[name]
    model.reset_weights()
    losses = [float(model.step()) for _ in range(steps - 1)]
    cuda = state.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses.append(float(model.recorded_step() if isinstance(model, FourfoldModel) else model.step()))
    peak = torch.cuda.max_memory_allocated() - model.base_bytes if cuda else None
    return WarmUp(tuple(losses), peak, len(model.records) if isinstance(model, FourfoldModel) else 0)


@dataclass(frozen=True)
class Turn:
    """One measurement of one line on one rank."""

    seconds: float
    """From the common start until this rank's device was idle."""
    loss: float | None
    scarce: bool
    """Whether so little memory is left that the next turn should settle first."""


def turn(state: RankModels, name: str, measure: Measure, settle: bool) -> Turn:
    """Time one measure. With `settle`, because memory is scarce, first release the memory that the allocator cached for
    other lines and take one step that is not timed."""
    model = state.models[name]
    model.reset_weights()
    act = model.measure(measure)
    gc.collect()
    if settle:
        torch.cuda.empty_cache()
        act()
        gc.collect()
        model.reset_weights()
    state.barrier()
    began = time.perf_counter()
    loss = act()
    state.synchronize()
    seconds = time.perf_counter() - began
    return Turn(seconds, None if loss is None else float(loss), is_scarce(state))


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

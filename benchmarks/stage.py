"""What one rank of the bed holds, and the jobs that the benchmark asks of it."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fourfold as ff
from fourfold import comm
from fourfold.train.launch import share_cores
from peers import Peer
from sides import Arena, Fourfold, Line, Measure, Side, Size

SCARCE = 0.15
"""Share of the device's memory under which ranks give back what they have cached."""


class Rank:
    """One rank of the bed and its grids. Process groups are dear: what is on the same ranks shares them."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.grids: dict[ff.Shape, ff.Grid] = {}
        gc.freeze()  # what was imported stays, so that collecting is quick ...
        gc.disable()  # ... between the turns, never inside

    def grid(self, shape: ff.Shape) -> ff.Grid:
        if shape not in self.grids:
            self.grids[shape] = ff.Grid(**shape.sizes, device=self.device)
            if self.device.type == "cpu":
                share_cores()
        return self.grids[shape]

    def meet(self) -> None:
        """All ranks are here and their devices idle."""
        everyone = self.grid(ff.Shape(data=self.world))
        comm.all_reduce(torch.zeros(1, device=everyone.device), everyone, "data").wait()
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


class Stage(Rank):
    """The meshes and models of one rank as well."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        super().__init__(rank, world, device)
        self.meshes: dict[tuple[int, int], DeviceMesh] = {}
        self.sides: dict[str, Side] = {}
        self.arena: Arena | None = None

    def mesh(self, data_parallel: int, tensor_parallel: int) -> DeviceMesh:
        """TP on neighbouring ranks, as x is on a grid."""
        sizes = data_parallel, tensor_parallel
        if sizes not in self.meshes:
            self.meshes[sizes] = init_device_mesh(self.device.type, sizes, mesh_dim_names=("dp", "tp"))
        return self.meshes[sizes]


@dataclass(frozen=True)
class Warm:
    """What the first steps of a line showed on one rank."""

    losses: tuple[float, ...]
    peak_bytes: int | None
    """What the line takes on the device at the most, its weights and all that it keeps between steps included."""
    collectives: int


def describe(stage: Stage) -> dict[str, Any]:
    """The device and the software."""
    cuda = stage.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()) if cuda else None,
    }


def open_group(stage: Stage, size: Size, shapes: list[ff.Shape]) -> None:
    """Forget the lines before, and make room for the weights of any one Fourfold line on these grids."""
    stage.sides.clear()
    stage.arena = None
    _collect(stage)
    cut_least = min((shape.x * shape.y * shape.z for shape in shapes), default=0)
    if cut_least:
        vectors = (2 * size.config.layers + 1) * size.config.hidden  # of norms, which x does not cut
        slack = vectors + (1 << 20 if stage.device.type == "cuda" else 1 << 16)  # uneven parts, alignment
        stage.arena = Arena(size.config.parameters // cut_least + slack, size.dtype, stage.grid(shapes[0]).device)


def build(stage: Stage, line: Line, size: Size, compiled: bool) -> None:
    gc.collect()
    if is_scarce(stage):
        torch.cuda.empty_cache()
    base = torch.cuda.memory_allocated() if stage.device.type == "cuda" else 0
    if line.kind == "fourfold":
        if stage.arena is None:
            raise RuntimeError(f"{line.name}: open_group was not told of its grid")
        side: Side = Fourfold(line, size, stage.grid(line.shape), stage.arena)
    else:
        explicit = line.kind == "FSDP2 explicit prefetch"
        mesh = stage.mesh(line.shape.z, line.shape.x)
        side = Peer(size, mesh, explicit=explicit, compiled=compiled)
    side.base_bytes = base - side.held_bytes
    stage.sides[line.name] = side


def warm(stage: Stage, name: str, steps: int) -> Warm:
    """First steps from fresh weights on the same batch. The last one is watched."""
    side = stage.sides[name]
    side.refresh()
    losses = [float(side.step()) for _ in range(steps - 1)]
    cuda = stage.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    losses.append(float(side.watched_step() if isinstance(side, Fourfold) else side.step()))
    peak = torch.cuda.max_memory_allocated() - side.base_bytes if cuda else None
    return Warm(tuple(losses), peak, len(side.records) if isinstance(side, Fourfold) else 0)


@dataclass(frozen=True)
class Turn:
    """One measurement of one line on one rank."""

    seconds: float
    """From when all began until this rank's device was idle."""
    loss: float | None
    scarce: bool
    """Little memory is left: the next turn should settle first."""


def turn(stage: Stage, name: str, measure: Measure, settle: bool) -> Turn:
    """Where memory is scarce ranks `settle`: give back what they cached for other lines, and take a step untimed."""
    side = stage.sides[name]
    side.refresh()
    act = side.measure(measure)
    gc.collect()
    if settle:
        torch.cuda.empty_cache()
        act()
        gc.collect()
        side.refresh()
    stage.meet()
    began = time.perf_counter()
    loss = act()
    stage.synchronize()
    seconds = time.perf_counter() - began
    return Turn(seconds, None if loss is None else float(loss), is_scarce(stage))


def drop(stage: Stage, name: str) -> None:
    stage.sides.pop(name, None)
    _collect(stage)


def _collect(stage: Stage) -> None:
    gc.collect()
    if stage.device.type == "cuda":
        torch.cuda.empty_cache()


def is_scarce(stage: Stage) -> bool:
    """Ranks share the device, and none can use what another has cached."""
    if stage.device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info()
    return free < SCARCE * total

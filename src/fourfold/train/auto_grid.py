"""`--grid auto`: the machine on which a run is priced, and the grid that the planner finds for it.

A machine that the config names is used as its file describes it. The machine `auto` is the packaged file of this kind
of device, with the nodes and the memory of this job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch

from fourfold.axes import AXES
from fourfold.environment import Environment
from fourfold.grid import Shape
from fourfold.models.config import ModelConfig
from fourfold.planner.machine import DTYPES, Machine, load_machine, machine_names
from fourfold.planner.price import Price, Task
from fourfold.planner.search import Space, search
from fourfold.policy import Policy
from fourfold.report.units import duration
from fourfold.train.launch import cores

AUTO = "auto"
CPU = "laptop"
"""The packaged machine in which a device is a process on the CPU."""
ANY_GPU = "dgx-h100"
"""The packaged machine for a GPU with a name unlike any of the packaged ones."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """The ranks of a job and their devices, which a machine file must fit."""

    ranks: int
    device: str
    """torch's name of the GPU, or `cpu`."""
    memory_bytes: int
    """Memory of a GPU; on the CPU memory of a node, which its ranks share."""
    cores: int
    """Cores that the ranks of a node share."""

    @classmethod
    def here(cls, ranks: int, *, on_gpu: bool, memory_bytes: int) -> Hardware:
        # a config may be resolved for GPUs where there are none
        found = torch.cuda.get_device_name() if on_gpu and torch.cuda.is_available() else "an unknown GPU"
        return cls(ranks, found if on_gpu else "cpu", memory_bytes, cores())

    @property
    def ranks_per_node(self) -> int:
        """The number that the launcher says; ranks that are still to be started are all on this node."""
        return min(self.ranks, Environment.read().local_world or self.ranks)


def memory_bytes(device: str) -> int:
    """Return the memory of the first GPU, or of this computer."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class LocatedMachine:
    """A machine, and notes that a reader of its prices must know."""

    machine: Machine
    notes: tuple[str, ...]


def locate(name: str, job: Hardware, compute: torch.dtype) -> LocatedMachine:
    """Return the machine of that name or file; for `auto` the packaged one that is most like this hardware."""
    machine, notes = _automatic(job) if name == AUTO else (load_machine(name), [])
    machine, assumed = _with_dtype(machine, DTYPES[compute])
    notes += assumed
    packaged = name == AUTO or name in machine_names()
    if packaged or not machine.measured:  # `fourfold calibrate` always writes the products that it has measured
        notes.append(f"{machine.name}: estimates; `fourfold calibrate` measures this machine")
    elif machine.device != job.device:
        notes.append(f"{machine.name} was measured on {machine.device}, and this is {job.device}")
    return LocatedMachine(machine, tuple(notes))


def _automatic(job: Hardware) -> tuple[Machine, list[str]]:
    machine, notes = (load_machine(CPU), []) if job.device == "cpu" else _like(job.device)
    several = job.ranks_per_node < job.ranks
    if several and machine.between is None:
        notes.append(f"{machine.name} has no network between nodes: priced as one node")
        several = False
    devices = job.ranks_per_node if several else max(machine.devices_per_node, job.ranks)
    machine = replace(machine, devices_per_node=devices, memory=job.memory_bytes)
    return _shared(machine, job) if job.device == "cpu" else machine, notes


def _shared(machine: Machine, job: Hardware) -> Machine:
    """Give a rank its share of the node: a device of the CPU's file is one core."""
    part = job.cores / job.ranks_per_node
    return replace(
        machine,
        memory=job.memory_bytes // job.ranks_per_node,
        peak={dtype: part * rate for dtype, rate in machine.peak.items()},
        gemm={dtype: part * rate for dtype, rate in machine.gemm.items()},
        memory_bandwidth=part * machine.memory_bandwidth,
        overhead=machine.overhead / min(1.0, part),
    )


def _like(device: str) -> tuple[Machine, list[str]]:
    """Return the packaged machine with that GPU, else the one with the GPU of the nearest name."""
    machines = {machine.device: machine for machine in map(load_machine, reversed(machine_names()))}
    if device in machines:
        return machines[device], []
    near = get_close_matches(device, [name for name in machines if name != "cpu"], n=1)
    machine = machines[near[0]] if near else load_machine(ANY_GPU)
    return machine, [f"no packaged machine has {device}: priced as {machine.name}, which has {machine.device}"]


def _with_dtype(machine: Machine, dtype: str) -> tuple[Machine, list[str]]:
    """Give the machine FLOP/s for that dtype where its file has none: those of fp32, and for fp64 half of them."""
    if dtype in machine.gemm or "fp32" not in machine.gemm:
        return machine, []
    part = 0.5 if dtype == "fp64" else 1.0
    peak, gemm = ({**rates, dtype: part * rates["fp32"]} for rates in (machine.peak, machine.gemm))
    said = f"{machine.name} has no FLOP/s for {dtype}: priced with {'half of ' if part < 1 else ''}those of fp32"
    return replace(machine, peak=peak, gemm=gemm), [said]


def find_grid(
    model: ModelConfig,
    policy: Policy,
    job: Hardware,
    *,
    rows: int,
    seq: int,
    micro_steps: int,
    order: Sequence[str],
    parameters: torch.dtype,
    machine: str,
) -> tuple[Shape, str]:
    """Return the fastest grid for the job under this policy, and the reason for it in one line.

    A given order of the axes is kept; with the default order the planner also chooses the order.
    """
    compute = policy.compute_dtype or parameters
    located = locate(machine, job, compute)
    task = Task(model, located.machine, rows, seq, parameters, compute)
    orders = None if tuple(order) == AXES else (tuple(order),)
    space = Space(policies=(policy,), micro_steps=(micro_steps,), orders=orders)
    try:
        plan = search(task, job.ranks, space=space)
    except ValueError as error:
        raise ValueError(f"--grid auto: {error}; or give a grid, such as --grid z={job.ranks}") from error
    grids = len(plan.ranked) + len(plan.waiting)
    return plan.best.candidate.shape, _reason(plan.ranked, grids, located)


def _reason(ranked: Sequence[Price], grids: int, located: LocatedMachine) -> str:
    best, *others = ranked
    said = f"grid {best.candidate.shape} by the planner: {duration(best.seconds)} per step on {located.machine.name}"
    if others:
        said += f"; next of {grids} that fit, {others[0].candidate.shape}: {_slower(others[0], best)}"
    else:
        said += "; no other fits"
    return f"{said} ({'; '.join(located.notes)})" if located.notes else said


def _slower(other: Price, best: Price) -> str:
    """Say how much slower a grid is, with the largest part of the difference: `18 ms, 5 ms more exposed over x`."""
    parts = {f"exposed over {axis}": _exposed(other, axis) - _exposed(best, axis) for axis in AXES}
    parts["of computing"] = other.totals.compute - best.totals.compute
    worst = max(parts, key=lambda part: parts[part])
    if parts[worst] <= 0:
        return duration(other.seconds)
    return f"{duration(other.seconds)}, {duration(parts[worst])} more {worst}"


def _exposed(price: Price, axis: str) -> float:
    return price.totals.exposed.get(axis, 0.0)

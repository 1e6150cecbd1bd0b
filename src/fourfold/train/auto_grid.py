"""Which machine a run is priced on, and the grid that the planner finds for it.

A machine that the config names is taken as its file says. `auto` is the packaged file of this kind of device, with
the nodes and the memory that this job has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import torch

from fourfold.axes import AXES
from fourfold.cost.machine import DTYPES, Machine, load_machine, machine_names
from fourfold.cost.price import Priced, Task
from fourfold.cost.search import Space, search
from fourfold.environment import Environment
from fourfold.grid import Shape
from fourfold.models.config import ModelConfig
from fourfold.policy import Policy
from fourfold.report.units import duration
from fourfold.train.launch import cores

AUTO = "auto"
CPU = "laptop"
"""The packaged machine whose devices are processes on the CPU."""
ANY_GPU = "dgx-h100"
"""The packaged machine that stands for a GPU which is like none of them."""
MEASURED = "measured by fourfold calibrate"
"""How the sources of a file begin that was measured."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Ranks on devices: what a machine must fit."""

    ranks: int
    device: str
    """torch's name of it; `cpu`."""
    memory_bytes: int
    """Of a GPU, or of the node whose processes share it."""
    cores: int
    """That the ranks of a node share."""

    @classmethod
    def here(cls, ranks: int, *, on_gpu: bool, memory_bytes: int) -> Hardware:
        # a config may be resolved for GPUs where there are none
        found = torch.cuda.get_device_name() if on_gpu and torch.cuda.is_available() else "an unknown GPU"
        return cls(ranks, found if on_gpu else "cpu", memory_bytes, cores())

    @property
    def ranks_per_node(self) -> int:
        """As the launcher says; ranks that are still to be started are all on this node."""
        return min(self.ranks, Environment.read().local_world or self.ranks)


def memory_bytes(device: str) -> int:
    """Of a GPU, or of this computer."""
    if device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True, slots=True)
class Located:
    """A machine, and what a reader of its prices must know."""

    machine: Machine
    notes: tuple[str, ...]


def locate(name: str, job: Hardware, compute: torch.dtype) -> Located:
    """The machine of that name or file, or with `auto` the one that is most like where the job runs."""
    machine, notes = _automatic(job) if name == AUTO else (load_machine(name), [])
    machine, assumed = _with_dtype(machine, DTYPES[compute])
    notes += assumed
    packaged = name == AUTO or name in machine_names()
    if packaged or not any(source.startswith(MEASURED) for source in machine.sources.values()):
        notes.append(f"{machine.name}: estimates; `fourfold calibrate` measures this machine")
    elif machine.device != job.device:
        notes.append(f"{machine.name} was measured on {machine.device}, and this is {job.device}")
    return Located(machine, tuple(notes))


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
    """A device of the file is a core; a rank has its part of the cores and of the memory."""
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
    """The packaged machine with that GPU, else with the one of the nearest name."""
    machines = {machine.device: machine for machine in map(load_machine, reversed(machine_names()))}
    if device in machines:
        return machines[device], []
    near = get_close_matches(device, [name for name in machines if name != "cpu"], n=1)
    machine = machines[near[0]] if near else load_machine(ANY_GPU)
    return machine, [f"no packaged machine has {device}: priced as {machine.name}, which has {machine.device}"]


def _with_dtype(machine: Machine, dtype: str) -> tuple[Machine, list[str]]:
    """With FLOP/s for that dtype: where its file has none, fp32's, and half of them for fp64."""
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
    """The fastest grid for the job under this policy, and why it is taken, in one line.

    Ranks walk the axes in that order, unless it is the usual one: then in the best.
    """
    compute = policy.compute or parameters
    located = locate(machine, job, compute)
    task = Task(model, located.machine, rows, seq, parameters, compute)
    orders = None if tuple(order) == AXES else (tuple(order),)
    space = Space(policies=(policy,), micro_steps=(micro_steps,), orders=orders)
    try:
        plan = search(task, job.ranks, space=space)
    except ValueError as error:
        raise ValueError(f"--grid auto: {error}; or give a grid, such as --grid z={job.ranks}") from error
    grids = len(plan.ranked) + len(plan.waiting)
    return plan.best.choice.shape, _reason(plan.ranked, grids, located)


def _reason(ranked: Sequence[Priced], grids: int, located: Located) -> str:
    best, *others = ranked
    said = f"grid {best.choice.shape} by the planner: {duration(best.seconds)} a step on {located.machine.name}"
    if others:
        said += f"; next of {grids} that fit, {others[0].choice.shape}: {_slower(others[0], best)}"
    else:
        said += "; no other fits"
    return f"{said} ({'; '.join(located.notes)})" if located.notes else said


def _slower(other: Priced, best: Priced) -> str:
    """`18 ms, 5 ms more of it exposed over x`: the largest part of what a slower grid takes longer."""
    parts = {f"exposed over {axis}": _exposed(other, axis) - _exposed(best, axis) for axis in AXES}
    parts["of computing"] = other.totals.compute - best.totals.compute
    worst = max(parts, key=lambda part: parts[part])
    if parts[worst] <= 0:
        return duration(other.seconds)
    return f"{duration(other.seconds)}, {duration(parts[worst])} more {worst}"


def _exposed(price: Priced, axis: str) -> float:
    return price.totals.exposed.get(axis, 0.0)

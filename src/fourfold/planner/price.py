"""What a candidate of grid and policy costs: a step simulated, its totals, its memory.

A step of many equal layers and micro-steps is periodic: a few layers are simulated, and up to two micro-steps; the rest
repeats what one more layer and one more micro-step took.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol

import torch

from fourfold.axes import AXES
from fourfold.grid import Shape
from fourfold.models.config import ModelConfig
from fourfold.planner.machine import DTYPES, Machine
from fourfold.planner.memory import Memory, peak_memory
from fourfold.planner.program import Program
from fourfold.planner.seconds import Seconds
from fourfold.planner.simulate import Timeline, Totals, simulate
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.transformer import Flops, flops_per_token, step_program
from fourfold.policy import Policy

QUICK_LAYERS = 3, 4
"""From these two numbers of layers a price is drawn on; for comparisons."""
CLOSE_LAYERS = 6, 12
"""The same where the number is shown: sums over data reach their pace late."""
FEW_MICRO_STEPS = 2
SHOWN_LAYERS = 4
"""In a timeline to look at."""


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be trained on what: a model, a machine, a batch."""

    config: ModelConfig
    machine: Machine
    rows: int
    """Sequences of a step, over all ranks and micro-steps."""
    seq: int
    parameters: torch.dtype = torch.float32
    """Of the weights."""
    compute: torch.dtype = torch.bfloat16
    """Of products and messages."""

    @property
    def tokens(self) -> int:
        return self.rows * self.seq

    @property
    def dtype(self) -> str:
        return DTYPES[self.compute]


class HasKinds(Protocol):
    """Memory by kind."""

    @property
    def kinds(self) -> dict[str, int]: ...
    @property
    def total(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """A way to do it."""

    shape: Shape
    policy: Policy
    rows: int
    """Of a (data, z) place in one micro-step."""
    micro_steps: int

    def sizes(self, task: Task, *, layers: int | None = None) -> LocalSizes:
        """Return the sizes of rank 0, which holds the largest shards; with `layers`, of a model with so many."""
        config = task.config if layers is None else replace(task.config, layers=layers)
        return LocalSizes(config, self.shape, self.policy, self.rows, task.seq, task.parameters)


@dataclass(frozen=True)
class Priced(ABC):
    """A candidate with what it takes."""

    task: Task
    candidate: Candidate
    totals: Totals

    @property
    @abstractmethod
    def memory(self) -> HasKinds: ...

    @property
    @abstractmethod
    def flops(self) -> Flops:
        """Per token."""

    @property
    @abstractmethod
    def halves(self) -> int: ...

    @property
    @abstractmethod
    def parameters(self) -> int:
        """Of the whole model."""

    @abstractmethod
    def timeline(self) -> Timeline:
        """A micro-step of a few layers with its spans, to look at."""

    @property
    def seconds(self) -> float:
        return self.totals.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.task.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self._utilization(self.flops.model)

    @property
    def hfu(self) -> float:
        return self._utilization(self.flops.hardware)

    def _utilization(self, flops: float) -> float:
        peak = self.task.machine.peak[self.task.dtype] * self.candidate.shape.world
        return flops * self.tokens_per_second / peak

    @property
    def bound_by(self) -> str:
        """What holds it up most: computation, or communication over an axis."""
        exposed = {axis: self.totals.exposed.get(axis, 0.0) for axis in AXES}
        worst = max(exposed, key=lambda axis: exposed[axis])
        return "compute" if self.totals.compute >= exposed[worst] else worst


@dataclass(frozen=True)
class Price(Priced):
    """Of a reference model."""

    @cached_property
    def memory(self) -> Memory:
        return memory_of(self.task, self.candidate)

    @cached_property
    def flops(self) -> Flops:
        return flops_per_token(self.task.config, self.task.seq, self.candidate.policy.recompute)

    @property
    def halves(self) -> int:
        return self.candidate.sizes(self.task).number_of_halves

    @property
    def parameters(self) -> int:
        return self.task.config.parameters

    def timeline(self) -> Timeline:
        layers = min(SHOWN_LAYERS, self.task.config.layers)
        return timeline(self.task, self.candidate, layers=layers, micro_steps=1, trace=True)


def memory_of(task: Task, candidate: Candidate) -> Memory:
    return peak_memory(candidate.sizes(task), micro_steps=candidate.micro_steps)


def price(task: Task, candidate: Candidate, *, quick: bool = False) -> Price:
    """Simulate a few layers and micro-steps, and add up the rest."""
    layers, (few, more) = task.config.layers, QUICK_LAYERS if quick else CLOSE_LAYERS
    if layers <= more:
        return Price(task, candidate, simulated(task, candidate, layers))
    begin = simulated(task, candidate, few)
    further = simulated(task, candidate, more).plus(begin, -1.0)
    return Price(task, candidate, without_less_than_nothing(begin.plus(further, (layers - few) / (more - few))))


def without_less_than_nothing(totals: Totals) -> Totals:
    """What few layers leave exposed of the sums over data, more layers hide: until nothing is left."""
    exposed = {axis: max(0.0, seconds) for axis, seconds in totals.exposed.items()}
    missing = sum(exposed.values()) - sum(totals.exposed.values())
    return replace(totals, seconds=totals.seconds + missing, exposed=exposed)


def simulated(task: Task, candidate: Candidate, layers: int) -> Totals:
    """A step of a model with so many layers, all its micro-steps."""
    played = min(candidate.micro_steps, FEW_MICRO_STEPS)
    line = timeline(task, candidate, layers=layers, micro_steps=played)
    totals = line.totals
    if candidate.micro_steps > played:
        first, second = [totals for phase, totals in line.marks if phase == "forward"][-2:]
        totals = totals.plus(without_arrivals(second.plus(first, -1.0)), candidate.micro_steps - played)
    return totals


def without_arrivals(first: Totals) -> Totals:
    """A micro-step that is not the first: parameters that come from other replicas have arrived."""
    rest = {axis: seconds for axis, seconds in first.exposed.items() if axis != "data"}
    link = {axis: seconds for axis, seconds in first.link.items() if axis != "data"}
    return Totals(first.seconds - first.exposed.get("data", 0.0), first.compute, link, rest)


def timeline(
    task: Task, candidate: Candidate, *, layers: int | None = None, micro_steps: int | None = None, trace: bool = False
) -> Timeline:
    """Simulate a step, whole unless told otherwise."""
    # how ranks walk the axes changes where rank 0's groups lie, but not what it does
    anyhow = replace(candidate, shape=candidate.shape.reordered(AXES), micro_steps=1)
    program = _program(task, anyhow, layers, micro_steps or candidate.micro_steps)
    seconds = Seconds(task.machine, candidate.shape)
    return simulate(program.work, seconds, task.dtype, phases=program.phases, trace=trace)


@lru_cache(maxsize=128)
def _program(task: Task, candidate: Candidate, layers: int | None, micro_steps: int) -> Program:
    """Return the program of a step; the search asks for it in one rank order after another."""
    return step_program(candidate.sizes(task, layers=layers), micro_steps=micro_steps)

"""Replay the published system on our simulator: its policy, its overlaps, its grids; and fit two constants to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import inf, log
from typing import TypeVar

import torch

from benchmarks.planner.published_fsdp import FsdpFit
from benchmarks.planner.published_runs import FITTED, POINTS, ROWS, SEQ, AblationStep, Fit, Point
from benchmarks.shared.published import published_ranking
from fourfold.grid import Shape
from fourfold.models.config import config
from fourfold.planner.machine import Machine, load_machine
from fourfold.planner.price import Candidate, Task, memory_of, timeline
from fourfold.planner.simulate import Totals
from fourfold.policy import Overlap, Policy

FEW_LAYERS = 3
"""A step is extrapolated from this many layers and one more. That is exact, because this system does not overlap the
reduction over data with backward."""
GRIDS = 40
"""How many grids of the published model's list are simulated."""
SHORTLIST = 6
"""How many of them the fit considers."""
FINEST = 0.01
"""The step size in log space at which the fit stops."""
LEAST_GAIN = 1e-4
"""The part of the loss that a step must gain: a constant whose best value is 0 would shrink for ever."""
START = Fit(attention=1.0, congestion=0.05)
"""Where the fit begins. A search in log space never reaches 0, so congestion begins above it."""
NO_CONGESTION = 1e-3
"""A fitted congestion below this is none: it adds 1% to a transfer between a thousand nodes."""
Factors = TypeVar("Factors", Fit, FsdpFit)
"""Constants that are fitted together."""
NOTHING = Totals(0.0, 0.0, {}, {})
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Replay:
    """A choice of the published system, with its seconds."""

    candidate: Candidate
    totals: Totals
    place: int
    """The place of its grid in the published list, counted from 1."""

    @property
    def exposed(self) -> float:
        return sum(self.totals.exposed.values())


def policy_of(*, wgrad_behind_messages: bool = True, defer: bool = True, prefetch: bool = True) -> Policy:
    """Return the published system's policy with some of its overlaps."""
    overlap = Overlap(
        prefetch=prefetch, defer=defer, wgrad_behind_messages=wgrad_behind_messages, halves=1, reduce_early=False
    )
    return Policy(
        activations="replicated",
        keep_gathered=True,
        keep_weights=True,
        recompute="block",
        compute_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16,
        overlap=overlap,
    )


def ablated(choice: Candidate, step: AblationStep) -> Candidate:
    policy = policy_of(wgrad_behind_messages=step.wgrad_behind_messages, defer=step.defer, prefetch=step.prefetch)
    return replace(choice, policy=policy)


def task_of(point: Point, fit: Fit | None = None) -> Task:
    machine = fitted_machine(load_machine(point.machine), fit or FITTED[point.machine])
    return Task(config(point.model), machine, ROWS, SEQ)


def fitted_machine(machine: Machine, fit: Fit) -> Machine:
    name = f"{machine.name} fitted {fit.attention:g} {fit.congestion:g}"
    attention = min(1.0, machine.attention * fit.attention)
    return replace(machine, name=name, attention=attention, congestion=fit.congestion)


# --- seconds


def replay(task: Task, choice: Candidate) -> Totals:
    """Simulate a step that prefetches in forward only; its backward is simulated without prefetch."""
    forward, backward = passes(task, choice)
    overlap = choice.policy.overlap
    if overlap.prefetch:
        blocking = replace(choice.policy, overlap=replace(overlap, prefetch=False))
        _, backward = passes(task, replace(choice, policy=blocking))
    return forward.plus(backward)


def passes(task: Task, choice: Candidate) -> tuple[Totals, Totals]:
    """Return the totals of all forward passes of a step, and of everything else, extrapolated from a few layers."""
    few, more = (_passes(task, choice, layers) for layers in (FEW_LAYERS, FEW_LAYERS + 1))
    beyond = task.config.layers - FEW_LAYERS
    forward, backward = (one.plus(two.plus(one, -1.0), beyond) for one, two in zip(few, more, strict=True))
    return forward, backward


def _passes(task: Task, choice: Candidate, layers: int) -> tuple[Totals, Totals]:
    line = timeline(task, choice, layers=layers, micro_steps=min(choice.micro_steps, 2))
    marks = [*line.marks, ("end", line.totals)]
    spans = [(name, after.plus(before, -1.0)) for (name, before), (_, after) in pairwise(marks)]
    forward, backward, optimizer = ([span for name, span in spans if name == phase] for phase in PHASES)
    counted = marks[0][1]  # counting targets, before the first of several micro-steps
    repeated = counted.plus(backward[0], choice.micro_steps - 1)  # only the last micro-step reduces over data
    return NOTHING.plus(forward[-1], choice.micro_steps), repeated.plus(backward[-1]).plus(optimizer[-1])


# --- grids


def fewest_micro_steps(task: Task, shape: Shape, policy: Policy) -> Candidate | None:
    """Return the choice with the largest micro-batch that fits into memory, or None if not even one row fits."""
    rows = task.rows // (shape.z * shape.data)
    for micro_steps in (number for number in range(1, rows + 1) if rows % number == 0):
        choice = Candidate(shape, policy, rows // micro_steps, micro_steps)
        if memory_of(task, choice).total <= task.machine.memory - task.machine.reserve:
            return choice
    return None


@cache
def choices_of(machine: str, model: str, devices: int) -> list[tuple[int, Candidate]]:
    """Return the first grids of the published list that fit on the unfitted machine, with their places in the list."""
    task = Task(config(model), load_machine(machine), ROWS, SEQ)
    found: list[tuple[int, Candidate]] = []
    for place, ranked in enumerate(published_ranking(task.config, devices, ROWS, SEQ, task.machine), start=1):
        choice = fewest_micro_steps(task, ranked.shape, policy_of())
        if choice is not None:
            found.append((place, choice))
        if len(found) == GRIDS:
            break
    return found


def replays(task: Task, choices: Sequence[tuple[int, Candidate]]) -> list[Replay]:
    """Simulate the choices and sort them, fastest first."""
    found = [Replay(choice, replay(task, choice), place) for place, choice in choices]
    return sorted(found, key=lambda one: one.totals.seconds)


def best_replay(point: Point) -> Replay:
    return replays(task_of(point), choices_of(point.machine, point.model, point.devices))[0]


# --- the fit


def fit(machine: str, report: Callable[[str], None]) -> Fit:
    """Fit by least squares over the fitted points, twice: the second time with the grids that the first fit prefers."""
    found = START
    for _ in range(2):
        shortlists = [
            (point, [(one.place, one.candidate) for one in _all_replays(point, found)[:SHORTLIST]])
            for point in POINTS
            if point.machine == machine and point.fitted
        ]
        found = descend(found, lambda tried, lists=tuple(shortlists): _squares(tried, lists))
        if found.congestion < NO_CONGESTION:
            found = found._replace(congestion=0.0)
        report(f"{machine}: attention x {found.attention:.3f}, congestion {found.congestion:.3f}")
    return found


def _all_replays(point: Point, tried: Fit) -> list[Replay]:
    return replays(task_of(point, tried), choices_of(point.machine, point.model, point.devices))


def _squares(tried: Fit, shortlists: Sequence[tuple[Point, list[tuple[int, Candidate]]]]) -> float:
    return sum(
        log(replays(task_of(point, tried), choices)[0].totals.seconds / point.seconds) ** 2
        for point, choices in shortlists
    )


def descend(start: Factors, loss: Callable[[Factors], float]) -> Factors:
    """Run a pattern search in log space: move to the best neighbour while it improves, then halve the step."""
    best, least, step = start, loss(start), 0.4
    while step > FINEST:
        value, found = min(((loss(other), other) for other in _neighbours(best, step)), default=(inf, best))
        if value < least * (1 - LEAST_GAIN):
            best, least = found, value
        else:
            step /= 2
    return best


def _neighbours(fit: Factors, step: float) -> Iterator[Factors]:
    for factor in (1 + step, 1 / (1 + step)):
        for name, value in fit._asdict().items():
            yield fit._replace(**{name: value * factor})

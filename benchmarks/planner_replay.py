"""The published system replayed on our simulator: its policy, its overlaps, the grids it would have tried; the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import inf, log

import torch

from fourfold.grid import Shape
from fourfold.models.config import config
from fourfold.planner.machine import Machine, load_machine
from fourfold.planner.price import Choice, Task, memory_of, timeline
from fourfold.planner.simulate import Totals
from fourfold.policy import Overlap, Policy
from planner_points import FITTED, POINTS, ROWS, SEQ, Fit, Point, Step
from published import published_ranking

FEW_LAYERS = 2
"""From so many layers and one more a step is drawn on: without sums over data behind backward that is exact."""
GRIDS = 40
"""How many grids of the published list are simulated."""
SHORTLIST = 6
"""How many of them the fit goes on with."""
FINEST = 0.01
"""Where the fit stops, in log space."""
NOTHING = Totals(0.0, 0.0, {}, {})
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, slots=True)
class Replay:
    """A choice of the published system with what it takes."""

    choice: Choice
    totals: Totals
    place: int
    """Of its grid in the published list, from 1 on."""

    @property
    def exposed(self) -> float:
        return sum(self.totals.exposed.values())


def policy_of(*, behind_products: bool = True, defer: bool = True, prefetch: bool = True) -> Policy:
    """What the published system does, with these of its overlaps."""
    overlap = Overlap(prefetch=prefetch, defer=defer, behind_products=behind_products, halves=1, data=False)
    return Policy(
        activations="replicated",
        keep_gathered=True,
        keep_weights=True,
        recompute="block",
        compute=torch.bfloat16,
        reduce=torch.bfloat16,
        overlap=overlap,
    )


def ablated(choice: Choice, step: Step) -> Choice:
    policy = policy_of(behind_products=step.behind_products, defer=step.defer, prefetch=step.prefetch)
    return replace(choice, policy=policy)


def task_of(point: Point, fit: Fit | None = None) -> Task:
    machine = fitted_machine(load_machine(point.machine), fit or FITTED[point.machine])
    return Task(config(point.model), machine, ROWS, SEQ)


def fitted_machine(machine: Machine, fit: Fit) -> Machine:
    if machine.between is None:
        raise ValueError(f"{machine.name} is one node, it has no bandwidth between nodes to be fitted")
    between = replace(machine.between, bandwidth=machine.between.bandwidth * fit.between)
    name = f"{machine.name} fitted {fit.attention:g} {fit.between:g}"
    return replace(machine, name=name, attention=min(1.0, machine.attention * fit.attention), between=between)


# --- seconds


def replay(task: Task, choice: Choice) -> Totals:
    """A step in which gathers run ahead in forward alone: backward is that of the same choice without prefetch."""
    forward, backward = passes(task, choice)
    overlap = choice.policy.overlap
    if overlap.prefetch:
        blocking = replace(choice.policy, overlap=replace(overlap, prefetch=False))
        _, backward = passes(task, replace(choice, policy=blocking))
    return forward.plus(backward)


def passes(task: Task, choice: Choice) -> tuple[Totals, Totals]:
    """All forward passes of a step, and all that comes after each of them; layers beyond a few repeat."""
    few, more = (_passes(task, choice, layers) for layers in (FEW_LAYERS, FEW_LAYERS + 1))
    beyond = task.config.layers - FEW_LAYERS
    forward, backward = (one.plus(two.plus(one, -1.0), beyond) for one, two in zip(few, more, strict=True))
    return forward, backward


def _passes(task: Task, choice: Choice, layers: int) -> tuple[Totals, Totals]:
    line = timeline(task, choice, layers=layers, micro_steps=min(choice.micro_steps, 2))
    marks = [*line.marks, ("end", line.totals)]
    spans = [(name, after.plus(before, -1.0)) for (name, before), (_, after) in pairwise(marks)]
    forward, backward, optimizer = ([span for name, span in spans if name == phase] for phase in PHASES)
    counted = marks[0][1]  # targets, before the first of several micro-steps
    repeated = counted.plus(backward[0], choice.micro_steps - 1)  # only the last one sums over data
    return NOTHING.plus(forward[-1], choice.micro_steps), repeated.plus(backward[-1]).plus(optimizer[-1])


# --- grids


def fewest_micro_steps(task: Task, shape: Shape, policy: Policy) -> Choice | None:
    """The largest micro-batch on that grid that fits into memory; None: not even one row does."""
    rows = task.rows // (shape.z * shape.data)
    for micro_steps in (number for number in range(1, rows + 1) if rows % number == 0):
        choice = Choice(shape, policy, rows // micro_steps, micro_steps)
        if memory_of(task, choice).total <= task.machine.memory - task.machine.reserve:
            return choice
    return None


@cache
def choices_of(machine: str, model: str, devices: int) -> list[tuple[int, Choice]]:
    """The first grids of the published list that fit, by the constants of the machine file, with their places."""
    task = Task(config(model), load_machine(machine), ROWS, SEQ)
    found: list[tuple[int, Choice]] = []
    for place, ranked in enumerate(published_ranking(task.config, devices, ROWS, SEQ, task.machine), start=1):
        choice = fewest_micro_steps(task, ranked.shape, policy_of())
        if choice is not None:
            found.append((place, choice))
        if len(found) == GRIDS:
            break
    return found


def replays(task: Task, choices: Sequence[tuple[int, Choice]]) -> list[Replay]:
    """The fastest first."""
    found = [Replay(choice, replay(task, choice), place) for place, choice in choices]
    return sorted(found, key=lambda one: one.totals.seconds)


def best_replay(point: Point) -> Replay:
    return replays(task_of(point), choices_of(point.machine, point.model, point.devices))[0]


# --- the fit


def fit(machine: str, report: Callable[[str], None]) -> Fit:
    """Least squares over the fitted points; the shortlist of grids is drawn again once the first fit is found."""
    found = Fit(1.0, 1.0)
    for _ in range(2):
        shortlists = [
            (point, [(one.place, one.choice) for one in _all_replays(point, found)[:SHORTLIST]])
            for point in POINTS
            if point.machine == machine and point.fitted
        ]
        found = descend(found, lambda tried, lists=tuple(shortlists): _squares(tried, lists))
        report(f"{machine}: attention x {found.attention:.3f}, bandwidth between nodes x {found.between:.3f}")
    return found


def _all_replays(point: Point, tried: Fit) -> list[Replay]:
    return replays(task_of(point, tried), choices_of(point.machine, point.model, point.devices))


def _squares(tried: Fit, shortlists: Sequence[tuple[Point, list[tuple[int, Choice]]]]) -> float:
    return sum(
        log(replays(task_of(point, tried), choices)[0].totals.seconds / point.seconds) ** 2
        for point, choices in shortlists
    )


def descend(start: Fit, loss: Callable[[Fit], float]) -> Fit:
    """A pattern search in log space: to the best neighbour while there is one, then in smaller steps."""
    best, least, step = start, loss(start), 0.4
    while step > FINEST:
        value, found = min(((loss(other), other) for other in _neighbours(best, step)), default=(inf, best))
        if value < least:
            best, least = found, value
        else:
            step /= 2
    return best


def _neighbours(fit: Fit, step: float) -> Iterator[Fit]:
    for factor in (1 + step, 1 / (1 + step)):
        yield fit._replace(attention=fit.attention * factor)
        yield fit._replace(between=fit.between * factor)

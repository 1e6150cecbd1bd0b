"""The fastest ways to train a model on so many devices, out of all grids, rank orders and policies.

Every factorisation is considered, powers of two or not; what does not fit the model, the batch or the memory is refused
with the reason. All candidates are estimated (estimate.py); of each grid the first few that fit into memory are
simulated (price.py), grid by grid in order of their estimates; where there are few candidates in all, those in other
modes and places too. The seconds of a grid that was not simulated are its estimate, and say so.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import permutations
from math import ceil, inf
from typing import NamedTuple

import torch

from fourfold.axes import AXES
from fourfold.grid import Shape, shapes_of
from fourfold.planner.candidates import Candidates, Estimated
from fourfold.planner.estimate import LEVERS, Cell, Estimates, Lever
from fourfold.planner.memory import Memory, kept_for_backward
from fourfold.planner.price import Choice, Price, Priced, Task, memory_of, price
from fourfold.planner.seconds import Seconds
from fourfold.policy import Activations, Policy

GIB = 2**30
SIMULATED_GRIDS, ONE_IN = 10, 32
"""How many grids are simulated at the least, and of how many one; or as many as are to be shown."""
SIMULATIONS, THOUSAND = 120, 1000
"""Where there is little to estimate there is time to simulate: so many candidates, and one fewer for each thousand."""
SHOWN = 8
"""Of these are priced closely, or as many as are to be shown."""
CLOSER_LOOK = 3
"""Of how many grids, the best, further candidates are simulated."""
OF_EACH = 3
"""Candidates of such a grid."""
LOSS_CHUNK = 2048
"""Tokens whose logits exist at once where all of them do not fit."""
MOST_TOKENS = 1 << 16
"""Of a place in one micro-step, unless all are taken at once: more gain little and take memory."""


@dataclass(frozen=True, slots=True)
class Space:
    """What may vary; None: everything."""

    shapes: tuple[Shape, ...] | None = None
    policies: tuple[Policy, ...] | None = None
    micro_steps: tuple[int, ...] | None = None
    orders: tuple[tuple[str, ...], ...] | None = None


class Refused(NamedTuple):
    """A grid that cannot be, and why; the bytes that it lacks where that is memory."""

    shape: Shape
    reason: str
    lacking: int = 0


@dataclass(slots=True)
class Plan:
    """Grids for a task, the fastest first."""

    task: Task
    devices: int
    ranked: Sequence[Priced] = field(default_factory=list)
    """The best simulated choice of each grid."""
    waiting: list[Candidates] = field(default_factory=list)
    """Grids of which the first candidates were not simulated closely, as others seemed faster."""
    refused: list[Refused] = field(default_factory=list)
    candidates: int = 0
    simulated: int = 0
    seconds: float = 0.0
    """That the search took."""

    @property
    def best(self) -> Priced:
        return self.ranked[0]

    def estimated(self) -> list[Estimated]:
        """The first candidate that fits of each grid that was not ranked."""
        found = []
        for grid in self.waiting:
            while not grid.found and grid.estimate < inf:
                grid.try_next()
            found += grid.found[:1]
        return sorted(found, key=lambda each: each.seconds)


def search(task: Task, devices: int, *, space: Space = Space(), top: int = SHOWN) -> Plan:
    """Rank the grids of that many devices, at least `top` of them by simulation."""
    began = time.perf_counter()
    with _not_collecting():
        found = _Search(task, devices, space, top).run()
    found.seconds = time.perf_counter() - began
    if not found.ranked:
        raise ValueError(why_nothing_fits(found))
    return found


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Python's collector would walk all of torch again and again, an eighth of the time, to find next to nothing."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class _Search:
    def __init__(self, task: Task, devices: int, space: Space, top: int) -> None:
        self.task, self.space, self.top = task, space, top
        self.plan = Plan(task, devices)
        self.limit = task.machine.memory - task.machine.reserve

    def run(self) -> Plan:
        cells = list(self._cells())
        if not cells:
            return self.plan
        orders = self.space.orders or tuple(permutations(AXES))
        estimates = Estimates(self.task, cells, orders)
        levers = torch.tensor([[self._allowed(cell, lever) for lever in LEVERS] for cell in cells])
        seconds = estimates.seconds.masked_fill(~levers[:, :, None], torch.inf)
        self.plan.candidates = int(seconds.isfinite().sum())
        by_grid: dict[tuple[int, ...], list[int]] = {}
        for index, cell in enumerate(cells):
            by_grid.setdefault(tuple(cell.choice.shape.sizes.values()), []).append(index)
        grids = [
            Candidates([cells[index].choice for index in indices], seconds[indices], orders, self._fit)
            for indices in by_grid.values()
        ]
        effort = SIMULATIONS - self.plan.candidates // THOUSAND
        found = self._fitting(grids, max(self.top, SIMULATED_GRIDS, len(grids) // ONE_IN, effort // OF_EACH))
        self._rank(found, effort - len(found))
        return self.plan

    def _fitting(self, grids: list[Candidates], many: int) -> list[Candidates]:
        """So many grids with something that fits, in order of its estimate. Refuses those where nothing does."""
        waiting = [
            (grid.estimate, place)
            for place, grid in enumerate(grids)
            if not self._refused(grid) and grid.estimate < inf
        ]
        heapify(waiting)
        found: list[Candidates] = []
        while waiting and len(found) < many:
            _, place = heappop(waiting)
            if grids[place].try_next():
                found.append(grids[place])
            elif grids[place].estimate < inf:
                heappush(waiting, (grids[place].estimate, place))
        self.plan.waiting = [grids[place] for _, place in sorted(waiting)]
        return found

    def _refused(self, grid: Candidates) -> bool:
        """By how much the smallest candidate of a grid exceeds the memory, if it does."""
        fewest = min(choice.rows for choice in grid.choices)
        frugal = []
        for choice in grid.choices:
            if choice.rows == fewest:
                frugal.append(self._least(choice))
                if frugal[-1].total <= self.limit:
                    return False
        least = min(frugal, key=lambda memory: memory.total)
        reason = f"needs {describe_memory(least)} of {self.limit / GIB:.1f} GiB at the least"
        self.plan.refused.append(Refused(grid.shape, reason, least.total - self.limit))
        return True

    def _rank(self, grids: Sequence[Candidates], others: int) -> None:
        """Simulate the first candidate of each, further ones of the best, and so many in other modes and places; then
        the first grids more closely."""
        first = [(self._price(grid.found[0]), grid) for grid in grids]
        first.sort(key=lambda found: found[0].seconds)
        prices = {id(grid): [best] for best, grid in first}
        for _, grid in first[:CLOSER_LOOK]:
            while len(grid.found) < OF_EACH and grid.estimate < inf:
                grid.try_next()
            prices[id(grid)] += [self._price(candidate) for candidate in grid.found[1:]]
        if others > 0:
            further = [(one, grid) for grid in grids for one in grid.elsewhere(self.task.machine)]
            further.sort(key=lambda found: found[0].seconds)
            for one, grid in further[:others]:
                prices[id(grid)].append(self._price(one))
        ranked = sorted(
            (min(of_grid, key=lambda found: found.seconds) for of_grid in prices.values()),
            key=lambda found: found.seconds,
        )
        shown = max(self.top, SHOWN)
        self.plan.ranked = sorted(
            (price(self.task, found.choice) for found in ranked[:shown]), key=lambda found: found.seconds
        )
        sizes = [found.choice.shape.sizes for found in self.plan.ranked]
        self.plan.waiting = [grid for _, grid in first if grid.shape.sizes not in sizes] + self.plan.waiting

    def _price(self, candidate: Estimated) -> Price:
        self.plan.simulated += 1
        return price(self.task, candidate.choice, quick=True)

    # --- what there is to choose from

    def _cells(self) -> Iterator[Cell]:
        task = self.task
        for shape in self.space.shapes or shapes_of(self.plan.devices):
            places = shape.data * shape.z
            if task.rows % places:
                why = f"data*z = {places} places do not divide a batch of {task.rows} rows"
                self.plan.refused.append(Refused(shape, why))
                continue
            misfits = {}
            for policy in self._policies(shape):
                misfit = task.config.misfit(shape, policy)
                if misfit is not None:
                    what, value, _, axes = misfit
                    misfits[policy.activations] = f"{what}={value} is not divisible by {axes}"
                    continue
                prices, possible = Seconds(task.machine, shape), list(self._rows(task.rows // places))
                if not possible:
                    rows, steps = task.rows // places, self.space.micro_steps
                    misfits[policy.activations] = f"{rows} rows of a place cannot be cut into {steps} micro-steps"
                for rows in possible:
                    yield Cell(task, Choice(shape, policy, rows, task.rows // places // rows), prices)
            if len(misfits) == len({policy.activations for policy in self._policies(shape)}):
                self.plan.refused.append(Refused(shape, "; ".join(dict.fromkeys(misfits.values()))))

    def _policies(self, shape: Shape) -> Sequence[Policy]:
        """One for each activation mode where the two differ; levers are added to it."""
        if self.space.policies is not None:
            return self.space.policies
        modes: tuple[Activations, ...] = ("sharded", "replicated") if shape.x * shape.y > 1 else ("sharded",)
        return [Policy(activations=mode, compute_dtype=self.task.compute, shard_optimizer=True) for mode in modes]

    def _rows(self, rows: int) -> Iterator[int]:
        if self.space.micro_steps is not None:
            yield from (rows // steps for steps in self.space.micro_steps if rows % steps == 0)
            return
        most = max(1, MOST_TOKENS // self.task.seq)
        yield from (each for each in range(1, rows + 1) if rows % each == 0 and (each <= most or each == rows))

    def _allowed(self, cell: Cell, lever: Lever) -> bool:
        """Levers that change nothing on this grid are left out; where policies are given only theirs is taken."""
        policy, shape = cell.choice.policy, cell.choice.shape
        if self.space.policies is not None:
            return lever == Lever(policy.recompute, policy.keep_gathered, policy.keep_weights)
        if lever.keep_weights and shape.z == 1 and self.task.compute == self.task.parameters:
            return False
        return not lever.keep_gathered or (policy.activations == "sharded" and shape.x * shape.y > 1)

    # --- memory

    def _fit(self, choice: Choice, lever: Lever) -> Choice | None:
        """That choice with the lever, if it fits; with logits in chunks where it fits only so."""
        wanted = replace(choice, policy=lever.on(choice.policy))
        in_chunks = replace(wanted, policy=replace(wanted.policy, loss_chunk=wanted.policy.loss_chunk or LOSS_CHUNK))
        if kept_for_backward(in_chunks.volume(self.task)) > self.limit:
            return None  # quickly found, and true of most that do not fit
        tried, memory = self._frugal(wanted)
        return tried if memory.total <= self.limit else None

    def _frugal(self, choice: Choice) -> tuple[Choice, Memory]:
        """With its memory; with logits in chunks where it does not fit and they take less."""
        memory = memory_of(self.task, choice)
        in_chunks = self.space.policies is None and choice.rows * self.task.seq > LOSS_CHUNK
        if in_chunks and memory.total > self.limit >= memory.total - memory.logits:
            chunked = replace(choice, policy=replace(choice.policy, loss_chunk=LOSS_CHUNK))
            less = memory_of(self.task, chunked)
            if less.total < memory.total:
                return chunked, less
        return choice, memory

    def _least(self, choice: Choice) -> Memory:
        least = Lever("block", keep_gathered=False, keep_weights=False)
        return self._frugal(choice if self.space.policies else replace(choice, policy=least.on(choice.policy)))[1]


def describe_memory(memory: Memory) -> str:
    """`61.2 GiB (optimizer 30.1, activations 22.4, ...)`"""
    kinds = sorted(memory.kinds.items(), key=lambda kind: -kind[1])
    parts = ", ".join(f"{name.replace('_', ' ')} {nbytes / GIB:.1f}" for name, nbytes in kinds[:4] if nbytes)
    return f"{memory.total / GIB:.1f} GiB ({parts})"


def why_nothing_fits(plan: Plan) -> str:
    """What is missing, and what would make it fit."""
    task, too_large = plan.task, [refused for refused in plan.refused if refused.lacking]
    if not too_large:
        reasons = dict.fromkeys(refused.reason for refused in plan.refused)
        return (
            f"no grid of {plan.devices} devices cuts this model and {task.rows} rows of {task.seq} tokens evenly: "
            f"{'; '.join(list(reasons)[:3])}; change the number of devices or the batch"
        )
    closest = min(too_large, key=lambda refused: refused.lacking)
    state = task.config.parameters * (task.parameters.itemsize * 4)
    usable = task.machine.memory - task.machine.reserve
    return (
        f"the model fits on no grid of {plan.devices} devices of {task.machine.name}: the closest, {closest.shape}, "
        f"{closest.reason}; weights, "
        f"gradients and optimizer state alone are {state / GIB:.0f} GiB, {ceil(state / usable)} devices' worth: take "
        "more devices, shorter sequences, or a smaller model"
    )

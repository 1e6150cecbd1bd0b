"""What a search finds: the candidates of one grid, the plan of all of them, and why there may be none."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf
from typing import NamedTuple

import torch

from fourfold.errors import NoPlanError
from fourfold.planner.estimate import LEVERS, Lever
from fourfold.planner.machine import Machine, Route, Seconds
from fourfold.planner.memory import Memory
from fourfold.planner.pipe import MOST_PIPE
from fourfold.planner.price import Candidate, Price, Task
from fourfold.planner.robust import RobustChoice
from fourfold.policy import Policy
from fourfold.shape import Shape

GIB = 2**30


class Refused(NamedTuple):
    """A grid that is not possible, and the reason."""

    shape: Shape
    reason: str
    lacking: int = 0
    """Bytes that are missing, if the reason is memory; else 0."""


class Estimated(NamedTuple):
    """A candidate with its estimated seconds."""

    candidate: Candidate
    seconds: float


@dataclass(slots=True)
class GridPlan:
    """The result of a search: grids for a task, the choice first, then the others, the fastest first."""

    task: Task
    devices: int
    ranked: Sequence[Price] = field(default_factory=list)
    """The best simulated candidate of each grid. The first is the choice, which need not be the fastest if it is
    robust; the others are in the order of their seconds."""
    waiting: list[GridCandidates] = field(default_factory=list)
    """Grids that were not priced closely, because others seemed faster."""
    refused: list[Refused] = field(default_factory=list)
    candidates: int = 0
    simulated: int = 0
    seconds: float = 0.0
    """Seconds that the search took."""
    robust: RobustChoice | None = None
    """How the first grid was chosen, if not only by its seconds."""

    @property
    def best(self) -> Price:
        return self.ranked[0]

    def estimated(self) -> list[Estimated]:
        """Return the first candidate that fits, for each grid that was not ranked, the fastest first."""
        found = []
        for grid in self.waiting:
            while not grid.found and grid.estimate < inf:
                grid.try_next()
            found += grid.found[:1]
        return sorted(found, key=lambda each: each.seconds)


class GridCandidates:
    """The candidates of one grid in the order of their estimates, and those that were found to fit into memory."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        seconds: torch.Tensor,
        orders: Sequence[tuple[str, ...]],
        fit: Callable[[Candidate, Lever], Candidate | None],
    ) -> None:
        """`seconds` has the dims [candidate, lever, order]; `fit` returns the candidate with the lever if that fits."""
        self.candidates, self.fit, self.orders = candidates, fit, orders
        self.shape = candidates[0].shape
        self.found: list[Estimated] = []
        self._too_large: list[tuple[Candidate, Lever]] = []
        self._bounded: set[tuple[str, Lever]] = set()
        self._estimates = seconds
        best, order = (
            part.flatten() for part in seconds.min(dim=2)
        )  # the rank order does not change memory, so only the fastest one counts
        self._seconds, self._order = best.tolist(), order.tolist()
        self._left = best.argsort(descending=True).tolist()
        self._skip()

    @property
    def estimate(self) -> float:
        """The seconds of the next candidate; inf if none is left."""
        return self._seconds[self._left[-1]] if self._left else inf

    def try_next(self) -> bool:
        """Return whether the next candidate fits, and keep it if it does."""
        flat = self._left.pop()
        candidate, lever = self._at(flat)
        fitted = self.fit(candidate, lever)
        if fitted is None:
            self._rule_out(candidate, lever)
        else:
            shape = self.shape.reordered(self.orders[self._order[flat]])
            self.found.append(Estimated(replace(fitted, shape=shape), self._seconds[flat]))
        self._skip()
        return fitted is not None

    def elsewhere(self, machine: Machine) -> Iterator[Estimated]:
        """Yield every new candidate that fits, with its best lever, in every rank order that gives it other links."""
        for candidate, estimates in zip(self.candidates, self._estimates, strict=True):
            lever = int(estimates.amin(dim=1).argmin())
            fitted = self.fit(candidate, LEVERS[lever]) if estimates[lever].min() < inf else None
            if fitted is None:
                continue
            same = [one for one in self.found if replace(one.candidate, shape=fitted.shape) == fitted]
            seen = {_links(machine, one.candidate.shape) for one in same}
            for place in estimates[lever].argsort().tolist():
                shape = self.shape.reordered(self.orders[place])
                links = _links(machine, shape)
                if links not in seen:
                    seen.add(links)
                    yield Estimated(replace(fitted, shape=shape), float(estimates[lever, place]))

    def _at(self, flat: int) -> tuple[Candidate, Lever]:
        return self.candidates[flat // len(LEVERS)], LEVERS[flat % len(LEVERS)]

    def _rule_out(self, candidate: Candidate, lever: Lever) -> None:
        """Remember that a candidate does not fit, and find the fewest rows that do not fit even if nothing is kept."""
        self._too_large.append((candidate, lever))
        least = lever.frugal()
        kind = candidate.policy.activations, least
        if kind in self._bounded:
            return
        self._bounded.add(kind)
        rows = sorted(
            (other for other in self.candidates if other.policy.activations == candidate.policy.activations),
            key=lambda other: other.rows,
        )
        # try the fewest rows first: often not even they fit, and then no bisection is needed
        fits = self.fit(rows[0], least) is not None
        first = bisect_left(rows, True, lo=1, key=lambda other: self.fit(other, least) is None) if fits else 0
        if first < len(rows):
            self._too_large.append((rows[first], least))

    def _skip(self) -> None:
        """Drop candidates that cannot fit."""
        while self._left:
            candidate = self._at(self._left[-1])
            possible = self._seconds[self._left[-1]] < inf
            if possible and not any(_needs_no_less(*candidate, *other) for other in self._too_large):
                return
            self._left.pop()


def _needs_no_less(candidate: Candidate, lever: Lever, other: Candidate, others: Lever) -> bool:
    """Return whether a candidate needs at least the memory of another one on the same grid."""
    return (
        candidate.policy.activations == other.policy.activations
        and candidate.rows >= other.rows
        and lever.needs_no_less(others)
    )


def _links(machine: Machine, shape: Shape) -> tuple[Route, ...]:
    """Return the links of all axes in use; rank orders with the same links cost the same."""
    prices = Seconds(machine, shape)
    return tuple(prices.link(axis) for axis in shape.message_axes)


def describe_memory(memory: Memory) -> str:
    """Describe memory as `61.2 GiB (optimizer 30.1, activations 22.4, ...)`."""
    kinds = sorted(memory.kinds.items(), key=lambda kind: -kind[1])
    parts = ", ".join(f"{name.replace('_', ' ')} {nbytes / GIB:.1f}" for name, nbytes in kinds[:4] if nbytes)
    return f"{memory.total / GIB:.1f} GiB ({parts})"


def _other_rows(plan: GridPlan) -> int | None:
    """Return the rows nearest to those of the task that a grid divides which cuts the model; None if none does."""
    config, rows, most = plan.task.config, plan.task.rows, min(MOST_PIPE, plan.task.config.layers + 2)
    cutting = (
        one.shape.places for one in plan.refused if one.shape.pipe <= most and not config.misfit(one.shape, Policy())
    )
    possible = {places * max(1, round(rows / places)) for places in cutting}
    return min(possible - {rows}, key=lambda other: (abs(other - rows), other), default=None)


def why_no_grid(plan: GridPlan) -> NoPlanError:
    """Return the error that says what is missing on every grid, and what would make one possible."""
    task, too_large = plan.task, [refused for refused in plan.refused if refused.lacking]
    if not too_large:
        # one reason of each kind: the others differ in their numbers only
        reasons = {re.sub(r"\d+", "", refused.reason): refused.reason for refused in reversed(plan.refused)}
        rows = _other_rows(plan)
        batch = f", such as --batch-tokens {rows * task.seq}" if rows else ""
        return NoPlanError(
            f"no grid of {plan.devices} devices cuts this model and {task.rows} rows of {task.seq} tokens evenly: "
            f"{'; '.join(reversed(list(reasons.values())[-3:]))}; change the number of devices or the batch{batch}",
            "no grid cuts batch and model",
        )
    closest = min(too_large, key=lambda refused: refused.lacking)
    state = task.config.parameters * (task.parameters.itemsize * 4)
    return NoPlanError(
        f"the model fits on no grid of {plan.devices} devices of {task.machine.name}: the closest, {closest.shape}, "
        f"{closest.reason}; weights, gradients and optimizer state alone are {state / GIB:.0f} GiB, "
        f"{ceil(state / task.usable_bytes)} devices' worth: take more devices, shorter sequences, or a smaller model",
        "too little memory",
    )

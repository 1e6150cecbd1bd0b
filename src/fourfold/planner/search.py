"""The search: find the fastest grids, rank orders and policies to train a model on a number of devices.

Every factorisation of the number of devices is considered, not only powers of two. A grid that does not fit the model,
the batch or the memory is refused with the reason. All candidates are estimated (estimate.py). The first few of each
grid that fit into memory are simulated (price.py), grid by grid in the order of their estimates. If there are few
candidates, those in other activation modes and rank orders are simulated too. A grid that was not simulated shows its
estimate and says so.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import permutations
from math import ceil, inf
from typing import TYPE_CHECKING, NamedTuple

import torch

from fourfold.axes import AXES, REPLICA
from fourfold.planner.estimate import FRUGAL, LEVERS, Cells, Estimates, Lever
from fourfold.planner.machine import Machine, Route, Seconds
from fourfold.planner.memory import Memory, MemoryReading
from fourfold.planner.price import Candidate, Price, Task, TracedPrice, memory_of, price, price_dry_run
from fourfold.policy import Activations, Policy
from fourfold.shape import Shape, shapes_of

if TYPE_CHECKING:
    from fourfold.models.open import ModelBuilder

GIB = 2**30
SIMULATED_GRIDS = 10
"""The least number of grids that are simulated."""
SIMULATED_SHARE = 32
"""At least one in this many grids is simulated, so that large searches look beyond the first estimates."""
SIMULATIONS = 120
"""The number of candidates that a small search simulates: a simulation takes about 10 ms."""
ESTIMATES_PER_SIMULATION = 1000
"""A search simulates one candidate less for this many estimated ones, which take about as long as one simulation."""
SHOWN = 8
"""The number of grids that are priced closely, unless more are to be shown."""
CLOSER_LOOK = 3
"""The number of the best grids for which further candidates are simulated."""
PER_GRID = 3
"""The number of candidates of such a grid that are simulated."""
LOSS_CHUNK = 2048
"""Tokens per chunk of the logits, if the logits of all tokens do not fit."""
MOST_TOKENS = 1 << 16
"""The most tokens of a place in one micro-step, unless it takes all of them: more gain little speed and need memory."""
LONGEST = 60.0
"""Seconds after which `search_built` tries no further grid: a person waits for the answer."""
CHOSEN_FIELDS = ("activations", *Lever._fields, "keep_casts", "loss_chunk", "shard_optimizer")
"""The fields of a policy that the search chooses."""


@dataclass(frozen=True, slots=True)
class Space:
    """The values that the search may choose from; None means all."""

    shapes: tuple[Shape, ...] | None = None
    policies: tuple[Policy, ...] | None = None
    micro_steps: tuple[int, ...] | None = None
    orders: tuple[tuple[str, ...], ...] | None = None


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
    """The result of a search: grids for a task, the fastest first."""

    task: Task
    devices: int
    ranked: Sequence[Price] = field(default_factory=list)
    """The best simulated candidate of each grid."""
    waiting: list[GridCandidates] = field(default_factory=list)
    """Grids that were not priced closely, because others seemed faster."""
    refused: list[Refused] = field(default_factory=list)
    candidates: int = 0
    simulated: int = 0
    seconds: float = 0.0
    """Seconds that the search took."""

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


def search(task: Task, devices: int, *, space: Space = Space(), top: int = SHOWN) -> GridPlan:
    """Rank the grids of this many devices, at least `top` of them by simulation."""
    began = time.perf_counter()
    with _not_collecting():
        found = _Search(task, devices, space, top).run()
    found.seconds = time.perf_counter() - began
    if not found.ranked:
        raise ValueError(why_nothing_fits(found))
    return found


@contextmanager
def _not_collecting() -> Iterator[None]:
    """Pause Python's garbage collector, which would spend an eighth of the time walking all of torch."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# --- the candidates of one grid


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
    return tuple(prices.link(axis) for axis in shape.used_axes)


# --- all grids


class _Search:
    def __init__(self, task: Task, devices: int, space: Space, top: int) -> None:
        self.task, self.space, self.top = task, space, top
        self.plan = GridPlan(task, devices)
        self.limit = task.usable_bytes

    def run(self) -> GridPlan:
        candidates = list(self._candidates())
        if not candidates:
            return self.plan
        orders = self.space.orders or tuple(permutations(AXES))
        estimates = Estimates(self.task, Cells(self.task, candidates), orders)
        levers = torch.tensor([[self._allowed(one, lever) for lever in LEVERS] for one in candidates])
        seconds = estimates.seconds.masked_fill(~levers[:, :, None], torch.inf)
        self.plan.candidates = int(seconds.isfinite().sum())
        by_grid: dict[tuple[int, ...], list[int]] = {}
        for index, candidate in enumerate(candidates):
            by_grid.setdefault(tuple(candidate.shape.sizes.values()), []).append(index)
        grids = [
            GridCandidates([candidates[index] for index in indices], seconds[indices], orders, self._fit)
            for indices in by_grid.values()
        ]
        # a large search spends its time on estimates, a small one on simulations
        effort = SIMULATIONS - self.plan.candidates // ESTIMATES_PER_SIMULATION
        found = self._fitting(grids, max(self.top, SIMULATED_GRIDS, len(grids) // SIMULATED_SHARE, effort // PER_GRID))
        self._rank(found, effort - len(found))
        return self.plan

    def _fitting(self, grids: list[GridCandidates], many: int) -> list[GridCandidates]:
        """Return this many grids with a candidate that fits, in the order of its estimate; refuse those without one."""
        waiting = [
            (grid.estimate, place)
            for place, grid in enumerate(grids)
            if not self._refused(grid) and grid.estimate < inf
        ]
        heapify(waiting)
        found: list[GridCandidates] = []
        while waiting and len(found) < many:
            _, place = heappop(waiting)
            if grids[place].try_next():
                found.append(grids[place])
            elif grids[place].estimate < inf:  # its next candidate is slower: other grids may come first now
                heappush(waiting, (grids[place].estimate, place))
        self.plan.waiting = [grids[place] for _, place in sorted(waiting)]
        return found

    def _refused(self, grid: GridCandidates) -> bool:
        """Refuse a grid if even its smallest candidate exceeds the memory, and say by how much."""
        fewest = min(candidate.rows for candidate in grid.candidates)
        frugal = []
        for candidate in grid.candidates:
            if candidate.rows == fewest:
                frugal.append(self._least(candidate))
                if frugal[-1].total <= self.limit:
                    return False
        least = min(frugal, key=lambda memory: memory.total)
        reason = f"needs {describe_memory(least)} of {self.limit / GIB:.1f} GiB at the least"
        self.plan.refused.append(Refused(grid.shape, reason, least.total - self.limit))
        return True

    def _rank(self, grids: Sequence[GridCandidates], others: int) -> None:
        """Simulate the first candidate of each grid, further ones of the best grids, and `others` in other modes and
        rank orders; then price the first grids more closely."""
        first = [(self._price(grid.found[0]), grid) for grid in grids]
        first.sort(key=lambda found: found[0].seconds)
        prices = {id(grid): [best] for best, grid in first}
        for _, grid in first[:CLOSER_LOOK]:
            while len(grid.found) < PER_GRID and grid.estimate < inf:
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
            (price(self.task, found.candidate) for found in ranked[:shown]), key=lambda found: found.seconds
        )
        sizes = [found.candidate.shape.sizes for found in self.plan.ranked]
        self.plan.waiting = [grid for _, grid in first if grid.shape.sizes not in sizes] + self.plan.waiting

    def _price(self, found: Estimated) -> Price:
        self.plan.simulated += 1
        return price(self.task, found.candidate, quick=True)

    # --- what there is to choose from

    def _candidates(self) -> Iterator[Candidate]:
        """Yield every grid in each activation mode with each number of rows; refuse grids that cut nothing evenly."""
        task = self.task
        for shape in self.space.shapes or shapes_of(self.plan.devices):
            places = shape.places
            if task.rows % places:
                why = f"data*z = {places} places do not divide a batch of {task.rows} rows"
                self.plan.refused.append(Refused(shape, why))
                continue
            misfits, policies = {}, self._policies(shape)  # reasons by activation mode
            for policy in policies:
                misfit = task.config.misfit(shape, policy)
                if misfit is not None:
                    what, value, _, axes = misfit
                    misfits[policy.activations] = f"{what}={value} is not divisible by {axes}"
                    continue
                possible = list(self._rows(task.rows // places))
                if not possible:
                    rows, steps = task.rows // places, self.space.micro_steps
                    misfits[policy.activations] = f"{rows} rows of a place cannot be cut into {steps} micro-steps"
                for rows in possible:
                    yield Candidate(shape, policy, rows, task.rows // places // rows)
            if len(misfits) == len({policy.activations for policy in policies}):
                self.plan.refused.append(Refused(shape, "; ".join(dict.fromkeys(misfits.values()))))

    def _policies(self, shape: Shape) -> Sequence[Policy]:
        """Return one policy for each activation mode where the two differ; levers are added to it."""
        if self.space.policies is not None:
            return self.space.policies
        modes: tuple[Activations, ...] = ("sharded", "replicated") if shape.x * shape.y > 1 else ("sharded",)
        base = Policy(compute_dtype=self.task.compute, shard_optimizer=True, even_tokens=True)
        return [replace(base, activations=mode) for mode in modes]

    def _rows(self, rows: int) -> Iterator[int]:
        if self.space.micro_steps is not None:
            yield from (rows // steps for steps in self.space.micro_steps if rows % steps == 0)
            return
        most = max(1, MOST_TOKENS // self.task.seq)
        yield from (each for each in range(1, rows + 1) if rows % each == 0 and (each <= most or each == rows))

    def _allowed(self, candidate: Candidate, lever: Lever) -> bool:
        """Leave out levers that change nothing on this grid; where policies are given, take theirs alone."""
        policy, shape = candidate.policy, candidate.shape
        if self.space.policies is not None:
            return lever.on(policy) == policy
        # without gathers over z, weights in use are the parameters themselves or casts that are kept anyway
        if lever.keep_weights and shape.z == 1:
            return False
        return not lever.keep_gathered or (policy.activations == "sharded" and shape.x * shape.y > 1)

    # --- memory

    def _fit(self, candidate: Candidate, lever: Lever) -> Candidate | None:
        """Return the candidate with the lever if it fits, with logits in chunks if it fits only then."""
        wanted = replace(candidate, policy=lever.on(candidate.policy))
        reading = MemoryReading(wanted.sizes(self.task), wanted.micro_steps)
        if reading.least > self.limit:
            return None  # this is quick, and it is the answer for most candidates that do not fit
        tried, memory = self._frugal(wanted, reading)
        return tried if memory.total <= self.limit else None

    def _frugal(self, candidate: Candidate, reading: MemoryReading | None = None) -> tuple[Candidate, Memory]:
        """Return a candidate and its memory; if it does not fit, without kept casts, else with logits in chunks."""
        reading = reading or MemoryReading(candidate.sizes(self.task), candidate.micro_steps)
        memory = reading.memory()
        if self.space.policies is not None or memory.total <= self.limit:
            return candidate, memory
        # both cost time, so each is tried only if nothing but what it saves is in the way
        if memory.total - reading.casts <= self.limit:
            lean = replace(candidate, policy=replace(candidate.policy, keep_casts=False))
            less = memory_of(self.task, lean)
            if less.total <= self.limit:
                return lean, less
        in_chunks = candidate.rows * self.task.seq > LOSS_CHUNK
        if in_chunks and memory.total - memory.logits <= self.limit:
            chunked = replace(candidate, policy=replace(candidate.policy, loss_chunk=LOSS_CHUNK))
            less = memory_of(self.task, chunked)
            if less.total < memory.total:
                return chunked, less
        return candidate, memory

    def _least(self, candidate: Candidate) -> Memory:
        frugal = replace(candidate, policy=FRUGAL.on(candidate.policy))
        return self._frugal(candidate if self.space.policies else frugal)[1]


# --- models that a function builds


def search_built(
    task: Task, build: ModelBuilder, devices: int, *, longest: float = LONGEST, progress: Callable[[str], None] = print
) -> GridPlan:
    """Rank the grids of this many devices for a model that a function of a grid and a policy builds.

    The code is run dry on every grid, those with few ranks on x and y first, until the time is up. A dry run takes a
    thousand times as long as a rehearsal. A grid that was not tried says so.
    """
    began = time.perf_counter()
    plan = GridPlan(task, devices)
    found: list[TracedPrice] = []
    for shape in sorted(shapes_of(devices), key=lambda shape: (shape.x * shape.y, shape.y, shape.z)):
        if time.perf_counter() - began > longest and found:
            reason = f"not tried: the {longest:.0f} s were over; fewer devices have fewer grids"
        else:
            progress(f"running the module dry on {shape}")
            reason = _try(task, build, shape, plan, found)
        if reason:
            plan.refused.append(Refused(shape, reason))
    if not found:
        shape, reason, _ = plan.refused[0]
        raise ValueError(f"the module runs on no grid of {devices} devices; on {shape}: {reason}")
    plan.ranked = sorted(found, key=lambda price: price.seconds)
    plan.seconds = time.perf_counter() - began
    return plan


def _try(task: Task, build: ModelBuilder, shape: Shape, plan: GridPlan, found: list[TracedPrice]) -> str:
    """Run the model with as many rows at once as fit into memory; return the reason if nothing does."""
    from fourfold.planner.trace import dry_run  # imports all of wrap, which no other search needs

    places = shape.places
    if task.rows % places:
        return f"data*z = {places} places do not divide a batch of {task.rows} rows"
    limit = task.usable_bytes
    policy = Policy(compute_dtype=task.compute, shard_optimizer=shape.sizes[REPLICA] > 1, even_tokens=True)
    reason = ""
    for rows in (each for each in range(task.rows // places, 0, -1) if task.rows // places % each == 0):
        plan.candidates += 1
        try:
            dry = dry_run(build, shape, rows=rows, seq=task.seq, policy=policy, micro_steps=1, optimizer=True)
        except (ValueError, RuntimeError, TypeError) as error:  # a foreign module may not work on every grid
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if dry.peak_bytes <= limit:
            candidate = Candidate(shape, policy, rows, task.rows // places // rows)
            plan.simulated += 1
            found.append(price_dry_run(task, candidate, dry))
            return ""
        reason = f"needs {dry.peak_bytes / GIB:.1f} GiB of {limit / GIB:.1f} GiB with {rows} rows at once"
    return reason


# --- in words


def describe_memory(memory: Memory) -> str:
    """Describe memory as `61.2 GiB (optimizer 30.1, activations 22.4, ...)`."""
    kinds = sorted(memory.kinds.items(), key=lambda kind: -kind[1])
    parts = ", ".join(f"{name.replace('_', ' ')} {nbytes / GIB:.1f}" for name, nbytes in kinds[:4] if nbytes)
    return f"{memory.total / GIB:.1f} GiB ({parts})"


def why_nothing_fits(plan: GridPlan) -> str:
    """Explain what is missing, and what would make the model fit."""
    task, too_large = plan.task, [refused for refused in plan.refused if refused.lacking]
    if not too_large:
        reasons = dict.fromkeys(refused.reason for refused in plan.refused)
        return (
            f"no grid of {plan.devices} devices cuts this model and {task.rows} rows of {task.seq} tokens evenly: "
            f"{'; '.join(list(reasons)[:3])}; change the number of devices or the batch"
        )
    closest = min(too_large, key=lambda refused: refused.lacking)
    state = task.config.parameters * (task.parameters.itemsize * 4)
    return (
        f"the model fits on no grid of {plan.devices} devices of {task.machine.name}: the closest, {closest.shape}, "
        f"{closest.reason}; weights, gradients and optimizer state alone are {state / GIB:.0f} GiB, "
        f"{ceil(state / task.usable_bytes)} devices' worth: take more devices, shorter sequences, or a smaller model"
    )

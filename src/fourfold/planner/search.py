"""The search: find the fastest grids, rank orders, pipelines and policies to train a model on a number of devices.

Every factorisation of the number of devices is considered, not only powers of two. A grid that does not fit the model,
the batch or the memory is refused with the reason. All candidates are estimated (estimate.py). The first few of each
grid that fit into memory are simulated (price.py), grid by grid in the order of their estimates. If there are few
candidates, those in other activation modes and rank orders are simulated too. A grid that was not simulated shows its
estimate and says so.

Grids with a pipe axis are estimated with the busiest stage and the bubble of the best number of chunks. Those that are
simulated get stages and a schedule (pipe.py); a schedule of its own is searched only for the best few.
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

from fourfold.axes import CUTS, PIPE, REPLICA
from fourfold.planner.estimate import FRUGAL, LEVERS, Cells, Estimates, Lever
from fourfold.planner.machine import Machine, Route, Seconds
from fourfold.planner.memory import Memory, MemoryReading
from fourfold.planner.pipe import MOST_PIPE, best_pipeline, rough_pipeline, too_large
from fourfold.planner.price import (
    Candidate,
    Price,
    Task,
    TracedPrice,
    memory_by_pipe_rank,
    memory_of,
    price,
    price_dry_run,
)
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
PRICED_PIPELINES = 12
"""The most grids with a pipe axis that are simulated, one candidate each: that takes five times as long as another."""
SEARCHED_PIPELINES = 5
"""The number of the best of them for which other numbers of chunks are priced, and a schedule is searched."""
MANY_DEVICES, WIDE_NODES = 512, 4
"""From this many devices on, grids whose x and y, or z, span more than so many nodes are not combined with pipe: stages
are there to keep these axes short. Pipelines then have sharded activations only, which nearly always win."""
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
    axes: tuple[str, ...] = CUTS
    """The axes of the grids that are considered, unless `shapes` names them; with AXES there are pipelines among
    them."""


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


def orders_of(*, pipelines: bool) -> tuple[tuple[str, ...], ...]:
    """Return the rank orders to consider: pipe varies slowest, or next to slowest where replicas lie further apart."""
    every = list(permutations(CUTS))
    near = [(*order[:-1], PIPE, REPLICA) for order in every if order[-1] == REPLICA]
    return *((*order, PIPE) for order in every), *(near if pipelines else ())


class _Search:
    def __init__(self, task: Task, devices: int, space: Space, top: int) -> None:
        self.task, self.space, self.top = task, space, top
        self.plan = GridPlan(task, devices)
        self.limit = task.usable_bytes

    def run(self) -> GridPlan:
        candidates = list(self._candidates())
        if not candidates:
            return self.plan
        grids: list[GridCandidates] = []
        for pipelines in (False, True):
            grids += self._estimate([one for one in candidates if (one.shape.pipe > 1) is pipelines], pipelines)
        # a large search spends its time on estimates, a small one on simulations
        effort = SIMULATIONS - self.plan.candidates // ESTIMATES_PER_SIMULATION
        found = self._fitting(grids, max(self.top, SIMULATED_GRIDS, len(grids) // SIMULATED_SHARE, effort // PER_GRID))
        self._rank(found, effort - len(found))
        return self.plan

    def _estimate(self, candidates: Sequence[Candidate], pipelines: bool) -> Iterator[GridCandidates]:
        """Estimate all candidates, and yield their grids."""
        if not candidates:
            return
        orders = self.space.orders or orders_of(pipelines=pipelines)
        estimates = Estimates(self.task, Cells(self.task, candidates), orders)
        levers = torch.tensor([[self._allowed(one, lever) for lever in LEVERS] for one in candidates])
        seconds = estimates.seconds.masked_fill(~levers[:, :, None], torch.inf)
        self.plan.candidates += int(seconds.isfinite().sum())
        by_grid: dict[tuple[int, ...], list[int]] = {}
        for index, candidate in enumerate(candidates):
            by_grid.setdefault(tuple(candidate.shape.sizes.values()), []).append(index)
        for indices in by_grid.values():
            yield GridCandidates([candidates[index] for index in indices], seconds[indices], orders, self._fit)

    def _fitting(self, grids: list[GridCandidates], many: int) -> list[GridCandidates]:
        """Return this many grids with a candidate that fits, in the order of its estimate; refuse those without one."""
        waiting = [
            (grid.estimate, place)
            for place, grid in enumerate(grids)
            if not self._refused(grid) and grid.estimate < inf
        ]
        heapify(waiting)
        found: list[GridCandidates] = []
        later: list[tuple[float, int]] = []
        pipelines = 0
        while waiting and len(found) < many:
            estimate, place = heappop(waiting)
            grid = grids[place]
            if grid.shape.pipe > 1 and pipelines == PRICED_PIPELINES:
                later.append((estimate, place))
            elif grid.try_next():
                found.append(grid)
                pipelines += grid.shape.pipe > 1
            elif grid.estimate < inf:  # its next candidate is slower: other grids may come first now
                heappush(waiting, (grid.estimate, place))
            elif grid.shape.pipe > 1:
                self._refuse(grid)
        self.plan.waiting = [grids[place] for _, place in sorted([*waiting, *later])]
        return found

    def _refused(self, grid: GridCandidates) -> bool:
        """Refuse a grid if even its smallest candidate exceeds the memory, and say by how much.

        The memory of a pipeline takes long to compute, so it is refused only when its turn comes and nothing fits.
        """
        if grid.shape.pipe > 1:
            return False
        fewest = min(candidate.rows for candidate in grid.candidates)
        frugal = []
        for candidate in grid.candidates:
            if candidate.rows == fewest:
                frugal.append(self._least(candidate))
                if frugal[-1].total <= self.limit:
                    return False
        self._refuse(grid, min(frugal, key=lambda memory: memory.total))
        return True

    def _refuse(self, grid: GridCandidates, least: Memory | None = None) -> None:
        where = ""
        if least is None:
            fewest = min(grid.candidates, key=lambda candidate: candidate.rows)
            policy = fewest.policy if self.space.policies else FRUGAL.on(fewest.policy)
            memories = memory_by_pipe_rank(self.task, rough_pipeline(self.task, replace(fewest, policy=policy)))
            least = max(memories, key=lambda memory: memory.total)
            where = f" on pipe rank {memories.index(least)}"
        reason = f"needs {describe_memory(least)} of {self.limit / GIB:.1f} GiB at the least{where}"
        self.plan.refused.append(Refused(grid.shape, reason, max(0, least.total - self.limit)))

    def _rank(self, grids: Sequence[GridCandidates], others: int) -> None:
        """Simulate the first candidate of each grid, further ones of the best grids, and `others` in other modes and
        rank orders; then price the first grids more closely."""
        first = [(self._price(grid.found[0]), grid) for grid in grids]
        first.sort(key=lambda found: found[0].seconds)
        prices = {id(grid): [best] for best, grid in first}
        for _, grid in first[:CLOSER_LOOK]:
            if grid.shape.pipe > 1:
                continue
            while len(grid.found) < PER_GRID and grid.estimate < inf:
                grid.try_next()
            prices[id(grid)] += [self._price(candidate) for candidate in grid.found[1:]]
        if others > 0:
            plain = [grid for grid in grids if grid.shape.pipe == 1]
            further = [(one, grid) for grid in plain for one in grid.elsewhere(self.task.machine)]
            further.sort(key=lambda found: found[0].seconds)
            for one, grid in further[:others]:
                prices[id(grid)].append(self._price(one))
        ranked = sorted(
            (min(of_grid, key=lambda found: found.seconds) for of_grid in prices.values()),
            key=lambda found: found.seconds,
        )
        pipelines = [found for found in ranked if found.candidate.shape.pipe > 1]
        plain = [found for found in ranked if found.candidate.shape.pipe == 1]
        shown = max(self.top, SHOWN)
        closely = [price(self.task, found.candidate) for found in plain[:shown]]
        # a first look prices 1F1B alone, so the best pipelines get another, however slow they seem
        closely += map(self._improve, pipelines[:SEARCHED_PIPELINES])
        closely += pipelines[SEARCHED_PIPELINES:]
        self.plan.ranked = sorted(closely, key=lambda found: found.seconds)[:shown]
        sizes = [found.candidate.shape.sizes for found in self.plan.ranked]
        self.plan.waiting = [grid for _, grid in first if grid.shape.sizes not in sizes] + self.plan.waiting

    def _improve(self, found: Price) -> Price:
        """Return a pipeline with the best number of chunks and schedule."""
        if self._keeps_stages():
            return found
        most = FRUGAL.recompute if self.space.policies is None else None
        return best_pipeline(self.task, self._open(found.candidate), self.limit, searches=True, most=most) or found

    def _price(self, found: Estimated) -> Price:
        self.plan.simulated += 1
        candidate = found.candidate
        if candidate.shape.pipe > 1 and not self._keeps_stages():
            # what fits with one chunk and 1F1B may not fit with the cuts of the simulation: then those stay
            chosen = best_pipeline(self.task, self._open(candidate), self.limit, searches=False)
            return chosen or price(self.task, candidate)
        return price(self.task, candidate, quick=True)

    def _keeps_stages(self) -> bool:
        """Return whether the given policies say how the model is cut into stages or in which order ranks work."""
        given = self.space.policies or ()
        return any(policy.stages is not None or policy.schedule != "auto" for policy in given)

    @staticmethod
    def _open(candidate: Candidate) -> Candidate:
        return replace(candidate, policy=replace(candidate.policy, stages=None, schedule="auto"))

    # --- what there is to choose from

    def _candidates(self) -> Iterator[Candidate]:
        """Yield every grid in each activation mode with each number of rows; refuse grids that cut nothing evenly."""
        task = self.task
        for shape in self.space.shapes or shapes_of(self.plan.devices, axes=self.space.axes):
            places = shape.places
            if reason := self._why_no_pipe(shape):
                self.plan.refused.append(Refused(shape, reason))
                continue
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
                possible = list(self._rows(task.rows // places, shape.pipe))
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
        both = shape.x * shape.y > 1 and (shape.pipe == 1 or shape.world < MANY_DEVICES)
        modes: tuple[Activations, ...] = ("sharded", "replicated") if both else ("sharded",)
        base = Policy(compute_dtype=self.task.compute, shard_optimizer=True, even_tokens=True)
        return [replace(base, activations=mode) for mode in modes]

    def _why_no_pipe(self, shape: Shape) -> str:
        """Return why a grid with a pipe axis is not considered; empty if it is."""
        if shape.pipe == 1:
            return ""
        units, wide = self.task.config.layers + 2, WIDE_NODES * self.task.machine.devices_per_node
        if shape.world >= MANY_DEVICES and (shape.x * shape.y > wide or shape.z > wide):
            return f"x*y={shape.x * shape.y} or z={shape.z} has more than {wide} ranks, so pipe is not worth trying"
        if shape.pipe > units:
            return f"pipe={shape.pipe} ranks for {units} units: {self.task.config.layers} layers, embedding and head"
        return f"pipe={shape.pipe} is more than {MOST_PIPE}" if shape.pipe > MOST_PIPE else ""

    def _rows(self, rows: int, pipe: int) -> Iterator[int]:
        """Yield the possible rows of a micro-step; a pipeline has at least as many micro-steps as ranks if it can."""
        if self.space.micro_steps is not None:
            yield from (rows // steps for steps in self.space.micro_steps if rows % steps == 0)
            return
        most = max(1, MOST_TOKENS // self.task.seq)
        enough = max(1, rows // pipe)
        yield from (each for each in range(1, enough + 1) if rows % each == 0 and (each <= most or each == rows))

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
        if wanted.shape.pipe > 1:
            return self._fit_pipe(wanted)
        reading = MemoryReading(wanted.sizes(self.task), wanted.micro_steps)
        if reading.least > self.limit:
            return None  # this is quick, and it is the answer for most candidates that do not fit
        tried, memory = self._frugal(wanted, reading)
        return tried if memory.total <= self.limit else None

    def _fit_pipe(self, wanted: Candidate) -> Candidate | None:
        """Return a candidate with a pipe axis if a first look says that it fits, with logits in chunks if need be."""
        laid = wanted if self._keeps_stages() else rough_pipeline(self.task, wanted)
        rank = too_large(self.task, laid, self.limit)
        if rank is None:
            return laid
        # only the last rank has logits
        in_chunks = rank == laid.shape.pipe - 1 and laid.rows * self.task.seq > LOSS_CHUNK
        if self.space.policies is not None or not in_chunks:
            return None
        chunked = replace(laid, policy=replace(laid.policy, loss_chunk=LOSS_CHUNK))
        return chunked if too_large(self.task, chunked, self.limit) is None else None

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

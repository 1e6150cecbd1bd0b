"""The search: rank grids, rank orders, pipelines and policies to train a model on a number of devices.

Every factorisation of the number of devices is considered, not only powers of two. A grid that does not fit the model,
the batch or the memory is refused with the reason. All candidates are estimated (estimate.py). The first few of each
grid that fit into memory are simulated (price.py), grid by grid in the order of their estimates. If there are few
candidates, those in other activation modes and rank orders are simulated too. A grid that was not simulated shows its
estimate and says so.

Where a candidate does not fit, it is tried with what saves memory and costs time (`policy.SAVES_MEMORY`): only for long
sequences, or if nothing fits otherwise, so that other searches do not pay for it.

Grids with a pipe axis are estimated with the busiest stage and the bubble of the best number of chunks. Those that are
simulated get stages and a schedule (pipe.py); a schedule of its own is searched only for the best few.
"""

from __future__ import annotations

import gc
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from itertools import permutations
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch

from fourfold.axes import CUTS, PIPE, REPLICA
from fourfold.errors import NoPlanError
from fourfold.planner.estimate import FRUGAL, LEVERS, RECOMPUTE, Cells, Estimates, Lever
from fourfold.planner.folds import bases_for_ex, folds_of, folds_over_ex, is_textbook
from fourfold.planner.machine import Machine, Route, Seconds
from fourfold.planner.memory import Memory, MemoryReading, least_nbytes, without_stages
from fourfold.planner.pipe import MOST_PIPE, best_pipeline, rough_pipeline, rough_stages, too_large
from fourfold.planner.price import (
    Candidate,
    MemoryByKind,
    Price,
    Task,
    TracedPrice,
    memory_by_pipe_rank,
    memory_of,
    price,
    price_dry_run,
    quick_price,
)
from fourfold.planner.robust import LESS_MEMORY, Risk, RobustChoice, choose
from fourfold.planner.sizes import LocalSizes
from fourfold.policy import SAVES_MEMORY, Activations, Policy, Recompute
from fourfold.shape import Shape, shapes_of

if TYPE_CHECKING:
    from fourfold.models.open import ModelBuilder

GIB = 2**30
SIMULATIONS = 100
"""The number of candidates that a search simulates, if there are so many: one takes about 10 to 30 ms."""
FIRST_SHARE = 0.6
"""The share of them that are spent on candidates of different grids; the rest is for other rank orders, whose programs
are known."""
HOPELESS = 1.1
"""A candidate whose estimate is this factor above the best simulated seconds is not simulated: of 224 textbook grids on
four tasks no estimate was more than 6% above what was simulated then."""
SHOWN = 8
"""The number of grids that are priced closely, unless more are to be shown."""
CLOSER_LOOK = 3
"""The number of the best grids for which further candidates are simulated."""
PER_GRID = 3
"""The number of candidates of such a grid that are simulated."""
PRICED_PIPELINES = 12
"""The most grids with a pipe axis that are simulated, one candidate each: that takes five times as long as another."""
PRICED_CONTEXTS = 12
"""The most candidates of grids with a context size that are simulated where others fit: their estimates are low, and
others would be left out for them."""
PRICED_SAVING = 12
"""The most candidates with `SAVES_MEMORY` that are simulated, in addition, where others fit: their estimates do not
count what they cost."""
PRICED_EX, PRICED_EX_PIPELINES = 12, 3
"""The most candidates of folds with ex that are simulated, in addition, without and with a pipe axis."""
SEARCHED_PIPELINES = 5
"""The number of the best of them for which other numbers of chunks are priced, and a schedule is searched."""
MANY_DEVICES, WIDE_NODES = 512, 4
"""From this many devices on, grids whose x and y, or z, span more than so many nodes are not combined with pipe: stages
are there to keep these axes short. Pipelines then have sharded activations only, which nearly always win."""
MOST_TRIED = 24
"""Candidates of a grid that are tried for one that leaves memory free."""
NEAR = 0.02
"""Grids whose seconds are within this share of the best may be the best with other settings."""
WORTH_TUNING = 0.005
"""The share of a step that a plan must gain to differ from what `fourfold train` does by itself."""
LONG_SEQUENCE = 8192
"""Sequences of at least so many tokens may be cut over places where one of them is too much for a device, and may have
their MLPs in chunks and their block inputs on the host."""
LEAST_TOKENS = 256
"""The fewest tokens of a sequence that a place of a context group has."""
MOST_CONTEXTS = 3
"""Context sizes that are tried on one grid, the smallest that are possible: larger ones send more."""
KEEPS_ALL = Lever("none", keep_gathered=False, keep_weights=False)
LOSS_CHUNK = 2048
"""Tokens per chunk of the logits, if the logits of all tokens do not fit."""
MOST_TOKENS = 1 << 16
"""The most tokens of a place in one micro-step, unless it takes all of them: more gain little speed and need memory."""
LONGEST = 60.0
"""Seconds after which `search_built` tries no further grid: a person waits for the answer."""
CHOSEN_FIELDS = (
    "activations", *Lever._fields, "keep_casts", "loss_chunk", *SAVES_MEMORY, "shard_optimizer", "context_way"
)  # fmt: skip
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
    saves_memory: bool = False
    """Whether given `policies` may be changed by `SAVES_MEMORY` where they do not fit; without policies they may."""


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


def search(
    task: Task,
    devices: int,
    *,
    space: Space = Space(),
    top: int = SHOWN,
    risk: Risk = "fastest",
    simulations: int | None = None,
) -> GridPlan:
    """Rank the grids of this many devices, at least `top` of them by simulation.

    About so many `simulations` are made, `SIMULATIONS` by default. With the risk `robust` the first one is the choice
    that regrets least if the machine is not as its file says.
    """
    if risk not in get_args(Risk):
        raise ValueError(f"risk={risk!r}: it is one of {', '.join(get_args(Risk))}")
    if task.rows < 1 or task.seq < 1:
        raise ValueError(f"a batch of {task.rows} rows of {task.seq} tokens: both must be at least 1")
    if other := [shape for shape in space.shapes or () if shape.world != devices]:
        raise ValueError(f"the grid {other[0]} has {other[0].world} ranks, but the search is for {devices} devices")
    began = time.perf_counter()
    with _not_collecting():
        found = _Search(task, devices, space, top, risk, simulations).run()
    found.seconds = time.perf_counter() - began
    if not found.ranked:
        raise why_no_grid(found)
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


def _saving_nothing() -> dict[str, Any]:
    return {one.name: one.default for one in fields(Policy) if one.name in SAVES_MEMORY}


@lru_cache(maxsize=4)
def _useful_levers(gathers: bool, enters: bool) -> tuple[bool, ...]:
    """Return for each lever whether it changes anything where weights are gathered, and inputs of products are.

    Without gathers over z, weights in use are the parameters themselves or casts that are kept anyway.
    """
    return tuple((gathers or not lever.keep_weights) and (enters or not lever.keep_gathered) for lever in LEVERS)


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


# --- all grids


def ways_of(task: Task, candidate: Candidate) -> list[str]:
    """Return the ways in which K and V may travel on a grid with a context size, except the one that `auto` takes."""
    sizes, context = candidate.sizes(task), candidate.shape.context
    heads = sizes.local_kv // task.config.head_dim
    near = [size for size in range(2, context + 1) if context % size == 0 and heads % size == 0]
    swaps = [f"ulysses:{size}+{over}" for size in near if size < context for over in ("gather", "ring")]
    return ["ring", *swaps, *(f"ulysses:{size}" for size in near if size == context)]


def orders_of(*, pipelines: bool) -> tuple[tuple[str, ...], ...]:
    """Return the rank orders to consider: pipe varies slowest, or next to slowest where replicas lie further apart."""
    every = list(permutations(CUTS))
    near = [(*order[:-1], PIPE, REPLICA) for order in every if order[-1] == REPLICA]
    return *((*order, PIPE) for order in every), *(near if pipelines else ())


class _Search:
    def __init__(
        self,
        task: Task,
        devices: int,
        space: Space,
        top: int,
        risk: Risk = "fastest",
        simulations: int | None = None,
    ) -> None:
        self.task, self.space, self.top, self.risk = task, space, top, risk
        self.simulations = SIMULATIONS if simulations is None else simulations
        self.plan = GridPlan(task, devices)
        self.limit = task.usable_bytes
        self.may_save = space.policies is None or space.saves_memory
        self.saves = self.may_save and task.seq >= LONG_SEQUENCE
        """Whether candidates that do not fit are tried with what saves memory."""
        given = space.policies or (Policy(),)
        self._saved = [name for name in SAVES_MEMORY if not any(getattr(policy, name) for policy in given)]
        """The fields that the search may set, as the given policies do not."""

    def run(self) -> GridPlan:
        self._run()
        if not self.plan.ranked and self.may_save and not self.saves:
            self.plan, self.saves = GridPlan(self.task, self.plan.devices), True
            self._run()
        return self.plan

    def _run(self) -> None:
        shapes = list(self.space.shapes or self._shapes())
        folds = [] if self.space.shapes else [fold for shape in shapes for fold in folds_of(self.task, shape)]
        candidates = list(self._candidates([*shapes, *folds]))
        needy = [] if self.space.shapes else self._with_context(candidates)
        grids = self._grids(candidates)
        grids += self._grids(list(self._candidates(needy)))
        found = self._simulate(grids)
        self._simulate_orders(found)
        if not self.space.shapes:
            found = self._with_ex(found)
        self._rank(found)

    def _shapes(self) -> Iterator[Shape]:
        return shapes_of(self.plan.devices, axes=self.space.axes)

    def _with_context(self, candidates: Sequence[Candidate]) -> list[Shape]:
        """Return grids with a context size where that may help: where places have less than a row, or where one row is
        too much for a device, or too much unless it is recomputed; and everywhere if rows have packed documents.

        Elsewhere K and V would travel for nothing, for places that share rows can as well have some each.
        """
        task = self.task
        if task.config.dropout_of_attention > 0 or task.config.routing.balances:
            return []  # a model that does so refuses grids with a context size
        shapes = {one.shape: None for one in self.plan.refused if task.rows % one.shape.places}
        if task.documents is not None:  # places that share their rows balance their documents
            shapes |= {one.shape: None for one in candidates}
        if task.seq >= LONG_SEQUENCE:
            single = [one for one in candidates if one.rows == 1]
            least = self._least_nbytes(single, [one.sizes(task) for one in single], KEEPS_ALL.recompute).tolist()
            shapes |= {one.shape: None for one, nbytes in zip(single, least, strict=True) if nbytes > self.limit}
        found = []
        for shape in shapes:
            sizes = [size for size in range(2, shape.places + 1) if shape.places % size == 0]
            possible = [size for size in sizes if task.rows * size % shape.places == 0]
            enough = [size for size in possible if task.seq // size >= LEAST_TOKENS]
            found += [shape.with_context(size) for size in enough[:MOST_CONTEXTS]]
        return found

    def _grids(self, candidates: Sequence[Candidate]) -> list[GridCandidates]:
        return [
            grid
            for pipelines in (False, True)
            for grid in self._estimate([one for one in candidates if (one.shape.pipe > 1) is pipelines], pipelines)
        ]

    def _estimate(self, candidates: Sequence[Candidate], pipelines: bool) -> Iterator[GridCandidates]:
        """Estimate all candidates, and yield their grids."""
        if not candidates:
            return
        orders = self.space.orders or orders_of(pipelines=pipelines)
        self.plan.candidates += sum(sum(self._levers(one)) for one in candidates) * len(orders)
        candidates, sizes, fits = self._rule_out_too_large(candidates)
        if not candidates:
            return
        estimates = Estimates(self.task, Cells(self.task, candidates, sizes), orders)
        levers = fits & torch.tensor([self._levers(one) for one in candidates])
        seconds = estimates.seconds.masked_fill(~levers[:, :, None], torch.inf)
        by_grid: dict[tuple[int, ...], list[int]] = {}
        for index, candidate in enumerate(candidates):
            by_grid.setdefault(tuple(candidate.shape.named.values()), []).append(index)
        for indices in by_grid.values():
            yield GridCandidates([candidates[index] for index in indices], seconds[indices], orders, self._fit)

    def _simulate(self, grids: Sequence[GridCandidates]) -> list[tuple[GridCandidates, list[Price]]]:
        """Simulate candidates that fit, and return those of each grid; refuse grids without one.

        Textbook grids come first, then all others, the fastest by their estimates first. An estimate is hardly ever
        above the simulated seconds, so a grid whose estimate is well above the best simulated ones need not be tried.
        """
        shown = max(self.top, SHOWN)
        waiting = [
            (not is_textbook(self.task.machine, grid.shape), grid.estimate, place)
            for place, grid in enumerate(grids)
            if not self._refused(grid) and grid.estimate < inf
        ]
        heapify(waiting)
        found: dict[int, list[Price]] = {}
        later: list[tuple[float, int]] = []
        best, pipelines, contexts, most = inf, 0, 0, FIRST_SHARE * self.simulations
        saving: list[tuple[float, int, Estimated]] = []
        most_contexts = PRICED_CONTEXTS if any(grid.shape.context == 1 for grid in grids) else inf
        while waiting:
            other, estimate, place = heappop(waiting)
            grid, known = grids[place], found.get(place, [])
            piped = grid.shape.pipe > 1
            done = len(found) >= shown and (self.plan.simulated >= most or estimate > HOPELESS * best)
            enough = (piped and pipelines >= PRICED_PIPELINES) or (grid.shape.context > 1 and contexts >= most_contexts)
            if done or enough:
                if not known:
                    later.append((estimate, place))
                continue
            fits = grid.try_next()
            if fits and any(getattr(grid.found[-1].candidate.policy, name) for name in self._saved):
                saving.append((estimate, place, grid.found[-1]))  # only if it may be faster than what fits without
            elif fits:
                found[place] = [*known, self._price(grid.found[-1])]
                pipelines += piped
                contexts += grid.shape.context > 1
                best = min(best, found[place][-1].seconds)
            elif not known and grid.estimate == inf and all(other != place for _, other, _ in saving):
                self._refuse(grid)
            # one candidate of a pipeline stands for its grid: the best of them get a closer look later
            if grid.estimate < inf and (not piped or place not in found) and len(found.get(place, [])) < PER_GRID:
                heappush(waiting, (other, grid.estimate, place))
        most_saving = PRICED_SAVING if found else self.simulations
        for estimate, place, one in sorted(saving, key=lambda one: one[0])[:most_saving]:
            if estimate < best:
                found.setdefault(place, []).append(self._price(one))
                best = min(best, found[place][-1].seconds)
                self.simulations += 1
        later += [(estimate, place) for estimate, place, _ in saving if place not in found]
        waits = dict.fromkeys(place for _, place in sorted(later))
        self.plan.waiting = [grids[place] for place in waits if place not in found]
        ranked = sorted(found.items(), key=lambda one: min(price.seconds for price in one[1]))
        return [(grids[place], prices) for place, prices in ranked]

    def _simulate_orders(self, found: Sequence[tuple[GridCandidates, list[Price]]]) -> None:
        """Simulate the best candidates in other rank orders too, as far as simulations are left."""
        left = self.simulations - self.plan.simulated
        plain = [(grid, prices) for grid, prices in found if grid.shape.pipe == 1]
        further = [
            (one, prices)
            for grid, prices in plain[: max(CLOSER_LOOK, left // PER_GRID)]
            for one in grid.elsewhere(self.task.machine)
        ]
        further.sort(key=lambda one: one[0].seconds)
        for one, prices in further[: max(0, left)]:
            prices.append(self._price(one))

    def _with_ex(
        self, found: Sequence[tuple[GridCandidates, list[Price]]]
    ) -> Sequence[tuple[GridCandidates, list[Price]]]:
        """Return what was simulated and, in addition, folds with ex of the fastest grids; the fastest first."""
        simulated = [price for _, prices in found for price in prices]
        bases = bases_for_ex(self.task, self.plan.devices, simulated)
        folds = [fold for shape, expert in bases for fold in folds_over_ex(self.task, shape, expert)]
        grids = self._grids(list(self._candidates(folds)))
        best = min((price.seconds for price in simulated), default=inf)
        waiting = [
            (grid.estimate, place)
            for place, grid in enumerate(grids)
            if not self._refused(grid) and grid.estimate < inf
        ]
        heapify(waiting)
        left = {False: PRICED_EX, True: PRICED_EX_PIPELINES}
        prices: dict[int, list[Price]] = {}
        while waiting:
            estimate, place = heappop(waiting)
            grid, known = grids[place], prices.setdefault(place, [])
            piped = grid.shape.pipe > 1
            if estimate > HOPELESS * best or not left[piped]:
                self.plan.waiting += [] if known else [grid]
                continue
            if grid.try_next():
                known.append(self._price(grid.found[-1]))
                left[piped] -= 1
                best = min(best, known[-1].seconds)
            elif not known and grid.estimate == inf:
                self._refuse(grid)
            if grid.estimate < inf and len(known) < (1 if piped else PER_GRID):
                heappush(waiting, (grid.estimate, place))
        every = [*found, *((grids[place], known) for place, known in prices.items() if known)]
        return sorted(every, key=lambda one: min(price.seconds for price in one[1]))

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
                if self._has_room(frugal[-1]):
                    return False
        self._refuse(grid, min(frugal, key=lambda memory: memory.total))
        return True

    def _refuse(self, grid: GridCandidates, least: Memory | None = None) -> None:
        where = ""
        if least is None:
            fewest = min(grid.candidates, key=lambda candidate: candidate.rows)
            memories = memory_by_pipe_rank(self.task, rough_pipeline(self.task, self._most_frugal(fewest)))
            least = max(memories, key=lambda memory: memory.total)
            where = f" on pipe rank {memories.index(least)}"
            least = replace(least, host=max(memory.host for memory in memories))
        reason = f"needs {describe_memory(least)} of {self.limit / GIB:.1f} GiB at the least{where}"
        lacking = least.total - self.limit
        if lacking <= 0 and self.task.machine.host_memory is not None:
            host = self.task.machine.host_memory
            reason = f"needs {least.host / GIB:.1f} GiB of {host / GIB:.1f} GiB of the host's memory for block inputs"
            lacking = least.host - host
        self.plan.refused.append(Refused(grid.shape, reason, max(0, lacking)))

    def _rank(self, found: Sequence[tuple[GridCandidates, list[Price]]]) -> None:
        """Price the first grids more closely, and choose."""
        plain = [(grid, prices) for grid, prices in found if grid.shape.pipe == 1]
        ranked = sorted(
            (min(prices, key=lambda one: one.seconds) for _, prices in found),
            key=lambda found: found.seconds,
        )
        pipelines = [one for one in ranked if one.candidate.shape.pipe > 1]
        shown = max(self.top, SHOWN)
        seen = [one for one in ranked if one.candidate.shape.pipe == 1][:shown]
        # a first look prices 1F1B alone, so the best pipelines get another, however slow they seem
        improved: list[Price] = []
        for one in pipelines[:SEARCHED_PIPELINES]:
            improved.append(self._improve(one, min((other.seconds for other in [*seen, *improved]), default=inf)))
        first = sorted([*seen, *improved, *pipelines[SEARCHED_PIPELINES:]], key=lambda one: one.seconds)[:shown]
        closely = [one if one.candidate.shape.pipe > 1 else price(self.task, one.candidate) for one in first]
        if not closely:
            return
        self.plan.ranked = sorted(closely, key=lambda one: one.seconds)
        if self.risk == "robust":
            self._choose([*(one for _, prices in plain for one in prices), *improved, *self._roomy(plain, improved)])
        else:
            near = (1 + NEAR) * self.plan.ranked[0].seconds
            tuned = [self._tune(one, host=False) if one.seconds <= near else one for one in self.plan.ranked]
            self.plan.ranked = sorted(tuned, key=lambda one: one.seconds)
        self.plan.ranked = [*map(self._tune, self.plan.ranked[:1]), *self.plan.ranked[1:]]
        sizes = [one.candidate.shape.named for one in self.plan.ranked]
        self.plan.waiting = [grid for grid, _ in found if grid.shape.named not in sizes] + self.plan.waiting

    def _tune(self, found: Price, *, host: bool = True) -> Price:
        """Return the same grid with an optimizer that is not sharded, or, for the `host`, with steps that are not
        compiled or not recorded, where the machine says that this is faster and it fits."""
        if self.space.policies is not None:
            return found
        policy, task = found.candidate.policy, found.task
        shards = policy.shard_optimizer and found.candidate.shape.data > 1
        ways = [(task, replace(policy, shard_optimizer=False))] if shards else []
        if found.candidate.shape.context > 1 and policy.context_way == "auto":
            ways += [(task, replace(policy, context_way=way)) for way in ways_of(task, found.candidate)]
        if self.saves and any(getattr(policy, name) for name in SAVES_MEMORY):  # other ones may cost less
            plain = replace(found.candidate, policy=replace(policy, **_saving_nothing()))
            ways += [(task, other.policy) for other in self._saving(plain) if other.policy != policy]
        if host and task.machine.device != "cpu":
            ways += [(task, replace(policy, compile=False)), (replace(task, captured=False), policy)]
        for way, other in ways:
            if way.machine.host and way.host_mode(other, found.candidate.shape) not in way.machine.host:
                continue  # a host that was not measured counts as never late, which is no reason to take it
            tuned = price(way, replace(found.candidate, policy=other))
            if tuned.seconds < (1 - WORTH_TUNING) * found.seconds and self._has_room(tuned.memory):
                found = tuned
        return found

    def _roomy(
        self, plain: Sequence[tuple[GridCandidates, list[Price]]], pipelines: Sequence[Price]
    ) -> Iterator[Price]:
        """Yield candidates of the best grids that leave some memory free, where those so far do not."""
        limit = self.limit - LESS_MEMORY
        for grid, prices in plain[:SHOWN]:
            if all(one.memory.total > limit for one in prices):
                for _ in range(MOST_TRIED):
                    if grid.estimate == inf:
                        break
                    if grid.try_next() and memory_of(self.task, grid.found[-1].candidate).total <= limit:
                        yield self._price(grid.found[-1])
                        break
        for one in pipelines:
            if one.memory.total > limit and (found := self._pipeline_of(one, limit, one.seconds)) is not None:
                yield found

    def _choose(self, priced: Sequence[Price]) -> None:
        """Put the choice that regrets least first."""

        def closely(one: Price) -> Price:
            if one.candidate.shape.pipe > 1:
                return one  # a pipeline has one price only
            known = (close for close in self.plan.ranked if close.candidate == one.candidate)
            return next(known, None) or price(self.task, one.candidate)

        found = choose(priced, self.limit, quick_price, closely)
        first, self.plan.robust = found.chosen.price, found
        sizes = first.candidate.shape.named
        others = [one for one in self.plan.ranked if one.candidate.shape.named != sizes]
        self.plan.ranked = [first, *others][: max(self.top, SHOWN)]

    def _improve(self, found: Price, fastest: float) -> Price:
        """Return a pipeline with the best number of chunks and schedule, if it may be faster than others are."""
        return self._pipeline_of(found, self.limit, fastest) or found

    def _pipeline_of(self, found: Price, limit: int, fastest: float) -> Price | None:
        """Return the best pipeline of a grid within so many bytes; None if none fits, or if the policies say which."""
        if self._keeps_stages():
            return None
        most = FRUGAL.recompute if self.space.policies is None else None
        candidate = self._open(found.candidate)
        return best_pipeline(self.task, candidate, limit, searches=True, most=most, fastest=fastest)

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
        return replace(candidate, policy=without_stages(candidate.policy))

    # --- what there is to choose from

    def _candidates(self, shapes: Iterable[Shape]) -> Iterator[Candidate]:
        """Yield these grids in each activation mode with each number of rows; refuse those that cut nothing evenly."""
        task = self.task
        for shape in shapes:
            places = shape.row_places
            if reason := self._why_no_pipe(shape):
                self.plan.refused.append(Refused(shape, reason))
                continue
            if task.rows % places:
                divided = "data*z" if shape.context == 1 else "data*z/context"
                why = f"{divided} = {places} places do not divide a batch of {task.rows} rows"
                self.plan.refused.append(Refused(shape, why))
                continue
            misfits, policies = {}, self._policies(shape)  # reasons by activation mode
            for policy in policies:
                misfit = task.config.misfit(shape, policy)
                if misfit is not None:
                    what, value, _, axes = misfit
                    misfits[policy.activations] = f"{what}={value} is not divisible by {axes}"
                    continue
                possible = list(self._rows(task.rows // places, shape))
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
        both = shape.x * shape.y > 1 and (shape.pipe == 1 or shape.world < MANY_DEVICES) and not shape.folded
        modes: tuple[Activations, ...] = ("sharded", "replicated") if both else ("sharded",)
        compiles = self.task.machine.device != "cpu"  # as `fourfold train` does
        base = Policy(compute_dtype=self.task.compute, shard_optimizer=True, even_tokens=True, compile=compiles)
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

    def _rows(self, rows: int, shape: Shape) -> Iterator[int]:
        """Yield the possible rows of a micro-step; a pipeline has at least as many micro-steps as ranks if it can.

        Places that share rows have less than one each, unless the grid was asked for or they balance documents: with
        more they would not share.
        """
        if self.space.micro_steps is not None:
            yield from (rows // steps for steps in self.space.micro_steps if rows % steps == 0)
            return
        most = max(1, MOST_TOKENS * shape.context // self.task.seq)
        if shape.context > 1 and self.space.shapes is None and self.task.documents is None:
            most = min(most, shape.context)
        enough = max(1, rows // shape.pipe)
        yield from (each for each in range(1, enough + 1) if rows % each == 0 and (each <= most or each == rows))

    def _levers(self, candidate: Candidate) -> tuple[bool, ...]:
        """Return for each lever whether it changes anything on this grid; where policies are given, it is theirs."""
        policy, shape = candidate.policy, candidate.shape
        if self.space.policies is not None:
            return tuple(lever.on(policy) == policy for lever in LEVERS)
        return _useful_levers(shape.z > 1, policy.activations == "sharded" and shape.x * shape.y > 1)

    # --- memory

    def _rule_out_too_large(
        self, candidates: Sequence[Candidate]
    ) -> tuple[list[Candidate], list[LocalSizes], torch.Tensor]:
        """Return the candidates that a lower bound of their memory admits, with their sizes and whether that bound
        admits each lever: [candidate, lever]. Refuse the other grids."""
        sizes = [candidate.sizes(self.task) for candidate in candidates]
        lean = self._lean_sizes(candidates, sizes)
        frugal = self._least_nbytes(candidates, lean, FRUGAL.recompute)
        fits = (frugal <= self.limit).nonzero()[:, 0].tolist()
        possible = {candidates[place].shape for place in fits}
        refused: dict[Shape, float] = {}
        for candidate, nbytes in zip(candidates, frugal.tolist(), strict=True):
            if candidate.shape not in possible:
                refused[candidate.shape] = min(nbytes, refused.get(candidate.shape, inf))
        for shape, nbytes in refused.items():
            reason = f"needs more than {nbytes / GIB:.1f} GiB of {self.limit / GIB:.1f} GiB for weights, gradients, "
            reason += "optimizer state and what layers keep"
            self.plan.refused.append(Refused(shape, reason, round(nbytes) - self.limit))
        candidates, sizes, lean = ([each[place] for place in fits] for each in (candidates, sizes, lean))
        least = {FRUGAL.recompute: frugal[fits]}
        for recompute in RECOMPUTE:
            if recompute not in least:
                least[recompute] = self._least_nbytes(candidates, lean, recompute)
        by_lever = torch.stack([least[lever.recompute] for lever in LEVERS], dim=1)
        return candidates, sizes, by_lever <= self.limit

    def _least_nbytes(
        self, candidates: Sequence[Candidate], sizes: Sequence[LocalSizes], recompute: Recompute
    ) -> torch.Tensor:
        """Return a lower bound of the bytes of each candidate with this recompute: [candidate].

        It is quick, and it is the answer for most candidates that do not fit.
        """
        first = {pipe: self._first_layers(pipe) for pipe in {one.shape.pipe for one in candidates}}
        layers = [first[one.shape.pipe] for one in candidates]
        passes = [min(one.shape.pipe, one.micro_steps) for one in candidates]
        counts = torch.tensor([layers, passes, [one.micro_steps for one in candidates]], dtype=torch.float64)
        return least_nbytes(sizes, recompute, *counts)

    def _first_layers(self, pipe: int) -> int:
        """Return the layers of the first of so many pipe ranks; 0 if a given schedule may keep less than 1F1B does."""
        if pipe > 1 and self._keeps_stages():
            return 0
        return len(rough_stages(self.task.config, pipe, self.task.seq).layers_of(0))

    def _fit(self, candidate: Candidate, lever: Lever) -> Candidate | None:
        """Return the candidate with the lever if it fits, with logits in chunks or what else saves memory if it fits
        only then."""
        wanted = replace(candidate, policy=lever.on(candidate.policy))
        fit = self._fit_pipe if wanted.shape.pipe > 1 else self._fit_plain
        if (fitted := fit(wanted)) is not None or not self.saves:
            return fitted
        return next(filter(None, map(fit, self._saving(wanted))), None)

    def _fit_plain(self, wanted: Candidate) -> Candidate | None:
        """Return a candidate without a pipe axis if it fits, with logits in chunks if need be."""
        reading = MemoryReading(wanted.sizes(self.task), wanted.micro_steps)
        if reading.least > self.limit:
            return None  # this is quick, and it is the answer for most candidates that do not fit
        tried, memory = self._frugal(wanted, reading)
        return tried if self._has_room(memory) else None

    def _saving(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with each set of what saves memory, those that are likely to cost least first.

        Inputs of blocks wait on the host only where that link is known, and where blocks run again.
        """
        machine, policy = self.task.machine, candidate.policy
        chunks, offload = ({name: value} for name, value in SAVES_MEMORY.items())
        in_chunks = not self.task.config.experts and candidate.sizes(self.task).m > chunks["mlp_chunk"]
        sets = [chunks] if in_chunks else []
        if policy.runs_blocks_again and machine.device != "cpu" and machine.host_bandwidth is not None:
            sets += [offload, *({**each, **offload} for each in sets)]
        for each in sets:
            if (saving := replace(policy, **each)) != policy:
                yield replace(candidate, policy=saving)

    def _lean(self, candidate: Candidate) -> Candidate:
        """Return the candidate with all that saves memory; the candidate itself if that is not tried."""
        return [candidate, *(self._saving(candidate) if self.saves else ())][-1]

    def _lean_sizes(self, candidates: Sequence[Candidate], sizes: Sequence[LocalSizes]) -> Sequence[LocalSizes]:
        """Return the sizes with which lower bounds of memory are found, where blocks run again or not."""
        if not self.saves:
            return sizes
        again = (replace(one, policy=replace(one.policy, recompute=FRUGAL.recompute)) for one in candidates)
        return [self._lean(one).sizes(self.task) for one in again]

    def _has_room(self, memory: MemoryByKind) -> bool:
        return memory.total <= self.limit and self.task.has_host_memory(memory)

    def _fit_pipe(self, wanted: Candidate) -> Candidate | None:
        """Return a candidate with a pipe axis if a first look says that it fits, with logits in chunks if need be."""
        laid = wanted if self._keeps_stages() else rough_pipeline(self.task, wanted)
        rank = too_large(self.task, laid, self.limit)
        if rank is None:
            return laid
        # only the last rank has logits
        in_chunks = rank == laid.shape.pipe - 1 and laid.sizes(self.task).m > LOSS_CHUNK
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
        in_chunks = candidate.sizes(self.task).m > LOSS_CHUNK
        if in_chunks and memory.total - memory.logits <= self.limit:
            chunked = replace(candidate, policy=replace(candidate.policy, loss_chunk=LOSS_CHUNK))
            less = memory_of(self.task, chunked)
            if less.total < memory.total:
                return chunked, less
        return candidate, memory

    def _most_frugal(self, candidate: Candidate) -> Candidate:
        """Return the candidate as it needs the least memory."""
        if self.space.policies is None:
            candidate = replace(candidate, policy=FRUGAL.on(candidate.policy))
        return self._lean(candidate)

    def _least(self, candidate: Candidate) -> Memory:
        frugal = self._most_frugal(candidate)
        least = self._frugal(frugal)[1]
        if self.saves and not self._has_room(least):  # the host may have too little memory where the device has enough
            chunks = next(self._saving(replace(frugal, policy=replace(frugal.policy, **_saving_nothing()))), frugal)
            without = self._frugal(chunks)[1]
            least = without if self._has_room(without) else least
        return least


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

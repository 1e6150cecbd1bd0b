"""The search: rank grids, rank orders, pipelines and policies to train a model on a number of devices.

Every factorisation of the number of devices is considered, not only powers of two. A grid that does not fit the model,
the batch or the memory is refused with the reason. All candidates are estimated (estimate.py). The first few of each
grid that fit into memory are simulated (price.py), grid by grid in the order of their estimates. If there are few
candidates, those in other activation modes and rank orders are simulated too. A grid that was not simulated shows its
estimate and says so.

The candidates are those of space.py and, for mixtures of experts, folds.py; fitting.py says what fits into memory.
Where a candidate does not fit, it is tried with what saves memory and costs time (`policy.SAVES_MEMORY`): only for long
sequences, or if nothing fits otherwise, so that other searches do not pay for it.

Grids with a pipe axis are estimated with the busiest stage and the bubble of the best number of chunks. Those that are
simulated get stages and a schedule (pipe.py); a schedule of its own is searched only for the best few.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from heapq import heapify, heappop, heappush
from math import inf
from typing import TYPE_CHECKING, get_args

import torch

from fourfold.axes import REPLICA
from fourfold.planner.estimate import Cells, Estimates, Lever
from fourfold.planner.fitting import MemoryFitter, saving_nothing
from fourfold.planner.folds import bases_for_ex, folds_of, folds_over_ex, is_textbook
from fourfold.planner.grid_plan import GIB, Estimated, GridCandidates, GridPlan, Refused, describe_memory, why_no_grid
from fourfold.planner.memory import Memory, without_stages
from fourfold.planner.pipe import best_pipeline, rough_pipeline
from fourfold.planner.price import (
    Candidate,
    Price,
    Task,
    TracedPrice,
    memory_by_pipe_rank,
    memory_of,
    price,
    price_dry_run,
    quick_price,
)
from fourfold.planner.robust import LESS_MEMORY, Risk, choose
from fourfold.planner.space import CandidateSource, Space, context_sizes, orders_of, ways_of
from fourfold.policy import SAVES_MEMORY, Policy
from fourfold.shape import Shape, shapes_of

if TYPE_CHECKING:
    from fourfold.models.open import ModelBuilder

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
MOST_TRIED = 24
"""Candidates of a grid that are tried for one that leaves memory free."""
NEAR = 0.02
"""Grids whose seconds are within this share of the best may be the best with other settings."""
WORTH_TUNING = 0.005
"""The share of a step that a plan must gain to differ from what `fourfold train` does by itself."""
LONG_SEQUENCE = 8192
"""Sequences of at least so many tokens may be cut over places where one of them is too much for a device, and may have
their MLPs in chunks and their block inputs on the host."""
KEEPS_ALL = Lever("none", keep_gathered=False, keep_weights=False)
LONGEST = 60.0
"""Seconds after which `search_built` tries no further grid: a person waits for the answer."""


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
        self.limit = task.usable_bytes
        self.may_save = space.policies is None or space.saves_memory
        saves = self.may_save and task.seq >= LONG_SEQUENCE
        given = space.policies or (Policy(),)
        self._saved = [name for name in SAVES_MEMORY if not any(getattr(policy, name) for policy in given)]
        """The fields that the search may set, as the given policies do not."""
        self._begin(GridPlan(task, devices), saves=saves)

    def _begin(self, plan: GridPlan, *, saves: bool) -> None:
        """Begin with an empty plan; `saves` says whether what does not fit is tried with what saves memory."""
        self.plan = plan
        self.source = CandidateSource(self.task, self.space, plan.refused)
        self.memory = MemoryFitter(self.task, self.space, plan.refused, saves=saves)

    def run(self) -> GridPlan:
        self._run()
        if not self.plan.ranked and self.may_save and not self.memory.saves:
            self._begin(GridPlan(self.task, self.plan.devices), saves=True)
            self._run()
        return self.plan

    def _run(self) -> None:
        shapes = self.source.shapes(self.plan.devices)
        folds = [] if self.space.shapes else [fold for shape in shapes for fold in folds_of(self.task, shape)]
        candidates = list(self.source.candidates([*shapes, *folds]))
        needy = [] if self.space.shapes else self._with_context(candidates)
        grids = self._grids(candidates)
        grids += self._grids(list(self.source.candidates(needy)))
        found = self._simulate(grids)
        self._simulate_orders(found)
        if not self.space.shapes:
            found = self._with_ex(found)
        self._rank(found)

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
            least = self.memory.least_nbytes(single, [one.sizes(task) for one in single], KEEPS_ALL).tolist()
            shapes |= {one.shape: None for one, nbytes in zip(single, least, strict=True) if nbytes > self.limit}
        return [shape.with_context(size) for shape in shapes for size in context_sizes(task, shape)]

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
        self.plan.candidates += sum(sum(self.source.levers(one)) for one in candidates) * len(orders)
        candidates, sizes, fits = self.memory.rule_out_too_large(candidates)
        if not candidates:
            return
        estimates = Estimates(self.task, Cells(self.task, candidates, sizes), orders)
        levers = fits & torch.tensor([self.source.levers(one) for one in candidates])
        seconds = estimates.seconds.masked_fill(~levers[:, :, None], torch.inf)
        by_grid: dict[tuple[int, ...], list[int]] = {}
        for index, candidate in enumerate(candidates):
            by_grid.setdefault(tuple(candidate.shape.named.values()), []).append(index)
        for indices in by_grid.values():
            yield GridCandidates([candidates[index] for index in indices], seconds[indices], orders, self.memory.fit)

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
        grids = self._grids(list(self.source.candidates(folds)))
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
                frugal.append(self.memory.least(candidate))
                if self.memory.has_room(frugal[-1]):
                    return False
        self._refuse(grid, min(frugal, key=lambda memory: memory.total))
        return True

    def _refuse(self, grid: GridCandidates, least: Memory | None = None) -> None:
        where = ""
        if least is None:
            fewest = min(grid.candidates, key=lambda candidate: candidate.rows)
            memories = memory_by_pipe_rank(self.task, rough_pipeline(self.task, self.memory.most_frugal(fewest)))
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
        if self.memory.saves and any(getattr(policy, name) for name in SAVES_MEMORY):  # other ones may cost less
            plain = replace(found.candidate, policy=replace(policy, **saving_nothing()))
            ways += [(task, other.policy) for other in self.memory.saving(plain) if other.policy != policy]
        if host and task.machine.device != "cpu":
            ways += [(task, replace(policy, compile=False)), (replace(task, captured=False), policy)]
        for way, other in ways:
            if way.machine.host and way.host_mode(other, found.candidate.shape) not in way.machine.host:
                continue  # a host that was not measured counts as never late, which is no reason to take it
            tuned = price(way, replace(found.candidate, policy=other))
            if tuned.seconds < (1 - WORTH_TUNING) * found.seconds and self.memory.has_room(tuned.memory):
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
        if self.space.keeps_stages:
            return None
        candidate = self._open(found.candidate)
        more = self.space.policies is None
        return best_pipeline(self.task, candidate, limit, searches=True, may_recompute=more, fastest=fastest)

    def _price(self, found: Estimated) -> Price:
        self.plan.simulated += 1
        candidate = found.candidate
        if candidate.shape.pipe > 1 and not self.space.keeps_stages:
            # what fits with one chunk and 1F1B may not fit with the cuts of the simulation: then those stay
            chosen = best_pipeline(self.task, self._open(candidate), self.limit, searches=False)
            return chosen or price(self.task, candidate)
        return price(self.task, candidate, quick=True)

    @staticmethod
    def _open(candidate: Candidate) -> Candidate:
        return replace(candidate, policy=without_stages(candidate.policy))


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

"""The pipeline of a candidate: where the model is cut into stages, in which order ranks work, and what each recomputes.

A candidate of the search says how many pipe ranks there are. `best_pipeline` chooses the rest: for one, two and four
chunks per rank it cuts the layers so that the slowest stage is as fast as it can be, prices the named schedules, and
for the best candidates of a search also looks for a better schedule (`schedule.find`). Backward computes again no more
than the memory of each pipe rank demands. The result is a `Price` whose policy has stages and schedule: the same
objects that the runtime takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import NamedTuple, cast

from fourfold.models.config import ModelConfig
from fourfold.planner.memory import MemoryReading, peak_memory_of_pipe
from fourfold.planner.price import Candidate, PipePrice, StageCosts, Task, memory_of, price_pipe, unit_totals
from fourfold.planner.step_program import part_of, recompute_of
from fourfold.planner.transformer import ModelPart
from fourfold.policy import Recompute
from fourfold.schedule.find import find, least_seconds
from fourfold.schedule.stages import Stages, place

MOST_PIPE = 64
"""The most pipe ranks that are considered: more need more micro-batches than batches have."""
CHUNKS = (1, 2, 4)
"""Stages per rank that are tried, where the layers are enough for them."""
LAYOUTS = {
    (1, "loop"): ("1f1b", "zb-h1"),
    (2, "loop"): ("interleaved",),
    (2, "wave"): ("v-half",),
    (4, "loop"): ("interleaved",),
}
"""The named schedules that are priced, by chunks per rank and placement."""
SEARCHED = ((1, "loop"), (2, "wave"), (4, "wave"))
"""Chunks and placements on which `find` looks for a schedule."""
MOST_FOUND = 8192
"""The most stages times micro-batches for which a schedule is searched; named ones are as good where there are more."""
WORTH_SEARCHING = 0.005
"""The share of a step that a schedule must be able to save before it is searched."""
KINDS: tuple[Recompute, ...] = ("none", "attention", "block")
"""What backward may compute again; the later in this list, the less memory it needs."""


# --- where to cut


class StageCost(NamedTuple):
    """The seconds of a stage: those of its ends, and those of each layer."""

    ends: float
    layer: float


def cut_layers(layers: int, costs: Sequence[StageCost], least: Sequence[int]) -> list[int]:
    """Return how many layers each stage has so that the slowest stage is as fast as possible.

    Every stage has at least `least` layers. All layers are equal, so a bound on the seconds of a stage says how many
    layers it can have, and the smallest bound under which all layers find a place is the answer. Of the stages that
    could have fewer, the slowest give layers back.
    """
    if sum(least) > layers:
        raise ValueError(f"{layers} layers for {len(costs)} stages that need at least {sum(least)}")

    def most(bound: float) -> list[int]:
        room = [int((bound - cost.ends) / cost.layer + 1e-9) if cost.layer else layers for cost in costs]
        return [min(layers, max(few, each)) for few, each in zip(least, room, strict=True)]

    bounds = sorted({cost.ends + many * cost.layer for cost in set(costs) for many in range(layers + 1)})
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(most(bounds[middle])) >= layers else (middle + 1, high)
    found = most(bounds[low])
    for _ in range(sum(found) - layers):
        given = [stage for stage, few in enumerate(least) if found[stage] > few]
        slowest = max(given, key=lambda stage: costs[stage].ends + found[stage] * costs[stage].layer)
        found[slowest] -= 1
    return found


def stages_with(counts: Sequence[int], placement: tuple[int, ...], recompute: Sequence[str] = ()) -> Stages:
    """Return stages with so many layers each; the embedding is in the first and the head in the last."""
    ends = list(accumulate(counts, initial=1))
    return Stages((0, *ends[1:-1], ends[-1] + 1), placement, tuple(recompute))


def least_layers(stages: int) -> list[int]:
    """Return how many layers each stage must have: one, but for the two ends, which have work without."""
    return [0 if stage in (0, stages - 1) else 1 for stage in range(stages)]


@lru_cache(maxsize=4096)
def rough_stages(config: ModelConfig, pipe: int, seq: int) -> Stages:
    """Return one stage per pipe rank with about equally many FLOPs, for a first look at a grid."""
    head = head_in_layers(config, seq)
    costs = [StageCost(head if stage == pipe - 1 else 0.0, 1.0) for stage in range(pipe)]
    return stages_with(cut_layers(config.layers, costs, least_layers(pipe)), place("loop", pipe, 1))


def head_in_layers(config: ModelConfig, seq: int) -> float:
    """Return the FLOPs of the head in those of a layer."""
    inside = config.top_k * config.expert_hidden + config.shared_hidden if config.experts else config.mlp_hidden
    features = config.head_dim * (config.heads + config.kv_heads) * 2 + inside * (3 if config.mlp == "swiglu" else 2)
    return config.vocab * config.hidden / (config.hidden * features + seq * config.heads * config.head_dim)


# --- the best pipeline of a candidate


def rough_pipeline(task: Task, candidate: Candidate) -> Candidate:
    """Return the candidate with stages by their FLOPs and the order of 1F1B."""
    stages = rough_stages(task.config, candidate.shape.pipe, task.seq)
    return replace(candidate, policy=replace(candidate.policy, stages=stages, schedule="1f1b"))


def best_pipeline(
    task: Task,
    candidate: Candidate,
    limit: int,
    *,
    searches: bool,
    may_recompute: bool = False,
    fastest: float = inf,
) -> PipePrice | None:
    """Return the fastest pipeline of a candidate that fits into `limit` bytes on every rank; None if none fits.

    With `searches` it also looks for a schedule of its own, for the seconds of the stages and the memory there is,
    where such a schedule may be faster than a named one and than `fastest`, the seconds of another candidate.
    Where memory demands it, backward may compute again what the candidate's policy says, or more with `may_recompute`.
    """
    most = KINDS[-1] if may_recompute else candidate.policy.recompute
    best: PipePrice | None = None
    for layout in _layouts(task, candidate, searches=searches):
        found = price_pipe(task, layout)
        if best is not None and found.seconds >= best.seconds:
            continue
        fitted = least_recompute(task, layout, limit, most)
        if fitted is not None:
            if fitted is layout:
                priced = found
            elif searches:
                priced = min(_recut(task, fitted, limit), key=lambda one: one.seconds)
            else:
                priced = price_pipe(task, fitted)
            best = priced if best is None or priced.seconds < best.seconds else best
    if best is not None and searches:
        best = min([best, *_searched(task, best, candidate, limit, fastest)], key=lambda one: one.seconds)
    return best


def _layouts(task: Task, candidate: Candidate, *, searches: bool) -> Iterator[Candidate]:
    """Yield the candidate with each number of chunks, placement and named schedule; only 1F1B for a first look."""
    layouts = LAYOUTS if searches else {(1, "loop"): ("1f1b",)}
    for (chunks, placement), names in layouts.items():
        stages = balanced_stages(task, candidate, chunks, placement)
        for name in names if stages is not None else ():
            yield replace(candidate, policy=replace(candidate.policy, stages=stages, schedule=name))


def balanced_stages(
    task: Task, candidate: Candidate, chunks: int, placement: str, recompute: Sequence[str] = ()
) -> Stages | None:
    """Return stages whose slowest takes the least, by the simulated seconds of units; None for too few layers."""
    places = place(placement, candidate.shape.pipe, chunks)
    least, many = least_layers(len(places)), len(places)
    if sum(least) > task.config.layers or (chunks > 1 and many > task.config.layers):
        return None
    costs = []
    for stage in range(many):
        kind = cast("Recompute", recompute[stage]) if recompute else candidate.policy.recompute
        units = unit_totals(task, candidate.without_stages, kind, split=False)
        begin = task.config.dense_layers  # the few dense layers of a mixture count as the others do
        parts = [
            ModelPart(range(begin, begin + layers), embedding=stage == 0, head=stage == many - 1) for layers in (1, 2)
        ]
        one, two = (units.seconds("F", part) + units.seconds("BW", part) for part in parts)
        costs.append(StageCost(2 * one - two, two - one))
    return stages_with(cut_layers(task.config.layers, costs, least), places, recompute)


def _recut(task: Task, candidate: Candidate, limit: int) -> Iterator[PipePrice]:
    """Yield the price of a candidate whose stages recompute, also with layers moved to where they take less."""
    yield price_pipe(task, candidate)
    stages = cast("Stages", candidate.policy.stages)
    placement = "loop" if stages.placement == place("loop", stages.pipe, stages.chunks) else "wave"
    moved = balanced_stages(task, candidate, stages.chunks, placement, stages.recompute)
    if moved is not None and moved != stages:
        other = replace(candidate, policy=replace(candidate.policy, stages=moved))
        if all(_fits(task, other, rank, limit) for rank in range(stages.pipe)):
            yield price_pipe(task, other)


def least_recompute(task: Task, candidate: Candidate, limit: int, most: Recompute) -> Candidate | None:
    """Return the candidate with as little recompute on every rank as its memory allows; None if one does not fit.

    A rank recomputes at most as much as `most` says. Ranks late in the pipe have fewer micro-batches under way, so they
    often keep what the first ones cannot. With offload every rank recomputes `most`, since its blocks
    keep their inputs alone.
    """
    stages = cast("Stages", candidate.policy.stages)
    chosen = [most] * len(stages.placement)
    for rank in range(stages.pipe):
        own = stages.of_rank(rank)
        for kind in (most,) if candidate.policy.offload else KINDS[: KINDS.index(most) + 1]:
            for stage in own:
                chosen[stage] = kind
            if _fits(task, with_recompute(candidate, chosen), rank, limit):
                break
        else:
            return None
    return candidate if set(chosen) == {candidate.policy.recompute} else with_recompute(candidate, chosen)


def with_recompute(candidate: Candidate, chosen: Sequence[str]) -> Candidate:
    """Return the candidate with a kind of recompute for every stage."""
    stages = cast("Stages", candidate.policy.stages)
    return replace(candidate, policy=replace(candidate.policy, stages=replace(stages, recompute=tuple(chosen))))


def _fits(task: Task, candidate: Candidate, rank: int, limit: int) -> bool:
    sizes = candidate.sizes(task, pipe_rank=rank)
    memory = peak_memory_of_pipe(sizes, sizes.schedule(candidate.played_micro_steps))
    return memory.total <= limit and task.has_host_memory(memory)


def too_large(task: Task, candidate: Candidate, limit: int) -> int | None:
    """Return the first pipe rank that needs more than there is; None if a first look finds none.

    The first rank has the most micro-batches under way, the last one the logits, and of ranks with equally many layers
    the first needs most.
    """
    last, stages, sizes = candidate.shape.pipe - 1, cast("Stages", candidate.policy.stages), candidate.sizes(task)
    first = MemoryReading(sizes, 2, part=part_of(stages, 0), recompute=recompute_of(stages, 0, candidate.policy))
    alive = min(candidate.shape.pipe, candidate.micro_steps) if candidate.policy.schedule == "1f1b" else 1
    if first.least + first.least_gradients + (alive - 1) * first.kept_by_layers > limit:
        return 0  # this is quick, and it is the answer for most candidates that do not fit
    counts = [sum(len(stages.layers_of(stage)) for stage in stages.of_rank(rank)) for rank in range(last + 1)]
    ranks = {0, last, *(counts.index(many, 1) for many in set(counts[1:]))}
    return next((rank for rank in sorted(ranks) if not _fits(task, candidate, rank, limit)), None)


def _searched(task: Task, best: PipePrice, candidate: Candidate, limit: int, fastest: float) -> Iterator[PipePrice]:
    """Yield pipelines with a schedule that was searched for the seconds of their stages."""
    worthwhile = (1 - WORTH_SEARCHING) * min(best.seconds, fastest)
    for chunks, placement in SEARCHED:
        stages = balanced_stages(task, candidate, chunks, placement)
        if stages is None or len(stages.placement) * candidate.micro_steps > MOST_FOUND:
            continue
        recompute = best.stages.recompute
        kinds = [recompute[best.stages.of_rank(rank)[0]] for rank in stages.placement] if recompute else ()
        laid = replace(candidate, policy=replace(candidate.policy, stages=replace(stages, recompute=tuple(kinds))))
        costs = StageCosts(task, laid, cast("Stages", laid.policy.stages), split=True)
        least = least_seconds(stages.placement, candidate.micro_steps, costs.seconds(), costs.hop)
        if least + costs.optimizer().seconds > worthwhile:
            continue  # no schedule of these stages can win
        found = _find(task, laid, costs, limit)
        if found is not None:
            yield price_pipe(task, found)


def _find(task: Task, candidate: Candidate, costs: StageCosts, limit: int) -> Candidate | None:
    """Return the candidate with the best schedule that `find` knows within the memory; None if none fits."""
    stages = cast("Stages", candidate.policy.stages)
    weights, room = [0.0] * len(stages.placement), []
    for rank in range(stages.pipe):
        sizes, alone = candidate.sizes(task, pipe_rank=rank), 0
        for stage in stages.of_rank(rank):
            recompute = recompute_of(stages, stage, candidate.policy)
            reading = MemoryReading(
                sizes, candidate.micro_steps, part=part_of(stages, stage), recompute=recompute, split=True
            )
            weights[stage] = float(max(reading.kept, reading.held))
            alone = max(alone, reading.memory().total - reading.kept)
        room.append(float(limit - alone))
    try:
        found = find(stages.placement, candidate.micro_steps, costs.seconds(), costs.hop, room, weights)
    except ValueError:  # not even one micro-batch fits
        return None
    made = replace(candidate, policy=replace(candidate.policy, schedule=found.schedule))
    memory = memory_of(task, made)
    return made if memory.total <= limit and task.has_host_memory(memory) else None

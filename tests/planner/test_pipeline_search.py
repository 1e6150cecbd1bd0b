"""The search over pipelines: cuts against dynamic programming, memory and recompute, what a plan gives to a run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import pytest
import torch

import fourfold as ff
from core_speed import reference_seconds
from fourfold.axes import AXES
from fourfold.commands.plan import run_config
from fourfold.planner import search as search_file
from fourfold.planner.grid_plan import GridPlan
from fourfold.planner.machine import LinkSpeed, load_machine
from fourfold.planner.pipe import (
    StageCost,
    balanced_stages,
    best_pipeline,
    cut_layers,
    least_layers,
    least_recompute,
    rough_pipeline,
    stages_with,
)
from fourfold.planner.price import Candidate, PipePrice, Task, memory_by_pipe_rank, memory_of, price
from fourfold.planner.search import search
from fourfold.planner.space import Space
from fourfold.policy import Policy
from fourfold.schedule.choose import choose
from fourfold.schedule.stages import place
from fourfold.shape import Shape

LLAMA = ff.models.config("llama-3-8b", layers=14)
ETHERNET = replace(
    load_machine("dgx-h100"), name="slow links", devices_per_node=1, between=LinkSpeed(bandwidth=1.5e9, latency=2e-5)
)
BASE = Policy(compute_dtype=torch.bfloat16, shard_optimizer=True, even_tokens=True)


def by_dynamic_programming(layers: int, costs: list[StageCost], least: list[int]) -> float:
    """The least seconds of the slowest stage, over all ways to cut."""

    @lru_cache
    def best(stage: int, left: int) -> float:
        if stage == len(costs):
            return 0.0 if left == 0 else float("inf")
        own = costs[stage]
        return min(
            (max(own.ends + many * own.layer, best(stage + 1, left - many)) for many in range(least[stage], left + 1)),
            default=float("inf"),
        )

    return best(0, layers)


def test_cuts_are_those_of_dynamic_programming() -> None:
    draw = random.Random(7)
    for _ in range(200):
        stages = draw.randint(2, 6)
        costs = [StageCost(draw.choice([0.0, 0.3, 2.5]), draw.choice([1.0, 1.0, 1.3])) for _ in range(stages)]
        least, layers = least_layers(stages), draw.randint(stages, 14)
        found = cut_layers(layers, costs, least)
        assert sum(found) == layers
        assert all(many >= few for many, few in zip(found, least, strict=True))
        slowest = max(cost.ends + many * cost.layer for cost, many in zip(costs, found, strict=True))
        assert slowest == pytest.approx(by_dynamic_programming(layers, costs, least))


def test_the_head_makes_the_last_stage_short() -> None:
    task = Task(ff.models.config("llama-3-8b", layers=14), load_machine("dgx-h100"), 32, 2048)
    stages = balanced_stages(task, Candidate(Shape(pipe=4), BASE, 1, 32), 1, "loop")
    assert stages is not None
    counts = [len(stages.layers_of(stage)) for stage in range(4)]
    assert counts[3] < min(counts[:3])  # 128,256 logits cost about as much as two of its layers


def test_late_ranks_recompute_only_what_they_must() -> None:
    """Rank 0 of 1F1B keeps four micro-batches and the last rank one."""
    task = Task(LLAMA, load_machine("dgx-h100"), 64, 4096)
    candidate = rough_pipeline(task, Candidate(Shape(pipe=4), replace(BASE, recompute="block"), 2, 32))
    none = replace(candidate, policy=replace(candidate.policy, recompute="none"))
    least, most = (max(one.total for one in memory_by_pipe_rank(task, each)) for each in (candidate, none))
    assert least < most
    fitted = least_recompute(task, candidate, (least + most) // 2, "block")
    assert fitted is not None and fitted.policy.stages is not None
    kinds = fitted.policy.stages.recompute
    assert kinds[0] != "none" == kinds[2]
    assert memory_of(task, fitted).total <= (least + most) // 2
    assert price(task, fitted).seconds < price(task, candidate).seconds
    assert least_recompute(task, candidate, least // 2, "block") is None


def test_chunks_and_a_searched_schedule_are_never_slower_than_1f1b() -> None:
    task = Task(ff.models.config("llama-3-8b", layers=16), ETHERNET, 16, 2048)
    candidate = Candidate(Shape(pipe=4), BASE, 1, 16)
    plain = price(task, rough_pipeline(task, candidate))
    first, best = (best_pipeline(task, candidate, task.usable_bytes, searches=each) for each in (False, True))
    assert isinstance(plain, PipePrice) and first is not None and best is not None
    assert best.seconds <= first.seconds <= plain.seconds
    assert best.bubble < plain.bubble


@pytest.fixture(autouse=True, scope="module")
def few_simulations() -> Iterator[None]:
    """Nothing here depends on how many grids without a pipe axis are simulated."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(search_file, "SIMULATIONS", 20)
        yield


@pytest.fixture(scope="module")
def plan() -> GridPlan:
    return search(Task(LLAMA, ETHERNET, 64, 2048), 8, space=Space(axes=AXES))


def test_slow_links_want_stages(plan: GridPlan) -> None:
    without = search(plan.task, 8).best
    assert plan.best.candidate.shape.pipe > 1
    assert plan.best.seconds < 0.9 * without.seconds
    assert without.candidate.shape.pipe == 1


def test_a_plan_hands_over_what_a_run_needs(plan: GridPlan) -> None:
    pipelines = [found for found in plan.ranked if isinstance(found, PipePrice)]
    assert pipelines
    for found in pipelines:
        policy = found.candidate.policy
        assert policy.stages is not None and policy.stages.pipe == found.candidate.shape.pipe
        assert policy.stages.layers == LLAMA.layers
        choose(policy.schedule, policy.stages, found.candidate.micro_steps)  # as a run does
        assert max(one.total for one in found.memories) <= plan.task.usable_bytes
        assert 0 <= found.bubble < 1


def test_the_config_of_a_plan_has_its_stages_and_schedule(plan: GridPlan) -> None:
    found = plan.best.candidate
    config = run_config(plan.best, "gpt-350m", "perlmutter")
    built = config.pipeline.build(found.policy.stages.layers, found.shape.pipe)
    assert built == (found.policy.stages, found.policy.schedule)
    assert (config.grid.shape, config.batch.micro_steps) == (found.shape, found.micro_steps)


def test_pipelines_that_do_not_fit_name_the_rank() -> None:
    task = Task(LLAMA, replace(ETHERNET, memory=18 << 30, reserve=0), 64, 2048)
    found = search(task, 8, space=Space(axes=AXES, shapes=(Shape(pipe=2, data=4), Shape(z=8))))
    reasons = {refused.shape.pipe: refused.reason for refused in found.refused}
    assert "at the least on pipe rank" in reasons[2]


def test_too_many_stages_are_refused() -> None:
    task = Task(ff.models.config("llama-3-8b", layers=2), ETHERNET, 64, 2048)
    found = search(task, 8, space=Space(axes=AXES))
    assert {refused.reason for refused in found.refused if refused.shape.pipe == 8} == {
        "pipe=8 ranks for 4 units: 2 layers, embedding and head"
    }


def test_stages_of_counts() -> None:
    stages = stages_with([2, 3, 3, 1], place("wave", 2, 2), ["none"] * 4)
    assert [len(stages.layers_of(stage)) for stage in range(4)] == [2, 3, 3, 1]
    assert stages.has_embedding(0) and stages.has_head(3)


@pytest.mark.slow
def test_a_search_over_32768_devices_takes_15_seconds() -> None:
    task = Task(ff.models.config("gpt-320b"), load_machine("frontier"), 8192, 2048, captured=True)
    assert reference_seconds(lambda: search(task, 32768, space=Space(axes=AXES))) < 15

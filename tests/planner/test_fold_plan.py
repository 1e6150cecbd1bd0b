"""The plan of folded grids: what each rank holds, what busy experts cost, which folds are searched."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fourfold as ff
from fourfold.cli import main
from fourfold.grid import Shape
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Candidate, Task, price
from fourfold.planner.program import HostWaitOp, LaunchOp
from fourfold.planner.search import search
from fourfold.planner.simulate import simulate
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy

CONFIG = ff.models.config("mixtral-8x7b", layers=4)
MACHINE = load_machine("dgx-h100")
TASK = Task(CONFIG, MACHINE, 64, 4096)
POLICY = Policy(compute_dtype=torch.bfloat16, recompute="block", shard_optimizer=True)
FOLD = Shape(z=16, expert=8, ez=2)


def seconds(shape: Shape, imbalance: float = 1.0) -> float:
    candidate = Candidate(shape, POLICY, TASK.rows // shape.places, 1)
    return price(replace(TASK, imbalance=imbalance), candidate).seconds


@pytest.mark.parametrize("shape", [Shape(z=6, expert=3), Shape(z=6, ex=2, ez=3), Shape(x=3, z=2, expert=3, ez=2)])
def test_ranks_of_a_fold_hold_each_parameter_once_for_each_of_its_replicas(shape: Shape) -> None:
    """Also where the number of experts does not divide."""
    config = ff.models.config("moe-tiny", layers=2, heads=6, kv_heads=6, head_dim=8, hidden=48, expert_hidden=36)
    held: Counter[bool] = Counter()
    for rank in range(shape.world):
        sizes = LocalSizes(config, shape, Policy(), 2, 16, rank=rank)
        experts = sizes.expert_shard(sizes.held.layers)
        held[True] += experts
        held[False] += sizes.parameter("embedding.weight").shard
    assert held[True] == 2 * 3 * config.experts * config.hidden * config.expert_hidden * shape.edata
    assert held[False] == config.vocab * config.hidden * shape.data


def test_a_busy_expert_costs_more_where_tokens_go_to_it() -> None:
    """Its rank has `imbalance` times the rows, and the others wait for it; without a fold every rank has a share."""
    even, uneven = seconds(FOLD), seconds(FOLD, 2.0)
    stay, stay_uneven = seconds(Shape(z=16)), seconds(Shape(z=16), 2.0)
    assert uneven > 1.3 * even
    assert stay_uneven / stay < uneven / even


def test_the_host_waits_once_for_the_counts_of_each_half_and_block() -> None:
    sizes = Candidate(FOLD, replace(POLICY, recompute="none"), 4, 1).sizes(TASK)
    work = step_program(sizes).work
    counts = [
        item for item in work if isinstance(item, LaunchOp) and item.record.nbytes == sizes.halves[0].counts_nbytes
    ]
    waits = sum(isinstance(item, HostWaitOp) for item in work)
    assert waits == CONFIG.layers * sizes.number_of_halves == len(counts)
    seconds = TASK.seconds_on(Candidate(FOLD, POLICY, 4, 1))
    late, early = (
        simulate([item for item in work if keeps or not isinstance(item, HostWaitOp)], seconds, TASK.dtype).totals
        for keeps in (True, False)
    )
    assert late.seconds > early.seconds


def test_folds_are_searched_for_mixtures_alone() -> None:
    found = search(TASK, 16, top=4)
    tried = [one.candidate.shape for one in found.ranked] + [one.shape for one in found.waiting]
    assert any(shape.expert > 1 for shape in tried)
    assert found.best.candidate.shape.folded
    dense = replace(TASK, config=ff.models.config("llama-3-8b", layers=2))
    plan = search(dense, 8, top=4)
    assert not any(shape.folded for shape in [one.candidate.shape for one in plan.ranked])


def test_one_fold_is_planned_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    options = ["plan", "--model", "moe-tiny", "--machine", "laptop", "--devices", "4", "--json", str(file)]
    assert main([*options, "--grid", "z=4,expert=4"]) == 0
    assert "z=4 expert=4" in capsys.readouterr().out
    (grid,) = json.loads(file.read_text())["grids"]
    assert grid["grid"]["expert"] == 4 and grid["exposed_seconds"]["expert"] > 0
    assert main([*options, "--grid", "z=4,expert=4", "--why", "z=4"]) == 1

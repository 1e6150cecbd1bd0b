"""The plan of folded grids: what each rank holds, what busy experts cost, which folds are searched."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold.axes import AXES
from fourfold.cli import main
from fourfold.grid import Shape
from fourfold.planner import search as search_file
from fourfold.planner.folds import bases_for_ex, folds_of, folds_over_ex
from fourfold.planner.grid_plan import GridPlan
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Candidate, Task, price
from fourfold.planner.program import HostWaitOp, LaunchOp
from fourfold.planner.search import search
from fourfold.planner.simulate import simulate
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.space import Space
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from fourfold.shape import shapes_of
from share import others_slow

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


def few_wide(experts: int, gib: int = 141) -> Task:
    """A mixture of few, wide experts that gets few tokens a step, on a node with so much memory for each device."""
    config = ff.models.config("mixtral-8x7b", layers=2, experts=experts, top_k=1, expert_hidden=28672)
    return Task(config, replace(load_machine("h200-node"), memory=gib << 30), 8, 1024)


def without_ex(task: Task, devices: int, **options: Any) -> GridPlan:
    """Search as if no fold cut the hidden units of experts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(search_file, "folds_over_ex", lambda *_: iter(()))
        return search(task, devices, **options)


@pytest.mark.parametrize("experts", [1, 3, 4, 8])
def test_folds_over_ex_are_those_that_the_model_and_the_grid_allow(experts: int) -> None:
    task = few_wide(experts)
    narrow = replace(task, config=replace(task.config, expert_hidden=6 * 1024))
    for shape in shapes_of(12, axes=("z", "data", "pipe")):
        assert not any(fold.ex > 1 for fold in folds_of(narrow, shape))
        for expert in (1, 2, 4):
            ranks = shape.z * shape.data
            for fold in folds_over_ex(narrow, shape, expert) if ranks % expert == 0 else ():
                assert 1 < fold.ex <= narrow.machine.devices_per_node and fold.expert == expert
                assert fold.with_fold() == shape
                assert narrow.config.misfit(fold, POLICY) is None
    sizes = {fold.ex for fold in folds_over_ex(narrow, Shape(z=12), 1)}
    assert sizes == {2, 3, 4, 6}  # 12 divides the ranks and the width, and is more than a node has
    odd = replace(task, config=replace(task.config, expert_hidden=5))
    assert not list(folds_over_ex(odd, Shape(z=12), 1))


def test_wide_experts_that_no_ranks_can_share_are_cut_over_ex() -> None:
    """3 experts on 8 devices: `expert` has no divisor, and over z and ez whole weights would travel for few tokens."""
    task = few_wide(3, gib=18)
    found, other = search(task, 8, top=4), without_ex(task, 8, top=4)
    best = found.best
    assert best.candidate.shape.ex == 8 and other.best.candidate.shape.ex == 1
    assert best.seconds < 0.8 * other.best.seconds
    assert best.memory.total <= task.usable_bytes
    # the same as of the grid that somebody asks for
    assert price(task, best.candidate).seconds == pytest.approx(best.seconds, rel=1e-9)
    alone = search(task, 8, top=1, space=Space(shapes=(best.candidate.shape,))).best
    assert alone.candidate.shape.named == best.candidate.shape.named
    assert alone.seconds == pytest.approx(best.seconds, rel=1e-2)
    # how much further it looked is said
    assert found.simulated > other.simulated and found.candidates > other.candidates


@pytest.mark.parametrize("experts", others_slow([4, 2, 8], 3))
@pytest.mark.parametrize("axes", others_slow([("x", "y", "z", "data"), AXES], 2), ids=["plain", "pipe"])
def test_ex_never_makes_the_choice_slower(experts: int, axes: tuple[str, ...]) -> None:
    task = replace(few_wide(experts), machine=replace(MACHINE, devices_per_node=4), rows=16)
    space = Space(axes=axes)
    found, other = search(task, 16, space=space, simulations=24), without_ex(task, 16, space=space, simulations=24)
    assert found.best.seconds <= other.best.seconds * (1 + 1e-9)


@pytest.mark.parametrize(("rows", "seq", "tried"), [(1, 512, True), (8, 8192, False)])
def test_ex_is_tried_only_where_a_step_waits_for_weights(rows: int, seq: int, tried: bool) -> None:
    """With many tokens, gathers of weights are hidden behind products."""
    task = replace(few_wide(2), rows=8 * rows, seq=seq, captured=True)
    simulated = price(task, Candidate(Shape(z=8), replace(POLICY, recompute="none"), rows, 1))
    assert (Shape(z=8) in {shape for shape, _ in bases_for_ex(task, 8, [simulated])}) is tried


def test_the_robust_choice_is_made_among_folds_with_ex_too() -> None:
    task = few_wide(2, gib=18)
    found = search(task, 8, top=4, risk="robust")
    assert found.robust is not None
    assert any(one.price.candidate.shape.ex > 1 for one in found.robust.compared)
    assert found.best.candidate.shape.ex > 1
    worst = without_ex(task, 8, top=4, risk="robust").robust
    assert worst is not None and found.robust.band[1] < worst.band[1]


def test_one_fold_is_planned_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    options = ["plan", "--model", "moe-tiny", "--machine", "laptop", "--devices", "4", "--json", str(file)]
    assert main([*options, "--grid", "z=4,expert=4"]) == 0
    assert "z=4 expert=4" in capsys.readouterr().out
    (grid,) = json.loads(file.read_text())["grids"]
    assert grid["grid"]["expert"] == 4 and grid["exposed_seconds"]["expert"] > 0
    assert main([*options, "--grid", "z=4,expert=4", "--why", "z=4"]) == 1

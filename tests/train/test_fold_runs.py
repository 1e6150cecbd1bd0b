"""Runs on folded grids: the curves of one process, checkpoints that load on other folds, the prediction, the page."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from curves import Case, alone, check, config_of, write_texts
from fourfold.grid import Shape
from fourfold.report.run_data import read_run
from fourfold.report.run_page import run_page
from runs import column, lines_of, trained
from share import others_slow

STEPS = 3
CONSTANT = {"optimizer.schedule": "constant", "optimizer.warmup": 0}
"""A rate that does not depend on the number of steps."""
CASES = [
    Case(Shape(x=2, z=2, expert=2, ez=2), {}),
    Case(Shape(z=2, pipe=2, expert=2), {}, {"batch.micro_steps": 2}),
    Case(Shape(z=4, expert=4), {}),
    Case(Shape(z=2, data=2, expert=2), {"policy.shard_optimizer": True, "policy.recompute": "block"}),
    Case(Shape(x=2, z=2, ex=2, expert=2), {"policy.activations": "replicated"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("folds")
    write_texts(made)
    return made


@pytest.mark.parametrize("case", others_slow(CASES, 4), ids=str)
def test_curves_are_those_of_one_process(ranks: Any, folder: Path, case: Case) -> None:
    found = check(ranks, "moe-tiny", "fp64", STEPS, folder, cases=[case], changes={"train.evaluate_every": 2})
    assert found[str(case)].largest < 1e-9


def test_a_run_goes_on_on_other_folds_and_on_one_rank(ranks: Any, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shapes = [Shape(z=4, expert=4), Shape(x=2, z=2, expert=2, ez=2), Shape(), Shape(z=2, pipe=2, expert=2)]
    for number, shape in enumerate(shapes):
        changes = {**CONSTANT, "batch.micro_steps": 2}
        config = config_of("moe-tiny", "fp64", number + 1, folder, shape, changes)
        job = partial(trained, resume=number > 0)
        job(config, run) if shape.world == 1 else ranks(4).run(job, config, run)
    one = alone("moe-tiny", "fp64", len(shapes), folder, {**CONSTANT, "batch.micro_steps": 2})
    assert column(run, "step", "loss") == pytest.approx(one["loss"], rel=1e-10)


def test_a_run_is_predicted_and_its_page_shows_what_went_over_the_fold(
    ranks: Any, folder: Path, tmp_path: Path
) -> None:
    run, shape = tmp_path / "run", Shape(x=2, z=2, expert=2, ez=2)
    ranks(4).run(trained, config_of("moe-tiny", "fp32", STEPS, folder, shape, {"plan.compare": True}), run)
    (compared,) = [line for line in lines_of(run) if line["event"] == "compared"]
    assert {"x", "z", "expert", "ez"} <= compared["exposed_seconds"].keys()
    assert compared["seconds"]["predicted"] > 0 < compared["peak_memory_bytes"]["predicted"]
    sent = column(run, "step", "wire_bytes")[-1]
    assert min(sent[axis] for axis in ("x", "z", "expert", "ez")) > 0
    page = run_page(read_run(run), "", run)
    assert "x=2 z=2 expert=2 ez=2" in page
    assert "<b>expert = 2</b>" in page
    assert "exposed over expert" in page

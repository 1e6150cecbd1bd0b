"""Runs on grids with a pipe axis: the curves of one process, one schedule from plan to page, faults across stages."""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from curves import PACKED, Case, Changes, alone, config_of, deviation, train, write_texts
from fourfold.compare import compare_serial
from fourfold.grid import Shape
from fourfold.params import local_of
from fourfold.report.run_data import read_run
from fourfold.report.run_page import run_page
from fourfold.schedule.named import named
from fourfold.schedule.text import from_csv
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.language_model import build_model
from fourfold.train.loop import Run
from fourfold.train.run_folder import JsonLines, MemorySink, RunEvent
from harness import grid_of, pool
from runs import column, trained
from share import others_slow

STEPS = 4
PLAIN: Changes = {"pipeline.schedule": "auto"}
FOUR: Changes = {"model.layers": 4, "batch.micro_steps": 4}

CASES = [
    Case(Shape(pipe=2), {"pipeline.schedule": "zb-h1", "pipeline.cuts": [0, 2], "overlap.halves": 2}),
    Case(Shape(pipe=2), {"pipeline.schedule": "v-half", "pipeline.recompute": ["none", "block", "attention", "none"]}),
    Case(Shape(pipe=2), {}, {"lora.rank": 2, **PACKED}),
    Case(Shape(pipe=2), {"pipeline.chunks": 2}, {"optimizer.name": "sgd", "optimizer.clip": 0.1}),
    Case(Shape(x=2, pipe=2), {"pipeline.schedule": "gpipe"}, PACKED),
    Case(Shape(data=2, pipe=2), {"policy.shard_optimizer": True}),
    Case(Shape(z=2, pipe=2, order=("pipe", "z", "x", "y", "data")), {"policy.keep_weights": True}),
    Case(Shape(pipe=4), {"pipeline.schedule": "found", "pipeline.placement": "wave"}),
]
"""Every axis beside pipe, and every key of [pipeline]."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pipe")
    write_texts(made)
    return made


@pytest.mark.parametrize("case", others_slow(CASES, 5), ids=str)
def test_curves_are_those_of_one_process(ranks: Any, folder: Path, case: Case) -> None:
    """Losses, norms and evaluations: clipping, optimizers, LoRA and packed documents know nothing of stages."""
    changes = {**FOUR, **case.data, "train.evaluate_every": 2}
    config = config_of("gpt-tiny", "fp64", STEPS, folder, case.shape, {**changes, **case.policy})
    pool = ranks(case.shape.world)
    pool.start(train, config, folder)
    one = alone("gpt-tiny", "fp64", STEPS, folder, changes)
    first, *others = pool.results()
    assert deviation(one, first).largest < 1e-9
    for other in others:
        assert all(other[kind] == first[kind] for kind in ("loss", "grad_norm", "evaluation"))


@pytest.mark.slow
def test_cuts_schedule_and_pipe_itself_change_no_bit_of_an_untied_model(ranks: Any, folder: Path) -> None:
    changes = {**FOUR, "model.dropout": 0.1}
    one = alone("llama-tiny", "fp64", STEPS, folder, changes)
    for pipeline in ({}, {"pipeline.cuts": [0, 4]}, {"pipeline.schedule": "v-half"}):
        config = config_of("llama-tiny", "fp64", STEPS, folder, Shape(pipe=2), {**changes, **pipeline})
        first, _ = ranks(2).run(train, config, folder)
        assert [first[kind] for kind in ("loss", "grad_norm")] == [one[kind] for kind in ("loss", "grad_norm")]


def recorded(config: TrainConfig, folder: Path) -> list[tuple[Any, ...]]:
    """A job: train a run in its folder; return the actions of this rank's order in the schedule that it walks."""
    run = Run(config, grid_of(config.grid.shape), folder)
    run.begin(lambda: [JsonLines(folder / "metrics.jsonl")])
    run.train()
    assert run.language_model.schedule is not None
    return list(run.language_model.schedule.orders[run.grid.coords["pipe"]])


@pytest.mark.slow
def test_the_schedule_of_a_plan_is_the_one_of_folder_runtime_and_page(ranks: Any, folder: Path) -> None:
    """Law 6: the times of a step are those of the actions of the schedule, in its order, on every pipe rank."""
    out = folder / "run"
    changes = {**FOUR, "pipeline.schedule": "interleaved", "checkpoint.save": False, "plan.compare": False}
    config = config_of("gpt-tiny", "fp32", STEPS, folder, Shape(x=2, pipe=2), changes)
    orders = ranks(4).run(recorded, config, out)
    schedule = from_csv((out / "schedule.csv").read_text())
    assert schedule == named("interleaved", 2, 2, 4)
    assert orders == [list(schedule.orders[pipe]) for pipe in (0, 0, 1, 1)]
    assert read_config(out / "config.toml").pipeline.schedule == "interleaved"
    found = read_run(out).pipeline
    assert found is not None
    assert (found.schedule, found.step) == (schedule, 3)
    assert tuple(tuple(span.action for span in line) for line in found.spans) == schedule.orders
    starts = {span.action: span.start for line in found.spans for span in line}
    for line in found.spans:
        assert all(0 <= span.start <= span.end for span in line)
        for span in line:  # nothing begins before what it needs was sent
            needed = schedule.received(span.action)
            if needed is not None:
                kinds = ("F",) if needed.kind == "F" else ("B", "BW")
                sender = next(action for action in starts if action[1:] == needed[1:3] and action.kind in kinds)
                assert starts[sender] < span.start
    page = run_page(read_run(out), "", out)
    assert "4 stages on 2 pipe ranks, 4 micro-batches" in page
    assert "Step 3 took" in page


SAVING: Changes = {
    **FOUR, "checkpoint.every": 2, "checkpoint.keep_last": 9, "plan.compare": False, "log.tensorboard": False,
    "train.evaluate_every": 0, "pipeline.schedule": "zb-h1",
}  # fmt: skip
SAVED_ON = Shape(x=2, pipe=2)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """The folder of a run that nothing interrupted."""
    pool(4).run(trained, config_of("gpt-tiny", "fp64", STEPS, folder, SAVED_ON, SAVING), folder / "whole")
    return folder / "whole"


@pytest.mark.parametrize("shape", others_slow([SAVED_ON, Shape(pipe=4), Shape(z=2)], 3), ids=str)
def test_a_run_resumes_bit_for_bit_on_its_grid_and_goes_on_on_others(
    ranks: Any, folder: Path, whole: Path, shape: Shape
) -> None:
    expected = column(whole, "step", "loss")
    again = folder / f"again-{shape}"
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / f"step-{STEPS:08}")
    keys = SAVING if shape.pipe > 1 else {**SAVING, **PLAIN}
    ranks(shape.world).run(
        partial(trained, resume=True), config_of("gpt-tiny", "fp64", STEPS, folder, shape, keys), again
    )
    found = column(again, "step", "loss")
    assert found == expected if shape == SAVED_ON else found == pytest.approx(expected, rel=1e-9)
    assert (again / "pipeline" / "rank-1.json").exists() is (shape.pipe > 1)


@pytest.mark.slow
def test_a_pipeline_is_compared_with_one_process(ranks: Any, folder: Path) -> None:
    """By `--compare-serial`, which builds the model of the config on one rank too."""
    config = config_of("gpt-tiny", "fp64", 1, folder, Shape(pipe=2), {**FOUR, "pipeline.schedule": "zb-h1"})
    for found in ranks(2).run(compared, config):
        assert "pipe=2" in found
        assert max(float(text) for text in re.findall(r"\d\.\de[+-]\d+", found)) < 1e-9


def compared(config: TrainConfig) -> str:
    grid = grid_of(config.grid.shape)
    batch = torch.arange(24).reshape(2, 12), torch.arange(1, 25).reshape(2, 12)
    return str(compare_serial(lambda place: build_model(config, place).module, [batch], grid))


def poisoned(config: TrainConfig, folder: Path, rank: int) -> list[RunEvent]:
    """A job: what was recorded of a run in which a parameter of one rank is not a number in step 2."""
    run = Run(config, grid_of(config.grid.shape), folder)
    kept, launch = MemorySink(), run._launch

    def launched(step: int) -> None:
        weight = local_of(run.model.layers[3].mlp.up.weight if rank else run.model.positions.weight)  # type: ignore[union-attr]
        before = weight.clone()
        if step == 2:
            weight.fill_(torch.nan)
        launch(step)
        weight.copy_(before) if step == 2 else None

    run._launch = launched if run.grid.rank == rank else launch  # type: ignore[method-assign]
    run.sinks = [kept]
    run.train()
    return kept.events


def test_a_gradient_that_is_not_finite_is_skipped_and_named_on_every_stage(ranks: Any, folder: Path) -> None:
    config = config_of("llama-tiny", "fp32", 3, folder, Shape(pipe=2), {**FOUR, "model.positions": "learned"})
    for events in ranks(2).run(poisoned, config, folder, 1):
        assert [event["skipped"] for event in events if event["event"] == "step"] == [False, True, False]
        (skipped,) = [event for event in events if event["event"] == "skipped"]
        assert skipped["parameter"] == "embedding.weight"  # of the other rank: what is not finite flows back to it

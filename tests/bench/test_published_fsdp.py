"""The published FSDP runs: what the file says, how it is split, and how a run is replayed and judged."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.planner import replay_fsdp
from benchmarks.planner.judge import Judge
from benchmarks.planner.published_fsdp import FSDP_FITTED, MACHINES, FsdpFit, FsdpRun, read_runs
from benchmarks.planner.replay_fsdp import NO_LOSS, candidate_of, config_of, fsdp_task, replay_run, slowed_machine
from benchmarks.planner.validate_fsdp import Accuracy, accuracy, bars
from fourfold.planner.machine import load_machine
from fourfold.planner.price import memory_of, price

RUNS = read_runs()


def find(**wanted: object) -> FsdpRun:
    return next(run for run in RUNS if all(getattr(run, name) == value for name, value in wanted.items()))


def test_the_file_has_the_published_runs() -> None:
    assert len(RUNS) == len({run.name for run in RUNS}) == 131
    assert {run.device for run in RUNS} == set(MACHINES)
    assert {run.strategy for run in RUNS} == {"FULL_SHARD", "SHARD_GRAD_OP"}
    largest = find(devices=512, model="MPT-70b")
    assert (largest.seq, largest.rows, largest.micro_steps, largest.recompute) == (2048, 8, 1, True)
    assert largest.seconds == pytest.approx(16.2701)
    assert config_of(largest).parameters == pytest.approx(64.86e9, rel=0.001)  # as published


def test_held_out_rows_have_models_devices_and_sequences_that_no_fitted_row_has() -> None:
    fitted, held_out = ([run for run in RUNS if run.fitted == kind] for kind in (True, False))
    assert (len(fitted), len(held_out)) == (28, 103)
    for value_of in (lambda run: run.model, lambda run: run.devices, lambda run: run.seq):
        known = {value_of(run) for run in fitted}
        new = {value_of(run) for run in held_out} - known
        assert len(new) >= 3
    assert {run.device for run in fitted} == set(MACHINES)


def test_a_run_is_priced_as_the_planner_prices_it() -> None:
    """Without recompute a replay is the planner's own price; with it, one product of each block less."""
    run = find(device="A100-80GB", model="MPT-1b", seq=2048, devices=8)
    task, candidate = fsdp_task(run, NO_LOSS), candidate_of(run)
    assert replay_run(run, NO_LOSS).seconds == pytest.approx(price(task, candidate).seconds, rel=1e-6)
    again = replace(run, recompute=True)
    whole = price(fsdp_task(again, NO_LOSS), candidate_of(again)).seconds
    product = 2 * run.rows * run.seq * run.hidden * run.mlp_hidden / task.machine.gemm["bf16"]
    saved = whole - replay_run(again, NO_LOSS).seconds
    assert saved == pytest.approx(run.layers * run.micro_steps * product, rel=0.15)
    assert memory_of(task, candidate).total < task.usable_bytes


def test_strategies_differ_in_how_often_weights_are_gathered() -> None:
    full = find(devices=512, model="MPT-7b")
    once = find(devices=512, model="MPT-1b")
    assert not candidate_of(full).policy.keep_weights
    assert candidate_of(once).policy.keep_weights
    assert candidate_of(find(device="A100-80GB", model="MPT-70b")).policy.reduce_dtype == torch.bfloat16
    assert candidate_of(full).policy.reduce_dtype == torch.float32


def test_factors_slow_down_products_and_attention_alone() -> None:
    machine = load_machine("dgx-h100")
    slowed = slowed_machine(machine, FsdpFit(products=1.25, attention=2.0))
    assert slowed.gemm["bf16"] * 1.25 == pytest.approx(machine.gemm["bf16"])
    assert slowed.attention * slowed.gemm["bf16"] * 2 == pytest.approx(machine.attention * machine.gemm["bf16"])
    assert replace(slowed, name=machine.name, gemm=machine.gemm, attention=machine.attention) == replace(
        machine, traffic={}
    )
    assert set(FSDP_FITTED) == set(MACHINES.values())


@pytest.mark.slow
def test_the_fit_finds_factors_that_were_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    true, some = FsdpFit(1.3, 1.8), [run for run in RUNS if run.fitted and run.model == "MPT-350m"]
    made_up = [replace(run, seconds=replay_run(run, true).seconds) for run in some]
    monkeypatch.setattr(replay_fsdp, "read_runs", lambda: made_up)
    found = replay_fsdp.fit_fsdp("dgx-a100", lambda _: None)
    assert found.products == pytest.approx(true.products, rel=0.03)
    assert found.attention == pytest.approx(true.attention, rel=0.03)


def test_accuracy_counts_both_directions_and_bars_need_a_cause() -> None:
    runs = RUNS[:2]
    result = accuracy(runs, [2 * runs[0].seconds, runs[1].seconds / 2])
    assert result[:3] == pytest.approx((1.0, 2.0, 2.0))
    judge = Judge({})
    said = list(bars(judge, Accuracy(1.05, 1.2, 1.4, 1.0)))
    assert [line.split(": ")[1] for line in said] == ["reached, 1.050", "**MISSED**, 1.200", "reached, 1.400"]
    assert len(judge.failures) == 1 and "mean factor off at most 1.15: 1.200" in judge.failures[0]
    assert math.isclose(result.spearman, 1.0) or math.isclose(result.spearman, -1.0)

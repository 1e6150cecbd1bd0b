"""The law of corrections: what machine B takes, given as a measurement to machine A, makes A predict B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from fourfold.grid import Shape
from fourfold.models.config import config
from fourfold.planner.correct import (
    FASTER,
    LEAST_SHARE,
    Correction,
    constants,
    correct,
    faster_plan,
    link_of,
    parts_of,
    pieces,
    work_of,
)
from fourfold.planner.machine import HostSpeed, LinkSpeed, Machine, Timed, load_machine, parse_machine, to_toml
from fourfold.planner.price import Candidate, Price, Task, price
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy

MODEL = replace(config("llama-3-8b"), layers=3, hidden=1024, mlp_hidden=4096, heads=8, kv_heads=8, vocab=8192)
CORES = replace(load_machine("laptop"), memory=1 << 40)
SMALL = replace(MODEL, layers=1, hidden=128, mlp_hidden=512, heads=4, kv_heads=4, head_dim=32, vocab=512)


def with_links(machine: Machine, *groups: tuple[int, int]) -> Machine:
    """Return a machine that has only these links inside a node."""
    inside = {group: machine.inside[group] for group in groups}
    gone = tuple(f"inside[{stride},{size}]" for stride, size in machine.inside.keys() - inside.keys())
    sources = {key: text for key, text in machine.sources.items() if not key.startswith(gone)}
    return replace(machine, inside=inside, sources=sources)


_DGX = load_machine("dgx-h100")
NODES = replace(
    _DGX,
    devices_per_node=4,
    host={},
    sources={k: text for k, text in _DGX.sources.items() if not k.startswith("host.")},
)
"""Without its host, which would be all that a step of so small a model takes."""
GPUS = replace(with_links(NODES, (1, 2), (1, 4), (2, 2)), sharing=0.0)


def scaled(machine: Machine, **factors: Any) -> Machine:
    """Return a machine with constants multiplied; `x` stands for all links inside nodes."""
    changes: dict[str, Any] = {}
    for name, factor in factors.items():
        if name == "gemm":
            changes[name] = {dtype: factor * rate for dtype, rate in machine.gemm.items()}
        elif name == "inside":
            changes[name] = {
                of: LinkSpeed(factor * link.bandwidth, link.latency) for of, link in machine.inside.items()
            }
        elif name == "between":
            assert machine.between is not None
            changes[name] = replace(machine.between, bandwidth=factor * machine.between.bandwidth)
        elif name == "host":
            changes[name] = {mode: HostSpeed(factor, 10 * factor) for mode in ("eager", "captured")}
        else:
            changes[name] = factor * getattr(machine, name)
    sources = {**machine.sources}
    sources |= {f"host.{mode}.{name}": "test" for mode in changes.get("host", ()) for name in ("item", "step")}
    return replace(machine, **changes, sources=sources)


def priced(machine: Machine, shape: Shape, micro_steps: int = 1) -> Price:
    on_cpu = machine.device == "cpu"
    model, seq = (SMALL, 128) if on_cpu else (MODEL, 2048)
    rows = 4 * shape.places * micro_steps
    task = Task(model, machine, rows, seq, compute=torch.float32 if on_cpu else torch.bfloat16)
    return price(task, Candidate(shape, Policy(compute_dtype=task.compute), 4, micro_steps))


def corrected(wrong: Machine, right: Machine, shape: Shape, micro_steps: int = 1) -> tuple[Correction, Price]:
    truth = priced(right, shape, micro_steps)
    return correct(priced(wrong, shape, micro_steps), parts_of(truth), "a test, 2026-11-18"), truth


def check(found: Correction, truth: Price) -> None:
    """The corrected machine predicts the step and each part that matters, and its file is valid."""
    assert found.corrected.seconds == pytest.approx(truth.seconds, rel=0.03)
    measured, now = found.measured.named(), found.corrected.named()
    for part, seconds in measured.items():
        assert now[part] == pytest.approx(seconds, rel=0.06, abs=LEAST_SHARE * truth.seconds), part
    assert parse_machine(to_toml(found.machine), "corrected.toml") == found.machine
    again = price(replace(truth.task, machine=found.machine), truth.candidate)
    assert again.seconds == found.corrected.seconds
    for change in found.changes:
        assert found.machine.sources[change.key].startswith("corrected by a test, 2026-11-18: ")
        assert constants(found.machine)[change.key] == change.now


SHAPE = Shape(x=2, z=2, data=2)  # data crosses nodes
FACTORS: list[Mapping[str, float]] = [
    {"gemm": 0.5},
    {"attention": 0.3},
    {"memory_bandwidth": 0.4},
    {"host": 2e-4},
    {"inside": 0.2},
    {"between": 0.2},
    {"gemm": 0.7, "attention": 0.6, "memory_bandwidth": 0.5, "inside": 0.3, "between": 0.4, "host": 1e-4},
]


@pytest.mark.parametrize("factors", FACTORS, ids=lambda factors: "+".join(factors))
@pytest.mark.parametrize("slower", [True, False], ids=["too fast", "too slow"])
def test_a_wrong_constant_is_corrected_by_a_step(factors: Mapping[str, float], slower: bool) -> None:
    pair = GPUS, scaled(GPUS, **factors)
    wrong, right = pair if slower else reversed(pair)
    assert abs(priced(wrong, SHAPE).seconds / priced(right, SHAPE).seconds - 1) > 0.02  # else there is nothing to see
    found, truth = corrected(wrong, right, SHAPE)
    check(found, truth)


@pytest.mark.parametrize(
    "factors", [{"inside": 0.3}, {"gemm": 0.6, "host": 3e-4}, {"memory_bandwidth": 3.0}], ids="+".join
)
def test_a_wrong_constant_of_the_cpu_is_corrected(factors: Mapping[str, float]) -> None:
    """There the host computes itself, and its seconds are part of every piece of work."""
    check(*corrected(CORES, scaled(CORES, **factors), Shape(x=2, z=2)))


@pytest.mark.parametrize("factors", [{"gemm": 0.5}, {"host": 2e-4}, FACTORS[-1]], ids="+".join)
def test_a_pipeline_corrects_a_machine_too(factors: Mapping[str, float]) -> None:
    check(*corrected(GPUS, scaled(GPUS, **factors), Shape(pipe=2, x=2, data=2), micro_steps=4))


def test_micro_steps_correct_a_machine_too() -> None:
    check(*corrected(GPUS, scaled(GPUS, **FACTORS[-1]), SHAPE, micro_steps=3))


def test_a_right_machine_stays_as_it_is() -> None:
    found, truth = corrected(GPUS, GPUS, SHAPE)
    assert found.machine == GPUS
    assert found.changes == ()
    noisy = replace(found.measured, products=1.03 * found.measured.products, kernels=0.97 * found.measured.kernels)
    assert correct(truth, noisy, "a test").machine == GPUS


def test_only_what_is_off_changes_and_says_why() -> None:
    found, _ = corrected(GPUS, scaled(GPUS, between=0.25), SHAPE)
    (change,) = found.changes
    assert GPUS.between is not None
    assert (change.part, change.key, change.was) == ("data", "between.bandwidth", GPUS.between.bandwidth)
    assert change.now == pytest.approx(GPUS.between.bandwidth / 4, rel=0.02)
    assert found.machine.sources[change.key] == (
        f"corrected by a test, 2026-11-18: messages over data measured {found.measured.link['data']:.4g} s a step, "
        f"predicted {found.predicted.link['data']:.4g} s, was {change.was:.4g}"
    )
    assert found.machine.sources["gemm.bf16"] == GPUS.sources["gemm.bf16"]


def test_an_axis_without_an_own_link_gets_one() -> None:
    """What x shows about its link is no reason to change that of other groups."""
    wide = with_links(GPUS, (1, 2))
    found, truth = corrected(wide, replace(wide, inside={**wide.inside, (2, 2): LinkSpeed(4e10, 2e-6)}), SHAPE)
    check(found, truth)
    assert found.machine.inside[1, 2] == wide.inside[1, 2]
    assert found.machine.inside[2, 2].bandwidth == pytest.approx(4e10, rel=0.03)
    assert found.machine.sources["inside[2,2].latency"].startswith("as inside[1,2]: ")


def test_measured_products_are_scaled_and_gemm_stays_below_the_peak() -> None:
    timed = Timed(8192, 1024, 1024, "bf16", 5e-5)
    known = replace(GPUS, measured=(timed,), sources={**GPUS.sources, "measured": "calibrated"})
    slow = replace(known, gemm={"bf16": GPUS.gemm["bf16"] / 2}, measured=(replace(timed, seconds=1e-4),))
    found, truth = corrected(known, slow, SHAPE)
    check(found, truth)
    assert found.machine.measured[0].seconds == pytest.approx(1e-4, rel=0.03)
    assert found.machine.sources["measured"].startswith("calibrated; times of bf16 corrected by a test")
    found, _ = corrected(GPUS, replace(GPUS, gemm={"bf16": 9e15}, peak={"bf16": 9e15}), SHAPE)
    assert found.machine.gemm["bf16"] == GPUS.peak["bf16"]
    assert parse_machine(to_toml(found.machine), "fast.toml") == found.machine


def test_what_was_not_measured_is_not_corrected() -> None:
    truth = priced(scaled(GPUS, inside=0.2), SHAPE)
    unknown = replace(parts_of(truth), link={})
    assert correct(priced(GPUS, SHAPE), unknown, "a test").machine == GPUS


def test_axes_know_the_link_that_limits_them() -> None:
    assert link_of(GPUS, SHAPE, "x") == (1, 2)
    assert link_of(GPUS, SHAPE, "z") == (2, 2)
    assert link_of(GPUS, SHAPE, "data") is None
    # four ranks on each of two nodes, and one ring between them: the slower kind of hop limits it
    assert link_of(scaled(GPUS, between=0.1), Shape(x=8), "x") is None
    assert link_of(scaled(GPUS, between=10.0), Shape(x=8), "x") == (1, 4)


def test_the_work_of_a_step_is_that_of_its_program() -> None:
    """Counted with few layers and micro-steps, and added up; the optimizer is one kernel over all layers."""
    found = priced(GPUS, SHAPE, 3)
    counted = work_of(found)
    direct = pieces(step_program(found.candidate.sizes(found.task), micro_steps=3).work)
    for kind in ("products", "attention", "fused", "plain"):
        size = {"attention": 1}.get(kind, 0)
        sums = [sum(n * one.sizes[size] for one, n in work.items() if one.kind == kind) for work in (counted, direct)]
        assert sums[0] == sums[1] > 0, kind


def test_another_plan_is_told_only_if_it_is_faster() -> None:
    found = priced(scaled(GPUS, between=0.02), Shape(z=8))  # weights cross a slow network in every layer
    own, better = faster_plan(found.task, found.candidate)
    assert own.seconds == found.seconds
    assert better is not None
    assert better.seconds < (1 - FASTER) * own.seconds
    assert faster_plan(found.task, better.candidate)[1] is None
    alone = priced(GPUS, Shape())
    assert faster_plan(alone.task, alone.candidate)[1] is None


def test_links_that_no_file_of_such_nodes_can_have_are_left_out() -> None:
    """A job on some of a node's devices is priced with nodes of so many, and with all links of the file."""
    found, truth = corrected(NODES, scaled(NODES, gemm=0.5), SHAPE)
    check(found, truth)
    assert found.machine.inside.keys() == GPUS.inside.keys()

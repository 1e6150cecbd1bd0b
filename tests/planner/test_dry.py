"""The dry run: a step of the real code on one rank of thousands, without communication."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import dry
import fourfold as ff
from dry import BF16, CASES, GPT, Case
from fourfold.engine import Overlap
from fourfold.grid import Shape
from fourfold.planner.memory import kept_by_recompute
from fourfold.planner.program import AttentionOp, ElementwiseOp, LaunchOp, MatmulOp, WaitOp
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import flops_per_token
from fourfold.planner.trace import DryRun
from share import others_slow, share

# --- against the program


@pytest.mark.parametrize("case", share(CASES, 4), ids=lambda case: f"{case.shape.world} ranks {case.shape}")
def test_dry_run_equals_the_program(alone, case: Case) -> None:
    assert alone(dry.compare, case) > 10


@pytest.mark.parametrize("recompute", others_slow(["attention", "none", "block"], 2))
def test_flops_are_those_of_the_program(alone, recompute: Any) -> None:
    """The ranks that share a place's tokens share its products, whose sizes divide here."""
    shape = Shape(4, 2, 8, 3)
    case = Case(shape, ff.Policy(compute_dtype=BF16, recompute=recompute), micro_steps=2, rows=2, seq=512)
    program = alone(dry.run, case).program
    found = sum(work.flops for work in program if isinstance(work, MatmulOp | AttentionOp))
    tokens = case.micro_steps * case.rows * case.seq
    assert found * shape.x * shape.y == flops_per_token(GPT, case.seq, case.policy).hardware * tokens


def test_products_are_labelled_and_shaped_as_the_equations(alone) -> None:
    case = Case(Shape(2, 2, 4, 2), rows=1, seq=64)
    products = [work for work in alone(dry.run, case).program if isinstance(work, MatmulOp)]
    up = [(work.label, work.m, work.k, work.n) for work in products if work.label.endswith("layers.1.mlp.up")]
    assert up == [
        ("E1 layers.1.mlp.up", 64, 4096 // 2, 4 * 4096 // 2),
        ("E2 layers.1.mlp.up", 64, 4 * 4096 // 2, 4096 // 2),
        ("E3 layers.1.mlp.up", 4 * 4096 // 2, 64, 4096 // 2),
    ]


def test_kept_bytes_are_those_of_a_forward_pass_alone(alone) -> None:
    case = Case(Shape(x=2, data=2), ff.Policy(compute_dtype=BF16, recompute="attention"), seq=256)
    assert alone(dry.run, case).kept_bytes == alone(dry.kept, case)


KEPT: list[tuple[str, dict[str, Any], Shape, ff.Policy, int, bool]] = [
    ("gpt-tiny", {}, Shape(x=2, z=2), ff.Policy(), 8, False),
    ("llama-tiny", {}, Shape(x=2, y=2), ff.Policy(activations="replicated", loss_chunk=64), 4, True),
    ("gpt-tiny", {"layers": 4}, Shape(data=2, pipe=2), ff.Policy(), 2, False),
    ("gpt-tiny", {"layers": 8}, Shape(pipe=2, x=2), ff.Policy(schedule="interleaved"), 2, False),
    ("gpt-tiny", {}, Shape(), ff.Policy(offload=True, recompute="block"), 8, False),
    ("llama-tiny", {}, Shape(z=2, context=2), ff.Policy(compute_dtype=BF16), 4, True),
    ("moe-tiny", {}, Shape(z=2, expert=2), ff.Policy(), 2, False),
    ("moe-tiny", {"layers": 4}, Shape(pipe=2), ff.Policy(), 2, False),  # ids and counts, 2.4 kB, are not in the numbers
]
"""A model with other sizes, grid, policy, rows, and whether these are packed documents."""


def test_what_a_run_says_it_keeps_is_what_a_forward_pass_keeps(alone) -> None:
    """By kind of recompute, on the first and the last rank; a run must not make the model once more to say so."""
    failed = []
    for name, more, shape, policy, rows, packed in KEPT:
        config, seq = ff.models.config(name, **more), 128
        documents = (seq,) * rows if packed else None
        for rank in {shape.world - 1, 0 if shape.pipe > 1 else shape.world - 1}:
            sizes = LocalSizes(config, shape, policy, rows, seq, torch.float32, rank, documents=documents)
            for kind, found in kept_by_recompute(sizes).items():
                each = replace(policy, recompute=kind, offload=policy.offload and kind == "block")
                wanted = alone(dry.kept_by_forward, config, shape, each, rows, seq, rank=rank, packed=packed)
                if found != pytest.approx(wanted, rel=0.03):
                    failed.append((name, str(shape), rank, kind, found, wanted))
    assert not failed


def test_peak_holds_parameters_gradients_and_state(alone) -> None:
    shape = Shape(z=4)
    without, with_state = (alone(dry.run, Case(shape, rows=1, seq=16, optimizer=on)) for on in (False, True))
    shard = 4 * GPT.parameters // shape.z
    assert without.peak_bytes > 2 * shard
    assert with_state.peak_bytes - without.peak_bytes == pytest.approx(2 * shard, rel=0.01)  # and temporaries


# --- the order

STEADY = ff.models.config("gpt-5b", layers=4, vocab=1024)


def flights(program: list[Any]) -> list[tuple[LaunchOp, int, int]]:
    """Every launch, its place, and that of its wait; each flight has one of each."""
    launches = {work.flight: (work, at) for at, work in enumerate(program) if isinstance(work, LaunchOp)}
    waits = {work.flight: at for at, work in enumerate(program) if isinstance(work, WaitOp)}
    assert len(launches) == sum(isinstance(work, LaunchOp) for work in program)
    assert launches.keys() == waits.keys()
    assert len(waits) == sum(isinstance(work, WaitOp) for work in program)
    return [(launch, at, waits[flight]) for flight, (launch, at) in launches.items()]


@pytest.fixture(scope="module")
def steady(alone) -> DryRun:
    """With a small table: weights ahead of use are at most twice the largest message, and two blocks are no more."""
    policy = ff.Policy(compute_dtype=BF16, shard_optimizer=True)
    return alone(dry.run, Case(Shape(2, 1, 4, 2), policy, config=STEADY, optimizer=True, rows=4))


def test_a_steady_step_gathers_ahead(steady: DryRun) -> None:
    """Behind products: weights over z, dw over z, activations over x, stepped parameters over data."""
    behind: Counter[tuple[str, str]] = Counter()
    for launch, at, end in flights(steady.program):
        if any(isinstance(work, MatmulOp) for work in steady.program[at:end]):
            behind[launch.record.op, launch.lane] += 1
    assert behind["all_gather", "z gather"] >= 2 * 4 * STEADY.layers  # of 4 products, both ways
    assert behind["reduce_scatter", "z reduce"] >= 4 * STEADY.layers - 1  # the last one ends the pass
    assert behind["all_gather", "x"] > 4 * STEADY.layers
    assert behind["all_gather", "data"] > 1
    assert {launch.lane for launch, _, _ in flights(steady.program)} == {"x", "z gather", "z reduce", "data"}


def test_parameters_are_on_their_way_when_a_step_begins(steady: DryRun) -> None:
    first = next(at for at, work in enumerate(steady.program) if isinstance(work, MatmulOp))
    early = {work.record.label for work in steady.program[:first] if isinstance(work, LaunchOp)}
    stepped = {launch.record.label for launch, _, _ in flights(steady.program) if "parameters" in launch.record.label}
    assert stepped
    assert stepped <= early
    assert "adamw" in "".join(work.label for work in steady.program[-30:] if isinstance(work, ElementwiseOp))


def test_without_overlap_all_waits_follow_their_launch_and_the_products_are_the_same(alone) -> None:
    case = Case(Shape(2, 2, 2, 2), ff.Policy(overlap=Overlap(halves=1, joint_bytes=0)), seq=128)
    with_overlap = alone(dry.run, case)
    without = alone(dry.run, replace(case, policy=ff.Policy(overlap=Overlap.off())))
    for launch, at, end in flights(without.program):
        assert not any(isinstance(work, MatmulOp) for work in without.program[at:end]), launch
    assert Counter(without.records) == Counter(with_overlap.records)
    products = [
        Counter(work for work in found.program if isinstance(work, MatmulOp)) for found in (with_overlap, without)
    ]
    assert products[0] == products[1]


# --- modules that are not ours


def test_convolutions_are_products(alone) -> None:
    found = alone(dry.run_named, "dry:image", Shape(data=2), rows=4, seq=64, policy=ff.Policy())
    first, second = 2 * 4 * 64 * 9 * 8, 2 * 4 * 16 * 9 * 8 * 6
    flops = [work.flops for work in found.program if isinstance(work, MatmulOp)]
    assert flops == [first, second, second, second, first]  # ids want no gradient


def test_a_function_of_grid_and_policy_is_cut(alone) -> None:
    case = Case(Shape(2, 1, 2, 2), rows=1, seq=16)
    found = alone(dry.run_named, "dry:on_the_grid", case.shape, **case.options)
    assert Counter(found.records) == Counter(alone(dry.run, case).records)


@pytest.mark.parametrize("shape", [Shape(x=2, data=2), Shape(data=2)], ids=str)
@pytest.mark.parametrize("name", ["plain", "plain_on_the_grid"])
def test_a_plain_module_is_refused(alone, name: str, shape: Shape) -> None:
    with pytest.raises(ValueError, match=r"a plain module, which .*cut.*; .*ff\.parallelize"):
        alone(dry.run_named, f"dry:{name}", shape, rows=1, seq=8, policy=ff.Policy())


def test_functions_that_build_no_model_on_meta_are_refused(alone) -> None:
    for name, why in (
        ("with_memory", "weight is on cpu"),
        ("no_module", "returned int; it must return an nn.Module"),
    ):
        with pytest.raises((TypeError, ValueError), match=why):
            alone(dry.run_named, f"dry:{name}", Shape(data=2), rows=1, seq=8, policy=ff.Policy())


# --- what it refuses, and how long it takes


def test_a_process_that_has_joined_a_group_is_refused(alone) -> None:
    with pytest.raises(RuntimeError, match="has joined one of 1 ranks already; run it in another process"):
        alone(dry.in_company)


def test_sizes_and_ranks_that_are_not_there_are_refused(alone) -> None:
    with pytest.raises(ValueError, match="rank 16 is not on the grid"):
        alone(dry.run, Case(Shape(2, 2, 2, 2), rank=16))
    with pytest.raises(ValueError, match="rows=0"):
        alone(dry.run, Case(Shape(2, 2, 2, 2), rows=0))


@pytest.mark.slow
def test_layers_take_little_time_each(alone) -> None:
    """soak_dry.py runs all 192 of them. A rank of 16,384 draws no number and holds no weight."""
    config = ff.models.config("gpt-640b", layers=4)
    policy = ff.Policy(compute_dtype=BF16, recompute="block")
    began = time.perf_counter()
    found = alone(dry.run, Case(Shape(16, 1, 64, 16), policy, config=config, rows=4, seq=2048))
    assert len(found.records) > 4 * 40
    assert time.perf_counter() - began < 60  # about 2 on a free core

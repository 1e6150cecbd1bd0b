"""The rehearsed program against the dry run of the real code: the same launches, waits and products in the same order.

So what the planner simulates is what the runtime does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch

import fourfold as ff
from closed_form import ClosedForm
from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.nn.embedding import looks_up_in_place
from fourfold.planner.program import LaunchOp, MatmulOp, Rehearsal, WaitOp, Work
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import flops_per_token, run_step, step_program
from fourfold.planner.trace import dry_run
from fourfold.planner.transformer import TransformerProgram
from fourfold.policy import Overlap, Policy, Recompute
from share import share

ROWS, SEQ = 4, 16
MODELS = {
    "gpt": ff.models.config("gpt-tiny", layers=3),
    "llama": ff.models.config("llama-tiny", layers=3, qk_norm=True),
}
MIXTURES = {
    "moe": ff.models.config("moe-tiny", layers=3),
    "moe with an MLP": ff.models.config(
        "moe-tiny", layers=3, shared_hidden=96, dense_layers=1, score="sigmoid", aux=0.0
    ),
    "moe with capacity": ff.models.config("moe-tiny", layers=2, capacity=1.25, bias_rate=0.001, aux=0.0),
    "moe that reads before": ff.models.config(
        "moe-tiny", layers=3, shared_hidden=96, moe_reads="previous", z_loss=0.001
    ),
}
FOLDS = [
    Shape(z=4, expert=4),
    Shape(z=4, expert=2, ez=2),
    Shape(z=4, ez=4),
    Shape(z=2, data=2, expert=2),
    Shape(x=2, z=2, expert=2, ez=2),
    Shape(x=2, z=2, expert=2, ex=2),
    Shape(x=2, y=2, z=2, expert=4),
    Shape(y=2, z=2, data=2, ex=2, expert=2),
    Shape(z=3, data=2, expert=3, ez=2),
    Shape(x=3, data=2, expert=3, ex=2),
    Shape(z=4, expert=2, context=2),
    Shape(x=2, z=2, data=2, expert=4, context=4),
]
SHAPES = [
    Shape(),
    Shape(x=2, z=2),
    Shape(z=2, data=2),
    Shape(x=2, y=2, z=2),
    Shape(2, 2, 2, 2),
    Shape(x=4),
    Shape(y=4),
    Shape(x=3, z=2),
    Shape(x=8, y=3, z=2),
    Shape(x=2, data=2),
    Shape(y=2, data=3),
]
CASES = 7
"""The number of cases, of a few hundred, that run here; soak_dry.py runs all of them."""


def cases() -> list[tuple[str, Shape, Policy, int]]:
    """A fixed sample of everything that orders a step."""
    draw, chunks = random.Random(3), random.Random(4)
    modes = list(product(MODELS, SHAPES, ("sharded", "replicated"), ("none", "attention", "block"), (1, 2)))
    draw.shuffle(modes)
    found = []
    for name, shape, activations, recompute, halves in modes:
        overlap = Overlap(
            halves=halves,
            prefetch=draw.random() < 0.8,
            defer=draw.random() < 0.8,
            wgrad_behind_messages=draw.random() < 0.8,
            reduce_early=draw.random() < 0.8,
            bytes_in_flight=draw.choice([None, None, 1, 20000]),
            joint_bytes=draw.choice([16 << 20, 16 << 20, 3000, 0]),
        )
        policy = Policy(
            activations=activations,
            recompute=recompute,
            keep_gathered=draw.random() < 0.5,
            keep_weights=draw.random() < 0.3,
            loss_chunk=draw.choice([0, 0, 7]),
            shard_optimizer=draw.random() < 0.5,
            compute_dtype=draw.choice([None, torch.bfloat16]),
            bucket_bytes=draw.choice([4000, 25 << 20]),
            even_tokens=draw.random() < 0.7,
            mlp_chunk=chunks.choice([0, 0, 13, 1000]),
            overlap=overlap,
        )
        if MODELS[name].misfit(shape, policy) is None:
            found.append((name, shape, policy, draw.choice([1, 1, 2, 3])))
    return found


def context_cases() -> list[tuple[str, Shape, Policy, int]]:
    """The same for grids on which places share their rows, with all ways in which K and V travel."""
    draw = random.Random(5)
    shapes = [
        Shape(z=2, context=2),
        Shape(data=2, context=2),
        Shape(z=4, context=2),
        Shape(x=2, z=2, context=2),
        Shape(z=2, data=2, context=4),
        Shape(y=2, z=4, context=4),
    ]
    ways = ("auto", "gather", "exchange", "ring", "ulysses:2", "ulysses:2+gather", "ulysses:2+ring")
    modes = list(product(MODELS, shapes, ways, ("none", "attention", "block"), (1, 2)))
    draw.shuffle(modes)
    return [
        (
            name,
            shape,
            Policy(
                recompute=recompute,
                context_way=way,
                keep_gathered=draw.random() < 0.3,
                loss_chunk=draw.choice([0, 7]),
                even_tokens=draw.random() < 0.5,
                overlap=Overlap(halves=halves, wgrad_behind_messages=draw.random() < 0.8),
            ),
            draw.choice([1, 2]),
        )
        for name, shape, way, recompute, halves in modes
    ]


def mixture_cases(seed: int, shapes: Sequence[Shape]) -> list[tuple[str, Shape, Policy, int]]:
    """The same for mixtures of experts, of which some blocks have an MLP and some an MLP beside the experts."""
    draw = random.Random(seed)
    modes = list(product(MIXTURES, shapes, ("sharded", "replicated"), ("none", "attention", "block"), (1, 2)))
    draw.shuffle(modes)
    found = []
    for name, shape, activations, recompute, halves in modes:
        policy = Policy(
            activations=activations,
            recompute=recompute,
            keep_gathered=draw.random() < 0.5,
            keep_weights=draw.random() < 0.3,
            keep_casts=draw.random() < 0.3,
            loss_chunk=draw.choice([0, 0, 7]),
            shard_optimizer=draw.random() < 0.5,
            compute_dtype=draw.choice([None, torch.bfloat16]),
            bucket_bytes=draw.choice([4000, 25 << 20]),
            overlap=Overlap(
                halves=halves,
                wgrad_behind_messages=draw.random() < 0.8,
                bytes_in_flight=draw.choice([None, 20000]),
                joint_bytes=draw.choice([16 << 20, 3000, 0]),
            ),
        )
        if MIXTURES[name].misfit(shape, policy) is None:
            found.append((name, shape, policy, draw.choice([1, 1, 2, 3])))
    return found


def unfolded_mixtures() -> list[tuple[str, Shape, Policy, int]]:
    return mixture_cases(6, SHAPES)


def folded_mixtures() -> list[tuple[str, Shape, Policy, int]]:
    """Mixtures on folded grids, and on grids with a context size."""
    return mixture_cases(8, [*FOLDS, Shape(z=2, context=2), Shape(x=2, z=2, context=2)])


def order(work: list[Work]) -> list[tuple[str, object]]:
    """Launches, waits and the sizes of products."""
    records = {item.flight: item.record for item in work if isinstance(item, LaunchOp)}
    found: list[tuple[str, object]] = []
    for item in work:
        if isinstance(item, LaunchOp):
            found.append((f"launch on {item.lane}", item.record))
        elif isinstance(item, WaitOp):
            found.append(("wait", records[item.flight]))
        elif isinstance(item, MatmulOp):
            found.append(("product", (item.m, item.k, item.n, item.parts)))
    return found


def compare(
    name: str,
    shape: Shape,
    policy: Policy,
    micro_steps: int,
    rows: int = ROWS,
    documents: tuple[int, ...] | None = None,
    rank: int = 0,
) -> None:
    """Compare the rehearsed program with the dry run."""
    config, steps = (MODELS | MIXTURES)[name], micro_steps
    dry = dry_run(
        config, shape, rank=rank, rows=rows, seq=SEQ, policy=policy, micro_steps=steps, optimizer=True,
        documents=documents,
    )  # fmt: skip
    sizes = LocalSizes(config, shape, policy, rows, SEQ, rank=rank, documents=documents)
    assert order(step_program(sizes, micro_steps=steps).work) == order(dry.program)


@pytest.mark.parametrize(
    "case",
    [*cases()[:CASES], *context_cases()[:3], *unfolded_mixtures()[:4], *folded_mixtures()[:3]],
    ids=lambda case: f"{case[0]} {case[1]}",
)
def test_program_is_what_the_code_does(alone, case: tuple[str, Shape, Policy, int]) -> None:
    alone(compare, *case)


@pytest.mark.parametrize("shape", [Shape(x=2, y=2, z=2), Shape(x=2, y=2, z=2, expert=2, ex=2)], ids=str)
def test_program_of_routers_in_fp64_is_what_the_code_does(alone, shape: Shape) -> None:
    alone(compare, "moe with an MLP", shape, Policy(compute_dtype=torch.bfloat16, router_dtype=torch.float64), 1)


def test_program_of_padded_experts_is_what_the_code_does(alone) -> None:
    alone(compare, "moe with capacity", Shape(x=2, z=2, ex=2, expert=2), Policy(pad_experts=True), 1)


def cut_cases() -> list[tuple[str, Shape, Policy, int]]:
    """Those of all cases in which the halves are those of one row."""
    return [case for case in cases() if case[2].overlap.halves == 2 and case[2].recompute != "attention"]


@pytest.mark.parametrize("case", cut_cases()[:4], ids=lambda case: f"{case[0]} {case[1]}")
def test_program_of_a_row_that_is_cut_is_what_the_code_does(alone, case: tuple[str, Shape, Policy, int]) -> None:
    alone(compare, *case, rows=1)


DOCUMENTS = 9, 7, 16, 1, 1, 1, 13, 3, 3, 10
"""The lengths of documents in four rows."""


@pytest.mark.parametrize(
    ("way", "halves"), [pytest.param("auto", 1, marks=pytest.mark.slow), ("ulysses:2+exchange", 2)]
)
def test_program_with_documents_is_what_the_code_does_on_every_member(alone, way: str, halves: int) -> None:
    policy = Policy(context_way=way, assignment="documents", overlap=Overlap(halves=halves))
    alone(compare_members, Shape(z=2, data=2, context=4), policy)


def compare_members(shape: Shape, policy: Policy) -> None:
    for rank in range(shape.world):
        compare("llama", shape, policy, 1, ROWS, DOCUMENTS, rank)


def test_known_order_of_weights_gives_the_program_after_a_first_step() -> None:
    for name, shape, policy, micro_steps in share(cases(), 5):
        sizes = LocalSizes(MODELS[name], shape, policy, ROWS, SEQ)
        host = Rehearsal(sizes)
        model = TransformerProgram(sizes, host)
        host.silent = True  # a first step, in which the engine records the order by itself
        run_step(model, 1, optimizer=True, clip=True)
        host.silent = False
        run_step(model, micro_steps, optimizer=True, clip=True)
        assert step_program(sizes, micro_steps=micro_steps).work == host.work, (name, shape, policy)


def test_the_largest_half_decides_how_all_halves_look_up_their_tokens(alone) -> None:
    config, shape, policy = MODELS["gpt"], Shape(x=2, z=2), Policy(even_tokens=True, overlap=Overlap(halves=2))
    large, small = (looks_up_in_place(policy, shape, config.vocab, rows * SEQ) for rows in (5, 4))
    assert (large, small) == (False, True)
    alone(compare, "gpt", shape, policy, 1, 9)


def test_program_launches_the_closed_form() -> None:
    """The launches equal the formulas on every rank, also on those that hold less than rank 0: one by one, or in bytes
    where small messages travel together."""
    for (name, shape, policy, micro_steps), rows in [
        *((case, ROWS) for case in share(cases(), 10)),
        *((case, 1) for case in share(cut_cases(), 5)),
    ]:
        apart = replace(policy, overlap=replace(policy.overlap, joint_bytes=0))
        for rank in {0, shape.world // 2, shape.world - 1}:
            arguments = rows, SEQ, torch.float32, rank
            closed = ClosedForm(MODELS[name], shape, policy, *arguments)
            expected = [*closed.training_step(micro_steps=micro_steps, clip=True), *closed.optimizer_step()]
            alone, joint = (
                step_program(LocalSizes(MODELS[name], shape, each, *arguments), micro_steps=micro_steps).records
                for each in (apart, policy)
            )
            assert Counter(alone) == Counter(expected)
            assert nbytes_of(joint) == nbytes_of(expected)


def nbytes_of(records: Iterable[Collective]) -> Counter[tuple[str, str]]:
    """The bytes of each kind of message over each axis."""
    found: Counter[tuple[str, str]] = Counter()
    for record in records:
        found[record.op, record.axis] += record.nbytes
    return found


@pytest.mark.parametrize("recompute", ["none", "attention", "block"])
def test_program_computes_the_flops_of_the_batch(recompute: Recompute) -> None:
    """The FLOPs of all ranks together are the hardware FLOPs of the batch."""
    config, shape = ff.models.config("gpt-5b", layers=2), Shape(x=4, y=2, z=2, data=2)
    policy = Policy(recompute=recompute, compute_dtype=torch.bfloat16)
    flops = step_program(LocalSizes(config, shape, policy, 2, 2048)).flops
    tokens = 2 * 2048 * shape.data * shape.z
    assert flops * shape.world == flops_per_token(config, 2048, policy).hardware * tokens

"""The law of the pipe axis: the program of every pipe rank is what a dry run does and what the ledger of ranks says."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from test_program import order

import fourfold as ff
from closed_form import APART
from fourfold.axes import PIPE
from fourfold.grad_norm import grad_norm
from fourfold.ledger import Collective
from fourfold.planner.program import Program
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.planner.trace import dry_run
from fourfold.policy import Gathering, Overlap, Policy
from fourfold.schedule.stages import Stages
from fourfold.shape import Shape
from harness import grid_of
from pipeline.test_pipeline import Case as ModelCase
from share import others_slow

ROWS, SEQ = 2, 8


@dataclass(frozen=True)
class Case(ModelCase):
    """A step that is planned, run dry and run on ranks."""

    def program(self, rank: int, *, optimizer: bool) -> Program:
        sizes = LocalSizes(self.config, self.shape, self.policy, ROWS, SEQ, torch.float32, rank)
        return step_program(sizes, micro_steps=self.micro_steps, optimizer=optimizer, clip=True)


LOOP, WAVE = Stages.even(4, 2, 2), Stages.even(4, 2, 2, "wave")
CASES = [
    Case(Shape(pipe=2)),
    Case(Shape(pipe=2), tied=False, llama=True, micro_steps=1),
    Case(Shape(pipe=2), Policy(schedule="zb-h1", loss_chunk=5)),
    Case(Shape(pipe=2), Policy(stages=WAVE, schedule="v-half")),
    Case(Shape(pipe=2), Policy(stages=Stages((0, 4, 6), (0, 1)), recompute="block")),
    Case(Shape(x=2, pipe=2), Policy(overlap=Overlap(halves=2))),
    Case(Shape(x=2, pipe=2), Policy(overlap=Overlap(halves=2), recompute="block", schedule="zb-h1"), tied=False),
    Case(Shape(z=2, pipe=2), Policy(overlap=APART)),
    Case(Shape(z=2, pipe=2), Policy(schedule="zb-h1", overlap=Overlap(joint_bytes=3000)), llama=True),
    Case(Shape(z=2, pipe=2), Policy(stages=LOOP, keep_weights=True), llama=True),
    Case(Shape(z=2, pipe=2), Policy(stages=LOOP, gather_weights="block"), llama=True),
    Case(Shape(z=2, pipe=2), Policy(gather_weights="step", recompute="block")),
    Case(Shape(data=2, pipe=2), Policy(shard_optimizer=True, bucket_bytes=4000)),
    Case(Shape(data=2, pipe=2), Policy(schedule="gpipe", bucket_bytes=4000), tied=False),
    Case(Shape(y=2, pipe=2), Policy(schedule="zb-h1", recompute="attention")),
    Case(Shape(pipe=4), Policy(stages=Stages.even(8, 4, 2)), layers=8, micro_steps=8),
    Case(Shape(pipe=4), Policy(schedule="zb-h1"), micro_steps=3),
    Case(Shape(z=2, pipe=2, context=2), Policy(schedule="zb-h1", context_way="gather"), llama=True),
    Case(Shape(pipe=2), Policy(stages=Stages((0, 2, 2, 3, 6), (0, 1, 0, 1))), tied=False),
    Case(
        Shape(x=2, pipe=2, order=("pipe", "x", "y", "z", "data")),
        Policy(stages=dataclasses.replace(WAVE, recompute=("block", "none", "attention", "none"))),
    ),
]


MIXTURE = ff.models.config("moe-tiny", layers=4, dense_layers=1, shared_hidden=48)


@dataclass(frozen=True)
class MixtureCase(Case):
    """The same for a mixture of experts."""

    @property
    def config(self) -> ff.models.ModelConfig:
        return MIXTURE


CASES += [
    MixtureCase(Shape(z=2, pipe=2), Policy(schedule="zb-h1")),
    MixtureCase(Shape(x=2, pipe=2), Policy(overlap=Overlap(halves=2), recompute="block")),
    MixtureCase(Shape(y=2, pipe=2), Policy(stages=LOOP, keep_weights=True)),
]


def follow_the_code(case: Case) -> None:
    """Compare launches, waits and products of every pipe rank with a dry run, in their order."""
    for place in range(case.shape.pipe):
        rank = case.shape.rank({**dict.fromkeys(case.shape.sizes, 0), PIPE: place})
        dry = dry_run(
            case.config, case.shape, rank=rank, rows=ROWS, seq=SEQ, policy=case.policy, micro_steps=case.micro_steps,
            optimizer=True,
        )  # fmt: skip
        assert order(case.program(rank, optimizer=True).work) == order(dry.program), place


@pytest.mark.parametrize("case", others_slow(CASES, 4), ids=str)
def test_the_program_of_every_pipe_rank_is_what_the_code_does(alone, case: Case) -> None:
    alone(follow_the_code, case)


def on_ranks(case: Case) -> list[tuple[object, ...]]:
    """Return what the ledger records of a second step with the norm of its gradients."""
    grid = grid_of(case.shape)
    model = ff.models.build(case.config, grid, policy=case.policy)
    rows = torch.randint(53, (ROWS, SEQ), generator=torch.Generator().manual_seed(grid.shape.row_place(grid.rank)))
    for _ in range(2):
        with grid.ledger.watch() as records:
            ff.forward_backward(model, [(rows, rows)] * case.micro_steps)
            grad_norm(model.parameters())
        model.zero_grad(set_to_none=True)
    return [dataclasses.astuple(record) for record in records]


@pytest.mark.parametrize("case", others_slow(CASES, 14), ids=str)
def test_the_ledger_of_every_rank_is_the_program(ranks, case: Case) -> None:
    pool = ranks(case.shape.world)
    pool.start(on_ranks, case)
    for rank, found in enumerate(pool.results()):
        assert [Collective(*record) for record in found] == case.program(rank, optimizer=False).records, rank


@pytest.mark.parametrize(("gather", "stages", "gathers"), [("use", None, 8), ("step", None, 1), ("block", LOOP, 2)])
def test_weights_travel_as_often_as_the_policy_says(gather: Gathering, stages: Stages | None, gathers: int) -> None:
    """E13: 2n times for each use, once in a step, or once for each run of F and each run of B of a stage."""
    policy = Policy(
        gather_weights=gather, stages=stages, overlap=APART, schedule="auto" if stages is None else "looped-bfs"
    )
    case = Case(Shape(z=2, pipe=2), policy)
    records = case.program(0, optimizer=False).records
    own = [one for one in records if (one.op, one.axis, one.label) == ("all_gather", "z", "layers.0.mlp.up")]
    assert len(own) == gathers


def test_no_sum_of_gradients_leaves_before_the_gradient_that_another_stage_waits_for() -> None:
    """The last backward pass of a stage completes its gradients; their sums would hold up its message."""
    case = Case(Shape(data=2, pipe=2), Policy(bucket_bytes=1))
    records = case.program(1 * case.shape.data, optimizer=False).records
    labels = [one.label for one in records]
    sums = [place for place, label in enumerate(labels) if label.startswith("gradients ")]
    assert labels.index("B of stage 1, micro-batch 3") < min(sums)
    assert len(sums) > 10


def test_a_rank_sends_what_the_closed_form_says() -> None:
    """E12: n * m/x * k/y * e for each stage whose next stage is on another rank, and the same back."""
    config = ff.models.config("llama-3-8b", layers=4)
    shape, policy = Shape(x=2, pipe=4), Policy(compute_dtype=torch.bfloat16)
    sent = []
    for place in range(4):
        sizes = LocalSizes(
            config, shape, policy, 2, 2048, rank=shape.rank({"x": 0, "y": 0, "z": 0, "data": 0, PIPE: place})
        )
        records = step_program(sizes, micro_steps=8).records
        sent.append(sum(one.wire_bytes for one in records if one.op == "send"))
    assert [nbytes >> 20 for nbytes in sent] == [128, 256, 256, 128]  # a message has 16 MiB

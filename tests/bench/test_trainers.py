"""All sides of the comparison train alike: their losses are those of one process."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from benchmarks.cluster.minimal_reduce_scatter import minimal_reduce_scatter
from benchmarks.cluster.trainer_base import Groups
from benchmarks.cluster.trainers import make_trainer
from benchmarks.shared.decoder import Decoder, cut_evenly
from benchmarks.shared.models import adamw
from benchmarks.shared.peers import init_weights
from benchmarks.shared.pipelines import INTERLEAVED, PIPELINE
from benchmarks.shared.workloads import Line, Workload
from benchmarks.speed.gpu_ranks_lines import WORKLOADS
from fourfold import wire

pytestmark = pytest.mark.slow

LLAMA, GPT = WORKLOADS["tiny"], WORKLOADS["tiny-gpt"]
STEPS = 3
ACROSS = ("data", "z", "x", "y")
SHARDED = ff.Policy(shard_optimizer=True)
LINES = {
    LLAMA.name: [
        Line("fourfold", ff.Shape(x=2, z=2)),
        Line("fourfold", ff.Shape(z=2, data=2, order=ACROSS), policy=SHARDED),
        Line("DDP", ff.Shape(data=4)),
        Line("FSDP2", ff.Shape(z=4)),
        Line("FSDP2 explicit prefetch", ff.Shape(z=4)),
        Line("HSDP", ff.Shape(z=2, data=2, order=ACROSS)),
        Line("TP", ff.Shape(x=4)),
        Line("FSDP2 x TP", ff.Shape(x=2, z=2)),
        Line(PIPELINE, ff.Shape(), pipe=4, micro_batches=8),
    ],
    # learned positions, biases, a tied head, and a vocabulary that no number of ranks divides
    GPT.name: [
        Line("fourfold", ff.Shape(x=2, data=2)),
        Line("DDP x TP", ff.Shape(x=2, data=2)),
        Line("FSDP2", ff.Shape(z=4), reshard=False),
        Line("HSDP x TP", ff.Shape(x=2, data=2), reshard=False),
        Line(PIPELINE, ff.Shape(), pipe=4, micro_batches=4),
        Line(INTERLEAVED, ff.Shape(), pipe=4, micro_batches=8),
        Line(INTERLEAVED, ff.Shape(data=2), pipe=2, micro_batches=4),
    ],
}


_groups: list[Groups] = []
"""Of a rank; one serves all tests."""


def losses_of(lines: list[Line], size: str) -> list[list[float | None]]:
    """Of each line, the losses of its first steps on this rank; every other step has the minimal reduce-scatter."""
    groups = (_groups or _groups.append(Groups()) or _groups)[0]
    found: list[list[float | None]] = []
    gc.freeze()  # what was imported stays, so that collecting is quick
    for line in lines:
        trainer = make_trainer(line, WORKLOADS[size], groups=groups)
        found.append([])
        for step in range(STEPS):
            with minimal_reduce_scatter() if step % 2 else nullcontext():
                loss = trainer.step()
                found[-1].append(None if loss is None else loss.item())
        trainer.close()
    left = [found for found in gc.get_objects() if issubclass(type(found), (Decoder, ff.models.Transformer))]
    gc.unfreeze()
    assert not left, "what is closed lives on"
    return found


def alone(workload: Workload) -> list[float]:
    """The losses of one process, without any framework."""
    model = Decoder(workload.config)
    init_weights(model, workload.config)
    optimizer = adamw(model.parameters())
    tokens, targets = workload.batch(torch.device("cpu"))
    found = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_trains_as_one_process(ranks: Any, lines: list[Line], workload: Workload) -> None:
    found = ranks(4).run(losses_of, lines, workload.name, timeout=120)
    due = alone(workload)
    for number, line in enumerate(lines):
        for step in range(STEPS):
            losses = [loss for of_rank in found if (loss := of_rank[number][step]) is not None]
            # fp32, three updates
            assert sum(losses) / len(losses) == pytest.approx(due[step], rel=1e-5), f"{line.name}, step {step}"


@pytest.mark.parametrize("workload", [LLAMA, GPT], ids=lambda workload: workload.name)
def test_every_side_trains_as_one_process(ranks: Any, workload: Workload) -> None:
    assert_trains_as_one_process(ranks, LINES[workload.name], workload)


@pytest.mark.parametrize(
    ("package", "lines"),
    [
        ("deepspeed", [Line("DeepSpeed ZeRO-3", ff.Shape(z=4))]),
        ("megatron.core", [Line("Megatron TP", ff.Shape(x=4)), Line("Megatron TP", ff.Shape(x=2, data=2))]),
    ],
)
def test_so_do_those_that_need_more_packages(ranks: Any, package: str, lines: list[Line]) -> None:
    if not find_spec(package.split(".")[0]):
        pytest.skip(f"{package} is not installed")
    assert_trains_as_one_process(ranks, lines, LLAMA)


def test_stages_are_cut_where_the_slowest_is_fastest() -> None:
    """Hand-worked: 5 + 4 | 6 | 1 + 2 + 3 has the largest sum 9; no other cut into three has less."""
    assert cut_evenly([5, 4, 6, 1, 2, 3], 3) == [range(0, 2), range(2, 3), range(3, 6)]
    assert cut_evenly([0, 1, 1, 9], 4) == [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    with pytest.raises(ValueError, match="3 pieces cannot be cut into 4 stages"):
        cut_evenly([1, 1, 1], 4)


def reduce_scatters() -> list[tuple[Tensor, int]]:
    """What each way to ask for one gives inside, less what is due; and how many went through Fourfold's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    launched: list[Tensor] = []
    whole = torch.arange(world * 3, dtype=torch.float32).reshape(world, 3) * (rank + 1)
    due = torch.arange(rank * 3, rank * 3 + 3) * float(world * (world + 1) // 2)

    def launch(wholes: list[Tensor], link: wire.Link) -> Any:
        launched.extend(wholes)
        return real(wholes, link)

    def single(*, later: bool) -> Tensor:
        mine = torch.empty(3)
        work = dist.reduce_scatter_single(mine, whole.flatten(), async_op=later)
        if work is not None:
            work.wait()
        return mine

    def lists() -> Tensor:
        mine = torch.empty(3)
        dist.reduce_scatter(mine, list(whole))
        return mine

    ways = [
        lambda: single(later=False),
        lambda: single(later=True),
        lists,
        lambda: functional_collectives.reduce_scatter_single(whole, "sum", 0, dist.group.WORLD).flatten() + 0,
    ]
    real, found = wire.reduce_scatter, []
    wire.reduce_scatter = launch
    try:
        for way in ways:
            for inside in (True, False):
                launched.clear()
                with minimal_reduce_scatter() if inside else nullcontext():
                    found.append((way() - due, len(launched)))
    finally:
        wire.reduce_scatter = real
    return found


def test_every_reduce_scatter_is_the_minimal_one_inside_and_torchs_outside(ranks: Any) -> None:
    for of_rank in ranks(4).run(reduce_scatters):
        assert [launched for _, launched in of_rank] == [1, 0] * 4
        assert all(not difference.any() for difference, _ in of_rank)


def test_a_layout_that_a_side_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match="FSDP2 cannot use axis x of x=2 z=2; it uses z"):
        make_trainer(Line("FSDP2", ff.Shape(x=2, z=2)), LLAMA, groups=Groups())
    with pytest.raises(ValueError, match="there is no trainer 'ZeRO'"):
        make_trainer(Line("ZeRO", ff.Shape(z=2)), LLAMA, groups=Groups())
    with pytest.raises(ValueError, match="DDP takes no policy"):
        make_trainer(Line("DDP", ff.Shape(data=2), policy=SHARDED), LLAMA, groups=Groups())

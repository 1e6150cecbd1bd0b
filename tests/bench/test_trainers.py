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
from benchmarks.cluster.trainer_base import Groups, adamw
from benchmarks.cluster.trainers import make_trainer
from benchmarks.shared.peers import Llama, init_weights
from benchmarks.speed.gpu_ranks_lines import WORKLOADS
from fourfold import wire

pytestmark = pytest.mark.slow

TINY = WORKLOADS["tiny"]
STEPS = 3
ACROSS = ("data", "z", "x", "y")
LINES: list[tuple[str, ff.Shape, ff.Policy | None]] = [
    ("fourfold", ff.Shape(x=2, z=2), None),
    ("fourfold", ff.Shape(z=2, data=2, order=ACROSS), ff.Policy(shard_optimizer=True)),
    ("DDP", ff.Shape(data=4), None),
    ("FSDP2", ff.Shape(z=4), None),
    ("FSDP2 explicit prefetch", ff.Shape(z=4), None),
    ("HSDP", ff.Shape(z=2, data=2, order=ACROSS), None),
    ("TP", ff.Shape(x=4), None),
    ("FSDP2 x TP", ff.Shape(x=2, z=2), None),
]


_groups: list[Groups] = []
"""Of a rank; one serves all tests."""


def losses_of(lines: list[Any]) -> list[list[float]]:
    """Of each line, the losses of its first steps on this rank; every other step has the minimal reduce-scatter."""
    groups = (_groups or _groups.append(Groups()) or _groups)[0]
    found = []
    gc.freeze()  # what was imported stays, so that collecting is quick
    for side, shape, policy in lines:
        trainer = make_trainer(side, TINY, shape, policy, groups=groups)
        found.append([])
        for step in range(STEPS):
            with minimal_reduce_scatter() if step % 2 else nullcontext():
                found[-1].append(trainer.step().item())
        trainer.close()
    left = [found for found in gc.get_objects() if issubclass(type(found), (Llama, ff.models.Transformer))]
    gc.unfreeze()
    assert not left, "what is closed lives on"
    return found


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process, without any framework."""
    model = Llama(TINY.config)
    init_weights(model, TINY.config)
    optimizer = adamw(model.parameters())
    tokens, targets = TINY.batch(torch.device("cpu"))
    found = []
    for _ in range(STEPS):
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_trains_as_one_process(lines: list[Any], found: list[list[list[float]]], alone: list[float]) -> None:
    for number, (side, shape, _) in enumerate(lines):
        mean = [sum(of_rank[number][step] for of_rank in found) / len(found) for step in range(STEPS)]
        assert mean == pytest.approx(alone, rel=1e-5), f"{side} {shape}"  # fp32, three updates


def test_every_side_trains_as_one_process(ranks: Any, alone: list[float]) -> None:
    assert_trains_as_one_process(LINES, ranks(4).run(losses_of, LINES, timeout=120), alone)


@pytest.mark.parametrize(
    ("package", "lines"),
    [
        ("deepspeed", [("DeepSpeed ZeRO-3", ff.Shape(z=4), None)]),
        ("megatron.core", [("Megatron TP", ff.Shape(x=4), None), ("Megatron TP", ff.Shape(x=2, data=2), None)]),
    ],
)
def test_so_do_those_that_need_more_packages(ranks: Any, alone: list[float], package: str, lines: list[Any]) -> None:
    if not find_spec(package.split(".")[0]):
        pytest.skip(f"{package} is not installed")
    assert_trains_as_one_process(lines, ranks(4).run(losses_of, lines, timeout=120), alone)


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
        make_trainer("FSDP2", TINY, {"x": 2, "z": 2}, groups=Groups())
    with pytest.raises(ValueError, match="there is no trainer 'ZeRO'"):
        make_trainer("ZeRO", TINY, {"z": 2}, groups=Groups())
    with pytest.raises(ValueError, match="DDP takes no policy"):
        make_trainer("DDP", TINY, {"data": 2}, ff.Policy(), groups=Groups())

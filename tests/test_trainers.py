"""All sides of the comparison train alike: their losses are those of one process."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import fourfold as ff

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))  # behind the tests, which have a `plain` too

from lines import SIZES
from minimal import minimal_reduce_scatter
from peers import Llama, start
from trainers import Groups, adamw, make

TINY = SIZES["tiny"]
STEPS = 3
ACROSS = ("data", "z", "x", "y")
LINES: list[tuple[str, ff.Shape, ff.Policy | None]] = [
    ("fourfold", ff.Shape(x=2, z=2), None),
    ("fourfold", ff.Shape(z=2, data=2, order=ACROSS), ff.Policy(shard_optimizer=True)),
    ("DDP", ff.Shape(data=4), None),
    ("FSDP2", ff.Shape(z=4), None),
    ("FSDP2 explicit prefetch", ff.Shape(z=4), None),
    ("HSDP", ff.Shape(z=2, data=2), None),
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
    for side, shape, policy in lines:
        trainer = make(side, TINY, shape, policy, groups=groups)
        found.append([])
        for step in range(STEPS):
            with minimal_reduce_scatter() if step % 2 else nullcontext():
                found[-1].append(trainer.step().item())
        trainer.close()
    return found


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process, without any framework."""
    model = Llama(TINY.config)
    start(model, TINY.config)
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
    assert_trains_as_one_process(LINES, ranks(4).run(losses_of, LINES), alone)


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
    assert_trains_as_one_process(lines, ranks(4).run(losses_of, lines), alone)

"""What a step costs the host: the number of Python calls for each layer, which no load of the machine changes."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import fourfold as ff
from fourfold.grid import Shape
from fourfold.policy import Policy
from harness import grid_of
from share import others_slow

FEW, MANY = 1, 3
"""Numbers of layers: the difference is what layers cost, the rest is what a step costs without any."""
BF16 = Policy(compute_dtype=torch.bfloat16)
CASES: dict[str, tuple[str, Shape, Policy, int]] = {
    "gpt": ("gpt-tiny", Shape(), Policy(), 850),
    "llama": ("llama-tiny", Shape(), Policy(), 820),
    "gpt in bf16": ("gpt-tiny", Shape(), BF16, 900),
    "gpt x=2": ("gpt-tiny", Shape(x=2), Policy(), 1500),
    "llama y=2": ("llama-tiny", Shape(y=2), Policy(), 1750),
    "gpt z=2": ("gpt-tiny", Shape(z=2), Policy(), 2300),
    "gpt data=2": ("gpt-tiny", Shape(data=2), Policy(), 870),
}
"""The most calls of a layer, forward and backward and the optimizer's step: about a tenth more than there are. Before
parameter groups were kept, a layer of this GPT took 4600 calls on one rank and 8600 on two along z."""
STEP = 1000
"""The most calls of a step on one rank beyond those of its layers."""


def count_calls(name: str, shape: Shape, policy: Policy, layers: int) -> int:
    """Return the number of Python calls of one training step, once the first steps have worked out what is kept."""
    grid = grid_of(shape)
    config = replace(ff.models.config(name), layers=layers)
    model = ff.models.build(config, grid, policy=policy)
    optimizer = ff.optim.AdamW(model, lr=1e-3)
    tokens = ff.local_rows(torch.arange(4 * 16).view(4, 16), grid)
    calls = 0

    def step() -> None:
        model(tokens, tokens).backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()

    def count(_frame: object, event: str, _value: object) -> None:
        nonlocal calls
        calls += event == "call"

    for _ in range(3):
        step()
    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def count_both(name: str, shape: Shape, policy: Policy) -> tuple[int, int]:
    return count_calls(name, shape, policy, FEW), count_calls(name, shape, policy, MANY)


@pytest.mark.parametrize("case", others_slow(CASES, 2))
def test_a_layer_costs_few_calls(ranks, case: str) -> None:
    name, shape, policy, most = CASES[case]
    for few, many in ranks(shape.world).run(count_both, name, shape, policy):
        assert (many - few) / (MANY - FEW) <= most
        if shape.world == 1:
            assert few - (many - few) / (MANY - FEW) * FEW <= STEP

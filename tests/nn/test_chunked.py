"""Head and loss in chunks of tokens: the same loss and gradients, the predicted messages, a bounded peak."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import fourfold as ff
from closed_form import APART, ClosedForm
from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from fourfold.policy import Policy
from harness import Largest, grid_of
from share import others_slow, share

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53)


def train(shape: Shape, policy: Policy, counted: bool) -> dict[str, Any]:
    grid = grid_of(shape)
    model = ff.models.build(CONFIG, grid, policy=policy, dtype=torch.float64)
    tokens = torch.arange(4 * 13).view(4, 13) % 53
    targets = tokens.masked_fill(tokens % 3 == 0, -100)
    tokens, targets = ff.local_rows(tokens, grid), ff.local_rows(targets, grid)
    count = ff.count_targets(targets, grid) if counted else None
    with grid.ledger.watch() as records:
        loss = model(tokens, targets, count=count)
        (loss * 0.5).backward()
    with torch.no_grad():
        again = model(tokens, targets, count=count)
    return {
        "losses": (loss.item(), again.item()),
        "gradients": [local_of(parameter.grad) for parameter in model.parameters()],
        "records": records,
    }


@pytest.mark.parametrize("mode", others_slow(["sharded", "replicated"], 2))
@pytest.mark.parametrize("shape", share([Shape(x=2, z=2), Shape(x=2, y=2), Shape(y=2, data=2)], 3), ids=str)
def test_chunks_change_nothing_but_messages(ranks, shape: Shape, mode: str) -> None:
    for counted in (False, True):
        whole = ranks(4).run(train, shape, Policy(mode), counted)
        policy = Policy(mode, loss_chunk=10, overlap=APART)
        for rank, (a, b) in enumerate(zip(whole, ranks(4).run(train, shape, policy, counted), strict=True)):
            assert a["losses"] == pytest.approx(b["losses"], rel=1e-13)
            for first, second in zip(a["gradients"], b["gradients"], strict=True):
                torch.testing.assert_close(first, second, rtol=0, atol=1e-14)
            volume = ClosedForm(CONFIG, shape, policy, 4 // (shape.z * shape.data), 13, torch.float64, rank)
            assert Counter(b["records"]) == Counter([*volume.micro_step(counted=counted), *volume.gradients()])


def test_logits_of_one_chunk_are_the_most_that_exists() -> None:
    config = ff.models.config("llama-tiny", layers=1, vocab=5000)
    tokens = torch.arange(256).view(2, 128)
    largest = {}
    for chunk in (0, 32):
        model = ff.models.build(config, Grid.alone("cpu"), policy=Policy(loss_chunk=chunk))
        with Largest() as seen:
            model(tokens, tokens).backward()
        largest[chunk] = seen.elements
    assert largest[0] == 256 * 5000
    assert largest[32] == 5001 * config.hidden  # the gradient of the embedding's table, and a row for ids elsewhere

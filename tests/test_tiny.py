"""The tour: a grid, a layer on it, one training step, and the prediction of what that step communicates."""

from __future__ import annotations

from collections import Counter

import torch

import fourfold as ff
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from harness import grid_of

SHAPE = ff.Shape(x=2, z=2)


def layer(seed: int) -> list:
    """A linear layer whose weight is cut in four. What it reads and gives is cut as well."""
    grid = grid_of(SHAPE)
    linear = ff.nn.Expand(grid, Policy(), 8, 6)
    ff.nn.assemble(linear, grid, Policy(), seed=seed, dtype=torch.float64)
    tokens = torch.arange(32.0, dtype=torch.float64).view(4, 8)  # of the whole batch
    mine = tokens.chunk(2)[grid.coords["z"]].chunk(2)[grid.coords["x"]]
    return [linear.weight.full_tensor().detach(), linear(mine, tokens=2).detach()]


def step() -> dict:
    grid = grid_of(SHAPE)
    model = ff.models.build("gpt-tiny", grid)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    tokens = ff.local_rows(torch.arange(64).view(4, 16), grid)
    losses = []
    for _ in range(3):
        with grid.ledger.watch() as records:
            loss = model(tokens, tokens)
            loss.backward()
            ff.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "records": records}


def test_layer(ranks) -> None:
    found = ranks(4).run(layer, 3)
    weight = found[0][0]
    assert weight.shape == (6, 8)  # the model's shape, not the grid's
    whole = torch.arange(32.0, dtype=torch.float64).view(4, 8) @ weight.T
    for rank, (_, out) in enumerate(found):
        x, z = rank % 2, rank // 2
        torch.testing.assert_close(out, whole.chunk(2)[z].chunk(2, dim=1)[x])


def test_step_learns_and_communicates_what_was_predicted(ranks) -> None:
    found = ranks(4).run(step)
    assert found[0]["losses"][-1] < found[0]["losses"][0]
    for rank, result in enumerate(found):
        assert result["losses"] == found[0]["losses"]
        sizes = LocalSizes(ff.models.config("gpt-tiny"), SHAPE, Policy(), rows=2, seq=16, rank=rank)
        assert Counter(result["records"]) == Counter(step_program(sizes).records)

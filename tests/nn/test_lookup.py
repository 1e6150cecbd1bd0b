"""Tokens that go to the embedding's table, beside a table that goes to the tokens: the same results, fewer bytes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.grid import Shape
from fourfold.nn.embedding import looks_up_in_place
from fourfold.params import local_of
from fourfold.policy import Overlap, Policy
from harness import grid_of

VOCAB, WIDTH = 101, 8


def embed(shape: Shape, tokens: int, *, even: bool, untrained: int | None, frozen: bool, **policy: Any) -> dict:
    """One pass of an embedding of this rank's tokens: what it returns, its gradient, and the bytes over z."""
    grid, options = grid_of(shape), Policy(even_tokens=even, **policy)
    layer = ff.nn.Embedding(grid, options, VOCAB, WIDTH, untrained=untrained)
    ff.nn.assemble(layer, grid, options, seed=7, dtype=torch.float64)
    layer.weight.requires_grad_(not frozen)
    place = grid.coords["z"] + shape.z * grid.coords["data"]
    ids = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(place), dtype=torch.int32)
    ids[:1] = 5  # a frequent token
    with grid.ledger.watch() as records:
        out = layer(ids)
        if not frozen:
            (out * torch.arange(float(WIDTH // shape.y))).sum().backward()
    gradient = None if frozen else local_of(layer.weight.grad).clone()
    sent = sum(record.nbytes for record in records if record.axis == "z")
    return {"out": out.detach(), "gradient": gradient, "sent": sent, "records": [record.op for record in records]}


@pytest.mark.parametrize("shape", [Shape(z=4), Shape(x=2, z=2), Shape(y=2, z=2), Shape(z=2, data=2)], ids=str)
@pytest.mark.parametrize("frozen", [False, True])
def test_both_ways_find_the_same_rows_and_gradients(ranks, shape: Shape, frozen: bool) -> None:
    for options in ({"untrained": None}, {"untrained": 5}, {"untrained": 100, "activations": "replicated"}):
        given = {"frozen": frozen, **options}
        gathered = ranks(4).run(partial(embed, even=False, **given), shape, 6)
        in_place = ranks(4).run(partial(embed, even=True, **given), shape, 6)
        for one, other in zip(gathered, in_place, strict=True):
            assert torch.equal(one["out"], other["out"])
            assert other["sent"] < one["sent"]
            if not frozen:
                torch.testing.assert_close(one["gradient"], other["gradient"], rtol=1e-13, atol=1e-13)


def test_the_smaller_message_is_sent() -> None:
    policy = Policy(even_tokens=True)
    assert looks_up_in_place(policy, Shape(z=4), 50257, 8192)
    assert not looks_up_in_place(policy, Shape(z=4), 50257, 16384)
    assert looks_up_in_place(policy, Shape(z=2, x=2), 50257, 8192)
    assert not looks_up_in_place(policy, Shape(z=2, x=4), 50257, 8192)
    assert not looks_up_in_place(policy, Shape(x=4), 50257, 1)
    assert not looks_up_in_place(Policy(), Shape(z=4), 50257, 1)


def give_unequal_rows() -> str:
    grid = grid_of(Shape(z=2, data=2))
    model = ff.models.build("gpt-tiny", grid, policy=Policy(even_tokens=True))
    tokens = torch.zeros(1 + grid.coords["z"], 4, dtype=torch.long)
    try:
        model(tokens, tokens)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def test_places_with_other_numbers_of_tokens_are_refused(ranks) -> None:
    for rank, said in enumerate(ranks(4).run(give_unequal_rows)):
        assert "tokens and another place along z has another number" in said, (rank, said)


def wrap_and_train(even: bool) -> list[Tensor]:
    """Two steps of a module with an embedding that has a padding index, cut by `ff.parallelize`."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(VOCAB, WIDTH, padding_idx=3), nn.Linear(WIDTH, WIDTH)).double()
    grid = grid_of(Shape(x=2, z=2))
    model = ff.parallelize(module, grid, policy=Policy(even_tokens=even, overlap=Overlap(halves=1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[3, 5, 5], [7, 3, 100]]).roll(grid.coords["z"])
    for _ in range(2):
        optimizer.zero_grad()
        model(ids).square().mean().backward()
        optimizer.step()
    return [local_of(parameter).detach().clone() for parameter in model.parameters()]


def test_a_wrapped_embedding_with_padding_trains_the_same(ranks) -> None:
    for one, other in zip(ranks(4).run(wrap_and_train, False), ranks(4).run(wrap_and_train, True), strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)

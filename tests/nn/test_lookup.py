"""Tokens that go to the embedding's table, beside a table that goes to the tokens: the same results, fewer bytes."""

from __future__ import annotations

from collections import OrderedDict
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
from share import others_slow

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


SHAPES = [Shape(z=4), Shape(x=2, z=2), Shape(y=2, z=2), Shape(z=2, data=2)]


@pytest.mark.parametrize("case", others_slow([*((shape, False) for shape in SHAPES), (SHAPES[1], True)], 2), ids=str)
def test_both_ways_find_the_same_rows_and_gradients(ranks, case: tuple[Shape, bool]) -> None:
    shape, frozen = case
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


def train_unequal_halves(even: bool) -> Tensor:
    """The gradient of the table from rows that are cut into a half of 2 rows and a half of 1."""
    grid, options = grid_of(Shape(x=2, z=2)), Policy(even_tokens=even, overlap=Overlap(halves=2))
    config = ff.models.config("gpt-tiny", vocab=50, tied=False)
    assert not looks_up_in_place(options, grid.shape, config.vocab, 2 * 8)
    assert looks_up_in_place(options, grid.shape, config.vocab, 8) is even
    model = ff.models.build(config, grid, policy=options, dtype=torch.float64)
    tokens = torch.randint(50, (3, 8), generator=torch.Generator().manual_seed(grid.coords["z"]))
    model(tokens, tokens).backward()
    return local_of(model.embedding.weight.grad).clone()


def test_unequal_halves_look_up_in_the_same_way(ranks) -> None:
    gathered, in_place = (ranks(4).run(train_unequal_halves, even) for even in (False, True))
    for one, other in zip(gathered, in_place, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)


def what_a_model_says(model: nn.Module, *batch: Tensor) -> str:
    try:
        model(*batch)
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def give_unequal_rows(lines: int) -> str:
    """Give the places along z different numbers of rows, in the first `lines` of the two replicas."""
    grid = grid_of(Shape(z=2, data=2))
    model = ff.models.build("gpt-tiny", grid, policy=Policy(even_tokens=True))
    rows = 1 + grid.coords["z"] if grid.coords["data"] < lines else 1
    tokens = torch.zeros(rows, 4, dtype=torch.long)
    return what_a_model_says(model, tokens, tokens)


@pytest.mark.parametrize("lines", [1, 2])
def test_places_with_other_numbers_of_tokens_are_refused(ranks, lines: int) -> None:
    for rank, said in enumerate(ranks(4).run(give_unequal_rows, lines)):
        assert "places along z have different numbers of tokens" in said, (rank, said)


def embed_and_mix() -> nn.Module:
    """An embedding, under a name by which `ff.parallelize` knows that it is one of tokens, and a linear layer."""
    layers = {"wte": nn.Embedding(VOCAB, WIDTH, padding_idx=3), "mix": nn.Linear(WIDTH, WIDTH)}
    return nn.Sequential(OrderedDict(layers)).double()


def give_wrapped_unequal_rows() -> str:
    grid = grid_of(Shape(x=2, z=2))
    model = ff.parallelize(embed_and_mix(), grid, policy=Policy(even_tokens=True))
    return what_a_model_says(model, torch.zeros(1 + grid.coords["z"], 4, dtype=torch.long))


def test_a_wrapped_embedding_refuses_other_numbers_of_tokens(ranks) -> None:
    for rank, said in enumerate(ranks(4).run(give_wrapped_unequal_rows)):
        assert "places along z have different numbers of tokens" in said, (rank, said)


def give_one_place_no_batch() -> list[str]:
    """What is said of a first and a later batch that is no matrix at one place along z."""
    grid = grid_of(Shape(z=2))
    model = ff.models.build(ff.models.config("gpt-tiny", vocab=200), grid, policy=Policy(even_tokens=True))
    tokens = torch.zeros(2, 4, dtype=torch.long)
    broken = [tokens, tokens] if grid.coords["z"] == 0 else [tokens.flatten(), tokens[:0]]
    return [what_a_model_says(model, each, each) for each in (broken[0], tokens, *broken)]


def test_a_batch_of_a_wrong_shape_at_one_place_is_refused_everywhere(ranks) -> None:
    here, there = ranks(2).run(give_one_place_no_batch)
    assert there[0] == there[2] == "tokens has shape (8,); it must be [rows, seq] with at least one of each"
    assert there[3] == "tokens has shape (0, 4); it must be [rows, seq] with at least one of each"
    assert here[1] == there[1] == "nothing was raised"
    assert "places along z have different numbers of tokens" in here[0]
    assert all("the batch of another place was refused" in said for said in here[2:])


def wrap_and_train(even: bool) -> tuple[list[Tensor], int]:
    """Two steps of a module with an embedding that has a padding index: the parameters, and the bytes over z."""
    torch.manual_seed(0)
    grid = grid_of(Shape(x=2, z=2))
    model = ff.parallelize(embed_and_mix(), grid, policy=Policy(even_tokens=even, overlap=Overlap(halves=1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.tensor([[3, 5, 5], [7, 3, 100]]).roll(grid.coords["z"])
    with grid.ledger.watch() as records:
        for _ in range(2):
            optimizer.zero_grad()
            model(ids).square().mean().backward()
            optimizer.step()
    sent = sum(record.nbytes for record in records if record.axis == "z")
    return [local_of(parameter).detach().clone() for parameter in model.parameters()], sent


def test_a_wrapped_embedding_with_padding_trains_the_same(ranks) -> None:
    for one, other in zip(ranks(4).run(wrap_and_train, False), ranks(4).run(wrap_and_train, True), strict=True):
        assert other[1] < one[1]
        for a, b in zip(one[0], other[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)

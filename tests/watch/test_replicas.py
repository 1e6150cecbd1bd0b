"""Replicas that differ are found, and named."""

from __future__ import annotations

import pytest
import torch

import fourfold as ff
from fourfold.errors import FailedElsewhereError, ReplicasDifferError
from fourfold.grid import Shape
from fourfold.params import local_of
from fourfold.watch.replicas import INTEGERS, check_replicas, checksum, unlike
from harness import grid_of


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    tensors = [torch.randn(5, 3).to(dtype), torch.randn(7).to(dtype)]
    before = int(checksum(tensors))
    bits = tensors[0].view(INTEGERS[dtype.itemsize])
    for bit in range(8 * dtype.itemsize):
        flip = torch.tensor(1 << bit if bit < 8 * dtype.itemsize - 1 else -(1 << bit), dtype=bits.dtype)
        bits[2, 1] ^= flip
        assert int(checksum(tensors)) != before
        bits[2, 1] ^= flip
    assert int(checksum(tensors)) == before


def test_a_change_in_two_parameters_does_not_cancel() -> None:
    one, other = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    assert int(checksum([one, other + 1])) != int(checksum([one + 1, other]))


@pytest.mark.parametrize(
    ("sums", "places"),
    [([4, 4], []), ([4, 5], [0, 1]), ([4, 5, 4], [1]), ([4, 5, 6], [0, 1, 2]), ([4, 4, 5, 5], [0, 1, 2, 3])],
)
def test_the_minority_differs(sums: list[int], places: list[int]) -> None:
    assert unlike(sums) == places


def flipped(shape: Shape, rank: int | None) -> str:
    """What a rank says once a bit of one rank's parameters was flipped."""
    grid = grid_of(shape)
    model = ff.models.build("gpt-tiny", grid)
    if grid.rank == rank:
        local_of(next(model.parameters())).view(torch.int32)[0, 0] ^= 1
    sent = grid.ledger.calls.total()
    try:
        check_replicas(model, grid)
    except (ReplicasDifferError, FailedElsewhereError) as error:
        return str(error)
    assert grid.ledger.calls.total() == sent, "a check belongs to no step"
    return ""


def test_equal_replicas_pass(ranks) -> None:
    assert ranks(4).run(flipped, Shape(x=2, data=2), None) == [""] * 4


def test_the_rank_that_differs_is_named_on_all_ranks(ranks) -> None:
    found = ranks(3).run(flipped, Shape(data=3), 1)
    assert all("parameters of rank 1 differ from the other replicas of ranks 0, 1, 2" in said for said in found)
    found = ranks(4).run(flipped, Shape(x=2, data=2), 3)
    assert all("parameters of ranks 1, 3 differ from each other" in said for said in found)

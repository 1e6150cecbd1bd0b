"""A rank or link that is slower than its peers is named, and so is a replica that differs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import fourfold as ff
from fourfold.checkpoint.training_state import model_shards
from fourfold.errors import FailedElsewhereError, ReplicasDifferError
from fourfold.grid import Shape
from fourfold.params import local_of
from fourfold.replicas import INTEGERS, unlike
from fourfold.watch.peers import (
    COMPUTE,
    IN_A_ROW,
    Copies,
    StepTimes,
    Straggler,
    Stragglers,
    check_replicas,
    checksum,
    slow,
)
from harness import grid_of

SHAPE = Shape(x=2, z=4)


def slow_rank(rank: int, by: float = 0.3) -> list[StepTimes]:
    """All compute for a second, that one longer; the others wait for it, its peer along x there, all others along z."""
    peer = next(one for one in SHAPE.ranks_along("x", rank) if one != rank)
    samples = [StepTimes(1.0, {"x": 0.02, "z": 0.05 + by}) for _ in range(8)]
    samples[rank], samples[peer] = (
        StepTimes(1.0 + by, {"x": 0.02, "z": 0.05}),
        StepTimes(1.0, {"x": 0.02 + by, "z": 0.05}),
    )
    return samples


def slow_link(group: Sequence[int], axis: str, by: float = 0.3) -> list[StepTimes]:
    """The ranks of that group wait for its link; the others for these, along the other axis."""
    other = "z" if axis == "x" else "x"
    return [StepTimes(1.0, {axis: 0.05 + by * (rank in group), other: by * (rank not in group)}) for rank in range(8)]


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_that_computes_slowly_is_named(rank: int) -> None:
    assert list(slow(slow_rank(rank), SHAPE)) == [Straggler(COMPUTE, (rank,), pytest.approx(1.3), pytest.approx(1.0))]


@pytest.mark.parametrize("rank", range(0, 8, 2))
def test_a_slow_link_is_named_by_its_group(rank: int) -> None:
    group = tuple(SHAPE.ranks_along("x", rank))
    [found] = slow(slow_link(group, "x"), SHAPE)
    assert (found.kind, found.ranks) == ("x", group)
    assert str(found) == (
        f"the link of ranks {group[0]}, {group[1]} along x is slow: waiting for it takes 350 ms per step where its "
        "peers take 50"
    )


def test_what_is_a_little_slower_is_noise() -> None:
    assert not list(slow(slow_rank(3, by=0.1), SHAPE))
    assert not list(slow(slow_link((2, 3), "x", by=0.1), SHAPE))


def test_who_is_slow_for_long_is_named_once() -> None:
    stragglers = Stragglers(SHAPE)
    told = [stragglers.add(slow_rank(5)) for _ in range(2 * IN_A_ROW)]
    assert [len(found) for found in told] == [0] * (IN_A_ROW - 1) + [1] + [0] * IN_A_ROW
    assert str(told[IN_A_ROW - 1][0]) == "rank 5 is slow: its own work takes 1300 ms per step where its peers take 1000"


def test_a_good_window_begins_anew() -> None:
    stragglers = Stragglers(SHAPE)
    for samples in (slow_rank(5), slow_rank(5), slow_rank(4), slow_rank(5), slow_rank(5)):
        assert not stragglers.add(samples)
    assert stragglers.add(slow_rank(5))


def test_two_ranks_have_a_median_between_them() -> None:
    samples = [StepTimes(1.0, {"x": 0.5}), StepTimes(1.5, {"x": 0.0})]
    assert [found.ranks for found in slow(samples, Shape(x=2))] == [(1,)]


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
    copies = Copies("embedding.weight", (0, shape.pipe - 1)) if shape.pipe > 1 else None
    if grid.rank == rank:
        local_of(next(model.parameters())).view(torch.int32)[0, 0] ^= 1
    sent = grid.ledger.calls.total()
    try:
        check_replicas(model_shards(model), grid, copies)
    except (ReplicasDifferError, FailedElsewhereError) as error:
        return str(error)
    assert grid.ledger.calls.total() == sent, "a check belongs to no step"
    return ""


def test_equal_replicas_pass(ranks) -> None:
    assert ranks(4).run(flipped, Shape(x=2, data=2), None) == [""] * 4


def test_the_rank_that_differs_is_named_on_all_ranks(ranks) -> None:
    found = ranks(3).run(flipped, Shape(data=3), 1)
    assert all(
        "parameters or optimizer state of rank 1 differ from the other replicas of ranks 0, 1, 2" in said
        for said in found
    )
    found = ranks(4).run(flipped, Shape(x=2, data=2), 3)
    assert all("parameters or optimizer state of ranks 1, 3 differ from each other" in said for said in found)


def test_pipe_ranks_compare_the_table_that_both_ends_hold(ranks) -> None:
    """The other parameters differ by pipe rank, and only their replicas along data are alike."""
    pool = ranks(4)
    assert pool.run(flipped, Shape(data=2, pipe=2), None) == pool.run(flipped, Shape(x=2, pipe=2), None) == [""] * 4
    found = pool.run(flipped, Shape(x=2, pipe=2), 3)
    assert all("parameters or optimizer state of ranks 1, 3 differ from each other" in said for said in found)

"""Who is slower than its peers, from samples of windows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fourfold.grid import Shape
from fourfold.watch.stragglers import COMPUTE, IN_A_ROW, StepTimes, Straggler, Stragglers, slow

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

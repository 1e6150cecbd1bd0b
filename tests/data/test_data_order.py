"""The order of samples: permutations, shares, epochs, held-out parts, and positions to go on from."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest

from fourfold.axes import AXES
from fourfold.data.sampling import Permutation, SampleOrder, SourceWindows, cut_windows, rows_of
from fourfold.shape import Shape, shapes_of


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 97, 256, 257, 1009])
def test_permutation_visits_each_number_once(n: int) -> None:
    for key in range(3):
        order = Permutation(n, key)
        assert sorted(order(place) for place in range(n)) == list(range(n))


def test_permutation_differs_by_key_and_is_the_same_on_every_machine() -> None:
    assert len({tuple(Permutation(50, key)(place) for place in range(50)) for key in range(60)}) == 60
    assert [Permutation(10, 1)(place) for place in range(10)] == [8, 4, 6, 7, 1, 5, 2, 3, 0, 9]


def test_permutation_puts_every_number_in_every_place() -> None:
    """Over 1000 keys a number is in a place 200 times on average, with a deviation of 13; 5 of them are allowed."""
    for place in range(5):
        counts = Counter(Permutation(5, key)(place) for key in range(1000))
        assert set(counts) == set(range(5)) and all(abs(count - 200) < 65 for count in counts.values())


def test_permutation_of_more_than_fits_into_memory() -> None:
    order = Permutation(10**15 + 7, 3)
    found = [order(place) for place in range(1000)]
    assert len(set(found)) == 1000 and 10**14 < max(found) < 10**15 + 7
    for place in (-1, 10**15 + 7):
        with pytest.raises(IndexError, match="outside of a permutation of 1000000000000007 numbers"):
            order(place)
    with pytest.raises(ValueError, match="cannot permute 0 numbers"):
        Permutation(0, 1)


def parts(*windows: int) -> list[SourceWindows]:
    return [cut_windows(f"source-{number}", count * 4 + 1, 4) for number, count in enumerate(windows)]


@pytest.mark.parametrize(
    "weights",
    [
        [1],
        [1, 1],
        [3, 1],
        [0.7, 0.2, 0.1],
        [1e-3, 1],
        [1, 1, 5, 200, 3, 1, 200, 50],  # giving to whoever is furthest behind misses a share by 1.36 here
        [1 / 3, 2 / 3, 1],
    ],
)
def test_no_source_is_a_sample_away_from_its_share(weights: list[float]) -> None:
    order = SampleOrder(parts(*[10] * len(weights)), weights, 0)
    shares = [Fraction(str(weight)) / sum(Fraction(str(other)) for other in weights) for weight in weights]
    for count in range(1, 1001):
        order.take(1)
        assert sum(order.given) == order.sample == count
        assert all(abs(share * count - given) < 1 for share, given in zip(shares, order.given, strict=True))


def test_an_epoch_visits_each_window_once_in_an_order_of_its_own() -> None:
    def windows(order: SampleOrder, source: int, epoch: int) -> list[int]:
        return [order.window(source, epoch * 40 + place) for place in range(40)]

    orders = [SampleOrder(parts(40, 40), None, seed) for seed in (0, 1)]
    found = [windows(order, source, epoch) for order in orders for source in (0, 1) for epoch in (0, 1, 2)]
    assert all(sorted(one) == list(range(40)) for one in found)
    assert len({tuple(one) for one in found}) == len(found)
    assert windows(SampleOrder(parts(40, 9), [5, 1], 1), 0, 2) == windows(orders[1], 0, 2)  # whatever the others are


def test_windows_and_held_out_part_by_hand() -> None:
    assert cut_windows("a", 2, 8) == SourceWindows("a", 2, 8, windows=1, train=1)
    assert cut_windows("a", 9, 8) == SourceWindows("a", 9, 8, windows=1, train=1)  # 8 inputs and the last target
    assert cut_windows("a", 10, 8) == SourceWindows("a", 10, 8, windows=2, train=2)
    assert cut_windows("a", 801, 8, 0.29) == SourceWindows(
        "a", 801, 8, windows=100, train=71
    )  # 0.29 * 100 is below 29 in floats
    assert cut_windows("a", 81, 8, 0.001) == SourceWindows("a", 81, 8, windows=10, train=9)
    assert cut_windows("a", 81, 8, 0.999) == SourceWindows("a", 81, 8, windows=10, train=1)
    assert cut_windows("a", 10, 8, 0.5).train == 1
    for tokens, held_out, needed in ((0, 0, 2), (1, 0, 2), (9, 0.1, 10)):
        with pytest.raises(ValueError, match=f"source a of {tokens} tokens is too short: .* need {needed} tokens"):
            cut_windows("a", tokens, 8, held_out)
    for seq, held_out in ((0, 0.1), (8, 1.0), (8, -0.1)):
        with pytest.raises(ValueError, match=f"seq={seq} must be .* held_out={held_out}"):
            cut_windows("a", 100, seq, held_out)


def test_order_goes_on_from_a_stored_position() -> None:
    order = SampleOrder(parts(7, 11, 3), [3, 2, 1], 5)
    order.take(100)
    stored = json.loads(json.dumps(order.state()))
    expected = order.take(50)
    fresh = SampleOrder(parts(7, 11, 3), [0.3, 0.2, 0.1], 5)  # the same shares
    fresh.restore(stored)
    assert fresh.take(50) == expected
    assert fresh.state() == order.state()


@pytest.mark.parametrize(
    ("sources", "weights", "seed", "message"),
    [
        (parts(7, 11), None, 6, "seed was 5, is 6;"),
        (parts(7, 12), None, 5, "tokens of source 1 was 45, is 49; trained windows of source 1 was 11, is 12;"),
        (parts(7), None, 5, "number of sources was 2, is 1;"),
        (parts(7, 11), [1, 2], 5, r"weights was \[1, 1\], is \[1, 2\];"),
        ([cut_windows("other", 29, 4), parts(7, 11)[1]], None, 5, "name of source 0 was source-0, is other;"),
        ([cut_windows("source-0", 29, 2), cut_windows("source-1", 45, 2)], None, 5, "seq was 4, is 2;"),
        ([parts(7)[0], cut_windows("source-1", 45, 4, 0.1)], None, 5, "trained windows of source 1 was 11, is 10;"),
    ],
)
def test_position_of_other_data_is_refused(sources: list[SourceWindows], weights: Any, seed: int, message: str) -> None:
    state = SampleOrder(parts(7, 11), None, 5).state()
    with pytest.raises(ValueError, match=f"differs from the data of the saved position: .*{message}.* start a new run"):
        SampleOrder(sources, weights, seed).restore(state)


def test_what_is_no_position_is_refused() -> None:
    order = SampleOrder(parts(7, 11), None, 5)
    for state in ({}, {"sample": 1}, None):
        with pytest.raises(ValueError, match="not a saved position in the data"):
            order.restore(state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[1, 0\] samples of each source do not add up to 0"):
        order.restore({**order.state(), "given": [1, 0]})


def test_weights_that_mean_nothing_are_refused() -> None:
    for weights, message in (
        ([1], "1 weights for 2 sources"),
        ([1, 0], "0 is not a finite number above 0"),
        ([1, -2], "-2 is not a finite number above 0"),
        ([1, float("nan")], "nan is not a finite number above 0"),
        ([1, float("inf")], "inf is not a finite number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            SampleOrder(parts(3, 3), weights, 0)
    with pytest.raises(ValueError, match="no source"):
        SampleOrder([], None, 0)


@pytest.mark.parametrize("order", [AXES, ("data", "z", "y", "x")], ids=str)
@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
def test_places_cut_a_step_whatever_the_micro_steps(world: int, order: tuple[str, ...]) -> None:
    """Every row once over data, z and micro-steps; the same on ranks that differ in x and y alone."""
    for shape in shapes_of(world, order):
        for micro_steps in (1, 2, 3):
            found: dict[tuple[int, int], list[list[int]]] = {}
            for rank in range(world):
                mine = [list(rows) for rows in rows_of(shape, rank, 144, micro_steps)]
                coords = shape.coords(rank)
                assert found.setdefault((coords["data"], coords["z"]), mine) == mine
            assert [row for place in sorted(found) for rows in found[place] for row in rows] == list(range(144))
            assert all(len(rows) == len(mine) and len(mine) == micro_steps for rows in found.values())


def test_rows_that_cannot_be_cut_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of 8 rows cannot be cut over data\*z\*micro_steps = 2\*1\*3; .* such as 12"):
        rows_of(Shape(data=2), 0, 8, 3)

"""The published communication model against numbers worked by hand, and against its own laws; the published system
replayed by the benchmark that validates the planner."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.planner import choices, published_runs, replay, validate
from benchmarks.planner import judge as judging
from benchmarks.planner.judge import Compared, Judge
from benchmarks.planner.published_runs import Fit
from benchmarks.shared.published import (
    PublishedLayer,
    layer_elements,
    layers_of,
    published_bandwidth,
    published_ranking,
    published_seconds,
)
from fourfold.axes import CUTS
from fourfold.models.config import config
from fourfold.planner.machine import LinkSpeed, Machine, load_machine
from fourfold.planner.price import Candidate, Task, price, timeline
from fourfold.shape import Shape, shapes_of


def flat(bandwidth: float = 1e9) -> Machine:
    """All devices on one node, every ring as fast as any other."""
    machine = load_machine("frontier")
    return replace(machine, devices_per_node=1 << 20, inside={(1, 2): LinkSpeed(bandwidth, 0.0)}, between=None)


def test_bytes_of_one_layer_are_the_published_ones() -> None:
    """m=16, k=32, n=64 in fp32 on (2, 2, 2): buffers of 2048 over z, 1024 over y, 512 over x; each rank sends half of
    a gather's or reduce-scatter's buffer and the whole of an all-reduce's."""
    sent = layer_elements(PublishedLayer(32, 64), Shape(x=2, y=2, z=2), 16)
    assert {axis: 4 * number for axis, number in sent.items()} == {
        "x": 512,
        "y": 1024,
        "z": 2048 / 2 + 2048 / 2,
        "data": 0,
    }


def test_a_transposed_layer_swaps_x_and_y() -> None:
    grid, swapped = Shape(x=2, y=4, z=2, data=3), Shape(x=4, y=2, z=2, data=3)
    ordinary, transposed = (
        layer_elements(PublishedLayer(32, 64), swapped, 16),
        layer_elements(PublishedLayer(32, 64, True), grid, 16),
    )
    assert (ordinary["x"], ordinary["y"]) == (transposed["y"], transposed["x"])
    assert (ordinary["z"], ordinary["data"]) == (transposed["z"], transposed["data"])


def test_a_gpt_block_sends_the_published_sums() -> None:
    """12 h m_z / x over y and 4 h m_z / y over x, 12 h^2/(x y) over z each way, 12 h^2/(x y z) over data."""
    gpt, shape, m = config("gpt-5b"), Shape(x=4, y=2, z=8, data=16), 4096
    sums = dict.fromkeys(CUTS, 0.0)
    for layer in layers_of(gpt):
        for axis, number in layer_elements(layer, shape, m).items():
            sums[axis] += number
    h, m_z = gpt.hidden, m / 8
    assert sums["y"] == pytest.approx(2 * 1 / 2 * 12 * h * m_z / 4)
    assert sums["x"] == pytest.approx(2 * 3 / 4 * 4 * h * m_z / 2)
    assert sums["z"] == pytest.approx(2 * 7 / 8 * 12 * h**2 / 8)
    assert sums["data"] == pytest.approx(2 * 15 / 16 * 12 * h**2 / 64)


def test_bandwidths_are_the_published_table() -> None:
    perlmutter, frontier = load_machine("perlmutter"), load_machine("frontier")
    shape = Shape(x=2, y=2, z=8, data=4)
    assert [published_bandwidth(perlmutter, shape, axis) / 1e9 for axis in CUTS] == [76, 76, 20, 20]
    assert [published_bandwidth(frontier, shape, axis) / 1e9 for axis in CUTS] == [129, 50, 10, 5]
    assert published_bandwidth(frontier, Shape(x=8, z=4), "x") == 135e9
    assert published_bandwidth(perlmutter, Shape(z=8), "z") == 80e9
    assert published_bandwidth(perlmutter, Shape(z=8), "x") == math.inf
    assert published_bandwidth(perlmutter, Shape(x=4, z=2, order=("z", "x", "y", "data")), "z") == 76e9
    with pytest.raises(ValueError, match=r"axis z=16 .* leaves the one node of 8 devices that h200-node is"):
        published_bandwidth(load_machine("h200-node"), Shape(z=16), "z")


def test_seconds_worked_by_hand() -> None:
    """GPT-5B (24 layers, h = 4096) on 64 A100, x=4 inside a node, z=4 and data=4 across: 64 rows of 2048 tokens."""
    found = published_seconds(config("gpt-5b"), Shape(x=4, z=4, data=4), 64, 2048, load_machine("perlmutter"))
    m_z = 64 * 2048 / 16
    assert found["x"] == pytest.approx(24 * 2 * 3 / 4 * 4 * 4096 * m_z * 2 / 225e9)
    assert found["x"] == pytest.approx(0.0429497, rel=1e-5)
    assert found["y"] == 0
    assert found["z"] == pytest.approx(24 * 2 * 3 / 4 * 12 * 4096**2 / 4 * 2 / 20e9)
    assert found["z"] == pytest.approx(0.1811939, rel=1e-5)
    assert found["data"] == pytest.approx(24 * 2 * 3 / 4 * 12 * 4096**2 / 16 * 4 / 20e9)
    assert found["data"] == pytest.approx(0.0905970, rel=1e-5)


@pytest.mark.parametrize("side", [1, 2, 3, 4, 7])
def test_at_a_fixed_product_the_best_split_is_three_to_one(side: int) -> None:
    gpt = config("gpt-80b")
    splits = [shape for shape in shapes_of(3 * side**2) if shape.z == shape.data == 1]
    best = min(splits, key=lambda shape: sum(published_seconds(gpt, shape, 8, 2048, flat()).values()))
    assert (best.x, best.y) == (3 * side, side)


def test_the_ranking_holds_every_grid_that_fits_and_rises() -> None:
    gpt, machine = config("gpt-20b"), load_machine("perlmutter")
    ranked = published_ranking(gpt, 32, 64, 2048, machine)
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    fits = [s for s in shapes_of(32) if gpt.heads % s.x == 0 and gpt.hidden % s.y == 0 and 64 % (s.z * s.data) == 0]
    assert {one.shape for one in ranked} == set(fits)
    assert len(fits) < len(list(shapes_of(32)))  # 56 heads are not cut by 16 or 32
    assert ranked[0].seconds == sum(published_seconds(gpt, ranked[0].shape, 64, 2048, machine).values())


def test_faster_links_scale_the_seconds() -> None:
    gpt, shape = config("gpt-5b"), Shape(x=2, y=2, z=2, data=2)
    slow, fast = (published_seconds(gpt, shape, 16, 2048, flat(bandwidth)) for bandwidth in (1e9, 4e9))
    for axis in CUTS:
        assert slow[axis] == pytest.approx(4 * fast[axis])


# --- the published system on our simulator


def published_run(micro_steps: int, **overlaps: bool) -> tuple[Task, Candidate]:
    task = Task(config("gpt-5b"), load_machine("perlmutter"), 16 * 4 * micro_steps, 2048)
    return task, Candidate(Shape(x=4, z=4, data=4), replay.policy_of(**overlaps), 4, micro_steps)


@pytest.mark.parametrize("micro_steps", [1, 2, 5])
@pytest.mark.parametrize("overlaps", [True, False], ids=["overlaps", "none"])
def test_without_gathers_ahead_a_replay_is_the_whole_step(micro_steps: int, overlaps: bool) -> None:
    task, choice = published_run(micro_steps, wgrad_behind_messages=overlaps, defer=overlaps, prefetch=False)
    whole, found = timeline(task, choice).totals, replay.replay(task, choice)
    assert found.seconds == pytest.approx(whole.seconds, rel=1e-9)
    assert found.compute == pytest.approx(whole.compute, rel=1e-9)
    assert sum(found.exposed.values()) == pytest.approx(sum(whole.exposed.values()), rel=1e-9)


def test_gathers_ahead_in_forward_alone_lie_between() -> None:
    task, ahead = published_run(1)
    _, blocking = published_run(1, prefetch=False)
    found = replay.replay(task, ahead).seconds
    assert price(task, ahead).seconds < found < price(task, blocking).seconds


def test_a_replay_takes_as_few_micro_steps_as_fit() -> None:
    task, choice = published_run(16)
    small = replace(task, machine=replace(task.machine, memory=24 * 10**9, reserve=0))
    found = replay.fewest_micro_steps(small, choice.shape, choice.policy)
    assert found is not None and found.rows * found.micro_steps == 64
    assert replay.memory_of(small, found).total <= 24 * 10**9
    larger = replace(found, rows=2 * found.rows, micro_steps=found.micro_steps // 2)
    assert replay.memory_of(small, larger).total > 24 * 10**9
    tiny = replace(task, machine=replace(task.machine, memory=10**9, reserve=0))
    assert replay.fewest_micro_steps(tiny, choice.shape, choice.policy) is None


def test_the_fit_finds_the_least() -> None:
    found = replay.descend(Fit(1.0, 1.0), lambda fit: math.log(fit.attention / 0.2) ** 2 + (fit.congestion - 2) ** 2)
    assert found.attention == pytest.approx(0.2, rel=0.02)
    assert found.congestion == pytest.approx(2, rel=0.02)


def test_the_fit_ends_where_a_constant_is_best_at_zero() -> None:
    found = replay.descend(replay.START, lambda fit: (1 + math.log(fit.attention) ** 2) * (1 + fit.congestion))
    assert found.attention == pytest.approx(1, rel=0.02)
    assert found.congestion < replay.NO_CONGESTION


def test_fitted_constants_are_two_and_points_are_held_out() -> None:
    machine = load_machine("frontier")
    fitted = replay.fitted_machine(machine, Fit(0.5, 2.0))
    as_before = replace(fitted, name=machine.name, attention=2 * fitted.attention, congestion=machine.congestion)
    assert as_before == machine
    for name in published_runs.FITTED:
        assert load_machine(name).sources["congestion"].startswith("fitted: ")
        kinds = [point.fitted for point in published_runs.POINTS if point.machine == name]
        assert sum(kinds) >= 2 and not all(kinds)


def test_errors_may_not_grow_and_misses_need_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "CAUSES", {"known": "the grid"})
    judge = Judge({"known": 0.30, "new": 0.02, "good": 0.02})
    judge.add(Compared("good", 0.976, 1.0))  # half a point is allowed
    judge.add(Compared("known", 1.3, 1.0))
    assert not judge.failures
    assert judge.misses == ["known: +30.0%, target 15%. Suspected: the grid"]
    judge.add(Compared("good", 1.03, 1.0))
    judge.add(Compared("new", 1.2, 1.0))
    judge.add(Compared("never seen", 1.0, 1.0))
    assert judge.failures == [
        "good: the error has grown from 2.0% to 3.0%",
        "new: the error has grown from 2.0% to 20.0%",
        "new: +20.0%, target 15%, and published_runs.py gives no cause",
        "never seen: no error is recorded; check it, then run with --record",
    ]


def test_both_benchmarks_of_the_search_have_the_same_limits() -> None:
    assert validate.SPEED is choices.SPEED
    assert choices.SEQ is published_runs.SEQ

"""Times of schedules: messages, lanes, uneven and empty stages, sums of gradients."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fourfold.schedule.action import Action, Schedule
from fourfold.schedule.named import BUILDERS, named
from fourfold.schedule.play import ActionSpan, Played, equal_seconds, hop_seconds, play


def by_hand(played: Played) -> dict[Action, tuple[float, float]]:
    return {span.action: (span.start, span.end) for spans in played.spans for span in spans}


def test_one_micro_batch_is_the_sum_of_its_path() -> None:
    seconds = {"F": [1.0, 2.0, 3.0], "B": [4.0, 5.0, 6.0], "W": [7.0, 8.0, 9.0]}
    played = play(named("zb-h1", 3, 1, 1), seconds, hop=[0.5, 0.25])
    found = by_hand(played)
    assert found[Action("F", 2, 0)] == pytest.approx((1 + 0.5 + 2 + 0.25, 6.75))
    assert found[Action("B", 1, 0)] == pytest.approx((6.75 + 6 + 0.25, 18))
    assert found[Action("B", 0, 0)] == pytest.approx((18.5, 22.5))
    assert played.makespan == pytest.approx(29.5)
    assert played.work == pytest.approx((12, 15, 18))
    assert played.idle == pytest.approx((17.5, 14.5, 11.5))
    assert played.idle_share == pytest.approx(43.5 / (3 * 29.5))
    whole = play(named("1f1b", 3, 1, 1), seconds, hop=[0.5, 0.25])  # BW sends what B has when W has ended too
    assert whole.makespan == pytest.approx(6.75 + 15 + 0.25 + 13 + 0.5 + 11)


def test_messages_of_a_lane_travel_one_after_another() -> None:
    """The sender has three F after 1, 2 and 3 s; each message takes 2 s."""
    seconds = {"F": [1.0, 0.1], "B": [1.0, 1.0], "W": [1.0, 1.0]}
    found = by_hand(play(named("gpipe", 2, 1, 3), seconds, hop=2))
    assert [found[Action("F", 1, micro)][0] for micro in range(3)] == pytest.approx([3, 5, 7])


def test_messages_on_one_rank_take_no_time() -> None:
    schedule = named("v-half", 2, 2, 1)
    assert schedule.placement == (0, 1, 1, 0)
    found = by_hand(play(schedule, equal_seconds(2, 2, 2, 2, 2), hop=5))
    assert found[Action("F", 1, 0)] == pytest.approx((6, 7))
    assert found[Action("F", 2, 0)] == pytest.approx((7, 8))


def test_sums_follow_the_last_w_in_their_own_lane() -> None:
    schedule = named("looped-bfs", 2, 2, 2)
    played = play(schedule, equal_seconds(2, 2, 2, 2, 2), sums=[4, 4, 10, 4])
    final = {span.action.stage: span.end for spans in played.spans for span in spans if span.action.kind == "BW"}
    assert played.sums[2] == (final[2], final[2] + 10)
    assert played.sums[0] == (max(final[0], final[2] + 10), max(final[0], final[2] + 10) + 4)
    assert played.makespan == max(end for _, end in played.sums)
    assert played.work == play(schedule, equal_seconds(2, 2, 2, 2, 2)).work


def slow_arrivals(schedule: Schedule, ends: dict[Action, float], hops: list[float]) -> dict[tuple, float]:
    """When the result of each F and B reaches the stage that needs it, if its action ends then."""
    arrivals = {(part, a.stage, a.micro): end for a, end in ends.items() for part in a.kind}
    for order in schedule.orders:
        lanes: dict[tuple[str, int], float] = {}
        for action in order:
            message = schedule.sent(action)
            if message is not None:
                lane, border = (message.kind, message.target), message.stage - (message.kind == "B")
                lanes[lane] = arrivals[message[:3]] = max(ends[action], lanes.get(lane, 0.0)) + hops[border]
    return arrivals


def slow_play(schedule: Schedule, seconds: dict[str, list[float]], hops: list[float]) -> dict[Action, float]:
    """Ends of all actions as a fixed point: nothing is assumed of the order in which they are computed."""
    ends: dict[Action, float] = {action: 0.0 for order in schedule.orders for action in order}
    while True:
        before, arrivals = dict(ends), slow_arrivals(schedule, ends, hops)
        for order in schedule.orders:
            now = 0.0
            for action in order:
                kind, stage, micro = action
                needed = (kind[0], stage - 1 if kind == "F" else stage + 1, micro)
                start = max(now, arrivals.get(needed, 0.0) if kind != "W" else 0.0)
                now = ends[action] = start + sum(seconds[part][stage] for part in kind)
        if before == ends:
            return ends


def test_times_are_those_of_a_slow_walk() -> None:
    draw = random.Random(0)
    for name, (_, fits) in BUILDERS.items():
        for _ in range(4):
            pipe, micro = draw.randint(1, 4), draw.randint(1, 6)
            chunks = fits.start
            stages = pipe * chunks
            seconds = {kind: [draw.choice([0.0, draw.random()]) for _ in range(stages)] for kind in "FBW"}
            hops = [draw.random() for _ in range(stages - 1)]
            schedule = named(name, pipe, chunks, micro)
            played = play(schedule, seconds, hops)
            assert {a: end for a, (_, end) in by_hand(played).items()} == pytest.approx(
                slow_play(schedule, seconds, hops)
            )
            for spans in played.spans:
                assert all(one.end <= other.start for one, other in pairwise(spans))


def test_empty_stages_take_no_time() -> None:
    seconds = {"F": [1.0, 0.0, 1.0], "B": [1.0, 0.0, 1.0], "W": [1.0, 0.0, 1.0]}
    assert play(named("1f1b", 3, 1, 4), seconds).makespan == pytest.approx(15)
    assert play(named("1f1b", 1, 1, 1), {"F": [0.0], "B": [0.0], "W": [0.0]}).idle_share == 0
    assert by_hand(play(named("1f1b", 3, 1, 4), seconds))[Action("F", 1, 0)] == (1, 1)


def test_numbers_that_make_no_sense() -> None:
    schedule = named("1f1b", 2, 1, 2)
    with pytest.raises(ValueError, match="1 seconds of B for 2 stages: give one number for each stage"):
        play(schedule, {"F": [1, 1], "B": [1], "W": [1, 1]})
    with pytest.raises(ValueError, match=r"seconds of W .*: they must be 0 or more; give 0 for an empty stage"):
        play(schedule, {"F": [1, 1], "B": [1, 1], "W": [1, -1]})
    with pytest.raises(ValueError, match="3 hops for 2 stages: give one number, or one for each of 1 borders"):
        hop_seconds([1, 2, 3], 2)
    with pytest.raises(ValueError, match="3 sums for 2 stages"):
        play(schedule, equal_seconds(1, 1, 1, 2, 1), sums=[1, 2, 3])
    assert isinstance(play(schedule, equal_seconds(1, 1, 1, 2, 1)).spans[0][0], ActionSpan)

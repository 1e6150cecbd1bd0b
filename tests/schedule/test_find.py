"""Found schedules: valid, as good as the table of the design, near the best that an exhaustive search finds, quick."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf
from statistics import median

import pytest

from core_speed import reference_seconds
from fourfold.schedule.action import Action, Schedule
from fourfold.schedule.find import find
from fourfold.schedule.named import BUILDERS, named
from fourfold.schedule.play import equal_seconds, play
from fourfold.schedule.stages import place

TABLE = [
    (4, 16, "loop", 1, 5, 0.059),
    (4, 16, "wave", 2, 4, 0.030),
    (4, 16, "wave", 2, 3, 0.068),
    (4, 16, "wave", 4, 4, 0.015),
    (4, 16, "wave", 4, 3, 0.045),
    (8, 24, "loop", 1, 10, 0.089),
    (8, 24, "wave", 2, 8, 0.046),
    (8, 24, "wave", 2, 6, 0.106),
    (8, 24, "wave", 2, 5, 0.148),
    (8, 24, "wave", 4, 8, 0.024),
    (8, 24, "wave", 4, 6, 0.065),
    (8, 24, "wave", 4, 5, 0.119),
]
"""Ranks, micro-batches, placement, chunks, memory in micro-batches, and the idle share that a sketch had found."""


@pytest.mark.parametrize(("pipe", "micro", "placement", "chunks", "memory", "share"), TABLE)
def test_idle_shares(pipe: int, micro: int, placement: str, chunks: int, memory: float, share: float) -> None:
    found = find(place(placement, pipe, chunks), micro, equal_seconds(1, 1, 1, pipe, chunks), memory=memory)
    found.schedule.check()
    assert max(found.played.peaks) <= memory
    assert found.played.idle_share <= share + 0.0005  # the table has three digits


@pytest.mark.parametrize(("pipe", "micro", "chunks"), [(4, 16, 2), (4, 16, 4), (8, 24, 2), (8, 24, 4)])
def test_waves_reach_the_lower_bound_at_the_memory_of_1f1b(pipe: int, micro: int, chunks: int) -> None:
    found = find(place("wave", pipe, chunks), micro, equal_seconds(1, 1, 1, pipe, chunks), memory=pipe)
    assert found.played.idle == pytest.approx([(pipe - 1) / chunks] * pipe)


def test_found_schedules_are_valid_fit_and_no_slower_than_named_ones() -> None:
    draw = random.Random(0)
    for _ in range(40):
        pipe, micro, chunks = draw.randint(1, 5), draw.randint(1, 9), draw.choice([1, 2, 3, 4])
        placement = place(draw.choice(["loop", "wave"]), pipe, chunks)
        stages = pipe * chunks
        seconds = {kind: [draw.choice([0.0, 1.0, draw.random()]) for _ in range(stages)] for kind in "FBW"}
        hop = draw.choice([0.0, draw.random() / 2])
        weights = [draw.choice([0.0, 1.0, draw.random()]) for _ in range(stages)]
        whole = [sum(weights[stage] for stage in range(stages) if placement[stage] == rank) for rank in range(pipe)]
        memory = draw.choice([None, [each * draw.uniform(1, 2 * pipe) for each in whole]])
        found = find(placement, micro, seconds, hop, memory, weights)
        found.schedule.check()
        assert found.played.makespan == play(found.schedule, seconds, hop).makespan
        limits = memory or [inf] * pipe
        assert all(found.schedule.peak(rank, weights) <= limits[rank] + 1e-6 for rank in range(pipe))
        for name, (_, fits) in BUILDERS.items():
            other = named(name, pipe, chunks, micro) if chunks in fits else found.schedule
            if other.placement == placement and all(other.peak(rank, weights) <= limits[rank] for rank in range(pipe)):
                assert found.played.makespan <= play(other, seconds, hop).makespan + 1e-9, name


def test_the_same_question_has_the_same_answer() -> None:
    question = place("wave", 4, 2), 12, equal_seconds(1, 1.3, 0.7, 4, 2), 0.05, 5
    assert find(*question).schedule == find(*question).schedule


def test_more_memory_is_used_where_it_pays() -> None:
    makespans = [
        find(place("wave", 4, 2), 16, equal_seconds(1, 1, 1, 4, 2), memory=memory).played.makespan
        for memory in range(1, 5)
    ]
    assert makespans == sorted(makespans, reverse=True)
    assert len(set(makespans)) == 4


@pytest.mark.parametrize(("pipe", "micro"), [(4, 8), (4, 16), (8, 8)])
def test_a_short_message_costs_no_more_than_its_own_time(pipe: int, micro: int) -> None:
    """A schedule that is found without messages is delayed by them a little; one that knows of them is not slower."""
    seconds, placement = equal_seconds(1.0, 1.0, 1.0, pipe, 2), place("wave", pipe, 2)
    without = find(placement, micro, seconds, memory=pipe)
    for hop in (0.001, 0.01, 0.05):
        played = find(placement, micro, seconds, hop, memory=pipe).played
        assert played.makespan <= play(without.schedule, seconds, hop).makespan


def test_uneven_stages_are_bound_by_the_slowest() -> None:
    """A rank that never waits after its first action is the best that there can be."""
    seconds = {"F": [1, 1, 3, 1], "B": [1, 1, 3, 1], "W": [1, 1, 3, 1]}
    found = find(place("loop", 4, 1), 12, seconds, memory=6)
    assert found.played.makespan == pytest.approx(2 + 12 * 9, rel=0.02)


# --- beside an exhaustive search


def best_makespan(placement: tuple[int, ...], micro: int, seconds: dict[str, list[float]], hop: float) -> float:
    """The least makespan of all schedules.

    A state is what has been done, with the ends of the ranks and of the results that others still need. Of two states
    that have done the same, one whose times are all no later dominates.
    """
    stages, pipe = len(placement), max(placement) + 1
    front: dict[tuple[int, ...], list[tuple[tuple[float, ...], dict]]] = {(0,) * (3 * stages): [((0.0,) * pipe, {})]}
    for _ in range(3 * stages * micro):
        after: dict[tuple[int, ...], list[tuple[tuple[float, ...], dict]]] = {}
        for done, states in front.items():
            for free, ends in states:
                for new_done, state in steps(done, free, ends, placement, micro, seconds, hop):
                    keep(after.setdefault(new_done, []), state)
        front = after
    return min(max(free) for states in front.values() for free, _ in states)


def steps(done, free, ends, placement, micro, seconds, hop) -> Iterator:
    stages = len(placement)
    for stage, rank in enumerate(placement):
        for kind, letter in enumerate("FBW"):
            number = done[3 * stage + kind]
            if number == micro:
                continue
            before = {"F": ("F", stage - 1), "B": ("B", stage + 1), "W": ("B", stage)}[letter]
            if letter == "B" and done[3 * stage] <= number:
                continue
            arrival = 0.0
            if 0 <= before[1] < stages:
                if done[3 * before[1] + "FBW".index(before[0])] <= number:
                    continue
                arrival = ends.get((*before, number), 0.0) + (hop if placement[before[1]] != rank else 0.0)
            end = max(free[rank], arrival) + seconds[letter][stage]
            new_free = tuple(end if each == rank else time_of for each, time_of in enumerate(free))
            new_done = tuple(count + (place_of == 3 * stage + kind) for place_of, count in enumerate(done))
            new_ends = dict(ends)
            if letter != "W":
                new_ends.pop((*before, number), None)
                after = stage + 1 if letter == "F" else stage - 1
                if 0 <= after < stages and placement[after] != rank:
                    new_ends[letter, stage, number] = end
            yield new_done, (new_free, new_ends)


def keep(states: list, state: tuple) -> None:
    """Add a state unless another dominates it, and remove those that it dominates."""

    def no_later(one: tuple, other: tuple) -> bool:
        return all(a <= b for a, b in zip(one[0], other[0], strict=True)) and all(
            time_of <= other[1][key] for key, time_of in one[1].items()
        )

    if not any(no_later(other, state) for other in states):
        states[:] = [other for other in states if not no_later(state, other)] + [state]


def test_the_exhaustive_search_finds_what_can_be_seen() -> None:
    """One micro-batch on two ranks: F F B B, and a W beside the last B."""
    seconds = {"F": [1.0, 1.0], "B": [1.0, 1.0], "W": [1.0, 1.0]}
    assert best_makespan((0, 1), 1, seconds, 0.0) == 5
    assert best_makespan((0,), 3, {"F": [1.0], "B": [2.0], "W": [3.0]}, 0.0) == 18
    assert best_makespan((0, 1), 1, seconds, 0.5) == 6


@pytest.mark.parametrize(
    ("placement", "micro"),
    [
        *(((0, 1), micro) for micro in (1, 2, 3)),
        *((place(name, 2, 2), micro) for name in ("loop", "wave") for micro in (1, 2)),
    ],
)
def test_found_is_within_5_percent_of_the_best(placement: tuple[int, ...], micro: int) -> None:
    draw = random.Random(0)
    stages = len(placement)
    questions = [({kind: [1.0] * stages for kind in "FBW"}, 0.0)]
    questions += [
        ({kind: [draw.uniform(0.5, 1.5) for _ in range(stages)] for kind in "FBW"}, draw.choice([0.0, 0.1, 0.3]))
        for _ in range(8)
    ]
    for seconds, hop in questions:
        best = best_makespan(placement, micro, seconds, hop)
        found = find(placement, micro, seconds, hop).played.makespan
        assert best - 1e-9 <= found <= 1.05 * best


# --- time


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["loop", "wave"])
@pytest.mark.parametrize("hop", [0.0, 0.03])
def test_2048_take_a_tenth_of_a_second(placement: str, hop: float) -> None:
    """16 ranks, 4 chunks, 32 micro-batches: the median of nine."""
    seconds = equal_seconds(1, 1, 1, 16, 4)
    taken = [reference_seconds(lambda: find(place(placement, 16, 4), 32, seconds, hop, 16)) for _ in range(9)]
    assert median(taken) <= 0.1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory": 0.5}, "memory=0.5: rank 0 keeps 1 for one micro-batch, so no schedule fits; allow at least that"),
        ({"memory": float("nan")}, "memory=nan: rank 0 keeps 1 for one micro-batch, so no schedule fits"),
        ({"memory": [1, 2, 3]}, "3 limits of memory for 2 ranks: give one number, or one for each rank"),
        ({"micro_steps": 0}, "micro-batches=0: a schedule needs at least 1"),
        ({"weights": [1]}, "1 weights for 2 stages: give one number for each stage"),
        ({"hop": [1, 2]}, "2 hops for 2 stages: give one number, or one for each of 1 borders"),
        ({"seconds": {"F": [1], "B": [1], "W": [1]}}, "1 seconds of F for 2 stages: give one number for each stage"),
    ],
)
def test_questions_that_make_no_sense(change: dict, said: str) -> None:
    question = {"placement": (0, 1), "micro_steps": 2, "seconds": equal_seconds(1, 1, 1, 2, 1)}
    with pytest.raises(ValueError, match=said):
        find(**{**question, **change})


def test_one_rank_and_one_micro_batch() -> None:
    assert find((0,), 1, equal_seconds(1, 1, 1, 1, 1)).schedule == Schedule(
        1, 1, (0,), ((Action("F", 0, 0), Action("B", 0, 0), Action("W", 0, 0)),)
    )

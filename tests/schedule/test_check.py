"""What `check` refuses, with action, rank and way out; and the messages that follow from a schedule."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest

from fourfold.schedule.action import Action, Lane, Schedule, ScheduleError, parts
from fourfold.schedule.find import find
from fourfold.schedule.named import BUILDERS, named
from fourfold.schedule.play import equal_seconds, play
from fourfold.schedule.stages import place

Orders = list[list[Action]]


def random_schedule(draw: random.Random) -> Schedule:
    """A named or found schedule of a random size, with at least two ranks and micro-batches."""
    pipe, micro = draw.randint(2, 4), draw.randint(2, 6)
    if draw.random() < 0.5:
        name = draw.choice([*BUILDERS, "blocks:2"])
        chunks = BUILDERS[name][1].start if name in BUILDERS else draw.randint(1, 2)
        return named(name, pipe, chunks, micro)
    chunks = draw.choice([1, 2, 3])
    seconds = {kind: [draw.random() for _ in range(pipe * chunks)] for kind in "FBW"}
    placement = place(draw.choice(["loop", "wave"]), pipe, chunks)
    return find(placement, micro, seconds, draw.random() / 4, draw.randint(1, 2 * pipe)).schedule


def drop(orders: Orders, draw: random.Random) -> None:
    order = draw.choice(orders)
    order.pop(draw.randrange(len(order)))


def repeat(orders: Orders, draw: random.Random) -> None:
    order = draw.choice(orders)
    order.insert(draw.randrange(len(order) + 1), draw.choice(order))


def other_rank(orders: Orders, draw: random.Random) -> None:
    one, other = draw.sample(orders, 2)
    other.insert(draw.randrange(len(other) + 1), one.pop(draw.randrange(len(one))))


def other_stage(orders: Orders, draw: random.Random) -> None:
    order = draw.choice(orders)
    place_of = draw.randrange(len(order))
    order[place_of] = order[place_of]._replace(stage=draw.choice([-1, 99]))


def other_micro(orders: Orders, draw: random.Random) -> None:
    order = draw.choice(orders)
    place_of = draw.randrange(len(order))
    order[place_of] = order[place_of]._replace(micro=draw.choice([-1, 99]))


def other_kind(orders: Orders, draw: random.Random) -> None:
    order = draw.choice(orders)
    place_of = draw.randrange(len(order))
    order[place_of] = order[place_of]._replace(kind=draw.choice(["X", "", "f"]))


def whole_beside_part(orders: Orders, draw: random.Random) -> None:
    order = draw.choice(orders)
    action = draw.choice([action for action in order if action.kind != "F"])
    order.append(action._replace(kind=draw.choice(["B", "W", "BW"])))


def micro_out_of_order(orders: Orders, draw: random.Random) -> None:
    order = draw.choice(orders)
    pairs = [(a, b) for a, b in combinations(range(len(order)), 2) if order[a][:2] == order[b][:2]]
    a, b = draw.choice(pairs)
    order[a], order[b] = order[b], order[a]


def before_its_input(orders: Orders, draw: random.Random) -> None:
    """Moves a B, W or BW before the F or B of the same stage and micro-batch."""
    order = draw.choice(orders)
    action = draw.choice([action for action in order if action.kind != "F"])
    needed = "B" if action.kind == "W" else "F"
    order.remove(action)
    order.insert(order.index(action._replace(kind=needed)), action)


CORRUPTED: list[Callable[[Orders, random.Random], None]] = [
    drop, repeat, other_rank, other_stage, other_micro, other_kind, whole_beside_part, micro_out_of_order,
    before_its_input,
]  # fmt: skip
WAY_OUT = re.compile(r"\b(add|remove|move|Move|exchange|write|place)\b")


@pytest.mark.parametrize("corrupt", CORRUPTED, ids=lambda function: function.__name__)
def test_what_is_corrupted_is_refused(corrupt: Callable[[Orders, random.Random], None]) -> None:
    draw = random.Random(corrupt.__name__)
    for _ in range(30):
        schedule = random_schedule(draw)
        schedule.check()
        orders = [list(order) for order in schedule.orders]
        corrupt(orders, draw)
        with pytest.raises(ScheduleError) as caught:
            replace(schedule, orders=tuple(map(tuple, orders))).check()
        error = caught.value
        assert error.rank in range(schedule.pipe)
        assert error.action is not None
        assert str(error.action) in str(error)
        assert f"rank {error.rank}" in str(error)
        assert WAY_OUT.search(str(error)), error


def naive_end(schedule: Schedule) -> bool:
    """Whether all ranks reach their ends, by trying each again and again."""
    done: set[Action] = set()
    at = [0] * schedule.pipe
    while True:
        moved = False
        for rank, order in enumerate(schedule.orders):
            while at[rank] < len(order):
                kind, stage, micro = order[at[rank]]
                needed = {"F": [Action("F", stage - 1, micro)] if stage else [], "W": [Action("B", stage, micro)]}
                after = [Action("B", stage + 1, micro)] if stage + 1 < schedule.stages else []
                if not all(each in done for each in needed.get(kind, [Action("F", stage, micro), *after])):
                    break
                done.update(parts(order[at[rank]]))
                at[rank] += 1
                moved = True
        if not moved:
            return at == [len(order) for order in schedule.orders]


def late_forward(orders: Orders, draw: random.Random) -> None:
    """Move an F as far back as its own rank allows, so that only other ranks may miss it."""
    order = draw.choice(orders)
    action = draw.choice([action for action in order if action.kind == "F"])
    _, stage, micro = action
    order.remove(action)
    later = [Action("F", stage, micro + 1), Action("F", stage + 1, micro)]
    later += [Action("B", stage, micro), Action("BW", stage, micro)]
    order.insert(min(order.index(each) for each in later if each in order), action)


def test_deadlocks_are_found_and_say_what_to_move() -> None:
    """Where actions of random orders move, exactly those schedules are refused that a naive walk cannot end."""
    draw = random.Random(1)
    refused = 0
    for _ in range(250):
        schedule = random_schedule(draw)
        orders = [list(order) for order in schedule.orders]
        if draw.random() < 0.5:
            order = draw.choice(orders)
            order.insert(draw.randrange(len(order)), order.pop(draw.randrange(len(order))))
        else:
            late_forward(orders, draw)
        shuffled = replace(schedule, orders=tuple(map(tuple, orders)))
        try:
            shuffled.check()
        except ScheduleError as error:
            if not str(error).startswith("deadlock"):
                continue  # the order of one rank is wrong by itself
            refused += 1
            assert not naive_end(shuffled)
            assert error.rank is not None
            assert error.action is not None
            ((moved, before, rank),) = re.findall(r"Move (\w+\(.*?\)) before (\w+\(.*?\)) .* rank (\d+)$", str(error))
            assert (before, rank) == (str(error.action), str(error.rank))
            order = orders[error.rank]
            places = {str(part): place_of for place_of, action in enumerate(order) for part in parts(action)}
            assert places[moved] > order.index(error.action)
            with pytest.raises(ScheduleError, match="deadlock"):
                play(shuffled, equal_seconds(1, 1, 1, schedule.pipe, schedule.stages // schedule.pipe))
        else:
            assert naive_end(shuffled)
    assert refused >= 20


def test_a_deadlock_by_hand() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1, which rank 1 waits for first."""
    orders = (
        (Action("F", 0, 0), Action("BW", 0, 0), Action("F", 0, 1), Action("BW", 0, 1)),
        (Action("F", 1, 0), Action("F", 1, 1), Action("BW", 1, 0), Action("BW", 1, 1)),
    )
    with pytest.raises(ScheduleError) as caught:
        Schedule(2, 2, (0, 1), orders).check()
    assert str(caught.value) == (
        "deadlock: rank 0 waits in BW(0, 0) for B(1, 0), which rank 1 runs after F(1, 1); rank 1 waits in F(1, 1) for "
        "F(0, 1), which rank 0 runs after BW(0, 0). Move F(0, 1) before BW(0, 0) in the order of rank 0"
    )


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (Schedule(2, 1, (0,), ((), ())), "2 stages, 1 micro-batches and a placement of 1 stages"),
        (Schedule(1, 0, (0,), ((),)), "a schedule needs at least 1 of each"),
        (
            Schedule(2, 1, (0, 2), ((), ())),
            "stage 1 is on rank 2, but the schedule has orders of 2 ranks",
        ),
        (Schedule(2, 1, (0, 0), ((), ())), "rank 1 has no stage; place a stage there, if an empty one"),
        (
            Schedule(1, 1, (0,), ((),)),
            r"rank 0 never runs F\(0, 0\), the forward pass of stage 0 for micro-batch 0",
        ),
    ],
)
def test_sizes_that_make_no_sense(schedule: Schedule, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        schedule.check()


# --- messages


def test_messages_of_a_wave_by_hand() -> None:
    schedule = named("v-half", 2, 2, 1)
    first, second = schedule.messages
    assert {lane: [message[:3] for message in line] for lane, line in first.sends.items()} == {
        Lane.F_HIGHER: [("F", 0, 0)],
        Lane.B_HIGHER: [("B", 3, 0)],
    }
    assert {lane: [message[:3] for message in line] for lane, line in second.sends.items()} == {
        Lane.F_LOWER: [("F", 2, 0)],
        Lane.B_LOWER: [("B", 1, 0)],
    }
    assert (first.sends, first.receives) == (second.receives, second.sends)


def test_a_loop_of_one_chunk_uses_two_lanes() -> None:
    for each in named("1f1b", 4, 1, 8).messages:
        assert {*each.sends, *each.receives} <= {Lane.F_HIGHER, Lane.B_LOWER}


def test_sends_meet_receives_in_order() -> None:
    """On every lane the n-th send of a rank to another is the n-th receive there, and nothing else is received."""
    draw = random.Random(2)
    for _ in range(60):
        schedule = random_schedule(draw)
        assert sum(
            len(line) for each in schedule.messages for line in each.sends.values()
        ) == 2 * schedule.micro_steps * sum(
            one != other for one, other in zip(schedule.placement, schedule.placement[1:], strict=False)
        )
        for source, target in combinations(range(schedule.pipe), 2):
            for a, b in ((source, target), (target, source)):
                for lane in Lane:
                    sent = [m for m in schedule.messages[a].sends.get(lane, ()) if m.target == b]
                    assert sent == [m for m in schedule.messages[b].receives.get(lane, ()) if m.source == a]
                    assert all((m.lane in (Lane.F_HIGHER, Lane.B_HIGHER)) == (b > a) for m in sent)


def test_receives_of_several_ranks_stand_in_the_order_of_need() -> None:
    """Stages 0, 1, 2 on ranks 0, 2, 1 and 3 on rank 2: rank 2 has F from both lower ranks in one lane."""
    placement = (0, 2, 1, 2)
    schedule = find(placement, 3, {kind: [1.0] * 4 for kind in "FBW"}).schedule
    schedule.check()
    line = schedule.messages[2].receives[Lane.F_HIGHER]
    assert {message.source for message in line} == {0, 1}
    needs = [schedule.received(action) for action in schedule.orders[2] if action.kind == "F"]
    assert sorted(line) == sorted(message for message in needs if message is not None)
    for source in (0, 1):
        own = [message for message in line if message.source == source]
        assert own == [m for m in schedule.messages[source].sends[Lane.F_HIGHER] if m.target == 2]


def test_walking_respects_what_actions_need() -> None:
    draw = random.Random(3)
    for _ in range(30):
        schedule = random_schedule(draw)
        walked = list(schedule.walk())
        assert [[action for rank, action in walked if rank == own] for own in range(schedule.pipe)] == [
            list(order) for order in schedule.orders
        ]
        place_of = {part: at for at, (_, action) in enumerate(walked) for part in parts(action)}
        for kind, stage, micro in place_of:
            at = place_of[Action(kind, stage, micro)]
            assert kind != "F" or stage == 0 or place_of[Action("F", stage - 1, micro)] < at
            assert kind != "B" or stage + 1 == schedule.stages or place_of[Action("B", stage + 1, micro)] < at


def test_peaks_by_weight_and_stage() -> None:
    schedule = named("interleaved", 2, 2, 4)
    assert schedule.peaks_by_stage(0) == {0: 4, 2: 2}
    assert schedule.peak(0) == 5 / 2
    assert schedule.peak(0, [10, 0, 1, 0]) == 41
    assert schedule.peak(1, [0, 7, 0, 0]) == 7 * schedule.peaks_by_stage(1)[1]

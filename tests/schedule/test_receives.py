"""Receives begin when the schedule says that their message is sent, and never let ranks wait for each other."""

from __future__ import annotations

from collections.abc import Callable

from fourfold.schedule.action import Action, PipeMessage, Schedule
from fourfold.schedule.choose import choose
from fourfold.schedule.find import find
from fourfold.schedule.play import equal_seconds
from fourfold.schedule.receives import Receives, one_ahead, when_sent
from fourfold.schedule.stages import Stages

NAMED = [
    ("gpipe", 1, "loop"),
    ("1f1b", 1, "loop"),
    ("interleaved", 2, "loop"),
    ("interleaved", 4, "loop"),
    ("looped-bfs", 2, "loop"),
    ("zb-h1", 1, "loop"),
    ("v-half", 2, "wave"),
    ("zb-v", 2, "wave"),
]


def named(pipe: int, micro_steps: int) -> list[Schedule]:
    made = []
    for name, chunks, placement in NAMED:
        if name != "interleaved" or micro_steps % pipe == 0:
            made.append(choose(name, Stages.even(pipe * chunks, pipe, chunks, placement), micro_steps))
    return made


def found(pipe: int, micro_steps: int, memory: float, chunks: int = 2) -> Schedule:
    placement = Stages.even(pipe * chunks, pipe, chunks, "wave").placement
    return find(placement, micro_steps, equal_seconds(1, 1.1, 0.9, pipe, chunks), 0.05, memory=memory).schedule


def all_schedules() -> list[Schedule]:
    made = [schedule for pipe in (2, 3, 4, 8) for micro_steps in (1, 4, 8, 16) for schedule in named(pipe, micro_steps)]
    return made + [found(pipe, n, memory * pipe) for pipe in (2, 4) for n in (4, 8) for memory in (0.75, 1.0, 1.5)]


def when_needed(schedule: Schedule, rank: int) -> Receives:
    """Begin to receive a message when it is needed, and those that come before it in its lane."""
    ahead = one_ahead(schedule, rank)
    line = {lane: iter(messages) for lane, messages in schedule.messages[rank].receives.items()}
    begun: set[PipeMessage] = set()
    before: dict[Action, list[PipeMessage]] = {}
    for action in ahead.before:
        needed = schedule.received(action)
        assert needed is not None
        while needed not in begun:
            message = next(line[needed.lane])
            before.setdefault(action, []).append(message)
            begun.add(message)
    return Receives(before, {})


Operation = tuple[str, Action | PipeMessage]


def queue_of(schedule: Schedule, rank: int, receives: Receives) -> list[Operation]:
    """The operations of a rank in the order in which its host starts them."""
    queue: list[Operation] = []
    for action in schedule.orders[rank]:
        queue += [("receive", message) for message in receives.before.get(action, ())]
        queue.append(("act", action))
        queue += [("receive", message) for message in receives.after.get(action, ())]
        if (message := schedule.sent(action)) is not None:
            queue.append(("send", message))
    return queue


def can_end(schedule: Schedule, receives: Callable[[Schedule, int], Receives]) -> bool:
    """Return whether the ranks come to their ends if all streams of a rank share one hardware queue.

    A queue starts its operations in order. A send and a receive start when those of the message before on their line
    have ended, which takes both of them; an action when its message has been received.
    """
    queues = [queue_of(schedule, rank, receives(schedule, rank)) for rank in range(schedule.pipe)]
    previous: dict[PipeMessage, PipeMessage | None] = {}
    latest: dict[object, PipeMessage] = {}
    for order in schedule.orders:
        for message in filter(None, map(schedule.sent, order)):
            line = message.lane, message.source, message.target
            previous[message] = latest.get(line)
            latest[line] = message
    started: set[Operation] = set()

    def may_start(what: Action | PipeMessage) -> bool:
        before = schedule.received(what) if isinstance(what, Action) else previous[what]
        return before is None or {("send", before), ("receive", before)} <= started

    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and may_start(queue[0][1]):
                started.add(queue.pop(0))
                moved = True
    return not any(queues)


def test_every_message_is_received_once_and_before_it_is_needed() -> None:
    for schedule in all_schedules():
        for way in (one_ahead, when_sent):
            for rank, order in enumerate(schedule.orders):
                receives, begun = way(schedule, rank), []
                for action in order:
                    begun += receives.before.get(action, [])
                    needed = schedule.received(action)
                    assert needed is None or needed in begun
                    begun += receives.after.get(action, [])
                expected = [m for line in schedule.messages[rank].receives.values() for m in line]
                assert sorted(begun) == sorted(expected)


def test_no_rank_waits_forever_where_all_streams_share_one_queue() -> None:
    assert all(can_end(schedule, when_sent) for schedule in all_schedules())


def test_ranks_that_receive_when_they_need_a_message_could() -> None:
    stuck = [schedule for schedule in all_schedules() if not can_end(schedule, when_needed)]
    assert any(schedule.placement == (0, 1, 0, 1) for schedule in stuck)  # looped-bfs
    assert any(schedule.placement == (0, 1, 2, 3, 3, 2, 1, 0) for schedule in stuck)  # found on waves


def test_worked_example() -> None:
    """1F1B of 2 ranks and 3 micro-batches, in which F takes one slot and BW two.

    slot     0   1   2   3   4   5   6   7   8   9   10  11
    rank 0   F0  F1          BW0-----F2  BW1-----    BW2-----
    rank 1       F0  BW0-----F1  BW1-----F2  BW2-----
    """
    schedule = choose("1f1b", Stages.even(2, 2), 3)
    first, second = (when_sent(schedule, rank) for rank in (0, 1))

    def labels(receives: dict[Action, list[PipeMessage]]) -> dict[str, list[int]]:
        return {str(action): [message.micro for message in messages] for action, messages in receives.items()}

    assert labels(second.before) == {"F(1, 0)": [0]}  # rank 1 waits for it
    assert labels(second.after) == {"F(1, 0)": [1], "BW(1, 1)": [2]}
    assert labels(first.before) == {"BW(0, 0)": [0]}
    assert labels(first.after) == {"F(0, 2)": [1], "BW(0, 1)": [2]}  # the last a slot before it is sent

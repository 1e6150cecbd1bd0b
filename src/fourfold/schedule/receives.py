"""When a rank begins to receive each message: before which of its actions, or after which.

A receive that has begun takes its message as soon as that is sent. On the CPU it costs nothing to begin early, so a
rank begins one message ahead of what it needs (`one_ahead`). On a GPU a receive is a kernel that occupies
multiprocessors until its message has come, as a send does until its message has left, so both are to begin at about the
same time (`when_sent`).

Streams may share a hardware queue, in which an operation that cannot start yet holds up everything behind it. A message
that is sent or received stands behind the one before it on its line (lane, source, target). So ranks must not wait for
each other even if a send waits until the message before it is being received, and all other work of its rank waits
behind it. `when_sent` simulates ranks that do so, and begins every receive

    at the end of an action, before its result is sent: of what has been sent meanwhile, and of the next message of a
        line if it will be sent before half of the rank's next action is over;
    while the rank waits for a message or for a send: of whatever is being sent;
    before the action that needs the message, if not earlier.

In the simulation, a rank that waits to send waits for one that computes, which begins the receive at the end of its
action. So everything waits for something earlier in the order of the simulation. Every rank keeps to its part of that
order, so no rank waits forever, however long actions take.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

from fourfold.schedule.action import Action, Lane, PipeMessage, Schedule, parts

SLACK = 0.5
"""A receive may begin before its message is sent by this share of the next action."""


class Receives(NamedTuple):
    """The receives that one rank begins around its actions, in order."""

    before: dict[Action, list[PipeMessage]]
    """Before the rank waits for what the action needs."""
    after: dict[Action, list[PipeMessage]]
    """Before the result of the action is sent."""


def receives_of(schedule: Schedule, rank: int, *, ahead: bool) -> Receives:
    """Return the receives of a rank: one message ahead, or when their messages are sent."""
    return one_ahead(schedule, rank) if ahead else when_sent(schedule, rank)


@lru_cache(maxsize=16)  # asked for by every step
def one_ahead(schedule: Schedule, rank: int) -> Receives:
    """Begin to receive the next message of a lane when one of it is needed."""
    before: dict[Action, list[PipeMessage]] = {}
    lines = {lane: iter(line) for lane, line in schedule.messages[rank].receives.items()}
    begun: set[PipeMessage] = set()
    for action in schedule.orders[rank]:
        needed = schedule.received(action)
        if needed is None:
            continue
        receives, line = before.setdefault(action, []), lines[needed.lane]
        while needed not in begun:
            receives.append(next(line))
            begun.add(receives[-1])
        if (following := next(line, None)) is not None:
            receives.append(following)
            begun.add(following)
    return Receives(before, {})


def when_sent(schedule: Schedule, rank: int) -> Receives:
    """Begin to receive a message when, by the schedule, it is sent; F, B and W of all stages take equally long."""
    return _simulated(schedule)[rank]


@lru_cache(maxsize=16)
def _simulated(schedule: Schedule) -> tuple[Receives, ...]:
    return SharedQueues(schedule).run()


class Line:
    """The messages from one rank to another in one lane."""

    def __init__(self) -> None:
        self.messages: list[PipeMessage] = []
        self.sent = 0
        """How many have been sent."""
        self.receiving = 0
        """How many their receiver has begun to receive."""


@dataclass(slots=True)
class RankState:
    """One rank in the simulation."""

    receives: Receives = field(default_factory=lambda: Receives(defaultdict(list), defaultdict(list)))
    ended: int = 0
    """The number of actions that have ended."""
    computes_until: float | None = None
    """When the action that runs ends; None if the rank waits."""
    sending: bool = False
    """The result of the last action waits to be sent."""


class SharedQueues:
    """Ranks whose sends wait until the message before them is being received."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.ranks = [RankState() for _ in schedule.orders]
        self.now = 0.0
        self.running: list[tuple[float, int]] = []
        """A heap of when ranks end their actions."""
        self.needed = [list(map(schedule.received, order)) for order in schedule.orders]
        self.results = [list(map(schedule.sent, order)) for order in schedule.orders]
        self.lines: dict[tuple[Lane, int, int], Line] = defaultdict(Line)
        self.places: dict[PipeMessage, int] = {}
        for results in self.results:
            for message in filter(None, results):
                line = self.line_of(message)
                self.places[message] = len(line.messages)
                line.messages.append(message)
        self.arriving: list[list[Line]] = [[] for _ in schedule.orders]
        for (_, _, target), line in self.lines.items():
            self.arriving[target].append(line)

    def run(self) -> tuple[Receives, ...]:
        self.go_on(list(range(self.schedule.pipe)))
        while self.running:
            self.now, rank = heappop(self.running)
            self.end_action(rank)
            self.go_on([rank])
        if any(state.ended < len(order) for state, order in zip(self.ranks, self.schedule.orders, strict=True)):
            self.schedule.check()  # raises: it names the ranks that wait for each other
        return tuple(state.receives for state in self.ranks)

    def line_of(self, message: PipeMessage) -> Line:
        return self.lines[message.lane, message.source, message.target]

    def end_action(self, rank: int) -> None:
        """End the action that runs, and begin to receive messages that are about to be sent."""
        state, order = self.ranks[rank], self.schedule.orders[rank]
        state.ended, state.computes_until, state.sending = state.ended + 1, None, True
        if state.ended == len(order):
            return
        limit = self.now + SLACK * seconds(order[state.ended])
        for line in self.arriving[rank]:
            if line.receiving == line.sent < len(line.messages) and self.is_sent_by(line.messages[line.sent], limit):
                self.receive(line)

    def is_sent_by(self, message: PipeMessage, limit: float) -> bool:
        """Return whether the action that runs on a message's source sends it, and ends by then."""
        source = self.ranks[message.source]
        ends = source.computes_until
        return ends is not None and ends <= limit and self.results[message.source][source.ended] == message

    def go_on(self, todo: list[int]) -> None:
        """Let ranks that do not compute do what they can, and those that waited for it."""
        while todo:
            rank = todo.pop()
            state, order = self.ranks[rank], self.schedule.orders[rank]
            if state.computes_until is not None:
                continue
            for line in self.arriving[rank]:
                while line.receiving < line.sent:
                    todo.append(self.receive(line).source)
            if state.sending:
                message = self.results[rank][state.ended - 1]
                if message is not None:
                    line = self.line_of(message)
                    if line.receiving < line.sent:
                        continue
                    line.sent += 1
                    todo.append(message.target)
                state.sending = False
            if state.ended < len(order) and self.has_input(rank, todo):
                state.computes_until = self.now + seconds(order[state.ended])
                heappush(self.running, (state.computes_until, rank))

    def has_input(self, rank: int, todo: list[int]) -> bool:
        """Begin to receive what the next action needs; return whether it has been sent."""
        needed = self.needed[rank][self.ranks[rank].ended]
        if needed is None:
            return True
        line, place = self.line_of(needed), self.places[needed]
        if line.receiving == line.sent <= place:
            todo.append(self.receive(line).source)
        return place < line.sent

    def receive(self, line: Line) -> PipeMessage:
        """Begin to receive the next message of a line."""
        message = line.messages[line.receiving]
        line.receiving += 1
        state, order = self.ranks[message.target], self.schedule.orders[message.target]
        if state.sending:
            state.receives.after[order[state.ended - 1]].append(message)
        else:
            state.receives.before[order[state.ended]].append(message)
        return message


def seconds(action: Action) -> float:
    """Return how long an action takes in the simulation."""
    return len(parts(action))

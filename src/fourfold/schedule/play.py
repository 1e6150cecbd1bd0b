"""The times of a schedule: every action starts when its rank is free and its input is there.

The makespan is the longest path through actions and messages. A message takes `hop` seconds in its lane, one after
another; computation goes on meanwhile. The gradients of a stage are summed after its last W, in a lane of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fourfold.schedule.action import Action, Schedule

StageSeconds = Mapping[str, Sequence[float]]
"""The seconds of one micro-batch in each stage, by kind: F, B and W. BW takes those of B and W together."""


class ActionSpan(NamedTuple):
    """When an action runs, in seconds since the step began."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A schedule with the times of its actions."""

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    """When each action of every rank starts."""
    ends: tuple[tuple[float, ...], ...]
    sums: tuple[tuple[float, float], ...]
    """When the gradients of every stage are summed: start and end; empty if that takes no time."""
    makespan: float
    """Seconds from the first action to the end of the last action or sum."""

    @property
    def spans(self) -> tuple[tuple[ActionSpan, ...], ...]:
        """The actions of every rank with their times."""
        ranks = zip(self.schedule.orders, self.starts, self.ends, strict=True)
        return tuple(tuple(map(ActionSpan, *rank)) for rank in ranks)

    @property
    def work(self) -> tuple[float, ...]:
        """The seconds in which each rank computes."""
        return tuple(sum(ends) - sum(starts) for starts, ends in zip(self.starts, self.ends, strict=True))

    @property
    def idle(self) -> tuple[float, ...]:
        """The seconds in which each rank does not compute (E11)."""
        return tuple(self.makespan - work for work in self.work)

    @property
    def idle_share(self) -> float:
        """The share of all ranks' time in which they do not compute."""
        whole = self.makespan * len(self.spans)
        return sum(self.idle) / whole if whole else 0.0

    @property
    def peaks(self) -> tuple[float, ...]:
        """The most micro-batches of a whole rank that each rank keeps."""
        return tuple(map(self.schedule.peak, range(self.schedule.pipe)))


def equal_seconds(forward: float, backward: float, weights: float, pipe: int, chunks: int) -> StageSeconds:
    """Return the seconds of equal stages from those of a whole rank: F, B and W of all its chunks."""
    whole = {"F": forward, "B": backward, "W": weights}
    return {kind: (seconds / chunks,) * (pipe * chunks) for kind, seconds in whole.items()}


def hop_seconds(hop: float | Sequence[float], stages: int) -> tuple[float, ...]:
    """Return the seconds of a message between each stage and the next; one number counts for all."""
    if isinstance(hop, int | float):
        return (hop,) * (stages - 1)
    if len(hop) != stages - 1:
        raise ValueError(
            f"{len(hop)} hops for {stages} stages: give one number, or one for each of {stages - 1} borders"
        )
    return tuple(hop)


def check_seconds(seconds: StageSeconds, stages: int) -> None:
    """Raise unless there are seconds of F, B and W for every stage, and none is negative."""
    for kind in ("F", "B", "W"):
        given = seconds.get(kind, ())
        if len(given) != stages:
            raise ValueError(f"{len(given)} seconds of {kind} for {stages} stages: give one number for each stage")
        if not all(0 <= value < float("inf") for value in given):
            raise ValueError(f"seconds of {kind} {tuple(given)}: they must be 0 or more; give 0 for an empty stage")


def play(
    schedule: Schedule, seconds: StageSeconds, hop: float | Sequence[float] = 0.0, sums: Sequence[float] = ()
) -> Played:
    """Compute when each action runs; raise if the ranks would wait for each other forever.

    `hop` is the seconds of a message, for all or for each border between stages; `sums` the seconds in which the
    gradients of each stage are summed.
    """
    played = play_within(schedule, seconds, hop, float("inf"))
    if played is None:
        raise ValueError("the schedule has no finite makespan; see Schedule.check")
    if not sums:
        return played
    summed = _sums(played, sums)
    return replace(played, sums=summed, makespan=max(played.makespan, *(end for _, end in summed)))


def play_within(schedule: Schedule, seconds: StageSeconds, hop: float | Sequence[float], bound: float) -> Played | None:
    """Compute when each action runs; return None as soon as it is clear that the makespan exceeds the bound."""
    check_seconds(seconds, schedule.stages)
    placement, last = schedule.placement, schedule.stages - 1
    times = {**seconds, "BW": [b + w for b, w in zip(seconds["B"], seconds["W"], strict=True)]}
    hops = hop_seconds(hop, schedule.stages)
    arrivals: dict[tuple[bool, int, int], float] = {}  # of what F (True) or B of a stage needs, by micro-batch
    lanes: dict[tuple[bool, int, int], float] = {}  # until when messages of F or B from one rank to another travel
    waiting: dict[tuple[bool, int, int], int] = {}
    ends: list[list[float]] = [[] for _ in schedule.orders]
    starts: list[list[float]] = [[] for _ in schedule.orders]
    spare = [bound - sum(times[kind][stage] for kind, stage, _ in order) for order in schedule.orders]
    able = list(range(schedule.pipe))
    while able:
        rank = able.pop()
        own_starts, own_ends, idle = starts[rank], ends[rank], spare[rank]
        now = own_ends[-1] if own_ends else 0.0
        for kind, stage, micro in schedule.orders[rank][len(own_ends) :]:
            forward = kind == "F"
            if kind != "W" and (stage if forward else stage != last):
                arrival = arrivals.get((forward, stage, micro))
                if arrival is None:
                    waiting[forward, stage, micro] = rank
                    break
                if arrival > now:
                    idle -= arrival - now
                    if idle < 0:
                        return None
                    now = arrival
            own_starts.append(now)
            now += times[kind][stage]
            own_ends.append(now)
            after = stage + 1 if forward else stage - 1
            if kind == "W" or not 0 <= after <= last:
                continue
            target, arrival = placement[after], now
            if target != rank:
                lane = forward, rank, target
                lanes[lane] = arrival = max(now, lanes.get(lane, 0.0)) + hops[min(stage, after)]
            arrivals[forward, after, micro] = arrival
            if (forward, after, micro) in waiting:
                able.append(waiting.pop((forward, after, micro)))
        spare[rank] = idle
    return _ended(schedule, starts, ends)


def _ended(schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]) -> Played:
    """Return the times of a schedule whose ranks have come as far as they can."""
    if any(len(own) < len(order) for own, order in zip(ends, schedule.orders, strict=True)):
        schedule.check()  # raises: it names the ranks that wait for each other
    return Played(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), (), max(own[-1] for own in ends))


def _sums(played: Played, sums: Sequence[float]) -> tuple[tuple[float, float], ...]:
    """Return when the gradients of each stage are summed: a rank sums one stage after another, from its last W on."""
    if len(sums) != played.schedule.stages:
        raise ValueError(f"{len(sums)} sums for {played.schedule.stages} stages: give the seconds of each stage")
    found = [(0.0, 0.0)] * len(sums)
    for spans in played.spans:
        final = {span.action.stage: span.end for span in spans if span.action.kind in ("W", "BW")}
        free = 0.0
        for stage, ready in sorted(final.items(), key=lambda each: each[1]):
            start = max(free, ready)
            free = start + sums[stage]
            found[stage] = start, free
    return tuple(found)

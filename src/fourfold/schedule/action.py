"""A pipeline schedule as data: the order of actions of every pipe rank, the messages that follow from it, its faults.

A schedule never says what is sent: `messages` derives that from the orders and the placement, so that what `check` has
walked is what the runtime sends. Every message travels in one of four lanes, each of which has one direction. Sends do
not wait, and a receiver takes the messages of a lane in the order in which they are sent; so a rank can only wait for
an action of another rank, and a schedule whose orders can be walked to their ends cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import takewhile
from typing import Literal, NamedTuple

from fourfold.schedule.stages import stages_of

Kind = Literal["F", "B", "W", "BW"]
KINDS: tuple[Kind, ...] = ("F", "B", "W", "BW")
"""F: forward. B: backward for the gradient of the stage's input. W: backward for the gradients of its weights. BW: B
and W in one."""
MEANINGS = {
    "F": "the forward pass",
    "B": "the gradient of the input",
    "W": "the gradients of the weights",
}


class Action(NamedTuple):
    """What a pipe rank does with one micro-batch in one of its stages."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind}({self.stage}, {self.micro})"


class Lane(StrEnum):
    """The process group of a message: by what it carries and toward which ranks, so that a lane is one-way."""

    F_HIGHER = "F toward higher ranks"
    F_LOWER = "F toward lower ranks"
    B_HIGHER = "B toward higher ranks"
    B_LOWER = "B toward lower ranks"


class PipeMessage(NamedTuple):
    """What one stage hands to the next (F: the stream) or to the one before it (B: its gradient)."""

    kind: Literal["F", "B"]
    stage: int
    """The stage that sends."""
    micro: int
    source: int
    """The pipe rank of the stage that sends."""
    target: int
    """The pipe rank of the stage that receives."""

    @property
    def label(self) -> str:
        """What the message carries, for ledger, profiles and errors."""
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro}"

    @property
    def lane(self) -> Lane:
        """The lane in which the message travels."""
        if self.kind == "F":
            return Lane.F_HIGHER if self.target > self.source else Lane.F_LOWER
        return Lane.B_HIGHER if self.target > self.source else Lane.B_LOWER


@dataclass(frozen=True, slots=True)
class RankMessages:
    """The messages of one pipe rank by lane, in the order in which it sends them and posts their receives.

    The n-th send of a lane from one rank to another meets the n-th receive there. Where a lane brings messages of
    several ranks, their receives stand in the order in which they are needed.
    """

    sends: dict[Lane, tuple[PipeMessage, ...]]
    receives: dict[Lane, tuple[PipeMessage, ...]]


class ScheduleError(ValueError):
    """A schedule is not valid; the message names the action, the rank and the way out."""

    def __init__(self, message: str, *, rank: int | None = None, action: Action | None = None) -> None:
        super().__init__(message)
        self.rank, self.action = rank, action


@dataclass(frozen=True)
class Schedule:
    """The actions of every pipe rank in one step, in order."""

    stages: int
    micro_steps: int
    placement: tuple[int, ...]
    """The pipe rank of every stage."""
    orders: tuple[tuple[Action, ...], ...]
    """The actions of every pipe rank."""

    @property
    def pipe(self) -> int:
        """The number of pipe ranks."""
        return len(self.orders)

    @property
    def chunks(self) -> int:
        """The largest number of stages that one rank holds."""
        return max(self.placement.count(rank) for rank in range(self.pipe))

    # --- messages

    def received(self, action: Action) -> PipeMessage | None:
        """Return the message that an action waits for; None if what it needs is on its own rank."""
        kind, stage, micro = action
        before = stage - 1 if kind == "F" else stage + 1
        if kind == "W" or not 0 <= before < self.stages or self.placement[before] == self.placement[stage]:
            return None
        return PipeMessage("F" if kind == "F" else "B", before, micro, self.placement[before], self.placement[stage])

    def sent(self, action: Action) -> PipeMessage | None:
        """Return the message that an action sends when it ends; None if nothing leaves its rank."""
        kind, stage, micro = action
        after = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or not 0 <= after < self.stages or self.placement[after] == self.placement[stage]:
            return None
        return PipeMessage("F" if kind == "F" else "B", stage, micro, self.placement[stage], self.placement[after])

    @cached_property
    def messages(self) -> tuple[RankMessages, ...]:
        """The messages of every pipe rank, derived from the orders and the placement."""
        sends: list[dict[Lane, list[PipeMessage]]] = [{} for _ in self.orders]
        on_the_way: dict[tuple[Lane, int, int], list[PipeMessage]] = {}  # by lane, source and target
        for order in self.orders:
            for message in filter(None, map(self.sent, order)):
                sends[message.source].setdefault(message.lane, []).append(message)
                on_the_way.setdefault((message.lane, message.source, message.target), []).append(message)
        receives: list[dict[Lane, list[PipeMessage]]] = [{} for _ in self.orders]
        for rank, order in enumerate(self.orders):
            taken: dict[tuple[Lane, int, int], int] = {}
            places = {message: place for line in on_the_way.values() for place, message in enumerate(line)}
            for needed in filter(None, map(self.received, order)):
                line = needed.lane, needed.source, rank
                first = taken.get(line, 0)
                if places.get(needed, -1) >= first:  # else it has come before one that was needed earlier
                    upto = places[needed] + 1
                    receives[rank].setdefault(needed.lane, []).extend(on_the_way[line][first:upto])
                    taken[line] = upto
        return tuple(
            RankMessages(
                {lane: tuple(line) for lane, line in out.items()}, {lane: tuple(line) for lane, line in come.items()}
            )
            for out, come in zip(sends, receives, strict=True)
        )

    # --- memory

    def peak(self, rank: int, weights: Sequence[float] | None = None) -> float:
        """Return the most that a rank keeps at any moment: the sum over its stages of micro-batches times weight.

        A stage keeps a micro-batch from its F until its W has run.

        `weights` is what one micro-batch of each stage takes, such as bytes. By default a stage weighs one part in
        `chunks`, so that the peak counts micro-batches of a whole rank.
        """
        each = (1,) * self.stages if weights is None else weights
        most = kept = 0.0
        for kind, stage, _ in self.orders[rank]:
            if kind == "F":
                kept += each[stage]
                most = max(most, kept)
            elif kind != "B":
                kept -= each[stage]
        return most / self.chunks if weights is None else most

    def peaks_by_stage(self, rank: int) -> dict[int, int]:
        """Return the most micro-batches that each stage of a rank keeps, each at its own moment."""
        only = {
            stage: [float(other == stage) for other in range(self.stages)] for stage in stages_of(self.placement, rank)
        }
        return {stage: int(self.peak(rank, weights)) for stage, weights in only.items()}

    # --- what must hold

    def check(self) -> None:
        """Raise `ScheduleError` unless every action stands once on its rank and the orders can be walked to their ends.

        On each stage, actions of one kind must be in the order of micro-batches: gradients are then summed in one
        order, so every schedule gives the same bits.
        """
        self._check_sizes()
        self._check_actions()
        for rank, order in enumerate(self.orders):
            self._check_order(rank, order)
        for _ in self.walk():
            pass

    def walk(self) -> Iterator[tuple[int, Action]]:
        """Yield rank and action in an order in which the ranks can run them; raise where they would wait forever.

        Every rank walks its order, takes messages from its lanes in the order of `messages`, and stops at a message
        that has not been sent.
        """
        lanes = [{lane: iter(line) for lane, line in each.receives.items()} for each in self.messages]
        held: list[set[PipeMessage]] = [set() for _ in self.orders]  # received, and not needed yet
        sent: set[PipeMessage] = set()
        waiting: dict[PipeMessage, int] = {}
        at, able = [0] * self.pipe, list(range(self.pipe))[::-1]
        while able:
            rank = able.pop()
            for action in self.orders[rank][at[rank] :]:
                needed = self.received(action)
                if needed is not None and needed not in held[rank]:
                    if needed not in sent:
                        waiting[needed] = rank
                        break
                    # earlier messages of the lane come first; they were sent first, so none of them is missing
                    held[rank].update(takewhile(lambda each, last=needed: each != last, lanes[rank][needed.lane]))
                at[rank] += 1
                yield rank, action
                message = self.sent(action)
                if message is not None:
                    sent.add(message)
                    if message in waiting:
                        able.append(waiting.pop(message))
        if waiting:
            raise self._deadlock(at, waiting)

    def _check_sizes(self) -> None:
        if self.stages < 1 or self.micro_steps < 1 or len(self.placement) != self.stages:
            raise ScheduleError(
                f"{self.stages} stages, {self.micro_steps} micro-batches and a placement of {len(self.placement)} "
                "stages: a schedule needs at least 1 of each, and the rank of every stage"
            )
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < self.pipe:
                raise ScheduleError(
                    f"stage {stage} is on rank {rank}, but the schedule has orders of {self.pipe} ranks; place it on "
                    f"one of 0 to {self.pipe - 1}, or add the order of rank {rank}",
                    rank=rank,
                )
        for rank in range(self.pipe):
            if rank not in self.placement:
                raise ScheduleError(f"rank {rank} has no stage; place a stage there, if an empty one", rank=rank)

    def _check_actions(self) -> None:
        """Raise unless every F, B and W stands exactly once, on the rank of its stage."""
        seen: set[Action] = set()
        for rank, order in enumerate(self.orders):
            for action in order:
                self._check_action(rank, action, seen)
        for stage, rank in enumerate(self.placement):
            for micro in range(self.micro_steps):
                for kind in ("F", "B", "W"):
                    missing = Action(kind, stage, micro)
                    if missing not in seen:
                        whole = " or BW" if kind != "F" else ""
                        raise ScheduleError(
                            f"rank {rank} never runs {missing}, {meaning(missing)}; add {kind}{whole} of stage {stage} "
                            f"and micro-batch {micro} to the order of rank {rank}",
                            rank=rank,
                            action=missing,
                        )

    def _check_action(self, rank: int, action: Action, seen: set[Action]) -> None:
        kind, stage, micro = action
        if kind not in KINDS:
            raise ScheduleError(
                f"rank {rank} runs {action}, whose kind is unknown; write one of {', '.join(KINDS)}",
                rank=rank,
                action=action,
            )
        for name, number, most in (("stage", stage, self.stages), ("micro-batch", micro, self.micro_steps)):
            if not 0 <= number < most:
                raise ScheduleError(
                    f"rank {rank} runs {action}, but the last {name} is {most - 1}; remove the action, or make a "
                    f"schedule with more {'stages' if name == 'stage' else 'micro-batches'}",
                    rank=rank,
                    action=action,
                )
        home = self.placement[stage]
        if home != rank:
            raise ScheduleError(
                f"rank {rank} runs {action}, but stage {stage} is on rank {home}; move the action to the order of "
                f"rank {home}",
                rank=rank,
                action=action,
            )
        for part in parts(action):
            if part in seen:
                raise ScheduleError(
                    f"rank {rank} runs {part} twice, the second time as {action}; remove one of the two",
                    rank=rank,
                    action=action,
                )
            seen.add(part)

    def _check_order(self, rank: int, order: Sequence[Action]) -> None:
        """Raise unless the order of one rank respects micro-batches and what its own actions hand to each other."""
        position = {part: place for place, action in enumerate(order) for part in parts(action)}
        for action in order:
            _, stage, micro = action
            for part in parts(action):
                earlier = Action(part.kind, stage, micro - 1)
                if micro and position[earlier] > position[part]:
                    raise ScheduleError(
                        f"rank {rank} runs {action} before micro-batch {micro - 1} of the same stage; each stage takes "
                        f"micro-batches in order, so that gradients are always summed in the same order: exchange it "
                        f"with {earlier}",
                        rank=rank,
                        action=action,
                    )
                for needed in self._needs_here(part):
                    if position[needed] > position[part]:
                        raise ScheduleError(
                            f"rank {rank} runs {action} before {needed}, {meaning(needed)}, which it needs; move "
                            f"{needed} before {action}",
                            rank=rank,
                            action=action,
                        )

    def _needs_here(self, part: Action) -> Iterator[Action]:
        """Yield the actions of the same rank whose results an F, B or W needs."""
        kind, stage, micro = part
        if kind == "F" and stage and self.placement[stage - 1] == self.placement[stage]:
            yield Action("F", stage - 1, micro)
        if kind == "B":
            yield Action("F", stage, micro)
            if stage + 1 < self.stages and self.placement[stage + 1] == self.placement[stage]:
                yield Action("B", stage + 1, micro)
        if kind == "W":
            yield Action("B", stage, micro)

    def _deadlock(self, at: Sequence[int], waiting: dict[PipeMessage, int]) -> ScheduleError:
        """Return the error about ranks that wait for each other in a circle."""
        needs = {rank: message for message, rank in waiting.items()}
        ring, rank = [], min(needs)
        while rank not in ring:  # every rank that one waits for waits itself, because no action is missing
            ring.append(rank)
            rank = needs[rank].source
        ring = ring[ring.index(rank) :]
        # begin where a rank stands before the action that others wait for: somewhere it does, since data flow one way
        while Action(*needs[ring[-1]][:3]) in parts(self.orders[ring[0]][at[ring[0]]]):
            ring.append(ring.pop(0))
        said = []
        for rank in ring:
            stands, needed, source = self.orders[rank][at[rank]], Action(*needs[rank][:3]), needs[rank].source
            first = self.orders[source][at[source]]
            where = f", which rank {source} runs after {first}" if needed not in parts(first) else f" of rank {source}"
            said.append(f"rank {rank} waits in {stands} for {needed}{where}")
        rank, moved = ring[0], Action(*needs[ring[-1]][:3])
        stands = self.orders[rank][at[rank]]
        return ScheduleError(
            f"deadlock: {'; '.join(said)}. Move {moved} before {stands} in the order of rank {rank}",
            rank=rank,
            action=stands,
        )


def parts(action: Action) -> tuple[Action, ...]:
    """Return an action as F, B and W: BW is B, then W."""
    if action.kind == "BW":
        return Action("B", action.stage, action.micro), Action("W", action.stage, action.micro)
    return (action,)


def meaning(action: Action) -> str:
    """Return what an F, B or W computes, in words."""
    return f"{MEANINGS[action.kind]} of stage {action.stage} for micro-batch {action.micro}"

"""Overlap: communication behind computation. It decides when something runs, never what.

The engine of a model knows nothing of grids and collectives; it orders what it is handed. `Ahead` (ahead.py) launches
gathers before their use, `Behind` waits for reductions after others were launched, `Backlog` keeps products for the
moment when something is in flight, `take_turns` lets the halves of a batch alternate.

Invariant: for the same number of halves every policy gives the same bits, and every rank launches in the same order:
nothing here asks whether something has arrived yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from fourfold.ahead import Ahead, Awaited, Buffers, in_backward
from fourfold.policy import Overlap

T = TypeVar("T")

Turns = Generator[None, None, T]
"""Work that pauses wherever another half may use the device while its own message is on its way."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Whose turn it is: this half, of so many."""

    index: int = 0
    of: int = 1


class Engine:
    """The overlap of one model: what its passes did in which order, and what is in flight."""

    def __init__(self, policy: Overlap, *, flights: bool, in_backward: Callable[[], bool] = in_backward) -> None:
        """`flights`: whether backward has any over x or y, behind which products can run."""
        self.policy, self.flights = policy, flights
        self.turn = Turn()
        self.recomputing = False
        """Whether a forward pass is run again in backward, for what backward reads of it."""
        self.buffers = Buffers()
        self.ahead = Ahead(
            on=policy.prefetch, bound=policy.most_in_flight, buffers=self.buffers, in_backward=in_backward
        )
        self.behind = Behind(policy)
        self.backlog = Backlog(Backlog.MOST if policy.behind_products and flights else 0)
        self.sums = Sums()

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        return Engine(self.policy, flights=self.flights)  # what is in flight belongs to the original

    def begin(self, kind: Hashable) -> None:
        """A forward pass begins. Passes of one kind are expected to use the same weights in the same order."""
        self.turn = Turn()
        self.ahead.begin(kind)

    def finish_backward(self) -> None:
        """What is left when a backward pass ends."""
        self.backlog.run_all()
        self.behind.land_all()
        self.ahead.end()

    def abandon(self) -> None:
        """A pass failed: wait for what it launched and forget what it meant to do."""
        self.backlog.jobs.clear()
        self.sums.forget()
        self.behind.forget()
        self.ahead.end()

    def take_turns(self, parts: Sequence[Turns[T]]) -> list[T]:
        """Run all parts to their end, one pause after another.

        The first leads by one: when it stands between two messages (a norm), the second has a product to run.
        """
        if len(parts) == 1:
            return [self.alone(parts[0])]
        results: dict[int, T] = {}

        def advance(index: int) -> None:
            if index in results:
                return
            self.turn = Turn(index, len(parts))
            try:
                next(parts[index])
            except StopIteration as end:
                results[index] = end.value

        before = self.turn
        try:
            advance(0)
            while len(results) < len(parts):
                for index in range(len(parts)):
                    advance(index)
        finally:
            self.turn = before
        return [results[index] for index in range(len(parts))]

    def alone(self, part: Turns[T]) -> T:
        """Run one part to its end, in whoever's turn it is."""
        while True:
            try:
                next(part)
            except StopIteration as end:
                return end.value


class Behind:
    """Reductions that are waited for later, oldest first.

    In flight are at most so many bytes, but always the last one.
    """

    def __init__(self, policy: Overlap) -> None:
        self.policy = policy
        self._queue: deque[tuple[int, Awaited, Callable[[Any], None]]] = deque()
        self._nbytes = 0
        self._largest = 0

    def defer(self, pending: Awaited[T], nbytes: int, land: Callable[[T], None]) -> None:
        """`land` takes the result, some time before backward ends."""
        self._queue.append((nbytes, pending, land))
        self._nbytes += nbytes
        self._largest = max(self._largest, nbytes)
        if not self.policy.defer:
            self.land_all()
        while self._nbytes > self.policy.most_in_flight(self._largest) and len(self._queue) > 1:
            self._land_oldest()

    def land_all(self) -> None:
        while self._queue:
            self._land_oldest()

    def forget(self) -> None:
        for _, pending, _ in self._queue:
            pending.wait()
        self._queue.clear()
        self._nbytes = 0

    def _land_oldest(self) -> None:
        nbytes, pending, land = self._queue.popleft()
        self._nbytes -= nbytes
        land(pending.wait())


class Backlog:
    """Products of backward that nobody waits for, kept until something is in flight.

    Each flight takes the oldest one, so that the next flight finds one too; a few may stand in line, because what they
    read stays in memory.
    """

    MOST = 3

    def __init__(self, most: int) -> None:
        self.most = most
        self.jobs: deque[Callable[[], None]] = deque()

    def add(self, job: Callable[[], None]) -> None:
        self.jobs.append(job)
        while len(self.jobs) > self.most:
            self.run_one()

    def run_one(self) -> None:
        if self.jobs:
            self.jobs.popleft()()

    def run_all(self) -> None:
        while self.jobs:
            self.run_one()


class Sums:
    """Gradients of weights that several halves use, added up until the last half has given its part."""

    def __init__(self) -> None:
        self._begun: dict[Hashable, tuple[list[Tensor], int]] = {}

    def begun(self, key: Hashable) -> list[Tensor] | None:
        """What earlier halves gave, to be added to in place."""
        return self._begun[key][0] if key in self._begun else None

    def add(self, key: Hashable, parts: list[Tensor], of: int) -> list[Tensor] | None:
        """Count one more half; `parts` is the sum with its own part in it. Returns it when that was the last."""
        given = self._begun.pop(key, (parts, 0))[1] + 1
        if given == of:
            return parts
        self._begun[key] = parts, given
        return None

    def forget(self) -> None:
        self._begun.clear()

"""The engine that runs communication behind computation. It decides when something runs, never what.

The engine of a model knows nothing of grids and collectives; it orders what it is handed. `Prefetcher` launches gathers
of weights before their use, in the order in which an earlier pass used them. `DeferredReductions` waits for reductions
after others were launched. `WgradQueue` keeps the products of weight gradients for the moment when a message is in
flight. `take_turns` lets the two halves of a batch alternate.

Invariant: for the same number of halves every policy gives the same bits, and every rank launches in the same order:
nothing here asks whether something has arrived yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from fourfold.policy import Overlap

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Awaited(Protocol[T_co]):
    """Something in flight."""

    def wait(self) -> T_co: ...


def in_backward() -> bool:
    """Whether autograd is running a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Buffers:
    """Memory for gathered weights. On the CPU, where large allocations are dear, it is used again and again: what the
    layers of a model take in turn stays, what was not taken for a while, such as the head's table, is freed. On a GPU
    torch's allocator does the same for all that a step needs.
    """

    PATIENCE = 32
    """So many times buffers are taken or given back before one that lies idle is freed: about three blocks' worth."""

    def __init__(self) -> None:
        self._free: deque[tuple[int, Tensor]] = deque()
        self._now = 0
        self.made = 0
        """How many were allocated."""

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self._pass_time()
        for entry in self._free:
            buffer = entry[1]
            if buffer.shape == torch.Size(shape) and buffer.dtype == dtype and buffer.device == device:
                self._free = deque(other for other in self._free if other is not entry)
                return buffer
        self.made += 1
        with torch.inference_mode(False):  # training may be the next to use it
            return torch.empty(*shape, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        self._pass_time()
        if buffer.device.type == "cpu":
            self._free.append((self._now, buffer))

    def _pass_time(self) -> None:
        self._now += 1
        while self._free and self._free[0][0] < self._now - self.PATIENCE:
            self._free.popleft()


@dataclass(frozen=True, slots=True)
class WeightGather(Generic[T]):
    """Weights to be gathered: which, how, how many bytes (equal on all ranks), the state that they are in now, and
    what is free again when the last half has used them."""

    key: Hashable
    launch: Callable[[], Awaited[T]]
    nbytes: int
    version: Callable[[], Hashable]
    buffers: Callable[[T], Sequence[Tensor]]


@dataclass(slots=True)
class _Held(Generic[T]):
    value: T
    uses_left: int


BACKWARD = "backward"
"""The kind of a backward pass, whatever forward pass it belongs to."""


class Prefetcher:
    """Gathers launched ahead of use, in the order in which an earlier pass of the same kind used them.

    In flight are at most so many bytes, but always the next one. A pass that differs from the recorded one gathers
    where it uses and is recorded anew from there on. Where the forward pass before was followed by backward, the last
    weights of forward are followed by the first of backward. What is in flight when a weight changes is gathered again,
    if torch counts the change (a fused optimizer of torch's between forward and backward goes unseen).
    """

    def __init__(
        self,
        *,
        on: bool,
        bound: Callable[[int], int],
        buffers: Buffers,
        in_backward: Callable[[], bool] = in_backward,
    ) -> None:
        """`bound`: bytes that may be in flight, from those of the largest message so far."""
        self.on, self.bound, self.buffers, self.in_backward = on, bound, buffers, in_backward
        self._orders: dict[Hashable, list[WeightGather]] = {BACKWARD: []}
        self._followed: dict[Hashable, bool] = {}
        self._kind: Hashable = None
        self._cursor = 0
        self._in_flight: dict[Hashable, tuple[WeightGather, Hashable, Awaited]] = {}
        self._held: dict[Hashable, _Held] = {}
        self._largest = 0

    def begin(self, kind: Hashable) -> None:
        """A forward pass begins."""
        if self._kind in self._followed:
            self._followed[self._kind] = False
        self.end()
        self._orders.setdefault(kind, [])
        if torch.is_grad_enabled():
            self._followed.setdefault(kind, False)
        self._kind = kind

    def end(self) -> None:
        """Nothing is used ahead of this: what is still in flight was launched for nothing."""
        for wanted, _, pending in self._in_flight.values():
            self._free(wanted, pending.wait())
        self._in_flight.clear()
        self._held.clear()
        self._close_order()
        self._kind = None

    @contextmanager
    def using(self, wanted: WeightGather[T], *, uses: int, keep: bool = False) -> Iterator[T]:
        """The gathered weights, for one of so many uses. With `keep` their memory is not used again."""
        held = self._held.pop(wanted.key, None)
        if held is None:
            pending = self._take(wanted)
            if wanted.nbytes:
                self._follow(wanted)
                self._launch_next()
            held = _Held(pending.wait(), uses)
        yield held.value
        held.uses_left -= 1
        if held.uses_left:
            self._held[wanted.key] = held
        elif not keep:
            self._free(wanted, held.value)

    def _take(self, wanted: WeightGather[T]) -> Awaited[T]:
        if wanted.key in self._in_flight:
            _, version, pending = self._in_flight.pop(wanted.key)
            if version == wanted.version():
                return pending
            self._free(wanted, pending.wait())
        return wanted.launch()

    def _follow(self, used: WeightGather) -> None:
        """Move on in the recorded order, or record."""
        if self._kind != BACKWARD and self.in_backward():
            self._close_order()
            if self._kind in self._followed:
                self._followed[self._kind] = True
            self._kind = BACKWARD
        if self._kind is None:
            return  # outside of any pass: layers that somebody calls one by one
        order = self._orders[self._kind]
        if self._cursor < len(order) and order[self._cursor].key != used.key:
            del order[self._cursor :]
        if self._cursor == len(order):
            order.append(used)
        self._cursor += 1
        self._largest = max(self._largest, used.nbytes)

    def _close_order(self) -> None:
        """What the pass did not use after all is not expected again."""
        if self._cursor:
            del self._orders[self._kind][self._cursor :]
        self._cursor = 0

    def _expected(self) -> Iterator[WeightGather]:
        if self._kind is None:
            return
        yield from self._orders[self._kind][self._cursor :]
        if self._followed.get(self._kind):
            yield from self._orders[BACKWARD]

    def _launch_next(self) -> None:
        if not self.on:
            return
        most = self.bound(self._largest)
        in_flight = sum(wanted.nbytes for wanted, _, _ in self._in_flight.values())
        for wanted in self._expected():
            if wanted.key in self._held or wanted.key in self._in_flight:
                continue
            if in_flight and in_flight + wanted.nbytes > most:
                return
            self._in_flight[wanted.key] = wanted, wanted.version(), wanted.launch()
            in_flight += wanted.nbytes

    def _free(self, wanted: WeightGather[T], value: T) -> None:
        for buffer in wanted.buffers(value):
            self.buffers.give_back(buffer)


T = TypeVar("T")

Turns = Generator[None, None, T]
"""Work that pauses wherever another half may use the device while its own message is on its way."""


@dataclass(frozen=True, slots=True)
class HalfTurn:
    """Whose turn it is: this half, of so many."""

    index: int = 0
    of: int = 1


class Engine:
    """The overlap of one model: what its passes did in which order, and what is in flight."""

    def __init__(self, policy: Overlap, *, flights: bool, in_backward: Callable[[], bool] = in_backward) -> None:
        """`flights`: whether backward has any over x or y, behind which products can run."""
        self.policy, self.flights = policy, flights
        self.turn = HalfTurn()
        self.recomputing = False
        """Whether a forward pass is run again in backward, for what backward reads of it."""
        self.buffers = Buffers()
        self.prefetcher = Prefetcher(
            on=policy.prefetch, bound=policy.most_in_flight, buffers=self.buffers, in_backward=in_backward
        )
        self.deferred = DeferredReductions(policy)
        self.wgrad_queue = WgradQueue(WgradQueue.MOST if policy.wgrad_behind_messages and flights else 0)
        self.sums = HalfSums()

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        return Engine(self.policy, flights=self.flights)  # what is in flight belongs to the original

    def begin(self, kind: Hashable) -> None:
        """A forward pass begins. Passes of one kind are expected to use the same weights in the same order."""
        self.turn = HalfTurn()
        self.prefetcher.begin(kind)

    def finish_backward(self) -> None:
        """What is left when a backward pass ends."""
        self.wgrad_queue.run_all()
        self.deferred.land_all()
        self.prefetcher.end()

    def abandon(self) -> None:
        """A pass failed: wait for what it launched and forget what it meant to do."""
        self.wgrad_queue.jobs.clear()
        self.sums.forget()
        self.deferred.forget()
        self.prefetcher.end()

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
            self.turn = HalfTurn(index, len(parts))
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


class DeferredReductions:
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


class WgradQueue:
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


class HalfSums:
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

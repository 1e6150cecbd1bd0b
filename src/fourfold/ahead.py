"""Gathers ahead of their use: what passes used in which order, what is in flight, and the memory that it lands in.

Knows nothing of grids and collectives: it is handed things to launch. Nothing here asks whether something has arrived
yet, so every rank launches in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

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
class Gathering(Generic[T]):
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


class Ahead:
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
        self._orders: dict[Hashable, list[Gathering]] = {BACKWARD: []}
        self._followed: dict[Hashable, bool] = {}
        self._kind: Hashable = None
        self._cursor = 0
        self._in_flight: dict[Hashable, tuple[Gathering, Hashable, Awaited]] = {}
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
    def using(self, wanted: Gathering[T], *, uses: int, keep: bool = False) -> Iterator[T]:
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

    def _take(self, wanted: Gathering[T]) -> Awaited[T]:
        if wanted.key in self._in_flight:
            _, version, pending = self._in_flight.pop(wanted.key)
            if version == wanted.version():
                return pending
            self._free(wanted, pending.wait())
        return wanted.launch()

    def _follow(self, used: Gathering) -> None:
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

    def _expected(self) -> Iterator[Gathering]:
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

    def _free(self, wanted: Gathering[T], value: T) -> None:
        for buffer in wanted.buffers(value):
            self.buffers.give_back(buffer)

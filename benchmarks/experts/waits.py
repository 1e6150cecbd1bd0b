"""How long the host waits for the counts of an all-to-all, and whether the device stands still meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch

from fourfold.nn.dispatch import Dispatch, RowCounts


class WaitTimes(NamedTuple):
    """What the waits of a step took together."""

    number: int
    host: float
    """Seconds for which the host waited."""
    idle: float
    """Seconds for which the device had nothing to compute meanwhile; on the CPU, where the host computes, all."""


class HostWaits:
    """Times blocks in which the host waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._seconds: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait. An event before it is reached when the device has computed all that was launched; an event
        after it is reached at once if the device has nothing left to do. What lies between them is idle."""
        before = self._event()
        began = time.perf_counter()
        yield
        self._seconds.append(time.perf_counter() - began)
        after = self._event()
        if before is not None and after is not None:
            self._events.append((before, after))

    def take(self) -> WaitTimes:
        """Return the waits since the last call; on a GPU the device must be idle."""
        seconds, events, self._seconds, self._events = self._seconds, self._events, [], []
        idle = sum(before.elapsed_time(after) for before, after in events) / 1e3 if self.on_gpu else sum(seconds)
        return WaitTimes(len(seconds), sum(seconds), idle)

    def _event(self) -> torch.cuda.Event | None:
        if not self.on_gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@contextmanager
def counts_through(take: Callable[[Callable[[], RowCounts]], RowCounts]) -> Iterator[None]:
    """Let Fourfold's dispatch take its counts through `take`, which is given what waits for them."""
    launch = Dispatch._launch_counts

    def launching(self: Dispatch, *args: Any) -> Callable[[], RowCounts]:
        return partial(take, launch(self, *args))

    with mock.patch.object(Dispatch, "_launch_counts", launching):
        yield


def waits_of_dispatch(waits: HostWaits) -> AbstractContextManager[None]:
    """Time the waits of Fourfold's dispatch for counts inside the block."""

    def timed(counting: Callable[[], RowCounts]) -> RowCounts:
        with waits.waiting():
            return counting()

    return counts_through(timed)

"""When the actions of a pipeline's step ran on one rank: what the run's page draws beside the schedule as planned.

An action begins when its message is there, so that a wait for it shows as a bubble, and ends before its result is
sent. On a GPU events mark both on the stream that computes, and the host does not wait for them.
"""

from __future__ import annotations

import time

import torch

from fourfold.schedule.action import Action
from fourfold.schedule.play import ActionSpan

Mark = float | torch.cuda.Event


class ActionTimes:
    """Records the actions of one step on this rank."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            torch.cuda.synchronize(device)  # the event below must not wait for earlier work: its time is the host's
        self._zero = time.time()
        """The wall clock at the first mark: it places the actions of several ranks beside each other on a page."""
        self._first = self._mark()
        self._began: Mark | None = None
        self._marks: list[tuple[Action, Mark, Mark]] = []

    def begin(self) -> None:
        """Note that an action begins; a second call says that it only begins now, because it has waited."""
        self._began = self._mark()

    def end(self, action: Action) -> None:
        """Note that an action has ended, unless that was noted before."""
        if self._began is not None:
            self._marks.append((action, self._began, self._mark()))
            self._began = None

    def spans(self) -> list[ActionSpan]:
        """Return the actions with their times by the wall clock, in seconds; on a GPU the host waits for them."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [ActionSpan(action, self._seconds(began), self._seconds(ended)) for action, began, ended in self._marks]

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return self._zero + mark - self._first  # type: ignore[operator]
        return self._zero + self._first.elapsed_time(mark) * 1e-3  # type: ignore[union-attr]

"""SIGTERM during training: all ranks stop after the same step, so that they can save it together.

The signal reaches the ranks at different times, or only some of them. The handler notes it; now and then, at steps that
all ranks know, they tell each other through the job's store whether any of them was asked. That happens about once a
second, or after every step where steps take longer, and more rarely where it would take more than a hundredth of the
time. Nothing here is a collective, and a rank that waits for the others can still be interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil, inf, isfinite
from threading import Timer
from types import FrameType

from fourfold.grid import Grid
from fourfold.job import Channel
from fourfold.train.launch import LONGEST
from fourfold.train.process import TERMINATED

SECONDS = 1.0
"""About how often the ranks ask each other."""
SHARE = 0.01
"""The most of the time that may take."""
SAME = 5.0
"""Seconds in which a further SIGTERM is the same request: a scheduler sends it to ranks and to what started them, which
passes it on."""


class Stop:
    """Whether this run was asked to stop. All ranks make it together and ask it after the same steps.

    `grace` seconds after the signal a rank that is still there ends as it stands, however long its step, its evaluation
    or its checkpoint would take, and whoever it waits for.
    """

    def __init__(self, grid: Grid, grace: float = inf) -> None:
        self._rank, self._grace = grid.rank, grace
        # without a deadline of its own: the alarm ends a wait that is too long
        self._channel = Channel("stop", grid.channel.ranks, seconds=inf, fresh=True)
        self._asked_at: float | None = None
        self._next = 0
        """The step after which the ranks ask each other again."""
        self._last: tuple[int, float] | None = None
        """The step after which they did, and when."""

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def met_after(self) -> int | None:
        """The step after which all ranks asked each other for the last time."""
        return self._last[0] if self._last is not None else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first SIGTERM asks to stop; a later one does what it did before."""
        before = signal.getsignal(signal.SIGTERM)
        late = Timer(min(self._grace, LONGEST), self._end)
        late.daemon = True

        def ask(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self._asked_at is None:
                self._asked_at = now
                if isfinite(self._grace):
                    late.start()
            elif now - self._asked_at > SAME and callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            late.cancel()
            if signal.getsignal(signal.SIGTERM) is ask:  # unless an interrupt has put it out of use
                signal.signal(signal.SIGTERM, before)

    def _end(self) -> None:
        if self._rank == 0:
            said = f"asked to stop by SIGTERM, and not done after {self._grace:g} s (watch.grace); ends as it stands"
            print(f"fourfold: {said}", file=sys.stderr, flush=True)
        os._exit(TERMINATED)

    def after(self, step: int) -> bool:
        """Whether to stop after this step: the same on all ranks."""
        if len(self._channel.ranks) == 1:
            return self.asked
        if step < self._next:
            return False
        stop, self._next = self._agree(step)
        return stop

    def _agree(self, step: int) -> tuple[bool, int]:
        """Return whether any rank was asked to stop, and the next step after which the ranks ask each other."""
        began = time.monotonic()

        def judge(asked: Sequence[str]) -> str:
            return f"{int('1' in asked)} {step + self._pause(step, began)}"

        asked, after = self._channel.decide(str(int(self.asked)), judge).split()
        self._last = step, time.monotonic()
        return asked == "1", int(after)

    def _pause(self, step: int, began: float) -> int:
        """Steps until the next time."""
        if self._last is None:
            return 1
        last, when = self._last
        seconds = max(1e-6, (began - when) / (step - last))
        return max(1, ceil(max(SECONDS, (time.monotonic() - began) / SHARE) / seconds))

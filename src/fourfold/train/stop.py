"""SIGTERM during training: all ranks stop after the same step, so that they can save it together.

The signal reaches the ranks at different times, or only some of them. The handler only notes it. After certain steps,
which all ranks know, the ranks ask each other through a channel whether any of them got the signal: about once per
second, or after every step where steps take longer, and less often where asking would take more than a hundredth of the
time.
Nothing here is a collective, and a rank that waits for the others can still be interrupted.
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
from fourfold.train.launch import MAX_SECONDS
from fourfold.train.process import TERMINATED

SECONDS = 1.0
"""Seconds between two times that the ranks ask each other, about: schedulers grant 30 s or more after SIGTERM."""
SHARE = 0.01
"""Asking may take at most this share of the training time."""
SAME_SECONDS = 5.0
"""Seconds in which a further SIGTERM is the same request: a scheduler sends it to the ranks and to their launcher,
which sends it on to them."""


class Stop:
    """Whether this run was asked to stop. All ranks make it together and call `after` with the same steps.

    A rank that still runs `grace` seconds after the signal ends at once, whatever it does or waits for.
    """

    def __init__(self, grid: Grid, grace: float = inf) -> None:
        self._rank, self._grace = grid.rank, grace
        # without a deadline of its own: the alarm ends a wait that is too long
        self._channel = grid.channel.open("stop", seconds=inf, fresh=True)
        self._asked_at: float | None = None
        self._next = 0
        """The step after which the ranks ask each other the next time."""
        self._last: tuple[int, float] | None = None
        """The step after which they asked each other last, and when."""

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def met_after(self) -> int | None:
        """The step after which all ranks asked each other last."""
        return self._last[0] if self._last is not None else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first SIGTERM asks the run to stop; a later one does what it did before."""
        before = signal.getsignal(signal.SIGTERM)
        late = Timer(min(self._grace, MAX_SECONDS), self._end)
        late.daemon = True

        def ask(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self._asked_at is None:
                self._asked_at = now
                if isfinite(self._grace):
                    late.start()
            elif now - self._asked_at > SAME_SECONDS and callable(before):
                before(number, frame)

        signal.signal(signal.SIGTERM, ask)
        try:
            yield
        finally:
            late.cancel()
            if signal.getsignal(signal.SIGTERM) is ask:  # an interrupt may have replaced it, to ignore the signal
                signal.signal(signal.SIGTERM, before)

    def _end(self) -> None:
        if self._rank == 0:
            said = f"asked to stop by SIGTERM, and not done after {self._grace:g} s (watch.grace); ends now"
            print(f"fourfold: {said}", file=sys.stderr, flush=True)
        os._exit(TERMINATED)

    def after(self, step: int) -> bool:
        """Return whether to stop after this step, the same on all ranks."""
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
            # runs on the last rank to come, so the time since `began` is the cost of asking, without waiting for others
            return f"{int('1' in asked)} {step + self._pause(step, began)}"

        asked, after = self._channel.decide(str(int(self.asked)), judge).split()
        self._last = step, time.monotonic()
        return asked == "1", int(after)

    def _pause(self, step: int, began: float) -> int:
        """Return the number of steps until the ranks ask each other the next time."""
        if self._last is None:
            return 1
        last, when = self._last
        seconds = max(1e-6, (began - when) / (step - last))  # per step
        return max(1, ceil(max(SECONDS, (time.monotonic() - began) / SHARE) / seconds))

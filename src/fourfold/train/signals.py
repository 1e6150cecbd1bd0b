"""How signals end a process and a run, and the exit codes that follow.

SIGINT (Ctrl-C) raises KeyboardInterrupt. SIGTERM does the same, except while a run trains: then `Stop` lets all ranks
finish the same step, so that they can save it together.

The signal reaches the ranks at different times, or only some of them. The handler only notes it. After certain steps,
which all ranks know, the ranks ask each other through a channel whether any of them got the signal: about once per
second, or after every step if steps take longer, and less often if asking would take more than a hundredth of the time.
Nothing here is a collective, and a rank that waits for the others can still be interrupted.

This file imports no torch, because a command uses it before it imports torch.
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
from typing import TYPE_CHECKING, NoReturn

from fourfold.train.console import drain_output

if TYPE_CHECKING:
    from fourfold.grid import Grid

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of processes that SIGINT and SIGTERM have ended. Shells use the same: 128 plus the signal's number."""
READABLE = "what was written stays readable"
"""What every message about an early end promises."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAX_SECONDS = 10**6
"""Stands for no limit where an API wants a finite number of seconds; about eleven days."""
ASK_EVERY_SECONDS = 1.0
"""About how often the ranks ask each other whether to stop. Schedulers grant 30 s or more after SIGTERM."""
ASK_SHARE = 0.01
"""Asking may take at most this share of the training time."""
SAME_SIGNAL_SECONDS = 5.0
"""A further SIGTERM within these seconds is the same request: a scheduler sends the signal to the ranks and to their
launcher, and the launcher forwards it to them."""


def ignore_signals() -> None:
    """Ignore both signals, in a process that is ending already and has something to report first."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def raise_on_signals() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt."""

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        ignore_signals()  # the terminal and the agent may both send one, and the second must not disturb the end
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise KeyboardInterrupt; afterwards they do what they did before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    raise_on_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Stop:
    """Whether this run was asked to stop. All ranks make it together and call `after` with the same steps.

    A rank that still runs `grace` seconds after the signal ends at once, whatever it does or waits for.
    """

    def __init__(self, grid: Grid, grace: float = inf) -> None:
        self._rank, self._grace = grid.rank, grace
        # The channel has no deadline of its own: the timer below ends a wait that is too long.
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
        late.daemon = True  # a run that ends in time must not wait for the timer

        def ask(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if self._asked_at is None:
                self._asked_at = now
                if isfinite(self._grace):
                    late.start()
            elif now - self._asked_at > SAME_SIGNAL_SECONDS and callable(before):
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
        drain_output()
        os._exit(TERMINATED)  # the main thread may never return from where it waits

    def after(self, step: int) -> bool:
        """Return whether to stop after this step, the same on all ranks."""
        if len(self._channel.ranks) == 1:
            return self.asked
        if step < self._next:
            return False
        began = time.monotonic()

        def judge(asked: Sequence[str]) -> str:
            # This runs on the last rank to arrive, so the time since `began` is the cost of asking, without any wait.
            return f"{int('1' in asked)} {step + self._pause(step, began)}"

        asked, following = self._channel.decide(str(int(self.asked)), judge).split()
        self._last, self._next = (step, time.monotonic()), int(following)
        return asked == "1"

    def _pause(self, step: int, began: float) -> int:
        """Return the number of steps until the ranks ask each other the next time."""
        if self._last is None:
            return 1  # nothing is known yet about how long a step takes
        last, when = self._last
        seconds_per_step = max(1e-6, (began - when) / (step - last))  # never 0: it divides below
        return max(1, ceil(max(ASK_EVERY_SECONDS, (time.monotonic() - began) / ASK_SHARE) / seconds_per_step))

"""How signals end a process and a run, and the exit codes that follow.

SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGQUIT raise KeyboardInterrupt, except while a run trains: then `Stop` lets all
ranks finish the same step, so that they can save it together. SIGHUP is left alone if it was ignored when the program
started, as under `nohup`.

A signal reaches the ranks at different times, or only some of them. The handler only notes it. After certain steps,
which all ranks know, the ranks ask each other through a channel whether any of them got a signal: about once per
second, or after every step if steps take longer, and less often if asking would take more than a hundredth of the time.
Nothing here is a collective, and a rank that waits for the others can still be interrupted.

This file imports no torch, because a command uses it before it imports torch.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import ceil, inf, isfinite
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from threading import Timer
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from fourfold.environment import MAX_SECONDS, is_watched
from fourfold.train.console import drain_output, write_now

if TYPE_CHECKING:
    from fourfold.grid import Grid

INTERRUPTED = 128 + SIGINT
"""The exit code of a process that Ctrl-C has ended. Shells use the same: 128 plus the signal's number."""
READABLE = "what was written stays readable"
"""What every message about an early end promises."""
NAMES: dict[int, str] = {SIGINT: "Ctrl-C", SIGTERM: "SIGTERM", SIGHUP: "SIGHUP", SIGQUIT: "SIGQUIT"}
"""The signals that ask a process to end, and how messages name them."""
SIGNALS = tuple(number for number in NAMES if number != SIGHUP or signal.getsignal(SIGHUP) != signal.SIG_IGN)
"""The signals that are handled; SIGHUP is not if it was ignored when the program started."""
STOP_CODES = {128 + number: number for number in NAMES}
"""The exit codes of processes that were asked to end, and the signals behind them."""
ASK_EVERY_SECONDS = 1.0
"""About how often the ranks ask each other whether to stop. Schedulers grant 30 s or more after SIGTERM."""
ASK_SHARE = 0.01
"""Asking may take at most this share of the training time."""
MAX_ASK_SECONDS = 10.0
"""The most seconds between two askings, however long one took: a launcher that was stopped, or a network that stood
still, must not make the ranks deaf for a hundred times as long."""
SAME_SIGNAL_SECONDS = 5.0
"""A further SIGTERM or SIGHUP within these seconds is the same request: a scheduler sends the signal to the ranks and
to their launcher, and the launcher forwards it to them."""
SAME_PRESS_SECONDS = 0.3
"""A further SIGINT within these seconds is the same Ctrl-C, which the terminal and a wrapper such as `timeout` have
both delivered. People press a key twice more slowly."""
CTRL_C_HEARD = "\nfourfold: Ctrl-C: saves after this step and ends; press Ctrl-C again to end at once\n"


def ignore_signals() -> None:
    """Ignore these signals, in a process that is ending already and has something to report first."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def raise_on_signals() -> None:
    """Let the signals raise KeyboardInterrupt."""

    def interrupt(_: int, __: FrameType | None) -> NoReturn:
        ignore_signals()  # the terminal and the agent may both send one, and the second must not disturb the end
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, interrupt)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside, the signals raise KeyboardInterrupt; afterwards they do what they did before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    raise_on_signals()
    try:
        yield
    finally:
        _restore(before)


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Hold signals back inside, and deliver them afterwards.

    For starting a process: an exception between its start and the assignment to a variable would leave it behind. The
    signals are not blocked, because the new process would inherit that.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    held: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        _restore(before)
        for number in held:
            signal.raise_signal(number)


def _restore(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


class StopRequest:
    """The signals by which this process was asked to end, and whether it should end at once."""

    def __init__(self) -> None:
        self.signal = 0
        """The first signal, 0 if there was none."""
        self._at = 0.0

    def add(self, number: int) -> bool:
        """Note a signal; return whether it asks for more than the first one did: for an end at once."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self._at = number, now
            return False
        return now - self._at > (SAME_PRESS_SECONDS if number == SIGINT else SAME_SIGNAL_SECONDS)


class Verdict(NamedTuple):
    """What all ranks do after a step."""

    signal: int = 0
    """The signal by which a rank was asked to stop, 0 to go on."""
    save: bool = False
    """Whether a rank wants a checkpoint now."""
    late: bool = False
    """Whether the time of the run is over by the clock of a rank."""


class Stop:
    """Whether this run was asked to stop. All ranks make it together and call `after` with the same steps.

    A rank that still runs `grace` seconds after the signal ends at once, whatever it does or waits for.
    """

    def __init__(self, grid: Grid, grace: float = inf) -> None:
        self._rank, self._grace = grid.rank, grace
        # The channel has no deadline of its own: the timer below ends a wait that is too long.
        self._channel = grid.channel.open("stop", seconds=inf, fresh=True)
        self._request = StopRequest()
        self._decided = False
        """Whether the ranks have agreed to stop."""
        self._next = 0
        """The step after which the ranks ask each other the next time."""
        self._last: tuple[int, float] | None = None
        """The step after which they asked each other last, and when."""

    @property
    def met_after(self) -> int | None:
        """The step after which all ranks asked each other last."""
        return self._last[0] if self._last is not None else None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the first signal asks the run to stop; a later one does what it did before.

        Once the ranks have agreed to stop, only Ctrl-C still does: a launcher sends SIGTERM to the other ranks when the
        first one has ended, and must not interrupt what they have left to do.
        """
        before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
        late = Timer(min(self._grace, MAX_SECONDS), self._end)
        late.daemon = True  # a run that ends in time must not wait for the timer

        def ask(number: int, frame: FrameType | None) -> None:
            first, at_once = not self._request.signal, self._request.add(number)
            if first:
                if isfinite(self._grace):
                    late.start()
                if number == SIGINT and self._rank == 0 and not is_watched():  # a launcher says it itself
                    write_now(CTRL_C_HEARD)
            elif at_once and (number == SIGINT or not self._decided) and callable(before[number]):
                before[number](number, frame)

        for number in SIGNALS:
            signal.signal(number, ask)
        try:
            yield
        finally:
            late.cancel()
            if self._decided:
                ignore_signals()
            elif signal.getsignal(SIGTERM) is ask:  # an interrupt may have replaced it, to ignore the signals
                _restore(before)

    def _end(self) -> None:
        if self._rank == 0:
            name = NAMES[self._request.signal]
            said = f"asked to stop by {name}, and not done after {self._grace:g} s (watch.grace); ends now"
            print(f"fourfold: {said}", file=sys.stderr, flush=True)
        drain_output()
        os._exit(128 + self._request.signal)  # the main thread may never return from where it waits

    def after(self, step: int, *, save: bool = False, late: bool = False) -> Verdict:
        """Return what to do after this step, the same on all ranks.

        `save` says that this rank wants a checkpoint, `late` that the time of the run is over by its clock.
        """
        mine = Verdict(self._request.signal, save, late)
        if len(self._channel.ranks) == 1:
            self._decided = bool(mine.signal)
            return mine
        if step < self._next:
            return Verdict()
        began = time.monotonic()

        def judge(texts: Sequence[str]) -> str:
            # This runs on the last rank to arrive, so the time since `began` is the cost of asking, without any wait.
            signals, saves, lates = zip(*(map(int, text.split()) for text in texts), strict=True)
            return f"{max(signals)} {max(saves)} {max(lates)} {step + self._pause(step, began)}"

        asked = f"{mine.signal:d} {save:d} {late:d}"
        number, saves, lates, following = map(int, self._channel.decide(asked, judge).split())
        self._last, self._next = (step, time.monotonic()), following
        self._decided = bool(number)
        return Verdict(number, bool(saves), bool(lates))

    def _pause(self, step: int, began: float) -> int:
        """Return the number of steps until the ranks ask each other the next time."""
        if self._last is None:
            return 1  # nothing is known yet about how long a step takes
        last, when = self._last
        seconds_per_step = max(1e-6, (began - when) / (step - last))  # never 0: it divides below
        pause = min(max(ASK_EVERY_SECONDS, (time.monotonic() - began) / ASK_SHARE), MAX_ASK_SECONDS)
        return max(1, ceil(pause / seconds_per_step))

"""How signals end a process, and its exit codes. Imports no torch: a command uses it before it imports torch."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of processes that SIGINT and SIGTERM have ended, as shells have them: 128 and the signal's number."""
READABLE = "what was written stays readable"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen_to_signals() -> None:
    """From now on let SIGTERM end a run as Ctrl-C does.

    A second signal is ignored, because the terminal and the agent may both send one.
    """
    for number in SIGNALS:
        signal.signal(number, _interrupt)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside, SIGINT and SIGTERM raise KeyboardInterrupt; afterwards they do what they did before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen_to_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """Ignore both signals, in a process that ends already and has something to report first."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    ignore_signals()
    raise KeyboardInterrupt

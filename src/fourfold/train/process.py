"""How signals end a process, and its exit codes. Imports no torch: a command may use it before it does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of what SIGINT and SIGTERM have ended."""
READABLE = "what was written stays readable"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen_to_signals() -> None:
    """From now on SIGTERM ends a run as Ctrl-C does; once is enough, though terminal and agent may both send it."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """Inside, they are listened to in this way."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    listen_to_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ignore_signals() -> None:
    """This process ends already, and has something to say first."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _interrupt(_: int, __: FrameType | None) -> NoReturn:
    ignore_signals()
    raise KeyboardInterrupt

"""What this process is among others, and how signals end it. Imports no torch: a command may ask before it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes of what SIGINT and SIGTERM have ended."""
STARTED_BY_US = "FOURFOLD_LAUNCHED"
READABLE = "what was written stays readable"
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def inside_a_job() -> bool:
    """Whether torchrun, SLURM or our own launcher started this process as one of several ranks."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def is_watched() -> bool:
    """Whether our launcher has started this rank, and will see who dies; torchrun names the first that it sees."""
    return STARTED_BY_US in os.environ


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

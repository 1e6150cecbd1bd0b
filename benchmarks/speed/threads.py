"""The CPU seconds of this process by kind of thread: what keeps the cores busy during a step.

Kinds are the kernel's names of the threads without their numbers, such as `pt_autograd` or `NCCL Progress`. Threads
that Python started are named after their function (`liveness._watch_clock`), the main thread is `main`, and a thread
that nobody has named is `unnamed`: it has the name of the program.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

TASKS = Path("/proc/self/task")
TICKS = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second in /proc/*/stat."""

Threads = dict[int, tuple[str, float]]
"""By thread id: the kind of thread, and its CPU seconds since it started."""


def thread_seconds() -> Threads:
    """Return the CPU seconds of every thread that is alive."""
    known = _python_threads()
    return {number: (known.get(number, kind), spent) for number, kind, spent in _tasks()}


def since(before: Threads) -> dict[str, float]:
    """Return the CPU seconds by kind of thread since `before`, without kinds that spent none. Threads that ended in
    between are missed."""
    found: dict[str, float] = {}
    for number, (kind, spent) in thread_seconds().items():
        spent -= before.get(number, (kind, 0.0))[1]
        if spent > 0:
            found[kind] = found.get(kind, 0.0) + spent
    return found


def _python_threads() -> dict[int, str]:
    """Return the kinds of the threads that Python started, by their ids."""
    found = {}
    for thread in threading.enumerate():
        if thread.native_id is None:
            continue
        if thread is threading.main_thread():
            found[thread.native_id] = "main"
        else:
            # Python calls a thread without a name `Thread-3 (function)`
            function = re.fullmatch(r"Thread-\d+ \((.+)\)", thread.name)
            found[thread.native_id] = f"python {function[1] if function else without_number(thread.name)}"
    return found


def _tasks() -> Iterator[tuple[int, str, float]]:
    own = without_number((TASKS / str(os.getpid()) / "comm").read_text().strip())
    for task in TASKS.iterdir():
        try:
            kind = without_number((task / "comm").read_text().strip())
            yield int(task.name), "unnamed" if kind == own else kind, _spent(task)
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has ended


def _spent(task: Path) -> float:
    """Return nanoseconds of the scheduler where the kernel counts them, otherwise clock ticks, as seconds."""
    precise = task / "schedstat"
    if precise.exists():
        return int(precise.read_text().split()[0]) / 1e9
    after_name = (task / "stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS


def without_number(name: str) -> str:
    return re.sub(r"[\s_:#-]*\d+$", "", name) or name

"""Detect that a rank on this machine has died, by looking for its process.

A rank that dies leaves others waiting. Ranks that wait for bytes over a connection notice it; ranks that wait for a
text in the job's store do not. But every rank can look whether the processes that the same parent has started on this
machine still run.

Each rank appends `RANK:PROCESS` to the list of its host and parent: when it starts, and again when it is done. A
process that is listed once and does not run any more has died.
"""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fourfold.job import Channel


class Siblings:
    """The ranks that the parent of this process has started on this machine; all ranks of the channel make it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._key = f"siblings/{socket.gethostname()}/{os.getppid()}"
        self._mine = f"{channel.rank}:{os.getpid()}"
        self._processes: dict[int, int] = {}
        self._channel.append(self._key, self._mine)

    def leave(self) -> None:
        """Say that this rank is done, so that nobody takes its end for a death."""
        self._channel.append(self._key, self._mine)

    def dead(self) -> dict[int, int]:
        """Return the processes, by rank, that do not run any more and had not left."""
        dead = {}
        for word, times in Counter(self._channel.words(self._key)).items():
            rank, process = map(int, word.split(":"))
            self._processes[rank] = process
            if times == 1 and not is_sibling(process):
                dead[rank] = process
        return dead

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill those of the ranks that are siblings: a process that was stopped would not end by SIGTERM."""
        for rank in ranks:
            process = self._processes.get(rank)
            if process is not None and is_sibling(process):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def is_sibling(process: int) -> bool:
    """Return whether a process runs and has the same parent as this one; True where there is no /proc to tell."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    # after the name, which may hold anything up to the last parenthesis: the state, then the parent
    how, parent, *_ = state.rpartition(")")[2].split()
    return how not in "ZX" and int(parent) == os.getppid()

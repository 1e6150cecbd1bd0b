"""Ranks that the same process has started on this machine: which of them are gone.

A rank that dies leaves others waiting. Where they wait for bytes over a connection they notice; not where they wait for
its word in the job's store, nor on every network. But whoever runs on the same machine can look whether it is there.

In the store each rank writes its name, `RANK:PROCESS`, in the list of those who have the same host and parent: when it
comes, and again before it leaves because it is done. So who stands there once and runs no more has died.
"""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist


class Siblings:
    """Of this rank, itself among them; `name` is of one list of names, which all ranks make together."""

    def __init__(self, store: dist.Store, name: str, rank: int) -> None:
        self._store = store
        self._key = f"{name}/{socket.gethostname()}/{os.getppid()}"
        self._mine = f"{rank}:{os.getpid()} "
        self._processes: dict[int, int] = {}
        self._store.append(self._key, self._mine)  # type: ignore[attr-defined]

    def leave(self) -> None:
        """This rank is done: nobody need wait for it."""
        self._store.append(self._key, self._mine)  # type: ignore[attr-defined]

    def dead(self) -> dict[int, int]:
        """The processes, by rank, of those that are gone and had not left."""
        dead = {}
        for name, times in Counter(self._store.get(self._key).decode().split()).items():
            rank, process = map(int, name.split(":"))
            self._processes[rank] = process
            if times == 1 and not is_ours(process):
                dead[rank] = process
        return dead

    def kill(self, ranks: Iterable[int]) -> None:
        """Those of them that are siblings: a stopped process would not end when told to."""
        for rank in ranks:
            process = self._processes.get(rank)
            if process is not None and is_ours(process):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)


def is_ours(process: int) -> bool:
    """Whether it runs and has the same parent as this one; where there is no /proc nobody knows, and it has."""
    if not Path("/proc/self/stat").exists():
        return True
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    how, parent, *_ = state.rpartition(")")[2].split()
    return how not in "ZX" and int(parent) == os.getppid()

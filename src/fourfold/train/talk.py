"""What ranks tell each other through the job's store, where none may wait for ever and no process group is needed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from fourfold import store as job_store

T = TypeVar("T")

LEAST_PAUSE, LONGEST_PAUSE = 1e-4, 0.05
"""Seconds between two questions to the store."""


class Talk:
    """Of one rank with the others, all of it within so many seconds."""

    def __init__(self, store: dist.Store, rank: int, world: int, seconds: float) -> None:
        self.rank, self.world = rank, world
        self._store = dist.PrefixStore("fourfold/talk", store)
        self._until = time.monotonic() + seconds

    @classmethod
    def join(cls, rank: int, world: int, seconds: float, patience: float) -> Talk:
        """Through the store of torchrun's or SLURM's job, which must be there within the patience."""
        if world == 1:
            return cls(dist.HashStore(), rank, world, seconds)
        timeout = timedelta(seconds=patience)
        try:
            store = job_store.join(rank, world, timeout)
            if store is None:
                store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
        except RuntimeError as error:
            raise TimeoutError(
                f"rank {rank} of {world} did not find the job's store within {patience:.0f} s ({error}); look at "
                "MASTER_ADDR and MASTER_PORT, and whether rank 0 was started"
            ) from error
        os.environ[job_store.AGENT_HAS_ONE] = "True"  # so a process group to come finds this one
        return cls(store, rank, world, seconds)

    def left(self, seconds: float) -> float:
        """So many seconds, or what is left of all."""
        return max(0.0, min(seconds, self._until - time.monotonic()))

    def put(self, name: str, text: str) -> None:
        self._store.set(name, text)

    def hear(self, name: str, seconds: float) -> str:
        """What a rank has put, or will within the seconds."""
        if not self._comes([name], seconds):
            raise TimeoutError(f"rank {self.rank} heard nothing of {name!r} in time; look at what rank 0 does")
        return self._store.get(name).decode()

    def gather(self, name: str, text: str, seconds: float) -> dict[int, str]:
        """On rank 0 what all ranks have put in time, by rank; nothing elsewhere."""
        self.put(f"{name}/{self.rank}", text)
        if self.rank:
            return {}
        keys = [f"{name}/{rank}" for rank in range(self.world)]
        whole = self._comes(keys, seconds)
        came = [rank for rank, key in enumerate(keys) if whole or self._store.check([key])]
        return {rank: self._store.get(keys[rank]).decode() for rank in came}

    def meet(self, name: str, seconds: float) -> None:
        """Wait until all ranks are here, or as long."""
        if self._store.add(f"{name}/count", 1) == self.world:
            self.put(f"{name}/all", "here")
        with suppress(RuntimeError):  # the store may leave with its rank once all have met
            self._comes([f"{name}/all"], seconds)

    def _comes(self, keys: list[str], seconds: float) -> bool:
        """Whether they are there in time; asks, since torch complains of waits that end without."""
        until, pause = time.monotonic() + self.left(seconds), LEAST_PAUSE
        while not (there := self._store.check(keys)) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return there


def within(seconds: float, act: Callable[[], T]) -> T:
    """What it gives, unless it takes longer; then its thread is left behind, and the process must end by itself."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend((True, act()))
        except BaseException as error:  # raised again where it is waited for
            found.extend((False, error))

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if len(found) < 2:
        raise TimeoutError(f"no end after {seconds:.0f} s")
    done, result = found
    if not done:
        raise result
    return result

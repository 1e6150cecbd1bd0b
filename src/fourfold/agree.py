"""What all ranks of a job decide together, through its key-value store.

No process group beyond the default one need exist, and a rank that differs is named, not waited for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from threading import main_thread

import torch.distributed as dist

from fourfold.errors import Failure


def agree(what: str, text: str, fault: Exception | None = None) -> None:
    """Raise the same error on every rank unless all of them hold the same text and no fault."""
    verdict = decide(text, partial(_verdict, what))
    if verdict:
        raise ValueError(verdict)
    if fault is not None:
        raise fault


def decide(text: str, judge: Callable[[Sequence[str]], str]) -> str:
    """Rank 0 judges what all ranks wrote; every rank gets the verdict."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1 or dist.get_backend() == "fake":
        return judge([text])
    store = dist.distributed_c10d._get_default_store()
    seconds = store.timeout.total_seconds()  # type: ignore[attr-defined]
    number = store.add(f"fourfold/agree/count/{rank}", 1)
    key, before = f"fourfold/agree/{number}", f"fourfold/agree/{number - 1}"
    store.set(f"{key}/{rank}", text)
    if number > 1:
        store.delete_key(f"{before}/{rank}")  # rank 0 has read it: there was a verdict
    if rank == 0:
        wait_for(store, [f"{key}/{r}" for r in range(world)], seconds)
        texts = [found.decode() for found in store.multi_get([f"{key}/{r}" for r in range(world)])]
        store.delete_key(f"{before}/verdict")  # all have read it: they are here
        store.set(f"{key}/verdict", judge(texts))
    wait_for(store, [f"{key}/verdict"], seconds)
    return store.get(f"{key}/verdict").decode()


def wait_for(store: dist.Store, keys: Sequence[str], seconds: float = inf) -> None:
    """Until the keys are there. Asks again and again, since no handler of a signal could run in a wait of the store's
    own: Ctrl-C would not be heard."""
    until, pause = time.monotonic() + seconds, 0.0005
    while not store.check(list(keys)):
        if time.monotonic() > until:
            raise TimeoutError(f"after {seconds:.0f} s some ranks had not come to {keys[-1]}")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)


def faults_of(what: str, fault: str, failure: Failure, same: str) -> tuple[str, Failure, str]:
    """Return the first rank's fault in words, its kind, and how the ranks' `same` texts differ."""
    told = decide(json.dumps([fault, failure, same]), partial(_judge, what))
    found, failure, differs = json.loads(told)
    return found, Failure(failure), differs


def _judge(what: str, texts: Sequence[str]) -> str:
    told = [json.loads(text) for text in texts]
    faults = ((f"rank {rank}: {fault}", failure) for rank, (fault, failure, _) in enumerate(told) if fault)
    return json.dumps([*next(faults, ("", Failure.ERROR)), _verdict(what, [same for *_, same in told])])


def _verdict(what: str, texts: Sequence[str]) -> str:
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if not others:
        return ""
    ranks = ", ".join(str(rank) for rank in others[:8]) + (" ..." if len(others) > 8 else "")
    return (
        f"ranks disagree on {what}: rank 0 has {texts[0]!r}, rank {others[0]} has {texts[others[0]]!r} "
        f"(ranks unlike rank 0: {ranks}); give every rank the same"
    )


class Board:
    """Where every rank puts up a text and rank 0 reads all of them once they are there.

    Nobody waits but rank 0, which asks from time to time, through a connection of its own: other threads may use it
    while this one agrees with the other ranks on something else.
    """

    ASK_SECONDS = 0.02
    LAST_SECONDS = 30.0
    """For how long a process that has ended otherwise still waits for the others."""

    def __init__(self, name: str) -> None:
        self._store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
        self._name = f"fourfold/board/{name}"

    def put(self, text: str) -> None:
        self._store.set(f"{self._name}/{dist.get_rank()}", text)
        self._store.add(f"{self._name}/count", 1)

    def read(self, seconds: float) -> list[str]:
        """All texts by rank, which are taken down; on rank 0."""
        world, until = dist.get_world_size(), time.monotonic() + seconds
        while self._store.add(f"{self._name}/count", 0) < world:
            if not main_thread().is_alive():
                until = min(until, time.monotonic() + self.LAST_SECONDS)
            if time.monotonic() > until:
                raise TimeoutError(f"after {seconds:.0f} s some of {world} ranks had nothing to say of {self._name}")
            time.sleep(self.ASK_SECONDS)
        keys = [f"{self._name}/{rank}" for rank in range(world)]
        texts = [text.decode() for text in self._store.multi_get(keys)]
        for key in (*keys, f"{self._name}/count"):
            self._store.delete_key(key)
        return texts

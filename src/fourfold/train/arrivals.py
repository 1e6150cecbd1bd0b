"""What a launcher sees of the ranks of one start: whether all of them join the job, and why one was killed.

A rank that is stopped, or that hangs while it imports torch, reaches no other rank, so nobody but its launcher can name
it. The launcher serves the job's store, in which every rank that joins puts its name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Event, Thread

import torch.distributed as dist

from fourfold.errors import Failure
from fourfold.job import arrived
from fourfold.watch.liveness import PAUSE, AwakeClock, Phase, RankEnd
from fourfold.watch.memory import LESS_ON_HOST, MemoryWatch
from fourfold.watch.processes import ProcessState, process_state


class Arrivals:
    """One start of local ranks, which have this many seconds to join the job. Ranks that do not are killed."""

    def __init__(self, ranks: int, seconds: float) -> None:
        self._ranks, self.seconds = ranks, seconds
        self.processes: dict[int, int] = {}
        """The process of each rank; whoever starts a rank adds it."""
        self._memory = MemoryWatch()
        self._over = Event()
        self._named: dict[int, str] = {}

    def watch(self, store: dist.TCPStore) -> None:
        """Watch the store that the ranks are about to join; whoever serves it calls this before they start."""
        Thread(target=self._look, args=(store.clone(),), daemon=True).start()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stop watching: the ranks have ended."""
        self._over.set()

    def _look(self, store: dist.Store) -> None:
        clock, began = AwakeClock(), time.monotonic()
        pause = min(PAUSE, self.seconds / 5)
        with suppress(RuntimeError):  # the store is closed with the launcher
            while (missing := set(range(self._ranks)) - arrived(store, self._ranks)) and not self._over.wait(pause):
                clock.tick(pause)
                self._look_at_memory()
                if clock.since(began) > self.seconds:
                    self._end(missing)
                    return
            self._look_at_memory()  # once more: a wrapper may have moved a rank while it started

    def _look_at_memory(self) -> None:
        """Note the control groups of the ranks."""
        for process in tuple(self.processes.values()):
            self._memory.look(process)

    def _end(self, missing: set[int]) -> None:
        """Name the ranks that have not joined, and kill them; the agent ends the others when it sees that."""
        named = "; ".join(f"rank {rank} {_whereabouts(self.processes.get(rank))}" for rank in sorted(missing))
        self._named = dict.fromkeys(missing, f"not joined {self.seconds:g} s after the start (watch.start): {named}")
        for rank in missing & self.processes.keys():
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank], signal.SIGKILL)  # a stopped process does not react to SIGTERM

    def explain(self, ends: Sequence[RankEnd]) -> list[RankEnd]:
        """Return the ends of the ranks with what this launcher knows about those that were killed."""
        return [self._explained(end) for end in ends]

    def _explained(self, end: RankEnd) -> RankEnd:
        if end.exit_code != -signal.SIGKILL or end.failure is not None:
            return end
        if end.rank in self._named:
            return replace(end, failure=Failure.DIAGNOSIS, message=self._named[end.rank])
        if why := self._memory.verdict(end.process):
            who = f"rank {end.rank} (process {end.process})"
            said = f"{who} was killed by SIGKILL: {why}; the other ranks were stopped; to use less: {LESS_ON_HOST}"
            return replace(end, failure=Failure.OUT_OF_MEMORY, message=said)
        return end


def _whereabouts(process: int | None) -> str:
    """Return where a rank is that has not joined, in words that follow its number."""
    if process is None:
        return "has no process that can be seen"
    state = process_state(process)
    runs = f"is still {Phase.IMPORTING} or reading its config"
    return f"(process {process}) {runs if state is ProcessState.RUNS else state.text(process)}"

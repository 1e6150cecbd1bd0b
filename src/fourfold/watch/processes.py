"""The processes of ranks on this machine, as the kernel sees them: whether they run, are stopped, or are gone.

A rank that dies leaves others waiting. Ranks that wait for bytes over a connection notice it; ranks that wait for a
text in the job's store do not. But every rank can look at the processes of the other ranks on its machine. Each rank
appends `RANK:PROCESS:BEGAN` to the list of its machine: when it starts, and again when it is done. A process that is
listed once and no longer runs has died. BEGAN is when the kernel started it: the number of a process that is gone may
be given to another one.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path

from fourfold.environment import agent_has_store, machine_name, process_stat
from fourfold.job import Channel

KERNEL_STATES = {"T": "stopped", "t": "traced", "Z": "gone", "X": "gone", "x": "gone", "D": "blocked"}
"""The values of `ProcessState` by the kernel's letters; every other letter means that the process runs."""


class ProcessState(StrEnum):
    """The state of a process; the value travels between ranks."""

    RUNS = "runs"
    STOPPED = "stopped"
    """By SIGSTOP, by a terminal or by a container that is paused: it does nothing until it is continued."""
    TRACED = "traced"
    """Held by a debugger."""
    BLOCKED = "blocked"
    """Inside the kernel, in a disk, a network file system or a driver that does not return."""
    GONE = "gone"
    UNKNOWN = "unknown"
    """On another machine, or on a system without /proc."""

    def text(self, process: int) -> str:
        """Return the state in words that follow the name of a rank, and what to do about it."""
        if self is ProcessState.STOPPED:
            return f"is stopped (SIGSTOP or Ctrl-Z; `kill -CONT {process}` in time would have let it go on)"
        if self is ProcessState.TRACED:
            return "is held by a debugger"
        if self is ProcessState.BLOCKED:
            return "does not answer and is blocked inside the kernel, by a disk, a network file system or a driver"
        return "is gone" if self is ProcessState.GONE else "does not answer"


def process_state(process: int, began: int | None = None) -> ProcessState:
    """Return the state of a process of this machine; it is gone if the one with its number began at another time."""
    if not Path("/proc/self/stat").exists():
        return ProcessState.UNKNOWN
    letter, found = process_stat(process)
    if began is not None and found != began:
        return ProcessState.GONE
    return ProcessState(KERNEL_STATES.get(letter, ProcessState.RUNS))


def describe_launcher() -> str:
    """Name the process that started this rank, in a sentence, if it serves the job's store and does not run."""
    launcher = os.getppid()
    state = process_state(launcher) if agent_has_store() else ProcessState.UNKNOWN
    if state in (ProcessState.RUNS, ProcessState.UNKNOWN):
        return ""
    return f"the launcher that serves it (process {launcher}) {state.text(launcher)}"


class Siblings:
    """The ranks on this machine; all ranks of the channel make it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._key = f"siblings/{machine_name()}"
        self._mine = f"{channel.rank}:{os.getpid()}:{process_stat(os.getpid())[1]}"
        self._processes: dict[int, tuple[int, int]] = {}
        self._channel.append(self._key, self._mine)

    def leave(self) -> None:
        """Announce that this rank is done, so that no sibling takes its end for a death."""
        self._channel.append(self._key, self._mine)

    def dead(self) -> dict[int, int]:
        """Return the processes, by rank, that no longer run and had not announced that they were done."""
        dead = {}
        for word, times in Counter(self._channel.words(self._key)).items():
            rank, process, began = map(int, word.split(":"))
            self._processes[rank] = process, began
            if times == 1 and self.state(rank) is ProcessState.GONE:
                dead[rank] = process
        return dead

    @property
    def processes(self) -> set[int]:
        """The processes of the siblings that are known."""
        return {process for process, _ in self._processes.values()}

    def state(self, rank: int) -> ProcessState:
        """Return the state of a rank's process, without asking the store; unknown unless it is on this machine."""
        return process_state(*self._processes[rank]) if rank in self._processes else ProcessState.UNKNOWN

    def not_running(self) -> dict[int, ProcessState]:
        """Return the states of the siblings that do not run."""
        states = {rank: self.state(rank) for rank in self._processes}
        return {rank: state for rank, state in states.items() if state not in (ProcessState.RUNS, ProcessState.UNKNOWN)}

    def describe_not_running(self) -> str:
        """Name the siblings that do not run, in a sentence."""
        found = ((rank, self._processes[rank][0], state) for rank, state in self.not_running().items())
        return "; ".join(f"rank {rank} (process {process}) {state.text(process)}" for rank, process, state in found)

    def kill(self, ranks: Iterable[int]) -> None:
        """Kill those of the ranks that are siblings, with SIGKILL: a stopped process does not react to SIGTERM."""
        for rank in ranks:
            if rank in self._processes and self.state(rank) is not ProcessState.GONE:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(self._processes[rank][0], signal.SIGKILL)

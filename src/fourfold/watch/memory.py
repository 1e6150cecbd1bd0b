"""The memory of this machine, and whether the kernel has ended a process because it was full.

A process that the kernel's out-of-memory killer ends dies by SIGKILL, as if an operator had killed it. Two counts tell
the two apart; each is read before the ranks start, and after one has died:

    control group    the count of the group that the process was in has risen: certain. Most ranks share the group of
                     their launcher, but a scheduler or a wrapper may give each rank a group of its own
    machine          if the group has no count, or is gone with its last process, the count of the whole machine has
                     risen: probable, because the kernel may have ended another program
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fourfold.policy import LESS_MEMORY
from fourfold.report.units import nbytes

UNLIMITED = 1 << 60
"""Bytes from which a limit is none: version 1 of control groups writes a very large number where there is no limit."""
LESS_ON_HOST = f"start fewer ranks on this machine, lower batch.rows, or set {LESS_MEMORY}"
"""What to change when the memory of a machine does not suffice."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The memory that the ranks of this machine share, and the kills because of it so far."""

    total: int | None = None
    """Bytes of the machine."""
    limit: int | None = None
    """Bytes that the control group may use; None if it has no limit below the machine's memory."""
    kills: int | None = None
    """Kills in the control group; None if the kernel does not say."""
    machine_kills: int | None = None
    """Kills on the whole machine; None if the kernel does not say."""
    groups: tuple[tuple[Path, int], ...] = ()
    """The folder of the control group, then of those above it, each with its version of control groups."""
    whose: str = "the control group of this job"
    root: Path = Path("/")

    @classmethod
    def read(cls, root: Path = Path("/"), process: int | None = None) -> HostMemory:
        """Read what the kernel says now about a process, by default this one; what it does not say is None.

        `root` is another root for tests.
        """
        return cls(groups=_groups(root, process), root=root).again()

    def again(self) -> HostMemory:
        """Read the same group again: a process that has ended has none any more."""
        root = self.root
        total = _field(root / "proc/meminfo", "MemTotal:")
        total = None if total is None else total << 10  # in units of 1024 bytes
        machine_kills = _field(root / "proc/vmstat", "oom_kill")
        limit = kills = None
        # the group itself first: only its own count is certain to be of these processes; limits also come from above
        for folder, version in self.groups:
            limits, counts = FILES[version]
            found = _number(folder / limits)
            if found is not None and found < min(UNLIMITED, limit or total or UNLIMITED):
                limit = found
            kills = _field(folder / counts, "oom_kill") if kills is None else kills
        return replace(self, total=total, limit=limit, kills=kills, machine_kills=machine_kills)

    def __str__(self) -> str:
        if self.limit is not None:
            return f"{self.whose} may use {nbytes(self.limit)} in all"
        return f"this machine has {nbytes(self.total)} in all" if self.total is not None else "its size is not known"

    def verdict(self, before: HostMemory) -> str:
        """Return why the kernel must, or may, have ended a process since `before`; empty if nothing points to it."""
        if self.kills is not None:
            return f"the kernel ended it because memory was full; {self}" if self.kills > (before.kills or 0) else ""
        if self.machine_kills is not None and self.machine_kills > (before.machine_kills or 0):
            return f"the kernel has probably ended it: it ended a process here because memory was full; {self}"
        return ""


FILES = {
    2: ("memory.max", "memory.events"),
    1: ("memory.limit_in_bytes", "memory.oom_control"),
}
"""The files of a control group with its limit and with its count of kills, by version of control groups."""


class MemoryWatch:
    """The control groups of some processes, and why the kernel has ended one of them."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._own = HostMemory.read(root)
        self._groups = {self._own.groups: self._own}
        """Each group as it was when a process was seen in it first."""
        self._processes: dict[int, HostMemory] = {}

    def look(self, process: int) -> None:
        """Note the control group in which a living process is now; it may have been moved since an earlier look."""
        found = HostMemory.read(self._own.root, process)
        if found.groups:
            found = replace(found, whose=f"its control group {found.groups[0][0]}")
            self._processes[process] = self._groups.setdefault(found.groups, found)

    def verdict(self, process: int) -> str:
        """Return why the kernel must, or may, have ended a process; empty if nothing points to it."""
        before = self._processes.get(process, self._own)
        return before.again().verdict(before)


def _groups(root: Path, process: int | None) -> tuple[tuple[Path, int], ...]:
    """Return the folders of a process's control group for memory, and of all groups above it, with the version."""
    found = []
    with suppress(OSError):
        for line in (root / f"proc/{process or 'self'}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            version = 1 if controllers else 2
            mount = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
            own = mount / path.lstrip("/")
            # a container often sees its own group as the root of the tree, whatever the path says
            above = [own, *own.parents[: len(own.relative_to(mount).parts)]] if own.is_dir() else [mount]
            found += [(folder, version) for folder in above]
    return tuple(found)


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):  # `max` stands for no limit
        return int(path.read_text())
    return None


def _field(path: Path, name: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            words = line.split()
            if words[:1] == [name]:
                return int(words[1])
    return None

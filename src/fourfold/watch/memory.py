"""The memory of this machine, and whether the kernel has ended a process because it was full.

A process that the kernel's out-of-memory killer ends dies by SIGKILL, as if an operator had killed it. Two counts tell
the two apart; each is read before the ranks start, and after one has died:

    control group    its count of such kills has risen: certain, because the ranks and their launcher share the group
    machine          if the group has no count, the count of the whole machine has risen: probable, because the kernel
                     may have ended another program
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
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

    @classmethod
    def read(cls, root: Path = Path("/")) -> HostMemory:
        """Read what the kernel says now; what it does not say is None. `root` is another root for tests."""
        total = _field(root / "proc/meminfo", "MemTotal:")
        total = None if total is None else total << 10  # in units of 1024 bytes
        machine_kills = _field(root / "proc/vmstat", "oom_kill")
        limit = kills = None
        # the group itself first: only its own count is certain to be of these processes; limits also come from above
        for folder, version in _groups(root):
            limits, counts = FILES[version]
            found = _number(folder / limits)
            if found is not None and found < min(UNLIMITED, limit or total or UNLIMITED):
                limit = found
            kills = _field(folder / counts, "oom_kill") if kills is None else kills
        return cls(total, limit, kills, machine_kills)

    def __str__(self) -> str:
        if self.limit is not None:
            return f"the control group of this job may use {nbytes(self.limit)} in all"
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


def _groups(root: Path) -> list[tuple[Path, int]]:
    """Return the folders of this process's control group for memory, and of all groups above it, with the version."""
    found = []
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            version = 1 if controllers else 2
            mount = root / "sys/fs/cgroup" / ("memory" if version == 1 else "")
            own = mount / path.lstrip("/")
            # a container often sees its own group as the root of the tree, whatever the path says
            above = [own, *own.parents[: len(own.relative_to(mount).parts)]] if own.is_dir() else [mount]
            found += [(folder, version) for folder in above]
    return found


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

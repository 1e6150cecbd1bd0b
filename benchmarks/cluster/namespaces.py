"""Network namespaces of this machine, by name, and the processes in them. Needs root and iproute2.

A name is PREFIX-PID-REST. It names the process that owns the namespace, so that `sweep` can remove the namespaces of
processes that were killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "fourfold"
KILL_SECONDS = 10.0
"""How long `kill_all` waits for the processes of a namespace to end."""


class EmulationUnavailableError(RuntimeError):
    """This machine cannot emulate a cluster; the message says what is missing."""


def remove(name: str) -> None:
    """Remove a namespace, its processes and its interfaces."""
    if name not in namespaces():
        return
    kill_all(name)
    ip("netns", "delete", name)


def kill_all(name: str) -> None:
    """Kill the processes in a namespace, and those that they start in the meantime."""
    until = time.monotonic() + KILL_SECONDS
    while (left := run_command("ip", "netns", "pids", name).split()) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def sweep() -> list[str]:
    """Remove the namespaces that killed processes have left behind, and return their names."""
    left = []
    for name in namespaces():
        parts = name.split("-")
        ours = len(parts) == 3 and parts[0] == PREFIX and parts[1].isdigit()
        if ours and not Path(f"/proc/{parts[1]}").exists():
            remove(name)
            left.append(name)
    return left


def namespaces() -> list[str]:
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line]


def ip(*arguments: str) -> str:
    return run_command("ip", *arguments)


def run_command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationUnavailableError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout

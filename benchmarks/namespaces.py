"""Network namespaces of this machine by name, with the processes in them. Needs root and iproute2.

A name is PREFIX-PID-REST: it tells whose a namespace is, so what a killed process has left can be taken away.
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
"""How long the processes of a namespace may take to be gone."""


class NotHereError(RuntimeError):
    """This machine cannot emulate a cluster; the message says what it lacks."""


def remove(name: str) -> None:
    """A namespace and the processes in it; its interfaces go with it."""
    if name not in namespaces():
        return
    kill_all(name)
    ip("netns", "delete", name)


def kill_all(name: str) -> None:
    """The processes in a namespace, and those that they have started meanwhile."""
    until = time.monotonic() + KILL_SECONDS
    while (left := output_of("ip", "netns", "pids", name).split()) and time.monotonic() < until:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def sweep() -> list[str]:
    """Remove what calls that were killed have left; returns the names."""
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
    return output_of("ip", *arguments)


def output_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotHereError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout

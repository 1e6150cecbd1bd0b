"""Starts local ranks by forking a process that has imported everything, because an import of torch takes seconds.

    launcher -- fork --> server                    imports while the launcher reads the config
        |                  '-- fork, fork --> rank
        '------------- adopts ------------------'

The server is forked before its launcher imports torch or starts a thread, and it uses no CUDA: what is forked from it
is as good as a new process. A rank is forked twice, and the process in between ends at once. Then the kernel gives the
rank to the launcher, which has asked for such orphans, and the rank is a child like any other: the launcher waits for
it, and the rank ends with the launcher.

This file imports no torch, because a command uses it before it imports torch.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from math import inf
from typing import Any

from fourfold.environment import end_with_launcher, process_stat

SWITCH = "FOURFOLD_FORK_RANKS"
"""Set to 0, this variable lets every rank start as a new process."""
PR_SET_CHILD_SUBREAPER = 36
"""The operation of Linux's prctl that lets a process adopt its orphaned descendants."""
ADOPTED_SECONDS = 10.0
"""Seconds in which a forked rank must have become the launcher's child; it takes less than a millisecond."""
STOPPED_SECONDS, LOOK_SECONDS = 5.0, 0.2
"""Seconds for which a server may be stopped before ranks start without it, and between two looks at whether it is."""
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
"""Signals to the whole group of processes that the server leaves to its launcher."""

_servers: list[tuple[int, socket.socket]] = []
"""The server of this process, if it has one: its process id, and the connection to it."""


def begin(module: str) -> Sequence[str] | None:
    """Fork a server that imports this module; return None, and in each rank that it forks, the rank's arguments.

    Without a server ranks start as new processes: where the system is not Linux, where the user wants it, or if this
    process has done what a fork does not survive.
    """
    if sys.platform != "linux" or os.environ.get(SWITCH) == "0" or threading.active_count() > 1:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return None
    keep_exit_codes()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()  # else the server would print it again
    launcher, (ours, theirs) = os.getpid(), socket.socketpair()
    if server := os.fork():
        theirs.close()
        _servers.append((server, ours))
        return None
    ours.close()
    return _serve(theirs, module, launcher)


def keep_exit_codes() -> None:
    """Undo an ignored SIGCHLD, which programs inherit: the kernel would tell nobody how a rank has ended."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def close() -> None:
    """End the server, if there is one: no rank will be forked."""
    while _servers:
        server, connection = _servers.pop()
        connection.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(server, signal.SIGKILL)  # it may be importing still
            os.waitpid(server, 0)


def fork_rank(arguments: Sequence[str], env: Mapping[str, str], seconds: float = inf) -> ForkedRank | None:
    """Return a new rank with these arguments of `fourfold` in this environment; None if no server answers.

    A server may take `seconds`, because it may still be importing, but does not answer while it is stopped.
    """
    if not _servers:
        return None
    ((process, server),) = _servers
    try:
        server.sendall(json.dumps([list(arguments), dict(env)]).encode() + b"\n")
        answer = _answer(process, server, seconds)
    except OSError:
        answer = b""
    if not answer.strip():  # the server could not import the command or fork, or was stopped or killed
        close()
        return None
    return ForkedRank(int(answer))


def _answer(process: int, server: socket.socket, seconds: float) -> bytes:
    """Return the line that the server answers; empty if it has ended, stays stopped, or takes longer."""
    began = ran = time.monotonic()
    answer = b""
    while not answer.endswith(b"\n"):
        now = time.monotonic()
        if process_stat(process)[0] not in ("T", "t"):
            ran = now
        if now - ran > STOPPED_SECONDS or now - began > seconds:
            return b""
        if select.select([server], [], [], LOOK_SECONDS)[0]:
            if not (piece := server.recv(64)):
                return b""
            answer += piece
    return answer


class ForkedRank:
    """The process of a forked rank, with the methods of `subprocess.Popen` that torch's elastic agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired([f"process {self.pid}"], timeout or 0.0)
            time.sleep(0.01)
        return code


# --- in the server


def _serve(launcher: socket.socket, module: str, launcher_id: int) -> Sequence[str]:
    """Fork a rank for each request, until the launcher ends. Only a rank returns from this, with its arguments."""
    end_with_launcher(launcher_id)
    handlers: dict[int, Any] = {number: signal.signal(number, signal.SIG_IGN) for number in HELD_BACK}
    try:
        import_module(module)
        gc.freeze()  # the memory of what is imported stays shared with the ranks
        for line in launcher.makefile("r"):
            told, tells = os.pipe()
            between = os.fork()
            if between == 0:
                if os.fork():
                    os._exit(0)
                launcher.close()
                os.close(told)
                arguments, env = json.loads(line)
                _become_rank(env, handlers, tells, launcher_id)
                return arguments
            os.close(tells)
            os.waitpid(between, 0)
            with os.fdopen(told) as answer:
                launcher.sendall(answer.read().encode() + b"\n")
    except BaseException:  # the launcher finds the same error when it imports the module itself, and reports it
        os._exit(1)
    os._exit(0)


def _become_rank(env: Mapping[str, str], handlers: Mapping[int, Any], tells: int, launcher: int) -> None:
    """Make this process what a new one would be, and tell its id once it is the launcher's child."""
    os.setsid()  # as the elastic agent does: it signals a rank with its whole group
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in a new process: Ctrl-C at the start leaves no traceback
    os.environ.clear()
    os.environ |= env
    until = time.monotonic() + ADOPTED_SECONDS
    while os.getppid() != launcher and time.monotonic() < until:
        time.sleep(0.0002)
    end_with_launcher(launcher)
    random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # torch has read the variable when it was imported
    os.write(tells, str(os.getpid()).encode())
    os.close(tells)

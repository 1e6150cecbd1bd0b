"""Processes that run `fourfold` and have imported everything already.

Importing torch and Fourfold takes a process 4 s, which is more than most tests need afterwards. So commands, and the
ranks that they start, are forked from the harness's forkserver. Everything else is as users have it: launcher, elastic
agent, environment, signals, exit codes. `tests/train/test_train.py` starts some processes without forking.

    warm.Process(warm.command, *arguments)   # `fourfold` as a process of its own, much like subprocess.Popen
    with warm.ranks(): main(arguments)       # in this process, with such ranks
    with warm.nodes(): Cluster.start(...)    # on a node of an emulated cluster
"""

from __future__ import annotations

import ctypes
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.forkserver import _forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from fourfold.environment import LAUNCHED
from fourfold.train import fork_server
from harness import _context

sys.path.append(str(Path(__file__).parent.parent))

from benchmarks.cluster import emulate

PIDS, NODE = "FOURFOLD_TEST_PIDS", "FOURFOLD_TEST_NODE"
STREAMS = {"DEVNULL": subprocess.DEVNULL, "TimeoutExpired": subprocess.TimeoutExpired}


class Process:
    """A process that runs `program(*args)` in a session of its own; the return value becomes the exit code.

    Standard output and error go where they go in this process, unless a file is named. In its environment, `PIDS` names
    a folder in which ranks leave their process ids, and `NODE` the network namespace and the host that it runs in.
    """

    def __init__(
        self,
        program: Callable[..., int],
        *args: Any,
        env: Mapping[str, str] | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
    ) -> None:
        streams = [str(given or f"/proc/{os.getpid()}/fd/{number}") for number, given in ((1, stdout), (2, stderr))]
        _forkserver.ensure_running()
        server, env = _forkserver._forkserver_address, {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env)}
        given = (server, program, args, env, streams, Path.cwd())
        self._process = _context.Process(target=_begin, args=given)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired([str(self._process)], timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def ready() -> None:
    """Start the forkserver, which later processes are forked from."""
    _forkserver.ensure_running()


def _begin(
    server: str,
    program: Callable[..., int],
    args: Sequence[Any],
    env: Mapping[str, str],
    streams: Sequence[str],
    cwd: Path,
) -> None:
    gc.freeze()
    _forkserver._forkserver_address = server  # a child forgets the address, and would start a forkserver of its own
    _forkserver.ensure_running = lambda: None
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    os.environ.clear()
    os.environ |= env
    os.chdir(cwd)
    torch.manual_seed(os.getpid())  # a new process has a seed of its own, forks share that of the forkserver
    torch.set_num_threads(int(env["OMP_NUM_THREADS"]))  # torch has read the variable long ago, when it was imported
    if LAUNCHED in env:
        os.environ[LAUNCHED] = str(os.getppid())  # a forked rank's parent is the forkserver, not the launcher
    if PIDS in env and "RANK" in env:
        Path(env[PIDS], env["RANK"]).write_text(str(os.getpid()))
    if NODE in env:
        _enter(*env[NODE].split(","))
    for number, path in enumerate(streams, 1):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND | (0 if path.startswith("/proc/") else os.O_CREAT))
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.exit(program(*args))


def _enter(namespace: str, host: str) -> None:
    libc, network = ctypes.CDLL(None, use_errno=True), 0x40000000
    with open(f"/var/run/netns/{namespace}") as there:
        if libc.setns(there.fileno(), network):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    emulate.become_host(host)


def command(*arguments: str) -> int:
    """Run `fourfold` with these arguments; the ranks that it starts are forked too."""
    from fourfold.cli import main

    with ranks():
        return main(arguments)


@contextmanager
def ranks() -> Iterator[None]:
    """Inside, the elastic agent's processes are forked."""

    def fork(_: SubprocessHandler, args: Sequence[str], env: Mapping[str, str]) -> Process:
        _, unbuffered, *program = args
        if unbuffered != "-u":
            raise ValueError(f"ranks are started with {args[:3]}; a forked one takes what follows -u")
        return Process(python, *program, env=env)

    def close(handler: SubprocessHandler, death_sig: signal.Signals | None = None) -> None:
        with suppress(ProcessLookupError):  # the forkserver may have reaped the process, and not reported it yet
            close_handler(handler, death_sig)

    close_handler = SubprocessHandler.close
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(fork_server.SWITCH, "0")
        patch.setattr(SubprocessHandler, "_popen", fork)
        patch.setattr(SubprocessHandler, "close", close)
        yield


@contextmanager
def nodes() -> Iterator[None]:
    """Inside, torchrun on the nodes of an emulated cluster is forked, as are its ranks."""

    def fork(args: Sequence[str], *, env: Mapping[str, str], stdout: IO[str] | None, **given: Any) -> Process:
        _, _, _, namespace, _, _, _, *arguments = args  # ip netns exec NAME python -m torch.distributed.run ...
        (host,) = given["preexec_fn"].args
        log = Path(stdout.name) if stdout else None
        return Process(torchrun, *arguments, env={**env, NODE: f"{namespace},{host}"}, stdout=log, stderr=log)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulate, "subprocess", SimpleNamespace(Popen=fork, **STREAMS))
        yield


def python(*arguments: str) -> int:
    """Do what `python` does with these arguments: `-c CODE`, `-m MODULE` or a script, and its own arguments."""
    kind, *rest = arguments
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = list(rest)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, str(Path(kind).parent))
        runpy.run_path(kind, run_name="__main__")
    return 0


def torchrun(*arguments: str) -> int:
    from torch.distributed.run import main

    with socket.create_server(("", 0)) as free:  # plain torchrun always takes port 29500, and tests run side by side
        os.environ["PET_MASTER_PORT"] = str(free.getsockname()[1])
    with ranks():
        main(list(arguments))
    return 0

"""Rank processes on one machine that stay up between jobs, and the MPS daemon that lets them share one GPU.

On the CPU ranks talk through gloo. On a GPU all of them use the first one and talk through NCCL over loopback, each as
if it were a host of its own.

`Bed(n, device, make).run(job, *args)` calls `job(held, *args)` on every rank and returns the results in rank order;
`held` is what `make(rank, n, device)` gave on that rank. Jobs and `make` are found by their names in their modules.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# what every rank would import by itself, for seconds
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "fourfold"]
)

GRACE_SECONDS = 10.0
"""How long the other ranks may take to fail in their own words once one has failed."""


class RanksFailedError(RuntimeError):
    """A job failed on some rank. Unless all of them failed the ranks are gone: some may wait for others for ever."""

    def __init__(self, errors: dict[int, str], traces: dict[int, str], world: int) -> None:
        self.everyone = len(errors) == world
        self.first = min(errors)
        self.what = errors[self.first]
        super().__init__(
            f"rank {self.first} of those that failed {sorted(errors)}:\n{traces.get(self.first, self.what)}"
        )


class Bed:
    """A number of ranks; they start with the first job, and anew after `close`."""

    def __init__(self, world: int, device: str, make: Callable[[int, int, str], Any]) -> None:
        self.world, self.device, self.make = world, device, make
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._store: dist.TCPStore | None = None

    @property
    def up(self) -> bool:
        return bool(self._processes)

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 300) -> list[Any]:
        if not self.up:
            self._start()
        for pipe in self._pipes:
            pipe.send((job, args))
        found, errors, traces = self._collect(time.monotonic() + timeout)
        if len(found) == self.world:
            return [found[rank] for rank in range(self.world)]
        late = [rank for rank in range(self.world) if rank not in found and rank not in errors]
        if late:
            self.close()
        errors = errors or dict.fromkeys(late, f"TimeoutError: ranks {late} did not finish in {timeout:.0f} s")
        failed = RanksFailedError(errors, traces, self.world)
        if not failed.everyone:
            self.close()
        raise failed

    def _collect(self, deadline: float) -> tuple[dict[int, Any], dict[int, str], dict[int, str]]:
        """Results, errors and their traces by rank, of those that answer in time."""
        found: dict[int, Any] = {}
        errors: dict[int, str] = {}
        traces: dict[int, str] = {}
        while missing := [rank for rank in range(self.world) if rank not in found and rank not in errors]:
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            ready = wait([self._pipes[rank] for rank in missing], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in missing:
                if self._pipes[rank] in ready:
                    done, value, traces[rank] = self._receive(rank)
                    (found if done else errors)[rank] = value
        return found, errors, traces

    def _receive(self, rank: int) -> tuple[bool, Any, str]:
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return False, "RuntimeError: the process died", f"rank {rank} died"

    def _start(self) -> None:
        listens = socket.create_server(("127.0.0.1", 0))
        port = listens.getsockname()[1]
        more = {"wait_for_workers": False, "master_listen_fd": listens.detach()}
        self._store = dist.TCPStore("127.0.0.1", port, self.world, is_master=True, **more)
        for rank in range(self.world):
            here, there = _context.Pipe()
            args = (there, rank, self.world, self.device, port, self.make)
            process = _context.Process(target=_serve, args=args, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._store = None


def _serve(pipe: Connection, rank: int, world: int, device: str, port: int, make: Callable[..., Any]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_HOSTID"], os.environ["NCCL_IB_DISABLE"] = f"rank-{rank}", "1"
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(0)
    else:
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.TCPStore("127.0.0.1", port, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    held = make(rank, world, device)
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(held, *args), ""))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}", traceback.format_exc()))


@contextmanager
def multi_process_service(device: str) -> Iterator[str]:
    """The MPS daemon, without which ranks on one GPU take turns instead of computing side by side.

    Gives `own` where it was started here, `running` where there was one, else `none`.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if device != "cuda" or control is None:
        yield "none"
    elif _ask(control, "get_server_list") == 0:
        yield "running"
    else:
        folder = tempfile.mkdtemp(prefix="fourfold-mps-")
        names = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in names.values():
            os.makedirs(path)
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)  # the ranks find the daemon through it
        try:
            yield "own" if subprocess.run([control, "-d"], check=False, timeout=60).returncode == 0 else "none"
        finally:
            _ask(control, "quit -t 5")
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            shutil.rmtree(folder, ignore_errors=True)


def _ask(control: str, command: str) -> int:
    """Exit code of a command to the daemon that the environment names."""
    try:
        asked = subprocess.run([control], input=command + "\n", text=True, capture_output=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return 1
    return asked.returncode

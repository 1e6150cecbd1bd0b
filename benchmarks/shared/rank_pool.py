"""Rank processes on one machine that stay alive between jobs, and the MPS daemon that lets them share one GPU.

On the CPU the ranks use gloo. On a GPU all ranks use the first device and communicate through NCCL over loopback, each
as if it were a host of its own.

`RankPool(n, device, make).run(job, *args)` calls `job(state, *args)` on every rank and returns the results in rank
order; `state` is what `make(rank, n, device)` returned on that rank. Jobs and `make` are pickled by name, so they must
be importable.
"""

from __future__ import annotations

import gc
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

import fourfold as ff
from fourfold import comm
from fourfold.train.launch import share_cores

_context = multiprocessing.get_context("forkserver")
# imported once in the fork server, because every rank would otherwise spend seconds on them
_context.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "fourfold"]
)

PARTITION = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
"""The environment variable by which MPS gives a process a part of the GPU's multiprocessors."""
GRACE_SECONDS = 10.0
"""How long the other ranks may take to report their own errors after the first rank has failed."""


class RanksFailedError(RuntimeError):
    """A job failed on some ranks. Unless it failed on all of them, the pool is closed: the rest may wait forever."""

    def __init__(self, errors: dict[int, str], traces: dict[int, str], world: int) -> None:
        self.everyone = len(errors) == world
        self.first = min(errors)
        self.what = errors[self.first]
        super().__init__(f"ranks {sorted(errors)} failed; rank {self.first}:\n{traces.get(self.first, self.what)}")


class RankPool:
    """A fixed number of rank processes. They start with the first job, and again after `close`."""

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
        """Return results, errors and tracebacks by rank, from the ranks that answer before the deadline."""
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
        # bind the port here and pass on the open socket, so that no other process can take the port in between
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        options = {"wait_for_workers": False, "master_listen_fd": server.detach()}
        self._store = dist.TCPStore("127.0.0.1", port, self.world, is_master=True, **options)
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
    # NCCL refuses two ranks on one GPU unless it takes them for different hosts
    os.environ["NCCL_HOSTID"], os.environ["NCCL_IB_DISABLE"] = f"rank-{rank}", "1"
    os.environ["NCCL_SET_THREAD_NAME"] = "1"  # so that `threads.py` can tell what its threads are for
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(0)
    else:
        os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.TCPStore("127.0.0.1", port, world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    state = make(rank, world, device)
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(state, *args), ""))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}", traceback.format_exc()))


class RankContext:
    """One rank of a pool and its grids. Process groups are expensive, so each grid is created once and kept."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        self.rank, self.world, self.device = rank, world, torch.device(device)
        self.grids: dict[ff.Shape, ff.Grid] = {}
        gc.freeze()  # imported objects never die; without them a collection is quick
        gc.disable()  # collections run between measurements, never inside one

    def grid(self, shape: ff.Shape) -> ff.Grid:
        if shape not in self.grids:
            self.grids[shape] = ff.Grid.of_shape(shape, device=self.device)
            if self.device.type == "cpu":
                share_cores()
        return self.grids[shape]

    def barrier(self) -> None:
        """Wait until all ranks are here and their devices are idle."""
        everyone = self.grid(ff.Shape(data=self.world))
        comm.all_reduce(torch.zeros(1, device=everyone.device), everyone, "data").wait()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device is idle, asleep: `torch.cuda.synchronize` would keep a core of every rank busy, which
        the threads of NCCL need."""
        if self.device.type == "cuda":
            end = torch.cuda.Event(blocking=True)
            end.record()  # the current stream waits for all others of a step, whoever makes it
            end.synchronize()
            torch.cuda.synchronize()  # returns at once


def has_gpu() -> bool:
    """Return whether there is a GPU, by asking NVML: this process must not open the GPU before MPS runs."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    return torch.cuda.is_available()


@contextmanager
def multi_process_service(device: str) -> Iterator[str]:
    """Run the MPS daemon. Without it, ranks on one GPU take turns instead of computing at the same time.

    Yields `own` if the daemon was started here, `running` if one was already running, and `none` otherwise.
    """
    control = shutil.which("nvidia-cuda-mps-control")
    if device != "cuda" or control is None:
        yield "none"
    elif _mps_command(control, "get_server_list") == 0:
        yield "running"
    else:
        folder = tempfile.mkdtemp(prefix="fourfold-mps-")
        names = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in names.values():
            os.makedirs(path)
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)  # the ranks inherit these and find the daemon through them
        # a part of the GPU is each rank's own limit, not that of the daemon
        environment = {name: value for name, value in os.environ.items() if name != PARTITION}
        try:
            started = subprocess.run([control, "-d"], check=False, timeout=60, env=environment)
            yield "own" if started.returncode == 0 else "none"
        finally:
            _mps_command(control, "quit -t 5")
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
            shutil.rmtree(folder, ignore_errors=True)


def _mps_command(control: str, command: str) -> int:
    """Send a command to the MPS daemon that the environment names, and return the exit code."""
    try:
        done = subprocess.run([control], input=command + "\n", text=True, capture_output=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return 1
    return done.returncode

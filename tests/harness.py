"""Ranks on one machine: processes from a forkserver with torch preloaded, kept alive between tests.

On the CPU they talk through gloo. With FOURFOLD_TEST_DEVICE=cuda all of them share the first GPU and talk
through NCCL over loopback, each as if it were a host of its own.

`Ranks(n).run(job, *args)` runs `job(*args)` on every rank and returns the results in rank order. A job is
a module-level function. If a rank fails, or all of them take too long, the pool is ended (the other ranks
may wait in a collective for ever) and the next run starts a fresh one.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fourfold import comm
from fourfold.grid import Grid, Shape
from fourfold.layout import Spec
from fourfold.train.launch import share_cores

DEVICE = os.environ.get("FOURFOLD_TEST_DEVICE", "cpu")

_context = multiprocessing.get_context("forkserver")
PRELOAD = [
    "torch",
    "torch._dynamo",  # which the first optimizer step would import on every rank, for seconds
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.profiler",
    "torch.utils.tensorboard",
    "fourfold.cli",
    "fourfold.wrap",
    "fourfold.commands.train",
    "pytest",  # of every file with jobs
    "transformers.modeling_utils",
    "transformers.generation.utils",
    "peft",
]
"""What ranks would import each by itself."""
_context.set_forkserver_preload(PRELOAD)


class RankFailed(Exception):
    """A job raised on some rank; `errors` has the exception of every rank that raised."""

    def __init__(self, errors: dict[int, BaseException], traces: dict[int, str]) -> None:
        first = min(errors)
        super().__init__(f"rank {first} of those that failed {sorted(errors)}:\n{traces[first]}")
        self.errors = errors


MOST_THREADS = 40
"""Of a rank. gloo leaves threads behind for groups that are gone, and each wakes up a hundred times a second: those of
8 ranks that nobody used took more than a core."""


class Ranks:
    def __init__(self, world: int) -> None:
        self.world = world
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._store = ""
        self._busy = False

    def run(self, job: Callable[..., Any], *args: Any, timeout: float = 60, moment: float = 3) -> list[Any]:
        """Once a rank has failed the others get a moment to fail in their own words."""
        self.start(job, *args)
        return self.results(timeout, moment)

    def start(self, job: Callable[..., Any], *args: Any) -> None:
        """Begin a job; its results are collected later, so that the caller can compute meanwhile."""
        if not self._processes:
            self._launch()
        self._busy = True
        for pipe in self._pipes:
            pipe.send((job, args))

    def results(self, timeout: float = 60, moment: float = 3) -> list[Any]:
        self._busy = False
        found: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        traces: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(found) + len(errors) < self.world:
            left = min(deadline, time.monotonic() + moment if errors else deadline) - time.monotonic()
            missing = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found and rank not in errors]
            ready = wait(missing, timeout=max(left, 0))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value, trace = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    ok, value, trace = False, RuntimeError("the process died"), f"rank {rank} died"
                if ok:
                    found[rank] = value
                else:
                    errors[rank], traces[rank] = value, trace
        if errors or len(found) < self.world:
            self.close()
        if errors:
            raise RankFailed(errors, traces)
        if len(found) < self.world:
            raise TimeoutError(f"ranks {sorted(set(range(self.world)) - set(found))} did not finish in {timeout} s")
        return [found[rank] for rank in range(self.world)]

    @property
    def worn(self) -> bool:
        """Whether fresh ranks would be better."""
        if self._busy or not self._processes or not Path("/proc").exists():
            return False
        return len(list(Path(f"/proc/{self._processes[0].pid}/task").glob("*"))) > MOST_THREADS

    def _launch(self) -> None:
        self._store = store = tempfile.mktemp(prefix="fourfold-ranks-")
        for rank in range(self.world):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(there, rank, self.world, store), daemon=True)
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
        with suppress(FileNotFoundError):
            os.remove(self._store)


_pools: dict[int, Ranks] = {}


def pool(world: int) -> Ranks:
    """That many ranks, which stay up; those of another number are ended."""
    if world not in _pools:
        close_pools()
        _pools[world] = Ranks(world)
    close_worn()
    return _pools[world]


def close_worn() -> None:
    """The next job of these starts fresh ranks."""
    for ranks in _pools.values():
        if ranks.worn:
            ranks.close()


def close_pools() -> None:
    for world in list(_pools):
        _pools.pop(world).close()


def _serve(pipe: Connection, rank: int, world: int, store: str) -> None:
    import torch.distributed as dist

    gc.freeze()  # what was imported before the fork lives on: no need to walk it, and to copy its pages, ever again
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["NCCL_HOSTID"], os.environ["NCCL_IB_DISABLE"] = f"rank-{rank}", "1"
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world)
    backend = "gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.FileStore(store, world), rank=rank, world_size=world)
    while True:
        try:
            job, args = pipe.recv()
        except EOFError:
            return
        torch.backends.mkldnn.set_flags(True)  # where a bf16 product fails torch turns it off, and others round then
        try:
            pipe.send((True, job(*args), ""))
        except Exception as error:
            pipe.send((False, error, traceback.format_exc()))


@contextmanager
def as_torchrun() -> Iterator[None]:
    """The environment that torchrun gives, which the libraries read."""
    before = dict(os.environ)
    world = os.environ["LOCAL_WORLD_SIZE"]
    os.environ |= dict(RANK=os.environ["LOCAL_RANK"], WORLD_SIZE=world, GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", TORCHELASTIC_RUN_ID="test")
    os.environ |= dict(OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


KEPT_GRIDS = 6 if DEVICE == "cpu" else 1  # on a GPU the communicators of a grid hold its memory
_grids: dict[Shape, Grid] = {}


def grid_of(shape: Shape) -> Grid:
    """This rank's grid of that shape. The last few are used again: process groups are dear, and for each new mesh
    torch derives again how every operation on DTensors is cut."""
    if shape not in _grids:
        while len(_grids) >= KEPT_GRIDS:
            _grids.pop(next(iter(_grids))).close()
        _grids[shape] = Grid.of_shape(shape, device=DEVICE)
        share_cores()
    _grids[shape] = _grids.pop(shape)  # the last used is the last to go
    return _grids[shape]


def what_is_said(acts: Mapping[str, Callable[[Grid], Any]], grid: Grid) -> dict[str, str]:
    """The message of the error that each act raises."""
    said = {}
    for name, act in acts.items():
        try:
            act(grid)
            said[name] = "nothing was said"
        except Exception as error:
            said[name] = str(error)
    return said


class Largest(TorchDispatchMode):
    """The most elements that any tensor with memory has had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is torch.Tensor and not out.is_meta:  # a DTensor has no memory of its own
            self.elements = max(self.elements, out.numel())
        return out


def join_shards(shard: torch.Tensor, spec: Spec, grid: Grid) -> torch.Tensor:
    """Gather a parameter, or what lies as it does, on every rank; the ledger does not count it."""
    return comm.join(shard, spec.storage, spec.shape, grid, counted=False)

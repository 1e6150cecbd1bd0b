"""What one rank does in the benchmark of checkpoints: it trains, saves and loads, through Fourfold or through DCP.

Both sides hold the same tensors. DCP gets them as DTensors with the placements that Fourfold's storage says, so that
it too writes each byte once; its collectives have a process group of their own, as a thread beside training needs.
"""

from __future__ import annotations

import gc
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

import fourfold as ff
from fourfold.checkpoint.load import load_training
from fourfold.checkpoint.save import Saver
from fourfold.checkpoint.training_state import OPTIMIZER, RANDOM, LocalShard, training_shards
from fourfold.policy import Policy
from memory_on_gpu import Line, Size, build
from stage import Rank

OURS, PEER = "fourfold", "DCP"


def stagers(device: str) -> dict[str, Callable[[], AsyncStager]]:
    """How DCP may take its copy, by name. Those that keep their memory for the next copy are kept between saves."""
    found: dict[str, Callable[[], AsyncStager]] = {
        f"{PEER}, blocking": BlockingAsyncStager,
        f"{PEER}, kept memory": lambda: DefaultStager(StagingOptions(False, False, False, False)),
        f"{PEER}, kept memory, copy in a thread": lambda: DefaultStager(StagingOptions(False, False, True, False)),
    }
    if device == "cuda":
        found |= {
            f"{PEER}, blocking, pinned": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
            f"{PEER}, pinned": lambda: DefaultStager(StagingOptions(True, False, False, True)),
            f"{PEER}, pinned, copy in a thread": lambda: DefaultStager(StagingOptions(True, False, True, True)),
        }
    return found


class Training:
    """A model with AdamW's state on a grid."""

    def __init__(self, grid: ff.Grid, size: Size) -> None:
        self.grid = grid
        self.model = build(Line(grid.shape, Policy()), size, grid)
        self.optimizer = ff.optim.AdamW(self.model, lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        batch = torch.randint(size.config.vocab, (size.rows, size.seq + 1), generator=generator)
        self.tokens = ff.local_rows(batch, grid).to(grid.device)

    def step(self, before_update: Callable[[], object] = lambda: None) -> None:
        self.model(self.tokens[:, :-1].contiguous(), self.tokens[:, 1:].contiguous()).backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self) -> dict[str, LocalShard]:
        held = training_shards(self.model, self.optimizer)  # type: ignore[arg-type]
        return {name: found for name, found in held.items() if not name.startswith(RANDOM)}

    def for_dcp(self) -> dict[str, Any]:
        """The same memory as DCP takes it."""
        state = {
            name.removeprefix(OPTIMIZER): self._as_dtensor(held)
            for name, held in self.tensors().items()
            if name.startswith(OPTIMIZER)
        }
        return {"model": self.model.state_dict(), "optimizer": state}

    def _as_dtensor(self, held: LocalShard) -> Tensor:
        if not held.shape:
            return held.local
        stride = torch.empty(held.shape, device="meta").stride()
        placements = held.storage.placements()
        return DTensor.from_local(
            held.local, self.grid.mesh, placements, run_check=False, shape=torch.Size(held.shape), stride=stride
        )

    def wipe(self) -> None:
        for held in self.tensors().values():
            held.local.zero_()

    def sums(self) -> dict[str, float]:
        """A number that tells whether a shard holds the right values in the right places."""
        found = {}
        for name, held in self.tensors().items():
            flat = held.local.double().flatten()
            found[name] = (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum().item()
        return found


class Seat(Rank):
    """What one rank of the bed saves and loads."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        super().__init__(rank, world, device)
        self._meet_through_a_server()
        self.group = dist.new_group(backend="gloo")
        self.trainings: dict[ff.Shape, Training] = {}
        self.savers: dict[Path, Saver] = {}
        self.stagers: dict[str, AsyncStager] = {}
        self.saved = 0

    def _meet_through_a_server(self) -> None:
        """Ranks start with a store that is a file, which answers in tens of milliseconds; launchers give a server."""
        first = dist.distributed_c10d._get_default_store()
        if self.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, self.world, is_master=True, wait_for_workers=False)
            first.set("port", str(store.port))
        else:
            store = dist.TCPStore("127.0.0.1", int(first.get("port")), self.world)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        dist.destroy_process_group()
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)

    def meet(self) -> None:
        """All ranks are here, nothing is under way on their devices, and what is to be written is."""
        gc.collect()
        if self.rank == 0:
            os.sync()
        super().meet()

    def saver(self, root: Path, grid: ff.Grid, *, asynchronous: bool) -> Saver:
        if root not in self.savers:  # all are kept: removing old ones is not measured on either side
            self.savers[root] = Saver(grid, root, keep_last=1 << 30, asynchronous=asynchronous)
        return self.savers[root]


def prepare(seat: Seat, shape: ff.Shape, other: ff.Shape, size: Size) -> tuple[int, str]:
    """Build both trainings, with AdamW's state; bytes of the whole state, and the kind of machine."""
    for wanted in (shape, other):
        training = Training(seat.grid(wanted), size)
        training.step()
        seat.trainings[wanted] = training
    cuda = seat.device.type == "cuda"
    machine = f"one {torch.cuda.get_device_name()}" if cuda else f"the CPU ({platform.machine()})"
    return sum(held.entry.nbytes for held in seat.trainings[shape].tensors().values()), machine


def forget(seat: Seat, shape: ff.Shape) -> None:
    seat.trainings.pop(shape, None)


def save(seat: Seat, side: str, shape: ff.Shape, root: Path) -> tuple[float, Path]:
    """Seconds until the checkpoint is complete, and where it is."""
    training = seat.trainings[shape]
    seat.saved += 1
    saver = seat.saver(root, training.grid, asynchronous=False) if side == OURS else None
    state = training.for_dcp() if side != OURS else {}
    seat.meet()
    began = time.perf_counter()
    if saver is not None:
        saver.save(seat.saved, training.model, training.optimizer, {})
        folder = saver.checkpoints.path(seat.saved)
    else:
        folder = root / str(seat.saved)
        dcp.save(state, storage_writer=writer(folder), planner=planner(), process_group=seat.group)
    return time.perf_counter() - began, folder


def writer(folder: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(folder, sync_files=True)


def planner() -> dcp.DefaultSavePlanner:
    """A save of what the last one saved plans nothing anew."""
    return dcp.DefaultSavePlanner(enable_plan_caching=True)


def load(seat: Seat, side: str, shape: ff.Shape, folder: Path) -> float:
    """Seconds until everything is loaded over zeros."""
    training = seat.trainings[shape]
    training.wipe()
    state = training.for_dcp() if side != OURS else {}
    seat.meet()
    began = time.perf_counter()
    if side == OURS:
        load_training(folder, training.model, training.optimizer)
    else:
        dcp.load(state, checkpoint_id=folder, process_group=seat.group)
    seat.synchronize()
    return time.perf_counter() - began


def sums(seat: Seat, shape: ff.Shape) -> dict[str, float]:
    return seat.trainings[shape].sums()


@dataclass(frozen=True)
class Steps:
    """Training steps, perhaps with a save beside them."""

    seconds: float
    held: float = 0.0
    """Seconds for which the save kept the training thread waiting."""
    behind: float = 0.0
    """Seconds for which the save went on after the last step."""


def train(seat: Seat, side: str | None, shape: ff.Shape, root: Path, steps: int) -> Steps:
    """Take steps, with a save begun before the first where a side is given; it is complete when this returns."""
    training = seat.trainings[shape]
    seat.saved += 1
    begin = _prepared(seat, side, training, root)
    seat.meet()
    began = time.perf_counter()
    copied, finish = begin()
    held = time.perf_counter() - began

    def before_update() -> None:
        nonlocal held
        waits = time.perf_counter()
        copied()
        held += time.perf_counter() - waits

    training.step(before_update)
    for _ in range(steps - 1):
        training.step()
    seat.synchronize()
    ended = time.perf_counter()
    finish()
    return Steps(ended - began, held, time.perf_counter() - ended)


def _nothing() -> None:
    return


Begun = tuple[Callable[[], object], Callable[[], object]]
"""To call before tensors change, and until all is complete."""


def _prepared(seat: Seat, side: str | None, training: Training, root: Path) -> Callable[[], Begun]:
    """What begins a save; whatever may be made once for all saves is made here."""
    number = seat.saved
    if side is None:
        return lambda: (_nothing, _nothing)
    if side == OURS:
        saver = seat.saver(root, training.grid, asynchronous=True)

        def begin_ours() -> Begun:
            saver.save(number, training.model, training.optimizer, {})
            return _nothing, saver.wait

        return begin_ours
    if side not in seat.stagers:
        seat.stagers[side] = stagers(seat.device.type)[side]()
    state = training.for_dcp()

    def begin_dcp() -> Begun:
        found = dcp.async_save(
            state,
            storage_writer=writer(root / str(number)),
            planner=planner(),
            process_group=seat.group,
            async_stager=seat.stagers[side],
        )
        if hasattr(found, "staging_completion"):
            return found.staging_completion.result, found.upload_completion.result
        return _nothing, found.result

    return begin_dcp

"""The jobs of one rank in the checkpoint benchmark: train, save and load, with Fourfold or with DCP.

Both sides hold the same tensors. DCP gets them as DTensors with the placements of Fourfold's storage layout, so that it
writes each byte once as well. DCP's collectives use a process group of their own, because a thread that saves during
training must not share one with it.
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
from benchmarks.shared.models import build_on_device
from benchmarks.shared.rank_pool import RankContext
from benchmarks.shared.workloads import Workload
from fourfold.checkpoint.load import load_training
from fourfold.checkpoint.save import Saver
from fourfold.checkpoint.training_state import OPTIMIZER, RANDOM, LocalShard, training_shards
from fourfold.policy import Policy

OURS, PEER = "fourfold", "DCP"


def stagers(device: str) -> dict[str, Callable[[], AsyncStager]]:
    """Return DCP's ways to copy tensors before writing, by name. A stager is kept between saves, so that it can reuse
    its memory."""
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
    """A model with AdamW and its state on a grid."""

    def __init__(self, grid: ff.Grid, workload: Workload) -> None:
        self.grid = grid
        self.model = build_on_device(workload.config, grid, Policy())
        self.optimizer = ff.optim.AdamW(self.model, lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        batch = torch.randint(workload.config.vocab, (workload.rows, workload.config.seq + 1), generator=generator)
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
        """Return the same memory in the form that DCP takes."""
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
        """Return a checksum per shard that depends on every value and its position."""
        found = {}
        for name, held in self.tensors().items():
            flat = held.local.double().flatten()
            found[name] = (flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum().item()
        return found


class CheckpointRank(RankContext):
    """A rank of the pool with its trainings, savers and stagers."""

    def __init__(self, rank: int, world: int, device: str) -> None:
        super().__init__(rank, world, device)
        self.group = dist.new_group(backend="gloo")
        self.trainings: dict[ff.Shape, Training] = {}
        self.savers: dict[Path, Saver] = {}
        self.stagers: dict[str, AsyncStager] = {}
        self.saved = 0

    def barrier(self) -> None:
        """Wait until all ranks are here, their devices are idle, and all earlier writes are on the disk."""
        gc.collect()
        if self.rank == 0:
            os.sync()
        super().barrier()

    def saver(self, root: Path, grid: ff.Grid, *, asynchronous: bool) -> Saver:
        if root not in self.savers:  # keeps all checkpoints: removing old ones is measured on neither side
            self.savers[root] = Saver(grid, root, keep_last=1 << 30, asynchronous=asynchronous)
        return self.savers[root]


def prepare(rank: CheckpointRank, shape: ff.Shape, other: ff.Shape, workload: Workload) -> tuple[int, str]:
    """Build both trainings with AdamW's state; return the bytes of the whole state and a description of the machine."""
    for wanted in (shape, other):
        training = Training(rank.grid(wanted), workload)
        training.step()
        rank.trainings[wanted] = training
    cuda = rank.device.type == "cuda"
    machine = f"one {torch.cuda.get_device_name()}" if cuda else f"the CPU ({platform.machine()})"
    return sum(held.info.nbytes for held in rank.trainings[shape].tensors().values()), machine


def forget(rank: CheckpointRank, shape: ff.Shape) -> None:
    rank.trainings.pop(shape, None)


def save(rank: CheckpointRank, side: str, shape: ff.Shape, root: Path) -> tuple[float, Path]:
    """Save a checkpoint; return the seconds until it is complete, and its folder."""
    training = rank.trainings[shape]
    rank.saved += 1
    saver = rank.saver(root, training.grid, asynchronous=False) if side == OURS else None
    state = training.for_dcp() if side != OURS else {}
    rank.barrier()
    began = time.perf_counter()
    if saver is not None:
        saver.save(rank.saved, training.model, training.optimizer, {})
        folder = saver.checkpoints.path(rank.saved)
    else:
        folder = root / str(rank.saved)
        dcp.save(state, storage_writer=writer(folder), planner=planner(), process_group=rank.group)
    return time.perf_counter() - began, folder


def writer(folder: Path) -> dcp.FileSystemWriter:
    return dcp.FileSystemWriter(folder, sync_files=True)


def planner() -> dcp.DefaultSavePlanner:
    """Return a planner that reuses the plan of the previous save."""
    return dcp.DefaultSavePlanner(enable_plan_caching=True)


def load(rank: CheckpointRank, side: str, shape: ff.Shape, folder: Path) -> float:
    """Load a checkpoint over zeros and return the seconds."""
    training = rank.trainings[shape]
    training.wipe()
    state = training.for_dcp() if side != OURS else {}
    rank.barrier()
    began = time.perf_counter()
    if side == OURS:
        load_training(folder, training.model, training.optimizer)
    else:
        dcp.load(state, checkpoint_id=folder, process_group=rank.group)
    rank.synchronize()
    return time.perf_counter() - began


def sums(rank: CheckpointRank, shape: ff.Shape) -> dict[str, float]:
    return rank.trainings[shape].sums()


@dataclass(frozen=True)
class Steps:
    """The times of a few training steps, possibly during a save."""

    seconds: float
    blocked: float = 0.0
    """Seconds for which the save blocked the training thread."""
    after: float = 0.0
    """Seconds for which the save continued after the last step."""


def train(rank: CheckpointRank, side: str | None, shape: ff.Shape, root: Path, steps: int) -> Steps:
    """Take steps. If a side is given, it begins a save before the first step, which is complete when this returns."""
    training = rank.trainings[shape]
    rank.saved += 1
    begin = _prepared_save(rank, side, training, root)
    rank.barrier()
    began = time.perf_counter()
    copied, finish = begin()
    blocked = time.perf_counter() - began

    def before_update() -> None:
        nonlocal blocked
        waiting_since = time.perf_counter()
        copied()
        blocked += time.perf_counter() - waiting_since

    training.step(before_update)
    for _ in range(steps - 1):
        training.step()
    rank.synchronize()
    ended = time.perf_counter()
    finish()
    return Steps(ended - began, blocked, time.perf_counter() - ended)


def _nothing() -> None:
    return


Begun = tuple[Callable[[], object], Callable[[], object]]
"""Two functions: the first waits until tensors may change, the second until the save is complete."""


def _prepared_save(rank: CheckpointRank, side: str | None, training: Training, root: Path) -> Callable[[], Begun]:
    """Return a function that begins a save. Whatever can be made once for all saves is made here."""
    number = rank.saved
    if side is None:
        return lambda: (_nothing, _nothing)
    if side == OURS:
        saver = rank.saver(root, training.grid, asynchronous=True)

        def begin_ours() -> Begun:
            saver.save(number, training.model, training.optimizer, {})
            return _nothing, saver.wait

        return begin_ours
    if side not in rank.stagers:
        rank.stagers[side] = stagers(rank.device.type)[side]()
    state = training.for_dcp()

    def begin_dcp() -> Begun:
        found = dcp.async_save(
            state,
            storage_writer=writer(root / str(number)),
            planner=planner(),
            process_group=rank.group,
            async_stager=rank.stagers[side],
        )
        if hasattr(found, "staging_completion"):
            return found.staging_completion.result, found.upload_completion.result
        return _nothing, found.result

    return begin_dcp

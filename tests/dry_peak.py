"""Peak bytes of one rank's training step by running the real code dry, in a process that has no other group."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import fourfold as ff
from fourfold.grid import Shape
from fourfold.models.config import ModelConfig
from fourfold.params import local_of
from fourfold.planner.trace import StorageCounter
from fourfold.policy import Policy


@dataclass(frozen=True)
class Case:
    config: ModelConfig
    shape: Shape
    policy: Policy
    rows: int
    seq: int
    micro_steps: int = 1


@dataclass(frozen=True)
class Found:
    parameters: int
    kept: int
    """From forward to backward, in a pass that gathers nothing ahead."""
    peak: int
    """Of the second step, parameters included; the optimizer's state is not there."""


def dry_peak(case: Case) -> Found:
    """Forward, backward and the sums of one rank's micro-steps on meta tensors under a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=case.shape.world)
    try:
        grid = ff.Grid(**case.shape.named, order=case.shape.order, device="cpu")
        model = ff.models.build(case.config, grid, policy=case.policy, device="meta")
        parameters = sum(local_of(parameter).nbytes for parameter in model.parameters())
        tokens = torch.zeros(case.rows, case.seq, dtype=torch.long, device="meta")
        with StorageCounter() as first:
            loss = model(tokens, tokens)
            casts = sum(cast.copy.nbytes for cast in model.gradients.casts.values())  # those stay beyond backward
            kept = first.nbytes - casts
        loss.backward()  # records the order in which weights are used
        model.zero_grad()
        with StorageCounter() as alive:
            with ff.accumulate(model):
                for _ in range(case.micro_steps - 1):
                    model(tokens, tokens, count=1).backward()
            model(tokens, tokens, count=1).backward()
        return Found(parameters, kept, parameters + casts + alive.peak_nbytes)
    finally:
        dist.destroy_process_group()


def dry_peaks(cases: Sequence[Case]) -> list[Found]:
    """In processes of their own: a process has one default group, and the fake one is not for tests."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as processes:
        return list(processes.map(dry_peak, cases, chunksize=4))

"""What it costs to compute input and weight gradients apart: a transformer whose backward passes run as B and W, or in
one, with recompute and compiled regions (P7). Other runtimes walk autograd's graph for that, and lose both."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import fourfold as ff
from benchmarks.shared.models import BenchmarkModel, build_on_device
from benchmarks.shared.workloads import Workload
from benchmarks.speed.pipeline_lines import OURS, PipeLine
from benchmarks.speed.pipeline_ranks import PipelineRank
from fourfold import comm

SPLIT, UNSPLIT = "split", "unsplit"
SCHEDULES = {UNSPLIT: "1f1b", SPLIT: "zb-h1"}
MICRO_BATCHES = 8


def split_lines(ranks: int, *, compiled: bool) -> list[PipeLine]:
    """Return both lines without a pipeline, every rank by itself, and both on a pipeline of all ranks."""
    return [
        PipeLine(
            OURS,
            shape,
            f"{side} {where}",
            ff.Policy(schedule=schedule, recompute="block", compile=compiled),
            micro_batches=MICRO_BATCHES,
        )
        for shape, where in ((ff.Shape(data=ranks), "without pipe"), (ff.Shape(pipe=ranks), f"on {ranks} stages"))
        for side, schedule in SCHEDULES.items()
    ]


class SplitModel(BenchmarkModel):
    """A transformer that takes forward and backward passes by the schedule of its policy."""

    shard_inits = []  # noqa: RUF012  # weights stay: a step changes none

    def __init__(self, line: PipeLine, workload: Workload, grid: ff.Grid) -> None:
        self.grid, self.alone = grid, grid.size("pipe") == 1
        self.module: Any = build_on_device(workload.config, grid, line.policy, workload.dtype)
        tokens, targets = workload.batch(grid.device)
        self.micro_batches = list(zip(tokens.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES), strict=True))

    def step(self) -> Tensor:
        with comm.muted(self.grid) if self.alone else nullcontext():
            loss = ff.forward_backward(self.module, self.micro_batches)
        for parameter in self.module.parameters():
            parameter.grad = None
        return loss


def open_split(state: PipelineRank) -> None:
    """Free the weights of earlier groups."""
    state.stacks.clear()
    state.blocks.clear()


def build(state: PipelineRank, line: PipeLine, workload: Workload) -> None:
    before = torch.cuda.memory_allocated() if state.device.type == "cuda" else 0
    model = SplitModel(line, workload, state.grid(line.shape))
    model.base_bytes = before
    state.models[line.name], state.compiled[line.name] = model, False

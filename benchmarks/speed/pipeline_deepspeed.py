"""DeepSpeed's pipeline as a peer on the CPU: its 1F1B with a stage per rank, each a module that sleeps.

A step of DeepSpeed includes its optimizer, here SGD on one small vector per stage with a learning rate of 0. DeepSpeed
reads its accelerator from an environment variable when it is first imported.
"""

from __future__ import annotations

import os
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared.deepspeed_cpu import start_deepspeed
from benchmarks.shared.models import BenchmarkModel
from benchmarks.speed.pipeline_lines import PipeLine
from benchmarks.speed.pipeline_stages import Sleeper, SleepingModule, StackSize, loss_of

os.environ.setdefault("DS_ACCELERATOR", "cpu")
try:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule
except ImportError as error:
    raise ImportError(f"DeepSpeed's pipeline needs deepspeed ({error}); pip install 'fourfold[peers]'") from error


class DeepSpeedPipeline(BenchmarkModel):
    """This rank's stage under DeepSpeed's pipeline engine."""

    shard_inits = []  # noqa: RUF012

    def __init__(self, line: PipeLine, size: StackSize) -> None:
        start_deepspeed()
        sleeper = Sleeper(size.sleep_seconds)
        stages = [LayerSpec(SleepingModule, sleeper, size.hidden) for _ in range(line.ranks)]
        self.module: nn.Module = PipelineModule(
            stages, num_stages=line.ranks, loss_fn=loss_of, partition_method="uniform"
        )
        config: dict[str, Any] = {
            "train_batch_size": line.micro_batches,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": line.micro_batches,
            "steps_per_print": 1 << 30,
        }
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        self.engine, *_ = deepspeed.initialize(model=self.module, optimizer=optimizer, config=config)
        source = torch.randn(size.tokens, size.hidden, generator=torch.Generator().manual_seed(0))
        self.batches = repeat((source, source))

    def step(self) -> Tensor:
        return self.engine.train_batch(iter(self.batches)).detach()

"""torch.distributed.pipelining as a peer: 1F1B with a stage per rank, or interleaved with several stages per rank.

The decoder is cut between sublayers so that the slowest stage is as fast as possible. A tied head on another rank than
the embedding has a copy of its weight, and the gradients of both are summed after backward, as Megatron does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn import ModuleList
from torch.nn.utils import clip_grads_with_norm_

from benchmarks.shared.decoder import Decoder, cut_evenly, piece_costs
from benchmarks.shared.models import MAX_NORM, ShardInit, UpdatedModel, adamw
from benchmarks.shared.peers import (
    PeerModel,
    PeerSetup,
    device_of,
    init_weights,
    norm_over,
    parts_of,
    shard_inits,
    token_loss,
)
from benchmarks.shared.workloads import Line, Workload

PIPELINE, INTERLEAVED = PIPELINES = "pipeline 1F1B", "pipeline interleaved 1F1B"
"""The kinds of pipelines."""
STAGES_PER_RANK = 2
"""Stages of a rank in an interleaved pipeline."""


def stages_of(line: Line) -> int:
    return line.pipe * (STAGES_PER_RANK if line.kind == INTERLEAVED else 1)


class PipelineModel(UpdatedModel):
    """This rank's stages of a decoder on a one-dimensional mesh. Only the last rank has a loss."""

    def __init__(self, line: Line, workload: Workload, mesh: DeviceMesh) -> None:
        self.config, self.device = workload.config, device_of(mesh)
        self.group, ranks, rank = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        self.first, self.last = rank == 0, rank == ranks - 1
        self.tokens, self.targets = workload.batch(self.device)
        number = stages_of(line)
        cuts = cut_evenly(piece_costs(workload.config), number)
        self.module = ModuleList(self._part(workload, cuts[index]) for index in range(rank, number, ranks))
        if line.compiled:
            for part in self.module:
                part.compile(dynamic=False)
        stages = [
            PipelineStage(part, index, number, self.device, group=self.group)
            for part, index in zip(self.module, range(rank, number, ranks), strict=True)
        ]
        options = {"n_microbatches": line.micro_batches, "loss_fn": token_loss}
        if line.kind == INTERLEAVED:
            self.schedule = ScheduleInterleaved1F1B(stages, **options)
        else:
            self.schedule = Schedule1F1B(stages[0], **options)
        self.tied_group = self._tied_group(ranks) if workload.config.tied else None
        self.optimizer = adamw(self.module.parameters())

    def _part(self, workload: Workload, pieces: range) -> Decoder:
        with torch.device("meta"):
            part = Decoder(workload.config).to(workload.dtype)
        part.keep(pieces)
        return part.to_empty(device=self.device)

    def _tied_group(self, ranks: int) -> dist.ProcessGroup | None:
        everyone = dist.get_process_group_ranks(self.group)
        return dist.new_group([everyone[0], everyone[ranks - 1]])  # type: ignore[return-value]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    @property
    def shard_inits(self) -> list[ShardInit]:  # type: ignore[override]
        return [init for part in self.module for init in shard_inits(part, self.config, parts_of(part))]

    def init_weights(self) -> None:
        """Fill the stages with Fourfold's initial weights."""
        for part in self.module:
            init_weights(part, self.config)

    def forward_backward(self) -> Tensor | None:
        losses: list[Tensor] = []
        inputs = (self.tokens,) if self.first else ()
        target = self.targets if self.last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().mean() if self.last else None

    def update(self) -> None:
        copies: set[torch.nn.Parameter] = set()
        if self.tied_group is not None and (self.first or self.last):
            weight = self.module[0].embedding.weight if self.first else self.module[-1].head.weight
            dist.all_reduce(weight.grad, group=self.tied_group)  # noqa: TID251
            copies = set() if self.first else {weight}  # counted once in the norm
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        norm = norm_over(self.group, [parameter for parameter in parameters if parameter not in copies])
        clip_grads_with_norm_(parameters, MAX_NORM, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_peer(line: Line, workload: Workload, mesh: DeviceMesh) -> PeerModel | PipelineModel:
    """Return a peer on its mesh: of one dim for a pipeline, otherwise with the dims (replicate, dp, tp)."""
    if line.kind in PIPELINES:
        return PipelineModel(line, workload, mesh)
    return PeerModel(workload, mesh, PeerSetup.of(line))

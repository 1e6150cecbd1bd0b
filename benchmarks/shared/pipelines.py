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
from benchmarks.shared.models import MAX_NORM, ShardInit, SwitchedModel, adamw
from benchmarks.shared.peers import (
    PeerModel,
    PeerSetup,
    device_of,
    init_weights,
    norm_over,
    parts_of,
    rows_of,
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


class PipelineModel(SwitchedModel):
    """This rank's stages of a decoder on a mesh with dims (pipe, replicate). Only the last rank of a pipeline has a
    loss. Replicas of a stage sum their gradients in one message after the last backward pass, because DDP fails when
    a stage runs several forward passes before a backward pass."""

    def __init__(self, line: Line, workload: Workload, mesh: DeviceMesh) -> None:
        super().__init__()
        self.config, self.device = workload.config, device_of(mesh)
        self.group, self.replicas = mesh.get_group("pipe"), mesh.get_group("replicate")
        ranks, rank = self.group.size(), mesh.get_local_rank("pipe")
        self.first, self.last = rank == 0, rank == ranks - 1
        self.tokens, self.targets = rows_of(workload, mesh["replicate"], self.device)
        number = stages_of(line)
        cuts = cut_evenly(piece_costs(workload.config), number)
        self.module = ModuleList(self._part(workload, cuts[index]) for index in range(rank, number, ranks))
        self.compile(self.module)
        stages = [
            PipelineStage(part, index, number, self.device, group=self.group)
            for part, index in zip(self.module, range(rank, number, ranks), strict=True)
        ]
        options = {"n_microbatches": line.micro_batches, "loss_fn": token_loss}
        if line.kind == INTERLEAVED:
            self.schedule = ScheduleInterleaved1F1B(stages, **options)
        else:
            self.schedule = Schedule1F1B(stages[0], **options)
        self.tied_group = _ends(mesh) if workload.config.tied else None
        self.optimizer = adamw(self.module.parameters())

    def _part(self, workload: Workload, pieces: range) -> Decoder:
        with torch.device("meta"):
            part = Decoder(workload.config).to(workload.dtype)
        part.keep(pieces)
        return part.to_empty(device=self.device)

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
        if self.replicas.size() > 1:
            self._reduce([p.grad for p in self.module.parameters() if p.grad is not None])
        return torch.stack(losses).detach().mean() if self.last else None

    def _reduce(self, gradients: list[Tensor]) -> None:
        """Replace gradients by their means over the replicas."""
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.replicas)  # noqa: TID251
        flat /= self.replicas.size()
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(own) for part, own in zip(parts, gradients, strict=True)])

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


def _ends(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of the first and the last rank of this rank's pipeline. All ranks make the groups of all."""
    pipelines = mesh.mesh.T.tolist()
    group, _ = dist.new_subgroups_by_enumeration([[ranks[0], ranks[-1]] for ranks in pipelines])
    return group


def make_peer(line: Line, workload: Workload, mesh: DeviceMesh) -> PeerModel | PipelineModel:
    """Return a peer on its mesh: with dims (pipe, replicate) for a pipeline, otherwise (replicate, dp, tp)."""
    if line.kind in PIPELINES:
        return PipelineModel(line, workload, mesh)
    return PeerModel(workload, mesh, PeerSetup.of(line))

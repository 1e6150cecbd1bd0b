"""Models of a few blocks with experts as `block.py` measures them: with attention, embedding and head.

Plain torch's side is DistributedDataParallel with the experts of `plain_experts.py` in place of MLPs. All sides have
equal weights, and equal rows on every rank.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import fourfold as ff
from benchmarks.experts.plain_experts import ExpertParallelLayer
from benchmarks.experts.waits import HostWaits
from benchmarks.experts.workload import (
    KEEPING,
    BlockResult,
    BlockSize,
    Way,
    drawn,
    dtype_on,
    joined,
    load_whole,
    shapes_of,
    take_gradients,
)
from benchmarks.shared.decoder import Decoder, init_of
from benchmarks.shared.models import filled_on_device
from benchmarks.shared.rank_pool import RankContext
from fourfold.models import ModelConfig

ROWS = 2
"""The rows of a rank: as many as halves."""
EXPERT_WEIGHTS = tuple(f".mlp.layer.{name}" for name in ("gate", "up", "down"))
"""How the names of weights end of which each rank of plain torch has its own experts'."""


def config_of(size: BlockSize) -> ModelConfig:
    """Return the model: heads as in Qwen3-30B-A3B where the width is its own, and a small vocabulary."""
    head_dim = 128 if size.width >= 2048 else 32
    return ff.models.config(
        "qwen3-30b-a3b",
        layers=size.layers,
        hidden=size.width,
        heads=2 * size.width // head_dim,
        kv_heads=size.width // head_dim // 4,
        head_dim=head_dim,
        experts=size.experts,
        top_k=size.chosen,
        expert_hidden=size.hidden,
        vocab=4 * size.width,
        seq=size.tokens // ROWS,
        qk_norm=False,
        aux=0.0,
    )


def whole_weight(config: ModelConfig, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the whole initial weight of this name, equal on all ranks."""
    init = init_of(config, name)
    return init.mean + init.std * drawn(zlib.crc32(name.encode()), shape, device)


def rows_of(config: ModelConfig, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of a rank and their targets, [rows, seq] each."""
    generator = torch.Generator(device).manual_seed(10_000 + rank)
    text = torch.randint(config.vocab, (ROWS, config.seq + 1), generator=generator, device=device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class PlainMixture(nn.Module):
    """Experts in place of the MLP of a decoder's block."""

    def __init__(self, layer: ExpertParallelLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, a: Tensor) -> Tensor:
        return self.layer(a.flatten(0, 1)).view_as(a)


class ExpertParallelModel:
    """Plain torch's side."""

    def __init__(self, context: RankContext, size: BlockSize) -> None:
        self.config, self.waits = config_of(size), HostWaits(context.device)
        device, dtype = context.device, dtype_on(context.device)
        self.tokens, self.targets = rows_of(self.config, context.rank, device)
        with device:
            decoder = Decoder(self.config).to(dtype)
        for index, block in enumerate(decoder.blocks):
            weights = {
                name: whole_weight(self.config, f"layers.{index}.mlp.{name}", shape, device)
                for name, shape in shapes_of(size).items()
            }
            block.mlp = PlainMixture(ExpertParallelLayer(size, weights, self.waits))
        with torch.no_grad():
            for name, parameter in decoder.named_parameters():
                if ".mlp.layer." not in name:
                    parameter.copy_(whole_weight(self.config, name, tuple(parameter.shape), device))
        self.decoder = decoder
        # each rank has experts of its own, whose gradients need no sum
        own = [name for name, _ in decoder.named_parameters() if name.endswith(EXPERT_WEIGHTS)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(decoder, own)  # type: ignore[no-untyped-call]
        self.model = DistributedDataParallel(decoder, gradient_as_bucket_view=True)

    def step(self) -> tuple[Tensor, Tensor]:
        loss = self._forward_backward()
        self.model.zero_grad()
        return loss, loss

    def results(self) -> BlockResult:
        mean, found = self._forward_backward().clone(), {}
        dist.all_reduce(mean)  # noqa: TID251  # of a peer, which has no grid
        world = dist.get_world_size()
        for name, parameter in self.decoder.named_parameters():
            gradient = cast("Tensor", parameter.grad)
            own = name.endswith(EXPERT_WEIGHTS)
            found[_name_of(name)] = joined(gradient) / world if own else gradient.clone()
        self.model.zero_grad()
        return BlockResult(mean / world, found["layers.0.attention_norm.weight"], found)

    def _forward_backward(self) -> Tensor:
        loss = functional.cross_entropy(self.model(self.tokens).flatten(0, 1), self.targets.flatten())
        loss.backward()
        return loss.detach()


def _name_of(name: str) -> str:
    """Return Fourfold's name of a parameter."""
    return name.replace(".mlp.layer.router", ".mlp.router.weight").replace(".mlp.layer.", ".mlp.")


class FourfoldWholeModel:
    """Fourfold's side."""

    def __init__(self, context: RankContext, way: Way, size: BlockSize) -> None:
        self.way, self.grid, self.config = way, context.grid(way.shape), config_of(size)
        policy = replace(KEEPING, overlap=ff.Overlap(halves=way.halves))
        with filled_on_device():
            self.model = ff.models.build(self.config, self.grid, policy=policy, dtype=dtype_on(context.device))
        load_whole(self.model, self.grid, lambda *named: whole_weight(self.config, *named, context.device))
        # a place has the rows of all ranks that share it
        sharing = way.shape.x * way.shape.y
        first = context.rank // sharing * sharing
        parts = [rows_of(self.config, first + rank, context.device) for rank in range(sharing)]
        self.tokens, self.targets = (torch.cat(each) for each in zip(*parts, strict=True))

    def step(self) -> tuple[Tensor, Tensor]:
        loss = self._forward_backward()
        for parameter in self.model.parameters():
            parameter.grad = None
        return loss, loss

    def results(self) -> BlockResult:
        loss, found = self._forward_backward(), take_gradients(self.model, self.grid)
        return BlockResult(loss, found["layers.0.attention_norm.weight"], found)

    def _forward_backward(self) -> Tensor:
        loss = self.model(self.tokens, self.targets)
        loss.backward()
        return loss.detach()

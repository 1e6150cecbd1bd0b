"""Fourfold's peers in PyTorch itself, each as its own documentation recommends, on one plain Llama.

- **FSDP2**: `fully_shard` as torchtitan applies it: the embedding, each block, norm and head together (not resharded
  after forward, since backward begins with them), then the root. The documented alternative, explicit prefetch of two
  blocks, is a peer of its own.
- **TP**: the plan of torch's tutorial and of torchtitan: with sequence parallelism and `loss_parallel`.
- **FSDP2 x TP**: both on a mesh of two dims, TP on the inner one.
- **HSDP**: FSDP2 on a mesh of replicas of shards.

The loss is taken in fp32 as torchtitan does. Attributes have the names of Fourfold's models.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional

from fourfold.layout import Init, chunk
from fourfold.models import ModelConfig
from fourfold.nn.initial import fill_, key_of
from sides import Draw, Side, Size, local

Rope = tuple[Tensor, Tensor]
PREFETCHED_BLOCKS = 2


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.grouped = config.heads != config.kv_heads
        self.q = nn.Linear(config.hidden, width, bias=False)
        self.k = nn.Linear(config.hidden, kv_width, bias=False)
        self.v = nn.Linear(config.hidden, kv_width, bias=False)
        self.out = nn.Linear(width, config.hidden, bias=False)

    def forward(self, a: Tensor, rope: Rope) -> Tensor:
        # with TP these are the heads of this rank, over whole sequences
        q, k, v = (part(a).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotate(q, *rope), rotate(k, *rope)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotate(a: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = a.chunk(2, dim=-1)
    return (a * cos + torch.cat([-second, first], dim=-1) * sin).to(a.dtype)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, a: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(a)) * self.up(a))


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, a: Tensor, rope: Rope) -> Tensor:
        a = a + self.attention(self.attention_norm(a), rope)
        return a + self.mlp(self.mlp_norm(a))


class Llama(nn.Module):
    """tokens [rows, seq] -> logits [rows, seq, vocab]"""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if (config.norm, config.mlp, config.positions, config.bias, config.tied) != (
            "rms",
            "swiglu",
            "rope",
            False,
            False,
        ):
            raise ValueError(f"peers are plain Llamas (rms, swiglu, rope, no bias, untied head), not {config}")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rope = self.rope(tokens.shape[1], tokens.device)
        a = self.embedding(tokens)
        for block in self.layers:
            a = block(a, rope)
        return self.head(self.norm(a))

    def rope(self, seq: int, device: torch.device) -> Rope:
        size = self.config.head_dim
        frequencies = self.config.rope_theta ** -(torch.arange(0, size, 2, device=device) / size)
        angles = torch.outer(torch.arange(seq, device=device), frequencies).repeat(1, 2)
        return angles.cos(), angles.sin()


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Activations rest cut along the sequence; inside a sublayer heads and hidden units are cut instead."""
    outside = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    inside = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
        "attention.q": ColwiseParallel(),
        "attention.k": ColwiseParallel(),
        "attention.v": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, outside)
    for block in model.layers:
        parallelize_module(block, mesh, inside)


def shard_parts(
    model: nn.Module,
    embedding: nn.Module,
    layers: Iterable[nn.Module],
    ending: list[nn.Module],
    mesh: DeviceMesh,
    dtype: torch.dtype,
) -> list[FSDPModule]:
    """FSDP2 on the parts of a transformer, the last of which are together; returns the blocks."""
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)}
    fully_shard(embedding, **options)
    blocks = [fully_shard(block, **options) for block in layers]
    fully_shard(ending, **options, reshard_after_forward=False)
    root = fully_shard(model, **options)
    if mesh.device_type == "cpu":
        for module in (root, embedding, ending[-1], *blocks):
            module.set_force_sum_reduction_for_comms(True)  # gloo does not average
    return blocks


def shard_fully(model: Llama, mesh: DeviceMesh, dtype: torch.dtype, *, explicit: bool) -> None:
    blocks = shard_parts(model, model.embedding, model.layers, [model.norm, model.head], mesh, dtype)
    if explicit:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + PREFETCHED_BLOCKS])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - PREFETCHED_BLOCKS) : index][::-1])


class Peer(Side):
    """A Llama on a mesh of (dp, tp) ranks, or (replicate, dp, tp); a dim of size 1 means without that kind of
    parallelism. Replicas hold the same shards."""

    module: Llama

    def __init__(self, size: Size, mesh: DeviceMesh, *, explicit: bool = False, compiled: bool = False) -> None:
        device = (
            torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
        )
        replicated = "replicate" in (mesh.mesh_dim_names or ()) and mesh["replicate"].size() > 1
        shards = mesh["replicate", "dp"] if replicated else mesh["dp"]
        self.tokens, self.targets = rows_of(size, shards, device)
        self.cuts_vocabulary = mesh["tp"].size() > 1
        with torch.device("meta"):
            self.module = Llama(size.config).to(size.dtype)
        if self.cuts_vocabulary:
            tensor_parallel(self.module, mesh["tp"])
        if compiled:
            for block in self.module.layers:
                block.compile()
        if shards.size() > 1:
            shard_fully(self.module, shards, size.dtype, explicit=explicit)
        self.module.to_empty(device=device)
        self.place = tuple(mesh.get_coordinate() or ())

    @property
    def draws(self) -> list[Draw]:  # type: ignore[override]
        """Asked for anew: FSDP2 may move its shards in the first step."""
        return [
            Draw(local(parameter.detach()), initial_of(self.module.config, name), key_of(name, self.place))
            for name, parameter in self.module.named_parameters()
        ]

    def forward_backward(self) -> Tensor:
        with loss_parallel() if self.cuts_vocabulary else nullcontext():
            logits = self.module(self.tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
            del logits
            loss.backward()
        return loss.to_local() if isinstance(loss, DTensor) else loss


def rows_of(size: Size, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and targets of this rank, where each rank of the mesh has rows of its own."""
    ranks, place = mesh.size(), 0
    for dim in range(mesh.ndim):
        place = place * mesh.size(dim) + mesh.get_local_rank(dim)
    if size.rows % ranks:
        raise ValueError(f"{size.rows} rows cannot be cut over {ranks} data-parallel ranks")
    rows = size.rows // ranks
    tokens, targets = (part[place * rows :][:rows] for part in size.batch(device))
    return tokens, targets


def initial_of(config: ModelConfig, name: str) -> Init:
    """As Fourfold's models start."""
    if name.endswith("norm.weight"):
        return Init(mean=1.0)
    deep = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return Init(std=0.02 / (2 * config.layers) ** 0.5 if deep else 0.02)


def start(model: nn.Module, config: ModelConfig, seed: int = 0) -> None:
    """Fourfold's first weights of that seed, of which each rank draws its shards alone."""
    for name, parameter in model.named_parameters():
        shard = local(parameter.detach())
        fill_(shard, _box(parameter), parameter.shape, initial_of(config, name), seed, name)


def _box(parameter: Tensor) -> list[range]:
    """The index range of each dim that this rank holds. Where two mesh dims cut the same tensor dim, FSDP2 cuts what
    TP has cut: the inner mesh dim comes first."""
    box = [range(length) for length in parameter.shape]
    if not isinstance(parameter, DTensor):
        return box
    for dim in reversed(range(parameter.device_mesh.ndim)):
        placement = parameter.placements[dim]
        if not placement.is_replicate():
            held = box[placement.dim]  # type: ignore[attr-defined]
            part = chunk(len(held), parameter.device_mesh.size(dim), parameter.device_mesh.get_local_rank(dim))
            box[placement.dim] = held[part.start : part.stop]  # type: ignore[attr-defined]
    return box

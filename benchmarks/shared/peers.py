"""Fourfold's peers in PyTorch itself, each set up as its own documentation recommends, on one plain Llama.

- **FSDP2**: `fully_shard` as torchtitan applies it: the embedding, each block, norm and head together (not resharded
  after forward, because backward begins with them), then the root. Explicit prefetch of two blocks, which the
  documentation offers as an alternative, is measured as a peer of its own.
- **TP**: the plan of torch's tutorial and of torchtitan, with sequence parallelism and `loss_parallel`.
- **FSDP2 x TP**: both on a two-dimensional mesh, with TP on the inner dimension.
- **HSDP**: FSDP2 on a mesh of replicas and shards.

The loss is computed in fp32, as in torchtitan. Attributes have the same names as in Fourfold's models, so that weights
can be copied by name.
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

from benchmarks.shared.models import BenchmarkModel, ShardInit, local_shard
from benchmarks.shared.workloads import Workload
from fourfold.layout import Init, chunk
from fourfold.models import ModelConfig
from fourfold.nn.rng import fill_, key_of

Rope = tuple[Tensor, Tensor]
PREFETCHED_BLOCKS = 2


class LlamaAttention(nn.Module):
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
        # under TP these are this rank's heads, over whole sequences
        q, k, v = (part(a).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


def rope_tables(config: ModelConfig, seq: int, device: torch.device) -> Rope:
    """Return cos and sin of the rotary angles, each [seq, head_dim]."""
    size = config.head_dim
    frequencies = config.rope_theta ** -(torch.arange(0, size, 2, device=device) / size)
    angles = torch.outer(torch.arange(seq, device=device), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def apply_rope(a: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = a.chunk(2, dim=-1)
    return (a * cos + torch.cat([-second, first], dim=-1) * sin).to(a.dtype)


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, a: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(a)) * self.up(a))


class LlamaBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = LlamaMLP(config)

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
            raise ValueError(f"the peers train plain Llamas (rms, swiglu, rope, no bias, untied head), not {config}")
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        rope = rope_tables(self.config, tokens.shape[1], tokens.device)
        a = self.embedding(tokens)
        for block in self.layers:
            a = block(a, rope)
        return self.head(self.norm(a))


def tensor_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Shard activations along the sequence between sublayers, and along heads and hidden units inside them."""
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
    """Apply FSDP2 to each part of a transformer, with the `ending` modules in one group; return the blocks."""
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)}
    fully_shard(embedding, **options)
    blocks = [fully_shard(block, **options) for block in layers]
    fully_shard(ending, **options, reshard_after_forward=False)
    root = fully_shard(model, **options)
    if mesh.device_type == "cpu":
        for module in (root, embedding, ending[-1], *blocks):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no average
    return blocks


def shard_fully(model: Llama, mesh: DeviceMesh, dtype: torch.dtype, *, explicit: bool) -> None:
    blocks = shard_parts(model, model.embedding, model.layers, [model.norm, model.head], mesh, dtype)
    if explicit:
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + PREFETCHED_BLOCKS])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - PREFETCHED_BLOCKS) : index][::-1])


class PeerModel(BenchmarkModel):
    """A Llama on a mesh with dims (dp, tp) or (replicate, dp, tp). A dim of size 1 means that this kind of parallelism
    is off. Replicas hold the same shards."""

    module: Llama

    def __init__(self, workload: Workload, mesh: DeviceMesh, *, explicit: bool = False, compiled: bool = False) -> None:
        device = (
            torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
        )
        replicated = "replicate" in (mesh.mesh_dim_names or ()) and mesh["replicate"].size() > 1
        shards = mesh["replicate", "dp"] if replicated else mesh["dp"]
        self.tokens, self.targets = rows_of(workload, shards, device)
        self.shards_vocabulary = mesh["tp"].size() > 1
        with torch.device("meta"):
            self.module = Llama(workload.config).to(workload.dtype)
        if self.shards_vocabulary:
            tensor_parallel(self.module, mesh["tp"])
        if compiled:
            for block in self.module.layers:
                block.compile()
        if shards.size() > 1:
            shard_fully(self.module, shards, workload.dtype, explicit=explicit)
        self.module.to_empty(device=device)
        self.coordinate = tuple(mesh.get_coordinate() or ())

    @property
    def shard_inits(self) -> list[ShardInit]:  # type: ignore[override]
        """Computed at each call, because FSDP2 may move its shards in the first step."""
        return [
            ShardInit(local_shard(parameter.detach()), init_of(self.module.config, name), key_of(name, self.coordinate))
            for name, parameter in self.module.named_parameters()
        ]

    def forward_backward(self) -> Tensor:
        with loss_parallel() if self.shards_vocabulary else nullcontext():
            logits = self.module(self.tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), self.targets.flatten())
            del logits
            loss.backward()
        return loss.to_local() if isinstance(loss, DTensor) else loss


def rows_of(workload: Workload, mesh: DeviceMesh, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and targets: every rank of the mesh has rows of its own."""
    ranks, rank = mesh.size(), 0
    for dim in range(mesh.ndim):
        rank = rank * mesh.size(dim) + mesh.get_local_rank(dim)
    if workload.rows % ranks:
        raise ValueError(f"{workload.rows} rows are not divisible by {ranks} data-parallel ranks")
    rows = workload.rows // ranks
    tokens, targets = (part[rank * rows :][:rows] for part in workload.batch(device))
    return tokens, targets


def init_of(config: ModelConfig, name: str) -> Init:
    """Return the initial distribution that Fourfold's models use for this parameter."""
    if name.endswith("norm.weight"):
        return Init(mean=1.0)
    deep = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return Init(std=0.02 / (2 * config.layers) ** 0.5 if deep else 0.02)


def init_weights(model: nn.Module, config: ModelConfig, seed: int = 0) -> None:
    """Fill the model with Fourfold's initial weights for this seed; each rank draws only its own shards."""
    for name, parameter in model.named_parameters():
        shard = local_shard(parameter.detach())
        fill_(shard, _box(parameter), parameter.shape, init_of(config, name), seed, name)


def _box(parameter: Tensor) -> list[range]:
    """Return the index range that this rank holds of each tensor dim. Where two mesh dims shard the same tensor dim,
    FSDP2 shards what TP has sharded already, so the inner mesh dim comes first."""
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

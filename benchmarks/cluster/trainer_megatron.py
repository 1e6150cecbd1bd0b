"""Tensor parallelism of megatron-core as a trainer: its parallel layers with sequence parallelism, its embedding and
its loss over a sharded vocabulary, with torch's DDP over the replicas.

As in Megatron's own models, q, k and v are one layer, and so are gate and up, so that a sublayer gathers its input
once. The code around the layers is written here in Megatron's way, because Megatron's own needs a GPU (streams, fused
kernels, gradient norms on "cuda"): gradients of norm weights are summed over the tensor-parallel ranks in one message,
and so is the squared norm of all gradients.

megatron-core 0.16 allocates buffers with `device=torch.cuda.current_device()`, and its loss reads the group from a
global. `_on_cpu` patches these two, to return the CPU and our group; nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cluster.trainer_base import Trainer
from benchmarks.shared.decoder import Decoder, Rope, apply_rope, init_of
from benchmarks.shared.models import MAX_NORM, adamw
from benchmarks.shared.peers import rows_of
from benchmarks.shared.workloads import Workload
from fourfold.layout import chunk
from fourfold.models import ModelConfig
from fourfold.nn.rng import fill_

try:
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )
    from megatron.core.utils import GlobalMemoryBuffer
except ImportError as error:
    raise ImportError(f"Megatron TP needs megatron-core 0.16 ({error}); pip install 'fourfold[peers]'") from error


@contextmanager
def _on_cpu(group: dist.ProcessGroup, buffer: GlobalMemoryBuffer) -> Iterator[None]:
    globals_ = {"_TENSOR_MODEL_PARALLEL_GROUP": group, "_GLOBAL_MEMORY_BUFFER": buffer}
    with (
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.multiple(parallel_state, **globals_),
    ):
        yield


class ColumnLinear(ColumnParallelLinear):
    """Several layers with the same input, joined in one weight; each is sharded over its rows."""

    def __init__(self, inputs: int, outputs: dict[str, int], options: dict[str, Any]) -> None:
        super().__init__(inputs, sum(outputs.values()), bias=False, gather_output=False, **options)
        self.outputs = outputs

    def forward(self, a: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        joined, _ = super().forward(a)
        if len(self.outputs) == 1:
            return (joined,)  # not a view, because the loss writes into the logits
        return joined.split([rows // self.tp_group.size() for rows in self.outputs.values()], dim=-1)


class RowLinear(RowParallelLinear):
    def __init__(self, inputs: int, outputs: int, options: dict[str, Any]) -> None:
        fixed = {"bias": False, "input_is_parallel": True, "skip_bias_add": False}
        super().__init__(inputs, outputs, **fixed, **options)

    def forward(self, a: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(a)[0]


class MegatronAttention(nn.Module):
    """a [seq/x, rows, hidden] -> [seq/x, rows, hidden]"""

    def __init__(self, config: ModelConfig, options: dict[str, Any]) -> None:
        super().__init__()
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.grouped = config.heads != config.kv_heads
        self.qkv = ColumnLinear(config.hidden, {"q": width, "k": kv_width, "v": kv_width}, options)
        self.out = RowLinear(width, config.hidden, options)

    def forward(self, a: Tensor, rope: Rope) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for part in self.qkv(a))
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(mixed.permute(2, 0, 1, 3).flatten(2))


class MegatronMLP(nn.Module):
    def __init__(self, config: ModelConfig, options: dict[str, Any]) -> None:
        super().__init__()
        self.gate_up = ColumnLinear(config.hidden, {"gate": config.mlp_hidden, "up": config.mlp_hidden}, options)
        self.down = RowLinear(config.mlp_hidden, config.hidden, options)

    def forward(self, a: Tensor) -> Tensor:
        gate, up = self.gate_up(a)
        return self.down(functional.silu(gate) * up)


class MegatronLlama(Decoder):
    """tokens [rows, seq] -> logits [seq, rows, vocab/x]"""

    def __init__(self, config: ModelConfig, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.to_empty(device="cpu").to(dtype)
        parallel = ModelParallelConfig(
            tensor_model_parallel_size=group.size(),
            sequence_parallel=group.size() > 1,
            params_dtype=dtype,
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
        options = {"config": parallel, "init_method": nn.init.zeros_, "tp_group": group}
        self.embedding = VocabParallelEmbedding(config.vocab, config.hidden, reduce_scatter_embeddings=True, **options)
        for block in self.layers:
            block.attention, block.mlp = MegatronAttention(config, options), MegatronMLP(config, options)
        self.head = ColumnLinear(config.hidden, {"head": config.vocab}, options)

    def forward(self, tokens: Tensor) -> Tensor:
        (logits,) = super().forward(tokens)
        return logits

    @cached_property
    def replicated(self) -> list[nn.Parameter]:
        """Return the norm weights; their gradients cover only this rank's part of the sequence."""
        return [parameter for name, parameter in self.named_parameters() if name.endswith("norm.weight")]


def init_megatron_weights(model: MegatronLlama, ranks: int, rank: int, seed: int = 0) -> None:
    """Fill the model with Fourfold's initial weights for this seed."""
    for path, module in model.named_modules():
        if isinstance(module, ColumnLinear):
            parent, _, last = path.rpartition(".")
            rows = [count // ranks for count in module.outputs.values()]
            shards = module.weight.detach().split(rows)
            for shard, (name, outputs) in zip(shards, module.outputs.items(), strict=True):
                whole = (outputs, module.input_size)
                _fill(model, shard, f"{parent}.{name}" if parent else last, whole, 0, ranks, rank, seed)
        elif isinstance(module, RowLinear):
            _fill(model, module.weight, path, (module.output_size, module.input_size), 1, ranks, rank, seed)
        elif isinstance(module, VocabParallelEmbedding):
            _fill(model, module.weight, path, (module.num_embeddings, module.embedding_dim), 0, ranks, rank, seed)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


def _fill(
    model: Decoder, shard: Tensor, path: str, shape: tuple[int, int], dim: int, ranks: int, rank: int, seed: int
) -> None:
    name = f"{path}.weight"
    box = [chunk(length, ranks, rank) if d == dim else range(length) for d, length in enumerate(shape)]
    fill_(shard.detach(), box, shape, init_of(model.config, name), seed, name)


class MegatronTrainer(Trainer):
    """Tensor-parallel replicas with sequence parallelism, joined by DDP."""

    def __init__(self, workload: Workload, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group("tp")
        if workload.config.seq % self.group.size():
            raise ValueError(f"seq={workload.config.seq} is not divisible by {self.group.size()} TP ranks")
        tokens, targets = rows_of(workload, mesh["replicate"], torch.device("cpu"))
        self.tokens, self.targets = tokens, targets.T.contiguous()
        self.buffer = GlobalMemoryBuffer()
        with _on_cpu(self.group, self.buffer):
            self.module = MegatronLlama(workload.config, self.group, workload.dtype)
        init_megatron_weights(self.module, self.group.size(), mesh.get_local_rank("tp"))
        replicas = mesh.get_group("replicate")
        self.model: nn.Module = self.module
        if replicas.size() > 1:
            self.model = DistributedDataParallel(self.module, process_group=replicas, init_sync=False)
        self.optimizer = adamw(self.module.parameters())

    def step(self) -> Tensor:
        with _on_cpu(self.group, self.buffer):
            loss = vocab_parallel_cross_entropy(self.model(self.tokens), self.targets).mean()
            loss.backward()
        self._sum_replicated()
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _sum_replicated(self) -> None:
        gradients = [parameter.grad for parameter in self.module.replicated if parameter.grad is not None]
        flat = torch.cat(gradients)
        dist.all_reduce(flat, group=self.group)  # noqa: TID251
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(total)

    def _clip(self) -> None:
        replicated = set(self.module.replicated)
        cut = [p.grad for p in self.module.parameters() if p not in replicated and p.grad is not None]
        squares = nn.utils.get_total_norm(cut).square()
        dist.all_reduce(squares, group=self.group)  # noqa: TID251
        squares += nn.utils.get_total_norm([p.grad for p in replicated if p.grad is not None]).square()
        nn.utils.clip_grads_with_norm_(self.module.parameters(), MAX_NORM, squares.sqrt())

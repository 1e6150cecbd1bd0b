"""Tensor parallelism of megatron-core as training steps: its parallel layers with sequence parallelism, its embedding
and its loss over a cut vocabulary; torch's DDP over the replicas.

As Megatron's own models do, q, k and v are one layer and so are gate and up: a sublayer gathers its input once. What
surrounds the layers is written here as Megatron does it, since its own needs a GPU (streams, fused kernels, norms of
gradients on "cuda"): gradients of norms are summed over the tensor-parallel ranks in one message, and the norm of all
gradients is one number summed over them.

megatron-core 0.16 makes its buffers with `device=torch.cuda.current_device()` and its loss asks a global for the group.
Inside `_on_cpu` the one answers with the CPU and the other with the group; nothing else is changed.
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

from fourfold.layout import chunk
from fourfold.models import ModelConfig
from fourfold.nn.initial import fill_
from peers import Llama, Rope, initial_of, rotate, rows_of
from sides import Size
from trainers import MAX_NORM, Trainer, adamw

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


class Column(ColumnParallelLinear):
    """Several layers with the same input in one weight, each cut over its rows."""

    def __init__(self, inputs: int, outputs: dict[str, int], options: dict[str, Any]) -> None:
        super().__init__(inputs, sum(outputs.values()), bias=False, gather_output=False, **options)
        self.outputs = outputs

    def forward(self, a: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        joined, _ = super().forward(a)
        if len(self.outputs) == 1:
            return (joined,)  # no view of it: the loss writes into logits
        return joined.split([rows // self.tp_group.size() for rows in self.outputs.values()], dim=-1)


class Row(RowParallelLinear):
    def __init__(self, inputs: int, outputs: int, options: dict[str, Any]) -> None:
        fixed = {"bias": False, "input_is_parallel": True, "skip_bias_add": False}
        super().__init__(inputs, outputs, **fixed, **options)

    def forward(self, a: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(a)[0]


class Attention(nn.Module):
    """a [seq/x, rows, hidden] -> the same"""

    def __init__(self, config: ModelConfig, options: dict[str, Any]) -> None:
        super().__init__()
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.grouped = config.heads != config.kv_heads
        self.qkv = Column(config.hidden, {"q": width, "k": kv_width, "v": kv_width}, options)
        self.out = Row(width, config.hidden, options)

    def forward(self, a: Tensor, rope: Rope) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).permute(1, 2, 0, 3) for part in self.qkv(a))
        q, k = rotate(q, *rope), rotate(k, *rope)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(mixed.permute(2, 0, 1, 3).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, options: dict[str, Any]) -> None:
        super().__init__()
        self.gate_up = Column(config.hidden, {"gate": config.mlp_hidden, "up": config.mlp_hidden}, options)
        self.down = Row(config.mlp_hidden, config.hidden, options)

    def forward(self, a: Tensor) -> Tensor:
        gate, up = self.gate_up(a)
        return self.down(functional.silu(gate) * up)


class MegatronLlama(Llama):
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
            block.attention, block.mlp = Attention(config, options), MLP(config, options)
        self.head = Column(config.hidden, {"head": config.vocab}, options)

    def forward(self, tokens: Tensor) -> Tensor:
        (logits,) = super().forward(tokens)
        return logits

    @cached_property
    def replicated(self) -> list[nn.Parameter]:
        """Norms, whose gradients are those of this rank's part of the sequence."""
        return [parameter for name, parameter in self.named_parameters() if name.endswith("norm.weight")]


def start(model: MegatronLlama, ranks: int, place: int, seed: int = 0) -> None:
    """Fourfold's first weights of that seed."""
    for path, module in model.named_modules():
        if isinstance(module, Column):
            parent, _, last = path.rpartition(".")
            rows = [count // ranks for count in module.outputs.values()]
            shards = module.weight.detach().split(rows)
            for shard, (name, outputs) in zip(shards, module.outputs.items(), strict=True):
                whole = (outputs, module.input_size)
                _fill(model, shard, f"{parent}.{name}" if parent else last, whole, 0, ranks, place, seed)
        elif isinstance(module, Row):
            _fill(model, module.weight, path, (module.output_size, module.input_size), 1, ranks, place, seed)
        elif isinstance(module, VocabParallelEmbedding):
            _fill(model, module.weight, path, (module.num_embeddings, module.embedding_dim), 0, ranks, place, seed)
        elif isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)


def _fill(
    model: Llama, shard: Tensor, path: str, shape: tuple[int, int], dim: int, ranks: int, place: int, seed: int
) -> None:
    name = f"{path}.weight"
    box = [chunk(length, ranks, place) if d == dim else range(length) for d, length in enumerate(shape)]
    fill_(shard.detach(), box, shape, initial_of(model.config, name), seed, name)


class Megatron(Trainer):
    def __init__(self, size: Size, mesh: DeviceMesh) -> None:
        self.group = mesh.get_group("tp")
        if size.config.seq % self.group.size():
            raise ValueError(f"seq={size.config.seq} cannot be cut over {self.group.size()} tensor-parallel ranks")
        tokens, targets = rows_of(size, mesh["replicate"], torch.device("cpu"))
        self.tokens, self.targets = tokens, targets.T.contiguous()
        self.buffer = GlobalMemoryBuffer()
        with _on_cpu(self.group, self.buffer):
            self.module = MegatronLlama(size.config, self.group, size.dtype)
        start(self.module, self.group.size(), mesh.get_local_rank("tp"))
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

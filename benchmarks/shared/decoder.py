"""GPT and Llama in plain torch with one linear layer per projection, as torchtitan writes them: the peers' model.

Attributes have the same names as in Fourfold's models, so that weights can be copied by name. A decoder can be cut into
pipeline stages: its pieces are the embedding, the two sublayers of each block, and the final norm with the head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold.layout import Init
from fourfold.models import ModelConfig

Rope = tuple[Tensor, Tensor]


class RopeCache:
    """The rotary tables of a model, computed once for each length and dtype, as training code keeps them."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._tables: dict[tuple[int, torch.device, torch.dtype], Rope] = {}

    def tables(self, seq: int, device: torch.device, dtype: torch.dtype) -> Rope | None:
        """Return cos and sin of the angles, each [seq, head_dim], or None for learned positions."""
        if self.config.positions != "rope":
            return None
        key = seq, device, dtype
        if key not in self._tables:
            size = self.config.head_dim
            frequencies = self.config.rope_theta ** -(torch.arange(0, size, 2, device=device) / size)
            angles = torch.outer(torch.arange(seq, device=device), frequencies).repeat(1, 2)
            self._tables[key] = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._tables[key]


def apply_rope(a: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = a.chunk(2, dim=-1)
    return a * cos + torch.cat([-second, first], dim=-1) * sin


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)


class DecoderAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.grouped = config.heads != config.kv_heads
        self.q = nn.Linear(config.hidden, width, bias=config.bias)
        self.k = nn.Linear(config.hidden, kv_width, bias=config.bias)
        self.v = nn.Linear(config.hidden, kv_width, bias=config.bias)
        self.out = nn.Linear(width, config.hidden, bias=config.bias)

    def forward(self, a: Tensor, rope: Rope | None) -> Tensor:
        # under TP these are this rank's heads, over whole sequences
        q, k, v = (part(a).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))


class DecoderMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=config.bias) if config.mlp == "swiglu" else None
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=config.bias)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=config.bias)

    def forward(self, a: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(functional.gelu(self.up(a), approximate="tanh"))
        return self.down(functional.silu(self.gate(a)) * self.up(a))


class DecoderBlock(nn.Module):
    """Both sublayers, or one of them where a pipeline cuts the block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm: nn.Module | None = make_norm(config)
        self.attention: nn.Module | None = DecoderAttention(config)
        self.mlp_norm: nn.Module | None = make_norm(config)
        self.mlp: nn.Module | None = DecoderMLP(config)

    def forward(self, a: Tensor, rope: Rope | None) -> Tensor:
        if self.attention is not None and self.attention_norm is not None:
            a = a + self.attention(self.attention_norm(a), rope)
        if self.mlp is not None and self.mlp_norm is not None:
            a = a + self.mlp(self.mlp_norm(a))
        return a


class Decoder(nn.Module):
    """tokens [rows, seq] -> logits [rows, seq, vocab]; a pipeline stage takes or returns [rows, seq, hidden]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.qk_norm or config.dropout:
            raise ValueError(f"the peers' model has neither qk_norm nor dropout, but the config is {config}")
        self.config = config
        self.rope = RopeCache(config)
        self.embedding: nn.Embedding | None = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden) if config.positions == "learned" else None
        self.layers: nn.ModuleList | nn.ModuleDict = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm: nn.Module | None = make_norm(config)
        self.head: nn.Module | None = nn.Linear(config.hidden, config.vocab, bias=False)
        self.tie()

    def tie(self) -> None:
        """Let the head use the embedding's weight, if the config says so. TP gives each of them a parameter."""
        if self.config.tied and self.head is not None and self.embedding is not None:
            self.head.weight = self.embedding.weight

    @property
    def blocks(self) -> list[DecoderBlock]:
        return list(self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers)  # type: ignore[arg-type]

    def forward(self, a: Tensor) -> Tensor:
        if self.embedding is not None:
            seq = a.shape[1]
            a = self.embedding(a)
            if self.positions is not None:
                a = a + self.positions(torch.arange(seq, device=a.device))
        rope = self.rope.tables(self.config.seq, a.device, a.dtype)
        for block in self.blocks:
            a = block(a, rope)
        return a if self.head is None or self.norm is None else self.head(self.norm(a))

    # --- pipeline stages

    def keep(self, pieces: range) -> None:
        """Drop all pieces but these: 0 is the embedding, 1 and 2 the first block's sublayers, the last is the head."""
        if 0 not in pieces:
            self.embedding = self.positions = None
        kept = {}
        for index, block in enumerate(self.blocks):
            if 2 * index + 1 not in pieces:
                block.attention_norm = block.attention = None
            if 2 * index + 2 not in pieces:
                block.mlp_norm = block.mlp = None
            if block.attention is not None or block.mlp is not None:
                kept[str(index)] = block  # a dict keeps the names of the parameters
        self.layers = nn.ModuleDict(kept)
        if 2 * self.config.layers + 1 not in pieces:
            self.norm = self.head = None


def piece_costs(config: ModelConfig) -> list[float]:
    """Return the work of each piece in products of one token: matmul parameters, and scores of causal attention."""
    width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = 2 * config.hidden * (width + kv_width) + width * config.seq
    mlp = config.hidden * config.mlp_hidden * (3 if config.mlp == "swiglu" else 2)
    return [0.0, *[attention, mlp] * config.layers, config.hidden * config.vocab]


def cut_evenly(costs: Sequence[float], parts: int) -> list[range]:
    """Cut the pieces into consecutive non-empty ranges so that the largest sum of costs is as small as possible."""
    if parts > len(costs):
        raise ValueError(f"{len(costs)} pieces cannot be cut into {parts} stages")
    # best[k][n]: the smallest possible largest sum of the first n pieces in k ranges, and where the last range begins
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(parts):
        row: dict[int, tuple[float, int]] = {}
        for end in range(1, len(costs) + 1):
            found = [
                (max(before, sums[end] - sums[begin]), begin) for begin, (before, _) in best[-1].items() if begin < end
            ]
            if found:
                row[end] = min(found)
        best.append(row)
    ranges, end = [], len(costs)
    for row in reversed(best[1:]):
        begin = row[end][1]
        ranges.append(range(begin, end))
        end = begin
    return ranges[::-1]


def init_of(config: ModelConfig, name: str) -> Init:
    """Return the initial distribution that Fourfold's models use for this parameter."""
    if name.endswith("norm.weight"):
        return Init(mean=1.0)
    if name.endswith("bias"):
        return Init()
    deep = name.endswith(("attention.out.weight", "mlp.down.weight"))
    return Init(std=0.02 / (2 * config.layers) ** 0.5 if deep else 0.02)


def weight_name(config: ModelConfig, name: str) -> str:
    """Return the name under which Fourfold draws this parameter: a tied head on a stage of its own is the embedding."""
    return "embedding.weight" if config.tied and name == "head.weight" else name

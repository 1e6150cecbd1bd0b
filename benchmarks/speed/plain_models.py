"""GPT and Llama in plain torch, as a careful user would write them: the peer of one Fourfold process.

q, k, v are one fused projection, and so are gate and up. Attention is SDPA; norms, embedding and cross-entropy are
torch's own. Precision comes from autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.shared.decoder import Rope, RopeCache, apply_rope, make_norm
from fourfold.models import ModelConfig


class PlainAttention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.widths = [config.heads * config.head_dim, *[config.kv_heads * config.head_dim] * 2]
        self.qkv = nn.Linear(config.hidden, sum(self.widths), bias=config.bias)
        self.out = nn.Linear(self.widths[0], config.hidden, bias=config.bias)

    def forward(self, a: Tensor, rope: Rope | None) -> Tensor:
        rows, seq, _ = a.shape
        q, k, v = (
            part.view(rows, seq, -1, self.config.head_dim).transpose(1, 2)
            for part in self.qkv(a).split(self.widths, dim=2)
        )
        if rope is not None:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        grouped = self.config.heads != self.config.kv_heads
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).reshape(rows, seq, -1))


class PlainMLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        self.up = nn.Linear(config.hidden, config.mlp_hidden * (2 if self.gated else 1), bias=config.bias)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=config.bias)

    def forward(self, a: Tensor) -> Tensor:
        if self.gated:
            gate, up = self.up(a).chunk(2, dim=-1)
            return self.down(functional.silu(gate) * up)
        return self.down(functional.gelu(self.up(a), approximate="tanh"))


class PlainBlock(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = make_norm(config), make_norm(config)
        self.attention, self.mlp = PlainAttention(config), PlainMLP(config)

    def forward(self, a: Tensor, rope: Rope | None) -> Tensor:
        a = a + self.attention(self.attention_norm(a), rope)
        return a + self.mlp(self.mlp_norm(a))


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = RopeCache(config)
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden) if config.positions == "learned" else None
        self.layers = nn.ModuleList(PlainBlock(config) for _ in range(config.layers))
        self.norm = make_norm(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        a = self.embedding(tokens)
        if self.positions is not None:
            a = a + self.positions.weight[: tokens.shape[1]]
        dtype = torch.get_autocast_dtype(a.device.type) if torch.is_autocast_enabled(a.device.type) else a.dtype
        rope = self.rope.tables(tokens.shape[1], a.device, dtype)
        for layer in self.layers:
            a = layer(a, rope)
        return functional.cross_entropy(self.head(self.norm(a)).flatten(0, 1), targets.flatten())

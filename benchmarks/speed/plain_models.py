"""GPT and Llama in plain torch, as a careful user would write them: the peer of one Fourfold process.

q, k, v are one fused projection, and so are gate and up. Attention is SDPA; norms, embedding and cross-entropy are
torch's own. Precision comes from autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.shared.decoder import Rope, RopeCache, apply_rope, init_of, make_norm
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
        if config.tied:
            self.head.weight = self.embedding.weight

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=init_of(self.config, name).std, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    @torch.no_grad()
    def copy_to(self, weights: dict[str, Tensor]) -> None:
        """Copy the weights to Fourfold's parameters of these names, where projections are not fused."""
        own = dict(self.named_parameters())
        joined = {"attention.qkv": ("attention.q", "attention.k", "attention.v"), "mlp.up": ("mlp.gate", "mlp.up")}
        for name, parameter in own.items():
            path, _, last = name.rpartition(".")
            layer, _, projection = path.partition(".")[2].partition(".")
            parts = joined.get(projection, ())
            if not parts or (projection == "mlp.up" and self.config.mlp != "swiglu"):
                weights.pop(name).copy_(parameter)
                continue
            targets = [weights.pop(f"layers.{layer}.{part}.{last}") for part in parts]
            for target, source in zip(targets, parameter.split([len(target) for target in targets]), strict=True):
                target.copy_(source)
        if weights:
            raise ValueError(f"plain torch has no weights for {', '.join(weights)}")

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        a = self.embedding(tokens)
        if self.positions is not None:
            a = a + self.positions.weight[: tokens.shape[1]]
        dtype = torch.get_autocast_dtype(a.device.type) if torch.is_autocast_enabled(a.device.type) else a.dtype
        rope = self.rope.tables(tokens.shape[1], a.device, dtype)
        for layer in self.layers:
            a = layer(a, rope)
        return functional.cross_entropy(self.head(self.norm(a)).flatten(0, 1), targets.flatten())

"""The reference model in plain torch, written from its definition: what one process computes.

Shares nothing with the package but the config, the parameter names and the initial values.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold.layout import Init
from fourfold.models import ModelConfig
from fourfold.nn.rng import fill_


class RMSNorm(nn.Module):
    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, a: Tensor) -> Tensor:
        return a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.hidden, config.norm_eps)
    return nn.LayerNorm(config.hidden, eps=config.norm_eps, bias=config.bias)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q = nn.Linear(config.hidden, width, bias=config.bias)
        self.k = nn.Linear(config.hidden, kv_width, bias=config.bias)
        self.v = nn.Linear(config.hidden, kv_width, bias=config.bias)
        self.out = nn.Linear(width, config.hidden, bias=config.bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, a: Tensor) -> Tensor:
        rows, seq, _ = a.shape
        q, k, v = (layer(a).view(rows, seq, -1, self.config.head_dim) for layer in (self.q, self.k, self.v))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.config.positions == "rope":
            q, k = self._rotate(q), self._rotate(k)
        group = self.config.heads // self.config.kv_heads
        q, k, v = (
            q.transpose(1, 2),
            k.repeat_interleave(group, 2).transpose(1, 2),
            v.repeat_interleave(group, 2).transpose(1, 2),
        )
        scores = q @ k.transpose(2, 3) / self.config.head_dim**0.5
        scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, seq, -1))

    def _rotate(self, a: Tensor) -> Tensor:
        """Each pair (i, i + d/2) of a head as a complex number, turned by position * theta^(-2i/d)."""
        half = a.shape[-1] // 2
        turn = self.config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(a.shape[1], dtype=torch.float64)[:, None] * turn
        turned = torch.complex(a[..., :half], a[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        if self.gated:
            self.gate = nn.Linear(config.hidden, config.mlp_hidden, bias=config.bias)
        self.up = nn.Linear(config.hidden, config.mlp_hidden, bias=config.bias)
        self.down = nn.Linear(config.mlp_hidden, config.hidden, bias=config.bias)

    def forward(self, a: Tensor) -> Tensor:
        if self.gated:
            return self.down(functional.silu(self.gate(a)) * self.up(a))
        return self.down(functional.gelu(self.up(a), approximate="tanh"))


class MoE(nn.Module):
    """Every token through its experts, one after another."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.experts, config.expert_hidden, config.hidden
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(sizes)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.expert_hidden))
        if config.shared_hidden:
            self.shared = MLP(replace(config, mlp_hidden=config.shared_hidden))
        self.bias = [0.0] * config.experts
        self.chosen = [0] * config.experts
        """How often each expert was chosen since the biases moved."""
        self.dropped = 0
        self.routed: list[tuple[Tensor, list[list[int]]]] = []
        """The logits of every sequence, and the experts of its tokens."""

    def forward(self, a: Tensor, before: Tensor) -> Tensor:
        """The experts read `before`, the MLP beside them `a`: [rows, seq, hidden] each, a sequence in every row."""
        out = torch.stack([self.of_sequence(row) for row in before])
        return out + self.shared(a) if self.config.shared_hidden else out

    def of_sequence(self, tokens: Tensor) -> Tensor:
        config = self.config
        logits = self.router(tokens)
        scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
        most = len(tokens) * config.top_k
        if config.capacity:
            most = math.ceil(config.capacity * len(tokens) * config.top_k / config.experts)
        taken = [0] * config.experts
        chosen = [self.best(score.tolist()) for score in scores]
        self.routed.append((logits, chosen))
        rows = []
        for token, score, best in zip(tokens, scores, chosen, strict=True):
            total = sum(score[expert] for expert in best) if config.normalize_top_k else 1.0
            out = torch.zeros_like(token)
            for e in best:
                self.chosen[e] += 1
                if taken[e] == most:
                    self.dropped += 1
                    continue
                taken[e] += 1
                hidden = functional.silu(self.gate[e] @ token) * (self.up[e] @ token)
                out = out + self.down[e] @ (hidden * score[e] / total * config.route_scale)
            rows.append(out)
        return torch.stack(rows)

    def best(self, scores: list[float]) -> list[int]:
        """The experts of a token: the best of the best groups."""
        config = self.config
        ranked = [score + bias for score, bias in zip(scores, self.bias, strict=True)]
        each = config.experts // config.groups
        groups = [range(first, first + each) for first in range(0, config.experts, each)]
        if config.groups > 1:
            groups.sort(key=lambda group: -sum(sorted(ranked[expert] for expert in group)[-2:]))
        allowed = sorted(expert for group in groups[: config.top_groups] for expert in group)
        return sorted(allowed, key=lambda expert: -ranked[expert])[: config.top_k]

    def move_biases(self) -> None:
        """Move the biases towards equal use, in the fp32 in which the package keeps them."""
        mean = Fraction(sum(self.chosen), len(self.chosen))
        step = torch.tensor(self.config.bias_rate)
        for expert, count in enumerate(self.chosen):
            held = torch.tensor(self.bias[expert])
            self.bias[expert] = (held + step * ((count < mean) - (count > mean))).item()
        self.chosen = [0] * len(self.chosen)


def router_losses(model: Transformer, tokens: int) -> Tensor:
    """The losses of the routers (E20) in what the model has computed, which were so many tokens."""
    config, total = model.config, torch.zeros((), dtype=torch.float64)
    for mixture in model.mixtures:
        for logits, chosen in mixture.routed:
            scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
            shares = scores / scores.sum(-1, keepdim=True)
            used = functional.one_hot(torch.tensor(chosen), config.experts).double().sum((0, 1)) / len(logits)
            balance = config.experts / config.top_k * (used * shares.mean(0)).sum()
            each = config.aux * balance + config.z_loss * logits.logsumexp(-1).square().mean()
            total = total + len(logits) / tokens * each
    return total


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = MoE(config) if config.is_mixture(layer) else MLP(config)
        self.reads_previous = config.moe_reads == "previous"

    def forward(self, a: Tensor) -> Tensor:
        b = a + self.attention(self.attention_norm(a))
        if isinstance(self.mlp, MoE):
            return b + self.mlp(self.mlp_norm(b), self.mlp_norm(a if self.reads_previous else b))
        return b + self.mlp(self.mlp_norm(b))


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.seq, config.hidden)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = _norm(config)
        if not config.tied:
            self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    @property
    def mixtures(self) -> list[MoE]:
        return [block.mlp for block in self.layers if isinstance(block.mlp, MoE)]

    def hidden(self, tokens: Tensor) -> Tensor:
        a = self.embedding(tokens)
        return a + self.positions.weight[: tokens.shape[1]] if self.config.positions == "learned" else a

    def logits(self, a: Tensor) -> Tensor:
        for layer in self.layers:
            a = layer(a)
        table = self.embedding.weight if self.config.tied else self.head.weight
        return functional.linear(self.norm(a), table)


def make(config: ModelConfig, seed: int, dtype: torch.dtype = torch.float64) -> Transformer:
    """The model with the initial values that the package gives it."""
    model = Transformer(config).to(dtype)
    for name, parameter in model.named_parameters():
        whole = [range(length) for length in parameter.shape]
        fill_(parameter.data, whole, parameter.shape, initial(config, name), seed, name)
    return model


def initial(config: ModelConfig, name: str) -> Init:
    if name.endswith("norm.weight"):
        return Init(mean=1.0)
    if name.endswith("bias"):
        return Init()
    deep = name.endswith(("attention.out.weight", "down.weight", "mlp.down"))
    return Init(std=0.02 / (2 * config.layers) ** 0.5 if deep else 0.02)

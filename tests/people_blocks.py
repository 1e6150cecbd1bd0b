"""Blocks as people write them: `BLOCKS` by name, each a module from [rows, seq, width] to the same shape.

A block is written as it would be for one process; none of them knows of a grid, but for those that call
`ff.whole_batch` because the package asks for it. `Kind.sort` says what a block needs of the grid.
"""

# ruff: noqa: ARG002, ARG005  # every block is built from width and sequence length, and few need both

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from fourfold.wrap.grid_tensor import to_whole

Sort = Literal["rows", "batch norm", "companions", "whole batch"]


@dataclass(frozen=True)
class Kind:
    make: Callable[[int, int], nn.Module]
    """From width and sequence length."""
    sort: Sort = "rows"
    """What a row's result depends on: on that row alone; on the whole batch, by torch's own BatchNorm; on the other
    rows, by code of the block's own; the same through `ff.whole_batch`."""
    multiple: int = 1
    """What the width must be a multiple of."""
    by_chance: bool = False
    """It draws random numbers that no check can draw again for the same rows."""


BLOCKS: dict[str, Kind] = {}


def block(
    name: str, sort: Sort = "rows", multiple: int = 1, by_chance: bool = False, **options: Any
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a class whose constructor takes width and sequence length."""

    def register(kind: type) -> type:
        BLOCKS[name] = Kind(lambda width, seq: kind(width, seq, **options), sort, multiple, by_chance)
        return kind

    return register


class Two(nn.Module):
    """Two square linear layers, for blocks that differ in `forward` alone."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.width = width
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)


# multilayer perceptrons


@block("mlp")
class MLP(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(functional.gelu(self.fc1(self.norm(x))))


@block("mlp of odd width")
class OddMLP(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 7), nn.ReLU(inplace=True), nn.Linear(7, 13), nn.Tanh())
        self.out = nn.Linear(13, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.net(x)) + x


@block("swiglu")
class SwiGLU(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(width, 10, bias=False), nn.Linear(width, 10, bias=False)
        self.w2 = nn.Linear(10, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(functional.silu(self.w1(x)) * self.w3(x))


@block("glu")
class GLU(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 2 * width)
        self.act = nn.PReLU(width)

    def forward(self, x: Tensor) -> Tensor:
        gated = functional.glu(self.proj(x), dim=-1)
        return self.act(gated.transpose(1, 2)).transpose(1, 2) + x


@block("gates in one weight")
class FusedGates(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(width, 16), nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return x + self.down_proj(torch.sigmoid(gate) * up)


@block("mixer")
class Mixer(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.channels, self.norm = nn.Linear(seq, seq), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm(x)).relu()


@block("flattened")
class Flattened(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(seq * width, 6), nn.Linear(6, seq * width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(torch.tanh(self.down(x.flatten(1)))).view_as(x)


@block("tokens in one dim")
class OneDim(Two):
    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        flat = self.a(x).view(rows * seq, width)
        return self.b(flat.relu()).reshape(rows, seq, -1)


@block("many operations")
class Many(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.where(h > 0, h, 0.1 * h.expm1())
        h = torch.add(h, x, alpha=0.5).clamp(-2, 2)
        h = torch.cat([h[..., :2], h[..., 2:].neg()], dim=-1)
        h = torch.stack(h.unbind(1), dim=1)
        return self.b(h).addcmul(x, h, value=0.3) + functional.softplus(h) - h.norm(dim=-1, keepdim=True)


# attention


def split(x: Tensor, heads: int) -> Tensor:
    rows, seq, width = x.shape
    return x.view(rows, seq, heads, width // heads).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@block("attention in one weight", multiple=2)
class FusedAttention(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(width, 3 * width), nn.Linear(width, width), 2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(x.shape[2], dim=2)
        q, k, v = (split(part, self.n_head) for part in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.c_proj(y.transpose(1, 2).contiguous().view(*x.shape))


@block("attention by einsum, three heads", multiple=3)
class EinsumAttention(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.register_buffer("mask", torch.tril(torch.ones(seq, seq)).bool())

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        q, k, v = (part(x).reshape(rows, seq, 3, width // 3) for part in (self.q, self.k, self.v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // 3)
        scores = scores.masked_fill(~self.mask[:seq, :seq], float("-inf"))
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return x + self.o(mixed.reshape(rows, seq, width))


@block("attention by bmm", multiple=2)
class BmmAttention(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, width = x.shape
        qkv = self.to_qkv(x).reshape(rows, seq, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        q, k, v = (part.reshape(rows * 2, seq, width // 2) for part in qkv)
        weights = torch.softmax(torch.bmm(q, k.transpose(1, 2)) * (width // 2) ** -0.5, dim=-1)
        return x + self.to_out(torch.bmm(weights, v).view(rows, 2, seq, -1).transpose(1, 2).reshape(x.shape))


@block("multi-query attention", multiple=3)
class MultiQuery(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(width, width)
        self.k_proj, self.v_proj = nn.Linear(width, width // 3), nn.Linear(width, width // 3)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q_proj(x), 3)
        k, v = self.k_proj(x).unsqueeze(1), self.v_proj(x).unsqueeze(1)
        bias = torch.full((x.shape[1], x.shape[1]), -1e9, dtype=x.dtype, device=x.device).triu(1)
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]) + bias, -1)
        return x + self.o_proj(joined(weights @ v))


@block("grouped-query attention", multiple=4)
class GroupedQuery(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, width // 4
        self.wq, self.wo = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.wk, self.wv = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        q = self.wq(x).view(rows, seq, 4, -1).transpose(1, 2)
        k, v = (w(x).view(rows, seq, 2, -1).transpose(1, 2) for w in (self.wk, self.wv))
        k, v = (part[:, :, None].expand(-1, -1, 2, -1, -1).reshape(rows, 4, seq, -1) for part in (k, v))
        return x + self.wo(joined(functional.scaled_dot_product_attention(q, k, v)))


class Rotary(nn.Module):
    """Attention with rotary positions, in three styles that people write them in."""

    def __init__(self, width: int, seq: int, style: str) -> None:
        super().__init__()
        self.style = style
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        angles = torch.arange(seq, dtype=torch.float64)[:, None] * 0.5 ** torch.arange(width // 4)
        self.register_buffer("angles", angles)

    def turn(self, a: Tensor) -> Tensor:
        angles = self.angles[: a.shape[2]]
        if self.style == "halves":
            one, two = a.chunk(2, dim=-1)
            cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
            return a * cos + torch.cat((-two, one), dim=-1) * sin
        if self.style == "complex":
            pairs = torch.view_as_complex(a.reshape(*a.shape[:-1], -1, 2).contiguous())
            return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(3)
        one, two = a[..., 0::2], a[..., 1::2]
        turned = torch.stack((one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()), -1)
        return turned.flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x), 2), split(self.k(x), 2), split(self.v(x), 2)
        q, k = self.turn(q), self.turn(k)
        return x + self.out(joined((q @ k.transpose(-2, -1)).softmax(dim=-1) @ v))


for _style in ("halves", "complex", "pairs"):
    block(f"rotary positions by {_style}", multiple=4, style=_style)(Rotary)


@block("alibi", multiple=2)
class Alibi(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        distance = torch.arange(seq)[None] - torch.arange(seq)[:, None]
        self.register_buffer("slopes", torch.tensor([0.5, 0.25]), persistent=False)
        self.register_buffer("distance", distance.clamp(max=0).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(part, 2) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.mT + self.slopes[:, None, None] * self.distance
        return x + self.proj(joined(scores.softmax(-1) @ v))


@block("relative positions", multiple=2)
class Relative(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.table = nn.Parameter(torch.randn(2 * seq - 1, 2) * 0.1)
        self.register_buffer("index", torch.arange(seq)[:, None] - torch.arange(seq)[None] + seq - 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.query(x), 2), split(self.key(x), 2), split(self.value(x), 2)
        bias = self.table[self.index.view(-1)].view(*self.index.shape, 2).permute(2, 0, 1)
        return x + self.dense(joined((q @ k.mT + bias).softmax(-1) @ v))


@block("linear attention")
class LinearAttention(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k = functional.elu(self.q(x)) + 1, functional.elu(self.k(x)) + 1
        state = torch.cumsum(k[..., :, None] * self.v(x)[..., None, :], dim=1)
        total = torch.einsum("bsd,bsd->bs", q, k.cumsum(1)).unsqueeze(-1)
        return x + self.o(torch.einsum("bsd,bsde->bse", q, state) / total)


@block("nn.MultiheadAttention", multiple=2)
class Multihead(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.attend(x, x, x)
        return x + out + weights.diagonal(dim1=1, dim2=2).unsqueeze(-1)


@block("sequence first", multiple=2)
class SequenceFirst(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.attend, self.lift = nn.MultiheadAttention(width, 2), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x).transpose(0, 1)
        mask = torch.triu(torch.ones(len(x), len(x), dtype=torch.bool), 1)
        return (x + self.attend(x, x, x, attn_mask=mask, need_weights=False)[0]).transpose(0, 1)


@block("nn.TransformerEncoderLayer", multiple=2)
class Encoder(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 2, 10, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


# over the sequence


@block("depthwise convolution")
class Depthwise(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.depth = nn.Conv1d(width, width, 3, padding=1, groups=width)
        self.point = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.point(functional.silu(self.depth(self.inner(x).transpose(1, 2)))).transpose(1, 2)


@block("causal convolution")
class CausalConvolution(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, 5, 3)
        self.out = nn.Linear(5, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.conv(functional.pad(x.mT, (2, 0)))).mT)


@block("convolution of images")
class Convolution2d(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(self.one(x.unsqueeze(1)).relu()).squeeze(1)


class Recurrent(nn.Module):
    def __init__(self, width: int, seq: int, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.out = kind(width, 5, batch_first=True, bidirectional=True), nn.Linear(10, width)

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.rnn(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.out(out) + last.sum((0, 2))[:, None, None]


for _kind in (nn.RNN, nn.LSTM, nn.GRU):
    block(_kind.__name__.lower(), kind=_kind)(Recurrent)


@block("cell by cell")
class Cells(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.inside, self.cell, self.out = nn.Linear(width, 7), nn.GRUCell(7, 6), nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(x.shape[0], 6), []
        for token in self.inside(x).unbind(dim=1):
            state = self.cell(token, state)
            states.append(state)
        return x + self.out(torch.stack(states, 1))


@block("state space")
class StateSpace(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.log_decay, self.skip = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.ones(width))
        self.in_proj, self.out_proj = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        decay, state, out = torch.exp(-torch.exp(self.log_decay)), 0.0, []
        for t in range(x.shape[1]):
            state = decay * state + u[:, t]
            out.append(state)
        return x + self.out_proj((torch.stack(out, dim=1) + u * self.skip) * functional.silu(z))


@block("sums along the sequence")
class Cumulative(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        count = torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        return self.b(h.cumsum(dim=1) / count + h.cummax(dim=1).values) + h.flip(1).cumsum(1).flip(1)


@block("pooled and spread")
class Pooled(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        pooled = torch.cat([h.mean(dim=1), h.max(dim=1)[0] + h.amin(1)], dim=-1)
        return x + self.b(pooled[:, : self.width] * pooled[:, self.width :]).unsqueeze(1).expand_as(x)


@block("padded, rolled, flipped")
class Moved(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = functional.pad(h, (0, 0, 1, 0))[:, :-1] + torch.roll(h, 1, dims=-1) + torch.flip(h, dims=(1,))
        return self.b(h).repeat(1, 2, 1)[:, : x.shape[1]] + x.roll((1, 2), dims=(1, 2))


@block("windows")
class Windows(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = functional.pad(self.a(x), (0, 0, 1, 1), value=0.5).unfold(1, 3, 1)
        smooth = functional.avg_pool1d(self.b(x).mT, 3, stride=1, padding=1).mT
        return h.amax(-1) + smooth + functional.interpolate(x.mT, scale_factor=2)[..., : x.shape[1]].mT


@block("sorted")
class Sorted(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        ordered, order = h.sort(dim=-1, descending=True)
        best = h.topk(2, dim=1 if x.shape[1] > 1 else 2).indices
        picked = torch.gather(self.b(x), 2, order.roll(1, -1))
        chosen = functional.one_hot(h.argmax(-1), self.width).to(x.dtype) * h
        return ordered + picked + chosen + best.sum((1, 2), keepdim=True).type_as(x) * 0.01


@block("spectrum")
class Spectrum(Two):
    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(torch.fft.fft(self.a(x), dim=-1), dim=-2).real
        return self.b(mixed / self.width) + x


@block("complex filter")
class Filter(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(seq // 2 + 1, width, 2) * 0.5)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.fft.rfft(self.out(x), dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        return x + torch.fft.irfft(h, n=x.shape[1], dim=1, norm="ortho")


@block("complex numbers", multiple=2)
class ComplexNumbers(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        z = torch.complex(h[..., 0::2], h[..., 1::2])
        z = z * torch.exp(1j * z.abs()) + z.conj()
        return self.b(torch.cat([z.real, z.imag], -1)) + torch.view_as_real(z).flatten(2)


# norms and gains


@block("norm by hand")
class NormByHand(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return x + self.out(self.gain * (x - mean) / (std + 1e-3) + self.bias)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


@block("blocks with rms norms")
class Normed(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(dict(norm=RMSNorm(width), up=nn.Linear(width, 10), down=nn.Linear(10, width)))
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](layer["norm"](x)).relu().square())
        return x


@block("group norm")
class Grouped(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(width, width), nn.GroupNorm(1, width)
        self.both = nn.LayerNorm((seq, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.both(x + self.norm(self.a(x).transpose(1, 2)).transpose(1, 2))


@block("weight norm")
class WeightNorm(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(width, 8))
        self.b = parametrizations.orthogonal(nn.Linear(8, 8))
        self.c = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(torch.relu(self.b(self.a(x))))


@block("standardised weight")
class Standardised(Two):
    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight
        w = (w - w.mean(dim=1, keepdim=True)) / (w.std(dim=1, keepdim=True) + 1e-3)
        return functional.linear(x, w, self.a.bias) + self.b(x)


@block("masked weight")
class Pruned(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.register_buffer("mask", (torch.arange(width * width).view(width, width) % 3 > 0).double())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.a.weight * self.mask), self.b.weight.tril(), self.b.bias)


@block("squeeze and excite")
class SqueezeExcite(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.gate = nn.Sequential(nn.Linear(width, 3), nn.ReLU(), nn.Linear(3, width), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return x + h * self.gate(h.mean(1))[:, None, :]


@block("film")
class FiLM(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.film, self.body = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gamma, beta = self.film(x[:, 0]).chunk(2, dim=-1)
        return torch.relu((1 + gamma.unsqueeze(1)) * self.body(x) + beta.unsqueeze(1)) + x


@block("numbers without dims")
class Scalars(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.scale, self.log_t = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.tensor(0.1))
        self.layer_scale = nn.Parameter(0.5 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = (self.a(x) / self.log_t.exp()).softmax(-1) * self.scale
        return x + self.layer_scale * self.b(h)


# weights made by code


@block("hypernetwork")
class Hyper(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.make = nn.Linear(width, width * 4)
        self.back = nn.Parameter(torch.randn(4, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        w = self.make(x.mean(dim=1)).view(x.shape[0], x.shape[2], 4)
        return x + torch.tanh(torch.bmm(x, w)) @ self.back


@block("bilinear")
class Bilinear(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.a, self.pair = nn.Linear(width, 3), nn.Bilinear(width, 3, width)
        self.core = nn.Parameter(torch.randn(width, 3, width) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        small = self.a(x)
        return x + self.pair(x, small) + torch.einsum("bsi,ijk,bsj->bsk", x, self.core, small)


@block("prototypes")
class Prototypes(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.a, self.centres = nn.Linear(width, width), nn.Parameter(torch.randn(5, width))

    def forward(self, x: Tensor) -> Tensor:
        distance = torch.cdist(self.a(x), self.centres[None].expand(x.shape[0], -1, -1))
        return x + (-distance).softmax(-1) @ self.centres


@block("low rank")
class LowRank(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Parameter(torch.randn(width, 2)), nn.Parameter(torch.randn(2, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (x @ self.lora_a @ self.lora_b)


@block("lists of parameters")
class Lists(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.ws = nn.ParameterList([torch.randn(width, width) * 0.3 for _ in range(2)])
        self.named = nn.ParameterDict({"gain": torch.randn(width), "shift": torch.randn(1)})
        self.steps = nn.ModuleDict({"in": nn.Linear(width, width), "out": nn.Linear(width, width)})

    def forward(self, x: Tensor) -> Tensor:
        h = self.steps["in"](x)
        for w in self.ws:
            h = torch.tanh(h @ w)
        return self.steps["out"](h * self.named["gain"] + self.named["shift"])


@block("parameter by index")
class Indexed(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, seq + 3, width))
        self.kinds, self.mix = nn.Parameter(torch.randn(4, width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[:, : x.shape[1]]
        return self.mix(x) + self.kinds[torch.arange(x.shape[1]) % 4]


@block("token in front")
class TokenInFront(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.cls = nn.Parameter(torch.randn(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.cls.expand(x.shape[0], -1, -1), self.a(x)], dim=1)
        h = self.b(h * h.mean(1, keepdim=True))
        return h[:, 1:] + h[:, :1]


@block("sinusoids")
class Sinusoids(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        angle = torch.arange(seq)[:, None] / 10 ** (torch.arange(width) / width)
        self.register_buffer("pe", torch.where(torch.arange(width) % 2 == 0, angle.sin(), angle.cos())[None])
        self.drop, self.mix = nn.Dropout(0.0), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.drop(x + self.pe[:, : x.size(1)].requires_grad_(False)))


@block("buckets")
class Buckets(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.a, self.table = nn.Linear(width, width), nn.Embedding(5, width, padding_idx=0)
        self.bag = nn.EmbeddingBag(7, width, mode="mean")

    def forward(self, x: Tensor) -> Tensor:
        ids = (self.a(x)[..., 0] * 3).round().long().clamp(0, 4)
        return x + self.table(ids) + self.bag(ids + 1).unsqueeze(1)


@block("linear algebra")
class Algebra(Two):
    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight @ self.a.weight.T + torch.eye(self.width, dtype=x.dtype)
        h = torch.linalg.solve(w, self.b(x).mT).mT
        return x + h / (1 + torch.linalg.norm(self.a.weight, 2)) + torch.linalg.vector_norm(h, dim=-1, keepdim=True)


@block("products with a bias")
class Addmm(Two):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.width)
        h = torch.addmm(self.a.bias, flat, self.a.weight.t()).view_as(x)
        return torch.baddbmm(x, h @ h.mT / self.width, self.b(x), beta=0.5)


@block("casts")
class Casts(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x.to(self.a.weight.dtype))
        sign = (h > 0).to(x.dtype) - (h < 0).type_as(x)
        return self.b(h.to(torch.complex128).abs().double()) * sign + h.contiguous().clone() * h.ge(0).float()


# shared, replaced, frozen, conditional


@block("one layer twice")
class Again(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.a(x) + self.b(self.a(x))))


@block("tied weights")
class Tied(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


@block("weight turned round")
class Autoencoder(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.encode = nn.Linear(width, 4)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + functional.linear(torch.tanh(self.encode(x)), self.encode.weight.t(), self.bias)


class Scaled(nn.Linear):
    """A linear layer that somebody has extended."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.gain = nn.Parameter(torch.full((outputs,), 0.8))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.gain


@block("extended layers")
class Extended(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = Scaled(width, 6), Scaled(6, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


@block("replaced submodules")
class Replaced(MLP):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.norm = nn.Identity()
        self.fc1 = nn.Sequential(nn.Linear(width, 3), nn.Linear(3, 4 * width))


@block("frozen layer")
class Frozen(MLP):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.fc1.requires_grad_(False)
        self.fc2.bias.requires_grad_(False)


@block("other layers every other time")
class Alternating(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + (self.a if self.calls % 2 else self.b)(x)


@block("branches by shape")
class ByShape(Two):
    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a(x) if x.shape[1] % 2 else self.b(self.a(x)))


@block("early exit")
class EarlyExit(Two):
    """A layer that only some rows need, and that is left out where no row does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        rows = h[:, 0, 0] > 0
        if not rows.any():
            return h
        return torch.where(rows[:, None, None], self.b(h), h)


@block("counts its calls")
class Counts(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return self.b(self.a(x)) / (1 + self.count)


# without gradients


@block("stopped gradient")
class Stopped(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            scale = h.abs().amax(dim=-1, keepdim=True) + 1
        return self.b(h / scale) * h.detach() + x.detach() - torch.sigmoid(h).data


@block("teacher in buffers")
class Teacher(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.register_buffer("slow", self.a.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.slow.mul_(0.9).add_(self.a.weight, alpha=0.1)
        return self.b(self.a(x)) + functional.linear(x, self.slow)


@block("frozen teacher")
class FrozenTeacher(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    @torch.no_grad()
    def taught(self, x: Tensor) -> Tensor:
        return self.teacher(x).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x) * self.taught(x) + self.a(x)


@block("checkpointed")
class Checkpointed(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(super().forward, x, use_reentrant=False)
        return checkpoint(lambda a, scale: torch.tanh(self.fc2(self.fc1(a))) * scale, h, 0.5, use_reentrant=False)


# autograd functions


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = gradient.flatten(0, -2)
        return gradient @ weight, flat.t() @ x.flatten(0, -2), flat.sum(0)


class TwoOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return one * b + two, one * a + two


@block("straight through")
class StraightThrough(Two):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(Round.apply(self.a(x)))


@block("straight through by detach")
class StraightThroughByDetach(Two):
    def forward(self, x: Tensor) -> Tensor:
        soft = self.a(x).softmax(-1)
        hard = torch.zeros_like(soft).scatter(-1, soft.argmax(-1, keepdim=True), 1.0)
        return self.b(hard - soft.detach() + soft) + x


@block("reversed gradient")
class Reversed(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return h + self.b(Reverse.apply(h, 0.3))


@block("linear function of one's own")
class OwnLinear(Two):
    def forward(self, x: Tensor) -> Tensor:
        return x + Product.apply(torch.relu(self.b(x)), self.a.weight, self.a.bias)


@block("linear function of one's own weight")
class OwnWeight(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) * 0.3), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + Product.apply(x, self.weight, self.bias).tanh()


@block("function with two results")
class TwoResults(Two):
    def forward(self, x: Tensor) -> Tensor:
        one, two = TwoOut.apply(self.a(x), self.b(x))
        return one + two.sigmoid()


@block("quantised weight")
class Quantised(Two):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.b(x), Round.apply(self.a.weight), self.a.bias)


# experts


class Experts(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4), nn.GELU(), nn.Linear(4, width)) for _ in range(3)
        )


@block("experts by mask")
class ExpertsByMask(Experts):
    def forward(self, x: Tensor) -> Tensor:
        gates, best = self.router(x).softmax(-1).topk(2, dim=-1)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (gates * (best == number)).sum(-1, keepdim=True)
            out = out + weight * expert(x)
        return x + out


@block("experts by index_add_")
class ExpertsByIndexAdd(Experts):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gates, best = torch.topk(self.router(flat).softmax(-1), 1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (chosen,) = torch.where(best[:, 0] == number)
            out.index_add_(0, chosen, expert(flat[chosen]) * gates[chosen])
        return x + out.view_as(x)


@block("experts that nobody asked are left out")
class ExpertsLeftOut(Experts):
    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        best = self.router(flat).argmax(-1)
        gates = self.router(flat).softmax(-1)
        out = torch.zeros_like(flat)
        for number in best.unique().tolist():
            chosen = best == number
            out[chosen] = self.experts[number](flat[chosen]) * gates[chosen, number, None]
        return x + out.reshape(x.shape)


@block("experts in one parameter")
class ExpertsInOne(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, width, 5) * 0.3),
            nn.Parameter(torch.randn(4, 5, width) * 0.3),
        )

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        kept = torch.full_like(logits, -math.inf).scatter(-1, logits.topk(2).indices, 0.0)
        gates = (logits + kept).softmax(-1)
        h = torch.einsum("bsw,ewh->bseh", x, self.up).relu()
        return x + torch.einsum("bseh,ehw,bse->bsw", h, self.down, gates)


# changes in place


@block("in place: sums")
class InPlaceSums(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h += x
        h *= 0.5
        h -= 1
        h /= 2
        out = self.b(h)
        out.add_(x).mul_(2)
        return out


@block("in place: part of the features")
class InPlaceFeatures(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[..., :2] = 0
        h[:, :, -1] += 1
        return self.b(h)


@block("in place: first token")
class InPlaceToken(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.cls = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[:, 0] = self.cls
        return self.b(h) + x


@block("in place: by mask")
class InPlaceMask(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h[h < -0.5] = -0.5
        h.masked_fill_(h.detach() > 1, 1.0)
        return self.b(h) + x


@block("in place: activations")
class InPlaceActivations(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.a(x), inplace=True)
        h = self.b(h.clone().sigmoid_())
        return functional.leaky_relu(h.clamp_(-1, 1), 0.1, inplace=True)


@block("in place: into zeros")
class InPlaceZeros(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = torch.zeros_like(h)
        out[:, ::2] = h[:, ::2]
        out[..., 1] = self.b(x)[..., 0]
        return out + x


@block("in place: into new zeros")
class InPlaceNewZeros(Two):
    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(x.shape)
        out[:, 0] = self.a(x)[:, 0]
        for t in range(1, x.shape[1]):
            out[:, t] = self.b(x[:, t])
        return out


@block("in place: index_add_ and scatter_")
class InPlaceIndex(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.index_add_(1, torch.zeros(x.shape[1], dtype=torch.long), self.b(x))
        one_hot = torch.zeros_like(h).scatter_(-1, h.argmax(-1, keepdim=True), 1.0)
        return h * 0.5 + one_hot.scatter_add_(2, torch.zeros_like(h, dtype=torch.long), h)


@block("in place: views")
class InPlaceViews(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.view(-1, self.width)[:, 0].mul_(3)
        h.transpose(1, 2)[:, 0] += 1
        first = h[:, 0]
        first += 0.5
        return self.b(h)


@block("in place: without gradients")
class InPlaceNoGrad(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            h[..., 0] = 1
        mask = torch.ones_like(h)
        mask[:, 0] = 0.5
        mask.mul_(2)
        return self.b(h * mask)


@block("in place: data")
class InPlaceData(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.data.mul_(0.5)
        h.detach().add_(1)
        return self.b(h)


@block("in place: copy_ and fill_")
class InPlaceCopy(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        out = torch.empty_like(h).copy_(h)
        out[:, 0].fill_(0.3)
        scores = (h @ h.mT).div_(self.width)
        scores.masked_fill_(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -math.inf)
        return torch.softmax(scores, -1) @ self.b(out)


@block("in place: shapes")
class InPlaceShapes(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).unsqueeze_(1)
        h = h + 1
        return self.b(h.squeeze_(1).transpose_(1, 2).mT)


@block("in place: the block's input")
class InPlaceInput(Two):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x.clone())
        x = x * 1
        x[:, -1] = y[:, -1]
        x += y
        return self.b(x)


@block("packed by mask")
class Packed(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        mask = x.sum(-1) > 0
        packed = self.b(h[mask])
        out = h.clone()
        out[mask] = packed
        return out


@block("masked_scatter")
class MaskedScatter(Two):
    def forward(self, x: Tensor) -> Tensor:
        h, mask = self.a(x), x[..., :1] > 0
        return h.masked_scatter(mask.expand_as(h), self.b(x).masked_select(mask.expand_as(x)))


@block("kept on the module")
class Kept(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.a(x)
        self.list = [self.seen, x]
        return self.late()

    def late(self) -> Tensor:
        return self.b(self.seen.relu()) + sum(self.list)


@block("functional call")
class FunctionalCall(Two):
    def forward(self, x: Tensor) -> Tensor:
        fast = {name: value * 0.9 for name, value in self.a.named_parameters()}
        return self.b(torch.func.functional_call(self.a, fast, (x,))) + x


@block("weights gathered from children")
class Reads(Two):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.stack([layer.weight for layer in self.children()])
        return torch.einsum("bsi,koi->bso", x, weights) + self.a(x) * sum(p.sum() for p in self.b.parameters())


@block("hooked layers")
class Hooked(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.a.register_forward_hook(lambda _, __, out: out.tanh())
        self.b.register_forward_pre_hook(lambda _, inputs: (inputs[0] * 0.5,))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


@block("made in the first pass")
class MadeLater(Two):
    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "bias", None) is None:
            self.bias = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)[:, None]
        return self.b(self.a(x) + self.bias)


@block("power iteration")
class PowerIteration(Two):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.register_buffer("u", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        w = self.a.weight
        if self.training:
            with torch.no_grad():
                self.u = functional.normalize(w @ (w.T @ self.u), dim=0)
        sigma = self.u @ w @ functional.normalize(w.T @ self.u, dim=0)
        return self.b(functional.linear(x, w / sigma, self.a.bias))


@block("energy and forces")
class Forces(Two):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.b(torch.tanh(self.a(at))).square().sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=self.training)
        return x - 0.1 * force


# over the batch


@block("nn.BatchNorm1d", "batch norm")
class BatchNorm(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.a(x).transpose(1, 2)).transpose(1, 2).relu()


@block("nn.BatchNorm1d of tokens", "batch norm")
class BatchNormOfTokens(nn.Module):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(width, 6), nn.BatchNorm1d(6)
        self.b = nn.Linear(6, width)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.a(x).flatten(0, 1)
        return x + self.b(self.norm(flat).view(*x.shape[:2], -1))


class BatchStatistics(Two):
    def __init__(self, width: int, seq: int, whole: bool) -> None:
        super().__init__(width, seq)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        all_rows = ff.whole_batch(h) if self.whole else h
        mean, var = all_rows.mean((0, 1)), all_rows.var((0, 1), unbiased=False)
        return x + self.b((h - mean) / (var + 1e-3).sqrt())


class BatchLargest(Two):
    def __init__(self, width: int, seq: int, whole: bool) -> None:
        super().__init__(width, seq)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        all_rows = ff.whole_batch(h) if self.whole else h
        return self.b(h / all_rows.detach().abs().max().item())


class BatchAttention(Two):
    """Rows that look at each other."""

    def __init__(self, width: int, seq: int, whole: bool) -> None:
        super().__init__(width, seq)
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x).mean(1)
        others = ff.whole_batch(h) if self.whole else h
        return x + self.b((h @ others.T).softmax(-1) @ others).unsqueeze(1)


class BatchNormInBuffers(Two):
    """Running statistics by hand."""

    def __init__(self, width: int, seq: int, whole: bool) -> None:
        super().__init__(width, seq)
        self.whole = whole
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.training:
            with torch.no_grad():
                self.running.lerp_((ff.whole_batch(h) if self.whole else h).mean((0, 1)), 0.1)
        return self.b(h - self.running)


for _name, _kind in {
    "batch statistics by hand": BatchStatistics,
    "largest of the batch": BatchLargest,
    "rows that attend to rows": BatchAttention,
    "running mean by hand": BatchNormInBuffers,
}.items():
    block(_name, "companions", whole=False)(_kind)
    block(f"{_name}, whole batch", "whole batch", whole=True)(_kind)


@block("other row", "companions")
class OtherRow(Two):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return 0.7 * h + 0.3 * self.b(h.roll(1, 0))


# state kept in Python


class Stateful(Two):
    """A block with state outside of its buffers: `state` gives it, and `set_state` puts it back."""

    def state(self) -> Any:
        raise NotImplementedError

    def set_state(self, state: Any) -> None:
        raise NotImplementedError


TOTALS: list[int] = []
"""A number for each block that counts in a global."""


def count_in_total(number: int) -> None:
    TOTALS[number] += 1


class Tally:
    __slots__ = ("calls", "seen")

    def __init__(self) -> None:
        self.calls, self.seen = 0, []

    def note(self, length: int) -> None:
        self.calls += 1
        self.seen.append(length)


@block("counts in Python")
class CountsInPython(Stateful):
    """In an iterator, an array, an object, a global and a closure; each count changes the result."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.ticks, self.hits, self.tally, self.number = itertools.count(1), np.zeros(2), Tally(), len(TOTALS)
        self.own = [0]
        TOTALS.append(0)

        def count() -> None:
            self.own[0] += 1

        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.b(self.a(x))
        self.hits[1] += 1
        self.tally.note(len(self.tally.seen))
        self.count()
        count_in_total(self.number)
        counts = next(self.ticks), self.hits[1], self.tally.calls, self.own[0], TOTALS[self.number]
        return x + self.b(self.a(x)) / sum((at + 1) * float(count) for at, count in enumerate(counts))

    def state(self) -> Any:
        tally = self.tally.calls, list(self.tally.seen)
        return copy.copy(self.ticks), self.hits.copy(), tally, self.own[0], TOTALS[self.number]

    def set_state(self, state: Any) -> None:
        self.ticks, self.hits[:], tally, self.own[0], TOTALS[self.number] = state
        self.tally.calls, self.tally.seen = tally


@block("hooks that count and collect")
class HooksThatCount(Stateful):
    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.shapes: list[int] = []
        self.calls_of_b = 0
        self.a.register_forward_hook(lambda _, __, out: self.shapes.append(out.dim()))
        self.b.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls_of_b += 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return x + self.b(h) / (1 + sum(self.shapes) + self.calls_of_b)

    def state(self) -> Any:
        return list(self.shapes), self.calls_of_b

    def set_state(self, state: Any) -> None:
        self.shapes[:], self.calls_of_b = state


@block("average of weights inside")
class AverageInside(Stateful):
    """An average of weights in parameters that nothing trains; evaluation uses it."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.slow = copy.deepcopy(self.a).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.b(self.slow(x))
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.a.parameters(), strict=True):
                slow.lerp_(fast, 0.3)
        return x + self.b(self.a(x))

    def state(self) -> Any:
        return [parameter.detach().clone() for parameter in self.slow.parameters()]

    def set_state(self, state: Any) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.slow.parameters(), state, strict=True):
                parameter.copy_(value)


# random numbers


class Draws(Two):
    """A block that draws random numbers in training. It notes them, so that one process can be given the same."""

    def __init__(self, width: int, seq: int) -> None:
        super().__init__(width, seq)
        self.noted: list[Tensor] = []
        self.given: list[Tensor] = []
        self.own, self.numpy = torch.Generator().manual_seed(width), np.random.default_rng(width)

    def drawn(self, x: Tensor) -> Tensor:
        """Numbers for each row, or one for all."""
        raise NotImplementedError

    def numbers(self, x: Tensor) -> Tensor:
        if self.given:
            return self.given.pop(0)
        drawn = self.drawn(x).detach()
        if torch._C._current_graph_task_id() == -1:  # not where backward runs the block again
            self.noted.append(to_whole(drawn))
        return drawn

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)) * self.numbers(x)) if self.training else x + self.b(self.a(x))


DRAWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "noise by row": lambda m, x: torch.randn_like(x),
    "normal distribution by row": lambda m, x: torch.distributions.Normal(x.detach(), 0.5).rsample(),
    "drop path": lambda m, x: x.new_empty(len(x), 1, 1).bernoulli_(0.5) / 0.5,
    "drawn in place": lambda m, x: torch.empty_like(x).uniform_(0.5, 1.5),
    "masked tokens": lambda m, x: (torch.rand(x.shape[:2]).argsort(1) % 2).to(x).unsqueeze(-1),
    "steps by row": lambda m, x: torch.randint(1, 9, (len(x),)).to(x)[:, None, None] / 9,
    "probabilities of rows": lambda m, x: torch.bernoulli(x.detach().sigmoid()),
    "own generator by row": lambda m, x: torch.rand(x.shape, generator=m.own, dtype=x.dtype),
    "one number for all": lambda m, x: torch.rand((), dtype=x.dtype) + random.random(),
}
BY_CHANCE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "numpy by row": lambda m, x: torch.as_tensor(np.random.rand(len(x), 1, 1)).to(x),
    "own numpy by row": lambda m, x: torch.as_tensor(m.numpy.random((len(x), x.shape[1], 1))).to(x),
    "row by row": lambda m, x: torch.stack([torch.rand(x.shape[1:], dtype=x.dtype) for _ in range(len(x))]),
}
for _name, _drawn in (DRAWS | BY_CHANCE).items():
    block(f"random: {_name}", by_chance=_name in BY_CHANCE)(type("Draws", (Draws,), {"drawn": _drawn}))

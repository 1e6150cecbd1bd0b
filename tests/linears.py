"""Linear layers and attention that are not called nn.Linear: `LINEARS` by name, each a `Strange` of strange.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from strange import Strange, floats


class ByHand(nn.Module):
    """A linear layer of one's own: `product` of the input, a weight of any name and shape, and a bias."""

    def __init__(self, product: Callable[..., Tensor], shape: tuple[int, int], *, bias: bool = False) -> None:
        super().__init__()
        self.product = product
        self.kernel = nn.Parameter(torch.randn(shape) / 3)
        self.b = nn.Parameter(torch.randn(shape[0])) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.kernel) if self.b is None else self.product(x, self.kernel, self.b)


class Turned(nn.Module):
    """A linear layer with a weight [in, out], as transformers' Conv1D."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) / 3), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


class OwnForward(nn.Linear):
    """As transformers' FalconLinear."""

    def forward(self, input: Tensor) -> Tensor:
        hidden = input @ self.weight.T
        return hidden if self.bias is None else hidden + self.bias


def by_einsum(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bsk,nk->bsn", x, w)


def by_matmul(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x, w)


class Blocks(nn.Module):
    """Blocks of layers that somebody wrote by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(
                    square=OwnForward(12, 12),
                    up=ByHand(functional.linear, (16, 12), bias=True),
                    turned=Turned(16, 16),
                    again=ByHand(by_matmul, (16, 16)),
                    down=ByHand(by_einsum, (12, 16)),
                )
            )
            for _ in range(2)
        )
        self.out = Turned(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer["up"](x=torch.tanh(layer["square"](x)))
            x = x + layer["down"](torch.relu(layer["again"](layer["turned"](h))))
        return self.out(x[:, 0])


class OtherInputs(nn.Module):
    """Calls a layer with inputs and arguments that it was not tried with."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.three = Scaled(), ByHand(by_any, (6, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.scaled(x) + self.scaled(x, 2.0) + self.scaled(x, by=0.5)
        return h + self.three(x) + self.three(x[:, 0])[:, None] + self.three(x.mean((0, 1)).detach() * 0 + 1)


class Scaled(ByHand):
    def __init__(self) -> None:
        super().__init__(functional.linear, (6, 6), bias=True)

    def forward(self, x: Tensor, by: float = 1.0) -> Tensor:
        return functional.linear(x, self.kernel, self.b) * by


def by_any(x: Tensor, w: Tensor) -> Tensor:
    """Another product for each number of dims."""
    return {1: x * w[0], 2: x @ w, 3: x @ w.t()}[x.dim()] if x.dim() < 4 else x


class Shares(nn.Module):
    """One weight for layers that use it in opposite directions."""

    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = ByHand(functional.linear, (6, 6)), ByHand(by_matmul, (6, 6))
        self.back.kernel = self.there.kernel

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.there(x)))


def hooked(name: str, *args: Any) -> nn.Module:
    """torch's older weight norm and spectral norm, which compute the weight in a hook; torch warns of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(nn.utils, name)(nn.Linear(*args))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class Computed(nn.Module):
    """Weights that are computed from other parameters, in blocks that lead out of a stream and back."""

    def __init__(self) -> None:
        super().__init__()
        symmetric = nn.Linear(16, 16)
        parametrize.register_parametrization(symmetric, "weight", Symmetric())
        self.layers = nn.ModuleList(
            [
                nn.Sequential(
                    parametrizations.weight_norm(nn.Linear(12, 16)), symmetric, hooked("weight_norm", 16, 12)
                ),
                nn.Sequential(
                    parametrizations.spectral_norm(nn.Linear(12, 16)),
                    parametrizations.orthogonal(nn.Linear(16, 16, bias=False)),
                    hooked("spectral_norm", 16, 12),
                ),
            ]
        )
        self.odd = parametrizations.weight_norm(nn.Linear(12, 5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.odd(x)


class Attends(nn.Module):
    """nn.MultiheadAttention in every way: masks, weights, other widths, an added key and value."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = options.get("batch_first", False)
        self.attend = nn.MultiheadAttention(12, 4, **options)
        self.kdim, self.vdim = options.get("kdim", 12), options.get("vdim", 12)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.first else x.transpose(0, 1)
        k, v = h[..., : self.kdim], h[..., -self.vdim :]
        k, v = (h, h) if k.shape == v.shape == h.shape else (k, v)
        seq, rows = x.shape[1], x.shape[0]
        causal = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        late = torch.zeros(rows, seq, dtype=torch.bool)
        late[:, 3:] = True
        scores = torch.arange(4 * seq * seq, dtype=x.dtype).sin().view(4, seq, seq).repeat(rows, 1, 1)
        masked = dict(attn_mask=causal, is_causal=True)
        outs = [
            self.attend(h, k, v, need_weights=False)[0],
            self.attend(h, k, v, need_weights=False, **masked)[0],
            self.attend(h, k, v, key_padding_mask=late, need_weights=False, **masked)[0],
            self.attend(h, k, v, attn_mask=scores, need_weights=False)[0],
        ]
        out, averaged = self.attend(h, k, v, attn_mask=causal.double().masked_fill(causal, -torch.inf))
        again, apart = self.attend(h, k, v, key_padding_mask=late, average_attn_weights=False)
        ones = [torch.ones(3, a.shape[-1], dtype=x.dtype).cumsum(0).sin() for a in (h, k, v)]
        outs += [out, again, h + self.attend(*ones)[0].mean(0)]
        total = sum(out if self.first else out.transpose(0, 1) for out in outs)
        return total / 8 + averaged.square().sum(-1, keepdim=True) + apart.square().sum((1, 3))[:, :, None]


class Seq2Seq(nn.Module):
    """nn.Transformer, rows first or second."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = options.get("batch_first", False)
        self.inside = nn.Transformer(12, 4, 1, 1, 16, dropout=0.0, **options)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        if not self.first:
            source, target = source.transpose(0, 1), target.transpose(0, 1)
        seq = target.shape[1 if self.first else 0]
        mask = nn.Transformer.generate_square_subsequent_mask(seq, dtype=target.dtype)
        out = self.inside(source, target, tgt_mask=mask, tgt_is_causal=True)
        return out if self.first else out.transpose(0, 1)


class Products(nn.Module):
    """Attention whose parameters are of one module, with a dim for heads, and used by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                dict(norm=nn.LayerNorm(12), mix=HeadsByEinsum(12, 4), up=nn.Linear(12, 16), down=nn.Linear(16, 12))
            )
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mix"](layer["norm"](x))
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return x


class HeadsByEinsum(nn.Module):
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(features, heads, 3) / 3) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, 3, features) / 3)
        self.bias = nn.Parameter(torch.randn(heads, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bsk,khd->bshd", x, w) + self.bias for w in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        mixed = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        return torch.einsum("bqhd,hdk->bqk", mixed, self.wo)


def both(*shapes: tuple[int, ...]) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    return lambda rows, generator: tuple(
        torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for shape in shapes
    )


LINEARS: dict[str, Strange] = {
    "by hand": Strange(Blocks, floats(5, 12)),
    "other inputs": Strange(OtherInputs),
    "shared": Strange(Shares),
    "alone": Strange(lambda: ByHand(by_einsum, (5, 6))),
    "computed": Strange(Computed, floats(5, 12)),
    # a bias of keys has no gradient but rounding, which Adam divides by its own size, unless some key has no bias
    "attention": Strange(lambda: Attends(bias=False, batch_first=True), floats(5, 12)),
    "attention, rows second": Strange(lambda: Attends(add_zero_attn=True), floats(5, 12)),
    "attention, other widths": Strange(
        lambda: Attends(kdim=6, vdim=8, batch_first=True, add_zero_attn=True), floats(5, 12)
    ),
    "attention, added keys": Strange(lambda: Attends(add_bias_kv=True, add_zero_attn=True), floats(5, 12)),
    "transformer": Strange(lambda: Seq2Seq(batch_first=True), both((5, 12), (3, 12))),
    "transformer, rows second": Strange(lambda: Seq2Seq(norm_first=True), both((5, 12), (3, 12))),
    "einsum": Strange(Products, floats(5, 12)),
}

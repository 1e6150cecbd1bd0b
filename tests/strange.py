"""Small modules whose structure nobody foresaw: `STRANGE` by name.

Each is built in fp64 from a seed, knows its batch (rows first) and gives back what it likes; `loss_of` makes a loss of
it, as a user would: the module's own, or one made outside of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """nanoGPT's, with the keys, queries and values in one weight."""

    def __init__(self, features: int, heads: int, dropout: float = 0.0, bias: bool = True) -> None:
        super().__init__()
        self.c_attn = nn.Linear(features, 3 * features, bias=bias)
        self.c_proj = nn.Linear(features, features, bias=bias)
        self.n_head, self.dropout = heads, dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, features = x.size()
        q, k, v = self.c_attn(x).split(features, dim=2)
        q, k, v = (part.view(rows, seq, self.n_head, features // self.n_head).transpose(1, 2) for part in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(rows, seq, features))


class Block(nn.Module):
    def __init__(self, features: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.attn = Attention(features, heads, dropout)
        self.mlp = nn.ModuleDict(
            dict(c_fc=nn.Linear(features, 4 * features), act=nn.GELU(), c_proj=nn.Linear(4 * features, features))
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](self.ln_2(x)))))


class NanoGPT(nn.Module):
    def __init__(self, features: int = 24, heads: int = 4, vocab: int = 53, dropout: float = 0.0) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab, features),
                wpe=nn.Embedding(16, features),
                drop=nn.Dropout(dropout),
                h=nn.ModuleList(Block(features, heads, dropout) for _ in range(2)),
                ln_f=nn.LayerNorm(features),
            )
        )
        self.lm_head = nn.Linear(features, vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        positions = torch.arange(ids.size(1), device=ids.device)
        x = self.transformer["drop"](self.transformer["wte"](ids) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:
            x = block(x)
        x = self.transformer["ln_f"](x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class Raw(nn.Module):
    """Parameters of no layer: products, sums by einsum, numbers without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, 5))
        self.b = nn.Parameter(torch.randn(5))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.core = nn.Parameter(torch.randn(5, 3, 2))
        self.inner = nn.Linear(6, 4)
        self.shift = nn.Parameter(torch.tensor(-0.2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(x @ self.w + self.b) * self.scale
        h = torch.einsum("bsk,knm->bsnm", h, self.core).flatten(2)
        return self.inner(h) * self.shift + self.scale


class Siblings(nn.Module):
    """Modules that read each other's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.table = nn.Embedding(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x + self.b(self.a(x)))
        back = functional.linear(h, self.b.weight.t() + self.a.weight, self.a.bias) @ self.a.weight
        return back * self.norm.weight + self.table.weight.mean(0) + self.a.weight.pow(2).sum() * 0.01


class Normed(nn.Module):
    """Weights that are computed from parameters before each use."""

    def __init__(self) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(nn.Linear(6, 8))
        self.b = nn.Linear(8, 8)
        parametrize.register_parametrization(self.b, "weight", Symmetric())
        self.c = parametrizations.spectral_norm(nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(self.a(x))))


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).transpose(-1, -2)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ParameterList([torch.randn(6, 6), torch.randn(6)])
        self.named = nn.ParameterDict({"gain": torch.randn(6), "more": torch.randn(1)})

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = torch.tanh(x @ step if step.dim() == 2 else x + step)
        return x * self.named["gain"] + sum(value.sum() for value in self.named.values())


class Tied(nn.Module):
    """Two layers with one weight, and one that reads it turned round."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) @ self.a.weight


class Again(nn.Module):
    """One block called several times, as in ALBERT, and once more through another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(12, 2)])
        self.other = self.layers[0]
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.layers[0](x)
        return self.out(self.other(x))


class Branches(nn.Module):
    """Other layers every other time."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 2)
        self.unused = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.out(torch.relu((self.odd if self.calls % 2 else self.even)(x)))


@dataclass
class Output:
    hidden: Tensor
    rest: Any = None
    number: float = 1.0


class Answers(nn.Module):
    """Everything that a module may return."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, *, deep: bool = True) -> Any:
        h = self.a(x)
        out = self.b(torch.relu(h))
        return {
            "out": Output(out, (h, None, [out, {"again": h}])),
            "none": None,
            "text": "deep" if deep else "",
            "n": 3,
        }


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(12, 2, 0.0) for _ in range(2))
        self.out, self.reentrant = nn.Linear(12, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return checkpoint(lambda h: torch.tanh(self.out(h)).square(), x, use_reentrant=self.reentrant)


class Llamalike(nn.Module):
    """Attention by hand: separate projections with fewer key heads, rotated halves, masks, softmax; a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 6
        self.wq, self.wk = nn.Linear(24, 24, bias=False), nn.Linear(24, 12, bias=False)
        self.wv, self.wo = nn.Linear(24, 12, bias=False), nn.Linear(24, 24, bias=False)
        self.gate_up_proj, self.down_proj = nn.Linear(24, 2 * 16), nn.Linear(16, 24)
        self.norm = RMSNorm(24)
        self.register_buffer("angles", torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.3, 0.1]))

    def forward(self, x: Tensor) -> Tensor:
        rows, seq, _ = x.shape
        h = self.norm(x)
        q = self.wq(h).view(rows, seq, self.num_heads, -1).transpose(1, 2)
        k, v = (w(h).view(rows, seq, -1, self.head_dim).transpose(1, 2) for w in (self.wk, self.wv))
        q, k = self.turned(q, seq), self.turned(k, seq)
        k, v = (part.repeat_interleave(self.num_heads // part.shape[1], 1) for part in (k, v))
        scores = torch.matmul(q, k.mT) / math.sqrt(self.head_dim)
        mask = torch.ones(seq, seq, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill_(mask, -math.inf)
        mixed = torch.softmax(scores, dim=-1) @ v
        x = x + self.wo(mixed.transpose(1, 2).reshape(rows, seq, -1))
        gate, up = self.gate_up_proj(self.norm(x)).chunk(2, dim=-1)
        return x + self.down_proj(functional.silu(gate) * up)

    def turned(self, a: Tensor, seq: int) -> Tensor:
        angles = self.angles[:seq].to(a)
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        one, two = a.chunk(2, dim=-1)
        return a * cos + torch.cat((-two, one), dim=-1) * sin


class RMSNorm(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(features)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Mixer(nn.Module):
    """Linear layers over tokens and over features in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens, self.features = (
            nn.LayerNorm(6),
            nn.Linear(5, 5),
            nn.Sequential(nn.Linear(6, 6), nn.GELU()),
        )
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.features(self.norm(x)) * self.gain
        return x.mean(dim=1) / (x.std(dim=1) + 1) + x[:, 0].cumsum(-1) - x.norm(dim=-1, keepdim=True)[:, -1]


class Experts(nn.Module):
    """Rows go to one of several experts; some may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, 6)
        weights = self.router(flat).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            (chosen,) = torch.where(best == number)
            out = out.index_add(0, chosen, expert(flat[chosen]) * weights[chosen, number, None])
        return out.view_as(x)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(6, 8), nn.Linear(8, 6), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.a(x)) * 1
        h += 0.5
        h.mul_(2).add_(x.sum((1, 2), keepdim=True))
        out = self.b(h)
        out += x
        return functional.leaky_relu(out, 0.1, inplace=True)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.rnn = kind(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 2)

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.rnn(self.embed(x))
        return self.out(out) + (state[0] if isinstance(state, tuple) else state).sum((0, 2))[:, None, None]


class Pieces(nn.Module):
    """Layers of torch that have parameters and are not known."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear, self.act = nn.Bilinear(6, 4, 5), nn.PReLU(5)
        self.bag, self.cell = nn.EmbeddingBag(11, 6, mode="mean"), nn.GRUCell(5, 5)
        self.pad, self.norm = nn.Embedding(7, 4, padding_idx=0), nn.LayerNorm((5, 5))

    def forward(self, ids: Tensor) -> Tensor:
        left, right = self.bag(ids), self.pad(ids[:, 0] % 7)
        h = self.act(self.bilinear(left, right))
        h = self.cell(h)
        return self.norm(h[:, :, None] * h[:, None])


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(12, 2) for _ in range(2))
        self.raw, self.out = Lists(), nn.Linear(6, 3)
        self.narrow = nn.Linear(12, 6)
        self.layers[0].requires_grad_(False)
        self.layers[1].attn.c_attn.weight.requires_grad_(False)
        self.narrow.bias.requires_grad_(False)
        self.raw.steps[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(self.raw(self.narrow(x)))


def floats(*shape: int) -> Callable[[int, torch.Generator], tuple[Tensor, ...]]:
    return lambda rows, generator: (torch.randn(rows, *shape, generator=generator, dtype=torch.float64),)


def tokens(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    ids, targets = torch.randint(53, (2, rows, 7), generator=generator)
    targets[0, :3] = -1
    return ids, targets


def few_ids(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (torch.randint(11, (rows, 5), generator=generator),)


@dataclass(frozen=True)
class Strange:
    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], tuple[Tensor, ...]] = floats(5, 6)
    output: Callable[[Any], Tensor] = field(default=lambda out: out)
    """What the loss is made of."""
    own_loss: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.make().double()

    def inputs(self, rows: int, step: int) -> tuple[Tensor, ...]:
        return self.batch(rows, torch.Generator().manual_seed(step))


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(12, 2, 16, dropout=0.0, batch_first=True, **options)


STRANGE: dict[str, Strange] = {
    "nano gpt": Strange(NanoGPT, tokens, lambda out: out[0], own_loss=True),
    "odd mlp": Strange(lambda: nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), floats(7)),
    "odd tokens": Strange(lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 9)), floats(3, 5, 6)),
    "equal layers": Strange(lambda: nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])),
    "encoder layer": Strange(encoder, floats(5, 12)),
    "encoder": Strange(
        lambda: nn.TransformerEncoder(encoder(norm_first=True, activation="gelu"), 2, enable_nested_tensor=False),
        floats(5, 12),
    ),
    "multihead": Strange(lambda: MultiHead(), floats(5, 12)),
    "lstm": Strange(lambda: Recurrent(nn.LSTM)),
    "gru": Strange(lambda: Recurrent(nn.GRU)),
    "pieces": Strange(Pieces, few_ids),
    "raw": Strange(Raw, floats(5, 7)),
    "siblings": Strange(Siblings),
    "normed": Strange(Normed),
    "lists": Strange(Lists),
    "tied": Strange(Tied),
    "again": Strange(Again, floats(5, 12)),
    "branches": Strange(Branches),
    "answers": Strange(Answers, output=lambda out: torch.cat([out["out"].hidden, out["out"].rest[2][1]["again"]], -1)),
    "checkpointed": Strange(Checkpointed, floats(5, 12)),
    "llama-like": Strange(Llamalike, floats(5, 24)),
    "mixer": Strange(Mixer),
    "experts": Strange(Experts),
    "in place": Strange(InPlace),
    "frozen": Strange(Frozen, floats(5, 12)),
    "linear alone": Strange(lambda: nn.Linear(6, 5)),
    "embedding alone": Strange(lambda: nn.Embedding(11, 6), few_ids),
    "norm alone": Strange(lambda: nn.LayerNorm(6)),
    "lstm alone": Strange(lambda: nn.LSTM(6, 5, batch_first=True), output=lambda out: out[0]),
}


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(12, 12)
        self.attend = nn.MultiheadAttention(12, 2, batch_first=True, add_bias_kv=True)
        self.across = nn.MultiheadAttention(12, 3, kdim=6, vdim=5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        mixed, weights = self.attend(h, h, h, average_attn_weights=False)
        crossed, _ = self.across(mixed, x[..., :6], x[..., 6:11], need_weights=False)
        return crossed + weights.square().sum((1, 3))[:, :, None]


class WithReset(nn.Module):
    """Layers of torch and one of its own, whose reset_parameters writes all it has."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.bilinear, self.norm = nn.LSTM(3, 4), nn.Bilinear(2, 3, 4), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), Shifted(6), nn.Linear(6, 4)) for _ in range(2))


class Shifted(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.empty(features))
        self.register_buffer("steps", torch.empty(features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.by)
        self.steps = torch.rand(self.by.shape, device=self.by.device)


class OnlyBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 6)
        self.register_buffer("angles", torch.arange(6.0))


class Pairs(nn.Module):
    """Blocks of two linear layers behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict(dict(up=nn.Linear(6, 8), down=nn.Linear(8, 6), norm=nn.LayerNorm(6))) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](layer["norm"](x))))
        return x


class SharedOtherwise(nn.Module):
    """One weight for a layer that leads out of the stream and one that leads back."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict(dict(up=nn.Linear(6, 6), down=nn.Linear(6, 6)))])
        self.layers[0]["down"].weight = self.layers[0]["up"].weight


class Twice(torch.autograd.Function):
    """An autograd function of one's own."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(Twice.apply(self.a(x)))


class Mixed(nn.Module):
    """Parameters of several dtypes, whole numbers among them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4).bfloat16())
        self.b = nn.Parameter(torch.randn(4).double())
        self.n = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.bfloat16() * self.a[0]).double() * self.b + self.n


class Changes(nn.Module):
    """Changes in forward what it should not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.w, self.how = nn.Linear(6, 8), nn.Parameter(torch.randn(8)), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            if self.how == "own":
                self.w.mul_(0.5)
            elif self.how == "data":
                self.w.data.clamp_(min=0)
            elif self.how == "assign":
                self.w.data = self.w.data * 2
            elif self.how == "child":
                self.a.weight.data.clamp_(min=0)
            elif self.how == "attribute":
                self.w = nn.Parameter(torch.zeros(8))
        return h * self.w


class Remembers(nn.Module):
    """Writes into buffers: how often it was called, or what it saw."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.out, self.how = nn.Linear(6, 6), how
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.out(x)
        with torch.no_grad():
            self.count += 1
            if self.how == "in place":
                self.mean.mul_(0.9).add_(h.mean((0, 1)))
            elif self.how == "assign":
                self.mean = 0.9 * self.mean + h.mean((0, 1))
            elif self.how == "keep":
                self.mean = h.detach()
        return h


Rows = Callable[[Tensor], Tensor]


class Scored(nn.Module):
    """A linear layer and a loss of torch's, given the rows of a place out of a whole batch."""

    def __init__(self, loss: Callable[[Any, Rows], Tensor]) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(5, 5), loss

    def forward(self, rows: Rows) -> Tensor:
        return self.loss(self.layer, rows)


_drawn = torch.Generator().manual_seed(0)
A, B, C = torch.rand(3, 8, 5, generator=_drawn, dtype=torch.float64)
IMAGE = torch.rand(8, 3, 5, generator=_drawn, dtype=torch.float64)
WEIGHT = torch.rand(5, generator=_drawn, dtype=torch.float64)
IDS = torch.randint(5, (8, 3), generator=_drawn)
SOME = IDS[:, 0].masked_fill(torch.arange(8) % 5 == 0, -100)
SIGNS = (IDS[:, 0] % 2 * 2 - 1).double()
LENGTHS = torch.full((8,), 2)
LOSSES: dict[str, Callable[[Any, Rows], Tensor]] = {
    "ids": lambda m, r: functional.cross_entropy(m(r(A)), r(SOME)),
    "weights": lambda m, r: functional.cross_entropy(m(r(A)), r(SOME), WEIGHT),
    "smoothed": lambda m, r: functional.cross_entropy(m(r(A)), r(SOME), weight=WEIGHT, label_smoothing=0.1),
    "sum": lambda m, r: functional.cross_entropy(m(r(A)), r(SOME), reduction="sum"),
    "another id ignored": lambda m, r: functional.cross_entropy(m(r(A)), r(IDS[:, 0]), ignore_index=2),
    "probabilities": lambda m, r: functional.cross_entropy(m(r(A)), r(B.softmax(-1))),
    "pixels": lambda m, r: functional.cross_entropy(m(r(IMAGE)).mT, r(IDS)),
    "pixels' probabilities": lambda m, r: functional.cross_entropy(m(r(IMAGE)).mT, r(IMAGE.softmax(-1)).mT),
    "module": lambda m, r: nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2)(m(r(A)), r(SOME)),
    "nll": lambda m, r: functional.nll_loss(m(r(A)).log_softmax(-1), r(SOME), WEIGHT),
    "mse": lambda m, r: functional.mse_loss(m(r(A)), r(B)),
    "weighted mse": lambda m, r: functional.mse_loss(m(r(A)), r(B), weight=r(C)),
    "l1": lambda m, r: functional.l1_loss(m(r(A)), r(B), weight=r(C)),
    "smooth l1": lambda m, r: functional.smooth_l1_loss(m(r(A)), r(B), beta=0.3),
    "huber": lambda m, r: functional.huber_loss(m(r(A)), r(B), "mean", 0.3, r(C)),
    "huber's sum": lambda m, r: functional.huber_loss(m(r(A)), r(B), "sum"),
    "bce": lambda m, r: functional.binary_cross_entropy(m(r(A)).sigmoid(), r(B), r(C)),
    "bce of logits": lambda m, r: functional.binary_cross_entropy_with_logits(m(r(A)), r(B), pos_weight=WEIGHT),
    "kl": lambda m, r: functional.kl_div(m(r(A)).log_softmax(-1), r(B), reduction="batchmean"),
    "kl's sum": lambda m, r: functional.kl_div(m(r(A)).log_softmax(-1), r(B), reduction="sum"),
    "poisson": lambda m, r: functional.poisson_nll_loss(m(r(A)), r(B), True, False),
    "gaussian": lambda m, r: functional.gaussian_nll_loss(m(r(A)), r(B), r(C)[:, :1], full=True),
    "soft margin": lambda m, r: functional.soft_margin_loss(m(r(A)), r(SIGNS)[:, None].expand(-1, 5)),
    "hinge": lambda m, r: functional.hinge_embedding_loss(m(r(A)), r(SIGNS)[:, None].expand(-1, 5)),
    "cosine": lambda m, r: functional.cosine_embedding_loss(m(r(A)), m(r(B)), r(SIGNS)),
    "ranking": lambda m, r: functional.margin_ranking_loss(m(r(A)), m(r(B)), r(SIGNS)[:, None]),
    "multi margin": lambda m, r: functional.multi_margin_loss(m(r(A)), r(IDS[:, 0]), weight=WEIGHT),
    "multi label": lambda m, r: functional.multilabel_soft_margin_loss(m(r(A)), r((B > 0.5).double()), WEIGHT),
    "multi label margin": lambda m, r: functional.multilabel_margin_loss(m(r(A)), r(IDS[:, :1]).expand(-1, 5)),
    "triplet": lambda m, r: functional.triplet_margin_loss(m(r(A)), m(r(B)), m(r(C))),
    "triplet by distance": lambda m, r: functional.triplet_margin_with_distance_loss(m(r(A)), m(r(B)), m(r(C))),
    "ctc": lambda m, r: functional.ctc_loss(
        m(r(IMAGE.repeat(1, 2, 1))).log_softmax(-1).transpose(0, 1), r(1 + IDS[:, :2] % 4), r(LENGTHS * 3), r(LENGTHS)
    ),
}
"""Ways to call torch's losses; with rows that count differently on each place where they can."""

"""Causal attention on whole sequences, heads cut over the grid.

The query heads of rank (x, y) are block x*Y + y, or block x where activations are replicated. Key and value
heads follow them where their number divides as well. Where it does not, K and V are made whole over the
axes in the way and every rank takes the heads that its queries read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fourfold import kernels
from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.layout import Init, inner
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Contract, Expand, expand_in_turns, label_of, read
from fourfold.nn.norm import HeadNorm
from fourfold.nn.recompute import recompute
from fourfold.nn.rng import seeded
from fourfold.operators import spread, take_apart, whole_over_x, whole_over_y
from fourfold.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)  # by identity: tensors do not compare
class Batch:
    """The rows of a (data, z) place; where documents are packed also the place of each token in its own."""

    rows: int
    seq: int
    positions: Tensor | None = None
    """[rows, seq], 0 at the first token of every document."""
    mask: Tensor | None = None
    """[rows, 1, seq, seq], true where a token may read another: an earlier one of the same document."""

    @classmethod
    def of(cls, tokens: Tensor, positions: Tensor | None = None) -> Batch:
        rows, seq = tokens.shape
        if positions is None:
            return cls(rows, seq)
        document = (positions == 0).cumsum(1)
        causal = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).tril()
        return cls(rows, seq, positions, (causal & (document[:, :, None] == document[:, None]))[:, None])

    @property
    def tokens(self) -> int:
        return self.rows * self.seq


@dataclass(frozen=True, slots=True)
class Heads:
    """Which heads this rank computes and which it gets from the product."""

    queries: range
    keys: range
    """KV heads in this rank's K and V before it selects."""
    shared: bool
    """K and V are made whole over y, because their heads do not follow the queries' cut."""
    over_x: bool
    """... and over x too, because x cuts through a head."""

    @classmethod
    def of(cls, heads: int, kv_heads: int, grid: Grid, policy: Policy) -> Heads:
        cuts = [axis for axis in ("x", "y") if axis in inner(policy.activations).axes]
        block, parts = 0, 1
        for axis in cuts:
            block, parts = block * grid.size(axis) + grid.coords[axis], parts * grid.size(axis)
        held = heads // parts
        queries = range(block * held, (block + 1) * held)
        shared = kv_heads % parts != 0
        over_x = kv_heads % grid.size("x") != 0
        if not shared:
            keys = range(block * kv_heads // parts, (block + 1) * kv_heads // parts)
        elif over_x:
            keys = range(kv_heads)
        else:
            held = kv_heads // grid.size("x")
            keys = range(grid.coords["x"] * held, (grid.coords["x"] + 1) * held)
        return cls(queries, keys, shared, over_x)


def rope_tables(
    batch: Batch, head_dim: int, theta: float, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin [seq, 1, head_dim], or [rows, seq, 1, head_dim] of packed documents, at least fp32."""
    dtype = torch.promote_types(dtype, torch.float32)
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)
    angles = torch.outer(torch.arange(batch.seq, device=device, dtype=dtype), frequencies).repeat(1, 2)
    if batch.positions is not None:
        angles = angles[batch.positions]
    return angles.cos()[..., None, :], angles.sin()[..., None, :]


class Attention(Layer):
    """rest -> q, k, v read together -> attention on whole sequences -> Contract -> rest"""

    side_by_side = (("q.weight", "k.weight", "v.weight"),)

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        features: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        bias: bool,
        qk_norm: bool,
        dropout: float,
        eps: float,
        init: Init,
        out_init: Init,
    ) -> None:
        super().__init__(grid, policy)
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, head_dim, dropout
        self.q = Expand(grid, policy, features, heads * head_dim, bias=bias, init=init)
        self.k = Expand(grid, policy, features, kv_heads * head_dim, bias=bias, init=init)
        self.v = Expand(grid, policy, features, kv_heads * head_dim, bias=bias, init=init)
        self.out = Contract(grid, policy, heads * head_dim, features, bias=bias, init=out_init)
        self.q_norm = HeadNorm(grid, policy, head_dim, eps=eps) if qk_norm else None
        self.k_norm = HeadNorm(grid, policy, head_dim, eps=eps) if qk_norm else None

    def forward(self, a: Tensor, batch: Batch, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        return self.out.leave(self.engine.alone(self.turns(a, batch, rope)), batch.tokens).wait()

    def turns(self, a: Tensor, batch: Batch, rope: tuple[Tensor, Tensor] | None) -> Turns[Tensor]:
        """Until `out.leave` brings it to rest."""
        self.refuse_hooks(self.q, self.k, self.v, self.out)
        q, k, v = yield from self._read(a, batch)
        if self.policy.recompute == "attention":
            mixed = recompute(self._mix, self.clock, q, k, v, rope, batch.mask)
        else:
            mixed = self._mix(q, k, v, rope, batch.mask)
        flat = mixed.transpose(1, 2).reshape(batch.tokens, -1)
        return (yield from self.out.turns(flat, batch.tokens))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """What lies between the two products; [rows, seq, heads, head_dim] -> [rows, heads, seq, head_dim]."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            rotate = kernels.region(kernels.rotate, q, compiled=self.policy.compile)
            q, k = rotate(q, *rope), rotate(k, *rope)
            v = v.contiguous()  # lets go of the product's output, of which v would be a third or less
        return self._attend(q, k, v, mask)

    def _read(self, a: Tensor, batch: Batch) -> Turns[tuple[Tensor, Tensor, Tensor]]:
        """q, k, v as [rows, seq, heads, head_dim]."""
        held = Heads.of(self.heads, self.kv_heads, self.grid, self.policy)
        q, k, v = yield from read_heads([self.q, self.k, self.v], a, batch.tokens, held)
        q, k, v = (self._by_head(part, batch) for part in (q, k, v))
        if held.shared:
            group = self.heads // self.kv_heads
            wanted = Counter(query // group - held.keys.start for query in held.queries)
            k, v = select_heads(k, wanted), select_heads(v, wanted)
        return q, k, v

    def _by_head(self, a: Tensor, batch: Batch) -> Tensor:
        return a.reshape(batch.rows, batch.seq, -1, self.head_dim)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        options = dict(attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1], dropout_p=dropout)
        if q.is_meta:  # a dry run keeps what the fused kernel keeps; torch would take the unfused one there
            fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            return fused(q, k, v, dropout, mask is None, attn_mask=mask)[0]
        if dropout == 0:
            return functional.scaled_dot_product_attention(q, k, v, **options)
        with seeded(self.clock.key(self.label, self.grid, inner(self.policy.activations)), q.device):
            return functional.scaled_dot_product_attention(q, k, v, **options)


def read_heads(layers: Sequence[Expand], a: Tensor, tokens: int, held: Heads) -> Turns[tuple[Tensor, Tensor, Tensor]]:
    """q, k and v of a rank, [m/z, heads * head_dim] each: K and V of `held.keys`, whole where they are shared."""
    if not held.shared:
        q, k, v = yield from expand_in_turns(layers, a, tokens)
        return q, k, v
    query, key, value = layers
    site = query.site(tokens).named(label_of(layers))
    widths = [key.width, value.width]
    out = yield from read(layers, a, tokens)
    q, kv = take_apart(out, [query.width, sum(widths)])
    spreading, sharing = spread(q, site, [query.width]), whole_over_y(kv, site)
    yield
    q, kv = spreading.wait(), sharing.wait()
    if held.over_x:
        kv = whole_over_x(kv, site, widths).wait()
    k, v = take_apart(kv, [kv.shape[1] // 2] * 2)
    return q, k, v


def select_heads(a: Tensor, wanted: Counter[int]) -> Tensor:
    """The KV heads that are read, each once where all are read equally often, else once per query."""
    heads = sorted(wanted)
    if len(set(wanted.values())) == 1:
        return a[:, :, heads[0] : heads[-1] + 1]
    # expanded and joined, not indexed: backward is then a plain sum, the same in every run
    return torch.cat([a[:, :, head : head + 1].expand(-1, -1, wanted[head], -1) for head in heads], dim=2)

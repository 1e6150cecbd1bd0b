"""Causal attention on whole sequences, heads cut over the grid.

The query heads of rank (x, y) are block x*Y + y, or block x if activations are replicated. Key and value heads are cut
in the same way if their number divides as well. Otherwise K and V are made whole over the axes that cut too finely, and
every rank selects the heads that its queries read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from fourfold import kernels
from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.kernels import HeadKind
from fourfold.layout import FEATURES, Init, Layout, inner
from fourfold.nn.layer import Layer, recompute
from fourfold.nn.linear import Contract, Expand, expand_in_turns, expand_joined, label_of, read
from fourfold.nn.lora import LORA, add_delta
from fourfold.nn.norm import HeadNorm
from fourfold.nn.rng import seeded
from fourfold.operators import spread, take_apart, whole_over_x, whole_over_y
from fourfold.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: == of tensors is no bool
class Batch:
    """What attention must know about the rows of a (data, z) place."""

    rows: int
    seq: int
    positions: Tensor | None = None
    """[rows, seq], 0 at the first token of every document; None if a row is one document."""
    mask: Tensor | None = None
    """[rows, 1, seq, seq], true where a token may read another: an earlier one of the same document."""
    rope: tuple[Tensor, Tensor] | None = None
    """The tables of rotary positions (`rope_tables`)."""

    @classmethod
    def of(cls, tokens: Tensor, positions: Tensor | None = None, rope: tuple[Tensor, Tensor] | None = None) -> Batch:
        rows, seq = tokens.shape
        if positions is None:
            return cls(rows, seq, rope=rope)
        document = (positions == 0).cumsum(1)
        causal = torch.ones(seq, seq, dtype=torch.bool, device=tokens.device).tril()
        return cls(rows, seq, positions, (causal & (document[:, :, None] == document[:, None]))[:, None], rope)

    @property
    def tokens(self) -> int:
        return self.rows * self.seq


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads that this rank computes, and the KV heads that it gets from the product."""

    queries: range
    keys: range
    """KV heads in this rank's K and V before it selects."""
    shared: bool
    """Whether K and V are made whole over y, because their heads do not divide as the queries' do."""
    over_x: bool
    """Whether K and V are made whole over x too, because x cuts through a head."""

    @classmethod
    def of(cls, heads: int, kv_heads: int, grid: Grid, policy: Policy) -> Heads:
        axes = inner(policy.activations).over(FEATURES)

        def held(count: int, axes: Sequence[str]) -> range:
            return Layout.along(0, axes).box((count,), grid.shape.sizes, grid.coords)[0]

        shared = kv_heads % prod(grid.size(axis) for axis in axes) != 0
        over_x = kv_heads % grid.size("x") != 0
        shared_axes = () if over_x else ("x",)
        return cls(held(heads, axes), held(kv_heads, shared_axes if shared else axes), shared, over_x)


def rope_tables(
    seq: int, head_dim: int, theta: float, positions: Tensor | None, *, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [seq, 1, head_dim] or for packed documents [rows, seq, 1, head_dim], in fp32 or wider."""
    # In fp32 at least: bf16 cannot tell apart the angles of neighbouring positions in a long sequence.
    dtype = torch.promote_types(dtype, torch.float32)
    frequencies = theta ** -(torch.arange(0, head_dim, 2, device=device, dtype=dtype) / head_dim)
    angles = torch.outer(torch.arange(seq, device=device, dtype=dtype), frequencies).repeat(1, 2)
    if positions is not None:
        angles = angles[positions]
    return angles.cos()[..., None, :], angles.sin()[..., None, :]


class Attention(Layer):
    """rest -> q, k, v in one product -> attention on whole sequences -> Contract -> rest"""

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
        dropout: float,
        init: Init,
        out_init: Init,
        head_norm_eps: float | None = None,
    ) -> None:
        """`head_norm_eps`: the eps of an RMSNorm of every query and key head; None for no such norm."""
        super().__init__(grid, policy)
        self.held = Heads.of(heads, kv_heads, grid, policy)
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, head_dim, dropout
        self.q = Expand(grid, policy, features, heads * head_dim, bias=bias, init=init)
        self.k = Expand(grid, policy, features, kv_heads * head_dim, bias=bias, init=init)
        self.v = Expand(grid, policy, features, kv_heads * head_dim, bias=bias, init=init)
        self.out = Contract(grid, policy, heads * head_dim, features, bias=bias, init=out_init)
        normed = head_norm_eps is not None
        self.q_norm = HeadNorm(grid, policy, head_dim, eps=head_norm_eps) if normed else None
        self.k_norm = HeadNorm(grid, policy, head_dim, eps=head_norm_eps) if normed else None

    @property
    def drops(self) -> bool:
        """Whether attention dropout is drawn now."""
        return self.training and self.dropout > 0

    @property
    def not_recordable(self) -> str:
        """Why no CUDA graph can contain this layer; empty if one can."""
        return f"attention dropout of {self.label} draws from a generator that the host seeds" if self.drops else ""

    @cached_property
    def kind(self) -> HeadKind:
        """How heads lie in this rank's q, k and v, if K and V are cut as the queries are."""
        queries, keys = len(self.held.queries), len(self.held.keys)
        widths = tuple(number * self.head_dim for number in (queries, keys, keys))
        return HeadKind(self.head_dim, widths, queries != keys)

    def forward(self, a: Tensor, batch: Batch) -> Tensor:
        return self.out.leave(self.engine.alone(self.turns(a, batch)), batch.tokens).wait()

    def turns(self, a: Tensor, batch: Batch) -> Turns[Tensor]:
        """Compute everything up to `out.leave`, which brings the result to rest."""
        layers, out, held = [self.q, self.k, self.v], self.out, self.held
        self.refuse_hooks(*layers, out)
        mix: Callable[..., Tensor] = self._mix
        if held.shared:
            given = yield from _read_shared(layers, a, batch.tokens, held)
        else:
            qkv = yield from expand_joined(layers, a, batch.tokens)
            if self._compiled(a) and self.q_norm is None:
                mix, given = self._mix_joined, [qkv]
            else:
                given = take_apart(qkv, self.kind.widths)
        if self.policy.recompute == "attention":
            # tensors as arguments: whoever moves or counts what autograd keeps then sees them
            mixed = recompute(mix, self.clock, batch, *given)
        else:
            mixed = mix(batch, *given)
        return (yield from out.turns(mixed, batch.tokens))

    def _compiled(self, a: Tensor) -> bool:
        """Return whether attention runs compiled; torch's generator, which dropout draws from, cannot be compiled."""
        return self.policy.compile and not a.is_meta and not self.drops

    def _mix_joined(self, batch: Batch, qkv: Tensor) -> Tensor:
        """Compute what lies between the two products in one function: [tokens, columns] -> [tokens, columns]."""
        return kernels.compiled_for(kernels.attend_from, self.kind)(qkv, batch.rows, batch.rope, batch.mask)

    def _mix(self, batch: Batch, *qkv: Tensor) -> Tensor:
        """Compute what lies between the two products: [tokens, columns] -> [tokens, columns]."""
        held, kind, q_norm, k_norm = self.held, self.kind, self.q_norm, self.k_norm
        q, k, v = (part.reshape(batch.rows, batch.seq, -1, self.head_dim) for part in qkv)
        if held.shared:
            queries_per_key = self.heads // self.kv_heads
            wanted = Counter(query // queries_per_key - held.keys.start for query in held.queries)
            k, v = select_heads(k, wanted), select_heads(v, wanted)
            kind = kind._replace(grouped=q.shape[2] != k.shape[2])
        if q_norm is not None and k_norm is not None:
            q, k = q_norm(q), k_norm(k)
        if self._compiled(q):
            return kernels.compiled_for(kernels.attend, kind)(q, k, v, batch.rope, batch.mask)
        if batch.rope is not None:
            v = v.contiguous()  # frees the output of the product, of which v is a third or less
        if not self.drops:
            return kernels.attend(q, k, v, batch.rope, batch.mask, kind=kind)
        with seeded(self.clock.key(self.label, self.grid, inner(self.policy.activations)), q.device):
            return kernels.attend(q, k, v, batch.rope, batch.mask, self.dropout, kind=kind)


def read_heads(layers: Sequence[Expand], a: Tensor, tokens: int, held: Heads) -> Turns[Sequence[Tensor]]:
    """Return this rank's q, k and v, [m/z, heads * head_dim] each; K and V have the heads `held.keys`."""
    return _read_shared(layers, a, tokens, held) if held.shared else expand_in_turns(layers, a, tokens)


def _read_shared(layers: Sequence[Expand], a: Tensor, tokens: int, held: Heads) -> Turns[Sequence[Tensor]]:
    """Return q, k and v with K and V whole over y, and over x too if x would cut through a head."""
    query, key, value = layers
    site = query.site(tokens, label_of(layers))
    widths = [key.width, value.width]
    out = yield from read(layers, a, tokens)
    q, kv = take_apart(out, [query.width, sum(widths)])
    spreading, sharing = spread(q, site, [query.width]), whole_over_y(kv, site)
    yield  # both messages are in flight
    q, kv = spreading.wait(), sharing.wait()
    if LORA in query._modules:
        q = add_delta(query, a, tokens, q)
    if held.over_x:
        kv = whole_over_x(kv, site, widths).wait()
    return q, *take_apart(kv, [kv.shape[1] // 2] * 2)


def select_heads(a: Tensor, wanted: Counter[int]) -> Tensor:
    """Return the KV heads that are read: each once if all are read equally often, otherwise once per query."""
    heads = sorted(wanted)
    if len(set(wanted.values())) == 1:
        return a[:, :, heads[0] : heads[-1] + 1]
    # Expanded and joined rather than indexed: backward is then a plain sum, in the same order in every run.
    return torch.cat([a[:, :, head : head + 1].expand(-1, -1, wanted[head], -1) for head in heads], dim=2)

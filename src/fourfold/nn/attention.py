"""Causal attention on whole sequences, heads cut over the grid.

The query heads of rank (x, y) are block x*Y + y, or block x if activations are replicated. Key and value heads are cut
in the same way if their number divides as well. Otherwise K and V are made whole over the axes that cut too finely, and
every rank selects the heads that its queries read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from fourfold import kernels
from fourfold.context.move import ContextAttention
from fourfold.context_way import ContextWay
from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.kernels import HeadKind
from fourfold.layout import FEATURES, Init, Layout, inner
from fourfold.nn.layer import Layer, recompute
from fourfold.nn.linear import Contract, Expand, expand_in_turns, expand_joined, label_of, read
from fourfold.nn.lora import LORA, add_delta
from fourfold.nn.norm import HeadNorm
from fourfold.nn.rng import seeded
from fourfold.nn.router import Sequences
from fourfold.operators import spread, take_apart, whole_over_x, whole_over_y
from fourfold.policy import Policy
from fourfold.tiles import Documents, Tile, Tiles, attend, document_lengths, document_tiles


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: == of tensors is no bool
class Batch:
    """What attention must know about the rows of a (data, z) place."""

    rows: int
    seq: int
    positions: Tensor | None = None
    """[rows, seq], 0 at the first token of every document; None if a row is one document."""
    tiles: Tiles | Documents | None = None
    """Packed documents, in all rows one after another; None if a row is one document."""
    context: ContextAttention | None = None
    """How tokens read those that other members of a context group hold. The batch is then one row: the tokens that this
    place holds of the rows of its group, with their positions."""
    rope: tuple[Tensor, Tensor] | None = None
    """The tables of rotary positions (`Rope.tables`)."""
    cut: CutRow | None = None
    """The row of which the batch is one half, with its positions; None if the batch has whole rows."""
    half: int = 0
    """Which half of that row."""
    sequences: Sequences | None = None
    """Which tokens make a sequence, if routers of mixtures have to know."""

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        positions: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None,
        documents: Sequence[int] | None = None,
        most: int | None = None,
    ) -> Batch:
        """`documents` are the lengths of packed documents, if the host knows them; if it only knows how many there are
        at `most`, the device reads the positions; else the host does."""
        rows, seq = tokens.shape
        if positions is None:
            return cls(rows, seq, rope=rope)
        if most is not None:
            return cls(rows, seq, positions, Documents(positions, most), rope=rope)
        lengths = documents or ([seq] * rows if tokens.is_meta else document_lengths(positions))
        return cls(rows, seq, positions, document_tiles(lengths), rope=rope)

    @property
    def tokens(self) -> int:
        return self.rows * self.seq

    @property
    def by_rows(self) -> bool:
        """Whether attention reads whole rows; such attention can be compiled."""
        return self.tiles is None and self.context is None and self.cut is None


class CutRow:
    """A row that is cut into two halves: attention of the second one also reads the keys of the first.

    Halves take turns, and the second is never ahead. So in every layer the keys of the first are there in time.
    """

    def __init__(self, first: int, second: int) -> None:
        """The halves have so many tokens."""
        self.tiles = Tiles([Tile(range(first), range(first))]), Tiles([Tile(range(second), range(first + second))])
        """What the queries of each half read."""
        for tiles in self.tiles:
            tiles.recurring = True
        self._keys: dict[str, tuple[Tensor, Tensor]] = {}
        """By layer the keys and values of the first half, until the second reads them."""

    def attend(self, half: int, label: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return what the queries of a half read in a layer: [tokens, heads, head_dim] each, at their positions."""
        if half == 0:
            self._keys[label] = k, v
        else:
            before = self._keys.pop(label)
            k, v = (torch.cat(pair) for pair in zip(before, (k, v), strict=True))
        return attend(q, k, v, self.tiles[half])


def document_positions(lengths: Sequence[int]) -> Tensor:
    """Return the position of every token in its document, [tokens] on the host, of documents one after another."""
    sizes = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    ends = sizes.cumsum(0)
    return torch.arange(sum(lengths), device="cpu") - (ends - sizes).repeat_interleave(sizes)


def positions_on_device(lengths: Tensor, shape: torch.Size) -> Tensor:
    """Return the same as [rows, seq] from lengths on a device, with zeros behind them; the host waits for nothing."""
    tokens = shape.numel()
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=tokens)
    return (torch.arange(tokens, device=lengths.device) - starts).view(shape)


def cut_documents(lengths: Sequence[int], tokens: Sequence[int]) -> list[list[int]]:
    """Return the lengths of the documents in each of several parts of so many tokens; none may lie in two parts."""
    found: list[list[int]] = []
    left = iter(lengths)
    for part in tokens:
        found.append([])
        while part > 0:
            found[-1].append(next(left))
            part -= found[-1][-1]
        if part:
            raise ValueError(f"a document of {found[-1][-1]} tokens ends {-part} tokens behind its part")
    return found


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
        way = ContextWay.parse(self.policy.context_way) if self.policy.context_way != "auto" else None
        if way is not None and way.over == "exchange" and self.grid.shape.context > way.neighbours:
            return (
                f"with context_way={self.policy.context_way} the host decides by the lengths of documents how much "
                f"travels to attention of {self.label}; gather and ring can be recorded"
            )
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
            if self._compiled(a) and self.q_norm is None and batch.by_rows:
                mix, given = self._mix_joined, [qkv]
            else:
                given = take_apart(qkv, self.kind.widths)
        if batch.context is not None and self.policy.recompute != "attention":
            mixed = yield from self._over_context(batch, *given)
        elif self.policy.recompute == "attention":
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
        return kernels.compiled_for(kernels.attend_from, self.kind)(qkv, batch.rows, batch.rope)

    def _mix(self, batch: Batch, *qkv: Tensor) -> Tensor:
        """Compute what lies between the two products: [tokens, columns] -> [tokens, columns]."""
        if batch.context is not None:
            return self.engine.alone(self._over_context(batch, *qkv))
        q, k, v = self._heads(batch, *qkv)
        kind = self.kind._replace(grouped=q.shape[2] != k.shape[2])
        if batch.cut is not None:
            return batch.cut.attend(batch.half, self.label, *self._rotated(batch, q, k, v)).flatten(1)
        if batch.tiles is not None:
            return self._read_tiles(batch, batch.tiles, q, k, v)
        if self._compiled(q):
            return kernels.compiled_for(kernels.attend, kind)(q, k, v, batch.rope)
        if batch.rope is not None:
            v = v.contiguous()  # frees the output of the product, of which v is a third or less
        if not self.drops:
            return kernels.attend(q, k, v, batch.rope, kind=kind)
        with self._dropping(q.device):
            return kernels.attend(q, k, v, batch.rope, self.dropout, kind=kind)

    def _heads(self, batch: Batch, *qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query heads of this rank and the KV heads that they read: [rows, seq, heads, head_dim] each."""
        held, q_norm, k_norm = self.held, self.q_norm, self.k_norm
        q, k, v = (part.reshape(batch.rows, batch.seq, -1, self.head_dim) for part in qkv)
        if held.shared:
            queries_per_key = self.heads // self.kv_heads
            wanted = Counter(query // queries_per_key - held.keys.start for query in held.queries)
            k, v = select_heads(k, wanted), select_heads(v, wanted)
        if q_norm is not None and k_norm is not None:
            q, k = q_norm(q), k_norm(k)
        return q, k, v

    def _over_context(self, batch: Batch, *qkv: Tensor) -> Turns[Tensor]:
        """Attend to tokens of all members of the context group: [tokens, columns] -> [tokens, columns]."""
        if batch.context is None:
            raise ValueError("this batch is not cut over a context group")
        q, k, v = self._rotated(batch, *self._heads(batch, *qkv))
        return (yield from batch.context.attend(q, k, v, self.engine, self.label)).flatten(1)

    def _rotated(self, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return heads at their positions, [rows, seq, heads, head_dim] -> [tokens, heads, head_dim]."""
        if batch.rope is not None:
            rotate = kernels.region(kernels.rotate, q, compiled=self._compiled(q))
            q, k, v = rotate(q, *batch.rope), rotate(k, *batch.rope), v.contiguous()
        return [part.flatten(0, 1) for part in (q, k, v)]

    def _read_tiles(self, batch: Batch, tiles: Tiles | Documents, *heads: Tensor) -> Tensor:
        """Attend to packed documents: heads [rows, seq, heads, head_dim] -> [tokens, columns]."""
        q, k, v = self._rotated(batch, *heads)
        if not self.drops:
            return attend(q, k, v, tiles).flatten(1)
        with self._dropping(q.device):
            return attend(q, k, v, tiles, self.dropout).flatten(1)

    def _dropping(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a block that draws the dropout of this layer in this pass."""
        return seeded(self.clock.key(self.label, self.grid, inner(self.policy.activations)), device)


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

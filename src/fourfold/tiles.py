"""Attention over tiles: which queries read which keys, without a mask of every query against every key.

Queries and keys lie in one row each, [tokens, heads, head_dim]. A `Tile` is a range of queries and the range of keys
that they read: all of them, or causally. A packed document is a causal tile whose keys are its own tokens; the part
[a, b) of a document is one whose keys are [0, b). Memory grows with the tokens, and work with the pairs that are read.

A query may read several tiles, whose results are merged:

    E15  lse = log(sum_j exp(lse_j)),  out = sum_j exp(lse_j - lse) out_j

Backward of a tile takes the merged out and lse, so tiles need nothing of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fourfold.kernels import widen


class Tile(NamedTuple):
    """A range of queries and the keys that they read."""

    queries: range
    keys: range
    causal: bool = True
    """Whether the last query reads all keys and each one before it one key less; otherwise all read all."""
    times: int = 1
    """The number of equal tiles, side by side in both ranges."""


def document_tiles(lengths: Iterable[int]) -> tuple[Tile, ...]:
    """Return the tiles of documents of these lengths, one after another; equal neighbours share a tile."""
    found: list[Tile] = []
    start, last = 0, 0
    for length in lengths:
        stop = start + length
        if length == last:
            tokens = range(found[-1].queries.start, stop)
            found[-1] = Tile(tokens, tokens, times=found[-1].times + 1)
        else:
            found.append(Tile(range(start, stop), range(start, stop)))
        start, last = stop, length
    return tuple(found)


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], dropout: float = 0.0) -> Tensor:
    """Return what queries [tokens, heads, head_dim] read of the keys and values: [tokens, heads, head_dim].

    Several query heads may share a KV head. Every query must be in a tile. Dropout needs tiles that share no queries.
    """
    if dropout:
        return _attend_with_dropout(q, k, v, tiles, dropout)
    return Attend.apply(q, k, v, tiles)


class Attend(torch.autograd.Function):
    """Attention of queries over their tiles; keeps q, k, v, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Tensor:
        reading = Reading(q)
        reading.read(k, v, tiles)
        out, lse = reading.result()
        ctx.tiles = tiles
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        gradients = Unreading(dout, q, out, lse)
        dk, dv = gradients.unread(k, v, ctx.tiles)
        return gradients.dq.to(q.dtype), dk, dv, None


class Reading:
    """What queries have read so far; keys may come part by part."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self._parts: dict[range, tuple[Tensor, Tensor]] = {}
        """out and lse by their range of queries."""

    def read(self, k: Tensor, v: Tensor, tiles: Iterable[Tile]) -> None:
        """Read further tiles of these keys and values."""
        for tile in tiles:
            for piece in _pieces(tile):
                out, lse = _read(self.q, k, v, piece)
                before = self._parts.get(tile.queries)
                self._parts[tile.queries] = (out, lse) if before is None else _merged(*before, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return out [tokens, heads, head_dim] and lse [tokens, heads]."""
        ranges = sorted(self._parts, key=lambda queries: queries.start)
        borders = [0, *(queries.stop for queries in ranges)]
        if [*(queries.start for queries in ranges), len(self.q)] != borders:
            raise ValueError(f"tiles must cover all {len(self.q)} queries; got {ranges}")
        outs, sums = zip(*(self._parts.pop(queries) for queries in ranges), strict=True)
        return torch.cat(outs).to(self.q.dtype) if len(outs) > 1 else outs[0].to(self.q.dtype), torch.cat(sums)


class Unreading:
    """The gradients of a reading, for keys that may come part by part again."""

    def __init__(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
        self.dq = torch.zeros_like(widen(q))
        """The sum so far, in fp32 or wider."""

    def unread(self, k: Tensor, v: Tensor, tiles: Iterable[Tile]) -> tuple[Tensor, Tensor]:
        """Add to dq, and return dk and dv, what these tiles owe."""
        dk, dv = (torch.zeros_like(widen(part)) for part in (k, v))
        for tile in tiles:
            for piece in _pieces(tile):
                parts = _unread(self.dout, self.q, k, v, self.out, self.lse, piece)
                for total, span, part in zip((self.dq, dk, dv), (0, 1, 1), parts, strict=True):
                    _of(total, piece, span).add_(part)
        return dk.to(k.dtype), dv.to(v.dtype)


# --- pieces: what one kernel computes


class _KernelPiece(NamedTuple):
    """A part of a tile in which causal queries and keys are equally many."""

    spans: tuple[range, range]
    """The tokens of the queries and the keys of all equal tiles."""
    offsets: tuple[slice, slice]
    """The part of each tile's queries and keys."""
    causal: bool
    times: int


def _pieces(tile: Tile) -> Iterator[_KernelPiece]:
    """Yield the keys that all queries read, then the square. torch aligns other causal masks at the first query."""
    queries, keys = len(tile.queries) // tile.times, len(tile.keys) // tile.times
    spans, everything = (tile.queries, tile.keys), slice(None)
    if not tile.causal:
        yield _KernelPiece(spans, (everything, everything), causal=False, times=tile.times)
        return
    if keys < queries:
        raise ValueError(f"a causal tile of {queries} queries has at least as many keys, not {keys}")
    if keys > queries:
        yield _KernelPiece(spans, (everything, slice(keys - queries)), causal=False, times=tile.times)
    yield _KernelPiece(spans, (everything, slice(keys - queries, None)), causal=True, times=tile.times)


def _of(tensor: Tensor, piece: _KernelPiece, side: int) -> Tensor:
    """Return the part of a tensor over queries (side 0) or keys (side 1): [times, tokens, heads, ...]."""
    span = piece.spans[side]
    return tensor[span.start : span.stop].unflatten(0, (piece.times, -1))[:, piece.offsets[side]]


def _read(q: Tensor, k: Tensor, v: Tensor, piece: _KernelPiece) -> tuple[Tensor, Tensor]:
    """Return out [tokens, heads, head_dim] and lse [tokens, heads] of a piece."""
    heads = [_of(part, piece, side).transpose(1, 2) for part, side in ((q, 0), (k, 1), (v, 1))]
    if _has_fused(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, piece.causal)
    else:
        out, lse = read_by_products(*heads, causal=piece.causal)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _unread(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: _KernelPiece
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a piece adds to dq, dk and dv: [times, tokens, heads, head_dim]."""
    sides = ((dout, 0), (q, 0), (k, 1), (v, 1), (out, 0), (lse, 0))
    heads = [_of(part, piece, side).transpose(1, 2) for part, side in sides]
    if _has_fused(q):
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*heads, 0.0, piece.causal)
    else:
        dq, dk, dv = unread_by_products(*heads, causal=piece.causal)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _has_fused(a: Tensor) -> bool:
    """Return whether torch has a fused kernel for these tensors that also returns lse; a dry run counts its memory."""
    return a.device.type in ("cpu", "meta")


def read_by_products(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Return out and lse of heads [times, heads, tokens, head_dim], with products alone, in fp32 or wider."""
    scores = _scores(q, k, causal=causal)
    lse = scores.logsumexp(3)
    shares = (scores - lse[..., None]).exp()
    return (shares @ _for_queries(widen(v), q)).to(q.dtype), lse


def unread_by_products(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv of the same."""
    dout, out = widen(dout), widen(out)
    shares = (_scores(q, k, causal=causal) - lse[..., None]).exp()
    dscores = shares * (dout @ _for_queries(widen(v), q).mT - (dout * out).sum(3, keepdim=True)) * q.shape[3] ** -0.5
    dk, dv = dscores.mT @ widen(q), shares.mT @ dout
    dk, dv = (each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (dk, dv))  # over the queries of a KV head
    return dscores @ _for_queries(widen(k), q), dk, dv


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    scores = widen(q) @ _for_queries(widen(k), q).mT * q.shape[3] ** -0.5
    if not causal:
        return scores
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)


def _for_queries(heads: Tensor, q: Tensor) -> Tensor:
    """Return KV heads once for every query head that reads them."""
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1)


def _merged(out: Tensor, lse: Tensor, other: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """E15 of two results, in fp32 or wider."""
    total = torch.logaddexp(lse, others)
    share, rest = (part.sub(total).exp()[..., None] for part in (lse, others))
    return widen(out) * share + widen(other) * rest, total


def _attend_with_dropout(q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile], dropout: float) -> Tensor:
    """Return the same with dropout, whose kernel keeps no lse; so a query cannot have two tiles."""
    found = []
    for tile in tiles:
        (piece,) = _pieces(tile)
        queries, keys, values = (_of(part, piece, side).transpose(1, 2) for part, side in ((q, 0), (k, 1), (v, 1)))
        options: Any = dict(dropout_p=dropout, is_causal=piece.causal, enable_gqa=q.shape[1] != k.shape[1])
        out = functional.scaled_dot_product_attention(queries, keys, values, **options)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)

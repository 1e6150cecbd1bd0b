"""Attention over tiles: which queries read which keys, without a mask of every query against every key.

Queries and keys lie in one row each, [tokens, heads, head_dim]. A `Tile` is a range of queries and the range of keys
that they read: all of them, or causally. A packed document is a causal tile whose keys are its own tokens; the part
[a, b) of a document is one whose keys are [0, b). Memory grows with the tokens, and work with the pairs that are read.

A query may read several tiles, whose results are merged:

    E15  lse = log(sum_j exp(lse_j)),  out = sum_j exp(lse_j - lse) out_j

Backward of a tile takes the merged out and lse, so tiles need nothing of each other.

`Tiles.calls` says how kernels compute them. In half precision on a GPU one kernel reads many tiles of any lengths
(`Pack`); elsewhere, and where long tiles come in the same lengths in every batch, a kernel reads one (`TilePiece`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from fourfold.kernels import widen

HALF = (torch.bfloat16, torch.float16)
TOKENS_PER_DOCUMENT = 64
"""The fewest tokens of a document on average for which recorded steps have room: blocks of threads start for every
document that there might be."""
LONG = 1024
"""The queries from which on a tile fills a GPU by itself, so that the faster kernel of cuDNN is used. cuDNN takes 40 ms
to plan for lengths that it has not seen."""
LSE_ROWS = 32
"""torch's memory-efficient attention pads lse to a multiple of this many queries."""


class Tile(NamedTuple):
    """A range of queries and the keys that they read."""

    queries: range
    keys: range
    causal: bool = True
    """Whether the last query reads all keys and each one before it one key less; otherwise all read all."""
    times: int = 1
    """The number of equal documents, side by side, each of which reads itself."""


class Tiles(tuple[Tile, ...]):
    """Tiles that are read together, with the calls of kernels that read them: made once for all layers."""

    recurring = False
    """Whether later batches have tiles of the same lengths, as rows without packed documents do."""

    def calls(self, q: Tensor) -> Sequence[Call]:
        """Return what kernels compute, for queries like these; those that read first come first."""
        if not takes_packs(q) or (self._long and _has_cudnn(q)):
            return self.pieces
        packs: dict[torch.device, list[Pack]] = self.__dict__.setdefault("packs", {})
        if q.device not in packs:
            packs[q.device] = list(_packs(self, q.device))
        return packs[q.device]

    @cached_property
    def pieces(self) -> list[TilePiece]:
        return list(_pieces(self))

    @cached_property
    def _long(self) -> bool:
        """Whether these tiles are worth a call each of a kernel that is planned for their lengths."""
        return self.recurring and all(len(tile.queries) >= LONG * tile.times for tile in self)

    @cached_property
    def _covered(self) -> int:
        """The number of queries up to the first that is in no tile."""
        covered = 0
        for start, stop in sorted((tile.queries.start, tile.queries.stop) for tile in self):
            if start > covered:
                break
            covered = max(covered, stop)
        return covered

    def require_all(self, queries: int) -> None:
        """Raise an error if a query is in no tile."""
        if self._covered != queries:
            raise ValueError(f"tiles must cover all {queries} queries; got {[tile.queries for tile in self]}")


def document_tiles(lengths: Iterable[int]) -> Tiles:
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
    return Tiles(found)


class Documents:
    """Packed documents of which a GPU knows the beginnings and the host how many there are at most: recorded steps read
    other documents in every replay.
    """

    def __init__(self, positions: Tensor, most: int) -> None:
        """`positions` [rows, seq] are 0 where a document begins; one that goes on in the next row is cut there."""
        self.positions, self.most = positions, most

    @cached_property
    def _pack(self) -> Pack:
        tokens = self.positions.numel()
        begins = self.positions == 0
        begins[:, 0] = True
        room = self.most + len(begins)  # which cut documents may need as well
        starts = torch.nonzero_static(begins.flatten(), size=room + 1, fill_value=tokens)
        lengths = starts.flatten().int()
        everything, longest = slice(0, tokens), self.positions.shape[1]
        return Pack(everything, everything, True, True, lengths, lengths, longest, longest)

    @cached_property
    def _tiles(self) -> Tiles:
        return document_tiles(document_lengths(self.positions))

    def calls(self, q: Tensor) -> Sequence[Call]:
        """As of `Tiles`. Where no kernel reads documents of unknown lengths, the host waits for them."""
        if takes_packs(q):
            return [self._pack]
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "documents whose lengths the host does not know are read in bf16 and fp16 by heads of at most 256, a "
                f"multiple of 8; these are {q.dtype} of {q.shape[-1]}"
            )
        return self._tiles.calls(q)

    @property
    def pieces(self) -> list[TilePiece]:
        return self._tiles.pieces

    def require_all(self, queries: int) -> None:
        """Every token is in a document."""


def document_lengths(positions: Tensor) -> list[int]:
    """Return the lengths of packed documents, over all rows; the host waits for the positions."""
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a recorded step needs the number of packed documents: give documents=, see pad_lengths")
    starts = (positions.flatten() == 0).nonzero().flatten().tolist()
    return [stop - start for start, stop in pairwise([*starts, positions.numel()])]


def pad_lengths(lengths: Sequence[int], tokens: int) -> Tensor:
    """Return the lengths of packed documents with zeros behind them, in a tensor whose size hardly ever depends on
    their number: a recorded step can then read other documents. It is doubled while they do not fit."""
    room = max(16, tokens // TOKENS_PER_DOCUMENT)
    while room < len(lengths):
        room *= 2
    return functional.pad(torch.tensor(lengths, device="cpu"), (0, room - len(lengths)))


def without_padding(lengths: Sequence[int]) -> Sequence[int]:
    """Return the lengths of documents without the zeros of `pad_lengths`."""
    last = next((index for index in reversed(range(len(lengths))) if lengths[index]), -1)
    return lengths[: last + 1]


def attend(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles | Documents, dropout: float = 0.0) -> Tensor:
    """Return what queries [tokens, heads, head_dim] read of the keys and values: [tokens, heads, head_dim].

    Several query heads may share a KV head. Every query must be in a tile. Dropout needs tiles that share no queries.
    """
    if dropout:
        return _attend_with_dropout(q, k, v, tiles, dropout)
    return Attend.apply(q, k, v, tiles)


class Attend(torch.autograd.Function):
    """Attention of queries over their tiles; keeps q, k, v, out and lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles | Documents) -> Tensor:
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
        return gradients.dq, dk, dv, None


class Reading:
    """What queries have read so far. Keys may come part by part; those that come first are read by all queries."""

    def __init__(self, q: Tensor) -> None:
        self.q = q
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def read(self, k: Tensor, v: Tensor, tiles: Tiles | Documents) -> None:
        """Read further tiles of these keys and values."""
        begun = self._out is not None
        if not begun:
            tiles.require_all(len(self.q))
        for call in tiles.calls(self.q):
            queries = call.queries
            out, lse = call.read(_rows(self.q, queries), k[call.keys], v[call.keys])
            if self._out is None or self._lse is None:
                if _is_all(queries, self.q):
                    self._out, self._lse = out, lse
                    continue
                self._out, self._lse = torch.empty_like(self.q), lse.new_empty(self.q.shape[:2])
            if begun or not call.first:
                self._out = widen(self._out)
                out, lse = _merged(_rows(self._out, queries), _rows(self._lse, queries), out, lse)
            self._out[queries] = out
            self._lse[queries] = lse

    def result(self) -> tuple[Tensor, Tensor]:
        """Return out [tokens, heads, head_dim] and lse [tokens, heads]."""
        if self._out is None or self._lse is None:
            raise RuntimeError("nothing was read")
        return self._out.to(self.q.dtype), self._lse


class Unreading:
    """The gradients of a reading, for keys that may come part by part again."""

    def __init__(self, dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
        self.dout, self.q, self.out, self.lse = dout, q, out, lse
        self._dq = _Sum(q)

    @property
    def dq(self) -> Tensor:
        """The sum so far."""
        return self._dq.total()

    def unread(self, k: Tensor, v: Tensor, tiles: Tiles | Documents) -> tuple[Tensor, Tensor]:
        """Add to dq, and return dk and dv, what these tiles owe."""
        sums = self._dq, _Sum(k), _Sum(v)
        for call in tiles.calls(self.q):
            dout, q, out, lse = (_rows(part, call.queries) for part in (self.dout, self.q, self.out, self.lse))
            parts = call.unread(dout, q, k[call.keys], v[call.keys], out, lse)
            for total, rows, part in zip(sums, (call.queries, call.keys, call.keys), parts, strict=True):
                total.add(rows, part)
        return sums[1].total(), sums[2].total()


class _Sum:
    """The sum of parts over some rows each of a tensor, in fp32 or wider unless one part is all of it."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add(self, rows: slice | Tensor, part: Tensor) -> None:
        if self._sum is None and _is_all(rows, self._like):
            self._sum = part
            return
        self._sum = torch.zeros_like(widen(self._like)) if self._sum is None else widen(self._sum)
        if isinstance(rows, slice):
            self._sum[rows].add_(part)
        else:
            self._sum[rows] += part  # rows are named once, so that no two parts are added at the same time

    def total(self) -> Tensor:
        return torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)


def _rows(tensor: Tensor, rows: slice | Tensor) -> Tensor:
    return tensor if _is_all(rows, tensor) else tensor[rows]


def _is_all(rows: slice | Tensor, tensor: Tensor) -> bool:
    return isinstance(rows, slice) and rows.stop - rows.start == len(tensor)


# --- what one kernel computes


class Call(Protocol):
    """Some queries, and the keys that they read."""

    @property
    def queries(self) -> slice | Tensor:
        """The rows of q, each once."""

    @property
    def keys(self) -> slice: ...
    @property
    def first(self) -> bool:
        """Whether these queries have read no other of the tiles before."""

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return out [tokens, heads, head_dim] and lse [tokens, heads], given these queries and keys alone."""
        ...

    def unread(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what this adds to dq, dk and dv."""
        ...


@dataclass(frozen=True)
class TilePiece:
    """A tile, or a part of one in which causal queries and keys are equally many."""

    queries: slice
    keys: slice
    first: bool
    causal: bool
    times: int

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.by_head(q, k, v)
        if _has_fused(q):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, self.causal)
        elif _has_cudnn(q):
            out, lse = _read_with_cudnn(q, k, v, causal=self.causal)
        elif _has_efficient(q):
            out, lse = _read_efficiently(q, k, v, causal=self.causal)
        else:
            out, lse = read_by_products(q, k, v, causal=self.causal)
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def unread(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.by_head(dout, q, k, v, out, lse)
        if _has_fused(q):
            backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            dq, dk, dv = backward(*heads, 0.0, self.causal)
        elif _has_cudnn(q):
            dq, dk, dv = _unread_with_cudnn(*heads, causal=self.causal)
        elif _has_efficient(q):
            dq, dk, dv = _unread_efficiently(*heads, causal=self.causal)
        else:
            dq, dk, dv = unread_by_products(*heads, causal=self.causal)
        dq, dk, dv = (part.transpose(1, 2).flatten(0, 1) for part in (dq, dk, dv))
        return dq, dk, dv

    def by_head(self, *parts: Tensor) -> list[Tensor]:
        """[times * tokens, heads, ...] -> [times, heads, tokens, ...]"""
        return [part.unflatten(0, (self.times, -1)).transpose(1, 2) for part in parts]


def _pieces(tiles: Iterable[Tile]) -> Iterator[TilePiece]:
    """Yield the keys that all queries read, then the square. torch aligns other causal masks at the first query."""
    begun: set[int] = set()
    for queries, keys, causal, times in tiles:
        tokens, read = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        first = queries.start not in begun
        begun.add(queries.start)
        if not causal or len(keys) == len(queries):
            yield TilePiece(tokens, read, first, causal, times)
            continue
        if len(keys) < len(queries):
            raise ValueError(f"a causal tile of {len(queries)} queries has at least as many keys, not {len(keys)}")
        if times > 1:
            raise ValueError("equal tiles side by side have as many keys as queries")
        square = keys.stop - len(queries)
        yield TilePiece(tokens, slice(keys.start, square), first, causal=False, times=1)
        yield TilePiece(tokens, slice(square, keys.stop), first=False, causal=True, times=1)


def _has_fused(a: Tensor) -> bool:
    """Return whether torch has its fused kernel for the CPU for these tensors; a dry run counts its memory."""
    return a.device.type in ("cpu", "meta")


def _has_cudnn(a: Tensor) -> bool:
    """Return whether cuDNN's attention takes these heads; its backward does not give the same bits in every run."""
    fast = a.is_cuda and a.dtype in HALF and a.shape[-1] % 8 == 0 and a.shape[-1] <= 128
    return (
        fast and torch.cuda.get_device_capability(a.device)[0] >= 9 and not torch.are_deterministic_algorithms_enabled()
    )


def _read_with_cudnn(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    return out, lse.squeeze(3)


def _unread_with_cudnn(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of dropout
    lengths = None, None, q.shape[2], k.shape[2]
    given = dout, q, k, v, out, lse.contiguous()[..., None], nothing, nothing, None
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(*given, *lengths, 0.0, causal)


def _has_efficient(a: Tensor) -> bool:
    """Return whether torch's memory-efficient attention takes these tensors: those that fill 16 bytes."""
    return a.is_cuda and a.dtype != torch.float64 and a.shape[-1] * a.itemsize % 16 == 0


def _read_efficiently(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    k, v = _for_queries(k, q), _for_queries(v, q)
    out, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
    return out, lse[:, :, : q.shape[2]]


def _unread_efficiently(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    padded = functional.pad(lse, (0, -lse.shape[2] % LSE_ROWS)).contiguous()
    every, nothing = [True, True, True, False], torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        dout, q, _for_queries(k, q), _for_queries(v, q), None, out, padded, nothing, nothing, 0.0, every, causal
    )
    return dq, _of_keys(dk, k), _of_keys(dv, v)


@dataclass(frozen=True, eq=False)
class Pack:
    """Tiles whose keys lie one after another, for the kernel that takes many lengths (FlashAttention).

    Tile i has the queries `lengths_q[i]` to `lengths_q[i + 1]`, and likewise keys. Keys that no query reads are tiles
    without queries. A causal mask ends at the last query and the last key, as that of a `Tile`.
    """

    queries: slice | Tensor
    keys: slice
    first: bool
    causal: bool
    lengths_q: Tensor
    lengths_k: Tensor
    longest_q: int
    longest_k: int

    @property
    def _lengths(self) -> tuple[Tensor, Tensor, int, int]:
        return self.lengths_q, self.lengths_k, self.longest_q, self.longest_k

    def read(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *self._lengths, 0.0, self.causal, False)
        return out, lse.t()

    def unread(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        nothing = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of dropout
        options = *self._lengths, 0.0, self.causal, nothing, nothing
        given = dout.contiguous(), q, k, v, out, lse.t().contiguous()
        return torch.ops.aten._flash_attention_backward(*given, *options)


def takes_packs(a: Tensor) -> bool:
    """Return whether the kernel for many lengths takes these heads."""
    return a.is_cuda and a.dtype in HALF and a.shape[-1] % 8 == 0 and a.shape[-1] <= 256


def _packs(tiles: Iterable[Tile], device: torch.device) -> Iterator[Pack]:
    """Yield packs of tiles whose keys do not overlap, those that are read first before all others."""
    by_kind: dict[tuple[bool, bool], list[tuple[range, range]]] = {}
    begun: set[int] = set()
    for queries, keys, causal, times in tiles:
        length, read = len(queries) // times, len(keys) // times
        if causal and read < length:
            raise ValueError(f"a causal tile of {length} queries has at least as many keys, not {read}")
        kind = by_kind.setdefault((queries.start in begun, causal), [])
        begun.add(queries.start)
        kind += [(queries[n * length : (n + 1) * length], keys[n * read : (n + 1) * read]) for n in range(times)]
    for (again, causal), pairs in sorted(by_kind.items()):
        for packed in _without_overlap(pairs):
            yield _pack(packed, device, first=not again, causal=causal)


def _without_overlap(pairs: Iterable[tuple[range, range]]) -> list[list[tuple[range, range]]]:
    """Return pairs of queries and keys in as few lists as possible, in the order of their keys; in each, keys do not
    overlap and no queries come twice."""
    found: list[list[tuple[range, range]]] = []
    named: list[set[int]] = []
    for queries, keys in sorted(pairs, key=lambda pair: pair[1].start):
        for packed, starts in zip(found, named, strict=True):
            if packed[-1][1].stop <= keys.start and queries.start not in starts:
                break
        else:
            packed, starts = [], set()
            found.append(packed)
            named.append(starts)
        packed.append((queries, keys))
        starts.add(queries.start)
    return found


def _pack(pairs: Sequence[tuple[range, range]], device: torch.device, *, first: bool, causal: bool) -> Pack:
    lengths: list[tuple[int, int]] = []
    start = stop = pairs[0][1].start
    for queries, keys in pairs:
        if keys.start > stop:
            lengths.append((0, keys.start - stop))
        lengths.append((len(queries), len(keys)))
        stop = keys.stop
    of_queries, of_keys = zip(*lengths, strict=True)
    ends = torch.tensor([list(accumulate(each, initial=0)) for each in (of_queries, of_keys)], dtype=torch.int32)
    lengths_q, lengths_k = to_device(ends, device)
    rows = [queries for queries, _ in pairs]
    side_by_side = all(one.stop == other.start for one, other in pairwise(rows))
    chosen = slice(rows[0].start, rows[-1].stop) if side_by_side else indices(rows, device)
    return Pack(chosen, slice(start, stop), first, causal, lengths_q, lengths_k, max(of_queries), max(of_keys))


def indices(ranges: Sequence[range], device: torch.device) -> Tensor:
    """Return the numbers of these ranges, one after another."""
    with torch.inference_mode(mode=False):  # kept for later batches, which may train
        parts = [torch.arange(rows.start, rows.stop, device="cpu") for rows in ranges]
        found = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device="cpu")
        return to_device(found, device)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host, which does not wait for a GPU."""
    if device.type != "cuda":
        return tensor.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a recorded step would read lengths of documents again that the host has planned with once")
    return tensor.pin_memory().to(device, non_blocking=True)


# --- products alone


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
    return dscores @ _for_queries(widen(k), q), _of_keys(dk, k), _of_keys(dv, v)


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    scores = widen(q) @ _for_queries(widen(k), q).mT * q.shape[3] ** -0.5
    if not causal:
        return scores
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -torch.inf)


def _for_queries(heads: Tensor, q: Tensor) -> Tensor:
    """Return KV heads once for every query head that reads them."""
    return heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) if q.shape[1] > heads.shape[1] else heads


def _of_keys(gradients: Tensor, keys: Tensor) -> Tensor:
    """Sum over the queries of each KV head."""
    shared = gradients.shape[1] > keys.shape[1]
    return gradients.unflatten(1, (keys.shape[1], -1)).sum(2) if shared else gradients


def _merged(out: Tensor, lse: Tensor, other: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """E15 of two results, in fp32 or wider."""
    total = torch.logaddexp(lse, others)
    share, rest = (part.sub(total).exp()[..., None] for part in (lse, others))
    return widen(out) * share + widen(other) * rest, total


def _attend_with_dropout(q: Tensor, k: Tensor, v: Tensor, tiles: Tiles | Documents, dropout: float) -> Tensor:
    """Return the same with dropout, whose kernel keeps no lse; so a query cannot have two tiles."""
    found = []
    for piece in tiles.pieces:
        if not piece.first:
            raise ValueError("with dropout a query reads one tile")
        given = _rows(q, piece.queries), k[piece.keys], v[piece.keys]
        heads = piece.by_head(*given)
        options: Any = dict(dropout_p=dropout, is_causal=piece.causal, enable_gqa=q.shape[1] != k.shape[1])
        out = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], **options)
        found.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(found)

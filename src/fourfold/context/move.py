"""How K and V travel inside a context group, and attention over what arrives.

Every member of a group has its own tokens' q, k and v, [m, heads, head_dim]. A way brings each query the keys and
values of its document up to itself; E16 is what a rank sends in forward, in elements:

    gather      everybody gets all K and V                            (c - 1) m 2 h_kv d
    exchange    everybody gets what it reads: nothing inside a place  sum_{j != i} |sends(i, j)| 2 h_kv d
    ring        K and V go around, half of the heads in each direction (c - 1) m 2 h_kv d
    ulysses:u   u neighbours swap tokens for heads, so that each has u times the tokens and a part of the heads;
                then another way over the c/u that have the same heads  (u - 1)/u m (2 h_q + 2 h_kv) d, and that way's

Messages travel by KV heads, so that those of one are attended while the next ones are on their way. Backward moves K
and V again, unless `keep_gathered`, and takes their gradients back the way they came, added in the order of members.

Invariant: what a rank launches over other axes, and which products run between these launches, does not depend on the
documents of its group or on the KV heads of the rank. Ranks along z may be in different context groups, which have
other documents, and ranks along x or y may read unequally many KV heads. So they send unequally many messages over
context, each to members of its own group with the same heads, who send as many. Everything else must be in one order on
all of them; else ranks wait for each other forever, or add up gradients of different parameters if sizes agree. So
attention has these in equal number, however many messages it sends:

    turns      A half that yields once more or once less moves all its later gathers of weights over z (`Prefetcher`).
    products   A product of dw that leaves the `WgradQueue` earlier or later comes before or behind the gradients of
               norms in the reductions over z, and may launch a bucket over x or data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from fourfold import comm
from fourfold.axes import CONTEXT
from fourfold.comm import Pending
from fourfold.context.assign import Assignment
from fourfold.context_way import ContextWay
from fourfold.engine import Engine, Turns
from fourfold.grid import Grid
from fourfold.operators import AsyncResult, once_differentiable
from fourfold.tiles import Reading, Tile, Tiles, Unreading, indices, to_device

MOST_PIECES = 4
"""The most messages that the K and V of one layer travel in."""
PLANS = 8
"""The number of plans, with their indices on the device, that are kept: rows without documents are read alike in every
micro-batch, those of training in two halves at most, those of evaluation likewise."""


def pieces_of(heads: int) -> int:
    """Return the number of messages in which the K and V of so many heads travel, with equally many heads each."""
    return next(number for number in range(min(heads, MOST_PIECES), 0, -1) if heads % number == 0)


# --- who reads what


@lru_cache(maxsize=PLANS)
def ring_tiles(holders: Assignment, reader: int) -> list[Tiles]:
    """Return the tiles of a holder's queries and the keys of each holder, in the order in which they hold them."""
    return [_tiles_between(holders, reader, source) for source in range(len(holders.members))]


def _tiles_between(holders: Assignment, reader: int, source: int) -> Tiles:
    found: list[Tile] = []
    for queries, own in holders.rows(reader):
        for keys, other in holders.rows(source):
            if own == other:
                found.append(Tile(queries, keys))
            elif own.document == other.document and other.stop <= own.start:
                if found and found[-1][:1] == (queries,) and found[-1].keys.stop == keys.start and not found[-1].causal:
                    keys = range(found.pop().keys.start, keys.stop)
                found.append(Tile(queries, keys, causal=False))
    tiles = Tiles(found)
    tiles.recurring = holders.whole_rows
    return tiles


@dataclass(frozen=True)
class KeyPlan:
    """The keys that a holder reads: rows of what it has at hand, ordered so that each document is one range."""

    sent: Tensor
    """The holder's rows that it sends, for one holder after another."""
    to: list[int]
    """The number of rows for each holder."""
    taken: list[int]
    """The number of rows from each holder."""
    order: Tensor
    """Where each key lies at hand."""
    tiles: Tiles

    @classmethod
    @lru_cache(maxsize=PLANS)
    def of(cls, holders: Assignment, me: int, *, everything: bool, device: torch.device) -> KeyPlan:
        """Plan what a holder sends and reads.

        At hand are its own rows, then what it reads of the others; with `everything`, the rows of all holders in order.
        """
        all_of_them = range(len(holders.members))
        own = list(holders.rows(me))
        if everything:
            out = dict.fromkeys(all_of_them, own)
            arriving = {other: list(holders.rows(other)) for other in all_of_them}
            at_hand = arriving.values()
        else:
            out = {other: holders.sends(me, other) if other != me else [] for other in all_of_them}
            arriving = {other: holders.sends(other, me) if other != me else [] for other in all_of_them}
            at_hand = [own, *arriving.values()]
        to, taken = ([sum(len(rows) for rows, _ in moved[other]) for other in all_of_them] for moved in (out, arriving))
        # every document from its first token to the last one that is read, one after another
        last, first, parts = holders.last(me), 0, []
        for rows, segment in (one for some in at_hand for one in some):
            parts.append((segment.document, segment.start, first, len(rows)))
            first += len(rows)
        order, starts, keys = [], {}, 0
        for document, start, row, tokens in sorted(parts):
            read = max(0, min(tokens, last.get(document, 0) - start))
            starts.setdefault(document, keys)
            order.append(range(row, row + read))
            keys += read
        tiles = Tiles(Tile(rows, range(starts[document], starts[document] + stop)) for rows, (document, _, stop) in own)
        tiles.recurring = holders.whole_rows
        sent = [rows for other in all_of_them for rows, _ in out[other]]
        return cls(indices(sent, device), to, taken, indices(order, device), tiles)


@lru_cache(maxsize=PLANS)
def own_tokens(assignment: Assignment, member: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return where a member's tokens lie on the line, and their positions in their documents."""
    segments = [range(start, stop) for _, start, stop in assignment.members[member]]
    return indices(assignment.own(member), device), indices(segments, device)


@lru_cache(maxsize=PLANS)
def holders_of(assignment: Assignment, neighbours: int) -> Assignment:
    """Return what so many neighbours hold together, by document and position."""
    return assignment.joined(neighbours).in_order()


@lru_cache(maxsize=PLANS)
def sorting(joined: Assignment, holder: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the rows of a holder by document and position, and where each row goes."""
    by_segment = sorted(joined.rows(holder), key=lambda held: held[1])
    there = indices([rows for rows, _ in by_segment], torch.device("cpu"))
    return to_device(there, device), to_device(there.argsort(), device)


class Reordered(torch.autograd.Function):
    """Rows in another order; the gradient goes back by the inverse, so that nothing is added."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return rows[there]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return gradient[ctx.back], None, None


# --- attention


class ContextAttention:
    """Attention of one batch over its context group, the same for every layer."""

    def __init__(self, assignment: Assignment, way: ContextWay, grid: Grid, *, keep: bool = False) -> None:
        """With `keep`, backward reads the keys that forward has moved instead of moving them again."""
        self.assignment, self.way, self.grid, self.keep = assignment, way, grid, keep
        self.members, self.member = len(assignment.members), grid.coords[CONTEXT]
        self.neighbours = way.neighbours
        if self.members % self.neighbours:
            raise ValueError(
                f"context_way={way}: {self.neighbours} neighbours do not divide context={self.members}; use "
                "ulysses:U with a divisor U, or gather, exchange or ring"
            )
        self.holders = assignment if self.neighbours == 1 else holders_of(assignment, self.neighbours)
        self.holder, self.lane = divmod(self.member, self.neighbours)
        """The holder that this member belongs to, and the heads that it takes there."""
        self.tokens = sum(segment.tokens for segment in assignment.members[self.member])

    @cached_property
    def sorting(self) -> tuple[Tensor, Tensor]:
        """The rows that neighbours send, in the order of their holder's tokens; and the way back."""
        return sorting(self.assignment.joined(self.neighbours), self.holder, self.grid.device)

    @cached_property
    def keys(self) -> KeyPlan:
        return KeyPlan.of(self.holders, self.holder, everything=self.everything, device=self.grid.device)

    @property
    def everything(self) -> bool:
        """Whether all K and V go to all holders."""
        return self.way.over == "gather"

    @cached_property
    def ring_tiles(self) -> list[Tiles]:
        """The tiles of this holder's queries and each holder's keys, which all layers share."""
        return ring_tiles(self.holders, self.holder)

    @cached_property
    def moves(self) -> bool:
        """Whether any holder sends anything to another one."""
        return len(self.holders.members) > 1 if self.everything else self.holders.moved > 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, engine: Engine, label: str) -> Turns[Tensor]:
        """Return what this member's queries read, [m, heads, head_dim], with a `yield` while messages are in flight."""
        if self.neighbours > 1:
            self._require_heads(q, k)
            q, k, v = yield from self._swap_in(q, k, v, engine, label)
        if self.way.over == "ring" and len(self.holders.members) > 1:
            out = RingAttention.apply(self, engine, label, q, k, v)
        else:
            out = yield from self._over_keys(q, k, v, engine, label)
        return (yield from self._swap_out(out, engine, label)) if self.neighbours > 1 else out

    def _require_heads(self, q: Tensor, k: Tensor) -> None:
        if q.shape[1] % self.neighbours or k.shape[1] % self.neighbours:
            raise ValueError(
                f"context_way={self.way}: {self.neighbours} neighbours do not divide the {q.shape[1]} query heads and "
                f"{k.shape[1]} KV heads of a rank; use ulysses:U with a U that divides both, gather, exchange or ring"
            )

    # --- tokens for heads

    def _near(self, rows: int) -> list[int]:
        """Return so many rows for each neighbour, and none for the other members."""
        first = self.holder * self.neighbours
        return [rows if first <= member < first + self.neighbours else 0 for member in range(self.members)]

    def _swap_in(self, q: Tensor, k: Tensor, v: Tensor, engine: Engine, label: str) -> Turns[list[Tensor]]:
        """[m, h, d] each -> [u m, h/u, d] each"""
        u, d = self.neighbours, q.shape[2]
        heads = [part.shape[1] // u for part in (q, k, v)]
        packed = torch.cat([part.unflatten(1, (u, -1)) for part in (q, k, v)], dim=2).flatten(2)  # [m, u, widths]
        swapping = self._launch(packed.movedim(1, 0).flatten(0, 1), engine, label)
        yield
        rows = Reordered.apply(swapping.wait(), *self.sorting)
        q, k, v = (part.unflatten(1, (-1, d)) for part in rows.split([each * d for each in heads], dim=1))
        return [q.contiguous(), k, v]  # a view would keep all three; K and V are copied anyway

    def _swap_out(self, out: Tensor, engine: Engine, label: str) -> Turns[Tensor]:
        """[u m, h/u, d] -> [m, h, d]"""
        swapping = self._launch(Reordered.apply(out.flatten(1), *reversed(self.sorting)), engine, label)
        yield
        parts = swapping.wait().unflatten(0, (self.neighbours, -1))  # [u, m, width]
        return parts.movedim(0, 1).flatten(1).unflatten(1, (-1, out.shape[2]))

    def _launch(self, rows: Tensor, engine: Engine, label: str) -> AsyncResult:
        """Swap equal parts of rows between neighbours; the same again is the way back."""
        counts = self._near(self.tokens)

        def swap(parts: Tensor) -> Pending[Tensor]:
            return comm.all_to_all(parts, self.grid, CONTEXT, counts, counts, label=label)

        return AsyncResult(swap, swap, engine).launch(rows)

    # --- gather and exchange

    def _over_keys(self, q: Tensor, k: Tensor, v: Tensor, engine: Engine, label: str) -> Turns[Tensor]:
        """Attend by KV heads: those of one piece are read while the next ones are in flight."""
        pieces = pieces_of(k.shape[1]) if self.moves else 1
        parts = [torch.cat(heads, dim=1) for heads in _by_heads(pieces, k, v)]
        flights = [KeyFlight(self, kv, label, engine).launch(kv) for kv in parts]
        yield  # also where nothing travels: halves of all groups along z must take the same turns
        return ReadKeys.apply(flights, q, *(flight.take_token() for flight in flights))

    def move(self, kv: Tensor, label: str) -> Pending[Tensor]:
        """Bring the keys and values that this holder reads: [tokens, 2 heads, d] -> [keys, 2 heads, d]."""
        plan = self.keys
        if not self.moves:
            return Pending(lambda: kv[plan.order])
        if self.everything and self.neighbours == 1:
            arriving = comm.all_gather(kv, self.grid, CONTEXT, label=label)
        else:
            counts = self.by_member(plan.to), self.by_member(plan.taken)
            arriving = comm.all_to_all(kv[plan.sent], self.grid, CONTEXT, *counts, label=label)
        return arriving.then(lambda rows: (rows if self.everything else torch.cat([kv, rows]))[plan.order])

    def move_back(self, dkeys: Tensor, label: str) -> Pending[Tensor]:
        """Return the gradients of what this holder has, from those of the keys that every holder read."""
        plan, own = self.keys, 0 if self.everything and self.moves else self.tokens * self.neighbours
        at_hand = dkeys.new_zeros((own + self.moves * sum(plan.taken), *dkeys.shape[1:]))
        at_hand[plan.order] = dkeys
        if not self.moves:
            return Pending(lambda: at_hand)
        if self.everything and self.neighbours == 1:
            return comm.reduce_scatter(at_hand, self.grid, CONTEXT, label=label)
        counts = self.by_member(plan.taken), self.by_member(plan.to)
        returning = comm.all_to_all(at_hand[own:], self.grid, CONTEXT, *counts, label=label)

        def add(returned: Tensor) -> Tensor:
            total = at_hand[:own] if own else returned.new_zeros((self.tokens * self.neighbours, *returned.shape[1:]))
            for rows, part in zip(plan.sent.split(plan.to), returned.split(plan.to), strict=True):
                total[rows] += part  # a holder gets each row once, so that no two are added at the same time
            return total

        return returning.then(add)

    def by_member(self, counts: Sequence[int]) -> list[int]:
        """Return counts by holder as counts by member: those that have the same heads."""
        found = [0] * self.members
        found[self.lane :: self.neighbours] = counts
        return found


def _by_heads(pieces: int, *parts: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the heads of q, k and v that belong together, in so many pieces."""
    return zip(*(part.chunk(pieces, dim=1) for part in parts), strict=True)


class KeyFlight(AsyncResult):
    """Keys and values on their way to the queries that read them, and their gradients on their way back."""

    hides_products = False
    """The number of pieces depends on the documents of a group, and all ranks along z must run products alike."""

    def __init__(self, context: ContextAttention, kv: Tensor, label: str, engine: Engine) -> None:
        super().__init__(
            lambda own: context.move(own.detach(), label), lambda dkeys: context.move_back(dkeys, label), engine
        )
        self.context, self.label = context, label
        self.kv: Tensor | None = kv.detach()

    def take_own(self) -> Tensor:
        """Return the keys and values that this holder has, which autograd keeps from now on."""
        own, self.kv = self.kv, None
        if own is None:
            raise RuntimeError("these keys and values were read already")
        return own

    def again(self, kept: Tensor) -> Pending[Tensor]:
        """Bring the keys and values that forward has read, from what it kept of them."""
        return Pending(lambda: kept) if self.context.keep else self.context.move(kept, self.label)


class ReadKeys(torch.autograd.Function):
    """Reads keys and values piece by piece as they arrive: what queries [m, heads, d] read of some KV heads each.

    Backward brings the pieces again, each while the one before it is read, and sends the gradients of each home.
    """

    @staticmethod
    def forward(ctx: Any, flights: Sequence[KeyFlight], q: Tensor, *_: Tensor) -> Tensor:
        outs, sums, kept = [], [], []
        for flight, queries in zip(flights, q.chunk(len(flights), dim=1), strict=True):
            keys, own, reading = flight.take(), flight.take_own(), Reading(queries)
            k, v = keys.chunk(2, dim=1)
            reading.read(k, v, flight.context.keys.tiles)
            out, lse = reading.result()
            outs.append(out)
            sums.append(lse)
            kept.append(keys if flight.context.keep else own)
        ctx.flights = flights
        out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in (outs, sums))
        ctx.save_for_backward(q, out, lse, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, out, lse, *kept = ctx.saved_tensors
        flights: Sequence[KeyFlight] = ctx.flights
        parts = list(_by_heads(len(flights), dout, q, out, lse))
        dqs: list[Tensor] = []
        arriving = flights[-1].again(kept.pop())
        flights[0].engine.wgrad_queue.run_one()  # one product of dw behind the first piece, whatever the documents are
        for flight, part in zip(reversed(flights), reversed(parts), strict=True):
            keys, gradients = arriving.wait(), Unreading(*part)
            if kept:
                arriving = flights[len(kept) - 1].again(kept.pop())
            k, v = keys.chunk(2, dim=1)
            flight.pending = flight.back(torch.cat(gradients.unread(k, v, flight.context.keys.tiles), dim=1))
            dqs.insert(0, gradients.dq)
        return None, dqs[0] if len(dqs) == 1 else torch.cat(dqs, dim=1), *(dout.new_empty(0) for _ in flights)


# --- ring


class RingAttention(torch.autograd.Function):
    """K and V go around the members that have the same heads: half of the heads in each direction."""

    @staticmethod
    def forward(
        ctx: Any, context: ContextAttention, engine: Engine, label: str, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        ctx.context, ctx.engine, ctx.label = context, engine, label
        outs, sums = zip(*(ring.read() for ring in _rings(context, label, q, k, v)), strict=True)
        out = torch.cat(outs, dim=1)
        ctx.save_for_backward(q, k, v, out, torch.cat(sums, dim=1))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        rings = _rings(ctx.context, ctx.label, q, k, v)
        parts = zip(rings, _by_heads(len(rings), dout, out, lse), strict=True)
        dqs, returning = zip(*(ring.unread(*part) for ring, part in parts), strict=True)
        ctx.engine.wgrad_queue.run_one()  # one product of dw behind the last hops, in however many directions
        gradients = zip(dqs, *zip(*(hop.wait().chunk(2, dim=1) for hop in returning), strict=True), strict=True)
        return None, None, None, *(torch.cat(part, dim=1) for part in zip(*gradients, strict=True))


def _rings(context: ContextAttention, label: str, q: Tensor, k: Tensor, v: Tensor) -> list[_HeadRing]:
    directions = (1, -1) if k.shape[1] % 2 == 0 else (1,)
    parts = _by_heads(len(directions), q, k, v)
    return [_HeadRing(context, label, step, *part) for step, part in zip(directions, parts, strict=True)]


class _HeadRing:
    """The K and V of some heads, which go around in one direction. The first hop is in flight from the start."""

    def __init__(self, context: ContextAttention, label: str, step: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.context, self.label, self.step, self.q = context, label, step, q
        self.number, self.me = len(context.holders.members), context.holder
        self.kv = torch.cat([k, v], dim=1)
        self.hop = self._shift(self.kv)

    def _shift(self, rows: Tensor) -> Pending[Tensor]:
        """Send rows to the next holder, and return those of the one before."""
        context, to, taken = self.context, [0] * self.number, [0] * self.number
        to[(self.me + self.step) % self.number] = taken[(self.me - self.step) % self.number] = len(rows)
        counts = context.by_member(to), context.by_member(taken)
        return comm.all_to_all(rows, context.grid, CONTEXT, *counts, label=self.label)

    def _tiles(self, hops: int) -> Tiles:
        """Return the tiles of the keys that arrive after so many hops."""
        return self.context.ring_tiles[(self.me - self.step * hops) % self.number]

    def read(self) -> tuple[Tensor, Tensor]:
        """Return out and lse of these heads."""
        reading, kv = Reading(self.q), self.kv
        for hops in range(self.number):
            k, v = kv.chunk(2, dim=1)
            reading.read(k, v, self._tiles(hops))
            if hops < self.number - 1:
                kv = self.hop.wait()
                if hops < self.number - 2:
                    self.hop = self._shift(kv)
        return reading.result()

    def unread(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Pending[Tensor]]:
        """Return dq, and dk and dv side by side, which go around behind K and V and are on their last hop, home."""
        gradients, kv = Unreading(dout, self.q, out, lse), self.kv
        returning: Pending[Tensor] | None = None
        for hops in range(self.number):
            k, v = kv.chunk(2, dim=1)
            dkv = torch.cat(gradients.unread(k, v, self._tiles(hops)), dim=1)
            if returning is not None:
                dkv = returning.wait() + dkv
            if hops < self.number - 1:
                kv = self.hop.wait()
                if hops < self.number - 2:
                    self.hop = self._shift(kv)
            returning = self._shift(dkv)
        if returning is None:
            raise RuntimeError("a ring has at least one member")
        return gradients.dq, returning

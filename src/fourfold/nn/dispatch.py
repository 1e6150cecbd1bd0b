"""The way of tokens to the ranks that hold their experts, and back, on a folded grid.

At rest every rank has tokens that no other rank with its y coordinate has. It sends a token once to each rank that
holds some of its experts, however many these are, and gets one row back, the sum over those experts. In the notation of
`moe`, with S rows that this rank sends and R rows that arrive at its experts:

    at rest    a [m/(zx), k/y], p and ids [m/(zx), K]
    rows       each token with each rank that has some of its experts, by rank, then by token
    counts     the rows for each rank, and their pairs with its experts: an all-to-all, which the host waits for
    send       a, p and ids of each row, [S, k/y + 2K] -> [R, k/y + 2K]                    all-to-all over expert
    join       the rows of all ranks that share the width of the same experts              all-gather over ex
      the products of the pairs of these rows with experts here, and their sums by row
    part       the sums over ex, of the rows that came to this rank                        reduce-scatter over ex
    return     [R, k/y] -> [S, k/y]                                                        all-to-all over expert
    combine    out[t] = the sum over the ranks of token t, [m/(zx), k/y]                   E19

The bits of p and ids travel in further columns of the rows. Backward sends along the same ways in the other direction.
Where expert and ex have one rank each, tokens stay: nothing is counted or sent.

If a capacity limits the pairs of a rank's tokens with an expert, every rank can send the most rows to each rank that
may ever be needed, of which the last ones may be empty. All numbers of rows are known beforehand: there are no counts,
the host does not wait, and a CUDA graph can contain the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fourfold import comm, kernels
from fourfold.comm import Pending
from fourfold.engine import Turns, Wait
from fourfold.grid import Grid
from fourfold.layout import chunk
from fourfold.nn.router import Routing
from fourfold.operators import AsyncResult, Conjugate, OpContext, Ready, once_differentiable

WHOLE_NUMBERS = {4: torch.int32, 8: torch.int64}
"""The dtype in which ids travel, by the bytes of a score."""
OF_PAIRS = ("tokens", "back", "goes", "alone")
"""The attributes of pairs that backward reads and that are as long as a batch."""


class Pairs:
    """Tokens with one of their destinations each, sorted by destination and then by token.

    Destinations are experts, or ranks that hold some.
    """

    def __init__(self, ids: Tensor, number: int) -> None:
        """`ids` [tokens, K] are the destinations of each token; a pair with the id `number` goes nowhere.

        If there may be such pairs, `keep` or `pad` must be called.
        """
        self.chosen, self.number = ids.shape[1], number
        ordered, self.order = ids.flatten().sort(stable=True)
        """The place of each pair among the pairs by token, [P]."""
        places = torch.arange(len(self.order), device=ids.device)
        self.back = torch.empty_like(self.order).scatter_(0, self.order, places)
        """The inverse: which pair each choice of a token is, [m K]."""
        self.goes: Tensor | None = None
        """Which choices go somewhere, [m K]; None for all."""
        self.alone: Tensor | None = None
        """Which tokens have no pair, [m, 1]; None if all have some."""
        numbers = torch.arange(number + 1, device=ids.device, dtype=ids.dtype)
        self.bounds = torch.searchsorted(ordered, numbers, out_int32=True)
        """Where the pairs of each destination begin, and where those of the last one end, [destinations + 1]."""
        self.groups = kernels.RowGroups(self.bounds[1:], len(self.order))
        """The pairs of each destination."""

    @property
    def counts(self) -> Tensor:
        """The number of pairs of each destination."""
        return self.bounds.diff()

    @cached_property
    def tokens(self) -> Tensor:
        """The token of each pair, [P]."""
        return self.order // self.chosen

    def note_missing(self) -> None:
        """Note which choices go nowhere. `keep` does it too, but then the host knows the number of pairs already."""
        self._point(self.back, self.back < self.bounds[-1])

    def keep(self, most: int) -> Pairs:
        """Keep `most` pairs: all that go somewhere, and perhaps further ones, which count with 0."""
        if self.goes is None:
            self.note_missing()
        # beyond them are tokens that go nowhere, and on a muted grid what it has sorted without receiving it
        self.back.clamp_(max=most - 1)
        self.order = self.order[:most]
        self.bounds.clamp_(max=most)
        if self.number:
            self.bounds[-1:].fill_(most)  # `[-1] = most` would copy a number from the host, which then waits
        self.groups = kernels.RowGroups(self.bounds[1:], most)
        return self

    def pad(self, room: int) -> Tensor:
        """Make the pairs of each destination `room` many by empty ones, which count with 0; return which are."""
        counts, begin, places = self.counts[:, None], self.bounds[:-1], torch.arange(room, device=self.order.device)
        destination = torch.searchsorted(self.bounds[1:], self.back, right=True).clamp(max=self.number - 1)
        place = self.back - begin[destination] + destination * room
        self._point(place.clamp(max=self.number * room - 1), self.back < self.bounds[-1])
        order = self.order if len(self.order) else self.order.new_zeros(1)  # a rank without tokens sends empty rows
        self.order = order[(begin[:, None] + places).clamp(max=len(order) - 1).flatten()]
        self.bounds = room * torch.arange(self.number + 1, dtype=torch.int32, device=begin.device)
        self.groups = kernels.RowGroups(self.bounds[1:], len(self.order))
        return (places >= counts).flatten()

    def _point(self, choices: Tensor, goes: Tensor) -> None:
        """Note which pair each choice is, and which choices go somewhere.

        The others are read as the first pair of their token and count with 0, so that what is not finite stays in its
        token. A token without pairs reads some other's, and what it makes of it is forgotten (`alone`).
        """
        by_token, by_choice, self.goes = choices.view(-1, self.chosen), goes.view(-1, self.chosen), goes
        self.back = torch.where(by_choice, by_token, by_token.amin(1, keepdim=True)).flatten()
        self.alone = by_choice.any(1, keepdim=True).logical_not_()

    def save(self, ctx: Any, *others: Tensor) -> None:
        """Let autograd keep the pairs until backward, beside other tensors.

        A block that is computed again for backward then has them twice, and not from one pass to the other.
        """
        ctx.save_for_backward(*(getattr(self, name) for name in OF_PAIRS), *others)
        ctx.pairs = copy(self)
        for name in ("order", *OF_PAIRS):
            delattr(ctx.pairs, name)

    @staticmethod
    def saved(ctx: Any) -> tuple[Pairs, Sequence[Tensor]]:
        """Return the pairs that were saved, which can be picked and combined, and the other tensors."""
        pairs, tensors = copy(ctx.pairs), ctx.saved_tensors
        for name, tensor in zip(OF_PAIRS, tensors, strict=False):
            setattr(pairs, name, tensor)
        return pairs, tensors[len(OF_PAIRS) :]

    def pick(self, a: Tensor) -> Tensor:
        """Return the rows of the pairs, [m, w] -> [P, w]."""
        return _pick(a, self.tokens)

    def combine(self, of_pairs: Tensor) -> Tensor:
        """Return the sum over each token's pairs in the order of its choices, [P, w] -> [m, w] (E19)."""
        if not of_pairs.shape[0]:
            return of_pairs.new_zeros(len(self.back) // self.chosen, of_pairs.shape[1])
        choices = self.back.view(-1, self.chosen)
        if self.goes is None or self.alone is None:
            return functional.embedding_bag(choices, of_pairs, mode="sum")
        counted = self.goes.view(-1, self.chosen).to(of_pairs.dtype)
        found = functional.embedding_bag(choices, of_pairs, mode="sum", per_sample_weights=counted)
        return found.masked_fill_(self.alone, 0)

    def sort(self, by_token: Tensor) -> Tensor:
        """Return values of pairs by token, [m, K], in the order of the pairs, [P, 1]."""
        return SortPairs.apply(by_token, self)


def _pick(a: Tensor, tokens: Tensor) -> Tensor:
    return a.index_select(0, tokens) if len(a) else a.new_zeros(len(tokens), a.shape[1])


class SortPairs(torch.autograd.Function):
    """Forward brings values by token, [m, K], into the order of pairs, [P, 1]; backward brings them back."""

    @staticmethod
    def forward(ctx: Any, by_token: Tensor, pairs: Pairs) -> Tensor:
        pairs.save(ctx)
        values = by_token.flatten()
        values = values if pairs.goes is None else torch.where(pairs.goes, values, 0)
        return values[pairs.order][:, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        pairs, _ = Pairs.saved(ctx)
        if not gradient.shape[0]:
            return gradient.new_zeros(len(pairs.back) // pairs.chosen, pairs.chosen), None
        found = gradient.flatten()[pairs.back]
        return (found if pairs.goes is None else torch.where(pairs.goes, found, 0)).view(-1, pairs.chosen), None


class CombinePairs(torch.autograd.Function):
    """Forward adds up the pairs of each token, [P, w] -> [m, w]; backward picks the rows of pairs.

    It is not computed again in a block that is, since backward reads nothing of its result; so it keeps what it reads.
    """

    @staticmethod
    def forward(ctx: Any, of_pairs: Tensor, pairs: Pairs) -> Tensor:
        ctx.tokens = pairs.tokens
        return pairs.combine(of_pairs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _pick(gradient, ctx.tokens), None


def write_choices(a: Tensor, p: Tensor, ids: Tensor) -> Tensor:
    """Return tokens with the bits of p and ids behind each: a [m, w], p [m, K] and ids [m, K] -> [m, w + c].

    Ids are written plus 1, so that a row of zeros has no expert.
    """
    whole_numbers = WHOLE_NUMBERS[p.itemsize]
    with torch.no_grad():  # `PackRows` has the gradients
        bits = torch.cat([p.view(whole_numbers), (ids + 1).to(whole_numbers)], dim=1)
        return torch.cat([a, bits.view(a.dtype)], dim=1)


class PackRows(torch.autograd.Function):
    """Forward picks the rows to send; backward adds up what the a and p of a token are owed.

        written [m, w + c], of a [m, w] and p [m, K] (`write_choices`) -> [S, w + c]

    Forward copies nothing of a and p: they are arguments for the sake of their gradients.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, p: Tensor, written: Tensor, rows: Pairs, empty: Tensor | None) -> Tensor:
        rows.save(ctx)
        ctx.width, ctx.dtype = a.shape[1], p.dtype
        packed = rows.pick(written)
        return packed if empty is None else packed.masked_fill_(empty[:, None], 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, p, _ = _columns(gradient, ctx.width)
        rows, _ = Pairs.saved(ctx)
        return rows.combine(a), rows.combine(_bits(p, ctx.dtype)), None, None, None


class UnpackRows(torch.autograd.Function):
    """The inverse of `PackRows`, of the rows of all ranks along ex; backward sums the gradients of each rank's rows.

    Ids stay as they are written.
    """

    @staticmethod
    def forward(ctx: Any, packed: Tensor, dispatch: Dispatch, width: int, dtype: torch.dtype) -> Any:
        ctx.dispatch = dispatch
        a, p, ids = _columns(dispatch.join(packed), width)
        written = _bits(ids, WHOLE_NUMBERS[dtype.itemsize])
        ctx.mark_non_differentiable(written)
        return a.contiguous(), _bits(p, dtype), written

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, a: Tensor, p: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        part = ctx.dispatch.part
        a, p = part(a), part(p)
        bits = p.view(a.dtype)
        return torch.cat([a, bits, torch.zeros_like(bits)], dim=1), None, None, None


def _columns(packed: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, the bits of p, and those of ids."""
    beside = (packed.shape[1] - width) // 2
    a, p, ids = packed.split([width, beside, beside], dim=1)
    return a, p, ids


def _bits(columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what these columns are the bits of."""
    # copied in any case: a part of a single row counts as contiguous, and may begin at an odd place
    return columns.clone(memory_format=torch.contiguous_format).view(dtype)


class ArrivedTokens(NamedTuple):
    """What a rank multiplies on a fold."""

    a: Tensor
    """Tokens, [R, k/y]."""
    p: Tensor
    """The score of each of their choices, [R, K]."""
    pairs: Pairs
    """The same tokens with the experts of this rank that they chose."""


class RowCounts(NamedTuple):
    """What the host knows of the rows of one half of a batch."""

    sent: list[int]
    """Rows that go to each rank along expert."""
    taken: list[int]
    """Rows that come from each rank along expert."""
    arrived: list[int]
    """Rows that arrive at each rank along ex."""
    pairs: int
    """The pairs of all these rows with experts of this rank."""


class Dispatch:
    """The way of the tokens of one half of a batch to their experts and back."""

    def __init__(self, routing: Routing, site: OpContext, limit: int = 0) -> None:
        """With `limit` no expert has more pairs with the tokens of a rank, and rows are padded."""
        self.routing, self.site, self.grid, self.label = routing, site, site.grid, site.label
        self.stays, self.limit = stays(self.grid), limit
        self.ranks = self.grid.size("expert")
        self.shares = [chunk(routing.experts, self.ranks, rank) for rank in range(self.ranks)]
        """The experts of each rank along expert."""
        self.waits = None if self.stays else Wait.ROWS
        """What tokens on their way wait for, to their experts and back."""
        self.experts = self.shares[self.grid.coords["expert"]]

    def turns(self, a: Tensor, scores: Tensor, ids: Tensor) -> Turns[Callable[[], ArrivedTokens]]:
        """Send tokens [m/(zx), k/y] with the scores and ids of their experts [m/(zx), K]; the id E is none.

        It returns what waits for the tokens that come.
        """
        if self.stays:
            return lambda: ArrivedTokens(a, scores, Pairs(ids, self.routing.experts))
        destinations = ids // len(self.shares[0])
        if self.ranks * len(self.shares[0]) > self.routing.experts:  # else the rank behind the last one is found
            destinations.masked_fill_(ids >= self.routing.experts, self.ranks)
        counting = None if self.limit else self._launch_counts(destinations)
        if counting is not None:
            yield Wait.COUNTS
        # the counts travel while all is launched that can be before they are known
        wide = torch.promote_types(a.dtype, torch.float32)  # a module's own router may have scores of 16 bits
        scores = scores.to(torch.promote_types(scores.dtype, wide))
        written, empty = write_choices(a, scores, ids), None
        rows = self.rows = Pairs(_once(destinations, self.ranks), self.ranks)
        if counting is None:
            self.counts = self._padded()
            empty = rows.pad(self.counts.sent[0])
        else:
            rows.note_missing()
            self.counts = counting()
            rows.keep(sum(self.counts.sent))
        packed = PackRows.apply(a, scores, written, rows, empty)
        arriving: AsyncResult | Ready = Ready(packed)
        if self.ranks > 1:
            arriving = self.site.launch(packed, self._to_experts, self._from_experts)

        def land() -> ArrivedTokens:
            found, p, written = UnpackRows.apply(arriving.wait(), self, a.shape[1], scores.dtype)
            own = len(self.experts)
            # numbers of experts of this rank, from 0; those before them become large
            here = (written - (self.experts.start + 1)).remainder_(self.routing.experts + 2).clamp_(max=own)
            return ArrivedTokens(found, p, Pairs(here, own).keep(self.counts.pairs))

        return land

    def returning(self, out: Tensor) -> AsyncResult | Ready:
        """Send the sums over the experts here back, [R, k/y] {sum ex} -> [S, k/y]."""
        if self.grid.size("ex") > 1:
            out = Conjugate.apply(out, self.part, self.join)
        return self.site.launch(out, self._from_experts, self._to_experts) if self.ranks > 1 else Ready(out)

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sums over the ranks of each token, [S, k/y] -> [m/(zx), k/y] (E19)."""
        if self.stays:
            return rows
        pairs = self.rows
        del self.rows  # backward knows this object
        return CombinePairs.apply(rows, pairs)

    # --- counts

    def _launch_counts(self, destinations: Tensor) -> Callable[[], RowCounts]:
        """Launch the all-to-all of rows and pairs for each rank; return what waits for it."""
        there = destinations[:, :, None] == torch.arange(self.ranks, device=destinations.device)  # [m, K, ranks]
        counts = torch.stack([there.any(1).sum(0), there.sum((0, 1))], dim=1)
        arriving, each, over_ex = Pending(lambda: counts), [1] * self.ranks, self.grid.size("ex") > 1
        if self.ranks > 1:
            arriving = comm.all_to_all(counts, self.grid, "expert", each, each, label=self.label)

        read = [counts]

        def found() -> Tensor:
            read.append(arriving.wait()[None])
            if over_ex:
                read.append(comm.all_gather(read[-1], self.grid, "ex", label=self.label).wait())
            return read[-1]

        if counts.is_meta or self.grid.muted:  # there are no numbers
            tokens = len(destinations)
            return lambda: (found(), self._balanced(tokens))[1]
        if not counts.is_cuda:
            return lambda: self._noted(counts.tolist(), found().tolist())
        return self._copied(read, found)

    def _copied(self, read: list[Tensor], found: Callable[[], Tensor]) -> Callable[[], RowCounts]:
        """Copy the counts to the host beside what the device computes; the host waits for the copies alone.

        `read` gets all tensors that the side stream reads, the counts of this rank first. Without a reference to them
        their memory would go to kernels of the main stream, which does not wait for the side stream.
        """
        device = read[0].device
        own, side = torch.cuda.current_stream(device), _side_stream(device)
        side.wait_stream(own)
        with torch.cuda.stream(side):
            copies = [each.to("cpu", non_blocking=True) for each in (read[0], found())]
            copied = side.record_event()

        def on_host() -> RowCounts:
            copied.synchronize()
            read.clear()
            return self._noted(copies[0].tolist(), copies[1].tolist())

        return on_host

    def _noted(self, counts: list[list[int]], found: list[list[list[int]]]) -> RowCounts:
        """Return what follows from the rows and pairs for each rank, and from those of each rank by ex and expert."""
        taken = [[rows for rows, _ in of_member] for of_member in found]
        return RowCounts(
            sent=[rows for rows, _ in counts],
            taken=taken[self.grid.coords["ex"]],
            arrived=[sum(of_member) for of_member in taken],
            pairs=sum(pairs for of_member in found for _, pairs in of_member),
        )

    def _balanced(self, tokens: int) -> RowCounts:
        """Return the counts of a dry run: equally many pairs for every expert."""
        each = [list(self.routing.balanced(tokens, share)) for share in self.shares]
        return self._noted(each, [[each[self.grid.coords["expert"]]] * self.ranks] * self.grid.size("ex"))

    def _padded(self) -> RowCounts:
        """Return the most rows, and pairs, that can go from one rank to another."""
        tokens = -(-self.site.tokens // self.site.x)  # also where ranks along x send unequal parts
        rows, _ = self.routing.most(tokens, len(self.shares[0]), self.limit)
        _, pairs = self.routing.most(tokens, len(self.experts), self.limit)
        return self._noted([[rows, pairs]] * self.ranks, [[[rows, pairs]] * self.ranks] * self.grid.size("ex"))

    # --- ways

    def _to_experts(self, rows: Tensor) -> Pending[Tensor]:
        sent, taken = self.counts.sent, self.counts.taken
        return comm.all_to_all(rows, self.grid, "expert", sent, taken, label=self.label)

    def _from_experts(self, rows: Tensor) -> Pending[Tensor]:
        sent, taken = self.counts.sent, self.counts.taken
        return comm.all_to_all(rows, self.grid, "expert", taken, sent, label=self.label)

    def join(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks along ex, each padded to the most."""
        if self.grid.size("ex") == 1:
            return rows
        padded = functional.pad(rows, (0, 0, 0, max(self.counts.arrived) - len(rows)))
        return comm.all_gather(padded, self.grid, "ex", label=self.label).wait()

    def part(self, rows: Tensor) -> Tensor:
        """Return the sums over ex of the rows that came to this rank."""
        if self.grid.size("ex") == 1:
            return rows
        own = comm.reduce_scatter(rows.contiguous(), self.grid, "ex", label=self.label).wait()
        return own[: self.counts.arrived[self.grid.coords["ex"]]]


def _once(destinations: Tensor, ranks: int) -> Tensor:
    """Return the destinations of each token, [m, K], with `ranks` in place of those that an earlier choice has."""
    if destinations.shape[1] == 1:
        return destinations
    again = destinations[:, :, None] == destinations[:, None, :]
    return torch.where(again.tril(-1).any(-1), ranks, destinations)


def stays(grid: Grid) -> bool:
    """Return whether tokens stay where they are on a fold: every rank has some of the weights of all experts."""
    return grid.size("expert") == 1 and grid.size("ex") == 1


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which counts are copied to the host."""
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream(device)
    return _SIDE_STREAMS[device]


def own_rows(site: OpContext, a: Tensor) -> Tensor:
    """Return the tokens that this rank sends: all that it has at rest, or its part along x where x repeats them."""
    if site.sharded or site.x == 1:
        return a
    return Conjugate.apply(a, partial(_part_along_x, site), partial(_whole_along_x, site))


def all_rows(site: OpContext, a: Tensor) -> Tensor:
    """Return the inverse of `own_rows`."""
    if site.sharded or site.x == 1:
        return a
    return Conjugate.apply(a, partial(_whole_along_x, site), partial(_part_along_x, site))


def rows_here(site: OpContext, every: Tensor, filling: int) -> Tensor:
    """Return the part of `own_rows` of values that are known for all tokens of the place, [m, w].

    The padding behind them gets the value `filling`.
    """
    if site.x == 1:
        return every
    if not site.sharded:
        return _part_along_x(site, every)
    first = site.grid.coords["x"] * site.rows_at_rest
    own = every[first : first + site.rows_at_rest]
    return functional.pad(own, (0, 0, 0, site.rows_at_rest - len(own)), value=filling)


def _part_along_x(site: OpContext, a: Tensor) -> Tensor:
    part = chunk(site.tokens, site.x, site.grid.coords["x"])
    return a[part.start : part.stop].contiguous()


def _whole_along_x(site: OpContext, part: Tensor) -> Tensor:
    return comm.all_gather(part.contiguous(), site.grid, "x", length=site.tokens, label=site.label).wait()

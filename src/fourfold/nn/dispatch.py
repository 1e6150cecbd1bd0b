"""The way of tokens to the ranks that hold their experts, and back, on a folded grid.

At rest every rank has tokens that no other rank with its y coordinate has. It sends a row for each pair of a token and
one of its experts, and the same row comes back from the expert. In the notation of `moe`, with P pairs of this rank and
R pairs that arrive at its experts:

    at rest    a [m/(zx), k/y], p and ids [m/(zx), K]; pairs sorted by expert, then by token
    counts     how many pairs each rank has for each expert: an all-to-all of E numbers, which the host waits for
    send       a and p of each pair, [P, k/y + 1] -> [R, k/y + 1]                          all-to-all over expert
    join       the rows of all ranks that share the width of the same experts              all-gather over ex
    sort       by expert, then by the rank that they come from
      the products of the experts
    part       the sums over ex, of the rows that came to this rank                        reduce-scatter over ex
    return     [R, k/y] -> [P, k/y]                                                        all-to-all over expert
    combine    out[t] = sum_j o[t, j] in the order of j, [m/(zx), k/y]                     E19

The bits of p travel in further columns of the rows. Backward sends along the same ways in the other direction. Where
expert and ex have one rank each, pairs only come in turn by expert: nothing is counted or sent.

With room C for the pairs of a rank and an expert, which a capacity gives, every rank sends C rows for each expert, of
which the last ones may be empty. All numbers of rows are known beforehand: there are no counts, the host does not wait,
and a CUDA graph can contain the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fourfold import comm
from fourfold.comm import Pending
from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.layout import chunk
from fourfold.operators import AsyncResult, Conjugate, OpContext, Ready, once_differentiable


class Pairs:
    """Tokens with one of their experts each, sorted by expert and then by token."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        """`ids` [tokens, K] are the experts of each token; a pair with the id `experts` goes nowhere and comes last."""
        tokens, self.chosen = ids.shape
        flat = ids.flatten()
        self.order = flat.argsort(stable=True)
        """The place of each pair among the pairs by token, [P]."""
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(tokens * self.chosen, device=ids.device)
        self.tokens = self.order // self.chosen
        """The token of each pair."""
        limits = torch.arange(1, experts + 1, device=ids.device)
        self.ends = torch.searchsorted(flat[self.order], limits).to(torch.int32)
        """Where the pairs of each expert end, [E]."""

    @property
    def counts(self) -> Tensor:
        """The number of pairs of each expert, [E]."""
        return torch.diff(self.ends, prepend=self.ends.new_zeros(1)).long()

    def pick(self, a: Tensor) -> Tensor:
        """Return the rows of the pairs, [m, w] -> [P, w]."""
        return a.index_select(0, self.tokens)

    def combine(self, of_pairs: Tensor) -> Tensor:
        """Return the sum over each token's pairs in the order of its choices, [P, w] -> [m, w] (E19)."""
        rows = of_pairs.index_select(0, self.back).view(-1, self.chosen, of_pairs.shape[1])
        total = rows[:, 0].clone()
        for choice in range(1, self.chosen):
            total += rows[:, choice]
        return total

    def sort(self, by_token: Tensor) -> Tensor:
        """Return values of pairs by token, [m, K], in the order of the pairs, [P, 1]."""
        return Conjugate.apply(
            by_token,
            lambda values: values.flatten()[self.order][:, None],
            lambda gradient: gradient.flatten()[self.back].view(-1, self.chosen),
        )


class PackScores(torch.autograd.Function):
    """Forward writes the bits of p behind each row, [P, w] and [P, 1] -> [P, w + c]; backward reads them out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, p: Tensor) -> Tensor:
        ctx.width, ctx.dtype = rows.shape[1], p.dtype
        return torch.cat([rows, p.contiguous().view(rows.dtype)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient[:, : ctx.width], gradient[:, ctx.width :].contiguous().view(ctx.dtype)


class UnpackScores(torch.autograd.Function):
    """The inverse of `PackScores`."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        return packed[:, :width].contiguous(), packed[:, width:].contiguous().view(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, p: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]  # noqa: ARG004
        return torch.cat([rows, p.contiguous().view(rows.dtype)], dim=1), None, None


class Dispatch:
    """The way of the pairs of one half of a batch to their experts and back."""

    def __init__(self, pairs: Pairs, experts: int, site: OpContext, room: int = 0) -> None:
        """`room` are the rows that are sent for each expert; 0 for as many as there are pairs."""
        self.room = room
        self.pairs, self.site, self.grid, self.label = pairs, site, site.grid, site.label
        self.stays = stays(self.grid)
        ranks = self.grid.size("expert")
        self.shares = [len(chunk(experts, ranks, rank)) for rank in range(ranks)]
        """The number of experts of each rank along expert."""
        self.own = self.shares[self.grid.coords["expert"]]
        self.sent: Sequence[int] = ()
        self.taken: Sequence[int] = ()
        """The rows that go to each rank along expert, and that come from each."""
        self.arrived: list[int] = []
        """The rows that arrive at each rank along ex."""
        self.order = pairs.order
        """Which of the rows that were joined comes when, by expert."""
        self.ends = pairs.ends
        """Where the rows of each expert of this rank end, [experts here]."""

    def turns(self, a: Tensor, scores: Tensor) -> Turns[Callable[[], tuple[Tensor, Tensor]]]:
        """Send the rows of tokens [m/(zx), k/y] with the scores of their experts [m/(zx), K].

        It returns what waits for the rows that arrive: by expert, [R, k/y], and the score of each, [R, 1].
        """
        pairs, counting = self.pairs, None if self.stays or self.room else self._launch_counts()
        p = pairs.sort(scores)
        p = p.to(torch.promote_types(p.dtype, a.dtype))
        rows = Conjugate.apply(a, pairs.pick, pairs.combine)
        packed = rows if self.stays else PackScores.apply(rows, p)
        yield  # the other half computes while the counts travel
        if self.stays:
            return lambda: (rows, p)
        if counting is None:
            here = [[self.room] * self.own] * len(self.shares)
            self._plan(self._noted([self.room] * sum(self.shares), [here] * self.grid.size("ex")))
            packed = Conjugate.apply(packed, self._into_room, self._out_of_room)
        else:
            self._plan(counting())
            packed = packed[: sum(self.sent)]
        arriving: AsyncResult | Ready = Ready(packed)
        if self.grid.size("expert") > 1:
            arriving = self.site.launch(packed, self._to_experts, self._from_experts)

        def land() -> tuple[Tensor, Tensor]:
            found = UnpackScores.apply(arriving.wait(), a.shape[1], p.dtype)
            if self.grid.size("ex") > 1:
                found = [Conjugate.apply(each, self._join, self._part) for each in found]
            rows, scores = (Conjugate.apply(each, self._sorted, self._unsorted) for each in found)
            return rows, scores

        return land

    def returning(self, out: Tensor) -> AsyncResult | Ready:
        """Send the outputs of the experts back, [R, k/y] {sum ex} -> [P, k/y]."""
        if self.stays:
            return Ready(out)
        out = Conjugate.apply(out, self._unsorted, self._sorted)
        if self.grid.size("ex") > 1:
            out = Conjugate.apply(out, self._part, self._join)
        return (
            self.site.launch(out, self._from_experts, self._to_experts) if self.grid.size("expert") > 1 else Ready(out)
        )

    def combine(self, rows: Tensor) -> Tensor:
        """Return the sums over the choices of each token, [P, k/y] -> [m/(zx), k/y] (E19); pairs that stayed are 0."""
        if self.room:
            rows = Conjugate.apply(rows, self._out_of_room, self._into_room)
        else:
            rows = functional.pad(rows, (0, 0, 0, len(self.pairs.order) - len(rows)))
        return Conjugate.apply(rows, self.pairs.combine, self.pairs.pick)

    # --- counts

    def _launch_counts(self) -> Callable[[], list[list[list[int]]]]:
        """Launch the all-to-all of counts; return what waits for it and returns them by ex, source and expert here."""
        grid, counts = self.grid, self.pairs.counts
        ranks, many = grid.size("expert"), grid.size("ex") > 1
        arriving = Pending(lambda: counts)
        if ranks > 1:
            arriving = comm.all_to_all(counts, grid, "expert", self.shares, [self.own] * ranks, label=self.label)

        def found() -> Tensor:
            here = arriving.wait().view(1, ranks, self.own)
            return comm.all_gather(here, grid, "ex", label=self.label).wait() if many else here

        if counts.is_meta or grid.muted:  # there are no numbers
            return lambda: (found(), self._balanced())[1]
        if not counts.is_cuda:
            return lambda: self._noted(counts.tolist(), found().tolist())
        return self._copied(counts, found)

    def _noted(self, counts: list[int], found: list[list[list[int]]]) -> list[list[list[int]]]:
        """Note how many rows go to each rank, from the numbers of pairs of this rank for each expert."""
        ends = [0, *accumulate(self.shares)]
        self.sent = [sum(counts[first:last]) for first, last in pairwise(ends)]
        return found

    def _balanced(self) -> list[list[list[int]]]:
        """Return the counts of a dry run: equally many pairs for every expert."""
        pairs, experts = len(self.pairs.order), sum(self.shares)
        counts = [pairs // experts + (expert < pairs % experts) for expert in range(experts)]
        first = sum(self.shares[: self.grid.coords["expert"]])
        mine = counts[first : first + self.own]
        return self._noted(counts, [[mine] * self.grid.size("expert")] * self.grid.size("ex"))

    def _copied(self, counts: Tensor, found: Callable[[], Tensor]) -> Callable[[], list[list[list[int]]]]:
        """Copy the counts to the host beside what the device computes; the host waits for the copies alone."""
        own, side = torch.cuda.current_stream(counts.device), _side_stream(counts.device)
        side.wait_stream(own)
        with torch.cuda.stream(side):
            arrived = found()
            copies = [each.to("cpu", non_blocking=True) for each in (counts, arrived)]
            copied = side.record_event()
        for each in (counts, arrived):
            each.record_stream(side)

        def on_host() -> list[list[list[int]]]:
            copied.synchronize()
            return self._noted(copies[0].tolist(), copies[1].tolist())

        return on_host

    def _plan(self, counts: list[list[list[int]]]) -> None:
        """Work out what is sent, and in which order rows are multiplied, from the counts by ex, source and expert."""
        mine = counts[self.grid.coords["ex"]]
        self.taken = [sum(of_source) for of_source in mine]
        self.arrived = [sum(map(sum, of_member)) for of_member in counts]
        runs = []  # of rows that come from one rank for one expert: its expert, where it begins, its length
        by_expert = [0] * self.own
        for number, of_member in enumerate(counts):
            begin = number * max(self.arrived)
            for of_source in of_member:
                for expert, length in enumerate(of_source):
                    runs.append((expert, begin, length))
                    by_expert[expert] += length
                    begin += length
        in_turn = tuple((begin, length) for _, begin, length in sorted(runs))
        tables = _kept_tables if self.room else _tables
        self.ends, self.order = tables(tuple(by_expert), in_turn, self.order.device)

    # --- room

    def _into_room(self, of_pairs: Tensor) -> Tensor:
        """Return the rows of pairs where each expert has room for them, [P, w] -> [E C, w]; empty rows are 0."""
        pairs, most = self.pairs, len(of_pairs) - 1
        places = torch.arange(self.room, device=of_pairs.device)
        begin, counts = pairs.ends - pairs.counts, pairs.counts
        rows = of_pairs.index_select(0, (begin[:, None] + places).clamp(max=most).flatten())
        return rows.masked_fill_((places >= counts[:, None]).view(-1, 1), 0)

    def _out_of_room(self, rows: Tensor) -> Tensor:
        """Return the inverse; pairs that stayed get 0."""
        pairs = self.pairs
        places = torch.arange(len(pairs.order), device=rows.device)
        expert = torch.searchsorted(pairs.ends, places, right=True)
        stayed, expert = expert >= len(pairs.ends), expert.clamp(max=len(pairs.ends) - 1)
        place = places - (pairs.ends - pairs.counts)[expert] + expert * self.room
        return rows.index_select(0, place.clamp(max=len(rows) - 1)).masked_fill_(stayed[:, None], 0)

    # --- ways

    def _to_experts(self, rows: Tensor) -> Pending[Tensor]:
        return comm.all_to_all(rows, self.grid, "expert", self.sent, self.taken, label=self.label)

    def _from_experts(self, rows: Tensor) -> Pending[Tensor]:
        return comm.all_to_all(rows, self.grid, "expert", self.taken, self.sent, label=self.label)

    def _join(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks along ex, each padded to the most."""
        padded = functional.pad(rows, (0, 0, 0, max(self.arrived) - len(rows)))
        return comm.all_gather(padded, self.grid, "ex", label=self.label).wait()

    def _part(self, rows: Tensor) -> Tensor:
        """Return the sums over ex of the rows that came to this rank."""
        own = comm.reduce_scatter(rows, self.grid, "ex", label=self.label).wait()
        return own[: self.arrived[self.grid.coords["ex"]]]

    def _sorted(self, rows: Tensor) -> Tensor:
        return rows.index_select(0, self.order)

    def _unsorted(self, rows: Tensor) -> Tensor:
        joined = max(self.arrived) * len(self.arrived)
        whole = rows.new_zeros(joined, rows.shape[1]) if joined > len(rows) else torch.empty_like(rows)
        return whole.index_copy_(0, self.order, rows)


def stays(grid: Grid) -> bool:
    """Return whether tokens stay where they are on a fold: every rank has some of the weights of all experts."""
    return grid.size("expert") == 1 and grid.size("ex") == 1


def _tables(
    by_expert: tuple[int, ...], runs: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return where the rows of each expert end, and which rows come in turn, on a device.

    The rows that come in turn are runs, given by where they begin and how long they are.
    """
    total = sum(length for _, length in runs)
    ends = accumulate(length for _, length in runs)
    ahead = [begin - (end - length) for (begin, length), end in zip(runs, ends, strict=True)]
    lengths = torch.tensor([length for _, length in runs], dtype=torch.long, device=device)
    shift = torch.tensor(ahead, dtype=torch.long, device=device).repeat_interleave(lengths, output_size=total)
    ends_of_experts = torch.tensor(list(accumulate(by_expert)), dtype=torch.int32, device=device)
    return ends_of_experts, shift + torch.arange(total, device=device)


@lru_cache(maxsize=16)
def _kept_tables(
    by_expert: tuple[int, ...], runs: tuple[tuple[int, int], ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return `_tables` of padded rows, which every step needs again: a step that is recorded cannot make them."""
    with torch.inference_mode(mode=False):  # later steps may train
        return _tables(by_expert, runs, device)


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

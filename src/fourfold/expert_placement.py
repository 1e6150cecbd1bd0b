"""Where the experts of a mixture go: a numbering of each block's experts that balances ranks and keeps tokens near.

Rank r along expert holds the experts of its chunk of the numbers 0 to E-1, so a placement is a numbering: `order[b, i]`
is the expert of block b that gets the number i. The model is the same function after it, with the rows of its weights
in another order.

Two steps find it. The first balances the load of ranks, block by block: the expert with most tokens goes first, to the
rank with the least, and exchanges between two ranks then make the busiest one less busy. The second makes fewer tokens
change their node between the experts of one block and those of the next (ExFlow, MoETuner): experts of one block change
places, the best pair first, as long as no rank gets more than `SLACK` allows.

Where tokens choose among groups of experts, the numbers of a group stay next to each other, for the router takes
neighbours for a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import factorial, prod

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fourfold.layout import chunk

SLACK = 1.05
"""How many times the mean a rank may have for tokens to stay near; more if balance alone does not reach that."""
MOST_DIVISIONS = 3000
"""All ways to divide experts among ranks are tried if there are at most so many: 8 experts on up to 4 ranks, or 7 and 7
on two. More experts divide evenly enough by exchanges of one for one."""
MOST_SWEEPS = 30
"""How often exchanges go through all blocks at most."""
LEAST = 0.5
"""The least gain of an exchange, in tokens, which are whole numbers."""
LEAST_GAIN = 2e-3
"""The share of all transitions that a sweep must bring to a node more, or the search ends: later sweeps bring less."""


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks along expert, of which neighbours share a node."""

    number: int
    per_node: int

    def __post_init__(self) -> None:
        if self.number < 1 or self.per_node < 1 or self.number % self.per_node:
            raise ValueError(
                f"{self.number} ranks along expert do not make nodes of {self.per_node}; choose a number of ranks in a "
                "node that divides that of the ranks"
            )

    @property
    def nodes(self) -> int:
        return self.number // self.per_node

    def shares(self, experts: int) -> list[int]:
        """Return how many experts each rank holds."""
        return [len(chunk(experts, self.number, rank)) for rank in range(self.number)]


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """How even the ranks are with a numbering of experts, and how many tokens change their node."""

    rank_loads: list[float]
    """The pairs of the busiest rank divided by the mean, by block."""
    node_loads: list[float]
    """The pairs of the busiest node divided by the mean, by block."""
    leaving: list[float]
    """The share of the transitions behind each block that lead to another node; empty if none were recorded."""


def cost_of(counts: Tensor, transitions: Tensor | None, order: Tensor, where: ExpertRanks) -> PlacementCost:
    """Return what a numbering costs.

    `counts` [blocks, E] are the pairs of each expert, and `transitions` [blocks - 1, E, E] how many tokens that chose
    an expert of a block chose one of the next. `order` [blocks, E] is the expert that has each number.
    """
    bins, counts = _Bins.of_ranks(where, counts.shape[1]), counts.double()
    loads = torch.stack([bins.loads(of_block[new]) for of_block, new in zip(counts, order, strict=True)])
    by_node = loads.view(len(loads), where.nodes, where.per_node).sum(2)
    leaving = []
    if transitions is not None:
        for block, found in enumerate(transitions):
            flows = found[order[block]][:, order[block + 1]]
            stay = flows[bins.nodes[:, None] == bins.nodes].sum()
            leaving.append(1 - float(stay) / max(float(flows.sum()), 1.0))
    return PlacementCost(_worst(loads), _worst(by_node), leaving)


def _worst(loads: Tensor) -> list[float]:
    """Return the largest load of each row divided by the mean."""
    return (loads.max(1).values * loads.shape[1] / loads.sum(1).clamp(min=1)).tolist()


def place(counts: Tensor, transitions: Tensor | None, where: ExpertRanks, groups: int = 1) -> Tensor:
    """Return the numbering [blocks, E] of the experts of consecutive mixtures; see `cost_of` for the arguments.

    `groups` is the number of groups of neighbours among which tokens choose; 1 if they choose among all experts.
    """
    counts = counts.double()
    transitions = None if transitions is None else transitions.double()
    experts = counts.shape[1]
    shares, size = where.shares(experts), experts // groups
    if groups == 1:
        return _place(counts, transitions, _Bins.of_ranks(where, experts))
    if all(share % size == 0 for share in shares):  # ranks have whole groups
        found = _place(*_by_group(counts, transitions, size), _Bins.of_ranks(where, groups))
        return _expanded(found, _unchanged(counts), size)
    window = size // max(shares)  # how many ranks have one group
    if len(set(shares)) > 1 or size % shares[0] or (where.per_node % window and window % where.per_node):
        raise ValueError(
            f"{experts} experts in {groups} groups on {where.number} ranks, {where.per_node} in a node: the "
            f"{size} experts of a group must stay next to each other, so a rank must hold whole groups, or a group "
            "whole ranks, and nodes likewise; choose another number of ranks"
        )
    inside = _Bins([shares[0]] * window, [0] * window)
    first = torch.stack(
        [
            torch.cat([part + begin for begin, part in zip(range(0, experts, size), parts, strict=True)])
            for parts in ([_balanced(own, inside) for own in of_block.split(size)] for of_block in counts)
        ]
    )
    if window <= where.per_node:  # a group stays in one node: whole groups change places
        at = [number * window // where.per_node for number in range(groups)]
        collapsed = _by_group(counts, transitions, size)
        found = _nearer(*collapsed, _unchanged(collapsed[0]), _Bins([1] * groups, at), limited=False)
        return _expanded(found, first, size)
    group_of = torch.arange(experts) // size
    same = group_of[:, None] == group_of
    return _nearer(counts, transitions, first, _Bins.of_ranks(where, experts), allowed=same)


def _unchanged(counts: Tensor) -> Tensor:
    """Return the numbering that leaves every expert where it is."""
    return torch.arange(counts.shape[1]).repeat(len(counts), 1)


def _by_group(counts: Tensor, transitions: Tensor | None, size: int) -> tuple[Tensor, Tensor | None]:
    """Return the counts and transitions of groups of so many experts."""
    of_groups = counts.unflatten(1, (-1, size)).sum(2)
    if transitions is None:
        return of_groups, None
    return of_groups, transitions.unflatten(2, (-1, size)).sum(3).unflatten(1, (-1, size)).sum(2)


def _expanded(groups: Tensor, inside: Tensor, size: int) -> Tensor:
    """Return the numbering of experts, given that of groups and the order of the experts inside each group."""
    return torch.stack([own.view(-1, size)[order].flatten() for order, own in zip(groups, inside, strict=True)])


class _Bins:
    """The bins that experts, or groups of them, are put in: how many each takes, and the node of each."""

    def __init__(self, shares: Sequence[int], node_of_bin: Sequence[int]) -> None:
        self.shares = list(shares)
        sizes, self.node_of_bin = torch.tensor(self.shares), torch.tensor(list(node_of_bin))
        self.bins = torch.arange(len(self.shares)).repeat_interleave(sizes)
        """The bin of each number."""
        self.nodes = self.node_of_bin.repeat_interleave(sizes)
        """The node of each number."""

    @classmethod
    def of_ranks(cls, where: ExpertRanks, items: int) -> _Bins:
        return cls(where.shares(items), [rank // where.per_node for rank in range(where.number)])

    def loads(self, counts: Tensor) -> Tensor:
        """Return the load of each bin, given the counts by number."""
        return torch.zeros(len(self.shares), dtype=counts.dtype).index_add_(0, self.bins, counts)


def _place(counts: Tensor, transitions: Tensor | None, bins: _Bins) -> Tensor:
    first = torch.stack([_balanced(of_block, bins) for of_block in counts])
    return _nearer(counts, transitions, first, bins)


# --- balance


def _balanced(counts: Tensor, bins: _Bins) -> Tensor:
    """Return the numbering of one block that balances the bins."""
    loads = counts.tolist()
    if _are_few(bins.shares):
        held = min(_divisions(range(len(loads)), bins.shares), key=lambda held: max(_sums(held, loads)))
        return torch.tensor([item for own in held for item in own])
    held: list[list[int]] = [[] for _ in bins.shares]
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        free = [number for number, own in enumerate(held) if len(own) < bins.shares[number]]
        held[min(free, key=lambda number: sum(loads[each] for each in held[number]))].append(item)
    while _even_out(held, loads):
        pass
    return torch.tensor([item for own in held for item in sorted(own)])


def _even_out(held: list[list[int]], loads: Sequence[float]) -> bool:
    """Divide the items of the busiest bin and another anew, so that both have less; return whether that is possible."""
    of_bins = _sums(held, loads)
    order = sorted(range(len(held)), key=of_bins.__getitem__)
    busiest = order.pop()
    for other in order:
        if not held[other]:
            continue
        found = _divided(held[busiest], held[other], loads)
        if max(_sums(found, loads)) < of_bins[busiest]:
            held[busiest], held[other] = found
            return True
    return False


def _divided(one: list[int], other: list[int], loads: Sequence[float]) -> list[list[int]]:
    """Return the items of two bins, divided so that the busier one has as little as possible."""
    if _are_few(shares := [len(one), len(other)]):
        return min(_divisions(one + other, shares), key=lambda held: max(_sums(held, loads)))
    total, own = _sums([one + other, one], loads)

    def busier(pair: tuple[int, int]) -> float:
        load = own - loads[pair[0]] + loads[pair[1]]
        return max(load, total - load)

    mine, theirs = min(product(one, other), key=busier)
    return [[theirs, *(item for item in one if item != mine)], [mine, *(item for item in other if item != theirs)]]


def _sums(held: Sequence[Sequence[int]], loads: Sequence[float]) -> list[float]:
    """Return the load of each bin."""
    return [sum(loads[item] for item in own) for own in held]


def _are_few(shares: Sequence[int]) -> bool:
    """Return whether so few ways divide items into bins of these sizes that all can be tried."""
    # the first test keeps the factorials small
    return sum(shares) <= MOST_DIVISIONS and factorial(sum(shares)) <= MOST_DIVISIONS * prod(map(factorial, shares))


def _divisions(items: Sequence[int], shares: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield every way to divide items into bins of these sizes."""
    if not shares:
        yield []
        return
    for own in combinations(items, shares[0]):
        left = [item for item in items if item not in own]
        for others in _divisions(left, shares[1:]):
            yield [list(own), *others]


# --- nearness


def _nearer(
    counts: Tensor,
    transitions: Tensor | None,
    order: Tensor,
    bins: _Bins,
    *,
    allowed: Tensor | None = None,
    limited: bool = True,
) -> Tensor:
    """Return a numbering with which fewer tokens change their node, found by exchanges from `order`.

    `allowed` [numbers, numbers] says which numbers may be exchanged. With `limited` no bin may get too much.
    """
    if transitions is None or not len(transitions) or len(set(bins.nodes.tolist())) == 1:
        return order
    order = order.clone()
    search = _Exchanges(counts, transitions, order, bins, allowed, limited=limited)
    for block in range(1, len(order)):  # first each block beside the one before it
        search.exchange(block, after=False)
    for _ in range(MOST_SWEEPS):
        gained = sum(search.exchange(block) for block in range(len(order)))
        if allowed is None:
            gained += sum(search.exchange_bins(block) for block in range(len(order)))
            gained += sum(search.rename_nodes(block) for block in range(1, len(order)))
        if gained <= LEAST_GAIN * float(transitions.sum()):
            break
    return order


class _Exchanges:
    """Exchanges experts between nodes, in place in `order`, as long as a token less changes its node."""

    def __init__(
        self, counts: Tensor, transitions: Tensor, order: Tensor, bins: _Bins, allowed: Tensor | None, *, limited: bool
    ) -> None:
        self.counts, self.transitions, self.order, self.bins, self.allowed = counts, transitions, order, bins, allowed
        self.limits = [float("inf")] * len(counts)
        if limited:
            loads = [bins.loads(own[new]) for own, new in zip(counts, order, strict=True)]
            self.limits = [max(float(own.max()), SLACK * float(own.mean())) for own in loads]
        self.at = one_hot(bins.nodes, int(bins.node_of_bin.max()) + 1).double()
        """Which node each number is on, [numbers, nodes]."""

    def exchange(self, block: int, *, after: bool = True) -> float:
        """Exchange experts of a block, the pair first that helps most; return how many tokens more stay in a node.

        Without `after` only the transitions from the block before count.
        """
        near, gained = self._near(block, after=after), 0.0
        counts = self.counts[block][self.order[block]]
        loads, limit, bins, nodes = self.bins.loads(counts), self.limits[block], self.bins.bins, self.bins.nodes
        while True:
            gain = _gains(near, nodes)
            more = counts - counts[:, None]  # what the bin of the row's number gets more
            kept = (loads[bins][:, None] + more <= limit) & (loads[bins] - more <= limit)
            kept = kept if self.allowed is None else kept & self.allowed
            one, other = _best(gain.masked_fill(~kept, 0))
            if gain[one, other] < LEAST or not kept[one, other]:
                return gained
            change = more[one, other].clone()
            loads[bins[one]] += change
            loads[bins[other]] -= change
            gained += float(gain[one, other])
            for values in (self.order[block], counts, near):
                values[[one, other]] = values[[other, one]]

    def exchange_bins(self, block: int) -> float:
        """Exchange all experts of two bins of equal sizes, as `exchange` does with single ones; no load gets larger."""
        near = self._near(block)
        of_bins = torch.zeros(len(self.bins.shares), near.shape[1], dtype=near.dtype)
        of_bins.index_add_(0, self.bins.bins, near)
        sizes, gained = torch.tensor(self.bins.shares), 0.0
        while True:
            gain = _gains(of_bins, self.bins.node_of_bin).masked_fill(sizes != sizes[:, None], 0)
            one, other = _best(gain)
            if gain[one, other] < LEAST:
                return gained
            gained += float(gain[one, other])
            of_bins[[one, other]] = of_bins[[other, one]]
            self._swap(self.order[block : block + 1], self.bins.bins == one, self.bins.bins == other)

    def rename_nodes(self, block: int) -> float:
        """Exchange whole nodes in this block and all behind it, where that helps; return how many tokens more stay.

        No load changes, and single exchanges would have to go uphill before they got there.
        """
        gained = 0.0
        while True:
            flows = self.transitions[block - 1][self.order[block - 1]][:, self.order[block]]
            near = self.at.T @ flows.T @ self.at  # from each node, by the node it leads to
            gain = _gains(near, torch.arange(len(near)))
            one, other = _best(gain)
            if gain[one, other] < LEAST or not self._alike(one, other):
                return gained
            gained += float(gain[one, other])
            self._swap(self.order[block:], self.bins.nodes == one, self.bins.nodes == other)

    def _near(self, block: int, *, after: bool = True) -> Tensor:
        """Return how many tokens of each number's expert are on each node in the blocks beside it, [numbers, nodes]."""
        near = torch.zeros_like(self.at)
        if block:
            near += self.transitions[block - 1][self.order[block - 1]][:, self.order[block]].T @ self.at
        if after and block < len(self.transitions):
            near += self.transitions[block][self.order[block]][:, self.order[block + 1]] @ self.at
        return near

    @staticmethod
    def _swap(orders: Tensor, one: Tensor, other: Tensor) -> None:
        """Exchange the experts that two sets of numbers have in some blocks."""
        first, second = torch.nonzero(one).flatten(), torch.nonzero(other).flatten()
        orders[:, torch.cat([first, second])] = orders[:, torch.cat([second, first])]

    def _alike(self, one: int, other: int) -> bool:
        """Return whether two nodes have bins of the same sizes."""
        first, second = (self.bins.bins[self.bins.nodes == node] for node in (one, other))
        return len(first) == len(second) and bool((first - first[0] == second - second[0]).all())


def _gains(near: Tensor, nodes: Tensor) -> Tensor:
    """Return how many tokens more stay in their node if two things change places, given what each has on each node."""
    there = near[:, nodes] - near.gather(1, nodes[:, None])
    return there + there.T


def _best(gain: Tensor) -> tuple[int, int]:
    return divmod(int(gain.argmax()), len(gain))

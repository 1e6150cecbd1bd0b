"""The placement of a mixture's experts: a numbering that balances the load of ranks and makes messages small.

Rank r along expert holds the experts of its chunk of the numbers 0 to E-1, so a placement is a numbering: `order[b, i]`
is the expert of block b that gets the number i. The model is the same function after it, with the rows of its weights
in another order.

A token is sent once to each rank that has some of its experts (`nn.dispatch`). So less is sent if experts that the same
tokens choose, its companions, are on one rank. Two steps find a numbering of each block. The first balances the load of
ranks: the expert with most tokens goes first, to the rank with the least, and exchanges between two ranks then make the
busiest one less busy. The second exchanges experts of two ranks, the best pair first, so that more companions meet, as
long as no rank gets more than `SLACK` allows. Of few experts all ways to divide them are tried.

Where tokens choose among groups of experts, the numbers of a group stay next to each other, for the router takes
neighbours for a group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, product
from math import factorial, inf, prod

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fourfold.layout import chunk

SLACK = 1.1
"""How many times the mean a rank may have for companions to meet; more if balance alone does not reach that."""
MOST_DIVISIONS = 3000
"""All ways to divide experts among ranks are tried if there are at most so many: 8 experts on up to 4 ranks, or 7 and 7
on two. More experts divide evenly enough by exchanges of one for one."""
STARTS = 3
"""The search begins from so many divisions; more of them bring less than a hundredth."""
LEAST = 0.5
"""The least gain of an exchange, in tokens, which are whole numbers."""


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
    """How even the ranks are with a numbering of experts, and to how many of them a token goes."""

    rank_loads: list[float]
    """The pairs of the busiest rank divided by the mean, by block."""
    node_loads: list[float]
    """The pairs of the busiest node divided by the mean, by block."""
    together: list[float]
    """The share of companions that are on one rank, by block; empty if none were recorded."""
    ranks: int
    """The number of ranks."""

    def ranks_of_a_token(self, chosen: int) -> list[float]:
        """Return to how many ranks a token goes on average, by block.

        It is exact for two experts of a token. For K it is what follows if companions are independent of each other:
        with a share s of them on one rank, (1 - (1 - s)^K) / s, and not more than there are ranks.
        """
        each = [(1 - (1 - share) ** chosen) / share if share else float(chosen) for share in self.together]
        return [min(found, float(self.ranks)) for found in each]


def cost_of(counts: Tensor, companions: Tensor | None, order: Tensor, where: ExpertRanks) -> PlacementCost:
    """Return what a numbering costs.

    `counts` [blocks, E] are the pairs of each expert, and `companions` [blocks, E, E] how many tokens chose both of two
    experts. `order` [blocks, E] is the expert that has each number.
    """
    shares = where.shares(counts.shape[1])
    bins = _bins(shares)
    loads = torch.stack([_loads(of_block[new], shares) for of_block, new in zip(counts.double(), order, strict=True)])
    by_node = loads.view(len(loads), where.nodes, where.per_node).sum(2)
    together = []
    for own, new in zip(() if companions is None else companions.double(), order, strict=companions is not None):
        found = _of_others(own)[new][:, new]
        together.append(float(found[bins[:, None] == bins].sum() / found.sum().clamp(min=1)))
    return PlacementCost(_worst(loads), _worst(by_node), together, where.number)


def _worst(loads: Tensor) -> list[float]:
    """Return the largest load of each row divided by the mean."""
    return (loads.max(1).values * loads.shape[1] / loads.sum(1).clamp(min=1)).tolist()


def place(counts: Tensor, companions: Tensor | None, where: ExpertRanks, groups: int = 1) -> Tensor:
    """Return the numbering [blocks, E] of the experts of several blocks; see `cost_of` for the arguments.

    `groups` is the number of groups of neighbours among which tokens choose; 1 if they choose among all experts.
    """
    met = [None] * len(counts) if companions is None else [_of_others(own) for own in companions.double()]
    return torch.stack([_place(*block, where, groups) for block in zip(counts.double(), met, strict=True)])


def _place(counts: Tensor, met: Tensor | None, where: ExpertRanks, groups: int) -> Tensor:
    """Return the numbering of one block."""
    experts = len(counts)
    shares, size = where.shares(experts), experts // groups
    if groups == 1:
        return _placed(counts, met, shares)
    every = torch.arange(experts).view(groups, size)
    if all(share % size == 0 for share in shares):  # ranks have whole groups
        of_groups = None if met is None else _of_others(met.view(groups, size, groups, size).sum((1, 3)))
        return every[_placed(counts.view(groups, size).sum(1), of_groups, where.shares(groups))].flatten()
    if len(set(shares)) > 1 or size % shares[0]:
        raise ValueError(
            f"{experts} experts in {groups} groups on {where.number} ranks: the {size} experts of a group must stay "
            "next to each other, so a rank must hold whole groups, or a group whole ranks; choose another number of "
            "ranks"
        )
    inside = shares[: size // shares[0]]  # the ranks that have one group
    return torch.cat([own[_placed(counts[own], None if met is None else met[own][:, own], inside)] for own in every])


def _of_others(companions: Tensor) -> Tensor:
    """Return the companions of each expert, or group, besides itself."""
    return companions - companions.diag().diag()


def _bins(shares: Sequence[int]) -> Tensor:
    """Return the rank of each number."""
    return torch.arange(len(shares)).repeat_interleave(torch.tensor(shares))


def _loads(counts: Tensor, shares: Sequence[int]) -> Tensor:
    """Return the load of each rank, given the counts by number."""
    return torch.stack([part.sum() for part in counts.split(list(shares))])


# --- companions


def _placed(counts: Tensor, met: Tensor | None, shares: Sequence[int]) -> Tensor:
    """Return the numbering that divides experts, or groups, among ranks of these sizes."""
    if met is None or len(shares) == 1:
        return _balanced(counts, shares)
    bins = _bins(shares)
    if _are_few(shares):
        every = [
            torch.tensor([item for own in held for item in own]) for held in _divisions(range(len(counts)), shares)
        ]
        busiest = [float(_loads(counts[order], shares).max()) for order in every]
        limit = max(min(busiest), SLACK * float(counts.sum()) / len(shares))
        return max(
            (order for order, load in zip(every, busiest, strict=True) if load <= limit),
            key=partial(_meeting, met, bins),
        )
    even = _balanced(counts, shares)
    limit = max(float(_loads(counts[even], shares).max()), SLACK * float(counts.sum()) / len(shares))
    noise = torch.Generator().manual_seed(0)  # the same run gives the same numbering
    found = [_exchanged(counts, met, even, shares, limit)]
    for _ in range(1, STARTS):
        # other divisions lead to other ends: companions first, then balance, then both
        order = torch.randperm(len(counts), generator=noise)
        order = _relieved(counts, met, _exchanged(counts, met, order, shares, inf), shares, limit)
        if float(_loads(counts[order], shares).max()) <= limit:
            found.append(_exchanged(counts, met, order, shares, limit))
    return max(found, key=partial(_meeting, met, bins))


def _meeting(met: Tensor, bins: Tensor, order: Tensor) -> float:
    """Return how many companions are on one rank."""
    return float(met[order][:, order][bins[:, None] == bins].sum())


def _exchanged(counts: Tensor, met: Tensor, order: Tensor, shares: Sequence[int], limit: float) -> Tensor:
    """Exchange experts of two ranks, the pair first that helps most, as long as no rank gets more than `limit`."""
    order, bins = order.clone(), _bins(shares)
    loads = _loads(counts[order], shares)
    while True:
        gain, more = _gains(met, order, shares), counts[order] - counts[order][:, None]
        fits = (loads[bins][:, None] + more <= limit) & (loads[bins] - more <= limit)
        one, other = divmod(int(gain.masked_fill(~fits, 0).argmax()), len(order))
        if gain[one, other] < LEAST or not fits[one, other]:
            return order
        loads[bins[one]] += more[one, other]
        loads[bins[other]] -= more[one, other]
        order[[one, other]] = order[[other, one]]


def _relieved(counts: Tensor, met: Tensor, order: Tensor, shares: Sequence[int], limit: float) -> Tensor:
    """Exchange experts of the busiest rank until it has at most `limit`, first those that cost fewest companions."""
    order, bins = order.clone(), _bins(shares)
    for _ in range(len(order)):  # where loads become even at all, fewer do
        loads = _loads(counts[order], shares)
        busiest = int(loads.argmax())
        if loads[busiest] <= limit:
            break
        less = (counts[order][:, None] - counts[order]).clamp(max=float(loads[busiest]) - limit)
        after = loads[bins] + counts[order][:, None] - counts[order]  # of the rank that takes the busy expert
        helps = (bins[:, None] == busiest) & (bins != busiest) & (less > 0) & (after < loads[busiest])
        if not helps.any():
            break
        worth = (_gains(met, order, shares) / less).masked_fill(~helps, -float("inf"))
        one, other = divmod(int(worth.argmax()), len(order))
        order[[one, other]] = order[[other, one]]
    return order


def _gains(met: Tensor, order: Tensor, shares: Sequence[int]) -> Tensor:
    """Return how many companions more meet if the experts of two numbers change places, [E, E]."""
    own, bins = met[order][:, order], _bins(shares)
    near = own @ one_hot(bins, len(shares)).to(own.dtype)  # of each number's expert on each rank
    there = near[:, bins] - near.gather(1, bins[:, None])
    # companions are counted in both directions, and the two do not meet each other
    return torch.where(bins[:, None] == bins, 0.0, 2 * (there + there.T - 2 * own))


# --- balance


def _balanced(counts: Tensor, shares: Sequence[int]) -> Tensor:
    """Return the numbering of one block that balances the ranks."""
    loads = counts.tolist()
    if _are_few(shares):
        held = min(_divisions(range(len(loads)), shares), key=lambda held: max(_sums(held, loads)))
        return torch.tensor([item for own in held for item in own], dtype=torch.long)
    held: list[list[int]] = [[] for _ in shares]
    for item in sorted(range(len(loads)), key=lambda item: (-loads[item], item)):
        free = [number for number, own in enumerate(held) if len(own) < shares[number]]
        held[min(free, key=lambda number: sum(loads[each] for each in held[number]))].append(item)
    while _even_out(held, loads):
        pass
    return torch.tensor([item for own in held for item in sorted(own)])


def _even_out(held: list[list[int]], loads: Sequence[float]) -> bool:
    """Divide the items of the busiest rank and another anew, so that both have less; return whether that works."""
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
    """Return the items of two ranks, divided so that the busier one has as little as possible."""
    if _are_few(shares := [len(one), len(other)]):
        return min(_divisions(one + other, shares), key=lambda held: max(_sums(held, loads)))
    total, own = _sums([one + other, one], loads)

    def busier(pair: tuple[int, int]) -> float:
        load = own - loads[pair[0]] + loads[pair[1]]
        return max(load, total - load)

    mine, theirs = min(product(one, other), key=busier)
    return [[theirs, *(item for item in one if item != mine)], [mine, *(item for item in other if item != theirs)]]


def _sums(held: Sequence[Sequence[int]], loads: Sequence[float]) -> list[float]:
    """Return the load of each rank."""
    return [sum(loads[item] for item in own) for own in held]


def _are_few(shares: Sequence[int]) -> bool:
    """Return whether so few ways divide items among ranks of these sizes that all can be tried."""
    # the first test keeps the factorials small
    return sum(shares) <= MOST_DIVISIONS and factorial(sum(shares)) <= MOST_DIVISIONS * prod(map(factorial, shares))


def _divisions(items: Sequence[int], shares: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield every way to divide items among ranks of these sizes."""
    if not shares:
        yield []
        return
    for own in combinations(items, shares[0]):
        left = [item for item in items if item not in own]
        for others in _divisions(left, shares[1:]):
            yield [list(own), *others]

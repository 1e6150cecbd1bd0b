"""Numberings of experts: as even as brute force finds them, near, and within groups."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from statistics import fmean

import pytest
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fourfold.expert_placement import SLACK, ExpertRanks, cost_of, place


def divisions(items: Sequence[int], shares: Sequence[int]) -> Iterator[list[int]]:
    """Every way to divide items into ranks of these sizes, as the rank of each item."""
    if not items:
        yield []
        return
    others = items[1:]
    for rank, share in enumerate(shares):
        if share:
            left = [*shares[:rank], share - 1, *shares[rank + 1 :]]
            for rest in divisions(others, left):
                yield [rank, *rest]


def drawn(seed: int) -> tuple[Tensor, Tensor, ExpertRanks]:
    """Random counts and companions of up to 8 experts in 1 to 3 blocks."""
    rng = random.Random(seed)
    where = rng.choice([ExpertRanks(2, 1), ExpertRanks(3, 1), ExpertRanks(4, 2), ExpertRanks(4, 1)])
    experts, blocks = rng.randint(where.number, 8), rng.randint(1, 3)
    generator = torch.Generator().manual_seed(seed)
    counts = (torch.rand(blocks, experts, generator=generator) ** rng.choice([1, 3]) * 1000 + 1).long()
    companions = (torch.rand(blocks, experts, experts, generator=generator) ** 6 * 1000).long()
    return counts, companions + companions.mT, where


def busiest(counts: Tensor, ranks: Tensor, number: int) -> Tensor:
    """The load of the busiest rank, for each of several divisions."""
    return (one_hot(ranks, number) * counts[None, :, None]).sum(1).max(1).values


def most_that_meet(counts: Tensor, companions: Tensor, where: ExpertRanks) -> float:
    """The most companions of a block that can be on one rank if none gets more than a placement may give it."""
    every = torch.tensor(list(divisions(range(len(counts)), where.shares(len(counts)))))
    loads = busiest(counts, every, where.number)
    allowed = loads <= max(float(loads.min()), SLACK * float(counts.sum()) / where.number)
    others = companions * (1 - torch.eye(len(counts)))
    return max(float(others[ranks[:, None] == ranks].sum()) for ranks in every[allowed]) / float(others.sum())


def test_placements_of_a_few_experts_are_the_best_there_are() -> None:
    for seed in range(12):
        counts, companions, where = drawn(seed)
        even, near = place(counts, None, where), place(counts, companions, where)
        every = torch.tensor(list(divisions(range(counts.shape[1]), where.shares(counts.shape[1]))))
        best = [float(busiest(own, every, where.number).min() * where.number / own.sum()) for own in counts]
        assert cost_of(counts, None, even, where).rank_loads == pytest.approx(best, abs=1e-6)
        found = cost_of(counts, companions, near, where)
        assert all(load <= max(least, SLACK) + 1e-6 for load, least in zip(found.rank_loads, best, strict=True))
        most = [most_that_meet(*block, where) for block in zip(counts, companions, strict=True)]
        assert found.together == pytest.approx(most, abs=1e-9)


def skewed(experts: int, blocks: int, *, clusters: int = 4, chosen: int = 2) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Counts, companions and choices of tokens that choose experts very unequally, most of them in one cluster of
    experts that have arbitrary numbers."""
    generator = torch.Generator().manual_seed(1)
    choices = []
    for _ in range(blocks):
        cluster = torch.randperm(experts, generator=generator) % clusters
        popular = torch.rand(experts, generator=generator) ** 3 + 0.02
        near = 1 + 15 * (cluster == torch.randint(clusters, (4000, 1), generator=generator))
        choices.append(torch.multinomial(popular * near, chosen, generator=generator))
    hot = torch.stack([one_hot(each, experts).sum(1).double() for each in choices])
    return hot.sum(1).long(), (hot.mT @ hot).long(), choices


def ranks_of_tokens(choices: Tensor, order: Tensor, where: ExpertRanks) -> float:
    """Count to how many ranks tokens go on average."""
    of_number = torch.arange(where.number).repeat_interleave(torch.tensor(where.shares(len(order))))
    ranks = of_number[order.argsort()[choices]]
    return float(one_hot(ranks, where.number).amax(1).sum(1).double().mean())


@pytest.mark.parametrize("chosen", [2, 4])
@pytest.mark.parametrize(("experts", "ranks"), [(32, ExpertRanks(4, 2)), (64, ExpertRanks(8, 4))])
def test_a_skewed_mixture_becomes_even_and_sends_less(experts: int, ranks: ExpertRanks, chosen: int) -> None:
    """The rows of a token are counted from its choices; what follows from pairs of them is exact for two."""
    counts, companions, choices = skewed(experts, 3, clusters=ranks.number, chosen=chosen)
    today = torch.arange(experts).repeat(3, 1)
    order = place(counts, companions, ranks)
    before, after = (cost_of(counts, companions, each, ranks) for each in (today, order))
    assert max(before.rank_loads) > 1.3
    assert max(after.rank_loads) <= SLACK + 1e-9
    sent = [
        [ranks_of_tokens(each, new, ranks) for each, new in zip(choices, whole, strict=True)]
        for whole in (today, order)
    ]
    for cost, real in zip((before, after), sent, strict=True):
        assert cost.ranks_of_a_token(chosen) == pytest.approx(real, rel=1e-9 if chosen == 2 else 0.1)
    assert fmean(sent[1]) <= (0.87 if chosen == 2 else 0.78) * fmean(sent[0])


@pytest.mark.parametrize(
    ("groups", "ranks"),
    [(8, ExpertRanks(4, 2)), (4, ExpertRanks(8, 4)), (4, ExpertRanks(4, 2))],
    ids=["ranks-of-groups", "groups-of-ranks", "one-each"],
)
def test_groups_stay_together(groups: int, ranks: ExpertRanks) -> None:
    counts, companions, _ = skewed(32, 3)
    order = place(counts, companions, ranks, groups)
    size, today = 32 // groups, torch.arange(32).repeat(3, 1)
    assert order.sort(1).values.equal(today)
    of_numbers = (order // size).unflatten(1, (groups, size))
    assert (of_numbers == of_numbers[:, :, :1]).all()
    before, after = (cost_of(counts, companions, each, ranks) for each in (today, order))
    if size == 32 // ranks.number:  # a rank has one group, whichever that is
        assert sorted(after.rank_loads) == pytest.approx(sorted(before.rank_loads))
    else:
        assert fmean(after.rank_loads) < fmean(before.rank_loads)
        even = cost_of(counts, companions, place(counts, None, ranks, groups), ranks)
        assert fmean(after.together) > fmean(even.together)


def test_groups_that_the_same_tokens_choose_come_together() -> None:
    """However many companions a group has inside, which are together anyhow."""
    groups, size = 16, 2
    near = torch.arange(groups) // 2  # groups 0 and 1 are chosen together, 2 and 3, ...
    met = 10 * (near == near[:, None]).long() + 1000 * torch.eye(groups, dtype=torch.long)
    companions = met.repeat_interleave(size, 0).repeat_interleave(size, 1)[None]
    order = place(torch.full((1, groups * size), 100), companions, ExpertRanks(4, 4), groups)
    of_ranks = near[order[0].view(4, -1) // size]
    assert [len(set(each)) for each in of_ranks.tolist()] == [2] * 4


def test_a_token_goes_to_no_more_ranks_than_there_are() -> None:
    companions = torch.full((1, 8, 8), 100)  # every token chooses all of 8 experts
    cost = cost_of(torch.full((1, 8), 100), companions, torch.arange(8)[None], ExpertRanks(2, 2))
    assert cost.ranks_of_a_token(8) == [2.0]


def test_what_does_not_divide_is_refused() -> None:
    counts, companions, _ = skewed(24, 2)
    with pytest.raises(ValueError, match="6 ranks along expert do not make nodes of 4; choose a number"):
        ExpertRanks(6, 4)
    with pytest.raises(ValueError, match="24 experts in 4 groups on 3 ranks: the 6 experts of a group"):
        place(counts, companions, ExpertRanks(3, 1), 4)

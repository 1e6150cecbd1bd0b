"""The candidates of one grid: in order of their estimates, as they fit into memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import get_args

import torch

from fourfold.grid import Shape
from fourfold.planner.estimate import LEVERS, Lever
from fourfold.planner.machine import Machine
from fourfold.planner.price import Choice
from fourfold.planner.seconds import Route, Seconds
from fourfold.policy import Recompute

RECOMPUTE = get_args(Recompute)
"""The more of it the less memory."""


@dataclass(frozen=True, slots=True)
class Estimated:
    """A candidate that was not simulated."""

    choice: Choice
    seconds: float


class Candidates:
    """The candidates of one grid, in order of their estimates, and those found to fit."""

    def __init__(
        self,
        choices: Sequence[Choice],
        seconds: torch.Tensor,
        orders: Sequence[tuple[str, ...]],
        fit: Callable[[Choice, Lever], Choice | None],
    ) -> None:
        """`seconds` [choice, lever, order]; `fit` gives the choice with the lever if it fits into memory."""
        self.choices, self.fit, self.orders = choices, fit, orders
        self.shape = choices[0].shape
        self.found: list[Estimated] = []
        self._too_large: list[tuple[Choice, Lever]] = []
        self._bounded: set[tuple[str, str]] = set()
        self._estimates = seconds
        best, order = (part.flatten() for part in seconds.min(dim=2))  # the order costs no memory
        self._seconds, self._order = best.tolist(), order.tolist()
        self._left = best.argsort(descending=True).tolist()
        self._skip()

    @property
    def estimate(self) -> float:
        """Of the next candidate; inf: there is none."""
        return self._seconds[self._left[-1]] if self._left else inf

    def try_next(self) -> bool:
        """Whether the next candidate fits."""
        flat = self._left.pop()
        choice, lever = self._candidate(flat)
        fitted = self.fit(choice, lever)
        if fitted is None:
            self._rule_out(choice, lever)
        else:
            shape = self.shape.reordered(self.orders[self._order[flat]])
            self.found.append(Estimated(replace(fitted, shape=shape), self._seconds[flat]))
        self._skip()
        return fitted is not None

    def elsewhere(self, machine: Machine) -> Iterator[Estimated]:
        """Every choice, with the lever of its best estimate, in every order of ranks whose links differ, where that
        fits and is not found yet."""
        for choice, estimates in zip(self.choices, self._estimates, strict=True):
            lever = int(estimates.amin(dim=1).argmin())
            fitted = self.fit(choice, LEVERS[lever]) if estimates[lever].min() < inf else None
            if fitted is None:
                continue
            seen = {_links(machine, one.choice.shape) for one in self.found if _same(one.choice, fitted)}
            for place in estimates[lever].argsort().tolist():
                shape = self.shape.reordered(self.orders[place])
                links = _links(machine, shape)
                if links not in seen:
                    seen.add(links)
                    yield Estimated(replace(fitted, shape=shape), float(estimates[lever, place]))

    def _candidate(self, flat: int) -> tuple[Choice, Lever]:
        return self.choices[flat // len(LEVERS)], LEVERS[flat % len(LEVERS)]

    def _rule_out(self, choice: Choice, lever: Lever) -> None:
        """It does not fit: find the fewest rows with which the same recompute does not even when it keeps nothing."""
        self._too_large.append((choice, lever))
        kind = choice.policy.activations, lever.recompute
        if kind in self._bounded:
            return
        self._bounded.add(kind)
        least = Lever(lever.recompute, keep_gathered=False, keep_weights=False)
        rows = sorted(
            (other for other in self.choices if other.policy.activations == choice.policy.activations),
            key=lambda other: other.rows,
        )
        # often not even the fewest rows fit
        fits = self.fit(rows[0], least) is not None
        first = bisect_left(rows, True, lo=1, key=lambda other: self.fit(other, least) is None) if fits else 0
        if first < len(rows):
            self._too_large.append((rows[first], least))

    def _skip(self) -> None:
        """Past what cannot fit."""
        while self._left:
            candidate = self._candidate(self._left[-1])
            possible = self._seconds[self._left[-1]] < inf
            if possible and not any(_needs_no_less(*candidate, *other) for other in self._too_large):
                return
            self._left.pop()


def _needs_no_less(choice: Choice, lever: Lever, other: Choice, others: Lever) -> bool:
    """Whether it takes at least the memory of the other, on the same grid."""
    return (
        choice.policy.activations == other.policy.activations
        and choice.rows >= other.rows
        and RECOMPUTE.index(lever.recompute) <= RECOMPUTE.index(others.recompute)
        and lever.keep_gathered >= others.keep_gathered
        and lever.keep_weights >= others.keep_weights
    )


def _links(machine: Machine, shape: Shape) -> tuple[Route, ...]:
    """Orders of ranks that have them in common cost the same."""
    prices = Seconds(machine, shape)
    return tuple(prices.link(axis) for axis in shape.used_axes)


def _same(one: Choice, other: Choice) -> bool:
    """Whether they differ in the order of ranks at the most."""
    return replace(one, shape=other.shape) == other

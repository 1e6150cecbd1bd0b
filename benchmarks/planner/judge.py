"""Predictions beside published figures: how far off they are, which targets they miss, which errors have grown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from benchmarks.planner.published_runs import CAUSES, EACH, ON_AVERAGE

GROWTH = 0.005
"""How much an error may grow before it counts: smaller changes are insignificant."""


class Compared(NamedTuple):
    """A prediction beside the published figure."""

    name: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass
class Judge:
    """Collects errors, failures, and missed targets that have a suspected cause."""

    recorded: dict[str, float]
    recording: bool = False
    """Whether this run's errors become the recorded ones."""
    failures: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)

    def add(self, one: Compared) -> None:
        error = abs(one.error)
        self.compare(one.name, error)
        if error > EACH:
            self.miss(one.name, f"{one.error:+.1%}, target {EACH:.0%}")

    def compare(self, name: str, error: float) -> None:
        """Compare an error with the recorded one."""
        self.errors[name] = round(error, 4)
        if self.recording:
            return
        if name not in self.recorded:
            self.failures.append(f"{name}: no error is recorded; check it, then run with --record")
        elif error > self.recorded[name] + GROWTH:
            self.failures.append(f"{name}: the error has grown from {self.recorded[name]:.1%} to {error:.1%}")

    def add_mean(self, name: str, compared: Sequence[Compared]) -> float:
        """Judge the mean of the errors and return it."""
        mean = fmean(abs(one.error) for one in compared)
        if mean > ON_AVERAGE:
            self.miss(name, f"{mean:.1%} on average, target {ON_AVERAGE:.0%}")
        return mean

    def miss(self, name: str, what: str) -> None:
        if name in CAUSES:
            self.misses.append(f"{name}: {what}. Suspected: {CAUSES[name]}")
        else:
            self.failures.append(f"{name}: {what}, and published_runs.py gives no cause")

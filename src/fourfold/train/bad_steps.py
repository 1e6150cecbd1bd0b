"""Steps with bad numbers, gradients that are not finite or a loss that jumps, and what is done about them.

    skip        the step changes nothing, which the device decides; too many in a row end the run
    roll_back   the run resumes from its newest checkpoint, without the data of the steps since
    stop        the run ends
    tell        a spike is recorded, and the run continues

All ranks see the same numbers, so they decide the same without asking each other. A loss is a *spike* above

    median + above * spread        of the last WINDOW good losses, where
    spread = 1.4826 * median of |loss - median|

is the standard deviation of normally distributed losses, which a few outliers do not move.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median
from typing import Any

from fourfold.errors import BadStepsError, RollBackError
from fourfold.train.config import WatchSection

WAY_OUT = "lower optimizer.learning_rate, raise optimizer.warmup, or look at the data of these steps"
WINDOW, MIN_LOSSES = 64, 32
"""The limit follows from the last WINDOW losses; from fewer than MIN_LOSSES it would be too uncertain."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MIN_SPREAD = 0.01
"""The spread is at least this share of the median: losses that hardly vary would make spikes of rounding."""


class Spikes:
    """Computes the limit for the next loss from the last losses. With `above` 0 nothing is a spike."""

    def __init__(self, above: float, losses: Iterable[float] = ()) -> None:
        self._above = above
        self._losses = deque(losses, WINDOW)

    @property
    def losses(self) -> list[float]:
        return list(self._losses)

    def add(self, loss: float) -> None:
        """Take a good loss."""
        self._losses.append(loss)

    @property
    def limit(self) -> float:
        """The loss above which the next one is a spike."""
        if not self._above or len(self._losses) < MIN_LOSSES:
            return inf
        middle = median(self._losses)
        spread = NORMAL * median(abs(loss - middle) for loss in self._losses)
        return middle + self._above * max(spread, MIN_SPREAD * abs(middle))


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step, what is bad about it, and what is to be done."""

    step: int
    spike: bool
    """Whether its loss is a spike; otherwise its gradients were not finite."""
    action: str
    loss: float
    limit: float
    in_a_row: int
    """Steps that were skipped in a row, including this one; 0 where this step was not skipped."""

    def why(self, parameter: str | None) -> str:
        if self.spike:
            return f"the loss of step {self.step} is {self.loss:.4g}, above the limit of {self.limit:.4g}"
        return f"the gradients of step {self.step} are not finite, the first in {parameter}"


class StepJudge:
    """Judges the steps of a run, in their order."""

    def __init__(self, section: WatchSection, max_skipped: int) -> None:
        self._section, self._max_skipped = section, max_skipped
        self._spikes = Spikes(section.spike_above)
        self._in_a_row = 0

    @property
    def limit(self) -> float:
        """The loss above which the next step is a spike."""
        return self._spikes.limit

    @property
    def skip_above(self) -> float:
        """The loss above which the device must leave the next step out."""
        return self.limit if self._section.spikes == "skip" else inf

    def judge(self, step: int, loss: float, norm: float, limit: float) -> BadStep | None:
        spike = isfinite(norm) and not loss <= limit  # a loss that is not a number is a spike too
        if isfinite(norm) and not spike:
            self._in_a_row = 0
            self._spikes.add(loss)
            return None
        action = self._section.spikes if spike else self._section.not_finite
        skipped = not spike or action == "skip"
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped and isfinite(limit):
            self._spikes.add(limit)  # so that a loss that stays high stops counting as a spike after a while
        return BadStep(step, spike, action, loss, limit, self._in_a_row)

    def act(self, bad: BadStep, parameter: str | None, data: dict[str, Any]) -> None:
        """Raise what is to be done beyond skipping the step; `data` is the state of the loader."""
        why = bad.why(parameter)
        if bad.action == "roll_back":
            raise RollBackError(why, bad.step, data)
        if bad.action == "stop":
            raise BadStepsError(f"stopped: {why}; {WAY_OUT}")
        if bad.in_a_row >= self._max_skipped:
            raise BadStepsError(f"stopped after {bad.in_a_row} bad steps in a row: {why}; {WAY_OUT}")

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps; the keys are those of checkpoints that exist."""
        return {"skipped": self._in_a_row, "losses": self._spikes.losses}

    def restore(self, state: dict[str, Any]) -> None:
        skipped, losses = state.get("skipped", 0), state.get("losses", [])
        self._in_a_row = skipped if isinstance(skipped, int) else 0
        good = [loss for loss in losses if isinstance(loss, float)] if isinstance(losses, list) else []
        self._spikes = Spikes(self._section.spike_above, good)

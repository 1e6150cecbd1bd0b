"""What becomes of a step whose numbers are bad: gradients that are not finite, or a loss that jumps.

    skip        the step changes nothing, which the device decides; too many in a row end the run
    roll_back   the run goes on from its newest checkpoint, without the data of the steps since
    stop        the run ends
    tell        a spike is recorded, and the run goes on

All ranks see the same numbers, so they decide the same without asking each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from fourfold.errors import BadStepsError, RollBackError
from fourfold.train.sections import WatchSection
from fourfold.watch.spikes import Spikes

MENDS = "lower optimizer.rate, raise optimizer.warmup, or look at the data of these steps"


@dataclass(frozen=True, slots=True)
class Bad:
    """A step, what is bad about it, and what is to be done."""

    step: int
    spike: bool
    """Of its loss; else gradients were not finite."""
    action: str
    loss: float
    limit: float
    in_a_row: int
    """Steps that were skipped, with this one; 0 where it was not."""

    def why(self, parameter: str | None) -> str:
        if self.spike:
            return f"the loss of step {self.step} is {self.loss:.4g}, and {self.limit:.4g} was the most to expect"
        return f"the gradients of step {self.step} are not finite, first that of {parameter}"


class Numbers:
    """Judges the steps of a run, in their order."""

    def __init__(self, section: WatchSection, max_skipped: int) -> None:
        self._section, self._most = section, max_skipped
        self._spikes = Spikes(section.spike_above)
        self._in_a_row = 0

    @property
    def limit(self) -> float:
        """For the loss of the next step."""
        return self._spikes.limit

    @property
    def skip_above(self) -> float:
        """A step with a higher loss must change nothing."""
        return self.limit if self._section.spikes == "skip" else inf

    def judge(self, step: int, loss: float, norm: float, limit: float) -> Bad | None:
        spike = isfinite(norm) and not loss <= limit  # a loss that is not a number is one
        if isfinite(norm) and not spike:
            self._in_a_row = 0
            self._spikes.add(loss)
            return None
        action = self._section.spikes if spike else self._section.not_finite
        skipped = not spike or action == "skip"
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped and isfinite(limit):
            self._spikes.add(limit)  # a level that stays is no spike any more after a while
        return Bad(step, spike, action, loss, limit, self._in_a_row)

    def act(self, bad: Bad, parameter: str | None, data: dict[str, Any]) -> None:
        """Raise what is to be done beyond skipping; `data` is where the loader stands."""
        why = bad.why(parameter)
        if bad.action == "roll_back":
            raise RollBackError(why, bad.step, data)
        if bad.action == "stop":
            raise BadStepsError(f"stopped: {why}; {MENDS}")
        if bad.in_a_row >= self._most:
            raise BadStepsError(f"stopped after {bad.in_a_row} bad steps in a row: {why}; {MENDS}")

    def state(self) -> dict[str, Any]:
        """To go on with from a checkpoint."""
        return {"skipped": self._in_a_row, "losses": self._spikes.losses}

    def restore(self, state: dict[str, Any]) -> None:
        skipped, losses = state.get("skipped", 0), state.get("losses", [])
        self._in_a_row = skipped if isinstance(skipped, int) else 0
        good = [loss for loss in losses if isinstance(loss, float)] if isinstance(losses, list) else []
        self._spikes = Spikes(self._section.spike_above, good)

"""Watches over a run: over the numbers of its steps, and over its ranks. The config's section is `watch`.

`StepJudge` finds steps with gradients that are not finite or with a loss that jumps, and the config names the action:

    skip        the step changes nothing, which the device decides; too many in a row end the run
    roll_back   the run resumes from its newest checkpoint, without the data of the steps since
    stop        the run ends
    tell        a spike is recorded, and the run continues

All ranks see the same numbers, so they decide the same without asking each other. A loss is a *spike* above

    median + above * spread        of the last WINDOW good losses, where
    spread = 1.4826 * median of |loss - median|

is the standard deviation of normally distributed losses, which a few outliers do not move.

`RouterJudge` finds routers of mixtures of experts that collapse: nearly all tokens choose the same experts, and the
others learn nothing. A router has collapsed if in COLLAPSED_STEPS steps in a row an expert had no token, or one expert
had at least TOO_BUSY times the mean and at least half of the most that is possible. That is recorded, and the run
continues.

`Guard` keeps a tape of what each rank does, raises an alarm when a rank is stuck, and finds slow ranks. The rank that
raises the alarm leaves the diagnosis in the run's folder (`watch/diagnosis.txt`). Every rank reports the diagnosis to
whoever started it, and ends.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from fourfold.errors import BadStepsError, RollBackError
from fourfold.expert_counts import StepCounts
from fourfold.grid import Grid
from fourfold.job import Channel
from fourfold.train.config import WatchSection
from fourfold.train.console import drain_output, logger
from fourfold.train.launch import report_failure
from fourfold.watch.liveness import Alarm, JobDiagnosis, NoAlarm, Phase
from fourfold.watch.peers import StepWindows, Straggler
from fourfold.watch.tape import DIAGNOSIS, EARLIER_DIAGNOSIS, Tape, Waits, tape_path

WAY_OUT = "lower optimizer.learning_rate, raise optimizer.warmup, or look at the data of these steps"
BALANCE = "raise model.aux or model.bias_rate, or lower optimizer.learning_rate"
WINDOW = 64
"""The limit for the next loss follows from this many of the last good losses: enough for a steady median, few enough
that the limit follows a loss that falls."""
MIN_LOSSES = 32
"""With fewer good losses than this there is no limit, because it would be too uncertain."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MIN_SPREAD = 0.01
"""The spread is at least this share of the median: otherwise rounding would be a spike if losses hardly vary."""


COLLAPSED_STEPS = 20
"""Steps in a row after which a router counts as collapsed: a single batch may have no token for some expert."""
TOO_BUSY = 2.0
"""The least load of the busiest expert, as a multiple of the mean, of a router that collapses: with few experts half of
the most that is possible is hardly uneven."""


# The numbers of steps


def spike_limit(losses: Collection[float], above: float) -> float:
    """Return the loss above which the next one is a spike, given the last good losses; `above` 0 sets no limit."""
    if not above or len(losses) < MIN_LOSSES:
        return inf
    middle = median(losses)
    spread = NORMAL * median(abs(loss - middle) for loss in losses)
    return middle + above * max(spread, MIN_SPREAD * abs(middle))


@dataclass(frozen=True, slots=True)
class BadStep:
    """A step, what is bad about it, and the action that the config names."""

    step: int
    spike: bool
    """Whether its loss is a spike; otherwise its gradients were not finite."""
    action: str
    loss: float
    limit: float
    in_a_row: int
    """Steps that were skipped in a row, including this one; 0 if this step was not skipped."""


class RouterJudge:
    """Judges the load of experts, step by step."""

    def __init__(self) -> None:
        self._in_a_row: Counter[tuple[int, int, str]] = Counter()
        """For how many steps each expert of each block has had no token, or far too many."""

    def judge(self, counts: StepCounts, chosen: int) -> str:
        """Return which routers have collapsed with this step, empty if none has; each is named once while it lasts.

        A token chooses so many experts (`chosen`).
        """
        now: Counter[tuple[int, int, str]] = Counter()
        for block, tokens in counts.mixtures.items():
            mean = sum(tokens) / len(tokens)
            most = max(TOO_BUSY, len(tokens) / chosen / 2) * mean
            for expert, count in enumerate(tokens):
                what = "none" if count == 0 else "too many" if count >= most else ""
                if what:
                    now[block, expert, what] = self._in_a_row[block, expert, what] + 1
        self._in_a_row = now
        fresh = sorted({block for (block, _, _), steps in now.items() if steps == COLLAPSED_STEPS})
        return "; ".join(self._describe(block) for block in fresh)

    def _describe(self, block: int) -> str:
        experts: dict[str, list[int]] = {"none": [], "too many": []}
        for (of, expert, what), steps in self._in_a_row.items():
            if of == block and steps >= COLLAPSED_STEPS:
                experts[what].append(expert)
        unused, busy = experts.values()
        said = [f"no token chose {_experts(unused)}"] if unused else []
        said += [f"most tokens chose {_experts(busy)}"] if busy else []
        return f"the router of block {block} collapses: for {COLLAPSED_STEPS} steps {' and '.join(said)}; {BALANCE}"


def _experts(numbers: Sequence[int]) -> str:
    return f"expert{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


class StepJudge:
    """Judges the steps of a run, in their order. Its state belongs to the last step that it has judged."""

    def __init__(self, section: WatchSection, max_skipped: int) -> None:
        self._section, self._max_skipped = section, max_skipped
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._in_a_row = 0

    @property
    def limit(self) -> float:
        """The loss above which the next step is a spike."""
        return spike_limit(self._losses, self._section.spike_above)

    @property
    def skip_above(self) -> float:
        """The loss above which the device must skip the next step."""
        return self.limit if self._section.spikes == "skip" else inf

    def judge(self, step: int, loss: float, norm: float, limit: float) -> BadStep | None:
        """Return what is wrong with a step, or None. `limit` is the one from when the step was launched."""
        spike = isfinite(norm) and not loss <= limit  # also true if the loss is NaN
        if isfinite(norm) and not spike:
            self._in_a_row = 0
            self._losses.append(loss)
            return None
        action = self._section.spikes if spike else self._section.not_finite
        skipped = not spike or action == "skip"
        self._in_a_row = self._in_a_row + 1 if skipped else 0
        if not skipped and isfinite(limit):
            self._losses.append(limit)  # so that a loss that stays high stops counting as a spike after a while
        return BadStep(step, spike, action, loss, limit, self._in_a_row)

    def act(self, bad: BadStep, parameter: str | None, data: dict[str, Any]) -> None:
        """Raise if more is to be done than skipping the step; `data` is the state of the loader."""
        why = f"the gradients of step {bad.step} are not finite, the first in {parameter}"
        if bad.spike:
            why = f"the loss of step {bad.step} is {bad.loss:.4g}, above the limit of {bad.limit:.4g}"
        if bad.action == "roll_back":
            raise RollBackError(why, bad.step, data)
        if bad.action == "stop":
            raise BadStepsError(f"stopped: {why}; {WAY_OUT}")
        if bad.in_a_row >= self._max_skipped:
            raise BadStepsError(f"stopped after {bad.in_a_row} bad steps in a row: {why}; {WAY_OUT}")

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores; existing checkpoints have these keys."""
        return {"skipped": self._in_a_row, "losses": list(self._losses)}

    def restore(self, state: dict[str, Any]) -> None:
        """Take the state of a checkpoint; ignore values of a wrong type, because training can continue without them."""
        skipped, losses = state.get("skipped"), state.get("losses")
        self._in_a_row = skipped if isinstance(skipped, int) else 0
        good = [loss for loss in losses if isinstance(loss, float)] if isinstance(losses, list) else []
        self._losses = deque(good, WINDOW)


# The ranks


class NoGuard:
    """Does nothing; stands in for a guard if the job has only one rank."""

    def begin_step(self, step: int) -> None: ...
    def doing(self, what: str, waits: Waits = Waits.NOTHING) -> None: ...
    def failed(self, reason: str) -> None: ...
    def took(self, seconds: float, waited: Mapping[str, float]) -> None: ...
    def stragglers(self) -> list[Straggler]:
        return []

    def close(self, *, done: bool) -> None: ...


class Guard(NoGuard):
    """The guard of one rank; all ranks make it together. `deadline` is how long a rank may wait, in seconds.

    `alarm` is the one that has watched over the start of the job; without it the guard makes one of its own.
    """

    def __init__(self, grid: Grid, folder: Path, deadline: float, alarm: NoAlarm | None = None) -> None:
        self._ledger = grid.ledger
        self._tape = Tape(tape_path(folder, grid.rank), grid.rank, grid.shape)
        if grid.rank == 0 and (folder / DIAGNOSIS).exists():
            os.replace(folder / DIAGNOSIS, folder / EARLIER_DIAGNOSIS)  # it is not about the tapes of this start
        self._ledger.listener = self._tape  # from now on every launch and wait of a collective is on the tape
        self._has_own_alarm = not isinstance(alarm, Alarm)
        self._alarm = alarm if isinstance(alarm, Alarm) else watch_ranks(grid.channel, deadline)
        self._alarm.watch_steps(self._tape, folder)
        self._alarm.deadline = max(self._alarm.deadline, deadline)  # of the first step, which may compile
        if not self._has_own_alarm:
            # Before the first step a rank may prepare data for hours; from now on none works that long for others.
            grid.channel.set_seconds(max(deadline, dist.default_pg_timeout.total_seconds()))
        self._deadline, self._steps = deadline, 0
        self._windows = StepWindows(grid)

    def begin_step(self, step: int) -> None:
        self._steps += 1
        if self._steps == 2:  # everything is compiled, and every connection is open
            self._alarm.deadline = self._deadline
        self._tape.step = step
        self._tape.doing("reading a batch")

    def doing(self, what: str, waits: Waits = Waits.NOTHING) -> None:
        """Write onto the tape what this rank does from now on."""
        self._tape.doing(what, waits)

    def failed(self, reason: str) -> None:
        """Find out with all ranks why a collective failed here, and end this process; return if that is impossible."""
        self._alarm.call(reason)

    def took(self, seconds: float, waited: Mapping[str, float]) -> None:
        """Count a step: its seconds, and how many of them this rank waited along each axis."""
        self._windows.took(seconds, waited)

    def stragglers(self) -> list[Straggler]:
        """Exchange the times of the last steps, right after all ranks have met; on rank 0 return who became slow."""
        return self._windows.exchange()

    def close(self, *, done: bool) -> None:
        """Stop watching steps; `done` says that this rank did all that others may wait for, and did not fail."""
        if self._has_own_alarm:
            self._alarm.close(done=done)
        else:
            self._alarm.enter(Phase.ENDING)
            if not done:
                self._alarm.mute()
        self._ledger.listener = None  # before the tape is closed, because the ledger writes to it
        self._tape.close()


def watch_ranks(channel: Channel, deadline: float) -> Alarm:
    """Watch over the ranks of a channel, which all do the same; `deadline` is how long one may be silent."""
    return Alarm(channel, deadline, end, tell)


def tell(text: str) -> None:
    """Print and log a line about ranks that wait for another one that still works."""
    logger.warning("%s", text)
    print(f"fourfold: {text}", file=sys.stderr, flush=True)


def end(found: JobDiagnosis, judge: bool) -> None:
    """Report the diagnosis to whoever started this rank, and end the process. Only the judge prints the whole text."""
    logger.error("%s", found.text)
    report_failure(found.text, found.failure, whole=judge)
    drain_output()
    os._exit(1)  # the main thread may never return from where it waits

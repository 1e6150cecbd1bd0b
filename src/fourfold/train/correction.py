"""A run corrects its plan: from measured parts of a step to a corrected machine file, and to a plan that is now faster.

Once a run has compared its first steps with the prediction and has measured the parts of a step, rank 0 changes the
constants of the machine (planner/correct.py), writes `machine.toml` into the run's folder, and searches again with it.
This happens once, and takes a second for few devices, half a minute for hundreds. It runs in a thread, because the
other ranks would wait for rank 0 in their next collective, and a run of weeks should not have to end first. The thread
computes on the host alone: it launches nothing on the device, and touches neither the model nor random numbers. A
correction never ends a run.
"""

from __future__ import annotations

import shlex
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from fourfold.atomic import write_text
from fourfold.models.config import config
from fourfold.models.sizes import SIZES
from fourfold.planner.correct import Correction, correct, faster_plan
from fourfold.planner.machine import to_toml
from fourfold.planner.price import Candidate, PipePrice, Price
from fourfold.planner.space import CHOSEN_FIELDS
from fourfold.planner.step_parts import TracedParts, combine
from fourfold.report.units import duration
from fourfold.train.config import TrainConfig
from fourfold.train.planning import UNSTEADY
from fourfold.train.run_folder import MACHINE, RunEvent

TRACED = 2
"""Steps that are traced to measure their parts: the mean of two, and a third would cost more than it tells."""
FIRST_TRACED = UNSTEADY + 2
"""The first of them in a run. The one before is the first steady step, which a pipeline draws; later ones would delay
the recording of steps as a CUDA graph, whose replays have no names of layers and collectives."""
LAST_WAIT = 30.0
"""Seconds for which a run that has ended waits for its correction: more than most searches take."""
YIELD_SECONDS = 2e-5
"""How long the thread that trains waits for Python's lock while the correction computes. A step takes the lock hundreds
of times, and Python's usual 5 ms each would make it seconds longer."""


def steps_to_trace(done: int, last: int) -> range:
    """Return the steps whose parts a run measures after `done` steps; none if it ends too soon."""
    first = done + FIRST_TRACED
    return range(first, first + TRACED) if first + TRACED - 1 <= last else range(0)


class RunCorrection:
    """The correction of one run, on rank 0. `take` returns it once, as an event, when it is complete."""

    def __init__(self, price: Price, run: TrainConfig, folder: Path) -> None:
        self.price, self.config, self.folder = price, run, folder
        self._thread: threading.Thread | None = None
        self._found: RunEvent | None = None

    def start(self, ranks: Sequence[TracedParts], steps: range, compared: RunEvent) -> None:
        """Begin to correct the machine, once: by these parts of these steps, and the seconds of the comparison."""
        if self._thread is not None:
            return
        # a daemon: a process that ends must not wait for a search
        self._thread = threading.Thread(
            target=self._run, args=(ranks, steps, compared), name="plan correction", daemon=True
        )
        self._thread.start()

    def take(self, wait: float = 0.0) -> RunEvent | None:
        """Return the correction if it was completed since the last call, or is within `wait` seconds."""
        if self._thread is not None and wait:
            self._thread.join(wait)
        found, self._found = self._found, None
        return found

    def _run(self, ranks: Sequence[TracedParts], steps: range, compared: RunEvent) -> None:
        where = {"event": "corrected", "step": compared["step"], "steps": [steps[0], steps[-1]]}
        usual = sys.getswitchinterval()
        sys.setswitchinterval(YIELD_SECONDS)
        try:
            self._found = {**where, **self.correct(ranks, steps, compared["seconds"]["measured"])}
        except Exception as error:  # a bug in the planner must not end a training run
            self._found = {**where, "failed": " ".join(f"{type(error).__name__}: {error}".split())}
        finally:
            sys.setswitchinterval(usual)

    def correct(self, ranks: Sequence[TracedParts], steps: range, seconds: float) -> RunEvent:
        """Correct the machine by a step of so many seconds, write its file, and look for a faster plan."""
        price = self.price
        busiest = 0
        if isinstance(price, PipePrice):
            busiest = max(range(price.stages.pipe), key=lambda rank: price.played.work[rank])
        measured = combine(ranks, seconds, busiest)
        if measured is None:
            return {"failed": "no rank could trace its kernels"}
        named = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
        source = f"a run, {date.today().isoformat()}, grid {price.candidate.shape}, {named}"
        found = correct(price, measured, source)
        file = str(self.folder / MACHINE)
        write_text(self.folder / MACHINE, to_toml(found.machine))
        said = f"no part is off by so much that the constants in {file} change"
        if found.changes:
            keys = ", ".join(change.key for change in found.changes)
            step = f"{duration(found.corrected.seconds)} a step; measured {duration(seconds)}"
            said = f"{file} has corrected {keys}, and predicts {step}"
        plan, faster = self._faster(found)
        return {
            "machine": found.machine.name,
            "file": file,
            "parts": parts_table(found),
            "seconds": {
                "predicted": found.predicted.seconds,
                "measured": seconds,
                "corrected": found.corrected.seconds,
            },
            "changes": [asdict(change) for change in found.changes],
            "plan": plan,
            "said": [said, *faster],
        }

    def _faster(self, found: Correction) -> tuple[RunEvent | None, list[str]]:
        """Return a plan that is faster by what the run measured, in numbers and in words, if there is one."""
        own, best = faster_plan(replace(self.price.task, machine=found.machine), self.price.candidate)
        if best is None:
            return None, []
        candidate = best.candidate
        number, policy = candidate.micro_steps, candidate.policy
        micro = f" in {number} micro-batch{'es' if number > 1 else ''}" if number != own.candidate.micro_steps else ""
        differs = [name for name in CHOSEN_FIELDS if getattr(policy, name) != getattr(own.candidate.policy, name)]
        changed = {name: getattr(policy, name) for name in differs}
        command = self._command(candidate, changed)
        others = "".join(f", {name}={written(value)}" for name, value in changed.items())
        takes = f"{duration(best.seconds)} a step instead of {duration(own.seconds)}"
        plan = {
            "grid": candidate.shape.named,
            "order": list(candidate.shape.order),
            "micro_steps": candidate.micro_steps,
            "policy": changed,
            "seconds": best.seconds,
            "instead_of": own.seconds,
        }
        return plan, [f"with what this run measured, {candidate.shape}{micro}{others} would take {takes}: {command}"]

    def _command(self, best: Candidate, changed: Mapping[str, Any]) -> str:
        """Return the command that shows the plan; for a model that has no name of its own, the one that trains it."""
        task, name = self.price.task, self.config.model.name
        machine = str(self.folder / MACHINE)
        if name in SIZES and replace(config(name), seq=task.config.seq) == task.config:
            words = ["plan", "--model", name, "--machine", machine, "--devices", str(best.shape.world)]
            words += ["--seq", str(task.seq), "--batch-tokens", str(task.tokens), "--dtype", task.dtype]
        else:
            grid = str(best.shape).replace(" ", ",")
            words = ["train", str(self.folder / "config.toml"), "--machine", machine, "--grid", grid]
            keys = {
                "batch.micro_steps": best.micro_steps,
                **{f"policy.{name}": value for name, value in changed.items()},
            }
            words += [word for key, value in keys.items() for word in ("--set", f"{key}={written(value)}")]
        return shlex.join(["fourfold", *words])


def written(value: object) -> str:
    """Return a value as `--set` takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def parts_table(found: Correction) -> dict[str, dict[str, float | None]]:
    """Return the predicted and the measured seconds of each part, and their ratio, as a comparison has them."""
    predicted, measured = found.predicted.named(), found.measured.named()
    return {
        part: {
            "predicted": predicted[part],
            "measured": seconds,
            "ratio": seconds / predicted[part] if predicted[part] else None,
        }
        for part, seconds in measured.items()
    }

"""The planner's prediction for a run, compared with what the run measures.

When a run starts, rank 0 prices its grid and policy. After a few steps it compares their median with the price. Nothing
here may end a run: if the run cannot be priced, the reason is recorded and training continues.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from fourfold.atomic import write_json
from fourfold.axes import AXES
from fourfold.grid import Grid, Shape
from fourfold.planner.machine import Seconds
from fourfold.planner.price import (
    COMPUTE,
    Candidate,
    Price,
    Task,
    TimelineSpan,
    chrome_trace,
    memory_of,
    price,
    simulate,
)
from fourfold.planner.program import LaunchOp, MatmulOp, Work
from fourfold.planner.transformer import step_program
from fourfold.train.auto_grid import Hardware, LocatedMachine, locate, memory_bytes
from fourfold.train.config import DTYPES, TrainConfig
from fourfold.train.run_folder import RunEvent

UNSTEADY = 2
"""Steps at the start that are not compared: they record the order of gathers, compile, and fill caches."""
COMPARED = 5
"""The median of this many steps is compared; more would delay the comparison."""
DRAWN = 4
"""Layers and micro-batches in a predicted timeline at most; further ones look the same."""
STEP = "step"
PREDICTED = "predicted.json"
WHOLE_PROCESS = "on the CPU the measured memory is the whole process, including torch itself"


@dataclass(frozen=True, slots=True)
class Prediction:
    """The price of a run's grid and policy, and the machine it was computed for."""

    price: Price
    located: LocatedMachine

    @property
    def facts(self) -> RunEvent:
        """The prediction as run.json stores it."""
        found, candidate = self.price, self.price.candidate
        memory = memory_of(found.task, candidate)
        return {
            "machine": found.task.machine.name,
            "notes": list(self.located.notes),
            "seconds": found.seconds,
            "compute_seconds": found.totals.compute,
            "link_seconds": _by_axis(found.totals.link, candidate.shape),
            "exposed_seconds": _by_axis(found.totals.exposed, candidate.shape),
            "peak_memory_bytes": memory.total,
            "memory_bytes": memory.kinds,
            "peak_at": memory.at,
            "halves": found.halves,
            "mfu": found.mfu,
            "hfu": found.hfu,
        }

    def trace(self) -> dict[str, Any]:
        """Return the timeline of a step for Perfetto, with the same names as the traces of ranks."""
        task, candidate = self.price.task, self.price.candidate
        layers, micro_steps = min(task.config.layers, DRAWN), min(candidate.micro_steps, DRAWN)
        program = step_program(candidate.sizes(task, layers=layers), micro_steps=micro_steps)
        line = simulate(
            program.work, Seconds(task.machine, candidate.shape), task.dtype, phases=program.phases, trace=True
        )
        drawn = f"{layers} of {task.config.layers} layers, {micro_steps} of {candidate.micro_steps} micro-steps"
        whole = TimelineSpan(STEP, f"step ({drawn})", 0.0, line.seconds, STEP)
        return chrome_trace([whole, *named(program.work, line.spans)], process=f"predicted on {task.machine.name}")


def named(work: Sequence[Work], spans: Iterable[TimelineSpan]) -> list[TimelineSpan]:
    """Return the spans with the names that the ledger and the profiler use."""
    products = {item.label for item in work if isinstance(item, MatmulOp)}
    launched: defaultdict[str, list[str]] = defaultdict(list)
    for item in work:
        if isinstance(item, LaunchOp):
            launched[item.lane].append(str(item.record))
    left = {lane: iter(records) for lane, records in launched.items()}  # a lane runs them in the order of their launch
    found = []
    for span in spans:
        if span.track == COMPUTE:
            label = f"product {span.label}" if span.label in products else span.label
        else:
            label = next(left[span.track])
        found.append(TimelineSpan(span.track, f"fourfold::{label}", span.start, span.end, span.phase))
    return found


def _by_axis(seconds: Any, shape: Shape) -> dict[str, float]:
    return {axis: seconds.get(axis, 0.0) for axis in AXES if shape.sizes[axis] > 1}


def predict(config: TrainConfig, job: Hardware) -> Prediction:
    """Price a resolved config on the machine that it names."""
    policy, batch, shape = config.build_policy(), config.batch, config.grid.shape
    compute = DTYPES[config.policy.dtype]
    located = locate(config.plan.machine, job, compute)
    task = Task(config.model.build(), located.machine, batch.rows, batch.seq, config.policy.parameters, compute)
    rows = batch.rows // batch.micro_steps // shape.places
    return Prediction(price(task, Candidate(shape, policy, rows, batch.micro_steps)), located)


def predict_run(
    config: TrainConfig, grid: Grid, traced: range, folder: Path
) -> tuple[RunEvent, PredictionCheck | None]:
    """Return the prediction for run.json and the check that compares it; if there is none, the reason and None.

    If the run traces steps, the predicted timeline is written beside their traces.
    """
    on_gpu = grid.device.type == "cuda"
    job = Hardware.here(grid.shape.world, on_gpu=on_gpu, memory_bytes=memory_bytes(grid.device.type))
    try:
        found = predict(config, job)
        facts = found.facts
        trace = found.trace() if traced else None
    except (ValueError, OSError) as error:
        return {"unpriced": " ".join(str(error).split())}, None
    except Exception as error:  # a bug in the planner must not end a training run
        return {"unpriced": " ".join(f"{type(error).__name__}: {error}".split())}, None
    if trace is not None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / PREDICTED, trace)
    return facts, PredictionCheck(facts, traced=traced, on_gpu=on_gpu)


class PredictionCheck:
    """Collects the events of steps and returns, once, how they compare with the prediction.

    Traced steps are slower and count only if there are no others.
    """

    def __init__(self, predicted: RunEvent, *, traced: range, on_gpu: bool) -> None:
        self.predicted, self.traced, self.on_gpu = predicted, traced, on_gpu
        self.notes = [*predicted["notes"], *([] if on_gpu else [WHOLE_PROCESS])]
        self._steps: list[RunEvent] = []
        self._compared = False

    def add(self, step: RunEvent) -> RunEvent | None:
        """Add a step; return the comparison if this step completes it."""
        if self._compared:
            return None
        self._steps.append(step)
        return self._compare(self._steady) if len(self._steady) == COMPARED else None

    def finish(self) -> RunEvent | None:
        """Return the comparison of a run that ended before it was complete, from the steps that it has."""
        if self._compared or not self._steps:
            return None
        return self._compare(self._steady or self._steps[UNSTEADY:] or self._steps[-1:])

    @property
    def _steady(self) -> list[RunEvent]:
        return [step for step in self._steps[UNSTEADY:] if step["step"] not in self.traced]

    def _compare(self, steps: Sequence[RunEvent]) -> RunEvent:
        self._compared = True
        exposed = self.predicted["exposed_seconds"]
        memory = _pair(self.predicted["peak_memory_bytes"], [step["peak_memory_bytes"] for step in steps])
        if not self.on_gpu:
            memory["ratio"] = None  # one is the memory of tensors, the other of the whole process
        return {
            "event": "compared",
            "step": self._steps[-1]["step"],
            "steps": [step["step"] for step in steps],
            "machine": self.predicted["machine"],
            "notes": self.notes,
            "seconds": _pair(self.predicted["seconds"], [step["seconds"] for step in steps]),
            "exposed_seconds": {
                axis: _pair(exposed[axis], [step["exposed_seconds"].get(axis, 0.0) for step in steps])
                for axis in exposed
            },
            "peak_memory_bytes": memory,
        }


def _pair(predicted: float, measured: Sequence[float]) -> dict[str, float | None]:
    found = median(measured)
    return {"predicted": predicted, "measured": found, "ratio": found / predicted if predicted else None}

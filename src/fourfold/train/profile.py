"""A profile of some steps: a Chrome trace from every rank, and what it says of communication.

    profile/rank-R.json    the trace of rank R; ui.perfetto.dev opens it
    profile/summary.json   by axis, seconds of a step on the link and seconds exposed

Every step is a span `step N`, every launch of a collective a span with the ledger's name for it.

On a GPU the seconds on a link are those of NCCL's kernels in the trace, and each kernel belongs to the collective in
whose launch it was launched: torch wraps NCCL's kernels in annotations of its own, so that the profiler shows those
on the device and not ours. Kernels of one axis that run at the same time count once. On the CPU the ledger times
each collective from launch to arrival, and adds up those that are under way at the same time.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import torch
from torch.profiler import ProfilerActivity, record_function

from fourfold import comm
from fourfold.atomic import replacing, write_json
from fourfold.axes import AXES
from fourfold.grid import Grid
from fourfold.ledger import Op
from fourfold.train.metrics import StepMetrics
from fourfold.train.run_folder import RunEvent, strict

Interval = tuple[float, float]

ON_GPU = "kernels in the trace; those of one axis at the same time count once"
ON_CPU = "from launch to arrival by the host's clock, added up"
"""What seconds on a link are."""

LAUNCH = tuple(f"fourfold::{op}[" for op in get_args(Op))
"""How the names of launches begin; those of waits and products go on in other words."""
QUIET = "6"
"""torch's profiler logs to stderr when it starts and stops, unless its level of logging is this."""


class StepProfiler:
    """Traces `steps`, which may be none, on this rank. Every rank has one, and they begin and end together."""

    def __init__(self, steps: range, grid: Grid, folder: Path) -> None:
        self.steps, self.grid, self.folder = steps, grid, folder
        self.on_gpu = grid.device.type == "cuda"
        self._profiler: torch.profiler.profile | None = None
        self._link_seconds: Counter[str] = Counter()
        self._readings: list[StepMetrics] = []

    @property
    def trace(self) -> Path:
        return self.folder / f"rank-{self.grid.rank}.json"

    def begins_with(self, step: int) -> bool:
        return len(self.steps) > 0 and step == self.steps[0]

    def ends_with(self, step: int) -> bool:
        return len(self.steps) > 0 and step == self.steps[-1]

    def begin(self) -> None:
        """Trace from here on. Steps before must have been read, so that nothing of them is left to do."""

        def start() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
            gpu = [ProfilerActivity.CUDA] if self.on_gpu else []
            profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *gpu])
            self._finish_work()
            profiler.start()
            self._profiler = profiler

        # starting takes a rank up to seconds: none may begin the step before all are ready, and wait for them there
        self.grid.together("starting the profiler", start)
        self._time_links()

    def step(self, step: int) -> AbstractContextManager[object]:
        """Around the launch of a step."""
        return nullcontext() if self._profiler is None else record_function(f"step {step}")

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Around what may run between two traced steps: named in the trace, and not counted."""
        if self._profiler is None:
            yield
            return
        self._take_link_seconds()
        with record_function(name):
            yield
        self._time_links()

    def add(self, step: int, reading: StepMetrics) -> None:
        """What the meter read of a step."""
        if step in self.steps:
            self._readings.append(reading)

    def end(self) -> RunEvent:
        """Write the traces and what they say; the event that tells of it."""
        self._take_link_seconds()
        mine = self.grid.together("writing the profile", self._write)
        ranks = _share(mine, self.grid)
        summary = {
            "steps": [self.steps[0], self.steps[-1]],
            "ranks": self.grid.shape.world,
            "link_seconds_are": ON_GPU if self.on_gpu else ON_CPU,
            "per_step": summarize(ranks, [axis for axis in AXES if self.grid.size(axis) > 1]),
        }
        path = self.folder / "summary.json"
        self.grid.first_alone("writing the profile", lambda: write_json(path, strict(summary)))
        return {
            "event": "profile",
            "step": self.steps[-1],
            "first": self.steps[0],
            "folder": str(self.folder),
            "ranks": self.grid.shape.world,
        }

    def close(self) -> None:
        """Leave a trace that the run did not come to the end of."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self) -> list[float]:
        """The trace to its file; this rank's seconds of a step, then on the link and exposed over each axis."""
        profiler = self._profiler
        if profiler is None:
            raise ValueError("a profile that has not begun cannot end")
        self._finish_work()
        self.close()
        found = export(profiler, self.trace)
        link: Mapping[str, float] = self._link_seconds
        if self.on_gpu:
            link = link_seconds(found)
            if not link:  # the driver refused to trace it
                link = dict.fromkeys(AXES, float("nan"))
        exposed = Counter[str]()
        for reading in self._readings:
            exposed.update(reading.exposed_seconds)
        seconds = sum(reading.seconds for reading in self._readings)
        by_axis = [found.get(axis, 0.0) for found in (link, exposed) for axis in AXES]
        return [total / len(self.steps) for total in (seconds, *by_axis)]

    def _finish_work(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.grid.device)

    def _time_links(self) -> None:
        if not self.on_gpu:
            self.grid.ledger.time_links()

    def _take_link_seconds(self) -> None:
        if not self.on_gpu:
            self._link_seconds.update(self.grid.ledger.take_link_seconds())


def export(profiler: torch.profiler.profile, path: Path) -> dict[str, Any]:
    """Write the trace, all of it or nothing, and read it back."""
    try:
        with replacing(path) as partial:
            profiler.export_chrome_trace(str(partial))  # says nothing when it could not write
            found = json.loads(partial.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError) as error:
        raise OSError(f"cannot write the trace {path} ({error}); is the disk full? Profile fewer steps") from error
    return found


def link_seconds(trace: Mapping[str, Any]) -> dict[str, float]:
    """Seconds for which NCCL's kernels of each axis ran, of what was launched inside of a step."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans = [event for event in events if event.get("cat") == "user_annotation"]
    steps = _Spans((_interval(span), "") for span in spans if span["name"].startswith("step "))
    launches = _Spans((_interval(span), _axis(span["name"])) for span in spans if span["name"].startswith(LAUNCH))
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    by_axis: dict[str, list[Interval]] = {}
    for event in events:
        if event.get("cat") != "kernel" or "nccl" not in event["name"].lower():
            continue
        moment = launched.get(event["args"].get("correlation"))
        axis = None if moment is None or steps.at(moment) is None else launches.at(moment)
        if axis is not None:
            by_axis.setdefault(axis, []).append(_interval(event))
    return {axis: covered(intervals) / 1e6 for axis, intervals in by_axis.items()}


class _Spans:
    """Named stretches of the host's time that do not overlap.

    Of any thread: the one that runs backward launches while the one that called it waits.
    """

    def __init__(self, named: Iterator[tuple[Interval, str]]) -> None:
        self._named = sorted(named)
        self._begins = [begin for (begin, _), _ in self._named]

    def at(self, moment: float) -> str | None:
        """The name of the one that holds this moment."""
        place = bisect_right(self._begins, moment) - 1
        if place < 0:
            return None
        (_, end), name = self._named[place]
        return name if moment <= end else None


def _interval(event: Mapping[str, Any]) -> Interval:
    """In microseconds, as a trace has them."""
    return event["ts"], event["ts"] + event["dur"]


def _axis(name: str) -> str:
    """`fourfold::all_gather[z] layers.0.mlp.up` -> `z`."""
    return name.partition("[")[2].partition("]")[0]


def covered(intervals: Sequence[Interval]) -> float:
    """How much the intervals cover together."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _share(mine: Sequence[float], grid: Grid) -> list[list[float]]:
    """The numbers of every rank, on all of them."""
    table = torch.zeros(grid.shape.world, len(mine), dtype=torch.float64, device=grid.device)
    table[grid.rank] = torch.tensor(mine, dtype=torch.float64)
    with grid.ledger.aside():  # belongs to no step
        for axis in AXES:  # each row is 0 but on its own rank, so sums over all axes put it everywhere
            table = comm.all_reduce(table, grid, axis, label="profile").wait()
    return table.tolist()


def summarize(ranks: Sequence[Sequence[float]], axes: Sequence[str]) -> dict[str, Any]:
    """Of every number its mean over ranks and that of the slowest rank, from what `Profile._write` gives on each."""

    def over_ranks(place: int) -> dict[str, float]:
        values = [numbers[place] for numbers in ranks]
        slowest = max(range(len(values)), key=lambda rank: values[rank])
        return {"mean": fmean(values), "slowest": values[slowest], "slowest_rank": slowest}

    found: dict[str, Any] = {"seconds": over_ranks(0)}
    for start, kind in ((1, "link_seconds"), (1 + len(AXES), "exposed_seconds")):
        found[kind] = {axis: over_ranks(start + AXES.index(axis)) for axis in axes}
    return found

"""A profile of some steps: a Chrome trace from every rank, and a summary of their communication.

    profile/rank-R.json    the trace of rank R; ui.perfetto.dev opens it
    profile/summary.json   by axis, seconds per step on the link and exposed seconds

Every step is a span `step N`, and every launch of a collective is a span with the ledger's name for it.

On a GPU the seconds on a link are the durations of NCCL's kernels in the trace. A kernel belongs to the collective
during which it was launched: torch annotates NCCL's kernels itself, so the profiler shows torch's annotations on the
device and not ours. Kernels of one axis that run at the same time count once. On the CPU the ledger times each
collective from launch to arrival, and adds up collectives that are in flight at the same time.
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
"""The definitions of seconds on a link, as the summary states them."""

LAUNCH = tuple(f"fourfold::{op}[" for op in get_args(Op))
"""Prefixes of the spans of launches; the spans of waits and products have others."""
QUIET = "6"
"""The log level at which torch's profiler does not write to stderr when it starts and stops."""


class StepProfiler:
    """Traces `steps`, which may be empty, on this rank. All ranks begin and end together."""

    def __init__(self, steps: range, grid: Grid, folder: Path) -> None:
        self.steps, self.grid, self.folder = steps, grid, folder
        self.on_gpu = grid.device.type == "cuda"
        self._profiler: torch.profiler.profile | None = None
        self._link_seconds: Counter[str] = Counter()
        self._metrics: list[StepMetrics] = []

    @property
    def trace(self) -> Path:
        return self.folder / f"rank-{self.grid.rank}.json"

    def begins_with(self, step: int) -> bool:
        return len(self.steps) > 0 and step == self.steps[0]

    def ends_with(self, step: int) -> bool:
        return len(self.steps) > 0 and step == self.steps[-1]

    def begin(self) -> None:
        """Start tracing. Earlier steps must have been read, so that none of their work is left."""

        def start() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
            gpu = [ProfilerActivity.CUDA] if self.on_gpu else []
            profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *gpu])
            self._finish_work()
            profiler.start()
            self._profiler = profiler

        # starting may take seconds: a rank that began the step earlier would wait for the others inside the trace
        self.grid.run_together("starting the profiler", start)
        self._time_links()

    def step(self, step: int) -> AbstractContextManager[object]:
        """Return the context in which to launch a step."""
        return nullcontext() if self._profiler is None else record_function(f"step {step}")

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Name work between two traced steps in the trace, without counting it."""
        if self._profiler is None:
            yield
            return
        self._take_link_seconds()
        with record_function(name):
            yield
        self._time_links()

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Add the metrics of a step."""
        if step in self.steps:
            self._metrics.append(metrics)

    def end(self) -> RunEvent:
        """Write the traces and their summary; return the event to record."""
        self._take_link_seconds()
        mine = self.grid.run_together("writing the profile", self._write)
        ranks = _share(mine, self.grid)
        summary = {
            "steps": [self.steps[0], self.steps[-1]],
            "ranks": self.grid.shape.world,
            "link_seconds_are": ON_GPU if self.on_gpu else ON_CPU,
            "per_step": summarize(ranks, [axis for axis in AXES if self.grid.size(axis) > 1]),
        }
        path = self.folder / "summary.json"
        self.grid.run_on_rank0("writing the profile", lambda: write_json(path, strict(summary)))
        return {
            "event": "profile",
            "step": self.steps[-1],
            "first": self.steps[0],
            "folder": str(self.folder),
            "ranks": self.grid.shape.world,
        }

    def close(self) -> None:
        """Discard a trace that the run did not complete."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _write(self) -> list[float]:
        """Write this rank's trace; return its seconds per step, then per axis those on the link and those exposed."""
        profiler = self._profiler
        if profiler is None:
            raise ValueError("a profile that has not begun cannot end")
        self._finish_work()
        self.close()
        found = export(profiler, self.trace)
        link: Mapping[str, float] = self._link_seconds
        if self.on_gpu:
            link = link_seconds(found)
            if not link:  # the driver did not let the profiler trace kernels
                link = dict.fromkeys(AXES, float("nan"))
        exposed = Counter[str]()
        for metrics in self._metrics:
            exposed.update(metrics.exposed_seconds)
        seconds = sum(metrics.seconds for metrics in self._metrics)
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
    """Write the trace, completely or not at all, and return its contents."""
    try:
        with replacing(path) as partial:
            profiler.export_chrome_trace(str(partial))  # does not report a failed write
            found = json.loads(partial.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError) as error:
        raise OSError(f"cannot write the trace {path} ({error}); is the disk full? Profile fewer steps") from error
    return found


def link_seconds(trace: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds for which NCCL's kernels of each axis ran, counting kernels launched inside a step."""
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
    """Named, non-overlapping intervals of host time.

    They may come from several threads: autograd's thread launches collectives while the main thread waits for it.
    """

    def __init__(self, named: Iterator[tuple[Interval, str]]) -> None:
        self._named = sorted(named)
        self._begins = [begin for (begin, _), _ in self._named]

    def at(self, moment: float) -> str | None:
        """Return the name of the interval that contains this moment, or None."""
        place = bisect_right(self._begins, moment) - 1
        if place < 0:
            return None
        (_, end), name = self._named[place]
        return name if moment <= end else None


def _interval(event: Mapping[str, Any]) -> Interval:
    """Return begin and end of an event in microseconds, the unit of traces."""
    return event["ts"], event["ts"] + event["dur"]


def _axis(name: str) -> str:
    """Return the axis of a launch: `z` for `fourfold::all_gather[z] layers.0.mlp.up`."""
    return name.partition("[")[2].partition("]")[0]


def covered(intervals: Sequence[Interval]) -> float:
    """Return the length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _share(mine: Sequence[float], grid: Grid) -> list[list[float]]:
    """Return the numbers of every rank, on every rank."""
    table = torch.zeros(grid.shape.world, len(mine), dtype=torch.float64, device=grid.device)
    table[grid.rank] = torch.tensor(mine, dtype=torch.float64)
    with grid.ledger.not_counted():  # belongs to no step
        for axis in AXES:  # a row is 0 except on its own rank, so sums over all axes copy it to every rank
            table = comm.all_reduce(table, grid, axis, label="profile").wait()
    return table.tolist()


def summarize(ranks: Sequence[Sequence[float]], axes: Sequence[str]) -> dict[str, Any]:
    """Return for every number its mean over ranks and its value on the slowest rank.

    `ranks` has the numbers that `StepProfiler._write` returned on each rank.
    """

    def over_ranks(place: int) -> dict[str, float]:
        values = [numbers[place] for numbers in ranks]
        slowest = max(range(len(values)), key=lambda rank: values[rank])
        return {"mean": fmean(values), "slowest": values[slowest], "slowest_rank": slowest}

    found: dict[str, Any] = {"seconds": over_ranks(0)}
    for start, kind in ((1, "link_seconds"), (1 + len(AXES), "exposed_seconds")):
        found[kind] = {axis: over_ranks(start + AXES.index(axis)) for axis in axes}
    return found

"""What is measured of steps: metrics of every step, and a profile of some steps.

`Meter` measures seconds, bytes per axis, seconds of exposed communication and peak memory. From these follow

    MFU = model FLOPs per token * tokens/s / (ranks * peak FLOP/s of a device)
    HFU = the same, including the FLOPs that backward computes again

On a GPU it never makes the host wait: CUDA events mark the ends of a step, and the host reads them after it has
launched the next step.

`StepProfiler` traces the steps that `--profile` names, or a few steps of a run that has a prediction. From the trace it
measures the parts of a step (planner/step_parts.py). For `--profile` it writes a Chrome trace from every rank and a
summary of the communication:

    profile/rank-R.json    the trace of rank R; ui.perfetto.dev opens it
    profile/summary.json   by axis, seconds per step on the link and exposed seconds

Every step is a span `step N`, and every launch of a collective is a span with the ledger's name for it. On a GPU the
seconds on a link are the durations of NCCL's kernels in the trace. A kernel belongs to the collective during which it
was launched: torch annotates NCCL's kernels itself, so the profiler shows torch's annotations on the device and not
ours. Kernels of one axis that run at the same time count once. On the CPU the ledger times each collective from launch
to arrival, and adds up collectives that are in flight at the same time.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.profiler import record_function

from fourfold.atomic import replacing, write_json
from fourfold.axes import AXES, PIPE
from fourfold.grid import Grid
from fourfold.ledger import Flight
from fourfold.planner.machine import PEAK_FLOPS
from fourfold.planner.step_parts import (
    LAUNCH,
    STEP,
    HostSpans,
    Interval,
    TracedParts,
    axis_of,
    covered,
    device_parts,
    events_of,
    flight_seconds,
    host_parts,
    new_profiler,
)
from fourfold.planner.step_program import Flops
from fourfold.train.console import logger
from fourfold.train.run_folder import RunEvent, strict

Timestamp = float | torch.cuda.Event

PEAK_SECONDS = 0.2
"""How long the peak is measured: many products on any device, and hardly noticed at the start of a run."""
ON_GPU = "kernels in the trace; those of one axis at the same time count once"
ON_CPU = "from launch to arrival by the host's clock, added up"
"""The definitions of seconds on a link, as the summary states them."""


# Metrics of every step


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step on this rank."""

    seconds: float
    wire_bytes: dict[str, int]
    exposed_seconds: dict[str, float] | None
    """None for a replayed step: the host does not see where the device waits."""
    peak_memory_bytes: int


class Meter:
    """Measures steps. `end` returns a function that gives the metrics once the device has finished the step."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.on_gpu = grid.device.type == "cuda"
        if self.on_gpu:
            grid.ledger.time_stalls()  # by events on the streams; on the CPU the host's clock measures each wait
        self.begin()

    def begin(self) -> None:
        """Start the next step here, so that work since the end of the last step is not counted."""
        self._began = self._mark()
        self._sent = Counter(self.grid.ledger.wire_bytes)
        self.grid.ledger.take_exposed()

    def end(self, *, replayed: bool = False) -> Callable[[], StepMetrics]:
        """End the step, start the next one, and return the function that reads the metrics of the ended step."""
        began, ended = self._began, self._mark()
        sent = Counter(self.grid.ledger.wire_bytes)
        wire_bytes = dict(sent - self._sent)  # the difference leaves out axes that sent nothing
        exposed = self.grid.ledger.take_exposed()
        self._began, self._sent = ended, sent

        def read() -> StepMetrics:
            if isinstance(ended, torch.cuda.Event):
                ended.synchronize()
            waited = None if replayed else exposed()
            return StepMetrics(_seconds(began, ended), wire_bytes, waited, self.peak_memory_bytes())

        return read

    def peak_memory_bytes(self) -> int:
        """Return the peak memory since the start: of the process on the CPU, of tensors on a GPU."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.grid.device)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024  # Linux counts KiB, macOS bytes

    def _mark(self) -> Timestamp:
        if not self.on_gpu:
            return time.perf_counter()
        # blocking: a host that waits sleeps, and leaves its core to the threads that communicate
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record()  # on the current stream, behind the work of the step
        return event


def _seconds(began: Timestamp, ended: Timestamp) -> float:
    if isinstance(began, torch.cuda.Event):
        return began.elapsed_time(ended) / 1e3  # type: ignore[arg-type]
    return ended - began  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """The peak FLOP/s of a device, or 0 if unknown, and the origin of the figure."""

    flops: float
    origin: str

    def utilization(
        self, flops: Flops | None, tokens_per_second: float, ranks: int
    ) -> tuple[float | None, float | None]:
        """Return MFU and HFU, or None if the peak or the model's FLOPs are unknown."""
        if not self.flops or flops is None:
            return None, None
        share = tokens_per_second / (ranks * self.flops)
        return flops.model * share, flops.hardware * share


def peak_of(grid: Grid, dtype: torch.dtype, given: float | None) -> PeakFlops:
    """Return the given peak, else the one of the GPU's data sheet for bf16, else the fastest matrix product measured
    now.

    Every rank measures at the same time, so that ranks that share cores also share the peak.
    """
    if given is not None:
        return PeakFlops(given, "log.peak_flops")
    on_gpu = grid.device.type == "cuda"
    if on_gpu and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(grid.device)
        if name in PEAK_FLOPS:
            return PeakFlops(PEAK_FLOPS[name], f"data sheet of {name}, dense bf16")
    size = 8192 if on_gpu else 512  # large enough to reach the peak, small enough for many repetitions
    a = torch.ones(size, size, dtype=dtype, device=grid.device)
    torch.mm(a, a).sum().item()  # the first product also initialises the library
    best, until = float("inf"), time.perf_counter() + PEAK_SECONDS
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(a, a)
        if on_gpu:
            torch.cuda.synchronize(grid.device)  # the host's clock must see the end of the product
        best = min(best, time.perf_counter() - began)
    return PeakFlops(2 * size**3 / best, f"best of {size} x {size} products measured at the start")


# A profile of some steps


class StepProfiler:
    """Traces `steps`, which may be empty, on this rank. All ranks begin and end together.

    Nobody has asked for the traces if `keep` is false: they serve to measure the parts of a step, nothing is written,
    and a profiler that fails leaves the parts unknown and does not end the run.
    """

    def __init__(self, steps: range, grid: Grid, folder: Path, *, keep: bool = True) -> None:
        self.steps, self.grid, self.folder, self.keep = steps, grid, folder, keep
        self.on_gpu = grid.device.type == "cuda"
        self.traced: list[TracedParts] = []
        """The parts of a step on every rank that could measure them, on rank 0 once the traces are complete."""
        self._profiler: torch.profiler.profile | None = None
        self._flights: list[Flight] = []
        self._metrics: list[StepMetrics] = []

    def begin(self) -> None:
        """Start tracing. Earlier steps must have been read, so that none of their work is left."""

        def start() -> None:
            if self.keep:
                self.folder.mkdir(parents=True, exist_ok=True)
            profiler = new_profiler(on_gpu=self.on_gpu)
            self._finish_work()
            profiler.start()
            self._profiler = profiler

        def try_to_start() -> None:
            try:
                start()
            except Exception as error:  # such as a profiler of the user's that is active already
                logger.warning("the parts of a step are not measured: %s", error)

        # Starting may take seconds: a rank that began the step earlier would wait for the others inside the trace.
        self.grid.run_together("starting the profiler", start if self.keep else try_to_start)
        self._time_links()

    def step(self, step: int) -> AbstractContextManager[object]:
        """Return the context in which to launch a step."""
        return nullcontext() if self._profiler is None else record_function(f"{STEP}{step}")

    @contextmanager
    def aside(self, name: str) -> Iterator[None]:
        """Name work between two traced steps in the trace, without counting it."""
        if self._profiler is None:
            yield
            return
        self._take_flights()
        with record_function(name):
            yield
        self._time_links()

    def add(self, step: int, metrics: StepMetrics) -> None:
        """Add the metrics of a step."""
        if step in self.steps:
            self._metrics.append(metrics)

    def end(self) -> RunEvent | None:
        """Measure the parts of a step, and write the traces and their summary if they are kept; return the event."""
        self._take_flights()
        self._finish_work()
        profiler = self._profiler
        self.close()
        mine = self.grid.run_together("writing the profile", lambda: self._write(profiler)) if self.keep else None
        parts = None
        try:
            parts = None if profiler is None else asdict(self._measure_parts(profiler))
        except Exception as error:  # such as an event of a kind that nobody has seen; the run goes on
            logger.warning("the parts of a step are not measured: %s", error)
        by_rank = self.grid.channel.gather("profile", json.dumps([mine, parts]))
        gathered = [json.loads(by_rank[rank]) for rank in sorted(by_rank)]
        self.traced = [TracedParts(**found) for _, found in gathered if found is not None]
        if not self.keep:
            return None
        ranks = self.grid.shape.world

        def write_summary() -> None:
            axes = [axis for axis in AXES if self.grid.size(axis) > 1]
            summary = {
                "steps": [self.steps[0], self.steps[-1]],
                "ranks": ranks,
                "link_seconds_are": ON_GPU if self.on_gpu else ON_CPU,
                "per_step": summarize([numbers for numbers, _ in gathered], axes),
            }
            write_json(self.folder / "summary.json", strict(summary))

        self.grid.run_on_rank0("writing the profile", write_summary)
        where = {"first": self.steps[0], "folder": str(self.folder), "ranks": ranks}
        return {"event": "profile", "step": self.steps[-1], **where}

    def close(self) -> None:
        """Stop tracing, if it has begun; what was traced is lost unless `end` uses it."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            with nullcontext() if self.keep else suppress(Exception):
                profiler.stop()

    def _measure_parts(self, profiler: torch.profiler.profile) -> TracedParts:
        """Return the parts of a step on this rank."""
        events, steps = events_of(profiler), len(self.steps)
        spans: Mapping[str, float] = {}
        if self.on_gpu:
            kinds, link = device_parts(events)
        else:
            kinds, spans = host_parts(events)
            link = flight_seconds(self._flights, self.grid.shape.two_lanes)

        def per_step(seconds: Mapping[str, float]) -> dict[str, float]:
            return {key: value / steps for key, value in seconds.items()}

        return TracedParts(
            pipe=self.grid.coords[PIPE],
            **per_step(kinds),
            link=per_step(link),
            exposed=per_step(self._exposed()),
            seconds=fmean(metrics.seconds for metrics in self._metrics),
            spans=per_step(spans),
        )

    def _write(self, profiler: torch.profiler.profile | None) -> list[float]:
        """Write this rank's trace; return its seconds per step, then per axis those on the link and those exposed."""
        if profiler is None:
            raise ValueError("a profile that has not begun cannot end")
        trace = export(profiler, self.folder / f"rank-{self.grid.rank}.json")
        link: Mapping[str, float]
        if self.on_gpu:
            # no kernel at all means that the driver did not let the profiler trace them: the seconds are unknown
            link = link_seconds(trace) or dict.fromkeys(AXES, float("nan"))
        else:
            flights: defaultdict[str, float] = defaultdict(float)
            for record, began, ended in self._flights:
                flights[record.axis] += ended - began
            link = flights
        seconds = sum(metrics.seconds for metrics in self._metrics)
        by_axis = [found.get(axis, 0.0) for found in (link, self._exposed()) for axis in AXES]
        return [total / len(self.steps) for total in (seconds, *by_axis)]

    def _exposed(self) -> Counter[str]:
        """Return the seconds of waiting in all traced steps, by axis."""
        exposed = Counter[str]()
        for metrics in self._metrics:
            exposed.update(metrics.exposed_seconds or {})
        return exposed

    def _finish_work(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.grid.device)  # kernels of other steps must not run inside the trace

    def _time_links(self) -> None:
        if not self.on_gpu:
            self.grid.ledger.time_links()

    def _take_flights(self) -> None:
        if not self.on_gpu:
            self._flights += self.grid.ledger.take_flights()


def export(profiler: torch.profiler.profile, path: Path) -> dict[str, Any]:
    """Write the trace, completely or not at all, and return its contents."""
    try:
        with replacing(path) as partial:
            profiler.export_chrome_trace(str(partial))  # does not report a failed write, so the file is read again
            return json.loads(partial.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError) as error:
        raise OSError(f"cannot write the trace {path} ({error}); is the disk full? Profile fewer steps") from error


def link_seconds(trace: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds for which NCCL's kernels of each axis ran, counting kernels launched inside a step."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans = [(_interval(event), event["name"]) for event in events if event.get("cat") == "user_annotation"]
    steps = HostSpans(span for span in spans if span[1].startswith(STEP))
    launches = HostSpans(span for span in spans if span[1].startswith(LAUNCH))
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    by_axis: defaultdict[str, list[Interval]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and "nccl" in event["name"].lower():
            moment = launched.get(event["args"].get("correlation"))
            if moment is not None and steps.at(moment) and (launch := launches.at(moment)):
                by_axis[axis_of(launch)].append(_interval(event))
    return {axis: covered(intervals) / 1e6 for axis, intervals in by_axis.items()}


def _interval(event: Mapping[str, Any]) -> Interval:
    """Return the begin and end of an event in microseconds, the unit of traces."""
    return event["ts"], event["ts"] + event["dur"]


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

"""Runs on the emulated cluster: calibrate it, measure lines on it, and keep the results in a file.

A `ClusterRun` is one setting, measured in one job: its lines, the machine file that `fourfold calibrate` wrote, and
what a reader needs to repeat it. If a line crashes the job, that is recorded, and the other lines are measured again in
a new job.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import shlex
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cluster.emulate import Cluster
from benchmarks.cluster.settings import PLANNED, Job, Setting
from benchmarks.shared.tables import RESULTS
from benchmarks.shared.workloads import Line
from fourfold.grid import Shape
from fourfold.planner.machine import Machine, load_machine, parse_machine, to_toml

HERE = Path(__file__).parent
FREE_AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",  # where torch is built with mimalloc
}
"""Environment that returns freed memory to the system at once, so that resident memory is used memory."""
KEEP_MEMORY = {"MALLOC_ARENA_MAX": "2", "MIMALLOC_PURGE_DELAY": "-1"}
"""Environment that keeps freed memory, because fresh pages are slow, with few arenas for hundreds of threads."""
MOST_FAILURES = 8
"""How many lines may crash the job before the fault must be elsewhere."""
JOB_SECONDS = 3600.0
WARMUP = 1
"""Steps before the one that is recorded: the engine learns its order in the first step."""


@dataclass
class LineResult:
    """A line and its measurements."""

    name: str
    kind: str
    sizes: dict[str, int]
    order: list[str]
    variant: str
    pipe: int = 1
    """Ranks of the pipeline, if the line is one."""
    seconds: list[float] = field(default_factory=list)
    """Seconds per step of the slowest rank, one number per round."""
    inside: list[float] = field(default_factory=list)
    """Bytes per step that a rank sent inside its node, on average, by the interfaces' counters."""
    between: list[float] = field(default_factory=list)
    """Bytes per step that a rank sent to other nodes, on average, by the interfaces' counters."""
    busy: list[float] = field(default_factory=list)
    """The share of the machine's CPU time that was used."""
    losses: list[float] = field(default_factory=list)
    """The losses of the warm-up steps."""
    ledger: dict[str, float] = field(default_factory=dict)
    """The same bytes (`inside`, `between`) according to Fourfold's ledger."""
    compute: float | None = None
    """Seconds of one of Fourfold's steps without communication."""
    peak: float | None = None
    """Peak memory, in bytes, of the rank that needs the most."""
    error: str | None = None

    @classmethod
    def of(cls, line: Line) -> LineResult:
        return cls(line.name, line.kind, line.shape.sizes, list(line.shape.order), line.label, line.pipe)

    @property
    def planned(self) -> bool:
        """Whether the planner chose this line."""
        return self.variant.endswith(PLANNED)

    @property
    def shape(self) -> Shape:
        return Shape(**self.sizes, order=tuple(self.order))

    @property
    def grid(self) -> str:
        return Line(self.kind, self.shape, pipe=self.pipe).grid

    @property
    def measured(self) -> bool:
        return bool(self.seconds)

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        return max(self.seconds) - min(self.seconds)

    def add(self, event: dict[str, Any]) -> None:
        """Add an event that the job wrote about this line."""
        match event["event"]:
            case "failed":
                self.error = event["error"]
            case "warm":
                self.losses, self.ledger = event["losses"], event["ledger"]
            case "compute":
                self.compute = event["seconds"]
            case "memory":
                self.peak = event["peak"]
            case "turn":
                for name in ("seconds", "inside", "between", "busy"):
                    getattr(self, name).append(event[name])


@dataclass
class ClusterRun:
    """The measurements of one setting."""

    setting: str
    results: list[LineResult]
    machine: str
    """The text of the machine file that `fourfold calibrate` wrote."""
    made: dict[str, Any]
    """Date, command, hardware and software."""

    @property
    def cluster_machine(self) -> Machine:
        return parse_machine(self.machine, f"the machine of {self.setting}")

    def of(self, kind: str) -> list[LineResult]:
        """Return the measured lines of a kind, fastest first."""
        return sorted((one for one in self.results if one.kind == kind and one.measured), key=lambda one: one.step)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.setting}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> ClusterRun:
        found = json.loads(path.read_text())
        return cls(**{**found, "results": [LineResult(**one) for one in found["results"]]})


def calibrate(cluster: Cluster, seconds: float) -> Machine:
    """Run `fourfold calibrate` on the cluster and return the machine."""
    with tempfile.TemporaryDirectory(prefix="fourfold-calibrate-") as folder:
        path = Path(folder) / "emulated.toml"
        arguments = ("-m", "fourfold.cli", "calibrate", "--device", "cpu", "--seconds", f"{seconds:g}", "--out")
        if code := cluster.run([*arguments, str(path)], env=KEEP_MEMORY, timeout=60 + 4 * seconds):
            raise RuntimeError(f"fourfold calibrate exited with code {code} on {cluster.shape}")
        return replace(load_machine(str(path)), about=f"emulated cluster: {cluster.shape}")


def calibrated(setting: Setting, cluster: Cluster, options: argparse.Namespace) -> Machine:
    """Return the machine that a stored run has calibrated, or calibrate the cluster."""
    if options.machines is not None:
        return ClusterRun.read(options.machines / f"{setting.name}.json").cluster_machine
    print(f"{setting}: calibrating", flush=True)
    return calibrate(cluster, options.calibrate)


def measure(
    cluster: Cluster,
    setting: Setting,
    lines: Sequence[Line],
    *,
    rounds: int,
    seconds: float,
    memory: bool = False,
    report: Callable[[str], None] = print,
) -> list[LineResult]:
    """Measure every line on the cluster; with `memory`, only the peaks. No round begins after `seconds`."""
    results = {line.name: LineResult.of(line) for line in lines}
    for _ in range(MOST_FAILURES):
        left = [line for line in lines if results[line.name].error is None]
        down = _run(cluster, Job(setting.workload, tuple(left), rounds, WARMUP, seconds, memory, ""), results, report)
        if down is None:
            return list(results.values())
        results[down].error = "crashed the job"
        report(f"  {down} crashed the job; measuring again without it")
        # drop the other lines' results too: lines are compared within one job
        results |= {line.name: LineResult.of(line) for line in left if line.name != down}
    raise RuntimeError(f"{MOST_FAILURES} lines crashed the job on {setting}, so the fault is not in the lines")


def measure_memory(setting: Setting, lines: Sequence[Line], results: Sequence[LineResult]) -> None:
    """Add the peak memory of all lines that were measured. Links are not limited here, since memory does not depend on
    their speed."""
    measured = {one.name: one for one in results if one.measured}
    with Cluster(replace(setting.cluster, mbit=None)) as cluster:
        left = [line for line in lines if line.name in measured]
        for one in measure(cluster, setting, left, rounds=1, seconds=0.0, memory=True):
            measured[one.name].peak = one.peak


def _run(cluster: Cluster, job: Job, results: dict[str, LineResult], report: Callable[[str], None]) -> str | None:
    """Run one job; return the name of the line that crashed it, or None."""
    with tempfile.TemporaryDirectory(prefix="fourfold-job-") as folder:
        out, path = Path(folder) / "events.jsonl", Path(folder) / "job"
        path.write_bytes(pickle.dumps(replace(job, out=str(out))))
        env = FREE_AT_ONCE if job.memory else KEEP_MEMORY
        code = cluster.run([str(HERE / "job.py"), str(path)], env=env, timeout=JOB_SECONDS)
        events = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    last = None
    for event in events:
        if "line" in event:
            last = event["line"]
            results[last].add(event)
        elif event["event"] == "stopped":
            report(f"  the time limit was reached after {event['rounds']} rounds")
    ended = bool(events) and events[-1]["event"] == "end"
    if ended and not code:
        return None
    if last is None:
        raise RuntimeError(f"the job exited with code {code} before it reached a line; its messages are above")
    return last


def add_options(parser: argparse.ArgumentParser, settings: Sequence[str]) -> None:
    """Add the options of every command that measures on clusters."""
    parser.add_argument("--settings", default=",".join(settings), help="NODESxRANKS-MBIT-SIZE,...; default %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=900.0, help="a setting begins no new round after this")
    parser.add_argument("--calibrate", type=float, default=90.0, help="seconds to calibrate each cluster")
    parser.add_argument("--machines", type=Path, help="folder of earlier runs: take their machines, do not calibrate")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-cluster", help="folder for the runs")


def parse(parser: argparse.ArgumentParser, program: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check the options, and note the command line in `options.command`."""
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    try:
        options.settings = [Setting.parse(text) for text in options.settings.split(",")]
    except ValueError as error:
        parser.error(str(error))
    options.command = shlex.join(("python", f"benchmarks/{program}", *arguments))
    return options


def provenance(command: str) -> dict[str, Any]:
    """Return what a reader needs to repeat the run."""
    return {
        "command": command,
        "date": str(date.today()),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }


def run(
    setting: Setting,
    lines_of: Callable[[Machine], Sequence[Line]],
    options: argparse.Namespace,
    *,
    memory: bool = False,
) -> ClusterRun:
    """Create the cluster, calibrate it, and measure the lines that `lines_of` returns for the calibrated machine."""
    with Cluster(setting.cluster) as cluster:
        machine = calibrated(setting, cluster, options)
        lines = lines_of(machine)
        print(f"{setting}: {len(lines)} lines", flush=True)
        results = measure(cluster, setting, lines, rounds=options.rounds, seconds=options.seconds)
    found = ClusterRun(setting.name, results, to_toml(machine), provenance(options.command))
    if memory:
        found.write(options.out)  # kept even if measuring memory fails
        measure_memory(setting, lines, results)
    return found

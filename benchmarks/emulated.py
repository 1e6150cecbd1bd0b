"""Runs on the emulated cluster: calibrates it, measures lines on it, and keeps what was seen in a file.

A `Run` is one setting, measured in one job: its lines, the machine as `fourfold calibrate` saw it, and what a reader
needs to do it again. Where a line brings the job down it is noted, and the others are measured in another job.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from cluster import Cluster
from fourfold.grid import Shape
from fourfold.planner.machine import Machine, load_machine, parse_machine, to_toml
from settings import Job, Setting
from sides import Line

HERE = Path(__file__).parent
RESULTS = HERE / "results"
AT_ONCE = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",  # where torch is built with mimalloc
}
"""Memory goes back to the system as soon as a tensor ends, so that what is resident is what is used."""
FRUGAL = {"MALLOC_ARENA_MAX": "2", "MIMALLOC_PURGE_DELAY": "-1"}
"""Not an arena for each of hundreds of threads; memory that was used stays, as fresh pages take long."""
MOST_FAILURES = 8
JOB_SECONDS = 3600.0
WARMUP = 1
"""Steps before the one whose collectives are watched: the engine finds its order in the first."""


@dataclass
class Result:
    """A line, and what was seen of it."""

    name: str
    kind: str
    sizes: dict[str, int]
    order: list[str]
    variant: str
    seconds: list[float] = field(default_factory=list)
    """Of the slowest rank, one number a round."""
    inside: list[float] = field(default_factory=list)
    """Bytes a rank sent on average in a step inside its node, by the interfaces' counters ..."""
    between: list[float] = field(default_factory=list)
    """... and to other nodes."""
    busy: list[float] = field(default_factory=list)
    """Share of the machine's cores that worked."""
    losses: list[float] = field(default_factory=list)
    """Of the first steps."""
    ledger: dict[str, float] = field(default_factory=dict)
    """The same bytes by Fourfold's own ledger."""
    compute: float | None = None
    """Seconds of a step of Fourfold's in which nothing travels."""
    peak: float | None = None
    """Bytes of the rank that needs the most."""
    error: str | None = None

    @classmethod
    def of(cls, line: Line) -> Result:
        return cls(line.name, line.kind, line.shape.sizes, list(line.shape.order), line.variant)

    @property
    def shape(self) -> Shape:
        return Shape(**self.sizes, order=tuple(self.order))

    @property
    def measured(self) -> bool:
        return bool(self.seconds)

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        return max(self.seconds) - min(self.seconds)

    def hear(self, event: dict[str, Any]) -> None:
        """What the job has written about it."""
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
class Run:
    """A setting, measured."""

    setting: str
    results: list[Result]
    machine: str
    """The file that `fourfold calibrate` wrote."""
    made: dict[str, Any]
    """Date, command, hardware and software."""

    @property
    def cluster_machine(self) -> Machine:
        return parse_machine(self.machine, f"the machine of {self.setting}")

    def of(self, kind: str) -> list[Result]:
        """The measured lines of a kind, the fastest first."""
        return sorted((one for one in self.results if one.kind == kind and one.measured), key=lambda one: one.step)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.setting}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Run:
        found = json.loads(path.read_text())
        return cls(**{**found, "results": [Result(**one) for one in found["results"]]})


def calibrate(cluster: Cluster, seconds: float) -> Machine:
    """What `fourfold calibrate` says of it."""
    with tempfile.TemporaryDirectory(prefix="fourfold-calibrate-") as folder:
        path = Path(folder) / "emulated.toml"
        arguments = ("-m", "fourfold.cli", "calibrate", "--device", "cpu", "--seconds", f"{seconds:g}", "--out")
        if code := cluster.run([*arguments, str(path)], env=FRUGAL, timeout=60 + 4 * seconds):
            raise RuntimeError(f"fourfold calibrate ended with {code} on {cluster.shape}")
        return replace(load_machine(str(path)), about=f"emulated cluster: {cluster.shape}")


def measure(
    cluster: Cluster,
    setting: Setting,
    lines: Sequence[Line],
    *,
    rounds: int,
    seconds: float,
    memory: bool = False,
    report: Callable[[str], None] = print,
) -> list[Result]:
    """Every line on that cluster; `seconds` is for the rounds of one job. With `memory` it is their peaks alone."""
    results = {line.name: Result.of(line) for line in lines}
    for _ in range(MOST_FAILURES):
        left = [line for line in lines if results[line.name].error is None]
        down = _run(cluster, Job(setting.size, tuple(left), rounds, WARMUP, seconds, memory, ""), results, report)
        if down is None:
            return list(results.values())
        results[down].error = "brought the job down"
        report(f"  {down} brought the job down; once more without it")
        results |= {line.name: Result.of(line) for line in left if line.name != down}  # compared within one job
    raise RuntimeError(f"{MOST_FAILURES} lines brought the job down on {setting}: that is not theirs")


def weigh(setting: Setting, lines: Sequence[Line], results: Sequence[Result]) -> None:
    """Peak memory of all that was measured. It does not ask how fast links are, so here they are not held back."""
    standing = {one.name: one for one in results if one.measured}
    with Cluster(replace(setting.cluster, mbit=None)) as cluster:
        left = [line for line in lines if line.name in standing]
        for one in measure(cluster, setting, left, rounds=1, seconds=0.0, memory=True):
            standing[one.name].peak = one.peak


def _run(cluster: Cluster, job: Job, results: dict[str, Result], report: Callable[[str], None]) -> str | None:
    """One job; the line that brought it down, if one did."""
    with tempfile.TemporaryDirectory(prefix="fourfold-job-") as folder:
        out, path = Path(folder) / "events.jsonl", Path(folder) / "job"
        path.write_bytes(pickle.dumps(replace(job, out=str(out))))
        path_of = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        env = {"PYTHONPATH": path_of, **(AT_ONCE if job.memory else FRUGAL)}
        code = cluster.run([str(HERE / "cluster_job.py"), str(path)], env=env, timeout=JOB_SECONDS)
        events = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    last = None
    for event in events:
        if "line" in event:
            last = event["line"]
            results[last].hear(event)
        elif event["event"] == "stopped":
            report(f"  time was up after {event['rounds']} rounds")
    ended = bool(events) and events[-1]["event"] == "end"
    if ended and not code:
        return None
    if last is None:
        raise RuntimeError(f"the job ended with {code} before it came to a line; its own messages are above")
    return last


def add_options(parser: argparse.ArgumentParser, settings: Sequence[str]) -> None:
    """What every command that measures on clusters asks for."""
    parser.add_argument("--settings", default=",".join(settings), help="NODESxRANKS-MBIT-SIZE,...; default %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=900.0, help="after which a setting begins no further round")
    parser.add_argument("--calibrate", type=float, default=90.0, help="seconds for calibrating each cluster")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-cluster", help="a folder of runs")


def parse(parser: argparse.ArgumentParser, program: str, arguments: Sequence[str]) -> argparse.Namespace:
    """The options, checked, with the command that they came with."""
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    try:
        options.settings = [Setting.parse(text) for text in options.settings.split(",")]
    except ValueError as error:
        parser.error(str(error))
    options.command = " ".join((f"python benchmarks/{program}", *arguments))
    return options


def described(command: str) -> dict[str, Any]:
    """What a reader needs to do it again."""
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
) -> Run:
    """Make the cluster, calibrate it, and measure the lines for what was seen."""
    with Cluster(setting.cluster) as cluster:
        print(f"{setting}: calibrating", flush=True)
        machine = calibrate(cluster, options.calibrate)
        lines = lines_of(machine)
        print(f"{setting}: {len(lines)} lines", flush=True)
        results = measure(cluster, setting, lines, rounds=options.rounds, seconds=options.seconds)
    found = Run(setting.name, results, to_toml(machine), described(options.command))
    if memory:
        found.write(options.out)  # stays, whatever becomes of the weighing
        weigh(setting, lines, results)
    return found

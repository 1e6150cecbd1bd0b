"""Runs of `fourfold train` for tests: functions that start, end and read them. A *job* runs on every rank of a pool."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import warm
from fourfold.train.checkpoints import Start, find_start
from fourfold.train.config import TrainConfig
from fourfold.train.loop import Run
from fourfold.train.run_folder import JsonLines
from harness import grid_of

STEPS = 6


SMALL = [
    "--model", "gpt-tiny", "--device", "cpu", "--set", "model.layers=1", "--set", "batch.rows=4", "--set",
    "batch.seq=12", "--set", "data.held_out=0.1", "--set", "log.peak_flops=1e12",
]  # fmt: skip


@dataclass(frozen=True)
class Left:
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


def cli(*arguments: str) -> Left:
    """Run the command in this process, as a job."""
    from fourfold.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as left:
            code = int(left.code or 0)
    return Left(code, out.getvalue(), err.getvalue())


def train_arguments(data: str | Path, out: Path, *more: str, steps: int = STEPS) -> list[str]:
    return ["train", *SMALL, "--data", str(data), "--steps", str(steps), "--out", str(out), *more]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def column(folder: Path, event: str, key: str) -> list[Any]:
    return [found[key] for found in lines_of(folder) if found["event"] == event]


def assert_error(left: Left, *parts: str) -> None:
    """Check that a command ended with an error for users: one line, with the usual beginning."""
    assert left.code == 1, left
    assert left.err.startswith("fourfold: error: "), left.err
    assert left.err.count("\n") == 1, left.err
    assert all(part in left.err for part in parts), left.err


def interrupted(folder: Path, number: int, *arguments: str) -> Left:
    """Run the command as a job, and send its process a signal once it trains."""

    def interrupt() -> None:
        while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").read_text().count("\n") < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    return cli(*arguments)


@dataclass(frozen=True)
class Job:
    """A launcher that is running its ranks, in a session of its own, and the folder of its run."""

    process: warm.Process
    folder: Path

    @property
    def pid(self) -> int:
        return self.process.pid


def started(program: Callable[..., int], folder: Path, arguments: Sequence[str]) -> Job:
    """Start a launcher. Files beside the folder receive what it prints and the process ids of its ranks."""
    pids = folder.with_suffix(".pids")
    pids.mkdir()
    out, errors = (folder.with_suffix(suffix) for suffix in (".out", ".err"))
    return Job(
        warm.Process(program, *arguments, env={**os.environ, warm.PIDS: str(pids)}, stdout=out, stderr=errors), folder
    )


def end(jobs: Iterable[Job]) -> None:
    for job in jobs:
        for pid in (*ranks_of(job).values(), job.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.process.wait()


def ranks_of(job: Job) -> dict[int, int]:
    """Return the process ids that the launcher started last, by rank."""
    return {int(path.name): int(path.read_text()) for path in job.folder.with_suffix(".pids").iterdir()}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_steps(job: Job, steps: int = 2, timeout: float = 120) -> None:
    deadline, metrics = time.monotonic() + timeout, job.folder / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < steps:
        assert job.process.poll() is None, job.folder.with_suffix(".err").read_text()
        assert time.monotonic() < deadline, "no step was recorded"
        time.sleep(0.05)


def ended(job: Job, timeout: float) -> Left:
    code = job.process.wait(timeout)
    return Left(code, *(job.folder.with_suffix(suffix).read_text() for suffix in (".out", ".err")))


needs_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="finds the ranks through /proc")


def trained(config: TrainConfig, folder: Path, *, resume: bool = False) -> None:
    """Train a run in a folder as a job, from its start or from its newest checkpoint."""
    grid = grid_of(config.grid.shape)
    start = find_start(grid, folder, config) if resume else Start()
    run = Run(config, grid, folder)
    run.load(start)
    run.begin(lambda: [JsonLines(folder / "metrics.jsonl")], start)
    run.train()

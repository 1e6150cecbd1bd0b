"""Reports of very long runs: a million steps, a million evaluations and saves, a hundred thousand skipped steps.

    python tests/report/soak_report.py [STEPS]

For each run `fourfold report` must end in under 10 s with a peak of under 500 MB, the page must be under 3 MB, and
every spike must be in it. Seconds and sizes are printed.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS, PEAK_BYTES, PAGE_BYTES = 10.0, 500e6, 3e6
"""What the report of a million steps may take."""
SPIKES = {"loss": 77.5, "grad_norm": 88.25, "seconds": 9.5, "tokens_per_second": 99.5e6}
"""One value far above all others for each of these numbers, each at a step of its own."""
LINE = (
    '{"event": "step", "step": %d, "loss": %s, "grad_norm": %r, "learning_rate": %r, "seconds": %r, '
    '"wire_bytes": {"x": 3407872, "y": 342342, "z": 5210112, "data": 3242342}, '
    '"exposed_seconds": {"x": %r, "y": %r, "z": %r, "data": %r}, "peak_memory_bytes": 432013312, '
    '"tokens_per_second": %r, "mfu": %r, "hfu": %r, "skipped": %s}\n'
)
"""A step as the trainer writes it."""


def write_long_run(folder: Path, steps: int, *, skip_every: int = 0, evaluations: int = 0, saves: int = 0) -> Path:
    """Write the run of a grid of all axes, with the spikes above, one loss that is not finite and one skipped step."""
    folder.mkdir()
    (folder / "config.toml").write_text('[model]\nname = "gpt-tiny"\n')
    grid = {"x": 2, "y": 2, "z": 2, "data": 2}
    (folder / "run.json").write_text(json.dumps({"model": "gpt-tiny", "grid": grid, "steps": steps}))
    chance, spikes = random.Random(0), {spike_step(steps, name): name for name in SPIKES}
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            noise = [chance.random() for _ in range(8)]
            seconds = 0.2 + noise[0] / 50
            found: dict[str, Any] = {"loss": 2 + noise[1] / 9, "grad_norm": 1 + noise[2], "seconds": seconds}
            found["tokens_per_second"] = 2048 / seconds
            if step in spikes:
                found[spikes[step]] = SPIKES[spikes[step]]
            lost = step == diverged_step(steps)
            skipped = lost or (skip_every > 0 and step % skip_every == 0)
            waits, rate = [value / 1000 for value in noise[3:7]], 1e-3 * (1 - step / steps)
            tokens, mfu = found["tokens_per_second"], noise[7] / 3
            numbers = "null" if lost else repr(found["loss"]), found["grad_norm"], rate, found["seconds"], *waits
            file.write(LINE % (step, *numbers, tokens, mfu, mfu * 1.25, "true" if skipped else "false"))
            if skipped:
                file.write(f'{{"event": "skipped", "step": {step}, "parameter": "layers.0.up", "in_a_row": 1}}\n')
            if evaluations and step % (steps // evaluations) == 0:
                file.write(f'{{"event": "evaluation", "step": {step}, "loss": {found["loss"]!r}, "seconds": 0.5}}\n')
            if saves and step % (steps // saves) == 0:
                file.write(f'{{"event": "saved", "step": {step}, "seconds": 0.5}}\n')
        file.write(f'{{"event": "end", "step": {steps}, "reason": "finished"}}\n')
    return folder


def spike_step(steps: int, name: str) -> int:
    """The step at which a number has its spike."""
    return steps // 7 * (1 + list(SPIKES).index(name)) + 3


def diverged_step(steps: int) -> int:
    """The step whose loss is not finite; it is skipped."""
    return steps // 7 * 6 + 5


@dataclass(frozen=True, slots=True)
class Cost:
    """What a report took."""

    seconds: float
    peak_bytes: int
    page_bytes: int


def report(folder: Path) -> Cost:
    """Run `fourfold report` in a process of its own; its peak is that of all its processes together, at most."""
    began = time.monotonic()
    command = [sys.executable, "-c", MEASURED, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONWARNINGS": ""})
    seconds = time.monotonic() - began
    return Cost(seconds, int(done.stdout.splitlines()[-1]) * 1024, (folder / "report.html").stat().st_size)


MEASURED = """
import os, re, resource, sys
from pathlib import Path
from fourfold.cli import main
code = main(["report", sys.argv[1]])
# not ru_maxrss, in which Linux counts the process that started this one
own = int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
others = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(own + others * min(4, len(os.sched_getaffinity(0))))  # KiB: that of the largest child, for each of them
sys.exit(code)
"""
"""Runs the command and prints its peak memory."""


def check_page(folder: Path, steps: int) -> None:
    """Assert that the page shows every spike and mark at its step."""
    text = (folder / "report.html").read_text()
    found = re.search(r'id="data">(.*?)</script>', text)
    assert found is not None
    drawn = json.loads(found[1])
    lines = {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in drawn["loss"]["traces"]}
    for figure in ("norm", "throughput"):
        lines |= {trace["name"]: dict(zip(trace["x"], trace["y"], strict=True)) for trace in drawn[figure]["traces"]}
    names = {"loss": "training", "grad_norm": "gradient norm", "tokens_per_second": "tokens per second"}
    for number, name in names.items():
        assert lines[name][spike_step(steps, number)] == SPIKES[number], name
    stacked = [dict(zip(trace["x"], trace["y"], strict=True)) for trace in drawn["time"]["traces"]]
    whole = sum(line[spike_step(steps, "seconds")] for line in stacked)
    assert abs(whole - SPIKES["seconds"]) < 1e-4, "seconds"
    near = steps / 1000
    for name in ("skipped", "not finite"):
        assert min(abs(step - diverged_step(steps)) for step in lines[name]) <= near, name
    assert all(len(trace["x"]) <= 3010 for figure in drawn.values() for trace in figure["traces"])
    assert "the figures are downsampled" in text and "metrics.jsonl beside this page has every number" in text


RUNS: dict[str, dict[str, int]] = {"steps": {}, "evaluations and saves": {"evaluations": 1, "saves": 1},
                                   "a tenth skipped": {"skip_every": 10}}  # fmt: skip
"""Options of `write_long_run`; evaluations and saves after every step."""


def main(steps: int) -> None:
    failed = []
    for name, options in RUNS.items():
        with tempfile.TemporaryDirectory(prefix="fourfold-report-") as place:
            options = {key: steps if key in ("evaluations", "saves") else value for key, value in options.items()}
            folder = write_long_run(Path(place) / "run", steps, **options)
            size = (folder / "metrics.jsonl").stat().st_size
            cost = report(folder)
            check_page(folder, steps)
        print(
            f"{steps:,} steps, {name}: {size / 1e6:.0f} MB of metrics; {cost.seconds:.1f} s, "
            f"peak {cost.peak_bytes / 1e6:.0f} MB, page {cost.page_bytes / 1e6:.2f} MB",
            flush=True,
        )
        if cost.seconds > SECONDS or cost.peak_bytes > PEAK_BYTES or cost.page_bytes > PAGE_BYTES:
            failed.append(name)
    if failed:
        sys.exit(f"over {SECONDS} s, {PEAK_BYTES / 1e6} MB or a page of {PAGE_BYTES / 1e6} MB: {', '.join(failed)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)

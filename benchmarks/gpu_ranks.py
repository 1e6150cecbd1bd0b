"""Fourfold and its peers, several ranks on one machine: NCCL ranks that share one GPU, or gloo ranks on the CPU.

    python benchmarks/gpu_ranks.py --groups 4:deep,4:wide,8:deep          # on a GPU
    python benchmarks/gpu_ranks.py --budget 500                           # in pieces: the next call goes on
    python benchmarks/gpu_ranks.py --device cpu                           # 4:tiny, a smoke test
    python benchmarks/table.py RESULTS.jsonl TABLE.md                     # the table again, anywhere

All lines of a group (ranks and size, see `lines.py`) are resident at once. Each round takes every line once, in another
order each time: ranks meet, step, and wait for their device; the slowest rank counts. What was measured is written
after every round, so that a later call with the same --out goes on where this one ended.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import torch

import stage
import table
from bed import Bed, RanksFailedError, multi_process_service
from lines import SIZES, lines_of
from record import Record, Results
from sides import Line, Measure, Size

RESULTS = Path(__file__).parent / "results"
TIMEOUT = 240.0
"""Seconds after which a job counts as hung."""


class OutOfTime(Exception):  # noqa: N818  # no error: what was measured is written
    """The next piece would not fit into the budget."""


class Clock:
    """The time that a call may take."""

    def __init__(self, budget: float) -> None:
        self.began, self.budget = time.monotonic(), budget

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    def require(self, what: str, seconds: float) -> None:
        if self.spent + seconds > self.budget:
            needs = f"{what} would take {seconds:.0f} s more"
            raise OutOfTime(f"{self.spent:.0f} s of {self.budget:.0f} s are spent and {needs}")


class Group:
    """One group on its bed: builds its lines and takes rounds."""

    def __init__(self, name: str, bed: Bed, size: Size, lines: Sequence[Line], results: Results, clock: Clock) -> None:
        self.name, self.bed, self.size, self.results, self.clock = name, bed, size, results, clock
        self.lines = list(lines)
        self.settle = False
        self.longest_warmup = 0.0
        self.built: list[str] = []

    def measure(self, rounds: int, steps: int) -> None:
        while todo := self.results.unfinished(self.name, self.lines, rounds):
            self.prepare(todo, steps)
            ready = [line for line in todo if line.name in self.built]
            if not ready:
                continue  # those that failed are finished; a bed that went down with one comes up for the others
            done = min(len(self.record(line).seconds["step"]) for line in ready)
            ready = [line for line in ready if len(self.record(line).seconds["step"]) == done]
            self.round(ready, done, rounds)

    def record(self, line: Line) -> Record:
        return self.results.of(self.name, line)

    def prepare(self, lines: Sequence[Line], steps: int) -> None:
        """Have these lines resident and warm."""
        if not self.bed.up:
            self.built.clear()
        if not self.built:
            shapes = [line.shape for line in lines if line.kind == "fourfold"]
            self.bed.run(stage.open_group, self.size, shapes, timeout=TIMEOUT)
        for line in lines:
            if line.name in self.built:
                continue
            began = time.monotonic()
            self.clock.require(line.name, self.longest_warmup)
            try:
                self.bed.run(stage.build, line, self.size, line.policy.compile, timeout=TIMEOUT)
            except RanksFailedError as failed:
                self.fail(line, failed)
                if self.bed.up:
                    continue
                return
            if not self.try_warm(line, steps):
                return
            self.built.append(line.name)
            took = time.monotonic() - began
            self.longest_warmup = max(self.longest_warmup, took)
            print(f"  warm: {line.name} ({took:.1f} s)", flush=True)

    def try_warm(self, line: Line, steps: int) -> bool:
        """Whether the bed is still good."""
        record = self.record(line)
        try:
            found = self.bed.run(stage.warm, line.name, steps, timeout=TIMEOUT)
            record.losses = [sum(losses) / len(found) for losses in zip(*(rank.losses for rank in found), strict=True)]
            peaks = [rank.peak_bytes for rank in found if rank.peak_bytes is not None]
            record.peak_bytes = max(peaks) if peaks else None
            record.collectives = found[0].collectives
            for measure in line.measures[1:]:
                self.turn(line, measure)
        except RanksFailedError as failed:
            self.fail(line, failed)
            self.bed.close()  # inside a step ranks may have left each other at different collectives
            return False
        return True

    def round(self, lines: Sequence[Line], turn: int, rounds: int) -> None:
        began = time.monotonic()
        self.clock.require("a round", sum(self.record(line).turn_seconds for line in lines))
        first = turn * len(lines) // rounds
        taken = []
        for line in [*lines[first:], *lines[:first]]:
            try:
                taken.append((line, {measure: self.turn(line, measure) for measure in line.measures}))
            except RanksFailedError as failed:
                self.fail(line, failed)
                self.bed.close()
                break
        else:  # a round counts as a whole, so that lines are compared within the same ones
            for line, turns in taken:
                record = self.record(line)
                for measure, (seconds, loss) in turns.items():
                    record.seconds[measure].append(seconds)
                    if loss is not None:
                        record.first_losses.append(loss)
        self.results.write()
        print(f"{self.name}: round {turn + 1} of {rounds}, {time.monotonic() - began:.1f} s", flush=True)

    def turn(self, line: Line, measure: Measure) -> tuple[float, float | None]:
        began = time.monotonic()
        found = self.bed.run(stage.turn, line.name, measure, self.settle, timeout=TIMEOUT)
        self.settle = self.settle or any(rank.scarce for rank in found)
        record = self.record(line)
        record.wall_seconds[measure] = time.monotonic() - began
        losses = [rank.loss for rank in found if rank.loss is not None]
        return max(rank.seconds for rank in found), sum(losses) / len(losses) if losses else None

    def fail(self, line: Line, failed: RanksFailedError) -> None:
        print(f"  FAILED: {line.name}: {failed}", flush=True)
        self.record(line).error = failed.what.splitlines()[0][:300]
        self.results.write()
        if self.bed.up:
            self.bed.run(stage.drop, line.name, timeout=TIMEOUT)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    clock = Clock(options.budget)
    settings = {"compile": options.compile, "warmup": options.warmup}
    results = Results.open(options.out, settings)
    if options.retry:
        results.forget_errors()
    bed: Bed | None = None
    with multi_process_service(options.device) as service:
        try:
            for name in options.groups:
                world, size = _group(name)
                lines = [line for line in lines_of(world, compiled=options.compile) if options.lines.search(line.name)]
                if not results.unfinished(name, lines, options.rounds):
                    print(f"{name}: complete in {options.out}", flush=True)
                    continue
                if bed is None or bed.world != world:
                    if bed is not None:
                        bed.close()
                    bed = Bed(world, options.device, stage.Stage)
                results.begin(name, size, world, _run(options, service, bed))
                Group(name, bed, size, lines, results, clock).measure(options.rounds, options.warmup)
        except OutOfTime as ended:
            print(f"stopped: {ended}; the same command goes on", flush=True)
        finally:
            results.write()
            if bed is not None:
                bed.close()
    options.table.write_text(table.render(results.path))
    print(f"wrote {options.out} and {options.table}")
    return 0


def _group(name: str) -> tuple[int, Size]:
    world, _, size = name.partition(":")
    if not world.isdigit() or size not in SIZES:
        raise SystemExit(f"--groups {name}: a group is RANKS:SIZE, 4 or 8 ranks and a size of {', '.join(SIZES)}")
    return int(world), SIZES[size]


def _run(options: argparse.Namespace, service: str, bed: Bed) -> dict[str, object]:
    """What a reader of the table needs to repeat it."""
    return {
        "command": "python benchmarks/gpu_ranks.py " + " ".join(options.given),
        "date": str(date.today()),
        "mps": service,
        "cores": len(os.sched_getaffinity(0)),
        **bed.run(stage.describe, timeout=TIMEOUT)[0],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # by NVML: the process that starts the ranks must not open the GPU before MPS runs
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gpu = torch.cuda.is_available()
    stem = str(RESULTS / f"{date.today()}-gpu-ranks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument(
        "--groups", help="RANKS:SIZE,... in this order; default 4:deep,4:wide,8:deep, or 4:tiny on the CPU"
    )
    parser.add_argument(
        "--lines", type=re.compile, default=re.compile(""), help="only lines whose name has this pattern"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="steps of each line before it is measured")
    parser.add_argument(
        "--compile", action="store_true", help="compile all sides: Fourfold's regions, the peers' blocks"
    )
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds; ends before a round that would not fit"
    )
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--out", type=Path, default=Path(f"{stem}.jsonl"), help="goes on with what is there")
    parser.add_argument("--table", type=Path, help="default: beside --out")
    options = parser.parse_args(arguments)
    for name in ("rounds", "warmup"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)} must be at least 1")
    default = "4:tiny" if options.device == "cpu" else "4:deep,4:wide,8:deep"
    options.groups = (options.groups or default).split(",")
    options.table = options.table or options.out.with_suffix(".md")
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())

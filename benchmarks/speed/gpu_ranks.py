"""Fourfold and its peers on several ranks of one machine: NCCL ranks that share one GPU, or gloo ranks on the CPU.

    python benchmarks/speed/gpu_ranks.py --groups 4:deep --modes eager,compiled --budget 520    # on a GPU
    python benchmarks/speed/gpu_ranks.py --groups 4:gpt-125m --lines ' x=2 data=2' --modes all  # one grid, every mode
    python benchmarks/speed/gpu_ranks.py --groups 8:deep --lines ' z=8' --rounds 30 --threads   # paired, and the cores
    python benchmarks/speed/gpu_ranks.py --device cpu                                           # 4:tiny, a smoke test
    python benchmarks/speed/gpu_ranks.py --groups 4:deep --modes all --list                     # which lines there are
    python benchmarks/speed/gpu_ranks_table.py RESULTS.jsonl TABLE.md       # the table again, on any machine

All lines of a group (ranks and workload, see `gpu_ranks_lines.py`) stay in memory at once. Each round measures every
line once and starts with a different line: all ranks wait for each other, take the steps of a turn, and wait for their
device; the slowest rank counts. Results are written after every round. A call measures until its lines have --rounds
rounds in common, so the same call with the same --out resumes one that ran out of time, and a call with other lines
adds to the same file. The table compares lines over the rounds that they share.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`


from benchmarks.shared.models import GRAPH_WARMUP
from benchmarks.shared.rank_pool import RankPool, RanksFailedError, has_gpu, multi_process_service
from benchmarks.shared.tables import RESULTS
from benchmarks.shared.workloads import Line, Measure, Workload
from benchmarks.speed import gpu_ranks_table, rank_jobs
from benchmarks.speed.gpu_ranks_lines import MODES, STEPS, WORKLOADS, lines_of
from benchmarks.speed.gpu_ranks_results import LineRecord, Results
from benchmarks.speed.rank_jobs import RankModels

TIMEOUT = 240.0
"""Seconds after which a job is considered to hang."""


BUILD_SHARE = 0.7
"""The part of the budget that building and warming up may take; the lines that do not fit are left out of this call."""


class OutOfTime(Exception):  # noqa: N818  # not an error: the results so far are written
    """The next piece of work would not fit into the budget."""


class Clock:
    """The time budget of a call."""

    def __init__(self, budget: float) -> None:
        self.began, self.budget = time.monotonic(), budget

    @property
    def spent(self) -> float:
        return time.monotonic() - self.began

    def require(self, what: str, seconds: float) -> None:
        if self.spent + seconds > self.budget:
            more = f"{what} would take {seconds:.0f} s more"
            raise OutOfTime(f"{self.spent:.0f} s of {self.budget:.0f} s are spent, and {more}")


class GroupBenchmark:
    """One group on its rank pool: builds the lines and measures them in rounds."""

    def __init__(
        self,
        name: str,
        pool: RankPool,
        workload: Workload,
        lines: Sequence[Line],
        results: Results,
        clock: Clock,
        *,
        steps: int = 1,
        threads: bool = False,
    ) -> None:
        self.name, self.pool, self.workload, self.results, self.clock = name, pool, workload, results, clock
        self.lines, self.steps, self.threads = list(lines), steps, threads
        self.settle = False
        self.longest_warmup = 0.0
        self.built: list[str] = []

    def measure(self, rounds: int, warmup: int) -> None:
        while left := self.results.left(self.name, self.lines, rounds):
            self.prepare([line for line in self.lines if self.record(line).error is None], warmup)
            ready = [line for line in self.lines if line.name in self.built and self.record(line).error is None]
            if not ready or not self.pool.up:
                continue  # failed lines are left out; the pool starts again for the others
            seconds = sum(self.record(line).turn_seconds for line in ready)
            print(f"{self.name}: {left} rounds left, about {left * seconds:.0f} s", flush=True)
            self.round(ready, rounds - left, rounds)

    def record(self, line: Line) -> LineRecord:
        return self.results.of(self.name, line)

    def prepare(self, lines: Sequence[Line], warmup: int) -> None:
        """Build these lines and warm them up, unless that is done."""
        if not self.pool.up:
            self.built.clear()
        if not self.built:
            self.open(lines)
        for number, line in enumerate(lines):
            if line.name in self.built:
                continue
            began = time.monotonic()
            if self.built and self.clock.spent + self.longest_warmup > BUILD_SHARE * self.clock.budget:
                left_out = [late.name for late in lines if late.name not in self.built]
                print(f"  no time for {len(left_out)} lines: {'; '.join(left_out)}", flush=True)
                self.lines = [early for early in lines if early.name in self.built]
                return
            try:
                self.build(line)
            except RanksFailedError as failed:
                self.fail(line, failed)
                if self.pool.up:
                    continue
                return
            if not self.try_warm_up(line, warmup):
                return
            if self.record(line).error is None:
                self.built.append(line.name)
            took = time.monotonic() - began
            self.longest_warmup = max(self.longest_warmup, took)
            print(f"  warm: {line.name} ({took:.1f} s; {number + 1} of {len(lines)})", flush=True)

    def open(self, lines: Sequence[Line]) -> None:
        """Prepare the ranks for these lines."""
        shapes = [line.shape for line in lines if line.kind == "fourfold"]
        self.pool.run(rank_jobs.open_group, self.workload, shapes, timeout=TIMEOUT)

    def build(self, line: Line) -> None:
        """Make the model of a line on every rank."""
        self.pool.run(rank_jobs.build, line, self.workload, timeout=TIMEOUT)

    def try_warm_up(self, line: Line, warmup: int) -> bool:
        """Warm up a line; return whether the pool is still usable."""
        record = self.record(line)
        try:
            found = self.pool.run(rank_jobs.warm_up, line, warmup, timeout=TIMEOUT)
            record.losses = [mean_loss(losses) for losses in zip(*(rank.losses for rank in found), strict=True)]
            peaks = [rank.peak_bytes for rank in found if rank.peak_bytes is not None]
            record.peak_bytes = max(peaks) if peaks else None
            self.note_peaks(record, peaks)
            record.collectives = found[0].collectives
            if reason := found[0].not_captured:  # on all ranks alike, so the pool is as good as before
                record.error = f"not captured: {reason}"[:300]
                print(f"  FAILED: {line.name}: {record.error}", flush=True)
                self.pool.run(rank_jobs.drop, line.name, timeout=TIMEOUT)
                return True
            for measure in line.measures:
                self.turn(line, measure)
        except RanksFailedError as failed:
            self.fail(line, failed)
            self.pool.close()  # the ranks may have stopped at different collectives of the step
            return False
        return True

    def note_peaks(self, record: LineRecord, peaks: Sequence[int]) -> None:
        """Keep the peak memory of every rank, where a benchmark needs more than the largest."""

    def round(self, lines: Sequence[Line], turn: int, rounds: int) -> None:
        began, when = time.monotonic(), round(time.time(), 3)
        self.clock.require("a round", sum(self.record(line).turn_seconds for line in lines))
        first = turn * len(lines) // rounds
        taken = []
        for line in [*lines[first:], *lines[:first]]:
            try:
                taken.append((line, {measure: self.turn(line, measure) for measure in line.measures}))
            except RanksFailedError as failed:
                self.fail(line, failed)
                self.pool.close()
                break
        else:  # a round counts as a whole, so that all lines are compared over the same rounds
            for line, turns in taken:
                self.add(self.record(line), turns, when)
        self.results.write()
        print(f"{self.name}: round {turn + 1} of {rounds}, {time.monotonic() - began:.1f} s", flush=True)

    def add(self, record: LineRecord, turns: dict[Measure, list[rank_jobs.Turn]], when: float) -> None:
        """Add the turns of a round to the record of their line."""
        record.rounds.append(when)
        for measure, found in turns.items():
            record.seconds[measure].append(max(rank.seconds for rank in found))
        ranks = turns["step"]
        record.first_losses.append(mean_loss([rank.loss for rank in ranks]))
        if self.threads:
            kinds = {kind for rank in ranks for kind in rank.cpu_seconds}
            record.add_cpu_seconds({kind: sum(rank.cpu_seconds.get(kind, 0.0) for rank in ranks) for kind in kinds})

    def turn(self, line: Line, measure: Measure) -> list[rank_jobs.Turn]:
        """Take one turn of a measure and return what each rank measured."""
        began = time.monotonic()
        asked = line.name, measure, self.steps, self.settle, self.threads and measure == "step"
        found = self.pool.run(rank_jobs.turn, *asked, timeout=TIMEOUT)
        self.settle = self.settle or any(rank.scarce for rank in found)
        self.record(line).wall_seconds[measure] = time.monotonic() - began
        return found

    def fail(self, line: Line, failed: RanksFailedError) -> None:
        print(f"  FAILED: {line.name}: {failed}", flush=True)
        self.record(line).error = failed.what.splitlines()[0][:300]
        self.results.write()
        if self.pool.up:
            self.pool.run(rank_jobs.drop, line.name, timeout=TIMEOUT)


def mean_loss(losses: Sequence[float | None]) -> float:
    """Return the mean over the ranks that have a loss."""
    found = [loss for loss in losses if loss is not None]
    return sum(found) / len(found)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    groups = {name: _lines(name, options) for name in options.groups}
    if options.list:
        list_groups(groups)
        return 0
    results = Results.open(options.out, {"warmup": options.warmup})
    measure_groups([_group(name, lines, options) for name, lines in groups.items()], results, options)
    options.table.write_text(gpu_ranks_table.render(results.path))
    print(f"wrote {options.out} and {options.table}")
    return 0


@dataclass(frozen=True)
class Group:
    """The lines that are measured side by side on the same ranks."""

    name: str
    world: int
    about: dict[str, Any]
    """What a reader of the results must know: model, batch, dtype."""
    lines: Sequence[Line]
    benchmark: Callable[[RankPool, Results, Clock], GroupBenchmark]
    ranks: Callable[[int, int, str], RankModels] = RankModels
    """Makes what a rank keeps between jobs."""


def _group(name: str, lines: Sequence[Line], options: argparse.Namespace) -> Group:
    world, workload = _parse_group(name)
    steps = options.steps or STEPS.get(workload.name, 1)

    def benchmark(pool: RankPool, results: Results, clock: Clock) -> GroupBenchmark:
        return GroupBenchmark(name, pool, workload, lines, results, clock, steps=steps, threads=options.threads)

    return Group(name, world, workload.about, lines, benchmark)


def measure_groups(groups: Sequence[Group], results: Results, options: argparse.Namespace) -> None:
    """Measure all groups, one after another, until each has its rounds or the budget is spent."""
    clock = Clock(options.budget)
    if options.retry:
        results.forget_errors()
    pool: RankPool | None = None
    with multi_process_service(options.device) as service:
        try:
            for group in groups:
                if not results.left(group.name, group.lines, options.rounds):
                    print(f"{group.name}: complete in {options.out}", flush=True)
                    continue
                if pool is None or pool.world != group.world:
                    if pool is not None:
                        pool.close()
                    pool = RankPool(group.world, options.device, group.ranks)
                about = {"ranks": group.world, **group.about}
                results.begin(group.name, about, _provenance(options, service, pool))
                group.benchmark(pool, results, clock).measure(options.rounds, options.warmup)
        except OutOfTime as ended:
            print(f"stopped: {ended}; run the same command again to resume", flush=True)
        finally:
            results.write()
            if pool is not None:
                pool.close()


def _lines(group: str, options: argparse.Namespace) -> list[Line]:
    """Return the lines of a group that the options choose."""
    world, workload = _parse_group(group)
    found = lines_of(world, workload, options.modes, every=options.every)
    return [line for line in found if options.lines.search(line.name)]


def _parse_group(name: str) -> tuple[int, Workload]:
    world, _, size = name.partition(":")
    if not world.isdigit() or size not in WORKLOADS:
        raise SystemExit(f"--groups {name}: a group is RANKS:SIZE, 4 or 8 ranks and a size of {', '.join(WORKLOADS)}")
    return int(world), WORKLOADS[size]


def _provenance(options: argparse.Namespace, service: str, pool: RankPool) -> dict[str, object]:
    """Return what a reader of the table needs to repeat the run."""
    return {
        "command": shlex.join(["python", f"benchmarks/{options.script}", *options.given]),
        "date": str(date.today()),
        "mps": service,
        "cores": len(os.sched_getaffinity(0)),
        **pool.run(rank_jobs.describe, timeout=TIMEOUT)[0],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = shared_options(__doc__, "gpu-ranks", rounds=5, warmup=5)
    parser.add_argument(
        "--groups", help="RANKS:SIZE,... in this order; default 4:deep,4:wide,4:gpt-125m,8:deep, or 4:tiny on the CPU"
    )
    parser.add_argument("--steps", type=int, help="steps of a turn; default by size: 5 of gpt-125m, otherwise 1")
    parser.add_argument(
        "--modes",
        default="eager",
        help=f"MODE,... of {', '.join(MODES)}; or all. Compiled: Fourfold's regions, the peers' blocks or stages. "
        f"Captured: Fourfold's step as a CUDA graph, which is recorded after {GRAPH_WARMUP} steps of warm-up",
    )
    parser.add_argument("--every", action="store_true", help="also Fourfold's other grids, and each mechanism (eager)")
    parser.add_argument("--threads", action="store_true", help="sample the CPU seconds of every kind of thread")
    options = parse_shared(parser, arguments, "speed/gpu_ranks.py")
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps {options.steps} must be at least 1")
    options.modes = MODES if options.modes == "all" else options.modes.split(",")
    if unknown := [mode for mode in options.modes if mode not in MODES]:
        parser.error(f"--modes {unknown[0]}: a mode is one of {', '.join(MODES)}, or all of them: all")
    if any(mode.startswith("captured") for mode in options.modes) and options.warmup <= GRAPH_WARMUP:
        parser.error(f"--warmup {options.warmup}: a captured step is recorded after {GRAPH_WARMUP}, so take more")
    default = "4:tiny" if options.device == "cpu" else "4:deep,4:wide,4:gpt-125m,8:deep"
    options.groups = (options.groups or default).split(",")
    return options


def shared_options(description: str | None, name: str, *, rounds: int, warmup: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark that measures groups."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    stem = str(RESULTS / f"{date.today()}-{name}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if has_gpu() else "cpu")
    parser.add_argument(
        "--lines",
        type=re.compile,
        default=re.compile(""),
        help="regular expression; measure only the lines whose name matches",
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--warmup", type=int, default=warmup, help="steps of each line before measuring")
    parser.add_argument("--list", action="store_true", help="only print the lines that would be measured")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), help="seconds; stop before a round that would exceed them"
    )
    parser.add_argument("--retry", action="store_true", help="measure the lines again that failed")
    parser.add_argument("--out", type=Path, default=Path(f"{stem}.jsonl"), help="results; an existing file is resumed")
    parser.add_argument("--table", type=Path, help="default: next to --out")
    return parser


def parse_shared(parser: argparse.ArgumentParser, arguments: Sequence[str] | None, script: str) -> argparse.Namespace:
    """Parse the arguments; refuse what no benchmark can use."""
    options = parser.parse_args(arguments)
    for name in ("rounds", "warmup"):
        if (given := getattr(options, name)) < 1:
            parser.error(f"--{name} {given} must be at least 1")
    options.table = options.table or options.out.with_suffix(".md")
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    options.script = script
    return options


def list_groups(groups: Mapping[str, Sequence[Line]]) -> None:
    """Print which lines there are."""
    for name, lines in groups.items():
        print(f"{name}, {len(lines)} lines:", *(line.name for line in lines), sep="\n  ")


if __name__ == "__main__":
    sys.exit(main())

"""The planner against measured steps and memory on one GPU: on four ranks, each with a quarter of it, pipelines among
them; or on one rank that has all of it, eager, compiled and captured.

    python benchmarks/planner/on_gpu.py --budget 300
    python benchmarks/planner/on_gpu.py --ranks 1 --budget 150
    python benchmarks/planner/on_gpu.py --experts --budget 200            # a mixture of experts, on folds
    python benchmarks/planner/on_gpu.py --lines 'pipe=4' --rounds 5
    python benchmarks/planner/on_gpu.py --device cpu --rounds 1           # tiny, a smoke test
    python benchmarks/planner/on_gpu.py --list

`fourfold calibrate` measures a machine file on the same ranks first, and every line is priced with it, independently of
its own measurement. A step is forward, backward, clipping and AdamW. Lines take turns as in `speed/gpu_ranks.py`; the
same call with the same --out resumes, with the machine file that lies beside it.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

import fourfold as ff
from benchmarks.planner.validate_measured import correlation, ranks
from benchmarks.shared.models import GRAPH_WARMUP
from benchmarks.shared.rank_pool import PARTITION, RankPool
from benchmarks.shared.tables import markdown_table, verdict
from benchmarks.shared.workloads import Line, Mode, Workload
from benchmarks.speed.gpu_ranks import (
    TIMEOUT,
    Clock,
    Group,
    GroupBenchmark,
    list_groups,
    measure_groups,
    parse_shared,
    shared_options,
)
from benchmarks.speed.gpu_ranks_lines import STEPS, WORKLOADS
from benchmarks.speed.gpu_ranks_results import LineRecord, Results
from benchmarks.speed.gpu_ranks_table import commands_of
from benchmarks.speed.rank_jobs import RankModels
from fourfold.planner.calibrate import Calibration
from fourfold.planner.machine import load_machine, to_toml
from fourfold.planner.price import Candidate, Task, memory_by_pipe_rank, price
from fourfold.schedule.stages import Stages

RANKS = 4
CALIBRATE_SECONDS = 40.0
MEAN, WORST, SPEARMAN, MEMORY, REGRET = 0.10, 0.25, 0.95, 0.10, 0.03
"""Bars: errors of the seconds on average and at worst, rank correlation, the error of any rank's memory, and how much
slower than the fastest line the line may be that the planner would choose."""
PEAKS = "peak bytes by rank"
EXPLAINED = (
    "`benchmarks/planner/on_gpu.py`: forward, backward, clipping and AdamW; every rank has its part of one GPU. Times "
    "are those of the slowest rank, medians over rounds in which lines took turns. Predicted with the machine file "
    "that `fourfold calibrate` measured on the same ranks before. Memory: the largest error among all ranks."
)


def workload(gpu: bool) -> Workload:
    """Return a Llama of 16 layers whose stages take tens of milliseconds on a quarter of a GPU, or a tiny one."""
    if not gpu:
        tiny = ff.models.config("llama-tiny", layers=16, kv_heads=24, vocab=256, seq=16)
        return Workload("tiny", tiny, 16, torch.float32)
    sizes = dict(layers=16, hidden=2048, heads=16, kv_heads=16, head_dim=128, mlp_hidden=5632)
    return Workload("llama-0.9b", ff.models.config("llama-3-8b", **sizes, vocab=32000, seq=2048), 16, torch.bfloat16)


def alone(gpu: bool) -> Iterator[tuple[Workload, list[Line]]]:
    """Yield what one rank trains, in every mode that its device has: a small model, whose host decides, and a large."""
    modes: tuple[Mode, ...] = ("eager", "compiled", "captured", "captured compiled") if gpu else ("eager",)
    large = workload(gpu)
    small = WORKLOADS["gpt-125m" if gpu else "tiny-gpt"]
    for work in (small, replace(small, name=f"{small.name}, 2 rows", rows=2), replace(large, rows=large.rows // 4)):
        yield (
            work,
            [Line("fourfold", ff.Shape(), mode=mode, policy=ff.Policy(compile="compiled" in mode)) for mode in modes],
        )


def lines_of(layers: int) -> Iterator[Line]:
    """Yield pipelines with several schedules, placements, micro-batches and grids, and grids without a pipe."""
    plain, wave, loop = ff.Policy(), Stages.even(layers, RANKS, 2, "wave"), Stages.even(layers, RANKS, 2)
    first_long = Stages((0, 6, 10, 14, layers + 2), (0, 1, 2, 3))
    pipe = ff.Shape(pipe=RANKS)
    for schedule, micro_batches in (("1f1b", 4), ("1f1b", 8), ("1f1b", 16), ("gpipe", 8), ("zb-h1", 8), ("zb-h1", 16)):
        yield _line(pipe, replace(plain, schedule=schedule), micro_batches)
    yield _line(pipe, replace(plain, stages=loop, schedule="interleaved"), 8)
    yield _line(pipe, replace(plain, stages=wave, schedule="v-half"), 8)
    yield _line(pipe, replace(plain, stages=wave, schedule="zb-v"), 8)
    yield _line(pipe, replace(plain, schedule="1f1b", recompute="block"), 8, "recompute")
    yield _line(pipe, replace(plain, stages=first_long, schedule="1f1b"), 8, "uneven")
    for other in (ff.Shape(data=2, pipe=2), ff.Shape(x=2, pipe=2), ff.Shape(z=2, pipe=2)):
        yield _line(other, replace(plain, schedule="1f1b"), 4)
    sharded = replace(plain, schedule="zb-h1", shard_optimizer=True)
    yield _line(ff.Shape(data=2, pipe=2), sharded, 8, "sharded optimizer")
    for shape in (ff.Shape(data=4), ff.Shape(z=4), ff.Shape(x=4), ff.Shape(x=2, data=2), ff.Shape(x=2, z=2)):
        yield _line(shape, plain, 1)


def mixture(gpu: bool) -> Workload:
    """Return a few blocks with experts as wide as those of Qwen3-30B-A3B, or a tiny mixture."""
    if not gpu:
        return Workload("tiny-mixture", ff.models.config("moe-tiny", vocab=256, seq=16), 16, torch.float32)
    sizes = dict(layers=3, experts=32, top_k=4, vocab=8192, seq=2048)
    return Workload("mixture-0.5b", ff.models.config("qwen3-30b-a3b", **sizes), 8, torch.bfloat16)


def lines_of_folds() -> Iterator[Line]:
    """Yield grids on which tokens travel to experts, weights travel to tokens, or both."""
    for shape in (
        ff.Shape(data=4),
        ff.Shape(z=4),
        ff.Shape(x=2, z=2),
        ff.Shape(data=4, expert=4),
        ff.Shape(z=4, expert=4),
        ff.Shape(z=4, expert=2, ez=2),
        ff.Shape(x=2, z=2, expert=4),
        ff.Shape(x=2, data=2, expert=2, ex=2),
        ff.Shape(data=2, pipe=2, expert=2),
    ):
        policy = ff.Policy(schedule="1f1b") if shape.pipe > 1 else ff.Policy()
        yield _line(shape, policy, 2 * shape.pipe if shape.pipe > 1 else 1)
    whole = ff.Policy(overlap=ff.Overlap(halves=1))
    yield _line(ff.Shape(data=4, expert=4), whole, 1, "not in halves")


def _line(shape: ff.Shape, policy: ff.Policy, micro_batches: int, what: str = "") -> Line:
    schedule = policy.schedule if shape.pipe > 1 and isinstance(policy.schedule, str) else ""
    variant = ", ".join(part for part in (schedule, what) if part)
    return Line("fourfold", shape, variant, policy, micro_batches=micro_batches)


class PlannedLines(NamedTuple):
    """The lines of one group: what is trained, and how."""

    name: str
    work: Workload
    lines: list[Line]


class Predicted(NamedTuple):
    """What the planner says of a line."""

    seconds: float
    memory: list[int]
    """Bytes of each pipe rank."""


def predict(line: Line, work: Workload, machine_file: Path) -> Predicted:
    machine = load_machine(str(machine_file))
    task = Task(work.config, machine, work.rows, work.config.seq, work.dtype, work.dtype, line.captured)
    rows = work.rows // (line.shape.z * line.shape.data * line.micro_batches)
    candidate = Candidate(line.shape, line.policy, rows, line.micro_batches)
    found = price(task, candidate)
    piped = line.shape.pipe > 1
    memory = memory_by_pipe_rank(task, candidate) if piped else [found.memory]
    return Predicted(found.seconds, [each.total for each in memory])


# --- measuring


def calibrate(state: RankModels, world: int, seconds: float) -> str:
    """Measure the machine on all ranks and return its file."""
    found = Calibration(
        state.grid(ff.Shape(data=world)), world, seconds, settle=lambda: None, progress=lambda _: None
    ).measure("parts-of-a-gpu")
    gc.collect()  # the pool has turned it off, and the models of the calibration would keep their memory
    if state.device.type == "cuda":
        torch.cuda.empty_cache()
    return to_toml(found)


class PlannedGroup(GroupBenchmark):
    """The lines, after the machine has been measured, with the peak of every rank."""

    def __init__(
        self,
        name: str,
        pool: RankPool,
        work: Workload,
        lines: Sequence[Line],
        results: Results,
        clock: Clock,
        machine_file: Path,
    ) -> None:
        super().__init__(name, pool, work, lines, results, clock, steps=STEPS.get(work.name.partition(",")[0], 1))
        self.machine_file = machine_file

    def open(self, lines: Sequence[Line]) -> None:
        if not self.machine_file.exists():
            seconds = CALIBRATE_SECONDS if self.pool.device == "cuda" else 5.0
            self.machine_file.write_text(self.pool.run(calibrate, self.pool.world, seconds, timeout=TIMEOUT)[0])
        super().open(lines)

    def note_peaks(self, record: LineRecord, peaks: Sequence[int]) -> None:
        record.figures[PEAKS] = [float(peak) for peak in peaks]


# --- the page


def page(results: Results, groups: Sequence[PlannedLines], machine_file: Path) -> str:
    rows, errors, memory_errors, seconds = [], [], [], []
    for work, line, record in (
        (work, line, record)
        for name, work, lines in groups
        for line in lines
        if (record := results.records.get((name, line.name))) is not None and record.measured
    ):
        predicted = predict(line, work, machine_file)
        error = predicted.seconds / record.step - 1
        off = memory_error(line, record, predicted)
        rows.append([work.name, line.name.removeprefix("fourfold "), f"{record.step * 1e3:.1f}"])
        rows[-1] += [f"{predicted.seconds * 1e3:.1f}", f"{error:+.1%}", "-" if off is None else f"{off:+.1%}"]
        errors.append(abs(error))
        memory_errors += [] if off is None else [abs(off)]
        seconds.append((predicted.seconds, record.step))
    table = markdown_table(["model", "grid", "measured ms", "predicted ms", "error", "memory error"], rows)
    told = [f"- {bar}" for bar in bars(errors, memory_errors, seconds)]
    title = "# The planner against measured steps on one GPU"
    return "\n\n".join([title, EXPLAINED, commands_of(results), "\n".join(table), "\n".join(told)]) + "\n"


def memory_error(line: Line, record: LineRecord, predicted: Predicted) -> float | None:
    """Return the largest error of a rank's memory, with its sign; None if it was not measured."""
    peaks = record.figures.get(PEAKS, [])
    errors = [predicted.memory[line.shape.coords(rank)["pipe"]] / peak - 1 for rank, peak in enumerate(peaks)]
    return max(errors, key=abs, default=None)


def bars(
    errors: Sequence[float], memory_errors: Sequence[float], seconds: Sequence[tuple[float, float]]
) -> Iterator[str]:
    """Yield each bar and whether it was reached."""
    if len(errors) < 2:
        yield "nothing to judge yet"
        return
    order = correlation(ranks([predicted for predicted, _ in seconds]), ranks([measured for _, measured in seconds]))
    chosen = min(seconds)[1] / min(measured for _, measured in seconds) - 1
    mean, worst = fmean(errors), max(errors)
    yield f"mean error at most {MEAN:.0%}: {verdict(mean <= MEAN)}, {mean:.1%} over {len(errors)} lines"
    yield f"worst error at most {WORST:.0%}: {verdict(worst <= WORST)}, {worst:.1%}"
    yield f"Spearman at least {SPEARMAN}: {verdict(order >= SPEARMAN)}, {order:.3f}"
    yield (
        f"the line that the planner would choose is at most {REGRET:.0%} slower than the fastest: "
        f"{verdict(chosen <= REGRET)}, {chosen:.1%}"
    )
    if memory_errors:
        worst = max(memory_errors)
        yield f"memory of every rank within {MEMORY:.0%}: {verdict(worst <= MEMORY)}, {worst:.1%}"


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    gpu, ranks = options.device == "cuda", options.ranks
    whole = workload(gpu)
    if options.experts:
        every = [(mixture(gpu), list(lines_of_folds()))]
    else:
        every = list(alone(gpu)) if ranks == 1 else [(whole, list(lines_of(whole.config.layers)))]
    planned = [
        PlannedLines(f"{ranks}:{work.name}", work, [line for line in lines if options.lines.search(line.name)])
        for work, lines in every
    ]
    if options.list:
        list_groups({name: lines for name, _, lines in planned})
        return 0
    results, machine_file = Results.open(options.out, {"warmup": options.warmup}), options.out.with_suffix(".toml")

    def group(name: str, work: Workload, lines: Sequence[Line]) -> Group:
        def benchmark(pool: RankPool, results: Results, clock: Clock) -> GroupBenchmark:
            return PlannedGroup(name, pool, work, lines, results, clock, machine_file)

        return Group(name, ranks, work.about, lines, benchmark)

    if gpu:
        os.environ[PARTITION] = str(100 // ranks)  # the ranks inherit it
    measure_groups([group(*one) for one in planned], results, options)
    options.table.write_text(page(results, planned, machine_file))
    print(options.table.read_text())
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = shared_options(__doc__, "planner-on-gpu", rounds=3, warmup=GRAPH_WARMUP + 1)
    parser.add_argument("--ranks", type=int, choices=(1, RANKS), default=RANKS, help="ranks that share the GPU")
    parser.add_argument("--experts", action="store_true", help="train a mixture of experts, on folds of four ranks")
    options = parse_shared(parser, arguments, "planner/on_gpu.py")
    if options.experts and options.ranks == 1:
        parser.error("--experts --ranks 1: a fold needs several ranks")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Pipeline schedules of MLP blocks on four ranks, each with a quarter of one GPU, beside torch.distributed.pipelining.

    python benchmarks/speed/pipeline_gpu.py --budget 520                  # n = 8 and 16, and P7
    python benchmarks/speed/pipeline_gpu.py --groups 4:8 --lines 'found|1F1B$' --rounds 10
    python benchmarks/speed/pipeline_gpu.py --partition off               # the ranks share the whole GPU
    python benchmarks/speed/pipeline_gpu.py --device cpu                  # tiny, a smoke test

A group is RANKS:MICRO-BATCHES, or RANKS:split. MPS gives every rank 1/RANKS of the multiprocessors
(CUDA_MPS_ACTIVE_THREAD_PERCENTAGE), so that idle ranks are idle; --partition off leaves it out. A step is forward and
backward of all micro-batches. Before Fourfold's lines are built, each action of their stages is timed alone, without
messages and with all ranks at it, and a message is timed; `play` predicts the step from these, and schedules are found
with them. The line `unpipelined` is one rank's share of the computation in plain torch without any message.

The group RANKS:split asks what it costs to compute input and weight gradients apart (P7): a transformer without
pipeline, with recompute=block and compile=True, whose backward passes run as B and W or in one.

Lines take turns as in `gpu_ranks.py`, and the same call with the same --out resumes.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

import fourfold as ff
from benchmarks.shared.pairs import Pairs
from benchmarks.shared.rank_pool import PARTITION
from benchmarks.shared.tables import verdict
from benchmarks.speed.gpu_ranks import Group, list_groups, measure_groups, parse_shared, shared_options
from benchmarks.speed.gpu_ranks_lines import WORKLOADS
from benchmarks.speed.gpu_ranks_results import LineRecord, Results
from benchmarks.speed.gpu_ranks_table import best
from benchmarks.speed.pipeline_group import pipeline_group, split_group
from benchmarks.speed.pipeline_lines import ALONE, OURS, PipeLine, found, fourfold, torch_lines
from benchmarks.speed.pipeline_split import SPLIT, UNSPLIT, split_lines
from benchmarks.speed.pipeline_stages import StackSize
from benchmarks.speed.pipeline_table import figure, render, torchs_best, variant_of

GPU_SIZE = StackSize(layers=32, hidden=4096, tokens=2048, dtype=torch.bfloat16, mlp_hidden=16384)
CPU_SIZE = StackSize(layers=16, hidden=32, tokens=16, dtype=torch.float32, mlp_hidden=64)
GROUPS = "4:8,4:16,4:split"
SCHEDULES = ("1f1b", "interleaved 2", "zb-h1")
LIMITS = (1.0, 1.25, 1.5)
"""What found schedules may keep, in times of 1F1B's micro-batches."""
PREDICTED = 0.10
"""How far a step may be from what `play` says (P3)."""
BEST = {8: {1.25: 0.95, 1.5: 0.90}, 16: {1.25: 0.97, 1.5: 0.90}}
"""The most of the time of torch's best that the best found schedule may take, by micro-batches and memory (P3)."""
BUBBLES = {8: 0.15, 16: 0.09}
"""The largest bubble of Fourfold's best line, by micro-batches (P3)."""
SPLIT_COST = 1.02
"""The most that a step with B and W apart may take of the same step with both in one (P7)."""
EXPLAINED = (
    "`benchmarks/speed/pipeline_gpu.py`: forward and backward of all micro-batches; every rank has its part of one "
    "GPU. Times are those of the slowest rank, medians over rounds in which lines took turns; spread = min .. max. "
    "Predicted: `schedule.play` with actions timed one by one in the same run, and a message timed likewise. "
    "Unpipelined: one rank's share of the computation, without messages. Peak memory is what the tensors of a line "
    "need on the rank that needs most, including weights and gradients."
)


def lines_of(ranks: int, micro_batches: int) -> list[PipeLine]:
    """Return the lines of a group."""
    alone = PipeLine(ALONE, ff.Shape(pipe=ranks), micro_batches=micro_batches)
    ours = [fourfold(ranks, micro_batches, name) for name in SCHEDULES]
    searched = [found(ranks, micro_batches, limit, chunks) for chunks in (1, 2) for limit in LIMITS]
    return [alone, *torch_lines(ranks, micro_batches), *ours, *searched]


# --- bars


def bars(records: Sequence[LineRecord], group: dict[str, Any]) -> Iterator[str]:
    """Yield P3, or P7 for the group that splits backward passes."""
    measured = [record for record in records if record.measured]
    if group["group"].endswith(":split"):
        yield from _split(measured)
        return
    micro_batches = int(group["group"].partition(":")[2])
    ours = [record for record in measured if record.kind == OURS]
    for record in ours:
        if predicted := figure(record, "predicted"):
            ratio = record.step / predicted
            yield (
                f"{variant_of(record)}: a step within {PREDICTED:.0%} of `play`: "
                f"{verdict(abs(ratio - 1) <= PREDICTED)}, {ratio:.3f} of it"
            )
    torchs, alone = torchs_best(measured), best([record for record in measured if record.kind == ALONE])
    for limit, bar in BEST.get(micro_batches, {}).items():
        fastest = best([record for record in ours if _memory(record) <= limit])
        if fastest and torchs and (pairs := Pairs(fastest.ratios(torchs))):
            yield (
                f"Fourfold's best within {limit} of 1F1B's memory takes at most {bar} of torch's best "
                f"({variant_of(torchs)} {torchs.step * 1e3:.0f} ms): {verdict(pairs.median <= bar)}, {pairs} "
                f"({variant_of(fastest)} {fastest.step * 1e3:.0f} ms)"
            )
    fastest, bar = best(ours), BUBBLES.get(micro_batches)
    if fastest and alone and bar:
        bubble = 1 - alone.step / fastest.step
        yield (
            f"the bubble of Fourfold's best ({variant_of(fastest)}) beside unpipelined is at most {bar:.0%}: "
            f"{verdict(bubble <= bar)}, {bubble:.1%}"
        )
    yield from _peaks(ours)


def _memory(record: LineRecord) -> float:
    """Return how much a line's schedule keeps, in times of what rank 0 of 1F1B does."""
    kept = figure(record, "kept")
    return float("inf") if kept is None else kept / record.grid["pipe"]


def _peaks(ours: Sequence[LineRecord]) -> Iterator[str]:
    """Compare measured peaks of memory with 1F1B's."""
    plain = next((record for record in ours if variant_of(record) == "1f1b" and record.peak_bytes), None)
    for record in ours:
        if plain and plain.peak_bytes and record.peak_bytes and variant_of(record).startswith("found"):
            ratio, limit = record.peak_bytes / plain.peak_bytes, max(1.0, _memory(record))
            yield (
                f"{variant_of(record)}: peak memory at most {limit:.2f} of 1F1B's, as its schedule says: "
                f"{verdict(ratio <= limit)}, {ratio:.3f}"
            )


def _split(records: Sequence[LineRecord]) -> Iterator[str]:
    lines = {variant_of(record): record for record in records}
    for variant, record in lines.items():
        whole = lines.get(variant.replace(SPLIT, UNSPLIT))
        if variant.startswith(SPLIT) and whole and (pairs := Pairs(record.ratios(whole))):
            yield (
                f"{variant}: a step takes at most {SPLIT_COST} of the one with B and W in one: "
                f"{verdict(pairs.median <= SPLIT_COST)}, {pairs}"
            )


# --- the program


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    gpu = options.device == "cuda"
    groups: dict[str, list[PipeLine]] = {}
    for name in options.groups.split(","):
        ranks, _, what = name.partition(":")
        if not ranks.isdigit() or not (what.isdigit() or what == "split"):
            raise SystemExit(f"--groups {name}: a group is RANKS:MICRO-BATCHES or RANKS:split, such as 4:8")
        made = split_lines(int(ranks), compiled=gpu) if what == "split" else lines_of(int(ranks), int(what))
        groups[name] = [line for line in made if options.lines.search(line.name)]
    if options.list:
        list_groups(groups)
        return 0
    results = Results.open(options.out, {"warmup": options.warmup, "partition": options.partition})
    before = os.environ.get(PARTITION)
    if gpu and options.partition == "on":
        world = int(options.groups.partition(":")[0])
        os.environ[PARTITION] = str(100 // world)  # the ranks inherit it
    try:
        measure_groups([_group(name, lines, gpu) for name, lines in groups.items() if lines], results, options)
    finally:
        if before is None:
            os.environ.pop(PARTITION, None)
        else:
            os.environ[PARTITION] = before
    title = "Pipeline schedules on parts of one GPU" if gpu else "Pipeline schedules on the CPU: a smoke test"
    options.table.write_text(render(results.path, title, EXPLAINED, bars))
    print(f"wrote {options.out} and {options.table}")
    return 0


def _group(name: str, lines: Sequence[PipeLine], gpu: bool) -> Group:
    ranks = int(name.partition(":")[0])
    if name.endswith(":split"):
        return split_group(name, ranks, WORKLOADS["deep" if gpu else "tiny-gpt"], lines)
    size = GPU_SIZE if gpu else replace(CPU_SIZE, layers=4 * ranks)
    return pipeline_group(name, ranks, size, lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = shared_options(__doc__, "pipeline-gpu", rounds=5, warmup=2)
    parser.add_argument("--groups", default=GROUPS, help=f"RANKS:MICRO-BATCHES or RANKS:split, ...; default {GROUPS}")
    parser.add_argument("--partition", choices=["on", "off"], default="on", help="whether each rank has its own part")
    options = parse_shared(parser, arguments, "speed/pipeline_gpu.py")
    if len({name.partition(":")[0] for name in options.groups.split(",")}) > 1:
        parser.error(f"--groups {options.groups}: all groups of a call must have as many ranks, which share the GPU")
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Pipeline schedules on ranks that sleep instead of computing, so that eight ranks idle for real on two cores.

    python benchmarks/speed/pipeline_sleep.py                                     # all groups, about four minutes
    python benchmarks/speed/pipeline_sleep.py --groups 4:8 --lines found --rounds 10
    python benchmarks/speed/pipeline_sleep.py --seconds 0.1 --rounds 1            # for P2: Python's part is small
    python benchmarks/speed/pipeline_sleep.py --list                              # which lines there are

A group is RANKS:MICRO-BATCHES. Fourfold's lines run the real runtime: `PipelineStep`, its schedules, its messages over
gloo, the engine's queue of weight gradients; only F, B and W are sleeps. The peers are the schedules of
torch.distributed.pipelining, and DeepSpeed's 1F1B if it is installed, with modules that sleep as long. Lines take
turns as in `gpu_ranks.py`, and the same call with the same --out resumes.

A rank is idle when it does not sleep, so what Python does for an action counts as idle; on a GPU it would be hidden.
The column "CPU ms per action" shows it: CPU seconds of all threads of a rank, per F, B or W.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

from benchmarks.shared.pairs import Pairs
from benchmarks.shared.tables import verdict
from benchmarks.speed.gpu_ranks import list_groups, measure_groups, parse_shared, shared_options
from benchmarks.speed.gpu_ranks_results import LineRecord, Results
from benchmarks.speed.pipeline_group import pipeline_group
from benchmarks.speed.pipeline_lines import (
    COMMON,
    DEEPSPEED,
    OURS,
    TORCH,
    PipeLine,
    deepspeed_lines,
    found,
    fourfold,
    torch_lines,
)
from benchmarks.speed.pipeline_stages import StackSize
from benchmarks.speed.pipeline_table import figure, render, variant_of

GROUPS = "4:8,4:16,8:8,8:16"
SECONDS = 0.03
"""F, B and W of a rank: long beside what Python does for an action, short enough for a run of minutes."""
SCHEDULES = ("gpipe", "1f1b", "interleaved 2", "interleaved 4", "looped-bfs 2", "zb-h1")
JUDGED = ("1f1b", "interleaved 2", "interleaved 4", "zb-h1", "found")
"""The variants whose idle share P2 asks for, by their first words."""
POINTS = 0.02
"""How far the idle share may be from what `play` says (P2)."""
EXPLAINED = (
    "`benchmarks/speed/pipeline_sleep.py`: the real runtimes with F, B and W replaced by sleeps. Times are those of "
    "the slowest rank, medians over rounds in which lines took turns; spread = min .. max. Idle: the share of all "
    "ranks' time in which they do not sleep. Predicted: `schedule.play` with the mean sleeps of the same step and the "
    "measured message; with the host's time: with the medians of whole actions, without their waits for messages, "
    "instead. Ratios to torch's best are medians over rounds."
)


def lines_of(ranks: int, micro_batches: int) -> list[PipeLine]:
    """Return the lines of a group: torch's schedules and Fourfold's."""
    ours = [fourfold(ranks, micro_batches, name) for name in SCHEDULES]
    peers = [*torch_lines(ranks, micro_batches), *deepspeed_lines(ranks, micro_batches)]
    return [*peers, *ours, found(ranks, micro_batches)]


def size_of(ranks: int, seconds: float) -> StackSize:
    """Return stages that sleep; 4 layers a rank can be cut into as many chunks. A message has 16 KiB."""
    return StackSize(4 * ranks, 64, 64, torch.float32, sleep_seconds=seconds)


def bars(records: Sequence[LineRecord], _: dict[str, Any]) -> Iterator[str]:
    """Yield P2: idle as predicted, and no step longer than torch's with the same schedule."""
    by_variant = {(record.kind, variant_of(record)): record for record in records if record.measured}
    for (kind, variant), record in by_variant.items():
        idle, predicted = figure(record, "idle"), figure(record, "predicted idle")
        on_host = figure(record, "predicted idle with host")
        if kind == OURS and variant.startswith(JUDGED) and idle is not None and predicted is not None:
            apart = idle - predicted
            yield (
                f"{variant}: idle within {POINTS * 100:.0f} points of `play`: {verdict(abs(apart) <= POINTS)}, "
                f"{idle:.1%} measured, {predicted:.1%} predicted"
                + (f", {on_host:.1%} with what Python takes for each action" if on_host is not None else "")
            )
    for ours, theirs in COMMON.items():
        own, peer = by_variant.get((OURS, ours)), by_variant.get((TORCH, theirs))
        if own and peer and (pairs := Pairs(own.ratios(peer))):
            yield f"{ours} is not slower than torch's {theirs}: {verdict(pairs.not_above_one)}, {pairs}"
    own, peer = by_variant.get((OURS, "1f1b")), by_variant.get((DEEPSPEED, "1F1B"))
    if own and peer and (pairs := Pairs(own.ratios(peer))):
        yield f"1f1b is not slower than DeepSpeed's 1F1B: {verdict(pairs.not_above_one)}, {pairs}"
    ours_best, torchs = (
        min((r for (kind, _), r in by_variant.items() if kind == side), key=lambda r: r.step, default=None)
        for side in (OURS, TORCH)
    )
    if ours_best and torchs and (pairs := Pairs(ours_best.ratios(torchs))):
        names = f"{variant_of(ours_best)} beside {variant_of(torchs)}"
        yield f"the best schedule is not slower than torch's best: {verdict(pairs.not_above_one)}, {pairs} ({names})"


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    groups = {}
    for name in options.groups.split(","):
        ranks, _, micro_batches = name.partition(":")
        if not ranks.isdigit() or not micro_batches.isdigit():
            raise SystemExit(f"--groups {name}: a group is RANKS:MICRO-BATCHES, such as 4:8")
        groups[name] = [line for line in lines_of(int(ranks), int(micro_batches)) if options.lines.search(line.name)]
    if options.list:
        list_groups(groups)
        return 0
    results = Results.open(options.out, {"warmup": options.warmup, "seconds": options.seconds})
    made = [
        pipeline_group(name, lines[0].ranks, size_of(lines[0].ranks, options.seconds), lines)
        for name, lines in groups.items()
        if lines
    ]
    measure_groups(made, results, options)
    options.table.write_text(render(results.path, "Pipeline schedules on ranks that sleep", EXPLAINED, bars))
    print(f"wrote {options.out} and {options.table}")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = shared_options(__doc__, "pipeline-sleep", rounds=2, warmup=1)
    parser.add_argument("--groups", default=GROUPS, help=f"RANKS:MICRO-BATCHES,...; default {GROUPS}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="F, B and W of a rank and micro-batch")
    parser.set_defaults(device="cpu")
    return parse_shared(parser, arguments, "speed/pipeline_sleep.py")


if __name__ == "__main__":
    sys.exit(main())

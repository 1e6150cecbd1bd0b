"""What watching costs when nothing fails: steps with the guard and without, in one run, block by block in turns.

    python benchmarks/watch_cost.py                        # 4 ranks on the CPU
    python benchmarks/watch_cost.py --device cuda          # 4 NCCL ranks that share one GPU

With the guard every collective goes to the tape, the clock and the ear run, and what each step took is told through the
store after every second one. Comparing replicas is timed by itself and counted as often as a run does it by default.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch

import fourfold as ff
from bed import Bed, multi_process_service
from fourfold.train.guard import Guard, NoGuard
from fourfold.train.launch import share_cores
from fourfold.train.meter import Meter
from fourfold.train.sections import WatchSection
from fourfold.watch.replicas import check_replicas
from fourfold.watch.stragglers import StepWindows
from fourfold.watch.tape import Waits

EVERY = WatchSection().replicas_every
BAR = 0.01
"""Of a step, that watching may cost."""
GRID = ff.Shape(x=2, data=2)
WARMUP, STEPS = 3, 2
"""Steps before anything is timed, and those of a block: few, so that what else the machine does hits both alike."""
SIZES: dict[str, dict[str, Any]] = {
    "cpu": dict(layers=4, hidden=256, heads=8, kv_heads=8, head_dim=32, mlp_hidden=704, vocab=1024, seq=128),
    "cuda": dict(layers=8, hidden=2048, heads=16, kv_heads=16, head_dim=128, mlp_hidden=5632, vocab=8192, seq=1024),
}
ROWS = 8


class Side:
    """A model in training on this rank."""

    def __init__(self, _rank: int, _world: int, device: str) -> None:
        self.grid = ff.Grid(GRID.x, GRID.y, GRID.z, GRID.data, device=device)
        if device == "cpu":
            share_cores()
        policy = ff.Policy(compute=torch.bfloat16 if device == "cuda" else None, shard_optimizer=True)
        self.model = ff.models.build(ff.models.config("llama-3-8b", **SIZES[device]), self.grid, policy=policy)
        self.optimizer = ff.optim.AdamW(self.model, 1e-3)
        torch.manual_seed(0)
        batch = torch.randint(self.model.config.vocab, (ROWS, self.model.config.seq + 1))
        parts = (batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        self.tokens, self.targets = (ff.local_rows(part, self.grid).to(self.grid.device) for part in parts)
        self.meter = Meter(self.grid)
        self.done = 0
        self.block("", WARMUP)

    def block(self, folder: str, steps: int) -> float:
        """Seconds of a step on average; with the guard where there is a folder for it."""
        StepWindows.MIN_STEPS = steps  # so that it is told
        guard = Guard(self.grid, Path(folder), 60.0) if folder else NoGuard()
        self.meter.begin()
        began = time.perf_counter()
        for _ in range(steps):
            self.done += 1
            guard.begin_step(self.done)
            self.step(guard)
        guard.stragglers()
        seconds = (time.perf_counter() - began) / steps
        guard.close(done=True)
        return seconds

    def step(self, guard: NoGuard) -> None:
        guard.doing("computing")
        loss = self.model(self.tokens, self.targets)
        loss.backward()
        self.optimizer.clip_and_step(1.0)
        self.optimizer.zero_grad()
        reading = self.meter.end()
        guard.doing("reading results", Waits.RANKS)
        loss.item()
        found = reading()
        guard.took(found.seconds, found.exposed_seconds)


def block(side: Side, folder: str) -> float:
    return side.block(folder, STEPS)


def compare(side: Side) -> float:
    """Seconds of comparing replicas, the second time."""
    check_replicas(side.model, side.grid)
    began = time.perf_counter()
    check_replicas(side.model, side.grid)
    return time.perf_counter() - began


def bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """Between which the median of all such pairs lies, with 95% certainty: of n sorted ones those at n/2 +- sqrt(n)."""
    off = ceil(len(ratios) ** 0.5)
    middle = len(ratios) // 2
    return ratios[max(0, middle - off)], ratios[min(len(ratios) - 1, middle + off)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--blocks", type=int, default=60, help="of each kind")
    options = parser.parse_args()
    with multi_process_service(options.device), tempfile.TemporaryDirectory() as folder:
        bed = Bed(GRID.world, options.device, Side)
        try:
            off, on = [], []
            for number in range(options.blocks):
                pair = [(off, ""), (on, folder)]
                for kept, where in pair if number % 2 == 0 else reversed(pair):
                    kept.append(max(bed.run(block, where)))
            compared = max(bed.run(compare))
        finally:
            bed.close()
    alone, watched = median(off), median(on)
    ratios = sorted(one / other - 1 for one, other in zip(on, off, strict=True))
    replicas = compared / EVERY / alone
    cost = median(ratios) + replicas
    print(f"{GRID} on {options.device}, torch {torch.__version__}, {options.blocks} blocks of {STEPS} steps each")
    print(f"without {alone * 1e3:.1f} ms a step, with {watched * 1e3:.1f} ms")
    print(f"replicas compared in {compared * 1e3:.1f} ms, every {EVERY} steps: {replicas:+.3%} of a step")
    low, high = bounds(ratios)
    print(f"pairs of blocks: {median(ratios):+.2%}; with 95% certainty between {low:+.2%} and {high:+.2%}")
    print(f"watching costs under {BAR:.0%} of a step: {'reached' if cost < BAR else '**MISSED**'}")
    return 0 if cost < BAR else 1


if __name__ == "__main__":
    sys.exit(main())

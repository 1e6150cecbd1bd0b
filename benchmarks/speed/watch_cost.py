"""What watching costs when nothing fails: steps with the guard and without it, in alternating blocks of one run.

    python benchmarks/speed/watch_cost.py                        # 4 ranks on the CPU
    python benchmarks/speed/watch_cost.py --device cuda          # 4 NCCL ranks that share one GPU

With the guard, every collective is recorded on the tape, the threads of the guard run, and the ranks exchange their
step times through the store after every second step. The comparison of replicas is timed separately and weighted by how
often a run makes it by default.
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

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

import fourfold as ff
from benchmarks.shared.rank_pool import RankPool, multi_process_service
from fourfold.train.config import WatchSection
from fourfold.train.guard import Guard, NoGuard
from fourfold.train.launch import share_cores
from fourfold.train.metrics import Meter
from fourfold.watch.peers import StepWindows, check_replicas
from fourfold.watch.tape import Waits

EVERY = WatchSection().replicas_every
BAR = 0.01
"""The share of a step that watching may cost."""
GRID = ff.Shape(x=2, data=2)
WARMUP = 3
"""Steps before anything is timed."""
STEPS = 2
"""Steps per block: few, so that other load on the machine affects blocks with and without the guard alike."""
MODEL_SIZES: dict[str, dict[str, Any]] = {
    "cpu": dict(layers=4, hidden=256, heads=8, kv_heads=8, head_dim=32, mlp_hidden=704, vocab=1024, seq=128),
    "cuda": dict(layers=8, hidden=2048, heads=16, kv_heads=16, head_dim=128, mlp_hidden=5632, vocab=8192, seq=1024),
}
ROWS = 8


class WatchedTraining:
    """A model and its optimizer on this rank, trained with or without the guard."""

    def __init__(self, _rank: int, _world: int, device: str) -> None:
        self.grid = ff.Grid(GRID.x, GRID.y, GRID.z, GRID.data, device=device)
        if device == "cpu":
            share_cores()
        policy = ff.Policy(compute_dtype=torch.bfloat16 if device == "cuda" else None, shard_optimizer=True)
        self.model = ff.models.build(ff.models.config("llama-3-8b", **MODEL_SIZES[device]), self.grid, policy=policy)
        self.optimizer = ff.optim.AdamW(self.model, 1e-3)
        torch.manual_seed(0)
        batch = torch.randint(self.model.config.vocab, (ROWS, self.model.config.seq + 1))
        parts = (batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        self.tokens, self.targets = (ff.local_rows(part, self.grid).to(self.grid.device) for part in parts)
        self.meter = Meter(self.grid)
        self.done = 0
        self.block("", WARMUP)

    def block(self, folder: str, steps: int) -> float:
        """Return the mean seconds per step; the guard runs if it is given a folder."""
        StepWindows.MIN_STEPS = steps  # so that the ranks exchange their step times within the block
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
        guard.doing("reading results", Waits.DEVICE)
        loss.item()
        found = reading()
        guard.took(found.seconds, found.exposed_seconds)


def run_block(training: WatchedTraining, folder: str) -> float:
    return training.block(folder, STEPS)


def compare_replicas(training: WatchedTraining) -> float:
    """Return the seconds that the second comparison of replicas takes; the first one warms up."""
    check_replicas(training.model, training.grid)
    began = time.perf_counter()
    check_replicas(training.model, training.grid)
    return time.perf_counter() - began


def bounds(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the 95% confidence interval of the median: of n sorted ratios, those at n/2 +- sqrt(n)."""
    off = ceil(len(ratios) ** 0.5)
    middle = len(ratios) // 2
    return ratios[max(0, middle - off)], ratios[min(len(ratios) - 1, middle + off)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--blocks", type=int, default=60, help="blocks of each kind")
    options = parser.parse_args()
    with multi_process_service(options.device), tempfile.TemporaryDirectory() as folder:
        pool = RankPool(GRID.world, options.device, WatchedTraining)
        try:
            off, on = [], []
            for number in range(options.blocks):
                pair = [(off, ""), (on, folder)]
                for kept, where in pair if number % 2 == 0 else reversed(pair):
                    kept.append(max(pool.run(run_block, where)))
            compared = max(pool.run(compare_replicas))
        finally:
            pool.close()
    alone, watched = median(off), median(on)
    ratios = sorted(one / other - 1 for one, other in zip(on, off, strict=True))
    replicas = compared / EVERY / alone
    cost = median(ratios) + replicas
    print(f"{GRID} on {options.device}, torch {torch.__version__}, {options.blocks} blocks of {STEPS} steps each")
    print(f"without the guard {alone * 1e3:.1f} ms per step, with it {watched * 1e3:.1f} ms")
    print(f"replicas compared in {compared * 1e3:.1f} ms, every {EVERY} steps: {replicas:+.3%} of a step")
    low, high = bounds(ratios)
    print(f"pairs of blocks: {median(ratios):+.2%}; with 95% certainty between {low:+.2%} and {high:+.2%}")
    print(f"watching costs under {BAR:.0%} of a step: {'reached' if cost < BAR else '**MISSED**'}")
    return 0 if cost < BAR else 1


if __name__ == "__main__":
    sys.exit(main())

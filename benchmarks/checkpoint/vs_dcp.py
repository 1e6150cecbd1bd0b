"""Fourfold's checkpoints beside torch.distributed.checkpoint (DCP): saving, loading, and what a save costs training.

    python benchmarks/checkpoint/vs_dcp.py                        # 2 ranks z=2 and 4 ranks x=2 z=2, CPU or one GPU
    python benchmarks/checkpoint/vs_dcp.py --size tiny --rounds 1 # a smoke test

Both sides save and load the same tensors: a model with AdamW's state. In every round each side takes each turn once, in
a changing order, and the slowest rank counts:

- save: until the checkpoint is complete and on the disk (both sides fsync their files);
- load: over zeros, on the grid that saved and on another grid, with the files in the page cache (warm) or not (cold);
- stall: a save begins, then K steps of training follow. `call` is how long the save blocks the training thread, and
  `whole` is how much longer the K steps take than K steps without a save.

Checkpoints are written to --folder and removed, also when the run is interrupted. Writes results/DATE-checkpoint.md and
.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

import fourfold as ff
from benchmarks.checkpoint import disk as disk
from benchmarks.checkpoint import save_and_load as jobs
from benchmarks.checkpoint.dcp_table import CALL, WHOLE, GridResults, bars, page
from benchmarks.checkpoint.save_and_load import OURS, PEER
from benchmarks.shared.rank_pool import RankPool, has_gpu, multi_process_service
from benchmarks.shared.tables import RESULTS
from benchmarks.shared.workloads import Workload

TIMEOUT = 600.0
COPIES = 4
"""The number of checkpoints that the disk must have room for."""


def _workload(name: str, layers: int, hidden: int, vocab: int, seq: int) -> Workload:
    heads = max(4, hidden // 64)
    config = ff.models.config(
        "gpt-tiny", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        mlp_hidden=4 * hidden, vocab=vocab, seq=seq,
    )  # fmt: skip
    return Workload(name, config, 4, torch.float32)


WORKLOADS = {
    workload.name: workload
    for workload in (
        _workload("tiny", 1, 32, 64, 8),
        _workload("small", 6, 512, 32768, 16),  # 36 M parameters, 0.4 GB of state
        _workload("medium", 13, 1024, 32768, 16),  # 197 M parameters, 2.4 GB of state
        _workload("large", 24, 2048, 32768, 1024),  # 1.3 B parameters, 15 GB of state
    )
}
GRIDS = {"z=2": (ff.Shape(z=2), ff.Shape(x=2)), "x=2,z=2": (ff.Shape(x=2, z=2), ff.Shape(z=4))}
"""The grid that saves, and the other grid that loads."""


@dataclass
class GridBenchmark:
    """The benchmark on the ranks of one grid."""

    found: GridResults
    pool: RankPool
    workload: Workload
    folder: Path
    loads: bool

    @property
    def shapes(self) -> tuple[ff.Shape, ff.Shape]:
        return GRIDS[self.found.grid]

    def measure(self, rounds: int) -> None:
        prepared = self.pool.run(jobs.prepare, *self.shapes, self.workload, timeout=TIMEOUT)
        self.found.nbytes, self.found.machine = prepared[0]
        print(f"{self.found.grid}: {self.found.nbytes / 1e9:.2f} GB of state", flush=True)
        self.save_and_load(counted=False)
        for turn in range(rounds):
            self.save_and_load(counted=True, turn=turn)
            self.say("save and load", turn, rounds)
        self.pool.run(jobs.forget, self.shapes[1], timeout=TIMEOUT)
        self.choose_steps()
        for turn in range(rounds):
            self.stalls(turn)
            self.say("stall", turn, rounds)

    def say(self, what: str, turn: int, rounds: int) -> None:
        last = {f"{measure} {side}": record.seconds[-1] for (measure, side), record in self.found.records.items()}
        shown = ", ".join(f"{key} {seconds:.3f}" for key, seconds in last.items() if key.startswith(what[:4]))
        print(f"{self.found.grid}: {what}, round {turn + 1} of {rounds}: {shown}", flush=True)

    def save_and_load(self, *, counted: bool, turn: int = 0) -> None:
        """Let both sides save, then load on both grids. The uncounted call compares loaded with saved values."""
        saved = {}
        for side in _rotated([OURS, PEER], turn):
            found = self.pool.run(jobs.save, side, self.shapes[0], self.folder / side, timeout=TIMEOUT)
            saved[side] = found[0][1]
            if counted:
                self.found.add("save", side, max(seconds for seconds, _ in found))
        self.found.file_bytes = {side: disk.nbytes_of(folder) for side, folder in saved.items()}
        if self.loads:
            for where, shape in zip(("same grid", "other grid"), self.shapes, strict=True):
                self.load(where, shape, saved, counted, turn)
        for folder in saved.values():
            disk.remove(folder)

    def load(self, where: str, shape: ff.Shape, saved: dict[str, Path], counted: bool, turn: int) -> None:
        sums = [self.pool.run(jobs.sums, shape, timeout=TIMEOUT)] if where == "same grid" and not counted else []
        for cache in ("warm", "cold"):
            for side in _rotated([OURS, PEER], turn):
                if cache == "warm":
                    disk.cache(saved[side])
                else:
                    self.found.cold = self.found.cold and disk.evict(saved[side])
                    if not self.found.cold:
                        continue
                seconds = max(self.pool.run(jobs.load, side, shape, saved[side], timeout=TIMEOUT))
                if counted:
                    self.found.add(f"load, {cache}, {where}", side, seconds)
                else:
                    sums.append(self.pool.run(jobs.sums, shape, timeout=TIMEOUT))
        if any(found != sums[0] for found in sums):
            raise RuntimeError(f"{self.found.grid}, {where}: loaded values differ from saved ones or from each other")

    def choose_steps(self) -> None:
        """Choose K so that every save ends within K steps, judging by the times so far; this also warms up all jobs."""
        for side in self.async_sides:
            self.train(side, 2)
        self.found.step_seconds = self.train(None, 3).seconds / 3
        longest = max(record.median for (measure, _), record in self.found.records.items() if measure == "save")
        self.found.steps = min(60, 2 + ceil(1.5 * longest / self.found.step_seconds))
        print(
            f"{self.found.grid}: {self.found.steps} steps of {self.found.step_seconds:.2f} s during a save", flush=True
        )

    @property
    def async_sides(self) -> list[str]:
        """Return our asynchronous saver and all of DCP's stagers."""
        return [OURS, *jobs.stagers(self.pool.device)]

    def stalls(self, turn: int) -> None:
        found = {side: self.train(side, self.found.steps) for side in _rotated([None, *self.async_sides], turn)}
        self.found.alone.append(found[None].seconds)
        for side in self.async_sides:
            self.found.add(CALL, side, found[side].blocked)
            self.found.add(WHOLE, side, found[side].seconds - found[None].seconds)
            self.found.behind[side] = max(found[side].after, self.found.behind.get(side, 0.0))
        self.found.step_seconds = median(self.found.alone) / self.found.steps

    def train(self, side: str | None, steps: int) -> jobs.Steps:
        root = self.folder / f"during {side}"
        found = self.pool.run(jobs.train, side, self.shapes[0], root, steps, timeout=TIMEOUT)
        for folder in root.iterdir() if root.exists() else ():
            disk.remove(folder)
        return jobs.Steps(*(max(getattr(rank, name) for rank in found) for name in ("seconds", "blocked", "after")))


def _rotated(items: Sequence[Any], turn: int) -> list[Any]:
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    workload = WORKLOADS[options.size]
    run = {
        "command": "python benchmarks/checkpoint/vs_dcp.py " + " ".join(options.given),
        "date": str(date.today()),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "file_system": disk.file_system(options.folder),
        "torch": torch.__version__,
        "parameters": workload.config.parameters,
        "rounds": options.rounds,
        "loads": find_spec("safetensors") is not None,
    }
    if not run["loads"]:
        print("safetensors is not installed (pip install 'fourfold[train]'): loading is not measured", flush=True)
    groups = []
    needed = COPIES * 12 * workload.config.parameters  # a parameter and two moments of 4 bytes each
    with multi_process_service(options.device), disk.scratch(options.folder, needed) as folder:
        for grid in options.grids:
            pool = RankPool(GRIDS[grid][0].world, options.device, jobs.CheckpointRank)
            found = GridResults(grid, pool.world)
            try:
                GridBenchmark(found, pool, workload, folder / grid, run["loads"]).measure(options.rounds)
            finally:
                pool.close()
            groups.append(found)
            write(options.out, run, groups)
    print("\n".join(f"{found.grid}: {bar}" for found in groups for bar in bars(found)))
    print(f"wrote {options.out}.md and .jsonl")
    return 0


def write(out: Path, run: dict[str, Any], groups: Sequence[GridResults]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [run, *(found.facts() for found in groups)]
    lines += [asdict(record) for found in groups for record in found.records.values()]
    Path(f"{out}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path(f"{out}.md").write_text(page(run, groups))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = has_gpu()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--size", choices=WORKLOADS, help="default: medium, or large on a GPU")
    parser.add_argument("--grids", default=";".join(GRIDS), help="some of z=2;x=2,z=2 (default: both)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where to write checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-checkpoint", help="without a suffix")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    options.grids = options.grids.split(";")
    if strange := [grid for grid in options.grids if grid not in GRIDS]:
        parser.error(f"--grids {strange[0]!r} is not one of {'; '.join(GRIDS)}")
    options.size = options.size or ("large" if options.device == "cuda" else "medium")
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())

"""Fourfold's checkpoints beside torch.distributed.checkpoint (DCP): saving, loading, and what a save costs training.

    python benchmarks/checkpoint.py                        # 2 ranks z=2 and 4 ranks x=2 z=2, on the CPU or one GPU
    python benchmarks/checkpoint.py --size tiny --rounds 1 # a smoke test

A model with AdamW's state, the same tensors on both sides. In every round each side takes each turn once, in an order
that changes, and the slowest rank counts:

- save: until the checkpoint is complete and on the disk (both sides fsync their files);
- load: over zeros, on the grid that saved and on another, with the files in the page cache (warm) or not (cold);
- stall: a save begins, then K steps of training. `call` is for how long the training thread waits for the save, `whole`
  by how much the K steps take longer than K steps without a save.

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

import torch

import checkpoint_disk as disk
import checkpoint_sides as sides
import fourfold as ff
from bed import Bed, multi_process_service
from checkpoint_sides import OURS, PEER
from checkpoint_table import CALL, WHOLE, Found, bars, table
from memory_on_gpu import Size

RESULTS = Path(__file__).parent / "results"
TIMEOUT = 600.0
COPIES = 4
"""Checkpoints for which the disk must have room."""


def _size(layers: int, hidden: int, vocab: int, seq: int, rows: int) -> Size:
    heads = max(4, hidden // 64)
    config = ff.models.config(
        "gpt-tiny", layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        mlp_hidden=4 * hidden, vocab=vocab, seq=seq,
    )  # fmt: skip
    return Size(config, seq, rows, seq)


SIZES = {
    "tiny": _size(1, 32, 64, 8, 4),
    "small": _size(6, 512, 32768, 16, 4),  # 36 M parameters, 0.4 GB of state
    "medium": _size(13, 1024, 32768, 16, 4),  # 197 M parameters, 2.4 GB of state
    "large": _size(24, 2048, 32768, 1024, 4),  # 1.3 B parameters, 15 GB of state
}
GRIDS = {"z=2": (ff.Shape(z=2), ff.Shape(x=2)), "x=2,z=2": (ff.Shape(x=2, z=2), ff.Shape(z=4))}
"""The grid that saves, and the other that loads."""


@dataclass
class Group:
    """The ranks of one grid, which take the turns."""

    found: Found
    bed: Bed
    size: Size
    folder: Path
    loads: bool

    @property
    def shapes(self) -> tuple[ff.Shape, ff.Shape]:
        return GRIDS[self.found.grid]

    def measure(self, rounds: int) -> None:
        prepared = self.bed.run(sides.prepare, *self.shapes, self.size, timeout=TIMEOUT)
        self.found.nbytes, self.found.machine = prepared[0]
        print(f"{self.found.grid}: {self.found.nbytes / 1e9:.2f} GB of state", flush=True)
        self.save_and_load(counted=False)
        for turn in range(rounds):
            self.save_and_load(counted=True, turn=turn)
            self.say("save and load", turn, rounds)
        self.bed.run(sides.forget, self.shapes[1], timeout=TIMEOUT)
        self.choose_steps()
        for turn in range(rounds):
            self.stalls(turn)
            self.say("stall", turn, rounds)

    def say(self, what: str, turn: int, rounds: int) -> None:
        last = {f"{measure} {side}": record.seconds[-1] for (measure, side), record in self.found.records.items()}
        shown = ", ".join(f"{key} {seconds:.3f}" for key, seconds in last.items() if key.startswith(what[:4]))
        print(f"{self.found.grid}: {what}, round {turn + 1} of {rounds}: {shown}", flush=True)

    def save_and_load(self, *, counted: bool, turn: int = 0) -> None:
        """Both sides save, then both load, everywhere; uncounted, what was loaded is compared with what was saved."""
        saved = {}
        for side in _turned([OURS, PEER], turn):
            found = self.bed.run(sides.save, side, self.shapes[0], self.folder / side, timeout=TIMEOUT)
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
        held = [self.bed.run(sides.sums, shape, timeout=TIMEOUT)] if where == "same grid" and not counted else []
        for cache in ("warm", "cold"):
            for side in _turned([OURS, PEER], turn):
                if cache == "warm":
                    disk.warm(saved[side])
                else:
                    self.found.cold = self.found.cold and disk.evict(saved[side])
                    if not self.found.cold:
                        continue
                seconds = max(self.bed.run(sides.load, side, shape, saved[side], timeout=TIMEOUT))
                if counted:
                    self.found.add(f"load, {cache}, {where}", side, seconds)
                else:
                    held.append(self.bed.run(sides.sums, shape, timeout=TIMEOUT))
        if any(sums != held[0] for sums in held):
            raise RuntimeError(f"{self.found.grid}, {where}: loads differ from what was saved or from each other")

    def choose_steps(self) -> None:
        """K: so many steps that every save ends beside them, by what saves and steps took; all sides warm."""
        for side in self.askers:
            self.train(side, 2)
        self.found.step_seconds = self.train(None, 3).seconds / 3
        longest = max(record.median for (measure, _), record in self.found.records.items() if measure == "save")
        self.found.steps = min(60, 2 + ceil(1.5 * longest / self.found.step_seconds))
        print(
            f"{self.found.grid}: {self.found.steps} steps of {self.found.step_seconds:.2f} s beside a save", flush=True
        )

    @property
    def askers(self) -> list[str]:
        return [OURS, *sides.stagers(self.bed.device)]

    def stalls(self, turn: int) -> None:
        found = {side: self.train(side, self.found.steps) for side in _turned([None, *self.askers], turn)}
        self.found.alone.append(found[None].seconds)
        for side in self.askers:
            self.found.add(CALL, side, found[side].held)
            self.found.add(WHOLE, side, found[side].seconds - found[None].seconds)
            self.found.behind[side] = max(found[side].behind, self.found.behind.get(side, 0.0))
        self.found.step_seconds = median(self.found.alone) / self.found.steps

    def train(self, side: str | None, steps: int) -> sides.Steps:
        root = self.folder / f"beside {side}"
        found = self.bed.run(sides.train, side, self.shapes[0], root, steps, timeout=TIMEOUT)
        for folder in root.iterdir() if root.exists() else ():
            disk.remove(folder)
        return sides.Steps(*(max(getattr(rank, name) for rank in found) for name in ("seconds", "held", "behind")))


def _turned(items: Sequence[Any], turn: int) -> list[Any]:
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    size = SIZES[options.size]
    run = {
        "command": "python benchmarks/checkpoint.py " + " ".join(options.given),
        "date": str(date.today()),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "file_system": disk.file_system(options.folder),
        "torch": torch.__version__,
        "parameters": size.config.parameters,
        "rounds": options.rounds,
        "loads": find_spec("safetensors") is not None,
    }
    if not run["loads"]:
        print("safetensors is not installed (pip install 'fourfold[train]'): loading is not measured", flush=True)
    groups = []
    needed = COPIES * 12 * size.config.parameters  # a parameter and two moments, 4 bytes each
    with multi_process_service(options.device), disk.scratch(options.folder, needed) as folder:
        for grid in options.grids:
            bed = Bed(GRIDS[grid][0].world, options.device, sides.Seat)
            found = Found(grid, bed.world)
            try:
                Group(found, bed, size, folder / grid, run["loads"]).measure(options.rounds)
            finally:
                bed.close()
            groups.append(found)
            write(options.out, run, groups)
    print("\n".join(f"{found.grid}: {bar}" for found in groups for bar in bars(found)))
    print(f"wrote {options.out}.md and .jsonl")
    return 0


def write(out: Path, run: dict[str, Any], groups: Sequence[Found]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [run, *(found.facts() for found in groups)]
    lines += [asdict(record) for found in groups for record in found.records.values()]
    Path(f"{out}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path(f"{out}.md").write_text(table(run, groups))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # by NVML: the process that starts the ranks must not open the GPU before MPS runs
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if gpu else "cpu")
    parser.add_argument("--size", choices=SIZES, help="default medium, or large on a GPU")
    parser.add_argument("--grids", default=";".join(GRIDS), help="some of z=2;x=2,z=2 (default: both)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for the checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{date.today()}-checkpoint", help="without a suffix")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds} must be at least 1")
    options.grids = options.grids.split(";")
    if strange := [grid for grid in options.grids if grid not in GRIDS]:
        parser.error(f"--grids {strange[0]!r} is none of {'; '.join(GRIDS)}")
    options.size = options.size or ("large" if options.device == "cuda" else "medium")
    options.given = list(sys.argv[1:] if arguments is None else arguments)
    return options


if __name__ == "__main__":
    sys.exit(main())

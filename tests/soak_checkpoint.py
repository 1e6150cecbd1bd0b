"""Every pair of grids: what one saves the other loads bit for bit, and the loss goes on. `make soak` runs it.

All pairs of the grids of `checkpoints.SHAPES`, both models, saved with and without the sharded optimizer and loaded
with the other. Prints a line a grid that saves, and ends with 1 where a pair differs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from checkpoints import MODELS, SHAPES, resumed, trained
from fourfold.grid import Shape
from harness import Ranks

STEPS, SAVE_AT, LARGEST = 4, 2, 1e-11


def differences(first: dict[str, Any], found: dict[str, Any]) -> str:
    """What a grid that goes on has not got right."""
    saved, loaded = first["saved"], found["loaded"]
    wrong = [name for name in saved if name not in loaded or not torch.equal(saved[name], loaded[name])]
    if wrong or len(saved) != len(loaded):
        return f"{len(wrong)} tensors differ, such as {wrong[:2]}"
    expected = first["losses"][SAVE_AT:]
    error = max(abs(one - other) / abs(one) for one, other in zip(expected, found["losses"], strict=True))
    return f"losses {found['losses']} instead of {expected}" if error > LARGEST else ""


def save_and_load(pools: dict[int, Ranks], shape: Shape, name: str, *, sharded: bool) -> int:
    """Of all grids that load what one has saved, the number that fail."""
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        first = pools[shape.world].run(trained, Path(root), name, shape, sharded, STEPS, SAVE_AT)[0]
        folder = Path(root) / f"step-{SAVE_AT:08d}"
        for other in SHAPES:
            wrong = differences(first, pools[other.world].run(resumed, folder, name, other, not sharded, STEPS)[0])
            if wrong:
                failed += 1
                print(f"  {shape} -> {other}, {name}: {wrong}", flush=True)
    return failed


def main() -> int:
    began, failed, pairs = time.monotonic(), 0, 0
    pools = {world: Ranks(world) for world in sorted({shape.world for shape in SHAPES})}
    try:
        for shape in SHAPES:
            for name in MODELS:
                for sharded in (False, True):
                    failed += save_and_load(pools, shape, name, sharded=sharded)
                    pairs += len(SHAPES)
            print(f"{shape}: {pairs} pairs so far, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    finally:
        for pool in pools.values():
            pool.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

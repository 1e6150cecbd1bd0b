"""Every pair of grids: what one saves the other loads bit for bit, and the loss goes on. `make soak` runs it.

All pairs of the grids of `checkpoints.SHAPES`, both models, saved with and without the sharded optimizer and loaded
with the other. Prints a line a grid that loads, and ends with 1 where a pair differs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from checkpoints import MODELS, SHAPES, resumed, trained
from harness import close_pools, pool

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


def main() -> int:
    began, failed, pairs = time.monotonic(), 0, 0
    cases = [(shape, name, sharded) for shape in SHAPES for name in MODELS for sharded in (False, True)]
    with tempfile.TemporaryDirectory() as root:
        saved = {}
        for number, (shape, name, sharded) in enumerate(cases):
            arguments = (Path(root) / str(number), name, shape, sharded, STEPS, SAVE_AT)
            saved[number] = pool(shape.world).run(trained, *arguments)[0]
        print(f"{len(saved)} checkpoints, {time.monotonic() - began:.0f} s", flush=True)
        for other in SHAPES:  # a grid stays up while it loads all of them
            for number, (shape, name, sharded) in enumerate(cases):
                folder = Path(root) / str(number) / f"step-{SAVE_AT:08d}"
                found = pool(other.world).run(resumed, folder, name, other, not sharded, STEPS)[0]
                wrong = differences(saved[number], found)
                if wrong:
                    failed += 1
                    print(f"  {shape} -> {other}, {name}: {wrong}", flush=True)
                pairs += 1
            print(f"{other}: {pairs} pairs so far, {failed} failed, {time.monotonic() - began:.0f} s", flush=True)
    close_pools()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

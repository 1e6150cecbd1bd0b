"""Law 3 at length: every grid of 4 ranks and some of 8, both models, every policy of overlap, 20 steps, bit for bit.

python tests/core/soak_overlap.py
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from test_overlap import all_overlaps, differences

from fourfold.policy import Policy
from fourfold.shape import Shape, shapes_of
from harness import Ranks

STEPS = 20
OF_EIGHT = [Shape(x=2, y=2, z=2), Shape(x=2, z=2, data=2), Shape(y=2, z=2, data=2)]


def policies(draw: random.Random) -> Policy:
    return Policy(
        activations=draw.choice(["sharded", "replicated"]),
        keep_gathered=draw.random() < 0.5,
        keep_weights=draw.random() < 0.3,
        recompute=draw.choice(["none", "attention", "block"]),
        loss_chunk=draw.choice([0, 5]),
        shard_optimizer=draw.random() < 0.5,
        bucket_bytes=draw.choice([4000, 25 << 20]),
    )


def main() -> int:
    draw, failed, began = random.Random(5), 0, time.monotonic()
    cases = [(shape, name) for shape in (*shapes_of(4), *OF_EIGHT) for name in ("gpt", "llama")]
    pools = {world: Ranks(world) for world in (4, 8)}
    for shape, name in cases:
        policy, halves, micro_steps, rows = policies(draw), *(draw.choice([1, 2]) for _ in range(3))
        found = pools[shape.world].run(
            differences, shape, name, policy, halves, micro_steps, STEPS, all_overlaps(halves), rows, timeout=1200
        )
        wrong = sorted({overlap for rank in found for overlap in rank})
        failed += bool(wrong)
        print(f"{shape} {name} {halves=} {micro_steps=} {rows=} {policy}: {wrong or 'equal'}", flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{len(cases)} cases of {len(all_overlaps(2))} policies: {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

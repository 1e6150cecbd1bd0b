"""Loss curves of 200 steps on every grid of `curves.CASES` and `curves.MORE_CASES` beside one process.

python tests/soak_curves.py [STEPS]
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

from curves import CASES, MORE_CASES, bound, check
from harness import Ranks


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    failed = 0
    pools: dict[int, Ranks] = {}

    def pool(world: int) -> Ranks:
        if world not in pools:
            for other in list(pools):
                pools.pop(other).close()
            pools[world] = Ranks(world)
        return pools[world]

    cases = sorted([*CASES, *MORE_CASES], key=lambda case: case.shape.world)
    for name, dtype in itertools.product(("gpt-tiny", "llama-tiny"), ("fp64", "fp32")):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            found = check(pool, name, dtype, steps, Path(folder), cases=cases, timeout=600)
        limit = bound(dtype, steps)
        for case, deviation in found.items():
            failed += not deviation.largest <= limit
            mark = "" if deviation.largest <= limit else "FAILED "
            print(f"{mark}{name} {dtype} {case}: loss {deviation.loss:.1e}, norm {deviation.grad_norm:.1e}", flush=True)
        print(f"{name} {dtype}: {len(found)} grids, {steps} steps, {time.monotonic() - began:.0f} s", flush=True)
    for world in list(pools):
        pools.pop(world).close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

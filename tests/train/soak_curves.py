"""Loss curves of 200 steps beside one process: every grid of `curves.CASES` in fp64 and fp32, then those of
`curves.MORE_CASES`, up to 8 ranks, in fp64. GPT and Llama each time.

    python tests/train/soak_curves.py [STEPS]
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from curves import CASES, MORE_CASES, bound, check
from harness import Ranks

MODELS = ("gpt-tiny", "llama-tiny")
EPS_RATIO = 2.0**29
"""How much coarser fp32 rounds than fp64. Over 200 steps rounding is magnified, most in GPT, whose key biases have a
true gradient of 0 that AdamW turns into steps. How much is seen in fp64, where 1e-9 is the law: fp32 may differ by
ten times what fp64 does on the same grid, in its own roundings."""


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    work = list(itertools.product(sorted(CASES, key=lambda case: case.shape.world), MODELS, ("fp64", "fp32")))
    work += itertools.product(sorted(MORE_CASES, key=lambda case: case.shape.world), MODELS, ("fp64",))
    began, failed, worst = time.monotonic(), 0, {"fp64": 0.0, "fp32": 0.0}
    pool = Ranks(0)
    known: dict[str, dict[str, Any]] = {}  # runs of one process
    exact: dict[tuple[str, str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, model, dtype in work:
            if pool.world != case.shape.world:
                pool.close()
                pool = Ranks(case.shape.world)
            (found,) = check(
                lambda _: pool,  # noqa: B023  # used at once
                model,
                dtype,
                steps,
                Path(folder),
                cases=[case],
                known=known,
                timeout=900,
            ).values()
            exact[str(case), model, dtype] = found.largest
            limit = bound(dtype, steps)
            if dtype == "fp32":
                limit = max(limit, 10 * exact[str(case), model, "fp64"] * EPS_RATIO)
            right = found.largest <= limit
            failed += not right
            worst[dtype] = max(worst[dtype], found.largest)
            outcome = "" if right else "FAILED "
            print(f"{outcome}{model} {dtype} {case}: loss {found.loss:.1e}, norm {found.grad_norm:.1e}", flush=True)
    pool.close()
    print(f"{len(work)} curves of {steps} steps, {failed} failed, largest deviations {worst}, ", end="")
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

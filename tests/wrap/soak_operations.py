"""Every operation on parts in every way and layout, on the grids of test_placed.py, one in `PARTS` calls at a time.

    python tests/wrap/soak_operations.py

One line a part, then a summary; the exit status is 1 where a call gave something else than plain torch.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from test_placed import GRIDS, check_operations

from harness import close_pools, pool

PARTS = 30


def main() -> int:
    began, failed = time.monotonic(), 0
    for shape, mode in GRIDS:
        for part in range(PARTS):
            found = pool(shape.world).run(check_operations, shape, mode, PARTS, part, timeout=600)
            wrong = sorted({line for lines in found for line in lines})
            failed += len(wrong)
            print(f"{shape} {mode}, part {part + 1} of {PARTS}: {len(wrong)} wrong", *wrong, sep="\n", flush=True)
    close_pools()
    print(f"{len(GRIDS)} grids, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

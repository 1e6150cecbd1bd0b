"""Faults of every kind at every phase of a run, on every axis, on ranks that are forked or not. `make soak` runs it.

    python tests/train/soak_faults.py [WORDS]       # only the cases with these words in their names
    FOURFOLD_TEST_AT_ONCE=8 python tests/train/soak_faults.py        # so many at once, on a machine with cores for them
    FOURFOLD_TEST_DEVICE=cuda python tests/train/soak_faults.py      # over NCCL, 4 ranks on one GPU

Prints a line for each case; ends with 1 if any of them failed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

import faults
from harness import DEVICE


def main() -> int:
    words = sys.argv[1:]
    known = faults.GPU_CASES if DEVICE == "cuda" else faults.covering()
    wanted = [case for case in known if all(word in str(case) for word in words)]
    began, at_once = time.monotonic(), int(os.environ.get("FOURFOLD_TEST_AT_ONCE", "1"))
    with tempfile.TemporaryDirectory(prefix="fourfold-faults-") as name:
        failed = faults.check_all(wanted, Path(name), at_once=at_once, tell=partial(print, flush=True))
    print(f"{len(wanted)} cases, {len(failed)} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

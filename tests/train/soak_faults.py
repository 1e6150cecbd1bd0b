"""Faults of every kind at every phase of a run, on 2 and 4 ranks, and on pipe ranks. `make soak` runs it.

    python tests/train/soak_faults.py [WORDS]       # only the cases with these words in their names
    FOURFOLD_TEST_DEVICE=cuda python tests/train/soak_faults.py      # over NCCL, 4 ranks on one GPU

Prints a line for each case; ends with 1 if any of them failed.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

import faults
from curves import write_texts
from harness import DEVICE


def main() -> int:
    words = sys.argv[1:]
    known = faults.GPU_CASES
    if DEVICE != "cuda":
        known = [*(case for ranks in (2, 4) for case in faults.cases(ranks)), *faults.PIPED]
    wanted = [case for case in known if all(word in str(case) for word in words)]
    failed, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fourfold-faults-") as name:
        folder = Path(name)
        write_texts(folder)
        data = str(folder / "texts")
        whole = {grid: faults.undisturbed(folder, grid, data) for grid in {case.on for case in wanted}}
        for number, case in enumerate(wanted):
            try:
                ended = faults.check(case, folder / str(number), whole[case.on], data)
                print(f"ok      {case}: exit code {ended.code}, {ended.seconds:.1f} s after the fault", flush=True)
            except AssertionError as error:
                failed += 1
                print(f"FAILED  {case}: {error}", flush=True)
    print(f"{len(wanted)} cases, {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

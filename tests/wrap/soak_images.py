"""Every network of images over many grids of 1 to 8 ranks, in both modes: all laws of test_images.py at length. Before
them the stacks of test_conv.py on every grid of 2 to 4 ranks, in both modes.

    python tests/wrap/soak_images.py
    python tests/wrap/soak_images.py --start 40        # go on where a run ended

One line a case, then a summary; the exit status is 1 where a case failed. What is kept for backward and the kind of
BatchNorm take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share
sys.path.append(str(Path(__file__).parents[1] / "nn"))

from test_conv import all_errors, cases_of
from test_conv import check as check_stacks
from test_images import NETWORKS, Case, check

from fourfold.shape import Shape, shapes_of
from harness import close_pools, pool

GRIDS = [
    *(shape for world in (1, 2, 3, 4) for shape in shapes_of(world)),
    *(Shape(x=5), Shape(x=3, y=2), Shape(x=2, y=3), Shape(x=2, z=3), Shape(y=2, data=3)),
    *(Shape(x=4, y=2), Shape(x=2, y=4), Shape(x=2, y=2, z=2), Shape(x=2, y=2, data=2), Shape(x=8), Shape(y=8)),
]
"""Places are such that the rows of test_images.py divide; channels often do not, and some ranks have none."""


def all_cases() -> list[Case]:
    cases: list[Case] = []
    for shape in GRIDS:
        for name in NETWORKS:
            for activations in ("sharded", "replicated"):
                # two bits of a number that differs from case to case, so that all combinations occur
                bits = len(cases) + len(cases) // 4
                cases.append(Case(name, shape, activations, synced=bool(bits & 1), kept=bool(bits & 2)))
    return cases


def stacks() -> int:
    """How many ran; raises where one is off."""
    done = 0
    for world in (2, 3, 4):
        cases = cases_of(list(shapes_of(world)), every=True)
        for found in pool(world).run(all_errors, cases, timeout=600):
            check_stacks(found)
        done += len(cases)
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    start = parser.parse_args().start
    cases = all_cases()
    began, failed, worst = time.monotonic(), [], 0.0
    if start == 0:
        print(f"{stacks()} stacks of convolutions, {time.monotonic() - began:.1f} s", flush=True)
    for number, case in enumerate(cases[start:], start):
        since = time.monotonic()
        try:
            error = check(pool(case.shape.world), case, timeout=300)
        except Exception as fault:
            failed.append(f"{number} {case}")
            print(f"{number} {case}: FAILED: {fault}", flush=True)
            continue
        worst = max(worst, error)
        print(f"{number} {case}: {error:.1e}, {time.monotonic() - since:.1f} s", flush=True)
    close_pools()
    print(f"{len(cases) - start} cases, {len(failed)} failed, largest error {worst:.1e}")
    print(f"{time.monotonic() - began:.0f} s", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

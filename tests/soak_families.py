"""Every family and variant over many grids of 2 to 8 ranks, in both modes: all laws of test_families.py at length.

    python tests/soak_families.py
    python tests/soak_families.py --families llama,t5 --grids x=2,z=2:x=3     # some of them
    python tests/soak_families.py --start 120                                 # go on where a run ended

One line a case, then a summary; the exit status is 1 where a case failed. Padding, fp64 all through, and whose hands
the optimizer steps through, take turns. The order is fixed: numbers of ranks in turn, then grids, then families.
"""

from __future__ import annotations

import argparse
import sys
import time

from families import FAMILIES, Case
from fourfold.grid import Shape
from harness import close_pools, pool
from test_families import check

GRIDS = [
    Shape(x=2),
    Shape(y=2),
    Shape(z=2),
    Shape(data=2),
    Shape(x=3),
    Shape(y=3),
    Shape(z=3),
    Shape(x=2, y=2),
    Shape(x=2, z=2),
    Shape(y=2, z=2),
    Shape(x=4),
    Shape(y=4),
    Shape(x=3, z=2),
    Shape(x=2, y=2, z=2),
    Shape(x=2, y=2, data=2),
    Shape(x=4, z=2),
    Shape(y=2, z=2, data=2),
    Shape(x=8),
]
"""x and y of 3 and 8 cut through heads, or leave more ranks than heads of keys and values."""


def all_cases(families: list[str], grids: list[Shape]) -> list[Case]:
    cases = []
    for shape in sorted(grids, key=lambda shape: shape.world):
        for number, name in enumerate(families):
            for turn, activations in enumerate(("sharded", "replicated")):
                # three bits of a number that differs from case to case, so that all eight combinations occur
                bits = len(cases) + len(cases) // 8 + number + turn
                padded = bool(bits & 1) and FAMILIES[name].batch != "images"
                cases.append(
                    Case(name, shape, activations, padded, widened=bool(bits & 2), through_dtensors=bool(bits & 4))
                )
    return cases


def shape_of(text: str) -> Shape:
    try:
        return Shape(**{axis: int(size) for axis, size in (part.split("=") for part in text.split(","))})
    except (TypeError, ValueError) as fault:
        raise argparse.ArgumentTypeError(f"a grid reads x=2,z=2, several are joined by ':'; got {text!r}") from fault


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, joined by commas; default: all")
    parser.add_argument(
        "--grids",
        type=lambda text: [shape_of(part) for part in text.split(":")],
        default=GRIDS,
        help="such as x=2,z=2:x=3; default: all of this file's",
    )
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    chosen = parser.parse_args()
    chosen.families = chosen.families.split(",")
    if unknown := sorted(set(chosen.families) - set(FAMILIES)):
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    return chosen


def main() -> int:
    chosen = options()
    cases = all_cases(chosen.families, chosen.grids)
    began, failed, worst = time.monotonic(), [], {1e-9: 0.0, 1e-5: 0.0}
    for number, case in enumerate(cases[chosen.start :], chosen.start):
        since = time.monotonic()
        try:
            error = check(pool(case.shape.world), case, timeout=300)
        except Exception as fault:
            failed.append(f"{number} {case}")
            print(f"{number} {case}: FAILED: {fault}", flush=True)
            continue
        worst[case.tolerance] = max(worst[case.tolerance], error)
        print(f"{number} {case}: {error:.1e} of {case.tolerance:.0e}, {time.monotonic() - since:.1f} s", flush=True)
    close_pools()
    largest = ", ".join(f"{error:.1e} of {tolerance:.0e}" for tolerance, error in worst.items())
    print(f"{len(cases) - chosen.start} cases, {len(failed)} failed, largest errors {largest}")
    print(f"{time.monotonic() - began:.0f} s", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

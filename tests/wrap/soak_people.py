"""Models, losses and loops as people write them, drawn from seeds: each is exact on its grid or refused with a way out.

    python tests/wrap/soak_people.py
    python tests/wrap/soak_people.py --start 400 --count 1000              # other seeds
    python tests/wrap/soak_people.py --seed-only 17 --grids x=2:z=2        # one case, on some grids

One line a case, then a summary: how many were exact, what was refused and why, what differed in silence (SILENT), and
what failed without a way out (CRASH). The exit status is 1 where a case is one of the last two.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from soak_families import shape_of

from harness import RankFailed, close_pools, pool
from people import Case, Verdict, check_all, draw, joint, refusal

TOGETHER = 8
"""Cases of one job. Where a job fails or hangs its cases run again, each by itself."""


def verdicts(cases: list[Case], timeout: float = 120) -> list[Verdict]:
    ranks = pool(cases[0].shape.world)
    try:
        found = ranks.run(check_all, cases, timeout=timeout)
    except (RankFailed, TimeoutError) as fault:
        if len(cases) > 1:
            return [verdict for case in cases for verdict in verdicts([case])]
        return [Verdict("CRASH", f"the ranks did not end together: {fault}")]
    return [joint(case, own) for case, own in zip(cases, zip(*found, strict=True), strict=True)]


def run(cases: list[Case]) -> Iterator[tuple[Case, Verdict, float]]:
    """Cases of equal worlds after each other, for ranks stay up."""
    for world in sorted({case.shape.world for case in cases}):
        alike = [case for case in cases if case.shape.world == world]
        for some in (alike[first : first + TOGETHER] for first in range(0, len(alike), TOGETHER)):
            since = time.monotonic()
            for case, verdict in zip(some, verdicts(some), strict=True):
                yield case, verdict, (time.monotonic() - since) / len(some)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--seed-only", type=int, help="this seed alone, on each of the grids")
    parser.add_argument(
        "--grids",
        type=lambda text: tuple(shape_of(part) for part in text.split(":")),
        default=(),
        help="such as x=2,z=2:y=2; seeds take turns on them. Default: all of people.py's",
    )
    return parser.parse_args()


def main() -> int:
    chosen = options()
    if chosen.seed_only is None:
        cases = [draw(seed, chosen.grids) for seed in range(chosen.start, chosen.start + chosen.count)]
    else:
        case = draw(chosen.seed_only)
        cases = [replace(case, shape=shape) for shape in chosen.grids or (case.shape,)]
    began, kinds, refused, faults = time.monotonic(), Counter[str](), Counter[str](), []
    for case, verdict, seconds in run(cases):
        kinds[verdict.kind] += 1
        if verdict.kind == "refused":
            refused[refusal(verdict.said)] += 1
        if verdict.fault:
            faults.append(f"{verdict.kind} {case}")
        said = f"{verdict.error:.1e}" if verdict.kind == "exact" else verdict.said
        print(f"{verdict.kind} {case}: {said} ({seconds:.1f} s)", flush=True)
    close_pools()
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s:", ", ".join(f"{n} {k}" for k, n in kinds.items()))
    for said, number in refused.most_common():
        print(f"{number} refused: {said}")
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

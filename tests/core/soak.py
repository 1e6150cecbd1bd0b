"""The full product: every grid of 1, 2, 3, 4, 6 and 8 ranks, both modes, every combination of options.

That is 110 grids and modes times 16384 combinations. They are walked in a fixed shuffled order, so that a
run that is stopped early (SOAK_SECONDS) has seen a fair sample, and SOAK_START goes on where one ended.

    make soak SOAK_SECONDS=1800
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share

from fourfold.ledger import Collective
from fourfold.shape import shapes_of
from harness import Ranks
from parity import NAMES, WORLDS, Case, Options, errors, on_one_process, on_ranks, predicted

BATCH = 400
"""Cases between two changes of the number of ranks."""


def all_cases() -> list[Case]:
    grids = [shape for world in WORLDS for shape in shapes_of(world)]
    choices = [Options(*flags) for flags in itertools.product((False, True), repeat=len(NAMES))]
    cases = [Case(*chosen, most_steps=5) for chosen in itertools.product(grids, ("sharded", "replicated"), choices)]
    random.Random(0).shuffle(cases)
    return cases


def check(pool: Ranks, case: Case) -> float:
    """The largest error; raises where the ledger differs from the prediction."""
    pool.start(on_ranks, case)
    one = on_one_process(case)
    found = pool.results(timeout=300)
    for rank, result in enumerate(found):
        if Counter(Collective(*record) for record in result["records"]) != Counter(predicted(case, rank)):
            raise AssertionError(f"the ledger of rank {rank} differs from the prediction")
    return max(errors(case, one, found).values())


def main() -> int:
    seconds = float(os.environ.get("SOAK_SECONDS", "inf"))
    start = int(os.environ.get("SOAK_START", "0"))
    cases, began = all_cases(), time.monotonic()
    done, failed, worst = start, 0, 0.0
    while done < len(cases) and time.monotonic() - began < seconds:
        batch = sorted(cases[done : done + BATCH], key=lambda case: (case.shape.world, str(case.shape)))
        for world, group in itertools.groupby(batch, key=lambda case: case.shape.world):
            pool = Ranks(world)
            for case in group:
                try:
                    error = check(pool, case)
                except Exception as fault:
                    failed += 1
                    print(f"FAILED {case}: {fault}", flush=True)
                    continue
                worst = max(worst, error)
                if error > 1e-10:
                    failed += 1
                    print(f"FAILED {case}: error {error:.1e}", flush=True)
            pool.close()
        done += len(batch)
        print(
            f"{done - start} cases, {failed} failed, largest error {worst:.1e}, {time.monotonic() - began:.0f} s; "
            f"go on with SOAK_START={done} of {len(cases)}",
            flush=True,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The loop of soaks that draw cases on many grids and compare each with one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import TypeVar

from fourfold.shape import Shape
from harness import Ranks

Case = TypeVar("Case")
LIMIT = 1e-10
"""The largest error that passes."""


def soak(
    shapes: Sequence[Shape],
    draws: int,
    case_of: Callable[[random.Random, Shape], Case],
    error_of: Callable[[Ranks, Case], float],
    name_of: Callable[[Case], str],
) -> int:
    """Draw cases of every grid and print the error of each; return 1 if any is above the limit or raises, else 0."""
    failed, began = 0, time.monotonic()
    pool = Ranks(shapes[0].world)
    for shape, number in product(shapes, range(draws)):
        if pool.world != shape.world or pool.worn:
            pool.close()
            pool = Ranks(shape.world)
        case = case_of(random.Random(f"{shape} {number}"), shape)
        try:
            error = error_of(pool, case)
        except Exception as fault:
            error = float("inf")
            print(f"{type(fault).__name__}: {str(fault)[-600:]}", flush=True)
            pool.close()
            pool = Ranks(shape.world)
        failed += error > LIMIT
        verdict = "" if error <= LIMIT else f"FAILED: {case}"
        print(f"{shape} {number} {name_of(case)}: {error:.1e} {verdict}", flush=True)
    pool.close()
    print(f"{len(shapes)} grids, {draws} draws each: {failed} failed, {time.monotonic() - began:.0f} s")
    return 1 if failed else 0

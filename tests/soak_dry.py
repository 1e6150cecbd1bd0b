"""The dry run of whole published models: GPT-80B on 1,024 ranks, GPT-640B on 16,384, every layer.

Prints the seconds and compares every collective with the closed form.
"""

from __future__ import annotations

import time

import fourfold as ff
from dry import BF16, Case, compare
from fourfold.grid import Shape

POLICY = ff.Policy(compute=BF16, recompute="block")
CASES = {
    "gpt-80b": Case(Shape(8, 2, 8, 8), POLICY, config=ff.models.config("gpt-80b"), rows=4, seq=2048),
    "gpt-640b": Case(Shape(16, 1, 64, 16), POLICY, config=ff.models.config("gpt-640b"), rows=4, seq=2048),
}


def main() -> None:
    for name, case in CASES.items():
        began, cpu = time.perf_counter(), time.process_time()
        collectives = compare(case)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        print(f"{name} on {case.shape.world} ranks: {collectives} collectives, {seconds:.1f} s ({cpu:.1f} s of a core)")


if __name__ == "__main__":
    main()

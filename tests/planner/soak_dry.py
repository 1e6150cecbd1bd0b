"""Dry runs at length: whole published models beside their programs, every program, every peak of memory.

GPT-80B on 1,024 ranks and GPT-640B on 16,384 run with every layer; prints the seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # what tests share
sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks

import test_memory
import test_program

import fourfold as ff
from dry import BF16, Case, compare
from dry_peak import dry_peaks
from fourfold.grid import Shape

POLICY = ff.Policy(compute_dtype=BF16, recompute="block")
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
    programs, cut = [*test_program.cases(), *test_program.context_cases()], test_program.cut_cases()
    programs += [*test_program.unfolded_mixtures(), *test_program.folded_mixtures()]
    for case in programs:
        test_program.compare(*case)
    for case in cut:
        test_program.compare(*case, rows=1)
    print(f"{len(programs) + len(cut)} programs are what the code does")
    for case, found in zip(test_memory.CASES, dry_peaks(test_memory.CASES), strict=True):
        test_memory.compare(case, found)
    print(f"{len(test_memory.CASES)} peaks of memory are those of the dry run")


if __name__ == "__main__":
    main()

"""Faults at every phase of a run, over every axis and both ways to start ranks; `tests/faults.py` says what holds.

Each case trains a run with a fault, and resumes it. So `make test` has a few of the covering array, which mostly wait
and run some at once (about 1.7 s of CPU for each of 24 runs, 7 undisturbed ones, and the 14 that are resumed), `make
slow` has more of them, and `tests/train/soak_faults.py` all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import faults
from runs import needs_proc

NUMBER, SLOW = 24, 60
CASES = faults.most_telling(NUMBER)


@needs_proc
def test_faults_are_named_end_in_time_and_lose_nothing(tmp_path: Path) -> None:
    failed = faults.check_all(CASES, tmp_path, at_once=4)
    assert not failed, "\n".join(failed)


@needs_proc
@pytest.mark.slow
def test_more_faults_are_named_end_in_time_and_lose_nothing(tmp_path: Path) -> None:
    more = [case for case in faults.covering()[:SLOW] if case not in CASES]
    failed = faults.check_all(more, tmp_path, at_once=4)
    assert not failed, "\n".join(failed)


def test_the_few_cases_have_every_axis_and_phase_and_most_kinds() -> None:
    assert len(CASES) == NUMBER
    assert {case.grid for case in CASES} == set(faults.AXES)
    assert {case.phase for case in CASES} == set(faults.PHASES)
    assert {case.kind for case in CASES} == set(faults.KINDS) - {"launcher stopped", "server stopped"}, "they wait long"
    assert {case.forked for case in CASES} == {True, False}


def test_in_the_soak_every_two_factors_meet() -> None:
    """A new axis, phase or kind is in the soak by itself, with all that was there before."""
    cases = faults.covering()
    assert len(cases) >= 120
    found = set().union(*(case.pairs for case in cases))
    for phase in faults.PHASES:
        for grid in faults.GRIDS:
            assert ("grid", grid, "phase", phase) in found
        for kind in faults.KINDS:
            wanted = phase in faults.PHASES_OF.get(kind, faults.PHASES)
            assert (("kind", kind, "phase", phase) in found) is wanted
    for grid in faults.GRIDS:
        assert {("grid", grid, "kind", kind) for kind in faults.KINDS} <= found
        assert {("forked", str(forked), "grid", grid) for forked in (True, False)} <= found

"""Faults at every phase of a run; `tests/train/soak_faults.py` has all of them.

Each case trains and resumes a run, so these are few: every phase and every kind at least once, half of them in
`make slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import faults
from curves import write_texts
from faults import Case
from runs import needs_proc

pytestmark = needs_proc

CASES = [
    Case("save", "SIGTERM", 2),
]

SLOW = [
    Case("start", "kill", 2),
    Case("first step", "Ctrl-C", 2),
    Case("building", "SIGTERM", 2),
    Case("resume", "SIGTERM", 2),
    Case("step", "stop", 2, "pipe=2"),
    Case("step", "kill", 4, "pipe=2,x=2"),
    Case("save", "kill", 4, "pipe=4"),
    Case("step", "NaN", 2),
    Case("save", "full disk", 2),
    Case("evaluation", "stop and continue", 2),
    Case("rename", "kill", 2),
    Case("end", "slow", 2),
    Case("rendezvous", "kill", 2),
    Case("reading", "kill", 2),
    Case("compile", "closed output", 2),
    Case("step", "stop", 2),
    Case("step", "SIGHUP", 2),
    Case("step", "launcher killed", 2),
    Case("step", "Ctrl-C twice", 2),
    Case("evaluation", "kill", 2),
    Case("save", "kill", 2),
    Case("save", "SIGTERM", 4),
    Case("rename", "kill", 4),
    Case("prune", "read-only disk", 2),
    Case("end", "kill", 2),
]


class Undisturbed(dict[str, Path]):
    """The undisturbed runs by grid, each trained when it is needed first."""

    def __init__(self, folder: Path, data: str) -> None:
        self._folder, self._data = folder, data

    def __missing__(self, grid: str) -> Path:
        self[grid] = faults.undisturbed(self._folder, grid, self._data)
        return self[grid]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write_texts(folder)
    return str(folder / "texts")


@pytest.fixture(scope="module")
def undisturbed(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return Undisturbed(folder, data)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_a_fault_is_named_ends_in_time_and_loses_nothing(
    case: Case, undisturbed: dict[str, Path], data: str, tmp_path: Path
) -> None:
    faults.check(case, tmp_path / "case", undisturbed[case.on], data)


def test_the_cases_above_have_every_phase_and_every_kind() -> None:
    assert {case.phase for case in (*CASES, *SLOW)} == set(faults.PHASES)
    assert {case.kind for case in (*CASES, *SLOW)} == set(faults.KINDS)
    assert {*CASES, *SLOW} <= {*(case for ranks in faults.GRIDS for case in faults.cases(ranks)), *faults.PIPED}


def test_there_are_at_least_150_cases_in_the_soak() -> None:
    assert sum(len(faults.cases(ranks)) for ranks in faults.GRIDS) >= 150

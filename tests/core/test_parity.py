"""Law 1 and law 2: every grid computes what one process computes, and communicates what was predicted."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from fourfold.ledger import Collective
from parity import NAMES, Case, errors, on_one_process, on_ranks, predicted, rotating_cases
from share import ALL, others_slow


def in_turns() -> list[Case]:
    """Every grid, in `make test` in one of its modes, the two by turns."""
    by_grid = [list(cases) for _, cases in itertools.groupby(rotating_cases(), key=lambda case: case.shape)]
    chosen = [cases if ALL else [cases[number % len(cases)]] for number, cases in enumerate(by_grid)]
    return list(itertools.chain(*chosen))


@pytest.mark.parametrize("case", others_slow(in_turns(), 7), ids=str)
def test_grid_equals_one_process_and_ledger_equals_prediction(ranks, case: Case) -> None:
    check(ranks(case.shape.world), case)


def check(pool, case: Case) -> None:
    pool.start(on_ranks, case)
    one = on_one_process(case)
    found = pool.results()
    # fp64 rounds at 1e-16; sums of a few hundred terms in another order stay far below 1e-10
    assert {kind: error for kind, error in errors(case, one, found).items() if error > 1e-10} == {}
    for rank, result in enumerate(found):
        assert Counter(Collective(*record) for record in result["records"]) == Counter(predicted(case, rank))


def test_every_pair_of_options_occurs() -> None:
    cases = rotating_cases()
    for mode in ("sharded", "replicated"):
        options = [case.options for case in cases if case.activations == mode]
        for a, b in itertools.combinations(NAMES, 2):
            seen = {(getattr(option, a), getattr(option, b)) for option in options}
            assert len(seen) == 4, f"{mode}: {a} with {b} occurs only as {seen}"

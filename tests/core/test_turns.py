"""The order in which the halves of a batch run, which depends on what they wait for and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fourfold.engine import Engine, Turns, Wait
from fourfold.policy import Overlap

STEPS_OF_A_MIXTURE = [
    ("attend", None),
    ("project", None),
    ("route", Wait.COUNTS),
    ("send", Wait.ROWS),
    ("expand", None),
    ("contract", Wait.ROWS),
]
"""The steps of a block with experts on a fold, and what a half waits for behind each."""


def order_of(parts: Sequence[Sequence[tuple[str, Wait | None]]]) -> list[str]:
    """Return the steps of all parts in the order in which they ran, with the number of their part."""
    ran: list[str] = []
    engine = Engine(Overlap(), flights=True)

    def run(number: int, steps: Sequence[tuple[str, Wait | None]]) -> Turns[int]:
        for name, wait in steps:
            assert engine.turn.index == number
            ran.append(f"{name}{number}")
            yield wait
        return number

    parts_of = [run(number, steps) for number, steps in enumerate(parts)]
    assert engine.take_turns(parts_of) == list(range(len(parts)))
    assert engine.turn.of == 1
    return ran


@pytest.mark.parametrize(
    ("halves", "order"),
    [
        (2, ["a0", "b0", "a1", "c0", "b1", "c1"]),
        (3, ["a0", "b0", "a1", "a2", "c0", "b1", "b2", "c1", "c2"]),
    ],
)
def test_halves_alternate_and_the_first_is_a_step_ahead(halves: int, order: list[str]) -> None:
    assert order_of([[(step, None) for step in "abc"]] * halves) == order


def test_rows_of_one_half_travel_behind_the_products_of_the_other() -> None:
    """In every block but the first, with `attend1` of the block before between routing and sending."""
    found = order_of([STEPS_OF_A_MIXTURE * 3] * 2)
    steady = [
        "attend0", "project0", "route0",  # the rows of 1 come back
        "attend1",  # the counts of 0 travel
        "send0",
        "project1", "route1",  # the rows of 0 travel
        "expand0",  # the counts of 1 travel
        "send1",
        "contract0",  # the rows of 1 travel
        "expand1", "contract1",  # the rows of 0 come back
    ]  # fmt: skip
    assert "".join(found).count("".join(steady)) == 2


def test_a_bare_layer_sends_the_rows_of_both_halves_before_it_multiplies() -> None:
    bare = STEPS_OF_A_MIXTURE[2:]
    assert order_of([bare] * 2) == [
        "route0", "route1", "send0", "send1", "expand0", "contract0", "expand1", "contract1",
    ]  # fmt: skip


def test_a_half_goes_on_by_itself_when_the_others_have_ended() -> None:
    found = order_of([[("only", Wait.COUNTS)], STEPS_OF_A_MIXTURE])
    assert found == ["only0", "attend1", *(f"{name}1" for name, _ in STEPS_OF_A_MIXTURE[1:])]
    assert order_of([STEPS_OF_A_MIXTURE]) == [f"{name}0" for name, _ in STEPS_OF_A_MIXTURE]

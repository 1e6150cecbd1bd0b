"""The trainer's law: the curves of a run do not depend on the grid, and a run gives itself again, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from curves import CASES, PACKED, Case, alone, bound, check, config_of, deviation, train, write_texts
from fourfold.grid import Shape
from share import share

STEPS = 12
ONE_LAYER = {"model.layers": 1}
PAIRS = [case for case in CASES if case.shape.world == 2]


@pytest.fixture(scope="module")
def known() -> dict[str, dict[str, Any]]:
    """Curves of one process."""
    return {}


@pytest.mark.parametrize(
    ("name", "world", "dtype"),
    share([("gpt-tiny", 2, "fp32"), ("gpt-tiny", 2, "fp64"), ("llama-tiny", 4, "fp64")], 3),
)
def test_curves_are_those_of_one_process(ranks, tmp_path: Path, known, name: str, world: int, dtype: str) -> None:
    """Both models everywhere in `make soak`."""
    cases = [case for case in CASES if case.shape.world == world]
    if dtype == "fp32":  # what the grid does is shown in fp64; here it is about the size of rounding
        cases = cases[::3]
    found = check(ranks, name, dtype, STEPS, tmp_path, cases=cases, changes=ONE_LAYER, known=known)
    assert len(found) == len(cases)
    assert {case: error for case, error in found.items() if not error.largest <= bound(dtype, STEPS)} == {}


def test_the_cases_have_every_axis_and_option() -> None:
    assert len({str(case.shape) for case in CASES}) >= 8
    for axis in ("x", "y", "z", "data"):
        assert any(case.shape.sizes[axis] > 1 for case in CASES)
    options = {key for case in CASES for key in case.policy | case.data}
    assert options >= {
        "policy.activations",
        "policy.recompute",
        "policy.loss_chunk",
        "policy.shard_optimizer",
        "data.documents",
    }
    assert any(case.shape.world % 2 for case in CASES)


def test_the_bound_would_show_a_mistake(tmp_path: Path) -> None:
    """Even that of fp32: a rate that is wrong by a thousandth lies beyond it."""
    write_texts(tmp_path)
    right, wrong = (
        alone("gpt-tiny", "fp32", STEPS, tmp_path, {**ONE_LAYER, "optimizer.learning_rate": rate})
        for rate in (1e-3, 1.001e-3)
    )
    found = deviation(right, wrong)
    assert min(found.loss, found.grad_norm, found.evaluation) > bound("fp32", STEPS) > bound("fp64", STEPS)
    assert right["loss"][-1] < right["loss"][0] - 0.5  # and it learns


def twice(config: Any, folder: Path) -> list[dict[str, Any]]:
    return [train(config, folder) for _ in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case(Shape(x=2), {"policy.recompute": "block"}, PACKED), PAIRS[-1]], ids=lambda case: str(case.shape)
)
def test_a_run_gives_itself_again(ranks, tmp_path: Path, case: Case) -> None:
    """Losses, norms, evaluations and every parameter, to the last bit."""
    write_texts(tmp_path)
    config = config_of("gpt-tiny", "fp32", 6, tmp_path, case.shape, ONE_LAYER | case.policy | case.data)
    for first, second in ranks(2).run(twice, config, tmp_path):
        assert first == second
        assert len(first["loss"]) == 6
    other = config_of("gpt-tiny", "fp32", 6, tmp_path, case.shape, {"train.seed": 4, **ONE_LAYER, **case.policy})
    assert ranks(2).run(train, other, tmp_path)[0]["parameters"] != first["parameters"]


@pytest.mark.slow
def test_micro_steps_add_up_to_a_step(tmp_path: Path) -> None:
    """Rows have unequal numbers of targets where documents end, and still every target counts the same."""
    write_texts(tmp_path)
    changes = {**ONE_LAYER, **PACKED, "train.evaluate_every": 0}
    one, four = (alone("llama-tiny", "fp64", 10, tmp_path, {**changes, "batch.micro_steps": n}) for n in (1, 4))
    found = deviation(one, four)
    assert max(found.loss, found.grad_norm) < 1e-10


def test_evaluation_does_not_depend_on_micro_steps(tmp_path: Path) -> None:
    write_texts(tmp_path)
    losses = [
        alone("gpt-tiny", "fp64", 1, tmp_path, {**ONE_LAYER, "batch.micro_steps": micro})["evaluation"]
        for micro in (1, 4)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)

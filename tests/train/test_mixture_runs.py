"""Runs of mixtures of experts: the curves of one process, recorded counts, routers that collapse."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from curves import Case, alone, check, config_of, write_texts
from fourfold.expert_counts import (
    COMPANIONS,
    COUNTS,
    LARGEST,
    CountsFile,
    StepCounts,
    read_companions,
    read_counts,
)
from fourfold.grid import Shape
from fourfold.models.transformer import Transformer
from fourfold.report.run_data import read_run
from fourfold.report.run_page import figures
from fourfold.train.config import TrainConfig
from fourfold.train.guard import COLLAPSED_STEPS, RouterJudge
from runs import column, lines_of, trained
from share import others_slow

STEPS = 3
MODEL = {"model.shared_hidden": 48, "model.dense_layers": 1}
CASES = [
    Case(Shape(x=2, z=2), {}, MODEL),
    Case(Shape(z=2, data=2), {"policy.shard_optimizer": True}),
    Case(Shape(y=2, pipe=2), {}, {"batch.micro_steps": 2}),
    Case(Shape(x=2, y=2), {"policy.recompute": "block"}, MODEL),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixtures")
    write_texts(made)
    return made


@pytest.mark.parametrize("case", others_slow(CASES, 4), ids=str)
def test_curves_are_those_of_one_process(ranks: Any, folder: Path, case: Case) -> None:
    found = check(ranks, "moe-tiny", "fp64", STEPS, folder, cases=[case], changes={"train.evaluate_every": 2})
    assert found[str(case)].largest < 1e-9


@pytest.mark.slow
def test_a_run_goes_on_on_another_grid_with_its_counts(ranks: Any, folder: Path, tmp_path: Path) -> None:
    """Every token of a step is counted K times in every block, on every grid; the held-out ones are not."""
    run, changes = tmp_path / "run", {"optimizer.schedule": "constant", "optimizer.warmup": 0}
    for number, shape in enumerate([Shape(x=2, z=2), Shape(y=2, pipe=2)]):
        more = {**changes, "train.evaluate_every": 1}
        config = config_of("moe-tiny", "fp64", 2 * (number + 1), folder, shape, more)
        ranks(4).run(partial(trained, resume=number > 0), config, run)
    one = alone("moe-tiny", "fp64", 4, folder, changes)
    assert column(run, "step", "loss") == pytest.approx(one["loss"], rel=1e-9)
    counts = list(read_counts(run))
    assert [each.step for each in counts] == [1, 2, 3, 4]
    tokens = config.batch.rows * config.batch.seq
    assert {sum(block) for each in counts for block in each.by_block} == {2 * tokens}
    steps = [event for event in lines_of(run) if event["event"] == "step"]
    assert [event["expert_load"]["worst"] for event in steps] == [max(each.loads.values()) for each in counts]
    found = read_run(run)
    assert found.experts is not None and found.experts.steps == [1, 2, 3, 4]
    assert figures(found).keys() >= {"balance", "experts"}


def many_companions(config: TrainConfig, folder: Path) -> None:
    """Train with more companions than 4 bytes can count."""
    count = Transformer.companions
    with mock.patch.object(Transformer, "companions", lambda model: count(model) << 32):
        trained(config, folder)


def test_companions_of_many_steps_are_counted_up_to_four_bytes(ranks: Any, folder: Path, tmp_path: Path) -> None:
    config = config_of("moe-tiny", "fp64", 2, folder, Shape(), {"train.evaluate_every": 0})
    ranks(1).run(many_companions, config, tmp_path / "run")
    (found,) = read_companions(tmp_path / "run", 9)
    assert set(found.by_block) == {0, LARGEST}


# --- the file


def counts_of(step: int, *blocks: list[int]) -> StepCounts:
    return StepCounts(step, [list(block) for block in blocks])


def as_lists(folder: Path, most: int | None = None) -> list[tuple[int, list[list[int]]]]:
    return [(each.step, [list(block) for block in each.by_block]) for each in read_counts(folder, most)]


def test_counts_are_read_as_they_were_written_also_after_a_resume_and_a_cut(tmp_path: Path) -> None:
    assert as_lists(tmp_path) == []
    written = [(step, [[0, 0, 0], [step, 5, 1 << 31]]) for step in range(1, 7)]
    file = CountsFile(tmp_path, 2, 3)
    for step, blocks in written:
        file.write(counts_of(step, *blocks))
    file.close()
    assert as_lists(tmp_path) == written
    assert [step for step, _ in as_lists(tmp_path, 2)] == [3, 6]
    path = tmp_path / COUNTS
    path.write_bytes(path.read_bytes()[:-3])  # a run that was killed while it wrote
    assert as_lists(tmp_path) == written[:-1]
    again = CountsFile(tmp_path, 2, 3, after=3)
    again.write(counts_of(4, [0, 0, 0], [9, 9, 9]))
    again.close()
    assert as_lists(tmp_path) == [*written[:3], (4, [[0, 0, 0], [9, 9, 9]])]
    CountsFile(tmp_path, 2, 3).close()
    assert as_lists(tmp_path) == []  # another run


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / COUNTS).write_text("loss 1.0 and more than a head")
    with pytest.raises(ValueError, match="has no records of experts: it begins with"):
        list(read_counts(tmp_path))


def test_damaged_records_are_named(tmp_path: Path) -> None:
    file = CountsFile(tmp_path, 2, 3)
    for step in (1, 2):
        file.write(counts_of(step, [1, 2, 3], [4, 5, 6]), range(18))
    file.close()
    for name, read in ((COUNTS, read_counts), (COMPANIONS, partial(read_companions, last=9))):
        path = tmp_path / name
        content = bytearray(path.read_bytes())
        content[-2] ^= 255
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: the record of step 2 is damaged"):
            list(read(tmp_path))


def test_loads_are_multiples_of_the_mean() -> None:
    counts = counts_of(1, [0, 0, 0, 0], [4, 2, 2, 0])
    assert counts.loads == {1: 2.0}
    assert counts.unused == 1


# --- routers that collapse


def told(blocks: list[list[int]], chosen: int, steps: int = COLLAPSED_STEPS, judge: RouterJudge | None = None) -> str:
    judge = judge or RouterJudge()
    said = [judge.judge(counts_of(step, *blocks), chosen) for step in range(steps)]
    assert not any(said[: COLLAPSED_STEPS - 1])
    return "".join(said)


def test_an_expert_without_tokens_is_told_once() -> None:
    judge = RouterJudge()
    said = told([[5, 5, 5, 5], [0, 7, 6, 7]], 2, 3 * COLLAPSED_STEPS, judge)
    assert said == (
        f"the router of block 1 collapses: for {COLLAPSED_STEPS} steps no token chose expert 0; raise model.aux or "
        "model.bias_rate, or lower optimizer.learning_rate"
    )
    judge.judge(counts_of(0, [5, 5, 5, 5], [5, 5, 5, 5]), 2)
    assert told([[5, 5, 5, 5], [0, 7, 6, 7]], 2, judge=judge)  # it had recovered


def test_one_expert_for_most_tokens_is_a_collapse() -> None:
    assert "most tokens chose expert 3" in told([[1, 1, 1, 9, 1, 1, 1, 1]], 2)
    assert not told([[2, 1, 2, 3, 2, 1, 2, 3]], 2)
    assert not told([[9, 9, 9]], 2)  # of three experts two are chosen, so each has most tokens

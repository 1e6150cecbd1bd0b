"""`fourfold experts`: the load of experts in a run, and a renumbered copy from which training goes on."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from curves import config_of, write_texts
from fourfold.expert_counts import COUNTS, CountsFile, StepCounts, read_companions
from fourfold.shape import Shape
from fourfold.train.config import TrainConfig
from harness import pool
from runs import Left, assert_error, cli, column, trained

EXPERTS, LAYERS, TOP_K = 16, 3, 4
CHANGES = {
    "model.experts": EXPERTS, "model.layers": LAYERS, "model.top_k": TOP_K, "optimizer.schedule": "constant",
    "optimizer.warmup": 0, "log.companions_every": 2, "train.evaluate_every": 0,
}  # fmt: skip


def config(folder: Path, steps: int, shape: Shape, **more: Any) -> TrainConfig:
    return config_of("moe-tiny", "fp64", steps, folder, shape, {**CHANGES, **more})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, with counts that were made uneven, and experts that are chosen together."""
    folder = tmp_path_factory.mktemp("experts")
    write_texts(folder)
    pool(1).run(trained, config(folder, 3, Shape()), folder / "run")
    assert [record.step for record in read_companions(folder / "run", 9)] == [2, 3]
    popular = [1 + 40 * (expert % 4 == 1) + 3 * expert for expert in range(EXPERTS)]
    met = [
        here * there * (9 if (e + block) % 4 == (f + block) % 4 else 1)
        for block in range(LAYERS)
        for e, here in enumerate(popular)
        for f, there in enumerate(popular)
    ]
    file = CountsFile(folder / "run", LAYERS, EXPERTS)
    for step in (1, 2, 3):
        file.write(StepCounts(step, [popular] * LAYERS), met if step == 3 else None)
    file.close()
    return folder / "run"


def experts(*arguments: object) -> Left:
    return cli("experts", *map(str, arguments))


def test_show_draws_loads_and_says_what_placing_brings(run: Path) -> None:
    shown = experts("show", run)
    assert shown.code == 0, shown.err
    assert "3 steps, 1 to 3; 16 experts in each of 3 blocks, 4 of them for a token" in shown.out
    assert shown.out.count("█") == LAYERS
    assert "--expert 8 --node 4" in shown.out
    found = json.loads(experts("show", run, "--expert", 4, "--node", 2, "--json", "-").out)
    assert [block["unused"] for block in found["blocks"]] == [0] * LAYERS
    today, placed = found["placement"]["today"], found["placement"]["placed"]
    assert today["rank_load"]["worst"] > 1.2
    assert placed["rank_load"]["worst"] <= 1.1
    assert placed["ranks_of_a_token"] <= 0.95 * today["ranks_of_a_token"]
    assert placed["bytes_between_nodes"] <= 0.95 * today["bytes_between_nodes"]
    text = experts("show", run, "--expert", 4, "--node", 2).out
    assert "4 ranks along expert, 2 in a node" in text and "ranks that a token goes to" in text


def test_a_placed_run_goes_on_with_the_same_losses(ranks: Any, run: Path, tmp_path: Path) -> None:
    """The copy trains on another grid as the original does, and can be shown again."""
    out = tmp_path / "placed"
    placed = experts("place", run, "--expert", 4, "--node", 2, "--out", out)
    assert placed.code == 0, placed.err
    assert f"{out}: step-00000003 with 16 experts renumbered in 3 blocks" in placed.out
    shape = Shape(x=2, z=2)
    for folder in (run, out):
        more = config(run.parent, 5, shape)
        ranks(4).run(partial(trained, resume=True), more, folder)
    assert column(out, "step", "loss") == pytest.approx(column(run, "step", "loss")[-2:], abs=1e-10)
    assert experts("show", out, "--expert", 4).code == 0


def test_errors_say_the_way_out(run: Path, tmp_path: Path) -> None:
    assert_error(experts("show", tmp_path), "has no config.toml, so it is no run's folder; give that of a mixture")
    assert_error(experts("place", run), "has no ranks along expert; say for how many to place: --expert 8 --node 4")
    assert_error(experts("place", run, "--expert", 32), "32 ranks along expert for 16 experts; give at most as many")
    assert_error(experts("place", run, "--expert", 4, "--node", 3), "4 ranks along expert do not make nodes of 3")
    assert_error(experts("place", run, "--expert", 4, "--out", run), "is there already and not an empty folder")
    folder = tmp_path / "run"
    folder.mkdir()
    dense = config_of("gpt-tiny", "fp64", 3, run.parent, Shape(), {})
    (folder / "config.toml").write_text(dense.toml())
    assert_error(experts("show", folder), "the model gpt-tiny has no experts", "--model moe-tiny")
    (folder / "config.toml").write_text((run / "config.toml").read_text())
    assert_error(experts("show", folder), f"has no counts of experts yet ({COUNTS}); train some steps: fourfold train")
    file = CountsFile(folder, LAYERS, EXPERTS - 1)
    file.write(StepCounts(1, [[1] * (EXPERTS - 1)] * LAYERS))
    file.close()
    assert_error(experts("show", folder), "counts 15 experts in 3 blocks", "has 16 in 3", "copy the folder again")

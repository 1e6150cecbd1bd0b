"""Models of users in the trainer: each contract gives the losses of one process, and commands take their runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import plugins
from curves import config_of
from fourfold.data.loader import Loader
from fourfold.data.token_files import TokenFile
from fourfold.grid import Grid, Shape
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.planning import resolve
from harness import Ranks
from runs import assert_error, cli, column, train_arguments, trained

STEPS = 3


def config_for(name: str, tokens: str, folder: Path, shape: Shape, **changes: object) -> TrainConfig:
    given = {
        "model.seq": None,
        "data.sources": [{"path": tokens}],
        "optimizer.warmup": 0,
        "optimizer.schedule": "constant",
        "optimizer.weight_decay": 0.0,
        "optimizer.clip": float("inf"),
        "train.evaluate_every": 0,
        "plan.compare": False,
        **changes,
    }
    return config_of(name, "fp64", STEPS, folder, shape, given)


@pytest.fixture(scope="module")
def expected(tokens: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a plain loop with torch alone."""
    config = config_for("plugins:Tower", tokens, tmp_path_factory.mktemp("plain"), Shape())
    batch, section = config.batch, config.optimizer
    torch.manual_seed(config.train.seed)
    model = plugins.Tower().double()
    betas = section.beta1, section.beta2
    optimizer = torch.optim.AdamW(model.parameters(), section.learning_rate, betas, section.eps, weight_decay=0.0)
    sizes = dict(rows=batch.rows, seq=batch.seq, vocab=257, seed=config.train.seed, held_out=config.data.held_out)
    losses = []
    with Loader([TokenFile(Path(tokens))], [1.0], Grid.alone("cpu"), **sizes) as loader:
        for _ in range(STEPS):
            inputs, targets, *_ = loader.next()[0]
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["Tower", "TowerWithLoss", "TowerWithMean"])
def test_every_contract_gives_the_losses_of_a_plain_loop(
    ranks, name: str, tokens: str, expected: list[float], tmp_path: Path
) -> None:
    """On a grid that cuts weights and rows, in micro-batches, with losses inside of the model and beside it."""
    config = config_for(f"plugins:{name}", tokens, tmp_path, Shape(x=2, z=2), **{"batch.micro_steps": 2})
    ranks(4).run(trained, config, tmp_path / "run")
    assert column(tmp_path / "run", "step", "loss") == pytest.approx(expected, rel=1e-9)
    assert column(tmp_path / "run", "step", "mfu") == [None] * STEPS


def resumed(config: TrainConfig, folder: Path) -> None:
    """A job: the rest of a run."""
    trained(config, folder, resume=True)


@pytest.mark.slow
def test_a_run_of_a_transformers_model_resumes_on_another_grid(ranks, tokens: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    whole, half = tmp_path / "whole", tmp_path / "half"
    every = {"checkpoint.every": 2}
    ranks(4).run(trained, config_for("plugins:llama", tokens, tmp_path, Shape(x=2, data=2), **every), whole)
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / f"step-{STEPS:08}")
    ranks(4).run(resumed, config_for("plugins:llama", tokens, tmp_path, Shape(y=2, z=2), **every), half)
    assert column(half, "step", "loss") == pytest.approx(column(whole, "step", "loss"), rel=1e-9)
    assert column(half, "step", "step") == [1, 2, 3]


@pytest.fixture(scope="module")
def finished(one: Ranks, tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "own"
    options = ["--set", "model.options={width=8, dropout=0.1}", "--set", "train.evaluate_every=2"]
    options += ["--set", "plan.compare=true"]
    arguments = ["train", "--model", "plugins:Tower", "--device", "cpu", "--data", tokens, "--out", str(folder)]
    sizes = ["--set", "batch.rows=4", "--set", "batch.seq=12", "--set", "log.peak_flops=1e12", "--steps", "2"]
    (left,) = one.run(cli, *arguments, *sizes, *options)
    assert (left.code, left.err) == (0, "")
    assert "plugins:Tower: 0.0M parameters" in left.out
    assert "not priced: plugins:Tower builds a model of your own" in left.out
    assert "--prompt" not in left.out
    return folder


def test_commands_take_a_run_of_an_own_model_or_say_why_not(one: Ranks, finished: Path, tmp_path: Path) -> None:
    run = str(finished)
    assert read_config(finished / "config.toml").model.options == {"width": 8, "dropout": 0.1}
    (left,) = one.run(cli, "train", "--resume", run, "--steps", "3")
    assert (left.code, left.err) == (0, "")
    assert column(finished, "step", "step") == [1, 2, 3]
    assert json.loads((finished / "run.json").read_text())["parameters"] == 2 * 8 * 257 + 257 + 8 * 8 * 8 + 32 + 8
    for command in (
        ["report", run, "--out", str(tmp_path / "page.html")],
        ["doctor", run],
        ["checkpoint", "list", run],
    ):
        (left,) = one.run(cli, *command)
        assert (left.code, left.err) == (0, ""), command
    for command in (["sample", run], ["export", run, "--to", str(tmp_path / "hf")]):
        (left,) = one.run(cli, *command)
        assert_error(left, "plugins:Tower builds a model of your own; the planner, fourfold sample and fourfold export")


def test_an_own_model_is_compared_with_one_process(one: Ranks, tokens: str, tmp_path: Path) -> None:
    given = [*train_arguments(tokens, tmp_path / "run"), "--dtype", "fp64", "--compare-serial", "1"]
    given[given.index("gpt-tiny")] = "plugins:Tower"
    given = [word for index, word in enumerate(given) if "model.layers=1" not in given[index : index + 2]]
    (left,) = one.run(cli, *given)
    assert (left.code, left.err) == (0, "")
    assert "loss" in left.out


@pytest.mark.parametrize(
    ("name", "settings", "parts"),
    [
        (
            "plugins:TowerOfRows",
            [],
            ["forward(tokens) returned a tensor of shape (4,); it must take tokens"],
        ),
        ("plugins:Narrow", [], ["plugins:Narrow: forward returned logits of 256 ids, but the data has 257; give the"]),
        ("plugins:nothing", [], ["plugins:nothing returned str; it must return an nn.Module"]),
        ("plugins:Towr", [], ["plugins has no 'Towr' (did you mean 'Tower'?); give package.module:function"]),
        ("plugins:Tower", ["model.options={depth=2}"], ["plugins:Tower does not take them", "'depth'"]),
        ("plugins:Tower", ["model.layers=2"], ["layers=2 is a key of reference models; give plugins:Tower its arg"]),
        ("plugins:Tower", ["data.documents=true"], ["data.documents=true needs a model that takes positions"]),
        ("plugins:Tower", ["policy.loss_chunk=4"], ["loss_chunk=4: a module's own code makes all logits at once"]),
        ("plugins:Tower", ["model.vocab=9"], ["has ids 0 to 256, but the model has vocab=9"]),
    ],
)
def test_models_that_cannot_be_trained_are_errors_of_one_line(
    one: Ranks, tokens: str, tmp_path: Path, name: str, settings: list[str], parts: list[str]
) -> None:
    more = [word for setting in settings for word in ("--set", setting)]
    arguments = ["train", "--model", name, "--device", "cpu", "--data", tokens, "--out", str(tmp_path / "run")]
    sizes = ["--set", "batch.rows=4", "--set", "batch.seq=12", "--set", "log.peak_flops=1e12", "--steps", "1"]
    (left,) = one.run(cli, *arguments, *sizes, "--set", "plan.compare=false", *more)
    assert_error(left, *parts)


@pytest.mark.parametrize(("ranks", "sizes"), [(4, {"z": 4}), (6, {"x": 3, "z": 2})])
def test_a_grid_for_a_model_without_a_price_cuts_weights(ranks: int, sizes: dict[str, int]) -> None:
    """As FSDP does; ranks that the 8 rows cannot be divided among share rows."""
    said: list[str] = []
    asked = read_config(None, [("model.name", "plugins:Tower"), ("batch.rows", 8)])
    config = resolve(asked, ranks, on_gpu=False, memory_bytes=1 << 34, say=said.append)
    assert {axis: size for axis, size in config.grid.shape.sizes.items() if size > 1} == sizes
    (line,) = said
    assert "the planner cannot price plugins:Tower, so weights are cut over ranks" in line

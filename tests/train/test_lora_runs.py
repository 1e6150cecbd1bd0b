"""Runs with LoRA: they begin with imported weights, train pairs alone, resume, sample, and export merged weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from curves import config_of
from fourfold.checkpoint.format import MODEL, OPTIMIZER, read_record
from fourfold.checkpoint.load import read_full_tensor
from fourfold.grid import Shape
from fourfold.nn.lora import is_lora
from fourfold.train.config import TrainConfig
from harness import Ranks
from runs import assert_error, cli, column, train_arguments, trained

LORA = [
    "--set",
    "lora.rank=2",
    "--set",
    "lora.alpha=4",
    "--set",
    'lora.targets=["q", "down"]',
    "--set",
    "plan.compare=true",
]


@pytest.fixture(scope="module")
def tuned(one: Ranks, tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that began with imported weights and trained LoRA pairs; beside it is the folder that was imported."""
    home = tmp_path_factory.mktemp("lora")
    for command in (
        train_arguments(tokens, home / "base", "--set", "plan.compare=false", steps=1),
        ["export", str(home / "base"), "--to", str(home / "hf")],
        ["import", str(home / "hf"), "--out", str(home / "tuned")],
    ):
        (left,) = one.run(cli, *command)
        assert (left.code, left.err) == (0, ""), command
    batch = ["--set", "batch.rows=4", "--set", "batch.seq=12", "--set", "log.peak_flops=1e12", "--device", "cpu"]
    more = ["--data", tokens, "--steps", "2", "--set", "optimizer.learning_rate=0.01", "--set", "optimizer.warmup=0"]
    (left,) = one.run(cli, "train", "--resume", str(home / "tuned"), *more, *batch, *LORA)
    assert (left.code, left.err) == (0, "")
    assert "LoRA is priced as the training of all weights" in left.out
    facts = json.loads((home / "tuned" / "run.json").read_text())
    trained, whole = facts["trained_parameters"], facts["parameters"]
    assert f"LoRA of rank 2: {trained} of {whole} parameters are trained, those of the pairs" in left.out
    return home / "tuned"


def test_a_run_begins_with_imported_weights_and_trains_pairs_alone(tuned: Path) -> None:
    first, last = (tuned / "checkpoints" / f"step-{step:08}" for step in (0, 2))
    before, after = read_record(first), read_record(last)
    pairs = [name for name in after.names(MODEL) if is_lora(name)]
    assert set(after.names(MODEL)) - set(before.names(MODEL)) == set(pairs) != set()
    for name in before.names(MODEL):
        assert torch.equal(read_full_tensor(first, before, name), read_full_tensor(last, after, name)), name
    assert all(read_full_tensor(last, after, name).any() for name in pairs)  # B began with zeros
    assert all(is_lora(name) for name in after.names(OPTIMIZER))
    count = sum(read_full_tensor(last, after, name).numel() for name in pairs)
    assert json.loads((tuned / "run.json").read_text())["trained_parameters"] == count


def test_a_run_goes_on_and_is_sampled(one: Ranks, tuned: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(tuned, folder)
    (left,) = one.run(cli, "train", "--resume", str(folder), "--steps", "3")
    assert (left.code, left.err) == (0, "")
    assert column(folder, "step", "step") == [1, 2, 3]
    for command in (["sample", str(folder), "--tokens", "3"], ["report", str(folder)], ["doctor", str(folder)]):
        (left,) = one.run(cli, *command)
        assert (left.code, left.err) == (0, ""), command
    (left,) = one.run(cli, "train", "--resume", str(folder), "--steps", "4", "--set", "lora.rank=3")
    assert_error(left, "lora.rank was 2 in", "and is 3; a resumed run keeps it")
    (left,) = one.run(cli, "train", "--resume", str(tuned.parent / "base"), "--steps", "2", *LORA)
    assert_error(left, "lora.rank was 0 in", "and is 2; a resumed run keeps it")


def test_an_export_has_the_pairs_in_its_weights(one: Ranks, tuned: Path, tmp_path: Path) -> None:
    (left,) = one.run(cli, "export", str(tuned), "--to", str(tmp_path / "hf"))
    assert (left.code, left.err) == (0, "")
    assert "the LoRA pairs are merged into the weights" in left.out
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", tuned.parent / "hf"))
    assert merged.keys() == base.keys()
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert {name.rpartition("h.0.")[2] for name in changed} == {"attn.c_attn.weight", "mlp.c_proj.weight"}
    last = tuned / "checkpoints" / "step-00000002"
    a, b = (read_full_tensor(last, read_record(last), f"{MODEL}layers.0.mlp.down.lora.{name}") for name in "ab")
    (name,) = [name for name in changed if name.endswith("mlp.c_proj.weight")]
    torch.testing.assert_close(merged[name], base[name] + 2.0 * (b @ a).t())  # GPT-2 keeps weights transposed


def resumed(config: TrainConfig, folder: Path) -> None:
    """A job: the rest of a run."""
    trained(config, folder, resume=True)


@pytest.mark.slow
def test_a_run_resumes_on_another_grid(ranks, tokens: str, tmp_path: Path) -> None:
    changes = {
        "lora.rank": 2,
        "lora.dropout": 0.0,
        "data.sources": [{"path": tokens}],
        "checkpoint.every": 2,
        "plan.compare": False,
        "optimizer.learning_rate": 0.01,
    }
    whole, half = tmp_path / "whole", tmp_path / "half"
    ranks(4).run(trained, config_of("gpt-tiny", "fp64", 4, tmp_path, Shape(x=2, z=2), changes), whole)
    shutil.copytree(whole, half)
    shutil.rmtree(half / "checkpoints" / "step-00000004")
    ranks(4).run(resumed, config_of("gpt-tiny", "fp64", 4, tmp_path, Shape(y=2, data=2), changes), half)
    assert column(half, "step", "loss") == pytest.approx(column(whole, "step", "loss"), rel=1e-9)
    assert column(half, "evaluation", "loss")[-1] == pytest.approx(column(whole, "evaluation", "loss")[-1], rel=1e-9)


def test_lora_of_an_own_model_is_refused(one: Ranks, tokens: str, tmp_path: Path) -> None:
    arguments = [
        "train",
        "--model",
        "plugins:Tower",
        "--device",
        "cpu",
        "--data",
        tokens,
        "--out",
        str(tmp_path / "run"),
    ]
    (left,) = one.run(cli, *arguments, *LORA)
    assert_error(left, "lora.rank=2 is for reference models; plugins:Tower can return a module with adapters of peft")

"""`fourfold plan --hf`: a whole plan for models that Fourfold trains, and parameters and memory of any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.cli import main
from fourfold.commands.plan_memory import activation_bytes
from fourfold.models.config import config
from fourfold.models.count import TransformerSizes
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Candidate, Task, memory_of
from fourfold.policy import Policy
from fourfold.shape import Shape

MOE = dict(
    model_type="olmoe", hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
    intermediate_size=4096, vocab_size=32000, max_position_embeddings=8192, num_experts=64, num_experts_per_tok=2,
)  # fmt: skip
LLAMA = dict(
    model_type="llama", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
    vocab_size=256, max_position_embeddings=128,
)  # fmt: skip


def folder(path: Path, keys: dict[str, Any]) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(keys))
    return str(path)


def asked(model: str, *more: str, devices: str = "8") -> list[str]:
    return ["plan", "--hf", model, "--machine", "dgx-h100", "--devices", devices, *more]


def test_a_known_family_gets_a_whole_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--hf is another name of --model."""
    model = folder(tmp_path / "mine", LLAMA)
    found = []
    for option in ("--hf", "--model"):
        assert main(["plan", option, model, "--machine", "laptop", "--devices", "2", "--top", "1", "--json", "-"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["grids"] == found[1]["grids"]
    assert found[0]["model"]["name"] == "mine"


def test_the_memory_of_any_other_follows_from_its_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = folder(tmp_path / "moe", MOE), tmp_path / "memory.json"
    assert main(asked(model, "--tokens", "2T", "--price", "2.5", "--batch-tokens", "1M", "--json", str(out))) == 0
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    parameters, usable = found["model"]["parameters"], found["machine"]["usable_bytes"]
    assert [one["devices"] for one in found["state"]] == [1, 2, 4, 8]
    for one in found["state"]:
        assert one["bytes"] == one["weights"] + one["gradients"] + one["AdamW"] == 16 * parameters / one["devices"]
    least = found["least_devices"]
    assert 16 * parameters / least <= usable < 16 * parameters / (least - 1)
    (time,) = found["time"]
    active = found["model"]["active_parameters"] - 1024 * 32000
    rate = 8 * load_machine("dgx-h100").gemm["bf16"]
    assert time["least_hours"] == pytest.approx(6 * active * 2e12 / rate / 3600)
    assert time["least_cost"] == pytest.approx(2.5 * 8 * time["least_hours"])
    assert time["least_step_seconds"] == pytest.approx(6 * active * 1e6 / rate)
    assert "moe (olmoe), 6.54 G parameters" in said and "a token meets 301 M of them" in said
    assert f"At the least {least} devices hold them." in said
    assert "an estimate for one sequence of 8,192 tokens" in said and "Times are bounds" in said


def test_too_few_devices_are_said_to_be_too_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked(folder(tmp_path / "moe", MOE), devices="1..4")) == 0
    assert "At the least 2 devices hold them; 1 does not." in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b", "gpt-5b"])
def test_the_estimate_of_activations_is_close_to_the_plan_of_known_models(name: str) -> None:
    """The plan follows every tensor of a step; the estimate adds widths up."""
    model = config(name)
    task = Task(model, load_machine("dgx-h100"), 8, model.seq)
    planned = memory_of(task, Candidate(Shape(z=8), Policy(compute_dtype=torch.bfloat16), 1, 1)).kinds
    keys = ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp_hidden", "vocab")
    sizes = TransformerSizes(**{key: getattr(model, key) for key in keys}, gated=model.mlp == "swiglu")
    found = activation_bytes(sizes, model.seq, 2)
    assert found is not None
    assert found["most"] == pytest.approx(planned["activations"] + planned["logits"], rel=0.2)
    assert found["logits"] < found["least"] < found["most"] / 2


def test_a_config_without_the_usual_sizes_has_no_estimate_of_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(folder(tmp_path / "mamba", {"model_type": "mamba", "num_hidden_layers": 2}))) == 0
    assert "No estimate of activations" in capsys.readouterr().out


def test_a_model_of_two_halves_has_no_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(asked(folder(tmp_path / "t5", {"model_type": "t5"}))) == 0
    assert "No time: a token goes through one of two halves" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--html", "plan.html"], "--html needs the seconds of a step, and this model has none: num_experts=64"),
        (["--config", "run.toml"], "--config needs the seconds of a step"),
        (["--mtbf", "1000"], "--mtbf needs the seconds of a step"),
    ],
)
def test_what_needs_seconds_is_refused(
    more: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(asked(folder(tmp_path / "moe", MOE), *more)) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_dtype_that_the_machine_does_not_have_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = asked(folder(tmp_path / "moe", MOE), "--dtype", "bf16")
    assert main([word.replace("dgx-h100", "laptop") for word in words]) == 1
    assert "--dtype bf16: laptop has no rate of such products; it has fp32" in capsys.readouterr().err


def test_files_that_are_no_config_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "other.json").write_text('{"hidden_size": 64}')
    cases = {
        "empty": f"there is no file {tmp_path}/empty/config.json",
        "text": "is not JSON",
        "list.json": "it is not the config.json of a Hugging Face model",
        "other.json": "has no model_type",
        "missing/config.json": "there is no file",
        "owner/name": "nothing is fetched from the Hugging Face hub",
    }
    for name, said in cases.items():
        assert main(asked(str(tmp_path / name))) == 1
        assert said in " ".join(capsys.readouterr().err.split()), name

"""What a config leaves open: the same in `plan` and `train`, by the size of the model and the device."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from fourfold.cli import main
from fourfold.models.config import config as model_config
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.defaults import batch_tokens, checkpoint_minutes, learning_rate, sequence, warmup
from fourfold.train.planning import Hardware, remarks, resolve

GB = 1 << 30


def resolved(ranks: int, *, on_gpu: bool = True, say: Any = lambda _: None, **given: Any) -> TrainConfig:
    keys = [(key.replace("__", "."), value) for key, value in given.items()]
    return resolve(read_config(None, keys), ranks, on_gpu=on_gpu, memory_bytes=80 * GB, say=say)


def test_published_models_get_published_settings() -> None:
    """GPT-3's table 2.1 within a factor of two: batch and learning rate by size."""
    published = {"gpt-125m": (0.5e6, 6e-4), "gpt-1.4b": (1e6, 2e-4), "gpt-2.8b": (1e6, 1.6e-4), "gpt-10b": (2e6, 1e-4)}
    for name, (tokens, rate) in published.items():
        model = model_config(name)
        assert 0.5 < batch_tokens(model, on_gpu=True) / tokens < 2
        assert 0.5 < learning_rate(model) / rate < 2
    assert learning_rate(model_config("gpt-tiny")) == 1e-3
    assert [warmup(steps) for steps in (4, 100, 5000, 10**6)] == [4, 10, 100, 2000]


def test_checkpoints_are_frequent_where_failures_are() -> None:
    model = model_config("gpt-80b")
    minutes = [checkpoint_minutes(model, devices) for devices in (64, 1024, 16384)]
    assert minutes == sorted(minutes, reverse=True)
    assert (minutes[0], minutes[-1]) == (30, 5)


def test_a_large_model_on_gpus_trains_with_its_own_sequence_length() -> None:
    said: list[str] = []
    found = resolved(8, model__name="llama-3-8b", grid__z=8, say=said.append)
    assert (found.batch.seq, found.batch.tokens) == (8192, 1 << 21)
    assert found.batch.micro_steps > 1  # 26 rows of 8,192 tokens at once would not fit
    assert found.policy.recompute in ("none", "block")
    assert found.optimizer.learning_rate == 1.5e-4
    assert f"{found.batch.micro_steps} micro-batches" in said[0]
    assert resolve(found, 8, on_gpu=True, memory_bytes=80 * GB) == found  # nothing is open any more


def test_the_cpu_gets_a_batch_that_a_person_can_wait_for() -> None:
    found = resolved(4, on_gpu=False, model__name="gpt-125m", grid__x=2, grid__z=2)
    assert (found.batch.rows, found.batch.seq, found.batch.micro_steps) == (16, 128, 1)
    assert (found.policy.recompute, found.plan.compare) == ("none", False)


@pytest.mark.parametrize(("axis", "ranks"), [("z", 3), ("data", 5), ("data", 24)])
def test_rows_that_nobody_gave_fit_the_grid(axis: str, ranks: int) -> None:
    found = resolved(ranks, on_gpu=False, **{f"grid__{axis}": ranks})
    assert found.batch.rows % ranks == 0
    assert found.batch.rows >= 12


PIPED = [
    ({"pipe": 2}, 16, 4),
    ({"pipe": 4, "z": 2}, 16, 8),
    ({"pipe": 8, "data": 2}, 16, 8),  # a row for each micro-batch, which are fewer than two for each pipe rank
    ({"pipe": 3}, 18, 6),
]


@pytest.mark.parametrize(("axes", "rows", "micro_steps"), PIPED)
def test_pipe_ranks_get_two_micro_batches_each_where_the_rows_allow_it(
    axes: dict[str, int], rows: int, micro_steps: int
) -> None:
    given = {f"grid__{axis}": size for axis, size in axes.items()}
    found = resolved(prod(axes.values()), on_gpu=False, model__layers=8, **given)
    assert (found.batch.rows, found.batch.micro_steps) == (rows, micro_steps)
    with pytest.raises(ValueError, match=r"batch.rows=16 in micro_steps=1 gives 16 rows, .* use a multiple of 3 rows"):
        resolved(6, on_gpu=False, grid__pipe=2, grid__z=3, batch__rows=16)
    assert resolved(2, on_gpu=False, grid__pipe=2, batch__rows=7).batch.micro_steps == 7
    assert resolved(2, on_gpu=False, grid__pipe=2, batch__rows=30).batch.micro_steps == 5
    assert resolved(2, on_gpu=False, grid__pipe=2, batch__micro_steps=1).batch.micro_steps == 1


def test_what_is_given_stays() -> None:
    given = {
        "batch__rows": 24, "batch__seq": 96, "batch__micro_steps": 3, "policy__recompute": "attention",
        "optimizer__learning_rate": 2e-3, "optimizer__warmup": 3, "checkpoint__minutes": 0.0, "grid__z": 2,
    }  # fmt: skip
    found = resolved(2, **given)
    for name, value in given.items():
        section, key = name.split("__")
        assert getattr(getattr(found, section), key) == value


def test_a_given_grid_that_seems_too_small_takes_the_least_memory_and_says_so() -> None:
    said: list[str] = []
    found = resolved(8, model__name="llama-3-70b", grid__z=8, say=said.append)
    assert found.batch.micro_steps == found.batch.rows // 8
    assert found.policy.recompute == "block"
    assert "as little memory as possible" in said[0]


def test_plan_and_train_have_the_same_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "gpt-125m", "--machine", "dgx-h100", "--devices", "1", "--top", "1", "--json", "-"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    planned, trained = json.loads(out), resolved(1, model__name="gpt-125m")
    assert planned["batch_tokens"] == trained.batch.tokens
    assert f"seq = {trained.batch.seq}" in planned["config_toml"]
    assert f"{trained.batch.tokens:,} tokens per step, the default" in err
    assert sequence(model_config("gpt-125m"), on_gpu=True) == trained.batch.seq


# --- remarks before a run


def said_of(config: TrainConfig, device: str = "cpu") -> list[str]:
    return remarks(config, Hardware(config.grid.shape.world, device, 80 * GB, 8))


def test_a_tokenizer_that_does_not_match_the_vocabulary_is_said() -> None:
    (said,) = said_of(resolved(1, on_gpu=False, model__name="gpt-125m", train__steps=1))
    assert "the tokenizer bytes has 257 ids and the model 50,257" in said
    assert "model.vocab=257" in said
    assert said_of(resolved(1, on_gpu=False)) == []
    # tokens that somebody else made say nothing about this config's tokenizer
    tokens = resolved(1, on_gpu=False, model__name="gpt-125m", train__steps=1, data__sources=[{"path": "some.bin"}])
    assert said_of(tokens) == []


def test_a_run_of_hours_is_said() -> None:
    config = resolved(1, model__name="gpt-1.4b", data__sources=[{"path": "some.bin"}], train__steps=10**5)
    (said,) = said_of(config, "NVIDIA H100 80GB HBM3")
    assert said.startswith("100,000 steps will take about ")
    assert said_of(replace(config, train=replace(config.train, steps=5)), "NVIDIA H100 80GB HBM3") == []

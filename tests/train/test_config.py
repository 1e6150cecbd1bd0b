"""Configs: every key is checked by name, TOML and `--set` say the same, and `resolve` leaves nothing open."""

from __future__ import annotations

import argparse
import dataclasses
import random
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fourfold import models
from fourfold.commands.options import grid, setting
from fourfold.planner.machine import load_machine
from fourfold.policy import Overlap, Policy
from fourfold.schedule.named import named
from fourfold.schedule.stages import Stages
from fourfold.schedule.text import to_csv
from fourfold.train.config import (
    DataSection,
    GridSection,
    LogSection,
    OptimizerSection,
    PipelineSection,
    SourceSection,
    TrainConfig,
    TrainSection,
    read_config,
)
from fourfold.train.planning import Hardware, predict, resolve, with_pipeline
from fourfold.train.schema import keys_of, parse, sections_of, to_table

SECTIONS = {field.name: type(getattr(TrainConfig(), field.name)) for field in dataclasses.fields(TrainConfig)}
SOURCE = "data.sources[0]"

WHOLE, NUMBER, FLAG, TEXT = "a whole number", "a number", "true or false", "a text"
DTYPES = '"fp32", "bf16", "fp64"'

KEYS: dict[str, tuple[Any, Any, str]] = {
    "model.name": ("llama-tiny", 7, TEXT),
    "model.options": ({}, 7, "a table"),
    **{
        f"model.{name}": (12, 1.5, WHOLE)
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp_hidden", "vocab", "seq")
    },
    "model.norm": ("rms", "rmss", '"layer", "rms"'),
    "model.mlp": ("gelu", "swigloo", '"gelu", "swiglu"'),
    "model.positions": ("rope", "ropes", '"learned", "rope"'),
    **{f"grid.{name}": (1, 1.5, WHOLE) for name in ("context", "expert", "ex", "ez")},
    "policy.pad_experts": (True, 1, FLAG),
    "policy.assignment": ("rows", "row", '"auto", "rows", "documents"'),
    "policy.context_way": ("ring", 2, TEXT),
    "model.rope_theta": (5e5, "5e5", NUMBER),
    "model.rope_scaling": ("yarn", "yarm", '"none", "linear", "llama3", "yarn"'),
    "model.rope_original_seq": (4096, 1.5, WHOLE),
    **{f"model.rope_{name}": (2.0, "2", NUMBER) for name in ("factor", "slow", "fast", "attention")},
    **{f"model.{name}": (True, 1, FLAG) for name in ("bias", "tied", "qk_norm")},
    "model.dropout": (0.1, False, NUMBER),
    "model.attention_dropout": (0.1, False, NUMBER),
    "model.norm_eps": (1e-6, [1e-6], NUMBER),
    **{
        f"model.{name}": (2, 1.5, WHOLE)
        for name in ("experts", "top_k", "expert_hidden", "shared_hidden", "dense_layers", "groups", "top_groups")
    },
    "model.score": ("sigmoid", "sigmoids", '"softmax", "sigmoid"'),
    "model.normalize_top_k": (False, 1, FLAG),
    "model.moe_reads": ("previous", "previos", '"current", "previous"'),
    **{f"model.{name}": (0.5, "2", NUMBER) for name in ("route_scale", "capacity", "aux", "z_loss", "bias_rate")},
    "lora.rank": (8, 8.0, WHOLE),
    "lora.alpha": (32, "32", NUMBER),
    "lora.dropout": (0.1, "0.1", NUMBER),
    "lora.targets": (["q", "v"], "q", "a list"),
    **{f"grid.{axis}": (2, "2", WHOLE) for axis in ("x", "y", "z", "data", "pipe")},
    "grid.order": (["z", "x", "y", "data"], ["z", "x", "y", "date"], '"x", "y", "z", "data"'),
    "pipeline.schedule": ("zb-h1", 1, TEXT),
    "pipeline.chunks": (2, "2", WHOLE),
    "pipeline.placement": ("wave", "waves", '"loop", "wave"'),
    "pipeline.cuts": ([0, 2], 2, "a list"),
    "pipeline.recompute": (["none", "block"], ["blocks"], '"none", "attention", "block"'),
    "policy.dtype": ("fp64", "fp46", f'"auto", {DTYPES}'),
    "policy.reduce_dtype": ("bf16", "bf61", DTYPES),
    "policy.router_dtype": ("fp64", "fp46", '"fp32", "fp64"'),
    "policy.activations": ("replicated", "replicate", '"sharded", "replicated"'),
    "policy.recompute": ("block", "blocks", '"none", "attention", "block"'),
    "policy.gather_weights": ("step", "steps", '"use", "block", "step"'),
    **{
        f"policy.{name}": (True, "true", FLAG)
        for name in ("keep_gathered", "keep_weights", "offload", "shard_optimizer")
    },
    "policy.keep_casts": (False, "false", FLAG),
    "policy.loss_chunk": (64, 64.0, WHOLE),
    "policy.mlp_chunk": (64, 64.0, WHOLE),
    "policy.bucket_bytes": (1 << 20, True, WHOLE),
    "policy.compile": (False, "autos", '"auto"'),
    **{
        f"overlap.{name}": (False, "false", FLAG)
        for name in ("prefetch", "defer", "wgrad_behind_messages", "reduce_early", "receive_ahead")
    },
    "overlap.halves": (2, "2", WHOLE),
    "overlap.bytes_in_flight": (1 << 20, 1e6, WHOLE),
    "overlap.joint_bytes": (1 << 20, 1e6, WHOLE),
    "data.sources": ([{"path": "a.txt"}], "a.txt", "a list"),
    "data.tokenizer": ("tokenizer.json", 256, TEXT),
    "data.eod": ("<STOP>", 0.5, WHOLE),
    "data.documents": (True, 1, FLAG),
    "data.pack": ("whole", "wholes", '"windows", "whole"'),
    "data.bag_rows": (2, "2", WHOLE),
    "data.held_out": (0, "0.1", NUMBER),
    "data.changed": ("accept", "accepted", '"refuse", "accept"'),
    f"{SOURCE}.path": ("standard-library", 3, TEXT),
    f"{SOURCE}.weight": (2, "2", NUMBER),
    f"{SOURCE}.eod": (0, 0.5, WHOLE),
    f"{SOURCE}.column": ("body", 1, TEXT),
    **{f"batch.{name}": (4, 4.5, WHOLE) for name in ("rows", "seq")},
    "batch.micro_steps": (4, True, WHOLE),
    "optimizer.name": ("sgd", 1, TEXT),
    "optimizer.options": ({}, [0.9], "a table"),
    "optimizer.learning_rate": (1e-4, "1e-4", NUMBER),
    "optimizer.warmup": (0, 0.1, WHOLE),
    "optimizer.schedule": ("stable", "stabel", '"cosine", "stable", "constant"'),
    **{f"optimizer.{name}": (0.5, None, NUMBER) for name in ("decay", "floor", "beta1", "beta2", "eps")},
    "optimizer.weight_decay": (0, True, NUMBER),
    "optimizer.clip": (float("inf"), "inf", NUMBER),
    "optimizer.base_rows": (256, 2.5, WHOLE),
    "train.steps": (7, "7", WHOLE),
    "train.epochs": (1.5, "1", NUMBER),
    "train.minutes": (90, "90", NUMBER),
    "train.seed": (3, 3.0, WHOLE),
    "train.out": ("runs/a", 5, TEXT),
    **{f"train.{name}": (1, [1], WHOLE) for name in ("evaluate_every", "evaluate_batches", "max_skipped")},
    "train.callbacks": (["package.module:Class"], "package.module:Class", "a list"),
    "train.graph": ("off", "never", 'one of "auto", "off"'),
    **{f"checkpoint.{name}": (False, "no", FLAG) for name in ("save", "asynchronous")},
    **{f"checkpoint.{name}": (3, 3.0, WHOLE) for name in ("every", "keep_last", "keep_every")},
    "checkpoint.minutes": (5, "5", NUMBER),
    "log.tensorboard": (True, "yes", '"auto"'),
    "log.wandb": ("project", True, TEXT),
    "log.peak_flops": (1e15, "1e15", NUMBER),
    "log.companions_every": (0, 1.5, WHOLE),
    "plan.machine": ("perlmutter", 4, TEXT),
    "plan.compare": (False, "no", FLAG),
    "watch.deadline": (60.0, "soon", NUMBER),
    "watch.start": (60.0, "soon", NUMBER),
    "watch.replicas_every": (10, 1.5, WHOLE),
    "watch.not_finite": ("roll_back", "rollback", '"skip", "roll_back", "stop"'),
    "watch.spikes": ("skip", "skipp", '"tell", "skip", "roll_back", "stop"'),
    "watch.spike_above": (4.0, "4", NUMBER),
    "watch.grace": (60.0, "soon", NUMBER),
}
"""A value that is right, one of the wrong type or spelling, and what the error must offer."""


def table_of(key: str, value: Any) -> dict[str, Any]:
    """The nested table that has this one key."""
    if key.startswith(f"{SOURCE}."):
        name = key.rpartition(".")[2]
        return {"data": {"sources": [{"path": "a.txt", name: value}]}}
    section, _, name = key.partition(".")
    return {section: {name: value}}


def value_of(config: TrainConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    if key.startswith(f"{SOURCE}."):
        return getattr(config.data.sources[0], key.rpartition(".")[2])
    return getattr(getattr(config, section), name)


def test_the_table_above_has_every_key() -> None:
    keys = {f"{name}.{field.name}" for name, section in SECTIONS.items() for field in dataclasses.fields(section)}
    keys |= {f"{SOURCE}.{field.name}" for field in dataclasses.fields(SourceSection)}
    assert keys == set(KEYS)


UNITS = re.compile(
    r"\b(seconds|minutes|steps|tokens|sequences|batches|rows|bytes|features|FLOP/s|number|share|probability|norm|id|"
    r"how many|deviations)\b",
    re.IGNORECASE,
)
"""Words that say what a number counts or measures."""


def test_every_key_has_a_meaning_and_every_number_a_unit() -> None:
    """Both from the docstrings of fields: those of the sections, of the model's config and of the policies."""
    found = {key.path: key for key in keys_of(TrainConfig)}
    assert {path.replace("data.sources.", f"{SOURCE}.") for path in found} == set(KEYS)
    for path, key in found.items():
        assert re.match(r"[A-Z`]|auto ", key.meaning) and key.meaning.endswith("."), path
        assert "None" not in key.meaning.split(), f"{path}: a config has no None"
        if {"a whole number", "a number"} & set(key.allowed.split(", ")):
            assert UNITS.search(key.meaning), f"{path}: {key.meaning}"
    assert all(text.endswith(".") for text in sections_of(TrainConfig).values())
    assert list(sections_of(TrainConfig)) == list(SECTIONS)


def test_meanings_come_from_where_a_key_is_defined() -> None:
    found = {key.path: key for key in keys_of(TrainConfig)}
    assert found["model.kv_heads"].meaning.startswith("Number of key-value heads; fewer ")  # `ModelConfig`
    assert found["policy.shard_optimizer"].meaning.startswith("Shard gradients and optimizer state")  # `Policy`
    assert found["grid.z"].meaning.startswith("FSDP: the number of ranks ")  # the axes
    assert (found["train.graph"].allowed, found["train.graph"].default) == ('"auto", "off"', '"auto"')
    assert (found["data.eod"].allowed, found["data.eod"].default) == ("a text, a whole number", "not set")
    assert found["data.sources.path"].default == "none, it must be given"


@pytest.mark.parametrize("key", KEYS)
def test_a_key_takes_what_is_right_and_names_what_is_not(key: str) -> None:
    right, wrong, allowed = KEYS[key]
    found = value_of(parse(TrainConfig, table_of(key, right)), key)
    if key == "data.sources":
        assert found == (SourceSection("a.txt"),)
    else:
        assert (list(found) if isinstance(found, tuple) else found) == right
    with pytest.raises(ValueError, match=r"it (must be|is one of)") as caught:
        parse(TrainConfig, table_of(key, wrong))
    message = str(caught.value)
    assert key in message  # by its full path
    assert allowed in message
    assert not isinstance(wrong, str) or wrong in message
    if allowed.startswith('"') and key not in ("policy.compile", "log.tensorboard"):
        assert "did you mean" in message


@pytest.mark.parametrize("key", KEYS)
def test_a_misspelt_key_is_named_with_its_nearest_spelling(key: str) -> None:
    wrong = key + key[-1]
    with pytest.raises(ValueError, match="unknown key") as caught:
        parse(TrainConfig, table_of(wrong, KEYS[key][0]))
    name = key.rpartition(".")[2]
    assert f"unknown key {wrong} (did you mean {name!r}?); {key.rpartition('.')[0]} has " in str(caught.value)


def test_an_unknown_section_is_named_and_the_others_listed() -> None:
    with pytest.raises(ValueError, match=r"unknown key optimiser \(did you mean 'optimizer'\?\); it has model, grid"):
        parse(TrainConfig, {"optimiser": {"eps": 1.0}})
    with pytest.raises(ValueError, match=r"'batsh.rows' is not a key \(did you mean 'batch'\?\).*sections are model,"):
        read_config(None, [("batsh.rows", 4)])
    for key, said in (("rows", "is not a key.*write section.key=value"), ("batch", "is a section; write batch.KEY=")):
        with pytest.raises(ValueError, match=said):
            read_config(None, [(key, 4)])
    with pytest.raises(ValueError, match="batch is 3; it must be a table"):
        parse(TrainConfig, {"batch": 3})


def test_model_has_the_fields_of_the_models_and_a_name() -> None:
    ours = [field.name for field in dataclasses.fields(SECTIONS["model"])]
    assert ours == ["name", *(field.name for field in dataclasses.fields(models.ModelConfig)), "options"]
    assert parse(TrainConfig, {"model": {"name": "llama-tiny", "layers": 5}}).model.build() == models.config(
        "llama-tiny", layers=5
    )


def test_a_model_of_any_name_says_all_of_itself() -> None:
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "mlp_hidden": 16, "vocab": 9, "seq": 7}
    assert parse(TrainConfig, {"model": {"name": "mine", **sizes, "norm": "rms"}}).model.build() == models.ModelConfig(
        **sizes, norm="rms"
    )
    del sizes["heads"], sizes["vocab"]
    model = parse(TrainConfig, {"model": {"name": "gpt-tinny", **sizes}}).model
    with pytest.raises(ValueError, match=r"did you mean 'gpt-tiny'.*; a model of another name also needs heads, vocab"):
        model.build()


SENSELESS: list[tuple[str, Any, str]] = [
    ("batch.rows", -1, "rows=-1 must be at least 0"),
    ("batch.seq", -1, "seq=-1 must be at least 0"),
    ("batch.micro_steps", -1, "micro_steps=-1 must be at least 0"),
    ("checkpoint.every", -1, "every=-1 must be at least 0"),
    ("checkpoint.keep_every", -2, "keep_every=-2 must be at least 0"),
    ("checkpoint.keep_last", 0, "keep_last=0 must be at least 1"),
    ("data.sources", [], "sources is empty"),
    ("data.sources", [{"path": "a", "weight": 0.0}], "weight"),
    ("data.sources", [{"weight": 1.0}], "path"),
    ("data.held_out", 1.0, "held_out=1.0 must be"),
    ("data.held_out", float("nan"), "data.held_out = nan; it must be a number"),
    ("grid.x", 0, "x"),
    ("grid.z", -2, "z=-2"),
    ("grid.order", ["x", "x", "y", "z"], "order.*must name each axis once"),
    ("log.peak_flops", -1.0, "peak_flops"),
    ("log.companions_every", -1, "companions_every=-1 must be at least 0"),
    ("lora.rank", -1, "rank=-1 must be at least 0"),
    ("model.heads", 7, "heads=7"),
    ("model.layers", 0, "layers=0 must be at least 1"),
    ("model.name", "gpt-tinny", r"no model 'gpt-tinny' \(did you mean 'gpt-tiny'\?\)"),
    ("model.seq", 0, "seq=0"),
    ("model.options", {"width": 8}, "model.options={'width': 8} are for a function, package.module:function"),
    ("optimizer.base_rows", 0, "base_rows"),
    ("optimizer.beta1", 2.0, "beta1"),
    ("optimizer.name", "adam", r"name='adam' is no optimizer \(did you mean 'adamw'\?\)"),
    ("optimizer.options", {"momentum": 0.9}, "are for other optimizers; adamw has the keys beta1"),
    ("optimizer.clip", 0.0, "clip=0.0 must be above 0"),
    ("optimizer.clip", float("nan"), "optimizer.clip = nan; it must be a number"),
    ("optimizer.decay", 0.0, "decay=0.0 must be above 0"),
    ("optimizer.eps", -1.0, "eps"),
    ("optimizer.floor", 2.0, "floor=2.0"),
    ("optimizer.learning_rate", float("nan"), "learning_rate"),
    ("optimizer.learning_rate", -1.0, "learning_rate"),
    ("optimizer.warmup", -1, "warmup=-1"),
    ("optimizer.weight_decay", -0.1, "weight_decay"),
    ("overlap.bytes_in_flight", 0, "overlap.bytes_in_flight=0 must be at least 1"),
    ("overlap.joint_bytes", -1, "joint_bytes=-1 must be a number of bytes, or 0"),
    ("overlap.halves", 3, "overlap.halves=3 must be 1 or 2"),
    (
        "pipeline.schedule",
        "1f1bb",
        r"schedule='1f1bb' is no schedule \(did you mean '1f1b'\?\); choose from auto, found",
    ),
    ("pipeline.schedule", "blocks:0", "schedule='blocks:0' is no schedule"),
    ("pipeline.schedule", "zb-h1", r"pipeline: schedule='zb-h1' needs a grid with pipe ranks; add pipe=2 to --grid"),
    ("pipeline.chunks", 0, "chunks=0 must be at least 1"),
    ("pipeline.cuts", [0, 1], r"pipeline: cuts=\(0, 1\) needs a grid with pipe ranks"),
    ("policy.bucket_bytes", 0, "bucket_bytes=0"),
    ("policy.loss_chunk", -1, "loss_chunk=-1"),
    ("policy.mlp_chunk", -1, "mlp_chunk=-1"),
    ("train.evaluate_batches", 0, "evaluate_batches=0 must be at least 1"),
    ("train.evaluate_every", -1, "evaluate_every=-1 must be at least 0"),
    ("train.max_skipped", 0, "max_skipped=0 must be at least 1"),
    ("train.steps", 0, "steps=0 must be at least 1"),
    ("train.epochs", 0.0, "epochs=0.0 must be above 0 and finite"),
    ("train.minutes", float("inf"), "minutes=inf must be above 0 and finite"),
    ("watch.deadline", 0.0, "deadline=0.0 must be above 0"),
    ("watch.start", float("nan"), "watch.start = nan; it must be a number"),
    ("watch.grace", -1.0, "grace=-1.0 must be above 0"),
    ("watch.replicas_every", -1, "replicas_every=-1 must be at least 0"),
    ("watch.spike_above", float("inf"), "spike_above=inf must be at least 0"),
]


@pytest.mark.parametrize(("key", "value", "message"), SENSELESS)
def test_what_makes_no_sense_is_refused_before_anything_starts(key: str, value: Any, message: str) -> None:
    """By the time a config is resolved: not in the middle of a run, and not by another error than ValueError."""
    with pytest.raises(ValueError, match=message) as caught:
        resolved = resolve(read_config(None, [(key, value)]), 1, on_gpu=False, memory_bytes=1 << 34)
        _ = resolved.schedule.at(1)
    assert "__init__" not in str(caught.value)


# --- pipelines


def piped(layers: int = 4, pipe: int = 2, **keys: Any) -> Policy:
    changes = [("model.layers", layers), ("grid.pipe", pipe), *((f"pipeline.{key}", keys[key]) for key in keys)]
    return resolve(read_config(None, changes), pipe, on_gpu=False, memory_bytes=1 << 34).build_policy()


def test_keys_of_a_pipeline_become_stages_and_a_schedule(tmp_path: Path) -> None:
    """Chunks and placement follow from the schedule, from a file or from the cuts, where nobody gives them."""
    assert piped().stages == Stages((0, 3, 6), (0, 1))
    assert piped(schedule="interleaved").stages == Stages.even(4, 2, 2)
    assert piped(schedule="v-half").stages == piped(chunks=2, placement="wave").stages == Stages.even(4, 2, 2, "wave")
    assert piped(cuts=[0, 4], recompute=["block", "none"]).stages == Stages((0, 4, 6), (0, 1), ("block", "none"))
    assert piped(cuts=[0, 2, 3, 4]).stages == Stages((0, 2, 3, 4, 6), (0, 1, 0, 1))
    written = named("v-half", 2, 2, 4)
    (tmp_path / "mine.csv").write_text(to_csv(written))
    found = piped(schedule=str(tmp_path / "mine.csv"))
    assert (found.stages, found.schedule) == (Stages.even(4, 2, 2, "wave"), written)


UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"pipe": 8}, "pipe=8 leaves pipe rank 4 without any of the 4 layers; use pipe=4 or less"),
    ({"cuts": [0, 3, 4]}, r"cuts=\[0, 3, 4\] are the first units of 3 stages, but there are 2; give as many"),
    ({"cuts": [1, 3]}, r"cuts=\[1, 3\] must begin with 0, the embedding.* the model has 6 units"),
    ({"cuts": [0, 6]}, "the last computes the loss and needs the head"),
    ({"cuts": [0, 3, 3, 3], "placement": "wave"}, "pipe=2 leaves pipe rank 1 without any of the 4 layers; give it one"),
    ({"recompute": ["block"]}, "recompute has 1 values, but there are 2 stages; give one for each"),
    ({"schedule": "v-half", "chunks": 1}, "v-half with chunks=1: it needs chunks=2"),
    ({"schedule": "v-half", "placement": "loop"}, "the schedule places its stages on pipe ranks 0, 1, 1, 0, the model"),
    ({"schedule": "none.csv"}, "schedule=none.csv: there is no such file; `fourfold schedule show"),
    ({"schedule": "0F0,0B0\n1F0,1B0\n", "chunks": 1}, "says which rank holds which stage; leave chunks out"),
    ({"schedule": "0F0,0B0\n1F0,1B0\n"}, "the schedule is for 1 micro-batches, the step has 4"),
    ({"schedule": "0F0,0B0\n"}, "is for 1 pipe ranks, but the grid has pipe=2"),
]


@pytest.mark.parametrize(("keys", "message"), UNFIT)
def test_a_pipeline_that_does_not_fit_is_refused_before_anything_starts(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        piped(**keys)
    assert str(caught.value).startswith("pipeline: ")


def test_a_stored_pipeline_names_the_copy_of_its_schedule(tmp_path: Path) -> None:
    config = read_config(None, [("grid.pipe", 2), ("pipeline.schedule", "somewhere/else.csv")])
    (tmp_path / "config.toml").write_text(config.stored(tmp_path).toml())
    (tmp_path / "schedule.csv").touch()
    assert read_config(tmp_path / "config.toml").pipeline.schedule == str(tmp_path / "schedule.csv")


def test_a_run_that_resumes_on_other_pipe_ranks_forgets_its_stages(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[grid]\npipe = 2\n[pipeline]\nschedule = "zb-h1"\ncuts = [0, 2]\n')
    for pipe, kept in ((2, True), (4, False), (1, False)):
        found = read_config(path, [("grid.pipe", pipe)], forget_grid=True, forget_stages=True)
        assert (found.pipeline.given == {"schedule": "zb-h1", "cuts": (0, 2)}) is kept
    assert read_config(path, [("grid.pipe", 4)], forget_grid=True).pipeline.given  # a new run is told what does not fit


def test_what_the_planner_chooses_for_a_pipeline_goes_into_the_config() -> None:
    config = resolve(read_config(None, [("grid.pipe", 2), ("model.layers", 4)]), 2, on_gpu=False, memory_bytes=1 << 34)
    wave, uneven = Stages.even(4, 2, 2, "wave"), Stages((0, 4, 6), (0, 1), ("block", "none"))
    for stages, schedule in ((wave, "v-half"), (uneven, "zb-h1"), (wave, named("v-half", 2, 2, 4))):
        chosen = replace(config.build_policy(), stages=stages, schedule=schedule)
        assert with_pipeline(config, chosen).build_policy() == chosen
    given = replace(config, pipeline=PipelineSection("gpipe"))
    assert with_pipeline(given, chosen) is given


def test_a_model_of_the_user_has_no_stages() -> None:
    config = read_config(None, [("grid.pipe", 2), ("model.name", "strange:model")])
    with pytest.raises(
        ValueError, match=r"grid.pipe=2 is for reference models, and strange:model is a model of your own"
    ):
        resolve(config, 2, on_gpu=False, memory_bytes=1 << 34)


# --- TOML and the command line


def random_value(draw: random.Random, key: str) -> Any:
    right, _, allowed = KEYS[key]
    if isinstance(right, bool):
        return draw.random() < 0.5
    if isinstance(right, float):
        shares = [1e-08, 0.1, 1 / 3, 5e-324, 0.9999999999999999]  # many keys are parts of 1
        return draw.choice(shares if right < 1 else [1e-08, 2.0, 1e22, 1.7976931348623157e308])
    if isinstance(right, int):
        largest = 1 << 16 if key.startswith("batch.") else 1 << 40  # more tokens in a step are refused
        return draw.choice([1, 2] if key == "overlap.halves" else [1, 2, 3, largest])
    if allowed == TEXT:
        letters = "aZ0 .-_/\\\"'#=[]{}\n\t\r\0\x1b\u2028éß猫😀"
        return "a" + "".join(draw.choices(letters, k=draw.randrange(12)))  # an empty text is refused
    return right


def random_config(draw: random.Random) -> TrainConfig:
    table: dict[str, Any] = {}
    for key in KEYS:
        # others must fit them, or they known names
        fitting = (
            *("batch.micro_steps", "optimizer.name", "pipeline.schedule"),
            *("grid.context", "grid.expert", "grid.ex", "grid.ez"),
        )
        alone = key.startswith("data.sources") or key in fitting
        if draw.random() < 0.5 and not alone:
            section, _, name = key.partition(".")
            table.setdefault(section, {})[name] = random_value(draw, key)
    table.setdefault("data", {})["held_out"] = draw.choice([0.0, 1e-08, 0.999])
    table.setdefault("optimizer", {})["clip"] = draw.choice([float("inf"), 1e-08, 3.0])
    table["data"]["sources"] = [
        {name: random_value(draw, f"{SOURCE}.{name}") for name in ("path", "weight", "eod")[: draw.randrange(1, 4)]}
        for _ in range(draw.randrange(1, 4))
    ]
    return parse(TrainConfig, table)


@pytest.mark.parametrize("seed", range(40))
def test_toml_reads_back_as_it_was(seed: int) -> None:
    config = random_config(random.Random(seed))
    for explained in (False, True):
        assert parse(TrainConfig, tomllib.loads(config.toml(explained=explained))) == config
    assert parse(TrainConfig, to_table(config)) == config


def test_toml_takes_every_character() -> None:
    config = replace(TrainConfig(), train=TrainSection(out="".join(map(chr, range(0x2100)))))
    assert parse(TrainConfig, tomllib.loads(config.toml())) == config


def test_a_file_reads_back_and_the_command_line_wins(tmp_path: Path) -> None:
    config = replace(
        TrainConfig(),
        grid=GridSection(x=2, z=2, order=("z", "x", "y", "data", "pipe")),
        data=DataSection(sources=(SourceSection("a"), SourceSection('b "c"\n猫', 0.5, 3))),
        train=TrainSection(out="ünï", steps=5),
        optimizer=OptimizerSection(clip=float("inf"), eps=1e-08),
        log=LogSection(tensorboard=False, peak_flops=1e15),
    )
    path = tmp_path / "c.toml"
    path.write_text(config.toml(), encoding="utf-8")
    assert read_config(path) == config
    changed = read_config(path, [("train.steps", 9), ("data.sources", [{"path": "d"}])])
    assert changed == replace(
        config, train=TrainSection(out="ünï", steps=9), data=DataSection(sources=(SourceSection("d"),))
    )
    # another grid is another grid: no axis of the file's remains
    other = read_config(path, [("grid.y", 2)], forget_grid=True)
    assert str(other.grid.shape) == "y=2 order=z,x,y,data"
    assert read_config(path, forget_grid=True).grid.auto


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the config .*absent\.toml does not exist"):
        read_config(tmp_path / "absent.toml")
    path = tmp_path / "c.toml"
    for content, message in (
        (b"batch = [", "is not valid TOML"),
        (b"\xff\xfe", "is not valid TOML"),
        (b"[batch]\nrow = 3\n", r"unknown key batch.row \(did you mean 'rows'\?\)"),
        (b"batch = 3\n", "batch is 3; it must be a table"),
    ):
        path.write_bytes(content)
        for changes in ([], [("batch.seq", 8)]):
            with pytest.raises(ValueError, match=rf"c\.toml.*{message}"):
                read_config(path, changes)


def test_settings_of_the_command_line() -> None:
    for text, value in (
        ("batch.rows=32", 32),
        ("optimizer.learning_rate=3e-4", 3e-4),
        ("optimizer.clip=inf", float("inf")),
        ("checkpoint.save=false", False),
        ("policy.dtype=fp64", "fp64"),
        ('policy.dtype="fp64"', "fp64"),
        ("data.tokenizer=a=b.json", "a=b.json"),
        ("train.out=", ""),
        ('grid.order=["z", "x", "y", "data"]', ["z", "x", "y", "data"]),
        ('data.sources=[{path="a", weight=2}]', [{"path": "a", "weight": 2}]),
    ):
        assert setting(text) == (text.partition("=")[0], value)
    with pytest.raises(argparse.ArgumentTypeError, match=r"has no value; write section.key=value"):
        setting("batch.rows")


def test_grids_of_the_command_line() -> None:
    assert grid("x=2,z=2") == {"x": 2, "z": 2}
    assert grid("data=12") == {"data": 12}
    assert grid("auto") == {}
    for wrong in ("", "x", "x=", "x=0", "x=-1", "x=2;z=2", "w=2", "x=2,x=2", "x=2,", "x=two"):
        with pytest.raises(argparse.ArgumentTypeError, match=r"not an axis with a size; write auto, or for example"):
            grid(wrong)


# --- resolve


def resolved(
    changes: dict[str, Any], ranks: int = 1, *, on_gpu: bool = False, memory_bytes: int = 1 << 34
) -> TrainConfig:
    return resolve(read_config(None, list(changes.items())), ranks, on_gpu=on_gpu, memory_bytes=memory_bytes)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_auto_follows_the_device_and_what_is_given_stays(on_gpu: bool) -> None:
    found = resolved({}, on_gpu=on_gpu)
    assert (found.policy.dtype, found.policy.compile) == (("bf16", True) if on_gpu else ("fp32", False))
    for dtype, compiled in (("fp64", True), ("fp32", False), ("bf16", True)):
        given = resolved({"policy.dtype": dtype, "policy.compile": compiled}, on_gpu=on_gpu)
        assert (given.policy.dtype, given.policy.compile) == (dtype, compiled)


def test_the_model_gets_the_overlap_asked_for() -> None:
    assert resolved({}).build_policy().overlap == Overlap()
    given = {"overlap.halves": 2, "overlap.prefetch": False, "overlap.bytes_in_flight": 1 << 30}
    found = resolved({**given, "policy.keep_weights": True}).build_policy()
    assert found.overlap == Overlap(halves=2, prefetch=False, bytes_in_flight=1 << 30)
    assert found.keep_weights


LARGER = [pytest.param(*each, marks=pytest.mark.slow) for each in ((1, False), (4, False), (6, False), (8, True))]


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize(("ranks", "on_gpu"), [(2, True), (3, False), *LARGER])
def test_an_automatic_grid_fits(name: str, ranks: int, on_gpu: bool) -> None:
    for activations, rows, micro_steps in (
        ("sharded", 16, 1),
        ("replicated", 16, 4),
        ("replicated", 6, 2),
        ("sharded", 1, 1),
    ):
        given = {"model.name": name, "policy.activations": activations}
        given |= {"batch.rows": rows, "batch.micro_steps": micro_steps}
        found = resolved(given, ranks, on_gpu=on_gpu)
        shape = found.grid.shape
        assert shape.world == ranks
        assert found.model.build().misfit(shape, found.build_policy()) is None
        assert rows // micro_steps % (shape.data * shape.z) == 0
        assert resolve(found, ranks, on_gpu=on_gpu, memory_bytes=1 << 34) == found


def test_an_automatic_grid_fits_the_memory() -> None:
    """With a byte less than the fastest grid needs another one is taken, which needs less; with little, none is."""

    def found_with(memory_bytes: int) -> tuple[TrainConfig, int]:
        given = {"batch.micro_steps": 1, "policy.recompute": "none"}
        found = resolved(given, 2, on_gpu=True, memory_bytes=memory_bytes)
        price = predict(found, Hardware(2, "an unknown GPU", memory_bytes, 1)).price
        return found, price.memory.total + price.task.machine.reserve

    first, needed = found_with(1 << 40)
    second, less = found_with(needed - 1)
    assert second.grid.shape != first.grid.shape
    assert less < needed
    with pytest.raises(
        ValueError, match=r"--grid auto: the model fits on no grid of 2 .*or give a grid, such as --grid"
    ):
        found_with(load_machine("dgx-h100").reserve + 1000)


def test_why_a_grid_is_taken_is_said_once_in_one_line() -> None:
    said: list[str] = []
    config = read_config(None, [])
    found = resolve(config, 4, on_gpu=False, memory_bytes=1 << 34, say=said.append)
    (line,) = said
    assert "\n" not in line
    assert line.startswith(f"grid {found.grid.shape} by the planner: ")
    assert " on laptop; next of " in line
    assert "laptop: estimates; `fourfold calibrate` measures this machine" in line
    resolve(found, 4, on_gpu=False, memory_bytes=1 << 34, say=said.append)  # a grid that is given
    resolve(config, 1, on_gpu=False, memory_bytes=1 << 34, say=said.append)  # nothing to choose
    assert len(said) == 1


@pytest.mark.slow
def test_a_grid_is_found_on_the_machine_that_is_named() -> None:
    said: list[str] = []
    for name, part in (("perlmutter", " on perlmutter; "), ("auto", "no packaged machine has an unknown GPU")):
        config = read_config(None, [("plan.machine", name)])
        resolve(config, 4, on_gpu=True, memory_bytes=1 << 34, say=said.append)
        assert part in said.pop()
    with pytest.raises(ValueError, match=r"no machine 'perlmuter' \(did you mean 'perlmutter'\?\)"):
        resolved({"plan.machine": "perlmuter"}, 4)
    assert resolved({"plan.machine": "perlmuter", "grid.x": 2}, 2).grid.shape.x == 2  # nothing is planned


def test_a_given_grid_stays_with_its_order() -> None:
    found = resolved({"grid.x": 2, "grid.order": ["data", "z", "y", "x"]}, 2)
    assert str(found.grid.shape) == "x=2 order=data,z,y,x"


def test_an_automatic_grid_keeps_the_order_asked_for() -> None:
    assert resolved({"grid.order": ["data", "z", "y", "x"]}, 4).grid.shape.order == ("data", "z", "y", "x", "pipe")


def test_rows_that_do_not_divide_are_refused_with_a_way_out() -> None:
    with pytest.raises(ValueError, match=r"batch.rows=16 .*not divisible by data\*z = 3\*1; use a multiple of 3 rows"):
        resolved({"grid.data": 3, "batch.rows": 16}, 3)
    given = {"grid.z": 2, "grid.data": 2, "batch.rows": 8, "batch.micro_steps": 4}
    with pytest.raises(ValueError, match=r"micro_steps=4 gives 2 rows.*use a multiple of 16 rows") as caught:
        resolved(given, 4)
    assert "2*2" in str(caught.value)
    assert resolved({**given, "batch.rows": 16}, 4).grid.shape.world == 4  # the way out is one
    with pytest.raises(ValueError, match=r"--grid auto: no grid of 7 devices .*or give a grid, such as --grid z=7"):
        resolved({"batch.rows": 16}, 7)
    assert resolved({}, 7).batch.rows % 7 == 0  # rows that nobody gave fit
    with pytest.raises(ValueError, match=r"heads=24 is not divisible by.*grids of 5 ranks that fit: z=5|data=5"):
        resolved({"grid.x": 5}, 5)


def test_learned_positions_reach_as_far_as_a_sequence() -> None:
    assert resolved({"batch.seq": 300}).model.build().seq == 300
    assert resolved({"batch.seq": 16}).model.build().seq == models.config("gpt-tiny").seq
    assert resolved({"batch.seq": 16, "model.seq": 16}).model.build().seq == 16
    with pytest.raises(ValueError, match="seq"):  # learned positions know no token beyond theirs
        resolved({"batch.seq": 64, "model.seq": 32})


@pytest.mark.slow
def test_a_resolved_config_resolves_to_itself() -> None:
    draw = random.Random(0)
    for _ in range(4):
        given: dict[str, Any] = {
            "model.name": draw.choice(["gpt-tiny", "llama-tiny"]),
            "policy.dtype": draw.choice(["auto", "fp64"]),
            "policy.recompute": draw.choice(["none", "block"]),
            "batch.seq": draw.choice([32, 500]),
        }
        on_gpu, ranks = draw.random() < 0.5, draw.choice([1, 2, 3, 4, 8])
        once = resolved(given, ranks, on_gpu=on_gpu)
        assert resolve(once, ranks, on_gpu=on_gpu, memory_bytes=1 << 34) == once
        read = parse(TrainConfig, tomllib.loads(once.toml()))
        assert resolve(read, ranks, on_gpu=not on_gpu, memory_bytes=1 << 20) == once  # nothing is left to the device


def test_one_option_of_a_table_is_set_beside_the_others(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[model]\nname = "own:make"\n[model.options]\ndepth = 2\nwidth = 8\n')
    config = read_config(
        path, [("model.options.width", 16), ("optimizer.options.momentum", 0.9), ("optimizer.name", "sgd")]
    )
    assert config.model.options == {"depth": 2, "width": 16}
    assert config.optimizer.options == {"momentum": 0.9}
    with pytest.raises(ValueError, match=r"unknown key batch\.rows\.width"):
        read_config(path, [("batch.rows.width", 16)])

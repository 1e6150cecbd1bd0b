"""Names from other frameworks are answered with ours: in a config, after --set, as an option, as an axis of a grid."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fourfold as ff
from fourfold import cli
from fourfold.commands.options import grid, setting
from fourfold.synonyms import Synonym, Writing, explain_synonym, synonyms
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.schema import keys_of, parse

KEYS = {key.path: key for key in keys_of(TrainConfig)}
ENTRIES = list({id(entry): entry for entry in synonyms().values()}.values())


def options_of_train() -> dict[str, Any]:
    (commands,) = (action for action in cli.parser()._actions if action.choices)
    return commands.choices["train"]._option_string_actions  # type: ignore[index,union-attr]


def samples(entry: Synonym) -> list[Any]:
    """Values of other frameworks that the entry translates."""
    number = 0.5 if KEYS[entry.key].allowed == "a number" else 2 if not entry.text else "a name"  # type: ignore[index]
    return [*entry.values, *([] if entry.how or (entry.values and entry.key != "optimizer.clip") else [number])]


def test_the_table_names_what_exists() -> None:
    options = options_of_train()
    for entry in ENTRIES:
        assert entry.words and all(re.fullmatch(r"[a-z0-9_.]+", word) for word in entry.words), entry
        assert not (entry.key and entry.option)
        assert entry.key or entry.option or entry.how, entry
        assert entry.key is None or entry.key in KEYS, entry
        assert entry.option is None or entry.option in options, entry
    assert len(synonyms()) > 300


def test_no_word_hides_a_key_of_ours() -> None:
    names = {path.rpartition(".")[2]: path for path in KEYS}
    for word, entry in synonyms().items():
        assert word not in KEYS
        assert word not in names or entry.key in (names[word], None), word


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.key], ids=lambda entry: entry.words[0])
def test_what_an_answer_says_to_write_is_read(entry: Synonym) -> None:
    word = entry.words[0]
    for value in samples(entry):
        said = entry.answer(word, value, Writing.COMMAND)
        written = re.fullmatch(rf"{word} is {entry.key}: write --set (.*)", said)
        assert written, said
        read = read_config(None, [setting(*shlex.split(written[1]))])
        found = re.fullmatch(r".*: write (.*) in \[(\w+)\]", entry.answer(word, value, Writing.CONFIG))
        assert found, value
        assert parse(TrainConfig, {found[2]: tomllib.loads(found[1])}) == read


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "train.learningRate=1",
            ".*learningRate is optimizer.learning_rate: write --set optimizer.learning_rate=1",
        ),
        ("perDeviceTrainBatchSize=4", "perDeviceTrainBatchSize is batch.rows: it counts the sequences"),
        ("train.compile=true", "train.compile is policy.compile: write --set policy.compile=true"),
        ("lora.r=8", "lora.r is lora.rank: write --set lora.rank=8"),
        ("train.rows=8", r"unknown key train.rows \(did you mean batch.rows\?\)"),
        ("lr=3e-4", "lr is optimizer.learning_rate: write --set optimizer.learning_rate=0.0003"),
        ("max_steps=500", "max_steps is train.steps: write --set train.steps=500"),
        ("tp=2", "tp is grid.x: write --set grid.x=2"),
        ("dp=4", "dp is grid.data: write --set grid.data=4"),
        ("fsdp=8", "fsdp is grid.z: write --set grid.z=8"),
        ("fsdp=true", "fsdp is grid.z, the number of ranks that share the stored weights .*: write --set grid.z=N"),
        ("batch_size=8", "batch_size is batch.rows: it counts the sequences of a whole step, over all ranks"),
        ("seq_len=4096", "seq_len is batch.seq: write --set batch.seq=4096"),
        ("gradient_accumulation_steps=4", ".* is batch.micro_steps: write --set batch.micro_steps=4"),
        ("grad_clip=0", "grad_clip is optimizer.clip: write --set optimizer.clip=inf"),
        ("warmup_steps=10", "warmup_steps is optimizer.warmup: write --set optimizer.warmup=10"),
        ("bf16=true", "bf16 is policy.dtype: write --set policy.dtype=bf16"),
        ("bf16=maybe", "bf16 is policy.dtype: write --set policy.dtype=bf16 or fp32"),
        ("wd=0.1", "wd is optimizer.weight_decay: write --set optimizer.weight_decay=0.1"),
        ("parallelism.tensor_parallel_degree=2", ".*tensor_parallel_degree is grid.x: write --set grid.x=2"),
        ("optimizer.lr=1", "optimizer.lr is optimizer.learning_rate: write --set optimizer.learning_rate=1"),
        ("reshard_after_forward=false", ".* is policy.keep_weights: write --set policy.keep_weights=true"),
        ("pp=2", "pp is grid.pipe: write --set grid.pipe=2"),
        ("virtual_pipeline_model_parallel_size=2", ".* is pipeline.chunks: write --set pipeline.chunks=2"),
        ("pipeline_parallel_schedule=Interleaved1F1B", ".* write --set pipeline.schedule=interleaved"),
        ("pipeline_parallel_schedule=ZBVZeroBubble", ".* is pipeline.schedule: the names are auto, gpipe, 1f1b"),
        ("devices=8", "devices is --ranks: write --ranks 8"),
        ("precision=16-mixed", "precision is policy.dtype: it is bf16, fp32 or fp64; fp16 would need loss scaling"),
        ("output_dir='my run'", "output_dir is train.out: write --set train.out='my run'"),
        ("data_parallel_shard_degree=-1", ".* is grid.z, the number of .*: write --set grid.z=N"),
    ],
)
def test_a_setting_from_elsewhere_is_answered_with_ours(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{said}"):
        read_config(None, [setting(given)])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--lr 3e-4",
            "there is no option --lr; lr is optimizer.learning_rate: write --set optimizer.learning_rate=0.0003",
        ),
        ("--tp=2 --steps 3", "there is no option --tp; tp is grid.x: write --set grid.x=2"),
        ("--TP=2", "there is no option --TP; TP is grid.x: write --set grid.x=2"),
        ("--maxSteps 5", "there is no option --maxSteps; maxSteps is train.steps: write --set train.steps=5"),
        ("--config run.toml", "config: the config is an argument without a name; write `fourfold train run.toml`"),
        ("--grid hsdp=4", "hsdp: hybrid sharding is two axes: z shards the weights inside a replica, and data is the"),
        ("--tensor-model-parallel-size 4", "tensor-model-parallel-size is grid.x: write --set grid.x=4"),
        ("--training.seq_len 64", "training.seq_len is batch.seq: write --set batch.seq=64"),
        ("--bf16 --steps 3", "bf16 is policy.dtype: write --set policy.dtype=bf16"),
        ("--fsdp", "fsdp is grid.z, the number of ranks that share the stored weights and the rows of a batch: write"),
        ("--grid tp=2,dp=2", "argument --grid: tp is x, tensor parallelism: write x=2"),
    ],
)
def test_an_option_from_elsewhere_is_answered_with_ours(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["train", *shlex.split(words)])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_a_command_without_settings_has_no_keys_to_offer(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["report", "--lr", "3"])
    assert "there is no option --lr\n" in capsys.readouterr().err


def test_a_config_from_elsewhere_is_answered_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "titan.toml"
    path.write_text(
        "[training]\nseq_len = 4096\nsteps_per_moon = 1\nmax_norm = 1.0\n"
        '[parallelism]\ntensor_parallel_degree = 8\n[activation_checkpoint]\nmode = "full"\n'
    )
    with pytest.raises(ValueError, match=r"titan\.toml: ") as caught:
        read_config(path)
    assert str(caught.value).removeprefix(f"{path}: ") == (
        "training.seq_len is batch.seq: write seq = 4096 in [batch]; "
        "training.max_norm is optimizer.clip: write clip = 1.0 in [optimizer]; "
        "parallelism.tensor_parallel_degree is grid.x: write x = 8 in [grid]; "
        'activation_checkpoint.mode is policy.recompute: write recompute = "block" in [policy]'
    )
    path.write_text("[optimizer]\nlr = 3e-4\noptimizer_type = 'AdamW'\n")
    with pytest.raises(
        ValueError, match=r"optimizer\.lr is .* learning_rate = 0\.0003 in \[optimizer\]; optimizer\.optimizer_type "
    ):
        read_config(path)


def test_a_model_of_other_words_is_answered_too() -> None:
    for given, ours in (("num_hidden_layers", "layers"), ("n_embd", "hidden"), ("layer", "layers")):
        with pytest.raises(ValueError, match=rf"a model has no '{given}' \(did you mean '{ours}'\?\)"):
            ff.models.config("gpt-tiny", **{given: 3})


def test_an_unknown_word_is_not_answered() -> None:
    assert explain_synonym("learning_rat") == ""


@pytest.mark.parametrize("make", [ff.Shape, ff.Grid])
def test_axes_from_elsewhere_are_answered_with_ours(make: type) -> None:
    for given, said in (
        ({"tp": 2}, "^tp is x, tensor parallelism: write x=2; a grid has the axes x, y, z, data"),
        ({"dp": 4, "fsdp": 2}, "^dp is data, DDP: write data=4; fsdp is z, FSDP: write z=2; a grid"),
        ({"pp": 2}, "^pp is pipe, pipeline parallelism: write pipe=2; a grid has the axes"),
        ({"cp": 2}, "^cp is context, context parallelism.*; a grid has the axes"),
        ({"lr": 2}, "^a grid has the axes"),
    ):
        with pytest.raises(TypeError, match=said):
            make(**given)


def test_grids_of_the_command_line_still_say_what_an_axis_is() -> None:
    with pytest.raises(Exception, match="not an axis with a size; write auto"):
        grid("w=2")

"""Models to and from Hugging Face folders: the same logits, the same bits, one tensor at a time, nothing half done."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import fourfold as ff
from exchanged import TOKENS, VOCAB, logits, logits_on, whole, write_run, write_run_on
from fourfold import cli
from fourfold.checkpoint.format import MODEL, read_record
from fourfold.checkpoint.hf_weights import TensorMapping, match_names
from fourfold.checkpoint.load import read_full_tensor
from fourfold.commands.import_export import export_model, import_model
from fourfold.data.tokenizer import ByteTokenizer, load_tokenizer
from fourfold.grid import Grid, Shape
from fourfold.models import ModelConfig
from fourfold.models.hugging_face import read_config_json
from fourfold.train.config import read_config
from harness import DEVICE
from share import others_slow

LLAMA = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=2, max_position_embeddings=64, rope_theta=500.0,
)  # fmt: skip
SCALED: dict[str, dict[str, Any]] = {
    "linear": dict(rope_type="linear", factor=2.0),
    "llama3": dict(
        rope_type="llama3", factor=4.0, original_max_position_embeddings=16, low_freq_factor=1.0, high_freq_factor=2.0
    ),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, beta_slow=0.5),
    "yarn-mscale": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3
    ),
}
"""Scaled rotary positions, with an original length so short that the four pairs of features are scaled differently."""
THEIRS: dict[str, Any] = {
    "gpt2": lambda: transformers.GPT2Config(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4),
    "gpt2-untied": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, n_inner=40, tie_word_embeddings=False
    ),
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-biased": lambda: transformers.LlamaConfig(
        **LLAMA, head_dim=6, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    **{
        f"llama-{name}": partial(transformers.LlamaConfig, **LLAMA, rope_parameters={"rope_theta": 500.0, **rope})
        for name, rope in SCALED.items()
    },
    "mistral": lambda: transformers.MistralConfig(**LLAMA, sliding_window=None),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA, head_dim=8),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, hidden_act="gelu_new", use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
    ),
    "mixtral": lambda: transformers.MixtralConfig(**LLAMA, num_local_experts=5),
    "mixtral-tied": lambda: transformers.MixtralConfig(
        **LLAMA, num_local_experts=3, num_experts_per_tok=3, head_dim=6, tie_word_embeddings=True
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **LLAMA, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=24
    ),
    "qwen3_moe-normalized": lambda: transformers.Qwen3MoeConfig(
        **LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=6, norm_topk_prob=True,
        mlp_only_layers=[0], tie_word_embeddings=True,
    ),
}  # fmt: skip

LLAMA_LIKE = dict(norm="rms", mlp="swiglu", positions="rope", rope_theta=500.0, bias=False, tied=False)
SIZES: dict[str, Any] = dict(layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, mlp_hidden=48, vocab=VOCAB, seq=64)
EXPERTS: dict[str, Any] = dict(experts=5, expert_hidden=48)
OURS = {
    "gpt2": ModelConfig(**SIZES, dropout=0.25),
    "gpt2-untied": ModelConfig(**SIZES, tied=False, norm_eps=1e-3),
    "gpt_neox": ModelConfig(**SIZES, positions="rope", rope_theta=500.0, tied=False),
    "llama": ModelConfig(**{**SIZES, **LLAMA_LIKE, "heads": 8, "kv_heads": 2}),
    **{
        f"llama-{kind}": ModelConfig(**{**SIZES, **LLAMA_LIKE}, rope_scaling=kind, rope_factor=4.0, **scaled)
        for kind, scaled in {
            "linear": {},
            "llama3": dict(rope_original_seq=16, rope_fast=2.0),
            "yarn": dict(rope_original_seq=16, rope_slow=0.5, rope_fast=3.0, rope_attention=1.2),
        }.items()
    },
    "llama-biased": ModelConfig(**{**SIZES, **LLAMA_LIKE, "kv_heads": 2, "head_dim": 6, "bias": True, "tied": True}),
    "qwen3": ModelConfig(
        **{**SIZES, **LLAMA_LIKE, "hidden": 40, "heads": 3, "kv_heads": 1}, qk_norm=True, norm_eps=1e-6
    ),
    "mixtral": ModelConfig(**{**SIZES, **LLAMA_LIKE}, **EXPERTS, aux=0.125),
    "mixtral-tied": ModelConfig(
        **{**SIZES, **LLAMA_LIKE, "hidden": 40, "heads": 3, "kv_heads": 1, "tied": True},
        experts=3, top_k=1, expert_hidden=48,
    ),
    "qwen3_moe": ModelConfig(
        **{**SIZES, **LLAMA_LIKE, "heads": 8, "kv_heads": 2}, qk_norm=True, experts=5, top_k=3, expert_hidden=24,
        normalize_top_k=False, dense_layers=1,
    ),
    "qwen3_moe-normalized": ModelConfig(
        **{**SIZES, **LLAMA_LIKE, "kv_heads": 2, "head_dim": 6, "tied": True}, qk_norm=True, experts=4,
        expert_hidden=24, aux=0.125,
    ),
}  # fmt: skip

MIXTURES = ("mixtral", "qwen3_moe")


def foreign_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = transformers.AutoModelForCausalLM.from_config(THEIRS[name]())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            plain = parameter_name.replace("ln_", "norm.")
            parameter.copy_(whole(plain, tuple(parameter.shape), mixture=name.startswith(MIXTURES)))
    return model.to(dtype).eval()


def saved(folder: Path, name: str, **options: Any) -> tuple[Path, Tensor]:
    """A Hugging Face folder, and the logits of its model."""
    model = foreign_model(name)
    model.save_pretrained(folder, **options)
    return folder, foreign_logits(model)


def foreign_logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def tensors_of(folder: Path) -> dict[str, Tensor]:
    record = read_record(folder)
    return {name: read_full_tensor(folder, record, name) for name in record.tensors}


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in one.items()
    )


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """A Hugging Face folder to spoil."""
    return saved(tmp_path / "gpt2", "gpt2")[0]


def edit(folder: Path, **changes: Any) -> Path:
    keys = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**keys, **changes}))
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})
    return folder


# What is computed


@pytest.mark.parametrize("name", THEIRS)
def test_an_imported_model_has_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    source, expected = saved(tmp_path / "theirs", name)
    assert expected.std() > 0.5  # not so small that any difference would pass
    import_model(source, tmp_path / "run")
    torch.testing.assert_close(logits(tmp_path / "run", Grid.alone(DEVICE)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape(x=2, y=2), Shape(x=2, pipe=2)], ids=str)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_an_imported_model_has_them_on_four_ranks(ranks, tmp_path: Path, name: str, shape: Shape) -> None:
    source, expected = saved(tmp_path / "theirs", name)
    import_model(source, tmp_path / "run")
    for found in ranks(4).run(logits_on, tmp_path / "run", shape):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", others_slow(MIXTURES, 2))
def test_an_imported_mixture_has_them_on_grids(ranks, tmp_path: Path, name: str) -> None:
    source, expected = saved(tmp_path / "theirs", name)
    import_model(source, tmp_path / "run")
    for shape in (Shape(x=2), Shape(y=2), Shape(z=2), Shape(x=2, z=2)):
        for found in ranks(shape.world).run(logits_on, tmp_path / "run", shape):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_transformers_has_the_logits_of_an_exported_model(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", OURS[name], Grid.alone(DEVICE))
    export_model(run, tmp_path / "theirs")
    model, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(said[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.model_type == name.partition("-")[0]
    found, expected = foreign_logits(model.eval()), torch.load(run / "logits-0.pt")
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape(x=2, z=2), Shape(z=2, pipe=2)], ids=str)
def test_what_four_ranks_wrote_is_exported(ranks, tmp_path: Path, shape: Shape) -> None:
    ranks(4).run(write_run_on, tmp_path / "run", OURS["llama"], shape)
    export_model(tmp_path / "run", tmp_path / "theirs")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    expected = torch.load(tmp_path / "run" / "logits-0.pt")
    torch.testing.assert_close(foreign_logits(model), expected, rtol=1e-5, atol=1e-5)


# What is written


@pytest.mark.parametrize("name", OURS)
def test_there_and_back_is_the_same_run(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run", OURS[name], Grid.alone(DEVICE))
    export_model(run, tmp_path / "theirs")
    made = import_model(tmp_path / "theirs", tmp_path / "back")
    assert made.config.model.build() == OURS[name]
    assert read_config(tmp_path / "back" / "config.toml") == made.config
    before, after = (tmp_path / place / "checkpoints" for place in ("run", "back"))
    assert same_bits(tensors_of(before / "step-00000007"), tensors_of(after / "step-00000000"))
    assert read_record(after / "step-00000000").state["step"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "gpt2-untied"])
def test_there_and_back_through_a_pipeline_is_the_same_run(ranks, tmp_path: Path, name: str) -> None:
    pipe, here, there = Shape(pipe=2), tmp_path / "run", tmp_path / "theirs"
    ranks(2).run(write_run_on, here, OURS[name], pipe)
    export_model(here, there)
    import_model(there, tmp_path / "back")
    one, other = here / "checkpoints" / "step-00000007", tmp_path / "back" / "checkpoints" / "step-00000000"
    assert same_bits(tensors_of(one), tensors_of(other))
    (here / "checkpoints" / "step-00000007").rename(here / "checkpoints" / "step-00000000")
    before, after = (ranks(2).run(logits_on, run, pipe) for run in (here, tmp_path / "back"))
    assert all(torch.equal(found, before[0]) for found in (*before, *after))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_that_four_ranks_wrote_goes_there_and_back(ranks, tmp_path: Path, name: str) -> None:
    ranks(4).run(write_run_on, tmp_path / "run", OURS[name], Shape(x=2, z=2))
    export_model(tmp_path / "run", tmp_path / "theirs", max_shard=10_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    expected = torch.load(tmp_path / "run" / "logits-0.pt")
    torch.testing.assert_close(foreign_logits(model), expected, rtol=1e-5, atol=1e-5)
    import_model(tmp_path / "theirs", tmp_path / "back")
    one, other = "run/checkpoints/step-00000007", "back/checkpoints/step-00000000"
    assert same_bits(tensors_of(tmp_path / one), tensors_of(tmp_path / other))


@pytest.mark.parametrize("name", [name for name in THEIRS if name.startswith(MIXTURES)])
def test_narrow_files_of_a_mixture_come_back_as_they_were(tmp_path: Path, name: str) -> None:
    model = foreign_model(name, torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 2
    assert import_model(tmp_path / "theirs", tmp_path / "run").dtype == torch.bfloat16
    export_model(tmp_path / "run", tmp_path / "again")
    found = safetensors.torch.load_file(tmp_path / "again" / "model.safetensors")
    files = [safetensors.torch.load_file(file) for file in (tmp_path / "theirs").glob("*.safetensors")]
    assert same_bits(found, {name: tensor for file in files for name, tensor in file.items()})


def test_experts_of_several_dtypes_are_imported_in_one_that_holds_all(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "theirs", "mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    rewrite(source, lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    import_model(source, tmp_path / "run")
    up = tensors_of(tmp_path / "run" / "checkpoints" / "step-00000000")[MODEL + "layers.1.mlp.up"]
    stored = safetensors.torch.load_file(source / "model.safetensors")
    assert torch.equal(up[2], stored[name].float())
    assert torch.equal(up[3], stored[name.replace("experts.2", "experts.3")])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes_are_kept_or_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    run = write_run(tmp_path / "run", OURS["gpt2"], Grid.alone(DEVICE))
    export_model(run, tmp_path / "half", dtype=dtype)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == dtype
    assert import_model(tmp_path / "half", tmp_path / "back").dtype == dtype
    export_model(tmp_path / "back", tmp_path / "again")
    files = [safetensors.torch.load_file(tmp_path / place / "model.safetensors") for place in ("half", "again")]
    assert same_bits(*files)
    before, after = (
        tensors_of(run / "checkpoints/step-00000007"),
        tensors_of(tmp_path / "back/checkpoints/step-00000000"),
    )
    assert same_bits({name: value.to(dtype) for name, value in before.items()}, after)


def test_files_in_parts(tmp_path: Path) -> None:
    whole_one, _ = saved(tmp_path / "one", "llama")
    parts, _ = saved(tmp_path / "parts", "llama", max_shard_size="20KB")
    assert len(list(parts.glob("*.safetensors"))) > 2
    import_model(whole_one, tmp_path / "run")
    import_model(parts, tmp_path / "run-of-parts")
    one, other = (tensors_of(tmp_path / run / "checkpoints/step-00000000") for run in ("run", "run-of-parts"))
    assert same_bits(one, other)

    made = export_model(tmp_path / "run", tmp_path / "again", max_shard=20_000)
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert len(files) == made.weights.files > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(len(safetensors.torch.load_file(file)) == 1 or file.stat().st_size < 22_000 for file in files)
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.weights.nbytes == 4 * made.parameters
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(foreign_logits(model), foreign_logits(foreign_model("llama")))


def test_names_without_prefix_buffers_and_a_copy_of_the_table(gpt2: Path, tmp_path: Path) -> None:
    import_model(gpt2, tmp_path / "usual")

    def as_in_old_files(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    import_model(rewrite(gpt2, as_in_old_files), tmp_path / "old")
    old, usual = (tensors_of(tmp_path / run / "checkpoints/step-00000000") for run in ("old", "usual"))
    assert same_bits(old, usual)


@pytest.mark.parametrize(
    ("kind", "read", "ignored"),
    [
        ("gpt2", "h.3.attn.c_attn.bias", ("h.3.attn.bias", "transformer.h.3.attn.masked_bias")),
        ("gpt_neox", "layers.3.attention.dense.bias", ("gpt_neox.layers.3.attention.bias",)),
        ("gpt_neox", "embed_in.weight", ("gpt_neox.layers.3.attention.rotary_emb.inv_freq",)),
        ("llama", "norm.weight", ("model.layers.3.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq")),
    ],
    ids=str,
)
def test_buffers_are_ignored(kind: str, read: str, ignored: tuple[str, ...]) -> None:
    piece = TensorMapping((read,), ("ours",))
    assert match_names([piece], kind, [read, *ignored], Path("folder")) == {read: read}


def test_the_newest_checkpoint_that_of_a_step_or_one_folder(tmp_path: Path) -> None:
    grid = Grid.alone(DEVICE)
    run = write_run(tmp_path / "run", OURS["gpt2"], grid, step=7)
    last = tmp_path / "run/checkpoints/step-00000009"
    ff.save(last, ff.models.build(OURS["gpt2"], grid))
    paths = {"newest": (run, None), "seven": (run, 7), "folder": (last, None)}
    for name, (source, step) in paths.items():
        export_model(source, tmp_path / name, step=step)
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in paths}
    assert files["newest"] == files["folder"] != files["seven"]
    with pytest.raises(FileNotFoundError, match="no complete checkpoint of step 8; it has those of 7, 9"):
        export_model(run, tmp_path / "none", step=8)
    with pytest.raises(ValueError, match="is one checkpoint; leave out --step 7"):
        export_model(last, tmp_path / "none", step=7)
    with pytest.raises(FileNotFoundError, match="has no complete checkpoint"):
        export_model(tmp_path / "newest", tmp_path / "none")


class Alive(TorchDispatchMode):
    """The most bytes of tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._held = 0, {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else (out,):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._held = {key: entry for key, entry in self._held.items() if not entry[0].expired()}
        self.most = max(self.most, sum(nbytes for _, nbytes in self._held.values()))
        return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_never_the_whole_model_in_memory(tmp_path: Path, name: str) -> None:
    config = dataclasses.replace(OURS[name], layers=12)
    run = write_run(tmp_path / "run", config, Grid.alone(DEVICE))
    largest = 4 * VOCAB * 32  # as large as q, k and v in one
    with Alive() as exporting:
        export_model(run, tmp_path / "theirs")
    with Alive() as importing:
        import_model(tmp_path / "theirs", tmp_path / "back")
    for alive in (exporting, importing):
        assert largest <= alive.most <= 4 * largest < 4 * config.parameters / 5


# Tokenizers


def write_tokenizer(folder: Path, end: str) -> None:
    words = {word: index for index, word in enumerate(["[UNK]", "once", "upon", "a", "time"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens([end])
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|unheard of|>"])
def test_tokenizers_travel_along(gpt2: Path, tmp_path: Path, end: str) -> None:
    write_tokenizer(gpt2, end)
    edit(gpt2, eos_token_id=5)
    made = import_model(gpt2, tmp_path / "first")
    usual = end == "<|endoftext|>"
    assert made.config.data.eod == (None if usual else 5)
    assert made.config.data.tokenizer == "tokenizer.json"
    read = read_config(tmp_path / "first" / "config.toml")
    assert read.data.tokenizer == str(tmp_path / "first" / "tokenizer.json")
    assert any("id 5" in note for note in made.notes) is not usual
    (tmp_path / "first").rename(tmp_path / "moved")
    export_model(tmp_path / "moved", tmp_path / "theirs")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert tokenizer("once upon a time")["input_ids"] == [1, 2, 3, 4]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (end, 5)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "theirs").eos_token_id == 5


TEXTS = ["once upon", " a  , and\n\tb .\r\n", "grüße, 世界 🌍", "", "\x00\x7f\xad\u2028", "it 's", "a <|endoftext|> b"]


def test_bytes_travel_along(tmp_path: Path) -> None:
    """transformers encodes and decodes as the run does: every byte, broken UTF-8, and what ends a document."""
    config = dataclasses.replace(OURS["gpt2"], vocab=257)
    run, ours = write_run(tmp_path / "run", config, Grid.alone(DEVICE)), load_tokenizer("bytes")
    assert export_model(run, tmp_path / "theirs").tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    for text in TEXTS:
        ids = ours.encode(text).tolist()
        assert theirs(text)["input_ids"] == theirs.encode(text) == ids
        assert theirs.decode(ids) == ours.decode(ids) == text
        assert theirs.decode([*ids, ours.eod], skip_special_tokens=True) == text
    assert (len(theirs), theirs.eos_token_id, theirs.model_max_length) == (ours.vocab, ours.eod, config.seq)
    broken = [[byte] for byte in range(256)] + [[0xE4, 0xB8, 65], [0xF0, 0x9F, 0x8C], [0xFF, 0xC3, 0xBC, 0xC0, 0x80]]
    for ids in broken:
        assert theirs.decode(ids) == ours.decode(ids)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert model.config.eos_token_id == ours.eod
    made = import_model(tmp_path / "theirs", tmp_path / "again")
    assert made.config.data.tokenizer == "bytes"  # so that tokens of before still fit
    theirs.save_pretrained(tmp_path / "saved")  # as another program writes it
    assert ByteTokenizer.is_json(json.loads((tmp_path / "saved" / "tokenizer.json").read_text()))
    again = load_tokenizer(tmp_path / "theirs" / "tokenizer.json")
    assert (again.vocab, again.eod) == (ours.vocab, ours.eod)
    for text in TEXTS[:-1]:  # tokenizers themselves find special tokens in any text
        assert torch.equal(again.encode(text), ours.encode(text))


def test_bytes_that_a_model_does_not_know_are_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", OURS["gpt2"], Grid.alone(DEVICE))
    made = export_model(run, tmp_path / "theirs")
    assert not made.tokenizer and not (tmp_path / "theirs" / "tokenizer_config.json").exists()
    assert "with ids up to 256, but the model only knows ids below 101, so the folder has no tokenizer" in made.notes[0]


def test_the_end_of_documents_may_be_named(gpt2: Path, tmp_path: Path) -> None:
    write_tokenizer(gpt2, "<|unheard of|>")
    edit(gpt2, eos_token_id=None)
    with pytest.raises(ValueError, match="has no token that ends a document"):
        import_model(gpt2, tmp_path / "run")
    assert import_model(gpt2, tmp_path / "run", eod="<|unheard of|>").config.data.eod == "<|unheard of|>"


def test_a_missing_tokenizer_is_said(gpt2: Path, tmp_path: Path) -> None:
    (gpt2 / "vocab.json").write_text("{}")
    made = import_model(gpt2, tmp_path / "run")
    assert made.config.data.tokenizer == "bytes"
    (said,) = made.notes
    assert "has no tokenizer.json" in said
    assert "to convert vocab.json: python -c" in said
    write_tokenizer(gpt2, "</s>")
    edit(gpt2, vocab_size=5)
    rewrite(gpt2, lambda tensors: tensors.update({"transformer.wte.weight": torch.zeros(5, 32)}))
    assert "ids up to 5, but the model only knows ids below 5" in import_model(gpt2, tmp_path / "small").notes[0]


# What is refused


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def rename(name: str, to: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({to: tensors.pop(name)})


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (drop("transformer.h.1.ln_2.bias"), r"it lacks 'transformer.h.1.ln_2.bias'$"),
        (
            rename("transformer.h.0.mlp.c_fc.weight", "transformer.h.0.mlp.c_fcc.weight"),
            r"lacks 'transformer.h.0.mlp.c_fc.weight' \(did you mean 'transformer.h.0.mlp.c_fcc.weight'\?\); it also "
            r"holds 'transformer.h.0.mlp.c_fcc.weight' \(did you mean 'transformer.h.0.mlp.c_fc.weight'",
        ),
        (put("score.weight", torch.zeros(2, 32)), "it also holds 'score.weight'"),
        (put("wpe.weight", torch.zeros(64, 32)), "holds both '.*wpe.weight' and '.*wpe.weight', which are one"),
        (put("transformer.wpe.weight", torch.zeros(63, 32)), r"has shape \(63, 32\), and by config.json \(64, 32\)"),
        (put("transformer.ln_f.bias", torch.zeros(32, dtype=torch.int8)), "torch.int8, so the weights are packed"),
        (put("transformer.ln_f.bias", torch.zeros(32).to(torch.float8_e4m3fn)), "dtype F8_E4M3, which no checkpoint"),
        (put("lm_head.weight", torch.zeros(VOCAB, 32)), "'lm_head.weight' is not equal to 'transformer.wte.weight'"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_refused(gpt2: Path, tmp_path: Path, change: Any, why: str) -> None:
    rewrite(gpt2, change)
    with pytest.raises(ValueError, match=why):
        import_model(gpt2, tmp_path / "run")
    assert entries(tmp_path) == ["gpt2"]


def test_a_head_that_is_missing(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks 'lm_head.weight'; where the head is the embedding's table, say"):
        import_model(edit(gpt2, tie_word_embeddings=False), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gpt2", {"activation_function": "gelu"}, "activation_function='gelu': .* in its tanh form"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True: all layers"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights=False: scores"),
        ("gpt2", {"embd_pdrop": 0.3}, "embd_pdrop=0.3: dropout is the same after all sublayers"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config: its weights are packed"),
        ("gpt2", {"auto_map": {"AutoModel": "a.b"}}, "auto_map: the folder has code of its own"),
        ("gpt2", {"model_type": "gpt3"}, "model_type='gpt3' cannot be read"),
        ("mistral", {"max_position_embeddings": "many", "sliding_window": 32}, "max_position_embeddings=many"),
        ("llama", {"rope_parameters": {"rope_theta": "wide"}}, 'rope_theta = "wide"; it must be a number'),
        ("gpt2", {"n_layer": "two"}, 'layers = "two"; it must be a whole number'),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "'dynamic'.*: rotary angles",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
            "rotary angles are scaled",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "rotary angles are scaled",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: rotary positions rotate whole heads"),
        ("llama", {"attention_bias": True}, "attention_bias=True, mlp_bias=False: biases"),
        ("mistral", {"sliding_window": 32}, "sliding_window=32: .* max_position_embeddings=64; lower that to 32"),
        ("mistral", {"attention_bias": True, "mlp_bias": True}, "model_type='mistral' does not have biases"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 32}, "sliding_window=32"),
        ("mixtral", {"sliding_window": 32}, "sliding_window=32"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1: routers read tokens without noise"),
        ("mixtral", {"num_local_experts": None}, "lacks num_local_experts or num_experts"),
        ("mixtral", {"num_experts_per_tok": 6}, "top_k=6 must be at most experts=5"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 32}, "sliding_window=32"),
        ("qwen3_moe", {"attention_bias": True, "mlp_bias": True}, "model_type='qwen3_moe' does not have biases"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\]: only the first blocks may have an MLP"),
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}, "decoder_sparse_step=2, .*: only the first"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0, .* must be whole numbers"),
        ("qwen3", {"num_experts": 4}, "num_experts=4: a mixture of experts of another type than mixtral, qwen3_moe"),
        ("gpt_neox", {"use_parallel_residual": True}, "use_parallel_residual=True"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotary positions rotate whole heads"),
        ("gpt_neox", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=str,
)
def test_what_would_compute_other_numbers_is_refused(tmp_path: Path, name: str, changes: dict, why: str) -> None:
    """By config.json alone: weights are never looked at."""
    THEIRS[name]().save_pretrained(tmp_path / "theirs")
    with pytest.raises(ValueError, match=why):
        import_model(edit(tmp_path / "theirs", **changes), tmp_path / "run")
    assert entries(tmp_path) == ["theirs"]


def test_harmless_values_are_read(tmp_path: Path) -> None:
    mistral, _ = saved(tmp_path / "mistral", "mistral")
    rope = {"rope_type": "default", "rope_theta": 700, "partial_rotary_factor": None}
    keys = dict(sliding_window=64, rope_scaling=rope, novelty=3)
    made = import_model(edit(mistral, **keys), tmp_path / "run")
    assert made.config.model.rope_theta == 700.0
    assert made.notes[0] == "not read, because Fourfold does not know them: novelty"


def test_blocks_without_experts(tmp_path: Path) -> None:
    """decoder_sparse_step=2 leaves the first of two blocks without experts, and 3 both."""
    THEIRS["qwen3_moe"]().save_pretrained(tmp_path)
    fields, _ = read_config_json(edit(tmp_path, decoder_sparse_step=2) / "config.json", exact=True)
    assert (fields["dense_layers"], fields["experts"]) == (1, 5)
    fields, _ = read_config_json(edit(tmp_path, decoder_sparse_step=3) / "config.json", exact=True)
    assert "experts" not in fields
    saved(tmp_path / "theirs", "qwen3_moe-normalized")
    made = import_model(edit(tmp_path / "theirs", output_router_logits=True), tmp_path / "run")
    assert made.notes[0].startswith("aux=0.001 weighs the balance of experts in each sequence and block")


def test_folders_that_are_not_whole_are_refused(gpt2: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], why: str) -> None:
        with pytest.raises(kind, match=why):
            import_model(gpt2, tmp_path / "run")
        assert entries(tmp_path) == ["gpt2"]

    weights = (gpt2 / "model.safetensors").read_bytes()
    (gpt2 / "model.safetensors").write_bytes(weights[:-9])
    refused(ValueError, "model.safetensors is damaged")
    (gpt2 / "model.safetensors").write_bytes(b"\x80\x02not run")
    refused(ValueError, "model.safetensors is a pickle, which is never opened")
    (gpt2 / "model.safetensors").unlink()
    refused(FileNotFoundError, "has neither model.safetensors nor model.safetensors.index.json")
    (gpt2 / "pytorch_model.bin").write_bytes(b"\x80\x02not run")
    refused(ValueError, "pytorch_model.bin, a pickle, which can run code and is never opened; .*save_pretrained")
    index = gpt2 / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": "../elsewhere.safetensors"}}))
    refused(ValueError, "'../elsewhere.safetensors' is not the name of a file beside it")
    index.write_text(json.dumps({"weight_map": {"wte.weight": "part.safetensors"}}))
    refused(FileNotFoundError, "part.safetensors is missing")
    safetensors.torch.save_file({"other": torch.zeros(1)}, gpt2 / "part.safetensors")
    refused(
        ValueError, "part.safetensors does not hold 'wte.weight', though model.safetensors.index.json lists it there"
    )
    index.write_text("[]")
    refused(ValueError, "is not an index of weights")
    (gpt2 / "config.json").unlink()
    refused(FileNotFoundError, "there is no .*config.json")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(norm="rms", mlp="gelu", positions="rope", bias=False), "llama comes nearest, and needs mlp='swiglu'"),
        (dict(norm="rms"), "gpt2 comes nearest, and needs norm='layer' instead of 'rms'"),
        (dict(bias=False), "needs bias=True instead of False"),
        (dict(kv_heads=2), "gpt2 comes nearest, and needs kv_heads=4 instead of 2"),
        (dict(head_dim=6), r"needs heads\*head_dim=32 instead of 4\*6"),
        ({**LLAMA_LIKE, "heads": 3, "kv_heads": 3}, "needs hidden divisible by heads=3 instead of 32"),
        ({**LLAMA_LIKE, "bias": True, "qk_norm": True}, "comes nearest, and needs (qk_norm=False|bias=False)"),
        ({**LLAMA_LIKE, **EXPERTS, "shared_hidden": 24}, "mixtral comes nearest, and needs shared_hidden=0 instead of"),
        ({**LLAMA_LIKE, **EXPERTS, "score": "sigmoid"}, "mixtral comes nearest, and needs score='softmax' instead of"),
        ({**LLAMA_LIKE, **EXPERTS, "dense_layers": 1}, "mixtral comes nearest, and needs dense_layers=0 instead of 1"),
        (
            {**LLAMA_LIKE, **EXPERTS, "route_scale": 2.0},
            "mixtral comes nearest, and needs route_scale=1.0 instead of 2",
        ),
        ({**LLAMA_LIKE, **EXPERTS, "bias_rate": 0.1}, "mixtral comes nearest, and needs bias_rate=0.0 instead of 0.1"),
    ],
    ids=str,
)
def test_what_no_type_can_say_is_refused(tmp_path: Path, changes: dict, why: str) -> None:
    run = write_run(tmp_path / "run", ModelConfig(**{**SIZES, **changes}), Grid.alone(DEVICE))
    with pytest.raises(ValueError, match=why):
        export_model(run, tmp_path / "theirs")
    assert entries(tmp_path) == ["run"]


def test_an_export_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "run", OURS["gpt2"], Grid.alone(DEVICE))
    (tmp_path / "taken").mkdir()
    export_model(run, tmp_path / "taken")  # empty: free to take
    with pytest.raises(FileExistsError, match="taken is there already and not an empty folder"):
        export_model(run, tmp_path / "taken")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        import_model(tmp_path / "taken", run)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match=r"cannot write .*model.safetensors \(No space left"):
            export_model(run, tmp_path / "theirs")
    assert entries(tmp_path) == ["run", "taken"]

    file = run / "checkpoints/step-00000007/rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"rank-00000.safetensors is damaged"):
        export_model(run, tmp_path / "theirs")
    assert entries(tmp_path) == ["run", "taken"]


def test_what_a_dtype_cannot_hold_is_refused(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "theirs", "gpt2")
    rewrite(source, put("transformer.ln_f.bias", torch.full((32,), 1e5)))
    import_model(source, tmp_path / "run")
    with pytest.raises(ValueError, match=r"'transformer.ln_f.bias' has values that torch.float16 cannot hold"):
        export_model(tmp_path / "run", tmp_path / "half", dtype=torch.float16)
    export_model(tmp_path / "run", tmp_path / "half", dtype=torch.bfloat16)


def test_a_config_that_does_not_fit_its_checkpoint_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", OURS["gpt2"], Grid.alone(DEVICE))
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("vocab = 101", "vocab = 100"))
    with pytest.raises(ValueError, match=r"'model/embedding.weight' has shape \(101, 32\)"):
        export_model(run, tmp_path / "theirs")
    (run / "config.toml").write_text(text.replace("layers = 2", "layers = 3"))
    with pytest.raises(ValueError, match=r"is of another model: it lacks 'model/layers.2"):
        export_model(run, tmp_path / "theirs")
    (run / "config.toml").unlink()
    with pytest.raises(FileNotFoundError, match="names no config"):
        export_model(run, tmp_path / "theirs")


# The commands


def command(*arguments: str) -> int:
    options = cli.parser().parse_args(arguments)
    return cli.command(options.run)(options, arguments)


def test_commands(gpt2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("import", str(gpt2), "--out", str(tmp_path / "run")) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path / 'run'}: gpt2, 30.8 k parameters in float32, vocabulary 101, tokenizer bytes"
    assert said[-1] == f"  fourfold train --resume {tmp_path / 'run'} --data PATH"
    options = ("--dtype", "bf16", "--max-shard", "20kB", "--step", "0")
    assert command("export", str(tmp_path / "run"), "--to", str(tmp_path / "theirs"), *options) == 0
    said = capsys.readouterr().out.splitlines()
    made = "GPT2LMHeadModel of step-00000000, 30.8 k parameters in bfloat16, 4 files, 60.1 KiB"
    assert said[0] == f"{tmp_path / 'theirs'}: {made}"
    assert said[-1].startswith("  python -c")
    shutil.rmtree(tmp_path / "theirs")
    with pytest.raises(SystemExit):
        command("export", str(tmp_path / "run"), "--to", str(tmp_path / "theirs"), "--max-shard", "many")
    assert "'many' is not a file size; write for example 5GB" in capsys.readouterr().err

"""Models named from outside: sizes, Hugging Face's config.json, TOML, functions; and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import dry
import fourfold as ff
from fourfold.models import ModelConfig
from fourfold.models.open import ModelDefinition, open_model, why_data_only

# the values of files on the Hugging Face hub; keys that are never read are left out but for a few
GPT2 = dict(
    model_type="gpt2", activation_function="gelu_new", attn_pdrop=0.1, embd_pdrop=0.1, resid_pdrop=0.1, n_ctx=1024,
    n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257, layer_norm_epsilon=1e-05,
    summary_type="cls_index", architectures=["GPT2LMHeadModel"],
)  # fmt: skip
LLAMA_3_8B = dict(
    model_type="llama", attention_bias=False, attention_dropout=0.0, hidden_act="silu", hidden_size=4096,
    intermediate_size=14336, max_position_embeddings=8192, num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=8, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=500000.0, tie_word_embeddings=False,
    vocab_size=128256, torch_dtype="bfloat16", use_cache=True, pretraining_tp=1,
)  # fmt: skip
MISTRAL_7B = dict(
    model_type="mistral", hidden_act="silu", hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768,
    num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8, rms_norm_eps=1e-05, rope_theta=10000.0,
    sliding_window=4096, tie_word_embeddings=False, vocab_size=32000,
)  # fmt: skip
QWEN3_0_6B = dict(
    model_type="qwen3", attention_bias=False, head_dim=128, hidden_act="silu", hidden_size=1024,
    intermediate_size=3072, max_position_embeddings=40960, num_attention_heads=16, num_hidden_layers=28,
    num_key_value_heads=8, rms_norm_eps=1e-06, rope_theta=1000000, tie_word_embeddings=True, vocab_size=151936,
)  # fmt: skip
GPT_NEOX = dict(
    model_type="gpt_neox", hidden_act="gelu", hidden_size=2560, intermediate_size=10240, max_position_embeddings=2048,
    num_attention_heads=32, num_hidden_layers=32, rotary_pct=1.0, use_parallel_residual=False, vocab_size=50432,
)  # fmt: skip
MIXTRAL_8X7B = dict(
    model_type="mixtral", attention_dropout=0.0, hidden_act="silu", hidden_size=4096, intermediate_size=14336,
    max_position_embeddings=32768, num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32,
    num_key_value_heads=8, num_local_experts=8, output_router_logits=False, rms_norm_eps=1e-05, rope_theta=1000000.0,
    router_aux_loss_coef=0.02, sliding_window=None, tie_word_embeddings=False, vocab_size=32000,
)  # fmt: skip
QWEN3_30B_A3B = dict(
    model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=128, hidden_act="silu",
    hidden_size=2048, intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[],
    moe_intermediate_size=768, norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8,
    num_hidden_layers=48, num_key_value_heads=4, output_router_logits=False, rms_norm_eps=1e-06,
    rope_theta=1000000.0, router_aux_loss_coef=0.001, sliding_window=None, tie_word_embeddings=False,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip


def opened(text: str) -> ModelDefinition:
    return open_model(text).model


def written(folder: Path, keys: dict[str, Any], **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps({**keys, **changes}))
    return str(folder)


def test_sizes() -> None:
    assert opened("gpt-80b") == ff.models.config("gpt-80b")
    with pytest.raises(ValueError, match="did you mean 'gpt-80b'"):
        opened("gpt-80")


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [(GPT2, 124_439_808), (LLAMA_3_8B, 8_030_261_248), (MISTRAL_7B, 7_241_732_096), (QWEN3_0_6B, 596_049_920)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_foreign_models_have_their_published_number_of_parameters(tmp_path: Path, keys: dict, parameters: int) -> None:
    found = opened(written(tmp_path, keys))
    assert isinstance(found, ModelConfig)
    assert found.parameters == parameters
    assert opened(str(tmp_path / "config.json")) == found


def test_foreign_fields(tmp_path: Path) -> None:
    assert opened(written(tmp_path, LLAMA_3_8B)) == ff.models.config("llama-3-8b")
    assert opened(written(tmp_path, GPT2)) == ff.models.config("gpt-125m", dropout=0.1)
    qwen = opened(written(tmp_path, QWEN3_0_6B))
    assert isinstance(qwen, ModelConfig)
    assert (qwen.qk_norm, qwen.head_dim, qwen.tied, qwen.bias, qwen.rope_theta) == (True, 128, True, False, 1e6)
    neox = opened(written(tmp_path, GPT_NEOX))
    assert isinstance(neox, ModelConfig)
    assert (neox.norm, neox.positions, neox.bias, neox.tied) == ("layer", "rope", True, False)
    assert opened(written(tmp_path, MIXTRAL_8X7B)) == ff.models.config("mixtral-8x7b", aux=0.02)
    assert opened(written(tmp_path, QWEN3_30B_A3B)) == ff.models.config("qwen3-30b-a3b")
    both = opened(written(tmp_path, LLAMA_3_8B, attention_bias=True, mlp_bias=True))
    assert isinstance(both, ModelConfig)
    assert both.bias


def test_keys_that_are_not_read_are_named(tmp_path: Path) -> None:
    scaled = dict(rope_scaling={"rope_type": "llama3"}, sliding_window=4096, novelty=3)
    neutral, unknown = open_model(written(tmp_path, LLAMA_3_8B, **scaled)).notes
    assert "do not change the cost of a step: rope_scaling, torch_dtype, use_cache" in neutral
    assert "sliding_window" in neutral
    assert unknown.endswith("does not know them: novelty")


@pytest.mark.parametrize(
    ("keys", "changes", "why"),
    [
        (
            LLAMA_3_8B,
            {"attention_bias": True},
            "attention_bias=True, mlp_bias=False: biases are on all layers or on none",
        ),
        (LLAMA_3_8B, {"hidden_act": "gelu"}, "hidden_act='gelu': the MLP is computed with SwiGLU"),
        (LLAMA_3_8B, {"num_local_experts": 8}, "num_local_experts=8: a mixture of experts"),
        (LLAMA_3_8B, {"model_type": "qwen2"}, "biases on q, k and v but on no other layer"),
        (LLAMA_3_8B, {"model_type": "gemma"}, "gates its MLP with GELU"),
        (
            LLAMA_3_8B,
            {"model_type": "lama"},
            "did you mean 'llama'.*llama, mistral, qwen3, mixtral, qwen3_moe",
        ),
        (LLAMA_3_8B, {"hidden_size": None}, "lacks hidden_size, which model_type='llama' needs"),
        (LLAMA_3_8B, {"num_attention_heads": 3}, "4096 is not divisible by 3 heads"),
        (LLAMA_3_8B, {"num_key_value_heads": 5}, "heads=32 is not divisible by kv_heads=5"),
        (LLAMA_3_8B, {"vocab_size": "many"}, "vocab='many' is str; it must be int"),
        (GPT2, {"resid_pdrop": 0.2}, "dropout is the same after all sublayers"),
        (GPT2, {"activation_function": "relu"}, "computed with GELU"),
        (GPT2, {"n_positions": None, "n_ctx": None}, "lacks n_positions or n_ctx"),
        (GPT_NEOX, {"use_parallel_residual": True}, "attention and MLP run one after the other"),
        (GPT_NEOX, {"rotary_pct": 0.25}, "rotary positions rotate whole heads"),
        ({"hidden_size": 3}, {}, "has no model_type"),
    ],
    ids=str,
)
def test_what_a_config_cannot_say_is_refused(tmp_path: Path, keys: dict, changes: dict, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        opened(written(tmp_path, keys, **changes))
    assert "config.json" in str(caught.value) or str(tmp_path) in str(caught.value)


def test_toml(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "gpt-5b"\nlayers = 3\nrope_theta = 500\n')
    assert opened(str(file)) == ff.models.config("gpt-5b", layers=3, rope_theta=500)
    file.write_text("layers=1\nhidden=8\nheads=2\nkv_heads=2\nhead_dim=4\nmlp_hidden=32\nvocab=9\nseq=5\n")
    assert opened(str(file)) == ModelConfig(1, 8, 2, 2, 4, 32, 9, 5)
    for text, why in (
        ("layers = 3", "lacks hidden, heads, kv_heads"),
        ('base = "gpt-5"', "did you mean 'gpt-5b'"),
        ('base = "gpt-5b"\nlayer = 3', r"mine.toml: a model has no 'layer' \(did you mean 'layers'\?\)"),
        ('base = "gpt-5b"\nlayers = "3"', "layers='3' is str; it must be int"),
        ('base = "gpt-5b"\nlayers = true', "layers=True is bool; it must be int"),
        ('base = "gpt-5b"\nlayers = 0', "mine.toml: layers=0 must be at least 1"),
        ("layers = ", "is not TOML"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=why):
            opened(str(file))


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for name in ("a.toml", "a.json", "folder/model"):
        with pytest.raises(FileNotFoundError, match="a model is a published size"):
            opened(str(tmp_path / name))
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        opened(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        opened(str(tmp_path))


def test_functions() -> None:
    assert opened("dry:plain") is dry.plain
    assert "replicated over data and cut over no other axis" in why_data_only(opened("dry:plain"))
    assert why_data_only(opened("dry:on_the_grid")) == why_data_only(opened("gpt-5b")) == ""
    for text, why in (
        ("dry:plane", r"dry has no 'plane' \(did you mean 'plain'\?\)"),
        ("no_such.module:f", "there is no module 'no_such'"),
        ("dry:BF16", "is dtype, not a function"),
        ("dry:three", r"three needs a, b, c; a function that builds a model takes \(grid, policy\), or nothing"),
    ):
        with pytest.raises(ValueError, match=why):
            opened(text)

"""Parameters of any Hugging Face config: exact where transformers builds the model, else an estimate that says so."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fourfold.models.config import config
from fourfold.models.count import count_model

SMALL = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=1000)
MIXTRAL = dict(SMALL, model_type="mixtral", intermediate_size=128, num_local_experts=8, num_experts_per_tok=2)
DEEPSEEK = dict(
    SMALL, model_type="deepseek_v3", intermediate_size=256, moe_intermediate_size=32, n_routed_experts=16,
    num_experts_per_tok=4, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
    qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_group=1, topk_group=1, num_key_value_heads=4,
)  # fmt: skip
VISION = dict(model_type="clip_vision_model", hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28)
LLAVA = dict(
    model_type="llava",
    text_config=dict(SMALL, model_type="llama", intermediate_size=128),
    vision_config=dict(VISION, intermediate_size=64, patch_size=14),
)


def write(folder: Path, keys: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(keys))
    return path


def test_experts_are_counted_and_those_of_a_token_apart(tmp_path: Path) -> None:
    found = count_model(write(tmp_path, MIXTRAL))
    attention, expert, norms = 2 * 64 * (64 + 32), 3 * 64 * 128, 2 * 64
    outside = 2 * 1000 * 64 + 64
    assert found.parameters == 4 * (attention + 8 * expert + 8 * 64 + norms) + outside
    assert found.active == 4 * (attention + 2 * expert + 8 * 64 + norms) + outside
    assert found.multiplied == found.active - 1000 * 64  # a row of the embedding is looked up
    assert found.estimated == ""


def test_shared_experts_and_dense_layers_are_met_by_every_token(tmp_path: Path) -> None:
    found = count_model(write(tmp_path, DEEPSEEK))
    assert found.parameters - found.active == 3 * (16 - 4) * 3 * 64 * 32
    assert found.sizes.mlp_widths(0) == (256, 256)
    assert found.sizes.mlp_widths(1) == (17 * 32, 5 * 32)


def test_the_parts_of_a_multimodal_model_are_told_apart(tmp_path: Path) -> None:
    found = count_model(write(tmp_path, LLAVA))
    language = 4 * (2 * 64 * (64 + 32) + 3 * 64 * 128 + 2 * 64) + 2 * 1000 * 64 + 64
    projector = 32 * 64 + 64 + 64 * 64 + 64
    assert found.other_parts > 0
    assert found.active == language + projector
    assert found.parameters == found.active + found.other_parts
    assert found.sizes.hidden == 64


def test_a_mixture_of_experts_is_not_taken_for_a_multimodal_model(tmp_path: Path) -> None:
    assert count_model(write(tmp_path, MIXTRAL)).other_parts == 0


def test_the_head_that_is_the_embedding_counts_once(tmp_path: Path) -> None:
    found = count_model(write(tmp_path, {"model_type": "gpt2"}))
    assert found.parameters == found.multiplied == config("gpt-125m", vocab=50257, seq=1024).parameters


@pytest.mark.parametrize(
    ("keys", "apart"), [(MIXTRAL, 0.01), (dict(SMALL, model_type="llama", intermediate_size=128), 0.01)]
)
def test_without_transformers_the_usual_keys_give_an_estimate(
    keys: dict[str, Any], apart: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = count_model(write(tmp_path, keys))
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = count_model(write(tmp_path, keys))
    assert "transformers is not installed (fourfold[hf]), so this is an estimate from its sizes" in found.estimated
    for name in ("parameters", "active", "multiplied"):
        assert getattr(found, name) == pytest.approx(getattr(exact, name), rel=apart)
        assert getattr(found, name) < getattr(exact, name)  # norms are left out


def test_an_architecture_that_nobody_knows_is_estimated_by_other_names_too(tmp_path: Path) -> None:
    gpt = dict(model_type="new", n_embd=64, n_layer=4, n_head=4, ffn_dim=256, vocab_size=1000, hidden_act="relu")
    found = count_model(write(tmp_path, gpt))
    assert found.parameters == 4 * (4 * 64 * 64 + 2 * 64 * 256) + 2 * 64 * 1000
    assert found.estimated.startswith("transformers ") and "has no model_type='new'" in found.estimated
    nested = count_model(write(tmp_path, {"model_type": "newer", "text_config": gpt}))
    assert nested.parameters == found.parameters
    assert "of the language model alone" in nested.estimated


def test_sizes_that_do_not_fit_together_are_an_estimate_with_the_reason(tmp_path: Path) -> None:
    found = count_model(write(tmp_path, dict(MIXTRAL, hidden_act="nothing")))
    assert "transformers cannot build it: " in found.estimated
    assert found.parameters > 0


def test_what_an_estimate_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it lacks num_hidden_layers, num_attention_heads, intermediate_size, vocab"):
        count_model(write(tmp_path, dict(model_type="new", hidden_size=64)))


def test_the_class_that_the_file_names_is_the_one_that_is_built(tmp_path: Path) -> None:
    keys = dict(model_type="bert", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    pairs = [
        count_model(write(tmp_path, {**keys, "architectures": [name]})) for name in ("BertModel", "BertForPreTraining")
    ]
    assert pairs[0].parameters < pairs[1].parameters
    assert count_model(write(tmp_path, {**keys, "architectures": ["NoSuchModel"]})).estimated == ""


def test_values_that_differ_from_layer_to_layer_are_left_out(tmp_path: Path) -> None:
    found = count_model(write(tmp_path, {"model_type": "gemma4_text"}))
    assert found.parameters > 10**9 and found.estimated == ""
    assert found.sizes.head_dim is None

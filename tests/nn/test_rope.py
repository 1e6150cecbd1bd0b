"""Rotary positions scaled for long sequences turn as fast as transformers lets them turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import fourfold as ff

PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Llama 3.1": (
        dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        dict(rope_scaling="llama3", rope_factor=8.0),
    ),
    "Qwen with YaRN": (
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
        dict(rope_scaling="yarn", rope_factor=4.0, rope_original_seq=32768),
    ),
    "YaRN between other turns": (
        dict(rope_type="yarn", factor=16.0, beta_fast=8.0, beta_slow=2.0, attention_factor=1.5),
        dict(rope_scaling="yarn", rope_factor=16.0, rope_slow=2.0, rope_fast=8.0, rope_attention=1.5),
    ),
    "linear": (dict(rope_type="linear", factor=3.0), dict(rope_scaling="linear", rope_factor=3.0)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    theirs, ours = PUBLISHED[name]
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=131072,
        rope_parameters={"rope_theta": 5e5, "original_max_position_embeddings": 8192, **theirs},
    )  # fmt: skip
    frequencies, attention = ROPE_INIT_FUNCTIONS[theirs["rope_type"]](config, torch.device("cpu"))
    rope = ff.models.config("llama-3-8b", **ours).rope
    torch.testing.assert_close(rope.frequencies(torch.float32, torch.device("cpu")), frequencies, rtol=1e-6, atol=0)
    assert rope.attention == pytest.approx(attention, rel=1e-12)


def test_the_packaged_size_is_scaled_as_published() -> None:
    rope = ff.models.config("llama-3.1-8b").rope
    assert rope == ff.models.config("llama-3-8b", **PUBLISHED["Llama 3.1"][1]).rope
    cos, _ = rope.tables(4, None, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert cos.dtype is torch.float32


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(rope_factor=0.5), "rope_factor=0.5 must be at least 1"),
        (dict(rope_scaling="ntk"), "rope_scaling='ntk' is none of"),
        (dict(rope_scaling="yarn", rope_slow=40.0), "rope_slow=40.0 must be above 0 and below rope_fast=32.0"),
        (dict(rope_scaling="llama3", rope_slow=0.0), "rope_slow=0.0 must be above 0"),
        (dict(rope_attention=-1.0), "rope_attention=-1.0 must be a finite number of at least 0"),
    ],
)
def test_what_is_impossible_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ff.models.config("llama-tiny", **changes)

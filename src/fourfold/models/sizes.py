"""Published sizes by name, as fields of `ModelConfig`.

This file imports nothing of Fourfold: the shell completion reads it by itself, without waiting for torch.
"""

from __future__ import annotations

from typing import Any


def _gpt(layers: int, hidden: int, heads: int, **other: Any) -> dict[str, Any]:
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads)
    return {**sizes, "mlp_hidden": 4 * hidden, "vocab": 51200, "seq": 2048, **other}


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, mlp_hidden: int, **other: Any) -> dict[str, Any]:
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=hidden // heads)
    choices = dict(norm="rms", mlp="swiglu", positions="rope", rope_theta=500000.0, bias=False, tied=False)
    return {**sizes, "mlp_hidden": mlp_hidden, "vocab": 128256, "seq": 8192, **choices, **other}


def _mixture(experts: int, top_k: int, expert_hidden: int, *sizes: int, **other: Any) -> dict[str, Any]:
    layers, hidden, heads, kv_heads, mlp_hidden = sizes
    mixture = dict(experts=experts, top_k=top_k, expert_hidden=expert_hidden, aux=0.001, rope_theta=1e6)
    return _llama(layers, hidden, heads, kv_heads, mlp_hidden, **{**mixture, **other})


LLAMA_3_1 = dict(seq=131072, rope_scaling="llama3", rope_factor=8.0, rope_slow=1.0, rope_fast=4.0)
"""What Llama 3.1 changed for long sequences."""
SIZES: dict[str, dict[str, Any]] = {
    "gpt-tiny": _gpt(2, 48, 24, vocab=257, seq=128),
    "gpt-125m": _gpt(12, 768, 12, vocab=50257, seq=1024),
    "gpt-1.4b": _gpt(24, 2048, 16, tied=False),
    "gpt-2.8b": _gpt(32, 2560, 20, tied=False),
    # The sizes of arXiv 2305.13525 and 2502.08145, at which the published 4D algorithm was measured.
    "gpt-5b": _gpt(24, 4096, 32),
    "gpt-10b": _gpt(32, 5120, 40),
    "gpt-20b": _gpt(32, 7168, 56),
    "gpt-40b": _gpt(38, 9216, 72),
    "gpt-60b": _gpt(56, 9216, 72),
    "gpt-80b": _gpt(42, 12288, 96),
    "gpt-160b": _gpt(84, 12288, 96),
    "gpt-320b": _gpt(96, 16384, 128),
    "gpt-640b": _gpt(192, 16384, 128),
    "llama-tiny": _llama(2, 48, 24, 4, 96, vocab=257, seq=128, rope_theta=10000.0),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336),
    "llama-3.1-8b": _llama(32, 4096, 32, 8, 14336, **LLAMA_3_1),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248),
    "moe-tiny": _mixture(8, 2, 48, 2, 48, 24, 4, 96, vocab=257, seq=128, rope_theta=10000.0, aux=0.01),
    "mixtral-8x7b": _mixture(8, 2, 14336, 32, 4096, 32, 8, 14336, vocab=32000, seq=32768),
    "mixtral-8x22b": _mixture(8, 2, 16384, 56, 6144, 48, 8, 16384, vocab=32768, seq=65536),
    "qwen3-30b-a3b": _mixture(
        128, 8, 768, 48, 2048, 32, 4, 6144, head_dim=128, qk_norm=True, norm_eps=1e-6, vocab=151936, seq=40960
    ),
}
"""The published sizes by name, as fields of `ModelConfig`."""

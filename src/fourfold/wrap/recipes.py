"""What structure does not tell of a family of models, by the `model_type` of its config.

Small data: a family that is not here, or a module that no recipe names, is found by structure (structure.py).
"""

from __future__ import annotations

from fourfold.wrap.plan import Expand, Heads, Word

CONTRASTED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("clip", "chinese_clip", "metaclip_2"), ("visual_projection", "text_projection")),
    **dict.fromkeys(("siglip", "siglip2"), ("vision_model.head", "text_model.head")),
}
"""Modules of each family whose rows are compared with each other when the model is called with return_loss=True."""

RECIPES: dict[str, dict[str, Word]] = {
    "gpt2": {"attn.c_attn": Expand(parts="qkv")},  # columns of q, then of k, then of v
    "phi3": {"self_attn.qkv_proj": Expand(parts="qkv"), "mlp.gate_up_proj": Expand(parts=2)},
    "t5": {"relative_attention_bias": Heads()},
}

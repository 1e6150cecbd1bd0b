"""Hugging Face's config.json as fields of `Config`, for the model types that those can express exactly.

Read with json alone. Values that a file leaves out are those of the type's own defaults; sizes without which there is
no model must be there. Rotary scaling and sliding windows change which numbers are computed, not what a step costs
here: attention runs, and is priced, over whole sequences. An `exact` reading, for weights that come with the file,
refuses whatever would change a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fourfold.spelling import nearest

GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu", "gelu_fast", "gelu_python")
"""One elementwise pass each."""
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Those that are what runs here."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
NEUTRAL = {
    "_name_or_path", "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "layer_types", "max_window_layers",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "reorder_and_upcast_attn",
    "return_dict", "rope_scaling", "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "sliding_window",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window",
}  # fmt: skip
"""Keys that change nothing that is priced."""
INEXACT = {
    "auto_map": "the folder brings code of its own; remove the key where the type's usual code computes the same",
    "quantization_config": "its weights are packed; save them in a floating dtype",
}
"""Keys that an exact reading refuses."""


class Source:
    """A config.json and which of its keys were read; `exact` where numbers must be right, not costs alone."""

    def __init__(self, path: Path, keys: Mapping[str, Any], *, exact: bool = False) -> None:
        self.path, self.keys, self.exact = path, keys, exact
        self.read: set[str] = {"model_type"}

    def need(self, *names: str) -> Any:
        """The value under the first of the names that is there."""
        self.read.update(names)
        for name in names:
            if self.keys.get(name) is not None:
                return self.keys[name]
        raise ValueError(f"{self.path} lacks {' or '.join(names)}, which model_type={self.kind!r} needs")

    def get(self, name: str, default: Any) -> Any:
        self.read.add(name)
        value = self.keys.get(name)
        return default if value is None else value

    @property
    def kind(self) -> str:
        return str(self.keys.get("model_type"))

    def refuse(self, what: str, why: str) -> ValueError:
        if self.exact:
            return ValueError(f"{self.path}: {what}: {why}; so the model would compute other numbers than these files'")
        return ValueError(
            f"{self.path}: {what}: {why}; a Config cannot say that: build it of fourfold.nn layers and name the "
            "function, package.module:function"
        )

    def expect(self, name: str, default: Any, allowed: tuple[Any, ...], why: str) -> Any:
        """A value that must be one of those that the reference model computes."""
        value = self.get(name, default)
        if value not in allowed:
            raise self.refuse(f"{name}={value!r}", why)
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """A table of keys, empty where there is none."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: {name}={value!r}; it must be a table of keys")
        return value


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a config.json, which has a model_type."""
    try:
        keys = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise ValueError(f"{path} has no model_type; it is no config.json of a Hugging Face model")
    return keys


def read_foreign(path: Path, *, exact: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of `Config`, and notes on keys that were not read; with `exact` of a model that computes the same."""
    keys = read_keys(path)
    source = Source(path, keys, exact=exact)
    if experts := [key for key in EXPERTS if keys.get(key)]:
        raise source.refuse(f"{experts[0]}={keys[experts[0]]!r}", "a mixture of experts sends each token elsewhere")
    if source.kind in REFUSED:
        raise source.refuse(f"model_type={source.kind!r}", REFUSED[source.kind])
    if source.kind not in READERS:
        near = nearest(source.kind, list(READERS))
        raise ValueError(f"{path}: model_type={source.kind!r} is not understood{near}; those are {', '.join(READERS)}")
    for key, why in INEXACT.items() if exact else ():
        if keys.get(key):
            raise source.refuse(key, why)
    fields = READERS[source.kind](source)
    return fields, tuple(_notes(source))


def _notes(source: Source) -> list[str]:
    left = [key for key in source.keys if key not in source.read]
    neutral, unknown = ([key for key in left if (key in NEUTRAL) is known] for known in (True, False))
    notes = []
    if neutral and not source.exact:
        notes.append(f"not read, for they change nothing that is priced: {', '.join(neutral)}")
    if unknown:
        notes.append(f"not read, for they are not known here: {', '.join(unknown)}")
    return notes


def _dropout(source: Source, default: float, *names: str) -> float:
    """All of them, which must be equal."""
    found = {name: source.get(name, default) for name in names}
    if len(set(found.values())) > 1:
        raise source.refuse(", ".join(f"{name}={p}" for name, p in found.items()), "dropout is one number")
    return found[names[0]]


def _gpt2(source: Source) -> dict[str, Any]:
    hidden, heads = source.need("n_embd"), source.need("n_head")
    source.expect("activation_function", "gelu_new", *_gelu(source))
    source.expect("add_cross_attention", False, (False,), "blocks read no other sequence")
    if source.exact:
        source.expect("scale_attn_weights", True, (True,), "scores are divided by the root of the head's width")
        source.expect("scale_attn_by_inverse_layer_idx", False, (False,), "scores are scaled alike in all layers")
    return dict(
        layers=source.need("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_head_dim(source, hidden, heads),
        mlp_hidden=source.get("n_inner", 4 * hidden),
        vocab=source.need("vocab_size"),
        seq=source.need("n_positions", "n_ctx"),
        tied=source.get("tie_word_embeddings", True),
        dropout=_dropout(source, 0.1, "resid_pdrop", "embd_pdrop", "attn_pdrop"),
        norm_eps=source.get("layer_norm_epsilon", 1e-5),
    )


def _gpt_neox(source: Source) -> dict[str, Any]:
    hidden, heads = source.need("hidden_size"), source.need("num_attention_heads")
    source.expect("use_parallel_residual", True, (False,), "attention and MLP run one after the other")
    source.expect("hidden_act", "gelu", *_gelu(source))
    source.expect("attention_bias", True, (True,), "biases are on all layers or on none")
    return dict(
        layers=source.need("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=_head_dim(source, hidden, heads),
        mlp_hidden=source.need("intermediate_size"),
        vocab=source.need("vocab_size"),
        seq=source.need("max_position_embeddings"),
        positions="rope",
        rope_theta=_rope(source, "rotary_emb_base", "rotary_pct", 0.25),
        tied=source.get("tie_word_embeddings", False),
        dropout=_dropout(source, 0.0, "hidden_dropout", "attention_dropout"),
        norm_eps=source.get("layer_norm_eps", 1e-5),
    )


def _llama(source: Source, *, eps: float = 1e-6, head_dim: int | None = None, **choices: Any) -> dict[str, Any]:
    """Llama, and those that differ from it in a default or two."""
    hidden, heads = source.need("hidden_size"), source.need("num_attention_heads")
    source.expect("hidden_act", "silu", ("silu", "swish"), "the MLP is computed with SwiGLU")
    biases = {name: source.get(name, False) for name in ("attention_bias", "mlp_bias")}
    if len(set(biases.values())) > 1:
        raise source.refuse(
            ", ".join(f"{name}={on}" for name, on in biases.items()), "biases are on all layers or on none"
        )
    if source.exact and source.kind != "llama" and any(biases.values()):
        raise source.refuse("attention_bias=True", f"model_type={source.kind!r} has no biases on all layers")
    source.expect("attention_dropout", 0.0, (0.0, 0), "dropout acts after every sublayer or nowhere")
    if source.exact:
        _require_whole_sequences(source)
    return dict(
        layers=source.need("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(source, heads),
        head_dim=source.get("head_dim", head_dim) or _head_dim(source, hidden, heads),
        mlp_hidden=source.need("intermediate_size"),
        vocab=source.need("vocab_size"),
        seq=source.need("max_position_embeddings"),
        norm="rms",
        mlp="swiglu",
        positions="rope",
        rope_theta=_rope(source, "rope_theta", "partial_rotary_factor", 1.0),
        bias=biases["mlp_bias"],
        tied=source.get("tie_word_embeddings", False),
        norm_eps=source.get("rms_norm_eps", eps),
        **choices,
    )


def _gelu(source: Source) -> tuple[tuple[str, ...], str]:
    """The activations that are allowed, and why."""
    if source.exact:
        return TANH_GELU, "the MLP is computed with GELU in its tanh form"
    return GELU, "the MLP is computed with GELU"


def _rope(source: Source, theta_key: str, part_key: str, part: float) -> float:
    """The base of rotary angles, from where the type's own code looks for it."""
    rope = source.table("rope_parameters")
    scaling = source.keys.get("rope_scaling")  # changes no cost, so that it is named there as not read
    if isinstance(scaling, dict) and scaling:
        rope = scaling
    turned, theta = rope.get("partial_rotary_factor"), rope.get("rope_theta")
    turned = source.get(part_key, part) if turned is None else turned
    if turned != 1 and (source.exact or part != 1):
        raise source.refuse(f"{part_key}={turned}", "rotary positions turn whole heads")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if source.exact and (kind != "default" or any(isinstance(value, dict) for value in rope.values())):
        raise source.refuse(f"rope_scaling={dict(rope)}", "rotary angles are not scaled")
    theta = source.get(theta_key, 10000.0) if theta is None else theta
    return float(theta) if isinstance(theta, int) else theta


def _require_whole_sequences(source: Source) -> None:
    """Raise where a token reads only the last ones before it."""
    windowed = source.kind == "mistral" or (source.kind == "qwen3" and source.get("use_sliding_window", False))
    window = source.keys.get("sliding_window", 4096) if windowed else None  # null: none; left out: 4096
    seq = source.need("max_position_embeddings")
    if window is not None and not (isinstance(window, int) and isinstance(seq, int) and window >= seq):
        raise source.refuse(
            f"sliding_window={window}",
            f"attention reads whole sequences, here of max_position_embeddings={seq}; lower that to {window} in "
            "config.json and train on sequences no longer",
        )


def _kv_heads(source: Source, heads: int) -> int:
    """Where a file leaves them out, as many as the type says; null is as many as there are heads."""
    left_out = {"mistral": 8, "qwen3": 32}.get(source.kind, heads)
    return source.get("num_key_value_heads", heads if "num_key_value_heads" in source.keys else left_out)


def _head_dim(source: Source, hidden: int, heads: int) -> int:
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ValueError(f"{source.path}: a width of {hidden!r} is not divisible by {heads!r} heads")
    return hidden // heads


READERS: dict[str, Callable[[Source], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen3": lambda source: _llama(source, head_dim=128, qk_norm=True),
}
REFUSED = {
    "qwen2": "it has biases on q, k and v and on no other layer",
    "gemma": "it scales embeddings, gates its MLP with GELU and offsets the weights of norms by 1",
    "gemma2": "it norms the outputs of sublayers too and caps scores",
    "gemma3_text": "it norms the outputs of sublayers too and scales embeddings",
}
"""Types that are known and cannot be expressed, and why."""

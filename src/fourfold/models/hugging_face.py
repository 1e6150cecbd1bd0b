"""Reads and writes Hugging Face's config.json, for the model types that a `ModelConfig` can express exactly.

The file is read as fields of `ModelConfig`, with json alone. A value that is not in the file has the default of its
model type; sizes that have no default must be there. Sliding windows change which numbers are computed but not what a
step costs here: attention runs, and is priced, over whole sequences. An `exact` reading, for weights that come with the
file, refuses everything that would change a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import log
from pathlib import Path
from typing import Any

from fourfold.errors import UnsupportedModelError, nearest
from fourfold.models.config import ModelConfig
from fourfold.parse import parse_json

PLAINLY_ROUTED: dict[str, Any] = dict(
    score="softmax", shared_hidden=0, groups=1, top_groups=1, route_scale=1.0, capacity=0.0, moe_reads="current",
    bias_rate=0.0,
)  # fmt: skip
"""The fields that both types with experts fix: each token goes to the experts with the largest scores."""
CHOICES: dict[str, dict[str, Any]] = {
    "gpt2": dict(norm="layer", mlp="gelu", positions="learned", bias=True, qk_norm=False),
    "gpt_neox": dict(norm="layer", mlp="gelu", positions="rope", bias=True, qk_norm=False),
    "llama": dict(norm="rms", mlp="swiglu", positions="rope", qk_norm=False),
    "mistral": dict(norm="rms", mlp="swiglu", positions="rope", qk_norm=False),
    "qwen3": dict(norm="rms", mlp="swiglu", positions="rope", bias=False, qk_norm=True),
    "mixtral": dict(
        norm="rms", mlp="swiglu", positions="rope", bias=False, qk_norm=False, normalize_top_k=True, dense_layers=0,
        **PLAINLY_ROUTED,
    ),
    "qwen3_moe": dict(norm="rms", mlp="swiglu", positions="rope", bias=False, qk_norm=True, **PLAINLY_ROUTED),
}  # fmt: skip
"""The fields of `ModelConfig` that each type fixes."""
MIXTURES = ("mixtral", "qwen3_moe")
"""The types that have a mixture of experts."""
SIZE_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "mlp_hidden": "intermediate_size",
    "vocab": "vocab_size",
    "seq": "max_position_embeddings",
}
"""The keys of sizes in all types but gpt2."""
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
"""The types that models are exported as, and the classes of transformers that compute them."""
ORIGINAL_SEQ = "rope_original_seq"
ROPE_KEYS = {
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "original_max_position_embeddings": ORIGINAL_SEQ,
        "low_freq_factor": "rope_slow",
        "high_freq_factor": "rope_fast",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": ORIGINAL_SEQ,
        "beta_slow": "rope_slow",
        "beta_fast": "rope_fast",
        "attention_factor": "rope_attention",
    },
}
"""The keys of scaled rotary positions, by kind, and the fields of `ModelConfig` that they are."""
GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu", "gelu_fast", "gelu_python")
"""Names of GELU and its approximations, which all cost one elementwise pass."""
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh approximation, which is what the reference model computes."""
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts that a router chooses from."""
EXPERT_KEYS = (*EXPERT_COUNT_KEYS, "moe_intermediate_size")
NEUTRAL = {
    "_name_or_path", "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "layer_types", "max_window_layers",
    "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "reorder_and_upcast_attn", "return_dict", "rope_scaling", "router_jitter_noise",
    "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "sliding_window",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache", "use_sliding_window",
}  # fmt: skip
"""Keys that do not change the cost of a step."""
INEXACT = {
    "auto_map": "the folder has code of its own; remove the key if the usual code of the model type computes the same",
    "quantization_config": "its weights are packed; save them in a floating-point dtype",
}
"""Keys that an exact reading refuses, and why."""


class ConfigJson:
    """A config.json and which of its keys were read. With `exact` the numbers must be right, not only the costs."""

    def __init__(self, path: Path, keys: Mapping[str, Any], *, exact: bool = False) -> None:
        self.path, self.keys, self.exact = path, keys, exact
        self.read: set[str] = {"model_type"}

    def need(self, *names: str) -> Any:
        """Return the value of the first of these keys that is in the file."""
        self.read.update(names)
        for name in names:
            if self.keys.get(name) is not None:
                return self.keys[name]
        raise ValueError(f"{self.path} lacks {' or '.join(names)}, which model_type={self.kind!r} needs")

    def get(self, name: str, default: Any) -> Any:
        """Return the value of a key, or the default where the key is missing or null."""
        self.read.add(name)
        value = self.keys.get(name)
        return default if value is None else value

    @property
    def kind(self) -> str:
        return str(self.keys.get("model_type"))

    def refuse(self, what: str, why: str) -> UnsupportedModelError:
        """Return the error for a key that the reference model cannot express."""
        way_out = (
            "the model would not compute the numbers of these weights"
            if self.exact
            else "a ModelConfig cannot express that: build the model from fourfold.nn layers and name the function, "
            "package.module:function"
        )
        return UnsupportedModelError(f"{self.path}: {what}: {why}; {way_out}", f"{what}: {why}")

    def expect(self, name: str, default: Any, allowed: tuple[Any, ...], why: str) -> Any:
        """Return the value of a key; raise an error unless the reference model computes it."""
        value = self.get(name, default)
        if value not in allowed:
            raise self.refuse(f"{name}={value!r}", why)
        return value

    def table(self, name: str) -> Mapping[str, Any]:
        """Return a table of keys, empty if the key is missing."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: {name}={value!r} must be a table of keys")
        return value


def read_keys(path: Path) -> dict[str, Any]:
    """Return the keys of a config.json, which must have a model_type."""
    try:
        keys = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise ValueError(f"{path} has no model_type; it is not the config.json of a Hugging Face model")
    return keys


def read_config_json(path: Path, *, exact: bool = False) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return fields of `ModelConfig`, and notes on keys that were not read.

    With `exact` the model computes the same numbers as the model that the file belongs to.
    """
    keys = read_keys(path)
    source = ConfigJson(path, keys, exact=exact)
    experts = [key for key in EXPERT_KEYS if keys.get(key)]
    if experts and source.kind not in MIXTURES:
        types = ", ".join(MIXTURES)
        raise source.refuse(
            f"{experts[0]}={keys[experts[0]]!r}",
            f"a mixture of experts of another type than {types}",
        )
    if source.kind in REFUSED:
        raise source.refuse(f"model_type={source.kind!r}", REFUSED[source.kind])
    if source.kind not in READERS:
        near = nearest(source.kind, list(READERS))
        types = ", ".join(READERS)
        raise UnsupportedModelError(
            f"{path}: model_type={source.kind!r} cannot be read{near}; the types are {types}",
            f"model_type={source.kind!r} is none of those that Fourfold trains as they are, {types}",
        )
    for key, why in INEXACT.items() if exact else ():
        if keys.get(key):
            raise source.refuse(key, why)
    fields = {**CHOICES[source.kind], **READERS[source.kind](source)}
    left = [key for key in source.keys if key not in source.read]
    neutral, unknown = ([key for key in left if (key in NEUTRAL) is known] for known in (True, False))
    notes = []
    if neutral and not exact:
        notes.append(f"not read, because they do not change the cost of a step: {', '.join(neutral)}")
    if unknown:
        notes.append(f"not read, because Fourfold does not know them: {', '.join(unknown)}")
    if exact and fields.get("aux"):
        notes.append(
            f"aux={fields['aux']} weighs the balance of experts in each sequence and block; transformers computes "
            "such a loss over a batch and all blocks together, and only with output_router_logits=true"
        )
    return fields, tuple(notes)


def _dropout(source: ConfigJson, default: float, *names: str, attention: str) -> dict[str, float]:
    """Return the dropout that these keys give, which must all be equal, and that of attention weights."""
    found = {name: source.get(name, default) for name in names}
    if len(set(found.values())) > 1:
        raise source.refuse(
            ", ".join(f"{name}={p}" for name, p in found.items()), "dropout is the same after all sublayers"
        )
    dropout, of_attention = found[names[0]] if names else 0.0, source.get(attention, default)
    return dict(dropout=dropout) | ({} if of_attention == dropout else dict(attention_dropout=of_attention))


def _gpt2(source: ConfigJson) -> dict[str, Any]:
    hidden, heads = source.need("n_embd"), source.need("n_head")
    source.expect("activation_function", "gelu_new", *_gelu(source))
    source.expect("add_cross_attention", False, (False,), "blocks do not read another sequence")
    if source.exact:
        source.expect("scale_attn_weights", True, (True,), "scores are divided by the square root of head_dim")
        source.expect("scale_attn_by_inverse_layer_idx", False, (False,), "all layers scale scores in the same way")
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
        **_dropout(source, 0.1, "resid_pdrop", "embd_pdrop", attention="attn_pdrop"),
        norm_eps=source.get("layer_norm_epsilon", 1e-5),
    )


def _gpt_neox(source: ConfigJson) -> dict[str, Any]:
    sizes = {field: source.need(key) for field, key in SIZE_KEYS.items()}
    source.expect("use_parallel_residual", True, (False,), "attention and MLP run one after the other")
    source.expect("hidden_act", "gelu", *_gelu(source))
    source.expect("attention_bias", True, (True,), "biases are on all layers or on none")
    return dict(
        **sizes,
        kv_heads=sizes["heads"],
        head_dim=_head_dim(source, sizes["hidden"], sizes["heads"]),
        **_rope(source, "rotary_emb_base", "rotary_pct", 0.25),
        tied=source.get("tie_word_embeddings", False),
        **_dropout(source, 0.0, "hidden_dropout", attention="attention_dropout"),
        norm_eps=source.get("layer_norm_eps", 1e-5),
    )


def _llama(source: ConfigJson, head_dim: int | None = None) -> dict[str, Any]:
    """Read Llama, and the types that differ from it only in a default or two."""
    sizes = {field: source.need(key) for field, key in SIZE_KEYS.items()}
    hidden, heads = sizes["hidden"], sizes["heads"]
    source.expect("hidden_act", "silu", ("silu", "swish"), "the MLP is computed with SwiGLU")
    biases = {name: source.get(name, False) for name in ("attention_bias", "mlp_bias")}
    if len(set(biases.values())) > 1:
        raise source.refuse(
            ", ".join(f"{name}={on}" for name, on in biases.items()), "biases are on all layers or on none"
        )
    if source.exact and source.kind != "llama" and any(biases.values()):
        raise source.refuse("attention_bias=True", f"model_type={source.kind!r} does not have biases on all layers")
    if source.exact:
        _require_whole_sequences(source)
    return dict(
        **sizes,
        **_dropout(source, 0.0, attention="attention_dropout"),
        kv_heads=_kv_heads(source, heads),
        head_dim=source.get("head_dim", head_dim) or _head_dim(source, hidden, heads),
        **_rope(source, "rope_theta", "partial_rotary_factor", 1.0),
        bias=biases["mlp_bias"],
        tied=source.get("tie_word_embeddings", False),
        norm_eps=source.get("rms_norm_eps", 1e-5 if source.kind == "mixtral" else 1e-6),
    )


def _mixtral(source: ConfigJson) -> dict[str, Any]:
    if source.exact:
        source.expect("router_jitter_noise", 0.0, (0.0,), "routers read tokens without noise")
    fields = _llama(source)
    return {**fields, **_mixture(source, chosen=2), "expert_hidden": fields["mlp_hidden"]}


def _qwen3_moe(source: ConfigJson) -> dict[str, Any]:
    fields, mixture = _llama(source), _mixture(source, chosen=8)
    mixture["expert_hidden"] = source.need("moe_intermediate_size")
    mixture["normalize_top_k"] = source.get("norm_topk_prob", False)
    mixture["dense_layers"] = dense = _dense_layers(source, fields["layers"], mixture["experts"])
    return fields if dense == fields["layers"] else {**fields, **mixture}


def _mixture(source: ConfigJson, chosen: int) -> dict[str, Any]:
    """Return the fields that both types with experts have; a token goes through `chosen` if the file does not say."""
    return dict(
        experts=source.need("num_local_experts", "num_experts"),
        top_k=source.get("num_experts_per_tok", chosen),
        aux=source.get("router_aux_loss_coef", 0.001),
    )


def _dense_layers(source: ConfigJson, layers: int, experts: int) -> int:
    """Return how many first blocks have an MLP in place of experts; raise if other blocks have one."""
    step, listed = source.get("decoder_sparse_step", 1), source.get("mlp_only_layers", [])
    if not all(isinstance(number, int) for number in (step, layers, experts, *listed)) or step < 1:
        raise ValueError(
            f"{source.path}: decoder_sparse_step={step!r}, mlp_only_layers={listed!r}, num_hidden_layers={layers!r} "
            f"and {experts!r} experts must be whole numbers, and the first at least 1"
        )
    dense = [layer for layer in range(layers) if layer in listed or not experts or (layer + 1) % step]
    if dense != list(range(len(dense))):
        raise source.refuse(
            f"decoder_sparse_step={step}, mlp_only_layers={listed}",
            "only the first blocks may have an MLP in place of experts",
        )
    return len(dense)


def _gelu(source: ConfigJson) -> tuple[tuple[str, ...], str]:
    """Return the activations that are allowed, and the reason."""
    if source.exact:
        return TANH_GELU, "the MLP is computed with GELU in its tanh form"
    return GELU, "the MLP is computed with GELU"


def _rope(source: ConfigJson, theta_key: str, part_key: str, part: float) -> dict[str, Any]:
    """Return the fields of rotary positions, from where the type's own code looks for them."""
    rope = source.table("rope_scaling") or source.table("rope_parameters")
    source.read.add("rope_parameters")
    turned, theta = rope.get("partial_rotary_factor"), rope.get("rope_theta")
    turned = source.get(part_key, part) if turned is None else turned
    usual = 1e6 if source.kind == "mixtral" else 10000.0
    if turned != 1 and (source.exact or part != 1):
        raise source.refuse(f"{part_key}={turned}", "rotary positions rotate whole heads")
    theta = source.get(theta_key, usual) if theta is None else theta
    return {"rope_theta": float(theta) if isinstance(theta, int) else theta, **_rope_scaling(source, rope)}


def _rope_scaling(source: ConfigJson, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of scaled rotary positions; an exact reading refuses what is scaled in another way."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    by_layer = any(isinstance(value, dict) for value in rope.values())
    if kind == "default" and not by_layer:
        return {}
    if by_layer or kind not in ROPE_KEYS or rope.get("factor") is None or rope.get("truncate") is False:
        if source.exact:
            known = ", ".join(ROPE_KEYS)
            raise source.refuse(f"rope_scaling={dict(rope)}", f"rotary angles are scaled by a factor, as {known} do")
        source.read.discard("rope_scaling")  # it changes no cost, and a note says so
        return {}
    given = {field: rope[key] for key, field in ROPE_KEYS[kind].items() if rope.get(key) is not None}
    if ORIGINAL_SEQ in ROPE_KEYS[kind].values():  # as transformers does where the file does not name it
        given.setdefault(ORIGINAL_SEQ, source.need("max_position_embeddings"))
    if kind == "yarn" and rope.get("mscale") and rope.get("mscale_all_dim") and "rope_attention" not in given:
        grown = 0.1 * log(rope["factor"])
        given["rope_attention"] = (grown * rope["mscale"] + 1) / (grown * rope["mscale_all_dim"] + 1)
    whole = (ORIGINAL_SEQ,)
    fields = {name: value if name in whole else float(value) for name, value in given.items()}
    return {"rope_scaling": kind, **fields}


def _require_whole_sequences(source: ConfigJson) -> None:
    """Raise an error if attention has a window that is shorter than a sequence."""
    qwen3 = source.kind in ("qwen3", "qwen3_moe")
    windowed = source.kind in ("mistral", "mixtral") or (qwen3 and source.get("use_sliding_window", False))
    missing = None if source.kind == "mixtral" else 4096
    window = source.keys.get("sliding_window", missing) if windowed else None  # null means no window
    seq = source.need("max_position_embeddings")
    if window is not None and not (isinstance(window, int) and isinstance(seq, int) and window >= seq):
        raise source.refuse(
            f"sliding_window={window}",
            f"attention reads whole sequences, here of max_position_embeddings={seq}; lower that to {window} in "
            "config.json and train on sequences of at most that length",
        )


def _kv_heads(source: ConfigJson, heads: int) -> int:
    """Return the number of KV heads: null means the number of heads, a missing key the default of the type."""
    missing = {"mistral": 8, "mixtral": 8, "qwen3": 32, "qwen3_moe": 4}.get(source.kind, heads)
    return source.get("num_key_value_heads", heads if "num_key_value_heads" in source.keys else missing)


def _head_dim(source: ConfigJson, hidden: int, heads: int) -> int:
    """Return the width of a head for types that have no key for it."""
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ValueError(f"{source.path}: the hidden size {hidden!r} is not divisible by {heads!r} heads")
    return hidden // heads


READERS: dict[str, Callable[[ConfigJson], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen3": lambda source: _llama(source, head_dim=128),
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
REFUSED = {
    "qwen2": "it has biases on q, k and v but on no other layer",
    "gemma": "it scales embeddings, gates its MLP with GELU and adds 1 to the weights of norms",
    "gemma2": "it also norms the outputs of sublayers, and caps attention scores",
    "gemma3_text": "it also norms the outputs of sublayers, and scales embeddings",
}
"""Types that a `ModelConfig` cannot express, and why."""


# Writing


def model_type_of(config: ModelConfig) -> str:
    """Return the type that computes the same as a model of this config; raise, with the reason, if no type does."""
    types = [model_type for model_type in ARCHITECTURES if (model_type in MIXTURES) == (config.experts > 0)]
    faults = {model_type: _misfits(config, model_type) for model_type in types}
    nearest_type = min(faults, key=lambda name: len(faults[name]))
    if faults[nearest_type]:
        raise ValueError(
            f"no type of models that Hugging Face has and Fourfold knows computes this one; {nearest_type} comes "
            f"nearest, and needs {', '.join(faults[nearest_type])}"
        )
    return nearest_type


def _misfits(config: ModelConfig, model_type: str) -> list[str]:
    """Return the fields in which the model differs from what a type can express."""
    found = [
        f"{name}={value!r} instead of {getattr(config, name)!r}"
        for name, value in CHOICES[model_type].items()
        if getattr(config, name) != value
    ]
    if model_type in ("gpt2", "gpt_neox"):
        if config.kv_heads != config.heads:
            found.append(f"kv_heads={config.heads} instead of {config.kv_heads}")
        if config.heads * config.head_dim != config.hidden:
            found.append(f"heads*head_dim={config.hidden} instead of {config.heads}*{config.head_dim}")
    elif model_type == "llama" and config.hidden % config.heads:
        found.append(f"hidden divisible by heads={config.heads} instead of {config.hidden}")
    return found


def _rope_keys(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of scaled rotary positions, with every number as it is used."""
    if config.rope_scaling == "none":
        return {}
    used = config.rope
    values = dict(rope_factor=used.factor, rope_slow=used.slow, rope_fast=used.fast, rope_attention=used.attention)
    values[ORIGINAL_SEQ] = used.original_seq
    keys = {key: values[field] for key, field in ROPE_KEYS[config.rope_scaling].items()}
    return {"rope_type": config.rope_scaling, **keys}


def config_keys(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the keys of a config.json that determine what is computed."""
    common = dict(model_type=model_type, architectures=[ARCHITECTURES[model_type]], tie_word_embeddings=config.tied)
    if model_type == "gpt2":
        keys = dict(
            vocab_size=config.vocab,
            n_embd=config.hidden,
            n_head=config.heads,
            n_layer=config.layers,
            n_inner=config.mlp_hidden,
        )
        keys |= dict(resid_pdrop=config.dropout, embd_pdrop=config.dropout, attn_pdrop=config.dropout_of_attention)
        keys |= dict(n_positions=config.seq, layer_norm_epsilon=config.norm_eps, activation_function="gelu_new")
        return {**common, **keys}
    keys = {key: getattr(config, field) for field, key in SIZE_KEYS.items()}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta, **_rope_keys(config)}
    if model_type == "gpt_neox":
        keys |= dict(hidden_act="gelu_new", use_parallel_residual=False, attention_bias=True)
        keys |= dict(hidden_dropout=config.dropout, attention_dropout=config.dropout_of_attention)
        keys |= dict(layer_norm_eps=config.norm_eps)
        keys |= dict(rotary_pct=1.0, rotary_emb_base=config.rope_theta)  # older versions of transformers read these
        return {**common, **keys, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}
    keys |= dict(hidden_act="silu", num_key_value_heads=config.kv_heads, head_dim=config.head_dim)
    keys |= dict(
        attention_bias=config.bias, attention_dropout=config.dropout_of_attention, rms_norm_eps=config.norm_eps
    )
    if model_type == "llama":
        keys |= dict(mlp_bias=config.bias)
    elif model_type != "mixtral":
        keys |= dict(use_sliding_window=False)
    if model_type in MIXTURES:
        keys |= _mixture_keys(config, model_type)
    return {**common, **keys, "rope_theta": config.rope_theta, "rope_parameters": rope}


def _mixture_keys(config: ModelConfig, model_type: str) -> dict[str, Any]:
    """Return the keys of a mixture of experts, by the names that all versions of transformers read."""
    keys = dict(num_experts_per_tok=config.top_k, router_aux_loss_coef=config.aux, output_router_logits=False)
    if model_type == "mixtral":
        only = dict(num_local_experts=config.experts, intermediate_size=config.expert_hidden, sliding_window=None)
        return {**keys, **only, "router_jitter_noise": 0.0}
    only = dict(num_experts=config.experts, moe_intermediate_size=config.expert_hidden)
    where = dict(decoder_sparse_step=1, mlp_only_layers=list(range(config.dense_layers)))
    return {**keys, **only, **where, "norm_topk_prob": config.normalize_top_k}

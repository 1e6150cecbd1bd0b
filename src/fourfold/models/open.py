"""Opens a model by name: a published size, a file that describes a model, or a function that builds one.

    gpt-80b                        a published size
    path/config.json, path/        Hugging Face's description of a model, or the folder that holds it
    path/model.toml                fields of `ModelConfig`; with `base = "gpt-5b"` only those that differ from it
    package.module:function        `function(grid, policy)` or `function()` returns an nn.Module

A file is read as a `ModelConfig`, which says exactly what a step computes and communicates. A model that it cannot
express is refused with the reason, never approximated. Keys that do not change the cost of a step are named in
`OpenedModel.notes`.

Hugging Face's config.json is read with json alone. A value that is not in the file has the default of its model type;
sizes that have no default must be there. Rotary scaling and sliding windows change which numbers are computed but not
what a step costs here: attention runs, and is priced, over whole sequences. An `exact` reading, for weights that come
with the file, refuses everything that would change a number.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from fourfold.grid import Grid
from fourfold.models.config import MODEL_FIELDS, ModelConfig, config, require_fields
from fourfold.models.sizes import SIZES
from fourfold.models.transformer import build
from fourfold.nn.layer import SPECS, Layer
from fourfold.policy import Policy
from fourfold.spelling import nearest

ModelBuilder = Callable[..., nn.Module]
ModelDefinition = ModelConfig | ModelBuilder
"""A config, or a function that builds a module."""

FORMS = "a published size, the path of a config.json or of its folder, the path of a .toml, or package.module:function"
DATA_ONLY = (
    "a function without arguments builds a plain module, which is replicated over data and cut over no other axis; to "
    "cut it, write function(grid, policy) with ff.parallelize or the layers of fourfold.nn"
)
"""Why a plain module runs on grids that use no axis but data."""

TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,)}
"""The types of values that a field of this type accepts; a field of any other type accepts a text."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model, and notes on keys of its description that were not read."""

    model: ModelDefinition
    notes: tuple[str, ...] = ()


def open_model(text: str) -> OpenedModel:
    """Return the model of this name, file or function."""
    if text in SIZES:
        return OpenedModel(config(text))
    path = Path(text).expanduser()
    if path.suffix == ".toml":
        return OpenedModel(_from_toml(_existing(path)))
    if path.suffix == ".json" or path.is_dir():
        fields, notes = read_config_json(_existing(path / "config.json" if path.is_dir() else path))
        return OpenedModel(_make_config(fields, str(path)), notes)
    if ":" in text:
        return OpenedModel(_import_function(text))
    if "/" in text:
        raise FileNotFoundError(f"there is no {path}; a model is {FORMS}")
    raise ValueError(
        f"there is no model {text!r}{nearest(text, list(SIZES))}; a model is {FORMS}; sizes: {', '.join(SIZES)}"
    )


def why_data_only(model: ModelDefinition) -> str:
    """Return why a model runs only on grids that use no axis but data; empty if it runs on any grid."""
    return "" if isinstance(model, ModelConfig) or _arguments(model) == 2 else DATA_ONLY


def build_on_meta(model: ModelDefinition, grid: Grid, policy: Policy) -> nn.Module:
    """Build this rank's part of the model on the meta device."""
    if isinstance(model, ModelConfig):
        return build(model, grid, policy=policy, device="meta")
    name = getattr(model, "__name__", repr(model))
    real, grid.device = grid.device, torch.device("meta")  # layers create their parameters on the grid's device
    try:
        with torch.device("meta"):
            made = model(grid, policy) if _arguments(model) == 2 else model()
    finally:
        grid.device = real
    if not isinstance(made, nn.Module):
        raise TypeError(f"{name} returned {type(made).__name__}; it must return an nn.Module")
    layers = [module for module in made.modules() if isinstance(module, Layer)]
    if is_plain(made) and grid.shape.world > grid.size("data"):
        raise ValueError(
            f"{name} builds a plain module, which the grid {grid} cannot cut; use data={grid.shape.world} and no other "
            "axis, or return ff.parallelize(module, grid, policy=policy)"
        )
    if any(not hasattr(layer, "gradients") for layer in layers):
        raise ValueError(
            f"{name} builds layers of fourfold.nn but does not call nn.layer.assemble(model, grid, policy)"
        )
    for what, tensor in (*made.named_parameters(), *made.named_buffers()):
        if not tensor.is_meta:
            raise ValueError(
                f"{name}: {what} is on {tensor.device}; the function runs inside torch.device('meta') and must not ask "
                "for another device, since a plan needs no memory"
            )
    return made


def is_plain(module: nn.Module) -> bool:
    """Return whether no layer of the module is cut over a grid."""
    return not any(isinstance(part, Layer) or SPECS in vars(part) for part in module.modules())


def _arguments(function: ModelBuilder) -> int:
    """Return the number of required arguments: 2 for (grid, policy), or 0."""
    needed = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if len(needed) not in (0, 2):
        raise ValueError(
            f"{getattr(function, '__name__', function)} needs {', '.join(part.name for part in needed)}; a function "
            "that builds a model takes (grid, policy), or nothing for a plain module"
        )
    return len(needed)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}; a model is {FORMS}")
    return path


def _from_toml(path: Path) -> ModelConfig:
    try:
        fields = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    base = fields.pop("base", None)
    if base is not None and base not in SIZES:
        raise ValueError(
            f"{path}: there is no model base={base!r}{nearest(str(base), list(SIZES))}; sizes: {', '.join(SIZES)}"
        )
    sizes = {} if base is None else SIZES[base]
    return _make_config({**sizes, **fields}, str(path))


def _make_config(fields: Mapping[str, Any], source: str) -> ModelConfig:
    """Return a config of these fields after checking their names and types."""
    require_fields(fields, f"{source}: ")
    for key, value in fields.items():
        kind = MODEL_FIELDS[key]
        allowed = TYPES.get(kind, (str,))
        # A bool is an int to Python, but layers = true is a mistake.
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            wanted = " or ".join(map(repr, get_args(kind))) or kind.__name__
            raise ValueError(f"{source}: {key}={value!r} is {type(value).__name__}; it must be {wanted}")
    required = [field.name for field in dataclasses.fields(ModelConfig) if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in fields]
    if missing:
        raise ValueError(
            f"{source} lacks {', '.join(missing)}; give them, or give base, the published size that has the others"
        )
    try:
        return ModelConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _import_function(text: str) -> ModelBuilder:
    where, _, name = text.rpartition(":")
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module exists; something that it imports does not
        raise ValueError(f"{text}: there is no module {error.name!r}; install it, or set PYTHONPATH=.") from error
    if not hasattr(module, name):
        raise ValueError(f"{text}: {where} has no {name!r}{nearest(name, dir(module))}; give package.module:function")
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(
            f"{text} is {type(function).__name__}, not a function that builds a model; give package.module:function"
        )
    _arguments(function)
    return function


# --- Hugging Face's config.json

GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu", "gelu_fast", "gelu_python")
"""Names of GELU and its approximations, which all cost one elementwise pass."""
TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")
"""Names of the tanh approximation, which is what the reference model computes."""
EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
"""Keys that a mixture of experts has; one that is set is enough to refuse the file."""
NEUTRAL = {
    "_name_or_path", "architectures", "attn_implementation", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "layer_types", "max_window_layers",
    "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "reorder_and_upcast_attn",
    "return_dict", "rope_scaling", "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "sliding_window",
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

    def __init__(self, path: Path, keys: Mapping[str, Any], *, exact: bool) -> None:
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
        """Return the value of a key, or the default if the key is missing or null."""
        self.read.add(name)
        value = self.keys.get(name)
        return default if value is None else value

    @property
    def kind(self) -> str:
        return str(self.keys.get("model_type"))

    def refuse(self, what: str, why: str) -> ValueError:
        """Return the error for a key that the reference model cannot express."""
        if self.exact:
            return ValueError(f"{self.path}: {what}: {why}; the model would not compute the numbers of these weights")
        return ValueError(
            f"{self.path}: {what}: {why}; a ModelConfig cannot express that: build the model from fourfold.nn layers "
            "and name the function, package.module:function"
        )

    def expect(self, name: str, default: Any, allowed: tuple[Any, ...], why: str) -> None:
        """Raise an error unless the reference model computes the value of a key."""
        value = self.get(name, default)
        if value not in allowed:
            raise self.refuse(f"{name}={value!r}", why)

    def same(self, default: Any, names: tuple[str, ...], why: str) -> Any:
        """Return the value of these keys, which must all be equal."""
        found = {name: self.get(name, default) for name in names}
        if len(set(found.values())) > 1:
            raise self.refuse(", ".join(f"{name}={value}" for name, value in found.items()), why)
        return found[names[0]]


def read_keys(path: Path) -> dict[str, Any]:
    """Return the keys of a config.json, which must have a model_type."""
    try:
        keys = json.loads(path.read_text())
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
    if experts := [key for key in EXPERT_KEYS if keys.get(key)]:
        raise source.refuse(f"{experts[0]}={keys[experts[0]]!r}", "a mixture of experts is not supported")
    if source.kind in REFUSED:
        raise source.refuse(f"model_type={source.kind!r}", REFUSED[source.kind])
    if source.kind not in READERS:
        near = nearest(source.kind, list(READERS))
        raise ValueError(f"{path}: model_type={source.kind!r} cannot be read{near}; the types are {', '.join(READERS)}")
    for key, why in INEXACT.items() if exact else ():  # checked only if weights come with the file
        if keys.get(key):
            raise source.refuse(key, why)
    fields = READERS[source.kind](source)
    left = [key for key in source.keys if key not in source.read]
    neutral, unknown = ([key for key in left if (key in NEUTRAL) is known] for known in (True, False))
    notes = []
    if neutral and not exact:
        notes.append(f"not read, because they do not change the cost of a step: {', '.join(neutral)}")
    if unknown:
        notes.append(f"not read, because Fourfold does not know them: {', '.join(unknown)}")
    return fields, tuple(notes)


def _sizes(source: ConfigJson) -> dict[str, Any]:
    """Return the sizes that every type has, with as many KV heads as heads."""
    keys = GPT2_SIZES if source.kind == "gpt2" else SIZE_KEYS
    sizes = {field: source.need(*names.split()) for field, names in keys.items()}
    return dict(sizes, vocab=source.need("vocab_size"), kv_heads=sizes["heads"])


def _gpt2(source: ConfigJson) -> dict[str, Any]:
    source.expect("activation_function", "gelu_new", *_gelu(source))
    source.expect("add_cross_attention", False, (False,), "blocks do not read another sequence")
    if source.exact:
        source.expect("scale_attn_weights", True, (True,), "scores are divided by the square root of head_dim")
        source.expect("scale_attn_by_inverse_layer_idx", False, (False,), "all layers scale scores in the same way")
    sizes = _sizes(source)
    return dict(
        sizes,
        head_dim=_head_dim(source, sizes),
        mlp_hidden=source.get("n_inner", 4 * sizes["hidden"]),
        tied=source.get("tie_word_embeddings", True),
        dropout=source.same(0.1, ("resid_pdrop", "embd_pdrop", "attn_pdrop"), "all dropouts must be equal"),
        norm_eps=source.get("layer_norm_epsilon", 1e-5),
    )


def _gpt_neox(source: ConfigJson) -> dict[str, Any]:
    source.expect("use_parallel_residual", True, (False,), "attention and MLP run one after the other")
    source.expect("hidden_act", "gelu", *_gelu(source))
    source.expect("attention_bias", True, (True,), "biases are on all layers or on none")
    sizes = _sizes(source)
    return dict(
        sizes,
        head_dim=_head_dim(source, sizes),
        mlp_hidden=source.need("intermediate_size"),
        positions="rope",
        rope_theta=_rope(source, "rotary_emb_base", "rotary_pct", 0.25),
        tied=source.get("tie_word_embeddings", False),
        dropout=source.same(0.0, ("hidden_dropout", "attention_dropout"), "all dropouts must be equal"),
        norm_eps=source.get("layer_norm_eps", 1e-5),
    )


def _llama(source: ConfigJson, *, head_dim: int | None = None, **choices: Any) -> dict[str, Any]:
    """Read Llama, and the types that differ from it only in a default or two."""
    source.expect("hidden_act", "silu", ("silu", "swish"), "the MLP is computed with SwiGLU")
    bias = source.same(False, ("attention_bias", "mlp_bias"), "biases are on all layers or on none")
    if source.exact and source.kind != "llama" and bias:
        raise source.refuse("attention_bias=True", f"model_type={source.kind!r} does not have biases on all layers")
    source.expect("attention_dropout", 0.0, (0.0, 0), "dropout acts after every sublayer or nowhere")
    if source.exact:
        _require_whole_sequences(source)
    sizes = _sizes(source)
    return dict(
        sizes,
        kv_heads=_kv_heads(source, sizes["heads"]),
        head_dim=source.get("head_dim", head_dim) or _head_dim(source, sizes),
        mlp_hidden=source.need("intermediate_size"),
        norm="rms",
        mlp="swiglu",
        positions="rope",
        rope_theta=_rope(source, "rope_theta", "partial_rotary_factor", 1.0),
        bias=bias,
        tied=source.get("tie_word_embeddings", False),
        norm_eps=source.get("rms_norm_eps", 1e-6),
        **choices,
    )


def _gelu(source: ConfigJson) -> tuple[tuple[str, ...], str]:
    """Return the activations that are allowed, and the reason."""
    if source.exact:
        return TANH_GELU, "the MLP is computed with GELU in its tanh form"
    return GELU, "the MLP is computed with GELU"


def _rope(source: ConfigJson, theta_key: str, part_key: str, part: float) -> float:
    """Return the base of the rotary angles, from where the type's own code looks for it."""
    rope = source.get("rope_parameters", {})
    if not isinstance(rope, dict):
        raise ValueError(f"{source.path}: rope_parameters={rope!r} must be a table of keys")
    scaling = source.keys.get("rope_scaling")  # not through get: it changes no cost, and a note says so
    if isinstance(scaling, dict) and scaling:
        rope = scaling
    turned, theta = rope.get("partial_rotary_factor"), rope.get("rope_theta")
    turned = source.get(part_key, part) if turned is None else turned
    if turned != 1 and (source.exact or part != 1):
        raise source.refuse(f"{part_key}={turned}", "rotary positions rotate whole heads")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if source.exact and (kind != "default" or any(isinstance(value, dict) for value in rope.values())):
        raise source.refuse(f"rope_scaling={dict(rope)}", "rotary angles are not scaled")
    theta = source.get(theta_key, 10000.0) if theta is None else theta
    return float(theta) if isinstance(theta, int) else theta


def _require_whole_sequences(source: ConfigJson) -> None:
    """Raise an error if attention has a window that is shorter than a sequence."""
    windowed = source.kind == "mistral" or (source.kind == "qwen3" and source.get("use_sliding_window", False))
    # The default of both types is 4096; null means no window.
    window = source.keys.get("sliding_window", 4096) if windowed else None
    seq = source.need("max_position_embeddings")
    if window is not None and not (isinstance(window, int) and isinstance(seq, int) and window >= seq):
        raise source.refuse(
            f"sliding_window={window}",
            f"attention reads whole sequences, here of max_position_embeddings={seq}; lower that to {window} in "
            "config.json and train on sequences of at most that length",
        )


def _kv_heads(source: ConfigJson, heads: int) -> int:
    """Return the number of KV heads: null means the number of heads, a missing key the default of the type."""
    missing = {"mistral": 8, "qwen3": 32}.get(source.kind, heads)
    return source.get("num_key_value_heads", heads if "num_key_value_heads" in source.keys else missing)


def _head_dim(source: ConfigJson, sizes: Mapping[str, Any]) -> int:
    """Return the width of a head for types that have no key for it."""
    hidden, heads = sizes["hidden"], sizes["heads"]
    if not isinstance(hidden, int) or not isinstance(heads, int) or heads < 1 or hidden % heads:
        raise ValueError(f"{source.path}: the hidden size {hidden!r} is not divisible by {heads!r} heads")
    return hidden // heads


GPT2_SIZES = dict(layers="n_layer", hidden="n_embd", heads="n_head", seq="n_positions n_ctx")
SIZE_KEYS = dict(
    layers="num_hidden_layers", hidden="hidden_size", heads="num_attention_heads", seq="max_position_embeddings"
)
"""The keys of the sizes that every type needs: those of GPT-2, where seq may have either of two, and of other types."""
READERS: dict[str, Callable[[ConfigJson], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _llama,
    "qwen3": lambda source: _llama(source, head_dim=128, qk_norm=True),
}
"""The function that reads each model type."""
REFUSED = {
    "qwen2": "it has biases on q, k and v but on no other layer",
    "gemma": "it scales embeddings, gates its MLP with GELU and adds 1 to the weights of norms",
    "gemma2": "it also norms the outputs of sublayers, and caps attention scores",
    "gemma3_text": "it also norms the outputs of sublayers, and scales embeddings",
}
"""Types that a `ModelConfig` cannot express, and why."""

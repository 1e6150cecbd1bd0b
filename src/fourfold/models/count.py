"""Counts the parameters of the model that a Hugging Face config.json describes, of any architecture.

With the package transformers the model is built on the meta device, so the count is exact and takes no memory; code
that comes with a model is never run. Without the package, or for a model type that it does not know, the count follows
from the sizes that configs usually name, and `CountedModel.estimated` says why. Nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fourfold.models.hugging_face import EXPERT_COUNT_KEYS, read_keys

SYNONYMS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads"),
    "head_dim": ("head_dim",),
    "mlp_hidden": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "d_ff"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "seq": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
    "experts": EXPERT_COUNT_KEYS,
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k"),
    "expert_hidden": ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "dense_layers": ("first_k_dense_replace",),
}
"""The names that configs have for a size, the most usual first."""
REQUIRED = ("layers", "hidden", "heads", "mlp_hidden", "vocab")
"""Sizes that a count from the usual keys needs."""
GATED = ("silu", "swish", "swiglu", "geglu")
"""Activations of MLPs that usually have a gate, which is a third matrix."""
TEXT = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which the config of a multimodal model has the config of its language model."""


@dataclass(frozen=True, slots=True)
class TransformerSizes:
    """The sizes of a language model as its config names them; None where it does not."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_hidden: int | None = None
    vocab: int | None = None
    seq: int | None = None
    experts: int | None = None
    experts_per_token: int | None = None
    expert_hidden: int | None = None
    shared_experts: int | None = None
    dense_layers: int | None = None
    gated: bool = False
    """Whether MLPs have a gate."""
    tied: bool = False
    """Whether the head uses the weight of the embedding."""

    @property
    def attention_widths(self) -> tuple[int, int]:
        """Features of the queries, and of the keys; those of values are as many."""
        if self.hidden is None or self.heads is None:
            raise ValueError("the config names no hidden size or no heads")
        head = self.head_dim or self.hidden // self.heads
        return self.heads * head, (self.kv_heads or self.heads) * head

    def mlp_widths(self, layer: int) -> tuple[int, int]:
        """Features inside the MLPs of a layer: of all of them, and of those that one token goes through."""
        if not self.experts or layer < (self.dense_layers or 0):
            return self.mlp_hidden or 0, self.mlp_hidden or 0
        width = self.expert_hidden or self.mlp_hidden or 0
        shared = (self.shared_experts or 0) * width
        return self.experts * width + shared, (self.experts_per_token or 1) * width + shared


@dataclass(frozen=True, slots=True)
class CountedModel:
    """The number of parameters of a model, and its sizes."""

    model_type: str
    parameters: int
    active: int
    """Parameters of the language model that one token meets: of its experts only those that it is sent to."""
    multiplied: int
    """Active parameters that a token is multiplied with: without an embedding that is only looked up."""
    other_parts: int
    """Parameters outside the language model, such as those of a part for images."""
    sizes: TransformerSizes
    encoder_decoder: bool
    """Whether a token goes through only one of two halves."""
    estimated: str = ""
    """Why the number of parameters is an estimate; empty if it is exact."""


def count_model(path: Path) -> CountedModel:
    """Count the parameters of the model that a config.json describes."""
    keys = read_keys(path)
    try:
        return _built(keys)
    except _NotBuiltError as reason:
        return _from_keys(path, keys, str(reason))


class _NotBuiltError(Exception):
    """The model cannot be built here; the message says why."""


def _built(keys: Mapping[str, Any]) -> CountedModel:
    """Build the model on the meta device and count its parameters."""
    try:
        import transformers
    except ImportError as error:
        raise _NotBuiltError("the package transformers is not installed (fourfold[hf])") from error
    kind = keys["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        raise _NotBuiltError(f"transformers {transformers.__version__} has no model_type={kind!r}")
    plain = {key: value for key, value in keys.items() if key not in ("quantization_config", "auto_map")}
    with _quiet(transformers), torch.device("meta"):
        # any exception may come from sizes that do not fit together, and then the estimate is still of use
        try:
            config = transformers.CONFIG_MAPPING[kind].from_dict(plain)
            text = config.get_text_config(decoder=True)
        except Exception as error:
            raise _NotBuiltError(f"transformers cannot read it: {_first_line(error)}") from error
        fault: Exception | None = None
        for build in _builders(transformers, keys, multimodal=text is not config):
            try:
                model = build(config)
                break
            except Exception as error:
                fault = fault or error
        else:
            raise _NotBuiltError(f"transformers cannot build it: {_first_line(fault)}") from fault
    sizes = _sizes(lambda name: _attribute(text, name))
    total = sum(parameter.numel() for parameter in model.parameters())
    others = sum(parameter.numel() for parameter in _outside(model, {kind, text.model_type}).values())
    routed = sum(parameter.numel() for name, parameter in model.named_parameters() if "experts" in name.split("."))
    idle = 1 - (sizes.experts_per_token or 1) / sizes.experts if sizes.experts else 0.0
    active = total - others - round(idle * routed)
    halves = bool(_attribute(config, "is_encoder_decoder"))
    return CountedModel(kind, total, active, active - _looked_up(model), others, sizes, halves)


def _builders(transformers: Any, keys: Mapping[str, Any], *, multimodal: bool) -> Iterator[Callable[[Any], nn.Module]]:
    """Yield what may build the model: the classes that the file names, then those for its kind of task."""
    named = keys.get("architectures")
    for name in named if isinstance(named, list) else ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            yield found
    classes = [transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText]
    if multimodal:
        classes.reverse()  # a class for text alone would leave the other parts of the model out
    for each in (*classes, transformers.AutoModelForSeq2SeqLM, transformers.AutoModel):
        yield each.from_config


def _attribute(config: Any, name: str) -> Any:
    """Return a value of a config of transformers, None where it has none or where it differs from layer to layer."""
    try:
        return getattr(config, name, None)
    except Exception:  # transformers has an error of its own for values that differ, and it is not public
        return None


def _looked_up(model: Any) -> int:
    """Return the size of an embedding that is not also the weight of the head."""
    try:
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # a model with several parts, none of which is a language model
        return 0
    first, last = (getattr(layer, "weight", None) for layer in (table, head))
    return 0 if first is None or last is None or first is last else first.numel()


def _outside(model: nn.Module, kinds: set[str]) -> dict[int, nn.Parameter]:
    """Return the parameters of parts with another model type than the model and its language model."""
    types = [(part, getattr(getattr(part, "config", None), "model_type", None)) for part in model.modules()]
    outer = [part for part, kind in types if kind is not None and kind not in kinds]
    return {id(parameter): parameter for part in outer for parameter in part.parameters()}


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Keep transformers from giving advice about models that are only counted."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _first_line(error: Exception | None) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _sizes(get: Callable[[str], Any]) -> TransformerSizes:
    """Read the sizes by whichever of their names a config has."""
    found: dict[str, int] = {}
    for size, names in SYNONYMS.items():
        values = (get(name) for name in names)
        value = next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)
        if value is not None and value > 0:
            found[size] = value
    if found.get("experts") == 1:
        del found["experts"]
    named = (get(name) for name in ("hidden_act", "hidden_activation", "activation_function", "activation"))
    activation = next((name for name in named if isinstance(name, str)), "silu")
    gated = activation in GATED or str(get("model_type")).startswith("gemma")
    return TransformerSizes(**found, gated=gated, tied=bool(get("tie_word_embeddings")))


def _from_keys(path: Path, keys: Mapping[str, Any], reason: str) -> CountedModel:
    """Estimate the number of parameters from the usual keys: embedding, attention, MLPs and head, without biases."""
    text = next((keys[name] for name in TEXT if isinstance(keys.get(name), dict)), keys)
    sizes = _sizes(text.get)
    if missing := [size for size in REQUIRED if getattr(sizes, size) is None]:
        lacks = ", ".join(SYNONYMS[size][0] for size in missing)
        raise ValueError(
            f"{path}: {reason}, and for an estimate of its parameters it lacks {lacks}; install a version of "
            "transformers that knows the model, or add the keys"
        )
    hidden, (queries, kv) = sizes.hidden or 0, sizes.attention_widths
    attention = 2 * hidden * (queries + kv)
    matrices = 3 if sizes.gated else 2
    total = active = 0
    for layer in range(sizes.layers or 0):
        whole, own = sizes.mlp_widths(layer)
        router = hidden * (sizes.experts or 0) if whole != own else 0
        total += attention + matrices * hidden * whole + router
        active += attention + matrices * hidden * own + router
    table = hidden * (sizes.vocab or 0)
    tables = table if sizes.tied else 2 * table
    what = " of the language model alone" if text is not keys else ""
    return CountedModel(
        model_type=keys["model_type"],
        parameters=total + tables,
        active=active + tables,
        multiplied=active + table,
        other_parts=0,
        sizes=sizes,
        encoder_decoder=bool(keys.get("is_encoder_decoder")),
        estimated=f"{reason}, so this is an estimate{what} from its sizes, without biases and norms",
    )

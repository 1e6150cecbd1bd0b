"""Hugging Face's model types as data: what they call each tensor, how they lay it out, which models they can say.

A table names modules, theirs and ours; `*` is a layer's number, and `.weight` or `.bias` follows. Their tensor may
hold several of ours: side by side with in-features first (GPT-2), or head by head (GPT-NeoX).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.models.config import ModelConfig
from fourfold.spelling import nearest

Table = dict[str, str | tuple[str, ...]]
HEAD = "lm_head.weight"
"""The table of an untied head, whatever the type calls it."""

QKV = ("layers.*.attention.q", "layers.*.attention.k", "layers.*.attention.v")
GPT2: Table = {
    "wte": "embedding",
    "wpe": "positions",
    "h.*.ln_1": "layers.*.attention_norm",
    "h.*.attn.c_attn": QKV,
    "h.*.attn.c_proj": "layers.*.attention.out",
    "h.*.ln_2": "layers.*.mlp_norm",
    "h.*.mlp.c_fc": "layers.*.mlp.up",
    "h.*.mlp.c_proj": "layers.*.mlp.down",
    "ln_f": "norm",
    "lm_head": "head",
}
GPT_NEOX: Table = {
    "embed_in": "embedding",
    "layers.*.input_layernorm": "layers.*.attention_norm",
    "layers.*.attention.query_key_value": QKV,
    "layers.*.attention.dense": "layers.*.attention.out",
    "layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "layers.*.mlp.dense_h_to_4h": "layers.*.mlp.up",
    "layers.*.mlp.dense_4h_to_h": "layers.*.mlp.down",
    "final_layer_norm": "norm",
    "lm_head": "head",
}
LLAMA: Table = {
    "embed_tokens": "embedding",
    "layers.*.input_layernorm": "layers.*.attention_norm",
    "layers.*.self_attn.q_proj": "layers.*.attention.q",
    "layers.*.self_attn.k_proj": "layers.*.attention.k",
    "layers.*.self_attn.v_proj": "layers.*.attention.v",
    "layers.*.self_attn.o_proj": "layers.*.attention.out",
    "layers.*.self_attn.q_norm": "layers.*.attention.q_norm",
    "layers.*.self_attn.k_norm": "layers.*.attention.k_norm",
    "layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "layers.*.mlp.gate_proj": "layers.*.mlp.gate",
    "layers.*.mlp.up_proj": "layers.*.mlp.up",
    "layers.*.mlp.down_proj": "layers.*.mlp.down",
    "norm": "norm",
    "lm_head": "head",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A type of models and its files."""

    table: Table
    prefix: str
    """Before all names but the head's, in files of a whole model; those of its body alone lack it."""
    buffers: re.Pattern[str]
    """Names of tensors that older files hold and no model reads."""
    head: str = HEAD
    """What the type's files call it."""
    transposed: re.Pattern[str] | None = None
    """Modules whose weights have in-features first."""
    by_head: bool = False
    """Whether q, k and v take turns head by head."""

    def plain(self, name: str) -> str:
        """A name in a file as the table has it."""
        return HEAD if name == self.head else name.removeprefix(self.prefix)

    def written(self, plain: str) -> str:
        """A name of the table as files of a whole model have it."""
        return self.head if plain == HEAD else self.prefix + plain


_LLAMA = Family(LLAMA, "model.", re.compile(r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"))
FAMILIES = {
    "gpt2": Family(
        GPT2,
        "transformer.",
        re.compile(r"h\.\d+\.attn\.(masked_)?bias"),
        transposed=re.compile(r"h\.\*\.(attn|mlp)\.c_\w+"),
    ),
    "gpt_neox": Family(
        GPT_NEOX,
        "gpt_neox.",
        re.compile(r"layers\.\d+\.attention\.(masked_)?bias|(layers\.\d+\.attention\.)?rotary_emb\.inv_freq"),
        head="embed_out.weight",
        by_head=True,
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen3": _LLAMA,
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One of their tensors and those of ours that it holds."""

    theirs: str
    """As the table has it: without prefix."""
    ours: tuple[str, ...]
    transposed: bool = False
    heads: int = 0
    """How many, where ours take turns head by head; else 0."""

    def cut(self, tensor: Tensor) -> Iterator[Tensor]:
        """Ours, in order, each made when it is asked for."""
        for index in range(len(self.ours)):
            yield self._part(tensor, index).contiguous()

    def _part(self, tensor: Tensor, index: int) -> Tensor:
        if self.heads:
            return tensor.unflatten(0, (self.heads, len(self.ours), -1))[:, index].flatten(0, 1)
        part = tensor.chunk(len(self.ours), dim=-1)[index] if len(self.ours) > 1 else tensor
        return part.t() if self.transposed else part

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Theirs, of ours in order."""
        if self.heads:
            return torch.stack([part.unflatten(0, (self.heads, -1)) for part in parts], dim=1).flatten(0, 2)
        laid = [part.t() if self.transposed else part for part in parts]
        return (torch.cat(laid, dim=-1) if len(laid) > 1 else laid[0]).contiguous()

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Of theirs, by the shapes of ours."""
        return tuple(self.join([torch.empty(shapes[name], device="meta") for name in self.ours]).shape)


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every parameter of the model, by name."""
    hidden, bias = config.hidden, config.bias
    q, kv, mlp = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.mlp_hidden
    norm: dict[str, tuple[int, ...]] = {"weight": (hidden,)}
    norm |= {"bias": (hidden,)} if bias and config.norm == "layer" else {}
    modules: dict[str, dict[str, tuple[int, ...]]] = {"embedding": {"weight": (config.vocab, hidden)}}
    if config.positions == "learned":
        modules["positions"] = {"weight": (config.seq, hidden)}
    for layer in (f"layers.{index}" for index in range(config.layers)):
        linear = {"attention.q": (q, hidden), "attention.k": (kv, hidden), "attention.v": (kv, hidden)}
        linear |= {"attention.out": (hidden, q), "mlp.up": (mlp, hidden), "mlp.down": (hidden, mlp)}
        linear |= {"mlp.gate": (mlp, hidden)} if config.mlp == "swiglu" else {}
        for name, shape in linear.items():
            modules[f"{layer}.{name}"] = {"weight": shape, **({"bias": shape[:1]} if bias else {})}
        for name in ("attention.q_norm", "attention.k_norm") if config.qk_norm else ():
            modules[f"{layer}.{name}"] = {"weight": (config.head_dim,)}
        modules |= {f"{layer}.attention_norm": norm, f"{layer}.mlp_norm": norm}
    modules["norm"] = norm
    if not config.tied:
        modules["head"] = {"weight": (config.vocab, hidden)}
    return {f"{module}.{name}": shape for module, tensors in modules.items() for name, shape in tensors.items()}


def pieces_of(config: ModelConfig, kind: str) -> list[Piece]:
    """All tensors of a model in files of that type, layer by layer."""
    family, shapes = FAMILIES[kind], shapes_of(config)
    once, layered = ([theirs for theirs in family.table if ("*" in theirs) is many] for many in (False, True))
    modules = [(theirs, "") for theirs in once]
    modules += [(theirs, str(index)) for index in range(config.layers) for theirs in layered]
    return [piece for module in modules for piece in _pieces(family, *module, config.heads, shapes)]


def _pieces(
    family: Family, theirs: str, index: str, heads: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Piece]:
    """Weight and bias of a module, where the model has them."""
    modules = family.table[theirs]
    modules = (modules,) if isinstance(modules, str) else modules
    for kind in ("weight", "bias"):
        ours = tuple(f"{module}.{kind}".replace("*", index) for module in modules)
        if ours[0] in shapes:
            conv = family.transposed is not None and family.transposed.fullmatch(theirs) is not None
            joined = family.by_head and len(ours) > 1
            name = f"{theirs}.{kind}".replace("*", index)
            yield Piece(name, ours, transposed=conv and kind == "weight", heads=heads if joined else 0)


def match(pieces: Iterable[Piece], kind: str, found: Iterable[str], folder: Path) -> dict[str, str]:
    """By the names of the pieces those in the files. A tied head's copy of the embedding, which has no piece, is there
    as `HEAD`.

    Raises unless the files hold all pieces, each once, and nothing else that a model would read.
    """
    family, wanted = FAMILIES[kind], [piece.theirs for piece in pieces]
    names: dict[str, str] = {}
    for name in found:
        plain = family.plain(name)
        if family.buffers.fullmatch(plain):
            continue
        if plain in names:
            raise ValueError(f"{folder} holds both {names[plain]!r} and {name!r}, which are one tensor; remove one")
        names[plain] = name
    missing = [name for name in wanted if name not in names]
    strangers = [name for name in names if name not in wanted and name != HEAD]
    if missing or strangers:
        faults = [f"lacks {_some(missing, [names[other] for other in strangers], family.written)}"] if missing else []
        if strangers:
            others = [family.written(name) for name in missing or wanted]
            faults.append(f"also holds {_some(strangers, others, names.__getitem__)}")
        hint = ""
        if missing == [HEAD]:
            hint = "; where the head is the embedding's table, say tie_word_embeddings=true in config.json"
        said = f"it {', it '.join(faults)}{hint}"
        raise ValueError(f"{folder} is not the {kind} model that its config.json describes: {said}")
    return names


def _some(plain: Sequence[str], others: Sequence[str], shown: Callable[[str], str]) -> str:
    """The first of the names, each with its nearest spelling among the others."""
    first = [f"{shown(name)!r}{nearest(shown(name), others)}" for name in plain[:3]]
    return ", ".join(first) + (f" and {len(plain) - 3} more" if len(plain) > 3 else "")


NEEDS: dict[str, dict[str, Any]] = {
    "gpt2": dict(norm="layer", mlp="gelu", positions="learned", bias=True, qk_norm=False),
    "gpt_neox": dict(norm="layer", mlp="gelu", positions="rope", bias=True, qk_norm=False),
    "llama": dict(norm="rms", mlp="swiglu", positions="rope", qk_norm=False),
    "qwen3": dict(norm="rms", mlp="swiglu", positions="rope", bias=False, qk_norm=True),
}
"""The types that models are written as, and the choices that each stands for."""


def kind_of(config: ModelConfig) -> str:
    """The type that computes what a model of this config does; raises where there is none, naming why."""
    faults = {kind: _faults(config, kind) for kind in NEEDS}
    kind = min(faults, key=lambda name: len(faults[name]))
    if faults[kind]:
        raise ValueError(
            f"no type of models that Hugging Face has and Fourfold knows computes this one; {kind} comes nearest, and "
            f"needs {', '.join(faults[kind])}"
        )
    return kind


def _faults(config: ModelConfig, kind: str) -> list[str]:
    """What a type needs and the model has otherwise."""
    found = [
        f"{name}={value!r} instead of {getattr(config, name)!r}"
        for name, value in NEEDS[kind].items()
        if getattr(config, name) != value
    ]
    if kind in ("gpt2", "gpt_neox"):
        if config.kv_heads != config.heads:
            found.append(f"kv_heads={config.heads} instead of {config.kv_heads}")
        if config.heads * config.head_dim != config.hidden:
            found.append(f"heads*head_dim={config.hidden} instead of {config.heads}*{config.head_dim}")
    elif kind == "llama" and config.hidden % config.heads:
        found.append(f"hidden divisible by heads={config.heads} instead of {config.hidden}")
    return found


def describe(config: ModelConfig, kind: str) -> dict[str, Any]:
    """The keys of a config.json, those that say what is computed."""
    common = dict(model_type=kind, architectures=[ARCHITECTURES[kind]], vocab_size=config.vocab)
    common["tie_word_embeddings"] = config.tied
    if kind == "gpt2":
        keys = dict(n_embd=config.hidden, n_head=config.heads, n_layer=config.layers, n_inner=config.mlp_hidden)
        keys |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
        keys |= dict(n_positions=config.seq, layer_norm_epsilon=config.norm_eps, activation_function="gelu_new")
        return {**common, **keys}
    keys = dict(hidden_size=config.hidden, num_hidden_layers=config.layers, num_attention_heads=config.heads)
    keys |= dict(intermediate_size=config.mlp_hidden, max_position_embeddings=config.seq)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if kind == "gpt_neox":
        keys |= dict(hidden_act="gelu_new", use_parallel_residual=False, attention_bias=True)
        keys |= dict(hidden_dropout=config.dropout, attention_dropout=config.dropout, layer_norm_eps=config.norm_eps)
        keys |= dict(rotary_pct=1.0, rotary_emb_base=config.rope_theta)  # older readers look here, newer there
        return {**common, **keys, "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}
    keys |= dict(hidden_act="silu", num_key_value_heads=config.kv_heads, head_dim=config.head_dim)
    keys |= dict(attention_bias=config.bias, attention_dropout=0.0, rms_norm_eps=config.norm_eps)
    keys |= dict(mlp_bias=config.bias) if kind == "llama" else dict(use_sliding_window=False)
    return {**common, **keys, "rope_theta": config.rope_theta, "rope_parameters": rope}


ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

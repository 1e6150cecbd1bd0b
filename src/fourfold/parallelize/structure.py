"""What the modules of a model are, from their kinds, shapes, names and neighbours.

A choice decides how much is communicated, never whether the result is right: whatever model code does with a tensor
that the choice did not foresee makes it whole. So names may be taken as hints here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn

from fourfold.grid import Grid
from fourfold.layout import Policy, inner
from fourfold.parallelize.alternate import find_images
from fourfold.parallelize.lora import find_pairs, inside, plain_names
from fourfold.parallelize.normal import formula_of
from fourfold.parallelize.plan import (
    Choice,
    Contract,
    Embedding,
    Expand,
    Head,
    HeadNorm,
    Norm,
    Whole,
)
from fourfold.parallelize.swap import adapters_of, runs
from fourfold.parallelize.together import HeadCounts

QUERY = ("q_proj", "q", "query", "wq", "q_lin", "to_q", "query_proj")
KEY = ("k_proj", "k", "key", "wk", "k_lin", "to_k", "key_proj")
VALUE = ("v_proj", "v", "value", "wv", "v_lin", "to_v", "value_proj")
GATE = ("gate_proj", "gate", "w1", "wi_0")
UP = ("up_proj", "up", "w3", "wi_1")
FUSED = {"c_attn": "qkv", "qkv_proj": "qkv", "qkv": "qkv", "Wqkv": "qkv", "in_proj": "qkv", "gate_up_proj": 2}
"""Names under which weights usually hold several layers, one after the other."""
CLOSING = (
    *("o_proj", "out_proj", "o", "wo", "out", "out_lin", "to_out", "c_proj", "down_proj", "down", "w2", "fc2", "lin2"),
    *("dense_4h_to_h", "linear2", "proj", "output_proj"),
)
LOOKING_ELSEWHERE = ("cross", "encdec", "encoder_attn", "enc_dec")
TOKENS = (
    "embed_tokens",
    "wte",
    "word_embeddings",
    "tok_embeddings",
    "token_embedding",
    "embed_in",
    "shared",
    "tok_emb",
    "embedding",
)
HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head", "d_kv")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


@dataclass
class Found:
    """What every module is, which are read together, and where the residual stream passes equal blocks."""

    choices: dict[str, Choice] = field(default_factory=dict)
    groups: dict[tuple[str, ...], HeadCounts | None] = field(default_factory=dict)
    counts: dict[str, HeadCounts] = field(default_factory=dict)
    """Of every attention, by its name."""
    blocks: dict[str, int] = field(default_factory=dict)
    """Features of the stream, by the block's name."""
    plain: Mapping[str, str] = field(default_factory=dict)
    """What every module would be called without peft's around layers."""


def is_linear(module: nn.Module) -> bool:
    return (runs(module, (nn.Linear,)) or is_transposed(module)) and not is_computed(module)


def is_embedding(module: nn.Module) -> bool:
    return runs(module, (nn.Embedding,)) and not is_computed(module)


def is_computed(module: nn.Module) -> bool:
    """Whether its weight is no parameter but made of others before each use, as by parametrizations."""
    return module._parameters.get("weight") is None and not adapters_of(module)


def is_transposed(module: nn.Module) -> bool:
    """transformers' Conv1D: a linear layer whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def features_of(module: nn.Module) -> tuple[int, int]:
    """In and out."""
    rows, columns = (int(size) for size in module.weight.shape)  # type: ignore[union-attr]
    return (rows, columns) if is_transposed(module) else (columns, rows)


def find(model: nn.Module, grid: Grid, policy: Policy, given: Mapping[str, Choice]) -> Found:
    """Every module with parameters of its own gets a word; what is `given` goes before what is found."""
    plain = plain_names(model)
    layers = {plain[name]: name for name, module in model.named_modules() if inside(module) is module}
    modules = {name: model.get_submodule(layer) for name, layer in layers.items()}
    choices = find_images(model, given) | find_pairs(model) | dict(given)
    found = Found({plain[name]: choice for name, choice in choices.items()}, plain=plain)
    parts = inner(policy.activations).feature_parts(grid.shape.sizes)
    for name, module in modules.items():
        # a module that stands in two places is found in the first
        own = {child: kind for child, kind in children_of(module).items() if f"{name}.{child}".lstrip(".") in modules}
        children = {child: kind for child, kind in own.items() if is_linear(kind)}
        _find_attention(found, name, module, children, parts)
        _find_gates(found, name, children)
    _find_blocks(found, modules)
    tokens = _token_tables(model, modules)
    for name, module in modules.items():
        if name in found.choices or not has_own(module) or adapters_of(module):
            continue
        found.choices[name] = _choose(name, module, modules, found, tokens)
    _mend(found, modules, grid.size("y"), parts)
    found.choices = {layers[name]: choice for name, choice in found.choices.items()}
    found.groups = {tuple(layers[name] for name in group): counts for group, counts in found.groups.items()}
    return found


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """As if there were none of peft's modules between."""
    return {name: inside(child) for name, child in module.named_children()}


def has_own(module: nn.Module) -> bool:
    return any(parameter is not None for parameter in module._parameters.values())


def _named(children: Mapping[str, nn.Module], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in children), None)


def _find_attention(found: Found, name: str, module: nn.Module, children: Mapping[str, nn.Module], parts: int) -> None:
    query, key, value = (_named(children, names) for names in (QUERY, KEY, VALUE))
    packed = next((child for child in children if FUSED.get(child) == "qkv"), None)
    if query and key and value:
        q, k = features_of(children[query])[1], features_of(children[key])[1]
        why = "reads the same tensor as its neighbours"
        for child in (query, key, value):
            found.choices.setdefault(f"{name}.{child}".lstrip("."), Choice(Expand(), f"attention: {why}"))
        members = (query, key, value)
        if any(word in name.lower() for word in LOOKING_ELSEWHERE) or not _read_alike(children[c] for c in members):
            members = (key, value)
        counts = _counts(found, name, module, q, k, features_of(children[query])[0])
        sizes = [features_of(children[child])[1] for child in members]
        group = tuple(f"{name}.{child}".lstrip(".") for child in members)
        if _read_alike(children[c] for c in members) and all(found.choices[one].word == Expand() for one in group):
            found.groups[group] = counts if counts is not None and counts.lie_so(sizes, parts) else None
    elif packed:
        inputs, outputs = features_of(children[packed])
        _counts(found, name, module, outputs if outputs < 3 * inputs else inputs, None, inputs)


def _read_alike(layers: Iterable[nn.Module]) -> bool:
    """Whether one tensor can be what all of these read."""
    return len({(features_of(layer)[0], layer.weight.dtype) for layer in layers}) == 1  # type: ignore[union-attr]


def _counts(found: Found, name: str, module: nn.Module, q: int, k: int | None, features: int) -> HeadCounts | None:
    config = getattr(module, "config", None)
    head_dim = next((size for word in HEAD_DIMS if type(size := getattr(module, word, None)) is int), None)
    if head_dim is None:
        places = (module, config)
        heads = next((n for at in places for word in HEAD_COUNTS if type(n := getattr(at, word, None)) is int), None)
        head_dim = features // heads if heads else None
    if not head_dim or q % head_dim or (k or head_dim) % head_dim:
        return None
    kv_heads = getattr(config, "num_key_value_heads", None) or q // head_dim if k is None else k // head_dim
    if k is None and config is not None and getattr(config, "num_attention_heads", None):
        q = config.num_attention_heads * head_dim
    found.counts[name] = HeadCounts(q // head_dim, kv_heads, head_dim)
    return found.counts[name]


def _find_gates(found: Found, name: str, children: Mapping[str, nn.Module]) -> None:
    gate, up = _named(children, GATE), _named(children, UP)
    if gate and up and features_of(children[gate]) == features_of(children[up]):
        group = tuple(f"{name}.{child}".lstrip(".") for child in (gate, up))
        for member in group:
            found.choices.setdefault(member, Choice(Expand(), "gate and up read the same tensor"))
        alike = _read_alike((children[gate], children[up]))
        if alike and all(found.choices[member].word == Expand() for member in group):
            found.groups[group] = None


def _find_blocks(found: Found, modules: Mapping[str, nn.Module]) -> None:
    """Lists of equal modules with linear layers inside; the stream has the width that most of them begin with."""
    for name, module in modules.items():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) == 0:
            continue
        blocks = dict(module.named_children())
        if len({type(block) for block in blocks.values()}) > 1 or is_linear(next(iter(blocks.values()))):
            continue
        for own, block in blocks.items():
            linear = [child for child in block.modules() if is_linear(child)]
            if len(linear) > 1:
                found.blocks[f"{name}.{own}".lstrip(".")] = features_of(linear[0])[0]


def _token_tables(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[int]:
    """The parameters that embed tokens, and heads tied to them."""
    named = [module for name, module in modules.items() if name.rpartition(".")[2] in TOKENS]
    tables, embeddings, linear = (
        {id(module._parameters.get("weight")) for module in those if isinstance(module, kind)}
        for those, kind in (
            ((*named, _input_embedding(model)), nn.Embedding),
            (modules.values(), nn.Embedding),
            (modules.values(), nn.Linear),
        )
    )
    return (tables | (embeddings & linear)) - {id(None)}


def _input_embedding(model: nn.Module) -> object:
    """What Hugging Face's models say of themselves."""
    try:
        return model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _choose(name: str, module: nn.Module, modules: Mapping[str, nn.Module], found: Found, tokens: set[int]) -> Choice:
    if is_embedding(module):
        if id(module.weight) in tokens:
            return Choice(Embedding(), "embeds tokens")
        return Choice(Whole(), "a table that every rank looks up alike")
    if is_linear(module):
        return _choose_linear(name, module, modules, found, tokens)
    formula = formula_of(module)
    if formula is not None:
        counts = found.counts.get(name.rpartition(".")[0])
        if counts is not None and formula.features == counts.head_dim and formula.kind == "rms":
            return Choice(HeadNorm(), f"a norm of heads of {counts.head_dim}")
        widths = set(found.blocks.values())
        if not widths or formula.features in widths:
            return Choice(Norm(), f"computes a {formula.kind} norm of the residual stream")
    return Choice(Whole(), f"its structure is not known ({type(module).__name__})")


def _choose_linear(
    name: str, module: nn.Module, modules: Mapping[str, nn.Module], found: Found, tokens: set[int]
) -> Choice:
    parent, _, own = name.rpartition(".")
    if name and isinstance(modules.get(parent), nn.MultiheadAttention):
        return Choice(Whole(), "the attention around it reads its weight itself")
    inputs, outputs = features_of(module)
    if id(module.weight) in tokens or own in ("lm_head", "embed_out", "score", "classifier"):
        return Choice(Head(), "reads logits out")
    if own in FUSED and (FUSED[own] == "qkv" or outputs % int(FUSED[own]) == 0):
        return Choice(Expand(parts=FUSED[own]), f"holds several layers ({own})")
    block = next((features for block, features in found.blocks.items() if name.startswith(f"{block}.")), None)
    if block is None:
        return Choice(Head(), "a linear layer by itself")
    if inputs != block and outputs == block:
        return Choice(Contract(), f"leads back to the stream of {block}")
    if inputs == outputs == block and (own in CLOSING or _closes_attention(parent, own, modules)):
        return Choice(Contract(), "leads out of attention")
    return Choice(Expand(), f"leads out of the stream of {block}" if inputs == block else "a linear layer")


def _closes_attention(parent: str, own: str, modules: Mapping[str, nn.Module]) -> bool:
    """`dense` beside q, k and v, or in a module `output` beside the one that has them."""
    if own != "dense":
        return False
    siblings = children_of(modules[parent])
    if any(child in (*QUERY, *FUSED, "query_key_value") for child in siblings):
        return True
    above = modules[parent.rpartition(".")[0]]
    return any(_named(children_of(child), QUERY) for child in children_of(above).values())


def _mend(found: Found, modules: Mapping[str, nn.Module], y: int, parts: int) -> None:
    """Words that a layer's sizes do not allow give way to one that they do, unless they were asked for."""
    for name, choice in found.choices.items():
        module = modules.get(name)
        if module is not None and is_linear(module) and not choice.why.startswith("plan"):
            counts = found.counts.get(name.rpartition(".")[0])
            found.choices[name] = _allowed(choice, *features_of(module), counts, y, parts)
        elif isinstance(choice.word, (Norm, Embedding)) and module is not None and module.weight.shape[-1] % y:  # type: ignore[union-attr]
            found.choices[name] = Choice(Whole(), f"{choice.why}, but its features do not divide by y={y}")
    for group in list(found.groups):
        if any(found.choices[name].word != Expand() for name in group):
            del found.groups[group]


def _allowed(choice: Choice, inputs: int, outputs: int, counts: HeadCounts | None, y: int, parts: int) -> Choice:
    word = choice.word
    if isinstance(word, (Expand, Head)) and inputs % y:
        return Choice(Whole(), f"{choice.why}, but {inputs} inputs do not divide by y={y}")
    if isinstance(word, Expand) and any(size % parts for size in sizes_of_parts(word, outputs, counts)):
        return Choice(Head(), f"{choice.why}, but {outputs} outputs do not divide by {parts} and are padded")
    if isinstance(word, Contract) and (inputs % parts or outputs % y):
        rule = f"{inputs} inputs do not divide by {parts}" if inputs % parts else f"{outputs} outputs by y={y}"
        return Choice(Head() if inputs % y == 0 else Whole(), f"{choice.why}, but {rule}")
    return choice


def sizes_of_parts(word: Expand, outputs: int, counts: HeadCounts | None) -> list[int]:
    """Out-features of each layer that a weight holds."""
    if word.parts == "qkv":
        if counts is not None and sum(counts.sizes) == outputs:
            return counts.sizes
        number = 3
    else:
        number = int(word.parts)
    return [outputs // number] * number if outputs % number == 0 else [outputs]

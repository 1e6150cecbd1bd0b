"""What the modules of a model are, from their kinds, shapes, names and neighbours.

A choice decides how much is communicated, never whether the result is right: whatever model code does with a tensor
that the choice did not foresee makes it whole. So names may be taken as hints here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from fourfold.grid import Grid
from fourfold.layout import FEATURES, inner
from fourfold.policy import Policy
from fourfold.wrap.alternate import find_images
from fourfold.wrap.linears import Form, Trials, has_hooks
from fourfold.wrap.lora import find_pairs, inside, plain_names
from fourfold.wrap.multihead import Multihead
from fourfold.wrap.normal import formula_of
from fourfold.wrap.plan import (
    Choice,
    Contract,
    Embedding,
    Expand,
    Head,
    HeadNorm,
    Norm,
    Whole,
)
from fourfold.wrap.swap import adapters_of, runs
from fourfold.wrap.together import HeadCounts

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
    forms: dict[nn.Module, Form] = field(default_factory=dict)
    """How each linear layer computes."""


def forms_of(modules: Iterable[nn.Module]) -> dict[nn.Module, Form]:
    """The linear layers among the modules: those of torch, and those that a trial finds."""
    trials = Trials()
    return {module: form for module in modules if (form := form_of(module, trials)) is not None}


def form_of(module: nn.Module, trials: Trials) -> Form | None:
    adapters = adapters_of(module)
    if adapters:
        return adapters[-1].form
    if runs(module, (nn.Embedding,)):
        return None
    if not isinstance(module, nn.Linear):
        return trials.form_of(module)
    if is_computed(module):
        # torch's own forward asks for the weight by its name and for nothing else
        known = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
        known = known and dict(module.named_children()).keys() <= {"parametrizations"}
        return Form(module.in_features, module.out_features, computed=True) if known else None
    if runs(module, (nn.Linear,)):
        outputs, inputs = (int(size) for size in module.weight.shape)
        return Form(inputs, outputs, bias=None if module.bias is None else "bias")
    return trials.form_of(module)


def is_embedding(module: nn.Module) -> bool:
    return runs(module, (nn.Embedding,)) and not is_computed(module)


def is_computed(module: nn.Module) -> bool:
    """Whether its weight is no parameter but made of others before each use, as by parametrizations."""
    return module._parameters.get("weight") is None and not adapters_of(module)


def find(model: nn.Module, grid: Grid, policy: Policy, given: Mapping[str, Choice]) -> Found:
    """Every module with parameters of its own gets a word; what is `given` goes before what is found."""
    plain = plain_names(model)
    layers = {plain[name]: name for name, module in model.named_modules() if inside(module) is module}
    modules = {name: model.get_submodule(layer) for name, layer in layers.items()}
    choices = find_images(model, given) | find_pairs(model) | dict(given)
    forms = forms_of(modules.values())
    found = Found({plain[name]: choice for name, choice in choices.items()}, plain=plain, forms=forms)
    parts = inner(policy.activations).parts(grid.shape.sizes, FEATURES)
    for name, module in modules.items():
        # a module that stands in two places is found in the first
        own = {child: kind for child, kind in children_of(module).items() if f"{name}.{child}".lstrip(".") in modules}
        children = {child: kind for child, kind in own.items() if kind in forms}
        _find_multihead(found, name, module, grid.size("y"), parts)
        _find_attention(found, name, module, children, parts)
        _find_gates(found, name, children)
    _find_blocks(found, modules)
    tokens = _token_tables(model, modules, forms)
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


def _find_multihead(found: Found, name: str, module: nn.Module, y: int, parts: int) -> None:
    """torch's attention, whose own code reads the weight of the layer that leads out of it."""
    if not isinstance(module, nn.MultiheadAttention) or adapters_of(module) or name in found.choices:
        return
    out = module.out_proj
    plain = type(module).forward is nn.MultiheadAttention.forward and "forward" not in vars(module)
    if not plain or out not in found.forms or found.forms[out].computed or has_hooks(out):
        return
    if module.embed_dim % parts or any(size % y for size in (module.embed_dim, module.kdim, module.vdim)):
        return
    found.choices[name] = Choice(Multihead(), "torch's attention: queries, keys and values by head")
    found.choices.setdefault(f"{name}.out_proj".lstrip("."), Choice(Contract(), "leads out of attention"))


def _find_attention(found: Found, name: str, module: nn.Module, children: Mapping[str, nn.Module], parts: int) -> None:
    query, key, value = (_named(children, names) for names in (QUERY, KEY, VALUE))
    packed = next((child for child in children if FUSED.get(child) == "qkv"), None)
    if query and key and value:
        forms = {child: found.forms[children[child]] for child in (query, key, value)}
        q, k = forms[query].outputs, forms[key].outputs
        why = "reads the same tensor as its neighbours"
        for child in (query, key, value):
            found.choices.setdefault(f"{name}.{child}".lstrip("."), Choice(Expand(), f"attention: {why}"))
        members = (query, key, value)
        if any(word in name.lower() for word in LOOKING_ELSEWHERE) or not _read_alike(
            found, [children[c] for c in members]
        ):
            members = (key, value)
        counts = _counts(found, name, module, q, k, forms[query].inputs)
        sizes = [forms[child].outputs for child in members]
        group = tuple(f"{name}.{child}".lstrip(".") for child in members)
        alike = _read_alike(found, [children[c] for c in members])
        if alike and all(found.choices[one].word == Expand() for one in group):
            found.groups[group] = counts if counts is not None and counts.lie_so(sizes, parts) else None
    elif packed:
        form = found.forms[children[packed]]
        _counts(found, name, module, form.outputs if form.outputs < 3 * form.inputs else form.inputs, None, form.inputs)


def _read_alike(found: Found, layers: Sequence[nn.Module]) -> bool:
    """Whether one tensor can be what all of these read."""
    forms = [found.forms[layer] for layer in layers]
    if any(form.computed for form in forms):
        return False
    kinds = {(form.inputs, getattr(layer, form.weight).dtype) for form, layer in zip(forms, layers, strict=True)}
    return len(kinds) == 1


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
    if not gate or not up:
        return
    one, two = found.forms[children[gate]], found.forms[children[up]]
    if (one.inputs, one.outputs) == (two.inputs, two.outputs):
        group = tuple(f"{name}.{child}".lstrip(".") for child in (gate, up))
        for member in group:
            found.choices.setdefault(member, Choice(Expand(), "gate and up read the same tensor"))
        alike = _read_alike(found, (children[gate], children[up]))
        if alike and all(found.choices[member].word == Expand() for member in group):
            found.groups[group] = None


def _find_blocks(found: Found, modules: Mapping[str, nn.Module]) -> None:
    """Lists of equal modules with linear layers inside; the stream has the width that most of them begin with."""
    for name, module in modules.items():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) == 0:
            continue
        blocks = dict(module.named_children())
        if len({type(block) for block in blocks.values()}) > 1 or next(iter(blocks.values())) in found.forms:
            continue
        for own, block in blocks.items():
            linear = [found.forms[child] for child in block.modules() if child in found.forms]
            if len(linear) > 1:
                found.blocks[f"{name}.{own}".lstrip(".")] = linear[0].inputs


def _token_tables(model: nn.Module, modules: Mapping[str, nn.Module], forms: Mapping[nn.Module, Form]) -> set[int]:
    """The parameters that embed tokens, and heads tied to them."""
    named = [module for name, module in modules.items() if name.rpartition(".")[2] in TOKENS]
    tables, embeddings = (
        {id(module._parameters.get("weight")) for module in those if isinstance(module, nn.Embedding)}
        for those in ((*named, _input_embedding(model)), modules.values())
    )
    linear = {id(module._parameters.get(form.weight)) for module, form in forms.items() if not form.transposed}
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
    if module in found.forms:
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
    form = found.forms[module]
    inputs, outputs = form.inputs, form.outputs
    if id(module._parameters.get(form.weight)) in tokens or own in ("lm_head", "embed_out", "score", "classifier"):
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
        if module in found.forms and not choice.why.startswith("plan"):
            counts = found.counts.get(name.rpartition(".")[0])
            found.choices[name] = _allowed(choice, found.forms[module], counts, y, parts)
        elif isinstance(choice.word, (Norm, Embedding)) and module is not None and module.weight.shape[-1] % y:  # type: ignore[union-attr]
            found.choices[name] = Choice(Whole(), f"{choice.why}, but its features do not divide by y={y}")
    _mend_shared(found, modules)
    for group in list(found.groups):
        if any(found.choices[name].word != Expand() for name in group):
            del found.groups[group]


def _mend_shared(found: Found, modules: Mapping[str, nn.Module]) -> None:
    """A parameter that several modules have is cut in one way: where their words would cut it in several, those that a
    trial found keep their own code. A weight that is shared is stored in one piece."""
    users: dict[int, list[str]] = {}
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(name)
    for names in (names for names in users.values() if len(names) > 1):
        for name in names:
            choice = found.choices.get(name)
            if choice is not None and isinstance(choice.word, Expand) and not choice.why.startswith("plan"):
                found.choices[name] = Choice(Expand(), choice.why)
        cuts = {_cut_of(name, found, modules) for name in names}
        for name in names:
            form, choice = found.forms.get(modules[name]), found.choices.get(name)
            tried = form is not None and form.dims is not None
            mixed = len(cuts) > 1 and tried and choice is not None and not choice.why.startswith("plan")
            if mixed or (choice is not None and isinstance(choice.word, Multihead)):
                found.choices[name] = Choice(Whole(), "a module that uses it in another way has the same parameter")


def _cut_of(name: str, found: Found, modules: Mapping[str, nn.Module]) -> tuple[str, bool] | None:
    """What two modules that share a parameter must have in common."""
    choice, form = found.choices.get(name), found.forms.get(modules[name])
    if choice is None or isinstance(choice.word, Whole):
        return None
    kind = "Head" if isinstance(choice.word, Embedding) else type(choice.word).__name__
    return kind, form is not None and form.transposed


def _allowed(choice: Choice, form: Form, counts: HeadCounts | None, y: int, parts: int) -> Choice:
    word, inputs, outputs = choice.word, form.inputs, form.outputs
    if form.computed and not isinstance(word, (Contract, Whole)):  # its weight is cut as one, and nothing is padded
        choice = Choice(Expand(), choice.why)
        word = choice.word
    if form.computed and isinstance(word, (Expand, Contract)):
        allowed = (inputs, outputs) if isinstance(word, Expand) else (outputs, inputs)
        if allowed[0] % y or allowed[1] % parts:
            return Choice(Whole(), f"{choice.why}, but {inputs} x {outputs} features do not divide by {y} and {parts}")
        return choice
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

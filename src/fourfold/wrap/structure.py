"""Finds what the modules of a model are, from their classes, shapes, names and neighbours.

A choice decides how much is communicated, never whether the result is right: if model code does something with a tensor
that the choice did not foresee, the tensor is made whole. So names may serve as hints here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fourfold.grid import Grid
from fourfold.layout import FEATURES, inner, rest
from fourfold.policy import Policy
from fourfold.wrap.adapters import adapters_of, is_computed, is_embedding, uses_forward_of
from fourfold.wrap.detect import (
    ExpertsDetector,
    ExpertsForm,
    LinearDetector,
    LinearForm,
    has_hooks,
    norm_formula_of,
)
from fourfold.wrap.images import find_images
from fourfold.wrap.linear_adapters import HeadCounts, sizes_of_parts
from fourfold.wrap.lora import find_lora, inside, plain_names
from fourfold.wrap.plan import (
    ContractParallel,
    EmbeddingParallel,
    ExpandParallel,
    ExpertsParallel,
    HeadNormParallel,
    HeadParallel,
    MultiheadParallel,
    NormParallel,
    ParallelStyle,
    StyleChoice,
    WholeTensors,
)

# the usual names of modules
QUERY = ("q_proj", "q", "query", "wq", "q_lin", "to_q", "query_proj")
KEY = ("k_proj", "k", "key", "wk", "k_lin", "to_k", "key_proj")
VALUE = ("v_proj", "v", "value", "wv", "v_lin", "to_v", "value_proj")
GATE = ("gate_proj", "gate", "w1", "wi_0")
UP = ("up_proj", "up", "w3", "wi_1")
FUSED = {"c_attn": "qkv", "qkv_proj": "qkv", "qkv": "qkv", "Wqkv": "qkv", "in_proj": "qkv", "gate_up_proj": 2}
"""The usual names of weights that hold several layers one after the other, and how many ("qkv" or a number)."""
CONTRACTING = (
    *("o_proj", "out_proj", "o", "wo", "out", "out_lin", "to_out", "c_proj", "down_proj", "down", "w2", "fc2", "lin2"),
    *("dense_4h_to_h", "linear2", "proj", "output_proj"),
)
"""Linear layers that lead out of a sublayer, back to the residual stream."""
CROSS_ATTENTION = ("cross", "encdec", "encoder_attn", "enc_dec")
"""Parts of the names of attention modules in which queries and keys read different tensors."""
TOKEN_EMBEDDINGS = (
    *("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "token_embedding", "embed_in", "shared", "tok_emb"),
    "embedding",
)
# the usual names of the sizes of an attention, as attributes of the module or of its config
HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head", "d_kv")
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


@dataclass
class ModelStructure:
    """The style of every module, the groups that read together, and the blocks that the residual stream passes.

    `find_structure` fills it. Modules have the names that they would have without peft until it returns.
    """

    modules: Mapping[str, nn.Module]
    """The modules of the model, without the peft modules that stand around a layer."""
    forms: Mapping[nn.Module, LinearForm]
    """The form of each linear layer."""
    choices: dict[str, StyleChoice]
    plain: Mapping[str, str]
    """The name that every module would have without peft, by its name."""
    stream_parts: int
    """The number of parts into which features are cut at rest: y."""
    inner_parts: int
    """The number of parts into which features are cut inside a sublayer."""
    groups: dict[tuple[str, ...], HeadCounts | None] = field(default_factory=dict)
    """The layers that read one tensor together; q, k and v with their heads."""
    experts: dict[str, ExpertsForm] = field(default_factory=dict)
    """The form of each module with the experts of a mixture, by its name."""
    counts: dict[str, HeadCounts] = field(default_factory=dict)
    """The heads of every attention, by the attention's name."""
    blocks: dict[str, int] = field(default_factory=dict)
    """The width of the residual stream, by the block's name."""

    def counts_around(self, name: str) -> HeadCounts | None:
        """Return the heads of the attention that a module is part of."""
        return self.counts.get(name.rpartition(".")[0])

    # patterns

    def find_multihead(self, name: str, module: nn.Module) -> None:
        """Find torch's attention. Its own code reads the weight of `out_proj`, so that must be a plain linear layer."""
        if not isinstance(module, nn.MultiheadAttention) or adapters_of(module) or name in self.choices:
            return
        out, sizes = module.out_proj, (module.embed_dim, module.kdim, module.vdim)
        plain = type(module).forward is nn.MultiheadAttention.forward and "forward" not in vars(module)
        if not plain or out not in self.forms or self.forms[out].computed or has_hooks(out):
            return
        if module.embed_dim % self.inner_parts or any(size % self.stream_parts for size in sizes):
            return
        self.choices[name] = StyleChoice(MultiheadParallel(), "torch's attention: queries, keys and values by head")
        self.choices.setdefault(path(name, "out_proj"), StyleChoice(ContractParallel(), "leads out of attention"))

    def find_attention(self, name: str, module: nn.Module, children: Mapping[str, nn.Module]) -> None:
        """Find q, k and v beside each other, or in one weight."""
        query, key, value = (_named(children, names) for names in (QUERY, KEY, VALUE))
        packed = next((child for child in children if FUSED.get(child) == "qkv"), None)
        if query and key and value:
            members = [query, key, value]
            forms = {child: self.forms[children[child]] for child in members}
            for child in members:
                why = "attention: reads the same tensor as its neighbours"
                self.choices.setdefault(path(name, child), StyleChoice(ExpandParallel(), why))
            crosses = any(word in name.lower() for word in CROSS_ATTENTION)
            # a name or other input sizes show that queries come from one tensor, keys and values from another
            if crosses or not self._can_read_together([children[child] for child in members]):
                members.remove(query)  # it reads another tensor
            counts = self._find_heads(name, module, forms[query].outputs, forms[key].outputs, forms[query].inputs)
            fits = counts is not None and counts.fits([forms[child].outputs for child in members], self.inner_parts)
            self._read_together(name, children, members, counts if fits else None)
        elif packed:
            form = self.forms[children[packed]]
            # with as many key heads as query heads the weight has three times the width
            q = form.outputs if form.outputs < 3 * form.inputs else form.inputs
            self._find_heads(name, module, q, None, form.inputs)

    def find_experts(self, name: str, module: nn.Module, detector: ExpertsDetector) -> None:
        """Find a module with the experts of a mixture."""
        form = None if adapters_of(module) else detector.form_of(module)
        if form is None:
            return
        self.experts[name] = form
        why = f"{form.experts} gated experts"
        if form.features % self.stream_parts or form.hidden % self.inner_parts:
            cuts = f"{self.stream_parts} and {self.inner_parts}"
            why += f", but {form.features} features and {form.hidden} hidden units do not divide by {cuts}"
            self.choices.setdefault(name, StyleChoice(WholeTensors(), why))
        else:
            self.choices.setdefault(name, StyleChoice(ExpertsParallel(), why))

    def find_gates(self, name: str, children: Mapping[str, nn.Module]) -> None:
        """Find gate and up of an MLP."""
        gate, up = _named(children, GATE), _named(children, UP)
        if not gate or not up:
            return
        one, two = self.forms[children[gate]], self.forms[children[up]]
        if (one.inputs, one.outputs) == (two.inputs, two.outputs):
            for child in (gate, up):
                choice = StyleChoice(ExpandParallel(), "gate and up read the same tensor")
                self.choices.setdefault(path(name, child), choice)
            self._read_together(name, children, (gate, up))

    def _read_together(
        self,
        name: str,
        children: Mapping[str, nn.Module],
        members: Sequence[str],
        counts: HeadCounts | None = None,
    ) -> None:
        """Let children read their input together, if all of them expand it and can read one tensor."""
        names = tuple(path(name, child) for child in members)
        if self._can_read_together([children[child] for child in members]) and self._all_expand(names):
            self.groups[names] = counts

    def _all_expand(self, names: Iterable[str]) -> bool:
        return all(self.choices[name].style == ExpandParallel() for name in names)

    def _can_read_together(self, layers: Sequence[nn.Module]) -> bool:
        """Return whether these layers have the same inputs and dtype, and weights that are not computed."""
        forms = [self.forms[layer] for layer in layers]
        kinds = {(form.inputs, getattr(layer, form.weight).dtype) for form, layer in zip(forms, layers, strict=True)}
        return len(kinds) == 1 and not any(form.computed for form in forms)

    def _find_heads(self, name: str, module: nn.Module, q: int, k: int | None, features: int) -> HeadCounts | None:
        """Find the heads of an attention from the widths of q and k, its attributes and its config.

        k is None for an attention that holds q, k and v in one weight.
        """
        config = getattr(module, "config", None)
        head_dim = next((size for style in HEAD_DIMS if type(size := getattr(module, style, None)) is int), None)
        if head_dim is None:
            sizes = (getattr(at, style, None) for at in (module, config) for style in HEAD_COUNTS)
            heads = next((size for size in sizes if type(size) is int), None)
            head_dim = features // heads if heads else None
        if not head_dim or q % head_dim or (k or head_dim) % head_dim:
            return None
        kv_heads = getattr(config, "num_key_value_heads", None) or q // head_dim if k is None else k // head_dim
        heads = q // head_dim
        if k is None:
            heads = getattr(config, "num_attention_heads", None) or heads
        self.counts[name] = HeadCounts(heads, kv_heads, head_dim)
        return self.counts[name]

    def find_blocks(self) -> None:
        """Find lists of equal modules with linear layers inside; the first layer reads the residual stream."""
        for name, module in self.modules.items():
            if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) == 0:
                continue
            blocks = dict(module.named_children())
            # a list of linear layers is not a list of blocks
            if len({type(block) for block in blocks.values()}) > 1 or next(iter(blocks.values())) in self.forms:
                continue
            for own, block in blocks.items():
                linear = [self.forms[child] for child in block.modules() if child in self.forms]
                if len(linear) > 1:  # one layer alone leads nowhere: a block leaves the stream and comes back
                    self.blocks[path(name, own)] = linear[0].inputs

    # modules that no pattern has found

    def choose(self, name: str, module: nn.Module, tokens: set[int]) -> StyleChoice:
        """Choose the style of a module; `tokens` has the `id` of every parameter that embeds tokens."""
        if is_embedding(module):
            if id(module.weight) in tokens:
                return StyleChoice(EmbeddingParallel(), "embeds tokens")
            return StyleChoice(WholeTensors(), "a table that every rank looks up alike")
        if module in self.forms:
            return self._choose_linear(name, module, tokens)
        formula = norm_formula_of(module)
        if formula is not None:
            counts = self.counts_around(name)
            if counts is not None and formula.features == counts.head_dim and formula.kind == "rms":
                return StyleChoice(HeadNormParallel(), f"a norm of heads of {counts.head_dim}")
            # a norm of another width is not on the stream, and its features may lie in any way
            widths = set(self.blocks.values())
            if not widths or formula.features in widths:
                return StyleChoice(NormParallel(), f"computes a {formula.kind} norm of the residual stream")
        return StyleChoice(WholeTensors(), f"its structure is not known ({type(module).__name__})")

    def _choose_linear(self, name: str, module: nn.Module, tokens: set[int]) -> StyleChoice:
        parent, _, own = name.rpartition(".")
        if name and isinstance(self.modules.get(parent), nn.MultiheadAttention):
            return StyleChoice(WholeTensors(), "the attention around it reads its weight itself")
        form = self.forms[module]
        inputs, outputs = form.inputs, form.outputs
        # logits have any number of outputs, and a loss reads them while they are cut
        if id(module._parameters.get(form.weight)) in tokens or own in ("lm_head", "embed_out", "score", "classifier"):
            return StyleChoice(HeadParallel(), "reads logits out")
        if own in FUSED and (FUSED[own] == "qkv" or outputs % int(FUSED[own]) == 0):
            return StyleChoice(ExpandParallel(parts=FUSED[own]), f"holds several layers ({own})")
        width = next((width for block, width in self.blocks.items() if name.startswith(f"{block}.")), None)
        if width is None:
            return StyleChoice(HeadParallel(), "a linear layer by itself")
        if inputs != width and outputs == width:
            return StyleChoice(ContractParallel(), f"leads back to the stream of {width}")
        if inputs == outputs == width and (own in CONTRACTING or self._closes_attention(parent, own)):
            return StyleChoice(ContractParallel(), "leads out of attention")
        why = f"leads out of the stream of {width}" if inputs == width else "a linear layer"
        return StyleChoice(ExpandParallel(), why)

    def _closes_attention(self, parent: str, own: str) -> bool:
        """Return whether a layer is BERT's `dense`: beside q, k and v, or in a module beside the one that has them."""
        if own != "dense":
            return False
        if children_of(self.modules[parent]).keys() & {*QUERY, *FUSED, "query_key_value"}:
            return True
        above = self.modules[parent.rpartition(".")[0]]
        return any(_named(children_of(child), QUERY) for child in children_of(above).values())

    # choices that cannot stay

    def fix_choices(self) -> None:
        """Replace styles that a layer's sizes do not allow, unless the plan gave them."""
        y = self.stream_parts
        for name, choice in self.choices.items():
            module: Any = self.modules.get(name)
            if module in self.forms and not choice.given:
                self.choices[name] = self._allowed_choice(choice, self.forms[module], self.counts_around(name))
                continue
            along_features = isinstance(choice.style, (NormParallel, EmbeddingParallel)) and module is not None
            if along_features and next(module.parameters(recurse=False)).shape[-1] % y:
                why = f"{choice.why}, but its features do not divide by y={y}"
                self.choices[name] = replace(choice, style=WholeTensors(), why=why)
        self._fix_shared()
        self.groups = {names: counts for names, counts in self.groups.items() if self._all_expand(names)}

    def _fix_shared(self) -> None:
        """Let modules that share a parameter cut it in one way.

        Where their styles would cut it differently, modules that a trial detected keep their own code. A shared weight
        is stored in one piece.
        """
        users: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            for parameter in module._parameters.values():
                if parameter is not None:
                    users.setdefault(id(parameter), []).append(name)
        for names in (names for names in users.values() if len(names) > 1):
            choices = {name: self.choices[name] for name in names if name in self.choices}
            for name, choice in choices.items():
                if isinstance(choice.style, ExpandParallel) and not choice.given:
                    self.choices[name] = StyleChoice(ExpandParallel(), choice.why)
            cuts = {self._cut_of(name) for name in names}
            for name, choice in choices.items():
                form = self.forms.get(self.modules[name])
                tried = form is not None and form.dims is not None
                never = isinstance(choice.style, (MultiheadParallel, ExpertsParallel))
                if (len(cuts) > 1 and tried and not choice.given) or never:
                    why = "a module that uses it in another way has the same parameter"
                    self.choices[name] = StyleChoice(WholeTensors(), why)

    def _cut_of(self, name: str) -> tuple[type[ParallelStyle], bool] | None:
        """Return what decides how a module cuts a shared parameter: its style, and whether its weight is transposed."""
        choice, form = self.choices.get(name), self.forms.get(self.modules[name])
        if choice is None or isinstance(choice.style, WholeTensors):
            return None
        # an embedding and a head cut their table alike
        kind = HeadParallel if isinstance(choice.style, EmbeddingParallel) else type(choice.style)
        return kind, form is not None and form.transposed

    def _allowed_choice(self, choice: StyleChoice, form: LinearForm, counts: HeadCounts | None) -> StyleChoice:
        """Return the choice, or the nearest one that the sizes of the layer allow."""
        style, why, inputs, outputs = choice.style, choice.why, form.inputs, form.outputs
        y, parts = self.stream_parts, self.inner_parts
        if form.computed:
            if isinstance(style, WholeTensors):
                return choice
            # a computed weight is cut as one piece, and never padded
            style = style if isinstance(style, ContractParallel) else ExpandParallel()
            stream, inside = (outputs, inputs) if isinstance(style, ContractParallel) else (inputs, outputs)
            if stream % y or inside % parts:
                why = f"{why}, but {inputs} x {outputs} features do not divide by {y} and {parts}"
                return StyleChoice(WholeTensors(), why)
            return StyleChoice(style, why)
        if isinstance(style, (ExpandParallel, HeadParallel)) and inputs % y:
            return StyleChoice(WholeTensors(), f"{why}, but {inputs} inputs do not divide by y={y}")
        if isinstance(style, ExpandParallel) and any(size % parts for size in sizes_of_parts(style, outputs, counts)):
            return StyleChoice(HeadParallel(), f"{why}, but {outputs} outputs do not divide by {parts} and are padded")
        if isinstance(style, ContractParallel) and (inputs % parts or outputs % y):
            rule = f"{inputs} inputs do not divide by {parts}" if inputs % parts else f"{outputs} outputs by y={y}"
            return StyleChoice(HeadParallel() if inputs % y == 0 else WholeTensors(), f"{why}, but {rule}")
        return choice


def find_structure(model: nn.Module, grid: Grid, policy: Policy, given: Mapping[str, StyleChoice]) -> ModelStructure:
    """Choose a style for every module with parameters of its own; `given` styles are kept."""
    plain = plain_names(model)
    layers = {plain[name]: name for name, module in model.named_modules() if inside(module) is module}
    modules = {name: model.get_submodule(layer) for name, layer in layers.items()}
    choices = find_images(model, given) | find_lora(model) | dict(given)
    detector, experts = LinearDetector(), ExpertsDetector()
    forms = {module: form for module in modules.values() if (form := form_of(module, detector)) is not None}
    y, parts = (layout(policy.activations).parts(grid.shape.sizes, FEATURES) for layout in (rest, inner))
    found = ModelStructure(modules, forms, {plain[name]: choice for name, choice in choices.items()}, plain, y, parts)
    for name, module in modules.items():
        # a module that stands in two places counts in the first
        own = {child: kind for child, kind in children_of(module).items() if path(name, child) in modules}
        children = {child: kind for child, kind in own.items() if kind in forms}
        found.find_multihead(name, module)
        found.find_experts(name, module, experts)
        found.find_attention(name, module, children)
        found.find_gates(name, children)
    found.find_blocks()
    tokens = _token_tables(model, modules, forms)
    for name, module in modules.items():
        if name not in found.choices and has_own(module) and not adapters_of(module):
            found.choices[name] = found.choose(name, module, tokens)
    found.fix_choices()
    found.choices = {layers[name]: choice for name, choice in found.choices.items()}
    found.groups = {tuple(layers[name] for name in group): counts for group, counts in found.groups.items()}
    return found


def form_of(module: nn.Module, detector: LinearDetector) -> LinearForm | None:
    """Return the form of a linear layer: one of torch's, or any that a trial detects; None for other modules."""
    adapters = adapters_of(module)
    if adapters:
        return adapters[-1].form
    if uses_forward_of(module, (nn.Embedding,)):
        return None
    if not isinstance(module, nn.Linear):
        return detector.form_of(module)
    if is_computed(module):
        # nn.Linear's own forward reads the weight by its name and nothing else
        known = type(module).forward is nn.Linear.forward and "forward" not in vars(module)
        known = known and dict(module.named_children()).keys() <= {"parametrizations"}
        return LinearForm(module.in_features, module.out_features, computed=True) if known else None
    if uses_forward_of(module, (nn.Linear,)):
        outputs, inputs = (int(size) for size in module.weight.shape)
        return LinearForm(inputs, outputs, bias=None if module.bias is None else "bias")
    return detector.form_of(module)


def path(name: str, child: str) -> str:
    """Return the name of a module's child in the model."""
    return f"{name}.{child}".lstrip(".")


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module; a layer stands in the place of the peft module around it."""
    return {name: inside(child) for name, child in module.named_children()}


def has_own(module: nn.Module) -> bool:
    """Return whether a module has parameters of its own."""
    return any(parameter is not None for parameter in module._parameters.values())


def _named(children: Mapping[str, nn.Module], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if name in children), None)


def _token_tables(
    model: nn.Module, modules: Mapping[str, nn.Module], forms: Mapping[nn.Module, LinearForm]
) -> set[int]:
    """Return the `id` of every parameter that embeds tokens, heads tied to it included."""
    named = [module for name, module in modules.items() if name.rpartition(".")[2] in TOKEN_EMBEDDINGS]
    with suppress(AttributeError, NotImplementedError):
        named.append(model.get_input_embeddings())  # type: ignore[operator]  # a Hugging Face model names its table
    tables, embeddings = (
        {id(module._parameters.get("weight")) for module in those if isinstance(module, nn.Embedding)}
        for those in (named, modules.values())
    )
    linear = {id(module._parameters.get(form.weight)) for module, form in forms.items() if not form.transposed}
    return (tables | (embeddings & linear)) - {id(None)}

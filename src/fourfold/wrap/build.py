"""`parallelize`: any module onto the grid, in place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from fourfold import nn as on_grid
from fourfold.gradients import Gradients
from fourfold.grid import Grid
from fourfold.layout import FEATURES, Spec, inner
from fourfold.nn.layer import SPECS
from fourfold.nn.moment import Clock
from fourfold.policy import Policy
from fourfold.wrap.computed import ComputedCloser, ComputedReader
from fourfold.wrap.gathered import Gathered, Spreader
from fourfold.wrap.images import channel_norm, convolution
from fourfold.wrap.layers import (
    Adapter,
    Closer,
    Embedder,
    FusedReader,
    HeadNormer,
    Normer,
    Reader,
)
from fourfold.wrap.loops import answer_loops
from fourfold.wrap.lora import LowRank, adapted, merge_on_shards, prepare, show_sizes
from fourfold.wrap.low_rank import Narrower, Widener
from fourfold.wrap.multihead import Attention, Multihead
from fourfold.wrap.normal import formula_of
from fourfold.wrap.place import Placing
from fourfold.wrap.placed import give_functions_whole_tensors
from fourfold.wrap.plan import (
    ChannelNorm,
    Choice,
    Contract,
    Convolution,
    Embedding,
    Expand,
    Head,
    HeadNorm,
    Heads,
    Norm,
    Whole,
    Word,
    matches,
    resolve,
    whole_below,
)
from fourfold.wrap.recipes import CONTRASTED, RECIPES
from fourfold.wrap.root import Block, Contrasted, Root
from fourfold.wrap.run import Run
from fourfold.wrap.structure import (
    Found,
    find,
    has_own,
    is_embedding,
    sizes_of_parts,
)
from fourfold.wrap.swap import adapters_of, compiled, convert
from fourfold.wrap.together import Together
from fourfold.wrap.values import Values


def parallelize(
    model: nn.Module,
    grid: Grid,
    *,
    policy: Policy = Policy(),
    plan: Mapping[str, Word | str] | None = None,
    seed: int = 0,
    rows_dim: int | None = None,
) -> nn.Module:
    """Turn a plain module into its form on the grid, in place, and return it.

    Parameters keep their names and become shards; the module's own code runs on. Afterwards every rank gives it the
    rows of its (data, z) place; it returns what the plain module would for these rows, and losses that it computes are
    means over the whole batch. `plan` says of modules, by name, what they are; the rest is found (`explain` tells).
    On the meta device initial values depend on `seed` and the modules' names. Rows lie along the first dim of the
    inputs, or along `rows_dim`: 1 for a model that takes the sequence first.
    """
    check_policy(policy)
    _refuse_compiled(model)
    rows_dims = (rows_dim,) if rows_dim is not None else (0,)
    if rows_dim is None and not all(getattr(module, "batch_first", True) for module in model.modules()):
        rows_dims = (0, 1)  # torch's own modules may have the sequence first, and the model with them
    run = _run_of(model, grid, policy, rows_dims)
    give_functions_whole_tensors()
    forms = {name: adapters_of(base)[-1].form for name, _, base in adapted(model) if adapters_of(base)}
    prepare(model, {name: (form.inputs, form.outputs) for name, form in forms.items() if form is not None})
    fresh = {name: module for name, module in model.named_modules() if not adapters_of(module)}
    given = whole_below(resolve(plan or {}, fresh, "plan"), [name for name in fresh if has_own(fresh[name])])
    family = RECIPES.get(getattr(getattr(model, "config", None), "model_type", ""), {})
    recipe = {key: word for key, word in family.items() if matches(key, fresh)}
    found = find(model, grid, policy, resolve(recipe, fresh, "recipe") | given)
    adapters = _adapters(model, fresh, found, run)
    for names, counts in found.groups.items():
        if all(name in adapters for name in names):
            Together([adapters[name] for name in names], counts)  # type: ignore[misc]
    Placing(model, adapters, Values(model, grid, seed, found.blocks), grid).place()
    for name, adapter in adapters.items():
        convert(fresh[name], adapter)
        show_sizes(fresh[name])
    for name, features in found.blocks.items():
        if name in fresh and features % grid.size("y") == 0:
            convert(fresh[name], Block(name, run, "one of several equal blocks", features))
    for name in CONTRASTED.get(getattr(getattr(model, "config", None), "model_type", ""), ()):
        if name in fresh:
            convert(fresh[name], Contrasted(name, run, "a recipe: its rows are compared with each other"))
    if not any(isinstance(adapter, Root) for adapter in adapters_of(model)):
        convert(model, Root("", run, "the module that was given"))
    _leave_replaced(model)
    answer_loops(model, grid)
    merge_on_shards(model, grid)
    _register(model, run, seed)
    return model


def check_policy(policy: Policy) -> None:
    """What the reference models can do and other people's code cannot."""
    if policy.overlap.halves not in (None, 1):
        raise ValueError(
            f"halves={policy.overlap.halves}: a module's own code runs a batch as one; use halves=None or 1"
        )
    if policy.loss_chunk:
        raise ValueError(
            f"loss_chunk={policy.loss_chunk}: a module's own code makes all logits at once; use loss_chunk=0"
        )
    if policy.recompute == "attention":
        raise ValueError("recompute='attention' knows the reference models only; use 'block' or 'none'")


def _refuse_compiled(model: nn.Module) -> None:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # without it nothing is compiled; importing it takes seconds
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or (dynamo and isinstance(module, dynamo.OptimizedModule)):
            raise ValueError(compiled(name))


def _run_of(model: nn.Module, grid: Grid, policy: Policy, rows_dims: Sequence[int]) -> Run:
    """That of the parts that are on the grid already, or a new one. Parts that were parallelised apart join it."""
    adapters = [(name, adapter) for name, module in model.named_modules() for adapter in adapters_of(module)]
    run = adapters[0][1].run if adapters else Run(grid, policy, rows_dims)
    for name, adapter in adapters:
        if adapter.run.grid is not grid or adapter.run.policy != policy:
            raise ValueError(
                f"{name or 'the model'} is on the grid {adapter.run.grid} already, with {adapter.run.policy}"
            )
        adapter.run = run
    return run


def _adapters(model: nn.Module, fresh: Mapping[str, nn.Module], found: Found, run: Run) -> dict[str, Adapter]:
    """For every module that is not on the grid yet; a low-rank pair after the layer that it stands beside."""
    made: dict[str, Adapter] = {}
    for name in sorted(found.choices, key=lambda name: isinstance(found.choices[name].word, LowRank)):
        if name not in fresh:
            continue
        word = found.choices[name].word
        if not isinstance(word, LowRank):
            made[name] = _adapter(name, fresh[name], found, run)
            continue
        base = made[word.base] if word.base in made else adapters_of(model.get_submodule(word.base))[-1]
        made[name] = _thin(name, fresh[name], found.choices[name], base, run)
    return made


def _thin(name: str, module: nn.Module, choice: Choice, base: Adapter, run: Run) -> Adapter:
    if not isinstance(base, (Reader, Closer)):
        return Gathered(name, run, f"{choice.why}, which is not cut", module)
    kind = Narrower if choice.word.side == "lora_A" else Widener  # type: ignore[attr-defined]
    return kind(name, run, choice.why, base, module)  # type: ignore[arg-type]


def _adapter(name: str, module: nn.Module, found: Found, run: Run) -> Adapter:
    choice = found.choices[name]
    try:
        return MAKERS[type(choice.word)](found.plain[name], module, choice, found, run)
    except ValueError as error:
        raise ValueError(f"{name} ({type(module).__name__}): {error}") from error


def _linear(name: str, module: nn.Module, choice: Choice, found: Found, run: Run) -> Adapter:
    form = found.forms.get(module)
    if form is None:
        raise ValueError(f"{type(choice.word).__name__}() is for linear layers that use their weight as nn.Linear does")
    if form.computed:
        kind = ComputedCloser if isinstance(choice.word, Contract) else ComputedReader
        return kind(name, run, choice.why, module, form)
    bias, place = form.bias is not None, (run.grid, run.policy)
    word = choice.word
    if isinstance(word, Contract):
        return Closer(name, run, choice.why, on_grid.Contract(*place, form.inputs, form.outputs, bias=bias), form)
    if isinstance(word, Head):
        return Reader(name, run, choice.why, on_grid.Head(*place, form.inputs, form.outputs, bias=bias), form)
    counts = found.counts.get(name.rpartition(".")[0])
    sizes = sizes_of_parts(word, form.outputs, counts)  # type: ignore[arg-type]
    if len(sizes) == 1 and word.parts not in (1, "qkv"):  # type: ignore[attr-defined]
        raise ValueError(f"Expand(parts={word.parts}): {form.outputs} outputs are not so many equal layers")  # type: ignore[attr-defined]
    layers = [on_grid.Expand(*place, form.inputs, size, bias=bias) for size in sizes]
    if len(layers) == 1:
        return Reader(name, run, choice.why, layers[0], form)
    parts = inner(run.policy.activations).parts(run.grid.shape.sizes, FEATURES)
    if word.parts != "qkv" or counts is None or not counts.lie_so(sizes, parts):  # type: ignore[attr-defined]
        counts = None
    return FusedReader(name, run, choice.why, layers, form, counts=counts)


def _multihead(name: str, module: nn.Module, choice: Choice, found: Found, run: Run) -> Adapter:  # noqa: ARG001
    return Attention(name, run, choice.why, module)  # type: ignore[arg-type]


def _embedding(name: str, module: nn.Module, choice: Choice, found: Found, run: Run) -> Adapter:  # noqa: ARG001
    if not is_embedding(module):
        raise ValueError("Embedding() is for nn.Embedding, and for what asks its forward")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError("max_norm, scale_grad_by_freq and sparse do not work on a table that is cut; leave them out")
    rows, features = module.weight.shape
    return Embedder(
        name, run, choice.why, on_grid.Embedding(run.grid, run.policy, rows, features, untrained=module.padding_idx)
    )


def _norm(name: str, module: nn.Module, choice: Choice, found: Found, run: Run) -> Adapter:  # noqa: ARG001
    formula = formula_of(module)
    if formula is None:
        raise ValueError("it computes neither an RMS norm nor a LayerNorm of the last dim; give it a plan of Whole()")
    if isinstance(choice.word, HeadNorm):
        if formula.kind != "rms":
            raise ValueError("HeadNorm() is for RMS norms; give it a plan of Whole()")
        layer = on_grid.HeadNorm(run.grid, run.policy, formula.features, eps=formula.eps, shift=formula.shift)
        return HeadNormer(name, run, choice.why, layer)
    options = dict(kind=formula.kind, bias=formula.bias, eps=formula.eps, shift=formula.shift)
    return Normer(name, run, choice.why, on_grid.Norm(run.grid, run.policy, formula.features, **options))  # type: ignore[arg-type]


def _gathered(name: str, module: nn.Module, choice: Choice, found: Found, run: Run) -> Adapter:
    if isinstance(choice.word, Heads):
        return Spreader(name, run, choice.why, module)
    made = Gathered(name, run, choice.why, module, whole_inputs=choice.why.startswith("plan"))
    made.form = found.forms.get(module)
    return made


MAKERS: dict[type[Word], Callable[[str, nn.Module, Choice, Found, Run], Adapter]] = {
    Expand: _linear,
    Contract: _linear,
    Head: _linear,
    Embedding: _embedding,
    Norm: _norm,
    HeadNorm: _norm,
    Multihead: _multihead,
    Heads: _gathered,
    Whole: _gathered,
    Convolution: convolution,
    ChannelNorm: channel_norm,
}


def _leave_replaced(model: nn.Module) -> None:
    """Layers that were read together with one that was replaced since an earlier call go on without it."""
    present = {adapter for module in model.modules() for adapter in adapters_of(module)}
    for group in {adapter.together for adapter in present if isinstance(adapter, Reader)}:
        if not present.issuperset(group.readers):  # type: ignore[arg-type]
            Together([reader for reader in group.readers if reader in present])


def _register(model: nn.Module, run: Run, seed: int) -> None:
    """Gradients for all parameters, those of an earlier call included."""
    parameters: dict[str, tuple[nn.Parameter, Spec]] = {}
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        spec = vars(model.get_submodule(owner)).get(SPECS, {}).get(own)
        if spec is None:
            raise ValueError(f"{name} is not on the grid")
        if run.policy.shard_optimizer and not spec.shape:
            raise ValueError(
                f"shard_optimizer=True cuts every parameter's optimizer state over data, but {name} has no dims; make "
                "it a vector of one entry, or leave shard_optimizer out"
            )
        parameters[name] = parameter, spec
    run.gradients = Gradients(run.grid, parameters, run.policy)
    run.clock = Clock(seed, run.engine)
    run.held = []
    for name, module in model.named_modules():
        for adapter in adapters_of(module):
            adapter.held = [(own, layer._parameters, at) for own, (layer, at, _) in adapter.parameters().items()]
            full = f"{name}.".lstrip(".")
            run.held += [(f"{full}{own}", module._parameters, own, table, at) for own, table, at in adapter.held]
    run.modules = [
        (name, module, [*module._modules.values()], [*module._parameters]) for name, module in model.named_modules()
    ]
    for module in model.modules():
        if any(isinstance(adapter, Root) for adapter in adapters_of(module)):
            vars(module)["gradients"], vars(module)["clock"] = run.gradients, run.clock
        for layer in (layer for adapter in adapters_of(module) for layer in adapter.layers):
            layer.gradients, layer.clock = run.gradients, run.clock

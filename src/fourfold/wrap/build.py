"""`parallelize` puts any module onto the grid, in place; `explain` shows what every module does there, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from fourfold import nn as on_grid
from fourfold.gradients import Gradients
from fourfold.grid import Grid
from fourfold.layout import FEATURES, Spec, inner, rest
from fourfold.nn.images.channel_norm import BatchNorm, GroupNorm
from fourfold.nn.images.conv import Conv, Geometry, GroupedConv
from fourfold.nn.layer import SPECS
from fourfold.nn.rng import StepRng
from fourfold.policy import Policy
from fourfold.wrap.adapters import (
    Adapter,
    ComputedContractAdapter,
    ComputedExpandAdapter,
    ContractAdapter,
    EmbeddingAdapter,
    ExpandAdapter,
    FusedExpandAdapter,
    GatheredAdapter,
    HeadNormAdapter,
    HeadsAdapter,
    NormAdapter,
)
from fourfold.wrap.context import ModelContext
from fourfold.wrap.convert import InitialValues, ParameterSharder, adapters_of, compile_error, convert
from fourfold.wrap.detect import norm_formula_of
from fourfold.wrap.grid_tensor import give_autograd_functions_whole_tensors
from fourfold.wrap.images import (
    BATCH_NORMS,
    BatchNormAdapter,
    ChannelNormAdapter,
    DenseConvAdapter,
    GroupedConvAdapter,
    is_channel_norm,
    is_convolution,
)
from fourfold.wrap.integrations import answer_training_loops
from fourfold.wrap.lora import LoraA, LoraB, expose_shapes, fix_lora_sizes, lora_modules, merge_on_shards
from fourfold.wrap.multihead import MultiheadAdapter
from fourfold.wrap.passes import BlockAdapter, ContrastiveAdapter, RootAdapter
from fourfold.wrap.plan import (
    CONTRASTED,
    RECIPES,
    ChannelNormParallel,
    ContractParallel,
    ConvParallel,
    EmbeddingParallel,
    ExpandParallel,
    HeadNormParallel,
    HeadParallel,
    HeadsParallel,
    LoraParallel,
    MultiheadParallel,
    NormParallel,
    ParallelStyle,
    StyleChoice,
    WholeTensors,
    matches,
    pattern_of,
    resolve,
    whole_below,
)
from fourfold.wrap.shared_input import SharedInput
from fourfold.wrap.structure import ModelStructure, find_structure, has_own, is_embedding, sizes_of_parts


def parallelize(
    model: nn.Module,
    grid: Grid,
    *,
    policy: Policy = Policy(),
    plan: Mapping[str, ParallelStyle | str] | None = None,
    seed: int = 0,
    rows_dim: int | None = None,
) -> nn.Module:
    """Turn a plain module into its form on the grid, in place, and return it.

    Parameters keep their names and become shards; the module's own code keeps running. Afterwards every rank gives the
    model the rows of its (data, z) place. The model returns what the plain module would return for these rows, and
    losses that it computes are means over the whole batch. `plan` gives modules, by name, their parallel styles; the
    styles of all others are found (`explain` shows them). On the meta device initial values depend on `seed` and on the
    modules' names. Rows lie along the first dim of the inputs, or along `rows_dim`: 1 for a model that takes the
    sequence first.
    """
    check_policy(policy)
    _refuse_compiled(model)
    rows_dims = (rows_dim,) if rows_dim is not None else (0,)
    if rows_dim is None and not all(getattr(module, "batch_first", True) for module in model.modules()):
        rows_dims = (0, 1)  # torch's own modules may take the sequence first, and perhaps the model does too
    context = _context_of(model, grid, policy, rows_dims)
    give_autograd_functions_whole_tensors()
    forms = {name: adapters_of(base)[-1].form for name, _, base in lora_modules(model) if adapters_of(base)}
    fix_lora_sizes(model, {name: (form.inputs, form.outputs) for name, form in forms.items() if form is not None})
    fresh = {name: module for name, module in model.named_modules() if not adapters_of(module)}
    given = whole_below(
        resolve(plan or {}, fresh, "plan", given=True), [name for name in fresh if has_own(fresh[name])]
    )
    family = getattr(getattr(model, "config", None), "model_type", "")
    recipe = {key: style for key, style in RECIPES.get(family, {}).items() if matches(key, fresh)}
    found = find_structure(model, grid, policy, resolve(recipe, fresh, "recipe", given=False) | given)
    adapters = _adapters(model, fresh, found, context)
    for names, counts in found.groups.items():
        if all(name in adapters for name in names):
            SharedInput([adapters[name] for name in names], counts)  # type: ignore[misc]
    ParameterSharder(model, adapters, InitialValues(model, grid, seed, found.blocks), grid).shard()
    for name, adapter in adapters.items():
        convert(fresh[name], adapter)
        expose_shapes(fresh[name])
    stream_parts = rest(policy.activations).parts(grid.shape.sizes, FEATURES)
    for name, features in found.blocks.items():
        if name in fresh and features % stream_parts == 0:
            convert(fresh[name], BlockAdapter(name, context, "one of several equal blocks", features))
    for name in CONTRASTED.get(family, ()):
        if name in fresh:
            convert(fresh[name], ContrastiveAdapter(name, context, "a recipe: its rows are compared with each other"))
    if not any(isinstance(adapter, RootAdapter) for adapter in adapters_of(model)):
        convert(model, RootAdapter("", context, "the module that was given"))
    _drop_replaced_readers(model)
    answer_training_loops(model, grid)
    merge_on_shards(model, grid)
    _register(model, context, seed)
    return model


def check_policy(policy: Policy) -> None:
    """Refuse options that work with the reference models and cannot work with other people's code."""
    if policy.overlap.halves not in (None, 1):
        raise ValueError(
            f"halves={policy.overlap.halves}: a module's own code runs a batch as one; use halves=None or 1"
        )
    if policy.loss_chunk:
        raise ValueError(
            f"loss_chunk={policy.loss_chunk}: a module's own code makes all logits at once; use loss_chunk=0"
        )
    if policy.recompute == "attention":
        raise ValueError("recompute='attention' works with the reference models only; use 'block' or 'none'")


def _refuse_compiled(model: nn.Module) -> None:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds; without it nothing is compiled
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or (dynamo and isinstance(module, dynamo.OptimizedModule)):
            raise compile_error(name)


def _context_of(model: nn.Module, grid: Grid, policy: Policy, rows_dims: Sequence[int]) -> ModelContext:
    """Return the context of the parts that are on the grid already, which all join one context, or a new one."""
    adapters = [(name, adapter) for name, module in model.named_modules() for adapter in adapters_of(module)]
    context = adapters[0][1].context if adapters else ModelContext(grid, policy, rows_dims)
    for name, adapter in adapters:
        if adapter.context.grid is not grid or adapter.context.policy != policy:
            raise ValueError(
                f"{name or 'the model'} is on the grid {adapter.context.grid} already, with {adapter.context.policy}; "
                "use the same grid and policy"
            )
        adapter.context = context
    return context


# adapters


def _adapters(
    model: nn.Module, fresh: Mapping[str, nn.Module], found: ModelStructure, context: ModelContext
) -> dict[str, Adapter]:
    """Make an adapter for every module that is not on the grid yet."""
    made: dict[str, Adapter] = {}
    # LoRA factors come last, because they need the adapter of the layer beside them
    for name in sorted(found.choices, key=lambda name: isinstance(found.choices[name].style, LoraParallel)):
        if name not in fresh:
            continue
        choice, module = found.choices[name], fresh[name]
        if isinstance(choice.style, LoraParallel):
            at = choice.style.base
            base = made[at] if at in made else adapters_of(model.get_submodule(at))[-1]
            made[name] = _lora(name, module, choice, base, context)
            continue
        try:
            made[name] = MAKERS[type(choice.style)](found.plain[name], module, choice, found, context)
        except ValueError as error:
            raise ValueError(f"{name} ({type(module).__name__}): {error}") from error
    return made


def _lora(name: str, module: nn.Module, choice: StyleChoice, base: Adapter, context: ModelContext) -> Adapter:
    if not isinstance(base, (ExpandAdapter, ContractAdapter)):
        return GatheredAdapter(name, context, f"{choice.why}, which is not cut", module)
    kind = LoraA if choice.style.factor == "lora_A" else LoraB  # type: ignore[attr-defined]
    return kind(name, context, choice.why, base, module)  # type: ignore[arg-type]


def _linear(name: str, module: nn.Module, choice: StyleChoice, found: ModelStructure, context: ModelContext) -> Adapter:
    form, style, why = found.forms.get(module), choice.style, choice.why
    if form is None:
        raise ValueError(
            f"{type(style).__name__}() is for linear layers that use their weight as nn.Linear does; "
            "give it WholeTensors()"
        )
    if form.computed:
        kind = ComputedContractAdapter if isinstance(style, ContractParallel) else ComputedExpandAdapter
        return kind(name, context, why, module, form)
    bias, place = form.bias is not None, (context.grid, context.policy)
    if isinstance(style, ContractParallel):
        return ContractAdapter(name, context, why, on_grid.Contract(*place, form.inputs, form.outputs, bias=bias), form)
    if isinstance(style, HeadParallel):
        return ExpandAdapter(name, context, why, on_grid.Head(*place, form.inputs, form.outputs, bias=bias), form)
    counts = found.counts_around(name)
    sizes = sizes_of_parts(style, form.outputs, counts)  # type: ignore[arg-type]
    parts = style.parts  # type: ignore[attr-defined]
    if len(sizes) == 1 and parts not in (1, "qkv"):
        raise ValueError(f"ExpandParallel(parts={parts}): {form.outputs} outputs are not {parts} equal layers")
    layers = [on_grid.Expand(*place, form.inputs, size, bias=bias) for size in sizes]
    if len(layers) == 1:
        return ExpandAdapter(name, context, why, layers[0], form)
    inner_parts = inner(context.policy.activations).parts(context.grid.shape.sizes, FEATURES)
    if parts != "qkv" or counts is None or not counts.fits(sizes, inner_parts):
        counts = None
    return FusedExpandAdapter(name, context, why, layers, form, counts=counts)


def _multihead(
    name: str,
    module: Any,
    choice: StyleChoice,
    found: ModelStructure,  # noqa: ARG001
    context: ModelContext,
) -> Adapter:
    return MultiheadAdapter(name, context, choice.why, module)


def _embedding(
    name: str,
    module: Any,
    choice: StyleChoice,
    found: ModelStructure,  # noqa: ARG001
    context: ModelContext,
) -> Adapter:
    if not is_embedding(module):
        raise ValueError("EmbeddingParallel() is for nn.Embedding and subclasses that call its forward")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError("max_norm, scale_grad_by_freq and sparse do not work on a table that is cut; leave them out")
    rows, features = module.weight.shape
    layer = on_grid.Embedding(context.grid, context.policy, rows, features, untrained=module.padding_idx)
    return EmbeddingAdapter(name, context, choice.why, layer)


def _norm(
    name: str,
    module: nn.Module,
    choice: StyleChoice,
    found: ModelStructure,  # noqa: ARG001
    context: ModelContext,
) -> Adapter:
    formula = norm_formula_of(module)
    if formula is None:
        raise ValueError("it computes neither an RMS norm nor a LayerNorm of the last dim; give it WholeTensors()")
    place = (context.grid, context.policy)
    if isinstance(choice.style, HeadNormParallel):
        if formula.kind != "rms":
            raise ValueError("HeadNormParallel() is for RMS norms; give it WholeTensors()")
        layer = on_grid.HeadNorm(*place, formula.features, eps=formula.eps, shift=formula.shift)
        return HeadNormAdapter(name, context, choice.why, layer)
    options: Any = dict(kind=formula.kind, bias=formula.bias, eps=formula.eps, shift=formula.shift)
    return NormAdapter(name, context, choice.why, on_grid.Norm(*place, formula.features, **options))


def _gathered(
    name: str, module: nn.Module, choice: StyleChoice, found: ModelStructure, context: ModelContext
) -> Adapter:
    if isinstance(choice.style, HeadsParallel):
        return HeadsAdapter(name, context, choice.why, module)
    made = GatheredAdapter(name, context, choice.why, module, whole_inputs=choice.given)
    made.form = found.forms.get(module)
    return made


def _convolution(
    name: str,
    module: Any,
    choice: StyleChoice,
    found: ModelStructure,  # noqa: ARG001
    context: ModelContext,
) -> Adapter:
    if not is_convolution(module):
        raise ValueError("ConvParallel() is for torch's convolutions; give it WholeTensors()")
    sizes = (context.grid, context.policy, module.in_channels, module.out_channels, Geometry.of(module))
    bias = module.bias is not None
    if module.groups > 1:
        axes = _channel_axes(choice.style, context)
        layer = GroupedConv(*sizes, groups=module.groups, axes=axes, bias=bias)
        return GroupedConvAdapter(name, context, choice.why, layer)
    role = "contract" if choice.style.contract else "expand"  # type: ignore[attr-defined]
    return DenseConvAdapter(name, context, choice.why, Conv(*sizes, role=role, bias=bias))


def _channel_norm(
    name: str,
    module: Any,
    choice: StyleChoice,
    found: ModelStructure,  # noqa: ARG001
    context: ModelContext,
) -> Adapter:
    if not is_channel_norm(module):
        raise ValueError(
            "ChannelNormParallel() is for torch's BatchNorm, GroupNorm and InstanceNorm; give it WholeTensors()"
        )
    axes, has_bias = _channel_axes(choice.style, context), module.bias is not None
    options: Any = dict(axes=axes, eps=module.eps, affine=module.affine, bias=has_bias)
    place = (context.grid, context.policy)
    if isinstance(module, BATCH_NORMS):
        options |= dict(momentum=module.momentum, track_running_stats=module.running_mean is not None)
        return BatchNormAdapter(name, context, choice.why, BatchNorm(*place, module.num_features, **options))
    if isinstance(module, nn.GroupNorm):
        layer = GroupNorm(*place, module.num_groups, module.num_channels, **options)
    else:  # InstanceNorm: every channel is a group
        layer = GroupNorm(*place, module.num_features, module.num_features, **options)
    return ChannelNormAdapter(name, context, choice.why, layer)


def _channel_axes(style: ParallelStyle, context: ModelContext) -> tuple[str, ...]:
    """Return the axes that cut channels, outermost first: over x and then y, or over y and then x if contracted."""
    axes = ("y", "x") if style.contract else ("x", "y")  # type: ignore[attr-defined]
    return axes if context.policy.activations == "sharded" else axes[:1]


MAKERS: dict[type[ParallelStyle], Callable[[str, nn.Module, StyleChoice, ModelStructure, ModelContext], Adapter]] = {
    ExpandParallel: _linear,
    ContractParallel: _linear,
    HeadParallel: _linear,
    EmbeddingParallel: _embedding,
    NormParallel: _norm,
    HeadNormParallel: _norm,
    MultiheadParallel: _multihead,
    HeadsParallel: _gathered,
    WholeTensors: _gathered,
    ConvParallel: _convolution,
    ChannelNormParallel: _channel_norm,
}
"""The function that makes the adapter of each style."""


def _drop_replaced_readers(model: nn.Module) -> None:
    """Remove layers that were replaced since an earlier call from the groups that read together."""
    present = {adapter for module in model.modules() for adapter in adapters_of(module)}
    for group in {adapter.shared_input for adapter in present if isinstance(adapter, ExpandAdapter)}:
        if not present.issuperset(group.readers):  # type: ignore[arg-type]
            SharedInput([reader for reader in group.readers if reader in present])


def _register(model: nn.Module, context: ModelContext, seed: int) -> None:
    """Register all parameters, those of an earlier call included, for the reduction of their gradients."""
    parameters: dict[str, tuple[nn.Parameter, Spec]] = {}
    for name, parameter in model.named_parameters():
        owner, _, own = name.rpartition(".")
        spec = vars(model.get_submodule(owner)).get(SPECS, {}).get(own)
        if spec is None:
            raise ValueError(f"{name} is not on the grid")
        if context.policy.shard_optimizer and not spec.shape:
            raise ValueError(
                f"shard_optimizer=True cuts every parameter's optimizer state over data, but {name} has no dims; make "
                "it a vector of one entry, or leave shard_optimizer out"
            )
        parameters[name] = parameter, spec
    context.gradients = Gradients(context.grid, parameters, context.policy)
    context.clock = StepRng(seed, context.engine)
    context.parameter_homes = []
    for name, module in model.named_modules():
        for adapter in adapters_of(module):
            adapter.homes = [(own, layer._parameters, at) for own, (layer, at, _) in adapter.parameters().items()]
            prefix = f"{name}.".lstrip(".")
            context.parameter_homes += [
                (f"{prefix}{own}", module._parameters, own, table, at) for own, table, at in adapter.homes
            ]
    context.known_modules = [
        (name, module, [*module._modules.values()], [*module._parameters]) for name, module in model.named_modules()
    ]
    for module in model.modules():
        if any(isinstance(adapter, RootAdapter) for adapter in adapters_of(module)):
            vars(module)["gradients"], vars(module)["clock"] = context.gradients, context.clock
        for layer in (layer for adapter in adapters_of(module) for layer in adapter.layers):
            layer.gradients, layer.clock = context.gradients, context.clock


# explanation


def explain(model: nn.Module) -> str:
    """Return a table with one line per module, equal blocks once: its layout, what it communicates, and why.

    After a pass the table is followed by the operations for which tensors were made whole, which is where time can be
    saved.
    """
    rows: dict[tuple[str, ...], None] = {}
    context: ModelContext | None = None
    for name, module in model.named_modules():
        for adapter in adapters_of(module):
            context = adapter.context
            pattern = pattern_of(name) or "(the model)"
            layout, travels = adapter.describe()
            rows[pattern, type(module).__name__, layout, travels, adapter.why] = None  # in order, each once
    if context is None:
        raise ValueError(f"{type(model).__name__} is not parallelised; call ff.parallelize(model, grid) first")
    table = [("module", "kind", "layout", "communicates", "why"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [f"{type(model).__name__} on {context.grid}, {context.policy.activations} activations"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.append("batch in one part (halves=1): a module's own code runs it as one")
    if context.local_losses:
        lines.append(
            "torch's losses inside the model are each place's own: they are called once per row, or by some places"
        )
    if context.unchecked:
        lines.append(f"whether rows depend on each other could not be checked: {context.unchecked}")
    if context.made_whole:
        lines += ["", "Made whole in the last pass (the operation is right, and slower than on parts):"]
        lines += [f"  {count} x {operation} {place}" for (place, operation), count in context.made_whole.most_common()]
    return "\n".join(lines)

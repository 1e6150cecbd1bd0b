"""`parallelize` puts any module onto the grid, in place; `explain` shows what every module does there, and why.

A module's class becomes a subclass of the same name, and adapters run its forward; identity, hooks, children and names
stay. Its parameters become shards (`parameters.py`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils._pytree import tree_map_only

import fourfold.wrap.plan as styles
from fourfold.axes import PIPE
from fourfold.gradients import Gradients
from fourfold.grid import Grid, shards_alone_error
from fourfold.layout import FEATURES, Spec, rest
from fourfold.nn.layer import SPECS
from fourfold.nn.rng import StepRng
from fourfold.params import apply_where_it_changes
from fourfold.policy import Policy
from fourfold.torch_hooks import refuse_on_grid
from fourfold.wrap.adapters import (
    ADAPTERS,
    Adapter,
    GatheredAdapter,
    HeadsAdapter,
    adapters_of,
    calls_parent_forward,
    make_embedding,
    make_norm,
)
from fourfold.wrap.experts import make_experts
from fourfold.wrap.grid_tensor import (
    ModelContext,
    give_autograd_functions_whole_tensors,
    refuse_in_autograd_function,
    to_shown,
)
from fourfold.wrap.images import CONVOLUTIONS, make_channel_norm, make_convolution
from fourfold.wrap.integrations import (
    answer_training_loops,
    generate_alike,
    generate_by_place,
    require_dtype,
    runs_until_all_are_done,
)
from fourfold.wrap.linear_adapters import (
    ContractAdapter,
    ExpandAdapter,
    MultiheadAdapter,
    SharedInput,
    make_linear,
    state_of,
)
from fourfold.wrap.lora import LoraA, LoraB, expose_shapes, fix_lora_sizes, lora_modules, merge_on_shards
from fourfold.wrap.parameters import InitialValues, ParameterSharder, lend_parameter
from fourfold.wrap.passes import BlockAdapter, ContrastiveAdapter, RootAdapter
from fourfold.wrap.plan import ParallelStyle, StyleChoice
from fourfold.wrap.sequence_tensor import SequenceTensor, by_token, refusal, sequence_tensors_in
from fourfold.wrap.structure import ModelStructure, find_structure, has_own, path


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

    On a grid with a context size, places of a group get the same rows [rows, seq], and each computes its own tokens.
    Attention must be torch's, and causal; whatever else mixes tokens is refused.
    """
    policy.require_any_module()
    _check_context(grid, policy, rows_dim)
    _refuse_compiled(model)
    _refuse_own_names(model)
    rows_dims = (rows_dim,) if rows_dim is not None else (0,)
    if rows_dim is None and not all(getattr(module, "batch_first", True) for module in model.modules()):
        rows_dims = (0, 1)  # torch's own modules may take the sequence first, and perhaps the model does too
    context = _context_of(model, grid, policy, rows_dims)
    give_autograd_functions_whole_tensors()
    refuse_on_grid()  # once more: FSDP may have been imported since the grid was made
    # peft may stand around a layer that an earlier call has cut, and have taken the shard's sizes for the layer's
    forms = {name: adapters_of(base)[-1].form for name, _, base in lora_modules(model) if adapters_of(base)}
    fix_lora_sizes(model, {name: (form.inputs, form.outputs) for name, form in forms.items() if form is not None})
    # 1. choose a style for every module that is not on the grid yet: the plan's, a recipe's, or one found by structure
    fresh = {name: module for name, module in model.named_modules() if not adapters_of(module)}
    own = [path(name, own) for name, module in fresh.items() for own in module._parameters]
    asked = styles.resolve(plan or {}, fresh, "plan", given=True, parameters=own)
    given = styles.whole_below(asked, [name for name in fresh if has_own(fresh[name])])
    family = getattr(getattr(model, "config", None), "model_type", "")
    recipe = {key: style for key, style in styles.RECIPES.get(family, {}).items() if styles.matches(key, fresh)}
    found = find_structure(model, grid, policy, styles.resolve(recipe, fresh, "recipe", given=False) | given)
    # 2. make the adapters, then the shards of the parameters that they declare
    adapters = _adapters(model, fresh, found, context)
    for names, counts in found.groups.items():
        if all(name in adapters for name in names):
            SharedInput([adapters[name] for name in names], counts)  # type: ignore[misc]
    ParameterSharder(model, adapters, InitialValues(model, grid, seed, found.blocks), grid).shard()
    # 3. let the adapters run their modules: layers first, then blocks around them, then the model around all
    for name, adapter in adapters.items():
        convert(fresh[name], adapter)
        expose_shapes(fresh[name])
    stream_parts = rest(policy.activations).parts(grid.shape.sizes, FEATURES)
    for name, features in found.blocks.items():
        if name in fresh and features % stream_parts == 0:
            convert(fresh[name], BlockAdapter(name, context, "one of several equal blocks", features))
    for name in styles.CONTRASTED.get(family, ()):
        if name in fresh:
            convert(fresh[name], ContrastiveAdapter(name, context, "a recipe: its rows are compared with each other"))
    if not any(isinstance(adapter, RootAdapter) for adapter in adapters_of(model)):
        convert(model, RootAdapter("", context, "the module that was given"))
    # 4. prepare what others ask of the model, and the reduction of its gradients
    _drop_replaced_readers(model)
    answer_training_loops(model, grid)
    merge_on_shards(model, grid)
    _register(model, context, seed)
    return model


def _check_context(grid: Grid, policy: Policy, rows_dim: int | None) -> None:
    """Refuse what a context size does not go with."""
    if grid.shape.context == 1:
        return
    if policy.assignment == "documents":
        raise ValueError(
            "assignment='documents': where documents begin in a module's rows is not known; use 'rows' or 'auto'"
        )
    if rows_dim not in (None, 0):
        raise ValueError(
            f"rows_dim={rows_dim} on the grid {grid}: sequences are cut over context where they lie along dim 1; "
            "use a model that takes [rows, seq], or a grid with context=1"
        )


def _refuse_compiled(model: nn.Module) -> None:
    """Refuse a model that torch.compile has compiled, in whole or in part."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes seconds; without it nothing is compiled
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or (dynamo and isinstance(module, dynamo.OptimizedModule)):
            raise compile_error(name)


def _refuse_own_names(model: nn.Module) -> None:
    """Refuse a model with attributes of its own where training loops look for the grid's (`_register`)."""
    for name, kind in dict(gradients=Gradients, clock=StepRng).items():
        found = getattr(model, name, None)
        if found is not None and not isinstance(found, kind):
            raise ValueError(
                f"{type(model).__name__}.{name} is a {type(found).__name__}, and ff.parallelize puts a {kind.__name__} "
                f"there; rename the model's own attribute {name!r}"
            )


def _context_of(model: nn.Module, grid: Grid, policy: Policy, rows_dims: Sequence[int]) -> ModelContext:
    """Return the context of the parts that are on the grid already, which all join one context, or a new one."""
    if grid.size(PIPE) > 1:
        raise ValueError(
            f"Grid({grid}): only the reference models (ff.models.build) can be cut into the stages of a pipeline; "
            "use pipe=1 and larger x, z or data"
        )
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
    for name in sorted(found.choices, key=lambda name: isinstance(found.choices[name].style, styles.LoraParallel)):
        if name not in fresh:
            continue
        choice, module = found.choices[name], fresh[name]
        if isinstance(choice.style, styles.LoraParallel):
            at = choice.style.base
            base = made[at] if at in made else adapters_of(model.get_submodule(at))[-1]
            if isinstance(base, (ExpandAdapter, ContractAdapter)):
                factor: Any = LoraA if choice.style.factor == "lora_A" else LoraB
                made[name] = factor(name, context, choice.why, base, module)
            else:
                made[name] = GatheredAdapter(name, context, f"{choice.why}, which is not cut", module)
            continue
        try:
            made[name] = _adapter(found.plain[name], module, choice, found, context)
        except ValueError as error:
            raise ValueError(f"{name} ({type(module).__name__}): {error}") from error
    return made


def _adapter(name: str, module: Any, choice: StyleChoice, found: ModelStructure, context: ModelContext) -> Adapter:
    """Make the adapter that a style asks for."""
    style, why = choice.style, choice.why
    match style:
        case styles.ExpandParallel() | styles.ContractParallel() | styles.HeadParallel():
            form, counts = found.forms.get(module), found.counts_around(name)
            return make_linear(name, module, style, why, context, form, counts)
        case styles.EmbeddingParallel():
            return make_embedding(name, module, why, context)
        case styles.NormParallel() | styles.HeadNormParallel():
            return make_norm(name, module, why, context, of_heads=isinstance(style, styles.HeadNormParallel))
        case styles.MultiheadParallel():
            return MultiheadAdapter(name, context, why, module)
        case styles.ConvParallel():
            return make_convolution(name, module, why, context, contract=style.contract)
        case styles.ChannelNormParallel():
            return make_channel_norm(name, module, why, context, contract=style.contract)
        case styles.ExpertsParallel():
            return make_experts(name, why, context, found.experts.get(name))
        case styles.HeadsParallel():
            return HeadsAdapter(name, context, why, module)
    made = GatheredAdapter(name, context, why, module, whole_inputs=choice.given)
    made.form = found.forms.get(module)
    return made


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
    context.adapters = [(name, module, made) for name, module in model.named_modules() for made in adapters_of(module)]
    for _, module, adapter in context.adapters:
        adapter.homes = [(own, layer._parameters, at) for own, (layer, at, _) in adapter.parameters().items()]
        for layer in adapter.layers:
            layer.gradients, layer.clock = context.gradients, context.clock
        if isinstance(adapter, RootAdapter):
            vars(module)["gradients"], vars(module)["clock"] = context.gradients, context.clock
    context.known_modules = [
        (name, module, [*module._modules.values()], [*module._parameters]) for name, module in model.named_modules()
    ]


# classes

PARENTS = (
    *(nn.Linear, nn.Embedding),
    *CONVOLUTIONS,
    *(nn.GroupNorm, nn.SyncBatchNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm),
)
"""Classes of torch with a forward that a subclass may call from its own."""


def convert(module: nn.Module, adapter: Adapter) -> None:
    """Let the adapter run the module from now on, around any adapter that it has already."""
    if adapters_of(module):
        vars(module)[ADAPTERS].insert(0, adapter)
        return
    vars(module)[ADAPTERS] = [adapter]
    module.__class__ = _on_grid(type(module))


@functools.cache  # one class per plain class, so that equal modules keep equal types
def _on_grid(plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of the same name in which adapters run forward.

    A subclass of nn.Linear, for example, may scale what the parent's forward returns. It keeps its own forward, and
    adapters run in place of the parent's.
    """
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__getattr__": _getattr(plain)}
    names["_apply"], names["__reduce_ex__"] = _apply(plain), _reduce(plain)
    for parent in PARENTS:
        if calls_parent_forward(plain, parent):
            between = type(parent.__name__, (parent,), {"forward": _forward(parent)})
            return type(plain.__name__, (plain, between), names)
    methods = {"forward": _forward(plain)}
    if inspect.isfunction(inspect.getattr_static(plain, "generate", None)):  # not a static or a class method
        methods["generate"] = _generate(plain)
    return type(plain.__name__, (plain,), names | methods)


def _forward(plain: type[nn.Module]) -> Any:
    """Return a forward that runs the adapters of a module around the plain class's own forward."""
    own = plain.forward

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _refuse_transforms(adapters_of(self)[0])
        refuse_in_autograd_function(adapters_of(self)[0].context)
        call = functools.partial(own, self)
        for adapter in reversed(adapters_of(self)):
            call = functools.partial(_run_adapter, adapter, self, call)
        return call(*args, **kwargs)

    return forward


def _refuse_transforms(adapter: Adapter) -> None:
    """Refuse torch.compile and transforms of torch.func.

    torch.compile would trace through cut tensors and collectives for many minutes; torch.func replaces tensors by ones
    that neither can take.
    """
    if torch.compiler.is_compiling() or callable(get_eval_frame_callback()):
        raise compile_error(adapter.name)
    if torch._C._functorch.maybe_current_level() is not None:
        raise ValueError(
            f"{adapter.name or 'the model'} is called inside torch.vmap, torch.func.grad or another transform of "
            "torch.func, which cannot pass through modules on a grid; call the model on a batch of rows, and use "
            "loss.backward() and parameter.grad"
        )


def compile_error(name: str) -> ValueError:
    """Return the error for a module that torch.compile compiles."""
    return ValueError(
        f"{name or 'the model'} is compiled by torch.compile, which cannot compile modules on a grid; leave "
        "torch.compile and module.compile() out and use ff.parallelize(model, grid, "
        "policy=ff.Policy(compile=True)), which compiles the computation between collectives"
    )


def _run_adapter(adapter: Adapter, module: nn.Module, inside: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run an adapter in the precision in which it computes.

    Autocast is turned off while it runs: its casts in forward would have no counterpart in the adapters' backward.
    """
    device = adapter.context.grid.device.type
    autocast = torch.is_autocast_enabled(device)
    if autocast:
        asked = torch.get_autocast_dtype(device)
        require_dtype(adapter.context, f"torch.autocast to {asked}", asked)
    dtype = adapter.input_dtype(autocast=autocast)
    if dtype is not None:
        args, kwargs = tree_map_only(Tensor, functools.partial(_cast, adapter.context, dtype=dtype), (args, kwargs))
    # `functional_call` may have put other parameters there, and a call may have arguments that no trial has seen
    known = adapter.replaced_parameter(module) is None and adapter.accepts(args, kwargs)
    if known and adapter.layers:  # blocks and the model itself have none and would hide the layer that ran last
        adapter.context.last_layer = adapter.name
    call = functools.partial(adapter, module, inside) if known else inside
    with torch.autocast(device, enabled=False) if autocast and dtype is not None else nullcontext():
        cuts_sequences = adapter.context.own_tokens is not None and known and adapter.layers
        if cuts_sequences and (own := sequence_tensors_in((args, kwargs))):
            return _run_on_own_tokens(adapter, module, call, own, args, kwargs)
        return to_shown(call(*args, **kwargs))


def _run_on_own_tokens(
    adapter: Adapter,
    module: nn.Module,
    call: Callable[..., Any],
    own: Sequence[SequenceTensor],
    args: tuple,
    kwargs: dict,
) -> Any:
    """Run an adapter on the tokens that this member of a context group holds."""
    if adapter.takes_sequences:
        return call(*args, **kwargs)
    if not adapter.treats_tokens_alike or len(args) + len(kwargs) > 1:
        raise refusal(f"{adapter.name} ({type(module).__name__})", own[0], "it may mix tokens")
    return by_token(lambda tensor: to_shown(call(tensor)), own[0])


def _cast(context: ModelContext, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor once for all layers that read it in turn: they recognise their shared input by identity."""
    if not a.is_floating_point() or a.dtype == dtype:
        return a
    key = dtype, state_of(a)
    if context.last_cast is None or context.last_cast[0] is not a or context.last_cast[1] != key:
        context.last_cast = a, key, a.to(dtype)
    return context.last_cast[2]


def _getattr(plain: type[nn.Module]) -> Any:
    """Return a `__getattr__` that lends a parameter to code that reads it in a pass."""
    own = plain.__getattr__

    @functools.wraps(own)
    def getattribute(self: nn.Module, name: str) -> Any:
        adapters = adapters_of(self)
        lent = lend_parameter(self, name, adapters[-1].context, adapters[-1].name) if adapters else None
        return own(self, name) if lent is None else lent

    return getattribute


def _apply(plain: type[nn.Module]) -> Any:
    """Return an `_apply`, which `to(...)`, `half()` and their like call, for shards; forward may call it as well."""
    own = plain._apply

    @functools.wraps(own)
    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return apply_where_it_changes(own, self, fn, recurse)

    return apply


class CopyOnly:
    """Makes a module for `copy.deepcopy`, and cannot be pickled, which the module's class could not be either."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)

    def __reduce__(self) -> NoReturn:
        raise shards_alone_error()


def _reduce(plain: type[nn.Module]) -> Any:
    """Return a `__reduce_ex__` with which a module can be copied and not pickled."""
    own = plain.__reduce_ex__

    @functools.wraps(own)
    def reduce(self: nn.Module, protocol: Any) -> Any:
        made = own(self, protocol)
        return made if isinstance(made, str) else (CopyOnly(made[0]), *made[1:])

    return reduce


def _generate(plain: type[nn.Module]) -> Any:
    """Return a `generate` that gives each place its own rows of the prompts, or all rows to a loop of the module's own.

    A loop of one's own, such as peft's, may call transformers' `generate` of a module inside, which then cuts the rows.
    """
    own = plain.generate  # type: ignore[attr-defined]
    by_place = runs_until_all_are_done(own, plain)

    @functools.wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = adapters_of(self)[0].context
        if context.generating:  # called by `generate` of a module around this one
            return own(self, *args, **kwargs)
        if not by_place:
            return generate_alike(own, self, context.grid, *args, **kwargs)
        context.generating = True
        try:
            return generate_by_place(own, self, context.grid, *args, **kwargs)
        finally:
            context.generating = False

    return generate


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
            pattern = styles.pattern_of(name) or "(the model)"
            layout, travels = adapter.describe()
            rows[pattern, type(module).__name__, layout, travels, adapter.why] = None  # in order, each once
    if context is None:
        raise ValueError(f"{type(model).__name__} is not parallelised; call ff.parallelize(model, grid) first")
    table = [("module", "kind", "layout", "communicates", "why"), *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = [f"{type(model).__name__} on {context.grid}, {context.policy.activations} activations"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]
    lines.append("batch in one part (halves=1): a module's own code runs it as one")
    if (members := context.grid.shape.context) > 1:
        lines.append(
            f"sequences cut over context={members} where ids are looked up: each place computes its own tokens, and "
            "causal attention reads the others'"
        )
    if context.local_losses:
        lines.append(
            "torch's losses inside the model are each place's own: they are called once per row, or by some places"
        )
    if context.unchecked:
        lines.append(f"whether rows depend on each other could not be checked: {context.unchecked}")
    if context.left_out_hooks:
        lines.append("forward hooks take no part in the check of rows: it does not see one that mixes rows")
    if context.made_whole:
        lines += ["", "Made whole in the last pass (the operation is right, and slower than on parts):"]
        lines += [f"  {count} x {operation} {place}" for (place, operation), count in context.made_whole.most_common()]
    return "\n".join(lines)

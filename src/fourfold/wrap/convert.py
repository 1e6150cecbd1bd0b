"""Turns plain modules into modules on the grid, in place: another class, and shards in place of parameters.

A module's class becomes a subclass of the same name, and adapters run its forward; identity, hooks, children and
names stay. Its parameters become shards of the plain module's values, or of values that the model's own
initialisation draws.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fourfold import comm
from fourfold.grid import Grid
from fourfold.layout import Spec
from fourfold.nn.layer import SPECS, Layer, reserve
from fourfold.nn.rng import key_of
from fourfold.params import shard_parameter
from fourfold.product import MEMORY
from fourfold.torch_hooks import REPLACED
from fourfold.wrap.adapters import Adapter, ExpandAdapter, GatheredAdapter
from fourfold.wrap.context import ModelContext
from fourfold.wrap.grid_tensor import GridTensor, refuse_in_autograd_function
from fourfold.wrap.integrations import generate_on_grid, require_autocast_precision
from fourfold.wrap.param_access import cut_buffer, lend_parameter, translate_buffers, translate_state
from fourfold.wrap.shared_input import state_of

ADAPTERS = "_fourfold_adapters"
"""The attribute of a converted module with its adapters, outermost first."""

PARENTS = (
    *(nn.Linear, nn.Embedding),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.GroupNorm, nn.SyncBatchNorm, nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm),
)
"""Classes of torch with a forward that a subclass may call from its own."""


# classes


def adapters_of(module: nn.Module) -> list[Adapter]:
    """Return the adapters of a module, outermost first; none if it is not on the grid."""
    return vars(module).get(ADAPTERS, [])


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
    names["_apply"] = _apply(plain)
    for parent in PARENTS:
        if calls_parent_forward(plain, parent):
            between = type(parent.__name__, (parent,), {"forward": _forward(parent)})
            return type(plain.__name__, (plain, between), names)
    methods = {"forward": _forward(plain)}
    if callable(getattr(plain, "generate", None)):
        methods["generate"] = _generate(plain)
    return type(plain.__name__, (plain,), names | methods)


def calls_parent_forward(plain: type[nn.Module], parent: type[nn.Module]) -> bool:
    """Return whether a subclass has a forward of its own that calls its parent's through super()."""
    own = plain.forward
    if not issubclass(plain, parent) or own is parent.forward:
        return False
    code = getattr(own, "__code__", None)
    return code is not None and "__class__" in code.co_freevars and "forward" in code.co_names


def uses_forward_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module's forward is, or calls, the forward of one of these classes, on their parameters alone.

    A module that uses its weight in a way of its own must not be taken for a layer.
    """
    if adapters_of(module):
        return isinstance(module, kinds)
    plain = type(module)
    if not module._parameters.keys() <= {"weight", "bias"} or any(module.children()):
        return False
    return any(
        issubclass(plain, kind) and (plain.forward is kind.forward or calls_parent_forward(plain, kind))
        for kind in kinds
    )


def _forward(plain: type[nn.Module]) -> Any:
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

    Autocast is turned off meanwhile: its casts in forward would have no counterpart in the adapters' backward.
    """
    device = adapter.context.grid.device.type
    autocast = torch.is_autocast_enabled(device)
    if autocast:
        require_autocast_precision(adapter.context, torch.get_autocast_dtype(device))
    dtype = adapter.input_dtype(autocast=autocast)
    if dtype is not None:
        args, kwargs = tree_map_only(Tensor, functools.partial(_cast, adapter.context, dtype=dtype), (args, kwargs))
    known = adapter.holds(module) and adapter.accepts(args, kwargs)
    call = functools.partial(adapter, module, inside) if known else inside
    with torch.autocast(device, enabled=False) if autocast and dtype is not None else nullcontext():
        out = call(*args, **kwargs)
    return out.whole() if isinstance(out, GridTensor) and not adapter.context.is_cut else out


def _cast(context: ModelContext, a: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor once for all layers that read it in turn: they recognise their shared input by identity."""
    if not a.is_floating_point() or a.dtype == dtype:
        return a
    key = dtype, state_of(a)
    if context.last_cast is None or context.last_cast[0] is not a or context.last_cast[1] != key:
        context.last_cast = a, key, a.to(dtype)
    return context.last_cast[2]


def _getattr(plain: type[nn.Module]) -> Any:
    own = plain.__getattr__

    @functools.wraps(own)
    def getattribute(self: nn.Module, name: str) -> Any:
        adapters = adapters_of(self)
        lent = lend_parameter(self, name, adapters[-1].context, adapters[-1].name) if adapters else None
        return own(self, name) if lent is None else lent

    return getattribute


def _apply(plain: type[nn.Module]) -> Any:
    own = plain._apply

    @functools.wraps(own)
    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Run `to(...)`. Inside forward, where a graph holds the parameters, skip a call that changes nothing."""
        first = next((parameter for parameter in self._parameters.values() if parameter is not None), None)
        if adapters_of(self)[0].context.depth and first is not None:
            tried = torch.empty(0, dtype=first.dtype, device=first.device)
            if (made := fn(tried)).dtype == tried.dtype and made.device == tried.device:
                return self
        return own(self, fn, recurse)

    return apply


def _generate(plain: type[nn.Module]) -> Any:
    own = plain.generate  # type: ignore[attr-defined]

    @functools.wraps(own)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        context = adapters_of(self)[0].context
        if context.generating:  # called by `generate` of a module around this one
            return own(self, *args, **kwargs)
        context.generating = True
        try:
            return generate_on_grid(own, self, context.grid, *args, **kwargs)
        finally:
            context.generating = False

    return generate


# parameters

ReservedMemory = tuple[Tensor, Tensor | None]
"""The memory of one shard, and, for the first of several shards that lie side by side, the memory of all of them."""


class ParameterSharder:
    """Replaces the parameters and buffers of modules by shards; a shared parameter becomes one shared shard."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Adapter], values: InitialValues, grid: Grid) -> None:
        self.model, self.adapters, self.values, self.grid = model, adapters, values, grid
        self._sharded: dict[nn.Parameter, tuple[nn.Parameter, Spec, str]] = {}
        """The shard, its spec and its name, by the plain parameter."""

    def shard(self) -> None:
        """Shard everything."""
        memory = self._reserve_side_by_side()
        # layers first, so that a module that runs its own code does not claim a parameter that a layer holds
        for name in sorted(self.adapters, key=lambda name: isinstance(self.adapters[name], GatheredAdapter)):
            self._shard_parameters(name, self.model.get_submodule(name), self.adapters[name], memory)
        made: dict[tuple[int, Spec | None], Tensor] = {}
        plain: list[Tensor] = []  # kept alive, so that no other tensor gets the same `id`
        for name, module in self.model.named_modules():
            specs = self.adapters[name].buffers() if name in self.adapters else {}
            for own, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, DTensor):
                    key = id(buffer), specs.get(own)
                    if key not in made:  # a buffer that modules share stays shared
                        plain.append(buffer)
                        whole = self.values.of(name, own, buffer)
                        made[key] = cut_buffer(whole, specs[own], self.grid) if own in specs else whole
                    module._buffers[own] = made[key]
            translate_buffers(module, specs, self.grid)

    def _shard_parameters(
        self, name: str, module: nn.Module, adapter: Adapter, memory: Mapping[tuple[Layer, str], ReservedMemory]
    ) -> None:
        plain = dict(module._parameters)
        made: dict[str, nn.Parameter | None] = {own: None for own, parameter in plain.items() if parameter is None}
        specs: dict[str, Spec] = {}
        parameters = dict(adapter.parameters())
        for own, (layer, inside, part) in parameters.items():
            original, full = plain[part.original], f"{name}.{own}".lstrip(".")
            if original is None:
                raise ValueError(f"{full} is None")
            if original in self._sharded and part.rows is None:
                made[own], specs[own] = self._share(original, layer, inside, full, adapter)
            else:
                whole = part.of(self.values.of(name, part.original, original))
                specs[own] = layer.specs[inside]
                made[own] = parameter = _cut(whole, specs[own], self.grid, memory.get((layer, inside)))
                parameter.requires_grad_(original.requires_grad)
                self._sharded[original] = parameter, specs[own], full
            layer._parameters[inside] = made[own]
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                setattr(parameter, REPLACED, True)  # an optimizer that still holds the plain parameter is refused
        module._parameters.clear()
        module._parameters.update(made)
        vars(module)[SPECS] = specs
        translate_state(module, {own: part for own, (_, _, part) in parameters.items()}, self.grid)
        for layer in adapter.layers:
            layer.label = name

    def _share(
        self, original: nn.Parameter, layer: Layer, inside: str, name: str, adapter: Adapter
    ) -> tuple[nn.Parameter, Spec]:
        """Return the shard of a parameter that another module has as well."""
        parameter, spec, other = self._sharded[original]
        own = layer.specs[inside]
        if (own.storage, own.use, own.shape) != (spec.storage, spec.use, spec.shape):
            if not isinstance(adapter, GatheredAdapter):
                raise ValueError(
                    f"{name} and {other} share a parameter of shape {spec.shape} but use it in ways that cut it "
                    "differently; give both modules WholeTensors() in the plan, or untie them"
                )
            del layer.specs[inside]  # a parameter of another layer is not gathered here; the code is lent it
        return parameter, spec

    def _reserve_side_by_side(self) -> dict[tuple[Layer, str], ReservedMemory]:
        """Reserve contiguous memory for weights that are read together, so that one GEMM can read them all."""
        found: dict[tuple[Layer, str], ReservedMemory] = {}
        for name, adapter in self.adapters.items():
            if not isinstance(adapter, ExpandAdapter) or adapter.shared_input.readers[0] is not adapter:
                continue
            layers = [layer for reader in adapter.shared_input.readers for layer in reader.layers]
            if len(layers) == 1:
                continue
            dtype = self.model.get_submodule(name)._parameters[adapter.form.weight].dtype  # type: ignore[union-attr]
            specs = {str(index): layer.specs["weight"] for index, layer in enumerate(layers)}
            whole, parts = reserve(list(specs), specs, self.grid, dtype, self.grid.device)  # type: ignore[arg-type]
            for index, layer in enumerate(layers):
                found[layer, "weight"] = parts[str(index)], whole if index == 0 else None
        return found


def _cut(whole: Tensor, spec: Spec, grid: Grid, memory: ReservedMemory | None) -> nn.Parameter:
    """Return this rank's shard of a parameter."""
    part = spec.storage.take(whole, grid)
    own, joint = (torch.empty_like(part, memory_format=torch.contiguous_format), None) if memory is None else memory
    parameter = shard_parameter(own.copy_(part), spec, grid)
    if joint is not None:
        setattr(parameter, MEMORY, joint)
    return parameter


class InitialValues:
    """The whole tensors of a plain model, one at a time.

    Where the model has numbers, rank 0's are used, so that ranks that drew different numbers still agree. On the meta
    device the model's own code draws them, block by block, from a generator that depends only on the seed and on the
    block's name.
    """

    def __init__(self, model: nn.Module, grid: Grid, seed: int, blocks: Iterable[str]) -> None:
        self.grid, self.seed = grid, seed
        self.blocks = [name for name in blocks if any(p.is_meta for p in model.get_submodule(name).parameters())]
        tensors = (*model.parameters(), *model.buffers())
        self.plain = _copy_without_memory(model) if any(tensor.is_meta for tensor in tensors) else model
        """The plain model. A copy is needed where values are drawn, because shards replace the model's tensors."""
        self._drawn: tuple[str, nn.Module, dict[int, int]] | None = None
        """The last block: its name, a copy with values, and the versions of its tensors before it had any, by `id`."""

    def of(self, module: str, name: str, parameter: Tensor) -> Tensor:
        """Return the values of a tensor of that module, on the grid's device."""
        if self.grid.device.type == "meta":
            return parameter.detach().to("meta")
        if not parameter.is_meta:
            return comm.from_first(parameter.detach().to(self.grid.device), self.grid)
        block = next((block for block in self.blocks if module == block or module.startswith(f"{block}.")), module)
        if self._drawn is None or self._drawn[0] != block:
            self._drawn = block, *self._draw(block)
        _, drawn, versions = self._drawn
        inside = drawn.get_submodule(module[len(block) :].lstrip("."))
        found = {**inside._parameters, **inside._buffers}[name]
        if found is None or versions.get(id(found), -1) == found._version:
            raise ValueError(
                f"{f'{module}.{name}'.lstrip('.')} is on the meta device and nothing draws its values; give "
                f"{type(inside).__name__} a reset_parameters() that does, or build the model on a real device"
            )
        return found.detach().to(self.grid.device)

    def _draw(self, name: str) -> tuple[nn.Module, dict[int, int]]:
        """Return a copy of the module with initial values on the CPU, and its tensors' versions before the draw.

        In a block all modules are drawn, otherwise only the module's own tensors.
        """
        drawn = copy.deepcopy(self.plain.get_submodule(name)).to_empty(device="cpu", recurse=name in self.blocks)
        versions = {id(tensor): tensor._version for module in drawn.modules() for tensor in _own_tensors(module)}
        init_weights = getattr(self.plain, "_init_weights", None)  # Hugging Face's initialisation of one module
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(key_of(self.seed, name))
            for module in drawn.modules() if name in self.blocks else (drawn,):
                resets = (getattr(module, word, None) for word in ("reset_parameters", "_reset_parameters"))
                if init_weights is not None:
                    init_weights(module)
                elif reset := next((reset for reset in resets if callable(reset)), None):
                    reset()
        return drawn, versions


def _copy_without_memory(model: nn.Module) -> nn.Module:
    """Copy a model without copying numbers: tensors that are not on the meta device are shared."""
    tensors = (*model.parameters(), *model.buffers())
    shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors if not tensor.is_meta}
    for module in model.modules():
        if adapters_of(module):  # already on the grid
            own = (value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules"))
            shared |= {id(value): value for value in own}
    return copy.deepcopy(model, shared)


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)

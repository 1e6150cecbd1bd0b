"""Parameters of a wrapped model: how shards are made of them, and how other code sees them.

The parameters of plain modules become shards of the plain values, or of values that the model's own initialisation
draws. Other code sees them in `state_dict`, in `whole_tensors`, and inside forward. There names and shapes are those of
the plain module. A weight that holds several layers is stored as its parts, and a weight [in, out] as [out, in].
`state_dict` joins and transposes them, and `load_state_dict` takes whole tensors or shards under the plain names.
Joining a weight communicates, so all ranks call `state_dict`.

Code may also read a parameter beside its layer: `self.a.weight` in another module's forward. The attribute then gives a
grid tensor with shape, dtype and device, which is gathered when somebody computes with it. Its gradient, which all
ranks of a place find alike, goes back to the shards.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Size, Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold import comm
from fourfold.axes import PIPE
from fourfold.engine import in_backward
from fourfold.grid import Grid
from fourfold.layout import EXPAND_WEIGHT, REPEATED, Layout, Spec
from fourfold.nn.layer import PLAIN_SLICES, SPECS, Layer, ShardMemory, reserve
from fourfold.nn.rng import key_of
from fourfold.params import PartOf, local_of, shard_parameter, whole_over_pipe
from fourfold.torch_hooks import REPLACED
from fourfold.wrap.adapters import Adapter, GatheredAdapter, PlainSlice, ReadWhole, adapters_of, lost_change_error
from fourfold.wrap.grid_tensor import GridTensor, ModelContext, TensorPlacement, version_of
from fourfold.wrap.linear_adapters import ExpandAdapter

JOINED = Layout.along(0, EXPAND_WEIGHT.axes)
"""The layout of a joined weight in a state dict: cut over as many axes as a weight, so that no rank holds it whole."""


def stored_names(slices: Mapping[str, PlainSlice]) -> dict[str, list[str]]:
    """Return the names of the stored parameters for each plain parameter, in order."""
    found: dict[str, list[str]] = {}
    for own, part in slices.items():
        found.setdefault(part.original, []).append(own)
    return found


def join_slices(tensors: Iterable[Tensor], part: PlainSlice) -> Tensor:
    """Return the plain tensor that is stored as these parts; `part` describes any of them."""
    parts = list(tensors)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim=part.dim)
    return whole.t().contiguous() if part.transposed else whole


# from plain parameters to shards

MemoryByWeight = dict[nn.Parameter | tuple[Layer, str], ShardMemory]
"""Memory that was reserved for a weight, given by its layer and name, or for whoever shards a plain parameter."""


class ParameterSharder:
    """Replaces the parameters and buffers of modules by shards; a shared parameter becomes one shared shard."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Adapter], values: InitialValues, grid: Grid) -> None:
        self.model, self.adapters, self.values, self.grid = model, adapters, values, grid
        self._sharded: dict[nn.Parameter, tuple[nn.Parameter, Spec, str]] = {}
        """The shard, its spec and its name, by the plain parameter."""

    def shard(self) -> None:
        """Shard all parameters and buffers."""
        memory = self._reserve_for_products()
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
            if specs:
                module.register_load_state_dict_pre_hook(partial(_buffers_from_plain, specs, self.grid))

    def _shard_parameters(self, name: str, module: nn.Module, adapter: Adapter, memory: MemoryByWeight) -> None:
        plain = dict(module._parameters)
        made: dict[str, nn.Parameter | None] = {own: None for own, parameter in plain.items() if parameter is None}
        specs: dict[str, Spec] = {}
        parameters = dict(adapter.parameters())
        for own, (layer, inside, part) in parameters.items():
            original, full = plain[part.original], f"{name}.{own}".lstrip(".")
            if original is None:
                raise ValueError(f"{full} is None, but the module's style needs it; give the module WholeTensors()")
            if original in self._sharded and part.rows is None:
                made[own], specs[own] = self._share(original, layer, inside, full, adapter)
            else:
                whole = part.of(self.values.of(name, part.original, original))
                specs[own] = layer.specs[inside]
                reserved = memory.get((layer, inside)) or memory.get(original)
                made[own] = parameter = _cut(whole, specs[own], self.grid, reserved)
                parameter.requires_grad_(original.requires_grad)
                if part.rows is not None:
                    weight = f"{name}.{part.original}".lstrip(".")
                    parameter.part_of = PartOf(weight, part.dim, full)  # type: ignore[attr-defined]
                self._sharded[original] = parameter, specs[own], full
            layer._parameters[inside] = made[own]
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                setattr(parameter, REPLACED, True)  # an optimizer that still holds the plain parameter is refused
        module._parameters.clear()
        module._parameters.update(made)
        vars(module)[SPECS] = specs
        vars(module)[PLAIN_SLICES] = slices = {own: part for own, (_, _, part) in parameters.items()}
        if not all(part.is_all for part in slices.values()):
            module.register_state_dict_post_hook(partial(_to_plain, slices, self.grid))
        module.register_load_state_dict_pre_hook(partial(_from_plain, slices, self.grid))
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

    def _reserve_for_products(self) -> MemoryByWeight:
        """Reserve memory so that a product needs no copy of its weights.

        Weights that are read together lie side by side. A head's table has its padding behind it; an embedding may
        hold the same table and be sharded first.
        """
        found: MemoryByWeight = {}
        for name, adapter in self.adapters.items():
            if not isinstance(adapter, ExpandAdapter) or adapter.shared_input.readers[0] is not adapter:
                continue
            layers = [layer for reader in adapter.shared_input.readers for layer in reader.layers]
            plain = self.model.get_submodule(name)._parameters[adapter.form.weight]
            specs = {str(index): layer.specs["weight"] for index, layer in enumerate(layers)}
            place = self.grid, plain.dtype, self.grid.device  # type: ignore[union-attr]
            if len(layers) > 1:
                parts = reserve(list(specs), specs, *place)  # type: ignore[arg-type]
                found |= {(layer, "weight"): parts[str(index)] for index, layer in enumerate(layers)}
            elif padding := sum(layers[0].padding_of(plain.dtype).values()):  # type: ignore[union-attr]
                found[plain] = reserve(["0"], specs, *place, padding=padding)["0"]  # type: ignore[arg-type,index]
        return found


def _cut(whole: Tensor, spec: Spec, grid: Grid, memory: ShardMemory | None) -> nn.Parameter:
    """Return this rank's shard of a parameter."""
    part = spec.storage.take(whole, grid)
    # a copy, because a view would keep the whole tensor alive
    if memory is None or memory.shard.shape != part.shape:  # a module may use a head's table in another way
        memory = ShardMemory(torch.empty_like(part, memory_format=torch.contiguous_format))
    memory.shard.copy_(part)
    return memory.parameter(spec, grid)


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
        if self.grid.device.type == "meta":  # a dry run needs shapes alone
            return parameter.detach().to("meta")
        if parameter.layout != torch.strided:
            raise ValueError(
                f"{f'{module}.{name}'.lstrip('.')} is a sparse tensor ({parameter.layout}), and a grid shares, "
                "shards and saves dense ones alone; make it dense with to_dense(), or keep a buffer as a plain "
                "attribute (self.name = tensor, equal on all ranks), which is left as it is"
            )
        if not parameter.is_meta:
            return comm.from_first(parameter.detach().to(self.grid.device), self.grid)
        block = next((block for block in self.blocks if module == block or module.startswith(f"{block}.")), module)
        if self._drawn is None or self._drawn[0] != block:
            self._drawn = block, *self._draw(block)
        _, drawn, versions = self._drawn
        inside = drawn.get_submodule(module[len(block) :].lstrip("."))
        found = {**inside._parameters, **inside._buffers}[name]
        # torch counts changes in place, so an unchanged version shows that nothing was drawn
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
        versions = {id(tensor): tensor._version for tensor in (*drawn.parameters(), *drawn.buffers())}
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


# state dicts


def _to_plain(
    slices: dict[str, PlainSlice], grid: Grid, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
) -> None:
    """Replace stored parts in a state dict by the plain weights."""
    specs = vars(module)[SPECS]
    for original, names in stored_names(slices).items():
        if slices[names[0]].is_all:
            continue
        parts = [state.pop(prefix + own) for own in names]
        wholes = [
            comm.join(local_of(part.detach()), specs[own].storage, specs[own].shape, grid, counted=False)
            for own, part in zip(names, parts, strict=True)
        ]
        whole = join_slices(wholes, slices[names[0]])
        state[prefix + original] = cut_buffer(whole, Spec(tuple(whole.shape), JOINED, REPEATED), grid)


def _from_plain(
    slices: dict[str, PlainSlice],
    grid: Grid,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: Any,
) -> None:
    """Replace plain weights in a state dict by this rank's shards of the stored parts."""
    if metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            f"load_state_dict(assign=True) would replace the shards that a parallelised {type(module).__name__} "
            "computes with; leave assign out, so that values are copied into them"
        )
    specs = vars(module)[SPECS]
    for original, names in stored_names(slices).items():
        given = state.pop(prefix + original, None)
        if given is None:
            continue
        if slices[names[0]].is_all and tuple(given.shape) == specs[original].shape:
            state[prefix + original] = _to_load(given, specs[original], grid)
            continue
        whole = join_shards(given, grid) if isinstance(given, DTensor) else given
        for own in names:
            part, spec = slices[own].of(whole), specs[own]
            if tuple(part.shape) != spec.shape:
                state[prefix + original] = whole  # torch's error names the shapes that differ
                break
            state[prefix + own] = ShardToLoad(_copy_of_shard(part, spec, grid), spec)


def _buffers_from_plain(
    specs: Mapping[str, Spec], grid: Grid, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any
) -> None:
    """Replace plain buffers in a state dict by this rank's shards."""
    for own, spec in specs.items():
        given = state.get(prefix + own)
        if given is not None and tuple(given.shape) == spec.shape:  # otherwise torch's error names what is wrong
            state[prefix + own] = _to_load(given, spec, grid)


def _to_load(given: Tensor, spec: Spec, grid: Grid) -> ShardToLoad:
    """Return this rank's shard of a tensor in a state dict, which is whole or cut in any way."""
    if isinstance(given, DTensor):
        if given.device_mesh == grid.mesh and list(given.placements) == spec.storage.placements():
            return ShardToLoad(local_of(given), spec)
        given = join_shards(given, grid)
    return ShardToLoad(_copy_of_shard(given, spec, grid), spec)


class ShardToLoad(Tensor):
    """A shard that `load_state_dict` is about to copy into a DTensor.

    The copy goes from shard to shard. From two DTensors torch would derive how to cut the copy, which takes seconds for
    each shape of a weight with four dims.
    """

    shard: Tensor

    @staticmethod
    def __new__(cls, shard: Tensor, spec: Spec) -> ShardToLoad:
        new = Tensor._make_wrapper_subclass(cls, torch.Size(spec.shape), dtype=shard.dtype, device=shard.device)
        new.shard = shard
        return new

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            local_of(args[0]).copy_(args[1].shard)
            return args[0]
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(f"{func} was called on a shard that load_state_dict is loading; it can only be copied")


def cut_buffer(whole: Tensor, spec: Spec, grid: Grid) -> Tensor:
    """Return this rank's part as a DTensor of the global shape."""
    return shard_parameter(_copy_of_shard(whole, spec, grid), spec, grid).detach()


def _copy_of_shard(whole: Tensor, spec: Spec, grid: Grid) -> Tensor:
    return spec.storage.take(whole, grid).clone()  # a view would keep the whole tensor alive


# whole tensors


def join_shards(given: DTensor, grid: Grid) -> Tensor:
    """Gather a tensor of a state dict, on this grid's mesh or on another; the ledger does not count it."""
    if given.device_mesh not in (grid.mesh, grid.fold_mesh):
        return given.full_tensor()
    return comm.join(local_of(given.detach()), Layout.of(given), given.shape, grid, counted=False)


def whole_tensors(model: nn.Module, kind: str = "parameter") -> dict[str, Tensor]:
    """Return whole tensors under the names of the plain model's `state_dict`.

    `kind` is "parameter", "gradient" (0 for a parameter without one), or "state" for parameters and buffers. All ranks
    call it. It serves for saving, comparing and inspecting models that fit on one device.
    """
    if kind not in ("parameter", "gradient", "state"):
        raise ValueError(f"kind={kind!r}: use 'parameter', 'gradient' or 'state'")
    if kind == "state":
        state = model.state_dict()
        grids = [Grid.of(value) for value in state.values() if isinstance(value, DTensor)]
        if grids and grids[0].size(PIPE) > 1:
            shards = {name: _shard(value) for name, value in state.items() if isinstance(value, Tensor)}
            others = {name: value for name, value in state.items() if name not in shards}
            return dict(whole_over_pipe(shards, grids[0])) | others
        return {
            name: join_shards(value, Grid.of(value)) if isinstance(value, DTensor) else value
            for name, value in state.items()
        }
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for original in stored_names(vars(module).get(PLAIN_SLICES, {})):
            found[f"{prefix}.{original}".lstrip(".")] = plain_parameter(module, original, gradient=kind == "gradient")
    return found


def _shard(value: Tensor) -> tuple[Tensor, Layout, Size]:
    """Return this rank's shard of a tensor in a state dict, the layout that cut it, and the global shape."""
    if isinstance(value, DTensor):
        return local_of(value.detach()), Layout.of(value), value.shape
    return value, Layout(), value.shape


def plain_parameter(module: nn.Module, original: str, *, gradient: bool = False) -> Tensor:
    """Gather a parameter, or its gradient, as the plain module has it; the ledger does not count it."""
    slices, specs = vars(module)[PLAIN_SLICES], vars(module)[SPECS]
    names, wholes = stored_names(slices)[original], []
    for own in names:
        parameter: Any = module._parameters[own]
        local = local_of(parameter.detach())
        if gradient:
            local = torch.zeros_like(local) if parameter.grad is None else local_of(parameter.grad)
        spec, grid = specs[own], Grid.of(parameter)
        wholes.append(comm.join(local.contiguous(), spec.storage, spec.shape, grid, counted=False))
    return join_slices(wholes, slices[names[0]])


# parameters that code reads beside their layer


@dataclass(frozen=True, eq=False)
class ParameterPlacement(TensorPlacement):
    """A parameter of the plain module as it is stored: one shard, or one shard for each layer that the weight holds."""

    name: str
    parts: tuple[tuple[nn.Parameter, Spec], ...]
    part: PlainSlice
    """Describes any of the parts."""

    @property
    def layout(self) -> Layout:
        """No cuts: whoever computes with the parameter gets it whole."""
        return Layout()

    def whole(self, local: Tensor, shape: Size) -> Tensor:  # noqa: ARG002
        """Gather the parameter, once per pass."""
        lent, key = self.context.lent_params, (self.name, torch.is_grad_enabled())
        if not self.context.in_pass:  # recomputed in backward, outside any pass
            return self._gather()
        if key not in lent:
            whole = self._gather()
            lent[key] = whole, version_of(whole)
        return lent[key][0]

    def _gather(self) -> Tensor:
        wholes = [ReadWhole.apply(self.context, self.name, spec, parameter) for parameter, spec in self.parts]
        return join_slices(wholes, self.part)

    def write(self, tensor: GridTensor, whole: Tensor) -> NoReturn:  # noqa: ARG002
        raise lost_change_error(self.name)


def lend_parameter(module: nn.Module, name: str, context: ModelContext, owner: str) -> GridTensor | None:
    """Return a parameter of the module `owner` for code that runs in a pass; None if it cannot be lent."""
    slices: Mapping[str, PlainSlice] = vars(module).get(PLAIN_SLICES, {})
    own = [stored for stored, part in slices.items() if part.original == name]
    if not own or not (context.in_pass or in_backward()):
        return None
    parameters, specs = vars(module)["_parameters"], vars(module)[SPECS]
    parts = tuple((parameters[stored], specs[stored]) for stored in own)
    if not all(isinstance(parameter, DTensor) for parameter, _ in parts):
        return None  # it is gathered: the module is running its own code
    first, part = parts[0][0], slices[own[0]]
    shape = list(first.shape)
    if shape:  # without dims it is one part
        shape[part.dim] = sum(parameter.shape[part.dim] for parameter, _ in parts)
    # stands for the values, which are not gathered unless somebody computes with them
    empty = torch.empty(
        0,
        dtype=context.policy.compute_dtype or first.dtype,
        device=local_of(first).device,
        requires_grad=first.requires_grad,
    )
    placement = ParameterPlacement(context, f"{owner}.{name}".lstrip("."), parts, part)
    return GridTensor(empty, placement, Size(shape[::-1] if part.transposed else shape))


def require_unchanged_parameters(context: ModelContext) -> None:
    """Refuse, at the end of a pass, a change of a parameter that was lent."""
    for (name, _), (whole, version) in context.lent_params.items():
        if version_of(whole) != version:
            raise lost_change_error(name)

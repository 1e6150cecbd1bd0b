"""Parameters of a wrapped model as other code sees them: in `state_dict`, in `whole_tensors`, and inside forward.

Names and shapes are those of the plain module. A weight that holds several layers is stored as its parts, and a weight
[in, out] as [out, in]. `state_dict` joins and transposes them, and `load_state_dict` takes whole tensors or shards
under the plain names. Joining a weight communicates, so all ranks call `state_dict`.

Code may also read a parameter beside its layer: `self.a.weight` in another module's forward. The attribute then gives a
grid tensor with shape, dtype and device, which is gathered when somebody computes with it. Its gradient, which all
ranks of a place find alike, goes back to the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Size, Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold import comm
from fourfold.engine import in_backward
from fourfold.grid import Grid
from fourfold.layout import EXPAND_WEIGHT, REPEATED, Layout, Spec
from fourfold.nn.layer import SPECS
from fourfold.operators import once_differentiable
from fourfold.params import local_of, shard_parameter
from fourfold.wrap.adapters import PlainSlice, lost_change_error
from fourfold.wrap.context import ModelContext
from fourfold.wrap.grid_tensor import GridTensor, TensorPlacement, version_of

PLAIN_SLICES = "_fourfold_plain_slices"
"""The attribute of a wrapped module with the `PlainSlice` of each of its parameters."""
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
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.t().contiguous() if part.transposed else whole


# state dicts


def translate_state(module: nn.Module, slices: dict[str, PlainSlice], grid: Grid) -> None:
    """Make `state_dict` give plain names, and `load_state_dict` take them."""
    vars(module)[PLAIN_SLICES] = slices
    if not all(part.is_all for part in slices.values()):
        module.register_state_dict_post_hook(partial(_to_plain, slices, grid))
    module.register_load_state_dict_pre_hook(partial(_from_plain, slices, grid))


def _to_plain(
    slices: dict[str, PlainSlice], grid: Grid, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
) -> None:
    """Replace stored parts in a state dict by the plain weights."""
    specs = vars(module)[SPECS]
    for original, names in stored_names(slices).items():
        if slices[names[0]].is_all:
            continue
        parts = [state.pop(prefix + own) for own in names]
        wholes = [whole_of(part, specs[own], grid) for own, part in zip(names, parts, strict=True)]
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
        if names == [original] and not slices[original].transposed and _is_cut_like(given, specs[original], grid):
            state[prefix + original] = ShardToLoad(local_of(given), specs[original])
            continue
        whole = join_shards(given, grid) if isinstance(given, DTensor) else given
        for own in names:
            part, spec = slices[own].of(whole), specs[own]
            if tuple(part.shape) != spec.shape:
                state[prefix + original] = whole  # torch's error names the shapes that differ
                break
            state[prefix + own] = ShardToLoad(_copy_of_shard(part, spec, grid), spec)


def translate_buffers(module: nn.Module, specs: Mapping[str, Spec], grid: Grid) -> None:
    """Make `load_state_dict` take whole tensors, or shards, for buffers that are cut."""
    if specs:
        module.register_load_state_dict_pre_hook(partial(_buffers_from_plain, specs, grid))


def _buffers_from_plain(
    specs: Mapping[str, Spec], grid: Grid, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any
) -> None:
    for own, spec in specs.items():
        given = state.get(prefix + own)
        if given is None or tuple(given.shape) != spec.shape:
            continue  # torch's error names what is missing and the shapes that differ
        if _is_cut_like(given, spec, grid):
            state[prefix + own] = ShardToLoad(local_of(given), spec)
        else:
            whole = join_shards(given, grid) if isinstance(given, DTensor) else given
            state[prefix + own] = ShardToLoad(_copy_of_shard(whole, spec, grid), spec)


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


def _is_cut_like(given: Tensor, spec: Spec, grid: Grid) -> bool:
    """Return whether a tensor is already cut as it will be stored."""
    if not isinstance(given, DTensor) or given.device_mesh != grid.mesh or tuple(given.shape) != spec.shape:
        return False
    return list(given.placements) == spec.storage.placements()


# whole tensors


def join_shards(given: DTensor, grid: Grid) -> Tensor:
    """Gather a tensor of a state dict, on this grid's mesh or on another; the ledger does not count it."""
    if given.device_mesh != grid.mesh:
        return given.full_tensor()
    layout = Layout.of(given.placements)
    return comm.join(local_of(given.detach()), layout, given.shape, grid, counted=False)


def whole_of(parameter: Tensor, spec: Spec, grid: Grid) -> Tensor:
    """Gather a parameter for a state dict; the ledger does not count it."""
    return comm.join(local_of(parameter.detach()), spec.storage, spec.shape, grid, counted=False)


def whole_tensors(model: nn.Module, kind: str = "parameter") -> dict[str, Tensor]:
    """Return whole tensors under the names of the plain model's `state_dict`.

    `kind` is "parameter", "gradient" (0 for a parameter without one), or "state" for parameters and buffers. All ranks
    call it. It serves for saving, comparing and inspecting models that fit on one device.
    """
    if kind not in ("parameter", "gradient", "state"):
        raise ValueError(f"kind={kind!r}: use 'parameter', 'gradient' or 'state'")
    if kind == "state":
        state = model.state_dict()
        return {
            name: join_shards(value, Grid.of(value)) if isinstance(value, DTensor) else value
            for name, value in state.items()
        }
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        slices = vars(module).get(PLAIN_SLICES, {})
        for original, names in stored_names(slices).items():
            wholes = [_whole_parameter(module, own, gradient=kind == "gradient") for own in names]
            found[f"{prefix}.{original}".lstrip(".")] = join_slices(wholes, slices[names[0]])
    return found


def _whole_parameter(module: nn.Module, name: str, *, gradient: bool) -> Tensor:
    """Gather a parameter or its gradient."""
    parameter: Any = module._parameters[name]
    local = local_of(parameter.detach())
    if gradient:
        local = torch.zeros_like(local) if parameter.grad is None else local_of(parameter.grad)
    spec = vars(module)[SPECS][name]
    return comm.join(local.contiguous(), spec.storage, spec.shape, Grid.of(parameter), counted=False)


# parameters that code reads beside their layer


@dataclass(frozen=True, eq=False)
class ParameterPlacement(TensorPlacement):
    """A parameter of the plain module as it is stored: one shard, or those of the layers that the weight holds."""

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
        if not self.context.depth:  # recomputed in backward, outside any pass
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
    """Return a parameter of the module `owner` for code that runs in a pass; None if the module has none to lend."""
    slices: Mapping[str, PlainSlice] = vars(module).get(PLAIN_SLICES, {})
    own = [stored for stored, part in slices.items() if part.original == name]
    if not own or not (context.depth or in_backward()):
        return None
    parameters, specs = vars(module)["_parameters"], vars(module)[SPECS]
    parts = tuple((parameters[stored], specs[stored]) for stored in own)
    if not all(isinstance(parameter, DTensor) for parameter, _ in parts):
        return None  # it is gathered: the module is running its own code
    first, part = parts[0][0], slices[own[0]]
    shape = (sum(len(parameter) for parameter, _ in parts), *first.shape[1:]) if first.dim() else ()
    # stands for the values, which are not gathered unless somebody computes with them
    empty = torch.empty(
        0,
        dtype=context.policy.compute_dtype or first.dtype,
        device=local_of(first).device,
        requires_grad=first.requires_grad,
    )
    placement = ParameterPlacement(context, f"{owner}.{name}".lstrip("."), parts, part)
    return GridTensor(empty, placement, shape[::-1] if part.transposed else shape)


class ReadWhole(torch.autograd.Function):
    """A parameter gathered over all axes that cut it. Every rank of a place finds its whole gradient."""

    @staticmethod
    def forward(ctx: Any, context: ModelContext, name: str, spec: Spec, parameter: nn.Parameter) -> Tensor:
        ctx.context, ctx.name, ctx.spec, ctx.parameter = context, name, spec, parameter
        ctx.during = context.gradients.forward_pass
        ctx.during.use(parameter)
        held = local_of(parameter).detach()
        if held.is_floating_point():
            held = held.to(context.policy.compute_dtype or held.dtype)  # cast before it travels
        # a clone, because on a grid of one rank the gathered tensor is the shard itself
        return comm.join(held, spec.storage, spec.shape, context.grid, label=name).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.context.gradients.deposit_whole(ctx.name, ctx.parameter, ctx.spec, gradient, during=ctx.during)
        return None, None, None, None


def require_unchanged_parameters(context: ModelContext) -> None:
    """Refuse, at the end of a pass, a change of a parameter that was lent."""
    for (name, _), (whole, version) in context.lent_params.items():
        if version_of(whole) != version:
            raise lost_change_error(name)

"""The names and shapes of the plain module, in `state_dict` and everything that reads one.

A weight that holds several layers is stored as its parts, and one that is [in, out] as [out, in]; `state_dict` joins
and turns them back, `load_state_dict` takes whole tensors or shards under the plain names. A joined weight travels:
all ranks call `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold import comm
from fourfold.arriving import local_of
from fourfold.grid import Grid
from fourfold.layout import REPEATED, Layout, Spec
from fourfold.nn.layer import SPECS
from fourfold.parameter import shard_parameter
from fourfold.wrap.layers import Stored

STORED = "_fourfold_stored"
"""Attribute of a converted module: what its parameters are of the plain module's."""
JOINED = Layout((("x", 0), ("y", 0), ("z", 0)))
"""How a joined weight lies in a state dict: on no rank whole."""


def translate_state(module: nn.Module, stored: dict[str, Stored], grid: Grid) -> None:
    """Plain names out of `state_dict` and into `load_state_dict`."""
    vars(module)[STORED] = stored
    if any(where.rows is not None or where.transposed for where in stored.values()):
        module.register_state_dict_post_hook(partial(_give_plain, stored, grid))
    module.register_load_state_dict_pre_hook(partial(_take_plain, stored, grid))


def originals(stored: dict[str, Stored]) -> dict[str, list[str]]:
    """The stored names of each plain one, in order."""
    found: dict[str, list[str]] = {}
    for own, where in stored.items():
        found.setdefault(where.original, []).append(own)
    return found


def joined(tensors: Iterable[Tensor], where: Stored) -> Tensor:
    """The plain tensor of its parts."""
    parts = list(tensors)
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole.t().contiguous() if where.transposed else whole


def _give_plain(
    stored: dict[str, Stored], grid: Grid, module: nn.Module, state: dict[str, Any], prefix: str, _: Any
) -> None:
    specs = vars(module)[SPECS]
    for original, names in originals(stored).items():
        where = stored[names[0]]
        if where.rows is None and not where.transposed:
            continue
        parts = [state.pop(prefix + own) for own in names]
        wholes = [whole_of(part, specs[own], grid) for own, part in zip(names, parts, strict=True)]
        whole = joined(wholes, where)
        spec = Spec(tuple(whole.shape), JOINED, REPEATED)
        state[prefix + original] = shard_parameter(_boxed(whole, spec, grid), spec, grid).detach()


def _take_plain(
    stored: dict[str, Stored],
    grid: Grid,
    module: nn.Module,
    state: dict[str, Any],
    prefix: str,
    metadata: dict[str, Any],
    *_: Any,
) -> None:
    _refuse_assigning(metadata, module)
    specs = vars(module)[SPECS]
    for original, names in originals(stored).items():
        given = state.pop(prefix + original, None)
        if given is None:
            continue
        if names == [original] and not stored[original].transposed and _lies_as(given, specs[original], grid):
            state[prefix + original] = Landing(local_of(given), specs[original])
            continue
        whole = joined_shards(given, grid) if isinstance(given, DTensor) else given
        for own in names:
            part, spec = stored[own].of(whole), specs[own]
            if tuple(part.shape) != spec.shape:
                state[prefix + original] = whole  # torch says which shapes differ
                break
            state[prefix + own] = Landing(_boxed(part, spec, grid), spec)


def translate_buffers(module: nn.Module, specs: Mapping[str, Spec], grid: Grid) -> None:
    """Whole tensors, or shards, into `load_state_dict` for buffers that are cut."""
    if specs:
        module.register_load_state_dict_pre_hook(partial(_take_buffers, specs, grid))


def _take_buffers(
    specs: Mapping[str, Spec], grid: Grid, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any
) -> None:
    for own, spec in specs.items():
        given = state.get(prefix + own)
        if given is None or tuple(given.shape) != spec.shape:
            continue  # torch says what is missing and which shapes differ
        if _lies_as(given, spec, grid):
            state[prefix + own] = Landing(local_of(given), spec)
        else:
            whole = joined_shards(given, grid) if isinstance(given, DTensor) else given
            state[prefix + own] = Landing(_boxed(whole, spec, grid), spec)


def cut_buffer(whole: Tensor, spec: Spec, grid: Grid) -> Tensor:
    """This rank's part, as a tensor of the global shape."""
    return shard_parameter(_boxed(whole, spec, grid), spec, grid).detach()


class Landing(Tensor):
    """A shard that `load_state_dict` is about to copy into a DTensor: it goes from shard to shard.

    Of DTensors torch would derive how to cut the copy, which for a weight of four dims takes it seconds for each shape.
    """

    shard: Tensor

    @staticmethod
    def __new__(cls, shard: Tensor, spec: Spec) -> Landing:
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
        raise TypeError(
            f"{func} was called on a shard that load_state_dict is about to copy, and does no more than that"
        )


def _refuse_assigning(metadata: Mapping[str, Any], module: nn.Module) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise ValueError(
            f"load_state_dict(assign=True) would replace the shards that a parallelised {type(module).__name__} "
            "computes with; leave assign out, so that values are copied into them"
        )


def _lies_as(given: Tensor, spec: Spec, grid: Grid) -> bool:
    """Whether it is cut already as it will be stored."""
    if not isinstance(given, DTensor) or given.device_mesh != grid.mesh or tuple(given.shape) != spec.shape:
        return False
    return list(given.placements) == spec.storage.placements()


def joined_shards(given: DTensor, grid: Grid) -> Tensor:
    """The whole of what `state_dict` gave, or of shards on another mesh."""
    if given.device_mesh != grid.mesh:
        return given.full_tensor()
    layout = Layout.of(given.placements)
    return comm.join(local_of(given.detach()), layout, given.shape, grid, counted=False)


def whole_of(parameter: Tensor, spec: Spec, grid: Grid) -> Tensor:
    """Gather a parameter or its gradient for a state dict; the ledger does not count it."""
    return comm.join(local_of(parameter.detach()), spec.storage, spec.shape, grid, counted=False)


def _boxed(whole: Tensor, spec: Spec, grid: Grid) -> Tensor:
    return spec.storage.take(whole, grid).clone()


def whole_tensors(model: nn.Module, kind: str = "parameter") -> dict[str, Tensor]:
    """Every parameter, or every gradient (0 where there is none), or the "state" with buffers: whole tensors under the
    names of the plain model's `state_dict`.

    All ranks call it. For saving, comparing and inspecting models that fit on one device.
    """
    if kind not in ("parameter", "gradient", "state"):
        raise ValueError(f"kind={kind!r} is none of 'parameter', 'gradient', 'state'")
    if kind == "state":
        state = model.state_dict()
        return {
            name: joined_shards(value, Grid.of(value)) if isinstance(value, DTensor) else value
            for name, value in state.items()
        }
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for original, names in originals(vars(module).get(STORED, {})).items():
            wholes = [_whole(module, own, kind) for own in names]
            found[f"{prefix}.{original}".lstrip(".")] = joined(wholes, vars(module)[STORED][names[0]])
    return found


def _whole(module: nn.Module, name: str, kind: str) -> Tensor:
    parameter = module._parameters[name]
    local = local_of(parameter.detach())  # type: ignore[union-attr]
    if kind == "gradient":
        gradient = parameter.grad  # type: ignore[union-attr]
        local = torch.zeros_like(local) if gradient is None else local_of(gradient)
    spec = vars(module)[SPECS][name]
    return comm.join(local.contiguous(), spec.storage, spec.shape, Grid.of(parameter), counted=False)  # type: ignore[arg-type]

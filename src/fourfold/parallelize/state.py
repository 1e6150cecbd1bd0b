"""The names and shapes of the plain module, in `state_dict` and everything that reads one.

A weight that holds several layers is stored as its parts, and one that is [in, out] as [out, in]; `state_dict` joins
and turns them back, `load_state_dict` takes whole tensors or shards under the plain names. A joined weight travels:
all ranks call `state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from fourfold import comm
from fourfold.arriving import local_of
from fourfold.grid import AXES, Grid
from fourfold.layout import Spec, Storage
from fourfold.nn.layer import SPECS, box_of, shard_parameter
from fourfold.parallelize.layers import REPEATED, Stored

STORED = "_fourfold_stored"
"""Attribute of a converted module: what its parameters are of the plain module's."""
JOINED = Storage((("x", 0), ("y", 0), ("z", 0)))
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
        wholes = [
            comm.join_shards(local_of(part.detach()), specs[own], grid) for own, part in zip(names, parts, strict=True)
        ]
        whole = joined(wholes, where)
        spec = Spec(tuple(whole.shape), JOINED, REPEATED)
        state[prefix + original] = shard_parameter(_boxed(whole, spec, grid), spec, grid).detach()


def _take_plain(
    stored: dict[str, Stored], grid: Grid, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any
) -> None:
    specs = vars(module)[SPECS]
    for original, names in originals(stored).items():
        given = state.get(prefix + original)
        if given is None or (isinstance(given, DTensor) and names == [original] and not stored[original].transposed):
            continue
        whole = _joined_shards(given, grid) if isinstance(given, DTensor) else given
        del state[prefix + original]
        for own in names:
            part, spec = stored[own].of(whole), specs[own]
            if tuple(part.shape) != spec.shape:
                state[prefix + original] = whole  # torch says which shapes differ
                break
            local = _boxed(part.to(grid.device), spec, grid)
            state[prefix + own] = shard_parameter(local, spec, grid).detach()


def _joined_shards(given: DTensor, grid: Grid) -> Tensor:
    """The whole of what `state_dict` gave, or of shards on another mesh."""
    if given.device_mesh != grid.mesh:
        return given.full_tensor()
    places = zip(AXES, given.placements, strict=True)
    cuts = tuple((axis, place.dim) for axis, place in places if isinstance(place, Shard))
    spec = Spec(tuple(given.shape), Storage(cuts), REPEATED)
    return comm.join_shards(local_of(given.detach()), spec, grid)


def _boxed(whole: Tensor, spec: Spec, grid: Grid) -> Tensor:
    return whole[tuple(slice(part.start, part.stop) for part in box_of(spec, grid))].clone()


def whole_tensors(model: nn.Module, kind: str = "parameter") -> dict[str, Tensor]:
    """Every parameter, or every gradient (0 where there is none), whole and under the names of the plain model's
    `state_dict`.

    All ranks call it. For comparing and inspecting models that fit on one device.
    """
    if kind not in ("parameter", "gradient"):
        raise ValueError(f"kind={kind!r} is none of 'parameter', 'gradient'")
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
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
    return comm.join_shards(local.contiguous(), vars(module)[SPECS][name], Grid.of(parameter))  # type: ignore[arg-type]

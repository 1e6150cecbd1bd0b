"""What peft puts around linear layers: seen through when modules are found, made to size, merged on shards.

peft holds a layer as `base_layer` of a module of its own, which has the layer's name, and beside it a pair of small
ones per adapter. It is never imported: its modules are known by what they hold.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.arriving import local_of
from fourfold.grid import Grid
from fourfold.nn.layer import SPECS
from fourfold.wrap.placed import Placed
from fourfold.wrap.plan import Choice, Word
from fourfold.wrap.state import STORED, joined, originals, whole_of

SIZES = "_fourfold_sizes"
"""Attribute of a module with parameters that are stored in parts or turned: their stand-ins, by plain name."""
BASE = "base_layer"
SIDES = ("lora_A", "lora_B")


@dataclass(frozen=True, slots=True)
class LowRank(Word):
    """One side of a pair beside the linear layer of this name."""

    base: str
    side: str


def is_around(module: nn.Module) -> bool:
    """Whether it is a module of peft's with a layer inside."""
    return BASE in module._modules and any(kind.__module__.startswith("peft.") for kind in type(module).__mro__)


def inside(module: nn.Module) -> nn.Module:
    """The layer itself, where something of peft's stands around it."""
    while is_around(module):
        module = module._modules[BASE]  # type: ignore[assignment]
    return module


def plain_names(model: nn.Module) -> dict[str, str]:
    """What every module would be called without peft's around layers; such a module is called as the layer inside."""
    found: dict[str, str] = {}
    for name, _ in model.named_modules():
        parent, _, own = name.rpartition(".")
        hidden = own == BASE and is_around(model.get_submodule(parent))
        found[name] = found[parent] if hidden else f"{found[parent]}.{own}".lstrip(".") if name else ""
    return found


def adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Modules with pairs beside a linear layer, and the layer."""
    for name, module in model.named_modules():
        if is_around(module) and all(isinstance(module._modules.get(side), nn.ModuleDict) for side in SIDES):
            yield name, module, inside(module)


def find_pairs(model: nn.Module) -> dict[str, Choice]:
    found: dict[str, Choice] = {}
    for name, module, _ in adapted(model):
        for side in SIDES:
            pairs: nn.ModuleDict = getattr(module, side)
            for adapter, layer in pairs.items():
                if isinstance(layer, nn.Linear) and (side != "lora_A" or layer.bias is None):
                    choice = Choice(LowRank(f"{name}.{BASE}", side), "one of a low-rank pair beside its base layer")
                    found[f"{name}.{side}.{adapter}"] = choice
    return found


def prepare(model: nn.Module, features: Mapping[str, tuple[int, int]]) -> None:
    """Refuse what reads the layer's own weight, and make pairs anew that peft has made for a shard.

    peft takes a layer whose weight is a DTensor for one that computes its shard alone, and gives its pair the shard's
    sizes; `features` says which a layer on the grid has, by the name of the module around it.
    """
    for name, module, _ in adapted(model):
        variants: Mapping[str, Any] = getattr(module, "lora_variant", {})
        if variants:
            kind = type(next(iter(variants.values()))).__name__
            raise ValueError(
                f"{name}: {kind} of peft computes with the weight of the layer beside it, which is cut over the grid; "
                "use plain LoRA (use_dora=False and none of its like)"
            )
        if name in features and (module.in_features, module.out_features) != features[name]:
            _make_anew(model, module, features[name])


def _make_anew(model: nn.Module, module: Any, features: tuple[int, int]) -> None:
    module.in_features, module.out_features = features
    for adapter, layer in list(module.lora_A.items()):
        dtype = layer.weight.dtype
        module.update_layer(
            adapter,
            module.r[adapter],
            lora_alpha=module.lora_alpha[adapter],
            config=model.peft_config[adapter],  # type: ignore[index]
        )
        for side in SIDES:
            getattr(module, side)[adapter].to(dtype)


class Unread(Tensor):
    """Stands for a weight that is stored in parts or turned: its shape, dtype and device, but no numbers."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], like: Tensor) -> Unread:
        return Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=like.dtype, device=like.device)

    def __deepcopy__(self, memo: dict[int, object]) -> Unread:
        return self  # it has nothing that a copy could change

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Unread({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise TypeError(
            f"{func} reads a weight that is stored in parts or turned; state_dict() and "
            "fourfold.wrap.whole_tensors(model) give it as the plain module has it"
        )


def show_sizes(module: nn.Module) -> None:
    """Let the plain names of parameters that are stored in parts or turned tell their sizes, which peft asks for."""
    stored, sizes = vars(module)[STORED], {}
    for original, names in originals(stored).items():
        where, parameters = stored[names[0]], [module._parameters[own] for own in names]
        if where.rows is not None or where.transposed:
            whole = joined([torch.empty(part.shape, device="meta") for part in parameters], where)  # type: ignore[union-attr]
            sizes[original] = Unread(whole.shape, parameters[0])  # type: ignore[arg-type]
    if sizes:
        vars(module)[SIZES] = sizes
        module.__class__ = _telling(type(module))


@functools.cache
def _telling(kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of the same name. What a pass is lent goes before a stand-in."""

    def getattribute(self: nn.Module, name: str) -> Any:
        if name not in (sizes := vars(self)[SIZES]):
            return kind.__getattr__(self, name)
        try:
            found = kind.__getattr__(self, name)
        except AttributeError:
            return sizes[name]
        return found if isinstance(found, Placed) else sizes[name]

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattr__": getattribute}
    return type(kind.__name__, (kind,), names)


def merge_on_shards(model: nn.Module, grid: Grid) -> None:
    """From now on `merge` and `unmerge` of peft's modules work on shards, or say that they do not."""
    for name, module in model.named_modules():
        if not is_around(module) or not hasattr(module, "merge"):
            continue
        pairs = [layer for side in SIDES for layer in module._modules.get(side, nn.ModuleDict()).values()]  # type: ignore[union-attr]
        if pairs and all(STORED in vars(layer) for layer in (inside(module), *pairs)):
            own = name, module, grid
            vars(module).update(merge=partial(_merge, *own), unmerge=partial(_unmerge, *own))
        else:
            vars(module).update(merge=partial(_refuse_merging, name), unmerge=partial(_refuse_merging, name))


def _refuse_merging(name: str, *_: Any, **__: Any) -> None:
    raise ValueError(
        f"{name}: on the grid only pairs beside linear layers are merged; save the adapters and merge them into the "
        "plain model"
    )


def _merge(
    name: str, module: Any, grid: Grid, safe_merge: bool = False, adapter_names: list[str] | None = None
) -> None:
    wanted = module.active_adapters if adapter_names is None else adapter_names
    for adapter in wanted:
        if adapter in module.lora_A and adapter not in module.merged_adapters:
            _add(name, module, adapter, grid, module.scaling[adapter], finite=safe_merge)
            module.merged_adapters.append(adapter)


def _unmerge(name: str, module: Any, grid: Grid) -> None:
    while module.merged_adapters:
        adapter = module.merged_adapters.pop()
        if adapter in module.lora_A:
            _add(name, module, adapter, grid, -module.scaling[adapter], finite=False)


@torch.no_grad()
def _add(name: str, module: Any, adapter: str, grid: Grid, scale: float, *, finite: bool) -> None:
    """base + scale * B A, each rank on its shards, from the small ones whole."""
    a, b = (_whole(getattr(module, side)[adapter], "weight", grid) for side in SIDES)
    base, bias = inside(module), None
    if module.lora_B[adapter].bias is not None:
        bias = _whole(module.lora_B[adapter], "bias", grid)
    stored, specs = vars(base)[STORED], vars(base)[SPECS]
    if bias is not None and "bias" not in originals(stored):
        raise ValueError(f"{name}: a pair with a bias cannot be merged into a layer without one")
    for own, where in stored.items():
        rows, *columns = (slice(part.start, part.stop) for part in specs[own].box(grid))
        first = 0 if where.rows is None else where.rows.start
        rows = slice(first + rows.start, first + rows.stop)
        if where.original == "weight":
            change = b[rows] @ a[:, columns[0]]
        elif bias is not None:
            change = bias[rows]
        else:
            continue
        shard = local_of(base._parameters[own])  # type: ignore[arg-type]
        total = shard + change.to(shard.dtype) * scale
        if finite and not torch.isfinite(total).all():
            raise ValueError(f"{name}: adapter {adapter!r} would make weights that are not finite; it seems broken")
        shard.copy_(total)


def _whole(layer: nn.Module, name: str, grid: Grid) -> Tensor:
    """A parameter of a pair as the plain module has it."""
    stored, specs = vars(layer)[STORED], vars(layer)[SPECS]
    names = originals(stored)[name]
    parts = [whole_of(layer._parameters[own], specs[own], grid) for own in names]  # type: ignore[union-attr]
    return joined(parts, stored[names[0]])

"""The shards of a module's parameters, in the place of the plain ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold.grid import Grid
from fourfold.layout import Spec
from fourfold.nn.layer import SPECS, Layer, reserve
from fourfold.optimizers import REPLACED
from fourfold.parameter import shard_parameter
from fourfold.product import MEMORY
from fourfold.wrap.gathered import Gathered
from fourfold.wrap.layers import Adapter, Reader
from fourfold.wrap.state import cut_buffer, translate_buffers, translate_state
from fourfold.wrap.values import Values

Reserved = tuple[Tensor, Tensor | None]
"""For a shard, and for the first of several that lie side by side all of it."""


class Placing:
    """Puts the parameters of modules on the grid; shared ones once."""

    def __init__(self, model: nn.Module, adapters: Mapping[str, Adapter], values: Values, grid: Grid) -> None:
        self.model, self.adapters, self.values, self.grid = model, adapters, values, grid
        self._placed: dict[nn.Parameter, tuple[nn.Parameter, Spec, str]] = {}
        """By the plain parameter."""

    def place(self) -> None:
        memory = self._side_by_side()
        # layers first, so that a module that runs its own code does not claim what one of them holds
        for name in sorted(self.adapters, key=lambda name: isinstance(self.adapters[name], Gathered)):
            self._place(name, self.model.get_submodule(name), self.adapters[name], memory)
        made: dict[tuple[int, Spec | None], Tensor] = {}
        plain: list[Tensor] = []  # kept, so that no other takes its `id`
        for name, module in self.model.named_modules():
            specs = self.adapters[name].buffers() if name in self.adapters else {}
            for own, buffer in module._buffers.items():
                if buffer is not None and not isinstance(buffer, DTensor):
                    key = id(buffer), specs.get(own)
                    if key not in made:  # one that modules share stays one
                        plain.append(buffer)
                        whole = self.values.of(name, own, buffer)
                        made[key] = cut_buffer(whole, specs[own], self.grid) if own in specs else whole
                    module._buffers[own] = made[key]
            translate_buffers(module, specs, self.grid)

    def _place(
        self, name: str, module: nn.Module, adapter: Adapter, memory: Mapping[tuple[Layer, str], Reserved]
    ) -> None:
        plain = dict(module._parameters)
        made: dict[str, nn.Parameter | None] = {own: None for own, parameter in plain.items() if parameter is None}
        specs: dict[str, Spec] = {}
        parameters = dict(adapter.parameters())
        for own, (layer, inside, stored) in parameters.items():
            original, full = plain[stored.original], f"{name}.{own}".lstrip(".")
            if original is None:
                raise ValueError(f"{full} is None")
            if original in self._placed and stored.rows is None:
                made[own], specs[own] = self._share(original, layer, inside, full, adapter)
            else:
                whole = stored.of(self.values.of(name, stored.original, original))
                specs[own] = layer.specs[inside]
                made[own] = parameter = _cut(whole, specs[own], self.grid, memory.get((layer, inside)))
                parameter.requires_grad_(original.requires_grad)
                self._placed[original] = parameter, specs[own], full
            layer._parameters[inside] = made[own]
        for parameter in module._parameters.values():
            if parameter is not None and not isinstance(parameter, DTensor):
                setattr(parameter, REPLACED, True)
        module._parameters.clear()
        module._parameters.update(made)
        vars(module)[SPECS] = specs
        translate_state(module, {own: stored for own, (_, _, stored) in parameters.items()}, self.grid)
        for layer in adapter.layers:
            layer.label = name

    def _share(
        self, original: nn.Parameter, layer: Layer, inside: str, name: str, adapter: Adapter
    ) -> tuple[nn.Parameter, Spec]:
        """A parameter that another module has as well."""
        parameter, spec, other = self._placed[original]
        own = layer.specs[inside]
        if (own.storage, own.use, own.shape) != (spec.storage, spec.use, spec.shape):
            if not isinstance(adapter, Gathered):
                raise ValueError(
                    f"{name} and {other} share a parameter of shape {spec.shape} but use it in ways that cut it "
                    "differently; give both modules a plan of Whole(), or untie them"
                )
            del layer.specs[inside]  # what a layer holds is not gathered for those beside it
        return parameter, spec

    def _side_by_side(self) -> dict[tuple[Layer, str], Reserved]:
        """Memory for weights that are read together, one after the other."""
        found: dict[tuple[Layer, str], Reserved] = {}
        for name, adapter in self.adapters.items():
            if not isinstance(adapter, Reader) or adapter.together.readers[0] is not adapter:
                continue
            layers = [layer for reader in adapter.together.readers for layer in reader.layers]
            if len(layers) == 1:
                continue
            dtype = self.model.get_submodule(name)._parameters[adapter.form.weight].dtype  # type: ignore[union-attr]
            specs = {str(index): layer.specs["weight"] for index, layer in enumerate(layers)}
            whole, parts = reserve(list(specs), specs, self.grid, dtype, self.grid.device)  # type: ignore[arg-type]
            for index, layer in enumerate(layers):
                found[layer, "weight"] = parts[str(index)], whole if index == 0 else None
        return found


def _cut(whole: Tensor, spec: Spec, grid: Grid, memory: Reserved | None) -> nn.Parameter:
    """This rank's shard."""
    part = spec.storage.take(whole, grid)
    own, joint = (torch.empty_like(part, memory_format=torch.contiguous_format), None) if memory is None else memory
    parameter = shard_parameter(own.copy_(part), spec, grid)
    if joint is not None:
        setattr(parameter, MEMORY, joint)
    return parameter

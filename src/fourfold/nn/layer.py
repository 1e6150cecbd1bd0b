"""What every layer on the grid has: declared parameters, the grid, the policy, a name.

A layer declares its parameters on the meta device (`Layer.declare`). `assemble` then names all layers of a
model, makes the shards of this rank with their initial values and registers the gradients. A parameter is
a DTensor whose global shape is the unpadded model's on every grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from fourfold.engine import Engine
from fourfold.gradients import Gradients
from fourfold.grid import Grid
from fourfold.layout import Spec
from fourfold.nn.initial import fill_
from fourfold.nn.rng import StepRng
from fourfold.operators import OpContext
from fourfold.param_group import GroupMember, ParamGroup
from fourfold.params import shard_parameter
from fourfold.policy import Policy
from fourfold.product import MEMORY


class Layer(nn.Module):
    """A module whose parameters are cut over the grid."""

    gradients: Gradients
    clock: StepRng
    side_by_side: ClassVar[tuple[tuple[str, ...], ...]] = ()
    """Weights below this layer that are read together and therefore stored one after the other."""

    def __init__(self, grid: Grid, policy: Policy) -> None:
        super().__init__()
        self.grid = grid
        self.policy = policy
        self.label = type(self).__name__.lower()
        self.specs: dict[str, Spec] = {}
        self._members: dict[str, GroupMember] = {}

    def declare(self, name: str, spec: Spec) -> None:
        """Register a parameter without memory."""
        self.specs[name] = spec
        self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, device="meta")))

    def neighbours(self, prefix: str, specs: Mapping[str, Spec]) -> list[tuple[str, ...]]:
        """`side_by_side` by the names in the model, of those parameters that there are."""
        full = [tuple(f"{prefix}.{name}" if prefix else name for name in names) for names in self.side_by_side]
        return [names for group in full if len(names := tuple(name for name in group if name in specs)) > 1]

    def member(self, name: str) -> GroupMember:
        """The parameter as products take it."""
        parameter, known = getattr(self, name), self._members.get(name)
        if known is None or known.parameter is not parameter:
            known = self._members[name] = GroupMember.of(parameter, self.specs[name], self.grid)
        return known

    def unit(self, *names: str) -> ParamGroup:
        """These parameters of the layer as one message."""
        return self.unit_of(*(self.member(name) for name in names))

    def unit_of(self, *members: GroupMember, label: str = "") -> ParamGroup:
        """These members as one message, used during the forward pass that began last."""
        gradients = self.gradients
        return ParamGroup(self.grid, self.policy, gradients, label or self.label, members, gradients.forward_pass)

    @property
    def engine(self) -> Engine:
        return self.gradients.engine

    @property
    def hooked(self) -> bool:
        """Somebody looks at what goes in or comes out, so it is called as a module, without pausing inside."""
        return bool(self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks)

    def refuse_hooks(self, *layers: Layer | None) -> None:
        """For layers that are run as parts of this one, without being called."""
        for layer in layers:
            if layer is not None and layer.hooked:
                raise ValueError(
                    f"{layer.label} has a hook but is run as a part of {self.label}, which does not call it; "
                    f"put the hook on {self.label}"
                )

    def site(self, tokens: int) -> OpContext:
        return OpContext(self.grid, self.policy, tokens, self.label, self.engine)


def assemble(
    model: nn.Module,
    grid: Grid,
    policy: Policy,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> None:
    """Name the layers, make this rank's shards, register the gradients.

    On the meta device nothing is drawn and the model can be run dry.
    """
    device = grid.device if device is None else device
    parameters: dict[str, tuple[nn.Parameter, Spec]] = {}
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Layer)]
    for prefix, layer in layers:
        layer.label = prefix or layer.label
    specs = specs_of(model)
    memory: dict[str, Tensor] = {}
    joined: dict[str, Tensor] = {}
    for prefix, layer in layers:
        for names in layer.neighbours(prefix, specs):
            joined[names[0]], parts = reserve(names, specs, grid, dtype, device)
            memory |= parts
    for name, spec in specs.items():
        if name not in memory:
            memory |= reserve([name], specs, grid, dtype, device)[1]
        owner, _, own_name = name.rpartition(".")
        if not memory[name].is_meta:
            fill_(memory[name], spec.box(grid), spec.shape, spec.init, seed, name)
        parameter = shard_parameter(memory[name], spec, grid)
        if name in joined:
            setattr(parameter, MEMORY, joined[name])
        setattr(model.get_submodule(owner), own_name, parameter)
        parameters[name] = (parameter, spec)
    gradients = Gradients(grid, parameters, policy)
    clock = StepRng(seed, gradients.engine)
    for _, layer in layers:
        layer.gradients = gradients
        layer.clock = clock


SPECS = "_fourfold_specs"
"""Attribute of a module that is no `Layer` but has parameters on the grid: their specs by name."""


def specs_of(model: nn.Module) -> dict[str, Spec]:
    """The spec of every parameter, by its name in the model."""
    return {
        f"{prefix}.{name}" if prefix else name: spec
        for prefix, module in model.named_modules()
        for name, spec in (module.specs if isinstance(module, Layer) else vars(module).get(SPECS, {})).items()
    }


def reserve(
    names: Sequence[str], specs: Mapping[str, Spec], grid: Grid, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Memory for this rank's shards of these parameters, one after the other."""
    shapes = {name: [len(part) for part in specs[name].box(grid)] for name in names}
    whole = torch.empty(sum(prod(shape) for shape in shapes.values()), dtype=dtype, device=device)
    parts = whole.split([prod(shape) for shape in shapes.values()])
    return whole, {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

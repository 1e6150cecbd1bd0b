"""Modules that run their own code: what is not known to be a layer, with its parameters gathered over z meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fourfold.arriving import local_of
from fourfold.layout import REPEATED, WHOLE, Layout, Spec
from fourfold.nn.layer import Layer
from fourfold.nn.norm import add_gradients
from fourfold.once import once_differentiable
from fourfold.parallelize.layers import Adapter, Stored
from fourfold.parallelize.placed import Blocks, Placed, laid, version_of
from fourfold.parallelize.run import Run
from fourfold.unit import Unit


class Gathered(Adapter):
    """A module that runs its own code, with its parameters gathered over z meanwhile."""

    def __init__(self, name: str, run: Run, why: str, module: nn.Module, *, whole_inputs: bool = False) -> None:
        super().__init__(name, run, why)
        self.layer = Layer(run.grid, run.policy)
        self.whole_inputs = whole_inputs
        for own, parameter in module.named_parameters(recurse=False):
            storage = WHOLE if parameter.dim() else Layout(())
            self.layer.declare(own, Spec(tuple(parameter.shape), storage, REPEATED))

    @property
    def layers(self) -> Sequence[Layer]:
        return (self.layer,)

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        return {name: (self.layer, name, Stored(name)) for name in self.layer.specs}

    def takes(self, *, autocast: bool) -> torch.dtype | None:
        return self.run.policy.compute if self.layer.specs and not autocast else None

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.run.where = self.name
        if self.whole_inputs or self.name in self.run.on_wholes:
            args, kwargs = tree_map_only(Placed, Placed.whole, (args, kwargs))
        if not self.layer.specs:
            return forward(*args, **kwargs)
        tensors = self._tensors()
        versions = {name: version_of(tensor) for name, tensor in tensors.items()}
        held = {name: module._parameters[name] for name in tensors}
        module._parameters.update(tensors)  # type: ignore[arg-type]
        self.run.running |= (names := {id(tensor): self._named(module, name) for name, tensor in tensors.items()})
        self.run.inside.append(self.name)
        try:
            result = forward(*args, **kwargs)
        except RuntimeError as error:
            if GatherParameters.__name__ in str(error):  # torch knows of no change that it could follow
                raise RuntimeError(
                    changes(f"a parameter of {self.name or 'the model'} ({type(module).__name__})")
                ) from error
            raise
        finally:
            self.run.inside.pop()
            replaced = [name for name in tensors if module._parameters.get(name) is not tensors[name]]
            module._parameters.update(held)
            self.run.running = {key: name for key, name in self.run.running.items() if key not in names}
        # torch's recurrent layers lay their weights out anew, which changes none of the numbers, and keep them
        written = [name for name, tensor in tensors.items() if version_of(tensor) != versions[name]]
        if isinstance(module, nn.RNNBase):
            module._flat_weights, written = [], []
        if replaced or written:
            raise RuntimeError(changes(self._named(module, (replaced or written)[0])))
        return result

    def _named(self, module: nn.Module, own: str) -> str:
        return f"{f'{self.name}.{own}'.lstrip('.')} ({type(module).__name__})"

    def _tensors(self) -> dict[str, Tensor]:
        """The parameters whole; those of one dtype in one message."""
        found: dict[str, Tensor] = {}
        together: dict[torch.dtype, list[str]] = {}
        for name, spec in self.layer.specs.items():
            parameter = getattr(self.layer, name)
            if spec.shape:
                together.setdefault(parameter.dtype, []).append(name)
            else:
                found[name] = ReadScalar.apply(self.layer, parameter)
        for names in together.values():
            unit = self.layer.unit(*names)
            wholes = GatherParameters.apply(unit, *(getattr(self.layer, name) for name in names))
            found |= dict(zip(names, wholes, strict=True))
        return {name: found[name] for name in self.layer.specs}

    def describe(self) -> tuple[str, str]:
        if not self.layer.specs:
            return "its own code on whole tensors", "inputs made whole"
        if operation := self.run.on_wholes.get(self.name):
            return (
                f"cut over z: its own code on whole tensors (it uses {operation})",
                "parameters over z, inputs made whole",
            )
        return "cut over z: its own code", "parameters over z"


def changes(name: str) -> str:
    return (
        f"{name} is changed in forward, where it is a gathered copy: the change would be lost; change parameters "
        "outside of forward, on their shards"
    )


class GatherParameters(torch.autograd.Function):
    """Parameters whole, for code that uses them in any way; gradients go back to the shards."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *_: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        with unit.gathered("gathered", unit.gather, lambda _: (), turns=1, keep=True) as wholes:
            return tuple(held.view_as(held) for held in wholes)  # autograd wants tensors that are its own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        # copies: autograd may hand the same tensor to others, and the unit changes what it is given; in the order of
        # the parameter's own memory: a fused optimizer reads both as they lie, and einsum's gradients lie otherwise
        own = torch.contiguous_format
        dense = [None if g is None else g.to_dense() if g.is_sparse else g.clone(memory_format=own) for g in gradients]
        add_gradients(ctx.unit, dense, 1)
        return (None, *[None] * len(gradients))


class ReadScalar(torch.autograd.Function):
    """A parameter without dims, which every rank holds."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, parameter: nn.Parameter) -> Tensor:
        ctx.layer, ctx.parameter, ctx.during = layer, parameter, layer.gradients.forward_pass
        ctx.during.use(parameter)
        held = local_of(parameter).detach()
        return held.to(layer.policy.compute or held.dtype) if held.is_floating_point() else held.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        if ctx.parameter.requires_grad:
            ctx.layer.gradients.expect_end()
            own = gradient.clone()  # autograd may hand it to others too
            ctx.layer.gradients.deposit([ctx.parameter], [own], during=ctx.during)
        return None, None


class Spreader(Gathered):
    """A module whose output's last dim is heads, such as a table of biases by position: each rank takes its own."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(module, forward, *args, **kwargs)
        return laid(out, Blocks(self.run, out.dim() - 1, self.run.over))

    def describe(self) -> tuple[str, str]:
        return "cut over z: its own code, then by heads", "parameters over z"

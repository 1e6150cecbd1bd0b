"""What the layers of a user's model do on the grid in place of their own forward.

An adapter stands between a module, which keeps its name, its class's interface and its place in the model, and layers
of fourfold.nn that are not part of the model's tree but hold the same parameters. It takes tensors in any layout.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fourfold.arriving import local_of
from fourfold.layout import WHOLE, Cut, Spec, Storage, inner
from fourfold.nn.embedding import Embedding
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Contract, Expand
from fourfold.nn.norm import HeadNorm, Norm, add_gradients
from fourfold.parallelize.layouts import fused
from fourfold.parallelize.placed import Blocks, Placed, Rest, laid, whole
from fourfold.parallelize.run import Run
from fourfold.parallelize.together import HeadCounts, Together, at_rest
from fourfold.unit import Unit


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a stored parameter lies in one of the plain module: rows of its [out, in] form, or all of it."""

    original: str
    rows: range | None = None
    transposed: bool = False

    def of(self, tensor: Tensor) -> Tensor:
        """The part of the plain module's parameter that is stored."""
        tensor = tensor.t() if self.transposed else tensor
        return tensor if self.rows is None else tensor[self.rows.start : self.rows.stop]


class Adapter(ABC):
    """Runs a module on the grid."""

    def __init__(self, name: str, run: Run, why: str) -> None:
        self.name, self.run, self.why = name, run, why

    @property
    def layers(self) -> Sequence[Layer]:
        return ()

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        """By the name that the module has it under: the layer and its name there, and what it is of the plain one."""
        return {}

    def buffers(self) -> Mapping[str, Spec]:
        """Buffers of the module that are cut. The others are whole, and equal on all ranks."""
        return {}

    @abstractmethod
    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def describe(self) -> tuple[str, str]:
        """How its tensors lie, and who communicates what."""


L = TypeVar("L", bound=Layer)


class Single(Adapter, Generic[L]):
    """A module that is one layer with the same parameters."""

    def __init__(self, name: str, run: Run, why: str, layer: L, *, transposed: bool = False) -> None:
        super().__init__(name, run, why)
        self.layer, self.transposed = layer, transposed

    @property
    def layers(self) -> Sequence[L]:
        return (self.layer,)

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        return {
            name: (self.layer, name, Stored(name, transposed=self.transposed and len(spec.shape) == 2))
            for name, spec in self.layer.specs.items()
        }


class Reader(Single[Expand]):
    """A linear layer from rest to inner, or several in one weight."""

    together: Together

    def __init__(self, name: str, run: Run, why: str, layer: Expand, *, transposed: bool = False) -> None:
        super().__init__(name, run, why, layer, transposed=transposed)
        Together([self])

    def joined(self, outs: Sequence[Placed]) -> Placed:
        return outs[0]

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Placed:  # noqa: ARG002
        self.run.where = self.name
        return self.together.read(self, input)

    def describe(self) -> tuple[str, str]:
        others = [reader.name.rpartition(".")[2] for reader in self.together.readers if reader is not self]
        shared = f" together with {', '.join(others)}" if others else ""
        return "w[n/x, k/y]/z: rest -> inner", f"enter over x{shared}, w over z, spread over y"


class FusedReader(Reader):
    """Several layers whose weights the plain module has in one, each cut by itself."""

    def __init__(
        self, name: str, run: Run, why: str, layers: Sequence[Expand], *, transposed: bool, counts: HeadCounts | None
    ) -> None:
        super().__init__(name, run, why, layers[0], transposed=transposed)
        self.pieces = tuple(layers)
        self.together.counts = counts

    @property
    def layers(self) -> Sequence[Expand]:
        return self.pieces

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        found: dict[str, tuple[Layer, str, Stored]] = {}
        first = 0
        for index, layer in enumerate(self.pieces):
            rows = range(first, first + layer.out_features)
            first = rows.stop
            for name, spec in layer.specs.items():
                stored = Stored(name, rows, transposed=self.transposed and len(spec.shape) == 2)
                found[f"{name}_{index}"] = (layer, name, stored)
        return found

    def joined(self, outs: Sequence[Placed]) -> Placed:
        return fused(outs)

    def describe(self) -> tuple[str, str]:
        sizes = " + ".join(str(layer.out_features) for layer in self.pieces)
        return f"w[({sizes})/x, k/y]/z: rest -> inner", "one enter over x, w over z, one spread over y"


class Closer(Single[Contract]):
    """A linear layer from inner to rest."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Placed:  # noqa: ARG002
        self.run.where = self.name
        layout = Blocks(self.run, input.dim() - 1, inner(self.run.policy.activations).features)
        a = input.laid(layout) if isinstance(input, Placed) else laid(input, layout)
        leading = a.shape[:-1]
        out = self.layer(a.local.reshape(prod(leading), -1), prod(leading))
        return Placed(out, Rest(self.run), (*leading, self.layer.out_features))

    def describe(self) -> tuple[str, str]:
        return "w[k/y, n/x]/z: inner -> rest", "collect over y, w over z, leave over x"


class Normer(Single[Norm]):
    """A norm of the residual stream."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Placed:  # noqa: ARG002
        self.run.where = self.name
        a = at_rest(input, self.run)
        return a.like(self.layer(a.local))

    def describe(self) -> tuple[str, str]:
        return "w[k/y]/z: at rest", "statistics over y, w over z"


class HeadNormer(Single[HeadNorm]):
    """A norm of each head by itself."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Placed:  # noqa: ARG002
        self.run.where = self.name
        by_head = isinstance(input, Placed) and isinstance(input.placement, Blocks)
        if not by_head or input.placement.dim == input.dim() - 1:  # type: ignore[union-attr]
            layout = Blocks(self.run, input.dim() - 2, inner(self.run.policy.activations).features)
            input = laid(whole(input), layout)
        return input.like(self.layer(input.local))  # type: ignore[attr-defined]

    def describe(self) -> tuple[str, str]:
        return "w/z: each head by itself", "w over z"


class Embedder(Single[Embedding]):
    """The embedding of tokens."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Placed:  # noqa: ARG002
        self.run.where = self.name
        ids = whole(input)
        features = self.layer.specs["weight"].shape[1]
        return Placed(self.layer(ids), Rest(self.run), (*ids.shape, features))

    def describe(self) -> tuple[str, str]:
        return "w[V/x, k/y]/z: ids -> rest", "w over z, leave over x"


class Gathered(Adapter):
    """A module that runs its own code, with its parameters gathered over z meanwhile."""

    def __init__(self, name: str, run: Run, why: str, module: nn.Module, *, whole_inputs: bool = False) -> None:
        super().__init__(name, run, why)
        self.layer = Layer(run.grid, run.policy)
        self.whole_inputs = whole_inputs
        for own, parameter in module.named_parameters(recurse=False):
            storage = WHOLE if parameter.dim() else Storage(())
            self.layer.declare(own, Spec(tuple(parameter.shape), storage, REPEATED))

    @property
    def layers(self) -> Sequence[Layer]:
        return (self.layer,)

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        return {name: (self.layer, name, Stored(name)) for name in self.layer.specs}

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.run.where = self.name
        if self.whole_inputs:
            args, kwargs = torch.utils._pytree.tree_map_only(Placed, Placed.whole, (args, kwargs))
        if not self.layer.specs:
            return forward(*args, **kwargs)
        tensors = self._tensors()
        versions = [tensor._version for tensor in tensors.values()]
        held = {name: module._parameters[name] for name in tensors}
        module._parameters.update(tensors)  # type: ignore[arg-type]
        try:
            result = forward(*args, **kwargs)
        finally:
            module._parameters.update(held)
        changed = [name for name, version in zip(tensors, versions, strict=True) if tensors[name]._version != version]
        if changed:
            raise RuntimeError(
                f"{self.name} ({type(module).__name__}) changes its parameter {changed[0]!r} in place in forward, "
                "where it is a gathered copy: the change would be lost; change parameters outside of forward, on their "
                "shards"
            )
        return result

    def _tensors(self) -> dict[str, Tensor]:
        """The parameters whole."""
        names = [name for name, spec in self.layer.specs.items() if spec.shape]
        scalars = [name for name, spec in self.layer.specs.items() if not spec.shape]
        found: dict[str, Tensor] = {}
        if names:
            unit = self.layer.unit(*names)
            wholes = GatherParameters.apply(unit, *(getattr(self.layer, name) for name in names))
            found = dict(zip(names, wholes, strict=True))
        for name in scalars:
            found[name] = ReadScalar.apply(self.layer, getattr(self.layer, name))
        return {name: found[name] for name in self.layer.specs}

    def describe(self) -> tuple[str, str]:
        if not self.layer.specs:
            return "its own code on whole tensors", "inputs made whole"
        return "cut over z: its own code", "parameters over z"


REPEATED = Cut(("data", "z"), ())
"""What every rank of x and y computes alike."""


class GatherParameters(torch.autograd.Function):
    """Parameters whole, for code that uses them in any way; gradients go back to the shards."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *_: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        gathering = unit.gathering("gathered", unit.gather, lambda _: ())
        with unit.engine.ahead.using(gathering, uses=1, keep=True) as wholes:
            return tuple(held.view_as(held) for held in wholes)  # autograd wants tensors that are its own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        add_gradients(ctx.unit, gradients, 1)
        return (None, *[None] * len(gradients))


class ReadScalar(torch.autograd.Function):
    """A parameter without dims, which every rank holds."""

    @staticmethod
    def forward(ctx: Any, layer: Layer, parameter: nn.Parameter) -> Tensor:
        ctx.layer, ctx.parameter = layer, parameter
        return local_of(parameter).detach().to(layer.policy.compute or parameter.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        if ctx.parameter.requires_grad:
            ctx.layer.gradients.expect_end()
            ctx.layer.gradients.deposit(ctx.parameter, gradient.to(ctx.parameter.dtype).clone())
        return None, None


class Spreader(Gathered):
    """A module whose output's last dim is heads, such as a table of biases by position: each rank takes its own."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(module, forward, *args, **kwargs)
        return laid(out, Blocks(self.run, out.dim() - 1, inner(self.run.policy.activations).features))

    def describe(self) -> tuple[str, str]:
        return "cut over z: its own code, then by heads", "parameters over z"

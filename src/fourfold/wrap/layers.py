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

from fourfold.layout import Spec
from fourfold.nn.embedding import Embedding
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Contract, Expand
from fourfold.nn.norm import HeadNorm, Norm
from fourfold.wrap.layouts import fused
from fourfold.wrap.linears import Form
from fourfold.wrap.placed import Blocks, Placed, Rest, laid, whole
from fourfold.wrap.run import Run
from fourfold.wrap.together import HeadCounts, Together, at_rest

"""What every rank of x and y computes alike."""


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

    form: Form | None = None
    """What the module computes, where it is a linear layer."""

    def __init__(self, name: str, run: Run, why: str) -> None:
        self.name, self.run, self.why = name, run, why
        self.held: list[tuple[str, dict[str, Any], str]] = []
        """Where it has each parameter of the module: its name there, and the layer's table with the name in that."""

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's parameters are those that the adapter computes with, not what `functional_call` put in
        their place for this call."""
        return all(module._parameters.get(own) is table[inside] for own, table, inside in self.held)

    @property
    def layers(self) -> Sequence[Layer]:
        return ()

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        """By the name that the module has it under: the layer and its name there, and what it is of the plain one."""
        return {}

    def buffers(self) -> Mapping[str, Spec]:
        """Buffers of the module that are cut. The others are whole, and equal on all ranks."""
        return {}

    def takes(self, *, autocast: bool) -> torch.dtype | None:  # noqa: ARG002
        """The dtype of its floating-point inputs; None: as they come."""
        return None

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Whether the adapter computes what the module does with these arguments; if not the module's own code runs,
        and reads its parameters whole."""
        return True

    @abstractmethod
    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def describe(self) -> tuple[str, str]:
        """How its tensors lie, and who communicates what."""


L = TypeVar("L", bound=Layer)


class Single(Adapter, Generic[L]):
    """A module that is one layer with the same parameters. It computes in the policy's dtype or that of its
    parameters."""

    def __init__(self, name: str, run: Run, why: str, layer: L) -> None:
        super().__init__(name, run, why)
        self.layer = layer

    @property
    def layers(self) -> Sequence[L]:
        return (self.layer,)

    def takes(self, *, autocast: bool) -> torch.dtype | None:  # noqa: ARG002
        return self.run.policy.compute

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        return {name: (self.layer, name, Stored(name)) for name in self.layer.specs}


class Linear(Single[L]):
    """A module that is a linear layer, under whatever names it has its weight and its bias."""

    form: Form  # type: ignore[assignment]

    def __init__(self, name: str, run: Run, why: str, layer: L, form: Form) -> None:
        super().__init__(name, run, why, layer)
        self.form = form

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        return self.form.takes(args, kwargs)

    def parameters(self) -> Mapping[str, tuple[Layer, str, Stored]]:
        return {self.form.names[inside]: (self.layer, inside, self.stored(inside)) for inside in self.layer.specs}

    def stored(self, inside: str, rows: range | None = None) -> Stored:
        return Stored(self.form.names[inside], rows, transposed=self.form.transposed and inside == "weight")


class Reader(Linear[Expand]):
    """A linear layer from rest to inner, or several in one weight."""

    together: Together

    def __init__(self, name: str, run: Run, why: str, layer: Expand, form: Form) -> None:
        super().__init__(name, run, why, layer, form)
        Together([self])

    def joined(self, outs: Sequence[Placed]) -> Placed:
        return outs[0]

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Placed:  # noqa: ARG002
        self.run.where = self.name
        (input,) = (*args, *kwargs.values())
        return self.together.read(self, input)

    def describe(self) -> tuple[str, str]:
        others = [reader.name.rpartition(".")[2] for reader in self.together.readers if reader is not self]
        shared = f" together with {', '.join(others)}" if others else ""
        return "w[n/x, k/y]/z: rest -> inner", f"enter over x{shared}, w over z, spread over y"


class FusedReader(Reader):
    """Several layers whose weights the plain module has in one, each cut by itself."""

    def __init__(
        self, name: str, run: Run, why: str, layers: Sequence[Expand], form: Form, *, counts: HeadCounts | None
    ) -> None:
        super().__init__(name, run, why, layers[0], form)
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
            for inside in layer.specs:
                found[f"{self.form.names[inside]}_{index}"] = (layer, inside, self.stored(inside, rows))
        return found

    def joined(self, outs: Sequence[Placed]) -> Placed:
        return fused(outs)

    def describe(self) -> tuple[str, str]:
        sizes = " + ".join(str(layer.out_features) for layer in self.pieces)
        return f"w[({sizes})/x, k/y]/z: rest -> inner", "one enter over x, w over z, one spread over y"


class Closer(Linear[Contract]):
    """A linear layer from inner to rest."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Placed:  # noqa: ARG002
        self.run.where = self.name
        (input,) = (*args, *kwargs.values())
        layout = Blocks(self.run, input.dim() - 1, self.run.over)
        a = input.laid(layout) if isinstance(input, Placed) else laid(input, layout)
        leading = a.shape[:-1]
        out = self.layer(a.local.reshape(prod(leading), a.local.shape[-1]), prod(leading))
        return Placed(out, Rest(self.run), (*leading, self.layer.out_features))

    def describe(self) -> tuple[str, str]:
        return "w[k/y, n/x]/z: inner -> rest", "collect over y, w over z, leave over x"


class Normer(Single[Norm]):
    """A norm of the residual stream."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        self.run.where = self.name
        if len(args) + len(kwargs) != 1:  # it takes more than it was tried with: its own code reads the weight itself
            return forward(*args, **kwargs)
        (input,) = (*args, *kwargs.values())
        a = at_rest(input, self.run)
        return a.like(self.layer(a.local))

    def describe(self) -> tuple[str, str]:
        return "w[k/y]/z: at rest", "statistics over y, w over z"


class HeadNormer(Single[HeadNorm]):
    """A norm of each head by itself."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        self.run.where = self.name
        if len(args) + len(kwargs) != 1:
            return forward(*args, **kwargs)
        (input,) = (*args, *kwargs.values())
        by_head = isinstance(input, Placed) and isinstance(input.placement, Blocks)
        if not by_head or input.placement.dim == input.dim() - 1:  # type: ignore[union-attr]
            layout = Blocks(self.run, input.dim() - 2, self.run.over)
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

"""Adapters: what the modules of a user's model do on the grid in place of their own forward.

An adapter stands between a module, which keeps its name, its interface and its place in the model, and layers of
fourfold.nn, which are not part of the model's tree but hold the same parameters. An adapter takes tensors in any
placement. A module that no layer of fourfold.nn can stand for runs its own code with gathered parameters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from fourfold import comm
from fourfold.layout import CONTRACT_WEIGHT, EXPAND_WEIGHT, REPEATED, WHOLE, Layout, Spec
from fourfold.nn.embedding import Embedding
from fourfold.nn.layer import Layer, add_gradients
from fourfold.nn.linear import Contract, Expand
from fourfold.nn.norm import HeadNorm, Norm
from fourfold.operators import collect, enter, leave, once_differentiable, spread
from fourfold.param_group import ParamGroup
from fourfold.params import local_of
from fourfold.wrap.context import ModelContext
from fourfold.wrap.detect import LinearForm
from fourfold.wrap.grid_tensor import GridTensor, distribute, to_whole, version_of
from fourfold.wrap.placements import ChunkPlacement, RestPlacement, conjugate, fuse, to_rest
from fourfold.wrap.shared_input import HeadCounts, SharedInput


@dataclass(frozen=True, slots=True)
class PlainSlice:
    """Which part of a plain module's parameter a stored parameter holds: some rows of its [out, in] form, or all."""

    original: str
    """The name of the plain module's parameter."""
    rows: range | None = None
    transposed: bool = False
    """Whether the plain parameter is [in, out]."""

    @property
    def is_all(self) -> bool:
        """Whether the stored parameter is the plain one as it is."""
        return self.rows is None and not self.transposed

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of the plain module's parameter that is stored."""
        tensor = tensor.t() if self.transposed else tensor
        return tensor if self.rows is None else tensor[self.rows.start : self.rows.stop]


LayerParameter = tuple[Layer, str, PlainSlice]
"""The layer that computes with a parameter, its name in that layer, and its part of the plain module's parameter."""


class Adapter(ABC):
    """Runs a module on the grid."""

    form: LinearForm | None = None
    """The form of the module, if it is a linear layer."""

    def __init__(self, name: str, context: ModelContext, why: str) -> None:
        self.name, self.context, self.why = name, context, why
        self.homes: list[tuple[str, dict[str, Any], str]] = []
        """For each parameter: its name in the module, and the layer's table with its name there."""

    def holds(self, module: nn.Module) -> bool:
        """Return whether the module has the adapter's parameters, and not ones that `functional_call` put there."""
        return all(module._parameters.get(own) is table[inside] for own, table, inside in self.homes)

    @property
    def layers(self) -> Sequence[Layer]:
        """The layers of fourfold.nn that compute for the module."""
        return ()

    def parameters(self) -> Mapping[str, LayerParameter]:
        """Return the module's parameters on the grid, by the names that the module will have for them."""
        return {}

    def buffers(self) -> Mapping[str, Spec]:
        """Return the buffers of the module that are cut. All others are whole and equal on all ranks."""
        return {}

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:  # noqa: ARG002
        """Return the dtype to which floating-point inputs are cast; None leaves them as they are."""
        return None

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Return whether the adapter computes what the module does with these arguments.

        If not, the module's own code runs and reads its parameters whole.
        """
        return True

    @abstractmethod
    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module; `forward` is its own code."""

    @abstractmethod
    def describe(self) -> tuple[str, str]:
        """Return how the module's tensors lie, and what it communicates over which axes."""


L = TypeVar("L", bound=Layer)


class LayerAdapter(Adapter, Generic[L]):
    """A module that is one layer with the same parameters.

    It computes in the policy's dtype, or in the dtype of its parameters.
    """

    def __init__(self, name: str, context: ModelContext, why: str, layer: L) -> None:
        super().__init__(name, context, why)
        self.layer = layer

    @property
    def layers(self) -> Sequence[L]:
        return (self.layer,)

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:  # noqa: ARG002
        return self.context.policy.compute_dtype

    def parameters(self) -> Mapping[str, LayerParameter]:
        return {name: (self.layer, name, PlainSlice(name)) for name in self.layer.specs}


# linear layers


class LinearAdapter(LayerAdapter[L]):
    """A module that is a linear layer, whatever its names for weight and bias are."""

    form: LinearForm  # type: ignore[assignment]

    def __init__(self, name: str, context: ModelContext, why: str, layer: L, form: LinearForm) -> None:
        super().__init__(name, context, why, layer)
        self.form = form

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        return self.form.accepts(args, kwargs)

    def parameters(self) -> Mapping[str, LayerParameter]:
        return {self.form.names[inside]: (self.layer, inside, self.slice_of(inside)) for inside in self.layer.specs}

    def slice_of(self, inside: str, rows: range | None = None) -> PlainSlice:
        """Return the part of the plain weight or bias that these rows are."""
        return PlainSlice(self.form.names[inside], rows, transposed=self.form.transposed and inside == "weight")


class ExpandAdapter(LinearAdapter[Expand]):
    """A linear layer from rest to inner."""

    shared_input: SharedInput

    def __init__(self, name: str, context: ModelContext, why: str, layer: Expand, form: LinearForm) -> None:
        super().__init__(name, context, why, layer, form)
        SharedInput([self])

    def joined(self, outs: Sequence[GridTensor]) -> GridTensor:
        """Return the module's output, made of the outputs of its layers."""
        return outs[0]

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> GridTensor:  # noqa: ARG002
        self.context.last_layer = self.name
        (input,) = (*args, *kwargs.values())
        return self.shared_input.read(self, input)

    def describe(self) -> tuple[str, str]:
        others = [reader.name.rpartition(".")[2] for reader in self.shared_input.readers if reader is not self]
        shared = f" together with {', '.join(others)}" if others else ""
        return "w[n/x, k/y]/z: rest -> inner", f"enter over x{shared}, w over z, spread over y"


class FusedExpandAdapter(ExpandAdapter):
    """Several Expand layers that the plain module holds in one weight; each is cut by itself."""

    def __init__(
        self,
        name: str,
        context: ModelContext,
        why: str,
        layers: Sequence[Expand],
        form: LinearForm,
        *,
        counts: HeadCounts | None,
    ) -> None:
        super().__init__(name, context, why, layers[0], form)
        self.pieces = tuple(layers)
        self.shared_input.counts = counts

    @property
    def layers(self) -> Sequence[Expand]:
        return self.pieces

    def parameters(self) -> Mapping[str, LayerParameter]:
        found: dict[str, LayerParameter] = {}
        first = 0
        for index, layer in enumerate(self.pieces):
            rows = range(first, first + layer.out_features)
            first = rows.stop
            for inside in layer.specs:
                found[f"{self.form.names[inside]}_{index}"] = (layer, inside, self.slice_of(inside, rows))
        return found

    def joined(self, outs: Sequence[GridTensor]) -> GridTensor:
        return fuse(outs)

    def describe(self) -> tuple[str, str]:
        sizes = " + ".join(str(layer.out_features) for layer in self.pieces)
        return f"w[({sizes})/x, k/y]/z: rest -> inner", "one enter over x, w over z, one spread over y"


class ContractAdapter(LinearAdapter[Contract]):
    """A linear layer from inner to rest."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> GridTensor:  # noqa: ARG002
        self.context.last_layer = self.name
        (input,) = (*args, *kwargs.values())
        a = distribute(input, ChunkPlacement(self.context, input.dim() - 1, self.context.inner_axes))
        leading = a.shape[:-1]
        out = self.layer(a.local.reshape(prod(leading), a.local.shape[-1]), prod(leading))
        return GridTensor(out, RestPlacement(self.context), (*leading, self.layer.out_features))

    def describe(self) -> tuple[str, str]:
        return "w[k/y, n/x]/z: inner -> rest", "collect over y, w over z, leave over x"


# norms and embeddings


class NormAdapter(LayerAdapter[Norm]):
    """A norm of the residual stream."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        self.context.last_layer = self.name
        if len(args) + len(kwargs) != 1:  # more arguments than in the trial: the module's own code reads its weight
            return forward(*args, **kwargs)
        (input,) = (*args, *kwargs.values())
        a = to_rest(input, self.context)
        return a.like(self.layer(a.local))

    def describe(self) -> tuple[str, str]:
        return "w[k/y]/z: at rest", "statistics over y, w over z"


class HeadNormAdapter(LayerAdapter[HeadNorm]):
    """A norm of each attention head by itself."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        self.context.last_layer = self.name
        if len(args) + len(kwargs) != 1:  # more arguments than in the trial: the module's own code reads its weight
            return forward(*args, **kwargs)
        (input,) = (*args, *kwargs.values())
        by_head = isinstance(input, GridTensor) and isinstance(input.placement, ChunkPlacement)
        if not by_head or input.placement.dim == input.dim() - 1:  # type: ignore[union-attr]
            input = distribute(input, ChunkPlacement(self.context, input.dim() - 2, self.context.inner_axes))
        return input.like(self.layer(input.local))  # type: ignore[attr-defined]

    def describe(self) -> tuple[str, str]:
        return "w/z: each head by itself", "w over z"


class EmbeddingAdapter(LayerAdapter[Embedding]):
    """The embedding of tokens."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> GridTensor:  # noqa: ARG002
        self.context.last_layer = self.name
        ids = to_whole(input)
        features = self.layer.specs["weight"].shape[1]
        return GridTensor(self.layer(ids), RestPlacement(self.context), (*ids.shape, features))

    def describe(self) -> tuple[str, str]:
        return "w[V/x, k/y]/z: ids -> rest", "w over z, leave over x"


# modules that run their own code


class GatheredAdapter(Adapter):
    """A module that runs its own code, with its parameters gathered over z meanwhile."""

    def __init__(
        self, name: str, context: ModelContext, why: str, module: nn.Module, *, whole_inputs: bool = False
    ) -> None:
        super().__init__(name, context, why)
        self.layer = Layer(context.grid, context.policy)
        self.whole_inputs = whole_inputs
        for own, parameter in module.named_parameters(recurse=False):
            storage = WHOLE if parameter.dim() else Layout(())
            self.layer.declare(own, Spec(tuple(parameter.shape), storage, REPEATED))

    @property
    def layers(self) -> Sequence[Layer]:
        return (self.layer,)

    def parameters(self) -> Mapping[str, LayerParameter]:
        return {name: (self.layer, name, PlainSlice(name)) for name in self.layer.specs}

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:
        return self.context.policy.compute_dtype if self.layer.specs and not autocast else None

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = self.context
        context.last_layer = self.name
        if self.whole_inputs or self.name in context.whole_input_modules:
            args, kwargs = tree_map_only(GridTensor, GridTensor.whole, (args, kwargs))
        if not self.layer.specs:
            return forward(*args, **kwargs)
        tensors = self._gather()
        versions = {name: version_of(tensor) for name, tensor in tensors.items()}
        shards = {name: module._parameters[name] for name in tensors}
        module._parameters.update(tensors)  # type: ignore[arg-type]
        context.gathered_names |= (names := {id(tensor): self._full(module, name) for name, tensor in tensors.items()})
        context.own_code.append(self.name)
        try:
            result = forward(*args, **kwargs)
        except RuntimeError as error:
            # autograd says only in words that an in-place change of an output of GatherParameters is not allowed
            if GatherParameters.__name__ in str(error):
                raise lost_change_error(
                    f"a parameter of {self.name or 'the model'} ({type(module).__name__})"
                ) from error
            raise
        finally:
            context.own_code.pop()
            replaced = [name for name in tensors if module._parameters.get(name) is not tensors[name]]
            module._parameters.update(shards)
            context.gathered_names = {key: name for key, name in context.gathered_names.items() if key not in names}
        written = [name for name, tensor in tensors.items() if version_of(tensor) != versions[name]]
        if isinstance(module, nn.RNNBase):
            # cuDNN lays its weights out anew, which changes no numbers; drop the references that it keeps to them
            module._flat_weights, written = [], []
        if replaced or written:
            raise lost_change_error(self._full(module, (replaced or written)[0]))
        return result

    def _full(self, module: nn.Module, own: str) -> str:
        return f"{f'{self.name}.{own}'.lstrip('.')} ({type(module).__name__})"

    def _gather(self) -> dict[str, Tensor]:
        """Gather the parameters, those of one dtype in one message."""
        found: dict[str, Tensor] = {}
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, spec in self.layer.specs.items():
            parameter = getattr(self.layer, name)
            if spec.shape:
                by_dtype.setdefault(parameter.dtype, []).append(name)
            else:
                found[name] = ReadScalar.apply(self.layer, parameter)
        for names in by_dtype.values():
            found |= gather_parameters(self.layer, names)
        return {name: found[name] for name in self.layer.specs}

    def describe(self) -> tuple[str, str]:
        if not self.layer.specs:
            return "its own code on whole tensors", "inputs made whole"
        if operation := self.context.whole_input_modules.get(self.name):
            return (
                f"cut over z: its own code on whole tensors (it uses {operation})",
                "parameters over z, inputs made whole",
            )
        return "cut over z: its own code", "parameters over z"


def lost_change_error(name: str) -> RuntimeError:
    """Return the error for a parameter that model code changes in forward."""
    return RuntimeError(
        f"{name} is changed in forward, where it is a gathered copy: the change would be lost; change parameters "
        "outside of forward, on their shards"
    )


def gather_parameters(layer: Layer, names: Sequence[str]) -> dict[str, Tensor]:
    """Gather parameters of a layer over z in one message; their gradients go back to the shards."""
    wholes = GatherParameters.apply(layer.unit(*names), *(getattr(layer, name) for name in names))
    return dict(zip(names, wholes, strict=True))


class GatherParameters(torch.autograd.Function):
    """Parameters gathered over z, for code that uses them in any way; gradients go back to the shards."""

    @staticmethod
    def forward(ctx: Any, unit: ParamGroup, *_: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        with unit.gathered("gathered", unit.gather, lambda _: (), turns=1, keep=True) as wholes:
            return tuple(held.view_as(held) for held in wholes)  # autograd wants output tensors of its own

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        # Copies, because autograd may hand the same tensor to others and the unit changes what it gets. Contiguous,
        # as the parameter is: a fused optimizer reads both in memory order, and einsum's gradients are strided.
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
        return held.to(layer.policy.compute_dtype or held.dtype) if held.is_floating_point() else held.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        if ctx.parameter.requires_grad:
            ctx.layer.gradients.expect_end()
            own = gradient.clone()  # autograd may hand it to others too
            ctx.layer.gradients.deposit([ctx.parameter], [own], during=ctx.during)
        return None, None


class HeadsAdapter(GatheredAdapter):
    """A module with attention heads as the last dim of its output, such as a table of biases; ranks take their own."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(module, forward, *args, **kwargs)
        return distribute(out, ChunkPlacement(self.context, out.dim() - 1, self.context.inner_axes))

    def describe(self) -> tuple[str, str]:
        return "cut over z: its own code, then by heads", "parameters over z"


# linear layers that compute their weight


class ComputedWeightAdapter(GatheredAdapter):
    """A linear layer that computes its weight from other parameters: weight norm, spectral norm, any parametrisation.

    The parameters are gathered over z and the module's own code computes the weight, whole and alike on every rank of x
    and y. Each rank multiplies by its block of the weight and finds the gradient of that block. The blocks are
    gathered, so the whole gradient goes back through the code that computed the weight.

        Expand     a [m/(zx), k/y] -> enter -> [m/z, k/y] -> a W[n/x, k/y]^T -> {sum y} -> spread -> [m/z, n/(xy)]
        Contract   a [m/z, k/(xy)] -> collect -> [m/z, k/x] -> a W[n/y, k/x]^T -> {sum x} -> leave -> [m/(zx), n/y]
    """

    form: LinearForm  # type: ignore[assignment]

    def __init__(self, name: str, context: ModelContext, why: str, module: nn.Module, form: LinearForm) -> None:
        super().__init__(name, context, why, module)
        self.form = form

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:
        return None if autocast else self.context.policy.compute_dtype

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        return self.form.accepts(args, kwargs)

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        self.context.last_layer = self.name
        (input,) = (*args, *kwargs.values())
        weight, bias = to_whole(module.weight), module.bias
        if weight.shape != (self.form.outputs, self.form.inputs):
            raise ValueError(
                f"{self.name}: the weight that {type(module).__name__} computes has the shape {tuple(weight.shape)}, "
                f"not {(self.form.outputs, self.form.inputs)}; give the module WholeTensors() in the plan"
            )
        out = self.product(input, weight)
        return out if bias is None else out + bias

    @abstractmethod
    def product(self, a: Tensor, weight: Tensor) -> GridTensor:
        """Return a W^T; each rank multiplies by its block of W."""

    def block(self, weight: Tensor, layout: Layout) -> Tensor:
        """Return this rank's block of a weight that all ranks hold whole; its gradient is gathered from all blocks."""
        grid, shape = self.context.grid, weight.shape
        return conjugate(
            weight,
            lambda tensor: layout.take(tensor, grid).contiguous(),
            lambda gradient: comm.join(gradient.contiguous(), layout, shape, grid, label=self.context.label),
        )


class ComputedExpandAdapter(ComputedWeightAdapter):
    """A linear layer with a computed weight, from rest to inner."""

    def product(self, a: Tensor, weight: Tensor) -> GridTensor:
        resting = to_rest(a, self.context)
        leading = resting.shape[:-1]
        site = self.layer.site(prod(leading))
        owed = functional.linear(enter(resting.local, site).wait(), self.block(weight, EXPAND_WEIGHT.compute))
        out = spread(owed, site, [owed.shape[1]]).wait()
        placement = ChunkPlacement(self.context, len(leading), self.context.inner_axes)
        return GridTensor(out.view(*leading, out.shape[1]), placement, (*leading, self.form.outputs))

    def describe(self) -> tuple[str, str]:
        return "computed w[n/x, k/y]: rest -> inner", "enter over x, spread over y, gradients of w over x and y"


class ComputedContractAdapter(ComputedWeightAdapter):
    """A linear layer with a computed weight, from inner to rest."""

    def product(self, a: Tensor, weight: Tensor) -> GridTensor:
        a = distribute(a, ChunkPlacement(self.context, a.dim() - 1, self.context.inner_axes))
        leading, layout = a.shape[:-1], CONTRACT_WEIGHT.compute
        site = self.layer.site(prod(leading))
        flat = a.local.reshape(prod(leading), a.local.shape[-1])
        columns = self.form.inputs // layout.parts(self.context.grid.shape.sizes, 1)
        owed = functional.linear(collect(flat, site, columns).wait(), self.block(weight, layout))
        return GridTensor(leave(owed, site).wait(), RestPlacement(self.context), (*leading, self.form.outputs))

    def describe(self) -> tuple[str, str]:
        return "computed w[k/y, n/x]: inner -> rest", "collect over y, leave over x, gradients of w over x and y"

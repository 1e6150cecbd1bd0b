"""Adapters: what the modules of a user's model do on the grid in place of their own forward.

An adapter stands between a module, which keeps its name, its interface and its place in the model, and layers of
fourfold.nn, which are not part of the model's tree but hold the same parameters. An adapter takes tensors in any
placement. A module that no layer of fourfold.nn can stand for runs its own code with gathered parameters.

This file has the adapters of norms, of embeddings and of modules that run their own code. `linear_adapters.py`,
`images.py`, `lora.py` and `passes.py` have the others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fourfold import comm
from fourfold.layout import REPEATED, WHOLE, Layout, Spec
from fourfold.nn.embedding import Embedding
from fourfold.nn.layer import Layer, gather_parameters
from fourfold.nn.norm import HeadNorm, Norm
from fourfold.operators import once_differentiable
from fourfold.params import local_of
from fourfold.wrap.detect import LinearForm, NormFormula, norm_formula_of
from fourfold.wrap.grid_tensor import GridTensor, ModelContext, distribute, to_shown, to_whole, version_of
from fourfold.wrap.ops_sequence import own_ids
from fourfold.wrap.placements import ChunkPlacement, RestPlacement, to_rest
from fourfold.wrap.sequence_tensor import SequenceTensor


@dataclass(frozen=True, slots=True)
class PlainSlice:
    """Which part of a plain module's parameter a stored parameter holds: some rows of its [out, in] form, or of the
    weights [experts, out, in] of a mixture, or all."""

    original: str
    """The name of the plain module's parameter."""
    rows: range | None = None
    """The rows that are stored; None: all of them."""
    transposed: bool = False
    """Whether the plain parameter is [in, out]."""
    dim: int = 0
    """The dim of rows."""

    @property
    def is_all(self) -> bool:
        """Whether the stored parameter is the plain one as it is."""
        return self.rows is None and not self.transposed

    def of(self, tensor: Tensor) -> Tensor:
        """Return the part of the plain module's parameter that is stored."""
        tensor = tensor.t() if self.transposed else tensor
        return tensor if self.rows is None else tensor.narrow(self.dim, self.rows.start, len(self.rows))


LayerParameter = tuple[Layer, str, PlainSlice]
"""The layer that computes with a parameter, its name in that layer, and its part of the plain module's parameter."""

L = TypeVar("L", bound=Layer)


class Adapter(ABC, Generic[L]):
    """Runs a module on the grid, usually by layers of fourfold.nn."""

    form: LinearForm | None = None
    """The form of the module, if it is a linear layer."""
    treats_tokens_alike: bool = False
    """Whether the adapter computes each token of [..., features] by itself, so that it may get some of them."""
    takes_sequences: bool = False
    """Whether the adapter knows what to do with sequence tensors (`SequenceTensor`)."""

    def __init__(self, name: str, context: ModelContext, why: str, *layers: L) -> None:
        self.name, self.context, self.why = name, context, why
        self.layers = layers
        """The layers of fourfold.nn that compute for the module."""
        self.homes: list[tuple[str, dict[str, Any], str]] = []
        """For each parameter: its name in the module, the layer's dict of parameters, and its name in that dict."""

    @property
    def layer(self) -> L:
        """The layer that computes for the module, the first if there are several."""
        return self.layers[0]

    def replaced_parameter(self, module: nn.Module) -> str | None:
        """Return the first parameter of the module that is not the layer's, as under `functional_call`, or None."""
        own = module._parameters
        return next((name for name, table, inside in self.homes if own.get(name) is not table[inside]), None)

    def parameters(self) -> Mapping[str, LayerParameter]:
        """Return the module's parameters on the grid, by the names that the module will have for them."""
        return {name: (layer, name, PlainSlice(name)) for layer in self.layers for name in layer.specs}

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


class LayerAdapter(Adapter[L]):
    """Runs a module by layers with the same parameters, in the policy's dtype or in the dtype of its parameters."""

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:  # noqa: ARG002
        return self.context.policy.compute_dtype


# what a module's class says about it

ADAPTERS = "_fourfold_adapters"
"""The attribute of a module on the grid with its adapters, outermost first."""


def adapters_of(module: nn.Module) -> list[Adapter]:
    """Return the adapters of a module, outermost first; none if it is not on the grid."""
    return vars(module).get(ADAPTERS, [])


def calls_parent_forward(plain: type[nn.Module], parent: type[nn.Module]) -> bool:
    """Return whether a subclass has a forward of its own that calls its parent's through super()."""
    own = plain.forward
    if not issubclass(plain, parent) or own is parent.forward:
        return False
    code = getattr(own, "__code__", None)
    # a method that writes `super().forward(...)` has the cell `__class__` and the name `forward`
    return code is not None and "__class__" in code.co_freevars and "forward" in code.co_names


def uses_forward_of(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Return whether a module's forward is, or calls, the forward of one of these classes, on their parameters alone.

    A module that uses its weight in a way of its own must not be taken for a layer.
    """
    if adapters_of(module):
        return isinstance(module, kinds)
    plain = type(module)
    if not module._parameters.keys() <= {"weight", "bias"} or any(module.children()):
        return False
    return any(
        issubclass(plain, kind) and (plain.forward is kind.forward or calls_parent_forward(plain, kind))
        for kind in kinds
    )


def is_computed(module: nn.Module) -> bool:
    """Return whether the weight is computed from other parameters before each use, as parametrizations do."""
    return module._parameters.get("weight") is None and not adapters_of(module)


def is_embedding(module: nn.Module) -> bool:
    """Return whether a module is an nn.Embedding, or a subclass that calls its forward and does more."""
    return uses_forward_of(module, (nn.Embedding,)) and not is_computed(module)


# norms and embeddings


N = TypeVar("N", Norm, HeadNorm)


class NormLikeAdapter(LayerAdapter[N]):
    """Runs a norm, whose parameters may have any names."""

    treats_tokens_alike = True

    def __init__(self, name: str, context: ModelContext, why: str, layer: N, formula: NormFormula) -> None:
        super().__init__(name, context, why, layer)
        self.formula = formula

    def parameters(self) -> Mapping[str, LayerParameter]:
        names = {"weight": self.formula.weight, "bias": self.formula.bias}
        return {str(names[own]): (self.layer, own, PlainSlice(str(names[own]))) for own in self.layer.specs}

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        return len(args) + len(kwargs) == 1  # with more arguments than in the trial the module may do something else

    def normalise(self, a: Tensor) -> Tensor:
        """Return the norm of this rank's part."""
        self.layer.eps = self.formula.eps_for(a.dtype)
        return self.layer(a)


class NormAdapter(NormLikeAdapter[Norm]):
    """Runs a norm of the residual stream."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        (input,) = (*args, *kwargs.values())
        a = to_rest(input, self.context)
        return a.like(self.normalise(a.local))

    def describe(self) -> tuple[str, str]:
        return "w[k/y]/z: at rest", "statistics over y, w over z"


class HeadNormAdapter(NormLikeAdapter[HeadNorm]):
    """Runs a norm of each attention head by itself."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        (input,) = (*args, *kwargs.values())
        by_head = isinstance(input, GridTensor) and isinstance(input.placement, ChunkPlacement)
        if not by_head or input.placement.dim == input.dim() - 1:
            input = distribute(input, ChunkPlacement(self.context, input.dim() - 2, self.context.inner_axes))
        return input.like(self.normalise(input.local))

    def describe(self) -> tuple[str, str]:
        return "w/z: each head by itself", "w over z"


def make_norm(name: str, module: nn.Module, why: str, context: ModelContext, *, of_heads: bool) -> Adapter:
    """Return the adapter of a norm of the residual stream, or of a norm of attention heads."""
    formula = norm_formula_of(module)
    if formula is None:
        raise ValueError("it computes neither an RMS norm nor a LayerNorm of the last dim; give it WholeTensors()")
    place = context.grid, context.policy, formula.features
    if not of_heads:
        layer = Norm(*place, kind=formula.kind, bias=formula.bias is not None, shift=formula.shift)
        return NormAdapter(name, context, why, layer, formula)
    if formula.kind != "rms":
        raise ValueError("HeadNormParallel() is for RMS norms; give it WholeTensors()")
    return HeadNormAdapter(name, context, why, HeadNorm(*place, shift=formula.shift), formula)


class EmbeddingAdapter(LayerAdapter[Embedding]):
    """Runs the embedding of tokens."""

    takes_sequences = True

    def __call__(self, module: nn.Module, forward: Callable[..., Any], input: Tensor) -> Tensor:  # noqa: ARG002
        if (own := own_ids(self.context, input)) is not None:
            ids, cut = own
            return SequenceTensor(to_shown(self._look_up(ids)), cut, self.context)
        if isinstance(input, SequenceTensor):
            return input.like(to_shown(self._look_up(input.local)))
        return self._look_up(input)

    def _look_up(self, input: Tensor) -> GridTensor:
        ids, context = to_whole(input), self.context
        features = self.layer.specs["weight"].shape[1]
        # the layer looks up what it is given, which may have as many ids as a sequence
        tokens, context.own_tokens = context.own_tokens, None
        try:
            return GridTensor(self.layer(ids), RestPlacement(context), (*ids.shape, features))
        finally:
            context.own_tokens = tokens

    def describe(self) -> tuple[str, str]:
        return "w[V/x, k/y]/z: ids -> rest", "w over z, leave over x"


def make_embedding(name: str, module: Any, why: str, context: ModelContext) -> Adapter:
    """Return the adapter of an embedding of tokens."""
    if not is_embedding(module):
        raise ValueError("EmbeddingParallel() is for nn.Embedding and subclasses that call its forward")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise ValueError("max_norm, scale_grad_by_freq and sparse do not work on a table that is cut; leave them out")
    layer = Embedding(context.grid, context.policy, *module.weight.shape, untrained=module.padding_idx)
    return EmbeddingAdapter(name, context, why, layer)


# modules that run their own code


class GatheredAdapter(Adapter[Layer]):
    """Runs a module's own code. The parameters are gathered over z while it runs."""

    takes_sequences = True

    def __init__(
        self, name: str, context: ModelContext, why: str, module: nn.Module, *, whole_inputs: bool = False
    ) -> None:
        super().__init__(name, context, why, Layer(context.grid, context.policy))
        self.whole_inputs = whole_inputs
        """Whether the plan asked for whole inputs; otherwise the code gets cut tensors until it needs whole ones."""
        for own, parameter in module.named_parameters(recurse=False):
            storage = WHOLE if parameter.dim() else Layout(())
            self.layer.declare(own, Spec(tuple(parameter.shape), storage, REPEATED))

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:
        return self.context.policy.compute_dtype if self.layer.specs and not autocast else None

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = self.context
        if self.whole_inputs or self.name in context.whole_input_modules:
            args, kwargs = tree_map_only(GridTensor, GridTensor.whole, (args, kwargs))
            args, kwargs = tree_map_only(SequenceTensor, lambda a: a.like(to_whole(a.local)), (args, kwargs))
        if not self.layer.specs:
            return forward(*args, **kwargs)
        tensors = self._gather()
        # The module's code reads `self.weight`, so the gathered tensors take the places of the shards while it runs.
        names = {own: f"{f'{self.name}.{own}'.lstrip('.')} ({type(module).__name__})" for own in tensors}
        versions = {own: version_of(tensor) for own, tensor in tensors.items()}
        shards = {own: module._parameters[own] for own in tensors}
        module._parameters.update(tensors)  # type: ignore[arg-type]
        ids = {id(tensor): names[own] for own, tensor in tensors.items()}
        context.gathered_names |= ids
        context.own_code.append(self.name)
        try:
            result = forward(*args, **kwargs)
        finally:
            context.own_code.pop()
            replaced = [own for own in tensors if module._parameters.get(own) is not tensors[own]]
            module._parameters.update(shards)
            # the tensors may be freed now, and other tensors may get the same ids
            context.gathered_names = {key: name for key, name in context.gathered_names.items() if key not in ids}
        # a change is found by torch's count of in-place changes: the gathered tensor is dropped, so it would be lost
        written = [own for own, tensor in tensors.items() if version_of(tensor) != versions[own]]
        if isinstance(module, nn.RNNBase):
            # cuDNN lays its weights out anew, which changes no numbers; drop the references that it keeps to them
            module._flat_weights, written = [], []
        if replaced or written:
            raise lost_change_error(names[(replaced or written)[0]])
        return result

    def _gather(self) -> dict[str, Tensor]:
        """Gather the parameters, those of one dtype in one message."""
        found: dict[str, Tensor] = {}
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, spec in self.layer.specs.items():
            parameter = getattr(self.layer, name)
            if spec.shape:
                by_dtype.setdefault(parameter.dtype, []).append(name)
            else:
                # without dims it is not cut, and cannot travel with the others
                found[name] = ReadWhole.apply(self.context, f"{self.name}.{name}".lstrip("."), spec, parameter)
        for names in by_dtype.values():
            found |= gather_parameters(self.layer, names)
        return {name: found[name] for name in self.layer.specs}

    def describe(self) -> tuple[str, str]:
        if not self.layer.specs:
            return "its own code on whole tensors", "inputs made whole"
        if operation := self.context.whole_input_modules.get(self.name):
            layout = f"cut over z: its own code on whole tensors (it uses {operation})"
            return layout, "parameters over z, inputs made whole"
        return "cut over z: its own code", "parameters over z"


def lost_change_error(name: str) -> RuntimeError:
    """Return the error for a parameter that model code changes in forward."""
    return RuntimeError(
        f"{name} is changed in forward, where it is a gathered copy: the change would be lost; change parameters "
        "outside of forward, on their shards"
    )


class ReadWhole(torch.autograd.Function):
    """Gathers a parameter over all axes that cut it. Every rank of a place finds its whole gradient."""

    @staticmethod
    def forward(ctx: Any, context: ModelContext, name: str, spec: Spec, parameter: nn.Parameter) -> Tensor:
        ctx.context, ctx.name, ctx.spec, ctx.parameter = context, name, spec, parameter
        ctx.during = context.gradients.forward_pass
        ctx.during.use([id(parameter)])
        held = local_of(parameter).detach()
        if held.is_floating_point():
            held = held.to(context.policy.compute_dtype or held.dtype)  # cast before it travels
        # a clone, because on a grid of one rank the gathered tensor is the shard itself
        return comm.join(held, spec.storage, spec.shape, context.grid, label=name).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        if ctx.parameter.requires_grad:  # it may have been frozen since
            ctx.context.gradients.deposit_whole(ctx.name, ctx.parameter, ctx.spec, gradient, during=ctx.during)
        return None, None, None, None


class HeadsAdapter(GatheredAdapter):
    """Runs a module with attention heads as the last dim of its output, such as a table of biases, and keeps the heads
    of this rank."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = super().__call__(module, forward, *args, **kwargs)
        return distribute(out, ChunkPlacement(self.context, out.dim() - 1, self.context.inner_axes))

    def describe(self) -> tuple[str, str]:
        return "cut over z: its own code, then by heads", "parameters over z"

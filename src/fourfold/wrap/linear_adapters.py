"""Adapters of linear layers and of torch's attention.

Layers that read the same tensor share one `enter`, one product and one `spread` (`SharedInput`). Model code calls these
layers one after the other. The first call computes the results of all of them, and the other layers find theirs if they
are given the same tensor. If one of them gets another tensor, as in attention that looks at an encoder's output, the
group is split when the pass ends and no longer reads together.

A linear layer may compute its weight from other parameters (weight norm, spectral norm, any parametrisation).
nn.MultiheadAttention holds three layers in `in_proj_weight`; its queries, keys and values are cut by head, as in any
other attention.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import comm
from fourfold.layout import CONTRACT_WEIGHT, EXPAND_WEIGHT, FEATURES, REPEATED, WHOLE, Layout, Spec, inner
from fourfold.nn.attention import Heads, read_heads
from fourfold.nn.embedding import Head
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Contract, Expand, expand_in_turns, read
from fourfold.operators import collect, enter, leave, spread
from fourfold.wrap.adapters import Adapter, GatheredAdapter, L, LayerAdapter, LayerParameter, PlainSlice
from fourfold.wrap.detect import LinearForm
from fourfold.wrap.grid_tensor import GridTensor, ModelContext, distribute, to_shown, to_whole, version_of
from fourfold.wrap.placements import (
    ChunkPlacement,
    LogitsPlacement,
    RestPlacement,
    SharedHeadsPlacement,
    conjugate,
    fuse,
    to_rest,
)
from fourfold.wrap.plan import ContractParallel, ExpandParallel, HeadParallel
from fourfold.wrap.sequence_tensor import SequenceTensor, by_token

# layers that read the same tensor


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """The heads of an attention that reads q, k and v together."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def sizes(self) -> list[int]:
        """The numbers of features of q, k and v."""
        return [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]

    def fits(self, sizes: Sequence[int], parts: int) -> bool:
        """Return whether layers of these sizes are this q, k and v, and each of the parts has whole query heads."""
        return list(sizes) == self.sizes and self.heads % parts == 0 and self.heads % self.kv_heads == 0


class SharedInput:
    """Layers that read one tensor together, in the order in which they are called."""

    def __init__(self, readers: Sequence[ExpandAdapter], counts: HeadCounts | None = None) -> None:
        self.readers, self.counts = tuple(readers), counts
        self.claimed: set[ExpandAdapter] = set()
        """The readers that have asked for their result since all results were computed."""
        for reader in readers:
            reader.shared_input = self

    def read(self, reader: ExpandAdapter, a: Tensor) -> GridTensor:
        """Return the reader's result for a tensor, and compute the results of all readers if there are none yet."""
        context = reader.context
        if len(self.readers) == 1 and len(reader.layers) > 1 and not context.is_cut:
            # nothing is cut: the layers' weights lie side by side, and their output need not be taken apart
            return _expand_as_one(context, reader.layers, a)
        if len(self.readers) == 1:
            return _joined(expand_all(context, reader.layers, a, self.counts))
        # the same tensor, unchanged since it was read: identity is not enough, because code may change it in place
        state = state_of(a)
        read, read_in, found = context.shared_reads.get(self, (None, None, {}))
        if read is not a or read_in != state or reader not in found:
            layers = [layer for r in self.readers for layer in r.layers]
            outs = iter(expand_all(context, layers, a, self.counts))
            found = {r: _joined([next(outs) for _ in r.layers]) for r in self.readers}
            context.shared_reads[self] = a, state, found
            self.claimed = set()
        self.claimed.add(reader)
        if len(self.claimed) == len(self.readers):
            del context.shared_reads[self]  # all results are handed out: let go of the tensor
        return found.pop(reader)

    def split(self) -> None:
        """Separate the readers that asked for their result from those that did not."""
        SharedInput([reader for reader in self.readers if reader in self.claimed])
        SharedInput([reader for reader in self.readers if reader not in self.claimed])


def state_of(a: Tensor) -> tuple[bool, int | None]:
    """Return the state in which a result for a tensor stays valid: whether gradients are on, and the version."""
    return torch.is_grad_enabled(), version_of(a)


def expand_all(
    context: ModelContext, layers: Sequence[Expand], a: Tensor, counts: HeadCounts | None
) -> list[GridTensor]:
    """Return the outputs [..., n_i] of all layers for a tensor [..., k], features cut over x and y."""
    resting = to_rest(a, context)
    leading, tokens = resting.shape[:-1], prod(resting.shape[:-1])
    placements = [inner_placement(context, layer, len(leading)) for layer in layers]
    if counts is None:
        outs = context.engine.alone(expand_in_turns(layers, resting.local, tokens))
    else:
        held = Heads.of(counts.heads, counts.kv_heads, context.grid, context.policy)
        outs = list(context.engine.alone(read_heads(layers, resting.local, tokens, held)))
        if held.shared:
            group = counts.heads // counts.kv_heads
            wanted = range(held.queries.start // group, (held.queries.stop - 1) // group + 1)
            dim, sizes = len(leading), (counts.kv_heads, counts.head_dim)
            shared = SharedHeadsPlacement(context, dim, context.inner_axes, *sizes, wanted, held.queries, group)
            placements[1:] = [shared, shared]
            # of the K and V heads in this rank's output, keep those that its queries read
            first = (wanted.start - held.keys.start) * counts.head_dim
            width = len(wanted) * counts.head_dim
            outs[1:] = [out.narrow(1, first, width).contiguous() for out in outs[1:]]
    widths = [layer.vocab if isinstance(layer, Head) else layer.out_features for layer in layers]
    return [
        GridTensor(out.view(*leading, out.shape[-1]), placement, (*leading, width))
        for out, placement, width in zip(outs, placements, widths, strict=True)
    ]


def inner_placement(context: ModelContext, layer: Layer, dim: int) -> ChunkPlacement:
    """Return the placement in which an Expand layer leaves its output, with features as dim `dim`."""
    if isinstance(layer, Head):
        return LogitsPlacement(context, dim, context.inner_axes, layer)
    return ChunkPlacement(context, dim, context.inner_axes)


def _expand_as_one(context: ModelContext, layers: Sequence[Expand], a: Tensor) -> GridTensor:
    """Return the output of all layers of one weight as one tensor, on a grid where nothing is cut."""
    resting = to_rest(a, context)
    leading = resting.shape[:-1]
    out = context.engine.alone(read(layers, resting.local, prod(leading)))
    return GridTensor(out, ChunkPlacement(context, len(leading), context.inner_axes), (*leading, out.shape[-1]))


def _joined(outs: Sequence[GridTensor]) -> GridTensor:
    return outs[0] if len(outs) == 1 else fuse(outs)


# linear layers


class LinearAdapter(LayerAdapter[L]):
    """Runs a module that is a linear layer, whatever its names for weight and bias are.

    The plain module may hold several layers in one weight; each of them is cut by itself and stored as a parameter of
    its own.
    """

    form: LinearForm  # type: ignore[assignment]
    treats_tokens_alike = True

    def __init__(self, name: str, context: ModelContext, why: str, *layers: L, form: LinearForm) -> None:
        super().__init__(name, context, why, *layers)
        self.form = form

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        return self.form.accepts(args, kwargs)

    def parameters(self) -> Mapping[str, LayerParameter]:
        found: dict[str, LayerParameter] = {}
        first, several = 0, len(self.layers) > 1
        for index, layer in enumerate(self.layers):
            rows = range(first, first + layer.specs["weight"].shape[0])
            first = rows.stop
            for inside in layer.specs:
                own, transposed = self.form.names[inside], self.form.transposed and inside == "weight"
                part = PlainSlice(own, rows if several else None, transposed)
                found[f"{own}_{index}" if several else own] = layer, inside, part
        return found


class ExpandAdapter(LinearAdapter[Expand]):
    """Runs a linear layer from rest to inner, or several that the plain module holds in one weight."""

    shared_input: SharedInput

    def __init__(
        self,
        name: str,
        context: ModelContext,
        why: str,
        *layers: Expand,
        form: LinearForm,
        counts: HeadCounts | None = None,
    ) -> None:
        super().__init__(name, context, why, *layers, form=form)
        SharedInput([self], counts)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> GridTensor:  # noqa: ARG002
        (input,) = (*args, *kwargs.values())
        return self.shared_input.read(self, input)

    def describe(self) -> tuple[str, str]:
        if len(self.layers) > 1:
            sizes = " + ".join(str(layer.out_features) for layer in self.layers)
            return f"w[({sizes})/x, k/y]/z: rest -> inner", "one enter over x, w over z, one spread over y"
        others = [reader.name.rpartition(".")[2] for reader in self.shared_input.readers if reader is not self]
        shared = f" together with {', '.join(others)}" if others else ""
        return "w[n/x, k/y]/z: rest -> inner", f"enter over x{shared}, w over z, spread over y"


class ContractAdapter(LinearAdapter[Contract]):
    """Runs a linear layer from inner to rest."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> GridTensor:  # noqa: ARG002
        (input,) = (*args, *kwargs.values())
        a = distribute(input, ChunkPlacement(self.context, input.dim() - 1, self.context.inner_axes))
        leading = a.shape[:-1]
        out = self.layer(a.local.reshape(prod(leading), a.local.shape[-1]), prod(leading))
        return GridTensor(out, RestPlacement(self.context), (*leading, self.layer.out_features))

    def describe(self) -> tuple[str, str]:
        return "w[k/y, n/x]/z: inner -> rest", "collect over y, w over z, leave over x"


def make_linear(
    name: str,
    module: nn.Module,
    style: ExpandParallel | ContractParallel | HeadParallel,
    why: str,
    context: ModelContext,
    form: LinearForm | None,
    counts: HeadCounts | None,
) -> Adapter:
    """Return the adapter of a linear layer; `counts` are the heads of the attention around it."""
    if form is None:
        raise ValueError(
            f"{type(style).__name__}() is for linear layers that use their weight as nn.Linear does; "
            "give it WholeTensors()"
        )
    contracts = isinstance(style, ContractParallel)
    if form.computed:
        return (ComputedContractAdapter if contracts else ComputedExpandAdapter)(name, context, why, module, form)
    place, bias = (context.grid, context.policy, form.inputs), form.bias is not None
    if contracts:
        return ContractAdapter(name, context, why, Contract(*place, form.outputs, bias=bias), form=form)
    if isinstance(style, HeadParallel):
        return ExpandAdapter(name, context, why, Head(*place, form.outputs, bias=bias), form=form)
    sizes = sizes_of_parts(style, form.outputs, counts)
    if len(sizes) == 1 and style.parts not in (1, "qkv"):
        raise ValueError(
            f"ExpandParallel(parts={style.parts}): {form.outputs} outputs are not {style.parts} equal layers"
        )
    inner_parts = inner(context.policy.activations).parts(context.grid.shape.sizes, FEATURES)
    if len(sizes) == 1 or style.parts != "qkv" or counts is None or not counts.fits(sizes, inner_parts):
        counts = None
    layers = [Expand(*place, size, bias=bias) for size in sizes]
    return ExpandAdapter(name, context, why, *layers, form=form, counts=counts)


def sizes_of_parts(style: ExpandParallel, outputs: int, counts: HeadCounts | None) -> list[int]:
    """Return the out-features of each layer that a weight holds."""
    if style.parts == "qkv" and counts is not None and sum(counts.sizes) == outputs:
        return counts.sizes
    number = 3 if style.parts == "qkv" else int(style.parts)
    return [outputs // number] * number if outputs % number == 0 else [outputs]


# linear layers that compute their weight


class ComputedWeightAdapter(GatheredAdapter):
    """Runs a linear layer that computes its weight from other parameters.

    The parameters are gathered over z and the module's own code computes the weight, whole and the same on every rank
    of x and y. Each rank multiplies by its block of the weight and finds the gradient of that block. The blocks are
    gathered, so the whole gradient goes back through the code that computed the weight.

        Expand     a [m/(zx), k/y] -> enter -> [m/z, k/y] -> a W[n/x, k/y]^T -> {sum y} -> spread -> [m/z, n/(xy)]
        Contract   a [m/z, k/(xy)] -> collect -> [m/z, k/x] -> a W[n/y, k/x]^T -> {sum x} -> leave -> [m/(zx), n/y]
    """

    form: LinearForm  # type: ignore[assignment]
    treats_tokens_alike, takes_sequences = True, False

    def __init__(self, name: str, context: ModelContext, why: str, module: nn.Module, form: LinearForm) -> None:
        super().__init__(name, context, why, module)
        self.form = form

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:
        return None if autocast else self.context.policy.compute_dtype

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        return self.form.accepts(args, kwargs)

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
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
    """Runs a linear layer with a computed weight, from rest to inner."""

    def product(self, a: Tensor, weight: Tensor) -> GridTensor:
        resting = to_rest(a, self.context)
        leading = resting.shape[:-1]
        site = self.layer.site(prod(leading))
        # both waits are at once: the product needs the whole input, and the caller's code needs the output
        owed = functional.linear(enter(resting.local, site).wait(), self.block(weight, EXPAND_WEIGHT.compute))
        out = spread(owed, site, [owed.shape[1]]).wait()
        placement = ChunkPlacement(self.context, len(leading), self.context.inner_axes)
        return GridTensor(out.view(*leading, out.shape[1]), placement, (*leading, self.form.outputs))

    def describe(self) -> tuple[str, str]:
        return "computed w[n/x, k/y]: rest -> inner", "enter over x, spread over y, gradients of w over x and y"


class ComputedContractAdapter(ComputedWeightAdapter):
    """Runs a linear layer with a computed weight, from inner to rest."""

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


# torch's attention


class MultiheadAdapter(Adapter[Layer]):
    """Runs an nn.MultiheadAttention with each rank's heads.

    Each of the three layers of `in_proj_weight` is cut by itself and stored as its part; the module's own `out_proj`
    leads back to the stream. The module's own code runs for inputs that it refuses or that have no batch dim.
    """

    takes_sequences = True

    def __init__(self, name: str, context: ModelContext, why: str, module: nn.MultiheadAttention) -> None:
        self.features, self.sizes = module.embed_dim, (module.embed_dim, module.kdim, module.vdim)
        self.packed, bias = module.in_proj_weight is not None, module.in_proj_bias is not None
        place = context.grid, context.policy
        self.readers = [Expand(*place, size, self.features, bias=bias) for size in self.sizes]
        self.extra = Layer(*place)
        """Holds the key and the value that are added to every row, which all ranks read whole."""
        for own in ("bias_k", "bias_v"):
            if module._parameters.get(own) is not None:
                self.extra.declare(own, Spec((1, 1, self.features), WHOLE, REPEATED))
        super().__init__(name, context, why, *self.readers, self.extra)

    def parameters(self) -> Mapping[str, LayerParameter]:
        found: dict[str, LayerParameter] = {}
        for index, (layer, letter) in enumerate(zip(self.readers, "qkv", strict=True)):
            rows = range(index * self.features, (index + 1) * self.features)
            if self.packed:
                found[f"in_proj_weight_{index}"] = layer, "weight", PlainSlice("in_proj_weight", rows)
            else:
                found[f"{letter}_proj_weight"] = layer, "weight", PlainSlice(f"{letter}_proj_weight")
            if "bias" in layer.specs:
                found[f"in_proj_bias_{index}"] = layer, "bias", PlainSlice("in_proj_bias", rows)
        return found | {own: (self.extra, own, PlainSlice(own)) for own in self.extra.specs}

    def input_dtype(self, *, autocast: bool) -> torch.dtype | None:
        own: Any = self.readers[0].weight
        return self.context.policy.compute_dtype or (own.dtype if autocast else None)

    def __call__(
        self,
        module: Any,
        forward: Callable[..., Any],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """Take and return what the module's own forward does."""
        inputs = (query, key, value)
        if not self._fits(module, inputs, key_padding_mask, attn_mask, causal=is_causal):
            return forward(*inputs, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        q, k, v = (_by_head(a, module) for a in self._read(*inputs))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _merge_masks(attn_mask, key_padding_mask, q)
        for added in self._added(module, k):
            k, v = (torch.cat([a, more], dim=2) for a, more in zip((k, v), added, strict=True))
            mask = None if mask is None else functional.pad(mask, (0, 1))
        dropout = module.dropout if module.training else 0.0
        if not need_weights:
            mixed = functional.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
            return module.out_proj(_by_row(mixed, module)), None
        # as torch computes it, which scales the queries and not the scores: the rounding differs
        scores = (q * math.sqrt(1 / q.shape[-1])) @ k.transpose(-2, -1)
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        weights = functional.dropout(weights, dropout) if dropout else weights
        out = module.out_proj(_by_row(weights @ v, module))
        return out, weights.mean(dim=1) if average_attn_weights else weights

    def _fits(
        self,
        module: Any,
        inputs: tuple[Tensor, Tensor, Tensor],
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        *,
        causal: bool,
    ) -> bool:
        """Return whether the inputs have a batch dim and all shapes are those that torch asks for."""
        if any(a.is_nested or a.dim() != 3 for a in inputs) or tuple(a.shape[-1] for a in inputs) != self.sizes:
            return False
        query, key, value = (a.shape[:2] if module.batch_first else a.shape[1::-1] for a in inputs)
        rows, length, keys = *query, key[1]
        if key != (rows, keys) or value != (rows, keys) or (causal and attn_mask is None):
            return False

        def fits(mask: Tensor | None, *shapes: tuple[int, ...]) -> bool:
            if mask is None:
                return True
            return (mask.dtype is torch.bool or mask.dtype.is_floating_point) and tuple(mask.shape) in shapes

        by_head = (rows * module.num_heads, length, keys)
        return fits(key_padding_mask, (rows, keys)) and fits(attn_mask, (length, keys), by_head)

    def _read(self, query: Tensor, key: Tensor, value: Tensor) -> Sequence[Tensor]:
        """Return q, k and v with features cut; layers that read the same tensor read it together."""
        q, k, v = self.readers
        # identity, because comparing numbers would read the device
        if query is key is value:
            groups = [([q, k, v], query)]
        elif key is value:
            groups = [([q], query), ([k, v], key)]
        else:
            groups = [([q], query), ([k], key), ([v], value)]
        return [out for layers, a in groups for out in self._expand(layers, a)]

    def _expand(self, layers: Sequence[Expand], a: Tensor) -> Sequence[Tensor]:
        if isinstance(a, SequenceTensor):
            return by_token(lambda own: self._expand(layers, own), a)
        return [to_shown(out) for out in expand_all(self.context, layers, a, None)]

    def _added(self, module: Any, keys: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the keys and values [rows, heads, 1, head_dim] that are added to those of every row."""
        shape = (keys.shape[0], keys.shape[1], 1, keys.shape[3])
        if self.extra.specs:
            key, value = (to_whole(added).view(1, *shape[1:]).expand(shape) for added in (module.bias_k, module.bias_v))
            yield key, value
        if module.add_zero_attn:
            zeros = torch.zeros(shape, dtype=keys.dtype, device=keys.device)
            yield zeros, zeros

    def describe(self) -> tuple[str, str]:
        apart = "" if self.packed else " apart"
        return f"q, k, v{apart}: w[n/x, k/y]/z: rest -> heads", "enter over x, w over z, spread over y"


def _by_head(a: Tensor, module: Any) -> Tensor:
    """[rows, seq, features], or [seq, rows, features] without batch_first, -> [rows, heads, seq, head_dim]."""
    apart = a.unflatten(-1, (module.num_heads, -1))
    return apart.transpose(1, 2) if module.batch_first else apart.permute(1, 2, 0, 3)


def _by_row(a: Tensor, module: Any) -> Tensor:
    """[rows, heads, seq, head_dim] -> the shape of the module's inputs."""
    return (a.transpose(1, 2) if module.batch_first else a.permute(2, 0, 1, 3)).flatten(2)


def _merge_masks(attn_mask: Tensor | None, key_padding_mask: Tensor | None, queries: Tensor) -> Tensor | None:
    """Return both masks as one that is added to scores [rows, heads, seq, keys]."""
    masks: list[Tensor] = []
    if attn_mask is not None:
        by_head = attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, tuple(queries.shape[:2]))
        masks.append(to_whole(by_head))
    if key_padding_mask is not None:
        masks.append(to_whole(key_padding_mask)[:, None, None])
    # in a boolean mask True hides a key
    found = [mask if mask.is_floating_point() else _hiding(mask, queries.dtype) for mask in masks]
    return sum(found[1:], found[0]) if found else None


def _hiding(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)

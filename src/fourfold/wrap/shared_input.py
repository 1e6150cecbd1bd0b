"""Layers that read the same tensor share one `enter`, one product and one `spread`.

Model code calls these layers one after the other. The first call computes the results of all of them, and the other
layers find theirs if they are given the same tensor. If one of them gets another tensor, as in attention that looks at
an encoder's output, the group is split when the pass ends and no longer reads together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Size, Tensor

from fourfold.nn.attention import Heads, read_heads
from fourfold.nn.embedding import Head
from fourfold.nn.linear import Expand, expand_in_turns, read
from fourfold.wrap.context import ModelContext
from fourfold.wrap.grid_tensor import GridTensor, TensorPlacement, version_of
from fourfold.wrap.placements import ChunkPlacement, LogitsPlacement, SharedHeadsPlacement, to_rest


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


class InputReader(Protocol):
    """An adapter of one linear layer, or of several in one weight (`adapters.ExpandAdapter`)."""

    name: str
    context: ModelContext
    shared_input: SharedInput

    @property
    def layers(self) -> Sequence[Expand]: ...

    def joined(self, outs: Sequence[GridTensor]) -> GridTensor: ...


class SharedInput:
    """Layers that read one tensor together, in the order in which they are called."""

    def __init__(self, readers: Sequence[InputReader], counts: HeadCounts | None = None) -> None:
        self.readers, self.counts = tuple(readers), counts
        self.claimed: set[InputReader] = set()
        """The readers that have asked for their result since all results were computed."""
        for reader in readers:
            reader.shared_input = self

    def read(self, reader: InputReader, a: Tensor) -> GridTensor:
        """Return the reader's result for a tensor, and compute the results of all readers if there are none yet."""
        context = reader.context
        if len(self.readers) == 1 and len(reader.layers) > 1 and not context.is_cut:
            return _expand_as_one(context, reader.layers, a)
        if len(self.readers) == 1:
            return reader.joined(expand_all(context, reader.layers, a, self.counts))
        state = state_of(a)
        read, read_in, found = context.shared_reads.get(self, (None, None, {}))
        if read is not a or read_in != state or reader not in found:
            layers = [layer for r in self.readers for layer in r.layers]
            outs = iter(expand_all(context, layers, a, self.counts))
            found = {r: r.joined([next(outs) for _ in r.layers]) for r in self.readers}
            context.shared_reads[self] = a, state, found
            self.claimed = set()
        self.claimed.add(reader)
        if len(self.claimed) == len(self.readers):
            # all results are handed out: let go of the tensor
            context.unfinished_reads.discard(self)
            del context.shared_reads[self]
        else:
            context.unfinished_reads.add(self)
        return found.pop(reader)

    def split(self) -> None:
        """Separate the readers that asked for their result from those that did not."""
        SharedInput([reader for reader in self.readers if reader in self.claimed])
        SharedInput([reader for reader in self.readers if reader not in self.claimed])


def state_of(a: Tensor) -> tuple[bool, int | None]:
    """Return the state in which a result for a tensor stays valid: whether gradients are on, and the version."""
    return torch.is_grad_enabled(), version_of(a.local if isinstance(a, GridTensor) else a)


def expand_all(
    context: ModelContext, layers: Sequence[Expand], a: Tensor, counts: HeadCounts | None
) -> list[GridTensor]:
    """Return the outputs [..., n_i] of all layers for a tensor [..., k], features cut over x and y."""
    resting = to_rest(a, context)
    leading, tokens = resting.shape[:-1], prod(resting.shape[:-1])
    dim, over = len(leading), context.inner_axes
    if counts is not None:
        held = Heads.of(counts.heads, counts.kv_heads, context.grid, context.policy)
        outs = list(context.engine.alone(read_heads(layers, resting.local, tokens, held)))
        if held.shared:
            group = counts.heads // counts.kv_heads
            wanted = range(held.queries.start // group, (held.queries.stop - 1) // group + 1)
            shared = SharedHeadsPlacement(
                context, dim, over, counts.kv_heads, counts.head_dim, wanted, held.queries, group
            )
            # of the K and V heads in this rank's output, keep those that its queries read
            first = (wanted.start - held.keys.start) * counts.head_dim
            width = len(wanted) * counts.head_dim
            outs[1:] = [out.narrow(1, first, width).contiguous() for out in outs[1:]]
            by_layer: list[TensorPlacement] = [ChunkPlacement(context, dim, over), shared, shared]
            return [_on_grid(*each, leading) for each in zip(outs, by_layer, layers, strict=True)]
    else:
        outs = context.engine.alone(expand_in_turns(layers, resting.local, tokens))
    placements = [
        LogitsPlacement(context, dim, over, layer) if isinstance(layer, Head) else ChunkPlacement(context, dim, over)
        for layer in layers
    ]
    return [_on_grid(*each, leading) for each in zip(outs, placements, layers, strict=True)]


def _expand_as_one(context: ModelContext, layers: Sequence[Expand], a: Tensor) -> GridTensor:
    """Return the output of all layers of one weight as one tensor, on a grid where nothing is cut."""
    resting = to_rest(a, context)
    leading = resting.shape[:-1]
    out = context.engine.alone(read(layers, resting.local, prod(leading)))
    return GridTensor(out, ChunkPlacement(context, len(leading), context.inner_axes), (*leading, out.shape[-1]))


def _on_grid(out: Tensor, placement: TensorPlacement, layer: Expand, leading: Size) -> GridTensor:
    width = layer.vocab if isinstance(layer, Head) else layer.out_features
    return GridTensor(out.view(*leading, out.shape[-1]), placement, (*leading, width))

"""Layers that read the same tensor: one `enter`, one product, one `spread` for all of them.

Model code calls them one after the other. The first call reads for all, and the others find their result if they are
given the same tensor. Where one of them is given another tensor after all, as in attention that looks at an encoder,
the group is parted when the pass ends and does so no more.
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
from fourfold.wrap.layouts import Columns, Shared
from fourfold.wrap.placed import Blocks, Placed, PlacedLayout, Rest, laid, version_of
from fourfold.wrap.run import Run


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Of an attention whose q, k and v are read together."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def sizes(self) -> list[int]:
        """Features of q, k and v."""
        return [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]

    def lie_so(self, sizes: Sequence[int], parts: int) -> bool:
        """Whether layers of these sizes are such q, k and v, and so many parts have whole heads of q each."""
        return list(sizes) == self.sizes and self.heads % parts == 0 and self.heads % self.kv_heads == 0


class Reads(Protocol):
    """A linear layer of the model, or several in one weight."""

    name: str
    run: Run
    together: Together

    @property
    def layers(self) -> Sequence[Expand]: ...

    def joined(self, outs: Sequence[Placed]) -> Placed: ...


class Together:
    """Readers of one tensor, in the order in which they are called."""

    def __init__(self, readers: Sequence[Reads], counts: HeadCounts | None = None) -> None:
        self.readers, self.counts = tuple(readers), counts
        self.claimed: set[Reads] = set()
        """Those that were asked for since all were read."""
        for reader in readers:
            reader.together = self

    def read(self, reader: Reads, a: Tensor) -> Placed:
        run = reader.run
        if len(self.readers) == 1 and len(reader.layers) > 1 and not run.cuts:
            return read_side_by_side(run, reader.layers, a)
        if len(self.readers) == 1:
            return reader.joined(read_all(run, reader.layers, a, self.counts))
        state = state_of(a)
        read, read_in, found = run.reads.get(self, (None, None, {}))
        if read is not a or read_in != state or reader not in found:
            found = self._read_all(a)
            run.reads[self] = a, state, found
            self.claimed = set()
        self.claimed.add(reader)
        if len(self.claimed) == len(self.readers):
            run.shared.discard(self)
            del run.reads[self]
        else:
            run.shared.add(self)
        return found.pop(reader)

    def part(self) -> None:
        """Those that were asked for go on without the others."""
        Together([reader for reader in self.readers if reader in self.claimed])
        Together([reader for reader in self.readers if reader not in self.claimed])

    def _read_all(self, a: Tensor) -> dict[Reads, Placed]:
        outs = iter(read_all(self.readers[0].run, [layer for r in self.readers for layer in r.layers], a, self.counts))
        return {reader: reader.joined([next(outs) for _ in reader.layers]) for reader in self.readers}


def state_of(a: Tensor) -> tuple[bool, int | None]:
    """What was found for a tensor holds as long as nobody changes it, and with the gradients that were on."""
    return torch.is_grad_enabled(), version_of(a.local if isinstance(a, Placed) else a)


def at_rest(a: Tensor, run: Run) -> Placed:
    return a.laid(Rest(run)) if isinstance(a, Placed) else laid(a, Rest(run))


def read_all(run: Run, layers: Sequence[Expand], a: Tensor, counts: HeadCounts | None) -> list[Placed]:
    """What the layers make of a tensor [..., k]: each [..., n_i], features cut over x and y."""
    resting = at_rest(a, run)
    leading, tokens = resting.shape[:-1], prod(resting.shape[:-1])
    if counts is not None:
        held = Heads.of(counts.heads, counts.kv_heads, run.grid, run.policy)
        outs = list(run.engine.alone(read_heads(layers, resting.local, tokens, held)))
        if held.shared:
            layout = _shared(run, counts, held, len(leading))
            outs[1:] = [_held_heads(out, held.keys, layout, counts.head_dim) for out in outs[1:]]
            layouts: list[PlacedLayout] = [Blocks(run, len(leading), run.over), layout, layout]
            return [_placed(*each, leading) for each in zip(outs, layouts, layers, strict=True)]
    else:
        outs = run.engine.alone(expand_in_turns(layers, resting.local, tokens))
    layouts = [
        Columns(run, len(leading), run.over, layer) if isinstance(layer, Head) else Blocks(run, len(leading), run.over)
        for layer in layers
    ]
    return [_placed(*each, leading) for each in zip(outs, layouts, layers, strict=True)]


def read_side_by_side(run: Run, layers: Sequence[Expand], a: Tensor) -> Placed:
    """What the layers of one weight make of a tensor, as one: on a grid where nothing is cut it need not be parted."""
    resting = at_rest(a, run)
    leading = resting.shape[:-1]
    out = run.engine.alone(read(layers, resting.local, prod(leading)))
    return Placed(out, Blocks(run, len(leading), run.over), (*leading, out.shape[-1]))


def _placed(out: Tensor, layout: PlacedLayout, layer: Expand, leading: Size) -> Placed:
    width = layer.vocab if isinstance(layer, Head) else layer.out_features
    return Placed(out.view(*leading, out.shape[-1]), layout, (*leading, width))


def _shared(run: Run, counts: HeadCounts, held: Heads, dim: int) -> Shared:
    group = counts.heads // counts.kv_heads
    read = range(held.queries.start // group, (held.queries.stop - 1) // group + 1)
    return Shared(run, dim, run.over, counts.kv_heads, counts.head_dim, read, held.queries, group)


def _held_heads(out: Tensor, keys: range, layout: Shared, head_dim: int) -> Tensor:
    """Of the heads in this rank's K or V those that its queries read."""
    first = (layout.held.start - keys.start) * head_dim
    return out.narrow(1, first, len(layout.held) * head_dim).contiguous()

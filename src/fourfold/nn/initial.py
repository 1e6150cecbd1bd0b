"""Initial weights that depend on the seed and the parameter's name only, never on the grid.

A tensor is drawn in blocks of rows; each block has a generator of its own, seeded by (seed, name, block).
A rank draws the blocks that its shard touches and keeps its columns of them, so no rank ever holds a whole
large weight. Values are drawn in fp32 on the CPU whatever dtype and device they end up in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fourfold.layout import Init

BLOCK_ELEMENTS = 1 << 18


def key_of(*parts: object) -> int:
    """A seed of 63 bits from any mix of texts and numbers, the same in every process."""
    digest = hashlib.blake2b("\0".join(str(part) for part in parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@torch.no_grad()
def fill_(local: Tensor, box: Sequence[range], shape: Sequence[int], init: Init, seed: int, name: str) -> None:
    """Fill a shard with its part `box` of the initial tensor of this global shape."""
    if init.std == 0:
        local.fill_(init.mean)
        return
    if local.numel() == 0:
        return
    row = prod(shape[1:])
    block_rows = max(1, BLOCK_ELEMENTS // row)
    columns = tuple(slice(part.start, part.stop) for part in box[1:])
    generator = torch.Generator("cpu")
    for block in range(box[0].start // block_rows, -(-box[0].stop // block_rows)):
        first = block * block_rows
        generator.manual_seed(key_of(seed, name, block))
        rows = min(block_rows, shape[0] - first)
        drawn = torch.randn(rows, *shape[1:], generator=generator, dtype=torch.float32, device="cpu")
        start, stop = max(first, box[0].start), min(first + block_rows, box[0].stop)
        part = drawn[(slice(start - first, stop - first), *columns)]
        local[start - box[0].start : stop - box[0].start].copy_(part.mul_(init.std).add_(init.mean))

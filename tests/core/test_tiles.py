"""Attention over tiles equals dense attention with a mask, in values and gradients, and needs no memory for a mask."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fourfold.nn.attention import document_positions, positions_on_device
from fourfold.tiles import (
    Documents,
    Pack,
    Reading,
    Tile,
    Tiles,
    Unreading,
    _packs,
    attend,
    document_tiles,
    pad_lengths,
)

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def tensors(queries: int, keys: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    sizes = (queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)
    made = (torch.randn(*size, WIDTH, generator=generator, dtype=torch.float64) for size in sizes)
    return [part.to(dtype).requires_grad_() for part in made]


def mask_of(tiles: list[Tile], queries: int, keys: int) -> Tensor:
    """What the tiles say, pair by pair."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for tile in tiles:
        rows, columns = len(tile.queries) // tile.times, len(tile.keys) // tile.times
        for copy in range(tile.times):
            for row in range(rows):
                read = columns - (rows - 1 - row) if tile.causal else columns
                first = tile.keys.start + copy * columns
                mask[tile.queries.start + copy * rows + row, first : first + read] = True
    return mask


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def whole(length: int) -> range:
    return range(length)


CASES = {
    "one document": (document_tiles([9]), 9, 9),
    "documents": (document_tiles([3, 5, 5, 5, 1, 1, 2]), 22, 22),
    "documents of one token": (document_tiles([1] * 7), 7, 7),
    "a part with what comes before it": ([Tile(whole(4), whole(11))], 4, 11),
    "two parts of one document": ([Tile(range(3), range(5)), Tile(range(3, 7), range(12))], 7, 12),
    "parts of several documents": (
        [Tile(range(2), range(1, 6)), Tile(range(4, 6), range(6, 11)), Tile(range(2, 4), range(12, 15))], 6, 15,
    ),
    "two parts of each of two documents": (
        [Tile(range(start, start + 2), range(keys, keys + read)) for start, keys, read in
         ((0, 0, 3), (2, 0, 8), (4, 9, 2), (6, 9, 7))], 8, 16,
    ),
    "all read all": ([Tile(whole(5), whole(8), causal=False)], 5, 8),
    "several tiles of one query": (
        [Tile(range(4), part, causal=part.start == 9) for part in (range(3), range(6, 9), range(9, 14))], 4, 14,
    ),
    "keys that nobody reads": ([Tile(range(2), range(4, 8)), Tile(range(2, 5), range(10, 13))], 5, 20),
}  # fmt: skip


def by_lengths(q: Tensor, k: Tensor, v: Tensor, *lengths: object) -> tuple[Tensor, ...]:
    """Stands for FlashAttention: reads tile by tile what a `Pack` describes. Also returns the tiles."""
    *ends, _, _, _, causal = lengths
    pairs = zip(*((pairwise(each.tolist())) for each in ends if isinstance(each, Tensor)), strict=True)
    tiles = Tiles(Tile(range(*queries), range(*keys), bool(causal)) for queries, keys in pairs if len(range(*queries)))
    reading = Reading(q)
    reading.read(k, v, tiles)
    return *reading.result(), tiles


class FakeFlash:
    """The kernel for many lengths, on the CPU."""

    def __init__(self) -> None:
        self.calls = 0

    def _flash_attention_forward(self, q: Tensor, k: Tensor, v: Tensor, *options: object) -> tuple[Tensor, ...]:
        self.calls += 1
        with plain_kernels():
            out, lse, _ = by_lengths(q, k, v, *options[:-1])
        return out, lse.t()

    def _flash_attention_backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: object) -> list[Tensor]:
        out, lse, *options = rest
        with plain_kernels():
            tiles = by_lengths(q, k, v, *options[:-2])[2]
            gradients = Unreading(dout, q, out, lse.t())
            dk, dv = gradients.unread(k, v, tiles)
        return [gradients.dq, dk, dv]


@contextmanager
def plain_kernels() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fourfold.tiles.takes_packs", lambda _: False)
        patch.setattr("torch.ops.aten", ATEN)
        yield


ATEN = torch.ops.aten


@pytest.mark.parametrize("kernel", ["fused", "products", "packs"])
@pytest.mark.parametrize("name", CASES)
def test_tiles_equal_a_dense_mask(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's kernel for the CPU, with products, and in the calls that a GPU's kernel for many lengths gets."""
    monkeypatch.setattr("fourfold.tiles._has_fused", lambda _: kernel != "products")
    if kernel == "packs":
        monkeypatch.setattr("fourfold.tiles.takes_packs", lambda _: True)
        monkeypatch.setattr("torch.ops.aten", FakeFlash())
    tiles, queries, keys = Tiles(CASES[name][0]), *CASES[name][1:]
    given, expected = tensors(queries, keys), tensors(queries, keys)
    out, right = attend(*given, tiles), dense(*expected, mask_of(tiles, queries, keys))
    torch.testing.assert_close(out, right, rtol=0, atol=1e-14)
    weights = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(0))
    for result in (out, right):
        (result * weights).sum().backward()
    for mine, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-14)


def test_random_tiles_equal_a_dense_mask() -> None:
    """Parts of random documents, as members of a group hold them, which read what comes before them."""
    drawn = random.Random(1)
    for _ in range(20):
        tiles, first, keys = [], 0, 0
        for _ in range(drawn.randint(1, 5)):
            begin, length, after = drawn.randint(0, 6), drawn.randint(1, 6), drawn.randint(0, 3)
            tiles.append(Tile(range(first, first + length), range(keys, keys + begin + length)))
            first, keys = first + length, keys + begin + length + after
        drawn.shuffle(tiles)
        given = tensors(first, keys)
        expected = dense(*given, mask_of(tiles, first, keys))
        torch.testing.assert_close(attend(*given, Tiles(tiles)), expected, rtol=0, atol=1e-14)


def test_keys_may_come_part_by_part() -> None:
    q, k, v = tensors(5, 12)
    reading = Reading(q.detach())
    for part in (range(7, 12), range(4, 7), range(4)):  # the square, and what comes before it in two parts
        span = slice(part.start, part.stop)
        reading.read(k[span], v[span], Tiles([Tile(range(5), range(len(part)), causal=part.start == 7)]))
    out, lse = reading.result()
    tiles = Tiles([Tile(range(5), range(12))])
    torch.testing.assert_close(out, attend(q, k, v, tiles), rtol=0, atol=1e-14)
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, dim=1)) / WIDTH**0.5
    expected = scores.masked_fill(~mask_of(tiles, 5, 12)[:, None], -torch.inf).logsumexp(2)
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-14)


def test_sums_of_bf16_are_in_fp32() -> None:
    """A query of many tiles: were each result rounded, errors would add up."""
    q, k, v = (part.detach() for part in tensors(4, 400, torch.bfloat16))
    parts = Tiles(Tile(range(4), range(start, start + 4), causal=False) for start in range(0, 396, 4))
    exact = attend(*(part.double() for part in (q, k, v)), parts)
    off = (attend(q, k, v, parts).double() - exact).abs().max()
    once = (exact.bfloat16().double() - exact).abs().max()
    assert off < 4 * once


def test_equal_documents_share_a_tile() -> None:
    assert document_tiles([4, 4, 4]) == (Tile(range(12), range(12), times=3),)
    assert document_tiles([1, 2, 2]) == (Tile(range(1), range(1)), Tile(range(1, 5), range(1, 5), times=2))


def test_what_is_impossible_is_refused() -> None:
    q, k, v = tensors(4, 4)
    with pytest.raises(ValueError, match="a causal tile of 4 queries has at least as many keys, not 2"):
        attend(q, k, v, Tiles([Tile(range(4), range(2))]))
    for tiles in ([Tile(range(1, 4), range(1, 4))], [Tile(range(2), range(2)), Tile(range(3, 4), range(3, 4))]):
        with pytest.raises(ValueError, match="tiles must cover all 4 queries"):
            attend(q, k, v, Tiles(tiles))
    with pytest.raises(ValueError, match="a causal tile of 2 queries has at least as many keys, not 1"):
        packs_of([Tile(range(2), range(1))])


def packs_of(tiles: list[Tile]) -> list[Pack]:
    return list(_packs(tiles, torch.device("cpu")))


def test_documents_are_one_call_of_a_gpu_and_parts_of_one_are_two() -> None:
    """Parts of a document overlap in their keys, so they are in two calls; keys that nobody reads get no query."""
    (pack,) = packs_of(list(document_tiles([3, 5, 5, 2])))
    assert pack.queries == pack.keys == slice(0, 15) and pack.lengths_q.tolist() == [0, 3, 8, 13, 15]
    front, back = packs_of(CASES["two parts of each of two documents"][0])
    assert front.lengths_k.tolist() == [0, 3, 9, 11] and front.lengths_q.tolist() == [0, 2, 2, 4]
    assert isinstance(front.queries, Tensor) and front.queries.tolist() == [0, 1, 4, 5]
    assert back.lengths_k.tolist() == [0, 8, 9, 16] and back.keys == slice(0, 16)
    assert front.first and back.first


def test_a_device_finds_documents_by_their_positions() -> None:
    """With room for more documents than there are, the rest are empty; the sizes of the tables do not change."""
    lengths = [3, 5, 1, 7, 2, 2, 12]
    padded = pad_lengths(lengths, 32)
    assert padded.tolist() == lengths + [0] * 9
    assert len(pad_lengths([1] * 40, 64)) == 64 and len(pad_lengths([1], 64 * 50)) == 50
    positions = positions_on_device(padded, torch.Size((2, 16)))
    assert positions.flatten().tolist() == document_positions(lengths).tolist()
    pack = Documents(positions, len(padded))._pack
    assert pack.lengths_q.tolist() == [0, 3, 8, 9, 16, 18, 20] + [32] * 12
    assert pack.longest_q == 16
    across = Documents(document_positions([20, 12]).view(2, 16), 2)  # is cut where its row ends
    assert across._pack.lengths_q.tolist() == [0, 16, 20, 32, 32]


def test_dropout_keeps_documents_apart() -> None:
    q, k, v = (part.detach() for part in tensors(6, 6))
    v = torch.cat([v[:3], torch.full_like(v[3:], 1e6)])
    torch.manual_seed(0)
    out = attend(q, k, v, document_tiles([3, 3]), 0.5)
    assert out[:3].abs().max() < 1e3
    assert (out[3:] == 0).any() and out[3:].abs().max() >= 1e6

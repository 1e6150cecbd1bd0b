"""Attention over tiles equals dense attention with a mask, in values and gradients, and needs no memory for a mask."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fourfold.tiles import Reading, Tile, attend, document_tiles

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
    "one document": (list(document_tiles([9])), 9, 9),
    "documents": (list(document_tiles([3, 5, 5, 5, 1, 1, 2])), 22, 22),
    "documents of one token": (list(document_tiles([1] * 7)), 7, 7),
    "a part with what comes before it": ([Tile(whole(4), whole(11))], 4, 11),
    "two parts of one document": ([Tile(range(3), range(5)), Tile(range(3, 7), range(12))], 7, 12),
    "equal parts of several documents": ([Tile(whole(6), whole(15), times=3)], 6, 15),
    "all read all": ([Tile(whole(5), whole(8), causal=False)], 5, 8),
    "several tiles of one query": (
        [Tile(range(4), part, causal=part.start == 9) for part in (range(3), range(6, 9), range(9, 14))], 4, 14,
    ),
    "keys that nobody reads": ([Tile(range(2), range(4, 8)), Tile(range(2, 5), range(10, 13))], 5, 20),
}  # fmt: skip


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_tiles_equal_a_dense_mask(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's kernel for the CPU, and with products, as on other devices."""
    monkeypatch.setattr("fourfold.tiles._has_fused", lambda _: fused)
    tiles, queries, keys = CASES[name]
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
        torch.testing.assert_close(attend(*given, tiles), expected, rtol=0, atol=1e-14)


def test_keys_may_come_part_by_part() -> None:
    q, k, v = tensors(5, 12)
    reading = Reading(q.detach())
    for part in (range(7, 12), range(4, 7), range(4)):  # the square, and what comes before it in two parts
        span = slice(part.start, part.stop)
        reading.read(k[span], v[span], [Tile(range(5), range(len(part)), causal=part.start == 7)])
    out, lse = reading.result()
    tiles = [Tile(range(5), range(12))]
    torch.testing.assert_close(out, attend(q, k, v, tiles), rtol=0, atol=1e-14)
    scores = torch.einsum("qhd,khd->qhk", q, k.repeat_interleave(2, dim=1)) / WIDTH**0.5
    expected = scores.masked_fill(~mask_of(tiles, 5, 12)[:, None], -torch.inf).logsumexp(2)
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-14)


def test_sums_of_bf16_are_in_fp32() -> None:
    """A query of many tiles: were each result rounded, errors would add up."""
    q, k, v = (part.detach() for part in tensors(4, 400, torch.bfloat16))
    parts = [Tile(range(4), range(start, start + 4), causal=False) for start in range(0, 396, 4)]
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
        attend(q, k, v, [Tile(range(4), range(2))])
    for tiles in ([Tile(range(1, 4), range(1, 4))], [Tile(range(2), range(2)), Tile(range(3, 4), range(3, 4))]):
        with pytest.raises(ValueError, match="tiles must cover all 4 queries"):
            attend(q, k, v, tiles)


def test_dropout_keeps_documents_apart() -> None:
    q, k, v = (part.detach() for part in tensors(6, 6))
    v = torch.cat([v[:3], torch.full_like(v[3:], 1e6)])
    torch.manual_seed(0)
    out = attend(q, k, v, document_tiles([3, 3]), 0.5)
    assert out[:3].abs().max() < 1e3
    assert (out[3:] == 0).any() and out[3:].abs().max() >= 1e6

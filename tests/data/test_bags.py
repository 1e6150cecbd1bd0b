"""Bags of whole documents: every token a target once an epoch, the same bags on every grid, positions to go on from."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.data import token_files
from fourfold.data.bags import LEAST, MOST_PADDING, BagOrder, check_bag_rows, padding, steps_of_epochs
from fourfold.data.loader import Loader, TokenBatch
from fourfold.data.sampling import cut_windows
from fourfold.data.token_files import MegatronPair, NanoGPTFile, TokenFile, TokenSource, TokenWriter
from fourfold.nn.attention import document_positions
from fourfold.shape import Shape

SEQ, ROWS, VOCAB = 8, 12, 60_000


class Documents(TokenSource):
    """Documents of these lengths in memory, of tokens first, first + 1, ..."""

    vocab, eod = VOCAB, 0

    def __init__(self, lengths: Sequence[int], first: int = 1, name: str = "documents") -> None:
        self.name, self.tokens = name, sum(lengths)
        self._ids: Any = torch.arange(first, first + self.tokens)
        self._begins = torch.tensor([0, *accumulate(lengths)][:-1])

    def read(self, start: int, stop: int) -> Tensor:
        return self._ids[start:stop]

    def document_starts(self, start: int, stop: int) -> Tensor:
        return self._begins[(self._begins >= start) & (self._begins < stop)]


def lengths_of(number: int, longest: int, seed: int = 0) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randint(1, longest if drawn.random() < 0.2 else 9) for _ in range(number)]


def seat(shape: Shape = Shape(), rank: int = 0) -> Any:
    return SimpleNamespace(shape=shape, rank=rank, device=torch.device("cpu"), agree=lambda *_: None)


def loader(sources: Sequence[TokenSource], grid: Any = None, weights: Any = None, **options: Any) -> Loader:
    given: Any = {"rows": ROWS, "seq": SEQ, "vocab": VOCAB, "bag_rows": 3, **options}
    return Loader(sources, weights, grid or seat(), **given)


def order_of(source: TokenSource, bags: int, tokens: int, **options: Any) -> BagOrder:
    windows = [cut_windows(source.name, source.tokens, SEQ, options.pop("held_out", 0.0))]
    return BagOrder([source], windows, None, options.pop("seed", 0), bags=bags, tokens=tokens)


# --- one bag


@pytest.fixture
def three(tmp_path: Path) -> TokenFile:
    """Documents 1 2 3 E, 4 E, 5 6 7 E, with E = 9."""
    with TokenWriter(tmp_path / "three.tokens", vocab=10, eod=9, tokenizer={}) as writer:
        for ids in ([1, 2, 3], [4], [5, 6, 7]):
            writer.append(torch.tensor(ids))
            writer.end_document()
    return TokenFile(tmp_path / "three.tokens")


def test_a_bag_by_hand(three: TokenFile) -> None:
    """The three documents have 3, 1 and 3 inputs, longest first; one token is left."""
    with loader([three], vocab=10, rows=2, seq=4, bag_rows=2) as batches:
        ((tokens, targets, positions, documents),) = batches.next()
        assert batches.real_tokens == 7
    assert positions is not None
    assert tokens.shape == targets.shape == positions.shape == (1, 8)
    assert tokens[0].tolist() in ([1, 2, 3, 5, 6, 7, 4, 9], [5, 6, 7, 1, 2, 3, 4, 9])
    assert targets[0].tolist() in ([2, 3, 9, 6, 7, 9, 9, -100], [6, 7, 9, 2, 3, 9, 9, -100])
    assert positions[0].tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert documents == (3, 3, 1, 1)


def test_padding_is_short_documents() -> None:
    assert padding(0) == []
    assert padding(MOST_PADDING) == [MOST_PADDING]
    assert padding(2 * MOST_PADDING + 3) == [MOST_PADDING, MOST_PADDING, 3]


def test_a_bag_is_consistent() -> None:
    with loader([Documents(lengths_of(200, 24))]) as batches:
        for _ in range(20):
            (batch,) = batches.next()
            check(batch, 3 * SEQ)


def check(batch: TokenBatch, size: int) -> None:
    """Every target is the token behind its input, in the same document; lengths and positions say the same."""
    tokens, targets, positions, documents = batch
    assert positions is not None and documents is not None
    assert tokens.shape[1] == size and sum(documents) == tokens.numel()
    assert torch.equal(positions.flatten(), document_positions(documents))
    ends = set(accumulate(documents))
    assert all(row * size in ends for row in range(1, len(tokens) + 1)), "no document lies in two bags"
    real = targets != -100
    assert torch.equal(targets[real], tokens[real] + 1)
    inside = real.flatten()[:-1] & (positions.flatten()[1:] > 0)
    assert torch.equal(targets.flatten()[:-1][inside], tokens.flatten()[1:][inside])


# --- epochs


@pytest.mark.parametrize("longest", [24, 25, 60])  # as long as a bag, one token more, several pieces
@pytest.mark.parametrize("bags", [1, 4])
def test_every_token_but_the_first_of_a_document_is_a_target_once_in_each_epoch(longest: int, bags: int) -> None:
    lengths = [*lengths_of(60, longest + 1), longest + 1]
    order, source = order_of(Documents(lengths), bags, 24), Documents(lengths)
    expected = [
        token for number in range(source.documents) for token in source.read(*_span(source.document(number)))[1:]
    ]
    seen: Counter[int] = Counter()
    for _ in range(80):
        pieces = [piece for bag in order.take_bags() for piece in bag]
        for piece in pieces:
            assert 1 <= piece.inputs <= 24
            seen.update(range(piece.start + 2, piece.start + piece.inputs + 2))  # the targets; token i has the id i + 1
    epochs, rest = divmod(order.sample, len(order.pieces[0]))
    assert epochs > 2
    late = Counter(token for sample in order.waiting for token in range(*_targets(order.inputs(*sample))))
    begun = [order.inputs(0, epochs * len(order.pieces[0]) + number) for number in range(rest)]
    started = Counter(token for inputs in begun for token in range(*_targets(inputs)))
    assert seen + late == Counter({int(token): epochs for token in expected}) + started


def _span(tokens: range) -> tuple[int, int]:
    return tokens.start, tokens.stop


def _targets(inputs: range) -> tuple[int, int]:
    return inputs.start + 2, inputs.stop + 2


def test_every_epoch_and_seed_has_an_order_of_its_own() -> None:
    source = Documents([5] * 40)
    orders = [[order_of(source, 1, 20, seed=seed).inputs(0, number).start for number in range(80)] for seed in (0, 1)]
    for found in orders:
        assert sorted(found[:40]) == sorted(found[40:]) == list(range(0, 200, 5))
        assert found[:40] != found[40:]
    assert orders[0] != orders[1]


def test_held_out_tokens_are_no_targets() -> None:
    """20 windows, of which a quarter is held out: training ends with token 120, inside a document."""
    order = order_of(Documents([50, 65, 45]), 2, 80, held_out=0.25)
    assert [order.pieces[0][number] for number in range(3)] == [range(49), range(50, 114), range(115, 120)]
    assert len(order.pieces[0]) == 3


def test_none_waits_for_ever() -> None:
    """Documents of 13 and 12 tokens never fit a bag of 24 together, but each is the oldest one at some time."""
    order, waits = order_of(Documents([14, 13] * 100), 1, 20), Counter()
    for _ in range(300):
        order.take_bags()
        waits = Counter({sample: waits[sample] + 1 for sample in order.waiting})
        assert max(waits.values()) <= LEAST
        assert len(order.waiting) <= LEAST


def test_little_is_padding_and_bags_are_about_equal() -> None:
    drawn = random.Random(1)
    lengths = [max(2, int(drawn.lognormvariate(4.5, 1.0))) for _ in range(3000)]
    order = order_of(Documents(lengths), 4, 4096)
    for _ in range(20):
        bags = order.take_bags()
        real = sum(piece.inputs for bag in bags for piece in bag)
        assert real > 0.995 * 4 * 4096
        work = [sum(piece.inputs**2 for piece in bag) for bag in bags]
        beside = [total - max(piece.inputs for piece in bag) ** 2 for total, bag in zip(work, bags, strict=True)]
        assert max(beside) < sum(work) / len(work), "no bag has more than its share but for one long document"


def test_weights_are_shares_of_tokens() -> None:
    """The second source has documents ten times as long."""
    sources = [Documents([11] * 300), Documents([101] * 300, 10_000, "long")]
    with loader(sources, weights=[3, 1], bag_rows=12, seq=64, rows=12) as batches:
        seen: Counter[bool] = Counter()
        for _ in range(10):
            ((_, targets, *_),) = batches.next()
            seen.update((targets[targets != -100] >= 10_000).tolist())
    assert seen[False] / seen[True] == pytest.approx(3, rel=0.1)


def test_the_steps_of_epochs() -> None:
    source = Documents(lengths_of(400, 24))
    steps = steps_of_epochs(order_of(source, 4, 24), Fraction(3))
    order = order_of(source, 4, 24)
    for _ in range(steps):
        order.take_bags()
    assert 3 <= order.sample / len(order.pieces[0]) < 3.3  # some documents are drawn before they are needed


# --- grids


def steps_of(shape: Shape, source: TokenSource, steps: int, state: Any = None, **options: Any) -> list[Tensor]:
    """[2, bags, tokens of a bag] of whole steps, joined from the places of a grid."""
    joined: list[dict[int, Tensor]] = [{} for _ in range(steps)]
    for rank in range(shape.world):
        with loader([source], seat(shape, rank), **options) as batches:
            if state is not None:
                batches.restore(state)
            for places in joined:
                mine = torch.cat([torch.stack(batch[:2]) for batch in batches.next()], dim=1)
                torch.testing.assert_close(places.setdefault(shape.row_place(rank), mine), mine)
    return [torch.cat([places[place] for place in sorted(places)], dim=1) for places in joined]


@pytest.mark.parametrize("stored", [0, 3])
def test_bags_and_positions_do_not_depend_on_the_grid(stored: int) -> None:
    source = Documents(lengths_of(150, 40))
    with loader([source]) as batches:
        for _ in range(stored):
            batches.next()
        state = json.loads(json.dumps(batches.state()))
        expected = [torch.stack(batches.next()[0][:2]) for _ in range(3)]
    cases = [
        (Shape(z=2, data=2), 1),
        (Shape(x=2), 4),
        (Shape(z=2), 2),
        (Shape(z=4, context=2), 1),
        (Shape(data=2, context=2), 2),
    ]
    for shape, micro_steps in cases:
        found = steps_of(shape, source, 3, state, micro_steps=micro_steps)
        assert torch.equal(torch.stack(found), torch.stack(expected))
    assert not torch.equal(torch.stack(steps_of(Shape(), source, 3, seed=1)), torch.stack(expected))


def test_a_whole_micro_batch_may_be_one_bag() -> None:
    """context = z*data: all ranks have one bag, with documents as long as all rows."""
    source = Documents([ROWS * SEQ + 1] * 3)
    for rank in range(4):
        with loader([source], seat(Shape(z=2, data=2, context=4), rank), bag_rows=ROWS) as batches:
            (batch,) = batches.next()
        assert batch.documents == (ROWS * SEQ,)
        assert batch.tokens.shape == (1, ROWS * SEQ)


def test_positions_of_other_bags_and_damaged_ones_are_refused() -> None:
    source = Documents(lengths_of(150, 40))
    with loader([source]) as batches, loader([source], bag_rows=None, documents=True) as windows:
        batches.next()
        state, before = batches.state(), batches.next()
        for given, message in (
            (windows.state(), "pack was windows, is whole"),
            ({**state, "of": {**state["of"], "tokens of a bag": 48}}, "tokens of a bag was 48, is 24"),
            ({**state, "waiting": [[0, 10**9]]}, "a document waits that was not drawn"),
            ({**state, "given_tokens": [-1]}, "a count is not a whole number"),
            ({key: state[key] for key in state if key != "waiting"}, "this position is damaged: 'waiting'"),
        ):
            with pytest.raises(ValueError, match=message):
                batches.restore(given)
        with pytest.raises(ValueError, match="pack was whole, is windows"):
            windows.restore(state)
        batches.restore(state)
        assert torch.equal(batches.next()[0].tokens, before[0].tokens)
        old = windows.state()
        del old["of"]["pack"]  # as positions of earlier versions
        assert windows.restore(old) == []


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"bag_rows=3: a place has 8 rows .* no multiple of it; use bag_rows=2, or"):
        check_bag_rows(3, 8)
    with pytest.raises(ValueError, match="bag_rows=0: a place has 12 rows"):
        loader([Documents([9] * 9)], bag_rows=0)
    with (
        pytest.raises(ValueError, match="no document of documents has two tokens"),
        loader([Documents([1] * 40)]) as batches,
    ):
        batches.next()
    (tmp_path / "raw.bin").write_bytes(struct.pack("<9H", *range(9)))
    with pytest.raises(ValueError, match=r"raw.bin does not say where documents start"):
        loader([NanoGPTFile(tmp_path / "raw.bin")])


def test_documents_that_are_cut_are_told() -> None:
    with loader([Documents([90, 25, 26, 5])]) as batches:
        assert batches.notes == [
            "2 of 4 documents are longer than a bag of 24 tokens and are cut into pieces; the longest has 89"
        ]
    with loader([Documents([25, 5])]) as batches:
        assert batches.notes == []


# --- documents of sources


def megatron(folder: Path, sequences: Sequence[int], marks: Sequence[int]) -> MegatronPair:
    begins = [0, *accumulate(sequences)][:-1]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(sequences), len(marks))
    body = struct.pack(f"<{len(sequences)}i", *sequences) + struct.pack(
        f"<{len(begins)}q", *(2 * one for one in begins)
    )
    (folder / "pair.idx").write_bytes(head + body + struct.pack(f"<{len(marks)}q", *marks))
    (folder / "pair.bin").write_bytes(struct.pack(f"<{sum(sequences)}H", *range(sum(sequences))))
    return MegatronPair(folder / "pair")


def test_documents_of_every_format(tmp_path: Path, three: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are empty; and found in blocks, as in files of any size."""
    monkeypatch.setattr(token_files, "BLOCK", 2)
    (tmp_path / "nano.bin").write_bytes(struct.pack("<7H", 1, 2, 9, 9, 3, 9, 4))
    cases: list[tuple[TokenSource, list[int]]] = [
        (three, [4, 2, 4]),
        (NanoGPTFile(tmp_path / "nano.bin", eod=9), [3, 1, 2, 1]),
        (megatron(tmp_path, [3, 1, 2, 4, 1], [0, 2, 2, 4, 5]), [4, 0, 6, 1, 0]),
        (Documents([3, 1, 1, 5, 2]), [3, 1, 1, 5, 2]),
    ]
    for source, lengths in cases:
        assert torch.cat(list(source.document_lengths())).tolist() == lengths
        assert [len(source.document(number)) for number in range(source.documents)] == lengths
        borders = [0, *accumulate(lengths)]
        assert [_span(source.document(number)) for number in range(source.documents)] == list(pairwise(borders))
        for token in range(source.tokens + 1):
            assert source.documents_before(token) == sum(start < token for start in borders[:-1])

"""Batches: every token once, the same order on every grid, positions to go on from, documents kept apart."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fourfold.data import token_files
from fourfold.data.loader import Evaluation, Loader, unigram_entropy
from fourfold.data.sampling import local_rows
from fourfold.data.token_files import HEADER_BYTES, NanoGPTFile, TokenFile, TokenSource, TokenWriter, sample_hash
from fourfold.errors import ChangedDataError
from fourfold.shape import Shape, shapes_of
from harness import grid_of

SEQ = 4


class Row(TokenSource):
    """Tokens first, first + 1, ... in memory."""

    eod = vocab = None

    def __init__(self, count: int, first: int = 0, name: str = "row") -> None:
        self.name, self.tokens = name, count
        self._ids = torch.arange(first, first + count)
        self.read_windows: list[int] = []

    has_documents = False

    def read(self, start: int, stop: int) -> Tensor:
        self.read_windows.append(start // SEQ)
        return self._ids[start:stop]

    def document_starts(self, start: int, stop: int) -> Tensor:
        raise NotImplementedError


def seat(shape: Shape, rank: int) -> Any:
    """What a loader needs of a grid, without a process."""
    return SimpleNamespace(shape=shape, rank=rank, device=torch.device("cpu"), agree=lambda *_: None)


ALONE = seat(Shape(), 0)


def loader(sources: list[TokenSource], grid: Any = ALONE, weights: Any = None, **options: Any) -> Loader:
    return Loader(sources, weights, grid, **{"rows": 24, "seq": SEQ, "vocab": 4000, "micro_steps": 1, **options})


def steps_of(shape: Shape, sources: list[TokenSource], steps: int, weights: Any = None, **options: Any) -> list[Tensor]:
    """(tokens, targets) of whole steps [2, rows, seq], joined from the places of a grid."""
    joined: list[dict[tuple[int, int], Tensor]] = [{} for _ in range(steps)]
    for rank in range(shape.world):
        coords = shape.coords(rank)
        with loader(sources, seat(shape, rank), weights, **options) as batches:
            for places in joined:
                mine = torch.cat([torch.stack([tokens, targets]) for tokens, targets, *_ in batches.next()], dim=1)
                torch.testing.assert_close(places.setdefault((coords["data"], coords["z"]), mine), mine)
    return [torch.cat([places[place] for place in sorted(places)], dim=1) for places in joined]


@pytest.mark.parametrize("shape", [Shape(), Shape(z=3), Shape(x=2, data=2), Shape(y=2, z=2, data=3)], ids=str)
@pytest.mark.parametrize("count", [96 * SEQ + 1, 95 * SEQ + 3])  # whole windows, and a short one at the end
def test_an_epoch_has_each_token_once_as_a_target(shape: Shape, count: int) -> None:
    tokens, targets = torch.cat(steps_of(shape, [Row(count)], 4), dim=1)
    real = targets != -100
    assert sorted(targets[real].tolist()) == list(range(1, count))
    assert torch.equal(tokens[real], targets[real] - 1)
    assert not tokens[~real].any() and int((~real).sum()) == 96 * SEQ + 1 - count
    assert targets[real].tolist() != list(range(1, count))


def test_order_depends_on_the_seed_alone() -> None:
    sources: list[TokenSource] = [Row(300), Row(120, 1000, "second")]
    expected = steps_of(Shape(), sources, 3, [2, 1])
    for shape in [*shapes_of(4), Shape(z=3), Shape(z=2, data=2, order=("data", "z", "y", "x"))]:
        for micro_steps in (1, 2):
            found = steps_of(shape, sources, 3, [2, 1], micro_steps=micro_steps)
            assert torch.equal(torch.stack(found), torch.stack(expected))
    assert not torch.equal(torch.stack(steps_of(Shape(), sources, 3, [2, 1], seed=1)), torch.stack(expected))
    whole = torch.cat(expected, dim=1)  # larger steps go through the same samples
    assert torch.equal(steps_of(Shape(), sources, 1, [2, 1], rows=72)[0], whole)
    assert int((whole[0, :, 0] < 1000).sum()) == 48


def test_a_rank_reads_its_own_rows_alone() -> None:
    source = Row(400)
    with loader([source], seat(Shape(z=2, data=2), 1), rows=8, micro_steps=2) as batches:
        first = batches.next()
    assert [tokens.shape for tokens, *_ in first] == [(1, SEQ)] * 2
    assert len(source.read_windows) in (2, 4)  # one step, or two if the next was read before the end


@pytest.mark.parametrize("consumed", [0, 1, 5])
def test_resuming_equals_going_on(consumed: int) -> None:
    """Also with other rows than before, and after a loader has gone somewhere else."""
    sources: list[TokenSource] = [Row(50), Row(120, 1000, "second")]
    with loader(sources, weights=[2, 1]) as batches:
        for _ in range(consumed):
            batches.next()
        stored = json.dumps(batches.state())
        expected = [batches.next()[0][1] for _ in range(4)]
    with loader(sources, weights=[2, 1]) as again:
        again.next()
        again.restore(json.loads(stored))
        assert json.dumps(again.state()) == stored
        assert all(torch.equal(again.next()[0][1], targets) for targets in expected)
    with loader(sources, weights=[2, 1], rows=48) as wider:
        wider.restore(json.loads(stored))
        assert torch.equal(wider.next()[0][1], torch.cat(expected[:2]))


def test_a_refused_position_changes_nothing() -> None:
    with loader([Row(300)]) as batches, loader([Row(301)]) as other, loader([Row(300)]) as same:
        assert torch.equal(batches.next()[0][0], same.next()[0][0])
        with pytest.raises(ValueError, match="tokens of source 0 was 301, is 300"):
            batches.restore(other.state())
        assert torch.equal(batches.next()[0][0], same.next()[0][0])


def test_held_out_windows_are_never_trained_on() -> None:
    """20 windows of which a quarter is held out, and 3 of which at least one is: 6 rows, in batches of 4."""
    sources: list[TokenSource] = [Row(20 * SEQ + 1), Row(3 * SEQ, 1000, "second")]
    trained = set(torch.stack(steps_of(Shape(), sources, 4, held_out=0.25))[:, 1].flatten().tolist())
    assert trained == {*range(1, 15 * SEQ + 1), *range(1001, 1000 + 2 * SEQ + 1)}
    for shape in (Shape(), Shape(x=2, z=2), Shape(z=2, data=2)):
        found: dict[int, list[Tensor]] = {}
        for rank in range(shape.world):
            held = Evaluation(sources, seat(shape, rank), rows=4, seq=SEQ, vocab=4000, held_out=0.25)
            coords = shape.coords(rank)
            found[coords["data"] * shape.z + coords["z"]] = [targets for _, targets, *_ in held]
            assert len(held) == len(list(held)) == 2  # as often as needed
        batches = zip(*(found[place] for place in sorted(found)), strict=True)
        targets = torch.cat([torch.cat(batch) for batch in batches])
        expected = [*range(15 * SEQ + 1, 20 * SEQ + 1), *range(1001 + 2 * SEQ, 1000 + 3 * SEQ), *[-100] * (2 * SEQ + 1)]
        assert targets.flatten().tolist() == expected


def test_few_batches_of_evaluation_are_spread_over_all() -> None:
    options = {"rows": 2, "seq": SEQ, "vocab": 4000, "held_out": 0.5}
    held = Evaluation([Row(20 * SEQ + 1), Row(20 * SEQ + 1, 1000)], ALONE, batches=2, **options)  # type: ignore[arg-type]
    assert [held.window(place) for place in range(held.windows)] == [(0, 10), (0, 15), (1, 10), (1, 15)]
    assert len(list(held)) == len(held) == 2
    for changes in ({"held_out": 0.0}, {"batches": 0}):
        with pytest.raises(ValueError, match="nothing to evaluate on"):
            Evaluation([Row(100)], ALONE, **{**options, **changes})  # type: ignore[arg-type]


@pytest.fixture
def three(tmp_path: Path) -> Iterator[TokenFile]:
    """Documents 1 2 3 E, 4 E, 5 6 7 E, with E = 9: ten tokens."""
    with TokenWriter(tmp_path / "three.tokens", vocab=10, eod=9, tokenizer={}) as writer:
        for ids in ([1, 2, 3], [4], [5, 6, 7]):
            writer.append(torch.tensor(ids))
            writer.end_document()
    yield TokenFile(tmp_path / "three.tokens")


def test_documents_by_hand(three: TokenFile) -> None:
    """Windows of 4: 1 2 3 E | 4 E 5 6 | 7 (E) and three tokens that fill it up."""
    with loader([three], rows=3, vocab=10, documents=True) as batches:
        ((tokens, targets, positions, documents),) = batches.next()
    assert positions is not None and documents is not None
    found = {row[0]: row for row in tokens.tolist()}
    assert found == {1: [1, 2, 3, 9], 4: [4, 9, 5, 6], 7: [7, 9, 9, 9]}
    first, second, third = (tokens[:, 0].tolist().index(token) for token in (1, 4, 7))
    assert targets[[first, second, third]].tolist() == [[2, 3, 9, -100], [9, -100, 6, 7], [9, -100, -100, -100]]
    assert positions[[first, second, third]].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2]]
    lengths = {1: (4,), 4: (2, 2), 7: (1, 3)}
    assert documents == tuple(length for first in tokens[:, 0].tolist() for length in lengths[first])


def test_without_documents_text_runs_on(three: TokenFile) -> None:
    with loader([three], rows=3, vocab=10) as batches:
        ((tokens, targets, positions, documents),) = batches.next()
    assert positions is None and documents is None
    assert targets[tokens[:, 0].tolist().index(4)].tolist() == [9, 5, 6, 7]


def test_sources_that_do_not_fit_the_model_are_refused(three: TokenFile, tmp_path: Path) -> None:
    (tmp_path / "raw.bin").write_bytes(struct.pack("<9H", 1, 2, 3, 4, 5, 6, 77, 8, 9))
    raw, ending = NanoGPTFile(tmp_path / "raw.bin"), NanoGPTFile(tmp_path / "raw.bin", eod=50)
    for source, options, message in (
        (three, {"vocab": 9}, r"three.tokens has ids 0 to 9, but the model has vocab=9; .* with vocab=10 or more"),
        (raw, {"documents": True}, r"raw.bin does not say where documents start; .*as its eod"),
        (ending, {"vocab": 50}, r"raw.bin has eod=50, but the ids of a model with vocab=50 are 0 to 49"),
        (raw, {"seq": 8, "held_out": 0.5}, r"raw.bin of 9 tokens is too short"),
        (raw, {"micro_steps": 0}, "micro_steps=0"),
        (raw, {"micro_steps": 5}, r"24 rows cannot be cut over data\*z\*micro_steps = 1\*1\*5"),
    ):
        with pytest.raises(ValueError, match=message):
            loader([source], **options)
    message = r"raw.bin has the id 77 at token 6, but the model's ids are 0 to 49; .* with vocab=78 or more"
    with loader([raw], vocab=50, rows=2) as batches:
        for _ in range(2):  # it is not forgotten
            with pytest.raises(ValueError, match=message):
                batches.next()
        assert batches.state()["sample"] == 0
    with pytest.raises(ValueError, match=r"raw.bin has the id 77 at token 6"):
        unigram_entropy(raw, 50)


def test_the_thread_ends_with_the_loader() -> None:
    before = threading.active_count()
    batches = loader([Row(100)])
    batches.next()
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before
    with pytest.raises(RuntimeError, match="this loader is closed"):
        batches.next()


def test_unigram_entropy_by_hand(tmp_path: Path) -> None:
    """Half of the trained tokens are 1, a quarter each 2 and 3; the last 8 of 16 are held out or not asked for."""
    (tmp_path / "a.bin").write_bytes(struct.pack("<16H", *[1, 1, 2, 3] * 2, *[5] * 8))
    source = NanoGPTFile(tmp_path / "a.bin")
    expected = 1.5 * math.log(2)
    assert unigram_entropy(source, 10, most=8) == pytest.approx(expected)
    assert unigram_entropy(source, 10, held_out=0.54) == pytest.approx(expected)
    assert unigram_entropy(source, 10) == pytest.approx(math.log(2) + 0.5 * expected)


def read_on_grid(shape: Shape) -> tuple[list[list[int]], list[list[int]]]:
    grid = grid_of(shape)
    with loader([Row(400)], grid, rows=8, micro_steps=2) as batches, loader([Row(400)], rows=8) as whole:
        found = torch.cat([tokens.cpu() for tokens, *_ in batches.next()])
        return found.tolist(), local_rows(whole.next()[0][0], grid).tolist()


def test_on_real_ranks_a_loader_gives_the_local_rows(ranks: Any) -> None:
    found = ranks(4).run(read_on_grid, Shape(x=2, z=2))
    assert all(rows == expected and len(rows) == 4 for rows, expected in found)
    assert found[0] == found[1] != found[2] == found[3]


def read_what_differs(shape: Shape, folder: Path) -> tuple[str, str, str]:
    """A job: what a loader says where rank 3 has a longer source, a file of other content, and a renamed file."""
    grid = grid_of(shape)
    last = grid.rank == 3
    files = [NanoGPTFile(folder / name) for name in (("b.bin", "c.bin") if last else ("a.bin", "a.bin"))]
    return tuple(said_of(grid, source) for source in (Row(401 if last else 400), *files))


def said_of(grid: Any, source: TokenSource) -> str:
    try:
        loader([source], grid).close()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_different_data_hear_of_it(ranks: Any, tmp_path: Path) -> None:
    """The content decides, not the name: the same content in a file of another name is the same data."""
    for name, last in (("a", 7), ("b", 8), ("c", 7)):
        (tmp_path / f"{name}.bin").write_bytes(struct.pack("<400H", *range(399), last))
    for tokens, content, renamed in ranks(4).run(read_what_differs, Shape(x=2, z=2), tmp_path):
        assert tokens.startswith("ranks disagree on the data: rank 0 has ") and "'tokens': 401" in tokens
        assert content.startswith("ranks disagree on the content of source 0 (")
        assert "(ranks unlike rank 0: 3)" in content
        assert renamed == ""


# Content


def bin_file(path: Path, *tokens: int) -> NanoGPTFile:
    path.write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
    return NanoGPTFile(path)


def test_a_position_on_changed_content_is_refused_unless_it_is_accepted(tmp_path: Path) -> None:
    """A file that was moved and renamed is the same; one of as many tokens of which one differs is not."""
    first, last = (bin_file(tmp_path / f"{name}.bin", *range(400), end) for name, end in (("a", 1), ("b", 2)))
    (tmp_path / "moved").mkdir()
    moved = NanoGPTFile(shutil.copy(tmp_path / "a.bin", tmp_path / "moved" / "other.bin"))
    with loader([first]) as batches:
        batches.next()
        stored = json.loads(json.dumps(batches.state()))
        expected = batches.next()[0][0]
    with loader([moved]) as again:
        assert again.restore(stored) == []
        assert torch.equal(again.next()[0][0], expected)
    with loader([last]) as other:
        said = r"differs .*: b.bin: source 0 has as many tokens as before, but other ones; give the same data"
        with pytest.raises(ChangedDataError, match=said):
            other.restore(stored)
        (note,) = other.restore(stored, accept_changes=True)
        assert note.startswith("a change of the data was accepted: b.bin: ")
        assert other.state()["sample"] == stored["sample"]
        assert other.restore(other.state()) == []  # from here on the new content is what counts
    longer = bin_file(tmp_path / "a.bin", *range(500))
    with loader([longer]) as other:
        with pytest.raises(ChangedDataError, match=r"a.bin: tokens of source 0 was 401, is 500"):
            other.restore(stored)
        (note,) = other.restore(stored, accept_changes=True)
        assert "tokens of source 0 was 401, is 500" in note
        with pytest.raises(ValueError, match="seed was 1, is 0"):  # what the config says is no change of the content
            other.restore({**stored, "of": {**stored["of"], "seed": 1}}, accept_changes=True)


def test_a_position_of_an_earlier_version_goes_on_with_a_note(tmp_path: Path) -> None:
    source = bin_file(tmp_path / "a.bin", *range(400))
    with loader([source]) as batches:
        state = batches.state()
        del state["of"]["sources"][0]["content"]
        (note,) = batches.restore(state)
    assert note == "whether the content of a.bin has changed is unknown, because the checkpoint does not identify it"


def test_the_fingerprint_sees_the_size_and_every_sampled_block(tmp_path: Path, monkeypatch) -> None:
    """Of a short file every byte; of a long one the first and last bytes, and blocks in between."""
    monkeypatch.setattr(token_files, "SAMPLE_BYTES", 8)
    monkeypatch.setattr(token_files, "SAMPLES", 4)
    path = tmp_path / "file"

    def seen(size: int) -> list[int]:
        """Return the bytes a change of which is seen."""
        content = bytes(range(size))
        path.write_bytes(content)
        before, found = sample_hash(path), []
        for place in range(size):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            found += [place] if sample_hash(path) != before else []
        path.write_bytes(content + b"x")
        assert sample_hash(path) != before
        return found

    for size in (1, 7, 8, 9, 20, 31, 32):
        assert seen(size) == list(range(size))
    assert seen(104) == [*range(8), *range(32, 40), *range(64, 72), *range(96, 104)]
    path.write_bytes(b"one header" + bytes(50))
    before = sample_hash(path, 10)
    path.write_bytes(b"an another" + bytes(50))
    assert sample_hash(path, 10) == before


def test_a_token_file_carries_the_hash_of_all_its_content(tmp_path: Path) -> None:
    """So text that was prepared again is recognized whatever differs; the names of file and tokenizer do not count."""

    def written(name: str, documents: list[list[int]], tokenizer: str = "bytes") -> dict[str, str]:
        with TokenWriter(tmp_path / name, vocab=50, eod=49, tokenizer={"name": tokenizer}) as writer:
            for ids in documents:
                writer.append(torch.tensor(ids))
                writer.end_document()
        return TokenFile(tmp_path / name).fingerprint

    first = written("a.tokens", [[1, 2, 3], [4]])
    assert first == written("b.tokens", [[1, 2, 3], [4]], "other")
    assert first["sha256"] == hashlib.sha256((tmp_path / "a.tokens").read_bytes()[HEADER_BYTES:]).hexdigest()
    for documents in ([[1, 2, 3], [5]], [[1, 2], [3, 4]], [[1, 2, 3, 49, 4]]):
        other = written("c.tokens", documents)
        assert all(other[key] != first[key] for key in ("sha256", "sampled"))

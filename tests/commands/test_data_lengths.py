"""`fourfold data lengths`: the distribution by hand, and the assignments that the runtime would make."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold.context.assign import assign_documents, assign_rows
from fourfold.data.loader import Loader
from fourfold.data.token_files import TokenFile, TokenWriter
from fourfold.grid import Grid
from runs import assert_error, cli

LENGTHS = [3, 3, 5, 9, 21, 4, 3, 3, 40, 7] * 4
SEQ, ROWS = 8, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lengths") / "corpus.tokens"
    with TokenWriter(path, vocab=100, eod=99, tokenizer={}) as writer:
        for length in LENGTHS:
            writer.append(torch.zeros(length - 1, dtype=torch.int64))
            writer.end_document()
    return path


def shown(corpus: Path, *more: str) -> dict[str, Any]:
    asked = ["data", "lengths", str(corpus), "--seq", str(SEQ), "--rows", str(ROWS), "--context", "2,3", "--bags", "5"]
    found = cli(*asked, *more, "--json", "-")
    assert found.code == 0, found.err
    return json.loads(found.out)


def test_the_distribution_by_hand(corpus: Path) -> None:
    """Four times 3, 3, 3, 3, 4, 5, 7, 9, 21, 40, which are 98 tokens."""
    found = shown(corpus)["documents"]
    assert (found["number"], found["tokens"], found["longest"]) == (40, 392, 40)
    assert found["mean"] == pytest.approx(9.8)
    assert found["quantiles"] == {"0.1": 3, "0.25": 3, "0.5": 5, "0.75": 9, "0.9": 40, "0.99": 40}
    assert found["longer_than_seq"] == pytest.approx(0.3)
    assert found["tokens_in_longer"] == pytest.approx(70 / 98)


@pytest.mark.parametrize("pack", ["windows", "whole"])
def test_assignments_are_those_of_a_model_on_batches_of_the_loader(corpus: Path, pack: str) -> None:
    """A model gets rows of windows, or a bag as one row, and adds documents of one token to make members equal."""
    bag_rows = ROWS if pack == "whole" else None
    given: Any = dict(rows=ROWS, seq=SEQ, vocab=100, documents=True, bag_rows=bag_rows)
    with Loader([TokenFile(corpus)], None, Grid.alone("cpu"), **given) as loader:
        batches = [loader.next()[0] for _ in range(5)]
    lines = {line["context"]: line for line in shown(corpus)["assignments"] if line["pack"] == pack}
    assert list(lines) == [2, 3]
    for members, line in lines.items():
        for way in ("rows", "documents"):
            placed = []
            for batch in batches:
                assert batch.documents is not None
                lengths = (*batch.documents, *[1] * (-ROWS * SEQ % members))
                shape = batch.tokens.shape
                placed.append(
                    assign_rows(*shape, lengths, members) if way == "rows" else assign_documents(lengths, members)
                )
            assert line[way]["imbalance"] == pytest.approx(sum(one.imbalance for one in placed) / 5)
            assert line[way]["worst_imbalance"] == max(one.imbalance for one in placed)
            gathered = sum((members - 1) * sum(one.lengths) for one in placed)
            assert line[way]["moved"] == pytest.approx(sum(one.moved for one in placed) / gathered)


def test_bags_are_told(corpus: Path) -> None:
    """Documents of 40 tokens have 39 inputs, which a bag of 32 cannot hold."""
    found = shown(corpus)
    assert found["cut"] == 4
    assert 0 <= found["padding"] < 0.2
    assert (found["seq"], found["rows"], found["bags"]) == (SEQ, ROWS, 5)


def test_the_text_and_a_file(corpus: Path, tmp_path: Path) -> None:
    found = cli("data", "lengths", str(corpus), "--seq", "8", "--rows", "4", "--json", str(tmp_path / "found.json"))
    assert found.code == 0
    first, *_ = lines = found.out.splitlines()
    assert first == "corpus.tokens: 392 tokens in 40 documents"
    assert "30% of them, with 71.4% of the tokens, are longer than 8 tokens" in lines
    table = [line.split() for line in lines if line.startswith(("windows", "whole"))]
    assert [cells[:2] for cells in table] == [[pack, size] for pack in ("windows", "whole") for size in "248"]
    stored = json.loads((tmp_path / "found.json").read_text())
    assert [line["context"] for line in stored["assignments"]] == [2, 4, 8] * 2


def test_text_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words that somebody wrote")
    (tmp_path / "b.bin").write_bytes(struct.pack("<9H", 1, 2, 7, 3, 7, 4, 5, 6, 7))
    sizes = ["--seq", "4", "--rows", "2", "--context", "2", "--json", "-"]
    text = cli("data", "lengths", str(tmp_path / "a.txt"), *sizes)
    assert json.loads(text.out)["documents"]["number"] == 1
    ids = cli("data", "lengths", str(tmp_path / "b.bin"), "--eod", "7", *sizes)
    assert json.loads(ids.out)["documents"]["quantiles"]["0.5"] == 3
    assert_error(cli("data", "lengths", str(tmp_path / "b.bin"), *sizes), "does not say where documents start")
    assert_error(cli("data", "lengths", str(tmp_path / "b.bin"), "--eod", "end", *sizes), "--eod end", "give the id")
    assert_error(cli("data", "lengths", str(tmp_path / "c.txt"), *sizes), "there is no 'c.txt'")

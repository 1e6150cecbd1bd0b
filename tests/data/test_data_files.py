"""Tokenizers, token files (ours and others'), text that becomes tokens, and what is said of files that are wrong."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from fourfold import cli
from fourfold.data import sources
from fourfold.data.sources import open_source, prepare, text_files
from fourfold.data.token_files import HEADER_BYTES, MegatronPair, NanoGPTFile, TokenFile, TokenSource, TokenWriter
from fourfold.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

LINES = '{"text": "one"}\n\n{"text": "two"}'
TEXTS = {"b.txt": "Grüße, 世界\n", "a/deep.md": "# deep\n", "a/more.py": "pass\n", "z.jsonl": LINES}
DOCUMENTS = ["# deep\n", "pass\n", "Grüße, 世界\n", "one", "two"]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with five documents, and files that are not text."""
    folder = tmp_path / "corpus"
    ignored = {"a/image.png": "x", ".git/config.txt": "x", ".hidden.txt": "x", "empty.txt": ""}
    for name, text in {**TEXTS, **ignored}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer.json of bytes joined into pairs, with gaps in its ids and a habit of cutting texts short."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = tokenizers.decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    tokenizer.train_from_iterator(["# deep pass one two deep pass"] * 3, trainer)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.enable_truncation(2)
    path = tmp_path / "words.json"
    tokenizer.save(str(path))
    return path


def documents(source: TokenSource) -> list[list[int]]:
    starts = [*source.document_starts(0, source.tokens).tolist(), source.tokens]
    return [source.read(start, stop).tolist() for start, stop in pairwise(starts)]


# tokenizers


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab, tokenizer.eod) == (257, 256)
    assert tokenizer.encode("aé").tolist() == tokenizer.encode("aé".encode()).tolist() == [97, 195, 169]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.decode([97, 195, 169, 256, 98]) == tokenizer.decode(torch.tensor([97, 195, 169, 98])) == "aéb"
    assert tokenizer.decode([195]) == "�"
    with pytest.raises(ValueError, match=r"the id 257 is outside of .* bytes, which has ids 0 to 256"):
        tokenizer.decode([1, 257])


def test_tokenizer_of_a_json_file(words: Path) -> None:
    tokenizer = load_tokenizer(words)
    text = "# deep pass, Grüße\n"
    ids = tokenizer.encode(text)
    assert 2 < len(ids) < len(text.encode())
    assert tokenizer.decode([*ids.tolist(), tokenizer.eod]) == text
    assert tokenizer.vocab == tokenizer.eod + 1
    assert load_tokenizer(words, eod="p").eod < 256 and load_tokenizer(words, eod=3).eod == 3


def test_tokenizers_that_cannot_be(words: Path, tmp_path: Path) -> None:
    no_end = json.loads(words.read_text())
    no_end["added_tokens"] = []
    (tmp_path / "endless.json").write_text(json.dumps(no_end))
    (tmp_path / "config.json").write_text("{}")
    for name, eod, message in (
        (
            tmp_path / "endless.json",
            None,
            r"endless.json has no token that ends a document .*<\|endoftext\|> .*eod=",
        ),
        (words, "<end>", "words.json has no token that ends a document .tried '<end>'"),
        (words, 9999, "eod=9999: .*words.json has ids 0 to"),
        (tmp_path / "config.json", None, "config.json is not a tokenizer: .*give a tokenizer.json"),
        ("bytes", 0, "eod=0: the tokenizer bytes ends documents with 256"),
    ):
        with pytest.raises(ValueError, match=message):
            load_tokenizer(name, eod)
    with pytest.raises(FileNotFoundError, match="there is no tokenizer 'byte'; give bytes or the path of"):
        load_tokenizer("byte")


def test_without_the_library_the_extra_is_named(words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'fourfold\[train\]'"):
        load_tokenizer(words)


# our token file


@pytest.mark.parametrize(("vocab", "itemsize"), [(257, 2), (65536, 2), (65537, 4), (1 << 32, 4)])
def test_token_file_gives_back_what_was_written(tmp_path: Path, vocab: int, itemsize: int) -> None:
    path = tmp_path / "a.tokens"
    with TokenWriter(path, vocab=vocab, eod=0, tokenizer={"name": "test"}) as writer:
        for ids in ([vocab - 1, 5], [], [7]):
            writer.append(torch.tensor(ids, dtype=torch.int64))
        writer.end_document()
        writer.end_document()  # an empty document leaves no trace
        writer.append(torch.tensor([9]))
    source = TokenFile(path)
    assert documents(source) == [[vocab - 1, 5, 7, 0], [9, 0]]
    assert (source.tokens, source.documents, source.vocab, source.eod) == (6, 2, vocab, 0)
    assert path.stat().st_size == HEADER_BYTES + -(-6 * itemsize // 8) * 8 + 2 * 8
    assert source.document_starts(1, 5).tolist() == [4] and source.document_starts(1, 4).tolist() == []
    with pytest.raises(IndexError, match=r"\[5, 7\) is outside of an array of 6 numbers"):
        source.read(5, 7)


def test_writing_leaves_all_or_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.tokens"
    path.write_text("what was there before")
    for ids, error in ([1], KeyboardInterrupt), ([300], ValueError), ([-1], ValueError), ([], ValueError):
        with pytest.raises(error), TokenWriter(path, vocab=257, eod=256, tokenizer={}) as writer:
            writer.append(torch.tensor(ids, dtype=torch.int64))
            if ids == [1]:
                raise KeyboardInterrupt
    with (
        pytest.raises(ValueError, match=r"the header takes .* a shorter name"),
        TokenWriter(path, vocab=257, eod=256, tokenizer={"name": "x" * HEADER_BYTES}) as writer,
    ):
        writer.append(torch.tensor([1]))
    assert os.listdir(tmp_path) == ["a.tokens"]
    assert path.read_text() == "what was there before"
    with pytest.raises(ValueError, match="eod=257 and vocab=257"):
        TokenWriter(path, vocab=257, eod=257, tokenizer={})


def damaged(whole: bytes, kind: str) -> bytes:
    header = json.loads(whole[16:HEADER_BYTES].rstrip())
    return {
        "empty": b"",
        "magic": b"notmagic" + whole[8:],
        "head cut": whole[:100],
        "version": whole[:8] + struct.pack("<I", 2) + whole[12:],
        "not json": whole[:16] + b"[" + whole[17:],
        "no vocab": whole[:12] + struct.pack("<I", 2) + b"{}".ljust(HEADER_BYTES - 16) + whole[HEADER_BYTES:],
        "dtype": whole[:16]
        + json.dumps(header).replace("uint16", "uint99").encode().ljust(HEADER_BYTES - 16)
        + whole[HEADER_BYTES:],
        "cut": whole[:-1],
        "longer": whole + b"\0",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty", "is not a token file: it starts with b'', not b'4FTOKENS'"),
        ("magic", "is not a token file: it starts with b'notmagic', not b'4FTOKENS'"),
        ("head cut", "100 of the 4096 bytes of its header"),
        ("version", "has version 2, this Fourfold reads version 1"),
        ("not json", "has a damaged header .JSONDecodeError"),
        ("no vocab", "has a damaged header .KeyError: 'dtype'"),
        ("dtype", "has a damaged header, {'dtype': 'uint99'"),
        ("cut", "3 tokens of uint16 and 1 documents take 4112 bytes, the file has 4111"),
        ("longer", "take 4112 bytes, the file has 4113"),
    ],
)
def test_damaged_token_files_are_refused(tmp_path: Path, kind: str, message: str) -> None:
    path = tmp_path / "a.tokens"
    with TokenWriter(path, vocab=257, eod=256, tokenizer={}) as writer:
        writer.append(torch.tensor([1, 2]))
    path.write_bytes(damaged(path.read_bytes(), kind))
    with pytest.raises(ValueError, match=rf"a\.tokens .*{message}.*prepare it again with `fourfold data prepare`"):
        open_source(path, tokenizer=None, cache=tmp_path)


def write_documents(path: Path, *documents: list[int]) -> Path:
    with TokenWriter(path, vocab=257, eod=256, tokenizer={}) as writer:
        for ids in documents:
            writer.append(torch.tensor(ids))
            writer.end_document()
    return path


def with_header(whole: bytes, **changes: Any) -> bytes:
    """Return the bytes of a token file with other values in its header; None takes a key out."""
    header = json.loads(whole[16:HEADER_BYTES].rstrip()) | changes
    text = json.dumps({key: value for key, value in header.items() if value is not None}).encode()
    return whole[:12] + struct.pack("<I", len(text)) + text.ljust(HEADER_BYTES - 16) + whole[HEADER_BYTES:]


def test_wrong_document_starts_and_headers_are_refused(tmp_path: Path) -> None:
    """A file of this version by its digest, and one of an earlier version if the numbers make no sense."""
    path = write_documents(tmp_path / "a.tokens", [1, 2, 3], [4], [5, 6])
    whole = path.read_bytes()
    starts = struct.pack("<3q", 0, 4, 6)
    assert whole.endswith(starts)
    wrong = {"negative": (0, -4, 6), "beyond": (0, 4, 9), "swapped": (4, 0, 6), "twice": (0, 4, 4), "late": (1, 4, 6)}
    for kind, numbers in wrong.items():
        broken = whole.removesuffix(starts) + struct.pack("<3q", *numbers)
        for content in (broken, with_header(broken, head_sha256=None)):
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"a\.tokens is damaged: .* documents do not begin one after another"):
                open_source(path, tokenizer=None, cache=tmp_path)
            assert kind
    flips = {
        "a start": whole.removesuffix(starts) + struct.pack("<3q", 0, 5, 6),
        "vocab": with_header(whole, vocab=259),
        "eod": with_header(whole, eod=2),
        "sha256": with_header(whole, sha256="0" * 64),
    }
    for kind, content in flips.items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.tokens is damaged: its header or its document starts"):
            open_source(path, tokenizer=None, cache=tmp_path)
        assert kind
    for changes in ({"vocab": 0}, {"eod": 257}, {"eod": -1}, {"vocab": 1 << 17}, {"documents": 9}, {"tokens": True}):
        path.write_bytes(with_header(whole, head_sha256=None, **changes))
        with pytest.raises(ValueError, match=r"a\.tokens (has a damaged header|is not complete)"):
            open_source(path, tokenizer=None, cache=tmp_path)
    flipped = 0
    for place in (*range(16 + struct.unpack_from("<I", whole, 12)[0]), *range(len(whole) - len(starts), len(whole))):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            found = TokenFile(path)
        except ValueError:
            flipped += 1
        else:  # in the name of a digest
            assert (found.vocab, found.eod, documents(found)) == (257, 256, [[1, 2, 3, 256], [4, 256], [5, 6, 256]])
    assert flipped > 250
    path.write_bytes(with_header(whole, head_sha256=None))  # as earlier versions wrote it
    assert documents(TokenFile(path)) == [[1, 2, 3, 256], [4, 256], [5, 6, 256]]


def test_verify_reads_every_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound, changed, outside, old = (tmp_path / f"{name}.tokens" for name in ("sound", "changed", "outside", "old"))
    whole = write_documents(sound, [1, 2, 3], [4]).read_bytes()
    changed.write_bytes(whole[:HEADER_BYTES] + b"\x07" + whole[HEADER_BYTES + 1 :])
    outside.write_bytes(whole[:HEADER_BYTES] + b"\x07\x07" + whole[HEADER_BYTES + 2 :])
    old.write_bytes(with_header(whole, head_sha256=None, sha256=None))
    (tmp_path / "nano.bin").write_bytes(struct.pack("<4H", 1, 2, 3, 4))
    (tmp_path / "a.txt").write_text("words")
    assert cli.main(["data", "verify", str(sound), str(old), str(tmp_path / "nano.bin")]) == 0
    right, without, other = capsys.readouterr().out.splitlines()
    assert right == f"{sound}: 6 tokens of 2 documents; the checksum is right"
    assert without.endswith("2 documents; it has no checksum") and "the format has no checksum" in other
    TokenFile(changed)  # opens, since only the head is compared
    assert cli.main(["data", "verify", *map(str, (changed, outside, tmp_path / "a.txt", tmp_path / "no", sound))]) == 1
    said = capsys.readouterr()
    assert "the checksum is right" in said.out
    for sentence in (
        "changed.tokens is damaged: its content has the SHA-256",
        "outside.tokens is damaged: from token 0 to 6 an id is not below vocab=257",
        "a.txt is text, which has no checksum",
        "there is no 'no' in",
    ):
        assert sentence in said.err


# files of others


def megatron(prefix: Path, sequences: list[list[int]], marks: list[int], **changes: Any) -> Path:
    """Write a pair of int32 by hand."""
    lengths = [len(sequence) for sequence in sequences]
    begins = [4 * sum(lengths[:number]) for number in range(len(lengths))]
    head = {"magic": b"MMIDIDX\0\0", "version": 1, "code": 4, "lengths": lengths, "begins": begins, **changes}
    index = head["magic"] + struct.pack("<QBQQ", head["version"], head["code"], len(lengths), len(marks))
    index += struct.pack(f"<{len(lengths)}i", *head["lengths"]) + struct.pack(f"<{len(lengths)}q", *head["begins"])
    prefix.with_suffix(".idx").write_bytes(index + struct.pack(f"<{len(marks)}q", *marks) + changes.get("rest", b""))
    ids = [one for sequence in sequences for one in sequence]
    prefix.with_suffix(".bin").write_bytes(struct.pack(f"<{len(ids)}i", *ids))
    return prefix


SEQUENCES = [[1, 2, 3], [4], [], [5, 6], [7]]


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_megatron_pair(tmp_path: Path, suffix: str) -> None:
    """Sequences 0 and 1 are a document, 2 is an empty one, 3 and 4 are one each."""
    megatron(tmp_path / "pair", SEQUENCES, [0, 2, 3, 4, 5])
    source = open_source(tmp_path / f"pair{suffix}", tokenizer=None, eod=9, cache=tmp_path)
    assert isinstance(source, MegatronPair) and (source.name, source.vocab, source.eod) == ("pair", None, 9)
    assert documents(source) == [[1, 2, 3, 4], [5, 6], [7]]
    assert source.document_starts(1, 6).tolist() == [4]


@pytest.mark.parametrize(
    ("marks", "changes", "message"),
    [
        ([0, 5], {"magic": b"MMIDIDX\0\1"}, "is not a Megatron index: it starts with"),
        ([0, 5], {"version": 2}, "has version 2, only 1 can be read"),
        ([0, 5], {"code": 7}, "has the dtype code 7, but tokens have one of 1 uint8"),
        ([0, 5], {"code": 8}, "sequences that do not follow one another"),
        ([0, 5], {"begins": [0, 12, 16, 20, 24]}, "sequences that do not follow one another"),
        ([0, 5], {"lengths": [3, 1, 0, 2, 2]}, "pair.bin has 28 bytes, but pair.idx lists 8 tokens of int32, 32 bytes"),
        ([0, 5], {"rest": b"12345"}, "5 sequences and 2 document marks take 110 bytes, the file has 115"),
        ([0, 6], {}, "document marks that are not in order or are beyond its 5 sequences"),
        ([0, 3, 2, 5], {}, "document marks that are not in order"),
        ([-1, 5], {}, "document marks that are not in order"),
    ],
)
def test_damaged_megatron_pairs_are_refused(tmp_path: Path, marks: list[int], changes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"pair.*{message}.*make the pair again"):
        MegatronPair(megatron(tmp_path / "pair", SEQUENCES, marks, **changes))


def test_incomplete_megatron_pairs_are_refused(tmp_path: Path) -> None:
    prefix = megatron(tmp_path / "pair", SEQUENCES, [0, 5])
    index = prefix.with_suffix(".idx").read_bytes()
    prefix.with_suffix(".idx").write_bytes(index[:20])
    with pytest.raises(ValueError, match=r"pair.idx is cut off: 20 of the 34 bytes of its header"):
        MegatronPair(prefix)
    prefix.with_suffix(".bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"pair.idx has no pair.bin beside it; a Megatron pair needs both"):
        open_source(prefix, tokenizer=None, cache=tmp_path)


def test_nanogpt_file(tmp_path: Path) -> None:
    path = tmp_path / "train.bin"
    path.write_bytes(struct.pack("<7H", 1, 0, 65535, 3, 0, 0, 2))
    source = open_source(path, tokenizer=ByteTokenizer(), eod=0, cache=tmp_path)
    assert isinstance(source, NanoGPTFile) and source.has_documents and source.vocab is None
    assert documents(source) == [[1, 0], [65535, 3, 0], [0], [2]]
    assert source.document_starts(1, 5).tolist() == [2] and source.document_starts(2, 6).tolist() == [2, 5]
    unknown = NanoGPTFile(path)
    assert not unknown.has_documents
    with pytest.raises(ValueError, match=r"train.bin does not say where documents start; .*as its eod"):
        unknown.document_starts(0, 7)
    for raw in (b"", b"123"):
        path.write_bytes(raw)
        with pytest.raises(
            ValueError, match=rf"train.bin has {len(raw)} bytes; .* nanoGPT's format, 2 bytes per token"
        ):
            open_source(path, tokenizer=None, cache=tmp_path)


def test_shards_of_llm_c(tmp_path: Path) -> None:
    """The shards of llm.c and modded-nanogpt have a header; files with a header of another kind are refused."""
    path, ids = tmp_path / "shard.bin", [50256, 464, 2068, 50256, 7]

    def write(magic: int, version: int, tokens: int, letter: str, *, extra: bytes = b"") -> None:
        head = struct.pack("<256i", magic, version, tokens, *[0] * 253)
        path.write_bytes(head + struct.pack(f"<5{letter}", *ids) + extra)

    for magic, version, letter in ((20240520, 1, "H"), (20240801, 7, "I")):
        write(magic, version, 5, letter)
        source = open_source(path, tokenizer=None, eod=50256, cache=tmp_path)
        assert source.tokens == 5 and source.read(0, 5).tolist() == ids
        assert documents(source) == [[50256], [464, 2068, 50256], [7]]
        assert len(source.fingerprint) == 1
        for wrong in (dict(tokens=4), dict(tokens=6), dict(tokens=0), dict(tokens=-5), dict(extra=b"12")):
            write(magic, version, **{"tokens": 5, "letter": letter, **wrong})
            with pytest.raises(ValueError, match=r"shard.bin is not complete: its header says .*copy it again"):
                open_source(path, tokenizer=None, cache=tmp_path)
        write(magic, version + 1, 5, letter)
        with pytest.raises(ValueError, match=rf"magic {magic} in version {version + 1}, as files of llm.c do"):
            open_source(path, tokenizer=None, cache=tmp_path)
    for magic in (20240522, 20240326, 20251231):  # an evaluation, a model, and one that nobody knows yet
        write(magic, 1, 5, "H")
        with pytest.raises(ValueError, match=rf"magic {magic} in version 1.* have 20240520 in version 1, 20240801 in"):
            open_source(path, tokenizer=None, cache=tmp_path)
    for start, what in (
        (b"PK\x03\x04", "a zip archive, as torch.save"),
        (b"\x93NUMPY", "an array of numpy"),
        (b"\x1f\x8b\x08", "packed with gzip"),
        (b"4FTOKENS", "a token file of Fourfold"),
        (b"MMIDIDX\0\0", "the index of a Megatron pair"),
    ):
        path.write_bytes(start + bytes(100 - len(start)))
        with pytest.raises(ValueError, match=f"shard.bin has no tokens: it is {what}"):
            open_source(path, tokenizer=None, cache=tmp_path)
    # tokens of nanoGPT that begin as a magic would, and go on with words
    path.write_bytes(struct.pack("<2H", 20240522 & 0xFFFF, 20240522 >> 16) + struct.pack("<1000H", *range(1, 1001)))
    assert open_source(path, tokenizer=None, cache=tmp_path).tokens == 1002


# text


@pytest.mark.parametrize("kind", ["bytes", "json"])
def test_prepared_text_comes_back(corpus: Path, words: Path, tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else words)
    seen: list[tuple[int, int]] = []
    out = tmp_path / "new" / "out.tokens"
    source = prepare([corpus, corpus / "b.txt"], out, tokenizer, progress=lambda *pair: seen.append(pair))
    found = documents(source)
    assert [tokenizer.decode(ids) for ids in found] == [*DOCUMENTS, DOCUMENTS[2]]
    assert all(ids[-1] == tokenizer.eod for ids in found)
    assert source.tokenizer == tokenizer.description and source.vocab == tokenizer.vocab
    size = sum(len(text.encode()) for text in TEXTS.values()) + len(DOCUMENTS[2].encode())
    assert seen[-1] == (size, size)
    assert (source.path, source.documents, source.tokens) == (out, len(found), sum(map(len, found)))


def test_long_files_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.data.sources.CHUNK_BYTES", 64)
    text = "".join(f"line {number} äöü\n" for number in range(100)) + "no end"
    (tmp_path / "long").write_text(text)
    calls: list[tuple[int, int]] = []
    prepare([tmp_path / "long"], tmp_path / "out.tokens", ByteTokenizer(), progress=lambda *pair: calls.append(pair))
    source = TokenFile(tmp_path / "out.tokens")
    assert source.documents == 1 and ByteTokenizer().decode(source.read(0, source.tokens)) == text
    assert len(calls) > 20 and calls == sorted(calls)


def test_standard_library_is_text_that_is_always_there() -> None:
    names = [file.name for file in text_files("standard-library")]
    assert {"abc.py", "json/decoder.py"} <= set(names) and not [name for name in names if "site-packages" in name]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"a.txt is empty: there are 0 bytes of text in 1 files"),
        ("a.txt", b"PK\0\0", r"a.txt is not UTF-8 text: there are zero bytes in it"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', r"a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"body": "x"}', r"a.jsonl, line 1: no \"text\" with a string \(keys \['body'\]\)"),
        ("a.jsonl", b"[1]", r"a.jsonl, line 1: no \"text\" with a string \(list\)"),
        ("a.jsonl", b'{"text": ""}\n', r"out.tokens would have no tokens"),
    ],
)
def test_text_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare([tmp_path / name], tmp_path / "out.tokens", ByteTokenizer())
    assert os.listdir(tmp_path) == [name]


def test_inputs_and_outputs_that_cannot_be(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out.bin: the name of a token file ends in .tokens; write .*out.tokens"):
        prepare([corpus], tmp_path / "out.bin", ByteTokenizer())
    with pytest.raises(ValueError, match="there is no input"):
        prepare([], tmp_path / "out.tokens", ByteTokenizer())
    (tmp_path / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match=r"the folder .*bare has no text file; .* known suffix .*\.txt"):
        prepare([tmp_path / "bare"], tmp_path / "out.tokens", ByteTokenizer())


# opening


def test_text_is_prepared_once(corpus: Path, words: Path, tmp_path: Path) -> None:
    def source(tokenizer: Tokenizer) -> tuple[int, int]:
        opened = open_source(corpus, tokenizer=tokenizer, cache=cache, progress=lambda *_: prepared.append(1))
        assert isinstance(opened, TokenFile) and opened.name == "corpus"
        return opened.tokens, len(prepared)

    cache, prepared = tmp_path / "cache" / "tokens", []
    tokens, _ = source(ByteTokenizer())
    assert source(ByteTokenizer()) == (tokens, 1)
    assert source(load_tokenizer(words))[1] == source(load_tokenizer(words))[1] == 2
    (corpus / "new.txt").write_text("new")
    assert source(ByteTokenizer()) == (tokens + 4, 3)
    for kept in cache.iterdir():
        kept.write_bytes(kept.read_bytes()[:-1])
    assert source(ByteTokenizer()) == (tokens + 4, 4)
    assert source(ByteTokenizer()) == (tokens + 4, 4)


def test_opening_by_a_folder_of_no_name(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(corpus)
    assert open_source(".", tokenizer=ByteTokenizer(), cache=tmp_path).name == "corpus"


def test_missing_paths_name_what_is_near(corpus: Path, tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "corpsu", r"there is no 'corpsu' in .* \(1 entries\); did you mean corpus"),
        (corpus / "a" / "depe.md" / "x", r"there is no 'depe.md' in .*; did you mean deep.md"),
        (corpus / "train.idx", r"there is no 'train.idx'"),
        ("standard_library", "did you mean standard-library"),
        (corpus / "qqqqqq", "standard-library is text that every machine has"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            open_source(path, tokenizer=ByteTokenizer(), cache=tmp_path)


def test_a_token_file_belongs_to_its_tokenizer(corpus: Path, words: Path, tmp_path: Path) -> None:
    tokenizer, path = load_tokenizer(words), tmp_path / "out.tokens"
    prepare([corpus], path, tokenizer)
    renamed = words.rename(tmp_path / "renamed.json")
    for same in (load_tokenizer(renamed), None):
        assert open_source(path, tokenizer=same, eod=tokenizer.eod, cache=tmp_path).vocab == tokenizer.vocab
    for options, message in (
        (
            {"tokenizer": ByteTokenizer()},
            r"out.tokens was made by the tokenizer .*'words.json'.*, not by {'name': 'bytes'}",
        ),
        ({"tokenizer": None, "eod": 1}, f"out.tokens ends documents with {tokenizer.eod}, not eod=1"),
    ):
        with pytest.raises(ValueError, match=message):
            open_source(path, **options, cache=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="corpus is text: give a tokenizer"):
        open_source(corpus, tokenizer=None, cache=tmp_path)
    with pytest.raises(ValueError, match=r"eod=1 is for .bin files"):
        open_source(corpus, tokenizer=ByteTokenizer(), eod=1, cache=tmp_path)


def test_files_need_torch_alone(corpus: Path, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['numpy', 'tokenizers']))\n"
        "from pathlib import Path\n"
        "from fourfold.data.sources import open_source\n"
        "from fourfold.data.tokenizer import load_tokenizer\n"
        "path, cache = map(Path, sys.argv[1:])\n"
        "print(open_source(path, tokenizer=load_tokenizer('bytes'), cache=cache).read(0, 4).tolist())\n"
    )
    command = [sys.executable, "-c", code, corpus, tmp_path]
    assert json.loads(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout) == list(b"# de")


# documents in columns


def needs_pyarrow() -> Any:
    return pytest.importorskip("pyarrow", reason="reading .parquet needs pyarrow, which the extra dev installs")


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> None:
    needs_pyarrow()
    from pyarrow import parquet, table

    parquet.write_table(table(columns), path, row_group_size=2)


def write_lines(path: Path, column: str, texts: list[str]) -> None:
    lines = "".join(json.dumps({column: text, "id": 1}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)


def texts_of(source: TokenSource) -> list[str]:
    return [ByteTokenizer().decode(torch.tensor(ids[:-1])) for ids in documents(source)]


COLUMN_TEXTS = ["one", "zwei äöü", "3"]


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL.gz", ".parquet"])
def test_documents_are_read_from_the_column_that_is_named(tmp_path: Path, suffix: str) -> None:
    """The cache knows which column it is of, and progress ends with all bytes of the file."""
    path, cache = tmp_path / f"data{suffix}", tmp_path / "cache"
    if suffix == ".parquet":
        write_parquet(path, {"text": ["other"] * 3, "body": COLUMN_TEXTS, "id": [1, 2, 3]})
    else:
        write_lines(path, "body", COLUMN_TEXTS)
    calls: list[tuple[int, int]] = []
    opened = open_source(
        path, tokenizer=ByteTokenizer(), cache=cache, column="body", progress=lambda *pair: calls.append(pair)
    )
    assert texts_of(opened) == COLUMN_TEXTS
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)
    if suffix == ".parquet":
        other = open_source(path, tokenizer=ByteTokenizer(), cache=cache)
        assert texts_of(other) == ["other"] * 3
        assert len(list(cache.iterdir())) == 2


def test_a_folder_may_have_all_kinds_of_documents(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.txt").write_text("plain")
    write_lines(folder / "b.jsonl.gz", "text", ["zipped", ""])
    write_parquet(folder / "c.parquet", {"text": ["row", None, "last"]})
    written = prepare([folder], tmp_path / "out.tokens", ByteTokenizer())
    assert texts_of(written) == ["plain", "zipped", "row", "last"]  # a document without text is none


def test_rows_of_parquet_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 3)
    monkeypatch.setattr(sources, "CHUNK_BYTES", 8)
    texts = [f"row {number}" for number in range(20)]
    write_parquet(tmp_path / "a.parquet", {"text": texts})
    calls: list[tuple[int, int]] = []
    out = tmp_path / "out.tokens"
    written = prepare([tmp_path / "a.parquet"], out, ByteTokenizer(), progress=lambda *pair: calls.append(pair))
    assert texts_of(written) == texts
    assert len(calls) > 5 and calls == sorted(calls) and calls[-1][0] == calls[-1][1]


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    def refused(name: str, message: str, column: str = "text") -> None:
        with pytest.raises(ValueError, match=message):
            prepare([tmp_path / name], tmp_path / "out.tokens", ByteTokenizer(), column=column)
        assert not list(tmp_path.glob("out.tokens*"))

    write_lines(tmp_path / "a.jsonl", "body", COLUMN_TEXTS)
    refused("a.jsonl", r'a.jsonl, line 1: no "text" with a string .*; set the column of the source to the key that has')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}' * 99)[:-9])
    refused("cut.jsonl.gz", r"cut.jsonl.gz cannot be unpacked \(.*\); copy it again")
    (tmp_path / "a.txt").write_text("plain")
    refused("a.txt", r"column='body': .*a.txt has no .jsonl or .jsonl.gz or .parquet file; leave column out", "body")
    tokens = prepare([tmp_path / "a.txt"], tmp_path / "a.tokens", ByteTokenizer()).path
    with pytest.raises(ValueError, match=r"a.tokens has tokens and no columns; leave column out"):
        open_source(tokens, tokenizer=ByteTokenizer(), cache=tmp_path, column="body")
    write_parquet(tmp_path / "a.parquet", {"bodies": COLUMN_TEXTS, "number": [1, 2, 3]})
    refused("a.parquet", r"no column 'body' \(did you mean 'bodies'\?\); it has bodies, number; set the column", "body")
    refused("a.parquet", r"a.parquet, row 1: the column 'number' has int, not text", "number")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 and no more")
    refused("b.parquet", r"b.parquet is not a sound .parquet file \(.*\); copy it again")


def test_parquet_without_pyarrow_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ImportError, match=r"a.parquet needs the package pyarrow: pip install 'fourfold\[parquet\]'"):
        prepare([tmp_path / "a.parquet"], tmp_path / "out.tokens", ByteTokenizer())

"""Token files of others: Megatron-LM's `.bin` and `.idx`, nanoGPT's `.bin`.

Megatron's index, little-endian: magic, u64 version, u8 dtype code, u64 number of sequences, u64 number of document
marks, then i32 length of each sequence, i64 byte at which it begins in the `.bin`, i64 marks: the sequence at which
each document begins, and last the number of sequences. nanoGPT's file is u16 tokens and nothing else.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from pathlib import Path

import torch
from torch import Tensor

from fourfold.data.source import DTYPES, Numbers, Source, map_file

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEAD = struct.Struct("<9sQBQQ")
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
AGAIN = "make the pair again with Megatron's tools/preprocess_data.py"


class Megatron(Source):
    """A pair of `.bin` and `.idx`; sequences stand one after another as the row of tokens."""

    vocab = None  # the pair does not say

    def __init__(self, prefix: Path, eod: int | None = None) -> None:
        tokens, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        for path, other in ((tokens, index), (index, tokens)):
            if not path.is_file():
                raise FileNotFoundError(f"{other} has no {path.name} beside it; a Megatron pair needs both")
        dtype, sequences, marks = _read_head(index)
        view = map_file(index)
        lengths = Numbers(view, "int32", HEAD.size, sequences)
        self._begins = Numbers(view, "int64", HEAD.size + 4 * sequences, sequences)
        self._marks = Numbers(view, "int64", HEAD.size + 12 * sequences, marks)
        self._bytes = DTYPES[dtype].itemsize
        self.name = prefix.name
        self.eod = eod
        self.tokens = _check_lengths(index, lengths, self._begins, self._bytes)
        _check_marks(index, self._marks, sequences)
        size = tokens.stat().st_size
        if size != self.tokens * self._bytes or not size:
            raise ValueError(
                f"{tokens} has {size} bytes, but {index.name} lists {self.tokens} tokens of {dtype}, "
                f"{self.tokens * self._bytes} bytes (at least one token); copy both again or {AGAIN}"
            )
        self._ids = Numbers(map_file(tokens), dtype)

    def document_starts(self, start: int, stop: int) -> Tensor:
        first, last = (bisect_left(range(len(self._marks)), place, key=self._place) for place in (start, stop))
        places = [self._place(document) for document in range(first, last)]
        return torch.tensor(sorted(set(places)), dtype=torch.int64, device="cpu")  # empty documents share a place

    def _place(self, document: int) -> int:
        """The first token of a document."""
        sequence = self._marks[document]
        return self._begins[sequence] // self._bytes if sequence < len(self._begins) else self.tokens


def _read_head(index: Path) -> tuple[str, int, int]:
    """dtype, number of sequences, number of document marks."""
    size = index.stat().st_size
    with index.open("rb") as file:
        head = file.read(HEAD.size)
    if head[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{index} is no Megatron index: it starts with {head[: len(MAGIC)]!r}, not {MAGIC!r}; {AGAIN}")
    if len(head) < HEAD.size:
        raise ValueError(f"{index} is cut off: its header has {len(head)} of {HEAD.size} bytes; {AGAIN}")
    _, version, code, sequences, marks = HEAD.unpack(head)
    if version != VERSION:
        raise ValueError(f"{index} has version {version}, version {VERSION} is known; {AGAIN}")
    if code not in CODES:
        known = ", ".join(f"{number} {name}" for number, name in CODES.items())
        raise ValueError(f"{index} has the dtype code {code}; tokens have one of {known}; {AGAIN}")
    expected = HEAD.size + 12 * sequences + 8 * marks
    if size != expected:
        raise ValueError(
            f"{index} is not whole: {sequences} sequences and {marks} document marks take {expected} bytes, the file "
            f"has {size}; copy it again or {AGAIN} (an index with modalities is not read)"
        )
    return CODES[code], sequences, marks


def _check_lengths(index: Path, lengths: Numbers, begins: Numbers, itemsize: int) -> int:
    """The number of tokens; each sequence must begin where the one before it ends."""
    total = 0
    for length, begin in zip(lengths.blocks(), begins.blocks(), strict=True):
        ends = total + length.cumsum(0)
        if int(length.min()) < 0 or not torch.equal(begin, (ends - length) * itemsize):
            raise ValueError(f"{index} has sequences that do not follow one another in the .bin; {AGAIN}")
        total = int(ends[-1])
    return total


def _check_marks(index: Path, marks: Numbers, sequences: int) -> None:
    last = 0
    for block in marks.blocks():
        if int(block[0]) < last or int(block.diff().clamp(max=0).sum()) or int(block[-1]) > sequences:
            raise ValueError(f"{index} has document marks that fall or go beyond its {sequences} sequences; {AGAIN}")
        last = int(block[-1])


class NanoGPT(Source):
    """A file of u16 tokens. It does not say where documents start; with the id that ends them that is found."""

    vocab = None

    def __init__(self, path: Path, eod: int | None = None) -> None:
        size = path.stat().st_size
        if size == 0 or size % 2:
            raise ValueError(
                f"{path} has {size} bytes; a .bin without an .idx beside it is read as nanoGPT's, 2 bytes a token and "
                "at least one; copy it again, or bring the .idx if it is half of a Megatron pair"
            )
        self.name = path.name
        self.eod = eod
        self._ids = Numbers(map_file(path), "uint16")
        self.tokens = len(self._ids)

    @property
    def has_documents(self) -> bool:
        return self.eod is not None

    def document_starts(self, start: int, stop: int) -> Tensor:
        if self.eod is None:
            raise ValueError(f"{self.name} does not say where documents start; give the id that ends them with eod=")
        first = max(start - 1, 0)
        ends = first + (self.read(first, max(stop - 1, first)) == self.eod).nonzero().flatten()
        begin = torch.zeros(1 if start == 0 < stop else 0, dtype=torch.int64, device="cpu")
        return torch.cat([begin, ends + 1])

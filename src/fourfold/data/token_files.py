"""Files of tokens: Fourfold's own `.tokens`, Megatron-LM's `.bin` and `.idx`, and `.bin` of nanoGPT and llm.c.

Each is a `TokenSource`: one long row of tokens from which windows are read. Files are mapped, not loaded, so the ranks
of a node share the pages. The mapping is read-only and each window is copied out of it: torch could use a private
writable mapping without a copy, but the system counts such a mapping as memory and refuses it for a file that is
larger than the memory.

Fourfold's file is written as a stream and appears complete or not at all:

    0      magic, 8 bytes
    8      version, then the length of the header, each u32
    16     header: JSON, padded to byte 4096
    4096   tokens, u16 or u32
           document starts: the position of each document's first token, i64, from the next multiple of 8

Two digests are in the header. `head_sha256`, of the header and the document starts, is compared whenever a file is
opened: a wrong start would silently train on other documents. `sha256`, of everything behind the header, is compared by
`TokenFile.verify` alone, because that reads the whole file, which may have hundreds of GB.

Megatron's index has: magic, u64 version, u8 dtype code, u64 number of sequences, u64 number of document marks, then for
each sequence its i32 length, for each sequence the i64 byte at which it begins in the `.bin`, and last the i64 document
marks: the sequence at which each document begins, followed by the number of sequences. nanoGPT's file is u16 tokens and
nothing else. A shard of llm.c or modded-nanogpt has 256 i32 in front of its tokens: magic, version, the number of
tokens, and zeros. All numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
import struct
import tempfile
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from fourfold.atomic import flush, name_in_errors
from fourfold.errors import shortened
from fourfold.parse import parse_json

DTYPES = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "uint16": torch.uint16}
DTYPES |= {"int32": torch.int32, "uint32": torch.uint32, "int64": torch.int64}
"""The dtypes of numbers in files, by the names that headers have for them."""

BLOCK = 1 << 20
"""Numbers read at once in a pass over a whole file: 8 MiB as int64, so that an index of any size can be checked."""

READ_BYTES = 4 << 20
"""Bytes that are read at once where a whole file is read: enough for the full speed of a disk."""
SAMPLE_BYTES, SAMPLES = 64 << 10, 64
"""The fingerprint of a file reads this many blocks of this many bytes: 4 MiB in all, which even a network file system
delivers in well under a second. A file of up to that size is read whole."""

MAGIC = b"4FTOKENS"
VERSION = 1
HEADER_BYTES = 4096
"""Size of the header. It is fixed and one page long, so that tokens can be written before their number is known."""

HEADER_FIELDS = {"dtype": str, "tokens": int, "documents": int, "vocab": int, "eod": int, "tokenizer": dict}
"""The keys of the header and their types."""
HEAD_DIGEST = "head_sha256"
"""The key of the digest of the other keys and the document starts; files of earlier versions have none."""
PREPARE_AGAIN = "prepare it again with `fourfold data prepare`"

MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
MEGATRON_VERSION = 1
MEGATRON_HEAD = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document marks."""
MEGATRON_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Megatron's codes of the dtypes that can hold tokens; 6 and 7 are floating-point."""

SHARD_HEAD_BYTES = 1024
"""Size of the header of a shard of llm.c: 256 numbers of 4 bytes."""
SHARD_HEAD = struct.Struct("<3i")
"""Magic, version, number of tokens."""
SHARDS = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""Version and dtype of the shards of llm.c by their magic: those for GPT-2, which modded-nanogpt shares, and for Llama
3."""
DATES = range(20200101, 20400101)
"""llm.c's magics are dates; its evaluations, models and optimizers have others than `SHARDS`."""
FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes it",
    b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19": "a pickle, as old versions of torch.save write it",
    b"\x93NUMPY": "an array of numpy; write its numbers alone, with ids.astype('uint16').tofile",
    b"\x1f\x8b\x08": "packed with gzip; unpack it",
    b"\x28\xb5\x2f\xfd": "packed with zstd; unpack it",
    b"GGUF": "a GGUF model",
    MAGIC: "a token file of Fourfold; name it .tokens",
    MEGATRON_MAGIC: "the index of a Megatron pair; name it .idx",
}
"""Files that hold no tokens, by their first bytes: three or more, so that no file of tokens begins so by chance."""

PREPROCESS_AGAIN = "make the pair again with Megatron's tools/preprocess_data.py"


class MappedArray:
    """Integers of one dtype in a mapped file. Pages of the file are read only when they are used."""

    def __init__(self, view: mmap.mmap, dtype: str, offset: int = 0, count: int | None = None) -> None:
        self.dtype = DTYPES[dtype]
        self._view = view
        self._offset = offset
        self._count = (len(view) - offset) // self.dtype.itemsize if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"index {index} is outside of an array of {self._count} numbers")
        first, size = self._offset + index * self.dtype.itemsize, self.dtype.itemsize
        return int.from_bytes(self._view[first : first + size], "little", signed=self.dtype.is_signed)

    def read(self, start: int, stop: int) -> Tensor:
        """Return the numbers [start, stop) as int64."""
        if not 0 <= start <= stop <= self._count:
            raise IndexError(f"[{start}, {stop}) is outside of an array of {self._count} numbers")
        if start == stop:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        first, last = (self._offset + index * self.dtype.itemsize for index in (start, stop))
        # The copy into a bytearray is writable, which frombuffer needs; int64 is what embeddings and losses index with.
        return torch.frombuffer(bytearray(self._view[first:last]), dtype=self.dtype).to(torch.int64)

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes of all numbers."""
        digest, end = hashlib.sha256(), self._offset + self._count * self.dtype.itemsize
        for first in range(self._offset, end, READ_BYTES):
            digest.update(self._view[first : min(first + READ_BYTES, end)])
        return digest.hexdigest()

    def blocks(self) -> Iterator[Tensor]:
        """Return all numbers, `BLOCK` at a time."""
        return (self.read(start, min(start + BLOCK, self._count)) for start in range(0, self._count, BLOCK))


class TokenSource(ABC):
    """One long row of tokens.

    tokens     the number of tokens
    name       the name that errors and saved positions use
    vocab      all ids are below this number; None where the file does not say
    eod        the id that ends a document; None where it is not known
    """

    name: str
    tokens: int
    vocab: int | None
    eod: int | None
    _ids: MappedArray

    @property
    def fingerprint(self) -> dict[str, str]:
        """What identifies the content, whatever the file's name and place: equal content has equal values.

        `sampled` is a hash of blocks of the files, see `sample_hash`. `sha256`, where a file has it, is the hash of all
        content as it was written. Empty for a source that cannot say.
        """
        return {}

    @property
    def has_documents(self) -> bool:
        """Whether the source knows where its documents start."""
        return True

    def read(self, start: int, stop: int) -> Tensor:
        """Return the tokens [start, stop) as int64 on the CPU."""
        return self._ids.read(start, stop)

    @abstractmethod
    def document_starts(self, start: int, stop: int) -> Tensor:
        """Return the positions in [start, stop) at which a document begins, in ascending order, each once."""

    @property
    def documents(self) -> int:
        """The number of documents; some may be empty."""
        return len(self._all_starts)

    def document_start(self, number: int) -> int:
        """Return the position at which a document begins."""
        return int(self._all_starts[number])

    @cached_property
    def _all_starts(self) -> Tensor:
        """The positions at which documents begin, found in one pass over the source; most formats store them."""
        steps = range(0, self.tokens, BLOCK)
        return torch.cat([self.document_starts(start, min(start + BLOCK, self.tokens)) for start in steps])

    def document(self, number: int) -> range:
        """Return the tokens of a document; those before the first start belong to the first one."""
        start = self.document_start(number) if number else 0
        return range(start, self.document_start(number + 1) if number + 1 < self.documents else self.tokens)

    def document_lengths(self) -> Iterator[Tensor]:
        """Yield the tokens of all documents, `BLOCK` documents at a time."""
        first = 0
        for stop in range(BLOCK, self.documents + BLOCK, BLOCK):
            starts = self._starts_of(first, min(stop + 1, self.documents))
            if first == 0:
                starts[:1] = 0  # as `document` says
            if stop >= self.documents:
                starts = torch.cat([starts, torch.tensor([self.tokens], device="cpu")])
            yield starts.diff()
            first = stop

    def _starts_of(self, first: int, stop: int) -> Tensor:
        """Return where the documents [first, stop) begin."""
        return self._all_starts[first:stop].clone()

    def documents_before(self, token: int) -> int:
        """Return the number of documents that begin before a token."""
        return bisect_left(range(self.documents), token, key=self.document_start)


class TokenWriter:
    """Writes a `.tokens` file in a `with` block. The file appears when the block ends, and not at all if it raises."""

    def __init__(self, path: Path, *, vocab: int, eod: int, tokenizer: dict[str, str]) -> None:
        if not 0 <= eod < vocab <= 1 << 32:
            raise ValueError(
                f"{path}: eod={eod} and vocab={vocab}: ids must fit in 32 bits, and eod must be an id from 0 to vocab-1"
            )
        self.path = path
        self.tokens = 0
        self.documents = 0
        self.header = {"vocab": vocab, "eod": eod, "tokenizer": tokenizer}
        self._dtype = "uint16" if vocab <= 1 << 16 else "uint32"
        self._start = 0  # of the document that is being written
        self._hash, self._starts_hash = hashlib.sha256(), hashlib.sha256()

    def __enter__(self) -> Self:
        # Beside the target, since a rename is atomic only inside one file system.
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.part")
        self._file = self._temporary.open("xb")
        try:
            self._starts = tempfile.TemporaryFile(dir=self.path.parent)  # closed by __exit__
            self._file.seek(HEADER_BYTES)  # the header is written last, when the counts are known
        except BaseException:
            self._discard()
            raise
        return self

    def append(self, ids: Tensor) -> None:
        """Write more tokens of the current document."""
        vocab = self.header["vocab"]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(
                f"{self.path}: the tokenizer gave ids from {int(ids.min())} to {int(ids.max())}, but its file "
                f"says that there are {vocab}; repair the tokenizer's file or use another one"
            )
        with name_in_errors(self.path):
            self._hash.update(_write(self._file, ids, self._dtype))
        self.tokens += len(ids)

    def end_document(self) -> None:
        """Write the end-of-document token, unless the current document has no tokens."""
        if self.tokens > self._start:
            self.append(torch.tensor([self.header["eod"]], device="cpu"))
            with name_in_errors(self.path):
                _write(self._starts, torch.tensor([self._start], device="cpu"), "int64")
            self._start = self.tokens
            self.documents += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.end_document()
                with name_in_errors(self.path):
                    self._finish()
        finally:
            self._starts.close()
            self._discard()

    def _finish(self) -> None:
        if not self.tokens:
            raise ValueError(f"{self.path} would have no tokens; give text that is not empty")
        padding = bytes(-self._file.tell() % 8)
        self._file.write(padding)
        self._hash.update(padding)
        self._starts.seek(0)
        while block := self._starts.read(SAMPLE_BYTES):
            self._file.write(block)
            self._hash.update(block)
            self._starts_hash.update(block)
        keys = {"dtype": self._dtype, "tokens": self.tokens, "documents": self.documents, **self.header}
        keys["sha256"] = self._hash.hexdigest()
        keys[HEAD_DIGEST] = _head_digest(keys, self._starts_hash.hexdigest())
        header = json.dumps(keys).encode()
        if len(header) > HEADER_BYTES - 16:
            raise ValueError(
                f"{self.path}: the header takes {len(header)} bytes, but at most {HEADER_BYTES - 16} fit; "
                "give the tokenizer's file a shorter name"
            )
        self._file.seek(0)
        self._file.write(struct.pack("<8sII", MAGIC, VERSION, len(header)) + header.ljust(HEADER_BYTES - 16))
        # The content must be on disk before the name is: after a crash the name never points to half a file.
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)
        flush(self.path.parent)  # the new name survives a crash too

    def _discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _write(file: BinaryIO, ids: Tensor, dtype: str) -> bytearray:
    """Write numbers, and return their bytes."""
    raw = _bytes_of(ids, DTYPES[dtype])
    file.write(raw)
    return raw


def _bytes_of(ids: Tensor, dtype: torch.dtype) -> bytearray:
    """Return numbers as a file has them."""
    raw = bytearray(len(ids) * dtype.itemsize)
    if raw:
        torch.frombuffer(raw, dtype=dtype).copy_(ids)
    return raw


class TokenFile(TokenSource):
    """A `.tokens` file, mapped into memory."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        header = _read_header(path)
        view = _map_file(path)
        self.path = path
        self.name = name or path.name
        self._header = header
        self.tokens: int = header["tokens"]
        self.vocab = header["vocab"]
        self.eod = header["eod"]
        self.tokenizer: dict[str, str] = header["tokenizer"]
        self._sha256 = header.get("sha256")  # files of earlier versions have none
        self._ids = MappedArray(view, header["dtype"], HEADER_BYTES, self.tokens)
        self._starts = MappedArray(view, "int64", _starts_offset(header), header["documents"])
        _check_starts(path, header, self._starts)

    def verify(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Read the whole file once and raise if its content is not what was written.

        Return whether its SHA-256 is known; without one, only the ids and the ends of documents are checked.
        `progress(tokens_done, tokens)` is called every few megabytes.
        """
        first, digest, vocab, eod = 0, hashlib.sha256(), self._header["vocab"], self._header["eod"]
        for ids in self._ids.blocks():
            stop = first + len(ids)
            ends = self.document_starts(first + 1, stop + 1) - first - 1
            if int(ids.max()) >= vocab or bool((ids[ends] != eod).any()):
                raise ValueError(
                    f"{self.path} is damaged: from token {first} to {stop} an id is not below vocab={vocab}, or a "
                    f"document does not end with eod={eod}; copy it again or {PREPARE_AGAIN}"
                )
            digest.update(_bytes_of(ids, self._ids.dtype))
            first = stop
            if progress is not None:
                progress(first, self.tokens)
        with self.path.open("rb") as file:
            file.seek(HEADER_BYTES + self.tokens * self._ids.dtype.itemsize)
            while rest := file.read(READ_BYTES):
                digest.update(rest)
        if self._sha256 is not None and digest.hexdigest() != self._sha256:
            raise ValueError(
                f"{self.path} is damaged: its content has the SHA-256 {digest.hexdigest()} and was written with "
                f"{self._sha256}; copy it again or {PREPARE_AGAIN}"
            )
        return self._sha256 is not None

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        # without the header, which another version of Fourfold may write differently
        found = {"sampled": sample_hash(self.path, HEADER_BYTES)}
        return {**found, "sha256": self._sha256} if isinstance(self._sha256, str) else found

    @property
    def documents(self) -> int:
        return len(self._starts)

    def document_start(self, number: int) -> int:
        return self._starts[number]

    def _starts_of(self, first: int, stop: int) -> Tensor:
        return self._starts.read(first, stop)

    def document_starts(self, start: int, stop: int) -> Tensor:
        return self._starts.read(bisect_left(self._starts, start), bisect_left(self._starts, stop))


def _read_header(path: Path) -> dict[str, Any]:
    """Return the header of a `.tokens` file after checking that the whole file is there."""
    head = _read_head(path, "a token file", MAGIC, HEADER_BYTES, f"{PREPARE_AGAIN}, or rename it if it is text")
    version, length = struct.unpack_from("<II", head, len(MAGIC))
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version}, this Fourfold reads version {VERSION}; {PREPARE_AGAIN}, or install the "
            "Fourfold that wrote it"
        )
    try:
        header = parse_json(head[16 : 16 + length])
        valid = all(type(header[key]) is kind for key, kind in HEADER_FIELDS.items())  # to isinstance, true is an int
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has a damaged header ({type(error).__name__}: {error}); {PREPARE_AGAIN}") from error
    if not valid or not _makes_sense(header):
        raise ValueError(f"{path} has a damaged header, {shortened(str(header))}; {PREPARE_AGAIN}")
    size, expected = path.stat().st_size, _starts_offset(header) + 8 * header["documents"]
    if size != expected:
        raise ValueError(
            f"{path} is not complete: {header['tokens']} tokens of {header['dtype']} and {header['documents']} "
            f"documents take {expected} bytes, the file has {size}; copy it again or {PREPARE_AGAIN}"
        )
    return header


def _makes_sense(header: dict[str, Any]) -> bool:
    """Return whether the numbers of a header can be those of a file that `TokenWriter` wrote."""
    bits = {"uint16": 16, "uint32": 32}.get(header["dtype"], 0)
    return 0 <= header["eod"] < header["vocab"] <= 1 << bits and 1 <= header["documents"] <= header["tokens"]


def _head_digest(header: dict[str, Any], starts: str) -> str:
    """Return the SHA-256 of a header and of the SHA-256 of the document starts."""
    keys = {key: value for key, value in header.items() if key != HEAD_DIGEST}
    return hashlib.sha256(f"{json.dumps(keys, sort_keys=True)}\n{starts}".encode()).hexdigest()


def _check_starts(path: Path, header: dict[str, Any], starts: MappedArray) -> None:
    """Raise unless documents begin one after another inside of the file, where the header says."""
    before = -1
    for block in starts.blocks():
        sound = before < int(block[0]) and bool((block.diff() > 0).all()) and int(block[-1]) < header["tokens"]
        if not sound or (before < 0 and int(block[0]) != 0):
            raise ValueError(
                f"{path} is damaged: its {len(starts)} documents do not begin one after another from token 0 to "
                f"{header['tokens'] - 1}; copy it again or {PREPARE_AGAIN}"
            )
        before = int(block[-1])
    if HEAD_DIGEST in header and header[HEAD_DIGEST] != _head_digest(header, starts.sha256()):
        raise ValueError(
            f"{path} is damaged: its header or its document starts are not those that were written (SHA-256 "
            f"{header[HEAD_DIGEST]}); copy it again or {PREPARE_AGAIN}"
        )


def _starts_offset(header: dict[str, Any]) -> int:
    """Return the byte at which the document starts begin."""
    return HEADER_BYTES + -(-header["tokens"] * DTYPES[header["dtype"]].itemsize // 8) * 8


class MegatronPair(TokenSource):
    """Megatron-LM's pair of `.bin` and `.idx`: the sequences, one after another, are the row of tokens."""

    vocab = None  # the pair does not say

    def __init__(self, prefix: Path, eod: int | None = None) -> None:
        tokens, index = (prefix.with_name(prefix.name + suffix) for suffix in (".bin", ".idx"))
        for path, other in ((tokens, index), (index, tokens)):
            if not path.is_file():
                raise FileNotFoundError(f"{other} has no {path.name} beside it; a Megatron pair needs both files")
        dtype, sequences, marks = _read_index_head(index)
        view = _map_file(index)
        lengths = MappedArray(view, "int32", MEGATRON_HEAD.size, sequences)
        self._begins = MappedArray(view, "int64", MEGATRON_HEAD.size + 4 * sequences, sequences)
        self._marks = MappedArray(view, "int64", MEGATRON_HEAD.size + 12 * sequences, marks)
        self._itemsize = DTYPES[dtype].itemsize
        self.name = prefix.name
        self.eod = eod
        self.tokens = _check_lengths(index, lengths, self._begins, self._itemsize)
        _check_marks(index, self._marks, sequences)
        size = tokens.stat().st_size
        if size != self.tokens * self._itemsize or not size:
            raise ValueError(
                f"{tokens} has {size} bytes, but {index.name} lists {self.tokens} tokens of {dtype}, "
                f"{self.tokens * self._itemsize} bytes (at least one token); copy both again or {PREPROCESS_AGAIN}"
            )
        self._ids = MappedArray(_map_file(tokens), dtype)
        self._paths = tokens, index

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        tokens, index = map(sample_hash, self._paths)
        return {"sampled": tokens, "sampled index": index}

    @property
    def documents(self) -> int:
        return len(self._marks)  # the last mark is usually the end, where an empty document begins

    def document_starts(self, start: int, stop: int) -> Tensor:
        first, last = (self.documents_before(position) for position in (start, stop))
        found = {self.document_start(document) for document in range(first, last)}  # empty documents share a position
        return torch.tensor(sorted(found), dtype=torch.int64, device="cpu")

    def _starts_of(self, first: int, stop: int) -> Tensor:
        sequences = self._marks.read(first, stop)
        if not len(sequences):
            return sequences
        low, high = int(sequences[0]), min(int(sequences[-1]) + 1, len(self._begins))
        begins = self._begins.read(low, high) // self._itemsize
        return torch.cat([begins, torch.tensor([self.tokens], device="cpu")])[sequences - low]

    def document_start(self, number: int) -> int:
        sequence = self._marks[number]
        return self._begins[sequence] // self._itemsize if sequence < len(self._begins) else self.tokens


def _read_index_head(index: Path) -> tuple[str, int, int]:
    """Return the dtype, the number of sequences and the number of document marks of a Megatron index."""
    head = _read_head(index, "a Megatron index", MEGATRON_MAGIC, MEGATRON_HEAD.size, PREPROCESS_AGAIN)
    _, version, code, sequences, marks = MEGATRON_HEAD.unpack(head)
    if version != MEGATRON_VERSION:
        raise ValueError(f"{index} has version {version}, only {MEGATRON_VERSION} can be read; {PREPROCESS_AGAIN}")
    if code not in MEGATRON_DTYPES:
        known = ", ".join(f"{number} {name}" for number, name in MEGATRON_DTYPES.items())
        raise ValueError(f"{index} has the dtype code {code}, but tokens have one of {known}; {PREPROCESS_AGAIN}")
    size, expected = index.stat().st_size, MEGATRON_HEAD.size + 12 * sequences + 8 * marks
    if size != expected:
        raise ValueError(
            f"{index} is not complete: {sequences} sequences and {marks} document marks take {expected} bytes, the "
            f"file has {size}; copy it again or {PREPROCESS_AGAIN} (an index with modalities cannot be read)"
        )
    return MEGATRON_DTYPES[code], sequences, marks


def _check_lengths(index: Path, lengths: MappedArray, begins: MappedArray, itemsize: int) -> int:
    """Check that each sequence begins where the one before it ends; return the number of tokens."""
    total = 0
    for length, begin in zip(lengths.blocks(), begins.blocks(), strict=True):
        ends = total + length.cumsum(0)
        if int(length.min()) < 0 or not torch.equal(begin, (ends - length) * itemsize):
            raise ValueError(f"{index} has sequences that do not follow one another in the .bin; {PREPROCESS_AGAIN}")
        total = int(ends[-1])
    return total


def _check_marks(index: Path, marks: MappedArray, sequences: int) -> None:
    last = 0
    for block in marks.blocks():
        if int(block[0]) < last or int(block.diff().clamp(max=0).sum()) or int(block[-1]) > sequences:
            raise ValueError(
                f"{index} has document marks that are not in order or are beyond its {sequences} sequences; "
                f"{PREPROCESS_AGAIN}"
            )
        last = int(block[-1])


class NanoGPTFile(TokenSource):
    """A `.bin` without an index: nanoGPT's u16 tokens, or a shard of llm.c or modded-nanogpt, which has a header.

    Documents can be found in it only if `eod` is given.
    """

    vocab = None  # the file does not say

    def __init__(self, path: Path, eod: int | None = None) -> None:
        dtype, first = _layout_of_bin(path)
        self.name = path.name
        self.path = path
        self.eod = eod
        self._ids = MappedArray(_map_file(path), dtype, first)
        self.tokens = len(self._ids)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        return {"sampled": sample_hash(self.path)}

    @property
    def has_documents(self) -> bool:
        return self.eod is not None

    def document_starts(self, start: int, stop: int) -> Tensor:
        if self.eod is None:
            raise ValueError(f"{self.name} does not say where documents start; give the id that ends them as its eod")
        # A document starts behind each eod, so look one token further to the left.
        first = max(start - 1, 0)
        ends = first + (self.read(first, max(stop - 1, first)) == self.eod).nonzero().flatten()
        begin = torch.zeros(1 if start == 0 < stop else 0, dtype=torch.int64, device="cpu")
        return torch.cat([begin, ends + 1])


def _layout_of_bin(path: Path) -> tuple[str, int]:
    """Return the dtype of the tokens of a `.bin` without an index, and the byte at which they begin."""
    with path.open("rb") as file:
        head, size = file.read(SHARD_HEAD_BYTES), os.fstat(file.fileno()).st_size
    for magic, what in FOREIGN.items():
        if head.startswith(magic):
            raise ValueError(f"{path} has no tokens: it is {what}")
    word, version, tokens = SHARD_HEAD.unpack_from(head.ljust(SHARD_HEAD.size, b"\0"))
    # Files of nanoGPT have no header. In all headers of llm.c zeros stand behind the first 34 numbers.
    if word not in SHARDS and (word not in DATES or any(head[4 * 34 :]) or len(head) < SHARD_HEAD_BYTES):
        if size == 0 or size % 2:
            raise ValueError(
                f"{path} has {size} bytes; a .bin without an .idx beside it is read as nanoGPT's format, 2 bytes per "
                "token and at least one token; copy it again, or bring the .idx if it is half of a Megatron pair"
            )
        return "uint16", 0
    known = ", ".join(f"{magic} in version {number}" for magic, (number, _) in SHARDS.items())
    if word not in SHARDS or version != SHARDS[word][0]:
        raise ValueError(
            f"{path} begins with the magic {word} in version {version}, as files of llm.c do, but files of tokens have "
            f"{known}; give such a shard, or prepare the text with `fourfold data prepare`"
        )
    dtype = SHARDS[word][1]
    expected = SHARD_HEAD_BYTES + tokens * DTYPES[dtype].itemsize
    if tokens < 1 or size != expected:
        raise ValueError(
            f"{path} is not complete: its header says {tokens} tokens of {dtype} (at least one), {expected} bytes with "
            f"the header, but the file has {size}; copy it again"
        )
    return dtype, SHARD_HEAD_BYTES


def _read_head(path: Path, kind: str, magic: bytes, length: int, remedy: str) -> bytes:
    """Return the first bytes of a file of this kind; raise unless they begin with its magic and are all there."""
    with path.open("rb") as file:
        head = file.read(length)
    if not head.startswith(magic):
        raise ValueError(f"{path} is not {kind}: it starts with {head[: len(magic)]!r}, not {magic!r}; {remedy}")
    if len(head) < length:
        raise ValueError(f"{path} is cut off: {len(head)} of the {length} bytes of its header are there; {remedy}")
    return head


def sample_hash(path: Path, start: int = 0) -> str:
    """Return a hash of the size of a file and of `SAMPLES` blocks of it, from byte `start` on.

    The blocks are spread evenly, with the first and the last bytes among them. A change of the size, or of any byte in
    these blocks, changes the hash. A change elsewhere in a file of more than 4 MiB does not.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size - start
        found = hashlib.sha256(f"{size}\n".encode())
        last = max(0, size - SAMPLE_BYTES)
        # A file that is not longer than all blocks together is covered without a gap.
        count = min(SAMPLES, -(-size // SAMPLE_BYTES))
        for number in range(count):
            file.seek(start + (last * number // (count - 1) if count > 1 else 0))
            found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def _map_file(path: Path) -> mmap.mmap:
    """Map the bytes of a file for reading. The file must not be empty."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

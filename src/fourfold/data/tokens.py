"""The token file of Fourfold, `.tokens`: written as a stream, complete or not there at all, mapped when read.

    0      magic, 8 bytes
    8      version, then the length of the header, each u32
    16     header: JSON, filled up to byte 4096
    4096   tokens, u16 or u32
           document starts: the place of each document's first token, i64, from the next multiple of 8

All numbers are little-endian. The size of the file follows from its header, so a part of a file is noticed.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from fourfold.atomic import flush
from fourfold.data.source import DTYPES, Numbers, Source, map_file, places_between

MAGIC = b"4FTOKENS"
VERSION = 1
HEAD = 4096
FIELDS = {"dtype": str, "tokens": int, "documents": int, "vocab": int, "eod": int, "tokenizer": dict}
AGAIN = "prepare it again with `fourfold data prepare`"


class TokenWriter:
    """Writes a token file inside a `with`; the file appears when that ends, and nothing does if it raises."""

    def __init__(self, path: Path, *, vocab: int, eod: int, tokenizer: dict[str, str]) -> None:
        if not 0 <= eod < vocab <= 1 << 32:
            raise ValueError(f"{path}: eod={eod} and vocab={vocab}; ids are 0 to vocab-1 in 32 bits, eod one of them")
        self.path = path
        self.tokens = 0
        self.documents = 0
        self.header = {"vocab": vocab, "eod": eod, "tokenizer": tokenizer}
        self._dtype = "uint16" if vocab <= 1 << 16 else "uint32"
        self._start = 0  # of the document that is being written

    def __enter__(self) -> Self:
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.part")
        self._file = self._temporary.open("xb")
        try:
            self._starts = tempfile.TemporaryFile(dir=self.path.parent)  # closed by __exit__
            self._file.seek(HEAD)
        except BaseException:
            self._discard()
            raise
        return self

    def append(self, ids: Tensor) -> None:
        """More tokens of the present document."""
        vocab = self.header["vocab"]
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
            raise ValueError(
                f"{self.path}: ids from {int(ids.min())} to {int(ids.max())}, but the tokenizer says that there are "
                f"{vocab}; the tokenizer's file is at odds with itself"
            )
        _write(self._file, ids, self._dtype)
        self.tokens += len(ids)

    def end_document(self) -> None:
        """Close the present document with the end of document; one without tokens leaves no trace."""
        if self.tokens > self._start:
            self.append(torch.tensor([self.header["eod"]], device="cpu"))
            _write(self._starts, torch.tensor([self._start], device="cpu"), "int64")
            self._start = self.tokens
            self.documents += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._starts.close()
            self._discard()

    def _finish(self) -> None:
        self.end_document()
        if not self.tokens:
            raise ValueError(f"{self.path} would have no tokens; give text that is not empty")
        self._file.write(bytes(-self._file.tell() % 8))
        self._starts.seek(0)
        shutil.copyfileobj(self._starts, self._file)
        counts = {"dtype": self._dtype, "tokens": self.tokens, "documents": self.documents}
        header = json.dumps(counts | self.header).encode()
        if len(header) > HEAD - 16:
            raise ValueError(f"{self.path}: a header of {len(header)} bytes, at most {HEAD - 16}; rename the tokenizer")
        self._file.seek(0)
        self._file.write(struct.pack("<8sII", MAGIC, VERSION, len(header)) + header.ljust(HEAD - 16))
        self._file.flush()
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self.path)
        flush(self.path.parent)  # the new name survives a crash too

    def _discard(self) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def _write(file: BinaryIO, ids: Tensor, dtype: str) -> None:
    raw = bytearray(len(ids) * DTYPES[dtype].itemsize)
    if raw:
        torch.frombuffer(raw, dtype=DTYPES[dtype]).copy_(ids)
        file.write(raw)


class TokenFile(Source):
    """A token file, mapped."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        header = read_header(path)
        view = map_file(path)
        self.path = path
        self.name = name or path.name
        self.tokens: int = header["tokens"]
        self.documents: int = header["documents"]
        self.vocab = header["vocab"]
        self.eod = header["eod"]
        self.tokenizer: dict[str, str] = header["tokenizer"]
        self._ids = Numbers(view, header["dtype"], HEAD, self.tokens)
        self._starts = Numbers(view, "int64", _starts_at(header), self.documents)

    def document_starts(self, start: int, stop: int) -> Tensor:
        return places_between(self._starts, start, stop)


def read_header(path: Path) -> dict[str, Any]:
    """The header of a token file, once the file is seen to be whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEAD)
    if head[: len(MAGIC)] != MAGIC:
        raise ValueError(
            f"{path} is no token file: it starts with {head[: len(MAGIC)]!r}, not {MAGIC!r}; {AGAIN}, "
            "or rename it if it is text"
        )
    if len(head) < HEAD:
        raise ValueError(f"{path} is cut off: its header has {len(head)} of {HEAD} bytes; {AGAIN}")
    version, length = struct.unpack_from("<II", head, 8)
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version}, this Fourfold reads version {VERSION}; {AGAIN}, or install the Fourfold "
            "that wrote it"
        )
    header = _parsed(path, head[16 : 16 + length])
    expected = _starts_at(header) + 8 * header["documents"]
    if size != expected:
        raise ValueError(
            f"{path} is not whole: {header['tokens']} tokens of {header['dtype']} and {header['documents']} documents "
            f"take {expected} bytes, the file has {size}; copy it again or {AGAIN}"
        )
    return header


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
        wrong = [key for key, kind in FIELDS.items() if not isinstance(header[key], kind)]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has a damaged header ({type(error).__name__}: {error}); {AGAIN}") from error
    if wrong or header["dtype"] not in ("uint16", "uint32") or header["tokens"] < 1 or header["documents"] < 1:
        raise ValueError(f"{path} has a damaged header, {header}; {AGAIN}")
    return header


def _starts_at(header: dict[str, Any]) -> int:
    """Where the document starts begin."""
    return HEAD + -(-header["tokens"] * DTYPES[header["dtype"]].itemsize // 8) * 8

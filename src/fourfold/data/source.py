"""What every kind of token file looks like to its reader, and numbers in a mapped file.

A source is one long row of tokens, of which a window is read at a time. Files are mapped, not loaded: ranks of
one node share the pages. They are mapped for reading alone and each window is copied out, since a private
writable mapping (which torch could use without a copy) counts as memory and is refused for a file larger than it.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {"uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "uint16": torch.uint16}
DTYPES |= {"int32": torch.int32, "uint32": torch.uint32, "int64": torch.int64}
BLOCK = 1 << 20
"""Numbers that a pass over a whole file holds at once."""


class Numbers:
    """Numbers of one dtype in a mapped file (little-endian), of which nothing is read until it is asked for."""

    def __init__(self, view: mmap.mmap, dtype: str, offset: int = 0, count: int | None = None) -> None:
        self.dtype = DTYPES[dtype]
        self._view = view
        self._offset = offset
        self._count = (len(view) - offset) // self.dtype.itemsize if count is None else count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"number {index} of a file that has {self._count}")
        first, size = self._offset + index * self.dtype.itemsize, self.dtype.itemsize
        return int.from_bytes(self._view[first : first + size], "little", signed=self.dtype.is_signed)

    def read(self, start: int, stop: int) -> Tensor:
        """Numbers [start, stop) as int64."""
        if not 0 <= start <= stop <= self._count:
            raise IndexError(f"numbers {start} to {stop} of a file that has {self._count}")
        if start == stop:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        first, last = (self._offset + place * self.dtype.itemsize for place in (start, stop))
        return torch.frombuffer(bytearray(self._view[first:last]), dtype=self.dtype).to(torch.int64)

    def blocks(self) -> Iterator[Tensor]:
        """All numbers, a block at a time."""
        return (self.read(start, min(start + BLOCK, self._count)) for start in range(0, self._count, BLOCK))


class Source(ABC):
    """A row of tokens with what is known of it.

    tokens     how many there are
    name       what errors and saved positions call it
    vocab      ids are below it, where that is known
    eod        the id that ends a document, where that is known
    """

    name: str
    tokens: int
    vocab: int | None
    eod: int | None
    _ids: Numbers

    @property
    def has_documents(self) -> bool:
        """Whether it is known where documents start."""
        return True

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens [start, stop) as int64 on the CPU."""
        return self._ids.read(start, stop)

    @abstractmethod
    def document_starts(self, start: int, stop: int) -> Tensor:
        """The places in [start, stop) of tokens that begin a document, in order, each once."""


def places_between(places: Numbers, start: int, stop: int) -> Tensor:
    """The members of an ordered list that lie in [start, stop)."""
    return places.read(bisect_left(places, start), bisect_left(places, stop))


def map_file(path: Path) -> mmap.mmap:
    """The bytes of a file, which must not be empty."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

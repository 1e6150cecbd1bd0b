"""Files of tensors in the format of safetensors, written one tensor after another and read in slices.

    8 bytes: length of the header | header, JSON | the tensors, one after another

`__metadata__` of the header has a CRC-32 of every tensor, and who keeps the `FileEntry` of a file knows the header's.
The library writes all tensors at once and blocks other threads; this writes as they come and takes checksums on the
way. Reading is the library's: it checks a header before it believes it, and runs nothing.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from fourfold.errors import DamagedCheckpointError, MissingCheckpointError, UnreadableCheckpointError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""How safetensors names the dtypes that a checkpoint may hold."""
DTYPES = {code: dtype for dtype, code in CODES.items()}
PIECE = 16 << 20
"""Bytes that are summed and then written while they are in the cache."""

LONGEST_HEADER = 100 << 20
"""What safetensors reads of one at most."""

TensorTypes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape by key, in the order in which the tensors come."""


@dataclass(frozen=True, slots=True)
class FileEntry:
    """By what a file is recognized: its length and the checksum of its header, which has those of its tensors."""

    nbytes: int
    header: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    checksum: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def checksum(tensor: Tensor) -> str:
    """Of the bytes of a contiguous tensor on the CPU."""
    crc = 0
    view = _bytes_of(tensor)
    for start in range(0, len(view), PIECE):
        crc = zlib.crc32(view[start : start + PIECE], crc)
    return _shown(crc)


def _shown(crc: int) -> str:
    return f"crc32:{crc:08x}"


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which must live as long as the view."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write_file(path: Path, layout: TensorTypes, tensors: Iterable[Tensor]) -> FileEntry:
    """Write tensors in the order of the layout, each before the next is asked for, through to the disk."""
    header = _header(layout, dict.fromkeys(layout, _shown(0)))  # checksums follow; they are as long
    sums: dict[str, str] = {}
    try:
        with _telling(path):
            file = path.open("wb", buffering=0)
        with file:
            with _telling(path):
                _append(file, memoryview(header))
            for (key, (dtype, shape)), tensor in zip(layout.items(), tensors, strict=True):
                if (tensor.dtype, tuple(tensor.shape)) != (dtype, shape):
                    raise ValueError(
                        f"{key!r} was announced as {dtype} {shape} and is {tensor.dtype} {tuple(tensor.shape)}"
                    )
                tensor = tensor.detach().to("cpu").contiguous()
                with _telling(path):
                    sums[key] = _append(file, _bytes_of(tensor))
            header = _header(layout, sums)
            with _telling(path):
                file.seek(0)
                _append(file, memoryview(header))
                os.fsync(file.fileno())
                return FileEntry(os.fstat(file.fileno()).st_size, _shown(zlib.crc32(header)))
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _append(file: FileIO, content: memoryview) -> str:
    """Write bytes; returns their checksum."""
    crc = 0
    for start in range(0, len(content), PIECE):
        piece = content[start : start + PIECE]
        crc = zlib.crc32(piece, crc)
        while piece:
            piece = piece[file.write(piece) :]
    return _shown(crc)


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """What the disk refuses names the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path} ({error.strerror})") from error


def _header(layout: TensorTypes, sums: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **sums}}  # some readers ask for a format
    offset = 0
    for key, (dtype, shape) in layout.items():
        if dtype not in CODES:
            raise ValueError(f"{key!r} has dtype {dtype}; a file holds {', '.join(map(str, CODES))}")
        end = offset + prod(shape) * dtype.itemsize
        table[key] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class File:
    """A file of tensors, opened to read. Whatever is wrong with it raises and names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise MissingCheckpointError(f"{path} is missing; copy the folder again with all its files")
        try:
            with path.open("rb") as file:
                start = file.read(8)
                length = min(int.from_bytes(start, "little"), LONGEST_HEADER)
                header = start + file.read(length)
        except OSError as error:
            raise UnreadableCheckpointError(error.errno, f"cannot read {path} ({error.strerror})") from error
        self.entry = FileEntry(path.stat().st_size, _shown(zlib.crc32(header)))
        library = _safetensors()
        try:
            self._content = library.safe_open(path, framework="pt").__enter__()
        except library.SafetensorError as error:
            pickled = start[:2] == b"PK" or start[:1] == b"\x80"
            what = "a pickle, which is never opened, in the place of a safetensors file" if pickled else "damaged"
            raise DamagedCheckpointError(
                f"{path} is {what} ({error}); copy it again from where it was saved"
            ) from error
        sums = self._content.metadata() or {}
        self.stored: dict[str, Stored] = {}
        for key in self._content.keys():  # noqa: SIM118  # not a mapping
            found = self._content.get_slice(key)
            if found.get_dtype() not in DTYPES:
                raise ValueError(f"{path}: {key!r} has dtype {found.get_dtype()}, which no checkpoint holds")
            self.stored[key] = Stored(DTYPES[found.get_dtype()], tuple(found.get_shape()), sums.get(key, ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._content.__exit__(None, None, None)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """A tensor, or these slices of its dims."""
        return self._content.get_slice(key)[slices] if slices else self._content.get_tensor(key)

    def verify(self, key: str) -> None:
        """Raise unless the bytes of a tensor are those that were written."""
        expected, found = self.stored[key].checksum, checksum(self._content.get_tensor(key))
        if found != expected:
            raise DamagedCheckpointError(
                f"{self.path} is damaged: {key!r} has checksum {found} and was written with {expected or 'none'}; "
                "copy the file again from where it was saved, or use another checkpoint"
            )

    def require(self, entry: FileEntry) -> None:
        """Raise unless this is the file that was written."""
        if self.entry.nbytes != entry.nbytes:
            raise DamagedCheckpointError(
                f"{self.path} has {self.entry.nbytes} bytes and was written with {entry.nbytes}; copy it again"
            )
        if self.entry.header != entry.header:
            raise DamagedCheckpointError(f"{self.path} has another header than was written; copy it again")


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"checkpoints are files of safetensors: pip install 'fourfold[train]' ({error})") from error
    return safetensors

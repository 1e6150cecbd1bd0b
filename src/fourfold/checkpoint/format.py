"""The format of a checkpoint: tensor files in the format of safetensors, one per rank, and their record, a JSON file.

A tensor file is written one tensor after another and read in slices:

    8 bytes: length of the header | header, JSON | the tensors, one after another

`__metadata__` of the header has the CRC-32 of every tensor, and the record has the CRC-32 of the header. The library
safetensors writes all tensors at once and blocks other threads meanwhile, so writing is done here; reading is left to
the library, which checks a header before it relies on it and never runs code.

Both directions go through a tensor in pieces of `CHUNK_BYTES`. While a piece is in the CPU's cache, its checksum is
computed and, for parameters and optimizer state, its numbers are checked for being finite.

The record, `checkpoint.json`, says which tensors there are, how they are cut on which grid, and the state of training:

    {"format": "fourfold-checkpoint", "version": 2, "digest": "sha256:...",
     "grid": {"sizes": {"x": 2, "y": 1, "z": 2, "data": 1, "pipe": 2}, "order": ["x", "y", "z", "data", "pipe"]},
     "state": {"step": 100, ...},
     "tensors": {name: {"shape": [96, 64], "dtype": "float32", "cuts": [["x", 0], ["z", 0]], "finite": true,
                        "pipe": [1]}},
     "files": {"rank-00000.safetensors": {"bytes": 24000, "header": "crc32:..."}}}

`finite` is there for parameters and optimizer state. Buffers may hold infinities, such as those of a mask. Records of
earlier versions lack the key; there the optimizer's tensors, and the parameters that have some, must be finite. `pipe`
lists the pipe ranks that held the tensor, where not all of them did; one of these wrote it. The sizes of a folded grid
also say its fold, `"expert": 4, "ex": 1, "ez": 2`, and tensors of experts are cut over the axes of the fold.

Which rank wrote which box of a tensor follows from the grid and the cuts, so the record needs no list of parts. Nothing
in a record is trusted: the digest reveals damage, and every name, number and cut is checked here. Records of version 1
have older names of keys in their state, which `old_versions` knows.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import stat
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapreplace
from io import FileIO
from math import isfinite, prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fourfold.atomic import name_in_errors, write_bytes
from fourfold.axes import AXES, FOLD, FOLD_SIZES, FOLDED, PIPE
from fourfold.errors import (
    DamagedCheckpointError,
    MissingCheckpointError,
    NotFiniteError,
    UnreadableCheckpointError,
)
from fourfold.grid import Shape
from fourfold.layout import Box, Layout
from fourfold.old_versions import complete_order, upgrade_state
from fourfold.parse import parse_json

DTYPE_CODES = {
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
"""The dtypes that a checkpoint may hold, and their names in a safetensors header."""
_DTYPES_BY_CODE = {code: dtype for dtype, code in DTYPE_CODES.items()}
_DTYPES_BY_NAME = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPE_CODES}

EXTRA = "extra"
"""The key in the state under which `ff.save` keeps what its caller gave."""
PAIRS = "fourfold.pairs"
"""The only key of a JSON object that stands for a table with keys that are not texts: a list of [key, value]."""
MOST_LEVELS = 80
"""How deeply values in the state may be nested, a little less than what `parse_json` accepts for the whole record."""

MODEL, OPTIMIZER, RANDOM = "model/", "optimizer/", "random/"
"""The prefixes of the three groups of tensors; `training_state` describes them."""
CHUNK_BYTES = 16 << 20
"""The number of bytes that are checked and written, or read and checked, at a time: few enough to stay in the CPU's
cache between the two, many enough that a call per chunk costs nothing. A multiple of the size of every dtype."""
LONGEST_HEADER = 100 << 20
"""The longest header that safetensors accepts, in bytes."""

FORMAT, VERSION = "fourfold-checkpoint", 2
"""The format and version that a record names; records of all versions up to this one can be read."""
RECORD = "checkpoint.json"
"""The file that describes a checkpoint. It is written last, so a folder that has it is complete."""
CHECKPOINT_FILE = re.compile(r"checkpoint\.json|rank-\d{5,}\.safetensors")
"""The names of all files of a checkpoint."""
MAX_RANKS = 1 << 17
"""The most ranks that the grid of a record may have. The arithmetic over ranks takes time and memory in proportion, and
anybody may have written the record."""


class TensorType(NamedTuple):
    """The dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        return cls(tensor.dtype, tuple(tensor.shape))

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


TensorTypes = Mapping[str, TensorType]
"""The type of every tensor by key, in the order in which the tensors are written."""


# Tensor files


@dataclass(frozen=True, slots=True)
class FileInfo:
    """The length of a tensor file and the checksum of its header, which has the checksums of its tensors."""

    nbytes: int
    header: str


def write_tensor_file(
    path: Path, types: TensorTypes, tensors: Iterable[Tensor], finite: Collection[str] = ()
) -> FileInfo:
    """Write tensors in the order of `types`, each before the next is asked for, and flush them to the disk.

    Raise NotFiniteError if one of the tensors named in `finite` has a NaN or an infinity; then there is no file.
    """
    # A checksum of zeros holds the place: the real ones are known at the end and are as long.
    header = _header(types, dict.fromkeys(types, _crc_text(0)))
    checksums: dict[str, str] = {}
    try:
        with name_in_errors(path):
            file = path.open("wb", buffering=0)
        with file:
            _write(file, memoryview(header))
            for (key, announced), tensor in zip(types.items(), tensors, strict=True):
                if (found := TensorType.of(tensor)) != announced:
                    raise ValueError(f"{key!r} was announced as {announced} and is {found}")
                tensor = (
                    tensor.detach().to("cpu").contiguous()
                )  # this name keeps the bytes alive while they are written
                checksums[key] = _append(file, key, tensor, finite=key in finite)
            header = _header(types, checksums)
            file.seek(0)
            _write(file, memoryview(header))
            with name_in_errors(path):
                # The folder is renamed once all files are complete; a power cut must not undo a file after that.
                os.fsync(file.fileno())
            return FileInfo(os.fstat(file.fileno()).st_size, _crc_text(zlib.crc32(header)))
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _header(types: TensorTypes, checksums: Mapping[str, str]) -> bytes:
    """Return the length of the header and the header itself."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", **checksums}}  # some readers refuse a file without format
    offset = 0
    for key, kind in types.items():
        if kind.dtype not in DTYPE_CODES:
            raise ValueError(f"{key!r} has dtype {kind.dtype}; a checkpoint holds {', '.join(map(str, DTYPE_CODES))}")
        end = offset + kind.nbytes
        table[key] = {"dtype": DTYPE_CODES[kind.dtype], "shape": list(kind.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the first tensor is aligned
    return len(text).to_bytes(8, "little") + text


def _append(file: FileIO, key: str, tensor: Tensor, *, finite: bool) -> str:
    """Write a tensor and return its checksum; with `finite` raise if a number of it is not."""
    crc, flat, count = 0, tensor.view(-1), CHUNK_BYTES // tensor.element_size()
    for start in range(0, len(flat), count):
        piece = flat[start : start + count]
        if finite and not is_finite(piece):
            raise NotFiniteError(f"{key!r} holds NaN or infinity")
        content = _bytes_of(piece)
        crc = zlib.crc32(content, crc)
        _write(file, content)
    return _crc_text(crc)


def _write(file: FileIO, left: memoryview) -> None:
    with name_in_errors(Path(str(file.name))):
        while left:  # an unbuffered file may write less than it is given
            left = left[file.write(left) :]


def is_finite(piece: Tensor) -> bool:
    """Return whether no number of a tensor is NaN or infinite, in one pass and without a temporary of its size."""
    if not piece.is_floating_point() or not piece.numel():
        return True
    # A NaN anywhere becomes both extremes. This is five times as fast as isfinite().all(), and a third of a checksum.
    low, high = torch.aminmax(piece)
    return isfinite(low) and isfinite(high)


def _crc_text(crc: int) -> str:
    return f"crc32:{crc:08x}"


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a contiguous tensor on the CPU. The caller keeps the tensor alive meanwhile."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class TensorFile:
    """A safetensors file that is open for reading. Every error about it names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path), path.open("rb") as file:
            start = file.read(8)
            length = min(int.from_bytes(start, "little"), LONGEST_HEADER)
            header = start + file.read(length)
            self.info = FileInfo(os.fstat(file.fileno()).st_size, _crc_text(zlib.crc32(header)))
        try:  # imported here, since only reading a checkpoint needs the library
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise ImportError(f"checkpoints need safetensors: pip install 'fourfold[train]' ({error})") from error
        try:
            self._content = safe_open(path, framework="pt").__enter__()
        except SafetensorError as error:
            pickled = start[:2] == b"PK" or start[:1] == b"\x80"
            what = "a pickle, which is never opened, in the place of a safetensors file" if pickled else "damaged"
            raise DamagedCheckpointError(
                f"{path} is {what} ({error}); copy it again from where it was saved"
            ) from error
        self._checksums = self._content.metadata() or {}  # files of other programs have none
        self.tensors: dict[str, TensorType] = {}
        for key in self._content.keys():  # noqa: SIM118  # not a mapping
            found = self._content.get_slice(key)
            if found.get_dtype() not in _DTYPES_BY_CODE:
                raise ValueError(f"{path}: {key!r} has dtype {found.get_dtype()}, which no checkpoint holds")
            self.tensors[key] = TensorType(_DTYPES_BY_CODE[found.get_dtype()], tuple(found.get_shape()))
        # The library has checked that the tensors lie one behind another, within the file.
        table = json.loads(header[8:])
        self._starts = {key: len(header) + table[key]["data_offsets"][0] for key in self.tensors}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._content.__exit__(None, None, None)

    def read(self, key: str, slices: tuple[slice, ...] = ()) -> Tensor:
        """Return a tensor, or these slices of its dims."""
        return self._content.get_slice(key)[slices] if slices else self._content.get_tensor(key)

    def verify(self, key: str, *, finite: bool = False) -> None:
        """Raise unless the bytes of a tensor are the ones that were written and, with `finite`, its numbers finite.

        The bytes are read, not mapped: where the disk fails, a read raises, but a mapping would kill the process.
        """
        kind, crc, sound = self.tensors[key], 0, True
        left, buffer = kind.nbytes, bytearray(min(kind.nbytes, CHUNK_BYTES))
        with reading(self.path), self.path.open("rb", buffering=0) as file:
            file.seek(self._starts[key])
            while left:
                piece = memoryview(buffer)[: min(left, CHUNK_BYTES)]
                if _fill(file, piece) < len(piece):
                    raise DamagedCheckpointError(f"{self.path} became shorter while it was read; copy it again")
                crc = zlib.crc32(piece, crc)
                sound = sound and (not finite or is_finite(torch.frombuffer(piece, dtype=kind.dtype)))
                left -= len(piece)
        expected, found = self._checksums.get(key, "none"), _crc_text(crc)
        if found != expected:
            raise DamagedCheckpointError(
                f"{self.path} is damaged: {key!r} has checksum {found} and was written with {expected}; "
                "copy the file again from where it was saved, or use another checkpoint"
            )
        if not sound:
            raise DamagedCheckpointError(
                f"{self.path} was saved with NaN or infinity in {key!r}, so it is of no use; take an earlier checkpoint"
            )

    def require(self, written: FileInfo) -> None:
        """Raise unless this file has the length and the header of the file that was written."""
        if self.info.nbytes != written.nbytes:
            raise DamagedCheckpointError(
                f"{self.path} has {self.info.nbytes} bytes and was written with {written.nbytes}; copy it again"
            )
        if self.info.header != written.header:
            raise DamagedCheckpointError(f"{self.path} has another header than was written; copy it again")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, a file that is missing raises `MissingCheckpointError`, any other fault of the system `Unreadable...`.

    Only the first means that the checkpoint is damaged: a disk or a network that fails may work again. What is no file
    is damage too, and is never opened: opening a fifo would wait for its writer, and a device may never end.
    """
    try:
        kind = path.stat().st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            raise DamagedCheckpointError(f"{path} is not a file but a fifo, socket or device; copy the folder again")
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise MissingCheckpointError(f"{path} is missing; copy the folder again with all its files") from error
    except OSError as error:
        raise UnreadableCheckpointError(error.errno, f"cannot read {path} ({error.strerror})") from error


def _fill(file: FileIO, piece: memoryview) -> int:
    """Fill a piece of memory from a file, and return the number of bytes until the file's end or the piece's."""
    done = 0
    while done < len(piece) and (count := file.readinto(piece[done:])):
        done += count
    return done


# The record


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The global shape and dtype of a tensor, how it is cut, whether it is finite, and which pipe ranks hold it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: Layout
    finite: bool = False
    """Whether all its numbers must be finite: it is a parameter or a part of the optimizer's state."""
    pipe: tuple[int, ...] = ()
    """The pipe ranks that hold the tensor, in increasing order; empty if all do."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def box(self, grid: Shape, coords: Mapping[str, int]) -> Box:
        """Return the box that the rank at these coordinates holds."""
        return self.storage.box(self.shape, grid.cuts, coords)


@dataclass(frozen=True)
class Record:
    """The record of a checkpoint: its tensors and files, the grid that wrote it, and the state of training."""

    grid: Shape
    """The shape of the grid that wrote the checkpoint."""
    state: dict[str, Any]
    """Everything besides tensors that is needed to resume training: step, config, position in the data."""
    tensors: dict[str, TensorInfo]
    files: dict[str, FileInfo] = field(default_factory=dict)

    @cached_property
    def _writers(self) -> dict[str, dict[str, int]]:
        """The writer of every tensor among the ranks that hold equal copies: its coordinates on the axes that do not
        cut the tensor. The largest tensors are assigned first, each to the rank with the least to write.

        The assignment is part of the format, since readers repeat it to find a tensor's files.
        """
        loads: dict[tuple[tuple[str, ...], tuple[int, ...]], list[tuple[int, int]]] = {}
        found = {}
        for name, info in sorted(self.tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
            holders: dict[str, Sequence[int]] = {
                axis: range(self.grid.cuts[axis])
                for axis in (*info.storage.view, PIPE)
                if axis not in info.storage.axes
            }
            if info.pipe:
                holders[PIPE] = info.pipe
            several = tuple(axis for axis, held in holders.items() if len(held) > 1)
            count = prod(map(len, holders.values()))
            heap = loads.setdefault((several, info.pipe), [(0, index) for index in range(count)])
            load, index = heap[0]
            heapreplace(heap, (load + info.nbytes, index))
            found[name] = {}
            for axis, held in holders.items():
                index, place = divmod(index, len(held))
                found[name][axis] = held[place]
        return found

    def names(self, *prefixes: str) -> list[str]:
        """Return the names of tensors that begin with one of these prefixes."""
        return [name for name in self.tensors if name.startswith(prefixes)]

    def parts(self, name: str, within: Box | None = None) -> Iterator[tuple[int, Box]]:
        """Yield the ranks that write a tensor and their boxes; with `within`, only of boxes that overlap it."""
        info, writers = self.tensors[name], self._writers[name]
        rank_at = self.grid.rank_in_fold if info.storage.view is FOLD else self.grid.rank
        for coords, box in info.storage.boxes(info.shape, self.grid.cuts, within):
            if all(box):  # a rank with an empty box writes nothing
                yield rank_at({**writers, **coords}), box

    def written_by(self, coords: Mapping[str, int]) -> list[str]:
        """Return the tensors that the rank at these coordinates writes its part of."""
        return [
            name
            for name, info in self.tensors.items()
            if all(coords[axis] == index for axis, index in self._writers[name].items())
            and all(info.box(self.grid, coords))
        ]


def rank_file(rank: int) -> str:
    """Return the name of a rank's tensor file."""
    return f"rank-{rank:05d}.safetensors"


def write_record(folder: Path, record: Record) -> None:
    """Write the record into a folder that has all other files of the checkpoint, and flush it to the disk."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "grid": {"sizes": {**record.grid.sizes, **record.grid.fold_sizes}, "order": list(record.grid.order)},
        "state": record.state,
        "tensors": {name: tensor_entry(info) for name, info in record.tensors.items()},
        "files": {name: {"bytes": info.nbytes, "header": info.header} for name, info in record.files.items()},
    }
    write_bytes(folder / RECORD, json.dumps({**content, "digest": _digest(content)}).encode())


def tensor_entry(info: TensorInfo) -> dict[str, Any]:
    """Return what a record says about a tensor."""
    return {
        "shape": list(info.shape),
        "dtype": str(info.dtype).removeprefix("torch."),
        "cuts": [list(cut) for cut in info.storage.cuts],
        **({"finite": True} if info.finite else {}),
        **({"pipe": list(info.pipe)} if info.pipe else {}),
    }


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def read_record(folder: Path) -> Record:
    """Return the record of a checkpoint's folder, of any version, with every statement in it checked."""
    path = folder / RECORD
    with reading(path):
        text = path.read_bytes()
    try:
        content = parse_json(text)
        kind, version, digest = content["format"], content["version"], content.pop("digest")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{path} is not the record of a checkpoint ({type(error).__name__}: {error}); copy it again"
        ) from error
    if kind != FORMAT or version not in range(1, VERSION + 1):
        raise ValueError(
            f"{path} has format {kind!r} version {version!r}, and this Fourfold reads {FORMAT!r} up to version "
            f"{VERSION}; use the Fourfold that wrote it"
        )
    if digest != _digest(content):
        raise DamagedCheckpointError(f"{path} is damaged: its digest is not the digest of its content; copy it again")
    try:
        return _parse_record(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a checkpoint ({error}); save it again") from error


def _parse_record(content: Mapping[str, Any]) -> Record:
    if not isinstance(content["state"], dict):
        raise TypeError("state is not a table")
    sizes, order = content["grid"]["sizes"], content["grid"]["order"]
    # Another version may have other axes. One with a single rank, such as every axis that only one version knows must
    # be, cuts nothing: it is left out if it is unknown here, and added if it is unknown there.
    ignored = [axis for axis, size in sizes.items() if axis not in (*AXES, *FOLD_SIZES) and size == 1]
    known = {axis: size for axis, size in sizes.items() if axis not in ignored}
    grid = Shape(**known, order=tuple(complete_order([axis for axis in order if axis not in ignored])))
    if grid.world > MAX_RANKS:
        raise ValueError(f"a grid of {grid.world} ranks; the most is {MAX_RANKS}")
    tensors = {name: parse_tensor(name, found, grid, ignored) for name, found in content["tensors"].items()}
    if not any(info.finite for info in tensors.values()):  # an earlier version wrote it, or a conversion
        state = [name for name in tensors if name.startswith(OPTIMIZER)]
        for name in {*state, *(MODEL + name.removeprefix(OPTIMIZER).partition("/")[2] for name in state)}:
            if name in tensors:
                tensors[name] = replace(tensors[name], finite=True)
    files = {name: FileInfo(found["bytes"], found["header"]) for name, found in content["files"].items()}
    for name, info in files.items():
        if not CHECKPOINT_FILE.fullmatch(name) or name == RECORD:  # nothing outside the folder is ever opened
            raise ValueError(f"{name!r} is not the name of a rank's file")
        if type(info.nbytes) is not int or not isinstance(info.header, str):
            raise TypeError(f"{name!r} has no length or no checksum")
    return Record(grid, upgrade_state(content["state"]), tensors, files)


def parse_tensor(name: str, found: Mapping[str, Any], grid: Shape, ignored: Collection[str] = ()) -> TensorInfo:
    """Return what the record of a grid says about a tensor, without cuts over the ignored axes."""
    shape = tuple(found["shape"])
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{name!r} has shape {shape}")
    if found["dtype"] not in _DTYPES_BY_NAME:
        raise ValueError(f"{name!r} has dtype {found['dtype']!r}")
    cuts = tuple((axis, dim) for axis, dim in found["cuts"] if axis not in ignored)
    if not all(axis in (*AXES, *FOLDED) and type(dim) is int and 0 <= dim < len(shape) for axis, dim in cuts):
        raise ValueError(f"{name!r} of shape {shape} is cut by {cuts}")
    layout, pipe = Layout(cuts), tuple(found.get("pipe", ()))
    if not all(type(rank) is int and 0 <= rank < grid.sizes[PIPE] for rank in pipe) or sorted(set(pipe)) != list(pipe):
        raise ValueError(f"{name!r} is on the pipe ranks {pipe} of {grid.sizes[PIPE]}")
    if pipe and PIPE in layout.axes:
        raise ValueError(f"{name!r} is cut over {PIPE}, and only on its ranks {pipe}")
    return TensorInfo(shape, _DTYPES_BY_NAME[found["dtype"]], layout, found.get("finite") is True, pipe)


def join_over_pipe(by_rank: Sequence[Mapping[str, TensorInfo]]) -> dict[str, TensorInfo]:
    """Return the tensors of all pipe ranks, given those of each: group by group, each with the ranks that hold it."""
    found: dict[str, TensorInfo] = {}
    holders: dict[str, list[int]] = {}
    for rank, tensors in enumerate(by_rank):
        for name, info in tensors.items():
            if found.setdefault(name, info) != info:
                raise ValueError(
                    f"{name!r} is {tensor_entry(info)} on pipe rank {rank} and {tensor_entry(found[name])} on pipe "
                    f"rank {holders[name][0]}; both must hold the same tensor"
                )
            holders.setdefault(name, []).append(rank)
    groups = list(dict.fromkeys(name.partition("/")[0] for name in found))
    return {
        name: replace(found[name], pipe=() if len(holders[name]) == len(by_rank) else tuple(holders[name]))
        for name in sorted(found, key=lambda name: groups.index(name.partition("/")[0]))
    }


# Values of others in the state of a record


def pack_json(value: Any, name: str, level: int = 0) -> Any:
    """Return a value in the form that JSON holds; `unpack_json` returns it equal, but with lists in place of tuples.

    Raise TypeError if JSON cannot hold it; the error calls it `name`.
    """
    if level > MOST_LEVELS:
        raise ValueError(f"{name} is nested more than {MOST_LEVELS} deep")
    if isinstance(value, Mapping):
        pairs = [(key, pack_json(inner, f"{name}[{key!r}]", level + 2)) for key, inner in value.items()]
        if all(isinstance(key, str) for key in value) and PAIRS not in value:
            return dict(pairs)
        return {PAIRS: [[_plain(key, f"a key of {name}"), inner] for key, inner in pairs]}
    if isinstance(value, (list, tuple)):
        return [pack_json(inner, f"{name}[{index}]", level + 1) for index, inner in enumerate(value)]
    return _plain(value, name)


def _plain(value: Any, name: str) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{name} is of type {type(value).__name__}, which JSON cannot hold; give texts, numbers, lists and tables: "
        "tensor.tolist() makes numbers of a tensor"
    )


def unpack_json(value: Any) -> Any:
    """Return the value that `pack_json` packed."""
    if isinstance(value, dict):
        if value.keys() == {PAIRS}:
            return {key: unpack_json(inner) for key, inner in value[PAIRS]}
        return {key: unpack_json(inner) for key, inner in value.items()}
    return [unpack_json(inner) for inner in value] if isinstance(value, list) else value

"""Conversion from and to folders of torch's distributed checkpoint (DCP), tensor by tensor, for one process.

    model/NAME                 <->  model.NAME
    optimizer/exp_avg/NAME     <->  optim.state.NAME.exp_avg    as torch's get_optimizer_state_dict names it
    random/cpu                 <->  random.cpu
    the state of the run       <->  fourfold, a string of JSON

The JSON has the names too, so that a folder which Fourfold wrote is converted back exactly. From a folder of another
program only the parameters are taken.

Reading a folder never runs code from it. Its `.metadata` is a pickle, and a pickle names the functions and classes that
are called while it is read. Every name that the format needs is on a list here, and stands for a class of ours that
keeps its arguments and does nothing. A name that is not on the list is refused before anything is called. The contents
are not trusted either: names, positions and boxes are checked. Tensors are read with torch.load(weights_only=True).
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex

from fourfold.atomic import AtomicFolder, require_free
from fourfold.checkpoint.format import (
    DTYPE_CODES,
    MODEL,
    OPTIMIZER,
    RANDOM,
    Record,
    TensorFile,
    TensorType,
    read_record,
)
from fourfold.checkpoint.load import read_full_tensor
from fourfold.checkpoint.save import write_full_tensors
from fourfold.errors import DamagedCheckpointError, MissingCheckpointError
from fourfold.layout import Box, boxed, overlap
from fourfold.old_versions import upgrade_state
from fourfold.parse import parse_json

STATE = "fourfold"
"""The key of the JSON with everything that is not a tensor."""
VERSION = 1
"""The version of that JSON. The keys inside its state may be older still; `old_versions` renames them."""
PREFIX = "model."
"""The prefix of the parameters' keys in a folder of another program, if any key has it."""
NOT_PARAMETERS = ("optim.", "optimizer.", "lr_scheduler.", "scheduler.", "dataloader.", "train_state.")
"""Prefixes of keys that are not parameters, in a folder where no key begins with `model.`."""

Progress = Callable[[int, int], object]
"""A function that is called with the number of bytes done and the number of bytes in all."""


@dataclass(frozen=True, slots=True)
class Converted:
    """The number of tensors and bytes that were converted, and the keys that were left out."""

    tensors: int
    nbytes: int
    left_out: tuple[str, ...] = ()


# To DCP


def to_dcp(source: Path, target: Path, *, progress: Progress = lambda *_: None) -> Converted:
    """Write a checkpoint as a folder that `torch.distributed.checkpoint.load` reads; verify every byte on the way.

    Each tensor gets a file, since torch's writer keeps all tensors of a file in memory until the file is closed.
    """
    require_free(target)
    record = read_record(source)
    paths = {name: path_of(name) for name in record.tensors}
    names = {".".join(path): name for name, path in paths.items()}
    if len(names) < len(paths):
        twice = next(name for name, path in paths.items() if names[".".join(path)] != name)
        raise ValueError(f"{source}: {twice!r} and {names['.'.join(paths[twice])]!r} would get the same key")
    total = sum(info.nbytes for info in record.tensors.values())
    planner = _LazyPlanner(lambda key: read_full_tensor(source, record, names[key]), lambda done: progress(done, total))
    folder = AtomicFolder(target.resolve())
    try:
        with folder.fill() as partial, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process converts by itself
            writer = dcp.FileSystemWriter(partial, single_file_per_rank=False, per_thread_copy_ahead=0)
            dcp.save(_nested(record, paths, names), storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))  # torch wraps every exception, even Ctrl-C
        if isinstance(cause, RuntimeError) and isinstance(cause.__context__, OSError):
            cause = OSError(cause.__context__.errno, f"cannot write {folder.partial} ({cause.__context__.strerror})")
        raise cause from None
    return Converted(len(names), total)


def path_of(name: str) -> tuple[str, ...]:
    """Return the path of a tensor in the nested state dict of a DCP folder; its key is the path joined by dots."""
    group, _, rest = name.partition("/")
    if name.startswith(OPTIMIZER):
        moment, _, parameter = rest.partition("/")
        return "optim", "state", parameter, moment
    if not name.startswith((MODEL, RANDOM)):
        raise ValueError(f"{name!r} is neither of {MODEL}, {OPTIMIZER} nor {RANDOM} and has no name in a DCP folder")
    return group, rest


def _nested(record: Record, paths: Mapping[str, tuple[str, ...]], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the nested state dict, with tensors that have a shape and no memory."""
    nested: dict[str, Any] = {STATE: json.dumps({"version": VERSION, "state": record.state, "names": names})}
    for name, (*outer, last) in paths.items():
        table = nested
        for key in outer:
            table = table.setdefault(key, {})
        info = record.tensors[name]
        table[last] = torch.empty(info.shape, dtype=info.dtype, device="meta")
    return nested


class _LazyPlanner(DefaultSavePlanner):
    """A planner that reads a tensor when torch is about to write it."""

    def __init__(self, read: Callable[[str], Tensor], progress: Callable[[int], object]) -> None:
        super().__init__()
        self._read, self._progress, self._done = read, progress, 0

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = super().lookup_object(index)
        if not isinstance(found, Tensor):
            return found
        self._done += found.nbytes
        self._progress(self._done)
        return self._read(index.fqn)


# From DCP


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes in a file of the folder."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """A tensor of a DCP folder: the boxes that tile it, each with the bytes that hold it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Box, FileRange], ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class DcpContents:
    """Everything in a DCP folder, by key: the tensors and the other values."""

    tensors: dict[str, DcpTensor]
    values: dict[str, FileRange]


def from_dcp(
    source: Path, target: Path, *, prefix: str | None = None, progress: Progress = lambda *_: None
) -> Converted:
    """Write a DCP folder as a checkpoint; no code in it is run.

    From a folder that `to_dcp` has not written, the tensors with keys that begin with `prefix` are taken as parameters,
    without the prefix. None means `model.` if any key begins so, else everything that is not of `NOT_PARAMETERS`.
    """
    require_free(target)
    contents = read_metadata(source)
    state: dict[str, Any] = {}
    if STATE in contents.values:
        if prefix is not None:
            raise ValueError(f"{source} was written by Fourfold and knows its names; leave the prefix {prefix!r} out")
        state, names = _read_state(source, contents)
        left_out: list[str] = []
    else:
        names = _parameter_names(source, contents, prefix)
        left_out = [key for key in (*contents.tensors, *contents.values) if key not in names]
    taken = {name: (key, contents.tensors[key]) for key, name in names.items()}
    for key, tensor in taken.values():  # before anything is written
        if tensor.dtype not in DTYPE_CODES:
            held = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPE_CODES)
            raise ValueError(f"{source}: {key!r} has dtype {tensor.dtype}; a checkpoint holds {held}")
        for _, where in tensor.parts:
            _require_bytes(source, key, where)

    total = sum(tensor.nbytes for _, tensor in taken.values())

    def tensors() -> Iterator[Tensor]:
        done = 0
        for key, tensor in taken.values():
            yield _read_tensor(source, key, tensor)
            done += tensor.nbytes
            progress(done, total)

    types = {name: TensorType(tensor.dtype, tensor.shape) for name, (_, tensor) in taken.items()}
    write_full_tensors(target, types, tensors(), state)
    return Converted(len(taken), total, tuple(left_out))


def _require_bytes(source: Path, key: str, where: FileRange) -> None:
    """Raise unless the file is there and long enough."""
    path, end = source / where.file, where.offset + where.nbytes
    if not path.is_file():
        raise MissingCheckpointError(f"{path} is missing; copy the folder again with all its files")
    if end > path.stat().st_size:
        raise DamagedCheckpointError(f"{path} is cut short: {key!r} ends at byte {end}; copy it again")


def _read_state(source: Path, contents: DcpContents) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the state, and the names by key, of a folder that `to_dcp` has written."""
    where = contents.values[STATE]
    _require_bytes(source, STATE, where)
    text = _torch_load(source, STATE, where)
    try:
        table = parse_json(text)
        version, state, names = table["version"], table["state"], table["names"]
        fine = isinstance(state, dict) and all(isinstance(name, str) and "/" in name for name in names.values())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{source}: {STATE!r} is damaged ({type(error).__name__}: {error}); save it again") from error
    if version != VERSION:
        raise ValueError(
            f"{source} has version {version!r}, and this Fourfold reads version {VERSION}; use the one that wrote it"
        )
    if not fine or names.keys() != contents.tensors.keys() or len(set(names.values())) < len(names):
        raise ValueError(f"{source}: the names in {STATE!r} are not those of its tensors; save it again")
    return upgrade_state(state), names


def _parameter_names(source: Path, contents: DcpContents, prefix: str | None) -> dict[str, str]:
    """Return Fourfold's names of the parameters, by key, in a folder of another program."""
    left_out = ()
    if prefix is None:
        prefix = PREFIX if any(key.startswith(PREFIX) for key in contents.tensors) else ""
        left_out = () if prefix else NOT_PARAMETERS
    names = {
        key: MODEL + key.removeprefix(prefix)
        for key in contents.tensors
        if key.startswith(prefix) and not key.startswith(left_out)
    }
    if not names:
        shown = ", ".join(map(repr, list(contents.tensors)[:5])) or "none"
        raise ValueError(f"{source} has no tensor that begins with {prefix!r}; its tensors are {shown} ...")
    return names


def _read_tensor(source: Path, key: str, tensor: DcpTensor) -> Tensor:
    """Return a tensor joined from its parts."""
    if len(tensor.parts) == 1:
        return _read_part(source, key, tensor, *tensor.parts[0])
    full = torch.empty(tensor.shape, dtype=tensor.dtype)
    for box, where in tensor.parts:
        boxed(full, box).copy_(_read_part(source, key, tensor, box, where))
    return full


def _read_part(source: Path, key: str, tensor: DcpTensor, box: Box, where: FileRange) -> Tensor:
    path = source / where.file
    with path.open("rb") as file:
        file.seek(where.offset + 8)  # behind the length of a safetensors header, where its JSON begins
        is_safetensors = file.read(2) == b'{"'
    if is_safetensors:  # written with SerializationFormat.SAFETENSORS; .metadata does not have the position inside
        with TensorFile(path) as content:
            if key not in content.tensors:
                raise DamagedCheckpointError(f"{path} does not hold {key!r}; copy the folder again")
            part = content.read(key)
    else:
        part = _torch_load(source, key, where)
    # A subclass of Tensor could bring code of its own.
    if type(part) is not Tensor or part.layout != torch.strided or part.device.type != "cpu":
        raise ValueError(f"{path} holds no plain tensor for {key!r}; save it again")
    found, expected = (part.dtype, tuple(part.shape)), (tensor.dtype, tuple(map(len, box)))
    if found != expected:
        raise DamagedCheckpointError(
            f"{path} holds {found} for {key!r}, but .metadata says {expected}; copy the folder again"
        )
    return part


def _torch_load(source: Path, key: str, where: FileRange) -> Any:
    """Return the object that torch.save wrote there, if it consists of tensors and plain values."""
    path = source / where.file
    with path.open("rb") as file:
        file.seek(where.offset)
        content = io.BytesIO(file.read(where.nbytes))
    try:
        return torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile stream makes torch raise anything
        # Torch's message is long advice; the line that says what was found has GLOBAL in it and may quote the file.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
        raise DamagedCheckpointError(
            f"{path} holds something else than a tensor for {key!r} and nothing of it was run "
            f"({reason if reason.isprintable() else ascii(reason)}); copy it again, or do not trust it"
        ) from error


# The pickle


class _StandIn:
    """A stand-in for a class of the format: it holds the state that the pickle gives it and does nothing."""

    state: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


METADATA = ".metadata"
"""The file of a DCP folder that describes all others."""
_MODULE = "torch.distributed.checkpoint.metadata"
_MODULE_UNTIL_2_2 = "torch.distributed._shard.sharded_tensor.metadata"
"""The module that had the properties of a tensor up to torch 2.2."""
STAND_INS: dict[str, type[_StandIn]] = {
    name: type(name, (_StandIn,), {})
    for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
        "MetadataIndex", "StorageMeta", "_StorageInfo", "_MEM_FORMAT_ENCODING",
    )
}  # fmt: skip
"""A stand-in for each class of the format, by the name of the class."""
PICKLED_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip
ALLOWED: Mapping[tuple[str, str], Any] = {
    **{(_MODULE, name): stand_in for name, stand_in in STAND_INS.items()},
    (_MODULE_UNTIL_2_2, "TensorProperties"): STAND_INS["TensorProperties"],
    (_MODULE_UNTIL_2_2, "MEM_FORMAT_ENCODING"): _StandIn,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): STAND_INS["_StorageInfo"],
    ("torch.serialization", "_get_layout"): _StandIn,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): getattr(torch, name) for name in PICKLED_DTYPES},
    # the folder's own path, which the metadata remembers; Python 3.13 moved the classes
    **{(module, name): _StandIn for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    # Python 3.11.0 to 3.11.3 pickle an enum as getattr(its class, its name); this stand-in looks nothing up
    ("builtins", "getattr"): _StandIn,
}
"""What each name in the pickle stands for; a name that is not here is refused."""

FileRanges = dict[tuple[str, tuple[int, ...] | None], FileRange]
"""Bytes by key and, for a part of a tensor, by the offsets at which the part begins."""


class _RefusedError(ValueError):
    """The pickle has a name that is not on the list."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise _RefusedError(
                f"{self._path} names {f'{module}.{name}'!r}, which is no part of torch's distributed checkpoint; "
                "nothing of the file was run. Do not load it with anything else, unless you know who wrote it"
            )
        return ALLOWED[module, name]


def read_metadata(folder: Path) -> DcpContents:
    """Return the contents of a DCP folder; no code in it is run."""
    path = folder / METADATA
    if not path.is_file():
        raise FileNotFoundError(_why_missing(folder))
    try:
        found = _Unpickler(path.read_bytes(), path).load()
    except (_RefusedError, OSError):
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedCheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); copy the folder again"
        ) from error
    try:
        return _parse_contents(found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not describe a distributed checkpoint ({type(error).__name__}: {error}); save it again"
        ) from error


def _why_missing(folder: Path) -> str:
    """Say why a folder has no `.metadata`, and what to do."""
    path = folder / METADATA
    if not folder.is_dir():
        return f"{folder} is not a folder; give one that torch.distributed.checkpoint has written"
    if any(folder.glob("__*.metadata")):
        return f"{path} is missing: the folder was saved with use_collectives=False; save it with all ranks together"
    if any(folder.glob("*.safetensors")):
        return f"{path} is missing, and there are safetensors files: fourfold import reads a Hugging Face folder"
    return f"{path} is missing; give a folder that torch.distributed.checkpoint has written, with all its files"


def _parse_contents(found: Any) -> DcpContents:
    table = _state(found, "Metadata")
    ranges: FileRanges = {}
    for index, storage in table["storage_data"].items():
        key = _state(index, "MetadataIndex")
        offset = key.get("offset")
        where = _parse_range(_state(storage, "_StorageInfo"))
        ranges[_name(key["fqn"]), None if offset is None else _lengths(offset)] = where
    contents = DcpContents({}, {})
    for name, entry in table["state_dict_metadata"].items():
        if isinstance(entry, STAND_INS["BytesStorageMetadata"]):
            contents.values[_name(name)] = _find(ranges, name, None)
        else:
            contents.tensors[_name(name)] = _parse_tensor(name, _state(entry, "TensorStorageMetadata"), ranges)
    return contents


def _state(found: Any, kind: str) -> dict[str, Any]:
    """Return the fields of an object of the format; raise unless it is of this class."""
    if not isinstance(found, STAND_INS[kind]) or not isinstance(found.state, dict):
        raise TypeError(f"{type(found).__name__} where {kind} belongs")
    return found.state


def _name(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"a name is {type(found).__name__}")
    return found


def _lengths(found: Any) -> tuple[int, ...]:
    if not isinstance(found, tuple) or not all(type(length) is int and length >= 0 for length in found):
        raise ValueError(f"{found!r} are no lengths")
    return found


def _parse_range(state: Mapping[str, Any]) -> FileRange:
    file, offset, nbytes = state["relative_path"], state["offset"], state["length"]
    # The metadata may come from anybody, and must not make us open a file outside of this folder.
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"{file!r} is not the name of a file in the folder")
    if state.get("transform_descriptors"):
        raise ValueError(f"{file!r} is transformed by {state['transform_descriptors']!r}; save it without extensions")
    _lengths((offset, nbytes))
    return FileRange(file, offset, nbytes)


def _find(ranges: FileRanges, name: str, offsets: tuple[int, ...] | None) -> FileRange:
    if (name, offsets) not in ranges:
        raise ValueError(f"{name!r}{'' if offsets is None else f' from {offsets} on'} lies in no file")
    return ranges[name, offsets]


def _parse_tensor(name: str, state: Mapping[str, Any], ranges: FileRanges) -> DcpTensor:
    shape = _lengths(state["size"])
    properties = state["properties"]
    dtype = properties.state[0] if isinstance(properties, STAND_INS["TensorProperties"]) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} has no dtype")
    parts = []
    for chunk in state["chunks"]:
        found = _state(chunk, "ChunkStorageMetadata")
        offsets, sizes = _lengths(found["offsets"]), _lengths(found["sizes"])
        box = tuple(range(start, start + length) for start, length in zip(offsets, sizes, strict=True))
        if not all(sizes):
            continue  # torch lists empty shards too, and writes no bytes for them
        where = _find(ranges, name, offsets)
        if where.nbytes < prod(sizes) * dtype.itemsize:
            raise ValueError(f"{name!r}: {where.nbytes} bytes for a part of {sizes} of {dtype}")
        parts.append((box, where))
    _require_tiling(name, shape, [box for box, _ in parts])
    return DcpTensor(shape, dtype, tuple(parts))


def _require_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise unless the boxes tile the shape: they lie inside it, no two overlap, and together they are as large."""
    held = sum(prod(map(len, box)) for box in boxes)
    inside = all(len(box) == len(shape) and all(b.stop <= n for b, n in zip(box, shape, strict=True)) for box in boxes)
    if not inside or held != prod(shape) or _any_overlap(boxes):
        raise ValueError(f"{name!r}: its {len(boxes)} parts hold {held} elements and do not tile {tuple(shape)}")


def _any_overlap(boxes: Sequence[Box]) -> bool:
    """Return whether any two boxes have an element in common.

    Boxes are visited in order along the dim with the most cuts, and compared only with those that reach as far: with
    thousands of boxes all pairs would take minutes.
    """
    if len(boxes) < 2:
        return False
    dim = max(range(len(boxes[0])), key=lambda dim: len({box[dim].start for box in boxes}))
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim].start):
        near = [other for other in near if other[dim].stop > box[dim].start]
        if any(all(overlap(a, b) for a, b in zip(box, other, strict=True)) for other in near):
            return True
        near.append(box)
    return False

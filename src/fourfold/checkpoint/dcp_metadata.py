"""What a folder of torch's distributed checkpoint (DCP) holds, from its `.metadata`, which is a pickle.

A pickle names what is called while it is read. Here every name of the format is on a list and stands for something of
ours that does nothing but hold what it is given; neither torch's classes nor any function are handed out, and a name
that is not on the list is refused before anything is called. What comes out is trusted in nothing: names, places and
boxes are checked here, the data by who reads it.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from fourfold.errors import DamagedCheckpointError

METADATA = ".metadata"

Box = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Where something lies: a file of the folder, the first byte, how many."""

    file: str
    offset: int
    nbytes: int


Spans = dict[tuple[str, tuple[int, ...] | None], Span]
"""By key, and where a part of a tensor begins in it."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor: the boxes that tile it, each with its place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[tuple[Box, Span], ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a folder by its key: the tensors, and what is none."""

    tensors: dict[str, Parts]
    others: dict[str, Span]


class _Held:
    """Stands for a class of the format: holds the state that the pickle gives it."""

    state: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Held): ...


class _Tensor(_Held): ...


class _Properties(_Held): ...


class _Chunk(_Held): ...


class _Bytes(_Held): ...


class _Index(_Held): ...


class _Storage(_Held): ...


class _Unused(_Held): ...


DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128",
)  # fmt: skip
FORMAT = "torch.distributed.checkpoint.metadata"
BEFORE = "torch.distributed._shard.sharded_tensor.metadata"
"""Where torch up to 2.2 had the properties of a tensor."""

ALLOWED: Mapping[tuple[str, str], Any] = {
    (FORMAT, "Metadata"): _Metadata,
    (FORMAT, "TensorStorageMetadata"): _Tensor,
    (FORMAT, "TensorProperties"): _Properties,
    (FORMAT, "ChunkStorageMetadata"): _Chunk,
    (FORMAT, "BytesStorageMetadata"): _Bytes,
    (FORMAT, "MetadataIndex"): _Index,
    (FORMAT, "StorageMeta"): _Unused,
    (FORMAT, "_MEM_FORMAT_ENCODING"): _Unused,
    (BEFORE, "TensorProperties"): _Properties,
    (BEFORE, "MEM_FORMAT_ENCODING"): _Unused,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Storage,
    ("torch.serialization", "_get_layout"): _Unused,
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): getattr(torch, name) for name in DTYPES},
    # the folder's own path, which the metadata remember; Python 3.13 moved the classes
    **{(module, name): _Unused for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
    # Python 3.11.0 to 3.11.3 pickle an enum as getattr(its class, its name); this one looks nothing up
    ("builtins", "getattr"): _Unused,
}
"""What a name in the pickle stands for."""


class _RefusedError(ValueError):
    """A name that is not on the list."""


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


def read_metadata(folder: Path) -> Contents:
    """What the folder holds; runs nothing, whoever wrote it."""
    path = folder / METADATA
    if not path.is_file():
        raise FileNotFoundError(_missing(folder))
    try:
        found = _Unpickler(path.read_bytes(), path).load()
    except (_RefusedError, OSError):
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DamagedCheckpointError(
            f"{path} is damaged ({type(error).__name__}: {error}); copy the folder again"
        ) from error
    try:
        return _contents(found)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} does not describe a distributed checkpoint ({type(error).__name__}: {error}); save it again"
        ) from error


def _missing(folder: Path) -> str:
    path = folder / METADATA
    if not folder.is_dir():
        return f"{folder} is no folder; give one that torch.distributed.checkpoint has written"
    if any(folder.glob("__*.metadata")):
        return f"{path} is missing: the folder was saved with use_collectives=False; save it with all ranks together"
    if any(folder.glob("*.safetensors")):
        return f"{path} is missing, and there are safetensors files: a Hugging Face folder is read by fourfold import"
    return f"{path} is missing; give a folder that torch.distributed.checkpoint has written, with all its files"


def _contents(found: Any) -> Contents:
    table = _state(found, _Metadata)
    spans: Spans = {}
    for index, storage in table["storage_data"].items():
        key = _state(index, _Index)
        offset = key.get("offset")
        spans[_name(key["fqn"]), None if offset is None else _lengths(offset)] = _span(_state(storage, _Storage))
    contents = Contents({}, {})
    for name, entry in table["state_dict_metadata"].items():
        if isinstance(entry, _Bytes):
            contents.others[_name(name)] = _find(spans, name, None)
        else:
            contents.tensors[_name(name)] = _parts(name, _state(entry, _Tensor), spans)
    return contents


def _state(found: Any, kind: type[_Held]) -> dict[str, Any]:
    if not isinstance(found, kind) or not isinstance(found.state, dict):
        raise TypeError(f"{type(found).__name__.strip('_')} where {kind.__name__.strip('_')} belongs")
    return found.state


def _name(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"a name is {type(found).__name__}")
    return found


def _lengths(found: Any) -> tuple[int, ...]:
    if not isinstance(found, tuple) or not all(type(length) is int and length >= 0 for length in found):
        raise ValueError(f"{found!r} are no lengths")
    return found


def _span(state: Mapping[str, Any]) -> Span:
    file, offset, nbytes = state["relative_path"], state["offset"], state["length"]
    # whatever it says, only files of this folder are opened
    if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
        raise ValueError(f"{file!r} is no name of a file in the folder")
    if state.get("transform_descriptors"):
        raise ValueError(f"{file!r} is transformed by {state['transform_descriptors']!r}; save it without extensions")
    _lengths((offset, nbytes))
    return Span(file, offset, nbytes)


def _find(spans: Spans, name: str, offsets: tuple[int, ...] | None) -> Span:
    if (name, offsets) not in spans:
        raise ValueError(f"{name!r}{'' if offsets is None else f' from {offsets} on'} lies in no file")
    return spans[name, offsets]


def _parts(name: str, state: Mapping[str, Any], spans: Spans) -> Parts:
    shape = _lengths(state["size"])
    properties = state["properties"]
    dtype = properties.state[0] if isinstance(properties, _Properties) else None
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} has no dtype")
    parts = []
    for chunk in state["chunks"]:
        found = _state(chunk, _Chunk)
        offsets, sizes = _lengths(found["offsets"]), _lengths(found["sizes"])
        box = tuple(range(start, start + length) for start, length in zip(offsets, sizes, strict=True))
        if not all(sizes):
            continue  # a rank that holds nothing
        span = _find(spans, name, offsets)
        if span.nbytes < prod(sizes) * dtype.itemsize:
            raise ValueError(f"{name!r}: {span.nbytes} bytes for a part of {sizes} of {dtype}")
        parts.append((box, span))
    _require_cover(name, shape, [box for box, _ in parts])
    return Parts(shape, dtype, tuple(parts))


def _require_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise unless the boxes tile the shape: they lie in it, none meets another, together they are as large."""
    held = sum(prod(map(len, box)) for box in boxes)
    inside = all(len(box) == len(shape) and all(b.stop <= n for b, n in zip(box, shape, strict=True)) for box in boxes)
    if not inside or held != prod(shape) or _meet(boxes):
        raise ValueError(f"{name!r}: its {len(boxes)} parts hold {held} elements and do not tile {tuple(shape)}")


def _meet(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes have an element in common; neighbours alone are compared, along the dim cut most."""
    if len(boxes) < 2:
        return False
    dim = max(range(len(boxes[0])), key=lambda dim: len({box[dim].start for box in boxes}))
    near: list[Box] = []
    for box in sorted(boxes, key=lambda box: box[dim].start):
        near = [other for other in near if other[dim].stop > box[dim].start]
        for other in near:
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(box, other, strict=True)):
                return True
        near.append(box)
    return False

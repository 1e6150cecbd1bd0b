"""The record of a checkpoint: which tensors it holds, how they are cut, by whom they were written, and the state.

    {"format": "fourfold-checkpoint", "version": 1, "digest": "sha256:...",
     "grid": {"sizes": {"x": 2, "y": 1, "z": 2, "data": 1}, "order": ["x", "y", "z", "data"]},
     "state": {"step": 100, ...},
     "tensors": {name: {"shape": [96, 64], "dtype": "float32", "cuts": [["x", 0], ["z", 0]]}},
     "files": {"rank-00000.safetensors": {"bytes": 24000, "header": "crc32:..."}}}

Who wrote which box of a tensor is arithmetic on the grid and the cuts, so there is no list of parts. A record that is
read is trusted in nothing: its digest tells damage, and every name, number and cut is checked here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from heapq import heapreplace
from math import prod
from pathlib import Path
from typing import Any

import torch

from fourfold.checkpoint.files import CODES, FileEntry
from fourfold.errors import DamagedCheckpointError, MissingCheckpointError
from fourfold.grid import AXES, Shape
from fourfold.layout import Box, Layout

FORMAT, VERSION = "fourfold-checkpoint", 1
RECORD = "checkpoint.json"
OURS = re.compile(r"checkpoint\.json|rank-\d{5,}\.safetensors")
"""The names of all files of a checkpoint."""
MOST_RANKS = 1 << 17
"""What a record may claim: its arithmetic takes as long as its grid is large."""
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES}


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor as a whole, and which of its dims are cut over which axes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    storage: Layout

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def box(self, shape: Shape, coords: Mapping[str, int]) -> Box:
        return self.storage.box(self.shape, shape.sizes, coords)


@dataclass(frozen=True)
class Record:
    """What a checkpoint holds."""

    shape: Shape
    """The grid that wrote it."""
    state: dict[str, Any]
    tensors: dict[str, Entry]
    files: dict[str, FileEntry] = field(default_factory=dict)

    @cached_property
    def _writers(self) -> dict[str, dict[str, int]]:
        """Of the ranks that hold equal copies of a tensor the one that writes it, by its coordinates on the axes that
        do not cut the tensor. The largest tensors are given out first, each to whoever has least to write."""
        loads: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        found = {}
        for name, entry in sorted(self.tensors.items(), key=lambda item: (-item[1].nbytes, item[0])):
            copies = [axis for axis in AXES if axis not in entry.storage.axes]
            several = tuple(axis for axis in copies if axis in self.shape.several)
            count = prod(self.shape.sizes[axis] for axis in several)
            heap = loads.setdefault(several, [(0, turn) for turn in range(count)])
            load, turn = heap[0]
            heapreplace(heap, (load + entry.nbytes, turn))
            found[name] = {}
            for axis in copies:
                turn, found[name][axis] = divmod(turn, self.shape.sizes[axis])
        return found

    def parts(self, name: str, within: Box | None = None) -> Iterator[tuple[int, Box]]:
        """The ranks that write a tensor and their boxes; of those that meet a box, where one is given."""
        entry, writers = self.tensors[name], self._writers[name]
        for coords, box in entry.storage.boxes(entry.shape, self.shape.sizes, within):
            if all(box):
                yield self.shape.rank({**writers, **coords}), box

    def own(self, coords: Mapping[str, int]) -> list[str]:
        """The tensors of which the rank at these coordinates writes its part."""
        return [
            name
            for name, entry in self.tensors.items()
            if all(coords[axis] == place for axis, place in self._writers[name].items())
            and all(entry.box(self.shape, coords))
        ]


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_record(folder: Path, record: Record) -> None:
    """Write the record of a folder whose files are complete."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "grid": {"sizes": record.shape.sizes, "order": list(record.shape.order)},
        "state": record.state,
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": str(entry.dtype).removeprefix("torch."),
                "cuts": [list(cut) for cut in entry.storage.cuts],
            }
            for name, entry in record.tensors.items()
        },
        "files": {name: {"bytes": entry.nbytes, "header": entry.header} for name, entry in record.files.items()},
    }
    path = folder / RECORD
    try:
        with path.open("w") as file:
            json.dump({**content, "digest": _digest(content)}, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path} ({error.strerror})") from error


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def read_record(folder: Path) -> Record:
    """The record of a checkpoint's folder, with everything checked that it says of itself."""
    path = folder / RECORD
    if not path.is_file():
        raise MissingCheckpointError(f"{path} is missing; give the folder of a checkpoint, with all its files")
    try:
        content = json.loads(path.read_bytes())
        kind, version, digest = content["format"], content["version"], content.pop("digest")
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{path} is no record of a checkpoint ({type(error).__name__}: {error}); copy it again"
        ) from error
    if (kind, version) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is of format {kind!r} version {version!r}, and this Fourfold reads {FORMAT!r} version {VERSION}; "
            "use the Fourfold that wrote it"
        )
    if digest != _digest(content):
        raise DamagedCheckpointError(f"{path} is damaged: its digest is not that of its content; copy it again")
    try:
        return _record(content)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not describe a checkpoint ({error}); save it again") from error


def _record(content: Mapping[str, Any]) -> Record:
    grid, state = content["grid"], content["state"]
    if not isinstance(state, dict):
        raise TypeError("state is no table")
    shape = Shape(**grid["sizes"], order=tuple(grid["order"]))
    if shape.world > MOST_RANKS:
        raise ValueError(f"a grid of {shape.world} ranks; the most is {MOST_RANKS}")
    tensors = {name: _entry(name, found) for name, found in content["tensors"].items()}
    files = {name: FileEntry(found["bytes"], found["header"]) for name, found in content["files"].items()}
    strange = [name for name in files if not OURS.fullmatch(name) or name == RECORD]
    if strange:
        raise ValueError(f"{strange[0]!r} is not the name of a rank's file")
    if not all(type(entry.nbytes) is int and isinstance(entry.header, str) for entry in files.values()):
        raise TypeError("a file has no length or no checksum")
    return Record(shape, state, tensors, files)


def _entry(name: str, found: Mapping[str, Any]) -> Entry:
    shape = tuple(found["shape"])
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"{name!r} has shape {shape}")
    if found["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} has dtype {found['dtype']!r}")
    cuts = tuple((axis, dim) for axis, dim in found["cuts"])
    if not all(axis in AXES and type(dim) is int and 0 <= dim < len(shape) for axis, dim in cuts):
        raise ValueError(f"{name!r} of shape {shape} is cut by {cuts}")
    return Entry(shape, DTYPES[found["dtype"]], Layout(cuts))


def require_same_names(wanted: Mapping[str, object], found: Mapping[str, object], folder: object) -> None:
    """Raise unless the folder holds the tensors that are wanted, no more and no fewer."""
    faults = [
        f"{what} {_named(names, others)}"
        for what, names, others in (
            ("it lacks", [name for name in wanted if name not in found], found),
            ("it also holds", [name for name in found if name not in wanted], wanted),
        )
        if names
    ]
    if faults:
        raise ValueError(f"{folder} is of another model: {'; '.join(faults)}; build the model as saved")


def _named(names: Sequence[str], others: Mapping[str, object]) -> str:
    """The first of the names, each with its nearest spelling among the others."""
    shown = []
    for name in names[:3]:
        near = get_close_matches(name, list(others), n=1)
        shown.append(f"{name!r} (nearest: {near[0]!r})" if near else repr(name))
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

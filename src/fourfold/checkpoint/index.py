"""The index of a folder of tensors: which file holds which box of which tensor.

    {"format": "fourfold-tensors", "version": 1, "tensors": {name: {"shape": [96, 64], "dtype": "float32",
     "parts": [{"file": "rank-00000.safetensors", "key": name, "box": [[0, 48], [0, 64]]}, ...]}}}

Who holds which box is arithmetic, so one rank writes the index of all without asking them. An index that is
read is trusted in nothing: names, shapes and boxes are checked here, the files by who opens them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.grid import AXES, Shape
from fourfold.layout import Spec

FORMAT, VERSION = "fourfold-tensors", 1
INDEX = "index.json"
OURS = re.compile(r"index\.json|rank-\d{5,}\.safetensors")
"""The names of all files in a folder of tensors."""

Box = tuple[range, ...]
Tensors = Mapping[str, tuple[Tensor, Spec]]
"""By name: this rank's part of a tensor, and how the tensor is cut."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, under a key in a file."""

    file: str
    key: str
    box: Box


def index_of(tensors: Tensors, shape: Shape) -> str:
    """The text of the index of what all ranks of a grid write."""
    entries = {
        name: {
            "shape": list(spec.shape),
            "dtype": str(local.dtype).removeprefix("torch."),
            "parts": [
                {"file": file_of(rank), "key": name, "box": [[part.start, part.stop] for part in box]}
                for rank, box in parts_of(spec, shape)
            ],
        }
        for name, (local, spec) in tensors.items()
    }
    return json.dumps({"format": FORMAT, "version": VERSION, "tensors": entries})


def writes(spec: Spec, coords: Mapping[str, int]) -> bool:
    """Of the ranks that hold equal copies, the first writes."""
    return all(coords[axis] == 0 for axis in AXES if axis not in spec.storage.axes)


def parts_of(spec: Spec, shape: Shape) -> Iterator[tuple[int, Box]]:
    """The ranks that write a tensor, and their boxes."""
    places = [range(shape.sizes[axis]) if axis in spec.storage.axes else range(1) for axis in AXES]
    for place in itertools.product(*places):
        coords = dict(zip(AXES, place, strict=True))
        box = spec.storage.box(spec.shape, shape.sizes, coords)
        if all(box):
            yield shape.rank(coords), box


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def read_index(folder: Path) -> dict[str, tuple[tuple[int, ...], list[Part]]]:
    """Shape and parts of every tensor in the folder."""
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; give a folder that Fourfold has written, with all its files")
    try:
        index = json.loads(path.read_text())
        kind, version = index["format"], index["version"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no index of tensors ({type(error).__name__}: {error}); save them again") from error
    if (kind, version) != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is of format {kind!r} version {version!r}, and this Fourfold reads {FORMAT!r} version {VERSION}; "
            "use the Fourfold that wrote it"
        )
    try:
        return {
            name: (tuple(entry["shape"]), [_part(part, len(entry["shape"])) for part in entry["parts"]])
            for name, entry in index["tensors"].items()
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); save the tensors again") from error


def _part(entry: Mapping[str, Any], dims: int) -> Part:
    file, key, box = entry["file"], entry["key"], tuple(range(start, stop) for start, stop in entry["box"])
    if not OURS.fullmatch(file):
        raise ValueError(f"{file!r} is not the name of a rank's file")
    if len(box) != dims:
        raise ValueError(f"a box of {len(box)} dims in a tensor of {dims}")
    return Part(file, key, box)


def require_same_names(wanted: Mapping[str, object], found: Mapping[str, object], folder: Path) -> None:
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


def require_cover(name: str, shape: Sequence[int], boxes: Sequence[Box], folder: Path) -> None:
    """Raise unless every element lies in exactly one box, on a lattice of the places where boxes end."""
    ends = [
        sorted({0, length, *(end for box in boxes for end in (box[dim].start, box[dim].stop))})
        for dim, length in enumerate(shape)
    ]
    at = [{end: place for place, end in enumerate(of_dim)} for of_dim in ends]
    times = torch.zeros([len(of_dim) - 1 for of_dim in ends], dtype=torch.int32)
    for box in boxes:
        times[tuple(slice(at[dim][part.start], at[dim][part.stop]) for dim, part in enumerate(box))] += 1
    inside = all(of_dim[0] == 0 and of_dim[-1] == length for of_dim, length in zip(ends, shape, strict=True))
    if not inside or not bool((times == 1).all()):
        held = sum(prod(map(len, box)) for box in boxes)
        raise ValueError(
            f"{name!r}: its {len(boxes)} parts in {folder} hold {held} elements and do not tile the shape "
            f"{tuple(shape)}; save it again"
        )

"""Tensors of a grid on disk: every rank writes its own parts, any other grid reads the parts it needs.

A folder holds `rank-00003.safetensors` for every rank that had something to write, and `index.json`, which
says where the parts of every tensor are. Nothing is gathered, a tensor of which several ranks hold copies is
written once, and nothing is pickled.

Invariant: the folder is at every moment absent, the old one or the new one, whole; a tensor is changed only
after every rank has found everything that it will read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fourfold.arriving import local_of
from fourfold.checkpoint.index import (
    INDEX,
    OURS,
    Box,
    Part,
    Tensors,
    file_of,
    index_of,
    read_index,
    require_cover,
    require_same_names,
    writes,
)
from fourfold.gradients import gradients_of
from fourfold.grid import Grid
from fourfold.layout import Spec
from fourfold.nn.layer import specs_of


def save_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write the parameters of a model into a folder, which all ranks must see.

    All ranks call it. A folder of weights that is already there is replaced once the new one is complete; an
    error on any rank raises on all of them and leaves it as it was.
    """
    write_tensors(weights_of(model), gradients_of(model).grid, folder)


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Read the parameters of a model, in place, from a folder that any grid of any size has written.

    All ranks call it; each reads only what it holds, and values are cast to the dtype of the model. Whatever
    is missing or does not fit raises on all ranks before any of them has changed a parameter.
    """
    read_tensors(weights_of(model), gradients_of(model).grid, folder)


def weights_of(model: nn.Module) -> dict[str, tuple[Tensor, Spec]]:
    """This rank's shard of every parameter, and its spec."""
    specs = specs_of(model)
    state = model.state_dict(keep_vars=True)
    if strangers := sorted(state.keys() - specs.keys()):
        raise ValueError(
            f"{', '.join(map(repr, strangers[:5]))} of {type(model).__name__} are not on the grid; "
            "declare parameters through a fourfold.nn layer, register other tensors with persistent=False"
        )
    tensors = {name: (local_of(state[name]).detach(), spec) for name, spec in specs.items()}
    if any(local.is_meta for local, _ in tensors.values()):
        raise ValueError(f"{type(model).__name__} is on the meta device and has no values; build it on a real one")
    return tensors


def write_tensors(tensors: Tensors, grid: Grid, folder: str | os.PathLike[str]) -> None:
    """Write tensors into a folder; see `save_weights`."""
    place = _Place(Path(folder).resolve())
    grid.agree("the folder to write", str(place.target))
    what = f"writing {place.target}"
    # Rank 0 makes the folder before anyone writes, and shows it when everyone has: each line ends in agreement.
    grid.first_alone(what, place.prepare)
    try:
        grid.together(what, lambda: _write_own(tensors, grid, place.partial))
        grid.first_alone(what, place.publish)
    except BaseException:
        if grid.rank == 0:
            shutil.rmtree(place.partial, ignore_errors=True)
        raise


def read_tensors(tensors: Tensors, grid: Grid, folder: str | os.PathLike[str]) -> None:
    """Read tensors in place from a folder; see `load_weights`."""
    source = Path(folder).resolve()
    grid.agree("the folder to read", str(source))
    reads = grid.together(f"reading {source}", lambda: _plan(tensors, grid, source))
    grid.together(f"reading {source}, with tensors half changed by then,", lambda: _copy(tensors, source, reads))


@dataclass(frozen=True, slots=True)
class _Place:
    """The folder to write, and the two beside it: the one that is being written, the one that gives way."""

    target: Path

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def replaced(self) -> Path:
        return self.target.with_name(f".{self.target.name}.replaced")

    def prepare(self) -> None:
        """Make an empty folder to write in, and clear what a process that died has left."""
        if self.replaced.exists() and not self.target.exists():
            os.rename(self.replaced, self.target)  # it died between the two renames of `publish`
        if self.target.exists():
            self._require_ours()
        for leftover in (self.partial, self.replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        self.partial.mkdir(parents=True)

    def _require_ours(self) -> None:
        """Replacing a folder removes all of it, so it must hold nothing else."""
        if not self.target.is_dir():
            raise FileExistsError(f"{self.target} is a file; choose another folder to write")
        others = sorted(entry.name for entry in self.target.iterdir() if not OURS.fullmatch(entry.name))
        if others:
            raise FileExistsError(
                f"{self.target} would be replaced, but it also holds {', '.join(map(repr, others[:5]))}, "
                "which no save has written; move that away or choose another folder"
            )

    def publish(self) -> None:
        """Put the finished folder in the place of the old one."""
        _flush(self.partial)
        if self.target.exists():
            os.rename(self.target, self.replaced)
        try:
            os.rename(self.partial, self.target)
        except OSError:
            if self.replaced.exists():
                os.rename(self.replaced, self.target)
            raise
        _flush(self.target.parent)
        shutil.rmtree(self.replaced, ignore_errors=True)  # the new one is there: a leftover is no failure


def _flush(path: Path) -> None:
    """To the disk itself, so that a rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_own(tensors: Tensors, grid: Grid, folder: Path) -> None:
    """This rank's file; on rank 0 the index too."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}, which rank 0 has made, is not there on rank {grid.rank}; "
            "write to a file system that all nodes share"
        )
    own = {}
    for name, (local, spec) in tensors.items():
        _own_box(name, local, spec, grid)
        if local.numel() and writes(spec, grid.coords):
            own[name] = local.contiguous()
    if own:
        _write_file(own, folder / file_of(grid.rank))
    if grid.rank == 0:
        path = folder / INDEX
        path.write_text(index_of(tensors, grid.shape))
        _flush(path)


def _write_file(tensors: dict[str, Tensor], path: Path) -> None:
    safetensors = _safetensors()
    try:
        safetensors.torch.save_file(tensors, path)
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    _flush(path)


def _own_box(name: str, local: Tensor, spec: Spec, grid: Grid) -> Box:
    """Where this rank's part lies in the whole."""
    box = spec.storage.box(spec.shape, grid.shape.sizes, grid.coords)
    if tuple(local.shape) != tuple(map(len, box)):
        raise ValueError(
            f"{name!r}: rank {grid.rank} holds {tuple(local.shape)}, but its part of {spec.shape} is "
            f"{tuple(map(len, box))}; pass the local shard and the spec that cut it"
        )
    return box


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece of a part that goes to a piece of a local shard."""

    name: str
    part: Part
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def _plan(tensors: Tensors, grid: Grid, folder: Path) -> dict[str, list[_Read]]:
    """What this rank will read from each file, with everything checked but the values."""
    replaced = _Place(folder).replaced
    if replaced.exists() and not folder.exists():
        raise FileNotFoundError(f"{folder} is missing: a save died while it replaced it; the former one is {replaced}")
    found = read_index(folder)
    require_same_names(tensors, found, folder)
    reads: dict[str, list[_Read]] = {}
    for name, (local, spec) in tensors.items():
        shape, parts = found[name]
        if shape != spec.shape:
            raise ValueError(f"{name!r} has shape {shape} in {folder} and {spec.shape} here; build the model as saved")
        require_cover(name, shape, [part.box for part in parts], folder)
        own = _own_box(name, local, spec, grid)
        for part in parts:
            common = [range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(own, part.box, strict=True)]
            if all(common):
                read = _Read(name, part, _inside(common, part.box), _inside(common, own))
                reads.setdefault(part.file, []).append(read)
    for file, wanted in reads.items():
        _require_parts(folder / file, [read.part for read in wanted])
    return reads


def _inside(box: Sequence[range], outer: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def _copy(tensors: Tensors, folder: Path, reads: Mapping[str, Sequence[_Read]]) -> None:
    for file, wanted in reads.items():
        with _safetensors().safe_open(folder / file, framework="pt") as content:
            for read in wanted:
                local, _ = tensors[read.name]
                local[read.target].copy_(content.get_slice(read.part.key)[read.source])


def _require_parts(path: Path, parts: Sequence[Part]) -> None:
    """Raise unless the file is whole and holds these parts in their shapes."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, but {INDEX} names it; copy the folder with all its files")
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="pt") as content:
            shapes = {key: tuple(content.get_slice(key).get_shape()) for key in content.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy it again") from error
    for part in parts:
        expected = tuple(map(len, part.box))
        if shapes.get(part.key) != expected:
            found = shapes.get(part.key, "nothing")
            raise ValueError(f"{path} holds {found} for {part.key!r}, but {INDEX} says {expected}; copy them again")


def _safetensors() -> Any:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise ImportError(f"weights are files of safetensors: pip install 'fourfold[train]' ({error})") from error
    return safetensors

"""Loading: a grid of any shape reads what any other grid has written; each rank reads the parts that it holds.

Everything is checked first: names, shapes, dtypes, files, and the checksum of every tensor, the bytes divided among the
ranks. The first tensor changes only after all ranks have found everything in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.checkpoint.folder import AtomicFolder
from fourfold.checkpoint.format import RECORD, Record, TensorFile, rank_file, read_record
from fourfold.checkpoint.training_state import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    LocalShard,
    LocalShards,
    model_shards,
    new_optimizer_shards,
    parameters_with_state,
    random_states,
    set_optimizer_state,
    set_random_states,
)
from fourfold.errors import DamagedCheckpointError, MissingCheckpointError
from fourfold.gradients import gradients_of
from fourfold.grid import Grid
from fourfold.layout import Box, boxed, overlap
from fourfold.optim import AdamW
from fourfold.spelling import nearest

MOST_NAMES_SHOWN = 3
"""How many missing or unknown tensors an error names."""


def load_training(folder: str | os.PathLike[str], model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """Give model and optimizer what a checkpoint holds, and return its `state`; all ranks call it.

    Everything is verified on all ranks before anything changes. A checkpoint without optimizer state (imported
    weights) may have another dtype and leaves the optimizer fresh. The ranks get back their random states on the grid
    that wrote the checkpoint; on any other grid the random states stay as they are.
    """
    grid = optimizer.gradients.grid
    chosen: dict[str, LocalShard] = {}

    def choose(record: Record) -> LocalShards:
        with_state = parameters_with_state(list(record.tensors))
        chosen.update(model_shards(model))
        chosen.update(new_optimizer_shards(optimizer, with_state))
        require_same_names(chosen, [name for name in record.tensors if not name.startswith(RANDOM)], folder)
        if with_state:
            _require_same_dtypes(chosen, record, folder)
        if record.grid == grid.shape:
            for name, state in random_states(grid).items():
                # another version of torch may have a state of another length
                if name in record.tensors and record.tensors[name].shape == state.shape:
                    chosen[name] = state
        return chosen

    record = read_shards(grid, folder, choose)
    set_optimizer_state(optimizer, {name: shard for name, shard in chosen.items() if name.startswith(OPTIMIZER)})
    set_random_states(chosen, grid)
    return record.state


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Read the parameters of a model, in place, from weights or a checkpoint that any grid of any size has written.

    All ranks call it; each reads only what it holds, and values are cast to the dtype of the model. Whatever is
    missing or does not fit raises on all ranks before any of them has changed a parameter.
    """

    def choose(record: Record) -> LocalShards:
        wanted = model_shards(model)
        require_same_names(wanted, [name for name in record.tensors if name.startswith(MODEL)], folder)
        return wanted

    read_shards(gradients_of(model).grid, folder, choose)


def require_same_names(wanted: Mapping[str, object], found: Sequence[str], folder: object) -> None:
    """Raise unless a folder holds the wanted tensors, no more and no fewer."""
    there = set(found)
    missing = [name for name in wanted if name not in there]
    unknown = [name for name in found if name not in wanted]
    faults = [f"it lacks {show_names(missing, found)}"] if missing else []
    faults += [f"it also holds {show_names(unknown, list(wanted))}"] if unknown else []
    if faults:
        raise ValueError(f"{folder} is of another model: {'; '.join(faults)}; build the model as saved")


def show_names(names: Sequence[str], others: Sequence[str]) -> str:
    """Return the first of the names as a text, each with its nearest spelling among the others."""
    shown = ", ".join(f"{name!r}{nearest(name, others)}" for name in names[:MOST_NAMES_SHOWN])
    left = len(names) - MOST_NAMES_SHOWN
    return f"{shown} and {left} more" if left > 0 else shown


def _require_same_dtypes(shards: LocalShards, record: Record, folder: object) -> None:
    for name, shard in shards.items():
        if record.tensors[name].dtype != shard.local.dtype:
            raise ValueError(
                f"{name!r} is {record.tensors[name].dtype} in {folder} and {shard.local.dtype} here; resume with the "
                "dtype of the saved run"
            )


# Into the shards of a grid


@dataclass(frozen=True, slots=True)
class _Read:
    """One copy from a file: a slice of a part that some rank wrote, into a slice of this rank's shard."""

    name: str
    part: Box
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def read_shards(grid: Grid, folder: str | os.PathLike[str], choose: Callable[[Record], LocalShards]) -> Record:
    """Read into the shards that `choose` picks by the record, in place, cast to their dtypes.

    All ranks call it. Whatever is missing, damaged or does not fit raises on all of them before anything has changed.
    """
    source = Path(folder).resolve()
    grid.agree("the folder to read", str(source))

    def check() -> tuple[Record, LocalShards, dict[str, list[_Read]]]:
        replaced = AtomicFolder(source).replaced
        if replaced.exists() and not source.exists():
            raise MissingCheckpointError(
                f"{source} is missing: a save died while it replaced it; the former one is {replaced}"
            )
        record = read_record(source)
        shards = choose(record)
        reads = _plan_reads(shards, record, grid, source)
        verify_share(source, record, grid.rank, grid.shape.world)
        return record, shards, reads

    def copy() -> None:
        for name, wanted in reads.items():
            with TensorFile(source / name) as file:
                for read in wanted:
                    shards[read.name].local[read.target].copy_(file.read(read.name, read.source))

    # Two rounds: no rank may change a tensor before every rank has found everything in order.
    record, shards, reads = grid.run_together(f"reading {source}", check)
    grid.run_together(f"reading {source}, with tensors half changed by then,", copy)
    return record


def _plan_reads(shards: LocalShards, record: Record, grid: Grid, folder: Path) -> dict[str, list[_Read]]:
    """Return what this rank will read from each file, with everything checked but the values."""
    reads: dict[str, list[_Read]] = {}
    for name, shard in shards.items():
        saved = record.tensors[name]
        if saved.shape != shard.shape:
            raise ValueError(
                f"{name!r} has shape {saved.shape} in {folder} and {shard.shape} here; build the model as saved"
            )
        own = shard.require_box(name, grid)
        for rank, part in record.parts(name, own) if all(own) else ():
            common = [overlap(a, b) for a, b in zip(own, part, strict=True)]
            read = _Read(name, part, _slices(common, part), _slices(common, own))
            reads.setdefault(rank_file(rank), []).append(read)
    for name, wanted in reads.items():
        with open_checked(folder, record, name) as file:
            for read in wanted:
                found, expected = file.tensors.get(read.name), tuple(map(len, read.part))
                if found is None or (found.shape, found.dtype) != (expected, record.tensors[read.name].dtype):
                    what = "nothing" if found is None else f"{found.dtype} {found.shape}"
                    raise DamagedCheckpointError(
                        f"{file.path} holds {what} for {read.name!r}, but {RECORD} says "
                        f"{record.tensors[read.name].dtype} {expected}; copy them again"
                    )
    return reads


def _slices(box: Sequence[range], outer: Sequence[range]) -> tuple[slice, ...]:
    """Return the slices of a tensor that fills `outer` which select `box`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


@contextmanager
def open_checked(folder: Path, record: Record, name: str) -> Iterator[TensorFile]:
    """Open a file of a checkpoint; raise unless it has the length and the header that the record says."""
    if name not in record.files:
        raise DamagedCheckpointError(
            f"{folder / RECORD} does not name {name}, which its tensors need; copy the folder again"
        )
    with TensorFile(folder / name) as file:
        file.require(record.files[name])
        yield file


def verify_share(
    folder: Path, record: Record, share: int = 0, shares: int = 1, progress: Callable[[int], object] = lambda _: None
) -> None:
    """Compare one share of a checkpoint's bytes with their checksums. Shares are equal and end between tensors.

    Every file counts the same, so with as many shares as files each share is one file: on the grid that wrote the
    checkpoint a rank opens its own file alone. `progress` is called with the bytes of each tensor.
    """
    files = len(record.files)
    for number, (name, info) in enumerate(record.files.items()):
        if not number * shares < files * (share + 1) or not files * share < (number + 1) * shares:
            continue  # the file lies outside of this share
        with open_checked(folder, record, name) as file:
            offset = 0
            for key, tensor in file.tensors.items():
                if (number * info.nbytes + offset) * shares // (files * info.nbytes) == share:
                    file.verify(key)
                    progress(tensor.nbytes)
                offset += tensor.nbytes


# For one process


def verify_checkpoint(folder: Path, progress: Callable[[int], object] = lambda _: None) -> Record:
    """Read a checkpoint from end to end and compare every byte with its checksum; raise where something is wrong.

    `progress` is called with the bytes of each tensor.
    """
    record = read_record(folder)
    verify_share(folder, record, progress=progress)
    needed = {(rank_file(rank), name) for name in record.tensors for rank, _ in record.parts(name)}
    for file_name in record.files:
        with open_checked(folder, record, file_name) as file:
            needed -= {(file_name, key) for key in file.tensors}
    if needed:
        file_name, name = min(needed)
        raise DamagedCheckpointError(
            f"{folder / file_name} does not hold its part of {name!r}; copy the checkpoint again"
        )
    return record


def read_full_tensor(folder: Path, record: Record, name: str) -> Tensor:
    """Return a tensor joined from its parts, each compared with its checksum."""
    info, parts = record.tensors[name], list(record.parts(name))
    for rank, box in parts:  # before memory is allocated for a shape that nobody but the record claims
        with open_checked(folder, record, rank_file(rank)) as file:
            if name not in file.tensors or file.tensors[name].shape != tuple(map(len, box)):
                raise DamagedCheckpointError(
                    f"{file.path} does not hold its part of {name!r}; copy the checkpoint again"
                )
    full = torch.empty(info.shape, dtype=info.dtype)
    for rank, box in parts:
        with open_checked(folder, record, rank_file(rank)) as file:
            file.verify(name)
            boxed(full, box).copy_(file.read(name))
    return full

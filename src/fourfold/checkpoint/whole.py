"""A checkpoint for one process, tensor by tensor: never the whole model in memory at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoint.files import TensorTypes, write_file
from fourfold.checkpoint.folder import Place
from fourfold.checkpoint.read import opened, verify_share
from fourfold.checkpoint.record import Entry, Record, file_of, read_record, write_record
from fourfold.errors import DamagedCheckpointError
from fourfold.grid import Shape
from fourfold.layout import Layout, boxed


def read_whole(folder: Path, record: Record, name: str) -> Tensor:
    """A tensor joined from its parts, each of which is what was written."""
    entry, parts = record.tensors[name], list(record.parts(name))
    for rank, box in parts:  # before anything is made that is as large as the record says
        with opened(folder, record, file_of(rank)) as file:
            if name not in file.stored or file.stored[name].shape != tuple(map(len, box)):
                raise DamagedCheckpointError(
                    f"{file.path} does not hold its part of {name!r}; copy the checkpoint again"
                )
    whole = torch.empty(entry.shape, dtype=entry.dtype)
    for rank, box in parts:
        with opened(folder, record, file_of(rank)) as file:
            file.verify(name)
            boxed(whole, box).copy_(file.read(name))
    return whole


def write_whole(folder: Path, layout: TensorTypes, tensors: Iterable[Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint as a grid of one rank would, from tensors that come in the order of the layout."""
    with Place(folder.resolve()).filling() as partial:
        entries = {name: Entry(shape, dtype, Layout(())) for name, (dtype, shape) in layout.items()}
        files = {file_of(0): write_file(partial / file_of(0), layout, tensors)} if layout else {}
        write_record(partial, Record(Shape(), state, entries, files))


def verify(folder: Path, say: Callable[[int], object] = lambda _: None) -> Record:
    """Read a checkpoint from end to end and compare every byte with its checksum; raises where something is wrong.
    `say` hears of bytes done."""
    record = read_record(folder)
    verify_share(folder, record, say=say)
    needed = {(file_of(rank), name) for name in record.tensors for rank, _ in record.parts(name)}
    for file_name in record.files:
        with opened(folder, record, file_name) as file:
            needed -= {(file_name, key) for key in file.stored}
    if needed:
        file_name, name = min(needed)
        raise DamagedCheckpointError(
            f"{folder / file_name} does not hold its part of {name!r}; copy the checkpoint again"
        )
    return record

"""Renumbering: a copy of a checkpoint in which the experts of each block have other numbers.

The model is the same function afterwards, and training goes on as it would have; only the rank that holds an expert
changes, because it follows from the expert's number. The rows of an expert are copied bit for bit, those of the
optimizer's state with them, and so is everything else. The copy has the grid, the files and the parts of the original.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.atomic import AtomicFolder
from fourfold.checkpoint.format import (
    CHECKPOINT_FILE,
    MODEL,
    OPTIMIZER,
    RANDOM,
    Record,
    TensorFile,
    rank_file,
    write_record,
    write_tensor_file,
)
from fourfold.checkpoint.load import slices_within, verify_checkpoint
from fourfold.errors import name_some
from fourfold.layout import Box, overlap

RENUMBERED = "renumbered"
"""The key in the state of a record with how the experts were renumbered: a list, the oldest first, of tables with the
name of the checkpoint that was copied and, by block, the former number of each expert."""
OF_A_BLOCK = re.compile(r"layers\.(\d+)\.mlp\.(?!shared\.)(.+)")
"""The name of a tensor of a block's MLP or mixture, without the MLP beside the experts."""
OF_EXPERTS = ("router.weight", "router.bias", "gate", "up", "down")
"""The tensors of a mixture, which have one row for each expert."""
MOST_OPEN = 64
"""Files of the original that are open at the same time; systems allow a process about a thousand."""

Orders = Mapping[int, Sequence[int]]
"""By block, the former number of the expert that gets each number."""


def renumber(
    source: Path, target: Path, orders: Orders, progress: Callable[[int], object] = lambda _: None
) -> dict[str, Any]:
    """Write a copy of a checkpoint in which the experts of these blocks have other numbers; return its state.

    For one process. The original is verified first, and `progress` is called with the bytes of each tensor of it.
    """
    record = verify_checkpoint(source, progress)
    moved = _moved(source, record, orders)
    made = {"from": source.name, "orders": {str(block): list(order) for block, order in orders.items()}}
    state = {**record.state, RENUMBERED: [*record.state.get(RENUMBERED, ()), made]}
    with ExitStack() as stack, AtomicFolder(target.resolve(), CHECKPOINT_FILE).fill() as folder:
        files = stack.enter_context(_OpenFiles(source))
        parts: dict[str, dict[str, Box]] = {}
        for name in record.tensors:
            for rank, box in record.parts(name):
                parts.setdefault(rank_file(rank), {})[name] = box
        written = {}
        for file_name in record.files:
            own, there = parts.get(file_name, {}), files.of(file_name).tensors
            types = {name: there[name] for name in own}
            tensors = _tensors(files, record, file_name, own, moved)
            finite = [name for name in own if record.tensors[name].finite]
            written[file_name] = write_tensor_file(folder / file_name, types, tensors, finite)
        write_record(folder, replace(record, state=state, files=written))
    return state


def _moved(source: Path, record: Record, orders: Orders) -> dict[str, Sequence[int]]:
    """Return the new order of the rows of each tensor that has rows of experts."""
    found, blocks = {}, set()
    for name, info in record.tensors.items():
        if name.startswith(RANDOM):
            continue
        of_model, of_state = name.removeprefix(MODEL), name.removeprefix(OPTIMIZER).partition("/")[2]
        match = OF_A_BLOCK.fullmatch(of_model if name.startswith(MODEL) else of_state)
        if match is None or int(match[1]) not in orders or not info.shape:  # without a shape: the count of steps
            continue
        order = orders[int(match[1])]
        if match[2] not in OF_EXPERTS or info.shape[0] != len(order):
            raise ValueError(
                f"{source}: {name!r} of shape {info.shape} is no tensor with a row for each of {len(order)} experts; "
                f"only {', '.join(OF_EXPERTS)} of a mixture can be renumbered: give the run that the counts are of"
            )
        found[name] = order
        blocks.add(int(match[1]))
    if lacking := sorted(set(orders) - blocks):
        raise ValueError(
            f"{source} has no experts in {name_some([f'layers.{block}' for block in lacking])}; give the run that the "
            "counts are of"
        )
    return found


def _tensors(
    files: _OpenFiles, record: Record, file_name: str, parts: Mapping[str, Box], moved: Mapping[str, Sequence[int]]
) -> Iterator[Tensor]:
    """Yield the tensors of a file of the copy, of which it has these parts, in their order."""
    for name, box in parts.items():
        if name not in moved:
            yield files.of(file_name).read(name)
            continue
        part = torch.empty([len(along) for along in box], dtype=record.tensors[name].dtype)
        for row, former in zip(part, moved[name][box[0].start : box[0].stop], strict=True):
            _read_row(files, record, name, (range(former, former + 1), *box[1:]), row[None])
        yield part


def _read_row(files: _OpenFiles, record: Record, name: str, wanted: Box, into: Tensor) -> None:
    """Read a box of a tensor with a single row from the parts that have it."""
    for rank, part in record.parts(name, wanted):
        common = [overlap(one, other) for one, other in zip(wanted, part, strict=True)]
        own, there = (slices_within(common, outer) for outer in (wanted, part))
        into[own] = files.of(rank_file(rank)).read(name, there)


class _OpenFiles:
    """The tensor files of a checkpoint, of which the last few that were read stay open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, TensorFile] = {}

    def of(self, name: str) -> TensorFile:
        file = self._open.pop(name, None) or TensorFile(self._folder / name)
        self._open[name] = file  # the last one again
        if len(self._open) > MOST_OPEN:
            self._open.pop(next(iter(self._open))).__exit__(None, None, None)
        return file

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.__exit__(None, None, None)

"""Tensors of a grid from a folder that any grid has written: every rank reads the pieces that it holds.

First everything is checked by somebody: names, shapes, dtypes, files, and the checksum of every tensor, the bytes
shared out among the ranks. Only when all ranks have found all in order is the first tensor changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fourfold.checkpoint.files import File, Stored
from fourfold.checkpoint.folder import Place
from fourfold.checkpoint.record import RECORD, Record, file_of, read_record
from fourfold.checkpoint.write import Tensors, require_own_part
from fourfold.errors import DamagedCheckpointError, MissingCheckpointError
from fourfold.grid import Grid
from fourfold.layout import Box, overlap


@dataclass(frozen=True, slots=True)
class _Read:
    """A piece of a part that goes to a piece of a local shard."""

    name: str
    part: Box
    source: tuple[slice, ...]
    target: tuple[slice, ...]


def read_tensors(grid: Grid, folder: str | os.PathLike[str], choose: Callable[[Record], Tensors]) -> Record:
    """Read into the tensors that `choose` picks by the record, in place, cast to their dtypes.

    All ranks call it. Whatever is missing, damaged or does not fit raises on all of them before anything has changed.
    """
    source = Path(folder).resolve()
    grid.agree("the folder to read", str(source))

    def plan() -> tuple[Record, Tensors, dict[str, list[_Read]]]:
        record = _opened(source)
        tensors = choose(record)
        reads = _plan(tensors, record, grid, source)
        verify_share(source, record, grid.rank, grid.shape.world)
        return record, tensors, reads

    record, tensors, reads = grid.together(f"reading {source}", plan)
    grid.together(f"reading {source}, with tensors half changed by then,", lambda: _copy(tensors, source, reads))
    return record


def _opened(folder: Path) -> Record:
    replaced = Place(folder).replaced
    if replaced.exists() and not folder.exists():
        raise MissingCheckpointError(
            f"{folder} is missing: a save died while it replaced it; the former one is {replaced}"
        )
    return read_record(folder)


def _plan(tensors: Tensors, record: Record, grid: Grid, folder: Path) -> dict[str, list[_Read]]:
    """What this rank will read from each file, with everything checked but the values."""
    reads: dict[str, list[_Read]] = {}
    for name, held in tensors.items():
        saved = record.tensors[name]
        if saved.shape != held.shape:
            raise ValueError(
                f"{name!r} has shape {saved.shape} in {folder} and {held.shape} here; build the model as saved"
            )
        own = require_own_part(name, held, grid)
        for rank, part in record.parts(name, own) if all(own) else ():
            common = [overlap(a, b) for a, b in zip(own, part, strict=True)]
            read = _Read(name, part, _inside(common, part), _inside(common, own))
            reads.setdefault(file_of(rank), []).append(read)
    for name, wanted in reads.items():
        with opened(folder, record, name) as file:
            for read in wanted:
                stored, expected = file.stored.get(read.name), tuple(map(len, read.part))
                if stored is None or (stored.shape, stored.dtype) != (expected, record.tensors[read.name].dtype):
                    raise DamagedCheckpointError(
                        f"{file.path} holds {_described(stored)} for {read.name!r}, but {RECORD} says "
                        f"{record.tensors[read.name].dtype} {expected}; copy them again"
                    )
    return reads


def _described(stored: Stored | None) -> str:
    return "nothing" if stored is None else f"{stored.dtype} {stored.shape}"


def _inside(box: Sequence[range], outer: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


def _copy(tensors: Tensors, folder: Path, reads: Mapping[str, Sequence[_Read]]) -> None:
    for name, wanted in reads.items():
        with File(folder / name) as file:
            for read in wanted:
                tensors[read.name].local[read.target].copy_(file.read(read.name, read.source))


@contextmanager
def opened(folder: Path, record: Record, name: str) -> Iterator[File]:
    """A file of the checkpoint, which is the one that was written."""
    if name not in record.files:
        raise DamagedCheckpointError(
            f"{folder / RECORD} does not name {name}, which its tensors need; copy the folder again"
        )
    with File(folder / name) as file:
        file.require(record.files[name])
        yield file


def verify_share(
    folder: Path, record: Record, share: int = 0, shares: int = 1, say: Callable[[int], object] = lambda _: None
) -> None:
    """Compare the bytes of a checkpoint with their checksums: one share of several, cut between tensors.

    A file counts as much as any other, so with as many shares as files a share is a file. `say` hears of bytes done.
    """
    files = len(record.files)
    for number, (name, entry) in enumerate(record.files.items()):
        if not number * shares < files * (share + 1) or not files * share < (number + 1) * shares:
            continue
        with opened(folder, record, name) as file:
            at = 0
            for key, stored in file.stored.items():
                if (number * entry.nbytes + at) * shares // (files * entry.nbytes) == share:
                    file.verify(key)
                    say(stored.nbytes)
                at += stored.nbytes

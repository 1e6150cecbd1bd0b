"""Tensors of a grid to a folder: every rank writes its own parts, and the folder appears when all have.

    copy -> write (in a thread) -> tell rank 0 -> rank 0 writes the record and renames the folder

Nothing is gathered: what rank 0 hears of the others is the length of a file and a checksum. Of equal copies one is
written. With `copy` the tensors may change as soon as this returns; the folder holds what they were.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from fourfold.agree import Board
from fourfold.checkpoint.files import FileEntry, write_file
from fourfold.checkpoint.folder import Place
from fourfold.checkpoint.record import Entry, Record, file_of, write_record
from fourfold.grid import Grid
from fourfold.layout import Storage

PATIENCE = 1800.0
"""Seconds that rank 0 waits for the slowest rank's file once its own is written."""
_numbers = itertools.count()
"""Tells the folders of a process apart; ranks write the same ones in the same order."""


@dataclass(frozen=True, slots=True, eq=False)  # by identity: tensors do not compare
class Held:
    """This rank's part of a tensor, the shape of the whole, and how it is cut."""

    local: Tensor
    shape: tuple[int, ...]
    storage: Storage

    @property
    def entry(self) -> Entry:
        return Entry(self.shape, self.local.dtype, self.storage)


Tensors = Mapping[str, Held]


class Staging:
    """Memory on the host into which tensors are copied, kept for the next copy; pinned where they come from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def copy(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Copies, complete once what comes with them was called; the device alone waits for them until then."""
        self._buffers = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            self._buffers[name].copy_(tensor, non_blocking=True)
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return self._buffers, lambda: None
        event = torch.cuda.Event()
        event.record()
        return self._buffers, event.synchronize

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        old = self._buffers.get(name)
        if old is not None and (old.shape, old.dtype) == (like.shape, like.dtype):
            return old
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


class Writing:
    """A folder on its way to the disk. All ranks make it together and ask for its `result` together."""

    def __init__(
        self,
        tensors: Tensors,
        grid: Grid,
        folder: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        staging: Staging | None = None,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """Takes a copy where there is `staging`, otherwise the tensors must not change until it is complete.
        Rank 0 does `then` once the folder is there."""
        self.grid, self.place, self._then = grid, Place(Path(folder).resolve()), then
        self.record = Record(grid.shape, state, {name: held.entry for name, held in tensors.items()})
        grid.agree("what to write", f"{self.place.target} with {len(tensors)} tensors")
        self._what = f"writing {self.place.target}"
        own = grid.together(self._what, lambda: self._own(tensors))
        grid.first_alone(self._what, self.place.prepare)
        self._ready: Callable[[], None] = lambda: None
        if staging is not None:
            own, self._ready = staging.copy(own)
        self._board = Board(f"write/{next(_numbers)}") if grid.shape.world > 1 else None
        self._done: Future[None] = Future()
        Thread(target=self._act, args=(own,), name="fourfold-save", daemon=True).start()

    def _own(self, tensors: Tensors) -> dict[str, Tensor]:
        """What this rank writes."""
        grid = self.grid
        for name, held in tensors.items():
            require_own_part(name, held, grid)
        return {name: tensors[name].local for name in self.record.own(grid.coords)}

    def _act(self, own: dict[str, Tensor]) -> None:
        try:
            self._done.set_result(self._write(own))
        except BaseException as error:
            self._done.set_exception(error)

    def _write(self, own: dict[str, Tensor]) -> None:
        entry: FileEntry | None = None
        fault: Exception | None = None
        try:
            self._ready()
            entry = self._write_file(own)
        except Exception as error:
            fault = error
        told = {"file": None if entry is None else asdict(entry), "failed": fault is not None}
        if self._board is not None:
            self._board.put(json.dumps(told))
        if self.grid.rank == 0:
            self._publish([json.loads(text) for text in self._board.read(PATIENCE)] if self._board else [told])
        if fault is not None:
            raise fault

    def _write_file(self, own: dict[str, Tensor]) -> FileEntry | None:
        if not own:
            return None
        if not self.place.partial.is_dir():
            raise FileNotFoundError(
                f"{self.place.partial}, which rank 0 has made, is not there on rank {self.grid.rank}; "
                "write to a file system that all nodes share"
            )
        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in own.items()}
        return write_file(self.place.partial / file_of(self.grid.rank), layout, own.values())

    def _publish(self, told: list[dict[str, Any]]) -> None:
        """Show the folder if all have written their files; by rank 0."""
        try:
            if any(rank["failed"] for rank in told):
                self.place.abandon()
                return
            files = {file_of(rank): FileEntry(**said["file"]) for rank, said in enumerate(told) if said["file"]}
            write_record(self.place.partial, Record(self.record.shape, self.record.state, self.record.tensors, files))
            self.place.publish()
        except BaseException:
            self.place.abandon()
            raise
        self._then()

    def result(self) -> None:
        """Wait until the folder is complete; what failed on any rank raises on all, and the old folder is there."""
        self.grid.together(self._what, self._done.result)


def require_own_part(name: str, held: Held, grid: Grid) -> tuple[range, ...]:
    """The box of a tensor that this rank holds; raises unless `local` has its shape."""
    box = held.entry.box(grid.shape, grid.coords)
    if tuple(held.local.shape) != tuple(map(len, box)):
        raise ValueError(
            f"{name!r}: rank {grid.rank} holds {tuple(held.local.shape)}, but its part of {held.shape} is "
            f"{tuple(map(len, box))}; pass the local shard and the storage that cut it"
        )
    return box

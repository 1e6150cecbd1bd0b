"""Tensors of a grid to a folder: every rank writes its own parts, and the folder appears when all have.

    copy, then write (in a thread) -> tell rank 0 -> rank 0 writes the record and renames the folder

Nothing is gathered: what rank 0 hears of the others is the length of a file and a checksum. Of equal copies one is
written. The copy is taken beside forward and backward; whoever changes the tensors says `keep_order` before.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoint.files import FileEntry, write_file
from fourfold.checkpoint.folder import Place
from fourfold.checkpoint.record import Entry, Record, file_of, write_record
from fourfold.grid import Grid
from fourfold.layout import Layout

PATIENCE = 1800.0
"""Seconds that rank 0 waits for the slowest rank's file once its own is written."""


@dataclass(frozen=True, slots=True, eq=False)  # by identity: tensors do not compare
class Held:
    """This rank's part of a tensor, the shape of the whole, and how it is cut."""

    local: Tensor
    shape: tuple[int, ...]
    storage: Layout
    parameter: Tensor | None = None
    """Whose part it is, where that counts changes by itself."""

    @property
    def version(self) -> tuple[int, int]:
        """Differs once somebody has changed it."""
        return self.local._version, 0 if self.parameter is None else self.parameter._version

    @property
    def entry(self) -> Entry:
        return Entry(self.shape, self.local.dtype, self.storage)


Tensors = Mapping[str, Held]


class Staging:
    """Memory on the host into which tensors are copied, kept for the next copy; pinned where they come from a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(self, tensors: Tensors) -> Copy:
        """Begin to copy, beside what the caller goes on to compute."""
        self._buffers = {name: self._buffer(name, held.local) for name, held in tensors.items()}
        device = next((held.local.device for held in tensors.values() if held.local.is_cuda), None)
        if device is None:
            return Copy(tensors, self._buffers)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for name, held in tensors.items():
                self._buffers[name].copy_(held.local, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Copy(tensors, self._buffers, event, device)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        old = self._buffers.get(name)
        if old is not None and (old.shape, old.dtype) == (like.shape, like.dtype):
            return old
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


class Copy:
    """Tensors on their way into other memory: a thread of the host takes them there, or a stream of the device.

    Whoever changes the tensors says `keep_order` before. A change without it is noticed, and there is no copy.
    """

    def __init__(
        self,
        tensors: Tensors,
        copies: dict[str, Tensor],
        event: torch.cuda.Event | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._tensors, self._copies, self._event, self._device = tensors, copies, event, device
        self._versions = {name: held.version for name, held in tensors.items()}
        self._taken = Event()
        self._lock = Lock()
        self._ordered = False
        self._changed = ""

    def take(self) -> dict[str, Tensor]:
        """The copies, once they are complete; for the thread that writes them."""
        try:
            if self._event is not None:
                self._event.synchronize()
            else:
                for name, held in self._tensors.items():
                    self._copies[name].copy_(held.local)
            self._look()
        finally:
            self._taken.set()
        if self._changed:
            raise RuntimeError(
                f"{self._changed!r} was changed while it was being saved; call the saver's keep_order() before "
                "anything but the optimizer's step changes parameters"
            )
        return self._copies

    def keep_order(self) -> None:
        """What is done from now on may change the tensors: it comes after the copy."""
        self._look(ordered=True)
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        else:
            self._taken.wait()

    def _look(self, *, ordered: bool = False) -> None:
        """Note what has changed, unless changes are in order by now."""
        with self._lock:
            if not self._ordered and not self._taken.is_set():
                changed = (name for name, held in self._tensors.items() if held.version != self._versions[name])
                self._changed = self._changed or next(changed, "")
            self._ordered = self._ordered or ordered


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
        before: Writing | None = None,
        first: Callable[[], object] = lambda: None,
        then: Callable[[], object] = lambda: None,
    ) -> None:
        """With `staging` a copy is written, and the tensors may change after `keep_order`; otherwise they must not
        until it is complete. `before` is an earlier one, perhaps of the same tensors. Rank 0 does `first` before
        anything is written, and `then` once the folder is there."""
        self.grid, self.place, self._then = grid, Place(Path(folder).resolve()), then
        self.record = Record(grid.shape, state, {name: held.entry for name, held in tensors.items()})
        self._what = f"writing {self.place.target}"
        self._copy: Copy | None = None

        def start() -> None:
            self.own = self._own(tensors, before)
            if staging is not None:
                self._copy = staging.copy({name: tensors[name] for name in self.own})
            elif grid.device.type == "cuda":
                torch.cuda.current_stream(grid.device).synchronize()  # a thread has a stream of its own
            if grid.rank == 0:
                first()
                self.place.prepare()

        try:
            grid.together(self._what, start, same=f"{self.place.target}, {len(tensors)} tensors")
        except BaseException:
            self._abandon()
            raise
        # made here, where all ranks write the same folders in the same order, and used by the thread alone
        self._channel = grid.channel.open("write", seconds=PATIENCE, fresh=True, own_connection=True)
        self._done: Future[None] = Future()
        own = {name: tensors[name].local for name in self.own}
        # not a daemon: an interpreter that ends lets it finish
        Thread(target=self._act, args=(own,), name="fourfold-save").start()

    def _own(self, tensors: Tensors, before: Writing | None) -> list[str]:
        """The tensors of which this rank writes its part."""
        if before is not None and before.record.tensors == self.record.tensors:
            return before.own
        for name, held in tensors.items():
            require_own_part(name, held, self.grid)
        return self.record.own(self.grid.coords)

    def _abandon(self) -> None:
        if self.grid.rank == 0:
            self.place.abandon()

    def keep_order(self) -> None:
        """What is done from now on may change the tensors that are being saved."""
        if self._copy is not None:
            self._copy.keep_order()

    def _act(self, own: dict[str, Tensor]) -> None:
        try:
            self._done.set_result(self._write(own))
        except BaseException as error:
            self._done.set_exception(error)

    def _write(self, own: dict[str, Tensor]) -> None:
        entry: FileEntry | None = None
        fault: Exception | None = None
        try:
            entry = self._write_file(own if self._copy is None else self._copy.take())
        except Exception as error:
            fault = error
        told = {"file": None if entry is None else asdict(entry), "failed": fault is not None}
        everyone = self._channel.gather("files", json.dumps(told))
        if self._channel.leads:
            self._publish([json.loads(text) for text in everyone.values()])
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

    def settle(self, seconds: float) -> None:
        """Wait so long for this rank's part, whatever becomes of it; without the other ranks."""
        with suppress(BaseException):
            self._done.result(seconds)

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

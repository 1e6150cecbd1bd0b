"""Saving: every rank writes its own parts of the tensors, and the folder appears once all parts are written.

    copy to the host, then write (in a thread) -> report to rank 0 -> rank 0 writes the record and renames the folder

Nothing is gathered: rank 0 receives the length and a checksum of each rank's file. Equal copies are written once. With
a `Saver` the copy runs beside forward and backward; `wait_for_staging` orders it before whatever changes the tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.atomic import AtomicFolder
from fourfold.axes import PIPE
from fourfold.checkpoint.format import (
    CHECKPOINT_FILE,
    EXTRA,
    FileInfo,
    Record,
    TensorInfo,
    TensorType,
    TensorTypes,
    join_over_pipe,
    pack_json,
    parse_tensor,
    rank_file,
    tensor_entry,
    write_record,
    write_tensor_file,
)
from fourfold.checkpoint.load import Checkpoints, local_folder, require_arguments
from fourfold.checkpoint.training_state import (
    TRAINING,
    LocalShards,
    grid_of,
    join_training_tables,
    model_shards,
    training_shards,
    training_table,
)
from fourfold.errors import name_some
from fourfold.grid import Grid, Shape
from fourfold.layout import Layout

SLOWEST_RANK_SECONDS = 1800.0
"""Seconds that rank 0 waits for the slowest rank's file once its own is written. Ranks share a file system and write
equal amounts, so a rank that needs half an hour more is not going to finish."""


def save(
    folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None, *, extra: Any = None
) -> None:
    """Write a model, and its optimizer if one is given, into a folder, which all ranks must see; `ff.load` reads it.

    All ranks call it. The model is one of `ff.models.build` or `ff.parallelize`, or, in a job of one process, a plain
    module. The optimizer is any of torch's kind whose state consists of tensors of the shape of their parameter,
    tensors without dims and numbers; any other is refused before anything is written. `extra` is what JSON can hold,
    such as the `state_dict()` of a learning-rate scheduler or of a GradScaler; what rank 0 gives is kept.

    The folder is complete when this returns, on all ranks. A checkpoint that is already there is replaced at once when
    the new one is complete; an error on any rank raises on all of them and leaves the old one as it was. NaN or
    infinity in a parameter or in the optimizer's state is never written: the rank that holds it raises NotFiniteError.
    """
    require_arguments(folder, model, optimizer)
    grid = grid_of(model)

    def collect() -> tuple[LocalShards, dict[str, Any]]:
        shards = model_shards(model) if optimizer is None else training_shards(model, optimizer)
        state = {EXTRA: pack_json(extra, "extra"), **training_table(model, optimizer)}
        return shards, state | _origin()

    shards, state = grid.run_together(f"collecting what {folder} will hold", collect)
    PendingSave(shards, grid, folder, state).wait()


def _origin() -> dict[str, str]:
    """Return when and with which torch a checkpoint is saved, for its state."""
    return {"torch": torch.__version__, "saved": datetime.now(UTC).isoformat("T", "seconds")}


def write_full_tensors(folder: Path, types: TensorTypes, tensors: Iterable[Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint as a grid of one rank would, from unsharded tensors that come in the order of `types`.

    For one process. It asks for a tensor when the one before is written, so the model is never in memory as a whole.
    """
    with AtomicFolder(folder.resolve(), CHECKPOINT_FILE).fill() as partial:
        infos = {name: TensorInfo(kind.shape, kind.dtype, Layout()) for name, kind in types.items()}
        files = {rank_file(0): write_tensor_file(partial / rank_file(0), types, tensors)} if types else {}
        write_record(partial, Record(Shape(), state, infos, files))


class Saver:
    """Saves a run into `ROOT/step-00000100` while it trains; all ranks call its methods together.

    One save is under way at a time. If it fails, the checkpoints before it are intact, and the next call raises. A save
    fails with NotFiniteError if a parameter or the optimizer's state holds NaN or infinity; buffers may.
    """

    def __init__(
        self, grid: Grid, root: Path, *, keep_last: int = 2, keep_every: int = 0, asynchronous: bool = True
    ) -> None:
        """Keep the last few checkpoints, and before them those of steps that are multiples of `keep_every` (0: none).

        With `asynchronous` training continues while a copy of the state is written.
        """
        if keep_last < 1 or keep_every < 0:
            raise ValueError(f"keep_last={keep_last} must be at least 1 and keep_every={keep_every} at least 0")
        self.grid, self.checkpoints = grid, Checkpoints(root)
        self.keep_last, self.keep_every = keep_last, keep_every
        self._staging = StagingMemory() if asynchronous else None
        self._pending: PendingSave | None = None
        self._last: PendingSave | None = None  # kept when it is complete: the next one writes the same parts
        self._hooked: Optimizer | None = None
        self._not_removed: list[str] = []
        grid.run_on_rank0("clearing unfinished checkpoints", self._clear)

    def _clear(self) -> None:
        self._not_removed = self.checkpoints.remove_leftovers(".partial", ".removed")

    def _prune(self) -> None:
        self._not_removed = self.checkpoints.prune(self.keep_last, self.keep_every)

    @property
    def not_removed(self) -> list[str]:
        """What rank 0 could not remove when it last tried, and why. This is no failure: it tries after every save."""
        return self._not_removed

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Write everything that is needed to resume after this step; `save` says which optimizers can be saved.

        When asynchronous it returns at once: the copy is taken beside forward and backward, and the optimizer's next
        step waits for it. Call `wait_for_staging` before anything else changes parameters ahead of that step; a
        change without it fails this save.
        """
        self.wait()

        def collect() -> tuple[LocalShards, dict[str, Any]]:
            if TRAINING in state:
                raise ValueError(f"the key {TRAINING!r} of the state belongs to the checkpoint; choose another")
            packed = {**state, "step": step, **training_table(model, optimizer), **_origin()}
            return training_shards(model, optimizer), packed

        with self._naming_the_newest(step):
            shards, packed = self.grid.run_together(f"collecting what {self.checkpoints.path(step)} will hold", collect)
            self._pending = self._last = PendingSave(
                shards,
                self.grid,
                self.checkpoints.path(step),
                packed,
                staging=self._staging,
                previous=self._last,
                before=lambda: self._require_newest(step),
                after=self._prune,
            )
        if self._staging is None:
            self.wait()
        elif optimizer is not self._hooked:
            optimizer.register_step_pre_hook(lambda *_: self.wait_for_staging())
            if self._hooked is None:
                self.grid.before_replays.append(self.wait_for_staging)  # a replay changes parameters without that hook
            self._hooked = optimizer  # once: every registered hook would run at each step

    def _require_newest(self, step: int) -> None:
        """Raise if the folder has this step or a later one: retention would mix up the checkpoints of two runs."""
        complete = self.checkpoints.complete()
        if complete and complete[-1][0] >= step:
            raise FileExistsError(
                f"{complete[-1][1]} is there already, and step {step} is to be saved beside it; resume from it, or "
                "give another folder"
            )

    def wait_for_staging(self) -> None:
        """Order whatever follows after the copy, so that it may change the parameters that are being saved."""
        if self._pending is not None and self._pending.copy is not None:
            self._pending.copy.wait_for_staging()

    def wait_for_own_part(self, seconds: float) -> None:
        """Wait at most this long for this rank's part of a save under way, whether it succeeds or fails.

        For a run that ends early: it asks no other rank, since others may be gone.
        """
        if self._pending is not None:
            with suppress(BaseException):
                self._pending.done.result(seconds)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete; what failed on any rank raises on all."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._naming_the_newest(pending.record.state["step"]):
                pending.wait()

    @contextmanager
    def _naming_the_newest(self, step: int) -> Iterator[None]:
        """Inside, an error gets a note that this step was not saved, and which checkpoint is the newest."""
        try:
            yield
        except Exception as error:
            newest = self.checkpoints.newest()
            kept = f"the newest checkpoint is {newest}" if newest else "there is no checkpoint before it"
            error.add_note(f"{self.checkpoints.path(step)} was not saved; {kept}")
            raise


class StagingMemory:
    """Memory on the host into which tensors are copied. The next save reuses it. It is pinned for tensors of a GPU."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    def copy(self, shards: LocalShards) -> HostCopy:
        """Start a copy, which runs beside what the caller computes next."""
        self._buffers = {name: self._buffer(name, shard.local) for name, shard in shards.items()}
        device = next((shard.local.device for shard in shards.values() if shard.local.is_cuda), None)
        if device is None:
            return HostCopy(shards, self._buffers)
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the step that is saved must have been computed
        with torch.cuda.stream(self._stream):
            for name, shard in shards.items():
                self._buffers[name].copy_(shard.local, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return HostCopy(shards, self._buffers, event, device)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Return the buffer of the last save where it fits: to pin memory takes longer than to copy."""
        old = self._buffers.get(name)
        if old is not None and (old.shape, old.dtype) == (like.shape, like.dtype):
            return old
        return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


class HostCopy:
    """A copy of shards into staging memory, made by a stream of the GPU or, on the CPU, by the thread that writes.

    Call `wait_for_staging` before changing the tensors. A change without it is noticed, and `result` raises.
    """

    def __init__(
        self,
        shards: LocalShards,
        copies: dict[str, Tensor],
        event: torch.cuda.Event | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._shards, self._copies, self._event, self._device = shards, copies, event, device
        self._versions = {name: shard.version for name, shard in shards.items()}
        self._done = Event()
        # Guards the next two and the reading of versions: training's thread and the writer's both look for changes.
        self._lock = Lock()
        self._ordered = False
        self._changed = ""

    def result(self) -> dict[str, Tensor]:
        """Return the copies once they are complete; called by the thread that writes them."""
        try:
            if self._event is not None:
                self._event.synchronize()  # the host must not read the buffers before the GPU has filled them
            else:
                for name, shard in self._shards.items():
                    self._copies[name].copy_(shard.local)
            self._note_changes()
        finally:
            self._done.set()  # also after an error: training must not wait for a copy that never comes
        if self._changed:
            raise RuntimeError(
                f"{self._changed!r} was changed while it was being saved; call the saver's wait_for_staging() before "
                "anything but the optimizer's step changes parameters"
            )
        return self._copies

    def wait_for_staging(self) -> None:
        """Order whatever follows after the copy: the GPU's stream waits for it, or on the CPU this thread does."""
        self._note_changes(ordered=True)
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        else:
            self._done.wait()

    def _note_changes(self, *, ordered: bool = False) -> None:
        """Note which tensor has changed, unless changes are ordered after the copy by now."""
        with self._lock:
            if not self._ordered and not self._done.is_set():
                changed = (name for name, shard in self._shards.items() if shard.version != self._versions[name])
                self._changed = self._changed or next(changed, "")
            self._ordered = self._ordered or ordered


def _record_of_all(grid: Grid, shards: LocalShards, state: dict[str, Any]) -> Record:
    """Return the record of what all ranks are going to write, given what this rank holds; all ranks call it.

    Ranks along pipe hold different tensors. Every rank must know all of them, because they decide who writes what.
    """
    own = {name: shard.info for name, shard in shards.items()}
    if grid.size(PIPE) == 1:
        return Record(grid.shape, state, own)
    table = {"tensors": {name: tensor_entry(info) for name, info in own.items()}, TRAINING: state.get(TRAINING)}
    tables = [json.loads(text) for text in grid.texts_by_pipe(json.dumps(table))]
    tensors = join_over_pipe(
        [{name: parse_tensor(name, found, grid.shape) for name, found in each["tensors"].items()} for each in tables]
    )
    if TRAINING in state:
        state = {**state, TRAINING: join_training_tables([each[TRAINING] for each in tables])}
    return Record(grid.shape, state, tensors)


def _require_own(record: Record, shards: LocalShards, grid: Grid) -> None:
    """Raise unless this rank holds what the record says of its pipe coordinate, for which another rank has spoken."""
    here = grid.coords[PIPE]
    expected = {name for name, info in record.tensors.items() if not info.pipe or here in info.pipe}
    if differing := sorted(expected ^ shards.keys()):
        raise ValueError(
            f"rank {grid.rank} holds other tensors than the first rank at pipe={here}: {name_some(differing)} on one "
            "of them only; give all ranks the same model and the same optimizer"
        )


class PendingSave:
    """A folder that a thread is writing. All ranks make it together and `wait` for it together."""

    def __init__(
        self,
        shards: LocalShards,
        grid: Grid,
        folder: str | os.PathLike[str],
        state: dict[str, Any],
        *,
        staging: StagingMemory | None = None,
        previous: PendingSave | None = None,
        before: Callable[[], object] = lambda: None,
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """Start to write. With `staging` a copy is written, and the tensors may change after `wait_for_staging`;
        without it they must not change until the save is complete.

        `previous` is an earlier save, perhaps of the same tensors. Rank 0 calls `before` when nothing is written yet,
        and `after` once the folder is complete.
        """
        self.grid, self.folder, self._after = grid, AtomicFolder(local_folder(folder), CHECKPOINT_FILE), after
        self.record = _record_of_all(grid, shards, state)
        self._what = f"writing {self.folder.target}"
        self.copy: HostCopy | None = None

        def start() -> None:
            _require_own(self.record, shards, grid)
            self.own = self._own_names(shards, previous)
            if staging is not None:
                self.copy = staging.copy({name: shards[name] for name in self.own})
            elif grid.device.type == "cuda":
                # The thread that writes has another stream, which would not wait for the values to be computed.
                torch.cuda.current_stream(grid.device).synchronize()
            if grid.rank == 0:
                before()
                self.folder.prepare()

        try:
            grid.run_together(self._what, start, same=f"{self.folder.target}, {len(self.record.tensors)} tensors")
        except BaseException:
            if grid.rank == 0:
                self.folder.abandon()
            raise
        # Made here, where all ranks make the same saves in the same order; the thread that writes uses it alone.
        self._channel = grid.channel.open("write", seconds=SLOWEST_RANK_SECONDS, fresh=True, own_connection=True)
        # The interpreter waits for an executor's thread when it ends, so the checkpoint is finished even then.
        thread = ThreadPoolExecutor(1, "fourfold-save")
        self.done = thread.submit(self._write, {name: shards[name].local for name in self.own})
        thread.shutdown(wait=False)  # the thread ends when the file is written

    def _own_names(self, shards: LocalShards, previous: PendingSave | None) -> list[str]:
        """Return the tensors that this rank writes its part of: the same as last time if the tensors are the same."""
        if previous is not None and previous.record.tensors == self.record.tensors:
            return previous.own
        for name, shard in shards.items():
            shard.require_box(name, self.grid)
        return self.record.written_by(self.grid.coords)

    def _write(self, own: dict[str, Tensor]) -> None:
        """Write this rank's file and report it to rank 0, which publishes the folder once all ranks have reported."""
        info: FileInfo | None = None
        fault: Exception | None = None
        try:
            info = self._write_file(own if self.copy is None else self.copy.result())
        except Exception as error:
            fault = error  # raised below: rank 0 waits for this rank's report and must get it first
        report = {"file": None if info is None else asdict(info), "failed": fault is not None}
        reports = self._channel.gather("files", json.dumps(report))
        if self._channel.leads:
            self._publish([json.loads(text) for text in reports.values()])
        if fault is not None:
            raise fault

    def _write_file(self, own: dict[str, Tensor]) -> FileInfo | None:
        if not own:
            return None
        if not self.folder.partial.is_dir():
            raise FileNotFoundError(
                f"{self.folder.partial}, which rank 0 has made, is not there on rank {self.grid.rank}; "
                "write to a file system that all nodes share"
            )
        types = {name: TensorType.of(tensor) for name, tensor in own.items()}
        finite = {name for name in own if self.record.tensors[name].finite}
        return write_tensor_file(self.folder.partial / rank_file(self.grid.rank), types, own.values(), finite)

    def _publish(self, reports: list[dict[str, Any]]) -> None:
        """Write the record and give the folder its name if all ranks have written their files; on rank 0."""
        try:
            if any(report["failed"] for report in reports):
                self.folder.abandon()
                return
            written = {rank_file(rank): report["file"] for rank, report in enumerate(reports) if report["file"]}
            files = {name: FileInfo(**info) for name, info in written.items()}
            write_record(self.folder.partial, Record(self.record.grid, self.record.state, self.record.tensors, files))
            self.folder.publish()
        except BaseException:
            self.folder.abandon()
            raise
        self._after()

    def wait(self) -> None:
        """Wait until the folder is complete; what failed on any rank raises on all, and the old folder stays."""
        self.grid.run_together(self._what, self.done.result)

"""Loading: a grid of any shape reads what any other grid has written; each rank reads the parts that it holds.

Everything is checked first: names, shapes, dtypes, files, the checksum of every tensor, and that parameters and
optimizer state are finite, the bytes divided among the ranks. The first tensor changes only after all ranks have found
everything in order.

The checkpoints of a run are found here too: a run has one folder per step, and only a folder with a record is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import ENOENT
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fourfold.atomic import AtomicFolder
from fourfold.checkpoint.format import (
    CHECKPOINT_FILE,
    EXTRA,
    MODEL,
    RECORD,
    Record,
    TensorFile,
    TensorType,
    rank_file,
    read_record,
    reading,
    unpack_json,
)
from fourfold.checkpoint.training_state import (
    CLOCK,
    HeldNames,
    LocalShard,
    LocalShards,
    SavedOptimizer,
    clock_shards,
    grid_of,
    model_shards,
    random_states,
    restore_clock,
    set_extra_states,
    set_random_states,
    stepped_parameters,
    training_table_of,
)
from fourfold.errors import DamagedCheckpointError, MissingCheckpointError, UnreadableCheckpointError, name_some
from fourfold.grid import Grid
from fourfold.layout import Box, boxed, overlap

STEP_FOLDER = re.compile(r"step-(\d{8,})")
"""The name of a checkpoint's folder in a run."""
SET_ASIDE = "damaged-"
"""The beginning of the name of a folder that a run found damaged and passed over. Nothing ever counts or removes it."""
ADDRESS = re.compile(r"[a-z][a-z0-9]+:/")
"""The beginning of the address of a file elsewhere; `Path` makes one slash of two."""
CHECKPOINTS = "checkpoints"
"""The folder inside a run's folder that holds its checkpoints."""
WHAT_TO_GIVE = "give the folder of a run, or the folder of one checkpoint"
"""The way out in the errors of commands that take either of them."""


# The checkpoints of a run


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of a run, by step: `ROOT/step-00000100`."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def all(self) -> list[tuple[int, Path]]:
        """Return the step and folder of every checkpoint, the newest last, also of those that lost their record."""
        if not self.root.is_dir():
            return []
        found = [(STEP_FOLDER.fullmatch(folder.name), folder) for folder in self.root.iterdir()]
        return sorted((int(match[1]), folder) for match, folder in found if match)

    def complete(self) -> list[tuple[int, Path]]:
        """Return the step and folder of every complete checkpoint, the newest last."""
        return [(step, folder) for step, folder in self.all() if (folder / RECORD).is_file()]

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        complete = self.complete()
        return complete[-1][1] if complete else None

    def newest_whole(self, before: int | None = None) -> tuple[Path | None, list[PassedOver]]:
        """Return the newest checkpoint, of steps below `before`, that has all its files, and what was passed over.

        Only records and the lengths of files are looked at, so a checkpoint that is found may still be damaged.
        """
        passed_over: list[PassedOver] = []
        for step, folder in reversed(self.all()):
            if before is None or step < before:
                try:
                    require_whole(folder)
                except DamagedCheckpointError as error:
                    passed_over.append(PassedOver(step, folder, str(error)))
                else:
                    return folder, passed_over
        return None, passed_over

    def prune(self, keep_last: int, keep_every: int) -> list[str]:
        """Remove all checkpoints but the last few and those of steps that `keep_every` divides (0: none).

        The newest checkpoint is never removed. Return what could not be removed and why, one text for each folder; it
        is tried again at the next call.
        """
        faults = []
        for step, folder in self.complete()[: -max(1, keep_last)]:
            if not (keep_every and step % keep_every == 0):
                try:
                    remove_checkpoint(folder)
                except OSError as error:
                    faults.append(f"cannot remove {folder} ({error.strerror or error})")
        return [*faults, *self.remove_leftovers(".removed")]

    def remove_leftovers(self, *suffixes: str) -> list[str]:
        """Remove what saves (`.partial`) and removals (`.removed`) that died have left; return what could not be."""
        faults = []
        for folder in self.root.glob(".step-*.*") if self.root.is_dir() else ():
            if folder.suffix in suffixes:
                try:
                    shutil.rmtree(folder)
                except OSError as error:
                    faults.append(f"cannot remove {folder} ({error.strerror or error})")
        return faults


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A damaged checkpoint that a run does not resume from, and why."""

    step: int
    folder: Path
    why: str


def require_whole(folder: Path) -> Record:
    """Return the record of a checkpoint; raise unless all files that it names are there and as long as written."""
    record = read_record(folder)
    for name, written in record.files.items():
        with reading(folder / name):
            found = (folder / name).stat().st_size
        if found != written.nbytes:
            raise DamagedCheckpointError(
                f"{folder / name} has {found} bytes and was written with {written.nbytes}; copy it again"
            )
    return record


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed folder never looks like a checkpoint.

    Files that cannot be removed are left for `remove_leftovers`.
    """
    removed = folder.with_name(f".{folder.name}.removed")
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint to a name that is free and that no run counts; return the new path."""
    name, number = f"{SET_ASIDE}{folder.name}", 1
    while (free := folder.with_name(name)).exists():
        number += 1
        name = f"{SET_ASIDE}{folder.name}-{number}"
    os.rename(folder, free)
    return free


def require_reachable(root: Path) -> None:
    """Raise if the folder that holds checkpoints is a link to nothing: they may lie where nobody looks."""
    if root.is_symlink() and not root.exists():
        raise UnreadableCheckpointError(
            ENOENT,
            f"{root} is a link to {os.readlink(root)}, which is not there; mount that storage, or remove the link to "
            "do without the checkpoints there",
        )


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is the folder of a checkpoint, complete or not."""
    return path.is_dir() and any(CHECKPOINT_FILE.fullmatch(entry.name) for entry in path.iterdir())


def checkpoints_of(path: Path) -> Checkpoints:
    """Return the checkpoints of a run, given its folder or the folder that holds its checkpoints."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; {WHAT_TO_GIVE}")
    require_reachable(path / CHECKPOINTS)
    return Checkpoints(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Return `path` if it is the folder of a checkpoint; else, of that run, the checkpoint of a step or the newest."""
    if is_checkpoint(path):
        if step is not None:
            raise ValueError(f"{path} is one checkpoint; leave out --step {step}, or give the run's folder")
        return path
    complete = dict(checkpoints_of(path).complete())
    if not complete:
        raise FileNotFoundError(f"{path} has no complete checkpoint; {WHAT_TO_GIVE}")
    if step is not None and step not in complete:
        steps = ", ".join(map(str, complete))
        raise FileNotFoundError(f"{path} has no complete checkpoint of step {step}; it has those of {steps}")
    return complete[max(complete) if step is None else step]


# Loading


def require_arguments(folder: object, model: object, optimizer: object) -> None:
    """Raise TypeError unless these are what `save` and `load` take, in that order; torch.save takes another."""
    for name, value, fits in (
        ("folder", folder, isinstance(folder, (str, os.PathLike))),
        ("model", model, isinstance(model, nn.Module)),
        ("optimizer", optimizer, optimizer is None or hasattr(optimizer, "param_groups")),
    ):
        if not fits:
            raise TypeError(
                f"{name} is of type {type(value).__name__}; the arguments are (folder, model, optimizer): a path, a "
                "module and its torch optimizer. A scheduler's state_dict() goes into extra"
            )


def local_folder(folder: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a folder, in which ~ is the home folder; raise ValueError for the address of a store.

    As a path, s3://bucket/last would be a folder here that is named `s3:`.
    """
    if ADDRESS.match(os.fspath(folder)):
        raise ValueError(
            f"{os.fspath(folder)} is an address, not a folder; checkpoints are written to and read from a file system "
            "that all ranks see: give a folder there, and copy it from or to the store"
        )
    return Path(folder).expanduser().resolve()


def load(folder: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Load a checkpoint into a model, and into its optimizer if one is given; return what was saved as `extra`.

    All ranks call it; the grid, and the number of ranks, may differ from those of the save. The model is one of
    `ff.models.build` or `ff.parallelize`, or, in a job of one process, a plain module. Everything is verified on all
    ranks before anything changes, so that after an error model and optimizer are as they were.

    The optimizer gets its whole state back: what a fresh one has not made yet, and the learning rate and the other
    options of its parameter groups. Its class and its groups must be those that were saved; how it computes a step
    (`fused`, `foreach`, `capturable`) need not be. The ranks also get back their random states if the grid is the one
    that was saved. Without an optimizer only the weights are read, cast to the dtype of the model.
    """
    require_arguments(folder, model, optimizer)
    grid_of(model).agree(f"what to load from {folder}", "weights" if optimizer is None else "weights and optimizer")
    if optimizer is None:
        return unpack_json(read_weights(folder, model).state.get(EXTRA))
    return unpack_json(load_training(folder, model, optimizer, require_optimizer=True).get(EXTRA))


def load_training(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer,
    *,
    verified: bool = False,
    keep_options: bool = False,
    require_optimizer: bool = False,
    may_lack: Callable[[str], bool] = lambda _: False,
) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer, and return its `state`; all ranks call it.

    Everything is verified on all ranks before anything changes; `verified` says that `find_damage` has compared the
    checksums already. With `keep_options` the parameter groups keep their learning rates and other options, and dropout
    its seed: the config of a run decides on them. A checkpoint without optimizer state (imported weights) may have
    another dtype and leaves the optimizer as it is, or is refused with `require_optimizer`; parameters that it
    `may_lack`, by their names, keep their initial values. The ranks get back their
    random states on the grid that wrote the checkpoint; on any other grid the random states stay as they are.
    """
    grid = grid_of(model)
    held = _held_names(grid, folder, model, optimizer)
    chosen: dict[str, LocalShard] = {}

    def choose(record: Record) -> LocalShards:
        require_stored_alike(model, held.stored, record, folder)
        saved = SavedOptimizer.of(record)
        wanted = [
            name
            for name in held.tensors
            if saved is not None or name in record.tensors or not may_lack(name.removeprefix(MODEL))
        ]
        require_same_names(wanted, record.names(MODEL), folder)
        chosen.update({name: shard for name, shard in model_shards(model).items() if name in record.tensors})
        if saved is not None:
            _require_same_dtypes(chosen, record, folder)
            saved.require_class(optimizer, folder)
            if not keep_options:
                saved.require_groups(held.groups, folder)
                chosen.update(clock_shards(model) if CLOCK in record.tensors else {})
            chosen.update(saved.allocate(stepped_parameters(model, optimizer), held.stepped, folder))
        elif require_optimizer:
            raise ValueError(
                f"{folder} holds weights and no state of an optimizer; to begin with these weights, leave the "
                "optimizer out: ff.load(folder, model)"
            )
        if record.grid == grid.shape:
            chosen.update(_known_random_states(record, grid))
        return chosen

    record = read_shards(grid, folder, choose, verified=verified)
    if (saved := SavedOptimizer.of(record)) is not None:
        saved.set_state(stepped_parameters(model, optimizer), optimizer, chosen)
        if not keep_options:
            saved.set_options(optimizer)
            restore_clock(model, record, chosen)
    set_extra_states(model, record)
    set_random_states(chosen, grid)
    return record.state


def _held_names(grid: Grid, folder: object, model: nn.Module, optimizer: Optimizer | None = None) -> HeldNames:
    """Return the names of what all ranks hold together, with which a checkpoint is compared; all ranks call it."""
    held = grid.run_together(f"looking at what {folder} is read into", lambda: HeldNames.of(model, optimizer))
    return held.over_pipe(grid)


def _require_same_dtypes(shards: LocalShards, record: Record, folder: object) -> None:
    """Raise unless these tensors were saved with the dtypes that they have here."""
    for name, shard in shards.items():
        if record.tensors[name].dtype != shard.local.dtype:
            raise ValueError(
                f"{name!r} is {record.tensors[name].dtype} in {folder} and {shard.local.dtype} here; resume with "
                "the dtype of the saved run"
            )


def _known_random_states(record: Record, grid: Grid) -> dict[str, LocalShard]:
    """Return the states of this rank's random generators that a record of the same grid can replace."""
    # Another version of torch may have a state of another length.
    return {
        name: state
        for name, state in random_states(grid).items()
        if name in record.tensors and record.tensors[name].shape == state.shape
    }


def read_weights(folder: str | os.PathLike[str], model: nn.Module) -> Record:
    """Read the parameters and buffers of a model, in place, and return the record of the folder.

    All ranks call it; each reads only its own shards, and values are cast to the dtype of the model. An error, such as
    a missing tensor or another shape, is raised on all ranks before any of them has changed a parameter.
    """
    grid = grid_of(model)
    held = _held_names(grid, folder, model)

    def choose(record: Record) -> LocalShards:
        require_stored_alike(model, held.stored, record, folder)
        require_same_names(held.tensors, record.names(MODEL), folder)
        return model_shards(model)

    record = read_shards(grid, folder, choose)
    set_extra_states(model, record)
    return record


def require_stored_alike(model: nn.Module, here: Sequence[str], record: Record, folder: object) -> None:
    """Raise if a plain module and a parallelised one hold a weight in different forms, perhaps of the same shape.

    `here` are the weights that this model holds in another form than the plain one. Records of earlier versions do not
    say how weights are stored; they are of models on a grid.
    """
    there = training_table_of(record).get("stored", here)
    if differing := sorted({*here} ^ {*there}):
        raise ValueError(
            f"{folder} and this {type(model).__name__} hold {name_some(differing)} in different forms: a parallelised "
            "module stores some weights transposed or in parts, the plain module does not; on one process load into "
            "ff.parallelize(model, ff.Grid())"
        )


def require_same_names(wanted: Sequence[str], found: Sequence[str], folder: object) -> None:
    """Raise unless a folder holds the wanted tensors, no more and no fewer."""
    here, there = set(wanted), set(found)
    missing = [name for name in wanted if name not in there]
    unknown = [name for name in found if name not in here]
    if missing or unknown:
        raise ValueError(f"{folder} is of another model: {show_names(missing, unknown, wanted)}; build it as saved")


def show_names(missing: Sequence[str], unknown: Sequence[str], wanted: Sequence[str]) -> str:
    """Say which tensors a folder lacks and which others it holds, each with the nearest spelling on the other side."""
    faults = [f"it lacks {name_some(missing, unknown)}"] if missing else []
    faults += [f"it also holds {name_some(unknown, missing or wanted)}"] if unknown else []
    return "; ".join(faults)


def read_shards(
    grid: Grid,
    folder: str | os.PathLike[str],
    choose: Callable[[Record], LocalShards],
    *,
    verified: bool = False,
) -> Record:
    """Read into the shards that `choose` picks by the record, in place, cast to their dtypes.

    All ranks call it. A file that is missing or damaged, or a tensor that does not fit, raises on all ranks before any
    tensor has changed. With `verified` the checksums are not compared again.
    """
    source = AtomicFolder(local_folder(folder)).readable
    grid.agree("the folder to read", str(source))

    def check() -> tuple[Record, LocalShards, dict[str, Box], PartsByFile]:
        _require_checkpoint(source)
        record = read_record(source)
        shards = choose(record)
        for name, shard in shards.items():
            if any(size > 1 and shard.local.stride(dim) == 0 for dim, size in enumerate(shard.local.shape)):
                raise ValueError(
                    f"{name!r} is an expanded tensor, whose elements share memory, so that nothing can be read into "
                    "it; make it a tensor of its own with .clone()"
                )
            if record.tensors[name].shape != shard.shape:
                raise ValueError(
                    f"{name!r} has shape {record.tensors[name].shape} in {source} and {shard.shape} here; build the "
                    "model as saved"
                )
        own = {name: shard.require_box(name, grid) for name, shard in shards.items()}
        parts = checked_parts(source, record, {name: box for name, box in own.items() if all(box)})
        if not verified:
            verify_share(source, record, grid.rank, grid.shape.world)
        return record, shards, own, parts

    def copy() -> None:
        for file_name, held in parts.items():
            with TensorFile(source / file_name) as file:
                for name, part in held:
                    common = [overlap(a, b) for a, b in zip(own[name], part, strict=True)]
                    into = shards[name].local[slices_within(common, own[name])]
                    into.copy_(file.read(name, slices_within(common, part)))

    # Two rounds: no rank may change a tensor before every rank has found everything in order.
    record, shards, own, parts = grid.run_together(f"reading {source}", check)
    grid.run_together(f"reading {source}, with tensors half changed by then,", copy)
    return record


def _require_checkpoint(source: Path) -> None:
    """Raise MissingCheckpointError if a path is no checkpoint at all; say which ones are in it."""
    if not source.is_dir():
        what = "a file" if source.exists() else "not there"
        raise MissingCheckpointError(f"{source} is {what}; give the folder of a checkpoint, which all ranks must see")
    if not is_checkpoint(source):
        inside = [Checkpoints(source / CHECKPOINTS).newest(), *(path.parent for path in source.glob(f"*/{RECORD}"))]
        found = sorted(str(path) for path in inside if path is not None)
        held = f"it has the checkpoints {name_some(found)}; load one of them" if found else "it has none in it either"
        raise MissingCheckpointError(f"{source} is a folder but not a checkpoint: {held}")


def slices_within(box: Sequence[range], outer: Sequence[range]) -> tuple[slice, ...]:
    """Return the slices that select a box in a tensor that covers `outer`."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))


# Files of a checkpoint, each compared with the record

PartsByFile = dict[str, list[tuple[str, Box]]]
"""Parts of tensors, each as (tensor, box), by the file that holds them."""


def checked_parts(folder: Path, record: Record, boxes: Mapping[str, Box | None]) -> PartsByFile:
    """Return the parts that overlap these boxes of tensors (None: all of the tensor); raise unless files hold them.

    Only headers are read. So a caller never allocates memory for a shape that the record claims and the files lack.
    """
    parts: PartsByFile = {}
    for name, box in boxes.items():
        for rank, part in record.parts(name, box):
            parts.setdefault(rank_file(rank), []).append((name, part))
    for file_name, held in parts.items():
        with open_checked(folder, record, file_name) as file:
            for name, part in held:
                found, expected = file.tensors.get(name), TensorType(record.tensors[name].dtype, tuple(map(len, part)))
                if found != expected:
                    raise DamagedCheckpointError(
                        f"{file.path} does not hold its part of {name!r}: {RECORD} says {expected}, and the file has "
                        f"{found or 'nothing'}; copy the checkpoint again"
                    )
    return parts


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
    """Verify one share of a checkpoint's bytes: checksums, and what must be finite. Shares end between tensors.

    Every file counts the same, so with as many shares as files each share is one file: on the grid that wrote the
    checkpoint a rank opens its own file alone. `progress` is called with the bytes of each tensor.
    """
    files = len(record.files)
    for number, (name, info) in enumerate(record.files.items()):
        if not number * shares < files * (share + 1) or not files * share < (number + 1) * shares:
            continue  # no tensor of the file begins in this share
        with open_checked(folder, record, name) as file:
            offset = 0
            for key, tensor in file.tensors.items():
                if (number * info.nbytes + offset) * shares // (files * info.nbytes) == share:
                    file.verify(key, finite=key in record.tensors and record.tensors[key].finite)
                    progress(tensor.nbytes)
                offset += tensor.nbytes


def find_missing(grid: Grid, folder: Path) -> str:
    """Return which file of a checkpoint is missing or cut short, as rank 0 sees it; empty if all are there.

    All ranks call it and get the same text.
    """
    return _damage(grid, folder, lambda: require_whole(folder) if grid.rank == 0 else None)


def find_damage(grid: Grid, folder: Path) -> str:
    """Verify a checkpoint with all ranks, the bytes divided among them; return what is damaged, empty if nothing is.

    All ranks call it, after `find_missing`, and get the same text. Whatever does not show that the checkpoint is
    damaged, such as a disk that fails, raises on all ranks.
    """

    def verify() -> None:
        try:
            verify_share(folder, read_record(folder), grid.rank, grid.shape.world)
        except MissingCheckpointError as error:
            raise UnreadableCheckpointError(
                ENOENT,
                f"{error} (rank 0 sees it, rank {grid.rank} does not: is the folder shared by all nodes?)",
            ) from error

    return _damage(grid, folder, verify)


def _damage(grid: Grid, folder: Path, act: Callable[[], object]) -> str:
    """Call `act` on every rank, and return the first damage that it raises on any of them, on all ranks."""

    def found() -> str:
        try:
            act()
        except DamagedCheckpointError as error:
            return str(error)
        return ""

    # Other errors raise on all ranks here, so that all of them come to the decision or none does.
    mine = grid.run_together(f"verifying {folder}", found)
    return grid.channel.decide(mine, lambda texts: next(filter(None, texts), ""))


def verify_checkpoint(folder: Path, progress: Callable[[int], object] = lambda _: None) -> Record:
    """Read a checkpoint from end to end and compare every byte with its checksum; raise where something is wrong.

    Parameters and optimizer state must be finite too. For one process; `progress` is called with the bytes of each
    tensor.
    """
    record = read_record(folder)
    verify_share(folder, record, progress=progress)
    checked_parts(folder, record, dict.fromkeys(record.tensors))
    return record


def read_full_tensor(folder: Path, record: Record, name: str) -> Tensor:
    """Return a tensor joined from its parts, each compared with its checksum; for one process."""
    parts = checked_parts(folder, record, {name: None})
    full = torch.empty(record.tensors[name].shape, dtype=record.tensors[name].dtype)
    for file_name, held in parts.items():
        with open_checked(folder, record, file_name) as file:
            file.verify(name)
            for _, box in held:
                boxed(full, box).copy_(file.read(name))
    return full

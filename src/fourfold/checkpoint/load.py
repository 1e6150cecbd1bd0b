"""Loading: a grid of any shape reads what any other grid has written; each rank reads the parts that it holds.

Everything is checked first: names, shapes, dtypes, files, and the checksum of every tensor, the bytes divided among the
ranks. The first tensor changes only after all ranks have found everything in order.

The checkpoints of a run are found here too: a run has one folder per step, and only a folder with a record is complete.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.atomic import AtomicFolder
from fourfold.checkpoint.format import CHECKPOINT_FILE, RECORD, Record, TensorFile, TensorType, rank_file, read_record
from fourfold.checkpoint.training_state import (
    MODEL,
    OPTIMIZER,
    RANDOM,
    LocalShard,
    LocalShards,
    model_shards,
    new_optimizer_shards,
    random_states,
    set_optimizer_state,
    set_random_states,
)
from fourfold.errors import DamagedCheckpointError, MissingCheckpointError, nearest
from fourfold.gradients import gradients_of
from fourfold.grid import Grid
from fourfold.layout import Box, boxed, overlap
from fourfold.optim import AdamW

STEP_FOLDER = re.compile(r"step-(\d{8,})")
"""The name of a checkpoint's folder in a run."""
CHECKPOINTS = "checkpoints"
"""The folder inside a run's folder that holds its checkpoints."""
WHAT_TO_GIVE = "give the folder of a run, or the folder of one checkpoint"
"""The way out in the errors of commands that take either of them."""
MOST_NAMES_SHOWN = 3
"""How many missing or unknown tensors an error names."""


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

    def prune(self, keep_last: int, keep_every: int) -> None:
        """Remove all checkpoints but the last few and those of steps that `keep_every` divides (0: none).

        The newest checkpoint is never removed.
        """
        for step, folder in self.complete()[: -max(1, keep_last)]:
            if not (keep_every and step % keep_every == 0):
                with suppress(OSError):  # what cannot be removed now is tried again after the next save
                    remove_checkpoint(folder)

    def remove_leftovers(self) -> None:
        """Remove what saves and removals that died have left."""
        for folder in self.root.glob(".step-*.*") if self.root.is_dir() else ():
            if folder.suffix in (".partial", ".removed"):
                shutil.rmtree(folder, ignore_errors=True)


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a half-removed folder never looks like a checkpoint."""
    removed = folder.with_name(f".{folder.name}.removed")
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is the folder of a checkpoint, complete or not."""
    return path.is_dir() and any(CHECKPOINT_FILE.fullmatch(entry.name) for entry in path.iterdir())


def checkpoints_of(path: Path) -> Checkpoints:
    """Return the checkpoints of a run, given its folder or the folder that holds its checkpoints."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; {WHAT_TO_GIVE}")
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


def load_training(folder: str | os.PathLike[str], model: nn.Module, optimizer: AdamW) -> dict[str, Any]:
    """Load a checkpoint into a model and its optimizer, and return its `state`; all ranks call it.

    Everything is verified on all ranks before anything changes. A checkpoint without optimizer state (imported
    weights) may have another dtype and leaves the optimizer fresh. The ranks get back their random states on the grid
    that wrote the checkpoint; on any other grid the random states stay as they are.
    """
    grid = optimizer.gradients.grid
    chosen: dict[str, LocalShard] = {}

    def choose(record: Record) -> LocalShards:
        with_state = {name.removeprefix(OPTIMIZER).partition("/")[2] for name in record.names(OPTIMIZER)}
        chosen.update(model_shards(model))
        chosen.update(new_optimizer_shards(optimizer, with_state))
        require_same_names(list(chosen), [name for name in record.tensors if not name.startswith(RANDOM)], folder)
        for name, shard in chosen.items() if with_state else ():
            if record.tensors[name].dtype != shard.local.dtype:
                raise ValueError(
                    f"{name!r} is {record.tensors[name].dtype} in {folder} and {shard.local.dtype} here; resume with "
                    "the dtype of the saved run"
                )
        if record.grid == grid.shape:
            for name, state in random_states(grid).items():
                # Another version of torch may have a state of another length.
                if name in record.tensors and record.tensors[name].shape == state.shape:
                    chosen[name] = state
        return chosen

    record = read_shards(grid, folder, choose)
    set_optimizer_state(optimizer, chosen)
    set_random_states(chosen, grid)
    return record.state


def load_weights(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Read the parameters of a model, in place, from weights or a checkpoint that any grid of any size has written.

    All ranks call it; each reads only its own shards, and values are cast to the dtype of the model. An error, such as
    a missing tensor or another shape, is raised on all ranks before any of them has changed a parameter.
    """

    def choose(record: Record) -> LocalShards:
        wanted = model_shards(model)
        require_same_names(list(wanted), record.names(MODEL), folder)
        return wanted

    read_shards(gradients_of(model).grid, folder, choose)


def require_same_names(wanted: Sequence[str], found: Sequence[str], folder: object) -> None:
    """Raise unless a folder holds the wanted tensors, no more and no fewer."""
    here, there = set(wanted), set(found)
    missing = [name for name in wanted if name not in there]
    unknown = [name for name in found if name not in here]
    if missing or unknown:
        raise ValueError(f"{folder} is of another model: {show_names(missing, unknown, wanted)}; build it as saved")


def show_names(missing: Sequence[str], unknown: Sequence[str], wanted: Sequence[str]) -> str:
    """Say which tensors a folder lacks and which others it holds, each with the nearest spelling on the other side."""

    def shown(names: Sequence[str], others: Sequence[str]) -> str:
        first = ", ".join(f"{name!r}{nearest(name, others)}" for name in names[:MOST_NAMES_SHOWN])
        left = len(names) - MOST_NAMES_SHOWN
        return f"{first} and {left} more" if left > 0 else first

    faults = [f"it lacks {shown(missing, unknown)}"] if missing else []
    faults += [f"it also holds {shown(unknown, missing or wanted)}"] if unknown else []
    return "; ".join(faults)


def read_shards(grid: Grid, folder: str | os.PathLike[str], choose: Callable[[Record], LocalShards]) -> Record:
    """Read into the shards that `choose` picks by the record, in place, cast to their dtypes.

    All ranks call it. A file that is missing or damaged, or a tensor that does not fit, raises on all ranks before any
    tensor has changed.
    """
    source = Path(folder).resolve()
    grid.agree("the folder to read", str(source))

    def check() -> tuple[Record, LocalShards, dict[str, Box], PartsByFile]:
        replaced = AtomicFolder(source).replaced
        if replaced.exists() and not source.exists():
            raise MissingCheckpointError(
                f"{source} is missing: a save died while it replaced it; the former one is {replaced}"
            )
        record = read_record(source)
        shards = choose(record)
        for name, shard in shards.items():
            if record.tensors[name].shape != shard.shape:
                raise ValueError(
                    f"{name!r} has shape {record.tensors[name].shape} in {source} and {shard.shape} here; build the "
                    "model as saved"
                )
        own = {name: shard.require_box(name, grid) for name, shard in shards.items()}
        parts = checked_parts(source, record, {name: box for name, box in own.items() if all(box)})
        verify_share(source, record, grid.rank, grid.shape.world)
        return record, shards, own, parts

    def copy() -> None:
        for file_name, held in parts.items():
            with TensorFile(source / file_name) as file:
                for name, part in held:
                    common = [overlap(a, b) for a, b in zip(own[name], part, strict=True)]
                    shards[name].local[_slices(common, own[name])].copy_(file.read(name, _slices(common, part)))

    # Two rounds: no rank may change a tensor before every rank has found everything in order.
    record, shards, own, parts = grid.run_together(f"reading {source}", check)
    grid.run_together(f"reading {source}, with tensors half changed by then,", copy)
    return record


def _slices(box: Sequence[range], outer: Sequence[range]) -> tuple[slice, ...]:
    """Return the slices that select `box` in a tensor that covers `outer`."""
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
    """Compare one share of a checkpoint's bytes with their checksums. Shares are equal and end between tensors.

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
                    file.verify(key)
                    progress(tensor.nbytes)
                offset += tensor.nbytes


def verify_checkpoint(folder: Path, progress: Callable[[int], object] = lambda _: None) -> Record:
    """Read a checkpoint from end to end and compare every byte with its checksum; raise where something is wrong.

    For one process. `progress` is called with the bytes of each tensor.
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

"""Folders that are complete or absent at every moment, and the checkpoints of a run among them.

A folder is written beside its final place, as `.NAME.partial`, flushed to the disk, and renamed. Nobody reads what a
process that died has left behind, and the next process that writes there removes it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from fourfold.atomic import flush
from fourfold.checkpoint.format import CHECKPOINT_FILE, RECORD

STEP_FOLDER = re.compile(r"step-(\d{8,})")
CHECKPOINTS = "checkpoints"
"""The folder inside a run's folder that holds its checkpoints."""
WHAT_TO_GIVE = "give the folder of a run, or the folder of one checkpoint"
"""How the errors of commands end that take either."""


@dataclass(frozen=True, slots=True)
class AtomicFolder:
    """A folder to write, and two names beside it: `partial` while it is written, `replaced` for the old one."""

    target: Path

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def replaced(self) -> Path:
        return self.target.with_name(f".{self.target.name}.replaced")

    def prepare(self) -> None:
        """Make an empty folder to write in, and remove what a process that died has left."""
        if self.replaced.exists() and not self.target.exists():
            os.rename(self.replaced, self.target)  # it died between the two renames of `publish`
        if self.target.exists():
            self._require_only_ours()
        for leftover in (self.partial, self.replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        self.partial.mkdir(parents=True)

    def _require_only_ours(self) -> None:
        """Raise where the target holds anything but files of a checkpoint: replacing a folder removes all of it."""
        if not self.target.is_dir():
            raise FileExistsError(f"{self.target} is a file; choose another folder to write")
        others = sorted(entry.name for entry in self.target.iterdir() if not CHECKPOINT_FILE.fullmatch(entry.name))
        if others:
            raise FileExistsError(
                f"{self.target} would be replaced, but it also holds {', '.join(map(repr, others[:5]))}, "
                "which no save has written; move that away or choose another folder"
            )

    def publish(self) -> None:
        """Put the finished folder in the place of the old one."""
        flush(self.partial)  # the names of its files must be on the disk before its own name says that it is complete
        if self.target.exists():
            os.rename(self.target, self.replaced)  # a rename does not replace a folder that has files
        try:
            os.rename(self.partial, self.target)
        except OSError:
            if self.replaced.exists():
                os.rename(self.replaced, self.target)
            raise
        flush(self.target.parent)  # so that a power cut does not bring the old folder back after we said it is saved
        shutil.rmtree(self.replaced, ignore_errors=True)  # the new one is there: a leftover is no failure

    @contextmanager
    def fill(self) -> Iterator[Path]:
        """Give an empty folder to fill, which becomes the target when the block ends well and is removed otherwise."""
        self.prepare()
        try:
            yield self.partial
            self.publish()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove the unfinished folder; the folder that was there before stays."""
        shutil.rmtree(self.partial, ignore_errors=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk, so that the folder around it never appears without it."""
    path.write_bytes(content)
    flush(path)


def require_free(target: Path) -> None:
    """Raise unless a folder can be written without replacing anything: it is absent or empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already and not an empty folder; choose another to write")


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a folder to fill, which appears as `target` when the block ends well; it replaces nothing."""
    target = target.resolve()
    require_free(target)
    with AtomicFolder(target).fill() as partial:
        yield partial


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
        complete = self.complete()
        return complete[-1][1] if complete else None

    def prune(self, keep_last: int, keep_every: int) -> None:
        """Remove all but the last few and, with `keep_every`, the multiples of it. The newest is never removed."""
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
    """Remove a checkpoint. It gets another name first, so that nobody takes a half-removed one for a checkpoint."""
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
    """Return the folder of a checkpoint: `path` itself if it is one, else of a run the one of a step or the newest."""
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

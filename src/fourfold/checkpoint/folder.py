"""Folders that are at every moment absent or whole, and the checkpoints of a run among them.

A folder is written beside its place, as `.NAME.partial`, flushed, and renamed. What a process that died has left
behind is cleared by the next who writes there, and nobody reads it.
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
from fourfold.checkpoint.record import OURS, RECORD

STEP = re.compile(r"step-(\d{8,})")
CHECKPOINTS = "checkpoints"
"""The folder of a run that holds them."""
GIVE = "give the folder of a run, or that of a checkpoint"


@dataclass(frozen=True, slots=True)
class Place:
    """A folder to write, and the two beside it: the one that is being written, the one that gives way."""

    target: Path

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def replaced(self) -> Path:
        return self.target.with_name(f".{self.target.name}.replaced")

    def prepare(self) -> None:
        """Make an empty folder to write in, and clear what a process that died has left."""
        if self.replaced.exists() and not self.target.exists():
            os.rename(self.replaced, self.target)  # it died between the two renames of `publish`
        if self.target.exists():
            self._require_ours()
        for leftover in (self.partial, self.replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        self.partial.mkdir(parents=True)

    def _require_ours(self) -> None:
        """Replacing a folder removes all of it, so it must hold nothing else."""
        if not self.target.is_dir():
            raise FileExistsError(f"{self.target} is a file; choose another folder to write")
        others = sorted(entry.name for entry in self.target.iterdir() if not OURS.fullmatch(entry.name))
        if others:
            raise FileExistsError(
                f"{self.target} would be replaced, but it also holds {', '.join(map(repr, others[:5]))}, "
                "which no save has written; move that away or choose another folder"
            )

    def publish(self) -> None:
        """Put the finished folder in the place of the old one."""
        flush(self.partial)
        if self.target.exists():
            os.rename(self.target, self.replaced)
        try:
            os.rename(self.partial, self.target)
        except OSError:
            if self.replaced.exists():
                os.rename(self.replaced, self.target)
            raise
        flush(self.target.parent)
        shutil.rmtree(self.replaced, ignore_errors=True)  # the new one is there: a leftover is no failure

    @contextmanager
    def filling(self) -> Iterator[Path]:
        """An empty folder to fill, which takes its place when all went well, and else is gone."""
        self.prepare()
        try:
            yield self.partial
            self.publish()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove what is not finished; the folder that was there before stays."""
        shutil.rmtree(self.partial, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The checkpoints of a run, by step: `ROOT/step-00000100`."""

    root: Path

    def path(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def complete(self) -> list[tuple[int, Path]]:
        """Step and folder of every complete one, the newest last."""
        if not self.root.is_dir():
            return []
        found = [(STEP.fullmatch(folder.name), folder) for folder in self.root.iterdir()]
        return sorted((int(match[1]), folder) for match, folder in found if match and (folder / RECORD).is_file())

    def newest(self) -> Path | None:
        complete = self.complete()
        return complete[-1][1] if complete else None

    def prune(self, keep_last: int, keep_every: int) -> list[Path]:
        """Remove all but the last few and, with `keep_every`, those of its multiples; returns what should go.

        The newest is never removed.
        """
        complete = self.complete()
        old = complete[: -max(1, keep_last)]
        gone = [folder for step, folder in old if not (keep_every and step % keep_every == 0)]
        for folder in gone:
            with suppress(OSError):  # what cannot go now is tried again after the next save
                remove(folder)
        return gone

    def clear(self) -> None:
        """Remove what saves and removals that died have left."""
        for folder in self.root.glob(".step-*.*") if self.root.is_dir() else ():
            if folder.suffix in (".partial", ".removed"):
                shutil.rmtree(folder, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint: it disappears by a rename before its files go."""
    removed = folder.with_name(f".{folder.name}.removed")
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def is_checkpoint(path: Path) -> bool:
    """Whether it is the folder of one, whole or not."""
    return path.is_dir() and any(OURS.fullmatch(entry.name) for entry in path.iterdir())


def checkpoints_of(path: Path) -> Checkpoints:
    """Those of a run, given as its folder or as the folder that holds them."""
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder; {GIVE}")
    return Checkpoints(path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path)


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """The folder of a checkpoint: the path itself, or of a run that of a step, or the newest complete one."""
    if is_checkpoint(path):
        if step is not None:
            raise ValueError(f"{path} is one checkpoint; leave --step {step} away, or give the run's folder")
        return path
    complete = dict(checkpoints_of(path).complete())
    if not complete:
        raise FileNotFoundError(f"{path} has no complete checkpoint; {GIVE}")
    if step is not None and step not in complete:
        steps = ", ".join(map(str, complete))
        raise FileNotFoundError(f"{path} has no complete checkpoint of step {step}; it has those of {steps}")
    return complete[max(complete) if step is None else step]

"""Files and folders that appear complete or not at all. Imports no torch.

Both are written under another name beside their place, and renamed: a rename is atomic inside one file system. What a
process that died has left unfinished is never read, and the next process that writes there removes it.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@contextmanager
def name_in_errors(path: Path) -> Iterator[None]:
    """Add the path to the errors of the file system in this block, which lack it for an open file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"cannot write {path} ({error.strerror})") from error


def flush(path: Path) -> None:
    """Write a file or folder through to the disk, so that a rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Files


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path to write to, and rename it to `path` when the block ends; after an error nothing has changed."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with name_in_errors(path):
            yield partial
            os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text)


def write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


# Folders

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Constants of Linux for `renameat2`: paths are relative to the working folder; two entries swap their names."""


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders in one step; return False if this system or file system cannot."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux has it
    return swap is not None and swap(AT_FDCWD, bytes(one), AT_FDCWD, bytes(other), RENAME_EXCHANGE) == 0


@dataclass(frozen=True, slots=True)
class AtomicFolder:
    """A folder to write, and two names beside it: `partial` while it is written, `replaced` for the old one.

    The new folder takes the place of the old one in one step if the file system can exchange two names. Otherwise a
    process may die between two renames, which leaves the old one as `replaced`.
    """

    target: Path
    replaceable: re.Pattern[str] | None = None
    """The names of files that a folder may hold to be replaced; None if only an empty folder may be replaced."""

    @property
    def partial(self) -> Path:
        return self.target.with_name(f".{self.target.name}.partial")

    @property
    def replaced(self) -> Path:
        return self.target.with_name(f".{self.target.name}.replaced")

    @property
    def readable(self) -> Path:
        """The path of the last complete folder: the target, unless a process died between two renames."""
        return self.replaced if self.replaced.exists() and not self.target.exists() else self.target

    def prepare(self) -> None:
        """Make an empty folder to write in, and remove what a process that died has left."""
        if self.readable == self.replaced:
            os.rename(self.replaced, self.target)
        self._require_replaceable()
        for leftover in (self.partial, self.replaced):
            if leftover.exists():
                shutil.rmtree(leftover)
        new = [folder for folder in self.partial.parents if not folder.exists()]
        self.partial.mkdir(parents=True)
        for folder in new:
            flush(folder.parent)  # a power cut must not take a folder in which a complete one lies

    def _require_replaceable(self) -> None:
        """Raise if the target holds other files: replacing a folder removes all of it."""
        if self.replaceable is None:
            require_free(self.target)
        elif self.target.exists():
            if not self.target.is_dir():
                raise FileExistsError(f"{self.target} is a file; choose another folder to write")
            others = sorted(name for name in os.listdir(self.target) if not self.replaceable.fullmatch(name))
            if others:
                raise FileExistsError(
                    f"{self.target} would be replaced, but it also holds {', '.join(map(repr, others[:5]))}, "
                    "which no save has written; move that away or choose another folder"
                )

    def publish(self) -> None:
        """Put the finished folder in the place of the old one."""
        flush(self.partial)  # the names of its files must be on the disk before its own name says that it is complete
        old = self.replaced
        if self.target.exists() and exchange(self.partial, self.target):
            old = self.partial
        else:
            self._rename()
        flush(self.target.parent)  # so that a power cut does not bring the old folder back after we said it is saved
        shutil.rmtree(old, ignore_errors=True)  # the new one is there: a leftover is no failure

    def _rename(self) -> None:
        if self.target.exists():
            os.rename(self.target, self.replaced)  # a rename does not replace a folder that has files
        try:
            os.rename(self.partial, self.target)
        except OSError:
            if self.replaced.exists():
                os.rename(self.replaced, self.target)
            raise

    @contextmanager
    def fill(self) -> Iterator[Path]:
        """Yield an empty folder to fill; it becomes the target when the block ends, and is removed after an error."""
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


def require_free(target: Path) -> None:
    """Raise unless a folder can be written without replacing anything: it is absent or empty."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} is there already and not an empty folder; choose another to write")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file of an unfinished folder and flush it to the disk, so that the folder never appears without it."""
    with name_in_errors(path):
        path.write_bytes(content)
        flush(path)

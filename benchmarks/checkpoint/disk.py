"""The disk that the checkpoint benchmark writes to: its folder, its page cache, its file system."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch(parent: Path, needed: int) -> Iterator[Path]:
    """Yield a temporary folder that is always removed afterwards; SIGTERM is treated like Ctrl-C."""
    parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise SystemExit(
            f"{parent} has {free / 1e9:.1f} GB free, but {needed / 1e9:.1f} GB are needed; choose another --folder"
        )

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    folder = Path(tempfile.mkdtemp(prefix="fourfold-checkpoint-", dir=parent))
    try:
        yield folder
    finally:
        again = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the removal must not be interrupted
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shutil.rmtree(folder, ignore_errors=True)
        signal.signal(signal.SIGINT, again)
        signal.signal(signal.SIGTERM, before)


def file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder, if the system reports it."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return "unknown file system"
    known = [line.split()[1:3] for line in mounts.read_text().splitlines()]
    holding = [(len(place), kind) for place, kind in known if folder.resolve().is_relative_to(place)]
    return max(holding)[1] if holding else "unknown file system"


def nbytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def evict(folder: Path) -> bool:
    """Drop the files of a folder from the page cache, and return whether that worked."""
    gone = True
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                gone = _cached_share(file.fileno()) < 0.01 and gone
    return gone


def _cached_share(descriptor: int) -> float:
    """Return the share of a file's pages that are in memory, or 1 if the system does not report it."""
    pages = -(-os.fstat(descriptor).st_size // mmap.PAGESIZE)
    states = (ctypes.c_ubyte * pages)()
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        refused = ctypes.CDLL(None).mincore(ctypes.byref(first), ctypes.c_size_t(len(mapped)), states)
        del first  # a mapping cannot be closed while something points into it
    return 1.0 if refused else sum(state & 1 for state in states) / pages


def cache(folder: Path) -> None:
    """Read the files of a folder into the page cache."""
    piece = bytearray(16 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.readinto(piece):
                    pass


def remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)

"""Measurements that a rank makes of itself before a run: its device, its node and the run's folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any, TypeVar

import torch

from fourfold import __version__
from fourfold.environment import Environment
from fourfold.planner.calibrate import product
from fourfold.train.launch import cores
from fourfold.train.planning import memory_bytes
from fourfold.watch.checks import Disk, Rank

T = TypeVar("T")

ON_GPU, ON_CPU = (8192, 4096, 4096), (512, 512, 512)
"""m, k, n of the product [m, k] x [k, n] that is timed: large enough to fill a device, and some milliseconds long."""
WINDOWS, WINDOW_SECONDS = 5, 0.2
"""The product runs for this many windows of this many seconds each; the median window counts."""
QUEUED = 16
"""Products that are launched between two waits for a GPU, so that launching costs nothing."""
WRITTEN = 16 << 20
"""Bytes that a rank writes to the run's folder: enough to see a slow disk, and little on any."""
SEEN_SECONDS = 3.0
"""Seconds until a file of another node shows on a network file system; NFS caches a folder for up to 3 s and more."""
HIDDEN = ".preflight-"
"""The names of files that a preflight leaves for a moment begin with this."""
CGROUP = Path("/sys/fs/cgroup")


class Budget:
    """Seconds that a whole sequence of measurements may take."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def left(self, seconds: float) -> float:
        """Return the seconds asked for, or what is left of the budget."""
        return max(0.0, min(seconds, self._until - time.monotonic()))


def within(seconds: float, act: Callable[[], T]) -> T:
    """Return what `act` returns; after this many seconds raise TimeoutError and leave its thread behind.

    A process with such a thread must end by `os._exit`.
    """
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend((True, act()))
        except BaseException as error:  # raised again by the caller's thread
            found.extend((False, error))

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if len(found) < 2:
        raise TimeoutError(f"no end after {seconds:.0f} s")
    done, result = found
    if not done:
        raise result
    return result


def myself(rank: int, device: torch.device) -> Rank:
    """Describe this rank, without measuring anything yet."""
    host = socket.gethostname()
    node = Environment.read().node
    on_gpu = device.type == "cuda"
    found = torch.cuda.get_device_properties(device) if on_gpu else None
    return Rank(
        rank=rank,
        host=host,
        node=f"{host} (node {node})" if node else host,
        versions=versions(on_gpu=on_gpu),
        device="cpu" if found is None else found.name,
        uuid="" if found is None else str(getattr(found, "uuid", f"{host} {device}")),
        cores=cores(),
    )


def versions(*, on_gpu: bool) -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fourfold": f"{__version__} ({sources()})",
    }
    if on_gpu:
        with suppress(OSError):
            found["driver"] = Path("/sys/module/nvidia/version").read_text().strip()
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def sources() -> str:
    """Return a digest of this package's files: nodes may have different states of one version."""
    package, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def product_flops(device: torch.device) -> float:
    """Measure the FLOP/s of a product on the device, now."""
    on_gpu = device.type == "cuda"
    m, k, n = shape = ON_GPU if on_gpu else ON_CPU
    act = product(shape, torch.bfloat16 if on_gpu else torch.float32, device)

    def window(seconds: float) -> float:
        began, runs = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds or not runs:
            for _ in range(QUEUED if on_gpu else 1):
                act()
                runs += 1
            if on_gpu:
                torch.cuda.synchronize(device)
        return 2 * m * k * n * runs / took

    window(WINDOW_SECONDS)  # the first product initialises the libraries
    return median(window(WINDOW_SECONDS) for _ in range(WINDOWS))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or of this node, or of the container that this process is in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = memory_bytes("cpu")
    with suppress(OSError):
        free = 1024 * _figure(Path("/proc/meminfo"), "MemAvailable:")
    with suppress(OSError, ValueError):  # no container, or one without a limit
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text()) - _figure(CGROUP / "memory.stat", "inactive_file")
        free = min(free, max(0, limit - used))
    return free


def _figure(path: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[:1] == [name])


def bytes_of(folder: Path) -> int:
    """Return the bytes of all files in a folder; 0 if there is no such folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True, slots=True)
class FolderMark:
    """A file that rank 0 leaves in the run's folder for the other ranks to see."""

    path: Path
    made: tuple[Path, ...]
    """Folders that did not exist before, the innermost first."""

    @classmethod
    def leave(cls, folder: Path, name: str) -> FolderMark:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        mark = cls(folder / f"{HIDDEN}{name}", tuple(made))
        mark.path.touch()
        return mark

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        for folder in self.made:
            with suppress(OSError):  # somebody else uses the folder by now
                folder.rmdir()


def look_at(mark: Path, rank: int) -> Disk:
    """Look at the folder of rank 0's mark from this rank: whether the mark is there, and how long a write takes."""
    until = time.monotonic() + SEEN_SECONDS
    while not (seen := mark.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    if not seen:
        return Disk(seen=False)
    folder = mark.parent
    mine, content = folder / f"{mark.name}-{rank:05d}", os.urandom(WRITTEN)
    try:
        began = time.perf_counter()
        with mine.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        seconds = time.perf_counter() - began
        mine.unlink()
    except OSError as error:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
        return Disk(seen=True, fault=error.strerror or str(error), mode=folder.stat().st_mode)
    return Disk(
        seen=True,
        mode=folder.stat().st_mode,
        free=shutil.disk_usage(folder).free,
        nbytes=WRITTEN,
        seconds=seconds,
    )

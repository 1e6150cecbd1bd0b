"""The measurements of `fourfold doctor --preflight`: of a rank's device, node, folder, clock and links."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from threading import Thread
from typing import TypeVar

import torch

from fourfold import __version__, comm
from fourfold.environment import Environment
from fourfold.grid import Grid
from fourfold.job import Channel
from fourfold.planner.calibrate import PRODUCTS_OF_ACT, products
from fourfold.train.launch import cores
from fourfold.train.planning import memory_bytes
from fourfold.watch.checks import Disk, MeasuredLink, Rank

T = TypeVar("T")

MEET_SECONDS = 7.0
"""Seconds that a rank waits for other ranks that are measuring."""
GPU_PRODUCT, CPU_PRODUCT = (8192, 4096, 4096), (512, 512, 512)
"""m, k, n of the timed product [m, k] x [k, n]: large enough to fill the device, and a few milliseconds long."""
WINDOWS, WINDOW_SECONDS = 5, 0.2
"""The product runs for this many windows of this many seconds each; the median window counts."""
QUEUED = 16
"""Products launched between two waits for a GPU, so that the GPU never waits for a launch."""
WRITTEN = 16 << 20
"""Bytes that a rank writes to the run's folder: enough to notice a slow disk, and little for any disk."""
SEEN_SECONDS = 3.0
"""Seconds until a file of another node appears on a network file system; NFS caches a folder for about 3 s."""
HIDDEN = ".preflight-"
"""The beginning of the names of files that a preflight writes and removes again."""
CGROUP = Path("/sys/fs/cgroup")
TRIPS = 8
"""How often a rank asks rank 0 for its time; the fastest answer has the smallest error."""
LINK_SECONDS, LINK_WINDOW = 6.0, 0.4
"""Seconds that two ranks have to answer each other, and seconds for which they then exchange messages."""
MESSAGE = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes of the message that times a link: large enough that the bandwidth and not the latency counts."""
OPENED = inf
"""Stands for the rate of a group that has opened its connections; nothing was timed yet."""


class Budget:
    """The seconds that a whole sequence of measurements may take."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def left(self, seconds: float = inf) -> float:
        """Return this many seconds, or what is left of the budget if that is less."""
        return max(0.0, min(seconds, self._until - time.monotonic()))


def within(seconds: float, act: Callable[[], T]) -> T:
    """Return what `act` returns; after this many seconds raise TimeoutError and leave its thread behind.

    A process with such a thread must end by `os._exit`.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(act())
        except BaseException as error:  # raised again in the caller's thread
            found.set_exception(error)

    # not an executor: Python joins its threads at exit, and this one may hang for ever
    Thread(target=run, daemon=True).start()
    try:
        return found.result(seconds)
    except TimeoutError:
        if found.done():  # `act` itself has raised it
            raise
        raise TimeoutError(f"no end after {seconds:.0f} s") from None


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
    """Return the versions of the software that must agree between nodes."""
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
    """Return a digest of this package's files, because nodes may have different files under one version number."""
    package, digest = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def product_flops(device: torch.device) -> float:
    """Measure the FLOP/s of a matrix product on the device."""
    on_gpu = device.type == "cuda"
    m, k, n = shape = GPU_PRODUCT if on_gpu else CPU_PRODUCT
    act = products(shape, torch.bfloat16 if on_gpu else torch.float32, device)

    def window(seconds: float) -> float:
        began, runs = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds or not runs:
            for _ in range(QUEUED if on_gpu else 1):
                act()
                runs += 1
            if on_gpu:
                torch.cuda.synchronize(device)  # a launch returns before its product has run
        return PRODUCTS_OF_ACT * 2 * m * k * n * runs / took

    window(WINDOW_SECONDS)  # not counted: the first product initialises the libraries
    return median(window(WINDOW_SECONDS) for _ in range(WINDOWS))


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or of this node, or of the container that this process is in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = memory_bytes("cpu")
    with suppress(OSError):
        free = 1024 * _figure(Path("/proc/meminfo"), "MemAvailable:")
    with suppress(OSError, ValueError):  # there is no container, or it has no limit
        limit = int((CGROUP / "memory.max").read_text())
        # the kernel frees cached files that are not in use before it runs out of memory
        used = int((CGROUP / "memory.current").read_text()) - _figure(CGROUP / "memory.stat", "inactive_file")
        free = min(free, max(0, limit - used))
    return free


def _figure(path: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[:1] == [name])


@dataclass(frozen=True, slots=True)
class FolderMark:
    """A file that rank 0 leaves in the run's folder for the other ranks to see."""

    path: Path
    made: tuple[Path, ...]
    """Folders that did not exist before, the innermost first."""

    @classmethod
    def leave(cls, folder: Path, name: str) -> FolderMark:
        """Write the mark, and make the folder if it does not exist yet."""
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        mark = cls(folder / f"{HIDDEN}{name}", tuple(made))
        mark.path.touch()
        return mark

    def remove(self) -> None:
        """Remove the mark, and the folders that were made for it."""
        self.path.unlink(missing_ok=True)
        for folder in self.made:
            with suppress(OSError):  # somebody else has put files into the folder meanwhile
                folder.rmdir()


def look_at(mark: Path, rank: int) -> Disk:
    """Look at the folder of rank 0's mark from this rank: whether the mark is there, and how long a write takes."""
    until = time.monotonic() + SEEN_SECONDS
    while not (seen := mark.exists()) and time.monotonic() < until:
        time.sleep(0.1)
    if not seen:
        return Disk(seen=False)
    folder = mark.parent
    mine, content = folder / f"{mark.name}-{rank:05d}", os.urandom(WRITTEN)  # random: a disk may compress zeros
    try:
        began = time.perf_counter()
        with mine.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise only the page cache is timed
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


def ask_clock(channel: Channel, seconds: float) -> tuple[float, float] | None:
    """Return the seconds by which this clock is ahead of rank 0's, and the uncertainty of that.

    The shortest of several round trips counts; the uncertainty is half of it.
    """
    trips = []
    with suppress(TimeoutError):
        for trip in range(TRIPS):
            began = time.time()
            channel.put(f"clock/{trip}", "")
            theirs = float(channel.get(f"clock/{trip}/{channel.rank}", seconds=seconds))
            ended = time.time()
            trips.append((ended - began, (began + ended) / 2 - theirs))
    if not trips:
        return None
    took, ahead = min(trips)
    return ahead, took / 2


def pairs_of(ranks: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the links of a ring in rounds, as pairs of positions; in a round every position has at most one link."""
    # two ranks have one link, not one in each direction
    ring = [(position, (position + 1) % ranks) for position in range(ranks if ranks > 2 else ranks - 1)]
    # in a ring of an odd number, the link that closes it shares a position with both other rounds
    last = ring.pop() if ranks % 2 and ranks > 1 else None
    yield from (pairs for pairs in (ring[::2], ring[1::2], [last] if last else []) if pairs)


class LinkTimer:
    """Times the links of every axis; all groups of an axis are timed at once, as they are used at once in training.

    It stops at the first link that does not answer, because the ranks that wait for it cannot measure any other.
    """

    def __init__(self, channel: Channel, budget: Budget, grid: Grid) -> None:
        self.channel, self.budget, self.grid = channel, budget, grid
        self.message = torch.zeros(MESSAGE[grid.device.type] // 4, device=grid.device)  # fp32 has 4 bytes
        self.broken = False
        self.lost: list[int] = []

    def measure(self) -> list[MeasuredLink]:
        """Time all links; return them on rank 0."""
        found: list[MeasuredLink] = []
        for name, mine, act in self._rounds():
            if self.broken:
                break
            found += self._round(name, mine, act)
        return [link for link in found if link.rate != OPENED]

    def _rounds(self) -> Iterator[tuple[str, MeasuredLink | None, Callable[[], float]]]:
        """Yield for each round the link of this rank, if it has one, and the function that times it."""
        for axis in self.grid.shape.used_axes:
            group, position = self.grid.shape.ranks_along(axis, self.grid.rank), self.grid.coords[axis]
            yield f"{axis}/open", MeasuredLink(axis, tuple(group), None), partial(self._open, axis)
            for number, pairs in enumerate(pairs_of(len(group))):
                mine, act = None, lambda: OPENED
                for first, second in pairs:
                    if position in (first, second):
                        mine = MeasuredLink(axis, (group[first], group[second]), None)
                        act = partial(self._rate, axis, first + second - position, position == first)
                yield f"{axis}/{number}", mine, act

    def _round(self, name: str, mine: MeasuredLink | None, act: Callable[[], float]) -> list[MeasuredLink]:
        """Run a round; return the links of all ranks. A link counts as answered if both of its ends measured it."""
        own = []
        if mine is not None:
            try:
                own = [replace(mine, rate=within(self.budget.left(LINK_SECONDS), act))]
            except Exception:  # any error of the backend, or TimeoutError: the link did not answer
                own = [mine]
        text, left = json.dumps([asdict(link) for link in own]), self.budget.left
        texts = self.channel.gather(f"links/{name}", text, left(MEET_SECONDS), partial=True)
        found: dict[tuple[int, ...], MeasuredLink] = {}
        for one in (one for text in texts.values() for one in json.loads(text)):
            link = MeasuredLink(one["axis"], tuple(one["ranks"]), one["rate"])
            rates = [end.rate for end in (link, found.get(link.ranks, link))]  # of both ends; the slower one counts
            found[link.ranks] = replace(link, rate=None if None in rates else min(rate for rate in rates if rate))
        if self.channel.leads:
            # one rank decides for all whether to continue; otherwise some would wait for a round that others skip
            self.lost = [rank for rank in self.channel.ranks if rank not in texts]
            broken = self.lost or any(link.rate is None for link in found.values())
            self.channel.put(f"links/{name}/broken", str(int(bool(broken))))
        self.broken = self.channel.get(f"links/{name}/broken", seconds=left()) == "1"
        return list(found.values())

    def _open(self, axis: str) -> float:
        """Gather along the axis, which opens the connections of the group."""
        self._synchronize()
        comm.all_gather(self.message[:1], self.grid, axis, label="preflight").wait()
        self._synchronize()
        return OPENED

    def _rate(self, axis: str, other: int, leads: bool) -> float:
        """Return bytes per second in each direction; the first message waits for the other rank and does not count."""
        self._synchronize()
        until, seconds, go_on = time.monotonic() + LINK_WINDOW, [], True
        while go_on:
            # the leading rank decides for both when to stop, and sends its decision in the message
            self.message[0] = float(time.monotonic() < until)
            self._synchronize()
            began = time.perf_counter()
            arrived = comm.exchange(self.message, self.grid, axis, other)
            self._synchronize()
            seconds.append(time.perf_counter() - began)
            go_on = bool((self.message if leads else arrived)[0])
        return self.message.nbytes / median(seconds[1:] or seconds)

    def _synchronize(self) -> None:
        if self.grid.device.type == "cuda":
            torch.cuda.set_device(self.grid.device)  # every thread has its own current device
            torch.cuda.synchronize(self.grid.device)

"""What a step took: seconds, bytes per axis, seconds of exposed communication, memory, MFU and HFU.

    MFU = model FLOPs per token * tokens/s / (ranks * peak FLOP/s of a device)
    HFU = the same with the FLOPs that recompute runs again

On a GPU nothing here makes the host wait: a step is marked by events, and read once the next one is under way.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fourfold.grid import Grid
from fourfold.planner.flops import PEAK_FLOPS, Flops

Timestamp = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """A step as rank 0 saw it."""

    seconds: float
    wire_bytes: dict[str, int]
    exposed_seconds: dict[str, float]
    peak_memory_bytes: int


class Meter:
    """Marks the ends of steps; `end` gives what to call for the reading once the step's work is done."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.on_gpu = grid.device.type == "cuda"
        if self.on_gpu:
            grid.ledger.time_stalls()
        self.begin()

    def begin(self) -> None:
        """The next step begins here; what ran since the last one is not counted."""
        self._began = self._mark()
        self._sent = Counter(self.grid.ledger.wire_bytes)
        self.grid.ledger.take_exposed()

    def end(self) -> Callable[[], StepMetrics]:
        began, ended = self._began, self._mark()
        sent = Counter(self.grid.ledger.wire_bytes)
        wire_bytes = {axis: sent[axis] - self._sent[axis] for axis in sent if sent[axis] > self._sent[axis]}
        exposed = self.grid.ledger.take_exposed()
        self._began, self._sent = ended, sent
        return lambda: StepMetrics(_between(began, ended), wire_bytes, exposed(), self.peak_memory_bytes())

    def peak_memory_bytes(self) -> int:
        """The most that this rank has held since the start: the process on the CPU, tensors on a GPU."""
        if self.on_gpu:
            return torch.cuda.max_memory_allocated(self.grid.device)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024

    def _mark(self) -> Timestamp:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(began: Timestamp, ended: Timestamp) -> float:
    if isinstance(began, torch.cuda.Event):
        return began.elapsed_time(ended) / 1e3  # type: ignore[arg-type]
    return ended - began  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class PeakFlops:
    """FLOP/s that a device could do, and where the figure comes from; 0 where nobody knows."""

    flops: float
    origin: str

    def utilization(self, flops: Flops, tokens_per_second: float, ranks: int) -> tuple[float | None, float | None]:
        """MFU and HFU."""
        if not self.flops:
            return None, None
        rate = tokens_per_second / (ranks * self.flops)
        return flops.model * rate, flops.hardware * rate


def peak_of(grid: Grid, dtype: torch.dtype, given: float | None) -> PeakFlops:
    """What is given, else the data sheet's for bf16 on a GPU that it knows, else the best product measured now.

    Every rank measures at the same time, so that ranks that share cores share the peak too.
    """
    if given is not None:
        return PeakFlops(given, "log.peak_flops")
    if grid.device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(grid.device)
        if name in PEAK_FLOPS:
            return PeakFlops(PEAK_FLOPS[name], f"data sheet of {name}, dense bf16")
    size = 8192 if grid.device.type == "cuda" else 512
    return PeakFlops(_measure(size, dtype, grid.device), f"best of {size} x {size} products measured at the start")


def _measure(size: int, dtype: torch.dtype, device: torch.device, seconds: float = 0.2) -> float:
    a = torch.ones(size, size, dtype=dtype, device=device)
    torch.mm(a, a).sum().item()  # the first product also starts the library
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best

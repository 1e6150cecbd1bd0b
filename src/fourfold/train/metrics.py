"""The metrics of a step: seconds, bytes per axis, seconds of exposed communication, memory, MFU and HFU.

    MFU = model FLOPs per token * tokens/s / (ranks * peak FLOP/s of a device)
    HFU = the same, including the FLOPs of recompute

On a GPU nothing here makes the host wait: CUDA events mark the ends of a step, and the host reads them after it has
launched the next step.
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
from fourfold.planner.machine import PEAK_FLOPS
from fourfold.planner.transformer import Flops

Timestamp = float | torch.cuda.Event


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The metrics of one step on this rank."""

    seconds: float
    wire_bytes: dict[str, int]
    exposed_seconds: dict[str, float]
    peak_memory_bytes: int


class Meter:
    """Measures steps. `end` returns a function that gives the metrics once the device has finished the step."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.on_gpu = grid.device.type == "cuda"
        if self.on_gpu:
            grid.ledger.time_stalls()
        self.begin()

    def begin(self) -> None:
        """Start the next step here, so that work since the end of the last step is not counted."""
        self._began = self._mark()
        self._sent = Counter(self.grid.ledger.wire_bytes)
        self.grid.ledger.take_exposed()

    def end(self) -> Callable[[], StepMetrics]:
        """End the step, start the next one, and return the function that reads the metrics of the ended step."""
        began, ended = self._began, self._mark()
        sent = Counter(self.grid.ledger.wire_bytes)
        wire_bytes = {axis: sent[axis] - self._sent[axis] for axis in sent if sent[axis] > self._sent[axis]}
        exposed = self.grid.ledger.take_exposed()
        self._began, self._sent = ended, sent
        return lambda: StepMetrics(_between(began, ended), wire_bytes, exposed(), self.peak_memory_bytes())

    def peak_memory_bytes(self) -> int:
        """Return the peak memory since the start: of the process on the CPU, of tensors on a GPU."""
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
    """The peak FLOP/s of a device, or 0 if unknown, and the origin of the figure."""

    flops: float
    origin: str

    def utilization(self, flops: Flops, tokens_per_second: float, ranks: int) -> tuple[float | None, float | None]:
        """Return MFU and HFU, or None if the peak is unknown."""
        if not self.flops:
            return None, None
        rate = tokens_per_second / (ranks * self.flops)
        return flops.model * rate, flops.hardware * rate


def peak_of(grid: Grid, dtype: torch.dtype, given: float | None) -> PeakFlops:
    """Return the given peak, else the one of the GPU's data sheet for bf16, else the fastest matrix product measured
    now.

    Every rank measures at the same time, so that ranks that share cores also share the peak.
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
    torch.mm(a, a).sum().item()  # the first product also initialises the library
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best

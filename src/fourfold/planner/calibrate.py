"""Measures the machine that it runs on: links, products, attention, memory; the result is a `Machine`.

Collectives go through `comm`, so that what is measured is what training does. All groups of an axis are active at
once, and the slowest rank's time counts. Every decision that changes what is launched is made from times that all
ranks have agreed on, or they would wait for each other for ever.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from statistics import median
from typing import get_args

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fourfold import comm
from fourfold.comm import Pending
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective, Op
from fourfold.models import ModelConfig, build
from fourfold.planner.fit import (
    HIDDEN,
    HIDDEN_ROWS,
    SMALL,
    SMALL_ROWS,
    Computation,
    Group,
    Measured,
    Message,
    machine_of,
)
from fourfold.planner.flops import PEAK_FLOPS
from fourfold.planner.machine import DTYPES, Machine, Timed

Launch = Callable[[], Pending[Tensor]]

OPS: tuple[Op, ...] = get_args(Op)
MESSAGES = tuple(1 << power for power in (12, 16, 18, 20, 22, 24, 26))
"""Bytes: 4 KiB to 64 MiB."""
LEAST_LARGEST = 1 << 20
"""Is measured however long it takes: of smaller ones the launch takes the most, and noise would pass for bandwidth."""
BESIDE = (1 << 20, 1 << 22)
"""Bytes of the messages that products run beside on the CPU, as weights and activations have them; on a GPU it is the
largest."""
PART, ROUNDS = 0.7, 5
"""Of a message's time that these products take, so that it is in flight all the while; and how often."""
HIDDEN_STEPS = 3
"""Timed after two others: the first records in which order weights are gathered ahead."""
LINKS_SHARE = 0.6
"""Of the time; the rest is computation's."""
ON_GPU = (
    (4096, 4096, 4096), (8192, 256, 4096), (1024, 8192, 1024),
    *((size, size, size) for size in (1024, 2048, 8192)),
    *((8192, 4096, n) for n in (512, 1024, 2048, 12288, 16384)),
    *((8192, k, 4096) for k in (128, 512, 1024, 2048, 16384)),
    *((m, 4096, 4096) for m in (256, 512, 1024, 2048, 16384)),
    (512, 16384, 4096), (4096, 12288, 1536), (4096, 1536, 12288),
)  # fmt: skip
ON_CPU = (
    (512, 512, 512), (512, 32, 256), (128, 256, 256),
    *((size, size, size) for size in (64, 128, 256, 1024)),
    *((512, 256, n) for n in (32, 64, 1024)),
    *((512, k, 256) for k in (16, 64, 1024)),
    *((m, 256, 256) for m in (32, 2048)),
)  # fmt: skip
"""Products [m, k] x [k, n] as layers have them, whole and cut: square, and skinny in each dim. The first ones are
always measured, the others while there is time."""
ALWAYS = 3
BATCH_SECONDS = 2e-3
"""Of acts on a GPU that are timed together."""
WINDOWS, LEAST_WINDOW = 3, 0.15
"""On the CPU, and the seconds of each at the least."""


def groups_of(ranks: int) -> list[Group]:
    """Every (stride, size) of groups that tile this many ranks."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [(stride, size) for stride in divisors for size in divisors if size > 1 and ranks % (stride * size) == 0]


class Calibration:
    """Measures on all ranks of `line`, a grid along data alone, for about `seconds`."""

    def __init__(
        self,
        line: Grid,
        devices_per_node: int,
        seconds: float,
        *,
        settle: Callable[[], None],
        progress: Callable[[float], None],
    ) -> None:
        self.line, self.devices, self.settle, self.progress = line, devices_per_node, settle, progress
        self.world = line.shape.world
        self.on_gpu = line.device.type == "cuda"
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float32
        self.groups = groups_of(devices_per_node)
        if self.world > devices_per_node:
            self.groups.append((devices_per_node, self.world // devices_per_node))
        self.shapes = [(shape, self.dtype) for shape in (ON_GPU if self.on_gpu else ON_CPU)]
        self.shapes += [(shape, torch.float32 if self.on_gpu else torch.float64) for shape in self.few]
        began = time.perf_counter()
        self.until = began + seconds
        self.links_until = began + (LINKS_SHARE * seconds if self.groups else 0.0)
        self.runs_left = len(self.groups) * len(OPS)
        self.held = self.held_bytes()
        self.steps, self.done = len(self.groups) * len(OPS) + len(self.shapes) + 5 + self.hides, 0

    @property
    def hides(self) -> bool:
        """Whether messages wait for what computes."""
        return bool(self.groups) and not self.on_gpu

    @property
    def few(self) -> Sequence[tuple[int, int, int]]:
        """For the dtype that is seldom used."""
        return [(4096, 4096, 4096), (8192, 1024, 4096)] if self.on_gpu else [(128, 128, 128), (256, 64, 256)]

    def measure(self, name: str) -> Machine:
        messages = [message for shape, axes in self._grids() for message in self._messages(shape, axes)]
        contention = self._contention(messages)
        computation = self._computation()
        hidden = self._hidden() if self.hides else None
        device, memory = self._device()
        ranks = f"{self.world} rank{'s' if self.world > 1 else ''}"
        found = Measured(
            device=device,
            devices_per_node=self.devices,
            memory=memory,
            held=round(self._agree(self.held)),
            advertised={"bf16": PEAK_FLOPS[device]} if device in PEAK_FLOPS else {},
            messages=messages,
            computation=computation,
            contention=contention,
            hidden=hidden,
            ranks=self.world,
        )
        where = device if self.on_gpu else f"{os.cpu_count()} cores ({platform.machine()})"
        source = f"measured by fourfold calibrate, {date.today()}, {ranks}, torch {torch.__version__}, {where}"
        return machine_of(name, f"{ranks}, {self.devices} a node, on {where}", found, source)

    def _device(self) -> tuple[str, int]:
        """torch's name of the device, and its memory; a rank on the CPU has its part of the machine's."""
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.line.device)
            return properties.name, properties.total_memory
        return "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // self.devices

    # links

    def _grids(self) -> Iterator[tuple[Shape, dict[str, Group]]]:
        """Grids that have each group along one of their axes, and which."""
        left = list(self.groups)
        while left:
            stride, size = left[0]
            shape = Shape(x=stride, z=size, data=self.world // (stride * size))
            strides = {"x": 1, "z": stride, "data": stride * size}
            axes = {axis: (strides[axis], shape.sizes[axis]) for axis in strides}
            yield shape, {axis: group for axis, group in axes.items() if group in left}
            left = [group for group in left if group not in axes.values()]

    def _messages(self, shape: Shape, axes: dict[str, Group]) -> Iterator[Message]:
        grid = Grid(x=shape.x, z=shape.z, data=shape.data, device=self.line.device)
        self.settle()
        for axis, group in axes.items():
            for op in OPS:
                slot = self._left(self.links_until) / self.runs_left / len(MESSAGES)
                for nbytes in MESSAGES:
                    record, launch = collective(op, axis, nbytes, grid, self.dtype)
                    launch().wait()  # the first also makes the connections
                    seconds = self._repeat(launch, slot)
                    yield Message(group, record, seconds)
                    if nbytes >= LEAST_LARGEST and 4 * 4 * seconds > 3 * slot:
                        break  # the next is four times as long, and runs four times
                self.runs_left -= 1
                self._advance()
        if self.on_gpu:
            self.held = max(self.held, self.held_bytes())  # with the buffers of communicators
        grid.close()

    def _repeat(self, launch: Launch, seconds: float) -> float:
        """The slowest rank's best average."""

        def arrive() -> None:
            launch().wait()

        best = self._agreed_time(arrive, 1)
        runs = max(1, min(50, int(seconds / 2 / best)))
        return min(best, *(self._agreed_time(arrive, runs) for _ in range(2)))

    def _agreed_time(self, act: Callable[[], object], runs: int) -> float:
        """The slowest rank's average."""
        self._agree(0.0)  # begin together
        began = time.perf_counter()
        for _ in range(runs):
            act()
        self._finish()
        return self._agree((time.perf_counter() - began) / runs)

    def _agree(self, seconds: float) -> float:
        """The largest of all ranks' numbers, once all of them have come here."""
        mine = torch.tensor([seconds], dtype=torch.float64, device=self.line.device)
        return float(comm.all_gather(mine, self.line, "data").wait().max())

    def _left(self, until: float) -> float:
        """Seconds, agreed on; never below 0."""
        return max(0.0, -self._agree(time.perf_counter() - until))

    def _contention(self, messages: Sequence[Message]) -> float:
        """Seconds of products that run on all ranks beside messages around all of them, over those alone."""
        products = computed = 0.0
        if messages:
            act = product((128, 128, 128) if not self.on_gpu else (2048, 2048, 2048), self.dtype, self.line.device)
            alone = self._agree(self.average_seconds(act, self._left(self.until) / self.steps))
            largest = max(message.record.nbytes for message in messages)
            sizes = {largest} if self.on_gpu else {min(largest, nbytes) for nbytes in BESIDE}
            for nbytes, op in itertools.product(sorted(sizes), OPS[:2]):
                _, launch = collective(op, "data", nbytes, self.line, self.dtype)
                launch().wait()
                flight = self._agreed_time(lambda launch=launch: launch().wait(), ROUNDS)
                runs = max(1, int(PART * flight / alone))
                products += runs * alone
                computed += self._agreed_beside(launch, act, runs)
        self._advance()
        return computed / products if products else 1.0

    def _agreed_beside(self, launch: Launch, act: Callable[[], object], runs: int) -> float:
        """Seconds of so many acts beside a collective, on average of the rounds."""
        self._agree(0.0)
        computing = 0.0
        for _ in range(ROUNDS):
            began = time.perf_counter()
            pending = launch()
            for _ in range(runs):
                act()
            if self.on_gpu:
                torch.cuda.current_stream(self.line.device).synchronize()
            computing += time.perf_counter() - began
            pending.wait()
            self._finish()
        return self._agree(computing / ROUNDS)

    def _hidden(self) -> float:
        """Of a step on z = all ranks, the slowest rank's, the median of some."""
        grid = Grid(z=self.world, device=self.line.device)
        run = step_of(HIDDEN, HIDDEN_ROWS, grid, self.dtype)
        self.settle()
        for _ in range(2):
            run()
        seconds = [self._agreed_time(run, 1) for _ in range(HIDDEN_STEPS)]
        grid.close()
        self._advance()
        return median(seconds)

    # computation: every rank by itself, all at the same time

    def _computation(self) -> Computation:
        timed, slot = [], 0.0
        for index, ((m, k, n), dtype) in enumerate(self.shapes):
            left = self._left(self.until)
            if not left and index >= ALWAYS:
                self.done += len(self.shapes) - index
                break
            slot = left / (len(self.shapes) - index + 3)
            seconds = self._slowest(product((m, k, n), dtype, self.line.device), slot)
            timed.append(Timed(m, k, n, DTYPES[dtype], seconds))
        flops, attend = attention(self.line.device, self.dtype)
        rate = flops / self._slowest(attend, slot)
        a = torch.ones((256 if self.on_gpu else 16) << 18, device=self.line.device)
        b, out = a.clone(), a.clone()
        moved = 3 * a.nbytes / self._slowest(lambda: torch.add(a, b, out=out), slot)
        few = torch.ones(16, device=self.line.device)
        kernel = self._slowest(lambda: few.add_(1), slot)
        step = self._slowest(step_of(SMALL, SMALL_ROWS, Grid.alone(self.line.device), self.dtype), slot)
        return Computation(tuple(timed), rate, moved, kernel, step)

    def _slowest(self, act: Callable[[], object], seconds: float) -> float:
        found = self._agree(self.average_seconds(act, seconds))
        self._advance()
        return found

    def average_seconds(self, act: Callable[[], object], seconds: float) -> float:
        """Of one act while all ranks act, within about these seconds: the best average of batches on a GPU.

        On the CPU ranks may share cores and take turns. The best would be that of a rank that had a core to itself for
        a moment, so it is the median of windows that all ranks begin together, each long enough for many turns.
        """
        act()
        self._finish()
        if not self.on_gpu:
            window = max(seconds / WINDOWS, LEAST_WINDOW)
            return median(self._window(act, window) for _ in range(WINDOWS))
        until, best, runs = time.perf_counter() + seconds, math.inf, 1
        while True:
            took = self._batch(act, runs)
            best = min(best, took / runs)
            if took < BATCH_SECONDS:
                runs = max(runs + 1, min(8 * runs, int(1.2 * BATCH_SECONDS / best)))
            elif time.perf_counter() + took > until:
                return best

    def _batch(self, act: Callable[[], object], runs: int) -> float:
        began = time.perf_counter()
        for _ in range(runs):
            act()
        self._finish()
        return time.perf_counter() - began

    def _window(self, act: Callable[[], object], seconds: float) -> float:
        self._agree(0.0)
        began, runs = time.perf_counter(), 0
        while (took := time.perf_counter() - began) < seconds or not runs:
            act()
            runs += 1
        return took / runs

    def _finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.line.device)

    def held_bytes(self) -> int:
        """What is taken beside tensors: of a GPU's memory now, on the CPU by the most that this process has had."""
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info(self.line.device)
            return total - free - torch.cuda.memory_reserved(self.line.device)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024

    def _advance(self) -> None:
        self.done += 1
        self.progress(self.done / self.steps)


def collective(op: Op, axis: str, nbytes: int, grid: Grid, dtype: torch.dtype) -> tuple[Collective, Launch]:
    """The record of a collective of about these bytes, and what launches it."""
    ranks = grid.size(axis)
    elements = max(1, nbytes // dtype.itemsize // ranks) * ranks
    record = Collective(op, axis, elements * dtype.itemsize, ranks, "calibrate")
    whole = torch.zeros(elements, dtype=dtype, device=grid.device)
    if op == "all_gather":
        return record, lambda: comm.all_gather(whole[: elements // ranks], grid, axis, label="calibrate")
    if op == "reduce_scatter":
        return record, lambda: comm.reduce_scatter(whole, grid, axis, label="calibrate")
    return record, lambda: comm.all_reduce(whole, grid, axis, label="calibrate", owned=True)


def product(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], Tensor]:
    m, k, n = shape
    a, w = (
        torch.randn(m, k, dtype=dtype, device=device),
        torch.randn(n, k, dtype=dtype, device=device),
    )  # ones are faster
    return lambda: F.linear(a, w)


def step_of(config: ModelConfig, rows: int, grid: Grid, dtype: torch.dtype) -> Callable[[], None]:
    """Forward and backward of a model on so many rows a rank."""
    model = build(config, grid, dtype=dtype)
    tokens = torch.zeros(rows, config.seq, dtype=torch.long, device=grid.device)

    def run() -> None:
        model(tokens, tokens).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return run


def attention(device: torch.device, dtype: torch.dtype) -> tuple[float, Callable[[], None]]:
    """FLOPs of causal attention forward and backward, and what runs it."""
    rows, heads, seq, width = (4, 16, 2048, 128) if device.type == "cuda" else (1, 4, 512, 64)
    q, k, v = (torch.randn(rows, heads, seq, width, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    return 3 * 2 * rows * heads * seq * seq * width, run

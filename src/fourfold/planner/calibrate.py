"""Calibration: measure this machine: links, products, attention, memory, the host.

Collectives go through `comm`, so that the measured path is the one of training. All groups of an axis are active at
once, and the slowest rank's time counts. Every decision that changes what is launched uses times that all ranks have
agreed on; otherwise ranks would launch different collectives and wait for each other for ever.

What the measurements say is up to fit.py.
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
from dataclasses import replace
from datetime import date
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.profiler import record_function

from fourfold import comm
from fourfold.comm import Pending
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective, Op
from fourfold.models import ModelConfig, build
from fourfold.optim import AdamW
from fourfold.planner.fit import (
    BLOCK_ROWS,
    BLOCKS,
    HIDDEN,
    HIDDEN_ROWS,
    MOST_SHARING,
    SMALL,
    SMALL_LAYERS,
    SMALL_ROWS,
    Computation,
    GroupShape,
    Measured,
    Message,
    TimedBlocks,
    TimedStep,
    machine_of,
)
from fourfold.planner.machine import (
    DTYPES,
    HOST_MODES,
    KERNEL_MODES,
    PEAK_FLOPS,
    HostMode,
    KernelMode,
    Machine,
    Timed,
)
from fourfold.planner.step_parts import (
    PRODUCTS,
    STEP,
    device_parts,
    events_of,
    host_parts,
    new_profiler,
)
from fourfold.policy import Policy

LaunchCall = Callable[[], Pending[Tensor]]

COLLECTIVES: tuple[Op, ...] = ("all_gather", "reduce_scatter", "all_reduce")
"""The operations that are timed. Messages between stages of a pipeline take the same links."""
MESSAGES = tuple(1 << power for power in (12, 16, 18, 20, 22, 24, 26))
"""Bytes of the measured messages: 4 KiB to 64 MiB."""
LEAST_LARGEST = 1 << 20
"""Bytes up to which messages are always measured: the launch dominates smaller ones, and noise would look like
bandwidth."""
BESIDE = (1 << 20, 1 << 22)
"""Bytes of the messages that run during products, typical of weights and activations on the CPU. On a GPU they show for
how long messages wait for their turn; how much slower products are is measured during the largest message there."""
BEGUN = 8
"""Products that are queued before the messages that are to wait for their turn, beside those that last as long."""
PART = 0.7
"""The products fill this share of a message's time, so that the message is in flight throughout."""
ROUNDS = 5
"""Repetitions of such a message; their average counts."""
COPIED_NBYTES = 256 << 20
"""Bytes of the copies between a GPU and its host: about those of a block's input."""
HIDDEN_STEPS = 3
"""Timed steps of the model `HIDDEN`, after two untimed ones: the first records the order of the prefetch."""
LINKS_SHARE = 0.6
"""The share of the time for links; the rest is for computation."""
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
"""Products [m, k] x [k, n] as layers have them, whole and sharded: square, and skinny in each dim."""
ALWAYS = 3
"""This many products are always measured, the others while time is left."""
HEAT_SECONDS, HEAT_SHARE, HEAT_RUNS = 30.0, 0.5, 10
"""A GPU computes for half a minute before products are timed, or for this share of the time of a short calibration, in
batches of so many products: at its power limit its clocks fall, by a tenth or more."""
BATCH_SECONDS = 2e-3
"""Seconds of GPU work that are timed together, so that the timer's resolution does not matter."""
WINDOWS = 3
"""The number of windows in which work is timed on the CPU."""
LEAST_WINDOW = 0.15
"""The least seconds of a window: long enough for ranks that share a core to take many turns."""


COMPILE_SECONDS = 30.0
"""Compiled steps are timed if the calibration takes at least this many seconds: compiling alone takes about as long."""
HOT_AGAIN = 1.0
"""Seconds of blocks before those that count in a trace: a GPU cools down while a profiler starts."""
TRACED_BLOCKS = 3
"""How often the blocks run where they count in a trace."""
BLOCK_SHARE = 0.15
"""The share of the time for blocks in each mode. They come before products, which so are timed on a device that is as
hot as in training."""


def groups_of(ranks: int) -> list[GroupShape]:
    """Return every (stride, size) of groups that tile this many ranks."""
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [(stride, size) for stride in divisors for size in divisors if size > 1 and ranks % (stride * size) == 0]


class Calibration:
    """A measurement on all ranks of `line`, a grid along data alone, that takes about `seconds`."""

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
        began, self.seconds = time.perf_counter(), seconds
        self.until = began + seconds
        self.links_until = began + (LINKS_SHARE * seconds if self.groups else 0.0)
        self.runs_left = len(self.groups) * len(COLLECTIVES)
        self.held = self.held_bytes()  # before the first tensor of the measurement is made
        has = {"eager": True, "compiled": seconds >= COMPILE_SECONDS, "captured": self.on_gpu}
        self.modes = [mode for mode in HOST_MODES if has[mode]]
        blocks = len({*self.modes} & {*KERNEL_MODES}) if self.on_gpu else 0
        small_steps = len(self.modes) * len(SMALL_LAYERS)
        self.steps = (
            len(self.groups) * len(COLLECTIVES) + len(self.shapes) + 6 + small_steps + bool(self.groups) + blocks
        )
        self.done = 0

    @property
    def hides(self) -> bool:
        """Whether messages wait for computation, because CPU cores move the bytes."""
        return bool(self.groups) and not self.on_gpu

    @property
    def few(self) -> Sequence[tuple[int, int, int]]:
        """The products that are measured in the second dtype."""
        return [(4096, 4096, 4096), (8192, 1024, 4096)] if self.on_gpu else [(128, 128, 128), (256, 64, 256)]

    def measure(self, name: str) -> Machine:
        messages = [message for shape, axes in self._grids() for message in self._messages(shape, axes)]
        contention, sharing = self._contention(messages), self._sharing(messages)
        turn = self._turn() if self.on_gpu and messages else None
        all_to_all, host_bandwidth = self._all_to_all(messages), self._host_bandwidth()
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
            sharing=sharing,
            turn=turn,
            all_to_all=all_to_all,
            host_bandwidth=host_bandwidth,
            host_memory=host_nbytes() // self.devices if self.on_gpu else None,
            hidden=hidden,
            ranks=self.world,
        )
        where = device if self.on_gpu else f"{os.cpu_count()} cores ({platform.machine()})"
        source = f"measured by fourfold calibrate, {date.today()}, {ranks}, torch {torch.__version__}, {where}"
        return machine_of(name, f"{ranks}, {self.devices} a node, on {where}", found, source)

    def _device(self) -> tuple[str, int]:
        """Return torch's name of the device and its memory; a rank on the CPU has its part of the machine's memory."""
        if self.on_gpu:
            properties = torch.cuda.get_device_properties(self.line.device)
            return properties.name, properties.total_memory
        return "cpu", host_nbytes() // self.devices

    # links

    def _grids(self) -> Iterator[tuple[Shape, dict[str, GroupShape]]]:
        """Yield grids that together have every group along an axis, with the groups of their axes."""
        left = list(self.groups)
        while left:
            stride, size = left[0]
            shape = Shape(x=stride, z=size, data=self.world // (stride * size))
            strides = {"x": 1, "z": stride, "data": stride * size}
            axes = {axis: (strides[axis], shape.sizes[axis]) for axis in strides}
            yield shape, {axis: group for axis, group in axes.items() if group in left}
            left = [group for group in left if group not in axes.values()]

    def _messages(self, shape: Shape, axes: dict[str, GroupShape]) -> Iterator[Message]:
        grid = Grid(x=shape.x, z=shape.z, data=shape.data, device=self.line.device)
        self.settle()
        for axis, group in axes.items():
            for op in COLLECTIVES:
                slot = self._left(self.links_until) / self.runs_left / len(MESSAGES)
                for nbytes in MESSAGES:
                    record, launch = collective(op, axis, nbytes, grid, self.dtype)
                    launch().wait()  # the first one also opens the connections
                    seconds = self._repeat(launch, slot)
                    yield Message(group, record, seconds)
                    if nbytes >= LEAST_LARGEST and 4 * 4 * seconds > 3 * slot:
                        break  # the next message takes four times as long and would exceed the slot
                self.runs_left -= 1
                self._advance()
        if self.on_gpu:
            self.held = max(self.held, self.held_bytes())  # now with the buffers of communicators
        grid.close()

    def _repeat(self, launch: LaunchCall, seconds: float) -> float:
        """Return the slowest rank's best average."""
        best = self._agreed_time(lambda: launch().wait(), 1)
        runs = max(1, min(50, int(seconds / 2 / best)))
        return min(best, *(self._agreed_time(lambda: launch().wait(), runs) for _ in range(2)))

    def _agreed_time(self, act: Callable[[], object], runs: int) -> float:
        """Return the slowest rank's average."""
        self._agree(0.0)  # a barrier, so that all ranks begin together
        began = time.perf_counter()
        for _ in range(runs):
            act()
        self._finish()
        return self._agree((time.perf_counter() - began) / runs)

    def _agree(self, seconds: float) -> float:
        """Return the largest of all ranks' numbers; this is also a barrier."""
        mine = torch.tensor([seconds], dtype=torch.float64, device=self.line.device)
        return float(comm.all_gather(mine, self.line, "data").wait().max())

    def _left(self, until: float) -> float:
        """Return the seconds that are left, agreed on by all ranks; at least 0."""
        return max(0.0, -self._agree(time.perf_counter() - until))

    def _contention(self, messages: Sequence[Message]) -> float:
        """Return the seconds of products on all ranks during messages around all of them, divided by those alone."""
        computed_alone = computed = 0.0
        if messages:
            act = products((128, 128, 128) if not self.on_gpu else (2048, 2048, 2048), self.dtype, self.line.device)
            alone = self._agree(self.average_seconds(act, self._left(self.until) / self.steps))
            largest = max(message.record.nbytes for message in messages)
            sizes = {largest} if self.on_gpu else {min(largest, nbytes) for nbytes in BESIDE}
            for nbytes, op in itertools.product(sorted(sizes), COLLECTIVES[:2]):
                _, launch = collective(op, "data", nbytes, self.line, self.dtype)
                launch().wait()
                flight = self._agreed_time(lambda launch=launch: launch().wait(), ROUNDS)
                runs = max(1, int(PART * flight / alone))
                computed_alone += runs * alone
                computed += self._agreed_beside(launch, act, runs)
        self._advance()
        return computed / computed_alone if computed_alone else 1.0

    def _turn(self) -> float:
        """Return for how much longer a message between all ranks is under way while their GPUs compute all the time.

        The multiprocessors finish what they have begun before they take up the message's kernel.
        """
        act = products((2048, 2048, 2048), self.dtype, self.line.device)
        alone, longer = self._agree(self.average_seconds(act, 0.0)), []
        for nbytes, op in itertools.product(BESIDE, COLLECTIVES[:2]):
            _, launch = collective(op, "data", nbytes, self.line, self.dtype)
            first, idle = (self._agreed_stream_time(launch) for _ in range(2))  # the first one opens connections
            busy = self._agreed_stream_time(launch, [act] * (math.ceil(2 * max(first, idle) / alone) + BEGUN))
            longer.append((busy - idle) / ROUNDS)
        self._advance()
        return max(0.0, median(longer))

    def _agreed_stream_time(self, launch: LaunchCall, acts: Sequence[Callable[[], object]] = ()) -> float:
        """Return the seconds of some messages in a row, which do not wait for the acts before them."""
        stream = torch.cuda.Stream(self.line.device)
        self._finish()
        self._agree(0.0)
        for act in acts:
            act()
        began = time.perf_counter()
        with torch.cuda.stream(stream):
            for _ in range(ROUNDS):
                launch().wait()
        stream.synchronize()
        seconds = time.perf_counter() - began
        self._finish()
        return self._agree(seconds)

    def _sharing(self, messages: Sequence[Message]) -> float:
        """Return how much longer a message takes while one of another communicator is in flight inside a node.

        Two messages that take a and b >= a alone take b + sharing * a at once.
        """
        found = 0.0
        inside = [message for message in messages if message.group[0] * message.group[1] <= self.devices]
        if inside:
            nbytes = max(message.record.nbytes for message in inside)
            size = max(message.group[1] for message in inside)
            grid = Grid(z=size, data=self.world // size, device=self.line.device)  # z has two communicators
            launches = [collective(op, "z", nbytes, grid, self.dtype)[1] for op in ("all_gather", "reduce_scatter")]
            for launch in launches:
                launch().wait()

            def run(*which: LaunchCall) -> None:
                for pending in [launch() for launch in which]:
                    pending.wait()

            short, long = sorted(self._agreed_time(partial(run, launch), ROUNDS) for launch in launches)
            found = min(MOST_SHARING, max(0.0, (self._agreed_time(partial(run, *launches), ROUNDS) - long) / short))
            grid.close()
        self._advance()
        return found

    def _all_to_all(self, messages: Sequence[Message]) -> Message | None:
        """Time a message from every rank to every other of the largest group inside a node."""
        found = None
        inside = [message for message in messages if message.group[0] * message.group[1] <= self.devices]
        if inside:
            nbytes = max(message.record.nbytes for message in inside)
            size = max(message.group[1] for message in inside)
            grid = Grid(z=size, data=self.world // size, device=self.line.device)
            record, launch = collective("all_to_all", "z", nbytes, grid, self.dtype)
            launch().wait()
            seconds = min(self._agreed_time(lambda: launch().wait(), ROUNDS) for _ in range(2))
            found = Message((1, size), record, seconds)
            grid.close()
        self._advance()
        return found

    def _host_bandwidth(self) -> float | None:
        """Return the bytes per second of copies between a GPU and pinned memory, while all ranks copy."""
        if not self.on_gpu:
            return None  # the device is the host
        there = torch.zeros(COPIED_NBYTES, dtype=torch.uint8, device=self.line.device)
        here = torch.zeros(COPIED_NBYTES, dtype=torch.uint8, pin_memory=True)
        slowest = 0.0
        for source, target in ((there, here), (here, there)):
            target.copy_(source, non_blocking=True)
            copy = partial(target.copy_, source, non_blocking=True)
            slowest = max(slowest, self._agreed_time(copy, ROUNDS))
        return COPIED_NBYTES / slowest

    def _agreed_beside(self, launch: LaunchCall, act: Callable[[], object], runs: int) -> float:
        """Return the seconds of `runs` acts during a collective, averaged over the rounds."""
        self._agree(0.0)
        computing = 0.0
        for _ in range(ROUNDS):
            began = time.perf_counter()
            pending = launch()
            for _ in range(runs):
                act()
            if self.on_gpu:  # wait for the products alone; a full synchronize would wait for the message too
                torch.cuda.current_stream(self.line.device).synchronize()
            computing += time.perf_counter() - began
            pending.wait()
            self._finish()
        return self._agree(computing / ROUNDS)

    def _hidden(self) -> float:
        """Return the median seconds of a step of `HIDDEN` on z = all ranks, on the slowest rank."""
        grid = Grid(z=self.world, device=self.line.device)
        run = step_of(HIDDEN, HIDDEN_ROWS, grid, self.dtype)
        self.settle()
        for _ in range(2):  # the first pass records the prefetch order, the second one is the first to follow it
            run()
        seconds = [self._agreed_time(run, 1) for _ in range(HIDDEN_STEPS)]
        grid.close()
        self._advance()
        return median(seconds)

    # computation: every rank by itself, all at the same time

    def _computation(self) -> Computation:
        blocks = self._blocks() if self.on_gpu else {}
        self._heat()
        timed, slot = [], 0.0
        for index, ((m, k, n), dtype) in enumerate(self.shapes):
            left = self._left(self.until)
            if not left and index >= ALWAYS:
                self.done += len(self.shapes) - index
                break
            slot = left / (len(self.shapes) - index + 3)
            seconds = self._slowest(products((m, k, n), dtype, self.line.device), slot) / PRODUCTS_OF_ACT
            timed.append(Timed(m, k, n, DTYPES[dtype], seconds))
        flops, attend = attention(self.line.device, self.dtype)
        rate = flops / self._slowest(attend, slot)
        a = torch.ones((256 if self.on_gpu else 16) << 18, device=self.line.device)
        b, out = a.clone(), a.clone()
        moved = 3 * a.nbytes / self._slowest(lambda: torch.add(a, b, out=out), slot)
        few = torch.ones(16, device=self.line.device)
        kernel = self._slowest(lambda: few.add_(1), slot)
        steps = [step for mode in self.modes for step in self._small_steps(mode, slot)]
        return Computation(tuple(timed), rate, moved, kernel, tuple(steps), blocks)

    def _heat(self) -> None:
        """Keep a GPU busy with large products until its clocks are those of a long training, at its power limit."""
        if self.on_gpu:
            act = products(self.shapes[0][0], self.dtype, self.line.device)
            began, heating = time.perf_counter(), min(HEAT_SECONDS, HEAT_SHARE * self.seconds)
            while time.perf_counter() - began < heating:
                self._batch(act, HEAT_RUNS)
            self.until += time.perf_counter() - began  # the time to measure is what was asked for

    def _blocks(self) -> dict[KernelMode, TimedBlocks]:
        """Time forward and backward of blocks in each mode, and trace them."""
        found: dict[KernelMode, TimedBlocks] = {}
        for mode in KERNEL_MODES:
            if mode in self.modes:
                policy = Policy(compile=mode == "compiled")
                act = step_of(BLOCKS, BLOCK_ROWS, Grid.alone(self.line.device), self.dtype, policy)
                for _ in range(WARM_UP):
                    act()
                seconds = self._slowest(act, BLOCK_SHARE * self._left(self.until))
                found[mode] = TimedBlocks(seconds, self._traced(act, seconds))
        return found

    def _traced(self, act: Callable[[], object], seconds: float) -> dict[str, float]:
        """Return the seconds of kernels by kind in an act that takes `seconds`, on the slowest rank for each kind.

        Return none if a rank sees no kernels.
        """
        profiler = new_profiler(on_gpu=self.on_gpu)
        profiler.start()
        for _ in range(math.ceil(HOT_AGAIN / seconds)):
            act()
        with record_function(f"{STEP}0"):
            for _ in range(TRACED_BLOCKS):
                act()
        self._finish()
        profiler.stop()
        kinds, _ = (device_parts if self.on_gpu else host_parts)(events_of(profiler))
        all_see = -self._agree(-kinds[PRODUCTS]) > 0
        slowest = {kind: self._agree(spent) / TRACED_BLOCKS for kind, spent in kinds.items()}
        return slowest if all_see else {}

    def _small_steps(self, mode: HostMode, slot: float) -> Iterator[TimedStep]:
        """Time training steps of small models; yield none if a rank of this machine has no such steps."""
        for index, layers in enumerate(SMALL_LAYERS):
            act = training_step(mode, layers, Grid.alone(self.line.device), self.dtype)
            if self._agree(float(act is None)) or act is None:
                self.done += len(SMALL_LAYERS) - index
                return
            yield TimedStep(mode, layers, self._slowest(act, slot))

    def _slowest(self, act: Callable[[], object], seconds: float) -> float:
        found = self._agree(self.average_seconds(act, seconds))
        self._advance()
        return found

    def average_seconds(self, act: Callable[[], object], seconds: float) -> float:
        """Return the seconds of one act while all ranks act, measured for about `seconds`.

        On a GPU this is the median over batches, which are long enough for its clocks to fall. On the CPU ranks may
        share cores and take turns; single batches would come from a rank that had a core to itself for a moment. There
        it is the median of windows that all ranks begin together, each long enough for many turns.
        """
        act()
        self._finish()
        if not self.on_gpu:
            window = max(seconds / WINDOWS, LEAST_WINDOW)
            return median(self._window(act, window) for _ in range(WINDOWS))
        until, runs = time.perf_counter() + seconds, 1
        while (took := self._batch(act, runs)) < BATCH_SECONDS:
            runs = max(runs + 1, min(8 * runs, int(1.2 * BATCH_SECONDS * runs / took)))
        averages = [took / runs]
        while time.perf_counter() + took < until:
            took = self._batch(act, runs)
            averages.append(took / runs)
        return median(averages)

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
        """Return the bytes in use beside tensors: on a GPU now, on the CPU the most that this process has ever had."""
        if self.on_gpu:
            free, total = torch.cuda.mem_get_info(self.line.device)
            return total - free - torch.cuda.memory_reserved(self.line.device)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024

    def _advance(self) -> None:
        self.done += 1
        self.progress(self.done / self.steps)


def collective(op: Op, axis: str, nbytes: int, grid: Grid, dtype: torch.dtype) -> tuple[Collective, LaunchCall]:
    """Return the record of a collective of about `nbytes`, and a function that launches it."""
    ranks = grid.size(axis)
    elements = max(1, nbytes // dtype.itemsize // ranks) * ranks
    record = Collective(op, axis, elements * dtype.itemsize, ranks, "calibrate")
    whole = torch.zeros(elements, dtype=dtype, device=grid.device)
    if op == "all_gather":
        return record, lambda: comm.all_gather(whole[: elements // ranks], grid, axis, label="calibrate")
    if op == "reduce_scatter":
        return record, lambda: comm.reduce_scatter(whole, grid, axis, label="calibrate")
    if op == "all_to_all":
        parts = [elements // ranks] * ranks
        record = replace(record, sent=(elements - parts[0]) * dtype.itemsize)
        return record, lambda: comm.all_to_all(whole, grid, axis, parts, parts, label="calibrate")
    return record, lambda: comm.all_reduce(whole, grid, axis, label="calibrate", owned=True)


PRODUCTS_OF_ACT = 3
"""How many products `products` runs."""


def host_nbytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def products(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Return a function that runs [m, k] x [k, n] three times, as forward and backward of a layer store its factors."""
    m, k, n = shape
    # random numbers: products of ones draw less power and run faster
    a, w = (torch.randn(rows, k, dtype=dtype, device=device) for rows in (m, n))
    b, dout = torch.randn(k, n, dtype=dtype, device=device), torch.randn(k, m, dtype=dtype, device=device)

    def run() -> None:
        F.linear(a, w)  # E1: both factors by rows
        a.mm(b)  # E2: the second one by columns
        dout.t().mm(b)  # E3: both by columns

    return run


def step_of(
    config: ModelConfig, rows: int, grid: Grid, dtype: torch.dtype, policy: Policy = Policy()
) -> Callable[[], None]:
    """Return a function that runs forward and backward of a model on `rows` rows per rank."""
    model = build(config, grid, policy=policy, dtype=dtype)
    tokens = torch.zeros(rows, config.seq, dtype=torch.long, device=grid.device)

    def run() -> None:
        model(tokens, tokens).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return run


def training_step(mode: HostMode, layers: int, grid: Grid, dtype: torch.dtype) -> Callable[[], object] | None:
    """Return a function that makes a training step of `SMALL` with this many layers, after the first such steps.

    Return None if this machine cannot compile or record the step.
    """
    model = build(replace(SMALL, layers=layers), grid, policy=Policy(compile=mode == "compiled"), dtype=dtype)
    optimizer = AdamW(model, lr=1e-4)
    tokens = torch.zeros(SMALL_ROWS, SMALL.seq, dtype=torch.long, device=grid.device)

    def step(tokens: Tensor) -> Tensor:
        loss = model(tokens, tokens)
        loss.backward()
        optimizer.clip_and_step(1.0)
        optimizer.zero_grad()
        return loss.detach()

    if mode == "captured":
        from fourfold.step_graph import StepGraph

        replayed = StepGraph(step, model, warmup=WARM_UP, always=True)
        for _ in range(WARM_UP + 1):  # the last of these is recorded
            replayed(tokens)
        return partial(replayed, tokens) if replayed.recorded else None
    try:
        for _ in range(WARM_UP):
            step(tokens)
    except RuntimeError:
        if mode == "compiled":  # torch raises it where there is no compiler
            return None
        raise
    return partial(step, tokens)


WARM_UP = 3
"""Steps before a step is timed or recorded: they compile, and make the state of the optimizer."""


def attention(device: torch.device, dtype: torch.dtype) -> tuple[float, Callable[[], None]]:
    """Return the FLOPs of causal attention forward and backward, and a function that runs it."""
    rows, heads, seq, width = (4, 16, 2048, 128) if device.type == "cuda" else (1, 4, 512, 64)
    q, k, v = (torch.randn(rows, heads, seq, width, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    return 3 * 2 * rows * heads * seq * seq * width, run

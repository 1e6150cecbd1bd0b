"""Calibration: measure this machine (links, products, attention, memory) and fit a `Machine` to the measurements.

Collectives go through `comm`, so that the measured path is the one of training. All groups of an axis are active at
once, and the slowest rank's time counts. Every decision that changes what is launched uses times that all ranks have
agreed on; otherwise ranks would launch different collectives and wait for each other for ever.

The fit is pure arithmetic:

    collectives   seconds = launch + hops * latency + wire bytes / bandwidth, launch the same for all groups; one hop
                  and `all_to_all` times the bandwidth for an all-to-all
    products      seconds = FLOPs / gemm * (1 + gemm_half / smallest dim), times a factor with which the products of
                  blocks take what a trace of these shows; attention likewise
    elementwise   seconds = traffic * bytes of fused kernels / memory bandwidth; traffic from the same trace
    both at once  products take `contention` times as long; a message takes `turn` longer if products run all the time
    the host      seconds of a step = item * items of its program + step, for tiny models of several numbers of layers

`turn` is chosen so that the program of a step on z, with messages that can be hidden, takes the seconds that the step
took. Products during a single message do not show it: there all ranks compute at the same time, while the ranks of a
step drift apart. Errors are relative, so that a message of 64 KiB weighs as much as one of 64 MiB, and no constant is
negative. Products are fitted by least squares, collectives by least absolute errors: single sizes are outliers (buffers
with room, fresh memory) and must not bend the fit for the others.
"""

from __future__ import annotations

import itertools
import math
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from statistics import fmean, median

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.profiler import record_function

from fourfold import comm
from fourfold.comm import Pending
from fourfold.grid import Grid, Shape
from fourfold.ledger import Collective, Op
from fourfold.models import ModelConfig, build
from fourfold.models.config import config
from fourfold.optim import AdamW
from fourfold.planner.machine import (
    ASSUMED,
    CONSTANTS,
    DTYPES,
    HOST,
    HOST_MODES,
    KERNEL_MODES,
    LINK,
    OF_THE_HOST,
    PEAK_FLOPS,
    HostMode,
    HostSpeed,
    KernelMode,
    LinkSpeed,
    Machine,
    Seconds,
    Timed,
    with_slower_products,
)
from fourfold.planner.program import ComputeOp
from fourfold.planner.simulate import simulate
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_parts import (
    ATTENTION,
    KERNELS,
    PRODUCTS,
    STEP,
    device_parts,
    events_of,
    host_parts,
    new_profiler,
    pieces,
    work_seconds,
)
from fourfold.planner.transformer import step_program
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
"""Bytes of the messages that run during products on the CPU, typical of weights and activations; on a GPU the largest
message is used."""
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


GroupShape = tuple[int, int]
"""Stride and size of groups of ranks: base, base + stride, ..."""


# --- measuring


@dataclass(frozen=True, slots=True)
class Message:
    """A timed collective and the groups that it ran along."""

    group: GroupShape
    record: Collective
    seconds: float

    @property
    def hops(self) -> int:
        return (2 if self.record.op == "all_reduce" else 1) * (self.record.ranks - 1)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A timed training step of the model `SMALL` with this many layers."""

    mode: HostMode
    layers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TimedBlocks:
    """Forward and backward of the model `BLOCKS` on the slowest rank."""

    seconds: float
    traced: Mapping[str, float] = field(default_factory=dict)
    """Seconds of products, attention and other kernels; empty where the driver does not let kernels be traced."""


@dataclass(frozen=True, slots=True)
class Computation:
    """The speed of the slowest device."""

    products: tuple[Timed, ...]
    """Timed products, those of the main dtype first."""
    attention: float
    """FLOP/s of attention, without the scores that backward computes again."""
    memory_bandwidth: float
    kernel: float
    """Seconds of the smallest kernel."""
    steps: tuple[TimedStep, ...]
    """Steps in each mode that this machine has, with different numbers of layers."""
    blocks: Mapping[KernelMode, TimedBlocks] = field(default_factory=dict)
    """The model `BLOCKS`, eager and compiled; empty on the CPU, whose kernels are not what takes the time."""


SMALL, SMALL_ROWS = replace(config("llama-tiny"), seq=16), 2
"""A model so small that its step is mostly work of the host, and the rows of a rank."""
SMALL_LAYERS = (1, 4, 8)
"""The numbers of layers of the timed steps: far enough apart that the slope, the seconds per item, is not noise."""
COMPILE_SECONDS = 30.0
"""Compiled steps are timed if the calibration takes at least this many seconds: compiling alone takes about as long."""
BLOCK_SIZES = dict(layers=2, hidden=2048, heads=16, kv_heads=16, head_dim=128, mlp_hidden=5632, vocab=1024, seq=2048)
BLOCKS, BLOCK_ROWS = replace(config("llama-tiny"), **BLOCK_SIZES), 16
"""Blocks whose kernels are as large as those of real models, and the rows of a rank: so many that the device of a
whole GPU is never early. With 2 rows its host decided, and nothing was left for `traffic` to explain."""
HOT_AGAIN = 1.0
"""Seconds of blocks before those that count in a trace: a GPU cools down while a profiler starts."""
TRACED_BLOCKS = 3
"""How often the blocks run where they count in a trace."""
BLOCK_SHARE = 0.15
"""The share of the time for blocks in each mode. They come before products, which so are timed on a device that is as
hot as in training."""
HIDDEN_SIZES = dict(layers=2, hidden=384, heads=8, kv_heads=8, head_dim=48, mlp_hidden=1024, vocab=1024, seq=64)
HIDDEN, HIDDEN_ROWS = replace(config("llama-tiny"), **HIDDEN_SIZES), 2
"""A model that gathers weights while it computes, and the rows of a rank. With smaller messages, a short wait already
exposes all of the message, and a longer wait would look the same."""
MOST_TURN = 0.2
"""The largest `turn` in seconds that is tried: with it, no message is hidden any more."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All measurements."""

    device: str
    devices_per_node: int
    memory: int
    held: int
    """Bytes of the memory that are in use before any tensor is made."""
    advertised: Mapping[str, float]
    """The vendor's FLOP/s by dtype, where they are known."""
    messages: Sequence[Message]
    computation: Computation
    contention: float
    """Seconds of products during messages divided by their seconds alone; 1 if there is one rank."""
    sharing: float
    """How much longer a message takes while another communicator's is in flight; 0 if there is one rank."""
    all_to_all: Message | None = None
    """An all-to-all inside a node; None if there is one rank."""
    host_bandwidth: float | None = None
    """Bytes per second between a GPU and its host, the slower direction; None on the CPU."""
    host_memory: int | None = None
    """Bytes of the host's memory for each GPU; None on the CPU."""
    hidden: float | None = None
    """Seconds of a forward and backward pass of the model `HIDDEN` on z = all ranks, if CPU cores move the bytes."""
    ranks: int = 1


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
        self.steps = len(self.groups) * len(COLLECTIVES) + len(self.shapes) + 6 + small_steps + self.hides + blocks
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


# --- fitting

CARDS = "estimate: network cards and copy engines move the bytes"
"""The source of `turn` on a GPU."""
MOST_SHARING = 2.0
"""The largest `sharing` that a machine file may have; what is above is noise."""
FRAGMENTS = 0.03
"""The share of a GPU's memory that the allocator loses to fragmentation."""


def machine_of(name: str, about: str, found: Measured, source: str) -> Machine:
    """Fit a machine to the measurements; `source` says where every constant comes from."""
    work = found.computation
    launch, links = fit_links(found.messages)
    across = {group: link for group, link in links.items() if group[0] == found.devices_per_node}
    between = next(
        (LinkSpeed(link.bandwidth * found.devices_per_node, link.latency) for link in across.values()), None
    )  # all rings of a node shared its network cards
    fastest: dict[str, float] = {}
    for one in work.products:
        fastest[one.dtype] = max(fastest.get(one.dtype, 0.0), 2 * one.m * one.k * one.n / one.seconds)
    peak = {dtype: max(rate, found.advertised.get(dtype, 0.0)) for dtype, rate in fastest.items()}
    main = work.products[0].dtype
    rate, half = fit_products([one for one in work.products if one.dtype == main], peak[main])
    on_gpu = found.device != "cpu"
    machine = Machine(
        name=name,
        about=about,
        device=found.device,
        devices_per_node=found.devices_per_node,
        memory=found.memory,
        reserve=min(found.held + round(FRAGMENTS * found.memory if on_gpu else 0), found.memory // 2),
        peak=peak,
        gemm=fastest | {main: rate},
        gemm_half=half,
        attention=min(1.0, work.attention / rate),
        memory_bandwidth=work.memory_bandwidth,
        overhead=work.kernel,
        launch=launch,
        contention=max(1.0, found.contention),
        turn=0.0,
        sharing=found.sharing,
        congestion=0.0,
        host_bandwidth=found.host_bandwidth,
        host_memory=found.host_memory,
        inside={group: link for group, link in links.items() if group not in across},
        between=between,
        measured=work.products,
    )
    if found.all_to_all is not None:
        machine = replace(machine, all_to_all=all_to_all_share(machine, found.all_to_all))
    machine = replace(machine, host=host_speeds(machine, main, work.steps))
    if not on_gpu:
        machine = replace(machine, overhead=max(work.kernel, machine.host["eager"].item))
    machine = as_in_blocks(machine, main, work.blocks)
    if found.hidden is not None:
        machine = replace(machine, turn=turn_seconds(machine, main, found.ranks, found.hidden))
    return replace(machine, sources=_sources(machine, found, source))


LEAST_ALL_TO_ALL = 0.05
"""The smallest `all_to_all` that is written down; what is below is noise."""


def all_to_all_share(machine: Machine, message: Message) -> float:
    """Return the fraction of a link's bandwidth with which an all-to-all takes the measured seconds."""
    cost = Seconds(replace(machine, all_to_all=1.0), Shape(z=message.record.ranks)).transfer(message.record)
    moving = max(message.seconds - cost.fixed - cost.host, cost.moving / MOST_ALL_TO_ALL)
    return max(LEAST_ALL_TO_ALL, cost.moving / moving)


MOST_ALL_TO_ALL = 4.0
"""The largest `all_to_all`, for the same reason."""


def host_speeds(machine: Machine, dtype: str, steps: Sequence[TimedStep]) -> dict[HostMode, HostSpeed]:
    """Return the host's seconds per item and per step in each mode, from small steps: on the CPU without what they
    compute."""
    alone = replace(machine, overhead=0.0, host={}, name=f"{machine.name} without its host")
    parameters = next(found for found, name in DTYPES.items() if name == dtype)
    found: dict[HostMode, HostSpeed] = {}
    for mode in HOST_MODES:
        rows, right = [], []
        for one in steps:
            if one.mode == mode:
                sizes = LocalSizes(
                    replace(SMALL, layers=one.layers), Shape(), Policy(), SMALL_ROWS, SMALL.seq, parameters
                )
                work = [item for item in step_program(sizes).work if isinstance(item, ComputeOp)]
                computes = machine.device == "cpu"
                busy = simulate(work, Seconds(alone, Shape()), dtype).totals.compute if computes else 0.0
                rows.append([len(work) / one.seconds, 1 / one.seconds])  # so that errors are relative
                right.append(max(0.0, one.seconds - busy) / one.seconds)
        if rows:
            solved = not_negative(torch.tensor(rows, dtype=torch.float64), torch.tensor(right, dtype=torch.float64))
            found[mode] = HostSpeed(*solved)
    return found


def as_in_blocks(machine: Machine, dtype: str, blocks: Mapping[KernelMode, TimedBlocks]) -> Machine:
    """Return the machine whose products, attention and other kernels take what they took in blocks.

    Nothing but products holds a GPU at its power limit; between other kernels they are faster, by 19% on an H200. Where
    kernels were not traced, all but products and attention is what these leave of the blocks' seconds.
    """
    parameters = next(found for found, name in DTYPES.items() if name == dtype)
    sizes = LocalSizes(BLOCKS, Shape(), Policy(), BLOCK_ROWS, BLOCKS.seq, parameters)
    work = pieces(step_program(sizes, optimizer=False).work)
    traced = [one.traced for one in blocks.values() if one.traced]
    if traced:
        alone = work_seconds(Seconds(machine, Shape()), dtype, work)
        products, attention = (fmean(one[kind] for one in traced) for kind in (PRODUCTS, ATTENTION))
        machine = with_slower_products(machine, dtype, products / alone.products)
        machine = replace(machine, attention=min(1.0, machine.attention * alone.attention / attention))
    traffic: dict[KernelMode, float] = {}
    for mode, one in blocks.items():
        alone = work_seconds(Seconds(machine, Shape(), mode), dtype, work)
        kernels = one.traced[KERNELS] if one.traced else one.seconds - alone.products - alone.attention
        traffic[mode] = min(MOST_TRAFFIC, max(1.0, (kernels - alone.plain) / alone.fused))
    return replace(machine, traffic=traffic)


MOST_TRAFFIC = 20.0
"""The largest `traffic` that is written down."""


def turn_seconds(machine: Machine, dtype: str, ranks: int, step: float) -> float:
    """Return the `turn` with which the program of the step on z takes the measured seconds."""
    parameters = next(found for found, name in DTYPES.items() if name == dtype)
    shape = Shape(z=ranks)
    sizes = LocalSizes(HIDDEN, shape, Policy(), HIDDEN_ROWS, HIDDEN.seq, parameters)
    work = step_program(sizes, optimizer=False).work

    def predicted(turn: float) -> float:
        waiting = replace(machine, turn=turn, name=f"{machine.name} with {turn}")
        return simulate(work, Seconds(waiting, shape), dtype).seconds

    low, high = 0.0, MOST_TURN
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < step else (low, middle)
    return low


HALVINGS = 12
"""Steps of a bisection: the error of `turn` is below 0.05 ms."""


def _sources(machine: Machine, found: Measured, source: str) -> dict[str, str]:
    sources = dict.fromkeys([*CONSTANTS, "measured"], source)
    held = f"{source}: what the process holds beside tensors"
    sources["reserve"] = held if found.device == "cpu" else f"{held}, and {FRAGMENTS:.0%} for fragmentation (estimate)"
    alone = source if found.messages else "estimate: one rank communicates with nobody"
    sources |= dict.fromkeys(("launch", "contention", "sharing", "turn"), alone)
    if found.device != "cpu":
        sources["turn"] = CARDS
    _, sources["congestion"] = ASSUMED["congestion"]  # it takes more nodes than a calibration has
    if not found.all_to_all:
        _, sources["all_to_all"] = ASSUMED["all_to_all"]
    if machine.host_bandwidth is not None:
        sources |= dict.fromkeys(OF_THE_HOST, source)
    for dtype, rate in machine.peak.items():
        sources[f"gemm.{dtype}"] = source
        sheet = found.advertised.get(dtype) == rate
        sources[f"peak.{dtype}"] = f"data sheet of {found.device}" if sheet else f"{source}: the fastest product"
    paths = [f"inside[{stride},{size}]" for stride, size in machine.inside] + ["between"] * bool(machine.between)
    sources |= {f"host.{mode}.{name}": source for mode in machine.host for name in HOST}
    sources |= {f"traffic.{mode}": source for mode in machine.traffic}
    return sources | {f"{path}.{name}": source for path in paths for name in LINK}


def fit_links(messages: Sequence[Message]) -> tuple[float, dict[GroupShape, LinkSpeed]]:
    """Return the seconds of a launch and the link of each group."""
    groups = list(dict.fromkeys(message.group for message in messages))
    if not groups:
        return 0.0, {}
    rows = torch.zeros(len(messages), 1 + 2 * len(groups), dtype=torch.float64)
    for row, message in zip(rows, messages, strict=True):
        column = 1 + 2 * groups.index(message.group)
        row[0], row[column], row[column + 1] = 1.0, message.hops, message.record.wire_bytes
    seconds = torch.tensor([message.seconds for message in messages], dtype=torch.float64)
    launch, *found = least_absolute(rows / seconds[:, None], torch.ones_like(seconds))
    links = {}
    for index, group in enumerate(groups):
        latency, per_byte = found[2 * index : 2 * index + 2]
        # noise may leave no time for the bytes; then the fastest message gives the bandwidth
        seen = max(message.record.wire_bytes / message.seconds for message in messages if message.group == group)
        links[group] = LinkSpeed(1 / per_byte if per_byte else seen, latency)
    return launch, links


def fit_products(timed: Sequence[Timed], peak: float) -> tuple[float, float]:
    """Return the FLOP/s of a large product, at most the peak, and the smallest dim that reaches half of them."""
    flops = torch.tensor([2.0 * one.m * one.k * one.n for one in timed], dtype=torch.float64)
    seconds = torch.tensor([one.seconds for one in timed], dtype=torch.float64)
    least = torch.tensor([float(min(one.m, one.k, one.n)) for one in timed], dtype=torch.float64)
    rows = torch.stack([flops, flops / least], dim=1) / seconds[:, None]
    per_flop, per_cut = not_negative(rows, torch.ones_like(seconds))
    if per_flop * peak >= 1:
        return 1 / per_flop, per_cut / per_flop
    left = 1 - rows[:, 0] / peak
    return peak, max(0.0, float(rows[:, 1] @ left / (rows[:, 1] @ rows[:, 1]))) * peak


def least_absolute(rows: torch.Tensor, right: torch.Tensor) -> list[float]:
    """Return the nonnegative solution with the least absolute errors, by iteratively reweighted least squares."""
    solution = not_negative(rows, right)
    for _ in range(REWEIGHTINGS):
        errors = (rows @ torch.tensor(solution, dtype=rows.dtype) - right).abs()
        weights = errors.clamp(min=NO_ERROR).rsqrt()
        solution = not_negative(rows * weights[:, None], right * weights)
    return solution


REWEIGHTINGS = 50
"""Iterations of the reweighting; the solution no longer changes after this many."""
NO_ERROR = 1e-4
"""The relative error below which a message gets no further weight, so that weights stay finite."""


def not_negative(rows: torch.Tensor, right: torch.Tensor) -> list[float]:
    """Return least squares with nonnegative unknowns: drop the most negative one until none is negative."""
    scale = rows.norm(dim=0)  # columns differ by many orders of magnitude: seconds of a hop, bytes of a message
    kept = list(range(rows.shape[1]))
    while kept:
        found = torch.linalg.lstsq(rows[:, kept] / scale[kept], right[:, None], driver="gelsd").solution[:, 0]
        if found.min() >= 0:
            break
        kept.pop(int(found.argmin()))
    solution = [0.0] * rows.shape[1]
    for column, value in zip(kept, found.tolist() if kept else [], strict=True):
        solution[column] = value / float(scale[column])
    return solution

"""The fit of a `Machine` to what a calibration has measured.

It is pure arithmetic:

    collectives   seconds = launch + hops * latency + wire bytes / bandwidth, launch the same for all groups; one hop
                  and `all_to_all` times the bandwidth for an all-to-all
    products      seconds = FLOPs / gemm * (1 + gemm_half / smallest dim), times a factor with which the products of
                  blocks take what a trace of these shows; attention likewise
    elementwise   seconds = traffic * bytes of fused kernels / memory bandwidth; traffic from the same trace
    both at once  products take `contention` times as long; a message takes `turn` longer if products run all the time
    the host      seconds of a step = item * items of its program + step, for tiny models of several numbers of layers

On a GPU `turn` is measured with messages during products. On the CPU these do not show it, for there all ranks compute
at the same time, while the ranks of a step drift apart: `turn` is chosen so that the program of a step on z, with
messages that can be hidden, takes the seconds that the step took. Errors are relative, so that a message of 64 KiB
weighs as much as one of 64 MiB, and no constant is negative. Products are fitted by least squares, collectives by least
absolute errors: single sizes are outliers (buffers with room, fresh memory) and must not bend the fit for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import torch

from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.models.config import config
from fourfold.planner.machine import (
    ASSUMED,
    CONSTANTS,
    DTYPES,
    HOST,
    HOST_MODES,
    LINK,
    OF_THE_HOST,
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
    pieces,
    work_seconds,
)
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy

GroupShape = tuple[int, int]
"""Stride and size of groups of ranks: base, base + stride, ..."""


# --- what was measured


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
BLOCK_SIZES = dict(layers=2, hidden=2048, heads=16, kv_heads=16, head_dim=128, mlp_hidden=5632, vocab=1024, seq=2048)
BLOCKS, BLOCK_ROWS = replace(config("llama-tiny"), **BLOCK_SIZES), 16
"""Blocks whose kernels are as large as those of real models, and the rows of a rank: so many that the device of a
whole GPU is never early. With 2 rows its host decided, and nothing was left for `traffic` to explain."""
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
    turn: float | None = None
    """For how many seconds longer a message is under way while a GPU computes; None on the CPU or with one rank."""
    all_to_all: Message | None = None
    """An all-to-all inside a node; None if there is one rank."""
    host_bandwidth: float | None = None
    """Bytes per second between a GPU and its host, the slower direction; None on the CPU."""
    host_memory: int | None = None
    """Bytes of the host's memory for each GPU; None on the CPU."""
    hidden: float | None = None
    """Seconds of a forward and backward pass of the model `HIDDEN` on z = all ranks, if CPU cores move the bytes."""
    ranks: int = 1


# --- the machine

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
        turn=found.turn or 0.0,
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


def _torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that machine files give this name."""
    return next(dtype for dtype, known in DTYPES.items() if known == name)


def host_speeds(machine: Machine, dtype: str, steps: Sequence[TimedStep]) -> dict[HostMode, HostSpeed]:
    """Return the host's seconds per item and per step in each mode, from small steps: on the CPU without what they
    compute."""
    alone = replace(machine, overhead=0.0, host={}, name=f"{machine.name} without its host")
    found: dict[HostMode, HostSpeed] = {}
    for mode in HOST_MODES:
        rows, right = [], []
        for one in steps:
            if one.mode == mode:
                sizes = LocalSizes(
                    replace(SMALL, layers=one.layers), Shape(), Policy(), SMALL_ROWS, SMALL.seq, _torch_dtype(dtype)
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
    sizes = LocalSizes(BLOCKS, Shape(), Policy(), BLOCK_ROWS, BLOCKS.seq, _torch_dtype(dtype))
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
    shape = Shape(z=ranks)
    sizes = LocalSizes(HIDDEN, shape, Policy(), HIDDEN_ROWS, HIDDEN.seq, _torch_dtype(dtype))
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
    if machine.turn > MOST_TURN * (1 - 2.0 ** (1 - HALVINGS)):  # where the bisection ends if no wait is long enough
        sources["turn"] = f"estimate: the step was slower than any wait explains ({source})"
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

"""From what was timed on a machine to its `Machine`. Pure arithmetic.

    collectives   seconds = launch + hops * latency + wire bytes / bandwidth, launch the same for all groups
    products      seconds = FLOPs / gemm * (1 + gemm_half / smallest dim)
    both at once  products take `contention` times as long; a message `turn` longer, if they run all the time
    the host      seconds of a step so small that little else is left, over the pieces of work that a program has of it

`turn` is what makes the program of a step on z, whose messages are to be hidden, take the seconds that it took.
Products beside a single message do not tell: there all ranks compute at once, while ranks of a step drift apart.

Of relative errors, so that a message of 64 KiB weighs as much as one of 64 MiB; no constant is negative. Products by
least squares; collectives by least absolute errors, since single sizes fall out of the rule (buffers with room, fresh
memory) and shall not bend it for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.models.config import config
from fourfold.planner.machine import CONSTANTS, DTYPES, LINK, Link, Machine, Timed
from fourfold.planner.program import step_program
from fourfold.planner.seconds import Seconds
from fourfold.planner.simulate import simulate
from fourfold.planner.volume import Volume
from fourfold.planner.work import Compute
from fourfold.policy import Policy

Group = tuple[int, int]
"""Stride and size."""


@dataclass(frozen=True, slots=True)
class Message:
    """A collective that was timed, and along which groups."""

    group: Group
    record: Collective
    seconds: float

    @property
    def hops(self) -> int:
        return (2 if self.record.op == "all_reduce" else 1) * (self.record.ranks - 1)


@dataclass(frozen=True, slots=True)
class Computation:
    """What the slowest device does."""

    products: tuple[Timed, ...]
    """Those of the dtype that matters first."""
    attention: float
    """FLOP/s, without the scores that backward computes again."""
    memory_bandwidth: float
    kernel: float
    """Seconds of the smallest kernel."""
    step: float
    """Seconds of a forward and backward pass of the model `SMALL`."""


SMALL, SMALL_ROWS = replace(config("llama-tiny"), seq=16), 2
"""A model whose step is the host's work."""
HIDDEN_SIZES = dict(layers=2, hidden=384, heads=8, kv_heads=8, head_dim=48, mlp_hidden=1024, vocab=1024, seq=64)
HIDDEN, HIDDEN_ROWS = replace(config("llama-tiny"), **HIDDEN_SIZES), 2
"""A model whose weights are gathered while it computes, and the rows of a rank. Of smaller messages all that could be
hidden is lost with a short wait already, and a longer one cannot be told from it."""
MOST_TURN = 0.2
"""Seconds: a message that waits longer cannot be told from one that stands still."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured."""

    device: str
    devices_per_node: int
    memory: int
    held: int
    """Bytes of the memory that are taken before any tensor is made."""
    advertised: Mapping[str, float]
    """FLOP/s by dtype, where the vendor's are known."""
    messages: Sequence[Message]
    computation: Computation
    contention: float
    """Seconds of products beside messages over those alone; 1 where one rank is alone."""
    hidden: float | None = None
    """Seconds of a forward and backward pass of the model `HIDDEN` on z = all ranks, where cores move the bytes."""
    ranks: int = 1


CARDS = "estimate: network cards and copy engines move the bytes"
FRAGMENTS = 0.03
"""Of a GPU's memory, that the allocator cannot give away."""


def machine_of(name: str, about: str, found: Measured, source: str) -> Machine:
    """The machine, every constant of which has this source."""
    work = found.computation
    launch, links = fit_links(found.messages)
    across = {group: link for group, link in links.items() if group[0] == found.devices_per_node}
    between = next(
        (Link(link.bandwidth * found.devices_per_node, link.latency) for link in across.values()), None
    )  # all rings of a node shared its cards
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
        inside={group: link for group, link in links.items() if group not in across},
        between=between,
        measured=work.products,
    )
    machine = replace(machine, overhead=max(work.kernel, host_seconds(machine, main, work.step)))
    if found.hidden is not None:
        machine = replace(machine, turn=turn_seconds(machine, main, found.ranks, found.hidden))
    return replace(machine, sources=_sources(machine, found, source))


def host_seconds(machine: Machine, dtype: str, step: float) -> float:
    """Of the host for a piece of work: what the small step takes beyond its work on the CPU, all of it on a GPU."""
    alone = replace(machine, overhead=0.0, name=f"{machine.name} without its host")
    parameters = next(found for found, name in DTYPES.items() if name == dtype)
    volume = Volume(SMALL, Shape(), Policy(), SMALL_ROWS, SMALL.seq, parameters)
    work = [item for item in step_program(volume, optimizer=False).work if isinstance(item, Compute)]
    busy = simulate(work, Seconds(alone, Shape()), dtype).compute_seconds if machine.device == "cpu" else 0.0
    return max(0.0, step - busy) / len(work)


def turn_seconds(machine: Machine, dtype: str, ranks: int, step: float) -> float:
    """Of a message that waits while ranks compute: such that the step on z takes what it took."""
    parameters = next(found for found, name in DTYPES.items() if name == dtype)
    shape = Shape(z=ranks)
    volume = Volume(HIDDEN, shape, Policy(), HIDDEN_ROWS, HIDDEN.seq, parameters)
    work = step_program(volume, optimizer=False).work

    def predicted(turn: float) -> float:
        waiting = replace(machine, turn=turn, name=f"{machine.name} with {turn}")
        return simulate(work, Seconds(waiting, shape), dtype).seconds

    low, high = 0.0, MOST_TURN
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) < step else (low, middle)
    return low


HALVINGS = 12


def _sources(machine: Machine, found: Measured, source: str) -> dict[str, str]:
    constants = [key for key in CONSTANTS if key not in ("reserve", "launch", "contention", "turn")]
    sources = dict.fromkeys([*constants, "measured"], source)
    held = f"{source}: what the process holds beside tensors"
    sources["reserve"] = held if found.device == "cpu" else f"{held}, and {FRAGMENTS:.0%} for fragmentation (estimate)"
    alone = source if found.messages else "estimate: one rank communicates with nobody"
    sources |= {"launch": alone, "contention": alone, "turn": alone if found.device == "cpu" else CARDS}
    for dtype, rate in machine.peak.items():
        sources[f"gemm.{dtype}"] = source
        sheet = found.advertised.get(dtype) == rate
        sources[f"peak.{dtype}"] = f"data sheet of {found.device}" if sheet else f"{source}: the fastest product"
    paths = [f"inside[{stride},{size}]" for stride, size in machine.inside] + ["between"] * bool(machine.between)
    return sources | {f"{path}.{name}": source for path in paths for name in LINK}


def fit_links(messages: Sequence[Message]) -> tuple[float, dict[Group, Link]]:
    """Seconds of a launch, and the link of each group."""
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
        # noise may leave nothing for the bytes: then the fastest message is what the link has shown
        seen = max(message.record.wire_bytes / message.seconds for message in messages if message.group == group)
        links[group] = Link(1 / per_byte if per_byte else seen, latency)
    return launch, links


def fit_products(timed: Sequence[Timed], peak: float) -> tuple[float, float]:
    """FLOP/s of a large product, at most the peak, and the smallest dim with which half of it is reached."""
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
    """The solution with the least sum of absolute errors, none of it negative: least squares, weighted again and again
    by what they leave."""
    solution = not_negative(rows, right)
    for _ in range(ROUNDS):
        errors = (rows @ torch.tensor(solution, dtype=rows.dtype) - right).abs()
        weights = errors.clamp(min=NO_ERROR).rsqrt()
        solution = not_negative(rows * weights[:, None], right * weights)
    return solution


ROUNDS, NO_ERROR = 50, 1e-4
"""Of weighting, and the relative error below which a message is met."""


def not_negative(rows: torch.Tensor, right: torch.Tensor) -> list[float]:
    """Least squares without what would become negative, the most negative first."""
    scale = rows.norm(dim=0)
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

"""What one collective, product or kernel takes on a machine, alone.

A collective is a ring: seconds = launch + latency of the hops + wire bytes / bandwidth, one pass for an all-gather or
a reduce-scatter, two for an all-reduce. An all-reduce may take a tree instead, 2 log2(ranks) hops and the whole
buffer both ways, where that is faster. Where a group lies decides its bandwidth: inside a node what was measured with
all groups active, across nodes the node's cards over the number of rings that cross there.

What happens when several run at once is for the simulator; `transfer` says what they share.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.planner.machine import ITEMSIZE, LinkSpeed, Machine, Timed

CARD = "card"
"""What all transfers that cross nodes share."""
NEAR = math.log(4)
"""In log space: as far from a measured product as this, the product and the formula weigh the same."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How the groups of an axis lie on nodes."""

    nodes: int
    """On which the most spread group lies."""
    members: int
    """The most that one group has on one node."""
    rings: int
    """The most groups that cross the boundary of one node; 0: none does."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective on its way, alone."""

    host: float
    """Seconds of its launch, where the host is what computes too; on a GPU they are part of what is fixed."""
    fixed: float
    """Seconds that it takes whatever the link does."""
    moving: float
    """Seconds that it has the link for."""
    link: str
    """What it moves on: those on `CARD` share it, those on an axis share that axis. Different axes inside a node share
    nothing beyond what their bandwidths were measured with."""
    beside: float
    """By which factor it is slower while the device computes all the time: it waits for its turn."""

    @property
    def seconds(self) -> float:
        return self.host + self.fixed + self.moving


@dataclass(frozen=True, slots=True)
class Route:
    """The way around an axis."""

    latency: float
    """Seconds of the hops of one pass, those between nodes with their own."""
    tree_latency: float
    """Seconds of the hops of an all-reduce up and down a tree."""
    bandwidth: float
    """Bytes a second that a rank sends while all groups of the axis are active."""
    crosses: bool
    rings: int
    """That share a node's cards; 0 inside a node."""


class Seconds:
    """Prices of work on a grid of this shape, whose rank r sits on node r // devices_per_node."""

    def __init__(self, machine: Machine, shape: Shape) -> None:
        if shape.world > machine.devices_per_node and machine.between is None:
            raise ValueError(
                f"the grid {shape} has {shape.world} ranks, but {machine.name} is one node of "
                f"{machine.devices_per_node} devices; add [between] to its file, or take a grid that fits"
            )
        self.machine, self.shape = machine, shape
        self._routes: dict[str, Route] = {}
        self._transfers: dict[tuple[str, str, int], Transfer] = {}

    def link(self, axis: str) -> Route:
        if axis not in self._routes:
            stride = 1
            for faster in self.shape.order[: self.shape.order.index(axis)]:
                stride *= self.shape.sizes[faster]
            self._routes[axis] = route_of(self.machine, stride, self.shape.sizes[axis], self.shape.world)
        return self._routes[axis]

    def collective(self, record: Collective) -> float:
        """From launch to arrival, with nothing else on the way."""
        return self.transfer(record).seconds

    def transfer(self, record: Collective) -> Transfer:
        key = (record.op, record.axis, record.nbytes)
        if key not in self._transfers:
            if record.ranks != self.shape.sizes[record.axis]:
                raise ValueError(f"{record} is of {record.ranks} ranks and not of the grid {self.shape}")
            self._transfers[key] = self._transfer(record)
        return self._transfers[key]

    def _transfer(self, record: Collective) -> Transfer:
        if record.ranks == 1:
            return Transfer(0.0, 0.0, 0.0, record.axis, 1.0)
        route, launch = self.link(record.axis), self.machine.launch
        host = launch if self.machine.device == "cpu" else 0.0
        passes = 2 if record.op == "all_reduce" else 1
        ring = (launch - host + passes * route.latency, record.wire_bytes / route.bandwidth)
        tree = (launch - host + route.tree_latency, 2 * record.nbytes / route.bandwidth)
        fixed, moving = min(ring, tree, key=sum) if record.op == "all_reduce" else ring
        turn = self.machine.turn
        beside = 1 + turn / (fixed + moving) if turn else 1.0
        return Transfer(host, fixed, moving, CARD if route.crosses else record.axis, beside)

    def product(self, m: int, k: int, n: int, dtype: str) -> float:
        """Of [m, k] x [k, n]."""
        return _product(self.machine, m, k, n, dtype)

    def attention(self, flops: Any, nbytes: Any, dtype: str) -> Any:
        """Return the seconds of an attention kernel, or of many where sizes are tensors."""
        rate = _gemm(self.machine, dtype) * self.machine.attention
        return with_host(self.machine, _larger(flops / rate, nbytes / self.machine.memory_bandwidth))

    def kernel(self, nbytes: Any) -> Any:
        """Return the seconds of work that memory bounds, by the bytes that it reads and writes, or of many."""
        return with_host(self.machine, nbytes / self.machine.memory_bandwidth)


def with_host(machine: Machine, seconds: Any) -> Any:
    """Return the seconds of a piece of work with what the host does for it; a number, or a tensor of numbers."""
    return seconds + machine.overhead if machine.device == "cpu" else _larger(seconds, machine.overhead)


def _larger(one: Any, other: Any) -> Any:
    """Return the larger of two numbers, or of each pair where the first is a tensor."""
    return torch.maximum(one, torch.as_tensor(other)) if isinstance(one, torch.Tensor) else max(one, other)


@lru_cache(maxsize=4096)
def route_of(machine: Machine, stride: int, size: int, world: int) -> Route:
    if size == 1:
        return Route(0.0, 0.0, math.inf, False, 0)
    spread = spread_of(stride, size, world, machine.devices_per_node)
    if not spread.rings or machine.between is None:
        link = inside_link(machine, stride, size)
        deep = math.ceil(math.log2(size))
        return Route((size - 1) * link.latency, 2 * deep * link.latency, link.bandwidth, False, 0)
    between, near = machine.between, size - spread.nodes  # hops inside nodes, in the whole round
    bandwidth, hop = between.bandwidth / spread.rings, 0.0
    if near:
        inner = inside_link(machine, stride, spread.members)
        bandwidth, hop = min(bandwidth, inner.bandwidth), inner.latency
    # a pass leaves one hop of the round out; the slowest part waits for all but the cheapest
    latency = spread.nodes * between.latency + near * hop - (min(hop, between.latency) if near else between.latency)
    deep, wide = math.ceil(math.log2(spread.members)), math.ceil(math.log2(spread.nodes))
    return Route(latency, 2 * (deep * hop + wide * between.latency), bandwidth, crosses=True, rings=spread.rings)


def inside_link(machine: Machine, stride: int, size: int) -> LinkSpeed:
    """The measured one, else that of the nearest group, of the same stride where there is any."""

    def distance(group: tuple[int, int]) -> tuple[bool, float, tuple[int, int]]:
        return group[0] != stride, math.hypot(math.log(group[0] / stride), math.log(group[1] / size)), group

    return machine.inside[min(machine.inside, key=distance)]


@lru_cache(maxsize=4096)
def spread_of(stride: int, size: int, world: int, per_node: int) -> Spread:
    """Where the groups lie whose ranks are base, base + stride, ...; rank r sits on node r // per_node.

    Ranks rise along a group, so it visits each of its nodes once: its ring enters and leaves each of them once.
    """
    block = stride * size
    if world <= per_node or per_node % block == 0:
        return Spread(1, size, 0)
    if stride % per_node == 0:
        return Spread(size, 1, per_node)
    if per_node % stride == 0 and block % per_node == 0:
        return Spread(block // per_node, per_node // stride, stride)
    return count_spread(stride, size, world, per_node)


def count_spread(stride: int, size: int, world: int, per_node: int) -> Spread:
    """The same for any sizes, rank by rank, until the pattern repeats."""
    block = stride * size
    members: Counter[tuple[int, int, int]] = Counter()
    nodes: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for rank in range(min(world, math.lcm(block, per_node))):
        group, node = (rank // block, rank % stride), rank // per_node
        members[*group, node] += 1
        nodes[group].add(node)
    crossing = Counter(node for visited in nodes.values() if len(visited) > 1 for node in visited)
    return Spread(max(map(len, nodes.values())), max(members.values()), max(crossing.values(), default=0))


def _gemm(machine: Machine, dtype: str) -> float:
    if dtype not in machine.gemm:
        raise ValueError(
            f"{machine.name} has no FLOP/s for {dtype}, it has them for {', '.join(machine.gemm)}; add peak.{dtype} "
            f"and gemm.{dtype} to its file, or compute in one of these"
        )
    return machine.gemm[dtype]


@lru_cache(maxsize=1 << 16)
def _product(machine: Machine, m: int, k: int, n: int, dtype: str) -> float:
    seconds = formula_seconds(machine, m, k, n, dtype)
    if min(m, k, n) > 0 and machine.measured:
        seconds *= math.exp(_correction(machine, m, k, n, dtype))
    return with_host(machine, seconds)


def formula_seconds(machine: Machine, m: int, k: int, n: int, dtype: str) -> float:
    """By the smallest dim and by the bytes, without the host."""
    least = min(m, k, n)
    rate = _gemm(machine, dtype) * least / (least + machine.gemm_half) if least else math.inf
    nbytes = ITEMSIZE[dtype] * (m * k + k * n + m * n)
    return max(2 * m * k * n / rate, nbytes / machine.memory_bandwidth)


def _correction(machine: Machine, m: int, k: int, n: int, dtype: str) -> float:
    """Log of measured / formula, interpolated between measured products by their distance in log space.

    A measured product gets exactly its seconds; far from all of them the formula holds.
    """
    weights, total = 1 / NEAR**2, 0.0
    for one, error in _errors(machine):
        if one.dtype == dtype:
            apart = math.log(m / one.m) ** 2 + math.log(k / one.k) ** 2 + math.log(n / one.n) ** 2
            if apart == 0:
                return error
            weights += 1 / apart
            total += error / apart
    return total / weights


@lru_cache(maxsize=64)
def _errors(machine: Machine) -> list[tuple[Timed, float]]:
    return [
        (one, math.log(one.seconds / formula_seconds(machine, one.m, one.k, one.n, one.dtype)))
        for one in machine.measured
    ]

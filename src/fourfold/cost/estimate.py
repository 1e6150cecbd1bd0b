"""Seconds of many candidates at once, roughly: to decide which of them are worth a simulation.

A cell is a grid, an activation mode and a number of rows; levers are what is kept and what is done again; orders are
how ranks walk the axes. What a layer computes and sends is summed up for each cell from its leading terms, then all
cells, levers and orders are priced together as tensors:

    forward   max(compute, messages over x and y, gathers over z, what shares the cards)
    backward  the same, with products that run again and reductions over z

where halves do not take turns, messages over x and y stand between products instead of beside them. What gradients owe
over data hides behind the last backward. The simulation of program.py has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from fourfold.axes import AXES
from fourfold.cost.machine import Machine
from fourfold.cost.price import Choice, Task
from fourfold.cost.seconds import Seconds, route_of
from fourfold.policy import Policy, Recompute

FORWARD, BACKWARD, REREAD, REGATHER, AGAIN, STEP = range(6)
"""Parts of a step: the last is once a step, the others once a micro-step. REREAD is left out where gathered inputs are
kept, REGATHER where weights are, AGAIN without block recompute."""


class Lever(NamedTuple):
    """What trades memory for time."""

    recompute: Recompute
    keep_gathered: bool
    keep_weights: bool

    def on(self, policy: Policy) -> Policy:
        return replace(policy, **self._asdict())


LEVERS = [Lever(*lever) for lever in product(get_args(Recompute), (False, True), (False, True))]


@dataclass(slots=True)
class Wires:
    """Messages of one part over one axis: passes around a ring, all-reduces, and bytes that a rank sends."""

    rings: float = 0.0
    sums: float = 0.0
    nbytes: float = 0.0

    def ring(self, nbytes: float, ranks: int, times: float = 1.0) -> None:
        self.rings += times if ranks > 1 else 0.0
        self.nbytes += times * nbytes * (ranks - 1) / ranks

    def sum(self, nbytes: float, ranks: int, times: float = 1.0) -> None:
        self.sums += times if ranks > 1 else 0.0
        self.nbytes += times * 2 * nbytes * (ranks - 1) / ranks


class Cell:
    """A grid in any order, a mode, and rows of a place: what a step sends and computes, in leading terms."""

    def __init__(self, task: Task, choice: Choice, seconds: Seconds) -> None:
        self.task, self.choice, self.seconds = task, choice, seconds
        self.volume = choice.volume(task)
        self.halves = len(self.volume.halves())
        self.wires = {part: {axis: Wires() for axis in AXES} for part in range(STEP + 1)}
        self.compute = [0.0] * (STEP + 1)
        self.attention_again = 0.0
        self._layers()
        self._ends()
        self._once()

    def _layers(self) -> None:
        v, config = self.volume, self.task.config
        gated = 2 if config.mlp == "swiglu" else 1
        mlp = config.mlp_hidden // v.shape.x
        self._over_x()
        self._over_y([v.q + 2 * v.kv, gated * mlp], [v.q, mlp])
        weights = [(v.q + 2 * v.kv) * v.k, v.q * v.k, gated * mlp * v.k, mlp * v.k]
        self._over_z(weights)
        self._compute_layers(v.m / self.halves, weights, config.layers * self.halves)

    def _over_x(self) -> None:
        """Into and out of two sublayers, half by half."""
        v, x, times = self.volume, self.volume.shape.x, self.task.config.layers * self.halves
        stream = v.m_padded * v.k * v.compute_itemsize / self.halves
        if v.sharded:
            for part, messages in ((FORWARD, 4), (BACKWARD, 4), (REREAD, 2), (AGAIN, 3)):
                self.wires[part]["x"].ring(stream, x, messages * times)
        else:
            for part, messages in ((FORWARD, 2), (BACKWARD, 2), (AGAIN, 1)):
                self.wires[part]["x"].sum(stream, x, messages * times)

    def _over_y(self, spread: Sequence[int], collected: Sequence[int]) -> None:
        """What products of these widths give and read, and the statistics of norms."""
        v, y, times = self.volume, self.volume.shape.y, self.task.config.layers * self.halves
        column = v.m / self.halves * v.compute_itemsize
        both = [*spread, *collected]
        if v.sharded:
            for part, widths in ((FORWARD, both), (BACKWARD, both), (AGAIN, both), (REREAD, collected)):
                self.wires[part]["y"].ring(column * sum(widths) / len(widths), y, len(widths) * times)
        else:
            for part, widths in ((FORWARD, spread), (AGAIN, spread), (BACKWARD, collected)):
                self.wires[part]["y"].sum(column * sum(widths) / len(widths), y, len(widths) * times)
        for part in (FORWARD, BACKWARD, AGAIN):
            self.wires[part]["y"].sum(v.m_rest / self.halves * v.wide, y, 2 * times)

    def _over_z(self, weights: Sequence[int]) -> None:
        """Weights of a layer, and those of its norms."""
        v, z, layers = self.volume, self.volume.shape.z, self.task.config.layers
        mean = sum(weights) / len(weights)
        for part in (FORWARD, REGATHER, AGAIN):
            self.wires[part]["z"].ring(mean * v.compute_itemsize, z, len(weights) * layers)
        self.wires[BACKWARD]["z"].ring(mean * v.reduce_itemsize, z, len(weights) * layers)
        for part, messages in ((FORWARD, 2), (AGAIN, 2), (BACKWARD, 4)):
            self.wires[part]["z"].ring(v.k * v.compute_itemsize, z, messages * layers)

    def _compute_layers(self, tokens: float, weights: Sequence[int], times: int) -> None:
        v, config, price, dtype = self.volume, self.task.config, self.seconds, self.task.dtype
        k, item, m = v.k, v.compute_itemsize, int(tokens)
        one, back = 0.0, 0.0
        for elements, contracts in zip(weights, (False, True, False, True), strict=True):
            inner, outer = (elements // k, k) if contracts else (k, elements // k)
            one += price.product(m, inner, outer, dtype)
            back += price.product(m, outer, inner, dtype) + price.product(outer, m, inner, dtype)
        cut = v.shape.y if v.sharded else 1
        q = m * v.q // cut
        flops, nbytes = 2 * q * v.seq, 2 * q * item * 2
        mix = price.attention(flops, nbytes, dtype)
        passes = 8 * v.m_rest / self.halves * k + 3 * m * (config.mlp_hidden // v.shape.x) // cut
        turned = 4 * q if config.positions == "rope" else 0
        kernels = price.kernel((passes + turned) * item)
        self.compute[FORWARD] += times * (one + mix + kernels)
        self.compute[BACKWARD] += times * (back + price.attention(2 * flops, 2 * nbytes, dtype) + 1.5 * kernels)
        self.compute[AGAIN] += times * (one + mix + kernels)
        self.attention_again = times * (mix + price.kernel(turned * item))
        if self.volume.dtype.itemsize != item:
            cast = config.layers * price.kernel(sum(weights) // v.shape.z * (item + self.volume.dtype.itemsize))
            for part in (FORWARD, REGATHER, AGAIN):
                self.compute[part] += cast

    def _ends(self) -> None:
        """Embedding, head and loss."""
        v, wires, price, dtype = self.volume, self.wires, self.seconds, self.task.dtype
        x, y, z, _ = v.shape.sizes.values()
        item, k, columns = v.compute_itemsize, v.k, v.vocab_columns
        for part in (FORWARD, BACKWARD):
            wires[part]["x"].ring(v.m_padded * k * item, x, 2)
            wires[part]["y"].ring(v.m * columns * item, y)
            wires[part]["z"].ring(v.vocab_rows * k * (item if part == FORWARD else v.reduce_itemsize), z, 2)
        wires[REGATHER]["z"].ring(v.vocab_rows * k * item, z)
        if v.sharded:
            wires[REREAD]["x"].ring(v.m_padded * k * item, x)
        logits = v.m * columns * item / (y if v.sharded else 1)
        self.compute[FORWARD] += price.product(v.m, k, columns, dtype) + price.kernel(logits)
        self.compute[BACKWARD] += price.product(v.m, columns, k, dtype) + price.product(columns, v.m, k, dtype)
        self.compute[BACKWARD] += price.kernel(2 * logits)

    def _once(self) -> None:
        """What gradients owe over data, and the optimizer."""
        v, task = self.volume, self.task
        data = v.shape.data
        shard = task.config.parameters / (v.shape.x * v.shape.y * v.shape.z) * v.dtype.itemsize
        self.wires[STEP]["data"].sum(shard, data)
        self.compute[STEP] = self.seconds.kernel(8 * shard / (data if v.policy.shard_optimizer else 1))


class Estimates:
    """Seconds of every cell, lever and order: `seconds[cell, lever, order]`."""

    def __init__(self, task: Task, cells: Sequence[Cell], orders: Sequence[tuple[str, ...]]) -> None:
        self.task, self.cells, self.orders = task, cells, orders
        machine = task.machine
        shapes: dict[tuple[int, ...], int] = {}
        places = [shapes.setdefault(tuple(cell.choice.shape.sizes.values()), len(shapes)) for cell in cells]
        routes = [[_routes(machine, sizes, order) for order in orders] for sizes in shapes]
        table = torch.tensor(routes, dtype=torch.float64)[places]  # [cell, order, axis, 4]
        latency, tree, bandwidth, self.crosses = table.unbind(-1)
        wires = torch.tensor(
            [
                [[(w.rings, w.sums, w.nbytes) for w in cell.wires[part].values()] for part in range(STEP + 1)]
                for cell in cells
            ],
            dtype=torch.float64,
        )  # [cell, part, axis, 3]
        rings, sums, nbytes = wires[:, :, None].unbind(-1)  # [cell, part, 1, axis]
        self.link = (
            rings * (machine.launch + latency[:, None])
            + sums * (machine.launch + tree[:, None])
            + nbytes / bandwidth[:, None]
        )  # [cell, part, order, axis]
        self.compute = torch.tensor([cell.compute for cell in cells], dtype=torch.float64)  # [cell, part]
        self.attention_again = torch.tensor([cell.attention_again for cell in cells], dtype=torch.float64)
        self.turns = torch.tensor([cell.halves > 1 for cell in cells])
        self.micro_steps = torch.tensor([cell.choice.micro_steps for cell in cells], dtype=torch.float64)
        self.seconds = torch.stack([self._price(lever) for lever in LEVERS], dim=1)

    def _price(self, lever: Lever) -> Tensor:
        """[cell, order]"""
        again = lever.recompute == "block"
        link = self.link
        backward = link[:, BACKWARD].clone()
        compute = self.compute[:, BACKWARD].clone()
        if not lever.keep_gathered:
            backward += link[:, REREAD]
        if not lever.keep_weights:
            backward += link[:, REGATHER]
            compute += self.compute[:, REGATHER]
        if again:
            backward += link[:, AGAIN]
            compute += self.compute[:, AGAIN]
        if lever.recompute == "attention":
            compute += self.attention_again
        chain = self.compute[:, BACKWARD] / 2 + (compute - self.compute[:, BACKWARD])
        forward_seconds = self._phase(link[:, FORWARD], self.compute[:, FORWARD], self.compute[:, FORWARD])
        backward_seconds = self._phase(backward, compute, chain)
        data = link[:, STEP].sum(-1)
        exposed = (data - 0.9 * backward_seconds).clamp(min=0.0)
        micro_steps = self.micro_steps[:, None] * (forward_seconds + backward_seconds)
        return micro_steps + exposed + self.compute[:, STEP, None]

    def _phase(self, link: Tensor, compute: Tensor, chain: Tensor) -> Tensor:
        """[cell, order] of one pass with these messages [cell, order, axis]; `chain` is the computation that messages
        over x and y stand between where halves do not take turns."""
        beside = link[..., :2].sum(-1)
        cards = (link * self.crosses).sum(-1)
        slowed = compute[:, None] * torch.where(link.sum(-1) > 0, self.task.machine.contention, 1.0)
        serial = torch.where(self.turns[:, None], beside, beside + chain[:, None])
        return torch.stack([slowed, serial, link[..., 2], cards]).amax(0) + 0.02 * (beside + link[..., 2])


def _routes(machine: Machine, sizes: Sequence[int], order: Sequence[str]) -> list[tuple[float, float, float, float]]:
    """Of each axis: latency of a ring, of an all-reduce, bandwidth, and whether it crosses nodes."""
    by_axis, world, stride = dict(zip(AXES, sizes, strict=True)), prod(sizes), 1
    found = {}
    for axis in order:
        link = route_of(machine, stride, by_axis[axis], world)
        found[axis] = link.latency, min(2 * link.latency, link.tree_latency), link.bandwidth, float(link.crosses)
        stride *= by_axis[axis]
    return [found[axis] for axis in AXES]

"""Rough seconds of many candidates at once, to decide which of them are worth a simulation.

A cell is a grid in any rank order, an activation mode and a number of rows. A lever says which tensors are kept and
which work is done twice; an order says in which order ranks go along the axes. The work of a cell is read from the
programs of two layers and of embedding, head and loss (step_program.py), which are rehearsed once per structure. Then
all cells, levers and orders are priced together as tensors:

    forward   max(compute, the host, messages over x and y, gathers over z, everything that shares the network cards)
    backward  the same, with products that run again and reductions over z

If halves do not take turns, messages over x and y run between products instead of during them. The sums of gradients
over data are hidden behind the last backward. The simulation (simulate.py) decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import inf, prod
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from fourfold.axes import AXES, CONTEXT, CUTS, FOLD_SIZES, MESSAGE_AXES, PIPE, REPLICAS
from fourfold.models.config import ModelConfig
from fourfold.planner.machine import Machine, route_of
from fourfold.planner.memory import REHEARSED_LAYERS
from fourfold.planner.parameters import kinds_of_layers
from fourfold.planner.pipe import CHUNKS, head_in_layers, rough_stages
from fourfold.planner.price import Candidate, Task
from fourfold.planner.program import AttentionOp, ElementwiseOp, LaunchOp, MatmulOp, Program
from fourfold.planner.size_names import SizeMatrix, Term
from fourfold.planner.sizes import LocalSizes, Structure, structure_of_ends, structure_of_kind, structure_of_layers
from fourfold.planner.step_program import ends_program, layers_program
from fourfold.policy import Policy, Recompute
from fourfold.shape import Shape

PARTS = ("forward", "backward", "reread", "regather", "again", "attention")
"""Parts of a micro-step. `reread` is left out if gathered inputs are kept, `regather` if weights are kept. `again` is
the work that block recompute runs a second time, except the inside of attention, which is `attention`."""
FORWARD, BACKWARD, REREAD, REGATHER, AGAIN, ATTENTION = range(len(PARTS))
HIDDEN_BY_BACKWARD = 0.9
"""The share of the last backward that can hide sums over data: the first gradients come a little after it begins."""
NEVER_HIDDEN = 0.02
"""The share of messages that is always exposed: nothing runs during the first and the last ones."""


ONE = -1
"""Stands for the size of what is always one."""
SENT_ALONG = (*CUTS, CONTEXT, *FOLD_SIZES)
"""What the messages of a stage go along."""
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""The kinds of recompute; the later in this list, the less memory a step needs."""


class Lever(NamedTuple):
    """The fields of a policy that trade memory for time."""

    recompute: Recompute
    keep_gathered: bool
    keep_weights: bool

    @classmethod
    def of(cls, policy: Policy) -> Lever:
        return cls(*(getattr(policy, field) for field in cls._fields))

    def on(self, policy: Policy) -> Policy:
        return _with_lever(policy, self)

    def compare_computation(self, other: Lever) -> str:
        """Describe how the two differ in what they compute twice; empty if they do not."""
        return "" if self.recompute == other.recompute else f"recompute={self.recompute} against {other.recompute}"

    @property
    def compute_twice(self) -> str:
        """What backward computes again; empty if nothing."""
        return "" if self.recompute == "none" else self.recompute

    def lavish(self) -> Lever:
        """Return the same lever with nothing computed twice."""
        return self._replace(recompute="none")

    def frugal(self) -> Lever:
        """Return the same recompute with nothing else kept."""
        return Lever(self.recompute, keep_gathered=False, keep_weights=False)

    def needs_no_less(self, other: Lever) -> bool:
        """Return whether this lever needs at least the memory of the other one."""
        return (
            RECOMPUTE.index(self.recompute) <= RECOMPUTE.index(other.recompute)
            and self.keep_gathered >= other.keep_gathered
            and self.keep_weights >= other.keep_weights
        )

    @property
    def parts(self) -> list[int]:
        """The parts that backward consists of."""
        again = {"none": [], "attention": [ATTENTION], "block": [AGAIN, ATTENTION]}[self.recompute]
        rereads = [] if self.keep_gathered else [REREAD]
        return [BACKWARD, *rereads, *([] if self.keep_weights else [REGATHER]), *again]


@lru_cache(maxsize=4096)
def _with_lever(policy: Policy, lever: Lever) -> Policy:
    return replace(policy, **lever._asdict())


LEVERS = [Lever(*lever) for lever in product(RECOMPUTE, (False, True), (False, True))]
FRUGAL = Lever(RECOMPUTE[-1], keep_gathered=False, keep_weights=False)
"""The lever that needs the least memory."""


# --- the work of a structure


class ProgramWork:
    """The work of one program: for each piece the part of the micro-step and the rows of its sizes."""

    def __init__(self, program: Program, matrix: SizeMatrix) -> None:
        self.products: list[tuple[int, int, int, int, int]] = []
        """Part, m, k, n, and the number of experts that have a product each, or ONE."""
        self.sent: list[bool] = []
        """Whether tokens were sent to the experts of each product."""
        self.wgrads: list[bool] = []
        """Whether each product makes dw, which no message waits for."""
        self.attention: list[tuple[int, int, int]] = []
        """Part, FLOPs, bytes."""
        self.kernels: list[tuple[int, int]] = []
        """Part, bytes."""
        self.fused: list[tuple[int, int]] = []
        """The same of kernels that compiling makes of several."""
        self.messages: list[tuple[int, int, int, int]] = []
        """Part, axis, passes around the ring (0: to others directly), bytes."""
        ends = [*(start for start, _ in program.phases[1:]), len(program.work)]
        for (start, name), end in zip(program.phases, ends, strict=True):
            part = PARTS.index(name)
            for item in program.work[start:end]:
                if isinstance(item, MatmulOp):
                    parts = matrix.row_of(item.parts) if isinstance(item.parts, Term) else ONE
                    rows = matrix.row_of(item.m), matrix.row_of(item.k), matrix.row_of(item.n)
                    self.products.append((part, *rows, parts))
                    self.wgrads.append(item.is_wgrad)
                    self.sent.append(item.sent)
                elif isinstance(item, AttentionOp):
                    self.attention.append((part, matrix.row_of(item.flops), matrix.row_of(item.nbytes)))
                elif isinstance(item, ElementwiseOp):
                    (self.fused if item.fused else self.kernels).append((part, matrix.row_of(item.nbytes)))
                elif isinstance(item, LaunchOp) and isinstance(item.record.nbytes, Term):
                    record = item.record
                    whole = record.op == "all_to_all"  # its bytes are those that are sent
                    passes = 0 if whole else 2 if record.op == "all_reduce" else 1
                    row = matrix.row_of(record.sent if whole else record.nbytes)
                    self.messages.append((part, SENT_ALONG.index(record.axis), passes, row))


class WorkForm:
    """The work of layers of each kind, and of embedding, head and loss, with names instead of sizes."""

    def __init__(self, kinds: tuple[bool, ...], layers: Structure, ends: Structure) -> None:
        """`kinds` says whether layers are mixtures of experts, once for each kind that there is."""
        self.sizes = SizeMatrix()
        self.layers = [
            ProgramWork(layers_program(structure_of_kind(layers, kind), REHEARSED_LAYERS, False), self.sizes)
            for kind in kinds
        ]
        self.ends = ProgramWork(ends_program(ends, True, True, False), self.sizes)


work_form = lru_cache(maxsize=1024)(WorkForm)


# --- cells


class Cells:
    """The messages and the computation of a micro-step of many cells."""

    def __init__(self, task: Task, candidates: Sequence[Candidate], sizes: Sequence[LocalSizes] | None = None) -> None:
        self.task, self.candidates = task, candidates
        self.sizes = [candidate.sizes(task) for candidate in candidates] if sizes is None else sizes
        number, parts, axes = len(candidates), len(PARTS), len(SENT_ALONG)
        self.rings, self.sums, self.nbytes = torch.zeros(3, number, parts, axes, dtype=torch.float64)
        """Messages of each cell by part and axis, and bytes that a rank could send meanwhile: [cell, part, axis]."""
        self.compute = torch.zeros(number, parts, dtype=torch.float64)
        """Seconds of computation by part: [cell, part]."""
        self.chain = torch.zeros(number, parts, dtype=torch.float64)
        """The same without the products of dw, which no message waits for: [cell, part]."""
        self.items = torch.zeros(number, parts, dtype=torch.float64)
        """The items that the host issues by part: [cell, part]."""
        busiest = {pipe: _busiest_stage(task, pipe) for pipe in {one.shape.pipe for one in candidates}}
        stages = torch.tensor([busiest[one.shape.pipe] for one in candidates], dtype=torch.float64).T
        *self.layers, self.ends = stages
        """The layers of the busiest stage of each kind, and whether it has the head: [cell]."""
        kinds = tuple(kinds_of_layers(task.config))
        by_form: dict[WorkForm, list[int]] = {}
        for index, one in enumerate(self.sizes):
            # block recompute without chunks has every part that any lever may need
            layers = structure_of_layers(one.structure, "block", chunks_mlp=False)
            ends = structure_of_ends(one.structure, chunked=False)
            by_form.setdefault(work_form(kinds, layers, ends), []).append(index)
        for form, cells in by_form.items():
            self._read(form, cells)
        self._once()

    def _read(self, form: WorkForm, cells: list[int]) -> None:
        found = [self.sizes[index] for index in cells]
        sizes = form.sizes.values_of_many(found)  # [size, cell]
        ranks = torch.tensor(
            [[one.shape.group_sizes[axis] for one in found] for axis in SENT_ALONG], dtype=torch.float64
        )
        of_layers = [each[cells] / REHEARSED_LAYERS for each in self.layers]
        for work, times in (*zip(form.layers, of_layers, strict=True), (form.ends, self.ends[cells])):
            if work.messages:
                parts, axes, passes, rows = torch.tensor(work.messages).T
                places, twice = parts * len(SENT_ALONG) + axes, passes == 2
                self._add(self.rings, cells, places, times * (~twice)[:, None].double().expand(-1, len(cells)))
                self._add(self.sums, cells, places, times * twice[:, None].double().expand(-1, len(cells)))
                around = passes[:, None] * (ranks - 1)[axes] / ranks[axes]
                direct = 1 / self.task.machine.all_to_all
                sent = sizes[rows] * torch.where(passes[:, None] > 0, around, direct)
                self._add(self.nbytes, cells, places, times * sent)
            self._compute(work, times, sizes, cells)
            pieces = (*work.products, *work.attention, *work.kernels, *work.fused, *work.messages)
            issued = [part for part, *_ in pieces]
            self._add(self.items, cells, torch.tensor(issued), times.expand(len(issued), -1))

    def _compute(self, work: ProgramWork, times: Tensor, sizes: Tensor, cells: list[int]) -> None:
        prices, dtype = self.task.seconds_on(self.candidates[cells[0]]), self.task.dtype
        whole = sizes.long().tolist()
        known: dict[tuple[Any, ...], list[float]] = {}
        for (_, *rows, parts), is_wgrad, sent in zip(work.products, work.wgrads, work.sent, strict=True):
            if (shape := (*rows, parts, is_wgrad and parts != ONE)) not in known:
                experts = [1] * len(cells) if parts == ONE else whole[parts]
                shapes = zip(*(whole[row] for row in rows), experts, strict=True)
                # most products have the shape of another one, and pricing them is not vectorised
                known[shape] = [
                    prices.products(m, k, n, dtype, parts=number, is_wgrad=is_wgrad, sent=sent)
                    for m, k, n, number in shapes
                ]
        seconds = [
            known[*rows, parts, is_wgrad and parts != ONE]
            for (_, *rows, parts), is_wgrad in zip(work.products, work.wgrads, strict=True)
        ]
        products = torch.tensor(seconds, dtype=torch.float64)
        parts = torch.tensor([part for part, *_ in work.products])
        self._add(self.compute, cells, parts, times * products)
        self._add(self.chain, cells, parts, times * products * ~torch.tensor(work.wgrads)[:, None])
        for pieces, price in (
            (work.attention, lambda flops, nbytes: prices.attention(flops, nbytes, dtype)),
            (work.kernels, prices.kernel),
            (work.fused, prices.fused),
        ):
            if pieces:
                parts, *rows = torch.tensor(pieces).T
                seconds = price(*(sizes[row] for row in rows))
                self._add(self.compute, cells, parts, times * seconds)
                self._add(self.chain, cells, parts, times * seconds)

    def _add(self, total: Tensor, cells: list[int], places: Tensor, values: Tensor) -> None:
        """Add values [piece, cell] to the total [cell, place ...] at the place of each piece."""
        found = torch.zeros(total[0].numel(), len(cells), dtype=torch.float64).index_add_(0, places, values)
        total[cells] += found.T.view(len(cells), *total.shape[1:])

    def _once(self) -> None:
        """Add the work of a step that is done once: summing gradients over data, and the optimizer step."""
        prices = self.task.seconds_on(self.candidates[0])
        shards = torch.tensor([sizes.parameter_nbytes for sizes in self.sizes], dtype=torch.float64)
        experts = [one.expert_shard(one.held.layers) * one.dtype.itemsize for one in self.sizes]
        of_axis = torch.tensor([experts, experts], dtype=torch.float64)
        of_axis[0] = shards - of_axis[0]
        ranks = [[sizes.shape.cuts[axis] for sizes in self.sizes] for axis in REPLICAS]
        replicas = torch.tensor(ranks, dtype=torch.float64)
        own = [sizes.replica_share if sizes.policy.shard_optimizer else 1.0 for sizes in self.sizes]
        # an all-reduce, or a reduce-scatter and the gather of a sharded optimizer: both send every byte twice
        self.step_nbytes = 2 * of_axis * (replicas - 1) / replicas
        """Bytes that a rank sends over each axis of replicas: [axis, cell]."""
        self.optimizer = prices.kernel(8 * shards * torch.tensor(own, dtype=torch.float64))


class Estimates:
    """Seconds of every cell, lever and order: `seconds[cell, lever, order]`."""

    def __init__(self, task: Task, cells: Cells, orders: Sequence[tuple[str, ...]]) -> None:
        self.task, machine = task, task.machine
        shapes: dict[tuple[int, ...], int] = {}
        places = [shapes.setdefault(tuple(one.shape.named.values()), len(shapes)) for one in cells.candidates]
        links = _Links(machine)
        routes = [[links.of_axes(named, order) for order in orders] for named in shapes]
        table = torch.tensor(routes, dtype=torch.float64)[places]  # [cell, order, axis, 4]
        *along_pipe, _ = table[:, :, AXES.index(PIPE)].unbind(-1)
        along = [MESSAGE_AXES.index(axis) for axis in SENT_ALONG]
        latency, tree, bandwidth, self.crosses = table[:, :, along].unbind(-1)
        rings, sums, nbytes = (each[:, :, None] for each in (cells.rings, cells.sums, cells.nbytes))
        over_replicas = table[:, :, [MESSAGE_AXES.index(axis) for axis in REPLICAS]]  # [cell, order, axis, 4]
        self.link = (
            rings * (machine.launch + latency[:, None])
            + sums * (machine.launch + tree[:, None])
            + nbytes / bandwidth[:, None]
        )  # [cell, part, order, axis]
        sent = cells.step_nbytes.T[:, None]  # [cell, 1, axis]
        _, tree, bandwidth, _ = over_replicas.unbind(-1)
        self.data = ((sent > 0) * (machine.launch + tree) + sent / bandwidth).sum(-1)
        self.compute, self.chain, self.optimizer = cells.compute, cells.chain, cells.optimizer
        # on the CPU the host's time is part of what it computes
        late = [machine.host_in(task.host_mode(one.policy, one.shape)).item for one in cells.candidates]
        per_item = torch.tensor(late, dtype=torch.float64)[:, None] * (machine.device != "cpu")
        self.host = cells.items * per_item  # [cell, part]
        self.turns = torch.tensor([sizes.number_of_halves > 1 for sizes in cells.sizes])
        self.micro_steps = torch.tensor([one.micro_steps for one in cells.candidates], dtype=torch.float64)
        self.forward = self._phase([FORWARD])
        self.bubble = self._bubble(cells, *along_pipe)
        self.seconds = torch.stack([self._price(lever) for lever in LEVERS], dim=1)

    def _price(self, lever: Lever) -> Tensor:
        """Return the seconds of each cell and order: [cell, order]."""
        backward = self._phase(lever.parts)
        exposed = (self.data - HIDDEN_BY_BACKWARD * backward).clamp(min=0.0)
        work = self.micro_steps[:, None] * (self.forward + backward)
        return work + self.bubble + exposed + self.optimizer[:, None]

    def _bubble(self, cells: Cells, latency: Tensor, _: Tensor, bandwidth: Tensor) -> Tensor:
        """Return how long the busiest pipe rank waits for others, with the best number of chunks: [cell, order].

        A schedule with v chunks can come down to (P - 1) F / v (E11); a micro-batch passes every border of stages
        twice.
        """
        pipe = torch.tensor([one.shape.pipe for one in cells.candidates], dtype=torch.float64)[:, None]
        nbytes = torch.tensor([sizes.rest_nbytes for sizes in cells.sizes], dtype=torch.float64)[:, None]
        hop = self.task.machine.launch + latency / (pipe - 1).clamp(min=1) + nbytes / bandwidth
        layers = self.task.config.layers
        found = [
            torch.where(
                pipe * chunks <= (layers if chunks > 1 else torch.inf),
                (pipe - 1) * self.forward / chunks + 2 * (pipe * chunks - 1) * hop,
                torch.inf,
            )
            for chunks in CHUNKS
        ]
        return torch.stack(found).amin(0) * (pipe > 1)

    def _phase(self, parts: list[int]) -> Tensor:
        """Return the seconds of one pass that consists of these parts: [cell, order]."""
        link, compute, chain = self.link[:, parts].sum(1), self.compute[:, parts].sum(1), self.chain[:, parts].sum(1)
        beside = link[..., [SENT_ALONG.index(axis) for axis in ("x", "y", "expert", "ex")]].sum(-1)
        gathers = link[..., [SENT_ALONG.index(axis) for axis in ("z", "ez", CONTEXT)]].sum(-1)
        cards = (link * self.crosses).sum(-1)  # axes that cross nodes share the network cards
        inside = link * (1 - self.crosses)
        alone = inside.amax(-1)  # axes inside a node share links as far as the machine says
        nodes = alone + self.task.machine.sharing * (inside.sum(-1) - alone)
        # products slow down while something is in flight
        contention = self.task.machine.contention
        slowed = compute[:, None] + (1 - 1 / contention) * torch.minimum(link.sum(-1), contention * compute[:, None])
        # without halves that take turns, products of dw are all that runs during messages over x and y
        serial = torch.where(self.turns[:, None], beside, beside + chain[:, None])
        host = self.host[:, parts].sum(1)[:, None].expand_as(slowed)
        return torch.stack([slowed, serial, gathers, cards, nodes, host]).amax(0) + NEVER_HIDDEN * (beside + gathers)


def _busiest_stage(task: Task, pipe: int) -> list[float]:
    """Return the layers of each kind of the busiest stage of so many pipe ranks, and 1.0 if it has the head, else 0.0.

    All layers are taken to be equal: a mixture of experts has few others.
    """
    config = task.config
    if pipe == 1:
        return [*_by_kind(config, range(config.layers)), 1.0]
    stages, head = rough_stages(config, pipe, task.seq), head_in_layers(config, task.seq)
    layers = [len(stages.layers_of(stage)) for stage in range(pipe)]
    last = layers[-1] + head >= max(layers)
    stage = pipe - 1 if last else layers.index(max(layers))
    return [*_by_kind(config, stages.layers_of(stage)), float(last)]


def _by_kind(config: ModelConfig, layers: range) -> list[float]:
    """Return how many of the layers are of each kind that the model has."""
    kinds = [config.is_mixture(index) for index in layers]
    return [float(kinds.count(kind)) for kind in kinds_of_layers(config)]


class _Links:
    """The links of a machine as numbers: latency of a ring, of an all-reduce, bandwidth, whether it crosses nodes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._known: dict[tuple[int, int, int], LinkNumbers] = {}

    def of_axes(self, named: Sequence[int], order: Sequence[str]) -> list[LinkNumbers]:
        """Return the link of everything that messages go along, on a grid with these sizes (the values of
        `Shape.named`) whose ranks walk the axes in this order."""
        sizes, (context, *fold) = named[: len(AXES)], named[len(AXES) :]
        world, stride = prod(sizes), 1
        found = [NO_LINK] * len(MESSAGE_AXES)
        for axis in order if PIPE in order else (*order, PIPE):
            place = AXES.index(axis)
            if (size := sizes[place]) > 1:
                found[place] = self._link(stride, size, world)
                stride *= size
        if context > 1 or max(fold) > 1:
            shape = Shape(*sizes, order=order, context=context).with_fold(*fold)
            for axis in shape.message_axes:
                if axis not in AXES:
                    every = [self._link(*part, world) for part in shape.strides(axis)]
                    latency, tree, bandwidth, crosses = zip(*every, strict=True)
                    place = MESSAGE_AXES.index(axis)
                    found[place] = sum(latency), sum(tree), min(bandwidth), max(crosses)
        return found

    def _link(self, stride: int, size: int, world: int) -> LinkNumbers:
        group = stride, size, world
        if group not in self._known:
            link = route_of(self.machine, *group)
            tree = min(2 * link.latency, link.tree_latency)
            self._known[group] = link.latency, tree, link.bandwidth, float(link.crosses)
        return self._known[group]


LinkNumbers = tuple[float, float, float, float]
NO_LINK = 0.0, 0.0, inf, 0.0
"""The link of an axis that has one rank."""

"""Peak bytes of one rank in a training step, by kind: a reading of the program's allocations and frees.

Layers of one kind are equal, so short programs are read: two layers alone, of each kind that the model has, and
embedding, head and loss alone. Live bytes are followed through them. Then the bytes of the other layers are added:
their activations, their gradients, and the weights and gradients in flight, as many as the bounds of the prefetcher and
of the deferred reductions allow.
The peak is the largest of these moments: the head's product; the loss; the backward of the last layer, when all
activations exist; of the first layer, when all gradients exist; of the layer at which the reductions in flight reach
their bound; the embedding's backward; the optimizer step.

A rank along pipe has several micro-batches under way: `peak_memory_of_pipe` adds what they keep to the peak of one.

Bytes are those that torch's allocator hands out. Contexts, communicators and workspaces inside kernels are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import ceil
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

from fourfold.axes import PIPE
from fourfold.layout import GATHERED, GATHERED_AXES
from fourfold.models.config import ModelConfig, unit_of
from fourfold.planner.parameters import kinds_of_layers
from fourfold.planner.program import AllocOp, FreeOp, LaunchOp, MemoryKind, Program
from fourfold.planner.size_names import SizeMatrix, Term
from fourfold.planner.sizes import LocalSizes, Structure, structure_of_ends, structure_of_kind, structure_of_layers
from fourfold.planner.step_program import ends_program, layers_program, part_of, recompute_of
from fourfold.planner.transformer import ModelPart, whole_model
from fourfold.policy import Policy, Recompute
from fourfold.schedule.action import Schedule
from fourfold.shape import Shape

PeakMoment = Literal["head", "loss", "backward", "embedding", "optimizer"]
KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
GRADIENTS = KINDS.index("gradients")
NOTHING_KEPT = (0,) * len(KINDS)
REHEARSED_LAYERS = 2
"""Layers that are rehearsed: backward of the first begins as it would in the middle of a model, with products of the
layer above still queued."""
MOMENTS = 2
"""Tensors of AdamW's state for each parameter, in the parameter's dtype."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the moment when it holds most."""

    parameters: int
    gradients: int
    optimizer: int
    weights_in_flight: int
    """Weights that are gathered: ahead of use, in use or kept. Casts that are kept. Gradients of weights that are made
    and reduced."""
    activations: int
    """Tensors that forward keeps for backward, except logits."""
    logits: int
    workspace: int
    """Short-lived tensors: gradients of activations, gathered inputs, copies in a wider dtype."""
    at: PeakMoment
    host: int = 0
    """The most bytes of pinned host memory, in which activations wait; they are not in the total."""

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes on the device by kind."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("at", "host")}

    @property
    def total(self) -> int:
        kept = self.activations + self.logits + self.workspace  # one by one, because a search asks a million times
        return self.parameters + self.gradients + self.optimizer + self.weights_in_flight + kept


def peak_memory(
    sizes: LocalSizes, *, micro_steps: int = 1, optimizer_bytes_per_parameter: float | None = None
) -> Memory:
    """Return one rank's peak in a step after the first, so that the optimizer's state exists."""
    return MemoryReading(sizes, micro_steps, optimizer_bytes_per_parameter).memory()


def pinned_nbytes(nbytes: int) -> int:
    """Return the bytes that torch's allocator of pinned memory takes for a tensor: the next power of two."""
    return 1 << (nbytes - 1).bit_length()


def kept_for_backward(sizes: LocalSizes) -> int:
    """Return the bytes that a forward pass of one micro-step leaves for backward."""
    return MemoryReading(sizes).kept


def kept_by_recompute(sizes: LocalSizes) -> dict[Recompute, int]:
    """Return the bytes that a rank keeps of one micro-batch from forward to backward, by kind of recompute.

    A pipe rank keeps those of all its stages. Only whole blocks can be offloaded.
    """
    found: dict[Recompute, int] = {}
    for kind in get_args(Recompute):
        policy = replace(sizes.policy, recompute=kind, offload=sizes.policy.offload and kind == "block")
        if sizes.shape.sizes[PIPE] == 1:
            found[kind] = kept_for_backward(replace(sizes, policy=policy))
            continue
        stages, rank = sizes.stages, sizes.shape.rank({**sizes.coords, PIPE: 0})
        alone = replace(sizes, policy=without_stages(policy), rank=rank)
        parts = [_alike(part_of(stages, stage), sizes.config) for stage in stages.of_rank(sizes.coords[PIPE])]
        found[kind] = sum(MemoryReading(alone, part=part, recompute=kind).kept for part in parts)
    return found


def peak_memory_of_pipe(
    sizes: LocalSizes, schedule: Schedule, *, optimizer_bytes_per_parameter: float | None = None
) -> Memory:
    """Return the peak of a rank that walks its order of a schedule, in a step after the first.

    Every micro-batch under way keeps what its forward pass has left, and from B to W what the products of dw read. The
    peak is the largest backward pass of one micro-batch on top of all others. Weights that stay gathered beyond a pass
    are there once, however many micro-batches are under way.
    """
    if (gathering := sizes.policy.gather_weights) != "use" and sizes.structure.gathers:
        base = replace(sizes, policy=replace(sizes.policy, gather_weights="use", keep_weights=False))
        once = peak_memory_of_pipe(base, schedule, optimizer_bytes_per_parameter=optimizer_bytes_per_parameter)
        gathered = _gathered_by_stage(sizes)
        more = sum(gathered) if gathering == "step" else max(gathered)
        return replace(once, weights_in_flight=once.weights_in_flight + more)
    rank, stages = sizes.coords[PIPE], sizes.stages
    order = schedule.orders[rank]
    passes, split = (sum(action.kind == kind for action in order) for kind in ("F", "B"))
    first = sizes.shape.rank({**sizes.coords, PIPE: 0})
    every = {}
    for stage in stages.of_rank(rank):
        part, recompute = part_of(stages, stage), recompute_of(stages, stage, sizes.policy)
        every[stage] = _memory_of_stage(
            sizes.config, sizes.shape, without_stages(sizes.policy), sizes.rows, sizes.seq, sizes.dtype, first,
            sizes.parameters, passes > 1, optimizer_bytes_per_parameter,
            _alike(part, sizes.config), recompute, bool(split),
        )  # fmt: skip
    alive, found = 0, (-1, 0, 0)
    on_host = most_on_host = 0
    for kind, stage, _ in order:
        one = every[stage]
        on_host += {"F": one.memory.host, "W": 0}.get(kind, -one.memory.host)
        most_on_host = max(most_on_host, on_host)
        if kind == "F":
            alive += one.kept
        elif kind == "W":
            alive -= one.held
        else:
            alive -= one.kept
            found = max(found, (one.total + alive, stage, alive))
            alive += one.held if kind == "B" else 0
    _, stage, others = found
    memory = every[stage].memory
    stream = sum(half.rest_nbytes for half in sizes.halves)
    streams = _streams_in_flight(schedule, rank) * stream
    others += stream if most_on_host else 0  # the input that was sent last, of another micro-batch
    workspace = memory.workspace + streams
    return replace(memory, activations=memory.activations + others, workspace=workspace, host=most_on_host)


def _alike(part: ModelPart, config: ModelConfig) -> ModelPart:
    """Return the first units that are as many, and of the same kinds, as these."""
    dense = sum(not config.is_mixture(index) for index in part.layers) if config.experts else 0
    begin = config.dense_layers - dense
    return part._replace(layers=range(begin, begin + len(part.layers)))


class StageMemory(NamedTuple):
    """The memory of a pipe rank while one micro-batch goes through one of its stages alone."""

    memory: Memory
    total: int
    kept: int
    """Bytes that the forward pass leaves for backward."""
    held: int
    """Bytes that backward leaves for the products of dw."""


@lru_cache(maxsize=1 << 14)
def _memory_of_stage(
    config: ModelConfig, shape: Shape, policy: Policy, rows: int, seq: int, dtype: torch.dtype, rank: int,
    parameters: int, accumulates: bool, optimizer_nbytes: float | None, part: ModelPart, recompute: Recompute,
    split: bool,
) -> StageMemory:  # fmt: skip
    """Return the memory of a rank with so many elements of parameters in all its stages.

    Most ranks of a pipeline have equal stages, and further candidates differ in a few of them.
    """
    sizes = LocalSizes(config, shape, policy, rows, seq, dtype, rank)
    reading = MemoryReading(
        sizes, 1 + accumulates, optimizer_nbytes, part=part, recompute=recompute, split=split, parameters=parameters
    )
    memory = reading.memory()
    kept = reading.kept - (reading.input_here if part.embedding else 0)  # of all passes one has it there
    return StageMemory(memory, memory.total, kept, reading.held)


@lru_cache(maxsize=1024)
def without_stages(policy: Policy) -> Policy:
    """Return the policy with stages and schedule left open."""
    return replace(policy, stages=None, schedule="auto")


def _gathered_by_stage(sizes: LocalSizes) -> list[int]:
    """Return the bytes of the weights that products read, gathered over z, for each stage of this rank."""
    layers, stages = sizes.config.layers, sizes.stages
    units = [stages.units(stage) for stage in stages.of_rank(sizes.coords[PIPE])]
    travels = sizes.structure.gathers_over
    names = [name for name, spec in sizes.specs.items() if len(spec.shape) > 1 and travels((name,))]
    return [
        sum(sizes.elements((name,)) for name in names if unit_of(name, layers) in own) * sizes.item for own in units
    ]


def _streams_in_flight(schedule: Schedule, rank: int) -> int:
    """Return how many streams or their gradients a rank holds only because they travel.

    One message of each lane is received ahead; two gradients of a lane may be on their way out. A stream that is sent
    is kept for backward anyway.
    """
    messages = schedule.messages[rank]
    return len(messages.receives) + 2 * sum(line[0].kind == "B" for line in messages.sends.values())


# --- live bytes through a program, with names instead of sizes


class PossiblePeak(NamedTuple):
    """Moments of a program that may be its peak; they differ only in the bytes other than complete gradients."""

    part: str
    """The part of the model that runs."""
    after: tuple[int, int]
    """The number of gathers of weights, and of reductions of their gradients, that were launched before."""
    complete: int
    """The row of the complete gradients."""
    others: list[int]
    """The row of all other live bytes, for each moment."""
    kinds: list[list[int]]
    """The rows of live bytes by kind, for each moment."""


class LiveBytes:
    """The live bytes at each moment of a program that may be its peak, and the messages before each moment.

    Sizes have names, and every sum of sizes is a row of a `SizeMatrix`.
    """

    def __init__(self, program: Program, structure: Structure) -> None:
        self._matrix = SizeMatrix()
        self._now: list[dict[int, int]] = [{} for _ in KINDS]
        self._others: dict[int, int] = {}
        self._recent: list[dict[int, int]] = []
        self.moments: list[PossiblePeak] = []
        self.gathers: list[int] = []
        """The row of every gather of weights, in order."""
        self.reductions: list[int] = []
        """The row of every reduction of weights' gradients, in order."""
        self.kept: list[int] = []
        """The rows of the tensors that exist at the end of forward, by kind."""
        self.all_kept = SizeMatrix()
        """One row, the sum of these: a small matrix that is quickly read for many candidates."""
        self.held: list[int] = []
        """The same before the products of dw, or at the end if none were held back."""
        backward = next(place for place, phase in program.phases if phase == "backward")
        weights = next((place for place, phase in program.phases if phase == "weights"), -1)
        marks = iter([*program.moments, (len(program.work), "")])
        part, (next_place, next_part) = "", next(marks)
        grows = False
        for place, item in enumerate(program.work):
            if place in (backward, weights):
                self._keep(held=place == weights)
            while place >= next_place:
                part, (next_place, next_part) = next_part, next(marks)
            if isinstance(item, AllocOp | FreeOp):
                if (
                    part and grows and isinstance(item, FreeOp)
                ):  # of consecutive allocations only the last can be a peak
                    self._add(part)
                grows = isinstance(item, AllocOp)
                self._change(item.nbytes, item.kind, 1 if grows else -1)
            elif isinstance(item, LaunchOp) and item.record.axis in GATHERED_AXES and item.record.op != "all_reduce":
                size = cast(Term, item.record.nbytes)
                if not any(structure.matrices(name.arguments[0]) for name in size.parts if name.arguments):
                    continue  # vectors of norms are too small to count
                if part and grows:
                    self._add(part)
                    grows = False
                sent = self.gathers if item.record.op == "all_gather" else self.reductions
                sent.append(self._matrix.row_of(size))
        if not self.held:
            self._keep(held=True)
        self._add(part)
        self.left = self._matrix.row(self._now[KINDS.index("activations")])
        """The row of activations that are not freed with the layers: token ids and tables of rotary positions."""

    def _keep(self, *, held: bool) -> None:
        rows = [self._matrix.row(live) for live in self._now]
        self.held, self.kept = (rows, self.kept) if held else (self.held, rows)
        if not held:
            names = list(self._matrix.columns)
            total = Term({})
            for live in self._now:
                total += Term({names[column]: times for column, times in live.items() if times})
            self.all_kept.row_of(total)

    def _change(self, size: Term | int, kind: MemoryKind, sign: int) -> None:
        if isinstance(size, Term):
            lives = [self._now[KINDS.index(kind)]]
            if kind != "gradients":
                lives.append(self._others)
            for name, times in size.parts.items():
                column = self._matrix.column(name)
                for live in lives:
                    live[column] = live.get(column, 0) + sign * times

    def _add(self, part: str) -> None:
        """Add a moment, unless one with the same key needs at least as much of every size."""
        key = part, (len(self.gathers), len(self.reductions)), self._matrix.row(self._now[GRADIENTS])
        if not self.moments or self.moments[-1][:3] != key:
            self.moments.append(PossiblePeak(*key, [], []))
            self._recent = []
        elif any(_covers(each, self._others) for each in self._recent):
            return
        last = self.moments[-1]
        while self._recent and _covers(self._others, self._recent[-1]):
            self._recent.pop()
            last.others.pop()
            last.kinds.pop()
        self._recent.append(dict(self._others))
        last.others.append(self._matrix.row(self._others))
        last.kinds.append([self._matrix.row(live) for live in self._now])

    def values(self, sizes: LocalSizes) -> list[int]:
        """Return the bytes of every row for a candidate."""
        return self._matrix.values(sizes).long().tolist()


def _covers(one: dict[int, int], other: dict[int, int]) -> bool:
    """Return whether the one needs at least as much of every size as the other."""
    return all(one.get(column, 0) >= times for column, times in other.items()) and all(
        times >= 0 for column, times in one.items() if column not in other
    )


@lru_cache(maxsize=4096)
def live_layers(structure: Structure, *, split: bool = False) -> LiveBytes:
    """Return the live bytes of layers alone."""
    return LiveBytes(layers_program(structure, REHEARSED_LAYERS, split), structure)


@lru_cache(maxsize=4096)
def live_ends(structure: Structure, *, embedding: bool = True, head: bool = True, split: bool = False) -> LiveBytes:
    """Return the live bytes of embedding, head and loss alone, or of those that a stage has."""
    return LiveBytes(ends_program(structure, embedding, head, split), structure)


def least_nbytes(
    sizes: Sequence[LocalSizes], recompute: Recompute, layers: Tensor, passes: Tensor, micro_steps: Tensor
) -> Tensor:
    """Return a lower bound of the bytes of many candidates, each a rank with so many layers: [candidate].

    It counts weights, gradients of earlier micro-steps, the optimizer's state, and what the layers keep for backward of
    each of the `passes` that are under way at once.
    """
    shares = [one.replica_share if one.policy.shard_optimizer else 1.0 for one in sizes]
    tensors = 1 + (micro_steps > 1).double() + MOMENTS * torch.tensor(shares, dtype=torch.float64)
    kinds: dict[bool, Tensor] = {}  # bytes of a layer of each kind
    for mixture in kinds_of_layers(sizes[0].config) if sizes else ():
        shards = torch.tensor([one.layer_shard(mixture) * one.dtype.itemsize for one in sizes], dtype=torch.float64)
        kinds[mixture] = shards * tensors + passes * _kept_by_layer(sizes, recompute, mixture)
    if len(kinds) < 2:
        return sum((layers * each for each in kinds.values()), torch.zeros(len(sizes), dtype=torch.float64))
    dense, every = sizes[0].config.dense_layers, sizes[0].config.layers
    whole = dense * kinds[False] + (every - dense) * kinds[True]
    return torch.where(layers == every, whole, layers * torch.minimum(kinds[False], kinds[True]))


def _kept_by_layer(sizes: Sequence[LocalSizes], recompute: Recompute, mixture: bool) -> Tensor:
    """Return the bytes that a layer of one kind keeps for backward: [candidate]."""
    kept = torch.zeros(len(sizes), dtype=torch.float64)
    by_structure: dict[Structure, list[int]] = {}
    for index, one in enumerate(sizes):
        structure = structure_of_kind(structure_of_layers(one.structure, recompute), mixture)
        by_structure.setdefault(structure, []).append(index)
    for structure, indices in by_structure.items():
        all_kept = live_layers(structure).all_kept
        if all_kept.columns:  # blocks whose inputs wait on the host keep nothing
            kept[indices] = all_kept.values_of_many([sizes[index] for index in indices])[0] // REHEARSED_LAYERS
    return kept


# --- weights in flight


def bytes_in_flight(first: Sequence[int], cycle: Sequence[int], cycles: int, last: int, bound: int) -> int:
    """Return the bytes of the messages in flight: as many as fit into the bound in their order, but at least one.

    The messages are `first`, then the `cycle` repeated `cycles` times, then `last`.
    """
    total = 0
    for nbytes in first:
        if total and total + nbytes > bound:
            return total
        total += nbytes
    if cycles and (whole := sum(cycle)):
        repeats = min(cycles, max(0, bound - total) // whole)
        total += repeats * whole
        if repeats < cycles:
            for nbytes in cycle:
                if total and total + nbytes > bound:
                    break
                total += nbytes
            return total
    return total + last if total + last <= bound else total


# --- the peak


class _Part:
    """The bytes of one candidate in a program."""

    def __init__(self, live: LiveBytes, sizes: LocalSizes) -> None:
        self.moments, self.bytes_of = live.moments, live.values(sizes)
        """The moments that may be the peak, and the bytes of each row."""
        self.gathers = [self.bytes_of[row] for row in live.gathers]
        self.reductions = [self.bytes_of[row] for row in live.reductions]
        self.kept = [self.bytes_of[row] for row in live.kept]
        self.left = self.bytes_of[live.left]
        self.gathering: dict[int, dict[int, int]] = {}
        """Bytes gathered ahead, by the number of layers that follow and the number of gathers before."""
        self.reducing: dict[tuple[int, int], dict[int, int]] = {}
        """Bytes of reductions in flight, by the first moment, the layers before it and the reductions since."""

    @cached_property
    def live(self) -> list[tuple[int, int, int, int]]:
        """For each moment: gathers and reductions before it, bytes of complete gradients, all other bytes."""
        nbytes = self.bytes_of
        return [
            (*moment.after, nbytes[moment.complete], max([nbytes[row] for row in moment.others]))
            for moment in self.moments
        ]

    def begin(self, part: str) -> int:
        """Return the index of the first moment in a part of the model."""
        return next(index for index, moment in enumerate(self.moments) if moment.part == part)


class _Peak(NamedTuple):
    """The largest moment of a part of the step, without parameters and optimizer state."""

    total: int
    of: _Part
    moment: PossiblePeak | None = None
    in_flight: int = 0
    gradients: int = 0
    kept: Sequence[int] = NOTHING_KEPT
    """The bytes that further layers keep for backward, by kind of memory."""
    before: int = 0
    """Bytes of activations that exist from before the layers until backward is done."""


class LayersOfAKind:
    """The layers of one kind that a stage has, as one candidate computes them."""

    def __init__(self, sizes: LocalSizes, blocks: Structure, mixture: bool, number: int) -> None:
        self.sizes, self.structure, self.number = sizes, structure_of_kind(blocks, mixture), number
        self.part = _Part(live_layers(self.structure), sizes)
        self.gradients = sizes.layer_shard(mixture) * sizes.dtype.itemsize
        """Bytes of the gradients of a layer."""
        self.kept = [nbytes // REHEARSED_LAYERS for nbytes in self.part.kept]
        """Bytes that a layer keeps for backward, by kind of memory."""

    @cached_property
    def first(self) -> int:
        """The moment at which backward of a layer begins."""
        return self.part.begin("first layer")

    @cached_property
    def cycle(self) -> list[int]:
        """The bytes of the gathers of one layer's backward, in order."""
        return self.part.gathers[self.part.moments[self.first].after[0] :]

    @cached_property
    def reduced(self) -> list[int]:
        """The bytes of the reductions of one layer's backward, the latest first."""
        return self.part.reductions[self.part.moments[self.first].after[1] :][::-1]

    @cached_property
    def held(self) -> int:
        """The bytes that backward of a layer leaves for products of dw that are held back."""
        return held_in(live_layers(self.structure, split=True), self.sizes) // REHEARSED_LAYERS


def held_in(live: LiveBytes, sizes: LocalSizes) -> int:
    """Return the bytes that a program leaves for products of dw that are held back."""
    values = live.values(sizes)
    # gradients that are complete by then are counted with those of the rank
    return sum(values[row] for kind, row in enumerate(live.held) if kind != GRADIENTS)


class MemoryReading:
    """The memory of one candidate while a pass through all of the model, or through one stage of it, runs alone.

    On a grid with a pipe axis, parameters, gradients and optimizer state are those of all stages of the rank.
    """

    def __init__(
        self,
        sizes: LocalSizes,
        micro_steps: int = 1,
        optimizer_nbytes: float | None = None,
        *,
        part: ModelPart | None = None,
        recompute: Recompute | None = None,
        split: bool = False,
        parameters: int | None = None,
    ) -> None:
        """Read the memory of this part, by default of the whole model.

        `split`: whether backward holds back the products of dw, which then keep what they read. `parameters`: the
        elements of all shards of the rank, by default those that `sizes` counts.
        """
        self.sizes, self.part, self.split = sizes, part or whole_model(sizes.config.layers), split
        self.layers, config = len(self.part.layers), sizes.config
        self._blocks = structure_of_layers(sizes.structure, recompute)
        mixtures = sum(map(config.is_mixture, self.part.layers)) if config.experts else 0
        numbers = {False: self.layers - mixtures, True: mixtures}
        if not self.layers:  # a stage of the ends alone still needs to know what layers are
            numbers = dict.fromkeys(kinds_of_layers(config)[-1:], 0)
        self.kinds = [
            LayersOfAKind(sizes, self._blocks, mixture, number)
            for mixture, number in numbers.items()
            if number or not self.layers
        ]
        """The kinds of layers that there are; those with an MLP come before mixtures."""
        elements, item = sizes.parameters if parameters is None else parameters, sizes.dtype.itemsize
        self.parameters = elements * item
        self.least_gradients = self.parameters if micro_steps > 1 else 0
        """Bytes of gradients that exist from the first micro-step on."""
        self.share = sizes.replica_share if sizes.policy.shard_optimizer else 1.0
        """The share of the parameters that this replica steps."""
        each = MOMENTS * item if optimizer_nbytes is None else optimizer_nbytes
        self.optimizer = ceil(elements * self.share * each)
        self.head_gradients = sizes.shard_elements((sizes.structure.table,)) * item if self.part.head else 0
        self.casts = sizes.casts_nbytes(elements)
        """Bytes of cast shards that are kept."""
        self.kept_by_layers = sum(kind.number * sum(kind.kept) for kind in self.kinds)
        offloads = self._blocks.policy.offload and self._blocks.policy.runs_blocks_again and self.layers > 0
        self.input_here = sum(half.rest_nbytes for half in sizes.halves) if offloads else 0
        """Bytes of the one block input that stays on the device where others wait on the host: the one that was sent
        last, or in a later stage the first one, which has arrived there."""
        pinned = sum(pinned_nbytes(half.rest_nbytes) for half in sizes.halves) if offloads else 0
        self.host = pinned * (self.layers if self.part.embedding else self.layers - 1)

    @property
    def least(self) -> int:
        """A lower bound of the candidate's bytes, which is found more quickly than its peak."""
        return self.kept_by_layers + self.parameters + self.optimizer

    @cached_property
    def ends(self) -> _Part:
        return _Part(self._live_ends(split=False), self.sizes)

    def _live_ends(self, *, split: bool) -> LiveBytes:
        structure = structure_of_ends(self.sizes.structure)
        return live_ends(structure, embedding=self.part.embedding, head=self.part.head, split=split)

    @property
    def kept(self) -> int:
        """The bytes that a forward pass leaves for backward."""
        return sum(self.ends.kept) + self.kept_by_layers + self.input_here

    @property
    def held(self) -> int:
        """The bytes that backward leaves for the products of dw; 0 if it runs them itself."""
        return self._held_by_ends + self._held_by_last(self.layers)

    @cached_property
    def _held_by_ends(self) -> int:
        return held_in(self._live_ends(split=True), self.sizes) if self.split else 0

    def _held_by_last(self, layers: int) -> int:
        """Return the bytes that backward of so many layers, the last ones, leaves for products of dw."""
        if not self.split:
            return 0
        return sum(many * kind.held for kind, many in zip(self.kinds, self._last(layers), strict=True))

    def _last(self, layers: int) -> list[int]:
        """Return how many of the last so many layers are of each kind."""
        found = []
        for kind in reversed(self.kinds):
            found.append(min(layers, kind.number))
            layers -= found[-1]
        return found[::-1]

    def _kept_below(self, done: int) -> list[int]:
        """Return what the layers keep whose backward is still to come, by kind of memory, if so many are done."""
        total = list(NOTHING_KEPT)
        for kind, many in zip(self.kinds, self._last(done), strict=True):
            total = [one + (kind.number - many) * more for one, more in zip(total, kind.kept, strict=True)]
        return total

    def _peak(self) -> _Peak:
        """Find the largest moment of the step."""
        ends, layers, sizes, part = self.ends, self.layers, self.sizes, self.part
        embedding = ends.begin("embedding") if part.embedding else None
        overlap, travels = sizes.policy.overlap, sizes.structure.gathers
        self.ahead = self.behind = 0
        """The bytes that may be gathered ahead, and those of reductions that may be in flight."""
        # the bounds follow the largest message, as in the runtime's engine
        if travels and overlap.prefetch:
            of_layers = (nbytes for kind in self.kinds for nbytes in kind.part.gathers)
            self.ahead = overlap.most_in_flight(max([*ends.gathers, *of_layers]))
        if travels and overlap.defer:
            of_layers = (nbytes for kind in self.kinds for nbytes in kind.part.reductions)
            self.behind = overlap.most_in_flight(max([*ends.reductions, *of_layers]))
        gradients = sum(kind.number * kind.gradients for kind in self.kinds)
        found = [self._at_layer(place, done) for place, done in self._depths()]
        last, first = self.kinds[-1], self.kinds[0]
        if part.head:
            found.append(self._largest(ends, 0, embedding, last, below=layers, before=self.input_here))
        if embedding is not None:
            above = dict(gradients=gradients, above=layers, before=self.held)
            found.append(self._largest(ends, embedding, None, first, kept_by=layers, **above, ahead=False))
        # the optimizer step: all gradients, and this replica's rows of them if the optimizer is sharded
        at_end = self.parameters + (int(self.parameters * self.share) if self.share < 1 else 0)
        return max(*found, _Peak(at_end, ends, gradients=at_end), key=lambda peak: peak.total)

    def memory(self) -> Memory:
        """Return the peak by kind."""
        peak = self._peak()
        kinds, at = dict.fromkeys(KINDS, 0), "optimizer"
        if peak.moment is not None:
            nbytes, moment = peak.of.bytes_of, peak.moment
            largest = max(range(len(moment.others)), key=lambda index: nbytes[moment.others[index]])
            rows = zip(KINDS, moment.kinds[largest], peak.kept, strict=True)
            kinds = {kind: nbytes[row] + kept for kind, row, kept in rows}
            at = PARTS.get(peak.moment.part, peak.moment.part)
        return Memory(
            parameters=self.parameters,
            gradients=peak.gradients,
            optimizer=self.optimizer,
            weights_in_flight=kinds["weights"] + peak.in_flight + self.casts,
            activations=kinds["activations"] + peak.before,
            logits=kinds["logits"],
            workspace=kinds["workspace"],
            at=cast(PeakMoment, at),
            host=self.host,
        )

    def _depths(self) -> set[tuple[int, int]]:
        """Return the moments that may hold the most bytes: a kind of layers, and the number of layers done."""
        found, above = set(), 0
        for place, kind in reversed(list(enumerate(self.kinds))):
            last = kind.number - 1
            if last >= 0:
                full = min(ceil(self.behind / max(1, sum(kind.reduced))), last)
                found |= {(place, above + done) for done in (0, full, last)}
            above += kind.number
        return found

    def _at_layer(self, place: int, done: int) -> _Peak:
        """Find the largest moment of the backward of a layer of this kind when `done` layers are done."""
        kind, reduced = self.kinds[place], self.ends.reductions if self.part.head else ()
        below, last = self.layers - 1 - done, reduced[0] if reduced else 0
        of_done = sum(many * one.gradients for one, many in zip(self.kinds, self._last(done), strict=True))
        gradients = self.head_gradients + of_done - kind.gradients  # the program has those of the layer above
        before = self._before_layers + self._held_by_ends + self._held_by_last(done)
        return self._largest(
            kind.part, kind.first, None, kind, kept_by=done + 1, below=below, above=done, before=before,
            gradients=gradients, last=last,
        )  # fmt: skip

    @cached_property
    def _before_layers(self) -> int:
        """Bytes that exist until backward reaches the embedding: ids, tables of rotary positions, dropout masks."""
        return self.ends.left + sum(half.mask_nbytes for half in self.sizes.halves)

    def _largest(
        self, of: _Part, begin: int, end: int | None, kind: LayersOfAKind, *, kept_by: int = 0, below: int = 0,
        above: int = 0, before: int = 0, gradients: int = 0, last: int = 0, ahead: bool = True,
    ) -> _Peak:  # fmt: skip
        """Find the largest moment from `begin` to `end`.

        Outside of this program, `before` bytes and what all layers but the last `kept_by` ones keep are there, and
        `gradients` bytes are complete. Weights are gathered ahead for the rest of this program, then for the layers
        `below`. Reductions in flight are those of this program, then of the layers `above`, then the `last` one. The
        layers next to it are of this `kind`.
        """
        found, sent = (-1, 0, 0, 0), of.moments[begin].after[1]
        share, least = self.share, self.least_gradients
        # this many layers reach the bound of bytes in flight; further ones change nothing
        below = min(below, self.ahead // max(1, sum(kind.cycle)) + 1)
        above = min(above, self.behind // max(1, sum(kind.reduced)) + 1)
        gathering = of.gathering.setdefault(below if ahead else -1, {})
        reducing = of.reducing.setdefault((begin, above), {})
        for index, (gathered, reduced, complete, others) in enumerate(of.live[begin:end], start=begin):
            if gathered not in gathering:
                gathering[gathered] = self._gathered_ahead(of.gathers[gathered:], kind.cycle, below) if ahead else 0
            if reduced not in reducing:
                here = of.reductions[sent:reduced][::-1]
                reducing[reduced] = bytes_in_flight(here, kind.reduced, above, last, self.behind) if self.behind else 0
            in_flight = gathering[gathered] + reducing[reduced]
            complete += gradients
            if share < 1:  # this replica's rows of the sums exist beside whole gradients until backward ends
                complete += int(complete * share)
            if complete < least:  # earlier micro-steps have left gradients of all parameters
                complete = least
            total = others + complete + in_flight
            if total > found[0]:
                found = total, index, in_flight, complete
        total, index, in_flight, complete = found
        kept = self._kept_below(kept_by)
        total += before + sum(kept)
        return _Peak(total, of, of.moments[index], in_flight, complete, kept, before)

    def _gathered_ahead(self, following: Sequence[int], cycle: Sequence[int], below: int) -> int:
        if not self.ahead:
            return 0
        found = bytes_in_flight(following, cycle, below, 0, self.ahead)
        # the cast shard, from which the message is sent, exists until the gather has been waited for
        passing = self.sizes.structure.casts and not self.sizes.structure.keeps_casts
        return found + (found // self.sizes.shape.sizes[GATHERED] if passing else 0)


PARTS = {"first layer": "backward", "": "head"}
"""The names of a rehearsal's moments in `Memory.at`, where they differ."""

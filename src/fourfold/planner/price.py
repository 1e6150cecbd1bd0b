"""The price of a candidate: its program played on a machine (simulate.py), and its memory.

A step of many equal layers and micro-steps is periodic. A few layers and up to two micro-steps are simulated; the rest
repeats what one more layer and one more micro-step took.

A pipeline is simulated in two levels. `unit_totals` plays the programs of small stages by themselves and finds what a
layer, the embedding and the head take in F, B and W, communication inside the stage included. `schedule.play` then
plays the schedule with the seconds of its stages and messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from typing import TYPE_CHECKING, Protocol

import torch

from fourfold.axes import AXES, PIPE, REPLICA, REPLICAS, WAITED_FOR
from fourfold.context.assign import plan_context
from fourfold.grid import Shape
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig
from fourfold.planner.lengths import LengthSample
from fourfold.planner.machine import DTYPES, NO_MACHINE, HostMode, Machine, Route, Seconds
from fourfold.planner.memory import Memory, peak_memory, peak_memory_of_pipe, without_stages
from fourfold.planner.parameters import kinds_of_layers
from fourfold.planner.program import (
    ADDED,
    Program,
)
from fourfold.planner.simulate import Timeline, Totals, simulate
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.step_program import (
    Flops,
    flops_per_token,
    optimizer_program,
    part_of,
    recompute_of,
    stage_program,
    step_program,
)
from fourfold.planner.transformer import ModelPart
from fourfold.policy import Policy, Recompute
from fourfold.schedule.action import PipeMessage, Schedule
from fourfold.schedule.play import Played, play
from fourfold.schedule.receives import receives_of
from fourfold.schedule.stages import Stages

if TYPE_CHECKING:
    from fourfold.planner.trace import DryRun

QUICK_LAYERS = 3, 4
"""The two numbers of layers that are simulated to compare candidates; the price of more layers is extrapolated."""
CLOSE_LAYERS = 6, 12
"""The same for a price that is shown: the sums over data reach their steady pace only after several layers."""
SIMULATED_MICRO_STEPS = 2
"""The most micro-steps that are simulated: the second one shows what each further one takes."""
SHOWN_LAYERS = 4
"""The layers of a timeline that a person looks at."""


# --- candidates and their prices


@dataclass(frozen=True, slots=True)
class Task:
    """A model to train, a machine and a batch."""

    config: ModelConfig
    machine: Machine
    rows: int
    """Sequences of a step, over all ranks and micro-steps."""
    seq: int
    parameters: torch.dtype = torch.float32
    """The dtype of the weights."""
    compute: torch.dtype = torch.bfloat16
    """The dtype of products and messages."""
    captured: bool = False
    """Whether steps are recorded as CUDA graphs and replayed; on the CPU they are not."""
    documents: LengthSample | None = None
    """The documents that are packed into rows; None if a row is one document, or if their lengths are not known."""
    imbalance: float = 1.0
    """How many times the mean of the pairs of a token and an expert the busiest expert of a mixture has."""
    packed: bool = False
    """Whether rows have several documents, also if their lengths are not known; a row of those is not cut."""

    def host_mode(self, policy: Policy, shape: Shape = Shape()) -> HostMode:
        """Return how the host gives a step to the device under this policy.

        No step with a context, or with activations on the host, is recorded.
        """
        if self.captured and self.machine.device != "cpu" and shape.context == 1 and not policy.offload:
            return "captured"
        return "compiled" if policy.compile else "eager"

    def seconds_on(self, candidate: Candidate, routes: Mapping[str, Route] | None = None) -> Seconds:
        """Return the prices of work for a candidate, whose axes have these links if it is a part of a larger grid."""
        policy = candidate.policy
        mode = self.host_mode(policy, candidate.shape)
        how = dict(compiled=policy.compile, routes=routes, imbalance=self.imbalance)
        return Seconds(self.machine, candidate.shape, mode, **how)

    @property
    def on_any_machine(self) -> Task:
        """A task that stands for this one on every machine: the same programs, whatever they cost."""
        return replace(self, machine=NO_MACHINE, rows=0, captured=False, imbalance=1.0)

    @property
    def tokens(self) -> int:
        return self.rows * self.seq

    @property
    def dtype(self) -> str:
        return DTYPES[self.compute]

    def has_host_memory(self, memory: MemoryByKind) -> bool:
        """Return whether the host of a device has the memory that activations need there, as far as that is known."""
        return self.machine.host_memory is None or memory.host <= self.machine.host_memory

    @property
    def usable_bytes(self) -> int:
        """Bytes of a device that tensors can use."""
        return self.machine.memory - self.machine.reserve


@dataclass(frozen=True, slots=True)
class Candidate:
    """A grid, a policy and a number of micro-steps for a task."""

    shape: Shape
    policy: Policy
    rows: int
    """Rows of a (data, z) place, or of a context group, in one micro-step."""
    micro_steps: int

    def sizes(self, task: Task, *, layers: int | None = None, pipe_rank: int = 0) -> LocalSizes:
        """Return the sizes of the first rank at a pipe coordinate, which holds the largest shards there.

        With `layers` they are those of a model with that many.
        """
        config, shape = task.config if layers is None else task.config.shorter(layers), self.shape
        rank = shape.rank({**dict.fromkeys(AXES, 0), PIPE: pipe_rank}) if pipe_rank else 0
        documents = None
        if task.documents is not None:
            documents = task.documents.busiest(self.rows, task.seq, shape.row_places)
            if shape.context > 1:  # the member that has the most attention
                chosen = self.policy.assignment, self.policy.context_way
                work = plan_context(*chosen, self.rows, task.seq, shape.context, documents)[0].work
                rank = shape.context_ranks(rank)[work.index(max(work))]
        whole = config, shape, self.policy, self.rows, task.seq
        halves = 1 if task.packed and self.rows == 1 else 0  # 0: as the runtime chooses
        return LocalSizes(*whole, task.parameters, rank, halves, documents)

    @property
    def played_micro_steps(self) -> int:
        """The micro-batches of a pipeline that are played: enough for its steady state, if its schedule has a name."""
        if not isinstance(self.policy.schedule, str):
            return self.micro_steps
        return min(self.micro_steps, STEADY * self.shape.pipe)

    @property
    def without_stages(self) -> Candidate:
        """The same candidate with stages and schedule left open: what a unit of the model takes is the same."""
        return replace(self, policy=without_stages(self.policy), micro_steps=1)


class MemoryByKind(Protocol):
    """Bytes of a rank at its peak by kind, and those of its host's memory."""

    @property
    def kinds(self) -> dict[str, int]: ...
    @property
    def total(self) -> int: ...
    @property
    def host(self) -> int: ...


@dataclass(frozen=True)
class Price:
    """The seconds and the memory of a candidate."""

    task: Task
    candidate: Candidate
    totals: Totals

    @cached_property
    def memory(self) -> MemoryByKind:
        return memory_of(self.task, self.candidate)

    @cached_property
    def flops(self) -> Flops:
        """FLOPs per token."""
        seq, documents = self.task.seq, self.task.documents
        return flops_per_token(self.task.config, documents.reach(seq) if documents else seq, self.candidate.policy)

    @property
    def halves(self) -> int:
        return self.candidate.sizes(self.task).number_of_halves

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        return self.task.config.parameters

    def timeline(self) -> Timeline:
        """Return a micro-step of a few layers with its spans, to look at."""
        layers = min(SHOWN_LAYERS, self.task.config.layers)
        return timeline(self.task, self.candidate, layers=layers, micro_steps=1, trace=True)

    @property
    def seconds(self) -> float:
        return self.totals.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.task.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.flops.model * self.tokens_per_second / self.peak_flops

    @property
    def hfu(self) -> float:
        return self.flops.hardware * self.tokens_per_second / self.peak_flops

    @property
    def peak_flops(self) -> float:
        """The advertised FLOP/s of all devices."""
        return self.task.machine.peak[self.task.dtype] * self.candidate.shape.world

    @property
    def bound_by(self) -> str:
        """The largest part of the step: `compute`, `host`, the axis with the most exposed communication, `offload`."""
        parts = {"compute": self.totals.compute, "host": self.totals.host}
        parts |= {axis: self.totals.exposed.get(axis, 0.0) for axis in WAITED_FOR}
        return max(parts, key=lambda part: parts[part])


def memory_of(task: Task, candidate: Candidate) -> Memory:
    """Return the peak of the device that needs most, and the most that a device needs of its host's memory."""
    if candidate.shape.pipe > 1:
        return largest(memory_by_pipe_rank(task, candidate))
    return peak_memory(candidate.sizes(task), micro_steps=candidate.micro_steps)


def check_candidate(task: Task, candidate: Candidate) -> None:
    """Raise if the candidate does not take all rows of the task, or if its grid cannot cut the model."""
    rows, steps, places = candidate.rows, candidate.micro_steps, candidate.shape.row_places
    if rows < 1 or steps < 1 or rows * steps * places != task.rows:
        divided, context = ("data*z/context", " / context") if candidate.shape.context > 1 else ("data*z", "")
        raise ValueError(
            f"the candidate has rows={rows}, micro_steps={steps} and {places} places ({divided}) on the grid "
            f"{candidate.shape}, {rows * steps * places} rows in all, but the batch of the task has {task.rows}; take "
            f"rows and micro_steps, each at least 1, so that rows * micro_steps * data * z{context} is that number"
        )
    task.config.check(candidate.shape, candidate.policy)


def price(task: Task, candidate: Candidate, *, quick: bool = False) -> Price:
    """Simulate a few layers and micro-steps, and extrapolate to all of them.

    A candidate that does not cut the batch or the model of the task is refused.
    """
    check_candidate(task, candidate)
    if candidate.shape.pipe > 1:
        return price_pipe(task, candidate)
    (few, more), played = QUICK_LAYERS if quick else CLOSE_LAYERS, 1 if quick else SIMULATED_MICRO_STEPS
    totals = NOTHING
    for config, times in shorter_models(task.config, few, more):
        totals = totals.plus(simulate_model(task, candidate, config, played), times)
    # With more layers, more of the sums over data is hidden: clamp the exposed time at zero.
    exposed = {axis: max(0.0, seconds) for axis, seconds in totals.exposed.items()}
    missing = sum(exposed.values()) - sum(totals.exposed.values())
    return Price(task, candidate, replace(totals, seconds=totals.seconds + missing, exposed=exposed))


def shorter_models(config: ModelConfig, few: int, more: int) -> list[tuple[ModelConfig, float]]:
    """Return models with `few` or `more` layers, and how often each counts so that together they stand for the model.

    In a model with both MLPs and mixtures of experts the layers of each kind are extrapolated by themselves. A model
    with no more layers stands for itself.
    """
    if config.layers <= more:
        return [(config, 1.0)]
    numbers = config.dense_layers, config.layers - config.dense_layers
    begun = [min(number, few) for number in numbers]
    found, left = [], 1.0
    for kind, number in enumerate(numbers):
        if number > begun[kind]:
            longer = [*begun]
            longer[kind] = min(number, more)
            times = (number - begun[kind]) / (longer[kind] - begun[kind])
            found.append((_with_layers(config, *longer), times))
            left -= times
    return [(_with_layers(config, *begun), left), *found]


def _with_layers(config: ModelConfig, dense: int, others: int) -> ModelConfig:
    """Return the model with so many layers that have an MLP all the same, and so many others."""
    return replace(config, layers=dense + others, dense_layers=dense)


def quick_price(task: Task, candidate: Candidate) -> Price:
    """Price a candidate as candidates are compared; it may be 4% off the price that is shown."""
    return price(task, candidate, quick=True)


def simulate_model(
    task: Task, candidate: Candidate, config: ModelConfig, played: int = SIMULATED_MICRO_STEPS
) -> Totals:
    """Return the totals of a step, with all micro-steps, of the task's model with fewer layers, as its config says.

    So many micro-steps are `played`, one or two; each further one takes what the first did. If only one is played, what
    it takes to add its gradients to those of others is counted by itself.
    """
    played = min(candidate.micro_steps, played)
    task = replace(task, config=config)
    line = timeline(task, candidate, micro_steps=played)
    totals = line.totals
    if candidate.micro_steps > played:
        begins = [totals for phase, totals in line.marks if phase == ("forward" if played > 1 else "optimizer")]
        first = [totals for phase, totals in line.marks if phase == "forward"][-played]
        further = without_replica_traffic(begins[-1].plus(first, -1.0))
        if played == 1:
            nbytes = candidate.sizes(task).parameter_nbytes
            adding = task.seconds_on(candidate).kernel(ADDED * nbytes)
            further = further.plus(Totals(adding, adding, {}, {}))
        totals = totals.plus(further, candidate.micro_steps - played)
    return totals


def without_replica_traffic(micro_step: Totals) -> Totals:
    """Return a micro-step without its traffic over replicas.

    Only the first micro-step waits for parameters from other replicas, only the last one sums gradients over them.
    """
    exposed = {axis: seconds for axis, seconds in micro_step.exposed.items() if axis not in REPLICAS}
    link = {axis: seconds for axis, seconds in micro_step.link.items() if axis not in REPLICAS}
    seconds = micro_step.seconds - sum(micro_step.exposed.get(axis, 0.0) for axis in REPLICAS)
    return replace(micro_step, seconds=seconds, link=link, exposed=exposed)


def timeline(
    task: Task, candidate: Candidate, *, layers: int | None = None, micro_steps: int | None = None, trace: bool = False
) -> Timeline:
    """Simulate a step; None: with all layers, with all micro-steps."""
    # the rank order changes where rank 0's groups lie, but not what rank 0 does: orders share one cached program
    any_order = replace(candidate, shape=candidate.shape.reordered(AXES), micro_steps=1)
    program = _program(task.on_any_machine, any_order, layers, micro_steps or candidate.micro_steps)
    return simulate(program.work, task.seconds_on(candidate), task.dtype, phases=program.phases, trace=trace)


@lru_cache(maxsize=256)
def _program(task: Task, candidate: Candidate, layers: int | None, micro_steps: int) -> Program:
    return step_program(candidate.sizes(task, layers=layers), micro_steps=micro_steps)


# --- pipelines


@dataclass(frozen=True)
class UnitTotals:
    """What F, and either B and W or BW, of one micro-batch take in the units of a model.

    A stage takes `fixed` and what its units take. BW may be less than B and W: products of dw run behind messages.
    """

    fixed: Mapping[str, Totals]
    layer: Mapping[str, Totals]
    """A layer that is no dense layer of a mixture of experts."""
    dense_layer: Mapping[str, Totals]
    embedding: Mapping[str, Totals]
    head: Mapping[str, Totals]
    dense_layers: int
    """The number of first layers that have an MLP all the same."""

    def stage(self, kind: str, part: ModelPart) -> Totals:
        """Return what an action of this kind takes in a stage with these units."""
        if not (part.layers or part.embedding or part.head):
            return NOTHING
        dense = dense_of(part, self.dense_layers)
        found = self.fixed[kind].plus(self.layer[kind], len(part.layers) - dense)
        found = found.plus(self.dense_layer[kind], dense) if dense else found
        found = found.plus(self.embedding[kind]) if part.embedding else found
        return found.plus(self.head[kind]) if part.head else found

    def seconds(self, kind: str, part: ModelPart) -> float:
        return max(0.0, self.stage(kind, part).seconds)


def dense_of(part: ModelPart, dense_layers: int) -> int:
    """Return how many layers of a stage are among the first ones of the model, which are dense."""
    return sum(index < dense_layers for index in part.layers) if dense_layers else 0


NOTHING = Totals(0.0, 0.0, {}, {})
STEADY = 3
"""Micro-batches per pipe rank that are played of a named schedule; further ones add the work of the busiest rank."""
STAGE_LAYERS = 2, 4
"""The two numbers of layers of the stages that are simulated; a layer takes half of their difference."""
STAGE_PASSES = 2
"""Micro-batches that go through a simulated stage: the second has one before it, and counts."""


def unit_totals(task: Task, candidate: Candidate, recompute: Recompute, *, split: bool) -> UnitTotals:
    """Simulate small stages of a candidate `without_stages`, and return what each unit takes.

    With `split` backward is B and W, else BW. Inside a stage nothing is sent along data and pipe, so grids that differ
    in these alone share their units if the other axes have the same links.
    """
    prices, shape = task.seconds_on(candidate), candidate.shape
    # a context group and a fold may go along data
    outside = (PIPE,) if shape.context > 1 or shape.folded else (PIPE, *REPLICAS)
    sizes = [shape.sizes[axis] if axis not in outside else 1 for axis in AXES]
    links = tuple((axis, prices.link(axis)) for axis in shape.message_axes if axis not in outside)
    alone = replace(candidate, shape=Shape(*sizes, context=shape.context).with_fold(*shape.fold))
    return _unit_totals(task, alone, links, recompute, split)


@lru_cache(maxsize=512)
def _unit_totals(
    task: Task, candidate: Candidate, links: tuple[tuple[str, Route], ...], recompute: Recompute, split: bool
) -> UnitTotals:
    few, more = STAGE_LAYERS
    parts = {
        "few": ModelPart(range(few), embedding=False, head=False),
        "more": ModelPart(range(more), embedding=False, head=False),
        "embedding": ModelPart(range(few), embedding=True, head=False),
        "head": ModelPart(range(few), embedding=False, head=True),
    }
    prices, config = task.seconds_on(candidate, dict(links)), task.config
    *dense, last = [
        replace(task, config=replace(config.one_layer(mixture=mixture), layers=more))
        for mixture in kinds_of_layers(config)
    ]

    def simulated(task: Task, name: str) -> dict[str, Totals]:
        return _simulate_stage(task, candidate, prices, parts[name], recompute, split)

    found = {name: simulated(last, name) for name in parts}
    kinds = found["few"].keys()

    def by_layer(least: Mapping[str, Totals], most: Mapping[str, Totals]) -> dict[str, Totals]:
        return {kind: NOTHING.plus(most[kind].plus(least[kind], -1.0), 1 / (more - few)) for kind in kinds}

    layer = by_layer(found["few"], found["more"])
    return UnitTotals(
        fixed={kind: found["few"][kind].plus(layer[kind], -few) for kind in kinds},
        layer=layer,
        dense_layer=by_layer(simulated(dense[0], "few"), simulated(dense[0], "more")) if dense else layer,
        **{
            end: {kind: found[end][kind].plus(found["few"][kind], -1.0) for kind in kinds}
            for end in ("embedding", "head")
        },
        dense_layers=config.dense_layers,
    )


@lru_cache(maxsize=256)
def _stage_program(task: Task, candidate: Candidate, part: ModelPart, recompute: Recompute, split: bool) -> Program:
    sizes = candidate.sizes(task)
    return stage_program(sizes, part, recompute, split=split, passes=STAGE_PASSES)


def _simulate_stage(
    task: Task, candidate: Candidate, prices: Seconds, part: ModelPart, recompute: Recompute, split: bool
) -> dict[str, Totals]:
    """Return what each kind of action takes in one stage by itself."""
    program = _stage_program(task.on_any_machine, candidate, part, recompute, split)
    line = simulate(program.work, prices, task.dtype, phases=program.phases)
    ends = [totals for _, totals in line.marks[1:]]
    return {
        action.kind: end.plus(begin, -1.0)
        for (_, action), (_, begin), end in zip(program.actions, line.marks[:-1], ends, strict=True)
        if action.micro == STAGE_PASSES - 1
    }


@dataclass(frozen=True)
class PipePrice(Price):
    """The price of a candidate with a pipe axis."""

    played: Played
    """The schedule with the times of its actions."""
    schedule_name: str

    @cached_property
    def memories(self) -> list[Memory]:
        """The peak of every pipe rank."""
        return memory_by_pipe_rank(self.task, self.candidate)

    @cached_property
    def memory(self) -> MemoryByKind:
        return largest(self.memories)

    @property
    def stages(self) -> Stages:
        return self.candidate.sizes(self.task).stages

    @property
    def bubble(self) -> float:
        """The share of the step in which the busiest pipe rank waits for others."""
        return min(self.played.idle) / self.seconds

    def timeline(self) -> Timeline:
        """Return a few layers of a stage with their spans, to look at."""
        part = ModelPart(range(min(SHOWN_LAYERS, self.task.config.layers)), embedding=False, head=False)
        recompute = recompute_of(self.stages, 0, self.candidate.policy)
        sizes = self.candidate.without_stages.sizes(self.task)
        program = stage_program(sizes, part, recompute, split=False, passes=1)
        seconds = self.task.seconds_on(self.candidate)
        return simulate(program.work, seconds, self.task.dtype, phases=program.phases, trace=True)


def largest(memories: Sequence[Memory]) -> Memory:
    """Return the largest peak of several ranks, with the most host memory of any of them."""
    return replace(max(memories, key=lambda memory: memory.total), host=max(memory.host for memory in memories))


def memory_by_pipe_rank(task: Task, candidate: Candidate) -> list[Memory]:
    """Return the peak of every pipe rank."""
    schedule = candidate.sizes(task).schedule(candidate.played_micro_steps)
    return [
        peak_memory_of_pipe(candidate.sizes(task, pipe_rank=rank), schedule) for rank in range(candidate.shape.pipe)
    ]


def price_pipe(task: Task, candidate: Candidate) -> PipePrice:
    """Price a candidate with a pipe axis: its stages one by one, then its schedule."""
    sizes = candidate.sizes(task)
    stages, schedule = sizes.stages, sizes.schedule(candidate.played_micro_steps)
    times = candidate.micro_steps / schedule.micro_steps
    costs = StageCosts(task, candidate, stages, split=not any(action.kind == "BW" for action in schedule.orders[0]))
    played = costs.play(schedule)
    late = costs.late_parameters(played) + costs.late_sums(played)
    rank = max(range(stages.pipe), key=lambda each: played.work[each])
    work = NOTHING
    for (kind, stage), many in Counter(action[:2] for action in schedule.orders[rank]).items():
        work = work.plus(costs.stage(kind, stage), many * times)
    ending = costs.optimizer()
    waits, slowed = played.makespan - played.work[rank], max(0.0, times * played.work[rank] - work.seconds)
    exposed = {axis: max(0.0, seconds) for axis, seconds in work.exposed.items()}
    sent = sum(len(line) for line in schedule.messages[rank].sends.values())
    copies, steady = costs.copies(), (times - 1) * played.work[rank] - costs.not_added(rank)
    totals = Totals(
        played.makespan + steady + late + copies + ending.seconds,
        work.compute + slowed - costs.not_added(rank) + ending.compute,
        {**work.link, PIPE: times * sent * costs.hop + copies, REPLICA: costs.over_replicas_of(rank)},
        {**exposed, PIPE: waits + copies, REPLICA: exposed.get(REPLICA, 0.0) + late},
        work.host + ending.host,
    )
    name = candidate.policy.schedule
    return PipePrice(task, candidate, totals, played, name if isinstance(name, str) else "found")


MOST_MESSAGES = 4
"""Messages of a micro-batch that a rank sends and receives in a stage."""
NOT_FELT = 0.01
"""The share of a stage's seconds below which it does not matter that messages slow it down."""
SLOWED_PLAYS = 2
"""How often a schedule is played again with actions slowed as in the play before, where receives wait: they wait for
longer beside slower actions. A number that followed the contention would make prices jump where it changes."""


def beside_messages(played: Played, hop: float, *, waiting: bool) -> dict[tuple[str, int], float]:
    """Return for how long each kind of action of each stage runs beside messages of its rank, on average.

    A message is in flight for `hop` seconds after it was sent. With `waiting`, as on a GPU, a receive also counts while
    it waits for its message, and a send while it waits for its receive: both are kernels by then.
    """
    total: defaultdict[tuple[str, int], float] = defaultdict(float)
    count: Counter[tuple[str, int]] = Counter()
    for flights, spans in zip(_flights(played, hop, waiting=waiting), played.spans, strict=True):
        first = 0
        for (kind, stage, _), start, end in spans:
            count[kind, stage] += 1
            while first < len(flights) and flights[first][1] <= start:
                first += 1
            for begin, landed in flights[first:]:
                if begin >= end:
                    break
                total[kind, stage] += min(end, landed) - max(start, begin)
    return {which: seconds / count[which] for which, seconds in total.items()}


def _flights(played: Played, hop: float, *, waiting: bool) -> list[list[tuple[float, float]]]:
    """Return, for every rank, when messages of it are in flight; what is in flight together is one interval."""
    schedule = played.schedule
    begun: dict[PipeMessage, float] = {}
    """When each receive begins, if that matters."""
    if waiting:
        for rank, spans in enumerate(played.spans):
            receives, free = receives_of(schedule, rank, ahead=False), 0.0
            for action, _, end in spans:
                begun.update(dict.fromkeys(receives.before.get(action, ()), free))
                begun.update(dict.fromkeys(receives.after.get(action, ()), end))
                free = end
    flights: list[list[tuple[float, float]]] = [[] for _ in played.spans]
    for spans in played.spans:
        for action, _, sent in spans:
            message = schedule.sent(action)
            if message is not None:
                received = begun.get(message, sent)
                landed = max(sent, received) + hop
                flights[message.source].append((sent, landed))
                flights[message.target].append((received, landed))
    return [list(_united(each)) for each in flights]


def _united(intervals: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Yield the union of intervals, in order."""
    begin, reached = inf, -inf
    for start, end in sorted(intervals):
        if start > reached:
            if begin < reached:
                yield begin, reached
            begin = start
        reached = max(reached, end)
    if begin < reached:
        yield begin, reached


class StageCosts:
    """What the stages of a candidate take, each by itself."""

    def __init__(self, task: Task, candidate: Candidate, stages: Stages, *, split: bool) -> None:
        """`split`: whether the schedule has B and W, or BW."""
        self.task, self.candidate, self.stages = task, candidate, stages
        self.kinds = ("F", "B", "W") if split else ("F", "BW")
        self.units = {
            kind: unit_totals(task, candidate.without_stages, kind, split=split)
            for kind in {recompute_of(stages, stage, candidate.policy) for stage in range(len(stages.placement))}
        }
        self.prices, self.sizes = task.seconds_on(candidate), candidate.sizes(task)
        self.stream_nbytes = sum(half.rest_nbytes for half in self.sizes.halves)
        self._by_units: dict[tuple[str, Recompute, int, int, bool, bool], Totals] = {}

    def stage(self, kind: str, stage: int) -> Totals:
        """Return what an action takes."""
        recompute, part = recompute_of(self.stages, stage, self.candidate.policy), part_of(self.stages, stage)
        dense = dense_of(part, self.task.config.dense_layers)
        units = kind, recompute, len(part.layers), dense, part.embedding, part.head
        if units not in self._by_units:
            self._by_units[units] = self.units[recompute].stage(kind, part)
        return self._by_units[units]

    def seconds(self) -> dict[str, list[float]]:
        """Return the seconds of F, B and W of every stage; all of BW counts as B."""
        every = range(len(self.stages.placement))
        found = {kind: [max(0.0, self.stage(kind, stage).seconds) for stage in every] for kind in self.kinds}
        return {"W": [0.0] * len(every), **{"B" if kind == "BW" else kind: times for kind, times in found.items()}}

    def play(self, schedule: Schedule) -> Played:
        """Play a schedule, with computation that is slower while a message of its rank is in flight."""
        seconds, machine = self.seconds(), self.prices.machine
        played = play(schedule, seconds, self.hop)
        lost = 1 - 1 / machine.contention
        waiting = machine.device != "cpu"  # there a receive that waits takes no core
        stages = (sum(times[stage] for times in seconds.values()) for stage in range(len(self.stages.placement)))
        shortest = min(total for total in stages if total)
        most = shortest if waiting else min(shortest, MOST_MESSAGES * self.hop)
        if lost * most < NOT_FELT * shortest:
            return played
        for _ in range(SLOWED_PLAYS if waiting else 1):
            slower = {kind: list(times) for kind, times in seconds.items()}
            for (kind, stage), overlap in beside_messages(played, self.hop, waiting=waiting).items():
                slower["B" if kind == "BW" else kind][stage] += lost * overlap
            played = play(schedule, slower, self.hop)
        return played

    @cached_property
    def hop(self) -> float:
        """The seconds of a message between stages."""
        record = Collective("send", PIPE, self.stream_nbytes, self.candidate.shape.pipe, "stream")
        return self.prices.collective(record)

    def _over_replicas(self, op: Op, nbytes: int, axis: str = REPLICA) -> float:
        replicas = self.candidate.shape.cuts[axis]
        return self.prices.collective(Collective(op, axis, nbytes, replicas, "")) if replicas > 1 and nbytes else 0.0

    def _of_stages(self, op: Op, own: Sequence[int]) -> float:
        """Return the seconds in which gradients or parameters of some stages travel between replicas."""
        nbytes, experts = self._parameter_nbytes(own), self._expert_nbytes(own)
        return self._over_replicas(op, nbytes - experts) + self._over_replicas(op, experts, REPLICAS[1])

    def over_replicas_of(self, rank: int) -> float:
        """Return the seconds in which a pipe rank's gradients and parameters travel between replicas in a step."""
        shards = self.candidate.policy.shard_optimizer
        ops: tuple[Op, ...] = ("reduce_scatter", "all_gather") if shards else ("all_reduce",)
        return sum(self._of_stages(op, self.stages.of_rank(rank)) for op in ops)

    def late_sums(self, played: Played) -> float:
        """Return for how much longer a step takes because its gradients are summed over replicas.

        A rank waits for its sums when it has sent everything, so those of a rank that is ready early run while others
        still work.
        """
        orders = zip(played.schedule.orders, played.ends, strict=True)
        ready = max(ends[-1] + self._late_sum(order[-1].stage) for order, ends in orders)
        return max(0.0, ready - played.makespan)

    def _late_sum(self, stage: int) -> float:
        """Return the seconds of the sums of a stage's gradients that its last backward pass does not hide."""
        policy, nbytes = self.candidate.policy, self._parameter_nbytes((stage,))
        op: Op = "reduce_scatter" if policy.shard_optimizer else "all_reduce"
        # nothing runs behind the last bucket, which is the table where the stage has it
        left = self._table_nbytes if self.stages.has_embedding(stage) else min(nbytes, policy.bucket_bytes)
        whole, last = self._of_stages(op, (stage,)), self._over_replicas(op, left)
        if not policy.overlap.reduce_early:
            return whole
        backward = sum(self.stage(kind, stage).seconds for kind in self.kinds[1:])
        layers = max(1, len(self.stages.layers_of(stage)))
        hidden = backward * (1 - 0.5 / layers)  # the first gradients come in the middle of the first layer
        slower = (1 - 1 / self.prices.machine.contention) * min(whole, backward)
        return max(last, whole - hidden) + slower

    @property
    def _table_nbytes(self) -> int:
        """The bytes of a rank's shard of the embedding's table."""
        return self.sizes.shard_elements(("embedding.weight",)) * self.sizes.dtype.itemsize

    def copies(self) -> float:
        """Return the seconds in which two pipe ranks exchange the gradient of a tied table."""
        placement, shape = self.stages.placement, self.candidate.shape
        if not self.task.config.tied or placement[0] == placement[-1]:
            return 0.0
        parts = shape.sizes[REPLICA] if self.candidate.policy.shard_optimizer else 1
        return self.prices.collective(Collective("send", PIPE, self._table_nbytes // parts, shape.pipe, ""))

    def not_added(self, rank: int) -> float:
        """Return the seconds that the first micro-batch of a rank saves: its gradients are added to nothing."""
        return self.prices.kernel(ADDED * self._parameter_nbytes(self.stages.of_rank(rank)))

    def late_parameters(self, played: Played) -> float:
        """Return for how long the step waits for parameters that a sharded optimizer gathers when it begins.

        With several micro-batches a rank begins when it has all of them: the count of targets queues behind them.
        """
        if not self.candidate.policy.shard_optimizer or all(self.candidate.shape.cuts[axis] == 1 for axis in REPLICAS):
            return 0.0
        late = [0.0]
        for rank, (starts, ends) in enumerate(zip(played.starts, played.ends, strict=True)):
            gathered = self._of_stages("all_gather", self.stages.of_rank(rank))
            late.append(gathered - (starts if self.candidate.micro_steps > 1 else ends)[0])
        return max(late)

    def _parameter_nbytes(self, own: Sequence[int]) -> int:
        """Return the bytes of this rank's shards of the parameters of some stages."""
        parts = [part_of(self.stages, stage) for stage in own]
        layers = [index for part in parts for index in part.layers]
        embedding, head = (any(getattr(part, end) for part in parts) for end in ("embedding", "head"))
        return self.sizes.units_nbytes(layers, embedding=embedding, head=head)

    def _expert_nbytes(self, own: Sequence[int]) -> int:
        """Return how many of these bytes are those of experts on a fold, which have replicas of their own."""
        layers = [index for stage in own for index in self.stages.layers_of(stage)]
        return self.sizes.expert_shard(layers) * self.sizes.dtype.itemsize

    def optimizer(self) -> Totals:
        """Return what the norm of the gradients and the optimizer take on the rank that has most parameters."""
        heaviest = max(range(self.stages.pipe), key=lambda rank: self._parameter_nbytes(self.stages.of_rank(rank)))
        program = optimizer_program(self.candidate.sizes(self.task, pipe_rank=heaviest))
        return simulate(program.work, self.prices, self.task.dtype).totals


# --- models that a function builds


@dataclass(frozen=True, slots=True)
class UndividedMemory:
    """Peak bytes of a dry run, which does not tell kinds apart."""

    total: int
    host: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        return {"all": self.total}


@dataclass(frozen=True)
class TracedPrice(Price):
    """The price of a model that was run dry."""

    dry: DryRun

    @cached_property
    def memory(self) -> UndividedMemory:
        return UndividedMemory(self.dry.peak_bytes)

    @cached_property
    def flops(self) -> Flops:
        """FLOPs per token of products and attention; a dry run does not tell apart what is computed twice."""
        counted = Program(self.dry.program, []).flops
        per_token = counted * self.candidate.micro_steps * self.candidate.shape.world / self.task.tokens
        return Flops(per_token, per_token)

    @property
    def halves(self) -> int:
        return 1

    @property
    def parameters(self) -> int:
        return self.dry.parameters

    def timeline(self) -> Timeline:
        return play_dry_run(self.task, self.candidate, self.dry, trace=True)


def price_dry_run(task: Task, candidate: Candidate, dry: DryRun) -> TracedPrice:
    """Price a dry run of one micro-step and the optimizer step."""
    one = play_dry_run(task, candidate, dry).totals
    # gradients are summed over data once; the optimizer step, which is short, is counted in every micro-step
    totals = one.plus(without_replica_traffic(one), candidate.micro_steps - 1)
    return TracedPrice(task, candidate, totals, dry)


def play_dry_run(task: Task, candidate: Candidate, dry: DryRun, *, trace: bool = False) -> Timeline:
    phases = [(0, "forward")]
    return simulate(dry.program, task.seconds_on(candidate), task.dtype, phases=phases, trace=trace)

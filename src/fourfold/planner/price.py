"""The price of a candidate: its program played on a machine, and its memory.

The simulated device has one stream for computation and one for each lane of communication (an axis, or its gathers and
its reductions separately). A collective begins when the computation launched before it is done and its lane is free. It
first takes its latency, then the link, which transfers that cross nodes share. A wait stops the computation until the
collective has landed: that is exposed time. On a GPU the host issues the work ahead of the device, one item after
another; an item begins when it is issued and the device is free. On the CPU the host computes itself: its time per
item, and launching a collective, count as computation. Computation is
slower by the machine's `contention` while anything is in flight, and a collective is slower while the device computes
if it has to wait for its `turn`. Playing the program in its own order is exact: whatever is on a link at some moment
was launched before that moment.

A step of many equal layers and micro-steps is periodic. A few layers and up to two micro-steps are simulated; the rest
repeats what one more layer and one more micro-step took.

A pipeline is simulated in two levels. `unit_totals` plays the programs of small stages by themselves and finds what a
layer, the embedding and the head take in F, B and W, communication inside the stage included. `schedule.play` then
plays the schedule with the seconds of its stages and messages.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fourfold.axes import AXES, PIPE, REPLICA
from fourfold.grid import Shape
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig
from fourfold.planner.machine import CARD, DTYPES, HostMode, Machine, Seconds
from fourfold.planner.memory import Memory, peak_memory, peak_memory_of_pipe
from fourfold.planner.program import AttentionOp, ComputeOp, LaunchOp, MatmulOp, MemoryOp, Program, WaitOp, Work
from fourfold.planner.sizes import LocalSizes
from fourfold.planner.transformer import (
    Flops,
    ModelPart,
    flops_per_token,
    optimizer_program,
    part_of,
    recompute_of,
    stage_program,
    step_program,
)
from fourfold.policy import Policy, Recompute
from fourfold.schedule.play import Played, play
from fourfold.schedule.stages import Stages

if TYPE_CHECKING:
    from fourfold.planner.trace import DryRun

COMPUTE = "compute"
"""The track of the timeline that shows computation."""
QUICK_LAYERS = 3, 4
"""The two numbers of layers that are simulated to compare candidates; the price of more layers is extrapolated."""
CLOSE_LAYERS = 6, 12
"""The same for a price that is shown: the sums over data reach their steady pace only after several layers."""
SIMULATED_MICRO_STEPS = 2
"""The most micro-steps that are simulated: the second one shows what each further one takes."""
SHOWN_LAYERS = 4
"""The layers of a timeline that a person looks at."""


# --- the simulation


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One piece of work on a track of the timeline: `compute`, or a lane."""

    track: str
    label: str
    start: float
    end: float
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds of a step or of a part of it."""

    seconds: float
    compute: float
    """Seconds of products and kernels, including the slowdown while collectives were in flight."""
    link: Mapping[str, float]
    """Seconds that collectives of each axis were in transfer."""
    exposed: Mapping[str, float]
    """Seconds that computation waited for collectives of each axis."""
    host: float = 0.0
    """Seconds that the device waited for the host, which was late with the next piece of work."""

    def plus(self, other: Totals, times: float = 1.0) -> Totals:
        """Return the sum of these totals and `times` the others."""

        def add(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
            return {axis: one.get(axis, 0.0) + times * two.get(axis, 0.0) for axis in (*one, *two)}

        return Totals(
            self.seconds + times * other.seconds,
            self.compute + times * other.compute,
            add(self.link, other.link),
            add(self.exposed, other.exposed),
            self.host + times * other.host,
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step."""

    totals: Totals
    marks: list[tuple[str, Totals]]
    """The totals at the beginning of each phase."""
    spans: list[TimelineSpan]
    """All pieces of work, if the simulation kept a trace."""

    @property
    def seconds(self) -> float:
        return self.totals.seconds


@dataclass(slots=True)
class TransferInFlight:
    """A collective that was launched; see `TransferCost`."""

    flight: int
    label: str
    axis: str
    fixed: float
    """Seconds of latency that are left."""
    moving: float
    """Seconds on the link that are left, if nothing else uses it."""
    link: str
    beside: float
    start: float = 0.0


class LinkQueues:
    """All lanes: the transfer under way on each, and those that wait behind it."""

    def __init__(self, spans: list[TimelineSpan] | None) -> None:
        self.now = 0.0
        self.landed: dict[int, float] = {}
        """When each collective landed."""
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.spans = spans
        self._queues: defaultdict[str, deque[TransferInFlight]] = defaultdict(deque)
        self._under_way: dict[str, TransferInFlight] = {}

    def launch(self, lane: str, transfer: TransferInFlight, at: float) -> None:
        """Launch a transfer; `at` is not before any moment that was asked about."""
        self.advance(at)
        if lane in self._under_way:
            self._queues[lane].append(transfer)
        else:
            transfer.start = at
            self._under_way[lane] = transfer

    @property
    def idle(self) -> bool:
        return not self._under_way

    def land(self, flight: int) -> float:
        """Return when the collective lands, with the device standing still until then."""
        while flight not in self.landed:
            self.take(self.pending(computing=False))
        return self.landed[flight]

    def advance(self, until: float, *, computing: bool = False) -> None:
        while self.now < until and self._under_way:
            self.take(self.pending(computing=computing), until)
        self.now = max(self.now, until)

    def pending(self, *, computing: bool) -> list[tuple[float, float, str, TransferInFlight]]:
        """Return for each transfer under way: the seconds until its latency is over or it has landed, the factor by
        which it is slower than alone, its lane, the transfer."""
        on_card = 0
        for one in self._under_way.values():
            if one.link == CARD and one.fixed <= 0.0:
                on_card += 1
        found = []
        for lane, one in self._under_way.items():
            slow = one.beside if computing else 1.0
            if one.fixed > 0.0:
                found.append((slow * one.fixed, slow, lane, one))
            else:
                if one.link == CARD:
                    slow *= on_card  # transfers on the network cards share their bandwidth equally
                found.append((slow * one.moving, slow, lane, one))
        return found

    def take(self, pending: list[tuple[float, float, str, TransferInFlight]], until: float = inf) -> None:
        """Advance to the first of these changes, or to that time."""
        step = min(min([left for left, _, _, _ in pending]), until - self.now)
        self.now += step
        for left, slow, lane, transfer in pending:
            done = step / slow
            if transfer.fixed > 0.0:
                # assign 0 exactly: a rounding remainder would cost one more event
                transfer.fixed = 0.0 if step >= left else transfer.fixed - done
                if transfer.fixed == 0.0 and transfer.moving <= 0.0:
                    self._end(lane, transfer)
            elif step >= left:
                self._end(lane, transfer)
            else:
                transfer.moving -= done

    def _end(self, lane: str, transfer: TransferInFlight) -> None:
        self.landed[transfer.flight] = self.now
        self.busy[transfer.axis] += self.now - transfer.start
        if self.spans is not None:
            self.spans.append(TimelineSpan(lane, transfer.label, transfer.start, self.now))
        if queue := self._queues[lane]:
            following = self._under_way[lane] = queue.popleft()
            following.start = self.now
        else:
            del self._under_way[lane]


class Simulation:
    """The compute stream of a device, and its links."""

    def __init__(self, seconds: Seconds, dtype: str, *, trace: bool) -> None:
        self.seconds, self.dtype, self.trace = seconds, dtype, trace
        self.spans: list[TimelineSpan] = []
        self.links = LinkQueues(self.spans if trace else None)
        self.now = self.compute_seconds = self.host_seconds = 0.0
        self._issued = 0.0  # when the host has issued the work so far
        self._host_computes = seconds.machine.device == "cpu"
        self._axes: dict[int, str] = {}
        self._exposed: defaultdict[str, float] = defaultdict(float)

    def play(self, item: Work, phase: str) -> None:
        if isinstance(item, LaunchOp):
            self._issue(self.seconds.host.item)
            record, cost = item.record, self.seconds.transfer(item.record)
            self._compute(cost.host)
            self._axes[item.flight] = record.axis
            transfer = TransferInFlight(
                item.flight, record.label, record.axis, cost.fixed, cost.moving, cost.link, cost.beside
            )
            self.links.launch(item.lane, transfer, self.now)
        elif isinstance(item, WaitOp):
            landed = self.links.land(item.flight)
            if landed > self.now:
                self._exposed[self._axes[item.flight]] += landed - self.now
                self.now = landed
        elif not isinstance(item, MemoryOp):  # allocations take no time
            self._issue(self.seconds.host.item)
            begin = self.now
            self._compute(self._seconds(item))
            if self.trace:
                self.spans.append(TimelineSpan(COMPUTE, item.label, begin, self.now, phase))

    def finish(self) -> None:
        """End the step: the host has work beside the items, and collectives that nothing waits for land."""
        if self._host_computes:
            self._compute(self.seconds.host.step)
        else:
            self._issue(self.seconds.host.step)
        while not self.links.idle:
            self.links.take(self.links.pending(computing=False))

    def _issue(self, seconds: float) -> None:
        """Let the host issue what takes it this long; the device waits if it has nothing else to do."""
        if self._host_computes:
            return  # the host's time is part of what it computes
        self._issued += seconds
        if self._issued > self.now:
            self.host_seconds += self._issued - self.now
            self.now = self._issued

    def _seconds(self, item: ComputeOp) -> float:
        if isinstance(item, MatmulOp):
            return self.seconds.product(item.m, item.k, item.n, self.dtype)
        if isinstance(item, AttentionOp):
            return self.seconds.attention(item.flops, item.nbytes, self.dtype)
        return self.seconds.fused(item.nbytes) if item.fused else self.seconds.kernel(item.nbytes)

    def _compute(self, left: float) -> None:
        """Compute what takes `left` seconds alone; it takes longer while something is in flight."""
        begin, contention = self.now, self.seconds.machine.contention
        self.links.advance(self.now)
        while contention > 1.0 and not self.links.idle:
            pending = self.links.pending(computing=True)
            change = self.links.now + min([seconds for seconds, _, _, _ in pending])
            done = (change - self.now) / contention
            if done >= left:
                left *= contention
                break
            left -= done
            self.links.take(pending)
            self.now = self.links.now
        self.now += left
        self.links.advance(self.now, computing=True)
        self.compute_seconds += self.now - begin

    def totals(self, seconds: float) -> Totals:
        return Totals(seconds, self.compute_seconds, dict(self.links.busy), dict(self._exposed), self.host_seconds)


def simulate(
    work: Sequence[Work], seconds: Seconds, dtype: str, *, phases: Sequence[tuple[int, str]] = (), trace: bool = False
) -> Timeline:
    """Play a program. With `trace` every span is kept, with the phase that it belongs to."""
    player, begins, marks, phase = Simulation(seconds, dtype, trace=trace), dict(phases), [], ""
    for index, item in enumerate(work):
        if index in begins:
            phase = begins[index]
            player.links.advance(player.now)
            marks.append((phase, player.totals(player.now)))
        player.play(item, phase)
    if len(work) in begins:
        player.links.advance(player.now)
        marks.append((begins[len(work)], player.totals(player.now)))
    player.finish()
    return Timeline(player.totals(max(player.now, player.links.now)), marks, player.spans)


def chrome_trace(spans: Sequence[TimelineSpan], *, process: str = "planned") -> dict[str, Any]:
    """Return the spans as Perfetto and chrome://tracing read them: one thread for each track, computation first."""
    tracks = sorted({span.track for span in spans}, key=lambda track: (track != COMPUTE, track))
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}}]
    for tid, track in enumerate(tracks):
        events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": track}})
    for span in spans:
        microseconds = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
        category = span.phase or "communication"
        place = {"ph": "X", "pid": 0, "tid": tracks.index(span.track)}
        events.append({**place, "name": span.label, "cat": category, **microseconds})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def chrome_trace_of_pipe(played: Played) -> dict[str, Any]:
    """Return the actions of a schedule in the same format: one process for each pipe rank."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(played.spans):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipe rank {rank}"}})
        for span in spans:
            microseconds = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            place = {"ph": "X", "pid": rank, "tid": span.action.stage}
            events.append({**place, "name": str(span.action), "cat": span.action.kind, **microseconds})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


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

    def host_mode(self, policy: Policy) -> HostMode:
        """Return how the host gives a step to the device under this policy."""
        if self.captured and self.machine.device != "cpu":
            return "captured"
        return "compiled" if policy.compile else "eager"

    def seconds_on(self, candidate: Candidate) -> Seconds:
        """Return the prices of work for a candidate."""
        policy = candidate.policy
        return Seconds(self.machine, candidate.shape, self.host_mode(policy), compiled=policy.compile)

    @property
    def tokens(self) -> int:
        return self.rows * self.seq

    @property
    def dtype(self) -> str:
        return DTYPES[self.compute]

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
    """Rows of a (data, z) place in one micro-step."""
    micro_steps: int

    def sizes(self, task: Task, *, layers: int | None = None, pipe_rank: int = 0) -> LocalSizes:
        """Return the sizes of the first rank at a pipe coordinate, which holds the largest shards there.

        With `layers` they are those of a model with that many.
        """
        config = task.config if layers is None else replace(task.config, layers=layers)
        rank = self.shape.rank({**dict.fromkeys(AXES, 0), PIPE: pipe_rank}) if pipe_rank else 0
        return LocalSizes(config, self.shape, self.policy, self.rows, task.seq, task.parameters, rank)

    @property
    def played_micro_steps(self) -> int:
        """The micro-batches of a pipeline that are played: enough for its steady state, if its schedule has a name."""
        if not isinstance(self.policy.schedule, str):
            return self.micro_steps
        return min(self.micro_steps, STEADY * self.shape.pipe)

    @property
    def without_stages(self) -> Candidate:
        """The same candidate with stages and schedule left open: what a unit of the model takes is the same."""
        return replace(self, policy=replace(self.policy, stages=None, schedule="auto"), micro_steps=1)


class MemoryByKind(Protocol):
    """Bytes of a rank at its peak, by kind."""

    @property
    def kinds(self) -> dict[str, int]: ...
    @property
    def total(self) -> int: ...


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
        return flops_per_token(self.task.config, self.task.seq, self.candidate.policy)

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
        """The largest part of the step: `compute`, `host`, or the axis with the most exposed communication."""
        parts = {"compute": self.totals.compute, "host": self.totals.host}
        parts |= {axis: self.totals.exposed.get(axis, 0.0) for axis in AXES}
        return max(parts, key=lambda part: parts[part])


def memory_of(task: Task, candidate: Candidate) -> Memory:
    """Return the peak of the device that needs most."""
    if candidate.shape.pipe > 1:
        return max(memory_by_pipe_rank(task, candidate), key=lambda memory: memory.total)
    return peak_memory(candidate.sizes(task), micro_steps=candidate.micro_steps)


def price(task: Task, candidate: Candidate, *, quick: bool = False) -> Price:
    """Simulate a few layers and micro-steps, and extrapolate to all of them."""
    if candidate.shape.pipe > 1:
        return price_pipe(task, candidate)
    layers, (few, more) = task.config.layers, QUICK_LAYERS if quick else CLOSE_LAYERS
    if layers <= more:
        return Price(task, candidate, simulate_layers(task, candidate, layers))
    begin = simulate_layers(task, candidate, few)
    further = simulate_layers(task, candidate, more).plus(begin, -1.0)
    totals = begin.plus(further, (layers - few) / (more - few))
    # With more layers, more of the sums over data is hidden: clamp the exposed time at zero.
    exposed = {axis: max(0.0, seconds) for axis, seconds in totals.exposed.items()}
    missing = sum(exposed.values()) - sum(totals.exposed.values())
    return Price(task, candidate, replace(totals, seconds=totals.seconds + missing, exposed=exposed))


def simulate_layers(task: Task, candidate: Candidate, layers: int) -> Totals:
    """Return the totals of a step, with all micro-steps, of a model with this many layers."""
    played = min(candidate.micro_steps, SIMULATED_MICRO_STEPS)
    line = timeline(task, candidate, layers=layers, micro_steps=played)
    totals = line.totals
    if candidate.micro_steps > played:
        first, second = [totals for phase, totals in line.marks if phase == "forward"][-2:]
        totals = totals.plus(without_replica_traffic(second.plus(first, -1.0)), candidate.micro_steps - played)
    return totals


def without_replica_traffic(micro_step: Totals) -> Totals:
    """Return a micro-step without its traffic over data.

    Only the first micro-step waits for parameters from other replicas, only the last one sums gradients over them.
    """
    exposed = {axis: seconds for axis, seconds in micro_step.exposed.items() if axis != REPLICA}
    link = {axis: seconds for axis, seconds in micro_step.link.items() if axis != REPLICA}
    seconds = micro_step.seconds - micro_step.exposed.get(REPLICA, 0.0)
    return replace(micro_step, seconds=seconds, link=link, exposed=exposed)


def timeline(
    task: Task, candidate: Candidate, *, layers: int | None = None, micro_steps: int | None = None, trace: bool = False
) -> Timeline:
    """Simulate a step; None: with all layers, with all micro-steps."""
    # the rank order changes where rank 0's groups lie, but not what rank 0 does: orders share one cached program
    any_order = replace(candidate, shape=candidate.shape.reordered(AXES), micro_steps=1)
    program = _program(task, any_order, layers, micro_steps or candidate.micro_steps)
    return simulate(program.work, task.seconds_on(candidate), task.dtype, phases=program.phases, trace=trace)


@lru_cache(maxsize=128)
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
    embedding: Mapping[str, Totals]
    head: Mapping[str, Totals]

    def stage(self, kind: str, part: ModelPart) -> Totals:
        """Return what an action of this kind takes in a stage with these units."""
        if not (part.layers or part.embedding or part.head):
            return NOTHING
        found = self.fixed[kind].plus(self.layer[kind], len(part.layers))
        found = found.plus(self.embedding[kind]) if part.embedding else found
        return found.plus(self.head[kind]) if part.head else found

    def seconds(self, kind: str, part: ModelPart) -> float:
        return max(0.0, self.stage(kind, part).seconds)


NOTHING = Totals(0.0, 0.0, {}, {})
STEADY = 3
"""Micro-batches per pipe rank that are played of a named schedule; further ones add the work of the busiest rank."""
STAGE_LAYERS = 2, 4
"""The two numbers of layers of the stages that are simulated; a layer takes half of their difference."""
STAGE_PASSES = 2
"""Micro-batches that go through a simulated stage: the second has one before it, and counts."""


@lru_cache(maxsize=512)
def unit_totals(task: Task, candidate: Candidate, recompute: Recompute, *, split: bool) -> UnitTotals:
    """Simulate small stages of a candidate `without_stages`, and return what each unit takes.

    With `split` backward is B and W, else BW.
    """
    few, more = STAGE_LAYERS
    parts = {
        "few": ModelPart(range(few), embedding=False, head=False),
        "more": ModelPart(range(more), embedding=False, head=False),
        "embedding": ModelPart(range(few), embedding=True, head=False),
        "head": ModelPart(range(few), embedding=False, head=True),
    }
    found = {name: _simulate_stage(task, candidate, part, recompute, split) for name, part in parts.items()}
    kinds = found["few"].keys()
    layer = {kind: NOTHING.plus(found["more"][kind].plus(found["few"][kind], -1.0), 1 / (more - few)) for kind in kinds}
    return UnitTotals(
        fixed={kind: found["few"][kind].plus(layer[kind], -few) for kind in kinds},
        layer=layer,
        **{
            end: {kind: found[end][kind].plus(found["few"][kind], -1.0) for kind in kinds}
            for end in ("embedding", "head")
        },
    )


def _simulate_stage(
    task: Task, candidate: Candidate, part: ModelPart, recompute: Recompute, split: bool
) -> dict[str, Totals]:
    """Return what each kind of action takes in one stage by itself."""
    sizes = candidate.sizes(task, layers=max(STAGE_LAYERS))
    program = stage_program(sizes, part, recompute, split=split, passes=STAGE_PASSES)
    line = simulate(program.work, task.seconds_on(candidate), task.dtype, phases=program.phases)
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
        return max(self.memories, key=lambda memory: memory.total)

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
    played = play(schedule, costs.seconds(), costs.hop)
    late = costs.late_parameters(played) + costs.late_sums(played)
    rank = max(range(stages.pipe), key=lambda each: played.work[each])
    work = NOTHING
    for kind, stage, _ in schedule.orders[rank]:
        work = work.plus(costs.stage(kind, stage), times)
    ending = costs.optimizer()
    waits = played.makespan - played.work[rank]
    exposed = {axis: max(0.0, seconds) for axis, seconds in work.exposed.items()}
    sent = sum(len(line) for line in schedule.messages[rank].sends.values())
    copies, steady = costs.copies(), (times - 1) * played.work[rank]
    totals = Totals(
        played.makespan + steady + late + copies + ending.seconds,
        work.compute + ending.compute,
        {**work.link, PIPE: times * sent * costs.hop + copies, REPLICA: costs.over_replicas_of(rank)},
        {**exposed, PIPE: waits + copies, REPLICA: exposed.get(REPLICA, 0.0) + late},
        work.host + ending.host,
    )
    name = candidate.policy.schedule
    return PipePrice(task, candidate, totals, played, name if isinstance(name, str) else "found")


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

    def stage(self, kind: str, stage: int) -> Totals:
        """Return what an action takes."""
        recompute = recompute_of(self.stages, stage, self.candidate.policy)
        return self.units[recompute].stage(kind, part_of(self.stages, stage))

    def seconds(self) -> dict[str, list[float]]:
        """Return the seconds of F, B and W of every stage; all of BW counts as B."""
        every = range(len(self.stages.placement))
        found = {kind: [max(0.0, self.stage(kind, stage).seconds) for stage in every] for kind in self.kinds}
        return {"W": [0.0] * len(every), **{"B" if kind == "BW" else kind: times for kind, times in found.items()}}

    @cached_property
    def hop(self) -> float:
        """The seconds of a message between stages."""
        record = Collective("send", PIPE, self.stream_nbytes, self.candidate.shape.pipe, "stream")
        return self.prices.collective(record)

    def _over_replicas(self, op: Op, nbytes: int) -> float:
        replicas = self.candidate.shape.sizes[REPLICA]
        return self.prices.collective(Collective(op, REPLICA, nbytes, replicas, "")) if replicas > 1 else 0.0

    def over_replicas_of(self, rank: int) -> float:
        """Return the seconds in which a pipe rank's gradients and parameters travel between replicas in a step."""
        nbytes = self._parameter_nbytes(self.stages.of_rank(rank))
        shards = self.candidate.policy.shard_optimizer
        ops: tuple[Op, ...] = ("reduce_scatter", "all_gather") if shards else ("all_reduce",)
        return sum(self._over_replicas(op, nbytes) for op in ops)

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
        whole, last = (self._over_replicas(op, each) for each in (nbytes, left))
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

    def late_parameters(self, played: Played) -> float:
        """Return for how long the step waits for parameters that a sharded optimizer gathers when it begins.

        With several micro-batches a rank begins when it has all of them: the count of targets queues behind them.
        """
        if not self.candidate.policy.shard_optimizer or self.candidate.shape.sizes[REPLICA] == 1:
            return 0.0
        late = [0.0]
        for rank, (starts, ends) in enumerate(zip(played.starts, played.ends, strict=True)):
            gathered = self._over_replicas("all_gather", self._parameter_nbytes(self.stages.of_rank(rank)))
            late.append(gathered - (starts if self.candidate.micro_steps > 1 else ends)[0])
        return max(late)

    def _parameter_nbytes(self, own: Sequence[int]) -> int:
        """Return the bytes of this rank's shards of the parameters of some stages."""
        parts = [part_of(self.stages, stage) for stage in own]
        layers = sum(len(part.layers) for part in parts)
        embedding, head = (any(getattr(part, end) for part in parts) for end in ("embedding", "head"))
        return self.sizes.units_nbytes(layers, embedding=embedding, head=head)

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

"""Runs a schedule: the forward and backward passes of this rank's stages, and the messages between stages.

    F(s, i): receive the stream of micro-batch i, or embed its tokens; run the units of stage s; send the stream on
    B(s, i): receive its gradient, or begin at the loss; run backward; send the gradient of the input back
    W(s, i): the products of weight gradients, which B(s, i) has held back; BW is both in one

The stream crosses as one tensor at rest, [m/x, k/y] in the compute dtype. A message travels in a one-way lane, and a
receiver takes the messages of a lane in the order in which they are sent; so a rank waits only for what stands, in an
order that `Schedule.check` has walked, before anything that depends on this rank.

Invariant: the schedule changes no bit of a result. Every stage works on micro-batches in order, so gradients are added
in one order.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fourfold import comm
from fourfold.action_times import ActionTimes
from fourfold.axes import PIPE
from fourfold.comm import Pending, Sending
from fourfold.engine import BACKWARD, Engine
from fourfold.gradients import ForwardPass, Gradients
from fourfold.grid import Grid
from fourfold.nn.attention import Batch
from fourfold.nn.loss import IGNORE_INDEX, count_held
from fourfold.nn.rng import StepRng
from fourfold.nn.router import LossWeight
from fourfold.offload import OffloadedInputs
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.schedule.action import Action, Lane, PipeMessage, Schedule
from fourfold.schedule.choose import choose
from fourfold.schedule.receives import receives_of
from fourfold.schedule.stages import Stages

Rows = Sequence[Any] | Mapping[str, Any]
"""(tokens, targets), and if need be positions and the lengths of documents; or a mapping with these names."""


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: == of tensors is no bool
class Half:
    """One of the parts that the rows of a place are cut into, or all of the rows."""

    tokens: Tensor
    targets: Tensor
    """Empty if the model is to return logits."""
    batch: Batch
    most: int
    """The number of tokens of the largest half."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The rows of a place in one pass."""

    halves: list[Half]
    shape: torch.Size
    """[rows, seq]"""
    has_targets: bool
    ignore_index: int
    fault: str
    """What is wrong with the rows; empty if nothing is."""
    router_losses: list[LossWeight] = field(default_factory=list)
    """The weights of the losses that routers have in the stages of this rank."""


class StagedModel(Protocol):
    """What a model has to offer to be run stage by stage."""

    grid: Grid
    policy: Policy
    stages: Stages
    gradients: Gradients
    clock: StepRng
    training: bool

    @property
    def engine(self) -> Engine: ...

    @property
    def compute(self) -> torch.dtype:
        """The dtype of products and messages."""
        ...

    @property
    def table_on_two_ranks(self) -> nn.Parameter | None:
        """The table of the embedding if another pipe rank has it too, for the head."""
        ...

    def prepare(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Sequence[int] | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> MicroBatch:
        """Return the rows of a place as stages take them."""
        ...

    def empty_stream(self, batch: MicroBatch) -> Tensor:
        """Return memory for the stream of a micro-batch between two stages."""
        ...

    def empty_logits(self, batch: MicroBatch) -> Tensor:
        """Return memory for the logits of a micro-batch."""
        ...

    def run_stage(
        self, stage: int, batch: MicroBatch, arrived: Tensor | None, count: Tensor | int | None
    ) -> tuple[Tensor, Tensor]:
        """Run a stage on the stream that has arrived; return its result, and the number of faults."""
        ...

    def report(self, batch: MicroBatch, faults: Tensor) -> None:
        """Raise if the rows of this place or of another one were refused."""
        ...


def forward_backward(
    model: StagedModel,
    micro_batches: Iterable[Rows],
    *,
    ignore_index: int = IGNORE_INDEX,
    times: ActionTimes | None = None,
) -> Tensor:
    """Run forward and backward of a step, and return the mean loss over the unmasked targets of its whole batch.

    A micro-batch is (tokens, targets), (tokens, targets, positions) or (tokens, targets, positions, documents), as a
    model takes them, or a mapping with these names: rows of this rank's place, the same on all its ranks. Gradients are
    complete afterwards; the loss is equal on all ranks and has no graph. If a place's rows are refused, all ranks raise
    at the end of the step, and gradients are cleared. On a grid with a pipe axis the policy's schedule says in which
    order a rank works; `times` records when.

        for micro_batches in loader:
            loss = ff.forward_backward(model, micro_batches)
            optimizer.step()
            optimizer.zero_grad()
    """
    if not torch.is_grad_enabled():
        raise RuntimeError(
            "forward_backward runs backward, but gradients are off (torch.no_grad or torch.inference_mode); to "
            "evaluate, call model(tokens, targets)"
        )
    rows = [_named_parts(each) for each in micro_batches]
    if not rows:
        raise ValueError("forward_backward needs at least one micro-batch")
    model.grid.agree_on_change("the number of micro-batches", str(len(rows)))
    batches = [model.prepare(**each, ignore_index=ignore_index) for each in rows]
    count = None
    if len(rows) > 1:
        targets = torch.cat([half.targets.flatten() for batch in batches for half in batch.halves])
        count = count_held(targets, model.grid, ignore_index=ignore_index)
    step = PipelineStep(model, batches, schedule_of(model, len(batches)), count)
    step.times = times
    step.run()
    try:
        return step.loss()
    except ValueError:  # a loop that goes on with the next batch must not add to the gradients of this one
        for parameter, _ in model.gradients.parameters.values():
            parameter.grad = None
        raise


PARTS = ("tokens", "targets", "positions", "documents")


def _named_parts(micro_batch: Rows) -> dict[str, Any]:
    if isinstance(micro_batch, Mapping):
        named = dict(micro_batch)
    elif len(micro_batch) > len(PARTS):
        raise ValueError(
            f"a micro-batch has {len(micro_batch)} parts; give {', '.join(PARTS)}, the last two if need be"
        )
    else:
        named = dict(zip(PARTS, micro_batch, strict=False))
    if unknown := named.keys() - PARTS:
        raise ValueError(f"a micro-batch has a part {min(unknown)!r}; the parts are named {', '.join(PARTS)}")
    if named.get("tokens") is None or named.get("targets") is None:
        raise ValueError(
            "forward_backward needs the tokens and the targets of every micro-batch; for logits call model(tokens)"
        )
    return named


def schedule_of(model: StagedModel, micro_steps: int) -> Schedule:
    """Return the schedule of a step of this model."""
    return choose(model.policy.schedule, model.stages, micro_steps)


@dataclass(slots=True)
class StagePass:
    """One micro-batch in one stage, from its F until its gradients are computed."""

    arrived: Tensor | None
    """The stream that the stage read, a leaf of autograd's graph; None if it read tokens."""
    result: Tensor
    counted: ForwardPass
    offloaded: weakref.ref[OffloadedInputs] | None
    """The inputs of its last block, if they wait on the host: backward needs them first."""


class PipelineStep:
    """One step of this rank: it walks the schedule's order of its pipe coordinate."""

    def __init__(
        self, model: StagedModel, batches: Sequence[MicroBatch], schedule: Schedule, count: Tensor | None
    ) -> None:
        self.model, self.batches, self.schedule, self.count = model, batches, schedule, count
        self.grid, self.stages, self.engine = model.grid, model.stages, model.engine
        self.here = self.grid.coords[PIPE]
        self._first_micro_step = model.clock.micro_step
        self._passes: dict[tuple[int, int], StagePass] = {}
        self._handed: dict[tuple[str, int, int], Tensor] = {}  # F or B, stage, micro-batch: between stages of this rank
        ahead = model.policy.overlap.receives_ahead(self.grid.device.type)
        self._receives = receives_of(schedule, self.here, ahead=ahead)
        self._receiving: dict[PipeMessage, Pending[Tensor]] = {}
        self._sent: list[Sending] = []
        self.device = device = batches[0].halves[0].tokens.device
        if self.grid.broken_off:
            raise RuntimeError(
                f"an earlier step of this pipeline broke off with {self.grid.broken_off}, and its messages may still "
                "be on their way between stages, where this step would take them for its own; start the ranks again"
            )
        if device.type != "meta":  # a dry run sends nothing, and may run on one rank alone
            connect(self.grid, self.stages)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._faults = torch.zeros((), device=device)
        self.logits: Tensor | None = None
        self.scale: Tensor | None = None
        """The gradient of the loss; None stands for 1."""
        self.times: ActionTimes | None = None
        """Records when the actions run, if anybody asks."""

    def run(self) -> None:
        """Run all actions and complete the gradients."""
        order = self.schedule.orders[self.here]
        gradients, prefetcher = self.model.gradients, self.engine.prefetcher
        gradients.begin_step(sum(action.kind == "F" for action in order), until_end_step=True)
        with self.may_break_off():
            prefetcher.keep(self.model.policy.gather_weights)
            for action in order:
                prefetcher.begin_stage(action.stage)
                self.act(action)
            prefetcher.keep("use")
            self.finish_backward()

    @contextmanager
    def may_break_off(self) -> Iterator[None]:
        """Leave the model ready for another step if an error ends this one, but refuse to mix their messages."""
        try:
            yield
        except BaseException as error:
            self.engine.prefetcher.keep("use")
            self.model.gradients.give_up_step()
            if self.stages.pipe > 1:
                self.grid.broken_off = f"{type(error).__name__}: {error}"
            raise

    @property
    def holds_graphs(self) -> bool:
        """Whether passes wait for their backward."""
        return bool(self._passes)

    def finish_backward(self) -> None:
        """Complete the gradients of a step whose actions have all run."""
        self.model.gradients.end_step()
        self._wait_for_sends()
        if not self.model.gradients.accumulating:
            add_copies(self.model)

    def act(self, action: Action) -> None:
        if self.times is not None:
            self.times.begin()
        self._begin_receives(self._receives.before.get(action, ()))
        if action.kind == "F":
            result = self._forward(action)
            self._end_times(action)
            self._hand_on(action, result)
        elif action.kind == "W":
            self._weights(action)
            self._hand_on(action, None)
        else:
            self._backward(action)
        self._end_times(action)

    def _end_times(self, action: Action) -> None:
        if self.times is not None:
            self.times.end(action)

    def loss(self) -> Tensor:
        """Return the loss of the step on all ranks, from the rank that has computed it; raise if rows were refused."""
        told = comm.all_reduce(torch.stack([self._loss, self._faults.double()]), self.grid, PIPE, label="loss").wait()
        self.model.report(next((batch for batch in self.batches if batch.fault), self.batches[0]), told[1])
        return told[0].to(torch.promote_types(self.model.compute, torch.float32))

    # --- actions

    def _forward(self, action: Action) -> Tensor | None:
        """Run a stage; return what it hands on, if there is a stage behind it."""
        _, stage, micro = action
        model, batch = self.model, self.batches[micro]
        trains = torch.is_grad_enabled()
        if model.training:
            model.clock.go_on_at(self._first_micro_step + micro + 1)
        model.gradients.begin_forward(("training" if trains else "evaluation", stage))
        arrived = None if stage == 0 else self._take(action)
        if arrived is not None and trains:
            arrived.requires_grad_()
        result, faults = model.run_stage(stage, batch, arrived, self.count)
        if trains:
            self._passes[stage, micro] = StagePass(
                arrived, result, model.gradients.forward_pass, self.engine.offloader.last
            )
        if not self.stages.has_head(stage):
            return result.detach()
        if batch.has_targets:
            self._loss += result.detach().double()
            self._faults += faults
        else:
            self.logits, self._faults = result, faults
        return None

    def _backward(self, action: Action) -> None:
        """Run a stage backward; the gradient of its input leaves as soon as it is there, before other gradients."""
        kind, stage, micro = action
        run = self._passes[stage, micro] if kind == "B" else self._passes.pop((stage, micro))
        if self.scale is not None:  # stages before the head do not see the loss
            for weight in self.batches[micro].router_losses:
                weight.gradient = self.scale
        if run.offloaded is not None and (inputs := run.offloaded()) is not None:
            inputs.prefetch()  # before the wait for the gradient
        gradient = self.scale if self.stages.has_head(stage) else self._take(action)
        self.engine.prefetcher.begin_backward((BACKWARD, stage))
        hold = self.engine.wgrad_queue.holding((stage, micro)) if kind == "B" else nullcontext()
        arrived, handed_on = run.arrived, False

        def hand_on(arrived: Tensor) -> None:
            nonlocal handed_on
            handed_on = True
            found, arrived.grad = arrived.grad, None
            self._hand_on(action, found)

        if arrived is not None:
            arrived.register_post_accumulate_grad_hook(hand_on)
        if run.result.requires_grad:
            with hold, self._sums_wait(action):
                torch.autograd.backward([run.result], [gradient] if gradient is not None else None)
        if kind == "B":
            self.model.gradients.hold(run.counted)
        if not handed_on:
            self._hand_on(action, None if arrived is None else torch.zeros_like(arrived))

    def _sums_wait(self, action: Action) -> AbstractContextManager[None]:
        """Let sums of gradients wait until an action has sent its result: another stage waits for that."""
        return self.model.gradients.sums_wait() if self.schedule.sent(action) is not None else nullcontext()

    def _weights(self, action: Action) -> None:
        run = self._passes.pop((action.stage, action.micro))
        self.model.gradients.run_held(run.counted, (action.stage, action.micro))

    # --- messages

    def _take(self, action: Action) -> Tensor:
        """Return what an action needs of the stage before it, or in backward of the one behind it."""
        needed = self.schedule.received(action)
        if needed is None:
            kind, before = ("F", action.stage - 1) if action.kind == "F" else ("B", action.stage + 1)
            return self._handed.pop((kind, before, action.micro))
        arrived = self._receiving.pop(needed).wait()
        if self.times is not None:
            self.times.begin()
        return arrived

    def _begin_receives(self, messages: Iterable[PipeMessage]) -> None:
        for message in messages:
            buffer = self.model.empty_stream(self.batches[message.micro])
            pending = comm.receive(buffer, self.grid, message.lane, message.source, label=message.label)
            self._receiving[message] = pending

    def _hand_on(self, action: Action, result: Tensor | None) -> None:
        """Begin the receives that stand behind an action, and send or keep its result if another stage takes it."""
        self._begin_receives(self._receives.after.get(action, ()))
        if result is None:
            return
        message = self.schedule.sent(action)
        if message is None:
            self._handed["F" if action.kind == "F" else "B", action.stage, action.micro] = result
            return
        # Nobody waits for a send before the end of the step: its receiver may stand, in an order without deadlock,
        # before something that depends on this rank.
        self._sent = [each for each in self._sent if not each.has_left()]
        self._sent.append(comm.send(result, self.grid, message.lane, message.target, label=message.label))
        self.model.gradients.begin_sums()

    def _wait_for_sends(self) -> None:
        while self._sent:
            self._sent.pop(0).wait()


def connect(grid: Grid, stages: Stages) -> None:
    """Send one number along every connection between stages, once for a grid.

    NCCL makes the communicator of two ranks at their first message, where both wait for each other. In the middle of a
    step they might stand at messages of different lanes.
    """
    if stages.pipe == 1 or stages.placement in grid.connected:
        return
    grid.connected.add(stages.placement)
    here, number = grid.coords[PIPE], torch.zeros(1, device=grid.device)
    ends = stages.placement[0], stages.placement[-1]  # a tied table is on both
    pairs = {*pairwise(stages.placement), ends, ends[::-1]}
    lines = {message_line(kind, *pair) for pair in pairs for kind in ("F", "B")}
    with grid.ledger.not_counted():
        for lane, source, target in sorted(lines):
            if source == target:
                continue
            if here == source:
                comm.send(number, grid, lane, target, label="connection").wait()
            elif here == target:
                comm.receive(number, grid, lane, source, label="connection").wait()


def message_line(kind: str, before: int, after: int) -> tuple[Lane, int, int]:
    """Return lane, source and target of what travels between stages on these two pipe ranks."""
    source, target = (before, after) if kind == "F" else (after, before)
    return PipeMessage(kind, 0, 0, source, target).lane, source, target  # type: ignore[arg-type]


def run_plain(model: StagedModel, batch: MicroBatch, count: Tensor | int | None) -> Tensor:
    """Run one pass through all stages: the loss with its backward, as if the model were on one stage, or the logits.

    Forward runs all F of the pass, and backward all B. `forward_backward` needs less memory and less time.
    """
    schedule = _in_order(model.stages.placement)
    step = PipelineStep(model, [batch], schedule, None if count is None else torch.as_tensor(count))
    forward, backward = (
        [action for action in schedule.orders[step.here] if (action.kind == "F") is wanted] for wanted in (True, False)
    )
    trains = torch.is_grad_enabled() and batch.has_targets
    if trains and model.grid.rank == 0 and step.device.type != "meta":
        _tell_of_forward_backward()
    with torch.set_grad_enabled(trains):
        if trains and not model.gradients.accumulating:
            model.gradients.begin_step(len(forward), until_end_step=True)
        with step.may_break_off():
            for action in forward:
                step.act(action)
            step._wait_for_sends()
    if not batch.has_targets:
        logits = _on_all_ranks(model, batch, step)
        return LogitsWithoutBackward.apply(logits, _anchor(logits)) if torch.is_grad_enabled() else logits
    loss = step.loss()
    if not trains:
        return loss
    trained = [parameter for parameter, _ in model.gradients.parameters.values() if parameter.requires_grad]
    return PlainBackward.apply(step, backward, loss, _anchor(loss), *trained)


def _anchor(result: Tensor) -> Tensor:
    """Return a leaf that makes autograd call the backward of the function that takes it."""
    return torch.zeros((), dtype=result.dtype, device=result.device, requires_grad=True)


@lru_cache(maxsize=1)
def _tell_of_forward_backward() -> None:
    warnings.warn(
        "model(...) and loss.backward() run all stages forward, then all backward, as GPipe does with one micro-batch, "
        "so most pipe ranks wait; ff.forward_backward(model, micro_batches) needs less time and memory",
        stacklevel=4,
    )


def _on_all_ranks(model: StagedModel, batch: MicroBatch, step: PipelineStep) -> Tensor:
    """Return the logits on every rank of the pipe; only the last stage has computed them."""
    found = step.logits
    own = model.empty_logits(batch).zero_() if found is None else found.detach()
    faults = comm.all_reduce(step._faults.double(), model.grid, PIPE, label="faults").wait()
    model.report(batch, faults)
    return comm.all_reduce(own, model.grid, PIPE, label="logits").wait()


class PlainBackward(torch.autograd.Function):
    """The loss of a pass through all stages; backward runs the backward actions of this rank."""

    @staticmethod
    def forward(ctx: Any, step: PipelineStep, actions: Sequence[Action], loss: Tensor, *_: Tensor) -> Tensor:
        ctx.step, ctx.actions = step, actions
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        step: PipelineStep = ctx.step
        if ctx.actions and not step.holds_graphs:
            raise RuntimeError(
                "backward ran a second time over one pass through a pipeline, which frees its graph in the first; run "
                "forward again, or scale the loss"
            )
        if step.model.gradients.hooks.left_out():
            raise RuntimeError(
                "backward(inputs=...) leaves out parameters, which a pass through a pipeline cannot; give it all "
                "trained parameters, or freeze the others before the pass"
            )
        step.scale = gradient
        with step.may_break_off():
            for action in ctx.actions:
                step.act(action)
            step.finish_backward()
        return (None, None, None, torch.zeros_like(gradient), *[None] * (len(ctx.needs_input_grad) - 4))


class LogitsWithoutBackward(torch.autograd.Function):
    """The logits of a pass through all stages, of which the last alone could run backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, _: Tensor) -> Tensor:
        ctx.mark_dirty(logits)  # the result is the same tensor, not a copy
        return logits

    @staticmethod
    def backward(*_: Any) -> None:  # type: ignore[override]
        raise RuntimeError(
            "a loss was computed from logits, through which a pipeline does not run backward; give the targets to "
            "model(tokens, targets) or to ff.forward_backward, or use pipe=1"
        )


@lru_cache(maxsize=64)
def _in_order(placement: tuple[int, ...]) -> Schedule:
    """Return the schedule of one micro-batch: every stage forward, then every stage backward."""
    stages = range(len(placement))
    orders = [
        (
            *(Action("F", stage, 0) for stage in stages if placement[stage] == rank),
            *(Action("BW", stage, 0) for stage in reversed(stages) if placement[stage] == rank),
        )
        for rank in range(max(placement) + 1)
    ]
    schedule = Schedule(len(placement), 1, placement, tuple(orders))
    schedule.check()
    return schedule


def add_copies(model: StagedModel) -> None:
    """Add the gradients of a tied table that is on two pipe ranks, on both in the same order."""
    table, grid, here = model.table_on_two_ranks, model.grid, model.grid.coords[PIPE]
    if table is None or table.grad is None or not table.requires_grad:
        return
    own = local_of(table.grad)
    ends = model.stages.placement[0], model.stages.placement[-1]
    other = ends[1] if here == ends[0] else ends[0]
    out, back = (Lane.F_HIGHER, Lane.F_LOWER) if other > here else (Lane.F_LOWER, Lane.F_HIGHER)
    sent = comm.send(own, grid, out, other, label="gradient of the tied table")
    theirs = comm.receive(torch.empty_like(own), grid, back, other, label="gradient of the tied table").wait()
    sent.wait()
    first, second = (own, theirs) if here == min(ends) else (theirs, own)
    own.copy_(first + second)
    model.gradients.copies_added()

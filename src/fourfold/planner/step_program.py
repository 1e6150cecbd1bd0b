"""The programs of steps: of a whole step, of the micro-batches of a stage, of an optimizer step, of layers alone.

Each is a rehearsal of the reference model (transformer.py). On a grid with a pipe axis a rank walks its order of the
schedule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, cast

from fourfold.axes import BATCH, CUTS, PIPE, REPLICA
from fourfold.engine import BACKWARD
from fourfold.grid import Shape
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig
from fourfold.planner.parameters import kinds_of_layers, part
from fourfold.planner.program import (
    ElementwiseOp,
    PlannedWait,
    Program,
    Rehearsal,
    WeightOrder,
)
from fourfold.planner.size_names import SizeNames
from fourfold.planner.sizes import (
    ID_NBYTES,
    STATISTIC_NBYTES,
    LocalSizes,
    Structure,
    structure_of_layers,
    structure_of_names,
    sum_over_batch,
)
from fourfold.planner.transformer import ModelPart, PlannedInputs, TransformerProgram, whole_model
from fourfold.policy import Policy, Recompute
from fourfold.schedule.action import Action, PipeMessage, Schedule
from fourfold.schedule.receives import receives_of
from fourfold.schedule.stages import Stages

TRAINING = "training"
"""The kind of the forward passes of a model without stages."""
LAST_MESSAGE_NBYTES = 2 * STATISTIC_NBYTES
"""Bytes of a pipeline's last message of a step, which carries the loss and the faults to all its ranks."""


def step_program(
    sizes: LocalSizes, *, micro_steps: int = 1, optimizer: bool = True, clip: bool | None = None
) -> Program:
    """Return the program of one step of a run that has recorded the order in which it uses weights.

    With `optimizer` the program reaches from one optimizer step to the next, so that parameters of a sharded optimizer
    may still be in flight when it begins. With `clip`, which defaults to `optimizer`, the norm of all gradients is
    computed.
    """
    host = Rehearsal(sizes)
    model = TransformerProgram(sizes, host)
    clip = optimizer if clip is None else clip
    if sizes.structure.gathers:
        if sizes.shape.pipe > 1:
            host.silent = True  # the engine records the order of gathers in a first step, as the runtime's engine does
            run_step(model, micro_steps, optimizer=optimizer, clip=clip)
            host.silent = False
            host.phases.clear()
            host.actions.clear()
        else:
            expect_weights(model, whole_model(sizes.config.layers))
    run_step(model, micro_steps, optimizer=optimizer, clip=clip)
    return Program(host.work, host.phases, actions=host.actions)


def stage_program(sizes: LocalSizes, part: ModelPart, recompute: Recompute, *, split: bool, passes: int) -> Program:
    """Return the program of some micro-batches that go through one stage alone, one after another.

    Nothing arrives from other stages or is sent to them, and no gradient is summed over replicas. With `split` backward
    holds back the products of dw for an action of their own.
    """
    host = Rehearsal(sizes)
    model = TransformerProgram(sizes, host)
    model.recompute = recompute
    if sizes.structure.gathers:
        expect_weights(model, part)
    host.begin_step(passes + 1)  # the last pass never comes, so no bucket is launched
    for micro in range(passes):
        host.enter_action(Action("F", 0, micro))
        host.begin_forward(TRAINING)
        model.forward(part, counted=True)
        offloaded = model.offload.last
        if offloaded is not None:
            offloaded.here = False  # a forward pass of another micro-batch has sent inputs since
        host.enter_action(Action("B" if split else "BW", 0, micro))
        if offloaded is not None:
            offloaded.prefetch()
        host.run_backward(hold=micro if split else None)
        if split:
            host.enter_action(Action("W", 0, micro))
            host.run_held(micro)
    host.enter_phase("end")
    return Program(host.work, host.phases, actions=host.actions)


def optimizer_program(sizes: LocalSizes) -> Program:
    """Return the program of the norm of all gradients and of the optimizer's step."""
    host = Rehearsal(sizes)
    optimize(TransformerProgram(sizes, host), clip=True, step=True)
    return Program(host.work, host.phases)


@lru_cache(maxsize=1024)
def weight_order(structure: Structure, part: ModelPart) -> WeightOrder:
    """Return the order in which one forward and backward pass through these units uses weights.

    The runtime's engine records it in a first step. It does not depend on sizes, so candidates share it.
    """
    model = _on_names(structure, silent=True)
    model.host.begin_forward(TRAINING)
    model.forward(part, counted=True)
    model.host.run_backward()
    return model.host.order_of_weights(TRAINING)


@lru_cache(maxsize=1024)
def layers_program(structure: Structure, layers: int, split: bool = False) -> Program:
    """Return the program of forward and backward of some layers alone, with memory and with names instead of sizes.

    Each weight is gathered where it is used. The first moment is the beginning of the first layer's backward, which
    equals that of every layer but the last. With `split` the products of dw are held back and run in a phase of their
    own, `weights`.
    """
    model = _on_names(structure)
    host = model.host
    host.enter_phase("forward")
    host.engine.begin(TRAINING)
    model.run_blocks(range(layers))
    host.enter_phase("backward")
    for half in model.halves:
        host.allocate(half.rest_nbytes)  # the gradient of the residual stream
    _run_backward(host, split=split)
    return Program(host.work, host.phases, host.moments)


@lru_cache(maxsize=1024)
def ends_program(structure: Structure, embedding: bool = True, head: bool = True, split: bool = False) -> Program:
    """Return the program of embedding, head and loss, or of one of them or none, as if there were no layers."""
    model = _on_names(structure)
    host = model.host
    host.enter_phase("forward")
    host.engine.begin(TRAINING)
    model.forward(ModelPart(range(0), embedding, head), counted=False)
    host.enter_phase("backward")
    for half in () if head else model.halves:
        host.allocate(half.rest_nbytes)  # the gradient that the next stage has sent
    _run_backward(host, split=split)
    return Program(host.work, host.phases, host.moments)


def _run_backward(host: Rehearsal, *, split: bool) -> None:
    host.run_backward(hold="all" if split else None)
    if split:
        host.enter_phase("weights")
        host.run_held("all")


def _on_names(structure: Structure, *, silent: bool = False) -> TransformerProgram:
    # bytes in flight depend on numbers, which names do not have: memory.py adds them
    overlap = replace(structure.policy.overlap, prefetch=False, defer=False)
    structure = replace(structure, policy=replace(structure.policy, overlap=overlap))
    names = cast(LocalSizes, SizeNames(structure))
    return TransformerProgram(names, Rehearsal(names, memory=not silent, silent=silent))


# --- a step


def run_step(model: TransformerProgram, micro_steps: int, *, optimizer: bool, clip: bool) -> None:
    """Run the micro-steps of a step, and the norm of all gradients and the optimizer where they are asked for."""
    host, sizes = model.host, model.sizes
    if optimizer and model.policy.shard_optimizer and host.gradients is not None:
        # the program begins right after the optimizer step, so its gathers come first
        host.enter_phase("forward")
        host.gradients.gather_parameters()
        move_biases(model)
    if micro_steps > 1:  # the loss of every micro-step is divided by the targets of all of them
        host.communicate(lambda: sum_over_batch(sizes, 1, "count targets"))
    if sizes.shape.pipe > 1:
        PipelineProgram(model, sizes.schedule(micro_steps)).run()
    else:
        host.begin_step(micro_steps)
        for _ in range(micro_steps):
            host.enter_phase("forward")
            host.begin_forward(TRAINING)
            model.forward(whole_model(model.config.layers), counted=micro_steps > 1)
            host.enter_phase("backward")
            host.run_backward()
    if optimizer or clip:
        host.enter_phase("optimizer")
        optimize(model, clip=clip, step=optimizer)


def expect_weights(model: TransformerProgram, part: ModelPart) -> None:
    """Let the engine know the order in which a pass through these units uses weights, as after a first step."""
    structure, chunked = model.structure, model.structure.chunked and part.head
    if part.embedding or part.head:
        structure = structure_of_names(structure, recompute=model.recompute, chunked=chunked)
    else:
        structure = structure_of_layers(structure, model.recompute)
    model.host.expect_weights(TRAINING, weight_order(structure, part))


def optimize(model: TransformerProgram, *, clip: bool, step: bool) -> None:
    """Compute the norm of all gradients if `clip`, and AdamW's step, which reads p, g, m, v and writes p, m, v."""
    host, sizes, shards = model.host, model.sizes, model.policy.shard_optimizer
    own = int(sizes.parameter_nbytes * sizes.replica_share) if shards else sizes.parameter_nbytes
    if clip:
        host.compute(ElementwiseOp("gradient norm", own))
        for axis in (PIPE, *CUTS):
            # replicas hold equal gradients unless the optimizer is sharded, or experts have replicas of their own
            if axis != REPLICA or shards or sizes.shape.folded:
                nbytes = STATISTIC_NBYTES * (sizes.config.layers + 2 if axis == PIPE else 1)  # squares by unit
                host.communicate(
                    lambda axis=axis, nbytes=nbytes: sizes.message("all_reduce", axis, nbytes, "gradient norm")
                )
    if step:
        host.compute(ElementwiseOp("AdamW", 7 * own))
        if not shards:  # else the step that comes next has begun
            move_biases(model)


def move_biases(model: TransformerProgram) -> None:
    """Sum the choices of experts over all places, by which the biases of routers move (E21)."""
    config, sizes = model.config, model.sizes
    routers = sum(map(config.is_mixture, sizes.held.layers)) if sizes.config.bias_rate else 0
    for axis in BATCH:
        nbytes = routers * sizes.config.experts * ID_NBYTES
        model.host.communicate(
            lambda axis=axis, nbytes=nbytes: sizes.message("all_reduce", axis, nbytes, "choices of experts")
        )


# --- FLOPs


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs per token of a training step.

    A product of m tokens with p weights is 2mp FLOPs, and backward is two such products. Causal attention reads half of
    the scores. Lookups, norms and activations are not counted, nor the scores that a fused attention kernel computes
    again inside its own backward.
    """

    model: float
    """FLOPs of forward and backward with each product once, as MFU counts them."""
    hardware: float
    """The same plus the products that recompute runs again, as HFU counts them."""


def flops_per_token(config: ModelConfig, seq: int, policy: Policy = Policy()) -> Flops:
    """Return the FLOPs of forward and backward per token of a sequence of `seq` tokens."""
    twice = Policy(recompute=policy.recompute, mlp_chunk=min(seq, policy.mlp_chunk))
    return Flops(_flops(config, seq, Policy()), _flops(config, seq, twice))


@lru_cache(maxsize=256)
def _flops(config: ModelConfig, seq: int, policy: Policy) -> int:
    """Return the FLOPs per token of one rank that holds the whole model, from the programs of one and of two layers.

    Of the experts of a mixture only those count that a token goes through.
    """
    total = layer = one = 0
    for mixture in kinds_of_layers(config):
        alike = config.one_layer(mixture=mixture)
        one, two = (
            step_program(LocalSizes(replace(alike, layers=layers), Shape(), policy, 1, seq), optimizer=False).flops
            for layers in (1, 2)
        )
        layer, number = two - one, sum(config.is_mixture(index) == mixture for index in range(config.layers))
        total += number * layer
    return (total + one - layer) // seq  # the ends beside the layers


# --- pipelines


class PipelineProgram:
    """The walk of one pipe rank through its order of a schedule, as `pipeline.PipelineStep` walks it."""

    def __init__(self, model: TransformerProgram, schedule: Schedule) -> None:
        self.model, self.host, self.sizes, self.schedule = model, model.host, model.sizes, schedule
        self.stages, self.here = model.sizes.stages, model.sizes.coords[PIPE]
        ahead = model.sizes.policy.overlap.receives_ahead("cpu")
        self.receives = receives_of(schedule, self.here, ahead=ahead)
        self.receiving: dict[PipeMessage, PlannedWait] = {}
        self.tapes: dict[tuple[int, int], list[Any]] = {}
        self.offloaded: dict[tuple[int, int], PlannedInputs | None] = {}
        self.stream_nbytes = sum(half.rest_nbytes for half in model.halves)

    def run(self) -> None:
        order, host = self.schedule.orders[self.here], self.host
        host.begin_step(sum(action.kind == "F" for action in order), until_end_step=True)
        host.engine.prefetcher.keep(self.sizes.policy.gather_weights)
        for action in order:
            host.engine.prefetcher.begin_stage(action.stage)
            host.enter_action(action)
            self.begin_receives(self.receives.before.get(action, ()))
            if action.kind == "F":
                self.forward(action)
                self.hand_on(action)
            elif action.kind == "W":
                host.run_held(action[1:])
                self.hand_on(action)
            else:
                self.backward(action)
        host.engine.prefetcher.keep("use")
        if host.gradients is not None:
            host.gradients.end_step()
        self.add_copies()
        host.communicate(lambda: self.sizes.message("all_reduce", PIPE, LAST_MESSAGE_NBYTES, "loss"))

    def forward(self, action: Action) -> None:
        _, stage, micro = action
        part = part_of(self.stages, stage)
        self.model.recompute = recompute_of(self.stages, stage, self.sizes.policy)
        self.host.begin_forward(("training", stage))
        if stage:
            self.take(action)
        self.model.forward(part, counted=self.schedule.micro_steps > 1)
        self.tapes[stage, micro], self.offloaded[stage, micro] = self.host.take_tape(), self.model.offload.last

    def backward(self, action: Action) -> None:
        kind, stage, micro = action
        if (inputs := self.offloaded.pop((stage, micro))) is not None:
            inputs.prefetch()  # before the wait for the gradient
        if not self.stages.has_head(stage):
            self.take(action)
        self.host.engine.prefetcher.begin_backward((BACKWARD, stage))
        self.model.recompute = recompute_of(self.stages, stage, self.sizes.policy)
        if (gradients := self.host.gradients) is not None:
            gradients.sums_wait = self.schedule.sent(action) is not None
        self.host.run_backward(
            self.tapes.pop((stage, micro)),
            hold=(stage, micro) if kind == "B" else None,
            has_parameters=bool(self.stages.units(stage)),
            hand_on=partial(self.hand_on, action) if stage else lambda: None,
        )
        if not stage:
            self.hand_on(action)

    def take(self, action: Action) -> None:
        """Wait for what another rank sends for an action."""
        needed = self.schedule.received(action)
        if needed is not None:
            self.receiving.pop(needed).wait()

    def begin_receives(self, messages: Iterable[PipeMessage]) -> None:
        for message in messages:
            self.receiving[message] = self.host.launch(lambda each=message: self.record("receive", each))

    def hand_on(self, action: Action) -> None:
        """Begin the receives that stand behind an action, and send its result if another rank takes it."""
        self.begin_receives(self.receives.after.get(action, ()))
        message = self.schedule.sent(action)
        if message is not None:
            self.host.launch(lambda: self.record("send", message))
            if self.host.gradients is not None:
                self.host.gradients.begin_sums()

    def record(self, op: Op, message: PipeMessage) -> list[Collective]:
        return self.sizes.message(op, PIPE, self.stream_nbytes, message.label)  # E12

    def add_copies(self) -> None:
        """Exchange the gradients of a tied table that is on two pipe ranks."""
        sizes, ends = self.sizes, (self.stages.placement[0], self.stages.placement[-1])
        if not sizes.config.tied or ends[0] == ends[1] or self.here not in ends:
            return
        table, shards = sizes.parameter("embedding.weight"), sizes.policy.shard_optimizer
        rows = part(table.rows, sizes.shape.data, sizes.coords[REPLICA]) if shards else table.rows
        nbytes, label = rows * table.row * sizes.dtype.itemsize, "gradient of the tied table"
        self.host.launch(lambda: sizes.message("send", PIPE, nbytes, label))
        self.host.communicate(lambda: sizes.message("receive", PIPE, nbytes, label))
        self.host.compute(ElementwiseOp("add copies", 3 * nbytes))


def part_of(stages: Stages, stage: int) -> ModelPart:
    """Return the units of a stage."""
    return ModelPart(stages.layers_of(stage), stages.has_embedding(stage), stages.has_head(stage))


def recompute_of(stages: Stages, stage: int, policy: Policy) -> Recompute:
    """Return what backward of a stage computes again."""
    return cast("Recompute", stages.recompute[stage]) if stages.recompute else policy.recompute

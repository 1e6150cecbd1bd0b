"""The program of a reference model: the work of one rank's host in a training step, derived from sizes alone.

This is the planner's one description of a transformer. It follows the layers (models/transformer.py, nn/), is written
from the equations (docs/math.md) on a `Rehearsal`, and states next to each piece of work what it allocates and frees.
Memory-bound work is counted in the bytes that kernels read and write: passes over the rank's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, cast

from fourfold.axes import CUTS, PIPE, REPLICA
from fourfold.engine import BACKWARD, HalfTurn, Turns
from fourfold.grid import Shape
from fourfold.layout import GATHERED
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig
from fourfold.planner.context import ContextProgram
from fourfold.planner.program import (
    NO_MOVE,
    PRODUCT,
    AsyncMove,
    AttentionOp,
    BackwardBytes,
    ElementwiseOp,
    MatmulOp,
    MemoryKind,
    NoMove,
    PlannedWait,
    Program,
    Rehearsal,
    WeightGroup,
    WeightOrder,
)
from fourfold.planner.sizes import (
    STATISTIC_NBYTES,
    LocalSizes,
    SizeNames,
    Structure,
    part,
    structure_of_layers,
    structure_of_names,
    sum_over_batch,
)
from fourfold.policy import Policy, Recompute
from fourfold.schedule.action import Action, PipeMessage, Schedule
from fourfold.schedule.receives import receives_of
from fourfold.schedule.stages import Stages

Moving = AsyncMove | NoMove
Direction = Literal["gather", "reduce"]
"""The two kinds of operators; each is the conjugate of the other."""
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
    if sizes.structure.gathers_weights:
        if sizes.shape.pipe > 1:
            host.silent = True  # the engine records the order of gathers in a first step, as the runtime's engine does
            model.step(micro_steps, optimizer=optimizer, clip=clip)
            host.silent = False
            host.phases.clear()
            host.actions.clear()
        else:
            model.expect_weights(whole_model(sizes.config.layers))
    model.step(micro_steps, optimizer=optimizer, clip=clip)
    return Program(host.work, host.phases, actions=host.actions)


def stage_program(sizes: LocalSizes, part: ModelPart, recompute: Recompute, *, split: bool, passes: int) -> Program:
    """Return the program of some micro-batches that go through one stage alone, one after another.

    Nothing arrives from other stages or is sent to them, and no gradient is summed over replicas. With `split` backward
    holds back the products of dw for an action of their own.
    """
    host = Rehearsal(sizes)
    model = TransformerProgram(sizes, host)
    model.recompute = recompute
    if sizes.structure.gathers_weights:
        model.expect_weights(part)
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
    TransformerProgram(sizes, host).optimize(clip=True, step=True)
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
    """Return the FLOPs per token of one rank that holds the whole model, from the programs of one and of two layers."""
    one, two = (
        step_program(LocalSizes(replace(config, layers=layers), Shape(), policy, 1, seq), optimizer=False).flops
        for layers in (1, 2)
    )
    return (one + (config.layers - 1) * (two - one)) // seq


class ModelPart(NamedTuple):
    """The units that one forward pass runs through."""

    layers: range
    embedding: bool
    head: bool


def whole_model(layers: int) -> ModelPart:
    """Return all units of a model with so many layers."""
    return ModelPart(range(layers), embedding=True, head=True)


class PlannedStream:
    """The residual stream; `delta` is what the last sublayer adds, which may still be in flight."""

    __slots__ = ("delta",)

    def __init__(self, delta: Moving | None = None) -> None:
        self.delta = delta

    def read(self) -> None:
        if self.delta is not None:
            self.delta.land()


class PlannedInputs:
    """The inputs of a block, one for each half, that wait for backward on the host (`offload.OffloadedInputs`)."""

    def __init__(self, host: Rehearsal, label: str, nbytes: Sequence[int]) -> None:
        self._host, self._label, self._nbytes = host, label, nbytes
        self._before: PlannedInputs | None = None
        self.here = True
        """Whether the inputs are on the device, or on their way to it."""
        self._sent: list[PlannedWait] = []
        self._arriving: list[PlannedWait] = []

    def send(self, before: PlannedInputs | None) -> None:
        """Begin to copy to the host; `before` are the inputs of the block before in the same pass."""
        self._before = before
        self._sent = [self._host.copy(self._label, nbytes, back=False) for nbytes in self._nbytes]

    def leave(self) -> None:
        """Free the device's memory, once the copies are done."""
        for copying in self._sent:
            copying.wait()
        self.here = False

    def prefetch(self) -> None:
        """Begin to copy back to the device what is not there."""
        if not self.here:
            self._arriving = [self._host.copy(self._label, nbytes, back=True) for nbytes in self._nbytes]
            self.here = True

    def take(self) -> None:
        """Have the inputs on the device, and begin to copy those of the block before."""
        self.prefetch()
        for copying in self._arriving:
            copying.wait()
        self._sent = []  # their memory is no longer held, so nobody waits for the copy any more
        if self._before is not None:
            self._before.prefetch()


class OffloadProgram:
    """The block inputs of a model that wait on the host (`offload.Offloader`)."""

    def __init__(self) -> None:
        self.last: PlannedInputs | None = None
        """The inputs of the last block that the pass has run."""
        self._newest: PlannedInputs | None = None  # on the device still, of any pass

    def begin(self) -> None:
        """Begin a forward pass."""
        self.last = None

    def send(self, inputs: PlannedInputs) -> None:
        """Copy the inputs of a block to the host; those that were sent before are freed on the device."""
        if self._newest is not None:
            self._newest.leave()
        inputs.send(self.last)
        self.last = self._newest = inputs


class TransformerProgram:
    """The forward and backward of a transformer, run on a rehearsal."""

    def __init__(self, sizes: LocalSizes, host: Rehearsal) -> None:
        self.sizes, self.config, self.policy, self.host = sizes, sizes.config, sizes.policy, host
        self.engine, self.halves, self.structure = host.engine, sizes.halves, sizes.structure
        self.recompute: Recompute = self.policy.recompute
        """What backward computes again in the stage that runs."""
        self.offload = OffloadProgram()

    def expect_weights(self, part: ModelPart) -> None:
        """Let the engine know the order in which a pass through these units uses weights, as after a first step."""
        structure, chunked = self.structure, self.structure.chunked and part.head
        if part.embedding or part.head:
            structure = structure_of_names(structure, recompute=self.recompute, chunked=chunked)
        else:
            structure = structure_of_layers(structure, self.recompute)
        self.host.expect_weights(TRAINING, weight_order(structure, part))

    # --- a step

    def step(self, micro_steps: int, *, optimizer: bool, clip: bool) -> None:
        host, sizes = self.host, self.sizes
        if optimizer and self.policy.shard_optimizer and host.gradients is not None:
            # the program begins right after the optimizer step, so its gathers come first
            host.enter_phase("forward")
            host.gradients.gather_parameters()
        if micro_steps > 1:  # the loss of every micro-step is divided by the targets of all of them
            host.communicate(lambda: sum_over_batch(sizes, 1, "count targets"))
        if sizes.shape.pipe > 1:
            PipelineProgram(self, sizes.schedule(micro_steps)).run()
        else:
            host.begin_step(micro_steps)
            for _ in range(micro_steps):
                host.enter_phase("forward")
                host.begin_forward(TRAINING)
                self.forward(whole_model(self.config.layers), counted=micro_steps > 1)
                host.enter_phase("backward")
                host.run_backward()
        if optimizer or clip:
            host.enter_phase("optimizer")
            self.optimize(clip=clip, step=optimizer)

    def optimize(self, *, clip: bool, step: bool) -> None:
        """Compute the norm of all gradients if `clip`, and AdamW's step, which reads p, g, m, v and writes p, m, v."""
        host, sizes, shards = self.host, self.sizes, self.policy.shard_optimizer
        own = sizes.parameter_nbytes // (sizes.shape.sizes[REPLICA] if shards else 1)
        if clip:
            host.compute(ElementwiseOp("gradient norm", own))
            for axis in (PIPE, *CUTS):
                if axis != REPLICA or shards:  # replicas hold equal gradients unless the optimizer is sharded
                    nbytes = STATISTIC_NBYTES * (sizes.config.layers + 2 if axis == PIPE else 1)  # squares by unit
                    host.communicate(
                        lambda axis=axis, nbytes=nbytes: sizes.message("all_reduce", axis, nbytes, "gradient norm")
                    )
        if step:
            host.compute(ElementwiseOp("AdamW", 7 * own))

    def forward(self, part: ModelPart, *, counted: bool) -> None:
        """Run the units of a stage, or of the whole model, on tokens or on the stream of the stage before."""
        sizes, host, chunked = self.sizes, self.host, self.structure.chunked and part.head
        self.offload.begin()
        read = (self.chunked_share if chunked else self.logits) if part.head else self.stop
        if chunked:  # chunks divide by the count of targets, so it comes first
            host.communicate(lambda: sum_over_batch(sizes, 1 if counted else 2, "loss"))
        if self.config.positions == "rope":
            host.allocate(sizes.rope_nbytes, "activations")
        begin = self.embed if part.embedding else self.arrive
        if self.recompute == "block":
            streams = self.engine.take_turns([begin(half) for half in self.halves])
            streams = self.blocks_again(part.layers, streams, arrived=not part.embedding)
            self.engine.take_turns([read(*each) for each in zip(streams, self.halves, strict=True)])
        else:
            self.engine.take_turns([self.through(begin(half), half, part.layers, read) for half in self.halves])
        if chunked:
            host.communicate(lambda: sum_over_batch(sizes, 1, "loss"))
        elif part.head:
            self.loss(counted=counted)

    def through(
        self,
        begin: Turns[PlannedStream],
        half: LocalSizes,
        layers: range,
        read: Callable[[PlannedStream, LocalSizes], Turns[None]],
    ) -> Turns[None]:
        stream = yield from begin
        for index in layers:
            stream = yield from self.block(index, stream, half)
        yield from read(stream, half)

    def arrive(self, half: LocalSizes) -> Turns[PlannedStream]:
        """Begin with the stream that the stage before has sent; whoever reads it first keeps it."""
        del half
        yield from ()
        return PlannedStream()

    def stop(self, stream: PlannedStream, half: LocalSizes) -> Turns[None]:
        """End a stage: the stream is added up, for it travels as one tensor, and stays until its gradient comes."""
        yield
        stream.read()
        self.host.allocate(half.rest_nbytes, "activations")
        self.host.on_backward(lambda: self.host.free(half.rest_nbytes, "activations"), reads=False)

    def blocks_again(
        self, layers: range, streams: list[PlannedStream], *, arrived: bool = False
    ) -> list[PlannedStream]:
        """Run blocks that keep nothing but their input and run again in backward.

        With `arrived` the first input has come from the stage before, which keeps it on the device.
        """
        for place, index in enumerate(layers):
            if not self.policy.offload:
                self._hold_inputs(1)
            # from the host two inputs are there while a block runs backward: its own, and the one that comes next
            held = 2 if self.policy.offload else 1
            self.host.on_backward(partial(self._forget_inputs, held), reads=False)
            inputs = PlannedInputs(self.host, f"input of layers.{index}", [half.rest_nbytes for half in self.halves])
            streams = self.host.run_twice(partial(self._run_block, index, streams, inputs))
            if self.policy.offload:
                self.host.on_backward(partial(self._hold_inputs, held), reads=False)
                if place or not arrived:
                    self.offload.send(inputs)
        return streams

    def _run_block(self, index: int, streams: list[PlannedStream], inputs: PlannedInputs) -> list[PlannedStream]:
        if self.engine.recomputing:
            inputs.take()
        return self.engine.take_turns([self.block(index, *each) for each in zip(streams, self.halves, strict=True)])

    def _hold_inputs(self, times: int) -> None:
        for half in self.halves:
            self.host.allocate(times * half.rest_nbytes, "activations")

    def _forget_inputs(self, times: int) -> None:
        for half in self.halves:
            self.host.free(times * half.rest_nbytes, "activations")

    def run_blocks(self, layers: range) -> None:
        """Run blocks by themselves, and receive what the last one adds to the residual stream."""

        def through(half: LocalSizes) -> Turns[None]:
            stream = PlannedStream()
            for index in layers:
                stream = yield from self.block(index, stream, half)
            yield
            stream.read()

        if self.recompute == "block":
            for stream in self.blocks_again(layers, [PlannedStream() for _ in self.halves]):
                stream.read()
        else:
            self.engine.take_turns([through(half) for half in self.halves])

    # --- the operators: each one is a gather or a reduction over one axis, and backward runs the conjugate

    def _move(
        self, half: LocalSizes, direction: Direction, axis: str, nbytes: int, label: str, **in_backward: Any
    ) -> Moving:
        conjugate: Direction = "reduce" if direction == "gather" else "gather"
        return self.host.move(
            axis,
            lambda: operator_messages(half, direction, axis, nbytes, label),
            lambda: operator_messages(half, conjugate, axis, nbytes, label),
            **in_backward,
        )

    def enter(self, half: LocalSizes, label: str) -> Moving:
        return self._move(
            half, "gather", "x", half.entered_nbytes, label, arrives=half.rest_nbytes, leaves=half.stream_nbytes
        )

    def leave(self, half: LocalSizes, label: str) -> Moving:
        return self._move(half, "reduce", "x", half.entered_nbytes, label, arrives=gathered(half))

    def spread(
        self, half: LocalSizes, label: str, *, nbytes: int, whole: int, cut: int, kind: MemoryKind = "workspace"
    ) -> Moving:
        """Send `nbytes` of a product's output; each rank keeps its part.

        In backward `whole` bytes of gradient arrive, and the `cut` ones that were sent are freed.
        """
        self._turn_over(nbytes, label)
        sizes = dict(arrives=whole, joins=2 * whole, leaves=cut) if self.structure.cuts_inner else {}
        return self._move(half, "reduce", "y", nbytes, label, kind=kind, **sizes)

    def collect(self, half: LocalSizes, label: str, *, nbytes: int, cut: int) -> Moving:
        self._turn_over(nbytes, label)
        return self._move(half, "gather", "y", nbytes, label, sends=nbytes, leaves=nbytes - cut)

    def _turn_over(self, nbytes: int, label: str) -> None:
        """Copy between a tensor and a message, in which features cut over y have another order."""
        if self.structure.cuts_inner:
            kernel = ElementwiseOp(f"turn over {label}", 2 * nbytes)
            self.host.compute(kernel)
            self.host.on_backward(lambda: self.host.compute(kernel), reads=False)

    # --- embedding, norms, head, loss

    def embed(self, half: LocalSizes) -> Turns[PlannedStream]:
        host = self.host
        if self.structure.looks_up_in_place:
            self.lookup_in_place(self.weights("embedding"), half)
        else:
            host.allocate(half.id_nbytes, "activations")
            self.lookup(self.weights("embedding"), half.stream, dout=gathered(half))
        leaving = self.leave(half, "embedding")
        if leaving.travels:
            yield
        leaving.land()
        if self.config.positions == "learned":
            host.allocate(half.position_nbytes, "activations")
            self.lookup(self.weights("positions"), half.rest)
        self.dropout(half)
        host.on_backward(lambda: host.enter_moment("embedding"), reads=False)
        return PlannedStream()

    def weights(self, label: str, *modules: str) -> WeightGroup:
        """Return the parameters of modules, by default of the module with this label, that share one message."""
        return WeightGroup(label, self.structure.parameters_of(*modules or (label,)))

    def lookup(self, table: WeightGroup, elements: int, *, dout: int = 0) -> None:
        """Read elements of a table; `dout`: bytes of a tensor that backward frees when the table's gradient is made."""
        host, turns, reduce = self.host, self.engine.turn.of, self.structure.reduce_itemsize
        nbytes = elements * self.structure.compute_itemsize
        host.expect_gradients(table)
        with host.using(table, "unit", turns):
            host.compute(ElementwiseOp(f"lookup {table.label}", 2 * nbytes))

        def backward() -> None:
            made = self.sizes.elements(table.names) * reduce
            host.compute(ElementwiseOp(f"dw {table.label}", 2 * nbytes + made))
            # the runtime casts first, so that the sum over a frequent token is not rounded at every term
            cast = 0 if reduce == self.structure.compute_itemsize else elements * reduce
            host.allocate(cast)
            host.add_gradients("unit", table, turns, in_place=False)
            host.free(cast)
            host.free(dout)

        host.on_backward(backward)

    def lookup_in_place(self, table: WeightGroup, half: LocalSizes) -> None:
        """Read the rows that this rank stores for the tokens of all places along z."""
        host, turns, reduce = self.host, self.engine.turn.of, self.structure.reduce_itemsize
        found = half.all_stream_nbytes
        host.expect_gradients(table)
        host.communicate(lambda: half.message("all_gather", GATHERED, half.all_id_nbytes, table.label))
        host.allocate(half.all_id_nbytes, "activations")
        host.read_shards(table)
        host.compute(ElementwiseOp(f"lookup {table.label}", 2 * found))
        host.allocate(found)
        host.communicate(lambda: half.message("reduce_scatter", GATHERED, found, table.label))
        host.free(found)

        def backward() -> None:
            host.allocate(found)
            host.communicate(lambda: half.message("all_gather", GATHERED, found, table.label))
            made = self.sizes.shard_elements(table.names) * reduce
            host.compute(ElementwiseOp(f"dw {table.label}", 2 * found + made))
            cast = 0 if reduce == self.structure.compute_itemsize else half.all_stream * reduce
            host.allocate(cast)
            host.add_shard_gradients("unit", table, turns)
            host.free(cast)
            host.free(found)
            host.free(gathered(half))

        host.on_backward(backward)

    def dropout(self, half: LocalSizes) -> None:
        if self.config.dropout:
            host, kernel = self.host, ElementwiseOp("dropout", 3 * half.rest_nbytes, fused=True)
            host.compute(kernel)
            host.allocate(half.mask_nbytes, "activations")

            def backward() -> None:
                host.compute(kernel)
                host.free(half.mask_nbytes, "activations")

            host.on_backward(backward)

    def norm(self, label: str, half: LocalSizes, *, last: bool = False, reads_kept: bool = False) -> None:
        """Add the pending update to the residual stream and normalise it: read both, write the sum and its normed copy.

        The gradient of the last norm's input begins the gradient of the residual stream; the others are added. With
        `reads_kept` the norm reads the input that a recomputed block keeps anyway, so it keeps only statistics.
        """
        host, layer_norm = self.host, self.config.norm == "layer"
        kept = (2 if layer_norm else 1) * half.statistic_nbytes + (0 if reads_kept else half.rest_nbytes)
        host.allocate(kept, "activations")

        def freed() -> None:
            if not self.policy.compile or self.structure.over_y:  # several kernels, and sums in a wider dtype
                host.need(3 * self.structure.wide * half.rest_nbytes)
            host.need(half.rest_nbytes)
            host.free(kept, "activations")
            host.free(0 if last else half.rest_nbytes)

        self._norm(self.weights(label), half.rest_nbytes, half, freed)

    def _norm(
        self, weights: WeightGroup, nbytes: int, half: LocalSizes | None, freed: Callable[[], None] = lambda: None
    ) -> None:
        """Normalise `nbytes`; if `half` is given, with statistics over y."""
        host, turns, label, layer_norm = self.host, self.engine.turn.of, weights.label, self.config.norm == "layer"
        own = 0 if half is None else half.statistic_nbytes
        scale = WeightGroup(label, weights.names[:1])
        host.expect_gradients(weights)
        with host.using(weights, "unit", turns):
            host.compute(ElementwiseOp(f"norm {label}", 4 * nbytes, fused=True))
            if half is not None:
                # means and squared deviations of a LayerNorm are gathered and merged, an RMSNorm's sums are added
                op, statistics = ("all_gather", half.merged_nbytes) if layer_norm else ("all_reduce", own)
                host.communicate(lambda: half.message(op, "y", statistics, label))

        def backward() -> None:
            with host.using(scale, "unit", turns):
                host.compute(ElementwiseOp(f"dnorm {label}", 5 * nbytes, fused=True))
                if half is not None:
                    host.communicate(lambda: half.message("all_reduce", "y", (2 if layer_norm else 1) * own, label))
            host.add_gradients("unit", weights, turns)
            freed()

        host.on_backward(backward)

    def logits(self, stream: PlannedStream, half: LocalSizes) -> Turns[None]:
        host, whole, cut = self.host, half.logits_nbytes(half.m), half.logits_cut_nbytes(half.m)
        yield
        host.enter_moment("head")
        stream.read()
        self.norm("norm", half, last=True)
        host.allocate(gathered(half))
        entering = self.enter(half, "head")
        if entering.travels:
            yield
        entering.land()
        tensors = BackwardBytes(
            dout=whole, da=half.stream_nbytes, kept=half.kept_normed_nbytes, reread=self._entered_again(half),
            dout_kind="logits",
        )  # fmt: skip
        host.product(
            WeightGroup("head", (self.structure.table,)), half.m, half.k, half.vocab_columns,
            lambda: self._reread(half, "x", half.entered_nbytes, "head"), tensors,
        )  # fmt: skip
        host.allocate(whole, "logits")
        host.free(gathered(half))
        host.need(whole if self.structure.cuts_inner else 0, "logits")  # `spread` sends a copy
        spreading = self.spread(half, "head", nbytes=whole, whole=whole, cut=cut, kind="logits")
        yield
        spreading.land()
        host.allocate(cut, "logits")
        host.free(whole, "logits")

    def _reread(self, half: LocalSizes, axis: str, nbytes: int, label: str) -> list[Collective]:
        """Return the second gather of a product's input, for dw, unless the input was kept."""
        kept = self.policy.keep_gathered
        return [] if kept else operator_messages(half, "gather", axis, nbytes, label)

    def loss(self, *, counted: bool) -> None:
        """Compute the loss (E9) from the logits, and in backward their gradient (E10)."""
        host, halves = self.host, self.halves
        host.enter_moment("loss")
        for half in halves:
            host.compute(ElementwiseOp("loss", half.logits_cut_nbytes(half.m), fused=True))
            host.allocate(half.token_nbytes, "activations")
            host.need(half.loss_copies_nbytes(half.m), "logits")
            host.communicate(lambda half=half: self._loss_statistics(half, half.m))
        host.communicate(lambda: sum_over_batch(self.sizes, 2 if counted else 3, "loss"))

        def backward() -> None:
            host.enter_moment("loss")
            for half in halves:
                host.compute(ElementwiseOp("dlogits", 2 * half.logits_cut_nbytes(half.m), fused=True))
                host.need(half.loss_copies_nbytes(half.m), "logits")
                host.allocate(half.logits_cut_nbytes(half.m), "logits")
            for half in halves:
                host.free(half.logits_cut_nbytes(half.m), "logits")
                host.free(half.token_nbytes, "activations")
            host.enter_moment("head")

        host.on_backward(backward)

    def _loss_statistics(self, half: LocalSizes, tokens: int) -> list[Collective]:
        """Return the gathers of three statistics per token over the axes that cut the vocabulary."""
        found = []
        for axis in ("y", "x") if self.structure.sharded else ("x",):
            found += half.message("all_gather", axis, half.statistics_nbytes(tokens, axis), "loss")
        return found

    def chunked_share(self, stream: PlannedStream, half: LocalSizes) -> Turns[None]:
        """Compute head and loss in chunks of tokens: forward computes the gradients too, and backward scales them."""
        host, turns, made = self.host, self.engine.turn.of, half.head_gradient * self.structure.reduce_itemsize
        yield
        host.enter_moment("loss")
        stream.read()
        self.norm("norm", half, last=True)
        table = WeightGroup("head", (self.structure.table,))
        entering = self.enter(half, "head")
        if entering.travels:
            yield
        entering.land()
        host.allocate(gathered(half))
        host.allocate(half.rest_nbytes)
        host.allocate(half.stream_nbytes, "activations")
        host.allocate(made, "weights")
        host.expect_gradients(table)
        with host.using(table, "weights", turns):
            for tokens in half.chunks:
                self._chunk(half, tokens)
        host.free(half.rest_nbytes)
        host.free(gathered(half))

        def backward() -> None:
            host.enter_moment("head")
            host.compute(ElementwiseOp("scale head", 2 * (half.stream_nbytes + 4 * half.head_gradient)))  # in fp32
            host.allocate(half.stream_nbytes)
            host.add_gradients("unit", table, turns, in_place=False)  # scaled first
            host.free(made, "weights")
            host.free(half.stream_nbytes, "activations")

        host.on_backward(backward)

    def _chunk(self, half: LocalSizes, tokens: int) -> None:
        host, columns = self.host, half.vocab_columns
        whole, cut = half.logits_nbytes(tokens), half.logits_cut_nbytes(tokens)
        host.compute(MatmulOp("E1 head", tokens, half.k, columns))
        host.communicate(lambda: operator_messages(half, "reduce", "y", whole, "head"))
        host.compute(ElementwiseOp("loss", cut, fused=True))
        host.communicate(lambda: self._loss_statistics(half, tokens))
        host.compute(ElementwiseOp("dlogits", 2 * cut, fused=True))
        host.communicate(lambda: operator_messages(half, "gather", "y", whole, "head"))
        host.compute(MatmulOp("E2 head", tokens, columns, half.k))
        host.compute(MatmulOp("E3 head", columns, tokens, half.k, is_wgrad=True))
        if host.memory:
            before = half.chunk_before_nbytes(tokens)
            host.allocate(before, "logits")
            host.need(cut + half.loss_copies_nbytes(tokens), "logits")
            host.need(2 * cut + 3 * whole if self.structure.cuts_inner else 0, "logits")
            host.free(before, "logits")

    # --- a block

    def block(self, index: int, stream: PlannedStream, half: LocalSizes) -> Turns[PlannedStream]:
        prefix = f"layers.{index}"
        if stream.delta is not None:
            yield
        if self.recompute == "block":  # add the parts now, so that the block keeps one tensor and not two
            stream.read()
            stream.delta = None
        stream.read()
        self.norm(f"{prefix}.attention_norm", half, reads_kept=self.recompute == "block")
        leaving = yield from self.attention(f"{prefix}.attention", half)
        yield  # even if nothing is in flight: the other half's messages need a product to hide behind
        leaving.land()
        self.dropout(half)
        self.norm(f"{prefix}.mlp_norm", half)
        yield from self.mlp(f"{prefix}.mlp", half)
        if self.engine.recomputing and not self.config.dropout:
            return PlannedStream(NO_MOVE)  # backward reads no value of what follows, so the runtime stops here too
        leaving = self.leave(half, f"{prefix}.mlp.down")
        if self.config.dropout:
            yield
            leaving.land()
            self.dropout(half)
            leaving = NO_MOVE
        if index == 0:
            self.host.on_backward(lambda: self.host.enter_moment("first layer"), reads=False)
        return PlannedStream(leaving)

    def expand(self, label: str, names: tuple[str, ...], columns: int, half: LocalSizes, nbytes: int) -> Turns[None]:
        """Run layers that read one tensor, up to their product; its output has `columns` columns and `nbytes` bytes."""
        entering = self.enter(half, label)
        if entering.travels:
            yield
        entering.land()
        tensors = BackwardBytes(nbytes, half.stream_nbytes, half.kept_normed_nbytes, self._entered_again(half))
        reread = partial(self._reread, half, "x", half.entered_nbytes, label)
        self.host.product(self.weights(label, *names), half.m, half.k, columns, reread, tensors)

    def _entered_again(self, half: LocalSizes) -> int:
        """Return the bytes of an Expand layer's input that is gathered over x a second time."""
        return half.reread_nbytes("entered_nbytes") if self.structure.cuts_rest else 0

    def contract(
        self, label: str, features: int, half: LocalSizes, *, size: str, nbytes: int, cut: int, kept: int
    ) -> Turns[None]:
        """Run a layer that leads back to rest, up to its product.

        Its input has `nbytes` bytes, which is the attribute `size` of `half`, and `cut` bytes before the gather over y.
        The product alone keeps `kept` bytes of it until backward.
        """
        collecting = self.collect(half, label, nbytes=nbytes, cut=cut)
        if collecting.travels:
            yield
        collecting.land()
        weights = self.weights(label)
        reread = half.reread_nbytes(size) if self.structure.cuts_inner else 0
        tensors = BackwardBytes(dout=gathered(half), da=nbytes, kept=kept, reread=reread, joins=2 * reread)
        self.host.product(weights, half.m, features, half.k, lambda: self._reread(half, "y", nbytes, label), tensors)

    def attention(self, prefix: str, half: LocalSizes) -> Turns[Moving]:
        """Run attention up to the message that brings its output to rest."""
        host, structure, label = self.host, self.structure, f"{prefix}.q+k+v"
        names = (f"{prefix}.q", f"{prefix}.k", f"{prefix}.v")
        whole, cut = half.qkv_nbytes, half.qkv_cut_nbytes
        yield from self.expand(label, names, half.q + 2 * half.kv, half, whole)
        if structure.shares_kv:
            spreading = self.spread(half, label, nbytes=half.query_nbytes, whole=whole, cut=cut)

            def kv_over_y() -> list[Collective]:
                return half.message("all_reduce", "y", half.kv_nbytes, label)

            sharing = host.move("y", kv_over_y, kv_over_y if structure.sharded else list)
            yield
            spreading.land()
            sharing.land()
            if structure.cuts_kv_head:
                host.move(
                    "x",
                    lambda: half.message("all_gather", "x", half.kv_whole_nbytes, label),
                    lambda: half.message("reduce_scatter", "x", half.kv_whole_nbytes, label),
                ).land()
        else:
            spreading = self.spread(half, label, nbytes=whole, whole=whole, cut=cut)
            yield
            spreading.land()
        if self.recompute == "attention":
            # its input is kept anyway, and its output if the product of `out` reads it
            outside = half.read_nbytes + half.kept_output_nbytes
            host.allocate(outside, "activations")
            host.on_backward(lambda: host.free(outside, "activations"), reads=False)
            host.run_twice(lambda: self.engine.alone(self.mix(prefix, half, self._kept_of_mix(half))))
        else:
            yield from self.mix(prefix, half, self._kept_of_mix(half) + self._kept_of_input(half))
        yield from self.contract(
            f"{prefix}.out", half.q, half, size="query_nbytes", nbytes=half.query_nbytes, cut=half.query_cut_nbytes,
            kept=half.kept_query_nbytes,
        )  # fmt: skip
        return self.leave(half, f"{prefix}.out")

    def _kept_of_mix(self, half: LocalSizes) -> int:
        """Return the bytes that attention keeps beside its input and output."""
        kept, context = half.query_statistic_nbytes, self.structure.context  # the log of the sum of exponentials
        if self.config.qk_norm:
            kept += half.query_statistic_nbytes + half.key_statistic_nbytes
        if self._makes_anew:
            kept += half.query_cut_nbytes
        if context is not None and context.swaps:
            kept += half.query_cut_nbytes  # the output, before it is swapped back and after
        if context is not None and not context.hops:
            kept += half.kept_keys_nbytes  # copies of K and V, in pieces
        elif self._makes_anew:
            kept += half.local_kv_nbytes  # k as well, and a copy of v
        if self._reads_before:
            kept += half.before_kv_nbytes if self._makes_anew else half.before_kv_nbytes + half.local_kv_nbytes
        return kept

    def _kept_of_input(self, half: LocalSizes) -> int:
        """Return the bytes of q, k and v as they were made, if a norm or the attention kernel itself reads them."""
        return half.read_nbytes if self.config.qk_norm or not self._makes_anew else 0

    @property
    def _reads_before(self) -> bool:
        """Whether attention runs for the second half of a row, which also reads the keys of the first."""
        return self.structure.cuts_row and self.engine.turn.index == 1

    @property
    def _makes_anew(self) -> bool:
        """Whether attention reads q, k and v that are rotated or of other tokens, not those of the product."""
        context = self.structure.context
        return self.config.positions == "rope" or (context is not None and context.swaps)

    def mix(self, prefix: str, half: LocalSizes, kept: int) -> Turns[None]:
        """Run attention between its two products; it keeps `kept` bytes and its output."""
        if self.engine.recomputing:
            self.host.enter_part("attention")
        if self.config.qk_norm:
            self._norm(self.weights(f"{prefix}.q_norm"), half.query_cut_nbytes, None)
            self._norm(self.weights(f"{prefix}.k_norm"), half.local_k_nbytes, None)
        self._rotate(prefix, half)
        if half.structure.context is None:
            self._attend(prefix, half, kept)
        else:
            stops = self.engine.recomputing and self.recompute == "attention"
            yield from ContextProgram(self.host, half, half.structure.context, prefix, kept).attend(stops=stops)

    def _rotate(self, prefix: str, half: LocalSizes) -> None:
        """Rotate q and k, and in backward their gradients, before those of q, k and v are joined."""
        host, rotates = self.host, self.config.positions == "rope"
        q, kv = half.query_cut_nbytes, half.local_kv_nbytes
        rotated = ElementwiseOp("rotate", 2 * q + 2 * kv, fused=True)
        if rotates:
            host.compute(rotated)
        read_again = self.structure.cuts_row and self.engine.turn.index == 0

        def rotate_back() -> None:
            if read_again:  # the second half has read the keys of the first, and left their gradients
                host.compute(ElementwiseOp(f"add dkv {prefix}", 3 * kv))
                host.need(kv)
                host.free(kv)
            if rotates:
                host.compute(rotated)
                host.need(3 * half.wide_query_nbytes)
            host.need(half.qkv_cut_nbytes)  # the gradients of q, k and v side by side
            host.free(q + kv)
            host.allocate(half.qkv_cut_nbytes)

        host.on_backward(rotate_back)

    def _attend(self, prefix: str, half: LocalSizes, kept: int) -> None:
        """Attend to the tokens of this place."""
        host, q, kv = self.host, half.query_cut_nbytes, half.local_kv_nbytes
        reads_before = self._reads_before
        if reads_before:
            kv = kv + half.before_kv_nbytes
            host.compute(ElementwiseOp(f"join keys {prefix}", 2 * kv))
        flops, nbytes = half.attention_flops, 2 * q + kv
        host.compute(AttentionOp(f"attention {prefix}", flops, nbytes))
        host.allocate(kept + q, "activations")
        if self.engine.recomputing:
            host.enter_part("again")

        def backward() -> None:
            host.compute(AttentionOp(f"dattention {prefix}", 2 * flops, 2 * nbytes))
            host.allocate(q + kv)  # those of keys of the first half until backward of that
            host.need(half.wide_query_nbytes)  # the kernel sums dq in fp32
            host.free(q)
            host.free(kept + q, "activations")

        host.on_backward(backward)

    def mlp(self, prefix: str, half: LocalSizes) -> Turns[None]:
        """Run the MLP up to the product of `down`."""
        if self.structure.chunks_mlp:
            yield from self.chunked_mlp(prefix, half)
            return
        host, layers = self.host, self.structure.up_layers
        gates, hidden, label = len(layers), half.hidden_cut_nbytes, f"{prefix}.{'+'.join(layers)}"
        whole, cut = gates * half.hidden_nbytes, gates * hidden
        yield from self.expand(label, tuple(f"{prefix}.{name}" for name in layers), gates * half.n, half, whole)
        spreading = self.spread(half, label, nbytes=whole, whole=whole, cut=cut)
        yield
        spreading.land()
        host.compute(ElementwiseOp(f"activate {prefix}", (gates + 1) * hidden, fused=True))
        host.allocate(hidden if gates == 1 else 3 * hidden, "activations")  # gate, up and silu(gate)

        def backward() -> None:
            host.compute(ElementwiseOp(f"dactivate {prefix}", (2 * gates + 1) * hidden, fused=True))
            if gates == 1:
                host.need(hidden)
                host.free(hidden, "activations")
                return
            host.need(2 * hidden)  # the gradients of silu(gate) and of up, while the gradient of their product exists
            host.free(3 * hidden, "activations")
            host.allocate(hidden)
            host.need(2 * hidden)  # the two gradients side by side

        host.on_backward(backward)
        yield from self.contract(
            f"{prefix}.down", half.n, half, size="hidden_nbytes", nbytes=half.hidden_nbytes, cut=hidden,
            kept=half.kept_hidden_nbytes,
        )  # fmt: skip

    def chunked_mlp(self, prefix: str, half: LocalSizes) -> Turns[None]:
        """Run the MLP in chunks of tokens up to the product of `down`; backward runs each chunk forward again."""
        host, turn, layers = self.host, self.engine.turn, self.structure.up_layers
        up = self.weights(f"{prefix}.{'+'.join(layers)}", *(f"{prefix}.{name}" for name in layers))
        down = self.weights(f"{prefix}.down")
        chunks = PlannedChunks(self, half, up, down)
        again = self.engine.recomputing  # nobody reads the result
        entering = NO_MOVE if again and chunks.rereads else self.enter(half, up.label)
        if self.structure.over_x:
            yield
        entering.land()
        host.allocate(half.kept_normed_nbytes, "activations")
        host.expect_gradients(up)
        host.expect_gradients(down)
        if not again:
            keep = chunks.keeps_weights
            with host.using(up, PRODUCT, turn.of, keep=keep), host.using(down, PRODUCT, turn.of, keep=keep):
                for tokens in half.mlp_chunks:
                    chunks.forward(tokens)
        host.on_backward(lambda: chunks.run_backward(turn))


class PlannedChunks:
    """The chunks of an MLP (`nn.linear.ChunkedMLP`): what each of them computes, sends and allocates."""

    def __init__(self, model: TransformerProgram, half: LocalSizes, up: WeightGroup, down: WeightGroup) -> None:
        """`up` are the weights that read the input, with a gate or without."""
        self.model, self.host, self.structure, self.half = model, model.host, model.structure, half
        self.weights, self.up, self.down = (up, down), up.label, down.label
        self.gates = len(model.structure.up_layers)
        self.rereads = model.structure.cuts_rest and not model.policy.keep_gathered
        """Whether backward gathers the input over x again."""
        self.may_keep = model.recompute != "block"
        """Whether weights may stay gathered until backward."""
        self.keeps_weights = model.structure.keeps_weights and self.may_keep

    def run_backward(self, turn: HalfTurn) -> None:
        """Run all chunks of a half backward, and hand in the gradients of the weights."""
        host, half, model, (up, down) = self.host, self.half, self.model, self.weights
        reread = half.reread_nbytes("entered_nbytes") if self.structure.cuts_rest else 0
        host.enter_part("reread")
        host.allocate(reread)
        if self.rereads:
            self._land(lambda: operator_messages(half, "gather", "x", half.entered_nbytes, self.up))
        host.enter_part("backward")
        host.allocate(half.stream_nbytes)  # the gradient of the input
        first = host.engine.sums.begun(("product", down.names)) is None
        made = model.sizes.elements((*up.names, *down.names)) * self.structure.reduce_itemsize if first else 0
        host.allocate(made, "weights")
        host.enter_part("regather")
        with ExitStack() as using:
            if not self.keeps_weights:
                matrices = WeightGroup(down.label, self.structure.matrices(down.names), self.may_keep)
                using.enter_context(host.using(WeightGroup(up.label, up.names, self.may_keep), "again", turn.of))
                using.enter_context(host.using(matrices, "weights", turn.of))
            host.enter_part("backward")
            for tokens in half.mlp_chunks:
                self.backward(tokens)
        host.free(made, "weights")
        for weights in (down, up):
            host.add_gradients("product", weights, turn.of)
            if host.memory and turn.index == 0 and self.may_keep:  # backward runs the first half last
                host.free(model.sizes.kept_elements(weights.names) * self.structure.compute_itemsize, "weights")
        host.free(reread)
        host.free(gathered(half))
        host.free(half.kept_normed_nbytes, "activations")

    def forward(self, tokens: int) -> None:
        whole, cut = self._activate(tokens, self._wait)
        self.host.compute(MatmulOp(f"E1 {self.down}", tokens, self.half.n, self.half.k))
        self.host.free(whole)
        self.host.free(self.gates * cut)

    def backward(self, tokens: int) -> None:
        host, half, gates = self.host, self.half, self.gates
        columns = self._columns
        whole, cut = self._activate(tokens, self._land)
        host.compute(MatmulOp(f"E3 {self.down}", half.k, tokens, half.n, is_wgrad=True))
        host.free(whole)
        host.compute(MatmulOp(f"E2 {self.down}", tokens, half.k, half.n))
        host.allocate(whole)
        self._move(self._land, "reduce", whole, self.down)
        host.compute(ElementwiseOp(f"dactivate {self.down}", (2 * gates + 1) * cut, fused=True))
        host.need(gates * cut if gates == 1 else 5 * cut)  # of a gate: its silu, two products, two gradients
        host.free(whole)
        self._move(self._land, "gather", gates * whole, self.up)
        host.allocate(gates * whole)
        host.need(2 * gates * whole if self.structure.cuts_inner else 0)  # joined after the gather
        host.compute(MatmulOp(f"E3 {self.up}", columns, tokens, half.k, is_wgrad=True))
        host.compute(MatmulOp(f"E2 {self.up}", tokens, columns, half.k))
        host.free(gates * whole)
        host.free(gates * cut)

    @property
    def _columns(self) -> int:
        return self.gates * self.half.n

    def _activate(self, tokens: int, wait: Callable[[Callable[[], list[Collective]]], None]) -> tuple[int, int]:
        """Compute hidden units, and allocate the activation's input and output; return the bytes of both."""
        host, half, gates = self.host, self.half, self.gates
        whole, cut = half.hidden_chunk_nbytes(tokens), half.hidden_chunk_cut_nbytes(tokens)
        host.compute(MatmulOp(f"E1 {self.up}", tokens, half.k, self._columns))
        host.need(2 * gates * whole if self.structure.cuts_inner else 0)  # the product, and the copy that is sent
        self._move(wait, "reduce", gates * whole, self.up)
        host.allocate(gates * cut)
        host.compute(ElementwiseOp(f"activate {self.up}", (gates + 1) * cut, fused=True))
        host.need(gates * cut)
        self._move(wait, "gather", whole, self.down)
        host.need(2 * whole if self.structure.cuts_inner else 0)  # joined after the gather
        host.allocate(whole)
        return whole, cut

    def _move(
        self, wait: Callable[[Callable[[], list[Collective]]], None], direction: Direction, nbytes: int, label: str
    ) -> None:
        if self.structure.cuts_inner:
            self.host.compute(ElementwiseOp(f"turn over {label}", 2 * nbytes))
        if self.structure.over_y:
            wait(lambda: operator_messages(self.half, direction, "y", nbytes, label))

    def _wait(self, records: Callable[[], list[Collective]]) -> None:
        self.host.communicate(records)

    def _land(self, records: Callable[[], list[Collective]]) -> None:
        moving = self.host.launch(records)
        self.host.engine.wgrad_queue.run_one()
        moving.wait()


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


def gathered(half: LocalSizes) -> int:
    """Return the bytes of a tensor at rest that was gathered over x, or 0 if x does not cut it."""
    return half.entered_nbytes if half.structure.cuts_rest else 0


def operator_messages(half: LocalSizes, direction: Direction, axis: str, nbytes: int, label: str) -> list[Collective]:
    """Return the message of an operator: sharded activations are all-gathered or reduce-scattered; replicated ones are
    all-reduced, and gathering them needs no message."""
    if half.structure.sharded:
        return half.message("all_gather" if direction == "gather" else "reduce_scatter", axis, nbytes, label)
    return half.message("all_reduce", axis, nbytes, label) if direction == "reduce" else []

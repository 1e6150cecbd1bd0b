"""The program of a reference model: the work of one rank's host in a training step, derived from sizes alone.

This is the planner's one description of a transformer. It follows the layers (models/transformer.py, nn/), is written
from the equations (docs/math.md) on a `Rehearsal`, and states next to each piece of work what it allocates and frees.
Memory-bound work is counted in the bytes that kernels read and write: passes over the rank's activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from fourfold.engine import Turns
from fourfold.layout import GATHERED
from fourfold.ledger import Collective
from fourfold.planner.context import ContextProgram
from fourfold.planner.layers import LayerProgram, Moving, gathered, operator_messages
from fourfold.planner.mixture import MixtureProgram
from fourfold.planner.program import (
    NO_MOVE,
    AttentionOp,
    BackwardBytes,
    ElementwiseOp,
    MatmulOp,
    PlannedWait,
    Rehearsal,
    WeightGroup,
)
from fourfold.planner.sizes import LocalSizes, sum_over_batch
from fourfold.policy import Recompute


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

    __slots__ = ("begins", "delta")

    def __init__(self, delta: Moving | None = None) -> None:
        self.delta = delta
        self.begins = [] if delta is None else [delta.waits]
        """What the block that reads the stream yields first, also when it runs again."""

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


class TransformerProgram(LayerProgram):
    """The forward and backward of a transformer, run on a rehearsal."""

    def __init__(self, sizes: LocalSizes, host: Rehearsal) -> None:
        super().__init__(sizes, host)
        self.recompute: Recompute = self.policy.recompute
        """What backward computes again in the stage that runs."""
        self.offload = OffloadProgram()

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
            dout=whole, da=half.stream_nbytes, kept=half.kept_normed_nbytes, reread=self.entered_again(half),
            dout_kind="logits",
        )  # fmt: skip
        host.product(
            WeightGroup("head", (self.structure.table,)), half.m, half.k, half.vocab_columns,
            lambda: self.reread(half, "x", half.entered_nbytes, "head"), tensors,
        )  # fmt: skip
        host.allocate(whole, "logits")
        host.free(gathered(half))
        host.need(whole if self.structure.cuts_inner else 0, "logits")  # `spread` sends a copy
        spreading = self.spread(half, "head", nbytes=whole, whole=whole, cut=cut, kind="logits")
        yield
        spreading.land()
        host.allocate(cut, "logits")
        host.free(whole, "logits")

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
        yield from stream.begins
        if self.recompute == "block":  # add the parts now, so that the block keeps one tensor and not two
            stream.read()
            stream.delta = None
        stream.read()
        self.norm(f"{prefix}.attention_norm", half, reads_kept=self.recompute == "block")
        mixture = MixtureProgram(self, f"{prefix}.mlp", half) if self.config.is_mixture(index) else None
        if mixture is not None and self.config.reads_previous:
            self.norm(f"{prefix}.mlp_norm", half, reads_kept=True)
            yield from mixture.route()
        leaving = yield from self.attention(f"{prefix}.attention", half)
        yield  # even if nothing is in flight: the other half's messages need a product to hide behind
        leaving.land()
        self.dropout(half)
        self.norm(f"{prefix}.mlp_norm", half)
        if mixture is None:
            yield from self.mlp(f"{prefix}.mlp", half, again=self.recompute == "block")
        else:
            if not self.config.reads_previous:
                yield from mixture.route()
            yield from mixture.run()
        if self.engine.recomputing and not self.config.dropout:
            return PlannedStream(NO_MOVE)  # backward reads no value of what follows, so the runtime stops here too
        leaving = self.leave(half, f"{prefix}.mlp.down") if mixture is None else mixture.leave()
        if self.config.dropout:
            yield leaving.waits
            leaving.land()
            self.dropout(half)
            leaving = NO_MOVE
        if index == 0:
            self.host.on_backward(lambda: self.host.enter_moment("first layer"), reads=False)
        return PlannedStream(leaving)

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

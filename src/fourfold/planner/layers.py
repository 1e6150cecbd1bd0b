"""The programs of layers: operators that move activations, products that lead from rest to inner and back, the MLP.

Each operator is a gather or a reduction over one axis, and backward runs its conjugate.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal, Protocol

from fourfold.engine import HalfTurn, Turns, Wait
from fourfold.ledger import Collective
from fourfold.planner.program import (
    NO_MOVE,
    PRODUCT,
    BackwardBytes,
    ElementwiseOp,
    MatmulOp,
    MemoryKind,
    Rehearsal,
    WeightGroup,
)
from fourfold.planner.sizes import LocalSizes


class Moving(Protocol):
    """An activation that may be in flight."""

    @property
    def travels(self) -> bool: ...
    @property
    def waits(self) -> Wait | None: ...
    def land(self) -> None: ...


Direction = Literal["gather", "reduce"]
"""The two kinds of operators; each is the conjugate of the other."""


WIDTHS = {"hidden": "n", "shared": "shared_n"}
"""The attributes of `LocalSizes` with the hidden units of an MLP."""


class LayerProgram:
    """The layers of a block that every kind of model has, run on a rehearsal."""

    def __init__(self, sizes: LocalSizes, host: Rehearsal) -> None:
        self.sizes, self.config, self.policy, self.host = sizes, sizes.config, sizes.policy, host
        self.engine, self.halves, self.structure = host.engine, sizes.halves, sizes.structure

    def weights(self, label: str, *modules: str) -> WeightGroup:
        """Return the parameters of modules, by default of the module with this label, that share one message."""
        return WeightGroup(label, self.structure.parameters_of(*modules or (label,)))

    # --- operators

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

    def reread(self, half: LocalSizes, axis: str, nbytes: int, label: str) -> list[Collective]:
        """Return the second gather of a product's input, for dw, unless the input was kept."""
        kept = self.policy.keep_gathered
        return [] if kept else operator_messages(half, "gather", axis, nbytes, label)

    # --- products

    def expand(self, label: str, names: tuple[str, ...], columns: int, half: LocalSizes, nbytes: int) -> Turns[None]:
        """Run layers that read one tensor, up to their product; its output has `columns` columns and `nbytes` bytes."""
        entering = self.enter(half, label)
        if entering.travels:
            yield
        entering.land()
        tensors = BackwardBytes(nbytes, half.stream_nbytes, half.kept_normed_nbytes, self.entered_again(half))
        reread = partial(self.reread, half, "x", half.entered_nbytes, label)
        self.host.product(self.weights(label, *names), half.m, half.k, columns, reread, tensors)

    def entered_again(self, half: LocalSizes) -> int:
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
        self.host.product(weights, half.m, features, half.k, lambda: self.reread(half, "y", nbytes, label), tensors)

    # --- the MLP

    def mlp(self, prefix: str, half: LocalSizes, *, again: bool, inside: str = "hidden") -> Turns[None]:
        """Run the MLP up to the product of `down`; `again`: whether backward runs the whole block again.

        `inside`: the attributes of `half` with the sizes inside the MLP, `hidden`, or `shared` of one beside experts.
        """
        if self.structure.chunks_mlp:
            yield from self.chunked_mlp(prefix, half, again=again)
            return
        host, layers = self.host, self.structure.up_layers
        gates, label = len(layers), f"{prefix}.{'+'.join(layers)}"
        n, hidden = getattr(half, WIDTHS[inside]), getattr(half, f"{inside}_cut_nbytes")
        whole, cut = gates * getattr(half, f"{inside}_nbytes"), gates * hidden
        yield from self.expand(label, tuple(f"{prefix}.{name}" for name in layers), gates * n, half, whole)
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
            f"{prefix}.down", n, half, size=f"{inside}_nbytes", nbytes=getattr(half, f"{inside}_nbytes"), cut=hidden,
            kept=getattr(half, f"kept_{inside}_nbytes"),
        )  # fmt: skip

    def chunked_mlp(self, prefix: str, half: LocalSizes, *, again: bool) -> Turns[None]:
        """Run the MLP in chunks of tokens up to the product of `down`; backward runs each chunk forward again."""
        host, turn, layers = self.host, self.engine.turn, self.structure.up_layers
        up = self.weights(f"{prefix}.{'+'.join(layers)}", *(f"{prefix}.{name}" for name in layers))
        down = self.weights(f"{prefix}.down")
        chunks = PlannedChunks(self, half, up, down, may_keep=not again)
        unread = self.engine.recomputing
        entering = NO_MOVE if unread and chunks.rereads else self.enter(half, up.label)
        if self.structure.over_x:
            yield
        entering.land()
        host.allocate(half.kept_normed_nbytes, "activations")
        host.expect_gradients(up)
        host.expect_gradients(down)
        if not unread:
            keep = chunks.keeps_weights
            with host.using(up, PRODUCT, turn.of, keep=keep), host.using(down, PRODUCT, turn.of, keep=keep):
                for tokens in half.mlp_chunks:
                    chunks.forward(tokens)
        host.on_backward(lambda: chunks.run_backward(turn))


class PlannedChunks:
    """The chunks of an MLP (`nn.linear.ChunkedMLP`): what each of them computes, sends and allocates."""

    def __init__(
        self, model: LayerProgram, half: LocalSizes, up: WeightGroup, down: WeightGroup, *, may_keep: bool
    ) -> None:
        """`up` are the weights that read the input, with a gate or without."""
        self.model, self.host, self.structure, self.half = model, model.host, model.structure, half
        self.weights, self.up, self.down = (up, down), up.label, down.label
        self.gates = len(model.structure.up_layers)
        self.rereads = model.structure.cuts_rest and not model.policy.keep_gathered
        """Whether backward gathers the input over x again."""
        self.may_keep = may_keep
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


def gathered(half: LocalSizes) -> int:
    """Return the bytes of a tensor at rest that was gathered over x, or 0 if x does not cut it."""
    return half.entered_nbytes if half.structure.cuts_rest else 0


def operator_messages(half: LocalSizes, direction: Direction, axis: str, nbytes: int, label: str) -> list[Collective]:
    """Return the message of an operator: sharded activations are all-gathered or reduce-scattered; replicated ones are
    all-reduced, and gathering them needs no message."""
    if half.structure.sharded:
        return half.message("all_gather" if direction == "gather" else "reduce_scatter", axis, nbytes, label)
    return half.message("all_reduce", axis, nbytes, label) if direction == "reduce" else []

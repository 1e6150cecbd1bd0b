"""The program of a mixture of experts (`nn.moe`): the router, the choice, the products of experts, the MLP beside them.

A dry run and a plan do not know which experts tokens choose: every expert has equally many of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fourfold.engine import Turns
from fourfold.ledger import Collective
from fourfold.planner.layers import LayerProgram, Moving, gathered, operator_messages
from fourfold.planner.program import (
    EXPERTS,
    NO_MOVE,
    BackwardBytes,
    ElementwiseOp,
    MatmulOp,
    PlannedWait,
    WeightGroup,
)
from fourfold.planner.sizes import LocalSizes


class MixtureProgram:
    """A mixture of experts for one half of a batch."""

    def __init__(self, layers: LayerProgram, prefix: str, half: LocalSizes) -> None:
        self.layers, self.prefix, self.half = layers, prefix, half
        self.host, self.structure = layers.host, layers.structure

    def run(self) -> Turns[None]:
        """Run everything up to `leave`."""
        layers, half, host = self.layers, self.half, self.host
        self._route()
        entering, choosing = layers.enter(half, self.prefix), self._enter_choice()
        if entering.travels:
            yield
        entering.land()
        choosing.land()
        host.compute(ElementwiseOp(f"sort {self.prefix}", half.sorting_nbytes))
        host.allocate(half.pair_index_nbytes, "activations")
        host.on_backward(lambda: host.free(half.pair_index_nbytes, "activations"), reads=False)
        self._expand()
        whole = 2 * half.pairs_nbytes
        spreading = layers.spread(half, self.prefix, nbytes=whole, whole=whole, cut=2 * half.pairs_cut_nbytes)
        yield
        spreading.land()
        self._activate()
        collecting = layers.collect(half, self.prefix, nbytes=half.pairs_nbytes, cut=half.pairs_cut_nbytes)
        if collecting.travels:
            yield
        collecting.land()
        self._contract()
        if layers.config.shared_hidden:
            yield from layers.mlp(f"{self.prefix}.shared", half, again=False, inside="shared")
            host.compute(ElementwiseOp(f"add {self.prefix}", 3 * half.stream_nbytes))

    # --- the router

    def _route(self) -> None:
        """Compute the scores of this rank's tokens at rest, and choose (E17)."""
        half, host, label = self.half, self.host, f"{self.prefix}.router"
        host.compute(ElementwiseOp(f"cast {self.prefix}", half.router_cast_nbytes))
        tensors = BackwardBytes(dout=half.router_nbytes, da=half.wide_rest_nbytes, kept=half.kept_router_nbytes)
        weights = WeightGroup(label, (f"{label}.weight",), wide=True)
        host.product(weights, half.m_rest, half.k, half.experts, list, tensors)
        host.communicate(lambda: half.message("all_reduce", "y", half.router_nbytes, self.prefix))
        host.compute(ElementwiseOp(f"choose {self.prefix}", half.choosing_nbytes))
        host.allocate(half.kept_choice_nbytes, "activations")

        def backward() -> None:
            host.compute(ElementwiseOp(f"dchoose {self.prefix}", half.choosing_nbytes))
            host.free(half.wide_rest_nbytes)  # nobody else frees what the product of the router is about to make
            host.free(half.kept_choice_nbytes, "activations")
            host.allocate(half.router_nbytes)

        host.on_backward(backward)

    def _enter_choice(self) -> Moving:
        """Bring scores and ids to all ranks of the place."""
        half, sharded = self.half, self.structure.sharded
        sums_y = sharded and self.structure.over_y
        if not (self.structure.over_x or sums_y):
            return NO_MOVE

        def back() -> list[Collective]:
            if sums_y:  # the result is read before it goes on
                self.host.communicate(lambda: half.message("all_reduce", "y", half.choice_owed_nbytes, self.prefix))
            return operator_messages(half, "reduce", "x", half.choice_back_nbytes, self.prefix)

        return self.host.move(
            "x" if self.structure.over_x else "y",
            lambda: operator_messages(half, "gather", "x", half.choice_nbytes, self.prefix),
            back,
        )

    # --- the products of experts

    def _expand(self) -> None:
        """Multiply the rows of pairs by gate and up (E18)."""
        half, layers = self.half, self.layers
        reread = partial(layers.reread, half, "x", half.entered_nbytes, self.prefix)
        made = 2 * half.pairs_nbytes
        tensors = BackwardBytes(made, half.stream_nbytes, half.kept_normed_nbytes, layers.entered_again(half))
        PlannedExperts(self, ("gate", "up"), (half.k, half.expert_n), reread, tensors, picks=True).run()

    def _contract(self) -> None:
        """Multiply by down, and add up what the experts of a token make (E19)."""
        half, layers = self.half, self.layers
        reread = partial(layers.reread, half, "y", half.pairs_nbytes, self.prefix)
        again = half.reread_nbytes("pairs_nbytes") if self.structure.cuts_inner else 0
        tensors = BackwardBytes(gathered(half), half.pairs_nbytes, half.kept_pairs_nbytes, again, joins=2 * again)
        PlannedExperts(self, ("down",), (half.expert_n, half.k), reread, tensors, picks=False).run()

    def _activate(self) -> None:
        """Compute silu(gate) up p."""
        half, host, hidden = self.half, self.host, self.half.pairs_cut_nbytes
        host.compute(ElementwiseOp(f"activate {self.prefix}", 3 * hidden, fused=True))
        host.compute(ElementwiseOp(f"scale {self.prefix}", 2 * hidden, fused=True))
        host.allocate(4 * hidden + half.pair_score_nbytes, "activations")  # gate, up, silu(gate), and their product

        def backward() -> None:
            host.compute(ElementwiseOp(f"dscale {self.prefix}", 4 * hidden, fused=True))
            host.compute(ElementwiseOp(f"dactivate {self.prefix}", 5 * hidden, fused=True))
            host.need(2 * hidden)
            host.free(4 * hidden + half.pair_score_nbytes, "activations")
            host.allocate(hidden)
            host.need(2 * hidden)  # the two gradients side by side

        host.on_backward(backward)


class PlannedExperts:
    """A product of all pairs with the weights of their experts (`nn.moe.ExpertProduct`)."""

    def __init__(
        self,
        mixture: MixtureProgram,
        names: tuple[str, ...],
        sizes: tuple[int, int],
        reread: Callable[[], list[Collective]],
        tensors: BackwardBytes,
        *,
        picks: bool,
    ) -> None:
        """`sizes` are features of the input, and of the output of each weight.

        `picks`: whether the input has tokens, of which each pair picks one; otherwise the output has.
        """
        self.host, self.half, self.label = mixture.host, mixture.half, mixture.prefix
        self.names, self.reread, self.tensors, self.picks = names, reread, tensors, picks
        self.k, self.n = sizes
        self.kept = mixture.structure.keeps_weights
        """Whether the weights stay gathered until backward."""
        self.turn = self.host.engine.turn
        self.weights = WeightGroup(self.label, tuple(f"{self.label}.{name}" for name in names))
        rows = self.half.pair_stream_nbytes
        self.picked = ElementwiseOp(f"pick {self.label}", 2 * rows)
        self.combined = ElementwiseOp(f"combine {self.label}", 3 * rows)

    def run(self) -> None:
        """Compute E1 for all pairs; in backward E2 and, behind a message, E3."""
        host, rows = self.host, self.half.pair_stream_nbytes
        host.allocate(self.tensors.kept, "activations")
        host.expect_gradients(self.weights)
        with host.using(self.weights, EXPERTS, self.turn.of, keep=self.kept):
            if self.picks:
                host.compute(self.picked)
            self._multiply("E1", self.half.pairs, self.k, self.n)
            host.need(rows + (2 * self.tensors.dout if self.picks else rows))
            if not self.picks:
                host.compute(self.combined)
        host.on_backward(self._run_backward)

    def _multiply(self, equation: str, m: int, k: int, n: int) -> None:
        product = MatmulOp(f"{equation} {self.label}", m, k, n, equation == "E3", self.half.expert_parts)
        for _ in self.names:
            self.host.compute(product)

    def _run_backward(self) -> None:
        host, structure = self.host, self.host.structure
        reading = self._read() if host.policy.overlap.wgrad_behind_messages else None
        if self.kept:
            self._multiply_back()
            host.engine.wgrad_queue.add(lambda: self._add_gradients(reading))
        else:
            host.enter_part("regather")
            with host.using(self.weights._replace(again=True), EXPERTS, self.turn.of):
                host.enter_part("backward")
                self._multiply_back()
                # inside the block, because the runtime holds the weights until backward of the product returns
                host.engine.wgrad_queue.add(lambda: self._add_gradients(reading))
        if host.memory and self.turn.index == 0:  # backward runs the first half last; it frees what all halves kept
            host.free(host.sizes.kept_elements(self.weights.names) * structure.compute_itemsize, "weights")

    def _read(self) -> PlannedWait:
        """Begin to gather the input again."""
        self.host.enter_part("reread")
        self.host.allocate(self.tensors.reread)
        reading = self.host.launch(self.reread)
        self.host.enter_part("backward")
        return reading

    def _multiply_back(self) -> None:
        host, rows = self.host, self.half.pair_stream_nbytes
        if not self.picks:
            host.compute(self.picked)
        host.allocate(self.tensors.da)
        self._multiply("E2", self.half.pairs, self.n, self.k)
        host.need(3 * rows if self.picks else rows)
        if self.picks:
            host.compute(self.combined)

    def _add_gradients(self, reading: PlannedWait | None) -> None:
        host, rows = self.host, self.half.pair_stream_nbytes
        (reading or self._read()).wait()
        host.need(self.tensors.joins)
        host.allocate(rows)
        host.compute(self.picked)  # rows of the input, or of the gradient of the output
        self._multiply("E3", self.n, self.half.pairs, self.k)
        structure = host.structure
        widens = (
            structure.compute_itemsize != structure.reduce_itemsize
        )  # a grouped product has the dtype of its factors
        made = host.sizes.elements(self.weights.names) * structure.compute_itemsize if widens else 0
        host.allocate(made, "weights")
        host.add_gradients("experts", self.weights, self.turn.of, in_place=False)
        host.free(made, "weights")
        host.free(rows)
        host.free(self.tensors.reread)
        host.free(self.tensors.dout)
        host.free(self.tensors.kept, "activations")

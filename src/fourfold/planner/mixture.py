"""The program of a mixture of experts (`nn.moe`): the router, the choice, the products of experts, the MLP beside them.

A dry run and a plan do not know which experts tokens choose: every expert has equally many of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

from fourfold.axes import CONTEXT
from fourfold.engine import Turns, Wait
from fourfold.ledger import Collective
from fourfold.planner.layers import LayerProgram, Moving, gathered, operator_messages
from fourfold.planner.program import (
    EXPERTS,
    NO_MOVE,
    NOTHING_SENT,
    BackwardBytes,
    ElementwiseOp,
    MatmulOp,
    PlannedWait,
    Records,
    WeightGroup,
)
from fourfold.planner.sizes import LocalSizes


class MixtureProgram:
    """A mixture of experts for one half of a batch: `route`, then `run`, then `leave`."""

    def __init__(self, layers: LayerProgram, prefix: str, half: LocalSizes) -> None:
        self.layers, self.prefix, self.half = layers, prefix, half
        self.host, self.structure = layers.host, layers.structure
        self.entering: Moving = NO_MOVE
        """The stream on its way to the place, or its rows on their way to experts on a fold."""
        self.choosing: Moving = NO_MOVE
        self.waits = Wait.ROWS if self.structure.sends else None
        """What rows on their way wait for, to their experts and back."""

    def route(self) -> Turns[None]:
        """Choose experts, and launch what brings them and tokens together."""
        self._route()
        if self.structure.folded:
            yield from self._send()
        else:
            self.entering, self.choosing = self.layers.enter(self.half, self.prefix), self._enter_choice()

    def run(self) -> Turns[None]:
        """Run everything up to `leave`."""
        if self.structure.folded:
            yield from self._run_on_fold()
            return
        layers, half, host = self.layers, self.half, self.host
        if self.entering.travels:
            yield
        self.entering.land()
        self.choosing.land()
        yield from self._count()
        self._sort(half.sorting_nbytes, half.pair_index_nbytes)
        entered = layers.entered_again(half)
        self._expand(
            partial(layers.reread, half, "x", half.entered_nbytes, self.prefix),
            BackwardBytes(2 * half.pairs_nbytes, half.stream_nbytes, half.kept_by_experts_nbytes, entered),
        )
        yield from self._inside()
        self._contract(gathered(half))
        if layers.config.shared_hidden:
            yield from layers.mlp(f"{self.prefix}.shared", half, again=False, inside="shared")
            host.compute(ElementwiseOp(f"add {self.prefix}", 3 * half.stream_nbytes))

    def leave(self) -> Moving:
        """Launch what brings the output to rest."""
        if not self.structure.folded:
            return self.layers.leave(self.half, self.prefix)
        shared = self.layers.config.shared_hidden
        beside = self.layers.leave(self.half, f"{self.prefix}.shared.down") if shared else NO_MOVE
        return LeavingExperts(self, self._return(), beside)

    def _inside(self) -> Turns[None]:
        """Run what lies between the two products."""
        layers, half = self.layers, self.half
        whole = 2 * half.pairs_nbytes
        spreading = layers.spread(half, self.prefix, nbytes=whole, whole=whole, cut=2 * half.pairs_cut_nbytes)
        yield
        spreading.land()
        self._activate()
        collecting = layers.collect(half, self.prefix, nbytes=half.pairs_nbytes, cut=half.pairs_cut_nbytes)
        if collecting.travels:
            yield
        collecting.land()

    def _count(self) -> Turns[None]:
        """Gather the choices of a context group, if losses or capacity count them by sequence."""
        routing = self.layers.config.routing
        if CONTEXT in self.structure.used_axes and (routing.aux or routing.capacity):
            half, label = self.half, f"choices {self.prefix}"
            counting = self.host.launch(lambda: half.message("all_gather", CONTEXT, half.choices_nbytes, label))
            yield
            counting.wait()

    # --- a fold

    def _send(self) -> Turns[None]:
        """Send tokens to their experts (`nn.dispatch`)."""
        half, host, structure, label = self.half, self.host, self.structure, self.prefix
        if structure.sharded and structure.over_x:
            gathering = host.launch(lambda: half.message("all_gather", "x", half.gathered_ids_nbytes, label))
            yield
            gathering.wait()
        yield from self._count()
        if structure.sharded and structure.over_y:  # every rank along y multiplies its own hidden units by p
            self._back_at_once(lambda: half.message("all_reduce", "y", half.choice_rest_nbytes, label))
        if structure.over_x and not structure.sharded:  # each rank along x sends its part of the tokens
            self._back_at_once(lambda: half.message("all_gather", "x", half.own_stream_nbytes, label))
            self._back_at_once(lambda: half.message("all_gather", "x", half.own_scores_nbytes, label))
        if not structure.sends:
            self._sort(half.sorting_nbytes, half.pair_index_nbytes)
            host.on_backward(self._leave_stream, reads=False)
            return
        counting, counts = NOTHING_SENT, not host.policy.pad_experts
        if counts and "expert" in structure.used_axes:
            sizes = half.counts_nbytes, half.counts_sent_nbytes
            counting = host.launch(lambda: half.all_to_all(*sizes, label, "expert"))
        if counts:
            yield Wait.COUNTS
        self._sort(half.sorting_nbytes, half.pair_index_nbytes)
        counting.wait()
        if counts:
            host.communicate(lambda: half.message("all_gather", "ex", half.counts_joined_nbytes, label))
            host.read_result()  # the numbers of rows
        host.compute(ElementwiseOp(f"pack {label}", 4 * half.packed_nbytes))
        host.on_backward(self._unpack, reads=False)
        self.entering = host.move(
            "expert",
            lambda: half.all_to_all(half.dispatch_nbytes, half.dispatch_sent_nbytes, label, "expert"),
            lambda: half.all_to_all(half.dispatch_nbytes, half.dispatch_back_nbytes, label, "expert"),
            arrives=half.packed_nbytes, leaves=half.arrived_packed_nbytes,
        )  # fmt: skip

    def _leave_stream(self) -> None:
        """Give the gradient of tokens that stayed to the norm before the experts."""
        self.host.free(self.half.joined_nbytes)
        self._add_to_shared(self.half.rest_nbytes)

    def _unpack(self) -> None:
        """Add up the gradients of the rows of each token, and take out those of p."""
        half, host = self.half, self.host
        host.compute(ElementwiseOp(f"dpack {self.prefix}", half.packed_nbytes + half.rest_nbytes))
        host.allocate(half.rest_nbytes)
        host.free(half.packed_nbytes)
        self._add_to_shared(0)

    def _add_to_shared(self, made: int) -> None:
        """Add the gradient of the stream, of which `made` bytes are new, to that of the MLP beside the experts."""
        self.host.allocate(made)
        if self.layers.config.shared_hidden and not self.layers.config.reads_previous:
            self.host.free(self.half.rest_nbytes)

    def _run_on_fold(self) -> Turns[None]:
        """Run the MLP beside the experts while tokens travel, then the experts of the tokens that arrive."""
        half, structure = self.half, self.structure
        if self.layers.config.shared_hidden:
            yield from self.layers.mlp(f"{self.prefix}.shared", half, again=False, inside="shared")
        yield self.waits
        self.entering.land()
        if structure.sends:
            self._land()
        self._expand(list, BackwardBytes(2 * half.pairs_nbytes, half.joined_nbytes, half.kept_by_experts_nbytes))
        yield from self._inside()
        self._contract(half.joined_nbytes if structure.copies_rows else 0)

    def _land(self) -> None:
        """Unpack the tokens that have arrived, and sort their choices by expert."""
        half, host, label, over_ex = self.half, self.host, self.prefix, "ex" in self.structure.used_axes

        def leave_experts() -> None:
            if over_ex:
                host.allocate(half.arrived_stream_nbytes)
                host.free(half.joined_nbytes)
            host.allocate(half.arrived_packed_nbytes)
            host.free(half.arrived_stream_nbytes)

        host.on_backward(leave_experts, reads=False)
        if over_ex:
            host.communicate(lambda: half.message("all_gather", "ex", half.joined_packed_nbytes, label))
            self._back_at_once(lambda: half.message("reduce_scatter", "ex", half.joined_scores_nbytes, label))
            self._back_at_once(lambda: half.message("reduce_scatter", "ex", half.joined_nbytes, label))
        host.compute(ElementwiseOp(f"unpack {label}", 2 * half.joined_packed_nbytes))
        self._sort(half.arrived_sorting_nbytes, half.arrived_index_nbytes)

    def _sort(self, nbytes: int, kept: int) -> None:
        """Sort pairs; what says where each one is exists until backward."""
        self.host.compute(ElementwiseOp(f"sort {self.prefix}", nbytes))
        self.host.allocate(kept, "activations")
        self.host.on_backward(lambda: self.host.free(kept, "activations"), reads=False)

    def _return(self) -> Moving:
        """Send the outputs of experts back to the tokens."""
        half, host, label = self.half, self.host, self.prefix
        if "ex" in self.structure.used_axes:

            def enter_experts() -> None:
                host.allocate(half.joined_nbytes)
                host.free(half.arrived_stream_nbytes)

            host.on_backward(enter_experts, reads=False)
            host.communicate(lambda: half.message("reduce_scatter", "ex", half.joined_nbytes, label))
            self._back_at_once(lambda: half.message("all_gather", "ex", half.joined_nbytes, label))
        return host.move(
            "expert",
            lambda: half.all_to_all(half.combine_nbytes, half.combine_sent_nbytes, label, "expert"),
            lambda: half.all_to_all(half.combine_nbytes, half.combine_back_nbytes, label, "expert"),
            arrives=half.arrived_stream_nbytes, leaves=half.sent_stream_nbytes,
        )  # fmt: skip

    def _back_at_once(self, records: Records) -> None:
        """Send a message in backward that is waited for at once."""
        self.host.on_backward(lambda: self.host.communicate(records), reads=False)

    # --- the router

    def _route(self) -> None:
        """Compute the scores of this rank's tokens at rest, and choose (E17)."""
        half, host, label = self.half, self.host, f"{self.prefix}.router"
        host.compute(ElementwiseOp(f"cast {self.prefix}", half.router_cast_nbytes))
        tensors = BackwardBytes(dout=half.router_nbytes, da=half.wide_rest_nbytes, kept=half.kept_router_nbytes)
        weights = WeightGroup(label, (f"{label}.weight",), router=True)
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

    def _expand(self, reread: Callable[[], list[Collective]], tensors: BackwardBytes) -> None:
        """Multiply the rows of pairs by gate and up (E18)."""
        PlannedExperts(
            self, ("gate", "up"), (self.half.k, self.half.expert_n), reread, tensors, per_token="input"
        ).run()

    def _contract(self, owed: int) -> None:
        """Multiply by down, and add up what the experts of a token make (E19).

        Backward frees `owed` bytes of the gradient of the sums.
        """
        half, layers = self.half, self.layers
        reread = partial(layers.reread, half, "y", half.pairs_nbytes, self.prefix)
        again = half.reread_nbytes("pairs_nbytes") if self.structure.cuts_inner else 0
        tensors = BackwardBytes(owed, half.pairs_nbytes, half.kept_pairs_nbytes, again, joins=2 * again)
        PlannedExperts(self, ("down",), (half.expert_n, half.k), reread, tensors, per_token="output").run()

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


class LeavingExperts:
    """The outputs of experts on a fold on their way back to the tokens, and the output of the MLP beside them."""

    travels = True

    def __init__(self, mixture: MixtureProgram, rows: Moving, shared: Moving) -> None:
        self.mixture, self.rows, self.shared = mixture, rows, shared
        self.waits = mixture.waits

    def land(self) -> None:
        mixture, rows, shared = self.mixture, self.rows, self.shared
        host, half, structure, label = mixture.host, mixture.half, mixture.structure, mixture.prefix
        rows.land()
        if structure.copies_rows:
            combining = ElementwiseOp(f"combine {label}", 2 * half.sent_stream_nbytes)
            host.compute(combining)

            def pick() -> None:
                host.compute(combining)
                host.allocate(half.sent_stream_nbytes)

            host.on_backward(pick, reads=False)
        if structure.over_x and not structure.sharded:
            host.communicate(lambda: half.message("all_gather", "x", half.own_stream_nbytes, label))
        if mixture.layers.config.shared_hidden:
            shared.land()
            host.compute(ElementwiseOp(f"add {label}", 3 * half.rest_nbytes))


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
        per_token: Literal["input", "output"],
    ) -> None:
        """`sizes` are features of the input, and of the output of each weight.

        `per_token`: which side has tokens. Each pair picks one of the input, and is added to one of the output.
        """
        self.host, self.half, self.label = mixture.host, mixture.half, mixture.prefix
        self.names, self.reread, self.tensors = names, reread, tensors
        self.picks = per_token == "input"
        self.k, self.n = sizes
        self.kept = mixture.structure.keeps_weights
        """Whether the weights stay gathered until backward."""
        self.turn = self.host.engine.turn
        self.weights = WeightGroup(self.label, tuple(f"{self.label}.{name}" for name in names))
        rows = self.half.pair_stream_nbytes
        self.picked = ElementwiseOp(f"pick {self.label}", 2 * rows)
        self.combined = ElementwiseOp(f"combine {self.label}", 2 * rows)

    def run(self) -> None:
        """Compute E1 for all pairs; in backward E2 and, behind a message, E3."""
        host, rows = self.host, self.half.pair_stream_nbytes
        host.allocate(self.tensors.kept, "activations")
        host.expect_gradients(self.weights)
        with host.using(self.weights, EXPERTS, self.turn.of, keep=self.kept):
            if self.picks:
                host.compute(self.picked)
            self._multiply("E1", self.half.pairs, self.k, self.n)
            host.need(rows + 2 * self.tensors.dout if self.picks else rows)
            if not self.picks:
                host.compute(self.combined)
        host.on_backward(self._run_backward)

    def _multiply(self, equation: str, m: int, k: int, n: int) -> None:
        parts, sent = self.half.expert_parts, self.host.structure.sends
        product = MatmulOp(f"{equation} {self.label}", m, k, n, equation == "E3", parts, sent)
        for _ in self.names:
            self.host.compute(product)

    def _run_backward(self) -> None:
        host, structure = self.host, self.host.structure
        reading = self._read() if host.policy.overlap.wgrad_behind_messages else None
        if not self.picks:  # the gradient by pair, which E2 and E3 read
            host.allocate(self.half.pair_stream_nbytes)
            host.compute(self.picked)
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
        if not self.picks:
            host.free(self.tensors.dout)
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
        if self.picks:
            host.need(2 * rows)  # weights add up their parts
        host.allocate(self.tensors.da)
        self._multiply("E2", self.half.pairs, self.n, self.k)
        host.need(rows)  # of the tokens that one side has
        if self.picks:
            host.compute(self.combined)

    def _add_gradients(self, reading: PlannedWait | None) -> None:
        host, rows = self.host, self.half.pair_stream_nbytes
        (reading or self._read()).wait()
        host.need(self.tensors.joins)
        if self.picks:
            host.allocate(rows)
            host.compute(self.picked)
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
        if self.picks:
            host.free(self.tensors.dout)
        host.free(self.tensors.kept, "activations")

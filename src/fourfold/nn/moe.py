"""A mixture of experts in place of an MLP, whose products are the 3D product, expert by expert.

Every token chooses K of E experts. On a grid without a fold tokens stay where they are, and the weights of the experts
travel over z like all weights; on a folded grid tokens travel as well (`dispatch`). A pair is a token with one of its
experts; pairs are sorted by expert. In the notation of `operators`, with m tokens of a place, P = m K pairs, k features
of the stream and n hidden units of an expert:

    at rest   p and ids of the K experts of each token (`router`)                             E17
    enter     a and (p, ids) of all tokens of the place
    expand    u_e = a_e w_e^T, [P, n/x] {sum y}, for gate and up -> spread                    E18
    inner     h = silu(gate) * up * p
    contract  o_e = h_e w_e^T, [P, k/y] {sum x} -> out[t] = sum_j o[t, j] in the order of j   E19 -> leave

On a fold x is ex, z is ez, m are the tokens that have come to the rank, and P their pairs with its experts. Invariant:
which experts a token chooses, and every sum, depends on the model and the tokens alone, not on the grid. Without a fold
no shape depends on the choice, so nothing is read by the host on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fourfold import kernels
from fourfold.comm import Pending
from fourfold.engine import Turns, Wait
from fourfold.gradients import ForwardPass
from fourfold.grid import Grid
from fourfold.layout import PRODUCT, Init, Layout, Spec
from fourfold.nn.dispatch import ArrivedTokens, Dispatch, Pairs, all_rows, own_rows, rows_here, stays
from fourfold.nn.layer import Layer, add_gradients
from fourfold.nn.linear import MLP, keeps_weights, require_divisible
from fourfold.nn.router import (
    BalanceTerm,
    Router,
    Routing,
    SequenceCounts,
    Sequences,
    enter_choice,
    most_of_an_expert,
    within_capacity,
)
from fourfold.operators import (
    AsyncResult,
    Body,
    Conjugate,
    OpContext,
    Ready,
    collect,
    enter,
    identity,
    leave,
    once_differentiable,
    spread,
)
from fourfold.param_group import ParamGroup
from fourfold.policy import Policy
from fourfold.product import wrong_rows

EXPANDS = Layout((("x", 1), ("y", 2), ("z", 0)))
"""How the weights [E, n, k] of gate and up rest: hidden units over x, features over y, experts over z."""
CONTRACTS = Layout((("x", 2), ("y", 1), ("z", 0)))
"""How the weight [E, k, n] of down rests."""
EXPANDS_ON_FOLD = Layout((("expert", 0), ("ex", 1), ("y", 2), ("ez", 1)))
"""How the weights of gate and up rest on a folded grid: experts over expert, hidden units over ex and ez."""
CONTRACTS_ON_FOLD = Layout((("expert", 0), ("ex", 2), ("y", 1), ("ez", 1)))
"""How the weight of down rests on a folded grid."""
PRODUCT_ON_FOLD = Layout.activation(("edata", "ez"), ("ex", "y"))
"""How the products of experts are cut on a folded grid."""


@dataclass(frozen=True, slots=True)
class ExpertFactor:
    """The weights of all experts that read the same rows."""

    group: ParamGroup
    keep_weights: bool
    per_token: Literal["input", "output"]
    """Which side has tokens: Expand picks the rows of its pairs, Contract adds pairs up to tokens."""

    def multiplying(self, equation: str) -> AbstractContextManager[object]:
        return self.group.grid.ledger.multiplying(f"{equation} {self.group.label}")

    def multiply(self, pairs: Pairs, a: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return E1: the outputs of all weights side by side."""
        factors, rows = [w.transpose(1, 2) for w in weights], self.of_pairs(pairs, a, "input")
        return self._of_tokens(pairs, kernels.grouped(rows, factors, pairs.groups), "output")

    def multiply_back(self, pairs: Pairs, dout: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return E2, the gradient of the input, from that of the output by pair."""
        return self._of_tokens(pairs, kernels.grouped_sum(dout, weights, pairs.groups), "input")

    def add_gradients(self, pairs: Pairs, dout: Tensor, a: Pending[Tensor], turns: int, during: ForwardPass) -> None:
        """Add E3 of one of `turns` halves, from the gradient of the output by pair."""
        first = self.of_pairs(pairs, a.wait(), "input")
        width = dout.shape[1] // len(self.group.members)
        parts, found = dout.split(width, dim=1), []
        for member, part in zip(self.group.members, parts, strict=True):
            if member.parameter.requires_grad:
                with self.multiplying("E3"):
                    found.append(kernels.grouped_weights(part, first, pairs.groups))
            else:
                found.append(None)
        add_gradients(self.group, found, turns, during)

    def of_pairs(self, pairs: Pairs, rows: Tensor, side: Literal["input", "output"]) -> Tensor:
        """Return rows of this side by pair."""
        return pairs.pick(rows) if self.per_token == side else rows

    def _of_tokens(self, pairs: Pairs, rows: Tensor, side: Literal["input", "output"]) -> Tensor:
        return pairs.combine(rows) if self.per_token == side else rows


class ExpertProduct(torch.autograd.Function):
    """out_e = a_e w_e^T for the pairs of every expert e, with w [E, p, k] stored cut over z.

        Expand     a [m, k], out [P, sum p] {sum s}       E1   out = pick(a)_e w_e^T         w gathered over z
        Contract   a [P, k], out [m, p] {sum s}           E2   da  = dout_e w_e              w gathered over z again
                                                          E3   dw_e = dout_e^T a_e           reduce-scattered over z

    Picking the rows of pairs and adding pairs up to tokens are each other's backward. For backward it keeps `kept`, the
    tensor that `a` was gathered from, and `reread` gathers `a` again, behind E2.
    """

    @staticmethod
    def forward(
        ctx: Any, factor: ExpertFactor, pairs: Pairs, reread: Body, a: Tensor, kept: Tensor, *_: nn.Parameter
    ) -> Tensor:
        ctx.factor, ctx.reread, ctx.turns = factor, reread, factor.group.engine.turn.of
        ctx.during = factor.group.use()
        with factor.group.using(turns=ctx.turns, keep=factor.keep_weights) as weights, factor.multiplying("E1"):
            pairs.save(ctx, kept, *(weights if factor.keep_weights else ()))
            return factor.multiply(pairs, a, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        factor: ExpertFactor = ctx.factor
        group, engine = factor.group, factor.group.engine
        pairs, (kept, *weights) = Pairs.saved(ctx)
        trained = any(member.parameter.requires_grad for member in group.members)
        # launched before E2, so that the input is gathered behind those products
        reading = ctx.reread(kept) if trained and engine.policy.wgrad_behind_messages else None
        dout, da = factor.of_pairs(pairs, dout, "output"), None
        if ctx.needs_input_grad[3]:
            if weights:
                with factor.multiplying("E2"):
                    da = factor.multiply_back(pairs, dout, weights)
            else:
                with group.using(turns=ctx.turns) as gathered, factor.multiplying("E2"):
                    da = factor.multiply_back(pairs, dout, gathered)
        if trained:
            group.gradients.expect_end()
            engine.wgrad_queue.add(
                lambda: factor.add_gradients(pairs, dout, reading or ctx.reread(kept), ctx.turns, ctx.during)
            )
        return (None, None, None, da, *[None] * (len(ctx.needs_input_grad) - 4))


def multiply_experts(
    layer: Layer,
    names: tuple[str, ...],
    a: Tensor,
    pairs: Pairs,
    per_token: Literal["input", "output"],
    again: tuple[Tensor, Body] | None = None,
) -> Tensor:
    """Run the product of a layer's weights; `again` says from what and how backward gathers the input again."""
    factor = ExpertFactor(layer.group(*names), keeps_weights(layer, layer.member(names[0])), per_token)
    kept, reread = (a, identity) if again is None else again
    return ExpertProduct.apply(factor, pairs, reread, a, kept.detach(), *(getattr(layer, name) for name in names))


@dataclass(frozen=True, slots=True)
class Routed:
    """What the experts of a mixture read, on its way to the place: the stream, and the choice of its tokens."""

    a: Tensor
    site: OpContext
    sequences: Sequences | None
    term: BalanceTerm | None
    entering: AsyncResult | Ready
    choosing: AsyncResult | Ready


class Sent(NamedTuple):
    """Tokens on their way to experts on a fold."""

    dispatch: Dispatch
    land: Callable[[], ArrivedTokens]
    """Waits for the tokens that arrive."""


class Returning(NamedTuple):
    """What experts on a fold have computed, before it goes back to the tokens."""

    dispatch: Dispatch
    rows: Tensor
    """Their outputs by token, [R, k/y] {sum ex}."""
    shared: Tensor | None
    """The output of the MLP beside them, before it leaves."""


class Leaving(NamedTuple):
    """Outputs of experts on their way back to the tokens."""

    dispatch: Dispatch
    rows: AsyncResult | Ready
    shared: AsyncResult | Ready | None

    @property
    def waits(self) -> Wait | None:
        """What reading the outputs waits for."""
        return self.dispatch.waits

    def wait(self) -> Tensor:
        out = all_rows(self.dispatch.site, self.dispatch.combine(self.rows.wait()))
        return out if self.shared is None else out + self.shared.wait()


class GatedExperts(Layer):
    """The weights of gated experts and their products, without a router."""

    width: int
    """The hidden units of an expert on this rank, before they are cut over y."""
    columns: int
    """The features of the stream on this rank."""

    def __init__(self, grid: Grid, policy: Policy) -> None:
        super().__init__(grid, policy)
        self.folded = grid.shape.folded
        """Whether tokens are sent to their experts."""
        self.across = "ex" if self.folded else "x"
        """The axis that cuts hidden units."""

    def declare_experts(self, experts: int, features: int, hidden: int, init: Init, out_init: Init) -> None:
        """Declare the weights gate, up and down."""
        self.width, self.columns = hidden // self.grid.size(self.across), features // self.grid.size("y")
        expands, contracts = (EXPANDS_ON_FOLD, CONTRACTS_ON_FOLD) if self.folded else (EXPANDS, CONTRACTS)
        product = PRODUCT_ON_FOLD if self.folded else PRODUCT
        for name in ("gate", "up"):
            self.declare(name, Spec((experts, hidden, features), expands, product, init))
        self.declare("down", Spec((experts, features, hidden), contracts, product, out_init))

    def compute_experts(
        self, a: Tensor, scores: Tensor, pairs: Pairs, site: OpContext, again: tuple[Tensor, Body] | None = None
    ) -> Turns[Tensor]:
        """Return the sums over the experts of each token, from tokens [m, k/y] and their scores [m, K].

        `again` says from what and how backward gathers the tokens again.
        """
        out = multiply_experts(self, ("gate", "up"), a, pairs, "input", again)
        hidden, again = yield from self._hidden(out, pairs.sort(scores), site)
        return multiply_experts(self, ("down",), hidden, pairs, "output", again)

    @property
    def not_recordable(self) -> str:
        """Why a CUDA graph cannot contain the layer; empty if it can."""
        if kernels.multiplies_at_once(self.group("gate", "up").compute_dtype, self.width, self.columns):
            return ""
        return (
            "the host must know how many tokens go to each expert, unless one kernel multiplies all of them: it needs "
            f"bf16 or fp16, and features ({self.columns}) and hidden units ({self.width}) of a rank in multiples of 8"
        )

    def rereads(self, site: OpContext, *, travels: bool) -> bool:
        """Return whether backward gathers an input again, of which it keeps the part that this rank holds at rest."""
        return travels and site.sharded and not self.policy.keep_gathered

    def _hidden(self, out: Tensor, p: Tensor, site: OpContext) -> Turns[tuple[Tensor, tuple[Tensor, Body] | None]]:
        """Return h = silu(gate) up p of each pair, whole over y, and how backward makes it whole again."""
        spreading = spread(out, site, [self.width, self.width])
        yield  # even if nothing is in flight: the messages of the other half need a product to hide behind
        hidden = kernels.region(kernels.swiglu, out, compiled=self.policy.compile)(spreading.wait())
        hidden = hidden * p.to(hidden.dtype)
        collecting = collect(hidden, site, self.width)
        if collecting.travels:
            yield
        again = (hidden, partial(site.gather_features, widths=[self.width]))
        return collecting.wait(), again if self.rereads(site, travels=collecting.travels) else None


class MoE(GatedExperts):
    """A mixture of gated experts, and optionally an MLP beside them that all tokens go through.

    Pairs beyond the capacity of an expert are dropped only if it is told which tokens make a sequence, and the router's
    own losses count only then.
    """

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        features: int,
        hidden: int,
        routing: Routing,
        *,
        shared_hidden: int = 0,
        init: Init,
        out_init: Init,
    ) -> None:
        """`hidden` are the hidden units of an expert, `shared_hidden` those of the MLP beside; 0 for none."""
        super().__init__(grid, policy)
        self.features, self.hidden, self.routing = features, hidden, routing
        if self.folded and policy.pad_experts and not routing.capacity:
            raise ValueError(
                "pad_experts=True (policy.pad_experts of a run) sends as many rows as the capacity of experts allows, "
                "and capacity=0 has no limit; give the model a capacity, or use pad_experts=False"
            )
        require_divisible(self, "features", features, ("y",))
        cuts = (self.across, "y") if policy.activations == "sharded" else (self.across,)
        require_divisible(self, "hidden", hidden, cuts)
        self.router = Router(grid, policy, features, routing, init=init)
        self.declare_experts(routing.experts, features, hidden, init, out_init)
        self.shared = None
        if shared_hidden:
            both: Any = dict(kind="swiglu", bias=False, init=init, out_init=out_init)
            self.shared = MLP(grid, policy, features, shared_hidden, **both)

    def forward(
        self, a: Tensor, tokens: int, sequences: Sequences | None = None, before: Tensor | None = None
    ) -> Tensor:
        """Return the output at rest; with `before` the router and the experts read that in place of `a`."""
        routed = self.engine.alone(self.route(a if before is None else before, tokens, sequences))
        return self.leave(self.engine.alone(self.turns(a, tokens, routed)), tokens).wait()

    def leave(self, out: Tensor | Returning, tokens: int) -> AsyncResult | Ready | Leaving:
        """Bring the result of `turns` to rest."""
        site = self.site(tokens)
        if isinstance(out, Tensor):
            return leave(out, site)
        beside = None if out.shared is None or self.shared is None else self.shared.down.leave(out.shared, tokens)
        return Leaving(out.dispatch, out.dispatch.returning(out.rows), beside)

    def route(self, a: Tensor, tokens: int, sequences: Sequences | None = None) -> Turns[Routed | Sent]:
        """Choose the experts of the tokens at rest, and launch what brings both together."""
        self.refuse_hooks(self.router)
        site, term = self.site(tokens), None
        if a.shape[0] != site.rows_at_rest:
            raise wrong_rows(a, site)
        if sequences is not None and sequences.weight is not None:
            term = BalanceTerm(self.routing, sequences, sequences.weight, site)
        scores, ids = self.router(a, site, term)
        if self.folded:
            return (yield from self._send(a, scores, ids, site, sequences, term))
        return Routed(a, site, sequences, term, enter(a, site), enter_choice(scores, ids, site))

    def _send(
        self,
        a: Tensor,
        scores: Tensor,
        ids: Tensor,
        site: OpContext,
        sequences: Sequences | None,
        term: BalanceTerm | None,
    ) -> Turns[Sent]:
        """Send the tokens of this rank to their experts on a fold; those that no expert takes stay."""
        every = ids
        if site.sharded and site.x > 1:
            gathering = site.gather_tokens(ids.int())
            yield
            every = self._known(gathering.wait().long())
        taken = yield from self._count(every, site, sequences, term)
        if site.sharded and site.y > 1:  # every rank along y multiplies its own hidden units by p
            scores = Conjugate.apply(scores, torch.clone, lambda owed: site.sum_y(owed.contiguous()).wait())
        a, scores = own_rows(site, a), own_rows(site, scores)
        experts, limit = self.routing.experts, 0
        if stays(self.grid):  # products of pairs that no expert takes are computed, and count with 0
            chosen = rows_here(site, every, 0)
            scores = scores if taken is None else scores * rows_here(site, taken, filling=0)
        else:
            every = every if taken is None else every.masked_fill(~taken, experts)
            if sequences is not None and sequences.real is not None:
                every = every.masked_fill(~sequences.real[:, None], experts)
            chosen = rows_here(site, every, experts)
            if self.policy.pad_experts and sequences is not None and sequences.limited:
                limit = most_of_an_expert(self.routing, sequences, site)
        dispatch = Dispatch(self.routing, site, limit)
        return Sent(dispatch, (yield from dispatch.turns(a, scores, chosen)))

    def turns(self, a: Tensor, tokens: int, routed: Routed | Sent) -> Turns[Tensor | Returning]:
        """Compute everything up to `leave`; the MLP beside the experts reads a.

        The result is [m/(zx), k/y] -> [m/z, k/y] {sum x}, or what experts on a fold return.
        """
        self.refuse_hooks(self.shared)
        if isinstance(routed, Sent):
            return (yield from self._of_fold(a, tokens, routed))
        site, entering = routed.site, routed.entering
        if entering.travels:
            yield
        whole = entering.wait()
        scores, ids = routed.choosing.wait().split(self.routing.chosen, dim=1)
        ids = self._known(ids.detach().long())
        taken = yield from self._count(ids, site, routed.sequences, routed.term)
        scores = scores if taken is None else scores * taken
        pairs = Pairs(ids, self.routing.experts)
        again = (routed.a, site.gather_tokens) if self.rereads(site, travels=entering.travels) else None
        out = yield from self.compute_experts(whole, scores, pairs, site, again)
        return out if self.shared is None else out + (yield from self.shared.turns(a, tokens))

    def _of_fold(self, a: Tensor, tokens: int, sent: Sent) -> Turns[Returning]:
        """Compute the experts of the tokens that arrive; the MLP beside them runs while these travel."""
        shared = None if self.shared is None else (yield from self.shared.turns(a, tokens))
        yield sent.dispatch.waits
        arrived = sent.land()
        out = yield from self.compute_experts(arrived.a, arrived.p, arrived.pairs, sent.dispatch.site)
        return Returning(sent.dispatch, out, shared)

    def _known(self, ids: Tensor) -> Tensor:
        """Return ids of experts that have arrived; nothing arrives on a muted grid, so there they become any."""
        return ids.remainder(self.routing.experts) if self.grid.muted else ids

    @property
    def not_recordable(self) -> str:
        if not self.folded or self.policy.pad_experts or stays(self.grid):
            return super().not_recordable
        return (
            "the host must know how many tokens go to each expert; policy.pad_experts=True sends as many rows as the "
            "capacity of a model allows, without counts"
        )

    def _count(
        self, ids: Tensor, site: OpContext, sequences: Sequences | None, term: BalanceTerm | None
    ) -> Turns[Tensor | None]:
        """Count the choices [m, K] of the place's tokens; return which pairs their experts take, or None for all."""
        taken, before = None, None
        limited = self.routing.capacity > 0 and sequences is not None and sequences.limited
        if sequences is not None:
            balances = term is not None and self.routing.aux > 0
            if balances or (limited and sequences.shared is not None):
                counts = SequenceCounts(sequences, ids, self.routing.experts, site)
                if counts.travels:
                    yield
                choices, before = counts.wait(), counts.before
                if term is not None:
                    term.choices = choices
            if limited:
                taken = within_capacity(self.routing, sequences, ids, before)
        self.router.count(ids, taken, None if sequences is None else sequences.real)
        return taken

"""A mixture of experts in place of an MLP, whose products are the 3D product, expert by expert.

Every token chooses K of E experts. Tokens stay where they are, and the weights of the experts travel over z like all
weights. A pair is a token with one of its experts; pairs are sorted by expert. In the notation of `operators`, with m
tokens of a place, P = m K pairs, k features of the stream and n hidden units of an expert:

    at rest   p and ids of the K experts of each token (`router`)                             E17
    enter     a and (p, ids) of all tokens of the place
    expand    u_e = a_e w_e^T, [P, n/x] {sum y}, for gate and up -> spread                    E18
    inner     h = silu(gate) * up * p
    contract  o_e = h_e w_e^T, [P, k/y] {sum x} -> out[t] = sum_j o[t, j] in the order of j   E19 -> leave

Invariant: which experts a token chooses, and every sum, depends on the model and the tokens alone, not on the grid. No
shape depends on the choice, so nothing is read by the host on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fourfold import kernels
from fourfold.comm import Pending
from fourfold.engine import Turns
from fourfold.gradients import ForwardPass
from fourfold.grid import Grid
from fourfold.layout import PRODUCT, Init, Layout, Spec
from fourfold.nn.layer import Layer, add_gradients
from fourfold.nn.linear import MLP, keeps_weights, require_divisible
from fourfold.nn.router import (
    BalanceTerm,
    Router,
    Routing,
    SequenceCounts,
    Sequences,
    enter_choice,
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


class Pairs:
    """Tokens with one of their experts each, sorted by expert and then by token."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        """`ids` [tokens, K] are the experts of each token."""
        tokens, self.chosen = ids.shape
        flat = ids.flatten()
        self.order = flat.argsort(stable=True)
        """The place of each pair among the pairs by token, [P]."""
        self.back = torch.empty_like(self.order)
        self.back[self.order] = torch.arange(tokens * self.chosen, device=ids.device)
        self.tokens = self.order // self.chosen
        """The token of each pair."""
        limits = torch.arange(1, experts + 1, device=ids.device)
        self.ends = torch.searchsorted(flat[self.order], limits).to(torch.int32)
        """Where the pairs of each expert end, [E]."""

    def pick(self, a: Tensor) -> Tensor:
        """Return the rows of the pairs, [m, w] -> [P, w]."""
        return a.index_select(0, self.tokens)

    def combine(self, of_pairs: Tensor) -> Tensor:
        """Return the sum over each token's pairs in the order of its choices, [P, w] -> [m, w] (E19)."""
        rows = of_pairs.index_select(0, self.back).view(-1, self.chosen, of_pairs.shape[1])
        total = rows[:, 0].clone()
        for choice in range(1, self.chosen):
            total += rows[:, choice]
        return total

    def sort(self, by_token: Tensor) -> Tensor:
        """Return values of pairs by token, [m, K], in the order of the pairs, [P, 1]."""
        return Conjugate.apply(
            by_token,
            lambda values: values.flatten()[self.order][:, None],
            lambda gradient: gradient.flatten()[self.back].view(-1, self.chosen),
        )


@dataclass(frozen=True, slots=True)
class ExpertFactor:
    """The weights of all experts that read the same rows, for the pairs of one half of a batch."""

    group: ParamGroup
    pairs: Pairs
    per_token: Literal["input", "output"]
    """Which side has tokens: Expand picks the rows of its pairs, Contract adds pairs up to tokens."""
    keep_weights: bool

    def multiplying(self, equation: str) -> AbstractContextManager[object]:
        return self.group.grid.ledger.multiplying(f"{equation} {self.group.label}")

    def multiply(self, a: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return E1: the outputs of all weights side by side."""
        first = self.pairs.pick(a) if self.per_token == "input" else a
        outs = [kernels.grouped(first, w.transpose(1, 2), self.pairs.ends) for w in weights]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return self.pairs.combine(out) if self.per_token == "output" else out

    def multiply_back(self, dout: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return E2, the gradient of the input."""
        parts = self._of_pairs(dout).split([w.shape[1] for w in weights], dim=1)
        da = kernels.grouped(parts[0].contiguous(), weights[0], self.pairs.ends)
        for part, w in zip(parts[1:], weights[1:], strict=True):
            da += kernels.grouped(part.contiguous(), w, self.pairs.ends)
        return self.pairs.combine(da) if self.per_token == "input" else da

    def add_gradients(self, dout: Tensor, a: Pending[Tensor], turns: int, during: ForwardPass) -> None:
        """Add E3 of one of `turns` halves."""
        whole = a.wait()
        first = self.pairs.pick(whole) if self.per_token == "input" else whole
        width = dout.shape[1] // len(self.group.members)
        parts, found = self._of_pairs(dout).split(width, dim=1), []
        for member, part in zip(self.group.members, parts, strict=True):
            if member.parameter.requires_grad:
                with self.multiplying("E3"):
                    found.append(kernels.grouped_weights(part.contiguous(), first, self.pairs.ends))
            else:
                found.append(None)
        add_gradients(self.group, found, turns, during)

    def _of_pairs(self, dout: Tensor) -> Tensor:
        return self.pairs.pick(dout) if self.per_token == "output" else dout


class ExpertProduct(torch.autograd.Function):
    """out_e = a_e w_e^T for the pairs of every expert e, with w [E, p, k] stored cut over z.

        Expand     a [m, k], out [P, sum p] {sum s}       E1   out = pick(a)_e w_e^T         w gathered over z
        Contract   a [P, k], out [m, p] {sum s}           E2   da  = dout_e w_e              w gathered over z again
                                                          E3   dw_e = dout_e^T a_e           reduce-scattered over z

    Picking the rows of pairs and adding pairs up to tokens are each other's backward. For backward it keeps `kept`, the
    tensor that `a` was gathered from, and `reread` gathers `a` again, behind E2.
    """

    @staticmethod
    def forward(ctx: Any, factor: ExpertFactor, reread: Body, a: Tensor, kept: Tensor, *_: nn.Parameter) -> Tensor:
        ctx.factor, ctx.reread, ctx.turns = factor, reread, factor.group.engine.turn.of
        ctx.during = factor.group.use()
        with factor.group.using(turns=ctx.turns, keep=factor.keep_weights) as weights, factor.multiplying("E1"):
            ctx.save_for_backward(kept, *(weights if factor.keep_weights else ()))
            return factor.multiply(a, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        factor: ExpertFactor = ctx.factor
        group, engine = factor.group, factor.group.engine
        kept, *weights = ctx.saved_tensors
        trained = any(member.parameter.requires_grad for member in group.members)
        # launched before E2, so that the input is gathered behind those products
        reading = ctx.reread(kept) if trained and engine.policy.wgrad_behind_messages else None
        da = None
        if ctx.needs_input_grad[2]:
            if weights:
                with factor.multiplying("E2"):
                    da = factor.multiply_back(dout, weights)
            else:
                with group.using(turns=ctx.turns) as gathered, factor.multiplying("E2"):
                    da = factor.multiply_back(dout, gathered)
        if trained:
            group.gradients.expect_end()
            engine.wgrad_queue.add(
                lambda: factor.add_gradients(dout, reading or ctx.reread(kept), ctx.turns, ctx.during)
            )
        return (None, None, da, *[None] * (len(ctx.needs_input_grad) - 3))


@dataclass(frozen=True, slots=True)
class Routed:
    """What the experts of a mixture read, on its way to the place: the stream, and the choice of its tokens."""

    a: Tensor
    site: OpContext
    sequences: Sequences | None
    term: BalanceTerm | None
    entering: AsyncResult | Ready
    choosing: AsyncResult | Ready


class MoE(Layer):
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
        require_divisible(self, "features", features, ("y",))
        require_divisible(self, "hidden", hidden, ("x", "y") if policy.activations == "sharded" else ("x",))
        self.router = Router(grid, policy, features, routing, init=init)
        for name, spec in (
            ("gate", Spec((routing.experts, hidden, features), EXPANDS, PRODUCT, init)),
            ("up", Spec((routing.experts, hidden, features), EXPANDS, PRODUCT, init)),
            ("down", Spec((routing.experts, features, hidden), CONTRACTS, PRODUCT, out_init)),
        ):
            self.declare(name, spec)
        self.shared = None
        if shared_hidden:
            both: Any = dict(kind="swiglu", bias=False, init=init, out_init=out_init)
            self.shared = MLP(grid, policy, features, shared_hidden, **both)

    def forward(
        self, a: Tensor, tokens: int, sequences: Sequences | None = None, before: Tensor | None = None
    ) -> Tensor:
        """Return the output at rest; with `before` the router and the experts read that in place of `a`."""
        routed = self.route(a if before is None else before, tokens, sequences)
        return self.leave(self.engine.alone(self.turns(a, tokens, routed)), tokens).wait()

    def leave(self, out: Tensor, tokens: int) -> AsyncResult | Ready:
        """Bring the result of `turns` to rest."""
        return leave(out, self.site(tokens))

    def route(self, a: Tensor, tokens: int, sequences: Sequences | None = None) -> Routed:
        """Choose the experts of the tokens at rest, and launch what brings both to the place."""
        self.refuse_hooks(self.router)
        site, term = self.site(tokens), None
        if a.shape[0] != site.rows_at_rest:
            raise wrong_rows(a, site)
        if sequences is not None and sequences.weight is not None:
            term = BalanceTerm(self.routing, sequences, sequences.weight, site)
        scores, ids = self.router(a, site, term)
        return Routed(a, site, sequences, term, enter(a, site), enter_choice(scores, ids, site))

    def turns(self, a: Tensor, tokens: int, routed: Routed) -> Turns[Tensor]:
        """Compute everything up to `leave`, [m/(zx), k/y] -> [m/z, k/y] {sum x}; the MLP beside the experts reads a."""
        self.refuse_hooks(self.shared)
        site, entering = routed.site, routed.entering
        if entering.travels:
            yield
        whole = entering.wait()
        scores, ids = routed.choosing.wait().split(self.routing.chosen, dim=1)
        ids = ids.detach().long()
        taken = yield from self._count(routed, ids)
        scores = scores if taken is None else scores * taken
        pairs = Pairs(ids, self.routing.experts)
        rereads = entering.travels and site.sharded and not self.policy.keep_gathered
        out = self._product("input", pairs, ("gate", "up"), whole, (routed.a, site.gather_tokens) if rereads else None)
        width = self.hidden // site.x
        spreading = spread(out, site, [width, width])
        yield  # even if nothing is in flight: the messages of the other half need a product to hide behind
        hidden = kernels.region(kernels.swiglu, a, compiled=self.policy.compile)(spreading.wait())
        hidden = hidden * pairs.sort(scores).to(hidden.dtype)
        collecting = collect(hidden, site, width)
        if collecting.travels:
            yield
        rereads = collecting.travels and site.sharded and not self.policy.keep_gathered
        again = (hidden, partial(site.gather_features, widths=[width])) if rereads else None
        found = self._product("output", pairs, ("down",), collecting.wait(), again)
        return found if self.shared is None else found + (yield from self.shared.turns(a, tokens))

    def _count(self, routed: Routed, ids: Tensor) -> Turns[Tensor | None]:
        """Count the choices [m, K] of the place's tokens; return which pairs their experts take, or None for all."""
        sequences, taken, before = routed.sequences, None, None
        limited = self.routing.capacity > 0 and sequences is not None and sequences.limited
        if sequences is not None:
            balances = routed.term is not None and self.routing.aux > 0
            if balances or (limited and sequences.shared is not None):
                counts = SequenceCounts(sequences, ids, self.routing.experts, routed.site)
                if counts.travels:
                    yield
                choices, before = counts.wait(), counts.before
                if routed.term is not None:
                    routed.term.choices = choices
            if limited:
                taken = within_capacity(self.routing, sequences, ids, before)
        self.router.count(ids, taken, None if sequences is None else sequences.real)
        return taken

    def _product(
        self,
        per_token: Literal["input", "output"],
        pairs: Pairs,
        names: tuple[str, ...],
        a: Tensor,
        again: tuple[Tensor, Body] | None,
    ) -> Tensor:
        """Run the product of these weights; `again` says from what and how backward gathers the input again."""
        keep = keeps_weights(self, self.member(names[0]))
        factor = ExpertFactor(self.group(*names), pairs, per_token, keep)
        kept, reread = (a, identity) if again is None else again
        return ExpertProduct.apply(factor, reread, a, kept.detach(), *(getattr(self, name) for name in names))

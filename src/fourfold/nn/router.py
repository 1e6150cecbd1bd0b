"""The router of a mixture of experts: which experts each token chooses, with which scores, and the losses of this.

In the notation of `operators`, with m tokens of a place, k features of the stream, E experts, K choices of a token:

    at rest   l = a w_r^T {sum y}, [m/(zx), E], in fp32 at least                              E17
              s = softmax(l) or sigmoid(l); the K largest, ties to the lower id; p = s of these, which may sum to 1
    enter     (p, ids) of all tokens of the place

Invariant: which experts a token chooses depends on the model and the token alone, not on the grid.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fourfold.comm import Pending
from fourfold.grid import Grid
from fourfold.layout import POSITIONS, Init, Spec, rest
from fourfold.nn.layer import Layer
from fourfold.nn.linear import keeps_weights
from fourfold.operators import AsyncResult, Conjugate, OpContext, Ready, once_differentiable
from fourfold.param_group import ParamGroup
from fourfold.policy import Policy
from fourfold.product import Factor, Product

Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose their experts."""

    experts: int
    chosen: int
    """How many experts a token chooses."""
    score: Score = "softmax"
    normalized: bool = True
    """Whether the scores of the chosen experts are divided by their sum."""
    aux: float = 0.0
    """How much it counts that the experts of a sequence are used unequally (E20)."""
    z_loss: float = 0.0
    """How much large logits count (E20)."""

    @property
    def balances(self) -> bool:
        """Whether the router has losses of its own."""
        return self.aux > 0 or self.z_loss > 0

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and the ids of the chosen experts, [tokens, K] each, the largest score first."""
        scores = logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()
        ids = scores.detach().argsort(dim=-1, descending=True, stable=True)[:, : self.chosen]  # ties to the lower id
        found = scores.gather(1, ids)
        return (found / found.sum(dim=-1, keepdim=True) if self.normalized else found), ids


class LossWeight:
    """How much the losses of a batch's routers count beside the model's own loss."""

    def __init__(self, tokens: Tensor | float) -> None:
        """`tokens` is the number of tokens of the whole batch."""
        self.tokens = tokens
        self.gradient: Tensor | float = 1.0
        """The gradient of the model's own loss, which a caller may have scaled."""

    def follow(self, loss: Tensor) -> None:
        """Take the gradient of this loss when backward begins."""

        def keep(gradient: Tensor) -> None:
            self.gradient = gradient

        loss.register_hook(keep)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Which of the tokens of a place belong together, and how much their balance counts."""

    of_tokens: Tensor
    """The number of each token's sequence, [m]: its document, or its row."""
    most: int
    """A number of sequences that there are at most."""
    weight: LossWeight


class BalanceTerm:
    """The gradient of the logits of one half by the two losses of a router, which backward adds.

    E20   aux   alpha E sum_s (T_s/T) sum_e f_se P_se, where f_se is the share of the choices of sequence s that fell on
                expert e, and P_se the mean of the scores of e, each as a share of its token's scores
          z     beta/T sum_t (log sum_e exp l_te)^2

    Both are means over the T tokens of the whole batch, as the model's own loss is. f has no gradient.
    """

    def __init__(self, routing: Routing, sequences: Sequences, site: OpContext) -> None:
        self.routing, self.sequences, self.site = routing, sequences, site
        self.counts: Tensor | None = None

    def count(self, ids: Tensor) -> None:
        """Count the choices [m, K] of all tokens of the place, by sequence and expert."""
        experts = self.routing.experts
        flat = (self.sequences.of_tokens[:, None] * experts + ids).flatten()
        counts = torch.zeros(self.sequences.most * experts, dtype=torch.long, device=ids.device)
        self.counts = counts.index_add_(0, flat, torch.ones_like(flat)).view(-1, experts)

    def gradient(self, logits: Tensor) -> Tensor:
        """Return the gradient of the logits of the tokens that this rank has at rest."""
        routing, weight, site = self.routing, self.sequences.weight, self.site
        first = site.grid.coords["x"] * site.rows_at_rest if site.sharded else 0
        tokens = torch.arange(first, first + len(logits), device=logits.device)
        own = self.sequences.of_tokens[tokens.clamp(max=site.tokens - 1)]
        if self.counts is None:
            raise RuntimeError(f"{site.label}: backward of a router whose choices were not counted")
        shares = self.counts[own].to(logits.dtype)
        shares = routing.aux * routing.experts * shares / shares.sum(dim=1, keepdim=True)
        scores = logits.softmax(dim=1)
        if routing.score == "softmax":
            found = scores * (shares - (shares * scores).sum(dim=1, keepdim=True))
        else:
            each = logits.sigmoid()
            whole = each.sum(dim=1, keepdim=True)
            found = (shares - (shares * each).sum(dim=1, keepdim=True) / whole) / whole * each * (1 - each)
        found += 2 * routing.z_loss * logits.logsumexp(dim=1, keepdim=True) * scores
        # rows that only fill up the last rank on x are no tokens; gradients are averaged over places
        return found * (tokens < site.tokens)[:, None] * (site.grid.shape.places * weight.gradient / weight.tokens)


class Balanced(torch.autograd.Function):
    """The logits themselves; backward adds the gradient of the router's own losses."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, term: BalanceTerm) -> Tensor:
        ctx.term = term
        ctx.save_for_backward(logits)
        return logits.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (logits,) = ctx.saved_tensors
        return gradient + ctx.term.gradient(logits), None


class Router(Layer):
    """The scores of tokens at rest for all experts, and their choice, in fp32 at least.

    w_r [E, k/y] is stored cut over z:

        a [m/(zx), k/y] -> a w_r^T -> [m/(zx), E] {sum y} -> all-reduce over y -> p, ids [m/(zx), K]
    """

    def __init__(self, grid: Grid, policy: Policy, features: int, routing: Routing, *, init: Init) -> None:
        super().__init__(grid, policy)
        self.routing = routing
        self.declare("weight", Spec((routing.experts, features), POSITIONS, rest(policy.activations), init))

    def forward(self, a: Tensor, site: OpContext, term: BalanceTerm | None = None) -> tuple[Tensor, Tensor]:
        """Return the scores and ids of the experts of this rank's tokens, [m/(zx), K] each."""
        factor = self._factor()
        logits = Product.apply(factor, None, a.to(factor.group.compute_dtype), None, *factor.parameters)
        if site.y > 1:  # all ranks along y go on with the same logits, so each has their whole gradient
            logits = Conjugate.apply(logits, lambda owed: site.sum_y(owed).wait(), torch.clone)
        if term is not None:
            logits = Balanced.apply(logits, term)
        return self.routing.choose(logits)

    def _factor(self) -> Factor:
        """Return the weight as the factor of a product; it is kept."""
        known = self._factors.get(())
        if known is None or known.group.gradients is not self.gradients or not known.group.is_current():
            member = self.member("weight")
            narrow = self.policy.compute_dtype or member.parameter.dtype
            policy = replace(self.policy, compute_dtype=torch.promote_types(narrow, torch.float32))
            group = ParamGroup(self.grid, policy, self.gradients, self.label, (member,))
            keep = keeps_weights(self, member)
            known = self._factors[()] = Factor(group, (self.routing.experts,), (), adds=False, keep_weights=keep)
        return known


def enter_choice(scores: Tensor, ids: Tensor, site: OpContext) -> AsyncResult | Ready:
    """p and ids of this rank's tokens, [m/(zx), K] each -> those of all tokens of the place side by side, [m, 2K].

    Every rank of the place multiplies its own hidden units by p, so backward sums the gradient of p over the axes that
    cut these: over x as `enter` does, and over y if activations are sharded.
    """
    chosen, over_y = scores.shape[1], site.sharded and site.y > 1

    def there(scores: Tensor) -> Pending[Tensor]:
        both = torch.cat([scores, ids.to(scores.dtype)], dim=1)
        return site.gather_tokens(both) if site.sharded and site.x > 1 else Pending(lambda: both)

    def back(gradient: Tensor) -> Pending[Tensor]:
        owed = gradient[:, :chosen].contiguous()
        owed = site.sum_y(owed).wait() if over_y else owed
        if site.x == 1:
            return Pending(lambda: owed)
        return site.scatter_tokens(owed) if site.sharded else site.sum_x(owed)

    if site.x == 1 and not over_y:
        return Ready(there(scores).wait())
    return site.launch(scores, there, back)

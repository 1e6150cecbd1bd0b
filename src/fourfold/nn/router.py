"""The router of a mixture of experts: which experts tokens choose, with which scores, and what balances their use.

In the notation of `operators`, with m tokens of a place, k features of the stream, E experts, K choices of a token:

    at rest   l = a w_r^T {sum y}, [m/(zx), E], in fp32 at least                              E17
              s = softmax(l) or sigmoid(l); the K largest of s + b, ties to the lower id
              p = s of these, which may be divided by their sum, times the route scale
    enter     (p, ids) of all tokens of the place

Three things balance the experts. Losses of the router have gradients of their own (`BalanceTerm`, E20). A bias b [E]
counts for the choice alone and moves once a step, without a gradient:

    E21   b_e += rate sign(sum_e c_e / E - c_e), where c_e is how often the tokens of the step chose e

With a capacity, expert e takes the first ceil(capacity T K / E) of its pairs in each sequence of T tokens
(`within_capacity`). A pair is a token with one of its experts; p of a pair that is dropped is 0.

Invariant: which experts a token chooses, and which of them take it, depends on the model and the sequence alone, not on
the grid. c, and whatever else is counted, are whole numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, comb
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fourfold import comm
from fourfold.axes import CONTEXT
from fourfold.comm import Pending
from fourfold.context.assign import Assignment
from fourfold.grid import Grid
from fourfold.layout import POSITIONS, Init, Spec, rest
from fourfold.nn.layer import Layer
from fourfold.nn.linear import keeps_weights
from fourfold.operators import AsyncResult, Conjugate, OpContext, Ready, once_differentiable
from fourfold.param_group import ParamGroup
from fourfold.policy import Policy
from fourfold.product import Factor, Product
from fourfold.tiles import indices, to_device

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
    scale: float = 1.0
    """What these scores are multiplied by."""
    groups: int = 1
    """Into how many groups of neighbours the experts are divided."""
    top_groups: int = 1
    """From how many groups a token chooses its experts."""
    capacity: float = 0.0
    """How many pairs of a sequence an expert takes, as a multiple of its share if all were used equally; 0: all."""
    bias_rate: float = 0.0
    """How far the bias moves in a step (E21); 0: there is no bias."""
    aux: float = 0.0
    """How much it counts that the experts of a sequence are used unequally (E20)."""
    z_loss: float = 0.0
    """How much large logits count (E20)."""

    @property
    def balances(self) -> bool:
        """Whether the router has losses of its own."""
        return self.aux > 0 or self.z_loss > 0

    @property
    def counts_by_sequence(self) -> bool:
        """Whether it matters which tokens make a sequence, which then cannot be cut into halves."""
        return self.aux > 0 or self.capacity > 0

    def balanced(self, tokens: int, share: range) -> tuple[int, int]:
        """Return how many tokens choose some of these experts, and the pairs of both, if all experts are used equally.

        All choices are equally likely: those of G' of the G groups, and those of K experts in them.
        """
        pairs = tokens * self.chosen
        extra = pairs % self.experts
        own = len(share) * (pairs // self.experts) + max(0, min(share.stop, extra) - share.start)
        least = -(-own // max(1, min(self.chosen, len(share))))
        return min(max(round(tokens * _chance(self, share)), least), own, tokens), own

    def most(self, tokens: int, experts: int, limit: int) -> tuple[int, int]:
        """Return how many tokens can choose some of these experts, which take `limit` pairs each, and the pairs."""
        taken = experts * limit
        return min(tokens, taken), min(taken, tokens * min(self.chosen, experts))

    def choose(self, logits: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return p and the ids of the chosen experts, [tokens, K] each, the best first; ties go to the lower id."""
        scores = logits.softmax(dim=-1) if self.score == "softmax" else logits.sigmoid()
        ranked = scores.detach() if bias is None else scores.detach() + bias
        if self.top_groups < self.groups:
            ranked = self._in_best_groups(ranked)
        ids = _largest(ranked, self.chosen)
        found = scores.gather(1, ids)
        found = found / found.sum(dim=-1, keepdim=True) if self.normalized else found
        return (found if self.scale == 1 else found * self.scale), ids

    def _in_best_groups(self, ranked: Tensor) -> Tensor:
        """Return the scores with -inf outside of each token's best groups, by the sum of a group's two best scores."""
        by_group = ranked.unflatten(1, (self.groups, -1))
        best = _largest(by_group.topk(2, dim=-1).values.sum(dim=-1), self.top_groups)
        outside = torch.ones_like(by_group[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
        return by_group.masked_fill(outside[:, :, None], float("-inf")).flatten(1)


@lru_cache(maxsize=1024)
def _chance(routing: Routing, share: range) -> float:
    """Return the probability that a token chooses some of these experts, if all choices are equally likely.

    With o_g experts of the share in the group g, none is chosen with the probability

        sum_M C(G' E/G - sum_(g in M) o_g, K) / (C(G, G') C(G' E/G, K)),   M every choice of G' of the G groups
    """
    size, chosen = routing.experts // routing.groups, routing.top_groups
    ways = Counter({(0, 0): 1})  # by how many groups are chosen, and by how many experts of the share these have
    for group in range(routing.groups):
        here = len(range(max(share.start, group * size), min(share.stop, (group + 1) * size)))
        for (groups, held), many in list(ways.items()):
            if groups < chosen:
                ways[groups + 1, held + here] += many
    open_to = chosen * size
    missed = sum(
        many * comb(open_to - held, routing.chosen) for (groups, held), many in ways.items() if groups == chosen
    )
    return 1 - missed / (comb(routing.groups, chosen) * comb(open_to, routing.chosen))


def _largest(values: Tensor, number: int) -> Tensor:
    """Return where the largest values of each row stand, the largest first; of equal ones the first comes first."""
    return values.argsort(dim=-1, descending=True, stable=True)[:, :number]


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


class SharedSegments(NamedTuple):
    """The tables of `Assignment.segment_order` on a device."""

    order: Tensor
    own: Tensor
    first: Tensor
    end: Tensor


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: == of tensors is no bool
class Sequences:
    """Which of the tokens of a place make a sequence: a document of packed rows, or a row.

    The tokens of one sequence that a place holds next to each other are a segment: the whole sequence, unless places of
    a context group share it.
    """

    of_tokens: Tensor
    """The number of each token's segment, [m]."""
    lengths: Tensor
    """The number of tokens of each segment's whole sequence, [segments]; segments that are none may stand behind."""
    tokens: int
    """The number of tokens of all sequences, also of those that other members of a context group hold."""
    real: Tensor | None = None
    """Which tokens are some, [m]: others fill up the members of a context group. None if all are."""
    shared: SharedSegments | None = None
    """Where the segments stand among those of a context group; None if every sequence is whole."""
    limited: bool = True
    """Whether the capacity of experts counts."""
    each: int | None = None
    """The number of tokens of every sequence, if all are whole rows of one document."""
    weight: LossWeight | None = None
    """How much the losses of routers count; None if they do not."""

    @classmethod
    def of_rows(cls, rows: int, seq: int, device: torch.device) -> Sequences:
        """Return the sequences of rows that are one document each."""
        of_tokens = torch.arange(rows, device=device).repeat_interleave(seq, output_size=rows * seq)
        return cls(of_tokens, torch.full((rows,), seq, device=device), rows * seq, each=seq)

    @classmethod
    def of_documents(cls, positions: Tensor, most: int | None = None) -> Sequences:
        """Return the sequences of packed rows, which begin where positions are 0; there are at most `most`."""
        of_tokens = (positions.flatten() == 0).cumsum(0) - 1
        # without their number there may be as many as tokens: the host need not know it
        lengths = of_tokens.new_zeros(len(of_tokens) if most is None else most)
        return cls(of_tokens, lengths.index_add_(0, of_tokens, torch.ones_like(of_tokens)), len(of_tokens))

    @classmethod
    def of_member(cls, assignment: Assignment, member: int, tokens: int, device: torch.device) -> Sequences:
        """Return the sequences of a member of a context group, whose line has this many tokens, then others."""
        of_tokens, lengths, on_line, shared = _member_tables(assignment, member, device)
        real = None if sum(assignment.lengths) == tokens else on_line < tokens
        return cls(of_tokens, lengths, tokens, real, shared)


@lru_cache(maxsize=64)
def _member_tables(
    assignment: Assignment, member: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, SharedSegments]:
    """Return `of_tokens`, `lengths`, the places of tokens on the line, and `shared` of a member."""
    held, found = assignment.members[member], assignment.segment_order(member)

    def table(numbers: list[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), device)

    with torch.inference_mode(mode=False):  # kept for later batches, which may train
        missing = [0] * (found.most - len(held))
        own = (table([*places, *missing]) for places in (found.own, found.first, found.end))
        sizes = torch.tensor([segment.tokens for segment in held], device="cpu")
        of_tokens = to_device(torch.arange(len(held), device="cpu").repeat_interleave(sizes), device)
        lengths = [assignment.lengths[segment.document] for segment in held]
        on_line = indices(assignment.own(member), device)
        return of_tokens, table([*lengths, *missing]), on_line, SharedSegments(table(found.order), *own)


class SequenceCounts:
    """How often each expert was chosen in the sequences of a place, also by tokens of a context group's other members.

    The counts of segments are gathered over the group: whole numbers, [segments, E].
    """

    def __init__(self, sequences: Sequences, ids: Tensor, experts: int, site: OpContext) -> None:
        """`ids` [m, K] are the choices of all tokens of the place."""
        flat = (sequences.of_tokens[:, None] * experts + ids).flatten()
        own = torch.zeros(len(sequences.lengths) * experts, dtype=torch.long, device=ids.device)
        self._own = own.index_add_(0, flat, torch.ones_like(flat)).view(-1, experts)
        self._shared = sequences.shared
        self.travels = sequences.shared is not None
        self._pending = (
            comm.all_gather(self._own, site.grid, CONTEXT, label=f"choices {site.label}") if self.travels else None
        )
        self.before: Tensor | None = None
        """The choices before each segment in its sequence, [segments, E]; None if there are none before any."""

    def wait(self) -> Tensor:
        """Return the choices in the whole sequence of each segment, [segments, E]."""
        if self._pending is None or self._shared is None:
            return self._own
        sums = functional.pad(self._pending.wait()[self._shared.order].cumsum(0), (0, 0, 1, 0))
        first = sums[self._shared.first]
        self.before = sums[self._shared.own] - first
        return sums[self._shared.end] - first


def most_of_an_expert(routing: Routing, sequences: Sequences, site: OpContext) -> int:
    """Return how many pairs of an expert the tokens of one rank can have that it takes.

    Neighbouring tokens of a rank lie in few sequences, of each of which the expert takes `capacity T K / E` pairs.
    """
    if not sequences.each:
        raise ValueError(
            f"{site.label}: pad_experts=True sends as many rows as the capacity of experts allows, which is known for "
            "rows of one document each on grids without context; use pad_experts=False (policy.pad_experts of a run)"
        )
    rows = -(-site.tokens // site.x)  # also where x repeats tokens, of which each rank then sends a part
    begun = min(sequences.tokens // sequences.each, -(-(rows - 1) // sequences.each) + 1)
    limit = ceil(routing.capacity * sequences.each * routing.chosen / routing.experts)
    return min(rows, begun * limit)


def within_capacity(routing: Routing, sequences: Sequences, ids: Tensor, before: Tensor | None) -> Tensor:
    """Return which pairs their experts take, [m, K].

    In a sequence of T tokens an expert takes the first ceil(capacity T K / E) pairs in the order of tokens. `before`
    are the choices before each segment of it (`SequenceCounts`).
    """
    keys = (sequences.of_tokens[:, None] * routing.experts + ids).flatten()
    ordered, order = keys.sort(stable=True)  # by segment and expert, then by token
    places = torch.arange(len(keys), device=keys.device) - torch.searchsorted(ordered, ordered)
    number = torch.empty_like(places)
    number[order] = places
    number = number.view(ids.shape)
    if before is not None:
        number = number + before[sequences.of_tokens[:, None], ids]
    # in fp64, in this order: whoever computes it on the host finds the same whole number
    limits = (routing.capacity * sequences.lengths.double() * routing.chosen / routing.experts).ceil().long()
    return number < limits[sequences.of_tokens][:, None]


class BalanceTerm:
    """The gradient of the logits of one half by the two losses of a router, which backward adds.

    E20   aux   alpha E sum_s (T_s/T) sum_e f_se P_se, where f_se is the share of the choices of sequence s that fell on
                expert e, and P_se the mean of the scores of e, each as a share of its token's scores
          z     beta/T sum_t (log sum_e exp l_te)^2

    Both are means over the T tokens of the whole batch, as the model's own loss is. f has no gradient.
    """

    def __init__(self, routing: Routing, sequences: Sequences, weight: LossWeight, site: OpContext) -> None:
        self.routing, self.sequences, self.weight, self.site = routing, sequences, weight, site
        self.choices: Tensor | None = None
        """The choices in the whole sequence of each segment, [segments, E], once they are counted."""

    def gradient(self, logits: Tensor) -> Tensor:
        """Return the gradient of the logits of the tokens that this rank has at rest."""
        routing, weight, site = self.routing, self.weight, self.site
        first = site.grid.coords["x"] * site.rows_at_rest if site.sharded else 0
        tokens = torch.arange(first, first + len(logits), device=logits.device)
        # rows that only fill up the last rank on x, or a member of a context group, are no tokens
        own, real = tokens.clamp(max=site.tokens - 1), tokens < site.tokens
        if self.sequences.real is not None:
            real = real & self.sequences.real[own]
        scores = logits.softmax(dim=1)
        found = 2 * routing.z_loss * logits.logsumexp(dim=1, keepdim=True) * scores
        if routing.aux:
            found += self._gradient_of_aux(logits, scores, self.sequences.of_tokens[own])
        # gradients are averaged over places
        return found * real[:, None] * (site.grid.shape.places * weight.gradient / weight.tokens)

    def _gradient_of_aux(self, logits: Tensor, scores: Tensor, segments: Tensor) -> Tensor:
        """Return the part of `aux`; `scores` are the softmax of the logits, and `segments` those of their tokens."""
        if self.choices is None:
            raise RuntimeError(f"{self.site.label}: backward of a router whose choices were not counted")
        shares = self.choices[segments].to(logits.dtype)
        shares = self.routing.aux * self.routing.experts * shares / shares.sum(dim=1, keepdim=True)
        if self.routing.score == "softmax":
            return scores * (shares - (shares * scores).sum(dim=1, keepdim=True))
        each = logits.sigmoid()
        whole = each.sum(dim=1, keepdim=True)
        return (shares - (shares * each).sum(dim=1, keepdim=True) / whole) / whole * each * (1 - each)


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

    The bias is a buffer, [E] in fp32 and equal on all ranks that hold the layer: checkpoints have it, and no optimizer,
    norm of gradients or LoRA pair sees it. Counts are those of the place's tokens, in memory that never moves, so that
    a recorded step adds to them.
    """

    bias: Tensor | None
    chosen: Tensor
    load: Tensor
    dropped: Tensor

    def __init__(self, grid: Grid, policy: Policy, features: int, routing: Routing, *, init: Init) -> None:
        super().__init__(grid, policy)
        self.routing = routing
        self.declare("weight", Spec((routing.experts, features), POSITIONS, rest(policy.activations), init))
        biased = routing.bias_rate > 0
        self.register_buffer("bias", torch.zeros(routing.experts, device=grid.device) if biased else None)
        for name, width in (("chosen", routing.experts), ("load", routing.experts), ("dropped", 1)):
            # `chosen`: how often tokens of this step's training passes chose each expert. `load` and `dropped`: how
            # many pairs each expert took, and how many none took, since somebody asked the model.
            self.register_buffer(name, torch.zeros(width, dtype=torch.long, device=grid.device), persistent=False)
        self.companions: Tensor | None = None
        """How many tokens chose both of two experts, [E, E], where somebody asks for it. This memory never moves, so
        that a recorded step adds to it."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        before = self.bias
        super()._apply(fn, recurse)
        if before is not None and self.bias is not None and self.bias.dtype is not before.dtype:
            self.bias = before.to(self.bias.device)  # steps of the rate would vanish in a narrow dtype
        return self

    def forward(self, a: Tensor, site: OpContext, term: BalanceTerm | None = None) -> tuple[Tensor, Tensor]:
        """Return p and the ids of the experts of this rank's tokens, [m/(zx), K] each."""
        factor = self._factor()
        logits = Product.apply(factor, None, a.to(factor.group.compute_dtype), None, *factor.parameters)
        if site.y > 1:  # all ranks along y go on with the same logits, so each has their whole gradient
            logits = Conjugate.apply(logits, lambda owed: site.sum_y(owed).wait(), torch.clone)
        if term is not None:
            logits = Balanced.apply(logits, term)
        return self.routing.choose(logits, self.bias)

    def count(self, ids: Tensor, taken: Tensor | None, real: Tensor | None) -> None:
        """Count the choices [m, K] of the place's tokens; `taken` and `real` say which pairs and tokens count."""
        if self.engine.recomputing:
            return
        flat = ids.flatten()
        ones = torch.ones_like(flat) if real is None else real[:, None].expand_as(ids).long().flatten()
        if self.training and torch.is_grad_enabled():
            if self.bias is not None:
                self.chosen.index_add_(0, flat, ones)
            if self.companions is not None:
                both = (ids[:, :, None] * self.routing.experts + ids[:, None, :]).flatten()
                self.companions.view(-1).index_add_(0, both, ones[:, None].expand(-1, ids.shape[1]).flatten())
        if taken is None:
            self.load.index_add_(0, flat, ones)
        else:
            had = ones * taken.flatten()
            self.load.index_add_(0, flat, had)
            self.dropped.add_((ones - had).sum())

    def _factor(self) -> Factor:
        """Return the weight as the factor of a product; it is kept."""
        known = self._factors.get(())
        if known is None or known.group.gradients is not self.gradients or not known.group.is_current():
            member = self.member("weight")
            narrow = self.policy.compute_dtype or member.parameter.dtype
            policy = replace(self.policy, compute_dtype=torch.promote_types(narrow, self.policy.router_dtype))
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

"""Head and loss together, in chunks of tokens: the logits of one chunk are all that ever exists.

With the count of targets known beforehand, the gradient of a chunk's logits follows from the chunk alone.
So forward finds da and dw as well, chunk by chunk, and backward only scales them: the table is gathered
once, the input is gathered once, no product is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.nn.embedding import Head
from fourfold.nn.linear import join
from fourfold.nn.loss import (
    Vocabulary,
    gradient_of_logits,
    log_sum_exp,
    on_device,
    sum_halves,
    sum_of_places,
    sum_over_batch,
)
from fourfold.operators import Body, enter, once_differentiable, spread_bodies
from fourfold.product import Factor, matmul_into


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The table, the vocabulary, and the two directions of `spread`."""

    factor: Factor
    vocabulary: Vocabulary
    spread: Body
    unspread: Body
    chunk: int


class ChunkedLoss(torch.autograd.Function):
    """share = sum over a half's tokens of nll / count, with a [m/z, k/y] and w [p, k/y] gathered over z.

    For each chunk c of tokens: l_c = spread(a_c w^T); nll by E9; dl_c by E10;
    dout_c = unspread(dl_c); da_c = dout_c w (E2); dw += dout_c^T a_c (E3).
    """

    @staticmethod
    def forward(ctx: Any, spec: HeadSpec, a: Tensor, targets: Tensor, count: Tensor, _: nn.Parameter) -> Tensor:
        factor = spec.factor
        ctx.factor, ctx.turns = factor, factor.unit.engine.turn.of
        wants_da, wants_dw = ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        da = torch.empty_like(a) if wants_da else None
        nll = torch.zeros((), dtype=torch.float64, device=a.device)
        share = 1 / count
        with factor.using(biases=False, turns=ctx.turns) as gathered:
            w = gathered.w
            dw = torch.zeros_like(w, dtype=factor.unit.reduce_dtype) if wants_dw else None
            for first in range(0, len(a), spec.chunk):
                part, aims = a[first : first + spec.chunk], targets[first : first + spec.chunk]
                logits = spec.spread(part @ w.t()).wait()
                kept, lse, chunk_nll = log_sum_exp(spec.vocabulary, logits, aims)
                nll += chunk_nll
                if da is not None or dw is not None:
                    dout = spec.unspread(gradient_of_logits(spec.vocabulary, kept, aims, lse, share)).wait()
                    if da is not None:
                        torch.mm(dout, w, out=da[first : first + spec.chunk])
                    if dw is not None:
                        matmul_into(dout.t(), part, dw.dtype, onto=dw)
        ctx.save_for_backward(da, dw)
        return nll * share

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dshare: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        da, dw = ctx.saved_tensors
        if dw is not None:
            (member,) = ctx.factor.weights
            ctx.factor.unit.add([dw[: member.rows] * dshare.to(dw.dtype)], turns=ctx.turns)
        return None, None if da is None else da * dshare.to(da.dtype), None, None, None


def chunked_share(head: Head, a: Tensor, targets: Tensor, ignore_index: int, count: Tensor) -> Turns[Tensor]:
    """A half's share of the loss in fp64, from `a` at rest."""
    site = head.site(targets.numel())
    factor = join([head])
    vocabulary = head.vocabulary(ignore_index)
    spec = HeadSpec(factor, vocabulary, *spread_bodies(site, [head.width]), head.policy.loss_chunk)
    entering = enter(a, site)
    if entering.travels:
        yield
    return ChunkedLoss.apply(spec, entering.wait(), targets.flatten(), count, factor.weights[0].parameter)


def count_first(
    head: Head, targets: Sequence[Tensor], ignore_index: int, *, count: Tensor | int | None, faults: int
) -> tuple[Tensor, Tensor]:
    """The targets of the whole batch, which chunks must know beforehand, and the faults of all places."""
    known = [on_device(faults, targets[0].device)]
    if count is None:
        known.append(sum_halves([(aims != ignore_index).sum().double() for aims in targets]))
    sums = sum_over_batch(torch.stack(known), head.grid, "loss")
    total = sums[1] if count is None else on_device(count, targets[0].device)
    return total.clamp(min=1), sums[0]


def show_sum(shares: Sequence[Tensor], grid: Grid, dtype: torch.dtype) -> Tensor:
    """The loss of the whole batch from the shares of this place's halves, each of which has the gradient of its own."""
    return sum_of_places(sum_halves(shares), grid, "loss").to(torch.promote_types(dtype, torch.float32))

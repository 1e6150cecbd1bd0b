"""Head and loss together, in chunks of tokens: the logits of one chunk are all that ever exists.

With the count of targets known beforehand, the gradient of a chunk's logits follows from the chunk alone.
So forward finds da and dw as well, chunk by chunk, and backward only scales them: the table is gathered
once, the input is gathered once, no product is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fourfold.nn.embedding import Head
from fourfold.nn.linear import join
from fourfold.nn.loss import Vocabulary, gradient_of_logits, log_sum_exp, on_device, sum_over_batch
from fourfold.product import Body, Factor, enter, matmul_into, spread_bodies


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The table, the vocabulary, and the two directions of `spread`."""

    factor: Factor
    vocabulary: Vocabulary
    spread: Body
    unspread: Body
    chunk: int


class ChunkedLoss(torch.autograd.Function):
    """loss = sum over tokens of nll / count, with a [m/z, k/y] and w [p, k/y] gathered over z.

    For each chunk c of tokens: l_c = spread(a_c w^T); nll by E9; dl_c by E10;
    dout_c = unspread(dl_c); da_c = dout_c w (E2); dw += dout_c^T a_c (E3).
    """

    @staticmethod
    def forward(ctx: Any, spec: HeadSpec, a: Tensor, targets: Tensor, count: Tensor, _: nn.Parameter) -> Tensor:
        factor = spec.factor
        w = factor.gather_weights()
        wants_da, wants_dw = ctx.needs_input_grad[1], ctx.needs_input_grad[4]
        da = torch.empty_like(a) if wants_da else None
        dw = torch.zeros_like(w, dtype=factor.unit.reduce) if wants_dw else None
        nll = torch.zeros((), dtype=torch.float64, device=a.device)
        share = 1 / count
        for first in range(0, len(a), spec.chunk):
            part, aims = a[first : first + spec.chunk], targets[first : first + spec.chunk]
            logits = spec.spread(part @ w.t())
            kept, lse, chunk_nll = log_sum_exp(spec.vocabulary, logits, aims)
            nll += chunk_nll
            if da is not None or dw is not None:
                dout = spec.unspread(gradient_of_logits(spec.vocabulary, kept, aims, lse, share))
                if da is not None:
                    torch.mm(dout, w, out=da[first : first + spec.chunk])
                if dw is not None:
                    dw += matmul_into(dout.t(), part, dw.dtype)
        ctx.factor = factor
        ctx.save_for_backward(da, dw)
        total = sum_over_batch(nll, spec.vocabulary.grid, spec.vocabulary.label)
        return (total / count).to(torch.promote_types(a.dtype, torch.float32))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        da, dw = ctx.saved_tensors
        if dw is not None:
            (member,) = ctx.factor.weights
            ctx.factor.unit.scatter([dw[: member.rows] * dloss.to(dw.dtype)])
        return None, None if da is None else da * dloss.to(da.dtype), None, None, None


def chunked_loss(
    head: Head, a: Tensor, targets: Tensor, ignore_index: int, *, count: Tensor | int | None, faults: int
) -> tuple[Tensor, Tensor]:
    """The same as `cross_entropy` of the head's logits, for `a` at rest."""
    vocabulary = head.vocabulary(ignore_index)
    known = [on_device(faults, a.device)]
    if count is None:
        known.append((targets != ignore_index).sum().double())
    sums = sum_over_batch(torch.stack(known), head.grid, vocabulary.label)
    total = sums[1] if count is None else on_device(count, a.device)
    site = head.site(targets.numel())
    factor = join([head])
    spec = HeadSpec(factor, vocabulary, *spread_bodies(site, [head.width]), head.policy.loss_chunk)
    whole = enter(a, site)
    loss = ChunkedLoss.apply(spec, whole, targets.flatten(), total.clamp(min=1), factor.weights[0].parameter)
    return loss, sums[0]

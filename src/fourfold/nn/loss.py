"""Cross-entropy over a vocabulary that is cut, and means over a batch that is cut.

Gradients are averaged over places (E6): a loss that a place computes from its own rows has the gradient that it has
under DDP. The losses here are global. They return the mean over the unmasked tokens of the whole batch, equal on all
ranks, and their gradient is scaled by the number of places, so that the average is exactly the gradient of that mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold import comm, kernels
from fourfold.axes import BATCH, CUTS
from fourfold.grid import Grid
from fourfold.layout import FEATURES, Layout
from fourfold.operators import Conjugate, once_differentiable

IGNORE_INDEX = -100
"""The target of a masked token, as in torch."""
LABEL = "loss"
"""The label of the loss's messages in the ledger."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How logits are cut, and the ids that the columns of this rank's logits stand for; further columns are padding."""

    grid: Grid
    cut: Layout
    ids: range
    ignore_index: int
    compiled: bool = False
    of_place: bool = False
    """Whether the loss is over the rows of this place alone, not over the whole batch."""

    @property
    def whole(self) -> bool:
        """Whether every rank has the logits of all ids."""
        return all(self.grid.size(axis) == 1 for axis in self.cut.over(FEATURES))


class CrossEntropy(torch.autograd.Function):
    """loss = sum over unmasked tokens of (lse - l_t) / count, with logits [m/z, V/(xy)] never gathered.

        E9   lse = log sum over all ranks of exp(l), from (max, sum of exp, l_t) of each rank, merged
        E10  dl  = (exp(l - lse) - onehot_t) dloss places / count, for this rank's columns

    `count` is the number of targets of the whole batch; if it is None, it is counted here. The faults of all places
    are summed in the same message and returned beside the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, vocabulary: Vocabulary, targets: Sequence[Tensor], count: Tensor | None, faults: int, *logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        halves = [log_sum_exp(vocabulary, *half) for half in zip(logits, targets, strict=True)]
        nll = sum_halves([nll for _, _, nll in halves])
        sums = [nll, nll.new_full((), faults)]
        if count is None:
            sums.append(count_halves(targets, vocabulary.ignore_index))
        total = torch.stack(sums)
        if not vocabulary.of_place:
            total = sum_over_batch(total, vocabulary.grid, LABEL)
        count = total[2].clamp(min=1) if count is None else count  # at least 1: without targets the loss is 0, not NaN
        ctx.vocabulary = vocabulary
        ctx.save_for_backward(count, *targets, *(kept for kept, _, _ in halves), *(lse for _, lse, _ in halves))
        everyones_faults = total[1].clone()
        ctx.mark_non_differentiable(everyones_faults)
        return (total[0] / count).to(kernels.widen(logits[0][:0]).dtype), everyones_faults

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        count, *saved = ctx.saved_tensors
        parts = len(saved) // 3
        targets, kept, lse = saved[:parts], saved[parts : 2 * parts], saved[2 * parts :]
        share = dloss * ((1 if ctx.vocabulary.of_place else ctx.vocabulary.grid.shape.places) / count)
        halves = zip(kept, targets, lse, strict=True)
        return (None, None, None, None, *(gradient_of_logits(ctx.vocabulary, *half, share) for half in halves))


def sum_halves(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def count_halves(targets: Sequence[Tensor], ignore_index: int) -> Tensor:
    """Return the number of unmasked targets of this place, in fp64 to travel in one message with other sums."""
    return sum_halves([(half != ignore_index).sum().double() for half in targets])


def gradient_of_logits(
    vocabulary: Vocabulary, kept: Tensor, targets: Tensor, lse: Tensor | None, share: Tensor
) -> Tensor:
    """Return E10, 0 in columns of padding, from the results of `log_sum_exp` and `share` = dloss places / count."""
    scale = share.to(kernels.widen(kept[:0]).dtype) * (targets != vocabulary.ignore_index)
    if lse is None:
        return kernels.dlogits_normalized(kept, targets, scale)
    columns = vocabulary.ids.start, len(vocabulary.ids)
    if vocabulary.compiled and not kept.is_meta:
        return kernels.region(kernels.dlogits, kept, compiled=True)(kept, targets, lse, scale, *columns)
    return kernels.dlogits_eager(kept, targets, lse, scale, *columns)


def log_sum_exp(vocabulary: Vocabulary, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return what backward keeps, E9 for each token, and the fp64 sum of (lse - target's logit) over unmasked tokens.

    Backward keeps the logits. If every rank has the whole vocabulary without padding and no cast is needed, it keeps
    log-probabilities instead, which torch computes in one pass; their E9 is 0, which None stands for.
    """
    masked = targets == vocabulary.ignore_index
    unpadded = logits.shape[1] == len(vocabulary.ids)
    if vocabulary.whole and unpadded and not vocabulary.compiled and logits.dtype.itemsize >= 4:
        logp = torch.log_softmax(logits, dim=1)
        found = logp.gather(1, targets.masked_fill(masked, 0)[:, None])[:, 0]
        return logp, None, -found.masked_fill(masked, 0).sum().double()
    statistics = kernels.region(kernels.loss_statistics, logits, compiled=vocabulary.compiled)
    stats = statistics(logits.detach(), targets, vocabulary.ids.start, len(vocabulary.ids))
    for axis in reversed(vocabulary.cut.over(FEATURES)):  # merge the innermost cut first
        parts = comm.all_gather(stats[None], vocabulary.grid, axis, label=LABEL).wait()
        tops, totals, found = parts.unbind(1)
        top = tops.amax(0)  # subtracted before exp, which would overflow
        stats = torch.stack([top, (totals * (tops - top).exp()).sum(0), found.sum(0)])
    top, total, target = stats.unbind(0)
    lse = top + total.log()
    return logits, lse, (lse - target).masked_fill(masked, 0).sum().double()


def cross_entropy(
    logits: Sequence[Tensor],
    targets: Sequence[Tensor],
    vocabulary: Vocabulary,
    *,
    count: Tensor | int | None = None,
    faults: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy over the whole batch's unmasked tokens, from the logits of its halves in inner.

    Also return the number of faults that all places reported, so that every rank learns of one without another
    message. A batch without any unmasked token has loss 0.
    """
    known = None if count is None else on_device(count, logits[0].device).clamp(min=1)
    return CrossEntropy.apply(vocabulary, [half.flatten() for half in targets], known, faults, *logits)


def count_first(
    targets: Sequence[Tensor], ignore_index: int, grid: Grid, *, count: Tensor | int | None, faults: int
) -> tuple[Tensor, Tensor]:
    """Return the number of targets of the whole batch, which a chunked loss needs first, and all places' faults."""
    sums = [on_device(faults, targets[0].device)]
    if count is None:
        sums.append(count_halves(targets, ignore_index))
    total = sum_over_batch(torch.stack(sums), grid, LABEL)
    return (total[1] if count is None else on_device(count, targets[0].device)).clamp(min=1), total[0]


def on_device(number: Tensor | int | float, device: torch.device) -> Tensor:
    """Return a number in fp64 on the device, without making the host wait for it."""
    if isinstance(number, Tensor):
        return number.to(device, torch.float64, non_blocking=True)
    return torch.full((), number, dtype=torch.float64, device=device)


def sum_over_batch(tensor: Tensor, grid: Grid, label: str) -> Tensor:
    """Return the sum over the axes that cut the rows of a batch."""
    for axis in CUTS:
        if axis in BATCH:
            tensor = comm.all_reduce(tensor, grid, axis, label=label).wait()
    return tensor


def count_targets(targets: Tensor, grid: Grid, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Return the number of unmasked targets of the whole batch, from the rows of each (data, z) place.

    Pass the rows of all micro-steps at once, in any shape. Places of one context group have the same rows, which count
    once.
    """
    return count_held(targets, grid, ignore_index=ignore_index) / grid.shape.context


def count_held(targets: Tensor, grid: Grid, *, ignore_index: int) -> Tensor:
    """Return the number of unmasked targets of the whole batch, from those of the tokens that each place holds."""
    return sum_over_batch((targets != ignore_index).sum().double(), grid, "count targets")


def global_mean(loss: Tensor, count: Tensor | int, grid: Grid) -> Tensor:
    """Turn a mean over this place's `count` tokens into the mean over the whole batch.

    Use it for your own loss if places have different counts: gradients are averaged over places, and the average of
    local means is then not the mean over all tokens. Every rank of a (data, z) place must have computed the same loss.
    """
    own = on_device(count, loss.device)
    total = sum_over_batch(own.clone(), grid, "global mean").clamp(min=1)
    return sum_of_places(loss * (own / total).to(loss.dtype), grid, "global mean")


def sum_of_places(share: Tensor, grid: Grid, label: str) -> Tensor:
    """Return the sum of the places' shares of a global loss, on all ranks.

    Gradients are averaged over places, so the gradient of a share is the gradient of the sum times the number of places
    (E6).
    """
    places = grid.shape.places
    return Conjugate.apply(
        share, lambda value: sum_over_batch(value, grid, label).clone(), lambda gradient: gradient * places
    )

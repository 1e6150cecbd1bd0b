"""Cross-entropy over a vocabulary that is cut, and means over a batch that is cut.

Gradients are averaged over places (E6): what a place computes from its own rows has the gradient that it has under DDP.
The losses here are global. The value that they show is the mean over the whole batch's unmasked tokens, equal on all
ranks, and their gradient is scaled by the number of places, so that the average is exactly the gradient of that mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fourfold import comm, kernels
from fourfold.axes import AXES, BATCH
from fourfold.grid import Grid
from fourfold.layout import FEATURES, Layout
from fourfold.operators import Conjugate, once_differentiable

IGNORE_INDEX = -100


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which ids the columns of this rank's logits stand for; columns past them are padding."""

    grid: Grid
    cut: Layout
    ids: range
    ignore_index: int
    label: str
    compiled: bool = False
    of_place: bool = False
    """Whether the loss is that of this place's rows alone, not the global one."""

    @property
    def whole(self) -> bool:
        """No axis cuts the vocabulary."""
        return all(self.grid.size(axis) == 1 for axis in self.cut.over(FEATURES))


class CrossEntropy(torch.autograd.Function):
    """loss = sum over unmasked tokens of (lse - l_t) / count, with logits [m/z, V/(xy)] never gathered.

        E9   lse = log sum over all ranks of exp(l), from (max, sum of exp, l_t) of each rank, merged
        E10  dl  = (exp(l - lse) - onehot_t) dloss places / count, for this rank's columns

    `count` is that of the whole batch; without one it is counted here. The faults of all places are summed
    in the same message and come back beside the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, vocabulary: Vocabulary, targets: Sequence[Tensor], count: Tensor | None, faults: int, *logits: Tensor
    ) -> tuple[Tensor, Tensor]:
        halves = [log_sum_exp(vocabulary, *half) for half in zip(logits, targets, strict=True)]
        nll = sum_halves([nll for _, _, nll in halves])
        sums = [nll, nll.new_full((), faults)]
        if count is None:
            sums.append(sum_halves([(aims != vocabulary.ignore_index).sum().double() for aims in targets]))
        total = torch.stack(sums)
        if not vocabulary.of_place:
            total = sum_over_batch(total, vocabulary.grid, vocabulary.label)
        count = total[2].clamp(min=1) if count is None else count
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


def gradient_of_logits(
    vocabulary: Vocabulary, kept: Tensor, targets: Tensor, lse: Tensor | None, share: Tensor
) -> Tensor:
    """E10, with `share` = dloss places / count; 0 in columns of padding. Takes what `log_sum_exp` gave."""
    dtype = kernels.widen(kept[:0]).dtype
    scale = share.to(dtype) * (targets != vocabulary.ignore_index)
    if lse is None:
        return kernels.dlogits_normalized(kept, targets, scale)
    place = vocabulary.ids.start, len(vocabulary.ids)
    if vocabulary.compiled and not kept.is_meta:
        return kernels.region(kernels.dlogits, kept, compiled=True)(kept, targets, lse, scale, *place)
    return kernels.dlogits_eager(kept, targets, lse, scale, *place)


def log_sum_exp(vocabulary: Vocabulary, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """What backward keeps, E9 for each token, and the sum over unmasked tokens of (lse - target's logit) in fp64.

    Backward keeps the logits. Where nothing cuts the vocabulary and no cast is needed it keeps log-probabilities
    in their place, which torch finds in one pass; their E9 is 0 and not written down.
    """
    masked = targets == vocabulary.ignore_index
    if vocabulary.whole and not vocabulary.compiled and logits.dtype.itemsize >= 4:
        logp = torch.log_softmax(logits, dim=1)
        found = logp.gather(1, targets.masked_fill(masked, 0)[:, None])[:, 0]
        return logp, None, -found.masked_fill(masked, 0).sum().double()
    statistics = kernels.region(kernels.loss_statistics, logits, compiled=vocabulary.compiled)
    stats = statistics(logits.detach(), targets, vocabulary.ids.start, len(vocabulary.ids))
    top, total, target = merge(stats, vocabulary)
    lse = top + total.log()
    return logits, lse, (lse - target).masked_fill(masked, 0).sum().double()


def merge(stats: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor, Tensor]:
    """Join the stats of the ranks that cut the vocabulary, the inner cut first."""
    for axis in reversed(vocabulary.cut.over(FEATURES)):
        parts = comm.all_gather(stats[None], vocabulary.grid, axis, label=vocabulary.label).wait()
        tops, totals, targets = parts.unbind(1)
        top = tops.amax(0)
        stats = torch.stack([top, (totals * (tops - top).exp()).sum(0), targets.sum(0)])
    top, total, target = stats.unbind(0)
    return top, total, target


def cross_entropy(
    logits: Sequence[Tensor],
    targets: Sequence[Tensor],
    vocabulary: Vocabulary,
    *,
    count: Tensor | int | None = None,
    faults: int = 0,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the whole batch's unmasked tokens, from the logits of its halves in inner layout.

    Also returns the faults that all places reported, so that every rank hears of one without a message more.
    A batch without any unmasked token has loss 0.
    """
    known = None if count is None else on_device(count, logits[0].device).clamp(min=1)
    return CrossEntropy.apply(vocabulary, [aims.flatten() for aims in targets], known, faults, *logits)


def on_device(number: Tensor | int | float, device: torch.device) -> Tensor:
    """A number in fp64 on the device, without making the host wait for it."""
    if isinstance(number, Tensor):
        return number.to(device, torch.float64, non_blocking=True)
    return torch.full((), number, dtype=torch.float64, device=device)


def sum_over_batch(tensor: Tensor, grid: Grid, label: str) -> Tensor:
    """Sum over the axes that cut the rows of a batch."""
    for axis in AXES:
        if axis in BATCH:
            tensor = comm.all_reduce(tensor, grid, axis, label=label).wait()
    return tensor


def count_targets(targets: Tensor, grid: Grid, *, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Unmasked targets of the whole batch, from the rows that each (data, z) place holds.

    Takes the rows of all micro-steps at once, in any shape.
    """
    return sum_over_batch((targets != ignore_index).sum().double(), grid, "count targets")


def global_mean(loss: Tensor, count: Tensor | int, grid: Grid) -> Tensor:
    """Turn a mean over this place's `count` tokens into the mean over the whole batch.

    For losses of one's own whose counts differ between places: gradients are averaged over places, and the average of
    local means is not the mean over all tokens where places have unequal counts. Every rank of a (data, z) place must
    have computed the same.
    """
    own = on_device(count, loss.device)
    total = sum_over_batch(own.clone(), grid, "global mean").clamp(min=1)
    return sum_of_places(loss * (own / total).to(loss.dtype), grid, "global mean")


def sum_of_places(share: Tensor, grid: Grid, label: str) -> Tensor:
    """Sum the places' shares of a global loss, and show the sum on all ranks.

    Gradients are averaged over places, so that of a share is the sum's times the number of places (E6).
    """
    places = grid.shape.places
    return Conjugate.apply(
        share, lambda value: sum_over_batch(value, grid, label).clone(), lambda gradient: gradient * places
    )

"""BatchNorm of images whose channels are cut over x and y, with statistics over the whole batch.

Statistics are taken in the wider of fp32 and the input's dtype, from count, mean and M2 of each place, which may have
other numbers of rows, merged by Chan (E8). With g = dout w:

    training   x^ = (a - mean) / sqrt(var + eps)            all-gathers of (count, mean, M2) over z and data
               da = (g - mean(g) - x^ mean(g x^)) rstd      all-reduces of the two sums over z and data
    eval       the running statistics, nothing travels
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold import comm, kernels
from fourfold.axes import BATCH
from fourfold.comm import Pending
from fourfold.grid import Grid
from fourfold.layout import Spec
from fourfold.nn.channel_norm import ChannelNorm, find_da, normalize, sums_over_space
from fourfold.nn.channels import Channels, gather, require_block, take
from fourfold.operators import once_differentiable
from fourfold.params import local_of
from fourfold.policy import Policy


class Moments(NamedTuple):
    """Of a whole batch, for each of this rank's channels. The count is None where they are the running ones."""

    count: Tensor | None
    mean: Tensor
    var: Tensor


class BatchNorm(ChannelNorm):
    """BatchNorm of [r, c, *space] with statistics over all rows of all places.

    Running statistics are buffers, DTensors that lie as the weight computes: equal on all ranks of z and data, cut over
    the channels' axes; where those are ("y", "x") cut over y, and the batch's statistics are gathered over x for them,
    behind the normalisation. `buffer_specs` says how they lie.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        features: int,
        *,
        axes: tuple[str, ...],
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        bias: bool = True,
        track_running_stats: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """`dtype` is that of the running statistics."""
        super().__init__(grid, policy, Channels(features, axes), affine=affine, bias=bias, eps=eps)
        self.momentum, self.track_running_stats = momentum, track_running_stats
        self.buffer_specs: dict[str, Spec] = {}
        for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, self._buffer(name, value, dtype) if track_running_stats else None)
        batches = torch.zeros((), dtype=torch.long, device=grid.device) if track_running_stats else None
        self.register_buffer("num_batches_tracked", batches)

    def _buffer(self, name: str, value: float, dtype: torch.dtype) -> Tensor:
        self.buffer_specs[name] = spec = Spec((self.channels.count,), self.channels.storage.compute, self.channels.use)
        held = len(self.channels.stored.block(self.grid))
        shard = torch.full((held,), value, dtype=dtype, device=self.grid.device)
        placements, whole = spec.storage.placements(), torch.Size(spec.shape)
        return DTensor.from_local(shard, self.grid.mesh, placements, run_check=False, shape=whole, stride=(1,))

    def forward(self, a: Tensor) -> Tensor:
        require_block(a, self.channels, self.grid, self.label)
        if self.training or not self.track_running_stats:
            moments = self.moments(a)
            updating = self._gather_for_update(moments)
            out = NormalizeBatch.apply(self, moments, a, *self.parameters())
            if updating is not None:
                self._update(updating.wait())
            return out
        part = self.channels.part(self.grid)
        mean, var = (take(local_of(held), part, dim=0).to(a.device) for held in (self.running_mean, self.running_var))
        return NormalizeBatch.apply(self, Moments(None, mean, var), a, *self.parameters())

    @torch.no_grad()
    def moments(self, a: Tensor) -> Moments:
        """Of all rows of all places."""
        if self.engine.turn.of > 1:
            raise ValueError(
                f"{self.label}: BatchNorm takes its statistics over the whole batch, but this is one of "
                f"{self.engine.turn.of} parts that take turns; use Overlap(halves=1)"
            )
        parts = self.run(batch_moments, a)
        for axis in reversed(BATCH):
            if self.grid.size(axis) > 1:
                parts = merge(comm.all_gather(parts[None], self.grid, axis, label=self.label).wait())
        count, mean, m2 = parts.unbind(0)
        few = a.shape[0] * prod(a.shape[2:]) < 2  # otherwise there is no need to ask, which costs the host a wait
        if few and not a.is_meta and bool((count < 2).any()):
            raise ValueError(
                f"{self.label}: BatchNorm in training needs more than one value per channel, but the rows "
                f"and positions of the whole batch are {int(count.max())}; give more rows, or call eval()"
            )
        return Moments(count, mean, m2 / count)

    @torch.no_grad()
    def _gather_for_update(self, moments: Moments) -> Pending[Tensor] | None:
        """[2, c] of the channels that this rank stores: the mean and the variance without bias."""
        count, mean, var = moments
        if count is None or not (self.training and self.track_running_stats) or self.engine.recomputing or mean.is_meta:
            return None
        both = torch.stack([mean, var * count / (count - 1)])
        stored = self.channels.stored
        if stored == self.channels:
            return Pending(lambda: both)
        # x and y alone cut channels, so the storage lacks one cut at most
        return gather(both, self.site(0), self.channels.axes[-1], len(stored.block(self.grid)))

    @torch.no_grad()
    def _update(self, both: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.to(both.dtype) if self.momentum is None else self.momentum
        for held, batch in zip((self.running_mean, self.running_var), both, strict=True):
            running = local_of(held)
            running.copy_(running.to(both.dtype) * (1 - share) + batch * share)


def batch_moments(a: Tensor) -> Tensor:
    """[3, c]: count, mean and M2 of the rows and positions at hand."""
    wide = kernels.widen(a)
    count = wide.numel() // max(wide.shape[1], 1)
    if count == 0:
        return wide.new_zeros(3, wide.shape[1])
    var, mean = torch.var_mean(wide, [0, *range(2, wide.dim())], correction=0)
    return torch.stack([torch.full_like(mean, count), mean, var * count])


def merge(parts: Tensor) -> Tensor:
    """[ranks, 3, c] -> [3, c]: E8 for parts of any sizes."""
    counts, means, m2s = parts.unbind(1)
    count = counts.sum(0)
    mean = (means * (counts / count.clamp(min=1))).sum(0)
    return torch.stack([count, mean, m2s.sum(0) + (counts * (means - mean).square()).sum(0)])


class NormalizeBatch(torch.autograd.Function):
    """x^ = (a - mean) rstd; out = x^ w + b, with moments that a is a part of, or with given ones."""

    @staticmethod
    def forward(ctx: Any, norm: BatchNorm, moments: Moments, a: Tensor, *_: nn.Parameter) -> Tensor:
        ctx.norm, ctx.affine, ctx.turns = norm, norm.affine(), norm.engine.turn.of
        rstd = torch.rsqrt(moments.var + norm.eps)
        ctx.save_for_backward(a, moments.mean, rstd, moments.count)
        with ctx.affine.using(ctx.turns) as (weight, bias):
            return norm.run(normalize, a, moments.mean, rstd, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        norm: BatchNorm = ctx.norm
        a, mean, rstd, count = ctx.saved_tensors
        own = total = norm.run(sums_over_space, dout, a, mean, rstd).sum(1)
        means = None
        if count is not None:
            for axis in reversed(BATCH):
                total = comm.all_reduce(total, norm.grid, axis, label=norm.label).wait()
        with ctx.affine.weight_alone.using(ctx.turns) as (weight, _):
            if count is not None:
                means = (total if weight is None else total * weight) / count
            da = norm.run(find_da, dout, a, mean, rstd, weight, means)
        ctx.affine.add_gradients((own[1], own[0]), ctx.turns)
        return (None, None, da, *[None] * (len(ctx.needs_input_grad) - 3))

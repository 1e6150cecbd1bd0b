"""GroupNorm and BatchNorm of images with channels that are cut over x and y.

Statistics are taken in the wider of fp32 and the input's dtype, from mean and M2 = sum (a - mean)^2 of parts, merged by
Chan (E8), never as E[a^2] - E[a]^2. With g = dout w:

    x^ = (a - mean) rstd, out = x^ w + b          da = (g - mean(g) - x^ mean(g x^)) rstd

    GroupNorm   means over a group's channels and space, for each row. Nothing is communicated if ranks hold whole
                groups. Otherwise [r, c, 2] is gathered in each pass, over the axes that cut through groups: mean and M2
                of each row's channels, then sums of g and g x^.
    BatchNorm   means over rows and space, for each channel, from count, mean and M2 of each place, which may have
                different numbers of rows. Training all-gathers (count, mean, M2) over z and data, and backward
                all-reduces the two sums; eval uses the running statistics and communicates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold import comm, kernels
from fourfold.axes import BATCH
from fourfold.comm import Pending
from fourfold.grid import Grid
from fourfold.layout import Init, Spec
from fourfold.nn.images.channels import Channels, embed, gather, join, require_block, take, whole_groups, within
from fourfold.nn.layer import Layer, add_gradients
from fourfold.operators import once_differentiable
from fourfold.param_group import ParamGroup
from fourfold.params import local_of
from fourfold.policy import Policy


@contextmanager
def affine(group: ParamGroup, part: range, turns: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Gather the weight and the bias, a norm may lack either, and take the rows `part` of this rank's channels."""
    if not group.members:
        yield None, None
        return
    with group.using(turns=turns) as vectors:
        weight, *bias = (take(vector, part, dim=0) for vector in vectors)
        yield weight, bias[0] if bias else None


class Moments(NamedTuple):
    """The statistics that normalise this rank's channels, [c] or for each row [r, c]."""

    mean: Tensor
    var: Tensor
    count: Tensor | None = None
    """The number of values behind the statistics of a batch."""


def along(vector: Tensor, a: Tensor) -> Tensor:
    """[c] or [r, c] -> a shape that broadcasts over the space of a."""
    return vector.view(*vector.shape, *[1] * (a.dim() - 2))


def normalize(a: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = (kernels.widen(a) - along(mean, a)) * along(rstd if weight is None else rstd * weight, a)
    return (out if bias is None else out + along(bias, a)).to(a.dtype)


def sums_over_space(dout: Tensor, a: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return [2, r, c]: the sums of dout and of dout x^."""
    wide, unit = kernels.widen(dout), (kernels.widen(a) - along(mean, a)) * along(rstd, a)
    space = list(range(2, a.dim()))
    if not space:  # an empty list of dims would sum over all of them
        return torch.stack([wide, wide * unit])
    return torch.stack([wide.sum(space), (wide * unit).sum(space)])


def find_da(dout: Tensor, a: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, means: Tensor | None) -> Tensor:
    """Return da from mean(g) and mean(g x^); without these means, the statistics do not depend on a."""
    g = kernels.widen(dout) if weight is None else kernels.widen(dout) * along(weight, a)
    if means is not None:
        unit = (kernels.widen(a) - along(mean, a)) * along(rstd, a)
        g = g - along(means[0], a) - unit * along(means[1], a)
    return (g * along(rstd, a)).to(a.dtype)


class ChannelNorm(Layer):
    """The base class of both norms: channels that are cut over axes, and a weight and a bias that are cut like them."""

    def __init__(self, grid: Grid, policy: Policy, channels: Channels, *, affine: bool, bias: bool, eps: float) -> None:
        super().__init__(grid, policy)
        self.channels, self.eps = channels, eps
        for name, there, mean in (("weight", affine, 1.0), ("bias", affine and bias, 0.0)):
            spec = Spec((channels.count,), channels.storage, channels.use, Init(mean=mean))
            self.declare(name, spec if there else None)

    def run(self, function: Callable[..., Any], a: Tensor, *args: Any) -> Any:
        # Detached, so that torch.compile needs no second variant for tensors that require gradients.
        return kernels.region(function, a, compiled=self.policy.compile)(a.detach(), *args)


class GroupNorm(ChannelNorm):
    """GroupNorm of [r, c, *space]: ranks that share a group merge the statistics of its channels."""

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        groups: int,
        features: int,
        *,
        axes: tuple[str, ...],
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
    ) -> None:
        if groups < 1 or features % groups:
            raise ValueError(f"GroupNorm: features={features} is not divisible by groups={groups}")
        super().__init__(grid, policy, Channels(features, axes), affine=affine, bias=bias, eps=eps)
        self.groups = groups
        self.cuts = len(axes)
        """The number of outer cuts that leave groups whole; statistics are merged over the axes of the others."""
        while whole_groups(self.channels.outer(self.cuts), groups, grid) is None:
            self.cuts -= 1

    def forward(self, a: Tensor) -> Tensor:
        require_block(a, self.channels, self.grid, self.label)
        return NormalizeChannels.apply(self, self.moments(a), a, *self.parameters())

    @torch.no_grad()
    def moments(self, a: Tensor) -> Moments:
        """Return the statistics of each row's groups, for each of this rank's channels."""
        means, m2s = self.by_group(self.run(channel_moments, a))
        mean = means.mean(-1)
        m2 = m2s.sum(-1) + prod(a.shape[2:]) * (means - mean[..., None]).square().sum(-1)  # E8
        return Moments(self.by_channel(mean), self.by_channel(m2 / self.size(a)))

    def sum_gradients(self, sums: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return db and dw, [2, c], and the sums [2, r, c] themselves, which `mean_gradients` weighs and merges."""
        return sums.sum(1), sums

    def mean_gradients(self, total: Tensor, weight: Tensor | None, a: Tensor, _: Tensor | None) -> Tensor:
        """Return mean(g) and mean(g x^) of each row's groups, for each of this rank's channels."""
        of_groups = self.by_group(total if weight is None else total * weight).sum(-1)
        return self.by_channel(of_groups / self.size(a))

    def size(self, a: Tensor) -> int:
        """Return the number of values of a row's group."""
        return prod(a.shape[2:]) * self.channels.count // self.groups

    def by_group(self, numbers: Tensor) -> Tensor:
        """[2, r, c] of this rank's channels -> [2, r, groups, channels of a group], of whole groups."""
        joined = join(numbers.permute(1, 2, 0), self.channels, self.cuts, self.site(numbers.shape[1]))
        return joined.unflatten(1, (-1, self.channels.count // self.groups)).permute(3, 0, 1, 2)

    def by_channel(self, numbers: Tensor) -> Tensor:
        """[..., groups] -> [..., c] of this rank's channels."""
        own = within(self.channels.block(self.grid), self.channels.outer(self.cuts).block(self.grid))
        return take(numbers.repeat_interleave(self.channels.count // self.groups, -1), own, dim=-1)


def channel_moments(a: Tensor) -> Tensor:
    """Return [2, r, c]: mean and M2 over space."""
    wide = kernels.widen(a).flatten(2) if a.dim() > 2 else kernels.widen(a)[:, :, None]
    if wide.numel() == 0:
        return wide.new_zeros(2, *wide.shape[:2])  # torch warns about the variance of an empty tensor
    var, mean = torch.var_mean(wide, 2, correction=0)
    return torch.stack([mean, var * wide.shape[2]])


class BatchNorm(ChannelNorm):
    """BatchNorm of [r, c, *space] with statistics over all rows of all places.

    Running statistics are buffers: DTensors in the compute layout of the weight, equal on all ranks of z and data and
    cut over the channels' axes. For channels over ("y", "x") they are cut over y, and the batch's statistics are
    gathered over x for them, behind the normalisation. `buffer_specs` has their layouts.
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
        """`dtype` is the dtype of the running statistics."""
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
            out = NormalizeChannels.apply(self, moments, a, *self.parameters())
            if updating is not None:
                self._update(updating.wait())  # waited for after the normalisation, which hides the message
            return out
        part = self.channels.part(self.grid)
        running = (self.running_mean, self.running_var)
        moments = Moments(*(take(local_of(held), part, dim=0).to(a.device) for held in running))
        return NormalizeChannels.apply(self, moments, a, *self.parameters())

    @torch.no_grad()
    def moments(self, a: Tensor) -> Moments:
        """Return the statistics of all rows of all places."""
        if self.engine.turn.of > 1:
            raise ValueError(
                f"{self.label}: BatchNorm takes its statistics over the whole batch, but this is one of "
                f"{self.engine.turn.of} parts that take turns; use Overlap(halves=1)"
            )
        parts = self.run(batch_moments, a)
        for axis in reversed(BATCH):  # waited for axis by axis: the second gather sends what the first one merged
            if self.grid.size(axis) > 1:
                parts = merge(comm.all_gather(parts[None], self.grid, axis, label=self.label).wait())
        count, mean, m2 = parts.unbind(0)
        # Reading the count makes the host wait, so it is read only if this place alone has too few values.
        few = a.shape[0] * prod(a.shape[2:]) < 2
        if few and not a.is_meta and bool((count < 2).any()):
            raise ValueError(
                f"{self.label}: BatchNorm in training needs more than one value per channel, but the rows "
                f"and positions of the whole batch are {int(count.max())}; give more rows, or call eval()"
            )
        return Moments(mean, m2 / count, count)

    def sum_gradients(self, sums: Tensor, count: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return db and dw of this place, [2, c], and their sums over all places if the statistics are the batch's."""
        own = total = sums.sum(1)
        if count is not None:
            for axis in reversed(BATCH):
                total = comm.all_reduce(total, self.grid, axis, label=self.label).wait()
        return own, total

    def mean_gradients(self, total: Tensor, weight: Tensor | None, _: Tensor, count: Tensor | None) -> Tensor | None:
        """Return mean(g) and mean(g x^); None for running statistics, which do not depend on the input."""
        return None if count is None else (total if weight is None else total * weight) / count

    @torch.no_grad()
    def _gather_for_update(self, moments: Moments) -> Pending[Tensor] | None:
        """Launch the gather of [2, c] of the channels that this rank stores: the mean and the unbiased variance."""
        mean, var, count = moments
        # A recomputed forward pass must not update the running statistics a second time.
        if count is None or not (self.training and self.track_running_stats) or self.engine.recomputing or mean.is_meta:
            return None
        both = torch.stack([mean, var * count / (count - 1)])
        stored = self.channels.stored
        if stored == self.channels:
            return Pending(lambda: both)
        # Only x and y cut channels, so the storage lacks at most one cut.
        return gather(both, self.site(0), self.channels.axes[-1], len(stored.block(self.grid)))

    @torch.no_grad()
    def _update(self, both: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        # Without a momentum, the running statistics are the plain average over all batches, as in torch.
        share = 1 / self.num_batches_tracked.to(both.dtype) if self.momentum is None else self.momentum
        for held, batch in zip((self.running_mean, self.running_var), both, strict=True):
            running = local_of(held)
            running.copy_(running.to(both.dtype) * (1 - share) + batch * share)


def batch_moments(a: Tensor) -> Tensor:
    """Return [3, c]: count, mean and M2 of this place's rows and positions."""
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


class NormalizeChannels(torch.autograd.Function):
    """x^ = (a - mean) rstd; out = x^ w + b, with moments that depend on a, or with given ones."""

    @staticmethod
    def forward(ctx: Any, norm: GroupNorm | BatchNorm, moments: Moments, a: Tensor, *_: nn.Parameter) -> Tensor:
        ctx.norm, ctx.group, ctx.turns = norm, norm.group(*norm.specs), norm.engine.turn.of
        ctx.during, ctx.part = ctx.group.use(), norm.channels.part(norm.grid)
        rstd = torch.rsqrt(moments.var + norm.eps)
        ctx.save_for_backward(a, moments.mean, rstd, moments.count)
        with affine(ctx.group, ctx.part, ctx.turns) as (weight, bias):
            return norm.run(normalize, a, moments.mean, rstd, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        norm: GroupNorm | BatchNorm = ctx.norm
        a, mean, rstd, count = ctx.saved_tensors
        own, total = norm.sum_gradients(norm.run(sums_over_space, dout, a, mean, rstd), count)
        # Backward reads no bias, so only the weight is gathered again.
        with affine(ctx.group.only(ctx.group.members[:1]), ctx.part, ctx.turns) as (weight, _):
            means = norm.mean_gradients(total, weight, a, count)
            da = norm.run(find_da, dout, a, mean, rstd, weight, means)
        stored = zip(ctx.group.members, (own[1], own[0]), strict=False)  # dw, db
        own_rows = [embed(found, ctx.part, member.rows) for member, found in stored]
        add_gradients(ctx.group, own_rows, ctx.turns, ctx.during)
        return (None, None, da, *[None] * (len(ctx.needs_input_grad) - 3))

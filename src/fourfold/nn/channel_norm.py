"""Norms of images whose channels are cut over x and y: what they share, and GroupNorm.

Statistics are taken in the wider of fp32 and the input's dtype, from mean and M2 = sum (a - mean)^2 of parts, merged by
Chan (E8); never as E[a^2] - E[a]^2. With g = dout w:

    GroupNorm  over a group's channels and space, by row
               da = (g - mean(g) - x^ mean(g x^)) rstd
    messages   none where ranks hold whole groups; elsewhere [r, c, 2] is gathered in each pass, over the axes that cut
               through groups alone: mean and M2 of each row's channels, sums of g and g x^
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fourfold import kernels
from fourfold.grid import Grid
from fourfold.layout import Init, Spec
from fourfold.nn.channels import Channels, embed, join, require_block, take, whole_groups, within
from fourfold.nn.layer import Layer
from fourfold.nn.norm import add_gradients
from fourfold.operators import OpContext, once_differentiable
from fourfold.param_group import ParamGroup
from fourfold.policy import Policy


@dataclass(frozen=True, slots=True)
class Affine:
    """out = x^ w + b, with a number of each for every channel; or without either."""

    unit: ParamGroup
    part: range
    """The channels of this rank among those that it stores."""

    @contextmanager
    def using(self, turns: int) -> Iterator[tuple[Tensor | None, Tensor | None]]:
        """The weight and the bias of this rank's channels, for one of so many halves."""
        if not self.unit.members:
            yield None, None
            return
        with self.unit.using(turns=turns) as (weight, *rest):
            bias = take(rest[0], self.part, dim=0) if rest else None
            yield take(weight, self.part, dim=0), bias

    @property
    def weight_alone(self) -> Affine:
        """What backward reads."""
        return Affine(self.unit.only(self.unit.members[:1]), self.part)

    def add_gradients(self, gradients: tuple[Tensor, Tensor], turns: int) -> None:
        stored = zip(self.unit.members, gradients, strict=False)
        add_gradients(self.unit, [embed(found, self.part, member.rows) for member, found in stored], turns)


def along(vector: Tensor, a: Tensor) -> Tensor:
    """[c] or [r, c] -> a shape that broadcasts over the space of a."""
    return vector.view(*vector.shape, *[1] * (a.dim() - 2))


def normalize(a: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    out = (kernels.widen(a) - along(mean, a)) * along(rstd if weight is None else rstd * weight, a)
    return (out if bias is None else out + along(bias, a)).to(a.dtype)


def sums_over_space(dout: Tensor, a: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """[2, r, c]: sums of dout and of dout x^."""
    wide, unit = kernels.widen(dout), (kernels.widen(a) - along(mean, a)) * along(rstd, a)
    space = list(range(2, a.dim()))
    if not space:
        return torch.stack([wide, wide * unit])
    return torch.stack([wide.sum(space), (wide * unit).sum(space)])


def find_da(dout: Tensor, a: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, means: Tensor | None) -> Tensor:
    """(g - mean(g) - x^ mean(g x^)) rstd, from those means; without them the statistics do not depend on a."""
    g = kernels.widen(dout) if weight is None else kernels.widen(dout) * along(weight, a)
    if means is not None:
        unit = (kernels.widen(a) - along(mean, a)) * along(rstd, a)
        g = g - along(means[0], a) - unit * along(means[1], a)
    return (g * along(rstd, a)).to(a.dtype)


class ChannelNorm(Layer):
    """What both norms share: channels cut over axes, a weight and a bias cut like them."""

    def __init__(self, grid: Grid, policy: Policy, channels: Channels, *, affine: bool, bias: bool, eps: float) -> None:
        super().__init__(grid, policy)
        self.channels, self.eps = channels, eps
        for name, there, mean in (("weight", affine, 1.0), ("bias", affine and bias, 0.0)):
            if there:
                self.declare(name, Spec((channels.count,), channels.storage, channels.use, Init(mean=mean)))
            else:
                self.register_parameter(name, None)

    def affine(self) -> Affine:
        return Affine(self.unit(*self.specs), self.channels.part(self.grid))

    def run(self, function: Callable[..., Any], a: Tensor, *args: Any) -> Any:
        # detached: what is computed in a function of its own needs no variant for tensors that want gradients
        return kernels.region(function, a, compiled=self.policy.compile)(a.detach(), *args)


class GroupNorm(ChannelNorm):
    """GroupNorm of [r, c, *space]: ranks that share a group merge what they know of its channels."""

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
        """So many of the cuts leave groups whole; what ranks along the others know must be merged."""
        while whole_groups(self.channels.outer(self.cuts), groups, grid) is None:
            self.cuts -= 1

    def forward(self, a: Tensor) -> Tensor:
        require_block(a, self.channels, self.grid, self.label)
        return NormalizeGroups.apply(self, a, *self.parameters())

    def by_group(self, numbers: Tensor, site: OpContext) -> Tensor:
        """[2, r, c] of this rank's channels -> [2, r, groups, channels of a group], of whole groups."""
        joined = join(numbers.permute(1, 2, 0), self.channels, self.cuts, site)
        return joined.unflatten(1, (-1, self.channels.count // self.groups)).permute(3, 0, 1, 2)

    def by_channel(self, numbers: Tensor) -> Tensor:
        """[..., groups] -> [..., c] of this rank's channels."""
        mine = within(self.channels.block(self.grid), self.channels.outer(self.cuts).block(self.grid))
        return take(numbers.repeat_interleave(self.channels.count // self.groups, -1), mine, dim=-1)


def channel_moments(a: Tensor) -> Tensor:
    """[2, r, c]: mean and M2 over space."""
    wide = kernels.widen(a).flatten(2) if a.dim() > 2 else kernels.widen(a)[:, :, None]
    if wide.numel() == 0:
        return wide.new_zeros(2, *wide.shape[:2])  # torch warns of a variance of nothing
    var, mean = torch.var_mean(wide, 2, correction=0)
    return torch.stack([mean, var * wide.shape[2]])


class NormalizeGroups(torch.autograd.Function):
    """x^ = (a - mean) rstd, with the moments of each row's groups; out = x^ w + b."""

    @staticmethod
    def forward(ctx: Any, norm: GroupNorm, a: Tensor, *_: nn.Parameter) -> Tensor:
        ctx.norm, ctx.affine, ctx.turns = norm, norm.affine(), norm.engine.turn.of
        ctx.site = norm.site(a.shape[0])
        positions = prod(a.shape[2:])
        ctx.size = positions * norm.channels.count // norm.groups
        means, m2s = norm.by_group(norm.run(channel_moments, a), ctx.site)
        mean = means.mean(-1)
        m2 = m2s.sum(-1) + positions * (means - mean[..., None]).square().sum(-1)  # E8
        mean, rstd = norm.by_channel(mean), norm.by_channel(torch.rsqrt(m2 / ctx.size + norm.eps))
        ctx.save_for_backward(a, mean, rstd)
        with ctx.affine.using(ctx.turns) as (weight, bias):
            return norm.run(normalize, a, mean, rstd, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        norm: GroupNorm = ctx.norm
        a, mean, rstd = ctx.saved_tensors
        sums = norm.run(sums_over_space, dout, a, mean, rstd)
        with ctx.affine.weight_alone.using(ctx.turns) as (weight, _):
            of_groups = norm.by_group(sums if weight is None else sums * weight, ctx.site).sum(-1)
            means = norm.by_channel(of_groups / ctx.size)
            da = norm.run(find_da, dout, a, mean, rstd, weight, means)
        ctx.affine.add_gradients((sums[1].sum(0), sums[0].sum(0)), ctx.turns)
        return (None, da, *[None] * (len(ctx.needs_input_grad) - 2))

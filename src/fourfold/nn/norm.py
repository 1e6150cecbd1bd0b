"""LayerNorm and RMSNorm with statistics over the whole feature dim, also where it is cut.

Statistics are taken in the wider of fp32 and the input's dtype. With k features cut over y:

    RMSNorm    x^ = a / sqrt(mean(a^2) + eps)               one all-reduce of sums of squares
    LayerNorm  x^ = (a - mean) / sqrt(var + eps)            one all-gather of (mean, M2), merged (E8)
    backward   da = (g - mean(g) - x^ mean(g x^)) / std     one all-reduce; g = dout w; no mean(g) for RMSNorm
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fourfold import comm
from fourfold.grid import Grid
from fourfold.layout import FEATURES, WHOLE, Init, Policy, Spec, inner, rest
from fourfold.nn.layer import Layer
from fourfold.nn.linear import require_divisible
from fourfold.product import Unit


@dataclass(frozen=True, slots=True)
class NormSpec:
    """How to normalise: the weights, the number of features, the axis that cuts them."""

    unit: Unit
    features: int
    axis: str | None
    eps: float

    def sum(self, parts: Tensor) -> Tensor:
        if self.axis is None:
            return parts
        return comm.all_reduce(parts, self.unit.grid, self.axis, label=self.unit.label, owned=True).wait()

    def gather(self, parts: Tensor) -> Tensor:
        """[...] -> [ranks, ...]"""
        if self.axis is None:
            return parts[None]
        return comm.all_gather(parts[None], self.unit.grid, self.axis, label=self.unit.label).wait()

    def weight(self) -> Tensor:
        (weight,) = self.unit.only(self.unit.members[:1]).gather()
        return weight


class RMSNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: NormSpec, a: Tensor, *_: nn.Parameter) -> Tensor:
        (weight,) = spec.unit.gather()
        wide = widen(a)
        rstd = torch.rsqrt(spec.sum(wide.square().sum(-1)) / spec.features + spec.eps)
        ctx.spec = spec
        ctx.save_for_backward(a, rstd)
        return (wide * rstd[..., None] * weight).to(a.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        spec: NormSpec = ctx.spec
        a, rstd = ctx.saved_tensors
        unit_a, wide = widen(a) * rstd[..., None], widen(dout)
        scatter(spec.unit, [wide * unit_a])
        g = wide * spec.weight()
        mean = spec.sum((g * unit_a).sum(-1)) / spec.features
        da = rstd[..., None] * (g - unit_a * mean[..., None])
        return None, da.to(a.dtype), None


class LayerNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spec: NormSpec, a: Tensor, *_: nn.Parameter) -> Tensor:
        weight, *bias = spec.unit.gather()
        wide = widen(a)
        here = wide.mean(-1)
        means, m2s = spec.gather(torch.stack([here, (wide - here[..., None]).square().sum(-1)])).unbind(1)
        mean = means.mean(0)
        m2 = m2s.sum(0) + (means - mean).square().sum(0) * a.shape[-1]  # E8: Chan's merge of equal parts
        rstd = torch.rsqrt(m2 / spec.features + spec.eps)
        ctx.spec = spec
        ctx.save_for_backward(a, mean, rstd)
        out = (wide - mean[..., None]) * rstd[..., None] * weight
        return (out + bias[0] if bias else out).to(a.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        spec: NormSpec = ctx.spec
        a, mean, rstd = ctx.saved_tensors
        unit_a, wide = (widen(a) - mean[..., None]) * rstd[..., None], widen(dout)
        scatter(spec.unit, [wide * unit_a, wide])
        g = wide * spec.weight()
        sums = spec.sum(torch.stack([g.sum(-1), (g * unit_a).sum(-1)])) / spec.features
        da = rstd[..., None] * (g - sums[0][..., None] - unit_a * sums[1][..., None])
        return (None, da.to(a.dtype), *[None] * len(spec.unit.members))


def widen(a: Tensor) -> Tensor:
    return a.to(torch.promote_types(a.dtype, torch.float32))


def scatter(unit: Unit, by_token: list[Tensor]) -> None:
    """Sum over tokens, then reduce over z, the gradients of those members that are trained."""
    trained = [
        (member, gradient)
        for member, gradient in zip(unit.members, by_token, strict=False)
        if member.parameter.requires_grad
    ]
    if trained:
        gradients = [g.sum(tuple(range(g.dim() - 1))) for _, g in trained]
        unit.only([member for member, _ in trained]).scatter(gradients)


class Norm(Layer):
    """LayerNorm or RMSNorm of tokens at rest, features cut over y."""

    def __init__(
        self, grid: Grid, policy: Policy, features: int, *, kind: str = "rms", bias: bool = False, eps: float = 1e-5
    ) -> None:
        super().__init__(grid, policy)
        require_divisible(self, "features", features, y=grid.size("y"))
        if kind not in ("rms", "layer"):
            raise ValueError(f"kind={kind!r} is none of 'rms', 'layer'")
        if kind == "rms" and bias:
            raise ValueError("RMSNorm has no bias; use kind='layer' or bias=False")
        self.features, self.kind, self.eps = features, kind, eps
        use = rest(policy.activations)
        self.declare("weight", Spec((features,), FEATURES, use, Init(mean=1.0)))
        if bias:
            self.declare("bias", Spec((features,), FEATURES, use))

    def forward(self, a: Tensor) -> Tensor:
        function = RMSNormFunction if self.kind == "rms" else LayerNormFunction
        spec = NormSpec(self.unit(*self.specs), self.features, "y", self.eps)
        return function.apply(spec, a, *self.parameters())


class HeadNorm(Layer):
    """RMSNorm of each head by itself, inside attention: one weight per head dim, shared by all heads."""

    def __init__(self, grid: Grid, policy: Policy, head_dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(grid, policy)
        self.eps = eps
        self.declare("weight", Spec((head_dim,), WHOLE, inner(policy.activations), Init(mean=1.0)))

    def forward(self, a: Tensor) -> Tensor:
        spec = NormSpec(self.unit("weight"), a.shape[-1], None, self.eps)
        return RMSNormFunction.apply(spec, a, self.weight)

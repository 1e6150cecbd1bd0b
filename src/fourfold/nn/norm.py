"""LayerNorm and RMSNorm with statistics over the whole feature dim, even if it is cut.

Statistics are taken in the wider of fp32 and the input's dtype. With k features cut over y:

    RMSNorm    x^ = a / sqrt(mean(a^2) + eps)               one all-reduce of sums of squares
    LayerNorm  x^ = (a - mean) / sqrt(var + eps)            one all-gather of (mean, M2), merged (E8)
    backward   da = (g - mean(g) - x^ mean(g x^)) / std     one all-reduce; g = dout w; no mean(g) for RMSNorm
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fourfold import comm, kernels
from fourfold.grid import Grid
from fourfold.layout import RESIDUAL_VECTOR, WHOLE, Init, Spec, inner, rest
from fourfold.nn.layer import Layer, add_gradients
from fourfold.nn.linear import require_divisible
from fourfold.operators import once_differentiable
from fourfold.param_group import ParamGroup
from fourfold.policy import Policy


class NormSpec:
    """How to normalise: the weights, the kind, the number of features and the axis that cuts them."""

    def __init__(
        self, group: ParamGroup, kind: str, features: int, axis: str | None, eps: float, shift: float = 0.0
    ) -> None:
        """`shift` is added to the weight. It is 1 for models such as Gemma, which store the weight minus 1."""
        self.group, self.kind, self.features, self.axis, self.eps, self.shift = group, kind, features, axis, eps, shift
        self.weight = group.only(group.members[:1])
        """Backward reads no bias, so only the weight is gathered again."""
        self.whole = axis is None or group.grid.size(axis) == 1
        """Whether all features are on this rank."""

    def shifted(self, weight: Tensor) -> Tensor:
        return kernels.widen(weight) + self.shift if self.shift else weight

    def run(self, function: Callable[..., Any], a: Tensor, *args: Any) -> Any:
        # Detached, so that torch.compile needs no second variant for tensors that require gradients.
        return kernels.region(function, a, compiled=self.group.policy.compile)(a.detach(), *args)

    def sum(self, parts: Tensor) -> Tensor:
        # Waited for at once: the next line of every caller reads the sum. One number per token travels.
        return comm.all_reduce(parts, self.group.grid, self.axis or "y", label=self.group.label, owned=True).wait()

    def statistics(self, a: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the mean (for LayerNorm) and 1 / deviation over the features of all ranks."""
        if self.kind == "rms":
            return None, torch.rsqrt(self.sum(self.run(kernels.sum_of_squares, a)) / self.features + self.eps)
        parts = self.run(kernels.layer_statistics, a)
        parts = comm.all_gather(parts[None], self.group.grid, self.axis or "y", label=self.group.label).wait()
        means, m2s = parts.unbind(1)
        mean = means.mean(0)
        m2 = m2s.sum(0) + (means - mean).square().sum(0) * a.shape[-1]  # E8: Chan's merge of equal parts
        return mean, torch.rsqrt(m2 / self.features + self.eps)

    def forward_whole(
        self, a: Tensor, weight: Tensor, bias: Tensor | None, delta: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return a + delta, out, mean and rstd, from torch's fused kernel where it is exact enough."""
        if self._fused(a):
            total = a if delta is None else a + delta
            if self.kind == "layer":
                return total, *torch.native_layer_norm(total, [a.shape[-1]], weight, bias, self.eps)
            out, rstd = torch.ops.aten._fused_rms_norm(total, [a.shape[-1]], weight, self.eps)
            return total, out, None, rstd
        options = (weight, self.eps) if self.kind == "rms" else (weight, bias, self.eps)
        if delta is None:
            norm = kernels.rms_norm if self.kind == "rms" else kernels.layer_norm
            total, (out, *mean, rstd) = a, self.run(norm, a, *options)
        else:
            norm = kernels.add_rms_norm if self.kind == "rms" else kernels.add_layer_norm
            total, out, *mean, rstd = self.run(norm, a, delta.detach(), *options)
        return total, out, mean[0] if mean else None, rstd

    def backward_whole(
        self, dout: Tensor, a: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, dtotal: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return da, dw and db."""
        if not self._fused(a):
            return self.run(kernels.norm_backward, dout, a, mean, rstd, weight, dtotal)
        wide = a.dtype.itemsize >= 4  # in half precision the kernel would round the sums over tokens
        # before there is a da, because these need several times its memory
        sums = None if wide else kernels.norm_weight_sums(dout, a, mean, rstd)
        if mean is None:
            backward = torch.ops.aten._fused_rms_norm_backward
            da, dw = backward(dout, a, [a.shape[-1]], rstd, weight, [True, wide])
            db = None
        else:
            backward = torch.ops.aten.native_layer_norm_backward
            da, dw, db = backward(dout, a, [a.shape[-1]], mean, rstd, weight, weight, [True, wide, wide])
        if sums is not None:
            dw, db = sums
        return da if dtotal is None else da.add_(dtotal), dw, db

    def _fused(self, a: Tensor) -> bool:
        """Return whether torch's kernel is used: not for half precision on the CPU, where it rounds the statistics."""
        if self.group.policy.compile or self.shift:  # a shifted weight is in fp32, wider than its input
            return False
        return a.is_cuda or (self.kind == "layer" and a.dtype.itemsize >= 4)


class NormFunction(torch.autograd.Function):
    """The sum of the residual stream and the norm that reads it, as one function, since both only pass over memory.

        total = a + delta; x^ = (total - mean) rstd; out = x^ w + b

    a is [m, k/y] or [..., k]; w and b are [k/y], gathered over z. Without a delta, total is a itself.
    """

    @staticmethod
    def forward(
        ctx: Any, spec: NormSpec, a: Tensor, delta: Tensor | None, *_: nn.Parameter
    ) -> tuple[Tensor, Tensor] | Tensor:
        group, engine = spec.group, spec.group.engine
        ctx.spec, ctx.turns, ctx.during = spec, engine.turn.of, group.use()
        held = engine.prefetcher.take(group, ctx.turns)
        weight, *rest = held.value
        bias, weight = rest[0] if rest else None, spec.shifted(weight)
        if spec.whole:
            total, out, mean, rstd = spec.forward_whole(a, weight, bias, delta)
        else:
            total = a if delta is None else a + delta
            mean, rstd = spec.statistics(total)
            out = spec.run(kernels.normalize, total, mean, rstd, weight, bias)
        engine.prefetcher.release(group, held)
        ctx.set_materialize_grads(False)  # a zero gradient of an unused output would cost a pass over memory
        ctx.save_for_backward(total, mean, rstd)
        return out if delta is None else (total, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        spec: NormSpec = ctx.spec
        total, mean, rstd = ctx.saved_tensors
        dtotal, dout = (None, *gradients) if len(gradients) == 1 else gradients
        dout = torch.zeros_like(total) if dout is None else dout  # only the sum was used, not its norm
        prefetcher = spec.group.engine.prefetcher
        held = prefetcher.take(spec.weight, ctx.turns)
        weight = spec.shifted(held.value[0])
        if spec.whole:
            da, dw, db = spec.backward_whole(dout, total, mean, rstd, weight, dtotal)
        else:
            sums, dw, db = spec.run(kernels.norm_sums, dout, total, mean, rstd, weight)
            da = spec.run(kernels.norm_da, dout, total, mean, rstd, weight, spec.sum(sums) / spec.features)
            da = da if dtotal is None else da.add_(dtotal)  # the gradient that passes by the norm
        prefetcher.release(spec.weight, held)
        add_gradients(spec.group, [dw, db], ctx.turns, ctx.during)
        # a and delta are summands of one total, so they have the same gradient.
        return (None, da, None if len(gradients) == 1 else da, *[None] * len(spec.group.members))


class _NormLayer(Layer):
    """The base class of both norms: a weight, a number that keeps the deviation from 0, and the spec that is kept."""

    def __init__(self, grid: Grid, policy: Policy, eps: float, shift: float) -> None:
        super().__init__(grid, policy)
        self.eps, self.shift = eps, shift
        self._known: NormSpec | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_known": None}

    def _spec(self, kind: str, features: int, axis: str | None) -> NormSpec:
        group, known = self.group(*self.specs), self._known
        if known is None or known.group is not group or (known.eps, known.shift) != (self.eps, self.shift):
            known = self._known = NormSpec(group, kind, features, axis, self.eps, self.shift)
        return known


class Norm(_NormLayer):
    """LayerNorm or RMSNorm of tokens at rest, with features cut over y."""

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        features: int,
        *,
        kind: str = "rms",
        bias: bool = False,
        eps: float = 1e-5,
        shift: float = 0.0,
    ) -> None:
        super().__init__(grid, policy, eps, shift)
        require_divisible(self, "features", features, ("y",))
        if kind not in ("rms", "layer"):
            raise ValueError(f"kind={kind!r} is none of 'rms', 'layer'")
        if kind == "rms" and bias:
            raise ValueError("RMSNorm has no bias; use kind='layer' or bias=False")
        self.features, self.kind = features, kind
        use = rest(policy.activations)
        self.declare("weight", Spec((features,), RESIDUAL_VECTOR, use, Init(mean=1.0)))
        self.declare("bias", Spec((features,), RESIDUAL_VECTOR, use) if bias else None)

    def spec(self) -> NormSpec:
        return self._spec(self.kind, self.features, "y")

    def forward(self, a: Tensor) -> Tensor:
        spec = self.spec()
        return NormFunction.apply(spec, a, None, *spec.group.parameters)

    def add(self, a: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a + delta, and its norm."""
        if delta is None:
            return a, self(a)
        spec = self.spec()
        return NormFunction.apply(spec, a, delta, *spec.group.parameters)


class HeadNorm(_NormLayer):
    """RMSNorm of each head by itself, inside attention. Its weight has head_dim elements and serves all heads."""

    def __init__(self, grid: Grid, policy: Policy, head_dim: int, *, eps: float = 1e-5, shift: float = 0.0) -> None:
        super().__init__(grid, policy, eps, shift)
        self.declare("weight", Spec((head_dim,), WHOLE, inner(policy.activations), Init(mean=1.0)))

    def spec(self) -> NormSpec:
        return self._spec("rms", self.specs["weight"].shape[0], None)

    def forward(self, a: Tensor) -> Tensor:
        spec = self.spec()
        return NormFunction.apply(spec, a, None, *spec.group.parameters)

"""Local computation between collectives: pure functions on plain tensors.

Nothing here depends on grids, ledgers or parameters, so `region` can compile each function into one kernel or a few.
Statistics and sums are computed in the wider of fp32 and the input's dtype, and results are cast back. "Local features"
are those that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


def region(function: Callable[..., Any], like: Tensor, *, compiled: bool) -> Callable[..., Any]:
    """Return the function, compiled if `compiled`; a dry run on the meta device has nothing to compile."""
    return _compiled(function) if compiled and not like.is_meta else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # One norm sees rows and heads, training and evaluation, several batch sizes: more kinds of input than torch's 8.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, fullgraph=True)


def widen(a: Tensor) -> Tensor:
    return a.to(torch.promote_types(a.dtype, torch.float32))


def sum_tokens(dout: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradients of biases."""
    return dout.sum(0, dtype=dtype)


# --- norms: x^ = (a - mean) rstd, out = x^ w + b; RMSNorm has neither mean nor bias


def layer_statistics(a: Tensor) -> Tensor:
    """Return [2, ..., 1]: mean and sum of squared deviations (M2) of the local features."""
    wide = widen(a)
    mean = wide.mean(-1, keepdim=True)
    return torch.stack([mean, (wide - mean).square().sum(-1, keepdim=True)])


def sum_of_squares(a: Tensor) -> Tensor:
    # a norm needs one pass and does not write the squares to memory
    return torch.linalg.vector_norm(widen(a), dim=-1, keepdim=True).square()


def normalize(a: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = widen(a) if mean is None else widen(a) - mean
    out = wide * rstd * weight
    return (out if bias is None else out + bias).to(a.dtype)


def layer_norm(a: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, mean and rstd of a LayerNorm whose features are all local."""
    mean, m2 = layer_statistics(a).unbind(0)
    rstd = torch.rsqrt(m2 / a.shape[-1] + eps)
    return normalize(a, mean, rstd, weight, bias), mean, rstd


def rms_norm(a: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return out and rstd of an RMSNorm whose features are all local."""
    rstd = torch.rsqrt(sum_of_squares(a) / a.shape[-1] + eps)
    return normalize(a, None, rstd, weight, None), rstd


def add_layer_norm(
    a: Tensor, delta: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a + delta and its `layer_norm`."""
    total = a + delta
    return total, *layer_norm(total, weight, bias, eps)


def add_rms_norm(a: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return a + delta and its `rms_norm`."""
    total = a + delta
    return total, *rms_norm(total, weight, eps)


def norm_weight_sums(dout: Tensor, a: Tensor, mean: Tensor | None, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return dw and db, sums over tokens."""
    return _over_tokens(widen(dout), _unit(a, mean, rstd))


def norm_sums(
    dout: Tensor, a: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, with g = dout w, the sums over local features of g x^ (and g), then dw and db, sums over tokens."""
    unit, wide = _unit(a, mean, rstd), widen(dout)
    return _over_features(wide * weight, unit, mean), *_over_tokens(wide, unit)


def norm_da(dout: Tensor, a: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, means: Tensor) -> Tensor:
    """Return da = (g - x^ mean(g x^) - mean(g)) rstd, from the means over all features."""
    return _da(widen(dout) * weight, _unit(a, mean, rstd), rstd, means).to(a.dtype)


def norm_backward(
    dout: Tensor, a: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, dtotal: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return da, dw and db of a norm whose features are all local; `dtotal` is the gradient that bypasses the norm."""
    unit, wide = _unit(a, mean, rstd), widen(dout)
    g = wide * weight
    da = _da(g, unit, rstd, _over_features(g, unit, mean) / a.shape[-1]).to(a.dtype)
    return da if dtotal is None else da + dtotal, *_over_tokens(wide, unit)


def _over_features(g: Tensor, unit: Tensor, mean: Tensor | None) -> Tensor:
    sums = [(g * unit).sum(-1, keepdim=True)]
    if mean is not None:
        sums.append(g.sum(-1, keepdim=True))
    return torch.stack(sums)


def _over_tokens(wide: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    tokens = tuple(range(wide.dim() - 1))
    return (wide * unit).sum(tokens), wide.sum(tokens)


def _da(g: Tensor, unit: Tensor, rstd: Tensor, means: Tensor) -> Tensor:
    rest = g - unit * means[0]
    for mean_of_g in means[1:]:
        rest = rest - mean_of_g
    return rest * rstd


def _unit(a: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return (widen(a) if mean is None else widen(a) - mean) * rstd


# --- activations


def gelu(up: Tensor) -> Tensor:
    return functional.gelu(up, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return functional.silu(gate) * up


def rotate(a: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings, which rotate the first half of a head against the second.

    a [rows, seq, heads, head_dim], tables [seq, 1, head_dim] or [rows, seq, 1, head_dim]
    """
    first, second = a.chunk(2, dim=-1)
    return (a * cos + torch.cat([-second, first], dim=-1) * sin).to(a.dtype)


# --- loss: the first `held` columns of the logits belong to the ids from `first` on, the others are padding


def loss_statistics(logits: Tensor, targets: Tensor, first: int, held: int) -> Tensor:
    """Return [3, m] over the local columns: max, sum of exp(l - max), and the target's logit or 0."""
    logits = logits[:, :held]
    if held == 0:
        # a finite number, because merging with other ranks would compute inf - inf
        nothing = widen(logits.new_zeros(3, len(targets)))
        nothing[0] = torch.finfo(nothing.dtype).min
        return nothing
    top = widen(logits.amax(1))
    column, here = _column(targets, first, held)
    target = widen(logits.gather(1, column[:, None])[:, 0]).masked_fill(~here, 0)
    return torch.stack([top, (logits - top[:, None]).exp_().sum(1), target])


def dlogits(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, first: int, held: int) -> Tensor:
    """Return (exp(l - lse) - onehot_t) scale for each token, 0 in padding; one pass when compiled."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    hot = columns[None] == (targets - first)[:, None]
    found = ((logits - lse[:, None]).exp() - hot.to(lse.dtype)) * scale[:, None]
    return torch.where(columns[None] < held, found, 0).to(logits.dtype)


def dlogits_eager(logits: Tensor, targets: Tensor, lse: Tensor, scale: Tensor, first: int, held: int) -> Tensor:
    """Return `dlogits`, with one wide buffer and no mask of the size of the logits: eager operations are passes."""
    found = (logits[:, :held] - lse[:, None]).exp_()
    if held:
        column, here = _column(targets, first, held)
        found.scatter_add_(1, column[:, None], -here.to(found.dtype)[:, None])
    found.mul_(scale[:, None])
    if padding := logits.shape[1] - held:
        found = functional.pad(found, (0, padding))  # copies even if there is nothing to pad, hence the check
    return found.to(logits.dtype)


def dlogits_normalized(logp: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Return `dlogits` from log-probabilities over the whole vocabulary."""
    found = logp.exp().mul_(scale[:, None])
    return found.scatter_add_(1, targets.clamp(min=0, max=logp.shape[1] - 1)[:, None], -scale[:, None])


def _column(targets: Tensor, first: int, held: int) -> tuple[Tensor, Tensor]:
    """Return the local column of each target, 0 if another rank holds it, and whether this rank holds it."""
    column = targets - first
    here = (column >= 0) & (column < held)
    return column.masked_fill(~here, 0), here


# --- a whole block, where nothing travels inside it


class BlockSizes(NamedTuple):
    """What a transformer block computes: its kind of norm, and the sizes of its heads and of its hidden layers."""

    norm: str
    eps: float
    head_dim: int
    qkv: tuple[int, ...]
    """Columns of q, k and v."""
    hidden: tuple[int, ...]
    """Columns of gate and up, or of up alone."""


Affine = tuple[Tensor, Tensor | None]
"""A weight and its bias."""


def block(
    a: Tensor,
    delta: Tensor | None,
    weights: tuple[Affine, Affine, Affine, Affine, Affine, Affine],
    sizes: BlockSizes,
    rows: int,
    rope: tuple[Tensor, Tensor] | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the two parts of the residual stream after a block, from those before it.

    `weights` are those of the norm, of q, k and v, and of the output of attention, then of the norm, of gate and up,
    and of down of the MLP.
    """
    norm_1, qkv, out, norm_2, up, down = weights
    total = a if delta is None else a + delta
    q, k, v = functional.linear(_block_norm(total, norm_1, sizes), *qkv).split(sizes.qkv, dim=1)
    q, k, v = (part.reshape(rows, -1, part.shape[1] // sizes.head_dim, sizes.head_dim) for part in (q, k, v))
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    mixed = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
    total = total + functional.linear(mixed.transpose(1, 2).reshape(total.shape[0], -1), *out)
    parts = functional.linear(_block_norm(total, norm_2, sizes), *up).split(sizes.hidden, dim=1)
    return total, functional.linear(gelu(*parts) if len(parts) == 1 else swiglu(*parts), *down)


def _block_norm(a: Tensor, affine: Affine, sizes: BlockSizes) -> Tensor:
    if sizes.norm == "rms":
        return rms_norm(a, affine[0], sizes.eps)[0]
    return layer_norm(a, *affine, sizes.eps)[0]

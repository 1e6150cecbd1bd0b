"""Local computation between collectives: pure functions on plain tensors.

Nothing here depends on grids, ledgers or parameters, so `region` can compile each function into one kernel or a few.
Statistics and sums are computed in the wider of fp32 and the input's dtype, and results are cast back. "Local features"
are those that this rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, cached_property
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


def region(function: Callable[..., Any], like: Tensor, *, compiled: bool) -> Callable[..., Any]:
    """Return the function, compiled if `compiled`; a dry run on the meta device has nothing to compile."""
    return _compiled(function) if compiled and not like.is_meta else function


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    allow_recompiling()
    return torch.compile(function, fullgraph=True)


@cache
def compiled_for(function: Any, kind: Hashable) -> Callable[..., Any]:
    """Return a function compiled for one value of its keyword argument `kind`, with a cache of its own.

    torch takes numbers and sizes that differ between two calls of one function for variable ones. It would compile for
    any width of a head once there are two kinds, so each kind has a function of its own name.
    """
    allow_recompiling()
    name = f"{function.__name__}_{abs(hash(kind)):x}"
    own = FunctionType(function.__code__.replace(co_name=name), function.__globals__, name, function.__defaults__)
    own.__kwdefaults__ = {"kind": kind}
    return torch.compile(own, fullgraph=True)


def allow_recompiling() -> None:
    """Let torch compile a function for more kinds of input than its usual 8.

    One norm sees rows and heads, training and evaluation, and several batch sizes.
    """
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)


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
    # torch's own statistics: one kernel computes them and the result, where a tensor of both would need a second one
    variance, mean = torch.var_mean(widen(a), dim=-1, correction=0, keepdim=True)
    rstd = torch.rsqrt(variance + eps)
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
    unit, g = _unit(a, mean, rstd), widen(dout)
    of_weight, of_bias = _over_tokens(g, unit)
    g = g * weight
    return _over_features(g, unit, mean), of_weight, of_bias


def norm_da(dout: Tensor, a: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, means: Tensor) -> Tensor:
    """Return da = (g - x^ mean(g x^) - mean(g)) rstd, from the means over all features."""
    return _da(widen(dout) * weight, _unit(a, mean, rstd), rstd, means).to(a.dtype)


def norm_backward(
    dout: Tensor, a: Tensor, mean: Tensor | None, rstd: Tensor, weight: Tensor, dtotal: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return da, dw and db of a norm whose features are all local; `dtotal` is the gradient that bypasses the norm."""
    # No more than three tensors of the wider dtype exist at a time, as in the two functions above.
    unit, g = _unit(a, mean, rstd), widen(dout)
    sums = _over_tokens(g, unit)
    g = g * weight
    means = [(g * unit).mean(-1, keepdim=True)]
    if mean is not None:
        means.append(g.mean(-1, keepdim=True))
    da = _da(g, unit, rstd, means).to(a.dtype)
    return da if dtotal is None else da + dtotal, *sums


def _over_features(g: Tensor, unit: Tensor, mean: Tensor | None) -> Tensor:
    sums = [(g * unit).sum(-1, keepdim=True)]
    if mean is not None:
        sums.append(g.sum(-1, keepdim=True))
    return torch.stack(sums)


def _over_tokens(wide: Tensor, unit: Tensor) -> tuple[Tensor, Tensor]:
    tokens = tuple(range(wide.dim() - 1))
    return (wide * unit).sum(tokens), wide.sum(tokens)


def _da(g: Tensor, unit: Tensor, rstd: Tensor, means: Tensor | Sequence[Tensor]) -> Tensor:
    """Return (g - x^ mean(g x^) - mean(g)) rstd in the memory of g, which nobody else reads."""
    g.addcmul_(unit, means[0], value=-1)
    for mean_of_g in means[1:]:
        g -= mean_of_g
    return g.mul_(rstd)


def _unit(a: Tensor, mean: Tensor | None, rstd: Tensor) -> Tensor:
    return (widen(a) if mean is None else widen(a) - mean) * rstd


# --- dropout

GOLDEN = -7046029254386353131
"""2^64 divided by the golden ratio, odd, as a signed number: the step of SplitMix64 from one state to the next."""
MIX = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))
"""Shift and factor of each round of SplitMix64's finalizer; the last round has no factor."""
DROP_BLOCK = 1 << 22
"""Elements whose random numbers exist at the same time: 32 MiB each of two buffers."""


def drop(a: Tensor, probability: float, position: Tensor, key: Tensor) -> Tensor:
    """Set elements to 0 with this probability and scale the others so that the mean stays the same.

    Element i is kept or not by the i-th number of SplitMix64, seeded with (key, step, micro-step); `position` is
    [step, micro-step]. Nothing depends on a state, so any order of calls draws the same.
    """
    seed = _mix(_mix(position[0] + key) + position[1])
    if a.is_meta:
        keep = torch.empty_like(a, dtype=torch.bool)
    elif torch.compiler.is_compiling():
        keep = _kept(0, a.numel(), seed, probability).view(a.shape)
    else:
        starts = range(0, a.numel(), DROP_BLOCK)
        parts = [_kept(start, min(start + DROP_BLOCK, a.numel()), seed, probability) for start in starts]
        keep = (parts[0] if len(parts) == 1 else torch.cat(parts or [a.new_empty(0, dtype=torch.bool)])).view(a.shape)
    return torch.where(keep, a * (1 / (1 - probability)), 0)


def _kept(start: int, stop: int, seed: Tensor, probability: float) -> Tensor:
    """Return which of the elements from `start` to `stop` are kept."""
    numbers = _mix(torch.arange(start, stop, device=seed.device) * GOLDEN + seed)
    return (numbers & (1 << 24) - 1) >= round(probability * (1 << 24))


def _mix(state: Tensor) -> Tensor:
    for shift, factor in MIX:
        # torch shifts signed numbers, so the copies of the sign are masked out
        state = (state ^ (state >> shift & (1 << 64 - shift) - 1)) * factor
    return state


# --- activations


def gelu(up: Tensor) -> Tensor:
    return functional.gelu(up, approximate="tanh")


def swiglu(gate_and_up: Tensor) -> Tensor:
    """Return silu(gate) * up from both side by side: compiled, backward writes both gradients side by side at once."""
    gate, up = gate_and_up.chunk(2, dim=1)
    return functional.silu(gate) * up


def gelu_backward(dout: Tensor, up: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dout, up, approximate="tanh")


def swiglu_backward(dout: Tensor, gate_and_up: Tensor) -> Tensor:
    """Return the gradients of gate and up side by side."""
    gate, up = gate_and_up.chunk(2, dim=1)
    return torch.cat([torch.ops.aten.silu_backward(dout * up, gate), dout * functional.silu(gate)], dim=1)


# --- attention on whole sequences: heads are [rows, seq, heads, head_dim]


class HeadKind(NamedTuple):
    """What distinguishes compiled attention, beside the number of tokens."""

    head_dim: int
    widths: tuple[int, ...]
    """The columns of q, k and v on this rank."""
    grouped: bool
    """Whether several query heads read one KV head. A field, because torch may compile for any widths."""


def split_heads(qkv: Tensor, rows: int, kind: HeadKind) -> list[Tensor]:
    """Return the heads of q, k and v, which lie side by side in [tokens, columns]."""
    parts = qkv.split(kind.widths, dim=1)
    return [part.reshape(rows, len(qkv) // rows, -1, kind.head_dim) for part in parts]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: tuple[Tensor, Tensor] | None,
    dropout: float = 0.0,
    *,
    kind: HeadKind,
) -> Tensor:
    """Return what the heads read of their rows, side by side: [tokens, columns]."""
    if rope is not None:
        q, k = rotate(q, *rope), rotate(k, *rope)
    rows, seq, *_ = q.shape
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    if q.is_meta:  # a dry run keeps what the fused kernel keeps; torch would choose the unfused one on meta
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out = fused(q, k, v, dropout, True)[0]
    else:
        options = dict(is_causal=True, enable_gqa=kind.grouped, dropout_p=dropout)
        out = functional.scaled_dot_product_attention(q, k, v, **options)
    return out.transpose(1, 2).reshape(rows * seq, -1)


def attend_from(qkv: Tensor, rows: int, rope: tuple[Tensor, Tensor] | None, *, kind: HeadKind) -> Tensor:
    """Return `attend` of the heads in qkv: compiled, backward writes the gradients of q, k and v side by side."""
    q, k, v = split_heads(qkv, rows, kind)
    return attend(q, k, v, rope, kind=kind)


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
    if held == logits.shape[1]:
        return found.to(logits.dtype)
    padded = torch.empty_like(logits)  # written once: the cast and the padding are one pass
    padded[:, :held] = found
    padded[:, held:] = 0
    return padded


def dlogits_normalized(logp: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """Return `dlogits` from log-probabilities over the whole vocabulary."""
    found = logp.exp().mul_(scale[:, None])
    return found.scatter_add_(1, targets.clamp(min=0, max=logp.shape[1] - 1)[:, None], -scale[:, None])


def _column(targets: Tensor, first: int, held: int) -> tuple[Tensor, Tensor]:
    """Return the local column of each target, 0 if another rank holds it, and whether this rank holds it."""
    column = targets - first
    here = (column >= 0) & (column < held)
    return column.masked_fill(~here, 0), here


# --- products of experts


class RowGroups:
    """Which rows of a tensor belong to which expert; the rows of each stand together."""

    def __init__(self, ends: Tensor, rows: int) -> None:
        """`ends` says where the rows of each expert end, [E] in int32; the last at `rows`."""
        self.ends, self.rows = ends, rows

    @cached_property
    def counts(self) -> list[int]:
        """The rows of each expert, which the host reads; of a dry run, which has no numbers, equally many."""
        if self.ends.is_meta or not self.rows:
            experts = len(self.ends)
            return [self.rows // experts + (expert < self.rows % experts) for expert in range(experts)]
        ends = self.ends.tolist()
        return [end - begin for begin, end in pairwise([0, *ends])]


def grouped(a: Tensor, factors: Sequence[Tensor], groups: RowGroups) -> Tensor:
    """Return a_e b_e for every expert e and factor b, side by side: a [P, k] by expert, b [E, k, n] -> [P, sum n]."""
    if not a.is_cpu:  # a dry run takes the memory of a GPU
        outs = [_product(a, b, groups) for b in factors]
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    widths = [b.shape[2] for b in factors]
    out = a.new_empty(len(a), sum(widths))
    for b, columns in zip(factors, out.split(widths, dim=1), strict=True):
        _multiply_into(columns, a, b, groups)
    return out


def grouped_sum(a: Tensor, factors: Sequence[Tensor], groups: RowGroups) -> Tensor:
    """Return the sum of a_e b_e over the factors b, each for its own columns of a: [P, sum k], [E, k, n] -> [P, n]."""
    parts = zip(a.split([b.shape[1] for b in factors], dim=1), factors, strict=True)
    if not a.is_cpu:
        first, *others = (_product(part, b, groups) for part, b in parts)
        for other in others:
            first += other
        return first
    out = a.new_empty(len(a), factors[0].shape[2])
    for place, (part, b) in enumerate(parts):
        _multiply_into(out, part, b, groups, add=place > 0)
    return out


def grouped_weights(dout: Tensor, a: Tensor, groups: RowGroups) -> Tensor:
    """Return dout_e^T a_e for every expert e: dout [P, n] and a [P, k] by expert -> [E, n, k]."""
    if _has_grouped(dout, a):
        return functional.grouped_mm(dout.t(), a, offs=groups.ends)
    out = a.new_empty(len(groups.ends), dout.shape[1], a.shape[1])
    for d, part, into in zip(dout.split(groups.counts), a.split(groups.counts), out, strict=True):
        torch.mm(d.t(), part, out=into)
    return out


def _product(a: Tensor, b: Tensor, groups: RowGroups) -> Tensor:
    if _has_grouped(a, b):
        return functional.grouped_mm(a, b, offs=groups.ends)
    out = a.new_empty(len(a), b.shape[2])
    _multiply_into(out, a, b, groups)
    return out


def _multiply_into(out: Tensor, a: Tensor, b: Tensor, groups: RowGroups, *, add: bool = False) -> None:
    """Write a_e b_e into the rows of every expert e, or add it to them."""
    for part, factor, into in zip(a.split(groups.counts), b, out.split(groups.counts), strict=True):
        if add:
            into.addmm_(part, factor)
        else:
            torch.mm(part, factor, out=into)


def multiplies_at_once(dtype: torch.dtype, *widths: int) -> bool:
    """Return whether a GPU has one kernel for the products of all experts, of matrices with rows of these widths.

    The kernel reads rows that begin at multiples of 16 bytes. Without it the host must know how many rows each has.
    """
    return dtype in (torch.bfloat16, torch.float16) and not any(width * dtype.itemsize % 16 for width in widths)


def _has_grouped(*factors: Tensor) -> bool:
    """Return whether the kernel takes these factors, which may be columns of wider ones."""
    if not factors[0].is_cuda or not len(factors[0]):
        return False
    steps = [stride for factor in factors for stride in factor.stride()[-2:] if stride != 1]
    return multiplies_at_once(factors[0].dtype, *(int(factor.storage_offset()) for factor in factors), *steps)

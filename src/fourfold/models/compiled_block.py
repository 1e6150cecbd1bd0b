"""A transformer block as one compiled function, where nothing travels inside it: x = y = z = 1.

    total, down = block(a, delta, weights)       forward and backward compiled by torch as a whole

Products and norms are autograd functions of their own inside the compiled function, because their weight gradients are
computed in the dtype in which they are reduced, not in that of the weights. Autograd would cast them: a gradient has
the dtype of its tensor. So each weight is accompanied by a *sink*, a tensor without memory in the wanted shape and
dtype, and the weight gradient is that of the sink. `Sinks` hands the gradients over to `Gradients`.

The function is compiled once for all blocks of a kind; weights are its arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import kernels
from fourfold.gradients import ForwardPass
from fourfold.kernels import HeadKind
from fourfold.nn.attention import Attention, Batch
from fourfold.nn.linear import MLP, Contract, Expand, join
from fourfold.nn.lora import LORA
from fourfold.nn.norm import HeadNorm, Norm, NormSpec
from fourfold.product import Factor, matmul_into


@dataclass(frozen=True, slots=True)
class BlockKind:
    """What distinguishes compiled functions from each other, beside shapes and dtypes."""

    eps: tuple[float, ...]
    """The number that keeps the deviation from 0, for each norm in the order in which `block` reads them."""
    heads: HeadKind
    swiglu: bool
    head_norms: bool


class BlockLayerNorm(torch.autograd.Function):
    """out = LayerNorm(a) inside a compiled function; the sinks `dw` and `db` get those gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, b: Tensor, dw: Tensor, db: Tensor, eps: float) -> Tensor:  # noqa: ARG004
        out, mean, rstd = kernels.layer_norm(a, w, b, eps)
        ctx.save_for_backward(a, mean, rstd, w)
        ctx.dtype = dw.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, mean, rstd, w = ctx.saved_tensors
        da, dw, db = kernels.norm_backward(dout, a, mean, rstd, w)
        return da, None, None, dw.to(ctx.dtype), db.to(ctx.dtype), None


class BlockRmsNorm(torch.autograd.Function):
    """out = RMSNorm(a) inside a compiled function; the sink `dw` gets that gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, dw: Tensor, eps: float) -> Tensor:
        out, rstd = kernels.rms_norm(a, w, eps)
        ctx.save_for_backward(a, rstd, w)
        ctx.dtype = dw.dtype
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, rstd, w = ctx.saved_tensors
        da, dw, _ = kernels.norm_backward(dout, a, None, rstd, w)
        return da, None, dw.to(ctx.dtype), None


class BlockProduct(torch.autograd.Function):
    """out = a w^T (E1 to E3) inside a compiled function; the sink `dw` gets that gradient."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, dw: Tensor) -> Tensor:
        ctx.save_for_backward(a, w)
        ctx.dtype = dw.dtype
        return functional.linear(a, w)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, w = ctx.saved_tensors
        return dout @ w, None, matmul_into(dout.t(), a, ctx.dtype)


class BlockProductWithBias(torch.autograd.Function):
    """out = a w^T + b (E1 to E4) inside a compiled function; the sinks `dw` and `db` get those gradients."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, w: Tensor, b: Tensor, dw: Tensor, db: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(a, w)
        ctx.dtype = dw.dtype
        return functional.linear(a, w, b)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        a, w = ctx.saved_tensors
        dw, db = matmul_into(dout.t(), a, ctx.dtype), kernels.sum_tokens(dout, ctx.dtype)
        return dout @ w, None, None, dw, db


def block(
    rows: int,
    a: Tensor,
    delta: Tensor | None,
    weights: Sequence[Sequence[Tensor]],
    sinks: Sequence[Sequence[Tensor]],
    rope: tuple[Tensor, Tensor] | None,
    *,
    kind: BlockKind,
) -> tuple[Tensor, Tensor]:
    """Return the residual stream after attention, and what the MLP adds to it; [m, k] each.

    `weights` and `sinks` have an entry for each norm and product, in the order in which they are read here.
    """
    parts, epsilons = iter(zip(weights, sinks, strict=True)), iter(kind.eps)

    def norm(a: Tensor) -> Tensor:
        own, for_gradients = next(parts)
        function = BlockRmsNorm if len(own) == 1 else BlockLayerNorm
        return function.apply(a, *own, *for_gradients, next(epsilons))

    def product(a: Tensor) -> Tensor:
        own, for_gradients = next(parts)
        function = BlockProduct if len(own) == 1 else BlockProductWithBias
        return function.apply(a, *own, *for_gradients)

    total = a if delta is None else a + delta
    q, k, v = kernels.split_heads(product(norm(total)), rows, kind.heads)
    if kind.head_norms:
        q, k = norm(q), norm(k)
    total = total + product(kernels.attend(q, k, v, rope, kind=kind.heads))
    hidden = product(norm(total))
    return total, product(kernels.swiglu(hidden) if kind.swiglu else kernels.gelu(hidden))


class Sinks(torch.autograd.Function):
    """Forward returns the sinks of a block's weights; backward hands over the weight gradients that they got."""

    @staticmethod
    def forward(ctx: Any, weights: BlockWeights, during: ForwardPass, *_: nn.Parameter) -> tuple[Tensor, ...]:
        ctx.weights, ctx.during = weights, during
        return tuple(zero.expand(shape) for zero, shape in weights.sinks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.weights.deposit(list(gradients), ctx.during)
        return None, None, *[None] * len(ctx.weights.parameters)


class BlockWeights:
    """The weights of a block in the order in which `block` reads them, and how their gradients are handed over."""

    def __init__(self, kind: BlockKind, readers: Sequence[Factor | NormSpec]) -> None:
        self.kind, self.readers = kind, readers
        self.groups = [reader.group for reader in readers]
        self.parameters = [parameter for group in self.groups for parameter in group.parameters]
        self.sinks: list[tuple[Tensor, torch.Size]] = []
        """For each tensor that `values` returns, one element of the dtype of its gradient, and its shape."""
        values = self.values()
        self._numbers = [len(part) for part in values]
        for group, part in zip(self.groups, values, strict=True):
            zero = torch.zeros((), dtype=group.reduce_dtype, device=part[0].device)
            self.sinks += [(zero, tensor.shape) for tensor in part]

    @property
    def trained(self) -> bool:
        return all(parameter.requires_grad for parameter in self.parameters)

    def block(self, a: Tensor, delta: Tensor | None, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run the block: return the residual stream after attention, and what the MLP adds to it."""
        run = kernels.compiled_for(block, self.kind)
        return run(batch.rows, a, delta, self.values(), self._take_sinks(), batch.rope)

    def values(self) -> list[list[Tensor]]:
        """Return weight and bias of every reader; where z is 1 nothing is gathered."""
        found: list[list[Tensor]] = []
        for reader in self.readers:
            if isinstance(reader, Factor):
                w, bias, _ = reader.with_biases.launch()[0].wait()
                found.append([w] if bias is None else [w, bias])
            else:
                found.append(reader.group.launch()[0].wait())
        return found

    def _take_sinks(self) -> list[tuple[Tensor, ...]]:
        """Return the sinks of every reader, and count the uses of all parameters in this forward pass."""
        during = self.groups[0].gradients.forward_pass
        for group in self.groups:
            group.use()
        flat = iter(Sinks.apply(self, during, *self.parameters))
        return [tuple(next(flat) for _ in range(number)) for number in self._numbers]

    def deposit(self, gradients: list[Tensor], during: ForwardPass) -> None:
        """Hand over the weight gradients of a backward pass, those of the last reader first, as backward finds them."""
        self.groups[0].gradients.expect_end()
        for reader, number in zip(reversed(self.readers), reversed(self._numbers), strict=True):
            parts = gradients[len(gradients) - number :]
            del gradients[len(gradients) - number :]
            if isinstance(reader, Factor):
                parts = reader.split(*parts)
            reader.group.scatter(parts, turns=1, during=during)


def can_run_whole(attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module) -> bool:
    """Return whether these are the layers of this package, without a hook that reads what lies between them."""
    if (type(attention_norm), type(attention), type(mlp_norm), type(mlp)) != (Norm, Attention, Norm, MLP):
        return False  # somebody has put another module there
    inner = [*attention._modules.values(), *mlp._modules.values()]
    layers = [attention_norm, attention, mlp_norm, mlp, *(layer for layer in inner if layer is not None)]
    return all(type(layer) in KNOWN and not layer.hooked and LORA not in layer._modules for layer in layers)  # type: ignore[union-attr]


KNOWN = {Norm, HeadNorm, Attention, MLP, Expand, Contract}
"""The layers that a compiled block computes itself. A subclass may compute something else."""


class CompiledBlock:
    """The parts of a block that can run as one compiled function."""

    def __init__(self, attention_norm: Norm, attention: Attention, mlp_norm: Norm, mlp: MLP) -> None:
        self.parts = attention_norm, attention, mlp_norm, mlp
        self._known: BlockWeights | None = None

    def weights(self) -> BlockWeights:
        """Return the weights as the layers have them now; they are worked out again only if one was replaced."""
        attention_norm, attention, mlp_norm, mlp = self.parts
        readers = [
            attention_norm.spec(),
            join(attention.q, attention.k, attention.v),
            *(norm.spec() for norm in (attention.q_norm, attention.k_norm) if norm is not None),
            join(attention.out),
            mlp_norm.spec(),
            join(mlp.up) if mlp.gate is None else join(mlp.gate, mlp.up),
            join(mlp.down),
        ]
        if self._known is None or any(a is not b for a, b in zip(readers, self._known.readers, strict=True)):
            kind = BlockKind(
                tuple(reader.eps for reader in readers if isinstance(reader, NormSpec)),
                attention.kind,
                mlp.gate is not None,
                attention.q_norm is not None,
            )
            self._known = BlockWeights(kind, readers)
        return self._known

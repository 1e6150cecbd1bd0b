"""A transformer block as one compiled function, where nothing travels inside it: x, y and z are 1.

The weights are handed out as plain tensors, so that all blocks share one compiled function. Its backward comes from
autograd's compiler; `HandOut` deposits the gradients of the weights as the layers of the block would.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from fourfold import kernels
from fourfold.kernels import BlockSizes
from fourfold.layout import GATHERED
from fourfold.nn.attention import Attention, Batch
from fourfold.nn.layer import Dropout, add_gradients
from fourfold.nn.linear import MLP, join
from fourfold.nn.norm import Norm
from fourfold.operators import once_differentiable
from fourfold.param_group import ParamGroup
from fourfold.product import Factor

Weights = tuple[ParamGroup | Factor, ...]
"""The norm, q with k and v, and the output of attention, then the norm, gate with up, and down of the MLP."""


class HandOut(torch.autograd.Function):
    """Hands out weights and biases as plain tensors, two for each group; backward deposits their gradients."""

    @staticmethod
    def forward(ctx: Any, weights: Weights, *_: nn.Parameter) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.weights = weights
        groups = [each.group if isinstance(each, Factor) else each for each in weights]
        ctx.passes = [group.use() for group in groups]
        found: list[Tensor | None] = []
        for each in weights:
            if isinstance(each, Factor):
                gathered = each.with_biases.launch().wait()
                found += [gathered.w, gathered.bias]
            else:
                weight, *bias = each.shards()
                found += [weight, bias[0] if bias else None]
        # tensors of their own: autograd must not take the parameters' memory for an output that is an input
        return tuple(None if tensor is None else tensor.detach() for tensor in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:  # type: ignore[override]
        pairs = zip(ctx.weights, ctx.passes, gradients[::2], gradients[1::2], strict=True)
        for each, during, dw, db in reversed(list(pairs)):  # the last layers first, as backward computes them
            if isinstance(each, Factor):
                add_gradients(each.group, each.parts_of(dw, db), 1, during)
            else:
                add_gradients(each, [dw, db], 1, during)
        return (None,) * len(ctx.needs_input_grad)


def run_whole(
    a: Tensor, delta: Tensor | None, batch: Batch, weights: Weights, norm: Norm, attention: Attention
) -> tuple[Tensor, Tensor]:
    """Run a block with these weights (`weights_of_block`) as one compiled function."""
    read, hidden = cast(Factor, weights[1]), cast(Factor, weights[4])
    sizes = BlockSizes(norm.kind, norm.eps, attention.head_dim, read.widths, hidden.widths)
    handed = HandOut.apply(weights, *(parameter for each in weights for parameter in each.parameters))
    pairs = tuple(zip(handed[::2], handed[1::2], strict=True))
    run = kernels.region(kernels.block, a, compiled=True)
    return run(a, delta, pairs, sizes, batch.rows, batch.rope, batch.mask)


def weights_of_block(
    a: Tensor, norms: tuple[Norm, Norm], attention: Attention, mlp: MLP, dropouts: tuple[Dropout, Dropout]
) -> Weights | None:
    """Return the weights of a block that can run as one compiled function, or None.

    It cannot where something travels or is drawn inside it, where a hook reads what lies between two of its layers, and
    where a weight gradient would be rounded to the compute dtype on the way to a wider one.
    """
    sizes = attention.grid.shape.sizes
    if a.is_meta or attention.engine.turn.of > 1:
        return None
    if sizes["x"] > 1 or sizes["y"] > 1 or sizes[GATHERED] > 1:
        return None
    if (type(attention), type(mlp), *map(type, norms)) != (Attention, MLP, Norm, Norm):
        return None  # somebody has put another module there
    if (attention.training and attention.dropout > 0) or any(dropout.acts for dropout in dropouts):
        return None
    if attention.q_norm is not None or any(norm.shift for norm in norms):
        return None
    gate, up, down, read = mlp.gate, mlp.up, mlp.down, (attention.q, attention.k, attention.v)
    layers = [attention, mlp, *read, attention.out, up, down, *([] if gate is None else [gate])]
    if True in [layer.hooked for layer in layers]:
        return None
    first, second = (norm.group(*norm.specs) for norm in norms)
    hidden = join(up) if gate is None else join(gate, up)
    weights = first, join(*read), join(attention.out), second, hidden, join(down)
    groups = [each.group if isinstance(each, Factor) else each for each in weights]
    if True in [group.casts or group.reduce_dtype != group.compute_dtype for group in groups]:
        return None
    trained = {parameter.requires_grad for group in groups for parameter in group.parameters}
    return weights if len(trained) == 1 else None  # gradients of frozen weights would be computed for nothing

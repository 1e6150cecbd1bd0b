"""Linear layers on the grid, and the MLP that is made of them: Expand leads from rest to inner, Contract leads back.

Layers that read the same tensor run together: one `enter`, one product, one `spread`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from fourfold import kernels, layout
from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.layout import FEATURES, GATHERED, Init, Layout, Spec, chunk
from fourfold.nn.layer import Layer
from fourfold.nn.lora import LORA, add_delta
from fourfold.operators import AsyncResult, Ready, leave, spread, take_apart
from fourfold.param_group import GroupMember
from fourfold.policy import Activations, Policy
from fourfold.product import Factor, contract, expand


class Linear(Layer):
    """The base class of Expand and Contract: a weight [out, in] and a bias, each cut in its own way."""

    reads: ClassVar[Callable[[Activations], Layout]]
    """The layout of the input."""
    weight_storage: ClassVar[Layout]
    bias_storage: ClassVar[Layout]
    bias_use: ClassVar[Layout]

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init: Init = Init(std=0.02),
    ) -> None:
        super().__init__(grid, policy)
        self.in_features, self.out_features = in_features, out_features
        require_divisible(self, "in_features", in_features, self.reads(policy.activations).over(FEATURES))
        require_divisible(self, "out_features", out_features, self.weight_storage.compute.over(0))
        self.declare("weight", Spec((out_features, in_features), self.weight_storage, layout.PRODUCT, init))
        self.declare("bias", Spec((out_features,), self.bias_storage, self.bias_use) if bias else None)

    @property
    def width(self) -> int:
        """Columns of the product on this rank."""
        # Not padded for alignment, unlike the logits of a head: heads and hidden units of published models stay
        # multiples of 8 elements on every grid that cuts them (tests/nn/test_padding.py). For a model of odd sizes
        # padding would save little: its columns must be dropped before heads are cut, which costs a copy of the output
        # and of its gradient, and the inner dim of the Contract product that follows would be as odd as before.
        return self.out_features // self.weight_storage.compute.parts(self.grid.shape.sizes, 0)

    @property
    def weight_member(self) -> GroupMember:
        return self.member("weight")


class Expand(Linear):
    """A linear layer from rest to inner.

    w[n/x, k/y] stored cut over z, b[n/(xy)] likewise:

        a [m/(zx), k/y] -> enter -> [m/z, k/y] -> a w^T -> [m/z, n/x] {sum y} -> spread -> [m/z, n/(xy)]

    Rank y adds its part of the bias to its partial sum, so that `spread` carries it to where it belongs.
    """

    reads = staticmethod(layout.rest)
    weight_storage, bias_storage, bias_use = layout.EXPAND_WEIGHT, layout.EXPAND_BIAS, layout.PRODUCT

    @property
    def bias_columns(self) -> range:
        """The columns of the product to which this rank's bias belongs."""
        return chunk(self.width, self.grid.size("y"), self.grid.coords["y"])

    @property
    def adds_bias(self) -> bool:
        """Whether this rank adds its bias to its partial sum."""
        return True

    def forward(self, a: Tensor, tokens: int) -> Tensor:
        return self.engine.alone(self.turns(a, tokens))

    def turns(self, a: Tensor, tokens: int) -> Turns[Tensor]:
        return (yield from expand_joined([self], a, tokens))


class Contract(Linear):
    """A linear layer from inner to rest.

    w[k/y, n/x] stored cut over z, b[k/y] likewise:

        a [m/z, n/(xy)] -> collect -> [m/z, n/x] -> a w^T -> [m/z, k/y] {sum x} -> leave -> [m/(zx), k/y]

    The bias joins the partial sum of the first rank on x; every rank on x computes the bias's whole gradient.
    """

    reads = staticmethod(layout.inner)
    weight_storage, bias_storage = layout.CONTRACT_WEIGHT, layout.RESIDUAL_VECTOR
    bias_use = layout.OUTPUT_OF_CONTRACT

    @property
    def bias_columns(self) -> range:
        return range(self.width)

    @property
    def adds_bias(self) -> bool:
        return self.grid.coords["x"] == 0

    def forward(self, a: Tensor, tokens: int) -> Tensor:
        return self.leave(self.engine.alone(self.turns(a, tokens)), tokens).wait()

    def turns(self, a: Tensor, tokens: int) -> Turns[Tensor]:
        """Compute the product, which is still owed over x; `leave` brings it to rest."""
        width = self.in_features // self.grid.size("x")
        out = yield from contract(join(self), a, self.site(tokens), width)
        return out if LORA not in self._modules else add_delta(self, a, tokens, out)

    def leave(self, out: Tensor, tokens: int) -> AsyncResult | Ready:
        return leave(out, self.site(tokens))


class MLP(Layer):
    """The MLP of a transformer block. The activation runs on hidden units that are fully cut.

    `gelu`: down(gelu(up(a))). `swiglu`: down(silu(gate(a)) * up(a)), where gate and up run together.
    """

    side_by_side = (("gate.weight", "up.weight"),)

    def __init__(
        self,
        grid: Grid,
        policy: Policy,
        features: int,
        hidden: int,
        *,
        kind: str,
        bias: bool,
        init: Init,
        out_init: Init,
    ) -> None:
        super().__init__(grid, policy)
        if kind not in ("gelu", "swiglu"):
            raise ValueError(f"mlp={kind!r} is none of 'gelu', 'swiglu'")
        gated = kind == "swiglu"
        self.gate = Expand(grid, policy, features, hidden, bias=bias, init=init) if gated else None
        self.up = Expand(grid, policy, features, hidden, bias=bias, init=init)
        self.down = Contract(grid, policy, hidden, features, bias=bias, init=out_init)

    def forward(self, a: Tensor, tokens: int) -> Tensor:
        return self.down.leave(self.engine.alone(self.turns(a, tokens)), tokens).wait()

    def turns(self, a: Tensor, tokens: int) -> Turns[Tensor]:
        """Compute everything up to `down.leave`, which brings the result to rest."""
        gate, up, down = self.gate, self.up, self.down
        self.refuse_hooks(gate, up, down)
        out = yield from expand_joined([up] if gate is None else [gate, up], a, tokens)
        function = kernels.gelu if gate is None else kernels.swiglu
        hidden = kernels.region(function, a, compiled=self.policy.compile)(out)
        return (yield from down.turns(hidden, tokens))


def keeps_weights(layer: Layer, weight: GroupMember) -> bool:
    """Return whether the gathered weights are kept for backward.

    If z is 1 and nothing is cast, or casts are kept anyway, the weights are whole already, and a second copy would save
    nothing.
    """
    casts = layer.policy.compute_dtype not in (None, weight.parameter.dtype) and not layer.policy.keep_casts
    return layer.policy.keeps_for_backward and (layer.grid.size(GATHERED) > 1 or casts)


def join(*layers: Expand | Contract) -> Factor:
    """Return the weights and biases of layers that read the same tensor as one factor of a product; it is kept."""
    first, *others = layers
    key = tuple(others)  # without the first, which would refer to itself and stay in memory until Python collects
    known = first._factors.get(key)
    if known is None or known.group.gradients is not first.gradients or not known.group.is_current():
        known = first._factors[key] = _joined(layers)
    return known


def _joined(layers: Sequence[Expand | Contract]) -> Factor:
    first = layers[0]
    widths = [layer.width for layer in layers]
    columns = [
        range(offset + layer.bias_columns.start, offset + layer.bias_columns.stop)
        for layer, offset in zip(layers, accumulate(widths, initial=0), strict=False)
        if layer.bias is not None
    ]
    weights = tuple(layer.weight_member for layer in layers)
    biases = tuple(layer.member("bias") for layer in layers if layer.bias is not None)
    return Factor(
        first.group_of(*weights, *biases, label=label_of(layers)),
        tuple(widths),
        tuple(columns),
        adds=first.adds_bias,
        keep_weights=keeps_weights(first, weights[0]),
    )


def read(layers: Sequence[Expand], a: Tensor, tokens: int) -> Turns[Tensor]:
    """Run one `enter` and one product for all layers: [m/(zx), k/y] -> [m/z, sum n_i/x] {sum y}."""
    factor = join(*layers)
    return expand(factor, a, layers[0].site(tokens, factor.group.label))


def expand_together(layers: Sequence[Expand], a: Tensor, tokens: int) -> list[Tensor]:
    """Return the outputs of layers that read the same tensor, in as few messages as one layer needs."""
    return layers[0].engine.alone(expand_in_turns(layers, a, tokens))


def expand_in_turns(layers: Sequence[Expand], a: Tensor, tokens: int) -> Turns[list[Tensor]]:
    """Run `expand_joined` and return the output of each layer, [m/z, n_i/(xy)]."""
    out = yield from expand_joined(layers, a, tokens)
    if len(layers) == 1:
        return [out]  # taking a tensor apart costs a copy in backward, even if there is only one part
    widths = join(*layers).widths
    cuts = sum(widths) // out.shape[1]
    return take_apart(out, [width // cuts for width in widths])


def expand_joined(layers: Sequence[Expand], a: Tensor, tokens: int) -> Turns[Tensor]:
    """Run `read` and one `spread`, and return the outputs of all layers side by side, [m/z, sum n_i/(xy)]."""
    factor = join(*layers)
    site = layers[0].site(tokens, factor.group.label)
    spreading = spread((yield from expand(factor, a, site)), site, factor.widths)
    yield  # even if nothing is in flight: the messages of the other half need a product to hide behind
    out = spreading.wait()
    for layer in layers:
        if LORA in layer._modules:
            return add_deltas(layers, a, tokens, out)
    return out


def add_deltas(layers: Sequence[Expand], a: Tensor, tokens: int, out: Tensor) -> Tensor:
    """Return the outputs of layers side by side, [m/z, sum n_i/(xy)], plus what their LoRA pairs compute."""
    cuts = sum(layer.width for layer in layers) // out.shape[1]
    parts = out.split([layer.width // cuts for layer in layers], dim=1)
    added = [
        part if LORA not in layer._modules else add_delta(layer, a, tokens, part)
        for layer, part in zip(layers, parts, strict=True)
    ]
    return added[0] if len(added) == 1 else torch.cat(added, dim=1)


def label_of(layers: Sequence[Layer]) -> str:
    """Return the label of layers that run together: `layers.0.attention.q+k+v`."""
    prefix, _, first = layers[0].label.rpartition(".")
    names = "+".join([first, *(layer.label.rpartition(".")[2] for layer in layers[1:])])
    return f"{prefix}.{names}" if prefix else names


def require_divisible(layer: Layer, what: str, value: int, axes: Sequence[str]) -> None:
    """Raise an error unless the product of the sizes of these axes divides the value."""
    sizes = [layer.grid.size(axis) for axis in axes]
    cuts = prod(sizes)
    if value % cuts == 0:
        return
    divisors = [str(size) for size in range(1, value + 1) if value % size == 0]
    choices = ", ".join([*divisors[:12], *(["..."] if len(divisors) > 12 else [])])
    raise ValueError(
        f"{type(layer).__name__}: {what}={value} is not divisible by {'*'.join(axes)} = {'*'.join(map(str, sizes))}; "
        f"pad it to {-(-value // cuts) * cuts} or choose {'*'.join(axes)} from {choices}"
    )

"""Linear layers on the grid: Expand leads from rest to inner, Contract leads back.

Layers that read the same tensor are read together: one `enter`, one product, one `spread`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import ClassVar

from torch import Tensor

from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.layout import (
    CONTRACT_WEIGHT,
    EXPAND_BIAS,
    EXPAND_WEIGHT,
    FEATURES,
    GATHERED,
    OUTPUT_OF_CONTRACT,
    PRODUCT,
    RESIDUAL_VECTOR,
    Init,
    Layout,
    Spec,
    chunk,
    inner,
)
from fourfold.nn.layer import Layer
from fourfold.operators import AsyncResult, Ready, leave, spread, take_apart
from fourfold.param_group import GroupMember
from fourfold.policy import Policy
from fourfold.product import Factor, contract, expand


class Linear(Layer, ABC):
    """What Expand and Contract share: a weight [out, in] and a bias, each cut in its own way."""

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
        self.check()
        self.declare("weight", Spec((out_features, in_features), self.weight_storage, PRODUCT, init))
        if bias:
            self.declare("bias", Spec((out_features,), self.bias_storage, self.bias_use))
        else:
            self.register_parameter("bias", None)

    @abstractmethod
    def check(self) -> None:
        """Raise unless the grid can cut the features."""

    def require_divisible(self, what: str, *axes: str) -> None:
        require_divisible(self, what, getattr(self, what), **{axis: self.grid.size(axis) for axis in axes})


class Expand(Linear):
    """rest -> inner.

    w[n/x, k/y] stored cut over z, b[n/(xy)] likewise:

        a [m/(zx), k/y] -> enter -> [m/z, k/y] -> a w^T -> [m/z, n/x] {sum y} -> spread -> [m/z, n/(xy)]

    Rank y adds its part of the bias to its partial sum, so that `spread` carries it to where it belongs.
    """

    weight_storage, bias_storage, bias_use = EXPAND_WEIGHT, EXPAND_BIAS, PRODUCT

    def check(self) -> None:
        self.require_divisible("in_features", "y")
        self.require_divisible("out_features", "x")

    @property
    def width(self) -> int:
        """Columns of the product on this rank."""
        return self.out_features // self.grid.size("x")

    @property
    def weight_member(self) -> GroupMember:
        return self.member("weight")

    @property
    def bias_columns(self) -> range:
        """Those of the product that this rank's bias covers."""
        return chunk(self.width, self.grid.size("y"), self.grid.coords["y"])

    @property
    def adds_bias(self) -> bool:
        return True

    def forward(self, a: Tensor, tokens: int) -> Tensor:
        return self.engine.alone(self.turns(a, tokens))

    def turns(self, a: Tensor, tokens: int) -> Turns[Tensor]:
        (out,) = yield from expand_in_turns([self], a, tokens)
        return out


class Contract(Linear):
    """inner -> rest.

    w[k/y, n/x] stored cut over z, b[k/y] likewise:

        a [m/z, n/(xy)] -> collect -> [m/z, n/x] -> a w^T -> [m/z, k/y] {sum x} -> leave -> [m/(zx), k/y]

    The bias joins the partial sum of the first rank on x; every rank on x finds its whole gradient.
    """

    weight_storage, bias_storage, bias_use = CONTRACT_WEIGHT, RESIDUAL_VECTOR, OUTPUT_OF_CONTRACT

    def check(self) -> None:
        self.require_divisible("in_features", *inner(self.policy.activations).over(FEATURES))
        self.require_divisible("out_features", "y")

    def forward(self, a: Tensor, tokens: int) -> Tensor:
        return self.leave(self.engine.alone(self.turns(a, tokens)), tokens).wait()

    def turns(self, a: Tensor, tokens: int) -> Turns[Tensor]:
        """The product alone; `leave` brings it to rest."""
        weight = self.member("weight")
        biases = () if self.bias is None else (self.member("bias"),)
        width = weight.rows
        factor = Factor(
            unit=self.unit_of(weight, *biases),
            weights=(weight,),
            biases=biases,
            widths=(width,),
            columns=(range(width),) * len(biases),
            adds=self.grid.coords["x"] == 0,
            keep_weights=keeps_weights(self, weight),
        )
        return (yield from contract(factor, a, self.site(tokens), self.in_features // self.grid.size("x")))

    def leave(self, out: Tensor, tokens: int) -> AsyncResult | Ready:
        return leave(out, self.site(tokens))


def keeps_weights(layer: Layer, weight: GroupMember) -> bool:
    """Where z is 1 and nothing is cast they are whole already: keeping a second copy would save nothing."""
    casts = layer.policy.compute_dtype not in (None, weight.parameter.dtype)
    return layer.policy.keep_weights and (layer.grid.size(GATHERED) > 1 or casts)


def join(layers: Sequence[Expand]) -> Factor:
    """The weights of layers that read the same tensor, as one factor."""
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
        unit=first.unit_of(*weights, *biases, label=label_of(layers)),
        weights=weights,
        biases=biases,
        widths=tuple(widths),
        columns=tuple(columns),
        adds=first.adds_bias,
        keep_weights=keeps_weights(first, weights[0]),
    )


def read(layers: Sequence[Expand], a: Tensor, tokens: int) -> Turns[Tensor]:
    """One `enter` and one product for all: [m/(zx), k/y] -> [m/z, sum n_i/x] {sum y}."""
    site = layers[0].site(tokens)
    return (yield from expand(join(layers), a, site.named(label_of(layers))))


def expand_together(layers: Sequence[Expand], a: Tensor, tokens: int) -> list[Tensor]:
    """The outputs of layers that read the same tensor, in as few messages as one layer's."""
    return layers[0].engine.alone(expand_in_turns(layers, a, tokens))


def expand_in_turns(layers: Sequence[Expand], a: Tensor, tokens: int) -> Turns[list[Tensor]]:
    """`read`, and one `spread` that carries all the outputs: each of them [m/z, n_i/(xy)]."""
    widths = [layer.width for layer in layers]
    site = layers[0].site(tokens).named(label_of(layers))
    spreading = spread((yield from read(layers, a, tokens)), site, widths)
    yield  # also where nothing travels: the other half's messages need a product between them
    out = spreading.wait()
    if len(layers) == 1:
        return [out]  # taking a tensor apart costs a copy in backward, also where there is one part
    cuts = sum(widths) // out.shape[1]
    return take_apart(out, [width // cuts for width in widths])


def label_of(layers: Sequence[Layer]) -> str:
    """`layers.0.attention.q+k+v`"""
    prefix, _, first = layers[0].label.rpartition(".")
    names = "+".join([first, *(layer.label.rpartition(".")[2] for layer in layers[1:])])
    return f"{prefix}.{names}" if prefix else names


def require_divisible(layer: Layer, what: str, value: int, **axes: int) -> None:
    """Raise unless the product of these axes divides the value."""
    cuts = 1
    for size in axes.values():
        cuts *= size
    if value % cuts == 0:
        return
    raise ValueError(
        f"{type(layer).__name__}: {what}={value} is not divisible by "
        f"{'*'.join(axes)} = {'*'.join(str(size) for size in axes.values())}; "
        f"pad it to {-(-value // cuts) * cuts} or choose {'*'.join(axes)} from {divisors(value)}"
    )


def divisors(value: int, most: int = 12) -> str:
    found = [size for size in range(1, value + 1) if value % size == 0]
    return ", ".join(str(size) for size in found[:most]) + (", ..." if len(found) > most else "")

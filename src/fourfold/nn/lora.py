"""LoRA beside the linear layers of the reference models: a trained pair A [r, in] and B [out, r], frozen weights.

The layer computes a W^T + scale (a A^T) B^T, with scale = alpha / r. Only the narrow tensor u = a A^T travels:

    beside Expand     a [m/(zx), k/y] A^T -> {sum y} -> u [m/(zx), r] -> enter -> [m/z, r];   u B^T -> [m/z, n/(xy)]
    beside Contract   a [m/z, n/(xy)] A^T -> {sum x, y} -> {sum x} u [m/z, r];   u B^T -> [m/z, k/y] {sum x}

so the result joins the layer's own before `leave`. In backward du is summed over y where y cuts B's output. A is
w[r, k/y] or w[r, n/(xy)], B is w[n/(xy), r] or w[k/y, r], each stored cut over z. B starts at 0, so that a model with
new pairs computes what it computed without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from torch import Tensor
from torch.nn import functional

from fourfold.grid import Grid
from fourfold.layout import FEATURES, GATHERED, PRODUCT, Init, Layout, Spec, inner, rest
from fourfold.nn.layer import Dropout, Layer, gather_parameters
from fourfold.operators import Conjugate, OpContext, enter
from fourfold.policy import Policy

LORA = "lora"
"""The name of the pair below its linear layer."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The pairs of a model: their rank, their scale alpha / rank, the dropout of their inputs, and their layers."""

    rank: int
    alpha: float = 16.0
    dropout: float = 0.0
    targets: tuple[str, ...] = ()
    """Names of linear layers of a block, such as q and v; none stands for all of them."""

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0 < self.alpha < inf or not 0 <= self.dropout < 1:
            raise ValueError(
                f"rank={self.rank} must be at least 1, alpha={self.alpha} above 0, dropout={self.dropout} from 0 to "
                "below 1"
            )


class LoraPair(Layer):
    """A and B beside one linear layer; `contracts` says that the layer leads back to rest."""

    def __init__(
        self, grid: Grid, policy: Policy, in_features: int, out_features: int, config: LoraConfig, *, contracts: bool
    ) -> None:
        super().__init__(grid, policy)
        self.scale, self.contracts = config.alpha / config.rank, contracts
        reads, writes = (layout(policy.activations) for layout in ((inner, rest) if contracts else (rest, inner)))
        self.dropout = Dropout(grid, policy, config.dropout, reads)
        self._sum_forward = "y" in reads.over(FEATURES)
        """Whether y cuts what A reads, so that u is owed a sum over y."""
        self._sum_backward = "y" in writes.over(FEATURES)
        """Whether y cuts what B writes, so that the gradient of u is."""

        def cut(dim: int, over: Layout) -> Layout:
            return Layout((*((axis, dim) for axis in over.over(FEATURES)), (GATHERED, 0)))

        # as uniform between -1 and 1 over the root of the inputs, which is what peft draws
        init = Init(std=(3 * in_features) ** -0.5)
        self.declare("a", Spec((config.rank, in_features), cut(1, reads), reads, init))
        # beside Contract each rank on x finds a part of the gradient, from its part of u
        self.declare("b", Spec((out_features, config.rank), cut(0, writes), PRODUCT if contracts else writes))

    def delta(self, a: Tensor, site: OpContext) -> Tensor:
        """Return what the pair adds to the output of its layer: in inner, or before `leave`."""
        held = gather_parameters(self, ["a", "b"])
        u = functional.linear(self.dropout(a).to(held["a"].dtype), held["a"])
        if site.y > 1:
            u = Conjugate.apply(u, _sum_over_y(site, self._sum_forward), _sum_over_y(site, self._sum_backward))
        if not self.contracts:
            u = enter(u, site).wait()
        return functional.linear(u * self.scale, held["b"])


def _sum_over_y(site: OpContext, owed: bool) -> Callable[[Tensor], Tensor]:
    """Return the sum over y for a tensor that is owed one, and nothing for any other."""
    return (lambda u: site.sum_y(u.contiguous()).wait()) if owed else (lambda u: u)


def add_delta(layer: Layer, a: Tensor, tokens: int, out: Tensor) -> Tensor:
    """Return the output of a linear layer that has a pair, plus what the pair computes from the layer's input."""
    pair = layer.get_submodule(LORA)
    return out + pair.delta(a, pair.site(tokens)).to(out.dtype)  # type: ignore[operator]


def is_lora(name: str) -> bool:
    """Return whether a parameter of this name is one of a LoRA pair."""
    return f".{LORA}." in name

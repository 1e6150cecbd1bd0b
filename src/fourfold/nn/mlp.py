"""The MLP of a transformer block: Expand, activation on hidden units that are fully cut, Contract."""

from __future__ import annotations

from torch import Tensor

from fourfold import local
from fourfold.grid import Grid
from fourfold.layout import Init, Policy
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Contract, Expand, expand_together


class MLP(Layer):
    """`gelu`: down(gelu(up(a))). `swiglu`: down(silu(gate(a)) * up(a)), gate and up read together."""

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
        if self.gate is None:
            up = self.up(a, tokens)
            hidden = local.region(local.gelu, up, compiled=self.policy.compile)(up)
        else:
            gate, up = expand_together([self.gate, self.up], a, tokens)
            hidden = local.region(local.swiglu, up, compiled=self.policy.compile)(gate, up)
        return self.down(hidden, tokens)

"""The MLP of a transformer block: Expand, activation on hidden units that are fully cut, Contract."""

from __future__ import annotations

from torch import Tensor

from fourfold import kernels
from fourfold.engine import Turns
from fourfold.grid import Grid
from fourfold.layout import Init
from fourfold.nn.layer import Layer
from fourfold.nn.linear import Contract, Expand, expand_in_turns
from fourfold.policy import Policy


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
        return self.down.leave(self.engine.alone(self.turns(a, tokens)), tokens).wait()

    def turns(self, a: Tensor, tokens: int) -> Turns[Tensor]:
        """Until `down.leave` brings it to rest."""
        self.refuse_hooks(self.gate, self.up, self.down)
        layers = [self.up] if self.gate is None else [self.gate, self.up]
        read = yield from expand_in_turns(layers, a, tokens)
        function = kernels.gelu if self.gate is None else kernels.swiglu
        hidden = kernels.region(function, a, compiled=self.policy.compile)(*read)
        return (yield from self.down.turns(hidden, tokens))

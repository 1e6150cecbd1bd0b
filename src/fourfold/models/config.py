"""What a reference model is: sizes and choices as data, checked against a grid before anything is built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from fourfold.grid import Shape, shapes_of
from fourfold.models.sizes import SIZES
from fourfold.policy import Halves, Policy, choose_halves
from fourfold.spelling import nearest


@dataclass(frozen=True, slots=True)
class Config:
    """A decoder-only transformer."""

    layers: int
    hidden: int
    """Width of the residual stream."""
    heads: int
    kv_heads: int
    head_dim: int
    mlp_hidden: int
    vocab: int
    seq: int
    """Longest sequence that learned positions know; rotary ones take any."""
    norm: Literal["layer", "rms"] = "layer"
    mlp: Literal["gelu", "swiglu"] = "gelu"
    positions: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10000.0
    bias: bool = True
    tied: bool = True
    """The head reads logits with the embedding's table."""
    qk_norm: bool = False
    dropout: float = 0.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp_hidden", "vocab", "seq"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        for name, allowed in (
            ("norm", ("layer", "rms")),
            ("mlp", ("gelu", "swiglu")),
            ("positions", ("learned", "rope")),
        ):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r} is none of {allowed}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not divisible by kv_heads={self.kv_heads}; "
                "every KV head serves the same number of query heads"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even for rotary positions")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1")

    def check(self, shape: Shape, policy: Policy) -> None:
        """Raise unless the model can be cut over a grid of this shape."""
        misfit = self.misfit(shape, policy)
        if misfit:
            what, value, cuts, axes = misfit
            fits = [str(other) for other in shapes_of(shape.world, shape.order) if not self.misfit(other, policy)]
            raise ValueError(
                f"{what}={value} is not divisible by {axes} on the grid {shape} with {policy.activations} activations; "
                f"grids of {shape.world} ranks that fit: {'; '.join(fits[:10])}{'; ...' if len(fits) > 10 else ''}; "
                f"or take a model with {what}={-(-value // cuts) * cuts}"
            )

    def misfit(self, shape: Shape, policy: Policy) -> tuple[str, int, int, str] | None:
        """The first size that a grid of this shape cannot cut, its value, and by what it should divide."""
        x, y = shape.x, shape.y
        inner, name = (x * y, f"x*y={x}*{y}") if policy.activations == "sharded" else (x, f"x={x}")
        rules = (
            ("hidden", self.hidden, y, f"y={y}"),
            ("heads", self.heads, inner, name),
            ("mlp_hidden", self.mlp_hidden, inner, name),
            ("kv_heads*head_dim", self.kv_heads * self.head_dim, x, f"x={x}"),
        )
        return next((rule for rule in rules if rule[1] % rule[2]), None)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = self.hidden * self.mlp_hidden * (3 if self.mlp == "swiglu" else 2)
        biases = self.head_dim * (self.heads + 2 * self.kv_heads) + 2 * self.hidden + self.mlp_hidden
        if self.mlp == "swiglu":
            biases += self.mlp_hidden
        norm = self.hidden * (2 if self.norm == "layer" and self.bias else 1)
        block = attention + mlp + 2 * norm + (biases if self.bias else 0) + (2 * self.head_dim if self.qk_norm else 0)
        tables = self.vocab * (1 if self.tied else 2) + (self.seq if self.positions == "learned" else 0)
        return self.layers * block + norm + tables * self.hidden


def halves_of(config: Config, shape: Shape, policy: Policy, rows: int, seq: int, itemsize: int) -> Halves:
    """Into how many parts that take turns the rows of a (data, z) place are cut, and why."""
    over_x = config.hidden // shape.y if shape.x > 1 else 0
    over_y = config.mlp_hidden // shape.x if shape.y > 1 else 0
    return choose_halves(policy.overlap, rows, rows * seq * max(over_x, over_y) * itemsize)


def config(name: str, **changes: Any) -> Config:
    """The published size of that name, with some fields changed."""
    if name not in SIZES:
        raise ValueError(f"no model {name!r}{nearest(name, list(SIZES))}; there are {', '.join(SIZES)}")
    fields = [field.name for field in dataclasses.fields(Config)]
    for key in changes:
        if key not in fields:
            raise ValueError(f"a model has no {key!r}{nearest(key, fields)}; it has {', '.join(fields)}")
    return Config(**{**SIZES[name], **changes})

"""Dropout with masks that are independent wherever a tensor is cut and equal wherever it is replicated."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from fourfold.grid import Grid
from fourfold.layout import rest
from fourfold.nn.layer import Layer
from fourfold.nn.rng import seeded
from fourfold.policy import Policy


class Dropout(Layer):
    """Dropout of tokens at rest."""

    def __init__(self, grid: Grid, policy: Policy, probability: float) -> None:
        super().__init__(grid, policy)
        if not 0 <= probability < 1:
            raise ValueError(f"dropout={probability} must be at least 0 and below 1")
        self.probability = probability

    @property
    def active(self) -> bool:
        return self.training and self.probability > 0

    @property
    def acts(self) -> bool:
        """Whether the layer must be called: it drops something, or it has a hook."""
        return self.active or self.hooked

    def forward(self, a: Tensor) -> Tensor:
        if not self.active:
            return a
        with seeded(self.clock.key(self.label, self.grid, rest(self.policy.activations)), a.device):
            return functional.dropout(a, self.probability)

"""What all modules of one parallelised model share while it runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from fourfold.gradients import Gradients
from fourfold.grid import Grid
from fourfold.layout import Policy
from fourfold.nn.moment import Clock
from fourfold.overlap import Engine

if TYPE_CHECKING:
    from fourfold.parallelize.together import Together


class Run:
    """The grid, the policy, the gradients and the clock of a model, and what its pass is doing now."""

    gradients: Gradients
    clock: Clock

    def __init__(self, grid: Grid, policy: Policy) -> None:
        self.grid, self.policy = grid, policy
        self.where = ""
        """The layer that ran last, for labels and errors."""
        self.grad_enabled = False
        """Whether the pass is one that backward may follow."""
        self.depth = 0
        """How many parallelised modules are inside each other's forward."""
        self.generating = False
        self.made_whole: Counter[tuple[str, str]] = Counter()
        """How often which operation after which layer made a tensor whole, in the last pass."""
        self.shared: set[Together] = set()
        """Layers that were read together in this pass and of which some were not asked for yet."""
        self.reads_logits = False
        """Whether a loss of this pass took logits that are cut."""

    def begin(self) -> None:
        """A pass begins."""
        self.depth, self.where, self.grad_enabled, self.reads_logits = 1, "", torch.is_grad_enabled(), False
        self.made_whole.clear()
        self.shared.clear()

    @property
    def engine(self) -> Engine:
        return self.gradients.engine

    @property
    def label(self) -> str:
        return f"after {self.where}" if self.where else "before the first layer"

    def __deepcopy__(self, memo: dict[int, object]) -> Run:
        raise TypeError("a parallelised model cannot be copied; copy the plain module and parallelize the copy")

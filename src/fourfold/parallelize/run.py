"""What all modules of one parallelised model share while it runs."""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import torch
from torch import Tensor

from fourfold.gradients import Gradients
from fourfold.grid import Grid
from fourfold.layout import Policy, inner
from fourfold.nn.moment import Clock
from fourfold.overlap import Engine


class Group(Protocol):
    """Layers that were read together."""

    def part(self) -> None: ...


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
        self.shared: set[Group] = set()
        """Layers that were read together in this pass and of which some were not asked for yet."""
        self.reads_logits = False
        """Whether a loss of this pass took logits that are cut."""
        self.counted = False
        """Whether the pass was given the count of the batch's targets, by which the model divides a sum of losses."""
        self.lent: dict[tuple[str, bool], tuple[Tensor, int | None]] = {}
        """Parameters that code beside their layer has read in this pass, whole, by name and whether gradients were on,
        and the state that they were in."""
        self.running: dict[int, str] = {}
        """Gathered parameters of modules whose own code runs now, by `id`."""
        self.held: list[tuple[str, dict[str, Any], str, dict[str, Any], str]] = []
        """Every parameter of the model: its name, and where the module and the layer that computes with it have it."""

    def begin(self) -> None:
        """A pass begins."""
        self.depth, self.where, self.grad_enabled, self.reads_logits = 1, "", torch.is_grad_enabled(), False
        self.made_whole.clear()
        self.shared.clear()
        self.lent.clear()

    def require_own_parameters(self) -> None:
        """A parameter that somebody replaced would be trained, or loaded, and not used."""
        for name, module, own, layer, inside in self.held:
            if module.get(own) is not layer[inside]:
                raise RuntimeError(
                    f"{name} was replaced after the model was parallelised; change parameters in place (copy_ on their "
                    "shards, load_state_dict without assign=True), or replace them before"
                )

    @property
    def over(self) -> tuple[str, ...]:
        """The axes that cut features inside a sublayer."""
        return inner(self.policy.activations).features

    @property
    def engine(self) -> Engine:
        return self.gradients.engine

    @property
    def label(self) -> str:
        return f"after {self.where}" if self.where else "before the first layer"

    def __deepcopy__(self, memo: dict[int, object]) -> Run:
        raise TypeError("a parallelised model cannot be copied; copy the plain module and parallelize the copy")

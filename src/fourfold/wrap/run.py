"""What all modules of one parallelised model share while it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fourfold.gradients import Gradients
from fourfold.grid import Grid
from fourfold.layout import FEATURES, inner
from fourfold.nn.moment import Clock
from fourfold.overlap import Engine
from fourfold.policy import Policy


class Group(Protocol):
    """Layers that were read together."""

    def part(self) -> None: ...


class Run:
    """The grid, the policy, the gradients and the clock of a model, and what its pass is doing now."""

    gradients: Gradients
    clock: Clock

    def __init__(self, grid: Grid, policy: Policy, rows_dims: Sequence[int] = (0,)) -> None:
        self.grid, self.policy = grid, policy
        self.rows_dims = tuple(rows_dims)
        """The dim of the model's inputs along which the rows of a batch lie; several where that is not known."""
        self.cuts = grid.size("x") > 1 or grid.size("y") > 1
        """Whether tensors inside the model are cut at all; where they are not, model code gets plain ones."""
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
        self.losses = 0
        """How often the pass called one of torch's losses."""
        self.own_losses = False
        """Whether these are each place's own: a model calls one for each row, so that the calls of places do not belong
        together."""
        self.counted = False
        """Whether the pass was given the count of the batch's targets, by which the model divides a sum of losses."""
        self.lent: dict[tuple[str, bool], tuple[Tensor, int | None]] = {}
        """Parameters that code beside their layer has read in this pass, whole, by name and whether gradients were on,
        and the state that they were in."""
        self.compares_rows = False
        """Whether the pass was asked for a loss that compares all rows with each other."""
        self.sample: Any = None
        """The sample of rows that the pass runs on, while the check of rows runs (`rows.Sample`)."""
        self.unchecked = ""
        """Why rows could not be checked for depending on each other."""
        self.copies: list[Any] = []
        """Whole copies of cut tensors of which model code may hold views (`placed.WholeCopy`)."""
        self.reads: dict[Group, tuple[Tensor, object, dict]] = {}
        """What layers that read a tensor together have found for each other: the tensor, its state, a result each."""
        self.cast: tuple[Tensor, object, Tensor] | None = None
        """The tensor that was cast last for a layer, what it was cast to and in which state, and the result."""
        self.inside: list[str] = []
        """Modules whose own code runs now with gathered parameters, innermost last."""
        self.on_wholes: dict[str, str] = {}
        """Those that are handed whole tensors because of what they did to a cut one, and what that was. All ranks of a
        place run the same code on the same rows, so they switch alike; other places need not."""
        self.running: dict[int, str] = {}
        """Gathered parameters of modules whose own code runs now, by `id`."""
        self.held: list[tuple[str, dict[str, Any], str, dict[str, Any], str]] = []
        """Every parameter of the model: its name, and where the module and the layer that computes with it have it."""
        self.modules: list[tuple[str, nn.Module, list[nn.Module | None], list[str]]] = []
        """Every module of the model: its name, and the submodules and names of parameters that it had when it was
        parallelised."""

    def begin(self) -> None:
        """A pass begins."""
        self.end()
        self.depth, self.where, self.grad_enabled, self.reads_logits = 1, "", torch.is_grad_enabled(), False
        self.made_whole.clear()
        self.losses = 0

    def end(self) -> None:
        """Let go of what one pass keeps for its layers."""
        self.depth, self.cast = 0, None
        for kept in (self.shared, self.lent, self.copies, self.reads):
            kept.clear()

    def require_own_parameters(self) -> None:
        """A parameter that somebody replaced would be trained, or loaded, and not used."""
        for name, module, own, layer, inside in self.held:
            if module.get(own) is not layer[inside]:
                raise RuntimeError(
                    f"{name} was replaced after the model was parallelised; change parameters in place (copy_ on their "
                    "shards, load_state_dict without assign=True), or replace them before; torch.func.functional_call "
                    "on the whole model, which replaces them for one call, cannot be used"
                )

    def changes_in_place(self, operation: str) -> None:
        """Model code changed a cut tensor in place, or called an autograd function on one: from now on the module whose
        code it is, where that holds parameters, is handed whole tensors."""
        if self.inside:
            self.on_wholes.setdefault(self.inside[-1], operation)

    def require_own_modules(self) -> None:
        """A module or parameter that somebody put in is not on the grid: nobody would reduce its gradient."""
        for name, module, children, parameters in self.modules:
            if [*module._modules.values()] == children and [*module._parameters] == parameters:
                continue
            added = [(own, child) for own, child in module._modules.items() if child not in children]
            for own, there in (*added, *module._parameters.items()):
                inside = there.parameters() if isinstance(there, nn.Module) else [there]
                if all(parameter is None or self.gradients.knows(parameter) for parameter in inside):
                    continue  # another of this model's modules, or one without parameters
                raise RuntimeError(
                    f"{f'{name}.{own}'.lstrip('.')} ({type(there).__name__}) was put into the model after it was "
                    "parallelised and is not on the grid: its gradient would not be summed over ranks; put it in "
                    "before ff.parallelize, or call ff.parallelize(model, grid) again, with the same policy, and "
                    "make the optimizer after that"
                )

    @property
    def over(self) -> tuple[str, ...]:
        """The axes that cut features inside a sublayer."""
        return inner(self.policy.activations).over(FEATURES)

    @property
    def engine(self) -> Engine:
        return self.gradients.engine

    @property
    def label(self) -> str:
        return f"after {self.where}" if self.where else "before the first layer"

"""The state that all modules of one wrapped model share: grid, policy, gradients, and what the current pass is doing.

The outermost module begins and ends every pass here. Adapters note the layer that runs, so that labels in the ledger
and errors can say where in the model something happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.axes import AXES, BATCH
from fourfold.engine import Engine
from fourfold.gradients import Gradients
from fourfold.grid import Grid
from fourfold.layout import FEATURES, inner
from fourfold.nn.rng import StepRng
from fourfold.policy import Policy

WITHIN_PLACE = tuple(axis for axis in AXES if axis not in BATCH)
"""The axes along which the ranks of one (data, z) place differ. These ranks read the same rows."""


class ModelContext:
    """The grid, the policy, the gradients and the clock of a wrapped model, and the state of its current pass."""

    gradients: Gradients
    clock: StepRng

    def __init__(self, grid: Grid, policy: Policy, rows_dims: Sequence[int] = (0,)) -> None:
        self.grid, self.policy = grid, policy
        self.rows_dims = tuple(rows_dims)
        """The dim of the model's inputs that holds the rows of a batch; several candidates where it is not known."""
        self.is_cut = any(grid.size(axis) > 1 for axis in WITHIN_PLACE)
        """Whether activations are cut at all. Where they are not, model code gets plain tensors."""
        self.last_layer = ""
        """The layer that ran last, for labels and errors."""
        self.grad_enabled = False
        """Whether a backward pass may follow the current pass."""
        self.depth = 0
        """1 while a pass is running, else 0."""
        self.generating = False
        """Whether `generate` is running, so that a nested `generate` does not cut the rows a second time."""
        self.made_whole: Counter[tuple[str, str]] = Counter()
        """How often a tensor was made whole in the last pass, by (place in the model, operation)."""
        self.unfinished_reads: set[Any] = set()
        """Groups (`SharedInput`) that read a tensor in this pass and still hold a result that no layer asked for."""
        self.shared_reads: dict[Any, tuple[Tensor, object, dict]] = {}
        """By group (`SharedInput`): the tensor that was read, its state, and the results that are not yet used."""
        self.loss_read_logits = False
        """Whether a loss of this pass read logits that are cut over the vocabulary."""
        self.loss_calls = 0
        """How many of torch's loss functions the pass has called."""
        self.local_losses = False
        """Whether torch's losses inside the model are each place's own. A model that calls one loss per row makes
        different numbers of calls on different places, so the calls cannot be reduced together."""
        self.has_target_count = False
        """Whether the pass was given the number of targets in the batch, by which the model divides a sum of losses."""
        self.compares_rows = False
        """Whether the pass was asked for a loss that compares all rows with each other."""
        self.lent_params: dict[tuple[str, bool], tuple[Tensor, int | None]] = {}
        """Parameters that code outside their layer has read in this pass: the gathered tensor and its version, by name
        and by whether gradients were on."""
        self.sample: Any = None
        """The rows on which the check of rows runs the model (`rows.RowSample`); None in any other pass."""
        self.unchecked = ""
        """Why the model could not be checked for rows that depend on each other; empty if it could."""
        self.whole_copies: list[Any] = []
        """Whole copies of cut tensors, with views that model code may hold (`grid_tensor.WholeCopy`)."""
        self.last_cast: tuple[Tensor, object, Tensor] | None = None
        """The tensor that was last cast for a layer, the dtype and state it was cast for, and the result."""
        self.own_code: list[str] = []
        """Modules that are running their own code with gathered parameters, innermost last."""
        self.whole_input_modules: dict[str, str] = {}
        """Modules that get whole tensors from now on, and the operation that was the reason. All ranks of a place run
        the same code on the same rows and so switch in the same pass; other places may switch in another."""
        self.gathered_names: dict[int, str] = {}
        """The names of the gathered parameters of modules that are running their own code, by `id` of the tensor."""
        self.parameter_homes: list[tuple[str, dict[str, Any], str, dict[str, Any], str]] = []
        """For every parameter: its name, then table and key in the user's module, then table and key in the layer."""
        self.known_modules: list[tuple[str, nn.Module, list[nn.Module | None], list[str]]] = []
        """For every module: its name, itself, and the children and parameter names that it had when it was wrapped."""

    def begin_pass(self) -> None:
        """Reset the state of a pass."""
        self.end_pass()
        self.depth, self.last_layer, self.grad_enabled = 1, "", torch.is_grad_enabled()
        self.loss_read_logits, self.loss_calls = False, 0
        self.made_whole.clear()

    def end_pass(self) -> None:
        """Release the tensors that layers kept for each other during the pass."""
        self.depth, self.last_cast = 0, None
        for kept in (self.unfinished_reads, self.lent_params, self.whole_copies, self.shared_reads):
            kept.clear()

    def note_in_place_change(self, operation: str) -> None:
        """Give whole tensors, from now on, to the module that is running its own code.

        Called when model code changes a cut tensor in place or passes one to an autograd function.
        """
        if self.own_code:
            self.whole_input_modules.setdefault(self.own_code[-1], operation)

    def require_same_parameters(self) -> None:
        """Refuse a parameter that was replaced: the new one would be trained or loaded, and never used."""
        for name, module_table, module_key, layer_table, layer_key in self.parameter_homes:
            if module_table.get(module_key) is not layer_table[layer_key]:
                raise RuntimeError(
                    f"{name} was replaced after the model was parallelised; change parameters in place (copy_ on their "
                    "shards, load_state_dict without assign=True), or replace them before ff.parallelize; "
                    "torch.func.functional_call on the whole model replaces them for one call and cannot be used"
                )

    def require_same_modules(self) -> None:
        """Refuse a module or parameter that was added later: nobody would reduce its gradient."""
        for name, module, children, parameters in self.known_modules:
            if [*module._modules.values()] == children and [*module._parameters] == parameters:
                continue
            added = [(own, child) for own, child in module._modules.items() if child not in children]
            for own, new in (*added, *module._parameters.items()):
                inside = new.parameters() if isinstance(new, nn.Module) else [new]
                if all(parameter is None or self.gradients.knows(parameter) for parameter in inside):
                    continue  # another module of this model, or a module without parameters
                raise RuntimeError(
                    f"{f'{name}.{own}'.lstrip('.')} ({type(new).__name__}) was put into the model after it was "
                    "parallelised and is not on the grid: its gradient would not be summed over ranks; put it in "
                    "before ff.parallelize, or call ff.parallelize(model, grid) again, with the same policy, and "
                    "make the optimizer after that"
                )

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The axes that cut features inside a sublayer."""
        return inner(self.policy.activations).over(FEATURES)

    @property
    def engine(self) -> Engine:
        """The engine that overlaps communication and computation."""
        return self.gradients.engine

    @property
    def label(self) -> str:
        """Where in the model the pass is, as the ledger and error messages say it."""
        return f"after {self.last_layer}" if self.last_layer else "before the first layer"

"""The experts of a mixture: a module that sends each token through the experts that it is given, cut like an MLP.

The router around it keeps its own code, since families differ in what it does, and hands over the experts of each token
and how much each counts. In the notation of `operators`, with m tokens of a place, P pairs of a token and an expert, k
features of the stream and n hidden units of an expert:

    at rest   a [m/(zx), k/y] -> enter -> [m/z, k/y]
    expand    u_e = a_e w_e^T, [P, n/x] {sum y}, for gate and up -> spread                    E18
    inner     h = silu(gate) * up * p
    contract  o_e = h_e w_e^T, [P, k/y] {sum x} -> out[t] = sum_j o[t, j] in the order of j   E19 -> leave

On a folded grid x is ex, z is ez, and tokens travel to the ranks of their experts and back instead (`dispatch`).

Choices and p are whole on every rank of a place, as all plain tensors of model code are. Each rank finds the part of
p's gradient that belongs to its hidden units, or on a fold to the tokens that it sends, so backward sums it over the
axes that cut these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.grid import Grid
from fourfold.layout import Init
from fourfold.nn.dispatch import Dispatch, Pairs, all_rows, own_rows, rows_here
from fourfold.nn.moe import GatedExperts
from fourfold.nn.router import Routing
from fourfold.operators import OpContext, enter, leave
from fourfold.policy import Policy
from fourfold.wrap.adapters import LayerAdapter, LayerParameter, PlainSlice
from fourfold.wrap.detect import ExpertsForm
from fourfold.wrap.grid_tensor import GridTensor, ModelContext, to_whole
from fourfold.wrap.placements import RestPlacement, conjugate, to_rest


class Experts(GatedExperts):
    """Gated experts that a module's own router chooses."""

    def __init__(self, grid: Grid, policy: Policy, form: ExpertsForm) -> None:
        super().__init__(grid, policy)
        self.form = form
        self.declare_experts(form.experts, form.features, form.hidden, Init(), Init())

    def forward(self, a: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts `ids` [m, K] of m tokens, which count `weights` [m, K], from rest to rest."""
        site, ids = self.site(len(ids)), ids.long()
        scores = self._own_part(weights, site)
        # each wait is at once: the product behind it needs the whole, and there is no other half to compute
        if self.folded:
            return self._of_fold(a, ids, scores, site)
        entering, pairs = enter(a, site), Pairs(ids, self.form.experts)
        again = (a, site.gather_tokens) if self.rereads(site, travels=entering.travels) else None
        return leave(self.engine.alone(self.compute_experts(entering.wait(), scores, pairs, site, again)), site).wait()

    def _of_fold(self, a: Tensor, ids: Tensor, scores: Tensor, site: OpContext) -> Tensor:
        """Send tokens to their experts and back; those that only fill up a rank stay."""
        experts, chosen = self.form.experts, ids.shape[1]
        dispatch = Dispatch(Routing(experts, chosen), site)
        ids = rows_here(site, ids, 0 if dispatch.stays else experts)
        arrived = self.engine.alone(dispatch.turns(own_rows(site, a), rows_here(site, scores, 0), ids))()
        out = self.engine.alone(self.compute_experts(*arrived, site))
        return all_rows(site, dispatch.combine(dispatch.returning(out).wait()))

    def _own_part(self, weights: Tensor, site: OpContext) -> Tensor:
        """Return p, whose gradient is the sum of what the ranks of a place find for their hidden units."""

        def back(gradient: Tensor) -> Tensor:
            # each wait is at once: the sum over y, or autograd's next node, reads it
            owed = site.sum_x(gradient).wait() if site.x > 1 else gradient
            return site.sum_y(owed).wait() if site.sharded and site.y > 1 else owed

        return conjugate(weights, torch.clone, back) if site.x * site.y > 1 else weights


class ExpertsAdapter(LayerAdapter[Experts]):
    """Runs a module with the experts of a mixture, from rest to rest."""

    treats_tokens_alike = True

    def parameters(self) -> Mapping[str, LayerParameter]:
        form, experts = self.layer.form, self.layer
        parts = (range(form.hidden), range(form.hidden, 2 * form.hidden))
        found: dict[str, LayerParameter] = {
            f"{form.gate_up}_{index}": (experts, name, PlainSlice(form.gate_up, rows, dim=1))
            for index, (name, rows) in enumerate(zip(("gate", "up"), parts, strict=True))
        }
        return {**found, form.down: (experts, "down", PlainSlice(form.down))}

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        if len(args) != 3 or kwargs or not all(isinstance(tensor, Tensor) for tensor in args):
            return False
        a, ids, weights = args
        shapes = a.dim() == 2 and a.shape[1] == self.layer.form.features and ids.shape == weights.shape
        return shapes and ids.dim() == 2 and 0 < len(ids) == len(a) and weights.dtype.is_floating_point

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> GridTensor:  # noqa: ARG002
        a, ids, weights = args
        resting = to_rest(a, self.context)
        out = self.layer(resting.local, to_whole(ids), to_whole(weights))
        return GridTensor(out, RestPlacement(self.context), resting.shape)

    def describe(self) -> tuple[str, str]:
        experts = self.layer.form.experts
        if self.layer.folded:
            layout = f"{experts} experts over expert: gate, up w[n/ex, k/y]/ez: rest -> inner; down w[k/y, n/ex]/ez"
            return layout, "dispatch over expert and ex, w over ez, spread and collect over y, tokens back"
        layout = f"{experts} experts: gate, up w[n/x, k/y]/z: rest -> inner; down w[k/y, n/x]/z: inner -> rest"
        return layout, "enter over x, w over z, spread and collect over y, leave over x"


def make_experts(name: str, why: str, context: ModelContext, form: ExpertsForm | None) -> ExpertsAdapter:
    """Return the adapter of a module with experts."""
    if form is None:
        raise ValueError(
            "ExpertsParallel() is for modules with gated experts in two weights, [experts, 2 hidden, features] and "
            "[experts, features, hidden], called with tokens, their experts and how much these count; give it "
            "WholeTensors()"
        )
    return ExpertsAdapter(name, context, why, Experts(context.grid, context.policy, form))

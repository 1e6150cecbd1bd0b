"""Linear layers whose weight is computed from other parameters: weight norm, spectral norm, any parametrisation.

The parameters are gathered over z and the module's own code computes the weight, whole and alike on every rank of x
and y. The product with it is cut over the grid as that of any linear layer; each rank finds the gradient of its block,
and the blocks are gathered, so that the whole gradient goes back through the code that computed the weight.

    Expand     a [m/(zx), k/y] -> enter -> [m/z, k/y] -> a W[n/x, k/y]^T -> {sum y} -> spread -> [m/z, n/(xy)]
    Contract   a [m/z, k/(xy)] -> collect -> [m/z, k/x] -> a W[n/y, k/x]^T -> {sum x} -> leave -> [m/(zx), n/y]
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fourfold import comm
from fourfold.layout import CONTRACT_WEIGHT, EXPAND_WEIGHT, Layout
from fourfold.operators import collect, enter, leave, spread
from fourfold.wrap.gathered import Gathered
from fourfold.wrap.linears import Form
from fourfold.wrap.placed import Blocks, Placed, Rest, conjugate, laid, whole
from fourfold.wrap.run import Run
from fourfold.wrap.together import at_rest


class Computed(Gathered):
    """A linear layer that asks its own code for its weight and multiplies by this rank's block of it."""

    form: Form  # type: ignore[assignment]

    def __init__(self, name: str, run: Run, why: str, module: nn.Module, form: Form) -> None:
        super().__init__(name, run, why, module)
        self.form = form

    def takes(self, *, autocast: bool) -> torch.dtype | None:
        return None if autocast else self.run.policy.compute

    def accepts(self, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        return self.form.takes(args, kwargs)

    def __call__(self, module: Any, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        self.run.where = self.name
        (input,) = (*args, *kwargs.values())
        weight, bias = whole(module.weight), module.bias
        if weight.shape != (self.form.outputs, self.form.inputs):
            raise ValueError(
                f"{self.name}: the weight that {type(module).__name__} computes has the shape {tuple(weight.shape)}, "
                f"not {(self.form.outputs, self.form.inputs)}; give the module a plan of Whole()"
            )
        out = self.product(input, weight)
        return out if bias is None else out + bias

    @abstractmethod
    def product(self, a: Tensor, weight: Tensor) -> Placed:
        """a W^T, each rank with its block of W."""

    def block(self, weight: Tensor, storage: Layout) -> Tensor:
        """This rank's block of a weight that all ranks hold whole; its gradient is gathered from all blocks."""
        grid, shape, layout = self.run.grid, weight.shape, storage.compute
        return conjugate(
            weight,
            lambda tensor: layout.take(tensor, grid).contiguous(),
            lambda gradient: comm.join(gradient.contiguous(), layout, shape, grid, label=self.run.label),
        )


class ComputedReader(Computed):
    """From rest to inner."""

    def product(self, a: Tensor, weight: Tensor) -> Placed:
        resting = at_rest(a, self.run)
        leading = resting.shape[:-1]
        site = self.layer.site(prod(leading))
        owed = functional.linear(enter(resting.local, site).land(), self.block(weight, EXPAND_WEIGHT))
        out = spread(owed, site, [owed.shape[1]]).land()
        layout = Blocks(self.run, len(leading), self.run.over)
        return Placed(out.view(*leading, out.shape[1]), layout, (*leading, self.form.outputs))

    def describe(self) -> tuple[str, str]:
        return "computed w[n/x, k/y]: rest -> inner", "enter over x, spread over y, gradients of w over x and y"


class ComputedCloser(Computed):
    """From inner to rest."""

    def product(self, a: Tensor, weight: Tensor) -> Placed:
        layout = Blocks(self.run, a.dim() - 1, self.run.over)
        a = a.laid(layout) if isinstance(a, Placed) else laid(a, layout)
        leading = a.shape[:-1]
        site = self.layer.site(prod(leading))
        flat = a.local.reshape(prod(leading), a.local.shape[-1])
        held = collect(flat, site, self.form.inputs // self.run.grid.size("x")).land()
        owed = functional.linear(held, self.block(weight, CONTRACT_WEIGHT))
        return Placed(leave(owed, site).land(), Rest(self.run), (*leading, self.form.outputs))

    def describe(self) -> tuple[str, str]:
        return "computed w[k/y, n/x]: inner -> rest", "collect over y, leave over x, gradients of w over x and y"

"""Parameters that code reads beside the layer that holds them: `self.a.weight` in another module's forward.

What a module's attribute gives during a pass is a `Placed` that knows shape, dtype and device, and is gathered, whole,
when somebody computes with it. Its gradient, which all ranks of a place find alike, goes back to the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Size, Tensor, nn
from torch.distributed.tensor import DTensor

from fourfold import comm
from fourfold.ahead import in_backward
from fourfold.arriving import local_of
from fourfold.layout import Spec
from fourfold.nn.layer import SPECS
from fourfold.once import once_differentiable
from fourfold.parallelize.gathered import changes
from fourfold.parallelize.layers import Stored
from fourfold.parallelize.placed import Placed, PlacedLayout, version_of
from fourfold.parallelize.run import Run
from fourfold.parallelize.state import STORED, joined


@dataclass(frozen=True, eq=False)
class Borrowed(PlacedLayout):
    """A parameter of the plain module as it is stored: one shard, or those of the layers that its weight holds."""

    name: str
    parts: tuple[tuple[nn.Parameter, Spec], ...]
    stored: Stored

    @property
    def axes(self) -> tuple[str, ...]:
        return ()

    def whole(self, local: Tensor, shape: Size) -> Tensor:  # noqa: ARG002
        """Gathered once in a pass."""
        lent, key = self.run.lent, (self.name, torch.is_grad_enabled())
        if not self.run.depth:  # computed again in backward
            return self._gathered()
        if key not in lent:
            whole = self._gathered()
            lent[key] = whole, version_of(whole)
        return lent[key][0]

    def _gathered(self) -> Tensor:
        wholes = [ReadWhole.apply(self.run, self.name, spec, parameter) for parameter, spec in self.parts]
        return joined(wholes, self.stored)

    def write(self, placed: Placed, whole: Tensor) -> NoReturn:  # noqa: ARG002
        raise RuntimeError(changes(self.name))


def borrow(module: nn.Module, name: str, run: Run, owner: str) -> Placed | None:
    """A parameter of a module on the grid, for code that runs in a pass; None where there is nothing to lend."""
    stored: Mapping[str, Stored] = vars(module).get(STORED, {})
    own = [held for held, where in stored.items() if where.original == name]
    if not own or not (run.depth or in_backward()):
        return None
    parameters, specs = vars(module)["_parameters"], vars(module)[SPECS]
    parts = tuple((parameters[held], specs[held]) for held in own)
    if not all(isinstance(parameter, DTensor) for parameter, _ in parts):
        return None  # it is gathered: the module's own code runs
    first, where = parts[0][0], stored[own[0]]
    shape = (sum(len(parameter) for parameter, _ in parts), *first.shape[1:]) if first.dim() else ()
    stands_for = torch.empty(
        0, dtype=run.policy.compute or first.dtype, device=local_of(first).device, requires_grad=first.requires_grad
    )
    layout = Borrowed(run, f"{owner}.{name}".lstrip("."), parts, where)
    return Placed(stands_for, layout, shape[::-1] if where.transposed else shape)


class ReadWhole(torch.autograd.Function):
    """A parameter gathered over all axes that cut it; every rank of a place finds its whole gradient."""

    @staticmethod
    def forward(ctx: Any, run: Run, name: str, spec: Spec, parameter: nn.Parameter) -> Tensor:
        ctx.run, ctx.name, ctx.spec, ctx.parameter = run, name, spec, parameter
        ctx.during = run.gradients.forward_pass
        ctx.during.use(parameter)
        held = local_of(parameter).detach()
        if held.is_floating_point():
            held = held.to(run.policy.compute or held.dtype)
        return comm.join(held, spec.storage, spec.shape, run.grid, label=name).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.run.gradients.deposit_whole(ctx.name, ctx.parameter, ctx.spec, gradient, during=ctx.during)
        return None, None, None, None


def require_unchanged(run: Run) -> None:
    """At the end of a pass: nobody changed a parameter that it was lent."""
    for (name, _), (whole, version) in run.lent.items():
        if version_of(whole) != version:
            raise RuntimeError(changes(name))

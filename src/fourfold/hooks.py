"""Hooks on parameters, `register_hook` and `register_post_accumulate_grad_hook`, and what a backward pass leaves out.

Gradients reach parameters beside autograd, which calls hooks without one. So a backward pass first puts a `Deferred` in
the place of each hook; when it ends, gradients are complete and the hooks are called, in the order of the model's
parameters on every rank. Passes inside `accumulate` call none; the first pass outside calls them with the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from fourfold.arriving import local_of


class Deferred:
    """A hook in torch's table of them. Does nothing when autograd calls it; the user's handle removes it as ever."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *_: object) -> None:
        return


class Hooks:
    """The hooks on the parameters of one model."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = dict(parameters)
        self.leaves: dict[nn.Parameter, Node] = {}
        """Where autograd would leave the gradients of trained parameters. They are held here: autograd forgets such a
        node, and its hooks, if nobody holds it."""
        self._earlier: dict[nn.Parameter, Tensor] = {}
        """Complete gradients of earlier passes, which hooks on this pass's gradients do not see."""

    def defer(self) -> None:
        """A backward pass begins: autograd is about to call hooks."""
        for parameter in self.parameters.values():
            for table in (on_gradient(parameter), after(parameter)):
                for number, hook in table.items():
                    if not isinstance(hook, Deferred):
                        table[number] = Deferred(hook)

    def left_out(self) -> set[nn.Parameter]:
        """Parameters to which the backward pass that runs now leads no gradient: `backward(inputs=...)` leaves some
        out, `torch.autograd.grad(loss, inputs)` all."""
        trained = [(p, leaf) for p, leaf in self.leaves.items() if p.requires_grad]
        try:
            return {parameter for parameter, leaf in trained if not torch._C._will_engine_execute_node(leaf)}
        except RuntimeError as error:
            raise RuntimeError(
                "torch.autograd.grad(loss, parameters) cannot return gradients of parameters on a grid, which are "
                "summed over ranks when backward ends; call loss.backward(inputs=parameters) and read parameter.grad"
            ) from error

    def set_aside(self, parameter: nn.Parameter) -> bool:
        """Keep what earlier passes gave a parameter whose gradient hooks will see; False where there are no hooks."""
        if not on_gradient(parameter):
            return False
        self._earlier[parameter] = parameter.grad  # type: ignore[assignment]
        return True

    def forget(self, *parameters: nn.Parameter) -> None:
        """What was set aside for these parameters, or for all: their gradients were cleared, or the pass failed."""
        for parameter in parameters or tuple(self._earlier):
            self._earlier.pop(parameter, None)

    @torch.no_grad()
    def call(self, complete: Iterable[nn.Parameter]) -> None:
        """The gradients of these parameters are complete."""
        known = set(complete)
        for name, parameter in self.parameters.items():
            if parameter not in known:
                continue
            for deferred in list(on_gradient(parameter).values()):
                given = deferred.hook(parameter.grad)
                if given is not None:
                    parameter.grad = _laid_alike(given, parameter.grad, name)
            if (earlier := self._earlier.pop(parameter, None)) is not None:
                local_of(earlier).add_(local_of(parameter.grad))  # type: ignore[arg-type]
                parameter.grad = earlier
            for deferred in list(after(parameter).values()):
                deferred.hook(parameter)


def on_gradient(parameter: nn.Parameter) -> dict[int, Any]:
    """torch's own table of what `register_hook` was given."""
    return parameter._backward_hooks or {}


def after(parameter: nn.Parameter) -> dict[int, Any]:
    """torch's own table of what `register_post_accumulate_grad_hook` was given."""
    return parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def _laid_alike(given: Tensor, gradient: Tensor | None, name: str) -> Tensor:
    if not isinstance(given, DTensor) or not isinstance(gradient, DTensor) or given.shape != gradient.shape:
        raise TypeError(
            f"a hook on {name} returned {type(given).__name__} of shape {tuple(given.shape)} for a gradient that is "
            f"a DTensor of shape {tuple(gradient.shape)}; return None, or one computed from that DTensor"  # type: ignore[union-attr]
        )
    return given if given.placements == gradient.placements else given.redistribute(placements=gradient.placements)

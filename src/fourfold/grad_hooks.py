"""The users' hooks on parameters, called when gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from fourfold.params import local_of


class DeferredHook:
    """A user's hook in torch's table of hooks. Autograd's call does nothing; `ParameterHooks` calls the hook later.

    The user's handle still removes it.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *_: object) -> None:
        return


class Hooked(Protocol):
    """A parameter of a model, as its hooks need it (`gradients.TrackedParameter`)."""

    name: str
    parameter: nn.Parameter
    leaf: Node | None


class ParameterHooks:
    """The users' hooks on the parameters of one model, called when gradients are complete.

    Autograd would call them while a gradient is one rank's part, so they are replaced by `DeferredHook`s.
    """

    def __init__(self, tracked: Mapping[int, Hooked]) -> None:
        """`tracked` are the parameters of the model by their ids."""
        self.tracked = tracked
        self._earlier: dict[int, Tensor] = {}
        """Complete gradients of earlier passes: as in torch, a hook sees the gradient of this pass alone."""

    def defer(self) -> None:
        """Defer all hooks, at the beginning of a backward pass."""
        for known in self.tracked.values():
            parameter = known.parameter
            for table in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):  # type: ignore[attr-defined]
                for number, hook in table.items() if table else ():
                    if not isinstance(hook, DeferredHook):
                        table[number] = DeferredHook(hook)  # type: ignore[index]

    def left_out(self) -> set[int]:
        """Return the parameters for which the running backward pass computes no gradient.

        `backward(inputs=...)` leaves out some parameters, `torch.autograd.grad(loss, inputs)` all of them.
        """
        runs = torch._C._will_engine_execute_node
        try:
            return {
                key
                for key, known in self.tracked.items()
                if known.leaf is not None and known.parameter.requires_grad and not runs(known.leaf)
            }
        except RuntimeError as error:
            raise RuntimeError(
                "torch.autograd.grad(loss, parameters) cannot return gradients of parameters on a grid, which are "
                "summed over ranks when backward ends; call loss.backward(inputs=parameters) and read parameter.grad"
            ) from error

    def set_aside(self, parameter: nn.Parameter) -> bool:
        """Put a parameter's gradient of earlier passes aside if hooks will see the new one; return whether it did."""
        if not on_gradient(parameter):
            return False
        self._earlier[id(parameter)] = parameter.grad  # type: ignore[assignment]
        return True

    def forget(self, *parameters: nn.Parameter) -> None:
        """Drop the gradients that were put aside, of these parameters or of all, because they were cleared."""
        for key in [id(parameter) for parameter in parameters] or tuple(self._earlier):
            self._earlier.pop(key, None)

    @torch.no_grad()
    def call(self, complete: Collection[int]) -> None:
        """Call the hooks of these parameters, whose gradients are complete, in the order of the model on all ranks."""
        for key, known in self.tracked.items():
            parameter = known.parameter
            hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks  # type: ignore[attr-defined]
            if not (hooked or self._earlier) or key not in complete:
                continue
            for deferred in list(on_gradient(parameter).values()):
                given = deferred.hook(parameter.grad)
                if given is not None:
                    parameter.grad = _same_placements(given, parameter.grad, known.name)
            if (earlier := self._earlier.pop(key, None)) is not None:
                local_of(earlier).add_(local_of(parameter.grad))  # type: ignore[arg-type]
                parameter.grad = earlier
            for deferred in list(after(parameter).values()):
                deferred.hook(parameter)


def on_gradient(parameter: nn.Parameter) -> dict[int, Any]:
    """Return torch's table of the hooks that `register_hook` added."""
    return parameter._backward_hooks or {}


def after(parameter: nn.Parameter) -> dict[int, Any]:
    """Return torch's table of the hooks that `register_post_accumulate_grad_hook` added."""
    return parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]


def _same_placements(given: Tensor, gradient: Tensor | None, name: str) -> Tensor:
    if not isinstance(given, Tensor) or not isinstance(gradient, DTensor) or given.shape != gradient.shape:
        raise TypeError(
            f"a hook on {name} returned {type(given).__name__} of shape {tuple(given.shape)} for a gradient that is "
            f"a DTensor of shape {tuple(gradient.shape)}; return None, or a tensor of that shape"  # type: ignore[union-attr]
        )
    if not isinstance(given, DTensor):
        return given  # whole: the parameter takes its part
    return given if given.placements == gradient.placements else given.redistribute(placements=gradient.placements)

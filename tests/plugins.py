"""Classes and functions of users, which configs of tests name as `plugins:Name`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class CountingSGD(torch.optim.Optimizer):
    """SGD with a learning rate that falls with its own count of steps, which is a plain number, and with no decay."""

    def __init__(self, params: Any, lr: float = 0.1, power: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] = state.get("count", 0) + 1
                    parameter.sub_(parameter.grad * (group["lr"] / state["count"] ** group["power"]))


class RowSGD(torch.optim.SGD):
    """SGD whose state has one number for each row, which no checkpoint of ours holds."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.new_zeros(len(parameter), 1)
        return super().step(closure)

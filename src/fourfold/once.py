"""Backward functions that are computed once and cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable as once_of_torch


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of this name, which refuses `create_graph=True` where backward runs, not a pass later."""
    once = once_of_torch(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # autograd turns it on with create_graph alone
            raise RuntimeError(
                "create_graph=True: gradients of gradients do not pass through layers on a grid; leave create_graph "
                "out, or keep the module that needs it out of ff.parallelize and call it beside the model"
            )
        return once(ctx, *gradients)

    return refusing

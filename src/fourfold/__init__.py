"""Fourfold trains neural networks on a grid of devices.

Names are imported when they are first used, so that `fourfold --help` and torchrun's own process do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fourfold import models, nn, optim
    from fourfold.checkpoint.load import load
    from fourfold.checkpoint.save import save
    from fourfold.compare import compare_serial
    from fourfold.data.sampling import local_rows
    from fourfold.grad_norm import clip_grad_norm_
    from fourfold.gradients import accumulate
    from fourfold.grid import Grid
    from fourfold.nn.loss import count_targets, global_mean
    from fourfold.pipeline import forward_backward
    from fourfold.policy import Overlap, Policy
    from fourfold.shape import Shape
    from fourfold.step_graph import StepGraph
    from fourfold.wrap import explain, parallelize
    from fourfold.wrap.rows import whole_batch

__version__ = "0.2.0"

__all__ = [
    "Grid",
    "Overlap",
    "Policy",
    "Shape",
    "StepGraph",
    "accumulate",
    "clip_grad_norm_",
    "compare_serial",
    "count_targets",
    "explain",
    "forward_backward",
    "global_mean",
    "load",
    "local_rows",
    "models",
    "nn",
    "optim",
    "parallelize",
    "save",
    "whole_batch",
]

_HOMES = {
    "Grid": "grid",
    "Overlap": "policy",
    "Policy": "policy",
    "Shape": "shape",
    "StepGraph": "step_graph",
    "accumulate": "gradients",
    "clip_grad_norm_": "grad_norm",
    "compare_serial": "compare",
    "count_targets": "nn.loss",
    "explain": "wrap",
    "forward_backward": "pipeline",
    "global_mean": "nn.loss",
    "load": "checkpoint.load",
    "local_rows": "data.sampling",
    "parallelize": "wrap",
    "save": "checkpoint.save",
    "whole_batch": "wrap.rows",
}
"""The module of each name; the others are modules themselves."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = import_module(f"{__name__}.{_HOMES.get(name, name)}")
    found = globals()[name] = getattr(home, name) if name in _HOMES else home
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

"""Optimizers that cannot step shards, refused before their first step.

An optimizer that treats each number by itself steps DTensors as they are. One that needs whole matrices, norms of rows
or products of all gradients fails inside torch, or computes from parts what it means for the whole.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fourfold.dtensor_strategies import GRID

REFUSED = ("Adafactor", "LBFGS", "Muon", "Rprop")
"""Classes of torch.optim and transformers. Rprop only because torch does not index DTensors in place."""
HOMES = ("torch", "transformers")


@functools.cache
def refuse_unfit_optimizers() -> None:
    """From now on, in this process, when one of them steps a parameter that lies on a grid."""
    register_optimizer_step_pre_hook(_refuse)


REPLACED = "_fourfold_replaced"
"""Attribute of a plain parameter for which `parallelize` put shards into the model."""


def _refuse(optimizer: Optimizer, *_: Any) -> None:
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(hasattr(parameter, REPLACED) for parameter in held):
        raise RuntimeError(
            "this optimizer was made before ff.parallelize and steps parameters that the model no longer has; make it "
            "after, from model.parameters()"
        )
    kinds = [kind for kind in type(optimizer).__mro__ if kind.__name__ in REFUSED]
    if not any(kind.__module__.partition(".")[0] in HOMES for kind in kinds):
        return
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if any(isinstance(each, DTensor) and hasattr(each.device_mesh, GRID) for each in parameters):
        raise TypeError(
            f"{kinds[0].__name__} cannot step parameters of which every rank of a grid holds a part; use an optimizer "
            "that treats each number by itself, such as torch.optim.AdamW, SGD, RMSprop, Adagrad or RAdam"
        )

"""The precision that a loop asks for, `torch.autocast` or accelerate's, beside that of the policy.

Layers on the grid have their gathered weights and their messages in the policy's dtype. Nobody else can change it, so
a loop that asks for another is refused instead of ignored.
"""

from __future__ import annotations

import sys

import torch

from fourfold.wrap.run import Run

NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""What accelerate calls the dtypes that it computes in."""


def require_precision(run: Run) -> None:
    """A pass begins. accelerate, and with it the Trainer, leaves a parallelised model as it is, so that its mixed
    precision never comes as autocast."""
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None:
        return
    asked = accelerate.AcceleratorState._shared_state.get("_mixed_precision") or "no"
    if asked not in ("no", *NAMES):
        raise ValueError(
            f"accelerate's mixed_precision={asked!r} does not work on a grid; use 'no', or one of {[*NAMES]}"
        )
    if asked != "no" and run.policy.compute != NAMES[asked]:
        _refuse(run, f"accelerate's mixed_precision={asked!r} (the Trainer's {asked}=True)", NAMES[asked])


def require_same_as_autocast(run: Run, dtype: torch.dtype) -> None:
    """A module is called under `torch.autocast` to that dtype."""
    if run.policy.compute != dtype:
        _refuse(run, f"torch.autocast to {dtype}", dtype)


def _refuse(run: Run, asked: str, dtype: torch.dtype) -> None:
    raise ValueError(
        f"{asked} is on, but the model was parallelised with Policy(compute={run.policy.compute}) and would not follow "
        f"it; use ff.parallelize(model, grid, policy=ff.Policy(compute={dtype})), with which it may stay on, or "
        "turn it off"
    )

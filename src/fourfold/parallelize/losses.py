"""Losses inside a parallelised model: means over the whole batch, whose rows lie on all (data, z) places.

While a model runs, torch's own loss functions with reduction="mean" divide by the count of all places and show the
mean of all, and with "sum" they show the sum of all; gradients are this place's share either way. Logits that are cut
over the vocabulary are never gathered for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fourfold.nn.loss import IGNORE_INDEX, cross_entropy, sum_over_batch
from fourfold.operators import Conjugate
from fourfold.parallelize.layouts import Columns
from fourfold.parallelize.placed import Placed, whole
from fourfold.parallelize.run import Run

BY_CLASS = {functional.cross_entropy, functional.nll_loss}
BY_ELEMENT = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.kl_div,
    functional.poisson_nll_loss,
    functional.gaussian_nll_loss,
    functional.soft_margin_loss,
    functional.hinge_embedding_loss,
}
BY_ROW = {
    functional.cosine_embedding_loss,
    functional.margin_ranking_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.triplet_margin_loss,
}


class GlobalLosses(TorchFunctionMode):
    """Inside, losses are those of the whole batch."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in BY_CLASS or func in BY_ELEMENT or func in BY_ROW:
            return global_loss(self.run, func, args, kwargs)
        return func(*args, **kwargs)


def global_loss(run: Run, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    input, target = (*args, *(kwargs[name] for name in ("input", "target") if name in kwargs))[:2]
    reduction = kwargs.get("reduction", "mean")
    if reduction not in ("mean", "sum") or len(args) > 3 or not isinstance(target, Tensor):
        return func(*args, **kwargs)
    if func is functional.cross_entropy and _is_cut(input, target, args, kwargs):
        run.reads_logits = True
        vocabulary = input.placement.head.vocabulary(kwargs.get("ignore_index", IGNORE_INDEX))
        count = 1 if reduction == "sum" else None
        flat = input.local.reshape(-1, input.local.shape[-1])
        return cross_entropy([flat], [whole(target).long()], vocabulary, count=count)[0]
    args, kwargs = torch.utils._pytree.tree_map_only(Placed, Placed.whole, (args, kwargs))
    total = func(*args, **{**kwargs, "reduction": "sum"})
    if reduction == "mean":
        own = _count(func, whole(input), whole(target), kwargs, args)
        total = total / sum_over_batch(own, run.grid, "loss").clamp(min=_least(kwargs)).to(total.dtype)
    return Conjugate.apply(total, lambda share: sum_over_batch(share, run.grid, "loss").clone(), torch.clone)


def _is_cut(input: Any, target: Tensor, args: tuple, kwargs: dict) -> bool:
    """Whether the logits are cut over the vocabulary and the targets are ids."""
    if not isinstance(input, Placed) or not isinstance(input.placement, Columns) or target.is_floating_point():
        return False
    weighted = kwargs.get("weight") is not None or len(args) > 2 or kwargs.get("label_smoothing", 0.0) != 0
    return not weighted and input.dim() == 2 and input.placement.dim == 1


def _count(func: Callable, input: Tensor, target: Tensor, kwargs: dict, args: tuple) -> Tensor:
    """What the mean over this place's rows would be divided by, in fp64."""
    if func in BY_CLASS and not target.is_floating_point():
        kept = target != kwargs.get("ignore_index", IGNORE_INDEX)
        weight = kwargs.get("weight", args[2] if len(args) > 2 else None)
        if weight is None:
            return kept.sum().double()
        return (weight[target.masked_fill(~kept, 0)] * kept).sum().double()
    if func in BY_ELEMENT:
        return torch.full((), torch.broadcast_shapes(input.shape, target.shape).numel(), device=input.device).double()
    rows = input.shape.numel() // input.shape[1] if func in BY_CLASS and input.dim() > 1 else input.shape[0]
    return torch.full((), rows, dtype=torch.float64, device=input.device)


def _least(kwargs: dict) -> float:
    """A batch without targets has loss 0, as elsewhere; weights may sum to less than 1."""
    return 1.0 if kwargs.get("weight") is None else 1e-300

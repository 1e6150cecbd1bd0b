"""What a model's own code calls and must mean something else on the grid: losses, and `.data` of parameters.

Rows of a batch lie on all (data, z) places. While a model runs, torch's own loss functions with reduction="mean" are
global: they show the mean over the targets of all places, and their gradient is that of this mean. With "sum" they are
this place's own, as whatever else a model computes from its rows, for people divide sums by counts of their own; but
where a Hugging Face model is told the batch's count (`num_items_in_batch`) its sums are global as well. Logits that are
cut over the vocabulary are never gathered for a loss.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import _reduction, functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold.axes import BATCH
from fourfold.comm import equal_along
from fourfold.layout import inner
from fourfold.nn.loss import Vocabulary, cross_entropy, sum_of_places, sum_over_batch
from fourfold.operators import Conjugate
from fourfold.parallelize.gathered import changes
from fourfold.parallelize.layouts import Columns
from fourfold.parallelize.placed import Placed, changes_in_place, settle, whole
from fourfold.parallelize.rows import gather_rows, whole_batch
from fourfold.parallelize.run import Run
from fourfold.parameter import whole_tensor

BY_CLASS = {
    getattr(functional, name)
    for name in ("cross_entropy", "nll_loss", "linear_cross_entropy")
    if hasattr(functional, name)
}
"""Their mean is over the targets that count, by the weights of their classes."""
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
    functional.cosine_embedding_loss,
    functional.margin_ranking_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.triplet_margin_loss,
    functional.triplet_margin_with_distance_loss,
    functional.ctc_loss,
}
"""Their mean is over what they give with reduction="none"."""
BY_WEIGHT = {functional.mse_loss, functional.l1_loss}
"""Those whose weights, if there are any, are what the mean is divided by."""


class GlobalLosses(TorchFunctionMode):
    """Inside, losses are those of the whole batch."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is whole_batch:
            rows, sample = whole(args[0]), self.run.sample
            if self.run.gradients.guarded and not equal_along(len(rows), self.run.grid, BATCH):
                raise ValueError(
                    f"ff.whole_batch gathers equally many rows of each place, and this one has {len(rows)}, another "
                    "more or fewer; pad the rows, or give all places the same number"
                )
            return gather_rows(rows, self.run.grid) if sample is None else sample.whole_batch(rows, self.run.grid)
        if func in BY_CLASS or func in BY_ELEMENT:
            self.run.losses += 1
            if self.run.own_losses:
                return func(*args, **kwargs)
            return global_loss(self.run, func, args, kwargs)
        if func in DATA and id(args[0]) in self.run.running:
            return parameter_data(self.run, func, args[0])
        if not torch.is_grad_enabled() and any(isinstance(value, DTensor) for value in args):
            args, kwargs = _whole_beside_plain(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.run.copies:
            settle(self.run)
        return result


def _whole_beside_plain(func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Gather parameters that meet plain tensors. Where gradients are off, what `parameters()` gives is an ordinary
    DTensor, which torch does not mix with plain tensors."""
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    mixed = any(not isinstance(tensor, DTensor) for tensor in tensors)
    if not mixed or changes_in_place(getattr(func, "__name__", "")):
        return args, kwargs
    return tree_map_only(DTensor, whole_tensor, (args, kwargs))


DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[missing-attribute]


def parameter_data(run: Run, func: Callable, parameter: Tensor) -> Tensor:
    """`.data` of a gathered parameter, which hides changes from autograd, and must not do so from `Gathered`."""
    if func == DATA[1]:
        raise RuntimeError(changes(run.running[id(parameter)]))
    return parameter.detach()


def shared(run: Run, loss: Tensor) -> Tensor:
    """A global loss that is part of every place's loss: its gradient is the average of what the places find for it,
    which differ where one multiplies it by something of its own."""
    if run.grid.shape.places == 1 or not loss.requires_grad:
        return loss
    return Conjugate.apply(
        loss, torch.clone, lambda gradient: sum_over_batch(gradient, run.grid, "loss") / run.grid.shape.places
    )


def global_loss(run: Run, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    named = _bound(func, args, kwargs)
    reduction = named["reduction"]
    of_place = reduction == "sum" and not run.counted
    if reduction not in ("mean", "sum", "batchmean"):
        return func(*args, **kwargs)
    if func is functional.cross_entropy and _is_cut(named):
        run.reads_logits = True
        input, targets = named["input"], whole(named["target"]).long()
        vocabulary = input.placement.head.vocabulary(named["ignore_index"], of_place=of_place)
        count = 1 if reduction == "sum" else None
        loss = cross_entropy([input.local.flatten(0, -2)], [targets], vocabulary, count=count)[0]
        return loss if of_place else shared(run, loss)
    if of_place:
        return func(*args, **kwargs)
    if func is functional.cross_entropy and not run.cuts and _by_id(named):
        input = named["input"]
        ids = range(input.shape[1])
        vocabulary = Vocabulary(run.grid, inner(run.policy.activations), ids, named["ignore_index"], "loss")
        count = 1 if reduction == "sum" else None
        return shared(run, cross_entropy([input], [named["target"].long()], vocabulary, count=count)[0])
    named = tree_map_only(Placed, Placed.whole, named)
    total, count = (_by_class if func in BY_CLASS else _by_element)(func, named)
    if reduction != "sum":
        everyones = sum_over_batch(count, run.grid, "loss")
        total = total / torch.where(everyones == 0, 1, everyones).to(total.dtype)  # a batch without targets has loss 0
    return shared(run, sum_of_places(total, run.grid, "loss"))


@cache
def _signature(func: Callable) -> inspect.Signature:
    return inspect.signature(func)


def _bound(func: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """All arguments by name, with what torch's old words for a reduction mean."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    old = named.pop("size_average", None), named.pop("reduce", None)
    if old != (None, None):
        named["reduction"] = _reduction.legacy_get_string(*old)
    if func is functional.l1_loss and named["weight"] is None:
        named["weight"] = _lost_weight()
    return named


def _lost_weight() -> Tensor | None:
    """What l1_loss was called with and does not pass on (torch 2.13)."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not functional.l1_loss.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["weight"]


def _is_cut(named: dict[str, Any]) -> bool:
    """Whether the logits [m, V] are cut over the vocabulary and the targets are ids."""
    input = named["input"]
    columns = isinstance(input, Placed) and isinstance(input.placement, Columns) and input.placement.dim == 1
    return columns and _by_id(named)


def _by_id(named: dict[str, Any]) -> bool:
    """Whether it is the cross-entropy of [m, V] with an id for each row, and nothing else."""
    plain = named["weight"] is None and named["label_smoothing"] == 0
    return plain and named["input"].dim() == 2 and not named["target"].is_floating_point()


def _by_class(func: Callable, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The sum over this place's rows, and what their mean would be divided by, in fp64."""
    total = func(**{**named, "reduction": "sum"})
    target, weight = named["target"], named["weight"]
    if target.is_floating_point():
        classes = target.shape[1] if target.dim() > 1 else target.shape[0]
        return total, _number(target.numel() // max(classes, 1), total)
    kept = target != named["ignore_index"]
    if weight is None:
        return total, kept.sum().double()
    return total, (weight[target.masked_fill(~kept, 0)] * kept).sum().double()


def _by_element(func: Callable, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    each = func(**{**named, "reduction": "none"})
    if func is functional.ctc_loss and named["reduction"] == "mean":
        each = each / torch.as_tensor(named["target_lengths"], device=each.device).clamp(min=1).to(each.dtype)
    if named["reduction"] == "batchmean":
        return each.sum(), _number(each.shape[0] if each.dim() else 1, each)
    if func in BY_WEIGHT and named["weight"] is not None:
        return each.sum(), named["weight"].sum().double()
    return each.sum(), _number(each.numel(), each)


def _number(count: int, like: Tensor) -> Tensor:
    return torch.full((), count, dtype=torch.float64, device=like.device)

"""The beginning and the end of a forward pass of a wrapped model, and what losses mean inside it.

The rows of a batch lie on all (data, z) places. While a model runs, torch's loss functions with reduction="mean" are
global: they return the mean over the targets of all places, and their gradient is the gradient of this mean. With "sum"
they are each place's own, like everything else that a model computes from its rows, because people divide sums by
counts of their own; but where a Hugging Face model gets the number of targets in the batch (`num_items_in_batch`), its
sums are global as well. Logits that are cut over the vocabulary are never gathered for a loss.
"""

from __future__ import annotations

import inspect
import json
import sys
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import _reduction, functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold.axes import BATCH, CONTEXT, CUTS
from fourfold.comm import equal_along
from fourfold.layout import GATHERED, REPEATED, Layout, inner
from fourfold.nn.layer import recompute
from fourfold.nn.loss import Vocabulary, cross_entropy, sum_of_places, sum_over_batch
from fourfold.nn.rng import key_of, no_draws, seeded, seeded_outside_torch
from fourfold.operators import Conjugate
from fourfold.params import local_of, whole_tensor
from fourfold.place_order import PlaceOrder
from fourfold.shape import Shape
from fourfold.wrap.adapters import Adapter, lost_change_error
from fourfold.wrap.grid_tensor import (
    WITHIN_PLACE,
    GridTensor,
    ModelContext,
    is_in_place,
    sync_whole_copies,
    to_whole,
    version_of,
)
from fourfold.wrap.integrations import refuse_scaled_losses, require_accelerate_precision
from fourfold.wrap.ops_sequence import cut_plain, embed, own_targets
from fourfold.wrap.own_tokens import OwnTokens
from fourfold.wrap.parameters import require_unchanged_parameters
from fourfold.wrap.placements import LogitsPlacement, to_rest
from fourfold.wrap.rows import RowSample, Scalars, check_rows, gather_rows, leaves_of, map_tensors, whole_batch
from fourfold.wrap.sequence_tensor import SequenceTensor, group_sum, refusal, sequence_tensors_in

# losses inside a model

BY_CLASS = {functional.cross_entropy, functional.nll_loss, getattr(functional, "linear_cross_entropy", None)}
"""Losses with a mean over the targets that count, weighted by class. Older versions of torch lack the last one."""
ELEMENTWISE = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div poisson_nll_loss
gaussian_nll_loss soft_margin_loss hinge_embedding_loss cosine_embedding_loss margin_ranking_loss multi_margin_loss
multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss ctc_loss
"""
BY_ELEMENT = {getattr(functional, name) for name in ELEMENTWISE.split()}
"""Losses with a mean over the elements that they return with reduction="none"."""
BY_WEIGHT = {functional.mse_loss, functional.l1_loss}
"""Losses by element that divide by the sum of their weights, if they have weights."""
DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[missing-attribute]
"""Reading and writing `.data`."""


class GlobalLosses(TorchFunctionMode):
    """Gives some torch functions another meaning while a wrapped model runs.

    These are the losses, `whole_batch`, `.data` of gathered parameters, and operations that mix parameters with plain
    tensors.
    """

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, context = kwargs or {}, self.context
        if func is whole_batch:
            return self._whole_batch(to_whole(args[0]))
        if func in BY_CLASS or func in BY_ELEMENT:
            return self._loss(func, args, kwargs)
        if func is functional.embedding and context.own_tokens is not None:
            return embed(context, args, kwargs)
        if func in DATA and id(args[0]) in context.gathered_names:
            # `.data` hides changes from autograd's version counter, by which GatheredAdapter finds them
            if func == DATA[1]:
                raise lost_change_error(context.gathered_names[id(args[0])])
            return args[0].detach()
        if not torch.is_grad_enabled() and any(isinstance(value, DTensor) for value in args):
            args, kwargs = _gather_mixed_parameters(func, args, kwargs)
        result = func(*args, **kwargs)
        if context.whole_copies:
            sync_whole_copies(context)
        return result

    def _whole_batch(self, rows: Tensor) -> Tensor:
        context, sample = self.context, self.context.sample
        if context.own_tokens is not None:
            raise ValueError(
                f"ff.whole_batch on the grid {context.grid}: places of a context group have the same rows, each with "
                "other tokens; use a grid with context=1"
            )
        if context.gradients.guarded and not equal_along(len(rows), context.grid, BATCH):
            raise ValueError(
                f"ff.whole_batch gathers equally many rows of each place; this place has {len(rows)}, another has "
                "more or fewer: pad the rows, or give all places the same number"
            )
        self._come("ff.whole_batch")
        return gather_rows(rows, context.grid) if sample is None else sample.whole_batch(rows, context.grid)

    def _come(self, call: str) -> None:
        """Come to a call that sends messages to all places; where earlier passes had another one, ranks meet."""
        context = self.context
        if context.expected_calls is None:
            return
        if not context.calls:
            context.gradients.come_to_losses()
        context.calls.append(call)
        at = len(context.calls) - 1
        if context.expected_calls[at : at + 1] != [call]:
            context.grid.agree_in_time(CALLS, f"{call} as number {at + 1}")

    def _loss(self, func: Callable, args: tuple, kwargs: dict) -> Tensor:
        context = self.context
        context.loss_calls += 1
        if not context.local_losses:
            self._come(func.__name__)
        if context.own_tokens is not None:
            return loss_of_group(context, func, args, kwargs)
        return func(*args, **kwargs) if context.local_losses else global_loss(context, func, args, kwargs)


CALLS = "which of torch's losses and ff.whole_batch the model calls"
"""The calls in forward that send messages to all places, in words."""


def _gather_mixed_parameters(func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Gather parameters that are used together with plain tensors.

    Where gradients are off, `parameters()` gives ordinary DTensors, which torch does not mix with plain tensors.
    """
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    mixed = any(not isinstance(tensor, DTensor) for tensor in tensors)
    if not mixed or is_in_place(getattr(func, "__name__", "")):
        return args, kwargs
    return tree_map_only(DTensor, whole_tensor, (args, kwargs))


def global_loss(context: ModelContext, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Compute one of torch's losses as a wrapped model means it.

    A mean is one over the whole batch. A sum is this place's own, unless the number of targets was given; `none` stays.
    """
    named = _bound(func, args, kwargs)
    reduction = named["reduction"]
    of_place = reduction == "sum" and not context.has_target_count
    if reduction not in ("mean", "sum", "batchmean"):  # "none": each row has its own loss
        return func(*args, **kwargs)
    by_id = func is functional.cross_entropy and _is_by_id(named)
    count = 1 if reduction == "sum" else None
    placement = named["input"].placement if by_id and isinstance(named["input"], GridTensor) else None
    if isinstance(placement, LogitsPlacement) and placement.dim == 1:
        context.loss_read_logits = True
        input, targets = named["input"], to_whole(named["target"]).long()
        vocabulary = placement.head.vocabulary(named["ignore_index"], of_place=of_place)
        loss = cross_entropy([input.local.flatten(0, -2)], [targets], vocabulary, count=count)[0]
        return _noted_sum(context, loss) if of_place else _average_gradient(context, loss)
    if of_place:
        return _noted_sum(context, func(*args, **kwargs))
    if by_id and not context.is_cut:
        input = named["input"]
        ids = range(input.shape[1])
        vocabulary = Vocabulary(context.grid, inner(context.policy.activations), ids, named["ignore_index"])
        loss = cross_entropy([input], [named["target"].long()], vocabulary, count=count)[0]
        return _average_gradient(context, loss)
    named = tree_map_only(GridTensor, GridTensor.whole, named)
    total, number = (_sum_by_class if func in BY_CLASS else _sum_by_element)(func, named)
    if reduction != "sum":
        all_places = sum_over_batch(number, context.grid, "loss")
        # a batch without targets has loss 0; torch.where, because a condition in Python would read the device
        total = total / torch.where(all_places == 0, 1, all_places).to(total.dtype)
    return _average_gradient(context, sum_of_places(total, context.grid, "loss"))


def _noted_sum(context: ModelContext, loss: Tensor) -> Tensor:
    """Note a sum over the rows of this place, for `RootAdapter._warn_of_sums`."""
    context.place_sums.append(weakref.ref(loss))
    return loss


def loss_of_group(context: ModelContext, func: Callable, args: tuple, kwargs: dict) -> Tensor:
    """Compute one of torch's losses on a grid with a context size, where members of a group hold different tokens.

    A mean over the batch counts each member's own targets. A loss that is each place's own is one of the whole group.
    """
    named = _bound(func, args, kwargs)
    reduction, members = named["reduction"], context.grid.shape.context
    if not sequence_tensors_in(named):  # whole on all members
        if context.local_losses:
            return func(*args, **kwargs)
        loss = global_loss(context, func, args, kwargs)
        # members add the same sum, and the count of the batch's targets has each of them once
        return loss / members if reduction == "sum" and context.has_target_count else loss
    leader, named, dim = own_targets(func, named)
    if reduction == "none":
        return leader.like(func(**named), dim)
    if reduction == "batchmean" and dim:
        raise refusal(func, leader, "rows are not counted where tokens are cut", "use reduction='mean'")
    if context.local_losses and reduction != "sum":
        named = tree_map_only(GridTensor, GridTensor.whole, named)
        total, number = (_sum_by_class if func in BY_CLASS else _sum_by_element)(func, named)
        return group_sum(total, context) / group_sum(number, context).to(total.dtype)
    of_place = reduction == "sum" and (context.local_losses or not context.has_target_count)
    loss = func(**named) if context.local_losses else global_loss(context, func, (), named)
    return group_sum(to_whole(loss), context) if of_place else loss


def _average_gradient(context: ModelContext, loss: Tensor) -> Tensor:
    """Average the gradient of a global loss over places.

    The loss is part of every place's loss, and places may multiply it by different numbers.
    """
    places = context.grid.shape.places
    if places == 1 or not loss.requires_grad:
        return loss

    def average(gradient: Tensor) -> Tensor:
        context.gradients.come_to_loss_gradient()
        return sum_over_batch(gradient, context.grid, "loss") / places

    return Conjugate.apply(loss, torch.clone, average)


_signature = cache(inspect.signature)  # reading a signature takes longer than a small loss


def _bound(func: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return all arguments by name; torch's old arguments `size_average` and `reduce` become a reduction."""
    bound = _signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    named = dict(bound.arguments)
    old = named.pop("size_average", None), named.pop("reduce", None)
    if old != (None, None):
        named["reduction"] = _reduction.legacy_get_string(*old)
    if func is functional.l1_loss and named["weight"] is None:
        # l1_loss does not pass its weight on to __torch_function__ (torch 2.13), so read it from the caller's frame
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not functional.l1_loss.__code__:
            frame = frame.f_back
        named["weight"] = None if frame is None else frame.f_locals["weight"]
    return named


def _is_by_id(named: dict[str, Any]) -> bool:
    """Return whether a call computes the plain cross-entropy of logits [m, V] with one id per row."""
    plain = named["weight"] is None and named["label_smoothing"] == 0
    return plain and named["input"].dim() == 2 and not named["target"].is_floating_point()


def _sum_by_class(func: Callable, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the sum over this place's rows, and the number by which a mean would divide it, in fp64."""
    total = func(**{**named, "reduction": "sum"})
    target, weight = named["target"], named["weight"]
    if target.is_floating_point():
        classes = target.shape[1] if target.dim() > 1 else target.shape[0]
        return total, _number(target.numel() // max(classes, 1), total)
    kept = target != named["ignore_index"]
    if weight is None:
        return total, kept.sum().double()
    return total, (weight[target.masked_fill(~kept, 0)] * kept).sum().double()


def _sum_by_element(func: Callable, named: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the sum over this place's elements, and the number by which a mean would divide it, in fp64."""
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


# passes

COUNT = "num_items_in_batch"
"""The argument by which Hugging Face's models divide the sum of a batch's losses. The caller counts the targets of one
place, because all other arguments are about the rows of one place too."""
CONTRASTIVE = "return_loss"
"""The argument that asks Hugging Face's models of images and texts for a loss that compares all rows."""


class RootAdapter(Adapter):
    """Begins and ends a pass. It takes the rows of this rank's (data, z) place and returns whole tensors for them."""

    def __init__(self, name: str, context: ModelContext, why: str) -> None:
        super().__init__(name, context, why)
        self.checked: set[Hashable] = set()
        """The checks that were made. Each is made once: a loop that reads wrong rows does so from the first step."""
        self.evaluations = 0
        """Passes in evaluation mode, so that each of them draws other random numbers."""
        self.trainings = 0
        """Passes in training mode. Buffers are compared after the first one, then at doubling intervals."""
        self.has_buffers: bool | None = None
        """Whether the model had buffers before its first training pass. Without buffers places may run unequal numbers
        of passes that send nothing."""
        self.written: set[str] = set()
        """The buffers that forward has written on this rank."""
        self.calls: dict[Hashable, list[str]] = {}
        """The calls of a pass that send messages to all places, by kind of pass: the same on all ranks."""

    def _first_time(self, *check: Hashable) -> bool:
        """Return whether a check has not been made before, and note that it is made now."""
        new = check not in self.checked
        self.checked.add(check)
        return new

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = self.context
        if context.in_pass:
            return forward(*args, **kwargs)
        require_accelerate_precision(context)
        context.gradients.meet()
        if context.gradients.places is None:
            keep_order(context)
        if kwargs.get(COUNT) is not None and context.grid.shape.world > 1 and self._first_time("scaled losses"):
            refuse_scaled_losses()  # before the check of rows, which swallows errors that the model raises
        self._require_same_rows(args, kwargs)
        self._warn_of_same_rows(module, args, kwargs)
        kind = _kind_of(module, args, kwargs)
        first = self._is_first_call(kind)
        scalars = self._check_rows(module, forward, args, kwargs) if first else Scalars()
        if module.training:
            context.clock.advance()
        context.gradients.begin_forward("training" if torch.is_grad_enabled() else "evaluation", guarded=first)
        buffers = module.named_buffers() if module.training else ()
        before = {name: (buffer, version_of(buffer)) for name, buffer in buffers}
        self.evaluations += not module.training
        name = self.name if module.training else f"{self.name} evaluation {self.evaluations}"
        # one seed for all ranks with the same rows, so that they drop the same elements of tensors that they all hold
        seed = context.clock.key(name, context.grid, REPEATED)
        if context.grid.shape.context > 1:
            seed = context.clock.key(
                f"{name} rows {context.grid.shape.row_place(context.grid.rank)}", context.grid, Layout()
            )
        recorded = context.grid.recording is not None  # torch's generators cannot be seeded then
        with no_draws() if recorded else _all_seeded(seed, context.grid.device):
            self._expect_calls(kind)
            result = self._pass(forward, args, kwargs)
        self._require_same_calls(kind)
        if module.training:
            self.trainings += 1
            self.has_buffers = bool(before) if self.has_buffers is None else self.has_buffers
            self._note_written(module, before)
            compared = self.has_buffers and context.grid.shape.places > 1 and not context.grid.muted
            if compared and self.trainings.bit_count() == 1:
                self._require_same_buffers(module)
        if first:
            _refuse_losses(module, result, scalars.strange)
            self._warn_of_sums(result, scalars.sums)
        return result

    def _pass(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the model's own code as one pass."""
        context = self.context
        context.has_target_count = kwargs.get(COUNT) is not None
        context.compares_rows = bool(kwargs.get(CONTRASTIVE))
        if context.has_target_count:
            # the caller counted this place's targets; in fp64, because a sum of counts in the caller's dtype may round
            own = torch.as_tensor(kwargs[COUNT], device=context.grid.device)
            total = sum_over_batch(own.double(), context.grid, "count targets") / context.grid.shape.context
            total = total.to(own.dtype)  # places of a context group have counted the same targets
            kwargs = {**kwargs, COUNT: total}
        context.require_same_modules()
        context.require_same_parameters()
        args, kwargs = self._cut_sequences(args, kwargs)
        context.begin_pass()
        try:
            with GlobalLosses(context), counted_changes(context):
                result = forward(*args, **kwargs)
                self._require_cuts()
                for group in list(context.shared_reads):  # some of its layers never asked for their results
                    group.split()
                result = map_tensors(self._returned, result, in_place=True)
            require_unchanged_parameters(context)
            if context.gradients.places is not None:
                context.gradients.places.finish()
        finally:
            context.end_pass()
        return result

    def _returned(self, value: Tensor) -> Tensor:
        """Return the tensor that the caller gets; logits that a loss has read stay cut until somebody reads them."""
        context = self.context
        if isinstance(value, DTensor):  # computed from parameters alone, without gradients
            return whole_tensor(value)
        if isinstance(value, SequenceTensor):
            return value if context.loss_calls and context.grad_enabled else value.whole()
        if not isinstance(value, GridTensor):
            return value
        stays = isinstance(value.placement, LogitsPlacement) and context.loss_read_logits and context.grad_enabled
        return value if stays else value.whole()

    def _cut_sequences(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin a pass over sequences that are cut, on a grid with a context size.

        Ids stay whole, and are cut where they are looked up. Tensors [rows, seq, features] are cut here.
        """
        context = self.context
        if context.grid.shape.context == 1:
            return args, kwargs
        seq = next((tensor.shape[1] for tensor in _tensors((args, kwargs)) if tensor.dim() > 1), 0)
        if not seq:
            raise ValueError(
                f"the grid {context.grid} cuts sequences, and no input of the model has the shape [rows, seq, ...]; "
                "use a grid with context=1"
            )
        if context.own_tokens is None or context.own_tokens.seq != seq:
            context.own_tokens = OwnTokens(seq, context.grid, context.policy)
        context.own_tokens.cuts = 0

        def cut(value: Tensor) -> Tensor:
            if not value.is_floating_point() or value.dim() < 3 or value.shape[1] != seq:
                return value
            return SequenceTensor(*cut_plain(context, value, 1), context)

        return map_tensors(cut, (args, kwargs))

    def _require_cuts(self) -> None:
        """Refuse a model in which nothing was cut: all members would compute the same."""
        tokens = self.context.own_tokens
        if tokens is not None and not tokens.cuts:
            raise RuntimeError(
                f"the grid {self.context.grid} cuts sequences, and no tensor of the model was cut: sequences are cut "
                f"where an nn.Embedding or F.embedding looks up ids [rows, {tokens.seq}], or as inputs [rows, "
                f"{tokens.seq}, features]; use one of these, or a grid with context=1"
            )

    def _is_first_call(self, kind: tuple[str, ...]) -> bool:
        """Return True once per kind of arguments, for a pass with gradients on a grid with several places."""
        grid = self.context.grid
        trains = torch.is_grad_enabled() and grid.shape.row_places > 1 and not grid.muted
        if not trains or not self._first_time(kind):
            return False
        grid.agree_in_time("the arguments that the model is given", ", ".join(kind))
        return True

    def _expect_calls(self, kind: Hashable) -> None:
        """Let calls that send messages to all places meet the other ranks, unless earlier passes have made the same."""
        context = self.context
        compared = context.grid.shape.places > 1 and not context.grid.muted
        context.expected_calls = self.calls.get(kind, []) if compared else None

    def _require_same_calls(self, kind: Hashable) -> None:
        """Meet the other ranks if this pass has made other calls than earlier ones of its kind."""
        context = self.context
        if context.expected_calls is not None and self.calls.get(kind, []) != context.calls:
            context.grid.agree_in_time(CALLS, f"{len(context.calls)} in all")
            self.calls[kind] = context.calls

    def _check_rows(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Scalars:
        """Check whether rows depend on each other (rows.py)."""
        context = self.context

        def on_sample(sample: RowSample, args: tuple, kwargs: dict) -> Any:
            context.sample = sample
            try:
                self._expect_calls("check of rows")  # of which no calls are known: all of them meet
                context.gradients.begin_forward("check of rows", guarded=True)
                return self._pass(forward, args, kwargs)
            finally:
                context.sample = None

        return check_rows(context, module, on_sample, args, kwargs)

    def _require_same_rows(self, args: Any, kwargs: Any) -> None:
        """Refuse different rows on ranks of one place."""
        if not self._first_time("rows of one place"):
            return
        tensors = _tensors((args, kwargs))
        # ranks without tensors compare too: another may have some
        if not equal_along(key_of(*map(_digest, tensors)), self.context.grid, (*WITHIN_PLACE, CONTEXT)):
            raise ValueError(
                "ranks of one (data, z) place were given different rows; all ranks that differ only in x and y, or are "
                "in one context group, read the same rows (ff.local_rows cuts a batch like this)"
            )

    def _warn_of_same_rows(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Warn, in the first training pass, of a loop that forgot to cut its batch and gives every place all rows."""
        grid, trains = self.context.grid, module.training and torch.is_grad_enabled()
        if not trains or grid.muted or grid.shape.row_places == 1 or not self._first_time("rows of all places"):
            return
        tensors = _tensors((args, kwargs))
        if equal_along(key_of(*map(_digest, tensors)), grid, BATCH) and tensors and grid.rank == 0:
            warnings.warn(
                f"all {grid.shape.places} (data, z) places of the grid {grid} were given the same rows "
                "and compute the same; give each place its own with ff.local_rows(batch, grid)",
                stacklevel=2,
            )

    def _warn_of_sums(self, result: Any, sums: frozenset[int]) -> None:
        """Warn, once, of a loss that is a sum over rows: one process sums the rows of all places."""
        context = self.context
        own = {id(loss()) for loss in context.place_sums}
        trained = [
            at
            for at, leaf in enumerate(leaves_of(result))
            if isinstance(leaf, Tensor) and leaf.requires_grad and (at in sums or id(leaf) in own)
        ]
        if trained and self._first_time("sums over rows") and context.grid.rank == 0:
            places = context.grid.shape.places
            warnings.warn(
                f"the model's output {trained[0]} is a sum over the rows of each place, and gradients are averaged "
                f"over the {places} places: as a loss it has 1/{places} of the gradient of one process; return a mean "
                f"(in transformers ctc_loss_reduction='mean'), or multiply it by {places}; a loop that divides it by "
                "its own number of targets is right as it is",
                stacklevel=2,
            )

    def _note_written(self, module: nn.Module, before: dict[str, tuple[Tensor, int | None]]) -> None:
        """Note the buffers that forward has written."""
        for name, buffer in module.named_buffers():
            old, version = before.get(name, (None, 0))
            owner, _, own = name.rpartition(".")
            if isinstance(buffer, GridTensor):
                buffer = module.get_submodule(owner)._buffers[own] = buffer.whole()
            if buffer is not old or version_of(buffer) != version:
                self.written.add(name)

    def _require_same_buffers(self, module: nn.Module) -> None:
        """Refuse a buffer that forward writes from the rows: each place has other rows.

        All ranks compare all buffers, because a rank does not know what others have written.
        """
        grid = self.context.grid
        found = {name: _digest(buffer) for name, buffer in module.named_buffers() if not buffer.is_meta}
        self.context.gradients.come_to_losses()
        same = equal_along(key_of(*found.items()), grid, BATCH)
        if equal_along(int(same), grid, CUTS) and same:
            return
        told = json.dumps({name: [name in self.written, number] for name, number in found.items()})
        if name := grid.channel.decide(told, partial(_drifting, grid.shape)):
            owner, _, own = name.rpartition(".")
            raise RuntimeError(
                f"{owner or 'the model'} ({type(module.get_submodule(owner)).__name__}) writes its buffer {own!r} "
                "in forward from the rows it sees, and each (data, z) place sees others: the copies would drift "
                "apart; use nn.BatchNorm, whose statistics are those of the whole batch on a grid, or keep the "
                "buffer out of forward"
            )

    def describe(self) -> tuple[str, str]:
        return "rows of the place in, whole tensors for them out", "losses over z and data"


def keep_order(context: ModelContext) -> None:
    """Keep the places along z in one order, where messages are really sent: their rows may choose other modules."""
    grid, gradients = context.grid, context.gradients
    if grid.size(GATHERED) == 1:
        return
    members = {
        f"{name}.{own}".lstrip("."): partial(layer.member, at)
        for name, _, adapter in context.adapters
        for own, (layer, at, _) in adapter.parameters().items()
    }
    modules = [(name, module) for name, module, *_ in context.known_modules]
    gradients.places = places = PlaceOrder(modules, gradients, members)
    gradients.engine.prefetcher.keep_order(places)


def _kind_of(module: nn.Module, args: Any, kwargs: Any) -> tuple[str, ...]:
    """Return what distinguishes passes that run other parts of a model's code."""
    flags = [str(value) if isinstance(value, (bool, str)) else "given" for value in args]
    given = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    mode = ("training" if module.training else "evaluation", "with gradients" if torch.is_grad_enabled() else "without")
    return (*mode, *flags, *given)


def _drifting(shape: Shape, texts: Sequence[str]) -> str:
    """Return the first buffer that a rank has written and that differs between places, from what all ranks have."""
    told = [json.loads(text) for text in texts]
    for name in dict.fromkeys(name for found in told for name in found):
        if any(name not in found for found in told):
            return name
        values: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
        for rank, found in enumerate(told):
            coords = shape.coords(rank)
            values[tuple(coords[axis] for axis in CUTS if axis not in BATCH)].add(found[name][1])
        if any(found[name][0] for found in told) and max(map(len, values.values())) > 1:
            return name
    return ""


def _refuse_losses(module: nn.Module, result: Any, strange: frozenset[int]) -> None:
    """Refuse a trained scalar that is not a mean over rows: its value needs the whole batch."""
    leaves = leaves_of(result)
    trained = [at for at in strange if isinstance(leaves[at], Tensor) and leaves[at].requires_grad]
    if trained:
        raise RuntimeError(
            f"{type(module).__name__}: its scalar output {trained[0]} is not a mean over rows, and the places' own "
            "values do not average to the value of the whole batch; gather the rows that it needs with "
            "ff.whole_batch(tensor) inside forward, or compute it outside of the model; its gradient is then averaged "
            "over places, as in DDP"
        )


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor) and not leaf.is_meta]


def _digest(tensor: Tensor) -> int:
    """Return a number that depends on the shape, the values and their order; NaN counts as 0.

    Values are weighted by position, because the plain sum of small ids is often the same for different rows.
    """
    tensor = local_of(tensor) if isinstance(tensor, DTensor) else tensor
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat = tensor.detach().double().nan_to_num().flatten()  # NaN is not equal to itself
    weights = torch.arange(1, flat.numel() + 1, dtype=flat.dtype, device=flat.device)
    return key_of(tuple(tensor.shape), (flat * weights).sum().item())


@contextmanager
def counted_changes(context: ModelContext) -> Iterator[None]:
    """Leave inference_mode where tensors are cut: `sync_whole_copies` needs torch's count of in-place changes."""
    if not context.is_cut or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():  # inference_mode(False) alone would turn gradients on
        yield


@contextmanager
def seeded_everywhere(seed: int, device: torch.device) -> Iterator[None]:
    """Let torch draw from this seed inside the block, on the host and on the device."""
    with seeded(seed, torch.device("cpu")), seeded(seed, device) if device.type != "cpu" else nullcontext():
        yield


@contextmanager
def _all_seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Let everybody draw from this seed inside the block: torch, Python and numpy."""
    with seeded_everywhere(seed, device), seeded_outside_torch(seed):
        yield


class ContrastiveAdapter(Adapter):
    """Runs a module with rows that a contrastive loss compares, and gathers all places' rows for such a loss."""

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        out = forward(*args, **kwargs)
        return whole_batch(out) if self.context.compares_rows else out

    def describe(self) -> tuple[str, str]:
        return "with return_loss: the rows of all places", "rows over z and data"


class BlockAdapter(Adapter):
    """Runs one of several equal blocks, and puts the residual stream into its rest layout between them."""

    def __init__(self, name: str, context: ModelContext, why: str, features: int) -> None:
        super().__init__(name, context, why)
        self.features = features

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        context = self.context
        if args:
            args = (self._to_rest(args[0]), *args[1:])
        elif "hidden_states" in kwargs:  # Hugging Face's name of the stream
            kwargs = {**kwargs, "hidden_states": self._to_rest(kwargs["hidden_states"])}
        again = context.policy.recompute == "block" and module.training and torch.is_grad_enabled()
        if module.training and context.sample is None and context.grid.recording is None:
            # a seed per block, so that a recomputed block draws the same numbers again; 62 bits fit an int64
            seed = int(torch.randint(1 << 62, (), device="cpu"))
            forward = partial(_run_seeded, seed, context.grid.device, again, forward)
        if again:
            return recompute(partial(forward, **kwargs), context.clock, *args)
        return forward(*args, **kwargs)

    def _to_rest(self, a: Any) -> Any:
        if not self.context.is_cut:
            return a
        if isinstance(a, SequenceTensor):
            return a.like(self._to_rest(a.local)) if a.cut.dim < a.dim() - 1 else a
        stream = isinstance(a, Tensor) and a.dim() > 1 and a.shape[-1] == self.features and a.is_floating_point()
        return to_rest(a, self.context) if stream else a

    def describe(self) -> tuple[str, str]:
        again = ", computed again in backward" if self.context.policy.recompute == "block" else ""
        return f"residual stream [m/x, {self.features}/y] at rest{again}", ""


def _run_seeded(
    seed: int, device: torch.device, again: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run a block with its seed. Only a block that is recomputed seeds Python and numpy too, because that is slow."""
    with _all_seeded(seed, device) if again else seeded_everywhere(seed, device):
        return forward(*args, **kwargs)

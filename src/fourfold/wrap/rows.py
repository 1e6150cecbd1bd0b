"""Rows that need each other: `whole_batch`, and the check that finds models which need it.

Every (data, z) place runs the model on its own rows. The result is right as long as a row's output does not depend on
the other rows of the batch and the loss is a mean (or a sum) over rows. It is wrong for a contrastive loss and for a
statistic over the batch. `whole_batch` gathers the rows of all places, so that such code sees the batch that one
process would see.

The check runs in the first training pass. The model computes one or two rows of a few places twice: all of these rows
on every place, then each place its own. An output that differs depends on other rows. Nothing else may differ, so the
check turns dropout off, gives the same rows the same random numbers (`draws.py`), and puts back whatever the model's
code changed (`untouched.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from fourfold import comm
from fourfold.axes import BATCH, CUTS
from fourfold.errors import FailedElsewhereError, LateRanksError, UnlikeRanksError
from fourfold.grid import Grid
from fourfold.job import ranks_text
from fourfold.nn.rng import key_of, seeded_outside_torch, states_outside_torch
from fourfold.operators import Conjugate
from fourfold.wrap.draws import SameDraws
from fourfold.wrap.grid_tensor import RULES, ModelContext, to_whole
from fourfold.wrap.ops import ATTENTION_ARGUMENTS
from fourfold.wrap.untouched import Untouched, untouched

LABEL = "whole batch"
"""The label of these messages in the ledger."""


def whole_batch(rows: Tensor, grid: Grid | None = None) -> Tensor:
    """Gather the rows [n, ...] of all places into [places * n, ...], in the order of the whole batch.

    Inside the forward of a parallelised model the grid is known; elsewhere it has to be given. In a single process the
    batch is whole already. Gradients come back from every place's loss, so a loss that all places compute from the
    whole batch has exactly the gradient that one process finds. All places must have equally many rows.
    """
    if has_torch_function_unary(rows):
        return handle_torch_function(whole_batch, (rows,), rows, grid)
    if grid is not None:
        return gather_rows(rows, grid)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ValueError("outside of a model's forward ff.whole_batch needs the grid: call ff.whole_batch(rows, grid)")
    return rows


def gather_rows(rows: Tensor, grid: Grid) -> Tensor:
    """Gather the rows of all places; in backward each place gets the sum of all places' gradients of its rows."""

    def gather(own: Tensor) -> Tensor:
        for axis in reversed(BATCH):  # the innermost cut first
            own = comm.all_gather(own.contiguous(), grid, axis, label=LABEL).wait()
        return own

    def give_back(gradient: Tensor) -> Tensor:
        for axis in BATCH:
            gradient = comm.reduce_scatter(gradient.contiguous(), grid, axis, label=LABEL).wait()
        return gradient

    if grid.shape.places == 1:
        return rows
    return Conjugate.apply(rows, gather, give_back)


RULES[whole_batch] = lambda _, args, kwargs: gather_rows(to_whole(args[0]), args[0].placement.context.grid)  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class RowSample:
    """The rows that a pass of the check runs on: a few rows of each of the first `places` places.

    All other places repeat the rows of these.
    """

    places: int
    joint: bool
    """Whether every place runs the sampled rows of all these places, or those of one place."""

    def whole_batch(self, rows: Tensor, grid: Grid) -> Tensor:
        """Do what `whole_batch` does, for the sample."""
        return rows if self.joint else gather_rows(rows, grid)[: len(rows) * self.places]


class NoDropout(TorchFunctionMode):
    """Turns dropout off, so that the outputs of two passes can be compared."""

    DROPOUTS = (
        *(functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout),
        *(functional.dropout1d, functional.dropout2d, functional.dropout3d),
    )
    ATTENTION: ClassVar[dict[Callable, Sequence[str]]] = {
        functional.scaled_dot_product_attention: ATTENTION_ARGUMENTS,
        functional.multi_head_attention_forward: list(
            inspect.signature(functional.multi_head_attention_forward).parameters
        ),
    }
    """Functions with a `dropout_p`, and the names of their arguments in order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in self.ATTENTION:
            kwargs = dict(zip(self.ATTENTION[func], args, strict=False)) | kwargs | {"dropout_p": 0.0}
            args = ()
        return func(*args, **kwargs)


RunSample = Callable[[RowSample, tuple, dict], Any]
"""Runs the model on a sample, as a pass of its own, and returns its result with whole tensors."""


@dataclass(frozen=True)
class Scalars:
    """The scalar outputs of a model that are not means over rows, as positions among the leaves of its result.

    Whether one of them is a loss that will be trained is known only when gradients are on.
    """

    strange: frozenset[int] = frozenset()
    """Scalars that the values of the places do not determine."""
    sums: frozenset[int] = frozenset()
    """Sums over rows."""


def check_rows(context: ModelContext, model: nn.Module, run: RunSample, args: tuple, kwargs: dict) -> Scalars:
    """Refuse a model with rows that depend on other rows; return the scalar outputs that are not means over rows."""
    dependent: str | None = None
    if hidden := next((leaf for leaf in leaves_of((args, kwargs)) if not isinstance(leaf, PLAIN)), None):
        context.unchecked = f"an input of type {type(hidden).__name__} may hide tensors"
        return Scalars()
    listed = _lists_rows(context, args, kwargs)
    if listed == "certainly":
        return _leave_listed_rows(context)
    for dim in filter(lambda dim: rows_along(dim, args, kwargs), context.rows_dims):
        comparison = RowComparison(context, model, run, args, kwargs, dim)
        found = _verdict(context, comparison)
        if found is None:
            if listed:
                return _leave_listed_rows(context)
            continue
        differs, scalars = found
        if differs is None and (dependent is None or comparison.shown):
            return scalars
        dependent = dependent or differs
    if dependent is None:
        return Scalars()
    if listed:
        return _leave_listed_rows(context)
    dim = context.rows_dims[0]
    raise RuntimeError(
        f"{type(model).__name__}: {dependent} depends on the other rows of its batch, and a (data, z) "
        "place has only its own rows; gather what they need of each other with ff.whole_batch(tensor) in forward "
        "(before a similarity, a mean over the batch, ...), or compute it outside of the model; if rows do not lie "
        f"along dim {dim} of the inputs, say so: ff.parallelize(..., rows_dim={1 - dim})"
    )


def _verdict(context: ModelContext, comparison: RowComparison) -> tuple[str | None, Scalars] | None:
    """Return the verdict of a comparison, or None on all ranks if the model does not run on the sampled rows."""
    try:
        return comparison.verdict()
    except (UnlikeRanksError, LateRanksError):  # not all ranks leave the check
        raise
    except Exception as error:  # the user's code may be written for one number of rows
        context.unchecked = f"the model does not run on other numbers of rows ({type(error).__name__}: {error})"
        return None


def lists_in(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield the lists among nested mappings and sequences."""
    for value in values:
        if type(value) is list:
            yield value
        if isinstance(value, (list, tuple, Mapping)):
            yield from lists_in(value.values() if isinstance(value, Mapping) else value)


def _lists_rows(context: ModelContext, args: tuple, kwargs: dict) -> str:
    """Return whether a list of some place has an entry for each row: certainly if these are mappings, perhaps if they
    are tensors."""
    lists = list(lists_in((*args, *kwargs.values())))
    found = {
        "certainly": any(isinstance(entry, Mapping) for each in lists for entry in each),
        "perhaps": any(sum(isinstance(entry, Tensor) for entry in each) > 1 for each in lists),
    }
    anywhere = {name: not comm.equal_along(here, context.grid, BATCH) or here for name, here in found.items()}
    return next((name for name, there in anywhere.items() if there), "")


def _leave_listed_rows(context: ModelContext) -> Scalars:
    """Leave a model unchecked that gets a list with an entry for each row, such as images of several sizes.

    It may call a loss for each row, and places may have unequal numbers of rows.
    """
    context.unchecked, context.local_losses = "a list has an entry for each row", True
    return Scalars()


PLAIN = (Tensor, type(None), bool, int, float, complex, str, torch.dtype, torch.device)
"""The types of inputs that can be cut. Mappings, sequences and dataclasses of these can be cut too."""


def rows_along(dim: int, args: Any, kwargs: Any) -> int:
    """Return how many rows the inputs have if rows lie along this dim; 0 if they cannot."""
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.is_meta for tensor in tensors):
        return 0
    return next((tensor.shape[dim] for tensor in tensors if tensor.dim() > dim), 0)


class RowComparison:
    """Compares the model on a few rows of a few places: all these rows on every place, then each place by itself."""

    def __init__(
        self, context: ModelContext, model: nn.Module, run: RunSample, args: tuple, kwargs: dict, dim: int
    ) -> None:
        self.context, self.model, self.run, self.inputs, self.dim = context, model, run, (args, kwargs), dim
        grid, self.rows = context.grid, rows_along(dim, args, kwargs)
        # the smallest number that divides all places: each sampled place is then repeated equally often, so statistics
        # over all places are those of the sample
        groups = grid.shape.row_places
        self.places = next(k for k in range(2, groups + 1) if groups % k == 0)
        # two rows show what one row cannot, such as a statistic over the rows of a place
        self.few = 2 if self.rows >= 2 * self.places else 1
        if not comm.equal_along(self.few, grid, BATCH):
            self.few = 1
        self.place = grid.shape.row_place(grid.rank) % self.places
        self.shown = False
        """Whether an output shows that rows lie along this dim: it is a scalar, or has more entries for more rows."""
        self._cut: list[Tensor] = []
        """The inputs that were cut to the sampled rows; all others are passed on as they are."""
        own = [leaf for leaf in leaves_of(self.inputs) if isinstance(leaf, Tensor) and self._has_rows(leaf)]
        self.fits = comm.equal_along(key_of(*(leaf.dim() for leaf in own)), grid, BATCH)
        """Whether all places have equally many inputs with rows, of as many dims."""
        sizes = torch.tensor([[size for leaf in own for size in leaf.shape]], device=grid.device)
        self.least = gather_rows(sizes, grid).amin(0).tolist() if self.fits else []
        """The sizes of these inputs, one after another, as far as all places have them: each may have padded its rows
        to a length of its own."""
        self._sizes = iter(self.least)

    def verdict(self) -> tuple[str | None, Scalars]:
        """Run the model on both samples and compare the outputs.

        Return the output with rows that depend on other rows, None if all rows are independent, and the scalar outputs
        that are not means over rows.
        """
        if not self.fits:
            self.context.unchecked = "places have different numbers of inputs, or of their dims"
            return None, Scalars()
        self._sizes = iter(self.least)
        together = map_tensors(self._rows_of_all, self.inputs)
        own = map_tensors(self._rows_of_one, together)
        draws = SameDraws(self.places, self.place, self.few)
        joint, drawn = self._outputs(together, lambda _: draws.recording(), joint=True)
        calls = self.context.loss_calls
        alone, also_drawn = self._outputs(own, lambda _: draws.replaying())
        # a loop over rows calls one loss per row; then losses are each place's own, and everything is compared again
        equal_calls = comm.equal_along(calls, self.context.grid, CUTS) and not self._anywhere(
            calls != self.context.loss_calls
        )
        if not self.context.local_losses and not equal_calls:
            self.context.local_losses = True
            return self.verdict()
        if len(alone) != len(joint):
            return "the structure of its result", Scalars()
        self.shown = self._anywhere(any(not a.dim() or a.shape != b.shape for _, a, b in _floats(alone, joint)))
        dependent = self._first_that_differs(alone, joint)
        scalars = self._scalars(alone, joint, _count_targets(own)) if dependent is None else Scalars()
        by_chance = self._anywhere(draws.by_chance or drawn != also_drawn)
        if by_chance and self._anywhere(dependent is not None or bool(scalars.strange)):
            # the same rows once more with other numbers: what depends on chance differs here too
            again, _ = self._outputs(own, draws.others, seed=1)
            scalars_too = any(not _equal(a, b) for _, a, b in _floats(alone, again) if not a.dim() and not b.dim())
            if self._anywhere(scalars_too) or self._first_that_differs(alone, again) is not None:
                self.context.unchecked = "the model draws random numbers, and not the same ones for the same rows"
                return None, Scalars()
        return dependent, scalars

    def _anywhere(self, found: bool) -> bool:
        """Return whether something was found on any place; every rank gets the same answer."""
        return not comm.equal_along(found, self.context.grid, CUTS) or found

    def _has_rows(self, value: Tensor) -> bool:
        return value.dim() > self.dim and value.shape[self.dim] == self.rows

    def _rows_of_all(self, value: Tensor) -> Tensor:
        """Return the sampled rows of all sampled places, if the tensor has rows."""
        if not self._has_rows(value):
            return value
        for dim, size in enumerate(itertools.islice(self._sizes, value.dim())):
            value = value.narrow(dim, 0, size)
        first = value.detach().narrow(self.dim, 0, self.few).movedim(self.dim, 0)
        rows = self._of_sampled(first).movedim(0, self.dim).contiguous()
        self._cut.append(rows)
        return rows

    def _of_sampled(self, rows: Tensor) -> Tensor:
        """Return the rows of the sampled places; of places with the same rows, the first one's."""
        every = gather_rows(rows, self.context.grid).unflatten(0, (-1, self.context.grid.shape.context, len(rows)))
        return every[: self.places, 0].flatten(0, 1)

    def _rows_of_one(self, value: Tensor) -> Tensor:
        """Return this place's rows of what `_rows_of_all` gathered."""
        if not any(value is rows for rows in self._cut):
            return value
        return value.narrow(self.dim, self.place * self.few, self.few).contiguous()

    def _outputs(
        self,
        inputs: Any,
        draws: Callable[[Untouched], AbstractContextManager[None]],
        *,
        joint: bool = False,
        seed: int = 0,
    ) -> tuple[list[Any], object]:
        """Run the model on a sample, without traces in its state, in the ledger or in random generators.

        Return the leaves of its result, and how much it has drawn from generators other than torch's.
        """
        grid = self.context.grid
        devices = [grid.device] if grid.device.type == "cuda" else []
        # each of these keeps one kind of trace out: state, gradients, ledger, random numbers, warnings
        with (
            untouched(self.model) as state,
            torch.no_grad(),
            grid.ledger.not_counted(),
            torch.random.fork_rng(devices),
            seeded_outside_torch(seed),
            warnings.catch_warnings(),
            NoDropout(),
        ):
            self.context.left_out_hooks = state.leaves_out_hooks()
            warnings.simplefilter("ignore")  # these rows are not the user's batch: a statistic over one row may warn
            torch.manual_seed(seed)
            error: Exception | None = None
            outputs: list[Any] = []
            try:
                with draws(state):
                    outputs = leaves_of(self.run(RowSample(self.places, joint), *inputs))
            except Exception as found:
                error = found
            self._leave_together(error)
            return outputs, (states_outside_torch(), state.drawn())

    def _leave_together(self, error: Exception | None) -> None:
        """Raise on every rank if a pass has failed on one of them, on which the others would wait."""
        if isinstance(error, UnlikeRanksError):
            raise error
        channel = self.context.grid.channel
        here = "" if error is None else f"rank {channel.rank}: {type(error).__name__}: {error}"
        try:
            found = channel.decide(here, lambda texts: next(filter(None, texts), ""), channel.seconds / 2)
        except LateRanksError as late:
            if error is None:
                raise
            raise UnlikeRanksError(
                f"the model failed on this rank, {channel.rank}, and not on "
                f"{ranks_text(late.ranks) if late.ranks else 'others'}, which wait for its messages: {here}; let the "
                "model fail on all ranks, or on none"
            ) from error
        if error is not None:
            raise error
        if found:
            raise FailedElsewhereError(found)

    def _first_that_differs(self, alone: list[Any], other: list[Any]) -> str | None:
        """Describe the first output with rows that differ on any place; None if there is no such output.

        Where one rank finds an output, all do.
        """
        differs = [at for at, a, b in _floats(alone, other) if a.dim() and not self._alike(a, b)]
        here = f"output {differs[0]} of shape {tuple(alone[differs[0]].shape)}" if differs else None
        anywhere = self._anywhere(here is not None)
        return here or ("an output of another place" if anywhere else None)

    def _alike(self, alone: Tensor, other: Tensor) -> bool:
        """Return whether this place's rows are the same in both; an output without rows is not compared."""
        if alone.dim() != other.dim():
            return False
        along = [d for d, (a, b) in enumerate(zip(alone.shape, other.shape, strict=True)) if a != b]
        if along:
            length, every = alone.shape[along[0]], other.shape[along[0]]
            # rows with unequal numbers of entries, such as images, begin anywhere
            starts = [self.place * length] if every == self.places * length else range(every - length + 1)
            parts = (other.narrow(along[0], start, length) for start in starts)
            return len(along) == 1 and any(_equal(alone, part) for part in parts)
        return other.shape[:1] != (self.few,) or _equal(alone, other)

    def _scalars(self, alone: list[Any], joint: list[Any], counts: list[Tensor]) -> Scalars:
        strange, sums = set(), set()
        for at, a, b in _floats(alone, joint):
            if a.dim() or b.dim():
                continue
            each, wanted = self._of_sampled(a.double().view(1)), b.double()
            within = _tolerance(b) * torch.cat([each, wanted.view(1)]).abs().amax()
            if (each.mean() - wanted).abs() <= within:
                continue
            if (each.sum() - wanted).abs() <= within:
                sums.add(at)
            elif not self._is_weighted_mean(each, wanted, within, counts):
                strange.add(at)
        return Scalars(frozenset(strange), frozenset(sums))

    def _is_weighted_mean(self, each: Tensor, wanted: Tensor, within: Tensor, counts: list[Tensor]) -> bool:
        """Return whether a scalar of all rows is the mean of the places' own, weighted by a count of targets."""
        for count in counts:
            weights = self._of_sampled(count.double().view(1))
            weighted = (each.nan_to_num() * weights).sum() / weights.sum().clamp(min=1)
            if (weighted - wanted).abs() <= within:
                break
        else:
            return False
        if self.context.grid.rank == 0:  # one rank warns for all
            warnings.warn(
                "the model's loss is a mean over the targets of each place's own rows, and places have unequal numbers "
                "of them; it is averaged over places, as under DDP (ff.global_mean gives the mean over all targets)",
                stacklevel=2,
            )
        return True


def map_tensors(function: Callable[[Tensor], Any], value: Any, *, in_place: bool = False) -> Any:
    """Apply a function to every tensor in nested mappings, sequences and dataclasses.

    With `in_place` mappings and dataclasses keep their identity; otherwise they are copied.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        new = value if in_place else copy.copy(value)
        for key in list(value):
            mapped = map_tensors(function, value[key], in_place=in_place)
            if mapped is not value[key]:  # only what changes, because a setter may be the user's
                new[key] = mapped
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = value if in_place else copy.copy(value)
        for field in dataclasses.fields(value):
            # past `__setattr__`, because the dataclass may be frozen
            object.__setattr__(new, field.name, map_tensors(function, getattr(value, field.name), in_place=in_place))
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, entry, in_place=in_place) for entry in value))
    # a result may be a list of a user's class, which cannot be rebuilt from its entries in every case
    if isinstance(value, (list, tuple)) and (type(value) in (list, tuple) or not in_place):
        return type(value)(map_tensors(function, entry, in_place=in_place) for entry in value)
    return value


def leaves_of(value: Any) -> list[Any]:
    """Return everything inside nested mappings, sequences and dataclasses, in order."""
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif isinstance(value, (list, tuple)):
        inside = list(value)
    else:
        return [value]
    return [leaf for entry in inside for leaf in leaves_of(entry)]


def _floats(alone: list[Any], other: list[Any]) -> list[tuple[int, Tensor, Tensor]]:
    """Return the outputs that are floating-point tensors in both lists, with their positions."""
    pairs = enumerate(zip(alone, other, strict=True))
    return [(at, a, b) for at, (a, b) in pairs if all(isinstance(t, Tensor) and t.is_floating_point() for t in (a, b))]


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one shape are equal but for rounding."""
    finite = a.isfinite()  # a mask of minus infinity is the same in both, but inf - inf is NaN
    if not torch.equal(finite, b.isfinite()):
        return False
    a, b = a[finite], b[finite]
    return not a.numel() or bool((a - b).abs().amax() <= _tolerance(b) * b.abs().amax())


def _tolerance(tensor: Tensor) -> float:
    """Return the relative tolerance: half of the dtype's digits, at most five.

    Kernels round differently for other shapes. Rows that depend on each other differ by more.
    """
    return max(torch.finfo(tensor.dtype).eps ** 0.5, 1e-5)


def _count_targets(own_rows: Any) -> list[Tensor]:
    """Return candidates for this place's number of targets: what a mask keeps, or ids that are not padding."""
    counts = []
    for tensor in (leaf for leaf in leaves_of(own_rows) if isinstance(leaf, Tensor) and leaf.dim()):
        if tensor.is_floating_point() or tensor.is_complex():
            counts.append(tensor.count_nonzero())  # it may be a mask of zeros and ones
        else:
            counts += [(tensor != padding).sum() for padding in (-100, -1, 0)]  # the usual ids of padding
    return counts

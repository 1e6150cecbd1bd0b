"""Rows that need each other: `whole_batch`, and the check that finds models which need it.

Every (data, z) place runs the model on its own rows. That is right as long as a row's output does not depend on the
other rows of the batch and the loss is a mean (or a sum) over rows. A contrastive loss, or a statistic over the batch,
is neither. `whole_batch` gathers the rows of all places, so that such code sees the batch that one process would see.

The check runs in the first training pass. The model computes one or two rows of a few places twice: each place its own
rows, then all of them everywhere. What differs between the two depends on companions. Nothing else may differ, so the
check takes chance out of the model and puts back whatever state the model's code changed.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from fourfold import comm
from fourfold.arriving import local_of
from fourfold.axes import BATCH
from fourfold.grid import Grid
from fourfold.nn.moment import drawing_outside_torch
from fourfold.operators import Conjugate
from fourfold.parallelize.attention import ARGUMENTS
from fourfold.parallelize.placed import RULES, version_of, whole
from fourfold.parallelize.run import Run

LABEL = "whole batch"


def whole_batch(rows: Tensor, grid: Grid | None = None) -> Tensor:
    """Gather the rows [n, ...] of all places into [places * n, ...], in the order of the whole batch.

    Inside the forward of a parallelised model the grid is known; elsewhere it has to be given. In one process without a
    job the batch is whole already. Gradients come back from every place's loss, so a loss that all places compute from
    the whole batch has exactly the gradient that one process finds. All places must have equally many rows.
    """
    if has_torch_function_unary(rows):
        return handle_torch_function(whole_batch, (rows,), rows, grid)
    if grid is not None:
        return gather_rows(rows, grid)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "ff.whole_batch outside of a model's forward has to be told the grid: ff.whole_batch(rows, grid)"
        )
    return rows


def gather_rows(rows: Tensor, grid: Grid) -> Tensor:
    """The rows of all places; in backward each place gets the sum of what all places found for its rows."""

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


RULES[whole_batch] = lambda _, args, kwargs: gather_rows(whole(args[0]), args[0].placement.run.grid)  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows on which the check compares: a few of each of the first `places` places; the others repeat theirs."""

    places: int
    joint: bool
    """Whether every place runs the rows of all of them, or one place's rows."""

    def whole_batch(self, rows: Tensor, grid: Grid) -> Tensor:
        """What `whole_batch` means on the sample, where places beyond the first repeat the rows of these."""
        if self.joint:
            return rows
        return gather_rows(rows, grid)[: len(rows) * self.places]


class WithoutChance(TorchFunctionMode):
    """Inside, nothing is dropped, so that outputs can be compared."""

    DROPS = (
        *(functional.dropout, functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout),
        *(functional.dropout1d, functional.dropout2d, functional.dropout3d),
    )
    ATTENTION: ClassVar[dict[Callable, Sequence[str]]] = {
        functional.scaled_dot_product_attention: ARGUMENTS,
        functional.multi_head_attention_forward: list(
            inspect.signature(functional.multi_head_attention_forward).parameters
        ),
    }
    """The names of their arguments, in order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.DROPS:
            return args[0] if args else kwargs["input"]
        if func in self.ATTENTION:
            kwargs = dict(zip(self.ATTENTION[func], args, strict=False)) | kwargs | {"dropout_p": 0.0}
            args = ()
        return func(*args, **kwargs)


@contextmanager
def state_restored(model: nn.Module) -> Iterator[None]:
    """Afterwards the modules' attributes and buffers are as they were: a counter, say, that forward advances."""
    known = {id(value) for value in (*model.modules(), *model.parameters())}
    restores: list[Callable[[], None]] = []
    for module in model.modules():
        _keep(vars(module), known, restores)
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in restores:
                restore()


def _keep(value: Any, known: set[int], restores: list[Callable[[], None]]) -> None:
    """Find out how to restore a value of somebody's module: tensors, containers, and objects of their own classes."""
    if id(value) in known:
        return
    known.add(id(value))
    if isinstance(value, DTensor):
        restores.append(_contents(local_of(value)))  # what layers write to
    elif type(value) is Tensor:
        restores.append(_contents(value))
    elif isinstance(value, (dict, list, set, deque)):
        restores.append(_entries(value))
        for entry in list(value.values() if isinstance(value, dict) else value):
            _keep(entry, known, restores)
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor) and not callable(value) and _is_own(value):
        _keep(vars(value), known, restores)


def _contents(tensor: Tensor) -> Callable[[], None]:
    """How to restore a tensor, if it was changed: a graph may hold one that was not."""
    version, before = version_of(tensor), tensor.detach().clone()

    def copy_back() -> None:
        if version_of(tensor) != version:
            tensor.copy_(before)

    return copy_back


def _entries(container: Any) -> Callable[[], None]:
    """How to restore a container. The object stays: others may hold it."""
    before = container.copy()

    def refill() -> None:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(before)

    return refill


def _is_own(value: object) -> bool:
    return type(value).__module__.partition(".")[0] not in LIBRARIES


LIBRARIES = ("builtins", "torch", "fourfold", "transformers", "peft")
"""Whose objects forward does not change in a way that a second forward would notice."""


Forward = Callable[[Sample, tuple, dict], Any]
"""Runs the model on a sample, as a pass of its own, and gives what it returns with whole tensors."""


def check_rows(run: Run, model: nn.Module, forward: Forward, args: tuple, kwargs: dict) -> set[int]:
    """Refuse a model whose rows depend on their companions; return which of its scalar outputs are no mean over rows.

    These are numbers of leaves of the model's result. Whether one is a loss that will be trained is known only when
    gradients are on.
    """
    verdicts = []
    if hidden := next((leaf for leaf in leaves_of((args, kwargs)) if not isinstance(leaf, PLAIN)), None):
        run.unchecked = f"an input of type {type(hidden).__name__} may hide tensors"
        return set()
    for dim in run.rows_dims:
        if not rows_along(dim, args, kwargs):
            continue
        try:
            verdicts.append(Comparison(run, model, forward, args, kwargs, dim).verdict())
        except Exception as error:  # code of anybody's, which may be written for one number of rows
            run.unchecked = f"the model does not run on other numbers of rows ({type(error).__name__}: {error})"
            continue
        if not verdicts[-1].depends:
            return verdicts[-1].losses
    if not verdicts:
        return set()
    if any(sum(isinstance(leaf, Tensor) for leaf in leaves_of(value)) > 1 for value in args if type(value) is list):
        run.unchecked = "a list of tensors may hold rows in an order of its own"
        return set()
    raise RuntimeError(
        f"{type(model).__name__}: {verdicts[0].depends} depends on the other rows of its batch, and a (data, z) place "
        "has its own rows alone; gather what they need of each other with ff.whole_batch(tensor) in forward (before "
        "a similarity, a mean over the batch, ...), or compute it outside of the model; if rows do not lie along dim "
        f"{run.rows_dims[0]} of the inputs, say so: ff.parallelize(..., rows_dim={1 - run.rows_dims[0]})"
    )


PLAIN = (Tensor, type(None), bool, int, float, complex, str, torch.dtype, torch.device)
"""What an input may be beside mappings, sequences and dataclasses of these, if it is to be cut."""


def rows_along(dim: int, args: Any, kwargs: Any) -> int:
    """How many rows the inputs have if they lie along this dim; 0 where that cannot be."""
    tensors = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    if any(tensor.is_meta for tensor in tensors):
        return 0
    return next((tensor.shape[dim] for tensor in tensors if tensor.dim() > dim), 0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What of a model's result depends on companions (empty: nothing), and the scalars that are no mean over rows."""

    depends: str
    losses: set[int]


class Comparison:
    """The model on a few rows of a few places: each place by itself, then all rows everywhere."""

    def __init__(self, run: Run, model: nn.Module, forward: Forward, args: tuple, kwargs: dict, dim: int) -> None:
        self.run, self.model, self.forward, self.inputs, self.dim = run, model, forward, (args, kwargs), dim
        grid, self.rows = run.grid, rows_along(dim, args, kwargs)
        # as few as can be repeated equally often, so that statistics over all places are those of the sample
        self.places = next(k for k in range(2, grid.shape.places + 1) if grid.shape.places % k == 0)
        self.few = 2 if self.rows >= 2 * self.places else 1
        if not comm.equal_along(self.few, grid, BATCH):
            self.few = 1
        self.place = grid.shape.place(grid.rank) % self.places
        self._cut: list[Tensor] = []
        """The inputs that were cut; the others are handed on as they are."""

    def verdict(self) -> Verdict:
        together = map_tensors(self._rows_of_all, self.inputs)
        own = map_tensors(self._rows_of_one, together)
        alone = self._outputs(own, joint=False)
        calls = self.run.losses
        joint = self._outputs(together, joint=True)
        if not self.run.own_losses and not self._same_calls(calls):
            self.run.own_losses = True
            return self.verdict()
        if len(alone) != len(joint):
            return Verdict("the structure of its result", set())
        depends = self._first_that_differs(alone, joint)
        if depends:
            again = self._outputs(own, joint=False, seed=1)
            if self._first_that_differs(alone, again):
                self.run.unchecked = "the model draws random numbers"
                return Verdict("", set())
        counts = _count_targets(own)
        scalars = [(at, a, b) for at, a, b in _floats(alone, joint) if not a.dim() and not b.dim()]
        return Verdict(depends, {at for at, a, b in scalars if not self._is_mean(a, b, counts)})

    def _same_calls(self, calls: int) -> bool:
        """Whether all passes called equally many of torch's losses; a loop over rows calls one for each."""
        return comm.equal_along(calls, self.run.grid, BATCH) and calls == self.run.losses

    def _rows_of_all(self, value: Tensor) -> Tensor:
        if value.dim() <= self.dim or value.shape[self.dim] != self.rows:
            return value
        first = value.detach().narrow(self.dim, 0, self.few).movedim(self.dim, 0)
        rows = gather_rows(first, self.run.grid)[: self.places * self.few].movedim(0, self.dim).contiguous()
        self._cut.append(rows)
        return rows

    def _rows_of_one(self, value: Tensor) -> Tensor:
        if not any(value is rows for rows in self._cut):
            return value
        return value.narrow(self.dim, self.place * self.few, self.few).contiguous()

    def _outputs(self, inputs: Any, *, joint: bool, seed: int = 0) -> list[Any]:
        grid = self.run.grid
        devices = [grid.device] if grid.device.type == "cuda" else []
        with (
            state_restored(self.model),
            torch.no_grad(),
            grid.ledger.aside(),
            torch.random.fork_rng(devices),
            drawing_outside_torch(seed),
            warnings.catch_warnings(),
            WithoutChance(),
        ):
            warnings.simplefilter("ignore")  # of a statistic over one row, say: these rows are not the user's batch
            torch.manual_seed(seed)
            return leaves_of(self.forward(Sample(self.places, joint), *inputs))

    def _first_that_differs(self, alone: list[Any], other: list[Any]) -> str:
        """The first output whose rows differ on some place, the same text on all ranks of the place; empty: none."""
        differs = [at for at, a, b in _floats(alone, other) if a.dim() and not self._alike(a, b)]
        here = f"output {differs[0]} of shape {tuple(alone[differs[0]].shape)}" if differs else ""
        if comm.equal_along(bool(here), self.run.grid, BATCH):
            return here
        return here or "an output of another place"

    def _alike(self, alone: Tensor, other: Tensor) -> bool:
        """Whether this place's rows are the same in both. What has no rows is compared as it is by nobody."""
        if alone.dim() != other.dim():
            return False
        along = [d for d, (a, b) in enumerate(zip(alone.shape, other.shape, strict=True)) if a != b]
        if along:
            length = alone.shape[along[0]]
            if len(along) > 1 or other.shape[along[0]] != self.places * length:
                return False
            other = other.narrow(along[0], self.place * length, length)
        elif other.shape[:1] != (self.few,):
            return True
        finite = alone.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return False
        a, b = alone[finite], other[finite]
        return not a.numel() or bool((a - b).abs().amax() <= _tolerance(b) * b.abs().amax())

    def _is_mean(self, alone: Tensor, joint: Tensor, counts: list[Tensor]) -> bool:
        """Whether a scalar of all rows is the mean or the sum of the places' own, plain or by counts of targets."""
        each, wanted = gather_rows(alone.double().view(1), self.run.grid)[: self.places], joint.double()
        within = _tolerance(joint) * torch.cat([each, wanted.view(1)]).abs().amax()
        if any((candidate - wanted).abs() <= within for candidate in (each.mean(), each.sum())):
            return True
        for count in counts:
            weights = gather_rows(count.double().view(1), self.run.grid)[: self.places]
            weighted = (each.nan_to_num() * weights).sum() / weights.sum().clamp(min=1)
            if (weighted - wanted).abs() <= within:
                break
        else:
            return False
        if self.run.grid.rank:
            return True  # one rank says it
        warnings.warn(
            "the model's loss is a mean over the targets of each place's own rows, and places have unequal numbers of "
            "them; it is averaged over places, as under DDP (ff.global_mean gives the mean over all targets)",
            stacklevel=2,
        )
        return True


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """The same mappings, sequences and dataclasses with other tensors in them."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        for key in value:
            new[key] = map_tensors(function, value[key])
        return new
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        new = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(new, field.name, map_tensors(function, getattr(value, field.name)))
        return new
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, entry) for entry in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, entry) for entry in value)
    return value


def leaves_of(value: Any) -> list[Any]:
    """Everything inside mappings, sequences and dataclasses, in their order."""
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
    """The outputs that are floating-point tensors in both, and where they stand."""
    pairs = enumerate(zip(alone, other, strict=True))
    return [(at, a, b) for at, (a, b) in pairs if all(isinstance(t, Tensor) and t.is_floating_point() for t in (a, b))]


def _tolerance(tensor: Tensor) -> float:
    """Other shapes round otherwise: half of the digits must agree, or five; companions would change more."""
    return max(torch.finfo(tensor.dtype).eps ** 0.5, 1e-5)


def _count_targets(own_rows: Any) -> list[Tensor]:
    """How many targets this place's rows may have: what a mask among the inputs keeps, or ids that are no padding."""
    counts = []
    for tensor in (leaf for leaf in leaves_of(own_rows) if isinstance(leaf, Tensor) and leaf.dim()):
        if tensor.is_floating_point() or tensor.is_complex():
            counts.append(tensor.count_nonzero())  # a mask of zeros and ones, if it is one
        else:
            counts += [(tensor != padding).sum() for padding in (-100, -1, 0)]
    return counts

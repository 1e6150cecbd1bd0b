"""`GridTensor`: a tensor that looks whole to model code while this rank holds one part of it.

Grid tensors flow between the layers of a wrapped model. Model code sees the shape of the whole tensor (for the rows of
this (data, z) place). An operation runs on the local parts where a rule in `RULES` says that this is right. Every other
operation runs on whole tensors that are gathered for it: an unforeseen operation is slower, never wrong.

Invariant: a plain tensor inside a wrapped model is whole and equal on all ranks of x and y of its place, and so is its
gradient. Each placement therefore has two conversions, and each is the conjugate of the other: `whole` gathers in
forward and takes this rank's part of the gradient in backward; `part` takes in forward and gathers in backward, or sums
where the plain tensor was broadcast over parts.

`ModelContext` is the state that all modules of one wrapped model share: grid, policy, gradients, and what the current
pass is doing. The outermost module begins and ends every pass there. Adapters note the layer that runs, so that labels
in the ledger and errors can say where in the model something happened.
"""

from __future__ import annotations

import functools
import sys
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointFunction

from fourfold import comm
from fourfold.axes import BATCH, CUTS
from fourfold.engine import Engine
from fourfold.gradients import Gradients
from fourfold.grid import Grid
from fourfold.layout import FEATURES, Layout, inner
from fourfold.nn.rng import StepRng
from fourfold.operators import Conjugate
from fourfold.params import whole_tensor
from fourfold.policy import Policy
from fourfold.wrap.own_tokens import OwnTokens

WITHIN_PLACE = tuple(axis for axis in CUTS if axis not in BATCH)
"""The axes along which the ranks of one (data, z) place differ. These ranks read the same rows."""


class ModelContext:
    """The grid, the policy, the gradients and the clock of a wrapped model, and the state of its current pass."""

    gradients: Gradients
    clock: StepRng

    def __init__(self, grid: Grid, policy: Policy, rows_dims: Sequence[int] = (0,)) -> None:
        self.grid, self.policy = grid, policy
        self.rows_dims = tuple(rows_dims)
        """The dim of the model's inputs that holds the rows of a batch; several candidates where it is not known."""
        self.is_cut = any(grid.size(axis) > 1 for axis in WITHIN_PLACE)
        """Whether activations are cut at all. Where they are not, model code gets plain tensors."""
        self.last_layer = ""
        """The layer that ran last, for labels and errors."""
        self.grad_enabled = False
        """Whether a backward pass may follow the current pass."""
        self.in_pass = False
        """Whether a forward pass is running."""
        self.generating = False
        """Whether `generate` is running, so that a nested `generate` does not cut the rows a second time."""
        self.made_whole: Counter[tuple[str, str]] = Counter()
        """How often a tensor was made whole in the last pass, by (place in the model, operation)."""
        self.shared_reads: dict[Any, tuple[Tensor, object, dict]] = {}
        """By group (`SharedInput`): the tensor that it read in this pass, the tensor's state, and the results that no
        layer has asked for yet. A group is removed when all its layers have their results."""
        self.loss_read_logits = False
        """Whether a loss of this pass read logits that are cut over the vocabulary."""
        self.loss_calls = 0
        """How many of torch's loss functions the pass has called."""
        self.place_sums: list[weakref.ref[Tensor]] = []
        """The losses of the pass that torch's functions returned as sums over the rows of this place."""
        self.calls: list[str] = []
        """The calls of the pass that send messages to all places: torch's losses and `whole_batch`."""
        self.expected_calls: list[str] | None = None
        """The same of earlier passes of this kind; None if calls are not compared."""
        self.local_losses = False
        """Whether torch's losses inside the model are each place's own. A model that calls one loss per row makes
        different numbers of calls on different places, so the calls cannot be reduced together."""
        self.has_target_count = False
        """Whether the pass was given the number of targets in the batch, by which the model divides a sum of losses."""
        self.compares_rows = False
        """Whether the pass was asked for a loss that compares all rows with each other."""
        self.lent_params: dict[tuple[str, bool], tuple[Tensor, int | None]] = {}
        """Parameters that code outside their layer has read in this pass: the gathered tensor and its version, by name
        and by whether gradients were on."""
        self.sample: Any = None
        """The rows on which the check of rows runs the model (`rows.RowSample`); None in any other pass."""
        self.unchecked = ""
        """Why the model could not be checked for rows that depend on each other; empty if it could."""
        self.left_out_hooks = False
        """Whether modules have forward hooks of the user's, which the check of rows does not call."""
        self.whole_copies: list[Any] = []
        """Whole copies of cut tensors, with views that model code may hold (`grid_tensor.WholeCopy`)."""
        self.last_cast: tuple[Tensor, object, Tensor] | None = None
        """The tensor that was last cast for a layer, the dtype and state it was cast for, and the result."""
        self.own_code: list[str] = []
        """Modules that are running their own code with gathered parameters, innermost last."""
        self.whole_input_modules: dict[str, str] = {}
        """Modules that get whole tensors from now on, and the operation that was the reason. All ranks of a place run
        the same code on the same rows and so switch in the same pass; other places may switch in another."""
        self.gathered_names: dict[int, str] = {}
        """The names of the gathered parameters of modules that are running their own code, by `id` of the tensor."""
        self.adapters: list[tuple[str, nn.Module, Any]] = []
        """Every adapter of the model, after the name of its module and the module."""
        self.own_tokens: OwnTokens | None = None
        """The tokens of the batch's sequences that this place holds; None on a grid without a context size."""
        self.causal_masks: list[tuple[Tensor, int | None]] = []
        """Masks of this pass that were found to be causal, with their versions."""
        self.known_modules: list[tuple[str, nn.Module, list[nn.Module | None], list[str]]] = []
        """For every module: its name, itself, and the children and parameter names that it had when it was wrapped."""

    def begin_pass(self) -> None:
        """Reset the state of a pass."""
        self.end_pass()
        self.in_pass, self.last_layer, self.grad_enabled = True, "", torch.is_grad_enabled()
        self.gradients.in_pass = True
        self.loss_read_logits, self.loss_calls, self.calls = False, 0, []
        self.place_sums.clear()
        self.made_whole.clear()

    def end_pass(self) -> None:
        """Release the tensors that layers kept for each other during the pass, so that nothing keeps them alive."""
        self.in_pass, self.last_cast = False, None
        self.gradients.in_pass = False
        for kept in (self.lent_params, self.whole_copies, self.shared_reads, self.causal_masks):
            kept.clear()

    def note_in_place_change(self, operation: str) -> None:
        """Give whole tensors, from now on, to the module that is running its own code.

        Called when model code changes a cut tensor in place or passes one to an autograd function.
        """
        if self.own_code:
            self.whole_input_modules.setdefault(self.own_code[-1], operation)

    def require_same_parameters(self) -> None:
        """Refuse a parameter that was replaced: the new one would be trained or loaded, and never used."""
        for name, module, adapter in self.adapters:
            if (own := adapter.replaced_parameter(module)) is not None:
                raise RuntimeError(
                    f"{f'{name}.{own}'.lstrip('.')} was replaced after the model was parallelised; "
                    "change parameters in place (copy_ on their shards, load_state_dict without assign=True), or "
                    "replace them before ff.parallelize; torch.func.functional_call on the whole model replaces them "
                    "for one call and cannot be used"
                )

    def require_same_modules(self) -> None:
        """Refuse a module or parameter that was added later: nobody would reduce its gradient."""
        for name, module, children, parameters in self.known_modules:
            if [*module._modules.values()] == children and [*module._parameters] == parameters:
                continue
            added = [(own, child) for own, child in module._modules.items() if child not in children]
            for own, new in (*added, *module._parameters.items()):
                inside = new.parameters() if isinstance(new, nn.Module) else [new]
                if all(parameter is None or self.gradients.knows(parameter) for parameter in inside):
                    continue  # another module of this model, or a module without parameters
                raise RuntimeError(
                    f"{f'{name}.{own}'.lstrip('.')} ({type(new).__name__}) was put into the model after it was "
                    "parallelised and is not on the grid: its gradient would not be summed over ranks; put it in "
                    "before ff.parallelize, or call ff.parallelize(model, grid) again, with the same policy, and "
                    "make the optimizer after that"
                )

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """The axes that cut features inside a sublayer."""
        return inner(self.policy.activations).over(FEATURES)

    @property
    def engine(self) -> Engine:
        """The engine that overlaps communication and computation."""
        return self.gradients.engine

    @property
    def label(self) -> str:
        """The place in the model that the pass has reached, as the ledger and error messages say it."""
        return f"after {self.last_layer}" if self.last_layer else "before the first layer"


@dataclass(frozen=True)
class TensorPlacement(ABC):
    """How a `GridTensor` lies on the ranks of its place."""

    context: ModelContext

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """The cuts of the tensor over the axes inside a place."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut the tensor."""
        return self.layout.axes

    @abstractmethod
    def whole(self, local: Tensor, shape: Size) -> Tensor:
        """Return the whole tensor; its gradient goes back to the parts."""

    @abstractmethod
    def write(self, tensor: GridTensor, whole: Tensor) -> None:
        """Copy the values of a whole tensor into a cut one, in place."""

    def locals_of(self, tensor: GridTensor) -> tuple[Tensor, ...]:
        """Return the local tensors that hold the values."""
        return (tensor._local,)

    def is_padded(self, shape: Size) -> bool:  # noqa: ARG002
        """Return whether the local tensor of some rank has padding. The gradient of padding is 0."""
        return False


@dataclass(frozen=True)
class ShardedPlacement(TensorPlacement):
    """A placement in which every rank holds one part of the tensor, so pointwise operations run on local tensors."""

    @abstractmethod
    def join(self, local: Tensor, shape: Size) -> Tensor:
        """Gather the whole tensor, outside autograd."""

    @abstractmethod
    def take(self, whole: Tensor, shape: Size) -> Tensor:
        """Return this rank's part, outside autograd."""

    @abstractmethod
    def part(self, plain: Tensor, shape: Size) -> Tensor:
        """Return what this rank reads of a plain tensor that broadcasts to `shape`.

        The result broadcasts to the local shape.
        """

    def whole(self, local: Tensor, shape: Size) -> Tensor:
        if all(self.context.grid.size(axis) == 1 for axis in self.axes):
            return self.uncut(local, shape)
        return Conjugate.apply(
            local,
            lambda part: self.join(part, shape).contiguous(),  # contiguous as in the plain model, which may `view` it
            lambda gradient: self.take(gradient, shape),
        )

    def write(self, tensor: GridTensor, whole: Tensor) -> None:
        tensor._local.copy_(self.part(whole, tensor.shape))

    def uncut(self, local: Tensor, shape: Size) -> Tensor:
        """Return the whole tensor, a view of the local one, where every axis that cuts it has one rank."""
        return local.view(shape)

    def flat(self, plain: Tensor) -> Tensor:
        """Return the local tensor of a plain one on a grid where nothing is cut."""
        return plain

    def sum(self, gradient: Tensor, axes: tuple[str, ...]) -> Tensor:
        """All-reduce a gradient over these axes."""
        for axis in axes:
            # waits at once: autograd's next node reads the sum
            gradient = comm.all_reduce(gradient, self.context.grid, axis, label=self.context.label).wait()
        return gradient


OperationRule = Callable[[Callable, tuple, dict], Any]
"""Runs a torch function on local parts, or returns NotImplemented where the parts do not suffice."""
RULES: dict[Callable, OperationRule] = {}
"""The rules by torch function. The `ops*.py` files register them when the package is imported."""


class CutTensor(Tensor):
    """A tensor that looks whole to model code, which sees `shape`, while this rank holds a part of it in `local`."""

    made: str
    """Where in the model the tensor was made, for errors."""
    _shape: Size
    _local: Tensor

    @property
    def local(self) -> Tensor:
        """This rank's part."""
        return self._local

    if not TYPE_CHECKING:  # in Python, because torch would call __torch_function__ for each of these attributes
        shape = property(lambda self: self._shape)
        dtype = property(lambda self: self.local.dtype)
        device = property(lambda self: self.local.device)
        ndim = property(lambda self: len(self._shape))
        requires_grad = property(lambda self: self.local.requires_grad)
        grad_fn = property(lambda self: self.local.grad_fn)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} was called on a tensor that is cut over the grid, below torch's Python functions; "
            "give the module that calls it WholeTensors() in the plan, so that it gets whole tensors"
        )


class GridTensor(CutTensor):
    """A tensor of `shape` that is cut as `placement` says; this rank holds `local`."""

    placement: TensorPlacement

    @staticmethod
    def __new__(cls, local: Tensor, placement: TensorPlacement, shape: Size | tuple[int, ...]) -> GridTensor:
        if isinstance(local, CutTensor):
            raise RuntimeError(
                f"a tensor {tuple(local.shape)} made {local.made}, of which each place of a context group holds other "
                "tokens, cannot be cut over x and y here; use a grid with context=1, or with x=1 and y=1"
            )
        new = Tensor._make_wrapper_subclass(cls, Size(shape), dtype=local.dtype, device=local.device)
        new._shape, new._local, new.placement, new.made = Size(shape), local, placement, placement.context.label
        return new

    @property
    def local(self) -> Tensor:
        """This rank's part, after changes that were made through views of a whole copy."""
        if self.placement.context.whole_copies:
            sync_whole_copies(self.placement.context)
        return self._local

    def like(self, local: Tensor) -> GridTensor:
        """Return another local tensor as a grid tensor with the same shape and placement."""
        return GridTensor(local, self.placement, self._shape)

    def whole(self) -> Tensor:
        """Gather the whole tensor; its gradient goes back to the parts."""
        return self.placement.whole(self.local, self._shape)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GridTensor({tuple(self._shape)}, {type(self.placement).__name__}, local {tuple(self.local.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, CutTensor) and not issubclass(kind, GridTensor) for kind in types):
            return NotImplemented  # a `SequenceTensor` knows what it does with grid tensors
        kwargs, args = kwargs or {}, gather_parameters_in(args)
        if not torch.is_grad_enabled():
            # model code may have turned gradients off, or it runs inside an autograd function: only the latter is wrong
            for tensor in grid_tensors_in((args, kwargs)):
                refuse_in_autograd_function(tensor.placement.context, trained=tensor.requires_grad)
        rule = RULES.get(func)
        result = NotImplemented if rule is None else rule(func, args, kwargs)
        if result is NotImplemented:
            return run_on_whole(func, args, kwargs)
        if isinstance(result, GridTensor) and args and isinstance(args[0], GridTensor):
            result.made = args[0].made  # an error then names the layer that made the values, not the last reshape
        return result


def gather_parameters_in(args: tuple) -> tuple:
    """Gather the parameters that code outside any layer reads together with activations."""
    if not any(isinstance(value, DTensor) for value in args):
        return args
    gather = torch.clone if torch.is_grad_enabled() else whole_tensor
    return tuple(gather(value) if isinstance(value, DTensor) else value for value in args)


def distribute(tensor: Tensor, placement: ShardedPlacement) -> GridTensor:
    """Return a plain tensor, or a grid tensor in any placement, in this placement."""
    if isinstance(tensor, GridTensor):
        if tensor.placement == placement:
            return tensor
        tensor = tensor.whole()
    if not placement.context.is_cut:
        return GridTensor(placement.flat(tensor), placement, tensor.shape)
    return GridTensor(placement.part(tensor, tensor.shape), placement, tensor.shape)


def to_whole(value: Any) -> Any:
    """Gather a grid tensor; return any other value as it is."""
    return value.whole() if isinstance(value, GridTensor) else value


def to_shown(value: Any) -> Any:
    """Return what model code gets: a grid tensor where activations are cut, a plain tensor where they are not."""
    return value.whole() if isinstance(value, GridTensor) and not value.placement.context.is_cut else value


def run_on_whole(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run an operation on whole tensors.

    If the operation changes an operand in place, the values are written back to the cut tensor. If its result is a view
    of a whole tensor, the cut tensor and the view are kept equal from then on (`sync_whole_copies`), as torch keeps a
    tensor and its views equal.
    """
    name = getattr(func, "__name__", str(func))
    found = grid_tensors_in((args, kwargs))
    context = found[0].placement.context
    if name == "__set__" or grid_tensors_in(kwargs.get("out")):  # `a.data = b`, or a result that replaces `a`
        raise in_place_error(name, found[0])
    context.made_whole[context.label, name] += len(found)
    wholes = {id(tensor): tensor.whole() for tensor in found}
    changed = None
    if is_in_place(name) or kwargs.get("inplace"):
        changed = args[0] if args else kwargs.get("input")
    if isinstance(changed, GridTensor):
        wholes[id(changed)] = wholes[id(changed)].clone()  # autograd does not let the result of a gather be changed
    versions = {key: version_of(whole) for key, whole in wholes.items()}
    args, kwargs = tree_map_only(GridTensor, lambda tensor: wholes[id(tensor)], (args, kwargs))
    result = func(*args, **kwargs)
    for tensor in found:
        whole = wholes[id(tensor)]
        if whole.shape != tensor.shape:  # `resize_` and its like: the cut tensor cannot follow
            raise in_place_error(name, tensor)
        if version_of(whole) != versions[id(tensor)]:
            context.note_in_place_change(name)
            tensor.placement.write(tensor, whole)
    if isinstance(changed, GridTensor) and result is wholes[id(changed)]:
        return changed
    # A result that shares memory with the gathered copy is a view of it. Where nothing is cut the copy is the local
    # tensor itself, and torch keeps its views equal.
    memory = {leaf.untyped_storage()._cdata for leaf in tree_leaves(result) if _is_strided(leaf)}
    for tensor in found:
        own = {part.untyped_storage()._cdata for part in tensor.placement.locals_of(tensor)}
        if wholes[id(tensor)].untyped_storage()._cdata in memory - own:
            context.whole_copies.append(WholeCopy(tensor, wholes[id(tensor)]))
    return result


class WholeCopy:
    """A whole copy of a cut tensor, with views in model code, and the versions at which the two are equal."""

    def __init__(self, tensor: GridTensor, whole: Tensor) -> None:
        # weak: the copy lives only as long as model code holds a view, and a view holds its base tensor
        self.tensor, self._whole = tensor, weakref.ref(whole)
        self.mark_equal(whole)

    def mark_equal(self, whole: Tensor) -> None:
        """Record that the cut tensor and the copy are equal now."""
        self.version, self.versions = version_of(whole), self._now()

    def _now(self) -> list[int | None]:
        return [version_of(part) for part in self.tensor.placement.locals_of(self.tensor)]

    @property
    def whole(self) -> Tensor | None:
        """The whole copy; None once nobody holds a view of it."""
        return self._whole()

    @property
    def cut_changed(self) -> bool:
        """Whether the cut tensor has changed since the two were equal."""
        return self._now() != self.versions


def sync_whole_copies(context: ModelContext) -> None:
    """Make cut tensors and their whole copies equal again after a change in place of either."""
    # emptied first: reading `local` below would call this function again
    copies, context.whole_copies = context.whole_copies, []
    alive = [(copy, whole) for copy in copies if (whole := copy.whole) is not None]
    for copy, whole in alive:
        if version_of(whole) != copy.version:
            if copy.cut_changed:
                raise in_place_error("a change of two overlapping views", copy.tensor)
            copy.tensor.placement.write(copy.tensor, whole)
            copy.mark_equal(whole)
    # after all writes: a cut tensor may have several copies, and one of them may just have changed it
    for copy, whole in alive:
        if copy.cut_changed:
            whole.copy_(copy.tensor.whole())
            copy.mark_equal(whole)
    context.whole_copies = [copy for copy, _ in alive]


def in_place_error(operation: str, tensor: GridTensor) -> RuntimeError:
    """Return the error for a change in place that is not possible on a cut tensor.

    It is a RuntimeError because `a + b` takes a TypeError for an operand that it does not know.
    """
    return RuntimeError(
        f"{operation} changes a tensor made {tensor.made} in a way that is not possible while it is cut over the grid; "
        "write it without changing the tensor in place, or give the module WholeTensors() in the plan"
    )


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, GridTensor) and value.layout == torch.strided


def version_of(tensor: Tensor) -> int | None:
    """Return torch's count of in-place changes; None under inference_mode, where torch does not count."""
    while isinstance(tensor, CutTensor):
        tensor = tensor.local
    return None if tensor.is_inference() else tensor._version


def grid_tensors_in(values: Any) -> list[GridTensor]:
    """Return the grid tensors among nested arguments."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, GridTensor)]


IN_PLACE = {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor", "mod", "floordiv")
}
"""Python's augmented assignments, which torch's naming convention (a trailing underscore) does not cover."""


def is_in_place(name: str) -> bool:
    """Return whether the torch function of this name changes its first argument."""
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE


APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""The code under which the forward of every autograd function runs."""


def refuse_in_autograd_function(context: ModelContext, *, trained: bool = True) -> None:
    """Refuse to run layers inside a user's autograd function, where autograd records nothing."""
    if torch.is_grad_enabled() or not context.grad_enabled or not context.in_pass or not trained:
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is APPLY:
            function = frame.f_locals.get("cls")
            remedy = "call the layers outside of it, and hand it their results"
            if function is CheckpointFunction:
                remedy = "use checkpointing with use_reentrant=False"
            raise RuntimeError(
                f"an autograd function ({getattr(function, '__qualname__', '')}) runs layers of the model, or reads a "
                f"tensor made {context.label} that was not given to it as an argument, and the gradient would be lost; "
                f"{remedy}"
            )
        frame = frame.f_back


def refuse_own_tokens(function: type[torch.autograd.Function], args: tuple) -> None:
    """Refuse an autograd function of a user on tensors with the tokens of one member of a context group."""
    for value in args:
        if isinstance(value, CutTensor) and not isinstance(value, GridTensor):
            remedy = "use checkpointing with use_reentrant=False"
            if function is not CheckpointFunction:
                remedy = "write it with torch's functions, or use a grid with context=1"
            raise RuntimeError(
                f"the autograd function {function.__qualname__} reads a tensor {tuple(value.shape)} made {value.made}, "
                f"of which each place of a context group holds other tokens, and may mix them; {remedy}"
            )


def give_autograd_functions_whole_tensors() -> None:
    """Wrap `torch.autograd.Function.apply`, for the whole process, so that cut arguments arrive whole.

    torch has no hook for calls of autograd functions: it reads tensors below Python, where a cut tensor looks like one
    without a gradient. Calls without cut tensors pass through unchanged.
    """
    plain = torch.autograd.Function.__dict__["apply"].__func__
    if getattr(plain, "gives_whole_tensors", False):  # an earlier model has wrapped it
        return

    @functools.wraps(plain)
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        refuse_own_tokens(cls, args)
        if found := [value for value in args if isinstance(value, GridTensor)]:
            context = found[0].placement.context
            context.made_whole[context.label, cls.__qualname__] += len(found)
            context.note_in_place_change(cls.__qualname__)
            args = tuple(to_whole(value) for value in args)
        return plain(cls, *args, **kwargs)

    apply.gives_whole_tensors = True  # type: ignore[attr-defined]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]

"""Tensors that look whole and hold this rank's part.

`Placed` is what flows between the layers of a parallelised model. Model code sees the shape of the whole (of the rows
of this (data, z) place); an operation runs on the parts where a rule (rules.py) says that this is right, and otherwise
on whole tensors, which are gathered for it. So an operation that nobody thought of is slower, never wrong.

Invariant: a plain tensor inside a parallelised model is whole and equal on all ranks of x and y of its place, and so
is its gradient. Each layout therefore has two conversions, each the other's conjugate: `whole` gathers in forward and
takes its part of the gradient in backward; `part` takes in forward and gathers in backward, or sums where the plain
tensor was broadcast over parts.
"""

from __future__ import annotations

import functools
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold import comm
from fourfold.axes import BATCH
from fourfold.layout import FEATURES, TOKENS, Layout, rest
from fourfold.operators import Conjugate
from fourfold.parallelize.run import Run
from fourfold.parameter import whole_tensor


@dataclass(frozen=True)
class PlacedLayout(ABC):
    """How a `Placed` lies."""

    run: Run

    @property
    @abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The axes among x and y that cut it."""

    @abstractmethod
    def whole(self, local: Tensor, shape: Size) -> Tensor:
        """The whole tensor, whose gradient goes back to the parts."""

    @abstractmethod
    def write(self, placed: Placed, whole: Tensor) -> None:
        """Give a cut tensor the values of a whole one, in place."""

    def locals_of(self, placed: Placed) -> tuple[Tensor, ...]:
        """The local tensors that hold its values."""
        return (placed._local,)

    def padded(self, shape: Size) -> bool:  # noqa: ARG002
        """Whether some rank's local tensor has entries that stand for nothing. Their gradient is 0."""
        return False


@dataclass(frozen=True)
class Parted(PlacedLayout):
    """Every rank holds a part of the tensor: an operation on every element by itself can run on the local tensors."""

    @abstractmethod
    def join(self, local: Tensor, shape: Size) -> Tensor:
        """The whole tensor, outside of autograd."""

    @abstractmethod
    def take(self, whole: Tensor, shape: Size) -> Tensor:
        """This rank's part, outside of autograd."""

    @abstractmethod
    def part(self, plain: Tensor, shape: Size) -> Tensor:
        """What this rank reads of a plain tensor that is broadcast to `shape`, in a shape that broadcasts to the local
        one."""

    def whole(self, local: Tensor, shape: Size) -> Tensor:
        if all(self.run.grid.size(axis) == 1 for axis in self.axes):
            return self.uncut(local, shape)
        return Conjugate.apply(
            local,
            lambda part: self.join(part, shape).contiguous(),  # as the plain model has it, which may `view` it
            lambda gradient: self.take(gradient, shape),
        )

    def write(self, placed: Placed, whole: Tensor) -> None:
        placed._local.copy_(self.part(whole, placed.shape))

    def uncut(self, local: Tensor, shape: Size) -> Tensor:
        """The whole tensor where its axes have one rank: a view of the local one."""
        return local.view(shape)

    def flat(self, plain: Tensor) -> Tensor:
        """The local tensor of a plain one, on a grid where nothing is cut."""
        return plain

    def sum(self, gradient: Tensor, axes: tuple[str, ...]) -> Tensor:
        for axis in axes:
            gradient = comm.all_reduce(gradient, self.run.grid, axis, label=self.run.label).wait()
        return gradient


def conjugate(plain: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """`there`, with `back` for the gradient if there will be one."""
    if plain.requires_grad and torch.is_grad_enabled():
        return Conjugate.apply(plain, there, back)
    return there(plain)


@dataclass(frozen=True)
class Rest(Parted):
    """The residual stream [..., k]: its tokens, flattened, cut over x (where activations are sharded) with padding at
    the end, its features over y. The local tensor is [ceil(m/x), k/y]."""

    @property
    def inside(self) -> Layout:
        """The layout of [tokens, features] inside this place: the axes that cut rows hold other rows."""
        cuts = rest(self.run.policy.activations).cuts
        return Layout(tuple((axis, dim) for axis, dim in cuts if axis not in BATCH))

    @property
    def tokens_cut(self) -> int:
        return self.inside.parts(self.run.grid.shape.sizes, TOKENS)

    @property
    def axes(self) -> tuple[str, ...]:
        return self.inside.axes

    def padded(self, shape: Size) -> bool:
        return prod(shape[:-1]) % self.tokens_cut != 0

    def flat(self, plain: Tensor) -> Tensor:
        return plain.reshape(-1, plain.shape[-1])

    def join(self, local: Tensor, shape: Size) -> Tensor:
        grid, label = self.run.grid, self.run.label
        whole = comm.all_gather(local, grid, "y", dim=1, label=label).wait()
        return self._join_tokens(whole, prod(shape[:-1])).view(shape)

    def take(self, whole: Tensor, shape: Size) -> Tensor:
        return self.take_part(whole.reshape(-1, shape[-1]), tokens=True, features=True)

    def part(self, plain: Tensor, shape: Size) -> Tensor:
        if plain.dim() == 0:  # as it is: with dims it would take part in the choice of a dtype
            return conjugate(plain, lambda same: same, lambda gradient: self.sum(gradient, self.axes))
        tokens = any(size != 1 for size in plain.shape[:-1])
        features = plain.shape[-1] == shape[-1]
        width = shape[-1] if features else 1
        flat = plain.expand(*shape[:-1], width).reshape(-1, width) if tokens else plain.reshape(1, width)
        return conjugate(
            flat,
            lambda whole: self.take_part(whole, tokens=tokens, features=features),
            lambda gradient: self._give(gradient, prod(shape[:-1]), tokens=tokens, features=features),
        )

    def take_part(self, flat: Tensor, *, tokens: bool, features: bool) -> Tensor:
        """This rank's part of [tokens, features], where one of them may be broadcast and stays as it is."""
        cut = {TOKENS: tokens, FEATURES: features}
        layout = Layout(tuple((axis, dim) for axis, dim in self.inside.cuts if cut[dim]))
        part = layout.take(flat, self.run.grid)
        rows = -(-flat.shape[0] // self.tokens_cut) if tokens else flat.shape[0]
        return functional.pad(part, (0, 0, 0, rows - part.shape[0])).contiguous()

    def _give(self, gradient: Tensor, count: int, *, tokens: bool, features: bool) -> Tensor:
        grid, label = self.run.grid, self.run.label
        if tokens:
            gradient = self._join_tokens(gradient, count)
        elif self.tokens_cut > 1:
            gradient = self.sum(gradient, ("x",))
        if features:
            return comm.all_gather(gradient, grid, "y", dim=1, label=label).wait()
        return self.sum(gradient, ("y",))

    def _join_tokens(self, local: Tensor, count: int) -> Tensor:
        if self.tokens_cut == 1:
            return local
        return comm.all_gather(local, self.run.grid, "x", label=self.run.label).wait()[:count]


@dataclass(frozen=True)
class Blocks(Parted):
    """One dim is cut in contiguous blocks over some axes, outermost first, as torch.chunk cuts: heads, hidden units,
    channels. The local tensor has the dims of the whole."""

    dim: int
    over: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        return self.over

    @property
    def parts(self) -> int:
        return prod(self.run.grid.size(axis) for axis in self.over)

    def moved(self, dim: int) -> Blocks:
        """The same blocks on another dim."""
        return type(self)(self.run, dim, self.over)

    def join(self, local: Tensor, shape: Size) -> Tensor:
        return self._join(local, self.dim, shape[self.dim])

    def take(self, whole: Tensor, shape: Size) -> Tensor:
        return self._take(whole, self.dim, shape[self.dim])

    def part(self, plain: Tensor, shape: Size) -> Tensor:
        dim = plain.dim() - (len(shape) - self.dim)
        if dim < 0 or plain.shape[dim] != shape[self.dim]:
            return conjugate(plain, lambda same: same, lambda gradient: self.sum(gradient, self.over))
        length = shape[self.dim]
        return conjugate(
            plain,
            lambda whole: self._take(whole, dim, length),
            lambda gradient: self._join(gradient, dim, length),
        )

    def reshaped(self, a: Placed, shape: Size) -> Any:
        """The same blocks of another shape, where each is a whole number of the new dim's entries."""
        before = prod(a.shape[: self.dim])
        length, held = a.shape[self.dim], a.local.shape[self.dim]
        even = length % self.parts == 0
        for dim, size in enumerate(shape):
            if prod(shape[:dim]) != before:
                continue
            if (size == length and prod(shape[dim:]) == prod(a.shape[self.dim :])) or (even and size % self.parts == 0):
                local = [*shape[:dim], size * held // length, *shape[dim + 1 :]]
                return Placed(a.local.reshape(local), self.moved(dim), shape)
        return NotImplemented

    def _take(self, whole: Tensor, dim: int, length: int) -> Tensor:  # noqa: ARG002
        return Layout.along(dim, self.over).take(whole, self.run.grid).contiguous()

    def _join(self, local: Tensor, dim: int, length: int) -> Tensor:
        shape = (*local.shape[:dim], length, *local.shape[dim + 1 :])
        return comm.join(local, Layout.along(dim, self.over), shape, self.run.grid, label=self.run.label)


Rule = Callable[[Callable, tuple, dict], Any]
"""Runs a torch function on parts, or returns NotImplemented where the parts do not suffice."""
RULES: dict[Callable, Rule] = {}
"""By torch function; rules.py and its neighbours fill it when the package is imported."""


class Placed(Tensor):
    """A tensor of `shape` of which this rank holds `local`, cut as `placement` says."""

    placement: PlacedLayout
    made: str
    """Where it was made: after which layer."""
    _shape: Size
    _local: Tensor

    @staticmethod
    def __new__(cls, local: Tensor, placement: PlacedLayout, shape: Size | tuple[int, ...]) -> Placed:
        new = Tensor._make_wrapper_subclass(cls, Size(shape), dtype=local.dtype, device=local.device)
        new._shape, new._local, new.placement, new.made = Size(shape), local, placement, placement.run.label
        return new

    @property
    def local(self) -> Tensor:
        if self.placement.run.copies:
            settle(self.placement.run)
        return self._local

    def like(self, local: Tensor) -> Placed:
        """Another local tensor that lies as this one does."""
        return Placed(local, self.placement, self._shape)

    def whole(self) -> Tensor:
        return self.placement.whole(self.local, self._shape)

    def laid(self, layout: Parted) -> Placed:
        """The same in another layout."""
        return self if self.placement == layout else laid(self.whole(), layout)

    if not TYPE_CHECKING:  # in Python, since torch would ask __torch_function__ for each of them
        shape = property(lambda self: self._shape)
        dtype = property(lambda self: self.local.dtype)
        device = property(lambda self: self.local.device)
        ndim = property(lambda self: len(self._shape))
        requires_grad = property(lambda self: self.local.requires_grad)
        grad_fn = property(lambda self: self.local.grad_fn)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Placed({tuple(self._shape)}, {type(self.placement).__name__}, local {tuple(self.local.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, DTensor) for value in args):  # a parameter, by code that no pass runs
            gather = torch.clone if torch.is_grad_enabled() else whole_tensor
            args = tuple(gather(value) if isinstance(value, DTensor) else value for value in args)
        if not torch.is_grad_enabled():
            for placed in placed_in((args, kwargs)):
                refuse_inside_functions(placed.placement.run, trained=placed.requires_grad)
        rule = RULES.get(func)
        result = NotImplemented if rule is None else rule(func, args, kwargs)
        if result is NotImplemented:
            return on_wholes(func, args, kwargs)
        if isinstance(result, Placed) and args and isinstance(args[0], Placed):
            result.made = args[0].made
        return result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} was called on a tensor that is cut over the grid, past torch's Python functions; "
            "give the module that does so a plan of Whole(), which hands it whole tensors"
        )


def laid(plain: Tensor, layout: Parted) -> Placed:
    """A plain tensor in that layout."""
    if not layout.run.cuts:
        return Placed(layout.flat(plain), layout, plain.shape)
    return Placed(layout.part(plain, plain.shape), layout, plain.shape)


def whole(value: Any) -> Any:
    """A plain tensor of what may be placed."""
    return value.whole() if isinstance(value, Placed) else value


def on_wholes(func: Callable, args: tuple, kwargs: dict) -> Any:
    """Run an operation as it stands, on whole tensors.

    What it changes in place is written back to the cut tensor. Where its result is a view of a whole tensor, the cut
    tensor and the view are kept in agreement (`settle`), as a tensor and its views are.
    """
    name = getattr(func, "__name__", str(func))
    found = placed_in((args, kwargs))
    run = found[0].placement.run
    if name == "__set__" or placed_in(kwargs.get("out")):
        raise RuntimeError(refusal(name, found[0]))
    run.made_whole[run.label, name] += len(found)
    wholes = {id(placed): placed.whole() for placed in found}
    changed = operand_changed(name, args, kwargs)
    if isinstance(changed, Placed):
        wholes[id(changed)] = wholes[id(changed)].clone()  # one that autograd lets change
    versions = {key: version_of(whole) for key, whole in wholes.items()}
    args, kwargs = tree_map_only(Placed, lambda placed: wholes[id(placed)], (args, kwargs))
    result = func(*args, **kwargs)
    for placed in found:
        whole = wholes[id(placed)]
        if whole.shape != placed.shape:
            raise RuntimeError(refusal(name, placed))
        if version_of(whole) != versions[id(placed)]:
            run.changes_in_place(name)
            placed.placement.write(placed, whole)
    if isinstance(changed, Placed) and result is wholes[id(changed)]:
        return changed
    memory = {leaf.untyped_storage()._cdata for leaf in tree_leaves(result) if is_strided(leaf)}
    for placed in found:
        own = {part.untyped_storage()._cdata for part in placed.placement.locals_of(placed)}
        if wholes[id(placed)].untyped_storage()._cdata in memory - own:
            run.copies.append(WholeCopy(placed, wholes[id(placed)]))
    return result


def operand_changed(name: str, args: tuple, kwargs: dict) -> Any:
    """The argument that an operation changes in place, if it is one that does."""
    if changes_in_place(name) or kwargs.get("inplace"):
        return args[0] if args else kwargs.get("input")
    return None


class WholeCopy:
    """A whole copy of a cut tensor of which model code holds views, and the states in which the two agree."""

    def __init__(self, placed: Placed, whole: Tensor) -> None:
        self.placed, self._whole = placed, weakref.ref(whole)
        self.agree(whole)

    def agree(self, whole: Tensor) -> None:
        self.version, self.versions = version_of(whole), self._now()

    def _now(self) -> list[int | None]:
        return [version_of(part) for part in self.placed.placement.locals_of(self.placed)]

    @property
    def whole(self) -> Tensor | None:
        """None once nobody holds a view of it: views hold the tensor that they are of."""
        return self._whole()

    @property
    def cut_changed(self) -> bool:
        return self._now() != self.versions


def settle(run: Run) -> None:
    """After a change in place let cut tensors and whole copies of them agree again, as views of one memory do."""
    copies, run.copies = run.copies, []  # reading a tensor settles too
    alive = [(copy, whole) for copy in copies if (whole := copy.whole) is not None]
    for copy, whole in alive:
        if version_of(whole) != copy.version:
            if copy.cut_changed:
                raise RuntimeError(refusal("a change of two overlapping views", copy.placed))
            copy.placed.placement.write(copy.placed, whole)
            copy.agree(whole)
    for copy, whole in alive:
        if copy.cut_changed:
            whole.copy_(copy.placed.whole())
            copy.agree(whole)
    run.copies = [copy for copy, _ in alive]


def refusal(operation: str, placed: Placed) -> str:
    # raised as a RuntimeError: a + b would take a TypeError for an operand that it does not know
    return (
        f"{operation} changes a tensor made {placed.made} in a way that is not possible while it is cut over the grid; "
        "write it without changing the tensor in place, or give the module a plan of Whole(), which hands it whole ones"
    )


def is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Placed) and value.layout == torch.strided


def version_of(tensor: Tensor) -> int | None:
    """Counts changes in place; None under inference_mode, where torch counts none."""
    return None if tensor.is_inference() else tensor._version


def placed_in(values: Any) -> list[Placed]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Placed)]


def changes_in_place(name: str) -> bool:
    return name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__")) or name in IN_PLACE


IN_PLACE = {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow", "and", "or", "xor", "mod", "floordiv")
}


def refuse_inside_functions(run: Run, *, trained: bool = True) -> None:
    """Layers cannot run inside an autograd function of somebody else's: autograd records nothing there."""
    if torch.is_grad_enabled() or not run.grad_enabled or not run.depth or not trained:
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is APPLY:
            name = getattr(frame.f_locals.get("cls"), "__qualname__", "")
            remedy = REMEDIES.get(name, "call the layers outside of it, and hand it their results")
            raise RuntimeError(
                f"an autograd function ({name}) runs layers of the model, or reads a tensor made {run.label} that was "
                f"not given to it as an argument, and the gradient would be lost; {remedy}"
            )
        frame = frame.f_back


REMEDIES = {"CheckpointFunction": "use checkpointing with use_reentrant=False"}
"""By the name of an autograd function of torch's own."""
APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""What every autograd function's forward runs under."""


def give_functions_whole_tensors() -> None:
    """From now on autograd functions are given whole tensors in place of cut ones, for the whole process.

    torch has no hook for a call of an autograd function: it reads tensors past Python, where it would take a cut tensor
    for one without a gradient. So `Function.apply` is wrapped; calls without cut tensors pass through it unchanged.
    """
    plain = torch.autograd.Function.__dict__["apply"].__func__
    if getattr(plain, "gives_whole_tensors", False):
        return

    @functools.wraps(plain)
    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if found := [value for value in args if isinstance(value, Placed)]:
            run = found[0].placement.run
            run.made_whole[run.label, cls.__qualname__] += len(found)
            run.changes_in_place(cls.__qualname__)
            args = tuple(value.whole() if isinstance(value, Placed) else value for value in args)
        return plain(cls, *args, **kwargs)

    apply.gives_whole_tensors = True  # type: ignore[attr-defined]
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]

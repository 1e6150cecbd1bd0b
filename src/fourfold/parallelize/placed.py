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

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Size, Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from fourfold import comm
from fourfold.layout import chunk, rest
from fourfold.operators import Conjugate, gather_blocks
from fourfold.parallelize.run import Run


@dataclass(frozen=True)
class Layout(ABC):
    """How a `Placed` lies."""

    run: Run

    @property
    @abstractmethod
    def axes(self) -> tuple[str, ...]:
        """The axes among x and y that cut it."""

    @abstractmethod
    def whole(self, local: Tensor, shape: Size) -> Tensor:
        """The whole tensor, whose gradient goes back to the parts."""

    def padded(self, shape: Size) -> bool:  # noqa: ARG002
        """Whether some rank's local tensor has entries that stand for nothing. Their gradient is 0."""
        return False

    def refuse_changes(self, operation: str) -> NoReturn:
        # no TypeError, which a + b would take for an operand that it does not know
        raise RuntimeError(
            f"{operation} changes a tensor made {self.run.label} in place that is cut over the grid; write it without "
            "changing in place, or give the module a plan of Whole(), which hands it whole tensors"
        )


@dataclass(frozen=True)
class Parted(Layout):
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
        return Conjugate.apply(
            local,
            lambda part: self.join(part, shape).contiguous(),  # as the plain model has it, which may `view` it
            lambda gradient: self.take(gradient, shape),
        )

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
    def tokens_cut(self) -> int:
        return self.run.grid.size("x") if "x" in rest(self.run.policy.activations).tokens else 1

    @property
    def axes(self) -> tuple[str, ...]:
        return ("x", "y") if "x" in rest(self.run.policy.activations).tokens else ("y",)

    def padded(self, shape: Size) -> bool:
        return prod(shape[:-1]) % self.tokens_cut != 0

    def join(self, local: Tensor, shape: Size) -> Tensor:
        grid, label = self.run.grid, self.run.label
        whole = comm.all_gather(local, grid, "y", dim=1, label=label).wait()
        return self._join_tokens(whole, prod(shape[:-1])).view(shape)

    def take(self, whole: Tensor, shape: Size) -> Tensor:
        return self._take(whole.reshape(-1, shape[-1]), tokens=True, features=True)

    def part(self, plain: Tensor, shape: Size) -> Tensor:
        if plain.dim() == 0:  # as it is: with dims it would take part in the choice of a dtype
            return conjugate(plain, lambda same: same, lambda gradient: self.sum(gradient, self.axes))
        tokens = any(size != 1 for size in plain.shape[:-1])
        features = plain.shape[-1] == shape[-1]
        width = shape[-1] if features else 1
        flat = plain.expand(*shape[:-1], width).reshape(-1, width) if tokens else plain.reshape(1, width)
        return conjugate(
            flat,
            lambda whole: self._take(whole, tokens=tokens, features=features),
            lambda gradient: self._give(gradient, prod(shape[:-1]), tokens=tokens, features=features),
        )

    def _take(self, flat: Tensor, *, tokens: bool, features: bool) -> Tensor:
        coords = self.run.grid.coords
        if features:
            width = flat.shape[1] // self.run.grid.size("y")
            flat = flat.narrow(1, coords["y"] * width, width)
        if tokens and self.tokens_cut > 1:
            rows = -(-flat.shape[0] // self.tokens_cut)
            held = chunk(flat.shape[0], self.tokens_cut, coords["x"])
            flat = functional.pad(flat[held.start : held.stop], (0, 0, 0, rows - len(held)))
        return flat.contiguous()

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

    def _lengths(self, length: int) -> list[int]:
        """Of the dim before each cut and after the last."""
        lengths = [length]
        for axis in self.over:
            lengths.append(len(chunk(lengths[-1], self.run.grid.size(axis), self.run.grid.coords[axis])))
        return lengths

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

    def _take(self, whole: Tensor, dim: int, length: int) -> Tensor:
        first = 0
        for axis in self.over:
            held = chunk(length, self.run.grid.size(axis), self.run.grid.coords[axis])
            first, length = first + held.start, len(held)
        return whole.narrow(dim, first, length).contiguous()

    def _join(self, local: Tensor, dim: int, length: int) -> Tensor:
        for axis, outer in reversed(list(zip(self.over, self._lengths(length), strict=False))):
            local = gather_blocks(local, self.run.grid, axis, count=outer, dim=dim, label=self.run.label).wait()
        return local


Rule = Callable[[Callable, tuple, dict], Any]
"""Runs a torch function on parts, or returns NotImplemented where the parts do not suffice."""
RULES: dict[Callable, Rule] = {}
"""By torch function; rules.py and its neighbours fill it when the package is imported."""


class Placed(Tensor):
    """A tensor of `shape` of which this rank holds `local`, cut as `placement` says."""

    placement: Layout
    _shape: Size
    _local: Tensor
    _lent: list[tuple[weakref.ref[Tensor], int | None]]
    """Whole copies of which somebody may hold views, and the state that they were in."""
    read: dict[object, Any]
    """What layers that read it together have found for each other."""

    @staticmethod
    def __new__(cls, local: Tensor, placement: Layout, shape: Size | tuple[int, ...]) -> Placed:
        new = Tensor._make_wrapper_subclass(cls, Size(shape), dtype=local.dtype, device=local.device)
        new._shape, new._local, new.placement, new.read, new._lent = Size(shape), local, placement, {}, []
        return new

    @property
    def local(self) -> Tensor:
        if self._lent:
            self._require_unchanged()
        return self._local

    def _require_unchanged(self) -> None:
        for lent, version in self._lent:
            copy = lent()
            if copy is not None and version_of(copy) != version:
                raise RuntimeError(
                    f"a view of a tensor made {self.placement.run.label} was changed in place, and the tensor, which "
                    "is cut over the grid, does not see it; write it without changing in place, or give the module a "
                    "plan of Whole(), which hands it whole tensors"
                )

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
        if not torch.is_grad_enabled():
            for placed in placed_in((args, kwargs)):
                refuse_inside_functions(placed.placement.run, trained=placed.requires_grad)
        rule = RULES.get(func)
        result = NotImplemented if rule is None else rule(func, args, kwargs)
        return on_wholes(func, args, kwargs) if result is NotImplemented else result

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} was called on a tensor that is cut over the grid, past torch's Python functions; "
            "give the module that does so a plan of Whole(), which hands it whole tensors"
        )


def laid(plain: Tensor, layout: Parted) -> Placed:
    """A plain tensor in that layout."""
    return Placed(layout.part(plain, plain.shape), layout, plain.shape)


def whole(value: Any) -> Any:
    """A plain tensor of what may be placed."""
    return value.whole() if isinstance(value, Placed) else value


def on_wholes(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The operation as it stands, on whole tensors."""
    name = getattr(func, "__name__", str(func))
    found = placed_in((args, kwargs))
    run = found[0].placement.run
    if args and isinstance(args[0], Placed) and changes_in_place(name):
        args[0].placement.refuse_changes(name)
    for placed in placed_in(kwargs.get("out")):
        placed.placement.refuse_changes(name)
    run.made_whole[run.label, name] += len(found)
    wholes = {id(placed): placed.whole() for placed in found}
    versions = {key: version_of(whole) for key, whole in wholes.items()}
    args, kwargs = tree_map_only(Placed, lambda placed: wholes[id(placed)], (args, kwargs))
    try:
        result = func(*args, **kwargs)
    except RuntimeError as error:
        if Conjugate.__name__ in str(error):  # torch refuses to change what such a function gave
            found[0].placement.refuse_changes(name)
        raise
    for placed in found:
        if version_of(wholes[id(placed)]) != versions[id(placed)]:
            placed.placement.refuse_changes(name)
    memory = {leaf.untyped_storage()._cdata for leaf in tree_leaves(result) if is_strided(leaf)}
    for placed in found:
        whole = wholes[id(placed)]
        if whole.untyped_storage()._cdata in memory:
            # views hold on to the tensor at their bottom, not to those between
            placed._lent.append((weakref.ref(whole if whole._base is None else whole._base), version_of(whole)))
    return result


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
    """An autograd function of one's own cannot see that a tensor is cut: its gradient would be lost."""
    if torch.is_grad_enabled() or not run.grad_enabled or not run.depth or not trained:
        return
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is APPLY:
            name = getattr(frame.f_locals.get("cls"), "__qualname__", "")
            remedy = REMEDIES.get(name, "give the module that calls it a plan of Whole(), which hands it whole tensors")
            raise RuntimeError(
                f"an autograd function ({name}) reads a tensor made {run.label} that is cut over the grid, and its "
                f"gradient would be lost; {remedy}"
            )
        frame = frame.f_back


REMEDIES = {
    "CheckpointFunction": "use checkpointing with use_reentrant=False",
    "BackwardHookFunction": "put backward hooks on the whole model, or on a module with a plan of Whole()",
}
"""By the name of an autograd function of torch's own."""
APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
"""What every autograd function's forward runs under."""

"""What a step of real code gives a device to do, caught as it is dispatched on meta tensors.

    product      mm, addmm, bmm and their kin, convolutions   `Product`, labelled by the ledger where a layer runs it
    attention    a fused kernel, forward or backward          `Attention`; a causal mask leaves half of the scores
    view, empty  nothing
    all else     memory-bound                                 `Kernel`: bytes read and written

Layers repeat each other's shapes, so what an operation makes and costs is found once for each kind of its inputs:
torch's own shape functions are most of the time that a dry run takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fourfold.grid import Shape
from fourfold.ledger import Collective, Event
from fourfold.params import LazyTensor, local_of
from fourfold.planner.kept import Alive
from fourfold.planner.work import Attention, Compute, Kernel, Launch, Product, Wait, Work

FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "addmm_": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
}
"""Products, and what their two factors are called."""
CONVOLUTIONS = ("convolution", "convolution_backward")
OVERWRITES = ("copy_", "fill_", "zero_")
"""What these write they do not read."""
PICKS = ("embedding", "gather", "index", "index_select", "take")
"""Read of their first tensor no more than they write."""
PUTS = ("scatter_", "scatter_add_", "index_add_", "index_copy_", "index_put_")
"""Touch of their first tensor no more than they are given."""


@dataclass(frozen=True, slots=True)
class Made:
    """The shape of a tensor that an operation makes."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def again(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operation does, for one kind of inputs."""

    kind: Literal["makes", "changes", "views", "else"]
    """It makes new tensors; it changes its first argument and returns it; it looks at one in another way; or else."""
    work: Compute | None
    made: tuple[Made, ...] = ()
    single: bool = True
    """It returns a tensor, not a tuple or list of them."""

    def again(self) -> Any:
        found = [made.again() for made in self.made]
        return found[0] if self.single else found


class Caught(Alive):
    """The program of what runs inside, and the bytes that are alive."""

    def __init__(self, events: list[Event], shape: Shape) -> None:
        """`events`: of the grid's ledger, which goes on writing them."""
        super().__init__()
        self.events, self.shape = events, shape
        self._program: list[Work] = []
        self._flights: dict[int, int] = {}
        self._launched: list[Collective] = []  # kept, since a record's identity tells its wait
        self._known: dict[Any, Operation] = {}
        self._label = ""
        self._marks: list[tuple[list[Work], int]] = []

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that were there before count too."""
        for tensor in tensors:
            shard = local_of(tensor) if isinstance(tensor, DTensor) else tensor
            self._count(shard.untyped_storage())

    def mark(self) -> None:
        """A step begins or ends here."""
        self._follow_ledger()
        self._marks.append((self._program, self.peak_nbytes))
        self._program, self.peak_nbytes = [], self.nbytes
        self._flights.clear()
        self._launched.clear()

    def between_marks(self) -> tuple[list[Work], int]:
        """What ran between the first two marks, and the most bytes that were alive."""
        return self._marks[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(issubclass(kind, (DTensor, LazyTensor)) for kind in types):
            return NotImplemented  # they run on their shards, which come by here
        kwargs = kwargs or {}
        if func.namespace == "profiler":  # a mark on the host's time
            return func(*args, **kwargs)
        key = func, _key_of(args), _key_of(tuple(kwargs.items())) if kwargs else None
        known = self._known.get(key)
        if known is None:
            out = func(*args, **kwargs)
            known = self._known[key] = _operation(func, args, kwargs, out)
        elif known.kind == "makes":
            out = known.again()
        elif known.kind == "changes":
            out = args[0]
        else:
            out = func(*args, **kwargs)
        if known.kind == "makes":
            for tensor in (out,) if known.single else out:
                self._count(tensor.untyped_storage())
        elif known.kind == "else":
            self._count_new(out, args, kwargs)
        if known.work is not None:
            self._append(known.work)
        return out

    def _count_new(self, out: Any, args: Any, kwargs: Any) -> None:
        given = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if tensor.untyped_storage()._cdata not in given:
                self._count(tensor.untyped_storage())

    def _append(self, work: Compute) -> None:
        self._follow_ledger()
        if isinstance(work, Product) and self._label:
            work, self._label = replace(work, label=self._label), ""
        self._program.append(work)

    def _follow_ledger(self) -> None:
        """What the host launched and waited for since the last operation."""
        for event in self.events:
            if isinstance(event.what, str):
                self._label = event.what
            elif event.kind == "launch":
                self._flights[id(event.what)] = flight = len(self._launched)
                self._launched.append(event.what)
                self._program.append(Launch(flight, event.what, _lane(event.what, self.shape)))
            elif id(event.what) in self._flights:  # else it was launched before the step, and has arrived
                self._program.append(Wait(self._flights.pop(id(event.what))))
        self.events.clear()


def _lane(record: Collective, shape: Shape) -> str:
    """Gathers and reductions have a communicator each along some axes."""
    if record.axis not in shape.two_lanes:
        return record.axis
    return f"{record.axis} {'gather' if record.op == 'all_gather' else 'reduce'}"


def _key_of(value: Any) -> Any:
    """What an operation's shapes and costs depend on."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.is_meta
    if isinstance(value, list | tuple):
        return tuple([_key_of(part) for part in value])
    return value.__class__, value


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _operation(func: Any, args: Any, kwargs: Any, out: Any) -> Operation:
    given, found = _tensors((args, kwargs)), _tensors(out)
    name = func._schema.name.partition("::")[2]
    if not all(tensor.is_meta for tensor in (*given, *found)):
        return Operation("else", None)  # the host's own numbers
    bound = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    if func._schema.is_mutable:
        kind = "changes" if len(found) == 1 and args and found[0] is args[0] else "else"
        return Operation(kind, _work(func, name, bound, out))
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    if any(tensor.untyped_storage()._cdata in storages for tensor in found):
        return Operation("views", None)
    work = None if name.startswith(("empty", "new_empty")) else _work(func, name, bound, out)
    returns = [out] if isinstance(out, Tensor) else out
    if not isinstance(returns, list | tuple) or not all(isinstance(part, Tensor) for part in returns):
        return Operation("else", work)
    made = tuple(Made(tensor.shape, tensor.stride(), tensor.dtype) for tensor in returns)
    return Operation("makes", work, made, isinstance(out, Tensor))


def _work(func: Any, name: str, bound: dict[str, Any], out: Any) -> Compute | None:
    if name in FACTORS:
        a, b = (bound[factor] for factor in FACTORS[name])
        return _product(name, prod(a.shape[:-1]), a.shape[-1], b.shape[-1])
    if name in CONVOLUTIONS:
        flops = flop_registry[func._overloadpacket](*bound.values(), out_val=out)
        result = bound.get("grad_output", out)
        m, n = result.numel() // result.shape[1], result.shape[1]
        return _product(name, m, flops // (2 * m * n), n)
    nbytes = _nbytes(func, name, bound, out)
    if "scaled_dot_product" in name:
        q, k, v = bound["query"], bound["key"], bound["value"]
        scores = q.shape[:-1].numel() * k.shape[-2] // (2 if bound.get("is_causal") else 1)
        flops = 2 * scores * (q.shape[-1] + v.shape[-1]) * (2 if name.endswith("_backward") else 1)
        return Attention(name.strip("_"), flops, nbytes)
    return Kernel(name, nbytes) if nbytes else None


def _product(label: str, m: int, k: int, n: int) -> Product | None:
    return Product(label, m, k, n) if m * k * n else None


def _nbytes(func: Any, name: str, bound: dict[str, Any], out: Any) -> int:
    """Bytes that are read and written."""
    writes = [part.name for part in func._schema.arguments if part.alias_info is not None and part.alias_info.is_write]
    if name.startswith("_fused_adam") and bound.get("grad_scale") is None:
        writes.remove("grads")  # written only where they are scaled on the way
    written = _sizes([bound[key] for key in writes if key in bound] or out)
    unread = ["self"] if name in OVERWRITES else ["out"] if "out" in bound else []
    read = {key: _sizes(value) for key, value in bound.items() if key not in unread}
    if name in PICKS:
        first = next(iter(read))
        read[first] = min(read[first], written)
    elif name in PUTS:
        given = max(size for key, size in read.items() if key != "self")
        read["self"] = written = min(written, given)
    return sum(read.values()) + written


def _sizes(tree: Any) -> int:
    """Bytes of tensors; one that is expanded is no larger than its memory."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in _tensors(tree))

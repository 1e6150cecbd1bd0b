"""What ranks communicate: the collectives that layers ask for, each recorded in the grid's ledger.

A function launches a collective and returns a `Pending`; `wait()` returns the result. Callers launch whatever the sizes
are: on an axis of one rank and for empty buffers nothing is recorded or sent. Uneven shards are padded here and nowhere
else. On meta tensors, and on a muted grid, the launch is recorded, nothing is sent, and the result has the right shape,
so that any model can be run dry. How a message travels is the business of `wire`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from math import prod
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from fourfold import wire
from fourfold.axes import PIPE
from fourfold.grid import Grid
from fourfold.job import typed_error, typed_errors
from fourfold.layout import Layout, chunk
from fourfold.ledger import NO_SPAN, Collective, Op

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A collective in flight; `wait()` returns its result, again and again."""

    __slots__ = ("_finish", "_grid", "_record", "_result")

    def __init__(self, finish: Callable[[], T], record: Collective | None = None, grid: Grid | None = None) -> None:
        self._finish: Callable[[], T] | None = finish
        self._record = record
        self._grid = grid
        self._result: T | None = None

    def wait(self) -> T:
        if self._finish is not None:
            if self._record is None or self._grid is None:
                self._result = self._finish()
            else:
                on_gpu = self._grid.device.type == "cuda"
                with Named(self._record, "wait "), self._grid.ledger.waiting(self._record, on_gpu=on_gpu):
                    self._result = self._finish()
                if self._grid.recording is not None:
                    self._grid.recording.landed(self._record)
            self._finish = None  # frees the buffers that only the message needed
        return self._result  # type: ignore[return-value]

    def then(self, step: Callable[[T], U]) -> Pending[U]:
        """Return a `Pending` whose result is that of `step`, a local computation on this one's result."""
        return Pending(lambda: step(self.wait()))


def split_results(pending: Pending[list[T]], counts: Sequence[int]) -> list[Pending[list[T]]]:
    """Return a `Pending` for each of several parts of a list of results, which have these lengths.

    Each takes its part out of the list, so that the others do not keep it in memory.
    """
    if len(counts) == 1:
        return [pending]
    places = [slice(end - count, end) for count, end in zip(counts, accumulate(counts), strict=True)]
    return [pending.then(partial(_taken, place)) for place in places]


def _taken(place: slice, results: list[T]) -> list[T]:
    part = results[place]
    results[place] = [None] * len(part)  # type: ignore[list-item]
    return part


class Arrived(Generic[T]):
    """What `Pending` is for a collective, for a result that needs none."""

    __slots__ = ("_result",)

    def __init__(self, result: T) -> None:
        self._result = result

    def wait(self) -> T:
        return self._result


class Named:
    """A block in which the collective is named in profiles, and in the error that the backend raises."""

    __slots__ = ("_doing", "_record", "_span")

    def __init__(self, record: Collective, doing: str = "") -> None:
        self._record, self._doing = record, doing

    def __enter__(self) -> None:
        self._span: AbstractContextManager[object] = NO_SPAN
        if torch.autograd._profiler_enabled():
            self._span = torch.profiler.record_function(f"fourfold::{self._doing}{self._record}")
            self._span.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._span is not NO_SPAN:
            self._span.__exit__(kind, error, trace)  # type: ignore[arg-type]
        if isinstance(error, RuntimeError) and (typed := typed_error(str(self._record), error)) is not None:
            raise typed from error


@contextmanager
def muted(grid: Grid) -> Iterator[None]:
    """Record collectives inside the block and send nothing, to measure computation alone; results hold any values."""
    before, grid.muted = grid.muted, True
    try:
        yield
    finally:
        grid.muted = before


# --- one tensor


def all_gather(
    shard: Tensor, grid: Grid, axis: str, *, dim: int = 0, length: int | None = None, label: str = ""
) -> Pending[Tensor]:
    """Join the shards of all ranks along `dim`.

    With `length`, the joined tensor has that length in `dim` and the shards are its chunks, of which the last ones may
    be short or empty: they are padded for the message, and the padding is dropped from the result.
    """
    ranks = grid.size(axis)
    if ranks == 1:
        return Pending(lambda: shard)
    if length is not None:
        shard = _padded(shard, dim, -(-length // ranks))
    record = _record("all_gather", [shard], grid, axis, label)
    joined = shard.new_empty((ranks, *shard.shape))
    finish = wire.nothing
    if record is not None and not _stays(shard, grid):
        with Named(record):
            finish = wire.all_gather([shard], [joined], _link(record, grid))

    def join_parts() -> Tensor:
        finish()
        whole = joined.flatten(0, 1) if dim == 0 else torch.cat(joined.unbind(0), dim)
        return whole if length is None or length == whole.shape[dim] else whole.narrow(dim, 0, length)

    return Pending(join_parts, record, grid)


def reduce_scatter(whole: Tensor, grid: Grid, axis: str, *, dim: int = 0, label: str = "") -> Pending[Tensor]:
    """Sum over all ranks and keep this rank's chunk of `dim`, as torch.chunk cuts it.

    If the number of ranks does not divide the length of `dim`, zeros are added for the message and dropped again.
    """
    length, ranks = whole.shape[dim], grid.size(axis)
    if ranks == 1:
        return Pending(lambda: whole)
    if length % ranks:
        padded = _padded(whole, dim, -(-length // ranks) * ranks)
        own = len(chunk(length, ranks, grid.coords[axis]))
        return reduce_scatter(padded, grid, axis, dim=dim, label=label).then(lambda part: part.narrow(dim, 0, own))
    record = _record("reduce_scatter", [whole], grid, axis, label)
    parts = whole.unflatten(0, (ranks, -1)) if dim == 0 else torch.stack(whole.chunk(ranks, dim))
    if record is None or _stays(whole, grid):
        own_part = torch.empty_like(parts[0])
        return Pending(lambda: (parts, own_part)[1], record, grid)
    with Named(record):
        finish = wire.reduce_scatter([parts], _link(record, grid))
    return Pending(lambda: finish()[0], record, grid)


def all_reduce(tensor: Tensor, grid: Grid, axis: str, *, label: str = "", owned: bool = False) -> Pending[Tensor]:
    """Sum over all ranks; with `owned`, the caller gives up its tensor and the sum may be written into it."""
    record = _record("all_reduce", [tensor], grid, axis, label)
    if record is None:
        return Pending(lambda: tensor)
    total = tensor if owned and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
    finish = wire.nothing
    if record is not None and not _stays(tensor, grid):
        with Named(record):
            finish = wire.all_reduce([total], _link(record, grid))
    return Pending(lambda: (finish(), total)[1], record, grid)


def all_to_all(
    parts: Tensor, grid: Grid, axis: str, sent: Sequence[int], taken: Sequence[int], *, label: str = ""
) -> Pending[Tensor]:
    """Send `sent[i]` rows of `parts`, one after another, to rank i of the axis; join `taken[i]` rows from each.

    All ranks must call it, also one that neither sends nor takes anything. Rows for this rank itself are copied.
    """
    own, nbytes = grid.coords[axis], parts.element_size() * prod(parts.shape[1:])
    away = sum(sent) - sent[own]
    larger = max(sum(sent), sum(taken)) * nbytes
    record = Collective("all_to_all", axis, larger, grid.size(axis), label, sent=away * nbytes)
    grid.ledger.append(record)
    into = parts.new_empty((sum(taken), *parts.shape[1:]))
    finish = wire.nothing
    if not _stays(parts, grid):
        with Named(record):
            finish = wire.all_to_all(parts.contiguous(), into, sent, taken, _link(record, grid))
    return Pending(lambda: (finish(), into)[1], record, grid)


# --- several tensors in one message


def all_gather_together(
    shards: Sequence[Tensor],
    grid: Grid,
    axis: str,
    *,
    rows: Sequence[int] | None = None,
    into: Sequence[Tensor | None] | None = None,
    label: str = "",
) -> Pending[list[Tensor]]:
    """Join several shards along dim 0 in one message, each into its contiguous buffer of `into` if that is given.

    With `rows`, joined tensor i has `rows[i]` rows and the shards are its chunks, as for `all_gather`.
    """
    ranks = grid.size(axis)
    into = into or [None] * len(shards)
    if ranks == 1:
        wholes = list(map(_landed, shards, into))
        return Pending(lambda: wholes)
    lengths = rows or [ranks * len(shard) for shard in shards]
    shards = [_padded(shard, 0, -(-length // ranks)) for shard, length in zip(shards, lengths, strict=True)]
    record = _record("all_gather", shards, grid, axis, label)
    # a buffer that does not fit is filled by a copy; it may have another dtype, if its weight was converted since
    wholes = [
        buffer
        if buffer is not None and buffer.dtype is shard.dtype and not length % ranks
        else shard.new_empty((ranks * len(shard), *shard.shape[1:]))
        for shard, length, buffer in zip(shards, lengths, into, strict=True)
    ]
    finish = wire.nothing
    if record is not None and not _stays(shards[0], grid):
        parts = [whole.view(ranks, *shard.shape) for whole, shard in zip(wholes, shards, strict=True)]
        with Named(record):
            finish = wire.all_gather(shards, parts, _link(record, grid))

    def join_parts(sent: object = shards) -> list[Tensor]:  # noqa: ARG001  # what is sent must exist until it has arrived
        finish()
        return [
            whole if whole is buffer else _landed(whole[:length] if length % ranks else whole, buffer)
            for whole, length, buffer in zip(wholes, lengths, into, strict=True)
        ]

    return Pending(join_parts, record, grid)


def reduce_scatter_together(
    wholes: Sequence[Tensor], grid: Grid, axis: str, *, label: str = ""
) -> Pending[list[Tensor]]:
    """Sum several tensors over all ranks and keep this rank's chunk of dim 0 of each, in one message.

    Uneven chunks are padded for the message, as for `reduce_scatter`.
    """
    ranks = grid.size(axis)
    if any(whole.shape[0] % ranks for whole in wholes):
        padded = [_padded(whole, 0, -(-whole.shape[0] // ranks) * ranks) for whole in wholes]
        own = [len(chunk(whole.shape[0], ranks, grid.coords[axis])) for whole in wholes]
        pending = reduce_scatter_together(padded, grid, axis, label=label)
        return pending.then(lambda parts: [part[:rows] for part, rows in zip(parts, own, strict=True)])
    record = _record("reduce_scatter", wholes, grid, axis, label)
    if ranks == 1:
        return Pending(lambda: list(wholes))
    parts = [whole.unflatten(0, (ranks, -1)) for whole in wholes]
    if record is None or _stays(wholes[0], grid):
        own_parts = [torch.empty_like(part[0]) for part in parts]
        return Pending(lambda: (wholes, own_parts)[1], record, grid)
    with Named(record):
        finish = wire.reduce_scatter(parts, _link(record, grid))
    return Pending(finish, record, grid)


def all_reduce_together(tensors: Sequence[Tensor], grid: Grid, axis: str, *, label: str = "") -> Pending[None]:
    """Sum several tensors over all ranks, each in place, in one message."""
    record = _record("all_reduce", tensors, grid, axis, label)
    finish = wire.nothing
    if record is not None and not _stays(tensors[0], grid):
        with Named(record):
            finish = wire.all_reduce(tensors, _link(record, grid))
    return Pending(finish, record, grid)


# --- between two ranks along pipe


class Sending:
    """A tensor on its way to another rank. It is kept in memory as long as this object."""

    __slots__ = ("_grid", "_record", "_tensor", "_work")

    def __init__(self, tensor: Tensor, record: Collective | None, work: wire.Work | None, grid: Grid) -> None:
        self._tensor, self._record, self._work, self._grid = tensor, record, work, grid

    def has_left(self) -> bool:
        """Return whether the memory of the tensor may be reused."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        if self._work is not None and self._record is not None:
            on_gpu = self._grid.device.type == "cuda"
            with Named(self._record, "wait "), self._grid.ledger.waiting(self._record, on_gpu=on_gpu):
                self._work.wait()


def send(tensor: Tensor, grid: Grid, lane: str, to: int, *, label: str = "") -> Sending:
    """Send a tensor to the rank at pipe coordinate `to`."""
    tensor = tensor.contiguous()
    record = _record("send", [tensor], grid, PIPE, label, lane, to)
    work = None
    if record is not None and not _stays(tensor, grid):
        grid.ledger.note_launch(record)
        with Named(record):
            work = wire.send(tensor, grid.group(PIPE, lane), to)
    return Sending(tensor, record, work, grid)


def receive(buffer: Tensor, grid: Grid, lane: str, source: int, *, label: str = "") -> Pending[Tensor]:
    """Receive into a contiguous tensor what the rank at pipe coordinate `source` sends, in the order of its sends."""
    record = _record("receive", [buffer], grid, PIPE, label, lane, source)
    finish = wire.nothing
    if record is not None and not _stays(buffer, grid):
        grid.ledger.note_launch(record)
        with Named(record):
            finish = wire.receive(buffer, grid.group(PIPE, lane), source)
    return Pending(lambda: (finish(), buffer)[1], record, grid)


# --- whole tensors, and values outside of a training step


def join(
    part: Tensor,
    layout: Layout,
    shape: Sequence[int],
    grid: Grid,
    *,
    keep: int = 0,
    counted: bool = True,
    label: str = "",
) -> Tensor:
    """Gather a tensor of this shape from its parts, which may be uneven, the innermost cut first.

    The first `keep` cuts stay. With `counted=False`, for comparing and inspecting outside of a training step, the
    ledger does not count it.
    """
    with nullcontext() if counted else grid.ledger.not_counted():
        for cut in range(len(layout.cuts) - 1, keep - 1, -1):
            axis, dim = layout.cuts[cut]
            length = len(layout.outer(cut).box(shape, grid.shape.cuts, grid.coords)[dim])
            part = all_gather(part, grid, axis, dim=dim, length=length, label=label).wait()
    return part


def equal_along(number: int, grid: Grid, axes: Sequence[str]) -> bool:
    """Return whether all ranks along these axes hold the same number; every rank gets the same answer.

    The ledger does not record it, because it is no part of a training step.
    """
    bounds = torch.tensor([[number], [number]], device=grid.device)  # the lowest and the highest so far
    for axis in axes:
        if grid.size(axis) > 1:
            found = bounds.new_empty(grid.size(axis), 2, 1)
            with typed_errors(f"comparing a number over {axis}"):
                wire.all_gather([bounds], [found], wire.Link(grid.group(axis, "reduce")))()
            bounds = torch.stack([found[:, 0].amin(0), found[:, 1].amax(0)])
    return bool(bounds[0] == bounds[1])


def from_first(tensor: Tensor, grid: Grid, along: Sequence[str] | None = None) -> Tensor:
    """Return rank 0's tensor on every rank, or on all ranks along some axes that of the first of them.

    The ledger does not record it, because it is no part of a training step.
    """
    axes = grid.shape.used_axes if along is None else [axis for axis in along if grid.size(axis) > 1]
    if not axes:
        return tensor
    first = all(grid.coords[axis] == 0 for axis in axes)
    mine = tensor.clone() if first else torch.zeros_like(tensor)
    with typed_errors("giving a tensor of rank 0 to all ranks"):
        for axis in axes:
            wire.all_reduce([mine], wire.Link(grid.group(axis, "reduce")))()
    return mine


def from_pipe(tensor: Tensor, grid: Grid, place: int) -> Tensor:
    """Return the tensor of the ranks at pipe coordinate `place` on all ranks along pipe, bit for bit.

    Ranks at other coordinates give a tensor of the same shape and dtype, which is not read. The ledger does not record
    it, because it is no part of a training step.
    """
    if grid.size(PIPE) == 1 or not tensor.numel():
        return tensor
    own = tensor.detach().to(grid.device).clone(memory_format=torch.contiguous_format)
    content = own.view(-1).view(torch.uint8)  # a sum of numbers would turn -0 into 0
    if grid.coords[PIPE] != place:
        content.zero_()
    with typed_errors("giving a tensor to all ranks along pipe"):
        wire.all_reduce([content], wire.Link(grid.group(PIPE, "reduce")))()
    return own


def exchange(tensor: Tensor, grid: Grid, axis: str, place: int) -> Tensor:
    """Swap a tensor with the rank at `place` of the axis, to time a link.

    All ranks of the axis must have communicated before: the first collective makes the communicator.
    """
    with typed_errors(f"exchanging a message over {axis}"):
        return wire.exchange(tensor, grid.group(axis), place)


# --- records and shapes


def _record(
    op: Op, tensors: Sequence[Tensor], grid: Grid, axis: str, label: str, lane: str = "", peer: int = -1
) -> Collective | None:
    """Write the launch into the ledger and return its record, or None if there is nothing to send."""
    ranks = grid.size(axis)
    nbytes = sum([tensor.nbytes for tensor in tensors])
    if ranks == 1 or nbytes == 0:
        return None
    # a gather's larger buffer is its output
    record = Collective(op, axis, nbytes * ranks if op == "all_gather" else nbytes, ranks, label, lane, peer)
    grid.ledger.append(record)
    return record


def _stays(tensor: Tensor, grid: Grid) -> bool:
    """Return whether collectives are recorded without sending anything: in a dry run, and on a muted grid."""
    return tensor.is_meta or grid.muted


def _link(record: Collective, grid: Grid) -> wire.Link:
    """Return the link of a collective: gathers and reductions have a communicator each along `Shape.two_lanes`."""
    lane = "gather" if record.op == "all_gather" else "reduce"
    return wire.Link(grid.group(record.axis, lane), grid.ledger.begin_flight(record), next(grid.tags[record.axis]))


def _landed(found: Tensor, buffer: Tensor | None) -> Tensor:
    """Return what was found, in its buffer if it has one."""
    return found if buffer is None else buffer.copy_(found)


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Return the tensor with zeros at the end of `dim`, up to this length."""
    missing = length - tensor.shape[dim]
    return functional.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor

"""The only file that issues collectives.

A layer says what it wants, comm says how. Every launch appends a `Collective` to the grid's ledger and
returns a `Pending`, which is read through `wait()` alone. Axes of size 1 and empty buffers vanish here and
nowhere else: callers launch whatever the sizes are. On meta tensors the launch is recorded and the result
has its shape, so that any model can be run dry.

A `Pending` holds on to what its collective reads until it is waited for.

Invariant: the order of summation depends on shapes and ranks only, so equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Thread
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from fourfold.grid import Grid
from fourfold.job import typed_errors
from fourfold.layout import Layout, chunk
from fourfold.ledger import Collective, Op, span

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A collective in flight. `wait()` gives its result and may be called again."""

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
                with named(self._record, "wait "), self._grid.ledger.waiting(self._record, on_gpu=on_gpu):
                    self._result = self._finish()
            self._finish = None  # lets go of the buffers that only the flight needed
        return self._result  # type: ignore[return-value]

    def then(self, step: Callable[[T], U]) -> Pending[U]:
        """The same with a local step after it."""
        return Pending(lambda: step(self.wait()))


@contextmanager
def named(record: Collective, doing: str = "") -> Iterator[None]:
    """Name the collective in profiles and in the error that the backend raises inside."""
    with typed_errors(str(record)), span(f"{doing}{record}"):
        yield


# torch 2.13 renamed the two; torch 2.11 has only the old names, which 2.13 warns about.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ONE_ROUND_NBYTES = 64 << 10
"""On the CPU a collective whose messages to all ranks stay below this takes one round instead of a ring."""


@contextmanager
def muted(grid: Grid) -> Iterator[None]:
    """Inside, collectives are recorded and nothing travels: results have their shapes and hold anything.

    For measuring what computation costs alone.
    """
    before, grid.muted = grid.muted, True
    try:
        yield
    finally:
        grid.muted = before


@dataclass(frozen=True, slots=True)
class Link:
    """Where a collective travels: the communicator, and whom to tell of its arrival."""

    group: dist.ProcessGroup
    arrived: Callable[[], None] | None = None
    tag: int = 0
    """Tells the messages of several rings on one communicator apart."""

    @classmethod
    def of(cls, record: Collective, grid: Grid) -> Link:
        """Gathers and reductions have a communicator each along the axes of `Shape.two_lanes`."""
        lane = "gather" if record.op == "all_gather" else "reduce"
        return cls(grid.group(record.axis, lane), grid.ledger.begin_flight(record), next(grid.tags[record.axis]))

    def watch(self, work: dist.Work | None) -> dist.Work | None:
        if self.arrived is not None and work is not None:
            arrived = self.arrived
            work.get_future().add_done_callback(lambda _: arrived())
        return work


def all_gather(
    shard: Tensor, grid: Grid, axis: str, *, dim: int = 0, length: int | None = None, label: str = ""
) -> Pending[Tensor]:
    """Join the shards of all ranks along `dim`.

    With `length` the whole has so many entries in `dim` and the shards are its chunks, of which the last ones may be
    short or empty: they are padded for the message, and the padding is dropped again.
    """
    if length is not None:
        shard = _padded(shard, dim, -(-length // grid.size(axis)))
        joined = all_gather(shard, grid, axis, dim=dim, label=label)
        return joined.then(lambda whole: whole if whole.shape[dim] == length else whole.narrow(dim, 0, length))
    ranks, record = _open("all_gather", shard, grid, axis, label)
    if ranks == 1:
        return Pending(lambda: shard)
    joined = shard.new_empty((ranks, *shard.shape))
    if record is None or _stays(shard, grid):
        return Pending(lambda: _join(joined, dim), record, grid)
    with named(record):
        finish = _launch_all_gather(joined, shard, Link.of(record, grid))
    return Pending(lambda: _join(finish(), dim), record, grid)


def reduce_scatter(whole: Tensor, grid: Grid, axis: str, *, dim: int = 0, label: str = "") -> Pending[Tensor]:
    """Sum over all ranks and keep this rank's chunk of `dim`, as torch.chunk cuts it.

    Where the ranks do not divide the length of `dim`, zeros are added for the message and dropped again.
    """
    length, ranks = whole.shape[dim], grid.size(axis)
    if length % ranks:
        padded = _padded(whole, dim, -(-length // ranks) * ranks)
        own = len(chunk(length, ranks, grid.coords[axis]))
        return reduce_scatter(padded, grid, axis, dim=dim, label=label).then(lambda part: part.narrow(dim, 0, own))
    ranks, record = _open("reduce_scatter", whole, grid, axis, label, counts_whole=True)
    if ranks == 1:
        return Pending(lambda: whole)
    parts = _cut(whole, ranks, dim)
    if record is None or _stays(whole, grid):
        mine = torch.empty_like(parts[0])
        return Pending(lambda: (parts, mine)[1], record, grid)
    with named(record):
        return Pending(_launch_reduce_scatter(parts, Link.of(record, grid)), record, grid)


def all_reduce(tensor: Tensor, grid: Grid, axis: str, *, label: str = "", owned: bool = False) -> Pending[Tensor]:
    """Sum over all ranks. With `owned` the caller gives the buffer away and the sum lands in it."""
    _, record = _open("all_reduce", tensor, grid, axis, label, counts_whole=True)
    if record is None:
        return Pending(lambda: tensor)
    total = tensor if owned and tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
    if _stays(tensor, grid):
        return Pending(lambda: total, record, grid)
    with named(record):
        return Pending(_launch_all_reduce(total, Link.of(record, grid)), record, grid)


def all_gather_together(
    shards: Sequence[Tensor],
    grid: Grid,
    axis: str,
    *,
    rows: Sequence[int] | None = None,
    into: Sequence[Tensor] | None = None,
    label: str = "",
) -> Pending[list[Tensor]]:
    """Join several shards along dim 0 in one message, each into its own contiguous buffer where given.

    With `rows` the wholes have so many rows each and the shards are their chunks, as for `all_gather`.
    """
    if rows is not None and any(count % grid.size(axis) for count in rows):
        return _all_gather_uneven(shards, grid, axis, rows, into, label)
    ranks, record = _open_together("all_gather", shards, grid, axis, label)
    if ranks == 1:
        wholes = list(shards) if into is None else [b.copy_(s) for s, b in zip(shards, into, strict=True)]
        return Pending(lambda: wholes)
    if into is None:
        wholes = [shard.new_empty((ranks * shard.shape[0], *shard.shape[1:])) for shard in shards]
    else:
        wholes = list(into)
    # no record: shards without an element, where an axis has more ranks than the dim that it cuts has entries
    if record is None or _stays(shards[0], grid):
        return Pending(lambda: (shards, wholes)[1], record, grid)
    link = Link.of(record, grid)
    with named(record):
        if shards[0].is_cuda:
            with dist._coalescing_manager(link.group, async_ops=True) as together:
                for shard, whole in zip(shards, wholes, strict=True):
                    _all_gather_single(whole.view(-1), shard.reshape(-1), group=link.group, async_op=True)
            return Pending(lambda: (together.wait(), shards, wholes)[2], record, grid)
        if len(shards) == 1:
            finish = _launch_all_gather(wholes[0].view(ranks, *shards[0].shape), shards[0], link)
            return Pending(lambda: (finish(), wholes)[1], record, grid)
        packed = torch.cat([shard.reshape(-1) for shard in shards])
        finish = _launch_all_gather(packed.new_empty(ranks, packed.numel()), packed, link)

    def unpack() -> list[Tensor]:
        columns = finish().split([shard.numel() for shard in shards], dim=1)
        for column, whole in zip(columns, wholes, strict=True):
            whole.view(ranks, -1).copy_(column)
        return wholes

    return Pending(unpack, record, grid)


def _all_gather_uneven(
    shards: Sequence[Tensor], grid: Grid, axis: str, rows: Sequence[int], into: Sequence[Tensor] | None, label: str
) -> Pending[list[Tensor]]:
    padded = [_padded(shard, 0, -(-count // grid.size(axis))) for shard, count in zip(shards, rows, strict=True)]

    def crop(found: list[Tensor]) -> list[Tensor]:
        wholes = [whole[:count] for whole, count in zip(found, rows, strict=True)]
        return wholes if into is None else [b.copy_(whole) for b, whole in zip(into, wholes, strict=True)]

    return all_gather_together(padded, grid, axis, label=label).then(crop)


def reduce_scatter_together(
    wholes: Sequence[Tensor], grid: Grid, axis: str, *, label: str = ""
) -> Pending[list[Tensor]]:
    """Sum several tensors over all ranks and keep this rank's chunk of dim 0 of each, in one message.

    Uneven chunks are padded for the message, as for `reduce_scatter`.
    """
    if any(whole.shape[0] % grid.size(axis) for whole in wholes):
        size, place = grid.size(axis), grid.coords[axis]
        padded = [_padded(whole, 0, -(-whole.shape[0] // size) * size) for whole in wholes]
        own = [len(chunk(whole.shape[0], size, place)) for whole in wholes]
        pending = reduce_scatter_together(padded, grid, axis, label=label)
        return pending.then(lambda parts: [part[:rows] for part, rows in zip(parts, own, strict=True)])
    ranks, record = _open_together("reduce_scatter", wholes, grid, axis, label, counts_whole=True)
    if record is None:
        return Pending(lambda: list(wholes))
    shapes = [(whole.shape[0] // ranks, *whole.shape[1:]) for whole in wholes]
    if _stays(wholes[0], grid):
        parts = [whole.new_empty(shape) for whole, shape in zip(wholes, shapes, strict=True)]
        return Pending(lambda: (wholes, parts)[1], record, grid)
    link = Link.of(record, grid)
    with named(record):
        if wholes[0].is_cuda:
            parts = [whole.new_empty(shape) for whole, shape in zip(wholes, shapes, strict=True)]
            with dist._coalescing_manager(link.group, async_ops=True) as together:
                for whole, part in zip(wholes, parts, strict=True):
                    _reduce_scatter_single(part.view(-1), whole.reshape(-1), group=link.group, async_op=True)
            return Pending(lambda: (together.wait(), wholes, parts)[2], record, grid)
        rows = [whole.reshape(ranks, -1) for whole in wholes]
        finish = _launch_reduce_scatter(rows[0] if len(rows) == 1 else torch.cat(rows, dim=1), link)

    def unpack() -> list[Tensor]:
        columns = finish().split([row.shape[1] for row in rows])
        return [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]

    return Pending(unpack, record, grid)


def all_reduce_together(tensors: Sequence[Tensor], grid: Grid, axis: str, *, label: str = "") -> Pending[None]:
    """Sum several tensors over all ranks, each in place, in one message."""
    _, record = _open_together("all_reduce", tensors, grid, axis, label, counts_whole=True)
    if record is None or _stays(tensors[0], grid):
        return Pending(lambda: None, record, grid)
    link = Link.of(record, grid)
    with named(record):
        if tensors[0].is_cuda:
            with dist._coalescing_manager(link.group, async_ops=True) as together:
                for tensor in tensors:
                    dist.all_reduce(tensor, group=link.group, async_op=True)
            return Pending(lambda: (together.wait(), tensors)[0], record, grid)
        finish = _launch_all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]), link)

    def unpack() -> None:
        for tensor, total in zip(tensors, finish().split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    return Pending(unpack, record, grid)


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
            length = len(layout.outer(cut).box(shape, grid.shape.sizes, grid.coords)[dim])
            part = all_gather(part, grid, axis, dim=dim, length=length, label=label).wait()
    return part


def equal_along(number: int, grid: Grid, axes: Sequence[str]) -> bool:
    """Whether all ranks that differ in these axes alone hold the same number; they all get the same answer.

    Not part of a training step; leaves no record.
    """
    lowest = highest = torch.tensor([number], device=grid.device)
    for axis in axes:
        if grid.size(axis) > 1:
            mine = torch.cat([lowest, highest])
            with typed_errors(f"comparing a number over {axis}"):
                bounds = _launch_all_gather(mine.new_empty(grid.size(axis), 2), mine, Link(grid.group(axis)))()
            lowest, highest = bounds[:, :1].amin(0), bounds[:, 1:].amax(0)
    return bool(lowest == highest)


def from_first(tensor: Tensor, grid: Grid) -> Tensor:
    """The tensor of rank 0, on every rank. Not part of a training step; leaves no record."""
    if grid.shape.world == 1:
        return tensor
    mine = tensor.clone() if grid.rank == 0 else torch.zeros_like(tensor)
    with typed_errors("giving a tensor of rank 0 to all ranks"):
        for axis in grid.shape.used_axes:
            _launch_all_reduce(mine, Link(grid.group(axis)))()
    return mine


def exchange(tensor: Tensor, grid: Grid, axis: str, place: int) -> Tensor:
    """What the rank at `place` of the axis gives for this, to time a link; all of the axis have communicated before."""
    arriving, group = torch.empty_like(tensor), grid.group(axis)
    ways = ((dist.isend, tensor), (dist.irecv, arriving))
    with typed_errors(f"exchanging a message over {axis}"):
        for work in dist.batch_isend_irecv([dist.P2POp(act, one, group=group, group_peer=place) for act, one in ways]):
            work.wait()
    return arriving


# How, by backend. NCCL chooses its algorithms itself. gloo always takes a ring or a halving tree, many hops
# one after another, and its reduce-scatter moves twice the minimum. A small message wants a single round
# instead: everyone sends to everyone, and sums are local. A large reduce-scatter goes around a ring of our
# own, which moves the minimum and crosses between nodes no more often than it must.


def _stays(tensor: Tensor, grid: Grid) -> bool:
    """Whether the launch is recorded and nothing travels."""
    return tensor.is_meta or grid.muted


def _one_round(nbytes: int, tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and nbytes < ONE_ROUND_NBYTES


def _launch_all_gather(joined: Tensor, shard: Tensor, link: Link) -> Callable[[], Tensor]:
    """Start `joined[rank] = shard` for the shards of all ranks; the result finishes it."""
    if _one_round(joined.nbytes, joined):
        work = dist.all_to_all_single(joined, shard.expand_as(joined).contiguous(), group=link.group, async_op=True)
    else:
        work = _all_gather_single(joined.view(-1), shard.reshape(-1), group=link.group, async_op=True)
    link.watch(work)
    return lambda: (_wait(work), shard, joined)[2]


def _launch_all_reduce(total: Tensor, link: Link) -> Callable[[], Tensor]:
    """Start summing `total` over all ranks, in place; the result finishes it."""
    ranks = link.group.size()
    if _one_round(total.nbytes * ranks, total):
        finish = _launch_all_gather(total.new_empty((ranks, *total.shape)), total, link)
        return lambda: total.copy_(_add_up(finish()))
    work = link.watch(dist.all_reduce(total, group=link.group, async_op=True))
    return lambda: (_wait(work), total)[1]


def _launch_reduce_scatter(parts: Tensor, link: Link) -> Callable[[], Tensor]:
    """Start summing `parts[rank]` over all ranks; the result finishes it."""
    parts = parts.contiguous()
    if parts.is_cuda:
        mine = torch.empty_like(parts[0])
        work = _reduce_scatter_single(mine.view(-1), parts.view(-1), group=link.group, async_op=True)
        return lambda: (_wait(work), parts, mine)[2]
    if _one_round(parts.nbytes, parts):
        arrived = torch.empty_like(parts)
        work = link.watch(dist.all_to_all_single(arrived, parts, group=link.group, async_op=True))
        return lambda: (_wait(work), _add_up(arrived))[1]
    return _Ring(parts, link).finish


def _add_up(parts: Tensor) -> Tensor:
    """Sum over dim 0, in order. -0.0 everywhere stays -0.0, as in every other reduction; `torch.sum` begins at 0.0."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Ring:
    """A reduce-scatter around a ring: each hop passes a partial sum on to the right, where it grows by one.

    The first hop is in flight from the start. Where there are more a thread passes them on, so that the ring turns
    while this rank computes.
    """

    def __init__(self, parts: Tensor, link: Link) -> None:
        self.parts, self.link = parts, link
        self.ranks, self.me = link.group.size(), link.group.rank()
        self.hop = self._pass_on(parts[self.me - 1])
        self.result: Tensor | Exception | None = None
        self.thread = None
        if self.ranks > 2 or link.arrived is not None:
            self.thread = Thread(target=self._turn, daemon=True)
            self.thread.start()

    def _pass_on(self, partial: Tensor) -> _Hop:
        arriving = torch.empty_like(partial)
        group, tag = self.link.group, self.link.tag
        sent = dist.isend(partial, group=group, group_dst=(self.me + 1) % self.ranks, tag=tag)
        received = dist.irecv(arriving, group=group, group_src=(self.me - 1) % self.ranks, tag=tag)
        return _Hop(partial, arriving, sent, received)

    def _turn(self) -> None:
        try:
            for step in range(2, self.ranks):
                self.hop = self._pass_on(self._grow(step))
            self.result = self._grow(self.ranks)
            if self.link.arrived is not None:
                self.link.arrived()
        except Exception as error:  # raised again where the result is waited for
            self.result = error

    def _grow(self, step: int) -> Tensor:
        return self.hop.wait().add_(self.parts[(self.me - step) % self.ranks])

    def finish(self) -> Tensor:
        if self.thread is None:
            self._turn()
        else:
            self.thread.join()
        if not isinstance(self.result, Tensor):
            raise self.result or RuntimeError("a ring needs at least two ranks")
        return self.result


@dataclass(frozen=True, slots=True)
class _Hop:
    """One message to the right and one from the left. What is sent must live until it has left."""

    leaving: Tensor
    arriving: Tensor
    sent: dist.Work | None
    received: dist.Work | None

    def wait(self) -> Tensor:
        _wait(self.received)
        _wait(self.sent)
        return self.arriving


def _wait(work: dist.Work | None) -> None:
    """torch types its functions as if they gave no work to a rank outside of the group."""
    if work is not None:
        work.wait()


def _open(
    op: Op, tensor: Tensor, grid: Grid, axis: str, label: str, *, counts_whole: bool = False
) -> tuple[int, Collective | None]:
    return _open_together(op, [tensor], grid, axis, label, counts_whole=counts_whole)


def _open_together(
    op: Op, tensors: Sequence[Tensor], grid: Grid, axis: str, label: str, *, counts_whole: bool = False
) -> tuple[int, Collective | None]:
    """Write the launch into the ledger, or say that there is nothing to launch."""
    ranks = grid.size(axis)
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors) * (1 if counts_whole else ranks)
    if ranks == 1 or nbytes == 0:
        return ranks, None
    record = Collective(op, axis, nbytes, ranks, label)
    grid.ledger.append(record)
    return ranks, record


def _padded(tensor: Tensor, dim: int, length: int) -> Tensor:
    """Return the tensor with zeros at the end of `dim`, up to this length."""
    missing = length - tensor.shape[dim]
    return functional.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing]) if missing else tensor


def _join(parts: Tensor, dim: int) -> Tensor:
    """[ranks, ...] -> the parts side by side along `dim`."""
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(0), dim)


def _cut(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """The parts along `dim` -> [ranks, ...]; the inverse of `_join`."""
    return whole.unflatten(0, (ranks, -1)) if dim == 0 else torch.stack(whole.chunk(ranks, dim))

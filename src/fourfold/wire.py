"""How a collective travels: the one file that calls torch.distributed's collectives.

`comm` says what is sent and records it; this file says how. NCCL chooses its algorithms itself. gloo always takes a
ring or a halving tree, many hops one after another, and its reduce-scatter moves twice the minimum. So on the CPU a
small message takes a single round, in which every rank sends to every other and sums are local, and a large
reduce-scatter goes around a ring of our own, which moves the minimum and crosses between nodes no more often than it
must.

Every function starts a collective and returns a function that waits for it. That function also holds the tensors that
the collective reads, because the backend does not.

Invariant: the order of summation depends on shapes and ranks alone, so equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the two; torch 2.11 has only the old names, which 2.13 warns about.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

ONE_ROUND_NBYTES = 64 << 10
"""On the CPU a collective takes one round instead of a ring while the messages to all ranks are smaller than this:
below it, latency takes more time than the additional bytes."""


@dataclass(frozen=True, slots=True)
class Link:
    """The communicator on which a collective travels, and the function to call when it has arrived."""

    group: dist.ProcessGroup
    arrived: Callable[[], None] | None = None
    tag: int = 0
    """Distinguishes the messages of several rings that are in flight on one communicator."""

    def watch(self, work: dist.Work | None) -> Callable[[], None]:
        """Return the function that waits for a collective, and report its arrival if somebody asked for that."""
        if work is None:  # torch's types allow it, for a rank outside of the group
            return lambda: None
        if self.arrived is not None:
            arrived = self.arrived
            work.get_future().add_done_callback(lambda _: arrived())
        return lambda: (work.wait(), None)[1]


def all_gather(shards: Sequence[Tensor], wholes: Sequence[Tensor], link: Link) -> Callable[[], None]:
    """Start writing every rank's shards into wholes of shape [ranks, *shard.shape]."""
    if shards[0].is_cuda and len(shards) > 1:
        with dist._coalescing_manager(link.group, async_ops=True) as together:
            for shard, whole in zip(shards, wholes, strict=True):
                _all_gather_single(whole.view(-1), shard.reshape(-1), group=link.group, async_op=True)
        return lambda: (together.wait(), shards, None)[2]
    sent, joined = shards[0].reshape(-1), wholes[0]
    if len(shards) > 1:
        if len({shard.dtype for shard in shards}) > 1:
            shards, wholes = _as_bytes(shards), _as_bytes(wholes)
        sent = torch.cat([shard.reshape(-1) for shard in shards])
        joined = sent.new_empty(len(wholes[0]), sent.numel())
    if _takes_one_round(joined.nbytes, joined):
        sent = sent.repeat(len(joined))
        finish = link.watch(dist.all_to_all_single(joined.view(-1), sent, group=link.group, async_op=True))
    else:
        finish = link.watch(_all_gather_single(joined.view(-1), sent, group=link.group, async_op=True))

    def unpack() -> None:
        finish()
        if len(shards) > 1:
            columns = joined.split([shard.numel() for shard in shards], dim=1)
            for column, whole in zip(columns, wholes, strict=True):
                whole.view(len(joined), -1).copy_(column)

    return lambda: (unpack(), sent, None)[2]


def all_reduce(tensors: Sequence[Tensor], link: Link) -> Callable[[], None]:
    """Start summing tensors over all ranks, each in place."""
    if len(tensors) == 1:
        return _all_reduce(tensors[0], link)
    if tensors[0].is_cuda:
        with dist._coalescing_manager(link.group, async_ops=True) as together:
            for tensor in tensors:
                dist.all_reduce(tensor, group=link.group, async_op=True)
        return lambda: (together.wait(), tensors, None)[2]
    packed = torch.cat([tensor.reshape(-1) for tensor in tensors])
    finish = _all_reduce(packed, link)

    def unpack() -> None:
        finish()
        for tensor, total in zip(tensors, packed.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(total.view_as(tensor))

    return unpack


def _all_reduce(total: Tensor, link: Link) -> Callable[[], None]:
    ranks = link.group.size()
    if not _takes_one_round(total.nbytes * ranks, total):
        finish = link.watch(dist.all_reduce(total, group=link.group, async_op=True))
        return lambda: (finish(), total, None)[2]
    parts = total.new_empty((ranks, *total.shape))
    gathered = all_gather([total], [parts], link)
    return lambda: (gathered(), total.copy_(_sum_in_order(parts)), None)[2]


def reduce_scatter(wholes: Sequence[Tensor], link: Link) -> Callable[[], list[Tensor]]:
    """Start summing `whole[rank]` over all ranks for each whole of shape [ranks, ...]; waiting returns the sums."""
    shapes = [whole.shape[1:] for whole in wholes]
    if wholes[0].is_cuda and len(wholes) > 1:
        sums = [whole.new_empty(shape) for whole, shape in zip(wholes, shapes, strict=True)]
        with dist._coalescing_manager(link.group, async_ops=True) as together:
            for whole, total in zip(wholes, sums, strict=True):
                _reduce_scatter_single(total.view(-1), whole.reshape(-1), group=link.group, async_op=True)
        return lambda: (together.wait(), wholes, sums)[2]
    # How a tensor is summed depends on its own size, not on what travels with it.
    small = [_takes_one_round(whole.nbytes, whole) for whole in wholes]
    if True in small and False in small:
        kinds = [[whole for whole, kind in zip(wholes, small, strict=True) if kind is each] for each in (True, False)]
        quick, slow = reduce_scatter(kinds[0], replace(link, arrived=None)), reduce_scatter(kinds[1], link)

        def in_order() -> list[Tensor]:
            sums = {True: iter(quick()), False: iter(slow())}
            return [next(sums[kind]) for kind in small]

        return in_order
    rows = [whole.reshape(len(whole), -1) for whole in wholes]
    sent = rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, dim=1)
    if sent.is_cuda:
        total = torch.empty_like(sent[0])
        arrive = link.watch(_reduce_scatter_single(total, sent.view(-1), group=link.group, async_op=True))
        finish = lambda: (arrive(), sent, total)[2]  # noqa: E731
    elif small[0]:
        parts = torch.empty_like(sent)
        arrive = link.watch(dist.all_to_all_single(parts, sent, group=link.group, async_op=True))
        finish = lambda: (arrive(), sent, _sum_in_order(parts))[2]  # noqa: E731
    else:
        finish = _Ring(sent, link).finish

    def unpack() -> list[Tensor]:
        columns = finish().split([row.shape[1] for row in rows])
        return [column.view(shape) for column, shape in zip(columns, shapes, strict=True)]

    return unpack


def _as_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of contiguous tensors as bytes, which can be sent in one buffer whatever their dtypes are."""
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors]


def exchange(tensor: Tensor, group: dist.ProcessGroup, peer: int) -> Tensor:
    """Send a tensor to a peer of the group and return the one that the peer sends, for timing a link."""
    arriving = torch.empty_like(tensor)
    ways = ((dist.isend, tensor), (dist.irecv, arriving))
    for work in dist.batch_isend_irecv([dist.P2POp(act, one, group=group, group_peer=peer) for act, one in ways]):
        work.wait()
    return arriving


def _takes_one_round(nbytes: int, tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and nbytes < ONE_ROUND_NBYTES


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum over dim 0. All -0.0 stays -0.0, as in every other reduction; `torch.sum` begins at 0.0."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class _Ring:
    """A reduce-scatter around a ring: each hop sends a partial sum to the next rank, which adds its own part.

    The first hop is in flight from the start. With more than two ranks a thread makes the following hops, so that the
    ring turns while this rank computes.
    """

    def __init__(self, parts: Tensor, link: Link) -> None:
        self.parts, self.link = parts, link
        self.ranks, self.me = link.group.size(), link.group.rank()
        self.hop = self._send(parts[self.me - 1])
        self.result: Tensor | Exception | None = None
        self.inference = torch.is_inference_mode_enabled()  # in this thread; another one begins without it
        self.thread = None
        if self.ranks > 2 or link.arrived is not None:
            self.thread = Thread(target=self._turn, daemon=True)
            self.thread.start()

    def _send(self, partial: Tensor) -> _Hop:
        arriving = torch.empty_like(partial)
        group, tag = self.link.group, self.link.tag
        sent = dist.isend(partial, group=group, group_dst=(self.me + 1) % self.ranks, tag=tag)
        received = dist.irecv(arriving, group=group, group_src=(self.me - 1) % self.ranks, tag=tag)
        return _Hop(partial, arriving, sent, received)

    def _turn(self) -> None:
        try:
            with torch.inference_mode(self.inference), torch.no_grad():
                for step in range(2, self.ranks):
                    self.hop = self._send(self._add_own(step))
                self.result = self._add_own(self.ranks)
            if self.link.arrived is not None:
                self.link.arrived()
        except Exception as error:  # an exception ends a thread in silence, so `finish` raises it
            self.result = error

    def _add_own(self, step: int) -> Tensor:
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
    """A message to the next rank and one from the rank before; `leaving` must stay in memory until it is sent."""

    leaving: Tensor
    arriving: Tensor
    sent: dist.Work | None
    received: dist.Work | None

    def wait(self) -> Tensor:
        for work in (self.received, self.sent):
            if work is not None:
                work.wait()
        return self.arriving

"""How a collective travels: the one file that calls torch.distributed's collectives.

`comm` says what is sent and records it; this file says how. NCCL chooses its algorithms itself. gloo always takes a
ring or a halving tree, many hops one after another, and its reduce-scatter moves twice the minimum. So on the CPU a
small message takes a single round, in which every rank sends to every other and sums are local, and a large
reduce-scatter goes around a ring of our own, which moves the minimum and crosses between nodes no more often than it
must. The tensors of a message travel in one buffer, except for large ones on a GPU, which NCCL sends from where they
are.

Every function starts a collective and returns a function that waits for it. That function also holds the tensors that
the collective reads, because the backend does not.

Invariant: the order of summation depends on shapes and ranks alone, so equal calls give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from threading import Thread

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed the two; torch 2.11 has only the old names, which 2.13 warns about.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Work = dist.Work
"""A message that torch has begun to send."""
ONE_ROUND_NBYTES = 64 << 10
"""On the CPU a collective takes one round instead of a ring while the messages to all ranks are smaller than this:
below it, latency takes more time than the additional bytes."""
PACKED_NBYTES = 4 << 20
"""On a GPU a tensor shares the buffer of its message if this rank's part is smaller than this. NCCL takes 30 to 60 us
for each tensor, and copying one of this size takes less; the buffer of larger ones would need too much memory."""


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
    packed = _share_buffer(shards)
    messages = [pair for pair, shares in zip(zip(shards, wholes, strict=True), packed, strict=True) if not shares]
    unpack = nothing
    if True in packed:
        parts, targets = list(compress(shards, packed)), list(compress(wholes, packed))
        if len({part.dtype for part in parts}) > 1:
            parts, targets = _as_bytes(parts), _as_bytes(targets)
        sent = torch.cat([part.reshape(-1) for part in parts])
        joined = sent.new_empty(len(targets[0]), sent.numel())
        messages.append((sent, joined))

        def unpack() -> None:
            columns = [target.view(len(joined), -1) for target in targets]
            torch.split_with_sizes_copy(joined, [part.numel() for part in parts], dim=1, out=columns)

    if len(messages) > 1:
        with dist._coalescing_manager(link.group, async_ops=True) as together:
            for shard, whole in messages:
                _all_gather_single(whole.view(-1), shard.reshape(-1), group=link.group, async_op=True)
        return lambda: (together.wait(), unpack(), messages, None)[3]
    ((shard, whole),) = messages
    sent = shard.reshape(-1)
    if _takes_one_round(whole.nbytes, whole):
        sent = sent.repeat(len(whole))
        finish = link.watch(dist.all_to_all_single(whole.view(-1), sent, group=link.group, async_op=True))
    else:
        finish = link.watch(_all_gather_single(whole.view(-1), sent, group=link.group, async_op=True))
    return lambda: (finish(), unpack(), sent, None)[3]


def all_reduce(tensors: Sequence[Tensor], link: Link) -> Callable[[], None]:
    """Start summing tensors over all ranks, each in place."""
    packed = _share_buffer(tensors)
    totals = [tensor for tensor, shares in zip(tensors, packed, strict=True) if not shares]
    unpack = nothing
    if True in packed:
        parts = list(compress(tensors, packed))
        buffer = torch.cat([part.reshape(-1) for part in parts])
        totals.append(buffer)

        def unpack() -> None:
            sums = buffer.split([part.numel() for part in parts])
            torch._foreach_copy_(parts, [total.view_as(part) for part, total in zip(parts, sums, strict=True)])

    if len(totals) == 1:
        finish = _all_reduce(totals[0], link)
    else:
        with dist._coalescing_manager(link.group, async_ops=True) as together:
            for total in totals:
                dist.all_reduce(total, group=link.group, async_op=True)
        finish = together.wait
    return lambda: (finish(), unpack(), totals, None)[3]


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
    if wholes[0].is_cuda:
        return _reduce_scatter_on_gpu(wholes, link)
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
    if small[0]:
        parts = torch.empty_like(sent)
        arrive = link.watch(dist.all_to_all_single(parts, sent, group=link.group, async_op=True))
        finish = lambda: (arrive(), sent, _sum_in_order(parts))[2]  # noqa: E731
    else:
        finish = _Ring(sent, link).finish

    def unpack() -> list[Tensor]:
        columns = finish().split([row.shape[1] for row in rows])
        return [column.view(whole.shape[1:]) for column, whole in zip(columns, wholes, strict=True)]

    return unpack


def _reduce_scatter_on_gpu(wholes: Sequence[Tensor], link: Link) -> Callable[[], list[Tensor]]:
    packed = _share_buffer([whole[0] for whole in wholes])
    rows = [whole.reshape(len(whole), -1) for whole in wholes]
    sent = [row.contiguous() for row, shares in zip(rows, packed, strict=True) if not shares]
    sizes = [row.shape[1] for row in compress(rows, packed)]
    if sizes:
        sent.append(torch.cat(list(compress(rows, packed)), dim=1))
    sums = [torch.empty_like(each[0]) for each in sent]
    if len(sent) == 1:
        finish = link.watch(_reduce_scatter_single(sums[0], sent[0].view(-1), group=link.group, async_op=True))
    else:
        with dist._coalescing_manager(link.group, async_ops=True) as together:
            for total, each in zip(sums, sent, strict=True):
                _reduce_scatter_single(total, each.view(-1), group=link.group, async_op=True)
        finish = together.wait

    def unpack() -> list[Tensor]:
        finish()
        alone, columns = iter(sums), iter(sums[-1].split(sizes) if sizes else ())
        found = [next(columns if shares else alone) for shares in packed]
        return [total.view(whole.shape[1:]) for total, whole in zip(found, wholes, strict=True)]

    return lambda: (unpack(), sent)[0]


def all_to_all(
    parts: Tensor, into: Tensor, sent: Sequence[int], taken: Sequence[int], link: Link
) -> Callable[[], None]:
    """Start sending so many rows of `parts` to each rank, and receiving so many rows from each rank into `into`."""
    splits = dict(input_split_sizes=list(sent), output_split_sizes=list(taken))
    finish = link.watch(dist.all_to_all_single(into, parts, **splits, group=link.group, async_op=True))
    return lambda: (finish(), parts, None)[2]


def _share_buffer(parts: Sequence[Tensor]) -> list[bool]:
    """Return which tensors of a message, given by this rank's part of each, travel in one buffer."""
    small = [not part.is_cuda or part.nbytes < PACKED_NBYTES for part in parts]
    return small if sum(small) > 1 else [False] * len(small)


def nothing() -> None:
    """Do nothing."""


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


def send(tensor: Tensor, group: dist.ProcessGroup, to: int) -> Work | None:
    """Start sending a contiguous tensor to a rank of the group."""
    return dist.isend(tensor, group=group, group_dst=to)


def receive(into: Tensor, group: dist.ProcessGroup, source: int) -> Callable[[], None]:
    """Start receiving a tensor from a rank of the group, in the order in which that rank sends."""
    work = dist.irecv(into, group=group, group_src=source)
    return lambda: (work and work.wait(), None)[1]


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

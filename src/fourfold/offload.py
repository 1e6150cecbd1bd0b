"""Activations that wait for backward in host memory: the inputs of blocks that run again there.

A block that runs again keeps its input alone, the residual stream. With `Policy.offload` that waits on the host:

    forward    When block i has been issued, its input is copied to pinned memory, on a stream of its own and behind the
               computation of block i + 1. When block i + 1 has been issued, the device waits for the copy, and the
               input's device memory is freed.
    backward   When block i runs again, the input of block i - 1 is copied back, behind the computation of block i.

The input that was sent last stays on the device until another one is sent: a backward pass that follows at once finds
it there. So in forward two inputs are on the device, in backward two as well: the one that is used and the next.

This is not done with torch's hooks for saved tensors: what a block keeps is an argument of the function that runs
again, which autograd has not saved. On the CPU the same calls copy from buffer to buffer, without streams. On the meta
device nothing is copied, and host memory has no tensors, so that a dry run counts the device's memory alone.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


@dataclass(slots=True)
class OffloadCounts:
    """How many activations went to the host and came back."""

    sent: int = 0
    sent_nbytes: int = 0
    fetched: int = 0
    """Copies back to the device."""
    fetched_nbytes: int = 0
    prefetched: int = 0
    """Copies back that began before a block needed them."""
    found: int = 0
    """Activations that were still on the device when a block needed them."""


class HostBuffer:
    """Memory of the host for one activation."""

    __slots__ = ("memory", "nbytes", "read")

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self.memory: Tensor | None = None
        if device.type != "meta":
            # torch's allocator of pinned memory rounds sizes up to a power of two
            self.memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.read: torch.cuda.Event | None = None
        """The end of the last copy to the device, before which nobody may write."""

    def view(self, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Return the memory as a tensor."""
        return None if self.memory is None else self.memory.view(dtype).view(shape)


class HostPool:
    """Buffers of the host. They are reused, because it takes long to pin memory."""

    def __init__(self) -> None:
        self._free: defaultdict[tuple[int, torch.device], list[HostBuffer]] = defaultdict(list)
        self.made = 0
        """The number of buffers that were allocated."""
        self.nbytes = 0
        """Bytes of the buffers that are in use."""
        self.most_nbytes = 0

    def take(self, nbytes: int, device: torch.device) -> HostBuffer:
        found = self._free[nbytes, device]
        if not found:
            self._free.clear()  # the batch has another shape, or was never so large: idle buffers fit nothing
            self.made += 1
        buffer = found.pop() if found else HostBuffer(nbytes, device)
        self.nbytes += nbytes
        self.most_nbytes = max(self.most_nbytes, self.nbytes)
        return buffer

    def give_back(self, buffer: HostBuffer, device: torch.device) -> None:
        self.nbytes -= buffer.nbytes
        self._free[buffer.nbytes, device].append(buffer)


class CopyStreams:
    """The streams on which a GPU copies to the host and back; the link carries both directions at once."""

    def __init__(self, device: torch.device) -> None:
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)


def copy_behind(
    stream: torch.cuda.Stream | None, source: Tensor | None, target: Tensor | None, *after: torch.cuda.Event | None
) -> torch.cuda.Event | None:
    """Copy on a stream, behind what comes next on the current stream; return the event of its end.

    The copy begins after everything that was issued on the current stream, which has written the source, or has freed
    the memory of the target, and after the events. Without a stream the copy is made at once.
    """
    if source is None or target is None:
        return None
    if stream is None:
        target.copy_(source)
        return None
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    for event in after:
        if event is not None:
            stream.wait_event(event)
    done = torch.cuda.Event()
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        done.record(stream)
    return done


class OffloadedTensor:
    """An activation that is on the host, on its way, or on the device once more."""

    def __init__(self, tensor: Tensor, pool: HostPool, streams: CopyStreams | None, counts: OffloadCounts) -> None:
        """Begin to copy the tensor to the host."""
        tensor, self._trains = tensor.detach(), tensor.requires_grad
        self._here: Tensor | None = tensor
        self._kind, self._device = (tensor.shape, tensor.dtype), tensor.device
        self._streams, self._counts = streams, counts
        self._buffer = pool.take(tensor.nbytes, tensor.device)
        # the buffer outlives a graph that is dropped without a backward pass, or after an error in it
        weakref.finalize(self, pool.give_back, self._buffer, tensor.device)
        out = None if streams is None else streams.out
        self._sent = copy_behind(out, tensor, self._buffer.view(*self._kind), self._buffer.read)
        self._returns = False  # whether the tensor on the device is a copy of the host's
        self._arrival: torch.cuda.Event | None = None
        counts.sent += 1
        counts.sent_nbytes += tensor.nbytes

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._here is None else self._here.nbytes

    def leave(self) -> None:
        """Free the device's memory, once the copy is done."""
        if self._sent is not None:
            # Whoever gets the memory next writes on this stream, or on one that waits for it.
            torch.cuda.current_stream(self._device).wait_event(self._sent)
        self._here = None

    def prefetch(self) -> bool:
        """Begin to copy back to the device; return whether there was anything to copy."""
        if self._here is not None:
            return False
        shape, dtype = self._kind
        self._here = torch.empty(shape, dtype=dtype, device=self._device)
        back = None if self._streams is None else self._streams.back
        self._arrival = self._buffer.read = copy_behind(back, self._buffer.view(*self._kind), self._here, self._sent)
        self._returns = True
        self._counts.fetched += 1
        self._counts.fetched_nbytes += self._here.nbytes
        return True

    def take(self) -> Tensor:
        """Return the tensor on the device, and hold it no longer there."""
        self.prefetch()
        if self._arrival is not None:
            torch.cuda.current_stream(self._device).wait_event(self._arrival)
        self._counts.found += not self._returns
        tensor, self._here, self._arrival, self._returns = cast(Tensor, self._here), None, None, False
        return tensor.requires_grad_(self._trains)


class OffloadedInputs:
    """The inputs of a block, one for each half of the batch."""

    def __init__(
        self, tensors: list[OffloadedTensor], before: weakref.ref[OffloadedInputs] | None, counts: OffloadCounts
    ) -> None:
        """`before`: the inputs of the block before it in the same pass."""
        self.tensors, self._before, self._counts = tensors, before, counts

    def leave(self) -> None:
        """Free the device's memory, once the copies are done."""
        for tensor in self.tensors:
            tensor.leave()

    def prefetch(self) -> None:
        """Begin to copy back to the device what is not there."""
        self._counts.prefetched += sum(tensor.prefetch() for tensor in self.tensors)

    def take(self) -> list[Tensor]:
        """Return the inputs on the device, and begin to copy those of the block before."""
        found = [tensor.take() for tensor in self.tensors]
        before = None if self._before is None else self._before()
        if before is not None:
            before.prefetch()
        return found


class Offloader:
    """The activations of a model that wait on the host."""

    def __init__(self) -> None:
        self.pool, self.counts = HostPool(), OffloadCounts()
        self._streams: dict[torch.device, CopyStreams] = {}
        self._last: weakref.ref[OffloadedInputs] | None = None  # of the pass that runs
        self._newest: weakref.ref[OffloadedInputs] | None = None  # on the device still
        self._all: weakref.WeakSet[OffloadedTensor] = weakref.WeakSet()

    def begin(self) -> None:
        """Begin a forward pass."""
        self._last = None

    def send(self, tensors: Sequence[Tensor]) -> OffloadedInputs:
        """Copy the inputs of a block to the host; those that were sent before are freed on the device."""
        newest = None if self._newest is None else self._newest()
        if newest is not None:
            newest.leave()
        sent = [OffloadedTensor(tensor, self.pool, self._streams_of(tensor.device), self.counts) for tensor in tensors]
        self._all.update(sent)
        inputs = OffloadedInputs(sent, self._last, self.counts)
        self._last = self._newest = weakref.ref(inputs)
        return inputs

    @property
    def last(self) -> weakref.ref[OffloadedInputs] | None:
        """The inputs of the last block of the pass that has run, which backward needs first."""
        return self._last

    @property
    def device_nbytes(self) -> int:
        """Bytes on the device of all inputs that wait for backward."""
        return sum(tensor.device_nbytes for tensor in self._all)

    def _streams_of(self, device: torch.device) -> CopyStreams | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = CopyStreams(device)
        return self._streams[device]

"""The engine that runs communication behind computation. It decides when something runs, never what.

The engine of a model sends nothing itself; it orders what it is handed. `Prefetcher` launches gathers
of weights before their use, in the order in which an earlier pass used them. `DeferredReductions` waits for reductions
after others were launched. `WgradQueue` keeps the products of weight gradients for the moment when a message is in
flight. `take_turns` lets the two halves of a batch alternate.

Invariant: for the same number of halves every policy gives the same bits, and every rank launches in the same order:
nothing here asks whether something has arrived yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import Tensor

from fourfold.offload import Offloader
from fourfold.policy import Gathering, Overlap

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Awaited(Protocol[T_co]):
    """A message in flight, or anything else with a result to wait for."""

    def wait(self) -> T_co: ...


def in_backward() -> bool:
    """Return whether autograd is running a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


class Buffers:
    """A pool of memory for gathered weights.

    On the CPU large allocations are expensive, so buffers are reused: those that the layers of a model take in turn
    stay in the pool, and one that is rarely taken, such as the buffer of the head's table, is freed. On a GPU torch's
    caching allocator does the same for everything that a step needs, and the pool keeps nothing.
    """

    PATIENCE = 32
    """An idle buffer is freed after the pool was used this often, which is about three transformer blocks."""

    def __init__(self) -> None:
        self._free: deque[tuple[int, Tensor]] = deque()
        self._now = 0  # counts uses of the pool
        self.made = 0
        """The number of buffers that were allocated."""

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self._pass_time()
        size = torch.Size(shape)
        for index, (_, buffer) in enumerate(self._free):
            if buffer.shape == size and buffer.dtype == dtype and buffer.device == device:
                del self._free[index]
                return buffer
        self.made += 1
        with torch.inference_mode(False):  # the buffer may be used for training next
            return torch.empty(*shape, dtype=dtype, device=device)

    def give_back(self, buffer: Tensor) -> None:
        self._pass_time()
        if buffer.device.type == "cpu":
            self._free.append((self._now, buffer))

    def _pass_time(self) -> None:
        self._now += 1
        while self._free and self._free[0][0] < self._now - self.PATIENCE:
            self._free.popleft()


class Joinable(Protocol[T]):
    """Weights or gradients that are sent over z, alone or in one message with others of their kind."""

    @property
    def nbytes(self) -> int:
        """The size of the whole tensors, equal on all ranks; 0 if nothing is sent."""
        ...

    def launch(self, *behind: Any) -> Sequence[Awaited[T]]:
        """Send them, in one message with those `behind` them; return what to wait for, one for each."""
        ...


class WeightGather(Joinable[T], Protocol[T]):
    """A gather of weights that a pass wants."""

    @property
    def key(self) -> Hashable:
        """Identifies the weights and the form in which they are wanted."""
        ...

    def version(self) -> object:
        """Return the version counters of the weights; they change when somebody writes into a weight."""
        ...

    def buffers(self, gathered: T, /) -> Sequence[Tensor]:
        """Return the memory of the result that can be reused after its last use."""
        ...


class OrderedGather(WeightGather[T], Protocol[T]):
    """A gather that all places send, also those that do not use the weights."""

    @property
    def kind(self) -> str:
        """Tells apart gathers of the same weights that one prefetch may hold, such as forward's and backward's."""
        ...

    @property
    def message(self) -> Hashable:
        """Identifies the kind and the weights, but not their form, which some places may not know."""
        ...

    @property
    def parameters(self) -> Sequence[Tensor]: ...

    def is_current(self) -> bool:
        """Return whether the layers still have these parameters."""
        ...

    def adopt(self, gathered: Any, /) -> T:
        """Return weights in this form that came in the same message in another form."""
        ...


class MessageOrder(Protocol):
    """The order of messages that all places keep, where each runs code of its own (`PlaceOrder`)."""

    def before_gather(self, wanted: Any) -> None:
        """Come to the place of this `OrderedGather` in the order."""
        ...


@dataclass(slots=True)
class InUse(Generic[T]):
    """Gathered weights that further halves of the batch will use."""

    value: T
    uses_left: int


class WeightUse(Generic[T]):
    """A block that uses gathered weights. If it fails, it leaves them to the end of the pass."""

    __slots__ = ("_in_use", "_keep", "_prefetcher", "_uses", "_wanted")
    _in_use: InUse[T]

    def __init__(self, prefetcher: Prefetcher, wanted: WeightGather[T], uses: int, keep: bool) -> None:
        self._prefetcher, self._wanted, self._uses, self._keep = prefetcher, wanted, uses, keep

    def __enter__(self) -> T:
        self._in_use = self._prefetcher.take(self._wanted, self._uses)
        return self._in_use.value

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self._prefetcher.release(self._wanted, self._in_use, keep=self._keep)


BACKWARD = "backward"
"""The kind of every backward pass, whatever its forward pass was, unless `begin_backward` names another."""


class Prefetcher:
    """Launches gathers of weights before their use, in the order in which an earlier pass of the same kind used them.

    Small gathers that follow each other travel in one message. The gathers in flight are bounded in bytes, but one may
    always be in flight. If a pass differs from the recorded order, it gathers on use from there on, and its order is
    recorded instead. If the last forward pass of a kind was followed by a backward pass, the end of this forward pass
    prefetches the first weights of backward. A gather that is in flight while its weight changes is repeated, provided
    that torch counts the change (torch's fused optimizers do not; `optim.AdamW` counts for them).
    """

    def __init__(
        self,
        *,
        policy: Overlap,
        buffers: Buffers,
        in_backward: Callable[[], bool] = in_backward,
    ) -> None:
        self.policy, self.buffers, self.in_backward = policy, buffers, in_backward
        self._orders: dict[Hashable, list[WeightGather]] = {BACKWARD: []}  # the recorded order of each kind of pass
        self._followed: dict[Hashable, bool] = {}  # whether the last pass of a kind was followed by backward
        self._kind: Hashable = None  # the kind of the pass that runs now
        self._backward: Hashable = BACKWARD  # the kind of the backward passes that run now
        self._cursor = 0  # the number of weights that the pass has used
        self._in_flight: dict[Hashable, tuple[WeightGather, object, Awaited]] = {}
        self._in_use: dict[Hashable, InUse] = {}
        self._keeps: Gathering = "use"
        self._stage: Hashable = None  # the stage whose weights are kept
        self._kept: dict[Hashable, tuple[object, Any]] = {}  # version and value of weights that stay gathered
        self._largest = 0
        self._places: MessageOrder | None = None
        self._key: Callable[[WeightGather], Hashable] = attrgetter("key")

    def keep_order(self, places: MessageOrder) -> None:
        """Send every gather in this order from now on.

        Gathers are then told apart by their messages: a place that takes part in a gather may know the weights in
        another form than the places that use them.
        """
        self._places, self._key = places, attrgetter("message")

    def begin(self, kind: Hashable) -> None:
        """Begin a forward pass, and prefetch its first weights."""
        if self._kind in self._followed:  # the pass before had no backward, or `_follow` would have changed the kind
            self._followed[self._kind] = False
        self.end()
        self._orders.setdefault(kind, [])
        if torch.is_grad_enabled():
            self._followed.setdefault(kind, False)
        self._kind = kind
        self._launch_next()

    def order(self, kind: Hashable) -> list[Hashable]:
        """Return the keys of the weights in the recorded order of a kind of pass."""
        return [wanted.key for wanted in self._orders[kind]]

    def expect(self, forward: Hashable, used: Sequence[WeightGather], in_backward: Sequence[WeightGather]) -> None:
        """Take the orders of a forward pass and of the backward pass after it, as if both had run before."""
        self._orders |= {forward: list(used), self._backward: list(in_backward)}
        self._followed[forward] = bool(in_backward)
        self._largest = max([self._largest, *(wanted.nbytes for wanted in (*used, *in_backward))])

    def keep(self, keeps: Gathering) -> None:
        """Let weights stay gathered from here on, until `keep` is called again."""
        self._keeps = keeps
        self._kept.clear()

    def begin_stage(self, stage: Hashable) -> None:
        """Say which stage of the model runs next; weights that are kept for a block of passes end with it."""
        if self._keeps == "block" and stage != self._stage:
            self._kept.clear()
        self._stage = stage

    def begin_backward(self, kind: Hashable) -> None:
        """Say of which kind the next backward passes are, where a model has several parts that run backward alone."""
        self._orders.setdefault(kind, [])
        if self._backward != kind:
            self._backward = kind
            self.end()

    def end(self) -> None:
        """End a pass: wait for gathers that nobody used, and free them."""
        for wanted, _, pending in self._in_flight.values():
            self._free(wanted, pending.wait())
        self._in_flight.clear()
        self._in_use.clear()
        self._close_order()
        self._kind = None

    def forget(self) -> None:
        """End a pass without waiting for its gathers, which were never sent."""
        self._in_flight.clear()
        self._kept.clear()
        self.end()

    def take(self, wanted: WeightGather[T], uses: int) -> InUse[T]:
        """Return the gathered weights for one of `uses` uses; `release` ends the use."""
        if not wanted.nbytes and uses == 1:  # nothing travels, and nobody else uses them
            return InUse(wanted.launch()[0].wait(), 1)
        key = self._key(wanted)
        in_use = self._in_use.pop(key, None)
        if in_use is None and key in self._kept:
            version, value = self._kept[key]
            if version == wanted.version():
                return InUse(value, uses)
            del self._kept[key]
        if in_use is None:
            if wanted.nbytes and self._places is not None:
                self._places.before_gather(wanted)
            launched, version, pending = self._in_flight.pop(key, (wanted, None, None))
            if pending is not None and version != wanted.version():  # a weight changed since the launch
                self._free(launched, pending.wait())
                launched, pending = wanted, None
            pending = pending or wanted.launch()[0]
            if wanted.nbytes:
                self._follow(wanted)
                self._launch_next()  # before the wait: the next gathers travel while these weights are used
            value = pending.wait()
            in_use = InUse(value if launched.key == wanted.key else cast(OrderedGather, wanted).adopt(value), uses)
        return in_use

    def release(self, wanted: WeightGather[T], in_use: InUse[T], *, keep: bool = False) -> None:
        """End a use; the last one frees the weights' memory for reuse, unless `keep` says that somebody keeps it."""
        in_use.uses_left -= 1
        if in_use.uses_left:
            self._in_use[self._key(wanted)] = in_use
        elif self._keeps != "use" and wanted.nbytes:
            self._kept[self._key(wanted)] = wanted.version(), in_use.value
        elif not keep:
            self._free(wanted, in_use.value)

    def using(self, wanted: WeightGather[T], *, uses: int, keep: bool = False) -> WeightUse[T]:
        """Have the gathered weights for one of `uses` uses; with `keep`, their memory is not reused afterwards."""
        return WeightUse(self, wanted, uses, keep)

    def _follow(self, used: WeightGather) -> None:
        """Advance in the recorded order of this kind of pass; record what is new."""
        if self._kind != self._backward and self.in_backward():
            self._close_order()
            if self._kind in self._followed:
                self._followed[self._kind] = True
            self._kind = self._backward
        if self._kind is None:
            return  # somebody calls layers one by one, outside of a pass
        order = self._orders[self._kind]
        if self._cursor < len(order) and self._key(order[self._cursor]) != self._key(used):
            del order[self._cursor :]
        order[self._cursor : self._cursor + 1] = [used]
        self._cursor += 1
        self._largest = max(self._largest, used.nbytes)

    def _close_order(self) -> None:
        """End the record where this pass ended: weights that it did not use are no longer expected."""
        if self._cursor:
            del self._orders[self._kind][self._cursor :]
        self._cursor = 0

    def _expected(self) -> Iterator[WeightGather]:
        if self._kind is None:
            return
        yield from self._orders[self._kind][self._cursor :]
        if self._followed.get(self._kind):
            yield from self._orders[self._backward]

    def _launch_next(self) -> None:
        """Prefetch: launch the gathers that the recorded order expects next, as far as the bound allows.

        Those that are too small for a message of their own wait for the next ones, unless little else is in flight.
        """
        if not self.policy.prefetch:
            return
        most, least = self.policy.most_in_flight(self._largest), self.policy.least_joint(self._largest)
        in_flight = sum([wanted.nbytes for wanted, _, _ in self._in_flight.values()])
        message: dict[Hashable, WeightGather] = {}
        nbytes = 0
        for wanted in self._expected():
            key = self._key(wanted)
            if key in self._in_use or key in self._in_flight or key in self._kept or key in message:
                continue
            if in_flight + nbytes and in_flight + nbytes + wanted.nbytes > most:
                if in_flight >= least:
                    return
                break
            message[key] = wanted
            nbytes += wanted.nbytes
            if nbytes >= least:
                self._launch(message)
                in_flight, nbytes, message = in_flight + nbytes, 0, {}
        self._launch(message)

    def _launch(self, message: dict[Hashable, WeightGather]) -> None:
        """Launch these gathers in one message."""
        if message:
            first, *behind = message.values()
            versions = [wanted.version() for wanted in message.values()]
            # as autograd's functions launch: who waits may have left an inference mode in which the pass began
            with torch.inference_mode(False), torch.no_grad():
                launched = first.launch(*behind)
            for wanted, version, pending in zip(message.values(), versions, launched, strict=True):
                self._in_flight[self._key(wanted)] = wanted, version, pending

    def _free(self, wanted: WeightGather[T], value: T) -> None:
        for buffer in wanted.buffers(value):
            self.buffers.give_back(buffer)


class Wait(Enum):
    """What one half of a batch waits for where it yields, if not for a message between two products."""

    COUNTS = "the host waits for numbers that the device has computed"
    ROWS = "rows travel to experts, or back: the longest messages that there are"


Turns = Generator[Wait | None, None, T]
"""Computation on one half of a batch. It yields where its message is in flight, so that the other half can compute.
`policy.choose_halves` decides how many parts a batch is cut into."""


@dataclass(frozen=True, slots=True)
class HalfTurn:
    """Which half of the batch computes now: number `index` of `of`."""

    index: int = 0
    of: int = 1


class TurnOrder:
    """Decides which part of a batch runs next, from what each one waits for. Time plays no role.

    - Between two products parts alternate. The first one is a step ahead: while it is between two messages (in a
      norm), the second runs a product.
    - Rows take longer to travel than any other message. So while those of one part travel, another runs on until its
      own do. Then the part goes on that sent its rows first, and its products run behind the rows of the other.
    - While the host waits for counts, the device must not stand still: another part runs one step, and then the
      first one sends its rows.
    """

    def __init__(self, parts: int) -> None:
        self.current = 0
        """The part that runs next."""
        self._open = list(range(parts))  # the parts that have not ended
        self._travelling: list[int] = []  # those whose rows travel, the first to have sent them first
        self._counting: int | None = None  # the one for which another runs a step
        self._steps = 0  # that have run

    def waits(self, wait: Wait | None) -> None:
        """Note that the current part waits; find the next one."""
        self._note_step()
        if wait is Wait.ROWS:
            self._travelling.append(self.current)
        self._choose(wait)

    def ends(self) -> None:
        """Note that the current part has ended; find the next one, if there is any."""
        self._note_step()
        self._open.remove(self.current)
        if self._open:
            self._choose()

    def _note_step(self) -> None:
        self._steps += 1
        self._travelling = [part for part in self._travelling if part != self.current]

    def _choose(self, wait: Wait | None = None) -> None:
        here = self.current
        others = [part for part in self._open if part > here] + [part for part in self._open if part < here]
        if self._counting is not None:
            self.current, self._counting = self._counting, None
        elif wait is Wait.COUNTS and others:
            self.current, self._counting = others[0], here
        elif wait is not None or self._steps > 1 or here not in self._open:  # else the first part gets a step ahead
            ready = [part for part in (*others, here) if part in self._open and part not in self._travelling]
            self.current = (ready or self._travelling)[0]


class Engine:
    """The overlap engine of one model: it records the order of its passes and holds what is in flight."""

    def __init__(self, policy: Overlap, *, flights: bool, in_backward: Callable[[], bool] = in_backward) -> None:
        """`flights`: whether backward sends activations over x or y, behind which dw's products can run."""
        self.policy, self.flights = policy, flights
        self.turn = HalfTurn()
        self.recomputing = False
        """Whether backward is running a part of the forward pass again (activation checkpointing)."""
        self.buffers = Buffers()
        self.prefetcher = Prefetcher(policy=policy, buffers=self.buffers, in_backward=in_backward)
        self.deferred = DeferredReductions(policy)
        self.wgrad_queue = WgradQueue(WgradQueue.MOST if policy.wgrad_behind_messages and flights else 0)
        self.sums = HalfSums()
        self.offloader = Offloader()

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        return Engine(self.policy, flights=self.flights)  # messages in flight belong to the original

    def begin(self, kind: Hashable) -> None:
        """Begin a forward pass. Passes of one kind are expected to use the same weights in the same order."""
        self.turn = HalfTurn()
        self.prefetcher.begin(kind)

    def finish_backward(self) -> None:
        """Complete everything that a backward pass has left undone, when it ends."""
        self.wgrad_queue.run_all()
        self.deferred.wait_all()
        self.prefetcher.end()

    def abandon(self) -> None:
        """Give up a failed pass: wait for what it launched, drop what it had queued."""
        self.deferred.abandon()
        self.prefetcher.end()
        self.forget()

    def forget(self) -> None:
        """Drop everything that is queued or in flight without waiting for it."""
        self.wgrad_queue.forget()
        self.sums.forget()
        self.deferred.forget()
        self.prefetcher.forget()

    def take_turns(self, parts: Sequence[Turns[T]]) -> list[T]:
        """Run all parts to their end, switching wherever one yields (`TurnOrder`)."""
        if len(parts) == 1:
            return [self.alone(parts[0])]
        results: dict[int, T] = {}
        order, before = TurnOrder(len(parts)), self.turn
        try:
            while len(results) < len(parts):
                index = order.current
                self.turn = HalfTurn(index, len(parts))
                try:
                    order.waits(next(parts[index]))
                except StopIteration as end:
                    results[index] = end.value
                    order.ends()
        finally:
            self.turn = before
        return [results[index] for index in range(len(parts))]

    def alone(self, part: Turns[T]) -> T:
        """Run one part to its end, as a part of the turn that runs now."""
        while True:
            try:
                next(part)
            except StopIteration as end:
                return end.value


class WeightReduction(Joinable[T], Protocol[T]):
    """A reduction of weight gradients that backward has computed."""

    @property
    def alike(self) -> object:
        """What reductions in one message have in common, such as their dtype."""
        ...

    @property
    def use(self) -> Callable[[T], None]:
        """Takes the result."""
        ...


class DeferredReductions:
    """Reductions that are waited for later, the oldest message first.

    With `policy.defer` small reductions that follow each other travel in one message, and the bytes in flight are
    bounded, but the newest message is never waited for at once. Without it every reduction is waited for where it is
    launched.
    """

    def __init__(self, policy: Overlap) -> None:
        self.policy = policy
        self._held: list[WeightReduction] = []  # not launched yet
        # Bytes, result and its user of each reduction; not the reduction, which would keep its gradients in memory.
        self._messages: deque[list[tuple[int, Awaited, Callable[[Any], None]]]] = deque()
        self._nbytes = 0  # of both
        self._largest = 0

    def expect(self, nbytes: Iterable[int]) -> None:
        """Take the bytes of reductions that will come, as if a pass with them had run before."""
        self._largest = max([self._largest, *nbytes])

    def defer(self, reduction: WeightReduction) -> None:
        """Launch a reduction and use its result, both at some time before backward ends."""
        if self._held and self._held[0].alike != reduction.alike:
            self._launch_held()
        self._held.append(reduction)
        self._nbytes += reduction.nbytes
        self._largest = max(self._largest, reduction.nbytes)
        if not self.policy.defer:
            self.wait_all()
        # by bytes, not by asking what has arrived: `use` may launch a bucket, and all ranks must launch in one order
        if sum([held.nbytes for held in self._held]) >= self.policy.least_joint(self._largest):
            self._launch_held()
        while self._nbytes > self.policy.most_in_flight(self._largest) and len(self._messages) > 1:
            self._wait_oldest()

    def wait_all(self) -> None:
        self._launch_held()
        while self._messages:
            self._wait_oldest()

    def abandon(self) -> None:
        """Wait for all reductions that were launched, without using their results."""
        for message in self._messages:
            message[0][1].wait()
        self.forget()

    def forget(self) -> None:
        self._held.clear()
        self._messages.clear()
        self._nbytes = 0

    def _launch_held(self) -> None:
        if self._held:
            held, self._held = self._held, []
            message = zip(held, held[0].launch(*held[1:]), strict=True)
            self._messages.append([(each.nbytes, pending, each.use) for each, pending in message])

    def _wait_oldest(self) -> None:
        for nbytes, pending, use in self._messages.popleft():
            self._nbytes -= nbytes
            use(pending.wait())


class WgradQueue:
    """Products of weight gradients that wait until a message is in flight.

    Nobody waits for a weight gradient, so its product can run behind the message that the input gradient needs. Each
    message runs one product, the oldest, so that some are left for the next message.
    """

    MOST = 3
    """Products in the queue: enough for the messages between two products, few because their inputs stay in memory."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.jobs: deque[Callable[[], None]] = deque()
        self._held: dict[Hashable, list[Callable[[], None]]] = {}
        self._key: Hashable = None

    @property
    def holds(self) -> bool:
        """Whether the products of the running backward pass are held back."""
        return self._key is not None

    @contextmanager
    def holding(self, key: Hashable) -> Iterator[None]:
        """Hold back the products that are queued inside the block, until `run_held` runs them."""
        before, self._key = self._key, key
        self._held[key] = []
        try:
            yield
        finally:
            self._key = before

    def run_held(self, key: Hashable) -> None:
        """Run the products that were held back under this key, if any, in the order in which they were queued."""
        for job in self._held.pop(key, ()):
            job()

    def forget(self) -> None:
        """Drop all products."""
        self.jobs.clear()
        self._held.clear()

    def add(self, job: Callable[[], None]) -> None:
        if self._key is not None:
            self._held[self._key].append(job)
            return
        if not self.most:
            job()
            return
        self.jobs.append(job)
        while len(self.jobs) > self.most:
            self.run_one()

    def run_one(self) -> None:
        if self.jobs:
            self.jobs.popleft()()

    def run_all(self) -> None:
        while self.jobs:
            self.run_one()


class HalfSums:
    """Weight gradients that are summed over the halves of a batch, until the last half has added its part."""

    def __init__(self) -> None:
        self._begun: dict[Hashable, tuple[list[Tensor], int]] = {}

    def begun(self, key: Hashable) -> list[Tensor] | None:
        """Return the sum of earlier halves, to be added to in place, or None."""
        return self._begun[key][0] if key in self._begun else None

    def add(self, key: Hashable, parts: list[Tensor], of: int) -> list[Tensor] | None:
        """Store the sum `parts`, to which one more half has added its part; return it if that was the last half."""
        given = self._begun.pop(key, (parts, 0))[1] + 1
        if given == of:
            return parts
        self._begun[key] = parts, given
        return None

    def forget(self) -> None:
        self._begun.clear()

"""A training step rehearsed: the real overlap engine, driven with nothing but names and sizes.

`Stage` has what layers are made of (flights, weights used and reduced, products and the backward pass of each), with
the same order of launches and waits as the runtime's, because the same engine orders them. What the host would do is
written down as a program. Law: that program's launches, waits and products are those of a dry run of the real code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from fourfold.axes import AXES
from fourfold.engine import Engine, WeightGather
from fourfold.gradients import Bucket
from fourfold.ledger import Collective
from fourfold.planner.volume import Volume
from fourfold.planner.work import Compute, Kernel, Launch, Product, Wait, Work

T = TypeVar("T")
Records = Callable[[], Iterable[Collective]]


class Flying:
    """A collective under way, or none where nothing travels."""

    __slots__ = ("_flights", "_work")

    def __init__(self, work: list[Work], flights: list[int]) -> None:
        self._work, self._flights = work, flights

    def wait(self) -> None:
        self._work += map(Wait, self._flights)
        self._flights = []


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters that travel together: matrices [rows, columns] and vectors of this rank's compute layout."""

    label: str
    names: tuple[str, ...]
    matrices: tuple[tuple[int, int], ...]
    vectors: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices) + sum(self.vectors)

    def only_matrices(self) -> Weights:
        return Weights(self.label, self.names[: len(self.matrices)], self.matrices)

    def first_vector(self) -> Weights:
        return Weights(self.label, self.names[:1], (), self.vectors[:1])


@dataclass(slots=True)
class _Node:
    """What backward does for one step of forward; `reads` what forward kept, so that a recompute comes before it."""

    run: Callable[[], None]
    reads: bool


class Stage:
    """One rank's host in a training step."""

    def __init__(self, volume: Volume) -> None:
        self.volume, self.shape, self.policy = volume, volume.shape, volume.policy
        self.work: list[Work] = []
        self.engine = Engine(
            volume.policy.overlap, flights=volume.shape.x * volume.shape.y > 1, in_backward=lambda: self._backward
        )
        self.owed = Owing(self)
        self.casts = volume.compute_itemsize != volume.dtype.itemsize
        two = volume.shape.two_lanes
        self._gathers = {axis: f"{axis} gather" if axis in two else axis for axis in AXES}
        self._reduces = {axis: f"{axis} reduce" if axis in two else axis for axis in AXES}
        self._gatherings: dict[Hashable, WeightGather[None]] = {}
        self.recording = False
        """Whether the engine only learns the order, and nothing is written down."""
        self._tape: list[_Node] = []
        self._backward = False
        self._flights = 0

    # --- what the host does

    def compute(self, *work: Compute) -> None:
        if not self.recording:
            self.work += work

    def launch(self, records: Iterable[Collective]) -> Flying:
        flights: list[int] = []
        if self.recording:
            return Flying(self.work, flights)
        for record in records:
            lane = self._gathers if record.op == "all_gather" else self._reduces
            self.work.append(Launch(self._flights, record, lane[record.axis]))
            flights.append(self._flights)
            self._flights += 1
        return Flying(self.work, flights)

    def communicate(self, records: Iterable[Collective]) -> None:
        """One after another, each waited for at once."""
        for record in () if self.recording else records:
            self.launch([record]).wait()

    # --- backward

    def on_backward(self, run: Callable[[], None], *, reads: bool = True) -> None:
        self._tape.append(_Node(run, reads))

    def run_backward(self, *, accumulating: bool) -> None:
        """All that forward left for it, the latest first, as autograd does; then what is still on its way."""
        self._backward = True
        self.owed.begin(accumulating=accumulating)
        while self._tape:
            self._tape.pop().run()
        self.engine.finish_backward()
        self._backward = False
        self.owed.finish()

    def recompute(self, function: Callable[[], T]) -> T:
        """Run it now, and again before the first part of its backward that reads something."""
        first, turn = len(self._tape), self.engine.turn
        result = function()
        done = False

        def again() -> None:
            nonlocal done
            if not done:
                done = True
                kept = self._tape, self.engine.turn
                self._tape, self.engine.turn, self.engine.recomputing = [], turn, True
                function()
                (self._tape, self.engine.turn), self.engine.recomputing = kept, False

        for node in self._tape[first:]:
            if node.reads:
                node.run = partial(_one_after_the_other, again, node.run)
        return result

    # --- activations

    def fly(self, axis: str, there: Records, back: Records) -> Flight | Landed:
        return Flight(self, there, back) if self.shape.sizes[axis] > 1 else LANDED

    # --- weights

    def using(self, weights: Weights, kind: str, turns: int, *, keep: bool = False) -> AbstractContextManager[None]:
        """Weights in compute layout and dtype, for one of so many halves."""
        key = (kind, weights.label, weights.names)
        gathering = self._gatherings.get(key)
        if gathering is None:
            gathered = self.shape.z > 1
            gathering = self._gatherings[key] = WeightGather(
                key=key,
                launch=lambda: self._gather(weights),
                nbytes=weights.elements * self.volume.compute_itemsize if gathered else 0,
                version=lambda: 0,
                buffers=lambda _: (),
            )
        return self.engine.prefetcher.using(gathering, uses=turns, keep=keep)

    def _gather(self, weights: Weights) -> Flying:
        self.owed.need(weights.names)
        if self.casts:
            itemsize = self.volume.dtype.itemsize + self.volume.compute_itemsize
            self.compute(Kernel(f"cast {weights.label}", weights.elements // self.shape.z * itemsize))
        return self.launch(self.volume.weights("all_gather", [*weights.matrices], [*weights.vectors], weights.label))

    def add_gradients(self, key: str, weights: Weights, turns: int) -> None:
        """One of so many halves has given its part; the last one's call reduces the sum over z."""
        if self.engine.sums.add((key, weights.names), [], turns) is None:
            return
        if self.shape.z == 1:
            self.owed.deposit(weights.names)
            return
        records = self.volume.weights("reduce_scatter", [*weights.matrices], [*weights.vectors], weights.label)
        nbytes = weights.elements * self.volume.reduce_itemsize
        self.engine.deferred.defer(self.launch(records), nbytes, lambda _: self.owed.deposit(weights.names))

    def product(self, weights: Weights, tokens: int, p: int, reread: Records) -> None:
        """E1 with p columns, and for backward E2 and, when something is in flight, E3; `reread` gathers the input
        again."""
        turns, label, k = self.engine.turn.of, weights.label, weights.matrices[0][1]
        kept = self.policy.keep_weights and (self.shape.z > 1 or self.casts)
        with self.using(weights, "with biases", turns, keep=kept):
            self.compute(Product(f"E1 {label}", tokens, k, p))

        def gradients(reading: Flying | None) -> None:
            (reading or self.launch(reread())).wait()
            self.compute(Product(f"E3 {label}", p, tokens, k))
            self.add_gradients("product", weights, turns)

        def backward() -> None:
            reading = self.launch(reread()) if self.policy.overlap.wgrad_behind_messages else None
            if kept:
                self.compute(Product(f"E2 {label}", tokens, p, k))
            else:
                with self.using(weights.only_matrices(), "weights", turns):
                    self.compute(Product(f"E2 {label}", tokens, p, k))
            self.engine.wgrad_queue.add(lambda: gradients(reading))

        self.on_backward(backward)


def _one_after_the_other(*functions: Callable[[], None]) -> None:
    for function in functions:
        function()


class Landed:
    """What never travelled."""

    travels = False

    def land(self) -> None:
        return None


LANDED = Landed()


class Flight:
    """A tensor on its way through an operator; backward launches where forward landed and the other way round."""

    travels = True

    def __init__(self, stage: Stage, there: Records, back: Records) -> None:
        self._stage, self._back = stage, back
        self._flying = stage.launch(there())
        stage.on_backward(self._land_back, reads=False)

    def land(self) -> None:
        self._flying.wait()
        self._stage.on_backward(self._launch_back, reads=False)

    def _launch_back(self) -> None:
        self._flying = self._stage.launch(self._back())

    def _land_back(self) -> None:
        self._stage.engine.wgrad_queue.run_one()
        self._flying.wait()


class Owing:
    """What gradients owe beyond z, in buckets as backward completes them, and parameters on their way from replicas."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.buckets = stage.volume.buckets()
        self.members = stage.volume.members()
        self._expected: Counter[str] = Counter()
        self._deposits: Counter[str] = Counter()
        self._accumulating = False
        self._sums: list[tuple[Bucket, Iterator[str], Flying]] = []
        self._todo: list[Bucket] = []
        self._arriving: dict[str, Flying] = {}

    def begin(self, *, accumulating: bool) -> None:
        self._deposits.clear()
        self._accumulating = accumulating
        self._todo = self.buckets[::-1]

    def deposit(self, names: Sequence[str]) -> None:
        for name in names:
            self._deposits[name] += 1
            if self._accumulating or not self.stage.policy.overlap.reduce_early or not self._expected:
                continue
            while self._todo and self._final(self._todo[-1]):
                self._open(self._todo.pop())

    def _final(self, bucket: Bucket) -> bool:
        return all(self._deposits[name] >= self._expected[name] for name in bucket.names)

    def _open(self, bucket: Bucket) -> None:
        axes = iter(bucket.owes)
        self._sums.append((bucket, axes, self._launch(bucket, next(axes))))

    def _launch(self, bucket: Bucket, axis: str) -> Flying:
        return self.stage.launch(self.stage.volume.bucket_sum(bucket, axis, self.members))

    def finish(self) -> None:
        """A backward pass has ended."""
        self._expected |= self._deposits
        if self._accumulating:
            return
        while self._todo:
            self._open(self._todo.pop())
        while self._sums:
            going_on = []
            for bucket, axes, flying in self._sums:
                flying.wait()
                if (axis := next(axes, None)) is not None:
                    going_on.append((bucket, axes, self._launch(bucket, axis)))
            self._sums = going_on

    def gather_parameters(self) -> None:
        """What the sharded optimizer stepped, the first layers first."""
        for bucket in reversed(self.buckets):
            flying = self.stage.launch(self.stage.volume.stepped(bucket, self.members))
            if self.stage.policy.overlap.reduce_early:
                self._arriving |= dict.fromkeys(bucket.names, flying)
            else:
                flying.wait()

    def need(self, names: Sequence[str]) -> None:
        for name in names:
            if flying := self._arriving.pop(name, None):
                flying.wait()

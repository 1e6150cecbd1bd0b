"""The ledger of a grid: one record per collective, the same record that the planner predicts.

The ledger always counts calls and bytes by axis. It keeps the records themselves only inside `watch` and `events`, so
that its memory does not grow over a run of weeks.

Invariant: a record describes the logical operation. It is the same with gloo, NCCL, a fake process group and meta
tensors.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import torch

NO_SPAN = nullcontext()
"""The span of a block while no profile is taken."""

Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "receive"]

_WIRE_SHARES: dict[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""How often (g-1)/g of the buffer is sent; an all-reduce is a reduce-scatter and a gather."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective on one rank, or one end of a message between two ranks.

    `nbytes` is the size of the larger of its input and output buffers.
    """

    op: Op
    axis: str
    nbytes: int
    ranks: int
    label: str = ""
    lane: str = field(default="", compare=False)
    """The lane of a message between two ranks; empty for a collective."""
    peer: int = field(default=-1, compare=False)
    """The coordinate, along the axis, of the rank at the other end of a message."""
    sent: int = -1
    """The bytes that this rank sends to others in an all-to-all, whose parts may be uneven."""

    @property
    def wire_bytes(self) -> int:
        """The least number of bytes that this rank must send: (g-1)/g of the buffer, twice that for an all-reduce."""
        if self.sent >= 0:
            return self.sent
        if self.op in ("send", "receive"):
            return self.nbytes if self.op == "send" else 0
        return -(-_WIRE_SHARES[self.op] * (self.ranks - 1) * self.nbytes // self.ranks)

    def __str__(self) -> str:
        return f"{self.op}[{self.axis}] {self.label}"


def joint_label(labels: Sequence[str]) -> str:
    """Return the label of what travels in one message, from those of its parts in their order."""
    return labels[0] if len(labels) == 1 else f"{labels[0]} .. {labels[-1]}"


class Event(NamedTuple):
    """Something that the host did: it launched a collective, waited for one, or ran a product."""

    kind: Literal["launch", "wait", "product"]
    what: Collective | str


class Flight(NamedTuple):
    """A collective from its launch to its arrival, in seconds by the host's clock."""

    record: Collective
    began: float
    ended: float


class RecordedStep(Protocol):
    """The collectives of a step that the device repeats by itself, and how far it has come."""

    launches: list[Collective]
    """In the order of their launch."""
    waits: list[Collective]
    """In the order in which the device waits for them."""

    @property
    def progress(self) -> tuple[int, int]: ...


class Listener(Protocol):
    """Is called for every collective that is sent: at its launch, before the wait for it, and after the wait."""

    def launched(self, record: Collective) -> None: ...
    def waits(self, record: Collective) -> None: ...
    def landed(self) -> None: ...
    def replayed(self, step: RecordedStep) -> None: ...


class Ledger:
    """Counts all collectives of a grid, and records them while somebody watches."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.wire_bytes: Counter[str] = Counter()
        """The bytes that this rank has sent over each axis."""
        self.listener: Listener | None = None
        self._watchers: list[list[Collective]] = []
        self._events: list[Event] | None = None
        self._flights: list[Flight] | None = None
        self._exposed: defaultdict[str, float] = defaultdict(float)
        self._stalls: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] | None = None

    def append(self, record: Collective) -> None:
        self.calls[record.axis] += 1
        self.wire_bytes[record.axis] += record.wire_bytes
        for records in self._watchers:
            records.append(record)
        if self._events is not None:
            self._events.append(Event("launch", record))

    def waiting(self, record: Collective, *, on_gpu: bool) -> TimedWait:
        """Time the wait for a collective inside the block: the host's wait on the CPU, the stream's on a GPU.

        A GPU's is timed only after `time_stalls`, because the events that measure it cost time themselves.
        """
        return TimedWait(self, record, on_gpu=on_gpu)

    def multiplying(self, label: str) -> AbstractContextManager[object]:
        """Record the product that runs inside the block: E1 of a layer, or E2 or E3 of its backward."""
        if self._events is not None:
            self._events.append(Event("product", label))
        if torch.autograd._profiler_enabled():
            return torch.profiler.record_function(f"fourfold::product {label}")
        return NO_SPAN

    @contextmanager
    def events(self) -> Iterator[list[Event]]:
        """Collect what the host does inside the block, in order."""
        before, self._events = self._events, []
        try:
            yield self._events
        finally:
            self._events = before

    @contextmanager
    def recorded(self, step: RecordedStep) -> Iterator[None]:
        """Note the collectives of a step that is only recorded inside the block, without counting or timing them."""
        listener, stalls, self.listener, self._stalls = self.listener, self._stalls, None, None
        try:
            with self.not_counted(), self.watch() as step.launches:
                yield
        finally:
            self.listener, self._stalls = listener, stalls

    def replayed(self, step: RecordedStep) -> None:
        """Count the collectives of a recorded step that was launched again."""
        for record in step.launches:
            self.append(record)
        if self.listener is not None:
            self.listener.replayed(step)

    def time_stalls(self) -> None:
        """Start measuring, on a GPU, how long its stream stands still for collectives."""
        self._stalls = [] if self._stalls is None else self._stalls

    def take_exposed(self) -> Callable[[], dict[str, float]]:
        """Return a function that returns the seconds of waiting by axis since the last call of `take_exposed`.

        On a GPU call that function after a synchronisation, because it reads events.
        """
        exposed, stalls = self._exposed, self._stalls or []
        self._exposed, self._stalls = defaultdict(float), None if self._stalls is None else []

        def seconds() -> dict[str, float]:
            for axis, begin, end in stalls:
                exposed[axis] += begin.elapsed_time(end) / 1e3
            stalls.clear()
            return dict(exposed)

        return seconds

    def time_links(self) -> None:
        """Start measuring, on the CPU, how long each collective takes from its launch to its arrival."""
        self._flights = []

    def begin_flight(self, record: Collective) -> Callable[[], None] | None:
        """Note that a collective is sent; return the function to call on its arrival, on any thread, or None."""
        self.note_launch(record)
        if self._flights is None:
            return None
        began, flights = time.perf_counter(), self._flights
        return lambda: flights.append(Flight(record, began, time.perf_counter()))

    def note_launch(self, record: Collective) -> None:
        """Tell the listener that a collective, or one end of a message, is launched."""
        if self.listener is not None:
            self.listener.launched(record)

    def take_flights(self) -> list[Flight]:
        """Return the collectives that have arrived since `time_links`, and stop measuring."""
        flights, self._flights = self._flights or [], None
        return flights

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        """Neither count nor record what is launched inside the block."""
        kept = self.calls.copy(), self.wire_bytes.copy(), self._watchers
        self._watchers = []
        try:
            yield
        finally:
            self.calls, self.wire_bytes, self._watchers = kept

    @contextmanager
    def watch(self) -> Iterator[list[Collective]]:
        """Collect the records of what is launched inside the block."""
        records: list[Collective] = []
        self._watchers.append(records)
        try:
            yield records
        finally:
            # compare by identity, because two watchers may hold equal lists
            self._watchers = [kept for kept in self._watchers if kept is not records]


class TimedWait:
    """The block of `Ledger.waiting`. What a failed wait was for stays with the listener."""

    __slots__ = ("_began", "_ledger", "_on_gpu", "_record", "_stall")

    def __init__(self, ledger: Ledger, record: Collective, *, on_gpu: bool) -> None:
        self._ledger, self._record, self._on_gpu = ledger, record, on_gpu

    def __enter__(self) -> None:
        ledger, record = self._ledger, self._record
        if ledger._events is not None:
            ledger._events.append(Event("wait", record))
        if ledger.listener is not None:
            ledger.listener.waits(record)
        self._stall: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if self._on_gpu and ledger._stalls is not None:
            self._stall = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._stall[0].record()
        self._began = time.perf_counter()

    def __exit__(self, kind: object, *_: object) -> None:
        ledger, record = self._ledger, self._record
        if kind is not None:
            return
        if not self._on_gpu:
            ledger._exposed[record.axis] += time.perf_counter() - self._began
        elif self._stall is not None and ledger._stalls is not None:
            self._stall[1].record()
            ledger._stalls.append((record.axis, *self._stall))
        if ledger.listener is not None:
            ledger.listener.landed()

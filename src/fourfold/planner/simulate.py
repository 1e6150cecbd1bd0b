"""The simulation of a program on a machine, and its timeline.

The simulated device has one stream for computation and one for each lane of communication (an axis, or its gathers and
its reductions separately). A collective begins when the computation launched before it is done and its lane is free. It
first takes its latency, then the link, which transfers that cross nodes share, and those inside a node as far as the
machine says. A wait stops the computation until the collective has landed: that is exposed time. On a GPU the host
issues the work ahead of the device, one item after another; an item begins when it is issued and the device is free. On
the CPU the host computes itself: its time per item, and launching a collective, count as computation. A copy to the
host or back begins when the computation before it is done and the copies before it in its direction are; it shares no
link with collectives. Computation is slower by the machine's `contention` while anything is in flight, and a collective
is slower while the device computes if it has to wait for its `turn`.

Invariant: a program is played in its own order, and that is exact. Whatever is on a link at some moment was launched
before that moment.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from fourfold.axes import OFFLOAD
from fourfold.planner.machine import CARD, Seconds
from fourfold.planner.program import (
    AttentionOp,
    ComputeOp,
    CopyOp,
    HostWaitOp,
    LaunchOp,
    MatmulOp,
    MemoryOp,
    WaitOp,
    Work,
)
from fourfold.schedule.play import Played

COMPUTE = "compute"
"""The track of the timeline that shows computation."""


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """One piece of work on a track of the timeline: `compute`, or a lane."""

    track: str
    label: str
    start: float
    end: float
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds of a step or of a part of it."""

    seconds: float
    compute: float
    """Seconds of products and kernels, including the slowdown while collectives were in flight."""
    link: Mapping[str, float]
    """Seconds that collectives of each axis, and copies to the host and back, were in transfer."""
    exposed: Mapping[str, float]
    """Seconds that computation waited for each of these."""
    host: float = 0.0
    """Seconds that the device waited for the host, which was late with the next piece of work."""

    def plus(self, other: Totals, times: float = 1.0) -> Totals:
        """Return the sum of these totals and `times` the others."""

        def add(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
            return {axis: one.get(axis, 0.0) + times * two.get(axis, 0.0) for axis in (*one, *two)}

        return Totals(
            self.seconds + times * other.seconds,
            self.compute + times * other.compute,
            add(self.link, other.link),
            add(self.exposed, other.exposed),
            self.host + times * other.host,
        )


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step."""

    totals: Totals
    marks: list[tuple[str, Totals]]
    """The totals at the beginning of each phase."""
    spans: list[TimelineSpan]
    """All pieces of work, if the simulation kept a trace."""

    @property
    def seconds(self) -> float:
        return self.totals.seconds


@dataclass(slots=True)
class TransferInFlight:
    """A collective that was launched; see `TransferCost`."""

    flight: int
    label: str
    axis: str
    fixed: float
    """Seconds of latency that are left."""
    moving: float
    """Seconds on the link that are left, if nothing else uses it."""
    link: str
    beside: float
    load: float = 1.0
    start: float = 0.0


class PendingChanges(NamedTuple):
    """What happens next to the transfers under way."""

    first: float
    """The seconds until the first change."""
    transfers: list[tuple[float, float, str, TransferInFlight]]
    """For each transfer: the seconds until its latency is over or it has landed, the factor by which it is slower than
    alone, its lane, the transfer."""


class LinkQueues:
    """All lanes: the transfer under way on each, and those that wait behind it."""

    def __init__(self, spans: list[TimelineSpan] | None, sharing: float) -> None:
        self.now, self.sharing = 0.0, sharing
        self.landed: dict[int, float] = {}
        """When each collective landed."""
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.spans = spans
        self._queues: defaultdict[str, deque[TransferInFlight]] = defaultdict(deque)
        self.under_way: dict[str, TransferInFlight] = {}
        """The transfer of each busy lane."""

    def launch(self, lane: str, transfer: TransferInFlight, at: float) -> None:
        """Launch a transfer; `at` is not before any moment that was asked about."""
        self.advance(at)
        if lane in self.under_way:
            self._queues[lane].append(transfer)
        else:
            transfer.start = at
            self.under_way[lane] = transfer

    def land(self, flight: int) -> float:
        """Return when the collective lands, with the device standing still until then."""
        while flight not in self.landed:
            self.take(self.pending(computing=False))
        return self.landed[flight]

    def advance(self, until: float, *, computing: bool = False) -> None:
        while self.now < until and self.under_way:
            self.take(self.pending(computing=computing), until)
        if self.now < until:
            self.now = until

    def pending(self, *, computing: bool) -> PendingChanges:
        """Return what happens next to the transfers under way, if nothing is launched."""
        if len(self.under_way) == 1:  # it shares no link
            [(lane, one)] = self.under_way.items()
            slow = one.beside if computing else 1.0
            left = slow * (one.fixed if one.fixed > 0.0 else one.moving)
            return PendingChanges(left, [(left, slow, lane, one)])
        on_card, inside = 0.0, 0
        for one in self.under_way.values():
            if one.fixed <= 0.0:
                if one.link == CARD:
                    on_card += one.load
                else:
                    inside += 1
        shared = 1 + self.sharing * (inside - 1)
        on_card = max(1.0, on_card)  # nothing is slower while the cards have bandwidth left
        first, found = inf, []
        for lane, one in self.under_way.items():
            slow = one.beside if computing else 1.0
            if one.fixed > 0.0:
                left = slow * one.fixed
            else:
                # transfers that together need more than the network cards have are slowed down alike; those inside a
                # node share as it was measured
                slow *= on_card if one.link == CARD else shared
                left = slow * one.moving
            found.append((left, slow, lane, one))
            if left < first:
                first = left
        return PendingChanges(first, found)

    def take(self, pending: PendingChanges, until: float = inf) -> None:
        """Advance to the first of these changes, or to that time."""
        first, transfers = pending
        step = min(first, until - self.now)
        self.now += step
        for left, slow, lane, transfer in transfers:
            done = step / slow
            if transfer.fixed > 0.0:
                # assign 0 exactly: a rounding remainder would cost one more event
                transfer.fixed = 0.0 if step >= left else transfer.fixed - done
                if transfer.fixed == 0.0 and transfer.moving <= 0.0:
                    self._end(lane, transfer)
            elif step >= left:
                self._end(lane, transfer)
            else:
                transfer.moving -= done

    def _end(self, lane: str, transfer: TransferInFlight) -> None:
        self.landed[transfer.flight] = self.now
        self.busy[transfer.axis] += self.now - transfer.start
        if self.spans is not None:
            self.spans.append(TimelineSpan(lane, transfer.label, transfer.start, self.now))
        if queue := self._queues[lane]:
            following = self.under_way[lane] = queue.popleft()
            following.start = self.now
        else:
            del self.under_way[lane]


class Simulation:
    """The compute stream of a device, its links, and the two streams on which it copies to its host and back."""

    def __init__(self, seconds: Seconds, dtype: str, *, trace: bool) -> None:
        self.seconds, self.dtype, self.trace = seconds, dtype, trace
        self.spans: list[TimelineSpan] = []
        self.links = LinkQueues(self.spans if trace else None, seconds.machine.sharing)
        self.now = self.compute_seconds = self.host_seconds = 0.0
        self._issued = 0.0  # when the host has issued the work so far
        self._host_computes = seconds.machine.device == "cpu"
        self._per_item, self._contention = seconds.host.item, seconds.machine.contention
        self._axes: dict[int, str] = {}
        self._copied: dict[int, float] = {}  # when each copy is done
        self._copies_until = {False: 0.0, True: 0.0}  # when the stream of each direction is free
        self._exposed: defaultdict[str, float] = defaultdict(float)

    def play(self, item: Work, phase: str) -> None:
        if isinstance(item, WaitOp):
            self._wait(item.flight)
        elif isinstance(item, LaunchOp):
            self._issue(self._per_item)
            self._launch(item)
        elif isinstance(item, CopyOp):
            self._copy(item, phase)
        elif isinstance(item, HostWaitOp):
            self._issued = max(self._issued, self.now)
        elif not isinstance(item, MemoryOp):  # allocations take no time
            self._issue(self._per_item)
            begin = self.now
            self._compute(self._seconds(item))
            if self.trace:
                self.spans.append(TimelineSpan(COMPUTE, item.label, begin, self.now, phase))

    def _launch(self, item: LaunchOp) -> None:
        flight, record, lane = item
        cost = self.seconds.transfer(record)
        if cost.host:
            self._compute(cost.host)
        self._axes[flight] = record.axis
        transfer = TransferInFlight(
            flight, record.label, record.axis, cost.fixed, cost.moving, cost.link, cost.beside, cost.load
        )
        self.links.launch(lane, transfer, self.now)

    def _copy(self, item: CopyOp, phase: str) -> None:
        """Begin a copy behind the copies before it. Copy engines move its bytes, so it slows nothing down."""
        if self._host_computes:  # it copies from buffer to buffer
            self._compute(self.seconds.kernel(2 * item.nbytes))
            self._copied[item.flight] = self.now
            return
        self._issue(self._per_item)
        start = max(self.now, self._copies_until[item.back])
        end = start + self.seconds.copy(item.nbytes)
        self._copied[item.flight] = self._copies_until[item.back] = end
        self.links.busy[OFFLOAD] += end - start
        if self.trace:
            track = f"{OFFLOAD} {'back' if item.back else 'out'}"
            self.spans.append(TimelineSpan(track, item.label, start, end, phase))

    def _wait(self, flight: int) -> None:
        copied = self._copied.get(flight) if self._copied else None
        landed = self.links.land(flight) if copied is None else copied
        if landed > self.now:
            axis = self._axes[flight] if copied is None else OFFLOAD
            self._exposed[axis] += landed - self.now
            self.now = landed

    def finish(self) -> None:
        """End the step: the host has work beside the items, and collectives that nothing waits for land."""
        if self._host_computes:
            self._compute(self.seconds.host.step)
        else:
            self._issue(self.seconds.host.step)
        while self.links.under_way:
            self.links.take(self.links.pending(computing=False))

    def _issue(self, seconds: float) -> None:
        """Let the host issue what takes it this long; the device waits if it has nothing else to do."""
        if self._host_computes:
            return  # the host's time is part of what it computes
        self._issued += seconds
        if self._issued > self.now:
            self.host_seconds += self._issued - self.now
            self.now = self._issued

    def _seconds(self, item: ComputeOp) -> float:
        if isinstance(item, MatmulOp):
            sizes = item.m, item.k, item.n, self.dtype
            return self.seconds.products(*sizes, parts=item.parts, is_wgrad=item.is_wgrad, sent=item.sent)
        if isinstance(item, AttentionOp):
            return self.seconds.attention(item.flops, item.nbytes, self.dtype)
        return self.seconds.fused(item.nbytes) if item.fused else self.seconds.kernel(item.nbytes)

    def _compute(self, left: float) -> None:
        """Compute what takes `left` seconds alone; it takes longer while something is in flight."""
        begin, links, contention = self.now, self.links, self._contention
        links.advance(begin)
        while links.under_way and contention > 1.0:
            pending = links.pending(computing=True)
            change = links.now + pending.first
            done = (change - self.now) / contention
            if done >= left:
                self.now += left * contention
                links.take(pending, self.now)
                break
            left -= done
            links.take(pending)
            self.now = links.now
        else:
            self.now += left
        links.advance(self.now, computing=True)
        self.compute_seconds += self.now - begin

    def totals(self, seconds: float) -> Totals:
        return Totals(seconds, self.compute_seconds, dict(self.links.busy), dict(self._exposed), self.host_seconds)


def simulate(
    work: Sequence[Work], seconds: Seconds, dtype: str, *, phases: Sequence[tuple[int, str]] = (), trace: bool = False
) -> Timeline:
    """Play a program. With `trace` every span is kept, with the phase that it belongs to."""
    player, begins, marks, phase = Simulation(seconds, dtype, trace=trace), dict(phases), [], ""
    for index, item in enumerate(work):
        if index in begins:
            phase = begins[index]
            player.links.advance(player.now)
            marks.append((phase, player.totals(player.now)))
        player.play(item, phase)
    if len(work) in begins:
        player.links.advance(player.now)
        marks.append((begins[len(work)], player.totals(player.now)))
    player.finish()
    return Timeline(player.totals(max(player.now, player.links.now)), marks, player.spans)


def chrome_trace(spans: Sequence[TimelineSpan], *, process: str = "planned") -> dict[str, Any]:
    """Return the spans as Perfetto and chrome://tracing read them: one thread for each track, computation first."""
    tracks = sorted({span.track for span in spans}, key=lambda track: (track != COMPUTE, track))
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}}]
    for tid, track in enumerate(tracks):
        events.append({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": track}})
    for span in spans:
        microseconds = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
        category = span.phase or "communication"
        place = {"ph": "X", "pid": 0, "tid": tracks.index(span.track)}
        events.append({**place, "name": span.label, "cat": category, **microseconds})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def chrome_trace_of_pipe(played: Played) -> dict[str, Any]:
    """Return the actions of a schedule in the same format: one process for each pipe rank."""
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(played.spans):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pipe rank {rank}"}})
        for span in spans:
            microseconds = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            place = {"ph": "X", "pid": rank, "tid": span.action.stage}
            events.append({**place, "name": str(span.action), "cat": span.action.kind, **microseconds})
    return {"traceEvents": events, "displayTimeUnit": "ms"}

"""A program played on a machine: when each product and each collective begins and ends.

The device has one stream for computation and one for each lane of communication (an axis, or its gathers and its
reductions apart). A collective begins when the computation launched before it is done and its lane is free; it first
takes its latency, then the link, which transfers that cross nodes share. A wait holds computation until the flight has
landed: that is its exposed time. On the CPU the launch of a collective is computation.

Computation is slower by the machine's `contention` while anything is in flight, and what is in flight is slower while
the device computes, where it has to wait for its `turn`.

What is played in the program's order is exact: whatever is on a link at some moment was launched before it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from fourfold.planner.program import AttentionOp, ComputeOp, LaunchOp, MatmulOp, MemoryOp, WaitOp, Work
from fourfold.planner.seconds import CARD, Seconds

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """Something on a track of the timeline: `compute`, or a lane."""

    track: str
    label: str
    start: float
    end: float
    phase: str = ""


@dataclass(frozen=True, slots=True)
class Totals:
    """Seconds of a step or a part of it; they add up and scale."""

    seconds: float
    compute: float
    link: Mapping[str, float]
    exposed: Mapping[str, float]

    def plus(self, other: Totals, times: float = 1.0) -> Totals:
        """This and so many times the other."""
        return Totals(
            self.seconds + times * other.seconds,
            self.compute + times * other.compute,
            _plus(self.link, other.link, times),
            _plus(self.exposed, other.exposed, times),
        )


def _plus(one: Mapping[str, float], other: Mapping[str, float], times: float) -> dict[str, float]:
    return {axis: one.get(axis, 0.0) + times * other.get(axis, 0.0) for axis in (*one, *other)}


@dataclass(slots=True)
class Timeline:
    """A step as it would run."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    """Of products and kernels, slowed down where collectives were in flight."""
    link_seconds: dict[str, float] = field(default_factory=dict)
    """That collectives of each axis were on their way, from the beginning of the transfer to its end."""
    exposed_seconds: dict[str, float] = field(default_factory=dict)
    """That computation stood still for them."""
    spans: list[TimelineSpan] = field(default_factory=list)
    marks: list[tuple[str, Totals]] = field(default_factory=list)
    """What there was of everything when each phase began."""

    @property
    def totals(self) -> Totals:
        return Totals(self.seconds, self.compute_seconds, self.link_seconds, self.exposed_seconds)


@dataclass(slots=True)
class _Transfer:
    flight: int
    label: str
    axis: str
    launched: float
    fixed: float
    moving: float
    """Seconds of the link that are left, alone."""
    link: str
    beside: float
    """By which factor it is slower while the device computes."""
    start: float = 0.0


class LinkQueues:
    """All lanes: what queues on each, and the transfers under way."""

    def __init__(self, spans: list[TimelineSpan] | None) -> None:
        self.now = 0.0
        self.landed: dict[int, float] = {}
        self.busy: defaultdict[str, float] = defaultdict(float)
        self.spans = spans
        self._queues: dict[str, deque[_Transfer]] = {}
        self._under_way: dict[str, _Transfer] = {}

    def launch(self, lane: str, transfer: _Transfer) -> None:
        """At the moment `transfer.launched`, which is not before any moment that was asked about."""
        self.advance(transfer.launched)
        if lane in self._under_way:
            self._queues.setdefault(lane, deque()).append(transfer)
        else:
            self._begin(lane, transfer, transfer.launched)

    def _begin(self, lane: str, transfer: _Transfer, at: float) -> None:
        transfer.start = at
        self._under_way[lane] = transfer

    @property
    def idle(self) -> bool:
        return not self._under_way

    def land(self, flight: int) -> float:
        """When that flight lands; the links advance until then."""
        while flight not in self.landed:
            self.step()
        return self.landed[flight]

    def advance(self, until: float, *, computing: bool = False) -> None:
        while self.now < until and self._under_way:
            self.step(until, computing=computing)
        self.now = max(self.now, until)

    def pending(self, *, computing: bool) -> list[tuple[float, float, str, _Transfer]]:
        """Return for each transfer under way the seconds until its latency is over or it has landed, the factor by
        which it is slower than alone, its lane and itself."""
        on_card = 0
        for one in self._under_way.values():
            if one.link == CARD and one.fixed <= 0.0:
                on_card += 1
        found = []
        for lane, one in self._under_way.items():
            slow = one.beside if computing else 1.0
            if one.fixed > 0.0:
                found.append((slow * one.fixed, slow, lane, one))
            else:
                if one.link == CARD:
                    slow *= on_card
                found.append((slow * one.moving, slow, lane, one))
        return found

    def step(self, until: float = inf, *, computing: bool = False) -> None:
        """Advance to the next change, or until that time."""
        self.take(self.pending(computing=computing), until)

    def take(self, pending: list[tuple[float, float, str, _Transfer]], until: float = inf) -> None:
        """Advance to the first of these changes, or until that time."""
        step = min(min([left for left, _, _, _ in pending]), until - self.now)
        self.now += step
        for left, slow, lane, transfer in pending:
            done = step / slow
            if transfer.fixed > 0.0:
                transfer.fixed = 0.0 if step >= left else transfer.fixed - done
                if transfer.fixed == 0.0 and transfer.moving <= 0.0:
                    self._end(lane, transfer)
            elif step >= left:
                self._end(lane, transfer)
            else:
                transfer.moving -= done

    def _end(self, lane: str, transfer: _Transfer) -> None:
        self.landed[transfer.flight] = self.now
        self.busy[transfer.axis] += self.now - transfer.start
        if self.spans is not None:
            self.spans.append(TimelineSpan(lane, transfer.label, transfer.start, self.now))
        queue = self._queues.get(lane)
        if queue:
            self._begin(lane, queue.popleft(), self.now)
        else:
            del self._under_way[lane]


class Player:
    """The compute stream of a device, beside its links."""

    def __init__(self, seconds: Seconds, dtype: str, *, trace: bool) -> None:
        self.seconds, self.dtype = seconds, dtype
        self.timeline = Timeline()
        self.links = LinkQueues(self.timeline.spans if trace else None)
        self.trace = trace
        self.now = 0.0
        self._axes: dict[int, str] = {}
        self._exposed: defaultdict[str, float] = defaultdict(float)

    def play(self, item: Work, phase: str) -> None:
        if isinstance(item, LaunchOp):
            record, way = item.record, self.seconds.transfer(item.record)
            self._take(way.host)
            self._axes[item.flight] = record.axis
            transfer = _Transfer(
                item.flight, record.label, record.axis, self.now, way.fixed, way.moving, way.link, way.beside
            )
            self.links.launch(item.lane, transfer)
        elif isinstance(item, WaitOp):
            landed = self.links.land(item.flight)
            if landed > self.now:
                self._exposed[self._axes[item.flight]] += landed - self.now
                self.now = landed
        elif not isinstance(item, MemoryOp):  # a timeline has no memory
            begin = self.now
            self._take(self._seconds(item))
            if self.trace:
                self.timeline.spans.append(TimelineSpan(COMPUTE, item.label, begin, self.now, phase))

    def _take(self, seconds: float) -> None:
        begin = self.now
        self._compute(seconds)
        self.timeline.compute_seconds += self.now - begin

    def _seconds(self, item: ComputeOp) -> float:
        if isinstance(item, MatmulOp):
            return self.seconds.product(item.m, item.k, item.n, self.dtype)
        if isinstance(item, AttentionOp):
            return self.seconds.attention(item.flops, item.nbytes, self.dtype)
        return self.seconds.kernel(item.nbytes)

    def _compute(self, left: float) -> None:
        """Seconds of computation alone; each takes longer while something is in flight."""
        contention = self.seconds.machine.contention
        self.links.advance(self.now)
        while contention > 1.0 and not self.links.idle:
            pending = self.links.pending(computing=True)
            change = self.links.now + min([seconds for seconds, _, _, _ in pending])
            done = (change - self.now) / contention
            if done >= left:
                left *= contention
                break
            left -= done
            self.links.take(pending)
            self.now = self.links.now
        self.now += left
        self.links.advance(self.now, computing=True)

    def mark(self, phase: str) -> None:
        self.links.advance(self.now)
        line = self.timeline
        line.marks.append((phase, Totals(self.now, line.compute_seconds, dict(self.links.busy), dict(self._exposed))))

    def finish(self) -> Timeline:
        while not self.links.idle:
            self.links.step()
        self.timeline.seconds = max(self.now, self.links.now)
        self.timeline.link_seconds = dict(self.links.busy)
        self.timeline.exposed_seconds = dict(self._exposed)
        return self.timeline


def simulate(
    work: Sequence[Work],
    seconds: Seconds,
    dtype: str,
    *,
    phases: Sequence[tuple[int, str]] = (),
    trace: bool = False,
) -> Timeline:
    """Play a program. With `trace` every span is kept, with the phase that it belongs to."""
    player = Player(seconds, dtype, trace=trace)
    begins = dict(phases)
    phase = ""
    for index, item in enumerate(work):
        if index in begins:
            phase = begins[index]
            player.mark(phase)
        player.play(item, phase)
    return player.finish()


def chrome_trace(spans: Sequence[TimelineSpan], *, process: str = "planned") -> dict[str, Any]:
    """As Perfetto and chrome://tracing read it: one thread for each track, computation first."""
    tracks = sorted({span.track for span in spans}, key=lambda track: (track != COMPUTE, track))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": process}},
        *(
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": track}}
            for tid, track in enumerate(tracks)
        ),
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": tracks.index(span.track),
            "name": span.label,
            "cat": span.phase or "communication",
            "ts": span.start * 1e6,
            "dur": (span.end - span.start) * 1e6,
        }
        for span in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}

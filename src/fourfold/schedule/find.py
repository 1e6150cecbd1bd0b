"""Finds a schedule for a placement, the seconds of its stages and messages, and the memory that there is.

The search is list scheduling in simulated time: whenever a rank is free it runs the ready action that can start first;
of several, B of the oldest micro-batch, then F of the deepest stage, then W. Two knobs make every trade of memory for
time: **admission**, by which micro-batch i enters the first stage only after B of micro-batch i - admission there, and
a **limit**, by which an F that would take the rank past it waits for a W, but only if a W is owed, so that nothing can
deadlock. A third, **patience**, lets a rank wait a little for a message that is on the way before it begins a W. The
result is the fastest of the lists and of the named schedules that fits the memory.

The search is a pure function of its arguments, so all ranks find the same schedule: it is bounded by a number of
actions, never by a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from fourfold.schedule.action import Action, Schedule
from fourfold.schedule.named import BUILDERS, named
from fourfold.schedule.play import Played, StageSeconds, check_seconds, hop_seconds, play, play_within
from fourfold.schedule.stages import PLACEMENTS, place

TICKS = 1 << 24
"""Ticks of the longest action: whole numbers make equal times equal, where sums of floats differ in the last bit."""
PATIENCE = (0.0, 0.25, 0.5)
"""Shares of a W for which a rank waits for a message on the way instead: with slow messages or uneven stages, a W that
has just begun would delay what others wait for. More than one half never won."""
SHORT_MESSAGE = 0.2
"""Messages up to this share of the longest action are short. At 0.1 a list that ignores them still won on 8 ranks, at
0.3 none did."""
LISTED = ("F", "B", "W")
"""The kinds of actions in a list, by the number that stands for them while it is built."""
MOST_ACTIONS = 12_000
"""Actions that the lists of one search have before it begins no further one: two whole lists of 2,048 micro-batches
and stages, which take some 60 ms, or dozens of small ones. The first is always built."""


@dataclass(frozen=True)
class FoundSchedule:
    """The fastest schedule that the search knows, with its times and where it comes from."""

    played: Played
    name: str
    """The name of a named schedule, or `found` with admission and limit."""

    @property
    def schedule(self) -> Schedule:
        """The schedule itself."""
        return self.played.schedule


def find(
    placement: Sequence[int],
    micro_steps: int,
    seconds: StageSeconds,
    hop: float | Sequence[float] = 0.0,
    memory: float | Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
) -> FoundSchedule:
    """Return the fastest schedule that keeps at most `memory` on every rank.

    `memory` is one limit for all ranks or one for each, in the unit of `weights`, which is what a stage keeps of one
    micro-batch from F to W. By default a stage weighs one part in the chunks of a rank, so that `memory` counts
    micro-batches of a whole rank; without `memory` there is no limit.
    """
    search = _ListSearch(tuple(placement), micro_steps, seconds, hop, memory, weights)
    best = search.best_list()
    return best if search.is_optimal(best) else search.best_named(best)


def least_seconds(
    placement: Sequence[int], micro_steps: int, seconds: StageSeconds, hop: float | Sequence[float] = 0.0
) -> float:
    """Return a time that no schedule of this question is below."""
    search = _ListSearch(tuple(placement), micro_steps, seconds, hop, None, None)
    return search.least * search.tick


class _ListSearch:
    """One search: its question in whole numbers, and the lists that it builds."""

    def __init__(
        self,
        placement: tuple[int, ...],
        micro_steps: int,
        seconds: StageSeconds,
        hop: float | Sequence[float],
        memory: float | Sequence[float] | None,
        weights: Sequence[float] | None,
    ) -> None:
        stages, pipe = len(placement), max(placement) + 1
        if micro_steps < 1:
            raise ValueError(f"micro-batches={micro_steps}: a schedule needs at least 1")
        check_seconds(seconds, stages)
        self.placement, self.micro_steps, self.pipe, self.stages = placement, micro_steps, pipe, stages
        self.chunks = max(placement.count(rank) for rank in range(pipe))
        self.seconds, self.hop = seconds, hop
        self.weights = tuple(weights) if weights is not None else (1 / self.chunks,) * stages
        if len(self.weights) != stages:
            raise ValueError(f"{len(self.weights)} weights for {stages} stages: give one number for each stage")
        limits = [memory] * pipe if memory is None or isinstance(memory, int | float) else list(memory)
        if len(limits) != pipe:
            raise ValueError(f"{len(limits)} limits of memory for {pipe} ranks: give one number, or one for each rank")
        self.memory = [float("inf") if limit is None else limit for limit in limits]
        longest = max([value for kind in "FBW" for value in seconds[kind]] or [0.0]) or 1.0
        self.tick = longest / TICKS
        self.ticks = {kind: [round(value / self.tick) for value in seconds[kind]] for kind in "FBW"}
        self.hops = [round(value / self.tick) for value in hop_seconds(hop, stages)]
        self.work = [0] * pipe
        for stage, rank in enumerate(placement):
            self.work[rank] += micro_steps * sum(self.ticks[kind][stage] for kind in "FBW")
        self.whole = [sum(self.weights[s] for s in range(stages) if placement[s] == rank) for rank in range(pipe)]
        for rank in range(pipe):
            if not self.memory[rank] >= self.whole[rank]:  # nan neither
                raise ValueError(
                    f"memory={self.memory[rank]:g}: rank {rank} keeps {self.whole[rank]:g} for one micro-batch, so "
                    "no schedule fits; allow at least that, or make micro-batches smaller"
                )

    def best_list(self) -> FoundSchedule:
        """Return the fastest list that fits the memory; where messages are short, also of those that ignore them.

        A list that knows of messages takes an F because a B arrives a little later, and may lose more than the message.
        """
        schedule, name = self._best_of(MOST_ACTIONS // 2 if self.has_short_messages else MOST_ACTIONS)
        best = FoundSchedule(play(schedule, self.seconds, self.hop), name)
        if not self.has_short_messages or self.is_optimal(best):
            return best
        search = _ListSearch(self.placement, self.micro_steps, self.seconds, 0.0, self.memory, self.weights)
        schedule, name = search._best_of(MOST_ACTIONS // 2)
        played = play_within(schedule, self.seconds, self.hop, best.played.makespan)
        if played is None or played.makespan >= best.played.makespan:
            return best
        return FoundSchedule(played, f"{name}, as if without messages")

    @property
    def has_short_messages(self) -> bool:
        """Whether every message takes at most a small part of the longest action, and some message takes time."""
        longest = max(self.hops, default=0)
        return 0 < longest <= SHORT_MESSAGE * max(map(max, self.ticks.values()))

    def _best_of(self, left: int) -> tuple[Schedule, str]:
        """Return the fastest list that fits the memory, and its name, of lists that have so many actions together."""
        best: tuple[int, str, list[list[tuple[int, int, int]]]] | None = None
        for admission, lower, patience in self._knobs():
            if left <= 0 or (best is not None and best[0] <= self.least):
                break
            limits = [limit - lower * step for limit, step in zip(self.memory, self._steps(), strict=True)]
            bound = best[0] if best is not None else None
            built = _List(self, admission, limits, patience, bound)
            makespan, orders = built.run(), built.orders
            left -= sum(map(len, orders))
            if makespan is not None:
                said = "" if limits[0] == float("inf") else f", limit {min(limits):.4g}"
                said += f", patience {patience:g}" if patience else ""
                best = makespan, f"found: admission {admission}{said}", orders
        if best is None:
            raise RuntimeError("the first list fits every memory that holds one micro-batch on each rank")
        orders = tuple(tuple(Action(LISTED[kind], s, i) for kind, s, i in order) for order in best[2])
        return Schedule(self.stages, self.micro_steps, self.placement, orders), best[1]

    def best_named(self, best: FoundSchedule) -> FoundSchedule:
        """Return the fastest of this schedule and the named ones of the same placement that fit the memory."""
        known = [place(placement, self.pipe, self.chunks) for placement in PLACEMENTS]
        for name, (_, chunks) in BUILDERS.items():
            if self.chunks not in chunks or self.placement not in known:
                continue
            schedule = named(name, self.pipe, self.chunks, self.micro_steps)
            if schedule.placement == self.placement and self._fits(schedule):
                played = play_within(schedule, self.seconds, self.hop, best.played.makespan)
                if played is not None and played.makespan < best.played.makespan:
                    best = FoundSchedule(played, name)
        return best

    def is_optimal(self, found: FoundSchedule) -> bool:
        """Return whether no schedule can be faster: some rank begins as early as it can, and never waits again."""
        return found.played.makespan <= self.least * self.tick * (1 + 1e-6)

    @property
    def least(self) -> int:
        """Ticks that every schedule takes: a rank begins when F has come down to its first stage, and then works."""
        head, heads = 0, {}
        for stage, rank in enumerate(self.placement):
            heads.setdefault(rank, head)
            head += self.ticks["F"][stage]
            if stage + 1 < self.stages and self.placement[stage + 1] != rank:
                head += self.hops[stage]
        return max(heads[rank] + work for rank, work in enumerate(self.work))

    def _knobs(self) -> Iterator[tuple[int, int, float]]:
        """Yield admissions, how many steps the limit lies below the memory, and patience, the most promising first.

        The first list fits every memory, because no rank admits more than it may keep.
        """
        room = min(
            [limit / whole for limit, whole in zip(self.memory, self.whole, strict=True) if whole] or [float("inf")]
        )
        likely = max(1, min(self.pipe, int(room + 1e-9) if room < self.pipe else self.pipe))
        admissions = {likely, *range(max(1, self.pipe // 2), 2 * self.pipe + 1)}
        near = sorted(admissions, key=lambda admission: (abs(admission - likely), admission))
        lower = range(2 * self.chunks + 1) if room < self.micro_steps else range(1)
        steps = product(range(len(near)), range(len(lower)), range(len(PATIENCE)))
        for a, b, c in sorted(steps, key=lambda each: (sum(each), each)):
            yield near[a], lower[b], PATIENCE[c]

    def _steps(self) -> list[float]:
        """Return what one micro-batch of a rank's heaviest stage takes, by which limits are lowered."""
        return [
            max(self.weights[stage] for stage in range(self.stages) if self.placement[stage] == rank)
            for rank in range(self.pipe)
        ]

    def _fits(self, schedule: Schedule) -> bool:
        return all(schedule.peak(rank, self.weights) <= self.memory[rank] * (1 + 1e-9) for rank in range(self.pipe))


class _List:
    """One list: every rank runs what it can, in simulated time.

    Heaps hold whole numbers, which compare faster than tuples. A ready F is ordered by depth, then micro-batch; a ready
    B by micro-batch, then depth. An event has its time in the upper bits, and in the lower ones what happens: the
    number of a rank whose action ends, or the F or B of a stage and micro-batch whose message arrives.
    """

    def __init__(
        self, search: _ListSearch, admission: int, limits: Sequence[float], patience: float, bound: int | None
    ) -> None:
        self.placement, self.weights, self.count = search.placement, search.weights, search.micro_steps
        self.pipe, self.last, self.hops = search.pipe, search.stages - 1, search.hops
        self.took = search.ticks["F"], search.ticks["B"], search.ticks["W"]
        self.admission, self.patience = admission, patience
        ranks = range(search.pipe)
        self.ready_f: list[list[int]] = [[] for _ in ranks]
        self.ready_b: list[list[int]] = [[] for _ in ranks]
        self.owed: list[deque[int]] = [deque() for _ in ranks]
        self.promised: list[list[int]] = [[] for _ in ranks]
        """When messages of running actions will arrive on each rank, if ranks have patience."""
        self.events: list[int] = []
        self.each = search.stages * search.micro_steps
        self.shift = (search.pipe + 2 * self.each).bit_length()
        self.orders: list[list[tuple[int, int, int]]] = [[] for _ in ranks]
        self.busy, self.free, self.kept = [False] * search.pipe, [0] * search.pipe, [0.0] * search.pipe
        self.spare = [1 << 62 if bound is None else bound - 1 - work for work in search.work]
        """The ticks for which each rank may still wait, so that the makespan stays below the bound."""
        # sums of weights may differ from a limit in the last bits
        self.limits = [limit * (1 + 1e-9) for limit in limits]
        self.memory = [limit * (1 + 1e-9) for limit in search.memory]
        self.lanes: dict[tuple[int, int, int], int] = {}

    def run(self) -> int | None:
        """Build the orders and return the makespan; None if it reaches the bound or does not fit the memory."""
        first, events, shift = self.placement[0], self.events, self.shift
        mask = (1 << shift) - 1
        self.ready_f[first] = [self.last * self.count + micro for micro in range(min(self.admission, self.count))]
        now, touched = 0, [first]
        while True:
            for rank in touched:
                if not self.busy[rank] and not self._start(rank, now):
                    return None
            if not events:
                return now
            now, touched = events[0] >> shift, []
            while events and events[0] >> shift == now:
                what = heappop(events) & mask
                if what < self.pipe:
                    touched.append(what)
                    touched.append(self._end(what, now))
                else:
                    kind, place_of = divmod(what - self.pipe, self.each)
                    touched.append(self._ready(kind, *divmod(place_of, self.count)))

    def _start(self, rank: int, now: int) -> bool:
        """Start the best ready action of a free rank, if there is one; return whether the list can still win."""
        ready_f, owed, last = self.ready_f[rank], self.owed[rank], self.last
        if self.ready_b[rank]:
            micro, depth = divmod(heappop(self.ready_b[rank]), last + 1)
            kind, stage = 1, last - depth
        elif ready_f and not (
            owed and self.kept[rank] + self.weights[last - ready_f[0] // self.count] > self.limits[rank]
        ):
            depth, micro = divmod(heappop(ready_f), self.count)
            kind, stage = 0, last - depth
            self.kept[rank] += self.weights[stage]
            if self.kept[rank] > self.memory[rank]:
                return False
        elif owed and not (self.patience and not ready_f and self._expects(rank, now)):
            stage, micro = divmod(owed.popleft(), self.count)
            kind = 2
            self.kept[rank] -= self.weights[stage]
        else:
            return True
        self.spare[rank] -= now - self.free[rank]
        self.busy[rank] = True
        self.orders[rank].append((kind, stage, micro))
        end = now + self.took[kind][stage]
        heappush(self.events, end << self.shift | rank)
        if self.patience and kind < 2:
            after = stage - 1 if kind else stage + 1
            if 0 <= after <= last and self.placement[after] != rank:
                heappush(self.promised[self.placement[after]], end + self.hops[min(stage, after)])
        return self.spare[rank] >= 0

    def _expects(self, rank: int, now: int) -> bool:
        """Return whether a message will arrive so soon that a rank should wait for it instead of beginning a W."""
        promised = self.promised[rank]
        while promised and promised[0] <= now:
            heappop(promised)
        return bool(promised) and promised[0] < now + self.patience * self.took[2][self.owed[rank][0] // self.count]

    def _end(self, rank: int, now: int) -> int:
        """End the action of a rank; return the rank that can go on because of it, which may be itself."""
        self.busy[rank], self.free[rank] = False, now
        kind, stage, micro = self.orders[rank][-1]
        if kind == 2:
            return rank
        if kind == 1:
            self.owed[rank].append(stage * self.count + micro)
            if stage == 0:
                later = micro + self.admission
                return self._ready(0, 0, later) if later < self.count else rank
            after = border = stage - 1
        elif stage == self.last:
            return self._ready(1, stage, micro)
        else:
            after, border = stage + 1, stage
        target = self.placement[after]
        if target == rank or not self.hops[border]:
            return self._ready(kind, after, micro)
        lane = kind, rank, target
        self.lanes[lane] = arrival = max(now, self.lanes.get(lane, 0)) + self.hops[border]
        heappush(self.events, arrival << self.shift | self.pipe + kind * self.each + after * self.count + micro)
        return rank

    def _ready(self, kind: int, stage: int, micro: int) -> int:
        """Note that an F (0) or B (1) has its input; return its rank."""
        rank, depth = self.placement[stage], self.last - stage
        if kind:
            heappush(self.ready_b[rank], micro * (self.last + 1) + depth)
        else:
            heappush(self.ready_f[rank], depth * self.count + micro)
        return rank

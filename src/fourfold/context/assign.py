"""The assignment of tokens to the members of a context group: equally many each, and about equal attention.

All members of a group have the same rows, laid out as one line of M tokens. Documents are ranges of the line that do
not read each other; a token reads the tokens of its document up to itself. Each of c members holds M/c tokens, so that
every shape is known before the lengths of documents are. What the lengths decide is which tokens a member holds: whole
documents, or segments of those that are too long for one. With [a, b) a segment of a document, its attention is

    E14  area(a, b) = (b (b + 1) - a (a + 1)) / 2   pairs of query and key.

`assign_rows` cuts each row alike. `assign_documents` places documents by their lengths. Both are pure functions, so
that all members know the whole assignment without a message, and the planner and the page of a run know it without a
member. `plan_context` chooses between them as a policy says.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, permutations
from typing import NamedTuple

from fourfold.context_way import ContextWay


class Segment(NamedTuple):
    """The tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int

    @property
    def area(self) -> int:
        """E14: the pairs of query and key of its attention."""
        return area(self.start, self.stop)

    @property
    def tokens(self) -> int:
        return self.stop - self.start


def area(start: int, stop: int) -> int:
    """E14 of the tokens [start, stop) of a document."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


class SegmentOrder(NamedTuple):
    """The place of one member's segments among those of all members, in the order of documents and positions.

    Each member counts as having as many segments as the one that has most.
    """

    most: int
    """The number of segments of the member that has most."""
    order: list[int]
    """Which segment of all members, one member after the other, stands at each place of the order."""
    own: list[int]
    """The place of each segment of the member."""
    first: list[int]
    """The place of the first segment of the same document."""
    end: list[int]
    """The place behind the last segment of the same document."""


@dataclass(frozen=True)
class Assignment:
    """Which segments each member of a group holds."""

    lengths: tuple[int, ...]
    """The tokens of each document, in the order of the line."""
    members: tuple[tuple[Segment, ...], ...]
    """The segments of each member, in the order in which it holds them."""

    @property
    def whole_rows(self) -> bool:
        """Whether every document is a row, but for tokens behind the rows."""
        return len({*self.lengths} - {1}) == 1

    @cached_property
    def work(self) -> list[int]:
        """The attention of each member, in pairs of query and key."""
        return [sum(segment.area for segment in segments) for segments in self.members]

    @property
    def imbalance(self) -> float:
        """The attention of the busiest member divided by the mean."""
        return max(self.work) * len(self.work) / sum(self.work)

    def own(self, member: int) -> list[range]:
        """Return the tokens of a member, as ranges of the line."""
        starts = list(accumulate(self.lengths, initial=0))
        return [range(starts[document] + a, starts[document] + b) for document, a, b in self.members[member]]

    def rows(self, member: int) -> Iterator[tuple[range, Segment]]:
        """Yield the segments of a member with their places among its tokens."""
        start = 0
        for segment in self.members[member]:
            yield range(start, start + segment.tokens), segment
            start += segment.tokens

    def last(self, member: int) -> dict[int, int]:
        """Return how far a member reads each of its documents: up to its last token of it."""
        found: dict[int, int] = {}
        for document, _, stop in self.members[member]:
            found[document] = max(stop, found.get(document, 0))
        return found

    def sends(self, sender: int, reader: int) -> list[tuple[range, Segment]]:
        """Return what a member holds and another one reads, with its places among the sender's tokens."""
        last = self.last(reader)
        return [
            (rows[: last[document] - start], Segment(document, start, min(stop, last[document])))
            for rows, (document, start, stop) in self.rows(sender)
            if start < last.get(document, 0)
        ]

    def sent(self, sender: int, reader: int) -> int:
        """Return the number of tokens that a member holds and another one reads."""
        return sum(len(rows) for rows, _ in self.sends(sender, reader))

    @cached_property
    def moved(self) -> int:
        """The tokens whose K and V travel, counted once for every reader."""
        return sum(self.sent(*pair) for pair in permutations(range(len(self.members)), 2))

    def exchanged(self, member: int) -> tuple[int, int]:
        """Return the tokens that a member sends to others, counted once for every reader, and those that it gets."""
        others = [other for other in range(len(self.members)) if other != member]
        return sum(self.sent(member, other) for other in others), sum(self.sent(other, member) for other in others)

    def joined(self, neighbours: int) -> Assignment:
        """Return the assignment in which so many neighbouring members hold their tokens together."""
        if neighbours == 1:
            return self
        groups = zip(*[iter(self.members)] * neighbours, strict=True)
        return Assignment(self.lengths, tuple(tuple(chain.from_iterable(group)) for group in groups))

    def in_order(self) -> Assignment:
        """Return the same tokens by document and position, with segments that touch each other as one."""
        members = []
        for segments in self.members:
            held: list[Segment] = []
            for document, start, stop in sorted(segments):
                if held and held[-1][::2] == (document, start):
                    held[-1] = Segment(document, held[-1].start, stop)
                else:
                    held.append(Segment(document, start, stop))
            members.append(tuple(held))
        return Assignment(self.lengths, tuple(members))

    def segment_order(self, member: int) -> SegmentOrder:
        """Return where the segments of a member stand among those of all members."""
        most = max(map(len, self.members))
        numbered = sorted(
            (segment, holder * most + number)
            for holder, segments in enumerate(self.members)
            for number, segment in enumerate(segments)
        )
        places = {segment: place for place, (segment, _) in enumerate(numbered)}
        first: dict[int, int] = {}
        end: dict[int, int] = {}
        for place, (segment, _) in enumerate(numbered):
            first.setdefault(segment.document, place)
            end[segment.document] = place + 1
        held = self.members[member]
        return SegmentOrder(
            most,
            [number for _, number in numbered],
            [places[segment] for segment in held],
            [first[segment.document] for segment in held],
            [end[segment.document] for segment in held],
        )

    def of_documents(self, lengths: Sequence[int]) -> Assignment:
        """Return the same tokens as segments of other documents on the same line."""
        ends = list(accumulate(lengths))
        members = []
        for member in range(len(self.members)):
            held = []
            for tokens in self.own(member):
                start = tokens.start
                while start < tokens.stop:
                    document = bisect_right(ends, start)
                    stop, first = min(tokens.stop, ends[document]), ends[document] - lengths[document]
                    held.append(Segment(document, start - first, stop - first))
                    start = stop
            members.append(tuple(held))
        return Assignment(tuple(lengths), tuple(members))


@lru_cache(maxsize=64)
def assign_rows(rows: int, seq: int, lengths: tuple[int, ...], members: int) -> Assignment:
    """Cut each row into 2c chunks and give member i chunks i and 2c - 1 - i: equal causal attention, if a row is one
    document. `lengths` are those of the documents, with tokens behind the rows that make all members equal.

    Where 2c does not divide `seq`, chunks differ by a token, and all rows together give each member equally many.
    """
    behind = sum(lengths) - rows * seq
    placed = _Placed((*(seq,) * rows, *[1] * behind), members)
    for row in range(rows):
        shares = [seq // members] * members
        for member in sorted(range(members), key=lambda one: -placed.room[one])[: seq % members]:
            shares[member] += 1
        placed.cut(row, shares)
    for extra in range(rows, rows + behind):
        placed.place(extra)
    return placed.assignment().of_documents(lengths)


ENOUGH = 1.05
"""Members whose attention is at most this factor above the mean are balanced; nothing more is cut for it."""
FILLED = 1.02
"""A member that takes a part of a cut document is filled up to this factor above the mean. The rest up to `ENOUGH` is
for what cannot be foreseen: with 1.03 more assignments of many members miss `ENOUGH` and are made again."""
SHORT = 0.005
"""Documents with at most this part of the mean attention of a member are short: they go to whoever needs most, without
a look at where that member ends."""
FRONTS = 0, 1 / 8, 1 / 4, 3 / 8, 1 / 2
"""The shares of a cut document that are tried for the front that all its members hold equally much of."""


@lru_cache(maxsize=64)
def assign_documents(lengths: tuple[int, ...], members: int) -> Assignment:
    """Give each member equally many tokens and about equal attention, and move few keys and values.

    Documents are placed longest first, each whole on one member if it can be. A member ends with what it has, and with
    its room filled by documents still to come, at best by the shortest of all. If it would end too far above the mean
    even then, or if nobody has room, the document is cut.

    A document of L tokens moves sum_j last_j - L tokens if member j holds tokens of it up to last_j. So few members
    share it, and the one that holds its end holds as many tokens before the end as it may, then the next one, and so on
    (`_Placed.ranges`). This plans with the shortest documents beside a cut one. Where that does not end in balance,
    all is placed again with average documents beside it, and then in pairs of chunks with a look at every document.
    """
    tried = []
    for ways, short in ((("shortest", "average"), SHORT), (("average",), SHORT), ((), 0.0)):
        placed = _Placed(lengths, members)
        placed.place_by_length(ways, short)
        if max(placed.done) <= placed.limit:
            return placed.assignment()
        tried.append(placed)
    return min(reversed(tried), key=lambda placed: max(placed.done)).assignment()


def choose_way(assignment: Assignment) -> ContextWay:
    """Return `exchange` if that moves less than half of what `gather` does, else `gather`."""
    members = len(assignment.members)
    all_tokens = (members - 1) * sum(assignment.lengths)
    return ContextWay("exchange" if 2 * assignment.moved < all_tokens else "gather")


def plan_context(
    placing: str, way: str, rows: int, seq: int, members: int, documents: Sequence[int] | None = None
) -> tuple[Assignment, ContextWay]:
    """Return who holds which tokens of [rows, seq] in a context group, and how K and V travel.

    `placing` and `way` are `assignment` and `context_way` of a policy. `documents` are the lengths of packed documents,
    in all rows one after another, where they are known. Tokens that are lacking for equally many on each member are
    added at the end, each a document of its own.
    """
    known = (seq,) * rows if documents is None else map(operator.index, documents)
    lengths = (*known, *[1] * (-rows * seq % members))
    by_rows = placing == "rows" or (placing == "auto" and documents is None)
    assignment = assign_rows(rows, seq, lengths, members) if by_rows else assign_documents(lengths, members)
    return assignment, choose_way(assignment) if way == "auto" else ContextWay.parse(way)


class _Placed:
    """What members hold while documents are placed."""

    def __init__(self, lengths: tuple[int, ...], members: int) -> None:
        self.tokens = sum(lengths)
        """The tokens of the documents that are still to come."""
        if self.tokens % members or not self.tokens:
            raise ValueError(f"{self.tokens} tokens cannot be cut evenly over context={members}")
        self.work = (sum(map(operator.mul, lengths, lengths)) + self.tokens) // 2
        """Their attention: E14 of [0, n) is (n n + n) / 2."""
        self.lengths, self.mean = lengths, self.work / members
        self.limit = ENOUGH * self.mean
        self.held: list[list[tuple[int, int, int]]] = [[] for _ in range(members)]
        """The segments of each member."""
        self.room = [self.tokens // members] * members
        self.done = [0] * members
        """The attention of each member so far."""

    @cached_property
    def _shortest(self) -> tuple[list[int], list[int]]:
        """Tokens of the shortest documents, and the sum of their squares, by their number."""
        shortest = sorted(self.lengths)
        squares = map(operator.mul, shortest, shortest)
        return list(accumulate(shortest, initial=0)), list(accumulate(squares, initial=0))

    def place_by_length(self, ways: Sequence[str], short: float) -> None:
        """Place all documents, longest first.

        `ways` are what to plan with beside a cut document, before pairs of chunks. Documents with at most the part
        `short` of a member's mean attention are placed by `place_short`.
        """
        order = sorted(range(len(self.lengths)), key=self.lengths.__getitem__, reverse=True)
        first = bisect_left(order, True, key=lambda one: area(0, self.lengths[one]) <= short * self.mean)
        for document in order[:first]:
            self.place(document, ways)
        self.place_short(order[first:])

    def place(self, document: int, ways: Sequence[str] = ()) -> None:
        """Place the longest document that is left."""
        length, room, done = self.lengths[document], self.room, self.done
        own = length * (length + 1) // 2
        self.tokens, self.work = self.tokens - length, self.work - own
        to_come = self.work / self.tokens if self.tokens else 0.0
        ends = [each + free * to_come for each, free in zip(done, room, strict=True)]
        whole = ends.index(min(ends))
        if room[whole] < length:
            whole = min(range(len(room)), key=lambda one: (room[one] < length, ends[one]))
        if room[whole] >= length:
            more = own - length * to_come  # that it adds to the end of a member, beside documents to come
            fits = more <= 0 or ends[whole] + more <= self.limit
            if not fits:
                full = sum(room[one] for one, end in enumerate(ends) if end > self.limit and one != whole)
                fits = done[whole] + own + self._filling(full, room[whole] - length) <= self.limit
            if fits:
                self.held[whole].append((document, 0, length))
                room[whole], done[whole] = room[whole] - length, done[whole] + own
                return
        for way in ways:
            if ranges := self.ranges(length, ends, None if way == "shortest" else to_come):
                self.hold(document, ranges)
                return
        # one that adds less than those to come still needs shares: a little, far above what rounding adds to an end
        more = max(own / length - to_come, 1e-9 * self.limit)
        self.cut(document, self._levelled(length, more, ends))

    def place_short(self, order: Sequence[int]) -> None:
        """Place documents that hardly change where a member ends, longest first.

        Each goes to the member that needs most attention for a token of its room, among those that have room for it.
        """
        lengths, room, done, held, mean = self.lengths, self.room, self.done, self.held, self.mean
        queue = sorted(((done[one] - mean) / room[one], one) for one in range(len(room)) if room[one])
        for document in order:
            length = lengths[document]
            for number, (_, member) in enumerate(queue):
                if room[member] >= length:
                    del queue[number]
                    held[member].append((document, 0, length))
                    done[member] += length * (length + 1) // 2
                    room[member] = left = room[member] - length
                    if left:
                        insort(queue, ((done[member] - mean) / left, member))
                    break
            else:  # nobody has room: the roomiest has the end, and so on
                stop, ranges = length, []
                for member in sorted(range(len(room)), key=lambda one: (-room[one], one)):
                    if stop:
                        ranges.append((member, max(0, stop - room[member]), stop))
                        stop = ranges[-1][1]
                self.hold(document, ranges)
                queue = sorted(((done[one] - mean) / room[one], one) for one in range(len(room)) if room[one])

    def hold(self, document: int, ranges: Iterable[tuple[int, int, int]]) -> None:
        """Give members ranges of a document: (member, start, stop)."""
        for member, start, stop in ranges:
            self.held[member].append((document, start, stop))
            self.done[member] += area(start, stop)
            self.room[member] -= stop - start

    def _filling(self, before: int, tokens: int) -> float:
        """Return the least attention of so many tokens, if so many others have the shortest documents to come."""
        return self._least(min(self.tokens, before + tokens)) - self._least(min(self.tokens, before))

    def _least(self, tokens: int) -> float:
        """Return the least attention that so many tokens can have."""
        ends, squares = self._shortest
        number = bisect_right(ends, tokens) - 1
        work = (squares[number] + ends[number]) / 2
        if part := tokens - ends[number]:  # of the next document, whose length and attention follow from the sums
            length = ends[number + 1] - ends[number]
            work += part / length * area(0, length)
        return work

    def ranges(self, length: int, ends: Sequence[float], to_come: float | None) -> list[tuple[int, int, int]]:
        """Return (member, start, stop) of a document's ranges over the fewest members that take it, or nothing.

        `ends` are where members end without it. The rest of a member's room is filled with attention `to_come` for each
        token, or with the shortest documents that are left.
        """
        order = sorted((one for one in range(len(ends)) if self.room[one]), key=lambda one: (ends[one], one))
        # members that are full but for the shortest documents have those
        full = sum(self.room[one] for one in order if ends[one] > self.limit)
        tokens = accumulate(self.room[one] for one in order)
        for number, room in enumerate(tokens, start=1):
            if room >= length:
                tried = (self._by_end(order[:number], length, int(share * length), full, to_come) for share in FRONTS)
                if found := [ranges for ranges in tried if ranges]:
                    return min(found, key=_cost)
        return []

    def _by_end(
        self, members: Sequence[int], length: int, front: int, full: int, to_come: float | None
    ) -> list[tuple[int, int, int]]:
        """Return ranges of a document: the first member has the end, the next one what is before it, and so on.

        All share its first `front` tokens, which all but one of them read. With them no single member sends most, and
        who has many tokens of the middle has room for them.
        """
        level = FILLED * self.mean if to_come is None else self.limit
        ranges: list[tuple[int, int, int]] = []
        start, stop = 0, length
        for number, member in enumerate(members):
            share = min(self.room[member], -((start - front) // (len(members) - number)))
            room, done = self.room[member] - share, self.done[member] + area(start, start + share)
            if share:
                ranges.append((member, start, start + share))
                start += share
            if not room or stop == front:
                continue
            filling = self._filling(full, room) if to_come is None else room * to_come
            first = max(front, stop - room, _lowest(front, stop, filling / room, level - done - filling))
            if first < stop:
                ranges.append((member, first, stop))
            full, stop = full + room - (stop - first), first  # the rest of its room takes the shortest documents
        return ranges if start == stop == front else []

    def _levelled(self, length: int, more: float, ends: Sequence[float]) -> list[int]:
        """Return how many tokens of a document each member takes, so that all that take some end alike.

        They are the fewest that can do so below the limit, if any can.
        """
        order = sorted(range(len(ends)), key=ends.__getitem__)

        def taken(level: float, members: Sequence[int]) -> list[int]:
            return [min(self.room[one], max(0, int((level - ends[one]) / more))) for one in members]

        together = list(accumulate(taken(self.limit, order)))
        chosen = order[: 1 + bisect_left(together, length)]
        low, high = ends[order[0]], ends[order[-1]] + more * (length + 1)
        while high - low > more / 2:
            middle = (low + high) / 2
            low, high = (low, middle) if sum(taken(middle, chosen)) >= length else (middle, high)
        shares = [0] * len(ends)
        left = length
        for member, tokens in zip(chosen, taken(high, chosen), strict=True):
            shares[member] = min(left, tokens)
            left -= shares[member]
        return shares

    def cut(self, document: int, shares: Sequence[int]) -> None:
        """Give each member so many tokens of a document, half of them from its front and half from its back.

        The first of them has the first chunk and the last one, the second those next to them, and so on.
        """
        start, stop = 0, self.lengths[document]
        for member, tokens in ((member, tokens) for member, tokens in enumerate(shares) if tokens):
            front = max(1, tokens // 2) if tokens < stop - start else tokens  # the last one takes what is left
            both = (member, start, start + front), (member, stop - tokens + front, stop)
            self.hold(document, (each for each in both if each[1] < each[2]))
            start, stop = start + front, stop - tokens + front

    def assignment(self) -> Assignment:
        segment = partial(tuple.__new__, Segment)  # Segment(...) is slower for a thousand documents
        return Assignment(self.lengths, tuple(tuple(map(segment, sorted(held))) for held in self.held))


def _lowest(front: int, stop: int, beside: float, budget: float) -> int:
    """Return the first token of the longest range up to `stop` whose attention is within a budget.

    Each token of the range saves the attention `beside` of another one. The attention less what is saved of [a, stop)
    is g(stop) - g(a) with g(x) = x (x + 1) / 2 - x beside, which is a parabola in a.
    """
    least = stop * (stop + 1) / 2 - stop * beside - budget  # that g(a) must have
    if front * (front + 1) / 2 - front * beside >= least:
        return front
    half = beside - 0.5
    root = half * half + 2 * least
    return front if root <= 0 else min(stop, max(front, math.ceil(half + math.sqrt(root))))


def _cost(ranges: Sequence[tuple[int, int, int]]) -> int:
    """Return how many tokens travel, and besides what the busiest member sends twice and receives once.

    Forward and backward bring K and V; gradients take the same way back once.
    """
    last: dict[int, int] = {}
    for member, _, stop in ranges:
        last[member] = max(stop, last.get(member, 0))
    busy = dict.fromkeys(last, 0)
    for member, start, stop in ranges:
        for reader, end in last.items():
            if reader != member and end > start:
                tokens = min(end, stop) - start
                busy[member] += 2 * tokens
                busy[reader] += tokens
    return sum(last.values()) - max(last.values()) + max(busy.values())

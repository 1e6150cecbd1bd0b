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
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
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


@lru_cache(maxsize=64)
def assign_documents(lengths: tuple[int, ...], members: int) -> Assignment:
    """Give each member equally many tokens and about equal attention, and move few keys and values.

    Documents are placed longest first, each whole on one member if it can be. A member ends with what it has, and with
    its room filled by documents still to come, at best by the shortest of all. If it would end too far above the mean
    even then, or if nobody has room, the document is cut over the fewest members that take it without ending there.
    """
    placed = _Placed(lengths, members)
    for document in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        placed.place(document)
    return placed.assignment()


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
        self.tokens, self.work = sum(lengths), sum(area(0, length) for length in lengths)
        """The tokens and the attention of the documents that are still to come."""
        if self.tokens % members or not self.tokens:
            raise ValueError(f"{self.tokens} tokens cannot be cut evenly over context={members}")
        self.lengths, self.limit = lengths, ENOUGH * self.work / members
        self.held: list[list[Segment]] = [[] for _ in range(members)]
        self.room = [self.tokens // members] * members
        self.done = [0] * members
        """The attention of each member so far."""
        shortest = sorted(lengths)
        areas = (area(0, length) for length in shortest)
        self._shortest = list(accumulate(shortest, initial=0)), list(accumulate(areas, initial=0))
        """Tokens and attention of the shortest documents, by their number."""

    def place(self, document: int) -> None:
        """Place the longest document that is left."""
        length, own, room, done = self.lengths[document], area(0, self.lengths[document]), self.room, self.done
        self.tokens, self.work = self.tokens - length, self.work - own
        to_come = self.work / self.tokens if self.tokens else 0.0
        whole, least = -1, math.inf
        for member in range(len(room)):
            if room[member] >= length and (end := done[member] + room[member] * to_come) < least:
                whole, least = member, end
        more = own / length - to_come  # that a token adds to the end of a member, beside one of those to come
        fits = more <= 0 or least + length * more <= self.limit
        if whole >= 0 and (fits or done[whole] + own + self._least(room[whole] - length) <= self.limit):
            self.held[whole].append(Segment(document, 0, length))
            room[whole] -= length
            done[whole] += own
        else:
            ends = [each + free * to_come for each, free in zip(done, room, strict=True)]
            self.cut(document, self._levelled(length, more, ends))

    def _least(self, tokens: int) -> float:
        """Return the least attention that so many tokens can have."""
        ends, work = self._shortest
        number = bisect_right(ends, tokens) - 1
        if tokens == ends[number]:
            return work[number]
        share = (tokens - ends[number]) / (ends[number + 1] - ends[number])
        return work[number] + share * (work[number + 1] - work[number])

    def _levelled(self, length: int, more: float, ends: Sequence[float]) -> list[int]:
        """Return how many tokens of a document each member takes, so that all that take some end alike.

        They are the fewest that can do so below the limit, if any can.
        """
        more = max(more, 1e-9 * self.limit)  # far above what rounding adds to an end
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
            for a, b in ((start, start + front), (stop - tokens + front, stop)):
                if a < b:
                    self.held[member].append(Segment(document, a, b))
                    self.done[member] += area(a, b)
            start, stop = start + front, stop - tokens + front
            self.room[member] -= tokens

    def assignment(self) -> Assignment:
        return Assignment(self.lengths, tuple(tuple(sorted(held)) for held in self.held))

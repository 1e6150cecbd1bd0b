"""What K and V send inside a context group in forward of one layer: E16 (`context.move`), from an assignment alone.

Sizes are those of one token on one rank: `query` of its queries, h_q d, and `key` of its keys and values, 2 h_kv d. In
elements or in bytes, as the caller gives them. This file imports no torch: the page of a run counts with it.
"""

from __future__ import annotations

from collections import Counter
from itertools import permutations

from fourfold.context.assign import Assignment
from fourfold.context_way import ContextWay


def moved_by(assignment: Assignment, way: ContextWay, member: int, query: int, key: int) -> tuple[int, int]:
    """Return what a member sends (E16), and what it receives."""
    near = way.neighbours
    holders, here = assignment.joined(near), member // near
    others = len(holders.members) - 1
    swapped = sum(segment.tokens for segment in assignment.members[member]) * (near - 1) * (2 * query + key) // near
    if way.over == "exchange":
        sent, received = holders.exchanged(here)
    else:
        sent = received = others * sum(segment.tokens for segment in holders.members[here])
    return swapped + sent * key // near, swapped + received * key // near


def moved_by_document(assignment: Assignment, way: ContextWay, query: int, key: int) -> list[int]:
    """Return what each document makes all members send together."""
    near = way.neighbours
    holders = assignment.joined(near)
    if way.over == "exchange":
        tokens: Counter[int] = Counter()
        for pair in permutations(range(len(holders.members)), 2):
            for rows, segment in holders.sends(*pair):
                tokens[segment.document] += len(rows)
        moved = [tokens[document] for document in range(len(assignment.lengths))]
    else:
        moved = [(len(holders.members) - 1) * length for length in assignment.lengths]
    swapped = (near - 1) * (2 * query + key)
    return [length * swapped // near + each * key for length, each in zip(assignment.lengths, moved, strict=True)]


def members_by_document(assignment: Assignment) -> list[int]:
    """Return over how many members each document is cut."""
    held = Counter(document for segments in assignment.members for document in {one.document for one in segments})
    return [held[document] for document in range(len(assignment.lengths))]

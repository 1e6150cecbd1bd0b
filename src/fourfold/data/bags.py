"""Bags of whole documents: which documents a step trains on, and which bag each of them lies in.

A bag is a line of some rows of tokens, and documents of any length up to that of a bag lie in it whole, one after
another. A step has equally many bags whatever the grid is. Documents come in an order of their own in every epoch,
each once. Those of a step are placed longest first, each in the bag that has the least attention so far and has room,
so that places with a bag each work about equally long. A document that finds no room waits, and is among the first of
the next step. What is left of a bag is padding.

A document of n tokens has n - 1 inputs, each with the next token as its target. One with more inputs than a bag has
tokens is cut into pieces, all but the last as long as a bag, which come as if they were documents.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, count
from math import ceil
from typing import Any, NamedTuple

import torch

from fourfold.data.sampling import SampleOrder, SourceWindows
from fourfold.data.token_files import TokenSource

LEAST, PART = 64, 8
"""A step chooses from this many documents at least, but not from more than this part of an epoch: from few, bags are
left with more padding; from many, short documents wait for long."""
TRIED = 20_000
"""The number of documents whose bags are filled to estimate the steps of an epoch: it takes less than a second."""
MOST_PADDING = 64
"""The most tokens of a document of padding: short ones have hardly any attention, and fill members of a context group
evenly."""


class PackedPiece(NamedTuple):
    """Inputs of a document: the tokens [start, start + inputs) of a source, whose targets lie one further."""

    source: int
    start: int
    inputs: int


class BagOrder(SampleOrder):
    """The bags of a run in their order, from a seed. The position can be saved and restored.

    A sample is a document, or a piece of one that is longer than a bag. The next one comes from the source that has had
    the fewest tokens for its weight.
    """

    pack = "whole"

    def __init__(
        self,
        sources: Sequence[TokenSource],
        windows: Sequence[SourceWindows],
        weights: Sequence[float] | None,
        seed: int,
        *,
        bags: int,
        tokens: int,
    ) -> None:
        """`windows` say which tokens are held out. A step has so many bags of so many tokens."""
        super().__init__(windows, weights, seed)
        self.bags, self.tokens = bags, tokens
        self.pieces = [
            DocumentPieces(source, one.train * one.seq, tokens) for source, one in zip(sources, windows, strict=True)
        ]
        self.given_tokens = [0] * len(self.pieces)
        self.waiting: tuple[tuple[int, int], ...] = ()
        """The samples that have found no room yet, the oldest first, as (source, number)."""

    def inputs(self, source: int, number: int) -> range:
        """Return the inputs of sample `number` of a source, as its tokens; a document of one token has none."""
        return self.pieces[source][self._permuted(source, number, len(self.pieces[source]))]

    def take_bags(self) -> list[list[PackedPiece]]:
        """Return the pieces in each bag of the next step."""
        pool = [(sample, self.inputs(*sample)) for sample in self.waiting]
        least = min(LEAST, sum(map(len, self.pieces)) // PART)
        pool += self._draw(self.bags * self.tokens - sum(len(inputs) for _, inputs in pool), least - len(pool))
        ages = {sample: age for age, (sample, _) in enumerate(pool)}
        # the oldest one first, so that none waits for ever
        pool[1:] = sorted(pool[1:], key=lambda one: -len(one[1]))
        found: list[list[PackedPiece]] = [[] for _ in range(self.bags)]
        room = [self.tokens] * self.bags
        order = [(0, bag) for bag in range(self.bags)]
        """The attention of every bag so far, in pairs of query and key, and its number; the least first."""
        waiting = []
        for sample, inputs in pool:
            place = next((place for place, (_, bag) in enumerate(order) if room[bag] >= len(inputs)), None)
            if place is None:
                waiting.append(sample)
                continue
            work, bag = order.pop(place)
            found[bag].append(PackedPiece(sample[0], inputs.start, len(inputs)))
            room[bag] -= len(inputs)
            insort(order, (work + len(inputs) * (len(inputs) + 1) // 2, bag))
        self.waiting = tuple(sorted(waiting, key=ages.__getitem__))
        return found

    def _draw(self, tokens: int, least: int) -> list[tuple[tuple[int, int], range]]:
        """Draw samples until they have so many inputs and are so many at least; return them with their inputs."""
        drawn: list[tuple[tuple[int, int], range]] = []
        empty = 0
        while tokens > 0 or len(drawn) < least:
            source, number = self._next()
            inputs = self.inputs(source, number)
            self.given_tokens[source] += len(inputs)
            empty = 0 if inputs else empty + 1
            if empty > sum(map(len, self.pieces)):
                names = ", ".join(one.name for one in self.sources)
                raise ValueError(f"no document of {names} has two tokens to train on; give other data")
            if inputs:
                drawn.append(((source, number), inputs))
                tokens -= len(inputs)
        return drawn

    def _next(self) -> tuple[int, int]:
        source = min(range(len(self.weights)), key=lambda one: (self.given_tokens[one] * self._periods[one], one))
        self.sample += 1
        self.given[source] += 1
        return source, self.given[source] - 1

    def state(self) -> dict[str, Any]:
        more = {"given_tokens": list(self.given_tokens), "waiting": [list(sample) for sample in self.waiting]}
        return {**super().state(), **more}

    def _restore_more(self, state: dict[str, Any], given: Sequence[int]) -> None:
        try:
            tokens, waiting = list(state["given_tokens"]), [(source, number) for source, number in state["waiting"]]
            numbers = [*tokens, *(number for sample in waiting for number in sample)]
            if len(tokens) != len(given) or not all(type(number) is int and number >= 0 for number in numbers):
                raise TypeError("a count is not a whole number")
            if any(source >= len(given) or number >= given[source] for source, number in waiting):
                raise TypeError("a document waits that was not drawn")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this position is damaged: {error}; pass what state() returned") from error
        self.given_tokens, self.waiting = tokens, tuple(waiting)

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "tokens of a bag": self.tokens}


class DocumentPieces:
    """The inputs of the training documents of a source: those of each document, then further pieces of long ones."""

    def __init__(self, source: TokenSource, last: int, longest: int) -> None:
        """Token `last` is the last one that is trained on, as a target. A piece has at most `longest` inputs."""
        self.documents = source.documents_before(last)
        if not self.documents:
            raise ValueError(f"no document of {source.name} begins before token {last}; give other data")
        self._source, self._last, self._longest = source, last, longest
        long, number = [], 0
        for lengths in source.document_lengths():
            long.append(number + (lengths - 1 > longest).nonzero().flatten())
            number += len(lengths)
        self._long = [one for one in torch.cat(long).tolist() if one < self.documents]
        sizes = [len(self._document(one)) for one in self._long]
        self.longest_cut = max((size for size in sizes if size > longest), default=0)
        """The inputs of the longest document that is cut; 0 if none is."""
        self.cut = sum(size > longest for size in sizes)
        """The number of documents that are cut."""
        self._ends = list(accumulate(max(0, -(-size // longest) - 1) for size in sizes))
        """The number of further pieces of long documents, up to each of them."""

    def __len__(self) -> int:
        return self.documents + (self._ends[-1] if self._ends else 0)

    def __getitem__(self, index: int) -> range:
        if index < self.documents:
            return self._document(index)[: self._longest]
        further = index - self.documents
        long = bisect_right(self._ends, further)
        piece = 1 + further - (self._ends[long - 1] if long else 0)
        return self._document(self._long[long])[piece * self._longest : (piece + 1) * self._longest]

    def _document(self, number: int) -> range:
        tokens = self._source.document(number)
        return range(tokens.start, max(tokens.start, min(tokens.stop - 1, self._last)))

    @property
    def inputs(self) -> int:
        """The inputs of all documents; a document without any token counts as one input less."""
        return self._last + 1 - self.documents


def steps_of_epochs(order: BagOrder, epochs: Fraction) -> int:
    """Return the number of steps that take about so many epochs, by the padding of the first ones of a new order."""
    taken = 0
    for number in count(1):
        taken += sum(piece.inputs for bag in order.take_bags() for piece in bag)
        if order.sample >= min(sum(map(len, order.pieces)), TRIED):
            return max(1, ceil(epochs * sum(each.inputs for each in order.pieces) * number / taken))
    raise RuntimeError("an order has no end")


def check_bag_rows(bag_rows: int, rows: int) -> None:
    """Raise unless the rows of a place in a micro-batch are whole bags."""
    if bag_rows < 1 or rows % bag_rows:
        raise ValueError(
            f"bag_rows={bag_rows}: a place has {rows} rows in a micro-batch, which is no multiple of it; use "
            f"bag_rows={most_bag_rows(bag_rows or rows, rows)}, or another grid, context or number of micro-steps"
        )


def most_bag_rows(most: int, rows: int) -> int:
    """Return the most rows of a bag, up to so many, that divide the rows of a place in a micro-batch."""
    return max(number for number in range(1, max(1, min(most, rows)) + 1) if rows % number == 0)


def padding(tokens: int) -> list[int]:
    """Return the lengths of the documents of padding that fill so many tokens."""
    whole, rest = divmod(tokens, MOST_PADDING)
    return [MOST_PADDING] * whole + [rest] * (rest > 0)

"""Windows of tokens as rows that a model trains on, and what they are checked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.data.order import Part, part_of
from fourfold.data.source import Source
from fourfold.nn.loss import IGNORE_INDEX

Batch = tuple[Tensor, Tensor, Tensor | None]
"""tokens, targets, positions (None unless documents are kept apart), each [rows, seq] of int64"""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Reads windows of its sources. With `documents`, each row also says where its documents start."""

    sources: Sequence[Source]
    parts: Sequence[Part]
    vocab: int
    documents: bool

    def batch(self, picks: Sequence[tuple[int, int] | None]) -> Batch:
        """A row for each (source, window); a row without targets for each None."""
        rows = [self._row(*pick) if pick is not None else self._blank() for pick in picks]
        tokens, targets, positions = (torch.stack(column) for column in zip(*rows, strict=True))
        return tokens, targets, positions if self.documents else None

    def _row(self, number: int, window: int) -> tuple[Tensor, Tensor, Tensor]:
        """One window. A short one is filled up with ends of documents (or 0), which are no targets.

        Positions count from 0 at the first token of the window, of each document and of what fills it up; the
        first token of a document is no target, since nothing before it belongs to it.
        """
        source, seq = self.sources[number], self.parts[number].seq
        start = window * seq
        stop = min(start + seq + 1, source.tokens)
        ids = source.read(start, stop)
        check_ids(source, start, ids, self.vocab)
        count = len(ids) - 1
        tokens, targets, positions = self._blank(seq, source.eod or 0)
        tokens[:count], targets[:count] = ids[:-1], ids[1:]
        if self.documents:
            places = source.document_starts(start + 1, stop) - start
            targets[places - 1] = IGNORE_INDEX
            first = torch.zeros(seq + 1, dtype=torch.int64, device="cpu")
            first[places] = places
            first[count] = count  # where the filling begins, or behind the window
            positions -= first[:seq].cummax(0).values
        return tokens, targets, positions

    def _blank(self, seq: int | None = None, fill: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        seq = seq or self.parts[0].seq
        full = torch.full((2, seq), fill, dtype=torch.int64, device="cpu")
        full[1] = IGNORE_INDEX
        return full[0], full[1], torch.arange(seq, device="cpu")


def check_ids(source: Source, start: int, ids: Tensor, vocab: int) -> None:
    """Refuse ids of a window that begins at `start` if the model has none such."""
    wrong = ((ids < 0) | (ids >= vocab)).nonzero()
    if len(wrong):
        place = int(wrong[0])
        found = int(ids[place])
        raise ValueError(
            f"the source {source.name} has the id {found} at token {start + place}, but the model's ids are 0 to "
            f"{vocab - 1}; build the model with vocab={max(found + 1, vocab)} or more, or check that this file has "
            "what it is read as"
        )


def sampler_of(sources: Sequence[Source], *, seq: int, held_out: float, vocab: int, documents: bool) -> Sampler:
    """A sampler of sources that fit the model and the options."""
    for source in sources:
        if source.vocab is not None and source.vocab > vocab:
            raise ValueError(
                f"the source {source.name} has ids 0 to {source.vocab - 1}, but the model has vocab={vocab}; build the "
                f"model with vocab={source.vocab} or more, or prepare the text with the model's tokenizer"
            )
        if source.eod is not None and not 0 <= source.eod < vocab:
            raise ValueError(f"eod={source.eod} of the source {source.name} is no id of a model with vocab={vocab}")
        if documents and not source.has_documents:
            raise ValueError(
                f"documents=True, but the source {source.name} does not say where documents start; "
                "give the id that ends them with eod=, or use documents=False"
            )
    parts = [part_of(source.name, source.tokens, seq, held_out) for source in sources]
    return Sampler(tuple(sources), tuple(parts), vocab, documents)


def unigram_entropy(source: Source, vocab: int, *, held_out: float = 0.0, seq: int = 1, most: int = 4 << 20) -> float:
    """Nats per token of a guess that knows only how frequent each token is, over the first `most` trained tokens."""
    part = part_of(source.name, source.tokens, seq, held_out)
    stop = min(most, part.train * seq + 1, source.tokens)
    counts = torch.zeros(vocab, dtype=torch.int64, device="cpu")
    for start in range(0, stop, 1 << 20):
        ids = source.read(start, min(start + (1 << 20), stop))
        check_ids(source, start, ids, vocab)
        counts += torch.bincount(ids, minlength=vocab)
    frequency = counts[counts > 0].double() / stop
    return float(-(frequency * frequency.log()).sum())

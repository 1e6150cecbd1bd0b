"""How the rows of a place are cut: into halves that take turns, and over the members of a context group.

Each half says what attention and routers have to know of its tokens: positions, documents, sequences, and which members
of the group hold the others.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from fourfold.context.assign import plan_context
from fourfold.context.move import ContextAttention, own_tokens
from fourfold.grid import Grid
from fourfold.models.config import ModelConfig, halves_of
from fourfold.nn.attention import Batch, CutRow, cut_documents
from fourfold.nn.router import Sequences
from fourfold.pipeline import Half
from fourfold.policy import Halves, Policy
from fourfold.tiles import document_lengths


@dataclass(frozen=True, slots=True)
class RowCutter:
    """Cuts the rows of this rank's place for a model of this config."""

    config: ModelConfig
    grid: Grid
    policy: Policy
    compute: torch.dtype
    """The dtype of products and messages."""
    drops: bool
    """Whether the capacity of experts counts."""
    alike: bool = False
    """Whether all places always have equally many rows of one length (`Transformer.places_alike`)."""

    def halves(self, rows: int, seq: int, *, packed: bool = False) -> Halves:
        """Return into how many halves the rows of a place are cut, and why; `packed` rows have several documents."""
        item = self.compute.itemsize
        return halves_of(self.config, self.grid.shape, self.policy, rows, seq, item, packed=packed, alike=self.alike)

    def cut_rows(
        self, rows: int, seq: int, documents: Sequence[int] | None = None
    ) -> list[tuple[int, Sequence[int] | None]]:
        """Return the rows of each half of a batch that is packed or shared by places, with the lengths of its documents
        where they are known."""
        number = self.halves(rows, seq, packed=True).number
        parts = [len(part) for part in torch.arange(rows, device="cpu").chunk(number)]
        return list(zip(parts, _documents_of(documents, [part * seq for part in parts]), strict=True))

    def cut(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        positions: Tensor | None,
        documents: Sequence[int] | None,
        most: int | None,
        ignore_index: int,
    ) -> list[Half]:
        """Return the halves of a batch; `most` is the number of packed documents where their lengths are not known."""
        number = self.halves(*tokens.shape, packed=positions is not None).number
        if number > len(tokens):
            return self._cut_row(tokens, targets)
        rows = tokens.chunk(number)
        aims = (tokens[:, :0] if targets is None else targets).chunk(number)
        places = [None] * number if positions is None else positions.chunk(number)
        lengths = _documents_of(documents, [part.numel() for part in rows])
        halves = zip(rows, aims, places, lengths, strict=True)
        if self.grid.shape.context > 1:
            found = [self._member(*half, ignore_index) for half in halves]
        else:
            # Without packed documents, all halves share one pair of tables.
            longest = tokens.shape[1] if documents is None else max(documents)
            shared = self._rope(longest, None, tokens.device) if positions is None else None
            found = []
            for ids, aim, where, known in halves:
                batch = Batch.of(ids, where, shared or self._rope(longest, where, ids.device), known, most)
                sequences = self._sequences(batch, most if known is None else len(known), ids.device)
                found.append((ids, aim, replace(batch, sequences=sequences)))
        return [Half(*half, found[0][0].numel()) for half in found]

    def _cut_row(self, tokens: Tensor, targets: Tensor | None) -> list[Half]:
        """Return the two halves of a single row."""
        _, seq = tokens.shape
        ids, places = (part.chunk(2, dim=1) for part in (tokens, torch.arange(seq, device=tokens.device)[None]))
        aims = [tokens[:, :0]] * 2 if targets is None else targets.chunk(2, dim=1)
        sizes = [part.shape[1] for part in ids]
        tables, cut = self._rope(seq, None, tokens.device), CutRow(*sizes)
        ropes = [None] * 2 if tables is None else list(zip(*(table.split(sizes) for table in tables), strict=True))
        batches = [
            Batch(1, own, where, rope=rope, cut=cut, half=half)
            for half, (own, where, rope) in enumerate(zip(sizes, places, ropes, strict=True))
        ]
        batches = [replace(batch, sequences=self._sequences(batch, None, tokens.device)) for batch in batches]
        return [Half(*half, sizes[0]) for half in zip(ids, aims, batches, strict=True)]

    def _rope(self, seq: int, positions: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor] | None:
        if self.config.positions != "rope":
            return None
        return self.config.rope.tables(seq, positions, dtype=self.compute, device=device)

    def _member(
        self,
        tokens: Tensor,
        targets: Tensor,
        positions: Tensor | None,
        documents: Sequence[int] | None,
        ignore_index: int,
    ) -> tuple[Tensor, Tensor, Batch]:
        """Return the tokens of this member of a context group, as one row, and their targets."""
        here = self.context_of(tokens.shape, positions, documents)
        own, where = tables = own_tokens(here.assignment, here.member, tokens.device)
        if self.grid.recording is not None:
            self.grid.recording.kept += [here, tables]
        lacking = sum(here.assignment.lengths) - tokens.numel()
        ids = pad(tokens.flatten(), (0, lacking))[own][None]
        aims = pad(targets.flatten(), (0, lacking), value=ignore_index)[own][None] if targets.numel() else targets
        rope = self._rope(max(here.assignment.lengths), where[None], tokens.device)
        sequences = self._sequences_of_member(here, tokens.numel(), tokens.device)
        if self.grid.recording is not None:
            self.grid.recording.kept.append(sequences)
        return ids, aims, Batch(1, ids.shape[1], where[None], context=here, rope=rope, sequences=sequences)

    def context_of(
        self, shape: Sequence[int], positions: Tensor | None = None, documents: Sequence[int] | None = None
    ) -> ContextAttention:
        """Return who holds which tokens of [rows, seq] in this rank's context group, and how they are read.

        The host waits for the positions, unless it is given the lengths of the documents.
        """
        rows, seq = shape
        if documents is None and positions is not None and not positions.is_meta:
            documents = document_lengths(positions)
        chosen = self.policy.assignment, self.policy.context_way
        assignment, way = plan_context(*chosen, rows, seq, self.grid.shape.context, documents)
        return ContextAttention(assignment, way, self.grid, keep=self.policy.keep_gathered)

    def _sequences(self, batch: Batch, documents: int | None, device: torch.device) -> Sequences | None:
        """Return which tokens of a half make a sequence, if routers ask; `documents` is how many there are at most."""
        if not (self.config.routing.balances or self.config.routing.counts_by_sequence):
            return None
        if batch.positions is None or batch.cut is not None:
            found = Sequences.of_rows(batch.rows, batch.seq, device)
        else:
            found = Sequences.of_documents(batch.positions, documents)
        return found if self.drops else replace(found, limited=False)

    def _sequences_of_member(self, here: ContextAttention, tokens: int, device: torch.device) -> Sequences | None:
        """Return the same for a member of a context group, whose line has this many tokens and maybe others behind."""
        fills_up = self.config.experts > 0 and sum(here.assignment.lengths) != tokens
        if not (self.config.routing.balances or self.config.routing.counts_by_sequence or fills_up):
            return None
        found = Sequences.of_member(here.assignment, here.member, tokens, device)
        return found if self.drops else replace(found, limited=False)


def _documents_of(documents: Sequence[int] | None, tokens: Sequence[int]) -> Sequence[Sequence[int] | None]:
    """Return the lengths of the documents of each of several parts, or None for each if they are not known."""
    return [None] * len(tokens) if documents is None else cut_documents([*map(operator.index, documents)], tokens)

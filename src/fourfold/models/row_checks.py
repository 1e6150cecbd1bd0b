"""What is wrong with the rows that a model is given: their shapes, ids, positions and documents.

Checks return the fault in words and do not raise, because other ranks wait in collectives. The comparison of ranks is
itself a collective: all ranks of a place make it, or none.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fourfold.axes import AXES, BATCH, CONTEXT, CUTS
from fourfold.comm import equal_along
from fourfold.layout import GATHERED
from fourfold.models.row_cutter import RowCutter
from fourfold.nn.attention import document_positions
from fourfold.nn.embedding import uneven_tokens
from fourfold.nn.rng import key_of
from fourfold.policy import Policy
from fourfold.tiles import without_padding


@dataclass(frozen=True, slots=True)
class RowChecks:
    """Checks of the rows of this rank's place."""

    cutter: RowCutter
    learned: bool
    """Whether this rank holds learned positions, which limit how long a sequence may be."""

    def fault(
        self,
        tokens: Tensor,
        targets: Tensor | None,
        positions: Tensor | None,
        documents: Sequence[int] | None,
        ignore_index: int,
        *,
        compare: bool,
    ) -> str:
        """Return what is wrong with the batch of this place; empty if nothing is.

        With `compare` ranks also compare what they were given; all of them must ask for it.
        """
        fault, vocab = self._shape_fault(tokens, targets, positions, documents), self.cutter.config.vocab
        if not fault and reads_ids(tokens, self.cutter.policy):
            fault = _id_fault("token", tokens, vocab)
            if targets is not None and not fault:
                fault = _id_fault("target", targets.masked_fill(targets == ignore_index, 0), vocab)
            if positions is not None and not fault:
                fault = _position_fault(positions, documents)
        return self._compare(fault, tokens, targets, positions, documents) if compare else fault

    def _compare(
        self,
        fault: str,
        tokens: Tensor,
        targets: Tensor | None,
        positions: Tensor | None,
        documents: Sequence[int] | None,
    ) -> str:
        """Return a fault of this place's rows, or else what is wrong with them beside those of other ranks."""
        grid, policy = self.cutter.grid, self.cutter.policy
        alike = (*(axis for axis in AXES if axis not in BATCH), CONTEXT)
        told = None if documents is None or fault else torch.tensor(documents, device="cpu")
        if not equal_along(_digest(tokens, targets, positions, told), grid, alike):
            fault = fault or (
                f"ranks of one place were given different rows; ranks that have the same coordinates on "
                f"{' and '.join(BATCH)}, or are in one context group, must read the same rows (ff.local_rows gives "
                "each rank its rows)"
            )
        if policy.even_tokens:
            even = equal_along(tokens.numel() if is_batch(tokens) else 0, grid, (GATHERED,))
            if not equal_along(int(even), grid, CUTS) or not even:  # all ranks raise, or none
                raise ValueError(fault or uneven_tokens(tokens.numel()))
        packed = positions is not None or documents is not None
        halves = self.cutter.halves(*tokens.shape, packed=packed).number if tokens.dim() == 2 else 1
        if not equal_along(halves, grid, BATCH):
            fault = fault or (
                f"the {len(tokens)} rows of this place are cut into {halves} halves, but the rows of another place "
                "are not; give all places the same number of rows, or build with "
                "Policy(overlap=ff.Overlap(halves=1))"
            )
            if grid.shape.folded:  # all ranks raise: with other ids in their place, halves would still not match
                raise ValueError(fault)
        padded = policy.pad_experts and self.cutter.drops and grid.shape.folded
        if padded and not equal_along(key_of(tuple(tokens.shape)), grid, AXES):  # all ranks raise, or none
            raise ValueError(
                fault
                or f"pad_experts=True sends as many rows to experts as follow from the rows of a place, here "
                f"{tuple(tokens.shape)}, and those of another place differ; give all places equal shapes, or use "
                "pad_experts=False (policy.pad_experts of a run)"
            )
        return fault

    def _shape_fault(
        self, tokens: Tensor, targets: Tensor | None, positions: Tensor | None, documents: Sequence[int] | None
    ) -> str:
        if not is_batch(tokens):
            return f"tokens has shape {tuple(tokens.shape)}; it must be [rows, seq] with at least one of each"
        for what, ids in (("tokens", tokens), ("targets", targets), ("positions", positions)):
            if ids is not None and ids.shape != tokens.shape:
                return f"{what} {tuple(ids.shape)} and tokens {tuple(tokens.shape)} differ in shape"
            if ids is not None and ids.dtype not in (torch.int64, torch.int32):
                return f"{what} has dtype {ids.dtype}; ids must be torch.int64 or torch.int32"
        longest = tokens.shape[1]
        if documents is not None:
            if fault := document_fault(self.cutter, len(tokens), tokens.shape[1], documents):
                return fault
            longest = max(documents)
        if self.learned and longest > self.cutter.config.seq:
            packed = documents is None and positions is not None  # positions on a GPU are not read here
            also = ", or if its documents are shorter give their lengths too (documents=)" if packed else ""
            return (
                f"a sequence of {longest} tokens is longer than the {self.cutter.config.seq} learned positions; "
                f"shorten it or build the model with a larger seq{also}"
            )
        if torch.is_autocast_enabled(self.cutter.grid.device.type):
            return "torch.autocast is on; turn it off and build the model with Policy(compute_dtype=torch.bfloat16)"
        return ""


def is_batch(tokens: Tensor) -> bool:
    """Return whether the tokens have the shape [rows, seq], with at least one of each."""
    return tokens.dim() == 2 and tokens.numel() > 0


def reads_ids(tokens: Tensor, policy: Policy) -> bool:
    """Return whether ids are checked: always on the CPU; on a GPU only on request, since the host must wait."""
    return not tokens.is_meta and (tokens.device.type == "cpu" or policy.check_inputs)


def whole_lengths(documents: Any) -> tuple[int, ...] | None:
    """Return the lengths of documents as whole numbers. What cannot be that is returned as it was given, for
    `document_fault` to name: a rank that raised here would leave the others waiting."""
    if isinstance(documents, Tensor):
        documents = without_padding(documents.tolist()) if documents.dim() == 1 else documents.tolist()
    if documents is not None:
        with suppress(TypeError):
            documents = tuple(map(operator.index, documents))
    return documents


def document_fault(cutter: RowCutter, rows: int, seq: int, documents: Sequence[int]) -> str:
    """Return what is wrong with the lengths of documents, which the host checks without the device."""
    rule = "documents are the lengths of the documents in all rows, one after another"
    if not isinstance(documents, tuple) or not all(isinstance(length, int) for length in documents):
        return f"{rule}: whole numbers, not {documents!r:.80}"
    wrong = [length for length in documents if length < 1]
    if wrong or sum(documents) != rows * seq:
        found = f"a length of {wrong[0]}" if wrong else f"{sum(documents)} tokens in {len(documents)} documents"
        return f"{rule}: got {found} for {rows} rows of {seq} tokens, which are {rows * seq}"
    ends = set(accumulate(documents))
    border = next((row for row in range(1, rows) if row * seq not in ends), None)
    if border is None:
        return ""
    across = f"a document goes on from row {border - 1} to row {border} of {seq} tokens"
    number = cutter.halves(rows, seq, packed=True).number
    borders = accumulate(len(part) for part in torch.arange(rows, device="cpu").chunk(number))
    if any(row * seq not in ends for row in borders):
        return (
            f"{across}, but the {rows} rows are cut into {number} halves there; give tokens as one row, "
            f"[1, {rows * seq}], or build with Policy(overlap=ff.Overlap(halves=1))"
        )
    return ""


def _id_fault(what: str, ids: Tensor, vocab: int) -> str:
    """Return whether ids are outside of the vocabulary, in words; empty if they are not."""
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab:
        return f"{what} ids from {low} to {high}: all must be at least 0 and below vocab={vocab}"
    return ""


def _count_up(positions: Tensor) -> bool:
    """Return whether positions start at 0 in every row and then count up or start again at 0."""
    steps = positions.diff(dim=1, prepend=positions.new_full((len(positions), 1), -1))
    return bool(((steps == 1) | (positions == 0)).all() and (positions[:, 0] == 0).all())


def _position_fault(positions: Tensor, documents: Sequence[int] | None) -> str:
    """Return what is wrong with positions; with documents, which may go on in the next row, both must say the same."""
    if documents is None:
        rule = "positions must start at 0 in every row, then count up by 1 or start again at 0"
        return "" if _count_up(positions) else rule
    wrong = (positions.flatten().cpu() != document_positions(documents)).nonzero()
    if not len(wrong):
        return ""
    row, token = divmod(int(wrong[0]), positions.shape[1])
    return (
        f"positions and documents differ: token {token} of row {row} has position {int(positions[row, token])}; leave "
        "positions out, or make them count up from 0 in every document"
    )


def _digest(*ids: Tensor | None) -> int:
    """Return a hash of a batch, which depends on the order of its ids."""
    parts = [part for part in ids if part is not None]
    weighted = [part.flatten().long() * torch.arange(1, part.numel() + 1, device=part.device) for part in parts]
    return key_of(*((tuple(part.shape), int(sums.sum())) for part, sums in zip(parts, weighted, strict=True)))

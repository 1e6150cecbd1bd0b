"""What one rank holds of a model and a batch: the sizes that closed forms are made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import torch

from fourfold.grid import Shape
from fourfold.layout import chunk
from fourfold.ledger import Collective, Op
from fourfold.models.config import ModelConfig, halves_of
from fourfold.policy import Policy

STATISTIC_NBYTES = 8
"""Sums of losses, counts and squared norms are fp64."""


@dataclass(frozen=True)
class Share:
    """One rank's share of a model and a batch on a grid, under a policy."""

    config: ModelConfig
    shape: Shape
    policy: Policy
    rows: int
    """Rows of a (data, z) place in one micro-step."""
    seq: int
    dtype: torch.dtype = torch.float32
    """Of the parameters."""
    rank: int = 0
    half: int = 0
    """Which half of the rows; the first one's share holds what all halves do together."""

    def halves(self) -> list[dict[str, int]]:
        """The rows of each half of a micro-step."""
        chosen = halves_of(self.config, self.shape, self.policy, self.rows, self.seq, self.compute_itemsize)
        parts = (len(chunk(self.rows, chosen.number, index)) for index in range(chosen.number))
        return [{"rows": rows, "half": index} for index, rows in enumerate(parts)]

    @cached_property
    def coords(self) -> dict[str, int]:
        return self.shape.coords(self.rank)

    @cached_property
    def sharded(self) -> bool:
        return self.policy.activations == "sharded"

    @cached_property
    def m(self) -> int:
        return self.rows * self.seq

    @cached_property
    def m_padded(self) -> int:
        """Tokens of a place with the zeros that `leave` adds where x does not divide them."""
        return ceil(self.m / self.shape.x) * self.shape.x

    @cached_property
    def m_rest(self) -> int:
        """Tokens that a rank holds at rest."""
        return self.m_padded // self.shape.x if self.sharded else self.m

    @cached_property
    def k(self) -> int:
        return self.config.hidden // self.shape.y

    @cached_property
    def wide(self) -> int:
        """Bytes of a norm's or loss's statistics."""
        return max(4, self.compute_itemsize)

    @cached_property
    def compute_itemsize(self) -> int:
        return (self.policy.compute_dtype or self.dtype).itemsize

    @cached_property
    def reduce_itemsize(self) -> int:
        return (self.policy.reduce_dtype or self.dtype).itemsize

    @cached_property
    def vocab_rows(self) -> int:
        return len(chunk(self.config.vocab, self.shape.x, self.coords["x"]))

    @cached_property
    def vocab_columns(self) -> int:
        columns = ceil(self.config.vocab / self.shape.x)
        return ceil(columns / self.shape.y) * self.shape.y if self.sharded else columns

    def message(
        self, op: Op, axis: str, elements: int, label: str, itemsize: int | None = None
    ) -> Iterator[Collective]:
        nbytes = elements * (self.compute_itemsize if itemsize is None else itemsize)
        if self.shape.sizes[axis] > 1 and nbytes:
            yield Collective(op, axis, nbytes, self.shape.sizes[axis], label)

    def rows_of(self, length: int, *axes: str) -> int:
        """This rank's part of a length that is cut over the axes one after another."""
        coords = self.coords
        for axis in axes:
            length = len(chunk(length, self.shape.sizes[axis], coords[axis]))
        return length

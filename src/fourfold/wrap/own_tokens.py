"""Which tokens of a wrapped model's sequences a place holds, on a grid with a context size.

All places of a context group read the same rows. Every sequence is cut alike, into 2c chunks, of which member i holds
chunks i and 2c - 1 - i (`assign_rows`), so that a place holds the same positions of every row, and a tensor
[rows, seq, ...] has [rows, seq/c, ...] there. All of it is known from the sizes alone: members agree without a message.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fourfold.axes import CONTEXT
from fourfold.context.assign import assign_rows, plan_context
from fourfold.context.move import ContextAttention
from fourfold.grid import Grid
from fourfold.policy import Policy
from fourfold.tiles import indices


class OwnTokens:
    """The tokens of sequences of `seq` tokens that this member of its context group holds."""

    def __init__(self, seq: int, grid: Grid, policy: Policy) -> None:
        members = grid.shape.context
        if seq % members:
            raise ValueError(
                f"sequences of {seq} tokens cannot be cut evenly over context={members}; pad them to a multiple of "
                f"{members} (with targets of -100), or use a grid with context=1"
            )
        self.seq, self.grid, self.policy = seq, grid, policy
        self.by_member = [assign_rows(1, seq, (seq,), members).own(member) for member in range(members)]
        """The positions that each member holds, as ranges, in order."""
        self.cuts = 0
        """How many tensors of the pass were cut."""
        self._attention: dict[int, ContextAttention] = {}
        self._indices: dict[tuple[int, int, int], Tensor] = {}

    @property
    def held(self) -> list[range]:
        """The positions that this member holds."""
        return self.by_member[self.grid.coords[CONTEXT]]

    def attention(self, rows: int) -> ContextAttention:
        """Return how the tokens of so many rows read each other."""
        if rows not in self._attention:
            policy = self.policy
            assignment, way = plan_context("rows", policy.context_way, rows, self.seq, self.grid.shape.context)
            self._attention[rows] = ContextAttention(assignment, way, self.grid, keep=policy.keep_gathered)
        return self._attention[rows]

    def index(self, start: int, stop: int, blocks: int) -> Tensor:
        """Return where this member's tokens lie among the tokens [start, stop) of so many sequences in a line."""
        key = start, stop, blocks
        if key not in self._indices:
            one = indices(_between(self.held, start, stop), self.grid.device)
            first = torch.arange(blocks, device=one.device)[:, None] * (stop - start)
            self._indices[key] = (first + one).flatten()
        return self._indices[key]

    def all_positions(self) -> Tensor:
        """Return the positions of all members' tokens, one member after another."""
        return indices([positions for held in self.by_member for positions in held], self.grid.device)


def _between(held: list[range], start: int, stop: int) -> list[range]:
    """Return the part of these ranges in [start, stop), counted from `start`."""
    parts = [range(max(one.start, start) - start, min(one.stop, stop) - start) for one in held]
    return [part for part in parts if len(part)]


@dataclass(frozen=True)
class SequenceCut:
    """The dim of a tensor that holds tokens: [start, stop) of every sequence, of so many sequences in a line."""

    tokens: OwnTokens
    dim: int
    start: int
    stop: int
    blocks: int = 1
    """Rows that were merged into the dim, as in [rows * seq, features]."""

    @property
    def length(self) -> int:
        """The size of the dim in the whole tensor."""
        return self.blocks * self.tokens_each

    @property
    def tokens_each(self) -> int:
        """The tokens of each sequence."""
        return self.stop - self.start

    @property
    def own(self) -> int:
        """The size of the dim on this member."""
        return self.blocks * sum(map(len, _between(self.tokens.held, self.start, self.stop)))

    @property
    def is_full(self) -> bool:
        """Whether the dim has all tokens of every sequence."""
        return (self.start, self.stop) == (0, self.tokens.seq)

    @property
    def index(self) -> Tensor:
        """The places of this member's tokens in the dim."""
        return self.tokens.index(self.start, self.stop, self.blocks)

    @property
    def on_all_members(self) -> bool:
        """Whether every member holds some of the tokens."""
        return all(_between(held, self.start, self.stop) for held in self.tokens.by_member)

    def own_before(self, token: int) -> int:
        """Return how many of this member's tokens lie before a token of the dim, for one sequence."""
        return sum(map(len, _between(self.tokens.held, self.start, self.start + token)))

    def at(self, dim: int) -> SequenceCut:
        """Return the same cut of another dim."""
        return replace(self, dim=dim)

    def same_tokens(self, other: SequenceCut) -> bool:
        """Return whether two dims hold the same tokens."""
        return self.at(0) == other.at(0)

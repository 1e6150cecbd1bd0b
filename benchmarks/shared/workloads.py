"""What a benchmark runs: a workload (model and batch), and the lines of its table (who runs it, on which grid, how)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import fourfold as ff
from fourfold.models import ModelConfig

Measure = Literal["step", "compute", "communication"]


@dataclass(frozen=True)
class Workload:
    """A model and a batch, the same for every line."""

    name: str
    config: ModelConfig
    rows: int
    """Rows of the whole batch; a row has `config.seq` tokens."""
    dtype: torch.dtype

    @property
    def tokens(self) -> int:
        return self.rows * self.config.seq

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the tokens and targets of the whole batch."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab, (self.rows, self.config.seq + 1), generator=generator).to(device)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@dataclass(frozen=True)
class Line:
    """One line of a table: who trains, on which grid, in which variant."""

    kind: str
    """`fourfold`, or the name of a peer."""
    shape: ff.Shape
    variant: str = ""
    policy: ff.Policy = ff.Policy()
    """Used by Fourfold's lines only."""
    bounded: bool = False
    """Whether the line's computation alone and its communication alone are measured too."""

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.kind, str(self.shape), self.variant) if part)

    @property
    def measures(self) -> tuple[Measure, ...]:
        return ("step", "compute", "communication") if self.bounded else ("step",)

"""Rotary positions, and how they are scaled for sequences longer than those a model was trained on.

Feature pair i of a head turns by f_i = theta^(-2i/d) a token, which makes n_i = s f_i / (2 pi) turns in a sequence of
the original length s. Pairs that turn often tell near tokens apart and stay as they are; pairs that turn less than once
have never seen a whole turn, and are slowed down by `factor`. Between `slow` and `fast` turns both are mixed, by a
share r of the angles as they are:

    linear   f_i / factor for all
    llama3   (1 - r) f_i / factor + r f_i with r = (n_i - slow) / (fast - slow), clamped to 0 .. 1
    yarn     the same, with r linear in the pair's number i instead of in n_i, between the pairs that turn `fast` and
             `slow` times, rounded outwards; cos and sin are multiplied by `attention`

These are the definitions of Hugging Face's config files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeScaling = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary positions of a model."""

    head_dim: int
    theta: float
    scaling: RopeScaling
    factor: float
    original_seq: int
    slow: float
    fast: float
    attention: float
    """The factor of cos and sin."""

    def tables(
        self, seq: int, positions: Tensor | None, *, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [seq, 1, head_dim] or for packed documents [rows, seq, 1, head_dim], in fp32 or wider."""
        # In fp32 at least: bf16 cannot tell apart the angles of neighbouring positions in a long sequence.
        dtype = torch.promote_types(dtype, torch.float32)
        frequencies = self.frequencies(dtype, device)
        angles = torch.outer(torch.arange(seq, device=device, dtype=dtype), frequencies).repeat(1, 2)
        if positions is not None:
            angles = angles[positions]
        cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
        return (cos, sin) if self.attention == 1 else (cos * self.attention, sin * self.attention)

    def frequencies(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return by how much each pair of features turns from a token to the next: [head_dim/2]."""
        pairs = torch.arange(0, self.head_dim, 2, device=device, dtype=dtype)
        turned = self.theta ** -(pairs / self.head_dim)
        if self.scaling == "none":
            return turned
        if self.scaling == "linear":
            return turned / self.factor
        if self.scaling == "llama3":
            turns = self.original_seq * turned / (2 * math.pi)
            kept = (turns - self.slow) / (self.fast - self.slow)
        else:
            first, last = self._pair_that_turns(self.fast), self._pair_that_turns(self.slow)
            first, last = max(math.floor(first), 0), min(math.ceil(last), self.head_dim - 1)
            kept = 1 - (pairs / 2 - first) / max(last - first, 1e-3)
        kept = kept.clamp(0, 1)
        return (1 - kept) * turned / self.factor + kept * turned

    def _pair_that_turns(self, times: float) -> float:
        """Return the number of the pair that makes so many turns in a sequence of the original length."""
        return self.head_dim * math.log(self.original_seq / (2 * math.pi * times)) / (2 * math.log(self.theta))

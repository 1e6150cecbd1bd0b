"""The policies of a model: what is cut, kept and cast, and how much communication runs behind computation.

Policies are frozen dataclasses without behaviour. Only the two dtypes and the number of halves may change a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch

Activations = Literal["sharded", "replicated"]
Recompute = Literal["none", "attention", "block"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much communication runs behind computation. Only `halves` may change a result, by rounding."""

    prefetch: bool = True
    """Gather weights over z ahead of their use, in the order recorded in the first pass."""
    defer: bool = True
    """Reduce dw over z behind the rest of backward."""
    wgrad_behind_messages: bool = True
    """In backward run dw's product while the collective that da needs is in flight."""
    halves: int | None = None
    """Parts of the local batch that take turns, so that one's collectives over x and y run behind the other's
    products; None: 2 where that is worth it, else 1."""
    reduce_early: bool = True
    """Sum gradients over data as soon as they are final; gather what the sharded optimizer stepped behind the next
    forward. Who reads a parameter meanwhile waits for it; tensors that were taken from it before the step do not."""
    bytes_in_flight: int | None = None
    """Bound on weights gathered ahead, and on gradients being reduced; None: twice the largest message."""

    def __post_init__(self) -> None:
        if self.halves is not None and self.halves not in (1, 2):
            raise ValueError(f"halves={self.halves} must be 1 or 2, or None for the policy to choose")
        if self.bytes_in_flight is not None and self.bytes_in_flight < 1:
            raise ValueError(f"bytes_in_flight={self.bytes_in_flight} must be at least 1, or None")

    def most_in_flight(self, largest: int) -> int:
        """Bytes that may be in flight: two messages keep a link busy, one travels while the other is used."""
        return 2 * largest if self.bytes_in_flight is None else self.bytes_in_flight

    @classmethod
    def off(cls, *, halves: int = 1) -> Overlap:
        """Every collective is waited for where it is launched."""
        return cls(prefetch=False, defer=False, wgrad_behind_messages=False, halves=halves, reduce_early=False)


class Halves(NamedTuple):
    """Into how many parts a batch is cut, and why."""

    number: int
    reason: str


WORTH_HIDING_NBYTES = 1 << 20
"""A message of half a batch below this takes its time for latency, which two of them pay twice."""


def choose_halves(policy: Overlap, rows: int, nbytes: int) -> Halves:
    """Cut `rows` rows, whose messages over x or y have up to `nbytes` bytes (0 where nothing travels)?"""
    if rows < 2:
        return Halves(1, f"{rows} row cannot be cut")
    if policy.halves is not None:
        return Halves(policy.halves, f"the policy says halves={policy.halves}")
    if nbytes == 0:
        return Halves(1, "nothing travels over x or y")
    if nbytes // 2 < WORTH_HIDING_NBYTES:
        return Halves(1, f"messages over x or y of at most {nbytes} bytes are too small to be cut")
    return Halves(2, f"messages over x or y of {nbytes} bytes are worth hiding")


@dataclass(frozen=True, slots=True)
class Policy:
    """What is kept, what is cut, and in which precision. Only the two dtypes and halves change a result."""

    activations: Activations = "sharded"
    """`sharded` cuts activations fully; `replicated` is the published algorithm, whole where ours are cut."""
    keep_gathered: bool = False
    """Keep a product's gathered input for backward; otherwise keep the cut one and gather it again."""
    keep_weights: bool = False
    """Keep weights gathered over z from forward to backward; otherwise gather them again."""
    recompute: Recompute = "none"
    """What is forgotten in forward and computed again in backward: nothing, attention's inside, whole blocks."""
    compute_dtype: torch.dtype | None = None
    """Dtype of gathered weights, activations and their messages; None: that of the parameters."""
    reduce_dtype: torch.dtype | None = None
    """Dtype in which gradients of weights are reduced over z; None: that of the parameters."""
    loss_chunk: int = 0
    """Tokens of a place whose logits exist at once, so that a large vocabulary does not set the peak; 0: all."""
    shard_optimizer: bool = False
    """Cut gradients and optimizer state over data as well (ZeRO-1); `optim.AdamW` then gathers parameters."""
    bucket_bytes: int = 25 << 20
    """Gradients that owe the same sums travel together in messages of about this size."""
    compile: bool = False
    """Compile the computation between collectives, region by region."""
    overlap: Overlap = Overlap()
    """How much communication runs behind computation."""
    check_inputs: bool = False
    """Check token ids on a device too, which reads them back; on the CPU they are always checked."""

    def __post_init__(self) -> None:
        if self.activations not in get_args(Activations):
            raise ValueError(f"activations={self.activations!r} is none of {get_args(Activations)}")
        if self.recompute not in get_args(Recompute):
            raise ValueError(f"recompute={self.recompute!r} is none of {get_args(Recompute)}")
        for name in ("compute_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name}={dtype!r} must be a floating-point dtype such as torch.bfloat16, or None")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk={self.loss_chunk} must be a number of tokens, or 0 for all at once")
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes={self.bucket_bytes} must be at least 1")

    def require_any_module(self) -> None:
        """Refuse options that only the reference models implement, for a model with other people's code."""
        if self.overlap.halves not in (None, 1):
            raise ValueError(
                f"halves={self.overlap.halves}: a module's own code runs a batch as one; use halves=None or 1"
            )
        if self.loss_chunk:
            raise ValueError(
                f"loss_chunk={self.loss_chunk}: a module's own code makes all logits at once; use loss_chunk=0"
            )
        if self.recompute == "attention":
            raise ValueError("recompute='attention' works with the reference models only; use 'block' or 'none'")

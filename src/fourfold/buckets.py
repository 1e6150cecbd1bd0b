"""Which gradients travel together: those that owe the same sums, in messages of about one size.

The model and its layouts alone decide, so that every rank, and the planner, finds the same buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that owe the same sums and travel in one message."""

    owes: tuple[str, ...]
    names: tuple[str, ...]
    nbytes: int

    @property
    def span(self) -> str:
        return self.names[0] if len(self.names) == 1 else f"{self.names[-1]} .. {self.names[0]}"

    @property
    def label(self) -> str:
        return f"gradients {self.span}"


def fill_buckets(gradients: Sequence[tuple[str, tuple[str, ...], torch.dtype, int]], bucket_bytes: int) -> list[Bucket]:
    """Cut the gradients (name, axes owed, dtype, bytes on this rank) into buckets.

    Gradients of one dtype that owe the same share one, last ones first, as backward makes them; a bucket is closed when
    the next gradient would take it past `bucket_bytes`. Those that backward completes first come first.
    """
    buckets: list[Bucket] = []
    open_for: dict[tuple[tuple[str, ...], torch.dtype], int] = {}
    for name, owes, dtype, nbytes in reversed(gradients):
        at = open_for.get((owes, dtype))
        if at is None or buckets[at].nbytes + nbytes > bucket_bytes:
            open_for[owes, dtype] = len(buckets)
            buckets.append(Bucket(owes, (name,), nbytes))
        else:
            buckets[at] = Bucket(owes, (*buckets[at].names, name), buckets[at].nbytes + nbytes)
    place = {name: index for index, (name, *_) in enumerate(reversed(gradients))}
    return sorted(buckets, key=lambda bucket: place[bucket.names[-1]])

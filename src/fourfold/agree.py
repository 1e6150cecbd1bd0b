"""What all ranks of a job decide together, through its key-value store.

No process group beyond the default one need exist, and a rank that differs is named, not waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist


def agree(what: str, text: str, fault: Exception | None = None) -> None:
    """Raise the same error on every rank unless all of them hold the same text and no fault."""
    verdict = decide(text, partial(_verdict, what))
    if verdict:
        raise ValueError(verdict)
    if fault is not None:
        raise fault


def decide(text: str, judge: Callable[[Sequence[str]], str]) -> str:
    """Rank 0 judges what all ranks wrote; every rank gets the verdict."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1 or dist.get_backend() == "fake":
        return judge([text])
    store = dist.distributed_c10d._get_default_store()
    key = f"fourfold/agree/{store.add(f'fourfold/agree/count/{rank}', 1)}"
    store.set(f"{key}/{rank}", text)
    if rank == 0:
        texts = [found.decode() for found in store.multi_get([f"{key}/{r}" for r in range(world)])]
        store.set(f"{key}/verdict", judge(texts))
    return store.get(f"{key}/verdict").decode()


def first_fault(texts: Sequence[str]) -> str:
    """The first rank with something to say, and what."""
    return next((f"rank {rank}: {text}" for rank, text in enumerate(texts) if text), "")


def _verdict(what: str, texts: Sequence[str]) -> str:
    others = [rank for rank, text in enumerate(texts) if text != texts[0]]
    if not others:
        return ""
    ranks = ", ".join(str(rank) for rank in others[:8]) + (" ..." if len(others) > 8 else "")
    return (
        f"ranks disagree on {what}: rank 0 has {texts[0]!r}, rank {others[0]} has {texts[others[0]]!r} "
        f"(ranks unlike rank 0: {ranks}); give every rank the same"
    )

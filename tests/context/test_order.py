"""Ranks in different context groups, and ranks with unequally many KV heads, do the same work in the same order.

Collectives over x, y, z and data join ranks whose groups have other documents. If one of these ranks ran a product of
dw or took a turn earlier, ranks would wait for each other forever, or add up gradients of different parameters.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold.axes import CONTEXT, PIPE
from fourfold.engine import WgradQueue
from fourfold.grid import Shape
from fourfold.ledger import Collective, Event
from fourfold.policy import Policy
from harness import grid_of

SEQ = 12
SMALL: dict[str, Any] = dict(layers=2, hidden=24, mlp_hidden=24, vocab=24, seq=SEQ)
CONFIGS = {
    "llama": ff.models.config("llama-tiny", **SMALL, head_dim=4, heads=8, kv_heads=4, qk_norm=True),
    "ragged": ff.models.config("llama-tiny", **SMALL, head_dim=6, heads=6, kv_heads=2, qk_norm=True),
}
"""With x=3, the ranks of `ragged` read 1, 2 and 1 KV heads."""
APART = (SEQ, *[1] * SEQ), (1,) * 2 * SEQ
"""The documents of two groups with two rows each: one is cut over members, and nothing travels in the other group."""


def work_of(shape: Shape, kind: str, policies: list[Policy]) -> list[list[str]]:
    """What this rank launches, waits for and multiplies in a second step of two micro-batches, but for context."""
    grid, found = grid_of(shape), []
    rows, group = 2 * shape.row_places, shape.row_place(grid.rank)
    tokens = ff.local_rows(torch.arange(rows * SEQ).view(rows, SEQ) % 24, grid)
    for policy in policies:
        model = ff.models.build(CONFIGS[kind], grid, policy=policy)
        queue = model.engine.wgrad_queue
        for _ in range(2):  # the first one records the order of gathers
            with grid.ledger.events() as events:
                queue.run_one = partial(run_noted, queue, events)
                with ff.accumulate(model):
                    model(tokens, tokens, documents=APART[group % 2]).backward()
                model(tokens, tokens, documents=APART[(group + 1) % 2]).backward()
        whats = [(event.kind, event.what) for event in events]
        found.append([f"{kind} {what}" for kind, what in whats if getattr(what, "axis", "") != CONTEXT])
        assert any(isinstance(what, Collective) and what.axis == CONTEXT for _, what in whats)
    return found


def run_noted(queue: WgradQueue, events: list[Event]) -> None:
    """Note that a product of dw may leave the queue, whether it holds one or not."""
    events.append(Event("product", "of the queue"))
    WgradQueue.run_one(queue)


CASES = [
    (Shape(z=4, context=2), "llama"),
    pytest.param(Shape(x=3, z=2, context=2), "ragged", marks=pytest.mark.slow),
    *(
        pytest.param(shape, "llama", marks=pytest.mark.slow)
        for shape in (
            Shape(x=2, z=4, context=2),
            Shape(y=2, z=4, context=2),
            Shape(x=2, z=2, data=2, context=2),
            Shape(z=4, pipe=2, context=2),
            Shape(x=2, z=2, data=2, context=4),
        )
    ),
]


@pytest.mark.parametrize(("shape", "kind"), CASES, ids=str)
def test_all_ranks_work_in_one_order(ranks: Any, shape: Shape, kind: str) -> None:
    halves = ff.Overlap(halves=2)
    policies = [Policy(context_way="auto", overlap=halves), Policy(context_way="ring", overlap=halves, bucket_bytes=1)]
    policies.append(Policy(context_way="ulysses:2" if kind == "llama" else "exchange", recompute="block"))
    works = ranks(shape.world).run(work_of, shape, kind, policies, timeout=120)
    for rank, found in enumerate(works):
        like = next(other for other in range(rank + 1) if shape.coords(other)[PIPE] == shape.coords(rank)[PIPE])
        for policy, here, there in zip(policies, found, works[like], strict=True):
            differ = next((pair for pair in zip(here, there, strict=False) if pair[0] != pair[1]), None)
            assert differ is None, f"rank {rank} and rank {like}, {policy.context_way}"
            assert len(here) == len(there)

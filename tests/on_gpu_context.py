"""The GPU tier of packed documents and of the context axis, several NCCL ranks on one GPU. Needs torch and numpy.

    FOURFOLD_TEST_DEVICE=cuda python tests/on_gpu_context.py [names of checks]

Every check prints a line. Steps that are recorded are in on_gpu_graphs.py.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor

import fourfold as ff
from fourfold.context.assign import assign_documents, assign_rows
from fourfold.context.move import KeyPlan, ring_tiles
from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from fourfold.policy import Policy
from fourfold.tiles import Reading, Tiles, Unreading, document_tiles
from gpu_checks import Check, on_ranks, run_checks
from harness import DEVICE, grid_of

BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative errors: the rounding of inputs and outputs in half precision, and of sums in fp32."""
WAYS = ("gather", "exchange", "ring", "ulysses:2", "ulysses:2+ring")


def drawn_lengths(tokens: int, seed: int) -> list[int]:
    drawn, found = random.Random(seed), []
    while (left := tokens - sum(found)) > 0:
        found.append(min(left, drawn.choice([1, 2, 7, 40, 130, 300, 1000])))
    return found


def error(found: Tensor, right: Tensor) -> float:
    return ((found.double() - right.double()).norm() / right.double().norm()).item()


def read_tiles(dtype: torch.dtype, heads: tuple[int, int, int], *, row: bool = False) -> list[str]:
    """Compare values and gradients of tiles with those of products in fp64: documents, parts of documents with what
    comes before them, and keys that come in parts. With `row`, one document, whose tiles are long and come again."""
    queries, keys, width = heads
    worst = 0.0
    tokens = 8192 if row else 2048
    part = tokens // 4
    for seed in range(1 if row else 4):
        lengths = [tokens] if row else drawn_lengths(tokens, seed)
        holders = assign_rows(1, tokens, (tokens,), 4) if row else assign_documents(tuple(lengths), 4)
        plans = [[(document_tiles(lengths), slice(None), slice(None))]]
        for me in range(4):
            plan = KeyPlan.of(holders, me, everything=True, device=torch.device(DEVICE))
            own = slice(me * part, (me + 1) * part)
            plans.append([(plan.tiles, own, plan.order)])
            around = ring_tiles(holders, me)
            order = [me, *(other for other in range(4) if other != me)]
            plans.append([(around[one], own, slice(one * part, (one + 1) * part)) for one in order])
        torch.manual_seed(seed)
        q = torch.randn(tokens, queries, width, device=DEVICE, dtype=dtype)
        k, v = (torch.randn(tokens, keys, width, device=DEVICE, dtype=dtype) for _ in range(2))
        dout = torch.randn_like(q)
        for plan in plans:
            found, right = (
                all_of(plan, *(part.to(kind) for part in (q, k, v, dout))) for kind in (dtype, torch.double)
            )
            worst = max(worst, *map(error, found, right))
    return [f"{'ok ' if worst < BOUND[dtype] else ''}{worst:.1e}"]


def all_of(plan: list[tuple[Tiles, Any, Any]], q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """Return out, lse, dq and all dk and dv."""
    own = plan[0][1]
    reading = Reading(q[own])
    for tiles, _, chosen in plan:
        reading.read(k[chosen], v[chosen], tiles)
    out, lse = reading.result()
    gradients = Unreading(dout[own], q[own], out, lse)
    garbage = torch.full((1 << 22,), torch.nan, device=q.device)  # what kernels leave unwritten shows
    del garbage
    parts = [part for tiles, _, chosen in plan for part in gradients.unread(k[chosen], v[chosen], tiles)]
    return [out, lse, gradients.dq, torch.cat(parts)]


def step_of(grid: Grid, policy: Policy, documents: bool, rows: int = 8, seq: int = 96) -> tuple[float, Tensor]:
    """Return the loss, and all gradients of a whole model one after another, of a step in the policy's precision."""
    config = ff.models.config("llama-tiny", heads=8, kv_heads=4, hidden=64, layers=2)
    model = ff.models.build(config, grid, policy=policy)
    drawn = torch.Generator().manual_seed(3)
    whole = torch.randint(0, 250, (rows, seq), generator=drawn)
    tokens = ff.local_rows(whole, grid).to(grid.device)
    place = (grid.coords["data"] * grid.shape.z + grid.coords["z"]) // grid.shape.context
    own = range(place * len(tokens), (place + 1) * len(tokens))
    lengths = [length for row in own for length in drawn_lengths(seq, row)]
    loss = model(tokens, tokens, **({"documents": lengths} if documents else {}))
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    wholes = [part.full_tensor() if hasattr(part, "full_tensor") else local_of(part) for part in found]
    return loss.item(), torch.cat([part.flatten().float() for part in wholes])


def over_ranks(shape: Shape, way: str, documents: bool, dtype: str) -> str:
    """Compare a step on a grid with the same step on one process."""
    kind = getattr(torch, dtype)
    policy = Policy(compute_dtype=kind, context_way=way)
    loss, gradients = step_of(grid_of(shape), policy, documents)
    right, expected = step_of(Grid.alone(DEVICE), Policy(compute_dtype=kind), documents)
    worst = max(abs(loss / right - 1), error(gradients, expected))
    return f"{'ok ' if worst < 2 * BOUND[kind] else ''}{worst:.1e}"


def memory() -> list[str]:
    """Packed documents need no memory that grows with the square of the sequence."""
    config = ff.models.config("llama-tiny", layers=1, vocab=256)
    model = ff.models.build(config, Grid.alone(DEVICE), policy=Policy(compute_dtype=torch.bfloat16))
    tokens = torch.zeros(1, 1 << 16, dtype=torch.long, device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(tokens, tokens, documents=drawn_lengths(tokens.numel(), 0)).backward()
    mib = (torch.cuda.max_memory_allocated() - before) / 2**20
    return [f"{'ok ' if mib < 2048 else ''}{mib:.0f} MiB for 65,536 tokens; a mask alone has 4,096"]


def main(names: list[str]) -> int:
    checks: dict[str, Check] = {"memory": memory}
    for dtype in BOUND:
        for heads in ((8, 2, 128), (4, 4, 64), (4, 1, 72)):
            for row in (False, True):
                name = f"tiles{' of a row' if row else ''} {dtype} {heads}"
                checks[name] = lambda dtype=dtype, heads=heads, row=row: read_tiles(dtype, heads, row=row)
    for shape in (Shape(z=4, context=2), Shape(z=2, data=2, context=4), Shape(x=2, z=2, context=2)):
        for way in WAYS:
            for documents in (False, True):
                if way != "ulysses:2+ring" or shape.context == 4:
                    what = "documents" if documents else "rows"
                    dtype = "bfloat16" if documents else "float32"
                    checks[f"{shape} {way} {what}"] = on_ranks(4, over_ranks, shape, way, documents, dtype)
    return run_checks(checks, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

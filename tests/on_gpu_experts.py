"""The GPU tier of mixtures of experts on folds, several NCCL ranks on one GPU. Needs torch and numpy, no pytest.

    FOURFOLD_TEST_DEVICE=cuda python tests/on_gpu_experts.py [names of checks]

Every check prints a line. Start an MPS daemon first where ranks are to run at the same time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

import fourfold as ff
from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.policy import Overlap
from gpu_checks import Check, on_ranks, run_checks
from harness import grid_of, pool
from parity import Case, Options, errors, on_one_process, predicted
from parity import on_ranks as parity_on_ranks

CASES = [
    Case(shape, mode, Options(experts=True, **options))
    for shape, mode, options in (
        (Shape(data=4, expert=4), "sharded", dict(halves=True)),
        (Shape(z=4, expert=2, ez=2), "sharded", dict(halves=True, keep_weights=True)),
        (Shape(x=2, z=2, expert=4), "sharded", dict(odd_tokens=True)),
        (Shape(x=2, z=2, expert=2, ex=2), "sharded", dict(halves=True, keep_gathered=True)),
        (Shape(y=2, z=2, expert=2), "sharded", dict(accumulate=True)),
        (Shape(x=2, data=2, expert=2), "replicated", {}),
        (Shape(z=4, ez=4), "sharded", dict(masked=True)),
    )
]


def equals_one_process(case: Case) -> Check:
    """Return the check that losses, gradients and steps in fp64 are those of one process.

    Messages are those predicted; their bytes follow from the choices of tokens, which the planner does not know.
    """

    def check() -> Sequence[str]:
        ranks = pool(case.shape.world)
        ranks.start(parity_on_ranks, case)
        one = on_one_process(case)
        found = ranks.results(timeout=120)
        worst = {kind: error for kind, error in errors(case, one, found).items() if not error <= 1e-10}
        said = [f"differs from one process: {worst}"] if worst else []
        for rank, result in enumerate(found):
            sent = [Collective(*record) for record in result["records"]]
            if Counter(map(str, sent)) != Counter(map(str, predicted(case, rank))):
                said.append(f"rank {rank} has not the messages that were predicted")
        return said or [""]

    return check


def step_without_waiting(shape: Shape, policy: dict[str, Any], changes: dict[str, Any]) -> str:
    """Take steps in which torch may not wait for the GPU; the dispatch itself waits for its counts alone."""
    grid = grid_of(shape)
    sizes = dict(hidden=64, heads=4, kv_heads=4, head_dim=16, expert_hidden=64, bias_rate=0.01)
    options = ff.Policy(compute_dtype=torch.bfloat16, **policy)
    model = ff.models.build(ff.models.config("moe-tiny", **{**sizes, **changes}), grid, policy=options)
    optimizer = ff.optim.AdamW(model, lr=1e-3)
    rows = 2 * shape.z * shape.data
    tokens = ff.local_rows(torch.arange(16 * rows).view(rows, 16) % 257, grid).to(grid.device)
    try:
        for mode in ("default", "default", "error"):  # the first step compares the ranks' rows
            torch.cuda.set_sync_debug_mode(mode)
            loss = model(tokens, tokens, count=16 * rows)
            loss.backward()
            optimizer.clip_and_step(1.0)
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return f"ok a loss of {loss.item():.3f}"


def main(names: list[str]) -> int:
    checks = {f"fp64 on {case}": equals_one_process(case) for case in CASES}
    halves, padded = {"overlap": Overlap(halves=2)}, {"pad_experts": True}
    for shape in (Shape(data=4, expert=4), Shape(z=4, expert=2, ez=2), Shape(x=2, z=2, expert=2, ex=2)):
        checks[f"no wait on {shape}, counts"] = on_ranks(4, step_without_waiting, shape, {}, {})
        checks[f"no wait on {shape}, halves"] = on_ranks(4, step_without_waiting, shape, halves, {})
        checks[f"no wait on {shape}, padded"] = on_ranks(4, step_without_waiting, shape, padded, {"capacity": 1.5})
        again = {"recompute": "block", **halves}
        checks[f"no wait on {shape}, recompute"] = on_ranks(4, step_without_waiting, shape, again, {})
    return run_checks(checks, names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

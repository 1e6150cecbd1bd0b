"""`clip_and_step`: what clipping and stepping in turn give, and nothing at all where the norm is not finite.

Also the seconds that a rank stands waiting for others, which the ledger keeps by axis.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

import fourfold as ff
from fourfold import comm
from fourfold.grid import Grid, Shape
from fourfold.optim import AdamW
from fourfold.params import local_of
from fourfold.policy import Policy
from harness import grid_of

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53, bias=False)
"""Without biases: the true gradient of a key's is 0, and Adam magnifies what rounding leaves of it."""
MAX_NORM = 0.25
"""Below the norm of the gradients here, so that they are scaled."""


class Run:
    """A model in training on some grid."""

    def __init__(self, grid: Grid, policy: Policy, dtype: torch.dtype) -> None:
        self.grid, self.policy = grid, policy
        self.model = ff.models.build(CONFIG, grid, policy=policy, dtype=dtype)
        self.optimizer = AdamW(self.model, lr=1e-2, weight_decay=0.3)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        rows = ff.local_rows(torch.arange(step, step + 64).view(4, 16) % 53, self.grid).to(self.grid.device)
        self.model(rows, rows).backward()

    def spoil(self, value: float) -> None:
        """Put a value into one shard of one gradient, on all ranks that hold a copy of it."""
        axes = ("x", "y", "z", "data") if self.policy.shard_optimizer else ("x", "y", "z")
        if all(self.grid.coords[axis] == self.grid.size(axis) - 1 for axis in axes):
            local_of(self.model.layers[0].attention.q.weight.grad)[-1, -1] = value

    def state(self) -> dict[str, Tensor]:
        """Everything that a step changes."""
        names = {part: name for name, part in self.optimizer.parts.items()}
        found = {name: local_of(p).detach().cpu().clone() for name, p in self.model.named_parameters()}
        for part, state in self.optimizer.state.items():
            found |= {f"{key} of {names[part]}": value.detach().cpu().clone() for key, value in state.items()}
        return found


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest, or inf where it is not a number or the two hold different things."""
    if a.keys() != b.keys():
        return float("inf")
    worst = max((a[name] - b[name]).abs().max().item() for name in a if a[name].numel())
    return worst if worst <= float("inf") else float("inf")


def on(shape: Shape) -> Grid:
    return Grid.alone("cpu") if shape.world == 1 else grid_of(shape)


def clipped(shape: Shape, policy: Policy, dtype: torch.dtype, max_norm: float) -> tuple[float, list[tuple]]:
    """The largest difference between the two ways after two steps, and the norms of both."""
    together, apart = (Run(on(shape), policy, dtype) for _ in range(2))
    norms = []
    for step in range(2):
        together.backward(step)
        apart.backward(step)
        together_norm = together.optimizer.clip_and_step(max_norm).norm.item()
        norms.append((together_norm, ff.clip_grad_norm_(apart.model.parameters(), max_norm).item()))
        apart.optimizer.step()
    return difference(together.state(), apart.state()), norms


def skipped(shape: Shape, policy: Policy, dtype: torch.dtype, value: float) -> dict[str, Any]:
    """Steps 0, a bad one, 1 beside steps 0, 1; also a bad one before all others."""
    run, other, late = (Run(on(shape), policy, dtype) for _ in range(3))
    for each in (run, other):
        each.backward(0)
        each.optimizer.clip_and_step(MAX_NORM)
    before = run.state()
    run.backward(7)
    run.spoil(value)
    outcome = run.optimizer.clip_and_step(MAX_NORM)
    found: dict[str, Any] = {"finite": bool(outcome.norm.isfinite()), "blamed": outcome.first_not_finite()}
    found["changed by the bad step"] = difference(run.state(), before)
    parameters = {name: local_of(p).detach().clone() for name, p in late.model.named_parameters()}
    late.backward(7)
    late.spoil(value)
    late.optimizer.clip_and_step(MAX_NORM)
    after = {name: found for name, found in late.state().items() if name in parameters}
    found["changed by a bad first step"] = difference(after, parameters)
    late.backward(0)
    late.optimizer.clip_and_step(MAX_NORM)
    found["the first good step after it"] = difference(late.state(), before)
    for each in (run, other):
        each.backward(1)
        each.optimizer.clip_and_step(MAX_NORM)
    found["the next good step"] = difference(run.state(), other.state())
    return found


SHARDED = Policy(shard_optimizer=True, bucket_bytes=10_000)
GRIDS = [
    (Shape(x=2, z=2), Policy(), torch.float64),
    (Shape(y=2, data=2), Policy(), torch.float32),
    (Shape(x=2, data=2), SHARDED, torch.float64),
    (Shape(x=2, data=2), SHARDED, torch.float32),
]
IDS = [f"{shape} {dtype}" for shape, _, dtype in GRIDS]
SOME = [pytest.param(*grid, marks=[pytest.mark.slow] if place == 3 else []) for place, grid in enumerate(GRIDS)]
"""All but the last in `make test`: its grid and its dtype each occur before it."""
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


def check_clipped(found: tuple[float, list[tuple]], tolerance: float) -> None:
    worst, norms = found
    assert worst <= tolerance
    for together, apart in norms:
        assert together == pytest.approx(apart, rel=tolerance)
        assert together > MAX_NORM, "nothing would be clipped"


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("max_norm", [MAX_NORM, 1e3, float("inf")])
def test_clip_and_step_is_clip_then_step(dtype: torch.dtype, max_norm: float) -> None:
    check_clipped(clipped(Shape(), Policy(), dtype, max_norm), TOLERANCES[dtype])


@pytest.mark.parametrize(("shape", "policy", "dtype"), SOME, ids=IDS)
def test_clip_and_step_is_clip_then_step_on_grids(ranks, shape: Shape, policy: Policy, dtype: torch.dtype) -> None:
    found = ranks(4).run(clipped, shape, policy, dtype, MAX_NORM)
    for each in found:
        check_clipped(each, TOLERANCES[dtype])
        assert each[1] == found[0][1], "the norm is that of all ranks"


UNTOUCHED = {
    "finite": False,
    "blamed": "layers.0.attention.q.weight",
    "changed by the bad step": 0.0,
    "changed by a bad first step": 0.0,
    "the first good step after it": 0.0,
    "the next good step": 0.0,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_that_is_not_finite_leaves_no_trace(dtype: torch.dtype, value: float) -> None:
    assert skipped(Shape(), Policy(), dtype, value) == UNTOUCHED


@pytest.mark.parametrize(("shape", "policy", "dtype"), SOME, ids=IDS)
def test_one_bad_shard_skips_the_step_on_every_rank(ranks, shape: Shape, policy: Policy, dtype: torch.dtype) -> None:
    value = float("nan") if shape.data == 1 else float("-inf")
    assert ranks(4).run(skipped, shape, policy, dtype, value) == [UNTOUCHED] * 4


def test_without_gradients_nothing_happens_and_the_norm_is_zero() -> None:
    run = Run(on(Shape()), Policy(), torch.float32)
    before = run.state()
    outcome = run.optimizer.clip_and_step(1.0)
    assert outcome.norm.item() == 0
    assert outcome.first_not_finite() is None
    assert difference(run.state(), before) == 0


def test_a_plain_step_after_clip_and_step_scales_nothing() -> None:
    runs = [Run(on(Shape()), Policy(), torch.float32) for _ in range(2)]
    for each in runs:
        each.backward(0)
    runs[0].optimizer.clip_and_step(MAX_NORM)
    ff.clip_grad_norm_(runs[1].model.parameters(), MAX_NORM)
    runs[1].optimizer.step()
    for each in runs:
        each.backward(1)
        each.optimizer.step()
    assert difference(runs[0].state(), runs[1].state()) <= 1e-6
    local_of(runs[0].model.norm.weight.grad)[0] = float("nan")
    runs[0].optimizer.step()
    assert local_of(runs[0].model.norm.weight).isnan().any(), "skipping is for clip_and_step alone"


# --- seconds of waiting

LATE = 0.15


def waits() -> list[dict[str, float]]:
    """Exposed seconds by axis: rank 1 late at two collectives, then at one that rank 0 waits for after work of
    its own, then none."""
    grid = grid_of(Shape(z=2))
    late, number, taken = grid.coords["z"] == 1, torch.ones(4, device=grid.device), []

    def together() -> None:
        comm.all_reduce(number, grid, "z").wait()
        grid.ledger.take_exposed()

    for launch in (comm.all_gather, comm.reduce_scatter):
        together()
        time.sleep(LATE if late else 0)
        pending = launch(number, grid, "z")
        pending.wait()
        pending.wait()  # counts once
        taken.append(grid.ledger.take_exposed()())
    together()
    time.sleep(LATE if late else 0)
    pending = comm.all_reduce(number, grid, "z")
    time.sleep(0 if late else 1.5 * LATE)
    pending.wait()
    taken.append(grid.ledger.take_exposed()())
    taken.append(grid.ledger.take_exposed()())
    comm.all_reduce(number, grid, "x").wait()  # an axis of one rank
    taken.append(grid.ledger.take_exposed()())
    return taken


def test_a_late_rank_costs_the_others_exposed_seconds_on_that_axis(ranks) -> None:
    rounds = [ranks(2).run(waits) for _ in range(3)]
    for taken in chain.from_iterable(of_rank[3:] for of_ranks in rounds for of_rank in of_ranks):
        assert taken == {}
    assert all(taken.keys() == {"z"} for early, late in rounds for taken in (*early[:3], *late[:2]))
    # the least of the rounds, since a busy machine delays anyone at any time
    early = [min(of_ranks[0][number]["z"] for of_ranks in rounds) for number in range(3)]
    late = [min(of_ranks[1][number]["z"] for of_ranks in rounds) for number in range(2)]
    assert all(0.9 * LATE < taken < 5 for taken in early[:2])
    # who comes last, or has work meanwhile, waits for nobody
    assert all(0 < taken < early[0] for taken in (*late, early[2]))

"""The sides of the scaling study: each way to train, with the best grid that the simulator finds for it.

A side is a family of grids and policies. The fastest member that fits into memory counts, on the same machine, with the
same kernels and the same batch. A side that cannot run a case gives the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import torch

from benchmarks.planner.megatron_pipeline import Pipeline, fastest_pipeline, megatron_policy
from benchmarks.planner.published_runs import FITTED, ROWS, SEQ
from benchmarks.planner.replay import choices_of, fitted_machine, replays
from fourfold.axes import AXES
from fourfold.models.config import config
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Candidate, Task
from fourfold.planner.search import SHOWN, search
from fourfold.planner.space import Space
from fourfold.planner.step_program import flops_per_token
from fourfold.policy import Overlap, Policy, Recompute
from fourfold.shape import Shape, shapes_of

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
Z_FIRST = ("x", "y", "z", "data"), ("x", "y", "data", "z")
"""The peers' rank orders: tensor parallelism on neighbouring ranks, then z or data."""

MANY_DEVICES, MORE_GRIDS = 32768, 40
"""From this many devices on, estimates rank grids less well, so more grids are simulated: GPT-320B on 131,072 GCDs
takes 9.9 s on the best of 40 grids, and 19.4 s on the best of the 10 that a plan simulates by default."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a number of devices of a machine, with a batch of 16.8M tokens."""

    kind: str
    """`weak` and `strong` use fitted constants where there are any; `unfitted` uses those of the machine file."""
    machine: str
    model: str
    devices: int

    def task(self) -> Task:
        machine = load_machine(self.machine)
        if self.machine in FITTED and self.kind != "unfitted":
            machine = fitted_machine(machine, FITTED[self.machine])
        return Task(config(self.model), machine, ROWS, SEQ)


@dataclass(frozen=True, slots=True)
class Best:
    """The best grid and policy of a side."""

    grid: str
    how: str
    seconds: float
    compute: float
    """Seconds of computation, including recompute and contention."""


def describe(found: Best, case: Case) -> dict[str, Any]:
    """Return the form that is stored: rounded, so that a rerun changes only what really changed."""
    task = case.task()
    mfu = mfu_of(case, found.seconds)
    return {
        "grid": found.grid,
        "how": found.how,
        "seconds": rounded(found.seconds),
        "tokens_per_second": rounded(task.tokens / found.seconds),
        "mfu": rounded(mfu),
        "compute_seconds": rounded(found.compute),
        "exposed_share": rounded(max(0.0, 1 - found.compute / found.seconds)),
    }


def mfu_of(case: Case, seconds: float) -> float:
    """Return the model FLOPs, without recompute, as a share of the advertised peak."""
    task = case.task()
    return flops_per_token(task.config, SEQ).model * task.tokens / seconds / (
        case.devices * task.machine.peak[task.dtype]
    )  # fmt: skip


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


# --- the sides


def fourfold(case: Case) -> Best:
    """Search every grid, rank order and policy."""
    return _searched(case, Space(), top=MORE_GRIDS if case.devices >= MANY_DEVICES else SHOWN)


def fourfold_with_pipe(case: Case) -> Best:
    """Search pipelines as well. The study is older than they are; `scaling.py --case` compares them with Megatron's."""
    return _searched(case, Space(axes=AXES))


def megatron(case: Case) -> Best:
    """Search tensor and sequence parallelism inside a node, replicas with a sharded optimizer, and pipelines."""
    shapes = [shape for shape in _inside_a_node(case) if shape.z == 1]
    policies = tuple(megatron_policy(recompute) for recompute in RECOMPUTE)
    staged = fastest_pipeline(case.task(), case.devices, RECOMPUTE)
    found = [_of_staged(staged)] if staged else []
    try:
        found.append(_searched(case, Space(tuple(shapes), policies, orders=Z_FIRST)))
    except ValueError:
        if not found:
            raise
    return min(found, key=lambda one: one.seconds)


def fsdp(case: Case) -> Best:
    """Shard every weight over all devices."""
    policies = tuple(_torch_policies(keep_gathered=False))
    return _searched(case, Space((Shape(z=case.devices),), policies, orders=Z_FIRST[:1]))


def hsdp(case: Case) -> Best:
    """Search grids that shard weights over groups of devices and replicate the groups."""
    shapes = [shape for shape in shapes_of(case.devices) if shape.x == shape.y == 1 and shape.data > 1]
    return _searched(case, Space(tuple(shapes), tuple(_torch_policies(keep_gathered=False)), orders=Z_FIRST))


def fsdp_and_tp(case: Case) -> Best:
    """Search tensor and sequence parallelism inside a node with weights sharded over groups of nodes, which may be
    replicated."""
    shapes = [shape for shape in _inside_a_node(case) if shape.x > 1 and shape.z > 1]
    # torch's tensor parallelism keeps what it gathered and does not overlap its messages with computation
    return _searched(case, Space(tuple(shapes), tuple(_torch_policies(keep_gathered=True)), orders=Z_FIRST))


def published(case: Case) -> Best:
    """Replay the published 4D system with its overlaps on the best of the first grids of its own list."""
    choices = choices_of(case.machine, case.model, case.devices)
    if not choices:
        raise ValueError(f"{case.model} fits on no grid of the published list for {case.devices} devices")
    best = replays(case.task(), choices)[0]
    return _of_choice(best.candidate, best.totals.seconds, best.totals.compute)


SIDES: dict[str, Callable[[Case], Best]] = {
    "Fourfold": fourfold,
    "Megatron": megatron,
    "FSDP": fsdp,
    "HSDP": hsdp,
    "FSDP x TP": fsdp_and_tp,
    "published 4D": published,
}


def compare(case: Case) -> dict[str, dict[str, Any]]:
    """Return the best of each side, or the reason why it cannot run the case."""
    found: dict[str, dict[str, Any]] = {}
    for name, side in SIDES.items():
        try:
            found[name] = describe(side(case), case)
        except ValueError as error:
            found[name] = {"refused": str(error)}
    return found


# --- pieces of them


def _searched(case: Case, space: Space, top: int = SHOWN) -> Best:
    if space.shapes == ():
        raise ValueError(f"this family has no grid for {case.devices} devices")
    best = search(case.task(), case.devices, space=space, top=top).best
    return _of_choice(best.candidate, best.seconds, best.totals.compute)


def _inside_a_node(case: Case) -> Iterator[Shape]:
    per_node = load_machine(case.machine).devices_per_node
    return (shape for shape in shapes_of(case.devices) if shape.y == 1 and shape.x <= per_node)


def _torch_policies(*, keep_gathered: bool) -> Iterator[Policy]:
    """Yield FSDP's policies: with and without resharding after forward, prefetched gathers, deferred reductions, and an
    optimizer that is not sharded over replicas."""
    overlap = Overlap(halves=1, wgrad_behind_messages=False)
    base = Policy(compute_dtype=torch.bfloat16, keep_gathered=keep_gathered, overlap=overlap)
    for recompute, keep_weights in product(RECOMPUTE, (False, True)):
        yield replace(base, recompute=recompute, keep_weights=keep_weights)


def _of_choice(choice: Candidate, seconds: float, compute: float) -> Best:
    kept = [name for name in ("keep_gathered", "keep_weights") if getattr(choice.policy, name)]
    parts: Sequence[str] = [choice.policy.activations, f"recompute {choice.policy.recompute}", *kept]
    how = f"{', '.join(parts)}, {choice.micro_steps} x {choice.rows} rows"
    return Best(str(choice.shape), how.replace("_", " "), seconds, compute)


def _of_staged(staged: Pipeline) -> Best:
    choice = staged.candidate
    how = f"recompute {choice.policy.recompute}, {choice.micro_steps} x {choice.rows} rows"
    grid = f"{choice.shape} " if choice.shape.world > 1 else ""
    return Best(f"{grid}pipe={staged.stages}", how, staged.seconds, staged.compute)

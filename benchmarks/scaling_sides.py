"""What stands side by side in the scaling study: each way to train on a grid, and the best that the simulator finds.

A side is a family of grids and policies; of each the fastest that fits into memory is taken, on the same machine, with
the same kernels and the same batch. A side that cannot run a case says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, get_args

import torch

from fourfold.grid import Shape, shapes_of
from fourfold.models.config import config
from fourfold.planner.flops import flops_per_token
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Choice, Task
from fourfold.planner.search import SHOWN, Space, search
from fourfold.policy import Overlap, Policy, Recompute
from planner_megatron import Staged, fastest_pipeline, megatron_policy
from planner_points import FITTED, ROWS, SEQ
from planner_replay import choices_of, fitted_machine, replays

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
Z_FIRST = ("x", "y", "z", "data"), ("x", "y", "data", "z")
"""Rank orders of peers: tensor parallelism on neighbours, then either of the others."""

MANY_DEVICES, MORE_GRIDS = 32768, 40
"""With so many devices estimates rank grids less well, so that more of them are simulated: GPT-320B on 131,072 GCDs
takes 9.9 s on the best of 40 grids and 19.4 s on the best of the 10 that a plan simulates by itself."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on so many devices of a machine, batch 16.8M tokens."""

    kind: str
    """weak, strong, or unfitted: the constants of the machine file where those of the published runs are fitted."""
    machine: str
    model: str
    devices: int

    def task(self) -> Task:
        machine = load_machine(self.machine)
        if self.machine in FITTED and self.kind != "unfitted":
            machine = fitted_machine(machine, FITTED[self.machine])
        return Task(config(self.model), machine, ROWS, SEQ)


@dataclass(frozen=True, slots=True)
class Found:
    """The best of a side."""

    grid: str
    how: str
    seconds: float
    compute: float
    """Seconds of computation, with what recompute and contention add."""


def describe(found: Found, case: Case) -> dict[str, Any]:
    """As it is stored: rounded, so that a rerun changes what changed."""
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
    """Model FLOPs, without recompute, of the advertised peak."""
    task = case.task()
    return flops_per_token(task.config, SEQ).model * task.tokens / seconds / (
        case.devices * task.machine.peak[task.dtype]
    )  # fmt: skip


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


# --- the sides


def fourfold(case: Case) -> Found:
    """Every grid, order and policy."""
    return _searched(case, Space(), top=MORE_GRIDS if case.devices >= MANY_DEVICES else SHOWN)


def megatron(case: Case) -> Found:
    """Tensor and sequence parallelism inside a node, replicas with a sharded optimizer, and stages of a pipeline."""
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


def fsdp(case: Case) -> Found:
    """All devices share every weight."""
    policies = tuple(_torch_policies(keep_gathered=False))
    return _searched(case, Space((Shape(z=case.devices),), policies, orders=Z_FIRST[:1]))


def hsdp(case: Case) -> Found:
    """Weights shared by groups of devices, groups replicated."""
    shapes = [shape for shape in shapes_of(case.devices) if shape.x == shape.y == 1 and shape.data > 1]
    return _searched(case, Space(tuple(shapes), tuple(_torch_policies(keep_gathered=False)), orders=Z_FIRST))


def fsdp_and_tp(case: Case) -> Found:
    """Tensor and sequence parallelism inside a node, weights shared by groups of nodes, groups replicated or not."""
    shapes = [shape for shape in _inside_a_node(case) if shape.x > 1 and shape.z > 1]
    # torch's tensor parallelism keeps what it gathered, and nothing runs behind its messages
    return _searched(case, Space(tuple(shapes), tuple(_torch_policies(keep_gathered=True)), orders=Z_FIRST))


def published(case: Case) -> Found:
    """The published 4D system with its overlaps, on the best of the first grids of its own list."""
    choices = choices_of(case.machine, case.model, case.devices)
    if not choices:
        raise ValueError(f"{case.model} fits on no grid of the published list of {case.devices} devices")
    best = replays(case.task(), choices)[0]
    return _of_choice(best.choice, best.totals.seconds, best.totals.compute)


SIDES: dict[str, Callable[[Case], Found]] = {
    "Fourfold": fourfold,
    "Megatron": megatron,
    "FSDP": fsdp,
    "HSDP": hsdp,
    "FSDP x TP": fsdp_and_tp,
    "published 4D": published,
}


def compare(case: Case) -> dict[str, dict[str, Any]]:
    """Each side, or the reason why it cannot run the case."""
    found: dict[str, dict[str, Any]] = {}
    for name, side in SIDES.items():
        try:
            found[name] = describe(side(case), case)
        except ValueError as error:
            found[name] = {"refused": str(error)}
    return found


# --- pieces of them


def _searched(case: Case, space: Space, top: int = SHOWN) -> Found:
    if space.shapes == ():
        raise ValueError(f"{case.devices} devices make no grid of this family")
    best = search(case.task(), case.devices, space=space, top=top).best
    return _of_choice(best.choice, best.seconds, best.totals.compute)


def _inside_a_node(case: Case) -> Iterator[Shape]:
    per_node = load_machine(case.machine).devices_per_node
    return (shape for shape in shapes_of(case.devices) if shape.y == 1 and shape.x <= per_node)


def _torch_policies(*, keep_gathered: bool) -> Iterator[Policy]:
    """Weights gathered again in backward or kept, gathers ahead and reductions behind; the optimizer is not cut over
    replicas."""
    overlap = Overlap(halves=1, behind_products=False)
    base = Policy(compute=torch.bfloat16, keep_gathered=keep_gathered, overlap=overlap)
    for recompute, keep_weights in product(RECOMPUTE, (False, True)):
        yield replace(base, recompute=recompute, keep_weights=keep_weights)


def _of_choice(choice: Choice, seconds: float, compute: float) -> Found:
    kept = [name for name in ("keep_gathered", "keep_weights") if getattr(choice.policy, name)]
    parts: Sequence[str] = [choice.policy.activations, f"recompute {choice.policy.recompute}", *kept]
    how = f"{', '.join(parts)}, {choice.micro_steps} x {choice.rows} rows"
    return Found(str(choice.shape), how.replace("_", " "), seconds, compute)


def _of_staged(staged: Staged) -> Found:
    choice = staged.choice
    how = f"recompute {choice.policy.recompute}, {choice.micro_steps} x {choice.rows} rows"
    grid = f"{choice.shape} " if choice.shape.world > 1 else ""
    return Found(f"{grid}pipe={staged.stages}", how, staged.seconds, staged.compute)

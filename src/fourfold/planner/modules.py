"""Plans for any module: its code is run dry on every grid, and what it did is simulated.

Slower than the closed forms by a factor of a thousand, and just as true: the program is the code's own. Grids are tried
in a fixed order, those with few ranks on x and y first, until the time is up; what was not tried says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from fourfold.grid import Shape, shapes_of
from fourfold.models.open import ModelBuilder, why_data_only
from fourfold.planner.dry import Dry, dry_run
from fourfold.planner.flops import Flops
from fourfold.planner.price import Choice, Priced, Task, without_arrivals
from fourfold.planner.search import GIB, Plan, Refused
from fourfold.planner.seconds import Seconds
from fourfold.planner.simulate import Timeline, simulate
from fourfold.planner.work import Attention, Product
from fourfold.policy import Policy

LONGEST = 60.0
"""Seconds after which no further grid is tried."""
NOT_TRIED = "not tried: {:.0f} s were up; fewer devices have fewer grids"


@dataclass(frozen=True, slots=True)
class Whole:
    """Bytes that are not told apart."""

    total: int

    @property
    def kinds(self) -> dict[str, int]:
        return {"all": self.total}


@dataclass(frozen=True)
class ModulePrice(Priced):
    """Of a module that was run dry."""

    dry: Dry

    @property
    def memory(self) -> Whole:
        return Whole(self.dry.peak_bytes)

    @cached_property
    def flops(self) -> Flops:
        """What its products and attention compute, recompute included: the two are not told apart."""
        counted = sum(work.flops for work in self.dry.program if isinstance(work, Product | Attention))
        per_token = counted * self.choice.micro_steps * self.choice.shape.world / self.task.tokens
        return Flops(per_token, per_token)

    @property
    def halves(self) -> int:
        return 1

    @property
    def parameters(self) -> int:
        return self.dry.parameters

    def timeline(self) -> Timeline:
        return play(self.task, self.choice, self.dry, trace=True)


def play(task: Task, choice: Choice, dry: Dry, *, trace: bool = False) -> Timeline:
    phases = [(0, "forward")]
    return simulate(dry.program, Seconds(task.machine, choice.shape), task.dtype, phases=phases, trace=trace)


def search_module(
    task: Task, build: ModelBuilder, devices: int, *, longest: float = LONGEST, progress: Callable[[str], None] = print
) -> Plan:
    """Rank the grids of that many devices for a module that a function builds."""
    began = time.perf_counter()
    plan = Plan(task, devices)
    found: list[ModulePrice] = []
    for shape in sorted(_shapes(build, devices), key=lambda shape: (shape.x * shape.y, shape.y, shape.z)):
        if time.perf_counter() - began > longest and found:
            plan.refused.append(Refused(shape, NOT_TRIED.format(longest)))
            continue
        progress(f"running the module dry on {shape}")
        reason = _try(task, build, shape, plan, found)
        if reason:
            plan.refused.append(Refused(shape, reason))
    if not found:
        shape, reason, _ = plan.refused[0]
        raise ValueError(f"the module runs on no grid of {devices} devices; on {shape}: {reason}")
    plan.ranked = sorted(found, key=lambda price: price.seconds)
    plan.seconds = time.perf_counter() - began
    return plan


def _shapes(build: ModelBuilder, devices: int) -> list[Shape]:
    return [Shape(data=devices)] if why_data_only(build) else list(shapes_of(devices))


def _try(task: Task, build: ModelBuilder, shape: Shape, plan: Plan, found: list[ModulePrice]) -> str:
    """Run it with as many rows at once as fit into memory; the reason where nothing does."""
    places = shape.data * shape.z
    if task.rows % places:
        return f"data*z = {places} places do not divide a batch of {task.rows} rows"
    limit = task.machine.memory - task.machine.reserve
    policy = Policy() if why_data_only(build) else Policy(compute_dtype=task.compute, shard_optimizer=shape.data > 1)
    reason = ""
    for rows in _divisors(task.rows // places):
        plan.candidates += 1
        try:
            dry = dry_run(build, shape, rows=rows, seq=task.seq, policy=policy, micro_steps=1, optimizer=True)
        except (ValueError, RuntimeError, TypeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if dry.peak_bytes <= limit:
            choice = Choice(shape, policy, rows, task.rows // places // rows)
            plan.simulated += 1
            one = play(task, choice, dry).totals
            # what gradients owe over data is sent once; the optimizer's part, which is small, is counted each time
            totals = one.plus(without_arrivals(one), choice.micro_steps - 1)
            found.append(ModulePrice(task, choice, totals, dry))
            return ""
        reason = f"needs {dry.peak_bytes / GIB:.1f} GiB of {limit / GIB:.1f} GiB with {rows} rows at once"
    return reason


def _divisors(rows: int) -> list[int]:
    """From all rows at once down to one."""
    return [each for each in range(rows, 0, -1) if rows % each == 0]

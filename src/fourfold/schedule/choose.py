"""The schedule of a step, from what a policy asks for. A pure function, so that planner and ranks choose the same."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from fourfold.schedule.action import Schedule, ScheduleError
from fourfold.schedule.find import find
from fourfold.schedule.named import named
from fourfold.schedule.stages import Stages

FOUND = "found"
"""The name of the schedule that `find` finds for stages whose seconds are in proportion to their layers."""


@lru_cache(maxsize=64)
def choose(wanted: str | Schedule, stages: Stages, micro_steps: int) -> Schedule:
    """Return the schedule for these stages and micro-batches, checked if it was given and not built here.

    `wanted` is a schedule, or the name of one; `found` searches for one that keeps no more than 1F1B does, and `auto`
    is 1f1b for one stage per rank, else interleaved in loops and found on waves.
    """
    schedule = wanted if isinstance(wanted, Schedule) else _by_name(wanted, stages, micro_steps)
    if schedule.placement != stages.placement:
        raise ScheduleError(
            f"the schedule places its stages on pipe ranks {_listed(schedule.placement)}, the model on "
            f"{_listed(stages.placement)}; choose another schedule, or other stages"
        )
    if schedule.micro_steps != micro_steps:
        raise ScheduleError(
            f"the schedule is for {schedule.micro_steps} micro-batches, the step has {micro_steps}; give the step as "
            "many micro-batches, or choose a schedule by its name"
        )
    if schedule is wanted:
        schedule.check()
    return schedule


def _by_name(name: str, stages: Stages, micro_steps: int) -> Schedule:
    chunks, loops = stages.chunks, stages.placement == tuple(range(stages.pipe)) * stages.chunks
    if name == "auto":
        name = ("1f1b" if chunks == 1 else "interleaved") if loops else FOUND
    if name != FOUND:
        return named(name, stages.pipe, chunks, micro_steps)
    layers = [max(len(stages.layers_of(stage)), 0.5) for stage in range(len(stages.placement))]
    memory = min(stages.pipe, micro_steps)
    return find(stages.placement, micro_steps, dict.fromkeys("FBW", layers), memory=memory).schedule


def _listed(placement: Sequence[int]) -> str:
    return ", ".join(map(str, placement))

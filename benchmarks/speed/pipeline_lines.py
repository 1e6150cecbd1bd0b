"""The lines of the pipeline benchmarks: Fourfold's schedules, and those of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import fourfold as ff
from benchmarks.shared.workloads import Line
from fourfold.schedule.action import Schedule
from fourfold.schedule.choose import FOUND, choose
from fourfold.schedule.find import find
from fourfold.schedule.play import StageSeconds
from fourfold.schedule.stages import Stages

OURS, TORCH, DEEPSPEED, ALONE = "fourfold", "torch", "DeepSpeed", "unpipelined"
"""The kinds of lines: the runtimes, and one rank's share of the computation without any message."""
TIMERS = {"wave": "v-half", "loop": "zb-h1"}
"""The schedule whose F, B and W are timed on a placement, before one is found for it."""


@dataclass(frozen=True)
class PipeLine(Line):
    """One line of a pipeline benchmark."""

    schedule: str = ""
    """Fourfold's name of the schedule, or torch's class without the word Schedule."""
    chunks: int = 1
    """Stages of a rank."""
    placement: str = "loop"
    memory: float = 1.0
    """How much a found schedule may keep, in times of what 1F1B keeps."""

    @property
    def ranks(self) -> int:
        return self.shape.pipe

    def stages(self, layers: int) -> Stages:
        return Stages.even(layers, self.ranks, self.chunks, self.placement)

    def timed_schedule(self, layers: int) -> Schedule:
        """Return the schedule with which the actions of this line are timed one by one."""
        name = TIMERS[self.placement] if self.schedule == FOUND else self.schedule
        return choose(name, self.stages(layers), self.micro_batches)

    def schedule_for(self, layers: int, seconds: StageSeconds, hop: float) -> Schedule:
        """Return the schedule that the line runs; one that is found depends on the seconds of stages and messages."""
        stages = self.stages(layers)
        if self.schedule != FOUND:
            return choose(self.schedule, stages, self.micro_batches)
        memory = self.memory * min(self.ranks, self.micro_batches)
        return find(stages.placement, self.micro_batches, seconds, hop, memory=memory).schedule


def fourfold(ranks: int, micro_batches: int, name: str, *, policy: ff.Policy = ff.Policy(), **more: Any) -> PipeLine:
    """Return a line of Fourfold; `name` is a schedule, followed by its chunks per rank if there are several."""
    schedule, chunks = _named(name)
    made = PipeLine(OURS, ff.Shape(pipe=ranks), name, policy, micro_batches=micro_batches, schedule=schedule)
    return replace(made, chunks=chunks, **more)


def found(ranks: int, micro_batches: int, memory: float = 1.0, chunks: int = 2) -> PipeLine:
    """Return a line with a schedule that is found within this many times the memory of 1F1B.

    Several chunks per rank are placed on waves.
    """
    where = f"waves of {chunks}" if chunks > 1 else "one stage per rank"
    variant = f"{FOUND}, {where}" + (f", {memory:g} x memory" if memory != 1 else "")
    made = PipeLine(OURS, ff.Shape(pipe=ranks), variant, micro_batches=micro_batches, schedule=FOUND)
    return replace(made, chunks=chunks, placement="wave" if chunks > 1 else "loop", memory=memory)


def torch_lines(ranks: int, micro_batches: int) -> Iterator[PipeLine]:
    """Yield all schedules of torch; those that it builds with stages down and up again have two chunks on a wave."""
    for name, placement in (
        ("GPipe", "loop"),
        ("1F1B", "loop"),
        ("Interleaved1F1B 2", "loop"),
        ("Interleaved1F1B 4", "loop"),
        ("LoopedBFS 2", "loop"),
        ("InterleavedZeroBubble 2", "loop"),
        ("ZBVZeroBubble 2", "wave"),
        ("DualPipeV 2", "wave"),
    ):
        schedule, chunks = _named(name)
        made = PipeLine(TORCH, ff.Shape(pipe=ranks), name, micro_batches=micro_batches, schedule=schedule)
        yield replace(made, chunks=chunks, placement=placement)


def deepspeed_lines(ranks: int, micro_batches: int) -> Iterator[PipeLine]:
    """Yield DeepSpeed's only schedule, if it is installed."""
    if find_spec("deepspeed") is not None:
        yield PipeLine(DEEPSPEED, ff.Shape(pipe=ranks), "1F1B", micro_batches=micro_batches, schedule="1F1B")


COMMON = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved 2": "Interleaved1F1B 2",
    "interleaved 4": "Interleaved1F1B 4",
    "looped-bfs 2": "LoopedBFS 2",
}
"""The schedules that both sides have, by their variants: Fourfold's, and torch's."""


def _named(name: str) -> tuple[str, int]:
    schedule, _, chunks = name.partition(" ")
    return schedule, int(chunks or 1)

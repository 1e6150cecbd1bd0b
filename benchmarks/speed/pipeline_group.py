"""Measures the lines of a pipeline benchmark: builds them with their schedules and predicts each step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, cast

from benchmarks.shared.rank_pool import RankPool
from benchmarks.shared.workloads import Line, Measure, Workload
from benchmarks.speed import pipeline_ranks, pipeline_split, rank_jobs
from benchmarks.speed.gpu_ranks import TIMEOUT, Clock, Group, GroupBenchmark
from benchmarks.speed.gpu_ranks_results import LineRecord, Results
from benchmarks.speed.pipeline_lines import OURS, PipeLine
from benchmarks.speed.pipeline_ranks import PipelineRank
from benchmarks.speed.pipeline_stages import StackSize
from fourfold.schedule.action import Schedule
from fourfold.schedule.play import StageSeconds, equal_seconds, play


class PipelineGroup(GroupBenchmark):
    """One group of pipelines on its rank pool."""

    def __init__(
        self, name: str, pool: RankPool, size: StackSize, lines: Sequence[PipeLine], results: Results, clock: Clock
    ) -> None:
        super().__init__(name, pool, cast(Any, None), lines, results, clock, threads=bool(size.sleep_seconds))
        self.size = size
        self.hop = 0.0
        self.schedules: dict[str, Schedule] = {}
        self.seconds: dict[str, StageSeconds] = {}
        """The seconds of each of Fourfold's lines: of sleeps as each turn measures them, of blocks timed one by one."""
        self._slept: dict[str, list[dict[str, list[float]]]] = {}
        self._host: dict[str, list[dict[tuple[str, int], float]]] = {}

    def open(self, lines: Sequence[Line]) -> None:
        self.pool.run(rank_jobs.open_group, None, [], timeout=TIMEOUT)
        ranks = cast(PipeLine, lines[0]).ranks
        self.hop = fmean(self.pool.run(pipeline_ranks.hop_seconds, ranks, self.size, timeout=TIMEOUT))
        print(f"{self.name}: a message takes {self.hop * 1e3:.2f} ms", flush=True)

    def build(self, line: Line) -> None:
        piped, schedule = cast(PipeLine, line), None
        if piped.kind == OURS:
            stages = piped.ranks * piped.chunks
            if each := self.size.sleep_seconds:
                seconds = equal_seconds(each, each, each, piped.ranks, piped.chunks)
            else:
                found = self.pool.run(pipeline_ranks.action_seconds, piped, self.size, timeout=TIMEOUT)
                seconds = pipeline_ranks.merged_seconds(found, stages)
            schedule = piped.schedule_for(self.size.layers, seconds, self.hop)
            self.schedules[line.name], self.seconds[line.name] = schedule, seconds
        self.pool.run(pipeline_ranks.build, piped, self.size, schedule, timeout=TIMEOUT)

    def try_warm_up(self, line: Line, warmup: int) -> bool:
        if not self.size.sleep_seconds:
            return super().try_warm_up(line, warmup)
        # a warm-up opens connections, for which nobody needs to sleep
        self.pool.run(pipeline_ranks.stay_awake, line.name, True, timeout=TIMEOUT)
        if not super().try_warm_up(line, warmup):
            return False
        self.pool.run(pipeline_ranks.stay_awake, line.name, False, timeout=TIMEOUT)
        ranks = cast(PipeLine, line).ranks  # until a turn is timed, one is expected to take what 1F1B takes
        self.record(line).wall_seconds["step"] = 3 * self.size.sleep_seconds * (line.micro_batches + ranks)
        return True

    def turn(self, line: Line, measure: Measure) -> list[rank_jobs.Turn]:
        if not self.size.sleep_seconds:
            return super().turn(line, measure)
        self.pool.run(pipeline_ranks.slept, line.name, timeout=TIMEOUT)  # forgets those of earlier lines and turns
        found = super().turn(line, measure)
        self._slept[line.name] = self.pool.run(pipeline_ranks.slept, line.name, timeout=TIMEOUT)
        self._host[line.name] = self.pool.run(pipeline_ranks.host_seconds, line.name, timeout=TIMEOUT)
        return found

    def add(self, record: LineRecord, turns: dict[Measure, list[rank_jobs.Turn]], when: float) -> None:
        super().add(record, turns, when)
        if self.size.sleep_seconds:
            self._add_idle(record)
        if record.line in self.schedules:
            schedule, seconds = self.schedules[record.line], self.seconds[record.line]
            played = play(schedule, seconds, self.hop)
            _note(record, "predicted", played.makespan)
            _note(record, "predicted idle", played.idle_share)
            _note(record, "kept", max(played.peaks))
            _note(record, "hop", self.hop)

    def _add_idle(self, record: LineRecord) -> None:
        """Note the share of time in which ranks did not sleep, and what sleeps of a kind took."""
        slept, step = self._slept[record.line], record.seconds["step"][-1]
        work = sum(sum(times) for rank in slept for times in rank.values())
        _note(record, "idle", 1 - work / (len(slept) * step))
        _note(record, "actions", fmean([sum(map(len, rank.values())) for rank in slept]))
        if (schedule := self.schedules.get(record.line)) is not None:
            means = {kind: fmean([one for rank in slept for one in rank[kind]]) for kind in ("F", "B", "W")}
            self.seconds[record.line] = {kind: [mean] * schedule.stages for kind, mean in means.items()}
            on_host = pipeline_ranks.merged_seconds(self._host[record.line], schedule.stages)
            makespan = play(schedule, on_host, self.hop).makespan
            _note(record, "predicted idle with host", 1 - work / (len(slept) * makespan))


class SplitGroup(GroupBenchmark):
    """The lines that show what it costs to compute input and weight gradients apart."""

    def open(self, lines: Sequence[Line]) -> None:  # noqa: ARG002
        self.pool.run(pipeline_split.open_split, timeout=TIMEOUT)
        self.pool.run(rank_jobs.open_group, None, [], timeout=TIMEOUT)

    def build(self, line: Line) -> None:
        self.pool.run(pipeline_split.build, line, self.workload, timeout=TIMEOUT)


def _note(record: LineRecord, what: str, number: float) -> None:
    record.figures.setdefault(what, []).append(number)


def pipeline_group(name: str, ranks: int, size: StackSize, lines: Sequence[PipeLine]) -> Group:
    """Return a group of pipelines."""

    def benchmark(pool: RankPool, results: Results, clock: Clock) -> GroupBenchmark:
        return PipelineGroup(name, pool, size, lines, results, clock)

    return Group(name, ranks, size.about, lines, benchmark, PipelineRank)


def split_group(name: str, ranks: int, workload: Workload, lines: Sequence[PipeLine]) -> Group:
    """Return the group of P7."""

    def benchmark(pool: RankPool, results: Results, clock: Clock) -> GroupBenchmark:
        return SplitGroup(name, pool, workload, lines, results, clock)

    return Group(name, ranks, workload.about, lines, benchmark, PipelineRank)

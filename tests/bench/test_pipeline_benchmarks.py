"""The benchmarks of pipeline schedules: every line runs, idle time is what is not slept, and missed bars are said."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.speed import pipeline_gpu, pipeline_sleep
from benchmarks.speed.gpu_ranks_results import LineRecord, Results
from benchmarks.speed.pipeline_lines import ALONE, OURS, TORCH, found, fourfold, torch_lines
from benchmarks.speed.pipeline_ranks import merged_seconds
from fourfold.schedule.play import equal_seconds, play

pytestmark = pytest.mark.slow


def records_of(out: Path) -> dict[str, LineRecord]:
    return {line: record for (_, line), record in Results.open(out).records.items()}


def test_ranks_that_sleep_are_as_idle_as_their_schedule(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    lines = "(1f1b|1F1B|zb-h1|ZBVZeroBubble 2|waves of 2)$"
    options = ["--groups", "2:4", "--seconds", "0.02", "--rounds", "1", "--lines", lines, "--out", str(out)]
    assert pipeline_sleep.main(options) == 0
    records = records_of(out)
    assert len([record for record in records.values() if record.kind != "DeepSpeed"]) == 5
    for record in records.values():
        assert record.error is None
        work = 4 * 3 * 0.02  # of each rank: four micro-batches, each with F, B and W
        (step,), (idle,) = record.seconds["step"], record.figures["idle"]
        assert step > work and 0 < idle < 1
        assert step * (1 - idle) > 0.999 * work, "what is not idle was slept, and nobody sleeps too short"
    for name in ("1f1b", "zb-h1"):
        line = fourfold(2, 4, name)
        seconds = equal_seconds(0.02, 0.02, 0.02, 2, 1)
        shortest = play(line.schedule_for(8, seconds, 0.0), seconds).makespan
        assert records[line.name].step > 0.999 * shortest, "no step is faster than its schedule"
        assert records[line.name].figures["predicted"][0] > 0.999 * shortest
    text = out.with_suffix(".md").read_text()
    assert "1f1b is not slower than torch's 1F1B: " in text
    assert "zb-h1: idle within 2 points of `play`: " in text
    assert "not measured" not in text


def test_the_benchmark_for_a_gpu_runs_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    lines = "unpipelined|1F1B$|1f1b|1.25|split"
    options = ["--device", "cpu", "--groups", "2:4,2:split", "--rounds", "1", "--warmup", "1", "--lines", lines]
    assert pipeline_gpu.main([*options, "--out", str(out)]) == 0
    records = records_of(out)
    assert len(records) == 9
    assert all(record.error is None for record in records.values())
    text = out.with_suffix(".md").read_text()
    assert "1f1b: a step within 10% of `play`: " in text
    assert "split without pipe: a step takes at most 1.02 " in text and "split on 2 stages: " in text
    with pytest.raises(SystemExit, match="another --out"):
        pipeline_gpu.main([*options, "--out", str(out), "--partition", "off"])


def test_a_found_schedule_keeps_to_its_memory() -> None:
    seconds = equal_seconds(1.0, 1.0, 1.0, 4, 2)
    for memory in pipeline_gpu.LIMITS:
        schedule = found(4, 8, memory).schedule_for(32, seconds, 0.0)
        assert max(map(schedule.peak, range(4))) <= memory * 4
    assert fourfold(4, 8, "interleaved 2").schedule_for(32, seconds, 0.0).chunks == 2
    assert {line.chunks for line in torch_lines(4, 8)} == {1, 2, 4}


def test_seconds_of_all_ranks_are_joined() -> None:
    """A schedule without W gives B all of a backward pass."""
    split = merged_seconds([{("F", 0): 1.0, ("B", 0): 2.0, ("W", 0): 3.0}, {("F", 1): 4.0, ("BW", 1): 5.0}], 2)
    assert split == {"F": [1.0, 4.0], "B": [2.0, 5.0], "W": [3.0, 0.0]}


def record(kind: str, variant: str, seconds: float, **figures: float) -> LineRecord:
    times = {"step": [seconds] * 3}
    told = {name.replace("_", " "): [value] * 3 for name, value in figures.items()}
    name = f"8 micro-batches, {variant}" if variant else "8 micro-batches"
    made = LineRecord("4:8", f"{kind} {name}", kind, {"pipe": 4}, name, times, rounds=[1.0, 2.0, 3.0])
    made.figures = told
    return made


def test_missed_bars_stay_visible() -> None:
    alone, torchs = record(ALONE, "", 0.7), record(TORCH, "1F1B", 1.0)
    slow = record(OURS, "found, waves of 2", 0.96, predicted=0.8, kept=4.0)
    quick = record(OURS, "found, waves of 2, 1.5 x memory", 0.8, predicted=0.79, kept=6.0)
    told = list(pipeline_gpu.bars([alone, torchs, slow, quick], {"group": "4:8"}))
    assert [("MISSED" in bar, "reached" in bar) for bar in told] == [
        (True, False),  # 20% above what was predicted
        (False, True),
        (True, False),  # 0.96 of torch's time within 1.25 of the memory
        (False, True),
        (False, True),  # a bubble of 12.5%
    ]
    idle = record(OURS, "zb-h1", 1.0, idle=0.15, predicted_idle=0.12)
    theirs, ours = record(TORCH, "1F1B", 1.0), record(OURS, "1f1b", 1.01, idle=0.3, predicted_idle=0.29)
    told = list(pipeline_sleep.bars([theirs, idle, ours], {}))
    assert ["MISSED" in bar for bar in told] == [True, False, True, False]

"""The benchmark of the planner on parts of a GPU, on the CPU with few lines; and what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner import on_gpu
from benchmarks.speed.gpu_ranks_results import LineRecord
from fourfold.planner.machine import load_machine


@pytest.mark.slow
def test_the_benchmark_runs_on_the_cpu(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    options = ["--device", "cpu", "--rounds", "1", "--warmup", "1", "--lines", "pipe=4 4 micro|data=4$"]
    assert on_gpu.main([*options, "--out", str(out)]) == 0
    page = out.with_suffix(".md").read_text()
    assert "| pipe=4 4 micro-batches, 1f1b" in page and "| data=4 " in page
    assert "mean error at most 10%" in page
    assert load_machine(str(out.with_suffix(".toml"))).device == "cpu"


def test_the_memory_of_each_rank_is_compared_with_that_of_its_pipe_rank() -> None:
    line = next(line for line in on_gpu.lines_of(16) if line.shape.data == 2 and line.shape.pipe == 2)
    record = LineRecord("4", line.name, "fourfold", line.shape.sizes, "", {"step": [1.0]})
    predicted = on_gpu.Predicted(1.0, [100, 50])
    assert on_gpu.memory_error(line, record, predicted) is None
    record.figures[on_gpu.PEAKS] = [100.0, 100.0, 50.0, 40.0]  # ranks 2 and 3 are on pipe rank 1
    assert on_gpu.memory_error(line, record, predicted) == pytest.approx(0.25)


def test_bars_are_judged_from_two_lines_on() -> None:
    assert list(on_gpu.bars([0.1], [], [(1.0, 1.1)])) == ["nothing to judge yet"]
    told = list(on_gpu.bars([0.05, 0.3], [0.02], [(1.0, 1.1), (2.0, 1.5)]))
    assert "worst error at most 25%: **MISSED**, 30.0%" in told
    assert "memory of every rank within 10%: reached, 2.0%" in told

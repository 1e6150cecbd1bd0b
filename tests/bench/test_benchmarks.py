"""The benchmark of several ranks: it measures, goes on, judges and survives. `test_trainers.py` has its peers."""

from __future__ import annotations

import ast
import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.shared import rank_pool
from benchmarks.shared.pairs import Pairs
from benchmarks.shared.peers import AXES_OF
from benchmarks.shared.pipelines import INTERLEAVED, PIPELINE
from benchmarks.speed import captured_collectives, gpu_ranks, gpu_ranks_table, rank_jobs, threads
from benchmarks.speed.gpu_ranks_lines import MECHANISMS, MODES, WORKLOADS, lines_of
from benchmarks.speed.gpu_ranks_results import LineRecord, Results

pytestmark = pytest.mark.slow

TINY = WORKLOADS["tiny"]


MAY_IMPORT = {
    "shared": {"shared"},
    "speed": {"shared", "speed"},
    "cluster": {"shared", "cluster"},
    "planner": {"shared", "speed", "cluster", "planner"},
    "checkpoint": {"shared", "checkpoint"},
    "context": {"shared", "speed", "cluster", "context"},
    "experts": {"shared", "speed", "cluster", "experts"},
}


def test_benchmarks_import_one_way_and_define_each_class_once() -> None:
    folder = Path(gpu_ranks.__file__).parents[1]
    classes: dict[str, str] = {}
    imports: dict[str, set[str]] = {}
    for path in folder.rglob("*/*.py"):
        module = f"benchmarks.{path.parent.name}.{path.stem}"
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                assert node.name not in classes, f"{node.name} is defined in {classes[node.name]} and {module}"
                classes[node.name] = module
        found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        names = {name for node in found for name in (node.module, *(f"{node.module}.{a.name}" for a in node.names))}
        imports[module] = {name for name in names if name.startswith("benchmarks.")}
        assert {name.split(".")[1] for name in imports[module]} <= MAY_IMPORT[path.parent.name], module
    TopologicalSorter({module: names & imports.keys() for module, names in imports.items()}).prepare()  # no cycles


def test_measures_goes_on_and_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.jsonl"

    def call(lines: str, *more: str) -> dict[str, LineRecord]:
        options = ["--device", "cpu", "--warmup", "2", "--out", str(out), "--lines", lines, *more]
        assert gpu_ranks.main(options) == 0
        return {line: record for (_, line), record in Results.open(out).records.items()}

    few = "FSDP2 z=4$"
    more = f"{few}|FSDP2 x TP.* z=2$|HSDP x TP|8 micro-batches|fourfold x=2 z=2( replicated| Megatron.*)?$"
    first = call(few, "--rounds", "1")
    assert len(first) == 1
    found = call(more, "--rounds", "1", "--every", "--threads")
    assert len(found) == 7
    assert len(found["FSDP2 z=4"].rounds) == 2, "it is measured again, beside the lines that are new"
    shared = found["FSDP2 x TP x=2 z=2"]
    assert len(found["FSDP2 z=4"].ratios(shared)) == 1
    for record in found.values():
        assert record.error is None
        assert set(record.rounds) >= set(shared.rounds)
        assert len(record.seconds["step"]) == len(record.rounds) == len(record.first_losses)
        assert record.first_losses == pytest.approx([record.losses[0]] * len(record.rounds), abs=1e-6), (
            "a turn starts from the same weights"
        )
        assert record.losses[0] == pytest.approx(torch.tensor(TINY.config.vocab).log().item(), abs=0.2)
        assert record.losses[1] < record.losses[0]
        assert record.cpu_seconds["main"] > 0
    plainly = found["fourfold x=2 z=2"]
    assert all(len(plainly.seconds[measure]) == 1 for measure in ("step", "compute", "communication"))
    assert plainly.collectives > 0
    monkeypatch.setattr(rank_pool.RankPool, "run", None)  # nothing is left for ranks to do
    assert call(more, "--rounds", "1", "--every") == found
    text = out.with_suffix(".md").read_text()
    assert all(f"| {record.kind} " in text for record in found.values())
    assert "not slower than the best peer on x=2 z=2: " in text
    assert "| line | ms per step | all | main |" in text
    assert "WRONG" not in text
    with pytest.raises(SystemExit, match="another --out"):
        gpu_ranks.main(["--device", "cpu", "--out", str(out), "--warmup", "3"])


def test_a_captured_step_needs_a_longer_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong, said in (
        (["--modes", "captured", "--warmup", "3"], "a captured step is recorded after 3"),
        (["--modes", "eager,fast"], "--modes fast: a mode is one of eager, compiled,"),
        (["--steps", "0"], "--steps 0 must be at least 1"),
    ):
        with pytest.raises(SystemExit):
            gpu_ranks.main(wrong)
        assert said in capsys.readouterr().err


def fail_on(held: rank_jobs.RankModels, ranks: list[int]) -> int:
    if held.rank in ranks:
        raise ValueError(f"rank {held.rank} will not")
    return os.getpid()


def test_a_line_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_pool, "GRACE_SECONDS", 0.5)
    six_rows = replace(TINY, rows=6)
    lines = [line for line in lines_of(4, TINY) if line.name in ("FSDP2 z=4", "TP x=4")]
    results = Results.open(tmp_path / "found.jsonl", {"warmup": 1})
    four = rank_pool.RankPool(4, "cpu", rank_jobs.RankModels)
    try:
        pids = four.run(fail_on, [])
        with pytest.raises(rank_pool.RanksFailedError, match="rank 0 will not") as failed:
            four.run(fail_on, [0, 1, 2, 3])
        assert failed.value.everyone
        assert four.run(fail_on, []) == pids
        gpu_ranks.GroupBenchmark("4:tiny", four, six_rows, lines, results, gpu_ranks.Clock(float("inf"))).measure(1, 1)
        assert "6 rows" in (results.of("4:tiny", lines[0]).error or "")
        assert results.of("4:tiny", lines[1]).measured
        with pytest.raises(rank_pool.RanksFailedError, match="rank 2 will not"):
            four.run(fail_on, [2])
        assert not four.up, "ranks that others may wait for are not used again"
    finally:
        four.close()


def test_a_line_that_was_not_captured_is_no_measurement(tmp_path: Path) -> None:
    """`StepGraph` runs a step eagerly where it cannot be recorded; the table must not call that captured."""

    class Pool:
        up = True

        def run(self, job: Callable[..., Any], *_: Any, **__: Any) -> list[Any]:
            ran.append(job)
            return [rank_jobs.WarmUp((5.0, 4.0), None, 3, "dropout")] * 4 if job is rank_jobs.warm_up else []

    ran: list[Callable[..., Any]] = []
    line = next(line for line in lines_of(4, TINY, ["captured"]) if line.grid == "x=4")
    results = Results.open(tmp_path / "found.jsonl", {"warmup": 5})
    pool = cast(rank_pool.RankPool, Pool())
    gpu_ranks.GroupBenchmark("4:tiny", pool, TINY, [line], results, gpu_ranks.Clock(1e9)).measure(2, 5)
    assert results.of("4:tiny", line).error == "not captured: dropout"
    assert ran == [rank_jobs.open_group, rank_jobs.build, rank_jobs.warm_up, rank_jobs.drop]


def test_lines_that_cannot_be_built_in_time_leave_time_for_the_others(tmp_path: Path) -> None:
    class Pool:
        up = True

        def run(self, job: Callable[..., Any], *_: Any, **__: Any) -> list[Any]:
            if job is rank_jobs.warm_up:
                return [rank_jobs.WarmUp((5.0, 4.0), None, 3, "")] * 4
            return [rank_jobs.Turn(0.1, 5.0, False, {})] * 4 if job is rank_jobs.turn else []

    class Clock(gpu_ranks.Clock):
        spent = property(lambda _: float(next(seconds)))  # type: ignore[assignment]

    seconds = itertools.count(0, 10)
    lines = lines_of(4, TINY)
    results = Results.open(tmp_path / "found.jsonl", {"warmup": 5})
    pool = cast(rank_pool.RankPool, Pool())
    gpu_ranks.GroupBenchmark("4:tiny", pool, TINY, lines, results, Clock(100)).measure(1, 5)
    measured = [line.name for line in lines if results.of("4:tiny", line).measured]
    assert measured == [line.name for line in lines[:8]], "seven tenths of the time, and the first line in any case"


def test_a_budget_ends_before_a_round_that_does_not_fit() -> None:
    clock = gpu_ranks.Clock(100)
    clock.require("a round", 50)
    with pytest.raises(gpu_ranks.OutOfTime, match="a round would take 101 s more"):
        clock.require("a round", 101)


def test_every_peer_is_met_on_its_grid_in_every_mode() -> None:
    for world, size, grids in ((4, "deep", 6), (8, "deep", 7), (4, "gpt-125m", 6), (4, "wide", 6)):
        workload = WORKLOADS[size]
        lines = lines_of(world, workload, MODES)
        assert len({line.name for line in lines}) == len(lines)
        ours = {(line.grid, line.mode) for line in lines if line.kind == "fourfold"}
        theirs = [line for line in lines if line.kind != "fourfold"]
        pipelines = {(grid, mode) for grid, mode in ours if grid == f"pipe={world}"}
        assert len(pipelines) == (2 if workload.config.layers >= world else 0)
        assert len(ours - pipelines) == 4 * grids
        assert {line.grid for line in theirs if line.pipe == 1} == {grid for grid, _ in ours - pipelines}
        assert {line.mode for line in theirs} == {"eager", "compiled"}
        assert {line.kind for line in theirs} >= {*AXES_OF, PIPELINE}
        whole = {line.micro_batches for line in theirs if line.kind == PIPELINE and line.pipe == world}
        assert whole == {parts for parts in (4, 8, 16) if world <= parts <= workload.rows}
        assert all(line.policy.compile == line.compiled for line in lines if line.kind == "fourfold")
    assert any(line.kind == INTERLEAVED for line in lines_of(4, WORKLOADS["deep"]))
    wide = [line for line in lines_of(4, WORKLOADS["wide"]) if line.kind == INTERLEAVED]
    assert {line.grid for line in wide} == {"pipe=2 data=2"}, "two layers are too few for eight stages"
    assert not any(line.shape.x == 8 for line in lines_of(8, WORKLOADS["gpt-125m"])), "12 heads on 8 ranks"


def test_every_grid_and_every_mechanism_has_a_line() -> None:
    four = lines_of(4, WORKLOADS["deep"], every=True)
    assert len({str(line.shape) for line in four if line.bounded}) == 10
    assert len({line.name for line in four}) == len(four)
    assert {line.variant for line in four} >= set(MECHANISMS)


def test_the_interval_of_paired_ratios() -> None:
    """Hand-worked: of 30 ratios the 10th to the 21st; of 5 there is none, since 2 / 2**5 is more than 5%."""
    ratios = Pairs([number / 10 for number in range(1, 31)])
    assert ratios.interval == (1.0, 2.1)
    assert ratios.median == pytest.approx(1.55) and ratios.not_above_one
    assert Pairs([0.9, 0.8, 1.2, 1.0, 1.1]).interval is None
    assert not Pairs([1.1 + number / 100 for number in range(30)]).not_above_one
    assert not Pairs([0.5, 1.1, 1.2, 1.2, 1.3, 1.4, 1.5]).not_above_one, "few rounds excuse nothing"


def test_cpu_seconds_are_counted_by_thread() -> None:
    stop = threading.Event()

    def burn_the_core() -> None:
        while not stop.is_set():
            sum(range(1000))

    before = threads.thread_seconds()
    worker = threading.Thread(target=burn_the_core)
    worker.start()
    time.sleep(0.3)
    found = threads.since(before)
    stop.set()
    worker.join()
    assert found["python burn_the_core"] > 0.05
    assert found.get("main", 0.0) < found["python burn_the_core"]
    assert threads.without_number("pt_autograd_0") == "pt_autograd"
    assert threads.without_number("NCCL Progress12") == "NCCL Progress"


def recorded(kind: str, seconds: float, peak: int, **bounds: list[float]) -> LineRecord:
    grid = {"x": 1, "y": 1, "z": 4, "data": 1}
    times = {"step": [seconds * 0.99, seconds, seconds * 1.01], **bounds}
    rounds = [1.0, 2.0, 3.0]
    return LineRecord("4:deep", f"{kind} z=4", kind, grid, "", times, "eager", rounds, [10.0, 9.0], [10.0], peak)


def test_missed_bars_stay_visible(tmp_path: Path) -> None:
    path = tmp_path / "found.jsonl"
    run = {
        "command": "python it",
        "date": "2026-01-02",
        "device": "G",
        "torch": "2",
        "nccl": "3",
        "mps": "own",
        "cores": 1,
    }
    results = Results.open(path, {"warmup": 2})
    results.begin("4:deep", {"ranks": 4, **WORKLOADS["deep"].about}, run)

    def bars(*records: LineRecord) -> str:
        results.records.clear()
        for record in (*records, recorded("FSDP2", 1.0, 100)):
            results.records[record.group, record.line] = record
        results.write()
        return gpu_ranks_table.render(path)

    good = bars(recorded("fourfold", 0.6, 105, compute=[0.4], communication=[0.55]))
    assert "MISSED" not in good
    assert "not slower than the best peer on z=4: reached, 0.600 of its time over 3 rounds" in good
    assert "| fourfold | z=4 | eager | 600.0 | 594.0 .. 606.0 | 0.00 | 0.60 | 0.60 |" in good
    assert "| 4:deep | **any grid** | z=4 eager | 600.0 | FSDP2 z=4 eager | 1000.0 | 0.60 |" in good
    bad = bars(recorded("fourfold", 1.1, 106, compute=[0.4], communication=[0.55]))
    assert bad.count("MISSED") == 4  # on its grid, of any kind, over its bounds, memory
    compiled = replace(recorded("fourfold", 0.7, 100), mode="compiled", line="fourfold z=4 compiled")
    assert "on z=4 compiled is not slower than eager: **MISSED**" in bars(compiled, recorded("fourfold", 0.6, 100))
    apart = replace(compiled, losses=[10.0, 9.1])
    assert "the losses of a line's modes agree within 0.5%" in bars(apart, recorded("fourfold", 0.8, 100))
    assert "**MISSED**, 1.11% (fourfold z=4" in bars(apart, recorded("fourfold", 0.8, 100))
    strange = replace(recorded("fourfold", 0.6, 100), first_losses=[float("nan")])
    assert "**WRONG**" in bars(strange)
    other = replace(recorded("fourfold", 0.6, 100), losses=[10.5, 9.0])
    assert "the first losses of all 2 lines agree within 2% of the first loss: **MISSED**" in bars(other)
    apart = replace(recorded("fourfold", 0.6, 100), rounds=[4.0, 5.0, 6.0])
    assert "not measured in the same rounds" in bars(apart)
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_every_sequence_of_collectives_is_timed(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(captured_collectives, "NBYTES", (8 << 10,))
    assert captured_collectives.main(["--device", "cpu", "--ranks", "2", "--count", "4", "--rounds", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("2 ranks on cpu")
    assert len(lines) == len(captured_collectives.SEQUENCES)
    assert all("8 KiB" in line and "recorded" in line for line in lines)

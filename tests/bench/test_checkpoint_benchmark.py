"""The benchmark of checkpoints: it measures both sides, judges what it measured, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpoint import vs_dcp as benchmark
from benchmarks.checkpoint.dcp_table import CALL, WHOLE, GridResults, bars
from benchmarks.checkpoint.disk import scratch
from benchmarks.checkpoint.save_and_load import OURS, PEER, stagers

pytestmark = pytest.mark.slow


def test_measures_both_sides_and_leaves_nothing(tmp_path: Path) -> None:
    out, folder = tmp_path / "found", tmp_path / "checkpoints"
    options = ["--device", "cpu", "--size", "tiny", "--rounds", "1", "--grids", "z=2"]
    assert benchmark.main([*options, "--folder", str(folder), "--out", str(out)]) == 0
    assert not list(folder.iterdir())
    run, facts, *records = [json.loads(line) for line in Path(f"{out}.jsonl").read_text().splitlines()]
    assert run["rounds"] == 1
    measured = {(record["measure"], record["side"]) for record in records}
    loads = {(f"load, {cache}, {grid} grid") for cache in ("warm", "cold") for grid in ("same", "other")}
    loads = {load for load in loads if facts["cold"] or "cold" not in load}
    expected = {(measure, side) for measure in ("save", *loads) for side in (OURS, PEER)}
    expected |= {(measure, side) for measure in (CALL, WHOLE) for side in (OURS, *stagers("cpu"))}
    assert measured == expected
    assert all(len(record["seconds"]) == 1 for record in records)
    for nbytes in facts["file_bytes"].values():  # each byte once: as much as the tensors, and what describes them
        assert facts["nbytes"] <= nbytes < 2.5 * facts["nbytes"]
    text = Path(f"{out}.md").read_text()
    assert "save: throughput not below DCP's: " in text
    assert text.count("| load, warm, ") == 4


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), scratch(tmp_path, 1) as folder:
        (folder / "half").write_bytes(b"written")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit, match="choose another --folder"), scratch(tmp_path, 1 << 60):
        pass


def test_missed_bars_stay_visible() -> None:
    """The peer of a stall is the best of DCP's ways, and only 1.1 times as long as that passes."""

    def judged(save: float, stall: float) -> list[str]:
        group = GridResults("z=2", 2, nbytes=1 << 30)
        taken = {("save", OURS): save, ("save", PEER): 1.0, (CALL, OURS): stall}
        taken |= {(CALL, f"{PEER}, slow"): 2.0, (CALL, f"{PEER}, fast"): 1.0}
        for (measure, side), seconds in taken.items():
            group.add(measure, side, seconds)
        return ["MISSED" if "MISSED" in bar else "reached" for bar in bars(group)]

    assert judged(1.0, 1.1) == ["reached", "reached"]
    assert judged(1.01, 1.11) == ["MISSED", "MISSED"]

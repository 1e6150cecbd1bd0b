"""The scaling study: its sides are the families they claim to be, it goes on, draws the same bytes, and reads runs."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planner import megatron_pipeline, scaling, scaling_sides
from benchmarks.planner.published_runs import POINTS
from benchmarks.planner.scaling_measured import best_of_each, newest_measured, read_measured
from benchmarks.planner.scaling_plot import curve_of, efficiency_of, plot_all, series_of, spread
from benchmarks.planner.scaling_sides import SIDES, Case, compare, mfu_of
from fourfold.models.config import config
from fourfold.planner import search
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Task

pytestmark = pytest.mark.slow

FEW = Case("strong", "perlmutter", "gpt-5b", 8)
RUN = dict(
    side="fourfold", devices=8, grid="x=2 z=4", model="small", seconds=2.0, predicted=1.9, kind="weak",
    compute_seconds=1.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """Of fewer simulations than a study has."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(search, "SIMULATIONS", 20)
        return compare(FEW)


def made_up(kind: str, model: str, devices: int, machine: str = "perlmutter", **refused: str) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for number, side in enumerate(SIDES, start=2):
        seconds = number * 10.0
        sides[side] = dict(
            grid="z=2", how="sharded", seconds=seconds, tokens_per_second=devices / seconds, mfu=0.5 / number,
            compute_seconds=9.0, exposed_share=1 - 9.0 / seconds,
        )  # fmt: skip
    sides |= {side.replace("_", " "): {"refused": reason} for side, reason in refused.items()}
    return dict(kind=kind, machine=machine, model=model, devices=devices, sides=sides)


def sizes_of(grid: str) -> dict[str, int]:
    return {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", grid)}


def test_every_side_stays_in_its_family(found: dict[str, dict[str, Any]]) -> None:
    grids = {side: sizes_of(one["grid"]) for side, one in found.items()}
    assert grids["FSDP"] == {"z": 8}
    assert set(grids["HSDP"]) == {"z", "data"} or set(grids["HSDP"]) == {"data"}
    assert 1 < grids["FSDP x TP"]["x"] <= 4 and grids["FSDP x TP"]["z"] > 1 and "y" not in grids["FSDP x TP"]
    assert grids["Megatron"].get("x", 1) <= 4 and not {"y", "z"} & set(grids["Megatron"])
    assert found["published 4D"]["how"].startswith("replicated, recompute block")


def test_who_may_do_everything_is_not_slower_than_parts_of_it(found: dict[str, dict[str, Any]]) -> None:
    for side in ("FSDP", "HSDP", "FSDP x TP", "published 4D"):
        # candidates are estimated before they are simulated, which may cost a little
        assert found["Fourfold"]["seconds"] <= 1.02 * found[side]["seconds"], side


def test_numbers_of_a_side_belong_together(found: dict[str, dict[str, Any]]) -> None:
    for one in found.values():
        assert one["tokens_per_second"] * one["seconds"] == pytest.approx(8192 * 2048, rel=1e-3)
        assert one["mfu"] == pytest.approx(mfu_of(FEW, one["seconds"]), rel=1e-3)
        assert efficiency_of(one) == pytest.approx(1 - one["exposed_share"], abs=1e-3)
        assert 0 < one["mfu"] < efficiency_of(one) <= 1


def test_mfu_of_a_published_run_is_three_quarters_of_what_was_published() -> None:
    """Their FLOPs count the recompute and all scores: 41.1% of peak for GPT-5B on 512 GCDs."""
    assert mfu_of(Case("weak", "frontier", "gpt-5b", 512), 17.74) == pytest.approx(0.75 * 0.411, rel=0.03)


def test_constants_are_fitted_unless_a_case_says_otherwise() -> None:
    fitted, file = (replace(FEW, kind=kind).task().machine for kind in ("strong", "unfitted"))
    assert fitted.attention < file.attention
    assert fitted.peak == file.peak
    assert Case("weak", "dgx-h100", "gpt-5b", 512).task().machine.name == "dgx-h100"


def test_a_side_that_cannot_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling_sides, "SIDES", {side: SIDES[side] for side in ("FSDP", "published 4D")})
    refused = compare(Case("strong", "perlmutter", "gpt-80b", 16))
    assert "fits on no grid of 16 devices" in refused["FSDP"]["refused"]
    assert "published list for 16 devices" in refused["published 4D"]["refused"]
    with pytest.raises(ValueError, match="16384 places do not divide a batch of 8192 rows"):
        scaling_sides.fsdp(Case("weak", "frontier", "gpt-5b", 16384))


def test_an_interrupted_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []

    def answer(case: Case) -> dict[str, Any]:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(case)
        return made_up(case.kind, case.model, case.devices)["sides"]

    monkeypatch.setattr(scaling, "compare", answer)
    file = tmp_path / "new" / "found.json"
    with pytest.raises(KeyboardInterrupt):
        scaling.study(scaling.QUICK, file)
    assert len(json.loads(file.read_text())["cases"]) == 2
    asked.clear()
    whole = scaling.study(scaling.QUICK, file)
    assert asked == scaling.QUICK[2:]
    assert [case["devices"] for case in whole] == [case.devices for case in scaling.QUICK]
    assert json.loads(file.read_text())["cases"] == whole


def test_no_case_twice_and_weak_scaling_holds_every_published_run() -> None:
    cases = list(scaling.cases())
    assert len(set(cases)) == len(cases)
    weak = {(case.machine, case.devices, case.model) for case in cases if case.kind == "weak"}
    assert {(point.machine, point.devices, point.model) for point in POINTS} <= weak


def test_pipelines_that_are_not_simulated_are_slower() -> None:
    task = Task(config("gpt-125m", layers=4), load_machine("perlmutter"), 64, 1024)
    every = [
        megatron_pipeline._staged(task, choice, stages)
        for choice, stages in megatron_pipeline._pipelines(task, 8, ("none",))
        if megatron_pipeline._fits(task, choice, stages)
    ]
    assert len({staged.stages for staged in every}) > 1
    fastest = min(every, key=lambda staged: staged.seconds)
    assert megatron_pipeline.fastest_pipeline(task, 8, ("none",)) == fastest
    assert fastest.compute < fastest.seconds
    none = replace(task, machine=replace(task.machine, memory=10**8, reserve=0))
    assert megatron_pipeline.fastest_pipeline(none, 8, ("none",)) is None


# --- measured runs


def test_measured_runs_are_read_and_the_fastest_grid_is_taken(tmp_path: Path) -> None:
    runs = [RUN, {**RUN, "seconds": 1.5, "grid": "z=8"}, {**RUN, "devices": 2}, {**RUN, "side": "FSDP2"}]
    runs.append({**RUN, "kind": "strong", "predicted": None})
    file = tmp_path / "2026-11-15-emulated-scaling.json"
    file.write_text(json.dumps(runs))
    (tmp_path / "2026-11-14-emulated-scaling.json").write_text("[]")
    assert newest_measured(tmp_path) == file
    best = best_of_each(read_measured(file), "weak")
    assert [(run.devices, run.grid) for run in best["fourfold", "small"]] == [(2, "x=2 z=4"), (8, "z=8")]
    assert best["fourfold", "small"][1].efficiency == pytest.approx(1.0 / 1.5)
    assert set(best) == {("fourfold", "small"), ("FSDP2", "small")}
    assert newest_measured(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ({}, "must be a list of runs"),
        ([{"side": "FSDP2"}], r"run 0 must have exactly side, devices, .*; it has side"),
        ([RUN, {**RUN, "kind": "week"}], r"run 1: kind='week' is none of"),
        ([{**RUN, "seconds": 0}], r"seconds=0 must be a number above 0"),
        ([{**RUN, "devices": None}], r"devices=None must be a number above 0"),
    ],
)
def test_damaged_measurements_are_refused(tmp_path: Path, runs: Any, message: str) -> None:
    file = tmp_path / "runs.json"
    file.write_text(json.dumps(runs))
    with pytest.raises(ValueError, match=message):
        read_measured(file)


# --- plots


def test_a_line_leaves_out_where_its_side_cannot_run() -> None:
    cases = [made_up("weak", "gpt-5b", 512), made_up("weak", "gpt-10b", 1024, FSDP="too large")]
    assert curve_of(cases, "FSDP", efficiency_of) == [(512, 9 / 40)]
    assert [devices for devices, _ in curve_of(cases, "HSDP", efficiency_of)] == [512, 1024]


def test_names_are_moved_apart_and_keep_their_order() -> None:
    heights = [0.5, 0.1, 0.52, 0.51, 0.9]
    moved = spread(heights, 0.05)
    assert [moved[1], moved[4]] == [0.1, 0.9]
    assert moved[0] < moved[3] < moved[2]
    rising = sorted(moved)
    assert all(after - before >= 0.05 - 1e-12 for before, after in pairwise(rising))
    assert sum(moved) == pytest.approx(sum(heights))
    assert spread([0.99, 0.5, 1.0], 0.1) == pytest.approx([0.9, 0.5, 1.0])


def test_plots_are_the_same_bytes_and_show_every_side(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    cases = [
        made_up("weak", "gpt-5b", 512), made_up("weak", "gpt-10b", 1024),
        made_up("strong", "gpt-80b", 64, FSDP="no"), made_up("strong", "gpt-80b", 256),
        made_up("unfitted", "gpt-40b", 4096),
    ]  # fmt: skip
    assert list(series_of(cases)) == ["weak-perlmutter", "strong-gpt-80b-perlmutter"]
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([RUN, {**RUN, "devices": 2, "side": "something else", "predicted": None}]))
    runs = read_measured(file)
    first, again = (plot_all(cases, runs, tmp_path / name) for name in ("one", "two"))
    assert [path.name for path in first] == [
        "scaling-weak-perlmutter.svg", "scaling-strong-gpt-80b-perlmutter.svg", "scaling-efficiency-weak.svg",
        "scaling-efficiency-strong.svg",
    ]  # fmt: skip
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        text = one.read_text()
        assert all(f">{side}<" in text for side in SIDES), one.name
        assert "dc:date" not in text
    weak, strong = (path.read_text() for path in first[-2:])
    assert ">fourfold, small: measured<" in weak and ">fourfold, small: predicted<" in weak
    assert ">something else, small: measured<" in weak and ">something else, small: predicted<" not in weak
    assert "measured" not in strong
    assert ">published 4D, measured<" in first[0].read_text()


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*matplotlib alone. The results are stored"):
        plot_all([], [], tmp_path)


def test_the_command_writes_results_and_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        scaling, "compare", lambda case: made_up(case.kind, case.model, 8, HSDP="does not fit")["sides"]
    )
    monkeypatch.setattr(scaling, "plot_all", lambda *given: drawn.append(given) or [])
    measured = tmp_path / "runs.json"
    measured.write_text(json.dumps([RUN]))
    out = tmp_path / "found.json"
    given = ["--quick", "--out", str(out), "--plots", str(tmp_path), "--measured", str(measured)]
    assert scaling.main(given) == 0
    text = out.with_suffix(".md").read_text()
    assert "Strong scaling of gpt-5b on perlmutter" in text and "does not fit" in text
    assert re.search(r"published 4D, measured +\| 9\.03", text)
    assert re.search(r"weak +\| fourfold +\| small +\| 8 +\| x=2 z=4 +\| 2 +\| 1\.9 +\| 50%", text)
    assert drawn[0][0] == json.loads(out.read_text())["cases"]

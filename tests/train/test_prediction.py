"""What is predicted of a run beside what it measures: stored, told once, never in the way of training."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from curves import Curves, config_of, write_texts
from fourfold.grid import Grid, Shape
from fourfold.models.transformer import Transformer
from fourfold.planner.machine import Timed, load_machine, to_toml
from fourfold.report.run_data import read_run
from fourfold.report.run_page import write_report
from fourfold.train.config import PlanSection, TrainConfig
from fourfold.train.language_model import ReferenceModel
from fourfold.train.loop import Run
from fourfold.train.planning import COMPARED, WHOLE_PROCESS, Hardware, PredictionCheck, locate, predict
from fourfold.train.progress import compared, predicted
from fourfold.train.run_folder import JsonLines, scalars
from harness import grid_of

ESTIMATES = "laptop: estimates; `fourfold calibrate` measures this machine"

# --- a run


def trained(config: TrainConfig, folder: Path, wanted: range = range(0)) -> dict[str, Any]:
    """A job: a run; its events, what rank 0 stored, and what it launched in its third step."""
    run = Run(config, grid_of(config.grid.shape), folder, profile=wanted)
    kept = Curves()
    run.begin(lambda: [kept, JsonLines(folder / "metrics.jsonl")])
    launch, launched = run._launch, []

    def watched(step: int) -> None:
        with run.grid.ledger.watch() as records:
            launch(step)
        launched.extend(map(str, records) if step == 3 else [])

    run._launch = watched  # type: ignore[method-assign]
    run.train()
    return {"events": kept.events, "stored": run.stored, "launched": launched}


def config_for(folder: Path, shape: Shape, steps: int, **plan: Any) -> TrainConfig:
    write_texts(folder)
    changes = {"model.layers": 1, "train.evaluate_every": 0, "checkpoint.save": False}
    return replace(config_of("gpt-tiny", "fp32", steps, folder, shape, changes), plan=PlanSection(**plan))


def test_what_a_run_says_of_its_memory_makes_no_model_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks wait for rank 0 meanwhile: three models on meta took 0.1 s of a core for every layer."""
    config = config_for(tmp_path, Shape(), 1)
    model = ReferenceModel(config, Grid.alone("cpu"))

    def fails(*_: object, **__: object) -> None:
        raise AssertionError("another model is made")

    monkeypatch.setattr(Transformer, "__init__", fails)
    assert model.facts()["kept_bytes"]["none"] > model.facts()["kept_bytes"]["block"] > 0
    (said,) = model.notes()
    assert "kept for backward" in said


def test_a_run_stores_what_was_predicted_and_how_it_compares(ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    config = config_for(tmp_path, Shape(z=2), 9)
    first, second = ranks(2).run(trained, config, folder, range(4, 5))
    assert second["stored"] == {}  # rank 0 alone predicts
    facts = json.loads((folder / "run.json").read_text())
    assert facts == first["stored"]

    said = facts["predicted"]
    assert (said["machine"], said["notes"], said["halves"]) == ("laptop", [ESTIMATES], facts["halves"]["number"])
    assert said["link_seconds"].keys() == said["exposed_seconds"].keys() == {"z"}
    assert said["seconds"] >= said["compute_seconds"] > 0
    assert said["seconds"] == pytest.approx(said["compute_seconds"] + said["exposed_seconds"]["z"], rel=0.05)
    assert said["link_seconds"]["z"] >= said["exposed_seconds"]["z"] > 0
    assert sum(said["memory_bytes"].values()) == said["peak_memory_bytes"] > 0

    events = [event for event in first["events"] if event["event"] == "compared"]
    assert events == [{"event": "compared", **facts["compared"]}]  # told once
    (told,) = events
    # the traced step is left out, and the first two
    assert (told["steps"], told["step"], told["machine"]) == ([3, 5, 6, 7, 8], 8, "laptop")
    assert told["notes"] == [ESTIMATES, WHOLE_PROCESS]
    of = {event["step"]: event for event in first["events"] if event["event"] == "step"}
    for pair, measured, expected in (
        (told["seconds"], lambda event: event["seconds"], said["seconds"]),
        (told["exposed_seconds"]["z"], lambda event: event["exposed_seconds"]["z"], said["exposed_seconds"]["z"]),
    ):
        median = sorted(measured(of[step]) for step in told["steps"])[2]
        assert pair == {"predicted": expected, "measured": median, "ratio": pytest.approx(median / expected)}
    # of tensors, and of a process
    held = sorted(of[step]["peak_memory_bytes"] for step in told["steps"])[2]
    assert told["peak_memory_bytes"] == {"predicted": said["peak_memory_bytes"], "measured": held, "ratio": None}
    assert not read_run(folder).notes  # the report knows the event
    check_timeline(folder, said["seconds"], first["launched"])
    check_report(folder)


def check_timeline(folder: Path, seconds: float, launched: list[str]) -> None:
    """The predicted step in Perfetto's format: every collective that the run launches, with the same name."""
    events = json.loads((folder / "profile" / "predicted.json").read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    on_links = [span["name"] for span in spans if names[span["tid"]].startswith("z")]
    assert Counter(on_links) == Counter(f"fourfold::{record}" for record in launched)
    assert any(span["name"] == "fourfold::product E1 layers.0.mlp.up" for span in spans)
    (whole,) = (span for span in spans if names[span["tid"]] == "step")
    assert whole["dur"] == pytest.approx(1e6 * seconds)
    assert all(span["ts"] + span["dur"] <= whole["dur"] * (1 + 1e-9) for span in spans)


def check_report(folder: Path) -> None:
    page = write_report(folder).read_text()
    assert "<h2>Plan and run</h2>" in page
    assert 'id="plan"' in page
    for row in ("seconds", "computation", "exposed over z", "on the link of z", "peak memory"):
        assert f"<tr><td>{row}</td><td>" in page
    assert "Measured is the median of steps 3, 5, 6, 7, 8 on rank 0." in page
    assert ESTIMATES in page
    assert '<a href="profile/predicted.json">predicted.json</a>' in page


def test_a_run_whose_machine_cannot_be_priced_trains_and_says_why(ranks, tmp_path: Path) -> None:
    """A node of one device has no place for two ranks."""
    small = replace(load_machine("laptop"), name="small", devices_per_node=1, inside={})
    (tmp_path / "small.toml").write_text(to_toml(small))
    folder = tmp_path / "run"
    config = config_for(tmp_path, Shape(x=2), 2, machine=str(tmp_path / "small.toml"))
    first, _ = ranks(2).run(trained, config, folder, range(2, 3))
    assert [event["event"] for event in first["events"]] == ["step", "step", "profile", "end"]
    said = json.loads((folder / "run.json").read_text())["predicted"]
    assert said.keys() == {"unpriced"}
    assert "has 2 ranks, but small is one node of 1 devices" in said["unpriced"]
    assert predicted(said) == f"not priced: {said['unpriced']}"
    assert "\n" not in said["unpriced"]
    assert not (folder / "profile" / "predicted.json").exists()
    page = write_report(folder).read_text()
    assert "The planner could not price this run: the grid x=2 has 2 ranks" in page


def test_a_run_need_not_be_predicted(ranks, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (found,) = ranks(1).run(trained, config_for(tmp_path, Shape(), 1, compare=False), folder)
    assert [event["event"] for event in found["events"]] == ["step", "end"]
    assert not {"predicted", "compared"} & json.loads((folder / "run.json").read_text()).keys()
    assert "Plan and run" not in write_report(folder).read_text()


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"predicted": {}}, "The run ended before enough of its steps were measured."),
        ({"predicted": {"seconds": 0.5, "exposed_seconds": [], "memory_bytes": 3, "notes": "none"}}, ">500 ms<"),
        ({"predicted": {"seconds": "0.5", "machine": "<b>"}, "compared": 7}, "for the machine &lt;b&gt;."),
        ({"predicted": {"unpriced": "a < b"}}, "The planner could not price this run: a &lt; b."),
        ({"predicted": {"seconds": None}, "compared": {"seconds": {"measured": 2.0}, "steps": [3]}}, ">2 s<"),
    ],
)
def test_a_report_takes_what_there_is(more: dict[str, Any], shown: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "run.json").write_text(json.dumps({"model": "gpt-tiny", "grid": {"z": 2}, **more}))
    page = write_report(tmp_path).read_text()
    assert "Plan and run" in page
    assert shown in page


# --- a comparison

PREDICTED = {"machine": "laptop", "notes": [ESTIMATES], "seconds": 0.5, "exposed_seconds": {"x": 0.1, "z": 0.0}}
PREDICTED |= {"peak_memory_bytes": 1 << 20, "compute_seconds": 0.4}


def step(number: int, seconds: float) -> dict[str, Any]:
    exposed = {"x": seconds / 10}  # nothing was waited for over z
    return {"step": number, "seconds": seconds, "exposed_seconds": exposed, "peak_memory_bytes": number << 20}


def compare(seconds: list[float], traced: range = range(0)) -> dict[str, Any] | None:
    comparison = PredictionCheck(PREDICTED, traced=traced, on_gpu=True)
    told = [comparison.add(step(number, each)) for number, each in enumerate(seconds, 1)]
    found = [event for event in (*told, comparison.finish()) if event is not None]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize(
    ("seconds", "traced", "steps", "median"),
    [
        ([9.0, 8.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], range(0), [3, 4, 5, 6, 7], 3.0),
        ([9.0, 8.0, 1.0, 2.0], range(0), [3, 4], 1.5),  # what there is
        ([9.0, 8.0], range(0), [2], 8.0),
        ([9.0], range(0), [1], 9.0),
        ([9.0, 8.0, 1.0, 2.0, 3.0], range(3, 5), [5], 3.0),
        ([9.0, 8.0, 1.0, 2.0, 3.0], range(1, 6), [3, 4, 5], 2.0),  # all were traced
    ],
)
def test_the_median_of_steady_steps_is_compared(
    seconds: list[float], traced: range, steps: list[int], median: float
) -> None:
    found = compare(seconds, traced)
    assert found is not None
    assert found["steps"] == steps
    assert len(steps) <= COMPARED
    assert found["seconds"] == {"predicted": 0.5, "measured": median, "ratio": median / 0.5}
    assert found["exposed_seconds"]["x"]["measured"] == pytest.approx(median / 10)
    assert found["exposed_seconds"]["z"] == {"predicted": 0.0, "measured": 0.0, "ratio": None}


def test_a_run_without_a_step_compares_nothing() -> None:
    assert compare([]) is None


def test_a_comparison_is_a_table_for_people_and_numbers_for_plots() -> None:
    found = compare([9.0, 8.0, 1.0, 1.0, 1.0])
    assert found is not None
    title, head, *rows = compared(found).splitlines()
    assert title == "predicted on laptop, and measured (median of 3 steps from 3 to 5):"
    assert head.split() == ["predicted", "measured", "ratio"]
    assert [" ".join(row.split()) for row in rows] == [
        "seconds per step 500 ms 1 s 2",
        "exposed over x 100 ms 100 ms 1",
        "exposed over z 0 ms 0 ms -",
        "peak memory 1 MiB 4 MiB 4",
        ESTIMATES,
    ]
    assert len({len(row) for row in rows[:4]}) == 1  # columns end alike
    numbers = dict(scalars(found))
    assert numbers["compared/seconds/ratio"] == 2.0
    assert numbers["compared/exposed_seconds/x/predicted"] == 0.1
    assert not any(name.startswith(("compared/notes", "compared/machine", "compared/step")) for name in numbers)
    said = predicted(PREDICTED)
    assert said.startswith(
        "predicted on laptop: 500 ms per step (computing 400 ms, exposed over x 100 ms, exposed over z"
    )
    assert said.endswith(f"peak memory 1 MiB; {ESTIMATES}")


# --- the machine


def job(ranks: int = 4, device: str = "cpu", cores: int = 4) -> Hardware:
    return Hardware(ranks, device, 1 << 34, cores)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def test_ranks_on_the_cpu_share_its_cores_and_its_memory() -> None:
    packaged = load_machine("laptop")
    for cores, part in ((4, 1.0), (2, 0.5), (8, 2.0)):
        found = locate("auto", job(4, cores=cores), torch.float32)[0]
        assert found.gemm["fp32"] == part * packaged.gemm["fp32"]
        assert found.memory_bandwidth == part * packaged.memory_bandwidth
        assert found.memory == (1 << 34) // 4
    assert locate("auto", job(12), torch.float32)[0].devices_per_node == 12  # processes, as many as there are
    named = locate("laptop", job(4, cores=1), torch.float32)[0]
    assert named == packaged  # asked for by name it is what its file says


@pytest.mark.parametrize(
    ("device", "name", "note"),
    [
        ("NVIDIA A100-SXM4-40GB", "perlmutter", ""),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100", ""),
        ("NVIDIA A100-PCIE-40GB", "perlmutter", "no packaged machine has NVIDIA A100-PCIE-40GB: priced as perlmutter"),
        ("Quadro", "dgx-h100", "no packaged machine has Quadro: priced as dgx-h100, which has NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_gpu_is_found_by_its_name(device: str, name: str, note: str) -> None:
    machine, notes = locate("auto", job(device=device), torch.bfloat16)
    assert machine.name == name
    assert machine.memory == 1 << 34  # that of the device which is there
    assert note in " ".join(notes)
    assert notes[-1] == f"{name}: estimates; `fourfold calibrate` measures this machine"
    assert len(notes) == (2 if note else 1)


def test_nodes_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert locate("auto", job(4, "NVIDIA A100-SXM4-40GB"), torch.bfloat16)[0].devices_per_node == 2
    machine, notes = locate("auto", job(4), torch.float32)
    assert "laptop has no network between nodes: priced as one node" in notes
    assert machine.devices_per_node >= 4


def test_a_measured_machine_is_not_called_an_estimate(tmp_path: Path) -> None:
    machine = load_machine("laptop")
    sources = dict.fromkeys([*machine.sources, "measured"], "measured today")
    measured = replace(machine, name="here", measured=(Timed(64, 64, 64, "fp32", 1e-3),), sources=sources)
    path = tmp_path / "here.toml"
    path.write_text(to_toml(measured))
    assert locate(str(path), job(), torch.float32)[1] == []
    (note,) = locate(str(path), job(device="NVIDIA H200"), torch.float32)[1]
    assert note == "here was measured on cpu, and this is NVIDIA H200"


def test_a_dtype_that_a_file_lacks_is_priced_by_fp32(tmp_path: Path) -> None:
    machine, notes = locate("perlmutter", job(device="NVIDIA A100-SXM4-40GB"), torch.float64)
    assert machine.gemm["fp64"] == load_machine("perlmutter").gemm["fp32"] / 2
    assert notes[0] == "perlmutter has no FLOP/s for fp64: priced with half of those of fp32"
    config = config_of("gpt-tiny", "fp64", 1, tmp_path, Shape(x=2), {"plan.machine": "perlmutter"})
    assert predict(config, job(2)).price.seconds > 0

"""What a run makes of the parts of its steps: a corrected machine file, a table, and a plan that would be faster."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from test_train import cli_as_rank

from curves import Curves, config_of, write_texts
from fourfold.grid import Shape
from fourfold.ledger import Collective, Flight
from fourfold.planner.machine import load_machine, to_toml
from fourfold.planner.step_parts import (
    StepParts,
    TracedParts,
    TraceEvent,
    combine,
    device_parts,
    flight_seconds,
    host_parts,
)
from fourfold.report.run_data import read_run
from fourfold.report.run_page import write_report
from fourfold.train.config import PlanSection, TrainConfig, read_config
from fourfold.train.correction import FIRST_TRACED, RunCorrection, steps_to_trace
from fourfold.train.loop import Run
from fourfold.train.planning import Hardware, locate, predict
from fourfold.train.progress import corrected
from fourfold.train.run_folder import JsonLines
from harness import grid_of
from runs import lines_of, train_arguments

# --- a run


def trained(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """A job: a run; its events, its losses and norms, and on how many ranks the parts of its steps were measured."""
    run = Run(config, grid_of(config.grid.shape), folder)
    kept = Curves()
    run.begin(lambda: [kept, JsonLines(folder / "metrics.jsonl")])
    run.train()
    results = [(event["loss"], event["grad_norm"]) for event in kept.events if event["event"] == "step"]
    return {"events": kept.events, "results": results, "measured": len(run.profile.traced)}


HERE = Hardware(2, "cpu", 1 << 34, 2)


def write_wrong_machine(folder: Path) -> None:
    """Write a machine file that takes products and the host to be many times slower than they are."""
    laptop = load_machine("laptop")
    wrong = replace(laptop, name="wrong", gemm={"fp32": laptop.gemm["fp32"] / 100, "fp64": 1e8}, overhead=0.03)
    (folder / "wrong.toml").write_text(to_toml(wrong))


def wrong_config(folder: Path, **plan: Any) -> TrainConfig:
    """Return a config with such a machine file."""
    write_texts(folder)
    write_wrong_machine(folder)
    changes = {"model.layers": 1, "train.evaluate_every": 0, "checkpoint.save": False}
    config = config_of("gpt-tiny", "fp32", 8, folder, Shape(x=2), changes)
    return replace(config, plan=PlanSection(machine=str(folder / "wrong.toml"), **plan))


def test_a_run_corrects_the_machine_that_predicted_it(ranks, tmp_path: Path) -> None:
    """A run of `fourfold train` with a machine file: nothing else asks for a correction."""
    folder, file = tmp_path / "run", str(tmp_path / "wrong.toml")
    write_wrong_machine(tmp_path)
    given = train_arguments(write_texts(tmp_path), folder, "--grid", "x=2", "--machine", file, steps=8)
    (first,), (second,) = ranks(2).run(cli_as_rank, given)
    assert (first.code, second.code) == (0, 0), first
    facts = json.loads((folder / "run.json").read_text())
    (told,) = [event for event in lines_of(folder) if event["event"] == "corrected"]  # told once
    assert told == {"event": "corrected", **facts["corrected"]}
    assert told["steps"] == [4, 5]
    assert facts["compared"]["steps"] == [3, 6, 7, 8]  # traced steps are slower
    assert told["parts"].keys() == {"products", "attention", "kernels", "host", "messages over x"}
    # of the host only what the others leave is known, which may be nothing where other work disturbs the ranks
    assert all(pair["measured"] > 0 for part, pair in told["parts"].items() if part != "host")
    keys = {change["key"] for change in told["changes"]}
    assert {"gemm.fp32", "host.eager.item"} <= keys

    machine = load_machine(told["file"])
    assert told["file"] == str(folder / "machine.toml")
    assert machine.sources["gemm.fp32"].startswith("corrected by a run, 20")
    config = read_config(folder / "config.toml")
    again = predict(replace(config, plan=PlanSection(machine=told["file"])), HERE).price.seconds
    before, measured = facts["predicted"]["seconds"], facts["compared"]["seconds"]["measured"]
    assert again == pytest.approx(told["seconds"]["corrected"])
    assert locate(told["file"], HERE, torch.float32)[1] == []  # its constants are no mere estimates any more
    assert abs(again - measured) < abs(before - measured) / 2

    assert not (folder / "profile").exists()  # nobody asked for traces
    assert not read_run(folder).notes  # the report knows the event
    page = write_report(folder).read_text()
    assert "<h2>The parts of a step</h2>" in page
    assert "<tr><td>messages over x</td><td>" in page
    assert "machine.toml has corrected" in page
    assert "machine.toml has corrected" in (folder / "log.txt").read_text()
    assert "machine.toml has corrected" in first.out
    title, head, *rows = corrected(told).splitlines()
    assert title == "the parts of a step, predicted on wrong, and measured (steps 4 to 5, traced):"
    assert head.split() == ["predicted", "measured", "ratio"]
    assert rows[0].split()[0] == "products"


def test_tracing_changes_no_result(ranks, tmp_path: Path) -> None:
    results = []
    for compare in (True, False):
        folder = tmp_path / str(compare)
        folder.mkdir()
        results.append(ranks(2).run(trained, wrong_config(folder, compare=compare), folder / "run")[0])
    with_traces, without = results
    assert (with_traces["measured"], without["measured"]) == (2, 0)
    assert with_traces["results"] == without["results"]  # bit for bit


def broken(config: TrainConfig, folder: Path) -> list[str]:
    """A job: a run whose profiler cannot start on any rank."""

    active = RuntimeError("another profiler is active")
    with mock.patch.object(torch.profiler.profile, "start", side_effect=active):
        return [event["event"] for event in trained(config, folder)["events"]]


def test_a_profiler_that_fails_does_not_end_the_run(ranks, tmp_path: Path) -> None:
    first, _ = ranks(2).run(broken, wrong_config(tmp_path, compare=True), tmp_path / "run")
    assert first.count("step") == 8
    assert "compared" in first
    assert "corrected" not in first


def test_short_runs_trace_nothing() -> None:
    assert steps_to_trace(0, FIRST_TRACED) == range(0)
    assert steps_to_trace(0, FIRST_TRACED + 1) == range(4, 6)
    assert steps_to_trace(10, 100) == range(14, 16)  # a resumed run is unsteady again


def test_a_correction_that_fails_is_told_and_never_raised(tmp_path: Path) -> None:
    config = wrong_config(tmp_path)
    price = predict(config, HERE).price
    correction = RunCorrection(price, config, tmp_path / "nowhere")
    assert correction.take(1.0) is None  # it has not begun
    correction.start([TracedParts(0, 1.0, 1.0, 1.0)], range(4, 6), {"step": 8, "seconds": {"measured": 4.0}})
    found = correction.take(60.0)
    assert found is not None
    assert "FileNotFoundError" in found["failed"]
    assert corrected(found).startswith("the plan was not corrected: FileNotFoundError")
    assert correction.take(60.0) is None
    nothing = correction.correct([], range(4, 6), 4.0)
    assert nothing == {"failed": "no rank could trace its kernels"}


def test_another_plan_is_told_with_its_command(tmp_path: Path) -> None:
    """Messages that take nearly all of the step on x would be fewer on data."""
    config = wrong_config(tmp_path)
    price = predict(config, HERE).price
    slow = TracedParts(0, 0.01, 0.01, 0.01, link={"x": 2.0}, exposed={"x": 1.9})
    found = RunCorrection(price, config, tmp_path).correct([slow, slow], range(4, 6), 2.0)
    assert found["plan"]["grid"]["x"] == 1
    assert found["plan"]["seconds"] < 0.95 * found["plan"]["instead_of"]
    assert found["said"][1].startswith("with what this run measured, ")
    train = f"fourfold train {tmp_path / 'config.toml'} --machine {tmp_path / 'machine.toml'} --grid "
    assert train in found["said"][1]  # the model has one layer, so it is no published one


# --- traces


def kernel(name: str, start: float, seconds: float, correlation: int) -> TraceEvent:
    return TraceEvent(name, start, start + seconds, 7, on_device=True, correlation=correlation)


def call(start: float, correlation: int, name: str = "cudaLaunchKernel") -> TraceEvent:
    return TraceEvent(name, start, start + 0.001, correlation=correlation)


def test_kernels_of_a_gpu_are_told_apart() -> None:
    events = [
        TraceEvent("step 4", 0.0, 10.0),
        TraceEvent("fourfold::all_gather[z] layers.0.mlp.up", 1.0, 2.0),
        TraceEvent("fourfold::wait all_gather[z] layers.0.mlp.up", 3.0, 4.0),
        TraceEvent("fourfold::send[pipe] stream", 5.0, 6.0),
        TraceEvent("aten::mm", 2.1, 2.2, correlation=3),  # a number of its own, which is that of a kernel by chance
        call(0.5, 1),
        call(1.5, 2),
        call(2.5, 3, "cuLaunchKernelEx"),
        call(4.5, 4),
        call(5.5, 5),
        call(6.5, 6, "cudaMemcpyAsync"),
        call(11.0, 7),
        kernel("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNT", 1.0, 1.0, 1),
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 2.0, 3.0, 2),
        kernel("pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", 3.0, 0.5, 3),
        kernel("triton_poi_fused__scaled_dot_product_flash_attention_mul_0", 5.0, 0.25, 4),  # what is around it
        kernel("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6.0, 9.0, 5),
        kernel("Memcpy DtoD (Device -> Device)", 7.0, 0.5, 6),
        kernel("nvjet_of_the_evaluation", 12.0, 5.0, 7),  # launched after the step
        kernel("nobody launched it", 3.0, 5.0, 99),
    ]
    kinds, link = device_parts(events)
    assert kinds == {"products": 1.0, "attention": 0.5, "kernels": 0.75}
    assert link == {"z": 3.0}


def test_operators_of_the_cpu_are_told_apart() -> None:
    events = [
        TraceEvent("step 4", 0.0, 10.0),
        TraceEvent("aten::linear", 1.0, 3.0),
        TraceEvent("aten::addmm", 1.5, 3.0),
        TraceEvent("aten::copy_", 1.6, 1.7),  # belongs to its product
        TraceEvent("aten::scaled_dot_product_attention", 4.0, 6.0),
        TraceEvent("aten::bmm", 4.5, 5.0),  # and this to attention
        TraceEvent("autograd::engine::evaluate_function: GeluBackward0", 6.0, 8.0),
        TraceEvent("aten::gelu_backward", 6.5, 7.0),
        TraceEvent("aten::mm", 6.6, 6.8, thread=2),
        TraceEvent("aten::mm", 11.0, 12.0),
    ]
    found, spans = host_parts(events)
    assert spans == {"products": 3, "attention": 2, "kernels": 2, "": 2}
    assert found["products"] == pytest.approx(1.5 + 0.2)
    assert found["attention"] == pytest.approx(2.0)
    assert found["kernels"] == pytest.approx(0.5 + 0.5)


def test_messages_of_one_lane_take_turns() -> None:
    def flight(op: Any, axis: str, began: float, ended: float) -> Flight:
        return Flight(Collective(op, axis, 8, 2), began, ended)

    flights = [
        flight("all_gather", "z", 0.0, 2.0),
        flight("all_gather", "z", 1.0, 3.0),  # launched behind the first one
        flight("reduce_scatter", "z", 1.0, 3.0),
        flight("all_gather", "x", 0.0, 2.0),
        flight("reduce_scatter", "x", 1.0, 3.0),
    ]
    assert flight_seconds(flights, ("z",)) == {"z": 3.0 + 2.0, "x": 3.0}


def test_ranks_are_combined_and_the_host_takes_the_rest() -> None:
    one = TracedParts(0, 1.0, 0.5, 0.5, link={"x": 1.0, "z": 3.0}, exposed={"x": 0.5})
    other = TracedParts(0, 2.0, 0.5, 0.5, link={"x": 0.8, "z": 4.0}, exposed={"x": 0.1})
    found = combine([one, other, replace(one, pipe=1, products=9.0)], 4.0, 0)
    assert found == StepParts(4.0, 1.5, 0.5, 0.5, pytest.approx((1.5 + 0.9) / 2), {"x": 0.8, "z": 3.0}, {"x": 0.3})
    # a traced step of the CPU took 1 s longer: 0.1 s for each of ten spans
    slow = replace(one, seconds=4.0, spans={"products": 1, "attention": 1, "kernels": 4, "": 4})
    found = combine([slow], 3.0, 0)
    assert found is not None
    assert (found.products, found.attention) == pytest.approx((0.9, 0.4))
    assert found.kernels == 0.25  # never less than half
    assert found.host == pytest.approx(3.0 - 0.9 - 0.4 - 0.25 - 0.5)
    assert combine([], 1.0, 0) is None
    assert combine([replace(one, products=0.0, attention=0.0, kernels=0.0)], 1.0, 0) is None

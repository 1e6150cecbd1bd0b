"""The planner: search against brute force, what it refuses and why, and the command as a user calls it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold.axes import AXES
from fourfold.cli import main
from fourfold.commands.plan import run_config
from fourfold.planner import search as search_file
from fourfold.planner.estimate import LEVERS, Cells, Estimates, Lever
from fourfold.planner.machine import HostSpeed, Machine, load_machine
from fourfold.planner.price import Candidate, Price, Task, memory_of, price, timeline
from fourfold.planner.program import LaunchOp
from fourfold.planner.search import search, search_built
from fourfold.planner.space import Space, context_sizes
from fourfold.planner.step_program import step_program
from fourfold.policy import Policy
from fourfold.shape import Shape, divisors, shapes_of
from fourfold.train.config import read_config
from fourfold.train.defaults import rows_near
from fourfold.train.planning import resolve
from share import share

SMALL = ff.models.config("llama-3-8b", layers=2)
ORDERS = tuple(permutations(AXES))
ALL_SIMULATIONS = search_file.SIMULATIONS


@pytest.fixture(autouse=True, scope="module")
def few_simulations() -> Iterator[None]:
    """What is tested here, but for the best candidate itself, does not depend on how many candidates are simulated."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(search_file, "SIMULATIONS", 20)
        yield


def brute_force(task: Task, devices: int) -> float:
    """The fewest seconds of all candidates that fit, each of them simulated."""
    limit = task.machine.memory - task.machine.reserve
    best = float("inf")
    for shape, mode, lever in product(shapes_of(devices), ("sharded", "replicated"), LEVERS):
        policy = lever.on(Policy(activations=mode, compute_dtype=task.compute, shard_optimizer=True, compile=True))
        places = shape.data * shape.z
        if task.rows % places or task.config.misfit(shape, policy) is not None:
            continue
        rows = task.rows // places
        for each in (each for each in range(1, rows + 1) if rows % each == 0):
            candidate = Candidate(shape, policy, each, rows // each)
            if memory_of(task, candidate).total <= limit:
                seen = {}
                for order in ORDERS:
                    walked = tuple(axis for axis in order if shape.sizes[axis] > 1)
                    seen.setdefault(walked, replace(candidate, shape=shape.reordered(order)))
                best = min([best, *(price(task, each).seconds for each in seen.values())])
    return best


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "rows", "machine", "memory"),
    share([(2, 4, "dgx-h100", 80e9), (4, 2, "perlmutter", 30e9)], 2),
)
def test_search_finds_what_brute_force_finds(
    devices: int, rows: int, machine: str, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search_file, "SIMULATIONS", ALL_SIMULATIONS)
    on = replace(load_machine(machine), memory=int(memory), devices_per_node=2)
    task = Task(SMALL, on, rows, 2048)
    assert search(task, devices).best.seconds == pytest.approx(brute_force(task, devices), rel=1e-9)


def test_memory_rules_out_what_does_not_fit() -> None:
    task = Task(ff.models.config("gpt-5b"), load_machine("perlmutter"), 64, 2048)
    for found in search(task, 16, top=4).ranked:
        assert found.memory.total <= task.machine.memory - task.machine.reserve


@pytest.mark.slow
def test_more_memory_is_never_slower() -> None:
    config, machine = ff.models.config("gpt-5b"), load_machine("perlmutter")
    small, large = (
        search(Task(config, replace(machine, memory=int(memory)), 64, 2048), 16, top=4).best.seconds
        for memory in (30e9, 160e9)
    )
    assert large <= 1.001 * small


def test_a_slow_host_is_estimated_and_priced_alike() -> None:
    never_late = replace(load_machine("dgx-h100"), host={})
    slow_host = replace(never_late, name="slow host", host={"compiled": HostSpeed(1e-3, 0.0)})
    space = Space(shapes=(Shape(x=4),), micro_steps=(1, 4))
    task = Task(SMALL, slow_host, 4, 256)
    late = search(task, 4, space=space).best
    assert late.bound_by == "host"
    assert late.candidate.micro_steps == 1  # four micro-steps have four times as many items
    estimated = Estimates(task, Cells(task, [late.candidate]), [late.candidate.shape.order])
    lever = LEVERS.index(Lever.of(late.candidate.policy))
    assert estimated.seconds[0, lever, 0] == pytest.approx(late.seconds, rel=0.15)
    assert late.seconds > 1.3 * search(replace(task, machine=never_late), 4, space=space).best.seconds


def test_space_holds_still_what_it_names() -> None:
    task = Task(SMALL, load_machine("dgx-h100"), 32, 2048)
    policy = Policy(recompute="attention", compute_dtype=torch.bfloat16)
    order = ("z", "x", "y", "data", "pipe")
    found = search(task, 8, space=Space(policies=(policy,), micro_steps=(2,), orders=(order,)), top=3)
    for each in found.ranked:
        assert each.candidate.policy == policy
        assert each.candidate.micro_steps == 2
        assert each.candidate.shape.order == order


def test_a_model_that_fits_nowhere_says_what_is_missing() -> None:
    task = Task(ff.models.config("gpt-640b"), load_machine("perlmutter"), 64, 2048)
    with pytest.raises(ValueError, match=r"fits on no grid of 8 devices.*needs .* GiB of 37.* take more devices"):
        search(task, 8)


def test_a_batch_that_no_grid_divides_says_so() -> None:
    config = ff.models.config("gpt-tiny", heads=7, kv_heads=7, head_dim=7, hidden=49, mlp_hidden=49)
    with pytest.raises(ValueError, match="no grid of 4 devices cuts this model and 3 rows"):
        search(Task(config, load_machine("dgx-h100"), 3, 128), 4)


@pytest.mark.parametrize(
    ("tokens", "seq", "devices", "rows"),
    [(16.8e6, 2048, 1024, 8192), (16e3, 128, 8, 128), (4096, 2048, 1024, 2), (6e6, 2048, 48, 3072), (100, 2048, 3, 1)],
)
def test_rows_near_the_batch_that_grids_divide(tokens: float, seq: int, devices: int, rows: int) -> None:
    assert rows_near(tokens, seq, devices) == rows


PLAN = ["plan", "--model", "gpt-5b", "--machine", "perlmutter", "--devices", "16", "--batch-tokens", "128k"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the command writes."""
    folder = tmp_path_factory.mktemp("plan")
    names = {"--json": "plan.json", "--html": "plan.html", "--trace": "trace.json", "--config": "run.toml"}
    written = [part for option, name in names.items() for part in (option, str(folder / name))]
    whole = ["--tokens", "1G", "--price", "2.5"]
    assert main([*PLAN, *whole, "--top", "5", "--why", "x=2,y=2,z=4", *written]) == 0
    return folder


def test_command_writes_a_plan(planned: Path) -> None:
    document: dict[str, Any] = json.loads((planned / "plan.json").read_text())
    best = document["grids"][0]
    assert [entry["rank"] for entry in document["grids"]] == list(range(1, len(document["grids"]) + 1))
    seconds = [entry["seconds"] for entry in document["grids"][1:]]
    assert seconds == sorted(seconds)
    assert best["seconds"] == pytest.approx(document["robust"]["band_seconds"][0])
    assert best["compute_seconds"] + sum(best["exposed_seconds"].values()) <= 1.02 * best["seconds"]
    assert sum(best["memory_bytes"].values()) == best["peak_bytes"] <= document["machine"]["usable_bytes"]
    assert document["why"]["lines"]
    assert document["training"] == {"tokens": 1e9, "steps": 7630, "price": 2.5}  # of 64 x 2048 tokens
    cost = best["seconds"] * 7630 / 3600 * 16 * 2.5 / best["goodput"]
    assert best["training"]["cost"] == pytest.approx(cost)
    assert {event["track"] for event in document["timeline"]} >= {"compute", "z"}
    assert "gpt-5b" in (planned / "plan.html").read_text()


def test_a_planned_config_says_only_what_is_set(planned: Path) -> None:
    text = (planned / "run.toml").read_text()
    assert text.startswith('[model]\nname = "gpt-5b"\n\n[grid]\n')
    assert "is not set" not in text and "[model.options]" not in text


def test_winner_is_a_config_that_trains(planned: Path) -> None:
    text = (planned / "run.toml").read_text()
    for key in ("[[data.sources]]", "tokenizer =", "steps ="):
        assert re.search(rf"# YOURS: [^\n]*\n(# [^\n]*\n)?{re.escape(key)}", text), key
    config = resolve(read_config(planned / "run.toml"), 16, on_gpu=True, memory_bytes=40 << 30)
    best = json.loads((planned / "plan.json").read_text())["grids"][0]
    assert config.grid.shape == Shape(**best["grid"], order=tuple(best["order"]))
    policy = config.build_policy()
    assert {name: getattr(policy, name) for name in ("recompute", "activations", "keep_weights")}.items() <= (
        best["policy"].items()
    )
    places = best["grid"]["data"] * best["grid"]["z"]
    assert config.batch.rows == best["rows"] * best["micro_steps"] * places
    assert config.checkpoint.minutes == pytest.approx(best["interval_seconds"] / 60, rel=0.01)


def test_trace_opens_in_perfetto(planned: Path) -> None:
    events = json.loads((planned / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--model", "gpt-8b"), "did you mean 'gpt-10b'"),
        (("--machine", "perlmuter"), "did you mean 'perlmutter'"),
        (("--devices", "0"), "argument --devices: 0 is less than 1"),
        (("--seq", "0"), "--seq 0: it must be at least 1"),
        (("--why", "auto"), "name the grid to explain"),
        (("--seq", "4096"), "longer than the 2048 learned positions"),
        (("--why", "x=3"), "has 3 ranks, but the plan has 16 devices"),
        (("--model", "tests.no_such:thing"), "no_such"),
    ],
)
def test_bad_input_names_the_way_out(change: tuple[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = list(PLAN)
    if change[0] in arguments:
        arguments[arguments.index(change[0]) + 1] = change[1]
    else:
        arguments += change
    if said.startswith("argument "):  # options are refused before anything is imported
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    else:
        assert main(arguments) == 1
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("rows", "seq", "shapes", "risk", "said"),
    [
        (8, 128, None, "careful", "risk='careful': it is one of robust, fastest"),
        (0, 128, None, "robust", "0 rows of 128 tokens"),
        (8, 0, None, "robust", "8 rows of 0 tokens"),
        (8, 128, (ff.Shape(x=2),), "robust", "x=2 has 2 ranks, but the search is for 4 devices"),
    ],
)
def test_a_search_for_nothing_sensible_is_refused(
    rows: int, seq: int, shapes: tuple[ff.Shape, ...] | None, risk: Any, said: str
) -> None:
    task = Task(ff.models.config("gpt-tiny"), load_machine("laptop"), rows, seq)
    with pytest.raises(ValueError, match=re.escape(said)):
        search(task, 4, space=Space(shapes=shapes), risk=risk)


@pytest.mark.slow
def test_a_batch_that_no_grid_divides_is_answered_with_one_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama-3-8b", "--machine", "dgx-h100", "--devices"]
    assert main([*asked, "97", "--batch-tokens", "2M"]) == 1
    assert f"such as --batch-tokens {291 * 8192}" in capsys.readouterr().err
    assert main([*asked, "30030", "--seq", "256", "--batch-tokens", "64k"]) == 1  # too short to be cut
    said = capsys.readouterr().err
    assert said.count("pipe=") == 1 and "do not divide" in said  # one reason of each kind


def test_a_grid_that_was_refused_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--why", "data=16"]) == 0
    assert "GiB" in capsys.readouterr().out


def my_model(grid: ff.Grid, policy: Policy) -> torch.nn.Module:
    return ff.models.build(ff.models.config("gpt-tiny"), grid, policy=policy)


def test_a_model_of_ones_own(alone, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    arguments = ["plan", "--model", "test_search:my_model", "--machine", "dgx-h100", "--devices", "2"]
    assert alone(main, [*arguments, "--batch-tokens", "512", "--seq", "128", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    cut = [{axis for axis, size in entry["grid"].items() if size == 2} for entry in document["grids"]]
    assert sorted(cut, key=str) == sorted([{"x"}, {"y"}, {"z"}, {"data"}], key=str)
    assert document["model"]["parameters"] == ff.models.config("gpt-tiny").parameters


def slow(machine: Machine, factor: float) -> Machine:
    links = {group: replace(link, bandwidth=link.bandwidth / factor) for group, link in machine.inside.items()}
    return replace(machine, inside=links)


def test_slower_links_move_the_plan_to_less_communication() -> None:
    """What the published model cannot see: how much of it hides behind computation."""
    machine = replace(load_machine("dgx-h100"), memory=int(40e9))
    tasks = [Task(SMALL, on, 256, 2048) for on in (machine, slow(machine, 12))]
    fast, slowed = (search(task, 8, top=4).best for task in tasks)
    assert slowed.seconds < 0.98 * price(tasks[1], fast.candidate).seconds
    assert wire_bytes(slowed) < wire_bytes(fast)


def wire_bytes(found: Price) -> int:
    work = step_program(found.candidate.sizes(found.task)).work
    return found.candidate.micro_steps * sum(item.record.wire_bytes for item in work if isinstance(item, LaunchOp))


def test_the_answer_does_not_depend_on_how_many_are_shown() -> None:
    task = Task(ff.models.config("gpt-5b"), load_machine("perlmutter"), 64, 2048)
    first = search(task, 16, top=1)
    assert first.best.candidate == search(task, 16, top=8).best.candidate
    assert first.best.seconds == pytest.approx(timeline(task, first.best.candidate).seconds, rel=0.02)


@pytest.mark.slow
def test_grids_that_were_not_ranked_fit_too() -> None:
    task = Task(ff.models.config("gpt-10b"), load_machine("perlmutter"), 128, 2048)
    found = search(task, 32)
    estimated = found.estimated()
    assert len(estimated) > 5
    limit = task.machine.memory - task.machine.reserve
    assert all(memory_of(task, each.candidate).total <= limit for each in estimated)
    shown = [each.candidate.shape.sizes for each in (*found.ranked, *estimated)]
    assert all(shown.count(sizes) == 1 for sizes in shown)


def test_many_short_rows_are_taken_at_once() -> None:
    task = Task(ff.models.config("gpt-125m"), load_machine("perlmutter"), 4096, 128)
    assert search(task, 8).best.candidate.rows == 512


def test_json_on_standard_output_is_all_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json", "-", "--config", str(tmp_path / "run.toml")]) == 0
    assert json.loads(capsys.readouterr().out)["grids"]
    assert read_config(tmp_path / "run.toml").plan.machine == "perlmutter"


def test_a_module_has_no_config(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "test_search:my_model", "--machine", "dgx-h100", "--devices", "2"]
    assert main([*arguments, "--batch-tokens", "512", "--seq", "128", "--config", "x.toml"]) == 1
    assert "fourfold train takes a function that returns the plain module" in capsys.readouterr().err


def test_a_plain_module_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "dry:plain", "--machine", "dgx-h100", "--devices", "2", "--seq", "128"]
    assert main([*arguments, "--batch-tokens", "512"]) == 1
    assert "ff.parallelize" in capsys.readouterr().err


def test_a_module_in_micro_steps_computes_as_much(alone) -> None:
    whole, cut = alone(mfu_in_one_and_in_more)
    assert cut == pytest.approx(whole, rel=1e-6)


def mfu_in_one_and_in_more() -> list[float]:
    """FLOPs a token with memory for all rows at once, and with less."""
    machine, found = load_machine("dgx-h100"), []
    for memory in (machine.memory, machine.reserve + 5_000_000):
        task = Task(SMALL, replace(machine, memory=memory), 16, 128)
        plan = search_built(task, my_model, 1, progress=lambda _: None)
        found.append(plan.best.flops.hardware)
    assert plan.best.candidate.micro_steps > 1
    return found


def test_a_plan_is_tuned_to_what_the_machine_does_best() -> None:
    machine = replace(load_machine("dgx-h100"), host={"compiled": HostSpeed(1e-3, 0.0), "eager": HostSpeed(1e-4, 0.0)})
    assert search(Task(SMALL, machine, 4, 256), 4).best.candidate.policy.compile is False
    machine = replace(machine, host={"compiled": HostSpeed(1e-4, 0.0)})  # nothing is known about eager steps
    assert search(Task(SMALL, machine, 4, 256), 4).best.candidate.policy.compile is True
    machine = replace(machine, host={"captured": HostSpeed(1e-3, 0.0), "compiled": HostSpeed(1e-4, 0.0)})
    tuned = search(Task(SMALL, machine, 4, 256, captured=True), 4).best
    assert not tuned.task.captured
    assert run_config(tuned, "llama-3-8b", "dgx-h100").train.graph == "off"


def test_a_search_of_a_million_devices_does_not_count_to_a_million() -> None:
    """A plan of 2^20 devices had no answer within 400 s: every grid tried each number up to that of its places."""
    for number in range(1, 200):
        assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]
    task = Task(ff.models.config("gpt-tiny"), load_machine("perlmutter"), rows=1 << 12, seq=1 << 17)
    began = time.process_time()
    for _ in range(1000):
        assert context_sizes(task, Shape(z=1 << 20)) == [256, 512]
    assert time.process_time() - began < 20, "it takes about a second"

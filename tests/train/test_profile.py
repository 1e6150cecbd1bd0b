"""`--profile`: traces of whole steps with the ledger's labels, what they say of links, and what is refused."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from curves import Curves, config_of, write_texts
from fourfold.axes import AXES
from fourfold.cli import main
from fourfold.commands.options import steps
from fourfold.errors import BadStepsError
from fourfold.grid import Shape
from fourfold.ledger import Collective
from fourfold.report.run_page import write_report
from fourfold.train.config import TrainConfig
from fourfold.train.loop import Run
from fourfold.train.metrics import covered, export, link_seconds, summarize
from harness import grid_of

# --- which steps


def test_steps_of_the_command_line() -> None:
    assert steps("3") == range(3, 4)
    assert steps("2-5") == range(2, 6)
    assert steps("4-4") == range(4, 5)
    for wrong in ("", "0", "0-2", "5-2", "-", "2-", "-2", "two", "1.5", "1-2-3", "2,3", " "):
        with pytest.raises(
            argparse.ArgumentTypeError, match=r"is not a range of steps; write one step, such as 7, or .* such as 7-9"
        ):
            steps(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "7"], "--profile 7: this run has train.steps=6; name steps from 1 to 6"),
        (["--profile", "5-7"], "--profile 5-7: this run has train.steps=6; name steps from 1 to 6, for example 1-6"),
        (
            ["--profile", "2", "--compare-serial", "1"],
            "--compare-serial does not train, so it has no steps to --profile",
        ),
    ],
)
def test_steps_that_will_not_be_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything starts: neither ranks nor a folder."""
    given = ["train", "--steps", "6", "--grid", "z=2", "--device", "cpu", "--out", str(tmp_path / "run"), *arguments]
    assert main(given) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# --- a run


PROBE = Collective("all_gather", "z", 8, 2)


def profiled(config: TrainConfig, folder: Path, wanted: range) -> dict[str, Any]:
    """A job: a run with a profile; what it launched in the profiled steps, where links were timed, and its events."""
    run = Run(config, grid_of(config.grid.shape), folder, profile=wanted)
    kept = Curves()
    run.begin(lambda: [kept])
    run.sinks = [kept]
    launched: list[str] = []
    timed: dict[str, bool] = {}
    launch, evaluate = run._launch, run.evaluate

    def watched(step: int) -> None:
        timed[f"step {step}"] = run.grid.ledger.begin_flight(PROBE) is not None
        with run.grid.ledger.watch() as records:
            launch(step)
        if step in wanted:
            launched.extend(map(str, records))

    def evaluated() -> dict[str, Any]:
        timed[f"evaluation after {run.step}"] = run.grid.ledger.begin_flight(PROBE) is not None
        return evaluate()

    run._launch, run.evaluate = watched, evaluated  # type: ignore[method-assign]
    run.train()
    return {"launched": launched, "timed": timed, "events": kept.events}


def spans_of(folder: Path, rank: int) -> list[dict[str, Any]]:
    trace = json.loads((folder / "profile" / f"rank-{rank}.json").read_text())
    return [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]


def inside(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]


@pytest.mark.slow
def test_a_profile_of_two_ranks(ranks, tmp_path: Path) -> None:
    """With an evaluation between the two steps, which the trace names and the summary does not count."""
    write_texts(tmp_path)
    changes = {"model.layers": 1, "train.evaluate_every": 2, "train.evaluate_batches": 1}
    config = config_of("gpt-tiny", "fp32", 4, tmp_path, Shape(z=2), changes)
    folder = tmp_path / "run"
    results = ranks(2).run(profiled, config, folder, range(2, 4))
    for rank, result in enumerate(results):
        assert [where for where, timed in result["timed"].items() if timed] == ["step 2", "step 3"]
        assert len(result["timed"]) == 6
        spans = spans_of(folder, rank)
        steps_seen = [span for span in spans if span["name"].startswith("step ")]
        assert [span["name"] for span in steps_seen] == ["step 2", "step 3"]
        (evaluation,) = (span for span in spans if span["name"] == "evaluation")
        assert steps_seen[0]["ts"] + steps_seen[0]["dur"] <= evaluation["ts"]
        assert evaluation["ts"] + evaluation["dur"] <= steps_seen[1]["ts"]
        # every record of the two steps is a span, and no other launch is inside of them
        named = [span for span in spans if span["name"].startswith(("fourfold::all_", "fourfold::reduce_scatter["))]
        held = [span["name"] for span in named if any(inside(span, step) for step in steps_seen)]
        assert Counter(held) == Counter(f"fourfold::{record}" for record in result["launched"])
        assert len(result["launched"]) > 10
        assert all(any(inside(span, around) for around in (*steps_seen, evaluation)) for span in named)
        assert any(span["name"].startswith("fourfold::wait all_gather[z]") for span in spans)
    check_summary(folder, results)
    check_report(folder)


def check_summary(folder: Path, results: list[dict[str, Any]]) -> None:
    summary = json.loads((folder / "profile" / "summary.json").read_text())
    assert (summary["steps"], summary["ranks"]) == ([2, 3], 2)
    per_step = summary["per_step"]
    assert per_step["link_seconds"].keys() == per_step["exposed_seconds"].keys() == {"z"}

    def of(rank: int) -> list[dict[str, Any]]:
        events = results[rank]["events"]
        return [event for event in events if event["event"] == "step" and event["step"] in (2, 3)]

    exposed = [sum(event["exposed_seconds"]["z"] for event in of(rank)) / 2 for rank in (0, 1)]
    assert per_step["exposed_seconds"]["z"] == pytest.approx(
        {"mean": sum(exposed) / 2, "slowest": max(exposed), "slowest_rank": exposed.index(max(exposed))}
    )
    seconds = [sum(event["seconds"] for event in of(rank)) / 2 for rank in (0, 1)]
    assert per_step["seconds"]["mean"] == pytest.approx(sum(seconds) / 2)
    assert per_step["link_seconds"]["z"]["slowest"] >= per_step["link_seconds"]["z"]["mean"] > 0
    told = [event for event in results[0]["events"] if event["event"] == "profile"]
    assert told == [
        {"event": "profile", "step": 3, "first": 2, "folder": str(folder / "profile"), "ranks": 2},
    ]
    assert [event["step"] for event in results[0]["events"] if event["event"] == "step"] == [1, 2, 3, 4]


def check_report(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("")
    page = write_report(folder).read_text()
    assert "Communication in the profiled steps 2 to 3" in page
    assert "<tr><td>z</td><td>" in page
    assert '<a href="profile/rank-0.json">rank-0.json</a>, <a href="profile/rank-1.json">' in page
    assert "ui.perfetto.dev" in page


def halted(config: TrainConfig, folder: Path) -> str:
    """A job: a run that ends inside of its profile."""
    run = Run(config, grid_of(config.grid.shape), folder, profile=range(1, 4))

    def fail(max_norm: float, **_: Any) -> Any:
        raise BadStepsError(f"{max_norm} is too much")

    run.optimizer.clip_and_step = fail  # type: ignore[method-assign]
    with pytest.raises(BadStepsError):
        run.train()
    return profiled(config, folder, range(2, 3))["events"][-1]["reason"]  # torch has one profiler at a time


def test_a_run_that_ends_inside_of_its_profile_leaves_none_running(ranks, tmp_path: Path) -> None:
    write_texts(tmp_path)
    changes = {"model.layers": 1, "train.evaluate_every": 0}
    config = config_of("gpt-tiny", "fp32", 3, tmp_path, Shape(x=2), changes)
    assert ranks(2).run(halted, config, tmp_path / "run") == ["finished", "finished"]


# --- a trace


def event(kind: str, name: str, begin: float, end: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": end - begin, "args": args}


def launch(name: str, at: float, kernel: tuple[float, float], number: int) -> list[dict[str, Any]]:
    """A collective as a GPU's trace shows it: torch's own annotation takes the place of ours there."""
    return [
        event("user_annotation", f"fourfold::{name}", at, at + 10),
        event("user_annotation", "nccl:coalesced", at + 1, at + 9),
        event("cuda_driver", "cuLaunchKernelEx", at + 4, at + 5, number),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", *kernel, number),
        event("gpu_user_annotation", "nccl:coalesced", *kernel),
    ]


def test_links_are_busy_while_their_kernels_run() -> None:
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 105, "id": 1},
            event("user_annotation", "step 2", 100, 500),
            *launch("all_gather[z] layers.0.mlp.up", 110, (200, 300), 1),
            *launch("reduce_scatter[z] layers.0.mlp.up", 130, (250, 350), 2),  # beside the first: counted once
            *launch("all_reduce[data] gradients", 150, (320, 340), 3),
            *launch("all_gather[x] layers.0.attention.qkv", 170, (600, 640), 4),  # ends after the host left the step
            event("user_annotation", "fourfold::wait all_gather[z] layers.0.mlp.up", 200, 220),
            event("cuda_runtime", "cudaLaunchKernel", 205, 206, 5),
            event("kernel", "CatArrayBatchedCopy", 300, 320, 5),
            event("user_annotation", "fourfold::product layers.0.mlp.up", 230, 240),
            event("cuda_runtime", "cudaLaunchKernel", 231, 232, 6),
            event("kernel", "sm90_gemm", 350, 420, 6),
            event("user_annotation", "evaluation", 500, 900),
            *launch("all_gather[z] layers.0.mlp.up", 600, (650, 690), 7),
            event("user_annotation", "step 3", 1000, 1400),
            *launch("all_gather[z] layers.0.mlp.up", 1100, (1100, 1200), 8),
            event("cuda_runtime", "cudaLaunchKernel", 1300, 1301, 9),
            event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 1310, 1320, 9),  # nobody's
        ]
    }
    assert link_seconds(trace) == pytest.approx({"z": 250e-6, "data": 20e-6, "x": 40e-6})
    assert link_seconds({"traceEvents": []}) == {}


class Writes:
    """A profiler that writes this for a trace, as far as the disk lets it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(self.text)


def test_a_trace_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "rank-3.json"
    with pytest.raises(OSError, match=r"cannot write the trace .*rank-3\.json .*is the disk full\?"):
        export(Writes('{"traceEvents": [{"ph":'), path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
    assert export(Writes('{"traceEvents": []}'), path) == {"traceEvents": []}  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == [path]


def test_covered_counts_what_overlaps_once() -> None:
    assert covered([]) == 0
    assert covered([(0, 2), (5, 6)]) == 3
    assert covered([(4, 5), (0, 3), (1, 2), (2, 4.5)]) == 5


def test_the_slowest_rank_may_differ_by_axis() -> None:
    """Seconds, then those on the link of x, y, z, data, pipe, then those exposed."""
    ranks = [
        [1.0, 0.1, 0.0, 0.4, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.0],
        [1.5, 0.3, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.2, 0.0, 0.0],
    ]
    assert len(ranks[0]) == 1 + 2 * len(AXES)
    assert summarize(ranks, ["x", "z"]) == {
        "seconds": {"mean": 1.25, "slowest": 1.5, "slowest_rank": 1},
        "link_seconds": {
            "x": {"mean": pytest.approx(0.2), "slowest": 0.3, "slowest_rank": 1},
            "z": {"mean": pytest.approx(0.3), "slowest": 0.4, "slowest_rank": 0},
        },
        "exposed_seconds": {
            "x": {"mean": 0.05, "slowest": 0.1, "slowest_rank": 0},
            "z": {"mean": 0.1, "slowest": 0.2, "slowest_rank": 1},
        },
    }

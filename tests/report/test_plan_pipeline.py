"""A plan with pipelines as a user sees it: the table, `--why`, the JSON document, the page and the trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fourfold as ff
from browser import attribute, opened
from fourfold.axes import AXES
from fourfold.cli import main
from fourfold.planner.explain import model_facts, plan_document, reasons
from fourfold.planner.grid_plan import GridPlan
from fourfold.planner.machine import LinkSpeed, load_machine
from fourfold.planner.price import PipePrice, Task
from fourfold.planner.search import search
from fourfold.planner.simulate import chrome_trace_of_pipe
from fourfold.planner.space import Space
from fourfold.report.page import plotly_js
from fourfold.report.plan_page import plan_page, view
from fourfold.report.plan_text import pipeline_text, plan_table, reasons_it_wins
from fourfold.schedule.stages import Stages
from fourfold.schedule.text import from_csv
from fourfold.shape import Shape

LLAMA = ff.models.config("llama-3-8b", layers=14)
ETHERNET = replace(
    load_machine("dgx-h100"), name="slow links", devices_per_node=1, between=LinkSpeed(bandwidth=1.2e9, latency=2e-5)
)
SHAPES = (Shape(pipe=4), Shape(data=2, pipe=2), Shape(z=4), Shape(x=4))


@pytest.fixture(scope="module")
def found() -> GridPlan:
    return search(Task(LLAMA, ETHERNET, 32, 2048), 4, space=Space(axes=AXES, shapes=SHAPES))


@pytest.fixture(scope="module")
def document(found: GridPlan) -> dict[str, Any]:
    return plan_document(found, model_facts(LLAMA, "llama"))


def test_the_document_has_what_a_run_needs(found: GridPlan, document: dict[str, Any]) -> None:
    priced, entry = next((p, e) for p, e in zip(found.ranked, document["grids"], strict=True) if e["pipeline"])
    assert isinstance(priced, PipePrice)
    said = json.loads(json.dumps(entry))["pipeline"]
    stages = Stages(tuple(said["cuts"]), tuple(said["placement"]), tuple(said["recompute"]))
    assert replace(stages, recompute=()) == replace(priced.stages, recompute=())
    schedule = priced.candidate.policy.schedule
    assert said["schedule"] == schedule if isinstance(schedule, str) else from_csv(said["schedule_csv"]) == schedule
    assert len(said["peak_bytes"]) == entry["grid"]["pipe"]
    assert max(said["peak_bytes"]) == entry["peak_bytes"]
    assert sum(said["layers"]) == LLAMA.layers
    for spans, own in zip(said["spans"], priced.played.spans, strict=True):
        assert [span[:3] for span in spans] == [list(span.action) for span in own[: len(spans)]]
    assert next(entry for entry in document["grids"] if entry["grid"]["pipe"] == 1)["pipeline"] is None


def test_the_table_says_cuts_schedule_bubble_and_memory(document: dict[str, Any]) -> None:
    table = plan_table(document, 8, colour=False)
    piped = [entry for entry in document["grids"] if entry["pipeline"]]
    assert len(piped) == 2
    for entry in piped:
        assert f"#{entry['rank']} pipe={entry['grid']['pipe']}: layers by stage" in table
        for part in (entry["pipeline"]["schedule"], "bubble", "peak by pipe rank", f"{entry['micro_steps']} micro"):
            assert part in pipeline_text(entry)
    if document["grids"][0]["pipeline"]:
        assert any(pipeline_text(document["grids"][0]) in line for line in reasons_it_wins(document))


def test_losers_say_what_their_bubble_costs(found: GridPlan) -> None:
    first, second = (each for each in found.ranked if isinstance(each, PipePrice))
    slower, faster = sorted((first, second), key=lambda each: -each.totals.exposed["pipe"])
    said = next(line for line in reasons(slower, faster) if "waiting for other stages" in line)
    assert f"bubble {slower.bubble:.0%}" in said
    assert f"the best grid has bubble {faster.bubble:.0%}" in said


def test_the_trace_has_a_process_for_each_pipe_rank(found: GridPlan) -> None:
    priced = next(each for each in found.ranked if isinstance(each, PipePrice))
    events = chrome_trace_of_pipe(priced.played)["traceEvents"]
    assert {event["pid"] for event in events} == set(range(priced.candidate.shape.pipe))
    actions = [event for event in events if event["ph"] == "X"]
    assert len(actions) == sum(map(len, priced.played.spans))
    assert max(event["ts"] + event["dur"] for event in actions) == pytest.approx(priced.played.makespan * 1e6)


def test_rows_of_the_picture_lie_within_the_time_that_is_drawn(document: dict[str, Any]) -> None:
    for entry in (entry for entry in document["grids"] if entry["pipeline"]):
        drawn = view(document, entry)["pipeline"]
        assert len(drawn["rows"]) == entry["grid"]["pipe"]
        for row in drawn["rows"]:
            ends = [start + share for _, _, start, share, _ in row["spans"]]
            starts = [start for _, _, start, _, _ in row["spans"]]
            assert all(end <= later + 1e-6 for end, later in zip(ends, starts[1:], strict=False))
            assert max(ends) <= 1 + 1e-9


READER = """<script>
const drawn = [...document.querySelectorAll("#pipeline .row, #pipeline .action")];
document.documentElement.dataset.found = drawn.map((each) => each.getAttribute("class").split(" ")[0]).join(" ");
</script>"""


@pytest.mark.slow
def test_a_browser_draws_the_schedule(document: dict[str, Any], tmp_path: Path) -> None:
    best = min(document["grids"], key=lambda entry: (entry["pipeline"] is None, entry["rank"]))
    others = [entry for entry in document["grids"] if entry is not best]
    page = tmp_path / "plan.html"
    written = plan_page({**document, "grids": [best, *others]}, plotly_js())
    page.write_text(written.replace("</body>", f"{READER}</body>"))
    found = (attribute(opened(page), "found") or "").split()
    assert found.count("row") == best["grid"]["pipe"]
    assert found.count("action") == sum(map(len, best["pipeline"]["spans"]))


def test_the_command_explains_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama-tiny", "--machine", "dgx-h100", "--devices", "2", "--batch-tokens", "16k"]
    assert main([*asked, "--seq", "128", "--why", "pipe=2"]) == 0
    assert "pipe=2" in capsys.readouterr().out

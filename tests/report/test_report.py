"""The page of a run: drawn in a browser without a request, true to the files, and never broken by a broken run."""

from __future__ import annotations

import errno
import json
import math
import random
import re
import sys
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from soak_report import PAGE_BYTES, check_page, report, write_long_run

from browser import attribute, opened
from fourfold.axes import AXES
from fourfold.context.assign import assign_documents
from fourfold.grid import Shape
from fourfold.report.page import POLICY
from fourfold.report.run_data import FILES, StepPattern, read_run
from fourfold.report.run_page import (
    PIPELINE_COLOURS,
    SAMPLED,
    draw_grid,
    extremes,
    figures,
    marked,
    run_page,
    sample,
    smooth,
    write_report,
)
from fourfold.report.run_places import load_of
from fourfold.report.units import count, duration, nbytes, percent
from fourfold.schedule.action import Schedule
from fourfold.schedule.named import named
from fourfold.schedule.play import Played, play
from fourfold.schedule.text import to_csv

MiB = 1 << 20


def facts(**more: Any) -> dict[str, Any]:
    return {
        "fourfold": "0.1.0", "torch": "2.13.0", "device": "cpu: 4 processes", "started": "2026-11-15T04:20:00+00:00",
        "grid": {"x": 2, "y": 1, "z": 2, "data": 1}, "order": ["x", "y", "z", "data"], "ranks": 4,
        "model": "gpt-tiny", "parameters": 868352, "flops_per_token": {"model": 5.6e6, "hardware": 7.1e6},
        "peak_flops": 4.4e10, "peak_flops_from": "measured: 1024 x 1024 products in float32", "unigram_entropy": 3.31,
        "kept_bytes": {"none": 61 * MiB, "attention": 38 * MiB, "block": 9 * MiB}, "recompute": "attention",
        "tokens_per_step": 2048, "steps": 200, **more,
    }  # fmt: skip


def records(steps: int = 200, skip: tuple[int, ...] = (61, 62)) -> list[dict[str, Any]]:
    """What a run of four ranks logs: a slow first step, noise, an evaluation every 50 steps, two skipped steps."""
    chance = random.Random(0)
    found: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        seconds = (0.95 if step == 1 else 0.21) * chance.uniform(0.95, 1.1)
        mfu = 5.6e6 * 2048 / seconds / (4 * 4.4e10)
        exposed = {"x": 0.031 * chance.uniform(0.8, 1.3), "z": 0.018 * chance.uniform(0.7, 1.5)}
        loss = 1.9 + 3.6 * math.exp(-step / 40) + chance.gauss(0, 0.06)
        found.append({
            "event": "step", "step": step, "loss": loss, "grad_norm": 0.6 + 2 / math.sqrt(step) + chance.random() / 4,
            "learning_rate": 1e-3 * min(step / 20, 0.5 + 0.5 * math.cos(math.pi * step / 220)), "seconds": seconds,
            "tokens_per_second": 2048 / seconds, "mfu": mfu, "hfu": mfu * 7.1 / 5.6,
            "wire_bytes": {"x": 3_407_872, "z": 5_210_112}, "exposed_seconds": exposed,
            "peak_memory_bytes": 412 * MiB, "skipped": step in skip,
        })  # fmt: skip
        if step in skip:
            found.append({"event": "skipped", "step": step, "parameter": "layers.0.mlp.up.weight"})
        if step % 50 == 0:
            found.append({"event": "evaluation", "step": step, "loss": loss + 0.1, "seconds": 0.5})
    return [*found, {"event": "end", "step": steps, "reason": "finished"}]


def write_run(folder: Path, lines: list[dict[str, Any]], cut: str = "", **more: Any) -> Path:
    """A run folder; `cut` is left of a last line that the run was killed in."""
    folder.mkdir(exist_ok=True)
    config = '[model]\nname = "gpt-tiny"\n\n[grid]\nx = 2\nz = 2\n\n[train]\nsteps = 200\n'
    (folder / "config.toml").write_text(config)
    (folder / "run.json").write_text(json.dumps(facts(**more)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + cut)
    return folder


def write_profile(folder: Path, ranks: int = 4, **per_step: Any) -> None:
    """What a run of four ranks leaves of a profile."""

    def over_ranks(mean: float | None, slowest: float | None, rank: int) -> dict[str, Any]:
        return {"mean": mean, "slowest": slowest, "slowest_rank": rank}

    numbers = {
        "seconds": over_ranks(0.25, 0.26, 1),
        "link_seconds": {"x": over_ranks(0.04, 0.05, 3), "z": over_ranks(0.02, 0.021, 0)},
        "exposed_seconds": {"x": over_ranks(0.01, 0.012, 2), "z": over_ranks(0.024, 0.03, 1)},
        **per_step,
    }
    summary = {"steps": [7, 9], "ranks": 4, "link_seconds_are": "kernels in the trace", "per_step": numbers}
    (folder / "profile").mkdir()
    (folder / "profile" / "summary.json").write_text(json.dumps(summary))
    for rank in range(ranks):
        (folder / "profile" / f"rank-{rank}.json").write_text('{"traceEvents": []}')


def write_pipeline(folder: Path, schedule: Schedule) -> Played:
    """What a run on pipe ranks leaves of its schedule and of the times of a step, whose messages take time."""
    stages = schedule.stages
    played = play(schedule, {"F": [0.01] * stages, "B": [0.012] * stages, "W": [0.008] * stages}, 0.004)
    (folder / "schedule.csv").write_text(to_csv(schedule))
    (folder / "pipeline").mkdir()
    for rank, line in enumerate(played.spans):
        spans = [[*span.action, 1e9 + span.start, 1e9 + span.end] for span in line]
        found = {"step": 3, "rank": 2 * rank, "pipe": rank, "spans": spans}
        (folder / "pipeline" / f"rank-{rank}.json").write_text(json.dumps(found))
    return played


def write_documents(folder: Path, lengths: list[list[int]]) -> None:
    """What two context groups, or two places, leave of the documents of a step."""
    for group in range(2):
        parts = [[{"rows": 2, "seq": 32, "lengths": each}] for each in lengths]
        record = {"step": 3, "group": group, "micro_batches": parts}
        (folder / "documents").mkdir(exist_ok=True)
        (folder / "documents" / f"group-{group}.json").write_text(json.dumps(record))


def html_of(folder: Path) -> str:
    """The page without plotly.js."""
    return run_page(read_run(folder), "", folder)


PIPED = {"grid": {"x": 2, "pipe": 2}, "order": list(AXES)}


@pytest.mark.parametrize("schedule", [named("zb-h1", 2, 1, 4), named("v-half", 2, 2, 4)], ids=["zb-h1", "v-half"])
def test_a_pipeline_is_drawn_as_it_ran_and_as_planned(tmp_path: Path, schedule: Schedule) -> None:
    folder = write_run(tmp_path / "run", records(10), **PIPED)
    ran = write_pipeline(folder, schedule)
    run = read_run(folder)
    assert (run.notes, run.pipeline is not None) == ([], True)
    figure = figures(run)["pipeline"]
    assert {trace["name"] for trace in figure["traces"]} == {"forward", "gradients of inputs", "gradients of weights"}
    drawn = {"y": 0, "y2": 0}
    for trace in figure["traces"]:
        assert trace["marker"]["color"] == PIPELINE_COLOURS[trace["text"][0].lstrip("0123456789")[0]]
        drawn[trace["yaxis"]] += len(trace["base"])
        if trace["yaxis"] == "y":  # every bar ends when its action did, so that what is between them is a bubble
            ends = sorted(base + length for base, length in zip(trace["base"], trace["x"], strict=True))
            kind = trace["text"][0].lstrip("0123456789")[0]
            known = sorted(span.end for line in ran.spans for span in line if span.action.kind == kind)
            assert ends == pytest.approx(known, abs=1e-6)
    assert set(drawn.values()) == {sum(map(len, schedule.orders))}
    page = html_of(folder)
    assert f"Step 3 took {duration(ran.makespan)} from its first action to its last" in page
    assert f"idle for {percent(ran.idle_share)} of it" in page
    assert f"{duration(play(schedule, seconds_of(ran)).makespan)} and" in page  # without the time of messages


def seconds_of(ran: Played) -> dict[str, list[float]]:
    return {kind: [seconds] * ran.schedule.stages for kind, seconds in (("F", 0.01), ("B", 0.012), ("W", 0.008))}


def test_a_pipeline_without_times_is_drawn_as_planned(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(10), **PIPED)
    write_pipeline(folder, named("1f1b", 2, 1, 4))
    (folder / "pipeline" / "rank-1.json").unlink()  # the run was killed
    assert "No step was recorded; as planned, F, B and W of a stage take a second each" in html_of(folder)


@pytest.mark.parametrize("damage", ["[]", "{", '{"step": 3, "spans": [["F", 0]]}', '{"step": 4, "spans": []}'])
def test_damaged_times_of_a_pipeline_are_said(tmp_path: Path, damage: str) -> None:
    folder = write_run(tmp_path / "run", records(10), **PIPED)
    write_pipeline(folder, named("1f1b", 2, 1, 4))
    (folder / "pipeline" / "rank-1.json").write_text(damage)
    (note,) = read_run(folder).notes
    assert "pipeline/" in note
    assert "as planned" in html_of(folder)


CONTEXT = {"assignment": "auto", "way": "exchange", "layers": 2, "query_bytes": 64, "key_bytes": 32}
GROUPED = {"grid": {"z": 8, "context": 4}, "order": list(AXES), "context": CONTEXT}
LENGTHS = [[40, 10, 6, 5, 3], [16, 16, 16, 16]]


def test_work_and_bytes_by_place_are_those_of_the_assignment(tmp_path: Path) -> None:
    lines = records(10)
    for line in (line for line in lines if line["event"] == "step"):
        line.update(imbalance=1.04, wire_bytes={"z": 100, "context": 300})
    folder = write_run(tmp_path / "run", lines, **GROUPED)
    write_documents(folder, LENGTHS)
    run = read_run(folder)
    assert run.notes == [] and run.documents is not None
    load = load_of(run.documents)
    assigned = [assign_documents(tuple(each), 4) for each in LENGTHS]
    pairs = [sum(both) for both in zip(*(one.work for one in assigned), strict=True)]
    assert [place.pairs for place in load.places] == pairs * 2
    assert {place.tokens for place in load.places} == {32}
    moved = 2 * 32 * sum(one.moved for one in assigned)  # of both layers
    assert sum(place.sent for place in load.places) == sum(place.received for place in load.places) == 2 * moved
    work = [max(one.work) for one in assigned], [sum(one.work) / 4 for one in assigned]
    assert load.imbalance == pytest.approx(sum(work[0]) / sum(work[1]))
    longest = load.documents[0]
    assert (longest.length, longest.places) == (40, len({m for m in range(4) if 0 in assigned[0].last(m)}))
    assert [one.moved for one in load.documents if one.length == 16] == [0] * 8
    drawn = figures(run)
    assert drawn["places"]["traces"][0]["x"] == [place.pairs for place in load.places]
    assert drawn["imbalance"]["traces"][0]["y"] == pytest.approx([0.04] * 10)
    page = html_of(folder)
    assert "K and V travel by exchange" in page and "18 documents on 8 places in 2 context groups of 4" in page
    assert f"<td>40</td><td>1</td><td>0</td><td>{longest.places} places</td><td>{nbytes(longest.moved)}</td>" in page


def test_places_without_groups_have_work_and_send_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(10), **{**GROUPED, "grid": {"z": 2}})
    write_documents(folder, LENGTHS)
    page = html_of(folder)
    assert "18 documents on 2 places." in page and "travel" not in page
    assert "imbalance" not in figures(read_run(folder))


def test_nothing_is_said_of_places_without_context_and_documents(tmp_path: Path) -> None:
    assert "Work by place" not in html_of(write_run(tmp_path / "run", records(10)))


@pytest.mark.parametrize("lengths", [[[40, 10, 6, 5, 2]], [[64, 0]], [[True, 63]], [["64"]], [{}]], ids=str)
def test_damaged_documents_are_said(tmp_path: Path, lengths: Any) -> None:
    folder = write_run(tmp_path / "run", records(10), **GROUPED)
    write_documents(folder, lengths)
    (note,) = read_run(folder).notes
    assert "documents/" in note
    assert "Work by place" not in html_of(folder)


@pytest.mark.slow
def test_a_browser_draws_every_figure_and_asks_for_nothing(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path / "run", records()))
    assert path == tmp_path / "run" / "report.html"
    document = opened(path)
    assert attribute(document, "errors") is None
    assert attribute(document, "drawn") == "6"
    # 5 of the loss (training, mean, validation, entropy, skipped), 2 + 3 in panels, 3 of the time
    assert len(re.findall(r'<g class="trace scatter', document)) == 13
    assert len(re.findall(r'<g class="trace bars', document)) == 2
    assert len(re.findall(r'class="rank"', document)) == 4
    buttons = {"Download plot as a PNG", "Zoom", "Pan", "Autoscale", "Reset axes"}
    assert set(re.findall(r'data-title="([^"]*)"', document)) == buttons  # none that would share the data
    assert "var(--" not in "".join(re.findall(r'<svg class="main-svg".*?</svg>', document, re.DOTALL))


@pytest.mark.slow
def test_the_browser_tells_of_a_request_and_of_an_error(tmp_path: Path) -> None:
    """The checks of the test above can fail, and a diverged run without evaluations is drawn all the same."""
    lines = [line for line in records(40, skip=()) if line["event"] == "step"]
    for line in lines[20:]:
        line.update(loss=math.nan, grad_norm=math.inf, mfu=None, hfu=None)
    folder = write_run(tmp_path / "run", lines)
    write_profile(folder)
    path = write_report(folder)
    planted = '<img src="http://example.invalid/a.png"><script>missing()</script></main>'
    text = path.read_text().replace("</main>", planted, 1)
    path.write_text(text.replace("</body>", f"<script>{READER}</script></body>"))
    document = opened(path, width=400)
    errors = attribute(document, "errors")
    assert errors is not None
    assert "refused to load http://example.invalid/a.png" in errors
    assert "missing is not defined" in errors
    assert attribute(document, "drawn") == "7"
    assert attribute(document, "scale") == "log"
    assert attribute(document, "range") == "5 15"
    assert attribute(document, "near") == "1 2"
    assert int(attribute(document, "width") or 0) <= 500  # Chromium makes no narrower window
    assert attribute(document, "overflow") == "0"  # nothing sticks out to the right


READER = """
const plot = (name) => document.getElementById(name);
setTimeout(async () => {
  document.querySelector("[data-log=loss]").click();
  await Plotly.relayout(plot("loss"), {"xaxis.range[0]": 5, "xaxis.range[1]": 15});
  document.querySelector(".rank").dispatchEvent(new Event("mouseenter"));
  setTimeout(() => Object.assign(document.documentElement.dataset, {
    scale: plot("loss").layout.yaxis.type,
    range: plot("time").layout.xaxis.range.join(" "),
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    width: innerWidth,
    near: [...document.querySelectorAll(".near b")].map((rank) => rank.textContent).join(" "),
  }), 500);
}, 500);
"""
"""A reader who takes the log scale, zooms the loss, and points at rank 0."""


def test_the_page_links_to_nothing(tmp_path: Path) -> None:
    text = html_of(write_run(tmp_path / "run", records()))
    assert not re.search(r"""\b(src|href|srcset|action)\s*=|@import|url\(""", text)
    assert f'content="{POLICY}"' in text
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script")
    assert "http" not in POLICY and "*" not in POLICY


def test_a_profile_has_a_table_a_figure_and_its_traces(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a run", records(10))
    assert "profiled" not in html_of(folder)
    write_profile(folder, ranks=3)
    text = html_of(folder)
    assert "Communication in the profiled steps 7 to 9" in text
    rows = re.findall(r"<tr><td>[xz]</td>.*?</tr>", text)
    assert [re.findall(r"<td>(.*?)</td>", row) for row in rows] == [
        ["x", "40 ms", "50 ms (rank 3)", "10 ms", "12 ms (rank 2)", "75%"],
        ["z", "20 ms", "21 ms (rank 0)", "24 ms", "30 ms (rank 1)", "0%"],  # waiting costs something itself
    ]
    exposed, hidden = figures(read_run(folder))["links"]["traces"]
    assert (exposed["name"], exposed["y"], exposed["x"]) == ("exposed", ["x", "z"], [0.01, 0.024])
    assert (hidden["name"], hidden["x"]) == ("hidden", [pytest.approx(0.03), 0])
    # only what is there is linked, wherever the page stands; nothing else is
    links = [f"profile/rank-{rank}.json" for rank in range(3)]
    assert re.findall(r'href="(.*?)"', text) == links
    elsewhere = run_page(read_run(folder), "", tmp_path / "pages")
    assert re.findall(r'href="(.*?)"', elsewhere) == [f"../a%20run/{link}" for link in links]
    assert not re.search(r"""\b(src|srcset|action)\s*=|@import|url\(""", text)
    assert "ui.perfetto.dev" in text


def test_a_profile_that_does_not_know_seconds_on_the_link_shows_the_others(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records(10))
    write_profile(folder, ranks=0, link_seconds={"z": {"mean": None, "slowest": None, "slowest_rank": 0}})
    text = html_of(folder)
    assert "<tr><td>z</td><td>\N{EN DASH}</td><td>\N{EN DASH}</td><td>24 ms</td>" in text
    assert "links" not in figures(read_run(folder))
    assert "The traces are not beside the run any more." in text


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"steps": [1], "ranks": 2}', '{"steps": [1, 2], "per_step": 3}'])
def test_a_broken_profile_is_a_note(tmp_path: Path, content: str) -> None:
    folder = write_run(tmp_path / "run", records(10))
    write_profile(folder)
    (folder / "profile" / "summary.json").write_text(content)
    assert "profile/summary.json could not be read" in html_of(folder)


def test_figures_hold_the_numbers_of_the_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", records()))
    made = figures(run)
    loss = {trace["name"]: trace for trace in made["loss"]["traces"]}
    assert loss["training"]["y"] == [step.loss for step in run.steps]
    assert (loss["validation"]["x"], loss["skipped"]["x"]) == ([50, 100, 150, 200], [61, 62])
    assert loss["unigram entropy"]["y"] == [3.31, 3.31]
    parts = zip(*(trace["y"] for trace in made["time"]["traces"]), strict=True)
    for stacked, step in zip(parts, run.steps, strict=True):
        assert sum(stacked) == pytest.approx(step.seconds)  # compute and exposed time make up the whole step
    assert "above the frame" in made["time"]["caption"]  # the first step took five times as long
    assert made["wire"]["traces"][0]["x"] == [3_407_872, 5_210_112]
    assert made["wire"]["traces"][0]["marker"]["color"] == ["var(--axis-x)", "var(--axis-z)"]
    shades = made["kept"]["traces"][0]["marker"]["color"]
    assert [shade == "var(--strong)" for shade in shades] == [False, True, False]


def test_key_figures(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", records()))
    text = html_of(tmp_path / "run")
    best = min(run.evaluations.losses)
    for shown in ("200 / 200", f"{best:.4g}", "3.31", "412 MiB", "3.25 MiB", "4.97 MiB", "410 k tokens, finished"):
        assert shown in text, shown
    assert text.count("MFU = model FLOPs per token") == 2  # as a tooltip and as a footnote
    assert "5.6 MFLOP per token by the model, 7.1 MFLOP by the hardware" in text


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>\"'&"
    lines = [*records(30), {"event": "skipped", "step": 9, "parameter": evil}, {"event": evil, "step": 3}]
    lines[4]["wire_bytes"] = {evil: 7}
    number = {"mean": 0.5, "slowest": 0.5, "slowest_rank": 0}
    names = dict.fromkeys(("model", "device", "started", "torch", "fourfold", "recompute", "peak_flops_from"), evil)
    folder = write_run(tmp_path / "run", lines, **names, kept_bytes={evil: 5})
    (folder / "config.toml").write_text(evil)
    write_profile(folder, link_seconds={evil: number}, exposed_seconds={evil: number})
    text = html_of(folder)
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert text.count("</script") == 5  # errors, data, plotly, draw, page
    assert evil.encode() in (folder / "config.toml").read_bytes() and escape(evil) in text


def test_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records()[:30], cut='{"event": "step", "step": 31, "lo')
    text = html_of(folder)
    assert "The last line of metrics.jsonl (line 31) is cut off and was left out." in text
    assert "The run recorded no end" in text
    assert "30 / 200" in text
    assert "no evaluation" in text


def test_a_resumed_run_shows_each_step_once(tmp_path: Path) -> None:
    first, again = records(30, skip=(28,))[:-1], records(40, skip=())[25:]
    again[0]["loss"] = 1.25
    folder = write_run(tmp_path / "run", [*first, {"event": "end", "step": 30, "reason": "stopped"}, *again])
    run = read_run(folder)
    assert [step.step for step in run.steps] == list(range(1, 41))
    assert (run.steps[25].loss, run.end, run.skipped) == (1.25, "finished", {})
    assert "5 logged steps were taken again after a resume" in " ".join(run.notes)


def test_a_run_on_two_grids_is_shown_by_part(tmp_path: Path) -> None:
    """Title and numbers say which grid they are of, and every figure has a line where the run was resumed."""
    steps = [line for line in records(40, skip=()) if line["event"] == "step"]
    for line in steps[30:]:
        line.update(seconds=0.5, tokens_per_second=4096, mfu=0.125, wire_bytes={"data": MiB}, exposed_seconds={})
    before = [
        {"started": "2026-11-15T04:20:00+00:00", "grid": {"x": 2, "z": 2}, "step": 10},  # a restart on the same grid
        {"started": "2026-11-15T05:20:00+00:00", "grid": {"x": 2, "z": 2}, "step": 34},
        {"started": "2026-11-15T05:30:00+00:00", "grid": {"x": 4}, "step": 30},  # rolled back: has left no step
    ]
    folder = write_run(tmp_path / "run", steps, resumed=before, grid={"data": 2}, ranks=2)
    run = read_run(folder)
    assert [(part.first, str(part.shape)) for part in run.parts] == [(1, "x=2 z=2"), (31, "data=2")]
    assert run.resumed == [10, 30]
    html = html_of(folder)
    assert "<title>gpt-tiny on x=2 z=2, then data=2 - Fourfold</title>" in html and "4, then 2 ranks" in html
    assert "median since step 31, all ranks" in html and ">500 ms<" in html and ">1 MiB<" in html
    row = re.search(r"<tr><td>1 to 30</td>(.*?)</tr>", html)
    assert row is not None and row.group(1).startswith("<td>x=2 z=2</td><td>4</td>"), row
    assert percent(median(line["mfu"] for line in steps[:30])) in row.group(1)
    assert "<td>31 to 40</td><td>data=2</td><td>2</td>" in html and "from 31 on, on data=2" in html
    for name in ("loss", "norm", "throughput", "time"):
        assert [line["x0"] for line in figures(run)[name]["layout"]["shapes"]] == [10.5, 30.5], name
    damaged = read_run(write_run(tmp_path / "other", steps, resumed=[{"step": "a"}, 7, *before[:1]]))
    assert (len(damaged.parts), damaged.resumed) == (1, [10])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none(tmp_path: Path, value: float) -> None:
    """NaN and infinity anywhere give a gap, a mark and a note, never a page that cannot be read."""
    lines = records(20)
    lines[10].update(dict.fromkeys(("loss", "grad_norm", "seconds", "tokens_per_second", "mfu"), value))
    lines[11].update(loss=None, wire_bytes=None, exposed_seconds={"x": value}, peak_memory_bytes=None)
    lines.append({"event": "evaluation", "step": 15, "loss": value})
    folder = write_run(tmp_path / "run", lines, unigram_entropy=value, peak_flops=None, flops_per_token=None)
    run = read_run(folder)
    assert [step.step for step in run.steps if step.diverged] == [11, 12]  # the trainer writes null for both
    assert any("first at step 11" in note for note in run.notes)
    assert any("validation loss of step 15" in note for note in run.notes)
    data = re.search(r'id="data">(.*?)</script>', html_of(folder)).group(1)  # type: ignore[union-attr]
    assert not re.search(r"\b(NaN|Infinity)\b", data)
    marks = [trace for trace in json.loads(data)["loss"]["traces"] if trace["name"] == "not finite"]
    assert [trace["x"] for trace in marks] == [[11, 12]]


def test_a_run_without_a_step_gives_a_page_that_says_so(tmp_path: Path) -> None:
    text = html_of(write_run(tmp_path / "run", []))
    assert "metrics.jsonl has no step" in text
    assert "Nothing recorded." in text


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a folder; give the folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"not a run: it has no config.toml, metrics.jsonl; a run folder has"):
        write_report(tmp_path)
    for name in FILES:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="has no model and no grid"):
        write_report(tmp_path)
    (tmp_path / "run.json").write_text('{"model":')
    with pytest.raises(ValueError, match="is not JSON"):
        write_report(tmp_path)
    with pytest.raises(ValueError, match=r"grid=.*grid axis x=0"):
        write_report(write_run(tmp_path, [], grid={"x": 0}))


def test_the_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(tmp_path / "run", records(5))
    out = tmp_path / "page.html"
    out.write_text("the old page")

    def fails(path: Path, target: Path) -> None:
        raise OSError(errno.EACCES, f"no rename of {path} to {target}")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fails)
        with pytest.raises(OSError, match=r"cannot write .*no rename"):
            write_report(folder, out)
    assert out.read_text() == "the old page"
    assert write_report(folder, out) == out
    assert out.read_text().endswith("</html>\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_report(folder, tmp_path / "missing" / "page.html")
    with pytest.raises(IsADirectoryError, match="name the file to write"):
        write_report(folder, tmp_path)


def test_without_plotly_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fourfold\[report\]'"):
        write_report(write_run(tmp_path / "run", records(2)))
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.parametrize(
    "shape", [Shape(x=2, y=3, z=2, data=2, order=(AXES[2], AXES[0], *AXES[3:], AXES[1])), Shape(), Shape(z=64)]
)
def test_every_rank_stands_at_its_coordinates(shape: Shape) -> None:
    drawn = re.findall(r'data-coords="([\d ]+)" title="rank (\d+):', draw_grid(shape))
    assert sorted(int(rank) for _, rank in drawn) == list(range(shape.world))
    for coords, rank in drawn:
        assert shape.coords(int(rank)) == dict(zip(AXES, map(int, coords.split()), strict=True))


def test_a_large_grid_shows_only_its_axes() -> None:
    text = draw_grid(Shape(x=4, z=8, data=4))
    assert "data-coords" not in text
    assert all(part in text for part in ("x = 4", "z = 8", "data = 4", "128 ranks"))


def test_thinning_keeps_spikes_and_marks(tmp_path: Path) -> None:
    lines = records(3000, skip=())
    lines[1234]["loss"] = 99.0
    steps = read_run(write_run(tmp_path / "run", lines)).steps
    losses = steps.column("loss")
    drawn = extremes(losses, limit=400)
    assert len(drawn) <= 400
    assert max(losses[place] for place in drawn) == 99.0
    assert (drawn[0], drawn[-1]) == (0, 2999) and list(drawn) == sorted(set(drawn))
    assert list(extremes(losses, limit=3000)) == list(range(3000))
    assert extremes([math.inf] * 10 + [1.0] * 10, limit=6)[:2] == [0, 10], "no number, no place but the first"
    assert marked(range(100)) == list(range(100))
    near = marked([*range(50_000), 10**6], limit=100)
    assert len(near) < 110 and near[-1] == 10**6


def test_a_sample_is_even_and_repeatable() -> None:
    assert sample(range(SAMPLED)) == range(SAMPLED)
    found = sample(range(3 * SAMPLED))
    assert len(found) == SAMPLED and found == sample(range(3 * SAMPLED))
    assert median(found) == pytest.approx(1.5 * SAMPLED, rel=0.02)


@pytest.mark.slow
def test_a_long_run_is_downsampled_and_keeps_every_spike(tmp_path: Path) -> None:
    """The short version of soak_report.py: peak memory does not grow much with the steps, and the page not at all."""
    folder = write_long_run(tmp_path / "run", LONG, evaluations=LONG // 10, saves=LONG // 10)
    cost = report(folder)
    check_page(folder, LONG)
    assert cost.page_bytes < PAGE_BYTES
    assert cost.peak_bytes < 250e6, "torch alone takes more than that"


LONG = 40_000
"""Steps of a long run in this file: five pieces of metrics.jsonl."""


ODD_LINES = [
    b"", b"   ", b"{", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"\xef\xbb\xbf{}", b"null", b"7", b'"text"',
    b'{"event": "step", "step": 7}', b'{"event": "step", "step": true, "loss": 1.0}', b'{"step": 1, "step": 2}',
    b'{"event": "step", "step": 99999999999999999999999, "loss": 1.0}',
    b'{"event": "step", "step": ' + b"9" * 5000 + b"}",
    b'{"event": "step", "step": 8, "loss": ' + b"9" * 400 + b"}", b'{"event": "step", "step": 8.5, "loss": 1.0}',
    b'{"event": "step", "step": 11, "loss": NaN, "grad_norm": -Infinity, "seconds": 1e999, "skipped": null}',
    b'{"event": "step", "step": 12, "wire_bytes": {"x": null, "w": 3}, "exposed_seconds": [1], "skipped": true}',
    b'{"event": "evaluation", "step": 9, "loss": 1e999}', b'{"event": "evaluation", "step": 9, "loss": 2.5}',
    b'{"event": "evaluation", "step": 4, "loss": 3.5}', b'{"event": "skipped", "step": 5, "parameter": "w"}',
    b'{"event": "skipped", "step": 5, "parameter": "v"}', b'{"event": "resumed", "step": 3}',
    b'{"event": "what", "step": 3}',
    b'{"event": "end", "step": 20, "reason": "stopped"}', b'{"event": ["step"], "step": 4}',
]  # fmt: skip
"""Lines that are no step as the trainer writes it."""


@pytest.mark.parametrize("seed", range(6))
def test_the_fast_way_reads_what_a_json_parser_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Any mixture of lines, in pieces of any size: the same steps, marks and notes as with json alone."""
    chance = random.Random(seed)
    lines = []
    for _ in range(300):
        record = dict(chance.choice(STEPS), step=chance.randrange(1, 250))
        for name in ("loss", "grad_norm", "seconds", "mfu"):
            record[name] = chance.choice([None, chance.random(), chance.random() * 1e-7, chance.randrange(9), -1e20])
        record["skipped"] = chance.random() < 0.1
        if chance.random() < 0.05:
            del record[chance.choice(["skipped", "mfu", "wire_bytes"])]
        line = json.dumps(record).encode()
        damaged = line.replace(b".", b".1.", 1), line.replace(b": ", b":"), line[: chance.randrange(len(line))]
        lines.append(chance.choice(damaged) if chance.random() < 0.02 else line)
        if chance.random() < 0.1:
            lines.append(chance.choice(ODD_LINES))
    folder = write_run(tmp_path / "run", [])
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n" * chance.randrange(3))
    monkeypatch.setattr("fourfold.report.run_data.PIECE_BYTES", chance.choice([1, 5000, 1 << 20]))
    monkeypatch.setattr("fourfold.report.run_data.CHUNK_BYTES", chance.choice([1, 3000, 1 << 20]))
    fast = read_run(folder)
    monkeypatch.setattr("fourfold.report.run_data.PIECE_BYTES", 1 << 20)
    monkeypatch.setattr(StepPattern, "of", lambda _: None)
    slow = read_run(folder)
    assert [repr(step) for step in fast.steps] == [repr(step) for step in slow.steps]
    assert fast.evaluations == slow.evaluations
    assert (fast.skipped, fast.notes, fast.end) == (slow.skipped, slow.notes, slow.end)
    assert len(slow.steps) > 100 and slow.skipped


STEPS = [step for step in records(3) if step["event"] == "step"]


def test_smoothing_does_not_lag_and_leaves_gaps() -> None:
    slope = [float(place) for place in range(9)]
    assert smooth(slope, 5) == pytest.approx(slope)
    assert smooth([1.0, None, 4.0, math.nan, 1.0], 3) == pytest.approx([1.0, None, 2.0, None, 1.0])
    assert smooth([0.0, 0.0, 5.0, 0.0, 0.0], 5)[2] == pytest.approx(1.0)


def test_units() -> None:
    assert [count(value) for value in (0, 12, 999.9, 1_234_567, None)] == ["0", "12", "1 k", "1.23 M", "\N{EN DASH}"]
    assert [nbytes(value) for value in (512, 1536, 1 << 30)] == ["512 B", "1.5 KiB", "1 GiB"]
    assert (percent(0.3141), percent(math.nan)) == ("31.4%", "\N{EN DASH}")
    assert [duration(value) for value in (0.0213, 2.5, 75, 7320)] == ["21.3 ms", "2.5 s", "1 min 15 s", "2 h 02 min"]

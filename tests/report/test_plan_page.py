"""The page and the tables of a plan: true to its document, drawn in a browser without a request, and never too wide."""

from __future__ import annotations

import copy
import errno
import json
import re
import shlex
import sys
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from browser import attribute, opened
from fourfold import cli
from fourfold.axes import AXES
from fourfold.planner.explain import add_training
from fourfold.planner.goodput import FailureRates
from fourfold.report import plan_text
from fourfold.report.plan_page import (
    BARS,
    PLAN_POLICY,
    RANKING,
    _front,
    cards,
    plan_figures,
    plan_page,
    view,
    whereabouts,
    write_plan_page,
)
from fourfold.report.plan_text import asked_pair, command, grid_name, plan_table, reasons_it_wins, why_text
from fourfold.report.units import money
from fourfold.shape import Shape, shapes_of
from fourfold.train.config import read_config

SAMPLE = json.loads((Path(__file__).parent / "plan_sample.json").read_text())
EVIL = "</script><script>alert(1)</script>\"'&"


def plan(**more: Any) -> dict[str, Any]:
    """A plan of gpt-80b on 1,024 devices, four a node, with plausible numbers."""
    return {**copy.deepcopy(SAMPLE), **more}


def many(times: int) -> dict[str, Any]:
    """The same plan with so many times the grids, each slower than those before."""
    grids = [
        {**entry, "rank": 1 + place + turn * len(SAMPLE["grids"]), "seconds": entry["seconds"] * (1 + turn / 4)}
        for turn in range(times)
        for place, entry in enumerate(SAMPLE["grids"])
    ]
    return plan(grids=grids)


READER = """
const plot = (name) => document.getElementById(name);
const texts = (where) => [...document.querySelectorAll(where)].map((found) => found.textContent);
const type = (where, text) => {
  const input = document.querySelector(`${where} input`);
  input.value = text;
  input.dispatchEvent(new Event("input"));
};
setTimeout(async () => {
  const seen = {
    points: plot("tradeoff").data.filter((trace) => trace.customdata).flatMap((trace) => trace.x).length,
    kinds: [...new Set(plot("tradeoff").data.map((trace) => trace.type))],
    first: plot("chosen").textContent, pages: texts("#ranking .steps span"),
  };
  plot("tradeoff").emit("plotly_click", { points: [{ customdata: 7 }] });
  await new Promise((done) => setTimeout(done, 300));
  Object.assign(seen, {
    cards: texts("#chosen dd"), bar: plot("selected").textContent, other: plot("other").textContent,
    memory: texts("#memory li"), ring: plot("tradeoff").data.at(-1).x, picked: texts("#ranking .picked td")[0],
    words: plot("chosen").querySelector("pre").textContent, band: plot("parts").layout.shapes[0].y0,
  });
  seen.devices = texts(".device text:nth-of-type(1)").length;
  document.querySelectorAll(".device")[5].dispatchEvent(new Event("click"));
  seen.rings = {};
  document.querySelectorAll("[data-axis]").forEach((button) => {
    button.dispatchEvent(new Event("mouseenter"));
    seen.rings[button.dataset.axis] = texts(".device.near text:nth-of-type(1)").map(Number);
  });
  seen.coords = texts(".device.here .at")[0];
  type("#refused", "x=2 NEEDS");
  seen.refused = texts("#refused tbody tr");
  seen.found = texts("#refused .steps span")[0];
  document.querySelector("#ranking [aria-label='next page']").click();
  seen.second = texts("#ranking tbody td:first-child")[0];
  document.querySelector("#selected [aria-label='the best grid']").click();
  seen.again = plot("chosen").textContent;
  document.documentElement.style.width = "420px";
  dispatchEvent(new Event("resize"));
  await new Promise((done) => setTimeout(done, 600));
  const hidden = ".scroll *, pre *, .hoverlayer *, .modebar *";
  seen.wide = [...document.querySelectorAll("main *")].filter((part) => !part.matches(hidden) &&
    part.getBoundingClientRect().right > 421).map((part) => part.outerHTML.slice(0, 120));
  document.documentElement.dataset.seen = JSON.stringify(seen);
}, 800);
"""
"""A reader who selects the eighth grid, looks at its rings, filters, turns a page, goes back, and takes a phone."""


@pytest.mark.slow
def test_a_browser_draws_hundreds_of_grids_and_every_panel_follows_the_selected_one(tmp_path: Path) -> None:
    document = many(4)
    path = write_plan_page(document, tmp_path / "plan.html")
    path.write_text(path.read_text().replace("</body>", f"<script>{READER}</script></body>"))
    html = opened(path, dark=True)
    assert attribute(html, "errors") is None
    assert attribute(html, "drawn") == "3"
    seen = json.loads(attribute(html, "seen") or "{}")
    assert seen["points"] == len(document["grids"]) > 500  # nothing is thinned
    assert seen["kinds"] in (["scattergl", "scatter"], ["scatter"])  # the latter where there is no WebGL
    assert seen["pages"] == [f"1 to 25 of {len(document['grids'])}"]
    entry = document["grids"][7]
    name = grid_name(entry["grid"])
    assert seen["cards"] == [text for _, *shown in cards(document, entry) for text in shown]
    assert name in seen["bar"] and name in seen["other"] and grid_name(document["grids"][0]["grid"]) in seen["other"]
    assert seen["memory"] == [f"{kind} {text}" for kind, share, text in view(document, entry)["memory"] if share]
    assert (seen["ring"], seen["picked"], seen["band"]) == ([entry["seconds"]], "8", 6.5)
    assert seen["words"].split() == f"{command(document)} {view(document, entry)['changes']}".split()
    shape = Shape(**entry["grid"], order=tuple(entry["order"]))
    assert set(seen["rings"]) == {axis for axis in AXES if shape.sizes[axis] > 1}
    for axis, ranks in seen["rings"].items():
        assert ranks == [rank for rank in shape.ranks_along(axis, 5) if rank < seen["devices"]]
    assert seen["coords"] == "\N{MIDDLE DOT}".join(str(shape.coords(5)[axis]) for axis in entry["order"])
    expected = [entry for entry in document["refused"] if entry["grid"]["x"] == 2 and "needs" in entry["reason"]]
    assert 1 < len(seen["refused"]) == min(25, len(expected)) and seen["found"].endswith(f"of {len(expected)}")
    assert seen["second"] == "26"
    assert seen["again"] == seen["first"] != ""
    assert seen["wide"] == []


def test_the_page_loads_nothing() -> None:
    text = plan_page(plan(), "")
    assert not re.search(r"""\b(src|href|srcset|action)\s*=|@import|url\(""", text)
    assert f'content="{PLAN_POLICY}"' in text and "'unsafe-eval'" in PLAN_POLICY
    assert text.index("Content-Security-Policy") < text.index("<style>") < text.index("<script")
    assert PLAN_POLICY.startswith("default-src 'none'") and "http" not in PLAN_POLICY and "*" not in PLAN_POLICY


def test_the_answer_needs_no_script() -> None:
    document = plan()
    text = unescape(re.sub(r"<[^>]*>", "", plan_page(document, "").split('id="data"')[0]))
    for shown in [*reasons_it_wins(document), command(document), document["config_toml"], *document["why"]["lines"]]:
        assert shown in text
    for label, value, detail in cards(document, document["grids"][0]):
        assert f"{label}{value}{detail}" in text


def test_text_from_the_document_is_escaped() -> None:
    document = plan(config_toml=EVIL, assumptions=[EVIL])
    document["why"]["lines"] = [EVIL]
    for part, name in (("model", "name"), ("machine", "name"), ("machine", "device"), ("machine", "about")):
        document[part][name] = EVIL
    for entry in (*document["grids"][:3], *document["refused"][:3]):
        entry["reason"] = EVIL
    document["grids"][1]["bound_by"] = EVIL
    document["timeline"][0]["label"] = EVIL
    text = plan_page(document, "")
    assert "alert(1)" in text
    assert "<script>alert" not in text
    assert text.count("</script") == 5  # errors, data, plotly, draw, page


def test_figures_hold_the_numbers_of_the_plan() -> None:
    document = plan()
    made, grids = plan_figures(document), document["grids"]
    points = {
        place: (x, y, trace["name"])
        for trace in made["tradeoff"]["traces"]
        if "customdata" in trace
        for place, x, y in zip(trace["customdata"], trace["x"], trace["y"], strict=True)
    }
    for place, entry in enumerate(grids):
        assert points[place] == (entry["seconds"], entry["peak_bytes"] / 2**30, f"bound by {entry['bound_by']}")
    bars = zip(*(trace["x"] for trace in made["parts"]["traces"]), strict=True)
    for values, entry in zip(bars, grids[:BARS], strict=True):
        assert sum(values) == pytest.approx(entry["seconds"], rel=2e-3)
    drawn = sorted(
        (text, base, track)
        for trace in made["timeline"]["traces"]
        for text, base, track in zip(trace["text"], trace["base"], trace["y"], strict=True)
    )
    assert drawn == sorted((event["label"], event["start"], event["track"]) for event in document["timeline"])
    json.dumps(made, allow_nan=False)


def test_no_grid_beats_one_of_the_front_in_seconds_and_memory() -> None:
    grids = plan()["grids"]
    front = _front(grids)
    assert 1 < len(front) < len(grids)
    for entry in grids:
        better = [
            kept for kept in front if kept["seconds"] <= entry["seconds"] and kept["peak_bytes"] <= entry["peak_bytes"]
        ]
        assert better  # everything is on the front or behind it
        if entry in front:
            assert better == [entry]


@pytest.mark.parametrize(("devices", "per_node"), [(24, 4), (24, 8), (18, 4), (12, 3), (16, 16), (10, 4), (12, 1)])
def test_where_an_axis_lies_is_what_its_ranks_say(devices: int, per_node: int) -> None:
    for shape in shapes_of(devices, ("z", "x", "data", "y")):
        stride = 1
        for axis in shape.order:
            size = shape.sizes[axis]
            if size > 1:
                nodes = [
                    {rank // per_node for rank in shape.ranks_along(axis, first)}
                    for first in range(devices)
                    if shape.coords(first)[axis] == 0
                ]
                crossing = sum(len(node) > 1 for node in nodes)
                expected = (
                    "crosses nodes" if crossing == len(nodes) else "some cross nodes" if crossing else "inside a node"
                )
                assert whereabouts(stride, size, devices, per_node) == expected, (shape, axis)
            stride *= size


def test_the_options_of_a_grid_turn_the_winners_config_into_its_own(tmp_path: Path) -> None:
    document = plan()
    path = tmp_path / "run.toml"
    path.write_text(document["config_toml"])
    for entry in [document["grids"][0], *document["grids"][1::9]]:
        words = shlex.split(view(document, entry)["changes"])
        options = cli.parser().parse_args(["train", str(path), *words])
        sizes = [(f"grid.{axis}", size) for axis, size in (options.grid or {}).items()]
        config = read_config(path, [*sizes, *options.changes], forget_grid=options.grid is not None)
        assert config.grid.shape == Shape(**entry["grid"], order=tuple(entry["order"]))
        assert config.batch.micro_steps == entry["micro_steps"]
        for name, value in entry["policy"].items():
            assert getattr(config.overlap if name == "halves" else config.policy, name) == value, name


def test_links_say_their_bandwidth_where_the_plan_knows_it() -> None:
    document = plan()
    entry = document["grids"][0]
    links = view(document, entry)["links"]
    assert links["y"]["short"] == "inside a node, 225 GB/s" and links["x"]["short"] == "crosses nodes, 20 GB/s"
    del entry["bandwidth"]
    assert view(document, entry)["links"]["y"]["short"] == "inside a node"
    assert len(view(document, entry)["cells"]) == len(RANKING)


@pytest.mark.parametrize("width", [70, 100, 160])
def test_a_table_fits_its_width_and_loses_nothing(width: int) -> None:
    document = plan()
    text = plan_table(document, 10, width=width, colour=False)
    assert max(map(len, text.splitlines())) <= width
    wide = plan_table(document, 10, colour=False)  # not on a terminal: a line for each grid
    rows = [line.split() for line in wide.splitlines() if re.match(r" *\d+ +[xyz]", line)]
    assert [row[0] for row in rows] == [str(rank) for rank in range(1, 11)]
    for row in rows:
        assert all(word in text.split() for word in row), row
    assert "44.24" in text and "2.3/10.4" in text and "32.3 GiB" in text


@pytest.mark.parametrize("price", [None, 2.5])
def test_a_training_has_hours_and_with_a_price_a_cost(price: float | None) -> None:
    document = plan()
    tokens, first = 1000 * document["batch_tokens"] - 1, document["grids"][0]
    add_training(document, FailureRates(), tokens, price)
    undisturbed = 1000 * first["seconds"] / 3600  # a part of a step is a step
    hours = undisturbed / first["goodput"]
    assert 0.9 < first["goodput"] < 1
    assert document["training"] == {"tokens": tokens, "steps": 1000, "price": price}
    assert first["training"]["hours"] == pytest.approx(hours)
    assert first["training"]["device_hours"] == pytest.approx(hours * document["devices"])
    for width in (None, 160, 100, 70):
        text = plan_table(document, 10, width=width, colour=False)
        assert f"{hours:,.1f}" in text.split()
        assert ("cost" in text.split()) == (price is not None)
        assert width is None or max(map(len, text.splitlines())) <= width
    (said,) = [line for line in plan_table(document, 10).splitlines() if "1,000 steps" in line]
    assert said in reasons_it_wins(document)
    labels = [label for label, *_ in cards(document, first)]
    document["why"] = {"grid": document["grids"][1]["grid"], "against": first["grid"], "lines": []}
    compared = [row[0] for row in asked_pair(document)]
    if price is None:
        assert "cost" not in said and "Cost" not in labels and compared[-1] == "training"
        return
    paid = money(price * hours * document["devices"])
    assert f", which cost {paid} at 2.5 each" in said
    assert ("Cost", paid, f"{hours * document['devices']:,.0f} device-hours at 2.5") in cards(document, first)
    assert compared[-2:] == ["training", "cost"]


def test_colours_change_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    bare = plan_table(plan(), 5, width=100, colour=False)
    bright = plan_table(plan(), 5, width=100, colour=True)
    assert "\x1b[" in bright and "\x1b" not in bare
    assert re.sub(r"\x1b\[[0-9;]*m", "", bright) == bare
    monkeypatch.setattr(plan_text, "find_spec", lambda _: None)  # as if rich were not installed
    assert plan_table(plan(), 5, width=100, colour=True) == bare
    with pytest.raises(ValueError, match="top=0"):
        plan_table(plan(), 0)


def test_why_compares_the_pair_that_was_asked_about() -> None:
    document = plan()
    text = why_text(document)
    assert text.startswith("Why x=4 y=4 data=64 and not x=4 y=2 z=4 data=32?")
    assert re.search(r"step +44.2 s +48.5 s +\+4.26 s\n", text)
    assert re.search(r"exposed over data +196 ms +96.5 ms +-99.5 ms\n", text)
    assert all(f"- {line}" in text for line in document["why"]["lines"])
    document["why"]["against"] = document["refused"][0]["grid"]
    assert "+4.26 s\n" not in why_text(document) and document["why"]["lines"][1] in why_text(document)
    narrow = why_text(document, width=60)
    assert max(map(len, narrow.splitlines())) <= 60 and document["why"]["lines"][1] in narrow.replace("\n ", "")
    assert any(reason.startswith("The next best, x=4 y=4 z=4 data=16,") for reason in reasons_it_wins(plan()))


def test_one_node_needs_no_torchrun() -> None:
    assert command(plan()).startswith(
        "torchrun --nnodes 256 --nproc-per-node 4 --rdzv-backend fourfold --rdzv-endpoint node0:29400 "
        "-m fourfold.cli train gpt-80b.toml"
    )
    assert command(plan(devices=4)) == "fourfold train gpt-80b.toml"
    assert command(plan(devices=6)).startswith("torchrun --nnodes 2 --nproc-per-node 3")


def test_the_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "plan.html"
    out.write_text("the old page")
    with pytest.raises(IsADirectoryError, match="name the file to write"):
        write_plan_page(plan(), tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        write_plan_page(plan(), tmp_path / "missing" / "plan.html")

    def fails(path: Path, target: Path) -> None:
        raise OSError(errno.EACCES, f"no rename of {path} to {target}")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fails)
        with pytest.raises(OSError, match=r"cannot write .*no rename"):
            write_plan_page(plan(), out)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.html"]
    monkeypatch.setitem(sys.modules, "plotly.offline", None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'fourfold\[report\]'"):
        write_plan_page(plan(), out)
    assert out.read_text() == "the old page"

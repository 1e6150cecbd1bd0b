"""The page of a plan: one self-contained HTML file with the answer, the grids that it was chosen from, and the reasons.

The answer is in the HTML itself; plan_page.js adds the panels that follow the grid that the reader selects. All numbers
are written out here (`view`), so that the script formats none and both show the same text. Text from the document is
escaped here, or inserted as text by the script.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from html import escape
from itertools import product
from pathlib import Path
from shlex import quote
from typing import Any

from fourfold.axes import WAITED_FOR
from fourfold.grid import Shape
from fourfold.report import page
from fourfold.report.page import Figure, colour, hint, plot_axis, plot_layout, section
from fourfold.report.plan_text import (
    PlanDocument,
    PlannedGrid,
    asked_pair,
    command,
    grid_name,
    model_size,
    named_policies,
    order_name,
    pipeline_text,
    plan_table,
    reasons_it_wins,
    searched,
    why_title,
)
from fourfold.report.units import DASH, count, duration, money, nbytes, percent, plural

PLAN_POLICY = page.POLICY.replace("script-src 'unsafe-inline'", "script-src 'unsafe-inline' 'unsafe-eval'")
"""The policy of a report plus eval: plotly compiles the drawing code of `scattergl` on the page. Nothing is loaded."""

GIB = 1 << 30

BARS = 20
"""The number of grids with a bar for the parts of their step, from the best on: more bars would not fit on a screen."""

PHASES = {"forward": "var(--compute)", "backward": "var(--strong)", "optimizer": "var(--accent)"}
"""The shade of computation, by phase of the step."""

RANKING = {
    "#": lambda entry: str(entry["rank"]),
    "grid": lambda entry: grid_name(entry["grid"]),
    "order": order_name,
    "policy": lambda entry: ", ".join(entry["policy"][name] for name in named_policies(entry)),
    "micro": lambda entry: str(entry["micro_steps"]),
    "step": lambda entry: duration(entry["seconds"]),
    "tokens/s": lambda entry: count(entry["tokens_per_second"]),
    "MFU": lambda entry: percent(entry["mfu"]),
    "HFU": lambda entry: percent(entry["hfu"]),
    "peak": lambda entry: nbytes(entry["peak_bytes"]),
    "exposed": lambda entry: ", ".join(f"{axis} {duration(value)}" for axis, value in entry["exposed_seconds"].items()),
}
"""The columns of the ranking: the name of each, and the function that writes the cell of a grid."""


def write_plan_page(document: PlanDocument, path: Path) -> Path:
    """Write the page of a plan to `path`, completely or not at all; return the path."""
    return page.write_page(Path(path), plan_page(document, page.plotly_js()), example="plan.html")


def name_of_all(shape: Shape) -> str:
    """Return all axes of a grid, and its context and its fold if it has them."""
    sizes = {**shape.sizes, **{name: size for name, size in shape.named.items() if size > 1}}
    return " ".join(f"{axis}={size}" for axis, size in sizes.items())


def plan_page(document: PlanDocument, plotly_js: str) -> str:
    """Return the HTML of the page."""
    figures = plan_figures(document)
    model, machine, devices = document["model"], document["machine"], f"{document['devices']:,} devices"
    data = {
        "figures": figures,
        "grids": [view(document, entry) for entry in document["grids"]],
        # All axes, also those of size 1, so that a filter finds y=1.
        "refused": [[name_of_all(Shape(**entry["grid"])), entry["reason"]] for entry in document["refused"]],
        "heads": list(RANKING),
        "perNode": machine["devices_per_node"],
        "devices": document["devices"],
        "cuts": page.CUTS,
        "command": command(document),
    }
    facts = [
        model_size(model),
        f"{machine['device']}, {machine['devices_per_node']} per node",
        f"{count(document['batch_tokens'])} tokens per step in sequences of {document['seq']:,}",
        f"searched: {searched(document)}",
    ]
    failures = (document.get("failures") or {"assumptions": ()})["assumptions"]
    assumptions = [line for line in (machine["about"], *document["assumptions"], *failures) if line]
    body = [
        page.header("Plan", model["name"], f"{devices} of {machine['name']}", facts),
        _answer(document),
        _panels(document, figures),
        _refused(document["refused"]) if document["refused"] else "",
        section("What the plan assumes", page.bullets(assumptions)) if assumptions else "",
    ]
    title, files = f"Plan of {model['name']} on {devices}", {"script": "plan_page.js", "styles": "plan_page.css"}
    return page.frame(title, "\n".join(body), data, plotly_js, policy=PLAN_POLICY, **files)


def _answer(document: PlanDocument) -> str:
    best = document["grids"][0]
    axes = [f'<span style="--axis:{colour(axis)}">{axis}={size}</span>' for axis, size in _cut(best).items()]
    shown = "".join(page.card(*one) for one in cards(document, best))
    policy = "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in policy_words(best))
    # The style sheet breaks a command line only between its words, not at the hyphens of its options.
    words = " ".join(f"<span>{escape(word)}</span>" for word in command(document).split(" "))
    config = _copyable(f"{document['model']['name']}.toml", "config", escape(document["config_toml"]))
    return (
        f'<section class="answer"><h2>The best grid</h2><p class="winner">{" ".join(axes) or "one device"}</p>'
        f"{hint(f'Rank order, fastest axis first: {order_name(best)}.')}"
        f'<dl class="cards">{shown}</dl><div class="pair"><div>{page.bullets(reasons_it_wins(document))}'
        f'<ul class="policy">{policy}</ul>{_copyable("Run it", "command", words)}</div>{config}</div></section>'
        f"<noscript><p class='note'>The figures and panels need JavaScript; this table does not.</p>"
        f"<pre>{escape(plan_table(document, 20, colour=False))}</pre></noscript>{_asked(document)}"
    )


def _cut(entry: PlannedGrid) -> dict[str, int]:
    """Return the axes of a grid that are longer than 1, and their sizes."""
    return {axis: size for axis, size in entry["grid"].items() if size > 1}


def _copyable(title: str, name: str, body: str) -> str:
    button = f'<button type="button" data-copy="{name}">copy</button>'
    return f'<div class="copyable"><h2>{escape(title)}{button}</h2><pre id="{name}">{body}</pre></div>'


def _asked(document: PlanDocument) -> str:
    """Return the answer to `--why`; empty if the plan was not asked."""
    asked = document["why"]
    if asked is None:
        return ""
    head, *rows = asked_pair(document) or [()]
    table = page.table(head, [[escape(cell) for cell in row] for row in rows], kind="scroll tall compare")
    return section(why_title(asked), (table if rows else "") + page.bullets(asked["lines"]))


def _panels(document: PlanDocument, figures: Mapping[str, Figure]) -> str:
    """Return the panels that plan_page.js fills."""
    captions = {
        "tradeoff": "Each point is a grid with its best configuration. Select one, and all panels show it.",
        "parts": "Computation and exposed communication of the best grids. A grid can be selected here too.",
        "timeline": f"A few layers of {grid_name(document['grids'][0]['grid'])}. Drag to zoom, double-click to see "
        "everything.",
    }
    plots = dict.fromkeys(captions, hint("The plan has no timeline."))
    plots |= {name: hint(captions[name]) + page.plot(name, figure) for name, figure in figures.items()}
    panels = {
        "All grids": plots["tradeoff"],
        "Parts of a step": plots["parts"],
        "The selected grid": '<div id="chosen"></div>',
        "Memory per device": '<div id="memory"></div>',
        **({"Pipeline": '<div id="pipeline"></div>'} if has_pipelines(document) else {}),
        "The grid on its nodes and links": '<div id="nodes"></div>',
        "Timeline of a step": f'<p class="hint" id="other"></p>{plots["timeline"]}',
        "Ranking": '<div id="ranking"></div>',
    }
    sections = [section(title, body) for title, body in panels.items()]
    return "\n".join(['<div id="selected" aria-live="polite"></div>', *sections])


def has_pipelines(document: PlanDocument) -> bool:
    """Return whether a grid of the plan has a pipe axis."""
    return any(entry.get("pipeline") for entry in document["grids"])


def _refused(refused: list[PlannedGrid]) -> str:
    title = f"Refused grids ({len(refused):,}) and the reasons"
    return f'<details><summary>{title}</summary><div id="refused"></div></details>'


def view(document: PlanDocument, entry: PlannedGrid) -> dict[str, Any]:
    """Return the texts and numbers that the panels show when a grid is selected."""
    best, usable = document["grids"][0], document["machine"]["usable_bytes"]
    more = percent(entry["seconds"] / best["seconds"] - 1)
    memory = entry["memory_bytes"].items()
    return {
        "name": grid_name(entry["grid"]),
        "rank": entry["rank"],
        "at": [entry["seconds"], entry["peak_bytes"] / GIB],
        "cards": cards(document, entry),
        "step": duration(entry["seconds"]),
        "uses": _memory_used(entry, usable),
        "against": "the best" if entry is best else f"{more} slower than the best",
        "reason": entry["reason"],
        "policy": policy_words(entry),
        "memory": [[kind.replace("_", " "), size / usable, nbytes(size)] for kind, size in memory],
        "peak": entry["peak_bytes"] / usable,
        "sizes": entry["grid"],
        "order": entry["order"],
        "links": {axis: link(document, entry, axis) for axis in _cut(entry)},
        "changes": "" if entry is best else _changes(entry, best),
        "pipeline": _pipeline(entry) if entry.get("pipeline") else None,
        "cells": [cell(entry) or DASH for cell in RANKING.values()],
    }


def _pipeline(entry: PlannedGrid) -> dict[str, Any]:
    """Return what the panel of the pipeline draws: a row of actions for each pipe rank, as shares of the time shown."""
    found = entry["pipeline"]
    # ranks end at different times where actions were left out: all rows end where the first of them does
    cut = [
        spans[-1][4] for spans, whole in zip(found["spans"], _actions_by_rank(found), strict=True) if len(spans) < whole
    ]
    until = min(cut, default=max(spans[-1][4] for spans in found["spans"]))
    several = len(found["placement"]) > entry["grid"]["pipe"]
    rows = []
    for rank, (spans, size) in enumerate(zip(found["spans"], found["peak_bytes"], strict=True)):
        drawn = [
            [kind, f"{stage if several else ''}{kind}{micro}", start / until, (min(end, until) - start) / until,
             f"{kind} of stage {stage}, micro-batch {micro}: {duration(start)} to {duration(end)}"]
            for kind, stage, micro, start, end in spans
            if start < until
        ]  # fmt: skip
        layers = [str(many) for many, place in zip(found["layers"], found["placement"], strict=True) if place == rank]
        rows.append({"name": f"pipe {rank}", "detail": f"{'+'.join(layers)} layers, {nbytes(size)}", "spans": drawn})
    shown = "" if not cut and found["played_micro_steps"] == found["micro_steps"] else " The beginning is drawn."
    return {"text": f"{pipeline_text(entry)}{shown}", "rows": rows, "end": duration(until)}


def _actions_by_rank(found: Mapping[str, Any]) -> list[int]:
    """Return how many actions each pipe rank has in the schedule that was played."""
    ranks = range(len(found["spans"]))
    kinds = {span[0] for spans in found["spans"] for span in spans}
    each = found["played_micro_steps"] * (3 if "W" in kinds else 2)
    return [each * found["placement"].count(rank) for rank in ranks]


def cards(document: PlanDocument, entry: PlannedGrid) -> list[tuple[str, str, str]]:
    """Return the key figures of a grid: label, value, detail."""
    exposed, usable = sum(entry["exposed_seconds"].values()), document["machine"]["usable_bytes"]
    whole = []
    if document.get("failures"):
        every = f"a checkpoint every {duration(entry['interval_seconds'])}, {plural(entry['interval_steps'], 'step')}"
        whole.append(("Goodput", percent(entry["goodput"]), every))
    if document.get("training"):
        asked, takes = document["training"], entry["training"]
        whole.append(("Training", duration(3600 * takes["hours"]), f"{count(asked['tokens'])} tokens"))
        if asked["price"] is not None:
            paid = f"{takes['device_hours']:,.0f} device-hours at {asked['price']:g}"
            whole.append(("Cost", money(takes["cost"]), paid))
    return [
        ("Step", duration(entry["seconds"]), f"{duration(entry['compute_seconds'])} of computation"),
        ("Tokens per second", count(entry["tokens_per_second"]), "all devices"),
        ("MFU", percent(entry["mfu"]), f"of {count(document['machine']['peak_flops'])}FLOP/s per device"),
        ("HFU", percent(entry["hfu"]), "counts recomputed work too"),
        ("Exposed", duration(exposed), f"{percent(exposed / entry['seconds'])} of the step"),
        ("Peak memory", *_memory_used(entry, usable)),
        *whole,
    ]


def _memory_used(entry: PlannedGrid, usable: float) -> tuple[str, str]:
    """Return the peak memory of a grid, and the part that it is of the memory that a device can use."""
    return nbytes(entry["peak_bytes"]), f"{percent(entry['peak_bytes'] / usable)} of {nbytes(usable)}"


def _changes(entry: PlannedGrid, best: PlannedGrid) -> str:
    """Return the options that turn the config of the best grid into the config of this one."""

    def settings(entry: PlannedGrid) -> dict[str, Any]:
        # `halves` is the one policy of a plan that the config has in another section.
        policy = {f"{'overlap' if name == 'halves' else 'policy'}.{name}": it for name, it in entry["policy"].items()}
        return {"grid.order": entry["order"], "batch.micro_steps": entry["micro_steps"], **policy}

    sizes = ",".join(f"{axis}={size}" for axis, size in _cut(entry).items()) or "data=1"
    options, usual = [f"--grid {sizes}"], settings(best)
    for name, value in settings(entry).items():
        if value != usual.get(name):  # a grid without context has no way of K and V
            # As --set reads values: text may be bare, everything else is written as in JSON.
            written = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            options.append(f"--set {quote(f'{name}={written}')}")
    return " ".join(options)


def policy_words(entry: PlannedGrid) -> list[tuple[str, str]]:
    """Return the choices of a grid besides its sizes, name and value; policies by their names in the config."""

    def text(value: str | bool | int) -> str:
        return value if isinstance(value, str) else ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}"

    rows = {"micro-steps": entry["micro_steps"], "rows per place and micro-step": entry["rows"]}
    return [(name, text(value)) for name, value in {**entry["policy"], **rows}.items()]


def link(document: PlanDocument, entry: PlannedGrid, axis: str) -> dict[str, Any]:
    """Return how the ranks of an axis lie on the nodes, and how long its rings are on the links."""
    shape = Shape(**entry["grid"], order=entry["order"])
    stride, _ = shape.strides(axis)[0]
    size = shape.group_sizes[axis]
    where = whereabouts(stride, size, document["devices"], document["machine"]["devices_per_node"])
    speed = entry.get("bandwidth", {}).get(axis)
    exposed, seconds = (entry[name].get(axis, 0.0) for name in ("exposed_seconds", "link_seconds"))
    apart = "neighbours" if stride == 1 else f"{stride:,} apart"
    return {
        "stride": stride,
        "short": f"{where}{f', {count(speed)}B/s' if speed else ''}",
        "text": f"{size} ranks, {apart}; {duration(exposed)} exposed of {duration(seconds)} on the link",
    }


def whereabouts(stride: int, size: int, devices: int, per_node: int) -> str:
    """Return whether all groups of an axis stay inside nodes, or none, or some."""
    if stride >= per_node:
        return "crosses nodes"
    # After at most `per_node` blocks, the first members of groups are at the same offsets inside a node again.
    blocks = min(devices // (stride * size), per_node)
    firsts = [block * stride * size + inside for block in range(blocks) for inside in range(stride)]
    crossing = [first for first in firsts if first // per_node != (first + stride * (size - 1)) // per_node]
    return "crosses nodes" if len(crossing) == len(firsts) else "some cross nodes" if crossing else "inside a node"


def plan_figures(document: PlanDocument) -> dict[str, Figure]:
    """Return the figures by name; without a timeline if the plan has none."""
    made = {"tradeoff": _tradeoff(document), "parts": _parts(document["grids"][:BARS])}
    return made | ({"timeline": _timeline(document["timeline"])} if document["timeline"] else {})


def _tradeoff(document: PlanDocument) -> Figure:
    """Draw every grid as a point, seconds against memory. The last trace is a ring around the selected grid."""
    grids, estimated = document["grids"], document.get("estimated", [])
    legend = ("compute", "host", *WAITED_FOR)  # the order of the legend; anything else comes last
    bounds = sorted(
        {entry["bound_by"] for entry in grids},
        key=lambda bound: (legend.index(bound) if bound in legend else len(legend), bound),
    )
    traces = []
    for bound in bounds:
        chosen = {place: entry for place, entry in enumerate(grids) if entry["bound_by"] == bound}
        more = {"text": [_hover(entry) for entry in chosen.values()], "hoverinfo": "text", "customdata": list(chosen)}
        marker = {"color": colour(bound), "size": 8, "opacity": 0.85}
        traces.append(_points(f"bound by {escape(bound)}", list(chosen.values()), marker, type="scattergl", **more))
    if estimated:  # grids that were estimated to be slower and not simulated; without `customdata` none can be selected
        text = [
            f"<b>{grid_name(entry['grid'])}</b><br>about {duration(entry['seconds'])}, not simulated"
            for entry in estimated
        ]
        marker = {"color": "var(--muted)", "size": 6, "symbol": "circle-open"}
        traces.append(_points("estimated only", estimated, marker, type="scattergl", text=text, hoverinfo="text"))
    line = {"color": "var(--muted)", "width": 1.5, "dash": "dot", "shape": "hv"}
    traces.append(_points("Pareto front", _front(grids), {}, mode="lines", line=line))
    star = {"symbol": "star", "size": 17, "color": "var(--accent)", "line": {"color": "var(--card)", "width": 1.5}}
    traces.append(_points("best", grids[:1], star, type="scattergl"))  # so that it is drawn over the points
    ring = {"symbol": "circle-open", "size": 17, "color": "var(--text)", "line": {"width": 2}}
    traces.append(_points("selected", grids[:1], ring))
    usable = document["machine"]["usable_bytes"] / GIB
    most = max(usable, *(entry["peak_bytes"] / GIB for entry in (*grids, *estimated)))
    seconds = [entry["seconds"] for entry in (*grids, *estimated)]
    # On a linear scale, seconds that differ by orders of magnitude would put all good grids at the left edge.
    # With a format plotly writes 200 at the tick of 200; without one, a small 2.
    log = {"type": "log", "dtick": "D2", "tickformat": ",~r"} if max(seconds) > 8 * min(seconds) else {}
    limit = {"color": "var(--accent)", "width": 1.5, "dash": "dash"}
    font = {"color": "var(--accent)", "size": 12}
    corner = {"xref": "paper", "x": 1, "xanchor": "right", "y": usable, "yanchor": "bottom"}
    layout = plot_layout(
        460,
        xaxis=plot_axis(title={"text": "seconds per step", "standoff": 6}, **log),
        yaxis=plot_axis(range=[0, 1.1 * most], ticksuffix=" GiB"),
        hovermode="closest",
        shapes=[{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": usable, "y1": usable, "line": limit}],
        annotations=[{"text": f"usable: {nbytes(usable * GIB)}", "showarrow": False, "font": font, **corner}],
    )
    layout["hoverlabel"]["align"] = "left"  # several lines of text, which plotly would centre
    return {"traces": traces, "layout": layout}


def _points(name: str, grids: list[PlannedGrid], marker: Figure, **more: Any) -> Figure:
    """Return a trace of grids, seconds against memory. It does not react to the pointer unless `more` says so."""
    x, y = [entry["seconds"] for entry in grids], [entry["peak_bytes"] / GIB for entry in grids]
    quiet = {"type": "scatter", "mode": "markers", "hoverinfo": "skip"}
    return {**quiet, "name": name, "x": x, "y": y, "marker": marker, **more}


def _front(grids: list[PlannedGrid]) -> list[PlannedGrid]:
    """Return the grids that no other grid beats in both seconds and memory, fastest first."""
    kept: list[PlannedGrid] = []
    for entry in sorted(grids, key=lambda entry: (entry["seconds"], entry["peak_bytes"])):
        if not kept or entry["peak_bytes"] < kept[-1]["peak_bytes"]:
            kept.append(entry)
    return kept


def _hover(entry: PlannedGrid) -> str:
    policy = ", ".join(f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in policy_words(entry))
    links = [
        f"{axis}: {duration(entry['exposed_seconds'].get(axis, 0.0))} exposed of {duration(seconds)}"
        for axis, seconds in entry["link_seconds"].items()
    ]
    lines = [
        f"<b>{entry['rank']}. {grid_name(entry['grid'])}</b> (order {order_name(entry)})",
        f"{duration(entry['seconds'])} per step, {count(entry['tokens_per_second'])} tokens/s, "
        f"MFU {percent(entry['mfu'])}, HFU {percent(entry['hfu'])}",
        f"compute {duration(entry['compute_seconds'])}, peak {nbytes(entry['peak_bytes'])}",
        *links,
    ]
    for text in (policy, entry["reason"]):
        # plotly does not wrap text. Lines break only at blanks, so that escaped characters stay whole.
        lines += textwrap.wrap(escape(text), 50, break_long_words=False, break_on_hyphens=False)
    return "<br>".join(lines)


def _parts(grids: list[PlannedGrid]) -> Figure:
    """Draw the step of each grid as one bar: computation, the exposed time over each axis, then what remains."""
    axes = [axis for axis in WAITED_FOR if any(axis in entry["exposed_seconds"] for entry in grids)]
    parts = {"compute": ("compute", [entry["compute_seconds"] for entry in grids])}
    for axis in axes:
        parts[axis] = f"exposed over {axis}", [entry["exposed_seconds"].get(axis, 0.0) for entry in grids]
    hosts = [entry.get("host_seconds", 0.0) for entry in grids]
    if any(hosts):
        parts["host"] = "waiting for the host", hosts
    known = [sum(values) for values in zip(*(values for _, values in parts.values()), strict=True)]
    rest = [max(0.0, entry["seconds"] - seconds) for entry, seconds in zip(grids, known, strict=True)]
    # The parts add up to the step only up to rounding; a remainder below a thousandth gets no name in the legend.
    if any(left > 0.001 * entry["seconds"] for left, entry in zip(rest, grids, strict=True)):
        parts["other"] = "other", rest
    places, rows = list(range(len(grids))), [grid_name(entry["grid"]) for entry in grids]
    traces = []
    for part, (name, values) in parts.items():
        text = [f"{row}<br>{name}: {duration(value)}" for row, value in zip(rows, values, strict=True)]
        more = {"customdata": places, "text": text, "textposition": "none"}
        traces.append(
            page.bars(name, values, places, "var(--faint)" if part == "other" else colour(part), "%{text}", **more)
        )
    names = plot_axis(
        zeroline=False, tickvals=places, ticktext=rows, range=[len(grids) - 0.4, -0.6], fixedrange=True, showgrid=False
    )
    seconds = plot_axis(ticksuffix=" s", rangemode="tozero", fixedrange=True)
    layout = plot_layout(
        110 + 25 * len(grids), yaxis=names, xaxis=seconds, barmode="stack", bargap=0.3, hovermode="closest"
    )
    layout["margin"].update(t=40)
    layout["legend"]["traceorder"] = "normal"  # plotly would reverse the order for stacked bars
    return {"traces": traces, "layout": layout}


def _timeline(events: list[Mapping[str, Any]]) -> Figure:
    """Draw the work of the device and the messages of each axis over time, a track for each."""
    tracks = ["compute", *(axis for axis in WAITED_FOR if any(event["track"] == axis for event in events))]
    traces = []
    for track, phase in product(tracks, PHASES):
        found = [event for event in events if event["track"] == track and event["phase"] == phase]
        if found:
            traces.append(_track(track, phase, found))
    layout = plot_layout(
        90 + 44 * len(tracks),
        yaxis=plot_axis(
            type="category", categoryarray=tracks[::-1], categoryorder="array", fixedrange=True, showgrid=False
        ),
        xaxis=plot_axis(tickformat="~s", ticksuffix="s", range=[0, 1.01 * max(event["end"] for event in events)]),
        barmode="overlay",
        bargap=0.25,
        hovermode="closest",
        dragmode="zoom",
        uniformtext={"mode": "hide", "minsize": 9},  # a label that does not fit into its bar is hidden
    )
    layout["margin"].update(t=36)
    return {"traces": traces, "layout": layout}


def _track(track: str, phase: str, events: list[Mapping[str, Any]]) -> Figure:
    shade = PHASES[phase] if track == "compute" else colour(track)
    seconds = [event["end"] - event["start"] for event in events]
    inside = {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0, "constraintext": "inside"}
    return page.bars(
        phase,
        seconds,
        [track] * len(events),
        shade,
        f"<b>%{{text}}</b><br>{track}, {phase}<br>from %{{customdata[0]}}, for %{{customdata[1]}}",
        base=[event["start"] for event in events],
        text=[escape(event["label"]) for event in events],
        customdata=[
            [duration(event["start"]), duration(length)] for event, length in zip(events, seconds, strict=True)
        ],
        showlegend=track == "compute",
        marker={"color": shade, "line": {"color": "var(--card)", "width": 0.7}},
        **inside,
    )

"""The figures of a plan's page, as plain data for plotly.js: trade-offs, parts of a step, the timeline;
and how the axes of a grid lie on the nodes of its machine.

As in figures.py nothing here draws, colours are names of the style sheet, every value is JSON, and text from the
document is escaped, as plotly reads tags in text.
"""

from __future__ import annotations

from html import escape
from math import prod
from typing import Any

from fourfold.axes import AXES
from fourfold.report.figures import Figure, colour, plot_axis, plot_layout
from fourfold.report.plan_text import Document, Entry, grid_name, order_name
from fourfold.report.units import count, duration, nbytes, percent

GIB = 1 << 30
BARS = 20
"""Grids whose step is broken down, from the best on."""

PHASES = {"forward": "var(--compute)", "backward": "var(--strong)", "optimizer": "var(--accent)"}
"""Shade of what the device computes, by phase of the step."""


def plan_figures(document: Document) -> dict[str, Figure]:
    """By name, only those that the plan has data for."""
    made = {
        "tradeoff": _tradeoff(document) if document["grids"] else None,
        "parts": _parts(document["grids"][:BARS]) if document["grids"] else None,
        "timeline": _timeline(document["timeline"]) if document["timeline"] else None,
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def shade(bound: str) -> str:
    return "var(--compute)" if bound == "compute" else colour(bound)


def _tradeoff(document: Document) -> Figure:
    """Every grid a point: seconds to the right, memory upwards. The last trace rings the one that is selected."""
    grids = document["grids"]
    bounds = sorted({entry["bound_by"] for entry in grids}, key=lambda bound: (_place(bound), bound))
    traces = [_points(grids, bound) for bound in bounds]
    if document.get("estimated"):
        traces.append(_estimated(document["estimated"]))
    front = _front(grids)
    line = {"color": "var(--muted)", "width": 1.5, "dash": "dot", "shape": "hv"}
    traces.append(_over("lines", "least memory for its time", front, line=line))
    star = {"symbol": "star", "size": 17, "color": "var(--accent)", "line": {"color": "var(--card)", "width": 1.5}}
    traces.append({**_over("markers", "best", grids[:1], marker=star), "type": "scattergl"})  # above the points
    ring = {"symbol": "circle-open", "size": 17, "color": "var(--text)", "line": {"width": 2}}
    traces.append(_over("markers", "selected", grids[:1], marker=ring))
    usable = document["machine"]["usable_bytes"] / GIB
    every = [*grids, *document.get("estimated", [])]
    most = max(usable, *(entry["peak_bytes"] / GIB for entry in every))
    seconds = [entry["seconds"] for entry in every]
    # seconds that differ by orders of magnitude would press the best ones into the left edge
    log = {"type": "log", "dtick": "D2"} if max(seconds) > 8 * min(seconds) else {}
    layout = plot_layout(
        460,
        xaxis=plot_axis(title={"text": "seconds a step", "standoff": 6}, **log),
        yaxis=plot_axis(range=[0, 1.1 * most], ticksuffix=" GiB"),
        hovermode="closest",
        shapes=[_level(usable)],
        annotations=[_level_name(usable)],
    )
    layout["hoverlabel"]["align"] = "left"
    return {"traces": traces, "layout": layout}


def _place(bound: str) -> int:
    return AXES.index(bound) + 1 if bound in AXES else 0 if bound == "compute" else len(AXES) + 1


def _points(grids: list[Entry], bound: str) -> Figure:
    places = [place for place, entry in enumerate(grids) if entry["bound_by"] == bound]
    return {
        "type": "scattergl",
        "mode": "markers",
        "name": f"bound by {escape(bound)}",
        "x": [grids[place]["seconds"] for place in places],
        "y": [grids[place]["peak_bytes"] / GIB for place in places],
        "customdata": places,
        "text": [_hover(grids[place]) for place in places],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": shade(bound), "size": 8, "opacity": 0.85},
    }


def _estimated(grids: list[Entry]) -> Figure:
    """Grids that seemed slower and were not simulated; they cannot be selected."""
    about = [f"about {duration(entry['seconds'])}, not simulated" for entry in grids]
    text = [f"<b>{grid_name(entry['grid'])}</b><br>{words}" for entry, words in zip(grids, about, strict=True)]
    marker = {"color": "var(--muted)", "size": 6, "symbol": "circle-open"}
    return {
        **_over("markers", "estimated only", grids, marker=marker),
        "type": "scattergl",
        "text": text,
        "hoverinfo": "text",
        "customdata": [None] * len(grids),
    }


def _over(mode: str, name: str, grids: list[Entry], **more: Any) -> Figure:
    """Drawn over the points, which alone answer to the pointer."""
    x, y = [entry["seconds"] for entry in grids], [entry["peak_bytes"] / GIB for entry in grids]
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "hoverinfo": "skip", **more}


def _front(grids: list[Entry]) -> list[Entry]:
    """Those that no other grid beats in both seconds and memory, fastest first."""
    kept: list[Entry] = []
    for entry in sorted(grids, key=lambda entry: (entry["seconds"], entry["peak_bytes"])):
        if not kept or entry["peak_bytes"] < kept[-1]["peak_bytes"]:
            kept.append(entry)
    return kept


def _level(height: float) -> Figure:
    line = {"color": "var(--accent)", "width": 1.5, "dash": "dash"}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": height, "y1": height, "line": line}


def _level_name(height: float) -> Figure:
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": height, "yanchor": "bottom"}
    font = {"color": "var(--accent)", "size": 12}
    return {"text": f"usable: {nbytes(height * GIB)}", "showarrow": False, "font": font, **place}


def _hover(entry: Entry) -> str:
    policy = ", ".join(f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in policy_words(entry))
    links = "<br>".join(
        f"{axis}: {duration(entry['exposed_seconds'].get(axis, 0.0))} exposed of {duration(seconds)}"
        for axis, seconds in entry["link_seconds"].items()
    )
    lines = [
        f"<b>{entry['rank']}. {grid_name(entry['grid'])}</b> (order {order_name(entry)})",
        f"{duration(entry['seconds'])} a step, {count(entry['tokens_per_second'])} tokens/s, "
        f"MFU {percent(entry['mfu'])}, HFU {percent(entry['hfu'])}",
        f"compute {duration(entry['compute_seconds'])}, peak {nbytes(entry['peak_bytes'])}",
        links,
        *_folded(escape(policy)),
        *_folded(escape(entry["reason"])),
    ]
    return "<br>".join(line for line in lines if line)


def _folded(text: str, width: int = 50) -> list[str]:
    """Lines for plotly, which wraps none; an escaped character stays whole, as only blanks break."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _parts(grids: list[Entry]) -> Figure:
    """The step of each grid as one bar: computing, then what is exposed over each axis, then the rest."""
    axes = [axis for axis in AXES if any(axis in entry["exposed_seconds"] for entry in grids)]
    parts = {"compute": [entry["compute_seconds"] for entry in grids]}
    parts |= {f"exposed over {axis}": [entry["exposed_seconds"].get(axis, 0.0) for entry in grids] for axis in axes}
    rest = [
        max(0.0, entry["seconds"] - sum(values))
        for entry, values in zip(grids, zip(*parts.values(), strict=True), strict=True)
    ]
    if any(left > 0.001 * entry["seconds"] for left, entry in zip(rest, grids, strict=True)):
        parts["other"] = rest
    shades = ["var(--compute)", *map(colour, axes), "var(--faint)"]
    places, rows = list(range(len(grids))), [grid_name(entry["grid"]) for entry in grids]
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": values,
            "y": places,
            "customdata": places,
            "text": [f"{row}<br>{name}: {duration(value)}" for row, value in zip(rows, values, strict=True)],
            "textposition": "none",
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"color": colour_of, "line": {"width": 0}},
        }
        for (name, values), colour_of in zip(parts.items(), shades, strict=False)
    ]
    names = plot_axis(
        zeroline=False, tickvals=places, ticktext=rows, range=[len(grids) - 0.4, -0.6], fixedrange=True, showgrid=False
    )
    seconds = plot_axis(ticksuffix=" s", rangemode="tozero", fixedrange=True)
    layout = plot_layout(
        110 + 25 * len(grids), yaxis=names, xaxis=seconds, barmode="stack", bargap=0.3, hovermode="closest"
    )
    layout["margin"].update(t=40)
    layout["legend"]["traceorder"] = "normal"
    return {"traces": traces, "layout": layout}


def _timeline(events: list[Entry]) -> Figure:
    """What runs when: a track for the device and one for each axis."""
    tracks = ["compute", *(axis for axis in AXES if any(event["track"] == axis for event in events))]
    traces = []
    for track in tracks:
        for phase in PHASES:
            found = [event for event in events if event["track"] == track and event["phase"] == phase]
            if found:
                traces.append(_track(track, phase, found))
    names = plot_axis(
        type="category", categoryarray=tracks[::-1], categoryorder="array", fixedrange=True, showgrid=False
    )
    layout = plot_layout(
        90 + 44 * len(tracks),
        yaxis=names,
        xaxis=plot_axis(tickformat="~s", ticksuffix="s", range=[0, 1.01 * max(event["end"] for event in events)]),
        barmode="overlay",
        bargap=0.25,
        hovermode="closest",
        dragmode="zoom",
        uniformtext={"mode": "hide", "minsize": 9},
    )
    layout["margin"].update(t=36)
    return {"traces": traces, "layout": layout}


def _track(track: str, phase: str, events: list[Entry]) -> Figure:
    computes = track == "compute"
    return {
        "type": "bar",
        "orientation": "h",
        "name": phase,
        "showlegend": computes,
        "y": [track] * len(events),
        "base": [event["start"] for event in events],
        "x": [event["end"] - event["start"] for event in events],
        "text": [escape(event["label"]) for event in events],
        "customdata": [[duration(event["start"]), duration(event["end"] - event["start"])] for event in events],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "constraintext": "inside",
        "hovertemplate": f"<b>%{{text}}</b><br>{track}, {phase}<br>from %{{customdata[0]}}, for %{{customdata[1]}}"
        "<extra></extra>",
        "marker": {
            "color": PHASES[phase] if computes else colour(track),
            "line": {"color": "var(--card)", "width": 0.7},
        },
    }


def policy_words(entry: Entry) -> list[tuple[str, str]]:
    """The choices of a grid beside its sizes, name and value."""
    policy = entry["policy"]
    yes = {True: "yes", False: "no"}
    return [
        ("activations", policy["activations"]),
        ("recompute", policy["recompute"]),
        ("keep gathered inputs", yes[policy["keep_gathered"]]),
        ("keep gathered weights", yes[policy["keep_weights"]]),
        ("shard optimizer", yes[policy["shard_optimizer"]]),
        ("loss chunk", f"{policy['loss_chunk']:,} tokens" if policy["loss_chunk"] else "none"),
        ("halves", str(policy["halves"])),
        ("micro-steps", f"{entry['micro_steps']:,}"),
        ("rows a micro-step and place", f"{entry['rows']:,}"),
    ]


def link(document: Document, entry: Entry, axis: str) -> dict[str, Any]:
    """How an axis lies on the nodes, and what its rings take."""
    place, size = entry["order"].index(axis), entry["grid"][axis]
    stride = prod(entry["grid"][faster] for faster in entry["order"][:place])
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
    """Whether the groups of an axis stay inside nodes: all of them, none, or some."""
    if stride >= per_node:
        return "crosses nodes"
    # the first members of groups repeat in their place inside a node after at most `per_node` blocks
    firsts = [
        block * stride * size + inside
        for block in range(min(devices // (stride * size), per_node))
        for inside in range(stride)
    ]
    crossing = [first for first in firsts if first // per_node != (first + stride * (size - 1)) // per_node]
    return "crosses nodes" if len(crossing) == len(firsts) else "some cross nodes" if crossing else "inside a node"

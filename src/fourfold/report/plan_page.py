"""The page of a plan: one self-contained HTML file with the answer, what it was chosen from, and why.

The answer is in the HTML itself; plan_page.js adds the panels that follow the grid that the reader selects. All numbers
are written out here (`view`), so that the script formats none and both say the same. Text from the document is escaped
here, or inserted as text there.
"""

from __future__ import annotations

import json
from html import escape
from math import prod
from pathlib import Path
from shlex import quote
from typing import Any

from fourfold.axes import AXES
from fourfold.grid import Shape
from fourfold.report.page import (
    CUTS,
    POLICY,
    Figure,
    card,
    colour,
    frame,
    header,
    hint,
    plot,
    plot_axis,
    plot_layout,
    plotly_js,
    section,
    write_page,
)
from fourfold.report.plan_text import (
    PlanDocument,
    PlannedGrid,
    asked_pair,
    command,
    grid_name,
    named_policies,
    order_name,
    plan_table,
    reasons_it_wins,
    searched,
    why_title,
)
from fourfold.report.units import DASH, count, duration, nbytes, percent

PLAN_POLICY = POLICY.replace("script-src 'unsafe-inline'", "script-src 'unsafe-inline' 'unsafe-eval'")
"""The policy of a report plus eval: plotly compiles the drawing code of `scattergl` on the page. Nothing is loaded."""

CHOSEN = {"grid": "order", "batch": "micro_steps"}
"""Section and key of the config that a grid chooses besides its sizes and its policy."""

HEADS = ["#", "grid", "order", "policy", "micro", "step", "tokens/s", "MFU", "HFU", "peak", "exposed"]

GIB = 1 << 30
BARS = 20
"""The number of grids with a bar for the parts of their step, from the best on."""

PHASES = {"forward": "var(--compute)", "backward": "var(--strong)", "optimizer": "var(--accent)"}
"""Shade of what the device computes, by phase of the step."""


def write_plan_page(document: PlanDocument, path: Path) -> Path:
    """Write the page of a plan to `path`, completely or not at all; return the path."""
    return write_page(Path(path), plan_page(document, plotly_js()), example="plan.html")


def plan_page(document: PlanDocument, plotly_js: str) -> str:
    """Return the HTML of the page."""
    figures = plan_figures(document)
    data = {
        "figures": figures,
        "grids": [view(document, entry) for entry in document["grids"]],
        # All axes, also those of size 1, so that a filter finds y=1.
        "refused": [
            [" ".join(f"{axis}={size}" for axis, size in Shape(**entry["grid"]).sizes.items()), entry["reason"]]
            for entry in document["refused"]
        ],
        "heads": HEADS,
        "perNode": document["machine"]["devices_per_node"],
        "devices": document["devices"],
        "cuts": CUTS,
        "command": command(document),
    }
    model, machine = document["model"], document["machine"]
    facts = [
        f"{count(model['parameters'])} parameters",
        f"{machine['device']}, {machine['devices_per_node']} per node",
        f"{count(document['batch_tokens'])} tokens per step in sequences of {document['seq']:,}",
        f"searched: {searched(document)}",
    ]
    title = f"Plan of {model['name']} on {document['devices']:,} devices"
    body = "\n".join(
        [
            header("Plan", model["name"], f"{document['devices']:,} devices of {machine['name']}", facts),
            _answer(document),
            _panels(document, figures) if document["grids"] else "",
            _refused(document),
            _assumptions(document),
        ]
    )
    return frame(title, body, data, plotly_js, script="plan_page.js", styles="plan_page.css", policy=PLAN_POLICY)


def _answer(document: PlanDocument) -> str:
    if not document["grids"]:
        return (
            '<p class="note">No grid fits; the reasons are below. A device needs less memory with more devices, more '
            "micro-steps or a smaller batch. Model sizes with more divisors allow more grids.</p>"
        )
    best = document["grids"][0]
    shown = "".join(card(*one) for one in cards(document, best))
    policy = "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in policy_words(best))
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons_it_wins(document))
    file = f"{document['model']['name']}.toml"
    return (
        f'<section class="answer"><h2>The fastest grid</h2><p class="winner">{_axes(best)}</p>'
        f"{hint(f'Rank order, fastest axis first: {order_name(best)}.')}"
        f'<dl class="cards">{shown}</dl><div class="pair"><div><ul class="why">{why}</ul>'
        f'<ul class="policy">{policy}</ul>{_copyable("Run it", "command", _words(command(document)))}</div>'
        f"{_copyable(file, 'config', escape(document['config_toml']))}</div></section>"
        f"<noscript><p class='note'>The figures and panels need JavaScript; this table does not.</p>"
        f"<pre>{escape(plan_table(document, 20, colour=False))}</pre></noscript>{_asked(document)}"
    )


def _axes(entry: PlannedGrid) -> str:
    """Return the grid in the colours of its axes."""
    parts = [
        f'<span style="--axis:{colour(axis)}">{axis}={size}</span>' for axis, size in entry["grid"].items() if size > 1
    ]
    return " ".join(parts) or "one device"


def _copyable(title: str, name: str, body: str) -> str:
    button = f'<button type="button" data-copy="{name}">copy</button>'
    return f'<div class="copyable"><h2>{escape(title)}{button}</h2><pre id="{name}">{body}</pre></div>'


def _words(text: str) -> str:
    """Return a command line that may be broken at blanks but not at the hyphens of its options."""
    return " ".join(f"<span>{escape(word)}</span>" for word in text.split(" "))


def _asked(document: PlanDocument) -> str:
    """Return the answer to `--why`."""
    asked = document["why"]
    if asked is None:
        return ""
    rows = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for place, row in enumerate(asked_pair(document))
        for tag in ["td" if place else "th"]
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    table = f'<div class="scroll tall"><table class="compare"><tbody>{body}</tbody></table></div>' if rows else ""
    lines = "".join(f"<li>{escape(line)}</li>" for line in asked["lines"])
    return section(why_title(asked), f'{table}<ul class="why">{lines}</ul>')


def _panels(document: PlanDocument, figures: dict[str, Any]) -> str:
    """Return the panels that plan_page.js fills."""
    best = grid_name(document["grids"][0]["grid"])
    all_grids = "Each point is a grid with its best configuration. Select one, and all panels show it."
    best_grids = "Computation and exposed communication of the best grids. A grid can be selected here too."
    timeline = f"A few layers of {best}. Drag to zoom, double-click to see everything."
    return "\n".join(
        [
            '<div id="selected" aria-live="polite"></div>',
            section("All grids", _figure("tradeoff", all_grids, figures)),
            section("Parts of a step", _figure("parts", best_grids, figures)),
            section("The selected grid", '<div id="chosen"></div>'),
            section("Memory per device", '<div id="memory"></div>'),
            section("The grid on its nodes and links", '<div id="nodes"></div>'),
            section("Timeline of a step", '<p class="hint" id="other"></p>' + _figure("timeline", timeline, figures)),
            section("Ranking", '<div id="ranking"></div>'),
        ]
    )


def _figure(name: str, caption: str, figures: dict[str, Figure]) -> str:
    return hint(caption) + plot(name, figures[name]) if name in figures else hint("The plan has no timeline.")


def _refused(document: PlanDocument) -> str:
    if not document["refused"]:
        return ""
    shown = "" if document["grids"] else " open"
    title = f"Refused grids ({len(document['refused']):,}) and the reasons"
    return f'<details{shown}><summary>{title}</summary><div id="refused"></div></details>'


def _assumptions(document: PlanDocument) -> str:
    about = document["machine"]["about"]
    lines = [*([about] if about else []), *document["assumptions"]]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return section("What the plan assumes", f'<ul class="why">{items}</ul>') if items else ""


def view(document: PlanDocument, entry: PlannedGrid) -> dict[str, Any]:
    """Return what the panels show of a grid when it is selected."""
    best, usable = document["grids"][0], document["machine"]["usable_bytes"]
    more = percent(entry["seconds"] / best["seconds"] - 1)
    return {
        "name": grid_name(entry["grid"]),
        "rank": entry["rank"],
        "at": [entry["seconds"], entry["peak_bytes"] / GIB],
        "cards": cards(document, entry),
        "against": "the best" if entry is best else f"{more} slower than the best",
        "reason": entry["reason"],
        "policy": policy_words(entry),
        "memory": [
            [kind.replace("_", " "), size / usable, nbytes(size)] for kind, size in entry["memory_bytes"].items()
        ],
        "peak": entry["peak_bytes"] / usable,
        "sizes": entry["grid"],
        "order": entry["order"],
        "links": {axis: link(document, entry, axis) for axis, size in entry["grid"].items() if size > 1},
        "changes": _changes(entry, best),
        "cells": _cells(entry),
    }


def cards(document: PlanDocument, entry: PlannedGrid) -> list[tuple[str, str, str]]:
    """Return the key figures of a grid: label, value, detail."""
    exposed, usable = sum(entry["exposed_seconds"].values()), document["machine"]["usable_bytes"]
    return [
        ("Step", duration(entry["seconds"]), f"{duration(entry['compute_seconds'])} of computation"),
        ("Tokens per second", count(entry["tokens_per_second"]), "all devices"),
        ("MFU", percent(entry["mfu"]), f"of {count(document['machine']['peak_flops'])}FLOP/s per device"),
        ("HFU", percent(entry["hfu"]), "counts recomputed work too"),
        ("Exposed", duration(exposed), f"{percent(exposed / entry['seconds'])} of the step"),
        ("Peak memory", nbytes(entry["peak_bytes"]), f"{percent(entry['peak_bytes'] / usable)} of {nbytes(usable)}"),
    ]


def _changes(entry: PlannedGrid, best: PlannedGrid) -> str:
    """Return the options that turn the config of the best grid into the config of this one."""
    if entry is best:
        return ""
    sizes = ",".join(f"{axis}={size}" for axis, size in entry["grid"].items() if size > 1) or "data=1"
    settings = {f"{table}.{name}": (entry[name], best[name]) for table, name in CHOSEN.items()}
    for name, value in entry["policy"].items():
        table = "overlap" if name == "halves" else "policy"  # where the config has it
        settings[f"{table}.{name}"] = value, best["policy"][name]
    changed = {name: value for name, (value, other) in settings.items() if value != other}
    # As --set reads them: text may be bare, everything else is written as in JSON.
    written = [
        f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for name, value in changed.items()
    ]
    options = [f"--set {quote(text)}" for text in written]
    return " ".join([f"--grid {sizes}", *options])


def _cells(entry: PlannedGrid) -> list[str]:
    exposed = ", ".join(f"{axis} {duration(value)}" for axis, value in entry["exposed_seconds"].items())
    return [
        str(entry["rank"]),
        grid_name(entry["grid"]),
        order_name(entry),
        ", ".join(entry["policy"][name] for name in named_policies(entry)),
        str(entry["micro_steps"]),
        duration(entry["seconds"]),
        count(entry["tokens_per_second"]),
        percent(entry["mfu"]),
        percent(entry["hfu"]),
        nbytes(entry["peak_bytes"]),
        exposed or DASH,
    ]


def policy_words(entry: PlannedGrid) -> list[tuple[str, str]]:
    """Return the choices of a grid besides its sizes, name and value; policies by their names in the config."""

    def text(value: str | bool | int) -> str:
        return value if isinstance(value, str) else ("no", "yes")[value] if isinstance(value, bool) else f"{value:,}"

    policies = [(name, text(value)) for name, value in entry["policy"].items()]
    return [
        *policies,
        ("micro-steps", text(entry["micro_steps"])),
        ("rows per place and micro-step", text(entry["rows"])),
    ]


def link(document: PlanDocument, entry: PlannedGrid, axis: str) -> dict[str, Any]:
    """Return how the ranks of an axis lie on the nodes, and how long its rings are on the links."""
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
    """Return whether all groups of an axis stay inside nodes, or none, or some."""
    if stride >= per_node:
        return "crosses nodes"
    # After `per_node` blocks at most, the first members of groups are at the same offsets inside a node again.
    firsts = [
        block * stride * size + inside
        for block in range(min(devices // (stride * size), per_node))
        for inside in range(stride)
    ]
    crossing = [first for first in firsts if first // per_node != (first + stride * (size - 1)) // per_node]
    return "crosses nodes" if len(crossing) == len(firsts) else "some cross nodes" if crossing else "inside a node"


def plan_figures(document: PlanDocument) -> dict[str, Figure]:
    """Return the figures by name, without those that the plan has no data for."""
    made = {
        "tradeoff": _tradeoff(document) if document["grids"] else None,
        "parts": _parts(document["grids"][:BARS]) if document["grids"] else None,
        "timeline": _timeline(document["timeline"]) if document["timeline"] else None,
    }
    return {name: figure for name, figure in made.items() if figure is not None}


def _tradeoff(document: PlanDocument) -> Figure:
    """Draw every grid as a point, seconds against memory. The last trace is a ring around the selected grid."""
    grids = document["grids"]
    known = ("compute", *AXES)  # the order of the legend; anything else comes last
    bounds = sorted(
        {entry["bound_by"] for entry in grids},
        key=lambda bound: (known.index(bound) if bound in known else len(known), bound),
    )
    traces = [_points(grids, bound) for bound in bounds]
    if document.get("estimated"):
        traces.append(_estimated(document["estimated"]))
    front = _front(grids)
    line = {"color": "var(--muted)", "width": 1.5, "dash": "dot", "shape": "hv"}
    traces.append(_over("lines", "Pareto front", front, line=line))
    star = {"symbol": "star", "size": 17, "color": "var(--accent)", "line": {"color": "var(--card)", "width": 1.5}}
    traces.append({**_over("markers", "best", grids[:1], marker=star), "type": "scattergl"})  # drawn over the points
    ring = {"symbol": "circle-open", "size": 17, "color": "var(--text)", "line": {"width": 2}}
    traces.append(_over("markers", "selected", grids[:1], marker=ring))
    usable = document["machine"]["usable_bytes"] / GIB
    every = [*grids, *document.get("estimated", [])]
    most = max(usable, *(entry["peak_bytes"] / GIB for entry in every))
    seconds = [entry["seconds"] for entry in every]
    # On a linear scale, seconds that differ by orders of magnitude would put all good grids at the left edge.
    log = {"type": "log", "dtick": "D2"} if max(seconds) > 8 * min(seconds) else {}
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
    layout["hoverlabel"]["align"] = "left"
    return {"traces": traces, "layout": layout}


def _points(grids: list[PlannedGrid], bound: str) -> Figure:
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
        "marker": {"color": "var(--compute)" if bound == "compute" else colour(bound), "size": 8, "opacity": 0.85},
    }


def _estimated(grids: list[PlannedGrid]) -> Figure:
    """Draw grids that were estimated to be slower and not simulated; they cannot be selected."""
    text = [
        f"<b>{grid_name(entry['grid'])}</b><br>about {duration(entry['seconds'])}, not simulated" for entry in grids
    ]
    marker = {"color": "var(--muted)", "size": 6, "symbol": "circle-open"}
    return {
        **_over("markers", "estimated only", grids, marker=marker),
        "type": "scattergl",
        "text": text,
        "hoverinfo": "text",
        "customdata": [None] * len(grids),
    }


def _over(mode: str, name: str, grids: list[PlannedGrid], **more: Any) -> Figure:
    """Return a trace over the points, without labels of its own: only the points react to the pointer."""
    x, y = [entry["seconds"] for entry in grids], [entry["peak_bytes"] / GIB for entry in grids]
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "hoverinfo": "skip", **more}


def _front(grids: list[PlannedGrid]) -> list[PlannedGrid]:
    """Return the grids that no other grid beats in both seconds and memory, fastest first."""
    kept: list[PlannedGrid] = []
    for entry in sorted(grids, key=lambda entry: (entry["seconds"], entry["peak_bytes"])):
        if not kept or entry["peak_bytes"] < kept[-1]["peak_bytes"]:
            kept.append(entry)
    return kept


def _hover(entry: PlannedGrid) -> str:
    policy = ", ".join(f"{name} {value}".replace(" ", "\N{NO-BREAK SPACE}") for name, value in policy_words(entry))
    links = "<br>".join(
        f"{axis}: {duration(entry['exposed_seconds'].get(axis, 0.0))} exposed of {duration(seconds)}"
        for axis, seconds in entry["link_seconds"].items()
    )
    lines = [
        f"<b>{entry['rank']}. {grid_name(entry['grid'])}</b> (order {order_name(entry)})",
        f"{duration(entry['seconds'])} per step, {count(entry['tokens_per_second'])} tokens/s, "
        f"MFU {percent(entry['mfu'])}, HFU {percent(entry['hfu'])}",
        f"compute {duration(entry['compute_seconds'])}, peak {nbytes(entry['peak_bytes'])}",
        links,
        *_folded(escape(policy)),
        *_folded(escape(entry["reason"])),
    ]
    return "<br>".join(line for line in lines if line)


def _folded(text: str, width: int = 50) -> list[str]:
    """Break text into lines, which plotly does not do. Lines break only at blanks, so escaped characters stay whole."""
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def _parts(grids: list[PlannedGrid]) -> Figure:
    """Draw the step of each grid as one bar: computation, then what is exposed over each axis, then the rest."""
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


def _timeline(events: list[PlannedGrid]) -> Figure:
    """Draw what runs when: a track for the device and one for each axis."""
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


def _track(track: str, phase: str, events: list[PlannedGrid]) -> Figure:
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

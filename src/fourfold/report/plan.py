"""The page of a plan: one self-contained HTML file with the answer, what it was chosen from, and why.

The answer stands in the HTML itself; plan.js adds the panels that follow the grid which the reader selects. All
numbers are written out here (`view`), so that the script formats none and both say the same. Text from the document
is escaped here or set as text there.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from shlex import quote
from typing import Any

from fourfold.axes import AXES
from fourfold.report.html import POLICY, frame, plotly_js, section, write_page
from fourfold.report.plan_figures import GIB, link, plan_figures, policy_words
from fourfold.report.plan_text import (
    Document,
    Entry,
    asked_pair,
    command,
    grid_name,
    order_name,
    plan_table,
    reasons_it_wins,
    searched,
    why_title,
)
from fourfold.report.ranks import CUTS
from fourfold.report.summary import card
from fourfold.report.units import DASH, count, duration, nbytes, percent

PLAN_POLICY = POLICY.replace("script-src 'unsafe-inline'", "script-src 'unsafe-inline' 'unsafe-eval'")
"""As a report's: nothing is loaded. plotly compiles the drawing of `scattergl` on the page, hence eval."""

CHOSEN = {"grid": "order", "batch": "micro_steps"}
"""Section and key of what a grid chooses beside its sizes and its policy."""

HEADS = ["#", "grid", "order", "activations, recompute", "micro", "step", "tokens/s", "MFU", "HFU", "peak", "exposed"]


def write_plan_page(document: Document, path: Path) -> Path:
    """Write the page of a plan to `path`, whole or not at all; returns the path."""
    return write_page(Path(path), plan_page(document, plotly_js()), example="plan.html")


def plan_page(document: Document, plotly_js: str) -> str:
    """The HTML of the page."""
    figures = plan_figures(document)
    data = {
        "figures": figures,
        "grids": [view(document, entry) for entry in document["grids"]],
        "refused": [[_sizes(entry["grid"]), entry["reason"]] for entry in document["refused"]],
        "heads": HEADS,
        "perNode": document["machine"]["devices_per_node"],
        "devices": document["devices"],
        "cuts": CUTS,
        "command": command(document),
    }
    title = f"Plan of {document['model']['name']} on {document['devices']:,} devices"
    body = "\n".join(
        [
            _header(document),
            _answer(document),
            _panels(document, figures) if document["grids"] else "",
            _refused(document),
            _assumptions(document),
        ]
    )
    return frame(title, body, data, plotly_js, script="plan.js", styles="plan.css", policy=PLAN_POLICY)


def _header(document: Document) -> str:
    model, machine = document["model"], document["machine"]
    facts = [
        f"{count(model['parameters'])} parameters",
        f"{machine['device']}, {machine['devices_per_node']} a node",
        f"{count(document['batch_tokens'])} tokens a step in sequences of {document['seq']:,}",
        f"searched: {searched(document)}",
    ]
    shown = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    return (
        f'<header><p class="run">Plan</p><h1>{escape(model["name"])} <span>on {document["devices"]:,} devices of '
        f'{escape(machine["name"])}</span></h1><ul class="facts">{shown}</ul></header>'
    )


def _answer(document: Document) -> str:
    if not document["grids"]:
        return (
            '<p class="note">No grid fits; the reasons are below. More devices, more micro-steps or a smaller batch '
            "of rows need less memory; sizes that divide by more numbers allow more grids.</p>"
        )
    best = document["grids"][0]
    shown = "".join(card(*one, "") for one in cards(document, best))
    policy = "".join(f"<li>{escape(name)} <b>{escape(value)}</b></li>" for name, value in policy_words(best))
    why = "".join(f"<li>{escape(reason)}</li>" for reason in reasons_it_wins(document))
    file = f"{document['model']['name']}.toml"
    return (
        f'<section class="answer"><h2>The fastest grid</h2><p class="winner">{_axes(best)}</p>'
        f'<p class="hint">Rank order, fastest axis first: {escape(order_name(best))}.</p>'
        f'<dl class="cards">{shown}</dl><div class="pair"><div><ul class="why">{why}</ul>'
        f'<ul class="policy">{policy}</ul>{_copyable("Run it", "command", _words(command(document)))}</div>'
        f"{_copyable(file, 'config', escape(document['config_toml']))}</div></section>"
        f"<noscript><p class='note'>Figures and panels need JavaScript; this table does not.</p>"
        f"<pre>{escape(plan_table(document, 20, colour=False))}</pre></noscript>{_asked(document)}"
    )


def _axes(entry: Entry) -> str:
    """The grid in the colours of its axes."""
    parts = [
        f'<span style="--axis:var(--axis-{axis})">{axis}={size}</span>'
        for axis, size in entry["grid"].items()
        if size > 1
    ]
    return " ".join(parts) or "one device"


def _copyable(title: str, name: str, body: str) -> str:
    button = f'<button type="button" data-copy="{name}">copy</button>'
    return f'<div class="copyable"><h2>{escape(title)}{button}</h2><pre id="{name}">{body}</pre></div>'


def _words(text: str) -> str:
    """A command line that may be broken at blanks, but not at the hyphens of its options."""
    return " ".join(f"<span>{escape(word)}</span>" for word in text.split(" "))


def _asked(document: Document) -> str:
    """The question of `--why`, answered."""
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


def _panels(document: Document, figures: dict[str, Any]) -> str:
    """What plan.js fills."""
    best = grid_name(document["grids"][0]["grid"])
    all_hint = "Each point is a grid with its best configuration. Select one: all panels follow."
    best_hint = "The best grids, computing and waiting. Select one here too."
    hint = f"A few layers of {best}: drag to zoom, double-click for all of it."
    return "\n".join(
        [
            '<div id="selected" aria-live="polite"></div>',
            section("All grids", _figure("tradeoff", all_hint, figures)),
            section("What a step consists of", _figure("parts", best_hint, figures)),
            section("The selected grid", '<div id="chosen"></div>'),
            section("Memory of a device", '<div id="memory"></div>'),
            section("The grid on nodes and links", '<div id="nodes"></div>'),
            section("One step", '<p class="hint" id="other"></p>' + _figure("timeline", hint, figures)),
            section("Ranking", '<div id="ranking"></div>'),
        ]
    )


def _figure(name: str, hint: str, figures: dict[str, Any]) -> str:
    if name not in figures:
        return '<p class="hint">The plan holds no timeline.</p>'
    height = figures[name]["layout"]["height"]
    return f'<p class="hint">{escape(hint)}</p><div class="plot" id="{name}" style="height:{height}px"></div>'


def _refused(document: Document) -> str:
    if not document["refused"]:
        return ""
    shown = "" if document["grids"] else " open"
    title = f"Refused grids ({len(document['refused']):,}), with the reason"
    return f'<details{shown}><summary>{title}</summary><div id="refused"></div></details>'


def _assumptions(document: Document) -> str:
    about = document["machine"]["about"]
    lines = [*([about] if about else []), *document["assumptions"]]
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return section("What the plan assumes", f'<ul class="why">{items}</ul>') if items else ""


def view(document: Document, entry: Entry) -> dict[str, Any]:
    """What the panels say of a grid when it is selected."""
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


def cards(document: Document, entry: Entry) -> list[tuple[str, str, str]]:
    """The key figures of a grid: label, value, detail."""
    exposed, usable = sum(entry["exposed_seconds"].values()), document["machine"]["usable_bytes"]
    return [
        ("Step", duration(entry["seconds"]), f"{duration(entry['compute_seconds'])} of it computing"),
        ("Tokens per second", count(entry["tokens_per_second"]), "all devices"),
        ("MFU", percent(entry["mfu"]), f"of {count(document['machine']['peak_flops'])}FLOP/s a device"),
        ("HFU", percent(entry["hfu"]), "with what recompute runs again"),
        ("Exposed", duration(exposed), f"{percent(exposed / entry['seconds'])} of the step waits for links"),
        ("Peak memory", nbytes(entry["peak_bytes"]), f"{percent(entry['peak_bytes'] / usable)} of {nbytes(usable)}"),
    ]


def _changes(entry: Entry, best: Entry) -> str:
    """Options that turn the winner's config into this grid's."""
    if entry is best:
        return ""
    sizes = ",".join(f"{axis}={size}" for axis, size in entry["grid"].items() if size > 1) or "data=1"
    settings = {f"{section}.{name}": (entry[name], best[name]) for section, name in CHOSEN.items()}
    for name, value in entry["policy"].items():
        section = "overlap" if name == "halves" else "policy"
        settings[f"{section}.{name}"] = value, best["policy"][name]
    changed = {name: value for name, (value, other) in settings.items() if value != other}
    # as TOML has them: text may stand bare, the rest is written as in JSON
    written = [
        f"{name}={value if isinstance(value, str) else json.dumps(value, separators=(',', ':'))}"
        for name, value in changed.items()
    ]
    options = [f"--set {quote(text)}" for text in written]
    return " ".join([f"--grid {sizes}", *options])


def _cells(entry: Entry) -> list[str]:
    exposed = ", ".join(f"{axis} {duration(value)}" for axis, value in entry["exposed_seconds"].items())
    policy = entry["policy"]
    return [
        str(entry["rank"]),
        grid_name(entry["grid"]),
        order_name(entry),
        f"{policy['activations']}, {policy['recompute']}",
        str(entry["micro_steps"]),
        duration(entry["seconds"]),
        count(entry["tokens_per_second"]),
        percent(entry["mfu"]),
        percent(entry["hfu"]),
        nbytes(entry["peak_bytes"]),
        exposed or DASH,
    ]


def _sizes(grid: dict[str, int]) -> str:
    """All axes, so that a filter finds y=1 too."""
    return " ".join(f"{axis}={grid[axis]}" for axis in AXES)

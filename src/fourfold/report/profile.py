"""What a profile says, as HTML: a table by axis, and where its traces are."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from urllib.parse import quote

from fourfold.report.run import OverRanks, Profile
from fourfold.report.units import DASH, duration, known, percent

LINKED = 16
"""Traces linked one by one at most."""


def profile_table(profile: Profile) -> str:
    """Seconds of a step on the link and exposed, by axis."""
    rows = "".join(
        f"<tr><td>{escape(axis)}</td>{_cells(link)}{_cells(exposed)}<td>{_hidden(link, exposed)}</td></tr>"
        for axis, (link, exposed) in profile.by_axis.items()
    )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("axis", "on the link", "slowest rank", "exposed", "slowest rank", "hidden behind computation")
    )
    step = f"A step took {duration(profile.seconds)} while it was traced, which slows it down."
    kind = f" Seconds on the link: {escape(profile.link_seconds_are)}." if profile.link_seconds_are else ""
    if not rows:
        return f'<p class="hint">{step} One rank: nothing is communicated.</p>'
    hint = f'<p class="hint">Of a step, mean over ranks and the slowest of them. {step}{kind}</p>'
    return f'{hint}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def traces(profile: Profile, beside: Path) -> str:
    """How to open the traces, which are linked relative to the folder that the page stands in."""
    if not profile.traces:
        return '<p class="hint">The traces are not beside the run any more.</p>'
    links = ", ".join(_link(trace, beside) for trace in profile.traces[:LINKED])
    more = len(profile.traces) - LINKED
    planned = f" The planner's timeline of a step: {_link(profile.predicted, beside)}." if profile.predicted else ""
    return (
        f"<p>Traces: {links}{f' and {more} more beside them' if more > 0 else ''}.{planned} To see one, go to "
        "ui.perfetto.dev, choose \N{LEFT DOUBLE QUOTATION MARK}Open trace file\N{RIGHT DOUBLE QUOTATION MARK} and pick "
        "it; collectives and products carry the ledger's labels.</p>"
    )


def _link(trace: Path, beside: Path) -> str:
    return f'<a href="{escape(quote(Path(os.path.relpath(trace, beside)).as_posix()))}">{escape(trace.name)}</a>'


def _cells(found: OverRanks) -> str:
    where = f" (rank {found.slowest_rank})" if known(found.slowest) else ""
    return f"<td>{duration(found.mean)}</td><td>{duration(found.slowest)}{where}</td>"


def _hidden(link: OverRanks, exposed: OverRanks) -> str:
    if link.mean is None or exposed.mean is None or not link.mean > 0:
        return DASH
    return percent(max(0.0, link.mean - exposed.mean) / link.mean)

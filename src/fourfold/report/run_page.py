"""The page of a run: one HTML file with key figures, plots, the plan beside the run, the profile and the grid.

The page needs no other file: plotly.js, style and script are in it, and its content security policy forbids every
request. It links only to the traces of a profile, which are beside it. Everything that comes from the run's files is
escaped where it is inserted. A figure (see page.py) has the caption that is shown above it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from itertools import accumulate, compress, islice
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, cast
from urllib.parse import quote

from fourfold.axes import AXES, CONTEXT, MESSAGE_AXES
from fourfold.report import page
from fourfold.report.page import Figure, card, colour, hint, plot_axis, plot_layout, section, table
from fourfold.report.run_data import (
    ExpertPart,
    ExpertsRecord,
    OverRanks,
    PipelineRecord,
    ProfileSummary,
    RunData,
    StepTable,
    read_run,
)
from fourfold.report.run_places import load_of, places_figure, tables
from fourfold.report.units import DASH, count, duration, known, nbytes, percent, plain
from fourfold.schedule.play import Played
from fourfold.schedule.text import label
from fourfold.shape import Shape

T = TypeVar("T")

POINTS = 3000
"""The largest number of points of a line: more fall on the same pixels of a screen, and the page would be large. A page
with a dozen such lines stays under 3 MB."""

MARKS = 1000
"""The largest number of marks of one kind along the edge of the loss: neighbours closer than that cover each other."""

SKIPPED_ROWS = 1000
"""The largest number of skipped steps that are listed."""

SAMPLED = 100_000
"""The largest number of values that a median is taken of: it is right to a fraction of a percent, and quick."""

DIGITS = 6
"""Significant digits of the values of a line that does not show every step."""

SMOOTH_FROM = 20
"""The smallest number of logged steps for which a smoothed loss is drawn too: below that, single steps can be seen."""

LINKED_TRACES = 16
"""The largest number of traces that are linked one by one; a reader opens two or three."""

DRAWN_RANKS = 64
"""The largest number of ranks that are drawn one by one; above that only the sizes of the axes are shown."""

DRAWN_ACTIONS = 8000
"""The largest number of actions of a pipeline that are drawn: with more, a bar is narrower than a pixel."""

NAMED_ACTIONS = 40
"""The largest number of actions of a pipe rank whose bars have their names in them: a longer row has no room."""

PIPELINE_KINDS = {"F": "forward", "B": "gradients of inputs", "W": "gradients of weights", "BW": "backward"}
PIPELINE_COLOURS = {"F": "var(--hue-0)", "B": "var(--hue-2)", "W": "var(--hue-1)", "BW": "var(--hue-2)"}
"""The names and colours of the kinds of actions."""

TIMES = "\N{MULTIPLICATION SIGN}"
MFU = f"MFU = model FLOPs per token {TIMES} tokens/s / (ranks {TIMES} peak FLOP/s)"
HFU = "HFU = the same with hardware FLOPs per token: model FLOPs plus the FLOPs that recompute repeats"

SHOWN_PARTS = 20
"""The most parts of a run whose numbers are listed, the last ones."""

NO_MESSAGES = "With one rank nothing is communicated."


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of the run folder `run` to `out` (by default `report.html` in the folder); return its path.

    FileNotFoundError means that the folder is not a run. A run without a single step gives a page that says so. The
    file is written completely or not at all.
    """
    out = Path(run) / "report.html" if out is None else Path(out)
    text = run_page(read_run(Path(run)), page.plotly_js(), out.parent.resolve())
    return page.write_page(out, text, example="report.html")


def run_page(run: RunData, plotly_js: str, beside: Path) -> str:
    """Return the HTML of the page, for a file in the folder `beside`."""
    drawn = figures(run)
    names = {"started": "started", "fourfold": "Fourfold", "torch": "torch"}
    versions = [f"{name} {run.text(key)}" for key, name in names.items() if run.text(key)]
    notes = list(run.notes)
    if run.steps and run.end is None:
        notes.append("The run recorded no end: it is still running, or was killed.")
    notes += _thinned(run, beside)
    parameters = f"{count(run.number('parameters'))} parameters"
    if known(active := run.number("active_parameters")):
        parameters += f", {count(active)} active"
    facts = [run.text("device"), _ranks(run), parameters, *versions]
    body = [
        page.header(f"Training run: {run.name}", run.text("model"), _grids(run), facts),
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
        '<noscript><p class="note">The figures need JavaScript; the numbers below do not.</p></noscript>',
        f'<dl class="cards">{"".join(key_figures(run))}</dl>',
        *_parts_table(run),
        _figure("loss", "Loss", drawn),
        '<div class="pair">',
        _figure("norm", "Gradient norm and learning rate", drawn),
        _figure("throughput", "Throughput", drawn),
        "</div>",
        _figure("time", "Step time", drawn),
        '<div class="pair">',
        _figure("wire", "Sent per step", drawn, absent="Nothing recorded." if run.shape.world > 1 else NO_MESSAGES),
        _figure("kept", "Kept for backward", drawn),
        "</div>",
        *_plan(run, drawn),
        *_pipeline(run, drawn),
        *_places(run, drawn),
        *_experts(drawn),
        *_profile(run, drawn, beside),
        section("The grid", draw_grid(run.shape)),
        section(f"Skipped steps ({len(run.skipped)})", _skipped_table(run)),
        section("MFU and HFU", utilisation(run)),
        f"<details><summary>config.toml</summary><pre>{escape(run.config)}</pre></details>",
    ]
    title = f"{run.text('model')} on {_grids(run)}"
    return page.frame(title, "\n".join(body), drawn, plotly_js, script="run_page.js")


def _thinned(run: RunData, beside: Path) -> Iterator[str]:
    """Yield a note if the figures do not show everything, with the file that has it."""
    counts = {"steps": len(run.steps), "evaluations": len(run.evaluations)}
    many = [f"{number:,} {name}" for name, number in counts.items() if number > POINTS]
    if many:
        raw = (
            "beside this page" if run.metrics.parent == beside else f"in {os.path.relpath(run.metrics.parent, beside)}"
        )
        yield (
            f"{' and '.join(many)} are logged; the figures are downsampled: they draw the lowest and the highest value "
            f"of each stretch. metrics.jsonl {raw} has every number."
        )


def _skipped_table(run: RunData) -> str:
    if not run.skipped:
        return hint("None recorded.")
    rows = [
        (f"{step:,}", "<br>".join(map(escape, parameters)) or "not recorded")
        for step, parameters in islice(run.skipped.items(), SKIPPED_ROWS)
    ]
    more = len(run.skipped) - len(rows)
    cut = hint(f"{more:,} later ones are not listed; metrics.jsonl has them.") if more else ""
    return table(("step", "parameters with a gradient that was not finite"), rows) + cut


def _ranks(run: RunData) -> str:
    worlds = [part.shape.world for part in run.parts]
    return f"{_then(worlds)} rank{'s' if worlds[-1] > 1 else ''}"


def _grids(run: RunData) -> str:
    return _then([part.shape for part in run.parts])


def _then(things: Sequence[Any]) -> str:
    """Return the first and the last of things that followed each other, and the one between if there is only one."""
    if len(things) > 3:
        return f"{things[0]}, {len(things) - 2} others, then {things[-1]}"
    return ", then ".join(map(str, things))


def _parts_table(run: RunData) -> Iterator[str]:
    """Yield the numbers of each part of a run that was resumed on another grid."""
    if len(run.parts) == 1:
        return
    rows = []
    for part in run.parts[-SHOWN_PARTS:]:
        only = run.part(part)
        sent = median_wire_bytes(only)
        steps = f"{only.steps.steps[0]:,} to {only.steps.steps[-1]:,}" if only.steps else "none logged"
        rows.append((
            steps, escape(str(part.shape)), f"{part.shape.world:,}", count(_median(only, "tokens_per_second")),
            percent(_median(only, "mfu")), duration(_median(only, "seconds")),
            nbytes(max(_values(only, "peak_memory_bytes"), default=None)), nbytes(sum(sent.values())) if sent else DASH,
        ))  # fmt: skip
    head = ("steps", "grid", "ranks", "tokens/s", "MFU", "step time", "peak memory", "sent per step")
    left = len(run.parts) - len(rows)
    more = f" {left:,} earlier parts are not listed; run.json has them." if left else ""
    about = f"The run was resumed on another grid. The numbers above are those of the last part; all are medians.{more}"
    yield section("The run by grid", hint(about) + table(head, rows))


def _figure(
    name: str, title: str, drawn: Mapping[str, Figure], absent: str = "Nothing recorded.", more: str = ""
) -> str:
    """Return the section of a figure, with the text `absent` if the run has no data for it."""
    if name not in drawn:
        return section(title, hint(absent) + more)
    button = f'<button type="button" data-log="{name}" aria-pressed="false">log scale</button>'
    body = hint(drawn[name]["caption"]) + page.plot(name, drawn[name]) + more
    return section(title, body, button if drawn[name].get("log") else "")


# --- key figures


def key_figures(run: RunData) -> Iterator[str]:
    """Yield the cards at the top of the page."""
    done = run.steps.steps[-1] if run.steps else 0
    planned, each = run.number("steps"), run.number("tokens_per_step")
    of = f" / {planned:,.0f}" if known(planned) else ""
    tokens = f"{count(done * each)} tokens, " if each is not None else ""
    yield card("Steps", f"{done:,}{of}", f"{tokens}{run.end if run.end is not None else 'no end recorded'}")
    last = next((step for step in reversed(run.steps) if step.loss is not None), None)
    if last is None:
        yield card("Final loss", DASH, "")
    else:
        yield card("Final loss", "not finite" if last.diverged else plain(last.loss), f"training, step {last.step:,}")
    if run.evaluations:
        best = min(run.evaluations.losses)
        step = run.evaluations.steps[run.evaluations.losses.index(best)]
        yield card("Best validation loss", plain(best), f"step {step:,}")
    else:
        yield card("Best validation loss", DASH, "no evaluation")
    yield card("Unigram entropy", plain(run.number("unigram_entropy")), "the loss of guessing by token frequency")
    latest = run.part(run.parts[-1])
    since = f" since step {run.parts[-1].first:,}" if len(run.parts) > 1 else ""
    yield card("Tokens per second", count(_median(latest, "tokens_per_second")), f"median{since}, all ranks")
    yield card("MFU", percent(_median(latest, "mfu")), f"median{since}", MFU)
    yield card("HFU", percent(_median(latest, "hfu")), f"median{since}", HFU)
    shares = _exposed_shares(latest.steps)
    exposed = f"median{since}, {percent(median(shares))} exposed" if shares else ""
    tip = "exposed: communication that is not hidden behind computation"
    yield card("Step time", duration(_median(latest, "seconds")), exposed, tip)
    yield card("Peak memory", nbytes(max(_values(latest, "peak_memory_bytes"), default=None)), f"on rank 0{since}")
    sent = median_wire_bytes(latest)
    parts = " ".join(
        f'<span style="--axis:{colour(axis)}"><i></i>{escape(axis)}&nbsp;{nbytes(size)}</span>'
        for axis, size in sent.items()
    )
    total = nbytes(sum(sent.values())) if sent else DASH
    detail = f'<span class="by-axis">{parts}</span>' if sent else "nothing recorded"
    yield f'<div class="wide"><dt>Sent per step</dt><dd>{total}</dd><dd class="detail">{detail}</dd></div>'


def _exposed_shares(steps: StepTable) -> list[float]:
    """Return the share of exposed communication in each step whose time is known, or in a sample of many steps."""
    waits, whole, shares = steps.by_axis("exposed_seconds").values(), steps.column("seconds"), []
    places = sample(range(len(steps)))
    for place in places:
        found = list(filter(math.isfinite, [column[place] for column in waits]))
        # An axis without a number in this step has not waited; a replayed step has none at all.
        if 0 < whole[place] < math.inf and (found or not waits):
            shares.append(sum(found) / whole[place])
    return shares if 2 * len(shares) > len(places) else []


def sample(values: Sequence[T]) -> Sequence[T]:
    """Return the values, or `SAMPLED` of them if they are more: the same ones each time, and at no regular distance."""
    return values if len(values) <= SAMPLED else random.Random(0).choices(values, k=SAMPLED)


def _median(run: RunData, name: str) -> float | None:
    values = _values(run, name)
    return median(sample(values)) if values else None


def _values(run: RunData, name: str) -> list[float]:
    """Return the finite values of a column of the logged steps."""
    return list(filter(math.isfinite, run.steps.column(name)))


def median_wire_bytes(run: RunData) -> dict[str, float]:
    """Return the bytes that rank 0 sends per step, by axis: the median over the logged steps."""
    found = {}
    columns = run.steps.by_axis("wire_bytes")
    for axis in filter(columns.__contains__, run.axes):
        column = columns[axis]
        if column.count(column[0]) == len(column):  # most runs send the same bytes in every step
            found[axis] = column[0]
        elif sent := list(filter(math.isfinite, column)):
            found[axis] = median(sample(sent))
    return found


def utilisation(run: RunData) -> str:
    """Return the footnote that defines MFU and HFU, with the numbers of this run."""

    def flops(value: float | None) -> str:
        return f"{count(value)}FLOP" if known(value) else f"{DASH} FLOP"

    model, hardware = run.number("flops_per_token", "model"), run.number("flops_per_token", "hardware")
    peak = run.number("peak_flops")
    source = f" ({escape(run.text('peak_flops_from'))})" if run.text("peak_flops_from") else ""
    known_peak = f"{flops(peak)}/s per rank{source}" if known(peak) else f"not known{source}, so neither is shown"
    return (
        f"<p>{MFU}. Model FLOPs = 6 {TIMES} parameters of matrix products + attention, which the causal mask cuts in "
        f"half. {HFU}.</p>"
        f"<p>In this run: {flops(model)} per token by the model, {flops(hardware)} by the hardware "
        f"(recompute: {escape(run.text('recompute')) or DASH}); {_ranks(run)}; peak {known_peak}.</p>"
    )


# --- figures


def figures(run: RunData) -> dict[str, Figure]:
    """Return the figures by name, without those that the run has no data for."""
    by_step = {
        "loss": _loss(run),
        "norm": _norm(run.steps),
        "throughput": _throughput(run.steps),
        "time": _time(run),
        "imbalance": _imbalance(run),
        "balance": _balance(run.experts),
    }
    counted = [] if run.experts is None else run.experts.steps  # a file of its own: metrics.jsonl may have none of them
    steps = [*_ends(run.steps.steps), *_ends(run.evaluations.steps), *_ends(list(run.skipped)), *_ends(counted)]
    for figure in filter(None, by_step.values()):
        # The same range for all of them: plotly would leave a different margin for the marks of each.
        room = max(0.5, 0.012 * (max(steps) - min(steps)))
        figure["layout"]["xaxis"].update(range=[min(steps) - room, max(steps) + room])
        if max(steps) - min(steps) < 8:
            figure["layout"]["xaxis"].update(dtick=1)  # otherwise plotly also marks step 1.5
        if run.resumed:
            figure["layout"]["shapes"] = [_resumed_line(step) for step in marked(run.resumed)]
            figure["caption"] += " A dotted line: the run was resumed."
    made = {**by_step, "wire": _wire(run), "kept": _kept(run), "links": _links(run), "plan": _plan_figure(run)}
    made["pipeline"] = _pipeline_figure(run.pipeline)
    made["experts"] = _expert_heat(run.experts)
    made["places"] = None if run.documents is None else places_figure(load_of(run.documents))
    return {name: figure for name, figure in made.items() if figure is not None}


def _resumed_line(step: int) -> Figure:
    """Return a line between a step and the next, over the whole height of a figure."""
    line = {"color": "var(--muted)", "width": 1.2, "dash": "dot"}
    return {"type": "line", "x0": step + 0.5, "x1": step + 0.5, "yref": "paper", "y0": 0, "y1": 1, "line": line}


def _ends(ascending: Sequence[int]) -> list[int]:
    return [ascending[0], ascending[-1]] if ascending else []


def extremes(*columns: Sequence[float], limit: int = POINTS) -> Sequence[int]:
    """Return the places of about `limit` values at most: the lowest and highest of every stretch, so no spike is lost.

    Of several columns over the same steps, the places are those of all their extremes. A stretch without a finite value
    keeps its first place, where the line has a gap.
    """
    count_all = len(columns[0])
    if count_all <= limit:
        return range(count_all)
    width = math.ceil(2 * len(columns) * count_all / (limit - 2))
    places = {0, count_all - 1}
    for start in range(0, count_all, width):
        for column in columns:
            stretch = column[start : start + width]
            low, high = min(stretch), max(stretch)
            # A NaN stays the lowest or highest only if it comes first: no other comparison with it is true.
            if not (math.isfinite(low) and math.isfinite(high)):
                finite = list(filter(math.isfinite, stretch)) or [stretch[0]]
                low, high = min(finite), max(finite)
            places |= {start + stretch.index(low), start + stretch.index(high)} if math.isfinite(low) else {start}
    return sorted(places)


def marked(steps: Sequence[int], limit: int = MARKS) -> list[int]:
    """Return about `limit` steps at most, so that each step is at a mark or nearer to one than a reader can see."""
    if len(steps) <= limit:
        return list(steps)
    width = (steps[-1] - steps[0]) / limit
    return list({int((step - steps[0]) / width): step for step in steps}.values())


def smooth(values: Sequence[float | None], span: int, places: Sequence[int] | None = None) -> list[float | None]:
    """Return the mean of the `span` (odd) numbers around each one, and a gap where there is no number.

    Near the ends the mean is over fewer numbers, but always over as many before as after, so it never lags. With
    `places` only the means at these places are returned.
    """
    there = [value is not None and math.isfinite(value) for value in values]
    numbers = compress(values, there)
    sums = list(accumulate(cast(Iterator[float], numbers), initial=0.0))
    before = list(accumulate(there, initial=0))  # how many numbers there are before each place
    last = len(sums) - 2
    means: list[float | None] = []
    for place in range(len(values)) if places is None else places:
        number = before[place]
        reach = min(span // 2, number, last - number)
        mean = (sums[number + reach + 1] - sums[number - reach]) / (2 * reach + 1) if there[place] else None
        means.append(mean)
    return means


def _loss(run: RunData) -> Figure | None:
    losses = run.steps.column("loss")
    if not any(map(math.isfinite, losses)) and not run.evaluations:
        return None
    places = extremes(losses)
    traces = [_line(run.steps, "training", places, losses, color="var(--faint)", width=1.2)]
    if len(run.steps) >= SMOOTH_FROM:
        span = 2 * max(2, len(run.steps) // 50) + 1  # odd, about 4% of the run: noise goes, the shape stays
        means = dict(zip(places, smooth(losses, span, places), strict=True))
        traces.append(_line(run.steps, f"mean of {span}", places, means, color="var(--strong)", width=2.4))
    if run.evaluations:
        found = run.evaluations
        drawn = extremes(found.losses)
        y = [found.losses[place] for place in drawn]
        traces.append(_marks("validation", [found.steps[place] for place in drawn], y, "circle", size=8))
    entropy = run.number("unigram_entropy")
    if known(entropy):
        line = {"color": "var(--muted)", "width": 1.5, "dash": "dash"}
        steps = [*_ends(run.steps.steps), *_ends(run.evaluations.steps)]
        ends = {"x": [min(steps) - 0.5, max(steps) + 0.5], "y": [entropy, entropy]}
        traces.append({"type": "scatter", "mode": "lines", "name": "unigram entropy", "line": line, **ends})
    # Skipped steps are marked at the upper edge and diverged ones at the lower, whatever the scale of the loss is.
    edge = {"yaxis": "y2", "hovertemplate": "at %{x}"}
    if skipped := marked(list(run.skipped)):
        traces.append(_marks("skipped", skipped, [0.97] * len(skipped), "x", **edge))
    if diverged := marked(run.steps.diverged()):
        traces.append(_marks("not finite", diverged, [0.03] * len(diverged), "triangle-up", **edge))
    edges = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    layout = plot_layout(380, yaxis=plot_axis(tickformat=".3~g"), yaxis2=edges)
    caption = "Per token, in nats. Zooming along the steps zooms all figures."
    return {"traces": traces, "layout": layout, "log": True, "caption": caption}


def _norm(steps: StepTable) -> Figure | None:
    norm = _column_line(steps, "gradient norm", "grad_norm", color="var(--strong)")
    rate = _column_line(steps, "learning rate", "learning_rate", color="var(--accent)")
    upper, lower = ("gradient norm", [norm], {"tickformat": ".3~g"}), ("learning rate", [rate], {"exponentformat": "e"})
    return _two_panels(upper, lower, "The norm is before clipping.", log=True)


def _throughput(steps: StepTable) -> Figure | None:
    tokens = _column_line(steps, "tokens per second", "tokens_per_second", color="var(--strong)")
    # HFU first: where the two are equal, the dots of MFU are drawn over it.
    hfu = _column_line(steps, "HFU", "hfu", color="var(--strong)", width=2.4)
    mfu = _column_line(steps, "MFU", "mfu", color="var(--accent)", dash="dot")
    bold = '<span style="color:var(--{})"><b>{}</b></span>'
    names = " and ".join((bold.format("accent", "MFU \u00b7\u00b7\u00b7"), bold.format("strong", "HFU \u2014")))
    ticks: Figure = {"tickformat": ".3~%"}
    if not any(known(value) for value in (*hfu["y"], *mfu["y"])):
        names, ticks = "MFU and HFU: not known", {"showticklabels": False}
    upper, lower = ("tokens per second", [tokens], {"tickformat": ".3~s"}), (names, [hfu, mfu], ticks)
    return _two_panels(upper, lower, "MFU and HFU are explained below.")


Panel = tuple[str, list[Figure], Figure]
"""A panel of a figure: its heading, its lines, and the ticks of its vertical axis."""


def _two_panels(upper: Panel, lower: Panel, caption: str, log: bool = False) -> Figure | None:
    """Return two panels over the same steps; None if there is no number to draw."""
    traces: list[Figure] = [*upper[1], *({**trace, "yaxis": "y2"} for trace in lower[1])]
    if not any(known(value) for trace in traces for value in trace["y"]):
        return None
    # Headings are at the upper left of the panels: a title beside the axis would take too much width on a phone.
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "yanchor": "bottom", "showarrow": False}
    font = {"color": "var(--muted)", "size": 12}
    layout = plot_layout(
        380,
        yaxis=plot_axis(domain=[0.56, 0.94], rangemode="tozero", **upper[2]),
        yaxis2=plot_axis(domain=[0, 0.38], rangemode="tozero", **lower[2]),
        annotations=[{"text": text, "y": y, "font": font, **place} for text, y in ((upper[0], 0.94), (lower[0], 0.38))],
        showlegend=False,
    )
    layout["xaxis"]["anchor"] = "y2"
    return {"traces": traces, "layout": layout, "log": log, "caption": caption}


def _time(run: RunData) -> Figure | None:
    steps, whole = run.steps, run.steps.column("seconds")
    seconds = _values(run, "seconds")
    if not seconds:
        return None
    # The lines are stacked, so all of them have points at the same steps.
    places = [place for place in extremes(whole, *steps.by_axis("exposed_seconds").values()) if known(whole[place])]
    drawn = {place: steps[place] for place in places}
    traces = []
    for part in ("compute", *run.axes):
        name = part if part == "compute" else f"exposed over {escape(part)}"
        values = {place: step.part_seconds(part) for place, step in drawn.items()}
        line = _line(steps, name, places, values, color=colour(part), width=0.5)
        traces.append({**line, "stackgroup": "step", "fillcolor": colour(part), "hovertemplate": "%{y:.3s}s"})
    usual = (
        1.25 * sorted(sample(seconds))[int(0.98 * (min(SAMPLED, len(seconds)) - 1))]
    )  # the slowest of 98% of the steps, and some room
    axis = plot_axis(tickformat="~s", ticksuffix="s", rangemode="tozero")
    caption = "On rank 0. Exposed is the time spent waiting for communication."
    if any(drawn[place].exposed_seconds == {} for place in places) and run.axes:
        caption += " Of replayed steps it is not known, and counts as computing."
    if max(seconds) > 2 * usual:  # otherwise a slow first step would make all others look flat
        axis["range"] = [0, usual]
        caption += " The slowest steps are above the frame; double-click to see them."
    return {"traces": traces, "layout": plot_layout(340, yaxis=axis), "caption": caption}


def _imbalance(run: RunData) -> Figure | None:
    """Draw how uneven attention is over a context group, and the bytes that rank 0 sends there, step by step."""
    if run.shape.context == 1:
        return None
    uneven = _column_line(run.steps, "imbalance", "imbalance", color="var(--strong)")
    lines = []
    if (sent := run.steps.by_axis("wire_bytes").get(CONTEXT)) is not None:
        lines = [_line(run.steps, "sent over context", extremes(sent), sent, color=colour(CONTEXT))]
    above = [{**uneven, "y": [value and value - 1 for value in uneven["y"]], "hovertemplate": "%{y:.1%}"}]
    upper = "attention of the busiest member above the mean", above, {"tickformat": ".3~%"}
    lower = "sent over context", lines, {"tickformat": ".3~s", "ticksuffix": "B"}
    return _two_panels(upper, lower, "Attention in the context group of rank 0, and the bytes that rank 0 sends there.")


def _wire(run: RunData) -> Figure | None:
    latest = run.parts[-1]
    sent = median_wire_bytes(run.part(latest))
    over = "the steps" if len(run.parts) == 1 else f"the steps from {latest.first:,} on, on {latest.shape}"
    caption = f"Bytes that rank 0 puts on the wire, by axis; median over {over}."
    return _byte_bars(sent, [colour(axis) for axis in sent], caption) if sent else None


def _kept(run: RunData) -> Figure | None:
    kept = run.facts.get("kept_bytes")
    sizes = {policy: run.number("kept_bytes", policy) for policy in kept} if isinstance(kept, dict) else {}
    drawn = {policy: size for policy, size in sizes.items() if known(size)}
    chosen = run.text("recompute")
    shades = ["var(--strong)" if policy == chosen else "var(--faint)" for policy in drawn]
    caption = f"Memory of activations by recompute policy. This run: {chosen or 'not known'}."
    return _byte_bars(drawn, shades, caption) if drawn else None


def _byte_bars(sizes: Mapping[str, float], shades: list[str], caption: str) -> Figure:
    """Return one bar of bytes for each name, with its size beside it."""
    text = {"text": [nbytes(size) for size in sizes.values()], "textposition": "outside", "cliponaxis": False}
    trace = page.bars("", list(sizes.values()), [escape(name) for name in sizes], shades, "%{y}: %{text}", **text)
    # Room for the size beside the longest bar. No ticks: decimal ones would not be round numbers of MiB.
    size_axis = plot_axis(visible=False, fixedrange=True, range=[0, 1.35 * max(*sizes.values(), 1)])
    layout = _bar_layout(70 + 42 * len(sizes), xaxis=size_axis, showlegend=False)
    layout["margin"].update(t=10, b=10)
    return {"traces": [trace], "layout": layout, "caption": caption}


def _second_bars(rows: list[str], parts: Mapping[str, tuple[str, list[float], str | list[str]]]) -> Figure:
    """Return stacked bars of seconds. `parts` has, by name, a label, the seconds in each row, and a shade."""
    traces = [
        page.bars(name, seconds, rows, shade, f"{label} %{{x:.3s}}s") for name, (label, seconds, shade) in parts.items()
    ]
    seconds_axis = plot_axis(tickformat="~s", ticksuffix="s", fixedrange=True, rangemode="tozero")
    return {"traces": traces, "layout": _bar_layout(100 + 42 * len(rows), xaxis=seconds_axis, barmode="stack")}


def _bar_layout(height: int, **more: Any) -> Figure:
    names = plot_axis(type="category", autorange="reversed", fixedrange=True, showgrid=False)
    return plot_layout(height, yaxis=names, bargap=0.35, hovermode="closest", **more)


def _links(run: RunData) -> Figure | None:
    """Draw the seconds per profiled step on the link of each axis, the hidden and the exposed part."""
    by_axis = {} if run.profile is None else run.profile.by_axis
    drawn = {axis: pair for axis, pair in by_axis.items() if all(known(found.mean) for found in pair)}
    if not any(link.mean for link, _ in drawn.values()):
        return None
    exposed = [waited.mean or 0.0 for _, waited in drawn.values()]
    # Waiting itself costs time, so the exposed time can be longer than the time on the link.
    hidden = [max(0.0, (link.mean or 0.0) - waited) for (link, _), waited in zip(drawn.values(), exposed, strict=True)]
    shades = [colour(axis) for axis in drawn]
    parts = {"exposed": ("exposed", exposed, shades), "hidden": ("hidden", hidden, "var(--compute)")}
    figure = _second_bars([escape(axis) for axis in drawn], parts)
    figure["layout"]["showlegend"] = False
    caption = "Seconds per step on the link, mean over ranks. In colour: exposed. Grey: hidden behind computation."
    return {**figure, "caption": caption}


def _plan_figure(run: RunData) -> Figure | None:
    """Draw a step as predicted and as measured: computation, and the exposed time over each axis."""
    both = dict(zip(("predicted", "measured"), step_parts(run), strict=True))
    drawn = {kind: parts for kind, parts in both.items() if parts}
    if "predicted" not in drawn:
        return None
    bars = {}
    for part in ("compute", *predicted_axes(run)):
        seconds = [parts[part] for parts in drawn.values()]
        bars[part if part == "compute" else f"exposed over {part}"] = part, seconds, colour(part)
    caption = "A step as the planner predicted it and as it was measured. In colour: exposed. Grey: computation."
    return {**_second_bars(list(drawn), bars), "caption": caption}


def _column_line(steps: StepTable, name: str, column: str, **line: Any) -> Figure:
    values = steps.column(column)
    return _line(steps, name, extremes(values), values, **line)


def _line(
    steps: StepTable,
    name: str,
    places: Sequence[int],
    values: Sequence[float] | Mapping[int, float | None],
    **line: Any,
) -> Figure:
    """Return a line through the values at these places, with a gap where there is no number."""
    found = [values[place] for place in places]
    exact = len(places) == len(steps)
    return {
        "type": "scatter",
        "mode": "lines" if len(places) > 1 else "markers",
        "name": name,
        "x": [steps.steps[place] for place in places],
        "y": [(value if exact else float(f"{value:.{DIGITS}g}")) if known(value) else None for value in found],
        "line": {"width": 1.8, **line},
        "marker": {"color": line["color"]},
    }


def _marks(name: str, x: list[int], y: list[float], symbol: str, size: int = 9, **more: Any) -> Figure:
    marker = {"symbol": symbol, "size": size, "color": "var(--accent)"}
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker, **more}


# --- the plan beside the run


def predicted_axes(run: RunData) -> list[str]:
    """Return the axes that the planner predicted exposed time for."""
    return [axis for axis in MESSAGE_AXES if run.number("predicted", "exposed_seconds", axis) is not None]


Pair = tuple[float | None, float | None]
"""A number as the planner predicted it, and as the run measured it; None for one that is not known."""


def predicted_and_measured(run: RunData, *path: str) -> Pair:
    """Return a number as the planner predicted it and as the run measured it."""
    return run.number("predicted", *path), run.number("compared", *path, "measured")


def step_parts(run: RunData) -> tuple[dict[str, float], dict[str, float]]:
    """Return the predicted and the measured parts of a step: computation, and exposed seconds by axis.

    Without the seconds of a whole step the parts are empty.
    """
    exposed = {axis: predicted_and_measured(run, "exposed_seconds", axis) for axis in predicted_axes(run)}
    found: list[dict[str, float]] = []
    for place, whole in enumerate(predicted_and_measured(run, "seconds")):
        waits = {axis: pair[place] or 0.0 for axis, pair in exposed.items()}
        computes = max(0.0, (whole or 0.0) - sum(waits.values()))
        found.append({"compute": computes, **waits} if known(whole) else {})
    return found[0], found[1]


def _plan(run: RunData, drawn: Mapping[str, Figure]) -> list[str]:
    """Return the planner's prediction beside the measurements of the run, if there was a prediction.

    A number that is missing is a dash: a run that ended early has a prediction but no comparison.
    """
    predicted = run.facts.get("predicted")
    if not isinstance(predicted, Mapping):
        return []
    why = predicted.get("unpriced")
    if why is not None:
        return [section("Plan and run", hint(f"The planner could not price this run: {why}."))]
    head = ("per step", "predicted", "measured", "measured / predicted")
    more = table(head, _plan_rows(run)) + hint(" ".join(_plan_notes(run)))
    figure = _figure("plan", "Plan and run", drawn, more=more) if "plan" in drawn else section("Plan and run", more)
    return [figure, *_correction(run)]


def _correction(run: RunData) -> list[str]:
    """Return the parts of a step beside their predictions, and what they correct, if the run has measured them."""
    corrected = run.facts.get("corrected")
    parts = corrected.get("parts") if isinstance(corrected, Mapping) else None
    if not isinstance(corrected, Mapping) or not isinstance(parts, Mapping):
        return []

    def pair(part: str) -> Pair:
        predicted, measured = (run.number("corrected", "parts", part, kind) for kind in ("predicted", "measured"))
        return predicted, measured

    rows = [_plan_row(part, pair(part), duration) for part in parts]
    steps, said = corrected.get("steps"), corrected.get("said")
    traced = f"Measured in steps {' to '.join(map(str, steps))}, which were traced." if isinstance(steps, list) else ""
    texts = [text for text in (traced, *(said if isinstance(said, list) else ())) if isinstance(text, str) and text]
    head = ("part of a step", "predicted", "measured", "measured / predicted")
    return [section("The parts of a step", table(head, rows) + "".join(map(hint, texts)))]


def _plan_rows(run: RunData) -> Iterator[Sequence[str]]:
    computed = run.number("predicted", "compute_seconds"), step_parts(run)[1].get("compute")
    yield _plan_row("seconds", predicted_and_measured(run, "seconds"), duration)
    yield _plan_row("computation", computed, duration)
    for axis in predicted_axes(run):
        yield _plan_row(f"exposed over {axis}", predicted_and_measured(run, "exposed_seconds", axis), duration)
        # Only a profile measures how long a link was busy.
        profiled = run.profile.by_axis.get(axis) if run.profile is not None else None
        on_link = run.number("predicted", "link_seconds", axis), profiled[0].mean if profiled is not None else None
        yield _plan_row(f"on the link of {axis}", on_link, duration)
    # The trainer gives a ratio only where both numbers count the same memory.
    alike = run.number("compared", "peak_memory_bytes", "ratio") is not None
    yield _plan_row("peak memory", predicted_and_measured(run, "peak_memory_bytes"), nbytes, alike)
    kinds = run.facts["predicted"].get("memory_bytes")
    for kind in kinds if isinstance(kinds, Mapping) else ():
        if size := run.number("predicted", "memory_bytes", kind):
            yield _plan_row(f"of that, {kind.replace('_', ' ')}", (size, None), nbytes)


def _plan_row(name: str, pair: Pair, shown: Callable[[float | None], str], alike: bool = True) -> Sequence[str]:
    predicted, measured = pair
    comparable = alike and known(predicted) and known(measured) and predicted
    return escape(name), shown(predicted), shown(measured), plain(measured / predicted, 3) if comparable else DASH


def _plan_notes(run: RunData) -> Iterator[str]:
    """Yield the machine and the steps of the comparison, and the planner's own notes."""
    compared = run.facts.get("compared")
    found = compared if isinstance(compared, Mapping) else run.facts["predicted"]
    yield f"The prediction is for the machine {found.get('machine', DASH)}."
    steps, notes = found.get("steps"), found.get("notes")
    if isinstance(steps, list) and steps:
        yield f"Measured is the median of steps {', '.join(map(str, steps))} on rank 0."
    elif found is not compared:
        yield "The run ended before enough of its steps were measured."
    if isinstance(notes, list) and notes:
        yield f"Note: {'; '.join(map(str, notes))}."


# --- the pipeline


def _pipeline(run: RunData, drawn: Mapping[str, Figure]) -> list[str]:
    """Return the section about the pipeline; none for a run without pipe ranks."""
    found = run.pipeline
    if found is None:
        return []
    many = "It has too many ranks or actions to be drawn here; `fourfold schedule check` draws schedule.csv."
    return [_figure("pipeline", "Pipeline", drawn, absent=many, more=_idle_table(found) if found.spans else "")]


def _idle_table(record: PipelineRecord) -> str:
    """Return a table of what each pipe rank computed and how long it waited, in the recorded step and as planned."""
    planned = record.planned()
    rows = []
    for rank, spans in enumerate(record.spans):
        busy = sum(span.end - span.start for span in spans)
        waited, would = record.makespan - busy, planned.idle[rank]
        stages = ", ".join(map(str, sorted({span.action.stage for span in spans})))
        shares = percent(waited / record.makespan), percent(would / planned.makespan)
        rows.append((str(rank), stages, duration(busy), duration(waited), shares[0], duration(would), shares[1]))
    head = ("pipe rank", "stages", "computed", "idle", "of the step", "idle as planned", "of the step")
    return table(head, rows)


def _pipeline_figure(record: PipelineRecord | None) -> Figure | None:
    """Draw the actions of each pipe rank as they ran, and below as planned; what is empty is a bubble."""
    if record is None or record.schedule.pipe > DRAWN_RANKS:
        return None
    if sum(map(len, record.schedule.orders)) > DRAWN_ACTIONS:
        return None
    planned = record.planned()
    panels = [("as planned", planned.spans)]
    if record.spans:
        panels.insert(0, ("as it ran", record.spans))
    several, pipe = record.schedule.chunks > 1, record.schedule.pipe
    few = max(map(len, record.schedule.orders)) <= NAMED_ACTIONS
    traces = []
    for kind, name in PIPELINE_KINDS.items():
        for place, (_, lines) in enumerate(panels):
            spans = [(rank, span) for rank, line in enumerate(lines) for span in line if span.action.kind == kind]
            if not spans:
                continue
            trace = page.bars(
                name,
                [span.end - span.start for _, span in spans],
                [f"pipe {rank}" for rank, _ in spans],
                PIPELINE_COLOURS[kind],
                f"{kind} of stage %{{customdata[0]}}, micro-batch %{{customdata[1]}}: %{{x:.3s}}s",
                base=[span.start for _, span in spans],
                customdata=[[span.action.stage, span.action.micro] for _, span in spans],
                text=[label(span.action, several) if few else "" for _, span in spans],
                textposition="inside", insidetextanchor="middle", textangle=0, constraintext="none",
                insidetextfont={"color": "var(--card)", "size": 11},
                legendgroup=kind, showlegend=not any(one["legendgroup"] == kind for one in traces),
                yaxis="y" if place == 0 else "y2",
            )  # fmt: skip
            trace["marker"]["line"] = {"color": "var(--card)", "width": 1}
            traces.append(trace)
    height = 24 * pipe + 34
    rows = plot_axis(type="category", fixedrange=True, showgrid=False, categoryorder="array")
    rows["categoryarray"] = [f"pipe {rank}" for rank in reversed(range(pipe))]
    edges = [[0.56, 0.95], [0.0, 0.39]] if record.spans else [[0.0, 0.93]]
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "yanchor": "bottom", "showarrow": False}
    font = {"color": "var(--muted)", "size": 12}
    texts = [{"text": text, "y": edge[1], "font": font, **place} for (text, _), edge in zip(panels, edges, strict=True)]
    whole = max(planned.makespan, record.makespan if record.spans else 0.0)
    seconds = plot_axis(tickformat="~s", ticksuffix="s", range=[0, 1.01 * whole], anchor="y2" if record.spans else "y")
    axes = {f"yaxis{place + 1 if place else ''}": {**rows, "domain": edge} for place, edge in enumerate(edges)}
    layout = plot_layout(
        len(panels) * height + 90, xaxis=seconds, **axes, annotations=texts, barmode="overlay", bargap=0.2,
        hovermode="closest",
    )  # fmt: skip
    return {"traces": traces, "layout": layout, "caption": _pipeline_caption(record, planned)}


def _pipeline_caption(record: PipelineRecord, planned: Played) -> str:
    about = f"{record.schedule.stages} stages on {record.schedule.pipe} pipe ranks, {record.schedule.micro_steps} "
    about += f"micro-batch{'es' if record.schedule.micro_steps > 1 else ''}; where a row is empty the rank waits."
    if record.step is None:
        return f"{about} No step was recorded; as planned, F, B and W of a stage take a second each."
    return (
        f"{about} Step {record.step:,} took {duration(record.makespan)} from its first action to its last, and pipe "
        f"ranks were idle for {percent(record.idle_share)} of it. As planned, every action takes the median time of "
        f"its kind in its stage, and messages none: {duration(planned.makespan)} and {percent(planned.idle_share)}."
    )


# --- work by place


def _places(run: RunData, drawn: Mapping[str, Figure]) -> list[str]:
    """Return the sections about work and bytes by place; none for a run without context and packed documents."""
    found = []
    if run.documents is not None:
        found.append(_figure("places", "Work by place", drawn, more="".join(tables(load_of(run.documents)))))
    if "imbalance" in drawn:
        found.append(_figure("imbalance", "Context groups, step by step", drawn))
    return found


# --- experts


def _experts(drawn: Mapping[str, Figure]) -> list[str]:
    """Return the sections about the load of experts; none for a run without."""
    titles = {"balance": "Balance of experts", "experts": "Load of each expert"}
    return [_figure(name, title, drawn) for name, title in titles.items() if name in drawn]


def _balance(record: ExpertsRecord | None) -> Figure | None:
    """Draw the load of the busiest expert as a multiple of the mean, step by step."""
    if record is None:
        return None
    lines = {"the worst block": (record.worst, "var(--accent)"), "mean over blocks": (record.mean, "var(--strong)")}
    traces = [
        {
            "type": "scatter", "mode": "lines" if len(record.steps) > 1 else "markers", "name": name,
            "x": record.steps, "y": [round(value, 4) for value in values], "line": {"width": 1.8, "color": shade},
            "marker": {"color": shade},
        }
        for name, (values, shade) in lines.items()
    ]  # fmt: skip
    caption = "Tokens of the busiest expert of a block divided by the mean; 1 if all experts have equally many."
    return {"traces": traces, "layout": plot_layout(240, yaxis=plot_axis(ticksuffix="x")), "caption": caption}


def _expert_heat(record: ExpertsRecord | None) -> Figure | None:
    """Draw the load of every expert of every block, in each part of the run by itself."""
    if record is None:
        return None
    parts, experts = record.parts, len(record.parts[0].loads[0])
    most = max(2.0, *(load for part in parts for block in part.loads for load in block))
    traces = []
    for place, part in enumerate(parts):
        number = _axis_number(place)
        traces.append({
            "type": "heatmap", "name": f"steps {part.first:,} to {part.last:,}", "x": list(range(experts)),
            "y": [f"block {block}" for block in record.blocks],
            "z": [[round(load, 3) for load in block] for block in part.loads],
            "coloraxis": "coloraxis", "xaxis": f"x{number}", "yaxis": f"y{number}", "xgap": 1, "ygap": 1,
            "hovertemplate": "%{y}, expert %{x}: %{z:.2f} times the mean<extra></extra>",
        })  # fmt: skip
    scale = [[0, "var(--accent)"], [1 / most, "var(--card)"], [1, "var(--strong)"]]
    bar = {"title": {"text": "times the mean", "side": "right"}, "thickness": 12, "outlinewidth": 0}
    colours = {"colorscale": scale, "cmin": 0, "cmax": most}
    high = max(210, min(900, 110 + 22 * len(record.blocks)))
    more = {"showlegend": False, "hovermode": "closest"}
    layout = plot_layout(high, **_expert_axes(parts), **more, coloraxis={**colours, "colorbar": bar})
    layout["margin"] = {**layout["margin"], "r": 90}
    below = {"title": {"text": "times the mean", "side": "bottom"}, "orientation": "h", "y": 0, "yref": "container",
             "yanchor": "bottom"}  # fmt: skip
    narrow = plot_layout(
        high * len(parts), **_expert_axes(parts, stacked=True), **more, coloraxis={**colours, "colorbar": bar | below}
    )
    narrow["margin"] = {**narrow["margin"], "b": 120}
    caption = "Tokens of each expert divided by the mean of its block, in equal parts of the run."
    return {"traces": traces, "layout": layout, "narrow": narrow, "caption": caption}


def _expert_axes(parts: Sequence[ExpertPart], *, stacked: bool = False) -> dict[str, Any]:
    """Return the axes and the titles of the parts of a run: side by side, or one below the other."""
    axes: dict[str, Any] = {"annotations": []}
    gap = 0.1 if stacked else 0.02
    length = (1 - gap * (len(parts) - 1)) / len(parts)
    for place, part in enumerate(parts):
        number, last = _axis_number(place), place + 1 == len(parts)
        start = place * (length + gap)
        x, y = ([0, 1], [1 - start - length, 1 - start]) if stacked else ([start, start + length], [0, 1])
        title = {"title": {"text": "expert", "standoff": 6}} if last or not stacked else {}
        names = {"type": "category", "autorange": "reversed", "showticklabels": stacked or not place}
        axes[f"xaxis{number}"] = plot_axis(domain=x, anchor=f"y{number}", showgrid=False, **title)
        axes[f"yaxis{number}"] = plot_axis(domain=y, anchor=f"x{number}", showgrid=False, **names)
        axes["annotations"].append({
            "text": f"steps {part.first:,} to {part.last:,}" if part.last > part.first else f"step {part.first:,}",
            "x": x[0], "y": y[1], "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom",
            "showarrow": False, "font": {"color": "var(--muted)", "size": 12},
        })  # fmt: skip
    return axes


def _axis_number(place: int) -> str:
    """Return the number that plotly puts behind the name of an axis: none for the first."""
    return str(place + 1) if place else ""


# --- the profile


def _profile(run: RunData, drawn: Mapping[str, Figure], beside: Path) -> list[str]:
    """Return the sections about the profile; none if no steps were profiled."""
    found = run.profile
    if found is None:
        return []
    steps = f"step {found.first:,}" if found.first == found.last else f"steps {found.first:,} to {found.last:,}"
    title = f"Communication in the profiled {steps}"
    body = f"{_profile_table(found)}{_traces(found, beside)}"
    if "links" not in drawn:
        return [section(title, body)]
    return [_figure("links", title, drawn), section("The profile in numbers, and its traces", body)]


def _profile_table(profile: ProfileSummary) -> str:
    """Return a table of the seconds per step on the link and exposed, by axis."""
    step = f"A step took {duration(profile.seconds)} while it was traced, which slows it down."
    if not profile.by_axis:
        return hint(f"{step} {NO_MESSAGES}")

    def mean_and_slowest(found: OverRanks) -> tuple[str, str]:
        where = f" (rank {found.slowest_rank})" if known(found.slowest) else ""
        return duration(found.mean), f"{duration(found.slowest)}{where}"

    def hidden(link: float | None, exposed: float | None) -> str:
        if link is None or exposed is None or not link > 0:
            return DASH
        return percent(max(0.0, link - exposed) / link)

    kind = f" Seconds on the link: {profile.link_seconds_are}." if profile.link_seconds_are else ""
    head = ("axis", "on the link", "slowest rank", "exposed", "slowest rank", "hidden behind computation")
    rows = [
        (escape(axis), *mean_and_slowest(link), *mean_and_slowest(exposed), hidden(link.mean, exposed.mean))
        for axis, (link, exposed) in profile.by_axis.items()
    ]
    return hint(f"Per step: the mean over ranks, and the slowest rank. {step}{kind}") + table(head, rows)


def _traces(profile: ProfileSummary, beside: Path) -> str:
    """Return how to open the traces, with links relative to the folder of the page."""
    if not profile.traces:
        return hint("The traces are not beside the run any more.")

    def link(trace: Path) -> str:
        return f'<a href="{escape(quote(Path(os.path.relpath(trace, beside)).as_posix()))}">{escape(trace.name)}</a>'

    links = ", ".join(map(link, profile.traces[:LINKED_TRACES]))
    more = len(profile.traces) - LINKED_TRACES
    planned = f" The planner's timeline of a step: {link(profile.predicted)}." if profile.predicted else ""
    return (
        f"<p>Traces: {links}{f' and {more} more beside them' if more > 0 else ''}.{planned} To look at one, go to "
        "ui.perfetto.dev, choose \N{LEFT DOUBLE QUOTATION MARK}Open trace file\N{RIGHT DOUBLE QUOTATION MARK} and pick "
        "it. Collectives and products have the labels of the ledger.</p>"
    )


# --- the grid


def draw_grid(shape: Shape) -> str:
    """Return the grid as HTML: its axes and, if there are few enough, every rank as a box.

    The first axis runs to the right, the second downwards; every further axis that is longer than 1 is a box around
    those before it. Boxes rather than a picture, so that they wrap on a narrow screen. The page's script colours the
    ranks that share an axis with the rank under the pointer.
    """
    beside = {axis: shape.group_sizes[axis] for axis in shape.message_axes if axis not in AXES}
    axes = "".join(
        f'<li style="--axis:{colour(axis)}"><b>{axis} = {size}</b> <span>{escape(page.CUTS[axis])}</span></li>'
        for axis, size in {**shape.sizes, **beside}.items()
    )
    about = f'<ul class="axes">{axes}</ul>' + hint(f"Rank order, fastest axis first: {', '.join(shape.order)}.")
    if shape.world > DRAWN_RANKS:
        return about + hint(f"{shape.world} ranks are too many to draw one by one.")
    (right, down), boxed = AXES[:2], [axis for axis in AXES[2:] if shape.sizes[axis] > 1]

    def boxes(around: Sequence[str], coords: dict[str, int]) -> str:
        if around:
            *inner, axis = around
            return "".join(
                f'<div class="block" style="--axis:var(--axis-{axis})"><h3>{axis} {place}</h3>'
                f"<div>{boxes(inner, {**coords, axis: place})}</div></div>"
                for place in range(shape.sizes[axis])
            )
        cells = "".join(
            _rank(shape, {**coords, right: column, down: row})
            for row in range(shape.sizes[down])
            for column in range(shape.sizes[right])
        )
        return f'<div class="cells" style="--columns:{shape.sizes[right]}">{cells}</div>'

    names = " ".join(AXES)
    ranks = f'<div class="ranks" data-axes="{names}">{boxes(boxed, dict.fromkeys(AXES, 0))}</div>'
    use = "Point at a rank to see the ranks that it shares an axis with: it communicates with these."
    return about + ranks + hint(use if shape.world > 1 else NO_MESSAGES)


def _rank(shape: Shape, coords: Mapping[str, int]) -> str:
    rank = shape.rank(coords)
    places = {**coords, **(shape.fold_coords(rank) if shape.folded else {})}
    title = f"rank {rank}: {', '.join(f'{axis}={place}' for axis, place in places.items())}"
    everywhere = " ".join(str(coords[axis]) for axis in AXES)
    inside = " ".join(f"{axis}{coords[axis]}" for axis in AXES[:2])
    return (
        f'<div class="rank" tabindex="0" data-coords="{everywhere}" title="{title}"><b>{rank}</b>'
        f"<small>{inside}</small></div>"
    )

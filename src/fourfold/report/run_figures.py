"""The figures of a run's page, each with the caption that is shown above it (see page.py for what a figure is)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import accumulate
from statistics import median
from typing import Any

from fourfold.axes import AXES
from fourfold.report.page import Figure, colour, plot_axis, plot_layout
from fourfold.report.run_data import LoggedStep, RunData
from fourfold.report.units import known, nbytes

POINTS = 4000
"""The most steps that are drawn; more of them make the page slow and cannot be told apart on a screen."""

SMOOTH_FROM = 20
"""The fewest logged steps for which a smoothed loss is drawn as well."""


def figures(run: RunData) -> dict[str, Figure]:
    """Return the figures by name, without those that the run has no data for."""
    drawn = thin(run.steps)
    by_step = {
        "loss": _loss(run, drawn),
        "norm": _norm(drawn),
        "throughput": _throughput(drawn),
        "time": _time(run, drawn),
    }
    made = {**by_step, "wire": _wire(run), "kept": _kept(run), "links": _links(run), "plan": _plan(run)}
    spread = [step.step for step in drawn] + list(run.evaluations) + list(run.skipped)
    for figure in filter(None, by_step.values()):
        # The same frame for all of them: plotly would leave a different margin for the marks of each.
        room = max(0.5, 0.012 * (max(spread) - min(spread)))
        figure["layout"]["xaxis"].update(range=[min(spread) - room, max(spread) + room])
        if max(spread) - min(spread) < 8:
            figure["layout"]["xaxis"].update(dtick=1)  # plotly would also mark step 1.5
    return {name: figure for name, figure in made.items() if figure is not None}


def thin(steps: Sequence[LoggedStep], limit: int = POINTS) -> list[LoggedStep]:
    """Return about `limit` steps at most: the lowest and the highest loss of every stretch, so no spike is lost."""
    if len(steps) <= limit:
        return list(steps)
    width = math.ceil(2 * len(steps) / limit)
    kept = []
    for start in range(0, len(steps), width):
        stretch = steps[start : start + width]
        # A loss that is not finite counts as the highest, so that a diverged step is kept.
        losses = [step.loss if step.loss is not None and known(step.loss) else math.inf for step in stretch]
        kept += [stretch[place] for place in sorted({losses.index(min(losses)), losses.index(max(losses))})]
    return kept


def smooth(values: Sequence[float | None], span: int) -> list[float | None]:
    """Return the mean of the `span` (odd) numbers around each one, and a gap where there is no number.

    Near the ends the mean is over fewer numbers, but always as many before as after, so it never lags.
    """
    numbers = [value for value in values if value is not None and known(value)]
    sums = [0.0, *accumulate(numbers)]
    means = []
    for place in range(len(numbers)):
        reach = min(span // 2, place, len(numbers) - 1 - place)
        means.append((sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1))
    left = iter(means)
    return [next(left) if known(value) else None for value in values]


def _loss(run: RunData, drawn: list[LoggedStep]) -> Figure | None:
    if not any(known(step.loss) for step in run.steps) and not run.evaluations:
        return None
    traces = [_line(drawn, "training", lambda step: step.loss, color="var(--faint)", width=1.2)]
    if len(run.steps) >= SMOOTH_FROM:
        span = 2 * max(2, len(run.steps) // 50) + 1
        smoothed = dict(
            zip((step.step for step in run.steps), smooth([step.loss for step in run.steps], span), strict=True)
        )
        traces.append(
            _line(drawn, f"mean of {span}", lambda step: smoothed[step.step], color="var(--strong)", width=2.4)
        )
    if run.evaluations:
        traces.append(_points(list(run.evaluations), list(run.evaluations.values()), "validation", "circle", size=8))
    entropy = run.number("unigram_entropy")
    if entropy is not None and known(entropy):
        line = {"color": "var(--muted)", "width": 1.5, "dash": "dash"}
        spread = [step.step for step in run.steps] + list(run.evaluations)
        ends = {"x": [min(spread) - 0.5, max(spread) + 0.5], "y": [entropy, entropy]}
        traces.append({"type": "scatter", "mode": "lines", "name": "unigram entropy", "line": line, **ends})
    traces += _marks(run)
    marks = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    layout = plot_layout(380, yaxis=plot_axis(tickformat=".3~g"), yaxis2=marks)
    caption = "Per token, in nats. Zooming along the steps zooms all figures."
    return {"traces": traces, "layout": layout, "log": True, "caption": caption}


def _marks(run: RunData) -> list[Figure]:
    """Mark skipped and diverged steps at the upper and lower edge, whatever the scale of the loss is."""
    skipped, diverged = list(run.skipped), [step.step for step in run.steps if step.diverged]
    places = [(skipped, 0.97, "skipped", "x"), (diverged, 0.03, "not finite", "triangle-up")]
    return [
        {**_points(steps, [height] * len(steps), name, symbol, size=9), "yaxis": "y2", "hovertemplate": "at %{x}"}
        for steps, height, name, symbol in places
        if steps
    ]


def _norm(drawn: list[LoggedStep]) -> Figure | None:
    norm = _line(drawn, "gradient norm", lambda step: step.grad_norm, color="var(--strong)")
    rate = _line(drawn, "learning rate", lambda step: step.learning_rate, color="var(--accent)")
    ticks = {"exponentformat": "e"}
    upper, lower = ("gradient norm", norm, {"tickformat": ".3~g"}), ("learning rate", [rate], ticks)
    return _two_panels(upper, lower, "The norm is before clipping.", log=True)


def _throughput(drawn: list[LoggedStep]) -> Figure | None:
    tokens = _line(drawn, "tokens per second", lambda step: step.tokens_per_second, color="var(--strong)")
    # HFU first: where the two are equal, the dots of MFU are drawn over it.
    hfu = _line(drawn, "HFU", lambda step: step.hfu, color="var(--strong)", width=2.4)
    mfu = _line(drawn, "MFU", lambda step: step.mfu, color="var(--accent)", dash="dot")
    dots, dash = "\u00b7\u00b7\u00b7", "\u2014"
    names = f"{_coloured(f'MFU {dots}', 'accent')} and {_coloured(f'HFU {dash}', 'strong')}"
    ticks: Figure = {"tickformat": ".3~%"}
    if not any(known(value) for value in (*hfu["y"], *mfu["y"])):
        names, ticks = "MFU and HFU: not known", {"showticklabels": False}
    upper, lower = ("tokens per second", tokens, {"tickformat": ".3~s"}), (names, [hfu, mfu], ticks)
    return _two_panels(upper, lower, "MFU and HFU are explained below.")


def _two_panels(
    upper: tuple[str, Figure, Figure], lower: tuple[str, list[Figure], Figure], caption: str, log: bool = False
) -> Figure | None:
    """Return two panels over the same steps; each has a heading, its lines and the ticks of its axis."""
    traces: list[Figure] = [upper[1], *({**trace, "yaxis": "y2"} for trace in lower[1])]
    if not any(known(value) for trace in traces for value in trace["y"]):
        return None
    layout = plot_layout(
        380,
        yaxis=plot_axis(domain=[0.56, 0.94], rangemode="tozero", **upper[2]),
        yaxis2=plot_axis(domain=[0, 0.38], rangemode="tozero", **lower[2]),
        annotations=[_heading(upper[0], 0.94), _heading(lower[0], 0.38)],
    )
    layout["xaxis"]["anchor"] = "y2"
    layout["showlegend"] = False
    return {"traces": traces, "layout": layout, "log": log, "caption": caption}


def _time(run: RunData, drawn: list[LoggedStep]) -> Figure | None:
    timed = [step for step in drawn if known(step.seconds)]
    if not timed:
        return None
    parts: list[tuple[str, str, Callable[[LoggedStep], float | None]]] = [
        ("compute", "var(--compute)", lambda step: step.compute_seconds)
    ]
    for axis in run.axes:
        exposed = lambda step, axis=axis: step.exposed_seconds.get(axis, 0.0)  # noqa: E731
        parts.append((f"exposed over {escape(axis)}", colour(axis), exposed))
    traces = []
    for name, shade, value in parts:
        area = {"stackgroup": "step", "fillcolor": shade, "hovertemplate": "%{y:.3s}s"}
        traces.append({**_line(timed, name, value, color=shade, width=0.5), **area})
    seconds = sorted(step.seconds for step in timed if step.seconds is not None)
    usual = 1.25 * seconds[int(0.98 * (len(seconds) - 1))]  # the slowest of 98% of the steps, and some room
    axis = plot_axis(tickformat="~s", ticksuffix="s", rangemode="tozero")
    caption = "On rank 0. Exposed is the time spent waiting for communication."
    if seconds[-1] > 2 * usual:  # otherwise a slow first step would make all others look flat
        axis["range"] = [0, usual]
        caption += " The slowest steps are above the frame; double-click to see them."
    return {"traces": traces, "layout": plot_layout(340, yaxis=axis), "caption": caption}


def median_wire_bytes(run: RunData) -> dict[str, float]:
    """Return the bytes that rank 0 sends per step, by axis: the median over the logged steps."""
    found = {axis: [step.wire_bytes[axis] for step in run.steps if axis in step.wire_bytes] for axis in run.axes}
    return {axis: median(values) for axis, values in found.items() if values}


def _wire(run: RunData) -> Figure | None:
    by_axis = median_wire_bytes(run)
    caption = "Bytes that rank 0 puts on the wire, by axis; median over the steps."
    return _bars(by_axis, [colour(axis) for axis in by_axis], caption) if by_axis else None


def _kept(run: RunData) -> Figure | None:
    kept = run.facts.get("kept_bytes")
    sizes = {policy: run.number("kept_bytes", policy) for policy in kept} if isinstance(kept, dict) else {}
    drawn = {policy: size for policy, size in sizes.items() if size is not None and known(size)}
    chosen = run.text("recompute")
    shades = ["var(--strong)" if policy == chosen else "var(--faint)" for policy in drawn]
    caption = f"Memory of activations by recompute policy. This run: {chosen or 'not known'}."
    return _bars(drawn, shades, caption) if drawn else None


def _links(run: RunData) -> Figure | None:
    """Draw the seconds per profiled step on the link of each axis, the hidden and the exposed part."""
    by_axis = {} if run.profile is None else run.profile.by_axis
    drawn = {axis: pair for axis, pair in by_axis.items() if all(known(found.mean) for found in pair)}
    if not any(link.mean for link, _ in drawn.values()):
        return None
    exposed = [waited.mean or 0.0 for _, waited in drawn.values()]
    # Waiting itself costs time, so the exposed time can be longer than the time on the link.
    hidden = [max(0.0, (link.mean or 0.0) - waited) for (link, _), waited in zip(drawn.values(), exposed, strict=True)]
    rows = [escape(axis) for axis in drawn]
    exposed_bars = _stacked("exposed", "exposed", rows, exposed, [colour(axis) for axis in drawn])
    figure = _stack(rows, [exposed_bars, _stacked("hidden", "hidden", rows, hidden, "var(--compute)")])
    figure["layout"]["showlegend"] = False
    caption = "Seconds per step on the link, mean over ranks. In colour: exposed. Grey: hidden behind computation."
    return {**figure, "caption": caption}


def predicted_axes(run: RunData) -> list[str]:
    """Return the axes that the planner predicted exposed time for."""
    return [axis for axis in AXES if run.number("predicted", "exposed_seconds", axis) is not None]


def predicted_and_measured(run: RunData, *path: str) -> tuple[float | None, float | None]:
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


def _plan(run: RunData) -> Figure | None:
    """Draw a step as predicted and as measured: computation, and what is exposed over each axis."""
    both = dict(zip(("predicted", "measured"), step_parts(run), strict=True))
    drawn = {kind: parts for kind, parts in both.items() if parts}
    if "predicted" not in drawn:
        return None
    bars = [_stacked("compute", "compute", list(drawn), [part["compute"] for part in drawn.values()], "var(--compute)")]
    for axis in predicted_axes(run):
        seconds = [parts.get(axis, 0.0) for parts in drawn.values()]
        bars.append(_stacked(f"exposed over {axis}", axis, list(drawn), seconds, colour(axis)))
    caption = "A step as the planner predicted it and as it was measured. In colour: exposed. Grey: computation."
    return {**_stack(list(drawn), bars), "caption": caption}


def _stacked(name: str, label: str, rows: list[str], seconds: list[float], shade: str | list[str]) -> Figure:
    """Return one part of stacked bars, a number of seconds for each row."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": seconds,
        "y": rows,
        "marker": {"color": shade},
        "hovertemplate": f"{label} %{{x:.3s}}s<extra></extra>",
    }


def _stack(rows: list[str], traces: list[Figure]) -> Figure:
    names = plot_axis(type="category", autorange="reversed", fixedrange=True, showgrid=False)
    seconds = plot_axis(tickformat="~s", ticksuffix="s", fixedrange=True, rangemode="tozero")
    bars = {"barmode": "stack", "bargap": 0.35, "hovermode": "closest"}
    return {"traces": traces, "layout": plot_layout(100 + 42 * len(rows), yaxis=names, xaxis=seconds, **bars)}


def _bars(sizes: dict[str, float], shades: list[str], caption: str) -> Figure:
    """Return one bar of bytes for each name, with its size beside it."""
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": list(sizes.values()),
        "y": [escape(name) for name in sizes],
        "text": [nbytes(size) for size in sizes.values()],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": shades},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    layout = plot_layout(
        70 + 42 * len(sizes), yaxis=plot_axis(type="category", autorange="reversed", fixedrange=True, showgrid=False)
    )
    # Room for the size beside the longest bar. No ticks: decimal ones would not be round numbers of MiB.
    layout["xaxis"] = plot_axis(visible=False, fixedrange=True, range=[0, 1.35 * max(*sizes.values(), 1)])
    layout.update(hovermode="closest", showlegend=False, bargap=0.35)
    layout["margin"].update(t=10, b=10)
    return {"traces": [trace], "layout": layout, "caption": caption}


def _line(drawn: list[LoggedStep], name: str, value: Callable[[LoggedStep], float | None], **line: Any) -> Figure:
    values = [value(step) for step in drawn]
    return {
        "type": "scatter",
        "mode": "lines" if len(drawn) > 1 else "markers",
        "name": name,
        "x": [step.step for step in drawn],
        "y": [value if known(value) else None for value in values],
        "line": {"width": 1.8, **line},
        "marker": {"color": line["color"]},
    }


def _points(x: list[int], y: list[float], name: str, symbol: str, size: int) -> Figure:
    marker = {"symbol": symbol, "size": size, "color": "var(--accent)"}
    return {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker}


def _heading(text: str, y: float) -> Figure:
    """Return the name of a panel at its upper left; a title beside the axis would take too much width on a phone."""
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": y, "yanchor": "bottom"}
    return {"text": text, "showarrow": False, "font": {"color": "var(--muted)", "size": 12}, **place}


def _coloured(text: str, shade: str) -> str:
    return f'<span style="color:var(--{shade})"><b>{text}</b></span>'

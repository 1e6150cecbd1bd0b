"""The figures of the page, as plain data for plotly.js: a list of traces and a layout each.

Nothing here draws or imports plotly. Colours are names of the page's style sheet (`var(--axis-x)`); the page's
script fills them in, so that the figures follow the reader's light or dark scheme. An axis has the same colour
wherever it appears.

Invariant: every value is JSON (no NaN), and text from the run's files is escaped, as plotly reads tags in text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import accumulate
from statistics import median
from typing import Any

from fourfold.axes import AXES
from fourfold.report.run import Run, Step
from fourfold.report.units import known, nbytes

POINTS = 4000
"""Steps drawn at most; more of them make a page slow and show nothing further."""

Figure = dict[str, Any]


def colour(axis: str) -> str:
    return f"var(--axis-{axis})" if axis in AXES else "var(--axis-other)"


def figures(run: Run) -> dict[str, Figure]:
    """By name, only those that the run has data for."""
    drawn = thin(run.steps)
    by_step = {
        "loss": _loss(run, drawn),
        "norm": _norm(drawn),
        "throughput": _throughput(drawn),
        "time": _time(run, drawn),
    }
    made = {**by_step, "wire": _wire(run), "kept": _kept(run), "links": _links(run)}
    spread = [step.step for step in drawn] + list(run.evaluations) + list(run.skipped)
    for figure in filter(None, by_step.values()):
        # the same frame for all of them: otherwise each leaves other room for its marks
        room = max(0.5, 0.012 * (max(spread) - min(spread)))
        figure["layout"]["xaxis"].update(range=[min(spread) - room, max(spread) + room])
        if max(spread) - min(spread) < 8:
            figure["layout"]["xaxis"].update(dtick=1)  # there is no step 1.5
    return {name: figure for name, figure in made.items() if figure is not None}


def thin(steps: Sequence[Step], limit: int = POINTS) -> list[Step]:
    """At most about `limit` steps: of every stretch those with the lowest and the highest loss, so no spike is lost."""
    if len(steps) <= limit:
        return list(steps)
    width = math.ceil(2 * len(steps) / limit)
    kept = []
    for start in range(0, len(steps), width):
        stretch = steps[start : start + width]
        lowest, highest = min(stretch, key=_height), max(stretch, key=_height)
        kept += [lowest] if lowest is highest else sorted([lowest, highest], key=lambda step: step.step)
    return kept


def _height(step: Step) -> float:
    return step.loss if step.loss is not None and known(step.loss) else math.inf


def smooth(values: Sequence[float | None], span: int) -> list[float | None]:
    """Mean of the `span` (odd) numbers around each, fewer near the ends but as many before as after, so it never lags.

    A gap where there is no number.
    """
    numbers = [value for value in values if value is not None and known(value)]
    sums = [0.0, *accumulate(numbers)]
    means = []
    for place in range(len(numbers)):
        reach = min(span // 2, place, len(numbers) - 1 - place)
        means.append((sums[place + reach + 1] - sums[place - reach]) / (2 * reach + 1))
    left = iter(means)
    return [next(left) if known(value) else None for value in values]


def _loss(run: Run, drawn: list[Step]) -> Figure | None:
    if not any(known(step.loss) for step in run.steps) and not run.evaluations:
        return None
    traces = [_line(drawn, "training", lambda step: step.loss, color="var(--faint)", width=1.2)]
    if len(run.steps) >= 20:
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
    return {"traces": traces, "layout": plot_layout(380, yaxis=plot_axis(tickformat=".3~g"), yaxis2=marks), "log": True}


def _marks(run: Run) -> list[Figure]:
    """Skipped and diverged steps, on the upper and lower edge whatever the scale of the loss is."""
    skipped, diverged = list(run.skipped), [step.step for step in run.steps if step.diverged]
    places = [(skipped, 0.97, "skipped", "x"), (diverged, 0.03, "not finite", "triangle-up")]
    return [
        {**_points(steps, [height] * len(steps), name, symbol, size=9), "yaxis": "y2", "hovertemplate": "at %{x}"}
        for steps, height, name, symbol in places
        if steps
    ]


def _norm(drawn: list[Step]) -> Figure | None:
    norm = _line(drawn, "gradient norm", lambda step: step.grad_norm, color="var(--strong)")
    rate = _line(drawn, "learning rate", lambda step: step.learning_rate, color="var(--accent)")
    ticks = {"exponentformat": "e"}
    return _two_panels(("gradient norm", norm, {"tickformat": ".3~g"}), ("learning rate", [rate], ticks), log=True)


def _throughput(drawn: list[Step]) -> Figure | None:
    tokens = _line(drawn, "tokens per second", lambda step: step.tokens_per_second, color="var(--strong)")
    # HFU first: where the two are equal the dots of MFU lie on top of it
    hfu = _line(drawn, "HFU", lambda step: step.hfu, color="var(--strong)", width=2.4)
    mfu = _line(drawn, "MFU", lambda step: step.mfu, color="var(--accent)", dash="dot")
    dots, dash = "\u00b7\u00b7\u00b7", "\u2014"
    names = f"{_coloured(f'MFU {dots}', 'accent')} and {_coloured(f'HFU {dash}', 'strong')}"
    ticks: Figure = {"tickformat": ".3~%"}
    if not any(known(value) for value in (*hfu["y"], *mfu["y"])):
        names, ticks = "MFU and HFU: not known", {"showticklabels": False}
    return _two_panels(("tokens per second", tokens, {"tickformat": ".3~s"}), (names, [hfu, mfu], ticks))


def _two_panels(
    upper: tuple[str, Figure, Figure], lower: tuple[str, list[Figure], Figure], log: bool = False
) -> Figure | None:
    """A line above and some below, on the same steps; each panel has a heading, its lines and the ticks of its axis."""
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
    return {"traces": traces, "layout": layout, "log": log}


def _time(run: Run, drawn: list[Step]) -> Figure | None:
    timed = [step for step in drawn if known(step.seconds)]
    if not timed:
        return None
    parts: list[tuple[str, str, Callable[[Step], float | None]]] = [
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
    usual = 1.25 * seconds[int(0.98 * (len(seconds) - 1))]
    axis = plot_axis(tickformat="~s", ticksuffix="s", rangemode="tozero")
    if seconds[-1] > 2 * usual:  # a slow first step would press all others flat
        axis["range"] = [0, usual]
    return {"traces": traces, "layout": plot_layout(340, yaxis=axis), "clipped": "range" in axis}


def median_wire_bytes(run: Run) -> dict[str, float]:
    """Bytes that rank 0 sends in a step, by axis: the median over the logged steps."""
    found = {axis: [step.wire_bytes[axis] for step in run.steps if axis in step.wire_bytes] for axis in run.axes}
    return {axis: median(values) for axis, values in found.items() if values}


def _wire(run: Run) -> Figure | None:
    by_axis = median_wire_bytes(run)
    return _bars(by_axis, [colour(axis) for axis in by_axis]) if by_axis else None


def _kept(run: Run) -> Figure | None:
    kept = run.facts.get("kept_bytes")
    sizes = {policy: run.number("kept_bytes", policy) for policy in kept} if isinstance(kept, dict) else {}
    drawn = {policy: size for policy, size in sizes.items() if size is not None and known(size)}
    chosen = run.text("recompute")
    shades = ["var(--strong)" if policy == chosen else "var(--faint)" for policy in drawn]
    return _bars(drawn, shades) if drawn else None


def _links(run: Run) -> Figure | None:
    """Seconds of a profiled step on the link of each axis, the hidden part and the exposed one."""
    by_axis = {} if run.profile is None else run.profile.by_axis
    drawn = {axis: pair for axis, pair in by_axis.items() if all(known(found.mean) for found in pair)}
    if not any(link.mean for link, _ in drawn.values()):
        return None
    exposed = [waited.mean or 0.0 for _, waited in drawn.values()]
    # a wait costs something itself: it may take longer than what it waits for was on the link
    hidden = [max(0.0, (link.mean or 0.0) - waited) for (link, _), waited in zip(drawn.values(), exposed, strict=True)]
    shades = ([colour(axis) for axis in drawn], "var(--compute)")
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "x": values,
            "y": [escape(axis) for axis in drawn],
            "marker": {"color": shade},
            "hovertemplate": f"{name} %{{x:.3s}}s<extra></extra>",
        }
        for name, values, shade in zip(("exposed", "hidden"), (exposed, hidden), shades, strict=True)
    ]
    names = plot_axis(type="category", autorange="reversed", fixedrange=True, showgrid=False)
    seconds = plot_axis(tickformat="~s", ticksuffix="s", fixedrange=True, rangemode="tozero")
    bars = {"barmode": "stack", "bargap": 0.35, "hovermode": "closest", "showlegend": False}
    return {"traces": traces, "layout": plot_layout(100 + 42 * len(drawn), yaxis=names, xaxis=seconds, **bars)}


def _bars(sizes: dict[str, float], shades: list[str]) -> Figure:
    """One bar of bytes for each name, its size written beside it."""
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
    # room for the size beside the longest bar; bytes are no decimal numbers, so no ticks
    layout["xaxis"] = plot_axis(visible=False, fixedrange=True, range=[0, 1.35 * max(*sizes.values(), 1)])
    layout.update(hovermode="closest", showlegend=False, bargap=0.35)
    layout["margin"].update(t=10, b=10)
    return {"traces": [trace], "layout": layout}


def _line(drawn: list[Step], name: str, value: Callable[[Step], float | None], **line: Any) -> Figure:
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


def plot_axis(**more: Any) -> Figure:
    quiet = {"gridcolor": "var(--line)", "zerolinecolor": "var(--line)", "linecolor": "var(--line)"}
    return {**quiet, "automargin": True, **more}


def _heading(text: str, y: float) -> Figure:
    """The name of a panel at its upper left: a title beside the axis would cost width on a phone."""
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": y, "yanchor": "bottom"}
    return {"text": text, "showarrow": False, "font": {"color": "var(--muted)", "size": 12}, **place}


def _coloured(text: str, shade: str) -> str:
    return f'<span style="color:var(--{shade})"><b>{text}</b></span>'


def plot_layout(height: int, **more: Any) -> Figure:
    return {
        "height": height,
        "margin": {"l": 44, "r": 12, "t": 30, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "var(--text)"},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--text)"}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--muted)", "activecolor": "var(--text)"},
        "showlegend": True,
        "uirevision": "keep",
        "xaxis": plot_axis(title={"text": "step", "standoff": 6}, separatethousands=True, exponentformat="none"),
        **more,
    }

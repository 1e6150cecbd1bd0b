"""What the planner said of a run beside what the run measured: a table and a figure, from `run.json`.

Numbers that are absent, or are none, are dashes: a run that ended early was predicted and not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape

from fourfold.axes import AXES
from fourfold.report.figures import Figure, colour, plot_axis, plot_layout
from fourfold.report.run import Run
from fourfold.report.units import DASH, duration, known, nbytes, plain

Shown = Callable[[float | None], str]


def was_planned(run: Run) -> bool:
    """Whether the run knows of a prediction, or why there is none."""
    return isinstance(run.facts.get("predicted"), Mapping)


def plan_table(run: Run) -> str:
    """Predicted, measured, ratio."""
    why = run.facts["predicted"].get("unpriced")
    if why is not None:
        return f'<p class="hint">This run was not priced: {escape(str(why))}.</p>'
    head = "".join(f"<th>{name}</th>" for name in ("of a step", "predicted", "measured", "measured / predicted"))
    body = "".join(_rows(run))
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    return f'{table}<p class="hint">{escape(" ".join(_notes(run)))}</p>'


def plan_figure(run: Run) -> Figure | None:
    """A step as predicted and as measured: computation, and what is exposed over each axis."""
    both = dict(zip(("predicted", "measured"), _parts(run), strict=True))
    drawn = {kind: parts for kind, parts in both.items() if parts}
    if "predicted" not in drawn:
        return None
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name if name == "compute" else f"exposed over {name}",
            "x": [parts.get(name, 0.0) for parts in drawn.values()],
            "y": list(drawn),
            "marker": {"color": "var(--compute)" if name == "compute" else colour(name)},
            "hovertemplate": f"{name} %{{x:.3s}}s<extra></extra>",
        }
        for name in ("compute", *_axes(run))
    ]
    names = plot_axis(type="category", autorange="reversed", fixedrange=True, showgrid=False)
    ticks = plot_axis(tickformat="~s", ticksuffix="s", fixedrange=True, rangemode="tozero")
    bars = {"barmode": "stack", "bargap": 0.35, "hovermode": "closest"}
    return {"traces": traces, "layout": plot_layout(100 + 42 * len(drawn), yaxis=names, xaxis=ticks, **bars)}


def _axes(run: Run) -> list[str]:
    return [axis for axis in AXES if run.number("predicted", "exposed_seconds", axis) is not None]


def _rows(run: Run) -> Iterator[str]:
    _, measured = _parts(run)
    yield _row("seconds", *_both(run, "seconds"), duration)
    yield _row("computing", run.number("predicted", "compute_seconds"), measured.get("compute"), duration)
    for axis in _axes(run):
        yield _row(f"exposed over {axis}", *_both(run, "exposed_seconds", axis), duration)
        # only a profile knows how long a link was busy
        profiled = run.profile.by_axis.get(axis) if run.profile is not None else None
        on_link = profiled[0].mean if profiled is not None else None
        yield _row(f"on the link of {axis}", run.number("predicted", "link_seconds", axis), on_link, duration)
    alike = run.number("compared", "peak_memory_bytes", "ratio") is not None  # the run says whether both are of tensors
    yield _row("peak memory", *_both(run, "peak_memory_bytes"), nbytes, alike=alike)
    kinds = run.facts["predicted"].get("memory_bytes")
    for kind in kinds if isinstance(kinds, Mapping) else ():
        held = run.number("predicted", "memory_bytes", kind)
        if held:
            yield _row(f"of it {kind.replace('_', ' ')}", held, None, nbytes)


def _row(name: str, predicted: float | None, measured: float | None, shown: Shown, *, alike: bool = True) -> str:
    ratio = DASH
    if alike and predicted and measured is not None and known(predicted) and known(measured):
        ratio = plain(measured / predicted, 3)
    return f"<tr><td>{escape(name)}</td><td>{shown(predicted)}</td><td>{shown(measured)}</td><td>{ratio}</td></tr>"


def _both(run: Run, *path: str) -> tuple[float | None, float | None]:
    """A number as predicted and as measured."""
    return run.number("predicted", *path), run.number("compared", *path, "measured")


def _parts(run: Run) -> tuple[dict[str, float], dict[str, float]]:
    """Computation and exposed seconds by axis, predicted and measured; nothing where a step's seconds are not known."""
    exposed = {axis: _both(run, "exposed_seconds", axis) for axis in _axes(run)}
    found: list[dict[str, float]] = []
    for place, whole in enumerate(_both(run, "seconds")):
        waits = {axis: pair[place] or 0.0 for axis, pair in exposed.items()}
        computes = max(0.0, (whole or 0.0) - sum(waits.values()))
        found.append({"compute": computes, **waits} if known(whole) else {})
    return found[0], found[1]


def _notes(run: Run) -> list[str]:
    """On which machine, over which steps, and what to know of both."""
    compared = run.facts.get("compared")
    found = compared if isinstance(compared, Mapping) else run.facts["predicted"]
    said = [f"Predicted on the machine {found.get('machine', DASH)}."]
    steps = found.get("steps")
    if isinstance(steps, list) and steps:
        said.append(f"Measured: median of steps {', '.join(map(str, steps))} on rank 0.")
    elif not isinstance(compared, Mapping):
        said.append("The run ended before enough of its steps were measured.")
    notes = found.get("notes")
    if isinstance(notes, list) and notes:
        said.append(f"Note: {'; '.join(map(str, notes))}.")
    return said

"""The page of a run: one HTML file with key figures, plots, the plan beside the run, the profile and the grid.

The page needs nothing else: plotly.js, style and script are in it, and its content security policy forbids every
request. It links only to the traces of a profile, which are beside it. Everything that comes from the run's files is
escaped here or in the part that made it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from urllib.parse import quote

from fourfold.axes import AXES
from fourfold.grid import Shape
from fourfold.report.page import (
    CUTS,
    Figure,
    card,
    colour,
    frame,
    header,
    hint,
    plot,
    plotly_js,
    section,
    table,
    write_page,
)
from fourfold.report.run_data import OverRanks, ProfileSummary, RunData, read_run
from fourfold.report.run_figures import (
    POINTS,
    figures,
    median_wire_bytes,
    predicted_and_measured,
    predicted_axes,
    step_parts,
)
from fourfold.report.units import DASH, count, duration, known, nbytes, percent, plain

LINKED_TRACES = 16
"""The most traces that are linked one by one; a reader opens two or three."""

DRAWN_RANKS = 64
"""The most ranks that are drawn one by one; above that only the sizes of the axes are shown."""

TIMES = "\N{MULTIPLICATION SIGN}"
MFU = f"MFU = model FLOPs per token {TIMES} tokens/s / (ranks {TIMES} peak FLOP/s)"
HFU = "HFU = the same with hardware FLOPs per token: model FLOPs plus the FLOPs that recompute repeats"


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of the run folder `run` to `out` (by default `report.html` in the folder); return its path.

    FileNotFoundError means that the folder is not a run. A run without a single step gives a page that says so. The
    file is written completely or not at all.
    """
    out = Path(run) / "report.html" if out is None else Path(out)
    text = run_page(read_run(Path(run)), plotly_js(), out.parent.resolve())
    return write_page(out, text, example="report.html")


def run_page(run: RunData, plotly_js: str, beside: Path) -> str:
    """Return the HTML of the page, for a file in the folder `beside`."""
    drawn = figures(run)
    facts = [
        run.text("device"),
        _ranks(run),
        f"{count(run.number('parameters'))} parameters",
        f"started {run.text('started')}" if run.text("started") else "",
        f"Fourfold {run.text('fourfold')}" if run.text("fourfold") else "",
        f"torch {run.text('torch')}" if run.text("torch") else "",
    ]
    silent = "Nothing recorded." if run.shape.world > 1 else "With one rank nothing is communicated."
    body = [
        header(f"Run {run.name}", run.text("model"), str(run.shape), facts),
        *(f'<p class="note">{escape(note)}</p>' for note in _notes(run)),
        '<noscript><p class="note">The figures need JavaScript; the numbers below do not.</p></noscript>',
        key_figures(run),
        _figure("loss", "Loss", drawn),
        '<div class="pair">',
        _figure("norm", "Gradient norm and learning rate", drawn),
        _figure("throughput", "Throughput", drawn),
        "</div>",
        _figure("time", "Step time", drawn),
        '<div class="pair">',
        _figure("wire", "Sent per step", drawn, silent),
        _figure("kept", "Kept for backward", drawn),
        "</div>",
        *_plan(run, drawn),
        *_profile(run, drawn, beside),
        section("The grid", draw_grid(run.shape)),
        section(f"Skipped steps ({len(run.skipped)})", _skipped(run)),
        section("MFU and HFU", utilisation(run)),
        f"<details><summary>config.toml</summary><pre>{escape(run.config)}</pre></details>",
    ]
    title = f"{run.text('model')} on {run.shape}"
    return frame(title, "\n".join(body), drawn, plotly_js, script="run_page.js")


def _ranks(run: RunData) -> str:
    return f"{run.shape.world} rank{'s' if run.shape.world > 1 else ''}"


def _notes(run: RunData) -> list[str]:
    notes = list(run.notes)
    if run.steps and run.end is None:
        notes.append("The run recorded no end: it is still running, or was killed.")
    if len(run.steps) > POINTS:
        notes.append(
            f"{len(run.steps):,} steps are logged; the figures draw the lowest and highest loss of each stretch."
        )
    return notes


def _figure(
    name: str, title: str, drawn: Mapping[str, Figure], absent: str = "Nothing recorded.", more: str = ""
) -> str:
    """Return the section of a figure; `absent` is what to say if the run has no data for it."""
    if name not in drawn:
        return section(title, hint(absent) + more)
    button = f'<button type="button" data-log="{name}" aria-pressed="false">log scale</button>'
    body = hint(drawn[name]["caption"]) + plot(name, drawn[name]) + more
    return section(title, body, button if drawn[name].get("log") else "")


def _skipped(run: RunData) -> str:
    if not run.skipped:
        return hint("None recorded.")
    rows = [
        (f"{step:,}", "<br>".join(map(escape, parameters)) or "not recorded")
        for step, parameters in run.skipped.items()
    ]
    return table(("step", "parameters with a gradient that was not finite"), rows)


def key_figures(run: RunData) -> str:
    """Return the strip of cards at the top of the page."""
    cards = [
        _steps(run),
        _final_loss(run),
        _validation(run),
        card("Unigram entropy", plain(run.number("unigram_entropy")), "the loss of guessing by token frequency"),
        card("Tokens per second", count(_median(run, "tokens_per_second")), "median, all ranks"),
        card("MFU", percent(_median(run, "mfu")), "median", MFU),
        card("HFU", percent(_median(run, "hfu")), "median", HFU),
        _step_time(run),
        card("Peak memory", nbytes(max(_known(run, "peak_memory_bytes"), default=None)), "on rank 0"),
        _wire(run),
    ]
    return f'<dl class="cards">{"".join(cards)}</dl>'


def _steps(run: RunData) -> str:
    done = run.steps[-1].step if run.steps else 0
    planned, each = run.number("steps"), run.number("tokens_per_step")
    of = f" / {planned:,.0f}" if planned is not None and known(planned) else ""
    tokens = f"{count(done * each)} tokens, " if each is not None else ""
    return card("Steps", f"{done:,}{of}", f"{tokens}{run.end if run.end is not None else 'no end recorded'}")


def _final_loss(run: RunData) -> str:
    logged = [step for step in run.steps if step.loss is not None]
    if not logged:
        return card("Final loss", DASH, "")
    last = logged[-1]
    return card("Final loss", "not finite" if last.diverged else plain(last.loss), f"training, step {last.step:,}")


def _validation(run: RunData) -> str:
    if not run.evaluations:
        return card("Best validation loss", DASH, "no evaluation")
    step = min(run.evaluations, key=run.evaluations.__getitem__)
    return card("Best validation loss", plain(run.evaluations[step]), f"step {step:,}")


def _step_time(run: RunData) -> str:
    shares = [
        sum(step.exposed_seconds.values()) / step.seconds
        for step in run.steps
        if step.seconds is not None and known(step.seconds) and step.seconds > 0
    ]
    exposed = f"median, {percent(median(shares))} exposed" if shares else ""
    tip = "exposed: communication that is not hidden behind computation"
    return card("Step time", duration(_median(run, "seconds")), exposed, tip)


def _wire(run: RunData) -> str:
    found = median_wire_bytes(run)
    parts = " ".join(
        f'<span style="--axis:{colour(axis)}"><i></i>{escape(axis)}&nbsp;{nbytes(size)}</span>'
        for axis, size in found.items()
    )
    total = nbytes(sum(found.values())) if found else DASH
    detail = f'<span class="by-axis">{parts}</span>' if found else "nothing recorded"
    return f'<div class="wide"><dt>Sent per step</dt><dd>{total}</dd><dd class="detail">{detail}</dd></div>'


def _median(run: RunData, name: str) -> float | None:
    values = _known(run, name)
    return median(values) if values else None


def _known(run: RunData, name: str) -> list[float]:
    """Return the finite values of a field of the logged steps."""
    return [value for value in (getattr(step, name) for step in run.steps) if known(value)]


def utilisation(run: RunData) -> str:
    """Return the footnote that says what MFU and HFU are, with the numbers of this run."""

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


def _plan(run: RunData, drawn: Mapping[str, Figure]) -> list[str]:
    """Return what the planner predicted beside what the run measured, if there was a prediction.

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
    return [_figure("plan", "Plan and run", drawn, more=more) if "plan" in drawn else section("Plan and run", more)]


def _plan_rows(run: RunData) -> Iterator[Sequence[str]]:
    _, measured = step_parts(run)
    yield _plan_row("seconds", *predicted_and_measured(run, "seconds"), duration)
    yield _plan_row("computation", run.number("predicted", "compute_seconds"), measured.get("compute"), duration)
    for axis in predicted_axes(run):
        yield _plan_row(f"exposed over {axis}", *predicted_and_measured(run, "exposed_seconds", axis), duration)
        # Only a profile measures how long a link was busy.
        profiled = run.profile.by_axis.get(axis) if run.profile is not None else None
        on_link = profiled[0].mean if profiled is not None else None
        yield _plan_row(f"on the link of {axis}", run.number("predicted", "link_seconds", axis), on_link, duration)
    # The trainer gives a ratio only where both numbers count the same memory.
    alike = run.number("compared", "peak_memory_bytes", "ratio") is not None
    yield _plan_row("peak memory", *predicted_and_measured(run, "peak_memory_bytes"), nbytes, alike=alike)
    kinds = run.facts["predicted"].get("memory_bytes")
    for kind in kinds if isinstance(kinds, Mapping) else ():
        size = run.number("predicted", "memory_bytes", kind)
        if size:
            yield _plan_row(f"of that, {kind.replace('_', ' ')}", size, None, nbytes)


def _plan_row(
    name: str,
    predicted: float | None,
    measured: float | None,
    shown: Callable[[float | None], str],
    *,
    alike: bool = True,
) -> Sequence[str]:
    ratio = DASH
    if alike and predicted and measured is not None and known(predicted) and known(measured):
        ratio = plain(measured / predicted, 3)
    return escape(name), shown(predicted), shown(measured), ratio


def _plan_notes(run: RunData) -> list[str]:
    """Return on which machine and over which steps the two were compared, and the planner's own notes."""
    compared = run.facts.get("compared")
    found = compared if isinstance(compared, Mapping) else run.facts["predicted"]
    notes = [f"The prediction is for the machine {found.get('machine', DASH)}."]
    steps = found.get("steps")
    if isinstance(steps, list) and steps:
        notes.append(f"Measured is the median of steps {', '.join(map(str, steps))} on rank 0.")
    elif not isinstance(compared, Mapping):
        notes.append("The run ended before enough of its steps were measured.")
    more = found.get("notes")
    if isinstance(more, list) and more:
        notes.append(f"Note: {'; '.join(map(str, more))}.")
    return notes


def _profile(run: RunData, drawn: Mapping[str, Figure], beside: Path) -> list[str]:
    """Return the profile, if steps were profiled."""
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
    """Return the seconds of a step on the link and exposed, by axis."""
    step = f"A step took {duration(profile.seconds)} while it was traced, which slows it down."
    if not profile.by_axis:
        return hint(f"{step} With one rank nothing is communicated.")
    kind = f" Seconds on the link: {profile.link_seconds_are}." if profile.link_seconds_are else ""
    head = ("axis", "on the link", "slowest rank", "exposed", "slowest rank", "hidden behind computation")
    rows = [
        (escape(axis), *_mean_and_slowest(link), *_mean_and_slowest(exposed), _hidden(link, exposed))
        for axis, (link, exposed) in profile.by_axis.items()
    ]
    return hint(f"Per step: the mean over ranks, and the slowest rank. {step}{kind}") + table(head, rows)


def _mean_and_slowest(found: OverRanks) -> tuple[str, str]:
    where = f" (rank {found.slowest_rank})" if known(found.slowest) else ""
    return duration(found.mean), f"{duration(found.slowest)}{where}"


def _hidden(link: OverRanks, exposed: OverRanks) -> str:
    if link.mean is None or exposed.mean is None or not link.mean > 0:
        return DASH
    return percent(max(0.0, link.mean - exposed.mean) / link.mean)


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


def draw_grid(shape: Shape) -> str:
    """Return the grid as HTML: its axes and, if there are few enough, every rank as a box.

    The first axis runs to the right, the second downwards; every further axis that is longer than 1 is a box around
    those before it. Boxes rather than a picture, so that they wrap on a narrow screen. The page's script colours the
    ranks that share an axis with the rank under the pointer.
    """
    axes = "".join(
        f'<li style="--axis:{colour(axis)}"><b>{axis} = {size}</b> <span>{escape(CUTS[axis])}</span></li>'
        for axis, size in shape.sizes.items()
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
    return about + ranks + hint(use if shape.world > 1 else "With one rank nothing is communicated.")


def _rank(shape: Shape, coords: Mapping[str, int]) -> str:
    rank = shape.rank(coords)
    title = f"rank {rank}: {', '.join(f'{axis}={coords[axis]}' for axis in AXES)}"
    everywhere = " ".join(str(coords[axis]) for axis in AXES)
    inside = " ".join(f"{axis}{coords[axis]}" for axis in AXES[:2])
    return (
        f'<div class="rank" tabindex="0" data-coords="{everywhere}" title="{title}"><b>{rank}</b>'
        f"<small>{inside}</small></div>"
    )

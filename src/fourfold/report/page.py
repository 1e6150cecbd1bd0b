"""One HTML page of a run: puts the parts together and writes the file.

The page is complete in itself: plotly.js, style and script stand in it, and its content security policy forbids
every request. It links to nothing but the traces of a profile, which lie beside it. Everything that comes from the
run's files is escaped here or in the part that made it.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from fourfold.report.figures import POINTS, figures
from fourfold.report.html import frame, plotly_js, section, write_page
from fourfold.report.predicted import plan_figure, plan_table, was_planned
from fourfold.report.profile import profile_table, traces
from fourfold.report.ranks import draw_grid
from fourfold.report.run import Run, read_run
from fourfold.report.summary import key_figures, ranks, utilisation
from fourfold.report.units import count


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of the run folder `run` to `out` (default: `report.html` in the folder); returns its path.

    FileNotFoundError: the folder is no run. A run without a single step gives a page that says so. The file
    appears whole or not at all.
    """
    out = Path(run) / "report.html" if out is None else Path(out)
    text = page(read_run(Path(run)), plotly_js(), out.parent.resolve())
    return write_page(out, text, example="report.html")


def page(run: Run, plotly_js: str, beside: Path) -> str:
    """The HTML of the page, for a file in the folder `beside`."""
    drawn = figures(run)
    planned = plan_figure(run) if was_planned(run) else None
    if planned is not None:
        drawn["plan"] = planned
    body = f"""{_header(run)}
{_notes(run)}
<noscript><p class="note">The figures need JavaScript; the numbers below do not.</p></noscript>
{key_figures(run)}
{_sections(run, drawn, beside)}"""
    return frame(f"{run.text('model')} on {run.shape}", body, drawn, plotly_js, script="page.js")


def _header(run: Run) -> str:
    facts = [
        run.text("device"),
        ranks(run),
        f"{count(run.number('parameters'))} parameters",
        f"started {run.text('started')}" if run.text("started") else "",
        f"Fourfold {run.text('fourfold')}" if run.text("fourfold") else "",
        f"torch {run.text('torch')}" if run.text("torch") else "",
    ]
    shown = "".join(f"<li>{escape(fact)}</li>" for fact in facts if fact)
    return (
        f'<header><p class="run">Run {escape(run.name)}</p>'
        f"<h1>{escape(run.text('model'))} <span>on {escape(str(run.shape))}</span></h1>"
        f'<ul class="facts">{shown}</ul></header>'
    )


def _notes(run: Run) -> str:
    notes = list(run.notes)
    if run.steps and run.end is None:
        notes.append("The run recorded no end: it is still running, or was killed.")
    if len(run.steps) > POINTS:
        notes.append(
            f"{len(run.steps):,} steps are logged; the figures draw the lowest and highest loss of each stretch."
        )
    return "".join(f'<p class="note">{escape(note)}</p>' for note in notes)


def _sections(run: Run, drawn: dict[str, Any], beside: Path) -> str:
    clipped = drawn.get("time", {}).get("clipped")
    slow = " The slowest stand above the frame; double-click to see them." if clipped else ""
    chosen = escape(run.text("recompute"))
    silent = "Nothing recorded." if run.shape.world > 1 else "One rank: nothing is communicated."
    return "\n".join(
        [
            _figure("loss", "Loss", "Per token, in nats. Zooming along the steps moves all figures.", drawn),
            '<div class="pair">',
            _figure("norm", "Gradient norm and learning rate", "The norm before clipping.", drawn),
            _figure("throughput", "Throughput", "Utilisation is explained below.", drawn),
            "</div>",
            _figure("time", "Time of a step", f"Rank 0. Exposed: waiting for communication.{slow}", drawn),
            '<div class="pair">',
            _figure("wire", "Sent per step", "Bytes on the wire from rank 0, by axis; median.", drawn, silent),
            _figure("kept", "Kept for backward", f"By recompute policy. This run: {chosen or 'not known'}.", drawn),
            "</div>",
            *_plan(run, drawn),
            *_profile(run, drawn, beside),
            section("The grid", draw_grid(run.shape)),
            section(f"Skipped steps ({len(run.skipped)})", _skipped(run)),
            section("MFU and HFU", utilisation(run)),
            f"<details><summary>config.toml</summary><pre>{escape(run.config)}</pre></details>",
        ]
    )


def _plan(run: Run, drawn: dict[str, Any]) -> list[str]:
    """What was predicted, where something was, beside what was measured."""
    if not was_planned(run):
        return []
    if "plan" not in drawn:
        return [section("Plan and run", plan_table(run))]
    caption = "A step as the planner predicted it and as it was measured. In colour: exposed; grey: computing."
    return [_figure("plan", "Plan and run", caption, drawn, more=plan_table(run))]


def _profile(run: Run, drawn: dict[str, Any], beside: Path) -> list[str]:
    """What was profiled, where something was."""
    found = run.profile
    if found is None:
        return []
    steps = f"step {found.first:,}" if found.first == found.last else f"steps {found.first:,} to {found.last:,}"
    title = f"Communication in {steps}, profiled"
    table = f"{profile_table(found)}{traces(found, beside)}"
    if "links" not in drawn:
        return [section(title, table)]
    caption = "Seconds of a step on the link, mean over ranks. In colour: exposed; grey: hidden behind computation."
    return [_figure("links", title, caption, drawn), section("The same in numbers, and the traces", table)]


def _figure(
    name: str, title: str, caption: str, drawn: dict[str, Any], absent: str = "Nothing recorded.", more: str = ""
) -> str:
    if name not in drawn:
        return section(title, f'<p class="hint">{absent}</p>')
    button = f'<button type="button" data-log="{name}" aria-pressed="false">log scale</button>'
    plot = f'<div class="plot" id="{name}" style="height:{drawn[name]["layout"]["height"]}px"></div>'
    return section(title, f'<p class="hint">{caption}</p>{plot}{more}', button if drawn[name].get("log") else "")


def _skipped(run: Run) -> str:
    if not run.skipped:
        return '<p class="hint">None recorded.</p>'
    rows = "".join(
        f"<tr><td>{step:,}</td><td>{'<br>'.join(map(escape, parameters)) or 'not recorded'}</td></tr>"
        for step, parameters in run.skipped.items()
    )
    head = "<thead><tr><th>step</th><th>parameter whose gradient was not finite</th></tr></thead>"
    return f'<div class="scroll"><table>{head}<tbody>{rows}</tbody></table></div>'

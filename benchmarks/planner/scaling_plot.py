"""The plots of the scaling study: SVG that is identical, byte for byte, for the same results and matplotlib.

Each series has two panels (weak: seconds per batch and MFU; strong: tokens per second and MFU). Two more plots, weak
and strong, show parallel efficiency, with simulated clusters and measured runs of a few ranks on the same axes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.planner.published_runs import ABLATED, ABLATION, POINTS
from benchmarks.planner.scaling_measured import KINDS, Measured, best_of_each
from benchmarks.planner.scaling_sides import SIDES, Case, mfu_of
from benchmarks.shared.plots import INK, drawing, save

STYLES = {
    "Fourfold": ("#d1410c", "o"),
    "Megatron": ("#0b62a8", "s"),
    "FSDP": ("#7a7a7a", "^"),
    "HSDP": ("#0a8a5f", "v"),
    "FSDP x TP": ("#a8479a", "D"),
    "published 4D": ("#b07d00", "P"),
}
MEASURED_AS = {
    "fourfold": "Fourfold", "FSDP2": "FSDP", "HSDP2": "HSDP", "FSDP2 x TP": "FSDP x TP", "TP": "Megatron",
    "replicated": "published 4D",
}  # fmt: skip
"""The simulated side that gives a measured side its colour; measured sides without one are dark."""
ROOM = 3.2
"""Octaves on the right that are reserved for the names of curves."""
APART = 0.055
"""The least distance between names, as a share of a plot's height."""
WIDTH = 0.15
"""Names whose curves end closer together than this share of a plot's width may overlap."""

Curve = list[tuple[int, float]]


def plot_all(found: Sequence[Mapping[str, Any]], measured: Sequence[Measured], folder: Path) -> list[Path]:
    """Draw every series of the results, and both plots of efficiency."""
    written = []
    with drawing():
        for name, cases in series_of(found).items():
            written.append(save(_two_panels(cases), folder / f"scaling-{name}.svg"))
        for kind in KINDS:
            cases = next((cases for cases in series_of(found).values() if cases[0]["kind"] == kind), [])
            runs = best_of_each(list(measured), kind)
            written.append(save(_efficiency(kind, cases, runs), folder / f"scaling-efficiency-{kind}.svg"))
    return written


def series_of(found: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the cases of each series, by the name of their plot."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    for case in found:
        if case["kind"] in KINDS:
            model = f"{case['model']}-" if case["kind"] == "strong" else ""
            series.setdefault(f"{case['kind']}-{model}{case['machine']}", []).append(case)
    return series


def curve_of(cases: Sequence[Mapping[str, Any]], side: str, value: Callable[[Mapping[str, Any]], float]) -> Curve:
    """Return a side's values for the cases that it can run."""
    return [(case["devices"], value(case["sides"][side])) for case in cases if "refused" not in case["sides"][side]]


def efficiency_of(side: Mapping[str, Any]) -> float:
    """Return the share of a step that is computation; the rest is exposed communication and bubbles."""
    return side["compute_seconds"] / side["seconds"]


# --- figures


def _figure(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # `drawing` has reported a missing matplotlib

    figure = Figure(figsize=(5.6 * panels if panels > 1 else 8.4, 4.4), layout="constrained")
    return figure, [figure.add_subplot(1, panels, 1 + panel) for panel in range(panels)]


def _two_panels(cases: Sequence[Mapping[str, Any]]) -> Any:
    kind, machine = cases[0]["kind"], cases[0]["machine"]
    figure, (left, right) = _figure(2)
    weak = kind == "weak"
    key, what = ("seconds", "seconds per batch") if weak else ("tokens_per_second", "tokens per second")
    model = f"{cases[0]['model']} to {cases[-1]['model']}" if weak else cases[0]["model"]
    left.set_title(f"{what}, simulated: {model} on {machine}")
    right.set_title("MFU: model FLOPs as a share of the advertised peak")
    _draw(left, {side: curve_of(cases, side, lambda found: found[key]) for side in SIDES})
    _draw(right, {side: curve_of(cases, side, lambda found: 100 * found["mfu"]) for side in SIDES})
    left.set_yscale("log")
    if weak:
        _published_runs(left, right, machine)
        _ticks_of_seconds(left)
        left.set_xlabel("devices; the model grows with them")
    else:
        _ideal(left, curve_of(cases, "Fourfold", lambda found: found[key]))
        left.set_xlabel("devices; model and batch are fixed")
    right.set_xlabel("devices")
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    for axes in (left, right):
        _devices(axes, [case["devices"] for case in cases])
        _name_curves(axes)
    return figure


def _efficiency(
    kind: str, cases: Sequence[Mapping[str, Any]], runs: Mapping[tuple[str, str], Sequence[Measured]]
) -> Any:
    figure, (axes,) = _figure(1)
    title = f"parallel efficiency, {kind} scaling: computation's share of a step"
    axes.set_title(f"{title}; simulated: {cases[0]['machine']}" if cases else title)
    _draw(axes, {side: curve_of(cases, side, lambda found: 100 * efficiency_of(found)) for side in SIDES})
    _measured_runs(axes, runs)
    if kind == "weak" and cases:
        _published_efficiency(axes, cases)
    axes.set_ylim(0, 108)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0f}%")
    axes.set_xlabel("devices")
    _devices(axes, [case["devices"] for case in cases] + [run.devices for of_side in runs.values() for run in of_side])
    _name_curves(axes)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=2)
    return figure


# --- what is drawn


def _draw(axes: Any, lines: Mapping[str, Curve]) -> None:
    for side, line in lines.items():
        if line:
            colour, marker = STYLES[side]
            ours = side == "Fourfold"
            (drawn,) = axes.plot(*zip(*line, strict=True), color=colour, marker=marker, markersize=5)
            drawn.set(linewidth=2.6 if ours else 1.5, zorder=4 if ours else 3, gid=side)
    axes.grid(True, color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


def _published_runs(seconds: Any, mfu: Any, machine: str) -> None:
    points = [point for point in POINTS if point.machine == machine]
    if points:
        devices = [point.devices for point in points]
        shares = [100 * mfu_of(Case("weak", machine, point.model, point.devices), point.seconds) for point in points]
        for axes, values in ((seconds, [point.seconds for point in points]), (mfu, shares)):
            axes.plot(devices, values, **_hollow(INK), label="published 4D, measured")
        seconds.legend(loc="upper left")
        mfu.legend(loc="lower left")


def _published_efficiency(axes: Any, cases: Sequence[Mapping[str, Any]]) -> None:
    """Draw the ablation's last step, the only published run with known computation time."""
    point, step = next(point for point in POINTS if point.name == ABLATED), ABLATION[-1]
    if point.machine == cases[0]["machine"]:
        share = 100 * step.compute / (step.compute + step.exposed)
        axes.plot([point.devices], [share], **_hollow(INK), label="published 4D, measured")


def _hollow(colour: str) -> dict[str, Any]:
    return dict(
        linestyle="none", marker="D", markersize=8, markerfacecolor="none", markeredgecolor=colour,
        markeredgewidth=1.4, zorder=5,
    )  # fmt: skip


def _measured_runs(axes: Any, runs: Mapping[tuple[str, str], Sequence[Measured]]) -> None:
    """Draw measured runs as stars and their predictions as crosses."""
    for (side, model), of_side in runs.items():
        colour, _ = STYLES.get(MEASURED_AS.get(side, side), (INK, ""))
        devices = [run.devices for run in of_side]
        shares = [100 * run.efficiency for run in of_side]
        axes.plot(
            devices, shares, color=colour, linestyle=":", marker="*", markersize=11, zorder=6,
            label=f"{side}, {model}: measured",
        )  # fmt: skip
        predicted = [(run.devices, 100 * run.compute_seconds / run.predicted) for run in of_side if run.predicted]
        if predicted:
            axes.plot(
                *zip(*predicted, strict=True), color=colour, linestyle="none", marker="x", markersize=8, zorder=6,
                label=f"{side}, {model}: predicted",
            )  # fmt: skip


def _ideal(axes: Any, line: Curve) -> None:
    """Draw perfect scaling from the best throughput per device that we reach."""
    if line:
        first, last = line[0][0], line[-1][0]
        rate = max(value / devices for devices, value in line)
        axes.plot([first, last], [rate * first, rate * last], color="#999999", linewidth=1, linestyle="--", zorder=1)
        axes.annotate(
            "ideal", (last, rate * last), (-14, 0), textcoords="offset points", ha="right", va="center",
            fontsize=9, color="#666666",
        )  # fmt: skip


# --- axes


def _devices(axes: Any, numbers: Sequence[int]) -> None:
    numbers = sorted(set(numbers)) or [1]
    axes.set_xscale("log", base=2)
    ticks = [number for number in numbers if number & (number - 1) == 0] or numbers
    thin = ticks[:: -(1 + len(ticks) // 7)]
    axes.set_xticks(thin, [f"{number:,}" for number in thin], rotation=30, ha="right", rotation_mode="anchor")
    axes.set_xticks([], minor=True)
    axes.set_xlim(numbers[0] / 1.3, numbers[-1] * 2**ROOM)


def _ticks_of_seconds(axes: Any) -> None:
    low, high = axes.get_ylim()
    ticks = [tick for tick in (1, 2, 3, 5, 10, 15, 20, 30, 50, 100, 200, 500) if low <= tick <= high]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)


def _name_curves(axes: Any) -> None:
    """Write each curve's name at its end, in its colour, and move names apart that would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = []
    for line in axes.lines:
        if line.get_gid():
            ends.append((*to_axes.transform((line.get_xdata()[-1], line.get_ydata()[-1])), line))
    ends.sort(key=lambda end: end[0])
    while ends:
        near = [end for end in ends if end[0] < ends[0][0] + WIDTH]
        ends = ends[len(near) :]
        for height, (at, _, line) in zip(spread([end[1] for end in near], APART), near, strict=True):
            name = line.get_gid()
            axes.annotate(
                name, (at, height), (8, 0), xycoords="axes fraction", textcoords="offset points", va="center",
                fontsize=9, color=line.get_color(), fontweight="bold" if name == "Fourfold" else "normal", zorder=7,
                bbox=dict(facecolor="white", edgecolor="none", alpha=0.75, pad=0.6),
            )  # fmt: skip


def spread(heights: Sequence[float], apart: float, highest: float = 1.0) -> list[float]:
    """Return the heights in the same order, at least `apart` from each other and at most `highest`, each moved as
    little as possible."""
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    groups: list[list[int]] = []

    def middle(group: list[int]) -> float:
        return sum(heights[index] for index in group) / len(group)

    for index in order:
        groups.append([index])
        while (
            len(groups) > 1
            and middle(groups[-1]) - middle(groups[-2]) < apart * (len(groups[-1]) + len(groups[-2])) / 2
        ):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = list(heights)
    for group in groups:
        for place, index in enumerate(group):
            moved[index] = middle(group) + apart * (place - (len(group) - 1) / 2)
    for index in reversed(order):
        moved[index] = min(moved[index], highest)
        highest = moved[index] - apart
    return moved

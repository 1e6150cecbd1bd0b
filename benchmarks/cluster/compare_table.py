"""The table, the plot and the bars of a comparison on the emulated cluster, from stored runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster.runs import ClusterRun, LineResult
from benchmarks.cluster.settings import FOURFOLD, MINIMAL, OURS, PUBLISHED_KIND, Setting
from benchmarks.shared.plots import drawing, save
from benchmarks.shared.tables import markdown_table, verdict

AIM = 1.26
"""The bar for our speed over the best peer's, where communication dominates."""
DOMINATES = 0.5
"""Communication dominates where the cores are less busy than this in the planned line's steps."""
AGREE = 0.03
"""How much the interfaces' counters, which include headers, may differ from the ledger."""
LARGE = 64e6
"""Counters are compared with the ledger in steps in which a node sends at least this many bytes."""
LOSSES = 1e-3
"""The largest relative difference of any two losses after the first step; fp32 sums differ in their order."""
COLUMNS = (
    "line", "grid", "s per step", "spread", "best peer / this", "MB inside", "MB between", "ledger, both",
    "peak MB", "cores busy",
)  # fmt: skip


def best_peer(run: ClusterRun) -> LineResult:
    """Return the fastest peer on any grid with either reduce-scatter; every ratio is against it."""
    peers = peers_of(run)
    if not peers:
        raise ValueError(f"no peer was measured in {run.setting}")
    return peers[0]


def peers_of(run: ClusterRun) -> list[LineResult]:
    """Return the peers that were measured, fastest first."""
    return sorted((one for one in run.results if one.kind not in OURS and one.measured), key=lambda one: one.step)


def planned(run: ClusterRun) -> LineResult:
    return next(one for one in run.of(FOURFOLD) if one.planned)


def sent(result: LineResult) -> float:
    """Return the bytes per step and rank, by the counters."""
    return median(result.inside) + median(result.between)


# --- bars


def bars(run: ClusterRun) -> Iterator[str]:
    ours, theirs = planned(run), best_peer(run)
    yield _against_best(ours, theirs)
    if same := [one for one in peers_of(run) if one.pipe == 1 and one.sizes == ours.sizes]:
        yield (
            f"beside the best peer on a grid of the same sizes ({same[0].name}): {ours.step / same[0].step:.2f} of its "
            f"time, {ours.step:.2f} s and {same[0].step:.2f} s"
        )
    if median(ours.busy) < DOMINATES:
        times = theirs.step / ours.step
        yield (
            f"at least {AIM} times the speed of the best peer, where communication dominates (cores "
            f"{median(ours.busy):.0%} busy): {verdict(times >= AIM)}, {times:.2f}"
        )
    yield from _counters(run)
    yield _losses(run)


def _against_best(ours: LineResult, theirs: LineResult) -> str:
    gap, spread = theirs.step - ours.step, max(ours.spread, theirs.spread)
    result = "reached, a tie" if abs(gap) <= spread else "reached, faster" if gap > 0 else "**MISSED**, slower"
    return (
        f"the planned grid ({ours.shape}) is not slower than the best peer ({theirs.name}) beyond the spread: "
        f"{result}, {ours.step:.2f} s and {theirs.step:.2f} s, spread {spread:.2f} s"
    )


def _counters(run: ClusterRun) -> Iterator[str]:
    ranks = Setting.parse(run.setting).cluster.ranks
    apart = {
        one.name: sent(one) / sum(one.ledger.values()) - 1
        for one in run.results
        if one.measured and ranks * sum(one.ledger.values()) >= LARGE
    }
    if not apart:
        yield f"counters against ledger: no step sends {LARGE / 1e6:.0f} MB per node here"
        return
    worst = max(apart, key=lambda name: abs(apart[name]))
    yield (
        f"interface counters agree with the ledger within {AGREE:.0%} in {len(apart)} lines in which a node sends at "
        f"least {LARGE / 1e6:.0f} MB: {verdict(abs(apart[worst]) <= AGREE)}, worst {apart[worst]:+.2%} ({worst})"
    )


def _losses(run: ClusterRun) -> str:
    """Compare the losses: all lines train the same model from the same weights on the same batch."""
    lasts = {one.name: one.losses[1] for one in run.results if len(one.losses) > 1}
    low, high = min(lasts, key=lambda name: lasts[name]), max(lasts, key=lambda name: lasts[name])
    apart = lasts[high] / lasts[low] - 1
    return (
        f"all {len(lasts)} lines have the same loss after one step: {verdict(apart <= LOSSES)}, "
        f"{lasts[low]:.5f} ({low}) .. {lasts[high]:.5f} ({high})"
    )


# --- the table


def lines(run: ClusterRun) -> Iterator[str]:
    rival = best_peer(run)
    return markdown_table(COLUMNS, [_cells(one, rival) for one in sorted(run.results, key=_sort_key)])


def _sort_key(result: LineResult) -> tuple[int, float]:
    kinds = {PUBLISHED_KIND: 2, FOURFOLD: 0 if result.planned else 3}
    return kinds.get(result.kind, 1), result.step if result.measured else float("inf")


def _cells(result: LineResult, rival: LineResult) -> list[str]:
    name = f"{result.kind} {result.variant}".strip()
    if not result.measured:
        return [name, result.grid, result.error or "not measured", *["-"] * (len(COLUMNS) - 3)]
    return [
        name,
        result.grid,
        f"{result.step:.2f}",
        f"{min(result.seconds):.2f} .. {max(result.seconds):.2f}",
        f"{rival.step / result.step:.2f}",
        f"{median(result.inside) / 1e6:.1f}",
        f"{median(result.between) / 1e6:.1f}",
        f"{result.ledger['inside'] / 1e6:.1f}, {result.ledger['between'] / 1e6:.1f}" if result.ledger else "-",
        f"{result.peak / 1e6:.0f}" if result.peak is not None else "-",
        f"{median(result.busy):.0%}",
    ]


def page(runs: Sequence[ClusterRun], picture: str) -> str:
    made = runs[0].made
    commands = dict.fromkeys(run.made["command"] for run in runs)
    parts = [
        f"# Fourfold and its peers on an emulated cluster, {', '.join(sorted({run.made['date'] for run in runs}))}",
        "A Llama in fp32; a step is forward, backward, clipping and AdamW. "
        "Nodes are network namespaces joined by links with the setting's bandwidth in each direction "
        "(`benchmarks/cluster/emulate.py`). All lines of a setting take turns in one job. Times are those of the "
        "slowest rank, medians over rounds; spread = min .. max. MB are what a rank sends per step on average, inside "
        "its node and to other nodes, by the counters of the nodes' interfaces; the ledger's are Fourfold's own count. "
        "gloo's reduce-scatter sends twice the minimum, so each peer also runs with the minimal one "
        f"(*{MINIMAL}*), and ratios are against the best line of any peer. *planned* is the grid and policy that "
        "`fourfold plan` chose on the calibrated cluster.",
        f"On {made['cores']} cores ({made['machine']}) shared by all ranks, torch {made['torch']}:",
        "```\n" + "\n".join(commands) + "\n```",
        f"![seconds per step]({picture})",
    ]
    for run in runs:
        parts += [
            f"## {Setting.parse(run.setting)}",
            "\n".join(f"- {bar}" for bar in bars(run)),
            "\n".join(lines(run)),
        ]
    return "\n\n".join(parts) + "\n"


# --- the plot


def best_lines(run: ClusterRun) -> list[tuple[str, LineResult]]:
    """Return the best line of every participant, fastest first."""
    found = {"Fourfold, planned": planned(run)}
    for one in sorted((one for one in run.results if one.measured), key=lambda one: one.step):
        found.setdefault(_participant(one), one)
    return sorted(found.items(), key=lambda item: item[1].step)


def _participant(result: LineResult) -> str:
    if result.kind in OURS:
        return "Fourfold, best grid" if result.kind == FOURFOLD else "published 4D"
    return f"{result.kind}, minimal" if result.variant.endswith(MINIMAL) else result.kind


def plot(runs: Sequence[ClusterRun], path: Path) -> None:
    """Draw bars of seconds, one panel per setting, with whiskers from the fastest to the slowest round."""
    with drawing() as new_figure:
        tall = max(len(best_lines(run)) for run in runs)
        figure = new_figure(figsize=(8, len(runs) * (0.8 + 0.24 * tall)), layout="constrained")
        for run, axes in zip(runs, figure.subplots(len(runs), 1, squeeze=False)[:, 0], strict=True):
            _panel(run, axes)
        save(figure, path)


def _panel(run: ClusterRun, axes: Any) -> None:
    bars_shown = best_lines(run)[::-1]
    times = [one.step for _, one in bars_shown]
    whiskers = [
        [one.step - min(one.seconds) for _, one in bars_shown],
        [max(one.seconds) - one.step for _, one in bars_shown],
    ]
    colours = ["#d1410c" if name.startswith("Fourfold") else "#9aa5b1" for name, _ in bars_shown]
    labels = [f"{name}  {one.grid}" for name, one in bars_shown]
    axes.barh(labels, times, xerr=whiskers, color=colours, ecolor="#222222")
    for place, seconds in enumerate(times):
        axes.annotate(f"{seconds:.2f}", (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_title(str(Setting.parse(run.setting)))
    axes.set_xlabel("seconds per step")
    axes.set_xlim(left=0)


def write(runs: Sequence[ClusterRun], stem: Path) -> list[Path]:
    """Write the page and its picture."""
    picture, text = stem.with_suffix(".svg"), stem.with_suffix(".md")
    plot(runs, picture)
    text.write_text(page(runs, picture.name))
    return [text, picture]

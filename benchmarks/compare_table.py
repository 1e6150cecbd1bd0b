"""The table and the plot of a comparison on the emulated cluster, and which bars were reached. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from emulated import Result, Run
from markdown_table import table
from plots import drawing, save
from settings import FOURFOLD, MINIMAL, OURS, PLANNED, PUBLISHED_KIND, Setting

AIM = 1.26
"""Times the best peer's speed, where communication dominates ..."""
DOMINATES = 0.5
"""... which is where the cores are less than so busy in the planned line's steps."""
AGREE = 0.03
"""By how much the interfaces' counters may differ from the ledger, headers included ..."""
LARGE = 64e6
"""... in steps in which a node sends at least so many bytes."""
LOSSES = 1e-3
"""By how much the losses of any two sides may differ after the first steps, relative: sums in another order in fp32."""
COLUMNS = (
    "line", "grid", "s a step", "spread", "best peer / this", "MB inside", "MB between", "ledger, both",
    "peak MB", "cores busy",
)  # fmt: skip


def best_peer(run: Run) -> Result:
    """Of both reduce-scatters the better one: every ratio is against it."""
    peers = [one for one in run.results if one.kind not in OURS and one.measured]
    if not peers:
        raise ValueError(f"no peer was measured in {run.setting}")
    return min(peers, key=lambda one: one.step)


def planned(run: Run) -> Result:
    return next(one for one in run.of(FOURFOLD) if one.variant == PLANNED)


def sent(result: Result) -> float:
    """Bytes of a rank in a step, by the counters."""
    return median(result.inside) + median(result.between)


# --- bars


def bars(run: Run) -> Iterator[str]:
    ours, theirs = planned(run), best_peer(run)
    yield _against_best(ours, theirs)
    if median(ours.busy) < DOMINATES:
        times = theirs.step / ours.step
        yield (
            f"at least {AIM} times the speed of the best peer, where communication dominates (cores "
            f"{median(ours.busy):.0%} busy): {_verdict(times >= AIM)}, {times:.2f}"
        )
    yield from _counters(run)
    yield _losses(run)


def _verdict(reached: bool) -> str:
    return "reached" if reached else "**MISSED**"


def _against_best(ours: Result, theirs: Result) -> str:
    gap, spread = theirs.step - ours.step, max(ours.spread, theirs.spread)
    said = "reached, a tie" if abs(gap) <= spread else "reached, faster" if gap > 0 else "**MISSED**, slower"
    return (
        f"the planned grid ({ours.shape}) is not slower than the best peer ({theirs.name}) beyond the spread: {said}, "
        f"{ours.step:.2f} s and {theirs.step:.2f} s, spread {spread:.2f} s"
    )


def _counters(run: Run) -> Iterator[str]:
    ranks = Setting.parse(run.setting).cluster.ranks
    apart = {
        one.name: sent(one) / sum(one.ledger.values()) - 1
        for one in run.results
        if one.measured and ranks * sum(one.ledger.values()) >= LARGE
    }
    if not apart:
        yield f"counters against ledger: in no step a node sends {LARGE / 1e6:.0f} MB here"
        return
    worst = max(apart, key=lambda name: abs(apart[name]))
    yield (
        f"interface counters agree with the ledger within {AGREE:.0%} in {len(apart)} lines in which a node sends at "
        f"least {LARGE / 1e6:.0f} MB: {_verdict(abs(apart[worst]) <= AGREE)}, at the worst "
        f"{apart[worst]:+.2%} ({worst})"
    )


def _losses(run: Run) -> str:
    """All sides train the same model from the same weights on the same batch."""
    lasts = {one.name: one.losses[1] for one in run.results if len(one.losses) > 1}
    low, high = min(lasts, key=lambda name: lasts[name]), max(lasts, key=lambda name: lasts[name])
    apart = lasts[high] / lasts[low] - 1
    return (
        f"all {len(lasts)} lines have the same loss after one step: {_verdict(apart <= LOSSES)}, "
        f"{lasts[low]:.5f} ({low}) .. {lasts[high]:.5f} ({high})"
    )


# --- the table


def lines(run: Run) -> Iterator[str]:
    rival = best_peer(run)
    return table(COLUMNS, [_cells(one, rival) for one in sorted(run.results, key=_place)])


def _place(result: Result) -> tuple[int, float]:
    kinds = {PUBLISHED_KIND: 2, FOURFOLD: 0 if result.variant == PLANNED else 3}
    return kinds.get(result.kind, 1), result.step if result.measured else float("inf")


def _cells(result: Result, rival: Result) -> list[str]:
    name = f"{result.kind} {result.variant}".strip()
    if not result.measured:
        return [name, str(result.shape), result.error or "not measured", *["-"] * (len(COLUMNS) - 3)]
    return [
        name,
        str(result.shape),
        f"{result.step:.2f}",
        f"{min(result.seconds):.2f} .. {max(result.seconds):.2f}",
        f"{rival.step / result.step:.2f}",
        f"{median(result.inside) / 1e6:.1f}",
        f"{median(result.between) / 1e6:.1f}",
        f"{result.ledger['inside'] / 1e6:.1f}, {result.ledger['between'] / 1e6:.1f}" if result.ledger else "-",
        f"{result.peak / 1e6:.0f}" if result.peak is not None else "-",
        f"{median(result.busy):.0%}",
    ]


def page(runs: Sequence[Run], picture: str) -> str:
    made = runs[0].made
    commands = dict.fromkeys(run.made["command"] for run in runs)
    parts = [
        f"# Fourfold and its peers on an emulated cluster, {', '.join(sorted({run.made['date'] for run in runs}))}",
        "One Llama (2 layers, hidden 384, 4.3 M parameters, fp32); a step is forward, backward, clipping and AdamW. "
        "Nodes are network namespaces whose links carry what the setting says each way (`benchmarks/cluster.py`). All "
        "lines of a setting take turns in one job; medians over rounds of the slowest rank, spread = min .. max. MB "
        "are what a rank sends in a step on average, by the counters of the nodes' interfaces, inside its node and to "
        "others; the ledger's are Fourfold's own count. gloo's reduce-scatter sends twice the minimum: each peer also "
        f"runs with the minimal one underneath (*{MINIMAL}*), and ratios are against the best line of any peer. "
        "*planned* is the grid and policy that `fourfold plan` chose on the calibrated cluster.",
        f"On {made['cores']} cores ({made['machine']}) shared by all ranks, torch {made['torch']}:",
        "```\n" + "\n".join(commands) + "\n```",
        f"![seconds a step]({picture})",
    ]
    for run in runs:
        parts += [
            f"## {Setting.parse(run.setting)}",
            "\n".join(f"- {bar}" for bar in bars(run)),
            "\n".join(lines(run)),
        ]
    return "\n\n".join(parts) + "\n"


# --- the plot


def shown(run: Run) -> list[tuple[str, Result]]:
    """The best line of every side, the fastest first."""
    found = {"Fourfold, planned": planned(run)}
    for one in sorted((one for one in run.results if one.measured), key=lambda one: one.step):
        found.setdefault(_side(one), one)
    return sorted(found.items(), key=lambda item: item[1].step)


def _side(result: Result) -> str:
    if result.kind in OURS:
        return "Fourfold, best grid" if result.kind == FOURFOLD else "published 4D"
    return f"{result.kind}, minimal" if result.variant else result.kind


def plot(runs: Sequence[Run], path: Path) -> None:
    """Bars of seconds, a panel for each setting; whiskers from the fastest to the slowest round."""
    with drawing() as new_figure:
        tall = max(len(shown(run)) for run in runs)
        figure = new_figure(figsize=(8, len(runs) * (0.8 + 0.24 * tall)), layout="constrained")
        for run, axes in zip(runs, figure.subplots(len(runs), 1, squeeze=False)[:, 0], strict=True):
            _panel(run, axes)
        save(figure, path)


def _panel(run: Run, axes: Any) -> None:
    sides = shown(run)[::-1]
    times = [one.step for _, one in sides]
    whiskers = [
        [one.step - min(one.seconds) for _, one in sides],
        [max(one.seconds) - one.step for _, one in sides],
    ]
    colours = ["#d1410c" if name.startswith("Fourfold") else "#9aa5b1" for name, _ in sides]
    axes.barh([f"{name}  {one.shape}" for name, one in sides], times, xerr=whiskers, color=colours, ecolor="#222222")
    for place, seconds in enumerate(times):
        axes.annotate(f"{seconds:.2f}", (0, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_title(str(Setting.parse(run.setting)))
    axes.set_xlabel("seconds a step")
    axes.set_xlim(left=0)


def write(runs: Sequence[Run], stem: Path) -> list[Path]:
    """The page and its picture."""
    picture, text = stem.with_suffix(".svg"), stem.with_suffix(".md")
    plot(runs, picture)
    text.write_text(page(runs, picture.name))
    return [text, picture]

"""The planner against measured steps on the emulated cluster: how well it ranks grids, and how large its errors are.

    python benchmarks/planner/validate.py --measured                          # measures what is missing; needs root
    python benchmarks/planner/validate.py --measured --settings 4x2-200-few

Each grid of a setting is priced on the machine that `fourfold calibrate` measured there, independently of the grid's
own measurement. The published model ranks the same grids with the same links. A setting with a run in --out, also one
of `cluster/compare.py`, is not measured again: remove its file to repeat it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

from benchmarks.cluster import runs
from benchmarks.cluster.emulate import EmulationUnavailableError, exit_on_signals
from benchmarks.cluster.runs import ClusterRun, LineResult
from benchmarks.cluster.settings import FOURFOLD, POLICY, Setting, grids_of
from benchmarks.shared.published import published_seconds
from benchmarks.shared.tables import markdown_table
from benchmarks.shared.workloads import Line
from fourfold.grid import Shape
from fourfold.planner.machine import Machine
from fourfold.planner.price import Candidate, Task, price

SPEARMAN, WITHIN_FIRST, REGRET, ERROR = 0.95, 3, 0.05, 0.15
"""Bars: the least rank correlation, the last place in the planned list that the measured best grid may have, and the
bounds of regret and mean error."""
HALF_BUSY, MANY_RANKS = 0.5, 16
"""With this many ranks, a setting counts only if the cores are less than half busy; otherwise the cores are measured
and not the links."""
SETTINGS = ("4x2-200-few", "4x2-100-few", "4x2-200-many", "4x2-50-few", "4x4-50-few")


def lines_of(setting: Setting, machine: Machine) -> list[Line]:
    """Return Fourfold on every grid in every placement; with many ranks, only the planner's placement of each grid."""
    lines = grids_of(setting)
    if setting.cluster.world < MANY_RANKS:
        return lines
    task = setting.task(machine)
    best: dict[tuple[int, ...], Line] = {}
    for line in sorted(lines, key=lambda line: predicted_seconds(task, line.shape)):
        best.setdefault(tuple(line.shape.sizes.values()), line)
    return list(best.values())


def predicted_seconds(task: Task, shape: Shape) -> float:
    """Return the predicted seconds per step on this grid with the policy of the measured lines."""
    return price(task, Candidate(shape, POLICY, task.rows // (shape.z * shape.data), 1)).seconds


def published_total(task: Task, shape: Shape) -> float:
    itemsize = task.compute.itemsize
    return sum(published_seconds(task.config, shape, task.rows, task.seq, task.machine, itemsize).values())


@dataclass(frozen=True)
class Ranking:
    """A predicted ranking of grids beside their measurements."""

    results: Sequence[LineResult]
    predicted: Sequence[float]

    @property
    def measured(self) -> list[float]:
        return [one.step for one in self.results]

    @property
    def spearman(self) -> float:
        return correlation(ranks(self.predicted), ranks(self.measured))

    @property
    def place_of_best(self) -> int:
        """Return the predicted place of the grid that was measured fastest, counted from 1."""
        best = min(range(len(self.results)), key=lambda place: self.measured[place])
        return 1 + sum(seconds < self.predicted[best] for seconds in self.predicted)

    @property
    def regret(self) -> float:
        """Return how much slower the first choice is than the best grid."""
        first = min(range(len(self.results)), key=lambda place: self.predicted[place])
        return self.measured[first] / min(self.measured) - 1

    @property
    def error(self) -> float:
        """Return the mean of |predicted / measured - 1|."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return fmean(abs(predicted / measured - 1) for predicted, measured in pairs)

    def misses(self) -> Iterator[str]:
        """Yield a sentence for each bar that is missed."""
        if self.spearman < SPEARMAN:
            yield f"Spearman {self.spearman:.3f}, must be at least {SPEARMAN}"
        if self.place_of_best > WITHIN_FIRST:
            yield f"the measured best is at place {self.place_of_best}, must be among the first {WITHIN_FIRST}"
        if self.regret >= REGRET:
            yield f"regret of the first choice {self.regret:.1%}, must be below {REGRET:.0%}"
        if self.error >= ERROR:
            yield f"mean absolute error {self.error:.1%}, must be below {ERROR:.0%}"


def judge(run: ClusterRun) -> tuple[Ranking, Ranking]:
    """Return the rankings by Fourfold's planner and by the published model for the grids of a run."""
    results = [one for one in run.of(FOURFOLD) if not one.planned]
    if len(results) < 2:
        raise ValueError(f"{run.setting} has {len(results)} measured grids of Fourfold; a ranking needs at least two")
    task = Setting.parse(run.setting).task(run.cluster_machine)
    ours = [predicted_seconds(task, one.shape) for one in results]
    return Ranking(results, ours), Ranking(results, [published_total(task, one.shape) for one in results])


def ranks(numbers: Sequence[float]) -> list[float]:
    """Return the ranks of the numbers in sorted order; equal numbers share their mean rank."""
    return [sum(other < one for other in numbers) + sum(other == one for other in numbers) / 2 for one in numbers]


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    mean, others_mean = fmean(one), fmean(other)
    both = sum((a - mean) * (b - others_mean) for a, b in zip(one, other, strict=True))
    alone = sum((a - mean) ** 2 for a in one) * sum((b - others_mean) ** 2 for b in other)
    return both / alone**0.5 if alone else 0.0


# --- the page


def summary(runs: Sequence[ClusterRun]) -> Iterator[str]:
    """Yield a table with one row per setting and model."""
    heads = "setting", "grids", "model", "Spearman", "place of the best", "regret", "mean error", "cores busy"
    rows = []
    for run in runs:
        for name, found in zip(("Fourfold", "published"), judge(run), strict=True):
            row = [run.setting, str(len(found.results)), name, f"{found.spearman:.3f}", str(found.place_of_best)]
            rows.append([*row, f"{found.regret:.1%}", f"{found.error:.1%}", f"{busy_cores(found.results):.0%}"])
    return markdown_table(heads, rows)


def busy_cores(results: Sequence[LineResult]) -> float:
    """Return the mean share of busy cores over all grids."""
    return fmean(median(one.busy) for one in results)


def verdicts(runs: Sequence[ClusterRun]) -> Iterator[str]:
    for run in runs:
        ours, _ = judge(run)
        missed = list(ours.misses())
        busy = busy_cores(ours.results)
        if Setting.parse(run.setting).cluster.world >= MANY_RANKS and busy >= HALF_BUSY:
            missed.append(f"cores are {busy:.0%} busy, must be below {HALF_BUSY:.0%} with this many ranks")
        yield f"- {run.setting}: " + ("every bar reached" if not missed else "**MISSED**: " + "; ".join(missed))


def grids_table(run: ClusterRun) -> Iterator[str]:
    """Yield a table of every grid, fastest first, with the predictions of both models."""
    ours, published = judge(run)
    rows = [
        [
            str(one.shape),
            f"{one.step:.2f}",
            f"{min(one.seconds):.2f} .. {max(one.seconds):.2f}",
            f"{predicted:.2f}",
            f"{predicted / one.step - 1:+.0%}",
            f"{theirs:.2f}",
        ]
        for one, predicted, theirs in zip(ours.results, ours.predicted, published.predicted, strict=True)
    ]
    return markdown_table(["grid", "measured s", "spread", "predicted s", "error", "published model s"], rows)


def page(runs: Sequence[ClusterRun]) -> str:
    dates = ", ".join(sorted({run.made["date"] for run in runs}))
    commands = dict.fromkeys(run.made["command"] for run in runs)
    made = runs[0].made
    parts = [
        f"# The planner against measured steps on the emulated cluster, {dates}",
        "Settings are NODESxRANKS-MBIT-SIZE (`benchmarks/cluster/settings.py`). A step is forward, backward, clipping "
        "and AdamW in fp32. All grids take turns in each round; times are those of the slowest rank, medians over "
        "rounds. The machine file was measured by `fourfold calibrate` on the same cluster before. The published "
        "model predicts communication only: it has no other term.",
        f"On {made['cores']} cores ({made['machine']}), torch {made['torch']}:",
        "```\n" + "\n".join(commands) + "\n```",
        "\n".join(summary(runs)),
        "\n".join(verdicts(runs)),
    ]
    for run in runs:
        parts += [f"## {Setting.parse(run.setting)}", "\n".join(grids_table(run))]
    return "\n\n".join(parts) + "\n"


# --- the command


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "validate.py --measured", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    runs.add_options(parser, SETTINGS)
    options = runs.parse(parser, "planner/validate.py --measured", arguments)
    paths = [options.out / f"{setting.name}.json" for setting in options.settings]
    try:
        with exit_on_signals():
            for setting, path in zip(options.settings, paths, strict=True):
                if not path.exists():
                    runs.run(setting, partial(lines_of, setting), options).write(options.out)
    except EmulationUnavailableError as error:
        print(f"validate: error: {error}", file=sys.stderr)
        return 2
    found = [ClusterRun.read(path) for path in paths]
    text = page(found)
    path = options.out.parent / f"{options.out.name.replace('cluster', 'validate-planner-measured')}.md"
    path.write_text(text)
    print("\n".join((*summary(found), "", *verdicts(found), f"wrote {path}")))
    return 1 if any(list(judge(run)[0].misses()) for run in found) else 0

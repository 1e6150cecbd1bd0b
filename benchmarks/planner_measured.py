"""The planner against steps that are measured on the emulated cluster: how well it ranks and how far it is off.

    python benchmarks/validate_planner.py --measured                          # what is not measured yet; needs root
    python benchmarks/validate_planner.py --measured --settings 4x2-200-few

Each grid of a setting is priced on the machine that `fourfold calibrate` saw there, before and apart from its
measurement; the published model ranks the same grids by the same links. A setting that --out has a run of is not
measured again, compare.py's runs included: remove its file for that.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import emulated
from cluster import NotHereError, ending_in_order
from emulated import Result, Run
from fourfold.grid import Shape
from fourfold.planner.machine import Machine
from fourfold.planner.price import Choice, Task, price
from markdown_table import table
from published import published_seconds
from settings import FOURFOLD, PLANNED, POLICY, Setting, grids_of
from sides import Line

SPEARMAN, WITHIN_FIRST, REGRET, ERROR = 0.95, 3, 0.05, 0.15
"""Bars: rank correlation at least, place of the measured best in the planned list, and regret and error under."""
HALF_BUSY, MANY_RANKS = 0.5, 16
"""So many ranks count only while less than this of the cores works: else the machine is measured, not its links."""
SETTINGS = ("4x2-200-few", "4x2-100-few", "4x2-200-many", "4x2-50-few", "4x4-50-few")


def lines_of(setting: Setting, machine: Machine) -> list[Line]:
    """Fourfold on every grid, placed in every way; with many ranks each grid as the planner would place it."""
    lines = grids_of(setting)
    if setting.cluster.world < MANY_RANKS:
        return lines
    task = setting.task(machine)
    best: dict[tuple[int, ...], Line] = {}
    for line in sorted(lines, key=lambda line: predicted_seconds(task, line.shape)):
        best.setdefault(tuple(line.shape.sizes.values()), line)
    return list(best.values())


def predicted_seconds(task: Task, shape: Shape) -> float:
    """Of a step on that grid with the policy of the lines."""
    return price(task, Choice(shape, POLICY, task.rows // (shape.z * shape.data), 1)).seconds


def published_total(task: Task, shape: Shape) -> float:
    itemsize = task.compute.itemsize
    return sum(published_seconds(task.config, shape, task.rows, task.seq, task.machine, itemsize).values())


@dataclass(frozen=True)
class Judged:
    """A ranking beside what was measured of the same grids."""

    results: Sequence[Result]
    predicted: Sequence[float]

    @property
    def measured(self) -> list[float]:
        return [one.step for one in self.results]

    @property
    def spearman(self) -> float:
        return correlation(ranks(self.predicted), ranks(self.measured))

    @property
    def place_of_best(self) -> int:
        """Of the grid that was measured the fastest, in the planned list, from 1 on."""
        best = min(range(len(self.results)), key=lambda place: self.measured[place])
        return 1 + sum(seconds < self.predicted[best] for seconds in self.predicted)

    @property
    def regret(self) -> float:
        """By how much the first choice is slower than the best."""
        first = min(range(len(self.results)), key=lambda place: self.predicted[place])
        return self.measured[first] / min(self.measured) - 1

    @property
    def error(self) -> float:
        """Mean of |predicted / measured - 1|."""
        pairs = zip(self.predicted, self.measured, strict=True)
        return fmean(abs(predicted / measured - 1) for predicted, measured in pairs)

    def misses(self) -> Iterator[str]:
        """What is not as it should be."""
        if self.spearman < SPEARMAN:
            yield f"Spearman {self.spearman:.3f}, at least {SPEARMAN} is wanted"
        if self.place_of_best > WITHIN_FIRST:
            yield f"the measured best is at place {self.place_of_best} of the list, the first {WITHIN_FIRST} are wanted"
        if self.regret >= REGRET:
            yield f"regret of the first choice {self.regret:.1%}, under {REGRET:.0%} is wanted"
        if self.error >= ERROR:
            yield f"mean absolute error {self.error:.1%}, under {ERROR:.0%} is wanted"


def judge(run: Run) -> tuple[Judged, Judged]:
    """Fourfold's planner and the published model on the grids of a run."""
    results = [one for one in run.of(FOURFOLD) if one.variant != PLANNED]
    if len(results) < 2:
        raise ValueError(f"{run.setting} has {len(results)} measured grids of Fourfold; ranking takes at least two")
    task = Setting.parse(run.setting).task(run.cluster_machine)
    ours = [predicted_seconds(task, one.shape) for one in results]
    return Judged(results, ours), Judged(results, [published_total(task, one.shape) for one in results])


def ranks(numbers: Sequence[float]) -> list[float]:
    """Places in sorted order; equal numbers share the mean of theirs."""
    return [sum(other < one for other in numbers) + sum(other == one for other in numbers) / 2 for one in numbers]


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    mean, others_mean = fmean(one), fmean(other)
    both = sum((a - mean) * (b - others_mean) for a, b in zip(one, other, strict=True))
    alone = sum((a - mean) ** 2 for a in one) * sum((b - others_mean) ** 2 for b in other)
    return both / alone**0.5 if alone else 0.0


# --- the page


def summary(runs: Sequence[Run]) -> Iterator[str]:
    """One line a setting, both models."""
    heads = "setting", "grids", "model", "Spearman", "place of the best", "regret", "mean error", "cores busy"
    rows = []
    for run in runs:
        for name, found in zip(("Fourfold", "published"), judge(run), strict=True):
            row = [run.setting, str(len(found.results)), name, f"{found.spearman:.3f}", str(found.place_of_best)]
            rows.append([*row, f"{found.regret:.1%}", f"{found.error:.1%}", f"{busy_cores(found.results):.0%}"])
    return table(heads, rows)


def busy_cores(results: Sequence[Result]) -> float:
    """Their share over all steps."""
    return fmean(median(one.busy) for one in results)


def verdicts(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        ours, _ = judge(run)
        missed = list(ours.misses())
        busy = busy_cores(ours.results)
        if Setting.parse(run.setting).cluster.world >= MANY_RANKS and busy >= HALF_BUSY:
            missed.append(f"cores are {busy:.0%} busy, under half is wanted with so many ranks")
        yield f"- {run.setting}: " + ("every bar reached" if not missed else "**MISSED**: " + "; ".join(missed))


def grids_table(run: Run) -> Iterator[str]:
    """Every grid, the fastest first, with what both models said."""
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
    return table(["grid", "measured s", "spread", "predicted s", "error", "published model s"], rows)


def page(runs: Sequence[Run]) -> str:
    dates = ", ".join(sorted({run.made["date"] for run in runs}))
    commands = dict.fromkeys(run.made["command"] for run in runs)
    made = runs[0].made
    parts = [
        f"# The planner against measured steps on the emulated cluster, {dates}",
        "Settings are NODESxRANKS-MBIT-SIZE (`benchmarks/settings.py`). A step is forward, backward, clipping and "
        "AdamW in fp32; medians of rounds in which all grids take turns, the slowest rank counts. The machine is what "
        "`fourfold calibrate` measured on that cluster before. Predicted seconds of the published model are its "
        "communication alone: it has no other term.",
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
        "validate_planner.py --measured", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    emulated.add_options(parser, SETTINGS)
    options = emulated.parse(parser, "validate_planner.py --measured", arguments)
    paths = [options.out / f"{setting.name}.json" for setting in options.settings]
    try:
        with ending_in_order():
            for setting, path in zip(options.settings, paths, strict=True):
                if not path.exists():
                    emulated.run(setting, partial(lines_of, setting), options).write(options.out)
    except NotHereError as error:
        print(f"validate_planner: error: {error}", file=sys.stderr)
        return 2
    runs = [Run.read(path) for path in paths]
    text = page(runs)
    path = options.out.parent / f"{options.out.name.replace('cluster', 'validate-planner-measured')}.md"
    path.write_text(text)
    print("\n".join((*summary(runs), "", *verdicts(runs), f"wrote {path}")))
    return 1 if any(list(judge(run)[0].misses()) for run in runs) else 0

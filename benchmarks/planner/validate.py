"""The planner against published figures: seconds of runs, an overlap ablation, a comparison; and the planner's speed.

    python benchmarks/planner/validate.py            # CPU only; a minute; exits with 1 when it fails
    python benchmarks/planner/validate.py --fit      # fit the constants again and print them
    python benchmarks/planner/validate.py --record   # record today's errors as the ones that must not grow
    python benchmarks/planner/validate.py --measured # against steps on an emulated cluster: validate_measured.py

It fails if an error is more than half a percentage point above the recorded one, if a target is missed without a
suspected cause, or if the search is too slow. The points, their split, constants and assumptions are in
published_runs.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

from benchmarks.planner import megatron_pipeline as megatron
from benchmarks.planner import validate_measured
from benchmarks.planner.published_runs import (
    ABLATED,
    ABLATION,
    ASSUMPTIONS,
    CAUSES,
    EACH,
    FITTED,
    ON_AVERAGE,
    POINTS,
    ROWS,
    SEQ,
    Fit,
    Point,
)
from benchmarks.planner.replay import Replay, ablated, best_replay, fit, replay, task_of
from benchmarks.shared.tables import RESULTS, markdown_table
from fourfold.models.config import config
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Task
from fourfold.planner.search import search

RECORDED = RESULTS / "validate-planner-recorded.json"
UNFITTED = Fit(1.0, 1.0)
GROWTH = 0.005
"""How much an error may grow before it counts: smaller changes are insignificant."""
SPEED = [("gpt-80b", "perlmutter", 1024, 2.0), ("gpt-320b", "frontier", 32768, 10.0)]
"""Model, machine, devices, and the CPU seconds that a search may take on one core."""


class Compared(NamedTuple):
    """A prediction beside the published figure."""

    name: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass
class Judge:
    """Collects errors, failures, and missed targets that have a suspected cause."""

    recorded: dict[str, float]
    recording: bool = False
    """Whether this run's errors become the recorded ones."""
    failures: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)

    def add(self, one: Compared) -> None:
        error = abs(one.error)
        self.errors[one.name] = round(error, 4)
        if not self.recording:
            self.check_growth(one.name, error)
        if error > EACH:
            self.miss(one.name, f"{one.error:+.1%}, target {EACH:.0%}")

    def check_growth(self, name: str, error: float) -> None:
        if name not in self.recorded:
            self.failures.append(f"{name}: no error is recorded; check it, then run with --record")
        elif error > self.recorded[name] + GROWTH:
            self.failures.append(f"{name}: the error has grown from {self.recorded[name]:.1%} to {error:.1%}")

    def add_mean(self, name: str, compared: Sequence[Compared]) -> float:
        """Judge the mean of the errors and return it."""
        mean = fmean(abs(one.error) for one in compared)
        if mean > ON_AVERAGE:
            self.miss(name, f"{mean:.1%} on average, target {ON_AVERAGE:.0%}")
        return mean

    def miss(self, name: str, what: str) -> None:
        if name in CAUSES:
            self.misses.append(f"{name}: {what}. Suspected: {CAUSES[name]}")
        else:
            self.failures.append(f"{name}: {what}, and published_runs.py gives no cause")


def describe(found: Replay) -> str:
    return f"{found.candidate.shape}, {found.candidate.micro_steps} x {found.candidate.rows} rows"


def speed(judge: Judge) -> Iterator[str]:
    yield "## Speed of the search, one core"
    rows = []
    for model, machine, devices, limit in SPEED:
        task = Task(config(model), load_machine(machine), ROWS, SEQ)
        began = time.process_time()
        plan = search(task, devices)
        took = time.process_time() - began
        what = f"{model} on {devices} of {machine}"
        rows.append([what, f"{took:.2f} s", f"{limit:g} s", str(plan.candidates), str(plan.simulated)])
        if took > limit:
            judge.failures.append(f"search for {what} took {took:.2f} s, the limit is {limit:g} s")
    yield from markdown_table(["search", "CPU time", "limit", "candidates", "simulated"], rows)


def weak_scaling(judge: Judge, found: dict[str, Replay]) -> Iterator[str]:
    yield "## Weak scaling: seconds per batch, predicted and published"
    for machine, constants in FITTED.items():
        yield (
            f"- {machine}: fitted attention x {constants.attention:.3f}, "
            f"bandwidth between nodes x {constants.between:.3f}"
        )
    yield ""
    rows, compared = [], []
    for point in POINTS:
        best = found[point.name]
        unfitted = replay(task_of(point, UNFITTED), best.candidate).seconds
        one = Compared(point.name, best.totals.seconds, point.seconds)
        judge.add(one)
        compared.append((point, one))
        rows.append(
            [
                point.name, point.model, "fitted" if point.fitted else "held out", f"{one.predicted:.2f}",
                f"{one.published:.2f}", f"{one.error:+.1%}", recorded(judge, one), f"{unfitted:.2f}",
                f"{best.totals.compute:.2f} + {best.exposed:.2f}", str(best.place), describe(best),
            ]
        )  # fmt: skip
    yield from markdown_table(
        ["run", "model", "point", "predicted", "published", "error", "recorded", "unfitted", "compute + exposed",
         "place in the published list", "grid taken"], rows,
    )  # fmt: skip
    yield ""
    yield "Unfitted: the same grid with the constants of the machine file, which `fourfold plan` uses."
    yield ""
    for name, fitted in (("fitted points", True), ("held-out points", False)):
        mean = judge.add_mean(name, [one for point, one in compared if point.fitted == fitted])
        yield f"- {name}: {mean:.1%} on average"
    yield f"- all points: {judge.add_mean('all points', [one for _, one in compared]):.1%} on average"


def recorded(judge: Judge, one: Compared) -> str:
    return f"{judge.recorded[one.name]:.1%}" if one.name in judge.recorded else "-"


def ablation(judge: Judge, point: Point, best: Replay) -> Iterator[str]:
    yield f"## Overlap ablation: {point.model} on {point.name}, seconds per batch"
    yield f"On the grid from above: {describe(best)}."
    yield ""
    rows, compared = [], []
    for step in ABLATION:
        totals = replay(task_of(point), ablated(best.candidate, step))
        row = [step.name]
        for kind, predicted, published in (
            ("compute", totals.compute, step.compute),
            ("exposed", sum(totals.exposed.values()), step.exposed),
            ("total", totals.seconds, step.compute + step.exposed),
        ):
            one = Compared(f"ablation, {step.name}, {kind}", predicted, published)
            judge.add(one)
            compared.append(one)
            row.append(f"{predicted:.2f} / {published:.2f} ({one.error:+.1%}, recorded {recorded(judge, one)})")
        rows.append(row)
    yield from markdown_table(["overlap", "compute, predicted / published", "exposed", "total"], rows)
    yield ""
    yield f"- mean of all: {judge.add_mean('ablation', compared):.1%} on average"


def beside_megatron() -> Iterator[str]:
    yield f"## {megatron.MODEL} on {megatron.DEVICES} devices of {megatron.MACHINE}, beside Megatron's ways"
    sides, refused = megatron.compare_with_megatron()
    ours, published = sides[-1], sides[-2]
    rows = [[side.name, f"{side.seconds:.2f}", f"{side.seconds / ours.seconds:.2f}", side.how] for side in sides]
    yield from markdown_table(["side", "seconds", "of Fourfold's", "how"], rows)
    yield ""
    yield from (f"- does not fit: {reason}" for reason in refused)
    best, recomputed = min(sides[:-2], key=lambda side: side.seconds), sides[-3]
    yield (
        f"- predicted: Fourfold {best.seconds / ours.seconds - 1:+.0%} against the best of Megatron's ways; the "
        f"published system {best.seconds / published.seconds - 1:+.0%} against the same, and "
        f"{recomputed.seconds / published.seconds - 1:+.0%} where both recompute everything; published: "
        f"{megatron.PUBLISHED_GAIN:+.0%} for that system against Megatron-LM. There is no bar for this."
    )
    yield from (f"- assumed: {text}" for text in megatron.ASSUMPTIONS)


def report(judge: Judge) -> Iterator[str]:
    yield f"# The planner against published figures, {date.today()}"
    yield f"`python benchmarks/planner/validate.py`; CPU only, one core; torch {torch.__version__}"
    yield ""
    yield from speed(judge)  # first, while nothing is cached
    yield ""
    found = {point.name: best_replay(point) for point in POINTS}
    yield from weak_scaling(judge, found)
    yield ""
    yield from ablation(judge, next(point for point in POINTS if point.name == ABLATED), found[ABLATED])
    yield ""
    yield from (f"- assumed: {text}" for text in ASSUMPTIONS)
    yield ""
    yield from beside_megatron()
    yield ""
    yield from verdict(judge)


def verdict(judge: Judge) -> Iterator[str]:
    yield "## Missed targets"
    yield from (f"- {text}" for text in judge.misses or ["none"])
    yield ""
    yield "## Failures"
    yield from (f"- {text}" for text in judge.failures or ["none"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants again and print them")
    parser.add_argument("--record", action="store_true", help="record today's errors as the ones that must not grow")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="compare with steps on an emulated cluster; see --measured --help",
    )
    if "--measured" in sys.argv[1:]:
        return validate_measured.main([given for given in sys.argv[1:] if given != "--measured"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.fit:
        for machine in FITTED:
            fit(machine, print)
        return 0
    judge = Judge(json.loads(RECORDED.read_text()) if RECORDED.exists() else {}, options.record)
    lines = []
    for line in report(judge):
        print(line, flush=True)
        lines.append(line)
    (RESULTS / f"{date.today()}-validate-planner.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.record:
        RECORDED.write_text(json.dumps(judge.errors, indent=2) + "\n", encoding="utf-8")
        print(f"recorded {len(judge.errors)} errors in results/{RECORDED.name}")
    return 1 if judge.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())

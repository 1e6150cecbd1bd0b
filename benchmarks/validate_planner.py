"""The planner against what was published: seconds of runs, an overlap ablation, a comparison; and its own speed.

    python benchmarks/validate_planner.py            # CPU only; a minute; exits 1 when it fails
    python benchmarks/validate_planner.py --fit      # find the fitted constants again, and print them
    python benchmarks/validate_planner.py --record   # take today's errors as those that must not grow
    python benchmarks/validate_planner.py --measured # against steps on an emulated cluster: planner_measured.py

It fails when an error has grown by more than half a percentage point over the recorded one, when a target is missed
without a suspected cause, or when the search is too slow. Points, split, constants and assumptions: planner_points.py.
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

import torch

import planner_measured
import planner_megatron as megatron
from fourfold.models.config import config
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Task
from fourfold.planner.search import search
from markdown_table import table
from planner_points import (
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
from planner_replay import Replay, ablated, best_replay, fit, replay, task_of

RESULTS = Path(__file__).parent / "results"
RECORDED = RESULTS / "validate-planner-recorded.json"
UNFITTED = Fit(1.0, 1.0)
GROWTH = 0.005
"""By which an error may grow: changes that mean nothing."""
SPEED = [("gpt-80b", "perlmutter", 1024, 2.0), ("gpt-320b", "frontier", 32768, 10.0)]
"""Model, machine, devices, and the seconds of one core that a search may take."""


class Compared(NamedTuple):
    """A prediction beside what was published."""

    name: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


@dataclass
class Judge:
    """What failed, and what missed its target and says why."""

    recorded: dict[str, float]
    recording: bool = False
    """Whether these errors are to be the recorded ones."""
    failures: list[str] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)

    def hear(self, one: Compared) -> None:
        error = abs(one.error)
        self.errors[one.name] = round(error, 4)
        if not self.recording:
            self.check_growth(one.name, error)
        if error > EACH:
            self.miss(one.name, f"{one.error:+.1%}, target {EACH:.0%}")

    def check_growth(self, name: str, error: float) -> None:
        if name not in self.recorded:
            self.failures.append(f"{name}: no error is recorded; look at it, then --record")
        elif error > self.recorded[name] + GROWTH:
            self.failures.append(f"{name}: the error has grown from {self.recorded[name]:.1%} to {error:.1%}")

    def hear_all(self, name: str, compared: Sequence[Compared]) -> float:
        """The mean of their errors."""
        mean = fmean(abs(one.error) for one in compared)
        if mean > ON_AVERAGE:
            self.miss(name, f"{mean:.1%} on average, target {ON_AVERAGE:.0%}")
        return mean

    def miss(self, name: str, what: str) -> None:
        if name in CAUSES:
            self.misses.append(f"{name}: {what}. Suspected: {CAUSES[name]}")
        else:
            self.failures.append(f"{name}: {what}, and no cause is given in planner_points.py")


def describe(found: Replay) -> str:
    return f"{found.choice.shape}, {found.choice.micro_steps} x {found.choice.rows} rows"


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
    yield from table(["search", "CPU time", "limit", "candidates", "simulated"], rows)


def weak_scaling(judge: Judge, found: dict[str, Replay]) -> Iterator[str]:
    yield "## Weak scaling: seconds a batch, predicted and published"
    for machine, constants in FITTED.items():
        yield (
            f"- {machine}: fitted attention x {constants.attention:.3f}, "
            f"bandwidth between nodes x {constants.between:.3f}"
        )
    yield ""
    rows, compared = [], []
    for point in POINTS:
        best = found[point.name]
        unfitted = replay(task_of(point, UNFITTED), best.choice).seconds
        one = Compared(point.name, best.totals.seconds, point.seconds)
        judge.hear(one)
        compared.append((point, one))
        rows.append(
            [
                point.name, point.model, "fitted" if point.fitted else "held out", f"{one.predicted:.2f}",
                f"{one.published:.2f}", f"{one.error:+.1%}", recorded(judge, one), f"{unfitted:.2f}",
                f"{best.totals.compute:.2f} + {best.exposed:.2f}", str(best.place), describe(best),
            ]
        )  # fmt: skip
    yield from table(
        ["run", "model", "point", "predicted", "published", "error", "recorded", "unfitted", "compute + exposed",
         "place in the published list", "grid taken"], rows,
    )  # fmt: skip
    yield ""
    yield "Unfitted: the same grid with the constants of the machine file, which are those that `fourfold plan` takes."
    yield ""
    for name, fitted in (("fitted points", True), ("held-out points", False)):
        mean = judge.hear_all(name, [one for point, one in compared if point.fitted == fitted])
        yield f"- {name}: {mean:.1%} on average"
    yield f"- all points: {judge.hear_all('all points', [one for _, one in compared]):.1%} on average"


def recorded(judge: Judge, one: Compared) -> str:
    return f"{judge.recorded[one.name]:.1%}" if one.name in judge.recorded else "-"


def ablation(judge: Judge, point: Point, best: Replay) -> Iterator[str]:
    yield f"## Overlap ablation: {point.model} on {point.name}, seconds a batch"
    yield f"On the grid taken above: {describe(best)}."
    yield ""
    rows, compared = [], []
    for step in ABLATION:
        totals = replay(task_of(point), ablated(best.choice, step))
        row = [step.name]
        for kind, predicted, published in (
            ("compute", totals.compute, step.compute),
            ("exposed", sum(totals.exposed.values()), step.exposed),
            ("total", totals.seconds, step.compute + step.exposed),
        ):
            one = Compared(f"ablation, {step.name}, {kind}", predicted, published)
            judge.hear(one)
            compared.append(one)
            row.append(f"{predicted:.2f} / {published:.2f} ({one.error:+.1%}, recorded {recorded(judge, one)})")
        rows.append(row)
    yield from table(["overlap", "compute, predicted / published", "exposed", "total"], rows)
    yield ""
    yield f"- all of them: {judge.hear_all('ablation', compared):.1%} on average"


def beside_megatron() -> Iterator[str]:
    yield f"## {megatron.MODEL} on {megatron.DEVICES} devices of {megatron.MACHINE}, beside Megatron's ways"
    sides, refused = megatron.compare()
    ours, published = sides[-1], sides[-2]
    rows = [[side.name, f"{side.seconds:.2f}", f"{side.seconds / ours.seconds:.2f}", side.how] for side in sides]
    yield from table(["side", "seconds", "of Fourfold's", "how"], rows)
    yield ""
    yield from (f"- does not fit: {reason}" for reason in refused)
    best, recomputed = min(sides[:-2], key=lambda side: side.seconds), sides[-3]
    yield (
        f"- predicted: Fourfold {best.seconds / ours.seconds - 1:+.0%} against the best of Megatron's ways; the "
        f"published system {best.seconds / published.seconds - 1:+.0%} against it, and "
        f"{recomputed.seconds / published.seconds - 1:+.0%} where both recompute all; published: "
        f"{megatron.PUBLISHED_GAIN:+.0%} for that system against Megatron-LM. No bar."
    )
    yield from (f"- assumed: {text}" for text in megatron.ASSUMPTIONS)


def report(judge: Judge) -> Iterator[str]:
    yield f"# The planner against what was published, {date.today()}"
    yield f"`python benchmarks/validate_planner.py`; CPU only, one core; torch {torch.__version__}"
    yield ""
    yield from speed(judge)  # first: nothing is cached yet
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
    parser.add_argument("--fit", action="store_true", help="find the fitted constants again, and print them")
    parser.add_argument("--record", action="store_true", help="take today's errors as those that must not grow")
    parser.add_argument(
        "--measured",
        action="store_true",
        help="against steps on an emulated cluster; --measured --help for its options",
    )
    if "--measured" in sys.argv[1:]:
        return planner_measured.main([given for given in sys.argv[1:] if given != "--measured"])
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

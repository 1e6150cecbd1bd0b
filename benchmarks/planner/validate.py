"""The planner against published figures: seconds of runs, an overlap ablation, a comparison; and the planner's speed.

    python benchmarks/planner/validate.py            # CPU only; a minute; exits with 1 when it fails
    python benchmarks/planner/validate.py --fit      # fit the constants again and print them
    python benchmarks/planner/validate.py --record   # record today's errors as the ones that must not grow
    python benchmarks/planner/validate.py --measured # against steps on an emulated cluster: validate_measured.py

It fails if an error is more than half a percentage point above the recorded one, if a target is missed without a
suspected cause, or if the search is too slow. The points, their split, constants and assumptions are in
published_runs.py and published_fsdp.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

from benchmarks.planner import megatron_pipeline as megatron
from benchmarks.planner import validate_measured
from benchmarks.planner.choices import SPEED
from benchmarks.planner.judge import Compared, Judge
from benchmarks.planner.published_fsdp import FSDP_FITTED
from benchmarks.planner.published_runs import (
    ABLATED,
    ABLATION,
    ASSUMPTIONS,
    FITTED,
    POINTS,
    ROWS,
    SEQ,
    Point,
)
from benchmarks.planner.replay import Replay, ablated, best_replay, fit, replay, task_of
from benchmarks.planner.replay_fsdp import fit_fsdp
from benchmarks.planner.validate_fsdp import fsdp_runs
from benchmarks.shared.tables import RESULTS, markdown_table
from fourfold.models.config import config
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Task
from fourfold.planner.search import search

RECORDED = RESULTS / "validate-planner-recorded.json"


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
            f"- {machine}: fitted attention x {constants.attention:.3f}, congestion {constants.congestion:.3f}, which "
            "its file has"
        )
    yield ""
    rows, compared = [], []
    for point in POINTS:
        best = found[point.name]
        unfitted = replay(task_of(point, FITTED[point.machine]._replace(attention=1.0)), best.candidate).seconds
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
    yield from fsdp_runs(judge)
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
        for machine in FSDP_FITTED:
            fit_fsdp(machine, print)
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

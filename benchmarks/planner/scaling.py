"""Simulated weak and strong scaling of Fourfold and its peers, up to 131,072 devices.

    python benchmarks/planner/scaling.py             # CPU only, one core, 6 minutes; needs matplotlib for the plots
    python benchmarks/planner/scaling.py --quick     # three small cases, half a minute; writes to runs/scaling
    python benchmarks/planner/scaling.py --case frontier:gpt-320b:32768    # pipelines beside Megatron's; only prints

Each case is stored as soon as it is found, and a stored case is not searched again: an interrupted study resumes, and a
rerun only draws the plots. Delete the file after changing the simulator. The sides are in scaling_sides.py, the plots
in scaling_plot.py, and docs/scaling.md describes the study.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

from benchmarks.planner.published_runs import POINTS, ROWS, SEQ
from benchmarks.planner.scaling_measured import Measured, newest_measured, read_measured
from benchmarks.planner.scaling_plot import plot_all
from benchmarks.planner.scaling_sides import Case, compare, describe, fourfold_with_pipe, megatron
from benchmarks.shared.tables import RESULTS, markdown_table

ROOT = Path(__file__).parents[2]

PAIRS = [
    ("gpt-5b", 512), ("gpt-10b", 1024), ("gpt-20b", 2048), ("gpt-40b", 4096), ("gpt-80b", 8192), ("gpt-160b", 16384),
    ("gpt-320b", 32768), ("gpt-640b", 65536),
]  # fmt: skip
"""Models and devices of the published weak scaling, and one pair beyond it."""
WEAK = {"frontier": PAIRS, "perlmutter": PAIRS[:5], "dgx-h100": [*PAIRS[::2], PAIRS[-1]]}
"""The weak series by machine; Perlmutter has only about 7,000 such devices."""
MANY = (256, 1024, 4096, 16384, 65536, 131072)
STRONG = {
    ("frontier", "gpt-80b"): (32, 64, *MANY),
    ("frontier", "gpt-320b"): (64, 128, *MANY),
    ("perlmutter", "gpt-80b"): (32, 64, *MANY[1:4]),
}
"""The strong series; they begin where the model barely fits, or does not fit."""
UNFITTED = [("frontier", "gpt-320b", 32768), ("perlmutter", "gpt-40b", 4096)]
QUICK = [
    Case("weak", "perlmutter", "gpt-5b", 512),
    Case("strong", "perlmutter", "gpt-5b", 16),
    Case("strong", "perlmutter", "gpt-5b", 64),
]

HEADS = ["model", "devices", "side", "seconds", "tokens/s", "MFU", "exposed", "grid", "how"]
TITLES = {
    "weak": "Weak scaling on {machine}: the model grows with the devices",
    "strong": "Strong scaling of {model} on {machine}",
    "unfitted": "Constants of the machine file instead of fitted ones: {machine}",
}
LONGEST = 160
"""How many characters of a reason are shown."""


def cases() -> Iterator[Case]:
    for machine, pairs in WEAK.items():
        yield from (Case("weak", machine, model, devices) for model, devices in pairs)
    for (machine, model), numbers in STRONG.items():
        yield from (Case("strong", machine, model, devices) for devices in numbers)
    yield from (Case("unfitted", *one) for one in UNFITTED)


def study(wanted: Sequence[Case], file: Path) -> list[dict[str, Any]]:
    """Return all cases in this order; read those that the file has, and add those that it lacks."""
    stored = json.loads(file.read_text(encoding="utf-8"))["cases"] if file.exists() else []
    known = {Case(*(case[key] for key in ("kind", "machine", "model", "devices"))): case for case in stored}
    for case in wanted:
        if case not in known:
            print(f"{case.kind} {case.model} on {case.devices} of {case.machine}", flush=True)
            known[case] = {**asdict(case), "sides": compare(case)}
            _write(file, [known[each] for each in wanted if each in known])
    return [known[case] for case in wanted]


def _write(file: Path, found: Sequence[dict[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"batch_rows": ROWS, "seq": SEQ, "cases": found}, indent=1)
    file.write_text(text + "\n", encoding="utf-8")


# --- the table


def report(found: Sequence[Mapping[str, Any]], measured: Sequence[Measured]) -> Iterator[str]:
    yield "# Scaling, simulated"
    yield "`python benchmarks/planner/scaling.py`; CPU only; docs/scaling.md lists the assumptions."
    yield ""
    yield "Exposed: the share of a step without computation (communication, and for Megatron also the bubble)."
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in found:
        groups.setdefault(TITLES[case["kind"]].format(**case), []).append(case)
    for title, cases in groups.items():
        yield ""
        yield f"## {title}"
        yield from markdown_table(HEADS, [row for case in cases for row in _rows(case)])
    if measured:
        yield ""
        yield from _measured(measured)


def _rows(case: Mapping[str, Any]) -> Iterator[list[str]]:
    begin = [case["model"], f"{case['devices']:,}"]
    for side, found in case["sides"].items():
        if "refused" in found:
            yield [*begin, side, "-", "-", "-", "-", "-", _short(found["refused"])]
        else:
            yield [
                *begin, side, f"{found['seconds']:.4g}", f"{found['tokens_per_second']:,.0f}", f"{found['mfu']:.1%}",
                f"{found['exposed_share']:.0%}", found["grid"], found["how"],
            ]  # fmt: skip
    for point in POINTS:
        run = point.machine, point.model, point.devices
        if case["kind"] == "weak" and run == (case["machine"], case["model"], case["devices"]):
            yield [*begin, "published 4D, measured", f"{point.seconds:.4g}", "-", "-", "-", "-", "published"]


def _pipelines(text: str) -> Iterator[list[str]]:
    machine, model, devices = text.split(":")
    case = Case("weak", machine, model, int(devices))
    sides = {"Fourfold with pipe": fourfold_with_pipe, "Megatron": megatron}
    yield from _rows({**asdict(case), "sides": {name: describe(side(case), case) for name, side in sides.items()}})


def _short(reason: str) -> str:
    return reason if len(reason) <= LONGEST else reason[: LONGEST - 4].rstrip() + " ..."


def _measured(runs: Sequence[Measured]) -> Iterator[str]:
    yield "## Measured on an emulated cluster"
    rows = [
        [
            run.kind, run.side, run.model, str(run.devices), run.grid, f"{run.seconds:.4g}",
            f"{run.predicted:.4g}" if run.predicted else "-", f"{run.efficiency:.0%}",
        ]
        for run in runs
    ]  # fmt: skip
    yield from markdown_table(["kind", "side", "model", "ranks", "grid", "seconds", "predicted", "efficiency"], rows)


# --- the command


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small cases")
    parser.add_argument(
        "--case", action="append", default=[], metavar="MACHINE:MODEL:DEVICES", help="print pipelines of these cases"
    )
    parser.add_argument("--out", type=Path, help="results as .json; the table is written next to it")
    parser.add_argument("--plots", type=Path, help="folder for the plots")
    parser.add_argument("--measured", type=Path, help="measured runs to draw; default: the newest in results/")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.case:
        print("\n".join(markdown_table(HEADS, [row for text in options.case for row in _pipelines(text)])))
        return 0
    quick = ROOT / "runs" / "scaling"
    out = options.out or (quick / "scaling.json" if options.quick else RESULTS / f"{date.today()}-scaling.json")
    plots = options.plots or (quick if options.quick else ROOT / "docs")
    measured_file = options.measured or newest_measured(RESULTS)
    measured = read_measured(measured_file) if measured_file else []
    found = study(QUICK if options.quick else list(cases()), out)
    out.with_suffix(".md").write_text("\n".join(report(found, measured)) + "\n", encoding="utf-8")
    for path in plot_all(found, measured, plots):
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

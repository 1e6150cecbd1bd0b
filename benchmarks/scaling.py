"""Weak and strong scaling by simulation, Fourfold beside its peers, to 131,072 devices.

    python benchmarks/scaling.py             # CPU only, one core, 6 minutes; needs matplotlib for the plots
    python benchmarks/scaling.py --quick     # three small cases, half a minute; into runs/scaling

Every case is stored as soon as it is found, and a case that the file has is not searched again: an interrupted study
goes on, and a rerun draws the plots anew. Delete the file after a change of the simulator. Sides: scaling_sides.py;
plots: scaling_plot.py; the page about it: docs/scaling.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from planner_points import ROWS, SEQ
from scaling_measured import newest_measured, read_measured
from scaling_plot import plot_all
from scaling_sides import Case, compare
from scaling_table import report

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"

PAIRS = [
    ("gpt-5b", 512), ("gpt-10b", 1024), ("gpt-20b", 2048), ("gpt-40b", 4096), ("gpt-80b", 8192), ("gpt-160b", 16384),
    ("gpt-320b", 32768), ("gpt-640b", 65536),
]  # fmt: skip
"""Of the published weak scaling, and one beyond."""
WEAK = {"frontier": PAIRS, "perlmutter": PAIRS[:5], "dgx-h100": [*PAIRS[::2], PAIRS[-1]]}
"""Perlmutter has about 7,000 such devices."""
MANY = (256, 1024, 4096, 16384, 65536, 131072)
STRONG = {
    ("frontier", "gpt-80b"): (32, 64, *MANY),
    ("frontier", "gpt-320b"): (64, 128, *MANY),
    ("perlmutter", "gpt-80b"): (32, 64, *MANY[1:4]),
}
"""From numbers of devices on which the model barely fits, or does not."""
UNFITTED = [("frontier", "gpt-320b", 32768), ("perlmutter", "gpt-40b", 4096)]
QUICK = [
    Case("weak", "perlmutter", "gpt-5b", 512),
    Case("strong", "perlmutter", "gpt-5b", 16),
    Case("strong", "perlmutter", "gpt-5b", 64),
]


def cases() -> Iterator[Case]:
    for machine, pairs in WEAK.items():
        yield from (Case("weak", machine, model, devices) for model, devices in pairs)
    for (machine, model), numbers in STRONG.items():
        yield from (Case("strong", machine, model, devices) for devices in numbers)
    yield from (Case("unfitted", *one) for one in UNFITTED)


def study(wanted: Sequence[Case], file: Path) -> list[dict[str, Any]]:
    """All cases in this order; what the file has is taken from it, what it lacks is added to it."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three small cases")
    parser.add_argument("--out", type=Path, help="the results, .json; the table is written beside it")
    parser.add_argument("--plots", type=Path, help="the folder of the plots")
    parser.add_argument("--measured", type=Path, help="measured runs to draw; by default the newest in results/")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
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

"""The results of the scaling study as tables: every case, every side, and why a side is missing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markdown_table import table
from planner_points import POINTS
from scaling_measured import Measured

HEADS = ["model", "devices", "side", "seconds", "tokens/s", "MFU", "exposed", "grid", "how"]
TITLES = {
    "weak": "Weak scaling on {machine}: the model grows with the devices",
    "strong": "Strong scaling of {model} on {machine}",
    "unfitted": "Constants of the machine file instead of fitted ones: {machine}",
}
LONGEST = 160
"""Characters of a reason that are shown."""


def report(found: Sequence[Mapping[str, Any]], measured: Sequence[Measured]) -> Iterator[str]:
    yield "# Scaling, simulated"
    yield "`python benchmarks/scaling.py`; CPU only; docs/scaling.md says what is assumed."
    yield ""
    yield "Exposed: the share of a step in which nothing is computed (communication, for Megatron the bubble too)."
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for case in found:
        groups.setdefault(TITLES[case["kind"]].format(**case), []).append(case)
    for title, cases in groups.items():
        yield ""
        yield f"## {title}"
        yield from table(HEADS, [row for case in cases for row in _rows(case)])
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
    yield from table(["kind", "side", "model", "ranks", "grid", "seconds", "predicted", "efficiency"], rows)

"""Measured runs that appear in the same plots as the simulated ones: read from a file and checked.

A file is a list of runs, each {"side", "devices", "grid", "model", "seconds", "predicted", "kind", "compute_seconds"}:
`seconds` per step, the `predicted` ones (or null), and the `compute_seconds` of a step without communication.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any

KINDS = "weak", "strong"


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured run."""

    side: str
    devices: int
    grid: str
    model: str
    seconds: float
    predicted: float | None
    kind: str
    compute_seconds: float

    @property
    def efficiency(self) -> float:
        """Return the share of a step that computation alone would take."""
        return self.compute_seconds / self.seconds


KEYS = [field.name for field in fields(Measured)]


def newest_measured(folder: Path) -> Path | None:
    """Return the newest `*-emulated-scaling.json` in a folder; the names begin with the date."""
    return max(folder.glob("*-emulated-scaling.json"), default=None)


def read_measured(file: Path) -> list[Measured]:
    runs = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(runs, list):
        raise ValueError(f"{file} must be a list of runs with {', '.join(KEYS)}; it is a {type(runs).__name__}")
    return [_read(run, f"{file}, run {index}") for index, run in enumerate(runs)]


def _read(run: Any, where: str) -> Measured:
    if not isinstance(run, dict) or set(run) != set(KEYS):
        found = ", ".join(run) if isinstance(run, dict) else repr(run)
        raise ValueError(f"{where} must have exactly {', '.join(KEYS)}; it has {found}")
    if run["kind"] not in KINDS:
        raise ValueError(f"{where}: kind={run['kind']!r} is none of {KINDS}")
    for key in ("devices", "seconds", "predicted", "compute_seconds"):
        value = run[key]
        if not (value is None and key == "predicted") and not (isinstance(value, Real) and value > 0):
            raise ValueError(f"{where}: {key}={value!r} must be a number above 0")
    return Measured(**run)


def best_of_each(runs: list[Measured], kind: str) -> dict[tuple[str, str], list[Measured]]:
    """Return the fastest grid for each number of devices, in order, by side and model."""
    best: dict[tuple[str, str, int], Measured] = {}
    for run in (run for run in runs if run.kind == kind):
        key = run.side, run.model, run.devices
        best[key] = min(best.get(key, run), run, key=lambda one: one.seconds)
    found: dict[tuple[str, str], list[Measured]] = {}
    for side, model, devices in sorted(best):
        found.setdefault((side, model), []).append(best[side, model, devices])
    return found

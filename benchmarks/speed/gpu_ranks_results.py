"""The results of `gpu_ranks.py` as a JSONL file: one object per group and one per line of the table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.workloads import Line


@dataclass
class LineRecord:
    """One line of the table."""

    group: str
    line: str
    kind: str
    grid: dict[str, int]
    variant: str
    seconds: dict[str, list[float]]
    """Seconds per step by measure (step, compute alone, communication alone): one number per round."""
    mode: str = "eager"
    rounds: list[float] = field(default_factory=list)
    """When each round began, in seconds since 1970. Lines that share a round were measured side by side."""
    losses: list[float] = field(default_factory=list)
    """The losses of the warm-up steps, all on the same batch."""
    first_losses: list[float] = field(default_factory=list)
    """The loss of the first step from initial weights, one per round; all are equal except for rounding."""
    peak_bytes: int | None = None
    collectives: int = 0
    error: str | None = None
    wall_seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds of the latest turn by measure, including its overhead."""
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """CPU seconds per step by kind of thread, of all ranks together: the mean over the rounds that sampled them."""
    cpu_rounds: int = 0
    figures: dict[str, list[float]] = field(default_factory=dict)
    """What else a benchmark measured or predicted, by name: one number per round."""

    @property
    def turn_seconds(self) -> float:
        return sum(self.wall_seconds.values())

    def median(self, measure: str) -> float | None:
        return median(self.seconds[measure]) if self.seconds.get(measure) else None

    @property
    def step(self) -> float:
        """Return the median seconds per step."""
        return median(self.seconds["step"])

    @property
    def spread(self) -> float:
        return max(self.seconds["step"]) - min(self.seconds["step"])

    @property
    def measured(self) -> bool:
        return self.error is None and bool(self.seconds["step"])

    def add_cpu_seconds(self, spent: dict[str, float]) -> None:
        kinds = {*spent, *self.cpu_seconds}
        total = {kind: self.cpu_seconds.get(kind, 0.0) * self.cpu_rounds + spent.get(kind, 0.0) for kind in kinds}
        self.cpu_rounds += 1
        self.cpu_seconds = {kind: seconds / self.cpu_rounds for kind, seconds in total.items()}

    def ratios(self, other: LineRecord) -> list[float]:
        """Return this line's seconds over the other's, for each round in which both were measured."""
        theirs = dict(zip(other.rounds, other.seconds["step"], strict=False))
        mine = zip(self.rounds, self.seconds["step"], strict=False)
        return [seconds / theirs[began] for began, seconds in mine if began in theirs]


class Results:
    """The groups and records of a file, and what this call adds to them."""

    def __init__(
        self, path: Path, groups: dict[str, dict[str, Any]], records: dict[tuple[str, str], LineRecord]
    ) -> None:
        self.path, self.groups, self.records = path, groups, records
        self.settings: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any] | None = None) -> Results:
        """Read the file if it exists. Other settings than the file's are refused: the results would not compare."""
        groups, records = {}, {}
        for text in path.read_text().splitlines() if path.exists() else []:
            found = json.loads(text)
            if "runs" in found:
                groups[found["group"]] = found
            else:
                records[found["group"], found["line"]] = LineRecord(**found)
        results = cls(path, groups, records)
        for name, group in groups.items():
            if settings is not None and group["settings"] != settings:
                raise SystemExit(
                    f"{path}: {name} was measured with {group['settings']}, but this call asks for {settings}; "
                    "choose another --out"
                )
        results.settings = settings or {}
        return results

    def begin(self, name: str, about: dict[str, Any], run: dict[str, Any]) -> None:
        """Note a call that will add to this group."""
        fresh = {"group": name, **about, "settings": self.settings, "runs": []}
        self.groups.setdefault(name, fresh)["runs"].append(run)

    def of(self, group: str, line: Line) -> LineRecord:
        empty: dict[str, list[float]] = {measure: [] for measure in line.measures}
        others = {axis: size for axis, size in line.shape.sizes.items() if axis != "pipe"}
        grid = {"pipe": line.pipe * line.shape.pipe, **others}
        fresh = LineRecord(group, line.name, line.kind, grid, line.label, empty, line.mode)
        return self.records.setdefault((group, line.name), fresh)

    def shared_rounds(self, group: str, lines: Sequence[Line]) -> set[float]:
        """Return the rounds in which all of these lines were measured, without lines that failed."""
        records = [self.of(group, line) for line in lines]
        rounds = [set(record.rounds) for record in records if record.error is None]
        return set.intersection(*rounds) if rounds else set()

    def left(self, group: str, lines: Sequence[Line], rounds: int) -> int:
        """Return how many rounds these lines still need side by side, or 0 if all of them failed."""
        alive = any(self.of(group, line).error is None for line in lines)
        return max(0, rounds - len(self.shared_rounds(group, lines))) if alive else 0

    def forget_errors(self) -> None:
        self.records = {key: record for key, record in self.records.items() if record.error is None}

    def write(self) -> None:
        """Write the whole file to a temporary one and rename it, so that an interruption leaves the old file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [asdict(record) for record in self.records.values() if record.error or record.seconds["step"]]
        texts = [json.dumps(found) for found in (*self.groups.values(), *kept)]
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("".join(text + "\n" for text in texts))
        os.replace(beside, self.path)

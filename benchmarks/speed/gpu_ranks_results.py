"""The results of `gpu_ranks.py` as a JSONL file: one object per group and one per line of the table."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.workloads import Line, Workload


@dataclass
class LineRecord:
    """One line of the table."""

    group: str
    line: str
    kind: str
    grid: dict[str, int]
    variant: str
    seconds: dict[str, list[float]]
    """By measure (step, compute alone, communication alone): one number per round."""
    losses: list[float] = field(default_factory=list)
    """The losses of the warm-up steps, all on the same batch."""
    first_losses: list[float] = field(default_factory=list)
    """The loss of the first step from initial weights, one per round; all are equal except for rounding."""
    peak_bytes: int | None = None
    collectives: int = 0
    error: str | None = None
    wall_seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds of the latest turn by measure, including its overhead."""

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

    def begin(self, name: str, workload: Workload, world: int, run: dict[str, Any]) -> None:
        """Note a call that will add to this group."""
        config = workload.config
        model = {**asdict(config), "parameters": config.parameters}
        batch = {"rows": workload.rows, "seq": config.seq, "dtype": str(workload.dtype).removeprefix("torch.")}
        fresh = {"group": name, "ranks": world, "size": workload.name, "model": model, **batch}
        fresh["settings"] = self.settings
        self.groups.setdefault(name, {**fresh, "runs": []})["runs"].append(run)

    def of(self, group: str, line: Line) -> LineRecord:
        empty: dict[str, list[float]] = {measure: [] for measure in line.measures}
        fresh = LineRecord(group, line.name, line.kind, line.shape.sizes, line.variant, empty)
        return self.records.setdefault((group, line.name), fresh)

    def unfinished(self, group: str, lines: Sequence[Line], rounds: int) -> list[Line]:
        records = [(line, self.records.get((group, line.name))) for line in lines]
        return [
            line
            for line, record in records
            if record is None or (record.error is None and len(record.seconds["step"]) < rounds)
        ]

    def forget_errors(self) -> None:
        self.records = {key: record for key, record in self.records.items() if record.error is None}

    def write(self) -> None:
        """Write the whole file to a temporary one and rename it, so that an interruption leaves the old file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        texts = [json.dumps(found) for found in (*self.groups.values(), *map(asdict, self.records.values()))]
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text("".join(text + "\n" for text in texts))
        os.replace(beside, self.path)

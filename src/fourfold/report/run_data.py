"""Read a run folder: `config.toml`, `run.json`, `metrics.jsonl` and `profile/`, as the trainer writes them.

A run may have been killed in the middle of a line, resumed from an earlier step, or diverged. All of this can be read:
`RunData.notes` mentions everything that was left out, so nothing is dropped silently. It is an error if the folder is
not a run, or if `run.json` does not say which model ran on which grid.

Invariant: `steps` and `evaluations` are in the order of their steps, each step once (its last record counts).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fourfold.axes import AXES
from fourfold.grid import Shape
from fourfold.report.units import known

FILES = ("config.toml", "run.json", "metrics.jsonl")
"""Files that every run folder has."""

NOT_DRAWN = ("end", "profile", "compared", "saved")
"""Events of `metrics.jsonl` that the figures do not need: their numbers have own files, or are in `run.json`."""


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One logged step. None means not recorded. A loss or a norm may be NaN or infinite."""

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    peak_memory_bytes: float | None
    wire_bytes: Mapping[str, float]
    exposed_seconds: Mapping[str, float]

    @property
    def diverged(self) -> bool:
        """Whether the loss is NaN or infinite."""
        return self.loss is not None and not known(self.loss)

    def part_seconds(self, part: str) -> float | None:
        """Return the seconds of a part of the step: exposed over an axis, or `compute`, which is all other time."""
        if part != "compute":
            return self.exposed_seconds.get(part, 0.0)
        return None if self.seconds is None else max(0.0, self.seconds - sum(self.exposed_seconds.values()))


@dataclass(frozen=True, slots=True)
class OverRanks:
    """A number over all ranks: its mean, and the value and rank of the slowest. None means not known."""

    mean: float | None
    slowest: float | None
    slowest_rank: int | None


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """The content of `profile/summary.json`: numbers of the profiled steps, per step."""

    first: int
    last: int
    seconds: float | None
    by_axis: Mapping[str, tuple[OverRanks, OverRanks]]
    """Seconds on the link, and seconds exposed."""
    link_seconds_are: str
    traces: list[Path]
    predicted: Path | None
    """The planner's timeline of a step."""


@dataclass(slots=True)
class RunData:
    """Everything that the page shows of a run."""

    name: str
    config: str
    facts: Mapping[str, Any]
    """The content of `run.json`."""
    shape: Shape
    steps: list[LoggedStep] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    """Validation loss by step."""
    skipped: dict[int, list[str]] = field(default_factory=dict)
    """Skipped steps, each with the parameters whose gradient was not finite, if they were recorded."""
    end: str | None = None
    """Why the run ended; None if it recorded no end."""
    profile: ProfileSummary | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def axes(self) -> list[str]:
        """The axes that have bytes or exposed time, those of the grid first."""
        seen = {axis for step in self.steps for axis in (*step.wire_bytes, *step.exposed_seconds)}
        return [axis for axis in AXES if axis in seen] + sorted(seen - set(AXES))

    def number(self, *path: str) -> float | None:
        """Return a number of `run.json`, None if it is missing: `number("flops_per_token", "model")`."""
        found: Any = self.facts
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return _number(found)

    def text(self, key: str) -> str:
        """Return a text of `run.json`, empty if it is missing."""
        return str(self.facts[key]) if self.facts.get(key) is not None else ""


def read_run(folder: Path) -> RunData:
    """Read the run of a folder. FileNotFoundError names what is missing, ValueError what does not fit."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give the folder that `fourfold train` wrote its run to")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} is not a run: it has no {', '.join(missing)}; a run folder has {', '.join(FILES)}"
        )
    facts, shape = _read_facts(folder / "run.json")
    # errors="replace" here and below: a run that was killed may end in the middle of a character.
    config = (folder / "config.toml").read_text(encoding="utf-8", errors="replace")
    run = RunData(folder.resolve().name, config, facts, shape)
    _read_metrics(run, (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace"))
    if (folder / "profile" / "summary.json").is_file():
        _read_profile(run, (folder / "profile").resolve())
    return run


def _read_facts(path: Path) -> tuple[Mapping[str, Any], Shape]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; it must be as `fourfold train` wrote it") from error
    missing = [key for key in ("model", "grid") if not isinstance(facts, dict) or key not in facts]
    if missing:
        raise ValueError(f"{path} must be an object with model and grid, but has no {' and no '.join(missing)}")
    try:
        order = tuple(facts.get("order", AXES))
        # A run from before an axis existed does not name it; its size is 1, so its place in the order means nothing.
        return facts, Shape(**facts["grid"], order=order + tuple(axis for axis in AXES if axis not in order))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: grid={facts['grid']!r}, order={facts.get('order')!r}: {error}") from error


def _read_metrics(run: RunData, text: str) -> None:
    lines = text.rstrip("\n").split("\n")
    steps: dict[int, LoggedStep] = {}
    unread: list[int] = []
    unknown: Counter[str] = Counter()
    repeated = 0
    for number, line in enumerate(lines, 1):
        record = _parse_record(line)
        if record is None:
            unread += [number] if line.strip() else []
            continue
        event, step = str(record.get("event")), record["step"]
        # A resumed run appends to the file, so an end counts only if nothing follows it.
        run.end = str(record.get("reason", "end")) if event == "end" else None
        if event == "step":
            repeated += step in steps
            steps[step] = _parse_step(record)
        unknown.update([event] if not _add_event(run, event, record) else [])
    run.steps = [steps[step] for step in sorted(steps)]
    run.evaluations = dict(sorted(run.evaluations.items()))
    run.skipped = dict(sorted(run.skipped.items()))
    if len(lines) in unread:
        run.notes.append(f"The last line of metrics.jsonl (line {unread.pop()}) is cut off and was left out.")
    if unread:
        named = ", ".join(map(str, unread[:8])) + (" ..." if len(unread) > 8 else "")
        run.notes.append(f"{len(unread)} lines of metrics.jsonl could not be read and were left out: line {named}.")
    if repeated:
        run.notes.append(f"{repeated} logged steps were taken again after a resume; the later record is shown.")
    run.notes += [f"{times} records of the unknown event {event!r} are not shown." for event, times in unknown.items()]
    if diverged := [step.step for step in run.steps if step.diverged]:
        times = f"at {len(diverged)} logged steps, first at step {diverged[0]}"
        run.notes.append(f"The training loss is NaN or infinite {times}.")
    if not run.steps:
        run.notes.append("metrics.jsonl has no step: the run ended before its first one, or has just begun.")


def _add_event(run: RunData, event: str, record: Mapping[str, Any]) -> bool:
    """Add everything that a record has besides the numbers of a step; return False for an unknown event."""
    step = record["step"]
    match event:
        case "step":
            # Only true and false count: a record without the field does not say whether the step was skipped.
            if record.get("skipped") is True:
                run.skipped.setdefault(step, [])
            elif record.get("skipped") is False:
                run.skipped.pop(step, None)  # a resumed run took this step again and did not skip it
        case "evaluation":
            loss = _number(record.get("loss"))
            if known(loss):
                run.evaluations[step] = loss
            else:
                run.notes.append(f"The validation loss of step {step} is not a finite number.")
        case "skipped":
            named, parameter = run.skipped.setdefault(step, []), record.get("parameter")
            if parameter is not None and str(parameter) not in named:
                named.append(str(parameter))
        case "resumed":
            run.notes.append(f"The run was resumed after step {step}, on {record.get('grid', 'an unknown grid')}.")
        case _:
            return event in NOT_DRAWN
    return True


def _read_profile(run: RunData, folder: Path) -> None:
    def over_ranks(found: Mapping[str, Any]) -> OverRanks:
        return OverRanks(_number(found["mean"]), _number(found["slowest"]), int(found["slowest_rank"]))

    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        (first, last), per_step = found["steps"], found["per_step"]
        by_axis = {
            str(axis): (over_ranks(link), over_ranks(per_step["exposed_seconds"][axis]))
            for axis, link in per_step["link_seconds"].items()
        }
        predicted = folder / "predicted.json"
        files = [folder / f"rank-{rank}.json" for rank in range(int(found["ranks"]))]
        run.profile = ProfileSummary(
            int(first),
            int(last),
            _number(per_step["seconds"]["mean"]),
            by_axis,
            str(found.get("link_seconds_are", "")),
            [file for file in files if file.is_file()],
            predicted if predicted.is_file() else None,
        )
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        run.notes.append(f"profile/summary.json could not be read ({type(error).__name__}: {error}).")


def _parse_record(line: str) -> dict[str, Any] | None:
    """Return an object with a whole number `step`, or None if the line is something else."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and not isinstance(step, bool) else None


def _parse_step(record: Mapping[str, Any]) -> LoggedStep:
    values: dict[str, Any] = {name: _number(record.get(name)) for name in LoggedStep.__slots__}
    for name in ("loss", "grad_norm"):
        if name in record and record[name] is None:
            values[name] = math.nan  # JSON has no NaN: the trainer writes a number that is not finite as null
    for name in ("wire_bytes", "exposed_seconds"):
        found = record.get(name)
        numbers = {str(axis): _number(value) for axis, value in found.items()} if isinstance(found, dict) else {}
        values[name] = {axis: value for axis, value in numbers.items() if known(value)}
    return LoggedStep(**values)


def _number(value: Any) -> float | None:
    # In Python a bool is an int, but `true` in a file is not a number.
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

"""Reads a run folder: `config.toml`, `run.json`, `metrics.jsonl` and `profile/`, as the trainer writes them.

A run may have been killed in the middle of a line, resumed from an earlier step, or have diverged. All of it is
readable: what could not be used is said in `Run.notes`, never passed over in silence. Only a folder that is no
run is an error, and a `run.json` that does not say what ran.

Invariant: `steps` and `evaluations` are in order of their step, each step once (the last record of it counts).
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


@dataclass(frozen=True, slots=True)
class Step:
    """One logged step. None: not recorded. A loss or a norm may be NaN or infinite."""

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
        return self.loss is not None and not known(self.loss)

    @property
    def compute_seconds(self) -> float | None:
        """What is left of the step without exposed communication; never below 0."""
        if self.seconds is None:
            return None
        return max(0.0, self.seconds - sum(self.exposed_seconds.values()))


@dataclass(frozen=True, slots=True)
class OverRanks:
    """A number of every rank: its mean, and that of the slowest rank. None: not known."""

    mean: float | None
    slowest: float | None
    slowest_rank: int | None


@dataclass(frozen=True, slots=True)
class Profile:
    """What `profile/summary.json` says of the profiled steps, per step."""

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
class Run:
    """Everything the page needs to know of a run."""

    name: str
    config: str
    facts: Mapping[str, Any]
    shape: Shape
    steps: list[Step] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    skipped: dict[int, list[str]] = field(default_factory=dict)
    """Skipped steps, and the parameters whose gradient was not finite where that was recorded."""
    end: str | None = None
    """Why the run ended, None where it did not say."""
    profile: Profile | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def axes(self) -> list[str]:
        """The axes that carry bytes or exposed time, those of the grid first."""
        seen = {axis for step in self.steps for axis in (*step.wire_bytes, *step.exposed_seconds)}
        return [axis for axis in AXES if axis in seen] + sorted(seen - set(AXES))

    def number(self, *path: str) -> float | None:
        """A number of `run.json`, None where it is absent: `number("flops_per_token", "model")`."""
        found: Any = self.facts
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return _number(found)

    def text(self, key: str) -> str:
        """A text of `run.json`, empty where it is absent."""
        return str(self.facts[key]) if self.facts.get(key) is not None else ""


def read_run(folder: Path) -> Run:
    """The run of a folder; FileNotFoundError names what is missing, ValueError what does not fit."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; give the folder that `fourfold train` wrote its run to")
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} is not a run: it has no {', '.join(missing)}; a run folder holds {', '.join(FILES)}"
        )
    facts = _facts(folder / "run.json")
    config = (folder / "config.toml").read_text(encoding="utf-8", errors="replace")
    run = Run(folder.resolve().name, config, facts, _shape(facts, folder / "run.json"))
    _read_metrics(run, (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace"))
    if (folder / "profile" / "summary.json").is_file():
        _read_profile(run, (folder / "profile").resolve())
    return run


def _facts(path: Path) -> Mapping[str, Any]:
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; it must be as `fourfold train` wrote it") from error
    missing = [key for key in ("model", "grid") if not isinstance(facts, dict) or key not in facts]
    if missing:
        raise ValueError(f"{path} must be an object with model and grid, but has no {' and no '.join(missing)}")
    return facts


def _shape(facts: Mapping[str, Any], path: Path) -> Shape:
    try:
        return Shape(**facts["grid"], order=tuple(facts.get("order", AXES)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: grid={facts['grid']!r}, order={facts.get('order')!r}: {error}") from error


def _read_metrics(run: Run, text: str) -> None:
    lines = text.rstrip("\n").split("\n")
    steps: dict[int, Step] = {}
    unread: list[int] = []
    unknown: Counter[str] = Counter()
    repeated = 0
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is None:
            unread += [number] if line.strip() else []
            continue
        event, step = str(record.get("event")), record["step"]
        run.end = str(record.get("reason", "end")) if event == "end" else None  # nothing may follow the end
        if event == "step":
            repeated += step in steps
            steps[step] = _step(record)
        if event in _ADD:
            _ADD[event](run, record)
        elif event not in (
            "end",
            "profile",
            "compared",
            "saved",
        ):  # these have files of their own, or stand in run.json
            unknown[event] += 1
    run.steps = [steps[step] for step in sorted(steps)]
    run.evaluations = dict(sorted(run.evaluations.items()))
    run.skipped = dict(sorted(run.skipped.items()))
    _note_unread(run, unread, len(lines))
    if repeated:
        run.notes.append(f"{repeated} logged steps were taken again after a resume; the later record is shown.")
    run.notes += [f"{times} records of the unknown event {event!r} are not shown." for event, times in unknown.items()]
    _note_numbers(run)


def _read_profile(run: Run, folder: Path) -> None:
    try:
        found = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        first, last = found["steps"]
        per_step = found["per_step"]
        by_axis = {
            str(axis): (_over_ranks(link), _over_ranks(per_step["exposed_seconds"][axis]))
            for axis, link in per_step["link_seconds"].items()
        }
        predicted = folder / "predicted.json"
        files = [folder / f"rank-{rank}.json" for rank in range(int(found["ranks"]))]
        run.profile = Profile(
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


def _over_ranks(found: Mapping[str, Any]) -> OverRanks:
    return OverRanks(_number(found["mean"]), _number(found["slowest"]), int(found["slowest_rank"]))


def _add_step(run: Run, record: Mapping[str, Any]) -> None:
    if record.get("skipped") is True:
        run.skipped.setdefault(record["step"], [])
    elif record.get("skipped") is False:
        run.skipped.pop(record["step"], None)  # a resumed run took this step again, and kept it


def _add_evaluation(run: Run, record: Mapping[str, Any]) -> None:
    loss = _number(record.get("loss"))
    if loss is not None and known(loss):
        run.evaluations[record["step"]] = loss
    else:
        run.notes.append(f"The validation loss of step {record['step']} is not a finite number.")


def _add_skipped(run: Run, record: Mapping[str, Any]) -> None:
    named, parameter = run.skipped.setdefault(record["step"], []), record.get("parameter")
    if parameter is not None and str(parameter) not in named:
        named.append(str(parameter))


def _add_resumed(run: Run, record: Mapping[str, Any]) -> None:
    run.notes.append(f"The run was resumed after step {record['step']}, on {record.get('grid', 'an unknown grid')}.")


_ADD = {"step": _add_step, "evaluation": _add_evaluation, "skipped": _add_skipped, "resumed": _add_resumed}


def _note_unread(run: Run, unread: list[int], lines: int) -> None:
    if lines in unread:
        run.notes.append(f"The last line of metrics.jsonl (line {lines}) is cut off and was left out.")
    others = [number for number in unread if number != lines]
    if others:
        named = ", ".join(map(str, others[:8])) + (" ..." if len(others) > 8 else "")
        run.notes.append(f"{len(others)} lines of metrics.jsonl could not be read and were left out: line {named}.")


def _note_numbers(run: Run) -> None:
    diverged = [step.step for step in run.steps if step.diverged]
    if diverged:
        run.notes.append(
            f"The training loss is NaN or infinite at {len(diverged)} logged steps, first at step {diverged[0]}."
        )
    if not run.steps:
        run.notes.append("metrics.jsonl holds no step: the run ended before its first one, or has just begun.")


def _record(line: str) -> dict[str, Any] | None:
    """An object with a whole number `step`, or None."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and not isinstance(step, bool) else None


def _step(record: Mapping[str, Any]) -> Step:
    single = {name: _measured(record, name) for name in Step.__slots__ if name not in ("step", *_BY_AXIS)}
    by_axis = {name: _by_axis(record.get(name)) for name in _BY_AXIS}
    return Step(step=record["step"], **single, **by_axis)  # type: ignore[arg-type]


_BY_AXIS = ("wire_bytes", "exposed_seconds")


def _by_axis(found: Any) -> dict[str, float]:
    numbers = {str(axis): _number(value) for axis, value in found.items()} if isinstance(found, dict) else {}
    return {axis: value for axis, value in numbers.items() if value is not None and known(value)}


def _measured(record: Mapping[str, Any], name: str) -> float | None:
    """A number of a record. Losses and norms that are null were not finite: JSON has no other way to say so."""
    if name in ("loss", "grad_norm") and name in record and record[name] is None:
        return math.nan
    return _number(record.get(name))


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

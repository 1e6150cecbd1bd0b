"""Read a run folder as the trainer writes it: `config.toml`, `run.json`, `metrics.jsonl`, `profile/`, `pipeline/`,
`documents/`.

A run may have been killed in the middle of a line, resumed from an earlier step, or diverged. All of this can be read:
`RunData.notes` mentions everything that was left out, so nothing is dropped silently. It is an error if the folder is
not a run, or if `run.json` does not say which model ran on which grid.

Invariant: `steps` and `evaluations` are in the order of their steps, each step once (its last record counts).
"""

from __future__ import annotations

import json
import math
import multiprocessing
import operator
import os
import re
import sys
import threading
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, overload

from fourfold.axes import AXES, PIPE
from fourfold.expert_counts import COUNTS, StepCounts, read_counts
from fourfold.parse import parse_json
from fourfold.report.units import known
from fourfold.schedule.action import Action, Schedule
from fourfold.schedule.play import ActionSpan, Played, play
from fourfold.schedule.text import from_csv
from fourfold.shape import Shape

FILES = ("config.toml", "run.json", "metrics.jsonl")
"""Files that every run folder has."""

NOT_DRAWN = ("end", "profile", "compared", "corrected", "saved")
"""Events of `metrics.jsonl` that the figures do not need: their numbers have own files, or are in `run.json`."""


NUMBERS = (
    "loss", "grad_norm", "learning_rate", "seconds", "tokens_per_second", "mfu", "hfu", "peak_memory_bytes",
    "imbalance",
)  # fmt: skip
"""The numbers of a step, by their names in metrics.jsonl."""
BY_AXIS = ("wire_bytes", "exposed_seconds")
"""The numbers of a step that are given by axis."""
MAY_DIVERGE = ("loss", "grad_norm")
"""The numbers that the trainer writes as null when they are not finite, because JSON has no NaN."""
MAX_COLUMNS = 64
"""The largest number of columns that are read. A real run has fewer than 20; a broken file could name a new axis in
every line."""
NAMED = 8
"""How many lines, steps or events a note lists before it only counts them."""
PIECE_BYTES = 8 << 20
"""Bytes of metrics.jsonl that one task reads: a tenth of a second of work, and a few MiB of numbers."""
CHUNK_BYTES = 1 << 17
"""Bytes whose lines are parsed together: their parts fit into the processor's cache."""
MAX_WORKERS = 4
"""The largest number of processes that read a file: more would only wait for the process that joins their pieces."""

MOST_COUNTS = 400
"""The most steps of which the load of experts is read: a page draws no more points."""
EXPERT_PARTS = 4
"""The parts of a run for which the page shows the load of every expert."""
MAX_STEP = 1 << 63
"""A step from here on is no step of a run: it would not fit into 64 bits."""

Key = tuple[str, ...]
"""The name of a column: `("loss",)` or `("wire_bytes", "x")`."""
STEP: Key = ("step",)
SKIPPED: Key = ("skipped",)


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One logged step. None means not recorded. A loss or a norm that is not finite is infinite here."""

    step: int
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    peak_memory_bytes: float | None
    imbalance: float | None
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


class StepTable(Sequence[LoggedStep]):
    """The logged steps, one array per number: a million steps take 8 MB per column, and no object per step.

    In a column NaN means not recorded, and infinity that the number was recorded and is not finite.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.lines = array("q")
        """The line of metrics.jsonl that each step is from."""
        self.skips = array("b")
        """1 for a step that was skipped, 0 for one that was taken, -1 where the record does not say."""
        self.columns: dict[Key, array[float]] = {(name,): array("d") for name in NUMBERS}
        self.left_out = False
        """Whether there were more columns than `MAX_COLUMNS`."""

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, place: int) -> LoggedStep: ...
    @overload
    def __getitem__(self, place: slice) -> list[LoggedStep]: ...
    def __getitem__(self, place: int | slice) -> LoggedStep | list[LoggedStep]:
        if isinstance(place, slice):
            return [self[one] for one in range(len(self))[place]]
        numbers: dict[str, Any] = {name: _recorded(self.column(name)[place]) for name in NUMBERS}
        by_axis: dict[str, Any] = {
            kind: {axis: column[place] for axis, column in self.by_axis(kind).items() if known(column[place])}
            for kind in BY_AXIS
        }
        return LoggedStep(self.steps[place], **numbers, **by_axis)

    def column(self, name: str) -> array[float]:
        """Return a number of all steps."""
        return self.columns[(name,)]

    def by_axis(self, kind: str) -> dict[str, array[float]]:
        """Return a number of all steps by axis: `wire_bytes` or `exposed_seconds`."""
        return {key[1]: column for key, column in self.columns.items() if len(key) == 2 and key[0] == kind}

    def diverged(self) -> list[int]:
        """Return the steps whose loss is not finite."""
        losses = self.column("loss")
        if all(map(math.isfinite, losses)):
            return []
        return [step for step, loss in zip(self.steps, losses, strict=True) if math.isinf(loss)]

    def between(self, first: int, last: int) -> StepTable:
        """Return the table of the steps from one to another, both included, of a table that is ordered."""
        places = range(bisect_left(self.steps, first), bisect_right(self.steps, last))
        return self if len(places) == len(self) else self._at(places)

    def extend(
        self,
        steps: Sequence[int],
        lines: Sequence[int],
        skips: Sequence[int],
        columns: Mapping[Key, array[float]],
    ) -> None:
        """Add steps; a column that is missing on either side is filled with NaN."""
        before = len(self)
        for key in columns:
            if key not in self.columns:
                if len(self.columns) >= MAX_COLUMNS:
                    self.left_out = True
                    continue
                self.columns[key] = array("d", [math.nan]) * before
        for key, column in self.columns.items():
            column.extend(columns[key] if key in columns else array("d", [math.nan]) * len(steps))
        self.steps.extend(steps)
        self.lines.extend(lines)
        self.skips.extend(skips)

    def ordered(self) -> StepTable:
        """Return the table in the order of its steps, each step once: its last record counts."""
        places = last_in_order(self.steps, self.lines)
        return self if places is None else self._at(places)

    def _at(self, places: Sequence[int]) -> StepTable:
        found = StepTable()
        found.steps, found.lines, found.skips = (_chosen(one, places) for one in (self.steps, self.lines, self.skips))
        found.columns = {key: _chosen(column, places) for key, column in self.columns.items()}
        found.left_out = self.left_out
        return found


def last_in_order(steps: array[int], lines: Sequence[int]) -> list[int] | None:
    """Return the places of the steps in ascending order, of equal steps that of the last line.

    None means that the steps are in that order already.
    """
    if all(map(operator.lt, steps, islice(steps, 1, None))):
        return None
    last: dict[int, int] = {}
    for place, (step, line) in enumerate(zip(steps, lines, strict=True)):
        if step not in last or lines[last[step]] < line:
            last[step] = place
    return [last[step] for step in sorted(last)]


def _chosen(column: array[Any], places: Sequence[int]) -> array[Any]:
    return array(column.typecode, map(column.__getitem__, places))


def _recorded(value: float) -> float | None:
    return None if math.isnan(value) else value


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


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """The schedule of a pipeline, and when its actions ran in one step."""

    schedule: Schedule
    step: int | None = None
    """The step that was recorded; None if none was, or not on all pipe ranks."""
    spans: tuple[tuple[ActionSpan, ...], ...] = ()
    """The actions of every pipe rank, in seconds since the first of them began."""

    @property
    def makespan(self) -> float:
        return max(span.end for spans in self.spans for span in spans)

    @property
    def idle_share(self) -> float:
        """The share of all pipe ranks' time in which they did not compute."""
        busy = sum(span.end - span.start for spans in self.spans for span in spans)
        return 1 - busy / (self.makespan * len(self.spans)) if self.makespan > 0 else 0.0

    def planned(self) -> Played:
        """Return the schedule with the median time of each stage's actions, and with messages that take no time.

        Without a recorded step F, B and W take a second each.
        """
        stages = range(self.schedule.stages)
        taken: dict[tuple[str, int], list[float]] = {}
        for span in (span for spans in self.spans for span in spans):
            taken.setdefault((span.action.kind, span.action.stage), []).append(span.end - span.start)

        def seconds(kind: str, stage: int) -> float:
            if not self.spans:
                return 1.0
            if found := taken.get((kind, stage)):
                return median(found)
            both = taken.get(("BW", stage))
            return median(both) / 2 if both else 0.0

        return play(self.schedule, {kind: [seconds(kind, stage) for stage in stages] for kind in ("F", "B", "W")})


class BatchPart(NamedTuple):
    """A part of a micro-batch whose tokens are assigned to the places of a group by themselves."""

    rows: int
    seq: int
    lengths: tuple[int, ...] | None
    """The lengths of its documents; None if each row is one."""


@dataclass(frozen=True, slots=True)
class DocumentsRecord:
    """The documents of one step, by context group, or by place where there are no groups."""

    step: int
    members: int
    """The places of a group."""
    assignment: str
    way: str
    layers: int
    """The layers of the first rank."""
    sizes: tuple[int, int]
    """Bytes of a token's queries, and of its keys and values, on one rank."""
    groups: tuple[tuple[int, tuple[tuple[BatchPart, ...], ...]], ...]
    """Every group with the parts of each of its micro-batches."""
    left_out: int
    """The groups that have recorded nothing."""


@dataclass(frozen=True, slots=True)
class Evaluations:
    """The evaluations in the order of their steps: validation losses, all of them finite."""

    steps: array[int]
    losses: array[float]

    def __len__(self) -> int:
        return len(self.steps)


class RunPart(NamedTuple):
    """Steps that a run took on one grid."""

    first: int
    last: int
    """The last step; `MAX_STEP` for the part that ran last."""
    shape: Shape


class ExpertPart(NamedTuple):
    """A part of a run, and the tokens that experts had in it, as multiples of their mean."""

    first: int
    last: int
    """The first and the last step that were read."""
    loads: list[list[float]]
    """The load of each expert, for each block that has experts."""


@dataclass(frozen=True, slots=True)
class ExpertsRecord:
    """The load of the experts of a mixture over a run."""

    blocks: list[int]
    """The numbers of the blocks that have experts."""
    steps: list[int]
    """The steps that were read: all of them, or evenly chosen ones of a long run."""
    worst: list[float]
    """The load of the busiest expert as a multiple of the mean, in the block where it is largest, by step."""
    mean: list[float]
    """The same, as the mean over the blocks."""
    parts: list[ExpertPart]
    """Equal parts of the run, in order."""


@dataclass(slots=True)
class RunData:
    """Everything that the page shows of a run."""

    name: str
    config: str
    facts: Mapping[str, Any]
    """The content of `run.json`."""
    shape: Shape
    metrics: Path
    """The file that has every number."""
    parts: Sequence[RunPart]
    """The grids of the run in order; one part, unless it was resumed on another grid."""
    resumed: Sequence[int]
    """The steps after which the run was resumed."""
    steps: StepTable = field(default_factory=StepTable)
    evaluations: Evaluations = field(default_factory=lambda: Evaluations(array("q"), array("d")))
    skipped: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Skipped steps, each with the parameters whose gradient was not finite, if they were recorded."""
    end: str | None = None
    """Why the run ended; None if it recorded no end."""
    profile: ProfileSummary | None = None
    pipeline: PipelineRecord | None = None
    documents: DocumentsRecord | None = None
    experts: ExpertsRecord | None = None
    notes: list[str] = field(default_factory=list)

    def part(self, part: RunPart) -> RunData:
        """Return the run with the steps of one part alone, for numbers that differ between grids."""
        return replace(self, shape=part.shape, steps=self.steps.between(part.first, part.last))

    @property
    def axes(self) -> list[str]:
        """The axes that have bytes or exposed time, those of the grid first."""
        seen = {key[1] for key in self.steps.columns if len(key) == 2}
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
    parts, resumed = _parts(facts, shape)
    run = RunData(folder.resolve().name, config, facts, shape, (folder / "metrics.jsonl").resolve(), parts, resumed)
    _read_metrics(run)
    if (folder / "profile" / "summary.json").is_file():
        _read_profile(run, (folder / "profile").resolve())
    if shape.sizes[PIPE] > 1 and (folder / "schedule.csv").is_file():
        _read_pipeline(run, folder)
    if (folder / "documents").is_dir():
        _read_documents(run, folder / "documents")
    if (folder / COUNTS).is_file():
        _read_experts(run, folder)
    return run


def _read_facts(path: Path) -> tuple[Mapping[str, Any], Shape]:
    try:
        facts = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; it must be as `fourfold train` wrote it") from error
    missing = [key for key in ("model", "grid") if not isinstance(facts, dict) or key not in facts]
    if missing:
        raise ValueError(f"{path} must be an object with model and grid, but has no {' and no '.join(missing)}")
    try:
        order = tuple(facts.get("order", AXES))
        return facts, _shape_of(facts["grid"], order)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: grid={facts['grid']!r}, order={facts.get('order')!r}: {error}") from error


def _shape_of(sizes: Mapping[str, Any], order: tuple[str, ...] = ()) -> Shape:
    if not isinstance(sizes, Mapping):
        raise ValueError('a grid is an object with the sizes of its axes, such as {"x": 2}')
    # A run from before an axis existed does not name it; its size is 1, so its place in the order means nothing.
    return Shape(**sizes, order=order + tuple(axis for axis in AXES if axis not in order))


def _parts(facts: Mapping[str, Any], shape: Shape) -> tuple[list[RunPart], list[int]]:
    """Return the parts of a run by grid, and the steps after which it was resumed.

    `run.json` has the grid of every earlier part and the step at which the next one began. A part that was rolled back
    to a step before its own first one has left no step.
    """
    before = facts.get("resumed")
    end, ended = MAX_STEP, []
    for part in reversed(before if isinstance(before, list) else []):
        try:
            end = min(end, int(part["step"]))
            ended.append((end, _shape_of(part["grid"])))
        except (KeyError, TypeError, ValueError):
            break  # damaged: what lies before it is not known either
    parts: list[RunPart] = []
    for last, grid in [*reversed(ended), (MAX_STEP, shape)]:
        first = parts[-1].last + 1 if parts else 1
        if parts and str(parts[-1].shape) == str(grid):  # the same sizes: a restart changes nothing that is shown
            parts[-1] = parts[-1]._replace(last=last)
        elif first <= last:
            parts.append(RunPart(first, last, grid))
    return parts, sorted({last for last, _ in ended if last > 0})


# --- metrics.jsonl


def _read_metrics(run: RunData) -> None:
    """Read metrics.jsonl, which may be larger than memory: only the numbers of its steps are kept."""
    found = Piece()
    for piece in _parse_pieces(run.metrics):
        found.append(piece)
    steps = found.steps
    run.skipped = _skipped(found)
    run.steps = steps.ordered()
    run.end = found.end
    places = last_in_order(found.evaluations.steps, range(len(found.evaluations)))
    run.evaluations = found.evaluations
    if places is not None:
        columns = found.evaluations.steps, found.evaluations.losses
        run.evaluations = Evaluations(*(_chosen(column, places) for column in columns))
    repeated = len(steps) - len(run.steps)
    run.notes += found.said_of_lines()
    if repeated:
        run.notes.append(f"{repeated} logged steps were taken again after a resume; the later record is shown.")
    run.notes += found.said_of_events()
    if diverged := run.steps.diverged():
        times = f"at {len(diverged)} logged steps, first at step {diverged[0]}"
        run.notes.append(f"The training loss is NaN or infinite {times}.")
    if not run.steps:
        run.notes.append("metrics.jsonl has no step: the run ended before its first one, or has just begun.")


def _skipped(found: Piece) -> dict[int, tuple[str, ...]]:
    """Return the skipped steps. A step that was taken again later and not skipped is not one of them."""
    steps = found.steps
    marked = [(steps.lines[place], steps.steps[place], None) for place, skip in enumerate(steps.skips) if skip == 1]
    skips = sorted([*marked, *found.skips], key=operator.itemgetter(0))
    taken = {step: 0 for _, step, _ in skips}
    if taken:
        for step, line, skip in zip(steps.steps, steps.lines, steps.skips, strict=True):
            if skip == 0 and step in taken:
                taken[step] = line
    names: dict[int, tuple[str, ...]] = {}
    for line, step, parameter in skips:
        if line > taken[step]:
            before = names.get(step, ())
            names[step] = before if parameter is None or parameter in before else (*before, parameter)
    return dict(sorted(names.items()))


@dataclass(slots=True)
class Listing:
    """The first few of many things, and how many there are."""

    first: list[Any] = field(default_factory=list)
    total: int = 0

    def add(self, thing: Any) -> None:
        self.total += 1
        if len(self.first) < NAMED:
            self.first.append(thing)


@dataclass(slots=True)
class Piece:
    """What a stretch of metrics.jsonl holds, in the order of the file."""

    lines: int = 0
    records: int = 0
    unread: Listing = field(default_factory=Listing)
    """The numbers of the lines that are not records."""
    last_is_unread: bool = False
    steps: StepTable = field(default_factory=StepTable)
    evaluations: Evaluations = field(default_factory=lambda: Evaluations(array("q"), array("d")))
    skips: list[tuple[int, int, str | None]] = field(default_factory=list)
    """Line, step and parameter of the events that name a gradient that was not finite."""
    notes: Listing = field(default_factory=Listing)
    unknown: Counter[str] = field(default_factory=Counter)
    end: str | None = None

    def append(self, piece: Piece) -> None:
        """Add the stretch that follows this one."""
        after = self.lines
        self.unread.first = [*self.unread.first, *(after + line for line in piece.unread.first)][:NAMED]
        self.unread.total += piece.unread.total
        self.notes.first = [*self.notes.first, *piece.notes.first][:NAMED]
        self.notes.total += piece.notes.total
        self.unknown.update(piece.unknown)
        self.skips += [(after + line, step, parameter) for line, step, parameter in piece.skips]
        self.evaluations.steps.extend(piece.evaluations.steps)
        self.evaluations.losses.extend(piece.evaluations.losses)
        lines = array("q", [after + line for line in piece.steps.lines])
        self.steps.extend(piece.steps.steps, lines, piece.steps.skips, piece.steps.columns)
        self.steps.left_out |= piece.steps.left_out
        # A resumed run appends to the file, so an end counts only if nothing follows it.
        self.end = piece.end if piece.records else self.end
        self.last_is_unread = piece.last_is_unread if piece.lines else self.last_is_unread
        self.records += piece.records
        self.lines += piece.lines

    def said_of_lines(self) -> Iterator[str]:
        """Yield notes about the lines that were left out."""
        if self.last_is_unread:
            yield f"The last line of metrics.jsonl (line {self.lines}) is cut off and was left out."
        if unread := self.unread.total - self.last_is_unread:
            named = ", ".join(map(str, self.unread.first[:unread])) + (" ..." if unread > NAMED else "")
            yield f"{unread} lines of metrics.jsonl could not be read and were left out: line {named}."

    def said_of_events(self) -> Iterator[str]:
        """Yield notes about resumes, and about what the figures do not show."""
        yield from self.notes.first
        if self.notes.total > NAMED:
            yield f"{self.notes.total - NAMED} more such events are not listed; metrics.jsonl has them."
        for event, times in self.unknown.most_common(NAMED):
            yield f"{times} records of the unknown event {event!r} are not shown."
        if len(self.unknown) > NAMED:
            yield f"{len(self.unknown) - NAMED} more unknown events are not shown."
        if self.steps.left_out:
            yield f"metrics.jsonl names more axes than can be shown; {MAX_COLUMNS} columns were read."

    def parse(self, line: bytes, number: int) -> Mapping[str, Any] | None:
        """Add one line; return its record if it is a step, whose numbers this does not add."""
        record = _parse_record(line)
        self.last_is_unread = record is None and bool(line.strip())
        if record is None:
            if self.last_is_unread:
                self.unread.add(number)
            return None
        self.records += 1
        event, step = str(record.get("event")), record["step"]
        self.end = str(record.get("reason", "end")) if event == "end" else None
        match event:
            case "step":
                return record
            case "evaluation":
                loss = _float(record.get("loss"))
                if known(loss):
                    self.evaluations.steps.append(step)
                    self.evaluations.losses.append(loss)
                else:
                    self.notes.add(f"The validation loss of step {step} is not a finite number.")
            case "skipped":
                parameter = record.get("parameter")
                self.skips.append((number, step, None if parameter is None else sys.intern(str(parameter))))
            case "resumed":
                self.notes.add(f"The run was resumed after step {step}, on {record.get('grid', 'an unknown grid')}.")
            case "note" | "collapse":
                self.notes.add(f"{f'Step {step}: ' if step else ''}{record.get('said')}.")
            case _ if event not in NOT_DRAWN:
                self.unknown[event] += 1
        return None


def _parse_pieces(path: Path) -> Iterator[Piece]:
    """Yield the pieces of the file in order; several processes parse a large file."""
    bounds = _piece_bounds(path)
    tasks = [path] * (len(bounds) - 1), bounds[:-1], bounds[1:]
    workers = min(MAX_WORKERS, len(bounds) - 1, len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1)
    # A process with threads, such as torch's, cannot be forked safely; the command `fourfold report` has none.
    if workers < 2 or "torch" in sys.modules or threading.active_count() > 1:
        yield from map(_parse_piece, *tasks)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        yield from pool.map(_parse_piece, *tasks)


def _piece_bounds(path: Path) -> list[int]:
    """Return where the pieces of the file begin and end: at the ends of lines, about `PIECE_BYTES` apart."""
    size, bounds = path.stat().st_size, [0]
    with path.open("rb") as file:
        while bounds[-1] < size:
            file.seek(bounds[-1] + PIECE_BYTES)
            file.readline()
            bounds.append(min(file.tell(), size))
    return bounds


def _parse_piece(path: Path, begin: int, end: int) -> Piece:
    """Parse the lines of the file from one byte to another.

    Steps of one run have the same keys in the same order, so a regular expression reads nearly all of them, several
    times faster than a JSON parser does. It is made from the last step that it did not fit.
    """
    piece, layout = Piece(), None
    with path.open("rb") as file:
        file.seek(begin)
        while (left := end - file.tell()) > 0:
            text = file.read(min(left, CHUNK_BYTES))
            text = (text if text.endswith(b"\n") else text + file.readline()).removesuffix(b"\n")
            layout = _parse_lines(piece, text, layout)
    return piece


def _parse_lines(piece: Piece, text: bytes, layout: StepPattern | None) -> StepPattern | None:
    """Add lines to the piece; return the layout to try on the next lines."""
    rows: Sequence[Sequence[bytes]] = []
    columns: dict[Key, array[Any]] = {}
    if layout is not None:
        rows = layout.pattern.findall(text)
        try:
            columns = layout.columns([row for row in rows if row[0]])
        except (ValueError, OverflowError):  # something that looks like a number and is none, or is too large
            rows = []
    if not rows:
        rows = [(b"", line) for line in text.split(b"\n")]
    fitting, other = array("q"), None
    for number, row in enumerate(rows, piece.lines + 1):
        if row[0]:
            fitting.append(number)
            piece.end, piece.last_is_unread = None, False
        elif (record := piece.parse(row[-1], number)) is not None:
            other = record
            numbers = {key: array("d", [value]) for key, value in _parse_numbers(record).items()}
            piece.steps.extend([record["step"]], [number], [_skip_flag(record.get("skipped"))], numbers)
    if fitting:
        steps, unsaid = columns.pop(STEP), array("b", [-1]) * len(fitting)
        piece.steps.extend(steps, fitting, columns.pop(SKIPPED, unsaid), columns)
        piece.records += len(fitting)
    piece.lines += len(rows)
    return layout if other is None else StepPattern.of(other) or layout


def _skip_flag(skipped: Any) -> int:
    # Only true and false count: a record without the field does not say whether the step was skipped.
    return int(skipped) if isinstance(skipped, bool) else -1


@dataclass(frozen=True, slots=True)
class StepPattern:
    """The keys of a step's line in their order, as a regular expression with a group for each number."""

    pattern: re.Pattern[bytes]
    """Matches any line; the last group is a line that has another layout."""
    keys: list[Key]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> StepPattern | None:
        """Return the layout of a step's record; None if it holds more than numbers and numbers by axis."""
        wanted = {STEP, *((name,) for name in NUMBERS)}
        keys: list[Key] = []

        def expression(value: Any, key: Key) -> str | None:
            if isinstance(value, dict):
                parts = [(json.dumps(name), expression(below, (*key, name))) for name, below in value.items()]
                if len(key) > 1 or any(below is None for _, below in parts):
                    return None
                return rf"\{{{', '.join(f'{re.escape(name)}: {below}' for name, below in parts)}\}}"
            if isinstance(value, str):
                return re.escape(json.dumps(value))
            if not (value is None or isinstance(value, (bool, int, float))):
                return None
            taken = (
                (key == SKIPPED) if isinstance(value, bool) else key in wanted or (len(key) > 1 and key[0] in BY_AXIS)
            )
            keys.extend([key] if taken else [])
            found = "true|false" if isinstance(value, bool) else r"[-+.\deE]++|null"
            return f"({found})" if taken else f"(?:{found})"

        whole = expression(dict(record), ())
        if whole is None or keys[:1] != [STEP]:  # the first group tells whether a line fits
            return None
        return cls(re.compile(f"^(?:{whole}|(.*))$".encode(), re.MULTILINE), keys)

    def columns(self, rows: Sequence[Sequence[bytes]]) -> dict[Key, array[Any]]:
        """Return the numbers of lines that fit, by key; ValueError if one of them is no number."""
        return {key: _parse_column(key, texts) for key, texts in zip(self.keys, zip(*rows, strict=True), strict=False)}


def _parse_column(key: Key, texts: Sequence[bytes]) -> array[Any]:
    if key == STEP:
        return array("q", map(int, texts))
    if key == SKIPPED:
        return array("b", [text == b"true" for text in texts])
    if texts.count(texts[0]) == len(texts):  # such as the bytes on the wire, which are the same in every step
        return array("d", [_parse_value(key, texts[0])]) * len(texts)
    try:
        return array("d", map(float, texts))
    except ValueError:  # null is among them, or something that is no number
        return array("d", [_parse_value(key, text) for text in texts])


def _parse_value(key: Key, text: bytes) -> float:
    if text != b"null":
        return float(text)
    return math.inf if key[0] in MAY_DIVERGE else math.nan


def _read_profile(run: RunData, folder: Path) -> None:
    def over_ranks(found: Mapping[str, Any]) -> OverRanks:
        return OverRanks(_number(found["mean"]), _number(found["slowest"]), int(found["slowest_rank"]))

    try:
        found = parse_json((folder / "summary.json").read_bytes())
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


def _read_pipeline(run: RunData, folder: Path) -> None:
    """Read the schedule of pipe ranks, and when its actions ran in the step that was recorded."""
    try:
        schedule = from_csv((folder / "schedule.csv").read_text())
        schedule.check()
        run.pipeline = PipelineRecord(schedule)
        files = [folder / "pipeline" / f"rank-{rank}.json" for rank in range(schedule.pipe)]
        if not all(file.is_file() for file in files):
            return
        found = [parse_json(file.read_bytes()) for file in files]
        lines = [[ActionSpan(Action(*span[:3]), *map(float, span[3:])) for span in one["spans"]] for one in found]
        orders = tuple(tuple(span.action for span in line) for line in lines)
        if orders != schedule.orders or len({one["step"] for one in found}) > 1:
            run.notes.append("pipeline/ has the times of another schedule or of several steps, and is not drawn.")
            return
        first = min(line[0].start for line in lines)
        spans = tuple(tuple(ActionSpan(a, start - first, end - first) for a, start, end in line) for line in lines)
        run.pipeline = PipelineRecord(schedule, int(found[0]["step"]), spans)
    except (AttributeError, IndexError, KeyError, OSError, TypeError, ValueError) as error:
        run.notes.append(f"schedule.csv or pipeline/ could not be read ({type(error).__name__}: {error}).")


def _read_documents(run: RunData, folder: Path) -> None:
    """Read the lengths of the documents of a step, which every context group has recorded for itself."""

    def whole(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{value!r:.20} is no count")
        return value

    def part(found: Mapping[str, Any]) -> BatchPart:
        rows, seq, lengths = whole(found["rows"]), whole(found["seq"]), found["lengths"]
        if lengths is not None and sum(map(whole, lengths)) != rows * seq:
            raise ValueError(f"documents of {sum(lengths)} tokens in {rows} rows of {seq}")
        return BatchPart(rows, seq, None if lengths is None else tuple(lengths))

    try:
        files = [folder / f"group-{group}.json" for group in range(run.shape.row_places)]
        found = [parse_json(file.read_bytes()) for file in files if file.is_file()]
        if not found:
            return
        if len({one["step"] for one in found}) > 1:
            run.notes.append("documents/ has those of several steps, and is not shown.")
            return
        about = run.facts["context"]
        groups = tuple(
            (int(one["group"]), tuple(tuple(map(part, parts)) for parts in one["micro_batches"])) for one in found
        )
        sizes = int(about["query_bytes"]), int(about["key_bytes"])
        options = str(about["assignment"]), str(about["way"]), int(about["layers"]), sizes
        left_out = run.shape.row_places - len(groups)
        run.documents = DocumentsRecord(int(found[0]["step"]), run.shape.context, *options, groups, left_out)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        run.notes.append(f"documents/ could not be read ({type(error).__name__}: {error}).")


def _parse_record(line: bytes) -> dict[str, Any] | None:
    """Return an object with a whole number `step`, or None if the line is something else."""
    try:
        # A run that was killed may end in the middle of a character.
        record = parse_json(line.decode(errors="replace"))
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if isinstance(step, int) and not isinstance(step, bool) and abs(step) < MAX_STEP else None


def _parse_numbers(record: Mapping[str, Any]) -> dict[Key, float]:
    """Return the numbers of a step as `StepTable` keeps them."""
    found: dict[Key, float] = {}
    for name in NUMBERS:
        value = _float(record.get(name))
        if name in MAY_DIVERGE and name in record and (record[name] is None or value is not None):
            found[(name,)] = value if known(value) else math.inf
        elif known(value):
            found[(name,)] = value
    for kind in BY_AXIS:
        by_axis = record.get(kind)
        numbers = {axis: _float(value) for axis, value in by_axis.items()} if isinstance(by_axis, dict) else {}
        found |= {(kind, axis): value for axis, value in numbers.items() if known(value)}
    return found


def _float(value: Any) -> float | None:
    number = _number(value)
    try:
        return None if number is None else float(number)
    except OverflowError:  # a whole number beyond the largest float
        return math.inf


def _number(value: Any) -> float | None:
    # In Python a bool is an int, but `true` in a file is not a number.
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _read_experts(run: RunData, folder: Path) -> None:
    """Read how many tokens each expert has had, step by step."""
    try:
        found = [counts for counts in read_counts(folder, MOST_COUNTS) if counts.mixtures]
    except (OSError, ValueError, zlib.error) as error:
        run.notes.append(f"{COUNTS} could not be read ({type(error).__name__}: {error}).")
        return
    if not found:
        return
    loads = [list(counts.loads.values()) for counts in found]
    size = -(-len(found) // EXPERT_PARTS)
    run.experts = ExpertsRecord(
        list(found[0].mixtures),
        [counts.step for counts in found],
        [max(each) for each in loads],
        [fmean(each) for each in loads],
        [_expert_part(found[first : first + size]) for first in range(0, len(found), size)],
    )


def _expert_part(counts: Sequence[StepCounts]) -> ExpertPart:
    """Return the load of every expert in some steps together."""
    loads = []
    for block in counts[0].mixtures:
        total = [sum(tokens) for tokens in zip(*(one.by_block[block] for one in counts), strict=True)]
        loads.append([count * len(total) / max(1, sum(total)) for count in total])
    return ExpertPart(counts[0].step, counts[-1].step, loads)

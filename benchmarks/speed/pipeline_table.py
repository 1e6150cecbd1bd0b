"""The tables of the pipeline benchmarks: a section for each group, with the bars that were reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shared.pairs import Pairs
from benchmarks.shared.tables import markdown_table
from benchmarks.speed.gpu_ranks_results import LineRecord, Results
from benchmarks.speed.gpu_ranks_table import best, commands_of
from benchmarks.speed.pipeline_lines import ALONE, DEEPSPEED, OURS, TORCH

COLUMNS = (
    "line", "ms per step", "spread", "idle", "predicted ms", "predicted idle", "with the host's time",
    "measured / predicted",
    "this / torch's best", "peak GiB", "CPU ms per action",
)  # fmt: skip
Bars = Callable[[Sequence[LineRecord], dict[str, Any]], Iterable[str]]
"""Returns one sentence per bar, for the lines of a group and what is known of the group."""


def render(path: Path, title: str, explained: str, bars: Bars) -> str:
    results = Results.open(path)
    parts = [f"# {title}\n\n{explained}\n\n{commands_of(results)}"]
    for name, group in results.groups.items():
        records = [record for (of, _), record in results.records.items() if of == name]
        rows = [_row(record, records) for record in sorted(records, key=_sort_key)]
        told = list(bars(records, group)) or ["nothing to judge yet"]
        parts += [_heading(group), "\n".join(markdown_table(COLUMNS, rows)), "\n".join(f"- {bar}" for bar in told)]
    return "\n\n".join(parts) + "\n"


def _heading(group: dict[str, Any]) -> str:
    model, each = group["model"], group.get("sleep_seconds")
    work = f"F, B and W of {each * 1e3:g} ms per rank and micro-batch" if each else (
        f"{model['layers']} layers, hidden {model['hidden']}, {model['parameters'] / 1e9:.2f} B parameters"
    )  # fmt: skip
    return f"## {group['group']}: {group['ranks']} ranks; {work}; {group['seq']} tokens a micro-batch, {group['dtype']}"


def _sort_key(record: LineRecord) -> tuple[int, float]:
    return (TORCH, DEEPSPEED, ALONE, OURS).index(record.kind), record.step if record.measured else float("inf")


def _row(record: LineRecord, records: Sequence[LineRecord]) -> list[str]:
    name = f"{record.kind} {record.variant}"
    if not record.measured:
        return [name, record.error or "not measured", *["-"] * (len(COLUMNS) - 2)]
    times, peer = record.seconds["step"], torchs_best(records)
    predicted, idle, planned = (figure(record, what) for what in ("predicted", "idle", "predicted idle"))
    on_host = figure(record, "predicted idle with host")
    actions = figure(record, "actions")
    ratios = Pairs(record.ratios(peer)) if peer else None
    return [
        name,
        f"{record.step * 1e3:.1f}",
        f"{min(times) * 1e3:.1f} .. {max(times) * 1e3:.1f}",
        f"{idle:.1%}" if idle is not None else "-",
        f"{predicted * 1e3:.1f}" if predicted else "-",
        f"{planned:.1%}" if planned is not None else "-",
        f"{on_host:.1%}" if on_host is not None else "-",
        f"{record.step / predicted:.3f}" if predicted else "-",
        f"{ratios.median:.3f}" if ratios else "-",
        f"{record.peak_bytes / 2**30:.2f}" if record.peak_bytes else "-",
        f"{sum(record.cpu_seconds.values()) / record.grid['pipe'] / actions * 1e3:.2f}" if actions else "-",
    ]


def figure(record: LineRecord, what: str) -> float | None:
    """Return the median over rounds of something that was measured or predicted; None if it was not."""
    return median(record.figures[what]) if record.figures.get(what) else None


def variant_of(record: LineRecord) -> str:
    """Return the variant without the micro-batches, which a group has in common."""
    return record.variant.partition(", ")[2]


def torchs_best(records: Sequence[LineRecord]) -> LineRecord | None:
    return best([record for record in records if record.kind == TORCH])

"""Print or write the table of `gpu_ranks.py` from its results, with the bars that were reached.

python benchmarks/speed/gpu_ranks_table.py RESULTS.jsonl [TABLE.md]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

from benchmarks.shared.tables import verdict
from benchmarks.speed.gpu_ranks_lines import DEFAULT, MECHANISMS, MEGATRON, OFF, REGATHER, REPLICATED
from benchmarks.speed.gpu_ranks_results import LineRecord, Results

OVER_BOUND = 1.15
"""A step on the best grid may take at most this many times the larger of its two bounds."""
OVER_PEER = 1.25
"""The bar for our speed over the best peer's, on 4 ranks where communication is at least half of the step."""
AIM_OVER_PEER = 1.5
"""The aim beyond that bar."""
MEMORY = 1.05
"""The bar for our peak memory over FSDP2's, on FSDP2's grid."""
LOSS_NOISE = 0.02
"""How much the losses of equal first steps may differ in bf16; a larger difference means that something is wrong."""

ORDER = [DEFAULT, REGATHER, REPLICATED, OFF, *MECHANISMS, MEGATRON]
COLUMNS = [
    "line", "grid", "ms per step", "spread", "peak GiB", "best peer / this", "compute alone", "communication alone",
    "step / larger of the two", "loss, then after updates",
]  # fmt: skip


def render(path: Path) -> str:
    results = Results.open(path)
    parts = [_head(results)]
    for name, group in results.groups.items():
        records = [record for (of, _), record in results.records.items() if of == name]
        parts += [_title(group), _table(records), "Bars:\n\n" + "\n".join(f"- {bar}" for bar in bars(group, records))]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    runs = [run for group in results.groups.values() for run in group["runs"]]
    dates = sorted({run["date"] for run in runs})
    commands = list(dict.fromkeys(run["command"] for run in runs))
    machines = list(
        dict.fromkeys(
            f"{run['device']}, {run['cores']} cores, torch {run['torch']}"
            + (f", NCCL {run['nccl']}, MPS: {run['mps']}" if run["nccl"] else "")
            for run in runs
        )
    )
    return (
        f"# Fourfold and its peers on ranks of one machine, {' and '.join(dates) or 'nothing measured'}\n\n"
        "`benchmarks/speed/gpu_ranks.py`; all lines of a group in one run, interleaved. Times are those of the slowest "
        "rank, medians over rounds; spread = min .. max. A step is forward, backward and a plain SGD update. Peak "
        "memory is what a line uses on one rank, including weights. Compute alone: the same step without "
        "communication. Communication alone: its collectives without computation. Each line of a mechanism includes "
        "the mechanisms above it.\n\n"
        f"On {'; '.join(machines)}:\n\n```\n" + "\n".join(commands) + "\n```"
    )


def _title(group: dict[str, Any]) -> str:
    model = group["model"]
    return (
        f"## {group['ranks']} ranks, {group['size']}: {model['layers']} layers, hidden {model['hidden']}, "
        f"{model['parameters'] / 1e9:.2f} B parameters, {group['rows']} x {group['seq']} tokens, {group['dtype']}"
        + (", compiled" if group["settings"]["compile"] else "")
    )


def _table(records: Sequence[LineRecord]) -> str:
    rival = best([record for record in records if record.kind != "fourfold"])
    rows = [_row(record, rival) for record in sorted(records, key=_sort_key)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows))


def _sort_key(record: LineRecord) -> tuple[bool, int, str, float]:
    """Sort peers first, then Fourfold's default and variants by speed, then mechanisms grid by grid."""
    place = ORDER.index(record.variant)
    if place >= ORDER.index(OFF):
        return True, len(ORDER), grid_of(record), place
    return record.kind == "fourfold", place, "", record.step if record.measured else math.inf


def _row(record: LineRecord, rival: LineRecord | None) -> list[str]:
    name = f"{record.kind} {record.variant}".strip()
    if not record.measured:
        return [name, grid_of(record), record.error or "not measured", *["-"] * (len(COLUMNS) - 3)]
    compute, communication = (record.median(measure) for measure in ("compute", "communication"))
    bound = over_bound(record)
    times = record.seconds["step"]
    return [
        name,
        grid_of(record),
        f"{record.step * 1e3:.1f}",
        f"{min(times) * 1e3:.1f} .. {max(times) * 1e3:.1f}",
        f"{record.peak_bytes / 2**30:.2f}" if record.peak_bytes is not None else "-",
        f"{rival.step / record.step:.2f}" if rival else "-",
        f"{compute * 1e3:.1f}" if compute else "-",
        f"{communication * 1e3:.1f}" if communication else "-",
        f"{bound:.2f}" if bound else "-",
        f"{_losses(record)}",
    ]


def _losses(record: LineRecord) -> str:
    """Show the losses, marked where equal steps gave different losses or updates did not lower the loss."""
    first, last = record.losses[0], record.losses[-1]
    noise = max((abs(loss - first) for loss in record.first_losses), default=0.0)
    wrong = not noise <= LOSS_NOISE or (len(record.losses) > 1 and not last < first)  # `not <=` also catches nan
    return f"{first:.3f}, {last:.3f}" + (f" **WRONG** (equal steps differ by {noise:.3g})" if wrong else "")


def grid_of(record: LineRecord) -> str:
    return " ".join(f"{axis}={size}" for axis, size in record.grid.items() if size > 1)


def best(records: Sequence[LineRecord]) -> LineRecord | None:
    return min((record for record in records if record.measured), key=lambda record: record.step, default=None)


def over_bound(record: LineRecord) -> float | None:
    bounds = [found for measure in ("compute", "communication") if (found := record.median(measure))]
    return record.step / max(bounds) if bounds and record.measured else None


def bars(group: dict[str, Any], records: Sequence[LineRecord]) -> list[str]:
    """Return one sentence per bar, with what was reached."""
    plain = [record for record in records if record.kind == "fourfold" and record.variant == DEFAULT]
    peers = [record for record in records if record.kind != "fourfold"]
    ours, theirs = best(plain), best(peers)
    found = [*_on_their_grids(records, plain, peers), *_memory(plain, peers)]
    if ours is not None:
        found += _against_bounds(ours)
    if ours is not None and theirs is not None:
        found += _against_best(group, ours, theirs)
    return found or ["nothing to judge yet"]


def _on_their_grids(
    records: Sequence[LineRecord], plain: Sequence[LineRecord], peers: Sequence[LineRecord]
) -> Iterator[str]:
    for peer in peers:
        same = [record for record in plain if record.grid == peer.grid]
        if not (same and same[0].measured and peer.measured):
            yield f"not slower than {peer.kind} on {grid_of(peer)}: not measured"
            continue
        ours = same[0]
        text = (
            f"not slower than {peer.kind} on {grid_of(peer)}: {verdict(ours.step <= peer.step)}, "
            f"{ours.step * 1e3:.1f} and {peer.step * 1e3:.1f} ms"
        )
        fastest = best([record for record in records if record.kind == "fourfold" and record.grid == peer.grid])
        if fastest is not None and fastest is not ours:
            text += f" (Fourfold's fastest line there: {fastest.variant}, {fastest.step * 1e3:.1f} ms)"
        yield text


def _memory(plain: Sequence[LineRecord], peers: Sequence[LineRecord]) -> Iterator[str]:
    for peer in peers:
        for ours in plain:
            if peer.kind == "FSDP2" and ours.grid == peer.grid and ours.peak_bytes and peer.peak_bytes:
                ratio = ours.peak_bytes / peer.peak_bytes
                yield (
                    f"peak memory on {grid_of(peer)} at most {MEMORY} times FSDP2's: "
                    f"{verdict(ratio <= MEMORY)}, {ratio:.3f}"
                )


def _against_bounds(ours: LineRecord) -> Iterator[str]:
    ratio = over_bound(ours)
    if ratio is not None:
        yield (
            f"on Fourfold's best grid ({grid_of(ours)}) a step takes at most {OVER_BOUND} times the larger of compute "
            f"alone and communication alone: {verdict(ratio <= OVER_BOUND)}, {ratio:.2f}"
        )


def _against_best(group: dict[str, Any], ours: LineRecord, theirs: LineRecord) -> Iterator[str]:
    gap, spread = theirs.step - ours.step, max(ours.spread, theirs.spread)
    yield (
        f"Fourfold's best grid ({grid_of(ours)}) is faster than the best peer ({theirs.kind}, {grid_of(theirs)}) by "
        f"more than the spread: {verdict(gap > spread)}, {gap * 1e3:.1f} ms with a spread of {spread * 1e3:.1f}"
    )
    communication = ours.median("communication")
    if group["ranks"] != 4 or communication is None:
        return
    times, share = theirs.step / ours.step, communication / ours.step
    if share < 0.5:
        yield f"{times:.2f} times the best peer's speed; no bar: communication alone is only {share:.0%} of the step"
        return
    yield (
        f"at least {OVER_PEER} times the best peer's speed, aiming at {AIM_OVER_PEER} (communication alone is "
        f"{share:.0%} of the step): {verdict(times >= OVER_PEER)}, {times:.2f}"
        + ("" if times >= AIM_OVER_PEER else f"; the aim is {verdict(False)}")
    )


def main(arguments: Sequence[str], write: Callable[[str], object] = print) -> int:
    if len(arguments) not in (1, 2):
        write(__doc__ or "")
        return 2
    text = render(Path(arguments[0]))
    if len(arguments) == 1:
        write(text)
    else:
        Path(arguments[1]).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The table of `gpu_ranks.py` from its results, and which bars were reached.

python benchmarks/table.py RESULTS.jsonl [TABLE.md]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lines import DEFAULT, MECHANISMS, MEGATRON, OFF, REGATHER, REPLICATED
from record import Record, Results

OVER_BOUND = 1.15
"""A step on the best grid takes at most so many times the larger of its two bounds."""
OVER_PEER = 1.25
"""So many times faster than the best peer, on 4 ranks where communication is at least half of the step ..."""
AIM_OVER_PEER = 1.5
"""... and the aim."""
MEMORY = 1.05
"""Peak memory on the grid of FSDP2, over FSDP2's."""
LOSS_NOISE = 0.02
"""By how much losses of equal first steps may differ in bf16; more means that something went wrong."""

ORDER = [DEFAULT, REGATHER, REPLICATED, OFF, *MECHANISMS, MEGATRON]
COLUMNS = [
    "line", "grid", "ms a step", "spread", "peak GiB", "best peer / this", "compute alone", "communication alone",
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
        "`benchmarks/gpu_ranks.py`; all lines of a group in one run, interleaved; medians over rounds of the slowest "
        "rank, spread = min .. max. A step is forward, backward and a plain SGD update. Peak memory is what a line "
        "takes on one rank, weights included. Compute alone: the same step with nothing travelling; communication "
        "alone: its collectives with nothing between them. Lines of a mechanism stand on the ones before it.\n\n"
        f"On {'; '.join(machines)}:\n\n```\n" + "\n".join(commands) + "\n```"
    )


def _title(group: dict[str, Any]) -> str:
    model = group["model"]
    return (
        f"## {group['ranks']} ranks, {group['size']}: {model['layers']} layers, hidden {model['hidden']}, "
        f"{model['parameters'] / 1e9:.2f} B parameters, {group['rows']} x {group['seq']} tokens, {group['dtype']}"
        + (", compiled" if group["settings"]["compile"] else "")
    )


def _table(records: Sequence[Record]) -> str:
    rival = best([record for record in records if record.kind != "fourfold"])
    rows = [_row(record, rival) for record in sorted(records, key=_place)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (COLUMNS, ["---"] * len(COLUMNS), *rows))


def _place(record: Record) -> tuple[bool, int, str, float]:
    """Peers first, then Fourfold as it comes and its variants, the fastest first, then mechanisms grid by grid."""
    place = ORDER.index(record.variant)
    if place >= ORDER.index(OFF):
        return True, len(ORDER), grid_of(record), place
    return record.kind == "fourfold", place, "", record.step if record.measured else math.inf


def _row(record: Record, rival: Record | None) -> list[str]:
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


def _losses(record: Record) -> str:
    """Marked where equal steps gave different losses, or updates did not bring it down."""
    first, last = record.losses[0], record.losses[-1]
    noise = max((abs(loss - first) for loss in record.first_losses), default=0.0)
    wrong = not noise <= LOSS_NOISE or (len(record.losses) > 1 and not last < first)  # also where it is nan
    return f"{first:.3f}, {last:.3f}" + (f" **WRONG** (equal steps differ by {noise:.3g})" if wrong else "")


def grid_of(record: Record) -> str:
    return " ".join(f"{axis}={size}" for axis, size in record.grid.items() if size > 1)


def best(records: Sequence[Record]) -> Record | None:
    return min((record for record in records if record.measured), key=lambda record: record.step, default=None)


def over_bound(record: Record) -> float | None:
    bounds = [found for measure in ("compute", "communication") if (found := record.median(measure))]
    return record.step / max(bounds) if bounds and record.measured else None


def bars(group: dict[str, Any], records: Sequence[Record]) -> list[str]:
    """One sentence a bar, with what was reached."""
    plain = [record for record in records if record.kind == "fourfold" and record.variant == DEFAULT]
    peers = [record for record in records if record.kind != "fourfold"]
    ours, theirs = best(plain), best(peers)
    found = [*_on_their_grids(records, plain, peers), *_memory(plain, peers)]
    if ours is not None:
        found += _against_bounds(ours)
    if ours is not None and theirs is not None:
        found += _against_best(group, ours, theirs)
    return found or ["nothing to judge yet"]


def _verdict(reached: bool) -> str:
    return "reached" if reached else "**MISSED**"


def _on_their_grids(records: Sequence[Record], plain: Sequence[Record], peers: Sequence[Record]) -> Iterator[str]:
    for peer in peers:
        same = [record for record in plain if record.grid == peer.grid]
        if not (same and same[0].measured and peer.measured):
            yield f"not slower than {peer.kind} on {grid_of(peer)}: not measured"
            continue
        ours = same[0]
        text = (
            f"not slower than {peer.kind} on {grid_of(peer)}: {_verdict(ours.step <= peer.step)}, "
            f"{ours.step * 1e3:.1f} and {peer.step * 1e3:.1f} ms"
        )
        fastest = best([record for record in records if record.kind == "fourfold" and record.grid == peer.grid])
        if fastest is not None and fastest is not ours:
            text += f" (Fourfold's fastest line there: {fastest.variant}, {fastest.step * 1e3:.1f} ms)"
        yield text


def _memory(plain: Sequence[Record], peers: Sequence[Record]) -> Iterator[str]:
    for peer in peers:
        for ours in plain:
            if peer.kind == "FSDP2" and ours.grid == peer.grid and ours.peak_bytes and peer.peak_bytes:
                ratio = ours.peak_bytes / peer.peak_bytes
                yield (
                    f"peak memory on {grid_of(peer)} at most {MEMORY} times FSDP2's: "
                    f"{_verdict(ratio <= MEMORY)}, {ratio:.3f}"
                )


def _against_bounds(ours: Record) -> Iterator[str]:
    ratio = over_bound(ours)
    if ratio is not None:
        yield (
            f"on Fourfold's best grid ({grid_of(ours)}) a step takes at most {OVER_BOUND} times the larger of compute "
            f"alone and communication alone: {_verdict(ratio <= OVER_BOUND)}, {ratio:.2f}"
        )


def _against_best(group: dict[str, Any], ours: Record, theirs: Record) -> Iterator[str]:
    gap, spread = theirs.step - ours.step, max(ours.spread, theirs.spread)
    yield (
        f"Fourfold's best grid ({grid_of(ours)}) is faster than the best peer ({theirs.kind}, {grid_of(theirs)}) by "
        f"more than the spread: {_verdict(gap > spread)}, {gap * 1e3:.1f} ms with a spread of {spread * 1e3:.1f}"
    )
    communication = ours.median("communication")
    if group["ranks"] != 4 or communication is None:
        return
    times, share = theirs.step / ours.step, communication / ours.step
    if share < 0.5:
        yield f"{times:.2f} times the best peer's speed; no bar, since communication alone is {share:.0%} of the step"
        return
    yield (
        f"at least {OVER_PEER} times the best peer's speed, aiming at {AIM_OVER_PEER} (communication alone is "
        f"{share:.0%} of the step): {_verdict(times >= OVER_PEER)}, {times:.2f}"
        + ("" if times >= AIM_OVER_PEER else f"; the aim is {_verdict(False)}")
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

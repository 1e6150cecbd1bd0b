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

from benchmarks.shared.pairs import Pairs
from benchmarks.shared.tables import verdict
from benchmarks.speed.gpu_ranks_lines import DEFAULT, KEPT, MECHANISMS, MEGATRON, OFF, REGATHER, REPLICATED
from benchmarks.speed.gpu_ranks_results import LineRecord, Results

OVER_BOUND = 1.15
"""A step may take at most this many times the larger of its two bounds."""
MEMORY = 1.05
"""The bar for our peak memory over FSDP2's, on FSDP2's grid."""
LOSS_NOISE = 0.02
"""How much the losses of equal first steps may differ in bf16; a larger difference means that something is wrong."""
LOSS_SPREAD = 0.02
"""How much the losses of different lines may differ, as a part of the first loss: shards are drawn by each rank for
itself, so lines on different grids begin with other weights of the same distribution."""

MODE_SPREAD = 0.005
"""How much the losses of the modes of a line may differ: compiled kernels round otherwise, and AdamW magnifies that."""

OURS = "fourfold"
COMPARED = (DEFAULT, KEPT)
"""The variants of Fourfold that are compared with the peers; the others show what a choice costs or gains."""
ORDER = [REGATHER, REPLICATED, OFF, *MECHANISMS, MEGATRON]
"""The order of Fourfold's variants after these."""
COLUMNS = [
    "line", "grid", "mode", "ms per step", "spread", "peak GiB", "this / best peer on the grid", "this / best peer",
    "compute alone", "communication alone", "step / larger of the two", "loss, then after updates",
]  # fmt: skip


def render(path: Path) -> str:
    results = Results.open(path)
    lines = {name: [record for (of, _), record in results.records.items() if of == name] for name in results.groups}
    parts = [_head(results), _summary(lines)]
    for name, group in results.groups.items():
        records = lines[name]
        parts += [_title(group), _table(records), "Bars:\n\n" + "\n".join(f"- {bar}" for bar in bars(records))]
        if cores := [record for record in records if record.cpu_rounds and record.measured]:
            parts.append(_cores(cores))
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    dates = sorted({run["date"] for run in _runs(results)})
    return (
        f"# Fourfold and its peers on ranks of one machine, {' and '.join(dates) or 'nothing measured'}\n\n"
        "`benchmarks/speed/gpu_ranks.py`; lines that share a round were measured side by side. Times are those of the "
        "slowest rank, medians over rounds; spread = min .. max. A step is forward, backward, clipping, fused AdamW. "
        "Ratios are medians of the ratios of rounds that both lines share; less is better, and - means that they share "
        "none. Intervals of 95% are those of the sign test for the median. The best peer is the one with the smallest "
        "median, compiled or not. Peak memory is what the tensors of a line need on one rank, including weights. "
        "Compute alone: the same step without communication. Communication alone: its collectives without computation; "
        "both are captured where the step is. Each line of a mechanism includes the mechanisms above it.\n\n"
        + commands_of(results)
    )


def _runs(results: Results) -> list[dict[str, Any]]:
    return [run for group in results.groups.values() for run in group["runs"]]


def commands_of(results: Results) -> str:
    """Say on which machines the results were measured, and with which commands."""
    runs = _runs(results)
    commands = list(dict.fromkeys(run["command"] for run in runs))
    machines = list(
        dict.fromkeys(
            f"{run['device']}, {run['cores']} cores, torch {run['torch']}"
            + (f", NCCL {run['nccl']}, MPS: {run['mps']}" if run["nccl"] else "")
            for run in runs
        )
    )
    return f"On {'; '.join(machines)}:\n\n```\n" + "\n".join(commands) + "\n```"


def _summary(lines: dict[str, list[LineRecord]]) -> str:
    """Show Fourfold beside the best peer by group: on each peer's grid, and each on the best grid of its own."""
    rows = []
    for name, records in lines.items():
        ours, peers = _sides(records)
        pairs = [(best(own), best(_by_grid(peers).get(grid, []))) for grid, own in _by_grid(ours).items()]
        for where, (own, peer) in (("the same grid", pair) for pair in pairs):
            rows += _summary_row(name, where, own, peer)
        rows += _summary_row(name, "**any grid**", best(ours), best(peers))
    return "Fourfold's fastest line beside the best peer:\n\n" + _markdown(
        ["group", "on", "Fourfold", "ms", "best peer", "ms", "Fourfold / peer"], rows
    )


def _summary_row(name: str, where: str, ours: LineRecord | None, peer: LineRecord | None) -> list[list[str]]:
    if ours is None or peer is None:
        return []
    seconds = [f"{record.step * 1e3:.1f}" for record in (ours, peer)]
    own = f"{grid_of(ours)} {_in_words(ours)}"
    theirs = f"{_title_of(peer)} {grid_of(peer)} {peer.mode}"
    return [[name, where, own, seconds[0], theirs, seconds[1], _ratio(ours, peer)]]


def _title_of(record: LineRecord) -> str:
    return f"{record.kind} {record.variant}".strip()


def _title(group: dict[str, Any]) -> str:
    model = group["model"]
    return (
        f"## {group['ranks']} ranks, {group['size']}: {model['layers']} layers, hidden {model['hidden']}, "
        f"{model['parameters'] / 1e9:.2f} B parameters, {group['rows']} x {group['seq']} tokens, {group['dtype']}"
    )


def _table(records: Sequence[LineRecord]) -> str:
    rows = [_row(record, records) for record in sorted(records, key=_sort_key)]
    return _markdown(COLUMNS, rows)


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows))


def _sort_key(record: LineRecord) -> tuple[int, int, str, float]:
    """Sort peers first, then Fourfold's default by speed, its variants, and its mechanisms grid by grid."""
    seconds = record.step if record.measured else math.inf
    if record.kind != OURS:
        return 0, 0, "", seconds
    if is_compared(record):
        return 1, 0, "", seconds
    place = ORDER.index(record.variant)
    return (2, place, "", seconds) if place < ORDER.index(OFF) else (3, 0, grid_of(record), place)


def _row(record: LineRecord, records: Sequence[LineRecord]) -> list[str]:
    name = _title_of(record)
    if not record.measured:
        return [name, grid_of(record), record.mode, record.error or "not measured", *["-"] * (len(COLUMNS) - 4)]
    compute, communication = (record.median(measure) for measure in ("compute", "communication"))
    bound = over_bound(record)
    times = record.seconds["step"]
    peers = [other for other in records if other.kind != OURS]
    return [
        name,
        grid_of(record),
        record.mode,
        f"{record.step * 1e3:.1f}",
        f"{min(times) * 1e3:.1f} .. {max(times) * 1e3:.1f}",
        f"{record.peak_bytes / 2**30:.2f}" if record.peak_bytes is not None else "-",
        _ratio(record, best([peer for peer in peers if peer.grid == record.grid])),
        _ratio(record, best(peers)),
        f"{compute * 1e3:.1f}" if compute else "-",
        f"{communication * 1e3:.1f}" if communication else "-",
        f"{bound:.2f}" if bound else "-",
        f"{_losses(record)}",
    ]


def _ratio(record: LineRecord, rival: LineRecord | None) -> str:
    pairs = Pairs(record.ratios(rival)) if rival else None
    return f"{pairs.median:.2f}" if pairs else "-"


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


# --- bars


def bars(records: Sequence[LineRecord]) -> list[str]:
    """Return one sentence per bar, with what was reached."""
    ours, peers = _sides(records)
    found = [*_on_each_grid(ours, peers), *_against_best(ours, peers), *_against_bounds(ours)]
    found += [*_compiled(ours), *_memory(ours, peers), *_all_losses(records), *_losses_of_modes(records)]
    return found or ["nothing to judge yet"]


def _sides(records: Sequence[LineRecord]) -> tuple[list[LineRecord], list[LineRecord]]:
    """Return Fourfold's lines that are compared with the peers, and the peers."""
    ours = [record for record in records if record.kind == OURS and is_compared(record)]
    return ours, [record for record in records if record.kind != OURS]


def is_compared(record: LineRecord) -> bool:
    """Return whether one of Fourfold's lines is compared with the peers."""
    return record.variant in COMPARED or record.grid.get("pipe", 1) > 1


def _by_grid(records: Sequence[LineRecord]) -> dict[str, list[LineRecord]]:
    found: dict[str, list[LineRecord]] = {}
    for record in records:
        found.setdefault(grid_of(record), []).append(record)
    return found


def _on_each_grid(ours: Sequence[LineRecord], peers: Sequence[LineRecord]) -> Iterator[str]:
    """Compare Fourfold's fastest line on a grid with the best peer there."""
    there = _by_grid(peers)
    for grid, own in _by_grid(ours).items():
        fastest, rival = best(own), best(there.get(grid, []))
        if rival is not None and fastest is not None:
            yield f"not slower than the best peer on {grid}: {_compared(fastest, rival)}"
        elif grid in there:
            yield f"not slower than the best peer on {grid}: not measured"


def _against_best(ours: Sequence[LineRecord], peers: Sequence[LineRecord]) -> Iterator[str]:
    fastest, rival = best(ours), best(peers)
    if fastest is not None and rival is not None:
        yield f"Fourfold's best grid is not slower than the best peer of any kind: {_compared(fastest, rival)}"


def _compared(ours: LineRecord, theirs: LineRecord) -> str:
    names = (
        f"{_title_of(ours)} {grid_of(ours)} {ours.mode} {ours.step * 1e3:.1f} ms, {_title_of(theirs)}"
        f" {grid_of(theirs)} {theirs.mode} {theirs.step * 1e3:.1f} ms"
    )
    pairs = Pairs(ours.ratios(theirs))
    if not pairs:
        return f"not measured in the same rounds ({names})"
    return f"{verdict(pairs.not_above_one)}, {pairs} ({names})"


def _against_bounds(ours: Sequence[LineRecord]) -> Iterator[str]:
    for grid, own in _by_grid(ours).items():
        fastest = best([record for record in own if over_bound(record) is not None])
        ratio = over_bound(fastest) if fastest is not None else None
        if fastest is not None and ratio is not None:
            yield (
                f"on {grid} a step ({_in_words(fastest)}) takes at most {OVER_BOUND} times the larger of compute alone "
                f"and communication alone: {verdict(ratio <= OVER_BOUND)}, {ratio:.2f}"
            )


def _compiled(ours: Sequence[LineRecord]) -> Iterator[str]:
    lines = {(grid_of(record), record.variant, record.mode): record for record in ours if record.measured}
    for (grid, variant, mode), record in lines.items():
        compiled = lines.get((grid, variant, {"eager": "compiled", "captured": "captured compiled"}.get(mode, "")))
        pairs = Pairs(compiled.ratios(record)) if compiled else None
        if compiled and pairs:
            words = f"on {grid} {_in_words(compiled)} is not slower than {mode}"
            yield f"{words}: {verdict(pairs.not_above_one)}, {pairs}"


def _in_words(record: LineRecord) -> str:
    return ", ".join(part for part in (record.variant, record.mode) if part)


def _memory(ours: Sequence[LineRecord], peers: Sequence[LineRecord]) -> Iterator[str]:
    for peer in peers:
        for own in ours:
            same = (own.grid, own.mode) == (peer.grid, peer.mode)
            alike = (own.variant, peer.variant) in ((DEFAULT, ""), (KEPT, "no resharding"))
            if same and alike and peer.kind == "FSDP2" and own.peak_bytes and peer.peak_bytes:
                ratio = own.peak_bytes / peer.peak_bytes
                yield (
                    f"peak memory on {grid_of(peer)} ({_in_words(own)}) at most {MEMORY} times {_title_of(peer)}'s: "
                    f"{verdict(ratio <= MEMORY)}, {ratio:.3f}"
                )


def _all_losses(records: Sequence[LineRecord]) -> Iterator[str]:
    """Compare the losses: all lines train the same model on the same batch."""
    found = {record.line: record.losses for record in records if record.measured and record.losses}
    if len(found) < 2:
        return
    first = min(losses[0] for losses in found.values())
    for what, place in (("first", 0), ("last", -1)):
        lowest, highest = (pick(found, key=lambda line: found[line][place]) for pick in (min, max))
        low, high = found[lowest][place], found[highest][place]
        yield (
            f"the {what} losses of all {len(found)} lines agree within {LOSS_SPREAD:.0%} of the first loss: "
            f"{verdict(high - low <= LOSS_SPREAD * first)}, {low:.4f} ({lowest}) .. {high:.4f} ({highest})"
        )


def _losses_of_modes(records: Sequence[LineRecord]) -> Iterator[str]:
    """Compare the modes of each line, which begin with the same weights."""
    modes: dict[tuple[str, str, str], list[LineRecord]] = {}
    for record in records:
        if record.measured and record.losses:
            modes.setdefault((record.kind, grid_of(record), record.variant), []).append(record)
    apart = {
        same[0].line: max(
            (max(step) - min(step)) / min(step) for step in zip(*(one.losses for one in same), strict=True)
        )
        for same in modes.values()
        if len(same) > 1
    }
    if apart:
        worst = max(apart, key=lambda line: apart[line])
        yield (
            f"the losses of a line's modes agree within {MODE_SPREAD:.1%} in every step of the warm-up: "
            f"{verdict(apart[worst] <= MODE_SPREAD)}, {apart[worst]:.2%} ({worst})"
        )


# --- cores


def _cores(records: Sequence[LineRecord]) -> str:
    """Show how many cores each kind of thread keeps busy during a step, all ranks together."""
    kinds: dict[str, float] = {}
    for record in records:
        for kind, seconds in record.cpu_seconds.items():
            kinds[kind] = max(kinds.get(kind, 0.0), seconds / record.step)
    shown = [kind for kind in sorted(kinds, key=lambda kind: -kinds[kind]) if kinds[kind] >= 0.01]
    rows = []
    for record in sorted(records, key=_sort_key):
        busy = {kind: seconds / record.step for kind, seconds in record.cpu_seconds.items()}
        cells = [f"{busy.get(kind, 0.0):.2f}" for kind in shown]
        rows.append([record.line, f"{record.step * 1e3:.1f}", f"{sum(busy.values()):.2f}", *cells])
    return (
        "Cores that each kind of thread keeps busy during a step, all ranks together (CPU seconds of the threads / "
        "seconds of the step):\n\n" + _markdown(["line", "ms per step", "all", *shown], rows)
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

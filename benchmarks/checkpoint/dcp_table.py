"""The results of the checkpoint benchmark, as a page with tables and bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.checkpoint.save_and_load import OURS
from benchmarks.shared.tables import verdict

STALL = 1.1
"""The bar for our stall over the shortest stall of DCP's stagers."""
CALL, WHOLE = "stall, call", "stall, whole"


@dataclass
class Timings:
    """One line of the table."""

    grid: str
    measure: str
    side: str
    nbytes: int
    """Bytes of the whole state."""
    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def rate(self) -> float:
        """Return the GB/s of all ranks together."""
        return self.nbytes / self.median / 1e9


@dataclass
class GridResults:
    """All measurements on one grid."""

    grid: str
    ranks: int
    machine: str = ""
    nbytes: int = 0
    """Bytes of the whole state."""
    steps: int = 0
    """K: the number of training steps during a save."""
    step_seconds: float = 0.0
    file_bytes: dict[str, int] = field(default_factory=dict)
    behind: dict[str, float] = field(default_factory=dict)
    """The longest time for which a save continued after the K steps, by side."""
    alone: list[float] = field(default_factory=list)
    """Seconds of K steps without a save."""
    cold: bool = True
    """Whether files could be dropped from the page cache."""
    records: dict[tuple[str, str], Timings] = field(default_factory=dict)
    """By measure and side."""

    def add(self, measure: str, side: str, seconds: float) -> None:
        fresh = Timings(self.grid, measure, side, self.nbytes)
        self.records.setdefault((measure, side), fresh).seconds.append(seconds)

    def facts(self) -> dict[str, Any]:
        """Return everything except the records."""
        return {name: value for name, value in vars(self).items() if name != "records"}


def bars(group: GridResults) -> list[str]:
    """Return one sentence per bar, with what was reached."""
    found = []
    measures = list(dict.fromkeys(measure for measure, _ in group.records))
    for measure in measures:
        ours = group.records[measure, OURS]
        peers = [record for (of, side), record in group.records.items() if of == measure and side != OURS]
        peer = min(peers, key=lambda record: record.median)
        if measure in (CALL, WHOLE):
            reached, rule = ours.median <= STALL * peer.median, f"at most {STALL} times {peer.side}'s"
            shown = f"{ours.median:.3f} s and {peer.median:.3f} s"
        else:
            reached, rule = ours.rate >= peer.rate, f"throughput not below {peer.side}'s"
            shown = f"{ours.rate:.2f} and {peer.rate:.2f} GB/s"
        judged = verdict(reached)
        if measure == WHOLE:
            noise = max(group.alone) - min(group.alone)
            shown += f"; K steps without a save spread by {noise:.3f} s"
            if peer.median <= 0:
                judged = "not judged, because the stall is smaller than the noise"
        found.append(f"{measure}: {rule}: {judged}, {shown}")
    return found


def page(run: dict[str, Any], groups: Sequence[GridResults]) -> str:
    parts = [
        f"# Checkpoints beside torch.distributed.checkpoint, {run['date']}",
        "Both sides in one run, interleaved. Times are those of the slowest rank, medians over rounds; spread = min .. "
        "max. Both sides fsync their files. Only Fourfold has checksums: it computes them while it saves and verifies "
        "all of them while it loads. DCP (`FileSystemWriter`, plans cached) loads into existing tensors; Fourfold also "
        "creates the optimizer's state. Stall: `call` is how long the training thread is blocked, `whole` is how much "
        "longer K steps take during a save than without one.",
        f"On {groups[0].machine}, {run['cores']} cores, load {run['load']} before the run, {run['file_system']}, torch "
        f"{run['torch']}:\n\n```\n{run['command']}\n```",
    ]
    if not run["loads"]:
        parts.append("safetensors is not installed, so loading was not measured.")
    for group in groups:
        parts += [_title(group, run), _rows(group), "Bars:\n\n" + "\n".join(f"- {bar}" for bar in bars(group))]
    return "\n\n".join(parts) + "\n"


def _title(group: GridResults, run: dict[str, Any]) -> str:
    files = ", ".join(f"{side} {nbytes / 1e9:.3f}" for side, nbytes in group.file_bytes.items())
    late = [f"{side} {seconds:.1f} s" for side, seconds in group.behind.items() if seconds > group.step_seconds]
    return (
        f"## {group.ranks} ranks, {group.grid}: {run['parameters'] / 1e6:.0f} M parameters with AdamW's state\n\n"
        f"{group.nbytes / 1e9:.3f} GB of tensors; GB on the disk: {files}. K = {group.steps} steps of "
        f"{group.step_seconds:.2f} s."
        + (f" Still writing after them: {', '.join(late)}." if late else "")
        + ("" if group.cold else " Files could not be dropped from the page cache, so no load was cold.")
    )


def _rows(group: GridResults) -> str:
    rows = [["measure", "side", "seconds", "spread", "GB/s"], ["---"] * 5]
    for (measure, side), record in sorted(group.records.items(), key=lambda item: _sort_key(*item[0])):
        rate = "-" if measure in (CALL, WHOLE) else f"{record.rate:.2f}"
        spread = f"{min(record.seconds):.3f} .. {max(record.seconds):.3f}"
        rows.append([measure, side, f"{record.median:.3f}", spread, rate])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _sort_key(measure: str, side: str) -> tuple[str, bool, str]:
    order = "2" if measure == "save" else "3" if measure.startswith("load") else "4"
    return order + measure, side != OURS, side

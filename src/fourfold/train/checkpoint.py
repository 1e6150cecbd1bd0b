"""What `fourfold checkpoint` does: list | inspect | verify | convert.

All of it is for one process, reads a tensor at a time, and runs nothing that a folder holds.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence, Sized
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

from fourfold.checkpoint.folder import GIVE, STEP, checkpoints_of, find_checkpoint, is_checkpoint
from fourfold.checkpoint.record import Entry, Record, read_record
from fourfold.checkpoint.weights import MODEL
from fourfold.checkpoint.whole import verify
from fourfold.report.units import DASH, aligned, count, nbytes
from fourfold.train.progress import percent_of

UNFINISHED = {
    ".partial": "not complete: a save is under way, or died",
    ".removed": "not complete: being removed, or left over from it",
    ".replaced": "the former one: a save died while it replaced it",
}
SHOWN = 8
"""Keys that are named where some are left out."""


def steps_of(path: Path) -> list[tuple[int, Path]]:
    """Step and folder of every checkpoint of a run, of those too that lost their record."""
    found = [(STEP.fullmatch(folder.name), folder) for folder in checkpoints_of(path).root.iterdir()]
    return sorted((int(match[1]), folder) for match, folder in found if match)


def show_list(options: argparse.Namespace, _: object) -> int:
    rows: list[tuple[str, ...]] = [("step", "saved", "grid", "tensors", "bytes", "holds")]
    below: list[str] = []
    for step, folder in steps_of(options.path):
        try:
            rows.append((str(step), *_row(read_record(folder))))
        except (OSError, ValueError) as error:
            rows.append((str(step), *[DASH] * 4, "damaged"))
            below.append(str(error))
    damaged = len(below)
    for folder in sorted(checkpoints_of(options.path).root.glob(".step-*")):
        if folder.suffix in UNFINISHED:
            below.append(f"{folder.name}: {UNFINISHED[folder.suffix]}")
    if len(rows) == 1 and not below:
        raise FileNotFoundError(f"{options.path} has no checkpoint; give the folder of a run that was saved")
    print("\n".join([*(table(rows, right=(0, 3, 4)) if len(rows) > 1 else ()), *below]))
    return 1 if damaged else 0


def _row(record: Record) -> tuple[str, ...]:
    groups = sum_by_group(record)
    return (
        saved_at(record.state.get("saved")),
        str(record.shape),
        str(len(record.tensors)),
        nbytes(sum(groups.values())),
        ", ".join(groups),
    )


def sum_by_group(record: Record) -> dict[str, int]:
    """Bytes of the model, of the optimizer and of what else there is."""
    groups: Counter[str] = Counter()
    for name, entry in record.tensors.items():
        groups[name.partition("/")[0]] += entry.nbytes
    return dict(groups)


def inspect(options: argparse.Namespace, _: object) -> int:
    folder = find_checkpoint(options.path)
    document = describe(folder, read_record(folder))
    print(json.dumps(document, indent=1) if options.json else inspect_text(document))
    return 0


def describe(folder: Path, record: Record) -> dict[str, Any]:
    """What a checkpoint holds, as JSON has it."""
    parameters = sum(prod(entry.shape) for name, entry in record.tensors.items() if name.startswith(MODEL))
    return {
        "path": str(folder),
        "step": record.state.get("step"),
        "saved": record.state.get("saved"),
        "grid": {"sizes": record.shape.sizes, "order": list(record.shape.order), "name": str(record.shape)},
        "parameters": parameters,
        "bytes": sum_by_group(record),
        "files": {name: entry.nbytes for name, entry in record.files.items()},
        "tensors": {name: _described(entry) for name, entry in record.tensors.items()},
        "state": record.state,
    }


def _described(entry: Entry) -> dict[str, Any]:
    dtype, cuts = str(entry.dtype).removeprefix("torch."), [list(cut) for cut in entry.storage.cuts]
    return {"shape": list(entry.shape), "dtype": dtype, "cuts": cuts, "bytes": entry.nbytes}


def inspect_text(document: dict[str, Any]) -> str:
    state, sizes = document["state"], document["bytes"]
    groups = ", ".join(f"{group} {nbytes(size)}" for group, size in sizes.items())
    facts = [
        ("step", _shown(document["step"])),
        ("saved", saved_at(document["saved"])),
        ("grid", f"{document['grid']['name']}, {_several(document['files'], 'file')}"),
        ("model", f"{model_name(state)}, {count(document['parameters'])} parameters"),
        ("bytes", f"{nbytes(sum(sizes.values()))}: {groups}" if sizes else nbytes(0)),
        ("state", ", ".join(state) or DASH),
    ]
    rows = [("tensor", "shape", "dtype", "bytes", "cut")]
    for name, entry in document["tensors"].items():
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        rows.append((name, shape, entry["dtype"], nbytes(entry["bytes"]), _cut(entry["cuts"])))
    return "\n".join([document["path"], *table(facts), "", *table(rows, right=(3,))])


def _shown(value: object) -> str:
    return DASH if value is None else str(value)


def saved_at(value: object) -> str:
    """The time of an ISO text, on the clock of who reads it."""
    try:
        return datetime.fromisoformat(str(value)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        return DASH


def _several(things: Sized, word: str) -> str:
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


def model_name(state: dict[str, Any]) -> str:
    """As the config of the run has it; a checkpoint of weights alone knows none."""
    config = state.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    return _shown(model.get("name")) if isinstance(model, dict) else DASH


def _cut(cuts: Iterable[tuple[str, int]]) -> str:
    """`dim 0 over x, z; dim 1 over y`"""
    axes: dict[int, list[str]] = {}
    for axis, dim in cuts:
        axes.setdefault(dim, []).append(axis)
    return "; ".join(f"dim {dim} over {', '.join(axes[dim])}" for dim in sorted(axes)) or "whole"


def check(options: argparse.Namespace, _: object) -> int:
    """Verify a checkpoint, or all of a run; each that is damaged is named."""
    path: Path = options.path
    folders = [path] if is_checkpoint(path) else [folder for _, folder in steps_of(path)]
    if not folders:
        raise FileNotFoundError(f"{path} has no checkpoint; {GIVE}")
    damaged = 0
    for folder in folders:
        try:
            print(f"{folder}: {_verified(folder)}, every checksum is right")
        except (OSError, ValueError) as error:
            print(f"fourfold: {error}", file=sys.stderr)
            damaged += 1
    return 1 if damaged else 0


def _verified(folder: Path) -> str:
    record = read_record(folder)
    show, done, total = percent_of(folder.name), 0, sum(entry.nbytes for entry in record.tensors.values())

    def say(size: int) -> None:
        nonlocal done
        done += size
        show(done, total)

    verify(folder, say)
    return f"{_several(record.files, 'file')}, {_several(record.tensors, 'tensor')}, {nbytes(total)}"


def convert(options: argparse.Namespace, _: object) -> int:
    from fourfold.checkpoint.dcp import from_dcp, to_dcp

    source, target, show = options.source, options.to, percent_of("converting")
    if options.to_dcp:
        if options.prefix is not None:
            raise ValueError("--prefix is for --from-dcp; a folder that is written has the names model.NAME")
        source = find_checkpoint(source)
        done = to_dcp(source, target, progress=show)
        after = "torch.distributed.checkpoint.load reads it: model.NAME, optim.state.NAME.exp_avg"
    else:
        print(
            f"fourfold: {source / '.metadata'} is a pickle; it is read through a list of allowed names, nothing in it "
            "is run",
            file=sys.stderr,
        )
        done = from_dcp(source, target, prefix=options.prefix, progress=show)
        after = f"fourfold checkpoint inspect {target}"
    print(f"{target}: {done.tensors} tensors, {nbytes(done.nbytes)}, from {source}; {after}")
    if done.left_out:
        more = "" if len(done.left_out) <= SHOWN else f" and {len(done.left_out) - SHOWN} more"
        print(f"left out: {', '.join(map(plain, done.left_out[:SHOWN]))}{more}")
    return 0


def plain(text: str) -> str:
    """A text that may be a stranger's, without what a terminal would obey."""
    return text if text.isprintable() else ascii(text)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Lines of a table of what a folder says of itself."""
    return aligned([[plain(cell) for cell in row] for row in rows], right)

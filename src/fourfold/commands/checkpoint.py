"""`fourfold checkpoint list | inspect | verify | convert`.

Each of them runs in one process, reads one tensor at a time, and executes nothing that a folder contains.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence, Sized
from datetime import datetime
from math import prod
from pathlib import Path
from typing import Any

from fourfold.checkpoint.format import MODEL, Record, read_record
from fourfold.checkpoint.load import (
    SET_ASIDE,
    WHAT_TO_GIVE,
    checkpoints_of,
    find_checkpoint,
    is_checkpoint,
    verify_checkpoint,
)
from fourfold.errors import DamagedCheckpointError
from fourfold.layout import Layout
from fourfold.report.units import DASH, aligned, count, nbytes
from fourfold.train.progress import percent_of

UNFINISHED = {
    ".partial": "not complete: a save is in progress or has died",
    ".removed": "not complete: it is being removed, or a removal has died",
    ".replaced": "an older checkpoint: a save died while it replaced it",
}
"""Explanations of the folders beside the checkpoints, by the ends of their names."""
MOST_KEYS_SHOWN = 8
"""Number of keys to name at most when a conversion leaves keys out; a foreign checkpoint may have thousands."""


def list_checkpoints(options: argparse.Namespace, _: object) -> int:
    """Print a line for each checkpoint of a run; return 1 if one of them is damaged."""
    checkpoints = checkpoints_of(options.path)
    rows: list[tuple[str, ...]] = [("step", "saved", "grid", "tensors", "bytes", "holds")]
    below: list[str] = []
    for step, folder in checkpoints.all():
        try:
            record = read_record(folder)
            require_files(folder, record)
        except (OSError, ValueError) as error:  # a damaged checkpoint must not hide the others
            rows.append((str(step), *[DASH] * 4, "damaged"))
            below.append(str(error))
            continue
        groups = bytes_by_group(record)
        total = nbytes(sum(groups.values()))
        saved = local_time(record.state.get("saved"))
        rows.append((str(step), saved, str(record.grid), str(len(record.tensors)), total, ", ".join(groups)))
    damaged = len(below)
    for folder in sorted(checkpoints.root.glob(".step-*")):  # a save works in a hidden folder until it is complete
        if folder.suffix in UNFINISHED:
            below.append(f"{folder.name}: {UNFINISHED[folder.suffix]}")
    for folder in sorted(checkpoints.root.glob(f"{SET_ASIDE}*")):
        below.append(f"{folder.name}: a run found it damaged and passed over it; remove it if nobody needs it")
    if is_checkpoint(options.path):
        raise ValueError(f"{options.path} is one checkpoint; show it with `fourfold checkpoint inspect {options.path}`")
    if len(rows) == 1 and not below:
        raise FileNotFoundError(f"{options.path} has no checkpoint; give the folder of a run that was saved")
    print("\n".join([*(table(rows, right=(0, 3, 4)) if len(rows) > 1 else ()), *below]))
    return 1 if damaged else 0


def require_files(folder: Path, record: Record) -> None:
    """Raise unless every file of a checkpoint is there with its length; only `verify` reads them."""
    for name, info in record.files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size != info.nbytes:
            found = "is missing" if size is None else f"has {size} bytes instead of {info.nbytes}"
            raise DamagedCheckpointError(f"{path} {found}; copy it again, or use another checkpoint")


def bytes_by_group(record: Record) -> dict[str, int]:
    """Return the bytes of the model, of the optimizer and of anything else."""
    groups: Counter[str] = Counter()
    for name, info in record.tensors.items():
        groups[name.partition("/")[0]] += info.nbytes
    return dict(groups)


def inspect(options: argparse.Namespace, _: object) -> int:
    """Print what a checkpoint holds."""
    folder = find_checkpoint(options.path)
    document = describe(folder, read_record(folder))
    print(json.dumps(document, indent=1) if options.json else inspect_text(document))
    return 0


def describe(folder: Path, record: Record) -> dict[str, Any]:
    """Return what a checkpoint holds as a JSON object."""
    return {
        "path": str(folder),
        "step": record.state.get("step"),
        "saved": record.state.get("saved"),
        "grid": {"sizes": record.grid.sizes, "order": list(record.grid.order), "name": str(record.grid)},
        "parameters": sum(prod(info.shape) for name, info in record.tensors.items() if name.startswith(MODEL)),
        "bytes": bytes_by_group(record),
        "files": {name: info.nbytes for name, info in record.files.items()},
        "tensors": {
            name: {
                "shape": list(info.shape),
                "dtype": str(info.dtype).removeprefix("torch."),
                "cuts": [list(cut) for cut in info.storage.cuts],
                "bytes": info.nbytes,
                **({"pipe": list(info.pipe)} if info.pipe else {}),
            }
            for name, info in record.tensors.items()
        },
        "state": record.state,
    }


def inspect_text(document: dict[str, Any]) -> str:
    """Return the lines that `inspect` prints."""
    state, sizes = document["state"], document["bytes"]
    groups = ", ".join(f"{group} {nbytes(size)}" for group, size in sizes.items())
    facts = [
        ("step", _shown(document["step"])),
        ("saved", local_time(document["saved"])),
        ("grid", f"{document['grid']['name']}, {_counted(document['files'], 'file')}"),
        ("model", f"{model_name(state)}, {count(document['parameters'])} parameters"),
        ("bytes", f"{nbytes(sum(sizes.values()))}: {groups}" if sizes else nbytes(0)),
        ("state", ", ".join(state) or DASH),
    ]
    rows = [("tensor", "shape", "dtype", "bytes", "cut")]
    for name, entry in document["tensors"].items():
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        layout = Layout(tuple((axis, dim) for axis, dim in entry["cuts"]))
        cut = [
            f"dim {dim} over {', '.join(layout.over(dim))}" for dim in range(len(entry["shape"])) if layout.over(dim)
        ]
        cut = cut or ["whole"]
        cut += [f"on pipe {', '.join(map(str, entry['pipe']))}"] if "pipe" in entry else []
        rows.append((name, shape, entry["dtype"], nbytes(entry["bytes"]), "; ".join(cut)))
    return "\n".join([document["path"], *table(facts), "", *table(rows, right=(3,))])


def _shown(value: object) -> str:
    return DASH if value is None else str(value)


def _counted(things: Sized, word: str) -> str:
    return f"{len(things)} {word}{'' if len(things) == 1 else 's'}"


def local_time(value: object) -> str:
    """Return the time of an ISO text in the reader's time zone."""
    try:
        return datetime.fromisoformat(str(value)).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        return DASH


def model_name(state: dict[str, Any]) -> str:
    """Return the model's name from the config of the run, or a dash for a checkpoint that holds only weights."""
    config = state.get("config")
    model = config.get("model") if isinstance(config, dict) else None
    return _shown(model.get("name")) if isinstance(model, dict) else DASH


def verify(options: argparse.Namespace, _: object) -> int:
    """Verify a checkpoint, or all checkpoints of a run; name the damaged ones, and return 1 if there is any.

    A checkpoint with NaN or infinity in a parameter or in the optimizer's state counts as damaged.
    """
    path: Path = options.path
    folders = [path] if is_checkpoint(path) else [folder for _, folder in checkpoints_of(path).all()]
    if not folders:
        raise FileNotFoundError(f"{path} has no checkpoint; {WHAT_TO_GIVE}")
    damaged = 0
    for folder in folders:
        try:
            print(f"{folder}: {_verify_one(folder)}, every checksum is right")
        except (OSError, ValueError) as error:  # continue, so that one call names all damaged files
            print(f"fourfold: {error}", file=sys.stderr)
            damaged += 1
    return 1 if damaged else 0


def _verify_one(folder: Path) -> str:
    """Verify a checkpoint and return a summary of it."""
    record = read_record(folder)
    show, done, total = percent_of(folder.name), 0, sum(info.nbytes for info in record.tensors.values())

    def progress(size: int) -> None:
        nonlocal done
        done += size
        show(done, total)

    verify_checkpoint(folder, progress)
    return f"{_counted(record.files, 'file')}, {_counted(record.tensors, 'tensor')}, {nbytes(total)}"


def convert(options: argparse.Namespace, _: object) -> int:
    """Convert a checkpoint to or from a folder of torch's distributed checkpoint."""
    # imported here, because torch.distributed.checkpoint takes a second to import
    from fourfold.checkpoint.dcp import from_dcp, to_dcp

    source, target, show = options.source, options.to, percent_of("converting")
    if options.to_dcp:
        if options.prefix is not None:
            raise ValueError("--prefix is for --from-dcp; a folder that is written has the names model.NAME")
        source = find_checkpoint(source)
        done = to_dcp(source, target, progress=show)
        next_step = "torch.distributed.checkpoint.load reads it: model.NAME, optim.state.NAME.exp_avg"
    else:
        print(
            f"fourfold: {source / '.metadata'} is a pickle; it is read through a list of allowed names, so nothing in "
            "it is executed",
            file=sys.stderr,
        )
        done = from_dcp(source, target, prefix=options.prefix, progress=show)
        next_step = f"fourfold checkpoint inspect {target}"
    print(f"{target}: {done.tensors} tensors, {nbytes(done.nbytes)}, from {source}; {next_step}")
    if done.left_out:
        left = len(done.left_out) - MOST_KEYS_SHOWN
        more = f" and {left} more" if left > 0 else ""
        print(f"left out: {', '.join(map(printable, done.left_out[:MOST_KEYS_SHOWN]))}{more}")
    return 0


def printable(text: str) -> str:
    """Return a text from a file without control characters, which a terminal would obey."""
    return text if text.isprintable() else ascii(text)


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Return the lines of a table of texts from a file, without control characters."""
    return aligned([[printable(cell) for cell in row] for row in rows], right)

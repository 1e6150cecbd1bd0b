"""`fourfold doctor RUN`: explains what went wrong with a run, from the files that its ranks have left behind.

With --preflight it checks what a future run needs; `preflight` does that.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from fourfold.commands.preflight import preflight
from fourfold.errors import End
from fourfold.train.run_folder import last_end
from fourfold.watch.diagnose import diagnose
from fourfold.watch.tape import DIAGNOSIS, TapeReading, read_all

PREFLIGHT_ONLY = ("grid", "ranks", "out", "changes", "device", "json")
"""Options that only --preflight takes."""


def doctor(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Explain a run, or run the preflight; return the exit code."""
    folder = options.path
    if options.preflight:
        if folder is not None and folder.is_dir():
            raise ValueError(f"--preflight {folder} is a folder; give the config of the future run, CONFIG.toml")
        return preflight(options, arguments)
    given = [name for name in PREFLIGHT_ONLY if getattr(options, name) not in (None, [])]
    if given:
        name = "set" if given[0] == "changes" else given[0]
        raise ValueError(f"--{name} only works with --preflight; to examine a run give only its folder")
    if folder is None:
        raise ValueError("give the folder of a run, or --preflight to check what a run needs before it starts")
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"{folder} has no run.json; give the folder of a run of fourfold train")
    for line in explain(folder):
        print(line)
    return 0


def explain(folder: Path) -> Iterator[str]:
    """Yield the lines that explain how a run ended."""
    end, tapes, found = last_end(folder / "metrics.jsonl"), read_all(folder), folder / DIAGNOSIS
    yield f"{folder}: " + (f"ended at step {end['step']}: {end['reason']}" if end else "has no recorded end")
    found_at = found.stat().st_mtime if found.is_file() else 0.0
    if found_at:
        when = datetime.fromtimestamp(found_at).isoformat(" ", "seconds")
        yield f"\nthe diagnosis of its ranks ({when}):"
        yield from found.read_text().rstrip().splitlines()
    if not tapes:
        yield "\nits ranks left no tapes"
    elif end is None or end["reason"] != End.FINISHED:
        yield "\nthe tapes of its ranks:"
        # the ranks' own diagnosis is better if it is from this start: it knows which rank did not answer
        if found_at < max(tape.who.began for tape in tapes.values()):
            yield from diagnose(tapes, {}).lines()
        yield from (f"  {last_words(reading)}" for _, reading in sorted(tapes.items()))


def disagreement(folder: Path, since: float) -> str:
    """Say how ranks that started since then launched different collectives, by their tapes; empty if they did not."""
    found = diagnose({rank: tape for rank, tape in read_all(folder).items() if tape.who.began >= since}, {})
    return found.headline if found.disagreement is not None else ""


def last_words(reading: TapeReading) -> str:
    """Say what a rank did last."""
    when = datetime.fromtimestamp(reading.last_seen).strftime("%H:%M:%S") if reading.last_seen else "never"
    doing = f"{reading.doing.what}, step {reading.doing.step}" if reading.doing is not None else "nothing"
    return f"rank {reading.who.rank}, last seen at {when}: {doing}"

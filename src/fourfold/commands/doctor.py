"""`fourfold doctor RUN`: what went wrong with a run, from what its ranks have left behind.

With --preflight what would go wrong with one to come; that is `train.preflight`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from fourfold.errors import End
from fourfold.train.run_folder import last_end
from fourfold.watch.diagnose import diagnose
from fourfold.watch.tape import DIAGNOSIS, TapeReading, read_all

OF_PREFLIGHT = ("grid", "ranks", "out", "changes", "device", "json")
"""Options that a run which has ended has no use for."""


def doctor(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = options.path
    if options.preflight:
        if folder is not None and folder.is_dir():
            raise ValueError(f"--preflight {folder} is a folder; give the config of the run to be, CONFIG.toml")
        from fourfold.commands.preflight import preflight

        return preflight(options, arguments)
    given = [name for name in OF_PREFLIGHT if getattr(options, name) not in (None, [])]
    if given:
        name = "set" if given[0] == "changes" else given[0]
        raise ValueError(f"--{name} is for --preflight, before a run; of one that was there give the folder alone")
    if folder is None:
        raise ValueError("give the folder of a run; or --preflight, to look at what a run needs before it begins")
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"{folder} has no run.json; give the folder of a run, which fourfold train has written")
    for line in explain(folder):
        print(line)
    return 0


def explain(folder: Path) -> Iterator[str]:
    end, tapes, found = last_end(folder / "metrics.jsonl"), read_all(folder), folder / DIAGNOSIS
    yield f"{folder}: " + (f"ended at step {end['step']}: {end['reason']}" if end else "has no end on record")
    found_at = found.stat().st_mtime if found.is_file() else 0.0
    if found_at:
        when = datetime.fromtimestamp(found_at).isoformat(" ", "seconds")
        yield f"\nwhat its ranks found out together ({when}):"
        yield from found.read_text().rstrip().splitlines()
    if not tapes:
        yield "\nits ranks have left no tapes"
    elif end is None or end["reason"] != End.FINISHED:
        yield "\nwhat their tapes say:"
        if found_at < max(tape.who.began for tape in tapes.values()):  # they knew more: who did not answer any more
            yield from diagnose(tapes, {}).lines()
        yield from (f"  {last_words(reading)}" for _, reading in sorted(tapes.items()))


def disagreement(folder: Path, since: float) -> str:
    """How ranks that began since then differed in what they launched, by their tapes; nothing where they did not."""
    found = diagnose({rank: tape for rank, tape in read_all(folder).items() if tape.who.began >= since}, {})
    return found.headline if found.disagreement is not None else ""


def last_words(reading: TapeReading) -> str:
    """Say what a rank did last."""
    when = datetime.fromtimestamp(reading.last_seen).strftime("%H:%M:%S") if reading.last_seen else "never"
    doing = f"{reading.doing.what}, step {reading.doing.step}" if reading.doing is not None else "nothing"
    return f"rank {reading.who.rank}, last seen at {when}: {doing}"

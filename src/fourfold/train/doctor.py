"""`fourfold doctor RUN`: what went wrong with a run, from what its ranks have left behind."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fourfold.train.record import Event
from fourfold.watch.diagnose import diagnose
from fourfold.watch.tape import DIAGNOSIS, Reading, read_all

DOCTOR = """\
Say what went wrong with a run: why it ended, what its ranks found out together, and what each of them did last, from
the tapes that they keep in its folder. Also of one that is still there and does not move.

  fourfold doctor runs/gpt-tiny-20261115-120000"""


def add_doctor(commands: Any, shape: type[argparse.HelpFormatter]) -> None:
    one = commands.add_parser("doctor", help="what went wrong with a run", description=DOCTOR, formatter_class=shape)
    one.add_argument("folder", type=Path, metavar="RUN", help="the run's folder")
    one.set_defaults(run=doctor)


def doctor(options: argparse.Namespace, _: Sequence[str]) -> int:
    folder = options.folder
    if not (folder / "run.json").is_file():
        raise FileNotFoundError(f"{folder} has no run.json; give the folder of a run, which fourfold train has written")
    for line in explain(folder):
        print(line)
    return 0


def explain(folder: Path) -> Iterator[str]:
    end, tapes, found = last_end(folder), read_all(folder), folder / DIAGNOSIS
    yield f"{folder}: " + (f"ended at step {end['step']}: {end['reason']}" if end else "has no end on record")
    if found.is_file():
        when = datetime.fromtimestamp(found.stat().st_mtime).isoformat(" ", "seconds")
        yield f"\nwhat its ranks found out together ({when}):"
        yield from found.read_text().rstrip().splitlines()
    if not tapes:
        yield "\nits ranks have left no tapes"
    elif end is None or end["reason"] != "finished":
        yield "\nwhat their tapes say:"
        yield from diagnose(tapes, {}).lines()
        yield from (f"  {last_words(reading)}" for _, reading in sorted(tapes.items()))


def disagreement(folder: Path, since: float) -> str:
    """How ranks that began since then differed in what they launched, by their tapes; nothing where they did not."""
    found = diagnose({rank: tape for rank, tape in read_all(folder).items() if tape.who.began >= since}, {})
    return found.headline if found.disagreement is not None else ""


def last_end(folder: Path) -> Event | None:
    """How the run ended, unless it has gone on since or does still."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    newest = json.loads(lines[-1]) if lines else {}
    return newest if newest.get("event") == "end" else None


def last_words(reading: Reading) -> str:
    """What a rank did last."""
    when = datetime.fromtimestamp(reading.last_seen).strftime("%H:%M:%S") if reading.last_seen else "never"
    doing = f"{reading.doing.what}, step {reading.doing.step}" if reading.doing is not None else "nothing"
    return f"rank {reading.who.rank}, last seen at {when}: {doing}"

"""`fourfold doctor RUN`: what went wrong with a run, from what its ranks have left behind.

With --preflight what would go wrong with one to come; that is `train.preflight`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fourfold.train.record import last_end
from fourfold.watch.diagnose import diagnose
from fourfold.watch.tape import DIAGNOSIS, Reading, read_all

DOCTOR = """\
Say what went wrong with a run: why it ended, what its ranks found out together, and what each of them did last, from
the tapes that they keep in its folder. Also of one that is still there and does not move.

With --preflight look, for a minute at the most, at what a long run needs, on the ranks that it will have: versions,
devices and how fast they are, memory, clocks, every link of every axis, disk. Each is ok, a warning or FAILED, with
what to do; one that FAILED gives exit code 1. Outside of torchrun and SLURM the local ranks are started here.

  fourfold doctor runs/gpt-tiny-20261115-120000
  fourfold doctor --preflight run.toml --out /shared/runs/one
  fourfold doctor --preflight --ranks 8
  torchrun --nnodes 4 --nproc-per-node 8 -m fourfold.cli doctor --preflight run.toml --out /shared/runs/one"""
OF_PREFLIGHT = ("grid", "ranks", "out", "changes", "device", "json")
"""Options that a run which has ended has no use for."""


def add_doctor(
    commands: Any, shape: type[argparse.HelpFormatter], grid: Callable[[str], Any], setting: Callable[[str], Any]
) -> None:
    """With how a grid and a change of a config are read."""
    one = commands.add_parser(
        "doctor", help="what went wrong with a run, or would", description=DOCTOR, formatter_class=shape
    )
    one.add_argument(
        "path", nargs="?", type=Path, metavar="RUN", help="the run's folder; with --preflight its CONFIG.toml, if any"
    )
    one.add_argument("--preflight", action="store_true", help="look at what a long run needs, before it begins")
    one.add_argument("--grid", type=grid, help="such as x=2,z=2; by default the config's, without one a line of ranks")
    one.add_argument(
        "--ranks", type=int, help="local ranks to start; by default those of the grid, else the GPUs, else 1"
    )
    one.add_argument("--out", help="the run's folder to be; it is left as it was")
    one.add_argument("--set", action="append", type=setting, default=[], metavar="SECTION.KEY=VALUE", dest="changes")
    one.add_argument("--device", choices=["cpu", "cuda"], help="by default a GPU where there is one")
    one.add_argument("--json", metavar="FILE", help="checks and what they were found from; -: standard output")
    one.set_defaults(run=doctor)


def doctor(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    folder = options.path
    if options.preflight:
        if folder is not None and folder.is_dir():
            raise ValueError(f"--preflight {folder} is a folder; give the config of the run to be, CONFIG.toml")
        from fourfold.train.preflight import preflight

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


def last_words(reading: Reading) -> str:
    """What a rank did last."""
    when = datetime.fromtimestamp(reading.last_seen).strftime("%H:%M:%S") if reading.last_seen else "never"
    doing = f"{reading.doing.what}, step {reading.doing.step}" if reading.doing is not None else "nothing"
    return f"rank {reading.who.rank}, last seen at {when}: {doing}"

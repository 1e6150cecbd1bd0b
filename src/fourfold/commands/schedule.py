"""`fourfold schedule`: draws the schedules of a pipeline, finds fast ones and checks those of files, without torch."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from fourfold.report.units import aligned
from fourfold.schedule.action import Schedule, ScheduleError
from fourfold.schedule.find import FoundSchedule, find
from fourfold.schedule.named import BUILDERS, named
from fourfold.schedule.play import Played, StageSeconds, equal_seconds, play
from fourfold.schedule.stages import PLACEMENTS, place
from fourfold.schedule.text import STYLES, PictureLine, from_csv, picture, plain, summary, to_csv

MOST_RANKS, MOST_PASSES = 1024, 1 << 15
"""The largest schedule that is drawn: that of 64 ranks with 8 stages and 64 micro-batches, which takes seconds."""
TRIED = (1, 2, 4)
"""Chunks that are tried if --chunks says nothing: more rarely gain, because each brings more messages."""


def show(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Draw a named schedule; return the exit code."""
    chunks = options.chunks or (BUILDERS[options.name][1].start if options.name in BUILDERS else 1)
    require_drawable(options.pipe, chunks, options.micro)
    schedule = named(options.name, options.pipe, chunks, options.micro)
    if options.csv:
        print(to_csv(schedule), end="")
        return 0
    draw(options.name, play(schedule, seconds_of(options.seconds, options.pipe, chunks), options.hop))
    return 0


def require_drawable(pipe: int, chunks: int, micro: int) -> None:
    """Raise if a schedule is too large to be found or drawn in a time that somebody waits for."""
    if pipe > MOST_RANKS or pipe * chunks * micro > MOST_PASSES:
        raise ValueError(
            f"--pipe {pipe} with {chunks} stages of each rank and --micro {micro} is {pipe * chunks * micro} forward "
            f"passes; a schedule here has at most {MOST_PASSES}, of at most {MOST_RANKS} ranks"
        )


def find_schedule(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Find the fastest schedule, list what was tried, and draw it; return the exit code."""
    tried: list[tuple[str, int, FoundSchedule]] = []
    for chunks in chunks_of(options):
        require_drawable(options.pipe, chunks, options.micro)
        different = PLACEMENTS if chunks > 1 else PLACEMENTS[:1]  # with one chunk all placements are the same
        for placement in [options.placement] if options.placement else different:
            placed = place(placement, options.pipe, chunks)
            seconds = seconds_of(options.seconds, options.pipe, chunks)
            tried.append((placement, chunks, find(placed, options.micro, seconds, options.hop, options.memory)))
    placement, chunks, best = min(tried, key=lambda each: each[2].played.makespan)
    if options.csv:
        print(to_csv(best.schedule), end="")
        return 0
    if len(tried) > 1:
        for line in table(tried):
            print(line)
        print()
    draw(f"{placement} of {chunks}, {best.name}", best.played)
    return 0


def check(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Check the schedule of a file and draw it; return the exit code."""
    try:
        text = options.path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{options.path} is not a text file; give a CSV file with cells such as 0F0") from error
    try:
        schedule = from_csv(text)
        schedule.check()
    except ScheduleError as error:
        raise ValueError(f"{options.path}: {error}") from error
    if options.seconds is not None and len(options.seconds) == 1:
        seconds = of_ranks(schedule, options.seconds[0])
    else:
        seconds = by_stage(options.seconds or ((1.0, 1.0, 1.0),) * schedule.stages, schedule.stages)
    draw(f"{options.path} is valid", play(schedule, seconds, options.hop))
    return 0


def chunks_of(options: argparse.Namespace) -> Sequence[int]:
    """Return the numbers of chunks to try."""
    if options.chunks is not None:
        return [options.chunks]
    if options.seconds is None or len(options.seconds) == 1:
        return TRIED
    return [max(1, len(options.seconds) // options.pipe)]


def seconds_of(given: Sequence[tuple[float, float, float]] | None, pipe: int, chunks: int) -> StageSeconds:
    """Return the seconds of every stage from --seconds: those of whole ranks are divided by chunks."""
    if given is None or len(given) == 1:
        return equal_seconds(*(given[0] if given else (1.0, 1.0, 1.0)), pipe, chunks)
    return by_stage(given, pipe * chunks)


def of_ranks(schedule: Schedule, given: tuple[float, float, float]) -> StageSeconds:
    """Return the seconds of every stage of a schedule whose ranks may have different numbers of stages."""
    held = [schedule.placement.count(rank) for rank in schedule.placement]
    return {kind: [seconds / count for count in held] for kind, seconds in zip("FBW", given, strict=True)}


def by_stage(given: Sequence[tuple[float, float, float]], stages: int) -> StageSeconds:
    """Return the seconds of every stage from those of each."""
    if len(given) != stages:
        raise ValueError(
            f"--seconds has {len(given)} stages, but there are {stages}; give F,B,W of each stage with / between them, "
            "or once for a whole rank"
        )
    return {kind: [each[place_of] for each in given] for place_of, kind in enumerate("FBW")}


def table(tried: Iterable[tuple[str, int, FoundSchedule]]) -> list[str]:
    """Return the best schedule of every placement as lines."""
    rows = [["placement", "chunks", "makespan", "idle", "kept", "schedule"]]
    for placement, chunks, found in tried:
        makespan, idle, kept = found.played.makespan, found.played.idle_share, max(found.played.peaks)
        rows.append([placement, f"{chunks}", f"{makespan:.4g}", f"{idle:.1%}", f"{kept:g}", found.name])
    return aligned(rows, right=range(1, 5))


def draw(title: str, played: Played) -> None:
    """Print the picture of a schedule with its idle time and memory, in colours on a terminal that has them."""
    on_terminal = sys.stdout.isatty()
    lines, note = picture(played, shutil.get_terminal_size().columns if on_terminal else None)
    schedule = played.schedule
    print(f"{title}: {schedule.pipe} ranks, {schedule.stages} stages, {schedule.micro_steps} micro-batches")
    if on_terminal and find_spec("rich") is not None:
        coloured(lines)
    else:
        print(plain(lines))
    print(note)
    print(summary(played))


def coloured(lines: Iterable[PictureLine]) -> None:
    """Print a picture with colours."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for line in lines:
        console.print(Text.assemble(*((piece, STYLES.get(kind, "")) for piece, kind in line)), soft_wrap=True)

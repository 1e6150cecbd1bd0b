"""A schedule as text: a picture for a terminal, and torch's CSV in and out.

torch.distributed.pipelining writes one line per rank with cells such as `0F3`: stage, kind, micro-batch. Its B is our
BW, and its I (for input) our B. Cells that it adds for bubbles and messages are left out, because both follow from the
order of the rest.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from io import StringIO
from math import gcd
from pathlib import Path

from fourfold.errors import shortened
from fourfold.schedule.action import Action, Kind, Schedule, ScheduleError
from fourfold.schedule.play import ActionSpan, Played

TO_TORCH: dict[Kind, str] = {"F": "F", "B": "I", "W": "W", "BW": "B"}
FROM_TORCH = {word: kind for kind, word in TO_TORCH.items()}
CELL = re.compile(r"(\d{1,6})([FIBW])(\d{1,6})", re.ASCII)
IGNORED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*", re.ASCII)
"""Cells of torch's lowered format, which say what follows from the order of the actions."""
TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B", re.ASCII)
"""An F and a backward pass of another micro-batch that torch runs together; here they run one after the other."""

BUBBLE, GOES_ON = ".", "-"
"""What a slot shows in which a rank waits, and one in which an action goes on that began before it."""
MOST_DRAWN = 20_000
"""The most slots of a picture."""
MOST_SLOTS = 8
"""Slots of the longest action: where that needs smaller slots, starts and ends are rounded to slots."""
STYLES = {"F": "black on bright_blue", "B": "black on bright_green", "W": "black on bright_yellow"}
"""Colours of the cells of a picture, by the first letter of the kind of action; a bubble has none."""

PictureLine = list[tuple[str, str]]
"""Pieces of a line, each a text and the kind of its action."""


def to_csv(schedule: Schedule) -> str:
    """Return the schedule as torch's CSV."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for order in schedule.orders:
        writer.writerow([f"{stage}{TO_TORCH[kind]}{micro}" for kind, stage, micro in order])
    return out.getvalue()


def read_schedule(given: str) -> Schedule:
    """Return the schedule of a CSV file, or of the text of one, which has commas."""
    if "," in given:
        return from_csv(given)
    path = Path(given).expanduser()
    if not path.is_file():
        raise ValueError(
            f"schedule={given}: there is no such file; `fourfold schedule show 1f1b --pipe 4 --micro 8 "
            "--csv` prints one"
        )
    try:
        return from_csv(path.read_text())
    except (ScheduleError, UnicodeDecodeError) as error:
        raise ValueError(f"schedule={given}: {error}") from error


def from_csv(text: str) -> Schedule:
    """Return the schedule of torch's CSV; `Schedule.check` says whether it is valid.

    A stage is on the first rank that runs it. There are as many stages and micro-batches as the largest numbers say.
    """
    try:
        rows = list(csv.reader(text.splitlines()))
    except csv.Error as error:  # such as a cell of more than 128 KiB, or a quote that is not closed
        raise ScheduleError(
            f"the file is no CSV ({error}); write one line per rank with cells such as 0F0,0B0"
        ) from error
    orders = [tuple(_actions(row, rank)) for rank, row in enumerate(rows)]
    every = [action for order in orders for action in order]
    if not every:
        raise ScheduleError("the file has no action; write one line per rank with cells such as 0F0,0B0")
    stages, micro_steps = (1 + max(values) for values in zip(*((a.stage, a.micro) for a in every), strict=True))
    homes: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            homes.setdefault(action.stage, rank)
    for stage in range(stages):
        if stage not in homes:
            raise ScheduleError(
                f"no rank runs stage {stage}, but there is a stage {stages - 1}; add the actions of stage {stage}, or "
                "number the stages without gaps"
            )
    return Schedule(stages, micro_steps, tuple(homes[stage] for stage in range(stages)), tuple(orders))


def _actions(row: Sequence[str], rank: int) -> Iterator[Action]:
    """Yield the actions of one line."""
    for place, cell in enumerate(row):
        word = cell.strip()
        together = TOGETHER.fullmatch(word)
        for each in together[1].split(";") if together else [word]:
            each = each.strip()
            found = CELL.fullmatch(each)
            if found:
                yield Action(FROM_TORCH[found[2]], int(found[1]), int(found[3]))
            elif each and not IGNORED.fullmatch(each):
                raise ScheduleError(
                    f"rank {rank}, cell {place + 1}: {shortened(cell)!r} is no action; write stage, kind and "
                    "micro-batch, such as 0F3, with F forward, I backward for inputs, W for weights, B for both",
                    rank=rank,
                )


def picture(played: Played, width: int | None = None) -> tuple[list[PictureLine], str]:
    """Return a line per rank with a cell per slot of time, and a note about what the cells mean and what is cut off.

    `F3` is F of micro-batch 3; with several stages per rank, `5F3` is that of stage 5. A point is a slot in which the
    rank waits. Lines that exceed the width, in characters, are cut.
    """
    schedule, slot = played.schedule, slot_seconds(played)
    several = schedule.chunks > 1
    head = len(f"rank {schedule.pipe - 1} ")
    drawn = [[(_slots(span, slot), span.action) for span in spans] for spans in played.spans]
    # the name of an action with several slots may take them all
    cell = 1 + max(-(-len(label(a, several)) // max(1, s.stop - s.start)) for line in drawn for s, a in line)
    slots = round(played.makespan / slot)
    shown = slots if width is None else max(1, min(slots, (width - head) // cell))
    lines: list[PictureLine] = []
    for rank, actions in enumerate(drawn):
        line: PictureLine = [(f"rank {rank}".ljust(head), "")]
        at = 0
        for where, action in actions:
            start, stop = min(where.start, shown), min(where.stop, shown)
            line += [(BUBBLE.ljust(cell), "")] * (start - at)
            if stop > start:
                length = (stop - start) * cell - 1
                rest = " " if stop == start + 1 else GOES_ON
                line.append((label(action, several)[:length].ljust(length, rest), action.kind[0]))
                line.append((" ", ""))
            at = stop
        lines.append([*line, *[(BUBBLE.ljust(cell), "")] * (shown - at)])
    example = "5F3 is F of stage 5" if several else "F3 is F"
    note = f"{example} for micro-batch 3; {BUBBLE} is a bubble; a slot is {slot:.4g} s"
    if shown < slots:
        note += f"; cut after {shown} of {slots} slots: a wider terminal shows more, a pipe or a file everything"
    return lines, note


def slot_seconds(played: Played) -> float:
    """Return the seconds of a slot: the longest that divides every action, if none has more than `MOST_SLOTS` then.

    Where messages take so much longer than actions that this would be too many, a slot is longer.
    """
    times = {span.end - span.start for spans in played.spans for span in spans} - {0.0}
    if not times:
        return 1.0
    exact = [Fraction(round(seconds / max(times) * 5040), 5040) for seconds in times]  # 5040: all divisors up to 10
    common = Fraction(gcd(*(each.numerator * (5040 // each.denominator) for each in exact)), 5040)
    close = all(
        abs(float(each) * max(times) - seconds) < 1e-6 * max(times) for each, seconds in zip(exact, times, strict=True)
    )
    slot = float(common if close and common * MOST_SLOTS >= 1 else Fraction(1, MOST_SLOTS)) * max(times)
    return max(slot, played.makespan / MOST_DRAWN)


def _slots(span: ActionSpan, slot: float) -> range:
    """Return the slots of an action, with its start and end rounded."""
    return range(round(span.start / slot), round(span.end / slot))


def label(action: Action, several: bool) -> str:
    """Return the name of an action in a picture, with its stage if ranks have several."""
    return f"{action.stage if several else ''}{action.kind}{action.micro}"


def plain(lines: Sequence[PictureLine]) -> str:
    """Return a picture without colours."""
    return "\n".join("".join(piece for piece, _ in line).rstrip() for line in lines)


def summary(played: Played) -> str:
    """Return makespan, idle time and peak memory in words."""
    idle, peaks = played.idle, played.peaks
    waits = (
        f"{max(idle):.4g} s"
        if max(idle) - min(idle) < 1e-6 * played.makespan
        else f"{min(idle):.4g} to {max(idle):.4g} s"
    )
    return (
        f"makespan {played.makespan:.4g} s; a rank is idle for {waits} ({played.idle_share:.1%}); micro-batches "
        f"kept by rank: {', '.join(f'{peak:g}' for peak in peaks)}"
    )

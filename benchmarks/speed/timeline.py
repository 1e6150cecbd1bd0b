"""Draw one traced step of one rank: what it computed, what was in flight on each axis, and what it waited for.

    fourfold train run.toml --profile 10 --out runs/one
    python benchmarks/speed/timeline.py --run runs/one --rank 0 --step 10 --out step.svg

Reads `RUN/profile/rank-R.json`, from a CPU or a GPU run, and writes one SVG. Needs only the standard library.

    computing   products of forward (E1) and of backward (E2, E3), and all other work of the rank
    each axis   a row for gathers, a row for reductions, and below them in red the waits: exposed seconds

On the CPU the host computes. A collective counts as in flight from its launch to the end of its wait, even if it has
completed before it is needed; everything that is neither a product nor a wait is other work. On a GPU everything comes
from the device: an NCCL kernel belongs to the collective whose launch started it, and exposed time is how long the
stream is blocked at a wait until that collective's kernel ends, as the ledger measures it.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

Interval = tuple[float, float]
"""Microseconds, as a trace has them."""
Event = Mapping[str, Any]

PREFIX = "fourfold::"
WAIT, PRODUCT = "wait ", "product "
GATHERS, REDUCTIONS = "gathers", "reductions"
AXES = ("x", "y", "z", "data")


@dataclass
class TracedStep:
    """The intervals of one step of one rank."""

    begin: float
    end: float
    forward: list[Interval] = field(default_factory=list)
    backward: list[Interval] = field(default_factory=list)
    other: list[Interval] = field(default_factory=list)
    flights: dict[tuple[str, str], list[Interval]] = field(default_factory=lambda: defaultdict(list))
    """By axis and by gathers or reductions."""
    waits: dict[str, list[Interval]] = field(default_factory=lambda: defaultdict(list))

    @property
    def seconds(self) -> float:
        return (self.end - self.begin) / 1e6

    @property
    def axes(self) -> list[str]:
        """Return the axes with any communication, in the grid's order."""
        found = {axis for axis, _ in self.flights} | self.waits.keys()
        return [axis for axis in AXES if axis in found] + sorted(found.difference(AXES))

    def in_flight_seconds(self, axis: str) -> float:
        """Return for how long at least one collective of the axis was in flight."""
        return covered([one for kind in (GATHERS, REDUCTIONS) for one in self.flights.get((axis, kind), [])]) / 1e6

    def exposed_seconds(self, axis: str) -> float:
        return covered(self.waits.get(axis, [])) / 1e6

    def totals(self, axis: str) -> str:
        return f"in flight {shown(self.in_flight_seconds(axis))}, exposed {shown(self.exposed_seconds(axis))}"

    def clip(self) -> None:
        """Drop everything outside of the step."""
        for intervals in (self.forward, self.backward, self.other, *self.flights.values(), *self.waits.values()):
            inside = [(max(begin, self.begin), min(end, self.end)) for begin, end in intervals]
            intervals[:] = merged([one for one in inside if one[0] < one[1]])


def merged(intervals: Iterable[Interval], apart: float = 0.0) -> list[Interval]:
    """Sort intervals and join those that overlap, touch, or are at most `apart` from each other."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1] + apart:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def covered(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of the intervals."""
    return sum(end - begin for begin, end in merged(intervals))


def without(whole: Interval, parts: Iterable[Interval]) -> list[Interval]:
    """Return what is left of an interval once the parts are removed."""
    left, at = [], whole[0]
    for begin, end in merged(parts):
        if at < begin:
            left.append((at, min(begin, whole[1])))
        at = max(at, end)
    if at < whole[1]:
        left.append((at, whole[1]))
    return left


# --- reading


def read_step(trace: Mapping[str, Any], number: int) -> TracedStep:
    """Return step `number` of a trace."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    spans = sorted((event for event in events if event.get("cat") == "user_annotation"), key=lambda one: one["ts"])
    steps = {span["name"]: span for span in spans if span["name"].startswith("step ")}
    if f"step {number}" not in steps:
        there = ", ".join(steps) or "no step at all"
        raise ValueError(f"the trace has no step {number}; it has {there}. `fourfold train --profile` chooses them")
    whole = interval(steps[f"step {number}"])
    spans = [span for span in spans if span["name"].startswith(PREFIX)]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    step = _on_gpu(events, kernels, spans, whole) if kernels else _on_cpu(spans, whole)
    step.clip()
    return step


def interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def label(span: Event) -> str:
    """Return the label: `all_gather[z] layers.0.mlp.up`, `wait all_gather[z] ...`, `product E1 ...`."""
    return span["name"].removeprefix(PREFIX)


def place_of(record: str) -> tuple[str, str]:
    """Return axis and kind: `all_gather[z] layers.0.mlp.up` -> `z`, gathers."""
    op, _, rest = record.partition("[")
    return rest.partition("]")[0], GATHERS if op == "all_gather" else REDUCTIONS


def pairs(spans: Sequence[Event]) -> list[tuple[Event | None, Event | None]]:
    """Pair the launch and the wait of every collective; among equal names, the first wait matches the first launch."""
    launched: defaultdict[str, deque[Event]] = defaultdict(deque)
    found: list[tuple[Event | None, Event | None]] = []
    for span in spans:
        name = label(span)
        if name.startswith(WAIT):
            record = name.removeprefix(WAIT)
            found.append((launched[record].popleft() if launched[record] else None, span))
        elif not name.startswith(PRODUCT):
            launched[name].append(span)
    return found + [(span, None) for left in launched.values() for span in left]


def add_product(step: TracedStep, name: str, intervals: Iterable[Interval]) -> None:
    """Add a product to forward (`product E1 ...`, which includes recomputation) or to backward."""
    (step.forward if name.startswith(f"{PRODUCT}E1") else step.backward).extend(intervals)


def _on_cpu(spans: Sequence[Event], whole: Interval) -> TracedStep:
    step = TracedStep(*whole)
    for span in spans:
        if label(span).startswith(PRODUCT):
            add_product(step, label(span), [interval(span)])
    for launch, wait in pairs(spans):
        record = label(launch) if launch is not None else label(wait).removeprefix(WAIT)  # type: ignore[arg-type]
        axis, kind = place_of(record)
        begin = interval(launch)[0] if launch is not None else whole[0]
        end = interval(wait)[1] if wait is not None else whole[1]
        step.flights[axis, kind].append((begin, end))
        if wait is not None:
            step.waits[axis].append(interval(wait))
    busy = [*step.forward, *step.backward, *(one for waits in step.waits.values() for one in waits)]
    step.other = without(whole, busy)
    return step


def _on_gpu(events: Sequence[Event], kernels: Sequence[Event], spans: Sequence[Event], whole: Interval) -> TracedStep:
    launched = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    timed = sorted(
        ((launched[one["args"]["correlation"]], one) for one in kernels if one["args"].get("correlation") in launched),
        key=lambda pair: pair[0],
    )
    of_step = [one for moment, one in timed if whole[0] <= moment <= whole[1]]
    if not of_step:
        raise ValueError("no kernel of the trace was launched in that step: the driver may have refused to trace them")
    step = TracedStep(min(interval(one)[0] for one in of_step), max(interval(one)[1] for one in of_step))
    main = Counter(one["args"].get("stream") for one in of_step if not _is_nccl(one)).most_common(1)
    stream = main[0][0] if main else None

    begins = [span["ts"] for span in spans]
    flown: defaultdict[int, list[Interval]] = defaultdict(list)
    computed: list[tuple[float, float]] = []  # launch and end of each kernel on the compute stream
    for moment, one in timed:
        span = _span_at(spans, begins, moment)
        if _is_nccl(one):
            if span is not None and not label(span).startswith((WAIT, PRODUCT)):
                step.flights[place_of(label(span))].append(interval(one))
                flown[id(span)].append(interval(one))
            continue
        if one["args"].get("stream") == stream:
            computed.append((moment, interval(one)[1]))
        if span is not None and label(span).startswith(PRODUCT):
            add_product(step, label(span), [interval(one)])
        else:
            step.other.append(interval(one))
    _stalls(step, pairs(spans), flown, computed)
    return step


def _stalls(
    step: TracedStep,
    collectives: Iterable[tuple[Event | None, Event | None]],
    flown: Mapping[int, Sequence[Interval]],
    computed: Sequence[tuple[float, float]],
) -> None:
    """Add the exposed time: from when the stream reaches a wait until the collective's last kernel has ended."""
    reached, index = float("-inf"), 0
    waited = [(wait, launch) for launch, wait in collectives if launch is not None and wait is not None]
    for wait, launch in sorted(waited, key=lambda pair: pair[0]["ts"]):
        while index < len(computed) and computed[index][0] <= wait["ts"]:
            reached = max(reached, computed[index][1])
            index += 1
        arrived = max((end for _, end in flown.get(id(launch), ())), default=float("-inf"))
        begin = max(reached, wait["ts"])
        if begin < arrived:
            step.waits[place_of(label(launch))[0]].append((begin, arrived))
            reached = arrived


def _is_nccl(kernel: Event) -> bool:
    return "nccl" in kernel["name"].lower()


def _span_at(spans: Sequence[Event], begins: Sequence[float], moment: float) -> Event | None:
    """Return the innermost span at this moment, on any thread: while autograd's thread runs, its caller only waits."""
    for place in range(bisect_right(begins, moment) - 1, max(-1, bisect_right(begins, moment) - 9), -1):
        if moment <= interval(spans[place])[1]:
            return spans[place]
    return None


# --- drawing

WIDTH, PAD = 560, 12
LEFT, RIGHT = PAD, WIDTH - PAD
TITLE, TEXT, SMALL = 17, 15, 13
COMPUTING, ROW, EXPOSED = 28, 11, 9
"""Heights of rows, in pixels."""
INK, FAINT = "#222222", "#e4e4e4"
COLOURS = {
    "forward products": "#1f5fa8",
    "backward products": "#6a4fb3",
    "other work": "#b4c2d4",
    GATHERS: "#2a9d74",
    REDUCTIONS: "#d98a26",
    "exposed": "#c4161c",
}
TICKS = 6


def draw(step: TracedStep, title: str, seconds: float | None = None) -> str:
    """Return the SVG. `seconds` sets the least length of its time axis, so that two pictures can be compared."""
    picture = _Picture(step, max(step.seconds, seconds or 0.0))
    picture.text(LEFT, 24, title, TITLE, bold=True)
    picture.legend(46)
    picture.y = 92
    products = covered([*step.forward, *step.backward]) / 1e6
    rows = ("forward products", step.forward), ("backward products", step.backward), ("other work", step.other)
    work = f"products {shown(products)}, other {shown(covered(step.other) / 1e6)}"
    picture.lane("computing", work, [(COMPUTING, rows)])
    for axis in step.axes:
        flights = [(ROW, [(kind, step.flights.get((axis, kind), []))]) for kind in (GATHERS, REDUCTIONS)]
        picture.lane(f"axis {axis}", step.totals(axis), [*flights, (EXPOSED, [("exposed", step.waits.get(axis, []))])])
    picture.time_axis()
    return picture.finish(title)


def shown(seconds: float) -> str:
    """Format seconds as `1.24 s`, or as `820 ms` below one second."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 or not seconds else f"{seconds * 1e3:.2g} ms"


class _Picture:
    def __init__(self, step: TracedStep, seconds: float) -> None:
        self.step, self.seconds = step, seconds
        self.parts: list[str] = []
        self.y = 0.0

    def x(self, microseconds: float) -> float:
        return LEFT + (RIGHT - LEFT) * (microseconds - self.step.begin) / 1e6 / self.seconds

    def text(
        self, x: float, y: float, words: str, size: int = TEXT, *, anchor: str = "start", bold: bool = False
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}"{weight}>'
            f"{escape(words)}</text>"
        )

    def legend(self, y: float) -> None:
        for index, (words, colour) in enumerate(COLOURS.items()):
            x, row = LEFT + (index % 3) * 180, y + (index // 3) * 20
            self.parts.append(f'<rect x="{x}" y="{row - 11:g}" width="12" height="12" fill="{colour}"/>')
            self.text(x + 18, row, words, SMALL)

    def lane(
        self, name: str, totals: str, rows: Sequence[tuple[int, Sequence[tuple[str, Sequence[Interval]]]]]
    ) -> None:
        """Draw a heading with totals, then rows; each row has intervals of one or more kinds, by colour."""
        self.parts.append(f"<g><title>{escape(f'{name}: {totals}')}</title>")
        self.text(LEFT, self.y, name, bold=True)
        self.text(RIGHT, self.y, totals, anchor="end")
        self.y += 6
        for height, kinds in rows:
            self.parts.append(
                f'<rect x="{LEFT}" y="{self.y:g}" width="{RIGHT - LEFT}" height="{height}" fill="{FAINT}"/>'
            )
            for kind, intervals in kinds:
                self._bars(intervals, height, COLOURS[kind])
            self.y += height + 2
        self.parts.append("</g>")
        self.y += 26

    def _bars(self, intervals: Sequence[Interval], height: int, colour: str) -> None:
        """Draw the intervals as one path; those closer than a fifth of a pixel are joined."""
        apart = self.seconds * 1e6 / (RIGHT - LEFT) / 5
        drawn = ""
        for begin, end in merged(intervals, apart):
            width = max(self.x(end) - self.x(begin), 0.3)
            drawn += f"M{self.x(begin):.1f} {self.y:g}h{width:.1f}v{height}h-{width:.1f}z"
        if drawn:
            self.parts.append(f'<path fill="{colour}" d="{drawn}"/>')

    def time_axis(self) -> None:
        sizes = (factor * 10.0**power for power in range(-6, 6) for factor in (1, 2, 5))
        step = next(size for size in sizes if self.seconds / size <= TICKS)
        self.y -= 14
        self.parts.append(f'<path stroke="{INK}" d="M{LEFT} {self.y:g}H{RIGHT}"/>')
        for tick in range(int(self.seconds / step + 1e-9) + 1):
            x = self.x(self.step.begin + tick * step * 1e6)
            self.parts.append(f'<path stroke="{INK}" d="M{x:.1f} {self.y:g}v5"/>')
            anchor = "start" if tick == 0 else "end" if x > RIGHT - 24 else "middle"
            words = "0" if tick == 0 else f"{tick * step:g} s" if step >= 0.1 else f"{tick * step * 1e3:g} ms"
            self.text(round(x, 1), self.y + 19, words, SMALL, anchor=anchor)
        self.y += 28

    def finish(self, title: str) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.y:g}" width="{WIDTH}" '
            f'height="{self.y:g}" font-family="sans-serif" role="img"><title>{escape(title)}</title>'
            f'<rect width="{WIDTH}" height="{self.y:g}" fill="#ffffff"/>'
        )
        return "\n".join([head, *self.parts, "</svg>\n"])


# --- the command


def title_of(run: Path, rank: int, number: int, seconds: float) -> str:
    """Return the title, with the grid if the run's folder records it."""
    try:
        facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
        sizes = " ".join(f"{axis}={size}" for axis, size in facts["grid"].items() if size > 1) or "one rank"
    except (OSError, ValueError, KeyError, AttributeError):
        sizes = ""
    return f"{sizes + ', ' if sizes else ''}rank {rank}, step {number}: {shown(seconds)}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="the run folder, which contains profile/")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--step", type=int, required=True, help="one of the steps that --profile traced")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    parser.add_argument("--title", help="text to put before the automatic title")
    parser.add_argument("--seconds", type=float, help="least length of the time axis, to compare two pictures")
    options = parser.parse_args(arguments)
    path = options.run / "profile" / f"rank-{options.rank}.json"
    try:
        step = read_step(json.loads(path.read_text(encoding="utf-8", errors="replace")), options.step)
        title = title_of(options.run, options.rank, options.step, step.seconds)
        picture = draw(step, f"{options.title}: {title}" if options.title else title, options.seconds)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(picture, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"timeline: error: {error}", file=sys.stderr)
        return 2
    for axis in step.axes:
        print(f"axis {axis}: {step.totals(axis)}")
    print(f"{options.out}: {title}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What people read about a run: on the terminal while it trains, and in its log files afterwards.

The terminal shows a bar, or plain lines if the output is a pipe or a file. The run's folder has

    log.txt              what the terminal showed, with the time; and why ranks died and were restarted
    events.jsonl         one JSON object per line, with the time: everything that happened except steps. Nothing is ever
                         removed: what a run has done twice because it was rolled back is there twice
    logs/rank-00003.txt  warnings and errors of a rank with their tracebacks, Python's logging, and how the rank crashed
"""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Self, TextIO, cast

from fourfold.axes import AXES
from fourfold.grid import Grid
from fourfold.report.units import duration, nbytes
from fourfold.train.console import logger
from fourfold.train.run_folder import JsonLines, LogFile, RunEvent, json_line

LOG, EVENTS, RANK_LOGS = "log.txt", "events.jsonl", "logs"
LINE_SECONDS = 10
"""A plain line is printed at least this often, so that a log shows that a slow run is alive."""
HEADER = f"{'step':>7} {'loss':>8} {'grad norm':>9} {'lr':>8} {'tokens/s':>9} {'MFU':>6} {'left':>11}   sent"
ACTIONS = {
    "tell": "",
    "skip": "; the step is skipped",
    "roll_back": "; the run rolls back to its newest checkpoint",
    "stop": "; the run stops",
}
"""How the sentence about a spike ends, by the action that the config names."""


# Terminal


def output(json_to: str | None) -> IO[str]:
    """Return the stream for people: standard output, unless JSON goes there."""
    return sys.stderr if json_to == "-" else sys.stdout


def percent_of(what: str = "") -> Callable[[int, int], None]:
    """Return a function that shows a percentage on a terminal, from the amount done and the total."""
    if not sys.stderr.isatty():
        return lambda *_: None

    def show(done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\r{f'{what}: ' if what else ''}{done / max(1, total):4.0%}", end=end, file=sys.stderr, flush=True)

    return show


def progress(stream: IO[str], steps: int, done: int = 0) -> PlainProgress:
    """Return a bar if the stream is a terminal and `rich` is installed, else plain lines. `done` steps came before."""
    bar = stream.isatty() and find_spec("rich") is not None
    return (ProgressBar if bar else PlainProgress)(stream, steps, done)


def round_number(most: float) -> int:
    """Return the largest of 1, 2, 5, 10, 20, 50, ... that is not above `most`; at least 1."""
    if most < 2:
        return 1
    power = 10 ** (len(str(int(most))) - 1)
    return next(digit * power for digit in (5, 2, 1) if digit * power <= most)


class PlainProgress:
    """Prints a line for the first and the last step, and in between for every tenth of the run or every ten seconds.

    The steps in between are round numbers.
    """

    def __init__(self, stream: IO[str], steps: int, done: int = 0) -> None:
        self.stream, self.steps, self.done = stream, steps, done
        self._every = round_number(steps / 10)  # about ten lines for a run that is quick
        self._began = self._last = time.monotonic()
        self._headed = False

    def say(self, text: str = "") -> None:
        print(text, file=self.stream, flush=True)

    def write(self, event: RunEvent) -> None:
        if event["event"] == "step":
            self._show(event)
        elif text := sentence(event):
            self.say(text)

    def _show(self, event: RunEvent) -> None:
        """Print the line of a step, if one is due."""
        step, now = event["step"], time.monotonic()
        each = max(1e-9, (now - self._began) / (step - self.done))
        late = now - self._last >= LINE_SECONDS and step % min(self._every, round_number(LINE_SECONDS / each)) == 0
        if step not in (self.done + 1, self.steps) and step % self._every and not late:
            return
        self._last = now
        if not self._headed:
            self._headed = True
            self.say(HEADER)
        left = each * (self.steps - step)
        shown = duration(max(1.0, left)) if left else "0 s"
        sent = ", ".join(f"{axis} {count / 1e6:.2f} MB" for axis, count in event["wire_bytes"].items()) or "-"
        self.say(
            f"{step:>7} {event['loss']:>8.4f} {event['grad_norm']:>9.3f} {event['learning_rate']:>8.1e} "
            f"{event['tokens_per_second']:>9.0f} {percent(event['mfu']):>6} {shown:>11}   {sent}"
        )

    def close(self) -> None:
        self.stream.flush()


class ProgressBar(PlainProgress):
    """Shows rich's progress bar, below the lines of `PlainProgress`."""

    def __init__(self, stream: IO[str], steps: int, done: int = 0) -> None:
        super().__init__(stream, steps, done)
        from rich.console import Console  # optional, so it is imported only when it is used
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(file=stream)
        numbers = TextColumn("loss {task.fields[loss]} {task.fields[speed]} tokens/s MFU {task.fields[mfu]}")
        columns = (MofNCompleteColumn(), BarColumn(), numbers, TimeRemainingColumn())
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task("train", total=steps, completed=done, loss="-", speed="-", mfu="-")

    def say(self, text: str = "") -> None:
        self._console.print(text, markup=False, highlight=False)  # brackets in a text are no markup

    def _show(self, event: RunEvent) -> None:
        super()._show(event)  # these lines stay when the bar has gone
        self._progress.start()  # the first step starts the bar; afterwards this does nothing
        loss, speed = f"{event['loss']:.4f}", f"{event['tokens_per_second']:.0f}"
        self._progress.update(self._task, completed=event["step"], loss=loss, speed=speed, mfu=percent(event["mfu"]))

    def close(self) -> None:
        self._progress.stop()


def percent(share: float | None) -> str:
    """Return a share as a percentage, `-` if it is unknown."""
    return "-" if share is None else f"{share:.1%}"


def sentence(event: RunEvent) -> str:
    """Return an event other than a step in words; empty if people need not read it."""
    at = f"step {event['step']}"
    match event["event"]:
        case "evaluation":
            entropy = f"unigram entropy {event['unigram_entropy']:.4f}"
            return f"{at}: validation loss {event['loss']:.4f} ({entropy})"
        case "skipped":
            cause = f"the gradient of {event['parameter']} is not finite"
            return f"{at} skipped: {cause} ({event['in_a_row']} in a row)"
        case "spike":
            limit = f"above the limit of {event['limit']:.4g}"
            return f"{at}: the loss jumps to {event['loss']:.4g}, {limit}{ACTIONS[event['action']]}"
        case "saved":
            return f"{at} saved; training waited {duration(event['seconds'])}"
        case "straggler" | "collapse" | "note":
            return f"{at}: {event['said']}"
        case "resumed":
            left_out = f", {event['passed_over']}" if "passed_over" in event else ""
            return f"resumes after {at}, from {event['checkpoint']}{left_out}"
        case "profile":
            first, last, ranks = event["first"], event["step"], event["ranks"]
            steps = at if first == last else f"steps {first} to {last}"
            files = f"{event['folder']}/rank-0.json" + (f" to rank-{ranks - 1}.json" if ranks > 1 else "")
            return f"{steps} profiled: {files}; open them in ui.perfetto.dev; fourfold report summarizes them"
        case "compared":
            return compared(event)
        case "corrected":
            return corrected(event)
    return ""


def predicted(facts: RunEvent) -> str:
    """Return the prediction of a run in words, or why there is none."""
    if "unpriced" in facts:
        return f"not priced: {facts['unpriced']}"
    exposed = "".join(f", exposed over {axis} {duration(value)}" for axis, value in facts["exposed_seconds"].items())
    late = facts.get("host_seconds")
    host = f", waiting for the host {duration(late)}" if late else ""
    step = f"{duration(facts['seconds'])} per step (computing {duration(facts['compute_seconds'])}{exposed}{host})"
    notes = "".join(f"; {note}" for note in facts["notes"])
    return f"predicted on {facts['machine']}: {step}, peak memory {nbytes(facts['peak_memory_bytes'])}{notes}"


def compared(event: RunEvent) -> str:
    """Return a small table of the predicted values, the measured values, and their ratio."""
    rows: list[tuple[str, RunEvent, Callable[[float | None], str]]] = [("seconds per step", event["seconds"], duration)]
    rows += [(f"exposed over {axis}", pair, duration) for axis, pair in event["exposed_seconds"].items()]
    rows.append(("peak memory", event["peak_memory_bytes"], nbytes))
    first, last = event["steps"][0], event["steps"][-1]
    steps = f"step {first}" if first == last else f"median of {len(event['steps'])} steps from {first} to {last}"
    lines = [f"predicted on {event['machine']}, and measured ({steps}):", *pairs_table(rows)]
    return "\n".join([*lines, *(f"  {note}" for note in event["notes"])])


def pairs_table(rows: Iterable[tuple[str, RunEvent, Callable[[float | None], str]]]) -> list[str]:
    """Return the lines of a table with a predicted value, a measured value, and their ratio in each row."""
    lines = [f"  {'':18}{'predicted':>12}{'measured':>12}{'ratio':>10}"]
    for name, pair, shown in rows:
        ratio = "-" if pair["ratio"] is None else f"{pair['ratio']:.3g}"
        lines.append(f"  {name:18}{shown(pair['predicted']):>12}{shown(pair['measured']):>12}{ratio:>10}")
    return lines


def corrected(event: RunEvent) -> str:
    """Return the parts of a step as a small table, what they change in the machine file, and a plan that is faster."""
    if "failed" in event:
        return f"the plan was not corrected: {event['failed']}"
    first, last = event["steps"]
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    lines = [f"the parts of a step, predicted on {event['machine']}, and measured ({steps}, traced):"]
    lines += pairs_table((part, pair, duration) for part, pair in event["parts"].items())
    lines += [f"  {text}" for text in event["said"]]
    return "\n".join(lines)


# Log files


def now() -> str:
    """Return the local time with its zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


class TimestampedFile(TextIO):
    """A text file that begins every line with the time."""

    def __init__(self, file: IO[str] | LogFile) -> None:
        self._file, self._begins = file, True

    def write(self, text: str) -> int:
        stamp = f"{now()} "  # one time for all lines of a text
        for line in text.splitlines(keepends=True):
            self._file.write(stamp + line if self._begins and line.strip() else line)
            self._begins = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class RunLog(PlainProgress):
    """The sink of rank 0 that writes log.txt and events.jsonl."""

    def __init__(self, folder: Path, steps: int, done: int = 0) -> None:
        super().__init__(TimestampedFile(LogFile(folder / LOG)), steps, done)
        self._events = JsonLines(folder / EVENTS, may_lose=True)

    def write(self, event: RunEvent) -> None:
        super().write(event)
        if event["event"] == "end":
            self.say(f"ended at step {event['step']}: {event['reason']}")
        if event["event"] != "step":
            self._events.write({"at": now(), **event})

    def close(self) -> None:
        self.stream.close()
        self._events.close()


def note(folder: Path, kind: str, text: str) -> None:
    """Add what the launcher did with the ranks to the logs of a run that has started; ignore a full disk."""
    if not (folder / EVENTS).exists():
        return
    with suppress(OSError):
        with (folder / LOG).open("a") as file:
            TimestampedFile(file).write(f"{text}\n")
        with (folder / EVENTS).open("a") as file:
            file.write(json_line({"at": now(), "event": kind, "said": text}))


class RankLog:
    """The log file of this rank; inside the context it receives warnings, Python's logging and crashes."""

    def __init__(self, folder: Path, grid: Grid) -> None:
        (folder / RANK_LOGS).mkdir(parents=True, exist_ok=True)
        self._file = LogFile(folder / RANK_LOGS / f"rank-{grid.rank:05}.txt")
        self._handler = logging.StreamHandler(cast(TextIO, self._file))
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._handler)  # the root logger: torch's messages belong here too
        self._show_warning, warnings.showwarning = warnings.showwarning, self._warn
        faulthandler.enable(self._file.fileno())  # a crash in C++ or CUDA leaves Python's stack in the file
        where = ", ".join(
            f"{axis}={place}" for axis, place in grid.coords.items() if axis in AXES or grid.size(axis) > 1
        )
        logger.info("rank %d (%s) begins: %s, process %d", grid.rank, where, socket.gethostname(), os.getpid())

    def _warn(self, message: Warning | str, category: type[Warning], *more: Any, **named: Any) -> None:
        self._show_warning(message, category, *more, **named)
        logger.warning("%s: %s", category.__name__, message)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None:
            logger.error("ends", exc_info=error)
        else:
            logger.info("ends")
        warnings.showwarning = self._show_warning
        logging.getLogger().removeHandler(self._handler)
        faulthandler.enable(sys.__stderr__ or 2)  # before the file closes: a crash must find an open descriptor
        self._file.close()

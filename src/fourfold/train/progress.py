"""How a run shows its progress: a bar on a terminal, plain lines in a pipe or log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import IO, Any

from fourfold.report.units import duration, nbytes
from fourfold.train.run_folder import RunEvent


def progress(stream: IO[str], steps: int, done: int = 0) -> PlainProgress | ProgressBar:
    """Return a bar if the stream is a terminal and `rich` is installed, else plain lines. `done` steps came before."""
    if stream.isatty() and find_spec("rich") is not None:
        return ProgressBar(stream, steps, done)
    return PlainProgress(stream, steps, done)


class PlainProgress:
    """Prints a line for the first and the last step, and in between for every tenth of the run or every ten seconds."""

    def __init__(self, stream: IO[str], steps: int, done: int = 0) -> None:
        self.stream, self.steps, self.done = stream, steps, done
        self._every = max(1, steps // 10)
        self._began = self._last = time.monotonic()
        self._headed = False

    def say(self, text: str = "") -> None:
        print(text, file=self.stream, flush=True)

    def write(self, event: RunEvent) -> None:
        if event["event"] == "step":
            self._step(event)
        elif (text := sentence(event)) is not None:
            self.say(text)

    def _step(self, event: RunEvent) -> None:
        step, now = event["step"], time.monotonic()
        if step not in (self.done + 1, self.steps) and step % self._every and now - self._last < 10:
            return
        self._last = now
        if not self._headed:
            self._headed = True
            self.say(
                f"{'step':>7} {'loss':>8} {'grad norm':>9} {'lr':>8} {'tokens/s':>9} {'MFU':>6} {'left':>11}   sent"
            )
        left = (now - self._began) / (step - self.done) * (self.steps - step)
        mfu = "-" if event["mfu"] is None else f"{event['mfu']:.1%}"
        self.say(
            f"{step:>7} {event['loss']:>8.4f} {event['grad_norm']:>9.3f} {event['learning_rate']:>8.1e} "
            f"{event['tokens_per_second']:>9.0f} {mfu:>6} {duration(left):>11}   {sent(event)}"
        )

    def close(self) -> None:
        self.stream.flush()


class ProgressBar:
    """Shows rich's progress bar; messages appear above it."""

    def __init__(self, stream: IO[str], steps: int, done: int = 0) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console(file=stream)
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]} tokens/s"),
            TextColumn("MFU {task.fields[mfu]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("train", total=steps, completed=done, loss="-", rate="-", mfu="-")
        self._started = False

    def say(self, text: str = "") -> None:
        self._console.print(text, markup=False, highlight=False)

    def write(self, event: RunEvent) -> None:
        if event["event"] != "step":
            if (text := sentence(event)) is not None:
                self.say(text)
            return
        if not self._started:
            self._started = True
            self._progress.start()
        fields: dict[str, Any] = {
            "loss": f"{event['loss']:.4f}",
            "rate": f"{event['tokens_per_second']:.0f}",
            "mfu": "-" if event["mfu"] is None else f"{event['mfu']:.1%}",
        }
        self._progress.update(self._task, completed=event["step"], **fields)

    def close(self) -> None:
        self._progress.stop()


ACTIONS = {
    "tell": "",
    "skip": "; the step is skipped",
    "roll_back": "; the run rolls back to its newest checkpoint",
    "stop": "; the run stops",
}
"""How the sentence about a spike ends, by the action that the config names."""


def sentence(event: RunEvent) -> str | None:
    """Return an event other than a step in words, or None if people need not read it."""
    if event["event"] == "evaluation":
        entropy = f"unigram entropy {event['unigram_entropy']:.4f}"
        return f"step {event['step']}: validation loss {event['loss']:.4f} ({entropy})"
    if event["event"] == "skipped":
        cause = f"the gradient of {event['parameter']} is not finite"
        return f"step {event['step']} skipped: {cause} ({event['in_a_row']} in a row)"
    if event["event"] == "profile":
        return profiled(event)
    if event["event"] == "saved":
        return f"step {event['step']} saved; training waited {duration(event['seconds'])}"
    if event["event"] == "straggler":
        return f"step {event['step']}: {event['said']}"
    if event["event"] == "resumed":
        left_out = f", {event['passed_over']}" if "passed_over" in event else ""
        return f"resumes after step {event['step']}, from {event['checkpoint']}{left_out}"
    if event["event"] == "spike":
        limit = f"above the limit of {event['limit']:.4g}"
        return f"step {event['step']}: the loss jumps to {event['loss']:.4g}, {limit}{ACTIONS[event['action']]}"
    return compared(event) if event["event"] == "compared" else None


def predicted(facts: RunEvent) -> str:
    """Return the prediction of a run in words, or why there is none."""
    if "unpriced" in facts:
        return f"not priced: {facts['unpriced']}"
    exposed = "".join(f", exposed over {axis} {duration(value)}" for axis, value in facts["exposed_seconds"].items())
    step = f"{duration(facts['seconds'])} per step (computing {duration(facts['compute_seconds'])}{exposed})"
    notes = "".join(f"; {note}" for note in facts["notes"])
    return f"predicted on {facts['machine']}: {step}, peak memory {nbytes(facts['peak_memory_bytes'])}{notes}"


def compared(event: RunEvent) -> str:
    """Return a small table of the predicted values, the measured values, and their ratio."""
    rows: list[tuple[str, RunEvent, Callable[[float | None], str]]] = [("seconds per step", event["seconds"], duration)]
    rows += [(f"exposed over {axis}", pair, duration) for axis, pair in event["exposed_seconds"].items()]
    rows.append(("peak memory", event["peak_memory_bytes"], nbytes))
    first, last = event["steps"][0], event["steps"][-1]
    steps = f"step {first}" if first == last else f"median of {len(event['steps'])} steps from {first} to {last}"
    lines = [f"predicted on {event['machine']}, and measured ({steps}):"]
    lines.append(f"  {'':18}{'predicted':>12}{'measured':>12}{'ratio':>10}")
    for name, pair, shown in rows:
        ratio = "-" if pair["ratio"] is None else f"{pair['ratio']:.3g}"
        lines.append(f"  {name:18}{shown(pair['predicted']):>12}{shown(pair['measured']):>12}{ratio:>10}")
    return "\n".join([*lines, *(f"  {note}" for note in event["notes"])])


def profiled(event: RunEvent) -> str:
    """Say where the traces of a profile are, and what opens them."""
    first, last, ranks = event["first"], event["step"], event["ranks"]
    steps = f"step {last}" if first == last else f"steps {first} to {last}"
    files = f"{event['folder']}/rank-0.json" + (f" to rank-{ranks - 1}.json" if ranks > 1 else "")
    return f"{steps} profiled: {files}; open them in ui.perfetto.dev; fourfold report summarizes them"


def sent(event: RunEvent) -> str:
    """Return the bytes that a rank sent in a step, by axis, in words."""
    parts = [f"{axis} {nbytes / 1e6:.2f} MB" for axis, nbytes in event["wire_bytes"].items()]
    return ", ".join(parts) or "nothing"


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

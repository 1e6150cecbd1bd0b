"""`fourfold demo`: a tour of Fourfold on this machine, command by command.

Each command is shown and then run as a separate process with exactly those arguments, so that a reader can type it.
Otherwise the tour only writes the config that it trains, and reads the losses.

This file does not import torch, so that the tour starts at once.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

from fourfold.environment import inside_a_job
from fourfold.train.signals import INTERRUPTED, signals_held_back, signals_interrupt

NEEDS = {"safetensors": "train", "plotly": "report"}
"""Packages that the commands of the tour need, and the extra of fourfold that installs each."""
GRACE_SECONDS = 15.0
"""Seconds that a command has to end after Ctrl-C before the tour terminates it; saving this small model takes less."""
AVERAGED_STEPS = 10
"""Steps over which a loss is averaged, because the loss of a single batch is noisy."""
CONFIG = """\
# A Llama of {layers} layers that reads bytes: the source of Python's standard library.
# `fourfold train --print-config` shows all sections and keys.

[model]
name = "llama-tiny"
layers = {layers}
hidden = 128
heads = 8
kv_heads = 8
head_dim = 16
mlp_hidden = 352

[batch]
rows = 16
seq = 128

[optimizer]
learning_rate = 5e-3
schedule = "constant"

[train]
steps = {steps}
seed = 1

[plan]
compare = false
"""


@dataclass(frozen=True, slots=True)
class TourLength:
    """The size of the tour: layers of the model, steps on the first grid, steps in total, tokens to generate."""

    layers: int
    first: int
    steps: int
    tokens: int


FULL, QUICK = TourLength(2, 100, 125, 120), TourLength(1, 4, 6, 20)


@dataclass(frozen=True, slots=True)
class TourPart:
    """A part of the tour: an introduction, the commands, and a remark afterwards."""

    title: str
    about: str
    commands: tuple[tuple[str, ...], ...]
    after: Callable[[], str] = lambda: ""


def demo(options: argparse.Namespace, _: Sequence[str]) -> int:
    """Run the tour and return the exit code."""
    out = options.out or Path(f"runs/demo-{datetime.now():%Y%m%d-%H%M%S}")
    check(out)
    length = QUICK if options.quick else FULL
    out.mkdir(parents=True, exist_ok=True)
    (out / "llama.toml").write_text(CONFIG.format(layers=length.layers, steps=length.first))
    if options.pause and not sys.stdin.isatty():  # Enter could never be pressed
        print("fourfold: --pause needs a terminal as standard input; continuing without it", file=sys.stderr)
        options.pause = False
    with signals_interrupt():
        try:
            return walk(parts(out, length), out, pause=options.pause)
        except (KeyboardInterrupt, EOFError):
            print(f"\nThe tour ends here. Its files are in {out}.", flush=True)
            return INTERRUPTED


def check(out: Path) -> None:
    """Raise if the tour cannot run here, before it writes anything."""
    if inside_a_job():
        raise ValueError("fourfold demo starts its own ranks; run it outside of torchrun and srun")
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        extras = ",".join(dict.fromkeys(NEEDS[name] for name in missing))
        raise ImportError(f"the tour needs {' and '.join(missing)}: pip install 'fourfold[{extras}]'")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} already exists; give --out a new or empty folder")


def parts(out: Path, length: TourLength) -> list[TourPart]:
    """Return the parts of the tour."""
    run, config, exported = out / "run", out / "llama.toml", out / "hugging-face"
    cpu = ("--device", "cpu")
    planned = ("--model", "gpt-80b", "--machine", "frontier", "--devices", "1024", "--batch-tokens", "16.8M")
    return [
        TourPart(
            "Plan",
            "Which grid should train a GPT of 80 billion parameters on 1,024 devices of Frontier? Fourfold cuts "
            "every matrix product over three axes, x, y and z, and replicates it over a fourth, data. The planner "
            "prices all grids from a file that describes the machine. It needs no device.",
            (("plan", *planned, "--top", "4"),),
        ),
        TourPart(
            "Train",
            f"Now a model that fits here: {config} describes a small Llama, which learns to write Python from the "
            "source of the standard library. Four processes on this machine are the ranks: x=2 cuts the features "
            "(tensor parallelism), z=2 the weights and the batch (FSDP).",
            (("train", str(config), "--grid", "x=2,z=2", *cpu, "--out", str(run)),),
        ),
        TourPart(
            "Report",
            "One HTML file about that run: loss, speed, memory, and the bytes sent over each axis. Open it in a "
            "browser; it loads nothing from elsewhere.",
            (("report", str(run)),),
        ),
        TourPart(
            "Resume on another grid",
            "The run saved a checkpoint at its end. Any grid can resume from it: here 2 ranks instead of 4, "
            "only z=2. The data continues where it was, and so does the loss. The report then shows both parts.",
            (
                ("train", "--resume", str(run), "--grid", "z=2", "--steps", str(length.steps), *cpu),
                ("report", str(run)),
            ),
            lambda: seam(run / "metrics.jsonl", length.first),
        ),
        TourPart(
            "Export, and let it write",
            "The same weights as a folder that transformers opens, and what the model writes after `import `, one "
            "byte at a time. It has seen little text, so it looks like Python without making sense.",
            (
                ("export", str(run), "--to", str(exported)),
                ("sample", str(run), "--prompt", "import ", "--tokens", str(length.tokens), *cpu),
            ),
        ),
    ]


def walk(tour: Sequence[TourPart], out: Path, *, pause: bool) -> int:
    """Run the parts in order; return 0, or the exit code of a command that failed."""
    for number, part in enumerate(tour, 1):
        if pause and number > 1:
            input("\nPress Enter to continue, Ctrl-C to end the tour. ")
        say(heading(f"{number} of {len(tour)}: {part.title}"), wrapped(part.about))
        for command in part.commands:
            shown = shlex.join(["fourfold", *command])
            say(f"$ {shown}")
            code = run(command)
            if code == INTERRUPTED:
                raise KeyboardInterrupt
            if code:
                code = code if code > 0 else 128 - code  # as a shell reports a signal
                print(
                    f"\nfourfold: the tour stops: exit code {code}; run the command yourself:\n  {shown}",
                    file=sys.stderr,
                )
                return code
        if said := part.after():
            say(wrapped(said))
    say(heading("What next"), farewell(out))
    return 0


def run(command: Sequence[str]) -> int:
    """Run a command as a process that shares our output; return its exit code, or minus the signal that ended it."""
    child: subprocess.Popen | None = None
    try:
        with signals_held_back():
            child = subprocess.Popen([sys.executable, "-m", "fourfold.cli", *command])
        return child.wait()  # a signal that was held back arrives before it, when the child is known
    except KeyboardInterrupt:
        if child is not None:
            # Ctrl-C in a terminal has reached the child too; a second signal would end it without cleaning up
            try:
                child.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                child.terminate()
                child.wait()
        raise


def seam(metrics: Path, step: int) -> str:
    """Return a sentence about the mean loss before and after the change of grids."""
    if not metrics.is_file():
        return ""
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    before, after = losses[:step][-AVERAGED_STEPS:], losses[step:][:AVERAGED_STEPS]
    return (
        f"Loss over the last {len(before)} steps on 4 ranks: {mean(before):.4f}; over the first {len(after)} on 2: "
        f"{mean(after):.4f}. It began at {losses[0]:.4f}."
    )


def farewell(out: Path) -> str:
    """Return the commands to try next."""
    other = shlex.join(["fourfold", "train", str(out / "llama.toml"), "--grid", "z=4"])
    return "\n".join(
        [
            f"The same on another grid: {other}   (x=4, data=4, x=2,y=2)",
            "Your own text:            fourfold train --data FOLDER --model gpt-tiny --steps 200",
            "Your own model:           ff.parallelize(module, grid), in docs/your_model.md",
            "",
            f"All files of the tour are in {out}; the report is {out / 'run' / 'report.html'}",
        ]
    )


def say(*paragraphs: str) -> None:
    for text in paragraphs:
        print(f"\n{text}", flush=True)  # flushed before the next command writes


def heading(text: str) -> str:
    return f"{text}\n{'=' * len(text)}"


def wrapped(text: str) -> str:
    width = min(shutil.get_terminal_size().columns, 100)
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)

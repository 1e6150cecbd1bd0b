"""The planner's choices by its own simulator: how robust they are, and whether any textbook grid is faster.

    python benchmarks/planner/choices.py robust      # 12 tasks: regret of the choice and of --risk fastest
    python benchmarks/planner/choices.py textbook    # 20 tasks, 1 to 32,768 devices: never worse than the textbook
    python benchmarks/planner/choices.py speed       # CPU seconds of two large searches

CPU only. The textbook family is x in {1, 2, 4, 8} inside a node with pipe, z and data; every grid of it is searched by
itself, with all rows, levers, orders and schedules, and priced like the choice.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from math import inf
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch

from benchmarks.planner.published_runs import ROWS, SEQ
from benchmarks.shared.tables import RESULTS, markdown_table, verdict
from fourfold.axes import AXES
from fourfold.models.config import config
from fourfold.planner.folds import is_textbook
from fourfold.planner.machine import load_machine
from fourfold.planner.price import Price, Task
from fourfold.planner.search import search
from fourfold.planner.space import Space
from fourfold.shape import Shape, shapes_of

HALF, FROM = 0.5, 0.10
"""Bars: where the fastest plan regrets more than `FROM` at worst, the choice regrets at most `HALF` of that."""
WORSE = 0.001
"""How much slower than the best textbook grid a choice may be: prices are extrapolated from a few layers."""
EFFORT = 12
"""Simulations for each textbook grid by itself."""
SPEED = [("gpt-80b", "perlmutter", 1024, 5.0), ("gpt-320b", "frontier", 32768, 15.0)]
"""Model, machine, devices, and the CPU seconds that a search with the published batch may take on one core."""


class Question(NamedTuple):
    """A model, a machine, a number of devices and the rows of a batch."""

    model: str
    machine: str
    devices: int
    rows: int

    @property
    def task(self) -> Task:
        return Task(config(self.model), load_machine(self.machine), self.rows, SEQ, captured=True)

    def __str__(self) -> str:
        return f"{self.model} on {self.devices:,} of {self.machine}"


ROBUST = [
    Question("gpt-10b", "perlmutter", 16, 512),
    Question("gpt-20b", "perlmutter", 64, 1024),
    Question("gpt-5b", "perlmutter", 32, 512),
    Question("gpt-80b", "perlmutter", 1024, 8192),
    Question("llama-3-8b", "dgx-h100", 8, 64),
    Question("llama-3-8b", "dgx-h100", 64, 1024),
    Question("llama-3-70b", "dgx-h100", 64, 512),
    Question("llama-3-70b", "dgx-h100", 256, 2048),
    Question("gpt-160b", "dgx-a100", 512, 2048),
    Question("gpt-40b", "dgx-a100", 128, 1024),
    Question("llama-3-8b", "h200-node", 8, 64),
    Question("gpt-20b", "frontier", 256, 1024),
]
"""The plans that were found to be brittle before, 13B on 16 A100-40 and 70B on 64 H100 or models of their size, and
others of other sizes and machines."""
TEXTBOOK = [
    Question("gpt-1.4b", "h200-node", 1, 8),
    Question("gpt-1.4b", "dgx-h100", 2, 16),
    Question("llama-3-8b", "dgx-h100", 4, 32),
    Question("llama-3-8b", "h200-node", 8, 64),
    Question("gpt-10b", "perlmutter", 16, 512),
    Question("gpt-5b", "perlmutter", 32, 512),
    Question("llama-3-8b", "dgx-h100", 64, 1024),
    Question("llama-3-70b", "dgx-h100", 64, 512),
    Question("gpt-40b", "dgx-a100", 96, 768),
    Question("gpt-20b", "perlmutter", 128, 1024),
    Question("llama-3-70b", "dgx-h100", 256, 2048),
    Question("gpt-20b", "frontier", 256, 1024),
    Question("gpt-160b", "dgx-a100", 512, 2048),
    Question("gpt-80b", "perlmutter", 1024, 8192),
    Question("gpt-40b", "frontier", 1024, 4096),
    Question("llama-3-405b", "dgx-h100", 2048, 2048),
    Question("gpt-80b", "frontier", 4096, 8192),
    Question("llama-3-405b", "dgx-h100", 8192, 8192),
    Question("gpt-160b", "frontier", 16384, 8192),
    Question("gpt-320b", "frontier", 32768, 8192),
]


def robust() -> Iterator[str]:
    yield "## Robustness: worst-case regret of the choice and of the fastest plan by the machine file"
    rows, misses = [], []
    for question in ROBUST:
        found = search(question.task, question.devices, space=Space(axes=AXES), risk="robust").robust
        if found is None:
            raise RuntimeError(f"{question}: the search made no robust choice")
        chosen, fastest = found.chosen, found.fastest
        reached = fastest.worst <= FROM or chosen.worst <= HALF * fastest.worst
        misses += [] if reached else [str(question)]
        rows.append(
            [
                str(question), str(chosen.price.candidate.shape), f"{chosen.seconds[0]:.3g}", percent(chosen.worst),
                str(fastest.price.candidate.shape), f"{fastest.seconds[0]:.3g}", percent(fastest.worst),
                str(found.priced), verdict(reached),
            ]
        )  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    head = ["task", "choice", "s", "worst regret", "fastest", "s", "worst regret", "priced", "half where above 10%"]
    yield from markdown_table(head, rows)
    yield ""
    yield (
        "The choice has the least worst-case regret of all candidates priced, or is at most 3 points above it and "
        "simpler. A regret without a number: the plan does not fit with 3 GiB less memory, and another does."
    )
    yield ""
    yield judged(f"{len(ROBUST) - len(misses)} of {len(ROBUST)} tasks", misses)


def judged(what: str, misses: Sequence[str]) -> str:
    return f"- {what}: {verdict(not misses)}" + (f" on {'; '.join(misses)}" if misses else "")


def percent(regret: float) -> str:
    return "does not fit" if regret == inf else f"{regret:.1%}"


def textbook() -> Iterator[str]:
    yield "## The choice by seconds beside the best textbook grid"
    rows, misses = [], []
    for question in TEXTBOOK:
        task = question.task
        began = time.process_time()
        plan = search(task, question.devices, space=Space(axes=AXES))
        took = time.process_time() - began
        best = min(family(task, question.devices), key=lambda one: one.seconds, default=plan.best)
        more = plan.best.seconds / best.seconds - 1
        misses += [str(question)] if more > WORSE else []
        rows.append(
            [
                str(question), str(plan.best.candidate.shape), f"{plan.best.seconds:.4g}", str(best.candidate.shape),
                f"{best.seconds:.4g}", f"{more:+.2%}", str(plan.simulated), f"{took:.1f}",
            ]
        )  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    head = ["task", "choice", "s", "best textbook grid", "s", "choice / textbook", "simulated", "CPU s"]
    yield from markdown_table(head, rows)
    yield ""
    yield judged("never worse than the textbook", misses)


def family(task: Task, devices: int) -> Iterator[Price]:
    """Yield the best price of each textbook grid, each searched by itself."""
    for shape in shapes_of(devices, axes=AXES):
        if is_textbook(task.machine, shape):
            yield from _alone(task, devices, shape)


def _alone(task: Task, devices: int, shape: Shape) -> Iterator[Price]:
    try:
        yield search(task, devices, space=Space(shapes=(shape,)), top=1, simulations=EFFORT).best
    except ValueError:  # it does not fit, or does not divide the model
        return


def speed() -> Iterator[str]:
    yield "## Speed of the search, CPU seconds of one core, pipe on"
    rows = []
    for model, machine, devices, limit in SPEED:
        question = Question(model, machine, devices, ROWS)
        began = time.process_time()
        plan = search(question.task, devices, space=Space(axes=AXES))
        took = time.process_time() - began
        rows.append([str(question), f"{took:.1f}", f"{limit:g}", verdict(took <= limit), str(plan.simulated)])
    yield from markdown_table(["search", "CPU s", "limit", "", "simulated"], rows)


PARTS = {"robust": robust, "textbook": textbook, "speed": speed}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=Path, help="default: results/DATE-planner-choices-PART.md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    title = f"# The planner's choices, {date.today()}"
    where = f"CPU only, one {platform.machine()} core; torch {torch.__version__}"
    command = f"`python benchmarks/planner/choices.py {options.part}`; {where}"
    text = "\n".join([title, "", command, "", *PARTS[options.part]()]) + "\n"
    (options.out or RESULTS / f"{date.today()}-planner-choices-{options.part}.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A small program of collectives with one rank at fault, for the CPU and for GPUs; needs no pytest."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import torch

from fourfold import comm
from fourfold.grid import Grid, Shape
from fourfold.watch.liveness import Alarm, JobDiagnosis, Phase
from fourfold.watch.tape import Tape, Waits, tape_path
from harness import grid_of

DEADLINE = 1.5
GRID = Shape(x=2, z=2)


def say(folder: str, rank: int, found: JobDiagnosis, judge: bool) -> None:
    """The last word of a rank, and its end."""
    Path(folder, f"said-{rank}{'-as-judge' * judge}").write_text(found.text)
    os._exit(1)


def ready() -> None:
    grid_of(GRID)


def program(folder: str, fault: str, faulty: int, deadline: float = DEADLINE) -> None:
    """Four steps of two collectives; in the third one rank is at fault."""
    grid = grid_of(GRID)
    tape = Tape(tape_path(Path(folder), grid.rank), grid.rank, grid.shape)
    grid.ledger.listener = tape
    alarm = Alarm(grid.channel, deadline, partial(say, folder, grid.rank))
    alarm.watch_steps(tape, Path(folder))
    for step in range(1, 5):
        tape.step = step
        tape.doing("computing")
        at_fault = step == 3 and grid.rank == faulty
        if at_fault and fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif at_fault and fault == "delay":
            time.sleep(60)
        elif at_fault and fault == "late":
            time.sleep(0.7 * DEADLINE)
        elif at_fault and fault in ("die", "die quietly"):
            os._exit(1)
        if fault == "die quietly":
            tape.doing("asking the others", Waits.RANKS)
            grid.channel.meet()
        total = collectives(grid, skips=at_fault and fault == "skip")
        tape.doing("reading results of its device", Waits.DEVICE if total.is_cuda else Waits.NOTHING)
        total.item()
    grid.ledger.listener = None
    alarm.close(done=True)


def preparation(folder: str, deadline: float, seconds: float) -> None:
    """A start in which rank 0 works alone for some seconds, while the others wait for it."""
    grid = grid_of(GRID)
    told = Path(folder, f"told-{grid.rank}")
    tell = lambda text: told.open("a").write(text + "\n")  # noqa: E731
    with Alarm(grid.channel, deadline, partial(say, folder, grid.rank), tell) as alarm:
        alarm.enter(Phase.DATA)
        if grid.rank == 0:
            time.sleep(seconds)
        grid.channel.meet()


def collectives(grid: Grid, *, skips: bool) -> torch.Tensor:
    ones = torch.ones(4, device=grid.device)
    if not skips:
        comm.all_gather(ones, grid, "z", label="weights").wait()
    return comm.reduce_scatter(ones, grid, "x", label="activations").wait().sum()

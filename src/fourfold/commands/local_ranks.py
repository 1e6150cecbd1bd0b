"""How a command that runs on a grid chooses its device and ranks, joins the job, writes its JSON, and leaves again."""

from __future__ import annotations

import json
import signal
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fourfold.environment import MAX_SECONDS, Environment, inside_a_job
from fourfold.grid import Grid, Shape, join_process_group
from fourfold.job import Channel, join
from fourfold.train.config import TrainConfig, WatchSection
from fourfold.train.console import write_data
from fourfold.train.guard import watch_ranks
from fourfold.train.run_folder import strict
from fourfold.watch.liveness import ANSWER_SECONDS, BUSY_DEADLINES, CUT_OFF_SECONDS, JUDGE_SECONDS, NoAlarm


def chosen_device(asked: str | None) -> str:
    """Return the kind of device to run on: the one asked for, else `cuda` if there is a GPU."""
    found = torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise ValueError("--device cuda, but torch finds no GPU here; leave --device out to train on the CPU")
    return asked or ("cuda" if found else "cpu")


def wanted_ranks(config: TrainConfig, ranks: int | None, device: str) -> int:
    """Return how many local ranks to start: the size of the grid, else --ranks, else one per GPU, else 1."""
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks {ranks}: at least one rank is needed")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world = (ranks or gpus or 1) if config.grid.auto else config.grid.shape.world
    if gpus and world > gpus:
        raise ValueError(
            f"{world} ranks, but this machine has {gpus} GPUs; start fewer, or use torchrun on more machines"
        )
    if not config.grid.auto and ranks not in (None, world):
        raise ValueError(
            f"--ranks {ranks}, but the grid {config.grid.shape} has {world}; leave --ranks out or change one"
        )
    return world


def let_sigint_end_ranks() -> None:
    """Let SIGINT end a rank of a job at once: a Python handler could not run while the rank waits for others."""
    if inside_a_job():
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def join_job(device: str, ranks: int | None) -> int:
    """Join the job and return its number of ranks; raise if --ranks names another number."""
    Grid.alone(device)
    world = dist.get_world_size()
    require_world(ranks, world)
    return world


def join_watched(device: str, here: Environment, section: WatchSection) -> NoAlarm:
    """Join the job for a run, and return the alarm that watches over its ranks from now on.

    The alarm comes before the process groups, because making them waits for all ranks. So their own timeout only
    matters where the alarm cannot speak.
    """
    busy = timedelta(seconds=min(BUSY_DEADLINES * section.start, MAX_SECONDS))  # the alarm ends every other wait
    store = None if dist.is_initialized() else join(here, section.start, busy)
    alarm = NoAlarm()
    if here.world > 1:
        alarm = watch_ranks(Channel("start", range(here.world), store, rank=here.rank), section.start)
    try:
        join_process_group(device, group_timeout(section), store)
    except BaseException:
        alarm.close(done=False)
        raise
    return alarm


def group_timeout(section: WatchSection) -> timedelta:
    """Return how long a collective may take: longer than the alarm lets anybody wait, and than it takes to speak."""
    seconds = max(section.start, section.deadline) + ANSWER_SECONDS + JUDGE_SECONDS + CUT_OFF_SECONDS
    return timedelta(seconds=min(seconds, MAX_SECONDS))


def require_world(ranks: int | None, world: int) -> None:
    """Raise if --ranks names another number of ranks than the job has."""
    if ranks not in (None, world):
        raise ValueError(
            f"--ranks {ranks}, but this job has {world}; leave --ranks out when another launcher starts the ranks"
        )


def grid_options(shape: Shape) -> list[str]:
    """Return the options that pass this grid to the ranks, so that they do not search for one again."""
    # --grid has no syntax for the order of the axes, so a key of the config sets it
    sizes = ",".join(f"{axis}={size}" for axis, size in shape.named.items())
    return ["--grid", sizes, "--set", f"grid.order={json.dumps(shape.order)}"]


def default_folder(config: TrainConfig) -> str:
    """Return the folder for a run that does not name one."""
    return f"runs/{Path(config.model.name).name.replace(':', '.')}-{datetime.now():%Y%m%d-%H%M%S}"


def put_json(document: dict[str, Any], path: str) -> None:
    """Write the JSON that --json asks for; the path - stands for standard output."""
    text = json.dumps(strict(document), indent=1)
    if path == "-":
        write_data(text + "\n")
    else:
        Path(path).write_text(text + "\n")


def close(grid: Grid) -> None:
    """Close the grid and leave the job at the end of a command that succeeded."""
    grid.close()  # first: its process groups are part of the one that is destroyed next
    dist.destroy_process_group()

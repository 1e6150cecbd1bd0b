"""What the options of `fourfold train` ask for: a config, ranks, a device; and what of them does not go together."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import torch

from fourfold.axes import AXES
from fourfold.environment import inside_a_job, is_watched
from fourfold.grid import Shape
from fourfold.train.checkpoints import config_to_read
from fourfold.train.config import Config, read_config


def check_options(options: argparse.Namespace) -> None:
    """Refuse what does not go together."""
    if options.resume is not None:
        if options.out is not None and Path(options.out) != options.resume:
            raise ValueError(
                f"--resume {options.resume} goes on in that folder, so --out {options.out} has no use; leave one away"
            )
        if options.compare_serial is not None:
            raise ValueError("--compare-serial trains no run and has none to --resume; leave one of them away")
    elif options.step is not None:
        raise ValueError(f"--step {options.step} names a checkpoint to go on from; give its run with --resume")
    if options.restarts is not None:
        if options.restarts < 0:
            raise ValueError(f"--restarts {options.restarts}: there cannot be fewer than 0")
        if inside_a_job() and not is_watched():
            raise ValueError("--restarts is for ranks that are started here; torchrun has --max-restarts for its own")


def requested(options: argparse.Namespace, ranks: int | None) -> Config:
    """The config file, or that of the run which goes on, with what the command line changes of it.

    A run that goes on with another number of ranks has its grid found again.
    """
    source = config_to_read(options.config, options.resume, [options.model])
    changes = list(options.changes)
    if options.grid is not None:
        changes += [(f"grid.{axis}", size) for axis, size in options.grid.items()]
    if options.data is not None:
        changes.append(("data.sources", [{"path": path} for path in options.data]))
    given = {
        "model.name": options.model,
        "train.steps": options.steps,
        "policy.dtype": options.dtype,
        "train.out": options.out if options.resume is None else str(options.resume),
        "plan.machine": options.machine,
    }
    changes += [(key, value) for key, value in given.items() if value is not None]
    config = read_config(source, changes, forget_grid=options.grid is not None)
    if options.resume is None or options.grid or config.grid.auto:
        return config
    if ranks in (None, config.grid.shape.world):
        return config
    # the order that is stored was found for the other grid
    return read_config(source, [("grid.order", list(AXES)), *changes], forget_grid=True)


def check_profile(options: argparse.Namespace, config: Config) -> None:
    """Refuse to profile steps that there will not be."""
    if not options.profile:
        return
    if options.compare_serial is not None:
        raise ValueError("--compare-serial trains no run and has no steps to --profile; leave one of them away")
    first, last, steps = options.profile[0], options.profile[-1], config.train.steps
    if last > steps:
        asked = first if first == last else f"{first}-{last}"
        raise ValueError(
            f"--profile {asked}: this run has train.steps={steps}; name a step from 1 to {steps}, or such as 1-{steps}"
        )


def wanted_ranks(config: Config, ranks: int | None, device: str) -> int:
    """How many local ranks to start."""
    if ranks is not None and ranks < 1:
        raise ValueError(f"--ranks {ranks}: there must be at least one")
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    world = (ranks or gpus or 1) if config.grid.auto else config.grid.shape.world
    if gpus and world > gpus:
        raise ValueError(
            f"{world} ranks, but this machine has {gpus} GPUs; start fewer, or use torchrun on more machines"
        )
    if config.grid.auto:
        return world
    if ranks not in (None, world):
        raise ValueError(
            f"--ranks {ranks}, but the grid {config.grid.shape} has {world}; leave --ranks away or change one"
        )
    return world


def gpus_left() -> int:
    """That still answer, asked by a new process: this one has counted them when it began."""
    code = "import torch; print(torch.cuda.device_count())"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    return int(found.stdout) if found.returncode == 0 else 0


def wanted_restarts(config: Config, asked: int | None, ranks: int) -> int:
    """How often to start local ranks again: by default where there is something to go on from."""
    if asked is not None:
        return asked
    return 3 if ranks > 1 and config.checkpoint.save and config.checkpoint.every else 0


def grid_options(shape: Shape) -> list[str]:
    """The grid for ranks that are started here, so that they need not find it again."""
    sizes = ",".join(f"{axis}={size}" for axis, size in shape.sizes.items())
    return ["--grid", sizes, "--set", f"grid.order={json.dumps(shape.order)}"]


def chosen_device(asked: str | None) -> str:
    found = torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise ValueError("--device cuda, but torch finds no GPU here; leave --device away to train on the CPU")
    return asked or ("cuda" if found else "cpu")


def default_folder(config: Config) -> str:
    return f"runs/{Path(config.model.name).name}-{datetime.now():%Y%m%d-%H%M%S}"

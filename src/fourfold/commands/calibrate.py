"""`fourfold calibrate`: starts the ranks, measures the machine, shows the progress, and writes the machine file."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import torch

from fourfold.commands.local_ranks import chosen_device, close, join_job, let_sigint_end_ranks
from fourfold.environment import Environment, inside_a_job
from fourfold.grid import Grid
from fourfold.planner.calibrate import Calibration
from fourfold.planner.machine import Machine, parse_machine, to_toml
from fourfold.train.launch import cores, launch, share_cores
from fourfold.train.signals import raise_on_signals


def calibrate(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Measure in this process or on local ranks that it launches, and return the exit code."""
    check(options)
    device = chosen_device(options.device)
    ranks = 1 if inside_a_job() else wanted_ranks(options.ranks, device)
    if ranks == 1:
        return _measure(options, device)
    return launch(ranks, [*arguments, "--ranks", str(ranks), "--device", device], sys.stderr)


def check(options: argparse.Namespace) -> None:
    """Raise before anything starts if the file could not be written at the end."""
    if options.out.suffix != ".toml":
        raise ValueError(
            f"--out {options.out}: the name of a machine file must end in .toml, such as {options.out.name}.toml"
        )
    if options.seconds <= 0:
        raise ValueError(f"--seconds {options.seconds:g} must be above 0, such as 60")
    if options.ranks is not None and options.ranks < 1:
        raise ValueError(f"--ranks {options.ranks}: at least one rank is needed")


def wanted_ranks(asked: int | None, device: str) -> int:
    """Return how many local ranks to start: one per GPU, or one per core, unless --ranks says otherwise."""
    if device == "cpu":
        return asked or cores()
    gpus = torch.cuda.device_count()
    if asked is not None and asked > gpus:
        raise ValueError(f"--ranks {asked}, but this machine has {gpus} GPUs; measure with {gpus} or fewer")
    return asked or gpus


def _measure(options: argparse.Namespace, device: str) -> int:
    """Measure as one rank of the job."""
    let_sigint_end_ranks()
    line = Grid(data=join_job(device, options.ranks), device=device)  # all ranks along one axis
    # on the CPU the ranks of a node share its cores; otherwise each starts as many threads as there are cores
    settle = share_cores if device == "cpu" else lambda: None
    settle()
    raise_on_signals()
    line.run_on_rank0("opening the machine file", lambda: check_writable(options.out))
    with showing(sys.stderr, line.rank == 0, f"measuring for about {options.seconds:g} s") as progress:
        found = Calibration(
            line,
            ranks_of_node(line.shape.world),
            options.seconds,
            settle=settle,
            progress=progress,
        ).measure(options.out.stem)
    line.run_on_rank0("writing the machine file", lambda: write(found, options.out))
    if line.rank == 0:
        print("\n".join(summary(found, options.out)))
    close(line)
    return 0


def ranks_of_node(world: int) -> int:
    """Return the ranks per node, from torchrun's or SLURM's environment."""
    said = Environment.read().per_node or str(world)
    found = re.fullmatch(r"(\d+)(\(x\d+\))?", said)  # SLURM writes `4(x2)` for 4 ranks on each of 2 nodes
    if found is None or world % int(found[1]):
        raise ValueError(f"{world} ranks, {said} on the nodes: start the same number of ranks on every node")
    return int(found[1])


def check_writable(path: Path) -> None:
    """Raise if the file cannot be written, before any time is spent on measuring; leave no empty file behind."""
    there = path.exists()
    path.open("a").close()
    if not there:
        path.unlink()


def write(machine: Machine, path: Path) -> None:
    """Write the machine file."""
    text = to_toml(machine)
    parse_machine(text, str(path))  # raises if the file could not be read again
    path.write_text(text, encoding="utf-8")


def summary(machine: Machine, path: Path) -> Iterator[str]:
    """Yield the lines that describe what was measured."""
    rates = ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in machine.gemm.items())
    yield f"{path}: {machine.about}"
    yield f"  products {rates}, half of that at a dim of {machine.gemm_half:.0f}; attention {machine.attention:.0%}"
    yield f"  memory {machine.memory / 2**30:.1f} GiB, {machine.memory_bandwidth / 1e9:.1f} GB/s"
    for mode, traffic in machine.traffic.items():
        yield f"  kernels between products move {traffic:.1f} times the bytes of fused ones, {mode}"
    yield f"  at least {machine.overhead * 1e6:.1f} us per kernel, {machine.launch * 1e6:.1f} us per collective"
    for mode in machine.host:
        yield f"  the host, {machine.describe_host(mode)}"
    yield (
        f"  products during a collective take {machine.contention:.2f} times as long; a collective waits "
        f"{machine.turn * 1e3:.1f} ms for its turn"
    )
    named = [(f"ranks {stride} apart, {size} together", link) for (stride, size), link in machine.inside.items()]
    if machine.between is not None:
        named.append(("between nodes, all rings of a node", machine.between))
    for name, link in named:
        yield f"  {name}: {link.bandwidth / 1e9:.2f} GB/s, {link.latency * 1e6:.1f} us per hop"
    yield f"\n  fourfold plan --model gpt-1.4b --machine {path} --devices {machine.devices_per_node} --batch-tokens 64k"


@contextmanager
def showing(stream: IO[str], wanted: bool, text: str) -> Iterator[Callable[[float], None]]:
    """Yield a function that shows the fraction done: as a bar on a terminal, else as a line for every tenth."""
    if not wanted:
        yield lambda _: None
    elif stream.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=stream)) as bar:
            task = bar.add_task(text, total=1.0)
            yield lambda done: bar.update(task, completed=done)
    else:
        print(text, file=stream, flush=True)
        shown = 0

        def show(done: float) -> None:
            nonlocal shown
            tenths = int(10 * done + 1e-9)  # sums of fractions may end just below a tenth
            if tenths > shown:
                shown = tenths
                print(f"{tenths * 10:>4}%", file=stream, flush=True)

        yield show

"""The program of every rank of the emulated cluster: all lines of a setting take turns in one job.

torchrun starts it with the path of a pickled `Job`. Rank 0 appends events to the job's file, one JSON object per line,
so that nothing is lost when a line crashes the job. All ranks do the same things in the same order.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from math import isnan, nan
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository, for `import benchmarks`

import torch
import torch.distributed as dist

import fourfold as ff
from benchmarks.cluster.emulate import traffic
from benchmarks.cluster.minimal_reduce_scatter import minimal_reduce_scatter
from benchmarks.cluster.settings import MINIMAL, OURS, Job
from benchmarks.cluster.trainer_base import Groups, Trainer
from benchmarks.cluster.trainers import make_trainer
from benchmarks.shared.workloads import Line
from fourfold import comm
from fourfold.ledger import Collective
from fourfold.train.launch import share_cores

DEADLINE = timedelta(seconds=180)
"""The timeout of a collective; after it the job ends, and the driver starts again without the line."""


class SharedDeviceGloo(dist.ProcessGroupGloo):
    """A gloo process group that shares one gloo device with all other groups of this process.

    By default each group has its own device, with a thread that wakes up a hundred times per second. With the groups of
    all lines, these threads alone would keep the cores busy.
    """

    device = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        if SharedDeviceGloo.device is None:
            SharedDeviceGloo.device = dist.ProcessGroupGloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])
        options._devices, options._timeout = [SharedDeviceGloo.device], timeout
        super().__init__(store, rank, size, options)


class ClusterRank:
    """This rank and the trainers of its lines."""

    def __init__(self, job: Job) -> None:
        dist.distributed_c10d.ProcessGroupGloo = SharedDeviceGloo
        dist.init_process_group("gloo", timeout=DEADLINE)
        self.job = job
        self.everyone = ff.Grid(data=dist.get_world_size())
        self.rank, self.per_node = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
        self.groups = Groups()
        self.trainers: dict[str, Trainer] = {}
        gc.freeze()  # imported objects never die; without them a collection between turns is quick

    def write(self, event: str, **what: Any) -> None:
        if self.rank == 0:
            with Path(self.job.out).open("a") as file:
                file.write(json.dumps({"event": event, "at": round(time.time(), 2), **what}) + "\n")

    def gather(self, number: float) -> list[float]:
        """Return the numbers of all ranks. It is also a barrier."""
        mine = torch.tensor([number], dtype=torch.float64)
        return comm.all_gather(mine, self.everyone, "data").wait().tolist()

    # --- lines

    def build(self, line: Line) -> bool:
        """Build the line's trainer and return whether that worked on every rank. A trainer that is not installed or
        does not support the layout fails on all ranks alike, and the job continues without it."""
        self.write("building", line=line.name)
        error = ""
        try:
            with self.reduce_scatter_of(line):
                self.trainers[line.name] = make_trainer(line, self.job.workload, groups=self.groups)
        except (ImportError, NotImplementedError) as refused:
            error = str(refused)
        failed = self.gather(float(bool(error)))
        if any(failed):
            self.trainers.pop(line.name, None)
            self.write("failed", line=line.name, error=error or "another rank could not build it")
            return False
        return True

    @staticmethod
    def reduce_scatter_of(line: Line) -> AbstractContextManager[object]:
        return minimal_reduce_scatter() if line.variant == MINIMAL else nullcontext()

    def step(self, line: Line) -> torch.Tensor | None:
        with self.reduce_scatter_of(line):
            return self.trainers[line.name].step()

    def warm_up(self, line: Line) -> None:
        """Take the first steps; the last one of a Fourfold line records the bytes that it sends."""
        losses = [self.loss(self.step(line)) for _ in range(self.job.warmup)]
        ours, sent = line.kind in OURS, {}
        grid = self.groups.grid(line.shape) if ours else self.everyone
        with grid.ledger.watch() as records:
            losses.append(self.loss(self.step(line)))
        if ours:
            sent = self.sent(records, grid)
        share_cores()  # again, because the threads of the line's process groups exist now
        self.write("warm", line=line.name, losses=losses, ledger=sent)

    def loss(self, mine: torch.Tensor | None) -> float:
        """Return the mean over the ranks that have a loss."""
        found = [loss for loss in self.gather(nan if mine is None else float(mine)) if not isnan(loss)]
        return sum(found) / len(found) if found else nan

    def sent(self, records: list[Collective], grid: ff.Grid) -> dict[str, float]:
        """Return the bytes that a rank sends on average inside its node and to other nodes, if each collective is a
        ring."""
        inside = between = 0
        for record in records:
            ring = grid.shape.ranks_along(record.axis, grid.rank)
            next_rank = ring[(ring.index(grid.rank) + 1) % len(ring)]
            if next_rank // self.per_node == grid.rank // self.per_node:
                inside += record.wire_bytes
            else:
                between += record.wire_bytes
        found = {"inside": self.gather(inside), "between": self.gather(between)}
        return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}

    def turn(self, line: Line, number: int) -> None:
        gc.collect()
        self.gather(0.0)
        sent, busy = traffic(), cpu_seconds()
        self.gather(0.0)  # no rank may send before all have read their counters
        began = time.perf_counter()
        loss = self.step(line)
        seconds = time.perf_counter() - began
        slowest = max(self.gather(seconds))
        cores, sent = cpu_seconds() - busy, traffic().since(sent)
        inside, between = (sum(self.gather(part / self.per_node)) for part in sent)
        world = self.everyone.shape.world
        self.write(
            "turn",
            line=line.name,
            round=number,
            seconds=slowest,
            inside=inside / world,
            between=between / world,
            busy=cores / slowest / (os.cpu_count() or 1),
            loss=self.loss(loss),
        )

    # --- the job

    def measure(self) -> None:
        lines = []
        for line in self.job.lines:
            if self.build(line):
                self.warm_up(line)
                lines.append(line)
        began = time.monotonic()
        for number in range(self.job.rounds):
            if max(self.gather(time.monotonic() - began)) > self.job.seconds:
                self.write("stopped", rounds=number)
                break
            first = number * len(lines) // self.job.rounds
            for line in (*lines[first:], *lines[:first]):
                self.turn(line, number)
            self.write("round", round=number)
        for line in lines:
            if line.kind in OURS:
                self.compute(line)

    def compute(self, line: Line) -> None:
        """Time a step without communication. It leaves meaningless weights, so it is the last step of its line."""
        grid = self.groups.grid(line.shape)
        self.gather(0.0)
        with comm.muted(grid):
            began = time.perf_counter()
            self.step(line)
            seconds = time.perf_counter() - began
        self.write("compute", line=line.name, seconds=max(self.gather(seconds)))

    def measure_memory(self) -> None:
        """Measure peak memory. Freed tensors must return their memory to the system at once (`runs.FREE_AT_ONCE`).

        The first line runs twice and its second peak counts: allocations made once per process belong to no line.
        """
        for line in (*self.job.lines[:1], *self.job.lines):
            gc.collect()
            before = resident()
            if not self.build(line):
                continue
            for _ in range(self.job.warmup):
                self.step(line)
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak, VmHWM
            self.step(line)
            peaks = self.gather(resident("VmHWM") - before)
            self.write("memory", line=line.name, peak=max(peaks))
            self.trainers.pop(line.name).close()


def cpu_seconds() -> float:
    """Return the busy CPU seconds of all cores since the machine started."""
    numbers = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle = numbers[3] + numbers[4]
    return (sum(numbers[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def resident(what: str = "VmRSS") -> int:
    """Return this process's resident memory in bytes: now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what + ":"))


def main() -> int:
    torch.set_num_threads(1)
    rank = ClusterRank(pickle.loads(Path(sys.argv[1]).read_bytes()))
    if rank.job.memory:
        rank.measure_memory()
    else:
        rank.measure()
    rank.write("end")
    rank.gather(0.0)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

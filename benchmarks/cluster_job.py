"""What every rank of the emulated cluster runs: all lines of a setting in one job, one after another in every round.

torchrun starts it with the path of a `Job`; rank 0 appends what was seen to the job's file, one JSON object a line,
so that nothing is lost when a line brings the job down. All ranks do the same in the same order.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fourfold as ff
import trainers
from cluster import traffic
from fourfold import comm
from fourfold.ledger import Collective
from fourfold.train.launch import share_cores
from minimal import minimal_reduce_scatter
from settings import MINIMAL, OURS, Job
from sides import Line

DEADLINE = timedelta(seconds=180)
"""For a collective: then the job ends, and the driver goes on without the line."""


class OnOneDevice(dist.ProcessGroupGloo):
    """A process group on the one gloo device of this process.

    By itself each group has a device, whose thread wakes up a hundred times a second: with the groups of all lines that
    would be what the cores do.
    """

    device = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        if OnOneDevice.device is None:
            OnOneDevice.device = dist.ProcessGroupGloo.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])
        options._devices, options._timeout = [OnOneDevice.device], timeout
        super().__init__(store, rank, size, options)


class Rank:
    """This rank, and the lines that it holds."""

    def __init__(self, job: Job) -> None:
        dist.distributed_c10d.ProcessGroupGloo = OnOneDevice
        dist.init_process_group("gloo", timeout=DEADLINE)
        self.job = job
        self.everyone = ff.Grid(data=dist.get_world_size())
        self.rank, self.per_node = dist.get_rank(), int(os.environ["LOCAL_WORLD_SIZE"])
        self.groups = trainers.Groups()
        self.held: dict[str, trainers.Trainer] = {}
        gc.freeze()  # what was imported stays, so that collecting between turns is quick

    def write(self, event: str, **what: Any) -> None:
        if self.rank == 0:
            with Path(self.job.out).open("a") as file:
                file.write(json.dumps({"event": event, "at": round(time.time(), 2), **what}) + "\n")

    def gather(self, number: float) -> list[float]:
        """Of all ranks; they have all come here when it returns."""
        mine = torch.tensor([number], dtype=torch.float64)
        return comm.all_gather(mine, self.everyone, "data").wait().tolist()

    # --- lines

    def build(self, line: Line) -> bool:
        """Whether it stands on every rank. Where all refuse it for the same reason the job goes on."""
        self.write("building", line=line.name)
        error = ""
        try:
            with self.underneath(line):
                self.held[line.name] = self.make(line)
        except (ImportError, NotImplementedError) as refused:
            error = str(refused)
        failed = self.gather(float(bool(error)))
        if any(failed):
            self.held.pop(line.name, None)
            self.write("failed", line=line.name, error=error or "another rank could not build it")
            return False
        return True

    def make(self, line: Line) -> trainers.Trainer:
        if line.kind in OURS:
            return trainers.make("fourfold", self.job.size, line.shape, line.policy, groups=self.groups)
        return trainers.make(line.kind, self.job.size, line.shape, groups=self.groups)

    @staticmethod
    def underneath(line: Line) -> AbstractContextManager[object]:
        return minimal_reduce_scatter() if line.variant == MINIMAL else nullcontext()

    def step(self, line: Line) -> torch.Tensor:
        with self.underneath(line):
            return self.held[line.name].step()

    def warm(self, line: Line) -> None:
        """The first steps; the last of Fourfold's is watched for what it sends."""
        losses = [self.loss(self.step(line)) for _ in range(self.job.warmup)]
        ours, sent = line.kind in OURS, {}
        grid = self.groups.grid(line.shape) if ours else self.everyone
        with grid.ledger.watch() as records:
            losses.append(self.loss(self.step(line)))
        if ours:
            sent = self.sent(records, grid)
        share_cores()  # the threads of its process groups are there now
        self.write("warm", line=line.name, losses=losses, ledger=sent)

    def loss(self, mine: torch.Tensor) -> float:
        found = self.gather(float(mine))
        return sum(found) / len(found)

    def sent(self, records: list[Collective], grid: ff.Grid) -> dict[str, float]:
        """Bytes that a rank sends on average inside its node and to others, each collective going around its ring."""
        inside = between = 0
        for record in records:
            around = grid.shape.ranks_along(record.axis, grid.rank)
            right = around[(around.index(grid.rank) + 1) % len(around)]
            if right // self.per_node == grid.rank // self.per_node:
                inside += record.wire_bytes
            else:
                between += record.wire_bytes
        found = {"inside": self.gather(inside), "between": self.gather(between)}
        return {name: sum(numbers) / len(numbers) for name, numbers in found.items()}

    def turn(self, line: Line, number: int) -> None:
        gc.collect()
        self.gather(0.0)
        sent, busy = traffic(), cpu_seconds()
        self.gather(0.0)  # nobody sends before all have read
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
                self.warm(line)
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
        """A step in which nothing travels; what it computes means nothing, so it is the last of its line."""
        grid = self.groups.grid(line.shape)
        self.gather(0.0)
        with comm.muted(grid):
            began = time.perf_counter()
            self.step(line)
            seconds = time.perf_counter() - began
        self.write("compute", line=line.name, seconds=max(self.gather(seconds)))

    def weigh(self) -> None:
        """Peak memory; it must go back to the system when tensors end (`emulated.AT_ONCE`).

        The first line comes twice, and its second peak counts: what a process allocates once is not a line's.
        """
        for line in (*self.job.lines[:1], *self.job.lines):
            gc.collect()
            before = resident()
            if not self.build(line):
                continue
            for _ in range(self.job.warmup):
                self.step(line)
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
            self.step(line)
            peaks = self.gather(resident("VmHWM") - before)
            self.write("memory", line=line.name, peak=max(peaks))
            self.held.pop(line.name).close()


def cpu_seconds() -> float:
    """That all cores of the machine have worked since it started."""
    numbers = [int(number) for number in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle = numbers[3] + numbers[4]
    return (sum(numbers[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def resident(what: str = "VmRSS") -> int:
    """Bytes of this process in memory, now or at the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what + ":"))


def main() -> int:
    torch.set_num_threads(1)
    rank = Rank(pickle.loads(Path(sys.argv[1]).read_bytes()))
    if rank.job.memory:
        rank.weigh()
    else:
        rank.measure()
    rank.write("end")
    rank.gather(0.0)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

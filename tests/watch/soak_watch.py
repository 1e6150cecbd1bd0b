"""Who watches over runs, at length: no alarm without a fault, and no fault without the message that names it.

    python tests/watch/soak_watch.py clean [RUNS] [SEED]        # default 50 runs
    python tests/watch/soak_watch.py start                      # a few minutes
    python tests/watch/soak_watch.py faults [MINUTES] [SEED]    # default 30 minutes; root and iproute2

`clean`: runs on grids of 1 to 8 ranks with policies drawn at random, a short deadline and frequent comparisons of
replicas. None may raise an alarm, or take a rank for slow.

`start`: in every phase before the first step a rank is stopped, killed, or stopped and continued in time, on 2 and 4
ranks. The run must name the rank within its deadline, or train to its end.

`faults`: runs on an emulated cluster of two nodes follow one another. About once a minute a rank is killed or stopped
(SIGKILL, SIGSTOP), or a node's cable is pulled for longer than the deadline. torchrun starts the ranks again; where it
gives up, the job is started again as a scheduler would. Each run must have every step once with the loss of one that
was left alone, bit for bit, and the log must name each fault.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

sys.path.append(str(Path(__file__).parents[1]))  # what tests share
sys.path.append(str(Path(__file__).parents[2]))  # the benchmarks

from soak_kills import differing, losses

import faulty
import warm
from benchmarks.cluster.emulate import Cluster, ClusterShape, Elastic, Process, exit_on_signals, host
from curves import config_of, write_texts
from fourfold.shape import shapes_of
from fourfold.train.config import TrainConfig
from fourfold.watch.liveness import Phase
from fourfold.watch.tape import DIAGNOSIS, TapeReading, read, tape_path
from harness import RankFailed, close_pools, pool
from runs import column, trained

# --- clean runs


def clean(runs: int, seed: int) -> int:
    began, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="fourfold-watch-") as folder:
        write_texts(Path(folder))
        draw = random.Random(seed)
        cases = sorted((drawn(draw, Path(folder)) for _ in range(runs)), key=lambda one: one.grid.shape.world)
        for number, config in enumerate(cases):
            out, start = Path(folder) / f"run-{number}", time.monotonic()
            found = alarms(config, out)
            wrong += bool(found)
            seconds = f"{time.monotonic() - start:.1f} s"
            print(f"{said_of(config)}: {found or 'nobody raised an alarm'}, {seconds}", flush=True)
    close_pools()
    print(f"{runs} clean runs of {CLEAN_STEPS} steps: {wrong} with an alarm, {time.monotonic() - began:.0f} s")
    return 1 if wrong else 0


CLEAN_STEPS = 60


def drawn(draw: random.Random, folder: Path) -> TrainConfig:
    """A small run on a grid that its model fits."""
    while True:
        shape = draw.choice(list(shapes_of(draw.randint(1, 8))))
        changes: dict[str, Any] = {
            "model.layers": 1,
            "batch.rows": 24,
            "batch.micro_steps": draw.choice([1, 2]),
            "policy.activations": draw.choice(["sharded", "replicated"]),
            "policy.shard_optimizer": draw.random() < 0.5,
            "policy.recompute": draw.choice(["none", "attention", "block"]),
            "checkpoint.every": draw.choice([0, 20]),
            "plan.compare": False,
            "watch.deadline": 5.0,
            "watch.replicas_every": 5,
        }
        with suppress(ValueError):
            return config_of(draw.choice(["gpt-tiny", "llama-tiny"]), "fp32", CLEAN_STEPS, folder, shape, changes)


def said_of(config: TrainConfig) -> str:
    policy = config.policy
    what = f"{config.model.name} {policy.activations} recompute={policy.recompute}"
    return f"{config.grid.shape} {what} shard={policy.shard_optimizer} micro={config.batch.micro_steps}"


def alarms(config: TrainConfig, out: Path) -> str:
    """What was raised in a run; nothing where all was well."""
    try:
        pool(config.grid.shape.world).run(trained, config, out, timeout=300)
    except (RankFailed, TimeoutError) as failed:
        found = (out / DIAGNOSIS).read_text() if (out / DIAGNOSIS).exists() else ""
        return f"{failed} {found}".strip()
    return "; ".join(column(out, "straggler", "said"))


# --- faults before the first step

START_SECONDS = 6.0
"""Longer than `faulty.PAUSE`, and than a busy machine needs between two heartbeats."""
BOUND_SECONDS = 120.0
START_PHASES = (Phase.GROUPS, Phase.FOLDER, Phase.DATA, Phase.MODEL, Phase.CHECKPOINT, Phase.BEGINNING)
NAMED = {
    "stop": r"rank 1 \(process \d+ on \S+\) is stopped|rank 1 never arrived: process \d+ on \S+ is stopped",
    "kill": r"rank 1 \(process \d+\) was killed by SIGKILL",
    "pause": r"\A\Z",
}
"""A pattern for what is said about each kind of fault."""


def start() -> int:
    """Return 1 unless every fault before the first step was named, or passed."""
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="fourfold-start-") as folder:
        for grid, phase, kind in itertools.product(("x=2", "x=2,z=2"), START_PHASES, NAMED):
            began = time.monotonic()
            out = Path(folder, f"{grid}-{phase.name}-{kind}")
            settings = [f"watch.start={START_SECONDS}", "train.evaluate_every=0", "plan.compare=false"]
            options = ["--model", "gpt-tiny", "--grid", grid, "--steps", "2", "--device", "cpu", "--out", str(out)]
            arguments = ["train", *options, *(f"--set={setting}" for setting in settings)]
            told, errors = (out.with_suffix(suffix) for suffix in (".out", ".err"))
            process = warm.Process(faulty.command, kind, 1, phase, *arguments, stdout=told, stderr=errors)
            code = process.wait(BOUND_SECONDS)
            said = errors.read_text()
            good = code == (0 if kind == "pause" else 1) and re.search(NAMED[kind], said) is not None
            wrong += not good
            shown = said.partition("\n")[0] or "trained to its end"
            verdict = "" if good else f"WRONG, exit code {code}: "
            print(f"{grid} {kind} while {phase}: {time.monotonic() - began:.1f} s: {verdict}{shown}", flush=True)
    print(f"{2 * len(START_PHASES) * len(NAMED)} faults before the first step: {wrong} not as they should be")
    return 1 if wrong else 0


# --- faults

SHAPE = ClusterShape(2, 2)
STEPS = 600
DEADLINE = 10.0
"""Seconds; four ranks that share two cores must not need as much for a collective."""
PAUSES = 2.0, 45.0
"""Seconds of training before a fault; what it takes to notice it and to start again comes on top."""
CUTS = 2.0, 25.0
"""Seconds beyond the deadline for which a cable stays pulled, at least until ranks have said why they stand still."""
HANG_SECONDS = 300.0
"""Where the ranks have not come to a step of a start for that long, the run hangs ..."""
END_SECONDS = 1200.0
"""... and where it has not ended without any fault."""
SAFE = 15
"""Steps before the last one in which there is no fault: a job that has done all its work has nothing to name."""


@dataclass
class Fault:
    kind: str
    step: int
    what: str
    """Who was hit."""
    named_by: str
    """A pattern: the line of the log that names it."""
    time: float
    recovery: float = 0.0
    """Seconds until all ranks were in a step again."""
    line: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: {self.what}, {self.recovery:.0f} s: {self.line or 'NOT NAMED'}"


class Job:
    """A run on the cluster, started until it has finished."""

    def __init__(self, cluster: Cluster, run: Path, chance: random.Random) -> None:
        self.cluster, self.run, self.chance = cluster, run, chance
        self.log = run.parent / f"{run.name}.log"
        self.starts = 0
        self.agents: list[Process] = []

    def begin(self) -> None:
        self.starts += 1
        command = [*COMMAND, "--resume", str(self.run)]
        with self.log.open("a") as log:
            nodes = range(self.cluster.shape.nodes)
            self.agents = [self.cluster.start(node, command, elastic=ALL_NODES, log=log) for node in nodes]

    def finished(self) -> bool:
        """Where an agent has failed, all are ended and started again, as a scheduler does it."""
        codes = [agent.poll() for agent in self.agents]
        if any(codes):
            for node in range(self.cluster.shape.nodes):
                self.cluster.kill_node(node)
            self.begin()
        return all(code == 0 for code in codes)

    def under_fire(self, until: float) -> Iterator[Fault]:
        """To its end, with a fault now and then; each when it is over."""
        self.begin()
        goes_on = self.await_steps(set())
        while goes_on and not self.ends_in(self.chance.uniform(*PAUSES)) and self.may_strike(until):
            before = self.log.stat().st_size
            starts = {one.who.start for one in self.tapes() if one is not None}
            fault = self.strike()
            goes_on = self.await_steps(starts)
            fault.recovery, fault.line = time.time() - fault.time, self.named(fault, before)
            yield fault
        if not self.ends_in(END_SECONDS):
            self.hangs(END_SECONDS)

    def ends_in(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.finished():
            if time.monotonic() > until:
                return False
            time.sleep(0.1)
        return True

    def may_strike(self, until: float) -> bool:
        return time.monotonic() < until and self.step() <= STEPS - SAFE

    def await_steps(self, since: set[str]) -> bool:
        """Until all ranks of a later start are in a step; False where the run finishes before."""
        until = time.monotonic() + HANG_SECONDS
        while not all(one is not None and one.who.start not in since and one.entries for one in self.tapes()):
            if self.finished():
                return False
            if time.monotonic() > until:
                self.hangs(HANG_SECONDS)
            time.sleep(0.1)
        return True

    def hangs(self, seconds: float) -> NoReturn:
        raise RuntimeError(f"{self.run} has not moved for {seconds:.0f} s:\n{self.log.read_text()[-5000:]}")

    def tapes(self) -> list[TapeReading | None]:
        found: list[TapeReading | None] = []
        for rank in range(self.cluster.shape.world):
            try:
                found.append(read(tape_path(self.run, rank)))
            except (OSError, ValueError):
                found.append(None)
        return found

    def step(self) -> int:
        """At which rank 0 is."""
        tape = read(tape_path(self.run, 0))
        return tape.entries[-1].step if tape.entries else 0

    def strike(self) -> Fault:
        return self.chance.choice([self.kill, self.stop, self.cut])()

    def kill(self) -> Fault:
        rank, process = self.victim()
        os.kill(process, signal.SIGKILL)
        named_by = (
            rf"exitcode: -9\).*\(pid: {process}\)|rank {rank} \(\S+, process {process}\) (does not answer|is gone)"
        )
        return Fault("kill", self.step(), f"rank {rank} killed", named_by, time.time())

    def stop(self) -> Fault:
        rank, process = self.victim()
        os.kill(process, signal.SIGSTOP)
        named_by = rf"rank {rank} \((\S+, process {process}|process {process} on \S+)\) is stopped"
        return Fault("stop", self.step(), f"rank {rank} stopped", named_by, time.time())

    def victim(self) -> tuple[int, int]:
        """A rank and its process."""
        rank = self.chance.randrange(self.cluster.shape.world)
        return rank, read(tape_path(self.run, rank)).who.process

    def cut(self) -> Fault:
        """Also waits until the link is healed."""
        node, seconds = self.chance.randrange(self.cluster.shape.nodes), DEADLINE + self.chance.uniform(*CUTS)
        named_by = rf"look at the links of .*{host(node)}|the job's store does not answer|\({host(node)}, .*not answer"
        fault = Fault("cut", self.step(), f"{host(node)} cut off for {seconds:.0f} s", named_by, time.time())
        self.cluster.cut_link(node)
        time.sleep(seconds)
        self.cluster.restore_link(node)
        return fault

    def named(self, fault: Fault, since: int) -> str:
        """By what was logged since that byte."""
        lines = self.log.read_bytes()[since:].decode(errors="replace").splitlines()
        return next((line.strip() for line in lines if re.search(fault.named_by, line)), "")


ALL_NODES = Elastic(least=SHAPE.nodes)
COMMAND = [
    "-m", "fourfold.cli", "train", "--model", "gpt-tiny", "--grid", "x=2,data=2", "--steps", str(STEPS),
    "--set", "checkpoint.every=10", "--set", "batch.rows=4", "--set", "batch.seq=32", "--device", "cpu",
    "--set", "policy.shard_optimizer=true", "--set", "train.evaluate_every=0", "--set", "log.tensorboard=false",
    "--set", "plan.compare=false", "--set", f"watch.deadline={DEADLINE}",
]  # fmt: skip


def faults(minutes: float, seed: int) -> int:
    chance, began = random.Random(seed), time.monotonic()
    found: list[Fault] = []
    folder = tempfile.mkdtemp(prefix="fourfold-faults-")  # kept where something is wrong
    with exit_on_signals(), Cluster(SHAPE) as cluster:
        expected, runs, starts = undisturbed(cluster, Path(folder) / "alone"), 0, 0
        print(f"left alone: {len(expected)} steps in {time.monotonic() - began:.0f} s", flush=True)
        until = time.monotonic() + 60 * minutes
        while time.monotonic() < until:
            job = Job(cluster, Path(folder) / f"run-{runs}", chance)
            for fault in job.under_fire(until):
                found.append(fault)
                print(f"run {runs}, {fault}"[:300], flush=True)
            if (got := losses(job.run)) != expected:
                print(f"run {runs}: {differing(got, expected)}; see {folder}")
                return 1
            runs, starts = runs + 1, starts + job.starts
            print(f"run {runs}: every step once, losses equal", flush=True)
    print(f"\n{runs} runs, {starts} starts of the job, {time.monotonic() - began:.0f} s; see {folder}")
    return 0 if summary(found) else 1


def undisturbed(cluster: Cluster, run: Path) -> list[tuple[int, float]]:
    job = Job(cluster, run, random.Random(0))
    if list(job.under_fire(0.0)) or job.starts > 1:
        raise RuntimeError(f"a run that was left alone was started {job.starts} times; see {job.log}")
    return losses(run)


def summary(found: list[Fault]) -> bool:
    """Prints it; whether every fault was named."""
    print("| fault | times | named | seconds until training went on, median | most |\n|---|---|---|---|---|")
    for kind in sorted({fault.kind for fault in found}):
        of_kind = [fault for fault in found if fault.kind == kind]
        seconds, named = [fault.recovery for fault in of_kind], sum(bool(fault.line) for fault in of_kind)
        print(f"| {kind} | {len(of_kind)} | {named} | {median(seconds):.0f} | {max(seconds):.0f} |")
    return all(fault.line for fault in found)


def main() -> int:
    kind, *numbers = sys.argv[1:]
    if kind == "start":
        return start()
    do, default = {"clean": (clean, 50), "faults": (faults, 30)}[kind]
    number, seed = [*map(int, numbers), *[default, 0][len(numbers) :]]
    return do(number, seed)


if __name__ == "__main__":
    sys.exit(main())

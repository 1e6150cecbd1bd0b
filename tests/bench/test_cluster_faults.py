"""Faults between nodes of an emulated cluster: a cable is pulled, a node dies. Those who are left say so, or go on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

import warm
from benchmarks.cluster.emulate import Cluster, ClusterShape, Elastic, EmulationUnavailableError, Process, host
from curves import alone, bound, config_of, write_texts
from fourfold.cli import main
from fourfold.grid import Shape
from fourfold.watch.tape import DIAGNOSIS
from runs import column

pytestmark = pytest.mark.slow
STEPS = 40
DEADLINE, BOUND = 3, 150.0
"""Seconds that a rank may wait, and in which all must have ended on a busy machine."""
MBIT = 20.0
"""Slow links: a step is mostly collectives, so a fault meets one, and steps are left when it comes."""
CHANGES = {
    "model.layers": 1,
    "train.evaluate_every": 0,
    "plan.compare": False,
    "log.tensorboard": False,
    "checkpoint.every": 2,
    "watch.deadline": DEADLINE,
}
WENT_ON = Elastic(least=1, lost=3, last_call=4)


class Job(NamedTuple):
    """Two nodes of one rank that train in a folder."""

    cluster: Cluster
    folder: Path
    agents: Sequence[Process]

    def log(self, node: int) -> str:
        return log_of(self.folder, node).read_text()

    def wait_for_step(self, step: int) -> None:
        self._wait(lambda: steps_of(self.folder)[-1:] >= [step], f"step {step}")

    def wait_for_end(self, *nodes: int) -> list[int]:
        """Exit codes of the agents of these nodes."""
        self._wait(lambda: all(self.agents[node].poll() is not None for node in nodes), "the end")
        return [self.agents[node].wait() for node in nodes]

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + BOUND
        while not done():
            assert time.monotonic() < until, f"{what} did not come: {self.log(0)[-3000:]}{self.log(1)[-3000:]}"
            time.sleep(0.05)


def log_of(folder: Path, node: int) -> Path:
    return folder.parent / f"{folder.name}-{node}.log"


def steps_of(folder: Path) -> list[int]:
    """Of whole lines that a run has written so far."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return [event["step"] for event in events if event["event"] == "step"]


class Jobs(NamedTuple):
    cut: Job
    ended: Job
    expected: Sequence[float]
    """Losses of a run that nothing happened to."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """Both at once, since they wait more than they compute, with the fault on its way."""
    texts = tmp_path_factory.mktemp("faults")
    write_texts(texts)
    config = texts / "run.toml"
    config.write_text(config_of("gpt-tiny", "fp64", STEPS, texts, Shape(), CHANGES).toml())
    train = ["-m", "fourfold.cli", "train", str(config), "--device", "cpu"]
    with ExitStack() as stack:
        try:
            clusters = [stack.enter_context(Cluster(ClusterShape(2, 1, MBIT), name)) for name in ("cut", "end")]
        except EmulationUnavailableError as error:
            pytest.skip(f"no emulated cluster here: {error}")

        def start(cluster: Cluster, folder: Path, options: Sequence[str], elastic: Elastic | None = None) -> Job:
            agents = []
            for node in range(2):
                log = stack.enter_context(log_of(folder, node).open("w"))
                with warm.nodes():
                    agents.append(cluster.start(node, [*train, *options], elastic=elastic, log=log))
            return Job(cluster, folder, agents)

        cut = start(clusters[0], texts / "cut", ["--grid", "data=2", "--out", str(texts / "cut")])
        ended = start(clusters[1], texts / "ended", ["--grid", "auto", "--resume", str(texts / "ended")], WENT_ON)
        expected = alone("gpt-tiny", "fp64", STEPS, texts, CHANGES)["loss"]
        for job, fault in ((cut, Cluster.cut_link), (ended, Cluster.kill_node)):
            job.wait_for_step(5)
            fault(job.cluster, 1)
        yield Jobs(cut, ended, expected)


def test_a_pulled_cable_is_named_on_both_sides(jobs: Jobs, capsys: pytest.CaptureFixture[str]) -> None:
    """The store is on the first node: the rank there speaks for all, the other one for itself."""
    job = jobs.cut
    assert job.wait_for_end(0, 1) == [1, 1]
    # the cable may be pulled in a collective, while all ask whether to stop, or while they save
    where = r"step \d+: (\w+\[data\] .*|asking the others whether to stop|saving a checkpoint)"
    here = rf"process \d+ on {host(1)} does not answer"
    arrived = f"all of ranks 0, 1 arrived, and rank 1 no longer takes part: {here}"
    noticed = rf"\(rank 0 (waited|has not heard of rank 1) for {DEADLINE} s\)"
    told = f"{where}: ({arrived}|rank 1 never arrived: {here}) {noticed}"
    assert re.search(f"fourfold: error: rank 0: {told}", job.log(0))
    assert re.search(rf"rank 1 \({host(1)}, process \d+\) does not answer", job.log(0))
    assert re.search(
        rf"error: rank 1: rank 1 (waited|was training and heard nothing) for {DEADLINE} s; the job's store does not "
        "answer: its process is stopped, or its node or the network is gone",
        job.log(1),
    )
    assert main(["doctor", str(job.folder)]) == 0
    explained = capsys.readouterr().out
    assert re.search(told, explained)
    assert (job.folder / DIAGNOSIS).read_text().strip() in explained


def test_the_nodes_that_are_left_go_on_without_one_that_died(jobs: Jobs) -> None:
    """On another grid, with the same batches in the same order."""
    job = jobs.ended
    assert job.wait_for_end(0) == [0]
    assert column(job.folder, "step", "step") == list(range(1, STEPS + 1))
    assert column(job.folder, "step", "loss") == pytest.approx(jobs.expected, rel=bound("fp64", STEPS))
    assert column(job.folder, "resumed", "grid") == [str(Shape())]
    facts = json.loads((job.folder / "run.json").read_text())
    assert [Shape(**before["grid"]).world for before in facts["resumed"]] == [2]
    assert column(job.folder, "end", "reason")[-1] == "finished"

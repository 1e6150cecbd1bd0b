"""Faults in whole runs: each ends in bounded time, with the message that names the rank and the collective."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import faulty
import warm
from fourfold.cli import main
from fourfold.watch.liveness import Phase
from fourfold.watch.tape import DIAGNOSIS

pytestmark = pytest.mark.slow  # `test_fault_phases.py` has faults in whole runs for `make test`

DEADLINE, BOUND = 3.0, 90.0
"""Seconds that a rank may wait, and in which a run must have ended on a busy machine."""


class Ended(NamedTuple):
    """How a run with a fault ended, and what people read of it."""

    folder: Path
    code: int
    told: str


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """By fault; all at once, since they wait more than they compute."""
    started = {}
    # after the first two steps all ask
    faults: dict[str, int | Phase] = {"stop": 3, "shape": 3, "nan": 3, "quit": 2}
    # before the first step; `soak_watch.py start` has all phases
    faults |= {"stop early": Phase.GROUPS, "pause": Phase.MODEL}
    for fault, step in faults.items():
        folder = tmp_path_factory.mktemp(fault.replace(" ", "-"))
        settings = [f"watch.deadline={DEADLINE}", "train.evaluate_every=0", "plan.compare=false"]
        if isinstance(step, Phase):
            settings += [f"watch.start={5 * DEADLINE if fault == 'pause' else DEADLINE}", "watch.deadline=600"]
        if fault == "nan":
            settings += ["watch.deadline=30", "watch.not_finite=roll_back", "checkpoint.every=2"]
        if fault == "quit":
            settings += ["watch.deadline=600"]
        options = ["--model", "gpt-tiny", "--grid", "x=2", "--steps", "6", "--device", "cpu", "--out", str(folder)]
        arguments = ["train", *options, *(f"--set={setting}" for setting in settings)]
        out, errors = (folder.with_suffix(suffix) for suffix in (".out", ".err"))
        process = warm.Process(faulty.command, fault.split()[0], 1, step, *arguments, stdout=out, stderr=errors)
        started[fault] = folder, errors, process
    return {
        fault: Ended(folder, process.wait(BOUND), errors.read_text())
        for fault, (folder, errors, process) in started.items()
    }


def test_a_stopped_rank_is_named_and_the_doctor_says_it_again(
    runs: dict[str, Ended], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, code, told = runs["stop"]
    assert code == 1
    assert re.search(r"fourfold: error: step 3: (all_gather|reduce_scatter)\[x\] .*: rank 1 never arrived", told)
    assert re.search(r"rank 1 never arrived: process \d+ on \S+ is stopped \(SIGSTOP", told)
    assert "rank 0 stood at" in told
    found = (folder / DIAGNOSIS).read_text().strip()
    assert found in told
    assert main(["doctor", str(folder)]) == 0
    explained = capsys.readouterr().out
    assert found in explained
    assert explained.count("never arrived") == 1, "what the tapes alone would say is not said beside it"
    assert re.search(r"rank 1, last seen at [\d:]+: between steps, step 2", explained)
    assert re.search(r"rank 0, last seen at [\d:]+: computing, step 3", explained)


def test_a_rank_that_is_stopped_before_its_first_step_is_named(runs: dict[str, Ended]) -> None:
    """While process groups are made, where torch alone would have waited for half an hour."""
    _, code, told = runs["stop early"]
    assert code == 1
    assert re.match(
        rf"fourfold: error: before the first step, {Phase.GROUPS}: rank 1 \(process (\d+) on \S+\) is stopped .*"
        rf"-CONT \1.* \(rank 0 has not heard of rank 1 for {DEADLINE:g} s\)\n",
        told,
    )
    assert f"rank 0 was {Phase.GROUPS} and waited for other ranks" in told
    assert "rank 0 stood at" in told


def test_a_rank_that_is_stopped_and_continued_in_time_causes_no_alarm(runs: dict[str, Ended]) -> None:
    folder, code, told = runs["pause"]
    assert (code, told) == (0, "")
    assert not (folder / DIAGNOSIS).exists()


def test_a_rank_that_dies_while_others_wait_for_its_word_ends_them(runs: dict[str, Ended]) -> None:
    """They look for it themselves: told to end by the launcher they would go on waiting, to save together."""
    folder, code, told = runs["quit"]
    assert code == 1
    assert re.fullmatch(r"fourfold: error: rank 1 \(process \d+\) was killed by SIGKILL; the other .* stopped\n", told)
    found = (folder / DIAGNOSIS).read_text()
    assert found.startswith("step 2: asking the others whether to stop: rank 1 never arrived: process ")
    assert "is gone (rank 0 saw that rank 1 (process " in found


def test_batches_of_different_shapes_are_named(runs: dict[str, Ended], capsys: pytest.CaptureFixture[str]) -> None:
    """gloo ends the process at once; the launcher reads the tapes, and so does the doctor."""
    folder, code, told = runs["shape"]
    assert code == 1
    disagree = "step 3: ranks disagree on which collective comes next along x: rank 0 launched"
    assert disagree in told
    assert main(["doctor", str(folder)]) == 0
    assert disagree in capsys.readouterr().out


def test_ranks_go_back_together_where_one_has_a_gradient_that_is_not_a_number(runs: dict[str, Ended]) -> None:
    folder, code, _ = runs["nan"]
    assert code == 0
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    [resumed] = [event for event in events if event["event"] == "resumed"]
    assert resumed["step"] == 2
    assert (
        "without the data of steps 3 to 3: the gradients of step 3 are not finite, the first in"
        in resumed["passed_over"]
    )
    assert not any(event["skipped"] for event in events if event["event"] == "step")

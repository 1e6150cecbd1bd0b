"""Faults in a run: each ends in bounded time, with the message that names the rank and the collective."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from fourfold.watch.tape import DIAGNOSIS

HERE = Path(__file__).parent
DEADLINE, BOUND = 3.0, 60.0
"""Seconds that a rank may wait, and in which the whole run must have ended."""


def train(fault: str, rank: int, step: int, out: Path, *more: str) -> tuple[int, str, float]:
    """Exit code, what people read, and seconds of a small run with that fault."""
    began = time.monotonic()
    faulty = [sys.executable, str(HERE / "faulty.py"), fault, str(rank), str(step)]
    settings = [f"watch.deadline={DEADLINE}", "train.evaluate_every=0", "plan.compare=false"]
    options = ["--model", "gpt-tiny", "--steps", "6", "--device", "cpu", "--out", str(out), *more]
    found = subprocess.run(
        [*faulty, "train", *options, *(f"--set={setting}" for setting in settings)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=BOUND,
        check=False,
    )
    return found.returncode, found.stderr, time.monotonic() - began


def test_a_stopped_rank_is_named_and_the_doctor_says_it_again(tmp_path: Path) -> None:
    code, told, _ = train("stop", 1, 3, tmp_path, "--grid", "x=2")
    assert code == 1
    assert re.search(r"fourfold: error: step 3: (all_gather|reduce_scatter)\[x\] .*: rank 1 never arrived", told)
    assert "does not answer" in told
    assert "rank 0 stood at" in told
    found = (tmp_path / DIAGNOSIS).read_text().strip()
    assert found in told
    command = [sys.executable, "-m", "fourfold.cli", "doctor", str(tmp_path)]
    explained = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, check=True).stdout
    assert found in explained
    assert re.search(r"rank 1, last seen at [\d:]+: between steps, step 2", explained)
    assert re.search(r"rank 0, last seen at [\d:]+: computing, step 3", explained)


def test_batches_of_different_shapes_are_named(tmp_path: Path) -> None:
    """gloo ends the process at once; the launcher reads the tapes."""
    code, told, _ = train("shape", 1, 3, tmp_path, "--grid", "x=2")
    assert code == 1
    assert "step 3: ranks disagree on which collective comes next along x: rank 0 launched" in told

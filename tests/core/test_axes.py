"""The axes are one list: with a further axis of one rank every command works as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ADD_AN_AXIS = """
import importlib.util, sys
spec = importlib.util.find_spec("fourfold.axes")
module = importlib.util.module_from_spec(spec)
text = spec.loader.get_source("fourfold.axes")
assert '"data")' in text
exec(text.replace('"data")', '"data", "sixth")', 1), module.__dict__)
sys.modules["fourfold.axes"] = module
"""
"""Adds an axis where the list of them is written, so that what derives from the list has it too.

Runs before everything else in every process, ranks included: Python imports `sitecustomize` when it starts."""

TRAIN = ("--model", "gpt-tiny", "--data", "texts.txt", "--device", "cpu", "--steps", "2")
SMALL = ("--set", "batch.rows=4", "--set", "batch.seq=16", "--set", "checkpoint.every=1")


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder with text, and an environment whose processes know a sixth axis."""
    folder = tmp_path_factory.mktemp("five")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(ADD_AN_AXIS)
    (folder / "texts.txt").write_text("all ranks of one job " * 200)
    path = os.pathsep.join([str(folder / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return folder, {**os.environ, "PYTHONPATH": path}


def fourfold(five: tuple[Path, dict[str, str]], *args: str) -> str:
    folder, env = five
    command = [sys.executable, "-m", "fourfold.cli", *args]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_shapes_and_layouts_have_the_fifth_axis(five) -> None:
    code = (
        "from fourfold.axes import AXES; from fourfold.grid import Shape; from fourfold.layout import EXPAND_WEIGHT\n"
        "shape = Shape(x=2, sixth=1)\n"
        "assert AXES[-2] == 'sixth' and shape.sixth == 1 and shape.world == 2\n"
        "assert len(EXPAND_WEIGHT.placements()) == 5\n"
        "assert Shape(sixth=3, order=('sixth', 'x', 'y', 'z', 'data', 'pipe')).coords(2)['sixth'] == 2\n"
    )
    subprocess.run([sys.executable, "-c", code], env=five[1], check=True, timeout=120)


@pytest.mark.slow
def test_training_checkpoints_report_and_doctor_pass_a_fifth_axis_through(five) -> None:
    fourfold(five, "train", *TRAIN, *SMALL, "--ranks", "2", "--grid", "x=2", "--out", "run")
    written = json.loads((five[0] / "run" / "run.json").read_text())
    assert written["grid"]["sixth"] == 1
    assert {axis: size for axis, size in written["grid"].items() if size > 1} == {"x": 2}
    (newest,) = (five[0] / "run" / "checkpoints").glob("step-00000002")
    assert json.loads((newest / "checkpoint.json").read_text())["grid"]["sizes"]["sixth"] == 1
    fourfold(five, "train", "--resume", "run", "--steps", "3", "--ranks", "2", "--grid", "z=2")
    fourfold(five, "checkpoint", "verify", "run")
    fourfold(five, "report", "run")
    fourfold(five, "doctor", "run")


@pytest.mark.slow
def test_a_run_of_five_axes_resumes_with_six(five) -> None:
    four = five[0], dict(os.environ)
    fourfold(four, "train", *TRAIN, *SMALL, "--ranks", "2", "--grid", "z=2", "--out", "four")
    fourfold(five, "train", "--resume", "four", "--steps", "3", "--ranks", "2", "--grid", "x=2")
    fourfold(four, "checkpoint", "verify", "four")


@pytest.mark.slow
def test_a_plan_passes_a_fifth_axis_through(five) -> None:
    args = ("plan", "--model", "gpt-1.4b", "--machine", "dgx-h100", "--devices", "8", "--batch-tokens", "64K", "--json")
    plan = json.loads(fourfold(five, *args, "-"))
    assert all(entry["grid"]["sixth"] == 1 for entry in plan["grids"])

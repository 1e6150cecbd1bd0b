"""Callbacks of users: they hear of everything once, on rank 0, and an error in one ends the run and names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_train import cli_as_rank

from fourfold.checkpoint.format import RECORD
from harness import Ranks
from runs import assert_error, cli, column, lines_of, train_arguments


def arguments(tokens: str, folder: Path, *callbacks: str, steps: int = 3) -> list[str]:
    named = ["--set", f"train.callbacks={json.dumps(callbacks)}", "--set", "plan.compare=false"]
    return train_arguments(tokens, folder, *named, "--set", "train.evaluate_every=2", steps=steps)


def diary(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "diary.jsonl").read_text().splitlines()]


def test_a_callback_hears_of_everything_once_and_cannot_change_records(ranks, tokens: str, tmp_path: Path) -> None:
    """On two ranks, of which the first calls it."""
    folder = tmp_path / "run"
    command = [*arguments(tokens, folder, "plugins:Diary"), "--grid", "data=2"]
    for (left,) in ranks(2).run(cli_as_rank, command):
        assert (left.code, left.err) == (0, "")
    losses, evaluated = column(folder, "step", "loss"), column(folder, "evaluation", "loss")
    assert RECORD == "checkpoint.json"  # what the diary looks for
    assert diary(folder) == [
        ["start", str(folder), 3],
        ["step", 1, losses[0]],
        ["step", 2, losses[1]],
        ["evaluation", 2, evaluated[0]],
        ["step", 3, losses[2]],
        ["evaluation", 3, evaluated[1]],
        ["checkpoint", 3, True],
        ["end", 3, "finished"],
    ]


def test_an_error_in_a_callback_ends_the_run_and_names_it(one: Ranks, tokens: str, tmp_path: Path) -> None:
    """The step is recorded first; the error at the end does not hide the first one."""
    folder = tmp_path / "run"
    (left,) = one.run(cli, *arguments(tokens, folder, "plugins:Broken", "plugins:Diary"))
    assert_error(left, "the callback plugins:Broken failed in on_step after step 2: KeyError: ", "plugins.py, line ")
    assert "correct it, or remove it from train.callbacks" in left.err
    assert column(folder, "step", "step") == [1, 2]
    assert lines_of(folder)[-1]["reason"].startswith("CallbackError: the callback plugins:Broken failed")
    (left,) = one.run(cli, *arguments(tokens, tmp_path / "other", "plugins:BrokenEnd", steps=1))
    assert_error(left, "the callback plugins:BrokenEnd failed in on_end after step 1: RuntimeError: 1 finished")
    assert lines_of(tmp_path / "other")[-1]["reason"] == "finished"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "plugins:Misspelt",
            "nothing calls plugins:Misspelt.on_steps (did you mean 'on_step'?); the methods are",
        ),
        ("plugins:nothing", "plugins:nothing is function, not a class; give package.module:Class"),
        ("plugins:Tower", "plugins:Tower has no method that is called; the methods are on_start, on_step"),
        ("plugins:Needy", "plugins:Needy cannot be made without arguments: "),
        ("absent_package:Class", "there is no module 'absent_package'"),
    ],
)
def test_what_is_no_callback_is_an_error_before_the_first_step(
    one: Ranks, tokens: str, tmp_path: Path, name: str, said: str
) -> None:
    (left,) = one.run(cli, *arguments(tokens, tmp_path / "run", name))
    assert_error(left, said)
    assert "step" not in [event["event"] for event in lines_of(tmp_path / "run")]

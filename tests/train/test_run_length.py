"""How long a run trains: epochs are counted in steps before it starts, and minutes end it on all ranks alike."""

from __future__ import annotations

import itertools
import time
from math import ceil
from pathlib import Path

import pytest
import torch.distributed as dist

from curves import config_of, write_texts
from fourfold.data.sampling import cut_windows
from fourfold.data.sources import prepare
from fourfold.data.token_files import TokenFile
from fourfold.data.tokenizer import load_tokenizer
from fourfold.environment import BEGAN, RESTARTED, command_began
from fourfold.grid import Shape
from fourfold.train import signals as stopping
from fourfold.train.config import TrainConfig, read_config
from fourfold.train.loop import Run
from harness import Ranks
from runs import SMALL, assert_error, cli, column, lines_of, train_arguments, trained

QUIET = ["--set", "plan.compare=false"]
MOMENT = "0.00001"
"""Minutes that are over before the first step."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = write_texts(tmp_path_factory.mktemp("data"))
    (texts.parent / "short.txt").write_text("a line of text\n" * 60)
    return str(prepare([texts.parent / "short.txt"], texts.parent / "texts.tokens", load_tokenizer("bytes")).path)


def epochs(data: str, out: Path, *more: str) -> list[str]:
    """Return the arguments of a run without --steps; SMALL has 4 rows of 12 tokens, and a tenth is held out."""
    return ["train", *SMALL, *QUIET, "--data", data, "--out", str(out), *more]


def steps_of(data: str, times: float) -> int:
    return ceil(times * cut_windows("data", TokenFile(Path(data)).tokens, 12, 0.1).train / 4)


@pytest.mark.slow
def test_epochs_become_steps_of_the_data(one: Ranks, tokens: str, tmp_path: Path) -> None:
    """Half an epoch first; a resumed run may have more of them, and steps of the command line end them."""
    folder, half, most = tmp_path / "run", steps_of(tokens, 0.5), steps_of(tokens, 0.6)
    assert 4 < half < most < 30
    (left,) = one.run(
        cli, *epochs(tokens, folder, "--epochs", "0.5", "--set", "optimizer.warmup=2", "--profile", str(half))
    )
    assert (left.code, left.err) == (0, "")
    assert f"{half} steps, which are 0.5 epochs\n" in left.out
    assert column(folder, "step", "step") == list(range(1, half + 1))
    assert column(folder, "step", "learning_rate")[-1] == pytest.approx(1e-4)  # the schedule ends with the epochs
    stored = read_config(folder / "config.toml")
    assert (stored.train.epochs, stored.train.steps, stored.optimizer.warmup) == (0.5, half, 2)
    (left,) = one.run(cli, "train", "--resume", str(folder))
    assert left.out.endswith(f"{folder} has reached step {half} of {half}; give more --epochs to continue\n")
    (left,) = one.run(cli, "train", "--resume", str(folder), "--epochs", "0.6")
    assert (left.code, left.err) == (0, "")
    assert column(folder, "step", "step")[-1] == most
    (left,) = one.run(cli, "train", "--resume", str(folder), "--steps", str(most + 1))
    assert (left.code, left.err) == (0, "")
    stored = read_config(folder / "config.toml")
    assert (stored.train.epochs, stored.train.steps) == (None, most + 1)


def test_the_printed_config_says_how_many_steps_epochs_are(one: Ranks, tokens: str, tmp_path: Path) -> None:
    """Also of text, which has to be prepared for that, and with a warm-up that fits a short run."""
    text = Path(tokens).parent / "short.txt"
    for data in (tokens, str(text)):
        (left,) = one.run(cli, *epochs(data, tmp_path / "run", "--epochs", "0.1", "--print-config"))
        assert (left.code, left.err) == (0, "")
        (tmp_path / "c.toml").write_text(left.out)
        config = read_config(tmp_path / "c.toml")
        assert config.train.steps == config.optimizer.warmup == steps_of(tokens, 0.1) < 10
    assert not (tmp_path / "run").exists()


def test_epochs_contradict_steps_and_profiles_of_later_steps(one: Ranks, tokens: str, tmp_path: Path) -> None:
    (left,) = one.run(cli, *epochs(tokens, tmp_path / "run", "--epochs", "1", "--steps", "4"))
    assert_error(left, "train.epochs=1.0 decides the number of steps", "train.steps=4", "give one of them")
    steps = steps_of(tokens, 1)
    (left,) = one.run(cli, *epochs(tokens, tmp_path / "run", "--epochs", "1", "--profile", str(steps + 1)))
    assert_error(left, f"--profile {steps + 1}: this run has train.steps={steps}")


def test_minutes_end_a_run_as_steps_do_and_it_goes_on(one: Ranks, tokens: str, tmp_path: Path) -> None:
    """With an evaluation, a checkpoint and exit code 0; each command has all its minutes; losses stay the same."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    (left,) = one.run(cli, *train_arguments(tokens, folder, *QUIET, "--minutes", MOMENT, steps=3))
    assert (left.code, left.err) == (0, "")
    goes_on = f"saved at step 1; to continue: fourfold train --resume {folder}\n"
    assert f"train.minutes={float(MOMENT):g} are over after step 1 of 3; {goes_on}" in left.out
    assert column(folder, "evaluation", "step") == column(folder, "saved", "step") == [1]
    assert lines_of(folder)[-1] == {"event": "end", "step": 1, "reason": "train.minutes are over"}
    (left,) = one.run(cli, "train", "--resume", str(folder))
    assert (left.code, left.err) == (0, "")
    assert column(folder, "step", "step") == [1, 2]
    (left,) = one.run(cli, "train", "--resume", str(folder), "--minutes", "10")
    assert (left.code, left.err) == (0, "")
    assert lines_of(folder)[-1] == {"event": "end", "step": 3, "reason": "finished"}
    (left,) = one.run(cli, *train_arguments(tokens, whole, *QUIET, steps=3))
    assert column(folder, "step", "loss") == column(whole, "step", "loss")


def ends_by_one_clock(config: TrainConfig, folder: Path) -> None:
    """A job: a run of which only rank 1 finds that its time is over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping, "ASK_EVERY_SECONDS", 0.01)
        if dist.get_rank() == 0:
            patch.setattr(Run, "_is_late", False)  # a clock that stands still
        trained(config, folder)


def test_all_ranks_end_when_the_time_of_one_is_over(ranks, tokens: str, tmp_path: Path) -> None:
    changes = {"train.minutes": 0.1 / 60, "data.sources": [{"path": tokens}], "model.layers": 1}
    config = config_of("gpt-tiny", "fp32", 5000, tmp_path, Shape(z=2), {**changes, "plan.compare": False})
    ranks(2).run(ends_by_one_clock, config, tmp_path / "run")
    last = lines_of(tmp_path / "run")[-1]
    assert last["reason"] == "train.minutes are over"
    assert 1 <= last["step"] < 5000
    assert column(tmp_path / "run", "saved", "step")[-1] == column(tmp_path / "run", "evaluation", "step")[-1]
    assert column(tmp_path / "run", "evaluation", "step")[-1] == last["step"]


def test_time_counts_from_the_launcher_and_without_one_from_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarted ranks do not begin anew, and a shell that is hours old does not count."""
    for name in (BEGAN, RESTARTED):
        monkeypatch.delenv(name, raising=False)
    before = time.monotonic()
    assert before <= command_began() <= time.monotonic()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # torchrun is this process's parent, then
    assert 0 < command_began() < before
    assert before - command_began() < 24 * 3600, "the age of the parent, not that of the machine"
    monkeypatch.setenv(BEGAN, "1000.5")
    assert command_began() == 1000.5


def goes_on_when_the_clock_jumps(config: TrainConfig, folder: Path) -> None:
    """A job: a run of which rank 1 has its wall clock set forward by 3 hours."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stopping, "ASK_EVERY_SECONDS", 0.001)
        if dist.get_rank() == 1:
            now, calls = time.time, itertools.count()
            patch.setattr(time, "time", lambda: now() + (3 * 3600 if next(calls) else 0))
        trained(config, folder)


def test_a_wall_clock_that_jumps_does_not_end_a_run(ranks, tokens: str, tmp_path: Path) -> None:
    changes = {"train.minutes": 60.0, "data.sources": [{"path": tokens}], "model.layers": 1}
    config = config_of("gpt-tiny", "fp32", 4, tmp_path, Shape(z=2), {**changes, "plan.compare": False})
    ranks(2).run(goes_on_when_the_clock_jumps, config, tmp_path / "run")
    assert lines_of(tmp_path / "run")[-1] == {"event": "end", "step": 4, "reason": "finished"}

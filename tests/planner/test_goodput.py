"""Goodput: the equations beside a simulation and published approximations, and what `fourfold plan` shows of it."""

from __future__ import annotations

import json
import random
from math import ceil, sqrt
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.commands import plan, plan_numbers
from fourfold.models.hugging_face import READERS
from fourfold.planner.goodput import (
    AGREE_SECONDS,
    COPY_BYTES_PER_SECOND,
    DEVICE_HOURS,
    MOST_SECONDS,
    RESTART_SECONDS,
    STATE_BYTES,
    STORAGE_BYTES_PER_SECOND,
    FailureRates,
    Interruptions,
)


def job(mean: float, restart: float, stop: float, write: float) -> Interruptions:
    return Interruptions(mean, restart, stop, write, 0)


def simulated(found: Interruptions, interval: float, *, checkpoints: int) -> float:
    """Goodput of a run that is followed event by event: train, stop for a save, write beside the next interval."""
    draw = random.Random(0)
    now, fails = 0.0, draw.expovariate(1 / found.between_failures)
    saved, trained, writes_until = 0, 0, 0.0  # intervals in the newest complete checkpoint, those done, end of a write
    while saved < checkpoints:
        # the events of the coming interval in their order: the write ends, training and its save end
        complete = writes_until if trained > saved else None
        end = now + interval + found.stop
        if fails < end:
            if complete is not None and complete <= fails:
                saved += 1
            now = fails
            while (fails := now + draw.expovariate(1 / found.between_failures)) < now + found.restart:
                now = fails
            now += found.restart
            trained = saved
            continue
        saved, now, trained = trained, end, trained + 1
        writes_until = now + found.write
    return interval * checkpoints / now


@pytest.mark.parametrize(
    ("found", "interval"),
    [
        (job(10_000, 600, 5, 0), 900),
        (job(3_000, 600, 20, 200), 400),  # a failure every few checkpoints, and long writes
        (job(1_000, 300, 50, 250), 300),  # hardly any progress
        (job(50_000, 0, 1, 100), 150),
    ],
    ids=["usual", "often", "hardly", "rare"],
)
def test_the_equation_is_what_a_simulation_finds(found: Interruptions, interval: float) -> None:
    """Over 20,000 checkpoints the simulation's own error is below one percent."""
    assert simulated(found, interval, checkpoints=20_000) == pytest.approx(found.goodput(interval), rel=0.02)


@pytest.mark.parametrize("stop", [1e-6, 1.0, 60.0, 1_000.0, 30_000.0])
def test_no_other_interval_has_more_goodput(stop: float) -> None:
    found = job(10_000, 600, stop, 0)
    best = found.goodput(found.optimum)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert found.goodput(factor * found.optimum) < best


def test_the_optimum_begins_with_the_formulas_of_young_and_daly() -> None:
    mean = 10_000.0
    for stop, apart in ((0.01, 1e-3), (1.0, 1e-2)):
        assert job(mean, 0, stop, 0).optimum == pytest.approx(sqrt(2 * stop * mean), rel=apart)
    stop = 500.0  # here the first term is 11% off, and Daly's formula is not
    half = stop / (2 * mean)
    daly = sqrt(2 * stop * mean) * (1 + sqrt(half) / 3 + half / 9) - stop
    assert job(mean, 0, stop, 0).optimum == pytest.approx(daly, rel=1e-3)
    assert sqrt(2 * stop * mean) > 1.1 * daly


def test_saves_wait_for_the_one_before_them() -> None:
    """Storage that is slower than the best interval decides it."""
    slow = job(10_000, 600, 0.1, 300)
    assert slow.optimum == 300
    assert slow.goodput(100) < slow.goodput(300)
    assert job(10_000, 600, 0.0, 0.0).optimum == 0  # and with saves that cost nothing there is no best one


def test_the_rates_are_those_of_the_job() -> None:
    """Worked by hand: 8 G parameters on 64 devices, 12 bytes each, 1.5 GB a device."""
    found = FailureRates(device_hours=64_000, storage_bytes_per_second=32e9).job(8_000_000_000, 64)
    assert found.between_failures == 1000 * 3600
    assert found.stop == pytest.approx(1 + 1.5e9 / 5e9)
    assert found.write == pytest.approx(96e9 / 32e9)
    assert FailureRates(stop_seconds=7).job(10**9, 8).stop == 7


def test_llama_3_trains_more_than_nine_tenths_of_the_time() -> None:
    """As its paper says, with the failures of its paper and the assumptions that are ours."""
    found = FailureRates().job(405_000_000_000, 16_384)
    assert found.between_failures == pytest.approx(3.05 * 3600, rel=0.01)
    assert 0.90 < found.plan(6.0)["goodput"] < 0.96


def test_the_recommended_interval_is_whole_steps_and_at_most_half_an_hour() -> None:
    small = FailureRates().job(10**9, 8)
    assert small.optimum > MOST_SECONDS
    assert small.plan(7.0) == pytest.approx(
        {"goodput": small.goodput(257 * 7.0), "interval_seconds": 257 * 7.0, "interval_steps": 257}
    )
    assert small.plan(4_000.0)["interval_steps"] == 1
    with pytest.raises(ValueError, match=r"fails every 35 s, a restart takes 600 s .* no progress"):
        FailureRates(device_hours=10).job(10**9, 1024).plan(1.0)


@pytest.mark.parametrize("step", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("stop", [0.0, 5.0])
@pytest.mark.parametrize("mean", [10.0, 60.0, 100.0, 130.0, 1000.0])
def test_what_is_refused_without_seconds_is_refused_with_any(mean: float, stop: float, step: float) -> None:
    """No step has more goodput than the best interval, so nothing is refused early that a plan would accept."""
    for write in (0.0, 50.0):
        job = Interruptions(mean, 500.0, stop, write, 10**9)
        try:
            job.require_progress()
        except ValueError as early:
            with pytest.raises(ValueError, match="it would make no progress") as late:
                job.plan(step)
            assert str(early) == str(late.value)
        else:
            assert mean >= 100


PLAN = ["plan", "--model", "gpt-tiny", "--machine", "laptop", "--devices", "4", "--batch-tokens", "2k"]
STATED = ["--mtbf", "40", "--restart", "100", "--checkpoint", "2", "--storage", "0.5"]


def test_a_plan_counts_failures_and_its_config_has_the_best_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, page = tmp_path / "run.toml", tmp_path / "plan.html"
    asked = [*PLAN, *STATED, "--tokens", "1G", "--price", "2"]
    assert main([*asked, "--top", "2", "--json", "-", "--config", str(config), "--html", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    failures, best = found["failures"], found["grids"][0]
    assert (failures["between_failures_seconds"], failures["restart_seconds"]) == (36_000, 100)
    assert (failures["stop_seconds"], failures["checkpoint_bytes"]) == (2, 12 * found["model"]["parameters"])
    assert failures["write_seconds"] == pytest.approx(failures["checkpoint_bytes"] / 0.5e9)
    job = Interruptions(36_000, 100, 2, failures["write_seconds"], failures["checkpoint_bytes"])
    assert best["goodput"] == pytest.approx(job.goodput(best["interval_steps"] * best["seconds"]))
    training, steps = best["training"], ceil(1e9 / found["batch_tokens"])
    assert training["undisturbed_hours"] == pytest.approx(steps * best["seconds"] / 3600)
    assert training["hours"] == pytest.approx(training["undisturbed_hours"] / best["goodput"])
    assert training["cost"] == pytest.approx(2 * 4 * training["hours"])
    minutes = best["interval_seconds"] / 60
    assert minutes == pytest.approx(sqrt(2 * 2 * 36_000) / 60, rel=0.05)
    assert f"\nminutes = {float(f'{minutes:.3g}')}\n" in config.read_text()
    assert f"The best interval by the plan, {best['interval_steps']:,} steps." in config.read_text()
    drawn = page.read_text()
    assert "Goodput" in drawn and "a device fails once in 40 hours on average (--mtbf)" in drawn
    assert main([*asked, "--top", "1"]) == 0
    said = capsys.readouterr().out
    assert f"Goodput {best['goodput']:.1%} with failures and checkpoints; without them it would be" in said
    assert "a save stops training for 2 s (--checkpoint)" in said and "are then written at 0.5 GB/s (--storage)" in said


def test_a_plan_of_one_step_has_no_goodput_unless_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--top", "1"]) == 0
    assert "Goodput" not in capsys.readouterr().out
    assert main([*PLAN, "--top", "1", "--mtbf", "50000"]) == 0
    said = capsys.readouterr().out
    assert "Goodput 9" in said and "419 interruptions in 54 days" in said


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--mtbf", "0"], "--mtbf 0: it must be above 0 hours"),
        (["--mtbf", "inf"], "argument --mtbf: 'inf' is not a number"),
        (["--storage", "-1"], "--storage -1: it must be above 0 GB/s"),
        (["--mtbf", "0.01", "--restart", "900"], "it would make no progress"),
    ],
)
def test_rates_that_make_no_sense_are_refused(given: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if said.startswith("argument "):  # options are refused before anything is imported
        with pytest.raises(SystemExit, match="2"):
            main([*PLAN, *given])
    else:
        assert main([*PLAN, *given]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def my_model(grid: object, policy: object) -> None:
    pytest.fail(f"the model was built on {grid} with {policy}")


def test_a_hopeless_job_is_refused_before_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def never(*_: object, **__: object) -> None:
        pytest.fail("the search was called")

    for command, name in ((plan, "search"), (plan, "search_built"), (plan_numbers, "search")):
        monkeypatch.setattr(command, name, never)
    hopeless = ["--mtbf", "0.01", "--restart", "900"]
    module = [*PLAN, *hopeless, "--seq", "128"]
    module[2] = "test_goodput:my_model"
    for asked in ([*PLAN, *hopeless], module, [*PLAN, *hopeless, "--devices", "2..4"]):
        assert main(asked) == 1
        assert "it would make no progress" in " ".join(capsys.readouterr().err.split())


def test_the_help_names_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """Options are parsed without torch, so the help cannot read the constants."""
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert f"default: {DEVICE_HOURS:.0f}, the rate of Llama 3" in text
    assert f"default: {RESTART_SECONDS:.0f}, an estimate" in text
    assert f"default: {AGREE_SECONDS:g} s, and the copy of a device's part ({STATE_BYTES} bytes per parameter" in text
    assert f"to its host at {COPY_BYTES_PER_SECOND / 1e9:g} GB/s" in text
    assert f"default: {STORAGE_BYTES_PER_SECOND / 1e9:.2f} for each device" in text
    assert f"train as it is ({', '.join(READERS)})" in text

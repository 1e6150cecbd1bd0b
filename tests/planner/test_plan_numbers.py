"""`fourfold plan --devices A..B`: one plan for each number of devices, what more of them gain, and where to stop."""

from __future__ import annotations

import json

import pytest

from fourfold.cli import main
from fourfold.commands.plan_numbers import advice

PLAN = ["plan", "--model", "gpt-tiny", "--machine", "laptop", "--batch-tokens", "4k"]


def test_every_number_has_the_plan_that_it_has_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--devices", "1..3", "--tokens", "10G", "--price", "2", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["devices"] for one in found["numbers"]] == [1, 2, 3]
    assert found["numbers"][0]["efficiency"] == 1.0
    for one in found["numbers"]:
        assert one["tokens_per_second"] == pytest.approx(found["batch_tokens"] / one["seconds"])
        assert one["cost"] == pytest.approx(2 * one["devices"] * one["hours"])
        assert one["hours"] == pytest.approx(one["undisturbed_hours"] / one["goodput"])
    assert main([*PLAN[:-1], str(found["batch_tokens"]), "--devices", "2", "--top", "1", "--json", "-"]) == 0
    alone = json.loads(capsys.readouterr().out)["grids"][0]
    assert alone["grid"] == found["numbers"][1]["grid"]
    assert alone["seconds"] == pytest.approx(found["numbers"][1]["seconds"])


def test_the_table_has_a_line_for_each_number_and_says_where_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--devices", "1..2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[2:5]] == ["devices", "1", "2"]
    assert said[6].startswith(("- stop at", "- up to"))
    assert "at worst" in said[2]
    assert said[7].startswith("- each grid is the one that loses least if the machine is not as its file says")
    assert said[8].startswith("- Estimates or fitted, which fourfold calibrate would measure: ")
    assert main([*PLAN, "--devices", "1..2", "--risk", "fastest"]) == 0
    said = capsys.readouterr().out
    assert "at worst" not in said and "loses least" not in said


def test_every_number_has_the_band_that_its_plan_has_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--devices", "2..2", "--json", "-"]) == 0
    [one] = json.loads(capsys.readouterr().out)["numbers"]
    assert main([*PLAN, "--devices", "2", "--top", "1", "--json", "-"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert one["band_seconds"] == pytest.approx(alone["robust"]["band_seconds"])
    low, high = one["band_seconds"]
    assert low <= one["seconds"] < high


def plans(*seconds: float) -> list[dict[str, float]]:
    return [{"devices": 64 << place, "seconds": each, "goodput": 1.0} for place, each in enumerate(seconds)]


def test_more_devices_are_worth_it_while_they_bring_most_of_their_factor() -> None:
    assert list(advice(plans(8))) == [], "one number of devices cannot say whether more are worth it"
    assert list(advice(plans(8, 4.2, 2.3))) == [
        "up to 256 devices, more of them are worth it: training becomes faster nearly as they do"
    ]
    assert list(advice(plans(8, 4.2, 3.0, 1.5))) == [
        "stop at 128 devices: 256 are 1.40 times as fast, less than 80% of 2"
    ]


def test_failures_count_where_to_stop() -> None:
    found = plans(8, 4.2, 2.3)
    found[2]["goodput"] = 0.8  # 256 devices are 1.83 times as fast as 128, but fail often
    assert list(advice(found)) == ["stop at 128 devices: 256 are 1.46 times as fast, less than 80% of 2"]
    dear = [{**one, "cost": cost, "hours": 24.0} for one, cost in zip(found, (300, 200, 250), strict=True)]
    assert list(advice(dear))[1] == "the cheapest is 128 devices: 200 in 1 days; evaluation comes on top"


def test_more_devices_have_less_goodput(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--devices", "1..2", "--tokens", "10G", "--mtbf", "10", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["numbers"][0]["goodput"] > found["numbers"][1]["goodput"]
    assert found["assumptions"][0] == "a device fails once in 10 hours on average (--mtbf)"


@pytest.mark.slow
def test_where_nothing_fits_the_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--machine", "perlmutter", "--devices", "1..4", "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)["numbers"]
    assert "refused" in numbers[0]
    assert numbers[0]["refused_short"] == "too little memory"
    assert "refused" not in numbers[-1]


def test_a_number_that_divides_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN[:-1], "512", "--devices", "4..7"]) == 0
    said = capsys.readouterr()
    assert "7 devices: no grid cuts batch and model" in said.err
    line = next(line for line in said.out.splitlines() if line.startswith("7 "))
    assert "no grid cuts batch and model" in line
    assert "- 7 devices: no grid of 7 devices cuts this model and 4 rows of 128 tokens evenly: " in said.out
    assert "7 places do not divide a batch of 4 rows" in said.out
    assert main([*PLAN[:-1], "512", "--devices", "7..7"]) == 1
    assert "gpt-tiny has no plan for any of these numbers of devices; for 7: no grid of 7" in capsys.readouterr().err


def test_a_number_that_fails_too_often_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--devices", "1..4", "--mtbf", "0.1", "--restart", "900", "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)["numbers"]
    assert [one.get("refused_short") for one in numbers] == [None, "fails too often", "fails too often"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--html", "plan.html"], "--html shows one plan; give one number of --devices"),
        (["--why", "x=4"], "--why shows one plan; give one number of --devices"),
    ],
)
def test_what_shows_one_plan_needs_one_number(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PLAN, "--devices", "4..8", *options]) == 1
    assert said in capsys.readouterr().err


def test_a_range_that_goes_down_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*PLAN, "--devices", "8..4"])
    assert "'8..4' is not a range of devices" in capsys.readouterr().err

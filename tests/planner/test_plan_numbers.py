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
    assert main([*PLAN[:-1], str(found["batch_tokens"]), "--devices", "2", "--top", "1", "--json", "-"]) == 0
    alone = json.loads(capsys.readouterr().out)["grids"][0]
    assert alone["grid"] == found["numbers"][1]["grid"]
    assert alone["seconds"] == pytest.approx(found["numbers"][1]["seconds"])


def test_the_table_has_a_line_for_each_number_and_says_where_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--devices", "1..2"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[2:5]] == ["devices", "1", "2"]
    assert said[6].startswith(("- stop at", "- up to"))


def plans(*seconds: float) -> list[dict[str, float]]:
    return [{"devices": 64 << place, "seconds": each} for place, each in enumerate(seconds)]


def test_more_devices_are_worth_it_while_they_bring_most_of_their_factor() -> None:
    assert list(advice(plans(8, 4.2, 2.3))) == [
        "up to 256 devices, more of them are worth it: the step becomes faster nearly as they do"
    ]
    assert list(advice(plans(8, 4.2, 3.0, 1.5))) == [
        "stop at 128 devices: 256 are 1.40 times as fast, less than 80% of 2"
    ]


def test_where_nothing_fits_the_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3-8b", "--machine", "perlmutter", "--devices", "1..4", "--json", "-"]) == 0
    numbers = json.loads(capsys.readouterr().out)["numbers"]
    assert "refused" in numbers[0]
    assert "refused" not in numbers[-1]


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

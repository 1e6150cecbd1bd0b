"""`fourfold schedule show | find | check`: what they print, and how they refuse."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from fourfold import cli
from fourfold.schedule.named import named
from fourfold.schedule.text import from_csv, to_csv
from pages import ROOT, blocks_of, commands_of


def run(words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    assert cli.main(["schedule", *shlex.split(words)]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_show_draws(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show zb-h1 --pipe 2 --micro 2", capsys).splitlines() == [
        "zb-h1: 2 ranks, 2 stages, 2 micro-batches",
        "rank 0 F0 F1 .  B0 W0 B1 W1",
        "rank 1 .  F0 B0 F1 B1 W0 W1",
        "F3 is F for micro-batch 3; . is a bubble; a slot is 1 s",
        "makespan 7 s; a rank is idle for 1 s (14.3%); micro-batches kept by rank: 2, 2",
    ]


def test_show_takes_the_fewest_chunks_that_a_schedule_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("show interleaved --pipe 2 --micro 4 --csv", capsys) == to_csv(named("interleaved", 2, 2, 4))
    assert run("show blocks:2 --pipe 2 --micro 4 --csv", capsys) == to_csv(named("blocks:2", 2, 1, 4))
    assert run("show interleaved --chunks 4 --pipe 2 --micro 4 --csv", capsys) == to_csv(named("interleaved", 2, 4, 4))


def test_times_come_from_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert "makespan 99 s" in run("show 1f1b --pipe 4 --micro 8 --seconds 3,3,3", capsys)
    assert "makespan 18 s; a rank is idle for 6 to 12 s" in run(
        "show 1f1b --pipe 2 --micro 1 --seconds 1,2,3/2,4,6", capsys
    )
    assert "makespan 6.5 s" in run("show zb-h1 --pipe 2 --micro 1 --hop 0.75", capsys)


def test_find_lists_what_it_tried_and_draws_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run("find --pipe 4 --micro 16 --memory 4", capsys).splitlines()
    assert lines[0].split() == ["placement", "chunks", "makespan", "idle", "kept", "schedule"]
    tried = [line.split()[:5] for line in lines[1:6]]
    assert [row[:2] for row in tried] == [["loop", "1"], ["loop", "2"], ["wave", "2"], ["loop", "4"], ["wave", "4"]]
    assert {row[4] for row in tried} == {"4"}
    assert tried[2][3] == "3.0%"
    assert tried[4][3] == "1.5%"
    assert lines[7].startswith("wave of 4, found: admission 4")
    assert lines[8].startswith("rank 0 0F0 ")
    assert "(1.5%); micro-batches kept by rank: 4, 4, 4, 4" in lines[-1]


def test_find_takes_uneven_stages(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = "find --pipe 2 --micro 4 --seconds 1,1,1/2,2,1/1,1,1/1,1,1 --hop 0.1 --memory 3"
    both = run(asked, capsys)
    assert [line.split()[:2] for line in both.splitlines()[1:3]] == [["loop", "2"], ["wave", "2"]]
    alone = run(f"{asked} --placement wave", capsys)
    assert alone.startswith("wave of 2, ")
    path = tmp_path / "found.csv"
    path.write_text(run(f"{asked} --placement wave --csv", capsys))
    found = from_csv(path.read_text())
    found.check()
    assert found.placement == (0, 1, 1, 0)
    checked = run(f"check {path} --seconds 1,1,1/2,2,1/1,1,1/1,1,1 --hop 0.1", capsys)
    assert checked.splitlines()[-1] == alone.splitlines()[-1]


def test_find_with_one_placement_has_no_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("find --pipe 2 --chunks 1 --micro 2", capsys).startswith("loop of 1, ")


def test_check_draws_what_is_valid(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(to_csv(named("1f1b", 2, 1, 3)))
    said = run(f"check {path} --seconds 2,2,2", capsys)
    assert said.startswith(f"{path} is valid: 2 ranks, 2 stages, 3 micro-batches\nrank 0 F0 ")
    assert "makespan 24 s" in said


def test_check_refuses_a_deadlock(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert run(f"check {path}", capsys, 1) == (
        f"fourfold: error: {path}: deadlock: rank 0 waits in BW(0, 0) for B(1, 0), which rank 1 runs after F(1, 1); "
        "rank 1 waits in F(1, 1) for F(0, 1), which rank 0 runs after BW(0, 0). Move F(0, 1) before BW(0, 0) in the "
        "order of rank 0\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "show interleaved --chunks 1 --pipe 2 --micro 2",
            "interleaved with chunks=1: it needs chunks=2 or more; with",
        ),
        (
            "show 1f1b --pipe 2 --micro 2 --seconds 1,1,1/1,1,1/1,1,1",
            "--seconds has 3 stages, but there are 2; give F,B,W",
        ),
        (
            "find --pipe 3 --micro 2 --seconds 1,1,1/1,1,1",
            "--seconds has 2 stages, but there are 3; give F,B,W of each",
        ),
        ("find --pipe 2 --micro 2 --memory 0.5", "memory=0.5: rank 0 keeps 1 for one micro-batch, so no schedule fits"),
        ("check absent.csv", "absent.csv: No such file or directory; check the path, or make its folder first"),
        ("check binary.csv", "binary.csv is not a text file; give a CSV file with cells such as 0F0"),
        (
            "check other.csv",
            "other.csv: rank 0, cell 1: 'name' is no action; write stage, kind and micro-batch, such as",
        ),
    ],
)
def test_errors_have_a_way_out(
    words: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    Path("other.csv").write_text("name,value\n")
    found = run(words, capsys, 1)
    assert found.startswith(f"fourfold: error: {said}")
    assert len(found.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "show 1f1c --pipe 2 --micro 2",
            "there is no schedule '1f1c' (did you mean '1f1b'?); choose from gpipe, 1f1b, ",
        ),
        (
            "show blocks --pipe 2 --micro 2",
            "choose from gpipe, 1f1b, interleaved, looped-bfs, zb-h1, v-half, zb-v, blocks:u with",
        ),
        ("show 1f1b --pipe 0 --micro 2", "argument --pipe: 0 is less than 1; give 1 or more"),
        ("show 1f1b --pipe two --micro 2", "argument --pipe: 'two' is not a whole number; write for example 8"),
        ("show 1f1b --pipe 2", "the following arguments are required: --micro"),
        ("show 1f1b --pipe 2 --micro 2 --hop=-1", "argument --hop: -1 is not a duration; give 0 or more"),
        ("find --pipe 2 --micro 2 --seconds 1,1", "'1,1' is not seconds of F, B and W; write for example 1,1.2,0.9"),
        ("find --pipe 2 --micro 2 --seconds 1,1,x", "'1,1,x' is not seconds of F, B and W"),
        ("find --pipe 2 --micro 2 --seconds 1,1,-1", "'1,1,-1' is not seconds of F, B and W"),
        (
            "find --pipe 2 --micro 2 --placement wav",
            "invalid value 'wav' (did you mean 'wave'?); choose from loop, wave",
        ),
        ("chek mine.csv", "there is no command 'chek' (did you mean 'check'?); choose from show, find, check"),
    ],
)
def test_options_that_make_no_sense_end_with_2(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["schedule", *shlex.split(words)])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


def test_a_terminal_gets_colours_and_its_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"COLUMNS": "40", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    said = run("show 1f1b --pipe 2 --micro 20", capsys)
    assert "\x1b[" in said
    lines = re.sub(r"\x1b\[[\d;]*m", "", said).splitlines()
    assert len(lines[1]) <= 40
    assert lines[1].startswith("rank 0 F0")
    assert "cut after 8 of 63 slots" in said
    monkeypatch.setattr("fourfold.commands.schedule.find_spec", lambda _: None)
    assert "\x1b[" not in run("show 1f1b --pipe 2 --micro 20", capsys)


def test_the_page_shows_what_the_commands_print(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text block of docs/pipeline.md is the output of the commands before it that write no file."""
    monkeypatch.chdir(tmp_path)
    Path("stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    page = list(blocks_of(ROOT / "docs" / "pipeline.md"))
    compared = 0
    for block, shown in pairwise(page):
        if (block.language, shown.language) == ("bash", "text"):
            commands = [command for _, command in commands_of(block) if " > " not in command]
            fails = [command.endswith("# fails") for command in commands]
            words = [command.partition("  #")[0].removeprefix("fourfold schedule ") for command in commands]
            said = "\n".join(run(each, capsys, int(fail)) for each, fail in zip(words, fails, strict=True))
            assert shown.text == said, block.line
            compared += 1
    assert compared == 8


def test_no_torch_is_imported() -> None:
    code = (
        "import sys\nfrom fourfold.cli import main\n"
        "assert main(['schedule', 'find', '--pipe', '2', '--micro', '2']) == 0\n"
        "assert main(['schedule', 'show', 'v-half', '--pipe', '2', '--micro', '2', '--csv']) == 0\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)

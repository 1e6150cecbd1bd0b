"""The tour of `fourfold demo`: what it shows is what it runs, and how it ends. soak_demo.py walks it for real."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from fourfold import cli
from fourfold.commands import demo
from fourfold.train.config import read_config

OUT = "the tour"
"""A folder whose name a shell must be told of."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, ...]]]:
    """The commands that were run, none of them really."""
    found: list[tuple[str, ...]] = []
    replace(monkeypatch, lambda command: found.append(tuple(command)) or 0)
    yield found


def replace(monkeypatch: pytest.MonkeyPatch, run: Callable[[Sequence[str]], int]) -> None:
    monkeypatch.setattr(demo, "run", run)


def shown(text: str) -> list[tuple[str, ...]]:
    words = [shlex.split(line.removeprefix("$ ")) for line in text.splitlines() if line.startswith("$ ")]
    assert all(first == "fourfold" for first, *_ in words)
    return [tuple(rest) for _, *rest in words]


@pytest.mark.parametrize("options", [[], ["--quick"]], ids=["full", "quick"])
def test_what_is_shown_is_what_runs_in_order(options: list[str], ran: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--out", OUT, *options]) == 0
    text = capsys.readouterr().out
    assert shown(text) == ran
    assert [command[0] for command in ran] == ["plan", "train", "report", "train", "report", "export", "sample"]
    assert [line for line in text.splitlines() if " of 5: " in line] == [
        "1 of 5: Plan",
        "2 of 5: Train",
        "3 of 5: Report",
        "4 of 5: Resume on another grid",
        "5 of 5: Export, and let it write",
    ]
    for command in ran:
        assert f"$ {shlex.join(['fourfold', *command])}\n" in text
        cli.parser().parse_args(command)  # a command that fourfold does not know exits here
    assert str(Path(OUT, "run", "report.html")) in text.splitlines()[-1]


def test_the_run_goes_on_beyond_its_steps_on_another_grid(ran: list) -> None:
    """And the config that it trains is one."""
    assert cli.main(["demo", "--out", OUT]) == 0
    _, first, _, second, *_ = (cli.parser().parse_args(command) for command in ran)
    config = read_config(first.config)
    assert (config.model.name, config.model.layers, config.train.steps) == (
        "llama-tiny",
        demo.FULL.layers,
        demo.FULL.first,
    )
    assert second.resume == Path(first.out)
    assert second.steps > config.train.steps
    assert first.grid != second.grid
    assert config.optimizer.schedule == "constant"  # whatever the number of steps, the rate does not jump there


def test_by_default_a_folder_of_its_own(ran: list) -> None:
    assert cli.main(["demo"]) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("demo-20")
    assert ran[2] == ("report", str(folder / "run"))


@pytest.mark.parametrize(("code", "left"), [(3, 3), (-signal.SIGKILL, 137)])
def test_a_command_that_fails_ends_the_tour(
    code: int, left: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(monkeypatch, lambda command: code if command[0] == "report" else 0)
    assert cli.main(["demo", "--out", OUT]) == left
    said = capsys.readouterr()
    assert [command[0] for command in shown(said.out)] == ["plan", "train", "report"]
    assert "What next" not in said.out
    assert said.err.splitlines()[-2:] == [
        f"fourfold: the tour stops: exit code {left}; run the command yourself:",
        f"  fourfold report '{OUT}/run'",
    ]


@pytest.mark.parametrize("where", ["here", "there"])
def test_an_interrupt_ends_it_quietly(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(command: Sequence[str]) -> int:
        if command[0] == "train" and where == "here":
            raise KeyboardInterrupt
        return demo.INTERRUPTED if command[0] == "train" else 0

    replace(monkeypatch, interrupted)
    assert cli.main(["demo", "--out", OUT]) == 130
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"The tour ends here. Its files are in {OUT}."
    assert said.err == ""


def test_a_command_runs_as_a_process_that_writes_where_we_write(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.run(["--version"]) == 0
    assert capfd.readouterr().out.startswith("fourfold ")
    assert demo.run(["no-such-command"]) == 2
    assert "there is no command" in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_tour_alone_ends_its_command(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "sleeps"
    program.write_text("#!/bin/sh\necho $$ > pid\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(program))
    monkeypatch.setattr(demo, "GRACE_SECONDS", 0.1)
    before = signal.getsignal(number)

    def send() -> None:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().strip():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), demo.signals_interrupt():
        demo.run(["train"])
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert signal.getsignal(number) is before


def test_it_pauses_before_every_step_but_the_first(
    ran: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr("builtins.input", lambda _: asked.append(len(ran)))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["demo", "--out", "one", "--pause"]) == 0
    assert asked == [1, 2, 3, 5]
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    assert cli.main(["demo", "--out", "two", "--pause"]) == 0
    assert asked == [1, 2, 3, 5]
    assert "--pause needs a terminal" in capsys.readouterr().err


def test_end_of_input_ends_it_too(
    ran: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ends(_: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", ends)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert cli.main(["demo", "--out", OUT, "--pause"]) == 130
    assert [command[0] for command in ran] == ["plan"]
    assert "Its files are in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        (["plotly"], "the tour needs plotly: pip install 'fourfold[report]'"),
        (["safetensors", "plotly"], "the tour needs safetensors and plotly: pip install 'fourfold[train,report]'"),
    ],
)
def test_what_is_not_installed_is_said_before_it_begins(
    missing: list[str], said: str, ran: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in missing else name)
    assert cli.main(["demo", "--out", OUT]) == 1
    assert said in capsys.readouterr().err
    assert ran == []
    assert not Path(OUT).exists()


def test_neither_a_folder_with_something_in_it_nor_a_job(
    ran: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(OUT).mkdir()
    assert cli.main(["demo", "--out", OUT]) == 0  # an empty one will do
    ran.clear()
    assert cli.main(["demo", "--out", OUT]) == 1
    assert f"{OUT} already exists; give --out a new" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="outside of torchrun"):
        demo.check(Path("other"))
    assert ran == []


def test_the_losses_before_and_after_the_change_of_grids(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert demo.seam(metrics, 2) == ""
    lines = [f'{{"event": "step", "step": {step}, "loss": {20 - step}}}' for step in range(1, 16)]
    metrics.write_text("\n".join([*lines[:12], '{"event": "resumed", "step": 12}', *lines[12:]]))
    said = "Loss over the last 10 steps on 4 ranks: 12.5000; over the first 3 on 2: 6.0000. It began at 19.0000."
    assert demo.seam(metrics, 12) == said


def test_make_demo_is_this_tour() -> None:
    root = Path(__file__).parents[2]
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", "--old-file=.venv/installed", "demo"]
    left = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True, timeout=30)
    assert left.stdout.splitlines()[-1].endswith("/fourfold demo")

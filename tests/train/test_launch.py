"""Nobody is left behind: ranks end with their launcher, however and whenever it ends, and so do its temporary files.

The launchers are forked, so that a test need not import torch. Their ranks are processes as users have them, except
that they run another program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import warm
from fourfold import cli
from fourfold.train import launch as launching
from fourfold.train.signals import CTRL_C_HEARD
from fourfold.watch.processes import ProcessState, process_state
from runs import alive, needs_proc

pytestmark = needs_proc

RANK = """
import os, signal, sys, time
from fourfold.environment import end_with_launcher
{early}
end_with_launcher({launcher})
from pathlib import Path
rank = Path(sys.argv[1], os.environ["RANK"])
def stop(number, frame):
    rank.with_suffix(".signal").write_text(str(number))
    if {deaf}:
        return
    sys.exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, stop)
rank.with_suffix(".new").write_text(str(os.getpid()))
rank.with_suffix(".new").rename(rank)
while True:
    time.sleep(0.1)
"""


class Policy(launching.RestartPolicy):
    def left_behind(self) -> str:
        return "step 7 is not saved"


def launcher(folder: str, ranks: int, scratch: str, early: str, deaf: bool) -> int:
    """A program: a launcher whose ranks write their process ids, wait for a signal, and note it."""
    launching.tempfile.tempdir = scratch
    launching.RANK = RANK.format(early=early, deaf=deaf, launcher=os.getpid())
    return launching.launch(ranks, [folder], sys.stderr, policy=Policy())


def torchrun(folder: str, ranks: int, scratch: str, *_: object) -> int:
    """A program: torchrun with such ranks."""
    from torch.distributed.run import main

    script = Path(scratch, "rank.py")
    script.write_text(RANK.format(early="", deaf=False, launcher=None))
    main(["--rdzv-backend", "fourfold", "--nproc-per-node", str(ranks), str(script), folder])
    return 0


class Launched:
    """A launcher that a test has started, and what it left."""

    def __init__(self, folder: Path, ranks: int, program: Callable[..., int] = launcher, **given: object) -> None:
        self.folder, self.scratch = folder / "ranks", folder / "scratch"
        self.folder.mkdir()
        self.scratch.mkdir()
        values = {"early": "", "deaf": False, **given}
        args = (str(self.folder), ranks, str(self.scratch), *values.values())
        self.errors = folder / "errors"
        self.process = warm.Process(program, *args, stderr=self.errors)

    def pids(self, ranks: int) -> list[int]:
        """Wait until so many ranks run; return their process ids."""
        wait_for(lambda: len([path for path in self.folder.iterdir() if not path.suffix]) == ranks)
        return [int((self.folder / str(rank)).read_text()) for rank in range(ranks)]

    def children(self) -> list[int]:
        """Return the processes that the launcher has started, whether they have come to write their ids or not."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid:
                found.append(int(path.parent.name))
        return found


def wait_for(happens: Callable[[], bool], seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.01)


def nobody(pids: list[int]) -> bool:
    return not any(map(alive, pids))


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    found: list[Launched] = []

    def start(*args: Any, **given: object) -> Launched:
        found.append(Launched(tmp_path, *args, **given))
        return found[-1]

    yield start
    for one in found:
        for pid in [one.process.pid, *one.children()]:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_end_with_a_launcher_that_is_killed(ranks: int, launched) -> None:
    job = launched(ranks)
    pids = job.pids(ranks)
    job.process.kill()
    wait_for(lambda: nobody(pids), 5)
    job.process.wait(10)
    assert any(job.scratch.iterdir())
    with pytest.MonkeyPatch.context() as patch:  # the next launcher removes what this one could not
        patch.setattr(launching.tempfile, "tempdir", str(job.scratch))
        with launching.scratch_folder() as own:
            assert [path for path in job.scratch.iterdir() if path != own] == []
    assert list(job.scratch.iterdir()) == []


def test_ranks_end_with_a_torchrun_that_is_killed(launched) -> None:
    job = launched(2, torchrun)
    pids = job.pids(2)
    job.process.kill()
    wait_for(lambda: nobody(pids), 5)


def test_the_command_asks_for_that_where_torchrun_has_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(cli, "end_with_launcher", lambda: asked.append(True))
    for started in (True, False):
        if not started:
            monkeypatch.delenv("TORCHELASTIC_RUN_ID")
        else:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
        with pytest.raises(SystemExit):
            cli.main(["--version"])
        assert asked == [True]


def test_ranks_that_have_only_just_started_end_with_their_launcher(launched) -> None:
    """Before they could ask the kernel for a signal: they see that their parent is another process."""
    job = launched(2, early="time.sleep(1.0)")
    wait_for(lambda: len(job.children()) == 2)
    pids = job.children()
    job.process.kill()
    wait_for(lambda: nobody(pids), 20)
    assert list(job.folder.iterdir()) == []


def test_sigterm_while_ranks_are_started_leaves_none(launched) -> None:
    job = launched(4)
    wait_for(lambda: len(job.children()) > 0)
    pids = job.children()
    job.process.terminate()
    assert job.process.wait(30) == 143
    wait_for(lambda: nobody(pids + job.children()), 10)
    assert list(job.scratch.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_the_first_signal_reaches_the_ranks_and_the_launcher_waits(number: signal.Signals, launched) -> None:
    job = launched(2)
    pids = job.pids(2)
    job.process.send_signal(number)
    assert job.process.wait(30) == 128 + number
    assert nobody(pids)
    assert {path.read_text() for path in job.folder.glob("*.signal")} == {str(int(number))}
    said = {signal.SIGINT: "Ctrl-C"}.get(number, number.name)
    heard = CTRL_C_HEARD if number == signal.SIGINT else ""
    assert job.errors.read_text() == f"{heard}fourfold: stopped by {said}; step 7 is not saved\n"
    assert list(job.scratch.iterdir()) == []


def test_a_second_ctrl_c_ends_ranks_that_do_not_react(launched) -> None:
    job = launched(2, deaf=True)
    pids = job.pids(2)
    job.process.send_signal(signal.SIGINT)
    wait_for(lambda: len(list(job.folder.glob("*.signal"))) == 2)
    time.sleep(0.5)
    began = time.monotonic()
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(20) == 130
    wait_for(lambda: nobody(pids), 5)
    assert time.monotonic() - began < 5
    assert job.errors.read_text() == f"{CTRL_C_HEARD}fourfold: ended at once by Ctrl-C; step 7 is not saved\n"
    assert list(job.scratch.iterdir()) == []


def test_ctrl_z_stops_the_ranks_too(launched) -> None:
    job = launched(2)
    pids = job.pids(2)
    job.process.send_signal(signal.SIGTSTP)
    everybody = [job.process.pid, *pids]
    wait_for(lambda: all(process_state(pid) is ProcessState.STOPPED for pid in everybody), 10)
    job.process.send_signal(signal.SIGCONT)
    wait_for(lambda: not any(process_state(pid) is ProcessState.STOPPED for pid in everybody), 10)
    job.process.terminate()
    assert job.process.wait(30) == 143


def test_an_interrupted_command_says_what_stays(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for said in ("", "step 3 is not saved"):
        monkeypatch.setattr(cli, "command", lambda _, said=said: interrupt(said))
        assert cli.main(["report", "run"]) == 130
        assert capsys.readouterr().err == f"fourfold: interrupted; {said or 'what was written stays readable'}\n"


def interrupt(said: str) -> Callable[..., int]:
    def command(*_: object) -> int:
        raise KeyboardInterrupt(*([said] if said else []))

    return command


NOHUP = """
import os, signal
from fourfold.train import signals
signals.raise_on_signals()
os.kill(os.getpid(), signal.SIGHUP)
signals.ignore_signals()
with signals.signals_interrupt(), signals.signals_held_back():
    os.kill(os.getpid(), signal.SIGHUP)
print("goes on")
"""


@pytest.mark.parametrize("nohup", [True, False])
def test_sighup_is_left_alone_under_nohup(nohup: bool) -> None:
    def start() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    left = subprocess.run([sys.executable, "-c", NOHUP], preexec_fn=start, capture_output=True, text=True, check=False)
    assert left.stdout == ("goes on\n" if nohup else "")
    assert ("KeyboardInterrupt" in left.stderr) is not nohup


TRACEBACK = """rank 1: Traceback (most recent call last):
  File "loop.py", line 3, in <module>
    step()
    ~~~~^^
  File "loop.py", line 1, in step
    raise RuntimeError("the device is lost")
RuntimeError: the device is lost
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("cause", "line"),
    [
        (TRACEBACK, "RuntimeError: the device is lost"),
        (
            TRACEBACK + "\nDuring handling another exception occurred:\n\n" + TRACEBACK.replace("Runtime", "OS"),
            "OSError",
        ),
        ("rank 0 (process 7) was killed by SIGABRT; the other ranks were stopped", "rank 0 (process 7)"),
        (TRACEBACK.replace("\nRun", "\n  [Previous line repeated 9 times]\nRun"), "RuntimeError: the"),
        (TRACEBACK.replace("Compile", '  File "data.bin" is damaged\nCompile'), "RuntimeError: the"),
        ("", ""),
        ("rank 2 is alone in a collective\n    rank 2: all_gather", "rank 2 is alone"),
    ],
)
def test_a_restart_names_the_error_in_one_line(cause: str, line: str) -> None:
    assert launching.headline(cause).startswith(line)

"""What the launcher says about ranks that never join, and about ranks that the kernel has ended."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fourfold import cli
from fourfold.environment import LAUNCHED
from fourfold.errors import FailedElsewhereError, Failure, NotSavedError, failure_of
from fourfold.train import launch as launching
from fourfold.watch.memory import HostMemory
from runs import needs_proc

STOPPED = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(600)
"""
"""Two ranks that never join: one hangs, one is stopped."""
KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def launched(program: str, ranks: int, monkeypatch: pytest.MonkeyPatch, **options: float) -> tuple[int, str]:
    """The exit code and the words of a launcher whose ranks run that program."""
    monkeypatch.setattr(launching, "RANK", program)
    said = io.StringIO()
    return launching.launch(ranks, [], said, **options), said.getvalue()  # type: ignore[arg-type]


@needs_proc
def test_ranks_that_never_join_are_named_with_what_they_do(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = launched(STOPPED, 2, monkeypatch, start=1.0)
    assert code == 1
    assert re.fullmatch(
        r"fourfold: error: not joined 1 s after the start \(watch.start\): rank 0 \(process \d+\) is still importing "
        r"torch and Fourfold or reading its config; rank 1 \(process (\d+)\) is stopped \(SIGSTOP.*-CONT \1` .*\)\n",
        said,
    )
    for process in re.findall(r"process (\d+)", said):
        assert not Path("/proc", process).exists(), "nobody is left behind"


@needs_proc
def test_a_single_rank_that_never_joins_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said = launched(STOPPED.replace("1", "0"), 1, monkeypatch, start=1.0)
    assert (code, "rank 0 (process" in said, "is stopped" in said) == (1, True, True)


# --- memory


def test_a_rank_that_the_kernel_ended_for_memory_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the group of its launcher, or in one of its own, which a scheduler or `systemd-run --scope` gives it."""
    for number, (of_ranks, ends, said_of) in enumerate(
        (
            ("job", "job", "the kernel ended it because memory was full; the control group of this job may use 1 MiB"),
            ("own", "own", "the kernel ended it because memory was full; its control group .*/own may use 1 MiB"),
            ("own", "job", ""),  # the launcher's group has lost another process
        )
    ):
        root = tmp_path / str(number)
        for name in ("job", "own"):
            (root / name).mkdir(parents=True)
            (root / name / "memory.max").write_text(f"{1 << 20}\n")
            (root / name / "memory.events").write_text("oom_kill 2\n")

        def groups(_: Path, process: int | None, root: Path = root, of_ranks: str = of_ranks) -> Any:
            return ((root / (of_ranks if process else "job"), 2),)

        monkeypatch.setattr("fourfold.watch.memory._groups", groups)
        counted = f"open({str(root / ends / 'memory.events')!r}, 'w').write('oom_kill 3\\n')"
        code, said = launched(
            f"import time; time.sleep(0.8); {counted}; {KILLED}", 1, monkeypatch, restarts=1, start=2.5
        )
        assert code == 1
        named = r"rank 0 \(process \d+\) was killed by SIGKILL"
        if said_of:
            less = r"in all; .* to use less: start fewer ranks on this machine, .*\n"
            assert re.fullmatch(rf"fourfold: error: {named}: {said_of} {less}", said), said
        else:
            assert said.count("was killed by SIGKILL; the other ranks were stopped") == 2, "it was started again"


def test_a_rank_that_somebody_killed_was_not_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "again", lambda _: HostMemory(8 << 30, 1 << 30, kills=2, machine_kills=7))
    code, said = launched(KILLED, 1, monkeypatch, restarts=1)
    assert code == 1
    assert said.count("was killed by SIGKILL; the other ranks were stopped") == 2, "it was started again"
    assert "memory" not in said


def group(root: Path, lines: str, **files: str) -> HostMemory:
    """What is read below a root with these files; `/` is written as `__`."""
    for name, text in {"proc__self__cgroup": lines, "proc__meminfo": "MemTotal: 1024 kB\n", **files}.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return HostMemory.read(root)


def test_the_kernel_is_asked_in_both_versions_of_control_groups(tmp_path: Path) -> None:
    there = "sys__fs__cgroup__a__b__memory."
    above = {"sys__fs__cgroup__a__memory.max": "4096\n", "sys__fs__cgroup__a__memory.events": "oom_kill 9\n"}
    files = {f"{there}max": "max\n", f"{there}events": "low 0\noom 1\noom_kill 2\n", **above}
    found = group(tmp_path / "2", "0::/a/b\n", **files)
    assert (found.total, found.limit, found.kills) == (1 << 20, 4096, 2)
    there = "sys__fs__cgroup__memory__a__memory."
    files = {f"{there}limit_in_bytes": "9223372036854771712\n", f"{there}oom_control": "under_oom 0\noom_kill 3\n"}
    found = group(tmp_path / "1", "9:cpu:/\n4:memory:/a\n0::/\n", **files)
    assert (found.limit, found.kills) == (None, 3), "a limit above the machine's memory is none"
    found = group(tmp_path / "0", "0::/\n", proc__vmstat="nr_free_pages 4\noom_kill 5\n")
    assert (found.limit, found.kills, found.machine_kills) == (None, None, 5)


def test_what_follows_from_the_counts() -> None:
    certain = HostMemory(1 << 30, kills=1).verdict(HostMemory(1 << 30, kills=0))
    assert certain == "the kernel ended it because memory was full; this machine has 1 GiB in all"
    assert "probably" in HostMemory(1 << 30, machine_kills=1).verdict(HostMemory(1 << 30, machine_kills=0))
    elsewhere = HostMemory(1 << 30, kills=0, machine_kills=1).verdict(HostMemory(1 << 30, kills=0, machine_kills=0))
    assert not elsewhere, "another group of the machine was out of memory"
    assert not HostMemory().verdict(HostMemory())
    gone = HostMemory(1 << 30, machine_kills=1).verdict(HostMemory(1 << 30, kills=0, machine_kills=0))
    assert "probably" in gone, "a group of its own may be removed with its last process"


def test_an_allocation_that_failed_is_said_to_be_one(capsys: pytest.CaptureFixture[str]) -> None:
    faults: list[Exception] = [MemoryError(), OSError(12, "Cannot allocate memory")]
    faults.append(FailedElsewhereError("opening failed on rank 1: MemoryError", Failure.OUT_OF_MEMORY))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 52, dtype=torch.uint8)  # more than addresses reach
    for fault in (*faults, caught.value):
        assert failure_of(fault) is Failure.OUT_OF_MEMORY
        assert not failure_of(fault).may_pass
        assert cli._failed(fault) == 1
        said = capsys.readouterr().err
        assert said.startswith("fourfold: error: the machine is out of memory (")
        assert "in all; to use less: start fewer ranks on this machine" in said
        assert said.count("\n") == 1
    assert failure_of(RuntimeError("no memory of that")) is Failure.ERROR


def test_what_another_rank_has_said_is_told_in_one_line_and_as_hearsay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    monkeypatch.setenv(LAUNCHED, "1")
    heard = FailedElsewhereError("writing failed on rank 1: RuntimeError: boom", Failure.LOST_PEER)
    assert failure_of(heard) is Failure.LOST_PEER
    passed_on = NotSavedError("step 4 was not saved")
    passed_on.__cause__ = heard
    for error in (heard, passed_on, FailedElsewhereError("building failed on rank 1", Failure.ERROR)):
        cli._failed(error)
        found = json.loads(told.read_text())
        assert found["elsewhere"]
        assert found["message"] == str(error)
    cli._failed(ValueError("rows=0 must be 1"))
    assert not json.loads(told.read_text())["elsewhere"]

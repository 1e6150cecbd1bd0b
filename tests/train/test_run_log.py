"""What a run tells: a log for people, events for programs, a file for each rank; and who may write there."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

from fourfold.cli import main
from fourfold.environment import machine_name
from fourfold.grid import Grid
from fourfold.train import run_folder
from fourfold.train.progress import EVENTS, LOG, RANK_LOGS, RankLog, RunLog, note
from fourfold.train.run_folder import (
    LOCK,
    FolderLock,
    check_folder,
    deny_others_write,
    make_folder,
    require_unowned,
)

STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d ")
STEP = {
    "event": "step", "step": 1, "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "seconds": 0.1,
    "tokens_per_second": 640.0, "mfu": None, "wire_bytes": {},
}  # fmt: skip


def test_the_log_has_the_time_before_each_line_and_events_have_no_steps(tmp_path: Path) -> None:
    story = RunLog(tmp_path, steps=4)
    story.say("two lines\nof one text\n")
    story.write(STEP)
    story.write({"event": "saved", "step": 4, "seconds": 0.1})
    story.close()
    lines = (tmp_path / LOG).read_text().splitlines()
    assert all(STAMP.match(line) for line in lines if line)
    texts = [STAMP.sub("", line) for line in lines if line]
    assert texts[:2] == ["two lines", "of one text"]
    assert texts[-1].startswith("step 4 saved")
    assert any("2.5000" in text for text in texts)
    (event,) = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    assert (event["event"], event["step"]) == ("saved", 4)
    assert STAMP.match(event["at"] + " ")


def test_what_the_launcher_notes_stands_among_what_happened(tmp_path: Path) -> None:
    note(tmp_path, "failed", "before there is a run: nothing is written")
    assert not list(tmp_path.iterdir())
    story = RunLog(tmp_path, steps=4)
    note(tmp_path, "restarted", "rank 1 was killed by SIGKILL; the run resumes after step 2 (start 2)")
    story.write({"event": "saved", "step": 4, "seconds": 0.1})
    story.close()
    assert [json.loads(line)["event"] for line in (tmp_path / EVENTS).read_text().splitlines()] == [
        "restarted",
        "saved",
    ]
    assert "killed by SIGKILL" in (tmp_path / LOG).read_text().splitlines()[0]


def test_a_rank_keeps_its_warnings_and_how_it_ended(tmp_path: Path) -> None:
    shown = warnings.showwarning
    with pytest.raises(ZeroDivisionError), RankLog(tmp_path, Grid.alone("cpu")):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("this is odd", stacklevel=1)
        _ = 1 / 0
    assert warnings.showwarning is shown
    text = (tmp_path / RANK_LOGS / "rank-00000.txt").read_text()
    assert re.search(r"INFO fourfold: rank 0 \(x=0, y=0, z=0, data=0, pipe=0\) begins: \S+, process \d+", text)
    assert "WARNING fourfold: UserWarning: this is odd" in text
    assert "ZeroDivisionError: division by zero" in text


def test_a_run_leaves_all_of_them_and_nobody_else_may_change_them(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir(mode=0o777)
    out.chmod(0o777)
    settings = ["train.evaluate_every=0", "plan.compare=false", "model.layers=1", "batch.rows=4"]
    options = ["--model", "gpt-tiny", "--steps", "3", "--device", "cpu", "--out", str(out)]
    assert main(["train", *options, *(f"--set={setting}" for setting in settings)]) == 0
    log = (out / LOG).read_text()
    assert "gpt-tiny" in log
    assert "unigram entropy" in log
    assert "step 3 saved" in log
    assert log.endswith("ended at step 3: finished\n")
    assert [json.loads(line)["event"] for line in (out / EVENTS).read_text().splitlines()] == ["saved", "end"]
    assert "begins" in (out / RANK_LOGS / "rank-00000.txt").read_text()
    for path in (out, *out.rglob("*")):
        assert not path.stat().st_mode & stat.S_IWOTH, path


def test_a_folder_of_somebody_else_that_all_may_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o777)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    with pytest.raises(PermissionError, match="writable by everybody"):
        make_folder(tmp_path)
    monkeypatch.undo()
    make_folder(tmp_path)
    assert not tmp_path.stat().st_mode & stat.S_IWOTH


def test_a_folder_that_holds_something_else_is_refused_and_keeps_its_permissions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run would take from others the right to write there, which nobody wants for /tmp."""
    shared, file, gone = tmp_path / "shared", tmp_path / "a file", tmp_path / "gone"
    shared.mkdir()
    (shared / "somebody's.txt").write_text("theirs")
    shared.chmod(0o1777)
    file.write_text("")
    gone.symlink_to(tmp_path / "not mounted")
    words = {shared: 'holds "somebody\'s.txt" and no run; give a new', file: "is a file", gone: "mount that storage"}
    for grid in ("x=1", "x=2"):  # as one process, and as a launcher
        for out, said in words.items():
            assert main(["train", "--model", "gpt-tiny", "--device", "cpu", "--grid", grid, "--out", str(out)]) == 1
            assert said in capsys.readouterr().err
    with pytest.raises(FileExistsError, match="no run"):
        make_folder(shared)  # whoever starts ranks again does not look first
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    before = tmp_path / "before"
    for name in ("data", "logs", "checkpoints", ".metrics.jsonl.partial", "slurm-12.out"):
        (before / name).mkdir(parents=True)
    check_folder(before, save=False)  # what a start that died has left


def test_without_file_locks_an_owner_that_lives_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on Lustre or NFS without locks: the owner counts, and whoever wants the folder watches the count."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", no_locks)
    monkeypatch.setattr(run_folder, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(run_folder, "WATCH_SECONDS", 0.6)
    owner = FolderLock(tmp_path)
    monkeypatch.setattr(run_folder.time, "time", lambda: 0.0)  # no clock is compared with another
    for wants in (FolderLock, require_unowned):
        with pytest.raises(BlockingIOError, match=rf"another job \(process {os.getpid()} on .*\) is training in"):
            wants(tmp_path)
    owner.require_held()
    assert "has no file locks; looks for 0.6 s whether its last owner (process" in capsys.readouterr().err
    owner.release()
    began = time.monotonic()
    require_unowned(tmp_path)
    assert time.monotonic() - began < 0.3, "a folder that was released is free"

    # an owner on another node was killed: its count stands still
    lock = tmp_path / LOCK
    lock.write_text("process 7 on node3\nnode3/boot/pid 7 100\nabc\n41")
    began = time.monotonic()
    taken = FolderLock(tmp_path)
    assert time.monotonic() - began >= 0.6
    taken.release()
    # one of this machine that has ended needs no watching
    monkeypatch.setattr(run_folder, "WATCH_SECONDS", 60.0)
    lock.write_text(f"process 7 on here\n{machine_name()} {os.getpid()} 1\nabc\n41")
    taken = FolderLock(tmp_path)

    # the owner was stopped for long, and another job has taken the folder meanwhile
    lock.write_text("process 9 on node4\nnode4/boot/pid 9 100\ndef\n1")
    until = time.monotonic() + 10
    while not taken._taken_by:
        assert time.monotonic() < until
        time.sleep(0.02)
    with pytest.raises(BlockingIOError, match=r"another job .process 9 on node4. is training"):
        taken.require_held()
    taken.release()
    assert "node4" in lock.read_text(), "the lock is the other's"


def test_of_two_jobs_that_start_together_without_file_locks_one_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(run_folder.fcntl, "flock", no_locks)
    monkeypatch.setattr(run_folder, "BEAT_SECONDS", 0.3)
    monkeypatch.setattr(run_folder, "WATCH_SECONDS", 1.0)
    (tmp_path / LOCK).write_text("process 7 on node3\nnode3/boot/pid 7 100\nabc\n41")
    found: list[FolderLock] = []

    def take() -> None:
        with suppress(BlockingIOError):
            found.append(FolderLock(tmp_path))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    found[0].require_held()
    found[0].release()


def test_what_is_written_from_then_on_is_ours(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        deny_others_write()
        (tmp_path / "file").write_text("")
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o664
    finally:
        os.umask(before)

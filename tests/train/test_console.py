"""Output cannot end a run nor make it wait: readers that leave or stop reading, closed terminals, full disks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import resource
import subprocess
import sys
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import warm
from curves import write_texts
from fourfold.errors import LostReaderError
from fourfold.train import console, run_folder
from fourfold.train.console import unblocked_output, write_data
from fourfold.train.progress import ProgressBar, RankLog, RunLog
from fourfold.train.run_folder import JsonLines, LogFile, MemorySink, TensorBoard
from runs import STEPS, column, lines_of, train_arguments

LINE = "a line that a run prints after a step, about as long as most of them are"
STEP = {
    "event": "step", "loss": 2.5, "grad_norm": 1.0, "learning_rate": 1e-3, "seconds": 0.1, "tokens_per_second": 640.0,
    "mfu": None, "wire_bytes": {},
}  # fmt: skip


@contextlib.contextmanager
def printing_to(out: int, err: int | None = None) -> Iterator[None]:
    """Inside, this process prints to these descriptors as `fourfold train` does; they are closed afterwards."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (os.fdopen(os.dup(out if one is None else one), "w") for one in (out, err))
    try:
        with unblocked_output():
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.close()
        sys.stdout, sys.stderr = before


def pipe_without_reader() -> int:
    ours, theirs = os.pipe()
    os.close(ours)
    return theirs


def closed_terminal() -> int:
    ours, theirs = pty.openpty()
    os.close(ours)
    return theirs


def full_disk() -> int:
    return os.open("/dev/full", os.O_WRONLY)


def read_within(descriptor: int, seconds: float, until: str) -> str:
    """Read until a text appears."""
    os.set_blocking(descriptor, False)
    found, deadline = b"", time.monotonic() + seconds
    while until.encode() not in found:
        assert time.monotonic() < deadline, found[-500:]
        try:
            found += os.read(descriptor, 1 << 16).replace(b"\r\n", b"\n")
        except BlockingIOError:
            time.sleep(0.01)
    return found.decode()


@pytest.mark.parametrize("gone", [pipe_without_reader, closed_terminal, full_disk])
def test_output_that_nobody_can_get_is_no_error(gone: Callable[[], int]) -> None:
    with contextlib.closing(os.fdopen(gone(), "w")) as stream:
        began = time.monotonic()
        with printing_to(stream.fileno()):
            for _ in range(3):
                print(LINE, flush=True)
                print(LINE, file=sys.stderr)
                sys.stdout.writelines([LINE, "\n"])
        # nobody waits for a reader that has gone, except once at the end, if the system does not say so at once
        assert time.monotonic() - began < console.DRAIN_SECONDS + 1


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_lines_are_dropped_while_nobody_reads_and_their_number_is_told(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "DRAIN_SECONDS", 10)  # here the reader reads again
    ours, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    total = 3 * console.MOST_QUEUED_BYTES // len(LINE)
    if kind == "terminal":
        os.write(ours, b"\x13")  # Ctrl-S
    with printing_to(theirs):
        began = time.monotonic()
        for number in range(total):
            print(f"{number} {LINE}", flush=number % 100 == 0)
        assert time.monotonic() - began < 5  # flushing waited once for a moment
        assert sys.stdout._thread.stalled
        if kind == "terminal":
            os.write(ours, b"\x11")  # Ctrl-Q
        found = read_within(ours, 10, "have them]\n")
        print("again", flush=True)
        assert read_within(ours, 10, "again\n") == "again\n"
    *lines, note = found.splitlines()
    assert lines == [f"{number} {LINE}" for number in range(len(lines))]
    assert (
        note == f"[fourfold: {total - len(lines)} lines could not be printed; log.txt and logs/ of the run have them]"
    )
    assert 0.9 < len(lines) * len(lines[-1]) / console.MOST_QUEUED_BYTES < 1.5
    os.close(ours)
    os.close(theirs)


def test_a_process_ends_though_nobody_reads() -> None:
    """A whole process: Python must not wait for the thread, nor flush the stream once more."""
    code = (
        "from fourfold.train.console import unblocked_output\n"
        "with unblocked_output():\n"
        f"    for _ in range(3000): print({LINE!r})\n"
    )
    ours, theirs = os.pipe()
    began = time.monotonic()
    left = subprocess.run([sys.executable, "-c", code], stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (left.returncode, left.stderr) == (0, b"")
    assert time.monotonic() - began < console.DRAIN_SECONDS + 8
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_descriptors_are_not_taken_by_files(closed: tuple[int, ...], tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from fourfold.train.console import unblocked_output\n"
        "with unblocked_output():\n"
        f"    with open({str(tmp_path / 'file')!r}, 'w') as file:\n"
        "        file.write(str(file.fileno()))\n"
        "    print('out', flush=True), print('err', file=sys.stderr, flush=True), sys.stdout.isatty()\n"
    )
    shut = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in closed)
    left = subprocess.run(["sh", "-c", f'"$0" -c "$1" {shut}', sys.executable, code], capture_output=True, timeout=60)
    assert left.returncode == 0
    assert (left.stdout, left.stderr) == (b"" if 1 in closed else b"out\n", b"" if 2 in closed else b"err\n")
    assert int((tmp_path / "file").read_text()) > 2


def test_one_terminal_shows_both_streams_in_order_and_two_files_do_not_wait_for_each_other() -> None:
    ours, theirs = pty.openpty()
    tty.setraw(theirs)
    with printing_to(theirs, theirs):
        for number in range(50):
            print(number, file=sys.stdout if number % 2 else sys.stderr)
        print("begun", end="")
        print(" and ended")
        sys.stdout.flush()
        shown = read_within(ours, 10, "ended\n")
    assert shown.split() == [*map(str, range(50)), "begun", "and", "ended"]
    os.close(ours)
    os.close(theirs)

    (ours, full), (errors, theirs) = os.pipe(), os.pipe()
    with printing_to(full, theirs):
        for _ in range(3000):
            print(LINE)
        print("an error", file=sys.stderr, flush=True)
        assert read_within(errors, 10, "\n") == "an error\n"
        os.close(ours)
    for descriptor in (full, errors, theirs):
        os.close(descriptor)


@pytest.mark.parametrize("gone", [True, False])
def test_a_bar_neither_waits_for_its_terminal_nor_fails_without_it(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bar has a thread that prints, and a lock that it holds meanwhile."""
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    ours, theirs = pty.openpty()
    with printing_to(theirs):
        bar = ProgressBar(sys.stdout, 100)
        bar.write(STEP | {"step": 1})
        if gone:
            os.close(ours)
        else:
            for _ in range(1000):
                bar.say(LINE)
            assert sys.stdout._thread.stalled
        began = time.monotonic()
        for step in range(2, 30):
            bar.write(STEP | {"step": step})
            bar.say(LINE)
            time.sleep(0.02)
        bar.close()
        assert time.monotonic() - began < 3
        if not gone:
            os.close(ours)
    os.close(theirs)
    assert not failed


def test_data_waits_for_its_reader_and_a_reader_that_leaves_is_an_error() -> None:
    text = LINE * 20000  # many times what a pipe holds
    ours, theirs = os.pipe()
    got: list[str] = []

    def read_slowly() -> None:
        time.sleep(console.FLUSH_SECONDS * 3)
        got.append(read_within(ours, 10, "end\n"))

    reader = threading.Thread(target=read_slowly)
    with printing_to(theirs):
        reader.start()
        write_data(f"{text}end\n")
        reader.join()
        assert got == [f"{text}end\n"]
        os.close(ours)
        with pytest.raises(LostReaderError):
            write_data(text)
    os.close(theirs)


def test_a_forked_process_prints_by_itself() -> None:
    """It has no thread that would."""
    ours, theirs = os.pipe()
    with printing_to(theirs):
        child = os.fork()
        if child == 0:
            print("from the child", flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        assert read_within(ours, 10, "\n") == "from the child\n"
    os.close(ours)
    os.close(theirs)


# --- full disks


@contextlib.contextmanager
def files_no_longer_than(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_keeps_lines_in_memory_and_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = JsonLines(tmp_path / "metrics.jsonl")
    with files_no_longer_than(100):
        for number in range(20):
            records.write({"event": "step", "step": number})
    assert (tmp_path / "metrics.jsonl").stat().st_size == 100
    records.write({"event": "step", "step": 20})
    records.close()
    assert column(tmp_path, "step", "step") == list(range(21))
    err = capsys.readouterr().err
    assert err.count("fourfold: warning: cannot write to") == 1
    assert "metrics.jsonl (File too large); make room there. The run continues" in err


def test_a_file_that_was_removed_is_begun_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a run whose folder was deleted would write where nobody sees it, and end as if all were well."""
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    lines = JsonLines(path)
    lines.write({"event": "step", "step": 1})
    path.unlink()
    path.parent.rmdir()
    lines.write({"event": "step", "step": 2})
    lines.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2]
    assert "was removed while the run trains" in capsys.readouterr().err


def test_the_json_of_restarted_ranks_has_the_steps_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"event": "step", "step": step}) + "\n" for step in range(1, 6)))
    assert [event["step"] for event in MemorySink(path, 3).events] == [1, 2, 3]
    assert MemorySink().events == []


def test_records_are_never_lost_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"cannot log to \S*metrics.jsonl \(File too large\); its last {} lines are lost"
    records = JsonLines(tmp_path / "metrics.jsonl")
    with files_no_longer_than(100):
        for number in range(20):
            records.write({"event": "step", "step": number})
        with pytest.raises(OSError, match=said.format(17)):
            records.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4  # the last is cut off

    monkeypatch.setattr(run_folder, "MOST_KEPT_BYTES", 200)
    records, steps = JsonLines(tmp_path / "metrics.jsonl"), iter(range(20))
    with files_no_longer_than(100), pytest.raises(OSError, match=said.format(7)):
        for number in steps:
            records.write({"event": "step", "step": number})
    assert next(steps) < 10
    records.close()  # now there is room


def test_logs_do_not_end_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """log.txt, events.jsonl and the log of a rank, within and beyond what can be kept, and at their end."""
    from fourfold.grid import Grid

    monkeypatch.setattr(run_folder, "MOST_KEPT_BYTES", 10_000)
    log = RunLog(tmp_path, steps=100)
    with RankLog(tmp_path, Grid.alone("cpu")), files_no_longer_than(300):
        for step in range(1, 60):
            log.write({"event": "saved", "step": step, "seconds": 0.1})
        for _ in range(20):
            run_folder.warn(LINE)
    log.write({"event": "saved", "step": 60, "seconds": 0.1})
    steps = [line.split()[2] for line in (tmp_path / "log.txt").read_text().splitlines()]
    assert steps == [str(step) for step in range(1, 61)]
    rank_log = (tmp_path / "logs" / "rank-00000.txt").read_text()
    assert rank_log.count(LINE) == 20
    assert f"cannot write to {tmp_path / 'log.txt'}" in rank_log
    with files_no_longer_than(300):
        for step in range(61, 1000):
            log.write({"event": "saved", "step": step, "seconds": 0.1})
        log.close()
    err = capsys.readouterr().err
    assert err.count(f"warning: cannot write to {tmp_path / 'log.txt'}") == 2  # once for each time
    assert "Logging error" not in err


def test_tensorboard_continues_in_another_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # the thread of the package fails as it does
    board = TensorBoard(tmp_path / "tensorboard")
    with files_no_longer_than(100):
        for step in range(50):
            board.write(STEP | {"step": step})
            time.sleep(0.005)  # its thread writes
        board.close()
    err = capsys.readouterr().err
    assert err.count("TensorBoard has a gap") == 1
    monkeypatch.setattr(board, "_again_at", 0.0)
    board.write(STEP | {"step": 60})
    board.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


def test_a_log_file_that_cannot_be_opened_is_still_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LogFile(tmp_path / "nowhere" / "log.txt")


# --- whole runs


@pytest.mark.slow
def test_runs_whose_readers_leave_or_stop_reading_finish(tmp_path: Path) -> None:
    """On two ranks each: `| head -1`, and a pipe that is full from the first moment, with a deadline of seconds."""
    texts = write_texts(tmp_path)
    pipes = {name: tmp_path / f"{name}.pipe" for name in ("left", "held")}
    readers, jobs = {}, {}
    for name, path in pipes.items():
        os.mkfifo(path)
        readers[name] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    filled = os.open(pipes["held"], os.O_WRONLY | os.O_NONBLOCK)
    fcntl.fcntl(filled, fcntl.F_SETPIPE_SZ, 4096)
    with contextlib.suppress(BlockingIOError):
        while os.write(filled, b"." * 512):
            pass
    more = ["--grid", "z=2", "--set", "watch.deadline=8", "--set", "plan.compare=false", "--restarts", "0"]
    for name, path in pipes.items():
        arguments = train_arguments(texts, tmp_path / name, *more)
        jobs[name] = warm.Process(warm.command, *arguments, stdout=path, stderr=path)
    try:
        assert "starting" in read_within(readers["left"], 60, "2 ranks (z=2)")  # when the ranks have opened the pipe
        os.close(readers["left"])
        for name, job in jobs.items():
            assert job.wait(60) == 0
            assert column(tmp_path / name, "step", "step") == list(range(1, STEPS + 1))
            assert lines_of(tmp_path / name)[-1]["reason"] == "finished"
            assert (tmp_path / name / "checkpoints" / f"step-{STEPS:08}").exists()
            assert (tmp_path / name / "log.txt").read_text().endswith(f"ended at step {STEPS}: finished\n")
            assert not (tmp_path / name / "watch" / "diagnosis.txt").exists()
    finally:
        for job in jobs.values():
            job.terminate()  # ends its ranks too
        os.close(readers["held"])
        os.close(filled)


@pytest.mark.slow
def test_a_reader_of_json_that_leaves_is_an_error_after_a_complete_run_and_no_restart(tmp_path: Path) -> None:
    pipe, folder, errors = tmp_path / "pipe", tmp_path / "run", tmp_path / "errors"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    more = ["--grid", "z=2", "--set", "plan.compare=false", "--set", "checkpoint.every=2", "--json", "-"]
    arguments = train_arguments(write_texts(tmp_path), folder, *more)
    job = warm.Process(warm.command, *arguments, stdout=pipe, stderr=errors)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "metrics.jsonl").exists():  # all ranks have opened the pipe
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.close(reader)
        assert job.wait(60) == 1
    finally:
        job.terminate()
    said = errors.read_text()
    assert said.endswith("fourfold: error: the reader of standard output has gone before it had all data\n")
    assert "the run resumes" not in said
    assert lines_of(folder)[-1] == {"event": "end", "step": STEPS, "reason": "finished"}

"""Ranks that are forked: they are what new processes would be, they end with their launcher, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import warm
from curves import write_texts
from fourfold import cli
from fourfold.train import fork_server
from runs import alive, column, needs_proc, train_arguments

pytestmark = [needs_proc, pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")]

RETURNED = "the command has returned"


def launcher(folder: str, act: str) -> int:
    """Fork a server and two ranks, and do what the test asks for."""
    out = Path(folder)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # as some programs leave it to what they start
    forked = fork_server.begin("fourfold.environment")
    if forked is not None:
        return rank(out, *forked)
    ranks = [fork_server.fork_rank([str(number), act], {**os.environ, "RANK": str(number)}) for number in range(2)]
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    told = {"children": [int(child) for child in children], "ranks": [each.pid for each in ranks if each]}
    (out / "launcher").write_text(json.dumps(told))
    if act == "orphan":
        while not all((out / str(number)).exists() for number in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    codes = [each.wait(20) for each in ranks if each]
    (out / "codes").write_text(json.dumps(codes))
    fork_server.close()
    return 0


def rank(out: Path, number: str, act: str) -> int:
    handlers = [signal.getsignal(each) is not signal.SIG_IGN for each in (signal.SIGINT, signal.SIGTERM)]
    facts = {
        "rank": os.environ["RANK"], "parent": os.getppid(), "session": os.getsid(0) == os.getpid(), "pid": os.getpid(),
        "handlers": handlers, "drawn": random.random(), "threads": torch.get_num_threads(),
    }  # fmt: skip
    (out / f"{number}.new").write_text(json.dumps(facts))
    (out / f"{number}.new").rename(out / number)
    if act == "orphan":
        time.sleep(60)
    if act == "ends" and number == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def run(folder: Path, act: str) -> tuple[int, dict, list[dict]]:
    env = {**os.environ, "OMP_NUM_THREADS": "3"}
    code = warm.Process(launcher, str(folder), act, env=env).wait(60)
    told = json.loads((folder / "launcher").read_text())
    return code, told, [json.loads((folder / str(number)).read_text()) for number in range(2)]


def test_a_forked_rank_is_a_child_like_a_new_process(tmp_path: Path) -> None:
    code, told, ranks = run(tmp_path, "ends")
    assert code == 0
    assert [each["rank"] for each in ranks] == ["0", "1"]
    assert [each["pid"] for each in ranks] == told["ranks"]
    assert set(told["ranks"]) < set(told["children"])  # the server is a child as well
    assert json.loads((tmp_path / "codes").read_text()) == [7, -signal.SIGKILL]
    for each in ranks:
        assert each["session"]
        assert each["handlers"] == [True, True]
        assert each["threads"] == 3
    assert ranks[0]["drawn"] != ranks[1]["drawn"]


def test_ranks_and_server_end_with_their_launcher(tmp_path: Path) -> None:
    code, told, _ = run(tmp_path, "orphan")
    assert code == -signal.SIGKILL
    until = time.monotonic() + 10
    while any(map(alive, told["children"])) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, told["children"]))


def test_a_server_that_cannot_import_leaves_new_processes(tmp_path: Path) -> None:
    assert warm.Process(without_server, str(tmp_path)).wait(60) == 0


def without_server(_: str) -> int:
    if fork_server.begin("fourfold.there_is_no_such_module") is not None:
        return 2
    first = fork_server.fork_rank([], {})
    second = fork_server.fork_rank([], {})
    return 0 if (first, second) == (None, None) else 1


def test_a_server_that_cannot_fork_leaves_new_processes() -> None:
    assert warm.Process(cannot_fork).wait(60) == 0


def cannot_fork() -> int:
    began, fork = os.getpid(), os.fork

    def fork_once() -> int:
        """Fail in what the server forks, as where a user may have no more processes."""
        if os.getppid() != began and os.getpid() != began:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    os.fork = fork_once
    if fork_server.begin("fourfold.environment") is not None:
        return 2
    return 0 if fork_server.fork_rank([], {}) is None else 1


def test_a_server_that_is_stopped_or_slow_is_not_waited_for() -> None:
    for act in ("stopped", "slow"):
        process = warm.Process(stopped_server, act)
        try:
            assert process.wait(30) == 0, act
        finally:
            process.kill()


def stopped_server(act: str) -> int:
    fork_server.STOPPED_SECONDS = 0.5
    if fork_server.begin("fourfold.environment") is not None:
        time.sleep(60)  # a rank, which this server may well fork before it is stopped
    server = fork_server._servers[0][0]
    if act == "stopped":
        os.kill(server, signal.SIGSTOP)
    fork_server._servers[:] = [(server, fork_server._servers[0][1] if act == "stopped" else socket.socketpair()[0])]
    began = time.monotonic()
    found = fork_server.fork_rank([], {}, 1.0 if act == "slow" else 60.0)
    ended = not alive(server) and not fork_server._servers
    return 0 if found is None and ended and time.monotonic() - began < 10 else 1


def test_a_process_with_threads_forks_nothing() -> None:
    assert warm.Process(with_a_thread).wait(60) == 0


def with_a_thread() -> int:
    import threading

    held = threading.Event()
    threading.Thread(target=held.wait).start()
    begun = fork_server.begin("fourfold.environment")
    left = fork_server.fork_rank([], {})
    held.set()
    return 0 if begun is None and left is None else 1


def test_a_variable_switches_it_off() -> None:
    assert warm.Process(switched_off, env={**os.environ, fork_server.SWITCH: "0"}).wait(60) == 0


def switched_off() -> int:
    return 0 if fork_server.begin("fourfold.environment") is None and fork_server.fork_rank([], {}) is None else 1


def test_a_command_starts_ranks_by_forking_only_where_there_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "GPU_DEVICES", ())
    several = ["--grid x=2", "--ranks 2", "run.toml", "--resume runs/a", "--grid auto --ranks 4"]
    one = ["", "--grid x=1", "--ranks 1", "--print-config --ranks 4", "--resume runs/a --ranks 1"]
    for words, expected in [*((words, True) for words in several), *((words, False) for words in one)]:
        options = cli.parser().parse_args(["train", *words.split()])
        assert cli.may_start_ranks(options) is expected, words
    monkeypatch.setattr(cli, "GPU_DEVICES", ("/proc",))
    assert cli.may_start_ranks(cli.parser().parse_args(["train"]))


def train(*arguments: str) -> int:
    code = cli.main(arguments)
    print(RETURNED)
    return code


@pytest.mark.slow
def test_a_run_on_forked_ranks_restarts_and_is_the_same(tmp_path: Path) -> None:
    """One of its ranks is killed; the others and the restarted ones are forked too."""
    texts = write_texts(tmp_path)
    more = ["--grid", "z=2", "--set", "checkpoint.every=2", "--restarts", "1"]
    out, err = tmp_path / "out", tmp_path / "err"
    job = warm.Process(train, *train_arguments(texts, tmp_path / "run", *more), stdout=out, stderr=err)
    try:
        saved = tmp_path / "run" / "checkpoints" / "step-00000002"
        until = time.monotonic() + 60
        while not saved.exists():
            assert time.monotonic() < until, err.read_text()
            time.sleep(0.01)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        victim = max(map(int, children))
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        assert job.wait(90) == 0, err.read_text()
    finally:
        job.kill()
    steps = column(tmp_path / "run", "step", "step")
    assert steps == sorted(set(steps))
    lines = out.read_text().splitlines()
    assert lines[:4] == [cli.STARTING, "starting 2 ranks: z=2", "opening the data", "building the model"]
    assert "running the first step" in lines
    assert lines.count(RETURNED) == 1  # a rank does not go on with the program that called the command

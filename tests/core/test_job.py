"""Joining a job: a wrong environment is named at once, and ranks that do not come are named within the deadline."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch.distributed as dist

from fourfold import job
from fourfold.cli import main
from fourfold.environment import Environment, master_address
from fourfold.errors import LateRanksError
from fourfold.job import Channel, share_tracebacks

TWO = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@contextmanager
def taken_port() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield str(taken.getsockname()[1])


def free_port() -> str:
    with taken_port() as port:
        return port


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": "2"}, "RANK=2 must be below WORLD_SIZE 2"),
        ({"RANK": "-1"}, "RANK=-1 must be at least 0"),
        ({"RANK": "one"}, "RANK='one' is not a whole number"),
        ({"RANK": ""}, "RANK is not set"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set, though this process is a rank of a job"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 must be at least 1"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE='2.0' is not a whole number"),
        ({"LOCAL_RANK": "gpu0"}, "LOCAL_RANK='gpu0' is not a whole number"),
        ({"LOCAL_RANK": "-3"}, "LOCAL_RANK=-3 must be at least 0"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1 must be below the number of ranks of a node, 1"),
        ({"LOCAL_RANK": "7"}, "LOCAL_RANK=7 must be below the number of ranks of a node, 2"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http' is not a whole number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 must be below the number of ports, 65536"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 must be at least 1"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    ],
)
def test_an_environment_that_makes_no_rank_is_named(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], said: str
) -> None:
    monkeypatch.setattr(os, "environ", TWO | change)
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        Environment.read(), master_address()


def test_slurm_variables_that_make_no_rank_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for change, said in (
        ({"SLURM_PROCID": "4"}, "SLURM_PROCID=4 must be below SLURM_STEP_NUM_TASKS 4"),
        ({"SLURM_STEP_NUM_TASKS": "four"}, "SLURM_STEP_NUM_TASKS='four' is not a whole number"),
    ):
        monkeypatch.setattr(os, "environ", {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"} | change)
        with pytest.raises(ValueError, match=said):
            Environment.read()


def test_the_command_says_it_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the part of the command that reports errors reads the environment."""
    monkeypatch.setattr("fourfold.cli._leave", lambda code: code)  # a rank of a job exits there
    monkeypatch.setattr("fourfold.cli.ignore_signals", lambda: None)
    monkeypatch.setattr("fourfold.commands.train.let_sigint_end_ranks", lambda: None)
    for change, said in (({"RANK": "one"}, "rank one: RANK='one' is not"), ({"RANK": "3"}, "rank 3: RANK=3 must")):
        for name, value in (TWO | change).items():
            monkeypatch.setenv(name, value)
        assert main(["train", "--device", "cpu"]) == 1
        told = capsys.readouterr().err
        assert told.startswith(f"fourfold: error: {said}")
        assert told.count("\n") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_that_nobody_knows_is_named_by_every_rank(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setattr(job, "RESOLVE_SECONDS", 0.2)
    monkeypatch.setattr(os, "environ", TWO | {"MASTER_ADDR": "no-such-host.invalid"})
    with pytest.raises(ValueError, match=r"MASTER_ADDR=no-such-host.invalid is not a known address"):
        job.join(Environment(rank, 2), 60.0)


def test_a_port_that_is_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with taken_port() as port:
        monkeypatch.setattr(os, "environ", TWO | {"MASTER_PORT": port})
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is in use"):
            job.join(Environment(0, 2), 60.0)


def test_where_rank_0_is_missing_the_others_name_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setattr(os, "environ", TWO | {"MASTER_PORT": port})
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=rf"no store answers at 127.0.0.1:{port} .* within 1 s; .*rank 0"):
        job.join(Environment(1, 2), 1.0)
    assert time.monotonic() - began < 20


def test_a_store_that_takes_connections_and_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a stopped process, whose connections the kernel still accepts."""
    monkeypatch.setattr(job, "STORE_SECONDS", 0.5)
    with taken_port() as port:
        monkeypatch.setattr(os, "environ", TWO | {"MASTER_PORT": port})
        with pytest.raises(TimeoutError, match=rf"127.0.0.1:{port} "):
            job.join(Environment(1, 2), 1.0)


def test_ranks_that_do_not_come_are_named_by_all_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", TWO | {"MASTER_PORT": free_port()})

    def late(rank: int) -> LateRanksError:
        with pytest.raises(LateRanksError) as caught:
            job.join(Environment(rank, 4), 2.0)
        return caught.value

    with ThreadPoolExecutor(2) as threads:
        for error in threads.map(late, (0, 2)):
            assert error.ranks == (1, 3)
            assert str(error).startswith("joining the job: ranks 1, 3 of 4 did not come within 2 s")


def test_ranks_that_come_have_one_store_with_the_timeout_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", TWO | {"MASTER_PORT": free_port()})
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: job.join(Environment(rank, 2), 20.0), range(2))
    second.set("a", "b")
    assert first.get("a") == b"b"
    assert second.timeout == dist.default_pg_timeout
    assert job.arrived(first, 2) == {0, 1}


def test_two_processes_of_one_rank_are_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(os, "getpid", iter((11, 12, 13)).__next__)
    faults = []
    with ThreadPoolExecutor(3) as threads:
        for rank in (0, 1, 1):
            channel = Channel(job.JOINING, range(3), store, rank=rank)
            faults.append(threads.submit(job.meet_ranks, channel, time.monotonic() + 30))
            while not store.num_keys() >= 2 * min(len(faults), 2):
                time.sleep(0.01)
    for fault in faults:
        with pytest.raises(ValueError, match=r"two processes have RANK=1: process 12 on .* and process 13 on"):
            fault.result()


def test_a_rank_that_is_started_again_is_not_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's static rendezvous has one store for all starts."""
    store = dist.HashStore()
    monkeypatch.setattr(os, "getpid", iter((11, 12)).__next__)
    for start in range(2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(start))
        job.meet_ranks(Channel(job.JOINING, range(1), store, rank=0), time.monotonic() + 5)


def test_joining_twice_hooks_tracebacks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner of two hooks would wait for the outer one, which waits for it."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back afterwards
    share_tracebacks.cache_clear()
    share_tracebacks()
    hook = sys.excepthook
    share_tracebacks()
    assert sys.excepthook is hook

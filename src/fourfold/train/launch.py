"""Ranks on this machine, on torch's elastic agent; or the ranks that torchrun or SLURM have started already.

The agent watches the ranks: when one fails or dies it ends the others, and the first cause is what people read. Where
that was not the user's to mend, all ranks are started again, if asked for. This is not left to the agent, which would
also start again what fails every time, and say nothing of it.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from math import ceil, isfinite
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fourfold.atomic import write_json
from fourfold.environment import LAUNCHED, RESTARTED, Environment, inside_a_job, is_watched
from fourfold.errors import Failure
from fourfold.train.process import INTERRUPTED, READABLE, TERMINATED
from fourfold.train.rendezvous import HERE

RANK = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # while torch is imported Ctrl-C ends it without a traceback
from fourfold.cli import main
sys.exit(main())
"""
"""The program of a rank."""
GRACE, MARGIN = 30.0, 30
"""Seconds that ranks have to end when they are told to, unless somebody says otherwise; and after which whoever started
them ends them, counted from there."""
LONGEST = 10**6
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Ward:
    """What ranks are started for, as far as whoever starts them must know; by itself they leave nothing behind."""

    def goes_on(self) -> str:
        """Where they will go on, in words, which so tell of progress too."""
        return "from its start"

    def left(self) -> str:
        """What SIGTERM has left of them."""
        return READABLE

    def known(self, since: float) -> str:  # noqa: ARG002
        """Why they may have failed, by what they have left behind since that time."""
        return ""

    def again(self, ranks: int, arguments: Sequence[str]) -> tuple[int, Sequence[str]]:
        """How many of them are started another time, and with what."""
        return ranks, arguments

    def note(self, kind: str, text: str) -> None:
        """What has become of them."""


def launch(
    ranks: int,
    arguments: Sequence[str],
    errors: IO[str],
    *,
    restarts: int = 0,
    grace: float = GRACE,
    ward: Ward | None = None,
) -> int:
    """Run `fourfold` with these arguments on that many local ranks; returns the exit code.

    They talk over the loopback, and nobody else can talk to them. When a rank dies, all are started again, up to
    `restarts` times in a row without progress. Told to end, they have `grace` seconds.
    """
    ward = ward or Ward()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what the agent has to say is said below
    try:
        with alone_on_this_machine():
            return _launch(ranks, arguments, errors, restarts, grace, ward)
    except (KeyboardInterrupt, SignalException) as caught:
        if getattr(caught, "sigval", None) == signal.SIGTERM:
            return _terminated(errors, ward)
        print(f"fourfold: interrupted; {READABLE}", file=errors)
        ward.note("ended", "interrupted")
        return INTERRUPTED
    finally:
        for name in (LAUNCHED, RESTARTED):
            os.environ.pop(name, None)


def _launch(
    ranks: int,
    arguments: Sequence[str],
    errors: IO[str],
    restarts: int,
    grace: float,
    ward: Ward,
) -> int:
    tries, reached, times = restarts, ward.goes_on(), 0
    while True:
        os.environ |= {LAUNCHED: "1", RESTARTED: str(times)}
        began = time.time()
        try:
            elastic_launch(_config(ranks, f"fourfold-{times}", grace), sys.executable)("-u", "-c", RANK, *arguments)
            return 0
        except ChildFailedError as failed:
            if any(failure.exitcode == TERMINATED for failure in failed.failures.values()):
                return _terminated(errors, ward)
            rank, failure = first_cause(failed.failures)
            came_to, reached = reached, ward.goes_on()
            tries = tries if reached == came_to else restarts
            cause = explain(rank, failure)
            if not failure_kind(failure).is_diagnosis and (more := ward.known(began)):
                cause = f"{cause}\n{more}"
            if tries == 0 or failure.exitcode == INTERRUPTED or not failure_kind(failure).may_pass:
                print(f"fourfold: error: {cause}", file=errors)
                ward.note("failed", cause)
                return failure.exitcode if failure.exitcode > 0 else 1
            tries, times = tries - 1, times + 1
            cause = cause.splitlines()[0 if failure_kind(failure).is_diagnosis else -1]
            before, (ranks, arguments) = ranks, ward.again(ranks, arguments)
            where = reached if ranks == before else f"{reached} on {ranks} of {before} ranks"
            said = f"{cause}; the run goes on {where} (start {times + 1})"
            print(f"fourfold: {said}", file=errors, flush=True)
            ward.note("restarted", said)


def _config(ranks: int, name: str, grace: float) -> LaunchConfig:
    more: dict[str, Any] = {}
    if any(field.name == "shutdown_timeout" for field in fields(LaunchConfig)):  # not in every torch
        more["shutdown_timeout"] = stop_seconds(grace)
    return LaunchConfig(1, 1, ranks, run_id=name, rdzv_backend=HERE, max_restarts=0, **more)


def stop_seconds(grace: float) -> int:
    """After which whoever told ranks to end should end them."""
    return min(ceil(grace), LONGEST) + MARGIN if isfinite(grace) else LONGEST


@contextmanager
def alone_on_this_machine() -> Iterator[None]:
    """Inside, processes that are started talk over the loopback, unless the environment names another interface."""
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    added = [name for name in INTERFACES if name not in os.environ]
    os.environ |= dict.fromkeys(added, loopback)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _terminated(errors: IO[str], ward: Ward) -> int:
    said = f"stopped by SIGTERM; {ward.left()}"
    print(f"fourfold: {said}", file=errors)
    ward.note("ended", said)
    return TERMINATED


def first_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Of several failed ranks one that says what all have found out, unless that is who died; else the one that failed
    by itself: died, or raised something else than a lost peer."""

    def rank_of_cause(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        _, failure = item
        kind = failure_kind(failure)
        order = 1 if failure.exitcode < 0 else 3 if kind is Failure.LOST_PEER else 2
        order = {Failure.DIAGNOSIS: 0, Failure.DEATH: 3}.get(kind, order)
        return order, failure.timestamp

    return min(failures.items(), key=rank_of_cause)


def explain(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"rank {rank} (process {failure.pid}) was killed by {name}; the other ranks were stopped"
    if failure.exitcode == INTERRUPTED:  # that rank alone: where the launcher is interrupted it says so itself
        return f"rank {rank} (process {failure.pid}) was interrupted by a signal; the other ranks were stopped"
    if failure_kind(failure).is_diagnosis:
        return failure.message
    lines = failure.message.strip().splitlines() or [f"rank {rank} failed with exit code {failure.exitcode}"]
    return lines[0] if len(lines) == 1 else f"rank {rank}: {failure.message.strip()}"


def failure_kind(failure: ProcessFailure) -> Failure:
    """Return the kind that a rank wrote into its failure file; a rank that died could not write any."""
    data = failure.error_file_data
    return Failure(data.get("kind", Failure.ERROR)) if isinstance(data, dict) else Failure.ERROR


def report_failure(message: str, kind: Failure, *, whole: bool = True) -> None:
    """Tell whoever started this rank why it fails: our launcher through the agent's file, others on stderr.

    Without `whole` only the first line goes to stderr, because another rank prints all of it.
    """
    if not _write_failure(message, kind):
        _print_failure(message if whole else message.partition("\n")[0])


def _write_failure(message: str, kind: Failure) -> bool:
    """Write the file that our launcher reads; return False where another launcher has started this rank."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not is_watched() or not path:
        return False
    # whole or absent: a rank may be killed in the middle of it
    write_json(Path(path), {"message": message, "timestamp": str(int(time.time())), "kind": kind})
    return True


def _print_failure(message: str) -> None:
    who = f"rank {Environment.read().rank}: " if inside_a_job() else ""
    print(f"fourfold: error: {who}{message}", file=sys.stderr, flush=True)


@cache
def cores() -> int:
    """That the ranks of this machine share: those of this process before `share_cores` keeps it on one of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores() -> None:
    """Let ranks on the CPU of one machine share its cores well, once their process groups are there.

    gloo's socket threads spin for milliseconds after each message. With more ranks than cores they take the time
    that the ranks need, and wake-ups across cores cost most of a message: each rank stays on a core of its own, and
    the threads of gloo yield.
    """
    here = Environment.read()
    local_rank, local_ranks = here.local_rank, here.local_world or 1
    if local_ranks <= 1 or not Path("/proc/self/task").exists():
        return
    cores()  # while it may still use all of them
    mine = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, len(mine) // local_ranks))
    if 1 < len(mine) <= local_ranks:
        os.sched_setaffinity(0, {mine[local_rank * len(mine) // local_ranks]})
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)

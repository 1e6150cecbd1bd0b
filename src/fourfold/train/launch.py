"""Starts ranks on this machine with torch's elastic agent, restarts them, and reports why they failed.

The agent watches the ranks: when one fails or dies it ends the others. `watch.liveness` chooses which of their errors
people read. All ranks are restarted if the user asked for restarts and another start may help. Restarts are not left to
the agent, because it would also restart what fails every time, and would not say why.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
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
from fourfold.train.rendezvous import LOCAL
from fourfold.train.signals import INTERRUPTED, MAX_SECONDS, READABLE, TERMINATED
from fourfold.watch.liveness import RankEnd, first_cause

RANK = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C during the import of torch leaves no traceback
from fourfold.cli import main
sys.exit(main())
"""
"""The Python program that each rank runs."""
GRACE = 30.0
"""Seconds that ranks have to end after SIGTERM, unless the config sets watch.grace."""
MARGIN = 30
"""Seconds beyond their grace after which whoever started the ranks kills them. The ranks print and flush in that
time."""


class RestartPolicy:
    """Decides where and how the launcher restarts its ranks. This default is for ranks that leave nothing behind."""

    def resume_step(self) -> int:
        """Return the step that a restart resumes after. A higher step than before means progress."""
        return 0

    def resume_text(self, step: int) -> str:  # noqa: ARG002
        """Return words for where a restart resumes."""
        return "from its start"

    def after_sigterm(self) -> str:
        """Return words for what the ranks have left behind after SIGTERM."""
        return READABLE

    def evidence(self, since: float) -> str:  # noqa: ARG002
        """Return why the ranks may have failed, from what they have written since that time; empty if unknown."""
        return ""

    def next_start(self, ranks: int, arguments: Sequence[str]) -> tuple[int, Sequence[str]]:
        """Return how many ranks the next start has, and its arguments."""
        return ranks, arguments

    def note(self, kind: str, text: str) -> None:
        """Record what has become of the ranks."""


def launch(
    ranks: int,
    arguments: Sequence[str],
    errors: IO[str],
    *,
    restarts: int = 0,
    grace: float = GRACE,
    policy: RestartPolicy | None = None,
) -> int:
    """Run `fourfold` with these arguments on that many local ranks; return the exit code.

    The ranks communicate over the loopback, where no other machine reaches them. When a rank dies, all ranks are
    restarted, up to `restarts` times in a row without progress. After SIGTERM they have `grace` seconds to end.
    """
    policy = policy or RestartPolicy()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # this file reports the same in one line
    try:
        return _launch(ranks, arguments, errors, restarts, grace, policy)
    except (KeyboardInterrupt, SignalException) as caught:
        if getattr(caught, "sigval", None) == signal.SIGTERM:
            return _terminated(errors, policy)
        print(f"fourfold: interrupted; {READABLE}", file=errors)
        policy.note("ended", "interrupted")
        return INTERRUPTED
    finally:
        for name in (LAUNCHED, RESTARTED):
            os.environ.pop(name, None)


def _launch(
    ranks: int, arguments: Sequence[str], errors: IO[str], restarts: int, grace: float, policy: RestartPolicy
) -> int:
    tries, reached, times = restarts, policy.resume_step(), 0
    while True:
        os.environ |= {LAUNCHED: "1", RESTARTED: str(times)}
        began = time.time()
        try:
            # a name of its own for each start, so that its store shares no key with the one before
            elastic_launch(_config(ranks, f"fourfold-{times}", grace), sys.executable)("-u", "-c", RANK, *arguments)
            return 0
        except ChildFailedError as failed:
            ends = [_end(rank, failure) for rank, failure in failed.failures.items()]
        if any(end.exit_code == TERMINATED for end in ends):
            return _terminated(errors, policy)
        first = first_cause(ends)
        failure = first.failure or Failure.ERROR
        before, reached = reached, policy.resume_step()
        tries = tries if reached == before else restarts  # progress earns the full number of restarts again
        cause = explain(first)
        if not failure.is_diagnosis and (more := policy.evidence(began)):
            cause = f"{cause}\n{more}"
        if tries == 0 or first.exit_code == INTERRUPTED or not failure.may_pass:
            print(f"fourfold: error: {cause}", file=errors)
            policy.note("failed", cause)
            return first.exit_code if first.exit_code > 0 else 1
        tries, times = tries - 1, times + 1
        # one line: the headline of a diagnosis, or the last line of a traceback
        cause = cause.splitlines()[0 if failure.is_diagnosis else -1]
        had, (ranks, arguments) = ranks, policy.next_start(ranks, arguments)
        where = policy.resume_text(reached) + ("" if ranks == had else f" on {ranks} of {had} ranks")
        said = f"{cause}; the run resumes {where} (start {times + 1})"
        print(f"fourfold: {said}", file=errors, flush=True)
        policy.note("restarted", said)


def _end(rank: int, failure: ProcessFailure) -> RankEnd:
    data = failure.error_file_data
    kind = Failure(data["kind"]) if isinstance(data, dict) and "kind" in data else None
    return RankEnd(rank, failure.pid, failure.exitcode, kind, failure.message, failure.timestamp)


def _config(ranks: int, name: str, grace: float) -> LaunchConfig:
    more: dict[str, Any] = {}
    if any(field.name == "shutdown_timeout" for field in fields(LaunchConfig)):  # not in every torch
        more["shutdown_timeout"] = kill_seconds(grace)
    return LaunchConfig(1, 1, ranks, run_id=name, rdzv_backend=LOCAL, max_restarts=0, **more)


def kill_seconds(grace: float) -> int:
    """Return the seconds after SIGTERM at which whoever sent it should kill the ranks."""
    return min(ceil(grace), MAX_SECONDS) + MARGIN if isfinite(grace) else MAX_SECONDS


def _terminated(errors: IO[str], policy: RestartPolicy) -> int:
    said = f"stopped by SIGTERM; {policy.after_sigterm()}"
    print(f"fourfold: {said}", file=errors)
    policy.note("ended", said)
    return TERMINATED


def explain(end: RankEnd) -> str:
    """Return why a rank ended, in words for people."""
    if end.killed:
        name = signal.Signals(-end.exit_code).name
        return f"rank {end.rank} (process {end.process}) was killed by {name}; the other ranks were stopped"
    if end.exit_code == INTERRUPTED:  # only that rank got the signal: an interrupted launcher reports it itself
        return f"rank {end.rank} (process {end.process}) was interrupted by a signal; the other ranks were stopped"
    if end.failure is not None and end.failure.is_diagnosis:
        return end.message
    lines = end.message.strip().splitlines() or [f"rank {end.rank} failed with exit code {end.exit_code}"]
    return lines[0] if len(lines) == 1 else f"rank {end.rank}: {end.message.strip()}"


def report_failure(message: str, kind: Failure, *, whole: bool = True) -> None:
    """Report why this rank fails to whoever started it: to our launcher in the agent's file, to others on stderr.

    Without `whole` only the first line goes to stderr, because another rank prints all of it.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if is_watched() and path:
        # The file appears whole or not at all, because this rank may be killed while it writes.
        write_json(Path(path), {"message": message, "timestamp": str(int(time.time())), "kind": kind})
        return
    who = f"rank {Environment.read().rank}: " if inside_a_job() else ""
    shown = message if whole else message.partition("\n")[0]
    print(f"fourfold: error: {who}{shown}", file=sys.stderr, flush=True)


@cache
def cores() -> int:
    """Return how many cores the ranks of this machine share.

    The first call counts the cores that this process may use. Later calls repeat that number, because `share_cores` has
    bound the process to one core by then.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_cores() -> None:
    """Let ranks on the CPU of one machine share its cores well, once their process groups exist.

    gloo's socket threads spin for milliseconds after each message. With more ranks than cores, these threads take the
    time that the ranks need, and waking a thread on another core costs most of a message. So each rank stays on one
    core, and gloo's threads get the lowest priority.
    """
    here = Environment.read()
    local_ranks = here.local_world or 1
    if local_ranks <= 1 or not Path("/proc/self/task").exists():
        return
    cores()  # counts now, while this process may still use all of them
    mine = sorted(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, len(mine) // local_ranks))
    if 1 < len(mine) <= local_ranks:
        os.sched_setaffinity(0, {mine[here.local_rank * len(mine) // local_ranks]})
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread may have ended meanwhile
            if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                os.setpriority(os.PRIO_PROCESS, int(task.name), 19)  # the lowest priority

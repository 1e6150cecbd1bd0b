"""Ranks on this machine, on torch's elastic agent; or the ranks that torchrun or SLURM have started already.

The agent watches the ranks: when one fails or dies it ends the others, and the first cause is what people read.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import IO

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

RANK = """
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # while torch is imported Ctrl-C ends it without a traceback
from fourfold.cli import main
sys.exit(main())
"""
"""The program of a rank."""
INTERRUPTED = 130
STARTED_BY_US = "FOURFOLD_LAUNCHED"
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""How gloo and NCCL say that another rank is gone: an effect, not a cause."""


def inside_a_job() -> bool:
    """Whether torchrun, SLURM or our own launcher started this process as one of several ranks."""
    return "RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1


def launch(ranks: int, arguments: Sequence[str], errors: IO[str]) -> int:
    """Run `fourfold` with these arguments on that many local ranks; returns the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    os.environ[STARTED_BY_US] = "1"
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what the agent has to say is said below
    config = LaunchConfig(
        1, 1, ranks, run_id="fourfold", rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0
    )
    try:
        elastic_launch(config, sys.executable)("-u", "-c", RANK, *arguments)
    except ChildFailedError as failed:
        rank, failure = first_cause(failed.failures)
        print(f"fourfold: error: {explain(rank, failure)}", file=errors)
        return failure.exitcode if failure.exitcode > 0 else 1
    except (KeyboardInterrupt, SignalException):
        print("fourfold: interrupted; what was written stays readable", file=errors)
        return INTERRUPTED
    finally:
        del os.environ[STARTED_BY_US]
    return 0


def first_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Of several failed ranks the one that failed by itself: died, or raised something else than a lost peer."""

    def rank_of_cause(item: tuple[int, ProcessFailure]) -> tuple[int, float]:
        _, failure = item
        lost = any(words in failure.message for words in LOST_PEER)
        return (0 if failure.exitcode < 0 else 2 if lost else 1), failure.timestamp

    return min(failures.items(), key=rank_of_cause)


def explain(rank: int, failure: ProcessFailure) -> str:
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return f"rank {rank} (process {failure.pid}) was killed by {name}; the other ranks were stopped"
    if failure.exitcode == INTERRUPTED:  # that rank alone: where the launcher is interrupted it says so itself
        return f"rank {rank} (process {failure.pid}) was interrupted by a signal; the other ranks were stopped"
    lines = failure.message.strip().splitlines() or [f"rank {rank} failed with exit code {failure.exitcode}"]
    return lines[0] if len(lines) == 1 else f"rank {rank}: {failure.message.strip()}"


def report_failure(message: str) -> None:
    """Tell whoever started this rank why it fails: our launcher through the agent's file, others on stderr."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if STARTED_BY_US in os.environ and path:
        Path(path).write_text(json.dumps({"message": message, "timestamp": str(int(time.time()))}))
        return
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
    print(f"fourfold: error: {f'rank {rank}: ' if rank else ''}{message}", file=sys.stderr, flush=True)


def listen_to_signals() -> None:
    """SIGTERM ends a run as Ctrl-C does; once is enough, though terminal and agent may both send it."""

    def interrupt(_: int, __: FrameType | None) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)


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
    local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or 0)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)
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

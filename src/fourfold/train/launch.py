"""Starts ranks on this machine with torch's elastic agent, restarts them, and reports why they failed.

The agent watches the ranks: when one fails or dies it ends the others. `watch.liveness` chooses which of their errors
people read. All ranks are restarted if the user asked for restarts and another start may help. Restarts are not left to
the agent, because it would also restart what fails every time, at once, and would not say why.

The first signal is forwarded to the ranks, which save and end; the launcher waits for them. A second one ends all of
them at once. Ranks also end when the launcher dies (`environment.end_with_launcher`), so no rank is ever left behind.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import cache
from math import ceil, isfinite
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fourfold.atomic import write_json
from fourfold.environment import (
    BEGAN,
    LAUNCHED,
    MAX_SECONDS,
    RESTARTED,
    Environment,
    is_watched,
    rank_name,
    start_name,
    starts_before,
)
from fourfold.errors import Failure
from fourfold.job import START_SECONDS
from fourfold.train import fork_server
from fourfold.train.arrivals import Arrivals
from fourfold.train.console import drain_output, write_now
from fourfold.train.rendezvous import LOCAL, WATCH
from fourfold.train.signals import (
    CTRL_C_HEARD,
    NAMES,
    READABLE,
    SIGNALS,
    STOP_CODES,
    StopRequest,
)
from fourfold.watch.liveness import RankEnd, first_cause

RANK = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # so that Ctrl-C during the import of torch leaves no traceback
from fourfold.environment import end_with_launcher
end_with_launcher(int(os.environ["{LAUNCHED}"]))
from fourfold.cli import main
sys.exit(main())
"""
"""The Python program that each rank runs."""
GRACE = 30.0
"""Seconds that ranks have to end after SIGTERM, unless the config sets watch.grace."""
MARGIN = 30
"""Seconds beyond their grace after which whoever started the ranks kills them. The ranks print and flush in that
time."""
RANKS_OF_A_CORE = 64
"""The most ranks that a core can start. Even tests have fewer than 16, and thousands would stop the whole machine."""
MAX_PAUSE = 60.0
"""The most seconds between the death of ranks and their next start: a fault that lasts, such as a full disk, must not
cause hundreds of starts, and a minute is short beside the hours that it may last."""
HAS_SHUTDOWN_TIMEOUT = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))
"""Whether torch lets us say how long its agent waits for ranks after a signal. Torch 2.11 waits 30 s."""
SCRATCH = "fourfold-launch-"
"""The beginning of the names of the launchers' temporary folders."""
ERROR_FILE = "error.json"
"""The name of the file in which the agent expects the error of a rank."""
OWN_SIGNALS = "SIGURG"
"""The signal that the agent handles itself: one that nobody sends. It would handle more by default, SIGHUP even under
`nohup`."""


class RestartPolicy:
    """Decides where and how the launcher restarts its ranks. This default is for ranks that leave nothing behind."""

    def resume_step(self) -> int:
        """Return the step that a restart resumes after. A higher step than before means progress."""
        return 0

    def resume_text(self, step: int) -> str:  # noqa: ARG002
        """Return words for where a restart resumes."""
        return "from its start"

    def restarts_from_nothing(self) -> bool:
        """Return whether ranks are restarted even if a restart would begin at step 0."""
        return True

    def left_behind(self) -> str:
        """Return words for what the ranks have left behind when they were asked to stop."""
        return READABLE

    def evidence(self, start: str) -> str:  # noqa: ARG002
        """Return why the ranks may have failed, from what they have written in that start; empty if unknown."""
        return ""

    def missed(self, rank: int, start: str) -> str:  # noqa: ARG002
        """Return which message of this rank another one waited for, by what ranks have written; empty if none."""
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
    start: float = START_SECONDS,
    policy: RestartPolicy | None = None,
) -> int:
    """Run `fourfold` with these arguments on that many local ranks; return the exit code.

    The ranks communicate over the loopback, where no other machine reaches them. When a rank dies, all ranks are
    restarted, up to `restarts` times in a row without progress, after a pause that doubles each time. They have `start`
    seconds to join the job, and after a signal `grace` seconds to end.
    """
    require_startable(ranks)
    policy = policy or RestartPolicy()
    fork_server.keep_exit_codes()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # this file reports the same in one line
    with scratch_folder() as scratch, signals_stop_ranks(policy, scratch):
        try:
            return _launch(ranks, arguments, errors, restarts, grace, start, policy, scratch)
        except SignalException as caught:
            # The agent has waited for the ranks that it knew. If others were just starting, they must not complain.
            signal_children(signal.SIGKILL)
            return _stopped(caught.sigval, errors, policy, scratch)
        finally:
            for name in (LAUNCHED, RESTARTED, BEGAN):
                os.environ.pop(name, None)


def _launch(
    ranks: int,
    arguments: Sequence[str],
    errors: IO[str],
    restarts: int,
    grace: float,
    start: float,
    policy: RestartPolicy,
    scratch: Path,
) -> int:
    tries, reached, times, quick = restarts, policy.resume_step(), 0, 0
    os.environ[BEGAN] = str(time.monotonic())
    while True:
        os.environ |= {LAUNCHED: str(os.getpid()), RESTARTED: str(times)}
        start_is, arrivals = start_name(), Arrivals(ranks, start)
        for old in scratch.rglob(ERROR_FILE):
            old.unlink()  # what an earlier start has reported is said
        # a name of its own for each start, so that its store shares no key with the one before
        timeout: dict[str, Any] = {"shutdown_timeout": kill_seconds(grace)} if HAS_SHUTDOWN_TIMEOUT else {}
        config = LaunchConfig(
            1,
            1,
            ranks,
            run_id=f"fourfold-{times}",
            rdzv_backend=LOCAL,
            rdzv_configs={WATCH: arrivals.watch},
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
            signals_to_handle=OWN_SIGNALS,
            **timeout,
        )
        try:
            with ranks_forked(arguments, arrivals):
                elastic_launch(config, sys.executable)("-u", "-c", RANK, *arguments)
            return 0
        except ChildFailedError as failed:
            ends = arrivals.explain([_end(rank, failure) for rank, failure in failed.failures.items()])
        finally:
            arrivals.close()
        # Ranks got a signal, and not from the agent because another rank failed. A launcher that gets one itself raises
        # SignalException.
        if all(end.exit_code in STOP_CODES for end in ends):
            return _stopped(STOP_CODES[ends[0].exit_code], errors, policy, scratch)
        first = first_cause(ends)
        failure = first.failure or Failure.ERROR
        before, reached = reached, policy.resume_step()
        if reached > before:  # progress earns the full number of restarts again
            tries, quick = restarts, 0
        cause = explain(first)
        evidence = "" if failure.is_diagnosis else policy.evidence(start_is)
        missed = "" if failure.is_diagnosis or evidence else policy.missed(first.rank, start_is)
        hopeless = not failure.may_pass or (not reached and not policy.restarts_from_nothing())
        if tries == 0 or hopeless:
            cause = "\n".join(filter(None, (cause, evidence, missed)))
            print(f"fourfold: error: {cause}", file=errors)
            policy.note("failed", cause)
            return first.exit_code if first.exit_code > 0 else 1
        tries, times, quick = tries - 1, times + 1, quick + 1
        pause = restart_pause(quick)
        had, (ranks, arguments) = ranks, policy.next_start(ranks, arguments)
        where = policy.resume_text(reached) + ("" if ranks == had else f" on {ranks} of {had} ranks")
        why = "; ".join(filter(None, (evidence or headline(cause), missed)))
        said = f"{why}; the run resumes {where} in {pause:.0f} s (start {times + 1})"
        print(f"fourfold: {said}", file=errors, flush=True)
        policy.note("restarted", said)
        time.sleep(pause)


@contextmanager
def ranks_forked(arguments: Sequence[str], arrivals: Arrivals) -> Iterator[None]:
    """Inside, the elastic agent's processes are forked by this launcher's server, if it has one."""
    new_process = SubprocessHandler._popen

    def start(handler: SubprocessHandler, args: tuple, env: dict[str, str]) -> Any:
        started = fork_server.fork_rank(arguments, env, arrivals.seconds) or new_process(handler, args, env)
        arrivals.processes[int(env["RANK"])] = started.pid
        return started

    SubprocessHandler._popen = start  # type: ignore[method-assign]  # torch has no public way to start a rank
    try:
        yield
    finally:
        SubprocessHandler._popen = new_process  # type: ignore[method-assign]


def _end(rank: int, failure: ProcessFailure) -> RankEnd:
    data = failure.error_file_data
    told = data if isinstance(data, dict) and "kind" in data else {}  # torch writes such files as well
    kind = Failure(told["kind"]) if told else None
    elsewhere = told.get("elsewhere", False)
    return RankEnd(rank, failure.pid, failure.exitcode, kind, failure.message, failure.timestamp, elsewhere)


def restart_pause(times: int) -> float:
    """Return the seconds to wait before ranks that died without progress are started for the n-th time again."""
    return min(2.0 ** min(times - 1, 10), MAX_PAUSE)  # the number comes from torchrun, and a power may overflow


def wait_after_restart() -> None:
    """Wait as long as our launcher would if torchrun has restarted this rank: torchrun itself restarts at once."""
    if times := starts_before():
        if Environment.read().rank == 0:
            said = f"waits {restart_pause(times):.0f} s: torchrun has restarted this job {times} times"
            print(f"fourfold: {said}", file=sys.stderr, flush=True)
        time.sleep(restart_pause(times))


def kill_seconds(grace: float) -> int:
    """Return the seconds after SIGTERM at which whoever sent it should kill the ranks."""
    return min(ceil(grace), MAX_SECONDS) + MARGIN if isfinite(grace) else MAX_SECONDS


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder for what the ranks report to their launcher; also remove those of killed launchers."""
    for old in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*"):
        with suppress(OSError), (old / "lock").open() as lock:  # a folder without one is just being made
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its launcher lives
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (folder / "new").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "new").rename(folder / "lock")  # appears locked, so that nobody takes it for a dead launcher's
            yield folder


@contextmanager
def signals_stop_ranks(policy: RestartPolicy, scratch: Path) -> Iterator[None]:
    """Inside, the first signal raises SignalException, and the agent forwards it to the ranks and waits for them.

    A second signal ends the ranks and this process at once.
    """
    request = StopRequest()

    def handle(number: int, _: FrameType | None) -> None:
        first, at_once = not request.signal, request.add(number)
        if at_once:
            signal_children(signal.SIGKILL)  # before they can complain that their launcher is gone
            said = f"ended at once by {NAMES[number]}; {policy.left_behind()}"
            write_now(f"fourfold: {said}\n")
            policy.note("ended", said)
            shutil.rmtree(scratch, ignore_errors=True)
            drain_output()
            os._exit(128 + number)
        if first:
            if number == signal.SIGINT:
                write_now(CTRL_C_HEARD)
            raise SignalException(f"signal {number}", signal.Signals(number))

    def suspend(*_: object) -> None:
        # Ctrl-Z reaches this process alone, which serves the store: the ranks stop with it, and continue with it
        signal_children(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        signal_children(signal.SIGCONT)  # runs when this process is continued

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_children(number: int) -> None:
    """Send a signal to the ranks, where the system lists the children of this process."""
    me = os.getpid()
    with suppress(OSError):
        for child in Path(f"/proc/{me}/task/{me}/children").read_text().split():
            os.kill(int(child), number)


def _stopped(number: int, errors: IO[str], policy: RestartPolicy, scratch: Path) -> int:
    """Report what the ranks have left behind after a signal, and why they could not save; return the exit code."""
    told = [json.loads(path.read_text()) for path in scratch.rglob(ERROR_FILE)]
    told.sort(key=lambda found: found.get("elsewhere", False))
    # other kinds of failures follow from the end of other ranks
    causes = [found["message"].strip() for found in told if found["kind"] in (Failure.USER, Failure.ERROR)]
    said = "; ".join([f"stopped by {NAMES[number]}", *causes[:1], policy.left_behind()])
    print(f"fourfold: {said}", file=errors)
    policy.note("ended", said)
    return 128 + number


def explain(end: RankEnd) -> str:
    """Return why a rank ended, in words for people."""
    if end.failure is not None and (end.failure.is_diagnosis or end.failure is Failure.OUT_OF_MEMORY):
        return end.message
    if end.killed:
        name = signal.Signals(-end.exit_code).name
        return f"rank {end.rank} (process {end.process}) was killed by {name}; the other ranks were stopped"
    lines = end.message.strip().splitlines() or [f"rank {end.rank} failed with exit code {end.exit_code}"]
    return lines[0] if len(lines) == 1 else f"rank {end.rank}: {end.message.strip()}"


def headline(cause: str) -> str:
    """Return the first line of the error in a text with a traceback, or else the first line of the text."""
    lines = cause.splitlines() or [""]
    begun = [at for at, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    behind = lines[begun[-1] + 1 :] if begun else lines  # frames are indented
    return next((line for line in behind if not line.startswith(" ")), lines[0])


def report_failure(message: str, kind: Failure, *, elsewhere: bool = False, whole: bool = True) -> None:
    """Report why this rank fails to whoever started it: to our launcher in the agent's file, to others on stderr.

    `elsewhere`: the error is another rank's, which reports it too. Without `whole` only the first line goes to stderr,
    because another rank prints all of it.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if is_watched() and path:
        # The file appears whole or not at all, because this rank may be killed while it writes.
        told = {"message": message, "timestamp": str(int(time.time())), "kind": kind, "elsewhere": elsewhere}
        write_json(Path(path), told)
        return
    shown = message if whole else message.partition("\n")[0]
    print(f"fourfold: error: {rank_name()}{shown}", file=sys.stderr, flush=True)


def require_startable(ranks: int) -> None:
    """Raise if this machine cannot start so many ranks: each is a process that imports torch."""
    if ranks > (most := RANKS_OF_A_CORE * cores()):
        raise ValueError(
            f"{ranks} ranks on the {cores()} cores of this machine: at most {most} can start here; start fewer, or use "
            "torchrun or SLURM on more machines"
        )


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

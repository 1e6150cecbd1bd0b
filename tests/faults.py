"""Faults at every phase of a run: each must end in time, name its cause, leave no process, and lose nothing.

A `Case` is a phase of the run, a kind of fault, a grid, and whether its ranks are forked. `check` trains a small run
with that fault, looks at how it ended, resumes it, and compares its losses with those of an undisturbed run, bit for
bit.

`covering` returns cases in which every two of these factors meet in all ways that make sense: a new axis, phase, kind
or way to start ranks is added to its table, and the whole of the other tables runs over it.
`tests/train/soak_faults.py` takes all of them, `tests/train/test_fault_phases.py` the few that `most_telling` chooses.

The fault happens in one rank, once: a restarted run does not meet it again. A rank reaches the launcher and the test
through signals and through a file, `hit`, which appears at the moment of the fault.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

import warm
from curves import write_texts
from fourfold.checkpoint.load import CHECKPOINTS, Checkpoints
from fourfold.params import local_of
from fourfold.train.run_folder import rewind
from fourfold.watch.liveness import CUT_OFF_SECONDS
from harness import DEVICE
from runs import alive, column

CASE, FOLDER, LAUNCHER = "FOURFOLD_TEST_CASE", "FOURFOLD_TEST_FOLDER", "FOURFOLD_TEST_LAUNCHER"
STEPS, EVERY = 8, 2
DEADLINE = 4.0
"""Seconds that a rank waits for others, in a step and at the start."""
SILENT = DEADLINE + CUT_OFF_SECONDS
"""Seconds after which ranks end whose launcher is stopped."""
MOST_SILENT = 60
"""The same at the most, on a busy machine."""
GRIDS = {
    "x=2": 2, "y=2": 2, "z=2": 2, "data=2": 2, "pipe=2": 2, "z=2,context=2": 2, "z=2,expert=2": 2,
    "x=2,data=2": 4, "pipe=2,x=2": 4, "pipe=4": 4, "x=2,z=2,ex=2,expert=2": 4, "data=2,pipe=2,context=2": 4,
}  # fmt: skip
"""The grids of runs, and their ranks: every axis alone, then some together."""
LAYERS = {"pipe=4": 4, "pipe=2": 2, "pipe=2,x=2": 2, "data=2,pipe=2,context=2": 2}
"""The layers of the model where a single one does not suffice."""
AXES = tuple(grid for grid, ranks in GRIDS.items() if ranks == 2)
"""The grids that have one axis, or one beside the axis that it needs."""

BEFORE_STEPS = ("start", "rendezvous", "reading", "building")
BEFORE_SAVES = (*BEFORE_STEPS, "compile", "first step")
PHASES = (*BEFORE_SAVES, "step", "evaluation", "save", "rename", "prune", "resume", "end")
RANK0 = ("rename", "prune")
"""The phases that only rank 0 comes to."""
DISK = ("reading", "save", "rename", "prune")
"""The phases in which a disk that is full or read-only is noticed."""
SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP, "Ctrl-C": signal.SIGINT, "Ctrl-C twice": signal.SIGINT}
NAMED = ("SIGTERM", "SIGHUP", "Ctrl-C")
HARMLESS = ("slow", "stop and continue", "closed output", "launcher paused")
COLD = ("launcher killed", "Ctrl-C twice", "launcher stopped", "server stopped")
"""The kinds in which the kernel or a rank looks for the rank's launcher. Ranks that are not forked by the launcher come
from the harness instead (`warm.ranks`), and are no children of it."""
EARLY = ("start", "rendezvous")
"""The phases in which a launcher looks for its ranks in /proc, where ranks of the harness have another environment, and
in which they are not yet a group of processes that a signal reaches."""
MESSAGE = r"step 6: [FB] of stage \d, micro-batch \d, from rank \d to rank \d: "
"""What ranks wait for where a pipe rank is stopped in a step."""
ERRORS = {"full disk": errno.ENOSPC, "read-only disk": errno.EROFS}
KINDS = ("kill", "stop", *HARMLESS, *SIGNALS, "launcher killed", "launcher stopped", "server stopped", "NaN", *ERRORS)
PHASES_OF = {
    "NaN": ("first step", "step", "evaluation"),
    "launcher stopped": ("step", "evaluation", "save", "end"),
    "server stopped": ("step", "save", "end"),
    **dict.fromkeys(ERRORS, DISK),
}
"""The phases in which a kind of fault makes sense; all, for other kinds."""


@dataclass(frozen=True)
class Case:
    """A fault: when, which, on which grid, and whether its ranks are forked."""

    phase: str
    kind: str
    grid: str = "x=2"
    forked: bool = False

    @property
    def ranks(self) -> int:
        return GRIDS[self.grid]

    @property
    def rank(self) -> int:
        """The rank that is hit: the last one, except where only the first comes."""
        return 0 if self.phase in RANK0 else self.ranks - 1

    def __str__(self) -> str:
        return f"{self.kind}, {self.phase}, {self.grid}{', forked' * self.forked}"

    @property
    def fits(self) -> bool:
        """Whether the case makes sense, and whether the harness can see it: forked ranks are the launcher's own."""
        early = self.phase in EARLY and self.kind in ("stop", *SIGNALS)
        own = early or self.kind in COLD
        return self.phase in PHASES_OF.get(self.kind, PHASES) and (self.forked or not own)

    @property
    def seconds(self) -> float:
        """Seconds for which the case waits."""
        waits = {"stop": 20.0 if self.phase in EARLY else DEADLINE, "launcher stopped": SILENT, "launcher killed": 0.5}
        return waits.get(self.kind, 20.0 if self.kind == "server stopped" else 0.0)  # new processes import torch

    @property
    def values(self) -> set[tuple[str, ...]]:
        """The factors of the case, each with its value."""
        return {("phase", self.phase), ("kind", self.kind), ("grid", self.grid), ("forked", str(self.forked))}

    @property
    def pairs(self) -> set[tuple[str, ...]]:
        """Every two factors of the case, with their values."""
        return {(*one, *other) for one, other in itertools.combinations(sorted(self.values), 2)}

    @property
    def meets(self) -> set[tuple[str, ...]]:
        """What the case contributes to an array that covers values, or pairs of them."""
        return self.values | self.pairs


ONCE_FAILED = (
    Case("step", "stop", "z=2,expert=2"),  # sizes of an all-to-all were taken for a disagreement
    Case("step", "kill", "z=2,expert=2", forked=True),
    Case("evaluation", "stop", "x=2,z=2,ex=2,expert=2"),
    Case("step", "launcher stopped", "x=2", forked=True),  # a rank was blamed
    Case("save", "server stopped", "x=2", forked=True),  # was waited for without a deadline
)


@cache
def covering() -> tuple[Case, ...]:
    """Return cases with every pair of values of two factors that makes sense (a covering array of strength 2).

    Cases that have failed once come first, whatever they cover. Greedy: the next case is the one with the most pairs
    that are still missing, the cheaper one among equals.
    """
    factors = itertools.product(PHASES, KINDS, GRIDS, (True, False))
    every = [case for case in itertools.starmap(Case, factors) if case.fits]
    missing = set().union(*(case.pairs for case in every)) - set().union(*(case.pairs for case in ONCE_FAILED))
    return (*ONCE_FAILED, *cover([case for case in every if case not in ONCE_FAILED], missing))


def cover(known: Sequence[Case], missing: set[tuple[str, ...]], most: float = inf) -> Iterator[Case]:
    """Yield cases until none of these pairs is missing, or `most` of them."""
    left, missing, forked = list(known), set(missing), True
    while missing and most > 0:
        forked = not forked  # of equal cases one of each in turn
        best = max(left, key=lambda case: (len(case.meets & missing), case.forked == forked, -case.ranks))
        left = [case for case in left if case.meets & missing]
        missing -= best.meets
        most -= 1
        yield best


def most_telling(number: int) -> list[Case]:
    """Return a few cheap cases on two ranks: every phase and axis, most kinds, then as many pairs as possible."""
    known = [case for case in covering() if case.grid in AXES and case.seconds < 10]
    first = list(cover(known, set().union(*(case.values for case in known))))
    missing = set().union(*(case.pairs for case in known)) - set().union(*(case.pairs for case in first))
    return [*first, *cover(known, missing, number - len(first))]


GPU_GRID = "x=2,data=2"
GPU_CASES = [
    *(Case(phase, "kill", GPU_GRID) for phase in ("reading", "step", "save", "rename", "resume", "end")),
    *(Case(phase, "stop", GPU_GRID) for phase in ("building", "step", "save")),
    *(Case("step", kind, GPU_GRID) for kind in ("stop and continue", "closed output", "slow", *NAMED, "NaN")),
    *(Case("step", kind, GPU_GRID, forked=True) for kind in COLD),
    *(Case(phase, "SIGTERM", GPU_GRID) for phase in ("building", "save")),
    Case("save", "full disk", GPU_GRID),
]
"""The cases that run over NCCL too, 4 ranks on one GPU."""


# --- in a rank


def install() -> None:
    """Prepare the fault on all ranks, which so come to messages from the same lines; `act` chooses the one it hits."""
    case = Case(**json.loads(os.environ[CASE]))
    if pids := os.environ.get(warm.PIDS):  # a forked rank has left its id there already
        Path(pids, os.environ["RANK"]).write_text(str(os.getpid()))
    # NCCL refuses two ranks of one host on one GPU, so each is a host of its own
    os.environ |= {"NCCL_HOSTID": f"rank-{os.environ['RANK']}", "NCCL_IB_DISABLE": "1"}
    if case.phase == "none":
        return
    if case.phase == "start":
        act(case)
    elif case.phase in HOOKS:
        target, number = HOOKS[case.phase]
        before(target, number, lambda *args: act(case, *args[:1]))
    else:
        from fourfold.train.loop import Run

        launch = Run._launch

        def launched(run: Run, step: int) -> None:
            if (case.phase, step) == ("compile", 1) and "pipe" in case.grid:  # stages are not called as modules
                act(case, run)
            elif (case.phase, step) == ("compile", 1):
                run.model.register_forward_pre_hook(lambda *_: act(case, run))
            if (case.phase, step) == ("first step", 1):
                run.optimizer.register_step_pre_hook(lambda *_: act(case, run))
            if (case.phase, step) == ("step", 6):
                act(case, run)
            launch(run, step)

        Run._launch = launched  # type: ignore[method-assign]


HOOKS = {
    "rendezvous": ("fourfold.commands.train.join_watched", 1),
    "reading": ("fourfold.train.loop.open_sources", 1),
    "building": ("fourfold.train.loop.build_model", 1),
    "evaluation": ("fourfold.train.loop.Run.evaluate", 1),
    # the second save: there is a checkpoint before it
    "save": ("fourfold.checkpoint.save.PendingSave._write_file", 2),
    "rename": ("fourfold.atomic.AtomicFolder.publish", 2),
    "prune": ("fourfold.checkpoint.load.remove_checkpoint", 1),
    "resume": ("fourfold.train.checkpoints.load_training", 1),
    "end": ("fourfold.train.loop.Run._end", 1),
}
"""The function at the beginning of which the fault happens, and at its which call."""


def before(target: str, number: int, do: Callable[..., None]) -> None:
    calls = 0

    def wrapped(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            do(*args)
        return original(*args, **named)

    original = pkgutil.resolve_name(target)
    pytest.MonkeyPatch().setattr(target, wrapped)


def hit() -> Path:
    return Path(os.environ[FOLDER], "hit")


def act(case: Case, run: Any = None) -> None:
    """Do what the case says, once and on one rank."""
    if int(os.environ["RANK"]) != case.rank or hit().exists():
        return
    hit().write_text(str(time.time()))
    if case.kind in ERRORS:
        raise OSError(ERRORS[case.kind], os.strerror(ERRORS[case.kind]), str(hit()))
    ACTS[case.kind](run)


def signal_self(number: int) -> None:
    os.kill(os.getpid(), number)


def signal_launcher(number: int, seconds: float = 0.0) -> None:
    """Send the launcher a signal, and wait: for what follows from it, which may be the end of this process."""
    with suppress(ProcessLookupError):
        os.kill(int(os.environ[LAUNCHER]), number)
    time.sleep(seconds)


def stop_and_continue() -> None:
    subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getpid()}"])
    signal_self(signal.SIGSTOP)


def stop_launcher(until: str) -> None:
    """Stop the launcher, which serves the job's store, until this shell command has ended; this rank goes on."""
    launcher = int(os.environ[LAUNCHER])
    subprocess.Popen(["sh", "-c", f"{until}; kill -CONT {launcher}"], start_new_session=True)
    os.kill(launcher, signal.SIGSTOP)


def own_end() -> str:
    """Return a shell command that waits until this process has ended, but not for ever; its parent may be stopped."""
    ended = f"grep -qs '^State:.Z' /proc/{os.getpid()}/status"
    return f"n=0; while [ $n -lt {MOST_SILENT} ] && ! {ended}; do sleep 1; n=$((n+1)); done; sleep 1"


def stop_server() -> None:
    """Stop the process that forks ranks, the oldest child of the launcher, and die: the next start must do without."""
    launcher = os.environ[LAUNCHER]
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    os.kill(min(map(int, children)), signal.SIGSTOP)
    signal_self(signal.SIGKILL)


def poison(run: Any) -> None:
    """Make a parameter of this rank NaN, as a fault of the device or its memory would."""
    with torch.no_grad():
        local_of(next(iter(run.model.parameters()))).view(-1)[0] = float("nan")


ACTS: dict[str, Callable[[Any], object]] = {
    "kill": lambda _: signal_self(signal.SIGKILL),
    "stop": lambda _: signal_self(signal.SIGSTOP),
    "stop and continue": lambda _: stop_and_continue(),
    "slow": lambda _: time.sleep(2.0),
    "closed output": lambda _: time.sleep(0.5),  # the test closes its end now
    "NaN": poison,
    "launcher killed": lambda _: signal_launcher(signal.SIGKILL, 20.0),
    "launcher paused": lambda _: stop_launcher(f"sleep {DEADLINE + 1}"),
    "launcher stopped": lambda _: stop_launcher(own_end()),
    "server stopped": lambda _: stop_server(),
    "Ctrl-C twice": lambda _: [signal_launcher(signal.SIGINT, 0.6), signal_launcher(signal.SIGINT)],
    **{name: lambda _, number=number: signal_launcher(number) for name, number in SIGNALS.items() if name in NAMED},
}


# --- in the launcher


def command(case: str, folder: str, *arguments: str, forked: bool = False) -> int:
    """Run `fourfold` with these arguments and the fault; ranks are forked by the launcher, or come from the harness."""
    from fourfold.cli import main
    from fourfold.commands import train
    from fourfold.train import fork_server, launch

    tempfile.tempdir = None  # the process that this one was forked from had another folder
    if DEVICE == "cuda":  # all ranks share the first GPU
        train.wanted_ranks = lambda config, *_: config.grid.shape.world
    os.environ |= {CASE: case, FOLDER: folder, LAUNCHER: str(os.getpid())}
    # after the rank has decided about Ctrl-C
    launch.RANK = launch.RANK.replace("\nfrom fourfold.cli", "\nimport faults\nfaults.install()\nfrom fourfold.cli")
    become_rank = fork_server._become_rank
    fork_server._become_rank = lambda *given: (become_rank(*given), install())  # type: ignore[assignment]
    if forked:
        return main(arguments)
    with warm.ranks():
        return main(arguments)


def undisturbed_command(*arguments: str) -> int:
    """Run `fourfold` with these arguments, in the same way and without a fault."""
    return command(json.dumps(asdict(Case("none", "none"))), os.devnull, *arguments)


def forked_command(case: str, folder: str, *arguments: str) -> int:
    """Run `fourfold` with these arguments and the fault, on ranks that its launcher forks."""
    return command(case, folder, *arguments, forked=True)


# --- in the test


@dataclass
class Ended:
    """How a run ended."""

    code: int
    seconds: float
    """From the fault to the end."""
    err: str
    log: str


def arguments(out: Path, grid: str, data: str, *more: str, start: float = 120.0) -> list[str]:
    settings = {
        "model.layers": LAYERS.get(grid, 1), "batch.rows": 4, "batch.seq": 12, "data.held_out": 0.1,
        "log.peak_flops": 1e12, "log.tensorboard": "false", "plan.compare": "false", "train.evaluate_every": 4,
        "checkpoint.every": EVERY, "watch.deadline": DEADLINE, "watch.start": start, "watch.grace": 20,
        "optimizer.schedule": "constant", "optimizer.warmup": 2, "policy.compile": "false", "policy.dtype": "fp32",
    }  # fmt: skip
    if "pipe" in grid:
        settings["batch.micro_steps"] = 2
    changes = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    model = "moe-tiny" if "expert" in grid else "gpt-tiny"
    start = ["train", "--model", model, "--device", DEVICE, "--data", data, "--steps", str(STEPS)]
    return [*start, "--grid", grid, *changes, "--out", str(out), *more]


def undisturbed(folder: Path, grid: str, data: str) -> Path:
    """Train the run that others are compared with; return its folder."""
    out = folder / f"undisturbed-{grid}"
    said = folder / f"undisturbed-{grid}.txt"
    given = arguments(out, grid, data, "--set", "checkpoint.keep_last=9")
    process = warm.Process(undisturbed_command, *given, stdout=said, stderr=said)
    assert process.wait(300) == 0, said.read_text()
    return out


def copy_half(whole: Path, out: Path) -> None:
    """Copy a run as it was after half of its steps."""
    shutil.copytree(whole, out)
    for step, folder in Checkpoints(out / CHECKPOINTS).complete():
        if step > STEPS // 2:
            shutil.rmtree(folder)
    rewind(out / "metrics.jsonl", STEPS // 2)


def check(case: Case, folder: Path, whole: Path, data: str) -> Ended:
    """Run the case in a new folder, and raise AssertionError unless all that is promised holds."""
    folder.mkdir()
    (folder / "tmp").mkdir()
    (folder / "pids").mkdir()
    out = folder / "run"
    # on a busy machine ranks need long to join, so the deadline of the start is short only where it is tested
    start = 120.0
    if case.kind == "stop" and case.phase in (*BEFORE_SAVES, "resume"):
        start = 20.0 if case.phase in EARLY else 2 * DEADLINE
    given = arguments(out, case.grid, data, start=start)
    if case.phase == "resume":
        copy_half(whole, out)
        given = [*given[:-2], "--resume", str(out)]
    ended = train(case, folder, given)
    ranks = [int(path.read_text()) for path in (folder / "pids").iterdir()]
    until = time.monotonic() + 5
    while any(map(alive, ranks)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, ranks)), "a rank is left"
    require_expected(case, ended)
    if case.kind != "launcher killed":
        assert list((folder / "tmp").glob("fourfold-*")) == [], "a temporary folder is left"
    if ended.code != 0:
        resume(folder, out, case, data)
    assert column(out, "step", "step") == list(range(1, STEPS + 1))
    for key in ("loss", "grad_norm"):
        assert column(out, "step", key) == column(whole, "step", key), f"{key} is not that of the undisturbed run"
    return ended


def check_all(
    cases: Sequence[Case], folder: Path, *, at_once: int = 1, tell: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Check these cases in a folder, some at once because they mostly wait, and return what has failed."""
    write_texts(folder)
    data, wholes = str(folder / "texts"), {}

    def checked(number: int, case: Case) -> str:
        try:
            ended = check(case, folder / str(number), wholes[case.grid].result(), data)
        except AssertionError as error:
            tell(f"FAILED  {case}: {error}")
            return f"{case}: {error}"
        tell(f"ok      {case}: exit code {ended.code}, {ended.seconds:.1f} s after the fault")
        return ""

    warm.ready()  # before the threads: each would start a forkserver
    with ThreadPoolExecutor(at_once) as pool:
        for grid in dict.fromkeys(case.grid for case in cases):
            wholes[grid] = pool.submit(undisturbed, folder, grid, data)
        return list(filter(None, pool.map(checked, range(len(cases)), cases)))


def train(case: Case, folder: Path, given: list[str]) -> Ended:
    """Start the run, play the reader of its output, and wait for its end."""
    output, err = folder / "out", folder / "err"
    os.mkfifo(output)
    reader = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
    env = {**os.environ, warm.PIDS: str(folder / "pids"), "TMPDIR": str(folder / "tmp")}
    program = forked_command if case.forked else command
    text = json.dumps(asdict(case))
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = warm.Process(program, text, str(folder), *given, env=env, stdout=output, stderr=err)
    until, at = time.monotonic() + 120.0, 0.0
    try:
        while process.poll() is None:
            assert time.monotonic() < until, f"it hangs:\n{err.read_text()}"
            if not at and (folder / "hit").exists():
                at = time.monotonic()
                if case.kind == "closed output":
                    os.close(reader)
                    reader = -1
            if reader >= 0:
                with suppress(BlockingIOError):
                    os.read(reader, 1 << 16)
            time.sleep(0.02)
    finally:
        if process.poll() is None:
            process.kill()
        if reader >= 0:
            os.close(reader)
    assert (folder / "hit").exists(), f"the fault did not happen:\n{err.read_text()}"
    at = at or time.monotonic()
    log = folder / "run" / "log.txt"
    return Ended(process.wait(), time.monotonic() - at, err.read_text(), log.read_text() if log.exists() else "")


def require_expected(case: Case, ended: Ended) -> None:
    """Raise unless the run ended as the fault demands: its exit code, its words, and in time."""
    saved = case.phase not in BEFORE_SAVES
    context = f"exit code {ended.code} after {ended.seconds:.1f} s:\n{ended.err}"

    def demand(codes: tuple[int, ...], words: str, seconds: float) -> None:
        assert ended.code in codes, context
        assert re.search(words, ended.err) or (words != "^$" and re.search(words, ended.log)), context
        assert "Traceback" not in ended.err, context
        assert "ranks disagree" not in ended.err, context
        assert ended.seconds < seconds, context

    again = 40.0  # a restart on a busy machine
    restarted = (0,) if saved else (1,)
    match case.kind:
        case kind if kind in HARMLESS:
            demand((0,), "^$", again)
        case "kill" | "server stopped":  # new processes import torch
            seconds = again if case.kind == "kill" else 3 * again
            demand(restarted, rf"rank {case.rank} .* was killed by SIGKILL", seconds)
        case "stop":
            at = MESSAGE if case.phase == "step" and case.grid.startswith("pipe") else ""
            demand(restarted, rf"{at}rank {case.rank} .*is stopped", 20.0 + again)
        case "launcher stopped":
            demand(restarted, r"the launcher that serves it \(process \d+\) is stopped", MOST_SILENT + again)
        case "launcher killed":
            demand((-signal.SIGKILL,), "", again)  # ranks may complain until the kernel ends them
        case "NaN":
            demand((1,), "NaN|differ from each other|must be equal on all ranks", again)
        case kind if kind in ERRORS:
            demand((0,) if case.phase == "prune" else (1,), os.strerror(ERRORS[kind]), again)
        case kind:
            number = SIGNALS[kind]
            codes = (128 + number, 0) if case.phase == "end" else (128 + number,)
            name = "Ctrl-C" if number == signal.SIGINT else number.name
            demand(codes, f"(stopped|ended at once) by {name}" if ended.code else "", again)


def resume(folder: Path, out: Path, case: Case, data: str) -> None:
    """Resume the run, or begin it again if it had not begun; it must come to its end."""
    again = ["train", "--resume", str(out), "--device", DEVICE, "--steps", str(STEPS)]
    if not (out / "metrics.jsonl").exists():
        again = arguments(out, case.grid, data)
    said = folder / "resumed"
    process = warm.Process(undisturbed_command, *again, stdout=said, stderr=said)
    assert process.wait(120) == 0, said.read_text()

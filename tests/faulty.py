"""`fourfold` with a fault in one rank: `command(kind, rank, step, "train", ...)`

kill   the process ends at once            delay  it sleeps before its step
stop   the process is stopped (SIGSTOP)    skip   it leaves out the first collective of the step
raise  it raises an error                  shape  its batch has fewer tokens a row than that of the others
nan    once, a gradient is not a number    quit   it ends where the others wait for its word in the store
pause  it is stopped, and continued after PAUSE seconds

In the place of the step there may be a `Phase` of the start, for the kinds that need no run: kill, stop, pause, delay.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import warm
from fourfold import comm
from fourfold.cli import main
from fourfold.params import local_of
from fourfold.train import launch
from fourfold.train.loop import Run
from fourfold.watch.liveness import Alarm, Phase

FAULT = "FOURFOLD_TEST_FAULT"
DELAY = 600.0
PAUSE = 2.0


def install() -> None:
    """In a rank: what the environment asks for."""
    kind, rank, step = os.environ[FAULT].split(",")
    if step in tuple(Phase):
        install_at(Phase(step), kind, int(rank))
        return
    launch_step = Run._launch

    def faulty(run: Run, now: int) -> None:
        if run.grid.rank == int(rank) and now == int(step):
            FAULTS[kind](run)
        launch_step(run, now)

    Run._launch = faulty  # type: ignore[method-assign]


def install_at(phase: Phase, kind: str, rank: int) -> None:
    enter, watch = Alarm.enter, Alarm.__init__

    def entering(alarm: Alarm, now: Phase) -> None:
        enter(alarm, now)
        if now is phase and alarm._rank == rank:
            time.sleep(1.5)  # so that a heartbeat has named the phase
            FAULTS[kind](None)

    def watching(alarm: Alarm, *args: Any) -> None:
        watch(alarm, *args)
        alarm.enter(Phase.GROUPS)  # in which an alarm begins

    Alarm.enter, Alarm.__init__ = entering, watching  # type: ignore[method-assign]


def pause(_: object) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def kill(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def delay(_: object) -> None:
    time.sleep(DELAY)


def fail(_: Run) -> None:
    raise RuntimeError("this rank has had enough")


def skip(_: Run) -> None:
    opens = comm._record

    def once(*call: Any) -> Any:
        _, _, grid, axis, _ = call
        if grid.size(axis) == 1:
            return opens(*call)
        comm._record = opens
        return None

    comm._record = once  # type: ignore[assignment]


def shape(run: Run) -> None:
    following = run.loader.next

    def shorter() -> Any:
        run.loader.next = following  # type: ignore[method-assign]
        return [batch._replace(tokens=batch.tokens[:, 1:], targets=batch.targets[:, 1:]) for batch in following()]

    run.loader.next = shorter  # type: ignore[method-assign]


def nan(run: Run) -> None:
    step = run.optimizer.clip_and_step

    def spoilt(*call: Any, **named: Any) -> Any:
        local_of(run.model.layers[0].mlp.down.weight.grad)[0] = float("nan")
        FAULTS["nan"] = lambda _: None
        return step(*call, **named)

    run.optimizer.clip_and_step = spoilt  # type: ignore[method-assign]


def quit(run: Run) -> None:
    run.stop._channel.decide = lambda *_: kill(run)  # type: ignore[method-assign, assignment, return-value]


FAULTS: dict[str, Callable[[Any], None]] = {
    "kill": kill, "stop": stop, "delay": delay, "raise": fail, "skip": skip, "shape": shape,
    "nan": nan, "quit": quit, "pause": pause,
}  # fmt: skip


def command(kind: str, rank: int, step: int | Phase, *arguments: str) -> int:
    os.environ[FAULT] = f"{kind},{rank},{step}"
    launch.RANK = f"import faulty\nfaulty.install()\n{launch.RANK}"
    with warm.ranks():
        return main(arguments)

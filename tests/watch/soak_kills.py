"""Ranks killed at random instants of training and saving, again and again: the run ends with the losses of one that
was left alone. `make soak` runs it.

    python tests/watch/soak_kills.py [KILLS] [SEED] [GRID ...]         # default 100 kills on each grid of GRIDS

A run on four ranks saves after every few steps. Some time after its ranks have taken a step, saving or not, one of
them is killed with SIGKILL; the agent starts them again and they go on from the newest complete checkpoint. Every
tenth kill takes the whole job, which is then started again by the same command. Runs follow one another until there
were enough kills; each must have every step once, in order, with the loss of the undisturbed run bit for bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

STEPS = 90
GRIDS = ("x=2,data=2", "pipe=2,x=2", "pipe=4")
COMMAND = [
    sys.executable, "-W", "ignore", "-m", "fourfold.cli", "train", "--model", "gpt-tiny", "--set", "model.layers=4",
    "--steps", str(STEPS), "--set", "checkpoint.every=3", "--set", "batch.rows=4", "--set", "batch.seq=32",
    "--set", "policy.shard_optimizer=true", "--set", "train.evaluate_every=0", "--set", "log.tensorboard=false",
    "--set", "plan.compare=false", "--device", "cpu", "--restarts", "1000",
]  # fmt: skip
HANG_SECONDS = 180.0
"""Without a step for that long, a run hangs."""


def main() -> int:
    kills, seed = (int(text) for text in [*sys.argv[1:3], *["100", "0"][len(sys.argv[1:3]) :]])
    return max(under_fire(grid, kills, seed) for grid in sys.argv[3:] or GRIDS)


def under_fire(grid: str, kills: int, seed: int) -> int:
    """Return 0 if the losses on this grid are those of an undisturbed run, whatever was killed."""
    chance, began = random.Random(seed), time.monotonic()
    command = [*COMMAND, "--grid", grid]
    with tempfile.TemporaryDirectory(prefix="fourfold-kills-") as folder:
        expected = undisturbed(command, Path(folder) / "alone")
        done, in_saves, runs = 0, 0, 0
        while done < kills:
            run = Path(folder) / f"run-{runs}"
            killed, saving = disturb(command, run, chance, kills - done)
            found = losses(run)
            if found != expected:
                print(f"{grid}: run {runs} after {killed} kills: {differing(found, expected)}")
                return 1
            done, in_saves, runs = done + killed, in_saves + saving, runs + 1
            said = f"{done} kills, {in_saves} during a save, in {runs} runs, losses equal"
            print(f"{grid}: {said}, {time.monotonic() - began:.0f} s", flush=True)
    return 0


def undisturbed(command: list[str], run: Path) -> list[tuple[int, float]]:
    subprocess.run([*command, "--resume", str(run)], check=True, stdout=subprocess.DEVNULL)
    return losses(run)


def disturb(command: list[str], run: Path, chance: random.Random, most: int) -> tuple[int, int]:
    """Let a run come to its end under fire; how often it was hit, and how often during a save."""
    killed = in_saves = 0
    with (run.parent / f"{run.name}.log").open("w") as log:
        job = start(command, run, log)
        while True:
            before = size(run)
            if not moved(run, before, job):
                if job.returncode == 0:
                    return killed, in_saves
                raise RuntimeError(f"the run ended with {job.returncode}:\n{Path(log.name).read_text()[-3000:]}")
            if killed >= most:
                continue
            time.sleep(chance.uniform(0.0, 4.0))
            whole = killed % 10 == 9
            saving = any((run / "checkpoints").glob(".step-*.partial"))
            hit = kill_all(job) if whole else kill_one(job, chance)
            killed, in_saves = killed + hit, in_saves + (hit and saving)
            if whole:
                job.wait()
                job = start(command, run, log)


def start(command: list[str], run: Path, log: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*command, "--resume", str(run)], stdout=log, stderr=log, start_new_session=True)  # type: ignore[call-overload]


def size(run: Path) -> int:
    with suppress(FileNotFoundError):
        return (run / "metrics.jsonl").stat().st_size
    return 0


def moved(run: Path, before: int, job: subprocess.Popen[bytes]) -> bool:
    """Wait until the run has written of another step; False where it has ended."""
    until = time.monotonic() + HANG_SECONDS
    while size(run) == before:
        if job.poll() is not None:
            return False
        if time.monotonic() > until:
            kill_all(job)
            raise RuntimeError(f"{run} has not moved for {HANG_SECONDS:.0f} s")
        time.sleep(0.01)
    return True


def ranks_of(job: subprocess.Popen[bytes]) -> list[int]:
    """The processes of the ranks, children of the agent."""
    found = []
    with suppress(OSError):
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for child in map(int, children):
            with suppress(OSError):
                if os.getsid(child) == child:  # the process that forks ranks is in the session of its launcher
                    found.append(child)
    return found


def kill_one(job: subprocess.Popen[bytes], chance: random.Random) -> int:
    ranks = ranks_of(job)
    if not ranks:
        return 0
    with suppress(ProcessLookupError):
        os.kill(chance.choice(ranks), signal.SIGKILL)
        return 1
    return 0


def kill_all(job: subprocess.Popen[bytes]) -> int:
    ranks = ranks_of(job)
    for process in (job.pid, *ranks):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return 1


def losses(run: Path) -> list[tuple[int, float]]:
    events = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(event["step"], event["loss"]) for event in events if event["event"] == "step"]


def differing(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> str:
    for one, other in zip(found, expected, strict=False):
        if one != other:
            return f"step and loss {one} instead of {other}"
    return f"{len(found)} steps instead of {len(expected)}"


if __name__ == "__main__":
    sys.exit(main())

"""Deadlines: ranks that wait too long end together, with a diagnosis that names who did not come.

Here the ranks run a small program of collectives; `test_watch.py` has whole runs.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from alarmed import DEADLINE, preparation, program, ready
from fourfold.environment import AGENT_HAS_STORE
from fourfold.errors import Failure
from fourfold.grid import Shape
from fourfold.job import Channel
from fourfold.watch.liveness import (
    DEATH_SECONDS,
    Alarm,
    AwakeClock,
    Heartbeat,
    Phase,
    RankEnd,
    explain_start,
    first_cause,
    waits_for_ranks,
)
from fourfold.watch.processes import ProcessState, Siblings, process_state
from fourfold.watch.tape import DIAGNOSIS, Tape, Waits, tape_path
from harness import RankFailed
from runs import needs_proc


@pytest.fixture
def said(ranks, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Last words by file, of a job with the fault in rank 1 that the test names.

    A rank whose peer has ended may fail by that before it has spoken.
    """
    ranks(4).run(ready)
    began = time.monotonic()
    with pytest.raises(RankFailed):
        ranks(4).run(program, str(tmp_path), request.param, 1, timeout=30)
    assert time.monotonic() - began < DEADLINE + 15, "bounded"
    yield {path.name: path.read_text() for path in tmp_path.glob("said-*")}


@pytest.mark.parametrize("said", ["stop"], indirect=True)
def test_a_stopped_rank_is_named_and_ended(said: dict[str, str], tmp_path: Path) -> None:
    assert not any(name.startswith("said-1") for name in said), "the silent rank is killed"
    assert sum("judge" in name for name in said) == 1
    [text] = set(said.values())
    assert text == (tmp_path / DIAGNOSIS).read_text().strip()
    headline, *_ = text.splitlines()
    assert re.match(
        r"step 3: all_gather\[z\] weights: rank 1 never arrived: process \d+ on \S+ is stopped .*`kill -CONT", headline
    )
    assert re.search(rf" \(rank \d (waited|has not heard of rank 1) for {DEADLINE:g} s\)$", headline)
    assert re.search(r"rank 1 \(\S+, process \d+\) is stopped .*; last launched reduce_scatter\[x\] activations", text)
    assert "was computing (step 3)" in text
    assert "stood at" in text
    assert "in collectives" in text


@pytest.mark.parametrize("said", ["delay"], indirect=True)
def test_a_delayed_rank_says_where_it_stands(said: dict[str, str]) -> None:
    assert any(name.startswith("said-1") for name in said)
    [text] = set(said.values())
    assert text.startswith("step 3: all_gather[z] weights: rank 1 never arrived")
    assert "does not answer" not in text
    assert "rank 1 never arrived: it was computing" in text
    assert "rank 1 stood at" in text
    assert "time.sleep(60)" in text


@pytest.mark.slow
@pytest.mark.parametrize("said", ["skip"], indirect=True)
def test_a_rank_that_skips_a_collective_is_named(said: dict[str, str]) -> None:
    """From then on it is one behind along z: the same collective of the next step stands where this one should."""
    [text] = set(said.values())
    assert text.startswith("step 3: ranks disagree on which collective comes next along z: ")
    assert "rank 1 launched all_gather[z] weights of 32 bytes in step 4" in text
    assert "rank 3 all_gather[z] weights of 32 bytes in step 3" in text


@pytest.mark.slow
def test_who_dies_is_missed_by_those_who_wait_for_its_word(ranks, tmp_path: Path) -> None:
    """In the store, where no connection to it breaks, and long before the deadline."""
    ranks(4).run(ready)
    began = time.monotonic()
    with pytest.raises(RankFailed):
        ranks(4).run(program, str(tmp_path), "die quietly", 1, 600.0, moment=20)
    assert time.monotonic() - began < DEATH_SECONDS + 10
    said = {path.name: path.read_text() for path in tmp_path.glob("said-*")}
    [text] = set(said.values())
    assert re.match(r"step 3: asking the others: rank 1 never arrived: process \d+ on \S+ is gone \(rank ", text)
    assert re.search(r"saw that rank 1 \(process \d+\) had died\)", text)


def test_who_has_left_is_not_missed() -> None:
    store = dist.HashStore()
    mine, other = (Siblings(Channel("run", (0, 1), store, rank=rank)) for rank in range(2))
    assert not mine.dead(), "both are this process, which runs"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        other._mine = f"2:{ended.pid}:0"
    other.leave()
    assert mine.dead() == {2: ended.pid}
    other.leave()
    assert not mine.dead()


def test_who_is_only_late_is_waited_for(ranks, tmp_path: Path) -> None:
    ranks(4).run(program, str(tmp_path), "late", 1, timeout=30)
    assert not list(tmp_path.glob("said-*"))
    assert not (tmp_path / DIAGNOSIS).exists()


def test_a_rank_that_works_alone_before_the_first_step_is_waited_for(ranks, tmp_path: Path) -> None:
    """It says so itself, and nobody takes it for stuck, also after several deadlines."""
    ranks(4).run(preparation, str(tmp_path), 0.6, 2.5, timeout=30)
    assert not list(tmp_path.glob("said-*"))
    [told] = tmp_path.glob("told-*")
    assert told.name == "told-0"
    first, *_ = told.read_text().splitlines()
    assert re.fullmatch(r"rank 0 has been opening the data for \d s, and other ranks wait for it", first)


def test_a_process_that_was_stopped_does_not_count_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = AwakeClock()
    for _ in range(5):
        now += 1.5  # a busy machine
        clock.tick(1.0)
    assert clock.since(100.0) == 7.5
    now += 600.0
    clock.tick(1.0)
    assert clock.since(100.0) == 0.0
    now += 1.0
    assert clock.since(100.0) == 1.0


class FrozenStore:
    """A store whose process can be stopped: every call waits until it is continued."""

    def __init__(self) -> None:
        self._store, self.runs = dist.HashStore(), threading.Event()
        self.runs.set()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)

        def call(*given: Any) -> Any:
            self.runs.wait(30)
            return found(*given)

        return call if callable(found) else found

    def clone(self) -> FrozenStore:
        return self


def test_who_asks_a_store_that_does_not_answer_waits() -> None:
    """Whatever it asks: no tape names every question, and a rank must notice that its launcher is stopped."""
    store = FrozenStore()
    channel = Channel("run", (0, 1), store, rank=0, seconds=5.0)  # type: ignore[arg-type]
    store.runs.clear()
    for ask in (partial(channel.put, "key", "text"), partial(channel.announced, "key"), partial(channel.drop, "key")):
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        time.sleep(0.1)
        assert waits_for_ranks(sys._current_frames()[asking.ident or 0])
    assert not waits_for_ranks(sys._current_frames()[threading.get_ident()])
    store.runs.set()


def test_a_launcher_that_was_stopped_makes_no_rank_blame_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two ranks wait for each other through its store. It is continued after several deadlines, or never."""
    monkeypatch.setattr("fourfold.watch.liveness.CUT_OFF_SECONDS", 1.5)
    monkeypatch.setattr("fourfold.watch.liveness.GAP_SECONDS", 0.2)
    monkeypatch.setattr("fourfold.watch.processes.os.getppid", lambda: launcher.pid)
    monkeypatch.setenv(AGENT_HAS_STORE, "True")
    with subprocess.Popen(["sleep", "60"]) as launcher:
        ends: list[str] = []
        for stays in (False, True):
            store = FrozenStore()
            alarms = [
                Alarm(Channel("run", (0, 1), store, rank=rank), 0.6, lambda found, _: ends.append(found.text))  # type: ignore[arg-type]
                for rank in range(2)
            ]
            for rank, alarm in enumerate(alarms):
                tape = Tape(tape_path(tmp_path, rank), rank, Shape(x=2))
                alarm.watch_steps(tape, tmp_path)
                tape.doing("asking the others whether to stop", Waits.RANKS)
            launcher.send_signal(signal.SIGSTOP)
            store.runs.clear()
            wait_for_state(launcher.pid, ProcessState.STOPPED)
            time.sleep(3.0 if stays else 1.3)
            launcher.send_signal(signal.SIGCONT)
            store.runs.set()
            for alarm in alarms:
                alarm._tape.doing("computing")  # type: ignore[union-attr]  # the answer has come
            time.sleep(0.5)
            for alarm in alarms:
                alarm.close(done=True)
            if not stays:
                assert ends == []
            for text in ends:
                named = rf"the launcher that serves it \(process {launcher.pid}\) is stopped"
                assert re.search(rf"the job's store does not answer: {named}", text), text
            assert bool(ends) == stays
        launcher.kill()


def start(**ranks: tuple[Phase, bool]) -> dict[int, Heartbeat]:
    """Heartbeats of ranks, by the phase that each is in and whether it waits there."""
    return {int(name[1:]): Heartbeat(7, *where, f"node{name[1:]}", 4711) for name, where in ranks.items()}


def test_who_holds_up_the_start_is_said_with_what_is_known() -> None:
    waits, works = (Phase.MODEL, True), (Phase.DATA, False)
    beats = start(r0=waits, r1=works, r2=waits)
    stacks = {0: "line\n", 2: "line\n"}
    for state, said in (
        ({1: ProcessState.STOPPED}, "is stopped (SIGSTOP or Ctrl-Z; `kill -CONT 4711`"),
        ({1: ProcessState.GONE}, "is gone"),
        ({}, "does not answer"),  # on another node
    ):
        headline, *more = explain_start(beats, stacks, state)
        assert headline.startswith(f"before the first step, opening the data: rank 1 (process 4711 on node1) {said}")
        assert "  ranks 0, 2 was building the model and waited for other ranks" in more
    headline, *_ = explain_start(beats, {**stacks, 1: "line\n"}, {})
    assert headline == "before the first step, opening the data: rank 1 still works"
    assert all(Heartbeat.of(beat.text()) == beat for beat in beats.values())


def wait_for_state(process: int, state: ProcessState) -> None:
    until = time.monotonic() + 20
    while process_state(process) is not state:
        assert time.monotonic() < until


@needs_proc
def test_the_state_of_a_process_is_what_the_kernel_says() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        wait_for_state(process.pid, ProcessState.RUNS)  # first it may be blocked by the disk that holds its program
        assert process_state(process.pid, 1) is ProcessState.GONE, "another process has the number now"
        process.send_signal(signal.SIGSTOP)
        wait_for_state(process.pid, ProcessState.STOPPED)
        process.kill()
    assert process_state(process.pid) is ProcessState.GONE


def end(rank: int, exit_code: int, failure: Failure | None, at: float = 0.0, *, elsewhere: bool = False) -> RankEnd:
    return RankEnd(rank, 4711 + rank, exit_code, failure, "", at, elsewhere)


def test_the_first_cause_is_what_knows_most() -> None:
    """By the order of `first_cause`, whatever came first."""
    diagnosis, killed, error = end(0, 1, Failure.DIAGNOSIS, 9), end(1, -9, None, 8), end(2, 1, Failure.ERROR, 7)
    users, lost, death = end(3, 1, Failure.USER, 6), end(4, 1, Failure.LOST_PEER, 5), end(5, 1, Failure.DEATH, 4)
    in_order = [diagnosis, killed, users, error, death, lost]
    for place, first in enumerate(in_order):
        assert first_cause(reversed(in_order[place:])) is first


def test_a_rank_with_an_error_of_its_own_comes_before_one_that_heard_of_it_and_ended_first() -> None:
    heard, own = end(1, 1, Failure.USER, 1, elsewhere=True), end(0, 1, Failure.USER, 2)
    assert first_cause([heard, own]) is own
    assert first_cause([heard, end(2, 1, Failure.LOST_PEER, 0)]) is heard


def test_a_rank_that_was_killed_after_it_lost_a_connection_was_killed() -> None:
    lost = end(0, 1, Failure.LOST_PEER, 1)
    killed = end(1, -15, Failure.LOST_PEER, 2)
    assert first_cause([lost, killed]) is killed

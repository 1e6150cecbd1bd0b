"""What a rank leaves on its tape, and what is told from the tapes of all."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest

from fourfold.grid import Shape
from fourfold.job import ranks_text
from fourfold.ledger import Collective, Ledger
from fourfold.watch.diagnose import Diagnosis, diagnose, missed_by
from fourfold.watch.processes import ProcessState
from fourfold.watch.tape import ENTRIES, MAX_LINES, Tape, TapeReading, Waits, other_end, read, read_all, tape_path

SHAPE = Shape(x=2, z=2)


def gather(label: str = "weight", axis: str = "z", nbytes: int = 64) -> Collective:
    return Collective("all_gather", axis, nbytes, 2, label)


@pytest.fixture
def tape(tmp_path: Path) -> Tape:
    return Tape(tape_path(tmp_path, 1), 1, SHAPE)


def test_what_was_launched_can_be_read(tape: Tape, tmp_path: Path) -> None:
    tape.step = 7
    tape.doing("computing")
    records = [gather("one"), gather("two", "x"), gather("three", nbytes=1 << 40)]
    for record in records:
        tape.launched(record)
    found = read(tape_path(tmp_path, 1))
    assert [entry.record for entry in found.entries] == records
    assert [entry.number for entry in found.entries] == [1, 1, 2]
    assert {entry.step for entry in found.entries} == {7}
    assert found.launched == {"z": 2, "x": 1}
    assert (found.who.rank, found.who.shape, found.who.process) == (1, SHAPE, os.getpid())
    assert found.doing is not None
    assert (found.doing.what, found.doing.step) == ("computing", 7)
    assert not found.waits


def test_a_tape_keeps_the_last_launches(tape: Tape, tmp_path: Path) -> None:
    for number in range(2 * ENTRIES + 5):
        tape.launched(gather(f"number {number}"))
    tape.launched(gather("rare", "data"))
    found = read(tape_path(tmp_path, 1))
    assert len(found.entries) == ENTRIES - 1
    assert found.entries[-2].record.label == f"number {2 * ENTRIES + 4}"
    assert all(after.number == before.number + 1 for before, after in pairwise(found.entries[:-1]))
    assert found.launched == {"z": 2 * ENTRIES + 5, "data": 1}


def test_a_frozen_tape_stays_as_it_is(tape: Tape, tmp_path: Path) -> None:
    tape.launched(gather("before"))
    tape.doing("waiting")
    tape.freeze()
    tape.launched(gather("after"))
    tape.waits(gather("after"))
    tape.landed()
    tape.doing("computing")
    tape.freeze()
    found = read(tape_path(tmp_path, 1))
    assert [entry.record.label for entry in found.entries] == ["before"]
    assert found.doing is not None
    assert found.doing.what == "waiting"
    tape.close()


PIPED = Shape(pipe=3)
HIGHER, LOWER = "F toward higher ranks", "B toward lower ranks"


def end(op: Literal["send", "receive"], peer: int, micro: int, lane: str = HIGHER) -> Collective:
    toward = 1 if lane == HIGHER else -1
    stage = peer if op == "receive" else peer - toward
    return Collective(op, "pipe", 64, 3, f"stream of stage {stage}, micro-batch {micro}", lane, peer)


def test_messages_are_counted_by_lane_and_peer(tmp_path: Path) -> None:
    """Both ends of one lane meet by their numbers, whatever else travels along pipe."""
    tape = Tape(tape_path(tmp_path, 1), 1, PIPED)
    records = [end("receive", 0, 0), end("receive", 0, 1), end("send", 2, 0), end("receive", 2, 0, LOWER)]
    for record in (*records, Collective("all_reduce", "pipe", 8, 3, "loss")):
        tape.launched(record)
    found = read(tape_path(tmp_path, 1))
    assert found.launched == {"pipe:F+<0": 2, "pipe:F+>2": 1, "pipe:B-<2": 1, "pipe": 1}
    read_back = [(entry.record.op, entry.record.lane, entry.record.peer) for entry in found.entries[:-1]]
    assert read_back == [(record.op, record.lane, record.peer) for record in records]
    assert [other_end(line, 1) for line in ("pipe:F+<0", "pipe:B-<2", "pipe:F+>2")] == [
        "pipe:F+>1", "pipe:B->1", "pipe:F+<1"
    ]  # fmt: skip


def test_many_peers_leave_the_tape_whole(tmp_path: Path) -> None:
    tape = Tape(tape_path(tmp_path, 0), 0, Shape(pipe=64))
    for peer in range(1, 64):
        tape.launched(end("send", peer, 0))
    found = read(tape_path(tmp_path, 0))
    assert len(found.launched) == MAX_LINES
    assert [entry.record.peer for entry in found.entries] == list(range(1, 64))


def test_tapes_of_a_start_with_more_ranks_are_not_read(tmp_path: Path) -> None:
    for rank in range(4):
        Tape(tape_path(tmp_path, rank), rank, SHAPE)
    for rank in range(2):
        Tape(tape_path(tmp_path, rank), rank, Shape(x=2))
    assert sorted(read_all(tmp_path)) == [0, 1]


def test_the_ledger_tells_the_tape(tape: Tape, tmp_path: Path) -> None:
    ledger, records = Ledger(), [gather("one"), gather("two")]
    ledger.listener = tape
    for record in records:
        ledger.append(record)
        ledger.begin_flight(record)
    ledger.append(gather("nothing travels"))
    with ledger.waiting(records[1], on_gpu=False):
        [waits_for] = read(tape_path(tmp_path, 1)).waits_for
        assert (waits_for.record, waits_for.number) == (records[1], 2)
        assert [entry.record for entry in read(tape_path(tmp_path, 1)).entries] == records
        assert tape.since is not None
    assert not read(tape_path(tmp_path, 1)).waits
    assert tape.since is None


def test_what_a_failed_wait_was_for_stays_on_the_tape(tape: Tape, tmp_path: Path) -> None:
    ledger, record = Ledger(), gather()
    ledger.listener = tape
    ledger.begin_flight(record)
    with pytest.raises(RuntimeError), ledger.waiting(record, on_gpu=False):
        raise RuntimeError("lost")
    assert [entry.record for entry in read(tape_path(tmp_path, 1)).waits_for] == [record]


def test_a_host_that_reads_its_device_waits_for_all_it_has_launched(tape: Tape, tmp_path: Path) -> None:
    for record in (gather("one"), gather("two"), gather("three", "x")):
        tape.launched(record)
    tape.doing("reading results", Waits.DEVICE)
    assert [entry.record.label for entry in read(tape_path(tmp_path, 1)).waits_for] == ["two", "three"]


def test_what_is_no_tape_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "watch" / "rank-00000.tape"
    path.parent.mkdir()
    path.write_text("hello")
    with pytest.raises(ValueError, match="is not a tape: a tape begins with 'fourfold tape 1'"):
        read(path)
    damaged: list[str] = []
    assert read_all(tmp_path, damaged) == {} and "rank-00000.tape is not a tape" in damaged[0]


# --- what the tapes of a job say


def job(folder: Path, act: Callable[[int, Tape], None], shape: Shape = SHAPE) -> dict[int, TapeReading]:
    """The tapes of ranks that did what `act` does."""
    for rank in range(shape.world):
        act(rank, Tape(tape_path(folder, rank), rank, shape))
    return read_all(folder)


def go(tape: Tape, records: Sequence[Collective], *, waits: bool) -> None:
    """Launch these and wait for each, for ever for the last one if `waits`."""
    for place, record in enumerate(records):
        tape.launched(record)
        tape.waits(record)
        if not waits or place < len(records) - 1:
            tape.landed()


def said(found: Diagnosis) -> str:
    return "\n".join(found.lines())


PROGRAM = [gather("one", "x"), gather("two", "z"), gather("three", "x")]


@pytest.mark.parametrize("silent", [0, 1, 2, 3])
def test_a_rank_that_never_arrived_is_named(tmp_path: Path, silent: int) -> None:
    """It stops after the first collective. Along z its peer waits for it; the others wait for that one along x."""
    [peer] = set(SHAPE.ranks_along("z", silent)) - {silent}
    tapes = [Tape(tape_path(tmp_path, rank), rank, SHAPE) for rank in range(4)]
    last = {silent: 0, peer: 1}
    for place, record in enumerate(PROGRAM):
        for rank, tape in enumerate(tapes):
            tape.step = 3
            if place <= last.get(rank, 2):
                go(tape, [replace(record)], waits=rank != silent and place == last.get(rank, 2))
    tapes[silent].doing("reading a batch")
    stacks = {rank: f"line {rank != peer}\n" for rank in range(4) if rank != silent}
    found = diagnose(read_all(tmp_path), stacks)
    assert found.culprits == (silent,)
    assert found.disagreement is None
    text = said(found)
    assert text.startswith(f"step 3: all_gather[z] two: rank {silent} never arrived")
    assert f"process {os.getpid()}) does not answer; last launched all_gather[x] one of step 3" in text
    assert "was reading a batch (step 3)" in text
    assert f"rank {peer} stood at\n    line False" in text


def test_who_waits_for_a_silent_rank_is_not_who_holds_up_the_others(tmp_path: Path) -> None:
    """Rank 2 was stopped after it had come along x: rank 3 waits for its bytes, ranks 0 and 1 for both."""

    def act(rank: int, tape: Tape) -> None:
        go(tape, PROGRAM[: 1 if rank > 1 else 2], waits=rank != 2)

    found = diagnose(job(tmp_path, act), dict.fromkeys((0, 1, 3), "line"))
    assert found.culprits == (2,)


def test_ranks_that_launched_different_things_are_named(tmp_path: Path) -> None:
    """Rank 2 leaves the first collective along x out."""
    tapes = job(tmp_path, lambda rank, tape: go(tape, PROGRAM[1:] if rank == 2 else PROGRAM[:2], waits=True))
    found = diagnose(tapes, {})
    assert found.disagreement is not None
    assert found.disagreement.where == "which collective comes next along x"
    assert {entry.number for entry in found.disagreement.launched.values()} == {1}
    assert "ranks disagree on which collective comes next along x" in found.headline
    assert found.headline.endswith(
        "rank 2 launched all_gather[x] three of 64 bytes in step 0, rank 3 all_gather[x] one of 64 bytes in step 0"
    )


@pytest.mark.parametrize("silent", [0, 1, 2, 3])
def test_parts_of_an_exchange_differ_and_who_never_arrived_is_named(tmp_path: Path, silent: int) -> None:
    """Tokens choose experts, so ranks exchange parts of different sizes."""

    def act(rank: int, tape: Tape) -> None:
        there, back = (Collective("all_to_all", "expert", 64 + 8 * rank, 2, name, sent=rank) for name in ("a", "b"))
        program = [there, back, gather("norm", "data"), there]
        go(tape, program[: 1 if rank == silent else 4], waits=rank != silent)

    tapes = job(tmp_path, act, Shape(data=4, expert=2))
    assert diagnose(tapes, {}).disagreement is None
    found = diagnose(tapes, dict.fromkeys({*range(4)} - {silent}, "line"))
    assert found.culprits == (silent,)
    assert f"rank {silent} never arrived" in found.headline


def test_the_earliest_disagreement_is_found_without_comparing_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 2 and 3 are on a node whose clock is a day behind, and disagree later because ranks 0 and 1 did."""
    tapes = {}
    for rank in range(4):
        monkeypatch.setattr("fourfold.watch.tape.time.time", lambda day=rank // 2: 2e9 - 86400.0 * day)
        tapes[rank] = Tape(tape_path(tmp_path, rank), rank, SHAPE)
        after = gather("after", "x", nbytes=8 * rank)
        go(tapes[rank], [gather("one", "x"), gather("two", "x", nbytes=8 * rank if rank < 2 else 8), after], waits=True)
    found = diagnose(read_all(tmp_path), {}).disagreement
    assert found is not None
    assert {entry.record.label for entry in found.launched.values()} == {"two"}


def test_a_tape_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    Tape(tape_path(tmp_path, 0), 0, SHAPE)
    path = tape_path(tmp_path, 0)
    head, rest = path.read_bytes()[:1024], path.read_bytes()[1024:]
    path.write_bytes(head.replace(b'"start": "', b'"began": 1.5, "start": "', 1)[:1024] + rest)
    assert read(path).who.rank == 0


def test_different_sizes_are_a_disagreement(tmp_path: Path) -> None:
    def act(rank: int, tape: Tape) -> None:
        go(tape, [replace(PROGRAM[0], nbytes=128 if rank == 5 else 64)], waits=True)

    found = diagnose(job(tmp_path, act, Shape(x=8)), {})
    assert found.headline.endswith(
        "ranks 0, 1, 2, 3, 4, 6, 7 launched all_gather[x] one of 64 bytes in step 0, rank 5 all_gather[x] one of 128 "
        "bytes in step 0"
    )


def test_where_all_have_come_it_is_the_link(tmp_path: Path) -> None:
    here = job(tmp_path, lambda _, tape: go(tape, PROGRAM[:2], waits=True))
    tapes = {rank: replace(tape, who=replace(tape.who, host=f"node{rank // 2}")) for rank, tape in here.items()}
    found = diagnose(tapes, dict.fromkeys(range(4), "line"))
    assert not found.culprits
    assert found.headline.endswith(
        "all of ranks 0, 2 arrived, but their bytes did not, though all of them answer; look at the links of node0 and "
        "node1"
    )


def test_a_link_is_not_blamed_where_something_else_explains_it(tmp_path: Path) -> None:
    here = job(tmp_path, lambda _, tape: go(tape, PROGRAM[:2], waits=True))
    tapes = {rank: replace(tape, who=replace(tape.who, host=f"node{rank // 2}")) for rank, tape in here.items()}
    silent = dict.fromkeys((0, 1, 3), "line")
    process = os.getpid()
    cases = {
        "no rank was asked whether it still runs": (tapes, {}, {}),
        "all of them answer and are on": (here, dict.fromkeys(range(4), "line"), {}),
        f"and rank 2 no longer takes part: process {process} on node1 does not answer": (tapes, silent, {}),
        f"and rank 2 no longer takes part: process {process} on node1 is stopped": (
            tapes, silent, {2: ProcessState.STOPPED}
        ),
    }  # fmt: skip
    for said, (readings, stacks, states) in cases.items():
        headline = diagnose(readings, stacks, states).headline
        assert said in headline
        assert "links" not in headline


def test_a_stopped_process_is_said_to_be_stopped(tmp_path: Path) -> None:
    def act(rank: int, tape: Tape) -> None:
        go(tape, PROGRAM[: 0 if rank == 2 else 1], waits=rank != 2)

    found = diagnose(job(tmp_path, act), dict.fromkeys((0, 1, 3), "line"), {2: ProcessState.STOPPED})
    assert re.search(r": rank 2 never arrived: process \d+ on \S+ is stopped \(.*`kill -CONT \d+`", found.headline)


def test_a_silent_rank_is_named_where_the_others_wait_in_the_middle_of_some_work(tmp_path: Path) -> None:
    def act(rank: int, tape: Tape) -> None:
        tape.step = 7
        tape.doing("computing" if rank == 1 else "saving a checkpoint")

    found = diagnose(job(tmp_path, act), dict.fromkeys((0, 2, 3), "line"), {1: ProcessState.BLOCKED})
    assert found.culprits == (1,)
    assert found.headline.startswith("step 7: saving a checkpoint: rank 1 never arrived: process ")
    assert "is blocked inside the kernel, by a disk" in found.headline


def test_a_rank_that_left_no_tape_and_does_not_answer_never_began(tmp_path: Path) -> None:
    tapes = job(tmp_path, lambda _, tape: go(tape, PROGRAM[:1], waits=True))
    del tapes[3]
    found = diagnose(tapes, dict.fromkeys((0, 1, 2), "line"))
    assert found.culprits == (3,)
    assert "rank 3 never arrived: it does not answer" in found.headline
    assert "rank 3 has left no tape: it had not begun its first step" in said(found)


def test_ranks_that_wait_in_the_store_name_the_one_that_does_not(tmp_path: Path) -> None:
    def act(rank: int, tape: Tape) -> None:
        go(tape, PROGRAM, waits=False)
        what = "saving a checkpoint" if rank == 3 else "asking the others whether to stop"
        tape.doing(what, Waits.NOTHING if rank == 3 else Waits.RANKS)

    found = diagnose(job(tmp_path, act), {})
    assert (
        found.headline == "step 0: asking the others whether to stop: rank 3 never arrived: it was saving a checkpoint"
    )


def test_where_all_wait_in_the_store_no_link_is_blamed(tmp_path: Path) -> None:
    found = diagnose(job(tmp_path, lambda _, tape: tape.doing("asking the others whether to stop", Waits.RANKS)), {})
    assert found.headline.endswith(
        "to stop: all of ranks 0, 1, 2, 3 arrived, and wait for each other through the job's store"
    )


def test_devices_that_wait_for_each_other_are_told_apart_by_what_was_launched(tmp_path: Path) -> None:
    def act(rank: int, tape: Tape) -> None:
        go(tape, PROGRAM[: 2 if rank == 1 else 3], waits=False)
        tape.doing("computing" if rank == 1 else "reading results", Waits.NOTHING if rank == 1 else Waits.DEVICE)

    found = diagnose(job(tmp_path, act), {})
    assert found.culprits == (1,)
    assert found.headline == "step 0: all_gather[x] three: rank 1 never arrived: it was computing"


def test_a_run_that_goes_well_waits_for_nothing(tmp_path: Path) -> None:
    def act(_: int, tape: Tape) -> None:
        go(tape, PROGRAM, waits=False)
        tape.doing("computing")

    assert diagnose(job(tmp_path, act), {}).disagreement is None


def test_many_ranks_are_counted() -> None:
    assert ranks_text([4]) == "rank 4"
    assert ranks_text(range(12)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11"
    assert ranks_text(range(64)).endswith("10, 11, ... (64 of them)")


# --- messages between pipe ranks


def pipeline(rank: int, tape: Tape, *, stopped: int, micros: int = 2) -> None:
    """Forward passes of a pipe of three; one rank is stopped before its second. The last one sends a gradient back."""
    for micro in range(micros):
        if rank == stopped and micro == 1:
            return
        if rank > 0:
            go(tape, [end("receive", rank - 1, micro)], waits=stopped < rank and micro == 1)
            if stopped < rank and micro == 1:
                return
        if rank < 2:
            go(tape, [end("send", rank + 1, micro)], waits=False)
    if rank == 0:
        go(tape, [end("receive", 1, 0, LOWER)], waits=True)


def test_a_rank_that_sends_nothing_is_named_with_stage_micro_batch_and_both_ranks(tmp_path: Path) -> None:
    found = diagnose(job(tmp_path, partial(pipeline, stopped=1), PIPED), {})
    assert found.culprits == (1,)
    assert found.headline == "step 0: stream of stage 1, micro-batch 1, from rank 1 to rank 2: rank 1 never arrived"
    shown = "\n".join(found.lines())
    assert re.search(r"\(number 2 of F toward higher ranks\) from rank 1 to rank 2: rank 2 came; rank 1 did not", shown)
    assert "from rank 1 to rank 0: rank 0 came; rank 1 did not come" in shown


def test_a_dead_rank_is_named_with_the_message_that_another_missed(tmp_path: Path) -> None:
    """Also where nobody waits: a send to a rank that is gone fails when it is launched."""
    tapes = job(tmp_path, partial(pipeline, stopped=1), PIPED)
    assert missed_by(tapes, 1) == "step 0: stream of stage 1, micro-batch 0, from rank 1 to rank 0, never arrived"
    assert missed_by(tapes, 2) == missed_by({}, 1) == ""
    tape = Tape(tape_path(tmp_path, 0), 0, PIPED)
    for micro in range(2):
        tape.launched(end("send", 1, micro))
    assert missed_by(read_all(tmp_path), 1).endswith("stage 0, micro-batch 1, from rank 0 to rank 1, never arrived")


def test_ends_of_a_message_that_do_not_match_are_named(tmp_path: Path) -> None:
    def act(rank: int, tape: Tape) -> None:
        if rank < 2:
            go(tape, [end("send", 1, 0)] if rank == 0 else [replace(end("receive", 0, 0), nbytes=32)], waits=True)

    found = diagnose(job(tmp_path, act, PIPED), {})
    assert found.disagreement is not None
    assert found.headline.startswith("step 0: ranks disagree on which message comes next from rank 0 to rank 1: rank 0")

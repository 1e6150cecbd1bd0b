"""Schedules as pictures and as torch's CSV, read and written by torch itself."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_check import random_schedule

from fourfold.policy import Policy
from fourfold.schedule.action import Action, Schedule, ScheduleError
from fourfold.schedule.find import find
from fourfold.schedule.named import BUILDERS, named
from fourfold.schedule.play import equal_seconds, play
from fourfold.schedule.stages import place
from fourfold.schedule.text import MOST_DRAWN, from_csv, picture, plain, slot_seconds, summary, to_csv


def drawn(name: str, pipe: int, chunks: int, micro: int, width: int | None = None) -> tuple[list[str], str]:
    lines, note = picture(play(named(name, pipe, chunks, micro), equal_seconds(1, 1, 1, pipe, chunks)), width)
    return plain(lines).splitlines(), note


# --- pictures


def test_a_picture_by_hand() -> None:
    lines, note = drawn("zb-h1", 2, 1, 2)
    assert lines == [
        "rank 0 F0 F1 .  B0 W0 B1 W1",
        "rank 1 .  F0 B0 F1 B1 W0 W1",
    ]
    assert note == "F3 is F for micro-batch 3; . is a bubble; a slot is 1 s"


def test_longer_actions_take_several_slots() -> None:
    lines, _ = drawn("1f1b", 2, 1, 2)
    assert lines == [
        "rank 0 F0 F1 .  .  BW0-- .  BW1--",
        "rank 1 .  F0 BW0-- F1 BW1-- .  .",
    ]


def test_stages_are_named_if_a_rank_has_several() -> None:
    lines, note = drawn("v-half", 2, 2, 1)
    assert lines == [
        "rank 0 0F0 .   .   3F0 3B0 3W0 .   0B0 0W0",
        "rank 1 .   1F0 2F0 .   .   2B0 1B0 2W0 1W0",
    ]
    assert note.startswith("5F3 is F of stage 5 for micro-batch 3")


def test_long_lines_are_cut_to_the_width() -> None:
    whole, note = drawn("1f1b", 4, 1, 40)
    assert "cut" not in note
    cut, note = drawn("1f1b", 4, 1, 40, 60)
    assert max(map(len, cut)) <= 60
    assert "; cut after 13 of 129 slots: a wider terminal shows more, a pipe or a file everything" in note
    assert [line[:50] for line in cut] == [line[:50] for line in whole]
    assert drawn("1f1b", 4, 1, 2, 3)[0][0].startswith("rank 0 F0")  # a terminal narrower than a cell


def test_every_slot_of_work_is_drawn() -> None:
    """As many slots as a rank works, as many points as it waits, for whole numbers of slots."""
    for name, (_, fits) in BUILDERS.items():
        chunks = fits.start
        played = play(named(name, 3, chunks, 5), equal_seconds(1, 2, 1, 3, chunks))
        slot = slot_seconds(played)
        assert slot == pytest.approx(1 / chunks)
        for line, idle in zip(picture(played)[0], played.idle, strict=True):
            bubbles = [piece for piece, _ in line if piece.startswith(".")]
            assert len(bubbles) == pytest.approx(idle / slot)
            assert "".join(piece for piece, _ in line).count("W") == 5 * chunks


def test_times_without_a_common_slot_are_rounded() -> None:
    seconds = {"F": [1.0, 0.0137], "B": [1.1, 0.73], "W": [0.9, 0.3]}
    played = play(named("1f1b", 2, 1, 3), seconds, 0.01)
    assert slot_seconds(played) == pytest.approx(2.0 / 8)
    lines = plain(picture(played)[0]).splitlines()
    assert len(lines) == 2
    assert "F" not in lines[1]  # shorter than half a slot
    assert lines[0].count("F") == lines[0].count("BW") == 3


def test_stages_without_work_are_drawn_as_bubbles() -> None:
    played = play(named("1f1b", 1, 1, 1), {"F": [0.0], "B": [0.0], "W": [0.0]})
    assert plain(picture(played)[0]) == "rank 0"


def test_the_summary_has_idle_time_and_memory() -> None:
    played = play(named("1f1b", 4, 1, 8), equal_seconds(1, 1, 1, 4, 1))
    assert summary(played) == ("makespan 33 s; a rank is idle for 9 s (27.3%); micro-batches kept by rank: 4, 3, 2, 1")
    uneven = play(named("1f1b", 2, 1, 1), {"F": [1, 2], "B": [1, 2], "W": [1, 2]})
    assert "a rank is idle for 3 to 6 s (50.0%)" in summary(uneven)


# --- CSV


def test_csv_is_torchs_notation() -> None:
    assert to_csv(named("zb-h1", 2, 1, 2)) == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
    assert to_csv(named("gpipe", 1, 1, 1)) == "0F0,0B0\n"


def test_csv_there_and_back() -> None:
    draw = random.Random(4)
    for _ in range(40):
        schedule = random_schedule(draw)
        assert from_csv(to_csv(schedule)) == schedule


def as_torch(schedule: Schedule):
    """A schedule object of torch, as far as its reader and writer need one."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    told = PipelineScheduleMulti.__new__(PipelineScheduleMulti)
    told.pipeline_order = {}
    told.pp_group_size, told._num_stages, told._n_microbatches = schedule.pipe, schedule.stages, schedule.micro_steps
    told._stages = [SimpleNamespace()]
    return told


SCHEDULES = {name: named(name, 4, fits.start, 8) for name, (_, fits) in BUILDERS.items()} | {
    "blocks": named("blocks:4", 2, 2, 8),
    "found": find(place("wave", 4, 2), 6, equal_seconds(1, 1.2, 0.7, 4, 2), 0.1, 5).schedule,
    "found on waves": find(place("wave", 2, 4), 6, equal_seconds(1, 1, 1, 2, 4), 0, 2).schedule,
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_torch_reads_what_we_write_and_we_read_what_torch_writes(name: str, tmp_path: Path) -> None:
    """torch's reader validates a schedule, and finds the same rank of every stage."""
    schedule = SCHEDULES[name]
    ours, theirs = tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(to_csv(schedule))
    told = as_torch(schedule)
    told._load_csv(str(ours))
    assert told.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    told._dump_csv(str(theirs))
    assert from_csv(theirs.read_text()) == schedule


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "LoopedBFS"])
def test_schedules_of_torch(name: str, tmp_path: Path) -> None:
    """With messages and bubbles in the file, too; LoopedBFS has its backward passes in the reverse order."""
    from torch.distributed.pipelining import schedules

    made = getattr(schedules, f"Schedule{name}")
    told_of = {"num_stages": 8, "group_size": 4, "group_rank": 0, "is_first": False, "is_last": False}
    stages = [SimpleNamespace(**told_of, stage_index=index, submod=SimpleNamespace()) for index in (0, 4)]
    told = made(stages, 8, loss_fn=lambda *_: None)
    for form in ("compute_only", "compute_comms"):
        path = tmp_path / f"{form}.csv"
        told._dump_csv(str(path), format=form)
        read = from_csv(path.read_text())
        assert (read.pipe, read.stages, read.micro_steps) == (4, 8, 8)
        assert read.placement == place("wave" if name == "ZBVZeroBubble" else "loop", 4, 2)
        if name == "LoopedBFS":
            with pytest.raises(ScheduleError, match=r"rank 0 runs BW\(4, 7\) before micro-batch 6 of the same stage"):
                read.check()
        else:
            read.check()
    if name == "Interleaved1F1B":
        assert read == named("interleaved", 4, 2, 8)


def test_actions_that_torch_runs_together_follow_each_other() -> None:
    read = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n")
    assert read.orders == ((Action("F", 0, 0), Action("F", 0, 1), Action("BW", 0, 0), Action("BW", 0, 1)),)
    read.check()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the file has no action; write one line per rank with cells such as 0F0,0B0"),
        (",,\n", "the file has no action"),
        ("0F0,0X0\n", "rank 0, cell 2: '0X0' is no action; write stage, kind and micro-batch, such as 0F3"),
        ("0F0,0B0\n2F0,2B0\n", "no rank runs stage 1, but there is a stage 2; add the actions of stage 1"),
    ],
)
def test_files_that_make_no_sense(text: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        from_csv(text)


def test_a_picture_has_an_end_however_long_messages_take() -> None:
    """Slots of an action would be 1e300 beside such messages."""
    played = play(named("1f1b", 2, 1, 2), equal_seconds(1, 1, 1, 2, 1), hop=1e300)
    assert played.makespan / slot_seconds(played) <= MOST_DRAWN


def test_a_policy_takes_the_path_of_a_file_as_the_trainer_does(tmp_path: Path) -> None:
    path, schedule = tmp_path / "mine.csv", named("zb-h1", 2, 1, 4)
    path.write_text(to_csv(schedule))
    assert Policy(schedule=str(path)).schedule == schedule
    with pytest.raises(ValueError, match=r"absent.csv: there is no such file; `fourfold schedule show"):
        Policy(schedule=str(tmp_path / "absent.csv"))
    path.write_text("0F0,0X0")
    with pytest.raises(ValueError, match=r"mine.csv: "):
        Policy(schedule=str(path))

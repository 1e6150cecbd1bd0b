"""A run that was saved goes on: bit for bit on its grid, within rounding on any other, each step recorded once.

After a crash by itself, after SIGTERM when asked; and what cannot be continued is refused before anything changes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from io import FileIO, StringIO
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import warm
from curves import bound, config_of, write_texts
from fourfold.checkpoint import load as loading
from fourfold.checkpoint import save as saving
from fourfold.checkpoint.format import Record, TensorType, read_record, write_record
from fourfold.checkpoint.load import Checkpoints, read_full_tensor, verify_checkpoint
from fourfold.checkpoint.save import write_full_tensors
from fourfold.cli import STARTING, _failed, main
from fourfold.commands import train
from fourfold.data.sampling import SampleOrder, cut_windows
from fourfold.data.sources import prepare
from fourfold.data.tokenizer import load_tokenizer
from fourfold.environment import BEGAN, LAUNCHED, launcher_name
from fourfold.errors import (
    DamagedCheckpointError,
    FailedElsewhereError,
    Failure,
    RollBackError,
    UnreadableCheckpointError,
    is_damaged,
)
from fourfold.grid import Grid, Shape
from fourfold.job import Channel
from fourfold.report.run_data import read_run
from fourfold.train import launch as launching
from fourfold.train import signals as stopping
from fourfold.train.checkpoints import (
    RunSaver,
    any_restarted,
    find_start,
    note_return,
    roll_back,
    start_at,
    start_from,
    still_to_rewind,
    what_is_saved,
)
from fourfold.train.config import DataSection, TrainConfig, read_config
from fourfold.train.loop import Run
from fourfold.train.run_folder import FolderLock, JsonLines, rewind
from fourfold.train.signals import raise_on_signals
from harness import RankFailed, Ranks, grid_of
from runs import (
    Job,
    Left,
    alive,
    assert_error,
    cli,
    column,
    end,
    ended,
    interrupted,
    lines_of,
    needs_proc,
    ranks_of,
    started,
    train_arguments,
    trained,
    wait_for_steps,
)

HALF, STEPS = 3, 6
CONTINUED = ("loss", "grad_norm", "learning_rate")


def resumed(config: TrainConfig, folder: Path) -> None:
    trained(config, folder, resume=True)


def halfway(folder: Path, to: Path) -> Path:
    """A copy of a finished run as it was when it had gone on for some steps after its first checkpoint."""
    shutil.copytree(folder, to)
    shutil.rmtree(to / "checkpoints" / f"step-{STEPS:08}")
    lines = [json.dumps(line) + "\n" for line in lines_of(folder) if line["event"] == "step" or line["step"] < STEPS]
    (to / "metrics.jsonl").write_text("".join(lines) + '{"event": "evalua')  # it was killed in the middle of a line
    return to


def small(folder: Path, dtype: str, shape: Shape, **changes: Any) -> TrainConfig:
    write_texts(folder)
    given = {"model.layers": 1, "train.evaluate_every": 2, "plan.compare": False}
    saving = {"checkpoint.every": HALF, "checkpoint.keep_last": 9}
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return config_of("gpt-tiny", dtype, STEPS, folder, shape, given | saving | named)


# --- what was saved goes on


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        (Shape(z=2), {"model__dropout": 0.1, "checkpoint__asynchronous": False}),
        (Shape(data=2), {"policy__shard_optimizer": True, "batch__micro_steps": 2}),
    ],
    ids=str,
)
def test_on_the_same_grid_bit_for_bit(ranks, tmp_path: Path, shape: Shape, changes: dict[str, Any]) -> None:
    config = small(tmp_path, "fp32", shape, **changes)
    ranks(2).run(trained, config, tmp_path / "run")
    copy = halfway(tmp_path / "run", tmp_path / "copy")
    ranks(2).run(resumed, config, copy)
    for event, keys in (("step", CONTINUED), ("evaluation", ("step", "loss")), ("saved", ("step",))):
        for key in keys:
            assert column(copy, event, key) == column(tmp_path / "run", event, key)
    assert column(copy, "step", "step") == list(range(1, STEPS + 1))
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        last = Path("checkpoints", f"step-{STEPS:08}", name)
        assert (copy / last).read_bytes() == (tmp_path / "run" / last).read_bytes()
    assert [line for line in lines_of(copy) if line["event"] == "resumed"] == [
        {
            "event": "resumed",
            "step": HALF,
            "grid": str(shape),
            "checkpoint": str(copy / "checkpoints" / f"step-{HALF:08}"),
        }
    ]
    assert lines_of(copy)[-1] == {"event": "end", "step": STEPS, "reason": "finished"}
    facts, first = (json.loads((path / "run.json").read_text()) for path in (copy, tmp_path / "run"))
    assert facts["resumed"] == [{"started": first["started"], "grid": first["grid"], "step": HALF}]
    run = read_run(copy)
    assert [step.step for step in run.steps] == list(range(1, STEPS + 1))
    assert run.notes == [f"The run was resumed after step {HALF}, on {shape}."]


def test_on_another_grid_and_number_of_ranks_within_rounding(one: Ranks, ranks, tmp_path: Path) -> None:
    """Of 2 ranks on 2 cut otherwise, through the run's own classes; and on one, through the command."""
    config = small(tmp_path, "fp64", Shape(z=2))
    ranks(2).run(trained, config, tmp_path / "run")
    expected = column(tmp_path / "run", "step", "loss")
    other = halfway(tmp_path / "run", tmp_path / "other")
    shard = {"policy__shard_optimizer": True}
    ranks(2).run(resumed, small(tmp_path, "fp64", Shape(data=2), **shard), other)
    alone = halfway(tmp_path / "run", tmp_path / "alone")
    (left,) = one.run(cli, "train", "--resume", str(alone), "--ranks", "1", "--device", "cpu")
    assert (left.code, left.err) == (0, "")
    assert f"resumes after step {HALF}, from {alone / 'checkpoints'}" in left.out
    for folder in (other, alone):
        assert column(folder, "step", "loss") == pytest.approx(expected, rel=bound("fp64", STEPS))
        assert column(folder, "step", "step") == list(range(1, STEPS + 1))
    assert read_config(alone / "config.toml").grid.shape == Shape()
    (before,) = json.loads((alone / "run.json").read_text())["resumed"]
    assert (before["grid"], before["step"]) == (Shape(z=2).named, HALF)


# --- the command


@pytest.fixture(scope="module")
def finished(one: Ranks, tokens: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints halfway and at its end."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    more = ["--set", f"checkpoint.every={HALF}", "--set", "checkpoint.keep_last=9", "--set", "plan.compare=false"]
    (left,) = one.run(cli, *train_arguments(tokens, folder, *more, steps=STEPS))
    assert (left.code, left.err) == (0, "")
    assert f"step {HALF} saved; training waited " in left.out
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_finished_run_says_so_and_stays(one: Ranks, finished: Path) -> None:
    before = contents(finished)
    (left,) = one.run(cli, "train", "--resume", str(finished))
    said = f"{finished} has reached step {STEPS} of {STEPS}; give more --steps to continue\n"
    assert (left.code, left.out, left.err) == (0, f"{STARTING}\n{said}", "")
    assert contents(finished) == before


def test_a_run_killed_after_its_last_checkpoint_has_an_end(one: Ranks, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:9])
    (left,) = one.run(cli, "train", "--resume", str(folder))
    assert (left.code, left.err) == (0, "")
    assert lines_of(folder) == lines_of(finished)


def test_more_steps_go_on_and_tell_that_the_schedule_changed(one: Ranks, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    result = ["--json", str(tmp_path / "result.json")]
    (left,) = one.run(cli, "train", "--resume", str(folder), "--steps", str(STEPS + 2), "--profile", "7", *result)
    assert (left.code, left.err) == (0, "")
    assert f"the schedule is another one: steps was {STEPS}, is {STEPS + 2}\n" in left.out
    assert column(folder, "step", "step") == list(range(1, STEPS + 3))
    assert column(folder, "step", "loss")[:STEPS] == column(finished, "step", "loss")
    found = json.loads((tmp_path / "result.json").read_text())
    assert [event["step"] for event in found["resumed"]] == [STEPS]
    assert [event["step"] for event in found["steps"]] == [STEPS + 1, STEPS + 2]
    assert (folder / "profile" / "rank-0.json").exists()
    assert read_config(folder / "config.toml").train.steps == STEPS + 2


def test_one_command_begins_a_run_and_goes_on_with_it(one: Ranks, tokens: str, tmp_path: Path) -> None:
    """A run that has never saved begins again; one that has, and whose checkpoints are gone, is refused."""
    folder = tmp_path / "run"
    command = ["train", *train_arguments(tokens, folder, steps=2)[1:]]
    command[command.index("--out")] = "--resume"
    command += ["--set", "plan.compare=false"]
    (first,) = one.run(cli, *command)
    assert (first.code, first.err) == (0, "")
    assert "resumes" not in first.out
    assert column(folder, "step", "step") == [1, 2]
    (again,) = one.run(cli, *command)
    assert f"{folder} has reached step 2 of 2" in again.out
    losses, records = column(folder, "step", "loss"), (folder / "metrics.jsonl").read_text()
    moved = tmp_path / "storage"
    (folder / "checkpoints").rename(moved)
    (folder / "checkpoints").symlink_to(moved)
    (again,) = one.run(cli, *command)
    assert f"{folder} has reached step 2 of 2" in again.out
    moved.rename(tmp_path / "not mounted")
    for more in ((), ("--step", "2"), ("--grid", "x=1")):
        (left,) = one.run(cli, *command, *more)
        assert_error(left, f"{folder}/checkpoints is a link to {moved}, which is not there; mount that storage")
    for arguments in (["checkpoint", "verify", str(folder)], train_arguments(tokens, folder, steps=2)):
        assert_error(one.run(cli, *arguments)[0], f"is a link to {moved}, which is not there; mount that storage")
    (folder / "checkpoints").unlink()
    (left,) = one.run(cli, *command)
    assert_error(left, f"{folder} has no checkpoint, and its records say that step 2 was saved", "another --out")
    (folder / "checkpoints").mkdir()  # an empty mount point
    (left,) = one.run(cli_started_again, *command)
    assert "its records say that step 2 was saved" in left.err
    assert (folder / "metrics.jsonl").read_text() == records, "nothing is rewound"
    unsaved = [line for line in records.splitlines(keepends=True) if '"saved"' not in line]
    (folder / "metrics.jsonl").write_text("".join(unsaved))  # killed before its first save
    (anew,) = one.run(cli, *command)
    assert (anew.code, anew.err) == (0, "")
    assert f"{folder} has no complete checkpoint: the run begins again, from step 0\n" in anew.out
    assert column(folder, "step", "loss") == losses
    assert column(folder, "step", "step") == [1, 2]
    assert lines_of(folder)[-1] == {"event": "end", "step": 2, "reason": "finished"}


def test_what_is_no_file_in_a_checkpoint_is_never_opened(one: Ranks, finished: Path, tmp_path: Path) -> None:
    """A fifo waits for its writer for ever, and a device may have no end."""
    for number, name in enumerate(("checkpoint.json", "rank-00000.safetensors")):
        folder = tmp_path / str(number)
        shutil.copytree(finished, folder)
        odd = folder / "checkpoints" / f"step-{STEPS:08}" / name
        odd.unlink()
        os.mkfifo(odd)
        (left,) = one.run(cli, "checkpoint", "verify", str(odd.parent))
        assert left.code == 1
        assert f"{odd} is not a file but a fifo, socket or device" in left.out + left.err
        (left,) = one.run(cli, "train", "--resume", str(folder))
        assert (left.code, left.err) == (0, "")
        assert column(folder, "resumed", "step") == [HALF], "the checkpoint counts as damaged"
        assert column(folder, "step", "loss") == column(finished, "step", "loss")


def test_what_cannot_go_on_is_refused_and_nothing_changes(
    one: Ranks, finished: Path, tokens: str, tmp_path: Path
) -> None:
    folder = halfway(finished, tmp_path / "run")
    other = prepare([write_texts(tmp_path)], tmp_path / "other.tokens", load_tokenizer("bytes"))
    before = contents(folder)

    def attempt(*more: str) -> Left:
        return one.run(cli, "train", "--resume", str(folder), *more)[0]

    assert_error(attempt("--set", "train.seed=5"), "train.seed was 0 in ", "and is 5; a resumed run keeps it")
    assert_error(attempt("--set", "batch.rows=8"), "batch.rows was 4 in ", "and is 8; a resumed run keeps it")
    assert_error(attempt("--set", "batch.seq=11"), "the data differs", "seq was 12, is 11")
    assert_error(attempt("--data", str(other.path), "--data", tokens), "number of sources was 1, is 2")
    assert_error(attempt("--set", "model.layers=2"), "model.layers was 1 in ", "and is 2; with it the weights")
    assert_error(attempt("--set", "model.norm_eps=0.1"), "model.norm_eps was 1e-05 in ")
    assert_error(attempt("--set", "model.mlp_hidden=96"), "model.mlp_hidden was ", "and is 96")
    assert_error(attempt("--dtype", "fp64"), "is torch.float32 in ", "resume with the dtype of the saved run")
    assert_error(attempt("--profile", "2"), f"--profile 2: the run resumes after step {HALF}; name steps from 4 on")
    assert_error(attempt("--out", "elsewhere"), "--out elsewhere has no effect")
    assert_error(attempt("--compare-serial", "1"), "--compare-serial does not train")
    assert_error(attempt("--restarts", "-1"), "--restarts -1")
    assert contents(folder) == before
    assert_error(one.run(cli, "train", "--resume", str(tmp_path))[0], "holds no run to resume", "CONFIG.toml")
    assert_error(attempt("--step", "4"), "has no complete checkpoint of step 4; it has those of 3")
    (left,) = one.run(cli, *train_arguments(tokens, tmp_path / "new", "--step", "4", steps=1))
    assert_error(left, "--step 4 names a checkpoint to resume from; give its run with --resume")
    damaged = folder / "checkpoints" / f"step-{HALF:08}" / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert_error(attempt(), str(damaged))
    assert before.keys() == contents(folder).keys()


def test_weights_alone_begin_a_run_but_continue_none(one: Ranks, finished: Path, tmp_path: Path) -> None:
    """As an import leaves them, in step 0 of a folder with a config."""
    folder, source = tmp_path / "run", finished / "checkpoints" / f"step-{STEPS:08}"
    folder.mkdir()
    shutil.copy(finished / "config.toml", folder)
    weights = folder / "checkpoints" / "step-00000000"
    one.run(copy_weights, source, weights)
    (left,) = one.run(cli, "train", "--resume", str(folder), "--steps", "1", "--set", "optimizer.warmup=1")
    assert (left.code, left.err) == (0, "")
    assert f"begins with the weights in {weights}\n" in left.out
    assert column(folder, "step", "loss")[0] < column(finished, "step", "loss")[0] - 0.05  # they were trained
    with pytest.raises(ValueError, match=r"holds only weights.*step 7 cannot be resumed"):
        start_from(folder, read_config(folder / "config.toml"), weights.rename(weights.with_name("step-00000007")))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": 7}, "is named after step 3 and was saved at step 7"),
        ({"step": "3"}, "is named after step 3 and was saved at step 3"),
        ({"config": {"train": []}}, r"its config has \[\] for the section train"),
        ({"config": {"train": {"seed": 0}, "batch": "x"}}, "its config has 'x' for the section batch"),
        ({"config": 3}, "does not say what it was trained with"),
    ],
    ids=str,
)
def test_a_state_of_somebody_elses_is_refused(finished: Path, tmp_path: Path, change: Any, said: str) -> None:
    checkpoint = tmp_path / "checkpoints" / f"step-{HALF:08}"
    record = read_record(finished / "checkpoints" / checkpoint.name)
    shutil.copytree(finished / "checkpoints" / checkpoint.name, checkpoint)
    write_record(checkpoint, Record(record.grid, {**record.state, **change}, record.tensors, record.files))
    with pytest.raises(ValueError, match=rf"{re.escape(str(checkpoint))}.*{said}"):
        start_at(tmp_path, read_config(finished / "config.toml"), None)


@pytest.mark.parametrize(
    "change",
    [{"of": []}, {"of": {"sources": 3}}, {"of": {"sources": [1]}}, {"given": ["a"]}, {"sample": "4"}, {"sample": True}],
    ids=str,
)
def test_a_position_of_somebody_elses_is_refused(change: dict[str, Any]) -> None:
    order = SampleOrder([cut_windows("a", 100, 5)], None, 0)
    order.take(4)
    before = order.state()
    with pytest.raises(ValueError, match="this is not a saved position in the data"):
        order.restore({**before, **change})
    assert order.state() == before


def flip(path: Path) -> None:
    """Change the last byte of a file."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def poison(checkpoint: Path) -> None:
    """Write a checkpoint anew as an earlier version would have written it, with NaN in a parameter."""
    record = read_record(checkpoint)
    types = {name: TensorType(info.dtype, info.shape) for name, info in record.tensors.items()}
    tensors = {name: read_full_tensor(checkpoint, record, name) for name in types}
    tensors["model/norm.weight"][3] = nan
    shutil.rmtree(checkpoint)
    write_full_tensors(checkpoint, types, tensors.values(), record.state)


def cut_record(checkpoint: Path) -> None:
    record = checkpoint / "checkpoint.json"
    record.write_bytes(record.read_bytes()[:-9])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "rank-00000.safetensors has": lambda folder: os.truncate(folder / "rank-00000.safetensors", 1000),
    "rank-00000.safetensors is missing": lambda folder: (folder / "rank-00000.safetensors").unlink(),
    "is damaged: ": lambda folder: flip(folder / "rank-00000.safetensors"),
    "checkpoint.json is missing": lambda folder: (folder / "checkpoint.json").unlink(),
    "is not the record of a checkpoint": cut_record,
    "was saved with NaN or infinity in 'model/norm.weight'": poison,
}
"""Ways to damage a checkpoint, by what is said about it."""


@pytest.mark.parametrize("why", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(finished: Path, tmp_path: Path, why: str) -> None:
    """A rollback passes over it too. If none is sound, the error names them all. One that is asked for is refused."""
    folder, grid = tmp_path / "run", Grid.alone("cpu")
    shutil.copytree(finished, folder)
    config = read_config(folder / "config.toml")
    newest, older = (folder / "checkpoints" / f"step-{step:08}" for step in (STEPS, HALF))
    DAMAGES[why](newest)
    before = contents(folder)
    start = find_start(grid, folder, config)
    assert (start.step, start.checkpoint, start.verified) == (HALF, older, True)
    ((found, reason),) = [(one.folder, one.why) for one in start.passed_over]
    assert found == newest and why in reason
    if (newest / "checkpoint.json").exists():
        with pytest.raises(DamagedCheckpointError, match=rf"or resume from an earlier checkpoint: --step {HALF}"):
            find_start(grid, folder, config, STEPS)
    assert contents(folder) == before  # nothing changes before the run starts
    back = roll_back(grid, folder, config, RollBackError("it jumps", STEPS, {"given": [24]}))
    assert back.step == HALF and back.skipped is not None and back.skipped.after == HALF
    DAMAGES[why](older)
    with pytest.raises(DamagedCheckpointError, match=rf"no sound checkpoint \(step-{STEPS:08}: .*; step-{HALF:08}: "):
        find_start(grid, folder, config)


def test_an_error_that_may_pass_passes_over_nothing(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails once, or a file that this user may not read: the checkpoint may be as good as ever."""
    config = read_config(finished / "config.toml")

    class Failing(FileIO):
        def readinto(self, *_: Any) -> Any:
            raise OSError(5, "Input/output error")

    opened = Path.open

    def broken(path: Path, *given: Any, **named: Any) -> Any:
        return Failing(str(path)) if named.get("buffering") == 0 else opened(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", broken)
        with pytest.raises(UnreadableCheckpointError, match=r"cannot read .*Input/output error") as caught:
            find_start(Grid.alone("cpu"), finished, config)
    assert not is_damaged(caught.value)
    assert find_start(Grid.alone("cpu"), finished, config).step == STEPS


def look_at(folder: Path, config: TrainConfig, unreadable: bool) -> tuple[str, int, str]:
    """A job: what the ranks find, where rank 1 may not read its file."""
    grid = grid_of(config.grid.shape)
    if unreadable and grid.rank == 1:
        real, loading.verify_share = loading.verify_share, refuse
    try:
        start = find_start(grid, folder, config)
        return "", start.step, start.passed_over[0].why if start.passed_over else ""
    except (OSError, FailedElsewhereError) as error:
        return str(error), -1, ""
    finally:
        if unreadable and grid.rank == 1:
            loading.verify_share = real


def refuse(*_: object) -> None:
    raise UnreadableCheckpointError(13, "cannot read it (Permission denied)")


def test_all_ranks_pass_over_what_one_of_them_finds_damaged(ranks, tmp_path: Path) -> None:
    """Rank 1's file is damaged, which only rank 1 reads; if rank 1 cannot read it, all ranks raise instead."""
    config = small(tmp_path, "fp32", Shape(z=2), train__evaluate_every=0)
    ranks(2).run(trained, config, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08}"
    unread = ranks(2).run(look_at, tmp_path / "run", config, True)
    assert [step for _, step, _ in unread] == [-1, -1]
    assert all("Permission denied" in said for said, _, _ in unread)
    flip(folder / "rank-00001.safetensors")
    found = ranks(2).run(look_at, tmp_path / "run", config, False)
    assert found[0] == found[1]
    assert found[0][:2] == ("", HALF) and "rank-00001.safetensors is damaged" in found[0][2]
    ranks(2).run(resumed, config, tmp_path / "run")
    assert sorted(path.name for path in folder.parent.iterdir()) == [
        f"damaged-{folder.name}",
        f"step-{HALF:08}",
        folder.name,
    ]
    assert column(tmp_path / "run", "step", "step") == list(range(1, STEPS + 1))


def test_a_run_falls_back_by_itself_and_loses_nothing_else(one: Ranks, finished: Path, tmp_path: Path) -> None:
    """Ranks that were started again as well as a user's command; a damaged folder is kept, each under its own name."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    newest = folder / "checkpoints" / f"step-{STEPS:08}"
    flip(newest / "rank-00000.safetensors")
    broken = (newest / "rank-00000.safetensors").read_bytes()
    for number, (job, command) in enumerate(
        [
            (cli_started_again, ["train", str(finished / "config.toml"), "--out", str(folder)]),
            (cli, ["train", "--resume", str(folder)]),
        ]
    ):
        name = f"damaged-{newest.name}{'-2' if number else ''}"
        (left,) = one.run(job, *command)
        assert (left.code, left.err) == (0, "" if number else WAITS)
        said = f"step {HALF}: passed over {newest}, now {name}, because {newest / 'rank-00000.safetensors'} is damaged"
        assert said in left.out and f"; steps {HALF + 1} to {STEPS} are trained again\n" in left.out
        assert f"resumes after step {HALF}, from {folder / 'checkpoints' / f'step-{HALF:08}'}\n" in left.out
        assert (newest.with_name(name) / "rank-00000.safetensors").read_bytes() == broken
        assert column(folder, "step", "loss") == column(finished, "step", "loss")
        verify_checkpoint(newest)  # trained and saved again
        shutil.copy(newest.with_name(name) / "rank-00000.safetensors", newest)
    noted = [line for line in (folder / "events.jsonl").read_text().splitlines() if '"note"' in line]
    assert len(noted) == 2


def test_a_run_goes_back_to_an_earlier_checkpoint(one: Ranks, finished: Path, tmp_path: Path) -> None:
    """What was saved and recorded after that step goes."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    damaged = folder / "checkpoints" / f"step-{STEPS:08}" / "rank-00000.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    command = ["train", "--resume", str(folder), "--steps", str(STEPS + 1)]
    (left,) = one.run(cli, *command, "--step", str(STEPS))
    assert_error(left, str(damaged), f"or resume from an earlier checkpoint: --step {HALF}")
    (left,) = one.run(cli, *command, "--step", str(HALF))
    assert (left.code, left.err) == (0, "")
    back = f"returns to step {HALF}: removes step-{STEPS:08} and all records after that step\n"
    assert back in left.out
    assert [step for step, _ in Checkpoints(folder / "checkpoints").complete()] == [HALF, STEPS, STEPS + 1]
    verify_checkpoint(damaged.parent)  # another one by now
    assert column(folder, "step", "step") == list(range(1, STEPS + 2))
    assert column(folder, "resumed", "step") == [HALF]


def test_changed_data_is_refused_unless_a_command_accepts_it(
    one: Ranks, finished: Path, tokens: str, tmp_path: Path
) -> None:
    """Acceptance is noted in the log, and the folder does not store it: the next change is refused again."""
    folder, data = halfway(finished, tmp_path / "run"), tmp_path / "moved.tokens"
    content = Path(tokens).read_bytes()
    data.write_bytes(content)
    command = ["train", "--resume", str(folder), "--data", str(data)]
    (left,) = one.run(cli, *command)
    assert (left.code, left.err) == (0, "")  # the same content elsewhere is the same data
    assert column(folder, "step", "loss") == column(finished, "step", "loss")
    command += ["--steps", str(STEPS + 1)]
    data.write_bytes(content[:5000] + bytes([content[5000] ^ 1]) + content[5001:])
    before = contents(folder)
    (left,) = one.run(cli, *command)
    said = "moved.tokens: source 0 has as many tokens as before, but other ones"
    assert_error(left, said, "or accept the change: --set data.changed=accept")
    assert contents(folder) == before
    (left,) = one.run(cli, *command, "--set", "data.changed=accept")
    assert (left.code, left.err) == (0, "")
    (note,) = column(folder, "note", "said")
    assert note == f"a change of the data was accepted: {said}"
    assert note in (folder / "log.txt").read_text() and note in left.out
    assert read_config(folder / "config.toml").data.changed == "refuse"
    data.write_bytes(content)
    (left,) = one.run(cli, *command[:-1], str(STEPS + 2))
    assert_error(left, said)  # back to what it was is a change too: the checkpoint is of the other content


def test_a_folder_has_one_job(one: Ranks, finished: Path, tmp_path: Path) -> None:
    """The second is refused before it changes anything; once the first has gone it may."""
    folder = halfway(finished, tmp_path / "run")
    owned, before = FolderLock(folder), contents(folder)
    (left,) = one.run(cli, "train", "--resume", str(folder))
    assert_error(left, f"another job (process {os.getpid()} on ", f"is training in {folder}")
    with pytest.raises(BlockingIOError, match="another job"):
        FolderLock(folder)
    assert contents(folder) == before
    owned.release()
    FolderLock(folder).release()


def test_a_tokenizer_beside_the_config_moves_with_it(tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    (run / "tokenizer.json").touch()
    config = replace(TrainConfig(), data=DataSection(tokenizer="run/tokenizer.json"))
    assert config.stored(run).data.tokenizer == "tokenizer.json"
    assert config.stored(tmp_path / "other").data.tokenizer == "run/tokenizer.json"
    path = run / "config.toml"
    for name in ("tokenizer.json", "gone/tokenizer.json"):
        path.write_text(f'[data]\ntokenizer = "{name}"\n')
        assert read_config(path).data.tokenizer == str(run / "tokenizer.json")
    assert read_config(path, [("data.tokenizer", "tokenizer.json")]).data.tokenizer == "tokenizer.json"
    for name in (str(tmp_path / "tokenizer.json"), "bytes", "gone/other.json"):
        path.write_text(f'[data]\ntokenizer = "{name}"\n')
        assert read_config(path).data.tokenizer == name


def copy_weights(source: Path, to: Path) -> None:
    """A job: the parameters of a checkpoint by themselves."""
    record = read_record(source)
    names = [name for name in record.tensors if name.startswith("model/")]
    layout = {name: TensorType(record.tensors[name].dtype, record.tensors[name].shape) for name in names}
    write_full_tensors(to, layout, (read_full_tensor(source, record, name) for name in names), {"step": 0})


def test_samples_come_from_the_checkpoint_that_is_named(one: Ranks, finished: Path) -> None:
    command = ["sample", str(finished), "--prompt", "the ", "--tokens", "30", "--temperature", "0", "--device", "cpu"]
    newest, last, half = (one.run(cli, *command, *more)[0] for more in ((), ("--step", "6"), ("--step", "3")))
    assert (newest.code, newest) == (0, last)
    assert (half.code, half.err) == (0, "")
    assert_error(one.run(cli, *command, "--step", "4")[0], "has no complete checkpoint of step 4; it has those of 3, 6")


def test_torchrun_that_starts_ranks_again_needs_a_folder_to_find(one: Ranks, tokens: str, tmp_path: Path) -> None:
    command = train_arguments(tokens, tmp_path / "run", steps=1)
    del command[command.index("--out") : command.index("--out") + 2]
    (left,) = one.run(cli_that_may_start_again, *command)
    assert_error(left, "torchrun may start these ranks again (--max-restarts 2)", "give --out or --resume")


def test_ranks_that_torchrun_has_started_again_go_on_unasked(one: Ranks, finished: Path, tmp_path: Path) -> None:
    """The same command; steps that it should profile and that are past are so already."""
    folder = halfway(finished, tmp_path / "run")
    command = ["train", str(finished / "config.toml"), "--out", str(folder), "--profile", "2"]
    (left,) = one.run(cli_started_again, *command)
    assert (left.code, left.err) == (0, WAITS)
    assert column(folder, "resumed", "step") == [HALF]
    assert column(folder, "step", "loss") == column(finished, "step", "loss")
    (left,) = one.run(cli, *command)
    assert_error(left, f"{folder} already holds a run", f"fourfold train --resume {folder}")


def cli_that_may_start_again(*arguments: str, restarts: str = "0") -> Left:
    """A job: the command as torchrun --max-restarts starts it."""
    environment = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_RESTART_COUNT": restarts}
    os.environ |= environment
    try:
        return cli(*arguments)
    finally:
        for name in environment:
            del os.environ[name]


def test_rewinding_leaves_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    events = [{"event": "step", "step": 1}, {"event": "saved", "step": 1}, {"event": "step", "step": 2}]
    path.write_text("".join(json.dumps(event) + "\n" for event in [*events, {"event": "end", "step": 1}]) + '{"ev')
    rewind(path, 1)
    assert lines_of(tmp_path) == events[:2]
    rewind(tmp_path / "absent", 1)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


WAITS = "fourfold: waits 1 s: torchrun has restarted this job 1 times\n"


def cli_started_again(*arguments: str) -> Left:
    return cli_that_may_start_again(*arguments, restarts="1")


def test_one_rank_that_was_started_again_is_enough(ranks) -> None:
    """A node that came in the place of another counts no start before."""
    assert ranks(2).run(started_again, 0) == [False] * 2
    assert ranks(2).run(started_again, 1) == [True] * 2


def started_again(times: int) -> bool:
    """A job: whether these ranks were, where rank 1 alone has been so many times."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(times * dist.get_rank())
    try:
        return any_restarted(grid_of(Shape(data=2)))
    finally:
        del os.environ["TORCHELASTIC_RESTART_COUNT"]


def test_what_is_on_its_way_is_no_saved_checkpoint(ranks, tmp_path: Path) -> None:
    """It is told of when it is complete; a run that fails meanwhile lets it become so."""
    config = small(tmp_path, "fp32", Shape(x=2), checkpoint__every=2, train__evaluate_every=0)
    ranks(2).run(fails_while_saving, config, tmp_path / "run")
    told = [(line["event"], line["step"]) for line in lines_of(tmp_path / "run")]
    assert told == [("step", 1), ("step", 2), ("step", 3), ("saved", 2), ("end", 3)]
    assert [step for step, _ in Checkpoints(tmp_path / "run" / "checkpoints").complete()] == [2]


def fails_while_saving(config: TrainConfig, folder: Path) -> None:
    """A job: files are written when the loss of the third step is read, which ends the run."""
    run = Run(config, grid_of(config.grid.shape), folder)
    run.begin(lambda: [JsonLines(folder / "metrics.jsonl")])
    failed, write_file, launch = threading.Event(), saving.write_tensor_file, run._launch

    def write_late(*arguments: Any) -> Any:
        assert failed.wait(20)
        return write_file(*arguments)

    def fail(step: int) -> None:
        if step == 4:
            failed.set()
            raise ZeroDivisionError
        launch(step)

    saving.write_tensor_file, run._launch = write_late, fail  # type: ignore[method-assign]
    try:
        with pytest.raises(ZeroDivisionError):
            run.train()
    finally:
        saving.write_tensor_file = write_file


def test_an_old_checkpoint_that_cannot_be_removed_is_noted_and_the_run_goes_on(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise OSError(30, "Read-only file system", str(folder))

    monkeypatch.setattr(loading, "remove_checkpoint", refuse)
    settings = ["checkpoint.every=2", "checkpoint.keep_last=1", "plan.compare=false", "log.tensorboard=false"]
    more = [word for setting in settings for word in ("--set", setting)]
    assert main(train_arguments(tokens, tmp_path / "run", *more, steps=4)) == 0
    (note,) = column(tmp_path / "run", "note", "said")
    kept = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert note == f"cannot remove {kept} (Read-only file system); it is tried again at each save"
    assert [step for step, _ in Checkpoints(kept.parent).complete()] == [2, 4]


# --- SIGTERM


def test_one_rank_saves_and_ends_at_sigterm(one: Ranks, tokens: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    steady = ["--set", "optimizer.schedule=constant", "--set", "optimizer.warmup=0"]
    command = train_arguments(tokens, folder, *steady, steps=100_000)
    (left,) = one.run(interrupted, folder, signal.SIGTERM, *command)
    step = column(folder, "step", "step")[-1]
    goes_on = f"saved at step {step}; to continue: fourfold train --resume {folder}"
    assert (left.code, left.err) == (143, f"fourfold: stopped by SIGTERM; {goes_on}\n")
    assert lines_of(folder)[-1] == {"event": "end", "step": step, "reason": "stopped by SIGTERM"}
    (left,) = one.run(cli, "train", "--resume", str(folder), "--steps", str(step + 1))
    assert (left.code, left.err) == (0, "")
    assert column(folder, "step", "step") == list(range(1, step + 2))


def stops(asked: Sequence[int]) -> tuple[int, int]:
    """A job: the step after which this rank stops when rank 1 gets signals after some steps; keys left in the store."""
    grid = grid_of(Shape(z=2))
    stopping.ASK_EVERY_SECONDS = 0.01
    store = dist.distributed_c10d._get_default_store()
    before, stop = store.num_keys(), stopping.Stop(grid)
    with stop.listening():
        for step in range(1, 2000):
            if grid.rank == 1 and step in asked:
                os.kill(os.getpid(), signal.SIGTERM)
            if stop.after(step).signal:
                return step, store.num_keys() - before
            time.sleep(0.0005 * grid.rank)
    return 0, store.num_keys() - before


def test_ranks_stop_after_the_same_step(ranks) -> None:
    """Whoever was asked, once or, as a scheduler and a launcher do, twice; the store does not fill up."""
    for asked in ([1], [40, 41]):
        (first, keys), (second, _) = ranks(2).run(stops, asked)
        assert first == second
        assert asked[0] <= first < 1000
        assert keys <= 6


def test_other_settings_of_a_resumed_run_are_noted(finished: Path) -> None:
    config = read_config(finished / "config.toml")
    newest = finished / "checkpoints" / f"step-{STEPS:08}"
    assert start_from(finished, config, newest).notes == ()
    changed = replace(config, optimizer=replace(config.optimizer, weight_decay=0.3))
    (note,) = start_from(finished, changed, newest).notes
    assert note == "the run continues with other settings: optimizer.weight_decay was 0.1, is 0.3"


def test_a_restart_returns_to_the_step_that_was_asked_for_once_whatever_the_clocks_say(
    one: Ranks, finished: Path, tmp_path: Path
) -> None:
    """The first start may die before it has removed the later checkpoints; what was saved after it has is kept."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))  # as from a file server whose clock is far behind

    def returns(step: int | None, launcher: str) -> bool:
        return one.run(must_return, folder, step, launcher)[0]

    assert returns(HALF, "1.5"), "nothing has returned yet"
    assert not returns(STEPS, "1.5")
    assert not returns(None, "1.5")
    (left,) = one.run(cli_of_launcher, "1.5", "train", "--resume", str(folder), "--step", str(HALF))
    assert (left.code, left.err) == (0, "")
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))
    assert not returns(HALF, "1.5"), "a restart keeps what the first start has saved"
    assert returns(HALF, "2.5"), "another job returns again"
    # a node with launcher 3.5 comes in the place of another, then the other one of 1.5 is replaced as well
    names = one.run(names_of, "1.5", "3.5")[0]
    note_return(folder, HALF, names)
    assert not returns(HALF, "3.5")
    assert returns(HALF, "1.5"), "the note has the launchers of the last start"


def must_return(out: Path, step: int | None, launcher: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BEGAN, launcher)
        return still_to_rewind(grid_of(Shape()), out, step)


def names_of(*launchers: str) -> list[str]:
    names = []
    for launcher in launchers:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(BEGAN, launcher)
            names.append(launcher_name())
    return names


def cli_of_launcher(launcher: str, *arguments: str) -> Left:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BEGAN, launcher)
        return cli(*arguments)


def test_a_run_that_another_job_has_begun_meanwhile_is_left_alone(one: Ranks, finished: Path, tmp_path: Path) -> None:
    """The first look found an empty folder; the second one, under the lock, does not."""
    shutil.copytree(finished, tmp_path / "run")
    config = read_config(finished / "config.toml")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(RankFailed, match="already holds a run"):
        one.run(trained, config, tmp_path / "run")
    for path, content in before.items():
        assert path.name == ".lock" or path.read_bytes() == content


def test_ranks_ask_again_soon_after_a_stall() -> None:
    """A launcher that was stopped for 6 s while the ranks asked each other made them deaf for ten minutes once."""
    stop = stopping.Stop(SimpleNamespace(rank=0, channel=Channel("grid", (0,), HashStore(), rank=0)))  # type: ignore[arg-type]
    now = time.monotonic()
    stop._last = (100, now - 6.1)
    assert stop._pause(101, now - 6.0) * 0.1 <= 1.1 * stopping.MAX_ASK_SECONDS


def saves_by_the_clock(config: TrainConfig, folder: Path) -> list[int]:
    """A job: the steps that this rank saves if checkpoints are 0.2 s apart and its clock is not that of the others."""
    saved: list[int] = []
    save = RunSaver.save

    def noted(saver: RunSaver, good: Any, *rest: Any, **named: Any) -> None:
        saved.append(good.step)
        save(saver, good, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunSaver, "save", noted)
        patch.setattr(stopping, "ASK_EVERY_SECONDS", 0.01)
        if dist.get_rank() == 1:
            patch.setattr(RunSaver, "overdue", False)  # a clock that stands still
        trained(config, folder)
    return saved


def test_checkpoints_are_saved_by_the_clock_on_all_ranks(ranks, tokens: str, tmp_path: Path) -> None:
    changes = {"checkpoint.minutes": 0.2 / 60, "data.sources": [{"path": tokens}], "model.layers": 1}
    config = config_of("gpt-tiny", "fp32", 25, tmp_path, Shape(z=2), {**changes, "train.evaluate_every": 0})
    first, second = ranks(2).run(saves_by_the_clock, config, tmp_path / "run")
    assert first == second
    assert first[-1] == 25
    assert len(first) >= 2
    assert column(tmp_path / "run", "saved", "step") == first


def test_what_is_not_saved_is_said(finished: Path, tmp_path: Path) -> None:
    assert what_is_saved(tmp_path) == "it had not finished a step"
    resume = "to continue: fourfold train --resume"
    assert what_is_saved(finished) == f"saved at step {STEPS}; {resume} {finished}"
    folder = halfway(finished, tmp_path / "run")
    newest = folder / "checkpoints" / f"step-{HALF:08}"
    unsaved = f"step {STEPS} is not saved"
    assert what_is_saved(folder) == f"{unsaved}, the newest checkpoint is that of step {HALF}; {resume} {folder}"
    shutil.rmtree(newest)
    assert what_is_saved(folder) == f"{unsaved}, and there is no checkpoint"


def test_ranks_that_are_told_to_end_have_the_time_to_save(monkeypatch) -> None:
    configs: list[Any] = []
    monkeypatch.setattr(launching, "elastic_launch", lambda config, _: lambda *_: configs.append(config))
    assert launching.launch(2, [], StringIO(), grace=600.0) == 0
    assert configs[0].shutdown_timeout == 630


def test_a_rank_that_does_not_come_to_its_end_in_time_ends_as_it_stands(tmp_path: Path) -> None:
    """However long its step takes: who sent the signal will not wait longer."""
    child = os.fork()
    if child == 0:
        os.dup2(os.open(tmp_path / "said", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w")
        with stopping.Stop(
            SimpleNamespace(rank=0, channel=Channel("grid", (0,), HashStore(), rank=0)), 0.3
        ).listening():  # type: ignore[arg-type]
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        os._exit(0)
    began = time.monotonic()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143
    assert time.monotonic() - began < 30
    said = "asked to stop by SIGTERM, and not done after 0.3 s (watch.grace); ends now"
    assert (tmp_path / "said").read_text() == f"fourfold: {said}\n"


# --- ranks that die


def test_what_a_rank_says_of_its_failure_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent cannot read half of it, and would end the job."""

    def killed(path: Path, text: str) -> None:
        path.write_bytes(text[:5].encode())
        raise KeyboardInterrupt

    told = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(told))
    monkeypatch.setenv(LAUNCHED, "1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "write_text", killed)
        launching.report_failure("why", Failure.ERROR)
    assert not told.exists()
    launching.report_failure("why", Failure.ERROR)
    assert json.loads(told.read_text())["message"] == "why"


def test_a_rank_that_fails_is_not_interrupted_while_it_says_why(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os.environ["RANK"] = "1"
        raise_on_signals()

        def told(why: str, kind: Failure, **_: bool) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            (tmp_path / "said").write_text(f"{why}, {kind}")

        launching.report_failure = told
        try:
            _failed(ValueError("rows=0 must be 1"))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 1
    assert (tmp_path / "said").read_text() == "rows=0 must be 1, user"


class Failing:
    """In the place of the elastic agent: ranks that fail in turn as they are told, then succeed."""

    def __init__(self, folder: Path, failures: Sequence[tuple[int, str | None, Failure]]) -> None:
        self.folder, self.failures = folder, list(failures)
        self.starts: list[str] = []

    def __call__(self, *_: Any) -> Any:
        return self.start

    def start(self, *_: str) -> None:
        self.starts.append(os.environ[launching.RESTARTED])
        if len(self.starts) > len(self.failures):
            return
        exitcode, message, kind = self.failures[len(self.starts) - 1]
        file = self.folder / str(len(self.starts))
        if message is not None:
            file.write_text(json.dumps({"message": message, "timestamp": "1", "kind": kind}))
        raise ChildFailedError("ranks", {1: ProcessFailure(1, 4711, exitcode, str(file))})


class Reached(launching.RestartPolicy):
    """The steps that restarts resume after, in turn, and what was noted of them."""

    def __init__(self, steps: Sequence[int]) -> None:
        self.steps = iter(steps)
        self.noted: list[tuple[str, str]] = []

    def resume_step(self) -> int:
        return next(self.steps)

    def resume_text(self, step: int) -> str:
        return f"after {step}"

    def note(self, kind: str, text: str) -> None:
        self.noted.append((kind, text))


KILLED = -9, None, Failure.ERROR
TRACEBACK = """Traceback (most recent call last):\n  File "a.py", line 1, in step\n    b["a"]\nKeyError: 'a'\na note"""
BUG = 1, TRACEBACK, Failure.ERROR
USERS = 1, "rows=0 must be 1", Failure.USER
DIED = "rank 1 (process 4711) was killed by SIGKILL; the other ranks were stopped"


def test_fewer_gpus_are_planned_for_anew(tmp_path: Path, monkeypatch) -> None:
    failing = Failing(tmp_path, [KILLED] * 2)
    started: list[tuple[int, tuple[str, ...]]] = []

    def agent(config: Any, _: str) -> Any:
        return lambda *arguments: (started.append((config.nproc_per_node, arguments[3:])), failing.start())

    monkeypatch.setattr(launching, "elastic_launch", agent)
    monkeypatch.setattr(launching.time, "sleep", lambda _: None)
    left = iter([4, 3])
    monkeypatch.setattr(train, "gpus_left", lambda: next(left))
    policy = train.RunRestarts(tmp_path, lambda ranks: ["--ranks", str(ranks)])
    errors = StringIO()
    assert launching.launch(4, ["all"], errors, restarts=2, policy=policy) == 0
    assert started == [(4, ("all",)), (4, ("all",)), (3, ("--ranks", "3"))]
    assert "the run resumes from step 0 on 3 of 4 ranks in 2 s (start 3)" in errors.getvalue()


@pytest.mark.parametrize(
    ("failures", "reached", "code", "starts", "said"),
    [
        ([KILLED], [1, 2], 0, 2, [f"{DIED}; the run resumes after 2 in 1 s (start 2)"]),
        ([USERS], [1, 1], 1, 1, ["error: rows=0 must be 1"]),
        ([KILLED, USERS], [1, 1, 2], 1, 2, [f"{DIED}; the run resumes after 1 in 1 s", "error: rows=0 must be 1"]),
        (
            [KILLED] * 3,
            [1] * 4,
            1,
            3,
            [f"{DIED}; the run resumes after 1 in {n - 1} s (start {n})" for n in (2, 3)] + [f"error: {DIED}"],
        ),
        ([KILLED] * 3, [1, 1, 1, 2], 0, 4, [f"{DIED}; the run resumes after {at}" for at in (1, 1, 2)]),
        ([BUG], [1, 2], 0, 2, ["KeyError: 'a'; the run resumes after 2 in 1 s (start 2)"]),
        ([(143, None, Failure.ERROR)], [1, 2], 143, 1, ["stopped by SIGTERM; what was written stays readable"]),
        ([(130, None, Failure.ERROR)], [1, 2], 130, 1, ["stopped by Ctrl-C; what was written stays readable"]),
        ([(129, None, Failure.ERROR)], [1, 2], 129, 1, ["stopped by SIGHUP; what was written stays readable"]),
        ([KILLED] * 3, [3, 2, 1, 0], 1, 3, [f"{DIED}; the run resumes after {n}" for n in (2, 1)] + [f"error: {DIED}"]),
    ],
)
def test_ranks_are_started_again_unless_a_user_must_act(
    failures: Any, reached: list[int], code: int, starts: int, said: list[str], tmp_path: Path, monkeypatch
) -> None:
    """Two times in a row without progress."""
    failing = Failing(tmp_path, failures)
    monkeypatch.setattr(launching, "elastic_launch", failing)
    monkeypatch.setattr(launching.time, "sleep", lambda _: None)
    errors, policy = StringIO(), Reached(reached)
    assert launching.launch(2, [], errors, restarts=2, policy=policy) == code
    assert failing.starts == [str(number) for number in range(starts)]
    lines = errors.getvalue().splitlines()
    assert len(lines) == len(said)
    assert all(line.startswith(f"fourfold: {words}") for line, words in zip(lines, said, strict=True))
    assert [text for _, text in policy.noted] == [
        line.removeprefix("fourfold: ").removeprefix("error: ") for line in lines
    ]


def test_restarts_wait_longer_each_time_until_there_is_progress(tmp_path: Path, monkeypatch) -> None:
    """Two hundred restarts without a checkpoint took 50 s once."""
    pauses: list[float] = []
    monkeypatch.setattr(launching, "elastic_launch", Failing(tmp_path, [KILLED] * 12))
    monkeypatch.setattr(launching.time, "sleep", pauses.append)
    reached = [0] * 10 + [1] * 3
    assert launching.launch(2, [], StringIO(), restarts=200, policy=Reached(reached)) == 0
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 1, 2, 4]


def test_without_a_checkpoint_ranks_are_restarted_only_on_request(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(launching.time, "sleep", lambda _: None)
    for asked, code in ((False, 1), (True, 0)):
        monkeypatch.setattr(launching, "elastic_launch", Failing(tmp_path, [KILLED]))
        policy = train.RunRestarts(tmp_path, from_nothing=asked)
        assert launching.launch(2, [], StringIO(), restarts=2, policy=policy) == code


ENDLESS = ("--set", "train.evaluate_every=0", "--set", "log.tensorboard=false", "--set", "plan.compare=false")
LONG = 30


STEADY = ("--grid", "z=2", *ENDLESS, "--set", "optimizer.schedule=constant", "--set", "optimizer.warmup=0")


@pytest.fixture
def killed(tokens: str, tmp_path: Path) -> Iterator[Job]:
    """A job of which one rank is killed on its way."""
    folder = tmp_path / "killed"
    arguments = train_arguments(tokens, folder, *STEADY, "--set", "checkpoint.every=5", steps=LONG)
    job = started(warm.command, folder, arguments)
    threading.Thread(target=kill_a_rank, args=[job], daemon=True).start()
    yield job
    end([job])


@pytest.fixture
def endless(tokens: str, tmp_path: Path) -> Iterator[Job]:
    """A job that trains until it is stopped."""
    folder = tmp_path / "stopped"
    job = started(warm.command, folder, train_arguments(tokens, folder, *STEADY, steps=10**6))
    yield job
    end([job])


def kill_a_rank(job: Job) -> None:
    """Once there is something to go on from; so early that the run cannot have ended."""
    wait_until(job, job.folder / "checkpoints" / "step-00000005")
    pid = ranks_of(job)[1]
    os.kill(pid, signal.SIGKILL)
    job.folder.with_suffix(".pid").write_text(str(pid))


def wait_until(job: Job, there: Path, timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not there.exists():
        assert job.process.poll() is None, job.folder.with_suffix(".err").read_text()
        assert time.monotonic() < deadline, f"there is no {there}"
        time.sleep(0.01)


@pytest.mark.slow
@needs_proc
def test_sigterm_to_a_job_saves_on_all_ranks_and_another_number_goes_on(endless: Job, one: Ranks) -> None:
    """Sent to all of it, so that ranks get it a second time, from the launcher."""
    job = endless
    wait_for_steps(job)
    pids = ranks_of(job)
    os.killpg(job.pid, signal.SIGTERM)
    left = ended(job, timeout=30)
    step = column(job.folder, "step", "step")[-1]
    assert left.code == 143, left.err
    resume = f"to continue: fourfold train --resume {job.folder}"
    assert left.err == f"fourfold: stopped by SIGTERM; saved at step {step}; {resume}\n"
    assert not any(alive(pid) for pid in pids.values())
    assert lines_of(job.folder)[-1] == {"event": "end", "step": step, "reason": "stopped by SIGTERM"}
    assert [found for found, _ in Checkpoints(job.folder / "checkpoints").complete()] == [step]
    (left,) = one.run(cli, "train", "--resume", str(job.folder), "--ranks", "1", "--steps", str(step + 1))
    assert (left.code, left.err) == (0, "")
    assert column(job.folder, "step", "step") == list(range(1, step + 2))


@needs_proc
def test_a_rank_that_dies_is_started_again_by_itself(killed: Job, ranks, tmp_path: Path) -> None:
    job = killed
    wait_until(job, job.folder.with_suffix(".pid"))
    config = read_config(job.folder / "config.toml")
    ranks(2).run(trained, config, tmp_path / "uninterrupted")
    left = ended(job, timeout=120)
    assert (left.code, left.err.count("\n")) == (0, 1), left.err
    (said,) = left.err.splitlines()
    pid = job.folder.with_suffix(".pid").read_text()
    death = f"fourfold: rank 1 (process {pid}) was killed by SIGKILL; the other ranks were stopped"
    (step,) = column(job.folder, "resumed", "step")
    assert said == f"{death}; the run resumes after step {step} in 1 s (start 2)"
    assert step % 5 == 0
    assert column(job.folder, "step", "step") == list(range(1, LONG + 1))
    for key in CONTINUED:
        assert column(job.folder, "step", key) == column(tmp_path / "uninterrupted", "step", key)

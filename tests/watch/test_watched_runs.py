"""Faults in whole runs that do not bring ranks down: a flipped bit, a slow rank, a full disk."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from curves import config_of, write_texts
from disks import small_disk
from fourfold.errors import FailedElsewhereError, NotSavedError, ReplicasDifferError
from fourfold.grid import Shape
from fourfold.params import local_of
from fourfold.train import signals as stopping
from fourfold.train.config import TrainConfig
from fourfold.train.loop import Run
from fourfold.train.run_folder import MemorySink, RunEvent
from fourfold.watch.peers import COMPUTE, StepWindows
from harness import grid_of

SMALL: dict[str, Any] = {"model.layers": 1, "train.evaluate_every": 0, "plan.compare": False}


def flip(run: Run, step: int) -> None:
    """One bit of a parameter."""
    if step == 3:
        local_of(run.model.norm.weight).data.view(torch.int32)[0] ^= 1


def sleep(_: Run, __: int) -> None:
    time.sleep(0.3)


def nothing(_: Run, __: int) -> None: ...


def faulty(config: TrainConfig, folder: Path, rank: int, fault: Any) -> list[RunEvent]:
    """A job: what was recorded of a run with a fault in one rank."""
    stopping.ASK_EVERY_SECONDS, seconds = 0.2, stopping.ASK_EVERY_SECONDS
    StepWindows.MIN_STEPS, least = 3, StepWindows.MIN_STEPS
    run = Run(config, grid_of(config.grid.shape), folder)
    kept, launch = MemorySink(), run._launch

    def launched(step: int) -> None:
        if run.grid.rank == rank:
            fault(run, step)
        launch(step)

    run._launch = launched  # type: ignore[method-assign]
    run.begin(lambda: [kept])
    try:
        run.train()
    except (ReplicasDifferError, FailedElsewhereError, NotSavedError) as error:
        return [{"error": str(error)}]
    finally:
        stopping.ASK_EVERY_SECONDS, StepWindows.MIN_STEPS = seconds, least
    return kept.events


def test_a_flipped_bit_ends_a_run_and_its_rank_is_named_by_all(ranks: Any, tmp_path: Path) -> None:
    write_texts(tmp_path)
    config = config_of(
        "gpt-tiny", "fp32", 6, tmp_path, Shape(data=3), {**SMALL, "watch.replicas_every": 2, "batch.rows": 6}
    )
    for (end,) in ranks(3).run(faulty, config, tmp_path / "run", 1, flip):
        assert "state of rank 1 differ from the other replicas of ranks 0, 1, 2" in end["error"]


@pytest.mark.slow
def test_a_slow_rank_is_named_while_the_run_goes_on(ranks: Any, tmp_path: Path) -> None:
    write_texts(tmp_path)
    config = config_of("gpt-tiny", "fp32", 20, tmp_path, Shape(x=2, z=2), SMALL)
    events, *_ = ranks(4).run(faulty, config, tmp_path / "run", 3, sleep)
    found = [event for event in events if event["event"] == "straggler"]
    assert (found[0]["kind"], found[0]["ranks"]) == (COMPUTE, [3])  # on a busy machine others may follow
    assert "rank 3 is slow: its own work takes" in found[0]["said"]
    assert events[-1] == {"event": "end", "step": 20, "reason": "finished"}


@pytest.mark.slow
def test_a_full_disk_ends_a_run_on_all_ranks_and_leaves_what_was_saved(ranks: Any, tmp_path: Path) -> None:
    write_texts(tmp_path)
    folder = tmp_path / "run"
    folder.mkdir()
    with small_disk(folder, "3m"):
        changes = {**SMALL, "checkpoint.every": 2, "checkpoint.keep_last": 9}
        config = config_of("gpt-tiny", "fp32", 20, tmp_path, Shape(z=2), changes)
        for (end,) in ranks(2).run(faulty, config, folder, 1, nothing):
            assert "No space left on device" in end["error"]
            assert "step-0000" in end["error"]
        assert (folder / "checkpoints" / "step-00000002" / "checkpoint.json").is_file()

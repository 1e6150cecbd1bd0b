"""Checkpoints of training: what one grid saves any grid continues; whole or absent at every instant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from math import inf, nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

import fourfold as ff
from checkpoints import SHAPES, everything, made, resumed, take, trained
from disks import small_disk
from fourfold.atomic import AtomicFolder
from fourfold.checkpoint import format
from fourfold.checkpoint import load as loading
from fourfold.checkpoint import save as saving
from fourfold.checkpoint.format import TensorFile, TensorType, write_tensor_file
from fourfold.checkpoint.load import Checkpoints, load_training, verify_checkpoint
from fourfold.checkpoint.save import Saver
from fourfold.checkpoint.training_state import training_shards
from fourfold.errors import DamagedCheckpointError, Failure, NotFiniteError, failure_of
from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from fourfold.recording import Recording
from harness import DEVICE, grid_of
from share import share

STEPS, SAVE_AT = 4, 2


def alone() -> Grid:
    return Grid.alone(DEVICE)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# Continuing


@pytest.mark.parametrize(
    ("name", "sharded"),
    share([("gpt-tiny", True), ("gpt-tiny", False), ("llama-tiny", True), ("llama-tiny", False)], 3),
)
def test_the_same_grid_goes_on_bit_for_bit(ranks, tmp_path: Path, name: str, sharded: bool) -> None:
    shape = Shape(x=2, data=2)
    first = ranks(4).run(trained, tmp_path, name, shape, sharded, STEPS, SAVE_AT)[0]
    again = ranks(4).run(resumed, tmp_path / "step-00000002", name, shape, sharded, STEPS)[0]
    assert again["losses"] == first["losses"][SAVE_AT:]
    assert again["state"]["told"] == "by the test"


@pytest.mark.slow
def test_any_grid_goes_on(ranks, tmp_path: Path) -> None:
    """All pairs of all grids run in `soak_checkpoint.py`; here two of 4 ranks, and one rank alone."""
    shapes = [shape for shape in SHAPES if shape.world == 4]
    for number, (one, other) in enumerate(zip(shapes[::2], shapes[1::2], strict=True)):
        root, name, sharded = tmp_path / str(number), ("gpt-tiny", "llama-tiny")[number % 2], number % 2 == 0
        first = ranks(4).run(trained, root, name, one, sharded, STEPS, SAVE_AT)[0]
        found = ranks(4).run(resumed, root / "step-00000002", name, other, not sharded, STEPS)[0]
        require_continued(first, found)
    model, optimizer = made(name, alone(), sharded=False, seed=1)
    load_training(root / "step-00000002", model, optimizer)
    assert all(torch.equal(value, first["saved"][key]) for key, value in everything(model, optimizer).items())


def require_continued(first: dict[str, Any], found: dict[str, Any]) -> None:
    assert first["saved"].keys() == found["loaded"].keys()
    assert all(torch.equal(value, first["saved"][key]) for key, value in found["loaded"].items())
    assert found["losses"] == pytest.approx(first["losses"][SAVE_AT:], rel=1e-12)


def test_the_random_states_of_the_ranks_come_back(ranks, tmp_path: Path) -> None:
    assert all(ranks(2).run(draws_again, tmp_path))


def draws_again(root: Path) -> bool:
    grid = grid_of(Shape(z=2))
    model, optimizer = made("gpt-tiny", grid, sharded=False)
    torch.manual_seed(grid.rank)
    saver = Saver(grid, root)
    saver.save(0, model, optimizer, {})
    expected = torch.rand(3)
    saver.wait()
    torch.manual_seed(99)
    load_training(root / "step-00000000", model, optimizer)
    return torch.equal(torch.rand(3), expected)


# Asynchronous


def test_the_file_holds_the_step_it_names_while_training_goes_on(tmp_path: Path, monkeypatch) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    take(model, optimizer, 1)
    gate, real = Future(), saving.write_tensor_file
    monkeypatch.setattr(saving, "write_tensor_file", lambda *given: (gate.result(), real(*given))[1])
    saver = Saver(alone(), tmp_path)
    saved = everything(model, optimizer)
    saver.save(1, model, optimizer, {})
    take(model, optimizer, 2)
    assert Checkpoints(tmp_path).newest() is None
    gate.set_result(None)
    saver.wait()
    other, its_optimizer = made("gpt-tiny", alone(), sharded=False, seed=1)
    assert load_training(tmp_path / "step-00000001", other, its_optimizer)["step"] == 1
    assert all(torch.equal(value, saved[key]) for key, value in everything(other, its_optimizer).items())


def test_the_next_step_waits_for_the_copy(tmp_path: Path, monkeypatch) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    take(model, optimizer, 1)
    real = saving.HostCopy.result
    monkeypatch.setattr(saving.HostCopy, "result", lambda copy: (time.sleep(0.3), real(copy))[1])
    saver = Saver(alone(), tmp_path)
    for step in (2, 3):
        saved = everything(model, optimizer)
        saver.save(step, model, optimizer, {})
        take(model, optimizer, step)
    saver.wait()
    other, its_optimizer = made("gpt-tiny", alone(), sharded=False, seed=1)
    load_training(tmp_path / "step-00000003", other, its_optimizer)
    assert all(torch.equal(value, saved[key]) for key, value in everything(other, its_optimizer).items())


def test_a_replay_waits_for_the_copy(tmp_path: Path, monkeypatch) -> None:
    """A recorded step changes parameters, and counts that as changes, without calling its optimizer."""
    grid = ff.Grid.alone("cpu")
    model, optimizer = made("gpt-tiny", grid, sharded=False)
    take(model, optimizer, 1)
    real = saving.HostCopy.result
    monkeypatch.setattr(saving.HostCopy, "result", lambda copy: (time.sleep(0.2), real(copy))[1])
    saver, step = Saver(grid, tmp_path), ff.StepGraph(lambda: None, model)

    def replay() -> None:
        with torch.no_grad():
            model.norm.weight.add_(1)

    step._graph, step._recording = SimpleNamespace(replay=replay), Recording(torch.device("cpu"), {})
    step._inputs = ()
    for number in (2, 3):
        saved = everything(model, optimizer)
        saver.save(number, model, optimizer, {})
        step._replay(())
    saver.wait()
    assert len(grid.before_replays) == 1
    other, its_optimizer = made("gpt-tiny", grid, sharded=False, seed=1)
    load_training(tmp_path / "step-00000003", other, its_optimizer)
    assert all(torch.equal(value, saved[key]) for key, value in everything(other, its_optimizer).items())


def test_changes_beside_the_optimizers_step_fail_the_save_or_keep_the_order(tmp_path: Path, monkeypatch) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    real = saving.HostCopy.result
    monkeypatch.setattr(saving.HostCopy, "result", lambda copy: (time.sleep(0.1), real(copy))[1])
    saver = Saver(alone(), tmp_path)
    saver.save(1, model, optimizer, {})
    with torch.no_grad():
        model.norm.weight.zero_()
    with pytest.raises(RuntimeError, match=r"'model/norm.weight' was changed while .* wait_for_staging"):
        saver.wait()
    saver.save(2, model, optimizer, {})
    saver.wait_for_staging()
    with torch.no_grad():
        model.norm.weight.fill_(1)
    saver.wait()
    other, its_optimizer = made("gpt-tiny", alone(), sharded=False)
    load_training(tmp_path / "step-00000002", other, its_optimizer)
    assert not other.norm.weight.full_tensor().any()


LEAVING = """
import sys, torch, fourfold as ff
from pathlib import Path
from fourfold.checkpoint.save import Saver
model = ff.models.build(ff.models.config("gpt-tiny", hidden=480, heads=8, kv_heads=8), ff.Grid())
Saver(model.grid, Path(sys.argv[1])).save(1, model, ff.optim.AdamW(model, 1e-3), {})
sys.exit(3)
"""


@pytest.mark.slow
def test_a_process_that_ends_lets_its_checkpoint_be_written(tmp_path: Path) -> None:
    left = subprocess.run([sys.executable, "-W", "ignore", "-c", LEAVING, tmp_path], capture_output=True, text=True)
    assert left.returncode == 3, left.stderr
    verify_checkpoint(tmp_path / "step-00000001")


def test_a_failed_save_raises_at_the_next_call_and_names_the_one_that_is_good(tmp_path: Path, monkeypatch) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    saver = Saver(alone(), tmp_path)
    saver.save(1, model, optimizer, {})
    saver.wait()
    monkeypatch.setattr(
        saving, "write_tensor_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    saver.save(2, model, optimizer, {})
    with pytest.raises(OSError, match="No space left") as caught:
        saver.save(3, model, optimizer, {})
    assert "the newest checkpoint is" in caught.value.__notes__[-1] and "step-00000001" in caught.value.__notes__[-1]
    assert names(tmp_path) == ["step-00000001"]


def test_a_disk_that_became_read_only_is_said_with_the_checkpoint_that_is_there(tmp_path: Path, monkeypatch) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    saver = Saver(alone(), tmp_path, asynchronous=False)
    saver.save(1, model, optimizer, {})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", crashing(Path.mkdir, iter(()), OSError(30, "Read-only file system")))
        with pytest.raises(OSError, match="Read-only file system") as caught:
            saver.save(2, model, optimizer, {})
    assert f"was not saved; the newest checkpoint is {tmp_path / 'step-00000001'}" in caught.value.__notes__[-1]
    saver.save(2, model, optimizer, {})
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


# Finite


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("name", "value"), [("model/norm.weight", nan), ("optimizer/exp_avg/norm.weight", -inf)])
def test_numbers_that_are_not_finite_are_never_saved(
    tmp_path: Path, asynchronous: bool, name: str, value: float
) -> None:
    """The error names the tensor and what is there; the old checkpoint is not pruned, though only one is to be kept."""
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    take(model, optimizer, 1)
    saver = Saver(alone(), tmp_path, keep_last=1, asynchronous=asynchronous)
    saver.save(1, model, optimizer, {})
    saver.wait()
    training_shards(model, optimizer)[name].local.data[5] = value
    with pytest.raises(NotFiniteError, match=f"'{name}' holds NaN or infinity") as caught:
        saver.save(2, model, optimizer, {})
        saver.wait()
    said = caught.value.__notes__[-1]
    assert f"{tmp_path / 'step-00000002'} was not saved; the newest checkpoint is {tmp_path / 'step-00000001'}" in said
    assert names(tmp_path) == ["step-00000001"]
    verify_checkpoint(tmp_path / "step-00000001")
    with pytest.raises(NotFiniteError) if name.startswith("model/") else nullcontext():
        ff.save(tmp_path / "weights", model)


def test_one_ranks_nan_raises_on_all(ranks, tmp_path: Path) -> None:
    found = ranks(2).run(saves_nan, tmp_path)
    assert found == [("FailedElsewhereError", Failure.USER, True), ("NotFiniteError", Failure.USER, True)]
    assert names(tmp_path) == ["step-00000001"]


def saves_nan(root: Path) -> tuple[str, Failure, bool]:
    """A job: the error of a save where rank 1 alone holds a NaN."""
    model, optimizer = made("gpt-tiny", grid_of(Shape(x=2)), sharded=False)
    saver = Saver(model.grid, root, keep_last=1)
    saver.save(1, model, optimizer, {})
    saver.wait()
    if model.grid.rank == 1:
        local_of(model.embedding.weight).data[-1, -1] = nan
    saver.save(2, model, optimizer, {})
    try:
        saver.wait()
    except Exception as error:
        return type(error).__name__, failure_of(error), "'model/embedding.weight' holds NaN" in str(error)
    return "", Failure.ERROR, False


def test_every_piece_of_a_tensor_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum is that of all bytes; a number that is not finite, or a byte that changes, is found in any piece."""
    monkeypatch.setattr(format, "CHUNK_BYTES", 64)
    whole = torch.arange(50, dtype=torch.float32)  # 200 bytes: three pieces, and a part of one
    path, types = tmp_path / "rank-00000.safetensors", {"a": TensorType.of(whole), "mask": TensorType.of(whole)}
    mask = torch.full_like(whole, -inf)
    write_tensor_file(path, types, [whole, mask], ["a"])
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["a"] == f"crc32:{zlib.crc32(whole.numpy().tobytes()):08x}"
        assert torch.equal(file.get_tensor("a"), whole) and torch.equal(file.get_tensor("mask"), mask)
    content = path.read_bytes()
    for index in (0, 15, 16, 31, 32, 47, 48, 49):
        for value in (nan, inf, -inf):
            bad = whole.clone()
            bad[index] = value
            with pytest.raises(NotFiniteError, match="'a' holds NaN or infinity"):
                write_tensor_file(tmp_path / "bad", types, [bad, mask], ["a"])
            assert not (tmp_path / "bad").exists()
            write_tensor_file(path, types, [bad, mask])
            with TensorFile(path) as file:
                file.verify("a")
                with pytest.raises(DamagedCheckpointError, match="was saved with NaN or infinity in 'a'"):
                    file.verify("a", finite=True)
        place = len(content) - 400 + 4 * index
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with TensorFile(path) as file:
            file.verify("mask")
            with pytest.raises(DamagedCheckpointError, match="is damaged: 'a' has checksum"):
                file.verify("a")


# Atomic


class Crash(BaseException):
    """The process ends here."""


def test_a_crash_at_any_instant_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, monkeypatch) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    Saver(alone(), tmp_path / "first", asynchronous=False).save(1, model, optimizer, {})
    monkeypatch.setattr(AtomicFolder, "abandon", lambda _: None)  # nobody cleans up after a kill
    seen = set()
    for calls in range(100):
        left, root = iter(range(calls)), tmp_path / str(calls)
        shutil.copytree(tmp_path / "first", root)
        try:
            with monkeypatch.context() as patch:
                for owner, name in ((os, "fsync"), (os, "rename"), (os, "open"), (shutil, "rmtree")):
                    patch.setattr(owner, name, crashing(getattr(owner, name), left))
                saver = Saver(alone(), root, keep_last=1, asynchronous=False)
                saver.save(2, model, optimizer, {})
            break
        except Crash:
            complete = Checkpoints(root).complete()
            assert complete, f"nothing is left after {calls} calls"
            for _, folder in complete:
                verify_checkpoint(folder)
            seen.add(complete[-1][0])
            Saver(alone(), root, asynchronous=False).save(3, model, optimizer, {})
            assert all(name.startswith("step-") for name in names(root))
    assert calls > 8 and seen == {1, 2}
    assert names(root) == ["step-00000002"]


def crashing(real: Any, left: Iterator[int], error: BaseException | None = None) -> Any:
    """The function for as many calls as are left; then each raises, by default as if the process ended."""

    def call(*given: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise error or Crash
        return real(*given, **options)

    return call


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    with small_disk(tmp_path, "600k"):
        model, optimizer = made("gpt-tiny", alone(), sharded=False)
        saver = Saver(alone(), tmp_path)
        saver.save(1, model, optimizer, {})
        saver.wait()
        take(model, optimizer, 1)  # with the optimizer's state it is three times as large
        saver.save(2, model, optimizer, {})
        with pytest.raises(OSError, match=r"cannot write .*rank-00000.safetensors \(No space left on device\)"):
            saver.wait()
        assert names(tmp_path) == ["step-00000001"]
        verify_checkpoint(tmp_path / "step-00000001")


# Retention


def test_the_last_few_and_multiples_are_kept(tmp_path: Path) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    saver = Saver(alone(), tmp_path, keep_last=2, keep_every=4)
    for step in range(1, 11):
        saver.save(step, model, optimizer, {})
    saver.wait()
    assert [step for step, _ in Checkpoints(tmp_path).complete()] == [4, 8, 9, 10]
    with pytest.raises(FileExistsError, match=r"step-00000010 is there already, and step 3 is to be saved beside it"):
        saver.save(3, model, optimizer, {})
    assert [step for step, _ in Checkpoints(tmp_path).complete()] == [4, 8, 9, 10]
    with pytest.raises(ValueError, match="keep_last=0 must be at least 1"):
        Saver(alone(), tmp_path, keep_last=0)


def test_what_cannot_be_removed_is_said_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    saver = Saver(alone(), tmp_path, keep_last=1)
    real = shutil.rmtree

    def refuse(path: Path, *given: Any, **named: Any) -> None:
        if ".removed" in Path(path).name:
            if not named.get("ignore_errors"):
                raise PermissionError(13, "Permission denied", str(path))
            return
        real(path, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        for step in (1, 2):
            saver.save(step, model, optimizer, {})
        saver.wait()
        assert saver.not_removed == [f"cannot remove {tmp_path / '.step-00000001.removed'} (Permission denied)"]
    with monkeypatch.context() as patch:
        patch.setattr(loading.os, "rename", readonly_for("step-00000002", os.rename))
        saver.save(3, model, optimizer, {})
        saver.wait()
    assert saver.not_removed == [f"cannot remove {tmp_path / 'step-00000002'} (Read-only file system)"]
    saver.save(4, model, optimizer, {})
    saver.wait()
    assert saver.not_removed == [] and names(tmp_path) == ["step-00000004"]


def readonly_for(name: str, real: Any) -> Any:
    def rename(source: Path, target: Path) -> None:
        if Path(source).name == name:
            raise OSError(30, "Read-only file system", str(source))
        real(source, target)

    return rename


def test_what_is_not_complete_is_no_checkpoint_and_is_cleared(tmp_path: Path) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    Saver(alone(), tmp_path, asynchronous=False).save(1, model, optimizer, {})
    for leftover in (".step-00000002.partial", ".step-00000000.removed"):
        (tmp_path / leftover).mkdir()
    (tmp_path / "step-00000003").mkdir()
    (tmp_path / "notes").mkdir()
    assert Checkpoints(tmp_path).newest() == tmp_path / "step-00000001"
    Saver(alone(), tmp_path)
    assert names(tmp_path) == ["notes", "step-00000001", "step-00000003"]


# What does not fit


def test_a_checkpoint_of_another_model_or_dtype_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = made("gpt-tiny", alone(), sharded=False)
    take(model, optimizer, 1)
    Saver(alone(), tmp_path, asynchronous=False).save(1, model, optimizer, {})
    other, its_optimizer = made("llama-tiny", alone(), sharded=False)
    before = everything(other, its_optimizer)
    with pytest.raises(ValueError, match="is of another model: it lacks"):
        load_training(tmp_path / "step-00000001", other, its_optimizer)
    assert all(torch.equal(value, before[key]) for key, value in everything(other, its_optimizer).items())
    narrow, its_optimizer = made("gpt-tiny", alone(), sharded=False, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"is torch.float64 in .* and torch.float32 here"):
        load_training(tmp_path / "step-00000001", narrow, its_optimizer)

"""What earlier versions wrote still loads: configs, checkpoints and runs in `tests/old`, written by version 1."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fourfold as ff
from fourfold import old_versions
from fourfold.checkpoint import format as written
from fourfold.checkpoint.format import RECORD, VERSION, read_record, write_record
from fourfold.checkpoint.load import load_training, read_full_tensor, verify_checkpoint
from fourfold.checkpoint.training_state import RANDOM, training_shards
from fourfold.grid import Grid, Shape
from fourfold.old_versions import CONFIG_KEYS, complete_order, upgrade_config, upgrade_state
from fourfold.train.checkpoints import start_at
from fourfold.train.config import read_config, table_of
from fourfold.train.schema import to_table
from harness import DEVICE, Ranks
from runs import cli, column

OLD = Path(__file__).parent / "old"
RUN = OLD / "run-x2z2"
CHECKPOINT = RUN / "checkpoints" / "step-00000004"
CONTINUED = [4.011991500854492, 3.9707655906677246, 3.944775342941284]
"""The losses of steps 5 to 7 with which version 1 continued that run on its own grid."""


# Configs


@pytest.mark.parametrize("path", sorted(OLD.glob("configs/*.toml")), ids=lambda path: path.stem)
def test_configs_of_version_1_keep_every_value(path: Path) -> None:
    """`full` sets every key, so a key that was renamed without a line in the table is an error here."""
    found = to_table(read_config(path))
    for section, keys in upgrade_config(tomllib.loads(path.read_text())).items():
        for key, value in keys.items():
            if key == "sources":
                assert [{**source, **given} for source, given in zip(found[section][key], value, strict=True)] == (
                    found[section][key]
                )
            else:
                assert found[section][key] == value, f"{section}.{key}"


def test_tables_name_keys_of_today_and_no_others() -> None:
    for section, names in CONFIG_KEYS.items():
        assert set(names.values()) <= set(table_of(section))
        assert not set(names) & set(table_of(section))


def test_old_keys_get_their_new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG_KEYS, "optimizer", {"alpha": "beta"})
    monkeypatch.setitem(old_versions.STATE_KEYS, "schedule", {"gamma": "delta"})
    old = {"optimizer": {"clip": 1.0, "alpha": 2, "other": 3}, "train": {"alpha": 4}, "model": "no table"}
    new = {"optimizer": {"clip": 1.0, "beta": 2, "other": 3}, "train": {"alpha": 4}, "model": "no table"}
    assert upgrade_config(old) == upgrade_config(new) == new
    assert list(upgrade_config(old)["optimizer"]) == ["clip", "beta", "other"]
    state = {"config": old, "schedule": {"gamma": 5}, "step": 6}
    assert upgrade_state(state) == {"config": new, "schedule": {"delta": 5}, "step": 6}
    assert old["optimizer"] == {"clip": 1.0, "alpha": 2, "other": 3}
    with pytest.raises(ValueError, match=r"optimizer.alpha is the old name of optimizer.beta; give one of the two"):
        upgrade_config({"optimizer": {"alpha": 1, "beta": 2}})


def test_a_config_file_with_an_old_key_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG_KEYS, "batch", {"sequences": "rows"})
    path = tmp_path / "config.toml"
    path.write_text("[batch]\nsequences = 8\n")
    assert read_config(path).batch.rows == 8
    path.write_text("[batch]\nsequences = 8\nrows = 8\n")
    with pytest.raises(ValueError, match=rf"{path}: batch.sequences is the old name of batch.rows"):
        read_config(path)


# Checkpoints


def test_a_checkpoint_of_version_1_loads_bit_for_bit() -> None:
    assert json.loads((CHECKPOINT / RECORD).read_text())["version"] == 1 < VERSION
    record = verify_checkpoint(CHECKPOINT)
    config = read_config(RUN / "config.toml").model.build()
    model = ff.models.build(config, Grid.alone(DEVICE), seed=1)
    optimizer = ff.optim.AdamW(model, 1e-3)
    assert load_training(CHECKPOINT, model, optimizer)["step"] == 4
    loaded = {name: shard for name, shard in training_shards(model, optimizer).items() if not name.startswith(RANDOM)}
    assert loaded.keys() == {name for name in record.tensors if not name.startswith(RANDOM)}
    for name, shard in loaded.items():
        assert torch.equal(shard.local.cpu(), read_full_tensor(CHECKPOINT, record, name)), name


def test_weights_of_a_wrapped_module_are_whole() -> None:
    record = verify_checkpoint(OLD / "weights-wrapped")
    for name in record.tensors:
        assert read_full_tensor(OLD / "weights-wrapped", record, name).isfinite().all()


def test_a_run_of_version_1_resumes_with_the_same_losses(one: Ranks, tmp_path: Path) -> None:
    start = start_at(RUN, read_config(RUN / "config.toml"), None)
    assert (start.step, start.checkpoint, start.notes) == (4, CHECKPOINT, ())
    shutil.copytree(OLD, tmp_path / "old")
    (left,) = one.run(resumed, tmp_path / "old")
    assert (left.code, left.err) == (0, "")
    run = tmp_path / "old" / RUN.name
    assert column(run, "step", "step") == list(range(1, 8))
    # on one rank instead of four, so within the rounding of fp32
    assert column(run, "step", "loss")[4:] == pytest.approx(CONTINUED, rel=1e-5)
    newest = run / "checkpoints" / "step-00000007"
    assert json.loads((newest / RECORD).read_text())["version"] == VERSION


def resumed(folder: Path) -> Any:
    """A job: continue the run where its data lies, on one rank."""
    os.chdir(folder)
    grid = ["--ranks", "1", "--grid", "x=1", "--device", "cpu"]
    return cli("train", "--resume", RUN.name, "--steps", "7", *grid)


# Versions with other axes


def rewritten(to: Path, change: Any) -> Path:
    """A copy of the old checkpoint with another record, as a version with other axes would have written it."""
    shutil.copytree(CHECKPOINT, to)
    content = json.loads((to / RECORD).read_text())
    del content["digest"]
    change(content)
    (to / RECORD).write_text(json.dumps({**content, "digest": written._digest(content)}))
    return to


def add_axis(size: int) -> Any:
    def change(content: dict[str, Any]) -> None:
        content["grid"]["sizes"]["w"] = size
        content["grid"]["order"].insert(1, "w")
        for name, tensor in content["tensors"].items():
            if name.startswith(RANDOM):  # cut over every axis
                tensor["cuts"].append(["w", 0])

    return change


def test_an_unknown_axis_of_one_rank_changes_nothing(tmp_path: Path) -> None:
    found, expected = read_record(rewritten(tmp_path / "one", add_axis(1))), read_record(CHECKPOINT)
    assert (found.grid, found.tensors) == (expected.grid, expected.tensors)
    verify_checkpoint(tmp_path / "one")
    with pytest.raises(ValueError, match="does not describe a checkpoint"):
        read_record(rewritten(tmp_path / "two", add_axis(2)))


def test_an_axis_that_the_writer_did_not_know_has_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_out(content: dict[str, Any]) -> None:
        for section in (content["grid"]["sizes"], content["grid"]["order"]):
            section.remove("data") if isinstance(section, list) else section.pop("data")
        for tensor in content["tensors"].values():
            tensor["cuts"] = [cut for cut in tensor["cuts"] if cut[0] != "data"]

    monkeypatch.setattr(old_versions, "FIRST_AXES", ("x", "y", "z"))
    folder = rewritten(tmp_path / "three", leave_out)
    assert read_record(folder).grid == Shape(x=2, z=2)
    record, expected = verify_checkpoint(folder), read_record(CHECKPOINT)
    for name in expected.tensors:
        assert torch.equal(read_full_tensor(folder, record, name), read_full_tensor(CHECKPOINT, expected, name))


def test_an_order_gets_the_axes_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(old_versions, "AXES", ("x", "v", "y", "z", "data", "w"))
    assert complete_order(["x", "y", "z", "data"]) == ["x", "v", "y", "z", "data", "w"]
    assert complete_order(["z", "x", "y", "data"]) == ["z", "x", "v", "y", "data", "w"]
    assert complete_order(["z", "x"]) == ["z", "x"]  # no version wrote it: for Shape to refuse
    assert upgrade_config({"grid": {"order": "zx"}}) == {"grid": {"order": "zx"}}


def test_the_record_that_is_written_has_the_axes_of_today(tmp_path: Path) -> None:
    write_record(tmp_path, read_record(CHECKPOINT))
    assert read_record(tmp_path) == read_record(CHECKPOINT)

"""`fourfold checkpoint`: what it lists and shows is what is there, and verify finds every fault and names the file."""

from __future__ import annotations

import json
import pickle
import sys
import warnings
from collections.abc import Callable, Collection
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fourfold import cli
from fourfold.checkpoint.format import (
    RECORD,
    Record,
    TensorInfo,
    TensorType,
    rank_file,
    write_record,
    write_tensor_file,
)
from fourfold.grid import Shape
from fourfold.layout import Layout, boxed

GRID = Shape(x=2, z=2)
TENSORS = {
    "model/a.weight": (torch.arange(24.0).view(4, 6), Layout((("x", 0), ("y", 1), ("z", 0)))),
    "model/a.bias": (torch.arange(6.0), Layout(())),
    "optimizer/exp_avg/a.weight": (torch.full((4, 6), 0.5), Layout((("x", 0), ("z", 0)))),
    "optimizer/step/a.weight": (torch.tensor(3.0), Layout(())),
}
STATE = {"config": {"model": {"name": "gpt-tiny"}}, "saved": "2026-11-15T12:00:00+00:00", "data": {"sample": 12}}


def save(folder: Path, state: dict[str, Any], finite: Collection[str] = ()) -> Path:
    """A checkpoint as the ranks of a grid write it, with a record that says which tensors must be finite."""
    tensors = {name: TensorInfo(tuple(t.shape), t.dtype, s, name in finite) for name, (t, s) in TENSORS.items()}
    record = Record(GRID, state, tensors)
    folder.mkdir(parents=True)
    files = {}
    for rank in range(GRID.world):
        own: dict[str, Tensor] = {}
        for name in record.written_by(GRID.coords(rank)):
            box = record.tensors[name].box(GRID, GRID.coords(rank))
            own[name] = boxed(TENSORS[name][0], box)
        types = {name: TensorType.of(tensor) for name, tensor in own.items()}
        files[rank_file(rank)] = write_tensor_file(folder / rank_file(rank), types, own.values())
    write_record(folder, Record(GRID, state, record.tensors, files))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints."""
    for step in (4, 8):
        save(tmp_path / "run" / "checkpoints" / f"step-{step:08d}", {**STATE, "step": step})
    return tmp_path / "run"


@pytest.fixture
def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000008"


def command(*arguments: object) -> int:
    options = cli.parser().parse_args(["checkpoint", *map(str, arguments)])
    return cli.command(options.run)(options, arguments)


# list


def test_list_shows_every_checkpoint_and_what_a_dead_save_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / ".step-00000012.partial").mkdir()
    (run / "checkpoints" / "damaged-step-00000010").mkdir()
    assert command("list", run) == 0
    heading, *rows, left, aside = capsys.readouterr().out.splitlines()
    assert heading.split() == ["step", "saved", "grid", "tensors", "bytes", "holds"]
    assert [row.split()[0] for row in rows] == ["4", "8"]
    assert all(row.split()[1].startswith("2026-11-1") and "x=2 z=2" in row for row in rows)
    assert all(row.split()[5:] == ["4", "220", "B", "model,", "optimizer"] for row in rows)
    assert left.startswith(".step-00000012.partial: not complete")
    assert aside.startswith("damaged-step-00000010: a run found it damaged and passed over it")


def test_list_marks_a_damaged_one_and_goes_on(run: Path, newest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (newest / RECORD).write_text("{")
    assert command("list", run) == 1
    shown = capsys.readouterr().out
    assert "model, optimizer" in shown and "damaged" in shown and str(newest / RECORD) in shown


def test_list_of_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no checkpoint; give the folder of a run"):
        command("list", tmp_path)
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        command("list", tmp_path / "nowhere")


# inspect


def test_inspect_shows_the_newest_complete_one(run: Path, newest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (newest.parent / "step-00000012").mkdir()  # without a record it is none
    assert command("inspect", run) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == str(newest)
    facts = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown[1:7]}
    assert facts["step"] == "8" and facts["grid"] == "x=2 z=2, 4 files"
    assert facts["model"] == "gpt-tiny, 30 parameters"
    assert facts["bytes"] == "220 B: model 120 B, optimizer 100 B"
    table = [line.split("  ") for line in shown[8:]]
    rows = {row[0]: [cell.strip() for cell in row[1:] if cell] for row in table}
    assert rows["model/a.weight"] == ["4 x 6", "float32", "96 B", "dim 0 over x, z; dim 1 over y"]
    assert rows["optimizer/step/a.weight"] == ["scalar", "float32", "4 B", "whole"]


def test_inspect_json_has_everything(newest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("inspect", newest, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["parameters"]) == (8, 30)
    assert found["grid"]["sizes"] == GRID.sizes
    assert found["state"] == {**STATE, "step": 8}
    assert found["tensors"].keys() == TENSORS.keys()
    assert found["tensors"]["model/a.weight"]["cuts"] == [["x", 0], ["y", 1], ["z", 0]]
    assert found["files"] == {path.name: path.stat().st_size for path in newest.glob("*.safetensors")}


def test_inspect_of_weights_alone_and_of_a_strangers_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path / "weights", {})
    assert command("inspect", tmp_path / "weights") == 0
    save(tmp_path / "step-00000001", {"saved": 3, "step": "\x1b]0;owned\x07", "config": [1]})
    assert command("inspect", tmp_path / "step-00000001") == 0
    assert command("list", tmp_path) == 0
    assert "\x1b" not in capsys.readouterr().out  # a terminal would obey it


# verify


def test_verify_reads_all_checkpoints_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", run) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [Path(line.partition(":")[0]).name for line in lines] == ["step-00000004", "step-00000008"]
    assert all(line.endswith("4 files, 4 tensors, 220 B, every checksum is right") for line in lines)


@pytest.mark.parametrize("version", ["this", "an earlier"])
def test_verify_finds_numbers_that_are_not_finite(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record of this version says what must be finite; in an earlier one it is what the optimizer has state for."""
    mask = {"model/a.mask": (torch.tensor([0.0, -inf]), Layout(()))}
    for name in TENSORS:
        spoilt = TENSORS[name][0].clone().view(-1)
        spoilt[-1] = nan
        tensors = {**TENSORS, name: (spoilt.view(TENSORS[name][0].shape), TENSORS[name][1]), **mask}
        monkeypatch.setattr(sys.modules[__name__], "TENSORS", tensors)
        finite = {name for name in tensors if name not in mask} if version == "this" else set()
        folder = save(tmp_path / name.replace("/", "-"), {}, finite)
        if name == "model/a.bias" and version != "this":
            assert command("verify", folder) == 0  # it has no optimizer state, so it may be a buffer
        else:
            assert command("verify", folder) == 1
            assert f"was saved with NaN or infinity in '{name}'" in capsys.readouterr().err
        monkeypatch.undo()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def flip_header(path: Path) -> None:
    """A byte of the padding: the file opens as before."""
    content = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(content[:8], "little")
    place = content.rindex(b" ", 0, end) if b" " in content[8:end] else content.index(b"crc32:") + 6
    content[place] = ord("\n") if content[place] == ord(" ") else content[place] ^ 1
    path.write_bytes(content)


def edit(path: Path) -> None:
    content = json.loads(path.read_text())
    content["state"]["step"] = 80
    path.write_text(json.dumps(content))


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "flipped byte": (rank_file(1), flip, "is damaged: '"),
    "flipped header": (rank_file(1), flip_header, "header"),
    "truncated": (rank_file(2), lambda path: path.write_bytes(path.read_bytes()[:-1]), "rank-00002"),
    "emptied": (rank_file(2), lambda path: path.write_bytes(b""), "rank-00002"),
    "missing": (rank_file(3), lambda path: path.unlink(), "is missing"),
    "pickle": (
        rank_file(0),
        lambda path: path.write_bytes(pickle.dumps({"a": 1})),
        "is a pickle, which is never opened",
    ),
    "torch.save": (
        rank_file(0),
        lambda path: torch.save({"a": torch.ones(2)}, path),
        "is a pickle, which is never opened",
    ),
    "of another rank": (
        rank_file(0),
        lambda path: path.write_bytes(path.with_name(rank_file(1)).read_bytes()),
        "rank-00000",
    ),
    "edited record": (RECORD, edit, "its digest is not the digest of its content"),
    "no record": (RECORD, lambda path: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_finds_a_fault_and_names_the_file(
    fault: str, run: Path, newest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, damage, said = FAULTS[fault]
    damage(newest / name)
    for path in (newest, run):  # of a run the others are verified too
        assert command("verify", path) == 1
        out, err = capsys.readouterr()
        assert err.startswith("fourfold: ") and len(err.splitlines()) == 1
        assert str(newest / name) in err and said in err
        assert ("step-00000004" in out) == (path == run) and "step-00000008" not in out


def test_verify_of_nothing_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        command("verify", tmp_path)


# convert


def test_convert_there_and_back(run: Path, newest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("convert", run, "--to-dcp", "--to", tmp_path / "dcp") == 0
    out, err = capsys.readouterr()
    assert str(newest) in out and "4 tensors, 220 B" in out and err == ""
    assert command("convert", tmp_path / "dcp", "--from-dcp", "--to", tmp_path / "back") == 0
    out, err = capsys.readouterr()
    assert "4 tensors" in out and "left out" not in out
    assert f"{tmp_path / 'dcp' / '.metadata'} is a pickle; it is read through a list of allowed names" in err
    assert command("verify", tmp_path / "back") == 0
    assert command("inspect", tmp_path / "back", "--json") == 0
    found = json.loads(capsys.readouterr().out.partition("\n")[2])
    assert found["state"] == {**STATE, "step": 8} and found["tensors"].keys() == TENSORS.keys()


def test_convert_names_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"net": {"a": torch.ones(2)}, "rate": 0.1, "\x1b[2J": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert command("convert", tmp_path / "dcp", "--from-dcp", "--prefix", "net.", "--to", tmp_path / "one") == 0
    assert capsys.readouterr().out.splitlines()[1] == r"left out: rate, '\x1b[2J'"
    with pytest.raises(ValueError, match="--prefix is for --from-dcp"):
        command("convert", tmp_path / "one", "--to-dcp", "--prefix", "net.", "--to", tmp_path / "two")


def test_convert_needs_a_direction(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command("convert", run, "--to", run / "dcp")
    assert "--to-dcp --from-dcp" in capsys.readouterr().err


def test_list_misses_a_file_that_is_gone_or_short(run: Path, newest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = newest / rank_file(1)
    whole = file.read_bytes()
    for content, said in ((None, f"{file} is missing"), (whole[:-1], f"{file} has {len(whole) - 1} bytes instead of")):
        file.unlink() if content is None else file.write_bytes(content)
        assert cli.main(["checkpoint", "list", str(run)]) == 1
        found = capsys.readouterr().out
        assert said in found and found.count("damaged") == 1

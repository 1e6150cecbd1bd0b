"""Weights on disk: any grid reads what any grid wrote, each byte is written once, faults change nothing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold import atomic
from fourfold.checkpoint import save as saving
from fourfold.checkpoint.format import FileInfo, TensorTypes, _digest
from fourfold.checkpoint.load import read_shards
from fourfold.checkpoint.save import PendingSave
from fourfold.checkpoint.training_state import LocalShard, LocalShards, model_shards
from fourfold.errors import FailedElsewhereError
from fourfold.grid import Grid, Shape
from fourfold.layout import PRODUCT, Layout, Spec, boxed
from fourfold.nn.rng import key_of
from harness import DEVICE, Largest, grid_of, join_shards

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53, qk_norm=True, tied=False)


def whole(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that tell every element of every tensor apart, of norms and biases too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key_of(name)), dtype=torch.float64)


def scramble(tensors: LocalShards, grid: Grid) -> None:
    for name, held in tensors.items():
        box = held.info.box(grid.shape, grid.coords)
        held.local.copy_(boxed(whole(name, held.shape), box))


def build(grid: Grid, dtype: torch.dtype = torch.float64) -> ff.models.Transformer:
    return ff.models.build(CONFIG, grid, dtype=dtype)


def scrambled(grid: Grid) -> ff.models.Transformer:
    model = build(grid)
    scramble(model_shards(model), grid)
    return model


def alone() -> Grid:
    return Grid.alone(DEVICE)


def same(tensors: LocalShards, grid: Grid) -> bool:
    return all(
        torch.equal(
            join_shards(held.local, Spec(held.shape, held.storage, PRODUCT), grid).cpu(),
            whole(name, held.shape).to(held.local.dtype),
        )
        for name, held in tensors.items()
    )


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# What is written and read


def save(folder: Path, shape: Shape) -> int:
    """How much larger than the largest shard any tensor was while this rank saved."""
    model = scrambled(grid_of(shape))
    with Largest() as largest:
        ff.save(folder, model)
    return largest.elements - max(held.local.numel() for held in model_shards(model).values())


def load(folder: Path, shape: Shape, dtype: torch.dtype) -> bool:
    grid = grid_of(shape)
    model = build(grid, dtype)
    ff.load(folder, model)
    return same(model_shards(model), grid)


def data_bytes(path: Path) -> int:
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def test_each_byte_is_written_once_and_replicas_share_the_work(ranks, tmp_path: Path) -> None:
    ranks(4).run(save, tmp_path / "w", Shape(y=2, data=2))
    sizes = [data_bytes(file) for file in sorted((tmp_path / "w").glob("*.safetensors"))]
    assert sum(sizes) == 8 * CONFIG.parameters
    assert len(sizes) == 4 and max(sizes) < 1.1 * min(sizes)


def opened_files(folder: Path) -> set[str]:
    """The files that this rank opens when it loads what the same grid has saved."""
    model = scrambled(grid_of(Shape(z=4)))
    ff.save(folder, model)
    opened, real = set(), safetensors.safe_open
    safetensors.safe_open = lambda path, **options: (opened.add(Path(path).name), real(path, **options))[1]
    try:
        ff.load(folder, model)
    finally:
        safetensors.safe_open = real
    return opened


def test_a_rank_opens_only_the_files_that_it_needs(ranks, tmp_path: Path) -> None:
    found = ranks(4).run(opened_files, tmp_path / "w")
    assert found == [{f"rank-{rank:05d}.safetensors"} for rank in range(4)]


def odd_tensors(grid: Grid) -> dict[str, LocalShard]:
    """Shards that are uneven or empty, a tensor that data cuts as well, and one without a dim."""
    cuts = {
        "short": ((3,), Layout((("z", 0),))),
        "uneven": ((5, 3), Layout((("x", 0), ("y", 1), ("z", 0)))),
        "state": ((7, 2), Layout((("y", 1), ("z", 0), ("data", 0)))),
        "everywhere": ((2, 2), Layout(())),
        "number": ((), Layout(())),
        "nothing": ((0, 4), Layout((("x", 0),))),
    }
    return {
        name: LocalShard(
            torch.zeros(
                [*map(len, storage.box(shape, grid.shape.sizes, grid.coords))], dtype=torch.float64, device=grid.device
            ),
            shape,
            storage,
        )
        for name, (shape, storage) in cuts.items()
    }


def through_disk(folder: Path, one: Shape, other: Shape) -> bool:
    tensors = odd_tensors(grid_of(one))
    scramble(tensors, grid_of(one))
    PendingSave(tensors, grid_of(one), folder, {}).wait()
    tensors = odd_tensors(grid_of(other))
    read_shards(grid_of(other), folder, lambda _: tensors)
    return same(tensors, grid_of(other))


def test_tensors_that_do_not_divide(ranks, tmp_path: Path) -> None:
    assert ranks(4).run(through_disk, tmp_path / "a", Shape(z=4), Shape(y=2, data=2)) == [True] * 4
    assert ranks(4).run(through_disk, tmp_path / "b", Shape(z=2, data=2), Shape(x=4)) == [True] * 4


# A failure of one rank is one of all, and nothing has changed


def failing_save(folder: Path) -> dict[str, Any]:
    grid = grid_of(Shape(x=2, z=2))
    ff.save(folder, scrambled(grid))
    stamp = os.stat(folder / "checkpoint.json").st_mtime_ns
    real = saving.write_tensor_file

    def full_disk(path: Path, layout: TensorTypes, tensors: Iterable[Tensor], finite: Collection[str]) -> FileInfo:
        real(path, layout, tensors, finite)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    try:
        saving.write_tensor_file = full_disk if grid.rank == 2 else real
        with pytest.raises(OSError if grid.rank == 2 else FailedElsewhereError, match="No space left") as caught:
            ff.save(folder, build(grid))
    finally:
        saving.write_tensor_file = real
    again = build(grid)
    ff.load(folder, again)
    return {
        "error": str(caught.value),
        "intact": same(model_shards(again), grid) and os.stat(folder / "checkpoint.json").st_mtime_ns == stamp,
    }


def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_old_folder(ranks, tmp_path: Path) -> None:
    found = ranks(4).run(failing_save, tmp_path / "w")
    assert all(result["intact"] for result in found)
    assert all("rank 2: OSError" in found[rank]["error"] for rank in (0, 1, 3))
    assert entries(tmp_path) == ["w"]


def failing_load(folder: Path) -> bool:
    grid = grid_of(Shape(z=4))
    ff.save(folder, build(grid))
    if grid.rank == 3:
        (folder / "rank-00003.safetensors").unlink()
    model = scrambled(grid)
    grid.agree("the file is gone", "")
    expected = FileNotFoundError if grid.rank == 3 else FailedElsewhereError
    with pytest.raises(expected, match=r"rank-00003.safetensors is missing"):
        ff.load(folder, model)
    return same(model_shards(model), grid)


def test_a_file_that_one_rank_misses_changes_no_rank(ranks, tmp_path: Path) -> None:
    assert ranks(4).run(failing_load, tmp_path / "w") == [True] * 4


def record_with(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """As somebody would write it who knows the format."""

    def damage(folder: Path) -> None:
        record = json.loads((folder / "checkpoint.json").read_text())
        del record["digest"]
        change(record)
        (folder / "checkpoint.json").write_text(json.dumps({**record, "digest": _digest(record)}))

    return damage


def file_with(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        path = folder / "rank-00000.safetensors"
        path.write_bytes(change(path.read_bytes()))

    return damage


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at:][1:]


def norm(record: dict[str, Any]) -> dict[str, Any]:
    return record["tensors"]["model/norm.weight"]


def misspell(record: dict[str, Any]) -> None:
    record["tensors"]["model/norm.wieght"] = record["tensors"].pop("model/norm.weight")


def edit(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_text(path.read_text().replace('"shape": [48]', '"shape": [84]', 1))


def rename_file(record: dict[str, Any]) -> None:
    record["files"]["../a"] = record["files"].pop("rank-00000.safetensors")


DAMAGED = "rank-00000.safetensors is damaged"
FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no record": (lambda folder: (folder / "checkpoint.json").unlink(), FileNotFoundError, "json is missing"),
    "not json": (
        lambda folder: (folder / "checkpoint.json").write_text("{"),
        ValueError,
        "is not the record of a checkpoint",
    ),
    "other json": (
        lambda folder: (folder / "checkpoint.json").write_text("[]"),
        ValueError,
        "is not the record of a checkpoint",
    ),
    "edited": (edit, ValueError, "checkpoint.json is damaged: its digest"),
    "version": (record_with(lambda record: record.update(version=3)), ValueError, r"version 3, and this .* version 2"),
    "spelling": (
        record_with(misspell),
        ValueError,
        r"lacks 'model/norm.weight' \(did you mean 'model/norm.wieght'\?\); it al",
    ),
    "shape": (record_with(lambda record: norm(record).update(shape=[49])), ValueError, r"\(49,\) in .* and \(48,\) h"),
    "no shape": (record_with(lambda record: norm(record).pop("shape")), ValueError, "does not describe a checkpoint"),
    "length": (record_with(lambda record: norm(record).update(shape=[-48])), ValueError, r"has shape \(-48,\)"),
    "axis": (record_with(lambda record: norm(record).update(cuts=[["w", 0]])), ValueError, "is cut by"),
    "dim": (record_with(lambda record: norm(record).update(cuts=[["z", 1]])), ValueError, "is cut by"),
    "dtype": (record_with(lambda record: norm(record).update(dtype="object")), ValueError, "has dtype 'object'"),
    "other dtype": (
        record_with(lambda record: norm(record).update(dtype="int64")),
        ValueError,
        r"says torch.int64 \(48",
    ),
    "grid": (
        record_with(lambda record: record["grid"]["sizes"].update(x=2)),
        ValueError,
        r"says torch.float64 \(27, 48\)",
    ),
    "many ranks": (record_with(lambda record: record["grid"]["sizes"].update(x=1 << 18)), ValueError, "the most is"),
    "file elsewhere": (record_with(rename_file), ValueError, "not the name of a rank's file"),
    "no file": (
        lambda folder: (folder / "rank-00000.safetensors").unlink(),
        FileNotFoundError,
        "safetensors is missing",
    ),
    "cut short": (file_with(lambda content: content[:-8]), ValueError, DAMAGED),
    "flipped bit": (file_with(lambda content: flip(content, len(content) - 100)), ValueError, f"{DAMAGED}: 'model/"),
    "flipped bit of the header": (file_with(lambda content: flip(content, 60)), ValueError, "rank-00000.safetensors"),
    "a pickle": (
        file_with(lambda _: pickle.dumps({"weight": 1})),
        ValueError,
        "safetensors is a pickle, which is never",
    ),
    "torch.save": (lambda folder: torch.save({}, folder / "rank-00000.safetensors"), ValueError, "is a pickle, which"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy from."""
    folder = tmp_path_factory.mktemp("saved") / "w"
    ff.save(folder, build(alone()))
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_before_anything_changes(fault: str, saved: Path, tmp_path: Path) -> None:
    damage, kind, message = FAULTS[fault]
    shutil.copytree(saved, tmp_path / "w")
    damage(tmp_path / "w")
    model = scrambled(alone())
    with pytest.raises(kind, match=message):
        ff.load(tmp_path / "w", model)
    assert same(model_shards(model), alone())


# The folder


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    model = build(alone())
    (tmp_path / "notes.txt").write_text("mine")
    for target, message in ((tmp_path, "also holds 'notes.txt'"), (tmp_path / "notes.txt", "is a file")):
        with pytest.raises(FileExistsError, match=message):
            ff.save(target, model)
    assert entries(tmp_path) == ["notes.txt"]


def test_a_save_clears_what_a_save_that_died_has_left(tmp_path: Path) -> None:
    model = scrambled(alone())
    ff.save(tmp_path / "w", model)
    (tmp_path / "w").rename(tmp_path / ".w.replaced")  # died between the two renames
    (tmp_path / ".w.partial").mkdir()
    (tmp_path / ".w.partial" / "rank-00007.safetensors").write_text("half")
    other = build(alone())
    ff.load(tmp_path / "w", other)
    assert same(model_shards(other), alone())
    ff.save(tmp_path / "w", model)
    assert entries(tmp_path) == ["w"]
    assert entries(tmp_path / "w") == ["checkpoint.json", "rank-00000.safetensors"]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path: Path, monkeypatch) -> None:
    ff.save(tmp_path / "w", scrambled(alone()))
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name.endswith(".partial"):
            raise PermissionError("not this one")
        rename(source, target)

    monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="not this one"):
        ff.save(tmp_path / "w", build(alone()))
    assert entries(tmp_path) == ["w"]
    model = build(alone())
    ff.load(tmp_path / "w", model)
    assert same(model_shards(model), alone())


# What cannot be saved


def test_what_is_not_on_the_grid_is_refused(tmp_path: Path) -> None:
    model = build(alone())
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="'scale' of Transformer are not on the grid"):
        ff.save(tmp_path / "w", model)
    with pytest.raises(ValueError, match="meta device"):
        ff.save(tmp_path / "w", ff.models.build(CONFIG, alone(), device="meta"))
    tensors = {"a": LocalShard(torch.zeros(3), (4,), Layout(()))}
    with pytest.raises(ValueError, match=r"holds \(3,\), but its part of \(4,\) is \(4,\)"):
        PendingSave(tensors, alone(), tmp_path / "w", {})
    assert entries(tmp_path) == []


def test_reading_without_safetensors_says_what_to_install(saved: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'fourfold\[train\]'"):
        ff.load(saved, build(alone()))


# Last, since it ends the ranks that the tests above share


def test_what_one_grid_saves_every_other_loads(ranks, tmp_path: Path) -> None:
    assert max(ranks(4).run(save, tmp_path / "w", Shape(x=2, z=2))) <= 0  # nothing was gathered
    for shape in (Shape(y=2, z=2), Shape(x=4), Shape(x=2, z=2, order=("z", "x", "y", "data"))):
        assert ranks(4).run(load, tmp_path / "w", shape, torch.float64) == [True] * 4
    ranks(4).run(save, tmp_path / "reordered", Shape(y=2, z=2, order=("z", "data", "y", "x")))
    assert ranks(2).run(load, tmp_path / "w", Shape(data=2), torch.float32) == [True] * 2
    for folder in (tmp_path / "w", tmp_path / "reordered"):
        model = build(alone())
        ff.load(folder, model)
        assert same(model_shards(model), alone())
    ff.save(tmp_path / "alone", model)
    assert entries(tmp_path / "alone") == ["checkpoint.json", "rank-00000.safetensors"]
    assert ranks(2).run(load, tmp_path / "alone", Shape(y=2), torch.bfloat16) == [True] * 2

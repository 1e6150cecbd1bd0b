"""Weights on disk: any grid reads what any grid wrote, each byte is written once, faults change nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.checkpoint import weights
from fourfold.checkpoint.weights import load_weights, read_tensors, save_weights, weights_of, write_tensors
from fourfold.comm import join_shards
from fourfold.grid import FailedElsewhereError, Grid, Shape
from fourfold.layout import PRODUCT, Spec, Storage
from fourfold.nn.initial import key_of
from harness import DEVICE, Largest, grid_of

CONFIG = ff.models.config("gpt-tiny", layers=1, vocab=53, qk_norm=True, tied=False)


def whole(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that tell every element of every tensor apart, of norms and biases too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(key_of(name)), dtype=torch.float64)


def scramble(tensors: weights.Tensors, grid: Grid) -> None:
    for name, (local, spec) in tensors.items():
        box = spec.storage.box(spec.shape, grid.shape.sizes, grid.coords)
        local.copy_(whole(name, spec.shape)[tuple(slice(part.start, part.stop) for part in box)])


def build(grid: Grid, dtype: torch.dtype = torch.float64) -> ff.models.Transformer:
    return ff.models.build(CONFIG, grid, dtype=dtype)


def scrambled(grid: Grid) -> ff.models.Transformer:
    model = build(grid)
    scramble(weights_of(model), grid)
    return model


def alone() -> Grid:
    return Grid.alone(DEVICE)


def same(tensors: weights.Tensors, grid: Grid) -> bool:
    return all(
        torch.equal(join_shards(local, spec, grid).cpu(), whole(name, spec.shape).to(local.dtype))
        for name, (local, spec) in tensors.items()
    )


def entries(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# What is written and read


def save(folder: Path, shape: Shape) -> int:
    """How much larger than the largest shard any tensor was while this rank saved."""
    model = scrambled(grid_of(shape))
    with Largest() as largest:
        save_weights(model, folder)
    return largest.elements - max(local.numel() for local, _ in weights_of(model).values())


def load(folder: Path, shape: Shape, dtype: torch.dtype) -> bool:
    grid = grid_of(shape)
    model = build(grid, dtype)
    load_weights(model, folder)
    return same(weights_of(model), grid)


def data_bytes(path: Path) -> int:
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def test_each_byte_is_written_once_and_replicas_write_nothing(ranks, tmp_path: Path) -> None:
    ranks(4).run(save, tmp_path / "w", Shape(y=2, data=2))
    files = sorted((tmp_path / "w").glob("*.safetensors"))
    assert [file.name for file in files] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert sum(map(data_bytes, files)) == 8 * CONFIG.parameters
    sizes = [data_bytes(file) for file in files]
    assert max(sizes) < 1.1 * min(sizes)


def opened_files(folder: Path) -> set[str]:
    """The files that this rank opens when it loads what the same grid has saved."""
    model = scrambled(grid_of(Shape(z=4)))
    save_weights(model, folder)
    opened, real = set(), safetensors.safe_open
    safetensors.safe_open = lambda path, **options: (opened.add(Path(path).name), real(path, **options))[1]
    try:
        load_weights(model, folder)
    finally:
        safetensors.safe_open = real
    return opened


def test_a_rank_opens_only_the_files_that_it_needs(ranks, tmp_path: Path) -> None:
    found = ranks(4).run(opened_files, tmp_path / "w")
    assert found == [{f"rank-{rank:05d}.safetensors"} for rank in range(4)]


def odd_tensors(grid: Grid) -> dict[str, tuple[Tensor, Spec]]:
    """Shards that are uneven or empty, and a tensor that data cuts as well."""
    specs = {
        "short": Spec((3,), Storage((("z", 0),)), PRODUCT),
        "uneven": Spec((5, 3), Storage((("x", 0), ("y", 1), ("z", 0))), PRODUCT),
        "state": Spec((7, 2), Storage((("y", 1), ("z", 0), ("data", 0))), PRODUCT),
        "everywhere": Spec((2, 2), Storage(()), PRODUCT),
    }
    boxes = {name: spec.storage.box(spec.shape, grid.shape.sizes, grid.coords) for name, spec in specs.items()}
    return {
        name: (torch.zeros([*map(len, boxes[name])], dtype=torch.float64, device=grid.device), spec)
        for name, spec in specs.items()
    }


def through_disk(folder: Path, one: Shape, other: Shape) -> bool:
    tensors = odd_tensors(grid_of(one))
    scramble(tensors, grid_of(one))
    write_tensors(tensors, grid_of(one), folder)
    tensors = odd_tensors(grid_of(other))
    read_tensors(tensors, grid_of(other), folder)
    return same(tensors, grid_of(other))


def test_tensors_that_do_not_divide(ranks, tmp_path: Path) -> None:
    assert ranks(4).run(through_disk, tmp_path / "a", Shape(z=4), Shape(y=2, data=2)) == [True] * 4
    assert ranks(4).run(through_disk, tmp_path / "b", Shape(z=2, data=2), Shape(x=4)) == [True] * 4


# A failure of one rank is one of all, and nothing has changed


def failing_save(folder: Path) -> dict[str, Any]:
    grid = grid_of(Shape(x=2, z=2))
    save_weights(scrambled(grid), folder)
    stamp = os.stat(folder / "index.json").st_mtime_ns
    real = weights._write_file

    def full_disk(tensors: dict[str, Tensor], path: Path) -> None:
        real(tensors, path)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    try:
        weights._write_file = full_disk if grid.rank == 2 else real
        with pytest.raises(OSError if grid.rank == 2 else FailedElsewhereError, match="No space left") as caught:
            save_weights(build(grid), folder)
    finally:
        weights._write_file = real
    again = build(grid)
    load_weights(again, folder)
    return {
        "error": str(caught.value),
        "intact": same(weights_of(again), grid) and os.stat(folder / "index.json").st_mtime_ns == stamp,
    }


def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_old_folder(ranks, tmp_path: Path) -> None:
    found = ranks(4).run(failing_save, tmp_path / "w")
    assert all(result["intact"] for result in found)
    assert all("rank 2: OSError" in found[rank]["error"] for rank in (0, 1, 3))
    assert entries(tmp_path) == ["w"]


def failing_load(folder: Path) -> bool:
    grid = grid_of(Shape(z=4))
    save_weights(build(grid), folder)
    if grid.rank == 3:
        (folder / "rank-00003.safetensors").unlink()
    model = scrambled(grid)
    grid.agree("the file is gone", "")
    expected = FileNotFoundError if grid.rank == 3 else FailedElsewhereError
    with pytest.raises(expected, match=r"rank-00003.safetensors is missing"):
        load_weights(model, folder)
    return same(weights_of(model), grid)


def test_a_file_that_one_rank_misses_changes_no_rank(ranks, tmp_path: Path) -> None:
    assert ranks(4).run(failing_load, tmp_path / "w") == [True] * 4


def index_with(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text())
        change(index)
        (folder / "index.json").write_text(json.dumps(index))

    return damage


def cut_short(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def parts(index: dict[str, Any]) -> list[dict[str, Any]]:
    return index["tensors"]["norm.weight"]["parts"]


def misspell(index: dict[str, Any]) -> None:
    index["tensors"]["norm.wieght"] = index["tensors"].pop("norm.weight")


FAULTS: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "no index": (lambda folder: (folder / "index.json").unlink(), FileNotFoundError, "index.json is missing"),
    "not json": (lambda folder: (folder / "index.json").write_text("{"), ValueError, "is no index"),
    "other json": (lambda folder: (folder / "index.json").write_text("[]"), ValueError, "is no index"),
    "version": (index_with(lambda index: index.update(version=2)), ValueError, r"version 2, and this .* version 1"),
    "spelling": (index_with(misspell), ValueError, r"lacks 'norm.weight' \(nearest: 'norm.wieght'\); it also holds"),
    "shape": (
        index_with(lambda index: index["tensors"]["norm.weight"].update(shape=[49])),
        ValueError,
        r"shape \(49,\) in .* and \(48,\) here",
    ),
    "gap": (index_with(lambda index: parts(index)[0].update(box=[[1, 48]])), ValueError, "do not tile"),
    "no part": (index_with(lambda index: parts(index).clear()), ValueError, "hold 0 elements and do not tile"),
    "twice": (index_with(lambda index: parts(index).append(parts(index)[0])), ValueError, "do not tile"),
    "outside": (index_with(lambda index: parts(index)[0].update(box=[[0, 49]])), ValueError, "do not tile"),
    "dims": (index_with(lambda index: parts(index)[0].update(box=[[0, 48]] * 2)), ValueError, "a box of 2 dims"),
    "no box": (index_with(lambda index: parts(index)[0].pop("box")), ValueError, "is damaged"),
    "file elsewhere": (index_with(lambda index: parts(index)[0].update(file="../a")), ValueError, "not the name"),
    "key": (index_with(lambda index: parts(index)[0].update(key="a")), ValueError, "holds nothing for 'a'"),
    "wrong part": (
        index_with(lambda index: parts(index)[0].update(key="embedding.weight")),
        ValueError,
        r"holds \(53, 48\) for 'embedding.weight', but index.json says \(48,\)",
    ),
    "no file": (lambda folder: (folder / "rank-00000.safetensors").unlink(), FileNotFoundError, "index.json names it"),
    "cut short": (cut_short, ValueError, "rank-00000.safetensors is damaged"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy from."""
    folder = tmp_path_factory.mktemp("saved") / "w"
    save_weights(build(alone()), folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_is_refused_before_anything_changes(fault: str, saved: Path, tmp_path: Path) -> None:
    damage, kind, message = FAULTS[fault]
    shutil.copytree(saved, tmp_path / "w")
    damage(tmp_path / "w")
    model = scrambled(alone())
    with pytest.raises(kind, match=message):
        load_weights(model, tmp_path / "w")
    assert same(weights_of(model), alone())


# The folder


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    model = build(alone())
    (tmp_path / "notes.txt").write_text("mine")
    for target, message in ((tmp_path, "also holds 'notes.txt'"), (tmp_path / "notes.txt", "is a file")):
        with pytest.raises(FileExistsError, match=message):
            save_weights(model, target)
    assert entries(tmp_path) == ["notes.txt"]


def test_a_save_clears_what_a_save_that_died_has_left(tmp_path: Path) -> None:
    model = scrambled(alone())
    save_weights(model, tmp_path / "w")
    (tmp_path / "w").rename(tmp_path / ".w.replaced")  # died between the two renames
    (tmp_path / ".w.partial").mkdir()
    (tmp_path / ".w.partial" / "rank-00007.safetensors").write_text("half")
    with pytest.raises(FileNotFoundError, match=r"the former one is .*\.w\.replaced"):
        load_weights(model, tmp_path / "w")
    save_weights(model, tmp_path / "w")
    assert entries(tmp_path) == ["w"]
    assert entries(tmp_path / "w") == ["index.json", "rank-00000.safetensors"]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_place(tmp_path: Path, monkeypatch) -> None:
    save_weights(scrambled(alone()), tmp_path / "w")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name.endswith(".partial"):
            raise PermissionError("not this one")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(PermissionError, match="not this one"):
        save_weights(build(alone()), tmp_path / "w")
    assert entries(tmp_path) == ["w"]
    model = build(alone())
    load_weights(model, tmp_path / "w")
    assert same(weights_of(model), alone())


# What cannot be saved


def test_what_is_not_on_the_grid_is_refused(tmp_path: Path, monkeypatch) -> None:
    model = build(alone())
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="'scale' of Transformer are not on the grid"):
        save_weights(model, tmp_path / "w")
    with pytest.raises(ValueError, match="meta device"):
        save_weights(ff.models.build(CONFIG, alone(), device="meta"), tmp_path / "w")
    tensors = {"a": (torch.zeros(3), Spec((4,), Storage(()), PRODUCT))}
    with pytest.raises(ValueError, match=r"holds \(3,\), but its part of \(4,\) is \(4,\)"):
        write_tensors(tensors, alone(), tmp_path / "w")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'fourfold\[train\]'"):
        save_weights(build(alone()), tmp_path / "w")
    assert entries(tmp_path) == []


# Last, since it ends the ranks that the tests above share


def test_what_one_grid_saves_every_other_loads(ranks, tmp_path: Path) -> None:
    assert max(ranks(4).run(save, tmp_path / "w", Shape(x=2, z=2))) <= 0  # nothing was gathered
    for shape in (Shape(y=2, z=2), Shape(x=4), Shape(x=2, z=2, order=("z", "x", "y", "data"))):
        assert ranks(4).run(load, tmp_path / "w", shape, torch.float64) == [True] * 4
    ranks(4).run(save, tmp_path / "reordered", Shape(y=2, z=2, order=("z", "data", "y", "x")))
    assert ranks(2).run(load, tmp_path / "w", Shape(data=2), torch.float32) == [True] * 2
    for folder in (tmp_path / "w", tmp_path / "reordered"):
        model = build(alone())
        load_weights(model, folder)
        assert same(weights_of(model), alone())
    save_weights(model, tmp_path / "alone")
    assert entries(tmp_path / "alone") == ["index.json", "rank-00000.safetensors"]
    assert ranks(2).run(load, tmp_path / "alone", Shape(y=2), torch.bfloat16) == [True] * 2

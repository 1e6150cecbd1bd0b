"""Fourfold's own checkpoints of parallelised modules: saved on one grid, loaded on another, buffers and parts too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import families
import fourfold as ff
from fourfold.grid import Shape
from fourfold.params import local_of
from harness import grid_of
from plain_images import ResNet
from share import others_slow


def build(name: str) -> nn.Module:
    """Of transformers, or a network whose statistics are buffers."""
    if name != "resnet":
        return families.build(name)
    torch.manual_seed(0)
    model = ResNet().double()
    for buffer in model.buffers():
        buffer.copy_(torch.rand(buffer.shape) * 9)
    return model


def saved(name: str, shape: Shape, folder: Path) -> None:
    ff.save(folder, ff.parallelize(build(name), grid_of(shape)))


def loaded(name: str, shape: Shape, folder: Path) -> dict[str, Tensor]:
    model = ff.parallelize(build(name), grid_of(shape))
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (local_of(tensor) if isinstance(tensor, DTensor) else tensor).zero_()
    ff.load(folder, model)
    state = model.state_dict()
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).numpy() for name, value in state.items()
    }


@pytest.mark.parametrize("name", others_slow(["gpt2", "resnet"], 2))
def test_a_parallelised_module_is_saved_on_one_grid_and_loaded_on_another(ranks, name: str, tmp_path: Path) -> None:
    pool = ranks(4)
    pool.run(saved, name, Shape(x=2, z=2), tmp_path / "weights", timeout=120)
    plain = build(name).state_dict()
    for found in pool.run(loaded, name, Shape(y=2, data=2), tmp_path / "weights", timeout=120):
        assert found.keys() == plain.keys()
        for key, value in plain.items():
            assert torch.equal(torch.as_tensor(found[key]), value), key

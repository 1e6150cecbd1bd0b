"""Copies and averages of parallelised models: each computes and trains by itself, as copies on one process do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.params import local_of
from fourfold.wrap import whole_tensors
from harness import grid_of
from share import share
from strange import NanoGPT, tokens

TOLERANCE = 1e-9


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return NanoGPT().double()


def batch(grid: Grid | None) -> list[Tensor]:
    whole = tokens(4, torch.Generator().manual_seed(0))
    return [part if grid is None else ff.local_rows(part, grid) for part in whole]


def step(model: nn.Module, grid: Grid | None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*batch(grid))[1].backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: nn.Module, grid: Grid | None) -> dict[str, Tensor]:
    values = dict(model.named_parameters()) if grid is None else whole_tensors(model)
    return {name: value.detach().clone() for name, value in values.items()}


AVERAGES: dict[str, Callable[[nn.Module], AveragedModel]] = {
    "mean": AveragedModel,
    "ema": lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
}


def copy_and_average(grid: Grid | None) -> dict[str, dict[str, Tensor]]:
    """Parameters, and losses, of a model and its copies as they are trained by turns."""
    model, found = gpt(), {}
    if grid is not None:
        model = ff.parallelize(model, grid)
    step(model, grid)
    model(*batch(grid))[1].backward()  # a copy takes gradients along
    other = copy.deepcopy(model)
    step(other, grid)
    model.zero_grad()
    found["model beside its copy"] = state(model, grid)
    step(model, grid)
    found["model"] = state(model, grid)
    found["copy"] = state(other, grid)
    for name, make in AVERAGES.items():
        average = make(model)
        for _ in range(3):
            step(model, grid)
            average.update_parameters(model)
        found[name] = state(average.module, grid) | {"loss": average.eval()(*batch(grid))[1].detach()}
        step(average.train(), grid)
        found[f"{name}, trained on"] = state(average.module, grid)
    found["model at the end"] = state(model, grid)
    return found


def compare_copies(shape: Shape) -> dict[str, float]:
    one, two = copy_and_average(None), copy_and_average(grid_of(shape))
    errors = {
        f"{what}: {name}": (two[what][name] - value).abs().max().item()
        for what, values in one.items()
        for name, value in values.items()
    }
    return {name: error for name, error in errors.items() if not error <= TOLERANCE}


@pytest.mark.slow
@pytest.mark.parametrize("shape", share([Shape(x=2, z=2), Shape(y=2, data=2)], 2), ids=str)
def test_copies_and_averages_of_a_model_are_those_of_one_process(ranks, shape: Shape) -> None:
    assert ranks(shape.world).run(compare_copies, shape) == [{}] * shape.world


def share_nothing(shape: Shape) -> list[str]:
    """What a copy and its original have in common, apart from the grid."""
    grid = grid_of(shape)
    model = ff.parallelize(gpt(), grid)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            local_of(parameter).zero_()
    shared = [name for name, p in model.named_parameters() if p.dim() > 1 and not local_of(p).any()]
    for name in ("gradients", "clock"):
        shared += [name] if getattr(model, name) is getattr(other, name) else []
    with ff.accumulate(other):
        shared += ["accumulating"] if model.gradients.accumulating else []
    with other.no_sync():
        shared += ["no_sync"] if model.gradients.accumulating or not other.gradients.accumulating else []
    return shared


def test_a_copy_shares_nothing_with_its_original_but_the_grid(ranks) -> None:
    assert ranks(2).run(share_nothing, Shape(x=2)) == [[]] * 2


def copy_inside(shape: Shape) -> dict[str, Any]:
    """A block that is the copy of another one: parallelised again, it trains as on one process."""
    found: list[dict[str, Tensor]] = []
    for grid in (None, grid_of(shape)):
        model = gpt() if grid is None else ff.parallelize(gpt(), grid)
        model.transformer["h"].append(copy.deepcopy(model.transformer["h"][0]))
        if grid is not None:
            model = ff.parallelize(model, grid)
        for _ in range(2):
            step(model, grid)
        found.append(state(model, grid))
    one, two = found
    errors = {name: (two[name] - value).abs().max().item() for name, value in one.items()}
    return {name: error for name, error in errors.items() if not error <= TOLERANCE}


def test_a_copied_block_joins_the_model_when_it_is_parallelised_again(ranks) -> None:
    assert ranks(2).run(copy_inside, Shape(x=2)) == [{}] * 2

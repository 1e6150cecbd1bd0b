"""Layouts of operations on parameters are derived quickly, and are those that torch derives by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._ops import utils

import fourfold as ff
from fourfold import torch_hooks
from fourfold.grid import Grid, Shape
from fourfold.layout import EXPAND_WEIGHT, RESIDUAL_VECTOR, WHOLE, Layout, Spec
from fourfold.nn.layer import shard_parameter
from fourfold.params import local_of
from fourfold.wrap import whole_tensors
from harness import grid_of
from strange import NanoGPT, tokens

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda a, b: a.add_(b, alpha=0.5),
    "mul_": lambda a, _: a.mul_(0.9),
    "clone": lambda a, _: torch.clone(a),
    "addcdiv_": lambda a, b: a.addcdiv_(b, b, value=-0.1),
    "norm": lambda a, _: torch.linalg.vector_norm(a),
    "lerp": lambda a, b: torch.lerp(a, b, 0.1),
    "foreach": lambda a, b: torch._foreach_lerp([a], [b], 0.1)[0],
}


def try_operations(storage: Layout, other: Layout, names: list[str]) -> list[Any]:
    """How the results lie, and their numbers, on a mesh for which torch has derived nothing yet."""
    grid = Grid.alone("cpu")
    shape = (4, 4) if storage == EXPAND_WEIGHT else (4,)

    def laid(storage: Layout, first: float) -> Tensor:
        numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + first
        return shard_parameter(numbers, Spec(shape, storage, Layout()), grid).detach()

    found: list[Any] = []
    for name in names:
        result = OPERATIONS[name](laid(storage, 1), laid(other, 2))
        found.append((name, result.placements, local_of(result).tolist()))
    return found


@pytest.mark.parametrize(
    ("storage", "other", "names"),
    [
        (RESIDUAL_VECTOR, RESIDUAL_VECTOR, list(OPERATIONS)),
        (RESIDUAL_VECTOR, WHOLE, ["add_"]),
        (EXPAND_WEIGHT, EXPAND_WEIGHT, ["lerp"]),
    ],
    ids=["alike", "laid differently", "of two dims"],
)
def test_layouts_are_those_that_torch_derives(monkeypatch, storage: Layout, other: Layout, names: list[str]) -> None:
    quick = try_operations(storage, other, names)
    quickly = getattr(utils, torch_hooks.NAME)
    monkeypatch.setattr(utils, torch_hooks.NAME, quickly.__wrapped__)
    assert quick == try_operations(storage, other, names)


def test_few_combinations_are_built(monkeypatch) -> None:
    torch_hooks.speed_up_strategies()
    torchs, built = getattr(utils, torch_hooks.NAME).__wrapped__, []

    def counting(mesh: Any, op_schema: Any, strategies: Any, **options: Any) -> Any:
        built.append(len(strategies) ** mesh.ndim)
        return torchs(mesh, op_schema, strategies, **options)

    monkeypatch.setattr(utils, torch_hooks.NAME, torch_hooks._own_placements_first(counting))
    try_operations(EXPAND_WEIGHT, EXPAND_WEIGHT, ["add_", "mul_", "addcdiv_", "foreach"])
    assert max(built) <= 3**4, built  # each dim of the mesh does what one of its three layouts says


def test_meshes_of_others_are_left_to_torch(monkeypatch) -> None:
    grid = Grid.alone("cpu")
    given: list[Any] = []
    quick = torch_hooks._own_placements_first(lambda *args: given.append(args[2]))
    spec = shard_parameter(torch.zeros(4), Spec((4,), RESIDUAL_VECTOR, Layout()), grid)._spec
    schema = OneOperand(spec)
    everything = [[Shard(0), Shard(0)], [Replicate(), Replicate()]]
    monkeypatch.delattr(grid.mesh, torch_hooks.GRID)
    quick(grid.mesh, schema, everything)
    assert given == [everything]


class OneOperand:
    """What torch hands over for an operation on one tensor."""

    def __init__(self, spec: Any) -> None:
        self.args_strategy, self.kwargs_strategy = [self], []
        self.strategies, self.output_spec = [self], spec


def step_and_clip(shape: Shape) -> dict[str, float]:
    """The largest differences from one process after steps of SGD with momentum, and torch's own clipping."""
    grid, found = grid_of(shape), {}
    ids, targets = tokens(4, torch.Generator().manual_seed(0))
    trained = {}
    for on_grid in (False, True):
        torch.manual_seed(0)
        model = NanoGPT().double()
        model = ff.parallelize(model, grid) if on_grid else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        for _ in range(2):
            rows = (ff.local_rows(part, grid) if on_grid else part for part in (ids, targets))
            model(*rows)[1].backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        parameters = whole_tensors(model) if on_grid else dict(model.named_parameters())
        trained[on_grid] = {"norm": norm.full_tensor() if on_grid else norm, **parameters}
    for name, value in trained[False].items():
        found[name] = (trained[True][name] - value).abs().max().item()
    return {name: error for name, error in found.items() if not error <= 1e-9}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape(x=2, z=2)], ids=str)
def test_sgd_with_momentum_and_torchs_clipping_take_the_parameters(ranks, shape: Shape) -> None:
    """Within the pool's time limit: torch's own derivation took minutes."""
    assert ranks(shape.world).run(step_and_clip, shape) == [{}] * shape.world

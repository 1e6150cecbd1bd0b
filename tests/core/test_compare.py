"""compare_serial: nothing but rounding between a grid and one process, and a planted bug is seen and named."""

from __future__ import annotations

import pytest
import torch

import fourfold as ff
from fourfold.grid import Grid, Shape
from harness import RankFailed, grid_of


def build(grid: Grid) -> torch.nn.Module:
    return ff.models.build(ff.models.config("gpt-tiny", layers=1, bias=False), grid, dtype=torch.float64)


def build_with_bug(grid: Grid) -> torch.nn.Module:
    """On a real grid the last norm's weight starts a little off."""
    model = build(grid)
    if grid.shape.world > 1:
        model.norm.weight.data._local_tensor.add_(1e-3)
    return model


def compare(builder) -> tuple[str, str, float, int]:
    batches = [(torch.arange(32).view(2, 16) + step, torch.arange(32).view(2, 16)) for step in range(2)]
    grid = grid_of(Shape(z=2))
    found = ff.compare_serial(builder, batches, grid, max_norm=1.0)
    return str(found), f"{found.worst.kind} {found.worst.name}", found.worst.relative, len(found.differences)


def test_grid_and_one_process_differ_by_rounding(ranks) -> None:
    first, second = ranks(2).run(compare, build)
    assert first == second  # every rank knows the result
    text, _, worst, count = first
    assert 0 < worst < 1e-10
    tensors = len(list(build(Grid.alone()).parameters()))
    assert count == 2 * (2 + 2 * tensors)  # two steps: loss, norm, each gradient, each parameter
    assert "gradient norm.weight" in text
    assert "parameter embedding.weight" in text


def test_a_planted_bug_is_named(ranks) -> None:
    text, _, worst, _ = ranks(2).run(compare, build_with_bug)[0]
    assert worst > 1e-4
    by_parameter = [line for line in text.splitlines() if " parameter " in line]
    assert by_parameter[0].endswith("parameter norm.weight")


def build_failing_alone(grid: Grid) -> torch.nn.Module:
    if grid.shape.world == 1:
        raise MemoryError("no room for the whole model")
    return build(grid)


def build_not_finite(grid: Grid) -> torch.nn.Module:
    model = build(grid)
    if grid.shape.world > 1:
        model.norm.weight.data._local_tensor[0] = float("nan")
    return model


def test_a_serial_model_that_fails_is_heard_of_on_every_rank(ranks) -> None:
    with pytest.raises(RankFailed) as failed:
        ranks(2).run(compare, build_failing_alone, timeout=40)
    assert isinstance(failed.value.errors[0], MemoryError)
    assert "failed on rank 0" in str(failed.value.errors[1])


def test_what_is_not_finite_is_the_worst(ranks) -> None:
    _, _, worst, _ = ranks(2).run(compare, build_not_finite)[0]
    assert worst == float("inf")

"""Faults seen in public implementations of the 4D algorithm, each with a test that would catch it."""

from __future__ import annotations

import inspect
import tempfile
from collections import Counter

import pytest
import torch
from torch.distributed import checkpoint

import fourfold as ff
from fourfold.grid import Shape
from fourfold.nn.layer import specs_of
from fourfold.params import local_of
from fourfold.policy import Policy
from harness import grid_of, join_shards
from parity import rotating_cases
from share import others_slow


def biases(mode: str) -> dict[str, torch.Tensor]:
    grid = grid_of(Shape(y=2, z=2))
    model = ff.models.build("gpt-tiny", grid, policy=Policy(activations=mode), dtype=torch.float64)
    tokens = ff.local_rows(torch.arange(32).view(4, 8), grid)
    model(tokens, tokens).backward()
    specs = specs_of(model)
    return {
        name: join_shards(local_of(parameter.grad), specs[name], grid)
        for name, parameter in model.named_parameters()
        if name.endswith("bias")
    }


@pytest.mark.parametrize("mode", others_slow(["sharded", "replicated"], 2))
def test_bias_gradients_are_right_when_z_cuts_the_tokens(ranks, mode: str) -> None:
    found = ranks(4).run(biases, mode)
    alone = ranks(1).run(biases_alone)[0]
    for gradients in found:
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[name], rtol=1e-10, atol=1e-12)
            if not name.endswith("k.bias"):  # a key bias shifts all scores alike: its true gradient is 0
                assert gradient.abs().max() > 1e-6


def biases_alone() -> dict[str, torch.Tensor]:
    model = ff.models.build("gpt-tiny", grid_of(Shape()), dtype=torch.float64)
    tokens = torch.arange(32).view(4, 8)
    model(tokens, tokens).backward()
    return {name: local_of(p.grad) for name, p in model.named_parameters() if name.endswith("bias")}


def test_parity_covers_several_axes_at_once_in_each_mode() -> None:
    """Norm statistics of cut features, heads counted in the mode that runs, axes that interact: all of them
    are compared with one process on grids that cut with two and three axes at once."""
    for mode in ("sharded", "replicated"):
        cases = [case for case in rotating_cases() if case.activations == mode]
        axes = Counter(sum(size > 1 for size in case.shape.sizes.values()) for case in cases)
        assert axes[2] >= 20
        assert axes[3] >= 4
        assert any(case.options.few_kv_heads and case.shape.x * case.shape.y > 3 for case in cases)


def test_no_function_swallows_misspelt_options() -> None:
    for function in (ff.Grid, ff.models.build, ff.Policy, ff.compare_serial, ff.clip_grad_norm_, ff.local_rows):
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds, function
    with pytest.raises(TypeError, match=r"a grid has the axes x, y, z, data, pipe, each given once; got .*'xx': 2"):
        Shape(xx=2)
    with pytest.raises(TypeError, match="activation"):
        ff.Policy(activation="sharded")
    with pytest.raises(ValueError, match=r"'head' \(did you mean 'heads'\?\)"):
        ff.models.config("gpt-tiny", head=4)


def rows() -> list[int]:
    grid = grid_of(Shape(x=2, z=2, data=2))
    return ff.local_rows(torch.arange(8), grid).tolist()


def test_every_sample_is_read_by_one_place_and_the_same_on_its_ranks(ranks) -> None:
    """Ranks on x and y share a place and its rows; places on z and data concatenate to the batch."""
    found = ranks(8).run(rows)
    assert [found[rank] for rank in (0, 2, 4, 6)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [found[rank] for rank in (1, 3, 5, 7)] == [found[rank] for rank in (0, 2, 4, 6)]


def save(folder: str, shape: Shape, seed: int) -> None:
    model = ff.models.build(ff.models.config("gpt-tiny", vocab=53, layers=1), grid_of(shape), seed=seed)
    checkpoint.save(model.state_dict(), checkpoint_id=folder)


def load(folder: str, shape: Shape, seed: int) -> bool:
    grid = grid_of(shape)
    config = ff.models.config("gpt-tiny", vocab=53, layers=1)
    model, expected = (ff.models.build(config, grid, seed=s) for s in (seed + 1, seed))
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=folder)
    model.load_state_dict(state)
    return all(
        torch.equal(local_of(a), local_of(b)) for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    )


@pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*")
def test_a_state_dict_saved_on_one_grid_loads_on_another(ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(2).run(save, folder, Shape(z=2), 6)
        assert ranks(2).run(load, folder, Shape(x=2), 6) == [True] * 2

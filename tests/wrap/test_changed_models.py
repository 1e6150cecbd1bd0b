"""Modules replaced in a parallelised model are refused by name, and exact once it is parallelised again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import fourfold as ff
from fourfold.grid import Shape
from fourfold.wrap import whole_tensors
from harness import grid_of
from share import share
from strange import NanoGPT, tokens

TOLERANCE = 1e-9


class Separate(nn.Module):
    """Attention whose q, k and v are read together on the grid."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


def gpt() -> nn.Module:
    torch.manual_seed(0)
    model = NanoGPT().double()
    torch.manual_seed(1)
    for block in model.transformer["h"]:
        block.attn = Separate().double()
    return model


def replace_head(model: nn.Module) -> None:
    model.lm_head = nn.Linear(24, 53).double()


def replace_inside(model: nn.Module) -> None:
    model.transformer["h"][0].mlp["c_fc"] = nn.Linear(24, 96).double()


def replace_block(model: nn.Module) -> None:
    model.transformer["h"][1] = gpt().transformer["h"][0]


def replace_keys(model: nn.Module) -> None:
    model.transformer["h"][1].attn.k_proj = nn.Linear(24, 24).double()


def add_parameter(model: nn.Module) -> None:
    model.transformer["ln_f"].weight_of_nothing = nn.Parameter(torch.zeros(3))


CHANGES: dict[Callable[[nn.Module], None], str] = {
    replace_head: "lm_head (Linear)",
    replace_inside: "transformer.h.0.mlp.c_fc (Linear)",
    replace_block: "transformer.h.1 (Block)",
    replace_keys: "transformer.h.1.attn.k_proj (Linear)",
    add_parameter: "transformer.ln_f.weight_of_nothing (Parameter)",
}


def replace_and_parallelize_again(shape: Shape) -> dict[str, str | float]:
    """What is wrong, by change: nothing was refused, or the gradients differ from one process's."""
    grid, wrong = grid_of(shape), {}
    ids, targets = tokens(4, torch.Generator().manual_seed(0))
    rows = [ff.local_rows(part, grid) for part in (ids, targets)]
    for change, named in CHANGES.items():
        plain, model = gpt(), ff.parallelize(gpt(), grid)
        model(*rows)[1].backward()
        model.zero_grad()
        for each in (plain, model):
            torch.manual_seed(2)
            change(each)
        refused = ""
        try:
            model(*rows)
        except RuntimeError as error:
            refused = str(error)
        if not refused.startswith(f"{named} was put into the model after"):
            wrong[f"{change.__name__}, refusal"] = refused
        if change is not add_parameter:
            wrong |= {f"{change.__name__}, {name}": error for name, error in _errors(plain, model, grid, rows).items()}
    return wrong


def _errors(plain: nn.Module, model: nn.Module, grid: ff.Grid, rows: list[torch.Tensor]) -> dict[str, float]:
    plain(*tokens(4, torch.Generator().manual_seed(0)))[1].backward()
    ff.parallelize(model, grid)(*rows)[1].backward()
    found = whole_tensors(model, "gradient")
    errors = {name: (found[name] - p.grad).abs().max().item() for name, p in plain.named_parameters()}
    return {name: error for name, error in errors.items() if not error <= TOLERANCE}


@pytest.mark.slow
@pytest.mark.parametrize("shape", share([Shape(x=2), Shape(z=2), Shape(x=2, z=2)], 3), ids=str)
def test_module_that_was_replaced_is_refused_until_the_model_is_parallelised_again(ranks, shape: Shape) -> None:
    assert ranks(shape.world).run(replace_and_parallelize_again, shape) == [{}] * shape.world


def replace_harmlessly(shape: Shape) -> float:
    """Modules without parameters, and modules of the same model, may take another place."""
    grid, plain = grid_of(shape), gpt()
    model = ff.parallelize(gpt(), grid)
    ids, targets = tokens(4, torch.Generator().manual_seed(0))
    for each in (plain, model):
        each.transformer["drop"] = nn.Identity()
        each.transformer["h"] = each.transformer["h"][1:]
    found = model(ff.local_rows(ids, grid), ff.local_rows(targets, grid))[1]
    return (found - plain(ids, targets)[1]).abs().item()


def test_modules_without_parameters_may_be_replaced_and_blocks_left_out(ranks) -> None:
    assert max(ranks(2).run(replace_harmlessly, Shape(x=2))) <= TOLERANCE


def test_a_conversion_that_changes_nothing_leaves_a_parallelised_model_as_it_is() -> None:
    model = ff.parallelize(gpt(), ff.Grid.alone("cpu"))
    before = list(model.parameters())
    model.to("cpu").double().to("cpu", torch.float64)
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    _, loss = model(*tokens(2, torch.Generator()))
    loss.backward()
    assert model.to("cpu").lm_head.weight.grad is not None

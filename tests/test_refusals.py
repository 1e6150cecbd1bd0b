"""What torch offers and a parallelised model cannot do is refused in one line, and the way out that it names works."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.layout import Policy
from harness import grid_of
from strange import NanoGPT, tokens


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return NanoGPT()


def rows(grid: Grid) -> list[Tensor]:
    return [ff.local_rows(part, grid) for part in tokens(4, torch.Generator().manual_seed(0))]


def under_autocast(grid: Grid, **options: Any) -> None:
    model = ff.parallelize(gpt(), grid, policy=Policy(**options))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(*rows(grid))[1]
    loss.backward()


def compile_around(grid: Grid) -> None:
    torch.compile(ff.parallelize(gpt(), grid))(*rows(grid))


def compile_itself(grid: Grid) -> None:
    model = ff.parallelize(gpt(), grid)
    model.compile()
    model(*rows(grid))


def compile_before(grid: Grid) -> None:
    ff.parallelize(torch.compile(gpt()), grid)


def compile_block(grid: Grid) -> None:
    model = gpt()
    model.transformer["h"][1].compile()
    ff.parallelize(model, grid)


COMPILED = r"is compiled by torch.compile.*policy=ff.Policy\(compile=True\)"
REFUSED: dict[str, tuple[str, Callable[[Grid], object]]] = {
    "autocast": (r"torch.autocast to torch.bfloat16 is on.*Policy\(compute=torch.bfloat16\)\)", under_autocast),
    "compiled around": (f"the model {COMPILED}", compile_around),
    "compiled itself": (f"the model {COMPILED}", compile_itself),
    "compiled before": (f"the model {COMPILED}", compile_before),
    "compiled block": (f"transformer.h.1 {COMPILED}", compile_block),
}
"""What is said, and what is done."""
ALLOWED: dict[str, Callable[[Grid], object]] = {
    "autocast as the policy": lambda grid: under_autocast(grid, compute=torch.bfloat16),
}


def refuse(shape: Shape) -> dict[str, str]:
    """What was said on each occasion, and what failed of that which should not."""
    grid, said = grid_of(shape), {}
    for name, (_, act) in REFUSED.items():
        try:
            act(grid)
            said[name] = "nothing was refused"
        except Exception as error:
            said[name] = str(error)
    for act in ALLOWED.values():
        act(grid)
    return said


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on a CPU without bf16
def test_what_cannot_work_is_refused_in_one_line_with_a_way_out(ranks) -> None:
    for said in ranks(2).run(refuse, Shape(x=2)):
        for name, text in said.items():
            assert re.search(REFUSED[name][0], text) and "\n" not in text, f"{name}: {text}"


def feed(shape: Shape, cut: bool) -> list[str]:
    """The warnings of two training passes, after one without gradients, with the batch cut over places or not."""
    grid = grid_of(shape)
    model, batch = ff.parallelize(gpt(), grid), tokens(4, torch.Generator().manual_seed(0))
    given = rows(grid) if cut else batch
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad():
            model(*given)
        for _ in range(2):
            model(*given)[1].backward()
    return [str(warning.message) for warning in caught]


def test_a_batch_that_was_not_cut_is_warned_of_once(ranks) -> None:
    first, *others = ranks(2).run(feed, Shape(z=2), False)
    assert len(first) == 1 and "the same rows" in first[0] and "ff.local_rows(batch, grid)" in first[0], first
    assert others == [[]]
    assert ranks(2).run(feed, Shape(z=2), True) == [[]] * 2
    assert ranks(2).run(feed, Shape(x=2), True) == [[]] * 2  # one place

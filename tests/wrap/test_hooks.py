"""Hooks on parameters, `backward(inputs=...)` and `torch.autograd.grad` on a parallelised model, beside one process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.wrap import whole_tensors
from harness import grid_of
from share import share
from strange import NanoGPT, tokens

TOLERANCE = 1e-9
SHAPES = [Shape(y=2, data=2), Shape(x=2), Shape(x=2, z=2)]


class Setting:
    """A small GPT, on the grid or on one process, and its batch."""

    def __init__(self, grid: Grid | None) -> None:
        torch.manual_seed(0)
        self.grid, model = grid, NanoGPT().double()
        self.model = model if grid is None else ff.parallelize(model, grid)
        self.parameters = dict(self.model.named_parameters())
        self.head, self.norm = self.model.lm_head.weight, self.model.transformer["ln_f"].weight
        self.seen: list[str] = []

    def loss(self, seed: int = 0) -> Tensor:
        whole = tokens(4, torch.Generator().manual_seed(seed))
        rows = whole if self.grid is None else [ff.local_rows(part, self.grid) for part in whole]
        return self.model(*rows)[1]

    def gradients(self) -> dict[str, Tensor]:
        if self.grid is not None:
            return whole_tensors(self.model, "gradient")
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in self.parameters.items()}

    def whole(self) -> dict[str, Tensor]:
        return whole_tensors(self.model) if self.grid is not None else self.parameters


def full(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def replace_gradients(setting: Setting) -> dict[str, Tensor]:
    """Hooks that scale and clamp, one that only looks, and one that was removed; over two passes that add up."""
    setting.head.register_hook(lambda gradient: 3 * gradient)
    setting.head.register_hook(lambda gradient: gradient.clamp(max=0.01))
    setting.norm.register_hook(lambda gradient: setting.seen.append(f"{full(gradient).sum().item():.9f}"))
    setting.norm.register_hook(lambda _: setting.seen.append("removed")).remove()
    setting.loss().backward()
    setting.norm.register_hook(lambda gradient: gradient + 1)
    setting.loss(1).backward()
    return setting.gradients()


def look_after(setting: Setting) -> dict[str, Tensor]:
    """Hooks that run once the gradient is there: a plain optimizer step for each parameter."""
    for name, parameter in setting.parameters.items():
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(p: nn.Parameter, name: str = name, optimizer: Any = optimizer) -> None:
            setting.seen.append(name)
            optimizer.step()
            p.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        setting.loss(seed).backward()
    # c_attn.weight is stored as c_attn.weight_0 and so on; autograd's own order is that of its graph
    setting.seen = sorted({re.sub(r"_\d$", "", name) for name in setting.seen})
    return setting.whole()


def name_inputs(setting: Setting) -> dict[str, Tensor]:
    """Of some parameters only, then of all that are left."""
    setting.loss().backward(inputs=[setting.norm, setting.parameters["transformer.h.0.ln_1.bias"]])
    setting.seen += [name for name, p in setting.parameters.items() if p.grad is not None]
    setting.loss(1).backward(inputs=[p for p in setting.parameters.values() if p is not setting.norm])
    return setting.gradients()


def accumulate(setting: Setting) -> dict[str, Tensor]:
    """Micro-steps: on a grid hooks see their sum, so one process gives it all at once."""
    setting.head.register_hook(lambda gradient: gradient.clamp(max=0.01))
    if setting.grid is None:
        (setting.loss() + setting.loss(1)).backward()
    else:
        with ff.accumulate(setting.model):
            setting.loss().backward()
        setting.loss(1).backward()
    return setting.gradients()


USES: list[Callable[[Setting], dict[str, Tensor]]] = [replace_gradients, look_after, name_inputs, accumulate]


def compare(shape: Shape) -> dict[str, Any]:
    wrong: dict[str, Any] = {}
    for use in USES:
        one, two = Setting(None), Setting(grid_of(shape))
        expected, found = use(one), use(two)
        errors = {name: (found[name] - value).abs().max().item() for name, value in expected.items()}
        wrong |= {f"{use.__name__}: {name}": error for name, error in errors.items() if not error <= TOLERANCE}
        if one.seen != two.seen:
            wrong[f"{use.__name__}: seen"] = one.seen, two.seen
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("shape", share(SHAPES, 3), ids=str)
def test_hooks_and_inputs_do_what_they_do_on_one_process(ranks, shape: Shape) -> None:
    assert ranks(shape.world).run(compare, shape) == [{}] * shape.world


class Stack(nn.Sequential):
    """Takes numbers, so that there is a gradient of what goes in."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def differentiate(shape: Shape) -> dict[str, Any]:
    """autograd.grad: of inputs it leaves parameters alone; of parameters it is refused, with a way out that works."""
    grid, found = grid_of(shape), {}
    torch.manual_seed(0)
    model = ff.parallelize(Stack().double(), grid)
    rows = ff.local_rows(torch.randn(4, 6, dtype=torch.float64), grid).clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(rows).square().sum(), rows)
    model(rows).square().sum().backward()
    found["of inputs"] = (gradient - rows.grad).abs().max().item()
    model.zero_grad()
    torch.autograd.grad(model(rows).sum(), rows)
    found["parameters with a gradient"] = [name for name, p in model.named_parameters() if p.grad is not None]
    parameters = list(model.parameters())
    try:
        torch.autograd.grad(model(rows).sum(), parameters)
    except RuntimeError as error:
        found["refusal"] = str(error)
    model(rows).sum().backward(inputs=parameters)
    found["parameters without one"] = [name for name, p in model.named_parameters() if p.grad is None]
    return found


def test_autograd_grad_leaves_parameters_alone_or_says_what_to_call(ranks) -> None:
    for found in ranks(2).run(differentiate, Shape(x=2)):
        assert found["of inputs"] <= TOLERANCE
        assert found["parameters with a gradient"] == found["parameters without one"] == []
        assert "call loss.backward(inputs=parameters) and read parameter.grad" in found["refusal"]


def return_something_else(shape: Shape) -> str:
    setting = Setting(grid_of(shape))
    setting.norm.register_hook(lambda gradient: torch.zeros(len(gradient) + 1))
    try:
        setting.loss().backward()
    except TypeError as error:
        return str(error)
    return "nothing was refused"


def test_a_hook_that_returns_another_shape_is_refused_by_name(ranks) -> None:
    for error in ranks(2).run(return_something_else, Shape(x=2)):
        assert error.startswith("a hook on transformer.ln_f.weight returned Tensor of shape (25,)")

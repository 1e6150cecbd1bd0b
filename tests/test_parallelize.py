"""Modules that nobody foresaw train on every grid as they do on one process, or say why they cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Grid, Shape
from fourfold.layout import Policy
from fourfold.parallelize import whole_tensors
from harness import grid_of
from parity import LocalAdamW
from strange import STRANGE, Strange

TOLERANCE = 1e-9


def loss_of(strange: Strange, model: nn.Module, inputs: tuple[Tensor, ...], grid: Grid | None) -> tuple[Tensor, Tensor]:
    """The output that is compared, and the mean over the whole batch."""
    result = model(*inputs)
    output = strange.output(result)
    if strange.own_loss:
        return output, result[1]
    loss = functional.mse_loss(output, torch.ones_like(output).cos())
    return output, loss if grid is None else ff.global_mean(loss, len(output), grid)


def train(strange: Strange, model: nn.Module, grid: Grid | None, rows: int, steps: int = 2) -> dict[str, Any]:
    """Output, loss and gradients of inputs and parameters of the first step; losses and parameters of AdamW steps."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, fused=True) if grid is None else LocalAdamW(trained)
    found: dict[str, Any] = {}
    for step in range(steps):
        whole = strange.inputs(rows, step)
        inputs = tuple(part if grid is None else ff.local_rows(part, grid).clone() for part in whole)
        leaves = [part.requires_grad_() for part in inputs if part.is_floating_point()]
        output, loss = loss_of(strange, model, inputs, grid)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        if step == 0:
            found["output"] = output.detach().as_subclass(Tensor) if grid is None else output.detach()
            found |= {f"input {number}": leaf.grad for number, leaf in enumerate(leaves)}
            found |= {f"gradient of {name}": value for name, value in gradients(model, grid).items()}
        unused(model)
        optimizer.step()
        model.zero_grad()
    values = dict(model.named_parameters(remove_duplicate=False)) if grid is None else whole_tensors(model)
    return found | {f"parameter {name}": value.detach() for name, value in values.items()}


def unused(model: nn.Module) -> None:
    """What took no part counts as 0, for LocalAdamW takes all."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def gradients(model: nn.Module, grid: Grid | None) -> dict[str, Tensor]:
    if grid is not None:
        return whole_tensors(model, "gradient")
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in parameters}


def differences(one: dict[str, Tensor], two: dict[str, Tensor], grid: Grid) -> list[str]:
    wrong = []
    for name in sorted(one.keys() | two.keys()):
        if name not in one or name not in two:
            wrong.append(f"{name} is on one side only")
            continue
        expected, found = one[name], two[name]
        if name == "output" or name.startswith("input"):
            expected = ff.local_rows(expected, grid)
        if expected.shape != found.shape:
            wrong.append(f"{name}: {tuple(found.shape)}, not {tuple(expected.shape)}")
            continue
        error = (expected - found).abs().max().item() / max(expected.abs().max().item(), 1e-2)
        if not error <= TOLERANCE:
            wrong.append(f"{name}: {error:.1e}")
    return wrong


def check_strange(names: list[str], shape: Shape, mode: str, **options: Any) -> dict[str, list[str]]:
    grid = grid_of(shape)
    found = {}
    for name in names:
        strange, rows = STRANGE[name], 2 * shape.data * shape.z
        one = train(strange, strange.build(), None, rows)
        try:
            model = ff.parallelize(strange.build(), grid, policy=Policy(activations=mode, **options))  # type: ignore[arg-type]
            wrong = differences(one, train(strange, model, grid, rows), grid)
        except Exception as error:
            import traceback

            wrong = [traceback.format_exc()]
        if wrong:
            found[name] = wrong
    return found

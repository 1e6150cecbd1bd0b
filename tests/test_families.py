"""Any family on any grid computes what the unmodified model computes on one process.

For each case: loss, logits and every gradient of the first step; losses and parameters of three AdamW steps; names,
shapes and values of `state_dict` after the plain model's has been loaded; greedy generation from the loaded weights.
soak_families.py walks every family over many grids; here each has two, which together cut all four axes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import fourfold as ff
from families import FAMILIES, Case, batch, build, generate
from fourfold.grid import AXES, Shape
from fourfold.layout import Policy
from fourfold.parallelize import whole_tensors
from harness import Ranks, grid_of
from parity import LocalAdamW, local_block

STEPS = 3
PAIRS = [
    (Shape(x=2, y=2), Shape(z=2, data=2)),
    (Shape(x=2, z=2), Shape(y=2, data=2)),
    (Shape(y=2, z=2), Shape(x=2, data=2)),
]
"""All of 4 ranks, so that one pool imports transformers once."""


def cases() -> list[Case]:
    found = []
    for number, (name, family) in enumerate((n, f) for n, f in FAMILIES.items() if not f.extra):
        for turn, shape in enumerate(PAIRS[number % len(PAIRS)]):
            found.append(
                Case(
                    name,
                    shape,
                    ("sharded", "replicated")[(number + turn) % 2],
                    padded=turn == 1 and family.batch != "images",
                    widened=(number // 2 + turn) % 2 == 1,
                )
            )
    return found


@pytest.mark.parametrize("case", cases(), ids=str)
def test_family_on_a_grid_equals_the_plain_model(ranks, case: Case) -> None:
    check(ranks(case.shape.world), case)


def test_every_family_meets_every_axis_and_both_modes() -> None:
    for name in {case.name for case in cases()}:
        own = [case for case in cases() if case.name == name]
        assert {axis for case in own for axis in AXES if case.shape.sizes[axis] > 1} == set(AXES), name
        assert {case.activations for case in own} == {"sharded", "replicated"}, name
        assert {case.widened for case in own} == {False, True}, name


def check(pool: Ranks, case: Case, timeout: float = 60) -> float:
    """The largest error; raises where one is above the tolerance, or names, shapes or tokens differ."""
    pool.start(on_ranks, case)
    one = on_one_process(case.alone)
    ranks = pool.results(timeout)
    worst = errors(case, one, ranks)
    wrong = {kind: f"{error:.1e} in {name}" for kind, (error, name) in worst.items() if not error <= case.tolerance}
    assert not wrong, f"{case}: above {case.tolerance}: {wrong}"
    for found in ranks:
        assert found["shapes"] == one["shapes"], f"{case}: {sorted(found['shapes'].items() ^ one['shapes'].items())}"
        assert found["tokens"] == one["tokens"], f"{case}: {found['tokens']} generated instead of {one['tokens']}"
    return max(error for error, _ in worst.values())


@cache
def on_one_process(case: Case) -> dict[str, Any]:
    model = build(case.name)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    found: dict[str, Any] = {"losses": [], "shapes": shapes(start), "state": start}
    optimizer = torch.optim.AdamW(model.parameters(), **case.adam, fused=True)
    for step in range(STEPS):
        with case.arithmetic(case.padded):
            output = model(**batch(case, step))
        output.loss.backward()
        if step == 0:
            found["logits"] = output.logits.detach()
            found["gradients"] = {name: p.grad.clone() for name, p in named(model)}
        found["losses"].append(output.loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found["parameters"] = {name: p.detach().clone() for name, p in named(model)}
    model.load_state_dict(start)
    found["tokens"] = generate(model, case).tolist() if case.family.generates else None
    return found


def named(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """A tied weight under each of its names, as in `state_dict`."""
    return model.named_parameters(remove_duplicate=False)


def on_ranks(case: Case) -> dict[str, Any]:
    grid = grid_of(case.shape)
    model = build(case.name)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    model = ff.parallelize(model, grid, policy=Policy(activations=case.activations))
    found: dict[str, Any] = {"losses": [], "coords": grid.coords}
    optimizer = adamw(model, case)
    for step in range(STEPS):
        inputs = {name: ff.local_rows(rows, grid).to(grid.device) for name, rows in batch(case, step).items()}
        with case.arithmetic(case.padded):
            output = model(**inputs)
        output.loss.backward()
        if step == 0:
            found["logits"] = array(output.logits)
            found["gradients"] = arrays(whole_tensors(model, "gradient"))
        found["losses"].append(output.loss.item())
        optimizer.step()
        model.zero_grad()
    found["parameters"] = arrays(whole_tensors(model, "parameter"))
    model.load_state_dict(start)
    state = model.state_dict()
    found["shapes"] = shapes(state)
    found["state"] = arrays(
        {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    )
    found["tokens"] = generate(model, case).tolist() if case.family.generates else None
    return found


def adamw(model: torch.nn.Module, case: Case) -> Any:
    if case.through_dtensors:
        return torch.optim.AdamW(model.parameters(), **case.adam, fused=True)
    optimizer = LocalAdamW(model.parameters())
    optimizer.adamw.param_groups[0].update(case.adam)
    return optimizer


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in state.items()}


def array(tensor: Tensor) -> Any:
    """numpy: a tensor would cross the pipe as shared memory."""
    return tensor.detach().cpu().numpy().copy()


def arrays(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {name: array(tensor) for name, tensor in tensors.items()}


def errors(case: Case, one: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """Law 1's error by kind, with the name and rank where it is largest: max|a - b| / max(max|b|, s), s the largest
    value of that kind over the whole model."""
    worst: dict[str, tuple[float, str]] = {}

    def compare(kind: str, name: str, a: Any, b: Tensor | None, scale: float) -> None:
        same = a is not None and b is not None and a.shape == b.shape
        difference = (torch.as_tensor(a) - b).abs().max().item() if same else math.inf
        error = difference / scale if math.isfinite(difference) else math.inf
        worst[kind] = max(worst.get(kind, (0.0, "")), (error, name))

    for rank, found in enumerate(ranks):
        losses = torch.tensor(one["losses"])
        compare("losses", f"rank {rank}", torch.tensor(found["losses"]), losses, losses.abs().max().item())
        logits = local_block(one["logits"], case.shape, found["coords"])
        compare("logits", f"rank {rank}", found["logits"], logits, one["logits"].abs().max().item())
        for kind in ("gradients", "parameters", "state"):
            scale = max(whole.abs().max().item() for whole in one[kind].values())
            for name in one[kind].keys() | found[kind].keys():
                compare(kind, f"{name} on rank {rank}", found[kind].get(name), one[kind].get(name), scale)
    return worst

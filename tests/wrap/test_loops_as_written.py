"""Loops as people write them: copies of weights that are kept and put back, statistics, penalties, moving targets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold import gate
from fourfold.grid import Shape
from fourfold.policy import Policy
from harness import grid_of
from share import others_slow

TOLERANCE = 1e-10
Wrap = Callable[[Any], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def step(model: Any, optimizer: Any, x: Tensor) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1)


def numbers(model: Any, at: str = "") -> dict[str, Tensor]:
    return {at + name: torch.tensor(p.detach().tolist(), dtype=torch.float64) for name, p in model.named_parameters()}


# each trains a model on its rows and returns what both must have alike


def average_for_evaluation(model: Any, x: Tensor) -> dict[str, Tensor]:
    """An average that takes the place of the weights, which are put back."""
    optimizer, shadow, backup = sgd(model), {name: p.data.clone() for name, p in model.named_parameters()}, {}
    for _ in range(2):
        step(model, optimizer, x)
        for name, p in model.named_parameters():
            shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
    for name, p in model.named_parameters():
        backup[name] = p.data
        p.data = shadow[name]
    found = numbers(model, "average ")
    for name, p in model.named_parameters():
        p.data = backup[name]
    step(model, optimizer, x)
    return found


def weights_kept(model: Any, x: Tensor) -> dict[str, Tensor]:
    """By deepcopy, as a search for the learning rate does, with its optimizer's state."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    step(model, optimizer, x)
    kept, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    step(model, optimizer, x)
    model.load_state_dict(kept)
    optimizer.load_state_dict(state)
    found = numbers(model, "kept ")
    step(model, optimizer, x)
    return found


def beside_plain_tensors(model: Any, x: Tensor) -> dict[str, Tensor]:
    """An average, a Fisher matrix and a plain model beside sharded ones."""
    optimizer, plain = sgd(model), Net().double()
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    average, fisher = ({name: torch.zeros(p.shape, dtype=p.dtype) for name, p in old.items()} for _ in range(2))
    for _ in range(2):
        step(model, optimizer, x)
        model(x).square().mean().backward()
        for name, p in model.named_parameters():
            fisher[name] += p.grad.data.pow(2)
            average[name].mul_(0.9)
            average[name] += 0.1 * p.data
            average[name] = average[name] + 0.1 * p.detach()
        model.zero_grad()
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            p.data.copy_(0.1 * q.data + 0.9 * average["up.weight"].mean())
    loss = model(x).square().mean()
    for name, p in model.named_parameters():
        loss = loss + (fisher[name] * (p - old[name]) ** 2).sum()
    loss.backward()
    optimizer.step()
    return numbers(plain, "plain ") | {f"average {name}": value for name, value in average.items()}


def statistics(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Numbers that are written into plain tensors."""
    model(x).square().mean().backward()
    each, total = torch.zeros(6, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for at, p in enumerate(model.parameters()):
        each[at] = p.grad.norm()
        total += p.grad.norm() ** 2
    weight = model.up.weight.detach()
    some, every, ones = torch.zeros(4).double(), torch.zeros(2, 8, 6).double(), torch.ones(3).double()
    some[0], some[1:2], some[2] = weight.mean(), weight.sum(), weight[7, 5]
    some[3] += weight.abs().max()
    every[0] = weight
    every[1].add_(weight)
    found = {"each": each, "total": total, "some": some, "every": every, "scaled": ones * weight.norm()}
    with torch.inference_mode():
        found["inference"] = torch.tensor([p.norm().item() for p in model.parameters()]).double()
    return {name: torch.tensor(value.tolist(), dtype=torch.float64) for name, value in found.items()}


def without_a_rule(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Operations that torch has no rule for on shards."""
    model(x).square().mean().backward()
    with torch.no_grad():
        weight = model.up.weight
        weight.copy_(torch.renorm(weight, 2, 0, 0.8))
        left, _ = torch.linalg.qr(model.down.weight.grad @ model.down.weight.grad.T + torch.eye(6).double())
        model.down.weight.sub_(left @ model.down.weight.grad, alpha=0.1)
        torch.add(model.norm.weight, 1, out=model.norm.weight)
        torch.clamp(weight, max=0.1, out=weight)
        for row in weight:
            row.div_(row.norm())
        weight.fill_diagonal_(0.5)
        nn.init.eye_(model.up.weight[:, :3])
        for p in model.parameters():  # adaptive clipping
            most = p.detach().norm().clamp_(min=1e-3).mul_(0.01)
            p.grad.copy_(p.grad * torch.minimum(most / p.grad.norm().clamp_(min=1e-6), torch.ones(())))
            p.sub_(p.grad)
    return {"values": torch.tensor(float(len(weight.unique())))}


def masks_from_hooks(model: Any, x: Tensor) -> dict[str, Tensor]:
    mask = drawn(8, 6, seed=9) > 0
    model.up.weight.register_hook(lambda gradient: gradient * mask)
    for _ in range(2):
        step(model, sgd(model), x)
    return {}


def frozen_views(model: Any, x: Tensor) -> dict[str, Tensor]:
    """Changed with gradients enabled, as torch allows for tensors that require none."""
    model.up.requires_grad_(False)
    model.up.weight[0].zero_()
    model.up.weight[:, 1].fill_(3)
    model.up.bias.view(-1)[0] = 4
    step(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1), x)
    return {}


LOOPS = [
    *(average_for_evaluation, weights_kept, beside_plain_tensors, statistics, without_a_rule, masks_from_hooks),
    frozen_views,
]


# a target that moves


class Byol(nn.Module):
    def __init__(self, moves: str) -> None:
        super().__init__()
        self.online, self.predictor, self.moves = Net(), nn.Linear(6, 6), moves
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)
        self.target.up.weight.data.mul_(0.5)

    @torch.no_grad()
    def move(self) -> None:
        for p, q in zip(self.target.parameters(), self.online.parameters(), strict=True):
            if self.moves.startswith("data"):
                p.data = p.data * 0.9 + q.data * 0.1
            elif self.moves.startswith("copy"):
                p.copy_(0.9 * p + 0.1 * q)
            else:
                p.mul_(0.9).add_(q, alpha=0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.moves.endswith("first"):
            self.move()
        online = functional.normalize(self.predictor(self.online(x)), dim=-1)
        with torch.no_grad():
            target = functional.normalize(self.target(x + 0.1), dim=-1)
        if self.moves.endswith("last"):
            self.move()
        return 2 - 2 * (online * target).sum(-1).mean()


def byol(moves: str) -> Callable[[Any, Tensor], dict[str, Tensor]]:
    def loop(model: Any, x: Tensor) -> dict[str, Tensor]:
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
        for _ in range(3):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if moves.endswith("outside"):
                model.move()
        return {}

    loop.__name__ = f"target moved by {moves}"
    return loop


WAYS = [f"{how} {where}" for how in ("add", "copy", "data") for where in ("first", "last", "outside")]


def differences(shape: Shape) -> dict[str, Any]:
    grid, found = grid_of(shape), {}
    makes: list[tuple[Callable[[], Any], Any]] = [(lambda: Net().double(), loop) for loop in LOOPS]
    if shape.y == 1:
        makes += [(lambda moves=moves: Byol(moves).double(), byol(moves)) for moves in WAYS]
    for make, loop in makes:
        torch.manual_seed(0)
        one = make()
        torch.manual_seed(0)
        model = ff.parallelize(make(), grid)
        try:
            expected = loop(one, drawn(4, 6)) | numbers(one)
            got = loop(model, ff.local_rows(drawn(4, 6), grid).clone()) | numbers(model)
        except Exception as error:
            found[loop.__name__] = f"{type(error).__name__}: {error}"
            continue
        error = max((got[name] - value).abs().max().item() for name, value in expected.items())
        if not error <= TOLERANCE:
            found[loop.__name__] = error
    return found


SHAPES = [Shape(x=2), Shape(y=2), Shape(z=2), Shape(x=2, z=2)]


@pytest.mark.parametrize("shape", others_slow(SHAPES, 2), ids=str)
def test_loops_train_as_on_one_process(ranks, shape: Shape) -> None:
    assert ranks(shape.world).run(differences, shape, timeout=240) == [{}] * shape.world


# a forward pass with gradients on one rank alone


def call_alone(first: bool) -> tuple[str, float]:
    grid = grid_of(Shape(x=2))
    torch.manual_seed(0)
    model = ff.parallelize(Net().double(), grid, policy=Policy())
    if not first:
        model(drawn(4, 6)).square().mean().backward()
    gate.PASS_SECONDS, before, said = 1.0, gate.PASS_SECONDS, ""
    try:
        if grid.rank == 0:
            with pytest.raises(RuntimeError) as refused:
                model(drawn(4, 6))
            said = str(refused.value)
    finally:
        gate.PASS_SECONDS = before
    loss = model(drawn(4, 6)).square().mean()
    loss.backward()
    with pytest.raises(ValueError, match="read-only"):  # one process would share its memory with the parameter
        model.up.weight.data.numpy()[0] = 0
    return said, loss.item()


@pytest.mark.parametrize("first", [True, False], ids=["the first pass", "a later pass"])
def test_a_rank_that_trains_alone_is_refused_and_both_go_on(ranks, first: bool) -> None:
    (said, loss), (nothing, other) = ranks(2).run(call_alone, first)
    assert "a forward pass at test_loops_as_written.py:" in said
    assert "rank 1 did not come here within 1 s" in said
    assert (nothing, other) == ("", loss)

"""Loops that change parameters and gradients by hand train as on one process, or are told what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.grid import Shape
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from harness import grid_of

TOLERANCE = 1e-10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))


def build() -> Any:
    torch.manual_seed(0)
    return Net().double()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


MASK, VALUES = drawn(8, 6, seed=1) > 0, drawn(8, 6, seed=2)


# what a loop does to the parameters, without gradients


def entries(m: Any) -> None:
    m.up.weight[0] = 0
    m.up.weight[1, 2:4] = 0.5
    m.down.weight[:, 0] = 3
    m.down.weight[2] = m.down.weight[3]
    m.up.bias[3] = 1
    m.norm.weight[torch.tensor([1, 2])] = VALUES[0, :2]


def views(m: Any) -> None:
    """Of rows, columns and pieces, of which torch gathers some."""
    m.up.weight[0].zero_()
    m.up.weight[:, 2].fill_(0.5)
    m.up.weight[1:3][0].mul_(2)
    m.up.weight.view(-1)[3:40] *= 2
    m.down.weight[1] += 1
    m.down.weight[0][2] = 5
    m.down.weight.data.t()[3].add_(VALUES[0, 0])
    m.norm.weight.chunk(2)[1].copy_(VALUES[0, :4])


def entries_of_data(m: Any) -> None:
    m.up.weight.data[0] = 0
    m.down.weight.data[:, 1:3] = VALUES[:6, :2]
    m.norm.bias.data[-1] += 2


def by_a_mask(m: Any) -> None:
    m.up.weight[m.up.weight.abs() < 0.1] = 0
    m.up.weight[MASK] = 0.25
    m.down.weight.masked_fill_(m.down.weight > 0.2, -1)


def by_plain_tensors(m: Any) -> None:
    m.up.weight.mul_(MASK)
    m.up.weight.data *= MASK
    m.up.weight.copy_(VALUES)
    m.up.weight.data = m.up.weight.data * 2
    m.down.weight.data = VALUES.t().clone()
    m.down.weight.add_(VALUES.t(), alpha=0.1)


def standardised(m: Any) -> None:
    w = m.up.weight
    w.sub_(w.mean(dim=1, keepdim=True))
    w.div_(w.norm(dim=1, keepdim=True))
    m.down.weight.div_(m.down.weight.norm(dim=0, keepdim=True).clamp(min=0.1))


def transposed(m: Any) -> None:
    m.up.weight.t().mul_(MASK.t())
    m.down.weight.data.t()[:2] = 0


def drawn_by_each_rank(m: Any) -> None:
    """Plain noise that ranks draw differently counts as rank 0 has drawn it: replicas stay equal."""
    rank = torch.distributed.get_rank() if isinstance(m.up.weight, torch.distributed.tensor.DTensor) else 0
    for p in m.parameters():
        p.add_(drawn(*p.shape, seed=rank))


def read_beside_plain(m: Any) -> None:
    average = VALUES.clone()
    average.lerp_(m.up.weight, 0.5)
    m.up.bias += (m.up.weight - VALUES).norm() + (average @ drawn(6)).sum() + (m.up.weight @ drawn(6)).sum()


def by_numbers(m: Any) -> None:
    """Numbers that owe a sum or a norm, with a plain number first, then with each other."""
    for p in m.parameters():
        for owing in (p.norm(), p.sum(), p.flatten().max(), p.abs().mean()):
            settled = 0.01 * p.norm()
            p.add_(1e-3 * ((owing + 1e-6) + (owing + settled) / (1.0 + owing * settled)))


PARAMETERS: list[Callable[[Any], None]] = [
    *(entries, views, entries_of_data, by_a_mask, by_plain_tensors, standardised, transposed, drawn_by_each_rank),
    *(read_beside_plain, by_numbers),
]

# what a loop does to the gradients, after backward


def centralised(m: Any) -> None:
    for p in m.parameters():
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
            p.grad -= p.grad.mean(dim=0, keepdim=True)
            p.grad.data.add_(-p.grad.data.mean(dim=tuple(range(1, p.dim())), keepdim=True))


def replaced(m: Any) -> None:
    m.up.weight.grad = VALUES.clone()
    for p in (m.down.weight, m.norm.weight):
        p.grad = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad) * 0.5
    m.up.bias.grad = m.up.bias.grad * 2
    m.norm.bias.grad = torch.zeros_like(m.norm.bias)


def by_data(m: Any) -> None:
    for p in m.parameters():
        p.grad.data = p.grad.data * 2
    m.up.weight.grad.data = VALUES.clone()
    m.up.weight.grad[0] = 0
    m.up.weight.grad *= MASK
    del m.norm.bias.grad


GRADIENTS: list[Callable[[Any], None]] = [centralised, replaced, by_data]


def steps(model: Any, x: Tensor, change: Callable[[Any], None]) -> None:
    """Two steps; what was set before the first is added to."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if change is replaced:
        model.up.weight.grad = VALUES.clone()
    for _ in range(2):
        model(x).square().mean().backward()
        with torch.no_grad():
            change(model)
        if change in GRADIENTS:  # and once more on top of it
            model(x + 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def differences(shape: Shape, shard_optimizer: bool = False) -> dict[str, float]:
    grid, found = grid_of(shape), {}
    for change in (*PARAMETERS, *GRADIENTS):
        one, model = build(), ff.parallelize(build(), grid, policy=Policy(shard_optimizer=shard_optimizer))
        steps(one, drawn(4, 6), change)
        steps(model, ff.local_rows(drawn(4, 6), grid).clone(), change)
        whole = whole_tensors(model)
        found[change.__name__] = max((whole[name] - p).abs().max().item() for name, p in one.named_parameters())
    return {name: error for name, error in found.items() if not error <= TOLERANCE}


@pytest.mark.parametrize("shape", [Shape(x=2), Shape(y=2), Shape(z=2), Shape(data=2)], ids=str)
def test_changes_by_hand_are_those_of_one_process(ranks, shape: Shape) -> None:
    assert ranks(2).run(differences, shape) == [{}] * 2


@pytest.mark.slow
@pytest.mark.parametrize("shape", [Shape(x=2, y=2), Shape(x=2, z=2), Shape(y=2, data=2)], ids=str)
def test_changes_by_hand_on_two_axes_and_with_a_sharded_optimizer(ranks, shape: Shape) -> None:
    assert ranks(4).run(differences, shape, shape.data > 1) == [{}] * 4

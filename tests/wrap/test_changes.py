"""Model code that changes activations in place, or hands them to autograd functions of its own, trains as on one rank.

Each way to do so is a function of a module `m` (layers a: 6 -> 8, b: 8 -> 6, a norm, a parameter w) and its input
[rows, 5, 6]. Output, loss and every gradient are compared with one process, in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fourfold as ff
from fourfold.grid import Shape
from fourfold.policy import Policy
from fourfold.wrap import whole_tensors
from harness import grid_of
from share import share

TOLERANCE = 1e-9


class Straight(torch.autograd.Function):
    """Rounds; its gradient passes as if it did not."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Product(torch.autograd.Function):
    """A linear layer by hand, given a weight of the model."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(a, weight)
        return a @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ a.flatten(0, 1)


def set_item(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[..., :3] = 0.5
    return m.b(h)


def set_rows(m: Any, x: Tensor) -> Tensor:
    h = m.norm(x)
    h[:, 0] = m.w
    return m.b(m.a(h))


def set_masked(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h[h > 0.3] = 0.1
    return m.b(h)


def add_to_index(m: Any, x: Tensor) -> Tensor:
    h = m.norm(x)
    out = torch.zeros_like(h)
    out.index_add_(1, torch.tensor([0, 2, 2]), h[:, 1:4])
    return m.b(m.a(out))


def scatter(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    out = torch.zeros_like(h).scatter_(-1, h.argsort(-1), h)
    return m.b(out)


def several(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h += 1
    h.mul_(0.5).clamp_(min=-0.2)
    h -= h.mean(-1, keepdim=True)
    h.add_(m.a(x), alpha=0.1)
    return m.b(functional.relu(h, inplace=True))


def view_of_the_stream(m: Any, x: Tensor) -> Tensor:
    h = m.norm(x)
    turned = h.transpose(0, 1)
    turned[0] = turned[1] * 2
    return m.b(m.a(h))


def the_stream_of_a_view(m: Any, x: Tensor) -> Tensor:
    h = m.norm(x)
    turned, flat = h.transpose(0, 1), h.view(-1, 6)
    h.mul_(2)
    flat[:, 0] = 1
    return m.b(m.a(turned.transpose(0, 1) + flat.view(h.shape)))


def two_views(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    first, turned = h[..., :4], h.transpose(1, 2)
    first.zero_()
    return m.b(h) + turned.sum(1, keepdim=True).transpose(1, 2)


def without_gradients(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    with torch.no_grad():
        h[:, 1:, 2] = 3
        h.abs_()
    return m.b(h)


def logits_in_place(m: Any, x: Tensor) -> Tensor:
    out = m.b(m.a(x))
    out[..., 0] = -1
    out.div_(2)
    return out.masked_fill_(out > 0.5, 0.5)


def norm_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.norm(x)
    h += x
    return m.b(m.a(h))


def detached(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    frozen = h * 1
    frozen.detach_()
    return m.b(h + frozen)


def unknown_in_place(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    functional.threshold(h, 0.0, 0.1, inplace=True)
    h = functional.hardtanh(h, inplace=True) + 0
    return m.b(functional.elu_(h))


def copied(m: Any, x: Tensor) -> Tensor:
    h, g = m.a(x), m.a(x * 2)
    h.copy_(g.tanh())
    h.fill_diagonal_(0.2) if h.dim() == 2 else h.cumsum_(1)
    return m.b(h)


def function(m: Any, x: Tensor) -> Tensor:
    return m.b(Straight.apply(3 * m.a(x)))


def function_of_weight(m: Any, x: Tensor) -> Tensor:
    return m.b(Product.apply(m.norm(x), m.a.weight))


def function_in_place(m: Any, x: Tensor) -> Tensor:
    h = Straight.apply(3 * m.a(x))
    h += 0.25
    return m.b(h)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    way.__name__: way
    for way in (
        *(set_item, set_rows, set_masked, add_to_index, scatter, several, view_of_the_stream, the_stream_of_a_view),
        *(two_views, without_gradients, logits_in_place, norm_in_place, detached, unknown_in_place, copied),
        *(function, function_of_weight, function_in_place),
    )
}


class Module(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.w = (
            nn.Linear(6, 8),
            nn.Linear(8, 6),
            nn.LayerNorm(6),
            nn.Parameter(torch.ones(6)),
        )
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return WAYS[self.way](self, x)


class Experts(nn.Module):
    """What Hugging Face's eager experts do: a loop over those that were hit, which adds to rows of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 8, 6)), nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, h: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            inner = functional.silu(functional.linear(h[rows], self.up[expert]))
            out.index_add_(0, rows, functional.linear(inner, self.down[expert]) * weights[rows, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(6), nn.Linear(6, 3, bias=False), Experts()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(h).softmax(-1).topk(2)
        return x + self.experts(h, chosen, weights).view(x.shape)


def build(way: str) -> nn.Module:
    torch.manual_seed(0)
    return (Mixture() if way == "mixture" else Module(way)).double()


def step(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    output = model(x)
    loss = functional.mse_loss(output, y)
    loss.backward()
    return output.detach(), loss.detach()


def differences(way: str, shape: Shape, mode: str) -> dict[str, float]:
    """The largest error of each kind, of two steps."""
    grid = grid_of(shape)
    one, model = build(way), ff.parallelize(build(way), grid, policy=Policy(activations=mode))
    found = {}
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(2, 4, 5, 6, generator=generator, dtype=torch.float64)
        expected, _ = step(one, x, y)
        output, _ = step(model, ff.local_rows(x, grid).clone(), ff.local_rows(y, grid))
        found[f"output {number}"] = (output - ff.local_rows(expected, grid)).abs().max().item()
        gradients = whole_tensors(model, "gradient")
        for name, p in one.named_parameters():
            wanted = torch.zeros_like(p) if p.grad is None else p.grad
            found[f"{name} {number}"] = (gradients[name] - wanted).abs().max().item()
        one.zero_grad()
        model.zero_grad()
    if way in ("mixture", "set_rows", "function_of_weight") and shape.x > 1:
        said = ff.explain(model)
        found["explained"] = 0.0 if "whole tensors because of" in said or "Made whole" in said else 1.0
    return found


SHAPES = [Shape(x=2), Shape(y=2), Shape(x=2, y=2), Shape(x=2, z=2), Shape(y=2, data=2), Shape(z=2)]
CASES = [
    (way, shape, ("sharded", "replicated")[(number + at) % 2])
    for number, way in enumerate((*WAYS, "mixture"))
    for at, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("way", "shape", "mode"), share(CASES, 29), ids=str)
def test_changes_in_place_and_functions_are_exact(ranks, way: str, shape: Shape, mode: str) -> None:
    for found in ranks(shape.world).run(differences, way, shape, mode):
        wrong = {name: error for name, error in found.items() if not error <= TOLERANCE}
        assert not wrong, wrong
